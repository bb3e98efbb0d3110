"""noted_launches() and Compilers: compile the kernels of future launches in several processes.

Calls made inside `noted_launches` run no kernel of ours; torch's own operations are computed. The
compile requests of the skipped launches go to `Compilers`, which put the results into Triton's
cache on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from tilewise.errors import UnsupportedError
from tilewise.kernels import device

if TYPE_CHECKING:
    from tilewise.kernels.host.kernel_file import Manifest, Taken
    from tilewise.kernels.host.requests import Request
    from tilewise.kernels.host.side_by_side import Compilers, Outcome

__all__ = [
    "Compilers",
    "Outcome",
    "Request",
    "Taken",
    "cache",
    "check_triton",
    "compilers",
    "is_on_disk",
    "listen",
    "noted_launches",
    "pack",
    "take",
    "tell_first_run",
]


def listen(told: Callable[..., None]) -> None:
    """Register `told`, called from now on for every kernel that Triton compiles or loads from disk.

    Args:
        told: a function with the arguments of Triton's `knobs.compilation.listener`; without Triton
            it is never called. Earlier listeners stay.
    """
    from tilewise.kernels.host.first_run import listen as listen_to_triton

    listen_to_triton(told)


def noted_launches(
    note: Callable[[Request], None],
) -> AbstractContextManager[dict[str, Request]]:
    """Return a context in which this thread's launches are recorded instead of run.

    The context yields a dict from the hash of each kernel to its request, filled as launches come.
    Kernels that this process has compiled already are left out. A recorded kernel writes nothing:
    results are uninitialised memory, except for sampled tokens, which are 0.

    Args:
        note: a function called with each new request, once.
    """
    from tilewise.kernels.host.requests import recording

    return recording(note)


def compilers(count: int) -> Compilers:
    """Return a context manager with `count` compiling processes, which it ends at its exit.

    The processes start with the first request, or by its method `begin`.
    """
    from tilewise.kernels.host.side_by_side import Compilers

    return Compilers(count)


def is_on_disk(name: str, file: str) -> bool:
    """Return whether a kernel's compiled files are in Triton's cache on disk.

    Args:
        name: the hash of the kernel's request.
        file: the `file` of the kernel's request.
    """
    from tilewise.kernels.host.requests import Request

    return Request("", "", name, file, b"").is_on_disk


def cache() -> tuple[Path, str]:
    """Return the directory of Triton's cache, and Triton's version."""
    import triton
    from triton import knobs

    return Path(knobs.cache.dir), triton.__version__


def check_triton() -> None:
    """Raise UnsupportedError where there is no Triton to compile with, or to compile for."""
    if not device.has_triton():
        raise UnsupportedError(
            "precompiled kernels must be of an installed Triton, got none: pip install triton "
            "(on Windows triton-windows)"
        )


def pack(path: Path, requests: Iterable[Request], *, arch: int, about: str) -> Manifest:
    """Write the compiled kernels of `requests` to one file, and return its manifest.

    Requests that are not compiled are left out; ValueError is raised if none is compiled.

    Args:
        path: the file to write.
        requests: the launches whose kernels are wanted.
        arch: the compute capability of the GPU, such as 90.
        about: a line of text about their origin.
    """
    from tilewise.kernels.host.kernel_file import pack

    return pack(path, requests, arch=arch, about=about)


def take(path: Path) -> Taken:
    """Put the kernels of a file into Triton's cache on disk.

    The next process that loads kernels writes to standard error how many of them it used.

    Args:
        path: a file that `tilewise precompile --arch ARCH --to FILE` has written.

    Returns:
        The file's manifest, and the numbers of kernels put into the cache and there already.

    Raises:
        ValueError: the file holds no kernels, or is of another Triton, tilewise or GPU.
        UnsupportedError: there is no Triton.
    """
    check_triton()
    from tilewise.kernels.host.kernel_file import unpack

    here = torch.device("cuda")
    return unpack(path, arch=device.arch_of(here) if torch.cuda.is_available() else None)


def tell_first_run() -> None:
    """Write to standard error how many precompiled kernels this process has used, once.

    Nothing is written unless a file of kernels was unpacked (`take`) since the last run.
    """
    from tilewise.kernels.host.first_run import first_run

    found = first_run()
    if found is not None:
        found.tell()
