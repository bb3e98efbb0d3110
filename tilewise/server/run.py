"""Sockets and signals: run the application on uvicorn, from its start to its last request."""

from __future__ import annotations

import asyncio
import errno
import functools
import json
import logging
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from tilewise.server.bridge import Bridge
from tilewise.server.errors import invalid
from tilewise.server.job import Direct
from tilewise.server.joined import Joined

__all__ = ["Server", "ServerOptions", "bind", "run"]

LOG = logging.getLogger("tilewise.server")
# Connections that may wait to be accepted, for a burst of clients.
BACKLOG = 2048
# Connections accepted in one turn of the event loop. When the process is out of file descriptors,
# asyncio fails and logs once for each of them.
ACCEPTED = 64
FLOOD_S = 10.0  # seconds between two log lines about a lack of descriptors
# Bytes of a request's line and headers read before it is refused; the application refuses smaller
# headers, too, with 431.
MOST_HEADER_BYTES = 64 * 2**10
KEEP_ALIVE_S = 30
# Bytes of an answer that a client must read within the time limit for slow readers.
LEAST_READ = 16 * 2**10
_NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
GRACE_S = 1.0  # seconds in which the job itself may end a slow client, before its connection is cut
WATCH_S = 0.25  # seconds between two checks whether the engine is alive


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The server's options for its sockets.

    Attributes:
        shutdown_timeout_s: seconds that running requests have to end when the server stops.
        header_timeout_s: seconds for a request's headers to arrive, and for the rest of a body that
            was refused.
        tls: the TLS context; None for plain HTTP.
    """

    shutdown_timeout_s: float = 30.0
    header_timeout_s: float = 10.0
    tls: ssl.SSLContext | None = None


def bind(host: str, port: int) -> socket.socket:
    """Return a TCP socket, bound and non-blocking, that does not listen yet; port 0 takes any free
    port.

    Raises:
        ValueError: the port is in use or not allowed, or the address is not this machine's.
    """
    found = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        # Otherwise a port stays in use for a minute after a server that had clients.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
    except OSError as error:
        if found is not None:
            found.close()
        raise ValueError(
            f"--host and --port must be an address that is free, got {host} and {port}: "
            f"{error.strerror or error}"
        ) from None
    found.setblocking(False)
    return found


class _Protocol(H11Protocol):
    """uvicorn's protocol with limits on all the time that a client may take, and OpenAI's error
    format.

    uvicorn limits the time between two requests. It does not limit a client that begins a request
    and stops, sends the rest of a body after its request was answered (refused for want of a key),
    or does not read its answer. Such a client may open as many connections as the machine has
    descriptors.
    """

    header_timeout_s = 10.0
    slow_reader_s = 10.0
    on_slow_reader: Callable[[], None] = staticmethod(lambda: None)

    def connection_made(self, transport: Any) -> None:
        self._unread: asyncio.TimerHandle | None = None
        self._is_lost = False
        self._joined = transport = Joined(transport, self.loop, self._watch_reader)
        super().connection_made(transport)
        # The application cuts the connection of a client that does not read: closing it would wait
        # for the client.
        self.app_state = {
            **self.app_state,
            "cut": transport.abort,
            "direct": Direct(self._is_open, self._push, self._add),
        }
        self._late: asyncio.TimerHandle | None = None
        self._await_headers()

    def _is_open(self) -> bool:
        """Return whether parts of a streamed answer may be written to the socket at once.

        If False (HTTP/1.0, a full buffer or a closing connection), send() must write them, which
        waits for a client that reads slowly.
        """
        is_chunked = self.conn.their_http_version == b"1.1"
        return is_chunked and not self.flow.write_paused and not self.transport.is_closing()

    def _push(self, part: bytes) -> None:
        """Write a part of a streamed answer at once, in one chunk.

        It bypasses h11's state machine, which has nothing to decide here and takes longer than all
        the other work of a token.
        """
        self._joined.write_now(b"%x\r\n%b\r\n" % (len(part), part))

    def _add(self, part: bytes) -> None:
        """Write a part of a streamed answer in one chunk, together with the other writes of this
        turn of the event loop."""
        self._joined.write(b"%x\r\n%b\r\n" % (len(part), part))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._owes_body():
            return
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._late is None and self.timeout_keep_alive_task is None:
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._forget_reader()
        self._is_lost = True  # a closed TLS transport cannot be queried
        super().connection_lost(exc)
        # Break the reference cycle between request and connection, so that both are freed now: they
        # are 50 objects, which a garbage collection would have to find while all streams stop.
        self.cycle = self.scope = None  # type: ignore[assignment]
        self.app_state = {}
        self._joined.let_go()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._owes_body() and self._late is None:
            self._await_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self.transport.is_closing():
            self._forget_reader()

    def _owes_body(self) -> bool:
        """Return whether the request was answered before its body had arrived."""
        return self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY

    def _watch_reader(self) -> None:
        """Start a timer of `slow_reader_s` + `GRACE_S` seconds, unless one runs or all is read.

        If the client has not read `LEAST_READ` bytes of the written answer by then, its connection
        is cut.
        """
        if self._is_lost:
            return
        size = self.transport.get_write_buffer_size()
        if size and self._unread is None:
            self._unread = self.loop.call_later(
                self.slow_reader_s + GRACE_S, self._look_at_reader, size
            )

    def _look_at_reader(self, before: int) -> None:
        self._unread = None
        size = self.transport.get_write_buffer_size()
        if size and size > before - LEAST_READ:
            LOG.warning(
                "a connection dropped: its client has not read an answer for %g s",
                self.slow_reader_s + GRACE_S,
            )
            self.on_slow_reader()
            self.transport.abort()
        else:
            self._watch_reader()

    def _forget_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are not HTTP with an error 400, and close the connection; if an answer
        has begun, only close it."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # an answer has begun on this connection
            return
        body = json.dumps(invalid(msg, code="invalid_http").body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        parts: list[Any] = [
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        for part in parts:
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()

    def _await_headers(self) -> None:
        self._late = self.loop.call_later(self.header_timeout_s, self._refuse_late)

    def _stop_waiting(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse_late(self) -> None:
        self._late = None
        is_late = self.conn.their_state is h11.IDLE or self._owes_body()
        if is_late and not self.transport.is_closing():
            self.transport.abort()


class Server(uvicorn.Server):
    """Serve an application until the process is told to stop.

    The first SIGTERM or SIGINT lets running requests end within a time limit, a second one ends at
    once.

    Args:
        app: the ASGI application.
        bridge: the bridge, whose requests are ended first.
        options: the options of the sockets, see ServerOptions.
        on_started: a function without arguments, called when connections are accepted.
        handles_signals: False if the process belongs to another program.
    """

    def __init__(
        self,
        app: Any,
        bridge: Bridge,
        options: ServerOptions,
        *,
        on_started: Callable[[], None] | None = None,
        handles_signals: bool = True,
    ) -> None:
        protocol = type("_TimedProtocol", (_Protocol,), {})
        protocol.header_timeout_s = options.header_timeout_s  # type: ignore[attr-defined]
        protocol.slow_reader_s = bridge.slow_reader_s  # type: ignore[attr-defined]
        count = functools.partial(bridge.metrics.count, bridge.metrics.dropped, "slow_reader")
        protocol.on_slow_reader = staticmethod(count)  # type: ignore[attr-defined]
        config = uvicorn.Config(
            app,
            http=protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,  # the client's address is not used
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,  # the bridge has let requests end before
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            backlog=ACCEPTED,
        )
        config.load()
        config.ssl = options.tls
        super().__init__(config)
        self._bridge = bridge
        self._options = options
        self._on_started = on_started
        self._handles_signals = handles_signals
        self._drain: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self.exit_code = 0
        self._stopped: float | None = None

    @property
    def seconds_left(self) -> float:
        """The seconds that running requests have to end: shutdown_timeout_s before `stop`, and
        from then on what is left of it, down to 0."""
        since = 0.0 if self._stopped is None else time.monotonic() - self._stopped
        return max(0.0, self._options.shutdown_timeout_s - since)

    def stop(self) -> None:
        """Begin to stop, and return at once: running requests have shutdown_timeout_s to end.

        Called on the event loop's thread; later calls do nothing.
        """
        if self._drain is None:
            self._stopped = time.monotonic()
            self._drain = asyncio.get_running_loop().create_task(self._end())

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to accept connections, to handle signals and to watch the engine.

        It then calls `on_started`.
        """
        await super().startup(sockets)
        for sock in sockets or ():
            sock.listen(BACKLOG)
        asyncio.get_running_loop().set_exception_handler(_Failures())
        if self._handles_signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._signalled, number)
        self._watch = asyncio.get_running_loop().create_task(self._watch_engine())
        if self._on_started is not None:
            self._on_started()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, as uvicorn would here: startup() installs its own."""
        yield

    def _signalled(self, number: int) -> None:
        if self._drain is not None:
            LOG.warning("a second signal: ending now")
            logging.shutdown()
            # Not sys.exit, which would wait for the engine's threads.
            os._exit(128 + number if number != signal.SIGTERM else 1)
        LOG.info(
            "shutting down; running requests have %g s to end", self._options.shutdown_timeout_s
        )
        self.stop()

    async def _watch_engine(self) -> None:
        """Watch the engine, and end the server with exit code 1 when the engine has ended, so that
        a supervisor restarts the server.

        The engine recovers from most failures by itself; each restart of it is logged.
        """
        num_restarts = 0
        while self._bridge.loop.is_alive:
            restarts = getattr(self._bridge.loop, "num_restarts", 0)
            if restarts > num_restarts:
                num_restarts = restarts
                LOG.error("the engine has failed and begins anew, restart %d", restarts)
            await asyncio.sleep(WATCH_S)
        LOG.error("the engine has ended: the server ends, too")
        self.exit_code = 1
        await self._bridge.drain(WATCH_S)  # report the error to running requests first
        self.should_exit = True

    async def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        await self._bridge.drain(self._options.shutdown_timeout_s)
        self.should_exit = True


class _Failures:
    """The event loop's handler of exceptions: it logs them, a lack of file descriptors only every
    `FLOOD_S` seconds."""

    def __init__(self) -> None:
        self._told = -FLOOD_S

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log one failure, see `loop.set_exception_handler`."""
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in _NO_FILES:
            loop.default_exception_handler(context)
        elif loop.time() - self._told >= FLOOD_S:
            self._told = loop.time()
            LOG.error("connections wait until others end: %s", error.strerror)


def run(server: Server, sock: socket.socket) -> int:
    """Serve on a bound socket until told to stop; return the process's exit code.

    The limit of open files is raised first.
    """
    if sys.platform != "win32":
        _raise_descriptor_limit()
    asyncio.run(server.serve([sock]))
    return server.exit_code


def _raise_descriptor_limit() -> None:
    """Raise the process's limit of open files, often 1,024, to the system's maximum or to 65,536 if
    that is less."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
