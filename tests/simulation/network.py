"""Connections in virtual time: bytes come in pieces and late, and connections are cut.

A connection has a server's protocol at one end, that of the real server over an asyncio transport
which is written here, and a client's callbacks at the other. Each direction keeps its order.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable
from typing import Any

HIGH = 64 * 2**10  # bytes that a transport of asyncio takes before it pauses its writer


class Wire:
    """One direction: bytes in order, each piece after a delay of its own.

    Args:
        take: called with each piece, and with b"" at the end.
        pace: seconds that a piece takes on average.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        draw: random.Random,
        take: Callable[[bytes], None],
        pace: float,
    ) -> None:
        self._loop, self._draw, self._take, self._pace = loop, draw, take, pace
        self._last = loop.time()
        self.is_cut = False
        self.num_under_way = 0

    def send(self, data: bytes) -> None:
        """Send bytes, in one piece or some."""
        while data:
            size = len(data) if self._draw.random() < 0.7 else self._draw.randint(1, len(data))
            self._later(data[:size])
            data = data[size:]

    def end(self) -> None:
        """Say that no more comes."""
        self._later(b"")

    def cut(self) -> None:
        """Lose all that is under way, and what comes after it."""
        self.is_cut = True

    def _later(self, piece: bytes) -> None:
        # Timers of one time come in any order: no two pieces have the same.
        when = self._loop.time() + self._draw.expovariate(1 / self._pace)
        self._last = max(self._last + 1e-9, when)
        self.num_under_way += len(piece)
        self._loop.call_at(self._last, self._arrive, piece)

    def _arrive(self, piece: bytes) -> None:
        self.num_under_way -= len(piece)
        if not self.is_cut:
            self._take(piece)


class ServerTransport(asyncio.Transport):
    """The server's end of a connection; what a client does not read waits here.

    Args:
        client: the other end.
        room: bytes that are under way at most; more waits in the buffer.
        high: bytes of the buffer at which the writer is paused.
    """

    def __init__(self, connection: Connection, room: int, high: int) -> None:
        super().__init__()
        self._connection, self._room, self._high = connection, room, high
        self._buffer: deque[bytes] = deque()
        self._size = 0
        self._is_closing = self._is_lost = self._is_paused = self._is_held = False
        self._unread: deque[bytes] = deque()
        self.protocol: Any = None

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """Return addresses; there is no socket and no TLS."""
        known = {"peername": ("127.0.0.1", 40000), "sockname": ("127.0.0.1", 8000)}
        return known.get(name, default)

    def is_closing(self) -> bool:
        """Whether the end of the connection has begun."""
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        """Bytes that no client has room for yet."""
        return self._size

    def pause_reading(self) -> None:
        """Let what comes wait."""
        self._is_held = True

    def resume_reading(self) -> None:
        """Take what waits, and what comes."""
        self._is_held = False
        while self._unread and not self._is_held:
            self.take(self._unread.popleft())

    def take(self, data: bytes) -> None:
        """Give bytes of the client to the protocol; b"" is the end of its half."""
        if self._is_lost or self._is_closing:
            return
        if self._is_held:
            self._unread.append(data)
        elif data:
            self.protocol.data_received(data)
        elif not self.protocol.eof_received():
            self.close()  # as asyncio does with a connection that is half closed

    def write(self, data: bytes) -> None:
        """Send bytes to the client, as far as it has room."""
        if self._is_lost or self._is_closing or not data:
            return
        self._buffer.append(bytes(data))
        self._size += len(data)
        self.pump()
        if self._size > self._high and not self._is_paused:
            self._is_paused = True
            self.protocol.pause_writing()

    def pump(self) -> None:
        """Send what the client has room for."""
        wire = self._connection.to_client
        while self._buffer and wire.num_under_way + self._connection.held < self._room:
            piece = self._buffer.popleft()
            self._size -= len(piece)
            wire.send(piece)
        if self._is_paused and self._size <= self._high // 4:
            self._is_paused = False
            self.protocol.resume_writing()
        if self._is_closing and not self._buffer:
            self._lose()

    def close(self) -> None:
        """End the connection when all is sent."""
        if not self._is_closing:
            self._is_closing = True
            if not self._buffer:
                self._lose()

    def abort(self) -> None:
        """End it now."""
        self._is_closing = True
        self._buffer.clear()
        self._size = 0
        self._lose()

    def _lose(self) -> None:
        if not self._is_lost:
            self._is_lost = True
            self._connection.to_client.end()
            self._connection.loop.call_soon(self.protocol.connection_lost, None)

    def lose(self, error: Exception | None) -> None:
        """Take the news that the client has gone, in the middle of anything."""
        if not self._is_lost:
            self._is_lost = self._is_closing = True
            self._buffer.clear()
            self._size = 0
            self.protocol.connection_lost(error)


class Connection:
    """A connection of one client.

    Args:
        make: makes the server's protocol.
        on_data: called with what comes from the server; b"" is the end.
        pace: seconds that a piece takes on average.
        room, high: see `ServerTransport`.

    Attributes:
        held: bytes that have come and that the client does not read.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        draw: random.Random,
        make: Callable[[], Any],
        on_data: Callable[[bytes], None],
        *,
        pace: float,
        room: int = 1 << 20,
        high: int = HIGH,
    ) -> None:
        self.loop, self._on_data = loop, on_data
        self.held = 0
        self._is_held = False
        self._unread: list[bytes] = []
        self.transport = ServerTransport(self, room, high)
        self.to_client = Wire(loop, draw, self._come, pace)
        self.to_server = Wire(loop, draw, self.transport.take, pace)
        self.transport.protocol = make()
        self.transport.protocol.connection_made(self.transport)

    def _come(self, data: bytes) -> None:
        if self._is_held:
            self.held += len(data)
            self._unread.append(data)
        else:
            self._on_data(data)
            self.transport.pump()

    def hold(self) -> None:
        """Read nothing from now on."""
        self._is_held = True

    def read_on(self) -> None:
        """Read what has come, and what comes."""
        self._is_held, unread = False, self._unread
        self._unread, self.held = [], 0
        for data in unread:
            self._on_data(data)
        self.transport.pump()

    def cut(self) -> None:
        """Let the client vanish: nothing that is under way arrives, and the server is told."""
        self.to_client.cut()
        self.to_server.cut()
        self.loop.call_soon(self.transport.lose, ConnectionResetError("cut"))
