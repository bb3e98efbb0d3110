"""How Hopper's invariant products of 16-bit numbers are cut: pure tables.

There are two kernels, one of few rows, which also takes many in tiles of rows, and one of many.
Both sum each part of K in float32, 16 channels at a time, and add the parts in their order; how
many parts there are follows from the weight alone (`tiles.linear_rows`). Nothing that is chosen
here, which kernel, rows and outputs of a tile, stages, warps, changes what is added to what: so it
may follow the number of rows without changing a bit. `tests/kernels/gluon/test_invariant_linear.py`
compares all of them on a GPU, and says in the emulator that each adds all of K.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from tilewise.kernels.tiles.linear_rows import (
    MOST_SUMS,
    RowsTile,
    channels_of_part,
    fitted,
    most_rows,
    parts_of,
    stages_of,
    tile_of,
)

__all__ = ["ManyTile", "candidates", "cut", "many_tile", "row_candidates"]

# So many rows and less may be cut into tiles of the kernel of few rows, where `_time` says so.
MOST_IN_TILES = 512
# So many rows and less leave the parts of a product to the norm that reads it; in tiles where they
# are more than 64.
MOST_LEFT = 256


class ManyTile(NamedTuple):
    """How Hopper's kernel of many rows cuts a product with invariant sums.

    Attributes:
        tile_m, tile_n: rows and outputs of a tile.
        stages: the stages of 64 channels in shared memory.
        columns: the columns of y that are stored at a time.
        ctas: the CTAs of a multiprocessor.
        num_warps: 4 or 8; each four own 64 rows or a multiple.
        group: tiles of rows that follow one another in the order of CTAs before the outputs change.
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
_WHOLE = (_LARGE, _HALF, _SMALL, _TINY)
_IN_PARTS = (_HALF, _TINY)
# So many rows and less are the other kernel's, which pads them to 8, 16, 32 or 64, and whose parts
# are summed side by side: as many rows of those as it can have.
_FEW_ROWS = 64
_SMS = 132  # of an H200

# Tiles of the kernel of few rows: outputs, rows, warps. Its CTAs share a multiprocessor where there
# are more of them than one each.
_ROW_FORMS = ((64, 64, 4), (64, 128, 4), (128, 64, 4), (128, 128, 8), (64, 256, 4), (128, 256, 8))
_MOST_CTAS, _REGISTERS = 3, 65536  # of a multiprocessor; a thread has half as many beside its sums
# A time in clocks of a multiprocessor: bytes that it reads of L2 in one, products of numbers, and
# what begin and end of a CTA take. Read off Triton's tiles of 256 rows in invariant_linear_h200:
# 128 x 128 of 4,096 outputs in 10.8 us, 64 x 128 in 9.5, 64 x 32 of 3,072 channels in 10.0.
_BYTES, _PRODUCTS, _ENDS = 45, 1700, 2500
_LEFT_BYTES = 24  # of parts, stored or loaded


def candidates(has_parts: bool = False) -> tuple[ManyTile, ...]:
    """Return all tiles of the kernel of many rows for products whose K is summed whole, or in
    parts."""
    return _IN_PARTS if has_parts else _WHOLE


