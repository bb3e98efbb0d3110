"""Build the rules of a grammar, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["ANY", "Rules", "Tool", "Unwritable", "W", "WriteSyntax", "quoted", "without_notes"]

# White space between the parts of a call, as `engine.structured` allows it in JSON.
W = "W?"
ANY = "ANY"
_PARTS = r"""
W: /\n {0,16}| {1,16}/
ANY: /(.|\n)*/
TEXT: /(.|\n)+/
"""
_JSON = {"whitespace_pattern": r"\n? {0,16}"}
# Keys of a schema that are comments, keys with plain values, and keys that map names to schemas.
_NOTES = ("description", "title", "$comment")
_VALUES = ("enum", "const", "default", "examples")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_DEFINITIONS = ("$defs", "definitions")


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool, as the grammar needs it.

    Attributes:
        name: the function's name.
        schema: the JSON schema of its arguments; None allows any object.
    """

    name: str
    schema: Mapping[str, Any] | None


class Unwritable(Exception):
    """Raised for a tool with a name or a schema that no call in the model's format can follow for
    certain.

    Args:
        place: the index of the tool.
        reason: the part that cannot be followed, in words.
    """

    def __init__(self, place: int, reason: str) -> None:
        super().__init__(reason)
        self.place, self.reason = place, reason


class WriteSyntax(Protocol):
    """The properties of a format's syntax that grammars and chat histories written as text need.

    `begin` and `at_start` are those of `parser.ReadSyntax`.
    """

    @property
    def begin(self) -> tuple[str, ...]: ...
    @property
    def at_start(self) -> bool: ...

    def section(self, rules: Rules, mark: str, is_one: bool) -> str:
        """Return the grammar expression of the text after a mark, up to the end of its calls.

        Args:
            rules: the rules, to be extended.
            mark: the text that begins a section of calls.
            is_one: True if there may be one call only.

        Raises:
            Unwritable: a tool's schema cannot be followed in this syntax.
        """
        ...

    def repeats(self) -> bool:
        """Return whether a mark stands before each call; False if one mark begins all calls."""
        ...

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return the text of calls, pairs of a tool's name and its arguments, as a model of this
        format writes them."""
        ...


class Rules:
    """The rules of one grammar while it is built; str() returns them in llguidance's dialect of
    Lark, to which the caller adds the start rule.

    Args:
        tools: the tools that may be called.
        special_id: a function from a mark to the id of the special token that it is; None if the
            mark is ordinary text.
    """

    def __init__(self, tools: Sequence[Tool], special_id: Callable[[str], int | None]) -> None:
        self.tools = tools
        self.special_id = special_id
        self._rules: dict[str, str] = {}

    def __str__(self) -> str:
        return _PARTS + "".join(f"{name}: {body}\n" for name, body in self._rules.items())

    def add(self, name: str, body: str) -> str:
        """Add a rule, or a terminal if its name has capitals, in place of one of the same name.

        Returns:
            The name by which other rules refer to it: `name` without an ending "[lazy]".
        """
        self._rules[name] = body
        return name.removesuffix("[lazy]")

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def either(self, mark: str) -> str:
        """Return the grammar expression of a mark where nothing else may stand: its text, or its
        special token if it is one."""
        token = self.special_id(mark)
        return quoted(mark) if token is None else f"({quoted(mark)} | <[{token}]>)"

    def ended(self, name: str, text: str, mark: str) -> str:
        """Add the rule of a text up to and with the first `mark`; return the rule's name.

        The mark ends a lazy lexeme, so the text after it cannot be read in another way.

        Args:
            name: the name of the rule.
            text: the text before the mark, as a terminal's name or a regular expression, which may
                match the empty text.
            mark: the mark, as its text or as its special token.
        """
        written = self.add(f"{name}_written[lazy]", f"{text} {quoted(mark)}")
        token = self.special_id(mark)
        if token is None:
            return self.add(name, written)
        before = self.add(f"{name}_text", text)
        return self.add(name, f"{written} | {before}? <[{token}]>")

    def arguments(self, place: int) -> str:
        """Add the rule of the arguments, as JSON, of the tool with the index `place`; return the
        rule's name."""
        schema = self.tools[place].schema
        return self.json(f"arguments_{place}", {"type": "object"} if schema is None else schema)

    def json(self, name: str, schema: Any, root: Mapping[str, Any] | None = None) -> str:
        """Add the rule of a JSON value by its schema; return the rule's name.

        Args:
            name: the name of the rule.
            schema: the JSON schema of the value.
            root: the schema that `schema` is a part of; it may refer to definitions there.
        """
        bare = without_notes(schema)
        if not isinstance(bare, dict):
            bare = {} if bare else {"not": {}}
        more = {}
        if root and '"$ref"' in json.dumps(bare):
            more = {key: without_notes(root[key]) for key in _DEFINITIONS if key in root}
        return self.add(name, f"%json {json.dumps({**more, **bare, 'x-guidance': _JSON})}")


def quoted(text: str) -> str:
    """Return the literal of a text in a grammar, in quotation marks; "" for an empty text."""
    return json.dumps(text, ensure_ascii=False) if text else ""


def without_notes(schema: Any) -> Any:
    """Return a JSON schema without its titles, descriptions and comments, since the length of a
    grammar is limited."""
    if not isinstance(schema, Mapping):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NOTES and isinstance(value, str):
            continue
        if key in _VALUES:
            made[key] = value
        elif key in _BY_NAME and isinstance(value, Mapping):
            made[key] = {name: without_notes(part) for name, part in value.items()}
        elif isinstance(value, list):
            made[key] = [without_notes(part) for part in value]
        else:
            made[key] = without_notes(value)
    return made
