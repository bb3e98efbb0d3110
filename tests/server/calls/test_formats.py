"""Every format of calls, as its models write it: what is found, whatever the cuts of the text."""

from __future__ import annotations

import itertools
import json
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.server.calls.test_parser import message
from tilewise.server.calls.elements import ElementCalls
from tilewise.server.calls.expressions import ExpressionCalls
from tilewise.server.calls.literals import as_json
from tilewise.server.calls.parser import CallParser
from tilewise.server.calls.schema_types import typed
from tilewise.server.calls.table import FORMATS, call_format
from tilewise.server.chat_format import call_names, reasoning_names
from tilewise.server.cut_json import completed

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "array"}},
    },
    "add": {"type": "object", "properties": {"a": {"type": "number"}}},
    "now": {"type": "object", "properties": {}},
}
WEATHER = ("get_weather", {"city": 'Zü"rich\n {x}', "days": [1, {"a": None}]})
ADD = ("add", {"a": 1.5})
NOW = ("now", {})
DAYS = '[1, {"a": null}]'
ARGUMENTS = '{"city": "Zü\\"rich\\n {x}", "days": [1, {"a": null}]}'
# The calls WEATHER, ADD and NOW as models of each format write them, by their authors' templates.
WRITTEN = {
    "gemma4": (
        '<|tool_call>call:get_weather{city:<|"|>Zü"rich\n {x}<|"|>,days:[1,{a:null}]}<tool_call|>'
        "<|tool_call>call:add{a:1.5}<tool_call|><|tool_call>call:now{}<tool_call|>"
    ),
    "functiongemma": (
        '<start_function_call>call:get_weather{city:<escape>Zü"rich\n {x}<escape>,'
        "days:[1,{a:null}]}<end_function_call><start_function_call>call:add{a:1.5}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>"
    ),
    "minimax_m2": (
        '\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Zü"rich\n {x}'
        f'</parameter>\n<parameter name="days">{DAYS}</parameter>\n</invoke>\n'
        '<invoke name="add">\n<parameter name="a">1.5</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>'
    ),
    "seed_oss": (
        '<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zü"rich\n {x}</parameter>\n'
        f"<parameter=days>{DAYS}</parameter>\n</function>\n</seed:tool_call>\n"
        "<seed:tool_call>\n<function=add>\n<parameter=a>1.5</parameter>\n</function>\n"
        "</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>"
    ),
    "deepseek_v32": (
        '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter '
        'name="city" string="true">Zü"rich\n {x}</｜DSML｜parameter>\n<｜DSML｜parameter '
        f'name="days" string="false">{DAYS}</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a" string="false">'
        '1.5</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
        '{"a": 1.5}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```js'
        "on\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{ARGUMENTS}"
        '<｜tool▁call▁end｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1.5}<｜tool▁call▁end｜>'
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>"
        'functions.add:1<|tool_call_argument_begin|>{"a": 1.5}<|tool_call_end|><|tool_call_begin|>'
        "functions.now:2<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
    ),
    "glm45": (
        '\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zü"rich\n {x}</arg_value>\n'
        f"<arg_key>days</arg_key>\n<arg_value>{DAYS}</arg_value>\n</tool_call>\n"
        "<tool_call>add<arg_key>a</arg_key><arg_value>1.5</arg_value></tool_call>"
        "<tool_call>now</tool_call>"
    ),
    "qwen3_coder": (
        '<tool_call>\n<function=get_weather>\n<parameter=city>\nZü"rich\n {x}\n</parameter>\n'
        f"<parameter=days>\n{DAYS}\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n"
        "<function=add>\n<parameter=a>\n1.5\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>"
    ),
    "cohere": (
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f'{ARGUMENTS}}},\n    {{"tool_call_id": "1", "tool_name": "add", "parameters": '
        '{"a": 1.5}},\n    {"tool_call_id": "2", "tool_name": "now", "parameters": {}}\n]'
        "<|END_ACTION|>"
    ),
    "olmo3": (
        "<function_calls>\nget_weather(city='Zü\"rich\\n {x}', days=[1, {'a': null}])\nadd(a=1.5)\n"
        "now()\n</function_calls>"
    ),
    "lfm2": (
        "<|tool_call_start|>[get_weather(city='Zü\"rich\\n {x}', days=[1, {\"a\": None}]), "
        "add(a=1.5), now()]<|tool_call_end|>"
    ),
    "nemotron_json": (
        f'<TOOLCALL>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "add", '
        '"arguments": {"a": 1.5}}, {"name": "now", "arguments": {}}]</TOOLCALL>'
    ),
    "phi4_mini": (
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "add", '
        '"arguments": {"a": 1.5}}, {"name": "now", "arguments": {}}]<|/tool_call|>'
    ),
    "phi4_mini_json": (
        f'functools[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "add", '
        '"arguments": {"a": 1.5}}, {"name": "now", "arguments": {}}]'
    ),
    "granite": (
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "add", '
        '"arguments": {"a": 1.5}}, {"name": "now", "arguments": {}}]'
    ),
    "mistral": (
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]"
        '{"a": 1.5}[TOOL_CALLS]now{}'
    ),
    "hermes": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": {"a": 1.5}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    ),
    "llama3_json": (
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "add", "parameters": '
        '{"a": 1.5}}; {"name": "now", "parameters": {}}'
    ),
    "pythonic": (
        '[get_weather(city="Zü\\"rich\\n {x}", days=[1, {"a": None}]), add(a=1.5), now()]'
    ),
    "json": (
        f'[{{"name": "get_weather", "parameters": {ARGUMENTS}}}, {{"name": "add", "parameters": '
        '{"a": 1.5}}, {"name": "now", "parameters": {}}]'
    ),
}  # fmt: skip
WRITTEN["deepseek_v4"] = WRITTEN["deepseek_v32"].replace("function_calls>", "tool_calls>")
NAMES = [form.name for form in FORMATS]


