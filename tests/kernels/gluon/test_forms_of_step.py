"""The ways in which a step of the backward pass may hand on ds and dq, in the emulator."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    HALF,
    Call,
    Problem,
    assert_right,
    make_problem,
)
from tests.kernels.gluon.problem import backward, forward
from tilewise.kernels.gluon.backward import launch, plan
from tilewise.kernels.gluon.backward.span import BwdVariant
from tilewise.kernels.spec import AttentionSpec

CALLS = {
    "full_d64": Call(200, 256, (2, 2), (64, 64), 1, BRAIN),
    "full_d128": Call(200, 260, (2, 2), (128, 128), 1, BRAIN),
    "causal_d128": Call(200, 260, (2, 1), (128, 128), 1, BRAIN, CAUSAL),
    "causal_d64": Call(400, 300, (3, 3), (64, 64), 1, BRAIN, CAUSAL),
    "window_d64": Call(300, 300, (2, 2), (64, 64), 1, HALF, (100, 0)),
}
ONLY_FULL = ("flat_in_a_ring",)
# Warpgroups in step have one tile of keys a CTA, and all its queries.
TOGETHER = {"together": True, "several": False, "passes_by": False}
FORMS = {
    "flat": {"flat": True},
    "flat_by_query": {"flat": True, "by_query": True},
    "flat_in_a_ring": {"flat": True, "by_query": True, "ring": True},
    "flat_without_prepost": {"flat": True, "prepost": "none"},
    "together": {"flat": True, "by_query": True, **TOGETHER},
    "together_in_one_loop": {"flat": True, "by_query": True, "two_loops": False, **TOGETHER},
    "together_in_tiles": {"prepost": "none", **TOGETHER},
}


@functools.cache
def of_forward(name: str) -> dict[str, torch.Tensor]:
    """Return o and lse of a call: forms of the backward pass have them in common."""
    torch.manual_seed(0)
    return forward(make_problem(CALLS[name], "cpu"), 3, num_sms=2)


def judge(problem: Problem, name: str) -> None:
    """Compute all gradients of the call and hold them to float64."""
    results = {kind: x.clone() for kind, x in of_forward(name).items()}
    results |= backward(problem, **results, seed=3, num_sms=2)
    assert_right(problem, results)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["full_d64", "causal_d128"])
def test_gradients_match_float64(monkeypatch: pytest.MonkeyPatch, name: str, form: str) -> None:
    if form in ONLY_FULL and name == "causal_d128":
        name = "full_d128"
    original = launch.variant_of

    def variant_of(spec: AttentionSpec) -> BwdVariant:
        return original(spec)._replace(**FORMS[form])

    monkeypatch.setattr(launch, "variant_of", variant_of)
    torch.manual_seed(0)
    judge(make_problem(CALLS[name], "cpu"), name)


def test_reproducible_sums_may_be_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    original = launch.variant_of
    monkeypatch.setattr(launch, "variant_of", lambda spec: original(spec)._replace(flat=True))
    torch.manual_seed(0)
    problem = make_problem(CALLS["causal_d128"], "cpu")
    problem.spec = problem.spec._replace(deterministic=True)
    judge(problem, "causal_d128")


@pytest.fixture
def in_other_ways(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let a backward pass be made in other ways than its own."""

    def changed(**constants: object) -> None:
        for name, value in constants.items():
            monkeypatch.setattr(plan, name, value)

    return changed


@functools.cache
def reproducible(name: str) -> dict[str, torch.Tensor]:
    """Return the gradients of a call as they are made."""
    torch.manual_seed(0)
    problem = make_problem(CALLS[name], "cpu")
    problem.spec = problem.spec._replace(deterministic=True)
    results = {kind: x.clone() for kind, x in of_forward(name).items()}
    return backward(problem, **results, seed=3, num_sms=4)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(
    "constants",
    [{"ORDERED_WAVES": 0}, {"ORDERED_WAVES": 2, "ORDERED_SENDERS": 1}, {"_LONG": 256}],
)
def test_reproducible_sums_are_those_of_other_ways_to_the_bit(
    in_other_ways: Callable[..., None], name: str, constants: dict[str, object]
) -> None:
    """Sums of dq have one order, whoever sends them and whatever is launched beside them."""
    before = reproducible(name)
    in_other_ways(**constants)
    torch.manual_seed(0)
    problem = make_problem(CALLS[name], "cpu")
    problem.spec = problem.spec._replace(deterministic=True)
    results = {kind: x.clone() for kind, x in of_forward(name).items()}
    for seed in (3, 4):
        found = backward(problem, **results, seed=seed, num_sms=4)
        assert all(torch.equal(found[kind], before[kind]) for kind in before)
    assert_right(problem, results | found)


def test_heads_of_reproducible_sums_fill_the_device() -> None:
    plain = make_problem(CALLS["full_d64"], "cpu").spec._replace(max_seqlen_q=4096)
    plain = plain._replace(max_seqlen_k=4096, batch=4, num_q_heads=32, num_kv_heads=32)
    ordered = plain._replace(deterministic=True)

    def section(spec: AttentionSpec) -> int:
        return plan.heads_per_section(4096, spec, 32, 64, 132)

    assert section(plain) == 1
    assert section(ordered) == 4  # of 32 tiles on 132 multiprocessors
    assert section(ordered._replace(window_right=0)) == 4
    two = launch.variant_of(ordered)
    assert (two.senders, two.prepost, two.flat, two.by_query) == (2, "none", False, False)
    assert launch.variant_of(plain).senders == 1
    # Beside a bias that is copied there is no room for a second sender.
    assert plan.with_copied_bias(two, is_shared=True).senders == 1


