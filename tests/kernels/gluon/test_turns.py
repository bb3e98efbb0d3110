"""CTAs of the backward pass that take several tiles of keys in turn, in the emulator."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, HALF, Call, assert_right, make_problem
from tests.kernels.compile_cases import attention_spec
from tests.kernels.gluon.problem import backward, forward, in_turns
from tests.kernels.gluon.test_attention_bwd import WAYS
from tilewise.kernels.gluon.backward import plan
from tilewise.kernels.gluon.backward.plan import turns_of, variant_of
from tilewise.kernels.spec import AttentionSpec

CALLS = {
    "causal_d64": Call(500, 500, (4, 4), (64, 64), 1, BRAIN, CAUSAL),
    "full_d64": Call(200, 500, (2, 2), (64, 64), 1, BRAIN),
    "causal_d128": Call(300, 500, (2, 2), (128, 128), 1, BRAIN, CAUSAL),
    "full_d128": Call(150, 500, (4, 4), (128, 128), 1, BRAIN),
    "groups": Call(256, 256, (8, 4), (64, 64), 1, BRAIN, CAUSAL),
    "more_queries": Call(300, 200, (4, 4), (64, 64), 1, BRAIN, CAUSAL),
    "window_to_the_right": Call(200, 250, (4, 4), (64, 64), 1, HALF, (-1, 70)),
}


@pytest.fixture
def small_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = {"L2_BYTES": 1, "SHORT_BYTES": 1, "_FEW_WAVES": 0, "_FULL_WAVES": 99.0}
    for name, value in constants.items():
        monkeypatch.setattr(plan, name, value)


def set_ways(monkeypatch: pytest.MonkeyPatch, call: Call, **options: Any) -> None:
    ways = in_turns(max(64, *call.dims), diagonal=call.window[1] >= 0, **options)
    monkeypatch.setattr(plan, "WAYS", ways)


def judge(call: Call, seed: int, num_sms: int = 3, resident: int = 2) -> None:
    problem = make_problem(call, "cpu")
    results = forward(problem)
    results |= backward(problem, **results, seed=seed, num_sms=num_sms, resident=resident)
    assert_right(problem, results)


def assert_both_kinds(call: Call, num_sms: int) -> None:
    """CTAs that take several tiles, and such that take one."""
    spec = make_problem(call, "cpu").spec
    heads = turns_of(spec, variant_of(spec), 1, num_sms).heads
    assert 0 < heads < spec.batch * spec.num_kv_heads


@pytest.mark.usefixtures("small_sections")
@pytest.mark.parametrize("name", CALLS)
def test_gradients_match_float64(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    set_ways(monkeypatch, CALLS[name])
    assert_both_kinds(CALLS[name], 3)
    torch.manual_seed(0)
    judge(CALLS[name], seed=1)


@pytest.mark.usefixtures("small_sections")
def test_all_tiles_of_a_head_in_one_cta(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ways(monkeypatch, CALLS["causal_d64"], turns=4)
    torch.manual_seed(0)
    judge(CALLS["causal_d64"], seed=2, resident=1)


@pytest.mark.usefixtures("small_sections")
def test_in_a_ring_as_long_calls_have_them(monkeypatch: pytest.MonkeyPatch) -> None:
    call = CALLS["full_d128"]
    set_ways(monkeypatch, call)
    monkeypatch.setattr(plan, "_LONG", 100)
    variant = variant_of(make_problem(call, "cpu").spec)
    assert variant.ring
    assert variant.flat
    assert variant.several
    torch.manual_seed(0)
    judge(call, seed=4)


@pytest.mark.usefixtures("small_sections")
@pytest.mark.parametrize("turns", [1, 2])
def test_queries_that_a_warpgroup_does_not_see_are_passed_by(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = Call(450, 450, (3, 3), (64, 64), 1, BRAIN, CAUSAL)
    set_ways(monkeypatch, call, turns=turns, passes_by=True)
    assert variant_of(make_problem(call, "cpu").spec).passes_by
    torch.manual_seed(0)
    judge(call, seed=3)


# What calls have by themselves: (several tiles in a CTA, queries passed by, waves behind).
DEFAULTS = {
    "causal d64 128": (64, True, 128, (1, True, 2)),
    "causal d64 512": (64, True, 512, (1, True, 2)),
    "causal d64 600": (64, True, 600, (1, True, 2)),  # five tiles are no multiple of two
    "causal d64 700": (64, True, 700, (2, True, 2)),
    "causal d64 1,024": (64, True, 1024, (2, True, 2)),
    "causal d64 1,025": (64, True, 1025, (1, False, 2)),
    "causal d64 2,048": (64, True, 2048, (1, False, 2)),
    "full d64 512": (64, False, 512, (2, False, 2)),
    "full d64 2,048": (64, False, 2048, (2, False, 2)),
    "full d64 2,200": (64, False, 2200, (1, False, 2)),
    "causal d128 512": (128, True, 512, (1, False, 2)),
    "causal d128 1,024": (128, True, 1024, (1, False, 2)),
    "causal d128 16,384": (128, True, 16384, (1, False, 2)),
    "full d128 1,024": (128, False, 1024, (1, False, 2)),
    "full d128 8,064": (128, False, 8064, (1, False, 2)),
    "full d128 8,192": (128, False, 8192, (2, False, 1)),
    "full d128 16,384": (128, False, 16384, (2, False, 1)),
}


def way_of(spec: AttentionSpec) -> tuple[int, bool, int]:
    variant = variant_of(spec)
    turns = turns_of(spec._replace(batch=100), variant, 1, 132)
    return turns.each, variant.passes_by, turns.behind


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_ways_of_calls(name: str) -> None:
    d, causal, n, expected = DEFAULTS[name]
    assert way_of(attention_spec(d, causal=causal, max_seqlen_q=n, max_seqlen_k=n)) == expected


_1024 = {"max_seqlen_q": 1024, "max_seqlen_k": 1024}


@pytest.mark.parametrize(
    "feature",
    [
        {"window_left": 300}, {"is_varlen": True}, {"has_seqlens_k": True}, {"softcap": 30.0},
        {"has_alibi": True}, {"has_bias": True}, {"mask_tile": (128, 128)}, {"dropout_p": 0.1},
        {"deterministic": True},
    ],
    ids=lambda feature: next(iter(feature)),
)  # fmt: skip
def test_calls_with_a_feature_have_no_way_of_their_own(feature: dict[str, Any]) -> None:
    for d, causal, lengths in (
        (64, True, _1024), (64, False, _1024),
        (128, False, {"max_seqlen_q": 8192, "max_seqlen_k": 8192}),
    ):  # fmt: skip
        spec = attention_spec(d, **{"causal": causal, **lengths, **feature})
        assert way_of(spec) == (1, False, 2)


@pytest.mark.parametrize(
    "changes",
    [{"max_seqlen_q": 900}, {"softmax_scale": -0.1}, {"window_right": 1}],
    ids=lambda changes: next(iter(changes)),
)
def test_only_a_level_diagonal_lets_queries_pass_by(changes: dict[str, Any]) -> None:
    spec = attention_spec(64, **_1024)._replace(**changes)
    assert way_of(spec) == (2, False, 2)


@pytest.mark.parametrize("name", WAYS)
def test_calls_on_a_card_go_their_own_way(name: str) -> None:
    """On 132 multiprocessors most heads' CTAs take two tiles where any do."""
    spec = make_problem(WAYS[name], "cpu").spec
    if plan.splits_groups(spec, 1, 132):
        spec = plan.with_ungrouped_heads(spec)
    assert (spec.group_size > 1) == ("groups" in name)
    variant = variant_of(spec)
    assert variant.several or variant.passes_by
    section = plan.heads_per_section(
        spec.max_seqlen_q, spec, plan.cdiv(spec.max_seqlen_k, 128), variant.d, 132
    )
    turns = turns_of(spec, variant, section, 132)
    assert variant.several == (2 * turns.heads > spec.batch * spec.num_kv_heads)


@pytest.mark.parametrize(
    "call",
    [
        Call(260, 260, (4, 2), (64, 64), 1, BRAIN, CAUSAL),
        Call(640, 650, (3, 3), (64, 64), 1, BRAIN, CAUSAL),
        Call(700, 700, (2, 2), (64, 64), 1, HALF, CAUSAL),
        Call(130, 650, (2, 2), (64, 64), 1, BRAIN),
        pytest.param(Call(70, 8330, (2, 2), (128, 128), 1, BRAIN), marks=pytest.mark.slow),
    ],
    ids=["causal_little", "causal_not_level", "causal", "full", "full_long_d128"],
)
def test_default_calls_match_float64(call: Call) -> None:
    variant = variant_of(make_problem(call, "cpu").spec)
    assert variant.several or variant.passes_by
    torch.manual_seed(0)
    judge(call, seed=5)
