"""Join the writes of one turn of the event loop to one: each send wakes the client.

The headers and the first event of a stream are written in one turn of the event loop, and so are
its last event, its usage and the last chunk. Each write was a system call and a packet: 8 for an
answer of 4 tokens, where 5 are enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["Joined"]

MOST = 64 * 2**10  # bytes held back at most, so that the transport's flow control sees the rest


def _nobody() -> None:
    pass


class Joined:
    """A transport that sends all writes of one turn of the event loop together.

    Args:
        transport: the transport to write to; other attributes are passed through to it.
        loop: the transport's event loop.
        on_close: a function that `close` calls after it has closed the transport, whose closing
            ends only when the client has read what was written.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        loop: asyncio.AbstractEventLoop,
        on_close: Callable[[], None] = _nobody,
    ) -> None:
        self._transport, self._loop, self._on_close = transport, loop, on_close
        self._parts: list[bytes] = []
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Hold bytes back until the end of this turn of the event loop, or until `MOST` bytes are
        held, and then write them together."""
        if not data:
            return
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size >= MOST:
            self.flush()

    def write_now(self, data: bytes) -> None:
        """Write at once, after the writes that are held back."""
        if self._parts:
            self._parts.append(data)
            self.flush()
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write the buffered parts to the transport, joined."""
        if self._parts:
            data, self._parts, self._size = b"".join(self._parts), [], 0
            self._transport.write(data)

    def close(self) -> None:
        """Close once everything is written."""
        self.flush()
        self._transport.close()
        self._on_close()

    def let_go(self) -> None:
        """Forget `on_close`, as the connection is lost."""
        self._on_close = _nobody

    def abort(self) -> None:
        """Close now; writes that are held back are discarded."""
        self._parts, self._size = [], 0
        self._transport.abort()
