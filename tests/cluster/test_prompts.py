"""Equal beginnings of bodies are equal pieces, and what must be kept apart is not."""

from __future__ import annotations

import json

import pytest

from tilewise.cluster.prompts import MOST_PIECES, asked_of

LONG = "Once upon a time there was a dragon who lived in a cave of the north. " * 30


def pieces(path="/v1/completions", headers=None, **fields):
    return asked_of(path, headers or {}, json.dumps(fields).encode()).pieces


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y),
                min(len(a), len(b)))  # fmt: skip


def test_texts_that_begin_alike_share_their_first_pieces():
    one, other = pieces(prompt=LONG + "The end."), pieces(prompt=LONG + "x" * 600)
    assert len(LONG) // 256 <= common(one, other) < len(other)
    assert common(pieces(prompt="x" + LONG), one) == 0


def test_token_ids_are_cut_in_runs_of_64():
    ids = list(range(200))
    assert len(pieces(prompt=ids)) == 3
    assert common(pieces(prompt=ids), pieces(prompt=[*ids[:130], 7, *ids[131:]])) == 2
    assert (
        asked_of("/v1/completions", {}, json.dumps({"prompt": ids}).encode()).prompt_tokens == 200
    )


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/messages", "messages"),
        ("/v1/responses", "input"),
    ],
)
def test_chats_share_their_beginning(path, field):
    system = {"role": "system", "content": LONG}
    one = pieces(path, **{field: [system, {"role": "user", "content": "Who?"}]})
    other = pieces(path, **{field: [system, {"role": "user", "content": "Where?" * 90}]})
    assert common(one, other) >= len(LONG) // 256
    tools = [{"type": "function", "function": {"name": "f", "description": "g" * 300}}]
    assert common(pieces(path, tools=tools, **{field: [system]}), one) == 0


def test_salts_and_keys_are_kept_apart():
    plain = pieces(prompt=LONG)
    for other in (
        pieces(prompt=LONG, cache_salt="mine"),
        pieces(headers={"authorization": "Bearer k"}, prompt=LONG),
        pieces(headers={"x-api-key": "k"}, prompt=LONG),
    ):
        assert common(plain, other) == 0
    assert pieces(prompt=LONG) == plain


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 7}, 7), ({"max_completion_tokens": 8, "n": 3}, 24),
        ({"max_output_tokens": 9}, 9), ({}, None), ({"max_tokens": "many"}, None),
        ({"max_tokens": 5, "n": "x"}, None), ({"max_tokens": -3}, 0),
    ],
)  # fmt: skip
def test_the_length_that_is_asked_for(fields, expected):
    body = json.dumps({"prompt": "hello", **fields}).encode()
    assert asked_of("/v1/completions", {}, body).output_tokens == expected


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff\xfe", b"[1, 2]", b'{"prompt": null}', b'{"prompt": []}', b'{"prompt": {"a": 1}}',
     b'{"messages": 3}', b'{"prompt": ["a", "b"]}', b'{"prompt": [[1, 2], [3]]}'],
)  # fmt: skip
def test_what_is_wrong_is_the_replicas_to_refuse(body):
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/models"):
        assert asked_of(path, {}, body).prompt_tokens >= 0


def test_brackets_in_brackets_end_nothing():
    """Those that are too deep to be read, and those that are just not."""
    for depth in (*range(300, 1100), 99_999):
        body = b'{"prompt": ' + b"[" * depth + b"]" * depth + b"}"
        assert asked_of("/v1/chat/completions", {}, body).prompt_tokens >= 0
        assert asked_of("/v1/completions", {}, body).prompt_tokens >= 0


def test_a_huge_prompt_has_pieces_up_to_a_number():
    assert len(pieces(prompt=[1] * (MOST_PIECES + 5) * 64)) == MOST_PIECES
