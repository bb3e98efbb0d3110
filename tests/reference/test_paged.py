"""Paged attention equals dense attention on the gathered tokens, and reads nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.reference.paged import copy_blocks, gather_sequence, paged_attention, write_kv_cache
from tilewise.reference.standard import attention
from tilewise.testing import make_paged_cache

F64 = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}

CASES = {
    "decode": ([1, 1, 1], [5, 16, 33], {}),
    "one_token_in_all": ([1], [1], {}),
    "prefill": ([7, 16], [7, 16], {}),
    "chunked_prefill": ([4, 9], [20, 11], {}),
    "mixed_with_empty_runs": ([1, 0, 5, 0], [9, 3, 5, 0], {}),
    "window": ([1, 6], [30, 17], {"window": 4}),
    "window_tuple": ([1, 6], [30, 17], {"window": (4, None)}),
    "softcap_and_scale": ([2, 3], [8, 9], {"softcap": 2.0, "softmax_scale": 0.5}),
    "alibi": ([2, 3], [8, 9], {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 1.0])}),
    "sinks": ([2, 1], [8, 9], {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=F64)}),
}


@pytest.mark.parametrize("block_size", [1, 8, 16])
@pytest.mark.parametrize("name", CASES)
def test_equals_dense_attention_with_nan_in_unowned_slots(name, block_size):
    new, lengths, options = CASES[name]
    k_cache, v_cache, block_table, seqlens_k = make_paged_cache(
        lengths, block_size, 2, 6, v_head_dim=5, dtype=F64
    )
    cu_seqlens_q = torch.tensor([0, *new]).cumsum(0).int()
    q = torch.randn(sum(new) + 2, 4, 6, dtype=F64)  # two rows belong to nobody
    o, lse = paged_attention(
        q,
        k_cache,
        v_cache,
        block_table=block_table,
        seqlens_k=seqlens_k,
        cu_seqlens_q=cu_seqlens_q,
        return_lse=True,
        **options,
    )
    assert bool(o.isfinite().all())
    assert bool((o[sum(new) :] == 0).all())
    assert bool((lse[:, sum(new) :] == -math.inf).all())
    for b, length in enumerate(lengths):
        rows = slice(int(cu_seqlens_q[b]), int(cu_seqlens_q[b + 1]))
        k = torch.empty(1, length, 2, 6, dtype=F64)
        v = torch.empty(1, length, 2, 5, dtype=F64)
        for t in range(length):
            block = int(block_table[b, t // block_size])
            k[0, t], v[0, t] = k_cache[block, t % block_size], v_cache[block, t % block_size]
        want, want_lse = attention(
            q[rows].unsqueeze(0), k, v, causal=True, return_lse=True, **options
        )
        torch.testing.assert_close(o[rows], want[0], **EXACT)
        torch.testing.assert_close(lse[:, rows], want_lse[0], **EXACT)


def test_sequences_can_share_blocks():
    k_cache, v_cache, block_table, _ = make_paged_cache([8, 8], 4, 1, 4, dtype=F64)
    block_table[1, 0] = block_table[0, 0]
    q = torch.randn(1, 2, 4, dtype=F64).expand(2, 2, 4)
    call = {"block_table": block_table, "cu_seqlens_q": torch.tensor([0, 1, 2])}
    o = paged_attention(q, k_cache, v_cache, seqlens_k=torch.tensor([4, 4]), **call)
    assert torch.equal(o[0], o[1])
    o = paged_attention(q, k_cache, v_cache, seqlens_k=torch.tensor([8, 8]), **call)
    assert not torch.equal(o[0], o[1])


@pytest.mark.parametrize("length", [0, 3, 4, 5, 8])
def test_entries_past_the_last_block_are_never_read(length):
    k_cache, _, block_table, _ = make_paged_cache([length], 4, 1, 4, dtype=F64)
    owned = block_table[0, : -(-length // 4)]
    wild = torch.cat([owned, torch.tensor([10**6, -(10**6)], dtype=torch.int32)])
    got = gather_sequence(k_cache, wild, length)
    assert torch.equal(got, k_cache[owned.long()].flatten(0, 1)[:length])
    assert not got.isnan().any()


def test_written_tokens_are_found_again_and_minus_one_skips():
    k_cache = torch.full((4, 3, 2, 5), math.nan, dtype=torch.bfloat16)
    v_cache = torch.full((4, 3, 2, 6), math.nan, dtype=torch.bfloat16)
    k, v = torch.randn(5, 2, 5), torch.randn(5, 2, 6)
    slots = torch.tensor([7, -1, 0, 10, 4])
    write_kv_cache(k, v, k_cache, v_cache, slots)
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(k_cache[slot // 3, slot % 3], k[row].bfloat16())
            assert torch.equal(v_cache[slot // 3, slot % 3], v[row].bfloat16())
    assert int((~k_cache.isnan()).all(-1).all(-1).sum()) == 4


def test_writing_reaches_a_strided_view_of_one_shared_tensor():
    both = torch.zeros(3, 4, 2, 1, 5)
    write_kv_cache(
        torch.ones(1, 1, 5),
        2 * torch.ones(1, 1, 5),
        both[:, :, 0],
        both[:, :, 1],
        torch.tensor([6]),
    )
    assert both[1, 2, 0].unique().tolist() == [1]
    assert both[1, 2, 1].unique().tolist() == [2]
    assert int(both.count_nonzero()) == 10


def test_blocks_are_copied_whole():
    k_cache, v_cache = torch.randn(5, 3, 1, 4), torch.randn(5, 3, 1, 2)
    old_k, old_v = k_cache.clone(), v_cache.clone()
    copy_blocks(k_cache, v_cache, torch.tensor([[0, 3], [0, 4], [2, 1]]))
    assert torch.equal(k_cache, old_k[[0, 2, 2, 0, 0]])
    assert torch.equal(v_cache, old_v[[0, 2, 2, 0, 0]])
    copy_blocks(k_cache, v_cache, torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(k_cache, old_k[[0, 2, 2, 0, 0]])
