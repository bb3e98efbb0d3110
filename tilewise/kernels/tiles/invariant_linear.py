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
    """How a product is cut.

    Attributes:
        tile_m, tile_n, tile_k: rows, outputs, channels of a step.
        num_warps, num_stages: as Triton takes them.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    num_warps: int
    num_stages: int


_PLAIN = InvariantTile(64, 64, 64, 4, 4)
_WIDE = InvariantTile(32, 32, 32, 4, 2)  # of float32
# Few rows wait for the weight: as many programs as it takes to ask for it all at once.
_FEW = tuple(
    InvariantTile(64, n, 128, 4, stages) for n, stages in ((128, 3), (64, 4), (32, 5), (16, 6))
)
_MANY = (
    InvariantTile(128, 256, 64, 8, 3), InvariantTile(128, 128, 64, 8, 4),
    InvariantTile(64, 128, 64, 4, 4), _PLAIN, InvariantTile(64, 32, 128, 4, 4),
)  # fmt: skip
FEW_ROWS = 64
FEWEST_PROGRAMS = 128  # about one on each of an H200's 132 SMs


def candidates() -> tuple[InvariantTile, ...]:
    """Return all tiles of 16-bit products on Hopper, which give the same bits."""
    return tuple(dict.fromkeys((_PLAIN, *_FEW, *_MANY)))


def invariant_tile(rows: int, outputs: int, itemsize: int, arch: int) -> InvariantTile:
    """Choose the widest tile of which there are enough to fill the device.

    Args:
        rows, outputs: of the product.
        itemsize: bytes of an element.
        arch: compute capability, 90 for Hopper's.
    """
    if itemsize > 2:
        return _WIDE
    if arch // 10 != 9:
        return _PLAIN
    tiles = _FEW if rows <= FEW_ROWS else _MANY
    for tile in tiles:
        if -(-rows // tile.tile_m) * -(-outputs // tile.tile_n) >= FEWEST_PROGRAMS:
            return tile
    return tiles[-1]
