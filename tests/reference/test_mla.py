"""Latent attention: absorbed equals expanded, paged equals dense, and what must not commute."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.reference.mla import (
    MlaWeights,
    mla_absorbed,
    mla_decode,
    mla_expanded,
    mla_latents,
)
from tilewise.reference.rope import apply_rope, rope_cos_sin
from tilewise.reference.standard import attention

F64 = torch.float64
EXACT = {"rtol": 1e-10, "atol": 1e-10}


def make_weights(
    *, num_heads: int = 3, hidden: int = 16, m: int = 6, r: int = 5, d: int = 4, dr: int = 4, dv=7
) -> MlaWeights:
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "d_q": (hidden, m),
        "u_q": (num_heads, m, d),
        "v_q": (num_heads, m, dr),
        "d_kv": (hidden, r),
        "u_k": (num_heads, r, d),
        "u_v": (num_heads, r, dv),
        "d_k": (hidden, dr),
        "w_o": (num_heads, dv, hidden),
    }
    return MlaWeights(
        **{
            name: torch.randn(shape, dtype=F64, generator=generator) / shape[-2] ** 0.5
            for name, shape in shapes.items()
        }
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("num_heads", [1, 3])
def test_absorbed_equals_expanded(num_heads, interleaved, causal):
    weights = make_weights(num_heads=num_heads)
    x = torch.randn(2, 9, 16, dtype=F64)
    cos, sin = rope_cos_sin(torch.arange(9), 4, dtype=F64)
    expanded = mla_expanded(x, weights, cos, sin, causal=causal, interleaved=interleaved)
    absorbed = mla_absorbed(x, weights, cos, sin, causal=causal, interleaved=interleaved)
    assert expanded.shape == x.shape
    torch.testing.assert_close(absorbed, expanded, **EXACT)


@pytest.mark.parametrize("interleaved", [False, True])
def test_only_the_difference_of_positions_matters(interleaved):
    weights, x = make_weights(), torch.randn(1, 6, 16, dtype=F64)
    near, far, stretched = (
        mla_expanded(x, weights, *rope_cos_sin(at, 4, dtype=F64), interleaved=interleaved)
        for at in (torch.arange(6), torch.arange(6) + 100, 2 * torch.arange(6))
    )
    torch.testing.assert_close(far, near, **EXACT)
    assert not torch.allclose(stretched, near, atol=1e-3)


def test_one_head_without_rotation_is_the_formula_of_the_paper():
    """softmax(X D_q E Z^T / sqrt(d)) Z F with E = U_q U_k^T and F = U_v W_f."""
    w = make_weights(num_heads=1)
    x = torch.randn(1, 6, 16, dtype=F64)
    still = (torch.ones(6, 2, dtype=F64), torch.zeros(6, 2, dtype=F64))
    z, e, f = x @ w.d_kv, w.u_q[0] @ w.u_k[0].T, w.u_v[0] @ w.w_o[0]
    rotated_part = (x @ w.d_q @ w.v_q[0]) @ (x @ w.d_k).mT
    scores = (x @ w.d_q @ e @ z.mT + rotated_part) / math.sqrt(4 + 4)
    want = scores.softmax(-1) @ z @ f
    torch.testing.assert_close(mla_absorbed(x, w, *still, causal=False), want, **EXACT)


def test_a_rotation_of_the_up_projected_key_cannot_be_absorbed():
    """q R_t (R_s U_k z) is not q (U_q U_k^T) z: why the rotated part is a separate key."""
    w = make_weights(num_heads=1)
    cos, sin = rope_cos_sin(torch.arange(5), 4, dtype=F64)
    c_q, z = torch.randn(1, 5, 6, dtype=F64), torch.randn(1, 5, 5, dtype=F64)
    q = apply_rope((c_q @ w.u_q[0]).unsqueeze(2), cos, sin).squeeze(2)
    k = apply_rope((z @ w.u_k[0]).unsqueeze(2), cos, sin).squeeze(2)
    difference = q @ k.mT - c_q @ w.u_q[0] @ w.u_k[0].T @ z.mT
    assert float(difference.diagonal(dim1=1, dim2=2).abs().max()) < 1e-12  # same position
    assert float(difference.abs().max()) > 1e-2


@pytest.mark.parametrize("new", [[1, 1, 1], [3, 0, 9]])
def test_decode_from_a_paged_cache_equals_expanded(new):
    w = make_weights()
    lengths, block_size = [5, 8, 9], 4
    cache = torch.full((12, block_size, 5 + 4), math.nan, dtype=F64)
    block_table = torch.full((3, 3), -1, dtype=torch.int32)
    blocks = iter([7, 2, 11, 0, 5, 9, 4])
    q_latents, q_ropes, wants = [], [], []
    e = torch.einsum("hmd,hrd->hmr", w.u_q, w.u_k)
    f = torch.einsum("hrd,hdn->hrn", w.u_v, w.w_o)
    for b, length in enumerate(lengths):
        x = torch.randn(1, length, 16, dtype=F64)
        cos, sin = rope_cos_sin(torch.arange(length), 4, dtype=F64)
        c_q, q_rope, z, k_rope = mla_latents(x, w, cos, sin)
        latents = torch.cat([z, k_rope], -1)[0]
        for column in range(-(-length // block_size)):
            block_table[b, column] = next(blocks)
            part = latents[column * block_size : (column + 1) * block_size]
            cache[block_table[b, column], : len(part)] = part
        first = length - new[b]
        q_latents.append(torch.einsum("sm,hmr->shr", c_q[0, first:], e))
        q_ropes.append(q_rope[0, first:])
        wants.append(mla_expanded(x, w, cos, sin)[0, first:])
    o, lse = mla_decode(
        torch.cat(q_latents),
        torch.cat(q_ropes),
        cache,
        block_table=block_table,
        seqlens_k=torch.tensor(lengths),
        cu_seqlens_q=torch.tensor([0, *new]).cumsum(0),
        softmax_scale=w.softmax_scale,
        return_lse=True,
    )
    assert o.shape == (sum(new), 3, 5)
    assert lse.shape == (3, sum(new))
    torch.testing.assert_close(torch.einsum("thr,hrn->tn", o, f), torch.cat(wants), **EXACT)


def test_rotated_scores_are_the_sum_of_two_products():
    w = make_weights()
    x = torch.randn(1, 6, 16, dtype=F64)
    cos, sin = rope_cos_sin(torch.arange(6), 4, dtype=F64)
    c_q, q_rope, z, k_rope = mla_latents(x, w, cos, sin)
    q = torch.einsum("bsm,hmd->bshd", c_q, w.u_q)
    k = torch.einsum("bsr,hrd->bshd", z, w.u_k)
    shared = k_rope.unsqueeze(2).expand(1, 6, 3, 4)
    scores = torch.einsum("bshd,bthd->bhst", q, k) + torch.einsum("bshd,btd->bhst", q_rope, k_rope)
    _, lse = attention(
        torch.cat([q, q_rope], -1),
        torch.cat([k, shared], -1),
        k,
        softmax_scale=w.softmax_scale,
        return_lse=True,
    )
    torch.testing.assert_close(lse, (scores * w.softmax_scale).logsumexp(-1), **EXACT)
