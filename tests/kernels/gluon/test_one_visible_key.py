"""Rows that see one key on Hopper: o is its value, and no gradient moves q or k."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, HALF, Call, Problem, make_problem
from tests.kernels.gluon.mutations import Mutation
from tests.kernels.gluon.problem import assert_forward_right, backward, forward
from tools.gluon_emulator import Program

CALLS = {
    "two_queries_one_key": Call(2, 1, window=CAUSAL),
    "one_key": Call(90, 1),
    "the_own_key": Call(150, 150, heads=(4, 2), window=(0, 0)),
    "the_own_key_of_wide_heads": Call(150, 150, (1, 1), (256, 256), window=(0, 0)),
    "causal": Call(130, 130, window=CAUSAL),
    "left_edge": Call(100, 227, window=(0, 0)),  # the first row sees the last key of a block
    "key_lengths": Call(70, 200, batch=3, seqlens_k=(1, 200, 129), window=CAUSAL),
    "packed": Call(lengths=((5, 1), (140, 140), (7, 200)), window=(0, 0)),
    "mask": Call(150, 300, mask=(1, 2), mask_tile=(128, 128), window=(0, 0)),
    "sinks_of_no_weight": Call(90, 90, sinks=True, window=(0, 0)),
}


def problem_of(name: str, softcap: float, dtype: torch.dtype) -> Problem:
    torch.manual_seed(3)
    call = CALLS[name]
    scale = 4.0 * call.dims[0] ** -0.5  # the cap is felt
    problem = make_problem(
        Call(**{**call.__dict__, "softcap": softcap, "dtype": dtype, "scale": scale}), "cpu"
    )
    if problem.sinks is not None:
        problem.sinks = torch.full_like(problem.sinks, -float("inf"))
    problem.dlse.zero_()
    return problem


def visible_pairs(problem: Problem) -> Tensor:
    """Return which key each query sees, bool (B, Hq, Sq, Sk), by the rule of `reference`."""
    from tilewise.reference import standard

    p = problem
    seen = standard.visible_keys(p.q, p.k, window=p.call.window, seqlens_k=p.seqlens_k)
    seen = seen.expand(p.spec.batch, p.spec.num_q_heads, *seen.shape[-2:])
    return seen if p.visible is None else seen & p.visible


def judge(problem: Problem, program: Program | None = None) -> int:
    """Hold o of rows with one key to its value, bit for bit; return how many rows that are."""
    results = forward(problem) if program is None else forward(problem, program=program)
    p, group, count = problem, problem.spec.group_size, 0
    if p.call.lengths is not None:
        first_q, first_k = p.cu_seqlens_q.tolist(), p.cu_seqlens_k.tolist()
        for b, (queries, keys) in enumerate(p.call.lengths):
            for row in range(queries):
                key = row + keys - queries
                if 0 <= key < keys:
                    want = p.v[first_k[b] + key].repeat_interleave(group, 0)
                    assert torch.equal(results["o"][first_q[b] + row], want), (b, row)
                    count += 1
        return count
    seen = visible_pairs(p)
    for b, h, row in (seen.sum(-1) == 1).nonzero().tolist():
        key = int(seen[b, h, row].nonzero())
        assert torch.equal(results["o"][b, row, h], p.v[b, key, h // group]), (b, h, row)
        count += 1
    return count


@pytest.mark.parametrize(
    ("softcap", "dtype"),
    [
        (15.0, BRAIN), pytest.param(30.0, BRAIN, marks=pytest.mark.slow), (50.0, BRAIN),
        (15.0, HALF), (0.0, BRAIN),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", CALLS)
def test_o_is_the_value(name: str, softcap: float, dtype: torch.dtype) -> None:
    assert judge(problem_of(name, softcap, dtype)) > 0


@pytest.mark.parametrize("softcap", [0.0, 15.0, 50.0])
@pytest.mark.parametrize("name", ["two_queries_one_key", "the_own_key_of_wide_heads", "packed"])
def test_queries_and_keys_have_no_gradient(name: str, softcap: float) -> None:
    """All that is left of dp - delta is how their sums were rounded."""
    problem = problem_of(name, softcap, BRAIN)
    gradients = backward(problem, **forward(problem))
    p = problem
    ds = float(p.do.float().norm(dim=-1).max() * p.v.float().norm(dim=-1).max())
    bound = 1e-6 * p.spec.softmax_scale * ds
    if name == "packed":  # of the last sequence, whose rows see one key each
        gradients = {name: x[-7:] for name, x in gradients.items()}
    assert gradients["dq"].abs().max() <= bound * float(p.k.abs().max())
    assert gradients["dk"].abs().max() <= bound * float(p.q.abs().max())
    if name == "two_queries_one_key":
        assert torch.equal(gradients["dv"][:, 0], p.do[:, 1])
    elif name == "the_own_key_of_wide_heads":
        assert torch.equal(gradients["dv"], p.do)


MANY = {
    "block_at_the_diagonal": Call(128, 255, window=CAUSAL),
    "rows_without_keys": Call(200, 70, window=CAUSAL, sinks=True),
    "narrow_window": Call(200, 300, window=(20, 3)),
    "wide_window": Call(200, 500, window=(300, 0)),
    "mask": Call(200, 520, mask=(1, 2), mask_tile=(128, 128)),
    "mask_and_window": Call(200, 520, mask=(1, 1), mask_tile=(128, 64), window=(300, 20)),
    "lengths": Call(130, 300, batch=4, seqlens_k=(0, 1, 256, 300), window=CAUSAL),
    "packed": Call(lengths=((130, 300), (60, 5), (0, 9), (200, 200)), window=CAUSAL),
    "wide": Call(150, 280, (1, 1), (256, 256), window=CAUSAL),
    "whole": Call(70, 256),
}


def capped(name: str) -> Problem:
    torch.manual_seed(5)
    call = Call(**{**MANY[name].__dict__, "softcap": 32.0, "dtype": BRAIN, "scale": 2.0})
    return make_problem(call, "cpu")


@pytest.mark.parametrize("name", MANY)
def test_any_logit_may_stand_for_the_maximum(name: str) -> None:
    """Logits of up to 32 in size lie above and below that of the first block of a row."""
    problem = capped(name)
    assert_forward_right(problem, forward(problem))


def compare(problem: Problem, program: Program) -> None:
    assert_forward_right(problem, forward(problem, program=program))


_FOLD, _ATTEND = "forward/softmax:fold", "forward/warpgroup:_attend"
MISTAKES = {
    "the_cap_is_the_maximum_of_every_row": Mutation(
        _ATTEND, 'START: gl.constexpr = 1.0 if WHOLE else float("-inf")',
        "START: gl.constexpr = 1.0", "the_own_key",
    ),
    "the_maximum_of_every_block_of_an_edge": Mutation(
        _FOLD, 'm_new = gl.where(m == float("-inf"), most, m)', "m_new = most", "wide_window"
    ),
    "rows_without_a_maximum_meet_whole_blocks": Mutation(
        _ATTEND, "state = _with_maxima(state, free_begin < walk.free_end)", "pass",
        "block_at_the_diagonal",
    ),
    "every_row_has_a_maximum_before_no_whole_block": Mutation(
        _ATTEND, "_with_maxima(state, free_begin < walk.free_end)", "_with_maxima(state, True)",
        "left_edge",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name: str) -> None:
    mistake = MISTAKES[name]
    program = mistake.program()
    if mistake.call in CALLS:
        problem, run = problem_of(mistake.call, 15.0, BRAIN), judge
    else:
        problem, run = capped(mistake.call), compare
    with pytest.raises(AssertionError):
        run(problem, program)
