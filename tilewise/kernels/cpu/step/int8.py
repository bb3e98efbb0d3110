"""Weights of 8 bits with a scale for every 64 inputs of an output, in panels.

A weight is q = round(w / scale) in -127 ... 127 with scale = max |w| / 127 of its group, float32,
and represents q * scale. Products add the integers q in float32 and multiply the sums of a group
by its scale, so nothing else is rounded. A row of an embedding that is tied to the head is
q * scale rounded to the model's dtype.

A group of four panels, see `panels.py`, has a part for every 64 inputs: 64 scales, then for each
step of 32 inputs 4 panels of [32 inputs][16 outputs] bytes. One row streams these in their order,
1.06 bytes a weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.cpu.step.panels import (
    COLUMNS,
    GROUP,
    STEP,
    WIDTH,
    Panels,
    pad_bias,
    padded,
)

SCALED = 64  # inputs that share a scale
STEPS = SCALED // STEP  # steps of 32 inputs that share a scale
LARGEST = 127
LARGEST_SCALE = torch.finfo(torch.float32).max / LARGEST * (1 - 2.0**-23)  # 127 times it is finite
SCALE_BYTES = 4 * WIDTH  # bytes of the scales before SCALED inputs
STEP_BYTES = WIDTH * STEP
_CHUNK = 64  # groups of panels quantised at once: temporaries stay small beside the weight


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 (N, K) and float32 scales (N, ceil(K / 64)) of a weight (N, K).

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
    """Return the weight (N, K) float32 that int8 (N, K) and their scales represent."""
    scales = scale.repeat_interleave(SCALED, -1)[..., : q.shape[-1]]
    return q.float() * scales


def pack_int8(weight: Tensor, bias: Tensor | None = None) -> tuple[Panels, float]:
    """Quantise and pack a (N, K) weight; return its panels and its relative RMS error.

    Raises:
        ValueError: the weight contains an infinity or NaN.
    """
    outputs, inputs = weight.shape
    dtype = weight.dtype
    steps = padded(inputs, STEP) // STEP
    num_scales = -(-steps // STEPS)
    groups = padded(outputs, WIDTH) // WIDTH
    words = torch.empty((groups, group_bytes(inputs)), dtype=torch.int8)
    lost = total = 0.0
    for first in range(0, groups, _CHUNK):
        rows = weight.detach()[first * WIDTH : (first + _CHUNK) * WIDTH]
        q, scale = quantise(rows)
        count = -(-len(rows) // WIDTH)
        lost += float((dequantise(q, scale) - rows.float()).double().square().sum())
        total += float(rows.double().square().sum())
        wide = torch.zeros((count * WIDTH, num_scales * SCALED), dtype=torch.int8)
        wide[: len(rows), :inputs] = q
        parts = wide.view(count, GROUP, COLUMNS, num_scales, STEPS, STEP)
        parts = parts.permute(0, 3, 4, 1, 5, 2).reshape(count, num_scales, -1)
        wide_scale = torch.zeros((count * WIDTH, num_scales))
        wide_scale[: len(rows)] = scale
        scales = wide_scale.view(count, WIDTH, num_scales).transpose(1, 2).contiguous()
        both = torch.cat((scales.view(torch.int8), parts), -1).view(count, -1)
        # With an odd number of steps the last scales have one step.
        words[first : first + count] = both[:, : words.shape[1]]
    error = (lost / total) ** 0.5 if total else 0.0
    return Panels(words.view(-1), outputs, inputs, pad_bias(bias, groups * WIDTH), dtype), error


def group_bytes(inputs: int) -> int:
    """Return the bytes of a group of four panels of K inputs, with or without padding."""
    steps = -(-inputs // STEP)
    return steps * STEP_BYTES + -(-steps // STEPS) * SCALE_BYTES


def unpack_int8(panels: Panels) -> Tensor:
    """Return the (N, K) weight that the panels represent, in the model's dtype."""
    return rows_of_int8(panels, torch.arange(panels.num_outputs))


def rows_of_int8(panels: Panels, rows: Tensor) -> Tensor:
    """Return rows (...,) of the weight that the panels represent: (..., K)."""
    flat = rows.reshape(-1)
    words = panels.words.view(-1, group_bytes(panels.num_inputs))
    group, panel, column = flat // WIDTH, flat // COLUMNS % GROUP, flat % COLUMNS
    steps = panels.padded_inputs // STEP
    # Offsets of the elements and the scales of a panel's first output within its group.
    step = torch.arange(steps)
    start = step * STEP_BYTES + (step // STEPS + 1) * SCALE_BYTES
    places = (start[:, None] + COLUMNS * torch.arange(STEP)).view(-1) + (
        panel * STEP_BYTES // GROUP
    )[:, None]
    q = words[group[:, None], places + column[:, None]]
    first = torch.arange(0, steps, STEPS)
    places = first * STEP_BYTES + first // STEPS * SCALE_BYTES
    bytes_of = (places[:, None] + torch.arange(4)).view(-1)
    place = bytes_of + (4 * (flat % WIDTH))[:, None]
    scale = words[group[:, None], place].view(torch.float32)
    found = dequantise(q, scale)[:, : panels.num_inputs].to(panels.dtype)
    return found.reshape(*rows.shape, panels.num_inputs)
