"""Readers of single fields of a config.json, which check types, as JSON may contain anything."""

from __future__ import annotations

import json
import math
from collections import ChainMap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from tilewise.errors import CheckpointError

Json = Mapping[str, Any]

MOST = 2**31 - 1  # sizes are int32 in kernels
_MOST_LAYERS = 10_000  # ten times DeepNet's (2022); a wrong number must not build layers endlessly


class UnknownModelError(CheckpointError):
    """Raised for a checkpoint that has no decoder in this package; transformers may run it."""


def with_fields(config: Json, **fields: Any) -> Json:
    """Return a view of a configuration with some fields replaced.

    Reading another field from the view counts as reading it from `config` (`ReadFields`).
    """
    return ChainMap(fields, cast(Any, config))


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a checkpoint's file; a byte order mark before it is ignored.

    Raises:
        CheckpointError: the file cannot be read as UTF-8, or contains no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path.name} must be valid JSON, got {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path.name} must be a JSON object, got {type(value).__name__}")
    return value


def count(config: Json, name: str, most: int = MOST) -> int:
    """Return the field `name`, a positive integer of at most `most`.

    Raises:
        CheckpointError: the field is missing, null or no such integer.
    """
    value = config.get(name)
    if value is None:
        raise CheckpointError(f"config.json must hold {name}, got none")
    if type(value) is not int or value < 1:
        raise CheckpointError(f"{name} must be a positive integer, got {value!r}")
    if value > most:
        raise CheckpointError(f"{name} must be at most {most}, got {value}")
    return value


def count_or(config: Json, name: str, default: int) -> int:
    """Return a positive integer, the default when the field is absent or null; else raise
    CheckpointError."""
    return default if config.get(name) is None else count(config, name)


def whole(config: Json, name: str, default: int) -> int:
    """Return an integer of 0 or more, the default when the field is absent or null; else raise
    CheckpointError."""
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{name} must be an integer, 0 or more, got {value!r}")
    if value > MOST:
        raise CheckpointError(f"{name} must be at most {MOST}, got {value}")
    return value


def num_layers_of(config: Json, name: str) -> int:
    """Return the field `name`, a number of layers from 1 to 10,000; else raise CheckpointError."""
    return count(config, name, _MOST_LAYERS)


def number(config: Json, name: str, default: float) -> float:
    """Return a finite number, the default when the field is absent or null; else raise
    CheckpointError."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise CheckpointError(f"{name} must be a number, got {value!r}")
    try:
        real = float(value)
    except OverflowError:
        real = math.inf
    if not math.isfinite(real):
        raise CheckpointError(f"{name} must be finite, got {value!r}")
    return real


def positive(config: Json, name: str, default: float) -> float:
    """Return a number above 0, the default when the field is absent or null; else raise
    CheckpointError."""
    value = number(config, name, default)
    if value <= 0:
        raise CheckpointError(f"{name} must be positive, got {value!r}")
    return value


def flag(config: Json, name: str, default: bool) -> bool:
    """Return True or False, the default when the field is absent or null; else raise
    CheckpointError."""
    value = config.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):  # the text "false" is true to Python
        raise CheckpointError(f"{name} must be true or false, got {value!r}")
    return value


def text_or_none(config: Json, name: str) -> str | None:
    """Return a text, None when the field is absent or null; raise CheckpointError for anything
    else."""
    value = config.get(name)
    if value is not None and not isinstance(value, str):
        raise CheckpointError(f"{name} must be a text, got {value!r}")
    return value


def object_of(config: Json, name: str) -> Json:
    """Return a JSON object in the field `name`, {} when it is absent or null; raise CheckpointError
    for anything else."""
    value = config.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} must be a JSON object, got {value!r}")
    return value


def token_id(config: Json, name: str) -> int | None:
    """Return a token id, None when the field is absent or null; raise CheckpointError for no
    integer."""
    value = config.get(name)
    if value is not None and type(value) is not int:
        raise CheckpointError(f"{name} must be a token id, got {value!r}")
    return value


def eos_token_ids(config: Json) -> tuple[int, ...]:
    """Return the end tokens of a config.json or generation_config.json, from a number, a list or
    null.

    Raises:
        CheckpointError: an entry is no integer.
    """
    value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = tuple(value) if isinstance(value, list) else (value,)
    if not all(type(i) is int for i in ids):
        raise CheckpointError(f"eos_token_id must be token ids, got {value!r}")
    return ids
