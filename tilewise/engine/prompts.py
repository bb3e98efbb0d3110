"""The forms in which users give prompts, and the token ids that they mean. No torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

from tilewise.engine.tokenizer import Tokenizer
from tilewise.errors import RequestError, is_integer, is_number, shown

__all__ = ["Prompt", "check_terms", "listed", "token_ids"]

Prompt = str | Mapping[str, Any]
MAX_NAME = 1024  # characters of a request's id, user or salt


def token_ids(prompt: object, tokenizer: Tokenizer | None) -> tuple[str | None, list[int]]:
    """Return the text of a prompt, None if it has none, and its token ids.

    Args:
        prompt: a text, {"prompt": text} or {"prompt_token_ids": integers}; of both the integers.
        tokenizer: of the model; None if its directory holds none.

    Raises:
        RequestError: it is none of these.
    """
    text, ids = prompt, None
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids")]
        if unknown:  # such as images: what is left out must not pass for an answer
            raise RequestError(
                f"prompt must have no keys but prompt and prompt_token_ids, got {shown(unknown[0])}"
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if ids is not None:
        return text if isinstance(text, str) else None, _integers(ids)
    if not isinstance(text, str):
        raise RequestError(
            'prompt must be a str, {"prompt": str} or {"prompt_token_ids": [...]}, '
            f"got {type(prompt).__name__}"
        )
    if tokenizer is None:
        raise RequestError("prompt must be token ids for a model without tokenizer.json, got text")
    return text, tokenizer.encode(text)


def listed(name: str, values: object) -> list[Any]:
    """Return what was given for many as a list.

    Raises:
        TypeError: it is no list: it cannot be iterated over, or is one thing (a text, a dict).
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise TypeError(f"{name} must be one or a list of them, got {type(values).__name__}")
    return list(values)


def check_terms(
    *,
    user: object = "",
    salt: object = "",
    priority: object = 0,
    deadline_s: object = None,
    max_queue_s: object = None,
    request_id: object = None,
    pooling: object = None,
) -> None:
    """Check what a caller asks of a request beside its prompt and sampling, see `Request`.

    Raises:
        RequestError: one of them is not of its type or out of its range; the message names it.
    """
    names = {"user": user, "cache_salt": salt, "request_id": request_id}
    for name, value in names.items():
        if name == "request_id" and value is None:
            continue
        if not isinstance(value, str):
            raise RequestError(f"{name} must be a str, got {type(value).__name__}")
        if len(value) > MAX_NAME:
            raise RequestError(f"{name} must be of at most {MAX_NAME} characters, got {len(value)}")
    if pooling not in (None, "mean", "last"):
        raise RequestError(f"pooling must be mean or last, got {shown(pooling)}")
    if not is_integer(priority):
        raise RequestError(f"priority must be an integer, got {shown(priority)}")
    for name, value in {"deadline_s": deadline_s, "max_queue_s": max_queue_s}.items():
        if value is None:
            continue
        if not is_number(value):
            raise RequestError(f"{name} must be a number of seconds or None, got {shown(value)}")
        try:
            seconds = float(value)
        except OverflowError:  # of an integer
            seconds = math.inf
        if not 0 <= seconds < math.inf:
            raise RequestError(f"{name} must be finite and at least 0, got {seconds:g}")


def _integers(ids: object) -> list[int]:
    """Return Python integers, whatever sequence of whatever integers (numpy, torch) these are."""
    if isinstance(ids, (str, bytes, bytearray, Mapping, Set)):  # of no order, or no ids
        raise RequestError(f"prompt token ids must be a list, got {type(ids).__name__}")
    try:
        given = iter(ids)  # type: ignore[call-overload]
    except TypeError:  # of a tensor without dimensions, too
        raise RequestError(f"prompt token ids must be a list, got {type(ids).__name__}") from None
    found = []
    for i in given:
        try:
            found.append(operator.index(i))
        except TypeError:
            raise RequestError(f"prompt token ids must be integers, got {shown(i)}") from None
        if isinstance(i, bool):
            raise RequestError(f"prompt token ids must be integers, got {shown(i)}")
    return found
