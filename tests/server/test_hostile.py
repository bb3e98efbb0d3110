"""What a hostile reading of the server found: each test failed before its cause was mended."""

from __future__ import annotations

import json
import logging
import os
import resource
import threading
import time

import anthropic
import httpx
import openai
import pydantic
import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving, wait_for
from tests.server.test_chat_tools import TOKENIZER, says
from tests.server.test_lifecycle import connect, post, settled
from tests.server.wire import events_of, named_events_of
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.outputs import Generation
from tilewise.engine.request import Request, SamplingParams
from tilewise.server.answers import CompletionAnswer, completion_logprobs
from tilewise.server.calls.parser import CallParser
from tilewise.server.calls.parts import PlainParser
from tilewise.server.calls.table import FORMATS, call_format
from tilewise.server.chat_answer import ChatAnswer
from tilewise.server.chat_format import reasoning_format
from tilewise.server.errors import ApiError
from tilewise.server.keys import Caller, hash_of
from tilewise.server.limits import Queue, RequestLimits
from tilewise.server.messages import MessagesRequest, messages_router
from tilewise.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    parse,
    shown,
)
from tilewise.server.reasoning import ThinkParser, reasoning_end
from tilewise.server.responses import ResponsesRequest, responses_router
from tilewise.server.routes import AbortRequest, admin_router
from tilewise.server.run import ServerOptions
from tilewise.server.templates import Templates

KEYS = {
    hash_of("key-of-alice"): Caller("alice"),
    hash_of("key-of-bob"): Caller("bob"),
    hash_of("key-of-root"): Caller("root", admin=True),
}
HI = [{"role": "user", "content": "Hi"}]


def routers(service):
    return [messages_router(service), responses_router(service), admin_router(service)]


def of(name):
    return {"authorization": f"Bearer key-of-{name}"}


@pytest.fixture(scope="module")
def running():
    with serving(routers=routers) as server:
        yield server


# bodies


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": "x", "stop_token_ids": [""] * 5000}, "stop_token_ids[0]"),
        (CompletionRequest, {"prompt": "x", "allowed_token_ids": [0] + [""] * 5000},
         "allowed_token_ids[1]"),
        (CompletionRequest, {"prompt": "x", "bad_words": [0] * 5000}, "bad_words[0]"),
        (CompletionRequest, {"prompt": "x", "stop": [0] * 5000}, "stop"),
        (ChatRequest, {"messages": [0] * 5000}, "messages[0]"),
        (ChatRequest, {"messages": HI, "tools": [0] * 5000}, "tools[0]"),
        (TokenizeRequest, {"messages": [0] * 5000}, "messages[0]"),
        (DetokenizeRequest, {"tokens": [""] * 5000}, "tokens[0]"),
        (AbortRequest, {"request_ids": [0] * 5000}, "request_ids[0]"),
        (ResponsesRequest, {"input": [0] * 5000}, "input"),
        (MessagesRequest, {"model": "story", "max_tokens": 1, "messages": [0] * 5000},
         "messages[0]"),
    ],
)  # fmt: skip
def test_a_list_of_many_mistakes_is_refused_for_the_first(kind, body, param):
    """Each was listed, in 8 to 17 s of the event loop and 2 GB for a body of 8 MB."""
    text = json.dumps(body).encode()
    with pytest.raises(pydantic.ValidationError) as found:
        kind.model_validate_json(text)
    assert found.value.error_count() <= 2  # of a union, one for each type
    with pytest.raises(ApiError) as error:
        parse(kind, text)
    assert (error.value.status, error.value.param) == (400, param)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"logit_bias": {str(i): "" for i in range(5000)}}, None),
        ({f"a{i}": 0 for i in range(5000)}, "a0"),
        ({"suffix": "", **{f"a{i}": 0 for i in range(5000)}}, "a0"),
    ],
)
def test_a_table_of_many_mistakes_is_refused(more, param):
    with pytest.raises(ApiError) as error:
        parse(CompletionRequest, json.dumps({"prompt": "x", **more}).encode())
    assert (error.value.status, error.value.param) == (400, param)
    assert len(error.value.message) < 100


def test_of_a_long_value_only_its_beginning_is_written():
    begun = time.thread_time()
    for value in ([0] * 10**6, [[0] * 10**6], {"a": [0] * 10**6}, dict.fromkeys(range(10**6))):
        told = shown(value)
        assert len(told) < 100
        assert told.endswith("... (cut)")
    assert time.thread_time() - begun < 0.5
    assert shown([0, {"a": "é"}]) == "[0, {'a': '\\xe9'}]"


