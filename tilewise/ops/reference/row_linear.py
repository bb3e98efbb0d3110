"""The launchers of add_rms_norm_linear and row_linear_parts for backend="reference", in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops.reference.norm import add_rms_norm

__all__ = ["add_rms_norm_linear", "row_linear_parts", "why_not"]


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def add_rms_norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    is_gated: bool,
) -> tuple[Tensor, Tensor]:
    """Return y (..., N) and the new residual x + residual (..., E); the product is float64.

    Args:
        x: (..., E) of residual's dtype; or float32 parts (P, ..., E), of which x is the sum, beside
            a residual of another dtype.
        is_gated: True if weight has 2 N rows, gates above values, and y is silu(gate) * value.
    """
    if x.dtype == torch.float32 and residual.dtype != torch.float32:
        total = x[0]
        for part in x[1:]:
            total = total + part
        x = total.to(residual.dtype)
    h, stream = add_rms_norm(x, residual, norm_weight, eps)
    y = h.double() @ weight.double().T
    y = (y if bias is None else y + bias.double()).to(weight.dtype)
    if is_gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate.double()).to(gate.dtype) * up
    return y, stream


def row_linear_parts(x: Tensor, weight: Tensor) -> Tensor:
    """Return x weight^T, computed in float64, as the only part: (1, ..., N) float32."""
    return (x.double() @ weight.double().T).float()[None]
