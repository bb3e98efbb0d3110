"""Any history of sequences over groups of tables: what a query sees is its own prefix."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tilewise.cache.prefix import first_block
from tilewise.engine.request import Request, SamplingParams, Sequence
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.tables.admission import Limits, window_blocks
from tilewise.engine.tables.block_tables import BlockTables
from tilewise.engine.tables.tables_of import tables_of
from tilewise.errors import RequestError

P, MAX_RUN = 2, 3
WINDOWS, COUNTS = (None, 3, 1), (9, 7, 6)
TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=9)
NUMBERS = st.integers(0, 10**6)


class GroupsOfTables(RuleBasedStateMachine):
    """Sequences over three groups, beside a model that knows what each slot holds.

    A step writes when it begins and reads when it ends, which may be after others have begun.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tables = BlockTables(COUNTS, P, WINDOWS, MAX_RUN, True)
        self.live: list[Sequence] = []
        self.slots: list[dict[tuple[int, int], object]] = [{} for _ in WINDOWS]
        self.steps: deque = deque()
        self.num_seqs = 0

    def new(self, tokens: list[int], salt: str) -> Sequence:
        self.num_seqs += 1
        request = Request(str(self.num_seqs), tokens, SamplingParams(), salt=salt)
        return Sequence(self.num_seqs, request, 0, list(tokens), len(tokens), max_len=99)

    def table(self, seq: Sequence, group: int) -> list[int]:
        return self.tables.places[seq].tables[group - 1] if group else seq.block_ids

    def truth(self, seq: Sequence, position: int) -> object:
        return seq.request.salt, tuple(seq.token_ids[: position + 1])

    def is_still(self, seq: Sequence) -> bool:
        return all(seq is not other for other, *_ in self.steps)

    @rule(tokens=TOKENS, salt=st.sampled_from(["", "1"]), spare=st.integers(0, 2))
    def admit(self, tokens, salt, spare):
        seq = self.new(tokens, salt)
        free = [pool.allocator.num_free for pool in self.tables.pools]
        missing = self.tables.missing_blocks(seq, spare)
        there = self.tables.reserve(seq, spare)
        assert there == (missing == 0)
        if there:
            self.live.append(seq)
            assert seq.num_computed_tokens < len(tokens)
        else:
            assert free == [pool.allocator.num_free for pool in self.tables.pools]

    @precondition(lambda self: self.live)
    @rule(which=NUMBERS, most=st.integers(1, MAX_RUN))
    def begin(self, which, most):
        """Run some tokens, known or just drawn."""
        seq = self.live[which % len(self.live)]
        start = seq.num_scheduled_tokens
        if start == len(seq.token_ids):
            seq.token_ids.append(which % 2)
        end = min(start + most, len(seq.token_ids))
        if not self.tables.extend(seq, end):
            return
        self.tables.begin_step()
        copies = (self.tables.take_copies(), *self.tables.take_other_copies())
        for slots, pairs in zip(self.slots, copies, strict=True):
            for source, target in pairs:
                for offset in range(P):
                    slots[target, offset] = slots.get((source, offset))
        reads = []
        for group, window in enumerate(WINDOWS):
            table = self.table(seq, group)
            for position in range(start, end):
                block = table[position // P]
                assert self.tables.pools[group].allocator.ref_count(block) == 1
                self.slots[group][block, position % P] = self.truth(seq, position)
            first = 0 if window is None else max(0, start - window + 1)
            reads += [(group, table[p // P], p % P, self.truth(seq, p)) for p in range(first, end)]
        seq.num_scheduled_tokens = end
        self.steps.append((seq, end, seq.num_preemptions, reads))

    @precondition(lambda self: self.steps)
    @rule()
    def finish_step(self):
        seq, end, preemptions, reads = self.steps.popleft()
        for group, block, offset, truth in reads:
            assert self.slots[group][block, offset] == truth, "what an unfinished step reads stays"
        self.tables.end_step(0)
        if any(seq is other for other in self.live) and seq.num_preemptions == preemptions:
            seq.num_computed_tokens = end
            self.tables.register(seq)

    @precondition(lambda self: self.live)
    @rule(which=NUMBERS)
    def fork(self, which):
        parent = self.live[which % len(self.live)]
        # The engine forks who has computed all that it was admitted for, and has no block to spare.
        if self.is_still(parent) and parent.num_computed_tokens == len(parent.token_ids):
            child = self.new(parent.token_ids, parent.request.salt)
            self.tables.fork(parent, child)
            self.live.append(child)

    @precondition(lambda self: self.live)
    @rule(which=NUMBERS)
    def adopt(self, which):
        seq = self.live[which % len(self.live)]
        if self.is_still(seq):
            before = seq.num_computed_tokens
            gained = self.tables.adopt(seq)
            assert seq.num_computed_tokens == before + gained

    @precondition(lambda self: self.live)
    @rule(which=NUMBERS, forgets=st.booleans())
    def release(self, which, forgets):
        seq = self.live[which % len(self.live)]
        if forgets:
            self.tables.forget([seq], self.live)
            assert not self.tables.prefix.find([*seq.token_ids, 0, 0], seq.request.salt) or (
                len(seq.token_ids) < P
            )
        self.live.remove(seq)
        seq.num_preemptions += 1
        self.tables.release(seq)

    @invariant()
    def is_whole(self):
        self.tables.check_integrity(self.live, [])
        for seq in self.live:  # what the next query sees is there, unless a step is to write it
            if not self.is_still(seq):
                continue
            for group, window in enumerate(WINDOWS):
                end = seq.num_computed_tokens
                first = first_block(end, window, P) * P
                if window is not None:
                    first = max(first, end - window + 1)
                for position in range(first, end):
                    block = self.table(seq, group)[position // P]
                    held = self.slots[group][block, position % P]
                    assert held == self.truth(seq, position)


TestGroupsOfTables = GroupsOfTables.TestCase
TestGroupsOfTables.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def test_one_group_of_all_keys_has_plain_tables():
    plain = Limits(8, 4, 2, 16, 40)
    assert type(tables_of(plain, True, 0, None)) is BlockTables
    grouped = Limits(8, 4, 2, 16, 40, windows=(None, 5), other_blocks=(6,))
    assert type(tables_of(grouped, True, 0, None)) is BlockTables
    with pytest.raises(ValueError, match="windows must be one for each of 2 groups, got 1"):
        BlockTables((4, 4), 2, (None,), 1, True)


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("window", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("run", [1, 2, 7, 32])
def test_a_window_and_a_step_take_as_many_blocks_as_counted(block_size, window, run):
    most = max(
        (start + run - 1) // block_size - max(0, start - window + 1) // block_size + 1
        for start in range(window, window + 3 * block_size)
    )
    assert window_blocks(window, run, block_size) == most


def test_a_request_is_refused_by_the_group_that_cannot_hold_it():
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 1000}
    scheduler = Scheduler((100, 4), 4, windows=(None, 6), **settings)
    assert window_blocks(6, 8, 4) == 4
    scheduler.add(Request("long", [1] * 300, SamplingParams(max_tokens=50)))
    with pytest.raises(RequestError, match="at most 401 tokens together, so that they fit the 100"):
        scheduler.add(Request("too long", [1] * 400, SamplingParams(max_tokens=50)))
    scheduler = Scheduler((100, 3), 4, windows=(None, 6), **settings)
    message = (
        r"at most 13 tokens together, so that they fit the 3 cache blocks of 4 tokens of the "
        r"layers with a window of 6 \(which with 4 blocks, of a window and a step of 8 tokens, "
        r"hold any length\), got 14 \(prompt of 9\)"
    )
    with pytest.raises(RequestError, match=message):
        scheduler.add(Request("wide", [1] * 9, SamplingParams(max_tokens=5)))
    scheduler.add(Request("fits", [1] * 9, SamplingParams(max_tokens=4)))


def test_admission_counts_a_window_and_a_step_of_a_group():
    """Two prompts of 40 tokens run side by side in 8 blocks, of which each needs 4 at most."""
    settings = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 1000}
    scheduler = Scheduler((30, 9), 4, windows=(None, 6), enable_prefix_caching=False, **settings)
    for name in "ab":
        scheduler.add(Request(name, [ord(name)] * 40, SamplingParams(max_tokens=4)))
    batch = scheduler.schedule()
    assert [len(run.token_ids) for run in batch.sequences] == [8]
    scheduler.update(batch, [[]])
    assert [pool.allocator.num_used for pool in scheduler.tables.pools] == [10, 4]
    assert scheduler.stats().other_groups == ((4, 9),)
    first = scheduler.roster.running[0]
    assert len(first.block_ids) == 10
    assert scheduler.tables.num_places(first) == 4, "drafts have room where every group has"
    for _ in range(4):
        batch = scheduler.schedule()
        samples = [[] for _ in batch.sequences]
        if first.num_scheduled_tokens == 40:
            break
        scheduler.update(batch, samples)
        assert scheduler.tables.places[first].gone[1] == (first.num_scheduled_tokens - 8 - 5) // 4
        assert len(scheduler.tables.held(first, 1)) <= 4
