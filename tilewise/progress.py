"""Progress of work that takes a while, on standard error: all that decides what is shown, and how.

On a terminal one line is written over as work goes on, cut to the terminal's width and wiped at the
end. A file, a pipe and a terminal that cannot write over a line (TERM=dumb) get a whole line now
and then, without control characters, and of short work none. No colours are used, so NO_COLOR
changes nothing. TILEWISE_PROGRESS=0 in the environment keeps all of it silent.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from typing import Any, Protocol

__all__ = ["Progress", "Show", "is_wanted", "say", "silent", "time_left", "writes_over"]

_INTERVAL = 0.1  # seconds between two lines at least where one is written over
_NOW_AND_THEN = 10.0  # where each stays
_SOON = 2.0  # seconds of work before the time left says anything
_WIPE = "\r\x1b[K"


class Show(Protocol):
    """The type of a function that reports progress: `text` for the work, and the share that is
    done, 0 to 1; None if it is not known."""

    def __call__(self, text: str, share: float | None = None) -> None: ...


def silent(text: str, share: float | None = None) -> None:
    """Show nothing: the `Show` of callers that want no progress."""


def is_wanted(asked: bool | None = None) -> bool:
    """Return whether progress shall be shown: `asked`, or if that is None, unless TILEWISE_PROGRESS
    is 0, false, off or no.

    Without a standard error it is never shown.
    """
    if sys.stderr is None:
        return False
    if asked is not None:
        return asked
    return os.environ.get("TILEWISE_PROGRESS", "").lower() not in ("0", "false", "off", "no")


def writes_over(stream: Any) -> bool:
    """Return whether a line on this stream can be written over: True for a terminal, unless TERM is
    dumb."""
    return bool(getattr(stream, "isatty", bool)()) and os.environ.get("TERM") != "dumb"


def say(line: str) -> None:
    """Write a line that stays to standard error; it replaces a line of progress that is shown.

    A failure to write, because nobody reads, is ignored.
    """
    stream = sys.stderr
    if stream is not None:
        # It is closed, its reader has gone, or it was replaced by an object that can only write.
        with suppress(OSError, ValueError, AttributeError):
            stream.write(f"{_WIPE if writes_over(stream) else ''}{line}\n")
            stream.flush()


class Progress:
    """A line of progress about work that takes a while; a context manager, whose end wipes the
    line.

    On a stream that is no terminal, `show` writes a whole line every 10 s at most.

    Args:
        asked: True to show progress, False not to; None decides by `is_wanted`.
        stream: the stream to write to, whatever `asked` is; None is standard error.
    """

    def __init__(self, asked: bool | None = None, stream: Any = None) -> None:
        if stream is None and is_wanted(asked):
            stream = sys.stderr
        self._stream = stream
        self._is_over = self._stream is not None and writes_over(self._stream)
        self._since = time.monotonic()
        self._due = self._since + (0.0 if self._is_over else _NOW_AND_THEN)
        self._share = 0.0
        self._stands = False

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def is_shown(self) -> bool:
        """Whether this object writes at all: it has a stream."""
        return self._stream is not None

    def show(self, text: str, share: float | None = None) -> None:
        """Write `text`, with the time left, unless a line was written less than 0.1 s ago (10 s
        where lines stay).

        Args:
            text: the words to show, on one line.
            share: the part of the work that is done, 0 to 1, from which the time left follows. A
                share smaller than the last one begins other work, and so does None.
        """
        now = time.monotonic()
        if share is None or share < self._share:
            self._since = now
        self._share = share or 0.0
        if self._stream is None or now < self._due:
            return
        if left := time_left(now - self._since, share):
            text = f"{text}, {left}"
        line = f"{_WIPE}{_cut(text, self._stream)}" if self._is_over else f"{text}\n"
        with suppress(OSError, ValueError):
            self._stream.write(line)
            self._stream.flush()
        self._stands = self._is_over
        self._due = now + (_INTERVAL if self._is_over else _NOW_AND_THEN)

    def close(self) -> None:
        """Wipe the line of progress, if one is on the terminal."""
        if self._stands:
            with suppress(OSError, ValueError):
                self._stream.write(_WIPE)
                self._stream.flush()
            self._stands = False


def time_left(seconds: float, share: float | None) -> str:
    """Return a text such as "2 min left" for work whose first `share` took `seconds`.

    "" if the share is None, 0 or 1, or less than 2 s have passed.
    """
    if not share or share >= 1.0 or seconds < _SOON:
        return ""
    left = seconds * (1.0 - share) / share
    if left < 100:
        return f"{left:.0f} s left"
    if left < 6000:
        return f"{left / 60:.0f} min left"
    return f"{left / 3600:.0f} h left"


def _cut(text: str, stream: Any) -> str:
    """Return as much of a text as fits on one line of the terminal, since a line that wraps could
    not be wiped.

    A text that is cut ends with "…"; without a known width it stays whole.
    """
    columns = _columns(stream)
    # The last column is left free, as a terminal may wrap when it is written.
    return text if columns < 2 or len(text) < columns else f"{text[: columns - 2]}…"


def _columns(stream: Any) -> int:
    """Return the width in characters of the terminal behind a stream, at most the variable COLUMNS;
    0 if unknown."""
    found = []
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.get_terminal_size(stream.fileno()).columns)
    with suppress(ValueError):
        found.append(int(os.environ.get("COLUMNS", "")))
    return min((columns for columns in found if columns > 0), default=0)
