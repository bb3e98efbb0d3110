"""Python's collections while nobody waits, in the server's process and in that of an engine apart.

A collection stops the engine and all streams. One of the youngest objects takes half a millisecond;
one of all took 58 ms of a core under a flood of 64 streams, after 47 s of it: Python begins it by
counts, and these rise when most is going on. So the large ones are made here, when no
request is there.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Collections", "collect_when_idle", "leaving_large_ones"]

LOOK_S = 0.5
EVERY_S = 5.0  # collections of all, at least, where there is time for them
# Where there never is: what is in circles, 7 objects a connection of asyncio, stays no longer.
LATEST_S = 300.0
# Collections of the youngest before one of the next generation, 10 by default, which took 4 ms.
YOUNGEST = 4
NEVER = 1 << 30


@contextmanager
def leaving_large_ones() -> Iterator[None]:
    """Let Python collect young objects only meanwhile, and pass over what lives now and lives on.

    Afterwards all is as before: a program that has served may go on, and nobody looks for circles
    in it then but Python.
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
    """Says when all objects are to be collected.

    Args:
        now: seconds of a clock.
    """

    def __init__(self, now: float) -> None:
        self._last = now

    def is_due(self, now: float, *, is_idle: bool, has_worked: bool) -> bool:
        """Look once.

        Args:
            now: seconds of the clock.
            is_idle: no request is there.
            has_worked: younger objects were collected since the last one.
        """
        since = now - self._last
        is_due = has_worked and since >= (EVERY_S if is_idle else LATEST_S)
        if is_due:
            self._last = now
        return is_due

    def look(self, is_idle: bool) -> None:
        """Look at the clock, and collect all objects if it is time to."""
        has_worked = gc.get_count()[1:] != (0, 0)
        if self.is_due(time.monotonic(), is_idle=is_idle, has_worked=has_worked):
            gc.collect()


async def collect_when_idle(is_idle: Callable[[], bool]) -> None:
    """Collect all objects now and then, until cancelled.

    Args:
        is_idle: whether no request is there.
    """
    collections = Collections(time.monotonic())
    while True:
        await asyncio.sleep(LOOK_S)
        collections.look(is_idle())
