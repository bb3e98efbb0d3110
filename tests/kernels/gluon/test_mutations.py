"""Every mistake in the Hopper kernels is seen: the emulated tests could not pass with it."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.attention_problem import BRAIN, CAUSAL, Call, Problem, make_problem
from tests.kernels.gluon.handovers import HANDOVERS
from tests.kernels.gluon.mutations import BACKWARD, FORWARD, Mutation
from tests.kernels.gluon.problem import backward, forward
from tilewise.kernels.gluon.forward import launch as attention_fwd_launch
from tools.gluon_emulator import EmulationError, Program

SEEDS = range(4)
QUICK = {
    "k_is_loaded_before_its_place_is_free",
    "the_wrong_phase_of_free_v",
    "v_freed_before_its_product_is_done",
    "k_freed_before_its_product_is_done",
    "nobody_begins_the_turns",
    "o_copied_before_it_is_fenced",
    "an_end_that_is_not_announced",
    "ds_that_is_not_fenced",
    "ds_multiplied_before_the_other_half_is_there",
    "dq_freed_while_it_is_sent",
    "dq_added_before_its_turn",
    "dq_used_before_it_is_done",
}
CALLS = {
    "full": Call(256, 500, (2, 2), (128, 128), 1, BRAIN),  # two tiles a CTA, four blocks each
    "causal": Call(330, 400, (2, 1), (128, 128), 1, BRAIN, CAUSAL),
    "short": Call(60, 400, (4, 1), (128, 128), 1, BRAIN),  # one warpgroup has no rows
    "biased": Call(256, 504, (2, 2), (128, 128), 1, BRAIN, bias=(1, 2, 256, 504)),
    "biased_short": Call(60, 400, (4, 1), (128, 128), 1, BRAIN, CAUSAL, bias=(1, 4, 60, 400)),
    "wide_short": Call(60, 400, (1, 1), (256, 256), 1, BRAIN),  # without turns
    "wide": Call(150, 200, (1, 1), (256, 256), 1, BRAIN, CAUSAL),  # hides whole blocks of 64 keys
    # Sums of dq have an order.
    "ordered": Call(300, 400, (2, 1), (64, 64), 1, BRAIN),
    "ordered_causal": Call(200, 300, (1, 1), (128, 128), 1, BRAIN, CAUSAL),
    "prepost": Call(130, 200, (3, 3), (64, 64), 1, BRAIN),  # of one head by CTAs of another
    # dq has a kernel of its own; more tiles than any ring has places.
    "apart": Call(300, 300, (1, 1), (192, 128), 1, BRAIN, CAUSAL, dropout_p=0.2),
    "dropped": Call(200, 256, (2, 1), (64, 64), 1, BRAIN, dropout_p=0.4),  # a CTA has both heads
    # A sequence whose neighbours hold NaN.
    "nan": Call(
        heads=(1, 1), dims=(128, 128), dtype=BRAIN, lengths=((90, 90), (100, 70), (90, 90))
    ),
}  # fmt: skip
NEIGHBOURS = {
    "q": (slice(0, 90), slice(190, 280)),
    "do": (slice(0, 90), slice(190, 280)),
    "k": (slice(0, 90), slice(160, 250)),
    "v": (slice(0, 90), slice(160, 250)),
}


@functools.cache
def problem_of(name: str) -> Problem:
    torch.manual_seed(0)
    problem = make_problem(CALLS[name], "cpu")
    if name.startswith("ordered"):
        problem.spec = problem.spec._replace(deterministic=True)
    if name == "nan":
        for tensor, parts in NEIGHBOURS.items():
            for part in parts:
                getattr(problem, tensor)[part] = math.nan
    return problem


def run_forward(name: str, seed: int, program: Program | None = None) -> dict[str, Tensor]:
    """Run twice, so that what one launch leaves behind matters."""
    keywords = {} if program is None else {"program": program}
    first = forward(problem_of(name), seed, num_sms=2, **keywords)
    again = forward(problem_of(name), seed + 100, num_sms=2, **keywords)
    return first | {f"{key} again": value for key, value in again.items()}


@functools.cache
def forward_truth(name: str) -> dict[str, Tensor]:
    return run_forward(name, 0)


def run_backward(name: str, seed: int, program: Program | None = None) -> dict[str, Tensor]:
    keywords = {} if program is None else {"program": program}
    o, lse = forward_truth(name)["o"], forward_truth(name)["lse"]
    # CTAs whose prepost are planned for two multiprocessors run all at once.
    resident = 6 if name == "prepost" else 2
    return backward(problem_of(name), o, lse, seed, num_sms=2, resident=resident, **keywords)


@functools.cache
def backward_truth(name: str) -> dict[str, Tensor]:
    return run_backward(name, 0)


@pytest.fixture(autouse=True)
def counter_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that dies leaves the counter of tiles anywhere."""
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(attention_fwd_launch, "counter_of", lambda device, stream: counter)


def same(results: dict[str, Tensor], truth: dict[str, Tensor]) -> bool:
    """Whether results differ by no more than the order of sums may explain."""
    return all(
        torch.allclose(results[key].float(), truth[key].float(), 1e-2, 1e-2, equal_nan=True)
        for key in truth
    )


def judge(mutation: Mutation, run: object, truth: dict[str, Tensor]) -> None:
    program = mutation.program()
    seen = False
    for seed in SEEDS:
        try:
            seen = not same(run(mutation.call, seed, program), truth)
        except EmulationError:
            seen = True
        if seen:
            break
    assert seen == (mutation.harmless is None)


def marked(mutations: dict[str, Mutation]) -> list[Any]:
    return [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in mutations
    ]


@pytest.mark.parametrize("table", [FORWARD, BACKWARD, HANDOVERS], ids=["fwd", "bwd", "handovers"])
def test_what_mistakes_change_stands_there_once(table: dict[str, Mutation]) -> None:
    for mutation in table.values():
        assert mutation.program()  # raises where it is not


@pytest.mark.parametrize("name", marked(FORWARD))
def test_a_mistake_in_the_forward_pass_is_seen(name: str) -> None:
    judge(FORWARD[name], run_forward, forward_truth(FORWARD[name].call))


@pytest.mark.parametrize("name", marked(BACKWARD))
def test_a_mistake_in_the_backward_pass_is_seen(name: str) -> None:
    judge(BACKWARD[name], run_backward, backward_truth(BACKWARD[name].call))


def test_unchanged_kernels_give_the_same_in_every_schedule() -> None:
    for seed in SEEDS[1:]:  # the truth is that of the first
        assert same(run_forward("causal", seed), forward_truth("causal"))
        assert same(run_backward("causal", seed), backward_truth("causal"))
