"""Calls of strict tools follow their schema, whatever the model would rather write."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import httpx
import numpy as np
import pytest

from tests.server.fake_engine import STORY
from tests.server.serving import serving
from tilewise.engine.async_llm import AsyncLLM
from tilewise.engine.llm import LLM
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.structured import Grammars
from tilewise.engine.tokenizer import Tokenizer, load_tokenizer
from tilewise.engine.tokenizer_files import TokenizerFiles
from tilewise.server import chat_job
from tilewise.server.call_grammar import calls_alone
from tilewise.server.call_grammar import text_with_calls as grammar_of
from tilewise.server.calls.rules import Tool
from tilewise.server.calls.table import call_format
from tilewise.server.chat_format import format_of, reasoning_format
from tilewise.server.messages import messages_router
from tilewise.server.protocol import ChatRequest
from tilewise.server.responses import responses_router

SCHEMA = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}
TOOLS = [Tool("weather", SCHEMA), Tool("any", None)]
GOOD = '{"name": "weather", "arguments": {"city": "Rome"}}'
FREE = '{"name": "any", "arguments": {"x": [1]}}'
BAD = '{"name": "weather", "arguments": {"city": 5}}'
LLAMA = [text.replace("arguments", "parameters") for text in (GOOD, FREE, BAD)]

# Parser, what is there beside, texts that may be written, and texts with the place of a "!" before
# what may not.
CASES = {
    "hermes": ("hermes", {}, [
        "Hello {you}.", "", f"Well.\n<tool_call>\n{GOOD}\n</tool_call>",
        f"<tool_call>{GOOD}</tool_call> and <tool_call>{FREE}</tool_call>bye", GOOD, BAD,
        "</tool_call> <tool_cal", '<tool_call>{ "name" : "any" , "arguments" : {} }</tool_call>',
    ], [
        f"Well. <tool_call>{BAD}".replace("5", "!5"), "<tool_call>!Rome",
        f"<tool_call>{FREE}</tool_call> {GOOD} <tool_call>{BAD}".replace("5", "!5"),
        '<tool_call>{"name": "!other"', '<tool_call>{"name": "weather", "arguments": {!}}',
        f"<tool_call>{GOOD}!.</tool_call>", f"<think>x</think><tool_call>{BAD}".replace("5", "!5"),
    ]),
    "reasoning": ("hermes", {"thinks": True}, [
        f"<think>I could <tool_call>{BAD} it</think>\n<tool_call>{GOOD}</tool_call>", "<think>Hm",
        f"  <think>{BAD}</think>Hello", "Hello", f"Hello <tool_call>{GOOD}</tool_call>",
    ], [
        f"<think>x</think><tool_call>{BAD}".replace("5", "!5"),
        f"No <think> <tool_call>{BAD}".replace("5", "!5"),
    ]),
    "open reasoning": ("hermes", {"thinks": True, "is_open": True}, [
        f"I could <tool_call>{BAD} it</think>\n<tool_call>{GOOD}</tool_call>", "Hm", "a</think>b",
    ], [
        f"x</think><tool_call>{BAD}".replace("5", "!5"),
    ]),
    "llama3_json": ("llama3_json", {}, [
        "Hello {you}.", "", LLAMA[0], f" {LLAMA[0]};{LLAMA[1]}", f"<|python_tag|>{LLAMA[0]}", GOOD,
        f"Well {LLAMA[2]}", f"Well <|python_tag|> {LLAMA[0]} so {LLAMA[2]}",
        "<|python_tag|>search.call(query='x')",
    ], [
        LLAMA[2].replace("5", "!5"), f"Well <|python_tag|>{LLAMA[2]}".replace("5", "!5"),
        f"{LLAMA[0]}; {LLAMA[2]}".replace("5", "!5"), '\n{"!city": "Rome"}',
        f"{LLAMA[0]} so <|python_tag|>;{LLAMA[2]}".replace("5", "!5"),
    ]),
    "mistral": ("mistral", {}, [
        "Hello [you].", f"[TOOL_CALLS][{GOOD}, {FREE}]", f"So [TOOL_CALLS] [{GOOD}] bye",
        '[TOOL_CALLS]weather{"city": "Oslo"}', '[TOOL_CALLS]any[ARGS]{"x": 1}', f"[{BAD}]",
        '[TOOL_CALLS]any{} [TOOL_CALLS]weather[ARGS]{"city": "Rome"}',
    ], [
        f"[TOOL_CALLS][{GOOD}, {BAD}]".replace("5", "!5"), '[TOOL_CALLS]weather{"city": !5}',
        '[TOOL_CALLS]!other{}', "[TOOL_CALLS][!]", '[TOOL_CALLS]any{} [TOOL_CALLS]!x',
    ]),
}  # fmt: skip


def text_with_calls(name, tools, *, thinks=False, is_open=False, **more):
    reasoning = reasoning_format("think") if thinks else None
    syntax = call_format(name).syntax
    return grammar_of(syntax, tools, reasoning=reasoning, is_open=is_open, **more)


class Walker:
    """Which texts a grammar admits, by the story model's tokens and some more."""

    def __init__(self, *special):
        library = load_tokenizer(STORY)._library
        library.add_special_tokens(list(special))
        self.tokenizer = Tokenizer(TokenizerFiles(library, {"eos_token": "<|endoftext|>"}, False))
        self.ids = {name: library.token_to_id(name) for name in special}
        self.vocab = library.get_vocab_size()
        self.end = self.tokenizer.eos_token_id
        self.grammars = Grammars(self.tokenizer.to_json(), self.vocab, [self.end])

    def walk(self, grammar, text, *, writes_special=False):
        """Return how much of a text may be written, and whether it may end there."""
        if isinstance(grammar, str):
            grammar = StructuredOutputs(grammar=grammar)
        state = self.grammars.compile(grammar)
        written = b""
        for token in self.tokens(text, writes_special):
            if not self.allows(state, token):
                return written.decode(errors="replace"), False
            state.accept(token)
            written += self.tokenizer.token_bytes(token)
        return written.decode(), self.allows(state, self.end)

    def tokens(self, text, writes_special):
        """A token for each character, so that every place is one at which a text is cut."""
        for name, token in self.ids.items():
            if writes_special and name in text:
                before, after = text.split(name, 1)
                yield from self.tokens(before, True)
                yield token
                yield from self.tokens(after, True)
                return
        for char in text:
            yield from self.tokenizer.encode_plain(char)

    def allows(self, state, token):
        words = np.zeros((self.vocab + 31) // 32, np.int32)
        state.fill_mask(words)
        return bool(int(words[token // 32]) >> (token % 32) & 1)


@pytest.fixture(scope="module")
def walker():
    return Walker()


@pytest.mark.parametrize("case", CASES)
def test_text_is_free_until_a_call_begins(walker, case):
    parser, more, good, bad = CASES[case]
    asked = {"thinks": False, "is_open": False, "special_id": lambda _: None, **more}
    grammar = text_with_calls(parser, TOOLS, is_one=False, **asked)
    for text in good:
        assert walker.walk(grammar, text) == (text, True)
    for text in bad:
        before, _, _ = text.partition("!")
        assert walker.walk(grammar, text.replace("!", "")) == (before, False)


MARKS = ("[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<tool_call>", "</tool_call>", "<think>")
# Texts with the place of a "!" behind which an answer of one call goes no further.
ONE_CALL = {
    "hermes": [
        f"Well. <tool_call>{GOOD}</tool_call>!<tool_call>{FREE}</tool_call>",
        f"<tool_call>{FREE}</tool_call>!\n", "Hello {you}.!", "!",
    ],
    "reasoning": [f"<think>{GOOD}</think>So <tool_call>{FREE}</tool_call>!.", "<think>Hm!"],
    "open reasoning": [f"Hm</think><tool_call>{GOOD}</tool_call>! <tool_call>{FREE}", "Hm!"],
    "llama3_json": [
        f"{LLAMA[0]}!;{LLAMA[1]}", f" {LLAMA[1]}!\n{LLAMA[1]}", "Hello {you}.!", "!",
        f"Well <|python_tag|>{LLAMA[0]}!<|python_tag|>{LLAMA[0]}", f"{LLAMA[1]}! so",
    ],
    "mistral": [
        f"[TOOL_CALLS][{GOOD}]! [TOOL_CALLS][{FREE}]", "Hello [you].!", "!",
        '[TOOL_CALLS]any[ARGS]{"x": 1}![TOOL_CALLS]any{}',
    ],
}  # fmt: skip


@pytest.mark.parametrize("marks_are_tokens", [False, True])
def test_an_answer_of_one_call_ends_with_it(marks_are_tokens):
    walker = Walker(*MARKS) if marks_are_tokens else Walker()
    for case, texts in ONE_CALL.items():
        parser, more, _, bad = CASES[case]
        asked = {"thinks": False, "is_open": False, "special_id": walker.tokenizer.special_id}
        grammar = text_with_calls(parser, TOOLS, is_one=True, **asked | more)
        for text in texts:
            first, _, behind = text.partition("!")
            found = walker.walk(grammar, first + behind)
            assert found == (first, False) if behind else found == (first, True)
            assert walker.walk(grammar, first) == (first, True)
        for text in bad:
            if text.count('"name"') == 1 and "<think>x" not in text:
                before, _, _ = text.partition("!")
                assert walker.walk(grammar, text.replace("!", "")) == (before, False)
    grammar = text_with_calls("mistral", TOOLS, is_one=True, **asked)
    assert walker.walk(grammar, f"[TOOL_CALLS][{GOOD},") == (f"[TOOL_CALLS][{GOOD}", False)


@pytest.mark.parametrize("writes_special", [False, True])
def test_a_mark_that_is_a_token_may_be_written_both_ways(writes_special):
    walker = Walker(*MARKS)
    special_id = walker.tokenizer.special_id
    for case in ("hermes", "llama3_json", "mistral", "reasoning"):
        parser, more, good, bad = CASES[case]
        asked = {"thinks": False, "is_open": False, "is_one": False, **more}
        grammar = text_with_calls(parser, TOOLS, special_id=special_id, **asked)
        for text in good:
            if writes_special and (case == "reasoning" or text in (BAD, "</tool_call> <tool_cal")):
                continue  # a special token stands in no text
            found = walker.walk(grammar, text, writes_special=writes_special)
            assert found == (text, True)
        for text in bad:
            before, _, _ = text.partition("!")
            if "think" not in text:
                found = walker.walk(grammar, text.replace("!", ""), writes_special=writes_special)
                assert found == (before, False)


@pytest.mark.parametrize("marks", [(), MARKS])
@pytest.mark.parametrize("parser", ["hermes", "qwen", "mistral", None])
def test_marks_that_are_special_tokens_are_shown_to_their_parser(marks, parser):
    llm = SimpleNamespace(tokenizer=Walker(*marks).tokenizer)
    job = object.__new__(chat_job.ChatJob)
    service = SimpleNamespace(form=format_of("", parser or "none", "none"))
    job._service, job._bridge = service, SimpleNamespace(llm=llm)
    asked = ChatRequest(messages=HI, tools=[FORMS["chat"][2](True)])
    are_shown = parser is not None and bool(marks)
    shown = {"skip_special_tokens": False}
    assert job._shown_special(asked) == (shown if are_shown else {})
    told = asked.model_copy(update={"skip_special_tokens": True})
    assert job._shown_special(told) == {}, "who asks is heard"
    assert job._shown_special(asked.model_copy(update={"tools": None})) == {}


def test_a_list_of_calls_knows_each_schemas_own_parts(walker):
    good, other, bad = LLAMA
    syntax = call_format("json").syntax
    several, one = (
        calls_alone(syntax, TOOLS, special_id=lambda _: None, is_one=is_one)
        for is_one in (False, True)
    )
    assert walker.walk(several, f"[{good}, {other}]") == (f"[{good}, {other}]", True)
    assert walker.walk(one, f"[{good}]") == (f"[{good}]", True)
    assert walker.walk(one, f"[{good},") == (f"[{good}", False)
    assert walker.walk(several, f"[{good}, {bad}]") == (f"[{good}, {bad}".partition("5")[0], False)
    assert walker.walk(several, "[]") == ("[", False)


@pytest.fixture(scope="module")
def engine():
    with LLM("story", device="cpu", num_blocks=200) as llm:
        yield llm


@pytest.fixture(scope="module")
def running(engine):
    def routers(service):
        return [messages_router(service), responses_router(service)]

    with serving(AsyncLLM(engine), loop=engine.loop, tools="hermes", routers=routers) as server:
        yield server


@pytest.fixture
def script(engine, monkeypatch, request):
    """Let the model write a text, each of its tokens as soon as a grammar allows it."""
    text = getattr(request, "param", f"Well.\n<tool_call>\n{BAD}\n</tool_call>")
    tokens = [token for char in text for token in engine.tokenizer.encode_plain(char)]

    def write(_, output, logits):
        written = 0
        for token in output:
            if written < len(tokens) and token == tokens[written]:
                written += 1
        logits[tokens[written] if written < len(tokens) else engine._end_ids[0]] += 1e4
        return logits

    original = chat_job.sampling_of

    def scripted(*args, **more):
        return replace(original(*args, **more), logits_processors=(write,))

    monkeypatch.setattr(chat_job, "sampling_of", scripted)


FUNCTION = {"name": "weather", "description": "Of a city", "parameters": SCHEMA}
HI = [{"role": "user", "content": "Hi"}]
FORMS = {
    "chat": ("/v1/chat/completions", {"messages": HI, "max_tokens": 200}, lambda strict: {
        "type": "function", "function": {**FUNCTION, "strict": strict}}),
    "responses": ("/v1/responses", {"input": "Hi", "max_output_tokens": 200}, lambda strict: {
        "type": "function", **FUNCTION, "strict": strict}),
    "messages": ("/v1/messages", {"messages": HI, "max_tokens": 200}, lambda strict: {
        "name": "weather", "input_schema": SCHEMA, "strict": strict}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strict", [True, False])
def test_a_strict_tool_is_called_by_its_schema_with_tool_choice_auto(running, script, form, strict):
    path, body, tool = FORMS[form]
    asked = {"model": "story", "temperature": 0, **body, "tools": [tool(strict)]}
    answer = httpx.post(running.url + path, json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    city = called(form, answer.json())["city"]
    assert city in ("Rome", "Oslo") if strict else city == 5
    if form == "responses":
        assert answer.json()["tools"][0]["strict"] is strict


@pytest.mark.parametrize("more", [{"n": 2}, {"stop": ["</tool"]}, {"parallel_tool_calls": False}])
def test_streamed_calls_of_strict_tools_follow_their_schema(running, script, more):
    path, body, tool = FORMS["chat"]
    asked = {"model": "story", "temperature": 1e-3, **body, **more, "stream": True,
             "tools": [tool(True)]}  # fmt: skip
    answer = httpx.post(running.url + path, json=asked, timeout=60)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    written: dict[int, str] = {}
    for choice in (one for line in lines[:-1] for one in json.loads(line)["choices"]):
        for call in choice["delta"].get("tool_calls") or ():
            assert call["index"] == 0
            some = written.get(choice["index"], "")
            written[choice["index"]] = some + (call["function"].get("arguments") or "")
    assert sorted(written) == list(range(more.get("n", 1)))
    assert all(json.loads(text)["city"] in ("Rome", "Oslo") for text in written.values())


CALLED = f"<tool_call>\n{GOOD}\n</tool_call>"


@pytest.mark.parametrize("script", [f"{CALLED}\n{CALLED}"], indirect=True)
@pytest.mark.parametrize("form", FORMS)
def test_no_further_call_is_written_where_one_is_all_that_may_be_made(
    running, engine, script, form
):
    path, body, tool = FORMS[form]
    asked = {"model": "story", "temperature": 0, **body, "tools": [tool(True)]}
    one = (
        {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
        if form == "messages"
        else {"tool_choice": "auto", "parallel_tool_calls": False}
    )
    written = sum(len(engine.tokenizer.encode_plain(char)) for char in CALLED)
    for more, calls in (({}, 2), (one, 1)):
        answer = httpx.post(running.url + path, json=asked | more, timeout=60).json()
        if form == "chat":
            [choice] = answer["choices"]
            assert choice["finish_reason"] == "tool_calls"
            assert len(choice["message"]["tool_calls"]) == calls
        else:
            kind = "content" if form == "messages" else "output"
            found = [one for one in answer[kind] if one["type"] in ("tool_use", "function_call")]
            assert len(found) == calls
        usage = answer["usage"]
        tokens = usage["completion_tokens" if form == "chat" else "output_tokens"]
        assert (tokens <= written + 1) == (calls == 1)


def called(form, answer):
    """Return the arguments of the only call, behind the text before it."""
    if form == "chat":
        message = answer["choices"][0]["message"]
        assert message["content"].startswith("Well.")
        [call] = message["tool_calls"]
        return json.loads(call["function"]["arguments"])
    kind = "content" if form == "messages" else "output"
    [call] = [one for one in answer[kind] if one["type"] in ("tool_use", "function_call")]
    return call["input"] if form == "messages" else json.loads(call["arguments"])


@pytest.mark.parametrize(("strict", "schema", "wrong"), [
    ("yes", SCHEMA, "strict must be true or false"),
    (True, {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}}, "nowhere"),
])  # fmt: skip
def test_what_cannot_be_followed_is_refused(running, strict, schema, wrong):
    tool = {"type": "function", "function": {**FUNCTION, "parameters": schema, "strict": strict}}
    body = {"model": "story", "messages": HI, "tools": [tool]}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert wrong in answer.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(("schema", "why"), [
    ({"type": "foo"}, "Invalid type: foo"),
    ({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?<=a)b"}}},
     "look-around, including look-ahead and look-behind, is not supported"),
])  # fmt: skip
def test_the_tool_is_named_whose_schema_cannot_be_followed(running, choice, schema, why):
    wrong = {"type": "function", "function": {"name": "b", "parameters": schema, "strict": True}}
    tools = [FORMS["chat"][2](True), wrong, {"type": "function", "function": {"name": "c"}}]
    body = {"model": "story", "messages": HI, "tools": tools, "tool_choice": choice}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == "tools[1].function.parameters"
    assert error["message"].startswith("tools[1].function.parameters must be a schema")
    assert error["message"].endswith(why)
    assert "weather" not in error["message"]
    path, body, tool = FORMS["messages"]
    wrong = {"name": "b", "input_schema": schema, "strict": True}
    body |= {"model": "story", "tools": [tool(True), wrong]}
    answer = httpx.post(running.url + path, json=body, timeout=60)
    assert answer.json()["error"]["message"].startswith("tools[1].input_schema must be a schema")


def test_what_a_schema_says_to_its_readers_is_no_part_of_the_grammar(walker):
    """Descriptions may be long, and a grammar has 65,536 characters at most."""
    notes = {"description": "x" * 70_000, "title": "y", "$comment": "z"}
    schema = {
        "type": "object", "properties": {
            "description": {"type": "string", "enum": ["a"], **notes},
            "enum": {"const": {"title": "t"}, **notes},
            "list": {"type": "array", "items": {"anyOf": [{"type": "null", **notes}]}},
        },
        "required": ["description", "enum", "list"], "additionalProperties": False, **notes,
    }  # fmt: skip
    syntax = call_format("json").syntax
    grammar = calls_alone(syntax, [Tool("f", schema)], special_id=lambda _: None, is_one=True)
    assert len(grammar) < 1000
    good = {"description": "a", "enum": {"title": "t"}, "list": [None]}
    text = json.dumps([{"name": "f", "parameters": good}])
    assert walker.walk(grammar, text) == (text, True)
    wrong = text.replace('"t"', '"u"')
    assert walker.walk(grammar, wrong) == (wrong.partition('u"')[0], False)


@pytest.mark.parametrize(("field", "more"), [
    ("tools", {}), ("tool_choice", {"tool_choice": "required"}),
    ("response_format", {"tools": None, "response_format": {"type": "json_object"}}),
    ("structured_outputs", {"tools": None, "structured_outputs": {"choice": ["a"]}}),
])  # fmt: skip
def test_a_search_by_beams_is_refused_by_the_name_of_what_asks_for_a_form(running, field, more):
    tool = {"type": "function", "function": {**FUNCTION, "strict": True}}
    body = {"model": "story", "messages": HI, "tools": [tool], "use_beam_search": True, **more}
    answer = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
