"""Slots and checkpoints of states one step at a time: what is kept, found, told and refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engine.state_model import StateModel
from tilewise.cache.spec import CacheSpec, KVSpec, StateSpec
from tilewise.engine.report import cache_report
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.sizing import StateMemory
from tilewise.engine.tables.state_tables import StateLimits


def make(checkpoints=9, interval=32, **settings) -> tuple[Scheduler, StateModel]:
    """Chunks of 4 tokens, blocks of 2."""
    given = {
        "max_num_seqs": 3, "max_num_batched_tokens": 64, "max_model_len": 60,
        "states": StateLimits(checkpoints, interval, 4),
    }  # fmt: skip
    scheduler = Scheduler(60, 2, **given | settings)
    return scheduler, StateModel(scheduler)


def ask(scheduler, name, prompt, max_tokens=1, n=1):
    sampling = SamplingParams(max_tokens=max_tokens, seed=1, ignore_eos=True, n=n)
    scheduler.add(Request(name, prompt, sampling))


def play(scheduler, model) -> list:
    """Run to the end; return the batches."""
    batches = []
    while scheduler.has_unfinished():
        batch = scheduler.schedule()
        batches.append(batch)
        scheduler.update(batch, model.run(batch))
        scheduler.check_integrity()
    return batches


TEXT = [1, 4, 2, 0, 3, 5, 1, 1, 2, 4, 0, 3, 3, 5, 2, 1, 4, 0, 2, 5, 1, 3]


def test_the_last_chunk_of_a_prompt_is_kept_and_the_next_prompt_goes_on_from_it():
    scheduler, model = make()
    ask(scheduler, "a", TEXT[:18])
    [batch] = play(scheduler, model)
    assert batch.states.saves == ((0, 0, 16),)
    ask(scheduler, "b", TEXT)
    [batch] = play(scheduler, model)
    assert batch.states.restores == ((0, 0, 16),)
    assert batch.sequences[0].start == 16
    assert scheduler.stats().prefix_hit_tokens == 16


def test_where_two_prompts_part_a_checkpoint_is_left_for_the_third():
    scheduler, model = make()
    ask(scheduler, "a", TEXT[:18])
    play(scheduler, model)
    ask(scheduler, "b", [*TEXT[:14], 0, 0, 0, 0])
    first, second = play(scheduler, model)
    assert (first.sequences[0].start, second.sequences[0].start) == (0, 12)
    assert first.states.saves[0][2] == 12
    ask(scheduler, "c", [*TEXT[:14], 5, 5, 5])
    [batch] = play(scheduler, model)
    assert batch.sequences[0].start == 12


def test_a_growing_text_keeps_its_last_chunk_alone():
    scheduler, model = make()
    ask(scheduler, "a", TEXT[:5], max_tokens=30)
    play(scheduler, model)
    positions = [position for _, position in scheduler.tables.states.positions()]
    assert positions == [4, 32]  # the prompt's, and the one that is a multiple of 32
    scheduler, model = make()
    ask(scheduler, "a", TEXT[:5], max_tokens=20)
    play(scheduler, model)
    positions = [position for _, position in scheduler.tables.states.positions()]
    assert positions == [4, 24]


def test_long_prompts_are_cut_at_intervals():
    scheduler, model = make(interval=8)
    ask(scheduler, "a", TEXT)
    batches = play(scheduler, model)
    assert [batch.sequences[0].start for batch in batches] == [0, 8, 16]
    assert [batch.states.saves[0][2] for batch in batches] == [8, 16, 20]


def test_without_checkpoints_nothing_is_found():
    scheduler, model = make(checkpoints=0)
    for name in "ab":
        ask(scheduler, name, TEXT)
        [batch] = play(scheduler, model)
        assert batch.sequences[0].start == 0
    assert scheduler.stats().checkpoints == (0, 0)


def test_what_a_request_and_the_map_tell_of_states():
    scheduler, model = make()
    ask(scheduler, "a", TEXT[:18], max_tokens=3)
    batch = scheduler.schedule()
    scheduler.update(batch, model.run(batch))
    assert scheduler.explain("a").endswith("a checkpoint of its states is at 16")
    picture = scheduler.insight.picture()
    assert (picture["tables"][0]["slot"], picture["tables"][0]["checkpoint"]) == (0, 16)
    assert picture["checkpoints"] == [(0, 16)]
    stats = scheduler.stats()
    assert (stats.state_slots, stats.checkpoints) == ((1, 3), (1, 9))


def test_samples_copy_the_state_of_the_first_and_the_last_one_takes_its_slot():
    scheduler, model = make()
    ask(scheduler, "a", TEXT[:6], max_tokens=4, n=3)
    batches = play(scheduler, model)
    assert sorted(batches[1].states.forks) == [(0, 1), (0, 2)]


def test_who_is_filled_from_a_checkpoint_that_has_not_arrived_is_known():
    """A step that brings it may fail beside one that reads it: in random schedules too seldom."""
    scheduler, model = make()
    ask(scheduler, "a", TEXT[:18])
    play(scheduler, model)
    for name in "bc":
        ask(scheduler, name, [*TEXT, 4 + (name == "c")])
    batch, states = scheduler.schedule(), scheduler.tables.states
    assert len(batch.states.restores) == 2
    filled = states.filled_by(batch, {0})
    assert sorted(seq.request.request_id for seq in filled) == ["b", "c"]
    assert states.filled_by(batch, {1}) == []
    assert states.spoilt_by(batch) == filled


SPEC = CacheSpec.of_layers(
    16, [KVSpec(2, 64, 64, torch.bfloat16)], [None], (),
    ((1, StateSpec(256, 4, 4, 2, 32, 32, dtype=torch.bfloat16)),),
)  # fmt: skip


def test_the_report_of_a_cache_tells_slots_and_checkpoints():
    lines = cache_report(SPEC, 4096).splitlines()
    assert lines[-2].startswith("one running text")
    assert lines[-2].endswith("= states in 1 layers")
    assert (
        lines[-1] == "one checkpoint    17.50 KiB, one for 1,024 tokens, and for each end of a text"
    )
    alone = CacheSpec.of_layers(16, [], [], (), SPEC.states)
    assert [line[:14] for line in cache_report(alone, 4096).splitlines()] == [
        "one running te", "one checkpoint",
    ]  # fmt: skip


def test_memory_is_split_between_slots_checkpoints_and_blocks():
    memory = StateMemory(SPEC, 4, None, None, keeps_tokens=True)
    budget = 100 << 20
    blocks = memory.left(budget) // SPEC.bytes_per_block
    checkpoints = memory.checkpoints_for(blocks * 16)
    own = memory.num_slots(budget) * memory.slot_bytes + checkpoints * 17_920
    assert 0.97 * budget < own + blocks * SPEC.bytes_per_block <= budget
    few = replace(memory, num_seqs=10_000)
    assert few.num_slots(budget) * memory.slot_bytes <= budget / 2
    assert replace(memory, num_checkpoints=7).checkpoints_for(10**6) == 7


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ((-1, 8), "num_checkpoints must be at least 0, got -1"),
        ((1, 0), "interval must be at least 1, got 0"),
        ((1, 8, 0), "chunk must be at least 1, got 0"),
    ],
)
def test_sizes_out_of_range_are_refused(limits, message):
    with pytest.raises(ValueError, match=message):
        StateLimits(*limits)


def test_prompts_that_begin_alike_compute_what_they_share_once():
    """Beside one another: the second leaves a checkpoint where they part; others wait for it."""
    scheduler, model = make(max_num_seqs=8, max_num_batched_tokens=200)
    for i in range(5):
        ask(scheduler, f"r{i}", [*TEXT[:18], i, 5 - i, 1, i])
    batches = play(scheduler, model)
    computed = sum(batch.num_tokens for batch in batches)
    assert computed == 22 + 22 + 3 * 6  # 16 tokens in common are known at a chunk's end
    assert len(batches) <= 4
