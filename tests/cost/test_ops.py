"""The cost model against counted runs, brute force, the papers' numbers and arithmetic by hand."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from tilewise.cost import (
    H200,
    Cost,
    DevicePeaks,
    cache_bytes_by_kind,
    choose_tiles,
    copy_blocks_cost,
    flash_attention_backward_cost,
    flash_attention_cost,
    grouped_heads,
    io_flash,
    io_standard,
    kv_cache_bytes,
    latent_dims,
    merge_states_cost,
    mla_cache_bytes,
    mla_decode_cost,
    on_chip_elements,
    paged_attention_cost,
    rope_cost,
    standard_attention_cost,
    visible_pairs,
    wasted_slots,
    wasted_slots_contiguous,
    write_kv_cache_cost,
)
from tilewise.reference.incremental import (
    flash_backward,
    flash_forward,
    flash_forward_2,
    standard_forward,
)
from tilewise.reference.standard import visible_keys
from tilewise.reference.tiling import Tiling, algorithm_1_tiles, tile_layout


def matrices(seqlen_q: int, seqlen_k: int, head_dim: int) -> list[torch.Tensor]:
    shapes = ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, head_dim))
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def banded(offset: int, left: int, right: int):
    def mask(i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        distance = i + offset - j
        visible = torch.ones_like(distance, dtype=torch.bool)
        visible = visible & (distance <= left) if left >= 0 else visible
        return visible & (distance >= -right) if right >= 0 else visible

    return mask


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 9), (6, 6), (4, 9), (9, 4), (0, 3), (3, 0)])
def test_visible_pairs_equal_a_count(seqlen_q, seqlen_k):
    q, k = torch.zeros(1, seqlen_q, 1, 1), torch.zeros(1, seqlen_k, 1, 1)
    for left, right in itertools.product((-1, 0, 1, 3, 20), repeat=2):
        want = int(visible_keys(q, k, window=(left, right)).sum())
        got = visible_pairs(seqlen_q, seqlen_k, window_left=left, window_right=right)
        assert got == want, (left, right)


def test_standard_is_the_formula_of_the_paper():
    n, d = 1024, 64
    cost = standard_attention_cost(n, n, d)
    assert cost.bytes == 8 * n * d + 4 * n * n
    assert cost.flops == 4 * n * n * d


def test_standard_equals_the_counted_run():
    memory = standard_forward(*matrices(12, 20, 8), stores_p=False)[1]
    cost = standard_attention_cost(12, 20, 8, itemsize=8)
    assert (cost.bytes_read, cost.bytes_written) == (8 * memory.loads, 8 * memory.stores)


@pytest.mark.parametrize(("n", "d", "sram"), [(64, 8, 256), (50, 8, 200), (30, 4, 64)])
def test_io_counts_equal_the_counted_runs(n, d, sram):
    qkv = matrices(n, n, d)
    assert io_standard(n, d) == standard_forward(*qkv)[1].accesses
    tiling = Tiling(*algorithm_1_tiles(sram, d))
    assert io_flash(n, d, sram) == flash_forward(*qkv, tiling).memory.accesses


def test_theorem_2_scales_as_n_squared_d_squared_over_m():
    n, d, sram = 2**15, 64, 2**16
    assert io_flash(n, d, sram) < io_standard(n, d)
    assert io_flash(2 * n, d, sram) / io_flash(n, d, sram) == pytest.approx(4, rel=0.01)
    assert io_flash(n, d, sram // 2) / io_flash(n, d, sram) == pytest.approx(2, rel=0.01)
    assert io_flash(n, d, sram) == pytest.approx(12 * n * n * d * d / sram, rel=0.05)


def test_flash_is_the_formula_of_the_paper():
    n, d, tile_q = 1024, 64, 128
    cost = flash_attention_cost(n, n, d, tile_q=tile_q)
    assert cost.bytes == 4 * n * d + 4 * n * n * d // tile_q
    assert cost.flops == 4 * n * n * d
    with_lse = flash_attention_cost(n, n, d, tile_q=tile_q, writes_lse=True)
    assert with_lse.bytes - cost.bytes == 4 * n


def test_causal_halves_the_work():
    n, d = 4096, 128
    full = flash_attention_cost(n, n, d, tile_q=128, tile_k=64)
    causal = flash_attention_cost(n, n, d, tile_q=128, tile_k=64, window_right=0)
    assert causal.flops / full.flops == (n + 1) / (2 * n)
    query_tiles = n // 128
    swept = (query_tiles + 1) / (2 * query_tiles)  # a tile on the diagonal is read whole
    assert causal.bytes == 4 * n * d + swept * (full.bytes - 4 * n * d)


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "left", "right"),
    [
        (32, 32, -1, -1),
        (32, 32, -1, 0),
        (32, 32, 5, 0),
        (20, 33, 7, 2),
        (33, 20, -1, 0),
        (9, 40, 0, -1),
    ],
)
def test_flash_equals_the_counted_runs(seqlen_q, seqlen_k, left, right):
    q, k, v = matrices(seqlen_q, seqlen_k, 8)
    mask = banded(seqlen_k - seqlen_q, left, right)
    tiling = Tiling(8, 4, mask=mask)
    tiling = Tiling(8, 4, mask=mask, layout=tile_layout(mask, seqlen_q, seqlen_k, tiling))
    window = {"window_left": left, "window_right": right, "tile_q": 8, "tile_k": 4, "itemsize": 4}
    forward = flash_forward_2(q, k, v, tiling)
    cost = flash_attention_cost(seqlen_q, seqlen_k, 8, writes_lse=True, **window)
    counted = forward.memory
    assert (cost.bytes_read, cost.bytes_written) == (4 * counted.loads, 4 * counted.stores)
    counted = flash_backward(q, q, k, v, forward.o, forward.xi, tiling).memory
    cost = flash_attention_backward_cost(seqlen_q, seqlen_k, 8, **window)
    assert (cost.bytes_read, cost.bytes_written) == (4 * counted.loads, 4 * counted.stores)


def test_backward_does_two_and_a_half_times_the_flops():
    call = {"tile_q": 64, "tile_k": 64, "num_q_heads": 8, "batch": 2, "window_right": 0}
    forward = flash_attention_cost(512, 512, 64, **call)
    assert flash_attention_backward_cost(512, 512, 64, **call).flops == 2.5 * forward.flops


def test_heads_and_sequences_multiply():
    one = flash_attention_cost(64, 64, 16, tile_q=16, v_head_dim=8)
    many = flash_attention_cost(64, 64, 16, tile_q=16, v_head_dim=8, num_q_heads=6, batch=3)
    assert (many.flops, many.bytes) == (18 * one.flops, 18 * one.bytes)
    grouped = standard_attention_cost(64, 64, 16, num_q_heads=8, num_kv_heads=2)
    full = standard_attention_cost(64, 64, 16, num_q_heads=8)
    assert grouped.flops == full.flops
    assert full.bytes_read - grouped.bytes_read == 6 * 64 * 32 * 2


def test_decode_reads_keys_and_values_once():
    call = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    cost = paged_attention_cost([8192] * 16, **call)
    assert cost.bytes_read == 16 * (8192 * 8 * 256 + 32 * 128) * 2
    assert cost.bytes_written == 16 * 32 * 128 * 2
    assert cost.flops == 16 * 4 * 32 * 128 * 8192
    assert cost.intensity == pytest.approx(4, rel=1e-3)  # G = Hq / Hk
    narrow = paged_attention_cost([8192] * 16, cache_itemsize=1, **call)
    assert cost.bytes_read - narrow.bytes_read == 16 * 8192 * 8 * 256


def test_paged_costs_of_windows_chunks_and_empty_runs():
    call = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 4, "itemsize": 1}
    # 3 new of 10 tokens, each seeing 4 keys: 12 pairs over keys 4 ... 9.
    cost = paged_attention_cost([10], seqlens_q=[3], window_left=3, **call)
    assert cost.flops == 2 * 12 * 2 * 8
    assert cost.bytes_read == 6 * 8 + 3 * 2 * 4
    nothing = paged_attention_cost([5, 0], seqlens_q=[0, 0], **call)
    assert nothing == Cost(0, 0, 0)
    assert nothing.intensity == 0


def test_mla_decode_reads_a_latent_once_for_all_heads():
    cost = mla_decode_cost([4096] * 128, num_q_heads=128, latent_dim=512, rope_dim=64)
    assert cost.flops == 128 * 4096 * 128 * 2 * (576 + 512)
    assert cost.bytes_read == 128 * (4096 * 576 + 128 * 576) * 2
    one_key_head = paged_attention_cost(
        [4096] * 128, num_q_heads=128, num_kv_heads=1, head_dim=576, v_head_dim=512
    )
    assert one_key_head.flops == cost.flops
    assert one_key_head.bytes_read - cost.bytes_read == 128 * 4096 * 512 * 2  # values are keys
    narrow = mla_decode_cost([9], num_q_heads=2, latent_dim=512, rope_dim=64, cache_itemsize=1)
    assert narrow.bytes_read == 9 * (576 + 2 * 4) + 2 * 576 * 2


def test_costs_of_the_copying_ops_by_hand():
    assert merge_states_cost(10, 2, 8) == Cost(0, 2 * (320 + 80), 320 + 80)
    assert rope_cost(10, 2, 8, 4) == Cost(0, 320 + 10 * 2 * 2 * 4, 320)
    assert write_kv_cache_cost(10, 2, 8, v_head_dim=4) == Cost(0, 480 + 80, 480)
    assert copy_blocks_cost(3, 16, 2, 8) == Cost(0, 3 * 1024 + 48, 3 * 1024)


def test_costs_add_up():
    assert Cost(1, 2, 3) + Cost(10, 20, 30) == Cost(11, 22, 33)
    assert Cost(60, 10, 20).bytes == 30
    assert Cost(60, 10, 20).intensity == 2


def test_time_is_a_roofline_or_the_sum_of_the_paper():
    device = DevicePeaks("toy", flops=100.0, read_bandwidth=10.0, copy_bandwidth=10.0)
    assert device.write_bandwidth == pytest.approx(10)
    bound_by_memory, bound_by_compute = Cost(100, 20, 10), Cost(1000, 20, 10)
    assert bound_by_memory.time(device) == pytest.approx(3)
    assert bound_by_compute.time(device) == pytest.approx(10)
    assert bound_by_memory.time(device, overlaps=False) == pytest.approx(4)


def test_a_copy_takes_the_time_it_was_measured_to():
    size = 10**9
    copy = Cost(0, size, size)
    assert copy.time(H200) == pytest.approx(2 * size / H200.copy_bandwidth)
    assert Cost(0, size, 0).time(H200) == pytest.approx(size / H200.read_bandwidth)
    assert H200.write_bandwidth < H200.copy_bandwidth < H200.read_bandwidth


def test_cache_of_bert_base_at_4096_tokens_takes_144_mib():
    """The fourth paper's example: 12 layers, 12 heads of 64, two bytes."""
    assert 4096 * kv_cache_bytes(12, 64, num_layers=12) == 144 * 2**20


