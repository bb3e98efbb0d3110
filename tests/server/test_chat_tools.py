"""Tools and reasoning through the whole server, with OpenAI's client."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from tests.server.fake_engine import STORY, FakeEngine
from tests.server.serving import serving
from tilewise.engine.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer(STORY)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
    for name in ("add", "sub")
]
CALLS = (
    "<think>Two calls.</think>Here:\n"
    '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
    '<tool_call>{"name": "sub", "arguments": {"a": [2, "x"]}}</tool_call>'
)


def says(text):
    """An engine whose every answer is this text and then the end token."""
    engine = FakeEngine()
    engine.script = [*TOKENIZER.encode(text, adds_special_tokens=False), 0]
    assert TOKENIZER.decode(engine.script) == text  # its alphabet can write it
    return engine


@pytest.fixture(scope="module")
def running():
    with serving(says(CALLS), tools="hermes", reasoning="think") as server:
        yield server


@pytest.fixture(scope="module")
def client(running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


ASKED = {
    "model": "story",
    "messages": [{"role": "user", "content": "Count."}],
    "tools": TOOLS,
    "max_tokens": 200,
}


def test_calls_of_tools_are_found_and_a_stream_adds_up_to_the_whole(client):
    [choice] = client.chat.completions.create(**ASKED).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Here:"
    assert choice.message.model_extra["reasoning_content"] == "Two calls."
    names = [call.function.name for call in choice.message.tool_calls]
    arguments = [json.loads(call.function.arguments) for call in choice.message.tool_calls]
    assert names == ["add", "sub"]
    assert arguments == [{"a": 1}, {"a": [2, "x"]}]
    with client.chat.completions.stream(**ASKED) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.content == "Here:"
    assert [c.function.name for c in final.message.tool_calls] == names
    assert [json.loads(c.function.arguments) for c in final.message.tool_calls] == arguments
    ids = {call.id for call in final.message.tool_calls}
    assert len(ids) == 2


def test_one_finish_reason_and_stable_indices_in_a_stream(client):
    reasons, seen = [], {}
    for chunk in client.chat.completions.create(**ASKED, stream=True):
        for choice in chunk.choices:
            reasons += [choice.finish_reason] if choice.finish_reason else []
            for call in choice.delta.tool_calls or []:
                if call.id:
                    assert call.index not in seen
                    seen[call.index] = call.function.name
    assert reasons == ["tool_calls"]
    assert seen == {0: "add", 1: "sub"}


def test_parallel_calls_may_be_forbidden_and_tools_left_out(client):
    [choice] = client.chat.completions.create(**ASKED, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["add"]
    [choice] = client.chat.completions.create(**ASKED, tool_choice="none").choices
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert "<tool_call>" in choice.message.content
    [choice] = client.chat.completions.create(
        **ASKED, extra_body={"include_reasoning": False}
    ).choices
    assert "reasoning_content" not in choice.message.model_extra


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "maybe"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "mul"}}}, "tool_choice"),
        ({"tools": [], "tool_choice": "auto"}, "tools"),
        ({"tools": TOOLS * 100}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 70_000}}]}, "tools"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"max_completion_tokens": 3, "max_tokens": 2}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ],
)
def test_what_is_wrong_with_tools_is_named(running, more, param):
    answer = httpx.post(f"{running.url}/v1/chat/completions", json={**ASKED, **more})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_tools_are_refused_where_nobody_knows_how_the_model_calls_them():
    with serving(says("Yes.")) as plain:
        answer = httpx.post(f"{plain.url}/v1/chat/completions", json=ASKED)
        assert answer.status_code == 400
        assert "--tool-call-parser" in answer.json()["error"]["message"]
