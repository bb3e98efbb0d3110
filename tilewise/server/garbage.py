"""Run Python's large garbage collections while no request is there.

A collection stops the engine and all streams. One of the youngest generation takes half a
millisecond; a full one took 58 ms of a core after 47 s of a flood of 64 streams. Python starts
collections by counts of allocations, so they come when the server is busiest. The server, and the
process of its engine, therefore run full collections themselves when they are idle.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Collections", "collect_when_idle", "leaving_large_ones"]

LOOK_S = 0.5
EVERY_S = 5.0  # seconds between full collections, at least, when the server is idle at times
# the same when it never is: asyncio leaves cycles of 7 objects a connection
LATEST_S = 300.0
# Youngest collections per collection of the next generation; with Python's 10 these took 4 ms.
YOUNGEST = 4
NEVER = 1 << 30


@contextmanager
def leaving_large_ones() -> Iterator[None]:
    """Run a full collection, freeze all objects that exist now, and let Python itself collect only
    young objects during the block of a `with`; full collections are left to the program.

    Afterwards the thresholds are restored and the objects are no longer frozen.
    """
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    if before[0] > 0:
        gc.set_threshold(before[0], YOUNGEST, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


class Collections:
    """Decide when to run a full collection: 5 s after the last one if idle, 300 s if never idle.

    Args:
        now: the current time in seconds of a clock.
    """

    def __init__(self, now: float) -> None:
        self._last = now

    def is_due(self, now: float, *, is_idle: bool, has_worked: bool) -> bool:
        """Return whether a full collection is due; if it is, `now` counts as the time of the last
        one.

        Args:
            now: the current time in seconds of the clock.
            is_idle: True if no request is there.
            has_worked: True if Python has collected younger objects since the last full collection.
        """
        since = now - self._last
        is_due = has_worked and since >= (EVERY_S if is_idle else LATEST_S)
        if is_due:
            self._last = now
        return is_due

    def look(self, is_idle: bool) -> None:
        """Run a full collection of Python's garbage now, if `is_due` says so.

        Args:
            is_idle: True if no request is there; a collection is then due much sooner.
        """
        has_worked = gc.get_count()[1:] != (0, 0)
        if self.is_due(time.monotonic(), is_idle=is_idle, has_worked=has_worked):
            gc.collect()


async def collect_when_idle(is_idle: Callable[[], bool]) -> None:
    """Run full collections when `Collections` says that they are due, until cancelled.

    Args:
        is_idle: a function that returns whether no request is there.
    """
    collections = Collections(time.monotonic())
    while True:
        await asyncio.sleep(LOOK_S)
        collections.look(is_idle())
