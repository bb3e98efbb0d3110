"""Writes that belong together are one; none is lost, overtaken or held back for long."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tilewise.server import joined
from tilewise.server.joined import Joined


class Transport:
    """Notes what is asked of it."""

    def __init__(self):
        self.said = []

    def write(self, data):
        self.said.append(bytes(data))

    def close(self):
        self.said.append("close")

    def abort(self):
        self.said.append("abort")

    def is_closing(self):
        return "close" in self.said


def turn(*calls):
    """What a transport is asked in one turn of an event loop, and in the next."""
    transport = Transport()

    async def main():
        one = Joined(transport, asyncio.get_running_loop())
        for name, *data in calls:
            getattr(one, name)(*data)
        now = list(transport.said)
        await asyncio.sleep(0)
        assert one.is_closing() == transport.is_closing()
        return now, transport.said[len(now) :]

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("calls", "now", "later"),
    [
        ([("write", b"a"), ("write", b""), ("write", b"b")], [], [b"ab"]),
        ([("write", b"a"), ("write_now", b"b"), ("write_now", b"c")], [b"ab", b"c"], []),
        ([("write", b"a"), ("write_now", b"b"), ("write", b"c")], [b"ab"], [b"c"]),
        ([("write", b"a"), ("close",)], [b"a", "close"], []),
        ([("close",)], ["close"], []),
        ([("write", b"a"), ("abort",)], ["abort"], []),
        ([("write", b"")], [], []),
    ],
)
def test_what_is_written_when(calls, now, later):
    assert turn(*calls) == (now, later)


def test_what_is_held_back_is_bounded():
    parts = [("write", b"x" * 1000)] * 200
    now, later = turn(*parts)
    assert max(map(len, now)) < joined.MOST + 1000
    assert sum(map(len, now + later)) == 200_000


class Counting:
    """A transport that notes what it is given at once."""

    def __init__(self, transport, sends):
        self._transport, self._sends = transport, sends

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def write(self, data):
        self._sends.append(bytes(data))
        self._transport.write(data)


@pytest.fixture
def sends(monkeypatch):
    """What the server gives to the system, a part a send."""
    found = []
    real = Joined.__init__

    def counting(self, transport, *more):
        real(self, Counting(transport, found), *more)

    monkeypatch.setattr(Joined, "__init__", counting)
    return found


def test_a_stream_takes_a_send_for_each_step_and_no_more(sends):
    body = {
        "prompt": "Once", "max_tokens": 4, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    with serving(FakeEngine(step_s=0.05)) as running:
        answer = httpx.post(f"{running.url}/v1/completions", json=body)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert len(sends) == 4, sends
    assert sends[0].startswith(b"HTTP/1.1 200 ")
    assert b'"choices":[{' in sends[0], "headers and the first token are one"
    for part in (b'"finish_reason":"length"', b'"usage"', b"[DONE]", b"0\r\n\r\n"):
        assert part in sends[-1]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/completions"])
def test_a_whole_answer_takes_one(sends, path):
    with serving() as running:
        if path == "/v1/models":
            answer = httpx.get(f"{running.url}{path}")
        else:
            answer = httpx.post(f"{running.url}{path}", json={"prompt": "Once", "max_tokens": 3})
    assert answer.status_code == 200
    assert len(sends) == 1, sends