def test_grouped_heads_and_latents_shrink_the_cache():
    multi_head, heads, head_dim = kv_cache_bytes(32, 128), 32, 128
    assert kv_cache_bytes(heads // 4, head_dim) * 4 == multi_head
    assert kv_cache_bytes(1, head_dim) * heads == multi_head
    assert kv_cache_bytes(8, 192, v_head_dim=128) == 8 * 320 * 2
    assert mla_cache_bytes(512, 64) == 1152
    assert mla_cache_bytes(512, 0) / multi_head == 512 / (2 * heads * head_dim)  # m / 2d
    assert mla_cache_bytes(512, 64, num_layers=60, itemsize=1) == 60 * 576


def test_paging_wastes_less_than_a_block_a_sequence():
    lengths = [1, 16, 17, 0, 100]
    assert wasted_slots(lengths, block_size=16) == (15 + 0 + 15 + 0 + 12, 0)
    assert wasted_slots(lengths, block_size=1) == (0, 0)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        wasted_slots(lengths, block_size=0)


def test_contiguous_reservation_wastes_inside_and_outside():
    """The first paper's A and B: external T_B - T_A, internal (T_A - T'_A) + (T_B - T'_B)."""
    assert wasted_slots_contiguous([60, 900], limits=[100, 2000]) == (40 + 1100, 1900)
    assert wasted_slots_contiguous([], limits=[]) == (0, 0)
    with pytest.raises(ValueError, match="seqlens must be at most limits, got 5 > 4"):
        wasted_slots_contiguous([5], limits=[4])


def test_contiguous_waste_is_all_that_is_reserved_and_not_used():
    lengths, limits = [60, 900, 7], [100, 2000, 50]
    assert sum(wasted_slots_contiguous(lengths, limits=limits)) == 3 * 2000 - sum(lengths)


@pytest.mark.parametrize("head_dim", [16, 64, 128, 256])
@pytest.mark.parametrize("sram_bytes", [8 * 2**10, 48 * 2**10, 100 * 2**10, 227 * 2**10])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_chosen_tiles_fit_and_no_larger_ones_do(head_dim, sram_bytes, itemsize):
    room = sram_bytes // itemsize
    tile_q, tile_k = choose_tiles(sram_bytes, head_dim, itemsize)
    printed_q, printed_k = algorithm_1_tiles(room, head_dim)
    assert 1 <= tile_q <= printed_q
    assert 1 <= tile_k <= printed_k
    assert on_chip_elements(tile_q, tile_k, head_dim) <= room
    if (tile_q, tile_k) != (printed_q, printed_k):
        grown = (tile_q, tile_k + 1) if tile_k > tile_q else (tile_q + 1, tile_k + 1)
        assert on_chip_elements(*grown, head_dim) > room


def test_chosen_tiles_run_within_their_sram():
    sram = 2048
    tiles = choose_tiles(8 * sram, 8, 8)
    memory = flash_forward(*matrices(2 * tiles.tile_k, 2 * tiles.tile_k, 8), Tiling(*tiles)).memory
    assert memory.peak_sram == on_chip_elements(*tiles, 8) <= sram


def test_too_little_sram_is_refused():
    least = on_chip_elements(1, 1, 64) * 2
    assert choose_tiles(least, 64, 2) == (1, 1)
    with pytest.raises(ValueError, match=f"sram_bytes must be at least {least}, got {least - 1}"):
        choose_tiles(least - 1, 64, 2)


def test_needs_no_torch():
    path = sys.modules[Cost.__module__].__file__
    code = (  # dataclasses look their module up by name in sys.modules
        "import sys, importlib.util as u; sys.modules['torch'] = None;"
        "s = u.spec_from_file_location('cost', sys.argv[1]); m = u.module_from_spec(s);"
        "sys.modules['cost'] = m; s.loader.exec_module(m); print(m.io_standard(2, 3))"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, check=True)
    assert done.stdout.decode().strip() == str(4 * 2 * 3 + 4 * 4)


def test_four_kinds_of_cache_for_one_shape():
    kinds = cache_bytes_by_kind(32, 128, num_kv_heads=8)
    assert kinds == {"MHA": 16384, "GQA": 4096, "MQA": 512, "MLA": 1152}
    # DeepSeek-V2, table 1: MLA remembers 9 / 2 D a layer, as GQA of 2.25 heads would.
    assert kinds["MLA"] == 9 * 128 // 2 * 2 == 2.25 * kinds["MQA"]
    given = cache_bytes_by_kind(
        128, 192, v_head_dim=128, num_kv_heads=128, latent_dim=512, rope_dim=64, num_layers=61
    )
    assert given["MLA"] == 61 * 576 * 2
    assert given["MHA"] == 61 * 128 * 320 * 2
    assert given["GQA"] * 8 == given["MHA"]


@pytest.mark.parametrize(
    ("heads", "groups"),
    [((32, 8), 8), ((32, 32), 4), ((32, 1), 4), ((12, 12), 1), ((36, 36), 4), ((1, 1), 1)],
)
def test_groups_to_compare_by_divide_the_heads(heads, groups):
    assert grouped_heads(*heads) == groups


def test_latents_are_those_given_or_deepseek_s_proportions():
    assert latent_dims(128) == (512, 64)
    assert latent_dims(128, 96, 32) == (96, 32)
