"""Whatever a body holds, its answer is never the server's fault: there is no 500."""

from __future__ import annotations

import copy
import json
import random

import httpx
import pytest

from tests.models.encoders import write_encoder, write_tokenizer
from tests.server.serving import serving
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server.embeddings import embeddings_router
from tilewise.server.live import live_router
from tilewise.server.messages import messages_router
from tilewise.server.responses import responses_router
from tilewise.server.routes import admin_router
from tilewise.server.scoring import scoring_router

ROUTERS = (admin_router, embeddings_router, live_router, messages_router, responses_router)
USER = {"role": "user", "content": "Once"}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
TOOL = {"type": "function", "function": FUNCTION}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
SAMPLING = {
    "n": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 1, "stop": ["."],
    "stop_token_ids": [5], "ignore_eos": False, "min_tokens": 0, "presence_penalty": 0.1,
    "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1.0},
    "bad_words": ["dog"], "allowed_token_ids": [5, 6], "include_stop_str_in_output": True,
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "prompt_logprobs": 1,
    "echo": True, "user": "u", "priority": 1, "cache_salt": "s", "return_token_ids": True,
    "truncate_prompt_tokens": 4, "add_special_tokens": True, "timeout": 60.0, "stream": False,
    "stream_options": {"include_usage": True}, "max_tokens": 2, "best_of": 1, "store": False,
    "length_penalty": 1.0, "use_beam_search": False, "metadata": {}, "suffix": "",
}  # fmt: skip
SEEDS = [
    ("/v1/completions", {"prompt": "Once", "max_tokens": 2}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "logprobs": 2, **SAMPLING}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "structured_outputs": {"json": SCHEMA}}),
    ("/v1/completions", {"prompt": "x", "max_tokens": 2, "use_beam_search": True, "n": 2}),
    ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 1, **SAMPLING}),
    ("/v1/chat/completions",
     {"messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}, USER,
                   {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning": "r"},
                   {"role": "tool", "tool_call_id": "c", "content": "1"}],
      "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}},
      "parallel_tool_calls": False, "max_tokens": 2}),
    ("/v1/chat/completions",
     {"messages": [USER], "tools": [TOOL], "tool_choice": "auto", "max_completion_tokens": 2,
      "reasoning_effort": "low", "chat_template_kwargs": {"a": 1}}),
    ("/v1/chat/completions", {"messages": [USER], "response_format": FORM, "max_tokens": 2}),
    ("/v1/responses",
     {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text",
                                                                 "text": "x"}]},
                {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "1"},
                {"type": "reasoning", "summary": []}],
      "instructions": "be", "tools": [{"type": "function", **FUNCTION}], "tool_choice": "auto",
      "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}},
      "reasoning": {"effort": "low"}, "max_output_tokens": 2, "temperature": 0.5, "store": False,
      "stream": False, "include": [], "truncation": "disabled", "conversation": None}),
    ("/v1/messages",
     {"model": "story", "max_tokens": 2, "system": [{"type": "text", "text": "x"}],
      "messages": [USER, {"role": "assistant", "content": [
          {"type": "thinking", "thinking": "t", "signature": ""}, {"type": "text", "text": "x"},
          {"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}]},
          {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t",
                                        "content": [{"type": "text", "text": "1"}],
                                        "is_error": False}]}],
      "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA, "strict": False}],
      "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
      "thinking": {"type": "enabled", "budget_tokens": 5}, "metadata": {"user_id": "u"},
      "output_config": {"effort": "low"}, "stop_sequences": ["."], "stream": False}),
    ("/v1/messages/count_tokens", {"model": "story", "messages": [USER], "system": "x"}),
    ("/v1/embeddings",
     {"input": ["x", "y"], "encoding_format": "base64", "pooling": "mean", "normalize": True,
      "dimensions": 128, "truncate_prompt_tokens": 3, "user": "u", "timeout": 60.0}),
    ("/tokenize", {"prompt": "x", "return_token_strs": True}),
    ("/tokenize", {"messages": [USER], "tools": [TOOL], "chat_template_kwargs": {"a": 1}}),
    ("/detokenize", {"tokens": [5, 6]}),
    ("/abort", {"request_ids": ["x"]}),
    ("/abort", {"all": True}),
]  # fmt: skip
_SCORED = {"truncate_prompt_tokens": 3, "user": "u", "priority": 1, "cache_salt": "s",
           "request_id": "r", "timeout": 60.0}  # fmt: skip
# Bodies for servers of an encoder; the first routes are another model's purpose.
SCORED_SEEDS = [
    ("/v1/rerank", {"query": "w7", "documents": ["w8 w9", {"text": "w7"}], "top_n": 1,
                    "return_documents": False, "use_activation": False, **_SCORED}),
    ("/v1/score", {"text_1": ["w7"], "text_2": ["w8", "w9"], "use_activation": True, **_SCORED}),
    ("/v1/score", {"text_1": ["w7", "w8"], "text_2": ["w8", "w9"]}),
    ("/v1/classify", {"input": ["w7", "w8 w9"], "add_special_tokens": True, **_SCORED}),
    ("/v1/classify", {"input": [[5, 6], [7]]}),
    ("/v1/embeddings", {"input": ["w7", "w8"], "dimensions": 4}),
    ("/v1/completions", {"prompt": "w7", "max_tokens": 2}),
    ("/tokenize", {"prompt": "w7"}),
]  # fmt: skip
VALUES = [
    None, True, False, 0, 1, -1, 3, 2**31, 2**63, -(2**70), 0.5, -0.0, 1e308, 1e-320, "", " ", "x",
    "auto", "required", "none", "null", "5", "\ud83d", "\x00", "<|endoftext|>", "é" * 300, "[",
    "[" * 300, [], [[]], [None], [1], [-1], [1, "x"], ["x"], [["x"]], [{}], {}, {"": None},
    {"type": "text"}, {"type": "function"}, {"type": ["text"]}, {"name": ["f"]}, {"x": {"x": {}}},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}},
    {"multipleOf": 0}, {"enum": []}, {"$ref": "#"}, {"pattern": "("}, [1] * 2000, ["x"] * 200,
]  # fmt: skip


