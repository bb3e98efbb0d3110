"""Calls as elements: a name, and each parameter as plain text between marks of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.server.calls.literals import as_json, escaped
from tilewise.server.calls.plain_text import plain_rule
from tilewise.server.calls.reading import SPACE, Call, CallText, NotACall, Reader
from tilewise.server.calls.rules import ANY, Rules, Unwritable, W, quoted
from tilewise.server.calls.schema_types import (
    branches,
    list_in,
    mapping_in,
    names_in,
    parameter,
    resolved,
    typed,
    types_of,
    values_in,
)

__all__ = ["ElementCalls"]

MOST = 256  # characters of a name
MOST_SPACE = 64  # characters between two marks
MOST_TYPES = 400  # parts of a schema that are looked into for one parameter
# Keys of the schema of a tool's arguments that do not concern single parameters.
_OF_ALL = (
    "anyOf",
    "oneOf",
    "not",
    "if",
    "patternProperties",
    "propertyNames",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "minProperties",
    "maxProperties",
    "enum",
    "const",
)


@dataclass(frozen=True, slots=True)
class ElementCalls:
    """Calls as elements: <function=NAME><parameter=KEY>VALUE</parameter></function>.

    Values are plain text: texts as they are, all others as JSON. Their types follow the schema.

    Attributes:
        begin, end: see `parser.ReadSyntax`; the first of each is written.
        open, open_end: the marks around a name; `open` is "" where the name follows the mark of
            the section, and `open_end` is "" where the next mark ends the name.
        close: the mark that ends a function; "" where the mark of the section ends it.
        key, key_end: the marks around a parameter's name.
        value, value_end: the marks around a parameter's value; `value` may be "".
        pad: a text at both ends of a value, which is no part of it.
        flag: a text behind a parameter's name before "true" for texts, "false" for JSON; "" for
            none.
        is_one: True if a section is one function.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    open: str
    open_end: str
    close: str
    key: str
    key_end: str
    value_end: str
    value: str = ""
    pad: str = ""
    flag: str = ""
    is_one: bool = True
    at_start: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of all marks of the syntax, some of which may be special tokens."""
        return (
            *self.begin,
            *self.end,
            self.open,
            self.close,
            self.key,
            self.key_end,
            self.value,
            self.value_end,
        )

    def read(self, text: CallText, mark: str) -> Reader[None]:
        """Read the calls that follow `mark` into `text`, up to the mark that ends them; see
        `parser.ReadSyntax.read`.

        Raises:
            NotACall: what follows is no call.
        """
        is_bare = mark == self.open  # a function may lack the section around it
        has_call = False
        while True:
            if self.open and not is_bare:
                found = yield from text.match(self.open, *self.end)
                if found is None or (found in self.end and not has_call):
                    text.give_back(found or "")
                    raise NotACall
                if found in self.end:
                    return
            yield from self._function(text, is_bare)
            has_call = True
            if is_bare or not self.open:
                return

    def _function(self, text: CallText, is_bare: bool) -> Reader[None]:
        call = text.begin()
        stops = (self.open_end,) if self.open_end else ("\n", self.key, *self.end)
        name = (yield from text.until(*stops, most=MOST)).strip()
        if not name or any(char in name for char in "\n<{") or (is_bare and name not in text.tools):
            raise NotACall
        call.name = name
        schema = text.tools.get(name)
        if self.open_end:
            yield from text.match(self.open_end)
        ends = (self.close,) if self.close else self.end
        count = 0
        while True:
            found = yield from text.match(self.key, *ends)
            if found != self.key:
                break
            yield from self._parameter(text, call, schema, count)
            count += 1
        if found is None and not count:
            raise NotACall
        call.add("}" if count else "{}")
        text.end()

    def _parameter(self, text: CallText, call: Call, schema: Any, count: int) -> Reader[None]:
        written = yield from text.until(self.key_end, most=MOST)
        yield from text.match(self.key_end)
        name, _, flag = written.partition(self.flag) if self.flag else (written, "", "")
        name = name.strip()
        if self.value and (yield from text.match(self.value)) is None:
            raise NotACall
        root = schema if isinstance(schema, Mapping) else {}
        types = types_of(parameter(schema, name), root)
        if flag in ("true", "false"):
            types = frozenset({"string"}) if flag == "true" else types
        lead = f'{", " if count else "{"}"{escaped(name)}": '
        for char in self.pad:
            first = yield from text.take()
            if first != char:
                text.give_back(first)
                break
        if types == frozenset({"string"}):
            call.add(f'{lead}"')
            yield from self._value(text, lambda char: call.add(escaped(char)))
            call.add('"')
        else:
            found: list[str] = []  # a value that is no text is told when it is whole
            yield from self._value(text, found.append)
            value = typed("".join(found), types, as_json)
            call.add(lead + value)

    def _value(self, text: CallText, tell: Callable[[str], None]) -> Reader[None]:
        """Read a parameter's value, and pass each character to `tell`.

        The value ends at its closing mark if another mark follows there; a closing mark before
        other text is a part of the value. The mark that follows is given back.
        """
        closes = tuple(dict.fromkeys((self.pad + self.value_end, self.value_end)))
        behind = (self.key, *((self.close,) if self.close else self.end))
        held = ""
        while True:
            held += yield from text.take()
            while held:
                state = _closing(held, closes, behind)
                if state is None:
                    tell(held[0])
                    held = held[1:]
                    continue
                if state:
                    text.give_back(state)
                    return
                break

    def section(self, rules: Rules, mark: str, is_one: bool) -> str:
        """Return the grammar expression of the text after `mark`, up to the end of its calls; add
        the rules that it needs to `rules`.

        Raises:
            Unwritable: a tool's schema or name cannot be followed in this syntax.
        """
        is_bare = mark == self.open
        function = self._function_rule(rules)
        if is_bare:
            return function
        if self.open:
            function = f"{W} {rules.either(self.open)} {function}"
            if not self.is_one and not is_one:
                function = f"({function})+"
            function += f" {W} {rules.either(self.end[0])}"
        return function

    def repeats(self) -> bool:
        """Return whether a mark stands before each call; False if one mark begins all calls."""
        return self.is_one

    def _function_rule(self, rules: Rules) -> str:
        if "function" in rules:
            return "function"
        made = []
        tail = rules.either(self.close or self.end[0])
        for i, tool in enumerate(rules.tools):
            if any(char in tool.name for char in '<>{}"\n') or tool.name != tool.name.strip():
                raise Unwritable(i, f"is of {tool.name!r}, a name that cannot be written")
            name = (
                f"{quoted(tool.name)} {quoted(self.open_end)}"
                if self.open_end
                else quoted(tool.name)
            )
            try:
                parameters = self._parameter_rules(rules, i)
            except ValueError as error:
                raise Unwritable(i, str(error)) from None
            body = " ".join(f"{W} {one}" for one in parameters)
            made.append(rules.add(f"function_{i}", f"{name} {body} {W} {tail}"))
        return rules.add("function", " | ".join(made))

    def _parameter_rules(self, rules: Rules, place: int) -> list[str]:
        schema = rules.tools[place].schema
        if schema is None:
            return [f"({W} {self._any_rule(rules, place, None)})*"]
        root = schema
        own, required, others = _members(schema, root, [MOST_TYPES])
        made = []
        for j, (name, part) in enumerate(own.items()):
            rule = self._member_rule(rules, f"arguments_{place}_{j}", name, part, root, place)
            made.append(rule if name in required else f"({rule})?")
        for name in required:
            if name not in own:
                raise ValueError(f"has {name!r} as a required parameter and does not describe it")
        if not own and others is not False:
            rule = self._any_rule(rules, place, others if isinstance(others, Mapping) else None)
            made.append(f"({W} {rule})*")
        return made

    def _member_rule(
        self, rules: Rules, rule: str, name: str, schema: Any, root: Mapping[str, Any], place: int
    ) -> str:
        if not name.strip() or any(mark in name for mark in (self.key_end, "<", "\n")):
            raise ValueError(f"has a parameter {name!r}, a name that cannot be written")
        made = []
        texts, others = _by_kind(schema, root)
        for k, one in enumerate(texts):
            close = f"{self.pad}{self.value_end}"
            body = plain_rule(rules, f"{rule}_{k}", one, close, self.value_end)
            made.append(self._key_rule(rules, name, "true") + f" {quoted(self.pad)} {body}")
        for k, one in enumerate(others, len(texts)):
            body = rules.json(f"{rule}_{k}", one, root)
            close = f"{quoted(self.pad)} {rules.either(self.value_end)}"
            made.append(
                self._key_rule(rules, name, "false") + f" {quoted(self.pad)} {body} {close}"
            )
        return rules.add(rule, " | ".join(made))

    def _key_rule(self, rules: Rules, name: str, flag: str) -> str:
        key = f"{name}{self.flag}{flag}" if self.flag else name
        head = f"{rules.either(self.key)} {quoted(key)} {rules.either(self.key_end)}"
        return f"{head} {W} {rules.either(self.value)}" if self.value else head

    def _any_rule(self, rules: Rules, place: int, schema: Mapping[str, Any] | None) -> str:
        """Add the rule of a parameter of any name to `rules`; return the rule's name.

        Args:
            rules: the rules, to be extended.
            place: the index of the tool.
            schema: the JSON schema of the value; None allows any text.
        """
        name = f"arguments_{place}_any"
        key = f'{rules.either(self.key)} /[^<>"\\n]{{1,64}}/'
        if self.flag:
            key += f" ({quoted(self.flag + 'true')} | {quoted(self.flag + 'false')})"
        key += f" {rules.either(self.key_end)}"
        if self.value:
            key += f" {W} {rules.either(self.value)}"
        if schema is None or not _by_kind(schema, {})[1]:
            body = rules.ended(f"{name}_value", ANY, self.value_end)
        else:
            root = rules.tools[place].schema
            value = rules.json(f"{name}_value", schema, root)
            body = f"{quoted(self.pad)} {value} {quoted(self.pad)} {rules.either(self.value_end)}"
        return rules.add(name, f"{key} {body}")

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return the text of calls, pairs of a tool's name and its arguments, as a model of this
        format writes them."""
        made = []
        for name, arguments in calls:
            parts = [f"{self.open}{name}{self.open_end}\n"]
            for key, value in arguments.items():
                is_text = isinstance(value, str)
                flag = f"{self.flag}{'true' if is_text else 'false'}" if self.flag else ""
                written = value if is_text else json.dumps(value, ensure_ascii=False)
                parts.append(
                    f"{self.key}{key}{flag}{self.key_end}{self.value}{self.pad}{written}"
                    f"{self.pad}{self.value_end}\n"
                )
            made.append("".join(parts) + self.close)
        begin = f"{self.begin[0]}\n" if self.open else self.begin[0]
        end = f"\n{self.end[0]}" if self.close else self.end[0]
        if self.is_one:
            return "\n".join(begin + one + end for one in made)
        return begin + "\n".join(made) + end