def test_long_plain_calls_have_forms_of_their_own() -> None:
    spec = make_problem(CALLS["causal_d128"], "cpu").spec

    def variant(keys: int, right: int, **changes: object) -> BwdVariant:
        lengths = {"max_seqlen_q": keys, "max_seqlen_k": keys, "window_right": right}
        return launch.variant_of(spec._replace(**lengths, **changes))

    assert variant(16384, 0).together
    assert not variant(16384, 0).two_loops
    assert variant(4096, 0).two_loops
    assert not variant(1024, 0).together
    assert not variant(16384, 0, softcap=3.0).together
    assert variant(16384, 0, deterministic=True).together
    assert variant(16384, -1).ring
    assert not variant(4096, -1).ring


# Those whose heads come in groups have CTAs that walk all heads of one.
DROPPING = {
    "full_d64": Call(200, 256, (4, 2), (64, 64), 1, BRAIN, dropout_p=0.3),
    "full_d128": Call(200, 260, (2, 1), (128, 128), 1, BRAIN, dropout_p=0.1),
    "group_d128": Call(200, 260, (4, 2), (128, 128), 1, BRAIN, CAUSAL, dropout_p=0.2),
    "group_d64": Call(300, 270, (4, 2), (64, 64), 1, HALF, CAUSAL, dropout_p=0.5),
    "packed_d64": Call(
        heads=(2, 1), dtype=BRAIN, lengths=((130, 130), (64, 64), (40, 150)), dropout_p=0.7
    ),
    "mask_d128": Call(
        300, 300, (2, 2), (128, 128), mask=(1, 2), mask_tile=(128, 128), dropout_p=0.2, dtype=BRAIN
    ),
}


@pytest.mark.parametrize("is_long", [False, True], ids=["short", "long"])
@pytest.mark.parametrize("name", DROPPING)
def test_what_is_dropped_has_float64s_gradients(
    in_other_ways: Callable[..., None], name: str, is_long: bool
) -> None:
    torch.manual_seed(0)
    problem = make_problem(DROPPING[name], "cpu")
    if is_long:
        in_other_ways(_LONG=256)
    assert launch.variant_of(problem.spec).flat == (is_long and name == "full_d128")
    num_sms = {"full_d64": 4, "full_d128": 3}.get(name, 1)  # a wave, or so many as are waves
    mask_heads = 2 if name.startswith("mask") else 0
    assert not plan.splits_groups(problem.spec, mask_heads, num_sms)
    results = forward(problem, 3, num_sms=2)
    found = [backward(problem, **results, seed=seed, num_sms=num_sms) for seed in (3, 4)]
    assert_right(problem, results | found[0])
    # Whoever draws first: each CTA walks its queries in one order.
    assert all(torch.equal(found[0][kind], found[1][kind]) for kind in ("dk", "dv"))


# No length is a multiple of a tile. 0.996 drops 255 of the 256 values of a byte, 0.002 one.
DROPPING_EDGES = {
    "window": Call(200, 190, (2, 1), (64, 64), 1, BRAIN, (60, 0), dropout_p=0.3),
    "nearly_all": Call(131, 129, (1, 1), (128, 128), 1, BRAIN, dropout_p=0.996),
    "all": Call(131, 129, (1, 1), (128, 128), 1, BRAIN, dropout_p=1.0),
    "nearly_none_of_a_negative_scale": Call(
        131, 201, (1, 1), (64, 64), 1, BRAIN, CAUSAL, -0.2, dropout_p=0.002
    ),
    "lengths": Call(
        131, 200, (1, 1), (64, 64), 2, BRAIN, CAUSAL, seqlens_k=(33, 199), dropout_p=0.2
    ),
    "reproducible": Call(201, 259, (2, 1), (64, 64), 1, BRAIN, CAUSAL, dropout_p=0.2),
}


@pytest.mark.parametrize("name", DROPPING_EDGES)
def test_edges_of_what_is_dropped_have_float64s_gradients(name: str) -> None:
    torch.manual_seed(0)
    problem = make_problem(DROPPING_EDGES[name], "cpu")
    problem.spec = problem.spec._replace(deterministic=name == "reproducible")
    results = forward(problem, 3, num_sms=2)
    assert_right(problem, results | backward(problem, **results, seed=3, num_sms=1))


def test_long_calls_that_drop_have_plain_forms_where_they_were_measured() -> None:
    plain = make_problem(CALLS["full_d128"], "cpu").spec
    full = plain._replace(max_seqlen_q=16384, max_seqlen_k=16384, dropout_p=0.1)
    assert launch.variant_of(full) == launch.variant_of(full._replace(dropout_p=0.0))._replace(
        dropout=True, prepost="none", several=False
    )
    assert not launch.variant_of(full._replace(window_right=0)).together
    assert not launch.variant_of(full._replace(deterministic=True)).flat
    assert not launch.variant_of(full._replace(max_seqlen_k=4096)).flat
