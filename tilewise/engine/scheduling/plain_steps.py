"""Steps of sequences that need only their next token, with little work for each sequence.

A step may have thousands of them, and the host has less time than the device. While the same
sequences go on step after step, and no other could be admitted, `Steady` computes ahead what each
step needs: which sequences begin a block, which have filled one, and when the first must end. For
all others a step only increments counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from itertools import chain, repeat
from operator import itemgetter

from tilewise.engine.batch import (
    PENDING,
    Batch,
    LaterRuns,
    PlainDraws,
    PlainEvents,
    SampledToken,
    ScheduledSequence,
    TokenEvent,
    first_of,
)
from tilewise.engine.request import Sequence
from tilewise.engine.scheduling.results import Results
from tilewise.engine.scheduling.roster import Roster
from tilewise.engine.tables.admission import Limits
from tilewise.engine.tables.block_tables import BlockTables

__all__ = ["Steady", "append_to_all", "check_samples", "describe_all"]

_token_id = itemgetter(SampledToken._fields.index("token_id"))


def describe_all(
    runs: list[tuple[Sequence, int]],
    describe: Callable[[Sequence, int], ScheduledSequence],
    is_short: bool,
) -> tuple[tuple[ScheduledSequence, ...], bool]:
    """Return the runs of sequences, and whether all are as `Batch.is_plain` says; count them.

    The tokens of each sequence are counted as scheduled, its draws as pending, and its blocks as
    told.

    Args:
        runs: the sequences, and the number of next tokens that each runs.
        describe: the general function, for sequences with special properties.
        is_short: True if no sequence has drafts, and the layers are one group that keeps all
            tokens.
    """
    described: list[ScheduledSequence] = []
    is_plain, new = is_short, tuple.__new__
    for seq, n in runs:
        start, known, drawn = seq.num_scheduled_tokens, len(seq.token_ids), seq.num_pending
        request = seq.request
        if not (
            is_short
            and n == 1
            and request.is_plain
            and known > seq.num_prompt_tokens
            and start + 1 == known + drawn
            and not seq.is_stepwise
        ):
            described.append(describe(seq, n))
            is_plain = False
            continue
        blocks, told = seq.block_ids, seq.num_told_blocks
        seq.num_scheduled_tokens = start + 1
        seq.num_pending = drawn + 1
        seq.num_told_blocks = len(blocks)
        token_ids = (PENDING,) if drawn else (seq.token_ids[start],)
        described.append(
            new(
                ScheduledSequence,
                (
                    seq.seq_id,
                    token_ids,
                    start,
                    blocks,
                    1,
                    request.row_sampling,
                    (seq.seed,),
                    known + drawn - seq.num_prompt_tokens,
                    told,
                    None,
                    False,
                    0,
                    (),
                    (),
                    (),
                    request.adapter,
                    -1,
                ),
            )
        )
    return tuple(described), is_plain


def check_samples(batch: Batch, samples: Seq[Seq[SampledToken]]) -> None:
    """Verify that each sequence of a step has as many samples as it draws, and at most one more for
    each of its drafts.

    Raises:
        ValueError: the numbers differ.
    """
    if len(samples) == len(batch.sequences):
        if batch.is_plain and (isinstance(samples, PlainDraws) or set(map(len, samples)) == {1}):
            return
        if all(
            run.num_samples <= len(drawn) <= run.num_samples + run.num_drafts
            for run, drawn in zip(batch.sequences, samples, strict=True)
        ):
            return
    expected = [s.num_samples for s in batch.sequences]
    raise ValueError(
        f"samples must be {expected} tokens per sequence, got {[len(d) for d in samples]}"
    )


def append_to_all(
    runs: Iterable[tuple[ScheduledSequence, int, SampledToken]],
    live: Mapping[int, Sequence],
    results: Results,
    tables: BlockTables,
    events: list[TokenEvent],
) -> None:
    """Add the tokens of a plain step to its sequences, and append an event for each.

    It is fast where few sequences end. Sequences that have ended or were preempted since the step
    was scheduled are left out.

    Args:
        runs: the run of each sequence, its number of preemptions at that time, and its token.
        live: the unfinished sequences by seq_id.
        results: the receiver of tokens that end a sequence.
        tables: the block tables, which register full blocks.
        events: a list to which the resulting events are appended.
    """
    block_size, register, is_told = tables.block_size, tables.register, tables.prefix is not None
    new = tuple.__new__
    for run, preemptions, token in runs:
        seq = live.get(run.seq_id)
        if seq is None or seq.num_preemptions != preemptions:
            continue
        computed = seq.num_computed_tokens = seq.num_computed_tokens + 1
        # A sequence back from main memory may have several full blocks that are not registered yet.
        if is_told and computed >= (seq.num_registered_blocks + 1) * block_size:
            register(seq)
        seq.num_pending -= 1
        request, token_ids = seq.request, seq.token_ids
        if token.token_id in request.end_ids or len(token_ids) + 1 >= seq.max_len:
            results.append(seq, token, events)
            continue
        token_ids.append(token.token_id)
        cached = seq.num_cached_tokens
        events.append(
            new(TokenEvent, (request.request_id, seq.index, token, None, None, cached, None))
        )


class Steady:
    """Plain steps of all running sequences, as long as these stay the same.

    `goes_on` begins a step if it is one of these, `describe` returns the runs of a step, `take`
    adds the tokens of a plain one. They have the effect of `Scheduler` in other steps: its loop
    over running sequences would give each its next token, and would admit none, as none waits, or
    seats or blocks are too few. Whatever changes the running sequences changes
    `Roster.num_changes`, and the step after is a general one. All counters of a sequence are
    correct at any time.

    Args:
        roster: the running and waiting sequences.
        tables: the block tables of the sequences.
        limits: the limits of a step.
        results: the receiver of tokens that end a sequence.
    """

    def __init__(
        self, roster: Roster, tables: BlockTables, limits: Limits, results: Results
    ) -> None:
        self.roster, self.tables, self.limits, self.results = roster, tables, limits, results
        # runs of the first of these steps; () outside of them
        self._first: tuple[ScheduledSequence, ...] = ()
        self._num_changes = self._num_merged = -1  # counters of roster and tables at that time
        self._sequences: list[Sequence] = []
        self._tokens: list[list[int]] = []  # the token list of each sequence
        # sequences by the offset of their tokens in a block, at that time
        self._places: dict[int, list[int]] = {}
        # number of steps since; number at which a sequence reaches its length
        self._number = self._end = 0
        self._end_ids: frozenset[int] = frozenset()
        self._columns: tuple[list[str], list[int], list[int]] = [], [], []  # columns of the events
        self._preemptions: list[int] = []
        self._num_empty = 0  # slots without a token in their blocks

    def forget(self) -> None:
        """End the steps that go on, as after steps that were taken back: the next one is a general
        step."""
        self._first, self._num_changes = (), -1

    def goes_on(self) -> bool:
        """Begin another step of the same sequences, if nothing has changed and blocks are free.

        Returns:
            True if it was begun, with a new block for each sequence that needs one. If not, no
            block is taken and the next steps are general ones.
        """
        if not self._first:
            return False
        roster, limits, tables = self.roster, self.limits, self.tables
        number, count = self._number + 1, len(self._sequences)
        goes_on = (
            roster.num_changes == self._num_changes
            and tables.num_merged == self._num_merged
            and number < self._end
            and count <= limits.max_num_batched_tokens
            and not self._may_admit(count)
        )
        if goes_on:
            self._number = number
            goes_on = tables.begin_blocks([self._sequences[place] for place in self._at(number)])
        if not goes_on:
            self._first = ()
        return goes_on

    def describe(
        self,
        runs: list[tuple[Sequence, int]],
        describe: Callable[[Sequence, int], ScheduledSequence],
        is_short: bool,
    ) -> tuple[Seq[ScheduledSequence], bool, list[int]]:
        """Return the runs of a step, and count their tokens as scheduled.

        Args:
            runs: the sequences and their numbers of tokens; empty for a step that goes on.
            describe, is_short: see `describe_all`.

        Returns:
            The runs; whether the step is plain; and for each sequence the number of times that it
            has lost its blocks.
        """
        if runs:
            first, is_plain = describe_all(runs, describe, is_short)
            self.tables.note_peak(self.roster.running)
            if is_plain:
                self._begin(runs, first)
            return first, is_plain, [seq.num_preemptions for seq, _ in runs]
        sequences, places = self._sequences, self._at(self._number)
        tokens = None if sequences[0].num_pending else [known[-1] for known in self._tokens]
        told = [(place, sequences[place].num_told_blocks) for place in places]
        for place in places:
            sequences[place].num_told_blocks = len(sequences[place].block_ids)
        for seq in sequences:
            seq.num_scheduled_tokens += 1
            seq.num_pending += 1
        self._num_empty += len(places) * self.tables.block_size - len(sequences)
        self.tables.note_peak(self.roster.running, self._num_empty)
        return LaterRuns(self._first, self._number, told, tokens), True, self._preemptions

    def take(
        self, batch: Batch, preemptions: Seq[int], samples: Seq[Seq[SampledToken]]
    ) -> Seq[TokenEvent]:
        """Add the tokens of a plain step to its sequences; return an event for each, in order.

        Sequences that have ended or were preempted since have none.

        Args:
            batch: the batch of the step.
            preemptions: the number of preemptions that each of its sequences had had when the step
                was scheduled.
            samples: the token of each sequence.
        """
        first, number = first_of(batch.sequences)
        if self.roster.order.counts_tokens:
            self._charge(first, preemptions)
        draws, tokens = samples if isinstance(samples, PlainDraws) else None, list[SampledToken]()
        if draws is None:
            tokens = list(chain.from_iterable(samples))
        ids = list(map(_token_id, tokens)) if draws is None else draws.ids
        if (
            first is not self._first
            or self.roster.num_changes != self._num_changes
            or number + 1 >= self._end
            or not self._end_ids.isdisjoint(ids)
        ):  # a sequence has ended, or may end by this token
            events = list[TokenEvent]()
            runs = zip(first, preemptions, draws.tokens if draws else tokens, strict=True)
            append_to_all(runs, self.roster.live, self.results, self.tables, events)
            return events
        for seq, known, token_id in zip(self._sequences, self._tokens, ids, strict=True):
            seq.num_computed_tokens += 1
            seq.num_pending -= 1
            known.append(token_id)
        if self.tables.prefix is not None:
            for place in self._at(number + 1):
                self.tables.register(self._sequences[place])
        request_ids, indices, cached = self._columns
        if draws is not None:
            return PlainEvents(request_ids, indices, cached, draws)
        none = repeat(None)
        values = zip(request_ids, indices, tokens, none, none, cached, none, strict=False)
        return list(map(tuple.__new__, repeat(TokenEvent), values))

    def _charge(self, runs: Seq[ScheduledSequence], preemptions: Seq[int]) -> None:
        """Charge the user of each sequence of a plain step for its one new token."""
        for run, before in zip(runs, preemptions, strict=True):
            seq = self.roster.live.get(run.seq_id)
            if seq is not None and seq.num_preemptions == before:
                self.roster.order.charge(seq.request.user, 0, 1)

    def _begin(self, runs: Seq[tuple[Sequence, int]], first: tuple[ScheduledSequence, ...]) -> None:
        """Prepare to schedule the next steps as repetitions of a plain one, if nothing has changed.

        Where sequences end in every step this gains nothing, so it needs two steps without changes.

        Args:
            runs: the sequences of the step and the tokens of each.
            first: the runs of the step.
        """
        was, self._num_changes, self._first = self._num_changes, self.roster.num_changes, ()
        if was != self._num_changes or len(runs) != len(self.roster.running):
            return
        size, is_told = self.tables.block_size, self.tables.prefix is not None
        sequences, places = [seq for seq, _ in runs], dict[int, list[int]]()
        pending, empty, end = sequences[0].num_pending, 0, sequences[0].max_len
        for place, seq in enumerate(sequences):
            scheduled = seq.num_scheduled_tokens
            room = len(seq.block_ids) * size - scheduled
            is_late = is_told and seq.num_registered_blocks < seq.num_computed_tokens // size
            if seq.num_pending != pending or room >= size or seq.shares_tail or is_late:
                return
            empty += room
            end = min(end, seq.max_len - scheduled)
            places.setdefault((scheduled - 1) % size, []).append(place)
        self._first, self._sequences, self._places = first, sequences, places
        self._tokens = [seq.token_ids for seq in sequences]
        self._number, self._end, self._num_empty = 0, end, empty
        self._num_merged = self.tables.num_merged
        self._end_ids = frozenset().union(*{seq.request.end_ids for seq in sequences})
        self._columns = (
            [seq.request.request_id for seq in sequences],
            [seq.index for seq in sequences],
            [seq.num_cached_tokens for seq in sequences],
        )
        self._preemptions = [seq.num_preemptions for seq in sequences]

    def _may_admit(self, count: int) -> bool:
        """Return whether a sequence could be admitted beside `count` others, by seats and free
        blocks.

        Blocks that this step begins only reduce the free ones.
        """
        if not self.roster.waiting or count >= self.limits.max_num_seqs:
            return False
        seq = self.roster.first_waiting()
        return bool(seq.swap_slots) or not self.tables.refuses(seq, spare=count)

    def _at(self, number: int) -> Seq[int]:
        """Return the places, in the batch, of sequences whose token in step `number` begins a
        block."""
        return self._places.get(-number % self.tables.block_size, ())
