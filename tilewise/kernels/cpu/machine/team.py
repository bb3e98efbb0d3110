"""Run a long kernel on the threads of torch's own OpenMP team.

Threads of OpenMP spin for some milliseconds after a parallel operation of torch, in case another
one follows. If torch's threads occupy all cores, our own threads get none meanwhile: a backward
pass of 10 ms waited 3 ms for its second thread. A kernel that runs on torch's team starts at once.

GOMP_parallel is the function that compiled OpenMP code calls in GCC's runtime, and Intel's and
LLVM's offer it too. If it is not found, or in a forked child, whose team is gone, kernels run on
our own threads (`run_tasks`).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tilewise.kernels.cpu.machine.threads import run_tasks

_Member = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _find_team() -> Any:
    """Return the function GOMP_parallel of the OpenMP runtime that torch has loaded, or None where
    there is none."""
    if not torch.backends.openmp.is_available() or os.name != "posix":
        return None
    return getattr(ctypes.CDLL(None), "GOMP_parallel", None)


_run_team = _find_team()


def _leave_team() -> None:
    global _run_team
    _run_team = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_team)


def run_on_team(function: Callable[..., None], num_tasks: int, *args: Any) -> None:
    """Run a kernel as `run_tasks` does, but on torch's own OpenMP threads: for kernels of
    milliseconds with at least one task for each thread.

    With one thread, with fewer tasks than threads, without GOMP_parallel or in a forked child it is
    `run_tasks`: a team smaller than torch's would end the threads that it does not need. The first
    error of any thread is raised.
    """
    threads = torch.get_num_threads()
    if _run_team is None or threads == 1 or num_tasks < threads:
        run_tasks(function, num_tasks, *args)
        return
    counter = np.zeros(1, np.int64)
    errors: list[BaseException] = []

    def take_part(_: int | None) -> None:
        try:
            function(*args, counter, num_tasks)
        except BaseException as error:
            errors.append(error)

    _run_team(_Member(take_part), None, threads, 0)
    if errors:
        raise errors[0]
