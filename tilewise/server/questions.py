"""What the server asks its engine beside requests: answered within a time, or not at all.

An engine that hangs answers nothing. Who asks it would wait for ever, on the event loop's few
threads, which all others need, and for which a process waits before it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from tilewise.engine.daemons import beside
from tilewise.server.errors import ApiError

__all__ = ["EngineSilent", "Questions"]

T = TypeVar("T")
ANSWER_S = 5.0  # of an engine whose steps take long on a busy machine
MOST = 64  # questions without an answer; while there are so many, no further one is asked


class EngineSilent(ApiError):
    """The engine has not answered in time."""

    def __init__(self) -> None:
        super().__init__(
            503,
            f"the engine must answer within {ANSWER_S:g} s, and did not",
            code="engine_silent",
            retry_after_s=10,
        )


class Questions:
    """Asks the engine from one event loop."""

    def __init__(self) -> None:
        self._num_open = 0

    async def ask(self, work: Callable[[], T]) -> T:
        """Return what `work` returns, which waits for the engine on a thread of its own.

        Raises:
            EngineSilent: it takes too long.
        """
        if self._num_open >= MOST:
            raise EngineSilent
        self._num_open += 1
        loop, future = asyncio.get_running_loop(), beside(work)

        def answered() -> None:
            self._num_open -= 1

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the event loop has ended before
                loop.call_soon_threadsafe(answered)

        future.add_done_callback(ended)
        return await self.within(asyncio.wrap_future(future))

    async def within(self, answer: Awaitable[T]) -> T:
        """Return an answer that comes in time.

        Raises:
            EngineSilent: it takes too long.
        """
        waited = asyncio.ensure_future(answer)
        done, _ = await asyncio.wait({waited}, timeout=ANSWER_S)
        if not done:
            waited.add_done_callback(lambda late: late.cancelled() or late.exception())
            waited.cancel()
            raise EngineSilent
        return waited.result()
