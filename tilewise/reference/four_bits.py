"""Four-bit keys and values: their format, and how far they are from what was written.

A row is one token's D channels of one head, D even. It is rotated first: of each group of B
channels, B the largest power of two that divides D, at most 128, some are negated, and the group is
multiplied by the orthonormal Hadamard matrix. That spreads an outlier over its group and, by the
signs, also what all channels have in common: channel c is negated where an odd number of the pairs
of its bits 0 and 1, 2 and 3, 4 and 5 are both 1, a pattern as far as can be from each row of the
matrix. Then, for the 16 codes,

    rotated = scale * (c - zero),    |error| <= scale,    scale = (highest - lowest) / 15

where the range holds 0. Two codes are a byte, the even channel's in its low half. zero, an integer
of 0 ... 15, is in the last four bits of scale's mantissa: a float32 is precise enough without them,
and codes are computed with the scale that holds them.

Scores need no rotation back, as q . k = rotate(q) . rotate(k).

Source: Ashkboos et al. 2024, "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs".
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.reference.quantise import SMALLEST_SCALE

__all__ = ["hadamard_matrix", "pack", "rotate", "rotate_back", "rotated_channels", "unpack"]

WIDEST = 128  # channels that are rotated together, at most
TOP = 15  # the largest code
ZERO_BITS = 15  # of a scale's bits, those that hold the zero


def rotated_channels(width: int) -> int:
    """Return B, the channels that are rotated together in rows of `width`."""
    return min(WIDEST, width & -width)


def hadamard_matrix(size: int) -> Tensor:
    """Return the orthonormal matrix (size, size) of Sylvester's construction, size a power of 2."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(size)


def signs(size: int) -> Tensor:
    """Return 1 or -1 for each channel of a group, float64 (size,)."""
    pairs = [(c & (c >> 1) & 0x55).bit_count() for c in range(size)]
    return torch.tensor([(-1.0) ** count for count in pairs], dtype=torch.float64)


def rotate(x: Tensor) -> Tensor:
    """Return x (..., D) with each group of channels multiplied by its signs and the Hadamard
    matrix, in x's dtype."""
    size = rotated_channels(x.shape[-1])
    groups: Tensor = x.unflatten(-1, (-1, size)) * signs(size).to(x)
    return (groups @ hadamard_matrix(size).to(x)).flatten(-2)


def rotate_back(x: Tensor) -> Tensor:
    """Return the tensor of which x (..., D) is the rotation by `rotate`."""
    size = rotated_channels(x.shape[-1])
    groups: Tensor = x.unflatten(-1, (-1, size)) @ hadamard_matrix(size).to(x)
    return (groups * signs(size).to(x)).flatten(-2)


def pack(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes uint8 (..., D / 2) and scales float32 (...) of the rows of x (..., D).

    The scale is 0 for a row of zeros (or if it would be subnormal), NaN for one with an infinity or
    NaN; all codes of such rows are 0.
    """
    rows = rotate(x.double() if x.dtype == torch.float64 else x.float()).float()
    is_finite = rows.isfinite().all(-1)
    rows = torch.where(is_finite.unsqueeze(-1), rows, 0.0)
    lowest, highest = rows.amin(-1).clamp(max=0.0), rows.amax(-1).clamp(min=0.0)
    scale = (highest - lowest) * torch.tensor(1.0 / TOP, dtype=torch.float32)
    has_codes = is_finite & (scale >= SMALLEST_SCALE)
    scale = torch.where(has_codes, scale, 1.0)
    zero = (-lowest * (1.0 / scale)).round().clamp(0, TOP)
    tagged = (scale.view(torch.int32) & ~ZERO_BITS) | zero.to(torch.int32)
    scale = tagged.view(torch.float32)
    codes = ((rows * (1.0 / scale).unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, TOP)
    codes = torch.where(has_codes.unsqueeze(-1), codes, 0.0).to(torch.uint8)
    scale = torch.where(has_codes, scale, torch.where(is_finite, 0.0, math.nan))
    return codes[..., ::2] | (codes[..., 1::2] << 4), scale


def unpack(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values (..., D) of codes (..., D / 2): exact up to `dtype`, rotated back in it."""
    wide = torch.promote_types(dtype, torch.float32)
    zero = (scale.view(torch.int32) & ZERO_BITS).to(wide).unsqueeze(-1)
    codes = torch.stack([stored & 15, stored >> 4], -1).flatten(-2).to(wide)
    return rotate_back(((codes - zero) * scale.to(wide).unsqueeze(-1)).to(dtype))
