"""Slots and blocks outside of the cache are refused on a CPU, and nothing has been written then."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from tilewise import ops

BLOCKS, SIZE, HEADS, DIM = 6, 4, 2, 8


def make_cache(dtype=torch.float32):
    return [torch.zeros(BLOCKS, SIZE, HEADS, DIM, dtype=dtype) for _ in range(2)]


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("slot", [BLOCKS * SIZE, 2**40, -2], ids=["next", "far", "negative"])
def test_a_slot_outside_of_the_cache_is_refused(slot, dtype):
    caches, rows = make_cache(dtype), torch.ones(2, HEADS, DIM)
    scales = {}
    if dtype == torch.int8:
        scales = {name: torch.zeros(BLOCKS, SIZE, HEADS) for name in ("k_scale", "v_scale")}
    slots = torch.tensor([1, slot])
    message = rf"slot_mapping must lie in \[-1, {BLOCKS * SIZE - 1}\], got {slot}"
    with pytest.raises(ValueError, match=message):
        ops.write_kv_cache(rows, rows, *caches, slots, **scales)
    angles = torch.zeros(2, DIM // 2)
    with pytest.raises(ValueError, match=message):
        ops.rope_write_kv_cache(rows, rows, rows, *caches, slots, cos=angles, sin=angles, **scales)
    assert not any(cache.any() for cache in caches)
    ops.write_kv_cache(rows, rows, *caches, torch.tensor([-1, BLOCKS * SIZE - 1]), **scales)
    assert all(cache[-1, -1].any() and not cache[0].any() for cache in caches)


def test_a_latents_slot_outside_of_the_cache_is_refused():
    cache = torch.zeros(BLOCKS, SIZE, 12)
    with pytest.raises(ValueError, match=r"slot_mapping must lie in \[-1, 23\], got 24"):
        ops.write_latent_cache(
            torch.ones(1, 8), torch.ones(1, 4), cache, torch.tensor([BLOCKS * SIZE])
        )


@pytest.mark.parametrize("pair", [(0, BLOCKS), (BLOCKS, 0), (-1, 0)], ids=str)
def test_a_block_to_copy_outside_of_the_cache_is_refused(pair):
    stray = next(block for block in pair if not 0 <= block < BLOCKS)
    with pytest.raises(ValueError, match=rf"block_pairs must lie in \[0, 5\], got {stray}"):
        ops.copy_blocks(*make_cache(), torch.tensor([(1, 2), pair]))


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("block", [BLOCKS, -1])
def test_a_block_that_is_to_be_read_outside_of_the_cache_is_refused(block, rows, batch_invariant):
    options = {
        "seqlens_k": ints(SIZE, SIZE + 1), "cu_seqlens_q": ints(0, rows, 2 * rows),
        "max_seqlen_q": rows, "batch_invariant": batch_invariant,
    }  # fmt: skip
    q = torch.ones(2 * rows, HEADS, DIM)

    def attend(table, **more):
        return ops.paged_attention(q, *make_cache(), block_table=table, **options, **more)

    table = ints(0, block, 1, 2).view(2, 2)
    attend(table)  # the first sequence has no second block
    wrong = ints(0, block, 1, block).view(2, 2)
    message = rf"block_table must hold blocks in \[0, 5\], got {block} as block 1 of sequence 1"
    with pytest.raises(ValueError, match=message):
        attend(wrong)
    with pytest.raises(ValueError, match=message):
        ops.mla_decode(
            q, torch.ones(2 * rows, HEADS, 4), torch.zeros(BLOCKS, SIZE, DIM + 4),
            block_table=wrong, softmax_scale=1.0, **options,
        )  # fmt: skip


_DTYPES = [torch.float32] + [
    pytest.param(dtype, marks=pytest.mark.slow)
    for dtype in (torch.float64, torch.bfloat16, torch.float16, torch.int8)
]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_ids_behind_a_window_are_never_read(dtype, batch_invariant):
    """A sequence of many rows reads tiles of 128 keys, the first of them from its window on."""
    generator = torch.Generator().manual_seed(0)
    blocks, size, most = 40, 16, 340
    stored, scales = (torch.float32, {}) if dtype == torch.int8 else (dtype, {})
    k_cache, v_cache = (
        torch.randn(blocks, size, HEADS, 64, generator=generator).mul(9).to(dtype) for _ in range(2)
    )
    if dtype == torch.int8:
        scales = dict.fromkeys(("k_scale", "v_scale"), torch.full((blocks, size, HEADS), 0.01))
    for rows, window, block_size in itertools.product((1, 2, 40), (1, 20, 200), (16, 4)):
        length = most - 40 + rows
        shape = (-1, block_size, HEADS, 64)
        table = torch.randperm(blocks * size // block_size, generator=generator)
        table = table[: -(-length // block_size)].int()[None]
        unseen = max(0, length - rows - window + 1) // block_size
        q = torch.randn(rows, 2 * HEADS, 64, generator=generator).to(stored)
        attend = functools.partial(
            ops.paged_attention, q, k_cache.view(shape), v_cache.view(shape), block_table=table,
            seqlens_k=ints(length), cu_seqlens_q=ints(0, rows), max_seqlen_q=rows, window=window,
            batch_invariant=batch_invariant,
            **{name: scale.view(-1, block_size, HEADS) for name, scale in scales.items()},
        )  # fmt: skip
        want = attend()
        for wild in (10**6, -(2**31), 2**31 - 1):
            table[0, :unseen] = wild
            assert torch.equal(attend(), want)


def test_an_id_that_a_window_reaches_is_refused():
    k_cache, v_cache = make_cache()
    v_cache[2] = 1.0
    options = {
        "seqlens_k": ints(2 * SIZE), "cu_seqlens_q": ints(0, 1), "max_seqlen_q": 1,
        "block_table": ints(BLOCKS, 2).view(1, 2),
    }  # fmt: skip
    q = torch.ones(1, HEADS, DIM)
    with pytest.raises(ValueError, match="got 6 as block 0 of sequence 0"):
        ops.paged_attention(q, k_cache, v_cache, **options, window=SIZE + 1)
