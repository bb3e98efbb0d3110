"""What SamplingParams refuses, and the small state of a sequence."""

from __future__ import annotations

import numpy as np
import pytest

from tilewise.engine.request import FinishReason, Request, SamplingParams, Sequence


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
        ({"top_k": -2}, "top_k must be -1, 0 or a count, got -2"),
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
        ({"stop_token_ids": ["a"]}, "stop_token_ids must be a list of integers, got ['a']"),
    ],
)
def test_values_of_the_wrong_type_are_refused_by_name(values: dict, message: str):
    with pytest.raises(TypeError) as caught:
        SamplingParams(**values)
    assert str(caught.value) == message


def test_numbers_of_numpy_are_numbers():
    params = SamplingParams(n=np.int64(2), top_p=np.float32(0.5), seed=np.uint32(7))
    assert (params.n, params.top_p, params.seed) == (2, 0.5, 7)


def test_the_edges_of_each_range_are_accepted():
    SamplingParams(n=1024, top_p=1.0, top_k=-1, min_p=1.0, max_tokens=1, logprobs=20)
    SamplingParams(stop=["a" * 1024] * 64, stop_token_ids=list(range(1024)))
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
