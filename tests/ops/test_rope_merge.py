"""apply_rope and merge_states on every backend, with their gradients."""

from __future__ import annotations

import pytest
import torch

from tilewise import ops
from tilewise.reference import rope as rope_oracle
from tilewise.testing import assert_within_budget

BACKENDS = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("triton", "cpu", id="triton-interpreted"),
    pytest.param("triton", "cuda", id="triton", marks=pytest.mark.gpu),
]
ROPE = {
    "packed": ((7, 3, 16), (7, 8)),
    "dense_shared_table": ((2, 5, 3, 16), (5, 8)),
    "dense_own_tables": ((2, 5, 3, 16), (2, 5, 8)),
    "partial": ((6, 2, 24), (6, 4)),
    "no_tokens": ((0, 2, 16), (0, 8)),
    "no_columns": ((7, 3, 16), (7, 0)),
    "dense_no_columns": ((2, 5, 3, 16), (5, 0)),
}


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
class TestRope:
    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("name", ROPE)
    def test_rotation_keeps_the_budget(self, name, interleaved, backend, place):
        x_shape, table_shape = ROPE[name]
        x, angles = torch.randn(x_shape, device=place), torch.randn(table_shape, device=place)
        cos, sin = angles.cos(), angles.sin()
        got = ops.apply_rope(x, cos, sin, interleaved=interleaved, backend=backend)
        truth = rope_oracle.apply_rope(
            x.double(), cos.double(), sin.double(), interleaved=interleaved
        )
        eager = rope_oracle.apply_rope(x, cos, sin, interleaved=interleaved)
        assert_within_budget(got, truth, eager)
        assert got.is_contiguous()
        assert got.data_ptr() != x.data_ptr() or x.numel() == 0

    def test_the_gradient_rotates_back(self, backend, place):
        x = torch.randn(6, 2, 16, device=place, requires_grad=True)
        angles = torch.randn(6, 8, device=place)
        out = ops.apply_rope(x, angles.cos(), angles.sin(), backend=backend)
        out.backward(out.detach())
        torch.testing.assert_close(x.grad, x.detach(), atol=1e-5, rtol=1e-5)

    def test_bfloat16_is_rotated_in_float32(self, backend, place):
        x = torch.randn(40, 2, 64, device=place).bfloat16()
        angles = torch.randn(40, 32, device=place)
        got = ops.apply_rope(x, angles.cos(), angles.sin(), backend=backend)
        want = rope_oracle.apply_rope(x.float(), angles.cos(), angles.sin()).bfloat16()
        torch.testing.assert_close(got, want, atol=0, rtol=2**-7)


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
class TestMergeStates:
    def test_split_keys_merge_into_the_whole(self, backend, place):
        q = torch.randn(2, 5, 4, 64, device=place)
        k, v = (torch.randn(2, 30, 2, 64, device=place) for _ in range(2))
        whole = ops.attention(q, k, v, return_lse=True)
        parts = [
            ops.attention(q, k[:, keys], v[:, keys], return_lse=True)
            for keys in (slice(0, 11), slice(11, 30))
        ]
        merged = ops.merge_states(*parts[0], *parts[1], backend=backend)
        for got, want in zip(merged, whole, strict=True):
            torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)

    def test_a_side_without_keys_adds_nothing(self, backend, place):
        o = torch.randn(3, 2, 16, device=place)
        lse = torch.randn(2, 3, device=place)
        nothing, never = torch.full_like(o, 7.0), torch.full_like(lse, -torch.inf)
        for arguments in ((o, lse, nothing, never), (nothing, never, o, lse)):
            merged, merged_lse = ops.merge_states(*arguments, backend=backend)
            torch.testing.assert_close(merged, o)
            torch.testing.assert_close(merged_lse, lse)
        merged, merged_lse = ops.merge_states(nothing, never, nothing, never, backend=backend)
        assert torch.equal(merged, torch.zeros_like(o))
        assert bool(merged_lse.isneginf().all())

    def test_a_side_that_is_nan_counts_beside_one_without_keys(self, backend, place):
        o, never = torch.ones(3, 2, 16, device=place), torch.full((2, 3), -torch.inf, device=place)
        broken = torch.full_like(never, torch.nan)
        for arguments in ((o, broken, o, never), (o, never, o, broken)):
            merged, lse = ops.merge_states(*arguments, backend=backend)
            assert bool(merged.isnan().all())
            assert bool(lse.isnan().all())

    def test_the_gradient_equals_that_of_the_formula(self, backend, place):
        def formula(o_a, lse_a, o_b, lse_b):
            lse = torch.logaddexp(lse_a, lse_b)
            w_a, w_b = ((x - lse).exp().transpose(0, 1)[..., None] for x in (lse_a, lse_b))
            return w_a * o_a + w_b * o_b, lse

        leaves = [
            torch.randn(shape, device=place, requires_grad=True)
            for shape in ((3, 2, 16), (2, 3), (3, 2, 16), (2, 3))
        ]
        do, dlse = torch.randn(3, 2, 16, device=place), torch.randn(2, 3, device=place)
        got, want = (
            torch.autograd.grad(f(*leaves), leaves, (do, dlse))
            for f in (lambda *t: ops.merge_states(*t, backend=backend), formula)
        )
        for ours, theirs in zip(got, want, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
