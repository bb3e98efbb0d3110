"""Hopper's scan of the recurrences: the reference within the budget, whole and in parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.ops.recurrent.problem import Case, Problem
from tilewise.kernels.gluon.recurrent import scan
from tilewise.kernels.spec import RecurrentSpec, RecurrentStates
from tilewise.kernels.triton.recurrent import scan as portable
from tilewise.testing import assert_within_budget
from tools.gluon_emulator import emulated

NARROW, WIDE = (1, 2, 64, 64), (1, 1, 128, 128)
CASES = [
    Case("packed", lengths=(5, 0, 130, 64), heads=NARROW),
    Case("from_zero", lengths=(65,), heads=WIDE, has_state=False),
    Case("mamba", lengths=(3, 70), heads=NARROW, is_delta=False),
    Case("by_channel", lengths=(70, 1), heads=(1, 1, 64, 64), by_channel=True),
]


def _emulated(*arguments: object) -> None:
    """Go through the chunks in the emulator, after pairs of tokens in Triton's interpreter."""
    with emulated(seed=1) as names:
        scan.run(*arguments)
    assert names == ["hopper_scan_kernel"]


def _launch(problem: Problem) -> tuple[Tensor, Tensor]:
    return portable.launch(
        *problem.rows, problem.state, problem.edges, q_scale=0.5,
        is_delta=problem.case.is_delta, run=_emulated,
    )  # fmt: skip


def _scale(problem: Problem) -> float:
    given = [problem.rows[2], *([] if problem.state is None else [problem.state])]
    return 4 * max([1.0, *(float(x.abs().max()) for x in given)])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_sequences_keep_the_budget(case: Case) -> None:
    problem = Problem.draw(case, torch.bfloat16)
    o, states = _launch(problem)
    truth, true_states = problem.solve(torch.float64)
    eager, eager_states = (x.bfloat16() for x in problem.solve(torch.float32))
    scale = _scale(problem)
    assert_within_budget(o, truth, eager, name="o", scale=scale)
    assert_within_budget(states.bfloat16(), true_states, eager_states, name="state", scale=scale)


@pytest.mark.parametrize("kind", [{}, {"is_delta": False}, {"by_channel": True}], ids=str)
def test_parts_of_a_sequence_are_rows_of_the_whole(kind: dict[str, bool]) -> None:
    case = Case("cut", lengths=(140, 70), heads=(1, 1, 64, 64), has_state=False, **kind)
    problem = Problem.draw(case, torch.bfloat16)
    states = problem.slots(3, "tokens")
    whole, _ = _launch(problem)
    found = [
        _step(problem, parts, states)
        for parts in ([(0, 0, 50)], [(0, 50, 100), (1, 0, 64)], [(1, 64, 70), (0, 100, 140)])
    ]
    pieces = torch.cat([found[0], found[1][:50], found[2][6:], found[1][50:], found[2][:6]])
    torch.testing.assert_close(pieces, whole, rtol=0.02, atol=0.002)
    assert bool(states.state[0].isnan().all()), "a slot that nobody named was written"


def _step(problem: Problem, parts: list[tuple[int, int, int]], states: RecurrentStates) -> Tensor:
    ends = problem.edges.tolist()
    taken = torch.cat([torch.arange(ends[n] + a, ends[n] + b) for n, a, b in parts])
    sizes = torch.tensor([0, *(b - a for _, a, b in parts)])
    return portable.step(
        *(x[taken] for x in problem.rows), states,
        torch.tensor([n + 1 for n, _, _ in parts]), torch.tensor([a for _, a, _ in parts]),
        sizes.cumsum(0).int(), q_scale=0.5, is_delta=problem.case.is_delta, run=_emulated,
    )  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [{}, {"is_delta": False}, {"by_channel": True}], ids=str)
@pytest.mark.parametrize("heads", [(2, 4, 128, 128), (1, 2, 64, 128)], ids=str)
def test_bits_are_those_of_the_portable_kernel(
    kind: dict[str, bool], heads: tuple[int, int, int, int]
) -> None:
    """Whole, in parts, and token by token, which only the portable step computes."""
    case = Case("bits", lengths=(5, 0, 130, 64, 200), heads=heads, **kind)
    problem = Problem.draw(case, torch.bfloat16, "cuda")
    options = {"q_scale": 0.5, "is_delta": case.is_delta}
    given = (*problem.rows, problem.state, problem.edges)
    for ours, theirs in zip(
        scan.launch(*given, **options), portable.launch(*given, **options), strict=True
    ):
        assert torch.equal(ours, theirs)
    case = Case("cut", lengths=(200,), heads=heads, has_state=False, **kind)
    problem = Problem.draw(case, torch.bfloat16, "cuda", seed=1)
    whole, _ = problem.run("gluon")
    for sizes in ([64, 64, 72], [50, 1, 1, 76, 40, 32], [1] * 200, [120, *[1] * 80]):
        states, first, parts = problem.slots(1, "tokens"), 0, []
        for size in sizes:
            parts.append(problem.step([(0, first, first + size)], states, [0], "gluon"))
            first += size
        assert torch.equal(torch.cat(parts), whole), sizes


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_sequences_keep_the_budget_on_a_gpu(case: Case) -> None:
    problem = Problem.draw(case, torch.bfloat16, "cuda")
    o, states = problem.run("gluon")
    truth, true_states = problem.solve(torch.float64)
    eager, eager_states = (x.bfloat16() for x in problem.solve(torch.float32))
    scale = _scale(problem)
    assert_within_budget(o, truth, eager, name="o", scale=scale)
    assert_within_budget(states.bfloat16(), true_states, eager_states, name="state", scale=scale)


def test_other_devices_are_refused() -> None:
    spec = RecurrentSpec("cpu", torch.bfloat16, 128, 128, False, None)
    assert "cuda" in str(scan.why_not(spec))
