"""A profile is found again from steps that it made, and the real engine's steps are looked at."""

from __future__ import annotations

import itertools
import json
import random

import pytest
import torch

from tests.bench.scripts import load
from tests.engine.test_engine import CacheReader
from tests.engine.test_virtual import SIZES
from tilewise.bench import machine
from tilewise.bench.fit import NEAR_BYTES, MeasuredStep, errors, fit, least_squares
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
    with pytest.raises(ValueError, match="cpu-time must be of one thread on a CPU"):
        machine.main(["--device", "cuda", "--cpu-time"])


@pytest.mark.gpu
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
