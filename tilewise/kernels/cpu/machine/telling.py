"""Print to standard error what a first call waits for.

Kernels are compiled when they are first called on a machine, which takes seconds in which a program
looks as if it hung: once per process a line says so. TILEWISE_PROGRESS=0 in the environment
disables it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LINE = "tilewise: compiling kernels for this CPU, once on this machine: 5 to 15 s ..."
MOMENT_S = 1.0  # a pause that no user wonders about

_has_told = False


def _is_wanted() -> bool:
    silent = os.environ.get("TILEWISE_PROGRESS", "").lower() in ("0", "false", "off", "no")
    return not (_has_told or silent or sys.stderr is None)  # None: a process without it


def _tell() -> None:
    global _has_told
    if _is_wanted():
        _has_told = True
        # Standard error is closed, its reader has gone, or it was replaced by an object that can
        # only write.
        with suppress(OSError, ValueError, AttributeError):
            # A line of progress may stand on a terminal.
            wipe = "\r\x1b[K" if getattr(sys.stderr, "isatty", bool)() else ""
            print(f"{wipe}{LINE}", file=sys.stderr, flush=True)


@contextmanager
def telling() -> Iterator[None]:
    """Print LINE if the block takes longer than a moment."""
    if not _is_wanted():
        yield
        return
    timer = threading.Timer(MOMENT_S, _tell)
    timer.daemon = True
    # no thread can start at the end of a process, or beyond its limit of threads
    with suppress(RuntimeError):
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
