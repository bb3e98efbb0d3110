"""Block masks in the Triton attention kernels: every tile kind, alone and beside other rules."""

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
    Call,
    Problem,
    assert_right,
    computed,
    everyday,
    make_problem,
)
from tilewise import masks
from tilewise.kernels.spec import MaskTensors

LARGE = (128, 128)
CASES = {
    "shared": Call(100, 130, (2, 1), (16, 16), 1, mask=(1, 1)),
    "of_each_head": Call(70, 130, (2, 1), (16, 16), 1, mask=(1, 2)),
    "of_each_sequence": Call(70, 150, (2, 1), (16, 16), 2, mask=(2, 1), mask_tile=LARGE),
    "of_each": Call(70, 150, (2, 1), (16, 16), 2, mask=(2, 2), mask_tile=(64, 128)),
    "wide_tiles": Call(150, 70, (2, 1), (16, 16), mask=(1, 1), mask_tile=(128, 64)),
    "beside_causal": Call(130, 200, (2, 1), (16, 16), mask=(1, 2), window=CAUSAL),
    "beside_a_window": Call(200, 260, (1, 1), (16, 16), mask=(1, 1), window=(70, 30)),
    "beside_key_lengths": Call(
        40, 130, (2, 1), (16, 16), 3, mask=(3, 1), seqlens_k=(0, 77, 130), sinks=True
    ),
    "beside_a_bias": Call(
        40, 130, (2, 1), (16, 16), 2, mask=(1, 2), bias=(2, 1, 40, 130), mask_tile=LARGE
    ),
    "beside_a_bias_of_keys": Call(
        150, 70, (2, 1), (16, 16), 2, mask=(2, 1), bias=(1, 2, 1, 70), alibi="sequences",
        window=CAUSAL, softcap=5.0,
    ),
    "packed": Call(
        heads=(2, 1), dims=(16, 16), lengths=((70, 100), (0, 9), (64, 20), (7, 0), (20, 130)),
        mask=(1, 2),
    ),
    "packed_of_each_sequence": Call(
        heads=(2, 1), dims=(16, 16), lengths=((70, 150), (20, 30)), mask=(2, 1), window=(90, 0),
        mask_tile=LARGE,
    ),
    "bfloat16": Call(150, 200, (2, 1), (64, 32), dtype=BRAIN, mask=(1, 1)),
    "wide_heads": Call(70, 70, (1, 1), (256, 256), mask=(1, 1)),
}  # fmt: skip
EVERYDAY = ("shared", "of_each_head", "beside_key_lengths", "beside_a_bias", "packed")
NAMES = everyday(CASES, EVERYDAY)


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
@pytest.mark.parametrize("name", NAMES)
def test_forward_and_gradients_match_float64(name: str, device: str) -> None:
    assert_right(make_problem(CASES[name], device))


def _masked(problem: Problem, visible: torch.Tensor, tile: int = 64) -> Problem:
    """Give a problem that was made with a mask another one."""
    problem.visible = visible
    problem.mask = MaskTensors(*masks.dense(visible, tile=tile).tensors())
    return problem


@pytest.mark.parametrize("device", [ON_CPU, ON_GPU])
class TestMasks:
    def test_a_causal_mask_is_the_causal_rule(self, device: str) -> None:
        problem = make_problem(Call(100, 100, (1, 1), (16, 16), mask=(1, 1)), device)
        _masked(problem, torch.ones(1, 1, 100, 100, dtype=torch.bool, device=device).tril())
        masked = computed(problem)
        problem.spec = problem.spec._replace(mask_tile=None, window_right=0)
        problem.mask = None
        for name, result in computed(problem).items():
            torch.testing.assert_close(masked[name], result, rtol=1e-5, atol=1e-5)

    def test_nobody_sees_anything(self, device: str) -> None:
        problem = make_problem(Call(70, 70, (1, 1), (16, 16), mask=(1, 1), sinks=True), device)
        _masked(problem, torch.zeros(1, 1, 70, 70, dtype=torch.bool, device=device))
        results = computed(problem)
        assert torch.equal(results["lse"], problem.sinks.view(1, 1, 1).expand(1, 1, 70))
        for name in ("o", "dq", "dk", "dv"):
            assert not results[name].any(), name

    def test_rows_and_keys_that_see_nothing_are_zero(self, device: str) -> None:
        problem = make_problem(CASES["shared"], device)
        results = computed(problem)
        assert not results["o"][:, 50].any()
        assert not results["dq"][:, 50].any()
        assert torch.all(results["lse"][:, :, 50] == -math.inf)
        assert not results["dk"][:, 65].any()
        assert not results["dv"][:, 65].any()

    def test_keys_that_no_row_of_a_tile_sees_may_hold_nan(self, device: str) -> None:
        """Half of the rows see the poisoned keys of a partial tile: another tile's rows do not."""
        call = Call(128, 64, (1, 1), (16, 16), mask=(1, 1), mask_tile=LARGE)
        problem = make_problem(call, device)
        visible = torch.ones(1, 1, 128, 64, dtype=torch.bool, device=device)
        visible[..., 40:50] = False
        visible[..., 50:60, 50:] = False
        _masked(problem, visible, tile=128)
        problem.k[:, 40:50], problem.v[:, 40:50] = math.nan, math.inf
        results = computed(problem)
        problem.k, problem.v = problem.k.nan_to_num(0.0), problem.v.nan_to_num(0.0, 0.0, 0.0)
        assert_right(problem, results)

    def test_runs_are_bitwise_equal(self, device: str) -> None:
        problem = make_problem(CASES["of_each_head"], device)
        first, second = computed(problem), computed(problem)
        for name in first:
            assert torch.equal(first[name], second[name]), name
