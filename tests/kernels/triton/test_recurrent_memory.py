"""Kernels of recurrences use nothing outside of their tensors."""

from __future__ import annotations

import pytest
import torch

from tests.ops.recurrent.problem import Case, Problem

pytest.importorskip("triton")
from tests.kernels.guarded import watched
from tilewise.kernels.triton.recurrent import backward


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"heads": (1, 2, 24, 40)},
        {"is_delta": False},
        {"by_channel": True, "heads": (1, 1, 24, 40)},
    ],
    ids=str,
)
def test_nothing_outside_is_used(kind, monkeypatch):
    case = Case("watched", lengths=(5, 0, 130, 64), has_state=False, **kind)
    problem = Problem.draw(case, torch.bfloat16)
    with watched(monkeypatch):
        problem.run("triton")
        states = problem.slots(4, "tokens")
        slots = [3, 0, 1, 2]
        problem.step([(0, 0, 5), (2, 0, 60)], states, slots, "triton")
        problem.step([(2, 60, 61), (3, 0, 1)], states, slots, "triton")
        problem.step([(1, 0, 0), (3, 1, 1), (2, 61, 64)], states, slots, "triton")
        problem.step([(2, 64, 128), (3, 1, 63)], states, slots, "triton")
        problem.step([(3, 63, 64), (2, 128, 129)], states, [3, 0, 1, -1], "triton")
        if not case.by_channel:
            do = torch.randn_like(problem.rows[2])
            backward.gradient(
                do, *problem.rows, None, None, problem.edges, q_scale=0.5, is_delta=case.is_delta
            )
