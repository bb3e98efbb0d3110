"""swap_blocks: what it moves, in how many transfers, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from tilewise import ops
from tilewise.cache.spec import CacheSpec, KVSpec
from tilewise.cache.storage import KVStorage
from tilewise.ops.paged import swap


def spec(dtype: torch.dtype = torch.int8) -> CacheSpec:
    kv = KVSpec(num_kv_heads=2, head_dim=8, v_head_dim=6, dtype=dtype)
    return CacheSpec(num_layers=3, block_size=4, kv=kv)


def filled(storage: KVStorage) -> KVStorage:
    for tensor in storage.whole:
        bits = tensor.view(torch.int8)
        bits.copy_(torch.randint(-128, 128, bits.shape, dtype=torch.int8))
    return storage


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bfloat16], ids=str)
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_blocks_of_all_layers_go_there_and_back(place, dtype):
    storage = filled(KVStorage(spec(dtype), 7, place))
    host = KVStorage(spec(dtype), 5, pinned=place == "cuda")
    want = [t.view(torch.int8).clone() for t in storage.whole]
    out = torch.tensor([[6, 0], [2, 3], [3, 4]])
    ops.swap_blocks(storage.whole, host.whole, storage.in_all_layers(out, host)).wait()
    for tensor, before in zip(host.whole, want, strict=True):
        for layer in range(3):
            for source, target in out.tolist():
                block = tensor.view(torch.int8)[5 * layer + target]
                assert torch.equal(block, before[7 * layer + source].cpu())
    for tensor in storage.whole:
        tensor.view(torch.int8).zero_()
    back = host.in_all_layers(out.flip(1), storage)
    ops.swap_blocks(host.whole, storage.whole, back).wait()
    moved = storage.in_all_layers(out, host)[:, 0]
    for tensor, before in zip(storage.whole, want, strict=True):
        bits = tensor.view(torch.int8)
        assert torch.equal(bits[moved], before[moved])
        bits[moved] = 0
        assert int(bits.count_nonzero()) == 0


def test_within_one_cache_and_of_one_tensor():
    cache = torch.randn(6, 4, 2, 8)
    want = cache.clone()
    want[[1, 5]] = want[[0, 2]]
    ops.swap_blocks(cache, cache, torch.tensor([[2, 5], [0, 1]])).wait()
    assert torch.equal(cache, want)
    ops.swap_blocks(cache, cache, torch.zeros(0, 2, dtype=torch.int64)).synchronize()
    assert torch.equal(cache, want)


def test_neighbours_are_one_transfer():
    pairs = [(9, 1), (3, 4), (2, 3), (4, 5), (5, 9), (6, 10), (0, 0)]
    assert swap._runs(pairs) == [[0, 0, 1], [2, 3, 3], [5, 9, 2], [9, 1, 1]]
    assert swap._runs([]) == []


def test_strided_caches_are_swapped_too():
    fused = torch.randn(6, 2, 4, 8)
    target = torch.zeros(3, 4, 8)
    ops.swap_blocks(fused[:, 1], target, torch.tensor([[4, 0], [5, 1]]))
    assert torch.equal(target[:2], fused[4:, 1])
    assert int(target[2].count_nonzero()) == 0


@pytest.mark.gpu
def test_copies_follow_what_was_launched_before_and_precede_what_waits():
    cache = torch.zeros(64, 1024, 1024, device="cuda")
    host = torch.zeros(64, 1024, 1024, pin_memory=True)
    pairs = torch.stack([torch.arange(64)] * 2, dim=1)
    for step in range(1, 4):
        cache.fill_(step)
        ops.swap_blocks(cache, host, pairs).wait()
        assert bool((host == step).all())
        cache.zero_()
        ops.swap_blocks(host, cache, pairs).wait()
        assert float(cache.min()) == step


REFUSALS = {
    "source past the end": ([[6, 0]], {}, "source blocks in 0 ... 5, got 6"),
    "target past the end": ([[0, 3]], {}, "target blocks in 0 ... 2, got 3"),
    "negative": ([[-1, 0]], {}, "source blocks in 0 ... 5, got -1"),
    "one target twice": ([[0, 1], [2, 1]], {}, "different target blocks, got one twice"),
    "flat": ([0, 1], {}, r"block_pairs must be \(n, 2\)"),
    "other dtype": ([[0, 1]], {"target_cache": torch.zeros(3, 4, 8).half()}, "must have dtype"),
    "other blocks": ([[0, 1]], {"target_cache": torch.zeros(3, 2, 8)}, "blocks like those of"),
    "one more tensor": ([[0, 1]], {"target_cache": [torch.zeros(3, 4, 8)] * 2}, "as many tensors"),
    "two lengths": (
        [[0, 1]],
        {
            "source_cache": [torch.zeros(6, 4, 8)] * 2,
            "target_cache": [torch.zeros(3, 4, 8), torch.zeros(4, 4, 8)],
        },
        "one number of blocks a side",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refuses(name):
    pairs, changes, message = REFUSALS[name]
    caches = {"source_cache": torch.zeros(6, 4, 8), "target_cache": torch.zeros(3, 4, 8)} | changes
    with pytest.raises((ValueError, TypeError), match=message):
        ops.swap_blocks(**caches, block_pairs=torch.tensor(pairs))


def test_a_block_that_is_read_and_written_is_refused_within_one_cache_only():
    cache, other = torch.zeros(6, 4, 8), torch.zeros(6, 4, 8)
    pairs = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="read and write one block of a cache, got 1 as both"):
        ops.swap_blocks(cache, cache, pairs)
    with pytest.raises(ValueError, match="got 1 as both"):
        ops.swap_blocks(cache, cache.view(6, 32)[:, :].view(6, 4, 8), pairs)
    ops.swap_blocks(cache, other, pairs)
    with pytest.raises(TypeError, match="block_pairs must have dtype int32 or int64"):
        ops.swap_blocks(cache, other, pairs.short())
