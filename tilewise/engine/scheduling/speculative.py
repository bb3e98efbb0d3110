"""Several tokens of a sequence in one step: guessed, verified, taken back where wrong. No torch.

A run of a decoding sequence is then its last token and some drafts, guesses of what follows. The
step draws a token from the logits of each of them, by the sample's own rule and random number: the
drafts before the first that was not drawn are right, and the token drawn in its place is one more.

What comes out is what comes out without drafts, token by token, greedy or seeded: whichever token
is drawn at number i of a sample's stream depends on the tokens before it and on that number only.
A draft d that is a guess without randomness is so accepted with probability p(d), and what is drawn
if it is not has the distribution p without d, renormalised: rejection sampling of Leviathan et al.
for a certain guess, with one random number for both of its draws. A draft model draws its guess
with the very same number of the stream, so that equal distributions give equal tokens. (Rejection
with the draft's own probabilities would accept a little more of an unlike draft, but the tokens of
a seed would depend on the draft model.) The condition is that a row of logits has the same bits
whichever run it is part of; where it has not, a choice between near equals may differ, as it may
between batches.

Drafts take no block that a running sequence will want at once, and no token of the budget that one
behind needs; their blocks are let go of when the step has finished (`BlockTables.truncate`), and
the prefix cache learns of tokens only when they are drawn. Where a step with drafts gives fewer
tokens a second than one without, `Pace` turns them off.

Source: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding",
ICML 2023, algorithm 1; the lookup of n-grams is A. Saxena's prompt lookup decoding, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tilewise.engine.batch import Batch, SampledToken, ScheduledSequence
from tilewise.engine.config import MAX_DRAFTS, DraftModel, PromptLookup
from tilewise.engine.request import Request, Sequence
from tilewise.engine.scheduling.beams import BeamSearchParams
from tilewise.engine.scheduling.draft_trees import depths, merge, num_in_place, path
from tilewise.engine.tables.block_tables import BlockTables

__all__ = [
    "DRAFT",
    "NO_DRAFTS",
    "Drafts",
    "Ngrams",
    "Pace",
    "Speculation",
    "accepted",
    "with_rows_of_drafts",
]

DRAFT = -3  # stands for a guess that the runner makes
# Tokens of a sequence in which n-grams are looked for: an index of 16,384 is some 10 MB.
MAX_LOOKBACK = 16_384
STEPS = 8  # of a trial, with drafts or without
SOONEST, LATEST = 64, 4096  # steps until what has lost is tried again: doubled each time it loses


class Drafts(NamedTuple):
    """The guesses that a run has at its end.

    Attributes:
        token_ids: at most MAX_DRAFTS tokens.
        parents: the row of each guess's parent, see `draft_trees`; () where each guess comes after
            the one before.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...] = ()


NO_DRAFTS = Drafts(())


