"""What a description costs in a step is bounded, however long the text is that it describes."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import numpy as np
import pytest

from tilewise.engine.sampling_options import StructuredOutputs
from tilewise.engine.steps.adjuster import END_WITHIN
from tilewise.engine.structured import Grammars
from tilewise.engine.tokenizer import load_tokenizer

pytest.importorskip("llguidance")

STORY = Path(__file__).parents[2] / "tilewise" / "assets" / "story"
LONG = "((a{1000}){1000}){1000}"
STEPS = 8


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(STORY)


@pytest.fixture(scope="module")
def grammars(tokenizer):
    return Grammars(tokenizer.to_json(), 4096, [tokenizer.eos_token_id])


def allowed(words):
    return [i for i in range(32 * len(words)) if int(words[i // 32]) >> i % 32 & 1]


@pytest.mark.parametrize(
    "outputs",
    [
        {"regex": "a{1000000}"},
        {"regex": LONG},
        {"regex": f"b?{LONG}"},
        {"json": {"type": "string", "pattern": f"^{LONG}$"}},
        {"json": {"type": "array", "items": {"const": "a"}, "minItems": 10**9}},
        {"grammar": f"start: /{LONG}/"},
        {"grammar": f'%llguidance {{"no_forcing": false}}\nstart: /{LONG}/'},
        {"grammar": 'start: a{1000}\na: b{1000}\nb: "x"'},
        {"grammar": 'root ::= a\na ::= "x" a'},
    ],
    ids=str,
)
def test_a_text_that_goes_on_in_one_way_costs_no_more_than_its_next_token(
    grammars, tokenizer, outputs
):
    """52 s of CPU time of a step before: of all requests, for 23 characters of one."""
    matcher, words = grammars.compile(StructuredOutputs(**outputs)), np.zeros(128, np.int32)
    begun = time.thread_time()
    for _ in range(STEPS):
        matcher.fill_mask(words)
        best = max(allowed(words), key=lambda i: len(tokenizer.token_bytes(i)))
        matcher.accept(best)
        matcher = matcher.copy()
    assert time.thread_time() - begun < 0.5


@pytest.mark.parametrize(
    ("outputs", "text", "wrong"),
    [
        ({"regex": "a{3}/b"}, "aaa/b", "aa/b"),
        ({"choice": ['say "no"', "yes"]}, 'say "no"', "no"),
        ({"json": {"type": "array", "items": {"type": "integer"}}}, "[1,\n  2]", "[1,,"),
        ({"json": json.dumps({"const": "\u2028\U0001f600"})}, '"\u2028\U0001f600"', '"a'),
        ({"grammar": 'start: "x" // no more'}, "x", "y"),
    ],
    ids=str,
)
def test_a_description_means_what_it_says(grammars, tokenizer, outputs, text, wrong):
    start = grammars.compile(StructuredOutputs(**outputs))
    for given, is_right in ((text, True), (wrong, False)):
        matcher, words, is_taken = start.copy(), np.zeros(128, np.int32), True
        for token in tokenizer.encode_plain(given):
            matcher.fill_mask(words)
            is_taken = is_taken and token in allowed(words)
            if is_taken:
                matcher.accept(token)
        if is_right:
            matcher.fill_mask(words)
            assert tokenizer.eos_token_id in allowed(words)
        assert is_taken == is_right


@pytest.mark.parametrize(
    ("outputs", "text", "wrong"),
    [
        ({"regex": "a{3}"}, "aaa", "b"),
        ({"choice": ["yes", "no"]}, "no", "on"),
        ({"json": {"const": 1}}, "1", "2"),
        ({"grammar": 'root ::= "x"'}, "x", "y"),
    ],
    ids=str,
)
def test_a_description_may_begin_late(grammars, tokenizer, outputs, text, wrong):
    def follows(asked, text):
        matcher, words = grammars.compile(asked), np.zeros(128, np.int32)
        for char in [*text, None]:
            [token] = [tokenizer.eos_token_id] if char is None else tokenizer.encode_plain(char)
            matcher.fill_mask(words)
            if token not in allowed(words):
                return char
            matcher.accept(token)
        return True

    late = StructuredOutputs(**outputs, lead='start: /[^.]*/ "." @text')
    assert follows(late, f"2 {wrong}.{text}") is True
    assert follows(late, f".{wrong}") == wrong[0]
    assert follows(late, text) is None, "it must not end before it has begun"
    assert follows(StructuredOutputs(**outputs), text) is True, "another one than the late one"
    with pytest.raises(TypeError, match="lead must be a str"):
        StructuredOutputs(**outputs, lead=3)


STRINGS = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
NESTED = {
    "type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}},
    "required": ["a"], "additionalProperties": False,
}  # fmt: skip


def drawn(grammars, tokenizer, outputs, budget, source):
    """A text of random tokens that a grammar allows, and why it ended."""
    matcher, words, ids = grammars.compile(outputs), np.zeros(128, np.int32), []
    for left in range(budget, 0, -1):
        matcher.fill_mask(words)
        if left <= END_WITHIN:
            matcher.end_within(words, left)
        some = [i for i in allowed(words) if i != tokenizer.eos_token_id]
        if not some:
            return tokenizer.decode(ids), "stop"
        ids.append(source.choice(some))
        matcher.accept(ids[-1])
    return tokenizer.decode(ids), "length"


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {**STRINGS, "required": ["a", "b"], "additionalProperties": False},
        NESTED,
    ],
    ids=["string", "required", "nested"],
)
def test_strings_without_end_are_closed_with_the_last_tokens(grammars, tokenizer, schema):
    for seed in range(8):
        source = random.Random(seed)
        outputs = StructuredOutputs(json=schema)
        text, why = drawn(grammars, tokenizer, outputs, source.choice((30, 45)), source)
        json.loads(text)
        # What fits is used: only what ends by itself before is shorter.
        assert why == "length" or text.endswith(("}", '"'))


def test_what_is_not_at_its_end_is_as_free_as_ever(grammars, tokenizer):
    matcher, words = grammars.compile(StructuredOutputs(json=NESTED)), np.zeros(128, np.int32)
    for char in '{"a":["x':
        matcher.fill_mask(words)
        before = words.copy()
        matcher.end_within(words, 30)
        assert (words == before).all()
        [token] = tokenizer.encode_plain(char)
        matcher.accept(token)
    told = []
    for left in (3, 2, 1):
        matcher.fill_mask(words)
        matcher.end_within(words, left)
        [token] = allowed(words)
        told.append(tokenizer.token_bytes(token))
        matcher.accept(token)
    assert b"".join(told) == b'"]}'
    matcher.fill_mask(words)
    assert tokenizer.eos_token_id in allowed(words)
    choice = grammars.compile(StructuredOutputs(choice=["yes", "no"]))
    choice.fill_mask(words)
    before = words.copy()
    choice.end_within(words, 1)
    assert (words == before).all(), "what cannot be closed is left as it is"
