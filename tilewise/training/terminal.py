"""What a run says on a terminal and hears from it: lines on standard error, Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from tilewise.progress import say

__all__ = ["Interrupts", "interrupts", "run_script"]


def run_script(name: str, main: Callable[[], None]) -> None:
    """Run a script's main; exit with 1 and one sentence if it raises FloatingPointError, ValueError
    or OSError, with 130 at Ctrl-C."""
    try:
        main()
    except (FloatingPointError, ValueError, OSError) as error:
        sys.exit(f"{name}: {error}")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


class Interrupts:
    """The request to end that `interrupts` has noted, if there was one.

    Attributes:
        signal: the signal, SIGINT or SIGTERM; None before one has come.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None

    def end(self) -> None:
        """End as the noted signal would have ended the process; without a signal do nothing. Called
        once the files are written.

        Raises:
            KeyboardInterrupt: the signal was SIGINT, Ctrl-C.
            SystemExit: the signal was SIGTERM; the status is 128 + 15, as a shell's.
        """
        if self.signal is signal.SIGINT:
            raise KeyboardInterrupt
        if self.signal is not None:
            raise SystemExit(128 + self.signal)


@contextmanager
def interrupts(what: str) -> Iterator[Interrupts]:
    """During the block, note SIGINT and SIGTERM instead of ending in the middle of a step; yield
    the notes.

    The first signal prints a line, and the second acts as without this block. In threads other than
    the main one, which cannot catch signals, and for signals that the process ignores, nothing
    changes.

    Args:
        what: words for the line that the first signal prints, on how the process will end.
    """
    noted = Interrupts()
    before: dict[int, Any] = {}

    def note(number: int, _: FrameType | None) -> None:
        noted.signal = signal.Signals(number)
        restore()
        say(f"{noted.signal.name}: {what} (once more ends at once)")

    def restore() -> None:
        while before:
            number, handler = before.popitem()
            signal.signal(number, handler)

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler not in (signal.SIG_IGN, None):  # None: another language's handler
                before[number] = handler
                signal.signal(number, note)
    try:
        yield noted
    finally:
        if threading.current_thread() is threading.main_thread():
            restore()
