"""Tiles of a score matrix, and masking and dropout within a tile.

A mask or a dropout pattern is a function of positions, so it is computed on chip and moves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Predicate", "Tiling", "algorithm_1_tiles", "chunks", "tile_layout"]

Predicate = Callable[[Tensor, Tensor], Tensor]
"""(i (rows, 1), j (1, columns)) -> bool (rows, columns): whether a pair is visible, or kept."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """The tile sizes of a score matrix, and the mask and dropout that apply to each tile.

    Attributes:
        tile_q, tile_k: the rows and columns of a tile, Br and Bc.
        layout: bool (Tr, Tc), False where a tile is skipped; None keeps all.
        mask: a function of positions, True where query i sees key j; None if all are visible.
        keep: a function of positions, True where dropout keeps a probability, in both directions.
        dropout_p: the drop probability; kept probabilities are divided by 1 - dropout_p.
        softmax_scale: the factor of the scores, d**-0.5 by default; 1.0 gives Algorithm 1 as
            printed.
    """

    tile_q: int
    tile_k: int
    layout: Tensor | None = None
    mask: Predicate | None = None
    keep: Predicate | None = None
    dropout_p: float = 0.0
    softmax_scale: float | None = None

    def keeps_tile(self, row: int, column: int) -> bool:
        """Return whether tile (row, column) is computed: True unless the layout has False there."""
        return self.layout is None or bool(self.layout[row, column])

    def scores(self, q: Tensor, k: Tensor, rows: slice, columns: slice) -> Tensor:
        """Return tau q k^T of one tile, -inf where the mask hides a pair."""
        scale = q.shape[1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        s = scale * q @ k.T
        return s if self.mask is None else s.where(self.mask(*_positions(rows, columns)), -math.inf)

    def dropped(self, p: Tensor, rows: slice, columns: slice) -> Tensor:
        """Return tile p at these rows and columns after dropout: dropped entries 0, others / (1 -
        dropout_p)."""
        if self.keep is None:
            return p
        kept = self.keep(*_positions(rows, columns))
        return torch.where(kept, p / (1 - self.dropout_p), 0.0)


def chunks(length: int, size: int) -> list[slice]:
    """Cut range(length) into slices of `size`; the last may be shorter."""
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _positions(rows: slice, columns: slice) -> tuple[Tensor, Tensor]:
    i = torch.arange(rows.start, rows.stop).unsqueeze(1)
    j = torch.arange(columns.start, columns.stop).unsqueeze(0)
    return i, j


def algorithm_1_tiles(sram: int, head_dim: int) -> tuple[int, int]:
    """Return (Br, Bc) of Algorithm 1, line 1: Bc = ceil(M / 4d), Br = min(ceil(M / 4d), d).

    K_j, V_j then take M / 2 and S_ij at most M / 4. Q_i and O_i take 2 Br d, so that the whole is
    at most M when M >= 8 d^2 + 8 d and up to 5 M / 4 below: the paper promises Theta(M) only.

    Args:
        sram: M, the elements of SRAM.
        head_dim: d, the channels of the head.
    """
    tile_k = -(-sram // (4 * head_dim))
    return min(tile_k, head_dim), tile_k


def tile_layout(mask: Predicate, seqlen_q: int, seqlen_k: int, tiling: Tiling) -> Tensor:
    """Return bool (Tr, Tc), True for tiles with a visible pair. A causal mask skips about half."""
    return torch.tensor(
        [
            [
                bool(mask(*_positions(rows, columns)).any())
                for columns in chunks(seqlen_k, tiling.tile_k)
            ]
            for rows in chunks(seqlen_q, tiling.tile_q)
        ]
    )
