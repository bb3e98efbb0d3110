"""What a step's adapters add to the products of linear layers: passed down in the context."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilewise import ops
from tilewise.ops import LowRank, RowTiles

__all__ = ["StepAdapters"]

IS_BESIDE = True
"""Whether captured steps multiply the first factors of adapters beside the products."""


@dataclass(frozen=True, slots=True)
class StepAdapters:
    """The adapters of the rows of one step.

    Attributes:
        weights: the adapters of each linear layer that may have some, to whose product they add.
        tiles: the rows of the step that use adapters.
    """

    weights: Mapping[nn.Module, LowRank]
    tiles: RowTiles

    def begin(self, linear: nn.Module, x: Tensor) -> Tensor | None:
        """Start what `add` does without y while a GPU multiplies `linear` and x; return what it
        needs of it, or None where nothing was started.

        In a captured step alone: elsewhere the host is slower than the GPU.
        """
        own = self.weights.get(linear)
        if own is None or not IS_BESIDE or not x.is_cuda or x.numel() == 0:
            return None
        side = _side_stream(x.device)
        if not torch.cuda.is_current_stream_capturing():
            return None
        side.wait_stream(torch.cuda.current_stream(x.device))
        with torch.cuda.stream(side):
            return ops.low_rank_inner(x, own, self.tiles)

    def add(self, linear: nn.Module, x: Tensor, y: Tensor, begun: Tensor | None = None) -> None:
        """Add to y (..., N), the product of `linear` and x (..., K) or a part of it, in place.

        Args:
            begun: what `begin` has returned.
        """
        own = self.weights.get(linear)
        if own is None:
            return
        if begun is not None:
            torch.cuda.current_stream(x.device).wait_stream(_side_stream(x.device))
        ops.add_low_rank(y, x, own, self.tiles, inner=begun)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
