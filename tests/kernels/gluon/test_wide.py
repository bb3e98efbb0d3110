"""Hopper's forward pass of heads of more than 256 channels: emulated, and on a GPU."""

from __future__ import annotations

import math
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, HALF, Call, Problem, make_problem
from tests.kernels.gluon.problem import IDEMPOTENT, assert_forward_right
from tests.kernels.planned import tensors_of
from tilewise import ops
from tilewise.kernels import device
from tilewise.kernels import plan as plans
from tilewise.kernels.gluon.attention import plan as hopper
from tilewise.kernels.gluon.wide import plan as wide
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.spec import AttentionSpec
from tools.gluon_emulator import emulated

D512 = (512, 512)
CASES = {
    "one_block": Call(64, 64, (1, 1), D512, 1, BRAIN),
    "two_blocks": Call(64, 128, (1, 1), D512, 1, BRAIN),
    "no_tile_whole": Call(130, 333, (2, 1), D512, 1, BRAIN),
    "causal": Call(200, 330, (2, 2), D512, 1, BRAIN, CAUSAL),
    "causal_fewer_keys_leaves_empty_rows": Call(200, 70, (1, 1), D512, 1, HALF, CAUSAL),
    "window": Call(150, 400, (1, 1), D512, 1, BRAIN, (70, 0)),
    "window_on_both_sides": Call(150, 300, (1, 1), D512, 1, BRAIN, (40, 17)),
    "window_to_the_left_only": Call(80, 300, (1, 1), D512, 1, BRAIN, (100, -1)),
    "narrower_heads": Call(100, 200, (2, 1), (320, 264), 2, HALF, CAUSAL),
    "sinks": Call(100, 90, (2, 2), (264, 512), 1, BRAIN, CAUSAL, sinks=True),
    "one_key": Call(90, 1, (1, 1), D512, 1, BRAIN),
}


def grown(call: Call) -> Call:
    """Return a case at a size that fills a GPU."""
    left, right = call.window
    return replace(
        call, seqlen_q=8 * call.seqlen_q, seqlen_k=8 * call.seqlen_k if call.seqlen_k > 1 else 1,
        heads=(8 * call.heads[0], 8 * call.heads[1]),
        window=(8 * left if left > 0 else left, 8 * right if right > 0 else right),
    )  # fmt: skip


def launched(p: Problem) -> dict[str, Tensor]:
    """Run the kernel alone."""
    tensors = tensors_of(p.q, p.k, p.v, **p.tensors)
    maker = Maker(plans.Call.of(p.spec, tensors))
    o, lse = maker.finish(wide.add_fwd(maker, p.spec, maker.tensors)).run(*tensors)
    return {"o": o, "lse": lse}


def forward(problem: Problem, seed: int = 0) -> dict[str, Tensor]:
    """Run the kernel in the emulator; a seed is a schedule."""
    with (
        mock.patch.object(device, "sm_count_of", return_value=4),
        emulated(seed, resident=4, idempotent=IDEMPOTENT) as kernels,
    ):
        results = launched(problem)
    assert kernels
    return results


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64(name: str) -> None:
    problem = make_problem(CASES[name], "cpu")
    for seed in range(2):
        assert_forward_right(problem, forward(problem, seed))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["causal", "window"])
def test_agrees_with_float64_in_many_schedules(name: str) -> None:
    problem = make_problem(CASES[name], "cpu")
    first = forward(problem)
    for seed in range(2, 30):
        results = forward(problem, seed)
        assert all(torch.equal(results[part], first[part]) for part in results)


@pytest.mark.parametrize(
    ("window", "key", "rows"), [(CAUSAL, 100, slice(0, 64)), ((40, 0), 40, slice(64, 100))]
)
def test_keys_that_no_row_of_a_tile_sees_may_be_nan(
    window: tuple[int, int], key: int, rows: slice
) -> None:
    problem = make_problem(Call(100, 130, (1, 1), D512, 1, BRAIN, window), "cpu")
    want = forward(problem)["o"]
    problem.k[:, key] = problem.v[:, key] = math.nan
    o = forward(problem)["o"]
    assert torch.equal(o[:, rows], want[:, rows])
    assert bool(o.isnan().any())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_float64_on_a_gpu(name: str) -> None:
    problem = make_problem(grown(CASES[name]), "cuda")
    assert_forward_right(problem, launched(problem))


@pytest.mark.gpu
def test_repeats_are_bitwise_equal_on_a_gpu() -> None:
    problem = make_problem(Call(2000, 2100, (16, 4), D512, 2, BRAIN, CAUSAL), "cuda")
    first = launched(problem)
    for _ in range(200):
        assert all(torch.equal(x, first[name]) for name, x in launched(problem).items())


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, (700, 0)])
def test_gradients_are_those_of_the_portable_kernels_on_a_gpu(window: tuple[int, int]) -> None:
    shape = {"q": (2, 1000, 8, 512), "k": (2, 1000, 2, 512), "v": (2, 1000, 2, 512)}
    leaves = [
        torch.randn(s, device="cuda", dtype=BRAIN).div_(4).requires_grad_() for s in shape.values()
    ]
    found = []
    for backend in ("gluon", "triton"):
        o = ops.attention(*leaves, causal=window is None, window=window, backend=backend)
        found.append((o, *torch.autograd.grad(o.float().square().sum(), leaves)))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(
            mine, other, rtol=2e-2, atol=2e-2 * float(other.detach().abs().max())
        )


SPEC = AttentionSpec("cuda", BRAIN, 2, 4096, 4096, 16, 2, 512, 512, softmax_scale=0.1)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": torch.float32}, "dtype must be float16 or bfloat16"),
        ({"v_head_dim": 128}, "v_head_dim must be a multiple of 8 from 264 to 512"),
        ({"head_dim": 576}, "head_dim must be a multiple of 8 from 264 to 512"),
        ({"max_seqlen_q": 8}, "at least 64 queries, got 8"),
        ({"softmax_scale": 0.0}, "softmax_scale must be positive"),
        ({"is_varlen": True}, "packed sequences must be left out"),
        ({"has_seqlens_k": True}, "seqlens_k must be left out"),
        ({"softcap": 30.0}, "softcap must be left out"),
        ({"dropout_p": 0.1}, "dropout must be left out"),
        ({"needs_max": True}, "return_max_logits must be left out"),
    ],
)
def test_refusals_say_why(changes: dict[str, object], reason: str) -> None:
    assert wide.why_not(SPEC) is None
    spec = SPEC._replace(**changes)
    assert reason in (wide.why_not(spec) or "")
    with mock.patch.object(device, "why_not_gpu", return_value=None):
        assert reason in (hopper._why_not(spec) or "")
