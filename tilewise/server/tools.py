"""Parse reasoning and tool calls in a model's text as it arrives.

Each parser is a state machine over characters, so its parts add up to the same result however the
text is cut. Whole answers go through the same machine as streams. A call's arguments are passed on
as the model wrote them, as soon as its name is known.

Formats: hermes and qwen, <tool_call>{"name": ..., "arguments": {...}}</tool_call>; llama3_json,
{"name": ..., "parameters": {...}} at the beginning; mistral, [TOOL_CALLS][{...}] or
[TOOL_CALLS]name{...}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "TOOL_PARSERS",
    "ArrayParser",
    "HermesParser",
    "LlamaParser",
    "MistralParser",
    "NamedParser",
    "Parser",
    "Part",
    "PlainParser",
    "ThinkParser",
    "reasoning_end",
]

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer.

    Attributes:
        kind: the kind of the piece: "content", "reasoning" or "call".
        text: the text of the content or reasoning, or of a call's arguments.
        index: the index of the call among the answer's calls.
        name: the name of the called tool, in the call's first part.
    """

    kind: str
    text: str = ""
    index: int = 0
    name: str | None = None


class Parser(Protocol):
    """A parser of an answer: text in, parts out."""

    def push(self, text: str) -> list[Part]:
        """Process more text and return the parts that are certain."""
        ...

    def finish(self) -> list[Part]:
        """Process the end of the text and return the parts that were held back."""
        ...


class PlainParser:
    """A parser for which everything is content."""

    def push(self, text: str) -> list[Part]:
        """See Parser."""
        return [Part("content", text)]

    def finish(self) -> list[Part]:
        """See Parser."""
        return []


class NamedParser:
    """A parser of the arguments of one call, for a tool_choice that names a tool."""

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def push(self, text: str) -> list[Part]:
        """See Parser."""
        name, self._name = self._name, None
        return [Part("call", text, 0, name)]

    def finish(self) -> list[Part]:
        """See Parser."""
        return []  # an answer without any text is no call