class Speculation:
    """The scheduler's part: which guesses to run for a sequence.

    Args:
        params: how to guess.

    Attributes:
        pace: whether guesses are worth their cost.
        num_drafts: guesses that were verified, since the start.
        num_accepted: how many of them were right.
    """

    def __init__(self, params: PromptLookup | DraftModel) -> None:
        self.params = params
        self.pace = Pace() if params.is_adaptive else None
        self.num_drafts = 0
        self.num_accepted = 0
        self._is_on = True
        self._most = self._room = MAX_DRAFTS
        self._drafts: dict[int, Drafts] = {}  # of the step that is scheduled now, by seq_id
        self._ngrams: WeakKeyDictionary[Sequence, Ngrams] = WeakKeyDictionary()

    def suits(self, request: Request) -> bool:
        """Whether a request's tokens may be guessed.

        Not those of a beam search; nor where logits are changed by what was drawn before, as the
        rows of guesses would have to be, or where a prompt is scored or pooled.
        """
        sampling = request.sampling
        is_read = sampling.prompt_logprobs is not None or request.pooling is not None
        is_plain = not request.adjusts and not is_read
        return is_plain and not isinstance(sampling, BeamSearchParams)

    def begin(self, num_sequences: int, max_chunk_tokens: int | None) -> None:
        """Decide about the step that is scheduled now.

        Args:
            num_sequences: how many run.
            max_chunk_tokens: tokens of one sequence in a step; None is no limit.
        """
        self._drafts.clear()
        self._most = MAX_DRAFTS if max_chunk_tokens is None else max_chunk_tokens - 1
        self._is_on = self.pace is None or self.pace.is_on(num_sequences)

    def draft(self, seq: Sequence, room: int, tables: BlockTables, num_running: int) -> int:
        """Choose the drafts that a sequence runs behind its last token; return how many.

        They take no block that is not there for them, beside one for each running sequence.

        Args:
            seq: its run is one token.
            room: tokens that the budget has left for drafts.
            tables: of its blocks.
            num_running: sequences that hold blocks.
        """
        known = seq.num_tokens
        is_decoding = known == seq.num_scheduled_tokens + 1 > seq.num_prompt_tokens
        if isinstance(seq.request.sampling, BeamSearchParams) or not is_decoding:
            return 0
        free = max(tables.num_free - num_running, 0)
        self._room = min(  # rows: the slots of a tree are as many as its drafts
            room,
            self._most,
            (tables.num_places(seq) + free) * tables.block_size - known,
        )
        # The step draws one more token than there are drafts after one another.
        most = min(self._room, seq.max_len - known - 1)
        drafts = self._drafts[seq.seq_id] = self.propose(seq, most)
        return len(drafts.token_ids)

    def take_drafts(self, seq: Sequence) -> Drafts:
        """Return what draft() has chosen for a sequence in this step, and forget it."""
        return self._drafts.pop(seq.seq_id, NO_DRAFTS)

    def take(
        self,
        seq: Sequence,
        run: ScheduledSequence,
        drawn: Seq[SampledToken],
        tables: BlockTables,
    ) -> None:
        """Count the drafts that were right as computed, and let go of the blocks of the others.

        The prefix cache is told of a block when all its tokens are drawn. Right drafts of a tree
        that do not lie in the slots of their positions are computed again.

        Args:
            seq: it has run drafts; its tokens do not have what was drawn yet.
            run: what it has run.
            drawn: the right ones and one more.
            tables: of its blocks.
        """
        right, known = len(drawn) - 1, seq.num_tokens
        self.num_drafts += run.num_drafts
        self.num_accepted += right
        in_place = right + 1  # the token before the drafts, and the right ones
        if run.draft_parents:
            tokens = [token.token_id for token in drawn]
            in_place = num_in_place(path(run.token_ids[1:], run.draft_parents, tokens))
        seq.num_computed_tokens += in_place
        seq.num_scheduled_tokens, seq.num_pending = seq.num_computed_tokens, 0
        tables.truncate(seq)
        seq.token_ids += [token.token_id for token in drawn[:right]]
        tables.register(seq)
        del seq.token_ids[known:]

    def propose(self, seq: Sequence, most: int) -> Drafts:
        """Return at most `most` guesses of what follows a sequence, of which all is known."""
        most = min(most, self.params.num_tokens)
        if most <= 0 or not self._is_on:
            return NO_DRAFTS
        if isinstance(self.params, DraftModel):
            return Drafts((DRAFT,) * most)
        params = self.params
        ngrams = self._ngrams.get(seq)
        if ngrams is None:
            ngrams = Ngrams(params.min_ngram, params.max_ngram, params.num_branches)
            self._ngrams[seq] = ngrams
        chains = ngrams.find_all(seq.token_ids, most)
        if len(chains) < 2:
            return Drafts(chains[0]) if chains else NO_DRAFTS
        return Drafts(*merge(chains, min(self._room, MAX_DRAFTS)))

    def record(self, batch: Batch, samples: Seq[Seq[SampledToken]], seconds: float) -> None:
        """Note what a step took, if its sequences decode, or compute what a branch has given."""
        runs = batch.sequences
        if any(s.num_generated == 0 or len(s.token_ids) - s.num_drafts > MAX_DRAFTS for s in runs):
            return
        if self.pace is not None:
            num_tokens = sum(map(len, samples))
            has_drafts = any(len(s.token_ids) > 1 for s in runs)
            self.pace.record(len(runs), has_drafts, num_tokens, seconds)


class Ngrams:
    """Where the n-grams of a sequence were last, kept from step to step.

    Args:
        shortest, longest: tokens of an n-gram.
        num_places: of each, the last ones are kept.
    """

    def __init__(self, shortest: int, longest: int, num_places: int = 1) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        # The places behind the last ones of each, the very last one first.
        self._next: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._num_places = num_places
        self._num_known = 0

    def find(self, token_ids: Seq[int], most: int) -> tuple[int, ...]:
        """Return what followed the longest n-gram that the tokens end with, when it was last there.

        Where that reaches the end, it goes round: what repeats is guessed to repeat again.

        Args:
            token_ids: those of the last call and what came since.
            most: tokens to return at most; fewer than one only if nothing is found.
        """
        found = self.find_all(token_ids, most)
        return found[0] if found else ()

    def find_all(self, token_ids: Seq[int], most: int) -> list[tuple[int, ...]]:
        """Return what followed such n-grams at their last places, the longest and last ones first.

        Args:
            token_ids: as for find().
            most: tokens of each at most.

        Returns:
            As many as places are kept, or fewer.
        """
        end = len(token_ids)
        for place in range(max(self._num_known, end - MAX_LOOKBACK, 1), end):
            for n in self._lengths:  # the n tokens before this place
                if n <= place:
                    ngram = tuple(token_ids[place - n : place])
                    before = self._next.get(ngram, ())[: self._num_places - 1]
                    self._next[ngram] = (place, *before)
        self._num_known = end
        found: dict[tuple[int, ...], None] = {}
        for n in self._lengths:
            for place in self._next.get(tuple(token_ids[end - n :]), ()) if n < end else ():
                period = end - place
                found[tuple(token_ids[place + i % period] for i in range(most))] = None
                if len(found) == self._num_places:
                    return list(found)
        return list(found)


