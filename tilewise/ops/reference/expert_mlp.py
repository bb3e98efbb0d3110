"""backend="reference" of expert_mlp: token by token, in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops.mxfp4 import unpack_mxfp4


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    *,
    activation: str,
    interleaved: bool,
    limit: float,
    alpha: float,
    weighs_input: bool,
    batch_invariant: bool,
) -> Tensor:
    """Return y (T, E), the weighted sum of each token's experts, computed in float64.

    The arguments are those of `ops.expert_mlp`.
    """
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, experts in enumerate(chosen.tolist()):
        for weight, e in zip(weights[token].double(), experts, strict=True):
            if not 0 <= e < up.shape[0]:
                continue
            row = x[token].double() * (weight if weighs_input else 1.0)
            both = _wide(up, up_scale, e) @ row
            if up_bias is not None:
                both += up_bias[e].double()
            back = _wide(down, down_scale, e)
            gate, other = both, torch.ones_like(both)
            if len(both) != back.shape[1]:
                gate, other = (both[0::2], both[1::2]) if interleaved else both.chunk(2)
            part = back @ _activated(gate, other, activation, limit, alpha)
            if down_bias is not None:
                part += down_bias[e].double()
            y[token] += part * (1.0 if weighs_input else weight)
    y = y.to(x.dtype)
    if shared is None:
        return y
    if shared_gate is not None:
        shared = torch.sigmoid(shared_gate.double()).to(x.dtype) * shared
    return y + shared


def _activated(gate: Tensor, up: Tensor, activation: str, limit: float, alpha: float) -> Tensor:
    if activation == "clamped":
        gate = gate.clamp(max=limit)
        return (up.clamp(-limit, limit) + 1) * gate * torch.sigmoid(alpha * gate)
    if activation == "silu":
        return F.silu(gate) * up
    if activation == "relu":
        return F.relu(gate) * up
    if activation == "relu_squared":
        return F.relu(gate).square() * up
    return F.gelu(gate, approximate="tanh" if activation == "gelu_tanh" else "none") * up


def _wide(weight: Tensor, scale: Tensor | None, e: int) -> Tensor:
    return weight[e].double() if scale is None else unpack_mxfp4(weight[e], scale[e], torch.float64)
