"""How the Hopper forward pass is cut: a pure table from a call to the tiles of a CTA."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.kernels.gluon.forward.kernel import Tile
from tilewise.kernels.spec import AttentionSpec

__all__ = ["GROUP_ROWS", "WIDTHS", "tile_config_fwd"]

Dims = tuple[int, ...]
WIDTHS = (64, 128, 256)  # heads are padded to the next one, by zeros that TMA supplies
GROUP_ROWS = 64  # of a warpgroup's products
# Widths of q and k that lie between are two products: of 96 channels 64 and 32.
_SPLITS = ((64, 32), (128, 64))
_LONG = 4096  # queries


class _Row(NamedTuple):
    """The choices of one entry of the table `_ROWS`; fields are those of `kernel.Tile`."""

    warpgroups: int = 2
    keys: int = 128
    stages: int = 2
    ping_pong: bool = True
    q_in_registers: bool = False
    release_together: bool = False
    scale_late: bool = False
    halves: bool = False  # o leaves through a buffer of half its columns
    bias_stages: int = 0


# (D, Dv), padded, and a kind: "even" where all tiles of rows cost the same, "uneven" where they do
# not, "long" where such sequences have more than 4,096 queries, "shaped" where they have caps or
# ALiBi, "crowded" where a call adds so much to the softmax that registers are short,
# "biased" where a bias comes by copies. A missing kind takes the row of "uneven" if it is "long",
# else that of "even".
# Measured on one H200, bf16, 16,384 tokens, hidden size 2,048, sequences of 1,024 to 16,384, on
# 2026-11-20, in TFLOP/s at 1,024 / 4,096 / 16,384 (cuDNN in the same run):
#   D 64:  even 453 / 553 / 536 (435 / 465 / 447); causal 348 / 468 / 519 (337 / 431 / 457);
#          two warpgroups instead of three: even 429 at 1,024 (435).
#   D 128: even 609 / 701 / 632 (573 / 664 / 605); causal 467 / 657 / 692 (428 / 544 / 534);
#          K and V of a step released together, or q in registers where tiles are even: 1 % less.
#   D 256: even 676 / 758 / 738 (626 / 725 / 695); causal 484 / 675 / 711 (450 / 594 / 644);
#          shared memory has room for two stages because o leaves in halves; K and V released
#          together at 4,096, causal: 2.7 % more (2026-11-22);
#          acc rescaled late (2026-11-23, in turns with acc rescaled at once and FlashAttention-4):
#          651 / 695 / 721, at once 651 / 681 / 698, FlashAttention-4 617 / 686 / 740; causal
#          476 / 709 / 706, at once 477 / 701 / 677, FlashAttention-4 439 / 709 / 717. At D 64 and
#          128 it gains nothing or loses up to 10 %.
#   D 192 with Dv 128 at 4,096: even 715, causal 676; padded to 256 channels 569 and 506.
# At D 128, N 4,096: an even cap 602 in turns, 540 without, 532 with q in registers; a causal one
# 519 and 507 (without turns); dropout, even and causal, 429 and 430, without turns 427 and 425,
# with q in registers 385 and 377.
# A bias by copies, N 4,096, causal and even, of the plain call's speed (H100, 2026-11-27): D 64
# 0.77 and 0.64 (by loads 0.37 and 0.34; q from shared memory 0.68 and 0.61), D 128 0.82 and 0.80
# (0.47 and 0.44; blocks of 64 keys 0.72 and 0.61).
_ROWS = {
    (64, 64, "even"): _Row(warpgroups=3, stages=3, release_together=True),
    (64, 64, "uneven"): _Row(stages=4, q_in_registers=True),
    (64, 64, "long"): _Row(warpgroups=3, stages=3, release_together=True),
    (64, 64, "shaped"): _Row(stages=4, q_in_registers=True),
    (64, 64, "crowded"): _Row(stages=4),
    (64, 64, "biased"): _Row(stages=4, q_in_registers=True, bias_stages=2),
    (64, 64, "three biased"): _Row(warpgroups=3, stages=3, release_together=True, bias_stages=1),
    (64, 128, "even"): _Row(stages=3),
    (64, 256, "even"): _Row(keys=64, ping_pong=False),
    (128, 64, "even"): _Row(),
    (128, 64, "uneven"): _Row(q_in_registers=True),
    (128, 128, "even"): _Row(),
    (128, 128, "uneven"): _Row(q_in_registers=True),
    (128, 128, "shaped"): _Row(q_in_registers=True),
    (128, 256, "even"): _Row(keys=64, ping_pong=False),
    (96, 64, "even"): _Row(),
    (96, 128, "even"): _Row(),
    (96, 256, "even"): _Row(keys=64, ping_pong=False),
    (192, 64, "even"): _Row(),
    (192, 128, "even"): _Row(halves=True),
    (192, 256, "even"): _Row(keys=64, ping_pong=False, halves=True),
    (256, 64, "even"): _Row(keys=64, ping_pong=False, halves=True),
    (256, 128, "even"): _Row(keys=64, ping_pong=False, halves=True),
    (256, 256, "even"): _Row(keys=64, ping_pong=False, halves=True, scale_late=True),
    (256, 256, "uneven"): _Row(
        keys=64, ping_pong=False, halves=True, release_together=True, scale_late=True
    ),
    (256, 256, "long"): _Row(keys=64, ping_pong=False, halves=True, scale_late=True),
}


def tile_config_fwd(
    spec: AttentionSpec, *, bias_rows: bool = True, bias_copied: bool = False
) -> Tile:
    """Return the Tile, how a CTA of the forward pass is cut, for `spec`.

    Args:
        bias_rows: True if there is a bias that differs from query to query.
        bias_copied: True if TMA brings the bias, tile by tile.
    """
    kind = "biased" if bias_copied else _kind_of(spec)
    if bias_copied and _adds_a_bias_alone(spec):
        kind = "three biased"
    most_keys = 128
    if spec.has_bias and bias_rows and not bias_copied:
        most_keys = 64  # of 128 keys, a bias and its addresses do not fit the registers
    if spec.mask_tile is not None:
        most_keys = min(most_keys, spec.mask_tile[1])
    dealt = kind != "even" and (spec.window_right >= 0 or _lengths_differ(spec))
    is_long = spec.max_seqlen_q > _LONG
    return _tile_of(spec.head_dim, spec.v_head_dim, kind, most_keys, dealt, is_long)


def _tile_of(
    head_dim: int, v_head_dim: int, kind: str, most_keys: int, dealt: bool, is_long: bool
) -> Tile:
    """Return the tile for calls of these head dims and kind, whatever their lengths.

    Args:
        kind: the kind of call, as in the keys of `_ROWS`: "even", "uneven", "long", "biased" ...
        most_keys: the largest number of keys that a block may have; fewer keys give more stages.
        dealt: True if a counter deals tiles to CTAs one by one.
        is_long: True if sequences have more than 4,096 queries.
    """
    d, rest = _split(head_dim)
    dv = _padded(v_head_dim)
    width = d + rest
    kinds = (kind, "uneven", "even") if kind == "long" else (kind, "even")
    row = next(_ROWS[width, dv, name] for name in kinds if (width, dv, name) in _ROWS)
    if kind == "biased" and row.bias_stages == 0:
        row = _Row(bias_stages=1)
    keys, stages = row.keys, row.stages
    if most_keys < keys:
        keys, stages = most_keys, stages * keys // most_keys
    return Tile(
        warpgroups=row.warpgroups,
        rows=row.warpgroups * GROUP_ROWS,
        keys=keys,
        stages=stages,
        d=d,
        d_high=rest,
        dv=dv,
        o_columns=dv // 2 if row.halves else dv,
        dynamic=dealt or _dealt_though_even(is_long, width, row.warpgroups),
        ping_pong=row.ping_pong,
        q_in_registers=row.q_in_registers,
        release_together=row.release_together,
        scale_late=row.scale_late,
        # Of 64 Ki registers: 168 a thread with three warpgroups, 128 with four, then shared out.
        registers=240 if row.warpgroups == 2 else 160,
        loader_registers=24 if row.warpgroups == 2 else 32,
        bias_stages=row.bias_stages,
    )


def _dealt_though_even(is_long: bool, width: int, warpgroups: int) -> bool:
    """Whether a counter deals out tiles even if all cost the same (H200, full calls, 2026-11-22).

    Of 192 rows the last tile of a head fills 64 where lengths are powers of two, and takes a third
    of the time: 6 % at 1,024 queries, 1.5 % at 4,096, and 1 % less than a fixed order at 16,384. At
    D 128 a fixed order is 1.2 % faster at 4,096, 3 % at 1,024, and as fast beyond; at D 256 2 to 4
    % everywhere.
    """
    if warpgroups == 3:
        return not is_long
    return width == 128 and is_long


def _kind_of(spec: AttentionSpec) -> str:
    adds_most = spec.dropout_p > 0 or spec.has_bias or spec.mask_tile is not None
    even = spec.window_right < 0 and spec.window_left < 0 and not _lengths_differ(spec)
    if adds_most:
        return "crowded"
    if spec.softcap > 0 or spec.has_alibi:
        return "crowded" if even else "shaped"
    if even:
        return "even"
    return "long" if spec.max_seqlen_q > _LONG and spec.window_left < 0 else "uneven"


def _adds_a_bias_alone(spec: AttentionSpec) -> bool:
    others = spec.dropout_p > 0 or spec.mask_tile is not None or spec.softcap > 0 or spec.has_alibi
    is_full = spec.window_right < 0 and spec.window_left < 0
    return max(spec.head_dim, spec.v_head_dim) <= 64 and is_full and not others


def _lengths_differ(spec: AttentionSpec) -> bool:
    return spec.is_varlen or spec.has_seqlens_k or spec.mask_tile is not None


def _split(width: int) -> tuple[int, int]:
    """Return the padded channels of q and k as those of the two products of which q k^T is made;
    the second is 0 where one product has all."""
    padded = _padded(width)
    for parts in _SPLITS:
        if width <= sum(parts) < padded:
            return parts
    return padded, 0


def _padded(width: int) -> int:
    return next(wide for wide in WIDTHS if wide >= width)
