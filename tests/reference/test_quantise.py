"""What 8-bit rows stand for, and how far that is from what was written."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.reference.quantise import LIMITS, dequantise, quantise, row_scale

by_dtype = pytest.mark.parametrize("dtype", LIMITS, ids=lambda d: str(d)[6:])
EPS = torch.finfo(torch.float32).eps


def error_bound(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The bound of the module's head, for x (..., D) in float64."""
    amax = x.abs().amax(-1, keepdim=True)
    if dtype == torch.int8:
        return amax / 254 + 2 * EPS * amax
    return torch.maximum(x.abs() / 16, amax / 448 / 1024) + 2 * EPS * x.abs()


@by_dtype
@pytest.mark.parametrize("spread", [0.0, 8.0], ids=["alike", "of many magnitudes"])
def test_values_come_back_within_the_bound_of_their_format(dtype, spread):
    x = torch.randn(50, 4, 128) * torch.exp2(spread * torch.randn(50, 4, 128))
    scale = row_scale(x, dtype)
    back = dequantise(quantise(x, scale, dtype), scale, torch.float64)
    error = (back - x.double()).abs()
    assert bool((error <= error_bound(x.double(), dtype)).all())
    # The bound is no looser than the format: some element comes near it.
    assert float((error / error_bound(x.double(), dtype)).max()) > 0.9


@by_dtype
def test_errors_of_random_rows_are_what_their_steps_predict(dtype):
    """Uniform over a step: amax / 127 / sqrt(12) for int8; about 2.6 % of e4m3's own size."""
    x = torch.randn(500, 128, dtype=torch.float64)
    scale = row_scale(x, dtype)
    error = (dequantise(quantise(x, scale, dtype), scale, torch.float64) - x).norm() / x.norm()
    amax = x.abs().amax(-1).mean()
    expected = float(amax) / 127 / math.sqrt(12) if dtype == torch.int8 else 0.026
    assert 0.8 * expected < float(error) < 1.2 * expected


@by_dtype
def test_the_largest_channel_is_the_limit(dtype):
    x = torch.randn(20, 64)
    stored = quantise(x, row_scale(x, dtype), dtype).float()
    assert torch.equal(stored.abs().amax(-1), torch.full((20,), LIMITS[dtype]))


@by_dtype
def test_rows_of_zeros_and_of_next_to_nothing_are_zeros(dtype):
    x = torch.stack([torch.zeros(8), torch.full((8,), 1e-38)])
    scale = row_scale(x, dtype)
    assert scale.tolist() == [0.0, 0.0]
    assert bool((quantise(x, scale, dtype).float() == 0).all())


@by_dtype
@pytest.mark.parametrize("intruder", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_has_no_scale(dtype, intruder):
    x = torch.ones(2, 8)
    x[0, 3] = intruder
    scale = row_scale(x, dtype)
    assert math.isnan(scale[0])
    assert scale[1] == pytest.approx(1 / LIMITS[dtype])
    assert bool(dequantise(quantise(x, scale, dtype), scale, torch.float32)[0].isnan().all())


@by_dtype
def test_a_given_scale_saturates(dtype):
    limit = LIMITS[dtype]
    x = torch.tensor([1.0, -1.0, 1e30, -math.inf, math.nan]) * limit
    stored = quantise(x, torch.tensor(0.5), dtype).float()
    assert stored.tolist() == [limit, -limit, limit, -limit, 0.0]
