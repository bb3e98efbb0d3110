"""What SamplingParams refuses, and the small state of a sequence."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.engine.request import FinishReason, Request, SamplingParams, Sequence
from tilewise.engine.sampling_options import StructuredOutputs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 0}, "n must be in 1 ... 1024, got 0"),
        ({"n": 1025}, "n must be in 1 ... 1024, got 1025"),
        ({"n": 1_000_000_000}, "n must be in 1 ... 1024, got 1000000000"),
        ({"temperature": -0.1}, "temperature must be finite and at least 0, got -0.1"),
        ({"temperature": float("inf")}, "temperature must be finite and at least 0, got inf"),
        ({"temperature": float("nan")}, "temperature must be finite and at least 0, got nan"),
        ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.01}, "top_p must be in (0, 1], got 1.01"),
        ({"top_p": float("nan")}, "top_p must be in (0, 1], got nan"),
        ({"top_k": -2}, "top_k must be -1, 0 or a count below 2^31, got -2"),
        ({"min_p": -0.1}, "min_p must be in [0, 1], got -0.1"),
        ({"min_p": 1.1}, "min_p must be in [0, 1], got 1.1"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"logprobs": -1}, "logprobs must be in 0 ... 20, got -1"),
        ({"logprobs": 21}, "logprobs must be in 0 ... 20, got 21"),
        ({"n": 2, "temperature": 0}, "n must be 1 when temperature is 0 (greedy), got 2"),
        ({"stop": ""}, "stop must not hold an empty string"),
        ({"stop": ["a", ""]}, "stop must not hold an empty string"),
        ({"stop": ["a"] * 65}, "stop must be at most 64 strings, got 65"),
        ({"stop": "a" * 1025}, "stop must be of at most 1024 characters, got one of 1025"),
        ({"stop": ["a", "b" * 1025]}, "stop must be of at most 1024 characters, got one of 1025"),
        ({"stop_token_ids": [1] * 1025}, "stop_token_ids must be at most 1024 ids, got 1025"),
        ({"stop_token_ids": [3, -5]}, "stop_token_ids must be 0 or more, got -5"),
        ({"n": 10**400}, "n must be in 1 ... 1024, got an integer of 1329 bits"),
        (
            {"logit_bias": {3: 10**400}},
            "logit_bias must be in [-100, 100], got an integer of 1329 bits for token 3",
        ),
        ({"prompt_logprobs": 21}, "prompt_logprobs must be in 0 ... 20, got 21"),
        ({"presence_penalty": 2.1}, "presence_penalty must be in [-2, 2], got 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty must be in [-2, 2], got -2.1"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty must be in [-2, 2], got nan"),
        ({"repetition_penalty": 0}, "repetition_penalty must be in 1e-06 ... 1e+06, got 0"),
        (
            {"repetition_penalty": float("inf")},
            "repetition_penalty must be in 1e-06 ... 1e+06, got inf",
        ),
        (
            {"logit_bias": dict.fromkeys(range(1025), 1.0)},
            "logit_bias must be of at most 1024 tokens, got 1025",
        ),
        ({"logit_bias": {3: 100.5}}, "logit_bias must be in [-100, 100], got 100.5 for token 3"),
        (
            {"logit_bias": {3: float("nan")}},
            "logit_bias must be in [-100, 100], got nan for token 3",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids must be 1 ... 131072 ids, got 0"),
        (
            {"allowed_token_ids": range(131_073)},
            "allowed_token_ids must be 1 ... 131072 ids, got 131073",
        ),
        ({"bad_words": ["a"] * 257}, "bad_words must be at most 256 texts, got 257"),
        (
            {"bad_words": ["a" * 1025]},
            "bad_words must be of at most 1024 characters, got one of 1025",
        ),
        ({"bad_words": ["a", " "]}, "bad_words must not hold an empty word"),
        ({"min_tokens": -1}, "min_tokens must be in 0 ... max_tokens (16), got -1"),
        ({"min_tokens": 17}, "min_tokens must be in 0 ... max_tokens (16), got 17"),
        (
            {"logits_processors": [abs] * 17},
            "logits_processors must be at most 16 functions, got 17",
        ),
    ],
)
def test_values_out_of_range_are_refused_by_name(values: dict, message: str):
    with pytest.raises(ValueError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n": 2.0}, "n must be an integer, got 2.0"),
        ({"n": True}, "n must be an integer, got True"),
        ({"top_k": None}, "top_k must be an integer, got None"),
        ({"max_tokens": 1.5}, "max_tokens must be an integer or None, got 1.5"),
        ({"seed": "x"}, "seed must be an integer or None, got 'x'"),
        ({"logprobs": True}, "logprobs must be an integer or None, got True"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"top_p": None}, "top_p must be a number, got None"),
        ({"min_p": False}, "min_p must be a number, got False"),
        ({"stop": 5}, "stop must be a str or a list of them, got 5"),
        ({"stop": ["a", 5]}, "stop must be a str or a list of them, got ['a', 5]"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a list of integers, got 5"),
        ({"stop_token_ids": 0}, "stop_token_ids must be a list of integers, got 0"),
        ({"stop_token_ids": ""}, "stop_token_ids must be a list of integers, got ''"),
        (
            {"stop_token_ids": np.array([1, 2])},
            "stop_token_ids must be a list of integers, got array([1, 2])",
        ),
        ({"stop": np.array(1)}, "stop must be a str or a list of them, got array(1)"),
        ({"bad_words": np.array(1)}, "bad_words must be a list of str, got array(1)"),
        ({"ignore_eos": "false"}, "ignore_eos must be a bool, got 'false'"),
        ({"ignore_eos": None}, "ignore_eos must be a bool, got None"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of integers, got ['a']"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs must be an integer or None, got 1.0"),
        ({"presence_penalty": "1"}, "presence_penalty must be a number, got '1'"),
        ({"repetition_penalty": None}, "repetition_penalty must be a number, got None"),
        ({"min_tokens": None}, "min_tokens must be an integer, got None"),
        ({"logit_bias": [1]}, "logit_bias must be a dict, got list"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias must have integers as keys, got '3'"),
        ({"logit_bias": {3: "1"}}, "logit_bias must have numbers as values, got '1'"),
        ({"allowed_token_ids": 5}, "allowed_token_ids must be a list of integers, got 5"),
        (
            {"allowed_token_ids": ["a"]},
            "allowed_token_ids must be a list of integers, got one that is 'a'",
        ),
        ({"bad_words": "word"}, "bad_words must be a list of str, got 'word'"),
        ({"bad_words": [1]}, "bad_words must be a list of str, got [1]"),
        (
            {"logits_processors": abs},
            "logits_processors must be a list, got builtin_function_or_method",
        ),
        ({"logits_processors": [1]}, "logits_processors must be functions, got 1"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output must be a bool, got 1"),
        ({"skip_special_tokens": None}, "skip_special_tokens must be a bool, got None"),
        ({"structured": {"regex": "a"}}, "structured must be StructuredOutputs, got dict"),
    ],
)
def test_values_of_the_wrong_type_are_refused_by_name(values: dict, message: str):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [b"a" * 5000, [b"a"] * 5000, {"a": b"a" * 5000}, [[10**900]]])
@pytest.mark.parametrize("name", SamplingParams.__slots__)
def test_whatever_is_given_the_message_is_short_and_names_the_argument(name: str, value):
    with pytest.raises((TypeError, ValueError)) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(f"{name} must ")
    assert len(str(caught.value)) < 400


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(n=np.int64(2), top_p=np.float32(0.5), seed=np.uint32(7))
    assert (params.n, params.top_p, params.seed) == (2, 0.5, 7)


def test_the_edges_of_each_range_are_accepted():
    SamplingParams(n=1024, top_p=1.0, top_k=-1, min_p=1.0, max_tokens=1, logprobs=20)
    SamplingParams(stop=["a" * 1024] * 64, stop_token_ids=list(range(1024)))
    SamplingParams(presence_penalty=-2, frequency_penalty=2.0, repetition_penalty=1e-3)
    SamplingParams(logit_bias=dict.fromkeys(range(1024), -100), allowed_token_ids=range(131_072))
    SamplingParams(bad_words=["a" * 1024] * 256, min_tokens=16, logits_processors=[abs] * 16)
    SamplingParams(max_tokens=None, min_tokens=10**9, prompt_logprobs=20)
    SamplingParams(n=1, temperature=0, top_p=1e-9, top_k=0, min_p=0.0, max_tokens=None, logprobs=0)


@pytest.mark.parametrize(
    ("stop", "strings"),
    [(None, ()), ("end", ("end",)), (["a", "b"], ("a", "b")), (("a",), ("a",)), ([], ())],
)
def test_stop_is_one_string_or_several(stop, strings: tuple[str, ...]):
    assert SamplingParams(stop=stop).stop_strings == strings


def test_greedy_is_a_temperature_of_zero():
    assert SamplingParams(temperature=0).greedy
    assert not SamplingParams(temperature=0.01).greedy


def test_output_tokens_are_those_after_the_prompt():
    request = Request("a", [1, 2, 3], SamplingParams())
    seq = Sequence(0, request, 0, [1, 2, 3], num_prompt_tokens=3)
    assert (seq.num_tokens, seq.output_token_ids) == (3, [])
    seq.token_ids += [4, 5]
    assert (seq.num_tokens, seq.output_token_ids) == (5, [4, 5])


def test_sequences_are_compared_by_identity():
    request = Request("a", [1], SamplingParams())
    one, other = (Sequence(0, request, 0, [1], 1) for _ in range(2))
    assert one != other
    assert len({one, other}) == 2


def test_finish_reasons_read_as_the_words_of_the_api():
    assert [str(r) for r in FinishReason] == ["stop", "length", "abort", "error", "deadline"]
    assert FinishReason.STOP == "stop"


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({}, ValueError, "structured must have one of json, regex, choice, grammar, got none"),
        (
            {"json": {}, "regex": "a"},
            ValueError,
            "structured must have one of json, regex, choice, grammar, got json, regex",
        ),
        ({"regex": 5}, TypeError, "regex must be a str, got 5"),
        ({"grammar": ["a"]}, TypeError, "grammar must be a str, got ['a']"),
        ({"json": 5}, TypeError, "json must be a str or a dict, got int"),
        ({"regex": ""}, ValueError, "regex must have 1 ... 65536 characters, got 0"),
        ({"regex": "a" * 65537}, ValueError, "regex must have 1 ... 65536 characters, got 65537"),
        ({"choice": []}, ValueError, "choice must hold at least 1 text, got 0"),
        ({"choice": ["a"] * 1025}, ValueError, "choice must be at most 1024 texts, got 1025"),
        ({"choice": [5]}, TypeError, "choice must be a list of str, got [5]"),
    ],
)
def test_descriptions_of_a_text_are_checked(values, error, message):
    with pytest.raises(error) as caught:
        StructuredOutputs(**values)
    assert str(caught.value) == message


def test_a_schema_that_is_no_json_is_refused():
    for schema in ("{", {"a": object()}):
        with pytest.raises(ValueError, match="json must be a JSON schema, got one that fails"):
            StructuredOutputs(json=schema)
    assert StructuredOutputs(json='{"type":  "object"}').description == '{"type": "object"}'


@pytest.mark.parametrize(
    ("options", "adjusts", "needs_tokens"),
    [
        ({}, False, False),
        ({"logprobs": 3, "prompt_logprobs": 3, "stop": "a"}, False, False),
        ({"presence_penalty": 0.1}, True, False),
        ({"repetition_penalty": 1.1}, True, False),
        ({"logit_bias": {1: 1.0}}, True, False),
        ({"allowed_token_ids": [1]}, True, False),
        ({"min_tokens": 1}, True, False),
        ({"logits_processors": [abs]}, True, True),
    ],
)
def test_a_request_says_what_its_logits_need(options, adjusts, needs_tokens):
    request = Request("a", [1], SamplingParams(**options))
    assert (request.adjusts, request.needs_tokens) == (adjusts, needs_tokens)


def test_bad_words_of_one_token_need_no_other_token():
    sampling = SamplingParams(bad_words=["x"])
    assert not Request("a", [1], sampling, bad_word_ids=((5,), (6,))).needs_tokens
    assert Request("a", [1], sampling, bad_word_ids=((5,), (6, 7))).needs_tokens


def test_a_structured_text_ends_with_the_models_end_token_always():
    sampling = SamplingParams(ignore_eos=True, structured=StructuredOutputs(regex="a"))
    request = Request("a", [1], sampling, (2,), new_matcher=lambda: None)
    assert 2 in request.end_ids
