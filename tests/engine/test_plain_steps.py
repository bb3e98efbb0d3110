"""Steps of sequences that ask for nothing but tokens: the short ways do what the long ones do."""

from __future__ import annotations

import gc
import random
import sys
from dataclasses import replace

import pytest
import torch

from tests.engine.test_engine import CacheReader
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import LaterRuns, PlainDraws, PlainEvents, SampledToken, TokenEvent
from tilewise.engine.captured.decode_step import RING, DecodeStep
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.engine import Engine
from tilewise.engine.loop import _Core
from tilewise.engine.making import settle_memory
from tilewise.engine.outputs import Generation
from tilewise.engine.request import FinishReason, Request, SamplingParams
from tilewise.engine.scheduling import plain_steps
from tilewise.engine.scheduling.plain_steps import append_to_all
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.scheduling.withdrawal import withdraw


def requests(seed):
    draw = random.Random(seed)
    found = []
    for i in range(9):
        options = draw.choice([{}, {}, {}, {"logprobs": 1}, {"presence_penalty": 1.0}, {"n": 3}])
        sampling = SamplingParams(max_tokens=draw.randrange(1, 30), seed=i, **options)
        prompt = [draw.randrange(3, 6) for _ in range(draw.randrange(1, 40))]
        found.append(Request(str(i), prompt, sampling, (2,)))
    return found


def calm_requests(seed, ends):
    draw, found = random.Random(seed), []
    for i in range(draw.choice([3, 6, 9])):
        sampling = SamplingParams(max_tokens=draw.choice([37, 38, 60]), seed=i, ignore_eos=i > 1)
        prompt = [draw.randrange(3, 6)] * draw.randrange(1, 20)
        found.append(Request(str(i), prompt, sampling, (ends,), user=str(i % 3)))
    return found


def describe_each(runs, describe, is_short):
    return tuple(describe(seq, n) for seq, n in runs), False


def history(seed, in_flight, num_swap_blocks=0, *, is_calm=False):
    """Run a scheduler alone; return its steps, its events and what it has noted.

    Calm ones seldom change who runs: requests ask for nothing but tokens, whose end is far.
    """
    draw, steps, events = random.Random(seed), [], []
    swaps = num_swap_blocks > 0
    ends = 2 if draw.random() < 0.5 or not is_calm else 3
    words = 3 if is_calm and draw.random() < 0.5 else 40  # few: equal blocks are filled, too
    scheduler = Scheduler(
        draw.choice([22, 30] if swaps else [40, 200]), 4, max_num_seqs=6,
        max_num_batched_tokens=draw.choice([8, 64]), max_model_len=80, max_in_flight=in_flight,
        enable_prefix_caching=bool(seed % 2), num_swap_blocks=num_swap_blocks,
        scheduling_policy=draw.choice(["fcfs", "fcfs" if swaps else "fair"]),
        preemption="swap" if swaps else "auto",
    )  # fmt: skip
    later = calm_requests(seed, ends) if is_calm else requests(seed)
    for request in later[:-2]:
        scheduler.add(request)
    del later[:-2]

    def abort_some():
        if draw.random() < (0.01 if is_calm else 0.03) and scheduler.roster.requests:
            scheduler.abort(next(iter(scheduler.roster.requests)))

    unfinished = []
    while scheduler.has_unfinished():
        if later and draw.random() < 0.1:
            scheduler.add(later.pop())
        while len(unfinished) < in_flight and (batch := scheduler.schedule()) is not None:
            unfinished.append(batch)
            # Tables and tokens are the sequences' own lists, which change.
            runs = [(*s[:3], tuple(s.block_ids), *s[4:9], *s[10:12]) for s in batch.sequences]
            steps.append((runs, replace(batch, sequences=(), is_plain=False)))
            is_one = all(len(s.token_ids) == 1 == s.num_samples for s in batch.sequences)
            assert batch.decodes == is_one
            assert not (batch.is_plain and (batch.asks or not is_one))
            assert batch.num_tokens == sum(len(s.token_ids) for s in batch.sequences)
        batch = unfinished.pop(0)
        samples = [
            [
                SampledToken(0 if words < 40 else draw.randrange(2, words))
                for _ in range(s.num_samples)
            ]
            for s in batch.sequences
        ]
        if batch.is_plain and seed % 3:
            samples = PlainDraws([token.token_id for [token] in samples])
        abort_some()
        events += scheduler.update(batch, samples)
        scheduler.check_integrity()
        abort_some()
        if is_calm and not unfinished and draw.random() < 0.02:
            withdraw(scheduler)  # of nothing: the next step begins anew
    noted = [{k: v for k, v in event.items() if k != "time"} for event in scheduler.trace.since(0)]
    peaks = scheduler.tables.blocks_peak, scheduler.tables.slots_peak
    return steps, events, noted, peaks, getattr(scheduler.order, "counters", None)


