"""How Hopper's own product of few rows is cut, and for which weights it is chosen: pure tables.

Every number here but the stages follows from the shape of the weight: so does the order in which
a row's channels are summed, whatever rows are beside it.
"""

from __future__ import annotations

from typing import NamedTuple

PART_UNIT = 128  # channels of a part are a multiple: of every tile_k
SHARED = 228 * 1024  # bytes of a multiprocessor, of which a CTA takes 1,024 for the system
_SHARED_CTA = 227 * 1024  # bytes of a CTA at most
_SHARED_BESIDE = 256  # for barriers; the result is turned around where the ring was
MOST_STAGES = 12
ROW_TILES = (8, 16, 32, 64, 128, 256)
MOST_SUMS = 128  # float32 registers of a thread


class RowsTile(NamedTuple):
    """How Hopper's kernel of few rows cuts a product x W^T.

    Attributes:
        tile_n: outputs of a CTA.
        tile_k: channels of a stage, 64 or 128.
        parts: CTAs that share a tile of outputs, each with a part of the channels.
        ctas: the CTAs of a multiprocessor, among which its shared memory is divided.
        num_warps: 4 or 8.
        early: a mode of `kernels.early`: 0 (OFF), FIRST or AFTER. But for 0 the weight is loaded
            while the kernel before still runs, which must not be one that writes it.
        rows: the rows of x that a CTA takes, of ROW_TILES, where they are cut into tiles; 0 takes
            all.
    """

    tile_n: int
    tile_k: int
    parts: int
    ctas: int
    num_warps: int = 4
    early: int = 0
    rows: int = 0


# (outputs, channels) -> tile, and whether it is chosen. Measured on an H200 (132 SMs, 2026-11-23,
# torch 2.11, triton 3.6; lab/results/linear_rows_h200.json), bfloat16, microseconds in a graph
# over copies of the weight, for 1 row and for 32: this kernel, the better of cuBLAS and our Triton
# kernel at each; a percentage is of 4.4 TB/s, this kernel, for 32 rows.
#
#     channels -> outputs      1 row           32 rows
#       4,096 ->  28,672    54.47   54.76    56.74   56.78    94 %
#      14,336 ->   4,096    30.47   29.53    31.57   32.17    84 %
#       4,096 ->   4,096    11.55   11.21    12.28   12.97    62 %
#       4,096 ->   6,144    14.29   15.45    15.08   15.73    76 %
#       1,024 ->   4,096     4.78    5.04     5.23    4.92    36 %
#       2,048 ->   1,024     5.14    4.22     6.04    4.67    16 %
#       1,024 ->   6,144     5.49    5.97     5.83    5.94    49 %
#       3,072 ->   1,024     5.81    4.84     6.74    5.46    21 %
#
# The Triton kernel, which is the peer for 1 row of the second and third, takes 46 and 17 us for 32.
# The last four were chosen in a whole decode step of 32 rows, where products begin early: 1,790 us
# with them and other forms, 2,077 without (early_decode_h200.json).
#
# Of other weights, by the rule below, begun early, then cuBLAS and our Triton kernel (2026-11-30,
# lab/results/linear_rows_rule_h200.json):
#
#     channels -> outputs      1 row                    32 rows
#       4,096 ->   2,560     7.44   10.55    8.77     8.86   10.24   16.41
#       4,096 ->   2,048     6.39    9.29    7.62     8.14    9.20   11.56
#       4,096 ->   3,840     9.80   13.34   10.70    11.08   12.84   17.09
#       4,096 ->   2,880     8.12   11.70    9.20    10.45   11.44   16.60
#       2,048 ->   3,072     5.56    6.56    7.16     6.42    6.48    7.72
#       2,816 ->   2,048     5.34    8.11    6.66     6.69    7.70   10.27
#         512 ->   2,048     3.24    3.74    3.90     3.89    3.55    6.31
#      15,360 ->   3,840    31.13   33.80   29.94    32.46   33.23   49.18
_TABLE: dict[tuple[int, int], tuple[RowsTile, bool]] = {
    (28672, 4096): (RowsTile(128, 128, 1, 2), True),
    (4096, 14336): (RowsTile(64, 128, 2, 2), True),
    (4096, 4096): (RowsTile(64, 128, 2, 2), True),
    (6144, 4096): (RowsTile(64, 128, 1, 2), True),
    (4096, 1024): (RowsTile(64, 128, 1, 2), True),
    (6144, 1024): (RowsTile(64, 128, 1, 2), True),
    (1024, 2048): (RowsTile(64, 128, 4, 1), True),
    (1024, 3072): (RowsTile(64, 128, 4, 2), True),
}
# Other weights are cut by the rule that gives the first four. They are chosen between the sizes of
# those, and of 2,048 to 4,096 outputs also if they are smaller. Yet smaller ones wait for one
# another (three microseconds of each product), and of heads nothing is known.
_ENOUGH_TILES, _MOST_CTAS = 96, 136  # about an H200's 132 multiprocessors
_LEAST_CHANNELS = 256  # of a part
_LEAST_ELEMENTS, _MOST_OUTPUTS = 1 << 24, 1 << 16
_NARROW = range(2048, 4097)  # outputs of which weights with _NARROW_CHANNELS are chosen
_NARROW_CHANNELS = 512


