"""Let one process compile a kernel, while others wait and load the result.

Processes that start together on a cold machine, as the ranks of one model do, call the same kernels
at the same moment. Numba would compile each in every process, and if two write the index of a
function's cache at once, one entry is lost. A lock on a file beside the cache orders them.

A cache may lie in a home folder or an image that several machines see. A kernel is loaded only if
it would be compiled to the same code: numba compares the CPU's name and features, this module all
else.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from numba.core.caching import FunctionCache

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.telling import telling
from tilewise.kernels.device import l2_bytes

try:
    import fcntl
except ImportError:  # without file locks each process compiles for itself
    fcntl = None

# A kernel is compiled in seconds. A process that waits longer compiles for itself, since the other
# may be stopped.
PATIENCE_S = 120.0
_LOOK_S = 0.02
# A compiler makes many objects and few cycles: garbage collection took 8 to 12 % of its time.
_OBJECTS_A_LOOK = 100_000


def made_of() -> tuple[int, ...]:
    """Return everything that a kernel's code depends on beside its text, its types and LLVM's
    options: the CPU's registers, features and L2 bytes.

    Two processes of one machine may differ in it: Linux may refuse one the tile registers, and a
    virtual machine may show another L2 cache.
    """
    return (
        simd.REGISTER_BYTES,
        simd.NUM_REGISTERS,
        simd.HAS_BF16_DOT,
        simd.HAS_TILES,
        simd.HAS_HALF,
        simd.HAS_INTEGER_DOT,
        l2_bytes(),
    )


@contextmanager
def _looking_seldom_for_garbage() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], _OBJECTS_A_LOOK) if before[0] else 0, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class SharedCache(FunctionCache):
    """Numba's cache of one function, which compiles missing entries under a lock.

    Numba searches the cache, compiles and saves while it holds its own lock, so threads of one
    process never meet here.
    """

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        self._lock: int | None = None

    def _index_key(self, sig: Any, codegen: Any) -> Any:
        return *super()._index_key(sig, codegen), made_of()

    @property
    def lock_path(self) -> Path:
        """The file that the process which compiles this function locks, beside the function's index
        in the cache."""
        return Path(self.cache_path) / f"{self._impl.filename_base}.lock"

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return the compiled code of the cache for the signature `sig`, or None, and then the
        caller compiles.

        If there is none, the lock is taken, after at most PATIENCE_S, and the cache searched again
        if another process held it. With None this process keeps the lock until `save_overload` or
        `release`.
        """
        found = super().load_overload(sig, target_context)
        if found is not None or fcntl is None or self._lock is not None:
            return found
        try:
            self._impl.locator.ensure_cache_path()
            self._lock = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            with telling():
                waited = self._take()
        except OSError:  # a folder or a file system without locks
            self.release()
            return None
        found = super().load_overload(sig, target_context) if waited else None
        if found is not None:
            self.release()
        return found

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save the compiled code of the signature `sig` in the cache, and release the lock."""
        try:
            super().save_overload(sig, data)
        finally:
            self.release()

    def release(self) -> None:
        """Release the lock, if this process holds it."""
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)

    def _take(self) -> bool:
        """Wait for the lock on the open file, at most PATIENCE_S; return whether another process
        held it. After that time the lock is not held, and this process compiles all the same."""
        until = time.monotonic() + PATIENCE_S
        waited = False
        while time.monotonic() < until:
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                time.sleep(_LOOK_S)
            else:
                break
        return waited


def compile_once(compiled: Any, stamp: Any) -> None:
    """Give a function compiled by `njit` with a cache a `SharedCache` in place of numba's; the
    function is changed in place.

    Args:
        stamp: the key of valid entries; an entry with another one is compiled again.
    """
    cache = SharedCache(compiled.py_func)
    cache._cache_file._source_stamp = stamp
    compiler = compiled._compiler
    compile_now = compiler.compile

    def compile_or_release(*args: Any) -> Any:
        try:
            with _looking_seldom_for_garbage(), telling():
                return compile_now(*args)
        except BaseException:
            cache.release()  # nothing will be saved
            raise

    compiler.compile = compile_or_release
    compiled._cache = cache
