"""Requests through the gateway, with replicas that are functions: retries, cuts, errors."""

from __future__ import annotations

import asyncio
import json

import pytest

from tilewise.cluster.gateway import Call, Gateway, Start, merge_metrics
from tilewise.cluster.router import PrefixRouter, RoundRobin
from tilewise.errors import ReplicaLostError

JSON = ((b"content-type", b"application/json"),)
STREAM = ((b"content-type", b"text/event-stream; charset=utf-8"),)


class Replicas:
    """A backend of functions by name."""

    def __init__(self, **made):
        self.made, self.calls, self.left = made, [], []

    def replicas(self):
        return dict.fromkeys(self.made, 1000)

    async def open(self, name, call):
        self.calls.append(name)
        try:
            async for part in self.made[name](call):
                yield part
        except (asyncio.CancelledError, GeneratorExit):
            self.left.append(name)
            raise


async def whole(call: Call):
    yield Start(200, JSON)
    yield json.dumps({"path": call.path, "usage": {"completion_tokens": 5}}).encode()


async def streams(call: Call):
    yield Start(200, STREAM)
    for i in range(3):
        yield f"data: {i}\n\n".encode()
    yield b"data: [DONE]\n\n"


async def lost(call: Call):
    raise ReplicaLostError("it was killed")
    yield


async def lost_after_its_headers(call: Call):
    yield Start(200, STREAM)
    raise ReplicaLostError("it was killed")


async def cut(call: Call):
    yield Start(200, STREAM)
    yield b"data: 0\n\n"
    raise ReplicaLostError("it was killed")


async def draining(call: Call):
    yield Start(503, JSON)
    yield b'{"error": {"message": "the server is shutting down"}}'


async def hangs(call: Call):
    yield Start(200, STREAM)
    yield b"data: 0\n\n"
    await asyncio.Event().wait()


class Client:
    """One request, driven by hand."""

    def __init__(self, gateway, path="/v1/completions", body=b'{"prompt": "x"}', **headers):
        self.gateway = gateway
        method = "GET" if path in ("/health", "/ready", "/metrics") else "POST"
        named = [(n.replace("_", "-").encode(), v.encode()) for n, v in headers.items()]
        self.scope = {"type": "http", "method": method, "path": path, "headers": named}
        self.inbox = [{"type": "http.request", "body": body, "more_body": False}]
        self.leaves = asyncio.Event()
        self.status, self.headers, self.body, self.is_over = None, {}, b"", False
        self.parts = asyncio.Event()

    async def receive(self):
        if self.inbox:
            return self.inbox.pop(0)
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {n.decode(): v.decode() for n, v in message["headers"]}
            return
        self.body += message["body"]
        self.is_over = not message["more_body"]
        self.parts.set()

    async def run(self):
        await self.gateway(self.scope, self.receive, self.send)
        return self

    @property
    def json(self):
        return json.loads(self.body)


def ask(replicas, *args, router=None, **kwargs):
    gateway = Gateway(replicas, router or RoundRobin())
    gateway.wait_s = 0.2
    client = asyncio.run(Client(gateway, *args, **kwargs).run())
    client.counts = gateway.counts
    return client


def test_an_answer_comes_back_with_the_name_of_who_gave_it():
    client = ask(Replicas(a=whole))
    assert (client.status, client.headers["x-tilewise-replica"]) == (200, "a")
    assert client.json["path"] == "/v1/completions"
    assert client.is_over


def test_a_stream_comes_back_part_by_part():
    client = ask(Replicas(a=streams))
    assert client.body == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
    assert client.is_over


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        # Of a stream that is not counted, bytes of text over 4: however many steps an event holds.
        ([{"choices": [{"text": "x" * 39}]}, {"choices": [{"text": ""}]}], 10),
        ([{"choices": [{"delta": {"content": 'a "quoted" word'}}]}], 5),
        ([{"choices": [{"delta": {"role": "assistant"}}]}], None),
        ([{"choices": [{"text": "x" * 400}]}, {"usage": {"completion_tokens": 7}}], 7),
    ],
)
def test_a_streams_tokens_are_told_or_those_of_its_text(events, expected):
    async def told(call: Call):
        yield Start(200, STREAM)
        for event in events:
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    router, ended = RoundRobin(), []
    router.ended = lambda ticket, tokens=None: ended.append(tokens)
    ask(Replicas(a=told), router=router)
    assert ended == [expected]


@pytest.mark.parametrize("broken", [lost, lost_after_its_headers, draining])
def test_where_nothing_was_sent_another_replica_answers(broken):
    replicas = Replicas(a=broken, b=streams)
    client = ask(replicas)
    assert client.status == 200
    assert client.body.endswith(b"[DONE]\n\n")
    assert replicas.calls == ["a", "b"]
    assert client.counts["retried"] == 1


