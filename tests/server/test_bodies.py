"""Bodies: their sum is bounded, and what they hold is counted before anything walks it."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys

import httpx
import pytest

from tests.server.serving import serving, wait_for
from tilewise.cluster.prompts import asked_of
from tilewise.server.bodies import (
    MOST_BRACKETS,
    MOST_ENTRIES,
    MOST_NAMES,
    MOST_TEXTS,
    SHORT,
    Bodies,
    refuse_crowded,
)
from tilewise.server.embeddings import EmbeddingRequest, embeddings_router
from tilewise.server.errors import ApiError
from tilewise.server.keys import Caller, hash_of
from tilewise.server.limits import RequestLimits
from tilewise.server.messages import CountRequest, messages_router
from tilewise.server.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from tilewise.server.responses import ResponsesRequest, responses_router
from tilewise.server.routes import AbortRequest, admin_router

ROUTERS = (admin_router, embeddings_router, messages_router, responses_router)
LONGEST = 8 * 2**20 - 1000
HELD_MS = 50  # of a loop at most; on a machine whose cores others use the clock counts only its own


@pytest.fixture(scope="module")
def running():
    with serving(tools="hermes", routers=lambda s: [r(s) for r in ROUTERS]) as running:
        yield running


def full(head: bytes, unit: bytes, tail: bytes, size: int = LONGEST) -> bytes:
    return head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"a":[%s{}]}' % (b"{}," * MOST_BRACKETS), "objects"),
        (b'{"a":[%s[]]}' % (b"[]," * MOST_BRACKETS), "lists"),
        (b"[" * (MOST_BRACKETS + 1), "lists"),
        (b"{%s}" % b",".join(b'"%d":1' % i for i in range(MOST_NAMES + 1)), "names"),
        (b'{"a":[%s1]}' % (b"1," * (MOST_ENTRIES + 1)), "entries"),
        (b'{"a":[%s""]}' % (b'"",' * (MOST_TEXTS + 1)), "texts"),
        (b'{"a":[%s""]}' % (b'"\\"",' * (MOST_TEXTS + 1)), "texts"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_body_that_holds_too_much_is_refused_before_it_is_parsed(body, what):
    with pytest.raises(ApiError, match=f"body must hold at most [0-9,]+ {what}, got more"):
        refuse_crowded(body)


@pytest.mark.parametrize(
    "text",
    [
        "{}[],:" * 10**6, '\\"{[' * 10**6, "\\" * 10**6 + '"' + "[" * 10**6, '"' * 10**6,
        "\n[" * 10**6,
    ],
    ids=["brackets", "quoted", "backslashes", "quotes", "lines"],
)  # fmt: skip
def test_what_stands_in_texts_is_no_part_of_a_body(text):
    refuse_crowded(json.dumps({"prompt": text, "other": [text]}).encode())
    with pytest.raises(ApiError, match="lists"):  # and the text has an end
        refuse_crowded(json.dumps({"prompt": text}).encode()[:-1] + b"," + b"[" * 2**17)


@pytest.mark.parametrize("body", [b"", b'"', b'"\\', b'{"a":"' + b"x" * 2**17, b'\\"' * 2**18])
def test_what_is_no_json_is_looked_at_and_left(body):
    refuse_crowded(body + b":" * 10)


@pytest.mark.parametrize(
    ("kind", "more", "name"),
    [
        (ChatRequest, {}, "messages"),
        (ChatRequest, {"messages": []}, "tools"),
        (ResponsesRequest, {}, "input"),
        (ResponsesRequest, {"input": "x"}, "tools"),
        (CountRequest, {"model": "story"}, "messages"),
        (CountRequest, {"model": "story", "messages": []}, "system"),
        (TokenizeRequest, {}, "messages"),
        (AbortRequest, {}, "request_ids"),
    ],
)
def test_lists_of_every_body_are_counted_before_they_are_walked(kind, more, name):
    limits = RequestLimits(max_messages=8, max_tools=8)
    entry = "x" if name == "request_ids" else {}
    limits.check_lists(kind(**{**more, name: [entry] * 8}))
    with pytest.raises(ApiError, match=f"{name} must be at most 8 [a-z]+, got 9") as told:
        limits.check_lists(kind(**{**more, name: [entry] * 9}))
    assert told.value.param == name


def test_ids_and_prompts_are_no_lists_of_objects():
    limits = RequestLimits(max_messages=8)
    limits.check_lists(EmbeddingRequest(input=[1] * 9))
    limits.check_lists(CompletionRequest(prompt=[1] * 9, stop_token_ids=[1] * 9))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_arguments_of_calls_are_counted_before_they_are_parsed(running, path):
    call = {"function": {"name": "f", "arguments": "[" + "[]," * 2**17 + "[]]"}}
    message = {"role": "assistant", "tool_calls": [call]}
    told = httpx.post(running.url + path, json={"messages": [message]})
    assert told.status_code == 400
    assert "at most 65,536 lists" in told.json()["error"]["message"]


def test_a_response_of_as_many_items_as_may_be_is_read_in_one_pass(running, monkeypatch):
    """The names of its items were put before one another, which moved all that were there."""
    moved = 0

    class Counted(list):
        def insert(self, place, value):
            nonlocal moved
            moved += len(self) - place
            super().insert(place, value)

    from tilewise.server import responses

    names = Counted()
    items = [{"role": "user", "content": "x"}, {"type": "function_call", "name": "f"}] * 50
    responses._chat_of(ResponsesRequest(input=items, instructions="y"), names)
    assert moved == 0
    assert names[0][1] == "input[99]"  # what is within another comes before it
    assert names[100] == ("messages[0]", "instructions")
    told = httpx.post(f"{running.url}/v1/responses", json={"input": [{}] * 4097})
    assert (told.status_code, told.json()["error"]["param"]) == (400, "input")


def test_long_bodies_are_parsed_and_begun_beside_the_event_loop(running, monkeypatch):
    threads = []
    inside = running.bridge.in_thread

    async def in_thread(work):
        threads.append(work)
        return await inside(work)

    monkeypatch.setattr(running.bridge, "in_thread", in_thread)
    for path, body in (
        ("/v1/completions", {"prompt": [1], "stop": "x" * SHORT}),
        ("/v1/embeddings", {"input": ["x"] * SHORT}),
        ("/v1/responses", {"input": [{"role": "x" * SHORT}]}),
        ("/v1/messages", {"model": "story", "max_tokens": 1, "messages": [{"role": "x" * SHORT}]}),
        ("/v1/chat/completions", {"messages": [], "stop": "x" * SHORT}),
    ):
        threads.clear()
        # The engine of these tests has no embeddings.
        assert httpx.post(running.url + path, json=body).status_code in (400, 501)
        assert threads[0].__qualname__ == "Service.read.<locals>.made", path


def test_short_bodies_stay_on_the_event_loop(running, monkeypatch):
    monkeypatch.setattr(running.bridge, "in_thread", None)
    body = {"prompt": [1, 2], "max_tokens": 1}
    assert httpx.post(f"{running.url}/v1/completions", json=body).status_code == 200


def test_room_for_bodies_is_bounded_shared_and_given_back():
    bodies, alice, bob = Bodies(16 * SHORT), Caller("alice"), Caller("bob")
    bodies.take(alice, 8 * SHORT, 0)
    with pytest.raises(ApiError, match="bodies of this key must be at most 524,288 bytes") as told:
        bodies.take(alice, 1, 8 * SHORT)
    assert (told.value.status, told.value.retry_after_s) == (503, 1)
    bodies.take(bob, 4 * SHORT, 0)
    with pytest.raises(ApiError, match="bodies of all requests must be at most 786,432 bytes"):
        bodies.take(bob, SHORT, SHORT)  # a long one
    bodies.take(bob, SHORT, 0)
    bodies.give_back(alice, 8 * SHORT)
    bodies.take(alice, 6 * SHORT, 0)


def test_bodies_that_arrive_and_those_of_running_requests_take_room_until_their_answers_end():
    limits = RequestLimits(max_bodies_bytes=4 * SHORT)
    with serving(limits=limits, keys={hash_of("secret-a"): Caller("a")}) as running:
        bodies = running.server.config.loaded_app._bodies
        headers = {"authorization": "Bearer secret-a"}
        connection = http.client.HTTPConnection(running.host, running.port, timeout=60)
        connection.putrequest("POST", "/v1/completions")
        for name, value in {**headers, "content-length": str(3 * SHORT)}.items():
            connection.putheader(name, value)
        connection.endheaders()
        connection.send(b" " * 2 * SHORT)
        wait_for(lambda: bodies._all == 2 * SHORT)
        told = httpx.post(f"{running.url}/v1/completions", headers=headers, content=b" " * SHORT)
        assert (told.status_code, told.json()["error"]["code"]) == (503, "bodies_full")
        assert told.headers["retry-after"] == "1"
        connection.close()
        wait_for(lambda: bodies._all == 0 and not bodies._keys)
        told = httpx.post(
            f"{running.url}/v1/completions", headers=headers, json={"prompt": [1], "max_tokens": 1}
        )
        assert told.status_code == 200
        wait_for(lambda: bodies._all == 0)


def test_a_gateway_reads_the_beginning_of_a_long_prompt_without_copies_of_its_rest():
    text = "".join(map(chr, range(97, 123))) * 20_000
    whole = asked_of("/v1/completions", {}, json.dumps({"prompt": text}).encode())
    part = asked_of("/v1/completions", {}, json.dumps({"prompt": text[: 256 * 300]}).encode())
    assert len(whole.pieces) == len(text) // 256
    assert whole.pieces[:300] == part.pieces
    assert asked_of("/v1/completions", {}, b'{"prompt":[%s1]}' % (b"[]," * 2**17)).pieces == ()


USER = b'{"role":"user","content":'
CHAT = b'{"messages":[' + USER
TALK = b'{"messages":[' + USER + b'"x"}],'
CALL = b'{"messages":[{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"'
MESSAGE = b'{"model":"story","max_tokens":3,"messages":['
HEAVY = [
    ("/v1/responses", full(b'{"input":[', b"{},", b"{}]}")),
    ("/v1/responses", full(b'{"input":[', b"{},", b"{}]}", 900_000)),
    ("/v1/responses", b'{"input":[' + (USER + b'"x"},') * 4095 + USER + b'"x"}]}'),
    ("/v1/responses", b'{"input":[' + b"{}," * 4095 + b"{}]}"),
    ("/v1/chat/completions", full(b'{"messages":[', b"{},", b"{}]}")),
    ("/v1/chat/completions", full(b'{"messages":[', b"[],", b"{}]}")),
    ("/v1/chat/completions", full(b'{"messages":[', b"1,", b"{}]}")),
    *(
        ("/v1/chat/completions", full(CHAT + b'"', unit, b'"}]}'))
        for unit in (b"x", b'\\"', b"\\u00e9", "é".encode(), b'{\\"a\\":[1,2]},', b"\\\\")
    ),
    ("/v1/chat/completions", full(CHAT + b"[", b'"x",', b'"x"]}]}')),
    ("/v1/chat/completions", CHAT + b"[" + b'{"type":"text","text":"x"},' * 16_000 + b'"x"]}]}'),
    ("/v1/chat/completions", full(b'{"messages":[', USER + b'"%s"},' % (b"x" * 2000), b"{}]}")),
    ("/v1/chat/completions", full(CALL, b"[1],", b'"}}]}]}')),
    ("/v1/chat/completions", full(CALL + b"[", b"[],", b'[]]"}}]}]}')),
    ("/v1/chat/completions", full(CALL + b"[", b"[],", b'[]]"}}]}]}', 190_000)),
    ("/v1/chat/completions", full(TALK + b'"tools":[{"type":"function","function":{"name":"', b"x",
                                  b'"}}]}')),
    ("/v1/chat/completions", full(TALK + b'"stop":[', b'"x",', b'"x"]}')),
    ("/v1/chat/completions", full(TALK + b'"logit_bias":{', b'"1":1,', b'"2":1}}')),
    *(
        ("/v1/chat/completions",
         TALK + head + b",".join(b'"%d":%s' % (i, value) for i in range(32_000)) + tail)
        for head, value, tail in ((b'"logit_bias":{', b"1", b"}}"),
                                  (b'"logit_bias":{', b'"x"', b"}}"), (b"", b"1", b"}"))
    ),
    ("/v1/chat/completions", full(TALK + b'"chat_template_kwargs":{"a":"', b"x", b'"}}')),
    ("/v1/chat/completions", full(TALK + b'"response_format":{"type":"json_schema","json_schema":'
                                  b'{"schema":{"description":"', b"x", b'"}}}}')),
    ("/v1/completions", full(b'{"prompt":[', b"1,", b"1]}")),
    ("/v1/completions", full(b'{"prompt":[', b"1,", b"1]}", 2 * MOST_ENTRIES)),
    ("/v1/completions", full(b'{"truncate_prompt_tokens":5,"prompt":[', b"1,", b"1]}",
                             2 * MOST_ENTRIES)),
    ("/v1/completions", full(b'{"prompt":[', b'"",', b'""]}')),
    ("/v1/completions", full(b'{"prompt":"', b"x", b'"}')),
    ("/v1/completions", full(b'{"truncate_prompt_tokens":4,"prompt":"', b"x ", b'"}')),
    ("/v1/completions", full(b'{"prompt":"x","stop_token_ids":[', b"1,", b"1]}")),
    ("/v1/completions", full(b'{"prompt":"x","stop_token_ids":[', b"1,", b"1]}", MOST_ENTRIES)),
    ("/v1/completions", b'{"prompt":"x","allowed_token_ids":[' + b"1," * 131_000 + b"1]}"),
    ("/v1/completions", b'{"prompt":[' + b"[1,2,3]," * 1000 + b"[1]]}"),
    ("/v1/completions", full(b'{"prompt":"x","stop":"', b"x", b'"}')),
    ("/v1/completions", full(b'{"prompt":"x","structured_outputs":{"choice":[', b'"x",',
                             b'"x"]}}')),
    ("/v1/completions", full(b'{"prompt":"x","structured_outputs":{"json":"', b"[1],", b'"}}')),
    ("/v1/completions", full(b'{"NaN":"', b"x", b'"}')),
    ("/v1/completions", full(b"", b"[", b"")),
    ("/v1/completions", full(b'{"prompt":', b"1", b"}")),
    ("/v1/embeddings", full(b'{"input":[', b"1,", b"1]}")),
    ("/v1/messages", full(MESSAGE, b"{},", b"{}]}")),
    ("/v1/messages", full(MESSAGE + USER + b"[", b'{"type":"text","text":"x"},',
                          b'{"type":"text","text":"x"}]}]}', 400_000)),
    ("/v1/messages", full(MESSAGE + b'{"role":"assistant","content":[{"type":"tool_use","name":"x",'
                          b'"input":{"a":"', b"x", b'"}}]}]}')),
    ("/v1/messages/count_tokens", full(b'{"model":"story","messages":[' + USER + b'"', b"x ",
                                       b'"}]}')),
    ("/tokenize", full(b'{"prompt":"', b"x ", b'"}')),
    ("/tokenize", full(b'{"return_token_strs":true,"prompt":"', b"x ", b'"}', 800_000)),
    ("/tokenize", full(b'{"messages":[', b"{},", b"{}]}")),
    ("/detokenize", full(b'{"tokens":[', b"1,", b"1]}")),
    ("/detokenize", full(b'{"tokens":[', b"1,", b"1]}", 2 * MOST_ENTRIES)),
    ("/abort", full(b'{"request_ids":[', b'"x",', b'"x"]}')),
]  # fmt: skip


@pytest.mark.slow
def test_no_body_holds_the_event_loop():
    """The worst of them held it for minutes."""
    command = [sys.executable, "-m", "tests.server.lagging"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as server:
        port = int(server.stdout.readline())

        def held():
            server.stdin.write("\n")
            server.stdin.flush()
            return float(server.stdout.readline())

        def ask(path, body):
            held()
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
            connection.request("POST", path, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            answer.read()
            connection.close()
            assert answer.status in (200, 400), path
            return held()

        # A second time counts where something else came in between: a collection of garbage.
        worst = [
            (min(first, ask(path, body)) if first > HELD_MS else first, path, body[:60])
            for path, body in HEAVY
            for first in [ask(path, body)]
        ]
        server.stdin.close()
    assert max(worst)[0] < HELD_MS, sorted(worst)[-5:]
