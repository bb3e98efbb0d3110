"""Triton's gradients of the recurrences: those of the reference within the budget."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from tests.ops.recurrent.problem import CASES, Case, Problem
from tilewise import ops
from tilewise.testing import assert_within_budget

pytest.importorskip("triton")
from tilewise.kernels.triton.recurrent import backward

on_each_place = pytest.mark.parametrize(
    "place", [pytest.param("cpu", id="interpreted"), pytest.param("cuda", marks=pytest.mark.gpu)]
)
SOME = [case for case in CASES if not case.by_channel]
_BF16_TOO = ("grouped_heads", "packed", "mamba", "strong_decay", "wide_heads", "mamba_wide")
KINDS = [
    pytest.param(case, dtype, id=f"{case}-{dtype}".replace("torch.", ""))
    for case in SOME
    for dtype in (torch.float32, torch.bfloat16)
    if dtype == torch.float32 or case.name in _BF16_TOO
]


def _truth(problem: Problem, of: torch.dtype, do: Tensor, dstate: Tensor | None):
    rows = [x.detach().to(of).cpu().requires_grad_() for x in problem.rows]
    state = problem.state
    state = None if state is None else state.detach().to(of).cpu().requires_grad_()
    copy = dataclasses.replace(problem, rows=tuple(rows), state=state)
    o, after = copy.solve(of)
    loss = (o * do.cpu().to(of)).sum()
    if dstate is not None:
        loss = loss + (after * dstate.cpu().to(of)).sum()
    leaves = [*rows, *([] if state is None else [state])]
    loss = loss + sum(0 * x.sum() for x in leaves)  # there may be no token
    return torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)


def _ours(problem: Problem, do: Tensor, dstate: Tensor | None) -> tuple[Tensor, ...]:
    return backward.gradient(
        do, *problem.rows, problem.state, dstate, problem.edges, q_scale=0.5,
        is_delta=problem.case.is_delta,
    )  # fmt: skip


@on_each_place
@pytest.mark.parametrize(("case", "dtype"), KINDS)
def test_gradients_keep_the_budget(case: Case, dtype: torch.dtype, place: str) -> None:
    problem = Problem.draw(case, dtype, place)
    do = torch.randn_like(problem.rows[2])
    shape = (len(case.lengths), case.heads[1], *case.heads[2:])
    dstate = torch.randn(shape, device=place) if case.has_state else None
    ours = _ours(problem, do, dstate)
    truth = _truth(problem, torch.float64, do, dstate)
    eager = _truth(problem, torch.float32, do, dstate)
    given = [problem.rows[2], *([] if problem.state is None else [problem.state])]
    biggest = max([1.0, *(float(x.abs().max()) for x in given if x.numel())])
    scale = 20 * (4 * biggest * max(1.0, case.strength)) ** 2
    names = ("q", "k", "v", "g", "beta", "state")
    for name, got, want, plain in zip(names, ours, truth, eager, strict=False):
        assert got.dtype == (dtype if name in "qkv" else torch.float32)
        # Tokens of 16 bits are multiplied with what is rounded to theirs.
        got, plain = (x.to(dtype) for x in (got, plain))
        assert_within_budget(got, want, plain, name=f"d{name}", scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True])
def test_a_call_that_names_no_backend_has_the_gradients_of_the_kernels(packed: bool) -> None:
    case = Case("called", lengths=(70, 70), heads=(1, 2, 64, 64))
    problem = Problem.draw(case, torch.bfloat16, "cuda")
    leaves = [x.clone().requires_grad_() for x in (*problem.rows, problem.state)]
    rows = leaves[:5] if packed else [x.unflatten(0, (2, 70)) for x in leaves[:5]]
    edges = problem.edges if packed else None
    found = ops.gated_delta(
        *rows, initial_state=leaves[5], cu_seqlens=edges, q_scale=0.5, return_state=True
    )
    given = tuple(torch.randn_like(x) for x in found)
    ours = torch.autograd.grad(found, leaves, given)
    wanted = _ours(problem, given[0].view(problem.rows[2].shape), given[1])
    for name, x, y in zip(("q", "k", "v", "g", "beta", "state"), ours, wanted, strict=True):
        assert torch.equal(x, y), name
