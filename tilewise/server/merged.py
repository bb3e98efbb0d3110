"""Merge the outputs of several prompts to one stream, without a queue that could grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from tilewise.engine.outputs import RequestOutput

__all__ = ["begun_in_turn", "close", "merged"]

T = TypeVar("T")


async def merged(
    outputs: Sequence[AsyncIterator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield (index of the generator, output) from several generators at once, until all have ended.

    For a slow reader only the newest output of each generator is kept. The generators start one in
    each turn of the event loop, and are closed at the end. An error of one is raised.
    """
    newest: dict[int, RequestOutput] = {}
    news = asyncio.Event()

    async def pump(place: int, source: AsyncIterator[RequestOutput]) -> None:
        try:
            async for output in source:
                newest[place] = output
                news.set()
        finally:
            await close(source)
            news.set()

    pumps: list[asyncio.Task[None]] = []
    beginning = asyncio.create_task(begun_in_turn(map(pump, range(len(outputs)), outputs), pumps))
    try:
        while True:
            is_over = beginning.done() and all(task.done() for task in pumps)
            news.clear()
            for task in pumps:
                if task.done() and task.exception() is not None:
                    raise task.exception()  # type: ignore[misc]
            for place in list(newest):
                yield place, newest.pop(place)
            if is_over:
                return
            await news.wait()
    finally:
        for task in (beginning, *pumps):
            task.cancel()
        await asyncio.gather(beginning, *pumps, return_exceptions=True)
        for source in outputs[len(pumps) :]:  # generators that were never started
            await close(source)


async def begun_in_turn(
    work: Iterable[Coroutine[Any, Any, T]], tasks: list[asyncio.Task[T]]
) -> None:
    """Start coroutines as tasks, one in each turn of the event loop, and append them to `tasks`.

    Starting a prompt takes 0.2 ms or more: a thousand at once would block the loop for a fifth of a
    second.
    """
    for one in work:
        tasks.append(asyncio.create_task(one))
        await asyncio.sleep(0)


async def close(outputs: Any) -> None:
    """Close an asynchronous iterator if it can be closed."""
    aclose = getattr(outputs, "aclose", None)
    if aclose is not None:
        await aclose()
