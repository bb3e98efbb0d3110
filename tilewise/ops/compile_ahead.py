"""noted_launches() and Compilers: compile the kernels of future launches in several processes.

Calls made inside `noted_launches` run no kernel of ours; torch's own operations are computed. The
compile requests of the skipped launches go to `Compilers`, which put the results into Triton's
cache on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.kernels.host.requests import Request
    from tilewise.kernels.host.side_by_side import Compilers, Outcome

__all__ = ["Compilers", "Outcome", "Request", "cache", "compilers", "is_on_disk", "noted_launches"]


def noted_launches(
    note: Callable[[Request], None],
) -> AbstractContextManager[dict[str, Request]]:
    """Record what launches of this thread would compile, by its hash, instead of launching.

    A recorded kernel writes nothing: results are uninitialised memory, except for sampled tokens,
    which are 0.

    Args:
        note: a function called with each request, once.
    """
    from tilewise.kernels.host.requests import recording

    return recording(note)


def compilers(count: int) -> Compilers:
    """Return a context manager that runs `count` compiling processes."""
    from tilewise.kernels.host.side_by_side import Compilers

    return Compilers(count)


def is_on_disk(name: str, file: str) -> bool:
    """Return whether a kernel is in Triton's cache, by the hash and the file of its request."""
    from tilewise.kernels.host.requests import Request

    return Request("", "", name, file, b"").is_on_disk


def cache() -> tuple[Path, str]:
    """Return the directory of Triton's cache, and Triton's version."""
    import triton
    from triton import knobs

    return Path(knobs.cache.dir), triton.__version__
