"""Sizes and shapes of the paged cache."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tilewise.cache.spec import CacheSpec, KVSpec, LatentSpec, LayerGroup


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


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint16, torch.float8_e5m2], ids=str)
def test_another_dtype_is_refused(dtype: torch.dtype):
    with pytest.raises(TypeError, match=f"dtype must be .* int8 or float8_e4m3fn, got {dtype}$"):
        KVSpec(num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_scales_of_an_8_bit_cache_count(dtype: torch.dtype):
    kv = KVSpec(num_kv_heads=8, head_dim=192, v_head_dim=128, dtype=dtype)
    assert kv.bytes_per_token == 8 * (192 + 128 + 4 + 4)
    assert CacheSpec(num_layers=1, block_size=16, kv=kv).scale_shape(5) == (5, 16, 8)


def test_four_bits_hold_two_channels_a_byte_and_scales():
    kv = KVSpec(num_kv_heads=8, head_dim=192, v_head_dim=128, dtype=torch.uint8)
    assert kv.bytes_per_token == 8 * (96 + 64 + 4 + 4)
    spec = CacheSpec(num_layers=1, block_size=16, kv=kv)
    assert [shape for shape, _ in spec.tensors(5)] == [
        (5, 16, 8, 96), (5, 16, 8, 64), (5, 16, 8), (5, 16, 8),
    ]  # fmt: skip
    with pytest.raises(ValueError, match="head_dim and v_head_dim must be even .* got 63 and 64"):
        KVSpec(num_kv_heads=8, head_dim=63, v_head_dim=64, dtype=torch.uint8)


def test_specs_are_values():
    kv = KVSpec(num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=torch.float32)
    same = KVSpec(num_kv_heads=2, head_dim=64, v_head_dim=64, dtype=torch.float32)
    assert {kv: 1}[same] == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        kv.head_dim = 128


def test_layers_are_grouped_by_their_windows_those_without_first():
    kv = KVSpec(1, 8, 8, torch.float32)
    spec = CacheSpec.of_windows(4, kv, [5, None, 9, None, 5])
    assert [(group.layers, group.window) for group in spec.groups] == [
        ((1, 3), None),
        ((2,), 9),
        ((0, 4), 5),
    ]
    assert spec.group_of == (2, 0, 1, 0, 2)
    assert spec.windows == (None, 9, 5)
    assert [spec.group_block_bytes(i) for i in range(3)] == [512, 256, 512]
    assert spec.bytes_per_block == 1280
    assert not spec.is_plain
    assert spec.part(2) == CacheSpec(2, 4, kv, (LayerGroup(kv, (0, 1), 5),))
    one = CacheSpec.of_windows(4, kv, [None] * 3)
    assert one == CacheSpec(3, 4, kv)
    assert one.is_plain
    assert one.group_of == ()


def test_latents_take_one_row_and_two_scales():
    plain = LatentSpec(512, 64, torch.bfloat16)
    assert plain.bytes_per_token == 1152
    assert CacheSpec(2, 16, plain).tensors(7) == [((7, 16, 576), torch.bfloat16)]
    small = CacheSpec(2, 16, LatentSpec(512, 64, torch.int8))
    assert small.bytes_per_token == 2 * (576 + 8)
    assert small.tensors(7) == [((7, 16, 576), torch.int8), ((7, 16, 2), torch.float32)]


def test_groups_that_are_no_partition_are_refused():
    kv = KVSpec(1, 8, 8, torch.float32)
    with pytest.raises(ValueError, match=r"each of the 2 layers once, got \[0, 0, 1\]"):
        CacheSpec(2, 4, kv, (LayerGroup(kv, (0,)), LayerGroup(kv, (0, 1), 3)))
    with pytest.raises(ValueError, match="kv must be that of the first group"):
        CacheSpec(1, 4, kv, (LayerGroup(LatentSpec(4, 2, torch.float32), (0,)),))
    with pytest.raises(ValueError, match="window must be at least 1, got 0"):
        LayerGroup(kv, (0,), 0)
    with pytest.raises(ValueError, match="rope_dim must be at least 1, got 0"):
        LatentSpec(4, 0, torch.float32)
    with pytest.raises(TypeError, match="dtype must be a floating-point type of 16 bits"):
        LatentSpec(4, 2, torch.int32)
