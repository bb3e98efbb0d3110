"""Merging attention over two halves of the keys gives attention over all of them."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.reference.merge import merge_states
from tilewise.reference.standard import attention
from tilewise.testing import make_qkv

F64 = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.mark.parametrize("split", [0, 1, 4, 7])
def test_two_parts_make_the_whole(split):
    q, k, v = make_qkv(2, 5, 7, 4, 2, 6, v_head_dim=3, dtype=F64)
    want, want_lse = attention(q, k, v, return_lse=True)
    a = attention(q, k[:, :split], v[:, :split], return_lse=True)
    b = attention(q, k[:, split:], v[:, split:], return_lse=True)
    o, lse = merge_states(*a, *b)
    torch.testing.assert_close(o, want, **EXACT)
    torch.testing.assert_close(lse, want_lse, **EXACT)
    packed_o, packed_lse = merge_states(a[0][0], a[1][0], b[0][0], b[1][0])
    torch.testing.assert_close(packed_o, want[0], **EXACT)
    torch.testing.assert_close(packed_lse, want_lse[0], **EXACT)


def test_a_side_that_saw_nothing_does_not_count_whatever_it_holds():
    o_a, o_b = torch.full((2, 1, 3), math.nan), torch.randn(2, 1, 3)
    empty, lse_b = torch.full((1, 2), -math.inf), torch.tensor([[0.5, -math.inf]])
    for o, lse in (merge_states(o_a, empty, o_b, lse_b), merge_states(o_b, lse_b, o_a, empty)):
        assert torch.equal(o[0], o_b[0])
        assert torch.equal(o[1], torch.zeros(1, 3))
        assert lse.tolist() == [[0.5, -math.inf]]


def test_by_hand():
    """Weights 1 and 3: o = (1 * 8 + 3 * 4) / 4 = 5, lse = log 4."""
    o, lse = merge_states(
        torch.tensor([[[8.0]]]),
        torch.tensor([[0.0]]),
        torch.tensor([[[4.0]]]),
        torch.tensor([[3.0]]).log(),
    )
    torch.testing.assert_close(o, torch.tensor([[[5.0]]]))
    torch.testing.assert_close(lse, torch.tensor([[4.0]]).log())


def test_large_lse_does_not_overflow():
    o_a, o_b = torch.ones(1, 1, 2), 3 * torch.ones(1, 1, 2)
    o, lse = merge_states(o_a, torch.tensor([[1e4]]), o_b, torch.tensor([[1e4]]))
    torch.testing.assert_close(o, 2 * torch.ones(1, 1, 2))
    torch.testing.assert_close(lse, torch.tensor([[1e4 + math.log(2)]]))


def test_order_does_not_matter_and_dtype_is_kept():
    o_a, o_b = torch.randn(2, 4, 2, 8).bfloat16()
    lse_a, lse_b = torch.randn(2, 2, 4)
    o, lse = merge_states(o_a, lse_a, o_b, lse_b)
    swapped, swapped_lse = merge_states(o_b, lse_b, o_a, lse_a)
    assert o.dtype == torch.bfloat16
    assert lse.dtype == torch.float32
    assert torch.equal(o, swapped)
    assert torch.equal(lse, swapped_lse)


def test_gradients_pass_gradcheck_and_are_zero_where_nothing_was_seen():
    o_a, o_b = torch.randn(2, 3, 2, 4, dtype=F64).unbind()
    lse_a, lse_b = torch.randn(2, 2, 3, dtype=F64).unbind()
    inputs = [x.clone().requires_grad_() for x in (o_a, lse_a, o_b, lse_b)]
    assert torch.autograd.gradcheck(merge_states, inputs)
    lse_a, lse_b = lse_a.clone(), lse_b.clone()
    lse_a[:, 0], lse_b[:, 0] = -math.inf, -math.inf
    inputs = [x.clone().requires_grad_() for x in (o_a, lse_a, o_b, lse_b)]
    o, _ = merge_states(*inputs)
    o.sum().backward()
    assert bool((inputs[0].grad[0] == 0).all())
    assert bool((inputs[1].grad[:, 0] == 0).all())
    assert all(bool(x.grad.isfinite().all()) for x in inputs)
