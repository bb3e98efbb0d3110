"""Say on standard error what a first call waits for.

Kernels are compiled when they are first called on a machine, which takes seconds in which a program
looks as if it hung: once a process a line says so. TILEWISE_PROGRESS=0 in the environment keeps
silent.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LINE = "tilewise: compiling kernels for this CPU, once on this machine: 5 to 15 s ..."
MOMENT_S = 1.0  # a pause that nobody wonders about

_has_told = False


def _is_wanted() -> bool:
    silent = os.environ.get("TILEWISE_PROGRESS", "").lower() in ("0", "false", "off", "no")
    return not (_has_told or silent or sys.stderr is None)  # None: a process without it


def _tell() -> None:
    global _has_told
    if _is_wanted():
        _has_told = True
        # It is closed, who read it has gone, or what a program put in its place can only write.
        with suppress(OSError, ValueError, AttributeError):
            # A line of progress may stand on a terminal.
            wipe = "\r\x1b[K" if getattr(sys.stderr, "isatty", bool)() else ""
            print(f"{wipe}{LINE}", file=sys.stderr, flush=True)


@contextmanager
def telling() -> Iterator[None]:
    """Write LINE if what runs in here takes longer than a moment."""
    if not _is_wanted():
        yield
        return
    timer = threading.Timer(MOMENT_S, _tell)
    timer.daemon = True
    with suppress(RuntimeError):  # no thread begins where a process ends, or has as many as it may
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
