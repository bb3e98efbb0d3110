"""How a product of rows that must not depend on one another is cut: pure tables.

On Hopper a tile of 64 rows or more is multiplied by WGMMA, which adds 16 channels at a time to one
sum in float32, whatever the width of the tile: the tile may follow the number of rows without
changing a bit (`tests/ops/test_linear.py` compares all of them on a GPU). Smaller ones would be
multiplied by other instructions. Elsewhere all products have one tile.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["InvariantTile", "candidates", "invariant_tile"]


class InvariantTile(NamedTuple):
    """How a product x W^T whose rows must not depend on one another is cut in Triton.

    Attributes:
        tile_m, tile_n, tile_k: rows and outputs of a program, and the channels of a step of its
            loop.
        num_warps, num_stages: warps of a program, and depth of Triton's pipeline over the channels.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int


_PLAIN = InvariantTile(64, 64, 64, 4, 4)
_WIDE = InvariantTile(32, 32, 32, 4, 2)  # of float32
# Few rows wait for the weight: as many programs as it takes to ask for it all at once.
_FEW = (
    InvariantTile(64, 128, 64, 4, 4),
    InvariantTile(64, 64, 128, 4, 4),
    InvariantTile(64, 32, 128, 4, 5),
    InvariantTile(64, 16, 128, 4, 6),
)
FEW_ROWS = 64
FEWEST_PROGRAMS = 96  # 64 wide for 6,144 outputs: 6.9 us in place of 9.2 (H200, 2026-11-23)
# Many rows: each tile with its speed beside that of the largest, of outputs that a program makes in
# a time, read off 1,024 and 8,192 rows of eight weights (H200, 2026-11-23; invariant_linear_h200).
_MANY = {
    InvariantTile(128, 256, 64, 8, 3): 1.0,
    InvariantTile(128, 128, 64, 8, 4): 0.93,
    InvariantTile(64, 128, 128, 4, 3): 0.7,
    InvariantTile(64, 32, 128, 4, 5): 0.35,
}
_SMS = 132


def candidates() -> tuple[InvariantTile, ...]:
    """Return all tiles of 16-bit products on Hopper that `invariant_tile` may choose, which give
    the same bits."""
    return tuple(dict.fromkeys((_PLAIN, *_FEW, *_MANY)))


def invariant_tile(rows: int, outputs: int, itemsize: int, arch: int) -> InvariantTile:
    """Choose the tile of a product: on Hopper, for up to FEW_ROWS rows the one with the most
    outputs that still makes FEWEST_PROGRAMS programs, for more the one that is reckoned to take the
    least time; elsewhere, and in float32, always the same one.

    Args:
        rows, outputs: the sizes of the product.
        itemsize: bytes of an element.
        arch: compute capability, 90 for Hopper's.
    """
    if itemsize > 2:
        return _WIDE
    if arch // 10 != 9:
        return _PLAIN
    if rows <= FEW_ROWS:
        enough = (tile for tile in _FEW if -(-outputs // tile.tile_n) >= FEWEST_PROGRAMS)
        return next(enough, _FEW[-1])
    return min(_MANY, key=lambda tile: _waves(tile, rows, outputs))


def _waves(tile: InvariantTile, rows: int, outputs: int) -> float:
    """Return the reckoned time of a product, in units that compare tiles only: the programs that
    the busiest of an H200's multiprocessors runs one after another, times the size of a tile over
    its speed."""
    programs = -(-rows // tile.tile_m) * -(-outputs // tile.tile_n)
    return -(-programs // _SMS) * tile.tile_m * tile.tile_n / _MANY[tile]
