"""One answer over HTTP, whole or as a stream of events, which ends with its client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tilewise.server.answers import event
from tilewise.server.bridge import Bridge
from tilewise.server.errors import ApiError, ClientLeft
from tilewise.server.front import Receive, Scope, Send, caller_of, trace_headers
from tilewise.server.job import Direct, Job

__all__ = ["Reply", "while_there"]

T = TypeVar("T")
LOG = logging.getLogger("tilewise.server")
Whole = Callable[[Job], Awaitable[dict[str, Any] | bytes]]  # bytes are JSON already
Stream = Callable[[Job], AsyncGenerator[bytes, None]]
LAST_WRITE_S = 1.0  # seconds for the event that reports why a stream ends
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # otherwise nginx would buffer events
]


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`, which is cancelled if the client leaves.

    Args:
        request: the request, after its body has been read.

    Raises:
        ClientLeft: the client has left.
    """

    async def left() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, listener = asyncio.create_task(work), asyncio.create_task(left())
    try:
        await asyncio.wait((task, listener), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for one in (task, listener):
            one.cancel()
        await asyncio.gather(task, listener, return_exceptions=True)


class Reply(Response):
    """A response that runs one job when the server calls it, and writes the job's answer.

    One of `whole` and `stream` is given.

    Args:
        bridge: the bridge to the engine.
        kind: the prefix of the job's id.
        asked_id: the rest of the job's id; None draws one at random.
        whole: a coroutine function that makes the whole answer; None for a stream.
        stream: a generator function that yields the events of a stream.
        failed: a function that turns an error in the middle of a stream into its last event.
        wrap: a function that turns an error into a body; None for OpenAI's format.
        rename: a function that gives an error the field names of this API; None keeps them.
    """

    def __init__(
        self,
        bridge: Bridge,
        kind: str,
        asked_id: str | None,
        *,
        whole: Whole | None = None,
        stream: Stream | None = None,
        failed: Callable[[ApiError], bytes] | None = None,
        wrap: Callable[[ApiError], dict[str, Any]] | None = None,
        rename: Callable[[ApiError], ApiError] | None = None,
    ) -> None:
        super().__init__()
        self._bridge = bridge
        self._kind = kind
        self._asked_id = asked_id
        self._whole = whole
        self._stream = stream
        self._failed = failed or (lambda error: event(error.body))
        self._wrap = wrap or (lambda error: error.body)
        self._rename = rename or (lambda error: error)
        self._is_started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the job and send its answer; errors are sent to the client, not raised.

        An error after a stream's first part becomes the stream's last event. Nothing is sent to a
        client that has left.
        """
        bridge, caller = self._bridge, caller_of(scope)
        headers = trace_headers(scope) if bridge.spans is not None else None
        try:
            try:
                async with bridge.job(self._kind, caller, self._asked_id, receive, headers) as job:
                    if self._whole is not None:
                        told = await self._whole(job)
                        body = told if isinstance(told, bytes) else json.dumps(told).encode()
                    else:
                        # Other ASGI servers have no direct way to write.
                        await self._write_stream(job, send, scope["state"].get("direct"))
            except (ApiError, asyncio.CancelledError):
                raise
            except Exception as error:
                LOG.exception("a request failed in the server")
                raise ApiError(500, f"the server failed: {type(error).__name__}") from error
        except ClientLeft:
            return
        except ApiError as error:
            await self._write_error(self._rename(error), scope, receive, send)
            return
        if self._whole is not None:
            await Response(body, media_type="application/json")(scope, receive, send)

    async def _write_stream(self, job: Job, send: Send, direct: Direct | None) -> None:
        assert self._stream is not None
        async with contextlib.aclosing(self._stream(job)) as chunks:
            async for chunk in chunks:
                is_first = not self._is_started
                if is_first:
                    self._is_started = True
                    start = {"type": "http.response.start", "status": 200}
                    await send({**start, "headers": _STREAM_HEADERS})
                    job.direct = direct
                if job.direct is not None and job.direct.is_open():
                    # The first part is sent with the headers. Later parts that come by this task
                    # are mostly the last ones, directly before the end of the answer.
                    (job.direct.push if is_first else job.direct.add)(chunk)
                else:
                    message = {"type": "http.response.body", "body": chunk, "more_body": True}
                    await self._bridge.send(job, send, message)
        await self._bridge.send(job, send, {"type": "http.response.body", "more_body": False})

    async def _write_error(
        self, error: ApiError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        if not self._is_started:
            answer = JSONResponse(self._wrap(error), error.status, error.headers)
            await answer(scope, receive, send)
            return
        try:
            if error.code == "slow_reader":
                raise TimeoutError
            async with asyncio.timeout(LAST_WRITE_S):
                last = {"type": "http.response.body", "body": self._failed(error)}
                await send({**last, "more_body": False})
        except TimeoutError:
            # Closing a connection waits until everything is read: the connection of a client that
            # does not read is cut instead.
            cut = scope["state"].get("cut")
            if cut is not None:
                cut()
