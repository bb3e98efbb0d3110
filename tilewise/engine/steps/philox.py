"""Random numbers that depend on a key and a counter only, so that no batch can disturb a sample.

A generator with a state gives different numbers when requests join, leave or are preempted. Philox
is a keyed bijection instead: number `counter` of key `seed` is always the same, computed for a
whole batch at once, in any order.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011;
Philox4x32-10.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["philox4x32", "uniforms"]

# The constants of the paper: the multipliers of a round, and what the key grows by after each.
_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_KEY_STEPS = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)  # bits of a word


def philox4x32(
    counter: Sequence[NDArray[np.uint64]], key: Sequence[NDArray[np.uint64]]
) -> tuple[NDArray[np.uint64], ...]:
    """Encrypt counters with keys, element by element.

    Args:
        counter: four arrays (N,) of 32-bit words held in uint64.
        key: two arrays (N,) of 32-bit words held in uint64.

    Returns:
        Four arrays (N,) of random 32-bit words.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product_1 >> _HALF) ^ c1 ^ k0,
            product_1 & _LOW,
            (product_0 >> _HALF) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(seeds: Sequence[int], counters: Sequence[int]) -> NDArray[np.float64]:
    """Return number `counters[i]` of stream `seeds[i]`, uniform in [0, 1) with 53 random bits.

    Args:
        seeds: any integers; their low 64 bits count.
        counters: at least 0 and below 2**64, as many as seeds.
    """
    seed_words = np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64)
    counter_words = np.array(counters, dtype=np.uint64)
    zero = np.zeros_like(counter_words)
    high, low, _, _ = philox4x32(
        (counter_words & _LOW, counter_words >> _HALF, zero, zero),
        (seed_words & _LOW, seed_words >> _HALF),
    )
    bits = ((high >> np.uint64(5)) << np.uint64(26)) | (low >> np.uint64(6))  # 27 + 26
    return bits.astype(np.float64) * 2.0**-53
