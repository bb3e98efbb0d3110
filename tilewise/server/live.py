"""What the page shows: its document, and the engine's events as they happen.

Events name every key's requests, so they need an administrator's key where keys are set. They hold
ids and counts, no text.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from tilewise.server import page
from tilewise.server.errors import ApiError
from tilewise.server.routes import admin_only, engine_method

if TYPE_CHECKING:
    from tilewise.server.app import Service

__all__ = ["live_router"]

PERIOD_S = 0.1  # at least, between two messages of a stream
QUIET_S = 10.0  # without events, after which a comment tells whether the client is there
MOST_EVENTS = 5000  # of one message
MOST_STREAMS = 16  # at once: each asks the engine ten times a second


def live_router(service: Service) -> APIRouter:
    """Return the routes."""
    router = APIRouter()
    bridge = service.bridge
    streams: set[object] = set()

    @router.get("/", include_in_schema=False)
    async def document() -> Response:
        return Response(page.page(), headers=page.headers())

    @router.get("/v1/events")
    async def events(request: Request) -> Response:
        """Send a picture of the cache, then what has happened since, at most 10 times a second."""
        admin_only(request)
        picture = engine_method(bridge.llm, "picture")
        trace = engine_method(bridge.llm, "trace")
        if len(streams) >= MOST_STREAMS:
            raise ApiError(
                429,
                f"streams of events must be at most {MOST_STREAMS} at once",
                code="too_many_streams",
                retry_after_s=10,
            )

        def first() -> tuple[int, str]:
            told = picture()
            return told["next"], _message("picture", told)

        def following(since: int) -> tuple[int, str]:
            new = trace(since)
            if not new:
                return since, ""
            # The ring has forgotten what came between: only a new picture is right.
            if new[0]["number"] > since:
                return first()
            part = new[:MOST_EVENTS]
            return part[-1]["number"] + 1, _message("events", part)

        async def body() -> AsyncIterator[str]:
            mark = object()
            if len(streams) >= MOST_STREAMS:  # as many as were let in before any had begun
                return
            streams.add(mark)
            try:
                clock = asyncio.get_running_loop().time
                # A step holds the engine's lock, for which the event loop must not wait.
                number, text = await asyncio.to_thread(first)
                yield text
                sent = clock()
                while not bridge.is_draining and bridge.loop.is_alive:
                    await asyncio.sleep(PERIOD_S)
                    number, text = await asyncio.to_thread(following, number)
                    if text or clock() - sent > QUIET_S:
                        yield text or ": quiet\n\n"
                        sent = clock()
            finally:
                streams.discard(mark)

        return StreamingResponse(
            body(),
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    return router


def _message(kind: str, data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
