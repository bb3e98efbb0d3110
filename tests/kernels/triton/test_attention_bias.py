"""Additive biases and slopes of the Triton attention kernels, with their gradients."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.attention_problem import (
    BRAIN,
    CAUSAL,
    ON_CPU,
    ON_GPU,
    SINGLE,
    Call,
    assert_right,
    computed,
    everyday,
    make_problem,
)
from tilewise.kernels.triton.attention.plan import bias_parts

CASES = {
    "full": Call(36, 70, (2, 1), (16, 16), 2, bias=(2, 2, 36, 70)),
    "of_all_heads": Call(70, 36, (2, 2), (16, 16), 2, bias=(70, 36), window=CAUSAL),
    "of_a_sequence": Call(36, 70, (2, 2), (16, 16), 2, bias=(2, 1, 36, 70), window=(30, 4)),
    "of_keys": Call(70, 70, (2, 1), (16, 16), 2, bias=(2, 1, 1, 70), window=CAUSAL),
    "of_queries": Call(36, 70, (2, 1), (16, 16), 1, bias=(1, 2, 36, 1), sinks=True),
    "of_nothing": Call(70, 36, (2, 1), (16, 16), bias=(1,), window=CAUSAL, sinks=True),
    "float32_beside_bfloat16": Call(
        36, 70, (2, 1), (32, 16), dtype=BRAIN, bias=(2, 36, 70), bias_dtype=SINGLE, window=CAUSAL
    ),
    "shared": Call(36, 90, (2, 1), (40, 16), 3, dtype=BRAIN, bias=(2, 36, 90)),
    "shared_by_heads": Call(
        90, 70, (2, 1), (32, 16), 3, dtype=BRAIN, bias=(90, 70), softcap=4.0, alibi="sequences",
        sinks=True,
    ),
    "shared_full": Call(36, 36, (2, 2), (16, 16), 2, dtype=BRAIN, bias=(2, 2, 36, 36)),
    "bfloat16": Call(36, 70, (2, 1), (32, 16), dtype=BRAIN, bias=(2, 1, 70)),
    "with_everything": Call(
        36, 70, (2, 1), (16, 16), 3, bias=(3, 2, 36, 70), seqlens_k=(0, 31, 70), softcap=4.0,
        alibi="sequences", sinks=True, window=(60, 8),
    ),
    "packed": Call(
        heads=(2, 1), dims=(16, 16), lengths=((36, 36), (0, 9), (20, 70)), bias=(3, 2, 36, 70)
    ),
    "packed_of_a_head": Call(
        heads=(2, 1), dims=(16, 16), lengths=((36, 50), (7, 0), (20, 70)), bias=(2, 36, 70),
        window=CAUSAL, alibi="sequences",
    ),
    "packed_of_keys": Call(
        heads=(2, 1), dims=(16, 16), lengths=((36, 50), (20, 70)), bias=(2, 1, 1, 70)
    ),
    "packed_of_queries": Call(
        heads=(2, 1), dims=(16, 16), lengths=((36, 50), (20, 70)), bias=(2, 1, 36, 1), sinks=True
    ),
    "slopes_of_sequences": Call(20, 36, (2, 1), (16, 16), 2, alibi="sequences", window=CAUSAL),
}  # fmt: skip
EVERYDAY = ("full", "shared_by_heads", "of_keys", "with_everything", "packed_of_a_head")
NAMES = everyday(CASES, EVERYDAY)


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_gradients_match_float64(name: str, device: str) -> None:
    assert_right(make_problem(CASES[name], device))


@pytest.mark.parametrize(
    ("tiles", "pairs", "parts"),
    [
        (64, 256, 4),  # 256 programs at a time; 320 would take two waves
        (144, 384, 3),  # two waves of 128 steps, in place of one of 384
        (256, 256, 1),
        (1024, 1024, 1),
        (1, 5, 5),
        (264, 7, 1),
        (500, 1, 1),
    ],
)
def test_parts_of_a_shared_bias_fill_waves_of_programs(tiles: int, pairs: int, parts: int) -> None:
    assert bias_parts(tiles, pairs, at_once=2 * 132) == parts


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
class TestBias:
    def test_a_bias_may_be_strided(self, device: str) -> None:
        problem = make_problem(CASES["full"], device)
        problem.bias = problem.bias.transpose(-1, -2).contiguous().transpose(-1, -2)
        assert problem.bias.stride(-2) == 1
        assert_right(problem)

    def test_an_expanded_bias_has_a_gradient_of_its_own_shape(self, device: str) -> None:
        problem = make_problem(CASES["of_all_heads"], device)
        problem.bias = problem.bias.expand(2, 2, 70, 36)
        assert_right(problem)

    def test_a_bias_of_minus_infinity_hides_a_key(self, device: str) -> None:
        problem = make_problem(Call(20, 100, (1, 1), (16, 16), bias=(1, 1, 20, 100)), device)
        hidden = torch.rand(problem.bias.shape, device=device) < 0.3
        hidden[:, :, :, :40] = True  # whole tiles of keys
        hidden[:, :, 5] = True  # a row that sees nothing
        problem.bias.masked_fill_(hidden, -math.inf)
        results = computed(problem)
        assert torch.all(results["lse"][:, :, 5] == -math.inf)
        assert not results["dbias"][hidden].any()
        assert_right(problem, results)

    def test_a_bias_of_minus_infinity_leaves_the_sink(self, device: str) -> None:
        problem = make_problem(
            Call(20, 36, (1, 1), (16, 16), bias=(20, 36), sinks=True, window=CAUSAL), device
        )
        problem.bias[3:9] = -math.inf
        assert_right(problem)

    def test_nan_in_the_bias_of_hidden_keys_stays_there(self, device: str) -> None:
        call = Call(36, 70, (1, 1), (16, 16), 2, bias=(2, 1, 36, 70), seqlens_k=(40, 70))
        problem = make_problem(call, device)
        problem.bias[0, :, :, 40:] = math.nan
        results = computed(problem)
        assert not results["dbias"][0, :, :, 40:].any()
        problem.bias = problem.bias.nan_to_num(0.0)
        assert_right(problem, results)

    def test_runs_are_bitwise_equal(self, device: str) -> None:
        problem = make_problem(CASES["of_keys"], device)
        first, second = computed(problem), computed(problem)
        for name in first:
            assert torch.equal(first[name], second[name]), name

    def test_no_gradient_is_computed_for_a_bias_that_needs_none(self, device: str) -> None:
        problem = make_problem(CASES["full"], device)
        problem.spec = problem.spec._replace(needs_dbias=False)
        assert "dbias" not in computed(problem)

    @pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 40), (40, 0)])
    def test_empty_sequences(self, seqlen_q: int, seqlen_k: int, device: str) -> None:
        call = Call(seqlen_q, seqlen_k, dims=(16, 16), bias=(1, 2, 1, 1))
        assert not computed(make_problem(call, device))["dbias"].any()
