"""Wakes an event loop from another thread without letting go of the interpreter. No torch.

`loop.call_soon_threadsafe` writes to a socket, and lets go of the interpreter for that. The event
loop wakes, takes it, and delivers a step; whoever rang wants it back, to begin the next one, and
waits until that is done. Rung by a call that keeps it, the event loop delivers when the engine's
thread computes, and needs no Python.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import weakref
from collections.abc import Callable

__all__ = ["Bell"]

_ONE = (1).to_bytes(8, "little")


class Bell:
    """An eventfd that an event loop watches.

    Args:
        loop: watches it as long as it runs.
        answer: called on the event loop after one or several rings.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, answer: Callable[[], None]) -> None:
        self._answer = answer
        self._file = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._write = ctypes.PyDLL(None).write  # as CDLL, but for the interpreter's lock
        self._finalizer = weakref.finalize(self, os.close, self._file)
        loop.add_reader(self._file, self._read)

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop, answer: Callable[[], None]) -> Bell | None:
        """Return a bell, or None where there are none: on other systems, for other event loops."""
        if not hasattr(os, "eventfd"):
            return None
        try:
            return cls(loop, answer)
        except NotImplementedError:
            return None

    def ring(self) -> None:
        """Have the event loop call `answer`; from any thread."""
        self._write(self._file, _ONE, 8)

    def _read(self) -> None:
        os.eventfd_read(self._file)
        self._answer()
