"""/v1/responses and /v1/messages: the same chats in other forms."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.server.serving import serving
from tests.server.test_chat_tools import CALLS, says
from tilewise.server.messages import messages_router
from tilewise.server.responses import responses_router

TOOL = {"type": "object", "properties": {"a": {}}}


def routers(service):
    return [messages_router(service), responses_router(service)]


@pytest.fixture(scope="module")
def running():
    with serving(says(CALLS), tools="hermes", reasoning="think", routers=routers) as server:
        yield server


@pytest.fixture(scope="module")
def plain():
    with serving(says("A short story."), routers=routers) as server:
        yield server


def test_a_response_holds_reasoning_a_message_and_calls(running):
    tools = [{"type": "function", "name": name, "parameters": TOOL} for name in ("add", "sub")]
    asked = {"model": "story", "input": "Count.", "instructions": "Be brief.", "tools": tools}
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="x", max_retries=0) as client:
        whole = client.responses.create(**asked)
        assert [item.type for item in whole.output] == [
            "reasoning", "message", "function_call", "function_call",
        ]  # fmt: skip
        assert whole.status == "completed"
        assert whole.output_text == "Here:"
        assert whole.output[0].content[0].text == "Two calls."
        calls = [(c.name, json.loads(c.arguments)) for c in whole.output[2:]]
        assert calls == [("add", {"a": 1}), ("sub", {"a": [2, "x"]})]
        assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
        events = list(client.responses.create(**asked, stream=True))
    final = events[-1].response
    assert [e.sequence_number for e in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"
    assert final.output_text == whole.output_text
    assert [i.type for i in final.output] == [i.type for i in whole.output]
    assert final.usage == whole.usage
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == "Here:"
    arguments = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert [json.loads(a) for a in arguments] == [{"a": 1}, {"a": [2, "x"]}]


def test_a_conversation_goes_on_with_the_results_of_calls(running):
    conversation = [
        {"role": "user", "content": "Count."},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "1", "output": "2"},
        {"role": "user", "content": [{"type": "input_text", "text": "And?"}]},
    ]
    answer = httpx.post(f"{running.url}/v1/responses", json={"input": conversation})
    assert answer.status_code == 200


def test_a_response_that_is_cut_off_says_so(plain):
    body = {"input": "Tell.", "max_output_tokens": 2}
    answer = httpx.post(f"{plain.url}/v1/responses", json=body).json()
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["usage"]["output_tokens"] == 2


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": [{"type": "computer_call"}]}, "input[0].type"),
        ({"wrong": 1}, "wrong"),
    ],
)
def test_what_responses_do_not_serve_is_named(plain, more, param):
    answer = httpx.post(f"{plain.url}/v1/responses", json={"input": "x", **more})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def read_events(text):
    events = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        events.append(content)
    return events


def test_a_message_streams_what_it_answers_whole(running):
    tools = [{"name": name, "input_schema": TOOL} for name in ("add", "sub")]
    body = {
        "model": "story", "max_tokens": 200, "tools": tools, "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "Count."}]}],
    }  # fmt: skip
    url = f"{running.url}/v1/messages"
    whole = httpx.post(url, json=body).json()
    kinds = [block["type"] for block in whole["content"]]
    assert kinds == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["stop_reason"] == "tool_use"
    assert whole["content"][1]["text"] == "Here:"
    assert [b["input"] for b in whole["content"][2:]] == [{"a": 1}, {"a": [2, "x"]}]
    events = read_events(httpx.post(url, json={**body, "stream": True}).text)
    assert [e["type"] for e in events if "block" not in e["type"]] == [
        "message_start", "message_delta", "message_stop",
    ]  # fmt: skip
    starts = [e for e in events if e["type"] == "content_block_start"]
    assert [e["index"] for e in starts] == [0, 1, 2, 3]
    assert [e["content_block"]["type"] for e in starts] == kinds
    written = {}
    for e in events:
        if e["type"] == "content_block_delta" and "partial_json" in e["delta"]:
            written[e["index"]] = written.get(e["index"], "") + e["delta"]["partial_json"]
    assert [json.loads(written[i]) for i in (2, 3)] == [{"a": 1}, {"a": [2, "x"]}]
    assert events[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    count = httpx.post(
        f"{url}/count_tokens", json={k: v for k, v in body.items() if k != "max_tokens"}
    ).json()
    assert count["input_tokens"] == whole["usage"]["input_tokens"]


def test_a_message_takes_results_stops_and_an_answer_that_is_begun(plain):
    url = f"{plain.url}/v1/messages"
    messages = [
        {"role": "user", "content": "Count."},
        {"role": "assistant", "content": [
            {"type": "text", "text": "So:"},
            {"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
    ]  # fmt: skip
    body = {"model": "story", "max_tokens": 50, "messages": messages}
    assert httpx.post(url, json=body).json()["stop_reason"] == "end_turn"
    stopped = httpx.post(url, json={**body, "stop_sequences": ["story"]}).json()
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "story")
    assert stopped["content"][0]["text"] == "A short "
    short = httpx.post(url, json={**body, "max_tokens": 1}).json()
    assert short["stop_reason"] == "max_tokens"
    begun = [messages[0], {"role": "assistant", "content": "Once"}]
    assert httpx.post(url, json={**body, "messages": begun}).status_code == 200


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages\\[0\\].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "content\\[0\\].type"),
        ({"tools": [{"type": "bash", "name": "x"}]}, "tools\\[0\\].type"),
        ({"mcp_servers": [{}]}, "mcp_servers is not served"),
        ({"odd": 1}, "odd is not a known field"),
    ],
)
def test_what_messages_do_not_serve_is_named_in_anthropics_form(plain, more, words):
    body = {"model": "story", "max_tokens": 5, "messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{plain.url}/v1/messages", json={**body, **more})
    assert answer.status_code == 400
    content = answer.json()
    assert content["type"] == "error"
    assert content["error"]["type"] == "invalid_request_error"
    with pytest.raises(AssertionError, match=words):
        raise AssertionError(content["error"]["message"])
