"""The streaming parser of all formats: content, and calls that a format's reader reads."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from tilewise.server.calls.parts import Part, merged
from tilewise.server.calls.reading import SPACE, CallText, NotACall, Reader, TextEnds

__all__ = ["CallParser", "ReadSyntax"]


class ReadSyntax(Protocol):
    """The properties of a format's syntax that the parser reads.

    Attributes:
        begin: the marks with which calls begin.
        end: marks that may follow a call; they are dropped there.
        at_start: True if calls stand without a mark at the beginning of the answer.
        marks: all marks, which may be special tokens.
    """

    @property
    def begin(self) -> tuple[str, ...]: ...
    @property
    def end(self) -> tuple[str, ...]: ...
    @property
    def at_start(self) -> bool: ...
    @property
    def marks(self) -> tuple[str, ...]: ...

    def read(self, text: CallText, mark: str) -> Reader[None]:
        """Read the calls after a mark, or at the beginning of the answer (mark ""), into `text`.

        Raises:
            NotACall: what follows, or follows behind the last call, is no call.
        """
        ...


class CallParser:
    """A `Parser` of one answer's content and calls, in any format of `table.FORMATS`.

    White space between content and calls is dropped. Text that looked like a call and is none is
    content, its marks included.

    Args:
        syntax: the syntax of the calls.
        tools: the schema of the parameters of each tool, by its name; names alone where the
            schemas are not known.
    """

    def __init__(self, syntax: ReadSyntax, tools: Mapping[str, Any] | Collection[str] = ()) -> None:
        self._syntax = syntax
        schemas = tools if isinstance(tools, Mapping) else dict.fromkeys(tools)
        self._text = CallText(schemas, names_only=syntax.at_start)
        self._text.on_call = self._drop_space
        self._marks = tuple(dict.fromkeys((*syntax.begin, *syntax.end)))
        first = "".join(dict.fromkeys(mark[0] for mark in self._marks))
        self._first = re.compile(f"[{re.escape(first)}]") if first else None
        self._held = ""  # text that may begin a mark
        self._space = ""  # white space after content, which is dropped if a call follows
        self._is_plain = False  # True while the next character is content unless it begins a mark
        self._flow = self._run()
        next(self._flow)

    def push(self, text: str) -> list[Part]:
        """Process the next piece of the answer's text, and return the parts that are certain now;
        text that may belong to a mark or a call is held back."""
        place = 0
        while place < len(text):
            if self._is_plain:
                found = None if self._first is None else self._first.search(text, place)
                end = len(text) if found is None else found.start()
                if end > place:
                    self._content(text[place:end])
                    place = end
                    continue
            self._flow.send(text[place])
            place += 1
        self._text.tell()
        return self._taken()

    def finish(self) -> list[Part]:
        """Process the end of the text and return the parts that were held back."""
        with contextlib.suppress(TextEnds):
            self._flow.throw(TextEnds())
        self._content(self._text.cut())
        held, self._held = self._held, ""
        self._content(held)
        if self._space and not self._text.count:
            self._text.parts.append(Part("content", self._space))
        self._space = ""
        return self._taken()

    def _taken(self) -> list[Part]:
        parts, self._text.parts = self._text.parts, []
        return merged(parts)

    def _drop_space(self) -> None:
        self._space = ""

    def _content(self, text: str) -> None:
        kept = text.rstrip(SPACE)
        if not kept:  # held text is not searched again for each further space
            self._space += text
            return
        self._text.parts.append(Part("content", self._space + kept))
        self._space = text[len(kept) :]

    def _run(self) -> Reader[None]:
        if self._syntax.at_start:
            yield from self._section("")
        while True:
            mark = yield from self._until_mark()
            if mark in self._syntax.begin:
                yield from self._section(mark)
            elif not self._text.count:
                self._content(mark)

    def _until_mark(self) -> Reader[str]:
        """Pass on content up to a mark that begins or ends calls; return the mark."""
        while True:
            if self._text.has_more:
                char = self._text.next_again()
            else:
                self._is_plain = not self._held
                char = yield
                self._is_plain = False
            self._held += char
            while self._held:
                if self._held in self._marks:
                    mark, self._held = self._held, ""
                    return mark
                if any(mark.startswith(self._held) for mark in self._marks):
                    break
                self._content(self._held[0])
                self._held = self._held[1:]

    def _section(self, mark: str) -> Reader[None]:
        text = self._text
        text.begin_section(mark)
        try:
            yield from self._syntax.read(text, mark)
        except NotACall:
            self._content(text.leave())
        else:
            text.leave()
