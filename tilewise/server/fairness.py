"""Order the start of requests fairly: keys in rotation, one request in each turn of the event loop.

Starting a request (its body, its prompt, its place in the queue) takes the event loop 1.5 ms. The
loop would start all waiting requests before it looks for new ones: a request that arrives just
after a flood of 64 would wait for a tenth of a second, whatever the engine's policy is. Here one
request is started in each turn, and the others wait in one queue per key. A new request then waits
for at most one request of each other key.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

__all__ = ["Pace", "Turns"]

WORK_S = 2e-3  # seconds of one request's work on the event loop before other tasks run


class Pace:
    """A pace for the work of one request: at most `WORK_S` seconds between rests for other tasks.

    Example:
        >>> pace = Pace()
        >>> for one in prompts:
        ...     look_at(one)
        ...     await pace.rest()
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()

    async def rest(self) -> None:
        """Let other tasks run, if the last rest was at least `WORK_S` seconds ago."""
        if time.perf_counter() - self._since >= WORK_S:
            await asyncio.sleep(0)
            self._since = time.perf_counter()


class Turns:
    """Start the requests of all keys one in each turn of the event loop, the keys in rotation.

    Example:
        >>> await turns.take("alice")
    """

    def __init__(self) -> None:
        # waiting requests by key, in the order in which keys are served
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._is_taken = False  # True if a request has started in this turn

    async def take(self, key: str) -> None:
        """Wait until a request of a key may start: not at all if no request has started in this
        turn of the event loop, else until the requests before it have started."""
        loop = asyncio.get_running_loop()
        if not self._is_taken:
            self._is_taken = True
            loop.call_soon(self._next)
            return
        turn = loop.create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        await turn

    def _next(self) -> None:
        """Start the oldest waiting request of the first key, and move that key to the end if it has
        more; if none waits, let the next request that comes start at once."""
        while self._waiting:
            key = next(iter(self._waiting))
            queue = self._waiting.pop(key)
            turn = queue.popleft()
            if queue:
                self._waiting[key] = queue
            if not turn.done():  # skip a request whose client has left
                turn.set_result(None)
                asyncio.get_running_loop().call_soon(self._next)
                return
        self._is_taken = False
