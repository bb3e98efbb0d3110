"""The launchers of `ops.shifted_rms_norm` for backend="reference": float64, rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.ops.reference.norm import why_not

__all__ = ["add_shifted_rms_norm", "shifted_rms_norm", "why_not"]


def shifted_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return y = x / sqrt(mean(x^2) + eps) * (1 + weight), in the shape and dtype of x."""
    wide = x.double()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * (1.0 + weight.double())).to(x.dtype)


def add_shifted_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `shifted_rms_norm` of residual + x, and that sum, in the shape and dtype of x."""
    total = residual + x
    return shifted_rms_norm(total, weight, eps), total
