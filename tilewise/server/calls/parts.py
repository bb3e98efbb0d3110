"""The pieces of an answer, and what a parser of answers is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["CallsOnly", "Parser", "Part", "PlainParser", "merged"]


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of an answer, as parsers return it.

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
    """A parser of one choice of an answer, which takes its text in pieces and returns parts."""

    def push(self, text: str) -> list[Part]:
        """Process the next piece of the answer's text, and return the parts that are certain now;
        text that may become something else with more text is held back."""
        ...

    def finish(self) -> list[Part]:
        """Process the end of the text and return the parts that were held back."""
        ...


class PlainParser:
    """A parser of answers without calls and reasoning: all text is content."""

    def push(self, text: str) -> list[Part]:
        """Return the text at once, as one part of content."""
        return [Part("content", text)]

    def finish(self) -> list[Part]:
        """Return no parts, since none is held back."""
        return []


class CallsOnly:
    """A parser for an answer whose grammar allows nothing but calls.

    Content that the inner parser finds is white space or a call cut off before its name: it is
    dropped.

    Args:
        inner: the parser of the calls.
    """

    def __init__(self, inner: Parser) -> None:
        self._inner = inner

    def push(self, text: str) -> list[Part]:
        """Process the next piece of the answer's text, and return the parts of calls that are
        certain now; content is dropped."""
        return [part for part in self._inner.push(text) if part.kind == "call"]

    def finish(self) -> list[Part]:
        """Process the end of the text and return the parts of calls that were held back."""
        return [part for part in self._inner.finish() if part.kind == "call"]


def merged(parts: Iterable[Part]) -> list[Part]:
    """Return the parts in order, with neighbours of one kind and one call joined to one part."""
    made: list[Part] = []
    for part in parts:
        last = made[-1] if made else None
        if last is None or (last.kind, last.index) != (part.kind, part.index):
            made.append(part)
        else:
            made[-1] = Part(part.kind, last.text + part.text, part.index, last.name)
    return made