def find(name, pieces, tools=TOOLS):
    return message(CallParser(call_format(name).syntax, tools), pieces)


def calls_of(found):
    return [(name, json.loads(arguments)) for name, arguments in found[2]]


def schema_of(arguments):
    def one(value):
        kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array",
                 dict: "object", type(None): "null"}  # fmt: skip
        return {"type": kinds[type(value)]}

    return {"type": "object", "properties": {key: one(value) for key, value in arguments.items()}}


def is_marked(name):
    return not call_format(name).syntax.at_start


@pytest.mark.parametrize("name", NAMES)
def test_calls_are_found_whole_and_character_by_character(name):
    text = WRITTEN[name]
    assert calls_of(find(name, [text])) == [WEATHER, ADD, NOW]
    assert find(name, [text])[0].strip() == ""
    assert find(name, list(text)) == find(name, [text])


@pytest.mark.parametrize("name", [name for name in NAMES if is_marked(name)])
def test_text_before_calls_is_content_and_marks_behind_them_are_nothing(name):
    text = f"Let me <see> [it] {{}}.\n\n{WRITTEN[name]}\n"
    found = find(name, [text])
    assert calls_of(found) == [WEATHER, ADD, NOW]
    assert found[0] == "Let me <see> [it] {}."
    assert find(name, list(text)) == found
    if end := call_format(name).syntax.end:
        assert find(name, [text + end[0]]) == found
        assert find(name, [f"An {end[0]} of nothing"])[0] == f"An {end[0]} of nothing"


@pytest.mark.parametrize("name", NAMES)
def test_a_text_without_calls_passes_as_it_is(name):
    for text in ("Hello.\n", "<b>1</b> [2](3) {4}", "a < b, f(a=1)", "  \n x"):
        assert find(name, [text]) == find(name, list(text)) == (text, "", [])
    for mark in call_format(name).syntax.begin:
        text = f"It writes {mark} and so on {{x}}: [1]"
        assert find(name, [text]) == find(name, list(text)) == (text, "", [])


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_cut_off_is_a_part_of_the_whole_one(name):
    """At every place: earlier calls are whole, and the last one has no wrong argument."""
    text, expected = WRITTEN[name], [WEATHER, ADD, NOW]
    seen = set()
    for place in range(len(text)):
        content, _, calls = find(name, [text[:place]])
        seen.add(len(calls))
        assert [one for one, _ in calls] == [one for one, _ in expected[: len(calls)]]
        for i, (_, arguments) in enumerate(calls):
            whole = expected[i][1]
            if i < len(calls) - 1:
                assert json.loads(arguments) == whole
                continue
            for key, value in completed(arguments or "{}").items():
                if isinstance(value, str):
                    assert whole[key].startswith(value)
                elif value is not None and key != "a" and not isinstance(value, list):
                    raise AssertionError((key, value))
        # What stays of a further call that is cut before its name may be anything else as well.
        assert not calls or content.strip() in text
    assert {0, 1, 2, 3} >= seen > {1, 2}


