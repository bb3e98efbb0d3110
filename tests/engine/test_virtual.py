"""Virtual time: every request ends, the clock adds up, decisions are those of the real engine."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import pytest
import torch

from tests.engine.test_engine import CacheReader
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.cost import Sizes, StepCost, StepSeconds, StepWork, machine
from tilewise.engine.batch import Batch, SampledToken, ScheduledSequence
from tilewise.engine.engine import Engine
from tilewise.engine.request import Request, SamplingParams
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.steps.runner import ModelRunner
from tilewise.engine.virtual import Arrival, VirtualEngine, work_of

SIZES = Sizes(((64, 128), (64, 64), (64, 256), (128, 64)), (64, 999), 2, 4, 2, 16, 999, 512)
COST = StepCost(SIZES, machine("h200"))


def new_scheduler(num_blocks: int = 24, **options) -> Scheduler:
    sizes = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": 90}
    return Scheduler(num_blocks, 4, **(sizes | options))


def arrivals_of(seed: int, count: int = 30, spread: float = 1e-3) -> list[Arrival]:
    rng = random.Random(seed)
    when, found = 0.0, []
    for number in range(count):
        prompt = [rng.randrange(3)] * rng.randint(0, 12) + [100 + number] * rng.randint(1, 20)
        n = rng.choice((1, 1, 1, 2, 3))
        params = SamplingParams(n=n, max_tokens=rng.randint(1, 25), ignore_eos=True)
        found.append(Arrival(when, Request(str(number), prompt, params)))
        when += rng.expovariate(1 / spread)
    return found


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_every_request_ends_with_all_its_tokens(seed, overlap):
    arrivals = arrivals_of(seed)
    checked = []
    engine = VirtualEngine(
        new_scheduler(),
        COST,
        overlap=overlap,
        watch=lambda batch: checked.append(engine.scheduler.check_integrity()),
    )
    timings = engine.run(arrivals)
    assert [t.request_id for t in timings] == [a.request.request_id for a in arrivals]
    for timing, arrival in zip(timings, arrivals, strict=True):
        sampling = arrival.request.sampling
        assert timing.output_tokens == sampling.n * sampling.max_tokens
        assert timing.reason == "length"
        assert timing.arrival <= timing.admitted < timing.first_token <= timing.last_token
    assert not engine.scheduler.has_unfinished()
    assert engine.scheduler.tables.allocator.num_used == 0
    assert len(checked) == len(engine.steps.tokens) == len(engine.steps.ended)
    assert engine.scheduler.stats().num_preemptions > 0, "the memory was meant to be short"
    # A sample that is dropped or preempted is computed again; nothing else is.
    prompts = sum(len(a.request.prompt_token_ids) - t.cached_tokens
                  for a, t in zip(arrivals, timings, strict=True))  # fmt: skip
    drawn = sum(t.output_tokens - t.samples for t in timings)
    assert engine.steps.computed - engine.steps.again <= prompts + drawn
    assert engine.steps.ended == sorted(engine.steps.ended)


@pytest.mark.parametrize("overlap", [False, True])
def test_two_runs_are_equal(overlap):
    runs = []
    for _ in range(2):
        engine = VirtualEngine(new_scheduler(), COST, overlap=overlap)
        timings = engine.run(arrivals_of(3))
        runs.append(([asdict(t) for t in timings], asdict(engine.steps)))
    assert runs[0] == runs[1]


@pytest.mark.parametrize("spread", [0.0, 1e-4, 1e-3])
@pytest.mark.parametrize(
    "field", ["flops", "read_bandwidth", "copy_bandwidth", "kernel_s", "step_s"]
)
def test_a_faster_machine_is_never_slower(field, spread):
    slow = machine("h200")
    value = getattr(slow, field)
    faster = (
        {"bfloat16": 2 * value["bfloat16"]}
        if field == "flops"
        else value / 2
        if field.endswith("_s")
        else 2 * value
    )
    ends = []
    for m in (slow, replace(slow, **{field: faster})):
        engine = VirtualEngine(new_scheduler(), StepCost(SIZES, m), overlap=True)
        timings = engine.run(arrivals_of(5, spread=max(spread, 1e-12)))
        ends.append(max(t.last_token for t in timings))
    assert ends[1] <= ends[0]


def run_alone(overlap: bool, seconds: StepSeconds, tokens: int) -> VirtualEngine:
    engine = VirtualEngine(new_scheduler(), lambda work: seconds, overlap=overlap)
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    engine.run([Arrival(5.0, Request("a", [1, 2, 3], params))])
    return engine


def test_the_clock_adds_up_and_overlap_hides_the_host():
    seconds = StepSeconds(before=0.25, launching=0.0, device=2.0, after=0.5)
    alone = run_alone(False, seconds, 4)
    assert alone.steps.ended == [7.75, 10.5, 13.25, 16.0]
    [timing] = alone.timings.values()
    assert (timing.admitted, timing.first_token, timing.last_token) == (5.0, 7.75, 16.0)
    # The device never waits: 5.25 + 2 k; the tokens are taken in half a second after.
    assert run_alone(True, seconds, 4).steps.ended == [7.75, 9.75, 11.75, 13.75]


def test_a_step_lasts_as_long_as_its_launches():
    seconds = StepSeconds(before=0.0, launching=3.0, device=2.0, after=0.0)
    assert run_alone(False, seconds, 2).steps.ended == [8.0, 11.0]
    assert seconds.alone == 3.0


def test_requests_that_never_fit_are_refused_and_the_others_served():
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    arrivals = [Arrival(0.0, Request("long", [1] * 90, params)),
                Arrival(0.0, Request("short", [1] * 9, params))]  # fmt: skip
    long, short = VirtualEngine(new_scheduler(), COST).run(arrivals)
    assert "prompt must be at most 89 tokens" in long.refusal
    assert long.output_tokens == 0
    assert short.output_tokens == 5
    engine = VirtualEngine(new_scheduler(), COST)
    late = Arrival(-1.0, Request("late", [1], params))
    with pytest.raises(ValueError, match="arrivals must be in order of time"):
        engine.run([arrivals[1], late])


def test_the_work_of_a_batch_is_counted_by_hand():
    params = SamplingParams(n=2)
    runs = (
        ScheduledSequence(0, (7,), 9, [0], 1, params, (1,), 3),
        ScheduledSequence(1, (1, 2, 3), 2, [1], 0, params),
        ScheduledSequence(2, (4,), 4, [2], 2, params, (1, 2), 0),
    )
    work = work_of(Batch(runs, block_copies=((1, 2),)), 16)
    assert (work.tokens, work.sequences, work.logits, work.samples) == (5, 3, 2, 3)
    assert (work.keys, work.pairs) == (10 + 5 + 5, 3 + 4 + 5)
    assert (work.copied_slots, work.swapped_slots, work.is_decode) == (16, 0, False)
    assert work_of(Batch(runs[:1]), 16).is_decode


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_renew_when_rows_change(overlap):
    """Whoever decodes on does not; the step after a prompt does, and that after an end."""
    works: list[StepWork] = []

    def clock(work: StepWork) -> StepSeconds:
        works.append(work)
        return COST(work)

    engine = VirtualEngine(new_scheduler(), clock, overlap=overlap)
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (12, 20)]
    engine.run([Arrival(0.0, Request(str(n), [1, 2, n + 3], params[n])) for n in range(2)])
    assert not works[0].renews, "there is none before it"
    assert not works[0].is_decode
    decodes = works[1:]
    assert all(work.is_decode for work in decodes)
    assert decodes[0].renews, "its rows drew their first token in the step before"
    two = [work.renews for work in decodes if work.sequences == 2]
    assert two == [True] + [False] * (len(two) - 1)
    one = [work.renews for work in decodes if work.sequences == 1]
    # With overlap the other one is gone in a step, and known to have left in the next.
    assert one == [True] * (1 + overlap) + [False] * (len(one) - 1 - overlap)


def told(batch: Batch) -> tuple:
    runs = tuple(
        (r.seq_id, r.start, len(r.token_ids), tuple(r.block_ids), r.num_samples, r.first_new_block)
        for r in batch.sequences
    )
    return runs, batch.block_copies, batch.left


def real_decisions(arrivals: list[Arrival]) -> list[tuple]:
    """What the engine schedules when requests enter before the steps of these numbers."""
    decided = []
    storage = KVStorage(CacheSpec(1, 4, KVSpec(1, 1, 1, torch.float32)), 24, torch.device("cpu"))

    class Watched(ModelRunner):
        def submit(self, batch):
            decided.append(told(batch))
            return super().submit(batch)

    # Tokens that are a sequence's own, as in virtual time: a model of 50 tokens would repeat.
    numbers = iter(range(1 << 20, 1 << 21))
    own: dict[int, int] = {}

    def draw(logits, batch):
        return [
            [SampledToken(next(numbers) if run.num_samples > 1 else
                          own.setdefault(run.seq_id, next(numbers)))
             for _ in range(run.num_samples)]
            for run in batch.sequences
        ]  # fmt: skip

    engine = Engine(new_scheduler(), Watched(CacheReader(), storage, sampler=draw))
    coming, step = list(arrivals), 0
    while coming or engine.has_unfinished():
        while coming and coming[0].seconds <= step:
            engine.add_request(coming.pop(0).request)
        engine.step()
        step += 1
    return decided


@pytest.mark.parametrize("seed", range(4))
def test_decisions_are_those_of_the_real_engine(seed):
    arrivals = [replace(a, seconds=float(round(a.seconds))) for a in arrivals_of(seed, 14, 3.0)]
    decided = []
    engine = VirtualEngine(
        new_scheduler(),
        lambda work: StepSeconds(0.0, 0.0, 1.0, 0.0),
        watch=lambda batch: decided.append(told(batch)),
    )
    engine.run(arrivals)
    assert decided == real_decisions(arrivals)
    assert len(decided) > 40