@dataclass
class _Kind:
    """Steps of so many sequences: (tokens, seconds) of the last ones, without drafts and with."""

    steps: tuple[list[tuple[int, float]], list[tuple[int, float]]] = field(
        default_factory=lambda: ([], [])
    )
    is_on: bool = True
    is_trial: bool = True
    left: int = STEPS
    wait: int = SOONEST


class Pace:
    """Chooses between steps with drafts and without, by the tokens that each gave a second.

    For each power of two of sequences in a step: eight steps with drafts, eight without, then
    whichever gave more; the other is tried again for eight steps after 64, then 128, at last every
    4,096 steps. Of each the two longest of the last sixteen steps do not count: on a machine that
    others use some take a hundred times as long.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}

    def is_on(self, num_sequences: int) -> bool:
        """Whether the next step of so many sequences is to have drafts."""
        return self._kinds.setdefault(num_sequences.bit_length(), _Kind()).is_on

    def record(self, num_sequences: int, has_drafts: bool, num_tokens: int, seconds: float) -> None:
        """Note how many tokens a step gave and how long it took."""
        kind = self._kinds.setdefault(num_sequences.bit_length(), _Kind())
        steps = kind.steps[has_drafts]
        steps.append((num_tokens, seconds))
        del steps[: -2 * STEPS]
        if kind.is_trial and has_drafts != kind.is_on:
            return  # nothing was found to be guessed: no trial of drafts
        kind.left -= 1
        if kind.left > 0:
            return
        if not kind.is_trial or not all(kind.steps):
            kind.is_on, kind.is_trial, kind.left = not kind.is_on, True, STEPS
            return
        without, with_drafts = map(_rate, kind.steps)
        was_on = not kind.is_on  # before this trial
        kind.is_on = with_drafts > without
        kind.wait = min(2 * kind.wait, LATEST) if kind.is_on == was_on else SOONEST
        kind.is_trial, kind.left = False, kind.wait


def _rate(steps: list[tuple[int, float]]) -> float:
    """Return tokens a second of all but the longest steps."""
    kept = sorted(steps, key=lambda step: step[1])
    kept = kept[: max(len(kept) - len(kept) // STEPS, 1)]
    return sum(tokens for tokens, _ in kept) / max(sum(seconds for _, seconds in kept), 1e-9)


def with_rows_of_drafts(batch: Batch) -> Batch:
    """Return a batch for the sampler, in which each row of logits belongs to a run of its own.

    The rows of a run with drafts are those of its last token before them and of each of them; they
    draw number num_generated + depth of its stream, so 1, 2, ... more in a chain.
    """
    if not any(run.num_drafts for run in batch.sequences):
        return batch
    runs = []
    for run in batch.sequences:
        if run.num_drafts == 0:
            runs.append(run)
            continue
        first, parents = run.num_generated, run.draft_parents
        places = depths(parents) if parents else range(run.num_drafts + 1)
        runs += [run._replace(num_generated=first + place) for place in places]
    return replace(batch, sequences=tuple(runs))


def accepted(batch: Batch, samples: list[list[SampledToken]]) -> list[list[SampledToken]]:
    """Return the tokens of each run: of one with drafts those that are right, and one more.

    Args:
        batch: what was run; its drafts are known.
        samples: of with_rows_of_drafts(batch).
    """
    if len(samples) == len(batch.sequences):
        return samples
    rows, found = iter(samples), []
    for run in batch.sequences:
        if run.num_drafts == 0:
            found.append(next(rows))
            continue
        drawn = [next(rows)[0] for _ in range(run.num_drafts + 1)]
        drafts = run.token_ids[-run.num_drafts :]
        right = path(drafts, run.draft_parents, [token.token_id for token in drawn])
        found.append([drawn[row] for row in right])
    return found
