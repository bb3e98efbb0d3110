"""Bodies as clients that are not installed send them, literally, and what is wrong with others.

The shapes are those of the clients' own code: lm-eval marks its messages as text, guidellm up to
0.3 gives the number of tokens by both names, OpenAI's newer helpers send null for what is not set.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re

import httpx
import pytest

from tests.server.serving import serving
from tests.server.test_chat_tools import CALLS, says
from tilewise.server.embeddings import embeddings_router
from tilewise.server.messages import messages_router
from tilewise.server.responses import responses_router
from tilewise.server.templates import Templates

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages",
)  # fmt: skip
HI = [{"role": "user", "content": "Hi"}]
WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
TOOL = {"type": "function", "function": WEATHER}
CALL = {
    "id": "call_1", "type": "function", "index": 0,
    "function": {"name": "get_weather", "arguments": '{"city":"Ulm"}'},
}  # fmt: skip
# A message that a client has got and sends again, with all of its fields.
TOLD = {
    "content": "Hello", "refusal": None, "role": "assistant", "annotations": [], "audio": None,
    "function_call": None, "tool_calls": None, "reasoning_content": None,
}  # fmt: skip


def routers(service):
    return [messages_router(service), responses_router(service), embeddings_router(service)]


@pytest.fixture(scope="module")
def running():
    with serving(says(CALLS), tools="hermes", reasoning="think", routers=routers) as server:
        yield server


def ask(running, path, body):
    return httpx.post(running.url + path, json={"model": "story", **body}, timeout=30)


@pytest.mark.parametrize(
    ("client", "path", "body"),
    [
        ("lm-eval local-completions, likelihoods", TEXT,
         {"prompt": [[1, 2, 3], [4, 5]], "temperature": 0, "max_tokens": 1, "seed": 1234}),
        ("lm-eval local-completions, text", TEXT,
         {"prompt": ["Hi"], "max_tokens": 3, "temperature": 0, "stop": ["\n\n", "<|end|>"],
          "seed": 1234}),
        ("lm-eval local-chat-completions", CHAT,
         {"messages": [{"role": "user", "content": "Hi", "type": "text"}], "max_tokens": 3,
          "temperature": 0, "stop": ["</s>"], "seed": 1234}),
        ("lm-eval openai-chat-completions", CHAT,
         {"messages": HI, "max_completion_tokens": 3, "temperature": 0, "stop": ["x"],
          "seed": 1234}),
        ("guidellm up to 0.3, text", TEXT,
         {"prompt": "Hi", "stream": True, "stream_options": {"include_usage": True},
          "max_tokens": 3, "max_completion_tokens": 3, "stop": None, "ignore_eos": True}),
        ("guidellm up to 0.3, chat", CHAT,
         {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
          "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 3,
          "max_completion_tokens": 3, "stop": None, "ignore_eos": True}),
        ("guidellm since 0.4", TEXT,
         {"prompt": "Hi", "stream": True, "stop": None, "ignore_eos": True, "max_tokens": 3,
          "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
        ("vllm bench serve", TEXT,
         {"prompt": "Hi", "repetition_penalty": 1.0, "logprobs": None, "stream": True,
          "max_tokens": 3, "stream_options": {"include_usage": True}, "ignore_eos": True}),
        ("litellm, all that may be null", CHAT,
         {"messages": HI, "tools": None, "tool_choice": None, "parallel_tool_calls": None,
          "response_format": None, "metadata": None, "store": None, "stream": None,
          "stream_options": None, "max_tokens": 3}),
        ("litellm, a turn of tools", CHAT,
         {"messages": [*HI, {**TOLD, "content": None, "tool_calls": [CALL]},
                       {"role": "tool", "tool_call_id": "call_1", "name": "get_weather",
                        "content": "sunny"}], "tools": [TOOL], "max_tokens": 3}),
        ("langchain-openai, bound tools", CHAT,
         {"messages": [*HI, TOLD, *HI], "tools": [TOOL], "tool_choice": "auto",
          "parallel_tool_calls": False, "temperature": 0.7, "n": 1, "stream": False,
          "max_completion_tokens": 3}),
        ("instructor, parallel tools", CHAT,
         {"messages": HI, "tools": [TOOL, {**TOOL, "function": {**WEATHER, "name": "other"}}],
          "tool_choice": "auto", "max_tokens": 3}),
        ("openai's helpers for agents", CHAT,
         {"messages": HI, "prompt_cache_key": "conversation-1", "safety_identifier": "u-1",
          "max_completion_tokens": 3, "stream": None}),
        ("openai's responses for agents", RESPONSES,
         {"input": [{"role": "user", "content": "Hi"},
                    {"type": "function_call", "name": "get_weather", "call_id": "c",
                     "arguments": "{}", "id": "fc_1", "status": "completed"},
                    {"type": "function_call_output", "call_id": "c", "output": "sunny"}],
          "include": [], "store": False, "prompt_cache_key": "conversation-1",
          "reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "medium"},
          "tools": [{"type": "function", **WEATHER}], "tool_choice": "auto", "stream": True,
          "stream_options": {"include_obfuscation": False}}),
        ("Anthropic's agents", MESSAGES + "?beta=true",
         {"messages": [{"role": "user", "content": [
             {"type": "text", "text": "Hi", "cache_control": {"type": "ephemeral"}}]}],
          "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
          "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
          "metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024},
          "max_tokens": 3, "stream": True, "temperature": 1}),
    ],
)  # fmt: skip
def test_what_a_client_sends_is_served(running, client, path, body):
    answer = ask(running, path, body)
    assert answer.status_code == 200, (client, answer.text)
    is_stream = answer.headers["content-type"].startswith("text/event-stream")
    assert is_stream == bool(body.get("stream"))
    if path == TEXT and not is_stream:
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        assert len(answer.json()["choices"]) == len(prompts)
    if path in (TEXT, CHAT) and "max_completion_tokens" in body and not is_stream:
        assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("path", [TEXT, CHAT])
def test_two_names_of_a_number_must_agree(running, path):
    asked = {"prompt": "Hi"} if path == TEXT else {"messages": HI}
    answer = ask(running, path, {**asked, "max_tokens": 3, "max_completion_tokens": 4})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "max_completion_tokens"
    for name in ("max_tokens", "max_completion_tokens"):
        assert ask(running, path, {**asked, name: 2}).json()["usage"]["completion_tokens"] == 2


def test_the_newer_name_of_the_user_is_the_user(running, monkeypatch):
    users = []
    generate = running.engine.generate

    def spy(*args, user="", **more):
        users.append(user)
        return generate(*args, user=user, **more)

    monkeypatch.setattr(running.engine, "generate", spy)
    for body in ({"safety_identifier": "a"}, {"user": "b", "safety_identifier": "a"}, {}):
        assert ask(running, CHAT, {"messages": HI, "max_tokens": 1, **body}).status_code == 200
    assert ask(running, RESPONSES, {"input": "Hi", "safety_identifier": "c"}).status_code == 200
    assert users == ["a", "b", "", "c"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (RESPONSES, {"reasoning": {"effort": 5}}, "reasoning.effort"),
        (RESPONSES, {"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
        (RESPONSES, {"reasoning": {"bogus": None}}, "reasoning.bogus"),
        (RESPONSES, {"text": {"verbosity": "loud"}}, "text.verbosity"),
        (RESPONSES, {"text": {"bogus": 1}}, "text.bogus"),
        (RESPONSES, {"text": {"format": 5}}, "text.format"),
        (RESPONSES, {"store": "yes"}, "store"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include"),
        (RESPONSES, {"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        (RESPONSES, {"stream_options": {"include_obfuscation": True}},
         "stream_options.include_obfuscation"),
        (CHAT, {"store": 1}, "store"),
        (CHAT, {"metadata": "x"}, "metadata"),
        (CHAT, {"service_tier": 3}, "service_tier"),
        (CHAT, {"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (CHAT, {"truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (CHAT, {"suffix": "x"}, "suffix"),
        (RESPONSES, {"context_management": [{"type": "compaction", "compact_threshold": 9}]},
         "context_management"),
        (CHAT, {"context_management": {"bogus": 1}}, "context_management"),
        (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"max_completion_tokens": 0, "max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0, "use_beam_search": True}, "max_completion_tokens"),
        (CHAT, {"verbosity": "loud"}, "verbosity"),
        (CHAT, {"messages": [{"role": "user", "content": "Hi", "type": "image"}]},
         "messages[0].type"),
        (CHAT, {"safety_identifier": "x" * 257}, "safety_identifier"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(running, path, body, param):
    asked = {"input": "Hi"} if path == RESPONSES else {"messages": HI}
    answer = ask(running, path, {**asked, **body})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


SCHEMA = {"type": "object"}
CLAUDES = {"name": "f", "input_schema": SCHEMA}


def asks(content, role="user"):
    return {"messages": [{"role": role, "content": content}], "max_tokens": 3}


def turns(*items):
    return {"input": [{"role": "user", "content": "Hi"}, *items]}


TEXT_OF = {"type": "text", "text": "Hi"}
USED = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
CALLED = {"type": "function_call", "name": "get_weather", "call_id": "c", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "sunny"}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (CHAT, asks([{**TEXT_OF, "bogus": 1}]), "messages[0].content[0].bogus"),
        (CHAT, {**asks("Hi"), "tools": [TOOL], "tool_choice": {
            "type": "function", "function": {"name": "get_weather"}, "bogus": 1}},
         "tool_choice.bogus"),
        (CHAT, {**asks("Hi"), "tools": [TOOL], "tool_choice": {
            "type": "function", "function": {"name": "get_weather", "bogus": 1}}},
         "tool_choice.function.bogus"),
        (CHAT, {**asks("Hi"), "response_format": {"type": "text", "schema": SCHEMA}},
         "response_format.schema"),
        (CHAT, {**asks("Hi"), "response_format": {**JSON_SCHEMA, "strict": True}},
         "response_format.strict"),
        (CHAT, {**asks("Hi"), "response_format": {
            "type": "json_schema", "json_schema": {"schema": SCHEMA, "bogus": 1}}},
         "response_format.json_schema.bogus"),
        (TEXT, {"prompt": "Hi", "response_format": {"type": "json_object", "bogus": 1}},
         "response_format.bogus"),
        (RESPONSES, turns({"role": "user", "content": "Hi", "bogus": 1}), "input[1].bogus"),
        (RESPONSES, turns({"role": "user", "content": [{"type": "input_text", "text": "x",
                                                        "detail": "high"}]}),
         "input[1].content[0].detail"),
        (RESPONSES, turns({**CALLED, "namespace": "n"}), "input[1].namespace"),
        (RESPONSES, turns({**CALLED, "caller": {"type": "program", "caller_id": "p"}}),
         "input[1].caller"),
        (RESPONSES, turns(CALLED, {**OUTPUT, "bogus": 1}), "input[2].bogus"),
        (RESPONSES, turns({"type": "reasoning", "summary": [], "bogus": 1}), "input[1].bogus"),
        (RESPONSES, {"input": "Hi", "tools": [{"type": "function", **WEATHER, "async": True}]},
         "tools[0].async"),
        (RESPONSES, {"input": "Hi", "tools": [{"type": "function", **WEATHER, "bogus": 1}]},
         "tools[0].bogus"),
        (RESPONSES, {"input": "Hi", "text": {"format": {
            "type": "json_schema", "name": "n", "schema": SCHEMA, "bogus": 1}}},
         "text.format.bogus"),
        (MESSAGES, asks([{**TEXT_OF, "bogus": 1}]), "messages[0].content[0].bogus"),
        (MESSAGES, {**asks("Hi"), "system": [{**TEXT_OF, "bogus": 1}]}, "system[0].bogus"),
        (MESSAGES, {"messages": [{"role": "user", "content": "Hi", "name": "n"}],
                    "max_tokens": 3}, "messages[0].name"),
        (MESSAGES, asks([{"type": "thinking", "thinking": "x", "bogus": 1}], "assistant"),
         "messages[0].content[0].bogus"),
        (MESSAGES, asks([{**USED, "toolset_name": "n"}], "assistant"),
         "messages[0].content[0].toolset_name"),
        (MESSAGES, asks([{**USED, "caller": {"type": "code_execution_20260120"}}], "assistant"),
         "messages[0].content[0].caller"),
        (MESSAGES, asks([{**RESULT, "is_error": "yes"}]), "messages[0].content[0].is_error"),
        (MESSAGES, asks([{**RESULT, "bogus": 1}]), "messages[0].content[0].bogus"),
        (MESSAGES, {**asks("Hi"), "tools": [{**CLAUDES, "defer_loading": True}]},
         "tools[0].defer_loading"),
        (MESSAGES, {**asks("Hi"), "tools": [{**CLAUDES, "input_examples": [{"a": 1}]}]},
         "tools[0].input_examples"),
        (MESSAGES, {**asks("Hi"), "tools": [{**CLAUDES, "bogus": 1}]}, "tools[0].bogus"),
        (MESSAGES, {**asks("Hi"), "tools": [CLAUDES], "tool_choice": {"type": "any", "bogus": 1}},
         "tool_choice.bogus"),
        (MESSAGES, {**asks("Hi"), "thinking": {"type": "enabled", "budget_tokens": 0}},
         "thinking.budget_tokens"),
        (MESSAGES, {**asks("Hi"), "thinking": {"type": "adaptive", "budget_tokens": 9}},
         "thinking.budget_tokens"),
        (MESSAGES, {**asks("Hi"), "thinking": {"type": "enabled", "display": "short"}},
         "thinking.display"),
        (MESSAGES, {**asks("Hi"), "thinking": {"type": "enabled", "bogus": 1}}, "thinking.bogus"),
        (MESSAGES, {**asks("Hi"), "output_config": {"format": {"type": "regex", "schema": SCHEMA}}},
         "output_config.format.type"),
        (MESSAGES, {**asks("Hi"), "output_config": {"format": {
            "type": "json_schema", "schema": SCHEMA, "bogus": 1}}}, "output_config.format.bogus"),
    ],
)  # fmt: skip
def test_what_is_asked_inside_a_field_and_not_served_is_named(running, path, body, name):
    answer = ask(running, path, body)
    assert answer.status_code == 400, answer.text
    told = answer.json()["error"]
    assert name in told["message"]
    assert told.get("param", name) == name


CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, asks([{**TEXT_OF, **CACHED, "annotations": [], "id": "x", "index": 0}])),
        (CHAT, {**asks("Hi"), "tools": [{"type": "function", "strict": True, "function": {
            **WEATHER, "return": {"type": "string"}}}]}),
        (RESPONSES, turns(
            {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
             "phase": "final_answer", "content": [
                 {"type": "output_text", "text": "x", "annotations": [], "logprobs": []}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x",
             "content": None, "status": None},
            {**CALLED, "id": "fc_1", "status": "completed", "caller": None, "namespace": None},
            {**OUTPUT, "id": "fo_1", "status": "completed", "caller": {"type": "direct"}})),
        (RESPONSES, {"input": "Hi", "tools": [
            {"type": "function", **WEATHER, "defer_loading": False, "allowed_callers": None}]}),
        (MESSAGES, {"messages": [
            {"role": "user", "content": [{**TEXT_OF, **CACHED, "citations": None}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "x", "signature": ""},
                {**USED, **CACHED, "caller": {"type": "direct"}, "toolset_name": None}]},
            {"role": "user", "content": [{**RESULT, **CACHED, "is_error": False}]},
            {"role": "system", "content": "Be brief."}],
            "tools": [{**CLAUDES, **CACHED, "strict": True, "eager_input_streaming": True}],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
            "thinking": {"type": "adaptive", "display": "summarized"}, "max_tokens": 3}),
    ],
)  # fmt: skip
def test_what_asks_for_nothing_inside_a_field_is_taken(running, path, body):
    answer = ask(running, path, body)
    assert answer.status_code == 200, answer.text


@pytest.fixture
def structured(running, monkeypatch):
    """What the engine, which follows no schema here, is asked to follow."""
    asked = []
    generate = running.engine.generate

    def spy(prompt, sampling, **more):
        asked.append(sampling.structured)
        return generate(prompt, dataclasses.replace(sampling, structured=None), **more)

    monkeypatch.setattr(running.engine, "generate", spy)
    return asked


def test_a_schema_may_stand_beside_json_object(running, structured):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    named = {"name": "n", "description": "d", "strict": True, "schema": schema}
    forms = [
        {"type": "json_object", "schema": schema}, {"type": "json_object"},
        {"type": "json_schema", "json_schema": named},
    ]  # fmt: skip
    for path, body in ((CHAT, {"messages": HI}), (TEXT, {"prompt": "Hi"})):
        for form in forms:
            body = {**body, "response_format": form, "max_tokens": 2}
            answer = ask(running, path, body)
            assert answer.status_code == 200, answer.text
    followed = [json.loads(one.description) for one in structured]
    assert followed == [schema, {"type": "object"}, schema] * 2


def test_what_a_tool_or_a_thinker_is_told_reaches_the_template(running, monkeypatch):
    rendered = []
    render = Templates.render

    def spy(self, source, given):
        rendered.append(given)
        return render(self, source, given)

    monkeypatch.setattr(Templates, "render", spy)
    for is_error in (True, False, None):
        body = asks([{**RESULT, "content": [TEXT_OF], "is_error": is_error}])
        body["thinking"] = {"type": "enabled", "budget_tokens": 2048}
        assert ask(running, MESSAGES, body).status_code == 200
    assert [one["messages"][0]["content"] for one in rendered] == ["Error: Hi", "Hi", "Hi"]
    assert [one["thinking_budget"] for one in rendered] == [2048] * 3


def test_thinking_that_is_omitted_is_a_block_without_its_text(running):
    for is_stream in (False, True):
        body = {**asks("Count."), "max_tokens": 200, "stream": is_stream}
        shown, hidden = (
            ask(running, MESSAGES, {**body, "thinking": {"type": "adaptive", "display": how}}).text
            for how in ("summarized", "omitted")
        )
        told = ["thinking_delta" in one for one in (shown, hidden)]
        assert told == ([True, False] if is_stream else [False, False])
        assert ["Two calls." in one for one in (shown, hidden)] == [not is_stream, False]
        assert re.search('"thinking": ?""', hidden)
        assert shown.count("text_delta") == hidden.count("text_delta")
        if not is_stream:
            assert json.loads(shown)["content"][1:] == json.loads(hidden)["content"][1:]


def test_a_response_says_which_tools_schemas_are_followed(running, structured):
    for choice, is_asked in itertools.product(("auto", None, "required"), (True, False, None)):
        tools = [{"type": "function", **WEATHER, "strict": is_asked}]
        is_followed = is_asked is True or choice == "required"
        body = {"input": "Hi", "tools": tools, "tool_choice": choice, "max_output_tokens": 3}
        [told] = ask(running, RESPONSES, body).json()["tools"]
        assert told == {**tools[0], "strict": is_followed}


def test_anthropics_metadata_has_a_user_and_nothing_else(running):
    asked = {"messages": HI, "max_tokens": 2}
    answer = ask(running, MESSAGES, {**asked, "metadata": {"user_id": "u", "bogus": 1}})
    assert answer.status_code == 400
    assert "metadata.bogus" in answer.json()["error"]["message"]


def test_a_mistake_of_the_server_has_the_shape_of_its_errors(running, monkeypatch):
    def broken(*_):
        raise KeyError("secret")

    monkeypatch.setattr("tilewise.server.app.prompts_of", broken)
    answer = ask(running, TEXT, {"prompt": "Hi"})
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the server failed: KeyError"
    assert "secret" not in answer.text
    monkeypatch.undo()
    assert ask(running, TEXT, {"prompt": "Hi", "max_tokens": 1}).status_code == 200


IGNORED = [
    (CHAT, {"store": True}, "store"), (CHAT, {"verbosity": "low"}, "verbosity"),
    (CHAT, {"metadata": {"a": "b"}, "service_tier": "flex"}, "metadata, service_tier"),
    (CHAT, {"prompt_cache_retention": "24h"}, "prompt_cache_retention"),
    (CHAT, {"store": False, "metadata": {}, "service_tier": "auto"}, None),
    (RESPONSES, {"store": True, "include": ["reasoning.encrypted_content"]}, "store, include"),
    (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity"),
    (RESPONSES, {"context_management": []}, None),
    (MESSAGES, {"service_tier": "standard_only"}, "service_tier"),
    (MESSAGES, {"context_management": {"edits": [{"type": "clear_thinking_20251015",
                                                  "keep": "all"}]}}, "context_management"),
    (MESSAGES, {"context_management": {"edits": []}}, None),
]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("path", "body", "names"), IGNORED)
def test_what_changes_nothing_is_taken_and_named_in_a_header(running, path, body, names, is_stream):
    asked = {"input": "Hi"} if path == RESPONSES else {"messages": HI}
    limit = "max_output_tokens" if path == RESPONSES else "max_tokens"
    answer = ask(running, path, {**asked, limit: 2, "stream": is_stream, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers.get("x-tilewise-ignored") == names


def test_a_responses_metadata_is_told_again(running):
    body = {"input": "Hi", "max_output_tokens": 2, "metadata": {"a": "b"}}
    assert ask(running, RESPONSES, body).json()["metadata"] == {"a": "b"}


@pytest.mark.parametrize(("path", "more", "kept"), [
    (TEXT, {"max_tokens": 24}, 1000), (TEXT, {"max_tokens": 1}, 1023), (TEXT, {}, 1008),
    (CHAT, {"max_completion_tokens": 24}, 1000), (CHAT, {}, 1023),
])  # fmt: skip
def test_a_prompt_may_be_cut_to_what_the_context_has_room_for(running, path, more, kept):
    long = "so " * 3000
    asked = {"prompt": long} if path == TEXT else {"messages": [{"role": "user", "content": long}]}
    answer = ask(running, path, {**asked, "truncate_prompt_tokens": -1, **more})
    assert answer.json()["usage"]["prompt_tokens"] == kept
    assert ask(running, path, {**asked, **more}).status_code == 400


def test_a_call_that_was_cut_off_may_be_sent_back_in_every_form(running):
    cut = '{"city": "Par'
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": cut}}
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"partial_json": cut}}
    chats = {
        CHAT: {"messages": [*HI, {"role": "assistant", "content": None, "tool_calls": [call]},
                            {"role": "tool", "tool_call_id": "c", "content": "x"}]},
        RESPONSES: {"input": [*HI, {**CALLED, "arguments": cut, "status": "incomplete"}, OUTPUT]},
        MESSAGES: {"messages": [*HI, {"role": "assistant", "content": [used]},
                                {"role": "user", "content": [{**RESULT, "tool_use_id": "c"}]}],
                   "max_tokens": 2},
    }  # fmt: skip
    seen = []
    render = running.service.template.renderer.render
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            running.service.template.renderer, "render",
            lambda source, told: seen.append(told["messages"]) or render(source, told),
        )  # fmt: skip
        for path, body in chats.items():
            assert ask(running, path, body).status_code == 200
    for messages in seen:
        # The template writes no calls, so they are a part of the text.
        [one] = [m["content"] for m in messages if m["role"] == "assistant"]
        assert '"arguments": {"city": "Par"}}' in one
    assert len(seen) == 3
