"""Tokens drawn by ranks that have a share of the vocabulary each, without the logits of all.

What travels, for each row and rank, and in how many exchanges of a step:

most likely   the largest logit and its token                          all rows            1
candidates    the largest few logits of the share and their tokens     top_k, top_p        1
sums          the share's weights, as an integer                       no top_k            1
token         the token, or that it is another rank's                  no top_k or top_p   1
scores        the largest few, the sum of exponentials, own logits     log-probabilities   1

A weight is 2^s exp((logit - m) / T) as an integer, m the largest logit of all ranks, as one process
computes it: sums over ranks are those over the vocabulary, in any order. A row that is truncated
is drawn from its candidates by every rank alone; a row that is not, by the rank whose share the
row's number falls into. Where candidates do not tell where the truncation ends (top_k above MOST,
a nucleus that needs more of a share, equal logits at the bound) the row's logits are gathered
whole: all ranks see that in the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.distributed.shards import VocabularyHead
from tilewise.engine.batch import BROKEN, Batch, SampledToken, ScheduledSequence
from tilewise.engine.steps.runner import Samples
from tilewise.engine.steps.sampler import draw_tokens, few_threads, most_likely, uniforms_of

__all__ = ["draw_from_shares"]

# Candidates of a share. Text seldom needs more than some ten: at a top_p of 0.95 a nucleus of more
# than 256 tokens of a share is that of a row that knows nothing, or is hot.
MOST = 256
# Logits of a share that are weighed at a time: temporaries of 2 MiB stay in a core's cache.
AT_A_TIME = 2**18
LOG2E = 1 / math.log(2)


def draw_from_shares(head: VocabularyHead, logits: Tensor, batch: Batch) -> Samples:
    """Draw the tokens that `batch` asks for, on all ranks the same.

    Args:
        head: the share of the output layer that made the logits.
        logits: (R, n) float32, one row per sequence with num_samples > 0, in their order; the
            model's own, which nothing has changed.
        batch: the batch of the step, as for `sampler.sample`.

    Returns:
        One list per sequence of `batch`, of num_samples tokens, as `sampler.sample` returns them;
        BROKEN for a row that is not finite.
    """
    rows = [s for s in batch.sequences if s.num_samples > 0]
    if not rows:
        return [[] for _ in batch.sequences]
    with few_threads(logits):
        drawn = iter(_draw(head, logits, rows))
    return [next(drawn) if s.num_samples > 0 else [] for s in batch.sequences]


@torch.inference_mode()
def _draw(
    head: VocabularyHead, logits: Tensor, rows: Sequence[ScheduledSequence]
) -> list[list[SampledToken]]:
    best, first = head.most_likely(logits)
    is_finite = best.isfinite().tolist()
    tokens = [[token] * s.num_samples for s, token in zip(rows, first.tolist(), strict=True)]
    drawn = [i for i, s in enumerate(rows) if is_finite[i] and not s.sampling.greedy]
    if drawn:
        index = torch.tensor(drawn)
        chosen = [rows[i] for i in drawn]
        share = _Share(head, logits[index], best[index], chosen)
        for i, ids in zip(drawn, share.tokens(), strict=True):
            tokens[i] = ids[: rows[i].num_samples]
    samples = [[SampledToken(token) for token in ids] for ids in tokens]
    asking = [i for i, s in enumerate(rows) if is_finite[i] and s.sampling.logprobs is not None]
    if asking:
        scored = _scored(
            head,
            logits[torch.tensor(asking)],
            [rows[i] for i in asking],
            [tokens[i] for i in asking],
        )
        for i, found in zip(asking, scored, strict=True):
            samples[i] = found
    return [
        found if ok else [BROKEN] * s.num_samples
        for s, ok, found in zip(rows, is_finite, samples, strict=True)
    ]


def _rule_of(s: ScheduledSequence) -> tuple[float, float, float]:
    """Return temperature, top_p and min_p of a run, rounded as `sampler.draw_tokens` uses them.

    A run with one sample has them rounded to float32, as the compiled op takes them.
    """
    p = s.sampling
    if s.num_samples > 1:
        return p.temperature, p.top_p, p.min_p
    temperature, top_p, min_p = np.array(p.float32_rule, np.float32).tolist()
    return temperature, top_p, min_p


class _Few(NamedTuple):
    """The largest logits of all ranks' shares, for rows that are drawn with top-k or top-p.

    Attributes:
        values, ids: (R, C), the logits in descending order and their tokens; -inf where a share has
            fewer.
        cutoff: (R,), a bound: no logit that was left out is larger.
    """

    values: Tensor
    ids: Tensor
    cutoff: Tensor


class _Share:
    """The rows of a step that are not greedy, as one rank sees them: logits of its own share only.

    Args:
        head: the output layer of the share.
        logits: (R, n) float32, all rows with a finite maximum.
        best: (R,) float64, the largest logit over all shares.
        rows: the run of each row, which says how many tokens are drawn, and how.
    """

    def __init__(
        self, head: VocabularyHead, logits: Tensor, best: Tensor, rows: Sequence[ScheduledSequence]
    ) -> None:
        self.head, self.logits, self.rows = head, logits, rows
        temperature, top_p, min_p = torch.tensor(
            [_rule_of(s) for s in rows], dtype=torch.float64
        ).unbind(1)
        self.best, self.top_p, self.min_p = best, top_p, min_p
        self.slope = LOG2E / temperature
        vocab = head.vocab_size
        # So that as many weights of 1 fit in 62 bits.
        self.scale = 2.0 ** (62 - (vocab - 1).bit_length())
        top_k = [s.sampling.top_k for s in rows]
        self.top_k = torch.tensor([k if 0 < k < vocab else 0 for k in top_k])
        self.uniforms = torch.from_numpy(uniforms_of(rows))

    def tokens(self) -> list[list[int]]:
        """Draw the token ids of each row, on all ranks the same; exchanges numbers with the other
        ranks.

        Each list has at least the row's num_samples ids; further ones mean nothing.
        """
        is_cut = (self.top_k > 0) | (self.top_p < 1)
        cut = (is_cut & (self.top_k <= MOST)).nonzero()[:, 0]
        plain = (~is_cut).nonzero()[:, 0]
        few = self._candidates(cut) if len(cut) else None
        found: dict[int, list[int]] = {}
        # All tokens of a row weigh in but where top_k says how many do.
        summed = (self.top_k == 0).nonzero()[:, 0]
        sums = torch.zeros((self.head.group.size, len(self.rows)), dtype=torch.int64)
        if len(summed):
            sums[:, summed] = self.head.group.stack(self._sums(summed))
        if few is not None:
            is_settled, ids = self._from_candidates(few, cut, sums.sum(0)[cut])
            for i, ok, some in zip(cut.tolist(), is_settled.tolist(), ids.tolist(), strict=True):
                if ok:
                    found[i] = some
        if len(plain):
            ids = self._from_shares(plain, sums[:, plain])
            found.update(zip(plain.tolist(), ids.tolist(), strict=True))
        left = [i for i in range(len(self.rows)) if i not in found]
        if left:
            whole = self.head.whole(self.logits[torch.tensor(left)])
            chosen = [self.rows[i] for i in left]
            found.update(zip(left, draw_tokens(whole, chosen, whole.argmax(1)), strict=True))
        return [found[i] for i in range(len(self.rows))]

    def _powers(self, logits: Tensor, places: Tensor) -> Tensor:
        """Return exp((logit - m) / T) in float64, with the row's maximum m over all ranks.

        Args:
            logits: (R, C), R rows of this rank's part of the vocabulary.
            places: (R,) int64, the place of each row among all rows, by which m and T are found.
        """
        powers = logits.to(torch.float64, copy=True)
        powers -= self.best[places, None]
        powers *= self.slope[places, None]
        return powers.exp2_()

    def _weights(self, powers: Tensor, places: Tensor) -> Tensor:
        """Return the integer weights (r, C) of tokens, their `powers` times the scale.

        A token that min_p rules out has weight 0, in rows without top_p. `powers` may be
        overwritten.

        Args:
            powers: (r, C) float64, from `_powers`.
            places: (r,) int64, the place of each row among all rows.
        """
        least = torch.where(self.top_p[places] < 1, 0.0, self.min_p[places])[:, None]
        if bool((least > 0).any()):
            powers *= powers >= least
        powers *= self.scale
        return powers.to(torch.int64)

    def _sums(self, places: Tensor) -> Tensor:
        """Return the sums (r,) int64 of this share's weights in the rows at `places`."""
        size = self.logits.shape[1]
        step = max(AT_A_TIME // max(size, 1), 1)
        sums = [
            self._weights(self._powers(self.logits[some], some), some).sum(1)
            for some in places.split(step)
        ]
        return torch.cat(sums)

    def _candidates(self, places: Tensor) -> _Few:
        """Gather the largest logits of all ranks' shares for the rows at `places`."""
        has_nucleus = bool(((self.top_p[places] < 1) & (self.top_k[places] == 0)).any())
        count = MOST if has_nucleus else int(self.top_k[places].max())
        share = self.logits[places]
        values, ids = share.topk(min(count, share.shape[1]), dim=1)
        sent = torch.full((2, len(places), count), -torch.inf, dtype=torch.float64)
        sent[1] = self.head.vocab_size
        sent[0, :, : values.shape[1]], sent[1, :, : values.shape[1]] = values, ids + self.head.first
        parts = self.head.group.stack(sent)  # (N, 2, r, C)
        lists = parts[:, 0]
        # A list that is not full is the whole of its share; a full one may have left some out.
        cutoff = lists[:, :, -1].amax(0)
        ordered, order = lists.movedim(0, 1).flatten(1).sort(dim=1, descending=True)
        all_ids = parts[:, 1].movedim(0, 1).flatten(1).gather(1, order)
        return _Few(ordered, all_ids.to(torch.int64), cutoff)

    def _from_candidates(self, few: _Few, places: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
        """Draw tokens of rows with top-k, top-p or min-p, from their likeliest tokens alone.

        Args:
            few: the likeliest tokens of these rows, from all ranks.
            places: the indices of these rows in the batch.
            sums: (r,) int64, the sum of the weights of all tokens of each row.

        Returns:
            Two tensors: bool (r,), False where `few` may lack a token that belongs to the choice,
            so that the row must be drawn from all tokens; and token ids (r, samples).
        """
        powers = self._powers(few.values, places)
        weights = (powers * self.scale).to(torch.int64)
        top_k, top_p = self.top_k[places], self.top_p[places]
        takes_k = top_k > 0
        last = (top_k - 1).clamp(0, few.values.shape[1] - 1)
        kth = few.values.gather(1, last[:, None])
        kept = (few.values >= kth) | ~takes_k[:, None]
        mass = weights * kept
        total = torch.where(takes_k, mass.sum(1), sums)
        wanted = (top_p * total.double())[:, None]
        # Of equal ones the first has all that is larger before it, and decides for them.
        kept &= ((mass.cumsum(1) - mass).double() < wanted) | (top_p[:, None] >= 1)
        least = torch.where(kept, few.values, torch.inf).amin(1, keepdim=True)
        kept = (few.values >= least) & (powers >= self.min_p[places, None])
        # Equal logits at top_k's bound weigh in, though top_p may drop them again.
        bound = torch.where(takes_k, torch.minimum(least[:, 0], kth[:, 0]), least[:, 0])
        is_settled = (bound > few.cutoff) | few.cutoff.isneginf()
        ids, order = torch.where(kept, few.ids, self.head.vocab_size).sort(dim=1)
        cumulative = (weights * kept).gather(1, order).cumsum(1)
        number = torch.searchsorted(
            cumulative, self._targets(places, cumulative[:, -1]), right=True
        )
        return is_settled, ids.gather(1, number.clamp(max=ids.shape[1] - 1))

    def _from_shares(self, places: Tensor, sums: Tensor) -> Tensor:
        """Draw token ids (r, samples) of rows without top-k and top-p, by the rank that has each
        token.

        Args:
            places: (r,) int64, the places of these rows among all rows.
            sums: (N, r) int64, the weights of each share.
        """
        rank = self.head.group.rank
        targets = self._targets(places, sums.sum(0)) - sums[:rank].sum(0)[:, None]
        is_here = (targets >= 0) & (targets < sums[rank][:, None])
        own = torch.full_like(targets, -1)
        # Weighed once more rather than kept: a rank has the token of one row in N.
        for row in is_here.any(1).nonzero()[:, 0].split(1):
            some = places[row]
            weights = self._weights(self._powers(self.logits[some], some), some)
            at = torch.searchsorted(weights.cumsum(1), targets[row].clamp(min=0), right=True)
            own[row] = torch.where(is_here[row], at + self.head.first, -1)
        ids: Tensor = self.head.group.stack(own).amax(0)
        return ids

    def _targets(self, places: Tensor, totals: Tensor) -> Tensor:
        """Return (r, samples) int64: the row's uniform number of each draw, times the total weight.

        The token drawn is the first whose cumulative weight is larger. `totals` are (r,) int64.
        """
        targets = (self.uniforms[places] * totals.double()[:, None]).to(torch.int64)
        return torch.minimum(targets, totals[:, None] - 1).clamp(min=0)


def _scored(
    head: VocabularyHead,
    logits: Tensor,
    rows: Sequence[ScheduledSequence],
    tokens: Sequence[Sequence[int]],
) -> list[list[SampledToken]]:
    """Return the drawn tokens of each row with their log-probabilities over the whole vocabulary.

    Args:
        head: this rank's share of the vocabulary.
        logits: the logits (R, tokens of the share) of the rows.
        rows: the runs whose rows these are; `sampling.logprobs` says how many likely tokens each
            lists.
        tokens: the drawn tokens of each row.
    """
    wanted = min(max(s.sampling.logprobs or 0 for s in rows), head.vocab_size)
    longest, size = max(map(len, tokens)), logits.shape[1]
    ids = torch.tensor([[*own, *[0] * (longest - len(own))] for own in tokens])
    sent = torch.full((len(rows), 2 + longest + 2 * wanted), -torch.inf, dtype=torch.float64)
    sent[:, 1] = 0
    # Where a share has fewer tokens, behind all of them, forbidden ones of other shares too.
    sent[:, 2 + longest + wanted :] = head.vocab_size
    if size:
        most = logits.amax(1).double()
        sent[:, 0] = most
        # A share that is forbidden as a whole has no sum.
        sent[:, 1] = (logits - most[:, None]).exp().sum(1).nan_to_num(0.0)
        place = ids - head.first
        here = logits.gather(1, place.clamp(0, size - 1)).double()
        sent[:, 2 : 2 + longest] = here.where((place >= 0) & (place < size), -torch.inf)
        top, top_ids = most_likely(logits, min(wanted, size))
        end = 2 + longest
        sent[:, end : end + top.shape[1]] = top
        sent[:, end + wanted : end + wanted + top.shape[1]] = top_ids + head.first
    parts = head.group.stack(sent)  # (N, r, ...)
    most = parts[:, :, 0].amax(0)
    total = (parts[:, :, 1] * (parts[:, :, 0] - most).exp()).sum(0)
    normal = (most + total.log())[:, None]
    own = (parts[:, :, 2 : 2 + longest].amax(0) - normal).tolist()
    likeliest = parts[:, :, 2 + longest :].movedim(0, 1)
    # Of equal logits the first token comes first: by token, then by logit.
    alternatives, order = likeliest[:, :, wanted:].flatten(1).sort(dim=1)
    values = likeliest[:, :, :wanted].flatten(1).gather(1, order)
    values, order = values.sort(dim=1, descending=True, stable=True)
    alternatives = alternatives.gather(1, order)
    best, best_ids = (values - normal)[:, :wanted].tolist(), alternatives[:, :wanted].tolist()
    found = []
    for s, some, scores, likely, likely_ids in zip(rows, tokens, own, best, best_ids, strict=True):
        count = s.sampling.logprobs or 0
        told = tuple(zip(map(int, likely_ids[:count]), likely[:count], strict=True))
        found.append([SampledToken(t, score, told) for t, score in zip(some, scores, strict=False)])
    return found
