"""The types of a tool's parameters, and values that are written as plain text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = [
    "branches",
    "count_in",
    "list_in",
    "mapping_in",
    "names_in",
    "parameter",
    "resolved",
    "typed",
    "types_of",
    "values_in",
]

MOST = 200  # references and alternatives that are followed, as a schema may contain itself
_WORDS = {"True": "true", "False": "false", "None": "null"}
_UNIONS = ("anyOf", "oneOf")


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the schema that `schema` refers to by "$ref" within the document `root`, or `schema`
    itself if it is no reference; True, any value, for a foreign, missing or endless reference."""
    for _ in range(MOST):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        if not reference.startswith("#"):
            return True
        found: Any = root
        for key in reference[1:].strip("/").split("/") if reference != "#" else ():
            key = key.replace("~1", "/").replace("~0", "~")
            found = found.get(key, True) if isinstance(found, Mapping) else True
            if found is True:
                break
        schema = found
    return True


def list_in(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return the list at `key` of a JSON schema; a missing key or null gives an empty one.

    Raises:
        ValueError: the value at `key` is no list.
    """
    found = schema.get(key)
    if found is None or isinstance(found, list):
        return found or []
    raise ValueError(f"{key} must be a list")


def mapping_in(schema: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return the object at `key` of a JSON schema; a missing key or null gives an empty one.

    Raises:
        ValueError: the value at `key` is not an object.
    """
    found = schema.get(key)
    if found is None or isinstance(found, dict):
        return found or {}
    raise ValueError(f"{key} must be an object")


def names_in(schema: Mapping[str, Any], key: str) -> list[str]:
    """Return the list of names at `key` of a JSON schema; a missing key or null gives an empty one.

    Raises:
        ValueError: the value at `key` is no list of texts.
    """
    found = list_in(schema, key)
    if not all(isinstance(name, str) for name in found):
        raise ValueError(f"{key} must be a list of texts")
    return found


def count_in(schema: Mapping[str, Any], key: str) -> int | None:
    """Return the count at `key` of a JSON schema, None for a missing key or null.

    Raises:
        ValueError: the value at `key` is no whole number of at least 0.
    """
    found = schema.get(key)
    if found is None or (isinstance(found, int) and not isinstance(found, bool) and found >= 0):
        return found
    raise ValueError(f"{key} must be a count")


def values_in(schema: Mapping[str, Any]) -> list[Any] | None:
    """Return the only values that a JSON schema allows, by its `const` or `enum`; None if it has
    neither.

    Raises:
        ValueError: the enum is no list.
    """
    if "const" in schema:
        return [schema["const"]]
    return list_in(schema, "enum") if "enum" in schema else None


def parameter(schema: Any, name: str) -> Any:
    """Return the JSON schema of the parameter `name` in the schema of a tool's arguments; True, any
    value, if nothing is known of it."""
    return _parameter(schema, name, schema if isinstance(schema, Mapping) else {}, [MOST])


def _parameter(schema: Any, name: str, root: Mapping[str, Any], left: list[int]) -> Any:
    schema = resolved(schema, root)
    left[0] -= 1
    if not isinstance(schema, Mapping) or left[0] < 0:
        return True
    own = schema.get("properties")
    if isinstance(own, Mapping) and name in own:
        return own[name]
    for key in ("allOf", *_UNIONS):
        parts = schema.get(key)
        for part in parts if isinstance(parts, list) else ():
            found = _parameter(part, name, root, left)
            if found is not True:
                return found
    other = schema.get("additionalProperties", True)
    return other if isinstance(other, Mapping) else True


def branches(schema: Any, root: Mapping[str, Any], left: list[int] | None = None) -> Iterator[Any]:
    """Yield the schemas of the alternatives of a schema: those of anyOf, oneOf, a list of types and
    `nullable`; the schema itself if it has none.

    Args:
        schema: the JSON schema.
        root: the document in which references are followed.
        left: one number, in a list: how many alternatives may still be followed; it is counted
            down, and callers may share it. None allows `MOST`.

    Raises:
        ValueError: there are more alternatives.
    """
    left = [MOST] if left is None else left
    waiting = [schema]
    while waiting:
        if left[0] <= 0:
            raise ValueError(f"has more than {MOST} alternatives")
        left[0] -= 1
        one = resolved(waiting.pop(), root)
        if not isinstance(one, Mapping):
            yield one
            continue
        union = next((key for key in _UNIONS if isinstance(one.get(key), list)), None)
        kinds = one.get("type")
        if union is not None:
            waiting += reversed(one[union])
        elif isinstance(kinds, list):
            waiting += [{**one, "type": kind} for kind in reversed(kinds)]
        else:
            yield one
        if one.get("nullable") is True:
            yield {"type": "null"}


def types_of(
    schema: Any, root: Mapping[str, Any], left: list[int] | None = None
) -> frozenset[str] | None:
    """Return the names of the JSON types that a schema's values may have; None if any type is
    possible, or if there are too many alternatives to tell.

    Args:
        schema: the JSON schema.
        root: the document in which references are followed.
        left: the number of alternatives that may still be followed, as of `branches`.
    """
    left = [MOST] if left is None else left
    found: set[str] = set()
    try:
        for one in branches(schema, root, left):
            if not isinstance(one, Mapping):
                return None
            values, parts = one.get("enum"), one.get("allOf")
            values = [one["const"]] if "const" in one else values
            if isinstance(one.get("type"), str):
                found.add(one["type"])
            elif isinstance(values, list):
                found.update(map(_type, values))
            elif isinstance(parts, list):
                known = [types_of(part, root, left) for part in parts]
                some = [types for types in known if types is not None]
                if not some:
                    return None
                found.update(frozenset.intersection(*some))
            else:
                return None
    except (ValueError, RecursionError):
        return None
    return frozenset(found)


def _type(value: Any) -> str:
    if value is None:
        return "null"
    for kind, name in (
        (bool, "boolean"),
        (int, "integer"),
        (float, "number"),
        (str, "string"),
        (list, "array"),
    ):
        if isinstance(value, kind):
            return name
    return "object"


def typed(text: str, types: frozenset[str] | None, literal: Callable[[str], str | None]) -> str:
    """Return the JSON text of a value that a model wrote as plain text, by the types that it may
    have.

    A text that may be of several types is a number, a list and so on if it is written as one, else
    a string; so it is where the types are not known.

    Args:
        text: the text that the model wrote.
        types: the names of the value's JSON types, as of `types_of`; None if they are not known.
        literal: a function that returns the JSON of a list or a dict in Python's notation, or None
            for any other text.
    """
    as_string = json.dumps(text, ensure_ascii=False)
    if types == frozenset({"string"}):
        return as_string
    bare = text.strip()
    bare = _WORDS.get(bare, bare)
    value = _value(bare)
    if value is not None and bare[:1] != '"' and _is_of(value[0], types):
        return bare
    if bare[:1] in ("{", "[", "(") and types is not None and types & {"object", "array"}:
        written = literal(bare)
        # Python reads no number of thousands of digits.
        inner = None if written is None else _value(written)
        if written is not None and inner is not None and _is_of(inner[0], types):
            return written
    if types is None or "string" in types or value is None:
        return as_string
    return bare


def _is_of(value: Any, types: frozenset[str] | None) -> bool:
    if types is None:
        return True
    kind = _type(value)
    if kind == "integer":
        return bool(types & {"integer", "number"})
    if kind == "number":
        return "number" in types or ("integer" in types and float(value).is_integer())
    return kind in types


def _value(text: str) -> tuple[Any] | None:
    """Parse a JSON text; return a tuple of its one value, or None if the text is not valid JSON."""
    try:
        return (json.loads(text, parse_constant=_refuse),)
    except (ValueError, RecursionError):
        return None


def _refuse(word: str) -> None:
    raise ValueError(word)
