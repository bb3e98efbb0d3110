"""Calls with a header, which has the tool's name, followed by the arguments as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.server.calls.json_objects import JsonCalls
from tilewise.server.calls.reading import Call, CallText, NotACall, Reader
from tilewise.server.calls.rules import Rules, Unwritable, W, quoted

__all__ = ["NAME", "NUMBER", "HeadedCalls"]

NAME, NUMBER = "\N{NULL}name", "\N{NULL}number"  # places in a header
MOST = 256  # characters of a header; names of tools have at most 64


@dataclass(frozen=True, slots=True)
class HeadedCalls:
    """Calls with a header: [TOOL_CALLS]name[ARGS]{...}.

    Attributes:
        begin, end: see `parser.ReadSyntax`; the first of `begin` and the last of `end` are written.
        head: the header as the model writes it: texts, NAME, and NUMBER for a running number.
        header: a pattern with the group "name" of all headers that are read.
        call: the mark of each call within a section of calls; "" if a section is one call.
        call_end: the mark that ends a call; "" for none.
        fence: a text between the arguments and the end of the call; "" for none.
        listed: the syntax of a list of JSON objects that may stand in place of the header.
    """

    begin: tuple[str, ...]
    end: tuple[str, ...]
    head: tuple[str, ...]
    header: re.Pattern[str]
    call: str = ""
    call_end: str = ""
    fence: str = ""
    listed: JsonCalls | None = None
    at_start: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of all marks of the syntax, some of which may be special tokens."""
        return (*self.begin, *self.end, *self.head, self.call, self.call_end)

    def read(self, text: CallText, mark: str) -> Reader[None]:
        """Read the calls after a mark, or at the beginning of the answer (mark ""), into `text`.

        Raises:
            NotACall: what follows, or follows behind the last call, is no call.
        """
        if self.listed is not None:
            char = yield from text.after_space()
            text.give_back(char)
            if char == "[":
                yield from self.listed.read(text, mark)
                return
        is_within = mark == self.call  # a section may lack its own mark
        while True:
            if self.call and not is_within:
                begun = yield from text.match(self.call, *self.end, *self.begin)
                if begun is None:
                    raise NotACall
                if begun != self.call:
                    if begun in self.begin:
                        text.give_back(begun)
                    return
            is_within = False
            yield from self._call(text)
            if not self.call:
                return

    def _call(self, text: CallText) -> Reader[None]:
        call, head = text.begin(), list[str]()
        separator = self.head[-1].strip()

        def name_if_cut() -> str | None:
            read = "".join(head)
            found = self.header.fullmatch(read) if read.rstrip().endswith(separator) else None
            return None if found is None else found["name"]

        call.name_if_cut = name_if_cut
        stops = ("{", *self.end, *self.begin, *filter(None, (self.call_end,)))
        written = yield from text.until(*stops, most=MOST, held=head)
        found = self.header.fullmatch(written)
        if found is None:
            raise NotACall
        call.name, call.name_if_cut = found["name"], lambda: call.name
        char = yield from text.take()
        if char == "{":
            call.add(char)
            yield from _object(text, call, self.call_end)
        else:
            text.give_back(char)
        text.end()
        for tail in filter(None, (self.fence.strip(), self.call_end)):
            yield from text.match(tail)

    def section(self, rules: Rules, mark: str, is_one: bool) -> str:
        """Return the grammar expression of the text after `mark`, up to the end of its calls; add
        the rules that it needs to `rules`.

        Raises:
            Unwritable: a tool's schema or name cannot be followed in this syntax.
        """
        made = []
        for i, tool in enumerate(rules.tools):
            head = " ".join(self._written(rules, part, tool.name) for part in self.head)
            example = "".join({NAME: tool.name, NUMBER: "0"}.get(part, part) for part in self.head)
            found = self.header.fullmatch(example)
            if found is None or found["name"] != tool.name or "{" in tool.name:
                raise Unwritable(i, f"is of {tool.name!r}, a name that cannot be written")
            tail = " ".join([*filter(None, [self.fence and quoted(self.fence)]), *self._end(rules)])
            made.append(rules.add(f"headed_{i}", f"{head} {W} {rules.arguments(i)} {tail}"))
        one = rules.add("headed", " | ".join(made))
        if self.listed is not None:
            one = f"({self.listed.section(rules, mark, is_one)} | {one})"
        if not self.call:
            return f"{W} {one}"
        first = one if mark == self.call else f"{W} {rules.either(self.call)} {one}"
        more = "" if is_one else f" ({W} {rules.either(self.call)} {one})*"
        end = f" {W} {rules.either(self.end[-1])}" if mark != self.call else ""
        return f"{first}{more}{end}"

    def repeats(self) -> bool:
        """Return whether a mark stands before each call; False if one mark begins all calls."""
        return not self.call

    def _written(self, rules: Rules, part: str, name: str) -> str:
        if part == NAME:
            return quoted(name)
        if part == NUMBER:
            return "/[0-9]{1,4}/"
        if self.listed is not None and part == self.head[-1]:
            return f"{W} ({rules.either(part)})?"  # Mistral's models write it since 2025
        return rules.either(part)

    def _end(self, rules: Rules) -> list[str]:
        return [rules.either(self.call_end)] if self.call_end else []

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return the text of calls, pairs of a tool's name and its arguments, as a model of this
        format writes them."""
        made = []
        for i, (name, arguments) in enumerate(calls):
            head = "".join({NAME: name, NUMBER: str(i)}.get(part, part) for part in self.head)
            body = json.dumps(arguments, ensure_ascii=False)
            made.append(f"{self.call}{head}{body}{self.fence}{self.call_end}")
        if not self.call:
            return "".join(self.begin[0] + one for one in made)
        return self.begin[0] + "".join(made) + self.end[-1]


def _object(text: CallText, call: Call, end: str) -> Reader[None]:
    """Read a JSON object after its opening brace, and add its text to the call's arguments
    unchanged.

    Args:
        text: the source of characters.
        call: the call that the object belongs to.
        end: the mark that ends a call, which also ends an object without its last braces; "" for
            none.
    """
    depth, in_string, is_escaped = 1, False, False
    while depth:
        char = yield from text.take()
        if in_string:
            if is_escaped:
                is_escaped = False
            elif char == "\\":
                is_escaped = True
            elif char == '"':
                in_string = False
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
        elif char == "<" and end:
            # No "<" stands in JSON outside of strings: the model has forgotten a brace.
            text.give_back(char)
            if (yield from text.match(end)) is not None:
                return
            char = yield from text.take()
        call.add(char)
