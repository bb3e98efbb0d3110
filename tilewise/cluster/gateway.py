"""One address for several servers: forward each request to one of them, and its answer back.

    client -> Gateway -> Router: which replica -> Backend: its answer, part by part -> client

An answer begins for the client when its first part arrives. If a replica is lost before that, the
request is sent to another one; a stream that is cut ends with an event that says so. The gateway is
plain ASGI; the backend knows how to reach replicas. No torch, no Ray.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Protocol

from tilewise.cluster.prompts import BYTES_A_TOKEN, asked_of
from tilewise.cluster.router import CAPACITY, Asked, Router
from tilewise.errors import ReplicaLostError
from tilewise.server.bodies import SHORT, Bodies
from tilewise.server.errors import ApiError
from tilewise.server.keys import Caller

__all__ = ["Backend", "Call", "Gateway", "Start"]

LOG = logging.getLogger("tilewise.cluster")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

BODIES = 16  # number of bodies of the largest size that may be in memory at once
_ALL = Caller()  # the replicas check keys
ATTEMPTS = 3  # replicas that a request is sent to at most
WAIT_S = 30.0  # seconds to wait for a replica if there is none
LOOK_S = 0.1
# Routes that are sent to every replica, as each answers for itself alone.
EVERY = frozenset({"/abort", "/metrics", "/pause", "/reset_prefix_cache", "/resume", "/v1/usage"})
# in an answer the replica that sent it; in a request the replica it is meant for
REPLICA = b"x-tilewise-replica"
_TOKENS = re.compile(rb'"(?:completion|output)_tokens":\s*(\d+)')
# Marks of the events of completions and chats that bring text; streams of other routes end with a
# token count. An event may contain the tokens of several steps, so events cannot be counted
# instead.
_TEXT = re.compile(rb'"(?:text|content|reasoning_content|arguments)":\s*"((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class Call:
    """An HTTP request, read whole, as it is sent to a replica."""

    method: str
    path: str
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


@dataclass(frozen=True, slots=True)
class Start:
    """The status and headers of an answer."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]


class Backend(Protocol):
    """The interface by which the gateway reaches replicas."""

    def replicas(self) -> Mapping[str, int]:
        """Return the names of the replicas that accept requests, each with the tokens that it
        caches (0: not known)."""

    def open(self, name: str, call: Call) -> AsyncGenerator[Start | bytes, None]:
        """Send a request to replica `name`; yield the answer's status and headers, then the parts
        of its body.

        Raises:
            ReplicaLostError: the replica is gone, or went away meanwhile.
        """


