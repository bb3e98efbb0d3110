"""Large collections of a server come while nobody waits."""

from __future__ import annotations

import asyncio
import gc

import httpx
import pytest

from tests.server.serving import serving, wait_for
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server import garbage


@pytest.fixture
def thresholds():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)
    gc.freeze()  # all tests of this process, which are not to be looked at again and again


def test_python_collects_young_objects_only(thresholds):
    gc.set_threshold(700, 10, 10)
    with garbage.leaving_large_ones():
        assert gc.get_threshold() == (700, garbage.YOUNGEST, garbage.NEVER)
        assert gc.get_freeze_count() > 0
        before = gc.get_stats()[2]["collections"]
        kept = [[i] for i in range(700 * (garbage.YOUNGEST + 1) * 12)]  # by default one of all
        assert gc.get_stats()[2]["collections"] == before
        assert kept
    assert gc.get_threshold() == (700, 10, 10), "a program that has served goes on as before"
    assert gc.get_freeze_count() == 0
    gc.freeze()  # else all of this process is collected once more
    gc.set_threshold(0)
    with garbage.leaving_large_ones():
        assert gc.get_threshold()[0] == 0, "who has it off keeps it so"


def test_all_are_collected_while_no_request_is_there_or_at_last():
    collections = garbage.Collections(100.0)

    def at(now, is_idle, has_worked=True):
        return collections.is_due(now, is_idle=is_idle, has_worked=has_worked)

    assert not at(100 + garbage.EVERY_S - 1, True), "not at once again"
    assert not at(100 + garbage.EVERY_S, False), "requests are there"
    assert not at(100 + garbage.EVERY_S + 1, True, has_worked=False), "nothing has happened"
    assert at(100 + garbage.EVERY_S + 2, True)
    begun = 100 + garbage.EVERY_S + 2
    assert not at(begun + garbage.LATEST_S - 1, False)
    assert at(begun + garbage.LATEST_S, False), "a server that is never idle"


def test_old_circles_go_when_the_server_is_idle(monkeypatch, thresholds):
    gc.set_threshold(700, 10, garbage.NEVER)
    monkeypatch.setattr(garbage, "LOOK_S", 0.001)
    monkeypatch.setattr(garbage, "EVERY_S", 0.0)
    is_idle, gone = False, []

    class Circle:
        def __init__(self):
            self.own = self

        def __del__(self):
            gone.append(is_idle)

    async def main():
        nonlocal is_idle
        task = asyncio.create_task(garbage.collect_when_idle(lambda: is_idle))
        circle = Circle()
        gc.collect()  # it is of the oldest now, which only a collection of all looks at
        del circle
        for _ in range(20):
            gc.collect(0)  # as when requests come and go
            await asyncio.sleep(0.001)
        is_idle = True
        while not gone:
            gc.collect(0)
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(main(), 60))
    assert gone == [True]


def test_a_request_that_has_ended_leaves_no_circles():
    with (
        LLM("story", device="cpu", num_blocks=20) as llm,
        serving(AsyncLLM(llm), loop=llm.loop) as running,
    ):
        ask = {"prompt": "Once", "max_tokens": 3, "stream": True}

        def requests(count):
            for _ in range(count):
                assert httpx.post(f"{running.url}/v1/completions", json=ask).status_code == 200
            wait_for(lambda: not running.server.server_state.connections)

        requests(2)
        gc.collect()
        requests(20)
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            gc.collect()
            kinds = {f"{type(one).__module__}.{type(one).__name__}" for one in gc.garbage}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
    assert not [kind for kind in kinds if kind.startswith(("tilewise.", "uvicorn."))]
