"""Rotation: the matrix of the definition, both pairings, and that only distance matters."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.reference.rope import apply_rope, rope_cos_sin

F64 = torch.float64


def rotation_matrix(position: float, rotary_dim: int, head_dim: int, interleaved: bool):
    """Build the (D, D) block rotation of one position entry by entry."""
    matrix = torch.eye(head_dim, dtype=F64)
    for i in range(rotary_dim // 2):
        angle = position * 10000.0 ** (-2 * i / rotary_dim)
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary_dim // 2)
        matrix[a, a] = matrix[b, b] = math.cos(angle)
        matrix[a, b], matrix[b, a] = -math.sin(angle), math.sin(angle)
    return matrix


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("rotary_dim", "head_dim"), [(8, 8), (4, 8), (2, 3), (6, 6)])
def test_equals_the_rotation_matrix(rotary_dim, head_dim, interleaved):
    positions = torch.tensor([0, 1, 7, 1000])
    x = torch.randn(4, 3, head_dim, dtype=F64)
    cos, sin = rope_cos_sin(positions, rotary_dim, dtype=F64)
    got = apply_rope(x, cos, sin, interleaved=interleaved)
    for t, position in enumerate(positions.tolist()):
        matrix = rotation_matrix(position, rotary_dim, head_dim, interleaved)
        torch.testing.assert_close(got[t], x[t] @ matrix.T)
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])
    assert torch.equal(got[0], x[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_products_depend_on_the_difference_of_positions(interleaved):
    q, k = torch.randn(2, 1, 1, 8, dtype=F64)

    def product(position_q: int, position_k: int) -> float:
        turned = [
            apply_rope(x, *rope_cos_sin(torch.tensor([p]), 8, dtype=F64), interleaved=interleaved)
            for x, p in ((q, position_q), (k, position_k))
        ]
        return float((turned[0] * turned[1]).sum())

    assert product(9, 4) == pytest.approx(product(105, 100), abs=1e-12)
    assert product(9, 4) != pytest.approx(product(9, 5), abs=1e-3)


def test_positions_of_a_batch_may_be_shared_or_its_own():
    x = torch.randn(2, 5, 3, 8, dtype=F64)
    cos, sin = rope_cos_sin(torch.arange(5), 8, dtype=F64)
    shared = apply_rope(x, cos, sin)
    own = apply_rope(x, cos.expand(2, 5, 4), sin.expand(2, 5, 4))
    assert torch.equal(shared, own)
    assert torch.equal(shared[1], apply_rope(x[1], cos, sin))


def test_the_two_pairings_differ_by_a_permutation():
    x = torch.randn(4, 2, 8, dtype=F64)
    cos, sin = rope_cos_sin(torch.arange(4), 8, dtype=F64)
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])  # interleaved channels, first halves first
    got = apply_rope(x, cos, sin, interleaved=True)[..., order]
    torch.testing.assert_close(got, apply_rope(x[..., order], cos, sin))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_dtypes_are_rounded_once(dtype):
    x = torch.randn(6, 2, 8).to(dtype)
    cos, sin = rope_cos_sin(torch.arange(6), 8)
    got = apply_rope(x, cos, sin)
    want = apply_rope(x.double(), cos.double(), sin.double())
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=1e-6)


def test_gradient_is_the_rotation_back():
    x = torch.randn(3, 2, 8, dtype=F64, requires_grad=True)
    cos, sin = rope_cos_sin(torch.arange(3), 6, dtype=F64)
    do = torch.randn(3, 2, 8, dtype=F64)
    apply_rope(x, cos, sin).backward(do)
    torch.testing.assert_close(x.grad, apply_rope(do, cos, -sin))
