"""CPU kernels on the threads of torch's own parallel operations."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import warm
from tilewise.kernels.cpu.machine import team

needs_team = pytest.mark.skipif(team._run_team is None, reason="needs the runtime of OpenMP")

RUN_BEFORE_AND_AFTER_A_FORK = """
import os, torch
from tilewise.kernels.cpu.machine import team

def work(seen, counter, num_tasks):
    seen.append(1)

torch.set_num_threads(2)
parent = []
team.run_on_team(work, 2, parent)
assert len(parent) == 2
child = os.fork()
if child == 0:
    seen = []
    team.run_on_team(work, 2, seen)
    os._exit(0 if seen else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def take_tasks(taken: list[tuple[int, int]], counter: np.ndarray, num_tasks: int) -> None:
    while counter[0] < num_tasks:  # the GIL makes one step of it
        counter[0] += 1
        taken.append((threading.get_ident(), int(counter[0])))


@needs_team
def test_every_thread_of_torch_takes_part(two_threads: None) -> None:
    met = threading.Barrier(2, timeout=60)

    def meet(counter: np.ndarray, num_tasks: int) -> None:
        met.wait()

    team.run_on_team(meet, 2)
    assert not met.broken


@pytest.mark.parametrize("num_tasks", [0, 1, 2, 9])
def test_all_tasks_are_taken_once(two_threads: None, num_tasks: int) -> None:
    taken: list[tuple[int, int]] = []
    team.run_on_team(take_tasks, num_tasks, taken)
    assert sorted(task for _, task in taken) == list(range(1, num_tasks + 1))


def test_fewer_tasks_than_threads_leave_the_team_alone(
    two_threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team, "_run_team", pytest.fail)
    taken: list[tuple[int, int]] = []
    team.run_on_team(take_tasks, 1, taken)
    assert len(taken) == 1


def test_an_error_reaches_the_caller(two_threads: None) -> None:
    def fail(counter: np.ndarray, num_tasks: int) -> None:
        raise RuntimeError("from a task")

    with pytest.raises(RuntimeError, match="from a task"):
        team.run_on_team(fail, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_without_the_team() -> None:
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    warm.run([sys.executable, "-c", RUN_BEFORE_AND_AFTER_A_FORK], env=environment, check=True)