@pytest.mark.parametrize("num_swap_blocks", [0, 60])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_plain_steps_are_described_and_taken_as_all_others(monkeypatch, in_flight, num_swap_blocks):
    """Blocks that come back from main memory full are told of in the next step, whichever it is."""
    num_plain = num_back = num_later = 0

    def counting(*arguments):
        nonlocal num_plain
        num_plain += 1
        append_to_all(*arguments)

    class Counted(LaterRuns):
        def __init__(self, *arguments):
            nonlocal num_later
            num_later += 1
            super().__init__(*arguments)

    # A table that changes while others go on is rare: 63 has one.
    for seed in (*range(26), 63) if num_swap_blocks else range(16):
        is_calm = seed // 2 % 2 == 1  # with a prefix cache and without
        with monkeypatch.context() as patch:
            patch.setattr(plain_steps, "append_to_all", counting)
            patch.setattr(plain_steps, "LaterRuns", Counted)
            found = history(seed, in_flight, num_swap_blocks, is_calm=is_calm)
        with monkeypatch.context() as patch:
            patch.setattr(plain_steps, "describe_all", describe_each)
            wanted = history(seed, in_flight, num_swap_blocks, is_calm=is_calm)
        assert found == wanted
        num_back += sum(event["kind"] == "swap_in" for event in found[2])
    assert num_plain > 30
    assert num_later > 300
    assert (num_back > 9) == (num_swap_blocks > 0)


def test_samples_of_a_wrong_number_are_refused():
    scheduler = Scheduler(
        40, 4, max_num_seqs=2, max_num_batched_tokens=64, max_model_len=80, max_in_flight=2
    )
    for i in range(2):
        scheduler.add(Request(str(i), [5, 6], SamplingParams(max_tokens=9)))
    batch = scheduler.schedule()
    assert batch is not None
    scheduler.update(batch, [[SampledToken(5)]] * 2)
    batch = scheduler.schedule()
    assert batch is not None
    assert batch.is_plain
    for samples in ([], [[SampledToken(5)]], [[SampledToken(5)], []], [[SampledToken(5)] * 2] * 2):
        with pytest.raises(ValueError, match=r"samples must be \[1, 1\] tokens per sequence"):
            scheduler.update(batch, samples)
    assert len(scheduler.update(batch, [[SampledToken(5)]] * 2)) == 2


def events_of(seed, n):
    draw, found, ended = random.Random(seed), [], set()
    for step in range(12):
        own = []
        for index in range(n):
            if index in ended and draw.random() < 0.7:
                continue
            logprob = draw.choice([None, None, -1.0])
            reason = draw.choice([None] * 6 + [FinishReason.LENGTH, FinishReason.STOP])
            reason = FinishReason.LENGTH if step == 11 else reason
            token = SampledToken(draw.randrange(9), logprob)
            if reason is not None:
                ended.add(index)
            own.append(TokenEvent("r", index, token, reason, None, 3))
        if own:
            found.append(own)
    return found


@pytest.mark.parametrize("best_of", [None, 5])
def test_the_events_of_a_step_are_taken_as_one_by_one(best_of):
    sampling = SamplingParams(n=4, best_of=best_of, max_tokens=40)
    for seed in range(20):
        one, all_ = (Generation(Request("r", [5], sampling), None, None) for _ in range(2))
        for events in events_of(seed, sampling.num_samples):
            for event in events:
                if not one.output.finished:
                    one.take(event)
            if not all_.output.finished:  # tokens behind the end of a sample change nothing
                told = all_.take_all(events)
                assert all(all_.samples[e.index].finish_reason == "stop" for e in told)
            assert one.output.finished == all_.output.finished
            mine, other = one.snapshot(), all_.snapshot()
            assert mine.outputs == other.outputs
            assert mine.num_cached_tokens == other.num_cached_tokens == 3
            times = [x.metrics.first_token_time for x in (mine, other)]
            assert (times[0] is None) == (times[1] is None)


