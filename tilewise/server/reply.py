"""One answer over HTTP: a whole one, or a stream of events, that ends with its client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from tilewise.server.answers import event
from tilewise.server.bridge import Bridge
from tilewise.server.errors import ApiError, ClientLeft
from tilewise.server.front import Receive, Scope, Send, caller_of, trace_headers
from tilewise.server.job import Direct, Job

__all__ = ["Reply", "read_body", "while_there"]

T = TypeVar("T")
LOG = logging.getLogger("tilewise.server")
Whole = Callable[[Job], Awaitable[dict[str, Any] | bytes]]  # or JSON already
Stream = Callable[[Job], AsyncGenerator[bytes, None]]
LAST_WRITE_S = 1.0  # for the event that says why a stream ends
_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]


async def read_body(request: Request, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body of a request.

    Raises:
        ApiError: 413, it is too long; 415, it is compressed; 408, it comes too slowly; 499, the
            client has left.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(415, f"content-encoding must be identity, got {coding[:80]}")
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > max_bytes:
        raise _too_long(max_bytes, int(told))
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                body += part
                if len(body) > max_bytes:
                    raise _too_long(max_bytes, len(body))
    except TimeoutError:
        raise ApiError(408, f"body must arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise ClientLeft from None
    return bytes(body)


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what work returns; a client that leaves cancels it.

    Args:
        request: its body has been read.

    Raises:
        ClientLeft: it has left.
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


def _too_long(limit: int, size: int) -> ApiError:
    return ApiError(413, f"body must be at most {limit:,} bytes, got {size:,}")


class Reply(Response):
    """Runs one job and writes what it makes.

    Args:
        bridge: to the engine.
        kind: what the job's id begins with.
        asked_id: what follows; None draws it.
        whole: makes the answer; None if it is a stream.
        stream: yields the events.
        failed: turns an error in the midst of a stream into its last event.
        wrap: turns an error into a body; None is OpenAI's.
        rename: gives an error the names of this form of the API; None leaves it.
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
        """Serve; never raises what the client should be told."""
        bridge, caller = self._bridge, caller_of(scope)
        headers = trace_headers(scope) if bridge.spans is not None else None
        try:
            try:
                async with bridge.job(self._kind, caller, self._asked_id, receive, headers) as job:
                    if self._whole is not None:
                        told = await self._whole(job)
                        body = told if isinstance(told, bytes) else json.dumps(told).encode()
                    else:
                        # A server that is not ours has none.
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
                    # The first one takes the headers along; others that come by this task are
                    # mostly the last ones, which the end of the answer follows at once.
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
            # To close a connection is to wait until all is read: a client that does not read has
            # its connection cut.
            cut = scope["state"].get("cut")
            if cut is not None:
                cut()
