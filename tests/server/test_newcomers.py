"""Who comes beside a flood is begun beside it, not behind it."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from itertools import pairwise

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_for
from tilewise.server.errors import ApiError
from tilewise.server.fairness import Turns
from tilewise.server.keys import Caller, hash_of

KEYS = {hash_of(f"key-of-{name}"): Caller(name) for name in ("alice", "bob")}


def order_of(asked, late=()):
    """Return in which order requests of these keys begin; the late ones come after a turn."""
    begun = []

    async def one(turns, number, key):
        await turns.take(key)
        begun.append((key, number))

    async def main():
        turns = Turns()
        tasks = [asyncio.create_task(one(turns, i, key)) for i, key in enumerate(asked)]
        await asyncio.sleep(0)
        counts = [len(begun)]
        tasks += [asyncio.create_task(one(turns, i, key)) for i, key in enumerate(late)]
        while len(begun) < len(tasks):
            await asyncio.sleep(0)
            counts.append(len(begun))
        # Nothing is left behind: the next one begins at once.
        await one(turns, 0, "next")
        return counts

    return begun, asyncio.run(main())


def test_one_begins_in_each_turn_and_keys_take_turns():
    begun, counts = order_of(["bob"] * 6 + ["alice"] * 2)
    names = [key for key, _ in begun]
    # All were there when the first one had begun.
    assert names == ["bob", "bob", "alice", "bob", "alice", "bob", "bob", "bob", "next"]
    assert all(b - a <= 1 for a, b in pairwise(counts))
    # Those of one key keep their order.
    assert [n for key, n in begun if key == "bob"] == list(range(6))


def test_who_comes_after_a_flood_begins_two_turns_later():
    begun, _ = order_of(["bob"] * 64, late=["alice"])
    assert [key for key, _ in begun].index("alice") <= 3


def test_a_lone_request_begins_at_once_and_who_has_left_takes_no_turn():
    async def main():
        turns = Turns()
        tasks = [asyncio.create_task(turns.take(key)) for key in "abb"]
        _, gone, last = tasks
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(last, 60)
        assert gone.cancelled()
        for _ in range(3):
            await asyncio.sleep(0)
        take = turns.take("a")
        with pytest.raises(StopIteration):  # without a suspension
            take.send(None)

    asyncio.run(main())


def request_of(key, name):
    body = json.dumps({"prompt": "Once", "max_tokens": 1, "request_id": name})
    return (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-of-{key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    ).encode()


def test_the_engine_sees_a_newcomer_before_the_rest_of_a_flood():
    """All are there when the event loop looks for the first time."""
    with serving(FakeEngine(step_s=0.001), keys=KEYS) as running:
        connected = [socket.create_connection((running.host, running.port)) for _ in range(41)]
        try:
            wait_for(lambda: len(running.server.server_state.connections) == 41)
            is_held, all_sent = threading.Event(), threading.Event()
            held = asyncio.run_coroutine_threadsafe(_hold(is_held, all_sent), running.event_loop)
            assert is_held.wait(60)
            for number, one in enumerate(connected[:40]):
                one.sendall(request_of("bob", f"bob-{number}"))
            connected[40].sendall(request_of("alice", "alice"))
            all_sent.set()
            held.result(60)
            wait_for(lambda: len(running.engine.seen) == 41)
        finally:
            for one in connected:
                one.close()
        names = [seen["request"].request_id for seen in running.engine.seen]
    place = next(i for i, name in enumerate(names) if name.endswith("alice"))
    assert place <= 8, f"{place} of bob's 40 requests began before"


async def _hold(is_held, all_sent):
    """Keep the event loop from looking until all have sent."""
    is_held.set()
    assert all_sent.wait(60)


def test_prompts_of_one_request_are_read_checked_and_begun_in_turns_of_their_own(monkeypatch):
    """A thousand short texts were all that the event loop did for a fifth of a second."""
    monkeypatch.setattr("tilewise.server.fairness.WORK_S", 0.0)
    turn, done = [0], {"read": [], "checked": [], "begun": []}

    async def spin():
        while True:
            turn[0] += 1
            await asyncio.sleep(0)

    with serving() as server:
        engine, bridge = server.engine, server.bridge
        encode, check, generate = engine.tokenizer.encode, bridge.check_prompt, engine.generate

        def reads(*args, **more):
            done["read"].append(turn[0])
            return encode(*args, **more)

        def checks(*args):
            done["checked"].append(turn[0])
            check(*args)

        async def begins(*args, **more):
            done["begun"].append(turn[0])
            async for output in generate(*args, **more):
                yield output

        monkeypatch.setattr(engine.tokenizer, "encode", reads)
        monkeypatch.setattr(bridge, "check_prompt", checks)
        monkeypatch.setattr(engine, "generate", begins)
        spinning = asyncio.run_coroutine_threadsafe(spin(), server.event_loop)
        body = {"prompt": [f"text {i}" for i in range(64)], "max_tokens": 1}
        for more in ({}, {"stream": True}):
            for turns in done.values():
                turns.clear()
            answer = httpx.post(f"{server.url}/v1/completions", json={**body, **more}, timeout=60)
            assert answer.status_code == 200
            assert answer.text.count('"finish_reason": "length"' if not more else ':"length"') == 64
            for name, turns in done.items():
                assert len(turns) == 64, name
                assert len(set(turns)) == 64, name
        spinning.cancel()


def test_what_was_not_begun_when_a_request_ends_is_not_begun(monkeypatch):
    with serving() as server:
        begun, generate = [], server.engine.generate

        async def begins(*args, **more):
            begun.append(more["request_id"])
            async for output in generate(*args, **more):
                yield output
            if len(begun) == 3:
                for job in list(server.bridge.jobs.values()):
                    job.stop(ApiError(400, "it was ended", code="aborted"))

        monkeypatch.setattr(server.engine, "generate", begins)
        server.engine.step_s = 0.0
        body = {"prompt": ["x"] * 500, "max_tokens": 1}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.json()["error"]["code"] == "aborted"
        wait_for(lambda: not server.engine.live and not server.bridge.jobs)
        assert 3 <= len(begun) < 500
        assert not server.tasks()
