"""JSON that was cut off is completed, and what never was JSON is refused."""

from __future__ import annotations

import json
import random

import pytest

from tilewise.server.cut_json import completed

CUT = [
    ('{"a": "x', {"a": "x"}), ('{"a": "x\\', {"a": "x"}), ('{"a": "x\\u12', {"a": "x"}),
    ('{"a": "x\\ud83d', {"a": "x"}), ('{"a": "\\\\ud83d', {"a": "\\ud83d"}), ('{"a": "', {"a": ""}),
    ("{", {}), ('{"a', {}), ('{"a"', {}), ('{"a":', {}), ('{"a": tr', {"a": True}),
    ('{"a": 1', {"a": 1}), ('{"a": 1.', {"a": 1}), ('{"a": 12e+', {"a": 12}), ('{"a": -', {}),
    ('{"a": 1,', {"a": 1}), ('{"a": 1, "b', {"a": 1}), ('{"a": {"b": [1, {', {"a": {"b": [1, {}]}}),
    ('{"a": [[], ', {"a": [[]]}), ('{"a": 1} ', {"a": 1}), ('"x', "x"), ("[1, 2", [1, 2]),
]  # fmt: skip


@pytest.mark.parametrize(("text", "value"), CUT)
def test_what_there_is_of_a_cut_value_is_kept(text, value):
    assert completed(text) == value


@pytest.mark.parametrize("text", [
    "", "  ", "{'a'", '{"a": xx', '{"a" 1', '{"a": 1}}', '{"a": 1} x', '{"a": "x\n', "}", "{]",
    '{"a": 1 2', "hello", "{,", "[1,]", '{"a": 01, "b', '{"a":1e1x', '{"a": nul, "b', '{1',
    "[" * 9**5,
])  # fmt: skip
def test_what_begins_no_json_is_refused(text):
    with pytest.raises(ValueError):
        completed(text)


def drawn(source, depth):
    kind = source.random()
    if depth == 0 or kind < 0.5:
        return source.choice([1, -2.5, 1e9, True, None, "", 'a"b\\c\né\N{GRINNING FACE}', "x" * 5])
    if kind < 0.75:
        return [drawn(source, depth - 1) for _ in range(source.randrange(3))]
    return {f"é{i}": drawn(source, depth - 1) for i in range(source.randrange(3))}


def test_every_beginning_of_json_is_completed_to_json_without_half_a_character():
    source = random.Random(39)
    for _ in range(100):
        value = drawn(source, 3)
        text = json.dumps(value, ensure_ascii=source.random() < 0.5)
        assert completed(text) == value
        for end in range(1, len(text)):
            if text[:end] == "-":
                continue
            json.dumps(completed(text[:end]), ensure_ascii=False).encode()


def test_a_long_text_is_completed_in_one_pass():
    """Quadratic work would take minutes."""
    text = '{"a": [' + '[1, "xx", {"b": 2}], ' * 30_000 + '"x'
    assert len(completed(text)["a"]) == 30_001
