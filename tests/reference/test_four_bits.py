"""What four-bit rows stand for, and how far that is from what was written."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.reference.four_bits import (
    hadamard_matrix,
    pack,
    rotate,
    rotate_back,
    rotated_channels,
    unpack,
)

WIDTHS = [16, 24, 64, 80, 96, 128, 192, 256, 576]


@pytest.mark.parametrize("width", WIDTHS)
def test_rotation_is_orthonormal(width: int):
    x = torch.randn(5, 3, width, dtype=torch.float64)
    y = rotate(x)
    assert not torch.allclose(x, y, atol=1e-2)
    torch.testing.assert_close(rotate_back(y), x)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    other = torch.randn_like(x)
    torch.testing.assert_close((rotate(other) * y).sum(-1), (other * x).sum(-1))


def test_channels_of_different_groups_do_not_mix():
    x = torch.zeros(1, 192)
    x[0, 70] = 1.0
    assert rotated_channels(192) == 64
    assert rotate(x).nonzero()[:, 1].tolist() == list(range(64, 128))


@pytest.mark.parametrize("width", [16, 64, 128])
def test_what_all_channels_have_in_common_is_spread(width: int):
    """Each row of the matrix is a pattern of signs; none stays in few channels."""
    patterns = hadamard_matrix(width) * math.sqrt(width)
    assert float(rotate(patterns).abs().max()) <= math.sqrt(2) + 1e-9


def test_the_matrix_is_sylvesters():
    assert (hadamard_matrix(4) * 2).tolist() == [
        [1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1],
    ]  # fmt: skip


@pytest.mark.parametrize("spread", [0.0, 8.0], ids=["alike", "of many magnitudes"])
@pytest.mark.parametrize("offset", [0.0, 5.0], ids=["around 0", "beside 0"])
def test_each_rotated_channel_is_within_its_rows_scale(spread: float, offset: float):
    x = (torch.randn(50, 4, 128) + offset) * torch.exp2(spread * torch.randn(50, 4, 1))
    stored, scale = pack(x)
    error = (rotate(unpack(stored, scale, torch.float64)) - rotate(x.double())).abs()
    ratio = error / scale.double().unsqueeze(-1)
    assert float(ratio.max()) <= 1.0001
    assert float(ratio.max()) > 0.45
    assert {*(stored & 15).flatten().tolist()} == set(range(16))


def test_errors_of_random_rows_are_those_of_fifteen_steps():
    """Uniform over a step of (highest - lowest) / 15: step / sqrt(12)."""
    x = torch.randn(500, 128, dtype=torch.float64)
    rows = rotate(x)
    step = (rows.amax(-1) - rows.amin(-1)).mean() / 15
    stored, scale = pack(x)
    error = (unpack(stored, scale, torch.float64) - x).square().mean().sqrt()
    assert 0.9 * step / math.sqrt(12) < error < 1.15 * step / math.sqrt(12)


def test_an_outlier_costs_less_than_it_would_without_rotation():
    x = torch.randn(200, 128)
    x[:, 7] *= 30
    stored, scale = pack(x)
    error = (unpack(stored, scale, torch.float32) - x)[:, :7].norm() / x[:, :7].norm()
    step = (x.amax(-1) - x.amin(-1)) / 15
    plain = ((x / step[:, None]).round() * step[:, None] - x)[:, :7].norm() / x[:, :7].norm()
    assert float(error) < 0.45 * float(plain)


def test_rows_of_zeros_of_next_to_nothing_and_of_no_numbers():
    x = torch.randn(5, 16)
    x[0], x[1], x[2, 3], x[3, 4] = 0.0, 1e-38, math.inf, math.nan
    stored, scale = pack(x)
    assert scale[:2].tolist() == [0.0, 0.0]
    assert scale[2:4].isnan().all()
    assert not stored[:4].any()
    values = unpack(stored, scale, torch.float32)
    assert not values[:2].any()
    assert values[2:4].isnan().all()
    assert values[4].isfinite().all()
