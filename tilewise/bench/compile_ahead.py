"""Compile for a GPU before measuring, in several processes.

Triton and Inductor keep what they compile in a cache on disk, where the measuring process finds it.
A run compiles a few hundred kernels, seconds each; one after the other they would take longer than
all the measurements.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
import warnings
from collections.abc import Sequence
from dataclasses import replace

from tilewise.bench.case import make_case
from tilewise.bench.passes import compile_passes
from tilewise.bench.peers import OURS, PEERS
from tilewise.bench.problem import Problem
from tilewise.children import spawning


def compile_ahead(
    problems: Sequence[Problem], workers: int, seconds: float, device: str = "cuda"
) -> int:
    """Run every call of the problems that compiles once, in `workers` processes, for at most
    `seconds`, so that the caches on disk have its kernels.

    Returns:
        The number of processes that failed or were killed at the end; the measuring process then
        compiles what is missing.
    """
    jobs = compile_jobs(problems)
    context = multiprocessing.get_context("spawn")  # a forked process cannot use CUDA
    shares = [jobs[start::workers] for start in range(min(workers, len(jobs)))]
    pool = [context.Process(target=_compile_all, args=(share, device)) for share in shares]
    end = time.monotonic() + seconds
    with spawning():
        for process in pool:
            process.start()
    for process in pool:
        process.join(max(0.0, end - time.monotonic()))
    for process in pool:
        if process.is_alive():
            process.kill()
        process.join()
    return sum(process.exitcode != 0 for process in pool)


def compile_jobs(problems: Sequence[Problem]) -> list[Problem]:
    """Return one problem, with one peer, for each set of kernels that the problems need, those of
    FlexAttention, which compiles most slowly, first.

    Our kernels are the same for every N and batch; FlexAttention compiles for one shape.
    """
    jobs: dict[Problem, Problem] = {}
    for problem in problems:
        for peer in problem.peers:
            one = replace(problem, peers=(peer,))
            if peer == "flex":
                jobs[one] = one
            elif peer.startswith(OURS):
                jobs.setdefault(replace(one, table="", batch=0, seqlen=0, lengths=()), one)
    return sorted(jobs.values(), key=lambda problem: problem.peers != ("flex",))


def _compile_all(problems: Sequence[Problem], device: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for problem in problems:
            with contextlib.suppress(Exception):  # it fails again in a row of the report
                case = make_case(problem, device)
                compile_passes(case, PEERS[problem.peers[0]](case))