@pytest.mark.parametrize("name", NAMES)
def test_arguments_are_told_before_the_call_is_whole(name):
    parser = CallParser(call_format(name).syntax, TOOLS)
    text = WRITTEN[name]
    told = "".join(part.text for part in parser.push(text[: text.index("rich")]))
    assert told.startswith('{"city": "Zü')


# Pieces of every format, so that texts of one format meet the marks of another.
ATOMS = sorted(
    {mark for form in FORMATS for mark in form.syntax.marks if mark and "\0" not in mark}
    | {"add", "now", "get_weather", "city", "a", "{", "}", "[", "]", "(", ")", "=", ":", ",", '"',
       "'", "\\", "\n", " ", "1", "true", "é", "<", "\\u00e9", '{"name": "add"', '"arguments": {',
       "<function=add>", "<parameter=city>", ">", '">', "string=", "functions.add:0", "``"}
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=10, deadline=None)
@given(st.data())
def test_no_cut_of_the_text_changes_what_is_found(name, data):
    own = [mark for mark in call_format(name).syntax.marks if mark and "\0" not in mark]
    atom = st.sampled_from(ATOMS) | st.sampled_from([*own, *ATOMS[:1]])
    parts = data.draw(st.lists(atom | st.just(WRITTEN[name]), max_size=14))
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)]) if b > a]
    whole = find(name, [text] if text else [])
    assert find(name, pieces) == whole
    assert find(name, list(text)) == whole


WORD = st.text("abcxyz_", min_size=1, max_size=6)
HOSTILE = st.sampled_from(
    [*(mark for mark in ATOMS if mark.startswith(("<", "["))), "</parameter>\n", '"}', "\\", "'",
     "\n", " ", "é", "😀", '"', "]", ")", "null", "5", "True"]
)  # fmt: skip
TEXT = st.lists(HOSTILE | WORD, max_size=5).map("".join)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORD, inner, max_size=3),
    max_leaves=6,
)
EVERY = settings(max_examples=8, deadline=None)


@pytest.mark.parametrize("name", NAMES)
@EVERY
@given(st.lists(st.dictionaries(WORD, JSON, max_size=4), min_size=1, max_size=3), st.data())
def test_calls_as_they_are_written_into_a_history_are_read_again(name, given_, data):
    syntax = call_format(name).syntax
    calls = [(f"tool_{i}", arguments) for i, arguments in enumerate(given_)]
    text = syntax.write(calls)
    if _holds_its_end(syntax, given_):
        return
    tools = {tool: schema_of(arguments) for tool, arguments in calls}
    cut = data.draw(st.integers(0, len(text)))
    found = find(name, [piece for piece in (text[:cut], text[cut:]) if piece], tools)
    assert calls_of(found) == calls


def _holds_its_end(syntax, given_):
    """Return whether a text without quotes has the mark that ends it, which no reader can tell."""
    inside = json.dumps(given_, ensure_ascii=False).replace('\\"', '"').replace("\\n", "\n")
    if isinstance(syntax, ElementCalls):
        behind = (syntax.key, syntax.close, *syntax.end)
        marks = "|".join(re.escape(mark) for mark in behind if mark)
        return re.search(rf"{re.escape(syntax.value_end)}\s*({marks})", inside) is not None
    quote = syntax.dialect.quote if isinstance(syntax, ExpressionCalls) else ""
    return bool(quote) and quote in inside


@pytest.mark.parametrize(
    ("text", "type_", "value"),
    [
        ("5", "string", "5"), ("5", "integer", 5), ("5", "number", 5), (" 5\n", "integer", 5),
        ("5.0", "integer", 5.0), ("5.5", "integer", 5.5), ("five", "integer", "five"),
        ("True", "boolean", True), ("false", "boolean", False), ("yes", "boolean", "yes"),
        ("None", "null", None), ("null", "string", "null"), ("null", ["string", "null"], None),
        ("[1]", "array", [1]),
        ("{'a': [1, (2,)], 'b': None}", "object", {"a": [1, [2]], "b": None}),
        ("[1", "array", "[1"), ("{'a'}", "object", "{'a'}"), ('"x"', "string", '"x"'),
        ("1e400", "string", "1e400"), ("NaN", "number", "NaN"), ("007", "integer", "007"),
        ("[x](y)", ["array", "string"], "[x](y)"), ("5", ["integer", "string"], 5),
        ("9" * 5000, "integer", "9" * 5000),
    ],
)  # fmt: skip
def test_the_types_of_plain_values_follow_the_schema(text, type_, value):
    tools = {"f": {"type": "object", "properties": {"a": {"type": type_}}}}
    for name, written in (
        ("glm45", f"<tool_call>f<arg_key>a</arg_key><arg_value>{text}</arg_value></tool_call>"),
        ("qwen3_coder", f"<tool_call><function=f><parameter=a>\n{text}\n</parameter></function>"),
    ):
        assert calls_of(find(name, [written], tools)) == [("f", {"a": value})]


