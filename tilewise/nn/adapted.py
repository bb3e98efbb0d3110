"""What a step's adapters add to the products of linear layers: passed down in the context."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from tilewise import ops
from tilewise.ops import LowRank, RowTiles

__all__ = ["StepAdapters"]


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of the rows of one step.

    Attributes:
        weights: the adapters of each linear layer that may have some, to whose product they add.
        tiles: the rows of the step that use adapters.
    """

    weights: Mapping[nn.Module, LowRank]
    tiles: RowTiles

    def add(self, linear: nn.Module, x: Tensor, y: Tensor) -> None:
        """Add to y (..., N), the product of `linear` and x (..., K) or a part of it, in place."""
        own = self.weights.get(linear)
        if own is not None:
            ops.add_low_rank(y, x, own, self.tiles)
