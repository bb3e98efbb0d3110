"""Answers in every format of calls and reasoning, over all routes, whole and streamed."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.server.calls.test_formats import ADD, NAMES, NOW, TOOLS, WEATHER, WRITTEN
from tests.server.fake_engine import FakeEngine
from tests.server.serving import serving
from tests.server.test_chat_tools import TOKENIZER
from tests.server.wire import chat_of, events_of, message_of, named_events_of
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.server.calls.table import REASONING, call_format
from tilewise.server.chat_format import format_of, told
from tilewise.server.messages import messages_router
from tilewise.server.responses import responses_router

EXPECTED = [WEATHER, ADD, NOW]
# The reasoning of models that write calls in a format; others write it between <think> marks.
THOUGHTS = {
    "gemma4": ("gemma4", "<|channel>thought\nHm, {x}.\n<channel|>"),
    "mistral": ("mistral", "[THINK]Hm, {x}.[/THINK]"),
    "seed_oss": ("seed_oss", "<seed:think>Hm, {x}.</seed:think>"),
    "cohere": ("cohere", "<|START_THINKING|>Hm, {x}.<|END_THINKING|>"),
    "granite": ("think_response", "<think>Hm, {x}.</think>\n"),
    "phi4_mini": ("granite", "Here is my thought process: Hm, {x}. Here is my response:"),
}
HI = [{"role": "user", "content": "Hi"}]
FUNCTIONS = [{"name": name, "parameters": schema} for name, schema in TOOLS.items()]


@pytest.fixture(scope="module")
def running():
    def routers(service):
        return [messages_router(service), responses_router(service)]

    with serving(FakeEngine(), routers=routers) as server:
        yield server


@pytest.fixture(scope="module")
def http():
    with httpx.Client(timeout=60) as client:
        yield client


def says(running, name, text, reasoning="think"):
    running.engine.script = [*TOKENIZER.encode(text, adds_special_tokens=False), 0]
    running.service.form = format_of("", name, reasoning)


def of_chat(message):
    calls = [call["function"] for call in message.get("tool_calls", [])]
    found = [(call["name"], json.loads(call["arguments"])) for call in calls]
    return message.get("reasoning_content", ""), message["content"] or "", found


def of_response(items):
    thought, text, calls = "", "", []
    for item in items:
        if item["type"] == "reasoning":
            thought += item["content"][0]["text"]
        elif item["type"] == "message":
            text += item["content"][0]["text"]
        else:
            calls.append((item["name"], json.loads(item["arguments"])))
    return thought, text, calls


def of_message(blocks):
    thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
    text = "".join(block["text"] for block in blocks if block["type"] == "text")
    calls = [
        (block["name"], json.loads(block["partial"]) if "partial" in block else block["input"])
        for block in blocks
        if block["type"] == "tool_use"
    ]
    return thought, text, calls


def ask_all(running, http, **more):
    """Yield what each route answers, whole and streamed."""
    url, limit = f"{running.url}/v1/", 2000
    tools = [{"type": "function", "function": tool} for tool in FUNCTIONS]
    body = {"messages": HI, "tools": tools, "max_tokens": limit, **more}
    answer = http.post(f"{url}chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    [choice] = answer.json()["choices"]
    yield of_chat(choice["message"]), choice["finish_reason"]
    [choice] = chat_of(
        events_of(http.post(f"{url}chat/completions", json={**body, "stream": True}).text)
    )["choices"]
    yield of_chat(choice["message"]), choice["finish_reason"]
    tools = [{"type": "function", **tool} for tool in FUNCTIONS]
    body = {"input": "Hi", "tools": tools, "max_output_tokens": limit, **more}
    yield of_response(http.post(f"{url}responses", json=body).json()["output"]), None
    events = named_events_of(http.post(f"{url}responses", json={**body, "stream": True}).text)
    yield of_response(events[-1]["response"]["output"]), None
    tools = [{"name": tool["name"], "input_schema": tool["parameters"]} for tool in FUNCTIONS]
    body = {"model": "story", "messages": HI, "tools": tools, "max_tokens": limit}
    if "parallel_tool_calls" in more:
        body["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
    whole = http.post(f"{url}messages", json=body).json()
    yield of_message(whole["content"]), whole["stop_reason"].replace("tool_use", "tool_calls")
    streamed = http.post(f"{url}messages", json={**body, "stream": True})
    yield of_message(message_of(named_events_of(streamed.text))["content"]), None


@pytest.mark.parametrize("name", NAMES)
def test_every_route_finds_the_reasoning_the_text_and_the_calls(running, http, name):
    reasoning, thought = THOUGHTS.get(name, ("think", "<think>\nHm, {x}.\n</think>\n\n"))
    content = "" if call_format(name).syntax.at_start else "So:"
    says(running, name, thought + content + WRITTEN[name], reasoning)
    for found, reason in ask_all(running, http):
        assert found == ("Hm, {x}.", content, EXPECTED)
        assert reason in (None, "tool_calls")
    if name in ("hermes", "glm45", "kimi_k2"):
        for found, _ in ask_all(running, http, parallel_tool_calls=False):
            assert found == ("Hm, {x}.", content, EXPECTED[:1])


@pytest.mark.parametrize("form", REASONING, ids=lambda form: form.name)
def test_an_answer_stands_behind_the_reasoning_without_its_marks(running, http, form):
    begin, end = form.answer or ("", "")
    for said in (f"{begin}Four < 5.{end}", "Four < 5."):
        says(running, "none", f"{form.begin}{form.label}Hm.{form.end}\n{said}\n", form.name)
        body = {"messages": HI, "max_tokens": 500}
        [choice] = http.post(f"{running.url}/v1/chat/completions", json=body).json()["choices"]
        message = choice["message"]
        assert message["reasoning_content"] == "Hm."
        assert message["content"].strip() == "Four < 5."


def test_a_model_without_a_known_format_names_those_that_are_known(running, http):
    says(running, "none", "Yes.")
    tools = [{"type": "function", "function": FUNCTIONS[0]}]
    body = {"messages": HI, "tools": tools}
    answer = http.post(f"{running.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    message = answer.json()["error"]["message"]
    assert all(name in message for name in ("--tool-call-parser", *NAMES))


CITY = {
    "type": "object", "required": ["city", "size"], "additionalProperties": False,
    "properties": {"city": {"enum": ["Rome", "Oslo"]},
                   "size": {"type": "integer", "minimum": 0, "maximum": 9}},
}  # fmt: skip
FORCED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def story():
    llm = LLM("story", device="cpu", num_blocks=100)
    with serving(AsyncLLM(llm), loop=llm.loop) as server:
        yield server
    llm.close()


@pytest.mark.parametrize(
    "name", ["none", "qwen3_coder", "gemma4", "kimi_k2", "pythonic", "mistral"]
)
@pytest.mark.parametrize("choice", ["required", FORCED], ids=["required", "named"])
def test_a_call_that_is_asked_for_is_made_whatever_the_model_would_write(story, http, name, choice):
    story.service.form = format_of("", name, "none")
    tools = [
        {"type": "function", "function": {"name": tool, "parameters": CITY}}
        for tool in ("other", "weather")
    ]
    body = {
        "messages": HI, "tools": tools, "tool_choice": choice, "max_tokens": 400,
        "temperature": 0, "parallel_tool_calls": False,
    }  # fmt: skip
    for stream in (False, True):
        answer = http.post(f"{story.url}/v1/chat/completions", json={**body, "stream": stream})
        assert answer.status_code == 200, answer.text
        found = chat_of(events_of(answer.text)) if stream else answer.json()
        [choice_] = found["choices"]
        _, content, [(called, arguments)] = of_chat(choice_["message"])
        assert (content, choice_["finish_reason"]) == ("", "tool_calls")
        assert called == "weather" or choice == "required"
        assert arguments["city"] in ("Rome", "Oslo")
        assert arguments["size"] <= 9


def test_a_schema_that_the_format_cannot_follow_is_refused_by_its_place(story, http):
    tools = [
        {"type": "function", "function": {"name": tool, "parameters": schema}}
        for tool, schema in (("a", CITY), ("b", {"anyOf": [CITY, CITY]}))
    ]
    body = {"messages": HI, "tools": tools, "max_tokens": 9}
    named = {"type": "function", "function": {"name": "b"}}
    for name, status in (("qwen3_coder", 400), ("hermes", 200)):
        story.service.form = format_of("", name, "none")
        for choice in ("required", named):
            more = {**body, "tool_choice": choice}
            answer = http.post(f"{story.url}/v1/chat/completions", json=more)
            assert answer.status_code == status, answer.text
            if status == 400:
                error = answer.json()["error"]
                assert error["param"] == "tools[1].function.parameters"
                assert "qwen3_coder can follow, got one that has anyOf" in error["message"]


TEMPLATES = {
    "{{ tools }}<|tool_call>call:": "gemma4", "{{ tools }}<minimax:tool_call>": "minimax_m2",
    "{{ tools }}<tool_call><function=a><parameter=b>": "qwen3_coder",
    "{{ tools }}<tool_call>{{ name }}<arg_key>": "glm45", "{{ tools }}<tool_call>": "hermes",
    "<｜tool▁calls▁begin｜>```json": "deepseek_v3", "<｜tool▁calls▁begin｜>": "deepseek_v31",
    "'｜DSML｜' function_calls>": "deepseek_v32", "<|tool_calls_section_begin|>": "kimi_k2",
    "[TOOL_CALLS]": "mistral", "<|python_tag|>": "llama3_json",
    '<|python_start|>{"parameters": ': "llama3_json", "[func_name1(a=b)]": "pythonic",
    "<|tool_call|>": "granite", "<|tool_call|><|/tool_call|>": "phi4_mini",
    "{{ messages }}": "none",
}  # fmt: skip


@pytest.mark.parametrize(("template", "name"), TEMPLATES.items())
def test_formats_are_recognised_by_the_marks_of_templates(template, name):
    assert format_of(template, "auto", "auto").names[0] == name
    assert f"calls of tools are read as {name}" in told(format_of(template, "auto", "auto"))


def test_a_template_without_marks_is_recognised_by_tokens_and_type_if_it_has_tools():
    for template, found in (("{{ tools }}", "kimi_k2"), ("{{ messages }}", "none")):
        tokens = {"<|tool_calls_section_begin|>", "<think>"}
        assert format_of(template, "auto", "auto", tokens=tokens).names[0] == found
        assert format_of(template, "auto", "auto", model_type="kimi_k2").names[0] == found
    form = format_of("{{ tools }}", "glm47", "deepseek_r1")
    assert form.names == ("glm45", "think"), "other servers' names are known"
