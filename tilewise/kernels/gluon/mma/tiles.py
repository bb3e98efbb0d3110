"""How the forward pass by mma.sync is cut: a pure table from a call to the tiles of a CTA."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.kernels.gluon.mma.forward import Tile
from tilewise.kernels.gluon.mma.operands import CHUNK
from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.tiles.paged import WIDE_SHARED_MEMORY

__all__ = ["WIDTHS", "tile_config_fwd"]

WIDTHS = (64, 128, 256)  # heads are padded to the next one, by zeros


class _Row(NamedTuple):
    """The choices of one case; see `forward.Tile`."""

    warps: int = 4
    parts: int = 2
    keys: int = 64
    stages: int = 1
    q_in_registers: bool = False


_LONG, _SHORT = 2048, 512  # queries

# Of the larger of D and Dv, padded, for devices with 163 KiB of shared memory (sm_80, 87) and for
# those with 99 (sm_86, 89, 120). Kinds: "long" where all tiles cost the same and there are 2,048
# queries or more, "short" where they do not and there are at most 512, "crowded" where a call adds
# to the softmax what takes registers, "biased" where that is a bias, and no dropout or mask: 64
# keys of it would spill 224 bytes, 33 moves of them in the loop (Triton 3.7, sm_89). A missing
# "biased" takes the row of "crowded", any other that of "plain".
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
# Rows for 99 KiB: D 128 full 290 / 319 / 360 / 361, causal 215 / 273 / 332 / 340; D 256 full
# 245 / 269 / 293 / 295, causal 184 / 230 / 283 / 296.
_LARGE = {
    (64, "plain"): _Row(stages=2, q_in_registers=True),
    (64, "crowded"): _Row(parts=1, stages=2, q_in_registers=True),
    (128, "plain"): _Row(keys=32, stages=2),
    (128, "long"): _Row(warps=8, parts=1, keys=128, q_in_registers=True),
    (128, "crowded"): _Row(parts=1),
    (256, "plain"): _Row(warps=8, parts=1),
    (256, "short"): _Row(parts=1, keys=32),
}
_SMALL = _LARGE | {
    (128, "plain"): _Row(keys=32),
    (256, "plain"): _Row(warps=8, parts=1, keys=32),
    (256, "short"): _Row(warps=8, parts=1, keys=32),
    (256, "crowded"): _Row(parts=1),
    (256, "biased"): _Row(warps=8, parts=1, keys=32),
}


def tile_config_fwd(spec: AttentionSpec, arch: int) -> Tile:
    """Return how a CTA is cut for `spec` on compute capability `arch`."""
    adds = spec.dropout_p > 0 or spec.has_bias or spec.mask_tile is not None
    adds = adds or spec.softcap > 0 or spec.has_alibi
    # Blocks of 32 keys have no words of dropout and of masks.
    is_biased = spec.has_bias and spec.dropout_p == 0 and spec.mask_tile is None
    differ = spec.is_varlen or spec.has_seqlens_k or spec.mask_tile is not None
    dealt = differ or spec.window_right >= 0 or spec.window_left >= 0
    kind = "plain"
    if adds:
        kind = "biased" if is_biased else "crowded"
    elif dealt and spec.max_seqlen_q <= _SHORT:
        kind = "short"
    elif not dealt and spec.max_seqlen_q >= _LONG:
        kind = "long"
    return _tile_of(spec.head_dim, spec.v_head_dim, kind, dealt, arch in WIDE_SHARED_MEMORY)


def _tile_of(head_dim: int, v_head_dim: int, kind: str, dealt: bool, is_large: bool) -> Tile:
    d, dv = _padded(head_dim), _padded(v_head_dim)
    rows, width = (_LARGE if is_large else _SMALL), max(d, dv)
    row = rows.get((width, kind)) or rows.get((width, "crowded" if kind == "biased" else "plain"))
    row = row or rows[width, "plain"]
    channels = -(-head_dim // CHUNK.value) * CHUNK.value
    return Tile(
        warps=row.warps,
        parts=row.parts,
        rows=16 * row.warps * row.parts,
        keys=row.keys,
        stages=row.stages,
        d=d,
        channels=channels,
        dv=dv,
        q_in_registers=row.q_in_registers and channels == d,
        padded=head_dim < d or v_head_dim < dv,
        dynamic=dealt,
    )


def _padded(width: int) -> int:
    return next(wide for wide in WIDTHS if wide >= width)