def places(value, path=()):
    yield path
    if isinstance(value, dict | list):
        names = value if isinstance(value, dict) else range(len(value))
        for name in names:
            yield from places(value[name], (*path, name))


def changed(body, rng):
    """Return a body with one value or a few replaced, left out, doubled or moved elsewhere."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        path = rng.choice(list(places(body)))
        if not path:
            continue
        holder = body
        for name in path[:-1]:
            holder = holder[name]
        how = rng.random()
        if how < 0.7:
            holder[path[-1]] = copy.deepcopy(rng.choice(VALUES))
        elif how < 0.8:
            del holder[path[-1]]
        elif isinstance(holder, list):
            holder.append(copy.deepcopy(rng.choice(holder)))
        else:
            other = rng.choice(list(places(body)))
            value = body
            for name in other:
                value = value[name]
            holder[path[-1]] = copy.deepcopy(value)
    return body


@pytest.fixture(scope="module")
def running():
    llm = LLM("story", device="cpu", num_blocks=256, max_num_seqs=16)
    routers = lambda s: [router(s) for router in ROUTERS]  # noqa: E731
    with serving(AsyncLLM(llm), loop=llm.loop, tools="hermes", reasoning="think",
                 routers=routers) as running:  # fmt: skip
        yield running
    llm.close()


@pytest.fixture(scope="module")
def client(running):
    with httpx.Client(base_url=running.url, timeout=600) as client:
        yield client


@pytest.fixture(scope="module", params=["ForSequenceClassification", "Model"])
def scorer(request, tmp_path_factory):
    """A client of a model that scores pairs, and of one that embeds."""
    path = tmp_path_factory.mktemp("encoder")
    write_encoder(path, "Bert", request.param, num_labels=1)
    write_tokenizer(path)
    llm = LLM(path, device="cpu", max_num_seqs=8)
    routers = lambda s: [router(s) for router in (*ROUTERS, scoring_router)]  # noqa: E731
    with (
        llm,
        serving(AsyncLLM(llm), loop=llm.loop, routers=routers, purpose=llm.purpose) as running,
        httpx.Client(base_url=running.url, timeout=600) as client,
    ):
        yield client


def ask(client, path, body):
    told = client.post(path, content=json.dumps(body).encode())
    assert told.status_code < 500 or told.status_code == 503, (path, body, told.text)
    if told.status_code >= 400:
        error = told.json()["error"]
        assert error["message"], (path, body)
        assert len(error["message"]) < 2000, (path, body)
    return told


@pytest.mark.parametrize("number", range(len(SEEDS)))
def test_bodies_that_others_are_made_of_are_served(client, number):
    path, body = SEEDS[number]
    if path != "/v1/responses" and body.get("reasoning_effort") is None:
        told = ask(client, path, body)
        assert told.status_code in (200, 400), told.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice":
         {"type": "function", "function": {"name": ["f"]}}}, "tool_choice"),
        ("/v1/chat/completions", {"messages": [USER], "tools": [TOOL], "tool_choice":
         {"type": "function", "name": {"a": 1}}}, "tool_choice"),
        ("/v1/messages", {"model": "story", "max_tokens": 1, "messages": [{"role": "user",
         "content": [{"type": "tool_result", "tool_use_id": "t", "content": 1}]}]}, "content[0]"),
        ("/v1/messages", {"model": "story", "max_tokens": 1, "messages": [USER],
         "tools": [{"name": "f", "input_schema": SCHEMA}],
         "tool_choice": {"type": "tool", "name": ["f"]}}, "tool_choice"),
        ("/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": {"json":
         {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(500)}}}},
         None),
        ("/v1/completions", {"prompt": "x", "max_tokens": 4, "structured_outputs": {"json":
         {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(1500)}}}},
         "the grammar must be one that can be followed"),
    ],
)  # fmt: skip
def test_what_was_the_servers_fault_is_a_refusal_or_is_served(client, path, body, param):
    told = ask(client, path, body)
    if param is not None:
        assert told.status_code == 400
        assert param in told.json()["error"]["message"]


def test_changed_bodies_are_refused_or_served(client):
    rng = random.Random(20261128)
    for _ in range(200):
        path, body = rng.choice(SEEDS)
        ask(client, path, changed(body, rng))


@pytest.mark.parametrize(
    "count", [200, pytest.param(4000, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_changed_bodies_for_an_encoder_are_refused_or_served(scorer, count):
    rng = random.Random(20261129)
    for path, body in SCORED_SEEDS:
        ask(scorer, path, body)
    for _ in range(count):
        path, body = rng.choice(SCORED_SEEDS)
        ask(scorer, path, changed(body, rng))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(4))
def test_many_changed_bodies_are_refused_or_served(client, seed):
    rng = random.Random(seed)
    for _ in range(2000):
        path, body = rng.choice(SEEDS)
        ask(client, path, changed(body, rng))
