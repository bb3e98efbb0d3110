"""Cache writes, block copies, rope and merges on Triton agree with the reference."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tilewise.kernels.device import interpreting
from tilewise.kernels.spec import ElementSpec
from tilewise.kernels.triton import merge, rope
from tilewise.kernels.triton.paged import cache as cache_ops
from tilewise.reference import merge as merge_reference
from tilewise.reference import paged as paged_reference
from tilewise.reference import rope as rope_reference
from tilewise.testing import assert_within_budget

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def random(*shape: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(device, dtype)


def empty_caches(
    num_blocks: int,
    block_size: int,
    heads: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    device: str,
) -> tuple[Tensor, Tensor]:
    k_cache, v_cache = (
        torch.full((num_blocks, block_size, heads, width), math.nan, dtype=dtype, device=device)
        for width in widths
    )
    return k_cache, v_cache


def assert_same(actual: Tensor, wanted: Tensor) -> None:
    """Bitwise, NaN where NaN is wanted."""
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


@on_each_device
@pytest.mark.parametrize(
    ("block_size", "heads", "widths", "dtype", "cache_dtype"),
    [
        pytest.param(16, 8, (128, 128), torch.bfloat16, torch.bfloat16, id="bf16"),
        pytest.param(1, 2, (64, 64), torch.float32, torch.float32, id="block_of_1"),
        pytest.param(4, 3, (80, 24), torch.float16, torch.float16, id="odd_heads_and_widths"),
        pytest.param(8, 40, (128, 64), torch.float32, torch.bfloat16, id="many_heads_rounded"),
        pytest.param(8, 1, (256, 256), torch.bfloat16, torch.float32, id="widened"),
        pytest.param(16, 2, (576, 512), torch.bfloat16, torch.bfloat16, id="wide_heads"),
    ],
)
def test_write_kv_cache_fills_slots_and_nothing_else(
    block_size: int,
    heads: int,
    widths: tuple[int, int],
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    device: str,
) -> None:
    num_blocks, num_tokens = 9, 11
    fused = random(num_tokens, heads + 2, sum(widths), device=device, dtype=dtype)
    k, v = fused[:, 1:-1, : widths[0]], fused[:, 1:-1, widths[0] :]
    slots = torch.randperm(num_blocks * block_size)[:num_tokens].to(device)
    if block_size == 1:
        slots = torch.cat([slots, slots.new_full((num_tokens - len(slots),), -1)])
    slots[2] = slots[5] = -1
    caches = empty_caches(num_blocks, block_size, heads, widths, cache_dtype, device)
    wanted = tuple(cache.clone() for cache in caches)
    cache_ops.write_kv_cache(k, v, *caches, slots)
    paged_reference.write_kv_cache(k, v, *wanted, slots)
    for cache, want in zip(caches, wanted, strict=True):
        assert_same(cache, want)


@on_each_device
def test_write_kv_cache_into_one_fused_tensor(device: str) -> None:
    fused = torch.full((6, 2, 4, 2, 64), math.nan, device=device)
    k, v = random(3, 2, 64, device=device), random(3, 2, 64, device=device)
    cache_ops.write_kv_cache(
        k, v, fused[:, 0], fused[:, 1], torch.tensor([23, 0, 9], device=device)
    )
    assert torch.equal(fused[5, 0, 3], k[0])
    assert torch.equal(fused[0, 1, 0], v[1])
    assert torch.equal(fused[2, 1, 1], v[2])
    assert int(fused.isfinite().sum()) == k.numel() + v.numel()


@on_each_device
def test_write_kv_cache_of_nothing(device: str) -> None:
    caches = empty_caches(2, 4, 2, (16, 16), torch.float32, device)
    nothing = random(0, 2, 16, device=device)
    cache_ops.write_kv_cache(
        nothing, nothing, *caches, torch.empty(0, dtype=torch.int64, device=device)
    )
    assert all(bool(cache.isnan().all()) for cache in caches)


@on_each_device
@pytest.mark.parametrize(
    ("block_size", "heads", "widths", "dtype"),
    [
        pytest.param(16, 8, (128, 128), torch.bfloat16, id="bf16"),
        pytest.param(1, 1, (64, 64), torch.float32, id="block_of_1"),
        pytest.param(256, 2, (80, 24), torch.float16, id="block_of_256"),
        pytest.param(4, 3, (256, 16), torch.float32, id="odd_heads"),
        pytest.param(16, 1, (576, 512), torch.bfloat16, id="wide_heads"),
    ],
)
def test_copy_blocks_copies_both_caches(
    block_size: int, heads: int, widths: tuple[int, int], dtype: torch.dtype, device: str
) -> None:
    caches = [random(9, block_size, heads, width, device=device, dtype=dtype) for width in widths]
    wanted = [cache.clone() for cache in caches]
    pairs = torch.tensor([[0, 3], [8, 5], [0, 2]], device=device)
    cache_ops.copy_blocks(caches[0], caches[1], pairs)
    paged_reference.copy_blocks(wanted[0], wanted[1], pairs)
    for cache, want in zip(caches, wanted, strict=True):
        assert_same(cache, want)
    cache_ops.copy_blocks(caches[0], caches[1], pairs[:0])
    for cache, want in zip(caches, wanted, strict=True):
        assert_same(cache, want)


@on_each_device
def test_copy_blocks_reads_pairs_and_caches_of_any_stride(device: str) -> None:
    fused = random(6, 2, 4, 2, 16, device=device)
    wanted = fused.clone()
    wanted[4], wanted[0] = fused[1], fused[5]
    pairs = torch.tensor([[1, 5], [4, 0]], device=device).t()  # 1 -> 4, 5 -> 0
    cache_ops.copy_blocks(fused[:, 0], fused[:, 1], pairs)
    assert_same(fused, wanted)


ROPE_CASES = [
    pytest.param((7, 5, 64), (7, 32), torch.float32, id="packed"),
    pytest.param((7, 5, 64), (7, 32), torch.bfloat16, id="packed_bf16"),
    pytest.param((2, 7, 3, 80), (7, 24), torch.float16, id="dense_partial_shared_table"),
    pytest.param((2, 7, 3, 48), (2, 7, 24), torch.float32, id="dense_own_tables"),
    pytest.param((5, 1, 24), (5, 6), torch.float32, id="one_head"),
    pytest.param((3, 40, 256), (3, 128), torch.bfloat16, id="wide_heads"),
    pytest.param((4, 2, 16), (4, 1), torch.float32, id="one_pair"),
]


@on_each_device
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize(("shape", "table", "dtype"), ROPE_CASES)
def test_rope_agrees_with_complex_multiplication(
    shape: tuple[int, ...],
    table: tuple[int, ...],
    dtype: torch.dtype,
    interleaved: bool,
    device: str,
) -> None:
    heads = shape[-2]
    x = random(*shape[:-2], heads + 3, shape[-1], device=device, dtype=dtype)[..., 2:-1, :]
    angle = torch.rand(table).to(device) * 7
    cos, sin = angle.cos(), angle.sin()
    untouched = x.clone()
    out = rope.launch(x, cos, sin, interleaved)
    truth = rope_reference.apply_rope(
        x.double(), cos.double(), sin.double(), interleaved=interleaved
    )
    eager = rope_reference.apply_rope(x, cos, sin, interleaved=interleaved)
    assert out.dtype == dtype
    assert_within_budget(out, truth, eager)
    assert torch.equal(out[..., 2 * table[-1] :], x[..., 2 * table[-1] :])
    assert torch.equal(x, untouched)


@on_each_device
@pytest.mark.parametrize("shape", [(0, 4, 64), (2, 0, 4, 64)], ids=["packed", "dense"])
def test_rope_of_nothing(shape: tuple[int, ...], device: str) -> None:
    table = random(0, 32, device=device)
    assert rope.launch(random(*shape, device=device), table, table, False).shape == shape


@on_each_device
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param((7, 5, 64), torch.float32, id="packed"),
        pytest.param((9, 3, 80), torch.bfloat16, id="packed_bf16"),
        pytest.param((2, 7, 3, 128), torch.float16, id="dense_fp16"),
        pytest.param((1, 1, 1, 16), torch.float32, id="one_row"),
    ],
)
def test_merge_agrees_with_the_softmax_of_the_union(
    shape: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    *batch, seqlen, heads, _ = shape
    o_a, o_b = (random(*shape, device=device, dtype=dtype) for _ in range(2))
    lse_a, lse_b = (random(*batch, heads, seqlen, device=device) * 5 for _ in range(2))
    o, lse = merge.launch(o_a, lse_a, o_b, lse_b)
    wide = (t.double() for t in (o_a, lse_a, o_b, lse_b))
    truth_o, truth_lse = merge_reference.merge_states(*wide)
    eager_o, eager_lse = merge_reference.merge_states(o_a, lse_a, o_b, lse_b)
    assert o.dtype == dtype
    assert_within_budget(o, truth_o, eager_o, name="o")
    assert_within_budget(lse, truth_lse, eager_lse, name="lse")


@on_each_device
def test_merge_ignores_a_side_that_saw_nothing(device: str) -> None:
    o_a, o_b = random(4, 2, 32, device=device), random(4, 2, 32, device=device)
    lse_a, lse_b = random(2, 4, device=device), random(2, 4, device=device)
    lse_a[:, 0], o_a[0] = -math.inf, math.nan
    lse_b[:, 1], o_b[1] = -math.inf, math.inf
    lse_a[:, 2] = lse_b[:, 2] = -math.inf
    lse_a[:, 3], lse_b[:, 3] = 500.0, -500.0
    o, lse = merge.launch(o_a, lse_a, o_b, lse_b)
    assert torch.equal(o[0], o_b[0])
    assert torch.equal(o[1], o_a[1])
    assert torch.equal(o[2], torch.zeros_like(o[2]))
    assert torch.equal(o[3], o_a[3])
    assert torch.equal(lse[:, 0], lse_b[:, 0])
    assert torch.equal(lse[:, 1], lse_a[:, 1])
    assert bool((lse[:, 2] == -math.inf).all())
    assert torch.equal(lse[:, 3], lse_a[:, 3])


@on_each_device
def test_merge_reads_any_strides(device: str) -> None:
    o_a = random(3, 6, 32, device=device).transpose(0, 1)
    o_b = random(6, 5, 32, device=device)[:, 1:4]
    lse_a = random(6, 3, device=device).t()
    lse_b = random(5, 6, device=device)[1:4]
    results = merge.launch(o_a, lse_a, o_b, lse_b)
    plain = merge.launch(*(t.contiguous() for t in (o_a, lse_a, o_b, lse_b)))
    for result, want in zip(results, plain, strict=True):
        assert torch.equal(result, want)


@pytest.mark.gpu
@pytest.mark.large
def test_slots_past_2_to_the_31_elements() -> None:
    block_size, heads, width = 16, 8, 128
    blocks = 2**31 // (block_size * heads * width) + 5
    caches = [
        torch.zeros(blocks, block_size, heads, width, dtype=torch.bfloat16, device="cuda")
        for _ in range(2)
    ]
    k, v = (random(2, heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    slots = torch.tensor([blocks * block_size - 1, 3], device="cuda")
    cache_ops.write_kv_cache(k, v, caches[0], caches[1], slots)
    pairs = torch.tensor([[blocks - 1, blocks - 3]], device="cuda")
    cache_ops.copy_blocks(caches[0], caches[1], pairs)
    for cache, new in zip(caches, (k, v), strict=True):
        assert torch.equal(cache[-1, -1], new[0])
        assert torch.equal(cache[0, 3], new[1])
        assert torch.equal(cache[-3], cache[-1])
        assert int(cache.count_nonzero()) == int(new.count_nonzero() + new[0].count_nonzero())


WHY_NOT: list[Callable[[ElementSpec], str | None]] = [
    cache_ops.why_not,
    rope.why_not,
    merge.why_not,
]


@pytest.mark.parametrize("why_not", WHY_NOT, ids=["cache_ops", "rope", "merge"])
def test_refusals_say_why(
    why_not: Callable[[ElementSpec], str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert why_not(ElementSpec("cuda", torch.bfloat16)) is None
    wide = str(why_not(ElementSpec("cuda", torch.float64)))
    assert wide.startswith("dtype ")
    assert wide.endswith(", got torch.float64")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_not(ElementSpec("cpu", torch.float32)) is None
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert why_not(ElementSpec("cpu", torch.float32)) == "needs a CUDA device, got cpu"