REFERENCES = {
    "type": "object",
    "properties": {
        "a": {"$ref": "#/$defs/A"}, "b": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "c": {"enum": ["1", "2"]}, "d": {"const": 3}, "e": {"type": "integer", "nullable": True},
        "f": {"$ref": "#/properties/f"}, "g": {"allOf": [{"type": "string"}, {"maxLength": 2}]},
    },
    "additionalProperties": {"type": "string"},
    "$defs": {"A": {"type": "string"}},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [("a", "1", "1"), ("b", "1", "1"), ("b", "null", None), ("c", "1", "1"), ("d", "3", 3),
     ("e", "null", None), ("e", "3", 3), ("f", "3", 3), ("f", "x", "x"), ("other", "3", "3"),
     ("g", "1", "1")],
)  # fmt: skip
def test_the_schema_of_a_parameter_may_be_elsewhere(key, text, value):
    written = f"<tool_call>f<arg_key>{key}</arg_key><arg_value>{text}</arg_value></tool_call>"
    assert calls_of(find("glm45", [written], {"f": REFERENCES})) == [("f", {key: value})]


MANY = {f"A{i}": {"allOf": [{"$ref": f"#/$defs/A{i + 1}"}] * 2} for i in range(60)}


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [1]}, {"properties": {"a": 3}}, {"allOf": 3, "anyOf": {}}, {"$ref": "#"},
        {"properties": {"a": {"$ref": "#/properties/a"}}}, {"properties": {"a": {"enum": 3}}},
        {"properties": {"a": {"type": [{}, "x"]}}}, {"properties": {"a": {"anyOf": [3, None]}}},
        {"properties": {"a": {"$ref": "#/$defs/A0"}}, "$defs": MANY},
        {"$ref": "#/$defs/A0", "$defs": MANY}, {"properties": {"a": {"$ref": "http://x"}}},
        {"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 9}}}, None, True,
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_without_sense_costs_a_value_its_type_only(schema):
    written = "<tool_call>f<arg_key>a</arg_key><arg_value>x y</arg_value></tool_call>"
    assert calls_of(find("glm45", [written], {"f": schema})) == [("f", {"a": "x y"})]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("phi4_mini_json", "Use functools, or functools[1].", []),
        # Models leave out the section, its end, or a part of a header.
        ("qwen3_coder", "<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
         [("add", {"a": 1})]),
        ("qwen3_coder", "Write <function=other> so.", []),
        ("qwen3_coder", '<tool_call>{"name": "add"}</tool_call>', []),
        ("deepseek_v31", '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>',
         [("add", {"a": 1})]),
        ("deepseek_v31", '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1'
         "<｜tool▁call▁end｜><｜tool▁calls▁end｜>", [("add", '{"a": 1')]),
        ("kimi_k2", "<|tool_call_begin|>add<|tool_call_argument_begin|>{}<|tool_call_end|>",
         [("add", {})]),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.now: 3"
         "<|tool_call_argument_begin|><|tool_call_end|><|tool_calls_section_end|>", [("now", {})]),
        ("granite", '<tool_call>[{"name": "add", "arguments": {"a": 1}}]', [("add", {"a": 1})]),
        ("hermes", '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>',
         [("add", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "add", "arguments": null}</tool_call>', [("add", {})]),
        ("phi4_mini", '<|tool_call|>{"name": "add", "arguments": {"a": 1}}<|/tool_call|>',
         [("add", {"a": 1})]),
        ("llama3_json", '<|python_start|>{"name": "add", "parameters": {"a": 1}}<|python_end|>',
         [("add", {"a": 1})]),
        ("pythonic", "<|python_start|>[add(a=1,)]<|python_end|>", [("add", {"a": 1})]),
        ("pythonic", "[\n add(\n  a = -1e3 ,\n )\n]", [("add", {"a": -1000.0})]),
        ("pythonic", "[add(1)]", []), ("pythonic", "[other(a=1)]", []), ("pythonic", "[1]", []),
        ("pythonic", "[add(a=1)] and more", [("add", {"a": 1})]),
        ("gemma4", '<|tool_call>call:add{a: 1, b: "x", c:London}<tool_call|>',
         [("add", {"a": 1, "b": "x", "c": "London"})]),
        ("gemma4", "<|tool_call>call:add{a:1}<tool_call|><|tool_response>", [("add", {"a": 1})]),
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "x"}]',
         [("add", {"a": 1})]),
    ],
)  # fmt: skip
def test_what_models_write_beside_their_template_is_read(name, text, calls):
    found = find(name, [text])
    assert found == find(name, list(text))
    told = [(one, arguments if isinstance(calls[i][1], str) else json.loads(arguments))
            for i, (one, arguments) in enumerate(found[2])]  # fmt: skip
    assert told == calls
    if not calls:
        assert found[0] == text


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("'a\\'b'", "a'b"), ('"a\\"b"', 'a"b'), ("'a\"b'", 'a"b'), (r"'\d\n\x41\u00e9\U0001F600'",
         "\\d\nAé😀"), (r"'\ud83d\ude00'", "😀"), ("''", ""), ('""', ""),
        ('"""a\n"b" c"""', 'a\n"b" c'), ("'''x'y'''", "x'y"), ("(1, 2)", [1, 2]), ("()", []),
        ("{'a': True, \"b\": [None, false]}", {"a": True, "b": [None, False]}), ("1_000", 1000),
        (".5", 0.5), ("+5", 5), ("red", "red"), ("-0.5e-3", -0.5e-3), ("{}", {}), ("[1,]", [1]),
        ("'a/b\\/c'", "a/b/c"), ("'tab\\\n'", "tab"),
    ],
)  # fmt: skip
def test_values_of_python_are_read_as_python_does(written, value):
    text = f"[add(a={written}, b=2)]"
    assert calls_of(find("pythonic", [text])) == [("add", {"a": value, "b": 2})]
    assert find("pythonic", list(text)) == find("pythonic", [text])


