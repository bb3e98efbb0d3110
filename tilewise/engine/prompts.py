"""The forms in which users give prompts, and the token ids that they mean. No torch."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Set
from typing import Any

from tilewise.engine.tokenizer import Tokenizer
from tilewise.errors import RequestError, shown

__all__ = ["Prompt", "listed", "token_ids"]

Prompt = str | Mapping[str, Any]
_KEYS = ("prompt", "prompt_token_ids", "token_type_ids")


def token_ids(
    prompt: object, tokenizer: Tokenizer | None
) -> tuple[str | None, list[int], list[int]]:
    """Return the text of a prompt or None, its token ids, and the types of its tokens, [] if not
    given.

    Args:
        prompt: a text, {"prompt": text} or {"prompt_token_ids": integers}; of both the integers
            count. Beside token ids there may be {"token_type_ids": integers}.
        tokenizer: the tokenizer of the model; None if its directory holds none.

    Raises:
        RequestError: the prompt is none of these, or a text where there is no tokenizer.
    """
    text, ids, types = prompt, None, list[int]()
    if isinstance(prompt, Mapping):
        unknown = [key for key in prompt if key not in _KEYS]
        if unknown:  # such as images: what is left out must not pass for an answer
            raise RequestError(
                f"prompt must have no keys but prompt and prompt_token_ids, got {shown(unknown[0])}"
            )
        text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if prompt.get("token_type_ids") is not None:
            types = _integers(prompt["token_type_ids"])
    if ids is not None:
        found = _integers(ids)
        if types and len(types) != len(found):
            raise RequestError(
                f"token_type_ids must be as many as the {len(found)} token ids, got {len(types)}"
            )
        return text if isinstance(text, str) else None, found, types
    if not isinstance(text, str):
        raise RequestError(
            'prompt must be a str, {"prompt": str} or {"prompt_token_ids": [...]}, '
            f"got {type(prompt).__name__}"
        )
    if tokenizer is None:
        raise RequestError("prompt must be token ids for a model without tokenizer.json, got text")
    return text, tokenizer.encode(text), []


def listed(name: str, values: object) -> list[Any]:
    """Return the items of an argument that holds one item for each of several requests.

    Raises:
        TypeError: the argument cannot be iterated over, or is a single item (a text, a dict).
    """
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise TypeError(f"{name} must be one or a list of them, got {type(values).__name__}")
    return list(values)


def _integers(ids: object) -> list[int]:
    """Return a list of Python integers from any ordered iterable of integers (numpy's, torch's
    ...).

    Raises:
        RequestError: the argument is no such iterable, or holds something else or a bool.
    """
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
