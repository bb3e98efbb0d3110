"""The page's document, and the stream of engine events that it shows.

Events name the requests of all keys, so they need an administrator's key where keys are set. They
contain ids and counts, and no text.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, MutableMapping
from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import tilewise
from tilewise.server import page
from tilewise.server.errors import ApiError
from tilewise.server.front import Receive, Scope, Send
from tilewise.server.questions import EngineSilent
from tilewise.server.routes import admin_only, engine_method
from tilewise.server.service import Service

__all__ = ["live_router"]

LOG = logging.getLogger("tilewise.server")
PERIOD_S = 0.1  # seconds between two messages of a stream, at least
# seconds without events, after which a comment tests whether the client is still connected
QUIET_S = 10.0
MOST_EVENTS = 5000  # events in one message
MOST_STREAMS = 16  # simultaneous streams: each asks the engine ten times a second


def live_router(service: Service) -> APIRouter:
    """Return the routes `/`, the page, /v1/server, facts for its head, and /v1/events, the stream
    of engine events that it shows.

    The events need an administrator's key; there are at most `MOST_STREAMS` streams at once.
    """
    router = APIRouter()
    bridge = service.bridge
    streams: set[object] = set()

    @router.get("/", include_in_schema=False)
    async def document() -> Response:
        return Response(page.page(), headers=page.headers())

    @router.get("/v1/server")
    async def about() -> Response:
        """Answer with the model's name, the version, the devices and the uptime in seconds."""
        return JSONResponse(
            {
                "model": service.names[0],
                "version": tilewise.__version__,
                "devices": str(getattr(bridge.llm, "devices", "")),
                "uptime_s": time.time() - service.started,
            }
        )

    @router.get("/v1/events")
    async def events(request: Request) -> Response:
        """Send a snapshot of the cache, then the scheduler's events since, at most 10 times a
        second, until the server drains or the engine ends.

        If events were lost in between, another snapshot is sent.
        """
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
            # The ring has dropped events in between: only a new snapshot is correct.
            if new[0]["number"] > since:
                return first()
            part = new[:MOST_EVENTS]
            return part[-1]["number"] + 1, _message("events", part)

        async def body() -> AsyncIterator[str]:
            mark = object()
            # streams that were accepted at the same time count, too
            if len(streams) >= MOST_STREAMS:
                return
            streams.add(mark)
            try:
                clock = asyncio.get_running_loop().time
                number, text = await bridge.questions.ask(first)
                yield text
                sent = clock()
                while not bridge.is_draining and bridge.loop.is_alive:
                    await asyncio.sleep(PERIOD_S)
                    number, text = await bridge.questions.ask(partial(following, number))
                    if text or clock() - sent > QUIET_S:
                        yield text or ": quiet\n\n"
                        sent = clock()
            except EngineSilent:  # the browser reconnects
                return
            finally:
                streams.discard(mark)

        return _Stream(
            body(),
            bridge.slow_reader_s,
            media_type="text/event-stream",
            headers={"cache-control": "no-store", "x-accel-buffering": "no"},
        )

    return router


class _Stream(StreamingResponse):
    """A stream that is ended when a write has waited for its client too long.

    Args:
        content: the parts to send.
        patience_s: seconds that a write may wait.
        more: further arguments of StreamingResponse.
    """

    def __init__(self, content: AsyncIterator[str], patience_s: float, **more: Any) -> None:
        super().__init__(content, **more)
        self._patience_s = patience_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; cut the connection if a write waits more than `patience_s` seconds."""

        async def sent(message: MutableMapping[str, Any]) -> None:
            try:
                async with asyncio.timeout(self._patience_s):
                    await send(message)
            except TimeoutError:
                LOG.warning(
                    "a stream of events dropped: its client has read nothing for %g s",
                    self._patience_s,
                )
                # StreamingResponse listens for a disconnect and then cancels the stream.
                cut = scope["state"].get("cut")
                if cut is not None:
                    cut()

        await super().__call__(scope, receive, sent)


def _message(kind: str, data: Any) -> str:
    return f"event: {kind}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