def test_what_is_no_json_is_refused_wherever_it_stands(running):
    """Tools with NaN came back in a response that no client could read."""
    for number in ("NaN", "Infinity", "-Infinity"):
        body = '{"input": "x", "tool_choice": "none", "tools": [{"type": "function", "name": "f",'
        body += '"parameters": {"maximum": ' + number + "}}]}"
        answer = httpx.post(f"{running.url}/v1/responses", content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["code"] == "invalid_json"
    answer = httpx.post(f"{running.url}/v1/completions", json={"prompt": "NaN", "max_tokens": 1})
    assert answer.status_code == 200, "a text may say so"


# connections


@pytest.mark.parametrize("is_dripping", [False, True])
def test_who_is_refused_need_not_be_waited_for(is_dripping):
    """The body of a request without a key was waited for for ever."""
    options = ServerOptions(header_timeout_s=0.5, shutdown_timeout_s=2.0)
    with serving(keys=KEYS, options=options) as running:
        sock = connect(running)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n")
        assert b"401 Unauthorized" in sock.recv(4096)
        begun = time.monotonic()
        sock.settimeout(0.1)
        while time.monotonic() - begun < 10:
            try:
                if is_dripping:
                    sock.sendall(b"x")
                if not sock.recv(4096):
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        assert time.monotonic() - begun < 5
        sock.close()


def test_a_body_that_was_refused_may_come_and_the_connection_goes_on():
    options = ServerOptions(header_timeout_s=5.0, shutdown_timeout_s=2.0)
    with serving(keys=KEYS, options=options) as running:
        sock = connect(running)
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 6\r\n\r\nabc")
        assert b"401 Unauthorized" in sock.recv(4096)
        sock.sendall(b"defGET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200 OK" in sock.recv(4096)
        sock.close()


@pytest.mark.parametrize("closes", [False, True])
def test_an_answer_that_nobody_reads_is_not_kept(caplog, closes):
    """A whole answer of megabytes was, with its connection, for as long as the client liked."""
    caplog.set_level(logging.WARNING, "tilewise.server")
    engine = FakeEngine(max_model_len=4000)
    with serving(
        engine, bridge_options={"slow_reader_s": 0.3}, send_buffer=4096, routers=routers
    ) as running:
        sock = connect(running, receive_buffer=4096)
        body = {"prompt": [[1] * 3000] * 40, "max_tokens": 1, "return_token_ids": True}
        post(sock, body, extra="Connection: close\r\n" if closes else "")
        wait_for(lambda: "has not read an answer" in caplog.text, 30)
        settled(running)
        wait_for(lambda: not running.server.server_state.connections.copy())
        text = httpx.get(f"{running.url}/metrics").text
        assert 'dropped_streams_total{model_name="story",reason="slow_reader"} 1.0' in text
        sock.close()


def test_an_answer_that_is_read_slowly_is_read_to_its_end():
    engine = FakeEngine(max_model_len=4000)
    with serving(engine, bridge_options={"slow_reader_s": 0.2}, send_buffer=4096) as running:
        sock = connect(running, receive_buffer=4096)
        body = {"prompt": [[1] * 3000] * 12, "max_tokens": 1, "return_token_ids": True}
        post(sock, body, extra="Connection: close\r\n")
        begun, size = time.monotonic(), 0
        while part := sock.recv(2048):
            size += len(part)
            time.sleep(0.03)
        assert time.monotonic() - begun > 1.5, "longer than the time for slow readers"
        assert size > 100_000
        sock.close()


# templates


def test_templates_are_rendered_whatever_the_number_of_descriptors():
    """select() takes none above 1,023, which a worker has that is started beside 1,000 clients."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2048:
        pytest.skip("this machine allows no more than 1,024 descriptors")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    ends = [os.dup(0) for _ in range(1100)]
    templates = Templates()
    try:
        assert templates.render("{{ a }}", {"a": "b" * 100_000}) == "b" * 100_000
    finally:
        templates.close()
        for end in ends:
            os.close(end)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# names, and what one key learns of another


def test_a_second_prompts_name_is_nobody_elses():
    """It was the first one's with -1 behind it, which another key could ask for, or had."""
    with serving(keys=KEYS, routers=routers) as running:
        running.engine.is_held = True
        sock = connect(running)
        body = {"prompt": ["a", "b"], "request_id": "mine", "max_tokens": 2}
        post(sock, body, extra="Authorization: Bearer key-of-alice\r\n")
        wait_for(lambda: len(running.engine.live) == 2)
        running.engine.is_held = False
        for number in range(1, 3):
            told = {"prompt": "x", "request_id": f"mine-{number}", "max_tokens": 1}
            answer = httpx.post(f"{running.url}/v1/completions", json=told, headers=of("bob"))
            assert answer.status_code == 200, answer.text
        assert {"cmpl-mine@alice~1"} <= {seen["request"].request_id for seen in running.engine.seen}
        sock.close()


def test_a_key_is_told_of_no_other_in_metrics_and_explanations():
    class Engine(FakeEngine):
        def explain(self, request_id):
            return {**super().explain(request_id), "behind": list(self.live), "num_behind": 2}

    with serving(Engine(), keys=KEYS, routers=routers) as running:
        for name in ("alice", "bob"):
            body = {"prompt": "x", "max_tokens": 1}
            httpx.post(f"{running.url}/v1/completions", json=body, headers=of(name))
        told = {n: httpx.get(f"{running.url}/metrics", headers=of(n)).text for n in ("bob", "root")}
        assert 'key="alice"' in told["root"]
        assert 'key="bob"' in told["bob"]
        assert "alice" not in told["bob"]
        running.engine.is_held = True
        socks = []
        for name in ("alice", "bob"):
            socks.append(connect(running))
            body = {"prompt": "x", "request_id": f"of-{name}"}
            post(socks[-1], body, extra=f"Authorization: Bearer key-of-{name}\r\n")
        wait_for(lambda: len(running.engine.live) == 2)
        path = f"{running.url}/v1/explain/cmpl-of-bob"
        [own] = httpx.get(path, headers=of("bob")).json()["prompts"]
        [all_] = httpx.get(path, headers=of("root")).json()["prompts"]
        assert (own["behind"], own["num_behind"]) == (["cmpl-of-bob"], 2)
        assert set(all_["behind"]) == {"cmpl-of-alice@alice", "cmpl-of-bob@bob"}
        running.engine.is_held = False
        for sock in socks:
            sock.close()


# what is counted


def test_samples_that_are_drawn_and_not_told_count_against_a_key():
    """A key with so many tokens a minute drew best_of times as many."""
    caller = Caller("alice", tokens_per_minute=100)
    with serving(keys={hash_of("key-of-alice"): caller}, queue=Queue()) as running:
        body = {"prompt": [1, 2], "best_of": 9, "n": 2, "max_tokens": 10, "ignore_eos": True}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=of("alice"))
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 20
        usage = httpx.get(f"{running.url}/v1/usage", headers=of("alice")).json()["data"]
        assert usage[0]["generated_tokens"] == 90
        body = {"prompt": [1] * 9, "max_tokens": 1}
        answer = httpx.post(f"{running.url}/v1/completions", json=body, headers=of("alice"))
        assert answer.status_code == 429, answer.text


def test_a_generation_counts_what_it_discards():
    request = Request("r", [1], SamplingParams(n=1, best_of=3, temperature=1.0), (0, 0, 0))
    generation = Generation(request, None, None)
    for place, sample in enumerate(generation.samples):
        sample.token_ids, sample.cumulative_logprob = [5] * (place + 1), -float(place)
    generation.abort()
    assert [len(c.token_ids) for c in generation.output.outputs] == [1]
    assert generation.output.num_tokens_discarded == 5


# an administrator ends what is in preparation


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_is_aborted_while_its_text_is_prepared(path):
    """The answer said that it was, and it went on."""
    with serving(bridge_options={"num_threads": 1}, routers=routers) as running:
        may_go_on = threading.Event()
        busy = running.bridge._pool.submit(may_go_on.wait, 20)  # the only thread has other work
        text = "Once upon a time. " * 40
        body = {"prompt": text} if path == "/v1/completions" else {"messages": HI}
        found = {}

        def ask():
            found["answer"] = httpx.post(running.url + path, json={**body, "max_tokens": 9})

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: running.bridge._pending == 1)
        answer = httpx.post(f"{running.url}/abort", json={"all": True})
        assert len(answer.json()["aborted"]) == 1
        asking.join(10)
        assert not asking.is_alive()
        assert found["answer"].status_code == 400
        assert found["answer"].json()["error"]["code"] == "aborted"
        may_go_on.set()
        assert busy.result(20)
        settled(running)
        assert not running.engine.seen


