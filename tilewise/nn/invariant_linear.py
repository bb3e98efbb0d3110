"""A linear layer whose rows do not depend on one another."""

from __future__ import annotations

from torch import Tensor, nn

from tilewise import ops

__all__ = ["InvariantLinear"]


class InvariantLinear(nn.Module):
    """Compute x @ weight.T + bias so that a row's bits depend on no other row.

    It is for inference only: results have no gradient. See `ops.invariant_linear` for dtypes,
    devices and errors.

    Args:
        weight: (out, in); held as a buffer that shares its memory.
        bias: (out,), held in the same way; or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.register_buffer("weight", weight.detach(), persistent=False)
        held = None if bias is None else bias.detach()
        self.register_buffer("bias", held, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., in) to (..., out)."""
        weight, bias = self.get_buffer("weight"), self.bias
        assert bias is None or isinstance(bias, Tensor)
        return ops.invariant_linear(x, weight, bias)
