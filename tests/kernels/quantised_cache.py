"""Eight-bit caches for tests, poisoned where nobody has written."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.reference.quantise import quantise, row_scale


def quantised(cache: Tensor, dtype: torch.dtype, *, fixed: bool = False) -> tuple[Tensor, Tensor]:
    """Quantise a cache of `make_paged_cache`: stored (N, P, Hk, D), scale (N, P, Hk) or (Hk,).

    Slots that were NaN become NaN where the format has one and -128 where not; their scales NaN.
    """
    is_poison = cache.isnan()
    values = cache.float().nan_to_num(nan=0.0)
    scale = row_scale(values, dtype)
    if fixed:  # a scale that saturates a little
        scale = scale.amax((0, 1)) * 0.7
    stored = quantise(values, scale, dtype)
    stored.view(torch.int8)[is_poison] = -128 if dtype == torch.int8 else 0x7F
    if not fixed:
        scale[is_poison.any(-1)] = math.nan
    return stored, scale
