"""Calls that are asked for, or of strict tools, in every format: only valid ones are written."""

from __future__ import annotations

import functools
import json
import random
import re

import numpy as np
import pytest

from tests.server.calls.test_formats import find
from tests.server.test_strict_tools import Walker
from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.server.call_grammar import calls_alone, text_with_calls
from tilewise.server.calls.rules import Tool, Unwritable
from tilewise.server.calls.table import FORMATS, call_format

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"$ref": "#/$defs/City", "description": "x" * 9},
        "days": {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
        "text": {"type": ["string", "null"]},
        "ok": {"type": "boolean"},
        "inner": {
            "type": "object", "properties": {"k": {"type": "string", "maxLength": 3}},
            "required": ["k"], "additionalProperties": False,
        },
        "letters": {"type": "string", "pattern": "^a+$"},
        "size": {"type": "integer", "minimum": 3, "maximum": 9},
    },
    "required": ["city", "inner"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Rome", "Oslo"]}},
}  # fmt: skip
TOOLS = [Tool("weather", SCHEMA), Tool("any", None), Tool("now", {"type": "object"})]
SCHEMAS = {tool.name: tool.schema for tool in TOOLS}
LEAST = {"city": "Rome", "inner": {"k": "v"}}
FULL = {
    "city": "Oslo", "days": [1, 2], "text": "hm <b>", "ok": True, "inner": {"k": "v"},
    "letters": "aa", "size": 5,
}  # fmt: skip
NAMES = [form.name for form in FORMATS]


@functools.cache
def walker(*marks):
    return Walker(*marks)


def walker_of(name, has_tokens):
    syntax = call_format(name).syntax
    marks = [mark for mark in syntax.marks if mark and "\0" not in mark]
    if getattr(syntax, "pad", ""):  # Qwen's marks within a call are ordinary text
        marks = ["<tool_call>", "</tool_call>"]
    # what looks like a token of its own in the vocabularies of such models
    shaped = [mark for mark in marks if mark[0] in "<[" and mark[-1] in ">]" and len(mark) > 2]
    return walker(*dict.fromkeys(shaped)) if has_tokens else walker()


def grammars(name, at, *, is_one=False, tools=TOOLS):
    syntax, special_id = call_format(name).syntax, at.tokenizer.special_id
    more = {"reasoning": None, "is_open": False, "is_one": is_one, "special_id": special_id}
    return (
        calls_alone(syntax, tools, special_id=special_id, is_one=is_one),
        text_with_calls(syntax, tools, **more),
    )


def kept(at, grammar, text):
    return at.walk(grammar, text, writes_special=bool(at.ids))


# Each format runs every day with its marks as the vocabularies of its models have them.
PLAIN = ("qwen3_coder", "minimax_m2", "seed_oss", "olmo3", "nemotron_json", "phi4_mini_json",
         "hermes", "pythonic", "json", "deepseek_v32")  # fmt: skip
FORMS = [
    pytest.param(name, has, marks=() if has == (name not in PLAIN) else pytest.mark.slow)
    for name in NAMES
    for has in (False, True)
]


@pytest.mark.parametrize(("name", "has_tokens"), FORMS)
def test_valid_calls_may_be_written_and_no_others(name, has_tokens):
    syntax, at = call_format(name).syntax, walker_of(name, has_tokens)
    good = [
        syntax.write([("weather", FULL)]), syntax.write([("weather", LEAST)]),
        syntax.write([("weather", LEAST), ("any", {"x": 1}), ("now", {})]),
    ]  # fmt: skip
    bad = [
        (syntax.write([("weather", {**LEAST, "city": "Bern"})]), "Bern"),
        (syntax.write([("weather", {**LEAST, "size": 1})]), "1"),
        (syntax.write([("weather", {**LEAST, "inner": {"k": "long"}})]), "g"),
        (syntax.write([("weather", {"city": "Rome"})]), None),
        (syntax.write([("other", {})]), "other"),
    ]
    for grammar in grammars(name, at):
        for text in good:
            assert kept(at, grammar, text) == (text, True)
        for text, first in bad:
            found, may_end = kept(at, grammar, text)
            assert not may_end
            assert len(found) < len(text)
            if first is not None:
                assert len(found) <= text.rindex(first)
    must, may = grammars(name, at)
    assert not kept(at, must, "Hello")[1]
    assert kept(at, may, "Hello.") == ("Hello.", True)


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_of_one_call_ends_with_it(name):
    syntax, at = call_format(name).syntax, walker()
    one, two = (syntax.write([("weather", LEAST)] * n) for n in (1, 2))
    for grammar in grammars(name, at, is_one=True):
        found, may_end = kept(at, grammar, one)
        assert (found, may_end) == (one, True)
        found, _ = kept(at, grammar, two)
        assert len(found) <= len(one)


CLOSERS = ('"', "}", "]", ")", "</parameter>", "</｜DSML｜parameter>", "</arg_value>", '<|"|>',
           "<escape>")  # fmt: skip


