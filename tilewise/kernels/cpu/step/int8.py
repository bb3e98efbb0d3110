"""Weights as int8 with a scale for every 64 inputs of an output.

A weight is q = round(w / scale) in -127 ... 127 with scale = max |w| / 127 of its group, float32,
and represents q * scale, rounded to the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.cpu.step.narrow import pack_narrow
from tilewise.kernels.cpu.step.panels import Panels
from tilewise.kernels.quantised_weight import QuantisedWeight

SCALED = 64  # inputs that share a scale
LARGEST = 127
LARGEST_SCALE = torch.finfo(torch.float32).max / LARGEST * (1 - 2.0**-23)  # 127 times it is finite
_AT_ONCE = 4096  # rows quantised at once: temporaries stay small beside the weight


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 numbers (N, K) and float32 scales (N, ceil(K / 64)) for a weight (N, K), a scale
    for each 64 inputs of an output.

    Raises:
        ValueError: the weight contains an infinity or NaN.
    """
    outputs, inputs = weight.shape
    groups = -(-inputs // SCALED)
    wide = torch.zeros((outputs, groups * SCALED), dtype=torch.float32)
    wide[:, :inputs] = weight.detach()
    wide = wide.view(outputs, groups, SCALED)
    largest = wide.abs().amax(-1)
    if not largest.isfinite().all():
        raise ValueError("weight must be finite to be held as int8, got infinity or NaN")
    scale = (largest / LARGEST).clamp_(max=LARGEST_SCALE)
    # A group of zeros, or of numbers whose 127th is below float32's range, becomes all zero.
    divisor = torch.where(scale > 0, scale, torch.inf)
    q = (wide / divisor[..., None]).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
    return q.view(outputs, -1)[:, :inputs], scale


def dequantise(q: Tensor, scale: Tensor) -> Tensor:
    """Return the weight (N, K) in float32 that int8 numbers (N, K) and their scales (N, ceil(K /
    64)) represent."""
    scales = scale.repeat_interleave(SCALED, -1)[..., : q.shape[-1]]
    return q.float() * scales


def pack_int8(weight: Tensor, bias: Tensor | None = None) -> tuple[Panels, float]:
    """Quantise and pack a (N, K) weight; return its panels and its relative RMS error.

    Raises:
        ValueError: the weight contains an infinity or NaN.
    """
    codes, scales = [], []
    lost = total = 0.0
    for rows in weight.detach().split(_AT_ONCE):
        q, scale = quantise(rows)
        lost += float((dequantise(q, scale) - rows.float()).double().square().sum())
        total += float(rows.double().square().sum())
        codes.append(q)
        scales.append(scale)
    q, scale = torch.cat(codes), torch.cat(scales)
    odd = -q.shape[1] % SCALED if q.shape[1] > SCALED else 0
    held = QuantisedWeight(torch.nn.functional.pad(q, (0, odd)), scale, (1, SCALED))
    panels = pack_narrow([held], bias, weight.dtype)._replace(num_inputs=weight.shape[1])
    return panels, (lost / total) ** 0.5 if total else 0.0
