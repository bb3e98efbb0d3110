"""The parts of a request's body that decide its route: how the prompt begins, and its size.

Prompts are not tokenised here. A text is cut into pieces of 256 bytes, about 64 tokens, and a list
of ids into pieces of 64; the hash of a piece covers everything before it, too. The pieces of a chat
are those of its messages and tools as they were sent: equal ones become equal prompts. Keys and
salts that separate requests in the prefix cache also separate their hashes here. No torch, no Ray.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tilewise.cluster.router import Asked
from tilewise.server.bodies import SHORT, refuse_crowded
from tilewise.server.errors import ApiError

__all__ = ["BYTES_A_TOKEN", "asked_of"]

PIECE_TOKENS = 64
BYTES_A_TOKEN = 4  # for English text; texts in other languages have more tokens than this estimates
MOST_PIECES = 2048  # of a prompt: 131,072 tokens
# Fields of a chat in the order in which templates write them.
_CHAT = ("chat_template", "tools", "system", "instructions")
_MESSAGES = {
    "/v1/chat/completions": "messages",
    "/v1/messages": "messages",
    "/v1/responses": "input",
}
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


def asked_of(path: str, headers: Mapping[str, str], body: bytes) -> Asked:
    """Return the properties of a request by which the router chooses a replica.

    A body that is no JSON object has no prompt pieces; the replica will refuse it.

    Args:
        path: the path of the URL.
        headers: the headers, with names in lower case.
        body: the body as it was received.
    """
    try:
        if len(body) > SHORT:
            refuse_crowded(body)  # a replica refuses it, too
        fields = json.loads(body)
    except (ApiError, ValueError, RecursionError):  # RecursionError: a thousand nested brackets
        fields = None
    if not isinstance(fields, dict):
        return Asked(prompt_tokens=len(body) // BYTES_A_TOKEN)
    key = headers.get("authorization") or headers.get("x-api-key") or ""
    seed = hash((key, str(fields.get("cache_salt"))))
    runs: list[Any] = []
    if path in _MESSAGES:
        runs = [fields[name] for name in _CHAT if fields.get(name) is not None]
        messages = fields.get(_MESSAGES[path])
        runs += messages if isinstance(messages, list) else [messages]
    else:
        prompt: Any = fields.get("prompt", fields.get("input", ""))
        # Of several prompts the first decides.
        is_several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
        runs = [prompt[0] if is_several else prompt]
    ids = runs[0] if len(runs) == 1 and isinstance(runs[0], list) else None
    pieces: tuple[int, ...]
    if ids is not None and all(isinstance(i, int) for i in ids):
        tokens = len(ids)
        pieces = tuple(_chained(seed, (tuple(ids[i : i + PIECE_TOKENS]) for i in _starts(tokens))))
    else:
        text = b"".join(_bytes(run) for run in runs)
        tokens = len(text) // BYTES_A_TOKEN
        size = PIECE_TOKENS * BYTES_A_TOKEN
        pieces = tuple(
            _chained(
                seed, (text[i : i + size] for i in map(BYTES_A_TOKEN.__mul__, _starts(tokens)))
            )
        )
    return Asked(pieces, PIECE_TOKENS, tokens, _output_tokens(fields))


def _starts(tokens: int) -> range:
    """Return the token indices at which the whole pieces of a prompt begin, at most MOST_PIECES of
    them."""
    return range(0, min(tokens - PIECE_TOKENS + 1, MOST_PIECES * PIECE_TOKENS), PIECE_TOKENS)


def _chained(seed: int, pieces: Iterator[Any]) -> Iterator[int]:
    before = seed
    for piece in pieces:
        before = hash((before, piece))
        yield before


def _bytes(run: Any) -> bytes:
    if isinstance(run, str):
        return run.encode("utf-8", "replace")
    try:
        text = json.dumps(run, ensure_ascii=False, sort_keys=True)
    except RecursionError:
        return b""
    return text.encode("utf-8", "replace")


def _output_tokens(fields: Mapping[str, Any]) -> int | None:
    found = next((fields[name] for name in _LIMITS if fields.get(name) is not None), None)
    samples = fields.get("n") or 1
    if not isinstance(found, int) or isinstance(found, bool) or not isinstance(samples, int):
        return None
    return max(found, 0) * max(samples, 1)
