"""Tiles of dense and packed attention: which rows of a table may run a call.

The first row runs; the others are what `python lab/tune.py` tries beside it. Every row
fits its architecture's shared memory and, but for one that is faster all the same, keeps its
unmasked loop in registers, which tests/kernels/test_compile.py holds by compiling them all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.tiles.paged import WIDE_SHARED_MEMORY, TileConfig, padded_head_dim

__all__ = ["WIDEST", "WIDEST_QK", "Part", "candidates"]

Part = Literal["fwd", "dkdv", "dq"]
WIDEST = 512  # channels of a head that one tile holds
WIDEST_QK = WIDEST + 64  # q and k may have a rest, which is multiplied on its own (MLA: 576)
_Rows = tuple[TileConfig, ...]
_Table = dict[tuple[Part, int], _Rows]


def _rows(*shapes: tuple[int, int, int, int]) -> _Rows:
    return tuple(TileConfig(*shape) for shape in shapes)


# Keys: the part and the larger padded head dim. Shapes: tile_m, tile_n, num_warps, num_stages.
# float16 and bfloat16 on Hopper (227 KiB of shared memory). First rows: the fastest on an H200
# (torch 2.11, triton 3.6), bf16, 16,384 tokens, hidden 2,048, N 4,096 and 16,384; 2026-11-20.
_HALF_SM90: _Table = {
    ("fwd", 64): _rows((64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (64, 32, 4, 3)),
    ("fwd", 128): _rows((64, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 2), (128, 128, 8, 2)),
    ("fwd", 256): _rows((128, 64, 8, 2), (128, 32, 8, 3), (64, 32, 4, 2)),
    ("dkdv", 64): _rows((64, 64, 4, 3), (32, 128, 4, 3), (64, 64, 4, 2), (32, 64, 4, 3)),
    ("dkdv", 128): _rows((32, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 3), (32, 64, 4, 2)),
    ("dkdv", 256): _rows((64, 64, 8, 2), (32, 64, 8, 3), (32, 64, 8, 2)),
    ("dq", 64): _rows((64, 64, 4, 3), (64, 32, 4, 3), (128, 32, 8, 3), (64, 32, 4, 4)),
    ("dq", 128): _rows((128, 64, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3), (128, 32, 8, 3)),
    ("dq", 256): _rows((128, 32, 8, 2), (64, 16, 4, 3), (64, 32, 8, 2)),
    ("fwd", 512): _rows((64, 32, 8, 2), (64, 16, 8, 2), (32, 32, 8, 2)),
    ("dkdv", 512): _rows((32, 32, 8, 1), (16, 32, 8, 2)),
    ("dq", 512): _rows((64, 16, 8, 2), (32, 32, 8, 2)),
}
# Where a window leaves a program only a few steps; same device and day, 1,024 keys.
_HALF_SM90_WINDOW: _Table = _HALF_SM90 | {
    ("fwd", 64): _rows((64, 32, 4, 3)),
    ("dkdv", 64): _rows((64, 64, 4, 2)),
    ("dq", 128): _rows((64, 64, 4, 2)),
}
_FEW_KEYS = 2048
# Where sequences of many lengths are packed; 512 ... 8,192 tokens, causal.
_HALF_SM90_PACKED: _Table = _HALF_SM90 | {("fwd", 128): _rows((128, 64, 8, 3))}
# On datacentre Blackwell, where sums live in tensor memory.
_HALF_SM100: _Table = {
    ("fwd", 64): _rows((128, 64, 4, 3)),
    ("fwd", 128): _rows((128, 64, 8, 3)),
    ("fwd", 256): _rows((128, 32, 8, 2)),
    ("dkdv", 64): _rows((32, 128, 8, 2), (64, 128, 8, 2)),
    ("dkdv", 128): _rows((64, 64, 8, 2), (64, 128, 8, 2)),
    ("dkdv", 256): _rows((32, 32, 8, 2)),
    ("dq", 64): _rows((128, 64, 8, 2)),
    ("dq", 128): _rows((128, 64, 8, 2)),
    ("dq", 256): _rows((64, 32, 8, 2)),
    ("fwd", 512): _rows((64, 32, 8, 2)),
    ("dkdv", 512): _rows((16, 32, 8, 2), (32, 32, 8, 1)),
    ("dq", 512): _rows((32, 32, 8, 2)),
}
# On Ampere; but for a few, first rows fit the 99 KiB of the smaller devices too.
_HALF_SM80: _Table = {
    ("fwd", 64): _rows((128, 64, 4, 3)),
    ("fwd", 128): _rows((128, 32, 8, 3), (128, 64, 8, 3)),
    ("fwd", 256): _rows((64, 32, 8, 2), (64, 64, 8, 1)),
    ("dkdv", 64): _rows((32, 128, 8, 2), (64, 128, 8, 2)),
    ("dkdv", 128): _rows((64, 64, 8, 2), (32, 128, 8, 2)),
    ("dkdv", 256): _rows((32, 32, 8, 2)),
    ("dq", 64): _rows((128, 64, 8, 2)),
    ("dq", 128): _rows((64, 64, 8, 2), (128, 32, 8, 2)),
    ("dq", 256): _rows((64, 32, 8, 2)),
    ("fwd", 512): _rows((64, 16, 8, 2), (32, 32, 8, 2)),
    ("dkdv", 512): _rows((16, 32, 8, 2)),
    ("dq", 512): _rows((32, 32, 8, 2), (32, 16, 8, 2)),
}
_HALF_SMALL: _Table = _HALF_SM80 | {
    ("dq", 256): _rows((32, 32, 4, 2)),
    ("fwd", 512): _rows((32, 32, 8, 1), (32, 16, 8, 2)),
    ("dkdv", 512): _rows((16, 16, 8, 2)),
    ("dq", 512): _rows((16, 16, 8, 2)),
}
# float32 multiplies on the FMA units everywhere, so one table serves all.
_SINGLE: _Table = {
    ("fwd", 64): _rows((32, 32, 4, 2)),
    ("fwd", 128): _rows((64, 32, 8, 2)),
    ("fwd", 256): _rows((32, 16, 4, 2)),
    ("dkdv", 64): _rows((32, 64, 8, 2), (32, 32, 8, 2)),
    ("dkdv", 128): _rows((32, 32, 8, 2)),
    ("dkdv", 256): _rows((16, 32, 8, 2)),
    ("dq", 64): _rows((64, 32, 8, 2)),
    ("dq", 128): _rows((32, 32, 8, 2)),
    ("dq", 256): _rows((32, 16, 8, 2)),
    ("fwd", 512): _rows((16, 16, 8, 2)),
    ("dkdv", 512): _rows((16, 16, 8, 1)),
    ("dq", 512): _rows((16, 16, 8, 1)),
}


def _table(itemsize: int, arch: int, has_few_keys: bool, is_varlen: bool) -> _Table:
    if itemsize == 4:
        return _SINGLE
    if arch // 10 == 9:
        if has_few_keys:
            return _HALF_SM90_WINDOW
        return _HALF_SM90_PACKED if is_varlen else _HALF_SM90
    if arch // 10 in (10, 11):
        return _HALF_SM100
    return _HALF_SM80 if arch in WIDE_SHARED_MEMORY else _HALF_SMALL


def candidates(spec: AttentionSpec, part: Part, arch: int = 90) -> tuple[TileConfig, ...]:
    """Return the tile sizes, rows of a table, that may run `part` of a dense or packed call in
    Triton; the first is what runs.

    Args:
        spec: the call; its head dims, dtype, window, bias, mask and dropout are looked at.
        part: "fwd", "dkdv" (dk and dv) or "dq".
        arch: compute capability, major * 10 + minor.
    """
    width = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim), 64)
    width = min(width, WIDEST)  # a rest of q and k needs no wider row
    keys = spec.window_left + max(0, spec.window_right)
    has_few_keys = spec.window_left >= 0 and spec.window_right >= 0 and keys < _FEW_KEYS
    rows = _table(spec.dtype.itemsize, arch, has_few_keys, spec.is_varlen)[part, width]
    if part == "dkdv" and (spec.has_bias or spec.dropout_p > 0):
        # Another tile stands beside s, dp and two sums: wide rows would leave the registers.
        most = 16 if spec.dtype.itemsize == 2 else 4
        rows = tuple(sorted(rows, key=lambda row: _scores_per_thread(row) > most))
    if spec.mask_tile is not None:
        rows = _inside(rows, *spec.mask_tile)
    return rows


def _inside(rows: _Rows, tile_q: int, tile_k: int) -> _Rows:
    """Return the rows whose tiles are no larger than a mask tile, which they then divide; if there
    is none, all rows with their tiles cut to its size."""
    fitting = tuple(row for row in rows if row.tile_m <= tile_q and row.tile_n <= tile_k)
    if fitting:
        return fitting
    cut = (replace(r, tile_m=min(r.tile_m, tile_q), tile_n=min(r.tile_n, tile_k)) for r in rows)
    return tuple(dict.fromkeys(cut))


def _scores_per_thread(row: TileConfig) -> int:
    return row.tile_m * row.tile_n // (32 * row.num_warps)