def test_a_stream_that_is_cut_ends_with_an_event_that_says_so():
    replicas = Replicas(a=cut, b=streams)
    client = ask(replicas)
    assert replicas.calls == ["a"]  # what was sent cannot be taken back
    first, last, end = client.body.split(b"\n\n")
    assert (first, end) == (b"data: 0", b"")
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "replica_lost"
    assert "replica a was lost in the midst of this answer" in error["message"]
    assert client.is_over


@pytest.mark.parametrize(
    ("path", "kind"), [("/v1/messages", "api_error"), ("/v1/responses", "replica_lost")]
)
def test_other_apis_have_events_of_their_own(path, kind):
    client = ask(Replicas(a=cut), path)
    assert b"event: error\ndata: " in client.body
    assert kind.encode() in client.body


def test_when_all_are_lost_one_sentence_says_so():
    client = ask(Replicas(a=lost, b=lost, c=lost, d=lost))
    assert client.status == 502
    assert "got 3 that were lost; the last: it was killed" in client.json["error"]["message"]
    client = ask(Replicas(a=lost))
    assert client.status == 503
    assert "got none beside 1 that failed" in client.json["error"]["message"]


def test_without_replicas_a_request_waits_and_is_refused():
    client = ask(Replicas())
    assert client.status == 503
    assert client.headers["retry-after"] == "1"


def test_a_replica_that_comes_meanwhile_serves_who_waits():
    async def go():
        replicas = Replicas()
        gateway = Gateway(replicas, PrefixRouter())
        task = asyncio.create_task(Client(gateway).run())
        await asyncio.sleep(0.15)
        replicas.made["a"] = whole
        return await asyncio.wait_for(task, 5)

    assert asyncio.run(go()).status == 200


def test_the_last_of_them_may_say_that_it_is_overloaded():
    client = ask(Replicas(a=draining))
    assert client.status == 503
    assert "shutting down" in client.json["error"]["message"]


def test_a_client_that_leaves_takes_its_request_along():
    async def go():
        replicas = Replicas(a=hangs)
        router = PrefixRouter()
        client = Client(Gateway(replicas, router))
        task = asyncio.create_task(client.run())
        await asyncio.wait_for(client.parts.wait(), 5)
        client.leaves.set()
        await asyncio.wait_for(task, 5)
        return replicas, router

    replicas, router = asyncio.run(go())
    assert replicas.left == ["a"]
    assert router.work("a") == 0


def test_work_is_over_whatever_becomes_of_a_request():
    for made in (streams, whole, lost, cut, draining):
        router = PrefixRouter()
        ask(Replicas(a=made, b=made), router=router)
        assert [router.work(name) for name in router.names] == [0, 0]


def test_a_body_that_is_too_long_is_refused_before_it_is_read():
    gateway = Gateway(Replicas(a=whole), RoundRobin(), max_body_bytes=10)
    client = asyncio.run(Client(gateway, body=b"x" * 11).run())
    assert client.status == 413
    assert "at most 10 bytes, got 11" in client.json["error"]["message"]


def test_health_is_that_of_the_whole():
    assert ask(Replicas(a=lost), "/ready").status == 200
    assert ask(Replicas(), "/health").status == 503


def test_a_request_may_name_its_replica():
    replicas = Replicas(a=whole, b=whole)
    client = ask(replicas, x_tilewise_replica="b")
    assert client.headers["x-tilewise-replica"] == "b"
    client = ask(replicas, x_tilewise_replica="z")
    assert client.status == 404
    assert "must be one of a, b, got z" in client.json["error"]["message"]


def test_what_concerns_all_is_asked_of_all():
    replicas = Replicas(a=whole, b=lost)
    client = ask(replicas, "/pause", b"")
    assert client.status == 502
    assert client.json["replicas"]["a"]["path"] == "/pause"
    assert client.json["replicas"]["b"]["error"]["code"] == "replica_lost"


def test_metrics_of_all_are_one_text():
    texts = {
        name: f'# HELP t:x X.\n# TYPE t:x gauge\nt:x{{m="s"}} {value}\nt:y 1\n'.encode()
        for name, value in (("a", 1), ("b", 2))
    }
    merged = merge_metrics(texts).decode().splitlines()
    assert merged == [
        "# HELP t:x X.", "# TYPE t:x gauge", 't:x{replica="a",m="s"} 1', 't:y{replica="a"} 1',
        't:x{replica="b",m="s"} 2', 't:y{replica="b"} 1',
    ]  # fmt: skip


def test_equal_beginnings_go_to_one_replica_and_others_elsewhere():
    replicas = Replicas(a=whole, b=whole)
    gateway = Gateway(replicas, PrefixRouter())
    texts = {name: name * 2000 for name in "xy"}

    async def go():
        for name in "xyxyyx":
            body = json.dumps({"prompt": texts[name] + "end", "max_tokens": 5}).encode()
            await Client(gateway, body=body).run()

    asyncio.run(go())
    by_text = [{c for c, n in zip(replicas.calls, "xyxyyx", strict=True) if n == t} for t in "xy"]
    assert [len(places) for places in by_text] == [1, 1]
    assert by_text[0] != by_text[1]
