"""The rule of e4m3 attention: scales, rounding, rotation, the bound on rounded probabilities."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.reference import fp8, standard

_HALF_STEP = 2.0**-4  # of a normal e4m3 number
_HALF_SUBNORMAL = 2.0**-10


def _matrix(head_dim: int, seed: int) -> torch.Tensor:
    return fp8.rotation_matrix(head_dim, seed).double() * head_dim**-0.5


def test_the_largest_entry_of_a_head_becomes_the_largest_number():
    x = torch.randn(2, 9, 3, 8)
    x8, scale = fp8.quantize_heads(x)
    assert x8.dtype == torch.float8_e4m3fn
    assert torch.equal(x8.float().abs().amax(dim=(1, 3)), torch.full((2, 3), 448.0))
    torch.testing.assert_close(scale, x.abs().amax(dim=(1, 3)) / 448.0)


def test_heads_of_zeros_have_scale_one():
    x = torch.zeros(1, 4, 2, 8)
    x[0, :, 1] = 3.0
    x8, scale = fp8.quantize_heads(x)
    assert scale[0, 0] == 1.0
    assert torch.equal(x8[:, :, 0].float(), torch.zeros(1, 4, 8))


def test_empty_sequences_have_scale_one():
    x8, scale = fp8.quantize_heads(torch.zeros(2, 0, 3, 8))
    assert x8.shape == (2, 0, 3, 8)
    assert torch.equal(scale, torch.ones(2, 3))


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    magnitude=st.integers(-90, 100),
    spread=st.integers(0, 24),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_every_entry_is_off_by_half_a_step_at_most(seed, magnitude, spread, dtype):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 5, 2, 16, generator=generator) * 2.0**magnitude
    x = (x * 2.0 ** -torch.randint(0, spread + 1, x.shape, generator=generator)).to(dtype)
    x8, scale = fp8.quantize_heads(x)
    restored = fp8.dequantize_heads(x8, scale)
    wide = scale.double()[:, None, :, None]
    # float32's own rounding of the product and of the scale comes on top.
    allowed = torch.maximum(_HALF_STEP * x.double().abs(), _HALF_SUBNORMAL * wide) * (1 + 2.0**-20)
    assert bool(((restored - x.double()).abs() <= allowed).all())
    assert bool(x8.float().isfinite().all())


def test_quantising_twice_changes_nothing():
    x8, scale = fp8.quantize_heads(torch.randn(2, 7, 2, 16))
    again, scale_again = fp8.quantize_heads(fp8.dequantize_heads(x8, scale, torch.float32))
    torch.testing.assert_close(scale_again, scale, rtol=2**-22, atol=0)
    assert torch.equal(again.view(torch.uint8), x8.view(torch.uint8))


def test_rows_past_a_sequence_do_not_count():
    x = torch.randn(2, 6, 2, 8)
    x[1, 4:] = float("nan")
    x8, scale = fp8.quantize_heads(x, seqlens=torch.tensor([6, 4]))
    alone, scale_alone = fp8.quantize_heads(x[1:, :4])
    assert torch.equal(x8[1, :4].view(torch.uint8), alone[0].view(torch.uint8))
    assert torch.equal(x8[1, 4:].float(), torch.zeros(2, 2, 8))
    assert torch.equal(scale[1], scale_alone[0])


@pytest.mark.parametrize("head_dim", [1, 2, 64, 256])
def test_rotations_are_orthonormal(head_dim):
    matrix = _matrix(head_dim, 3)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(head_dim, dtype=torch.float64))
    assert torch.equal(fp8.rotation_matrix(head_dim, 3).abs(), torch.ones(head_dim, head_dim))


def test_the_matrix_is_the_hadamard_matrix_with_random_signs():
    matrix = fp8.rotation_matrix(16, 5)
    signs = matrix[:, :1]
    for i in range(16):
        for j in range(16):
            assert matrix[i, j] == signs[i, 0] * (-1.0) ** (i & j).bit_count()
    assert not torch.equal(fp8.rotation_matrix(64, 1), fp8.rotation_matrix(64, 2))
    assert torch.equal(fp8.rotation_matrix(64, 1), fp8.rotation_matrix(64, 1))


def test_rotating_queries_and_keys_keeps_their_products():
    q, k = torch.randn(1, 5, 1, 64).double(), torch.randn(1, 7, 1, 64).double()
    matrix = _matrix(64, 11)
    before = torch.einsum("bqhd,bkhd->bhqk", q, k)
    after = torch.einsum("bqhd,bkhd->bhqk", q @ matrix, k @ matrix)
    torch.testing.assert_close(after, before)


def test_a_rotation_spreads_an_outlier_over_its_channels():
    x = torch.zeros(1, 4, 1, 64)
    x[..., 17] = 64.0
    x8, scale = fp8.quantize_heads(x, rotation=0)
    assert torch.equal(x8.float().abs(), torch.full((1, 4, 1, 64), 448.0))
    assert scale.item() == pytest.approx(8.0 / 448.0)


def test_rotation_makes_outliers_cost_less():
    # The paper's data, N(0, 1) + N(0, 100) * Bernoulli(0.001); six seeds gave 0.58 to 0.70.
    torch.manual_seed(2)
    shape = (1, 512, 2, 128)
    q, k = (
        torch.randn(shape) + 10 * torch.randn(shape) * (torch.rand(shape) < 1e-3) for _ in range(2)
    )
    v = torch.randn(shape).double()
    truth = standard.attention(q.double(), k.double(), v)

    def error(rotation: int | None) -> float:
        a, b = (fp8.dequantize_heads(*fp8.quantize_heads(x, rotation=rotation)) for x in (q, k))
        return (standard.attention(a, b, v) - truth).square().mean().sqrt().item()

    assert error(0) < 0.85 * error(None)


def test_only_powers_of_two_are_rotated():
    with pytest.raises(ValueError, match="power of two, got 96"):
        fp8.quantize_heads(torch.randn(1, 2, 1, 96), rotation=0)


def test_attention_is_that_of_the_dequantised_values():
    q, k, v = torch.randn(2, 5, 4, 16), torch.randn(2, 9, 2, 16), torch.randn(2, 9, 2, 16)
    pairs = [fp8.quantize_heads(x) for x in (q, k, v)]
    tensors, scales = zip(*pairs, strict=True)
    lengths = torch.tensor([9, 4])
    o, lse = fp8.attention(*tensors, *scales, causal=True, seqlens_k=lengths)
    wide = [fp8.dequantize_heads(*pair) for pair in pairs]
    want = standard.attention(*wide, causal=True, seqlens_k=lengths, return_lse=True)
    assert torch.equal(o, want[0])
    assert torch.equal(lse, want[1])
    assert o.dtype == torch.float64


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), sharpness=st.sampled_from([0.1, 1.0, 4.0, 12.0]))
def test_rounding_probabilities_stays_within_its_bound(seed, sharpness):
    generator = torch.Generator().manual_seed(seed)
    s = torch.randn(3, 40, generator=generator).double() * sharpness
    v = torch.randn(40, 8, generator=generator).double()
    p = torch.softmax(s, dim=-1)
    top = p.amax(dim=-1, keepdim=True)
    rounded = (256 * p / top).float().to(torch.float8_e4m3fn).double() * top / 256
    largest, typical = fp8.probability_bound(p, v)
    error = (rounded @ v - p @ v).abs()
    assert bool((error <= largest * (1 + 1e-6)).all())
    assert bool((typical <= largest).all())
