"""Print to standard error what a first call waits for.

Kernels are compiled when they are first called on a machine, which takes seconds in which a program
looks as if it hung: once per process a line says so. TILEWISE_PROGRESS=0 in the environment
disables it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from tilewise.progress import is_wanted, say

LINE = "tilewise: compiling kernels for this CPU, once on this machine: each 5 to 25 s ..."
MOMENT_S = 1.0  # a pause that no user wonders about

_has_told = False


def _is_wanted() -> bool:
    return not _has_told and is_wanted()


def _tell() -> None:
    global _has_told
    if _is_wanted():
        _has_told = True
        say(LINE)


@contextmanager
def telling() -> Iterator[None]:
    """Print LINE to standard error if the block takes longer than MOMENT_S, at most once per
    process; do nothing where progress is not wanted."""
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
