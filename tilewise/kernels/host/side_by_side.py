"""Kernels compiled by several processes at once, into Triton's cache on disk.

The processes are programs of their own (a forked one could not use CUDA, a spawned one would run
the caller's script again), see no GPU, and end when this one does. Whatever goes wrong in one costs
time only: a kernel that is not there is compiled when it is launched.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType

from triton import knobs

from tilewise.children import environment
from tilewise.kernels.host.compile_worker import Answer
from tilewise.kernels.host.requests import Request

__all__ = ["Compilers", "Outcome"]

WORKER = f"{__package__}.compile_worker"  # the module that each process runs
BUSY_S = 0.2  # until another process is asked again whether it has compiled a kernel
_TRIES = 2  # of a kernel: a process that ends takes down the kernel that it was given


@dataclass
class Outcome:
    """The results of requests to compile kernels.

    Attributes:
        seconds: the time that each compiled request took, by its hash.
        num_found: the number of requests whose kernels were on disk already, or were compiled by
            another program meanwhile.
        failures: the reasons of failures, a line each with the kernel's name.
        left: the requests that were not compiled before the time was over.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    num_found: int = 0
    failures: list[str] = field(default_factory=list)
    left: list[Request] = field(default_factory=list)


class Compilers:
    """Processes that compile kernels; used in a `with` statement, which kills them at its end.

    Args:
        count: the number of processes, which start with `begin` or `compile`.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Compilers:
        return self

    def begin(self) -> None:
        """Start the processes that do not run yet: they load their libraries before the first
        request."""
        while len(self._processes) < self._count:
            self._processes.append(_start())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._kill()
        for process in self._processes:
            process.wait()
            for end in (process.stdin, process.stdout):
                if end is not None:
                    with suppress(OSError):  # what was still to be written to it
                        end.close()
        self._processes.clear()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    @property
    def pids(self) -> list[int]:
        """The process ids of the compilers that were started; [] before that and after the end."""
        return [process.pid for process in self._processes]

    def compile(
        self,
        requests: Iterable[Request],
        *,
        seconds: float,
        show: Callable[[int, int], None] = lambda _done, _all: None,
    ) -> Outcome:
        """Compile the requested kernels that are not on disk yet.

        The method kills the processes at its end, with the kernels that they still compile: call it
        once.

        Args:
            requests: the kernels, in the order in which they are begun.
            seconds: the seconds from the start of this call after which no kernel is begun or
                waited for.
            show: a function that this thread calls with the number of finished requests and the
                number of all requests; both include kernels that are on disk already.

        Returns:
            The seconds of each compiled request, the number of kernels that were on disk, the
            reasons of failures, and the requests that are left to compile. No failure is raised; a
            request whose process ended is tried once more.
        """
        waiting, outcome = deque(requests), Outcome()
        if not waiting:
            return outcome
        self.begin()
        total, tries = len(waiting), dict[str, int]()
        changed, is_over = threading.Condition(), threading.Event()
        given: dict[int, Request] = {}  # by process

        def work(number: int, process: subprocess.Popen[bytes]) -> None:
            while True:
                with changed:
                    while not waiting:
                        if not given:
                            return
                        changed.wait()  # another one may give its request back
                    request = given[number] = waiting.popleft()
                answer = _ask(process, request)
                with changed:
                    del given[number]
                    if is_over.is_set():  # and its result is not asked for
                        changed.notify_all()
                        return
                    if answer is None:
                        tries[request.hash] = tries.get(request.hash, 0) + 1
                        outcome.failures.append(f"{request.name}: its process ended")
                        if tries[request.hash] < _TRIES:
                            waiting.append(request)
                    elif answer.what == "busy":
                        waiting.append(request)
                    elif answer.what == "compiled":
                        outcome.seconds[request.hash] = answer.seconds
                    elif answer.what == "found":
                        outcome.num_found += 1
                    else:
                        outcome.failures.append(f"{request.name}: {answer.reason}")
                    changed.notify_all()
                if answer is None:
                    return
                if answer.what == "busy":
                    time.sleep(BUSY_S)

        threads = [
            threading.Thread(target=work, args=each, daemon=True)
            for each in enumerate(self._processes)
        ]
        end = time.monotonic() + seconds
        for thread in threads:
            thread.start()
        with changed:
            while any(thread.is_alive() for thread in threads):
                left = len(waiting) + len(given)
                if left == 0 or time.monotonic() > end:
                    break
                show(total - left, total)
                changed.wait(min(0.5, max(0.0, end - time.monotonic())))
            outcome.left = [*given.values(), *waiting]
            show(total - len(outcome.left), total)
            waiting.clear()
            is_over.set()
        self._kill()  # which ends the threads, too
        for thread in threads:
            thread.join()
        return outcome


def _start() -> subprocess.Popen[bytes]:
    cache = knobs.cache.dir
    own = environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1", TRITON_CACHE_DIR=cache)
    return subprocess.Popen(
        [sys.executable, "-P", "-m", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=own,
    )


def _ask(process: subprocess.Popen[bytes], request: Request) -> Answer | None:
    """Send a request to a compiling process, wait, and return the answer; None if it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        pickle.dump(request, process.stdin)
        process.stdin.flush()
        answer = Answer(*pickle.load(process.stdout))
    except (OSError, EOFError, ValueError, pickle.UnpicklingError):
        return None
    return answer
