"""Random schedules of models with states: whatever meets, each request gets what it gets alone.

Everything of `test_whole_simulation` (chunks, hits, forks, searches, guesses, preemption, main
memory, files, deadlines, failures) over slots and checkpoints that `state_model` watches.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from tests.engine.simulator import fingerprints
from tests.engine.state_model import StateModel, logprob_after
from tests.engine.test_beams import is_search
from tests.engine.test_whole_simulation import WholeStory
from tilewise.cache.prefix import PrefixCache
from tilewise.engine.scheduling import newcomers
from tilewise.engine.scheduling.results import Results
from tilewise.engine.scheduling.withdrawal import pause_transfers, withdraw
from tilewise.engine.tables import block_tables
from tilewise.engine.tables.state_tables import StateLimits, StateTables
from tilewise.engine.tables.swap_space import SwapSpace


class StateStory(WholeStory):
    """A random run of a model that has layers with states beside groups of layers with keys."""

    model_type = StateModel

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.batches, submit = [], self.model.submit

        def submitting(batch):
            self.batches.append(batch)
            submit(batch)

        self.model.submit = submitting

    def random_states(self) -> StateLimits:
        rng = self.rng
        chunk = rng.choice([1, 2, 3, 4, 6])
        return StateLimits(rng.choice([0, 1, 2, 4, 9, 30]), chunk * rng.choice([1, 2, 5]), chunk)

    def fail(self, unfinished) -> None:
        if self.rng.random() < 0.5:
            unfinished.clear()
            self.model.lose()
            self.model.has_lost_steps = True
            withdraw(self.scheduler)
            self.num_withdrawn += 1
            if self.rng.random() < 0.3:
                pause_transfers(self.scheduler)
            self.scheduler.check_integrity()
            return
        super().discard(unfinished)

    def judge(self) -> None:
        super().judge()
        for request_id, request in self.requests.items():
            if is_search(request):
                continue
            beginning = fingerprints(request.prompt_token_ids, request.salt)[-1]
            for index in range(request.sampling.n):
                key, total, value = (request_id, index), 0.0, beginning
                for token in self.outputs.tokens.get(key, ()):
                    total += logprob_after(value, token)
                    value = abs(hash((value, token)))
                assert self.sums.get(key, 0.0) == total, "log-probabilities are those of the text"


class ShortStory(StateStory):
    """A few requests over a small cache: a hundred thousand take some twenty minutes of a core.

    Reads, writes and what comes out are judged in all; what the tables say after each step in one
    of ten, after the last in all.
    """

    most_arrivals, crowds = 3, (1, 2, 3)

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.is_checked_often = seed % 10 == 0
        if not self.is_checked_often:
            self.scheduler.check_integrity = lambda: None

    def judge(self) -> None:
        if not self.is_checked_often:
            del self.scheduler.check_integrity
        self.scheduler.check_integrity()
        super().judge()


def play(seed: int, kind: type[StateStory] = StateStory) -> StateStory:
    story = kind(seed)
    with mock.patch.object(newcomers, "FLOOD", 2):  # so few blocks hold no real one
        story.play()
    story.judge()
    return story


@pytest.mark.parametrize("part", range(4))
def test_any_schedule_of_states_gives_the_beams_and_tokens_of_a_request_alone(part: int):
    for seed in range(part * 25, (part + 1) * 25):
        play(seed)


def test_any_short_schedule_of_states_gives_what_a_request_gets_alone():
    for seed in range(50):
        play(seed, ShortStory)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_thousands_of_schedules_of_states_give_what_a_request_gets_alone(part: int):
    for seed in range(10_000 + part * 1000, 10_000 + (part + 1) * 1000):
        play(seed)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(50))
def test_a_hundred_thousand_short_schedules_of_states_give_what_a_request_gets_alone(part: int):
    for seed in range(1_000_000 + part * 2000, 1_000_000 + (part + 1) * 2000):
        play(seed, ShortStory)


def test_the_random_schedules_reach_what_they_are_meant_to_test(monkeypatch):
    kinds = (
        "hits", "hits after preemption", "forks", "heirs", "cuts at branches", "cuts at intervals",
        "tails dropped", "evicted", "recalled", "files", "taken over", "guesses taken back",
        "withdrawn", "passed", "read beside steps", "saved behind another's", "beams",
    )  # fmt: skip
    seen = dict.fromkeys(kinds, 0)

    def counting(name, count):
        method = getattr(StateTables, name)

        def counted(self, *args):
            before = self._forks, self._unplaced
            found = method(self, *args)
            count(self, found, before, *args)
            return found

        monkeypatch.setattr(StateTables, name, counted)

    def admitted(tables, found, before, seq, position, *rest):
        seen["hits"] += position > 0
        seen["hits after preemption"] += position > 0 and seq.num_preemptions > 0

    def cut(tables, found, before, seq, num_tokens, depth):
        at = seq.num_scheduled_tokens + found
        seen["cuts at branches"] += found < num_tokens and at == tables._held[seq].branch
        seen["cuts at intervals"] += found < num_tokens and at % tables.interval == 0

    def released(tables, found, before, seq):
        seen["heirs"] += len(tables._forks) < len(before[0])
        seen["heirs"] += len(tables._unplaced) < len(before[1])

    def moved(*_):
        seen["taken over"] += 1

    def settled(tables, found, before):
        seen["forks"] += len(tables._forks)

    def dropped(tables, found, before, node, checkpoint):
        seen["tails dropped"] += node.blocks[tables.group] < 0

    def passed(tables, found, *_):
        seen["passed"] += found

    def began(tables, moves, before):
        seen["read beside steps"] += bool(moves.restores) and len(tables._reads) > 1

    for name, count in (
        ("admit", admitted), ("cut", cut), ("release", released), ("move", moved),
        ("settle", settled), ("_drop_tail", dropped), ("has_passed", passed),
        ("begin_step", began),
    ):  # fmt: skip
        counting(name, count)
    keep = SwapSpace.keep

    def keeping(self, group, block, node):
        seen["evicted"] += group == len(self.rooms) - 1
        keep(self, group, block, node)

    monkeypatch.setattr(SwapSpace, "keep", keeping)
    for seed in range(400):
        story = play(seed)
        stats, tables = story.scheduler.stats(), story.scheduler.tables
        seen["recalled"] += any(
            batch.of_group(tables.states.group).swap_in for batch in story.batches
        )
        seen["files"] += story.stores[-1].num_hits if story.stores else 0
        seen["guesses taken back"] += stats.num_drafts > stats.num_accepted_drafts
        seen["withdrawn"] += story.num_withdrawn
        seen["beams"] += any(
            batch.states.forks and story.scheduler.max_in_flight > 1 for batch in story.batches
        )
        seen["saved behind another's"] += any(len(b.states.saves) > 1 for b in story.batches)
        if all(seen.values()):
            return
    pytest.fail(f"not all came: {seen}")


# Planted mistakes, see test_planted_mistakes.py.

ADMIT, RELEASE, SCHEDULE = StateTables.admit, StateTables.release, StateTables.schedule
BEGIN_STEP, REGISTER, FORK = StateTables.begin_step, StateTables.register, StateTables.fork
TAKE, INSIDE = block_tables.take, block_tables.begin_inside
FIND, SWAP_BEGIN = PrefixCache.find, SwapSpace.begin_step


def begin_a_token_late(tables, seq, position, checkpoint):
    """The slot knows the state of one token more than it has read."""
    ADMIT(tables, seq, position, checkpoint)
    tables._restores = [(c, s, p + (s == tables.slot_of(seq))) for c, s, p in tables._restores]


def find_without_a_checkpoint(prefix, *args, **options):
    """A hit is as long as the blocks are, whatever there is of states."""
    windows, prefix.windows = prefix.windows, [*prefix.windows[:-1], 1]
    try:
        return FIND(prefix, *args, **options)
    finally:
        prefix.windows = windows


def guess_beyond_the_chunk(tables, seq):
    return 99


def free_a_slot_twice(tables, seq):
    slot = tables._held[seq].slot if seq in tables._held else -1
    RELEASE(tables, seq)
    if slot in tables._free:
        tables._free.append(slot)


def keep_the_slot_of_who_has_ended(tables, seq):
    tables._held.pop(seq, None)


def forget_who_has_still_to_copy(tables, seq):
    """A parent's slot is another's before its children have copied it."""
    held = tables._held.pop(seq, None)
    tables._unplaced = [pair for pair in tables._unplaced if pair[1] is not seq]
    if held is not None and held.slot >= 0:
        tables._forget_moves_to(held.slot)
        tables._free.append(held.slot)


def fill_for_who_has_left(tables, slot):
    """A slot that was to be filled is filled, whoever has it now."""


def copy_nothing(tables):
    for _, child in tables._unplaced:
        tables._held[child].slot = tables._free.pop()
    tables._unplaced.clear()


def let_go_of_what_is_read(tables):
    moves = BEGIN_STEP(tables)
    tables._let_go(tables._reads[-1])
    tables._reads[-1] = []
    return moves


def restore_nothing(tables):
    moves = BEGIN_STEP(tables)
    return moves._replace(restores=())


def save_where_the_run_ends(tables, seq, start, end):
    """A checkpoint is of the last token that was read, not of its chunk's start."""
    number = len(tables._saves)
    slot = SCHEDULE(tables, seq, start, end)
    if len(tables._saves) > number:
        tables._saves[-1] = replace(tables._saves[-1], position=end)
    return slot


