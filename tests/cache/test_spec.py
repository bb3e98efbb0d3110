"""Sizes and shapes of the paged cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tilewise.cache.spec import CacheSpec, KVSpec


def test_bytes_count_keys_and_values_of_all_layers():
    kv = KVSpec(num_kv_heads=8, head_dim=192, v_head_dim=128, dtype=torch.bfloat16)
    spec = CacheSpec(num_layers=4, block_size=16, kv=kv)
    assert kv.bytes_per_token == 8 * (192 + 128) * 2
    assert spec.bytes_per_token == 4 * 8 * (192 + 128) * 2
    assert spec.bytes_per_block == 16 * spec.bytes_per_token


def test_keys_and_values_have_their_own_width():
    kv = KVSpec(num_kv_heads=2, head_dim=192, v_head_dim=128, dtype=torch.float32)
    spec = CacheSpec(num_layers=1, block_size=16, kv=kv)
    assert spec.k_shape(5) == (5, 16, 2, 192)
    assert spec.v_shape(5) == (5, 16, 2, 128)


@pytest.mark.parametrize("name", ["num_kv_heads", "head_dim", "v_head_dim"])
def test_an_empty_dimension_is_refused_by_name(name: str):
    sizes = {"num_kv_heads": 2, "head_dim": 64, "v_head_dim": 64}
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got 0$"):
        KVSpec(**{**sizes, name: 0}, dtype=torch.float32)


@pytest.mark.parametrize("name", ["num_layers", "block_size"])
def test_an_empty_cache_is_refused_by_name(name: str):
    kv = KVSpec(num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=torch.float32)
    with pytest.raises(ValueError, match=f"^{name} must be at least 1, got -1$"):
        CacheSpec(**{"num_layers": 1, "block_size": 16, name: -1}, kv=kv)


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.float8_e5m2], ids=str)
def test_another_dtype_is_refused(dtype: torch.dtype):
    with pytest.raises(TypeError, match=f"dtype must be .* int8 or float8_e4m3fn, got {dtype}$"):
        KVSpec(num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_of_an_8_bit_cache_count(dtype: torch.dtype):
    kv = KVSpec(num_kv_heads=8, head_dim=192, v_head_dim=128, dtype=dtype)
    assert kv.bytes_per_token == 8 * (192 + 128 + 4 + 4)
    assert CacheSpec(num_layers=1, block_size=16, kv=kv).scale_shape(5) == (5, 16, 8)


def test_specs_are_values():
    kv = KVSpec(num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=torch.float32)
    same = KVSpec(num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=torch.float32)
    assert {kv: 1}[same] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        kv.head_dim = 128
