"""A profile is found again from steps that it made, and the real engine's steps are looked at."""

from __future__ import annotations

import itertools
import json
import random
import time

import pytest
import torch

from tests.engine.test_engine import CacheReader
from tests.engine.test_virtual import SIZES
from tests.lab.scripts import load
from tilewise.bench import machine
from tilewise.bench.fit import (
    MOST_OF_A_GPU,
    NEAR_BYTES,
    MeasuredStep,
    by_class,
    errors,
    fit,
    least_squares,
    of_device,
    replayed,
)
from tilewise.bench.machine import one_turn
from tilewise.bench.simulate import Setting, arrivals_of, of_timings, serve
from tilewise.bench.trace import TraceRequest, poisson, with_prefix
from tilewise.cache.allocator import BlockAllocator
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.cost import Machine, StepCost, StepWork, read_machine
from tilewise.engine.batch import SampledToken
from tilewise.engine.engine import Engine
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.steps.runner import Finished, ModelRunner

live = load("live")
PEAKS = {
    "name": "a machine",
    "flops": {"bfloat16": 2e11},
    "read_bandwidth": 2e10,
    "copy_bandwidth": 1e10,
    "memory_bytes": 8e9,
}


def works(count: int = 80) -> list[StepWork]:
    rng, found = random.Random(0), []
    for _ in range(count):
        rows, context = rng.choice((1, 4, 16, 64)), rng.randint(1, 4000)
        if rng.random() < 0.5:
            found.append(StepWork(rows, rows, rows, rows, rows * context, is_decode=True))
        else:
            n = rng.randint(2, 2000)
            found.append(StepWork(n, 2, 1, 1, n, n * (n + 1) // 2))
    return found


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_profile_is_found_again_from_the_steps_that_it_made(overlaps):
    truth = Machine(
        **PEAKS, stream_efficiency=0.6, product_efficiency=0.6, key_efficiency=0.5,
        attention_efficiency=0.4, element_efficiency=0.7, kernel_s=2e-6, sample_s=3e-5,
        step_s=2e-5, step_sequence_s=1e-6, token_s=1e-7, update_s=4e-5, update_sequence_s=2e-6,
        overlaps=overlaps, prompt_s=4e-3, few_pairs=10_000,
    )  # fmt: skip
    cost = StepCost(SIZES, truth)
    steps = []
    for work in works():
        seconds = cost(work)
        steps.append(MeasuredStep(work, seconds.before, 0.0, seconds.device, seconds.after))
    found = fit(PEAKS | {"few_pairs": 10_000}, SIZES, steps, dtype="bfloat16")
    assert max(map(abs, errors(found, SIZES, steps, {}))) < (0.05 if overlaps else 0.005)
    for name in ("step_s", "step_sequence_s", "token_s", "update_s", "update_sequence_s"):
        assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=1e-3)
    if not overlaps:
        # One model's weights take as long in every step: they are not told from the kernels.
        for name in ("key_efficiency", "attention_efficiency", "sample_s", "prompt_s"):
            assert getattr(found, name) == pytest.approx(getattr(truth, name), rel=0.05)


def test_it_is_found_what_the_caches_of_a_cpu_hold():
    near = NEAR_BYTES[3]
    truth = Machine(
        **PEAKS, key_efficiency=2.0, near_bytes=near, far_efficiency=0.5, overlaps=False,
        sample_s=2e-5,
    )  # fmt: skip
    cost = StepCost(SIZES, truth)
    steps = [MeasuredStep(work, 1e-5, 1e-5, cost(work).device, 1e-5) for work in works()]
    assert any(work.keys * cost.cache_bytes > 2 * near for work in works())
    found = fit(PEAKS, SIZES, steps, dtype="bfloat16")
    assert found.near_bytes == near
    assert found.far_efficiency == pytest.approx(0.5, rel=0.02)
    assert max(map(abs, errors(found, SIZES, steps, {}))) < 0.005
    assert fit(PEAKS, SIZES, steps, dtype="bfloat16", overlaps_steps=True).near_bytes == 0


GPU = PEAKS | {
    "flops": {"bfloat16": 7e14}, "read_bandwidth": 4.4e12, "copy_bandwidth": 4.2e12,
    "launch_s": 1e-5, "kernel_s": 2e-6,
}  # fmt: skip


def gpu_works(count: int = 300) -> list[StepWork]:
    """Decode steps of 1 to 256 rows over short and long contexts, prompts alone and beside."""
    rng, found = random.Random(1), []
    for _ in range(count):
        rows, context = rng.choice((1, 2, 4, 8, 16, 32, 64, 100, 128, 256)), rng.randint(10, 2000)
        if rng.random() < 0.6:
            renews = rng.random() < 0.5
            found.append(
                StepWork(rows, rows, rows, rows, rows * context, is_decode=True, renews=renews)
            )
            continue
        n, rows = rng.randint(20, 2000), rng.choice((0, 4, 40, 200))
        keys, pairs = rows * context + n, n * (n + 1) // 2
        found.append(StepWork(n + rows, rows + 1, rows + 1, rows + 1, keys, pairs, renews=True))
    return found


def test_a_profile_of_a_gpu_is_found_again_from_host_and_device_apart():
    truth = Machine(
        **GPU | {"launch_s": 1.3e-5, "kernel_s": 3e-6},
        stream_efficiency=0.7, product_efficiency=0.6, key_efficiency=0.9, beside_efficiency=0.4,
        attention_efficiency=0.3, element_efficiency=0.8, sample_s=1e-6, prompt_s=1e-4,
        attends_apart=True, captures=True, overlaps_steps=True, step_s=1.5e-4, renew_s=3e-4,
        step_sequence_s=1e-6, renew_sequence_s=4e-6, token_s=2e-7, update_s=2e-5,
        update_sequence_s=1e-7, renewed_sequence_s=3e-6, launch_sequence_s=1e-5,
        launch_token_s=5e-7, launch_draw_s=1e-3,
    )  # fmt: skip
    cost, steps = StepCost(SIZES, truth), []
    for work in gpu_works():
        seconds = cost(work)
        # Who is waited for when steps come one after another says nothing of the device.
        told = 0.3 * seconds.before, 0.7 * seconds.before + seconds.launching, 1.0, seconds.after
        steps.append(MeasuredStep(work, *told))
        steps.append(MeasuredStep(work, 0.0, 0.0, seconds.device, 0.0, is_alone=True))
    found = fit(GPU, SIZES, steps, dtype="bfloat16", captures=True, overlaps_steps=True)
    alone = of_device(steps)
    assert len(alone) == len(steps) // 2
    off = errors(found, SIZES, alone, {})
    assert max(map(abs, off)) < 0.08
    assert sum(map(abs, off)) / len(off) < 0.02
    assert found.beside_efficiency == pytest.approx(0.4, rel=0.15)
    assert found.key_efficiency == pytest.approx(0.9, rel=0.1)
    told = StepCost(SIZES, found)
    for work in gpu_works():
        of_host = [one.before + one.launching for one in (told(work), cost(work))]
        assert of_host[0] == pytest.approx(of_host[1], rel=0.02)
        assert told(work).after == pytest.approx(cost(work).after, rel=0.02)


def test_no_share_of_a_gpu_is_above_its_peaks():
    """Steps that are faster than the peaks allow, as where these were measured on a bad day."""
    truth = Machine(**GPU, stream_efficiency=3.0, product_efficiency=3.0, key_efficiency=2.0,
                    captures=True)  # fmt: skip
    cost = StepCost(SIZES, truth)
    steps = [MeasuredStep(w, 1e-5, 1e-5, cost.device(w), 1e-5, is_alone=True) for w in gpu_works()]
    host = [MeasuredStep(w, 1e-5, 1e-5, 1.0, 1e-5) for w in gpu_works(20)]
    found = fit(GPU, SIZES, steps + host, dtype="bfloat16", captures=True, overlaps_steps=True)
    shares = {n: v for n, v in found.as_dict().items() if n.endswith("_efficiency")}
    assert max(shares.values()) <= MOST_OF_A_GPU, shares
    assert min(shares.values()) > 0


def test_what_other_kernels_take_for_other_rows_becomes_a_factor():
    truth = Machine(
        **GPU, stream_efficiency=0.7, captures=True, factors={"decode": {2: 0.6, 4: 1.0, 64: 1.3}}
    )
    cost = StepCost(SIZES, truth)
    works = [w for w in gpu_works(2000) if w.is_decode and w.keys / w.sequences < 200]
    steps = [MeasuredStep(w, 1e-5, 1e-5, cost.device(w), 1e-5, is_alone=True) for w in works]
    host = [MeasuredStep(w, 1e-5, 1e-5, 1.0, 1e-5) for w in gpu_works(20)]
    found = fit(GPU, SIZES, steps + host, dtype="bfloat16", captures=True, overlaps_steps=True)
    assert {1, 2, 4, 32} <= set(found.factors["decode"])
    assert max(map(abs, errors(found, SIZES, steps, {}))) < 0.05


def test_steps_are_replayed_as_their_batch_ran():
    """Where launching takes longer than computing, a step is as long as the next one's launch."""
    slow = Machine(**GPU | {"launch_s": 1e-3}, captures=True, overlaps_steps=True, step_s=1e-3)
    cost = StepCost(SIZES, slow)
    prompts = [w for w in gpu_works() if not w.is_decode][:4]
    found = replayed(cost, [MeasuredStep(w, 0, 0, 1.0, 0) for w in prompts], overlap=True)
    assert [step.work for step, _ in found] == prompts
    launching = cost(prompts[1]).launching
    assert found[1][1] == pytest.approx(1e-3 + launching)
    alone = replayed(cost, [MeasuredStep(prompts[0], 0, 0, 1.0, 0)], overlap=False)
    assert alone[0][1] == pytest.approx(max(launching, cost.device(prompts[0])))
    quick = StepCost(SIZES, Machine(**GPU, captures=True, overlaps_steps=True))
    decodes = [w for w in gpu_works() if w.is_decode][:5]
    for step, seconds in replayed(quick, [MeasuredStep(w, 0, 0, 1.0, 0) for w in decodes],
                                  overlap=True):  # fmt: skip
        assert seconds == pytest.approx(quick.device(step.work)), "nothing but the device counts"
    rows = by_class(found)
    assert sum(row["count"] for row in rows) == 4
    assert all("tokens" in row["steps"] for row in rows)


def test_of_the_hosts_time_the_sum_is_right_but_for_pauses():
    """Steps of one kind that scatter, and one in which the host did something else."""
    work, rng = StepWork(4, 4, 4, 4, 40, is_decode=True, renews=True), random.Random(2)
    taken = [rng.choice((1e-4, 3e-4)) for _ in range(100)]
    steps = [MeasuredStep(work, s, s, 1e-3, s) for s in taken]
    pause = [MeasuredStep(work, 5e-2, 5e-2, 1e-3, 5e-2)]
    found = fit(GPU, SIZES, steps + pause, dtype="bfloat16", captures=True, overlaps_steps=True)
    told = StepCost(SIZES, found)(work)
    assert told.before == pytest.approx(2 * sum(taken) / 100, rel=1e-3)
    assert told.after == pytest.approx(sum(taken) / 100, rel=1e-3)


def test_weights_are_not_below_their_least():
    columns = [[1.0, x] for x in range(1, 9)]
    seconds = [3 + 2 * x for x in range(1, 9)]
    assert least_squares(columns, seconds, [0, 1]) == pytest.approx([3, 2])
    held = least_squares(columns, seconds, [0, 2.5])
    assert held[1] == pytest.approx(2.5)
    assert held[0] < 3


def test_weights_are_never_negative():
    columns = [[1.0, x] for x in range(1, 9)]
    assert least_squares(columns, [3 + 2 * x for x in range(1, 9)]) == pytest.approx([3, 2])
    falling = least_squares(columns, [20 - 2 * x for x in range(1, 9)])
    assert falling[1] == 0.0
    assert falling[0] > 0


class Drawing:
    """A runner without a model."""

    def __init__(self):
        self.resets = 0

    def reset(self):
        self.resets += 1

    def submit(self, batch):
        return Finished([[SampledToken(5)] * run.num_samples for run in batch.sequences])


@pytest.mark.parametrize("overlap", [False, True])
def test_each_batch_is_run_whole(overlap):
    ticks = iter(range(10**9))
    runner = Drawing()
    turn = one_turn(runner, SIZES, overlap=overlap, max_len=512, clock=lambda: float(next(ticks)))
    assert len(turn) == runner.resets == len(machine.BATCHES)
    for (sequences, prompt, budget, _), steps in zip(machine.BATCHES, turn, strict=True):
        made = sum(step.work.samples for step in steps)
        assert made == sequences * machine.NEW_TOKENS
        length = min(prompt, 512 - machine.NEW_TOKENS)
        tokens = sum(step.work.tokens for step in steps)
        assert tokens == sequences * (length + machine.NEW_TOKENS - 1)
        assert max(step.work.tokens for step in steps) <= max(budget, sequences)
        assert all(step.device > 0 and step.scheduling > 0 for step in steps)


def test_batches_of_a_gpu_fit_its_room_and_vary_by_turn():
    for seats in (256, 100):
        room = machine.Room(max_len=2048, seats=seats, slots=60_000, budget=1024)
        crowds = room.crowds(large=True)
        assert len(crowds) > machine.ON_A_GPU
        assert max(c.sequences for c in crowds[machine.ON_A_GPU :]) <= seats
    assert len(machine.Room(4096, 256, 320_000).crowds(large=True)) == machine.ON_A_GPU + len(
        machine.LARGE_BATCHES
    ), "all fit where there is memory"
    turns = [
        machine.turn_of(
            Drawing(), SIZES, overlap=True, room=room, turn=turn, clock=time.perf_counter
        )
        for turn in (1, 1, 2)
    ]
    assert len(turns[0]) == len(crowds)
    first, again, other = ([[s.work for s in batch] for batch in turn] for turn in turns)
    assert first == again
    assert first != other
    works = [work for batch in first for work in batch]
    assert any(w.is_decode and not w.renews for w in works)
    assert any(w.is_decode and w.renews for w in works)
    assert max(w.tokens for w in works) <= 2048
    steps = machine.together(turns[1:], overlap=True)
    assert len(steps) == sum(map(len, turns[1] + turns[2]))


class Event:
    """A GPU's, by a clock of its own; a step takes 2 ms of it, and waiting as long as asked."""

    now = 0.0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = Event.now

    def query(self):
        return Event.waits <= 0

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1e3 * (other.at - self.at)


@pytest.mark.parametrize("waits", [True, False])
def test_a_device_is_measured_while_it_does_not_wait_for_the_host(monkeypatch, waits):
    class Busy(Drawing):
        def submit(self, batch):
            Event.now += 2e-3
            return super().submit(batch)

    slept = []

    def sleep(cycles):
        slept.append(cycles)
        Event.now += cycles / 1e9
        Event.waits = 1.0 if waits else 0.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", sleep)
    monkeypatch.setattr(machine, "BATCHES", ((4, 20, 32, 1), (3, 8, 32, 0)))
    monkeypatch.setattr(machine, "LARGE_BATCHES", ())
    room = machine.Room(max_len=100)
    steps = machine.alone_steps(Busy(), SIZES, room=room, turn=1)
    if not waits:
        assert not steps, "what waited for the host is left out"
        return
    assert len(steps) >= 6
    assert all(step.is_alone and step.device == pytest.approx(2e-3) for step in steps)
    assert {step.work.is_decode for step in steps} == {True, False}
    held = {round(cycles / 1e9, 6) for cycles in slept[2:]}
    assert held == set(machine.HELD_S.values())


def test_steps_are_measured_over_a_pool_that_others_have_used():
    allocator = BlockAllocator(1024)
    machine.wear(allocator)
    allocator.check_integrity()
    order = allocator.free_order()
    assert len(order) == 1024
    neighbours = sum(abs(b - a) == 1 for a, b in itertools.pairwise(order))
    assert neighbours < 512, "of a fresh pool all are"


def test_the_command_writes_a_profile_that_simulation_reads(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(machine, "BATCHES", ((1, 8, 16, 0), (3, 20, 32, 1)))
    monkeypatch.setattr(machine, "measure_peaks", lambda device: dict(PEAKS))
    path = tmp_path / "machine.json"
    assert machine.main(["--device", "cpu", "--repeats", "1", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document == json.loads(capsys.readouterr().out.splitlines()[-1])
    profile = read_machine(path)
    assert profile.read_bandwidth == PEAKS["read_bandwidth"]
    assert "story in bfloat16" in profile.origins["fitted"]
    assert document["fit"]["steps"] == len(document["steps"]) > 20
    with pytest.raises(ValueError, match="--cpu-time must be of one thread on a CPU"):
        machine.main(["--device", "cuda", "--cpu-time"])


@pytest.mark.gpu
@pytest.mark.large
def test_a_gpu_has_a_link_and_launches():
    found = machine.measure_peaks("cuda")
    assert 1e9 < found["link_bandwidth"] < 1e12
    assert 1e-7 < found["link_s"] < 1e-3
    assert 1e-7 < found["kernel_s"] < 1e-4
    assert 1e-7 < found["launch_s"] < 1e-3


def test_the_live_loop_serves_what_simulation_serves():
    requests = with_prefix(
        poisson([TraceRequest(0.0, 5 + i % 7, 1 + i % 5) for i in range(12)], 400.0), 16
    )
    ids_of = live.ids_within(50)
    a, b = (ids_of(request, number) for number, request in enumerate(requests[:2]))
    assert a[:16] == b[:16]
    assert max(a + b) < 50
    assert a == ids_of(requests[0], 0)

    def new_scheduler():
        return Scheduler(64, 4, max_num_seqs=8, max_num_batched_tokens=32, max_model_len=64)

    def draw(logits, batch):
        return [[SampledToken(5)] * run.num_samples for run in batch.sequences]

    storage = KVStorage(CacheSpec(1, 4, KVSpec(1, 1, 1, torch.float32)), 64, torch.device("cpu"))
    engine = Engine(new_scheduler(), ModelRunner(CacheReader(), storage, sampler=draw))
    clock = live.LiveClock()
    timings = live.serve_live(
        engine, new_scheduler(), list(arrivals_of(requests, ids_of=ids_of)), clock
    )
    setting = Setting(SIZES, Machine(**PEAKS), num_slots=256, block_size=4, max_num_seqs=8,
                      budget=32, max_len=64)  # fmt: skip
    virtual = serve(requests, setting, ids_of=ids_of)
    runner = engine.runner
    watch = live.Watch(engine)
    assert engine.runner is watch
    again = live.serve_live(
        engine, new_scheduler(), list(arrivals_of(requests, ids_of=ids_of)), live.LiveClock()
    )
    steps = watch.end()
    assert engine.runner is runner
    assert sum(step.work.samples for step in steps) == sum(t.output_tokens for t in again)
    assert all(step.device > 0 and step.submitting > 0 for step in steps)
    rows = live.of_classes(steps, StepCost(SIZES, Machine(**PEAKS)))
    assert sum(row["count"] for row in rows) == len(steps)
    for found, foreseen in zip(timings, virtual.timings.values(), strict=True):
        assert found.output_tokens == foreseen.output_tokens
        assert found.prompt_tokens == foreseen.prompt_tokens
        assert found.arrival <= found.first_token <= found.last_token
    assert of_timings(timings)["requests"] == 12


def test_a_clock_of_the_processor_skips_its_sleep():
    clock = live.LiveClock(is_cpu=True)
    before = clock()
    clock.sleep(100.0)
    assert 100 <= clock() - before < 101