def save_the_chunk_before(tables, seq, start, end):
    """A slot stands for the chunk before its own."""
    number = len(tables._saves)
    slot = SCHEDULE(tables, seq, start, end)
    for i, save in enumerate(tables._saves[number:], start=number):
        tables._saves[i] = replace(save, position=max(save.position - tables.unit, tables.unit))
    return slot


def show_at_the_next_block(tables, seq, node, num_registered):
    """A checkpoint is listed a block behind its own."""
    for i, save in enumerate(tables._made):
        later = save.position + tables.block_size
        if save.seq is seq and later // tables.block_size <= num_registered:
            tables._made[i] = replace(save, position=later)
    REGISTER(tables, seq, node, num_registered)


def begin_inside_a_block(tables, seq, spare, *, is_fresh):
    if tables.prefix is None:
        return 0
    states, tables.states = tables.states, None
    try:
        whole = [each for each in tables.prefix._all() if len(each.blocks) > len(tables.pools)]
        kept = [(each, each.blocks) for each in whole]
        for each, blocks in kept:
            each.blocks = blocks[:-1]
        try:
            return INSIDE(tables, seq, spare, is_fresh=is_fresh)
        finally:
            for each, blocks in kept:
                each.blocks = blocks
    finally:
        tables.states = states


def find_what_was_given_away(prefix, group, block):
    """An evicted checkpoint stays listed."""
    if group < len(prefix.allocators) - 1:
        EVICT(prefix, group, block)
        return
    prefix._node_at[group].pop(block, None)


