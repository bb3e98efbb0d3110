"""Outputs of several prompts as one stream, without a queue that could grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from tilewise.engine.outputs import RequestOutput

__all__ = ["close", "merged"]


async def merged(
    outputs: Sequence[AsyncIterator[RequestOutput]],
) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Yield from several at once; of each only the newest output is kept for a slow reader."""
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

    loop = asyncio.get_running_loop()
    pumps = [loop.create_task(pump(place, source)) for place, source in enumerate(outputs)]
    try:
        while True:
            is_over = all(task.done() for task in pumps)
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
        for task in pumps:
            task.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def close(outputs: Any) -> None:
    """Close a generator, where it can be closed."""
    aclose = getattr(outputs, "aclose", None)
    if aclose is not None:
        await aclose()
