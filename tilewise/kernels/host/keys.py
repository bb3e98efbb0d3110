"""Names of kernels in Triton's cache on disk, whatever a process compiled before them.

A kernel's name there depends on the constants of its module and of all functions that it calls.
Triton before 3.8 adds up the constants of a function before it has read that function, if it has
not met it yet: the first caller's name goes without them. So the same kernel had several names, by
the order in which a process met its callers, and was compiled again under each.
"""

from __future__ import annotations

from typing import Any

__all__ = ["settle_names"]


def settle_names() -> None:
    """Patch Triton so that it reads a called function before it hashes a caller of that function.

    A kernel's name in the cache on disk then no longer depends on the order of compilation. A
    second call, no Triton, or a version without the patched method changes nothing.
    """
    try:
        from triton.runtime.jit import DependenciesFinder
    except ImportError:  # without Triton, or in one that does it otherwise
        return
    add = getattr(DependenciesFinder, "_update_hash", None)
    if add is None or add.__module__ == __name__:
        return

    def read_and_add(self: Any, function: Any) -> None:
        _ = function.cache_key  # reads it, and remembers
        add(self, function)

    DependenciesFinder._update_hash = read_and_add
