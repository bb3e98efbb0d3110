"""How Hopper's invariant products of 16-bit numbers are cut: pure tables.

There are two kernels, one of few rows and one of many. Both sum each part of K in float32, 16
channels at a time, and add the parts in their order; how many parts there are follows from the
weight alone (`tiles.linear_rows`). So kernels and tiles may follow the number of rows without
changing a bit: `tests/kernels/gluon/test_invariant_linear.py` compares them on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from tilewise.kernels.tiles.linear_rows import most_rows, tile_of

__all__ = ["IS_CHOSEN", "ManyTile", "candidates", "many_tile"]

# Whether a batch-invariant engine takes these kernels rather than Triton's tiles. Products had
# equal bits on an H200 for 1 to 4,096 rows of six weights; that a whole engine keeps its promise
# with them has to be seen first: docs/batch-invariance.md names the two commands.
IS_CHOSEN = True


class ManyTile(NamedTuple):
    """How the product of many rows is cut.

    Attributes:
        tile_m, tile_n: rows and outputs of a tile.
        stages: of 64 channels, in shared memory.
        columns: of y that are stored at a time.
        ctas: of a multiprocessor.
        num_warps: 4 or 8; each four own 64 rows or a multiple.
        group: tiles of rows that are taken together.
    """

    tile_m: int
    tile_n: int
    stages: int
    columns: int
    ctas: int
    num_warps: int
    group: int = 8


# Parts that have been added up need as many registers again: half as many outputs.
_LARGE = ManyTile(128, 256, 4, 128, 1, 8)
_HALF = ManyTile(128, 128, 6, 128, 1, 8)
_SMALL = ManyTile(128, 128, 3, 64, 2, 4)
_TINY = ManyTile(64, 128, 4, 64, 2, 4)
# Each with its speed beside that of the first, by what it reads for a product; not measured.
_WHOLE = {_LARGE: 1.0, _HALF: 0.8, _SMALL: 0.8, _TINY: 0.6}
_IN_PARTS = {_HALF: 1.0, _TINY: 0.7}
# So many rows and less are the other kernel's, which pads them to 8, 16, 32 or 64, and whose parts
# are summed side by side: as many rows of those as it can have.
_FEW_ROWS = 64
_SMS = 132  # of an H200


def candidates(has_parts: bool = False) -> tuple[ManyTile, ...]:
    """Return all tiles of products whose K is summed whole, or in parts."""
    return tuple(_IN_PARTS if has_parts else _WHOLE)


def many_tile(rows: int, outputs: int, channels: int, has_parts: bool) -> ManyTile | None:
    """Choose the tile that takes the least time; None is the kernel of few rows.

    Args:
        rows, outputs, channels: of the product.
        has_parts: K is summed in several parts.
    """
    most = most_rows(tile_of(outputs, channels))
    if rows <= (most if has_parts else min(_FEW_ROWS, most)):
        return None
    tiles = _IN_PARTS if has_parts else _WHOLE
    return min(tiles, key=lambda tile: _waves(tile, rows, outputs) / tiles[tile])


def _waves(tile: ManyTile, rows: int, outputs: int) -> int:
    """Return outputs of y for each multiprocessor, a tile after the other in each place."""
    tiles = -(-rows // tile.tile_m) * -(-outputs // tile.tile_n)
    return -(-tiles // (_SMS * tile.ctas)) * tile.ctas * tile.tile_m * tile.tile_n
