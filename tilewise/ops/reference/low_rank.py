"""The launcher of add_low_rank for backend="reference": float64, rounded once."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor

from tilewise.kernels.low_rank import LowRank, RowTiles
from tilewise.kernels.spec import ElementSpec

__all__ = ["launch", "why_not"]


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(y: Tensor, x: Tensor, weights: LowRank, tiles: RowTiles) -> None:
    """Add scale (x A^T) B of each tile's adapter to the tile's rows of y (T, N), in place.

    It is computed in float64 and rounded once for each part of the columns. Tiles with a negative
    slot are skipped.
    """
    edges, rank = weights.edges.tolist(), weights.rank
    for slot, rows in zip(tiles.slots.tolist(), tiles.rows, strict=True):
        if slot < 0:
            continue
        own = rows[rows >= 0].long()
        for part, (first, end) in enumerate(pairwise(edges)):
            a = weights.a[slot, part * rank : (part + 1) * rank].double()
            b = weights.b[slot, :, first:end].double()
            added = float(weights.scale[slot, part]) * (x[own].double() @ a.T) @ b
            y[own, first:end] = (y[own, first:end].double() + added).to(y.dtype)
