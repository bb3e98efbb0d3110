"""RMS norm and gated activation by the book, with the roundings that models were trained with."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm", "silu_mul"]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return round(x / sqrt(mean(x^2) + eps)) * weight (..., E), statistics in float64.

    Both roundings are to the dtype of x; for float64 there is none.
    """
    wide = x.double()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (scaled.to(x.dtype).double() * weight.double()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return rms_norm(r) and r = round(x + residual)."""
    total = (x.double() + residual.double()).to(x.dtype)
    return rms_norm(total, weight, eps), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return round(gate / (1 + exp(-gate))) * up for gate_up (..., 2 I), in float64."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    activated = (gate * torch.sigmoid(gate)).to(gate_up.dtype).double()
    return (activated * up).to(gate_up.dtype)