# what is asked of a stream where there is none, and shapes


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_asked_of_a_stream_is_not_ignored_without_one(running, path):
    body = {"prompt": "x"} if path == "/v1/completions" else {"messages": HI}
    more = {"stream_options": {"include_usage": True}}
    answer = httpx.post(running.url + path, json={**body, **more, "max_tokens": 1})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream_options"
    more = {"stream_options": {"include_usage": False}, "stream": False}
    answer = httpx.post(running.url + path, json={**body, **more, "max_tokens": 1})
    assert answer.status_code == 200


def test_a_chats_prompt_ids_stand_where_the_whole_answer_has_them(running):
    body = {"messages": HI, "max_tokens": 4, "n": 2, "return_token_ids": True, "seed": 3}
    url = f"{running.url}/v1/chat/completions"
    whole = httpx.post(url, json=body).json()
    events = events_of(httpx.post(url, json={**body, "stream": True}).text)
    told = [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event]
    assert told == [whole["prompt_token_ids"]]
    assert not any("prompt_token_ids" in c for event in events for c in event["choices"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "x", "content": "a"}]}, "input[0].role"),
        ({"instructions": "a", "input": [{"type": "reasoning"}, {"role": "x"}]}, "input[1].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"role": "assistant", "content": "a"}, {"type": "function_call", "name": "f",
          "arguments": "x"}]}, "input[1].arguments"),
        ({"input": []}, "input"),
        ({"input": "x", "text": {"format": {"type": "x"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "schema": 3}}},
         "text.format.schema"),
        ({"input": "x", "tools": [{"type": "function", "name": 7}]}, "tools[0]"),
    ],
)  # fmt: skip
def test_an_error_of_a_response_names_the_clients_field(running, body, param):
    answer = httpx.post(f"{running.url}/v1/responses", json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(param)


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "f", "input_schema": 3}]}, "tools[0].input_schema"),
        ({"tools": [{"input_schema": {}}]}, "tools[0] "),
        ({"output_config": {"format": {"schema": 3}}}, "output_config.format"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_an_error_of_a_message_names_the_clients_field(running, path, more, field):
    body = {"model": "story", "messages": HI, **more}
    if path == "/v1/messages":
        body["max_tokens"] = 1
    elif "stop_sequences" in more:
        pytest.skip("nothing is generated to stop")
    answer = httpx.post(running.url + path, json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["message"].startswith(field)


def test_a_response_was_created_once_and_its_items_say_how_it_ended(monkeypatch):
    """Each event had a time of its own; an item cut by its deadline said "completed"."""
    with serving(says("one two three four five " * 20), routers=routers) as running:
        running.engine.step_s = 0.05
        body = {"input": "x", "stream": True, "timeout": 1.6, "max_output_tokens": 900}
        events = named_events_of(httpx.post(f"{running.url}/v1/responses", json=body).text)
        last = events[-1]
        assert last["type"] == "response.incomplete"
        assert last["response"]["incomplete_details"] == {"reason": "deadline"}
        assert [item["status"] for item in last["response"]["output"]] == ["incomplete"]
        times = {event["response"]["created_at"] for event in events if "response" in event}
        assert len(times) == 1


def test_arguments_that_are_no_object_make_no_error_of_the_server():
    for arguments in ("[" * 3000 + "]" * 3000, "[1]", '{"a": '):
        call = '{"name": "add", "arguments": ' + arguments + "}"
        engine = says(f"<tool_call>{call}</tool_call>")
        engine.limits = FakeEngine(max_model_len=8000).limits
        with serving(engine, tools="hermes", routers=routers) as running:
            tool = {"name": "add", "input_schema": {"type": "object"}}
            body = {"model": "story", "messages": HI, "tools": [tool], "max_tokens": 7900}
            answer = httpx.post(f"{running.url}/v1/messages", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            [block] = [b for b in answer.json()["content"] if b["type"] == "tool_use"]
            assert set(block["input"]) == {"partial_json"}


THINK = reasoning_format("think")


@pytest.mark.parametrize(
    ("text", "is_open", "end"),
    [
        ("<think>a</think>b", False, 16), (" \n<think>a", False, 10), ("a<think>b", False, 0),
        ("a</think>b", True, 9), ("a</think>b", False, 0), ("", False, 0), ("", True, 0),
        ("<think>a</think>b</think>", False, 16), ("<thin", False, 0), ("<think>", True, 7),
    ],
)  # fmt: skip
def test_reasoning_ends_where_its_parser_says(text, is_open, end):
    assert reasoning_end(THINK, text, is_open) == end
    parser = ThinkParser(THINK, PlainParser(), is_open)
    parts = [*parser.push(text), *parser.finish()]
    kept = "".join(part.text for part in parts if part.kind == "content")
    assert kept.strip() == text[end:].strip()


def test_tokens_of_reasoning_are_counted_by_every_form():
    """Responses said 0 of them, the others nothing."""
    thought, said = "<think>Let me think.</think>", " So it is."
    tokens = len(TOKENIZER.encode(thought, adds_special_tokens=False))
    with serving(says(thought + said), reasoning="think", routers=routers) as running:

        def ask(path, **body):
            answer = httpx.post(running.url + path, json={"model": "story", **body})
            assert answer.status_code == 200, answer.text
            return answer

        chat = {"messages": HI, "max_tokens": 100}
        told = ask("/v1/chat/completions", **chat, n=2).json()["usage"]
        assert told["completion_tokens_details"] == {"reasoning_tokens": 2 * tokens}
        options = {"stream": True, "stream_options": {"include_usage": True}}
        last = events_of(ask("/v1/chat/completions", **chat, **options).text)[-1]["usage"]
        assert last["completion_tokens_details"] == {"reasoning_tokens": tokens}
        told = ask("/v1/responses", input="x").json()["usage"]
        assert told["output_tokens_details"] == {"reasoning_tokens": tokens}
        told = ask("/v1/messages", **chat).json()["usage"]
        assert told["output_tokens_details"] == {"thinking_tokens": tokens}
        cut = ask("/v1/chat/completions", messages=HI, max_tokens=tokens - 2).json()["usage"]
        assert cut["completion_tokens_details"] == {"reasoning_tokens": tokens - 2}
    with serving(says(said)) as running:
        assert (
            "completion_tokens_details" not in ask("/v1/chat/completions", **chat).json()["usage"]
        )


def test_answers_are_those_that_the_clients_types_want():
    """Newer types of OpenAI's want usage.input_tokens_details.cache_write_tokens."""
    with serving(says("<think>Hm.</think>Yes."), reasoning="think", routers=routers) as running:

        def ask(path, **body):
            answer = httpx.post(running.url + path, json={"model": "story", **body})
            assert answer.status_code == 200, answer.text
            return answer

        response = ask("/v1/responses", input="x").json()
        openai.types.responses.Response.model_validate(response, strict=True)
        adapter = pydantic.TypeAdapter(openai.types.responses.ResponseStreamEvent)
        for event in named_events_of(ask("/v1/responses", input="x", stream=True).text):
            adapter.validate_python(event)
        chat = {"messages": HI, "max_tokens": 90}
        openai.types.chat.ChatCompletion.model_validate(
            ask("/v1/chat/completions", **chat, logprobs=True, top_logprobs=2).json(), strict=True
        )
        more = {"stream": True, "stream_options": {"include_usage": True}}
        for event in events_of(ask("/v1/chat/completions", **chat, **more).text):
            openai.types.chat.ChatCompletionChunk.model_validate(event, strict=True)
        anthropic.types.Message.model_validate(ask("/v1/messages", **chat).json(), strict=True)
        adapter = pydantic.TypeAdapter(anthropic.types.RawMessageStreamEvent)
        for event in named_events_of(ask("/v1/messages", **chat, stream=True).text):
            adapter.validate_python(event, strict=True)


DAILY = ("none", "hermes", "llama3_json", "mistral", "qwen3_coder")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in DAILY else pytest.mark.slow)
        for name in ("none", *(form.name for form in FORMATS))
    ],
)
@pytest.mark.parametrize("text", [" ", "x ", "<think> "])
def test_spaces_without_end_take_no_time(name, text):
    """Each looked at all before it: 50,000 that begin an answer took 4 s, which take 0.1 now."""
    form = call_format(name)
    inner = PlainParser() if form is None else CallParser(form.syntax, ["f"])
    parser = ThinkParser(reasoning_format("think_response"), inner)
    begun = time.thread_time()
    parts = parser.push(text + " " * 50_000)
    for _ in range(500):
        parts += parser.push("\n" * 50)
    parts += [*parser.push("</think>y"), *parser.finish()]
    assert time.thread_time() - begun < 1.5
    assert "".join(part.text for part in parts).replace("</think>", "").split() in (
        ["y"],
        ["x", "y"],
    )


