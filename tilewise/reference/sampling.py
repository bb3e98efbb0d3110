"""The distribution from which a sampler must draw, and its token for a random number."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sample_tokens", "target_distribution", "token_logprobs", "uniform"]

_WORD = 0xFFFFFFFF


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
    2. top_p: keep a token when the tokens strictly more likely have less than top_p in total;
    3. min_p: keep a token when it is at least min_p times as likely as the most likely one.

    Tied tokens are kept or dropped together, so the result does not depend on the vocabulary's
    order.

    Args:
        logits: (..., V), any float dtype; -inf forbids a token.
        temperature: the divisor of the logits; 0 is greedy: probability 1 for the first of the
            largest logits.
        top_k: the rank of step 1; 0 or -1 keeps all.
        top_p: the mass of step 2, in (0, 1]; 1 keeps all.
        min_p: the ratio of step 3, in [0, 1]; 0 keeps all.

    Returns:
        (..., V) float64, each row sums to 1.
    """
    logits = logits.double()
    if temperature == 0:
        return torch.zeros_like(logits).scatter(-1, logits.argmax(-1, keepdim=True), 1.0)
    # The maximum is subtracted before the division, which could overflow at a small temperature.
    p = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, dim=-1)
    if 0 < top_k < p.shape[-1]:
        kth = p.topk(top_k, dim=-1).values[..., -1:]
        p = _renormalise(p, p >= kth)
    if top_p < 1:
        p = _renormalise(p, _mass_above(p) < top_p)
    return _renormalise(p, p >= min_p * p.amax(-1, keepdim=True))


def uniform(seed: int, counter: int) -> float:
    """Return number `counter` of stream `seed` in [0, 1): Philox4x32-10, 53 bits.

    Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    c0, c1, c2, c3 = counter & _WORD, counter >> 32 & _WORD, 0, 0
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return float((c0 >> 5 << 26) | (c1 >> 6)) * 2.0**-53


def sample_tokens(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    counters: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return a token for each row of logits (R, V), int64 (R,), and whether the row's largest logit
    is finite.

    The token is the first whose cumulative probability under `target_distribution` exceeds number
    `counters[row]` of stream `seeds[row]`. With temperature 0, or logits that are not finite, it is
    the argmax. The other arguments are (R,) or None.
    """
    is_finite = logits.amax(-1).isfinite()
    tokens = []
    for row, values in enumerate(logits):

        def number(x: Tensor | None, default: float, row: int = row) -> float:
            return default if x is None else x[row].item()

        heat = number(temperature, 0.0)
        if heat == 0 or not bool(is_finite[row]):
            tokens.append(int(values.argmax()))
            continue
        p = target_distribution(
            values,
            temperature=heat,
            top_k=int(number(top_k, 0)),
            top_p=number(top_p, 1.0),
            min_p=number(min_p, 0.0),
        )
        assert seeds is not None
        assert counters is not None
        cumulative = p.cumsum(-1)
        at = uniform(int(seeds[row]), int(counters[row])) * cumulative[-1]
        tokens.append(int(torch.searchsorted(cumulative, at, right=True)))
    return torch.tensor(tokens, dtype=torch.int64, device=logits.device), is_finite


def token_logprobs(logits: Tensor, token_ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the log_softmax of one token a row, and the ids and values of each row's `count`
    largest.

    `token_ids` is (R,); the results are float32 (R,), int64 (R, count) and float32 (R, count).
    """
    logprobs = logits.double().log_softmax(-1)
    own = logprobs.gather(-1, token_ids[:, None])[:, 0]
    values, ids = logprobs.sort(dim=-1, descending=True, stable=True)
    return own.float(), ids[:, :count].contiguous(), values[:, :count].float().contiguous()


def _mass_above(p: Tensor) -> Tensor:
    """Return, for each token, the sum of the probabilities strictly greater than its own."""
    ordered, index = p.sort(dim=-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    first = torch.ones_like(ordered, dtype=torch.bool)
    first[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    # `before` ascends, so a running maximum extends the value of a tie's first token to the others.
    mass = torch.where(first, before, 0.0).cummax(dim=-1).values
    return torch.zeros_like(p).scatter(-1, index, mass)


def _renormalise(p: Tensor, kept: Tensor) -> Tensor:
    p = torch.where(kept, p, 0.0)
    return p / p.sum(-1, keepdim=True)