def written(at, grammar, seed, most=2000):
    """Return what a model without sense writes: any token that may come next, texts of a few."""
    draw = random.Random(seed)
    state = at.grammars.compile(StructuredOutputs(grammar=grammar))
    text = b""
    for _ in range(most):
        words = np.zeros((at.vocab + 31) // 32, np.int32)
        state.fill_mask(words)
        allowed = np.nonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))[0]
        tokens = [int(draw.choice(allowed))]
        if draw.random() < 0.4:
            marks = draw.sample(CLOSERS, len(CLOSERS))
            tokens = next(filter(None, (following(at, state, mark) for mark in marks)), tokens)
        for token in tokens:
            if token == at.end:
                return text.decode(errors="replace")
            state.accept(token)
            text += at.tokenizer.token_bytes(token)
    raise AssertionError(f"it has not ended: {text[-300:].decode(errors='replace')}")


def following(at, state, mark):
    """Return the tokens of a mark if it may be written now."""
    state, tokens = state.copy(), []
    for token in (token for char in mark for token in at.tokenizer.encode_plain(char)):
        if not at.allows(state, token):
            return None
        state.accept(token)
        tokens.append(token)
    return tokens


def is_valid(arguments):
    inner = arguments["inner"]
    return (
        set(arguments) <= set(SCHEMA["properties"])
        and arguments["city"] in ("Rome", "Oslo")
        and set(inner) == {"k"} and len(inner["k"]) <= 3
        and isinstance(arguments.get("text"), str | None)
        and isinstance(arguments.get("ok", True), bool)
        and 3 <= arguments.get("size", 5) <= 9
        and re.fullmatch("a+", arguments.get("letters", "a")) is not None
        and all(isinstance(day, int) for day in arguments.get("days", []))
        and len(arguments.get("days", [])) <= 2
    )  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.slow)], ids=str
)
def test_what_a_model_without_sense_writes_is_a_valid_call(name, seeds):
    at = walker()
    [must, _] = grammars(name, at, is_one=True, tools=TOOLS[:1])
    for seed in seeds:
        text = written(at, must, seed)
        _, _, calls = find(name, [text], {"weather": SCHEMA})
        [(called, arguments)] = calls
        assert called == "weather"
        assert is_valid(json.loads(arguments)), text


UNWRITABLE = {
    "exponential": {
        "allOf": [{"$ref": "#/$defs/A0"}] * 2,
        "type": "object",
        "$defs": {f"A{i}": {"allOf": [{"$ref": f"#/$defs/A{i + 1}"}] * 2} for i in range(40)},
    },
    "no object": {"type": "object", "properties": [1]},
    "no list": {"type": "object", "properties": {"a": {}}, "required": 5},
    "no names": {"type": "object", "properties": {"a": {}}, "required": [{}]},
    "name": {"type": "object", "properties": {"<a": {"type": "string"}}},
    "anyOf": {"anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "required": {"type": "object", "properties": {}, "required": ["a"]},
}


@pytest.mark.parametrize("name", ["glm45", "gemma4", "pythonic"])
@pytest.mark.parametrize("schema", UNWRITABLE.values(), ids=UNWRITABLE)
def test_a_schema_that_a_format_cannot_follow_is_refused_by_its_tool(name, schema):
    with pytest.raises(Unwritable) as error:
        grammars(name, walker(), tools=[TOOLS[0], Tool("b", schema)])
    assert error.value.place == 1


@pytest.mark.parametrize("name", ["glm45", "gemma4", "qwen3_coder"])
def test_a_pattern_is_a_pattern_and_no_rule(name):
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    text = schema["properties"]["a"]
    at, syntax = walker(), call_format(name).syntax
    for pattern, good, bad in (
        ("b/c", "ab/cd", "bc"), ("^a\nstart: TEXT", "a\nstart: TEXT!", "x"),
        ("^(a|b)$", "a", "ab"), ("é{2}", "caféé", "café"),
    ):  # fmt: skip
        text["pattern"] = pattern
        must, _ = grammars(name, at, is_one=True, tools=[Tool("f", schema)])
        written = syntax.write([("f", {"a": good})])
        assert kept(at, must, written) == (written, True)
        assert not kept(at, must, syntax.write([("f", {"a": bad})]))[1]
    text.update({"pattern": "^a+$", "minLength": 2, "maxLength": 3})
    must, _ = grammars(name, at, is_one=True, tools=[Tool("f", schema)])
    for size in range(5):
        assert kept(at, must, syntax.write([("f", {"a": "a" * size})]))[1] == (size in (2, 3))


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("hermes",)])
def test_a_name_that_would_be_read_as_another_one_is_refused_or_read(name):
    for tool in ("a b", "a{", "x<y"):
        try:
            [must, _] = grammars(
                name, walker(), is_one=True, tools=[Tool(tool, {"type": "object"})]
            )
        except Unwritable:
            continue
        text = call_format(name).syntax.write([(tool, {})])
        assert kept(walker(), must, text) == (text, True)
        assert find(name, [text], {tool: {}})[2] == [(tool, "{}")]
