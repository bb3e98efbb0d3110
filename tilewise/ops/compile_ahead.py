"""noted_launches(), Compilers: what launches would compile, compiled by several processes first.

Calls made inside `noted_launches` run no kernel of ours; torch's own operations are computed. What
Triton would have compiled for them goes to `Compilers`, which leave it in Triton's cache on disk.
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
    """Note what launches of this thread would compile, by its hash, in place of launching.

    Nothing is written by a kernel that is noted: results are whatever their memory held, but for
    sampled tokens, which are 0.

    Args:
        note: is called with each request, once.
    """
    from tilewise.kernels.host.requests import recording

    return recording(note)


def compilers(count: int) -> Compilers:
    """Return so many processes that compile, to be used in a `with` statement."""
    from tilewise.kernels.host.side_by_side import Compilers

    return Compilers(count)


def is_on_disk(name: str, file: str) -> bool:
    """Whether a kernel is in Triton's cache, by the hash and the file of its request."""
    from tilewise.kernels.host.requests import Request

    return Request("", "", name, file, b"").is_on_disk


def cache() -> tuple[Path, str]:
    """Return where Triton's cache is, and Triton's version."""
    import triton
    from triton import knobs

    return Path(knobs.cache.dir), triton.__version__
