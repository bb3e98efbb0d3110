"""A linear layer beside which an adapter of low rank is trained, with what an engine adds for it.

The parameters of the adapter lie as a slot of an engine does (`kernels.low_rank.LowRank`), so that
an engine of the same dtype and device reads them where they are trained.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise import ops
from tilewise.ops import LowRank, RowTiles
from tilewise.ops.low_rank import TILE

__all__ = ["AdaptedLinear", "LowRankWeights"]


class LowRankWeights(nn.Module):
    """The trainable low-rank adapter of a linear layer (N, K) of P parts (q, k and v, or gate and
    up).

    A starts with normal random numbers over sqrt(K), B with zeros: at first the adapter adds
    nothing.

    Args:
        in_features: the inputs K of the layer.
        edges: 0, the ends of the parts among the outputs, and N at last.
        rank: the rank R of all parts, a multiple of 16.
        scale: the factor of the adapter's products.
        dtype, device: the dtype and device of the parameters.

    Attributes:
        a: the parameter A (P, R, K) of all parts.
        b: the parameter B (R, N); each column belongs to the part of its output.
        edges: the edges of the parts, as given.
    """

    def __init__(
        self,
        in_features: int,
        edges: Sequence[int],
        *,
        rank: int,
        scale: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.edges, self.scale = tuple(edges), scale
        drawn = torch.randn(len(edges) - 1, rank, in_features) / math.sqrt(in_features)
        self.a = nn.Parameter(drawn.to(device, dtype))
        self.b = nn.Parameter(torch.zeros(rank, edges[-1], dtype=dtype, device=device))

    @property
    def rank(self) -> int:
        """The rank R of all parts."""
        return self.b.shape[0]

    def slot(self, a: Tensor, b: Tensor) -> LowRank:
        """Return a `LowRank` of one slot that holds views of a (P, R, K) and b (R, N), as
        `ops.add_low_rank` takes it."""
        parts, rank, channels = a.shape
        return LowRank(
            a.view(1, parts * rank, channels),
            b.view(1, rank, -1),
            torch.full((1, parts), self.scale, device=a.device),
            torch.full((1, parts), rank, dtype=torch.int32, device=a.device),
            torch.tensor(self.edges, dtype=torch.int32, device=a.device),
        )


class AdaptedLinear(nn.Linear):
    """A linear layer, as a rule frozen, whose output has the term of a trained adapter added to it.

    Attributes:
        adapter: the adapter, set after construction; its parameters are cast to the dtype of the
            input.
    """

    adapter: LowRankWeights

    def forward(self, input: Tensor) -> Tensor:
        """Map input (..., K) to (..., N): the layer's product plus the adapter's term."""
        own, y = self.adapter, self.multiply(input)
        added: Tensor = _Added.apply(  # type: ignore[no-untyped-call, unused-ignore]
            y, input, own.a.to(input.dtype), own.b.to(input.dtype), own
        )
        return added

    def multiply(self, x: Tensor) -> Tensor:
        """Return x @ weight.T + bias, without the adapter's term."""
        return F.linear(x, self.weight, self.bias)


class _Added(torch.autograd.Function):
    """The function y + scale (x A^T) B, part by part, by the kernel of inference, with gradients of
    y, x, A and B by torch's products; y is not changed."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, x: Tensor, a: Tensor, b: Tensor, own: LowRankWeights
    ) -> Tensor:
        ctx.save_for_backward(x, a, b)
        ctx.edges, ctx.scale = own.edges, own.scale
        total = y.clone(memory_format=torch.contiguous_format)
        ops.add_low_rank(total, x, own.slot(a, b), _all_rows(x))
        return total

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, a, b = ctx.saved_tensors
        _, needs_x, needs_a, needs_b, _ = ctx.needs_input_grad
        rows, dy_rows = x.flatten(0, -2), dy.flatten(0, -2)
        da, db = torch.empty_like(a), torch.empty_like(b)
        dx = torch.zeros_like(rows) if needs_x else None
        for part, (first, end) in enumerate(zip(ctx.edges, ctx.edges[1:], strict=False)):
            own = dy_rows[:, first:end]
            dh = ctx.scale * (own @ b[:, first:end].T)
            if needs_a:
                da[part] = dh.T @ rows
            if needs_b:
                db[:, first:end] = (ctx.scale * (rows @ a[part].T)).T @ own
            if dx is not None:
                dx += dh @ a[part]
        return (
            dy,
            None if dx is None else dx.view_as(x),
            da if needs_a else None,
            db if needs_b else None,
            None,
        )


def _all_rows(x: Tensor) -> RowTiles:
    """Return tiles that let all rows of x (..., K) use slot 0; -1 fills the last tile."""
    count = x.numel() // x.shape[-1]
    rows = torch.arange(-(-count // TILE) * TILE, dtype=torch.int32, device=x.device)
    rows[count:] = -1
    tiles = rows.view(-1, TILE)
    return RowTiles(torch.zeros(len(tiles), dtype=torch.int32, device=x.device), tiles)
