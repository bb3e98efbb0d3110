"""Linear layers and embeddings whose weights stay as narrow as a checkpoint stores them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from tilewise import ops
from tilewise.ops import QuantisedWeight
from tilewise.ops.quantised_linear import placed

__all__ = ["QuantisedEmbedding", "QuantisedLinear"]


class QuantisedLinear(nn.Module):
    """Compute x @ W.T + bias from a quantised W: inference only.

    Args:
        parts: the weights whose rows are stacked to W, the first on top: one, or several of
            different formats, if the sources of a fused projection are quantised in different ways.
            Neighbours of one format are joined.
        bias: (out,) or None, in the dtype of the model.
        dtype: the dtype of x, of the results and of the dequantised weight.

    Attributes:
        parts: the weights. A move of the module moves them and puts their codes in the order that
            the device's kernels read; a cast leaves them as they are.
        device: the device of the module.
        is_invariant: True if a row's bits must not depend on the number of others.
    """

    bias: nn.Parameter | None

    def __init__(
        self, parts: Sequence[QuantisedWeight], bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        if not parts:
            raise ValueError("parts must have at least one weight, got none")
        self.parts = tuple(map(placed, joined_parts(parts)))
        self.in_features = self.parts[0].shape[1]
        self.out_features = sum(part.shape[0] for part in self.parts)
        self.dtype, self.device = dtype, self.parts[0].device
        self.is_invariant = False
        held = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self.register_parameter("bias", held)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        bias = self.bias
        if len(self.parts) == 1:
            return ops.quantised_linear(x, self.parts[0], bias, batch_invariant=self.is_invariant)
        sizes = [part.shape[0] for part in self.parts]
        biases = [None] * len(sizes) if bias is None else list(bias.split(sizes))
        return torch.cat(
            [
                ops.quantised_linear(x, part, own, batch_invariant=self.is_invariant)
                for part, own in zip(self.parts, biases, strict=True)
            ],
            -1,
        )

    def dequantised(self) -> Tensor:
        """Return W (out, in) in the module's dtype."""
        return torch.cat([part.dequantise().to(self.dtype) for part in self.parts])

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantisedLinear:
        """Move the module as Module._apply does, but never cast the quantised weight.

        If `fn` casts, only `dtype`, that of rows and results, and the bias change. On "meta" the
        weight stays there.
        """
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.device))
        self.device, self.dtype = probe.device, probe.dtype
        if self.parts[0].device.type != "meta":
            self.parts = tuple(placed(part.to(self.device)) for part in self.parts)
        return self

    def hold(self, parts: Sequence[QuantisedWeight]) -> None:
        """Replace the weights by others of the same shape in total, moved to the module's device.

        Raises:
            ValueError: the shape of the new weights is not (out, in).
        """
        joined = joined_parts(parts)
        found = sum(part.shape[0] for part in joined), joined[0].shape[1]
        if found != (self.out_features, self.in_features):
            wanted = self.out_features, self.in_features
            raise ValueError(f"parts must have shape {wanted}, got {found}")
        self.parts = tuple(placed(part.to(self.device)) for part in joined)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the quantised weights, without the bias; also for tensors on
        "meta"."""
        return sum(part.nbytes for part in self.parts)

    def extra_repr(self) -> str:
        """Show the sizes in `print(model)`."""
        held = self.nbytes * 8 / (self.in_features * self.out_features)
        return f"{self.in_features}, {self.out_features}, {self.dtype}, {held:.2f} bits a weight"


class QuantisedEmbedding(nn.Module):
    """Look up rows of a quantised table.

    Args:
        parts: the weights whose rows are stacked to the table (num_embeddings, embedding_dim), of
            one format. An output head that is tied to the embedding may share their tensors.
        dtype: the dtype of the rows that are looked up.

    Raises:
        ValueError: the parts differ in format.
    """

    def __init__(self, parts: Sequence[QuantisedWeight], dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.hold(parts)
        self.num_embeddings, self.embedding_dim = self.table.shape

    def hold(self, parts: Sequence[QuantisedWeight]) -> None:
        """Replace the table by the rows of all parts, in their order.

        Raises:
            ValueError: the parts differ in format (bits, group size, scales), so that they are no
                table.
        """
        joined = joined_parts(parts)
        if len(joined) != 1:
            raise ValueError(f"parts must be alike in an embedding, got {len(joined)} kinds")
        self.table = joined[0]

    def forward(self, ids: Tensor) -> Tensor:
        """Map token ids (...,) to their dequantised rows (..., E), in `dtype`."""
        return self.table.rows_of(ids.long()).to(self.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantisedEmbedding:
        """Move the table as Module._apply does, but never cast it; a cast changes only `dtype`,
        that of rows."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        probe = fn(torch.empty(0, dtype=self.dtype, device=self.table.device))
        self.dtype = probe.dtype
        if self.table.device.type != "meta":
            self.table = self.table.to(probe.device)
        return self


def joined_parts(parts: Sequence[QuantisedWeight]) -> tuple[QuantisedWeight, ...]:
    whole = QuantisedWeight.concatenate(parts)  # of many parts, each is copied once
    if whole is not None:
        return (whole,)
    joined: list[QuantisedWeight] = []
    for part in parts:
        both = QuantisedWeight.concatenate([joined[-1], part]) if joined else None
        if both is None:
            joined.append(part)
        else:
            joined[-1] = both
    return tuple(joined)