def row_candidates(outputs: int, channels: int, rows: int) -> tuple[RowsTile, ...]:
    """Return the tiles of rows in which the kernel of few rows can take a product of these sizes;
    () if shared memory or registers hold none."""
    plain, found = tile_of(outputs, channels), []
    for tile_n, of_tile, num_warps in _ROW_FORMS:
        if of_tile >= 2 * rows and of_tile > _FEW_ROWS:
            continue
        units = -(-rows // of_tile) * -(-outputs // tile_n) * parts_of(plain, channels)
        sums = tile_n * of_tile // (32 * num_warps)
        fitting = _REGISTERS // (32 * num_warps * (sums + sums // 2 + 16))
        wanted = plain._replace(
            tile_n=tile_n,
            tile_k=64,
            rows=of_tile,
            num_warps=num_warps,
            ctas=max(1, min(_MOST_CTAS, fitting, -(-units // _SMS))),
        )
        tile = fitted(wanted, of_tile, channels)
        if tile_n * of_tile <= MOST_SUMS * 32 * num_warps and stages_of(tile, of_tile, channels):
            found.append(tile)
    return tuple(found)


def cut(rows: int, outputs: int, channels: int, *, leaves: bool = False) -> RowsTile | None:
    """Return the tile of the kernel of few rows with which it takes a product of more than
    _FEW_ROWS rows faster than the kernel of many, or None. With `leaves` the other kernel is not
    compared. Few rows, up to _FEW_ROWS, and more than MOST_IN_TILES (with `leaves` MOST_LEFT) give
    None.

    Args:
        rows, outputs, channels: the sizes of the product.
        leaves: True if the partial sums are left to the kernel that reads them, so that no other
            kernel adds them up.
    """
    if not _FEW_ROWS < rows <= (MOST_LEFT if leaves else MOST_IN_TILES):
        return None
    return _cut(rows, outputs, channels, leaves)


@functools.lru_cache(maxsize=4096)
def _cut(rows: int, outputs: int, channels: int, leaves: bool) -> RowsTile | None:
    found = row_candidates(outputs, channels, rows)
    if not found:
        return None
    best = min(found, key=lambda tile: _time_in_tiles(tile, rows, outputs, channels, leaves))
    if leaves:
        return best
    time = _time_in_tiles(best, rows, outputs, channels, leaves)
    has_parts = parts_of(best, channels) > 1
    least = min(_time_of_many(t, rows, outputs, channels) for t in candidates(has_parts))
    return best if time <= least else None


def many_tile(rows: int, outputs: int, channels: int, has_parts: bool) -> ManyTile | None:
    """Choose the tile of the kernel of many rows that is reckoned to take the least time; None for
    so few rows that the kernel of few rows takes them.

    Args:
        rows, outputs, channels: the sizes of the product.
        has_parts: True if K is summed in several parts.
    """
    if rows <= min(_FEW_ROWS, most_rows(tile_of(outputs, channels))):
        return None
    tiles = candidates(has_parts)
    return min(tiles, key=lambda tile: _time_of_many(tile, rows, outputs, channels))


def _time(units: int, rows: int, outputs: int, channels: int, places: int) -> float:
    """Return the clocks that the busiest multiprocessor of an H200 is reckoned to take.

    Args:
        units: the number of tiles.
        rows, outputs, channels: the size of a tile's product.
        places: the tiles that a multiprocessor computes at a time.
    """
    busiest = -(-units // _SMS)
    bytes_read = 2 * channels * (rows + outputs)
    each = max(bytes_read / _BYTES, rows * outputs * channels / _PRODUCTS)
    return busiest * each + _ENDS * -(-busiest // places)


def _time_of_many(tile: ManyTile, rows: int, outputs: int, channels: int) -> float:
    units = -(-rows // tile.tile_m) * -(-outputs // tile.tile_n)
    # A CTA that stays has loads under way when a tile ends, but stores for itself.
    stored = tile.tile_m * tile.tile_n / 32
    busiest = -(-units // _SMS)
    return _time(units, tile.tile_m, tile.tile_n, channels, busiest) + busiest / tile.ctas * stored


def _time_in_tiles(tile: RowsTile, rows: int, outputs: int, channels: int, leaves: bool) -> float:
    parts = parts_of(tile, channels)
    tiles = -(-rows // tile.rows) * -(-outputs // tile.tile_n)
    part = min(channels, channels_of_part(tile, channels))
    time = _time(tiles * parts, tile.rows, tile.tile_n, part, tile.ctas)
    if parts > 1:
        numbers = 4 * tile.rows * tile.tile_n
        time += -(-tiles * parts // _SMS) * numbers / _LEFT_BYTES
        if not leaves:  # the last CTA of a tile loads all of its parts
            time += parts * numbers / _LEFT_BYTES
    return time
