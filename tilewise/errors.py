"""Every error that tilewise raises on purpose.

    Exception
    └── TilewiseError               catch this to catch all of ours
        ├── UnsupportedError        also NotImplementedError: the call cannot be done
        ├── CacheFullError          also RuntimeError: no free KV block
        ├── RequestError            also ValueError: a request can never be served (HTTP 400)
        │   └── QueueFullError      it could be, but too many wait already (HTTP 503)
        ├── EngineClosedError       also RuntimeError: the engine takes no request any more
        │   └── DeviceLostError     its device computes nothing any more
        │       └── WorkerLostError  one of its processes has ended, or hangs
        ├── ReplicaLostError        also RuntimeError: a server behind a common address is gone
        ├── StepStoppedError        also RuntimeError: a step ended early, as was asked
        └── CheckpointError         also ValueError: a model directory is incomplete or wrong

A wrong shape or range is a plain ValueError and a wrong dtype a plain TypeError, as in torch. Every
message follows one pattern: ``name must <rule>, got <value>``. `shown` formats the value if a user
may have given anything.
"""

from __future__ import annotations

import reprlib
from numbers import Integral, Real
from typing import TypeGuard

__all__ = [
    "CacheFullError",
    "CheckpointError",
    "DeviceLostError",
    "EngineClosedError",
    "QueueFullError",
    "ReplicaLostError",
    "RequestError",
    "StepStoppedError",
    "TilewiseError",
    "UnsupportedError",
    "WorkerLostError",
    "is_integer",
    "is_number",
    "shown",
]

LONGEST = 100  # characters of a text, or digits of a number, that a message shows


class TilewiseError(Exception):
    """The base class of all errors that tilewise defines; never raised itself."""


class UnsupportedError(TilewiseError, NotImplementedError):
    """A call asks for something that no backend, or not the named one, can do.

    It is raised as well for options that an integration does not have, for models that a feature of
    the engine does not work with, and for packages that are missing. The message says why.
    """


class CacheFullError(TilewiseError, RuntimeError):
    """The KV cache has fewer free blocks than requested."""


class RequestError(TilewiseError, ValueError):
    """A request is malformed or can never fit into the engine's limits; the message names the
    limit."""


class EngineClosedError(TilewiseError, RuntimeError):
    """The engine accepts no requests any more; the message says why it ended."""


class DeviceLostError(EngineClosedError):
    """The engine's device has failed; the cause is the first exception that it raised."""


class WorkerLostError(DeviceLostError):
    """A process that holds a part of the model has ended or hangs; the message names it."""


class StepStoppedError(TilewiseError, RuntimeError):
    """A step ended early, as another thread had asked; the engine discards the step and repeats
    it."""


class ReplicaLostError(TilewiseError, RuntimeError):
    """A server behind a common address is gone, or went away in the middle of an answer."""


class QueueFullError(RequestError):
    """Too many requests or tokens wait in the engine already; the message has the numbers. A later
    try may succeed."""


class CheckpointError(TilewiseError, ValueError):
    """A checkpoint is incomplete, truncated, of the wrong shape, or of a kind that no model here
    has."""


class _Repr(reprlib.Repr):
    maxstring = maxother = LONGEST

    def repr_int(self, x: int, level: int) -> str:
        """Format an integer inside of a container by `shown`, since Python refuses to write very
        long ones."""
        return shown(x)


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an integer of any library (numbers.Integral) and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number of any library (numbers.Real) and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Format a value for a message: like repr, but of bounded length, and numbers plainly.

    Example:
        >>> shown("a" * 2000), shown(np.float32(0.5)), shown([1, "x"])
    """
    if isinstance(value, Integral) and int(value).bit_length() > 3 * LONGEST:
        return f"an integer of {int(value).bit_length()} bits"
    if isinstance(value, Real):
        text = str(value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
    return _REPR.repr(value)


_REPR = _Repr()
