"""Cache writes and copies, rope and merging on the CPU against the reference."""

from __future__ import annotations

import math

import pytest
import torch

from tilewise.kernels.cpu import merge, rope
from tilewise.kernels.cpu.machine.rows import why_not_dtype
from tilewise.kernels.cpu.paged import cache as cache_ops
from tilewise.kernels.spec import ElementSpec
from tilewise.reference import merge as merge_reference
from tilewise.reference import paged as paged_reference
from tilewise.reference import rope as rope_reference
from tilewise.testing import assert_within_budget

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
DTYPES = [dtype for dtype in DTYPES if why_not_dtype(dtype) is None]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


@by_dtype
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_write_puts_rows_into_their_slots_and_skips_minus_one(
    dtype: torch.dtype, block_size: int
) -> None:
    k, v = torch.randn(7, 3, 16).to(dtype), torch.randn(7, 3, 24).to(dtype)
    caches = [torch.randn(20, block_size, 3, d).to(dtype) for d in (16, 24)]
    want = [cache.clone() for cache in caches]
    slots = torch.tensor([5, -1, 19, 0, -1, 7, 12])
    cache_ops.write_kv_cache(k, v, *caches, slots)
    paged_reference.write_kv_cache(k, v, *want, slots)
    assert all(torch.equal(got, expected) for got, expected in zip(caches, want, strict=True))


def test_write_takes_strided_rows_a_strided_cache_and_another_dtype() -> None:
    fused = torch.randn(5, 2 * 4 * 8)
    k, v = fused[:, :32].view(5, 4, 8), fused[:, 32:].view(5, 4, 8)
    both = torch.zeros(2, 6, 4, 4, 8, dtype=torch.bfloat16).transpose(0, 1)
    per_head = torch.zeros(6, 4, 4, 8, dtype=torch.bfloat16).transpose(1, 2)
    slots = torch.tensor([3, 4, 23, 0, 10])
    cache_ops.write_kv_cache(k, v, both[:, 0], per_head, slots)
    for row, slot in enumerate(slots.tolist()):
        assert torch.equal(both[slot // 4, 0, slot % 4], k[row].bfloat16())
        assert torch.equal(per_head[slot // 4, slot % 4], v[row].bfloat16())
    assert int((both[:, 1] != 0).sum()) == 0


def test_write_of_nothing_changes_nothing() -> None:
    cache = torch.randn(2, 4, 1, 8)
    before = cache.clone()
    empty = torch.empty(0, 1, 8)
    cache_ops.write_kv_cache(empty, empty, cache, cache, torch.empty(0, dtype=torch.int64))
    cache_ops.copy_blocks(cache, cache, torch.empty(0, 2, dtype=torch.int64))
    assert torch.equal(cache, before)


@by_dtype
def test_copy_moves_whole_blocks_nan_included(dtype: torch.dtype) -> None:
    caches = [torch.randn(9, 5, 2, d).to(dtype) for d in (8, 16)]
    caches[0][2, 3:] = math.nan
    want = [cache.clone() for cache in caches]
    pairs = torch.tensor([[2, 7], [0, 1], [2, 8]])
    cache_ops.copy_blocks(*caches, pairs)
    paged_reference.copy_blocks(*want, pairs)
    for got, expected in zip(caches, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


@by_dtype
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(
    ("shape", "rotary_dim"),
    [((1, 1, 8), 8), ((70, 3, 64), 64), ((5, 2, 96), 40), ((2, 67, 2, 80), 80), ((3, 4, 1, 16), 2)],
    ids=str,
)
def test_rope_keeps_the_budget(
    shape: tuple[int, ...], rotary_dim: int, interleaved: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(shape).to(dtype)
    positions = torch.arange(shape[-3]) * 37
    cos, sin = rope_reference.rope_cos_sin(positions, rotary_dim)
    before = x.clone()
    out = rope.launch(x, cos, sin, interleaved)
    truth = rope_reference.apply_rope(
        x.double(), cos.double(), sin.double(), interleaved=interleaved
    )
    eager = rope_reference.apply_rope(x, cos, sin, interleaved=interleaved)
    assert_within_budget(out, truth, eager)
    assert torch.equal(x, before)
    assert torch.equal(out[..., rotary_dim:], x[..., rotary_dim:])


def test_rope_takes_angles_per_sequence_and_strided_input() -> None:
    x = torch.randn(2, 3, 9, 32).transpose(1, 2)
    cos, sin = rope_reference.rope_cos_sin(torch.randint(0, 99, (2, 9)), 32)
    torch.testing.assert_close(
        rope.launch(x, cos, sin, False), rope_reference.apply_rope(x, cos, sin)
    )
    assert rope.launch(x[:, :0], cos[:, :0], sin[:, :0], False).shape == (2, 0, 3, 32)


@by_dtype
@pytest.mark.parametrize("shape", [(1, 1, 8), (300, 4, 64), (2, 33, 3, 40)], ids=str)
def test_merge_keeps_the_budget(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    lse_shape = (*shape[:-3], shape[-2], shape[-3])
    o_a, o_b = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    real = torch.float64 if dtype == torch.float64 else torch.float32
    lse_a, lse_b = (torch.randn(lse_shape, dtype=real) * 3 for _ in range(2))
    o, lse = merge.launch(o_a, lse_a, o_b, lse_b)
    doubles = (t.double() for t in (o_a, lse_a, o_b, lse_b))
    truth = merge_reference.merge_states(*doubles)
    eager = merge_reference.merge_states(o_a, lse_a, o_b, lse_b)
    assert_within_budget(o, truth[0], eager[0], name="o")
    assert_within_budget(lse, truth[1], eager[1], name="lse")


def test_merge_ignores_a_side_that_saw_nothing_even_if_it_is_nan() -> None:
    o_a, o_b = torch.randn(3, 1, 8), torch.randn(3, 1, 8)
    lse_a, lse_b = (
        torch.tensor([[-math.inf, 0.5, -math.inf]]),
        torch.tensor([[0.25] + 2 * [-math.inf]]),
    )
    o_a[0], o_b[1] = math.nan, math.nan
    o, lse = merge.launch(o_a, lse_a, o_b, lse_b)
    assert torch.equal(o[0], o_b[0])
    assert torch.equal(o[1], o_a[1])
    assert torch.equal(o[2], torch.zeros(1, 8))
    assert lse.tolist() == [[0.25, 0.5, -math.inf]]


@pytest.mark.parametrize("module", [cache_ops, rope, merge])
def test_refuses_another_device(module) -> None:
    assert module.why_not(ElementSpec("cpu", torch.bfloat16)) is None
    assert module.why_not(ElementSpec("cuda", torch.bfloat16)) == "device must be cpu, got cuda"
    assert "dtype" in module.why_not(ElementSpec("cpu", torch.int16))
