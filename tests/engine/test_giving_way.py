"""Steps that end early for who comes beside a flood: when, what it costs, and that all end."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest
import torch

from tests.engine import test_newcomers
from tests.engine.simulator import VirtualModel
from tests.engine.test_newcomers import FLOOD, flooded
from tests.engine.test_order import of, stepped
from tests.engine.test_scheduler import run_ids
from tilewise.engine import loop
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.batch import SampledToken
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.scheduling import newcomers
from tilewise.engine.scheduling.giving_way import MOST_STEPS, SHARE, GivingWay
from tilewise.engine.steps.runner import Finished
from tilewise.errors import StepStoppedError
from tilewise.ops.panels import why_not_pack


def earned(seconds=1.0, steps=int(2 / SHARE), **settings):
    """What has earned enough to stop a step of so many seconds."""
    way = GivingWay(**settings)
    for _ in range(steps):
        way.end(seconds)
    return way


def begun(scheduler, model, way):
    batch = scheduler.schedule()
    number = way.begin(scheduler, batch)
    model.submit(batch)
    return batch, number


def test_a_newcomer_stops_the_step_of_a_flood_and_is_next():
    scheduler, model = flooded()
    way = earned()
    before = {s.seq_id: list(s.token_ids) for s in scheduler.roster.running}
    batch, number = begun(scheduler, model, way)
    assert len(batch.sequences) == FLOOD
    assert number > 0
    assert way.asked_by("flood") == 0, "who runs waits"
    assert way.asked_by("other") == number
    scheduler.add(of("other", "o", [99] * 30, max_tokens=3))
    model.drop(batch)
    way.stop(scheduler, 0.5)
    scheduler.check_integrity()
    assert {s.seq_id: list(s.token_ids) for s in scheduler.roster.running} == before
    assert run_ids(scheduler, stepped(scheduler, model)) == ["o"]
    assert len(stepped(scheduler, model).sequences) == FLOOD + 1
    assert way.asked_by("other") == 0, "no step runs"


def test_the_newcomers_own_step_is_not_stopped():
    scheduler, model = flooded()
    way = earned()
    scheduler.add(of("other", "o", [99] * 30, max_tokens=3))
    batch, number = begun(scheduler, model, way)
    assert (len(batch.sequences), number) == (1, 0)
    assert way.asked_by("third") == 0


@pytest.mark.parametrize(
    ("users", "settings"),
    [
        (("a", "b"), {}),
        (("flood",), {"fair_prompt_tokens": None}),
        (("flood",), {"policy": "fcfs"}),
        (("flood",), {"seats": FLOOD}),  # nobody could be admitted
    ],
)
def test_without_a_flood_under_fair_shares_or_a_seat_none_is(users, settings):
    scheduler, model = flooded(users, **settings)
    assert begun(scheduler, model, earned())[1] == 0


def test_a_step_that_changes_logits_or_forks_is_not_stopped():
    for asked in ({"presence_penalty": 1.0}, {"prompt_logprobs": 0}, {"n": 2}):
        scheduler, model = flooded()
        scheduler.add(of("flood", "special", [7] * 20, max_tokens=4, ignore_eos=True, **asked))
        way, numbers = earned(), []
        while "special" in scheduler.roster.requests:
            batch, number = begun(scheduler, model, way)
            if any(s.asked is not None for s in batch.sequences) or batch.block_copies:
                numbers.append(number)
            scheduler.update(batch, model.result(batch))
        assert numbers, asked
        assert set(numbers) == {0}


def test_a_step_is_not_stopped_beside_an_unfinished_one():
    scheduler, model = flooded()
    scheduler.max_in_flight = 2
    assert begun(scheduler, model, earned())[1] == 0


def test_what_is_lost_is_earned_before():
    """Whoever comes: whole steps take 1 / SHARE of the time of stopped ones at least."""
    scheduler, model = flooded()
    now = 0.0
    way, draw = GivingWay(lambda: now), random.Random(0)
    whole = lost = 0.0
    for turn in range(1000):
        batch, _ = begun(scheduler, model, way)
        # Long steps come without notice.
        seconds = draw.uniform(0.5, 2.0) * draw.choice([1, 1, 1, 5])
        cost = draw.uniform(0, seconds)  # somebody comes each time
        now += cost
        if way.asked_by("other"):
            model.drop(batch)
            lost += cost
            way.stop(scheduler, cost)
            assert lost <= SHARE * whole
        else:
            now += seconds - cost
            scheduler.update(batch, model.result(batch))
            whole += seconds
            way.end(seconds)
        if len(scheduler.roster.running) < FLOOD:
            scheduler.add(of("flood", f"more{turn}", [turn] * 4, max_tokens=64))
    assert way.num_stopped > 100
    assert way.stopped_s == pytest.approx(lost)
    assert way.earned_s <= MOST_STEPS * 10.0


def test_a_step_is_stopped_until_it_has_taken_what_is_earned():
    """However long the one before was, and this one will be."""
    now = 0.0
    scheduler, model = flooded()
    way = earned(0.02, steps=64, clock=lambda: now)
    way.end(1.0)  # one that others on the machine made long
    assert way.earned_s == pytest.approx(SHARE * 1.0 + 4 * 0.02)
    _, number = begun(scheduler, model, way)
    now = way.earned_s - 1e-6
    assert way.asked_by("other") == number > 0
    now = way.earned_s
    assert way.asked_by("other") == 0, "the rest is shorter than what would be lost"
    way.end(0.02)
    assert way.earned_s > SHARE * 1.0 + 4 * 0.02, "a short step takes nothing of it"


class Interrupted(test_newcomers.Crowd):
    """A random run in which any step that may be stopped mostly is, at any moment."""

    def __init__(self, seed, **settings):
        super().__init__(seed, **settings)
        self.way = earned(0.01)
        schedule = self.scheduler.schedule

        def scheduling():
            while (batch := schedule()) is not None:
                number = self.way.begin(self.scheduler, batch)
                if not number or self.draw.random() < 0.4:
                    return batch
                self.model.submit(batch)
                if number < 10:
                    self.arrive(f"late{number}")
                self.model.drop(batch)
                self.way.stop(self.scheduler, 0.01)
                self.scheduler.check_integrity()
            return None

        self.scheduler.schedule = scheduling

    def update(self, batch):
        super().update(batch)
        self.way.end(0.1)


def test_any_schedule_with_stopped_steps_gives_the_tokens_of_a_request_alone(monkeypatch):
    monkeypatch.setattr(newcomers, "FLOOD", 2)
    num_stopped = 0
    for seed in range(150):
        story = Interrupted(seed, fails=seed % 3 == 0)
        story.play()
        story.judge()
        num_stopped += story.way.num_stopped
    assert num_stopped > 200


class Stopped:
    """A runner over the virtual model that stops each step that it may."""

    host = None

    def __init__(self, scheduler):
        self.model, self.number, self.tried = VirtualModel(scheduler), 0, []

    def begin_step(self, number):
        self.number = number

    def stop(self, number):
        self.tried.append(number)

    def submit(self, batch):
        self.model.submit(batch)
        if self.number and self.number in self.tried:
            self.model.drop(batch)
            raise StepStoppedError("stopped")
        return Finished(self.model.result(batch))


def test_the_engine_takes_a_stopped_step_back_and_returns():
    scheduler, model = flooded()
    runner = Stopped(scheduler)
    runner.model = model
    engine = Engine(scheduler, runner)
    engine.giving_way = earned()
    engine.give_way("other")
    assert not runner.tried, "no step runs"
    submit = runner.submit

    def somebody_comes(batch):
        engine.give_way("other")
        return submit(batch)

    runner.submit = somebody_comes
    assert engine.step() == []
    assert engine.giving_way.num_stopped == 1
    runner.submit = submit
    scheduler.add(of("other", "o", [99] * 30, max_tokens=3))
    [event] = engine.step()
    assert event.request_id == "o"
    assert len(engine.step()) == FLOOD + 1


def test_a_step_that_fails_and_runs_again_is_not_stopped():
    scheduler, model = flooded()
    runner = Stopped(scheduler)
    runner.model, runner.reset, runner.is_lost = model, lambda: None, lambda: False
    engine = Engine(scheduler, runner)
    engine.giving_way = earned()
    numbers = []

    def failing_once(batch):
        numbers.append(runner.number)
        if len(numbers) == 1:
            engine.give_way("other")
            raise RuntimeError("once")
        return Finished([[SampledToken(1)] * s.num_samples for s in batch.sequences])

    runner.submit = failing_once
    events = engine.step()
    assert runner.tried == numbers[:1]
    assert numbers[0] > 0
    assert set(numbers[1:]) == {0}
    assert len(events) == FLOOD
    assert [event.error for event in events if event.error is not None] == []


@pytest.mark.skipif(why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU")
def test_a_compiled_step_is_stopped_by_an_arrival_and_texts_stay_the_same():
    llm = LLM(
        "story", device="cpu", num_blocks=512, max_num_seqs=32, scheduling_policy="fair",
        enable_prefix_caching=False,
    )  # fmt: skip
    engine = AsyncLLM(llm)
    params = SamplingParams(max_tokens=80, ignore_eos=True, seed=3)

    async def tokens(prompt, user, request_id, sampling):
        asked = {"user": user, "request_id": request_id}
        async for output in engine.generate(prompt, sampling, **asked):
            last = output
        return last.outputs[0].token_ids

    async def main(names):
        flood = [
            asyncio.create_task(tokens(f"Once {i} upon a time", "flood", f"{names}{i}", params))
            for i in range(16)
        ]
        others = []
        while not all(task.done() for task in flood):
            await asyncio.sleep(0.05)
            few = SamplingParams(max_tokens=2, seed=len(others))
            name = f"{names}o{len(others)}"
            others.append(await tokens("A little dog", "other", name, few))
        return [await task for task in flood], others

    try:
        expected = llm.generate([f"Once {i} upon a time" for i in range(16)], params)
        for turn in range(20):
            flood, others = asyncio.run(main(f"turn {turn}, "))
            assert flood == [output.outputs[0].token_ids for output in expected]
            assert all(len(found) == 2 for found in others)
            if llm.engine.giving_way.num_stopped:
                break
        stats = llm.engine.stats()
        assert stats.num_stopped_steps == llm.engine.giving_way.num_stopped > 0
        assert 0 < stats.stopped_seconds < stats.decode_seconds + stats.prefill_seconds
        assert stats.scheduler.blocks_used == 0
    finally:
        asyncio.run(engine.aclose())
        llm.close()


@pytest.mark.skipif(why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU")
@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_list_stops_at_any_moment_and_gives_the_same_bits_again(num_threads, monkeypatch):
    from tests.engine import test_cpu_step as cpu

    model = cpu.build("llama", num_hidden_layers=2)
    texts = cpu.texts_of()
    model.pack_for_inference()
    plain = cpu.runner_for(model, cpu.storage_of(model), batch_invariant=True)
    expected = cpu.run_all(plain, texts)
    runner = cpu.runner_for(model, cpu.storage_of(model), batch_invariant=True)
    monkeypatch.setattr(runner.teams, "choose", lambda kind, most: num_threads)
    forward, numbers, num_stopped, num_steps = runner.forward, iter(range(1, 10**6)), 0, 0

    def stopped_at_first(inputs):
        nonlocal num_stopped, num_steps
        num_steps += 1
        for delay in (None, 0.0, 2e-5, 1e-4):
            number = next(numbers)
            runner.begin_step(number)
            runner.stop(number - 1)  # of a step that has ended: for nobody
            if delay is None:
                runner.stop(number)
                runner.stop(number - 1)  # late, as a timer's may be
            else:
                threading.Timer(delay, runner.stop, [number]).start()
            try:
                forward(inputs)
            except StepStoppedError:
                num_stopped += 1
            else:
                assert delay is not None, "asked before it began"
        runner.begin_step(0)
        return forward(inputs)

    runner.forward = stopped_at_first
    found = cpu.run_all(runner, texts)
    assert num_stopped >= num_steps > 3
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


def test_who_runs_advances_though_somebody_comes_as_soon_as_each_step_begins():
    """Stops that cost next to nothing are not had again and again, whatever is earned."""
    scheduler, model = flooded()
    way, found = earned(), []
    for i in range(60):
        batch, number = begun(scheduler, model, way)
        if number:
            scheduler.add(of(f"user {i}", f"o{i}", [200 + i] * 10, max_tokens=1))
            model.drop(batch)
            way.stop(scheduler, 1e-4)
            found.append("stopped")
        else:
            scheduler.update(batch, model.result(batch))
            way.end(0.5)
            found.append("apart" if scheduler.newcomers.ran_alone else "whole")
    assert found == ["stopped", "apart", "whole"] * 20


@pytest.mark.skipif(why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU")
@pytest.mark.parametrize("is_late", [False, True])
def test_a_list_that_stopped_says_so_whoever_asks_then(is_late, monkeypatch):
    """A late stop of the step before writes over the number of the one that stops now."""
    from tests.engine import test_cpu_step as cpu
    from tilewise.kernels.cpu.step import program

    model = cpu.build("llama", num_hidden_layers=2)
    model.pack_for_inference()
    texts = cpu.texts_of()
    expected = cpu.run_all(cpu.runner_for(model, cpu.storage_of(model)), texts)
    runner = cpu.runner_for(model, cpu.storage_of(model))
    monkeypatch.setattr(runner.teams, "choose", lambda kind, most: 1)
    forward, run_list, numbers, stopped = runner.forward, program.run_list, iter(range(2, 999)), []

    def run_with_stops(*given):
        number = runner.program._step
        if number and not is_late:
            runner.stop(number)
        run_list(*given)
        if number:
            runner.stop(number - 1 if not is_late else number)

    def forward_stopped(inputs):
        runner.begin_step(next(numbers))
        try:
            found = forward(inputs)
        except StepStoppedError:
            stopped.append(True)
            runner.begin_step(0)
            return forward(inputs)
        stopped.append(False)
        return found

    monkeypatch.setattr(program, "run_list", run_with_stops)
    runner.forward = forward_stopped
    for a, b in zip(cpu.run_all(runner, texts), expected, strict=True):
        assert torch.equal(a, b)
    # What was asked when the list had ended stops the next one of the same step, if there is one.
    assert True in stopped
    assert (False in stopped) == is_late, "a list that is whole counts"


@pytest.mark.skipif(why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU")
@pytest.mark.parametrize("policy", ["fair", "fcfs"])
def test_after_a_step_of_newcomers_alone_who_reads_its_tokens_has_a_moment(monkeypatch, policy):
    """Not after other steps, and not without a flood."""
    moments = []

    class Clock:
        monotonic, perf_counter = time.monotonic, time.perf_counter

        @staticmethod
        def sleep(seconds):
            moments.append(seconds)

    monkeypatch.setattr(loop, "time", Clock)
    llm = LLM("story", device="cpu", num_blocks=512, max_num_seqs=32, scheduling_policy=policy)
    engine = AsyncLLM(llm)

    async def read(user, number, tokens):
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        async for _ in engine.generate(f"Once {number} upon", params, user=user):
            pass

    async def main():
        flood = [asyncio.create_task(read("flood", i, 120)) for i in range(16)]
        await asyncio.sleep(0.1)
        before = len(moments)
        await read("other", 99, 4)
        met_flood = not any(task.done() for task in flood)
        for task in flood:
            await task
        return before, met_flood

    try:
        for _ in range(20):
            moments.clear()
            before, met_flood = asyncio.run(main())
            if met_flood:
                break
        assert met_flood, "the flood must last until the other's end"
        assert before == 0, "of the flood alone"
        assert moments == ([loop.HAND_OVER_S] if policy == "fair" else [])
    finally:
        asyncio.run(engine.aclose())
        llm.close()
