"""Sampling on the device in torch's own operations: sync-free, whatever the rows ask for.

The distribution and the random numbers are those of `sampler.sample`: weights are integers, the
number is that of (seed, counter), and a row of temperature 0 takes the first of its largest logits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.engine.sampler import WEIGHT_OF_ONE

__all__ = ["sample_tokens", "token_logprobs", "uniforms"]

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)  # as in `philox`
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def sample_tokens(
    logits: Tensor,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    counters: Tensor,
) -> tuple[Tensor, Tensor]:
    """Draw one token from each row.

    Args:
        logits: (R, V) float32.
        temperature, top_p, min_p: (R,) float32; temperature 0 is the argmax.
        top_k: (R,) int32; below 1 keeps all.
        seeds, counters: (R,) int64; which random number, see `philox.uniforms`.

    Returns:
        Token ids (R,) int64, and whether the largest logit of a row is finite, (R,) bool.
    """
    best, argmax = logits.max(dim=-1)
    is_greedy = temperature == 0
    scaled = logits.double() - best.unsqueeze(1)
    scaled /= torch.where(is_greedy, 1.0, temperature).double().unsqueeze(1)
    p = scaled.softmax(dim=-1)
    p = _truncate(p, top_k, top_p, min_p)
    p /= p.sum(dim=-1, keepdim=True)
    cumulative = p.mul_(WEIGHT_OF_ONE).to(torch.int64).cumsum(dim=-1)
    total = cumulative[:, -1:]
    u = uniforms(seeds, counters).unsqueeze(1)
    threshold = torch.minimum((u * total).to(torch.int64), total - 1)
    drawn = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
    drawn = drawn.clamp_(max=logits.shape[1] - 1)  # of a row that is not finite
    return torch.where(is_greedy, argmax, drawn), best.isfinite()


def token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log_softmax of each row at its token and at its `count` likeliest ones.

    Returns:
        (R,) float32, ids (R, count) int64 and values (R, count), the likeliest first.
    """
    logprobs = logits.log_softmax(dim=-1)
    top, top_ids = logprobs.topk(min(count, logits.shape[-1]), dim=-1)
    return logprobs.gather(1, token_ids.unsqueeze(1))[:, 0], top_ids, top


def uniforms(seeds: Tensor, counters: Tensor) -> Tensor:
    """Return `philox.uniforms` of int64 tensors (N,), float64."""
    c0, c1 = counters & _LOW, (counters >> 32) & _LOW
    c2 = c3 = torch.zeros_like(c0)
    k0, k1 = seeds & _LOW, (seeds >> 32) & _LOW
    for _ in range(_ROUNDS):
        # int64 products wrap around modulo 2**64, which keeps the bits of both words.
        product_0, product_1 = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            ((product_1 >> 32) & _LOW) ^ c1 ^ k0,
            product_1 & _LOW,
            ((product_0 >> 32) & _LOW) ^ c3 ^ k1,
            product_0 & _LOW,
        )
        k0, k1 = (k0 + _KEY_STEPS[0]) & _LOW, (k1 + _KEY_STEPS[1]) & _LOW
    bits = ((c0 >> 5) << 26) | (c1 >> 6)
    return bits.double() * 2.0**-53


def _truncate(p: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Return the probabilities `p` with those that `sampler.truncate` drops set to 0."""
    ordered = p.sort(dim=-1, descending=True).values
    size = ordered.shape[-1]
    top_k, limit = top_k.long().unsqueeze(1), top_p.double().unsqueeze(1)
    kth = ordered.gather(1, (top_k - 1).clamp(0, size - 1))
    kept = (ordered >= kth) | (top_k < 1)
    mass = ordered * kept
    total = torch.where(top_k >= 1, mass.sum(dim=-1, keepdim=True), 1.0)
    before = (mass.cumsum(dim=-1) - mass) / total
    kept &= (before < limit) | (limit >= 1)
    least = torch.where(kept, ordered, torch.inf).amin(dim=-1, keepdim=True)
    least = torch.maximum(least, min_p.double().unsqueeze(1) * ordered[:, :1])
    return p * (p >= least)
