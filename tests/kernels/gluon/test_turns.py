"""CTAs of the backward pass that take several tiles of keys in turn, in the emulator."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, Call, assert_right, make_problem
from tests.kernels.gluon.problem import backward, forward
from tilewise.kernels.gluon.backward import plan
from tilewise.kernels.gluon.backward.plan import turns_of, variant_of

CALLS = {
    "causal_d64": Call(500, 500, (4, 4), (64, 64), 1, BRAIN, CAUSAL),
    "full_d64": Call(200, 500, (4, 4), (64, 64), 1, BRAIN),
    "causal_d128": Call(300, 500, (4, 4), (128, 128), 1, BRAIN, CAUSAL),
    "full_d128": Call(150, 500, (4, 4), (128, 128), 1, BRAIN),
    "groups": Call(256, 256, (8, 4), (64, 64), 1, BRAIN, CAUSAL),
}


@pytest.fixture(autouse=True)
def small_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "TURNS": 2, "L2_BYTES": 1, "SHORT_BYTES": 1, "_FEW_WAVES": 0, "_FULL_WAVES": 99.0,
    }.items():  # fmt: skip
        monkeypatch.setattr(plan, name, value)


def judge(call: Call, seed: int, num_sms: int = 3, resident: int = 2) -> None:
    problem = make_problem(call, "cpu")
    spec = problem.spec
    assert variant_of(spec).several
    heads = spec.batch * spec.num_kv_heads
    assert 0 < turns_of(spec, True, 1, num_sms).heads < heads  # CTAs of both kinds
    results = forward(problem)
    results |= backward(problem, **results, seed=seed, num_sms=num_sms, resident=resident)
    assert_right(problem, results)


@pytest.mark.parametrize("name", CALLS)
def test_gradients_match_float64(name: str) -> None:
    torch.manual_seed(0)
    judge(CALLS[name], seed=1)


def test_all_tiles_of_a_head_in_one_cta(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "TURNS", 4)
    torch.manual_seed(0)
    judge(CALLS["causal_d64"], seed=2, resident=1)


@pytest.mark.parametrize("name", ["full_d128", "causal_d128"])
def test_long_calls_may_have_them_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_LONG", 100)
    torch.manual_seed(0)
    judge(CALLS[name], seed=4)


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("turns", [1, 2])
def test_queries_that_a_warpgroup_does_not_see_are_passed_by(
    turns: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "TURNS", turns)
    monkeypatch.setattr(plan, "PASSES_BY", [64, 128])
    torch.manual_seed(0)
    problem = make_problem(
        Call(450, 450, (width // 16, 4), (width, width), 1, BRAIN, CAUSAL), "cpu"
    )
    assert variant_of(problem.spec).passes_by
    results = forward(problem)
    results |= backward(problem, **results, seed=3, num_sms=3, resident=2)
    assert_right(problem, results)
