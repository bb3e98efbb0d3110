"""choose_experts against the oracle and the definition, ties and what is not finite."""

from __future__ import annotations

import pytest
import torch

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.errors import UnsupportedError

on_triton = pytest.mark.parametrize(("backend", "place"), BACKENDS[1:])
PLAIN = {"scores": "softmax", "normalised": False}
SIGMOID = {"scores": "sigmoid", "norm_eps": 1e-20, "scale": 2.5}
# name: (experts, active, options, has a correction)
CASES = {
    "softmax_of_the_chosen": (7, 3, {}, False),
    "softmax_of_all": (40, 5, PLAIN | {"scale": 16.0}, False),
    "best_groups_by_their_best": (
        12, 4, PLAIN | {"num_groups": 4, "num_active_groups": 2}, False),
    "softmax_with_a_correction": (33, 6, {}, True),
    "softmax_by_two_best": (
        16, 4, {"num_groups": 4, "num_active_groups": 2, "best_in_group": 2}, False),
    "sigmoid": (9, 2, {"scores": "sigmoid", "normalised": False}, False),
    "sigmoid_with_groups": (
        32, 8, SIGMOID | {"num_groups": 8, "num_active_groups": 3, "best_in_group": 2}, True),
    "sparse_mixer": (16, 2, {"scores": "sparse_mixer", "jitter": 0.1}, False),
    "all_of_one_expert": (1, 1, {}, False),
    "many_experts": (300, 10, SIGMOID, True),
    "experts_with_factors": (24, 6, {"scale": 0.5, "expert_scale": torch.bfloat16}, False),
}  # fmt: skip


def problem(name, dtype, place, tokens=13):
    experts, active, options, has_correction = CASES[name]
    draw = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(tokens, experts, generator=draw)).to(place, dtype)
    given = {"num_active": active, **options}
    if has_correction:
        given["correction_bias"] = torch.randn(experts, generator=draw).to(place)
    if "expert_scale" in given:
        given["expert_scale"] = torch.randn(experts, generator=draw).to(
            place, given["expert_scale"]
        )
    return logits, given


@on_triton
@pytest.mark.parametrize("name", CASES)
def test_choices_are_the_oracles(name, backend, place):
    logits, given = problem(name, torch.float32, place)
    chosen, weights = ops.choose_experts(logits, **given, backend=backend)
    expected = ops.choose_experts(logits, **given, backend="reference")
    assert (chosen.dtype, weights.dtype) == (torch.int32, torch.float32)
    assert torch.equal(chosen, expected[0])
    torch.testing.assert_close(weights, expected[1], rtol=2e-6, atol=1e-7)


@on_triton
@pytest.mark.parametrize("name", ["sigmoid_with_groups", "softmax_of_all", "experts_with_factors"])
def test_a_block_that_all_tokens_share_is_the_last_choice(name, backend, place):
    logits, given = problem(name, torch.float32, place)
    (tokens, experts), active = logits.shape, given["num_active"]
    chosen, weights = ops.choose_experts(logits, **given, backend=backend)
    gate = torch.linspace(-4, 4, tokens).to(place)
    for shared_weight, expected in (("one", torch.ones_like(gate)), ("sigmoid", gate.sigmoid())):
        own = [logits] if shared_weight == "one" else [logits, gate[:, None]]
        for name in (backend, "reference"):
            found = ops.choose_experts(
                torch.cat(own, 1), **given, shared_weight=shared_weight, backend=name
            )
            assert found[0].shape == found[1].shape == (tokens, active + 1)
            assert torch.equal(found[0][:, :active], chosen)
            assert (found[0][:, active] == experts).all()
            torch.testing.assert_close(found[1][:, :active], weights, rtol=2e-6, atol=1e-7)
            torch.testing.assert_close(found[1][:, active], expected)


@on_triton
def test_logits_of_16_bits_and_rows_that_lie_apart(backend, place):
    logits, given = problem("sigmoid_with_groups", torch.bfloat16, place, 6)
    every = ops.choose_experts(logits, **given, backend=backend)
    some = ops.choose_experts(logits[::2], **given, backend=backend)
    assert torch.equal(some[0], every[0][::2])
    assert torch.equal(some[1], every[1][::2])
    none = ops.choose_experts(logits[:0], **given, backend=backend)
    assert none[0].shape == none[1].shape == (0, 8)


