"""Read an answer's text character by character, with calls found in it.

A reader is a generator that is sent one character at a time. It is written as if the whole text
were there, so no cut of the text can change what it finds:

    char = yield from text.take()
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

from tilewise.server.calls.parts import Part

__all__ = ["SPACE", "Call", "CallText", "NotACall", "Reader", "TextEnds"]

T = TypeVar("T")
Reader = Generator[None, str, T]
SPACE = " \t\r\n"


class NotACall(Exception):
    """Raised where the text that is read turns out to be no call."""


class TextEnds(Exception):
    """Thrown into a reader, a generator that waits for a character, when the text has ended."""


class Call:
    """One call of a tool, as far as it was read: its name, and the JSON text of its arguments.

    Attributes:
        name: the tool's name; None until it is complete.
        name_if_cut: a function that returns the name if the text ends here; None if what was read
            is no call yet.
        is_told: True once a part of this call was passed on.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.name_if_cut: Callable[[], str | None] = lambda: self.name
        self.is_told = False
        self._new: list[str] = []

    def add(self, text: str) -> None:
        """Append a piece of JSON text to the arguments; `taken` returns it."""
        if text:
            self._new.append(text)

    def taken(self) -> str:
        """Return the JSON text of the arguments that was added since the last `taken`."""
        new, self._new = "".join(self._new), []
        return new


class CallText:
    """The text of one answer while calls are read in it: a source of characters for readers, and
    the parts of calls that were found.

    Args:
        tools: the schema of the parameters of each tool that may be called, by the tool's name.
        names_only: True if a call of another tool is none: the format has no mark, so that an
            answer in JSON looks like a call.

    Attributes:
        tools: see above.
        parts: the parts of calls that were found and not yet taken by the parser.
        count: the number of calls that were found and have ended.
    """

    def __init__(self, tools: Mapping[str, Any], *, names_only: bool = False) -> None:
        self.tools = tools
        self.parts: list[Part] = []
        self.count = 0
        self._names_only = names_only
        self._again = ""  # characters that a reader gave back
        self._read: list[str] = []  # what was read since the last call, as long as none is certain
        self._call: Call | None = None
        self.on_call: Callable[[], None] = lambda: None

    def take(self) -> Reader[str]:
        """Return the next character: one that was given back, or else the next one sent."""
        if self._again:
            char, self._again = self._again[0], self._again[1:]
        else:
            char = yield
        self._read.append(char)
        return char

    def give_back(self, text: str) -> None:
        """Let `text`, the characters that were read last, be read again."""
        if text:
            self._again = text + self._again
            del self._read[-len(text) :]

    @property
    def has_more(self) -> bool:
        """True if characters that were given back are still to be read."""
        return bool(self._again)

    def next_again(self) -> str:
        """Return the first of the characters that a reader gave back, and remove it; it does not
        count as read, since no call is being read."""
        char, self._again = self._again[0], self._again[1:]
        return char

    def after_space(self) -> Reader[str]:
        """Return the next character that is no white space."""
        char = yield from self.take()
        while char in SPACE:
            char = yield from self.take()
        return char

    def match(self, *marks: str) -> Reader[str | None]:
        """Read white space and one of several marks, none of which begins another one.

        Returns:
            The mark; None if other text follows, which is given back and will be read again.
        """
        held = yield from self.after_space()
        while held not in marks:
            if not any(mark.startswith(held) for mark in marks):
                self.give_back(held)
                return None
            held += yield from self.take()
        return held

    def until(self, *stops: str, most: int, held: list[str] | None = None) -> Reader[str]:
        """Return the text before the first of several marks; the mark itself is given back and
        will be read again.

        Args:
            stops: the marks to look for.
            most: the largest number of characters.
            held: a list to which each character is appended as it is read, the mark's included.

        Raises:
            NotACall: no mark comes within `most` characters.
        """
        found = [] if held is None else held
        ends = {stop[-1] for stop in stops}
        while True:
            char = yield from self.take()
            found.append(char)
            if char in ends:
                text = "".join(found)
                for stop in stops:
                    if text.endswith(stop):
                        self.give_back(stop)
                        return text[: len(text) - len(stop)]
            if len(found) > most:
                raise NotACall

    def fail(self, char: str) -> None:
        """Give the character `char` back to be read again, and raise NotACall, which ends the
        reading of calls.

        Raises:
            NotACall: always.
        """
        self.give_back(char)
        raise NotACall

    def begin_section(self, mark: str) -> None:
        """Note that `mark` opened a section of calls.

        If no call follows, `leave` returns the mark as text.
        """
        self._read = list(mark)

    def begin(self) -> Call:
        """Begin to read a call, and return it; `tell` and `end` then concern this call."""
        self._call = Call()
        return self._call

    def admits(self, name: str) -> bool:
        """Return whether a call of the tool `name` counts as a call: always without `names_only`;
        with it, if `name` is one of the tools, or if there are no tools."""
        return not self._names_only or not self.tools or name in self.tools

    def end(self) -> None:
        """End the call that is being read: pass its last arguments on, {} if it has none, and count
        it.

        Raises:
            NotACall: the call has no name, or no name that may be called.
        """
        call = self._call
        if call is None or call.name is None or not self.admits(call.name):
            raise NotACall
        if not call.is_told:
            self._begin_to_tell(call, call.taken() or "{}")
        self.tell()
        self._call, self._read = None, []
        self.count += 1

    def tell(self) -> None:
        """Append the new arguments of the call that is being read to `parts`; nothing while its
        name is unknown or not admitted."""
        call = self._call
        if call is None or call.name is None or not self.admits(call.name):
            return
        if new := call.taken():
            if call.is_told:
                self.parts.append(Part("call", new, self.count))
            else:
                self._begin_to_tell(call, new)

    def _begin_to_tell(self, call: Call, text: str) -> None:
        self.on_call()
        self.parts.append(Part("call", text, self.count, call.name))
        call.is_told = True

    def leave(self) -> str:
        """End the reading of calls; return the text read since the last call, which is content.

        If a part of an unfinished call was passed on, the call ends as it is, and the text is "".
        """
        call, self._call = self._call, None
        read, self._read = "".join(self._read), []
        if call is not None and call.is_told:
            self._call = call
            self.tell()
            self._call = None
            self.count += 1
            return ""
        return read

    def cut(self) -> str:
        """End the reading at the end of the answer: an unfinished call whose name is known is
        passed on as it is.

        Returns:
            The rest of the text, which is no call.
        """
        call = self._call
        if call is not None and not call.is_told:
            name = call.name_if_cut()
            if name is not None and self.admits(name):
                call.name = name
                self._begin_to_tell(call, call.taken())
        return self.leave()

    @property
    def reads_certain_call(self) -> bool:
        """True while a call is being read of which a part was passed on already."""
        return self._call is not None and self._call.is_told
