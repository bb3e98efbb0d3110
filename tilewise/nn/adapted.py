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
    """The low-rank adapters (LoRA) that the rows of one engine step use; layers get them in the
    context.

    Attributes:
        weights: the adapter slots of each linear layer that may have some; a layer without an entry
            has none.
        tiles: the rows of the step that use adapters, in tiles of one slot each.
    """

    weights: Mapping[nn.Module, LowRank]
    tiles: RowTiles

    def add(self, linear: nn.Module, x: Tensor, y: Tensor) -> None:
        """Add the adapters' terms for the input x (..., K) of `linear` to y (..., N), in place.

        y is the layer's product or a partial sum of it. A layer without adapters leaves y as it is.
        """
        own = self.weights.get(linear)
        if own is not None:
            ops.add_low_rank(y, x, own, self.tiles)
