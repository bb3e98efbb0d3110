"""The ways in which a step of the backward pass may hand on ds and dq, in the emulator."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, Call, assert_right, make_problem
from tests.kernels.gluon.problem import backward, forward
from tilewise.kernels.gluon.backward import launch
from tilewise.kernels.gluon.backward.span import BwdVariant
from tilewise.kernels.spec import AttentionSpec

CALLS = {
    "full_d64": Call(200, 256, (2, 2), (64, 64), 1, BRAIN),
    "causal_d128": Call(200, 260, (4, 2), (128, 128), 1, BRAIN, CAUSAL),
}
FORMS = {
    "flat": {"flat": True},
    "flat_by_query": {"flat": True, "by_query": True},
    "flat_without_prepost": {"flat": True, "prepost": "none"},
    "together": {"flat": True, "by_query": True, "together": True},
    "together_in_tiles": {"together": True, "prepost": "none"},
    "direct": {"flat": True, "direct": True},
    "direct_together": {"flat": True, "direct": True, "together": True, "stages": 3},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_match_float64(monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    original = launch.variant_of

    def variant_of(spec: AttentionSpec) -> BwdVariant:
        return original(spec)._replace(**FORMS[form])

    monkeypatch.setattr(launch, "variant_of", variant_of)
    problem = make_problem(CALLS[name], "cpu")
    results = forward(problem, 3, num_sms=2)
    results |= backward(problem, **results, seed=3, num_sms=2)
    assert_right(problem, results)


def test_reproducible_sums_may_be_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    original = launch.variant_of
    monkeypatch.setattr(launch, "variant_of", lambda spec: original(spec)._replace(flat=True))
    problem = make_problem(CALLS["causal_d128"], "cpu")
    problem.spec = problem.spec._replace(deterministic=True)
    results = forward(problem, 3, num_sms=2)
    results |= backward(problem, **results, seed=3, num_sms=2)
    assert_right(problem, results)