def test_values_nested_without_end_are_no_call():
    for name, begin in (("pythonic", "[add(a="), ("gemma4", "<|tool_call>call:add{a:")):
        found = find(name, [begin + "[" * 100_000])
        assert [one for one, _ in found[2]] in ([], ["add"])


@pytest.mark.parametrize("name", ["hermes", "mistral", "qwen3_coder", "pythonic", "gemma4"])
def test_long_texts_take_time_by_their_length_alone(name):
    """Counted, not timed: a text twice as long needs no more than twice the characters' work."""

    def work(size):
        parser = CallParser(call_format(name).syntax, TOOLS)
        count = [0]

        def trace(frame, event, arg):
            count[0] += 1
            return None

        text = WRITTEN[name].replace("rich", "rich " * size)
        sys.setprofile(trace)
        try:
            parser.push(text)
            parser.finish()
        finally:
            sys.setprofile(None)
        return count[0]

    assert work(200) < 2.5 * work(100)


def test_a_long_run_of_digits_that_is_no_number_is_a_text():
    """A search that tries each digit in two places would not come back from this."""
    word = "1" * 200_000 + "x"
    for name, begin in (("pythonic", "[add(a="), ("gemma4", "<|tool_call>call:add{a:")):
        end = ")]" if name == "pythonic" else "}<tool_call|>"
        [(_, arguments)] = find(name, [begin + word + end])[2]
        assert json.loads(arguments) == {"a": word}


def test_a_list_with_a_number_that_python_does_not_read_is_passed_on():
    written = "['a', " + "1" * 5000 + "]"
    assert json.loads(typed(written, frozenset({"array", "string"}), as_json)) == written
    assert typed(written, frozenset({"array"}), as_json) == json.dumps(written)


def test_every_format_is_tried_and_names_are_of_one_format():
    assert set(WRITTEN) == set(NAMES)
    names = [name for form in FORMATS for name in (form.name, *form.others)]
    assert len(names) == len(set(names))


def test_the_documentation_names_every_format():
    root = Path(__file__).resolve().parents[3]
    page = (root / "docs" / "guide" / "clients-and-tools.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| ")]
    told = {name.strip(" ()") for row in rows for name in re.split(r"[,(]", row)}
    assert {*call_names(), *reasoning_names()} <= told
