"""The tensors of the paged cache and how many blocks a budget holds."""

from __future__ import annotations

import pytest
import torch

from tilewise.cache.spec import CacheSpec, KVSpec, LatentSpec
from tilewise.cache.storage import KVStorage, num_blocks_for

SPEC = CacheSpec(
    num_layers=3,
    block_size=4,
    kv=KVSpec(num_kv_heads=2, head_dim=8, v_head_dim=6, dtype=torch.float16),
)


def test_each_layer_has_its_own_keys_and_values():
    storage = KVStorage(SPEC, num_blocks=5, device="cpu")
    assert len(storage.layers) == 3
    for k_cache, v_cache in storage.layers:
        assert k_cache.shape == (5, 4, 2, 8)
        assert v_cache.shape == (5, 4, 2, 6)
        assert k_cache.dtype == v_cache.dtype == torch.float16
    pointers = {t.data_ptr() for layer in storage.layers for t in layer}
    assert len(pointers) == 6


def test_layers_are_parts_of_one_cache():
    storage = KVStorage(SPEC, num_blocks=5)
    for tensor in storage.whole:
        tensor.zero_()
    for number, layer in enumerate(storage.layers):
        for tensor in layer:
            tensor[1] = number + 1
    for tensor in storage.whole:
        assert tensor[[1, 6, 11]].flatten(1).amax(1).tolist() == [1, 2, 3]
        assert int(tensor.count_nonzero()) == 3 * tensor[0].numel()


def test_pairs_of_one_layer_become_those_of_all():
    storage = KVStorage(SPEC, num_blocks=5)
    pairs = storage.in_all_layers(torch.tensor([[0, 4], [2, 3]]))
    assert pairs.tolist() == [[0, 4], [2, 3], [5, 9], [7, 8], [10, 14], [12, 13]]
    assert storage.in_all_layers(torch.zeros(0, 2, dtype=torch.int64)).shape == (0, 2)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_an_8_bit_cache_has_scales(dtype):
    kv = KVSpec(num_kv_heads=2, head_dim=8, v_head_dim=6, dtype=dtype)
    storage = KVStorage(CacheSpec(num_layers=3, block_size=4, kv=kv), num_blocks=5)
    for k_cache, v_cache, k_scale, v_scale in storage.layers:
        assert k_cache.dtype == v_cache.dtype == dtype
        assert k_scale.shape == v_scale.shape == (5, 4, 2)
        assert k_scale.dtype == v_scale.dtype == torch.float32
    assert storage.num_bytes == sum(t.nbytes for t in storage.whole)


def test_the_tensors_take_the_bytes_that_the_spec_promises():
    storage = KVStorage(SPEC, num_blocks=5)
    assert storage.num_bytes == sum(t.nbytes for layer in storage.layers for t in layer)


def test_a_budget_holds_the_blocks_that_fit_whole():
    size = SPEC.bytes_per_block
    assert num_blocks_for(SPEC, size) == 1
    assert num_blocks_for(SPEC, 7 * size - 1) == 6
    assert num_blocks_for(SPEC, 7 * size) == 7


def test_a_budget_below_one_block_is_refused_with_the_sizes():
    size = SPEC.bytes_per_block
    with pytest.raises(ValueError, match=f"at least one cache block of {size} bytes") as caught:
        num_blocks_for(SPEC, size - 1)
    assert f"got {size - 1}" in str(caught.value)


def test_a_storage_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks must be at least 1, got 0"):
        KVStorage(SPEC, num_blocks=0)


def test_groups_have_pools_of_their_own():
    kv = KVSpec(2, 8, 6, torch.float16)
    storage = KVStorage(CacheSpec.of_windows(4, kv, [3, None, 3]), (5, 7))
    assert storage.counts == (5, 7)
    assert [layer[0].shape[0] for layer in storage.layers] == [7, 5, 7]
    assert storage.num_bytes == sum(t.nbytes for layer in storage.layers for t in layer)
    full, window = storage.parts
    assert full.whole is storage.whole
    assert window.layers[1][0].data_ptr() == storage.layers[2][0].data_ptr()
    assert window.in_all_layers(torch.tensor([[1, 6]])).tolist() == [[1, 6], [8, 13]]
    assert KVStorage(CacheSpec.of_windows(4, kv, [3, None]), 6).counts == (6, 6)
    with pytest.raises(ValueError, match="one number for each of 2 groups, got"):
        KVStorage(CacheSpec.of_windows(4, kv, [3, None]), (6,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_latents_are_one_tensor_a_layer_and_its_scales(dtype):
    storage = KVStorage(CacheSpec(2, 4, LatentSpec(8, 4, dtype)), 5)
    for layer in storage.layers:
        tensors = layer if isinstance(layer, tuple) else (layer,)
        assert [tuple(t.shape) for t in tensors] == [(5, 4, 12), (5, 4, 2)][: len(tensors)]
        assert len(tensors) == (2 if dtype == torch.int8 else 1)
    assert storage.num_bytes == sum(t.nbytes for t in storage.whole)
