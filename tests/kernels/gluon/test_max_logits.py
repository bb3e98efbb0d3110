"""The largest logit of each row by Hopper's forward kernel, emulated, and mistakes in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, HALF, Call, Problem, make_problem
from tests.kernels.gluon.mutations import Mutation
from tests.kernels.gluon.problem import assert_forward_right, forward_max
from tilewise.reference import standard
from tools.gluon_emulator import Program

CALLS = {
    "full": Call(150, 256, dtype=BRAIN),
    "tail": Call(130, 77, dtype=HALF),
    "causal": Call(200, 200, dtype=BRAIN, window=CAUSAL, heads=(4, 2)),
    "rows_without_keys": Call(200, 70, dtype=BRAIN, window=CAUSAL, sinks=True),
    "window": Call(200, 460, dims=(128, 128), dtype=BRAIN, window=(130, 3)),
    "capped": Call(140, 300, softcap=3.0, scale=0.5, window=CAUSAL, dtype=BRAIN),
    "capped_exactly": Call(140, 300, softcap=3.0, scale=0.5, window=CAUSAL, dtype=HALF),
    "alibi": Call(70, 200, alibi="heads", window=CAUSAL, dtype=BRAIN),
    "alibi_both_sides": Call(70, 200, alibi="heads", dtype=BRAIN),
    "bias": Call(150, 190, bias=(2, 150, 190), dtype=BRAIN),
    "sinks": Call(100, 150, sinks=True, dtype=BRAIN),
    "mask": Call(200, 300, mask=(1, 2), mask_tile=(128, 128), dtype=BRAIN),
    "lengths": Call(130, 140, batch=3, seqlens_k=(0, 1, 140), window=CAUSAL, dtype=BRAIN),
    "packed": Call(lengths=((130, 130), (0, 50), (40, 150), (7, 0)), window=CAUSAL, dtype=BRAIN),
    "wide": Call(150, 200, (1, 1), (256, 256), 1, BRAIN, CAUSAL),
    "negative_scale": Call(100, 150, scale=-0.2, dtype=BRAIN),
}


def problem_of(name: str) -> Problem:
    torch.manual_seed(7)
    problem = make_problem(CALLS[name], "cpu")
    if problem.sinks is not None:
        problem.sinks = torch.full_like(problem.sinks, 20.0)  # above every logit
    return problem


def truth(problem: Problem) -> Tensor:
    p = problem
    rule = {
        "window": p.call.window, "softmax_scale": p.spec.softmax_scale, "softcap": p.call.softcap,
        "bias": p.bias, "alibi_slopes": p.alibi_slopes, "sinks": p.sinks, "mask": p.visible,
        "return_max": True,
    }  # fmt: skip
    q, k, v = (x.double() for x in (p.q, p.k, p.v))
    if p.call.lengths is None:
        return standard.attention(q, k, v, seqlens_k=p.seqlens_k, **rule)[2]
    lengths = {"cu_seqlens_q": p.cu_seqlens_q, "cu_seqlens_k": p.cu_seqlens_k}
    return standard.attention_varlen(q, k, v, **lengths, **rule)[2]


def judge(name: str, program: Program | None = None) -> None:
    problem = problem_of(name)
    results = forward_max(problem) if program is None else forward_max(problem, program=program)
    found, wanted = results.pop("max"), truth(problem)
    assert found.dtype == torch.float32
    # A capped logit of bfloat16 inputs has the 11 bits of the special function unit's tanh.
    rtol = 2e-3 if name == "capped" else 1e-5
    torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=1e-5)
    assert_forward_right(problem, results)


@pytest.mark.parametrize("name", CALLS)
def test_is_that_of_float64(name: str) -> None:
    judge(name)


_STORE = "forward/epilogue:store_rows"
MISTAKES = {
    "in_base_2": Mutation(_STORE, "most = m * LN2", "most = m", "full"),
    "without_its_factor": Mutation(_STORE, "most = most * factor", "most = most", "full"),
    "with_the_sink": Mutation(_STORE, "most = m * LN2", "most = lse", "sinks"),
    "of_the_row_after": Mutation(
        _STORE, "gl.store(output.maxima + (at + rows.first_q) + row, most",
        "gl.store(output.maxima + (at + rows.first_q) + (row ^ 1), most", "full",
    ),
    "past_the_end_of_a_sequence": Mutation(
        _STORE, "most, mask=row < rows.length_q", "most, mask=row < rows.length_q + 1", "packed"
    ),
    "of_hidden_keys": Mutation(
        "forward/step:probabilities", 's = hide(s, head, block.first_key, False, True)', "pass",
        "causal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name: str) -> None:
    with pytest.raises(AssertionError):
        judge(MISTAKES[name].call, MISTAKES[name].program())
