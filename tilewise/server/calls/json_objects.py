"""Calls as JSON objects with a name and arguments, alone or in a list."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tilewise.server.calls.reading import SPACE, CallText, Reader
from tilewise.server.calls.rules import Rules, W, quoted

__all__ = ["JsonCalls"]


@dataclass(frozen=True, slots=True)
class JsonCalls:
    """Calls as JSON objects: {"name": ..., "arguments": {...}}.

    Attributes:
        begin, end, at_start: see `parser.ReadSyntax`; the first of `begin` and of `end` is written.
        keys: the key of the arguments as the model writes it, then further ones that are read.
        name_key: the key of the name.
        id_key: a key of a running number before the name; "" for none.
        is_listed: True if the objects stand in a list, False if each has marks of its own; None
            if both occur. A list is read in any case, unless the format has no marks.
        reads_lists: False if a list without mark at the beginning is no list of calls.

    A mark that ends with "[" is the beginning of the list, too.
    """

    begin: tuple[str, ...] = ()
    end: tuple[str, ...] = ()
    at_start: bool = False
    keys: tuple[str, ...] = ("arguments", "parameters")
    name_key: str = "name"
    id_key: str = ""
    is_listed: bool | None = False
    reads_lists: bool = True

    @property
    def marks(self) -> tuple[str, ...]:
        """The texts of all marks of the syntax, some of which may be special tokens."""
        return (*self.begin, *self.end)

    def read(self, text: CallText, mark: str) -> Reader[None]:
        """Read the calls after a mark, or at the beginning of the answer (mark ""), into `text`.

        Raises:
            NotACall: what follows, or follows behind the last call, is no call.
        """
        is_list, found = mark.endswith("["), False
        while True:
            char = yield from text.after_space()
            if char == "{":
                yield from self._object(text)
                found = True
                if not is_list and not self.at_start:
                    return
            elif char == "[" and not found and not is_list and self.reads_lists:
                is_list = True
            elif is_list and char == "]" and found:
                return
            # commas of a list, and what stands between Llama's calls
            elif not (found and char in ",;" and (is_list or self.at_start)):
                text.fail(char)

    def _object(self, text: CallText) -> Reader[None]:
        call, found = text.begin(), _Object(self.name_key, self.keys)
        call.name_if_cut = lambda: found.name if found.ends_before_arguments() else None
        found.push("{")
        while not found.is_done:
            found.push((yield from text.take()))
            if found.name is not None:
                call.name = found.name
            call.add(found.taken())
        if not found.has_arguments and self.at_start and not text.tools:
            text.fail("")  # without a mark and without tools, an object with a name is just that
        text.end()

    def section(self, rules: Rules, mark: str, is_one: bool) -> str:
        """Return the grammar expression of the text after `mark`, up to the end of its calls; add
        the rules that it needs to `rules`."""
        item = self._item(rules)
        more = "" if is_one else f' ({W} "," {W} {item})*'
        opened = "" if mark.endswith("[") else '"["'
        listed = f'{opened} {W} {item}{more} {W} "]"'
        body = {None: f"({item} | {listed})", True: listed, False: item}[self.is_listed]
        end = f" {W} {rules.either(self.end[0])}" if mark and self.end else ""
        return f"{W} {body}{end}"

    def repeats(self) -> bool:
        """Return whether a mark stands before each call; False if one mark begins all calls."""
        return not self.is_listed

    def _item(self, rules: Rules) -> str:
        """Add the grammar rules of a call of each tool and of any tool; return the name of the
        latter."""
        key = " | ".join(quoted(json.dumps(key)) for key in self.keys)
        number = f'{quoted(json.dumps(self.id_key))} {W} ":" {W} /"[0-9]{{1,4}}"/ {W} "," {W} '
        made = []
        for i, tool in enumerate(rules.tools):
            name = quoted(json.dumps(tool.name, ensure_ascii=False))
            made.append(
                rules.add(
                    f"object_{i}",
                    f'"{{" {W} {number if self.id_key else ""}{quoted(json.dumps(self.name_key))} '
                    f'{W} ":" {W} {name} {W} "," {W} ({key}) {W} ":" {W} {rules.arguments(i)} '
                    f'{W} "}}"',
                )
            )
        return rules.add("object", " | ".join(made))

    def write(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return the text of calls, pairs of a tool's name and its arguments, as a model of this
        format writes them."""
        objects = []
        for i, (name, arguments) in enumerate(calls):
            number = {self.id_key: str(i)} if self.id_key else {}
            one = {**number, self.name_key: name, self.keys[0]: arguments}
            objects.append(json.dumps(one, ensure_ascii=False))
        is_marked = not self.at_start
        begin = self.begin[0] if is_marked else ""
        end = self.end[0] if is_marked and self.end else ""
        if self.is_listed is not False:
            opened = "" if begin.endswith("[") else "["
            return f"{begin}{opened}{', '.join(objects)}]{end}"
        if not begin:
            return "; ".join(objects)
        return "\n".join(f"{begin}\n{one}\n{end}" if end else begin + one for one in objects)


