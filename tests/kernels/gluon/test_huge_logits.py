"""Logits beyond 2^24 on Hopper: rows are the values of their largest keys."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, HALF, Call, Problem, make_problem
from tests.kernels.gluon.mutations import Mutation
from tests.kernels.gluon.problem import backward, forward
from tools.gluon_emulator import Program

CALLS = {
    "causal": (Call(70, 260, window=CAUSAL), 3e5),
    "one_key": (Call(70, 1), 3e5),
    "bias": (Call(70, 140, bias=(1, 1, 70, 140)), 1e4),
}


def problem_of(name: str, dtype: torch.dtype) -> Problem:
    torch.manual_seed(7)
    call, size = CALLS[name]
    size = min(size, 1e4) if dtype == HALF else size
    problem = make_problem(Call(**{**call.__dict__, "dtype": dtype}), "cpu")
    problem.q *= size
    problem.k *= size
    problem.dlse.zero_()
    return problem


def judge(problem: Problem, program: Program | None = None) -> None:
    results = forward(problem) if program is None else forward(problem, program=program)
    p = problem
    group = p.spec.group_size
    k, v = (x.double().repeat_interleave(group, 2) for x in (p.k, p.v))
    s = torch.einsum("bihd,bjhd->bhij", p.q.double(), k) * p.spec.softmax_scale
    if p.bias is not None:
        s = s + p.bias.double()
    if p.call.window == CAUSAL:
        later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        s = s.masked_fill(later, -torch.inf)
    right = torch.einsum("bhij,bjhd->bihd", s.softmax(-1), v)
    torch.testing.assert_close(results["o"].double(), right, rtol=1e-2, atol=1e-2)
    torch.testing.assert_close(results["lse"].double(), s.logsumexp(-1), rtol=1e-5, atol=1.0)


@pytest.mark.parametrize("dtype", [BRAIN, HALF], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_o_is_the_value_of_the_largest_key(name: str, dtype: torch.dtype) -> None:
    judge(problem_of(name, dtype))


def test_rows_whose_lse_keeps_no_p_pass_no_gradient() -> None:
    problem = problem_of("causal", BRAIN)
    for name, x in backward(problem, **forward(problem)).items():
        assert x.isfinite().all(), name
        assert (x.abs().amax() == 0) == (name in ("dq", "dk", "dv")), name


def test_a_factor_that_rounds_is_seen() -> None:
    mistake = Mutation(
        "forward/softmax:fold", "gl.where(is_far, _nearest_power_of_two(factor_log2), factor)",
        "gl.where(is_far, factor, factor)", "causal",
    )  # fmt: skip
    with pytest.raises(AssertionError):
        judge(problem_of(mistake.call, BRAIN), mistake.program())
