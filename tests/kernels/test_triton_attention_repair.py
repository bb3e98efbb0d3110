"""What is not finite reaches the rows and keys that it should, and nothing else.

Only pairs that see one another connect a row to a key. A value that is not finite spoils what
depends on it by such pairs, and all the rest must be what it is without that value.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels import gluon_problem
from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    HALF,
    Call,
    Problem,
    expected,
    make_problem,
)
from tilewise.kernels import device as facts
from tilewise.kernels.triton import attention as portable
from tilewise.kernels.triton import attention_repair
from tilewise.reference import standard
from tilewise.testing import accumulator_scales, assert_within_budget

Marks = dict[str, Tensor]  # which elements of each result are not finite
ON_CPU = pytest.param(
    "cpu",
    "triton",
    marks=pytest.mark.skipif(not facts.interpreting(), reason="the interpreter is off"),
)
PLACES = [ON_CPU] + [
    pytest.param("cuda", name, marks=pytest.mark.gpu) for name in ("triton", "gluon")
]
CASES = {
    "causal": Call(96, 96, (2, 1), (16, 16), 1, BRAIN, window=CAUSAL),
    "window_softcap_sinks": Call(
        100, 120, (1, 1), (16, 16), 1, BRAIN, window=(40, 3), softcap=8.0, sinks=True
    ),
    "block_mask_dropout": Call(
        192, 192, (2, 2), (32, 32), 1, HALF, mask=(1, 2), mask_tile=(128, 128), dropout_p=0.25
    ),
    "block_mask_softcap": Call(
        192, 192, (1, 1), (64, 64), 1, BRAIN, mask=(1, 1), mask_tile=(128, 128), softcap=8.0
    ),
    "bias_alibi_lengths": Call(
        80, 90, (1, 1), (64, 64), 2, HALF, window=CAUSAL, alibi="heads", bias=(1, 1, 80, 90),
        seqlens_k=(90, 75),
    ),
    "wide_and_narrow": Call(70, 70, (1, 1), (192, 96), 1, BRAIN, window=CAUSAL),
    "widest": Call(70, 70, (1, 1), (256, 256), 1, HALF, window=CAUSAL),
}  # fmt: skip
SPOILT = [
    ("causal", "v"), ("causal", "do"), ("window_softcap_sinks", "k"), ("window_softcap_sinks", "q"),
]  # fmt: skip
SPOILT_SLOWLY = [
    ("block_mask_dropout", "v"), ("block_mask_dropout", "do"), ("block_mask_softcap", "k"),
    ("bias_alibi_lengths", "v"), ("bias_alibi_lengths", "q"), ("wide_and_narrow", "do"),
    ("widest", "v"),
]  # fmt: skip


def run(problem: Problem, backend: str, *, repairs: bool = True) -> dict[str, Tensor]:
    """Return o, lse and the gradients, as the op computes them."""
    kernels = portable
    if backend == "gluon":
        kernels = pytest.importorskip("tilewise.kernels.gluon.attention")
        reason = kernels.why_not(problem.spec)
        if reason is not None:
            pytest.skip(reason)
    p, tensors = problem, problem.tensors
    o, lse = kernels.launch_fwd(p.q, p.k, p.v, p.spec, **tensors)
    if repairs:
        attention_repair.repair_fwd(p.q, p.k, p.v, o, lse, p.spec, **tensors)
    gradients = kernels.launch_bwd(p.do, p.dlse, p.q, p.k, p.v, o, lse, p.spec, **tensors)[:3]
    if repairs:
        attention_repair.repair_bwd(
            p.do, p.dlse, p.q, p.k, p.v, o, lse, *gradients, p.spec, **tensors
        )
    return {"o": o, "lse": lse} | dict(zip(("dq", "dk", "dv"), gradients, strict=True))


def spoilt(problem: Problem, name: str, b: int, place: int, h: int, channel: int) -> Marks:
    """Return which elements depend on one element of q, k, v or do, by the book."""
    p, group = problem, problem.spec.group_size
    visible = standard.visible_keys(
        p.q, p.k, window=p.call.window, mask=p.visible, seqlens_k=p.seqlens_k
    )
    visible = visible.expand(p.spec.batch, p.spec.num_q_heads, -1, -1)[b]  # (Hq, Sq, Sk)
    rows = torch.zeros_like(visible[..., 0])
    if name in ("k", "v"):
        rows[h * group : (h + 1) * group] = visible[h * group : (h + 1) * group, :, place]
    else:
        rows[h, place] = visible[h, place].any()
    keys = (visible & rows.unsqueeze(-1)).any(1)  # (Hq, Sk)
    keys = keys.unflatten(0, (-1, group)).any(1)
    shapes = {"o": p.do.shape, "dq": p.q.shape, "dk": p.k.shape, "dv": p.v.shape}
    marks = {n: torch.zeros(s, dtype=torch.bool, device=p.q.device) for n, s in shapes.items()}
    marks["lse"] = torch.zeros_like(p.dlse, dtype=torch.bool)
    of_rows, of_keys = rows.transpose(0, 1), keys.transpose(0, 1)
    marks["dq"][b] = of_rows.unsqueeze(-1)
    marks["dk"][b] = of_keys.unsqueeze(-1)
    if name in ("q", "k"):
        marks["o"][b] = of_rows.unsqueeze(-1)
        marks["lse"][b] = rows
        marks["dv"][b] = of_keys.unsqueeze(-1)
    if name == "v":
        marks["o"][b, ..., channel] = of_rows
    if name == "do":
        marks["dv"][b, ..., channel] = of_keys
    return marks


def assert_contained(problem: Problem, results: dict[str, Tensor], marks: Marks) -> None:
    """Hold results to `marks` where they are not finite, and to float64 everywhere else.

    The problem is now one without the bad value.
    """
    truth, eager = expected(problem, torch.float64), expected(problem, problem.call.dtype)
    scales = accumulator_scales(
        problem.q, problem.k, problem.v, problem.do * problem.spec.dropout_scale,
        abs(problem.spec.softmax_scale),
    )  # fmt: skip
    for name, result in results.items():
        bad = ~result.isfinite() & ~((result == -math.inf) & (truth[name] == -math.inf))
        assert torch.equal(bad, marks[name]), (
            f"{name} holds {int(bad.sum())}, want {int(marks[name].sum())}"
        )
        clean = torch.where(marks[name], truth[name].to(result.dtype), result)
        assert_within_budget(
            clean, truth[name], eager[name], name=name, scale=scales.get(name, 0.0)
        )


@pytest.mark.parametrize(("device", "backend"), PLACES)
class TestContainment:
    @pytest.mark.parametrize(
        ("name", "spoiler"),
        SPOILT + [pytest.param(*pair, marks=pytest.mark.slow) for pair in SPOILT_SLOWLY],
    )
    def test_only_what_sees_a_nan_is_nan(
        self, name: str, spoiler: str, device: str, backend: str
    ) -> None:
        problem = make_problem(CASES[name], device)
        tensor = getattr(problem, spoiler)
        b, place, h, channel = tensor.shape[0] - 1, 66, tensor.shape[2] - 1, 5
        tensor[b, place, h, channel] = math.nan
        results = run(problem, backend)
        marks = spoilt(problem, spoiler, b, place, h, channel)
        tensor[b, place, h, channel] = 0.5
        assert_contained(problem, results, marks)

    def test_infinities_keep_their_sign(self, device: str, backend: str) -> None:
        problem = make_problem(Call(96, 96, (1, 1), (16, 16), 1, BRAIN, window=CAUSAL), device)
        problem.v[0, 70, 0, 1], problem.v[0, 80, 0, 1] = math.inf, -math.inf
        o = run(problem, backend)["o"][0, :, 0, 1]
        assert o[:70].isfinite().all()
        assert (o[70:80] == math.inf).all()
        assert o[80:].isnan().all()

    def test_a_key_that_nobody_sees_has_no_gradient(self, device: str, backend: str) -> None:
        """Whatever it and its value hold: 0 * NaN must not come back as its gradient."""
        problem = make_problem(CASES["block_mask_softcap"], device)
        assert problem.visible is not None
        assert not problem.visible[..., 96].any()
        problem.k[:, 96], problem.v[:, 96] = math.nan, math.inf
        results = run(problem, backend)
        for name, result in results.items():
            assert (result.isfinite() | (result == -math.inf)).all(), name
        assert not results["dk"][:, 96].any()
        assert not results["dv"][:, 96].any()

    def test_packed_sequences_and_earlier_rows_are_left_alone(
        self, device: str, backend: str
    ) -> None:
        lengths = ((20, 20), (70, 70), (9, 9))
        problem = make_problem(Call(dtype=BRAIN, dims=(16, 16), heads=(1, 1), lengths=lengths,
                                    window=CAUSAL), device)  # fmt: skip
        problem.v[20 + 67, 0, 3] = math.nan
        results = run(problem, backend)
        bad = {name: (~x.isfinite()).squeeze().nonzero() for name, x in results.items()}
        assert bad["o"].tolist() == [[20 + row, 3] for row in (67, 68, 69)]
        assert {row for row, _ in bad["dq"].tolist()} == {20 + 67, 20 + 68, 20 + 69}
        assert {row for row, _ in bad["dk"].tolist()} == set(range(20, 20 + 70))
        assert not len(bad["lse"])
        assert not len(bad["dv"])

    def test_what_is_finite_keeps_its_bits(self, device: str, backend: str) -> None:
        problem = make_problem(Call(160, 160, (1, 1), (16, 16), 1, BRAIN, window=CAUSAL), device)
        problem.v[0, 150, 0, 3] = math.nan
        plain, repaired = (run(problem, backend, repairs=repairs) for repairs in (False, True))
        assert plain["o"][0, 128:].isnan().any()
        assert torch.equal(plain["o"][0, :128], repaired["o"][0, :128])
        assert torch.equal(plain["dv"], repaired["dv"])


@pytest.mark.skipif(not facts.interpreting(), reason="the interpreter is off")
class TestHopperEmulated:
    """Hopper's kernels in the emulator, and the repair after them."""

    def test_rows_that_see_a_nan_are_nan_in_lse(self) -> None:
        """As -inf it would say that they see nothing, and hide the NaN from their gradients."""
        problem = make_problem(Call(70, 70, (1, 1), (64, 64), 1, BRAIN, window=CAUSAL), "cpu")
        problem.k[0, 66, 0, 5] = math.nan
        lse = gluon_problem.forward(problem)["lse"][0, 0]
        assert lse[66:].isnan().all()
        assert lse[:66].isfinite().all()

    @pytest.mark.parametrize(
        "call",
        [
            Call(40, 90, (1, 1), (64, 64), 1, BRAIN, seqlens_k=(75,)),
            Call(40, 90, (1, 1), (64, 64), 1, BRAIN, window=(20, 0)),
        ],
        ids=["padding", "before_every_window"],
    )
    def test_keys_that_nobody_sees_have_no_gradient_beside_a_nan(self, call: Call) -> None:
        problem = make_problem(call, "cpu")
        p = problem
        p.q[0, 3, 0, 5] = math.nan
        results = gluon_problem.forward(p)
        gradients = gluon_problem.backward(p, results["o"], results["lse"])
        visible = standard.visible_keys(p.q, p.k, window=call.window, seqlens_k=p.seqlens_k)
        unseen = ~visible.flatten(0, -2).any(0)
        assert unseen.any()
        assert gradients["dk"].isnan().any()
        for name in ("dk", "dv"):
            assert not gradients[name][:, unseen].any(), name

    @pytest.mark.slow
    @pytest.mark.parametrize("spoiler", ["k", "v", "do"])
    @pytest.mark.parametrize("name", ["causal", "block_mask_softcap"])
    def test_only_what_sees_a_nan_is_nan(self, name: str, spoiler: str) -> None:
        problem = make_problem(replace(CASES[name], dims=(64, 64)), "cpu")
        p, tensor = problem, getattr(problem, spoiler)
        tensor[0, 66, 0, 5] = math.nan
        results = gluon_problem.forward(p)
        o, lse = results["o"], results["lse"]
        attention_repair.repair_fwd(p.q, p.k, p.v, o, lse, p.spec, **p.tensors)
        results |= gluon_problem.backward(p, o, lse)
        gradients = (results[f"d{x}"] for x in "qkv")
        attention_repair.repair_bwd(
            p.do, p.dlse, p.q, p.k, p.v, o, lse, *gradients, p.spec, **p.tensors
        )
        marks = spoilt(p, spoiler, 0, 66, 0, 5)
        tensor[0, 66, 0, 5] = 0.5
        assert_contained(p, {name: results[name] for name in marks}, marks)


def test_calls_whose_tiles_see_the_same_keys_need_no_repair() -> None:
    for call in (Call(100, 200), Call(100, 200, window=(300, -1)), Call(1, 200, window=CAUSAL)):
        assert not attention_repair.needs_repair(make_problem(call, "cpu").spec)
    for call in (Call(100, 200, window=CAUSAL), Call(100, 200, window=(30, -1))):
        assert attention_repair.needs_repair(make_problem(call, "cpu").spec)