def take_without_bringing(tables, number, nodes, count):
    """A checkpoint of main memory is read where it was to come."""
    found = TAKE(tables, number, nodes, count)
    states = tables.states
    if states is not None and number == states.group and tables.memory is not None:
        room = tables.memory.rooms[number]
        for checkpoint in found[0]:
            if checkpoint in room.coming:
                room.pins.remove(slot := room.coming.pop(checkpoint))
                room.allocator.release([slot])
    return found


def keep_a_step_late(swap):
    """What main memory is to keep of checkpoints is read when it has been written."""
    room = swap.rooms[-1]
    late, room.going = room.going, getattr(swap, "late", [])
    swap.late = late
    return SWAP_BEGIN(swap)


def fork_and_know_more(tables, parent, child):
    """A child counts as having a checkpoint that its parent has not."""
    FORK(tables, parent, child)
    tables._held[child].slot = tables._held[parent].slot


def tell_the_probability_of_the_first(results, seq, tokens, events):
    """Right guesses come with the log-probability of the token before them."""
    APPEND_ALL(results, seq, [t._replace(logprob=tokens[0].logprob) for t in tokens], events)


EVICT, APPEND_ALL = PrefixCache._evict, Results.append_all

MISTAKES = {
    "a state is a token late": (StateTables, "admit", begin_a_token_late),
    "a hit is longer than its checkpoint": (PrefixCache, "find", find_without_a_checkpoint),
    "a guess leaves its chunk": (StateTables, "num_drafts", guess_beyond_the_chunk),
    "a slot is freed twice": (StateTables, "release", free_a_slot_twice),
    "an ended sequence keeps its slot": (StateTables, "release", keep_the_slot_of_who_has_ended),
    "a parent's slot is given away before it is copied": (
        StateTables, "release", forget_who_has_still_to_copy,
    ),
    "a slot is filled for who has left": (StateTables, "_forget_moves_to", fill_for_who_has_left),
    "a forked state is not copied": (StateTables, "settle", copy_nothing),
    "a checkpoint that is read is given away": (
        StateTables, "begin_step", let_go_of_what_is_read,
    ),
    "a hit's checkpoint is not restored": (StateTables, "begin_step", restore_nothing),
    "a checkpoint is of the run's last token": (StateTables, "schedule", save_where_the_run_ends),
    "a checkpoint is of the chunk before": (StateTables, "schedule", save_the_chunk_before),
    "a checkpoint is listed a block late": (StateTables, "register", show_at_the_next_block),
    "a hit with states ends inside a block": (
        block_tables, "begin_inside", begin_inside_a_block,
    ),
    "a checkpoint that was given away is found": (PrefixCache, "_evict", find_what_was_given_away),
    "a checkpoint does not come back from main memory": (
        block_tables, "take", take_without_bringing,
    ),
    "a checkpoint goes to main memory a step late": (SwapSpace, "begin_step", keep_a_step_late),
    "a failed step's restores are trusted": (StateTables, "spoilt_by", lambda tables, batch: []),
    "a state that has left its chunk is taken back": (
        StateTables, "has_passed", lambda tables, seq: False,
    ),
    "a fork writes to its parent's slot": (StateTables, "fork", fork_and_know_more),
    "a guess has another token's log-probability": (
        Results, "append_all", tell_the_probability_of_the_first,
    ),
}  # fmt: skip
