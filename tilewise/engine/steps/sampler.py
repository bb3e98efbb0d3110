"""From logits to tokens: greedy or drawn, the same for a sample whatever shares its batch.

A drawn token is the inverse of the cumulative distribution at one uniform number that belongs to
(seed, tokens drawn before). The distribution is summed in integers, which are exact in any order:
a token of probability 0 is never drawn, and no neighbour can move a boundary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tilewise import ops
from tilewise.engine.batch import BROKEN, Batch, SampledToken, ScheduledSequence
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.philox import uniforms
from tilewise.ops.sampling import MOST_TOKENS

__all__ = ["draw_tokens", "few_threads", "most_likely", "sample", "truncate", "uniforms_of"]

# Probability 1 as an integer weight. 2**48 leaves 15 bits of int64 above it for rounding, and
# nothing that float64 holds above 3.6e-15 is lost.
WEIGHT_OF_ONE = 2.0**48
# Elements that are drawn from at a time. On a CPU a float64 temporary of 2 MiB stays in the L2
# cache and is not mapped anew each time; on a GPU 128 MiB bounds the memory.
MAX_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}
# Logits of a step up to which one thread of a CPU draws the tokens. Several wait for one another in
# each of some ten operations: on a machine that others use 8 x 4,096 logits took two threads a
# median of 17 ms, one 0.5 (Xeon, 2026-11-22).
ONE_THREAD = 2**20
# Most likely tokens that top_k and top_p look at before they sort the whole vocabulary: selecting
# them costs 0.7 ms and sorting 28 ms (150,000 tokens, one core, 2026-11), and text seldom needs
# more.
CANDIDATES = 1024


def sample(
    logits: Tensor, batch: Batch, untouched: Tensor | None = None
) -> list[list[SampledToken]]:
    """Draw the tokens that `batch` asks for.

    Args:
        logits: (R, V) float32, one row per sequence with num_samples > 0, in their order.
        batch: num_samples, seeds and num_generated of its sequences say what to draw.
        untouched: the model's logits, of which log-probabilities are told, where `logits` are
            changed ones.

    Returns:
        One list per sequence of `batch`, of num_samples tokens (empty for 0). They are BROKEN where
        the row of logits has no finite maximum (NaN or infinity); no other row notices.
    """
    with few_threads(logits):
        return _sample(logits, batch, untouched)


@contextmanager
def few_threads(logits: Tensor) -> Iterator[None]:
    """Use one thread of a CPU during the block if `logits` are few; more would cost time."""
    threads = torch.get_num_threads()
    if logits.device.type != "cpu" or logits.numel() > ONE_THREAD or threads == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.inference_mode()
def _sample(logits: Tensor, batch: Batch, untouched: Tensor | None) -> list[list[SampledToken]]:
    rows = [s for s in batch.sequences if s.num_samples > 0]
    if not rows:
        return [[] for _ in batch.sequences]
    assert logits.shape[0] == len(rows)
    if logits.device.type == "cpu" and is_greedy(rows):
        tokens = iter(greedy_tokens(logits.numpy(), rows))
        return [next(tokens) if s.num_samples > 0 else [] for s in batch.sequences]
    best, argmax = logits.max(dim=-1)  # the first of equal ones; NaN when the row has one
    is_finite, raw = best.isfinite(), logits if untouched is None else untouched
    if bool(is_finite.all()):
        drawn = iter(_with_logprobs(raw, rows, draw_tokens(logits, rows, argmax)))
    else:
        drawn = iter(_of_finite_rows(logits, raw, rows, argmax, is_finite))
    return [next(drawn) if s.num_samples > 0 else [] for s in batch.sequences]


def _of_finite_rows(
    logits: Tensor,
    raw: Tensor,
    rows: Sequence[ScheduledSequence],
    argmax: Tensor,
    is_finite: Tensor,
) -> list[list[SampledToken]]:
    """Draw from the rows of logits that are finite; the tokens of other rows are BROKEN.

    Args:
        logits, raw: the logits, and what they were before they were adjusted.
        rows: the sequence of each row.
        argmax: the most likely token of each row.
        is_finite: whether each row is finite.
    """
    samples = [[BROKEN] * s.num_samples for s in rows]
    index = is_finite.nonzero()[:, 0]
    kept = index.tolist()
    if kept:
        some, chosen = logits.index_select(0, index), [rows[i] for i in kept]
        drawn = draw_tokens(some, chosen, argmax.index_select(0, index))
        own = raw.index_select(0, index)
        for i, tokens in zip(kept, _with_logprobs(own, chosen, drawn), strict=True):
            samples[i] = tokens
    return samples


def is_greedy(rows: Sequence[ScheduledSequence]) -> bool:
    """Return whether all rows take their most likely token and return no log-probabilities."""
    return all(s.sampling.greedy and s.sampling.logprobs is None for s in rows)


def greedy_tokens(
    logits: NDArray[np.float32], rows: Sequence[ScheduledSequence]
) -> list[list[SampledToken]]:
    """Return the most likely token of each row of logits, `num_samples` times, BROKEN if not
    finite.

    All rows are greedy. It is computed by numpy: for small logits torch would take twice the time.
    """
    if len(rows) == 1:  # what follows, in fewer calls
        place = int(logits[0].argmax())
        is_known = isfinite(logits[0, place])
        return [[SampledToken(place) if is_known else BROKEN] * rows[0].num_samples]
    argmax = logits.argmax(axis=-1)  # the first of equal ones, or of NaN
    is_finite = np.isfinite(logits[np.arange(len(rows)), argmax])
    samples = [
        [SampledToken(token)] * s.num_samples
        for s, token in zip(rows, argmax.tolist(), strict=True)
    ]
    if not is_finite.all():
        for i in np.flatnonzero(~is_finite).tolist():
            samples[i] = [BROKEN] * rows[i].num_samples
    return samples


def truncate(p: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return the probabilities `p` with those of the tokens that may not be drawn set to 0.

    In this order: keep the tokens with fewer than top_k more likely ones; of these, renormalised,
    the ones for which all more likely ones have less than top_p between them; of these the ones
    at least min_p times as likely as the most likely. Ties stand or fall together; the most likely
    token always stays. (The rules of `reference.sampling`, for many rows at once.)

    Each rule keeps all tokens from some probability upwards, so their meeting is one threshold.

    Args:
        p: (R, V) float64, rows that sum to 1.
        params: the sampling parameters of each row.

    Returns:
        (R, V), not renormalised.
    """
    min_p = torch.tensor([[s.min_p] for s in params], dtype=p.dtype).to(p.device)
    threshold = min_p * p.amax(dim=-1, keepdim=True)  # (R, 1)
    rows = [i for i, s in enumerate(params) if s.top_k >= 1 or s.top_p < 1]
    if rows:
        index = torch.tensor(rows, device=p.device)
        least = _least_kept(p[index], [params[i] for i in rows])
        threshold[index] = torch.maximum(threshold[index], least)
    return p * (p >= threshold)


