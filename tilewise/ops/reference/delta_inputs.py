"""The launcher of delta_inputs for backend="reference": float64, rounded where the op rounds."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.kernels.spec import ElementSpec

__all__ = ["delta_inputs", "why_not"]


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def delta_inputs(
    mixed: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    beta_scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, g and beta as `ops.delta_inputs` defines them, computed in float64."""
    both = mixed[:, : 2 * num_key_heads * key_dim].double().unflatten(-1, (-1, key_dim))
    unit = (both * torch.rsqrt(both.square().sum(-1, keepdim=True) + eps)).to(mixed.dtype)
    b, a = ba.double().chunk(2, -1)
    g = -a_log.double().exp() * F.softplus(a + dt_bias.double(), threshold=50.0)
    beta = (torch.sigmoid(b).to(ba.dtype).double() * beta_scale).to(ba.dtype)
    q, k = (part.contiguous() for part in unit.chunk(2, 1))
    return q, k, g.float(), beta.float()
