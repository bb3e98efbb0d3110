"""Ask the engine something beside requests, with a bounded time for the answer.

An engine that hangs never answers. Waiting for it would block the event loop's few threads, which
all requests need and for which the process waits at its exit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

from tilewise.engine.daemons import beside
from tilewise.server.errors import ApiError

__all__ = ["EngineSilent", "Questions", "within"]

T = TypeVar("T")
ANSWER_S = 5.0  # seconds; an engine's steps may take long on a busy machine
# Seconds for work that reads weights, or waits for running requests to end: a terabyte at 300 MB/s
# takes 3,500 s.
WORK_S = 3600.0
MOST = 64  # unanswered questions; beyond these, no further question is asked


class EngineSilent(ApiError):
    """The engine has not answered a question in time, `seconds`: an error 503."""

    def __init__(self, seconds: float) -> None:
        super().__init__(
            503,
            f"the engine must answer within {seconds:g} s, and did not",
            code="engine_silent",
            retry_after_s=10,
        )


class Questions:
    """Ask the engine from one event loop, with at most `MOST` questions unanswered at a time."""

    def __init__(self) -> None:
        self._num_open = 0

    async def ask(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which waits for the engine on a thread of its own.

        Raises:
            EngineSilent: the answer takes more than `ANSWER_S` seconds, or too many questions are
                unanswered.
        """
        if self._num_open >= MOST:
            raise EngineSilent(ANSWER_S)
        self._num_open += 1
        loop, future = asyncio.get_running_loop(), beside(work)

        def answered() -> None:
            self._num_open -= 1

        def ended(_: object) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(answered)

        future.add_done_callback(ended)
        return await self.within(asyncio.wrap_future(future))

    async def within(self, answer: Awaitable[T]) -> T:
        """Return the result of `answer`, awaited for at most `ANSWER_S` seconds and then cancelled.

        Raises:
            EngineSilent: the answer takes longer.
        """
        return await within(answer, ANSWER_S)

    async def finish(self, work: Awaitable[T]) -> T:
        """Return the result of work that may take as long as a large checkpoint takes to be read,
        awaited for at most `WORK_S` seconds; the engine goes on with it afterwards.

        Raises:
            EngineSilent: the work takes longer.
        """
        return await within(work, WORK_S)


async def within(answer: Awaitable[T], seconds: float) -> T:
    """Return the result of `answer`, awaited for at most `seconds`; then, or when the caller is
    cancelled, it is cancelled.

    Raises:
        EngineSilent: the answer takes longer.
    """
    waited = asyncio.ensure_future(answer)
    try:
        await asyncio.wait({waited}, timeout=seconds)
        if not waited.done():
            raise EngineSilent(seconds)
    finally:
        if not waited.done():
            waited.add_done_callback(lambda late: late.cancelled() or late.exception())
            waited.cancel()
    return waited.result()
