"""Dropout as a function of (seed, offset) and the position of a probability, never of a tile.

The probability p_ij of sequence b and query head h is kept or dropped by one comparison of a random
byte. Bytes come from Philox4x32-7 with key = seed. Those of 32 keys of a row come from two calls
with the counters (j // 32, 2 i + half, b Hq + h, offset), half = 0 and 1. Bit j % 32 of each of the
eight words w0 ... w7 of the two calls is a bit of key j's byte, the lowest bit first. So 32 bytes
are compared at once, with one three-way logical instruction for each of their bits, and the result
is the word that a kernel needs, whose bit j % 32 says whether j is kept.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; seven
rounds are the fewest that pass its BigCrush tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropout_rate", "dropout_threshold", "keep_mask", "philox4x32"]

STEPS = 256  # number of values of a random byte
ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def dropout_threshold(dropout_p: float) -> int:
    """Return how many of the 256 values of a random byte mean that a probability is dropped.

    The result is round(256 dropout_p), except that 0 and 256 are used for dropout_p of 0 and 1
    alone.
    """
    if dropout_p in (0, 1):
        return int(dropout_p) * STEPS
    return min(max(round(dropout_p * STEPS), 1), STEPS - 1)


def dropout_rate(dropout_p: float) -> float:
    """Return the drop probability that kernels use for `dropout_p`, a multiple of 1/256."""
    return dropout_threshold(dropout_p) / STEPS


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Return four int64 tensors of 32-bit words, `counter` encrypted with `key` by Philox4x32-7.

    The words of `counter` and `key` are int64 tensors that broadcast together.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    return c0, c1, c2, c3


def _multiply(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """Return the high and low 32 bits of word * factor, without leaving int64."""
    upper = (word >> 16) * factor  # < 2**48
    lower = (word & 0xFFFF) * factor
    middle = (upper & _LOW) + (lower >> 16)
    low = ((middle & 0xFFFF) << 16) | (lower & 0xFFFF)
    return (upper >> 32 << 16) + (middle >> 16), low


def keep_mask(
    philox: Tensor,
    shape: tuple[int, int, int, int],
    dropout_p: float,
    *,
    first_query: int = 0,
    first_key: int = 0,
    first_head: int = 0,
) -> Tensor:
    """Return which probabilities dropout keeps, bool (B, Hq, Sq, Sk).

    Args:
        philox: int64 (2,), the seed and the offset; the offset counts modulo 2**32.
        shape: (B, Hq, Sq, Sk), the shape of the part; rows and keys count from the start of their
            sequence.
        dropout_p: the probability of dropping, see `dropout_rate`.
        first_query, first_key: the position of the part; first_key is a multiple of 32.
        first_head: b Hq + h of the first query head of the part.
    """
    batch, heads, seqlen_q, seqlen_k = shape
    device = philox.device
    seed, offset = philox[0], philox[1] & _LOW
    key = (seed & _LOW, (seed >> 32) & _LOW)
    blocks = -(-seqlen_k // 32)
    c0 = torch.arange(blocks, device=device) + first_key // 32
    rows = torch.arange(seqlen_q, device=device).view(-1, 1) + first_query
    c2 = torch.arange(batch * heads, device=device).view(-1, 1, 1) + first_head
    bit = torch.arange(32, device=device)
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for half in (0, 1):
        words = philox4x32((c0, (2 * rows + half) & _LOW, c2, offset), key)
        for place, word in enumerate(words, 4 * half):
            numbers = numbers + ((word.unsqueeze(-1) >> bit & 1) << place)
    numbers = numbers.reshape(batch, heads, seqlen_q, blocks * 32)[..., :seqlen_k]
    return numbers >= dropout_threshold(dropout_p)
