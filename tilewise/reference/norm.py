"""RMS norm and activations as defined, with the roundings that models were trained with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["activate", "add_rms_norm", "gated_mul", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return round(x / sqrt(mean(x^2) + eps)) * weight (..., E), statistics in float64.

    The division and the product are each rounded to the dtype of x; float64 is not rounded.
    """
    wide = x.double()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled.to(x.dtype).double() * weight.double()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rms_norm(r, weight, eps) and r, where r is x + residual, rounded to the dtype of x
    before the norm is taken."""
    total = (x.double() + residual.double()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def gated_mul(gate: Tensor, x: Tensor | None, function: str) -> Tensor:
    """Return round(f(gate)) * x for gate and x (..., I), or for both in gate (..., 2 I) without x.

    Computed in float64; f(gate) and the product are each rounded to the dtype of gate. `function`
    is the name of f, see `activate`.
    """
    if x is None:
        gate, x = gate.chunk(2, dim=-1)
    return (activate(gate, function).double() * x.double()).to(gate.dtype)


def activate(x: Tensor, function: str) -> Tensor:
    """Apply "gelu", "gelu_tanh", "tanh", "softplus", "exp", "silu" or "sigmoid" to every element of
    x.

    Computed in float64, and rounded once to the dtype of x. See `ops.activate`.
    """
    wide = x.double()
    if function == "gelu":  # erfc avoids cancellation
        y = wide * 0.5 * torch.erfc(wide * -math.sqrt(0.5))
    elif function == "gelu_tanh":
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
        y = wide * torch.sigmoid(2 * inner)  # 0.5 (1 + tanh(u)) = sigmoid(2 u)
    elif function == "tanh":
        y = torch.tanh(wide)
    elif function == "softplus":
        y = wide.clamp(min=0) + torch.log1p(torch.exp(-wide.abs()))
    elif function == "exp":
        y = torch.exp(wide)
    else:
        y = torch.sigmoid(wide)
        if function == "silu":
            y = wide * y
    return y.to(x.dtype)
