"""The launcher of gated_rms_norm for backend="reference": float64, rounded where the op rounds."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec

__all__ = ["gated_rms_norm", "why_not"]


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int,
    activation: str,
    gate_first: bool,
    rounds_first: bool,
) -> Tensor:
    """Return y in the shape and dtype of x, as `ops.gated_rms_norm` defines it, in float64."""
    wide, z = x.double(), gate.double()
    factor = torch.sigmoid(z) * (z if activation == "silu" else 1.0)
    if gate_first:
        wide = wide * factor
    groups = wide.unflatten(-1, (-1, group_size))
    y = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2)

    def rounded(part: Tensor) -> Tensor:
        return part.to(x.dtype).double() if rounds_first else part

    y = rounded(rounded(y) * weight.double())
    return (y if gate_first else y * factor).to(x.dtype)
