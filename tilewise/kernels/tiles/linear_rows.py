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
    """How a product is cut.

    Attributes:
        tile_n: outputs of a CTA.
        tile_k: channels of a stage, 64 or 128.
        parts: CTAs that share a tile of outputs, each with its channels.
        ctas: of a multiprocessor, among which its shared memory is divided.
        num_warps: 4 or 8.
        early: in a graph the weight is loaded while the kernel before still runs, which must not
            be one that writes it.
    """

    tile_n: int
    tile_k: int
    parts: int
    ctas: int
    num_warps: int = 4
    early: bool = False


# (outputs, channels) -> tile, and whether it was measured to be the fastest there is on an H200
_TABLE: dict[tuple[int, int], tuple[RowsTile, bool]] = {
    (28672, 4096): (RowsTile(128, 64, 1, 2), False),
    (4096, 14336): (RowsTile(128, 64, 7, 2), False),
    (4096, 4096): (RowsTile(64, 128, 4, 2), False),
    (6144, 4096): (RowsTile(128, 64, 4, 2), False),
    (4096, 1024): (RowsTile(64, 128, 4, 2), False),
    (6144, 1024): (RowsTile(64, 128, 2, 2), False),
    (1024, 2048): (RowsTile(64, 64, 8, 2), False),
    (1024, 3072): (RowsTile(64, 64, 8, 2), False),
}
_WANTED_CTAS = 200  # about one and a half for each of an H200's 132 multiprocessors
_LEAST_CHANNELS = 256  # of a part


def tile_of(outputs: int, channels: int) -> RowsTile:
    """Return the tile of a product; it does not depend on the number of rows."""
    found = _TABLE.get((outputs, channels))
    if found is not None:
        return found[0]
    tile_n = 128 if outputs > 4096 else 64
    tiles = -(-outputs // tile_n)
    parts = min(-(-_WANTED_CTAS // tiles), max(1, channels // _LEAST_CHANNELS), 8)
    return RowsTile(tile_n, 64, 1 if tiles >= _WANTED_CTAS // 2 else parts, 2)


def pays(outputs: int, channels: int) -> bool:
    """Whether the product was measured to be faster than both cuBLAS and our Triton kernel."""
    found = _TABLE.get((outputs, channels))
    return found is not None and found[1]


def row_tile(rows: int) -> int:
    """Return how many rows a product of `rows` is padded to."""
    return next(padded for padded in ROW_TILES if rows <= padded)


def most_rows(tile: RowsTile) -> int:
    """Return how many rows a tile can have: their sums must fit a thread's registers."""
    return max(rows for rows in ROW_TILES if tile.tile_n * rows <= MOST_SUMS * 32 * tile.num_warps)


def channels_of_part(tile: RowsTile, channels: int) -> int:
    """Return the channels of every part but the last, which may have fewer."""
    units = -(-channels // PART_UNIT)
    return -(-units // tile.parts) * PART_UNIT


def parts_of(tile: RowsTile, channels: int) -> int:
    """Return how many parts have channels."""
    return -(-channels // channels_of_part(tile, channels))


def stages_of(tile: RowsTile, padded_rows: int, channels: int) -> int:
    """Return how many stages fit shared memory, at most those of a part; 0 where two do not."""
    room = min(SHARED // tile.ctas - 1024, _SHARED_CTA) - _SHARED_BESIDE
    fitting = room // (2 * tile.tile_k * (tile.tile_n + padded_rows))
    needed = -(-min(channels, channels_of_part(tile, channels)) // tile.tile_k)
    return 0 if fitting < min(2, needed) else min(fitting, needed, MOST_STAGES)
