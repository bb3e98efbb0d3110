"""Writes of one connection that belong together as one: each send wakes the client.

A stream's headers and its first event, and the end of one, its usage and the last chunk, are
written one after the other in one turn of the event loop. Each was a system call and a packet: 8
for an answer of 4 tokens, where 5 are enough.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

__all__ = ["Joined"]

MOST = 64 * 2**10  # bytes that are held back; what flow control knows of should not lag behind


def _nobody() -> None:
    pass


class Joined:
    """A transport whose writes of one turn of the event loop go out together.

    Args:
        transport: all else is its own.
        loop: that it belongs to.
        on_close: called when it shall close, which waits for its client to read what is written.
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
        """Write when this turn of the event loop is over, at the latest."""
        if not data:
            return
        if not self._parts:
            self._loop.call_soon(self.flush)
        self._parts.append(data)
        self._size += len(data)
        if self._size >= MOST:
            self.flush()

    def write_now(self, data: bytes) -> None:
        """Write at once, behind what is held back."""
        if self._parts:
            self._parts.append(data)
            self.flush()
        else:
            self._transport.write(data)

    def flush(self) -> None:
        """Write what is held back."""
        if self._parts:
            data, self._parts, self._size = b"".join(self._parts), [], 0
            self._transport.write(data)

    def close(self) -> None:
        """Close when all is written."""
        self.flush()
        self._transport.close()
        self._on_close()

    def let_go(self) -> None:
        """Call nobody any more: the connection is lost."""
        self._on_close = _nobody

    def abort(self) -> None:
        """Close now; what is held back is not written."""
        self._parts, self._size = [], 0
        self._transport.abort()
