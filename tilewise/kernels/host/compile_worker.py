"""A process that compiles kernels for the processes that will launch them; it opens no GPU.

    python -m tilewise.kernels.host.compile_worker

Requests come in by standard input, answers go out by standard output, both as pickles. Two
processes that are asked for the same kernel agree by a lock on a file: one compiles, the other
answers that it is busy. The lock ends with the process that holds it.
"""

from __future__ import annotations

import os
import pickle
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, NamedTuple

try:
    import fcntl
except ImportError:  # Windows: each process compiles for itself
    fcntl = None  # type: ignore[assignment]

__all__ = ["Answer", "StubDriver", "main"]


class Answer(NamedTuple):
    """The answer of a compiling process to a request for one kernel.

    Attributes:
        what: "compiled", "found" on disk, "busy" (another process compiles it) or "failed".
        seconds: the time that the answer took.
        reason: the cause of a failure.
    """

    what: str
    seconds: float
    reason: str = ""


class StubDriver:
    """A stand-in for Triton's driver of a GPU, which knows only the target to compile for.

    Args:
        target: the `GPUTarget` that `get_current_target` returns.
    """

    def __init__(self, target: Any) -> None:
        self._target = target

    @staticmethod
    def is_active() -> bool:
        """Return False: Triton must not choose this driver by itself."""
        return False

    def get_current_target(self) -> Any:
        """Return the GPU target of the compilation."""
        return self._target

    def get_current_device(self) -> int:
        """Return 0, the index of the only GPU."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return 0, the default stream."""
        return 0


def _answer(request: Any) -> Answer:
    began = time.perf_counter()
    try:
        if request.is_on_disk:
            return Answer("found", time.perf_counter() - began)
        with _claimed(request.hash) as is_ours:
            if not is_ours:
                return Answer("busy", time.perf_counter() - began)
            what = "found" if request.is_on_disk else _compile(request)
        return Answer(what, time.perf_counter() - began)
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        return Answer("failed", time.perf_counter() - began, reason)


def _compile(request: Any) -> str:
    import triton
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    from tilewise.kernels.host.requests import kernel_of, work_of

    work = work_of(request)
    triton.runtime.driver.set_active(StubDriver(work.target))
    kernel = kernel_of(request.module, request.name)
    kind = GluonASTSource if kernel.is_gluon() else ASTSource
    source = kind(kernel, work.signature, work.constants, work.attributes)
    compiled = triton.compile(source, target=work.target, options=work.options)
    if compiled.hash != request.hash:
        raise RuntimeError("what was compiled is kept under another name than asked for")
    with suppress(Exception):  # without a C compiler the launch says so
        _build_launcher(compiled)
    return "compiled"


def _build_launcher(compiled: Any) -> None:
    """Build the C launcher of a compiled kernel in Triton's cache on disk, without loading it.

    Only Triton before 3.7 needs one; with later versions nothing happens.
    """
    from triton.backends.nvidia import driver
    from triton.runtime import build

    if not hasattr(driver, "make_launcher"):
        return
    build._load_module_from_path = _not_loaded  # it would open the GPU's driver
    driver.CudaLauncher(compiled.src, compiled.metadata)


def _not_loaded(name: str, path: str) -> Any:
    return SimpleNamespace(launch=None)


@contextmanager
def _claimed(name: str) -> Iterator[bool]:
    """Yield True if this process may compile the kernel with the hash `name`, else False.

    True claims the kernel by a lock on a file until the block ends; False means that another
    process has claimed it. Where no such file can be made, it is always True.
    """
    if fcntl is None:
        yield True
        return
    folder = Path(tempfile.gettempdir()) / f"tilewise-compiling-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        file = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:  # nowhere to agree: each makes its own
        yield True
        return
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        # Who has opened it before and comes now finds the kernel on disk.
        with suppress(OSError):
            os.unlink(folder / name)
    finally:
        os.close(file)


def _read(source: IO[bytes], inbox: queue.SimpleQueue[Any]) -> None:
    """Put unpickled requests from `source` into the inbox until `source` is closed or broken.

    Then this process ends at once, also in the middle of a compilation. It runs in a thread.
    """
    try:
        while True:
            inbox.put(pickle.load(source))
    except (EOFError, OSError, pickle.UnpicklingError):
        os._exit(0)


def main() -> None:
    """Compile requests from standard input, one by one, and write answers to standard output.

    Requests and answers are pickles. It never returns: the process ends when its input does.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever compilers print is no answer
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(sys.stdin.buffer, inbox), daemon=True).start()
    while True:
        pickle.dump(tuple(_answer(inbox.get())), answers)  # of this program's own classes none
        answers.flush()


if __name__ == "__main__":
    main()
