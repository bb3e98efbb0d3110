"""The launcher of key_bias_channels for backend="reference": torch's operations, of any device."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewise.kernels.key_bias import CHANNELS, LEAST, factors
from tilewise.kernels.spec import ElementSpec

__all__ = ["key_bias_channels", "why_not"]


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def key_bias_channels(q: Tensor, k: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return q and k with more channels as `ops.key_bias_channels` defines them, computed in
    float32, or in float64 for float64."""
    wide = torch.promote_types(q.dtype, torch.float32)
    power, factor = factors(scale, wide)
    if keys.dtype == torch.bool:
        parts = [torch.where(keys, 0.0, LEAST).to(q.dtype)]  # far below any other logit
    else:
        parts = _parts(keys.to(wide).clamp(min=LEAST) * factor, q.dtype)
    added = pad(torch.stack(parts, dim=-1), (0, CHANNELS - len(parts))).unsqueeze(2)
    return _joined(q, q.new_full((CHANNELS,), power)), _joined(k, added)


def _joined(x: Tensor, added: Tensor) -> Tensor:
    """Return x (N, S, H, D) followed by the channels of `added`, which broadcasts to its rows."""
    return torch.cat([x, added.expand(*x.shape[:-1], CHANNELS)], dim=-1)


def _parts(x: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of `dtype` whose sum is x: x alone if it has that dtype, else three.

    Each of the three is the part of x that those before leave over, rounded.
    """
    first = x.to(dtype)
    if x.dtype == dtype:
        return [first]
    left = x - first.to(x.dtype)
    second = left.to(dtype)
    return [first, second, (left - second.to(x.dtype)).to(dtype)]
