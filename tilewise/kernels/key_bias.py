"""A bias of keys as channels of q and k: the numbers that all who make them share."""

from __future__ import annotations

import functools
import math

import torch

__all__ = ["CHANNELS", "LEAST", "factors"]

# A key bias below this is this: exp of it is 0 in float32 beside any key that is not masked, and
# where all keys are, differences of logits are still there after its addition. float16 holds it.
LEAST = -61440.0
CHANNELS = 8  # added to q and k; kernels take heads that are multiples of so many


@functools.lru_cache(maxsize=256)
def factors(scale: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the added channels of q, a power of two, and the factor of a bias in those of k.

    The first is from 1 to 2 over scale; the second is 1 / (scale * first), as `dtype` rounds it:
    the product of both and `scale` is 1.

    Args:
        scale: the positive, finite factor of q . k.
        dtype: float32 or float64, in which biases are multiplied.
    """
    power = 2.0 ** math.ceil(-math.log2(scale))
    product = torch.tensor(scale * power, dtype=dtype)
    return power, float(1.0 / product)
