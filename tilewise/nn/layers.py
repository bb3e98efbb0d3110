"""Norms and feed-forward blocks of the decoders. LayerNorm is torch's own."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["ACTIVATIONS", "MLP", "GatedMLP", "RMSNorm"]

_gelu_tanh = functools.partial(F.gelu, approximate="tanh")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_python": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_fast": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
}


class RMSNorm(nn.Module):
    """Scale each row to unit root mean square: y = round(x / sqrt(mean(x^2) + eps)) * weight.

    The statistics are float32 (float64 for float64 input) and the quotient is rounded to the
    dtype of x before the weight multiplies it, which is the order that Hugging Face's Llama was
    trained with. Source: Zhang and Sennrich, 2019.
    """

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dim of x (..., dim)."""
        return F.rms_norm(x, self.weight.shape, None, self.eps) * self.weight

    def extra_repr(self) -> str:
        """Show the size in `print(model)`."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class GatedMLP(nn.Module):
    """Compute down(act(gate(x)) * up(x)); gate and up are one matrix product.

    Rows 0 ... I - 1 of gate_up_proj are the gate's, the other I are up's. Source: Shazeer, 2020.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = False
    ) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., E) to (..., E)."""
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        y: Tensor = self.down_proj(self.activation(gate) * up)
        return y


class MLP(nn.Module):
    """Compute down(act(up(x))), the feed-forward block of GPT-2."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=bias)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=bias)
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        """Map x (..., E) to (..., E)."""
        y: Tensor = self.down_proj(self.activation(self.up_proj(x)))
        return y
