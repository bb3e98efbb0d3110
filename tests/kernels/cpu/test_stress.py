"""CPU kernels on torch's team and on helpers, again and again on changing numbers of threads.

Each task must be done once, by whoever comes first, and a call must give the same bits whatever
the number of threads, whoever comes late and whatever torch does in between. Seconds every day;
minutes in the slow form.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.kernels.cpu import test_attention as test_cpu_attention
from tests.kernels.cpu import test_mla as test_cpu_mla
from tests.kernels.cpu import test_paged as test_cpu_paged
from tests.kernels.kernel_stress import Prepared, stress
from tilewise.kernels.cpu.machine import team, threads

SECONDS, SECONDS_SLOW = 1.0, 40.0
THREADS = (1, 2, 3, 5)


@threads.kernel
def mark_tasks(done, work, counter, num_tasks):
    """Add 1 to done[task] for every task taken, after some work that differs from task to task."""
    while True:
        task = threads.next_task(counter)
        if task >= num_tasks:
            break
        total = 0.0
        for step in range(work[task]):
            total += np.sqrt(1.0 + step)
        done[task] += 1 if total >= 0.0 else 2


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def attention() -> Prepared:
    case = test_cpu_attention.Case(2, 130, 170, (4, 2), seqlens_k=(170, 33), sinks=True)
    qkv, extra = test_cpu_attention.inputs_of(case, torch.bfloat16)
    do, dlse = test_cpu_attention.cotangents(qkv)
    spec = test_cpu_attention.spec_of(qkv, {"causal": True}, extra)
    # A sink's gradient is summed by whoever has the rows.
    return Prepared(
        lambda: test_cpu_attention.by_kernel(qkv, do, dlse, spec, extra), frozenset({"dsinks"})
    )


def by_pair(run: Callable[[], tuple[Tensor, Tensor]]) -> Prepared:
    return Prepared(lambda: dict(zip(("o", "lse"), run(), strict=True)))


def paged() -> Prepared:
    case = test_cpu_paged.Case(rows=(1, 33, 1, 2), lengths=(900, 90, 1, 300))
    return by_pair(test_cpu_paged.Call.of(case, torch.bfloat16).run)


def latents() -> Prepared:
    case = test_cpu_mla.CASES["many splits"]
    return by_pair(test_cpu_mla.Call.of(case, torch.bfloat16).run)


CASES = {"attention": attention, "paged": paged, "latents": latents}


def mixed_up(prepared: Prepared, seed: int) -> Prepared:
    """Change the number of threads, let torch compute and helpers come late between runs."""
    draw = random.Random(seed)
    matrix = torch.randn(150, 150)

    def run() -> dict[str, Tensor]:
        torch.set_num_threads(draw.choice(THREADS))
        if draw.random() < 0.5:
            matrix @ matrix  # the team is then awake
        if draw.random() < 0.1:
            time.sleep(0.002)  # and then asleep
        return prepared.run()

    return Prepared(run, prepared.rounded)


def every_task_once(seconds: float, run: Callable[..., None], seed: int) -> int:
    """Return how often `run` did all of its tasks, each once."""
    draw = random.Random(seed)
    end, runs = time.perf_counter() + seconds, 0
    while runs == 0 or time.perf_counter() < end:
        torch.set_num_threads(draw.choice(THREADS))
        count = draw.choice((0, 1, 2, 3, 7, 64, 500))
        done = np.zeros(count, np.int64)
        work = np.array([draw.choice((0, 10, 3000)) for _ in range(count)], np.int64)
        run(mark_tasks, count, done, work)
        assert (done == 1).all(), (count, torch.get_num_threads(), done)
        runs += 1
    return runs


@pytest.mark.parametrize("run", [team.run_on_team, threads.run_tasks])
def test_every_task_is_done_once(run: Callable[..., None]) -> None:
    assert every_task_once(SECONDS, run, seed=1) > 10


@pytest.mark.parametrize("name", CASES)
def test_bits_stay_the_same(name: str) -> None:
    found = stress(name, mixed_up(CASES[name](), seed=2), SECONDS)
    assert found.differing == 0, found
    assert found.runs > 3


@pytest.mark.slow
@pytest.mark.parametrize("run", [team.run_on_team, threads.run_tasks])
def test_every_task_is_done_once_however_often(run: Callable[..., None]) -> None:
    assert every_task_once(SECONDS_SLOW, run, seed=3) > 1000


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bits_stay_the_same_however_often(name: str) -> None:
    found = stress(name, mixed_up(CASES[name](), seed=4), SECONDS_SLOW)
    assert found.differing == 0, found


@pytest.mark.slow
def test_bits_stay_the_same_beside_other_callers() -> None:
    """Several Python threads call at a time, each kernel on its own inputs."""
    torch.set_num_threads(2)
    reports: list[object] = []

    def work(name: str) -> None:
        try:
            reports.append(stress(name, CASES[name](), SECONDS_SLOW))
        except BaseException as error:
            reports.append(error)

    callers = [threading.Thread(target=work, args=(name,)) for name in CASES]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(reports) == len(CASES)
    assert all(getattr(report, "differing", 1) == 0 for report in reports), reports