def plain_core(rows, num_requests=2, *, are_equal=False):
    """Make an engine whose steps answer at once, and its loop, on this thread."""
    storage = KVStorage(CacheSpec(1, 16, KVSpec(1, 1, 1, torch.float32)), 8 * rows, "cpu")
    runner = DeviceRunner(CacheReader(), storage, max_num_seqs=rows, max_model_len=60)
    runner.results.values.fill_(1)
    scheduler = Scheduler(
        8 * rows, 16, max_num_seqs=rows, max_num_batched_tokens=4096, max_model_len=60
    )
    core = _Core(None)
    core.engine = Engine(scheduler, runner, overlap=True)
    n = rows // num_requests
    temperature = 0.0 if are_equal else 0.6
    sampling = SamplingParams(n=n, temperature=temperature, max_tokens=40, ignore_eos=True)
    for i in range(num_requests):
        core.add(
            Generation(Request(str(i), [5 if are_equal else 5 + i] * 18, sampling), None, None)
        )
    return core


def run_nothing(self):
    self.results.place.add_(1).remainder_(RING)


@pytest.mark.parametrize(("is_one_each", "most"), [(False, 2), (True, 1.1)])
def test_a_steady_step_calls_few_functions_a_row(monkeypatch, is_one_each, most):
    """Thousands of samples a step: what Python does for each of them is counted."""
    monkeypatch.setattr(DecodeStep, "run", run_nothing)
    counts = []
    for rows in (32, 96):
        core, calls = plain_core(rows, rows if is_one_each else 2), 0

        def note(frame, event, argument):
            nonlocal calls
            calls += event == "call"

        for _ in range(6):
            core._step(core.engine.step)
        sys.setprofile(note)
        for _ in range(4):
            core._step(core.engine.step)
        sys.setprofile(None)
        counts.append(calls / 4)
        assert len(core.live["1"].samples[-1].token_ids) == 10
    # A token is added to a request; of several samples it is an event, made and taken.
    assert (counts[1] - counts[0]) / 64 <= most


def test_runs_and_events_are_made_when_somebody_looks(monkeypatch):
    """A steady step tells the device new blocks, and each reader a token: nobody makes the rest."""
    monkeypatch.setattr(DecodeStep, "run", run_nothing)
    core = plain_core(32, 32)
    for _ in range(6):
        core._step(core.engine.step)
    made = []
    for kind in (LaterRuns, PlainEvents):
        make = kind.__iter__

        def noted(self, make=make):
            made.append(self)
            return make(self)

        monkeypatch.setattr(kind, "__iter__", noted)
    for _ in range(20):  # blocks begin and fill meanwhile
        core._step(core.engine.step)
        assert isinstance(core.engine._unfinished[-1][0].sequences, LaterRuns)
    assert not made
    events = core.engine.step()
    assert isinstance(events, PlainEvents)
    assert events[3] == TokenEvent("3", 0, SampledToken(1)) == list(events)[3]
    assert events[:2] == list(events)[:2]
    batch = core.engine._unfinished[-1][0]
    assert [run.seq_id for run in batch.sequences] == [run.seq_id for run in batch.sequences.first]
    assert made


def test_the_device_is_told_of_blocks_that_give_way_to_equal_ones(monkeypatch):
    """Nobody comes or goes, and yet tables change where all draw the same."""
    monkeypatch.setattr(DecodeStep, "run", run_nothing)
    core = plain_core(4, 4, are_equal=True)
    kinds, runner = [], core.engine.runner
    submit = runner.submit

    def noted(batch):
        handle = submit(batch)
        kinds.append(type(batch.sequences))
        table = [[*run.block_ids] for run in batch.sequences]
        rows = [runner.rows._row_of[run.seq_id] for run in batch.sequences]
        for row, blocks in zip(rows, table, strict=True):
            assert runner.rows.host_table[row, : len(blocks)].tolist() == blocks
        return handle

    monkeypatch.setattr(runner, "submit", noted)
    for _ in range(36):
        core._step(core.engine.step)
    assert core.engine.scheduler.tables.num_merged == 2 * 3  # two blocks are filled, by four
    assert 20 < kinds.count(LaterRuns) < 33


def test_collections_are_few_however_many_rows():
    before = gc.get_threshold()
    try:
        gc.set_threshold(700, 10, 10)
        settle_memory(4096)
        assert gc.get_threshold() == (16 * 4096, 10, 10)
        settle_memory(8)
        assert gc.get_threshold() == (16 * 4096, 10, 10)
        gc.set_threshold(0, 10, 10)  # collections are off: that stays
        settle_memory(4096)
        assert gc.get_threshold() == (0, 10, 10)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