class _Object:
    """Parse one JSON object with a name and arguments, character by character.

    Attributes:
        is_done: True once its closing brace was read.
        name: the tool's name; None until its string is complete.
        has_arguments: True once the arguments have begun.
    """

    def __init__(self, name_key: str, keys: Sequence[str]) -> None:
        self.is_done = False
        self.name: str | None = None
        self.has_arguments = False
        self._name_key, self._keys = name_key, keys
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._token: list[str] = []  # the string or scalar at depth 1 that is being read
        self._awaits_value = False
        self._in_value = False
        self._behind: list[str] = []  # what was read since the name ended
        self._arguments = ""  # how the arguments began: "{", "[", '"' or "x" for other scalars
        self._in_arguments = False
        self._new: list[str] = []

    def push(self, char: str) -> None:
        """Process one character of the object."""
        self._behind.append(char)
        if self._in_string:
            if self._depth == 1:
                self._token.append(char)
            if self._in_arguments:
                self._new.append(char)
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1:
                    self._string_ended()
            return
        if self._awaits_value and char not in SPACE:
            self._awaits_value, self._in_value = False, True
            if self._key in self._keys and not self.has_arguments:
                self.has_arguments = self._in_arguments = True
                self._arguments = char if char in '{["' else "x"
        if self._in_arguments and not (self._depth == 1 and char in ",}"):
            self._new.append(char)
        if char == '"':
            self._in_string = True
            if self._depth == 1:
                self._token = [char]
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 1:
                self._value_ended()
            self._depth -= 1
            self.is_done = self._depth == 0
            if self._depth == 1:
                self._value_ended()
        elif char == ":" and self._depth == 1 and self._key is not None:
            self._awaits_value = True
        elif char == "," and self._depth == 1:
            self._value_ended()

    def taken(self) -> str:
        """Return the JSON text of the arguments that was read since the last `taken`; "" while a
        string or another scalar is incomplete."""
        if self._arguments not in ("{", "[") and self._in_arguments:
            return ""  # a scalar is told when it is whole
        new, self._new = "".join(self._new), []
        return new

    def ends_before_arguments(self) -> bool:
        """Return whether the text so far ends between the object's name and its arguments."""
        rest = "".join("".join(self._behind).split())
        return any(f',"{key}":'.startswith(rest) for key in self._keys)

    def _string_ended(self) -> None:
        text = _text_of("".join(self._token))
        if not self._in_value:
            self._key = text
        elif self._key == self._name_key and self.name is None:
            self.name, self._behind = text, []

    def _value_ended(self) -> None:
        if self._in_arguments:
            self._in_arguments = False
            if self._arguments not in ("{", "["):
                # some models write the arguments as a string that contains JSON
                written = "".join(self._new).strip()
                decoded = _text_of(written) if self._arguments == '"' else written
                self._new = ["{}" if decoded in ("null", None) else decoded]
        self._in_value, self._awaits_value = False, False
        self._key = None


def _text_of(written: str) -> str | None:
    try:
        text = json.loads(written)
    except ValueError:
        return None
    return text if isinstance(text, str) else None
