"""Request bodies: bound their total size, and count their contents before they are parsed.

A parser, and any code that walks its result, holds the interpreter lock even on a thread, and so
delays every stream. The time depends on a body's contents more than on its size: eight megabytes
of text are parsed in a millisecond, as many of `[],` in a second. So names, brackets, texts and
entries are counted first, by searches that take a few milliseconds for each eight megabytes.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any

from starlette.requests import ClientDisconnect, Request

from tilewise.server.errors import ApiError, ClientLeft, invalid
from tilewise.server.keys import Caller

__all__ = ["MOST_ENTRIES", "SHORT", "Bodies", "read_body", "refuse_crowded"]

# Largest body in bytes that the event loop parses itself: at worst 20 ms, for one that is all
# names.
SHORT = 2**16
# Limits of longer bodies. Parsing takes 1 us for each name, 1/4 us for each bracket, 1/10 us for
# each text and 1/20 us for each entry of a list.
MOST_NAMES = 2**15
MOST_BRACKETS = 2**16
MOST_TEXTS = 2**17
MOST_ENTRIES = 2**19
ESCAPES = 2**16  # characters of a text that are scanned before other tasks run
_TEXT = re.compile(rb'[^"\\]*+(?:\\.[^"\\]*+){0,%d}+' % ESCAPES, re.DOTALL)


class Bodies:
    """Bound the bytes of all requests' bodies in memory, from their arrival to their answer's end.

    A quarter of the room is reserved for bodies of at most `SHORT` bytes, and no key may have more
    than half of the room.

    Args:
        most: the largest total size in bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._all = 0
        self._keys = Counter[str]()

    def take(self, caller: Caller, more: int, size: int) -> None:
        """Reserve `more` bytes for a body of `caller` that has `size` bytes already.

        Raises:
            ApiError: 503, the bodies of all requests or of this key would be too large together;
                nothing is reserved then.
        """
        most = self._most if size + more <= SHORT else self._most * 3 // 4
        found = self._all + more
        whose = "all requests"
        if caller.name and self._keys[caller.name] + more > self._most // 2:
            most, found, whose = self._most // 2, self._keys[caller.name] + more, "this key"
        if found > most:
            raise ApiError(
                503,
                f"bodies of {whose} must be at most {most:,} bytes together, got {found:,}",
                code="bodies_full",
                retry_after_s=1,
            )
        self._all += more
        self._keys[caller.name] += more

    def give_back(self, caller: Caller, size: int) -> None:
        """Release the `size` bytes that were reserved for a body of `caller`."""
        self._all -= size
        self._keys[caller.name] -= size
        if not self._keys[caller.name]:
            del self._keys[caller.name]


async def read_body(request: Request, bodies: Bodies, max_bytes: int, timeout_s: float) -> bytes:
    """Return the body of a request.

    Its bytes are reserved in `bodies` as they arrive, and noted in the request's state; `Front`
    gives them back when the request has been answered.

    Args:
        max_bytes: the largest size of the body.
        timeout_s: seconds within which the whole body must arrive.

    Raises:
        ApiError: 413, the body is too long; 415, the body is compressed; 408, the body arrives too
            slowly; 499, the client has left; 503, there is no room beside other bodies.
    """
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise ApiError(415, f"content-encoding must be identity, got {coding[:80]}")
    told = request.headers.get("content-length", "0")
    if told.isdecimal() and int(told) > max_bytes:
        raise _too_long(max_bytes, int(told))
    state: dict[str, Any] = request.scope["state"]
    body = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            async for part in request.stream():
                if len(body) + len(part) > max_bytes:
                    raise _too_long(max_bytes, len(body) + len(part))
                bodies.take(state["caller"], len(part), len(body))
                state["body_bytes"] = len(body) + len(part)
                body += part
    except TimeoutError:
        raise ApiError(408, f"body must arrive within {timeout_s:g} s") from None
    except ClientDisconnect:
        raise ClientLeft from None
    return bytes(body)


def _too_long(limit: int, size: int) -> ApiError:
    return ApiError(413, f"body must be at most {limit:,} bytes, got {size:,}")


def refuse_crowded(body: bytes, most_entries: int = MOST_ENTRIES) -> None:
    """Refuse a body with so many names, lists, texts or commas that parsing it would take long.

    Args:
        body: the body, which need not be valid JSON.
        most_entries: the largest number of commas; lists of token ids have one between two ids.

    Raises:
        ApiError: 400, the number of one of these is above its limit.
    """
    bounds = (
        ("names", b":", MOST_NAMES),
        ("lists", b"[", MOST_BRACKETS),
        ("objects", b"{", MOST_BRACKETS),
        ("entries", b",", most_entries),
    )
    counts = [body.count(sign) for _, sign, _ in bounds]
    if all(count <= most for count, (_, _, most) in zip(counts, bounds, strict=True)) and (
        body.count(b'"') <= 2 * MOST_TEXTS
    ):
        return
    # Most of these characters may be inside texts: count only those between two texts.
    counts, texts, place = [0] * len(bounds), 0, 0
    while True:
        end = body.find(b'"', place)
        stop = len(body) if end < 0 else end
        for i, (name, sign, most) in enumerate(bounds):
            counts[i] += body.count(sign, place, stop)
            if counts[i] > most:
                raise _crowded(name, most)
        if end < 0:
            return
        texts += 1
        if texts > MOST_TEXTS:
            raise _crowded("texts", MOST_TEXTS)
        place = _end_of_text(body, end + 1)


def _end_of_text(body: bytes, place: int) -> int:
    """Return the index behind the closing quotation mark of the JSON string that `place` lies in.

    Return len(body) if it has none.
    """
    while place < len(body):
        found = _TEXT.match(body, place)
        assert found is not None  # the pattern matches an empty string, too
        place = found.end()
        if body[place : place + 1] == b'"':
            return place + 1
        if found.end() == found.start():  # a backslash at the end of the body
            break
    return len(body)


def _crowded(what: str, most: int) -> ApiError:
    return invalid(f"body must hold at most {most:,} {what}, got more", code="too_many")
