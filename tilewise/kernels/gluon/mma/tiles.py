"""How attention by mma.sync is cut: pure tables from a call to the tiles of a CTA."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.kernels.gluon.backward.plan import features_of, order_of
from tilewise.kernels.gluon.backward.span import BwdVariant
from tilewise.kernels.gluon.mma.backward import Grids
from tilewise.kernels.gluon.mma.forward import Tile
from tilewise.kernels.gluon.mma.operands import CHUNK
from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.tiles.paged import WIDE_SHARED_MEMORY

__all__ = ["WIDTHS", "BwdTile", "choice_bwd", "tile_config_bwd", "tile_config_fwd"]

WIDTHS = (64, 128, 256, 512)  # heads are padded to the next one, by zeros


class _Row(NamedTuple):
    """The choices of one entry of the tables of forward tiles; fields are those of
    `forward.Tile`."""

    warps: int = 4
    parts: int = 2
    keys: int = 64
    stages: int = 1
    q_in_registers: bool = False
    across: int = 1


_LONG, _SHORT = 2048, 512  # queries

# Of the larger of D and Dv, padded, for devices with 163 KiB of shared memory (sm_80, 87) and for
# those with 99 (sm_86, 89, 120). Kinds: "long" where all tiles cost the same and there are 2,048
# queries or more, "short" where they do not and there are at most 512, "crowded" where a call adds
# to the softmax what takes registers, "biased" where that is a bias, and no dropout or mask: 64
# keys of it would spill 224 bytes, 33 moves of them in the loop (Triton 3.7, sm_89), "copied" where
# cp.async brings this bias. A missing "copied" takes the row of "biased", that of "crowded", any
# other that of "plain".
# No row is taken whose CTAs would be fewer on such a device than on the one that measured it: at
# D 128, blocks of 64 keys in two stages are 3 % faster where shared memory holds two such CTAs.
# Measured on an H200 that ran the code of sm_80 (2026-11-29, bf16, 16,384 tokens, hidden 2,048),
# TFLOP/s at 512 / 1,024 / 4,096 / 16,384 queries, FlashAttention-2 in the same run in brackets:
#   D 64:  full 297 / 321 / 342 / 344 (264 / 289 / 304 / 307),
#          causal 200 / 254 / 318 / 327 (153 / 215 / 281 / 287)
#   D 128: full 310 / 334 / 360 / 361 (306 / 336 / 357 / 354),
#          causal 225 / 283 / 351 / 365 (184 / 249 / 306 / 320)
#   D 256: full 282 / 314 / 342 / 341 (285 / 308 / 327 / 324),
#          causal 216 / 262 / 329 / 346 (211 / 249 / 284 / 291)
# A bias of (1, Hq, N, N), N 4,096, full and causal, of the plain call: D 128 0.87 and 0.86 copied,
# 0.62 and 0.61 loaded; 0.80 and 0.80 by the row for 99 KiB; D 64 0.75 and 0.75, 0.53 and 0.53; 0.67
# and 0.69. At D 256 in 99 KiB "biased" makes 212, "crowded" would make 208.
# Rows for 99 KiB: D 128 full 290 / 319 / 360 / 361, causal 215 / 273 / 332 / 340; D 256 full
# 245 / 269 / 293 / 295, causal 184 / 230 / 283 / 296.
_LARGE = {
    (64, "plain"): _Row(stages=2, q_in_registers=True),
    (64, "crowded"): _Row(parts=1, stages=2, q_in_registers=True),
    (64, "copied"): _Row(stages=2, q_in_registers=True),
    (128, "plain"): _Row(keys=32, stages=2),
    (128, "long"): _Row(warps=8, parts=1, keys=128, q_in_registers=True),
    (128, "crowded"): _Row(parts=1),
    (128, "copied"): _Row(keys=32, stages=2),
    (256, "plain"): _Row(warps=8, parts=1),
    (256, "short"): _Row(parts=1, keys=32),
    (512, "plain"): _Row(warps=8, parts=1, keys=32, across=2),
}
_SMALL = _LARGE | {
    (64, "copied"): _Row(warps=8, parts=1, stages=2, q_in_registers=True),
    (128, "plain"): _Row(keys=32),
    (128, "copied"): _Row(warps=8, parts=1, q_in_registers=True),
    (256, "plain"): _Row(warps=8, parts=1, keys=32),
    (256, "short"): _Row(warps=8, parts=1, keys=32),
    (256, "crowded"): _Row(parts=1),
    (256, "biased"): _Row(warps=8, parts=1, keys=32),
    (512, "plain"): _Row(warps=8, parts=1, keys=16, across=2),
}


def tile_config_fwd(spec: AttentionSpec, arch: int, *, bias_copied: bool = False) -> Tile:
    """Return the Tile, how a CTA of the forward pass is cut, for `spec` on compute capability
    `arch`.

    Args:
        bias_copied: whether cp.async can bring the bias, as `attention.bias.copied_bias` has it.
    """
    adds = spec.dropout_p > 0 or spec.has_bias or spec.mask_tile is not None
    adds = adds or spec.softcap > 0 or spec.has_alibi
    # Blocks of 32 keys have no words of dropout and of masks.
    is_biased = spec.has_bias and spec.dropout_p == 0 and spec.mask_tile is None
    differ = spec.is_varlen or spec.has_seqlens_k or spec.mask_tile is not None
    dealt = differ or spec.window_right >= 0 or spec.window_left >= 0
    kind = "plain"
    if adds:
        kind = "crowded"
        if is_biased:
            kind = "copied" if bias_copied else "biased"
    elif dealt and spec.max_seqlen_q <= _SHORT:
        kind = "short"
    elif not dealt and spec.max_seqlen_q >= _LONG:
        kind = "long"
    return _tile_of(spec.head_dim, spec.v_head_dim, kind, dealt, arch in WIDE_SHARED_MEMORY)


def _tile_of(head_dim: int, v_head_dim: int, kind: str, dealt: bool, is_large: bool) -> Tile:
    d, dv = _padded(head_dim), _padded(v_head_dim)
    rows, width = (_LARGE if is_large else _SMALL), max(d, dv)
    others = {"copied": ("biased", "crowded"), "biased": ("crowded",)}.get(kind, ())
    row = next(rows[width, name] for name in (kind, *others, "plain") if (width, name) in rows)
    channels = -(-head_dim // CHUNK.value) * CHUNK.value
    return Tile(
        warps=row.warps,
        parts=row.parts,
        rows=16 * (row.warps // row.across) * row.parts,
        keys=row.keys,
        stages=row.stages,
        d=d,
        channels=channels,
        dv=dv,
        q_in_registers=row.q_in_registers and channels == d,
        padded=head_dim < d or v_head_dim < dv,
        dynamic=dealt,
        bias_stages=row.stages if kind == "copied" and (width, kind) in rows else 0,
        across=row.across,
    )


def _padded(width: int) -> int:
    return next(wide for wide in WIDTHS if wide >= width)


class BwdTile(NamedTuple):
    """How a CTA of the backward pass is cut.

    Attributes:
        queries, keys: the rows of a tile of each.
        warps: the warps of a CTA.
        scores: the grid of warps over s and dp, as (keys, queries).
        key_sums, query_sums: the grids over dk and dv, and over dq.
        stages: the tiles of queries in shared memory, 1 or 2.
        has_room: True if shared memory has room for a tile of a bias beside each tile of queries.
    """

    queries: int
    keys: int
    warps: int
    scores: tuple[int, int]
    key_sums: tuple[int, int]
    query_sums: tuple[int, int]
    stages: int = 2
    has_room: bool = False


# Of the larger of D and Dv, padded, for 163 KiB of shared memory and for 99. Measured as the
# forward pass was, TFLOP/s at 1,024 and 4,096 queries, FlashAttention-2 in brackets:
#   D 64:  full 258 / 288 (244 / 281), causal 199 / 271 (185 / 249)
#   D 128: full 278 / 315 (262 / 303), causal 217 / 299 (208 / 275)
#   D 256: full 212 / 235 (227 / 255), causal 184 / 240 (181 / 231); two stages of queries, for
#          which an A100 has no room: full 228 / 251; of 32 queries, which fit: full - / 224. Where
#          do is copied apart from q, each as soon as it is used up, full calls make 225 for 231.
#          For 99 KiB 16 queries of 64 keys make 158 full and 163 causal at 4,096, 32 of 32 134 and
#          136: half as much is added to dq.
#          A bias of D 128 in 99 KiB: copied 265, loaded 191, plain calls 279; copied beside 32
#          queries in two stages 258, by 8 warps 204 (lab/results/ampere_bias_h200.json).
# p and ds that go from product to product in registers, where warps lie over keys alone, are as
# fast at D 64 and slower at D 128 (234 for 315).
_BWD_LARGE = {
    64: BwdTile(32, 128, 4, (4, 1), (4, 1), (2, 2)),
    128: BwdTile(64, 128, 8, (4, 2), (4, 2), (2, 4)),
    256: BwdTile(64, 64, 8, (2, 4), (2, 4), (2, 4), stages=1),
    512: BwdTile(32, 32, 8, (2, 4), (2, 4), (2, 4), stages=1),
}
_BWD_SMALL = {
    64: BwdTile(64, 128, 8, (4, 2), (4, 2), (2, 4)),
    128: BwdTile(64, 64, 4, (2, 2), (2, 2), (2, 2), stages=1, has_room=True),
    256: BwdTile(16, 64, 8, (4, 2), (4, 2), (1, 8), stages=1),
    512: BwdTile(16, 32, 8, (2, 4), (2, 4), (1, 8), stages=1),
}


def tile_config_bwd(spec: AttentionSpec, arch: int) -> BwdTile:
    """Return the BwdTile, how a CTA of the backward pass is cut, for `spec` on compute capability
    `arch`."""
    rows = _BWD_LARGE if arch in WIDE_SHARED_MEMORY else _BWD_SMALL
    return rows[max(_padded(spec.head_dim), _padded(spec.v_head_dim))]


def choice_bwd(spec: AttentionSpec, tile: BwdTile) -> tuple[BwdVariant, Grids]:
    """Return the compile-time choices of the backward pass of `spec`: the variant, and the grids of
    warps."""
    d, dv = _padded(spec.head_dim), _padded(spec.v_head_dim)
    ordered, last_first = order_of(spec._replace(head_dim=64, v_head_dim=64))
    variant = BwdVariant(
        **features_of(spec, tile.keys),
        tile_m=tile.queries,
        d=d,
        d_high=0,
        dv=dv,
        stages=tile.stages,
        two_loops=not ordered or last_first,
        ordered=ordered,
        ring=ordered and not last_first,
        last_first=last_first,
        prepost="none",
        by_query=False,
        flat=False,
    )
    grids = Grids(
        tile.warps,
        tile.scores,
        tile.key_sums,
        tile.query_sums,
        *(-(-width // CHUNK.value) * CHUNK.value for width in (spec.head_dim, spec.v_head_dim)),
        padded=spec.head_dim < d or spec.v_head_dim < dv,
        queries_end=spec.is_varlen or spec.max_seqlen_q % tile.queries > 0,
    )
    return variant, grids
