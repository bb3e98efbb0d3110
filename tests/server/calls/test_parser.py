"""Parsers of reasoning and calls: what they find, and that no cut of the text changes it."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tilewise.server.calls.parser import CallParser
from tilewise.server.calls.parts import CallsOnly, PlainParser
from tilewise.server.calls.table import call_format
from tilewise.server.chat_answer import Message
from tilewise.server.chat_format import reasoning_format
from tilewise.server.reasoning import ThinkParser

NAMES = ("get_weather", "add")


def parser_of(name, tools=NAMES):
    return CallParser(call_format(name).syntax, tools)


THINK = reasoning_format("think")
MAKERS = {
    "plain": PlainParser,
    "hermes": lambda: parser_of("hermes"),
    "llama": lambda: parser_of("llama3_json"),
    "mistral": lambda: parser_of("mistral"),
    "required": lambda: CallsOnly(parser_of("json")),
    "think": lambda: ThinkParser(THINK, parser_of("hermes")),
    "think-open": lambda: ThinkParser(THINK, parser_of("llama3_json"), is_open=True),
}


def message(parser, pieces):
    found = Message()
    for piece in pieces:
        found.add(parser.push(piece))
    found.add(parser.finish())
    return found.content, found.reasoning, found.calls


def whole(name, text):
    return message(MAKERS[name](), [text] if text else [])


CALL = '{"name": "get_weather", "arguments": {"city": "Paris {\\"}", "days": [1, {"a": 2}]}}'
LLAMA = '{"name": "add", "parameters": {"a": 1}}'


@pytest.mark.parametrize(
    ("parser", "text", "content", "reasoning", "calls"),
    [
        ("hermes", "No call <tool> at all.\n", "No call <tool> at all.\n", "", 0),
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", "", 1),
        ("hermes", f"Let me see.\n<tool_call>{CALL}</tool_call>\n", "Let me see.", "", 1),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", "", 2),
        ("hermes", "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", "", 0),
        ("hermes", '<tool_call>{"city": 1}', '<tool_call>{"city": 1}', "", 0),
        ("llama", LLAMA, "", "", 1),
        ("llama", f"<|python_tag|>{LLAMA}; {LLAMA}", "", "", 2),
        ("llama", '{"name": "Alice", "parameters": {}}', '{"name": "Alice", "parameters": {}}',
         "", 0),
        ("llama", '{"answer": 42}', '{"answer": 42}', "", 0),
        ("llama", f"Text {LLAMA}", f"Text {LLAMA}", "", 0),
        ("mistral", f"[TOOL_CALLS][{CALL}, {CALL}]", "", "", 2),
        ("mistral", 'Yes.[TOOL_CALLS]add{"a": {"b": 1}}[TOOL_CALLS]add{"a": 2}', "Yes.", "", 2),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1}', "", "", 1),
        ("mistral", "[TOOL", "[TOOL", "", 0),
        ("required", f"[{LLAMA},\n {LLAMA}]", "", "", 2),
        ("think", "<think>\nHm, < so.\n</think>\n\nYes.", "Yes.", "Hm, < so.", 0),
        ("think", f"<think>a</think>{'<tool_call>'}{CALL}</tool_call>", "", "a", 1),
        ("think", "Straight <think>on</think>", "Straight <think>on</think>", "", 0),
        ("think", "<think>never ends ", "", "never ends", 0),
        ("think-open", "Hm.\n</think>\n" + LLAMA, "", "Hm.", 1),
    ],
)  # fmt: skip
def test_what_each_format_says(parser, text, content, reasoning, calls):
    found = whole(parser, text)
    assert found[0] == content
    assert found[1] == reasoning
    assert len(found[2]) == calls
    for name, arguments in found[2]:
        assert name in NAMES
        assert isinstance(json.loads(arguments), dict)


def test_arguments_come_before_the_call_is_whole():
    parser = parser_of("hermes")
    parts = parser.push('<tool_call>{"name": "add", "arguments": {"a": 1')
    assert [(p.kind, p.name, p.text) for p in parts] == [("call", "add", '{"a": 1')]
    parts = parser.push("23}}</tool_call>")
    assert [(p.index, p.name, p.text) for p in parts] == [(0, None, "23}")]


def test_a_call_that_is_cut_off_keeps_what_there_is():
    found = whole("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1')
    assert found == ("", "", [("add", '{"a": 1')])
    # So does one of which the name is there and no more.
    for rest in ("", ",", ', "arg', ', "parameters" :'):
        assert whole("hermes", f'<tool_call>{{"name": "add"{rest}')[2] == [("add", "")]
    # Before its name, and with something else behind it, the client sees what the model wrote.
    for text in ('<tool_call>{"name": "ad', '<tool_call>{"name": "add", "x": 1, "arg'):
        assert whole("hermes", text) == (text, "", [])


def test_where_calls_are_asked_for_a_second_one_without_its_name_is_nothing():
    first = '[{"name": "add", "parameters": {"a": 1}}'
    for rest in ("", ",", ", {", ', {"na', ', {"name": "su'):
        parser = CallsOnly(parser_of("json"))
        message = Message()
        message.add([*parser.push(first + rest), *parser.finish()])
        assert (message.content, message.calls) == ("", [("add", '{"a": 1}')])


def test_arguments_written_as_a_string_or_left_out_or_first():
    text = '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>'
    assert whole("hermes", text)[2] == [("add", '{"a": 1}')]
    assert whole("hermes", '<tool_call>{"name": "add"}</tool_call>')[2] == [("add", "{}")]
    text = '<tool_call>{"arguments": {"a": [1, 2]}, "name": "add"}</tool_call>'
    assert whole("hermes", text)[2] == [("add", '{"a": [1, 2]}')]


ATOMS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|python_tag|>",
    "[ARGS]", CALL, LLAMA, "[", "]", "{", "}", ",", ";", ":", '"', "\\", '"name"',
    '"arguments"', '"add"', " ", "\n", "a", "Text. ", "<", "<to", "[TO", "é", "1",
]  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=80, deadline=None)
@given(st.data())
def test_no_cut_of_the_text_changes_what_is_found(name, data):
    text = "".join(data.draw(st.lists(st.sampled_from(ATOMS), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    edges = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(edges) if b > a]
    expected = whole(name, text)
    assert message(MAKERS[name](), pieces) == expected
    assert message(MAKERS[name](), list(text)) == expected


@pytest.mark.parametrize("name", ["hermes", "mistral", "think"])
@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="ab <>/_[]\n{}", max_size=40))
@example("a \n")
@example("<tool_cal")
def test_text_without_a_call_passes_unchanged(name, text):
    if any(mark in text for mark in ("<think>",)) or not text:
        return
    content, reasoning, calls = whole(name, text)
    assert (content, reasoning, calls) == (text, "", [])
