"""Dropout as a function of (seed, offset) and the place of a probability, never of a tile.

Whether p_ij of sequence b and query head h is kept is one comparison of 16 random bits. They come
from Philox4x32-7 with key = seed and counter = (c, i, b Hq + h, offset), one call for eight keys:
c = 4 (j // 32) + (j % 8) // 2, word (j // 8) % 4 of the four, its high half when j is odd. The
eight keys of a call are those that one thread of a tensor core's accumulator holds, so a kernel
draws every number once, whatever its tiles.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; seven
rounds are the fewest that pass its BigCrush tests.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["dropout_threshold", "keep_mask", "philox4x32"]

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def dropout_threshold(dropout_p: float) -> int:
    """Return how many of the 65,536 values of 16 bits drop a probability."""
    return round(dropout_p * 65536)


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Encrypt four broadcastable int64 tensors of 32-bit words with two."""
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
        shape: (B, Hq, Sq, Sk); rows and keys count from the start of their sequence.
        dropout_p: probability of dropping, in steps of 2**-16.
        first_query, first_key: where the part of the mask lies; first_key is a multiple of 32.
        first_head: b Hq + h of the first query head of the part.
    """
    batch, heads, seqlen_q, seqlen_k = shape
    device = philox.device
    seed, offset = philox[0], philox[1] & _LOW
    key = (seed & _LOW, (seed >> 32) & _LOW)
    calls = -(-seqlen_k // 32) * 4
    c0 = torch.arange(calls, device=device) + first_key // 8
    c1 = torch.arange(seqlen_q, device=device).view(-1, 1) + first_query
    c2 = torch.arange(batch * heads, device=device).view(-1, 1, 1) + first_head
    words = torch.stack(torch.broadcast_tensors(*philox4x32((c0, c1, c2, offset), key)), -1)
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)  # (BH, Sq, calls, word, half)
    # key = 32 block + 8 word + 2 (call % 4) + half
    keys = halves.view(batch * heads, seqlen_q, calls // 4, 4, 4, 2).transpose(-2, -3)
    numbers = keys.reshape(batch, heads, seqlen_q, calls * 8)[..., :seqlen_k]
    return numbers >= dropout_threshold(dropout_p)
