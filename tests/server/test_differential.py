"""A stream adds up to the whole answer, and both are LLM.generate's, for fields drawn at random.

Over the packaged model the three are compared; over an engine that says what a test wants, the
forms of a chat are: reasoning, calls of tools, all routes.
"""

from __future__ import annotations

import json

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.server.calls.test_parser import ATOMS, message
from tests.server.fake_engine import STORY, FakeEngine
from tests.server.serving import serving
from tests.server.wire import chat_of, completion_of, events_of, message_of, named_events_of
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.tokenizer import load_tokenizer
from tilewise.server.calls.parser import CallParser
from tilewise.server.calls.parts import PlainParser
from tilewise.server.calls.table import FORMATS, call_format
from tilewise.server.chat_format import format_of, reasoning_format
from tilewise.server.messages import messages_router
from tilewise.server.reasoning import ThinkParser
from tilewise.server.responses import responses_router

TOKENIZER = load_tokenizer(STORY)
PROMPTS = [
    "Once upon a time, there was a little",
    "The dragon and the café",
    TOKENIZER.encode("A boat on the river"),
    [TOKENIZER.encode("One day")[-1]],
]
EVERYDAY = settings(
    max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
LONG = settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def llm():
    made = LLM("story", device="cpu", num_blocks=512, max_num_seqs=32)
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(llm):
    with serving(AsyncLLM(llm), loop=llm.loop) as server:
        yield server


@pytest.fixture(scope="module")
def http():
    with httpx.Client(timeout=60) as client:
        yield client


def some(strategy):
    """Half of the time nothing: most fields of most requests are left out."""
    return st.one_of(st.none(), strategy)


TOKENS = st.integers(1, 4095)
FIELDS = st.fixed_dictionaries(
    {
        "max_tokens": st.integers(1, 20),
        "temperature": st.sampled_from([0.0, 0.0, 0.4, 1.0, 1.7]),
        "seed": st.integers(0, 2**31),
        "n": st.integers(1, 3),
        "best_of": some(st.integers(3, 4)),
        "top_p": some(st.floats(0.05, 1.0)),
        "top_k": some(st.integers(-1, 50)),
        "min_p": some(st.floats(0.0, 0.5)),
        "stop": some(st.sampled_from(["e", " the", ["her", "a", "."], ["\n"], "Once upon"])),
        "stop_token_ids": some(st.lists(TOKENS, max_size=30)),
        "ignore_eos": some(st.booleans()),
        "min_tokens": some(st.integers(0, 8)),
        "presence_penalty": some(st.floats(-2, 2)),
        "frequency_penalty": some(st.floats(-2, 2)),
        "repetition_penalty": some(st.floats(0.5, 2)),
        "logit_bias": some(st.dictionaries(TOKENS.map(str), st.floats(-100, 100), max_size=4)),
        "allowed_token_ids": some(st.lists(TOKENS, min_size=3, max_size=40, unique=True)),
        "bad_words": some(st.lists(st.sampled_from(["girl", "the", "a "]), max_size=2)),
        "include_stop_str_in_output": some(st.booleans()),
        "skip_special_tokens": some(st.booleans()),
        "logprobs": some(st.integers(0, 5)),
        "prompt_logprobs": some(st.integers(0, 3)),
        "echo": some(st.booleans()),
        "structured_outputs": some(
            st.sampled_from(
                [
                    {"choice": ["yes", "no", "maybe so"]},
                    {"regex": "[a-c]{2,9}"},
                    {"json": {"type": "object", "properties": {"a": {"type": "boolean"}}}},
                ]
            )
        ),
        "prompt": st.sampled_from([*PROMPTS, PROMPTS[:2], PROMPTS[2:]]),
    }
)


def possible(fields):
    """Leave out what is left out, and what no request may combine."""
    asked = {name: value for name, value in fields.items() if value is not None}
    if asked["temperature"] == 0:
        asked["n"] = 1
        asked.pop("best_of", None)
    if "best_of" in asked:
        asked["n"] = min(asked["n"], asked["best_of"])
    if "structured_outputs" in asked:  # these may leave no token to draw
        for name in ("allowed_token_ids", "bad_words", "min_tokens", "stop_token_ids"):
            asked.pop(name, None)
    asked["min_tokens"] = min(asked.get("min_tokens", 0), asked["max_tokens"])
    return asked


def offline(llm, asked):
    """Return what LLM.generate makes of the same request."""
    names = set(asked) - {"prompt", "echo", "structured_outputs"}
    fields = {name: asked[name] for name in names}
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(k): v for k, v in fields["logit_bias"].items()}
    if asked.get("structured_outputs"):
        fields["structured"] = StructuredOutputs(**asked["structured_outputs"])
    if asked.get("echo") and "logprobs" in asked and "prompt_logprobs" not in asked:
        fields["prompt_logprobs"] = asked["logprobs"]
    prompt = asked["prompt"]
    is_many = isinstance(prompt, list) and not isinstance(prompt[0], int)
    prompts = [p if isinstance(p, str) else {"prompt_token_ids": p}
               for p in (prompt if is_many else [prompt])]  # fmt: skip
    return llm.generate(prompts, SamplingParams(**fields))


