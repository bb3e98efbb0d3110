"""backend="reference" of expert_mlp: token by token, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops.mxfp4 import unpack_mxfp4


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(
    x: Tensor,
    logits: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor,
    *,
    num_active: int,
    limit: float,
    alpha: float,
    batch_invariant: bool,
) -> Tensor:
    """Return y (T, E); see `ops.expert_mlp`."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    order = logits.double().argsort(dim=-1, descending=True, stable=True)[:, :num_active]
    for token, experts in enumerate(order.tolist()):
        weights = logits[token, experts].double().softmax(-1)
        for weight, e in zip(weights, experts, strict=True):
            w1 = _wide(up[e], None if up_scale is None else up_scale[e])
            w2 = _wide(down[e], None if down_scale is None else down_scale[e])
            both = w1 @ x[token].double() + up_bias[e].double()
            gate, other = both[0::2].clamp(max=limit), both[1::2].clamp(-limit, limit)
            a = (other + 1) * gate * torch.sigmoid(alpha * gate)
            y[token] += weight * (w2 @ a + down_bias[e].double())
    return y.to(x.dtype)


def _wide(weight: Tensor, scale: Tensor | None) -> Tensor:
    return weight.double() if scale is None else unpack_mxfp4(weight, scale, torch.float64)
