"""Adapters of low rank as data: the weights of one linear layer, and which rows use which."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["TILE", "LowRank", "RowTiles", "most_tiles", "tile_rows"]

TILE = 16
"""Rows of a tile, and ranks of a step: what the smallest matrix instruction takes."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapters in S slots of one linear layer (N, K) of P parts, each of rank R at most.

    Part p is columns edges[p] ... edges[p + 1] - 1 of the outputs: q, k and v, or gate and up, of a
    fused projection.

    Attributes:
        a: (S, P R, K), the rows of part p from p R on; rows beyond its rank are 0.
        b: (S, R, N); each column belongs to the part of its output; rows beyond its rank are 0.
        scale: (S, P) float32, the factors of the products.
        ranks: (S, P) int32, the rank of each part; 0 where an adapter does not change it.
        edges: (P + 1,) int32, from 0 to N.

    R is a multiple of TILE. All are contiguous.
    """

    a: Tensor
    b: Tensor
    scale: Tensor
    ranks: Tensor
    edges: Tensor

    @property
    def parts(self) -> int:
        """The number P of parts of the layer's outputs."""
        return self.scale.shape[1]

    @property
    def rank(self) -> int:
        """The largest rank R of a part, a multiple of TILE."""
        return self.b.shape[1]


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The rows of a batch that use adapters, in M tiles of up to TILE rows, all rows of a tile with
    the adapters of one slot.

    Attributes:
        slots: (M,) int32, the slot of each tile, -1 for a tile without rows.
        rows: (M, TILE) int32, the numbers of a tile's rows, -1 behind the last one. A row is in one
            tile at most.
    """

    slots: Tensor
    rows: Tensor


def most_tiles(rows: int, slots: int) -> int:
    """Return the most tiles of TILE rows that `rows` rows can need, however they choose among
    `slots` adapters: each tile has rows of one adapter."""
    return (rows + (TILE - 1) * min(rows, slots)) // TILE


def tile_rows(slots: NDArray[np.integer]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return `RowTiles.slots` and `RowTiles.rows` as arrays: the rows of each slot in ascending
    order, in tiles of TILE, tiles in the order of their slots.

    Args:
        slots: (T,), the slot that each row uses, -1 for a row without an adapter, which is in no
            tile.
    """
    order = np.argsort(slots, kind="stable")
    order = order[np.searchsorted(slots[order], 0) :]
    used, counts = np.unique(slots[order], return_counts=True)
    tiles = -(-counts // TILE)
    place = np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)
    tile = np.repeat(np.cumsum(tiles) - tiles, counts) + place // TILE
    rows = np.full((int(tiles.sum()), TILE), -1, np.int32)
    rows[tile, place % TILE] = order
    return np.repeat(used, tiles).astype(np.int32), rows