def test_what_is_told_of_prompts_is_bounded_by_all_that_repeats_it():
    """A request of 80 kB had an answer of 490 MB, in which nobody else was served for a minute."""
    limits = RequestLimits(max_prompt_logprobs=1000)
    with serving(limits=limits) as running:
        url = f"{running.url}/v1/completions"
        fits = {"prompt": [[5] * 20] * 5, "n": 5, "max_tokens": 1, "prompt_logprobs": 1}
        for more in ({"n": 6}, {"prompt": [[5] * 20] * 6}, {"prompt_logprobs": 2}):
            answer = httpx.post(url, json={**fits, **more})
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert (error["param"], error["code"]) == ("prompt_logprobs", "too_many")
        echoed = {"prompt": [5] * 501, "echo": True, "logprobs": 1, "max_tokens": 1}
        assert httpx.post(url, json=echoed).status_code == 400
        assert not running.engine.seen
        assert httpx.post(url, json=fits).status_code == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_long_answers_are_made_beside_the_event_loop(running, path, monkeypatch):
    """One of 120 MB stopped all streams for 6 s."""
    is_chat = path == "/v1/chat/completions"
    kind = ChatAnswer if is_chat else CompletionAnswer
    real, threads = kind.whole, []

    def whole(self, *given):
        threads.append(threading.current_thread())
        return real(self, *given)

    monkeypatch.setattr(kind, "whole", whole)
    body = {"messages": HI, "top_logprobs": 2} if is_chat else {"prompt": "x", "echo": True}
    body |= {"logprobs": True if is_chat else 2, "n": 2, "max_tokens": 3, "return_token_ids": True}
    answer = httpx.post(running.url + path, json=body).json()
    assert len(answer["choices"]) == 2
    assert answer["usage"]["completion_tokens"] == 6
    assert threads
    assert running._thread not in threads


