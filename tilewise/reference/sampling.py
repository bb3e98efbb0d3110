"""The distribution that a sampler must draw from."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["target_distribution"]


def target_distribution(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> Tensor:
    """Return the probability of each token under temperature and truncation, in float64.

    softmax(logits / temperature), then in this order, renormalised after each step:

    1. top_k: keep a token when fewer than k tokens are strictly more likely;
    2. top_p: keep it when the tokens strictly more likely have less than top_p between them;
    3. min_p: keep it when it is at least min_p times as likely as the most likely one.

    Ties stand or fall together, so the result does not depend on the order of the vocabulary.

    Args:
        logits: (..., V), any float dtype; -inf forbids a token.
        temperature: 0 is greedy: probability 1 for the first of the largest logits.
        top_k: 0 or -1 keeps all.
        top_p: in (0, 1]; 1 keeps all.
        min_p: in [0, 1]; 0 keeps all.

    Returns:
        (..., V) float64, each row sums to 1.
    """
    logits = logits.double()
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    # The maximum goes before the division, which could overflow at a small temperature.
    p = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    if 0 < top_k < p.shape[-1]:
        kth = p.topk(top_k, dim=-1).values[..., -1:]
        p = _renormalise(p, p >= kth)
    if top_p < 1:
        p = _renormalise(p, _mass_above(p) < top_p)
    return _renormalise(p, p >= min_p * p.amax(-1, keepdim=True))


def _mass_above(p: Tensor) -> Tensor:
    """Return, for each token, the sum of the probabilities strictly greater than its own."""
    ordered, index = p.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    # `before` ascends, so a running maximum carries the value of the first of a tie to the others.
    mass = torch.where(first, before, 0.0).cummax(dim=-1).values
    return torch.zeros_like(p).scatter(-1, index, mass)


def _renormalise(p: Tensor, kept: Tensor) -> Tensor:
    p = torch.where(kept, p, 0.0)
    return p / p.sum(-1, keepdim=True)
