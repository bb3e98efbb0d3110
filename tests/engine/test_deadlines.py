"""Deadlines and bounds of the queue, on a clock that the tests move."""

from __future__ import annotations

import pytest
import torch

from tests.engine.simulator import check_idle
from tests.engine.test_engine import CacheReader
from tests.engine.test_scheduler import ask, make, step
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.engine.batch import SampledToken
from tilewise.engine.engine import Engine
from tilewise.engine.outputs import Generation
from tilewise.engine.request import FinishReason, Request
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.steps.runner import ModelRunner
from tilewise.errors import QueueFullError, RequestError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timed(name: str, prompt: int, *, deadline=None, queue=None, **sampling) -> Request:
    request = ask(name, prompt, **sampling)
    request.deadline_s, request.max_queue_s = deadline, queue
    return request


def ended(scheduler: Scheduler) -> list[tuple[str, int]]:
    events = scheduler.expire()
    assert all(e.finish_reason is FinishReason.DEADLINE and e.token is None for e in events)
    scheduler.check_integrity()
    return [(e.request_id, e.index) for e in events]


def test_who_runs_ends_at_its_deadline_and_not_before():
    clock = Clock()
    scheduler = make(clock=clock)
    scheduler.add(timed("a", 4, deadline=5.0))
    step(scheduler)
    clock.now = 104.9
    assert ended(scheduler) == []
    clock.now = 105.0
    assert ended(scheduler) == [("a", 0)]
    check_idle(scheduler)


def test_who_waits_ends_at_its_deadline_or_when_it_has_waited_long_enough():
    clock = Clock()
    scheduler = make(max_num_seqs=1, clock=clock)
    scheduler.add(timed("a", 4))
    scheduler.add(timed("b", 4, deadline=5.0))
    scheduler.add(timed("c", 4, queue=2.0))
    step(scheduler)
    clock.now = 103.0
    assert ended(scheduler) == [("c", 0)]
    clock.now = 106.0
    assert ended(scheduler) == [("b", 0)]
    assert scheduler.stats().num_waiting == 0


def test_who_has_begun_may_wait_again_as_long_as_it_takes():
    clock = Clock()
    scheduler = make(num_blocks=5, clock=clock, enable_prefix_caching=False)
    scheduler.add(timed("a", 7, max_tokens=9))
    scheduler.add(timed("b", 7, max_tokens=3, queue=2.0))
    step(scheduler)
    step(scheduler)
    step(scheduler)
    [b] = scheduler.sequences("b")
    assert b in scheduler.roster.waiting
    clock.now = 200.0
    assert ended(scheduler) == []


def test_all_samples_end_those_included_that_have_not_forked():
    clock = Clock()
    scheduler = make(clock=clock, max_num_batched_tokens=4)
    scheduler.add(timed("a", 6, deadline=1.0, n=3))
    step(scheduler)
    scheduler.finish("a", 1, FinishReason.STOP)
    clock.now = 101.0
    assert ended(scheduler) == [("a", 0), ("a", 2)]


def test_what_an_unfinished_step_draws_for_it_is_dropped():
    clock = Clock()
    scheduler = make(clock=clock)
    scheduler.add(timed("a", 4, deadline=1.0))
    batch = scheduler.schedule()
    clock.now = 101.0
    assert ended(scheduler) == [("a", 0)]
    assert scheduler.update(batch, [[SampledToken(7)]]) == []
    check_idle(scheduler)


def test_an_id_that_comes_again_has_a_time_of_its_own():
    clock = Clock()
    scheduler = make(clock=clock)
    scheduler.add(timed("a", 4, deadline=1.0))
    scheduler.abort("a")
    scheduler.add(timed("a", 4))
    clock.now = 200.0
    assert ended(scheduler) == []


def test_times_of_requests_that_ended_are_not_kept_for_ever():
    scheduler = make(clock=Clock())
    for _ in range(5000):
        scheduler.add(timed("a", 4, deadline=1e6, queue=1e6))
        scheduler.abort("a")
    assert len(scheduler.deadlines._heap) < 1100


def test_its_output_says_deadline():
    clock = Clock()
    scheduler = make(clock=clock)
    request = timed("a", 4, deadline=1.0, n=2)
    generation = Generation(request, None, None)
    scheduler.add(request)
    _, events = step(scheduler)
    for event in events:
        generation.take(event)
    clock.now = 101.0
    for event in scheduler.expire():
        generation.take(event)
    assert generation.output.finished
    assert [c.finish_reason for c in generation.output.outputs] == ["deadline"] * 2
    assert [len(c.token_ids) for c in generation.output.outputs] == [1, 1]
    assert generation.error is None


@pytest.mark.parametrize("overlap", [False, True])
def test_an_engine_computes_nothing_for_who_is_late_and_says_so(overlap):
    clock = Clock()
    scheduler = make(num_blocks=8, block_size=4, max_num_seqs=1, clock=clock)
    storage = KVStorage(CacheSpec(1, 4, KVSpec(1, 1, 1, torch.float32)), 8)
    model = CacheReader()
    engine = Engine(scheduler, ModelRunner(model, storage), overlap=overlap)
    engine.add_request(timed("a", 4, deadline=3.0, temperature=0.0, max_tokens=20))
    engine.add_request(timed("b", 4, queue=1.0, temperature=0.0, max_tokens=20))
    engine.step()
    clock.now = 101.0
    assert [e.request_id for e in engine.step() if e.token is None] == ["b"]
    clock.now = 103.0
    steps = model.steps
    late = []
    while engine.has_unfinished():
        late += engine.step()
    assert [e.request_id for e in late if e.finish_reason is FinishReason.DEADLINE] == ["a"]
    assert model.steps == steps
    check_idle(scheduler)


def test_a_full_queue_refuses_with_the_numbers_and_takes_more_when_it_moves():
    scheduler = make(max_num_seqs=1, max_waiting_requests=2)
    scheduler.add(ask("a", 4, max_tokens=1))
    scheduler.add(ask("b", 4, max_tokens=1))
    with pytest.raises(QueueFullError, match="waiting requests must be at most 2, got 2 and 1"):
        scheduler.add(ask("c", 4))
    assert issubclass(QueueFullError, RequestError)
    step(scheduler)
    scheduler.add(ask("c", 4, max_tokens=1))


def test_a_queue_of_too_many_tokens_refuses_but_not_when_it_is_empty():
    scheduler = make(num_blocks=32, max_waiting_tokens=10)
    scheduler.add(ask("a", 20))
    with pytest.raises(
        QueueFullError, match="waiting prompt tokens must be at most 10, got 20 and 1 more"
    ):
        scheduler.add(ask("b", 1))
    scheduler.abort("a")
    scheduler.add(ask("b", 6))
    scheduler.add(ask("c", 4))
    with pytest.raises(QueueFullError):
        scheduler.add(ask("d", 1))


@pytest.mark.parametrize("name", ["max_waiting_requests", "max_waiting_tokens"])
def test_bounds_below_one_are_refused_by_name(name: str):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        make(**{name: 0})