def test_a_normalised_softmax_is_that_over_the_chosen_logits():
    logits, _ = problem("softmax_of_the_chosen", torch.float32, "cpu")
    chosen, weights = ops.choose_experts(logits, 3, backend="reference")
    p = logits.double().softmax(-1)
    top, where = p.topk(3, -1)
    assert torch.equal(where.int(), chosen)
    torch.testing.assert_close(weights.double(), top / top.sum(-1, keepdim=True))


@on_triton
@pytest.mark.parametrize("name", ["softmax_of_the_chosen", "sigmoid", "best_groups_by_their_best"])
def test_of_equal_scores_the_first_is_chosen(name, backend, place):
    logits, given = problem(name, torch.float32, place)
    logits[:] = 1.0
    chosen, _ = ops.choose_experts(logits, **given, backend=backend)
    assert torch.equal(chosen.cpu(), torch.arange(given["num_active"]).int().expand_as(chosen))


@on_triton
@pytest.mark.parametrize("name", CASES)
def test_a_token_with_nan_has_valid_experts_and_hurts_itself_alone(name, backend, place):
    logits, given = problem(name, torch.float32, place)
    expected = ops.choose_experts(logits, **given, backend=backend)
    experts = logits.shape[1]
    logits[2], logits[5, experts // 2] = float("nan"), float("nan")
    chosen, weights = ops.choose_experts(logits, **given, backend=backend)
    assert weights[[2, 5]].isnan().all()
    for row in chosen.tolist():
        assert len({*row}) == len(row)
        assert all(0 <= e < experts for e in row)
    others = [i for i in range(len(logits)) if i not in (2, 5)]
    assert torch.equal(chosen[others], expected[0][others])
    assert torch.equal(weights[others], expected[1][others])


@on_triton
def test_logits_of_minus_infinity_are_chosen_last(backend, place):
    logits = torch.full((1, 6), -torch.inf, device=place)
    logits[0, 4] = 0.0
    chosen, weights = ops.choose_experts(logits, 2, backend=backend)
    assert chosen.tolist() == [[4, 0]]
    assert weights.tolist() == [[1.0, 0.0]]


REFUSED = {
    "experts that are not there": ({"num_active": 13}, ValueError,
                                   r"num_active must be in 1 \.\.\. 12, got 13"),
    "unknown scores": ({"scores": "tanh"}, ValueError, "scores must be one of softmax"),
    "groups that divide no experts": ({"num_groups": 5}, ValueError, "num_groups must be at most"),
    "groups that are not there": ({"num_groups": 2, "num_active_groups": 3}, ValueError,
                                  r"num_active_groups must be in 1 \.\.\. 2, got 3"),
    "too few experts in groups": ({"num_groups": 12, "num_active": 2}, ValueError,
                                  "num_active must be at most the 1 experts"),
    "three best": ({"best_in_group": 3}, ValueError, "best_in_group must be 1 or 2"),
    "a sparse mixer of three": ({"scores": "sparse_mixer", "num_active": 3}, ValueError,
                                "scores must be softmax or sigmoid"),
    "a correction of 16 bits": ({"correction_bias": torch.zeros(12).half()}, TypeError,
                                "correction_bias must have dtype"),
    "a correction of others": ({"correction_bias": torch.zeros(11)}, ValueError,
                               "correction_bias must have shape"),
    "factors of others": ({"expert_scale": torch.ones(11)}, ValueError,
                          "expert_scale must have shape"),
    "a block of another weight": ({"shared_weight": "two"}, ValueError,
                                  "shared_weight must be one of none, one, sigmoid, got 'two'"),
    "factors of integers": ({"expert_scale": torch.ones(12).int()}, TypeError,
                            "expert_scale must be one of float16"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case):
    change, error, match = REFUSED[case]
    with pytest.raises(error, match=match):
        ops.choose_experts(torch.zeros(2, 12), **{"num_active": 2, "backend": "reference"} | change)


def test_there_is_no_kernel_for_cpus(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(UnsupportedError, match="choose_experts"):
        ops.choose_experts(torch.zeros(2, 4), 2)


def test_opcheck():
    options = (2, "sigmoid", True, 0.0, 1.0, 2, 1, 2, 0.01, "one", "reference")
    torch.library.opcheck(
        torch.ops.tilewise.choose_experts.default,
        (torch.randn(3, 8), torch.zeros(8), torch.ones(8), *options),
    )