def _least_kept(p: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Return (R, 1), the smallest probability that top_k and top_p keep in each row."""
    top_k = torch.tensor([[s.top_k] for s in params]).to(p.device)
    top_p = torch.tensor([[s.top_p] for s in params], dtype=p.dtype).to(p.device)
    count = min(CANDIDATES, p.shape[-1])
    least, settled = _scan(p.topk(count, dim=-1).values, top_k, top_p)
    if count < p.shape[-1] and not bool(settled.all()):
        index = (~settled[:, 0]).nonzero()[:, 0]
        ordered = p[index].sort(dim=-1, descending=True).values
        least[index], _ = _scan(ordered, top_k[index], top_p[index])
    return least


def _scan(ordered: Tensor, top_k: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Apply top_k and top_p to the largest probabilities of each row, in descending order.

    Args:
        ordered: (R, C); the rows of the whole vocabulary sum to 1.
        top_k, top_p: (R, 1).

    Returns:
        The smallest probability kept (R, 1), and whether it is that of the whole vocabulary (R, 1):
        True if the last of the C probabilities is dropped, so that the smaller ones are as well.
    """
    count = ordered.shape[-1]
    kth = ordered.gather(-1, (top_k - 1).clamp(0, count - 1))
    kept = (ordered >= kth) | (top_k < 1)
    mass = ordered * kept
    total = torch.where(top_k >= 1, mass.sum(dim=-1, keepdim=True), 1.0)
    before = (mass.cumsum(dim=-1) - mass) / total
    # The first of equal ones decides for all of them, because the threshold is their value.
    kept &= (before < top_p) | (top_p >= 1)
    least = torch.where(kept, ordered, torch.inf).amin(dim=-1, keepdim=True)
    return least, ~kept[:, -1:] & (top_k < count)


def most_likely(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the `count` largest values of each row of (R, V) in descending order, and their
    places.

    Of equal values the one at the lower place comes first. Both results are (R, count).

    A GPU sorts whole rows, so that the host need not wait; a CPU only those with another value
    equal to the last.
    """
    if logprobs.device.type != "cpu":
        top, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        return top[:, :count], ids[:, :count]
    top, ids = logprobs.topk(count, dim=-1)
    ids, order = ids.sort(dim=-1)
    top, again = top.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(-1, again)
    if count == 0:
        return top, ids
    has_equal = (logprobs >= top[:, -1:]).sum(dim=-1) > count
    if bool(has_equal.any()):
        rows = has_equal.nonzero()[:, 0]
        ordered = logprobs[rows].sort(dim=-1, descending=True, stable=True)
        top[rows], ids[rows] = ordered.values[:, :count], ordered.indices[:, :count]
    return top, ids


def draw_tokens(
    logits: Tensor, rows: Sequence[ScheduledSequence], argmax: Tensor
) -> list[list[int]]:
    """Return the ids drawn from each row of logits (R, V), a list of `num_samples` for each run.

    Greedy rows take the id that `argmax` (R,) has for them.
    """
    tokens = [[token] * s.num_samples for s, token in zip(rows, argmax.tolist(), strict=True)]
    drawn = [i for i, s in enumerate(rows) if not s.sampling.greedy]
    if logits.device.type == "cpu" and logits.shape[-1] <= MOST_TOKENS:
        alone = [i for i in drawn if rows[i].num_samples == 1]
        for i, token in zip(alone, _draw_compiled(logits, rows, alone), strict=True):
            tokens[i] = [token]
        drawn = [i for i in drawn if rows[i].num_samples > 1]
    step = max(MAX_ELEMENTS[logits.device.type] // logits.shape[-1], 1)
    for first in range(0, len(drawn), step):
        chosen = drawn[first : first + step]
        index = torch.tensor(chosen, device=logits.device)
        some = logits if len(chosen) == len(rows) else logits.index_select(0, index)
        for i, ids in zip(chosen, _draw_rows(some, [rows[i] for i in chosen]), strict=True):
            tokens[i] = ids[: rows[i].num_samples]
    return tokens


def _draw_compiled(
    logits: Tensor, rows: Sequence[ScheduledSequence], places: Sequence[int]
) -> list[int]:
    """Draw one token for each of the rows at `places`, by the compiled op: a fifth of the time."""
    if not places:
        return []
    chosen = [rows[i] for i in places]
    params = [s.sampling for s in chosen]
    temperature, top_p, min_p = zip(*(p.float32_rule for p in params), strict=True)
    some = logits
    if len(places) < len(logits):
        some = logits.index_select(0, torch.tensor(places))
    ids, _ = ops.sample_tokens(
        some,
        temperature=torch.tensor(temperature, dtype=torch.float32),
        top_k=_unless_all([p.top_k for p in params], 0, torch.int32),
        top_p=_unless_all(top_p, 1.0, torch.float32),
        min_p=_unless_all(min_p, 0.0, torch.float32),
        seeds=torch.from_numpy(
            np.array([s.seeds[0] & 0xFFFFFFFFFFFFFFFF for s in chosen], np.uint64).view(np.int64)
        ),
        counters=torch.tensor([s.num_generated for s in chosen], dtype=torch.int64),
    )
    return cast(list[int], ids.tolist())


def _unless_all(values: Sequence[float], usual: float, dtype: torch.dtype) -> Tensor | None:
    return None if all(v == usual for v in values) else torch.tensor(values, dtype=dtype)


def _draw_rows(logits: Tensor, rows: Sequence[ScheduledSequence]) -> list[list[int]]:
    """Draw token ids from each row of logits (R, V); each row of the result has as many as the most
    that a run draws.

    Args:
        rows: the run of each row; every temperature is above 0. Ids past a run's num_samples mean
            nothing.
    """
    params = [s.sampling for s in rows]
    temperature = torch.tensor([[p.temperature] for p in params], dtype=torch.float64)
    scaled = logits.double()
    # The maximum goes before the division, which could overflow at a small temperature.
    scaled -= scaled.amax(dim=-1, keepdim=True)
    scaled /= temperature.to(logits.device)
    probabilities = scaled.softmax(dim=-1)
    if any(p.top_k >= 1 or p.top_p < 1 or p.min_p > 0 for p in params):
        probabilities = truncate(probabilities, params)
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
    weights = probabilities.mul_(WEIGHT_OF_ONE).to(torch.int64)
    cumulative = weights.cumsum(dim=-1)  # (R, V)
    total = cumulative[:, -1:]
    u = torch.from_numpy(uniforms_of(rows)).to(logits.device)  # (R, n)
    threshold = torch.minimum((u * total).to(torch.int64), total - 1)
    token_ids: list[list[int]] = torch.searchsorted(cumulative, threshold, right=True).tolist()
    return token_ids


def uniforms_of(rows: Sequence[ScheduledSequence]) -> NDArray[np.float64]:
    """Return (R, max(num_samples)) uniform numbers, zero where a row draws fewer."""
    counts = np.array([s.num_samples for s in rows])
    assert all(len(s.seeds) == s.num_samples for s in rows)
    u = np.zeros((len(rows), int(counts.max())))
    u[np.arange(u.shape[1]) < counts[:, None]] = uniforms(
        [seed for s in rows for seed in s.seeds],
        [s.num_generated for s in rows for _ in s.seeds],
    )
    return u


def _with_logprobs(
    logits: Tensor, rows: Sequence[ScheduledSequence], tokens: Sequence[Sequence[int]]
) -> list[list[SampledToken]]:
    """Return the drawn tokens, with log-probabilities for the rows that ask for them.

    Args:
        logits: the logits before they were adjusted.
        rows: the sequence of each row.
        tokens: the drawn tokens of each row.
    """
    samples = [[SampledToken(token) for token in ids] for ids in tokens]
    asking = [i for i, s in enumerate(rows) if s.sampling.logprobs is not None]
    if not asking:
        return samples
    index = torch.tensor(asking, device=logits.device)
    logprobs = logits.index_select(0, index).log_softmax(dim=-1)
    count = max(rows[i].sampling.logprobs or 0 for i in asking)
    top, top_ids = most_likely(logprobs, min(count, logits.shape[-1]))
    longest = max(len(tokens[i]) for i in asking)
    padded = torch.tensor([[*tokens[i], *[0] * (longest - len(tokens[i]))] for i in asking])
    own = logprobs.gather(-1, padded.to(logits.device)).tolist()
    for i, values, ids, best in zip(asking, own, top_ids.tolist(), top.tolist(), strict=True):
        kept = rows[i].sampling.logprobs or 0
        alternatives = tuple(zip(ids[:kept], best[:kept], strict=True))
        samples[i] = [
            SampledToken(token, value, alternatives)
            for token, value in zip(tokens[i], values, strict=False)
        ]
    return samples