def _closing(held: str, closes: Sequence[str], behind: Sequence[str]) -> str | None:
    """Decide whether a text within a value is the value's end.

    Args:
        held: the text, the last characters that were read.
        closes: the marks that close a value.
        behind: the marks one of which follows a closed value.

    Returns:
        The mark behind the value if `held` is the end of the value; "" if `held` may become the
        end with more text; None if its first character is a part of the value.
    """
    may_become = False
    for close in closes:
        if len(held) <= len(close):
            may_become |= close.startswith(held)
        elif held.startswith(close):
            rest = held[len(close) :].lstrip(SPACE)
            if len(held) - len(close) - len(rest) > MOST_SPACE:
                continue
            if rest in behind:
                return rest
            may_become |= any(mark.startswith(rest) for mark in behind)
    return "" if may_become else None


def _by_kind(schema: Any, root: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the schemas of a parameter's alternatives that are texts, and of those that are not.

    If one of them is any value, the result is [True] and [], since any text is allowed.

    Args:
        schema: the parameter's JSON schema.
        root: the whole schema, which holds the targets of references.
    """
    texts: list[Any] = []
    others: list[Any] = []
    left = [MOST_TYPES]
    for one in branches(schema, root):
        if not isinstance(one, Mapping):
            texts, others = texts + [True] * bool(one), others
            continue
        values = values_in(one)
        types = types_of(one, root, left)
        if types is None:
            texts.append(True)
        elif isinstance(values, list):
            words = [value for value in values if isinstance(value, str)]
            if words:
                texts.append({"enum": words})
            if rest := [value for value in values if not isinstance(value, str)]:
                others.append({"enum": rest})
        elif types == frozenset({"string"}):
            texts.append(one)
        else:
            others.append(one)
    if True in texts:  # any text is one of the others as well
        return [True], []
    return texts, others


def _members(
    schema: Any, root: Mapping[str, Any], left: list[int]
) -> tuple[dict[str, Any], set[str], Any]:
    """Return a tool's parameters by name, the names of the required ones, and additionalProperties.

    Args:
        schema: the JSON schema of the parameters, or of a part of them.
        root: the whole schema, which holds the targets of references.
        left: one number, in a list: how many further schemas may be read.

    Raises:
        ValueError: more schemas are needed, or a keyword cannot be followed.
    """
    schema = resolved(schema, root)
    if not isinstance(schema, Mapping):
        return {}, set(), bool(schema)
    left[0] -= 1
    if left[0] < 0:
        raise ValueError("has too many parts")
    for key in _OF_ALL:
        if key in schema:
            raise ValueError(f"has {key}, which cannot be followed where parameters are plain text")
    own = dict(mapping_in(schema, "properties"))
    required = set(names_in(schema, "required"))
    others = schema.get("additionalProperties", True)
    for part in list_in(schema, "allOf"):
        more, needed, _ = _members(part, root, left)
        own |= more
        required |= needed
    return own, required, others
