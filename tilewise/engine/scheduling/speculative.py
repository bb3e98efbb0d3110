"""Compute several tokens of a sequence in one step: draft, verify, take back wrong ones. No torch.

A run of a decoding sequence is then its last token and some drafts, which are guesses of the tokens
that follow. The step samples a token from the logits of each row, by the sample's own rule and
random number. The drafts before the first that was not sampled are right, and the token sampled in
its place is one more.

The output is the same as without drafts, token by token, greedy or seeded: the token sampled as
number i of a sample's stream depends only on the tokens before it and on that number. A
deterministic draft d is accepted with probability p(d), and if it is rejected, the sampled token
has the distribution p without d, renormalised: this is rejection sampling of Leviathan et al. for a
deterministic draft, with one random number for both of its draws. A draft model samples its draft
with the same random number, so that equal distributions give equal tokens. (Rejection with the
draft's own probabilities would accept a little more of a differing draft, but the tokens of a seed
would depend on the draft model.) The condition is that a row of logits has the same bits whichever
run it is part of; if it has not, a choice between near equals may differ, as it may between
batches.

Drafts take no block that a running sequence needs soon, and no token of the budget that a later
sequence needs. Their blocks are released when the step has finished (`BlockTables.truncate`), and
the prefix cache registers tokens only after they are sampled. If steps with drafts produce fewer
tokens a second than steps without, `Pace` turns them off.

Source: Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding",
ICML 2023, algorithm 1; the lookup of n-grams is A. Saxena's prompt lookup decoding, 2023.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple
from weakref import WeakKeyDictionary

from tilewise.engine.batch import Batch, SampledToken, ScheduledSequence
from tilewise.engine.config import MAX_DRAFTS, DraftModel, OwnHead, PromptLookup
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

DRAFT = -3  # placeholder of a draft that the runner computes
# Tokens of a sequence that are searched for n-grams: an index of 16,384 takes some 10 MB.
MAX_LOOKBACK = 16_384
STEPS = 8  # of a trial, with or without drafts
# steps until the slower choice is tried again: doubled each time it loses
SOONEST, LATEST = 64, 4096


class Drafts(NamedTuple):
    """The drafts at the end of a run.

    Attributes:
        token_ids: at most MAX_DRAFTS tokens.
        parents: the row of each draft's parent, see `draft_trees`; () for a chain, in which each
            draft follows the one before.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...] = ()


NO_DRAFTS = Drafts(())


