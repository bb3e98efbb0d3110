"""Counts the kernels that are compiled, so that a run can show that none was."""

from __future__ import annotations

import functools
import threading
from typing import Any

from tilewise.ops.compile_ahead import listen

__all__ = ["Compilations", "CpuCompilations"]

_lock = threading.Lock()
_total = 0
_names: list[str] = []
_is_watching = False


def _watch() -> None:
    """Count the kernels that Triton compiles or loads from its disk cache, from now on."""
    global _is_watching
    with _lock:
        if not _is_watching:
            listen(_count)
            _is_watching = True


def _count(**what: Any) -> None:
    global _total
    with _lock:
        _total += 1
        _names.append(str(what["src"].name))


class Compilations:
    """Counts the kernels that Triton compiles or loads from its disk cache in the whole process.

    The count begins when the object is made.
    """

    def __init__(self) -> None:
        _watch()
        self._first = _total

    @property
    def count(self) -> int:
        """The number of kernels compiled, or loaded from the disk cache, since this object was
        made."""
        return _total - self._first

    @property
    def names(self) -> list[str]:
        """The names of the kernels, in the order of their compilation."""
        return _names[self._first : _total]


class CpuCompilations:
    """Counts the functions that numba compiles for a caller in the whole process.

    The count begins when the object is made. Functions that such a function calls are a part of it;
    what comes from the disk cache is not counted.
    """

    def __init__(self) -> None:
        self._first = int(_numba().count)

    @property
    def count(self) -> int:
        """The number of functions since this object was made."""
        return int(_numba().count) - self._first


@functools.cache
def _numba() -> Any:
    """Return the counter of numba's compilations, which counts from the first call of this on."""
    from numba.core import event

    class Counter(event.Listener):
        """Counts numba's outermost compilations; those of functions that they call belong to them.

        Threads need no lock here: numba compiles one function at a time, under its own lock.
        """

        count = depth = 0

        def on_start(self, event: Any) -> None:
            self.depth += 1

        def on_end(self, event: Any) -> None:
            self.depth -= 1
            self.count += self.depth == 0 and event.is_end

    counter = Counter()
    event.register("numba:compile", counter)
    return counter
