"""Eight-bit keys and values: their format and its error.

A row is one token's D channels of one head. value = scale * stored, stored being an int8 in
-127 ... 127 or a float8_e4m3fn in -448 ... 448, and scale a float32.

A scale computed from the row is amax / limit, so that the largest channel becomes the limit. Then,
with half a unit of float32 in the last place added,

    int8: |error| <= amax / 254,    e4m3: |error| <= max(|x| / 16, amax / 448 / 1024)

(half a step of an integer; half of the 2^-3 between two numbers of 3 mantissa bits, or of the 2^-9
between two subnormal ones). With a scale given by the caller, values beyond the limit saturate.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["LIMITS", "dequantise", "quantise", "row_scale"]

LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
# 1 / scale must be a float32, so rows whose scale would be subnormal are stored as 0.
SMALLEST_SCALE = 2.0**-126


def row_scale(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the scale (...) float32 of each row of x (..., D): amax / limit.

    The scale is 0 for a row of zeros (or if amax / limit is subnormal), NaN for one with an
    infinity or NaN.
    """
    rows = x.float()
    scale = rows.abs().amax(-1) * torch.tensor(1.0 / LIMITS[dtype], dtype=torch.float32)
    scale = torch.where(scale < SMALLEST_SCALE, 0.0, scale)
    return torch.where(rows.isfinite().all(-1), scale, math.nan)


def quantise(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x / scale in `dtype`, to nearest even, saturated; 0 where scale is 0 or NaN.

    Args:
        x: (..., D), any float dtype; a NaN is stored as 0.
        scale: float32, broadcastable to (...).
    """
    limit = LIMITS[dtype]
    inverse = torch.where(scale > 0, 1.0 / scale, 0.0).unsqueeze(-1)
    scaled = (x.float() * inverse).clamp(-limit, limit).nan_to_num(nan=0.0)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype)


def dequantise(stored: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return scale * stored (..., D): exact in float64, rounded once in narrower dtypes.

    Args:
        stored: (..., D) int8 or float8_e4m3fn.
        scale: float32, broadcastable to (...).
    """
    wide = torch.promote_types(dtype, torch.float32)
    return (stored.to(wide) * scale.to(wide).unsqueeze(-1)).to(dtype)
