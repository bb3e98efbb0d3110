"""Parse an answer that begins with reasoning between marks, as it arrives."""

from __future__ import annotations

from tilewise.server.calls.parts import Parser, Part
from tilewise.server.calls.reading import SPACE
from tilewise.server.calls.table import Reasoning

__all__ = ["ThinkParser", "is_ended_in", "is_open_in", "reasoning_end"]


class ThinkParser:
    """A parser of one answer with reasoning at its beginning; the content behind it goes through
    another parser.

    White space at either end of the reasoning and before the content is dropped.

    Args:
        form: the format of the reasoning.
        inner: the parser of the content.
        is_open: True if the prompt ends with the reasoning's first mark already.
    """

    def __init__(self, form: Reasoning, inner: Parser, is_open: bool = False) -> None:
        self._form = form
        self._inner = _Unwrapped(inner, form.answer) if form.answer else inner
        self._state = "reasoning" if is_open else "start"
        self._held = ""
        self._lead = 0  # number of spaces at the beginning, before the reasoning
        self._label = form.label.strip(SPACE)  # a text that is dropped if the reasoning begins so
        self._space = ""
        self._has_text = False

    def push(self, text: str) -> list[Part]:
        """Process the next piece of the answer's text, and return the parts that are certain now;
        text that may belong to a mark is held back."""
        parts: list[Part] = []
        reasoning: list[str] = []
        for place, char in enumerate(text):
            if self._state == "content":
                rest = text[place:]
                if not self._has_text:
                    rest = rest.lstrip(SPACE)
                    if not rest:
                        break
                    self._has_text = True
                parts = self._with(parts, reasoning)
                return [*parts, *self._inner.push(rest)]
            self._held += char
            if self._state == "start":
                if char in SPACE and self._lead == len(self._held) - 1:
                    self._lead += 1
                    continue
                opening = self._held[self._lead :]
                if opening == self._form.begin:
                    self._state, self._held = "reasoning", ""
                elif not self._form.begin.startswith(opening):
                    held, self._held = self._held, ""
                    self._state, self._has_text = "content", True
                    parts.extend(self._inner.push(held))
            else:
                self._reason(reasoning)
        return self._with(parts, reasoning)

    def finish(self) -> list[Part]:
        """Process the end of the text and return the parts that were held back."""
        held, self._held = self._held, ""
        if self._state == "reasoning":
            text = (self._space if self._has_text else "") + held
            kept = text.rstrip(SPACE)
            parts = [Part("reasoning", kept)] if kept else []
        else:
            parts = self._inner.push(held) if held else []
        return [*parts, *self._inner.finish()]

    def _reason(self, reasoning: list[str]) -> None:
        while self._held:
            if self._held == self._form.end:
                self._state, self._held, self._space, self._has_text = "content", "", "", False
                return
            if self._form.end.startswith(self._held):
                return
            if self._label:
                if self._held == self._label:
                    self._held, self._label = "", ""
                    return
                if self._label.startswith(self._held):
                    return
            char, self._held = self._held[0], self._held[1:]
            if char in SPACE:
                self._space += char
            else:
                self._label = ""
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


class _Unwrapped:
    """A parser of content that may stand between two marks, which are dropped with the white space
    beside them.

    Args:
        inner: the parser of what stands between them, or of an answer without them.
        marks: the marks; the first counts at the beginning only, the second if the first was there.
    """

    def __init__(self, inner: Parser, marks: tuple[str, ...]) -> None:
        self._inner = inner
        self._begin, self._end = marks
        self._state = "start"
        self._held = ""  # text that may become a mark
        self._space: list[str] = []  # white space before it, which belongs to the last mark

    def push(self, text: str) -> list[Part]:
        """Process the next piece of the answer's text, and return the parts that are certain now;
        text that may belong to a mark is held back."""
        passed: list[str] = []
        for char in text:
            if self._state == "plain":
                passed.append(char)
                continue
            if char in SPACE and not self._held:
                if self._state != "first":  # white space behind the first mark is dropped
                    self._space.append(char)
                continue
            self._held += char
            if self._state == "start":
                if self._held == self._begin:
                    self._state, self._held, self._space = "first", "", []
                elif not self._begin.startswith(self._held):
                    self._state = "plain"
                    passed += (*self._space, self._held)
                    self._held, self._space = "", []
                continue
            self._state = "inside"
            self._hold(passed)
        joined = "".join(passed)
        return self._inner.push(joined) if joined else []

    def _hold(self, passed: list[str]) -> None:
        while self._held:
            if self._held == self._end:
                self._state, self._held, self._space = "plain", "", []
                return
            if self._end.startswith(self._held):
                return
            first, self._held = self._held[0], self._held[1:]
            if first in SPACE:
                self._space.append(first)
            else:
                passed += (*self._space, first)
                self._space = []

    def finish(self) -> list[Part]:
        """Process the end of the text and return the parts that were held back."""
        held, self._held = "".join(self._space) + self._held, ""
        self._space = []
        return [*(self._inner.push(held) if held else ()), *self._inner.finish()]


def reasoning_end(form: Reasoning, text: str, is_open: bool) -> int:
    """Return how many characters at the beginning of an answer are reasoning, its marks included.

    This is the part that `ThinkParser` takes for reasoning; 0 if there is none.

    Args:
        form: the format of the reasoning.
        text: the whole answer.
        is_open: True if the prompt ends with the reasoning's first mark already.
    """
    start = 0
    if not is_open:
        start = len(text) - len(text.lstrip(SPACE)) + len(form.begin)
        if not text[:start].endswith(form.begin):
            return 0
    end = text.find(form.end, start)
    return len(text) if end < 0 else end + len(form.end)


def is_open_in(form: Reasoning, prompt: str) -> bool:
    """Return whether a rendered prompt ends with the mark that begins the reasoning, or with the
    label behind it; white space at the end does not count."""
    end = prompt.rstrip()
    return end.endswith((form.begin, (form.begin + form.label).rstrip()))


def is_ended_in(form: Reasoning, prompt: str) -> bool:
    """Return whether a rendered prompt ends with the mark that ends the reasoning; white space
    behind it does not count."""
    return prompt.rstrip().endswith(form.end)
