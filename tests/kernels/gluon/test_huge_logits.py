"""Logits beyond 2^24 on Hopper: rows are the values of their largest keys."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    HALF,
    Call,
    Problem,
    everyday,
    make_problem,
)
from tests.kernels.gluon.mutations import Mutation
from tests.kernels.gluon.problem import backward, forward
from tools.gluon_emulator import Program

# A call, the size of q and k, and that of the slopes of ALiBi
CALLS = {
    "causal": (Call(70, 260, window=CAUSAL), 3e5, 1.0),
    "one_key": (Call(70, 1), 3e5, 1.0),
    "bias": (Call(70, 140, bias=(1, 1, 70, 140)), 1e4, 1.0),
    "slanted": (Call(70, 260, window=CAUSAL, alibi="heads"), 3e5, 1.0),
    "steep": (Call(70, 260, window=CAUSAL, alibi="heads"), 1e2, 1e9),
    "slanted_and_steep": (Call(200, 200, window=CAUSAL, alibi="heads"), 1e6, 1e9),
    "alibi_on_both_sides": (Call(70, 140, alibi="heads"), 3e5, 1e7),
}
DTYPES = [BRAIN, HALF]


def problem_of(name: str, dtype: torch.dtype) -> Problem:
    torch.manual_seed(7)
    call, size, slope = CALLS[name]
    size = min(size, 1e4) if dtype == HALF else size
    problem = make_problem(replace(call, dtype=dtype), "cpu")
    problem.q *= size
    problem.k *= size
    if problem.alibi_slopes is not None:
        problem.alibi_slopes *= slope
    problem.dlse.zero_()
    return problem


def logits_of(p: Problem) -> Tensor:
    """Return the logits in float64, -inf where a row does not see a key."""
    k = p.k.double().repeat_interleave(p.spec.group_size, 2)
    s = torch.einsum("bihd,bjhd->bhij", p.q.double(), k) * p.spec.softmax_scale
    if p.bias is not None:
        s = s + p.bias.double()
    rows, keys = s.shape[-2:]
    distance = torch.arange(rows)[:, None] + (keys - rows) - torch.arange(keys)
    if p.alibi_slopes is not None:
        s = s - p.alibi_slopes.double()[:, None, None] * distance.abs()
    return s.masked_fill(distance < 0, -torch.inf) if p.call.window == CAUSAL else s


def judge(problem: Problem, program: Program | None = None) -> None:
    results = forward(problem) if program is None else forward(problem, program=program)
    s = logits_of(problem)
    v = problem.v.double().repeat_interleave(problem.spec.group_size, 2)
    right = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)
    torch.testing.assert_close(results["o"].double(), right, rtol=1e-2, atol=1e-2)
    # Slopes add to a key near the row what they take from it again.
    steepest = 0.0 if problem.alibi_slopes is None else float(problem.alibi_slopes.max())
    atol = 1.0 + steepest * 256 * 2.0**-23
    torch.testing.assert_close(results["lse"].double(), s.logsumexp(-1), rtol=1e-5, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", everyday(CALLS, ["causal", "bias", "slanted_and_steep"]))
def test_o_is_the_value_of_the_largest_key(name: str, dtype: torch.dtype) -> None:
    judge(problem_of(name, dtype))


def test_rows_with_an_lse_beyond_2_24_pass_no_gradient() -> None:
    """Not even to v; those of other rows are as if such rows were not there."""
    problem = problem_of("causal", BRAIN)
    problem.q /= 3e5
    problem.k /= 3e5
    problem.q[:, ::3] *= 1e9
    is_far = logits_of(problem).logsumexp(-1).abs() > 2.0**24  # (B, Hq, Sq)
    assert 0.3 < is_far.double().mean() < 0.4
    results = forward(problem)
    gradients = backward(problem, results["o"], results["lse"])
    doubles = [x.double().requires_grad_() for x in (problem.q, problem.k, problem.v)]
    seen = replace(problem, q=doubles[0], k=doubles[1], v=doubles[2])
    p = logits_of(seen).softmax(-1)
    do = problem.do.double() * ~is_far.transpose(1, 2)[..., None]
    right = torch.autograd.grad(torch.einsum("bhij,bjhd->bihd", p, doubles[2]), doubles, do)
    for name, expected in zip(("dq", "dk", "dv"), right, strict=True):
        found = gradients[name].double()
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, msg=name)
    assert not bool(gradients["dq"].transpose(1, 2)[is_far].any())


MISTAKES = (
    Mutation(
        "forward/softmax:fold", "gl.where(is_far, nearest_power_of_two(factor_log2), factor)",
        "gl.where(is_far, factor, factor)", "causal",
    ),
    Mutation(
        "forward/softmax:_slanted", "most + added - m, added)",
        "added, added)", "slanted_and_steep",
    ),
)  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.place)
def test_a_shift_that_rounds_is_seen(mistake: Mutation) -> None:
    with pytest.raises(AssertionError):
        judge(problem_of(mistake.call, BRAIN), mistake.program())
