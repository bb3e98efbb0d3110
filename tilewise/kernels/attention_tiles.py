"""Tiles of dense and packed attention: which rows of a table may run a call.

The first row runs; the others are what `python -m tilewise.bench.tune` tries beside it. No row
touches local memory inside an unmasked loop and every row fits its architecture's shared memory:
tests/kernels/test_compile.py compiles them all.
"""

from __future__ import annotations

from typing import Literal

from tilewise.kernels.spec import AttentionSpec
from tilewise.kernels.tiles import TileConfig, padded_head_dim

__all__ = ["Part", "candidates"]

Part = Literal["fwd", "dkdv", "dq"]
_Rows = tuple[TileConfig, ...]
_Table = dict[tuple[Part, int], _Rows]


def _rows(*shapes: tuple[int, int, int, int]) -> _Rows:
    return tuple(TileConfig(*shape) for shape in shapes)


# Keys: the part and the larger padded head dim. Shapes: tile_m, tile_n, num_warps, num_stages.
# float16 and bfloat16 on Hopper (227 KiB of shared memory).
_HALF_SM90: _Table = {
    ("fwd", 64): _rows((128, 64, 4, 3), (128, 128, 8, 3), (64, 64, 4, 3), (256, 64, 8, 3)),
    ("fwd", 128): _rows((128, 64, 8, 3), (128, 128, 8, 2), (128, 64, 8, 4), (64, 64, 4, 3)),
    ("fwd", 256): _rows((128, 32, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2)),
    ("dkdv", 64): _rows((64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 3), (64, 64, 4, 2)),
    ("dkdv", 128): _rows((64, 128, 8, 2), (64, 128, 8, 3), (32, 128, 8, 3), (64, 64, 8, 2)),
    ("dkdv", 256): _rows((32, 64, 8, 2), (64, 64, 8, 2), (32, 32, 4, 2)),
    ("dq", 64): _rows((128, 64, 8, 3), (128, 128, 8, 2), (64, 64, 4, 3), (128, 32, 4, 3)),
    ("dq", 128): _rows((128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)),
    ("dq", 256): _rows((64, 64, 8, 2), (64, 32, 8, 2), (128, 32, 8, 2)),
}


def candidates(spec: AttentionSpec, part: Part, arch: int = 90) -> tuple[TileConfig, ...]:
    """Return the rows that may run `part` of a dense or packed call; the default is the first.

    Args:
        spec: the call; its head dims and dtype are looked at.
        part: "fwd", "dkdv" (dk and dv) or "dq".
        arch: compute capability, major * 10 + minor.
    """
    width = max(padded_head_dim(spec.head_dim), padded_head_dim(spec.v_head_dim), 64)
    return _HALF_SM90[part, width]