def tile_of(outputs: int, channels: int) -> RowsTile:
    """Return the tile of a product of few rows on Hopper, by the shape of the weight alone: it does
    not depend on the number of rows."""
    found = _TABLE.get((outputs, channels))
    if found is not None:
        return found[0]
    tile_n = 128 if outputs > 16384 else 64
    tiles = -(-outputs // tile_n)
    parts = 1 if tiles >= _ENOUGH_TILES else max(2, _MOST_CTAS // tiles)
    return RowsTile(tile_n, 128, min(parts, max(1, channels // _LEAST_CHANNELS), 8), 2)


def pays(outputs: int, channels: int) -> bool:
    """Return whether Hopper's own product of few rows is chosen for a weight (outputs, channels).

    The table says so for weights that were measured against cuBLAS and the Triton kernel, alone or
    in a whole decode step. Other weights are chosen from _LEAST_ELEMENTS elements on, if they have
    at most _MOST_OUTPUTS outputs, and of _NARROW outputs from _NARROW_CHANNELS channels on.

    Args:
        outputs, channels: the output and the input channels of the weight.
    """
    found = _TABLE.get((outputs, channels))
    if found is not None:
        return found[1]
    if outputs in _NARROW:
        return channels >= _NARROW_CHANNELS
    return outputs * channels >= _LEAST_ELEMENTS and outputs <= _MOST_OUTPUTS


def leaves_parts(outputs: int, channels: int) -> bool:
    """Return whether Hopper's own product of few rows is chosen for a weight and sums it in several
    parts, which the kernel that reads the result best adds up."""
    return pays(outputs, channels) and parts_of(tile_of(outputs, channels), channels) > 1


def row_tile(rows: int) -> int:
    """Return the number of rows to which a product of `rows` rows is padded, the next of
    ROW_TILES."""
    return next(padded for padded in ROW_TILES if rows <= padded)


def most_rows(tile: RowsTile) -> int:
    """Return the most rows, one of ROW_TILES, for which the sums of a tile fit the registers of its
    threads."""
    return max(rows for rows in ROW_TILES if tile.tile_n * rows <= MOST_SUMS * 32 * tile.num_warps)


def channels_of_part(tile: RowsTile, channels: int) -> int:
    """Return the channels of every part but the last, which may have fewer."""
    units = -(-channels // PART_UNIT)
    return -(-units // tile.parts) * PART_UNIT


def parts_of(tile: RowsTile, channels: int) -> int:
    """Return how many of the tile's parts have channels; with few channels some have none."""
    return -(-channels // channels_of_part(tile, channels))


def fitted(tile: RowsTile, padded_rows: int, channels: int) -> RowsTile:
    """Return the tile with the most CTAs of a multiprocessor, at most its own number, whose shared
    memory has room for the stages that a loop needs; with one CTA if none has."""
    for ctas in range(tile.ctas, 1, -1):
        some = tile._replace(ctas=ctas)
        if stages_of(some, padded_rows, channels):
            return some
    return tile._replace(ctas=1)


def stages_of(tile: RowsTile, padded_rows: int, channels: int) -> int:
    """Return the number of stages of a tile: as many as fit the shared memory of a CTA, at most as
    many as a part of the channels needs and MOST_STAGES.

    The number is 0 if fewer fit than a loop needs: two, or one for a part of a single stage.
    """
    room = min(SHARED // tile.ctas - 1024, _SHARED_CTA) - _SHARED_BESIDE
    fitting = room // (2 * tile.tile_k * (tile.tile_n + padded_rows))
    needed = -(-min(channels, channels_of_part(tile, channels)) // tile.tile_k)
    return 0 if fitting < min(2, needed) else min(fitting, needed, MOST_STAGES)
