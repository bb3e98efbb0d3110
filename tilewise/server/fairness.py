"""In which order requests that have come together are begun: keys in turn, one in each turn.

To begin a request (its body, its prompt, its place in the queue) takes the event loop 1.5 ms. All
that have come when the loop looks are begun before it looks again: a request a moment after a flood
of 64 waits for a tenth of a second, whatever the engine's policy is. Here one request is begun
between two looks, and requests wait in a queue by key: a new one waits for one of each other.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

__all__ = ["Pace", "Turns"]

WORK_S = 2e-3  # of one request on the event loop, before others have a turn


class Pace:
    """Gives others a turn of the event loop between parts of one request's work.

    Example:
        >>> pace = Pace()
        >>> for one in prompts:
        ...     look_at(one)
        ...     await pace.rest()
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def rest(self) -> None:
        """Let others run, if enough was done since they did."""
        if time.perf_counter() - self._since >= WORK_S:
            await asyncio.sleep(0)
            self._since = time.perf_counter()


class Turns:
    """Lets requests begin, one in each turn of an event loop.

    Example:
        >>> await turns.take("alice")
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # keys in the order of turns
        self._is_taken = False  # the turn that runs

    async def take(self, key: str) -> None:
        """Return when a request of a key may begin: at once if no other one has in this turn."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        await turn

    def _next(self) -> None:
        """Begin a turn: it is the first key's that has one waiting, which then is the last."""
        while self._waiting:
            key = next(iter(self._waiting))
            queue = self._waiting.pop(key)
            turn = queue.popleft()
            if queue:
                self._waiting[key] = queue
            if not turn.done():  # else its client has left
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False
