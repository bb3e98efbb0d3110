"""Calls as expressions, a name and arguments in brackets: Python's f(a=1), Gemma's call:f{a:1}."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.server.calls.literals import PYTHON, Dialect, escaped, value
from tilewise.server.calls.plain_text import plain_rule
from tilewise.server.calls.reading import SPACE, CallText, NotACall, Reader
from tilewise.server.calls.rules import ANY, Rules, Unwritable, W, quoted
from tilewise.server.calls.schema_types import (
    branches,
    count_in,
    mapping_in,
    names_in,
    resolved,
    values_in,
)

__all__ = ["ExpressionCalls"]

MOST = 256  # characters of a name
_CONSTANTS = {"boolean": '"True" | "False" | "true" | "false"', "null": '"None" | "null"'}
_PLAIN = {"boolean": '"true" | "false"', "null": '"null" | "None"'}
_PYTHON_KEY = r"/[a-zA-Z_][a-zA-Z_0-9]{0,63}/"
_ANY_KEY = r'/[^<>{}\[\]:," \t\r\n]{1,64}/'
# Keys of a schema that only JSON's own grammar follows.
_REFUSED = (
    "allOf",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "minProperties",
    "maxProperties",
    "prefixItems",
)


@dataclass(frozen=True, slots=True)
class ExpressionCalls:
    """Calls as expressions: [f(a=1, b="x"), g()].

    Attributes:
        begin, end, at_start: see `parser.ReadSyntax`; the first of each is written.
        bracket: the brackets around a list of calls; "" where none are.
        between: the text between two calls; "" if each call has marks of its own.
        lead: the text before a name.
        open, assign, close: the text before the arguments, the one between a name and its value,
            and the one after the arguments.
        dialect: the dialect of the values.
    """

    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    at_start: bool = False
    bracket: str = ""
    between: str = ""
    lead: str = ""
    open: str = "("
    assign: str = "="
    close: str = ")"
    dialect: Dialect = PYTHON

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of all marks of the syntax, some of which may be special tokens."""
        return (*self.begin, *self.end, self.dialect.quote)

    def read(self, text: CallText, mark: str) -> Reader[None]:
        """Read the calls after a mark, or at the beginning of the answer (mark ""), into `text`.

        Raises:
            NotACall: what follows, or follows behind the last call, is no call.
        """
        if self.bracket:
            char = yield from text.after_space()
            if char != self.bracket[0]:
                text.fail(char)
        while True:
            if self.lead and (yield from text.match(self.lead)) is None:
                raise NotACall
            yield from self._call(text)
            if not self.between:
                return
            if not self.bracket:  # a call on each line, up to the closing mark
                if (yield from text.match(*self.end)) is not None:
                    return
                continue
            char = yield from text.after_space()
            if char == self.bracket[1]:
                return
            if char != ",":
                text.fail(char)

    def _call(self, text: CallText) -> Reader[None]:
        call, head = text.begin(), list[str]()

        def name_if_cut() -> str | None:
            return "".join(head)[:-1].strip() if head and head[-1] == self.open else None

        call.name_if_cut = name_if_cut
        name = (yield from text.until(self.open, most=MOST, held=head)).strip()
        yield from text.take()
        if not _is_name(name) or not text.admits(name):
            raise NotACall
        count = 0
        while True:
            char = yield from text.after_space()
            if char == self.close:
                break
            if count:
                if char != ",":
                    text.fail(char)
                char = yield from text.after_space()
                if char == self.close:  # a comma may stand behind the last argument
                    break
            key = ""
            while char != self.assign:
                if not (_is_name(char) or char in SPACE) or len(key) > MOST:
                    text.fail(char)
                key += char
                char = yield from text.take()
            call.name = name  # the call is certain once it has a named argument
            call.add(f'{", " if count else "{"}"{escaped(key.strip())}": ')
            yield from value(text, call.add, self.dialect)
            count += 1
        call.name = name
        call.add("}" if count else "{}")
        text.end()

    def section(self, rules: Rules, mark: str, is_one: bool) -> str:
        """Return the grammar expression of the text after `mark`, up to the end of its calls; add
        the rules that it needs to `rules`.

        Raises:
            Unwritable: a tool's schema or name cannot be followed in this syntax.
        """
        one = self._rule(rules)
        between = {"": "", "\n": '"\\n"', ", ": f'"," {W}'}[self.between]
        more = f" ({between} {one})*" if between and not is_one else ""
        body = f"{one}{more}"
        if self.bracket:
            body = f"{quoted(self.bracket[0])} {W} {body} {W} {quoted(self.bracket[1])}"
        end = f" {W} {rules.either(self.end[0])}" if mark and self.end else ""
        return f"{W} {body}{end}"

    def repeats(self) -> bool:
        """Return whether a mark stands before each call; False if one mark begins all calls."""
        return not self.between

    def _rule(self, rules: Rules) -> str:
        if "expression" in rules:
            return "expression"
        made = []
        for i, tool in enumerate(rules.tools):
            if not _is_name(tool.name):
                raise Unwritable(i, f"is of {tool.name!r}, a name that cannot be written")
            head = f"{quoted(self.lead)} {quoted(tool.name)}"
            writer = _Values(rules, self.dialect, tool.schema or {})
            schema = {"type": "object"} if tool.schema is None else tool.schema
            try:
                body = writer.object(f"arguments_{i}", schema, self.open, self.assign, self.close)
            except ValueError as error:
                raise Unwritable(i, str(error)) from None
            made.append(rules.add(f"expression_{i}", f"{head} {body}"))
        return rules.add("expression", " | ".join(made))

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return the text of calls, pairs of a tool's name and its arguments, as a model of this
        format writes them."""
        made = []
        for name, arguments in calls:
            parts = [f"{k}{self.assign}{self._written(v)}" for k, v in arguments.items()]
            joint = ", " if self.assign == "=" else ","
            made.append(f"{self.lead}{name}{self.open}{joint.join(parts)}{self.close}")
        is_marked = not self.at_start
        begin = self.begin[0] if is_marked else ""
        end = self.end[0] if is_marked and self.end else ""
        if not self.between:
            return "".join(begin + one + end for one in made)
        body = self.between.join(made)
        if self.bracket:
            return f"{begin}{self.bracket[0]}{body}{self.bracket[1]}{end}"
        return f"{begin}\n{body}\n{end}"

    def _written(self, found: Any) -> str:
        quote = self.dialect.quote
        if isinstance(found, str):
            return f"{quote}{found}{quote}" if quote else json.dumps(found, ensure_ascii=False)
        if isinstance(found, dict):
            key = "{}" if quote else '"{}"'
            parts = [f"{key.format(escaped(k))}:{self._written(v)}" for k, v in found.items()]
            return "{" + ",".join(parts) + "}"
        if isinstance(found, list):
            return "[" + ",".join(map(self._written, found)) + "]"
        if not quote and (found is None or isinstance(found, bool)):
            return str(found)
        return json.dumps(found)


def _is_name(text: str) -> bool:
    return bool(text) and all(char.isalnum() or char in "_.-" for char in text)


class _Values:
    """A writer of the grammar rules of one tool's arguments: its methods add them to `rules`.

    A method raises ValueError, with the reason as its message, for a schema that the grammar cannot
    express; rules that it added before stay.

    Args:
        rules: the rules of the whole grammar.
        dialect: the notation in which the model writes values.
        root: the tool's JSON schema, in which references are looked up.
    """

    def __init__(self, rules: Rules, dialect: Dialect, root: Mapping[str, Any]) -> None:
        self._rules, self._dialect, self._root = rules, dialect, root
        self._named: dict[str, str] = {}  # rules of references, which may contain themselves

    def object(self, name: str, schema: Any, open_: str, assign: str, close: str) -> str:
        """Return the grammar expression of an object, with its brackets.

        Args:
            name: the name of the rule.
            schema: the object's JSON schema.
            open_, assign, close: the opening bracket, the text between a name and its value, and
                the closing bracket.

        Raises:
            ValueError: the schema cannot be followed.
        """
        schema = resolved(schema, self._root)
        schema = schema if isinstance(schema, Mapping) else {}
        self._check(schema)
        if "anyOf" in schema or "oneOf" in schema:
            raise ValueError("has alternatives of all arguments, which cannot be followed")
        own = mapping_in(schema, "properties")
        required = set(names_in(schema, "required"))
        if missing := required - set(own):
            raise ValueError(f"has {min(missing)!r} as a required one and does not describe it")
        if not own and schema.get("additionalProperties", True) is not False:
            others = schema.get("additionalProperties", True)
            value = self.value(f"{name}_any", others)
            key = _PYTHON_KEY if assign == "=" else _ANY_KEY
            member = f"{key} {quoted(assign)} {W} {value}"
            body = f'({member} ("," {W} {member})*)?'
            return f"{quoted(open_)} {W} {body} {W} {quoted(close)}"
        members = []
        for j, (key, part) in enumerate(own.items()):
            value = self.value(f"{name}_{j}", part)
            members.append(f"{self._written_key(key)} {quoted(assign)} {W} {value}")
        rest = ""  # what may follow the members before it
        first: list[str] = []  # how the members may begin
        for j in range(len(members) - 1, -1, -1):
            is_needed = list(own)[j] in required
            if is_needed:
                first = []
            first.insert(0, f"{members[j]} {rest}")
            one = f'"," {W} {members[j]} {rest}' if is_needed else f'("," {W} {members[j]})? {rest}'
            rest = self._rules.add(f"{name}_rest_{j}", one)
        begun = self._rules.add(f"{name}_members", " | ".join(first)) if first else ""
        if begun and not required & set(own):
            begun += "?"
        return f"{quoted(open_)} {W} {begun} {W} {quoted(close)}"

    def value(self, name: str, schema: Any) -> str:
        """Add the rule of a value by its JSON schema; return the rule's name.

        The name is `name`, unless the schema is a "$ref" that was met before: then nothing is
        added, and that rule's name is returned.
        """
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if isinstance(reference, str):
            if reference not in self._named:
                self._named[reference] = name
                self.value(name, resolved(schema, self._root))
            return self._named[reference]
        made = [self._one(f"{name}_{k}", one) for k, one in enumerate(branches(schema, self._root))]
        return self._rules.add(name, " | ".join(made))

    def _one(self, name: str, schema: Any) -> str:
        if schema is False:
            raise ValueError("has a value that must not be")
        schema = schema if isinstance(schema, Mapping) else {}
        rules, quote = self._rules, self._dialect.quote
        if quote:
            self._check(schema)
        values = values_in(schema)
        if values is not None:
            return " | ".join(self._constant(found) for found in values)
        kind = schema.get("type")
        words = _PLAIN if quote else _CONSTANTS
        if kind in words:
            return f"({words[kind]})"
        if kind in ("integer", "number"):
            return rules.json(name, schema)
        if not quote and kind is not None:  # JSON is Python's notation, but for its constants
            return rules.json(name, schema, self._root)
        if not quote:
            constants = " | ".join(words.values())
            return rules.add(f"{name}_any", f"{rules.json(name, schema, self._root)} | {constants}")
        if kind == "string":
            body = plain_rule(rules, f"{name}_text", schema, quote, quote)
            return f"{rules.either(quote)} {body}"
        if kind == "array":
            item = self.value(f"{name}_item", schema.get("items", True))
            least = count_in(schema, "minItems") or 0
            return self._array(item, least, count_in(schema, "maxItems"))
        if kind == "object" or "properties" in schema:
            return rules.add(name, self.object(name, schema, "{", ":", "}"))
        return self._anything()

    def _array(self, item: str, least: int, most: int | None) -> str:
        more = f'("," {W} {item})'
        if most == 0:
            return '"[" "]"'
        count = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        body = f"{item} {more}{count}"
        return f'"[" {W} {body if least else f"({body})?"} {W} "]"'

    def _anything(self) -> str:
        """Add the rule of any value of a dialect with its own quotes, once; return the rule's
        name."""
        rules, name, quote = self._rules, "anything", self._dialect.quote
        if name not in rules:
            rules.add(name, "anything_text")
            text = rules.ended("anything_end", ANY, quote)
            rules.add("anything_text", f"{rules.either(quote)} {text}")
            number = rules.json("anything_number", {"type": "number"})
            member = f'{_ANY_KEY} ":" {W} {name}'
            rules.add(
                name,
                f'anything_text | {number} | "true" | "false" | "null" | '
                f'"[" {W} ({name} ("," {W} {name})*)? {W} "]" | '
                f'"{{" {W} ({member} ("," {W} {member})*)? {W} "}}"',
            )
        return name

    def _constant(self, found: Any) -> str:
        quote = self._dialect.quote
        if isinstance(found, str):
            if quote and quote in found:
                raise ValueError(f"has a text with {quote} in it")
            if quote:
                return f"{self._rules.either(quote)} {quoted(found)} {self._rules.either(quote)}"
            return quoted(json.dumps(found, ensure_ascii=False))
        if isinstance(found, dict | list) and quote:
            raise ValueError("has an object as a constant, which cannot be followed")
        if found is None or isinstance(found, bool):
            words = [json.dumps(found)] if quote else [json.dumps(found), str(found)]
            return f"({' | '.join(map(quoted, words))})"
        return quoted(json.dumps(found, ensure_ascii=False))

    def _written_key(self, key: str) -> str:
        if not _is_name(key):
            raise ValueError(f"has an argument {key!r}, a name that cannot be written")
        return quoted(key)

    def _check(self, schema: Mapping[str, Any]) -> None:
        for key in _REFUSED:
            if key in schema:
                raise ValueError(f"has {key}, which cannot be followed")
