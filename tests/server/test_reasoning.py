"""Reasoning beside all that a request can ask of its answer, which holds for what follows it."""

from __future__ import annotations

import json
from dataclasses import replace

import httpx
import pytest

from tests.server.serving import serving
from tests.server.test_harmony import FINAL, THOUGHT
from tests.server.test_strict_tools import Walker
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.server import chat_job
from tilewise.server.call_grammar import reasoning_lead
from tilewise.server.chat_format import reasoning_format
from tilewise.server.messages import messages_router
from tilewise.server.responses import responses_router

SCHEMA = {
    "type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip
CHATML = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
OPEN = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
OPEN = CHATML + OPEN + "{% else %}<think>\n{% endif %}"
# What the template writes, what the model would write, and what of it is reasoning.
MODELS = {
    "the template opens it": (OPEN, "Hm.</think>\n\nFour.", {}),
    "the model opens it": (CHATML + "{# <think> #}", "<think>Hm.</think>\n\nFour.", {}),
    "none is asked for": (OPEN, "Four.", {"chat_template_kwargs": {"enable_thinking": False}}),
    "the model does not": (CHATML + "{# <think> #}", "Four.", {}),
    "channels": (CHATML + "{# <|channel|> #}", f"{THOUGHT}{FINAL}Four.", {}),
}
THINKS = ("the template opens it", "the model opens it", "channels")
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine():
    with LLM("story", device="cpu", num_blocks=200) as llm:
        yield llm


@pytest.fixture(scope="module")
def servers(engine):
    def routers(service):
        return [messages_router(service), responses_router(service)]

    made = {}
    contexts = []
    for template in dict.fromkeys(row[0] for row in MODELS.values()):
        is_harmony = "<|channel|>" in template
        context = serving(
            AsyncLLM(engine), loop=engine.loop, routers=routers, template=template,
            tools="harmony" if is_harmony else "hermes",
            reasoning="harmony" if is_harmony else "think",
        )  # fmt: skip
        made[template] = context.__enter__()
        contexts.append(context)
    yield made
    for context in contexts:
        context.__exit__(None, None, None)


@pytest.fixture
def ask(engine, servers, monkeypatch):
    """Ask a model that writes a text, each of its tokens as soon as a grammar allows it."""
    wanted: list[int] = []

    def write(_, output, logits):
        written = 0
        for token in output:
            if written < len(wanted) and token == wanted[written]:
                written += 1
        logits[wanted[written] if written < len(wanted) else engine._end_ids[0]] += 1e4
        return logits

    original = chat_job.sampling_of

    def scripted(*args, **more):
        return replace(original(*args, **more), logits_processors=(write,))

    monkeypatch.setattr(chat_job, "sampling_of", scripted)

    def asked(model, path="chat/completions", writes=None, **body):
        template, usual, more = MODELS[model]
        text = usual if writes is None else writes
        wanted[:] = [t for char in text for t in engine.tokenizer.encode_plain(char)]
        long = {"max_output_tokens" if path == "responses" else "max_tokens": 200}
        hi = {"input": "Hi"} if path == "responses" else {"messages": HI}
        kwargs = {} if path == "responses" else more
        if path == "messages" and more:
            kwargs = {"thinking": {"type": "disabled"}}
        body = {"model": "story", "temperature": 0, **long, **hi, **kwargs, **body}
        answer = httpx.post(f"{servers[template].url}/v1/{path}", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer

    return asked


def message_of(answer):
    [choice] = answer.json()["choices"]
    return choice["message"], choice["finish_reason"]


TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
ASKED = {
    "json_schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    },
    "regex": {"structured_outputs": {"regex": "[0-9]{3}"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "a" "b"'}},
    "required": {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    "named": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    "strict": {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]},
}


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
# What a model writes that knows the form: one that does not might go on to think instead.
KNOWN = {
    "json_schema": '{"a": "x"}', "regex": "123", "choice": "no", "grammar": "ab",
    "required": CALL, "named": CALL,
}  # fmt: skip
CALLED = '<|channel|>commentary to=functions.f<|message|>{"a": "x"}'


EVERYDAY = ("json_schema", "named")  # beside all of the first model
ROWS = [
    pytest.param(
        model, what, marks=() if model == THINKS[0] or what in EVERYDAY else pytest.mark.slow
    )
    for model in MODELS
    for what in ASKED
]


@pytest.mark.parametrize(("model", "what"), ROWS)
def test_an_answer_follows_its_form_behind_the_reasoning(ask, model, what):
    writes = None
    if model == "the model does not":
        writes = KNOWN.get(what)
    elif what in ("required", "named"):
        writes = MODELS[model][1].replace("Four.", KNOWN[what]).replace(FINAL + KNOWN[what], CALLED)
    message, reason = message_of(ask(model, writes=writes, **ASKED[what]))
    assert message.get("reasoning_content") == ("Hm." if model in THINKS else None)
    content = message["content"]
    if what in ("required", "named"):
        [call] = message["tool_calls"]
        assert json.loads(call["function"]["arguments"])["a"] in ("x", "y")
        assert (content, reason) == (None, "tool_calls")
        return
    assert "tool_calls" not in message
    assert reason == "stop"
    if what == "json_schema":
        assert json.loads(content)["a"] in ("x", "y")
    elif what == "regex":
        assert len(content) == 3
        assert content.isdecimal()
    elif what == "choice":
        assert content in ("yes", "no")
    else:
        assert content == ("ab" if what == "grammar" else "Four.")


FORMATS = {
    "responses": {"text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
    "messages": {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
}


@pytest.mark.parametrize(("model", "path"), [
    (THINKS[0], "responses"), (THINKS[0], "messages"), (THINKS[2], "responses"),
    pytest.param(THINKS[2], "messages", marks=pytest.mark.slow),
])  # fmt: skip
def test_other_forms_have_the_same_items_whole_and_streamed(ask, model, path):
    whole = ask(model, path, **FORMATS[path]).json()
    found = whole["output"] if path == "responses" else whole["content"]
    kinds = [one["type"] for one in found]
    assert kinds == (["reasoning", "message"] if path == "responses" else ["thinking", "text"])
    text = found[1]["content"][0]["text"] if path == "responses" else found[1]["text"]
    assert json.loads(text)["a"] in ("x", "y")
    streamed = ask(model, path, **FORMATS[path], stream=True).text.splitlines()
    events = [json.loads(line[6:]) for line in streamed if line.startswith("data: ")]
    deltas = [e.get("delta") for e in events if "delta" in e["type"]]
    texts = [d if isinstance(d, str) else d.get("text", "") for d in deltas]
    assert "".join(texts).endswith(text)


@pytest.mark.parametrize(("model", "more"), [
    (THINKS[0], {"n": 2, "temperature": 1e-3}), (THINKS[0], {"logprobs": True}),
    (THINKS[1], {}), (THINKS[2], {"n": 2, "temperature": 1e-3}),
])  # fmt: skip
def test_streams_add_up_to_reasoning_and_answer(ask, model, more):
    answer = ask(model, stream=True, **ASKED["json_schema"], **more)
    lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    told = {}
    for choice in (one for line in lines for one in json.loads(line)["choices"]):
        for name, part in choice["delta"].items():
            if isinstance(part, str):
                key = choice["index"], name
                told[key] = told.get(key, "") + part
    for index in range(more.get("n", 1)):
        assert told[index, "reasoning_content"] == "Hm."
        assert json.loads(told[index, "content"])["a"] in ("x", "y")


@pytest.mark.parametrize("model", THINKS)
@pytest.mark.parametrize("what", ["json_schema", "named", None])
def test_what_is_cut_within_reasoning_has_no_answer_and_no_call(ask, model, what):
    text = {"the template opens it": "Hm", "the model opens it": "<think>Hm"}.get(
        model, "<|channel|>analysis<|message|>Hm"
    )
    message, reason = message_of(ask(model, max_tokens=len(text), **ASKED.get(what, {})))
    assert message["reasoning_content"] == "Hm"
    assert not message["content"]
    assert "tool_calls" not in message
    assert reason == "length"


@pytest.mark.parametrize("model", MODELS)
def test_a_stop_string_ends_the_answer_and_not_its_reasoning(ask, model):
    text = MODELS[model][1].replace("Hm.", "Hm our.")
    answer = ask(model, writes=text, stop=["our"])
    message, reason = message_of(answer)
    assert message.get("reasoning_content") == ("Hm our." if model in THINKS else None)
    assert (message["content"], reason) == ("F", "stop")
    assert answer.json()["choices"][0]["stop_reason"] == "our"


def test_a_stop_string_does_not_end_a_header(ask):
    message, _ = message_of(ask("channels", stop=["assistant", "final"]))
    assert message["content"] == "Four."


@pytest.mark.parametrize(("begun", "reasoning", "content"), [
    ("<think>So ", "Hm.", "Four."), ("Well", None, "Hm.</think>\n\nFour."),
    ("<think>So</think>Well", None, "Hm.</think>\n\nFour."),
])  # fmt: skip
def test_a_message_is_continued_in_its_reasoning_or_behind_it(ask, begun, reasoning, content):
    more = {"continue_final_message": True, "add_generation_prompt": False}
    messages = [*HI, {"role": "assistant", "content": begun}]
    message, _ = message_of(ask("the template opens it", messages=messages, **more))
    assert message.get("reasoning_content") == reasoning
    assert message["content"] == content
    form = {**more, **ASKED["choice"]}
    text = "Hm.</think>no" if reasoning else "no"
    message, _ = message_of(ask("the template opens it", writes=text, messages=messages, **form))
    assert message["content"] == "no"


@pytest.mark.parametrize("model", THINKS)
def test_the_tokens_of_reasoning_are_counted_with_their_marks(ask, model):
    text = MODELS[model][1]
    usage = ask(model).json()["usage"]
    marks = len(text) - len("Four.") - len(FINAL if model == "channels" else "\n\n")
    # The next message's role stands before its header.
    least = marks - len("<|start|>assistant") if model == "channels" else marks
    assert least <= usage["completion_tokens_details"]["reasoning_tokens"] <= marks


@pytest.mark.parametrize("marks", [(), ("<think>", "</think>")])
@pytest.mark.parametrize("writes_special", [False, True])
def test_the_mark_may_be_one_token_or_many(marks, writes_special):
    walker, think = Walker(*marks), reasoning_format("think")
    for is_open, before in ((True, ""), (False, " <think>")):
        lead = reasoning_lead(walker.tokenizer.special_id, think, is_open=is_open)
        asked = StructuredOutputs(json=SCHEMA, lead=lead)
        for text in (f"{before}Hm </thi{{</think>", f"{before}a\n</think>\n\n"):
            good = f'{text}{{"a": "x"}}'
            assert walker.walk(asked, good, writes_special=writes_special) == (good, True)
            wrong = f'{text}{{"a": 5}}'
            found = walker.walk(asked, wrong, writes_special=writes_special)
            assert found == (wrong.partition("5")[0], False)
            assert not walker.walk(asked, text, writes_special=writes_special)[1]
    assert walker.walk(asked, '{"a": "x"}') == ('{"a": "x"}', True)
    assert walker.walk(asked, "Four") == ("", False)