class Gateway:
    """An ASGI application that forwards requests to replicas, and their answers back; see the
    module.

    Args:
        backend: the access to replicas.
        router: the router that chooses among them.
        max_body_bytes: the largest body of a request; a larger one gets 413.
    """

    def __init__(self, backend: Backend, router: Router, max_body_bytes: int = 32 << 20) -> None:
        self.backend, self.router, self.max_body_bytes = backend, router, max_body_bytes
        self._bodies = Bodies(BODIES * max_body_bytes)
        self.wait_s = WAIT_S
        self.counts = {"requests": 0, "retried": 0, "cut": 0}
        self._joined: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one HTTP request: read its body, and write the answer of a replica, or an error;
        others are ignored."""
        if scope["type"] != "http":
            return
        taken = [0]
        try:
            body = await self._body(receive, taken)
            if body is None:
                return
            headers = tuple((bytes(n), bytes(v)) for n, v in scope["headers"])
            call = Call(
                scope["method"], scope["path"], scope.get("query_string", b""), headers, body
            )
            await self._serve(call, receive, send)
        except ApiError as error:
            await _answer(send, error.status, error.body, error.headers)
        finally:
            self._bodies.give_back(_ALL, taken[0])

    async def _body(self, receive: Receive, taken: list[int]) -> bytes | None:
        """Read and return a request's body; None if the client has left.

        taken[0] is set to the bytes reserved for it, which the caller gives back. Raises ApiError
        for a body that is too large, or if the bodies in memory are.
        """
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size = len(body) + len(part)
            if size > self.max_body_bytes:
                raise ApiError(
                    413, f"body must be at most {self.max_body_bytes:,} bytes, got {size:,}"
                )
            self._bodies.take(_ALL, len(part), len(body))
            taken[0] = size
            body += part
            if not message.get("more_body"):
                return bytes(body)

    async def _serve(self, call: Call, receive: Receive, send: Send) -> None:
        if call.path in ("/health", "/ready") and call.method == "GET":
            if self._names():
                await _answer(send, 200, {"status": "ok" if call.path == "/health" else "ready"})
            else:
                await _answer(send, 503, {"status": "not ready", "reason": "there is no replica"})
            return
        asked_for = next((v.decode("latin-1") for n, v in call.headers if n == REPLICA), None)
        if asked_for is not None and asked_for not in self._names():
            raise ApiError(
                404,
                f"x-tilewise-replica must be one of {', '.join(self._joined)}, "
                f"got {asked_for[:80]}",
            )
        if asked_for is None and call.path in EVERY:
            await self._ask_all(call, send)
            return
        forward = asyncio.ensure_future(self._forward(call, send, asked_for))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({forward, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not forward.done():
                forward.cancel()  # the client has left: its replica stops, too
                with suppress(asyncio.CancelledError):
                    await forward
                return
            forward.result()
        finally:
            leaving.cancel()
            forward.cancel()

    def _names(self) -> tuple[str, ...]:
        """Tell the router about new and lost replicas, and return the names of the current ones."""
        known = self.backend.replicas()
        for name, capacity in known.items():
            if self._joined.get(name) != capacity:
                self.router.join(name, capacity or CAPACITY)
                self._joined[name] = capacity
        for name in [name for name in self._joined if name not in known]:
            self.router.leave(name)
            del self._joined[name]
        return tuple(known)

    async def _forward(self, call: Call, send: Send, asked_for: str | None) -> None:
        headers = {n.decode("latin-1").lower(): v.decode("latin-1") for n, v in call.headers}
        if len(call.body) <= SHORT:
            asked = asked_of(call.path, headers, call.body)
        else:
            asked = await asyncio.to_thread(asked_of, call.path, headers, call.body)
        self.counts["requests"] += 1
        tried: list[str] = []
        answer = _Answer(call, send)
        while True:
            name = await self._choose(asked, tried, asked_for)
            if name is None:
                raise ApiError(
                    503,
                    "a replica must be there to serve the request, got none"
                    + (f" beside {len(tried)} that failed" if tried else ""),
                    code="no_replica",
                    retry_after_s=1,
                )
            tried.append(name)
            is_last = asked_for is not None or len(tried) >= ATTEMPTS
            ticket = object()
            self.router.sent(ticket, asked, name)
            try:
                if await self._one(name, call, answer, ticket, is_last):
                    return
            except ReplicaLostError as error:
                LOG.warning("replica %s is lost: %s", name, error)
                if answer.is_begun:
                    self.counts["cut"] += 1
                    await answer.cut(name)
                    return
                if is_last:
                    raise ApiError(
                        502,
                        f"a replica must answer, got {len(tried)} that were lost; the last: "
                        f"{error}",
                        code="replica_lost",
                    ) from error
            finally:
                self.router.ended(ticket, answer.output_tokens)
            self.counts["retried"] += 1

    async def _one(
        self, name: str, call: Call, answer: _Answer, ticket: object, is_last: bool
    ) -> bool:
        """Pass a request to replica `name`, and the answer to the client, part by part.

        Returns:
            True if the answer is complete; False if the replica refused with 503 before any work
            was done and another shall answer, which is not so for the last attempt.
        """
        async with aclosing(self.backend.open(name, call)) as parts:
            start = None
            async for part in parts:
                if isinstance(part, Start):
                    start = part
                    # It shuts down, or its engine has ended: no part of the request was done.
                    if start.status == 503 and not is_last and len(self._names()) > 1:
                        return False
                elif start is not None:
                    if not answer.is_begun:
                        self.router.answers(ticket)
                        await answer.begin(start, name)
                    await answer.write(part)
            if start is None:
                raise ReplicaLostError(f"replica {name} must answer, got nothing")
            if not answer.is_begun:
                await answer.begin(start, name)
            await answer.end()
            return True

    async def _choose(self, asked: Asked, tried: list[str], asked_for: str | None) -> str | None:
        """Return the replica that the router chooses among those not tried; None if there is none.

        With `asked_for` only that replica counts. Without, the call waits up to `wait_s` for a
        replica.
        """
        for _ in range(max(1, round(self.wait_s / LOOK_S))):
            names = [n for n in self._names() if n not in tried]
            if asked_for is not None:
                names = [asked_for] if asked_for in names else []
            name = self.router.choose(asked, names)
            if name is not None or asked_for is not None:
                return name
            await asyncio.sleep(LOOK_S)
        return None

    async def _ask_all(self, call: Call, send: Send) -> None:
        """Send a request to every replica, and write all answers by replica's name in one, with the
        largest status.

        Answers of /metrics are merged into one text; without replicas the status is 503.
        """
        names = self._names()
        # One after the other: Ray Serve would merge two simultaneous calls of one request.
        told = [await self._ask(name, call) for name in names]
        status = max((status for status, _ in told), default=503)
        if call.path == "/metrics" and status == 200:
            text = merge_metrics({name: body for name, (_, body) in zip(names, told, strict=True)})
            await _answer(send, 200, text)
            return
        answers = {name: _json(body) for name, (_, body) in zip(names, told, strict=True)}
        await _answer(send, status, {"replicas": answers})

    async def _ask(self, name: str, call: Call) -> tuple[int, bytes]:
        status, body = 502, bytearray()
        try:
            async with aclosing(self.backend.open(name, call)) as parts:
                async for part in parts:
                    if isinstance(part, Start):
                        status = part.status
                    else:
                        body += part
        except ReplicaLostError as error:
            return 502, json.dumps(ApiError(502, str(error), code="replica_lost").body).encode()
        return status, bytes(body)


class _Answer:
    """The answer to one client as far as it was written: passes parts on, and counts tokens."""

    def __init__(self, call: Call, send: Send) -> None:
        self._call, self._send = call, send
        self.is_begun = False
        self._is_stream = False
        self._text_bytes = 0
        self._told: int | None = None

    @property
    def output_tokens(self) -> int | None:
        """The number of the answer's tokens: as its usage reports, or estimated from a stream's
        text; None if unknown."""
        if self._told is not None:
            return self._told
        return -(-self._text_bytes // BYTES_A_TOKEN) or None

    async def begin(self, start: Start, name: str) -> None:
        self.is_begun = True
        kinds = [value for key, value in start.headers if key.lower() == b"content-type"]
        self._is_stream = any(kind.startswith(b"text/event-stream") for kind in kinds)
        headers = [*start.headers, (REPLICA, name.encode("latin-1", "replace"))]
        await self._send(
            {"type": "http.response.start", "status": start.status, "headers": headers}
        )

    async def write(self, part: bytes) -> None:
        if self._is_stream:
            self._text_bytes += sum(map(len, _TEXT.findall(part)))
        found = _TOKENS.findall(part)
        if found:
            self._told = int(found[-1])
        await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def cut(self, name: str) -> None:
        """End an answer whose replica is lost: a stream with an error event; for any other raise
        ReplicaLostError, which leaves the answer short of its length."""
        if self._is_stream:
            error = ApiError(
                502,
                f"replica {name} was lost in the midst of this answer; what came is right, "
                "and the rest is missing",
                code="replica_lost",
            )
            await self._send(
                {
                    "type": "http.response.body",
                    "body": _last_event(self._call.path, error),
                    "more_body": True,
                }
            )
            await self.end()
            return
        raise ReplicaLostError(f"replica {name} was lost in the midst of an answer")


def _last_event(path: str, error: ApiError) -> bytes:
    """Return an error as a server-sent event, in the format of the route `path`."""
    if path == "/v1/messages":
        told = {"type": "error", "error": {"type": "api_error", "message": error.message}}
        return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
    if path == "/v1/responses":
        told = {"type": "error", "code": error.code, "message": error.message}
        return b"event: error\ndata: " + json.dumps(told).encode() + b"\n\n"
    return b"data: " + json.dumps(error.body).encode() + b"\n\n"


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _answer(
    send: Send, status: int, told: dict[str, Any] | bytes, headers: Mapping[str, str] | None = None
) -> None:
    is_text = isinstance(told, bytes)
    body = told if isinstance(told, bytes) else json.dumps(told).encode()
    kind = b"text/plain; version=0.0.4; charset=utf-8" if is_text else b"application/json"
    more = [(n.lower().encode(), v.encode()) for n, v in (headers or {}).items()]
    start = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *more]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode("utf-8", "replace")


def merge_metrics(texts: Mapping[str, bytes]) -> bytes:
    """Return the Prometheus texts of several replicas, given by name, as one text, by metric
    family.

    Every sample gets a label `replica` with its replica's name; equal comments are kept once.
    """
    heads: dict[str, list[str]] = {}
    lines: dict[str, list[str]] = {}
    for name, text in texts.items():
        family = ""
        for line in text.decode().splitlines():
            if line.startswith("#"):
                family = line.split(" ", 3)[2] if line.count(" ") >= 2 else family
                known = heads.setdefault(family, [])
                if line not in known:
                    known.append(line)
            elif line:
                metric, brace, rest = line.partition("{")
                if brace:
                    told = f'{metric}{{replica="{name}",{rest}'
                else:
                    metric, _, rest = line.partition(" ")
                    told = f'{metric}{{replica="{name}"}} {rest}'
                lines.setdefault(family, []).append(told)
    merged = [row for family in heads for row in (*heads[family], *lines.get(family, ()))]
    return ("\n".join(merged) + "\n").encode()