class Speculation:
    """The scheduler's part of speculation: choose the drafts of each sequence.

    Args:
        params: the parameters of speculation.

    Attributes:
        pace: the measurement whether drafts are worth their cost; None if it is not asked for.
        num_drafts: the number of drafts verified since the start.
        num_accepted: the number of drafts that were right.
    """

    def __init__(self, params: PromptLookup | DraftModel | OwnHead) -> None:
        self.params = params
        self.pace = Pace() if params.is_adaptive else None
        self.num_drafts = 0
        self.num_accepted = 0
        self._is_on = True
        self._most = self._room = MAX_DRAFTS
        # drafts of the step that is being scheduled, by seq_id
        self._drafts: dict[int, Drafts] = {}
        self._ngrams: WeakKeyDictionary[Sequence, Ngrams] = WeakKeyDictionary()

    def suits(self, request: Request) -> bool:
        """Return whether a request may have drafts.

        Beam searches may not; nor requests whose logits depend on earlier samples, since the
        drafts' rows would depend on them, too; nor prompts that are scored or pooled.
        """
        sampling = request.sampling
        is_read = sampling.prompt_logprobs is not None or request.pooling is not None
        is_plain = not request.adjusts and not is_read
        return is_plain and not isinstance(sampling, BeamSearchParams)

    def begin(self, num_sequences: int, max_chunk_tokens: int | None) -> None:
        """Decide whether the step that is being scheduled has drafts, and forget those of the step
        before.

        Args:
            num_sequences: the number of running sequences.
            max_chunk_tokens: the limit of tokens of one sequence in a step; None for no limit.
        """
        self._drafts.clear()
        self._most = MAX_DRAFTS if max_chunk_tokens is None else max_chunk_tokens - 1
        self._is_on = self.pace is None or self.pace.is_on(num_sequences)

    def draft(self, seq: Sequence, room: int, tables: BlockTables, num_running: int) -> int:
        """Choose the drafts that a sequence runs after its last token; return how many.

        They take no block unless one for each running sequence stays free.

        Args:
            seq: a sequence whose run is one token.
            room: the number of tokens that the budget has left for drafts.
            tables: the block tables.
            num_running: the number of sequences that hold blocks.
        """
        known = seq.num_tokens
        is_decoding = known == seq.num_scheduled_tokens + 1 > seq.num_prompt_tokens
        if isinstance(seq.request.sampling, BeamSearchParams) or not is_decoding:
            return 0
        free = max(tables.num_free - num_running, 0)
        self._room = min(  # rows: a tree has as many slots as drafts
            room,
            self._most,
            (tables.num_places(seq) + free) * tables.block_size - known,
        )
        if tables.states is not None:
            self._room = min(self._room, tables.states.num_drafts(seq))
        # A path through the drafts yields one more token than its length.
        most = min(self._room, seq.max_len - known - 1)
        drafts = self._drafts[seq.seq_id] = self.propose(seq, most)
        return len(drafts.token_ids)

    def take_drafts(self, seq: Sequence) -> Drafts:
        """Return the drafts that draft() has chosen for a sequence in this step, and forget
        them."""
        return self._drafts.pop(seq.seq_id, NO_DRAFTS)

    def take(
        self,
        seq: Sequence,
        run: ScheduledSequence,
        drawn: Seq[SampledToken],
        tables: BlockTables,
    ) -> None:
        """Count a sequence's accepted drafts as computed, and free the blocks of rejected ones.

        The drawn tokens themselves are not appended to the sequence; the caller does that.

        Drafts of a tree may lie in other cache slots than those of their positions; accepted ones
        that do are computed again. Full blocks are registered with the prefix cache only here,
        since no rejected token may be in them.

        Args:
            seq: a sequence that has run drafts; its tokens do not include the sampled ones yet.
            run: the run with the drafts.
            drawn: the tokens of the accepted drafts and one more.
            tables: the block tables.
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
        """Return at most `most` drafts of the tokens that follow a sequence, none if drafts are
        off.

        All tokens of the sequence are known. For a draft model or the model's own head the drafts
        are DRAFT, which the runner fills in; else they come from earlier places of the same tokens.
        """
        most = min(most, self.params.num_tokens)
        if most <= 0 or not self._is_on:
            return NO_DRAFTS
        if isinstance(self.params, DraftModel | OwnHead):
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
        """Record a step's tokens and seconds for `pace`, which turns drafts on and off by them.

        A step counts only if each of its sequences has generated a token before, and runs at most
        MAX_DRAFTS tokens beside its drafts. Without `pace` nothing is recorded.

        Args:
            samples: the tokens drawn for each sequence of the batch.
            seconds: the time of the step.
        """
        runs = batch.sequences
        if any(s.num_generated == 0 or len(s.token_ids) - s.num_drafts > MAX_DRAFTS for s in runs):
            return
        if self.pace is not None:
            num_tokens = sum(map(len, samples))
            has_drafts = any(len(s.token_ids) > 1 for s in runs)
            self.pace.record(len(runs), has_drafts, num_tokens, seconds)


class Ngrams:
    """The last places of a sequence's n-grams (runs of n tokens), updated from step to step.

    Args:
        shortest, longest: the lengths of n-grams in tokens.
        num_places: the number of last places that are kept of each n-gram.
    """

    def __init__(self, shortest: int, longest: int, num_places: int = 1) -> None:
        self._lengths = range(longest, shortest - 1, -1)
        # The ends of the last occurrences of each n-gram, the latest first.
        self._next: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._num_places = num_places
        self._num_known = 0

    def find(self, token_ids: Seq[int], most: int) -> tuple[int, ...]:
        """Return the tokens after the last earlier place of the longest n-gram that ends the
        tokens.

        If they reach the end, they are repeated from that place: a repetition is expected to
        continue.

        Args:
            token_ids: the tokens of the last call and those that came since.
            most: the largest number of tokens to return; fewer only if no n-gram is found.
        """
        found = self.find_all(token_ids, most)
        return found[0] if found else ()

    def find_all(self, token_ids: Seq[int], most: int) -> list[tuple[int, ...]]:
        """Return continuations: the tokens after earlier places of the n-grams that end the tokens.

        Those after longer n-grams come first, of one n-gram those after later places; equal ones
        come once.

        Args:
            token_ids: as for find().
            most: the largest number of tokens of each continuation.

        Returns:
            As many continuations as places are kept, or fewer.
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
    """Measurements of steps of one size, by which `Pace` chooses between drafts and none.

    Attributes:
        steps: pairs (tokens, seconds) of the last steps, those without drafts and those with.
        is_on: True if the next step is to have drafts.
        is_trial: True while the choice that may be slower is tried.
        left: the number of steps until the next decision.
        wait: the number of steps from a decision to the next trial.
    """

    steps: tuple[list[tuple[int, float]], list[tuple[int, float]]] = field(
        default_factory=lambda: ([], [])
    )
    is_on: bool = True
    is_trial: bool = True
    left: int = STEPS
    wait: int = SOONEST // 2  # doubled where drafts, with which it begins, win the first time