class _Call:
    """Parse one JSON object with a name and arguments, character by character.

    Attributes:
        raw: the object so far.
        is_done: True once its closing brace was read.
        name: the tool's name; None until its string is complete.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.is_done = False
        self.name: str | None = None
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._key: str | None = None
        self._token = 0  # index at which the string or value at depth 1 began
        self._awaits_value = False
        self._in_value = False
        self._named = 0  # index at which the name ended
        self._start: int | None = None  # index at which the arguments began
        self._end: int | None = None
        self._told = 0

    def push(self, char: str) -> None:
        """Process one character of the object."""
        place = len(self.raw)
        self.raw += char
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                if self._depth == 1:
                    self._string_ended(place)
            return
        if self._awaits_value and char not in _SPACE:
            self._awaits_value, self._in_value, self._token = False, True, place
            if self._key in _ARGUMENTS and self._start is None:
                self._start = place
        if char == '"':
            self._in_string = True
            if self._depth == 1 and not self._in_value:
                self._token = place
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            if self._depth == 1:
                self._value_ended(place)
            self._depth -= 1
            self.is_done = self._depth == 0
            if self._depth == 1:
                self._value_ended(place + 1)
        elif char == ":" and self._depth == 1 and self._key is not None:
            self._awaits_value = True
        elif char == "," and self._depth == 1:
            self._value_ended(place)

    def take(self) -> tuple[str, bool]:
        """Return the new text of the arguments, and whether the arguments have begun."""
        if self.name is None or self._start is None:
            return "", False
        written = self.raw[self._start : len(self.raw) if self._end is None else self._end]
        # some models write the arguments as a string that contains JSON
        if written.startswith('"'):
            if self._end is None:
                return "", True
            written = _text_of(written.rstrip()) or ""
        elif self._end is None and written[0] not in "{[":
            return "", True
        new, self._told = written[self._told :], max(self._told, len(written))
        return new, True

    def ends_before_arguments(self) -> bool:
        """Return whether the object ends between its name and its arguments."""
        rest = "".join(self.raw[self._named :].split())
        return any(f',"{key}":'.startswith(rest) for key in _ARGUMENTS)

    def _string_ended(self, place: int) -> None:
        if self._in_value:
            if self._key == "name" and self.name is None:
                self._named = place + 1
                self.name = _text_of(self.raw[self._token : place + 1])
        else:
            self._key = _text_of(self.raw[self._token : place + 1])

    def _value_ended(self, end: int) -> None:
        if self._in_value and self._key in _ARGUMENTS and self._end is None:
            self._end = end
        self._in_value, self._awaits_value = False, False
        self._key = None


def _text_of(written: str) -> str | None:
    try:
        text = json.loads(written)
    except ValueError:
        return None
    return text if isinstance(text, str) else None


class _CallParser:
    """Common parts of the formats: content, a sequence of calls, text that may become a marker."""

    markers: Sequence[str] = ()

    def __init__(self, names: Collection[str] = ()) -> None:
        self._names = names
        self._parts: list[Part] = []
        self._held = ""  # text that may begin a marker
        self._space = ""  # white space after content, which is dropped if a call follows
        self._count = 0
        self._call: _Call | None = None
        self._before = ""  # text that led to the call, which becomes content if there is no call
        self._is_told = False
        self._state: Callable[[str], None] = self._in_text

    def push(self, text: str) -> list[Part]:
        """See Parser."""
        for char in text:
            self._state(char)
        self._tell_call()
        return self._taken()

    def finish(self) -> list[Part]:
        """See Parser."""
        if self._call is not None:
            self._tell_call()
            if not self._is_told and not self._tell_name():
                self._reject()
            self._call = None
        held, self._held = self._held, ""
        self._content(held)
        if self._space and not self._count:
            self._parts.append(Part("content", self._space))
        self._space = ""
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._parts = self._parts, []
        merged: list[Part] = []
        for part in parts:
            if merged and part.kind == "content" == merged[-1].kind:
                merged[-1] = Part("content", merged[-1].text + part.text)
            else:
                merged.append(part)
        return merged

    def _content(self, text: str) -> None:
        kept = text.rstrip(_SPACE)
        if not kept:  # held text is not searched again for each further space
            self._space += text
            return
        self._parts.append(Part("content", self._space + kept))
        self._space = text[len(kept) :]

    def _in_text(self, char: str) -> None:
        self._held += char
        while self._held:
            for marker in self.markers:
                if self._held == marker:
                    self._held = ""
                    self._marked(marker)
                    return
            if any(marker.startswith(self._held) for marker in self.markers):
                return
            self._content(self._held[0])
            self._held = self._held[1:]

    def _marked(self, marker: str) -> None:
        raise NotImplementedError

    def _begin(self, before: str) -> None:
        """Begin to read an object, whose opening brace comes next."""
        self._call, self._before, self._is_told = _Call(), before, False
        self._state = self._in_call

    def _in_call(self, char: str) -> None:
        assert self._call is not None
        self._call.push(char)
        if not self._call.is_done:
            return
        self._tell_call()
        call, self._call = self._call, None
        if self._is_told:
            self._count += 1
        elif call.name is not None and self._admits(call.name) and self._needs_no_arguments():
            self._space = ""
            self._parts.append(Part("call", "{}", self._count, call.name))
            self._count += 1
        else:
            self._call = call
            self._reject()
            self._call = None
        self._called()

    def _tell_call(self) -> None:
        call = self._call
        if call is None or call.name is None or not self._admits(call.name):
            return
        new, is_there = call.take()
        if not is_there:
            return
        if not self._is_told:
            if not new and not call.is_done:
                return
            self._space = ""
            self._parts.append(Part("call", new or "{}", self._count, call.name))
            self._is_told = True
        elif new:
            self._parts.append(Part("call", new, self._count))

    def _tell_name(self) -> bool:
        """Emit a call that was cut off before its arguments; return whether it is one."""
        call = self._call
        assert call is not None
        if call.name is None or not self._admits(call.name) or not call.ends_before_arguments():
            return False
        self._space = ""
        self._parts.append(Part("call", "", self._count, call.name))
        self._count += 1
        return True

    def _reject(self) -> None:
        """Turn the text that was read into content, as it is no call."""
        assert self._call is not None
        self._content(self._before + self._call.raw)

    def _called(self) -> None:
        self._state = self._in_text

    def _admits(self, name: str) -> bool:
        return True

    def _needs_no_arguments(self) -> bool:
        return True


class HermesParser(_CallParser):
    """Parser of <tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Hermes and Qwen write
    it."""

    markers = ("<tool_call>", "</tool_call>")

    def _marked(self, marker: str) -> None:
        if marker == self.markers[0]:
            self._before = marker
            self._state = self._before_call
        elif not self._count:
            self._content(marker)

    def _before_call(self, char: str) -> None:
        if char == "{":
            self._begin(self._before)
            self._in_call(char)
        elif char in _SPACE:
            self._before += char
        else:
            self._state = self._in_text
            before, self._before = self._before, ""
            self._content(before)
            self._in_text(char)

    def finish(self) -> list[Part]:
        """See Parser."""
        if self._state == self._before_call:
            self._content(self._before)
        return super().finish()


class LlamaParser(_CallParser):
    """Parser of {"name": ..., "parameters": {...}} at the beginning; others follow after ";"."""

    markers = ("<|python_tag|>",)

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._state = self._at_start
        self._lead = ""

    def _marked(self, marker: str) -> None:
        self._state, self._lead = self._at_start, ""

    def _at_start(self, char: str) -> None:
        if char == "{":
            before, self._lead = self._lead, ""
            self._begin(before)
            self._in_call(char)
        elif char in _SPACE or (char in ";," and self._count):
            self._lead += char
        else:
            lead, self._lead = self._lead, ""
            self._state = self._in_text
            self._content(lead)
            self._in_text(char)

    def _called(self) -> None:
        self._state = self._at_start if self._count else self._in_text

    def _admits(self, name: str) -> bool:
        # Without marks around it, an answer in JSON looks like a call.
        return not self._names or name in self._names

    def _needs_no_arguments(self) -> bool:
        return bool(self._names)

    def finish(self) -> list[Part]:
        """See Parser."""
        lead, self._lead = self._lead, ""
        if lead and not self._count:
            self._content(lead)
        return super().finish()


class MistralParser(_CallParser):
    """Parser of [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] or [TOOL_CALLS]name{...}."""

    markers = ("[TOOL_CALLS]",)

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._name = ""
        self._in_array = False

    def _marked(self, marker: str) -> None:
        self._name, self._before = "", marker
        self._state = self._after_mark

    def _after_mark(self, char: str) -> None:
        if char in _SPACE and not self._name:
            self._before += char
        elif char == "[" and not self._name:
            self._before += char
            self._in_array, self._state = True, self._in_list
        elif char == "{" and self._name.strip():
            name = self._name.strip().removesuffix("[ARGS]")
            before = self._before + self._name
            self._begin(before)
            assert self._call is not None
            # The object is the arguments alone: read it as if it stood in a whole call.
            for written in f'{{"name":{json.dumps(name)},"arguments":':
                self._call.push(written)
            self._in_bare(char)
        else:
            self._name += char

    def _in_bare(self, char: str) -> None:
        assert self._call is not None
        self._state = self._in_bare
        self._call.push(char)
        if char == "}" and self._call._end is not None:
            self._in_call("}")

    def _in_list(self, char: str) -> None:
        if char == "{":
            self._begin(self._before if not self._count else "")
            self._in_call(char)
        elif char == "]":
            self._in_array, self._state = False, self._in_text

    def _called(self) -> None:
        self._state = self._in_list if self._in_array else self._in_text

    def finish(self) -> list[Part]:
        """See Parser."""
        if self._state == self._after_mark:
            self._content(self._before + self._name)
        elif self._state == self._in_list and not self._count:
            self._content(self._before)
        return super().finish()


class ArrayParser(MistralParser):
    """Parser of [{"name": ..., "parameters": {...}}, ...], the answer to tool_choice "required"."""

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__(names)
        self._state = self._after_mark

    def finish(self) -> list[Part]:
        """See Parser; the text is calls only, so an object cut off before its name is dropped."""
        return [part for part in super().finish() if part.kind == "call"]


class ThinkParser:
    """Parser of <think>reasoning</think>content; the content goes through another parser.

    Args:
        inner: the parser of the content.
        is_open: True if the prompt ends with <think> already.
    """

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self, inner: Parser, is_open: bool = False) -> None:
        self._inner = inner
        self._state = "reasoning" if is_open else "start"
        self._held = ""
        self._lead = 0  # number of spaces at the beginning, before the reasoning
        # white space at either end of the reasoning and before the content, which is dropped
        self._space = ""
        self._has_text = False

    def push(self, text: str) -> list[Part]:
        """See Parser."""
        parts: list[Part] = []
        reasoning: list[str] = []
        for place, char in enumerate(text):
            if self._state == "content":
                rest = text[place:]
                if not self._has_text:
                    rest = rest.lstrip(_SPACE)
                    if not rest:
                        break
                    self._has_text = True
                parts = self._with(parts, reasoning)
                return [*parts, *self._inner.push(rest)]
            self._held += char
            if self._state == "start":
                if char in _SPACE and self._lead == len(self._held) - 1:
                    self._lead += 1
                    continue
                opening = self._held[self._lead :]
                if opening == self.OPEN:
                    self._state, self._held = "reasoning", ""
                elif not self.OPEN.startswith(opening):
                    held, self._held = self._held, ""
                    self._state, self._has_text = "content", True
                    parts.extend(self._inner.push(held))
            else:
                self._reason(reasoning)
        return self._with(parts, reasoning)

    def finish(self) -> list[Part]:
        """See Parser."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            text = (self._space if self._has_text else "") + held
            kept = text.rstrip(_SPACE)
            parts = [Part("reasoning", kept)] if kept else []
        else:
            parts = self._inner.push(held) if held else []
        return [*parts, *self._inner.finish()]

    def _reason(self, reasoning: list[str]) -> None:
        while self._held:
            if self._held == self.CLOSE:
                self._state, self._held, self._space, self._has_text = "content", "", "", False
                return
            if self.CLOSE.startswith(self._held):
                return
            char, self._held = self._held[0], self._held[1:]
            if char in _SPACE:
                self._space += char
            else:
                if self._has_text:
                    reasoning.append(self._space)
                self._space, self._has_text = "", True
                reasoning.append(char)

    @staticmethod
    def _with(parts: list[Part], reasoning: list[str]) -> list[Part]:
        if reasoning:
            parts = [*parts, Part("reasoning", "".join(reasoning))]
            reasoning.clear()
        return parts


def reasoning_end(text: str, is_open: bool) -> int:
    """Return how many characters of a text are reasoning, its marks included, as ThinkParser finds
    it."""
    start = 0
    if not is_open:
        start = len(text) - len(text.lstrip(_SPACE)) + len(ThinkParser.OPEN)
        if not text[:start].endswith(ThinkParser.OPEN):
            return 0
    end = text.find(ThinkParser.CLOSE, start)
    return len(text) if end < 0 else end + len(ThinkParser.CLOSE)


TOOL_PARSERS: dict[str, Callable[[Collection[str]], Parser]] = {
    "hermes": HermesParser,
    "qwen": HermesParser,
    "llama3_json": LlamaParser,
    "mistral": MistralParser,
}
