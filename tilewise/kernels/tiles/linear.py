"""How a product of few rows is cut, and where it is faster than cuBLAS: pure tables.

Measured on an H200 (132 SMs, 2026-11-22, torch 2.11, triton 3.6), bfloat16, microseconds of one
product in a captured graph of many, each with a weight of its own, 200 MB in all: ours, then
cuBLAS, for 1 row and for 16. A percentage is of 4.4 TB/s, ours, for 1 row.

    channels -> outputs     1 row           16 rows
      2,048 ->   1,024     4.19   12.96    4.30    5.86    23 %
      3,072 ->   1,024     4.84    7.40    4.93    7.63    30 %
      1,024 ->   4,096     5.09    5.28    5.05    5.30    37 %
      4,096 ->   4,096    11.20   13.61   11.91   13.64    68 %
     14,336 ->   4,096    30.65   32.71   32.36   33.28    87 %
      1,024 ->   6,144     6.19    6.09    6.25    6.05    46 %
      4,096 ->   6,144    15.98   16.10   16.49   16.44    72 %
      4,096 ->  28,672    57.53   60.38   59.38   61.33    93 %
      1,024 -> 151,936    73.38   75.51   78.16   78.86    96 %
      4,096 -> 128,256   240.86  242.31  246.50  247.61    99 %

A product of a few megabytes waits for its launch and for memory to answer: 3 us of each.
"""

from __future__ import annotations

from typing import NamedTuple

MOST_ROWS = 32


class LinearTile(NamedTuple):
    """How the Triton kernel of few rows cuts a product x W^T.

    Attributes:
        tile_n: outputs of a program.
        tile_k: channels of a slice, which a step of the loop multiplies.
        ways: warps that take slices in turn; 1 has all warps share one slice.
        parts: programs that share an output, each with a part of the channels.
    """

    tile_n: int
    tile_k: int
    ways: int
    parts: int
    num_warps: int
    num_stages: int


# outputs up to -> tile, and whether it is faster than cuBLAS by 3 percent or more for 16 rows
_TABLE: tuple[tuple[int, LinearTile, bool], ...] = (
    (2048, LinearTile(8, 256, 4, 1, 4, 3), True),
    (4096, LinearTile(16, 256, 2, 1, 2, 4), True),
    (16384, LinearTile(64, 128, 1, 1, 4, 5), False),
    (65536, LinearTile(64, 64, 1, 1, 2, 6), True),
    (1 << 62, LinearTile(128, 128, 1, 1, 8, 4), False),
)
_FEW_CHANNELS = LinearTile(32, 128, 1, 1, 4, 5)  # for 2,048 ... 4,096 outputs of few channels


def tile_of(outputs: int, channels: int) -> LinearTile:
    """Return the tile of a product of few rows in Triton, by the shape of the weight alone: it does
    not depend on the number of rows."""
    if 2048 < outputs <= 4096 and channels <= 2048:
        return _FEW_CHANNELS
    return next(tile for most, tile, _ in _TABLE if outputs <= most)


def pays(outputs: int, channels: int, arch: int) -> bool:
    """Return whether the Triton kernel of few rows is faster than cuBLAS for this weight, as
    measured on Hopper; False on other GPUs and if `channels` is no multiple of 8."""
    if arch != 90 or channels % 8:
        return False
    return next(wins for most, _, wins in _TABLE if outputs <= most)
