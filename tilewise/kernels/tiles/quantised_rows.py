"""How products with weights of 8 and 4 bits are cut, and up to how many rows: pure tables.

Measured on an H200 (2026-11-29, torch 2.11, triton 3.6; lab/results/quantised_h200.json).
"""

from __future__ import annotations

from typing import NamedTuple

MOST_ROWS = 64
"""The most rows for which mma.sync of codes is faster than the values of parts and a product."""


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


def tile_of(
    outputs: int, channels: int, rows: int, *, batch_invariant: bool = False
) -> QuantisedTile:
    """Choose the tile of a product.

    The order of a row's sum depends on `warps_k` alone: with `batch_invariant` on the shape of the
    weight.
    """
    warps = 8 if channels >= 8192 else 4
    is_wide = outputs >= 16384
    if rows <= 8:
        return QuantisedTile(8, 2 if is_wide else 1, 1, warps, not is_wide)
    if rows <= 16:
        if is_wide:
            return QuantisedTile(16, 4, 1, warps) if batch_invariant else QuantisedTile(16, 4, 2, 2)
        return QuantisedTile(16, 2 if outputs > 2048 else 1, 1, warps)
    if batch_invariant:
        return QuantisedTile(16, 4, 1, warps)
    if is_wide:
        return QuantisedTile(32, 2, 4, 1)
    return QuantisedTile(16, 4 if outputs > 2048 else 2, 1, 4)