def test_what_an_echo_tells_of_its_prompt_is_made_once_and_beside_the_event_loop(monkeypatch):
    real, threads = CompletionAnswer._echoed_logprobs, []

    def echoed(self, prompt, output):
        if prompt not in self._echoed:
            threads.append(threading.current_thread())
        return real(self, prompt, output)

    monkeypatch.setattr(CompletionAnswer, "_echoed_logprobs", echoed)
    llm = LLM("story", device="cpu", num_blocks=64, max_num_seqs=8)
    with serving(AsyncLLM(llm), loop=llm.loop) as running:
        body = {
            "prompt": ["Once upon", "A boat"], "echo": True, "logprobs": 2, "n": 2, "max_tokens": 3,
            "prompt_logprobs": 2, "stream": True,
        }  # fmt: skip
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=60)
        events_of(answer.text)
        assert len(threads) == 2
        assert running._thread not in threads
    llm.close()


def test_a_request_that_is_ended_in_the_queue_has_an_answer_whatever_it_asked_to_be_told():
    """With echo and logprobs it was the server's error: those of its prompt were not there yet."""
    with serving(routers=routers) as running:
        running.engine.is_held = True
        body = {"prompt": "Once", "echo": True, "logprobs": 1, "prompt_logprobs": 1}
        found = []
        asking = threading.Thread(
            target=lambda: found.append(httpx.post(f"{running.url}/v1/completions", json=body))
        )
        asking.start()
        wait_for(lambda: running.engine.live)
        httpx.post(f"{running.url}/abort", json={"all": True})
        asking.join(10)
        assert found[0].status_code == 200, found[0].text
        [choice] = found[0].json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Once", "abort")
        assert set(choice["logprobs"]["token_logprobs"]) == {None}


def test_a_completions_best_tokens_have_the_drawn_one_among_them():
    """OpenAI's route of completions tells up to logprobs + 1, so that it is there."""
    entries = [{1000: -0.5, 1001: -1.0, 1002: -7.0}, None]
    told = completion_logprobs([1002, 1000], entries, 2, TOKENIZER, 0)
    texts = [TOKENIZER.decode([i]) for i in (1000, 1001, 1002)]
    assert told["top_logprobs"] == [dict(zip(texts, (-0.5, -1.0, -7.0), strict=True)), None]
    told = completion_logprobs([1000], entries[:1], 2, TOKENIZER, 0)
    assert list(told["top_logprobs"][0]) == texts[:2]
    assert completion_logprobs([1000], entries[:1], 0, TOKENIZER, 0)["top_logprobs"] is None