def check_completion(llm, running, http, fields):
    asked = possible(fields)
    body = {**asked, "return_token_ids": True}
    url = f"{running.url}/v1/completions"
    answer = http.post(url, json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    options = {"include_usage": True, "continuous_usage_stats": True}
    streamed = http.post(url, json={**body, "stream": True, "stream_options": options})
    assert streamed.status_code == 200, streamed.text
    added = completion_of(events_of(streamed.text))
    for one in (whole, added):  # drawn anew for each answer
        one.pop("id")
        one.pop("created")
        one["usage"].pop("prompt_tokens_details")  # the second finds what the first has cached
    assert added == whole
    n, choices = asked["n"], whole["choices"]
    outputs = offline(llm, asked)
    assert len(choices) == n * len(outputs)
    assert whole["usage"]["prompt_tokens"] == sum(len(o.prompt_token_ids) for o in outputs)
    assert whole["usage"]["completion_tokens"] == sum(
        len(c.token_ids) for o in outputs for c in o.outputs
    )
    for i, choice in enumerate(choices):
        output = outputs[i // n]
        sample = output.outputs[i % n]
        echo = ""
        if asked.get("echo"):
            echo = output.prompt or TOKENIZER.decode(output.prompt_token_ids)
        assert choice["index"] == i
        assert choice["text"] == echo + sample.text
        assert choice["token_ids"] == sample.token_ids
        assert choice["finish_reason"] == sample.finish_reason
        assert choice["stop_reason"] == sample.stop_reason
        if "logprobs" in asked:
            entries = list(sample.logprobs)
            ids = list(sample.token_ids)
            if echo:
                entries = [*output.prompt_logprobs, *entries]
                ids = [*output.prompt_token_ids, *ids]
            told = choice["logprobs"]["token_logprobs"]
            assert told == [
                None if entry is None else max(entry[token], -9999.0)
                for entry, token in zip(entries, ids, strict=True)
            ]
            check_places(choice)


def check_places(choice):
    """Each whole token stands in the text where its offset says, as far as the text goes."""
    logprobs, text = choice["logprobs"], choice["text"]
    assert len(logprobs["tokens"]) == len(logprobs["text_offset"])
    for token, place in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<|")) and place + len(token) <= len(text):
            assert text[place : place + len(token)] == token or "\ufffd" in text


@EVERYDAY
@given(FIELDS)
def test_every_field_means_the_same_streamed_whole_and_offline(llm, running, http, fields):
    check_completion(llm, running, http, fields)


@pytest.mark.slow
@LONG
@given(FIELDS)
def test_many_fields_mean_the_same_streamed_whole_and_offline(llm, running, http, fields):
    check_completion(llm, running, http, fields)


# Chats over an engine that says what the test wants.


@pytest.fixture(scope="module")
def talking():
    def routers(service):
        return [messages_router(service), responses_router(service)]

    engine = FakeEngine()
    with serving(engine, routers=routers) as server:
        yield server


NAMES = ("add", "sub")
TOOLS = [{"type": "function", "function": {"name": name}} for name in NAMES]
SAYINGS = st.lists(st.sampled_from(ATOMS), max_size=10).map("".join)
CASES = st.fixed_dictionaries(
    {
        "text": SAYINGS,
        "parser": st.sampled_from(["none", *(form.name for form in FORMATS)]),
        "thinks": st.booleans(),
        "max_tokens": st.sampled_from([3, 17, 400]),
        "n": st.integers(1, 2),
        "logprobs": st.booleans(),
        "one": st.booleans(),
        "stop": some(st.sampled_from(["}", "call", "[", "Text."])),
    }
)


def says(running, case):
    """Have the engine say a text and then end."""
    ids = TOKENIZER.encode(case["text"], adds_special_tokens=False)
    running.engine.script = [*ids, 0]
    running.service.form = format_of("", case["parser"], "think" if case["thinks"] else "none")


def parsed(case, text):
    """Return content, reasoning and calls as the parser finds them in the text at once."""
    form = call_format(case["parser"])
    parser = PlainParser() if form is None else CallParser(form.syntax, NAMES)
    if case["thinks"]:
        parser = ThinkParser(reasoning_format("think"), parser)
    content, reasoning, calls = message(parser, [text] if text else [])
    return content, reasoning, calls[: 1 if case["one"] else None]


def check_chat(running, http, case):
    says(running, case)
    body = {
        "messages": [{"role": "user", "content": "x"}], "max_tokens": case["max_tokens"],
        "n": case["n"], "return_token_ids": True, "parallel_tool_calls": not case["one"],
    }  # fmt: skip
    if case["parser"] != "none":
        body["tools"] = TOOLS
    if case["logprobs"]:
        body |= {"logprobs": True, "top_logprobs": 2}
    if case["stop"]:
        body["stop"] = case["stop"]
    url = f"{running.url}/v1/chat/completions"
    answer = http.post(url, json=body)
    assert answer.status_code == 200, answer.text
    whole = answer.json()
    options = {"include_usage": True}
    streamed = http.post(url, json={**body, "stream": True, "stream_options": options})
    added = chat_of(events_of(streamed.text))
    assert added["usage"] == whole["usage"]
    for one, other in zip(added["choices"], whole["choices"], strict=True):
        calls = [(c["id"], c["function"]) for c in one["message"].pop("tool_calls", [])]
        # The ids are drawn from the answer's own, so they differ between two answers.
        mine = [f for _, f in calls]
        theirs = [c["function"] for c in other["message"].pop("tool_calls", [])]
        assert mine == theirs
        assert len({i for i, _ in calls}) == len(calls)
        if other["message"]["content"] is None:  # a stream has said "" before it knew of calls
            other["message"]["content"] = ""
        assert one == other
        if case["stop"] is None:
            text = TOKENIZER.decode([t for t in other["token_ids"] if t])
            content, reasoning, found = parsed(case, text)
            assert other["message"]["content"] == content
            assert other["message"].get("reasoning_content", "") == reasoning
            assert [(f["name"], f["arguments"]) for f in theirs] == found
        reason = other["finish_reason"]
        assert (reason == "tool_calls") == (bool(theirs) and reason != "length")


@settings(EVERYDAY, max_examples=60)
@given(CASES)
def test_a_chats_stream_adds_up_to_the_whole_and_to_what_its_parser_finds(talking, http, case):
    check_chat(talking, http, case)


@pytest.mark.slow
@settings(LONG, max_examples=2000)
@given(CASES)
def test_many_chats_streams_add_up(talking, http, case):
    check_chat(talking, http, case)


@settings(EVERYDAY, max_examples=40)
@given(CASES)
def test_the_other_forms_of_a_chat_add_up(talking, http, case):
    says(talking, case)
    tools = case["parser"] != "none"
    body = {
        "model": "story", "max_tokens": case["max_tokens"],
        "messages": [{"role": "user", "content": "x"}],
    }  # fmt: skip
    if tools:
        body["tools"] = [{"name": name, "input_schema": {"type": "object"}} for name in NAMES]
    if case["stop"]:
        body["stop_sequences"] = [case["stop"]]
    url = f"{talking.url}/v1/messages"
    whole = http.post(url, json=body).json()
    added = message_of(named_events_of(http.post(url, json={**body, "stream": True}).text))
    for block in added["content"]:
        if block["type"] == "tool_use":
            written = block.pop("partial", "") or "{}"
            try:
                block["input"] = json.loads(written)
            except ValueError:
                block["input"] = {"partial_json": written}
    for one in (whole, added):
        one.pop("id")
        for block in one["content"]:
            block.pop("id", None)
    assert added == whole
    if tools and case["stop"] is None:
        kinds = {"content": "text", "reasoning": "thinking"}
        ids = TOKENIZER.encode(case["text"], adds_special_tokens=False)[: case["max_tokens"]]
        content, reasoning, calls = parsed({**case, "one": False}, TOKENIZER.decode(ids))
        texts = dict.fromkeys(kinds.values(), "")
        for block in whole["content"]:
            if block["type"] in texts:
                texts[block["type"]] += block[block["type"]]
        assert texts == {"text": content, "thinking": reasoning}
        assert [b["name"] for b in whole["content"] if b["type"] == "tool_use"] == [
            name for name, _ in calls
        ]
    body = {"model": "story", "max_output_tokens": case["max_tokens"], "input": "x"}
    if tools:
        body["tools"] = [{"type": "function", "name": name} for name in NAMES]
    url = f"{talking.url}/v1/responses"
    whole = http.post(url, json=body).json()
    events = named_events_of(http.post(url, json={**body, "stream": True}).text)
    assert [e["sequence_number"] for e in events] == list(range(len(events)))
    last = events[-1]["response"]
    deltas = {}
    for event in events:
        if event["type"].endswith(".delta"):
            place = event["output_index"]
            deltas[place] = deltas.get(place, "") + event["delta"]
    for i, item in enumerate(last["output"]):
        told = item.get("arguments")
        if told is None:
            told = "".join(part["text"] for part in item["content"])
        assert deltas.get(i, "") == told
    for one in (whole, last):
        one.pop("id")
        one.pop("created_at")
        for item in one["output"]:
            item.pop("id")
            item.pop("call_id", None)
    assert last == whole
