"""The rule of a text that stands without quotes, up to its closing mark."""

from __future__ import annotations

import re
from typing import Any

from tilewise.server.calls.rules import ANY, Rules, quoted
from tilewise.server.calls.schema_types import count_in, values_in

__all__ = ["plain_rule"]

_CHAR = r"(.|\n)"


def plain_rule(rules: Rules, name: str, schema: Any, written: str, mark: str) -> str:
    """Add the grammar rule of a text by its schema, and of the mark behind it; return the rule's
    name.

    The mark is in no such text. `pattern`, `minLength`, `maxLength`, `enum` and `const` are
    followed; `format` is not.

    Args:
        rules: the rules, to be extended.
        name: the name of the rule.
        schema: the JSON schema of the text.
        written: the mark with the text before it that belongs to it, as the model writes both.
        mark: the mark, which may be a special token.

    Raises:
        ValueError: a value of the schema has the mark in it, or the schema is not valid.
    """
    schema = schema if isinstance(schema, dict) else {}
    pad = written.removesuffix(mark)
    values = values_in(schema)
    if values is not None:
        if any(mark in value for value in values):
            raise ValueError(f"has a text with {mark} in it")
        words = " | ".join(quoted(value) or '""' for value in values)
        return rules.add(name, f"({words}) {quoted(pad)} {rules.either(mark)}")
    least, most = count_in(schema, "minLength") or 0, count_in(schema, "maxLength")
    pattern = schema.get("pattern")
    if not isinstance(pattern, str | None):
        raise ValueError("pattern must be a text")
    if not least and most is None and pattern is None:
        return rules.ended(name, ANY, mark)
    parts = []
    if least or most is not None:
        parts.append(f"/{_CHAR}{{{least},{'' if most is None else most}}}/")
    if pattern is not None:
        parts.append(f"/{_whole(pattern)}/")
    escaped = re.sub(r"([\\.^$|?*+()\[\]{}/])", r"\\\1", mark)
    parts.append(f"~/{_CHAR}*{escaped}{_CHAR}*/")
    text = rules.add(f"{name.upper()}_TEXT", " & ".join(parts))
    token = rules.special_id(mark)
    # The text and its mark are one lexeme: the text alone would take the mark's first characters.
    whole = rules.add(f"{name.upper()}_WHOLE", f"{text} {quoted(written)}")
    if token is None:
        return rules.add(name, whole)
    return rules.add(name, f"{whole} | {text} {quoted(pad)} <[{token}]>")


def _whole(pattern: str) -> str:
    """Return a regular expression for a whole text in which `pattern`, of a JSON schema, matches
    somewhere; ^ and $ bind it to the text's ends."""
    begin = "" if pattern.startswith("^") else f"{_CHAR}*"
    is_end = pattern.endswith("$") and not pattern.endswith("\\$")
    end = "" if is_end else f"{_CHAR}*"
    core = pattern.removeprefix("^")
    core = core[:-1] if is_end else core
    core = re.sub(r"(?<!\\)/", r"\\/", core).replace("\n", r"\n").replace("\r", r"\r")
    return f"{begin}({core}){end}"