class Pace:
    """Choose between steps with and without drafts, by the tokens a second that each produced.

    For each power of two of sequences in a step: eight steps with drafts, eight without, then the
    faster choice. The other is tried again for eight steps after 64 steps; each time the same
    choice wins, the steps in between double, to 4,096 at most. The two longest of the last sixteen
    steps of each do not count, since on a shared machine some steps take a hundred times as long.
    """

    def __init__(self) -> None:
        self._kinds: dict[int, _Kind] = {}

    def is_on(self, num_sequences: int) -> bool:
        """Return whether the next step of num_sequences sequences shall have drafts."""
        return self._kinds.setdefault(num_sequences.bit_length(), _Kind()).is_on

    def record(self, num_sequences: int, has_drafts: bool, num_tokens: int, seconds: float) -> None:
        """Record a step's tokens and time, by which drafts are switched on and off.

        Args:
            num_sequences: the sequences of the step.
            has_drafts: whether it verified drafts.
            num_tokens: the tokens that it generated.
            seconds: the time of the step.
        """
        kind = self._kinds.setdefault(num_sequences.bit_length(), _Kind())
        steps = kind.steps[has_drafts]
        steps.append((num_tokens, seconds))
        del steps[: -2 * STEPS]
        if kind.is_trial and has_drafts != kind.is_on:
            return  # no draft was found: this step does not count as a trial of drafts
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
    """Return the tokens a second of steps (tokens, seconds), without the longest eighth of the
    steps."""
    kept = sorted(steps, key=lambda step: step[1])
    kept = kept[: max(len(kept) - len(kept) // STEPS, 1)]
    return sum(tokens for tokens, _ in kept) / max(sum(seconds for _, seconds in kept), 1e-9)


def with_rows_of_drafts(batch: Batch) -> Batch:
    """Return a batch for the sampler, in which each row of logits belongs to a run of its own.

    A run with drafts has a row for its last token before them and one for each draft. A row at
    depth d uses number num_generated + d of its random stream, so 1, 2, ... more in a chain.
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
    """Return the tokens of each run: for a run with drafts the right drafts and the token drawn
    next.

    Args:
        batch: the batch that was run, with known drafts.
        samples: the samples of with_rows_of_drafts(batch).
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
