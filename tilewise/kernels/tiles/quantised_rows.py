"""How products with weights of 8 and 4 bits are cut, and up to how many rows: pure tables."""

from __future__ import annotations

from typing import NamedTuple

MOST_ROWS = 64
"""The most rows for which mma.sync of codes is faster than a product of larger tiles."""


class QuantisedTile(NamedTuple):
    """How a product is cut.

    Attributes:
        rows: rows of x of a CTA: 8, 16 or 32.
        tiles: tiles of 16 outputs of a warp: 1, 2 or 4.
        warps_n: warps of a CTA that have different outputs and share rows of x.
        warps_k: warps that have the same outputs and take the steps of K in turns.
        holds_inputs: True if rows of x are loaded two steps ahead as codes are; False if they are
            loaded when they are needed, which takes fewer registers.
    """

    rows: int
    tiles: int
    warps_n: int
    warps_k: int
    holds_inputs: bool = False


def tile_of(outputs: int, channels: int, rows: int, bits: int) -> QuantisedTile:
    """Choose the tile of a product.

    The order of a row's sum depends on `warps_k` alone, and so on the shape of the weight.
    """
    padded = 8 if rows <= 8 else 16 if rows <= 16 else 32
    return QuantisedTile(padded, 2 if outputs >= 4096 else 1, 1, 8)
