"""The printed algorithms: what they compute, and what they move, need and keep on chip."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tilewise.reference.incremental import (
    flash_backward,
    flash_forward,
    flash_forward_2,
    incremental_forward,
    standard_forward,
)
from tilewise.reference.standard import attention
from tilewise.reference.tiling import Tiling, algorithm_1_tiles, chunks, tile_layout

F64 = torch.float64
EXACT = {"rtol": 1e-11, "atol": 1e-12}


def matrices(seqlen_q: int, seqlen_k: int, head_dim: int = 8, v_head_dim: int | None = None):
    generator = torch.Generator().manual_seed(0)
    shapes = ((seqlen_q, head_dim), (seqlen_k, head_dim), (seqlen_k, v_head_dim or head_dim))
    return [torch.randn(shape, dtype=F64, generator=generator) for shape in shapes]


def causal(i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def sees_nothing_at_first(i: Tensor, j: Tensor) -> Tensor:
    return j <= i - 5


def every_third(i: Tensor, j: Tensor) -> Tensor:
    return (i + 2 * j) % 3 == 0


def scattered(i: Tensor, j: Tensor) -> Tensor:
    return (5 * i + 3 * j) % 4 != 0


def truth(q: Tensor, k: Tensor, v: Tensor, tiling: Tiling) -> tuple[Tensor, Tensor]:
    """Compute the same in one piece with `standard.attention`; (Nq, dv) and (Nq,)."""
    i, j = torch.arange(len(q)).unsqueeze(1), torch.arange(len(k)).unsqueeze(0)
    visible = torch.ones(len(q), len(k), dtype=torch.bool)
    if tiling.mask is not None:
        visible &= tiling.mask(i, j)
    if tiling.layout is not None:
        rows = tiling.layout.repeat_interleave(tiling.tile_q, 0)[: len(q)]
        visible &= rows.repeat_interleave(tiling.tile_k, 1)[:, : len(k)]
    o, lse = attention(
        *(x.unsqueeze(1).unsqueeze(0) for x in (q, k, v)),
        mask=visible,
        keep_mask=None if tiling.keep is None else tiling.keep(i, j),
        dropout_p=tiling.dropout_p,
        softmax_scale=tiling.softmax_scale,
        return_lse=True,
    )
    return o[0, :, 0], lse[0, 0]


CHECKERBOARD = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]]).bool()
CASES = {
    "tiles_that_divide": ((24, 24), Tiling(6, 8)),
    "tiles_that_do_not_divide": ((23, 17), Tiling(5, 7)),
    "one_tile": ((6, 6), Tiling(8, 8)),
    "tiles_of_one": ((5, 4), Tiling(1, 1)),
    "as_printed_without_scale": ((12, 12), Tiling(4, 4, softmax_scale=1.0)),
    "causal": ((20, 20), Tiling(6, 4, mask=causal)),
    "empty_rows": ((20, 20), Tiling(6, 4, mask=sees_nothing_at_first)),
    "scattered_mask": ((20, 20), Tiling(6, 4, mask=every_third)),
    "dropout": ((20, 20), Tiling(6, 4, keep=scattered, dropout_p=0.25)),
    "block_sparse": ((20, 12), Tiling(4, 4, layout=CHECKERBOARD)),
    "mask_dropout_and_layout": (
        (20, 12),
        Tiling(4, 4, layout=CHECKERBOARD, mask=causal, keep=scattered, dropout_p=0.25),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_flash_forward_equals_standard(name):
    shape, tiling = CASES[name]
    q, k, v = matrices(*shape, v_head_dim=5)
    want, want_lse = truth(q, k, v, tiling)
    result = flash_forward(q, k, v, tiling)
    torch.testing.assert_close(result.o, want, **EXACT)
    torch.testing.assert_close(result.m + result.l.log(), want_lse, **EXACT)


@pytest.mark.parametrize("name", CASES)
def test_flash_forward_2_equals_standard(name):
    shape, tiling = CASES[name]
    q, k, v = matrices(*shape, v_head_dim=5)
    want, want_lse = truth(q, k, v, tiling)
    result = flash_forward_2(q, k, v, tiling)
    torch.testing.assert_close(result.o, want, **EXACT)
    torch.testing.assert_close(result.xi, want_lse, **EXACT)


@pytest.mark.parametrize("name", CASES)
def test_flash_backward_equals_autograd(name):
    shape, tiling = CASES[name]
    leaves = [x.requires_grad_() for x in matrices(*shape, v_head_dim=5)]
    want, _ = truth(*leaves, tiling)
    do = torch.randn(want.shape, dtype=F64)
    want.backward(do)
    q, k, v = (x.detach() for x in leaves)
    forward = flash_forward_2(q, k, v, tiling)
    result = flash_backward(do, q, k, v, forward.o, forward.xi, tiling)
    for got, leaf in zip(result[:3], leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, **EXACT)


def test_row_sums_of_p_dp_equal_those_of_o_do():
    """Lemma 2.1, the reason why the backward pass needs no row of P."""
    q, k, v = matrices(9, 9)
    do = torch.randn(9, 8, dtype=F64)
    p = (q @ k.T * 8**-0.5).softmax(1)
    u = ((p @ v) * do).sum(1)
    torch.testing.assert_close((p * (do @ v.T)).sum(1), u, **EXACT)


@pytest.mark.parametrize("stable", [False, True])
@pytest.mark.parametrize("chunk_size", [1, 5, 24, 40])
def test_incremental_equals_standard(chunk_size, stable):
    q, k, v = matrices(11, 24, v_head_dim=5)
    o, _ = incremental_forward(q, k, v, chunk_size=chunk_size, stable=stable)
    torch.testing.assert_close(o, truth(q, k, v, Tiling(1, 1))[0], **EXACT)


def test_only_the_stable_form_survives_large_scores():
    q, k, v = matrices(6, 12)
    want, _ = truth(1e4 * q, k, v, Tiling(1, 1))
    stable, _ = incremental_forward(1e4 * q, k, v, chunk_size=4)
    unstable, _ = incremental_forward(1e4 * q, k, v, chunk_size=4, stable=False)
    torch.testing.assert_close(stable, want, **EXACT)
    assert bool(unstable.isnan().any())
    tiled = flash_forward(1e4 * q, k, v, Tiling(3, 4)).o
    torch.testing.assert_close(tiled, want, **EXACT)


def test_standard_equals_standard():
    q, k, v = matrices(7, 9, v_head_dim=5)
    for stores_p in (False, True):
        o, _ = standard_forward(q, k, v, stores_p=stores_p)
        torch.testing.assert_close(o, truth(q, k, v, Tiling(1, 1))[0], **EXACT)


@pytest.mark.parametrize(("n", "d"), [(16, 4), (32, 8), (48, 8)])
def test_standard_moves_nd_and_n_squared(n, d):
    memory = standard_forward(*matrices(n, n, d))[1]
    assert memory.loads == 3 * n * d + 2 * n * n
    assert memory.stores == n * d + 2 * n * n
    assert memory.peak_extra == n * n
    fused = standard_forward(*matrices(n, n, d), stores_p=False)[1]
    assert fused.accesses == 4 * n * d + 2 * n * n


def run_algorithm_1(n: int, d: int, sram: int):
    return flash_forward(*matrices(n, n, d), Tiling(*algorithm_1_tiles(sram, d))).memory


@pytest.mark.parametrize(("n", "d", "sram"), [(64, 8, 256), (64, 8, 250), (50, 4, 100)])
def test_flash_forward_count_is_the_closed_formula(n, d, sram):
    sweeps = math.ceil(n / math.ceil(sram / (4 * d)))
    memory = run_algorithm_1(n, d, sram)
    assert memory.loads == 2 * n * d + sweeps * (2 * n * d + 2 * n)
    assert memory.stores == n * d + 2 * n + sweeps * (n * d + 2 * n)


def test_flash_traffic_is_n_squared_d_squared_over_m():
    """Theorem 2: past the single reads of K and V, accesses are 4 n^2 d (3 d + 4) / M exactly."""
    n, d, sram = 128, 8, 256

    def swept(n: int, sram: int) -> int:
        return run_algorithm_1(n, d, sram).accesses - (3 * n * d + 2 * n)

    once = swept(n, sram)
    assert once == 4 * n * n * d * (3 * d + 4) // sram
    assert swept(n, 2 * sram) * 2 == once
    assert swept(2 * n, sram) == once * 4


def test_flash_moves_less_than_standard_when_sram_exceeds_d_squared():
    n, d = 128, 8
    standard = standard_forward(*matrices(n, n, d))[1].accesses
    assert run_algorithm_1(n, d, 16 * d * d).accesses < standard
    assert run_algorithm_1(n, d, d).accesses > standard


@pytest.mark.parametrize("n", [32, 64, 128])
def test_flash_needs_two_numbers_a_row_and_standard_a_matrix(n):
    tiling = Tiling(8, 16)
    q, k, v = matrices(n, n)
    assert flash_forward(q, k, v, tiling).memory.peak_extra == 2 * n
    second = flash_forward_2(q, k, v, tiling)
    assert second.memory.peak_extra == n
    backward = flash_backward(q, q, k, v, second.o, second.xi, tiling)
    assert backward.memory.peak_extra == 0
    assert standard_forward(q, k, v)[1].peak_extra == n * n


def test_incremental_needs_a_chunk_of_scores():
    q, k, v = matrices(32, 64)
    for chunk_size in (4, 16):
        memory = incremental_forward(q, k, v, chunk_size=chunk_size)[1]
        assert memory.peak_extra == 32 * chunk_size + 2 * 32  # A_j, pi and c
        memory = incremental_forward(q, k, v, chunk_size=chunk_size, stable=False)[1]
        assert memory.peak_extra == 32 * chunk_size + 32


@pytest.mark.parametrize("sram", [1024, 2048, 4096])
def test_flash_fits_its_sram(sram):
    d = 8
    assert sram >= 8 * d * d + 8 * d  # below, line 1 of the algorithm fits 5 M / 4 only
    tile_q, tile_k = algorithm_1_tiles(sram, d)
    memory = run_algorithm_1(4 * tile_k, d, sram)
    assert memory.peak_sram == 2 * (tile_q + tile_k) * d + tile_q * tile_k + 2 * tile_q
    assert memory.peak_sram <= sram


@pytest.mark.parametrize("sram", [32, 100, 256, 512])
def test_flash_with_little_sram_is_bounded_by_a_constant_times_m(sram):
    d = 8
    tile_q, tile_k = algorithm_1_tiles(sram, d)
    memory = run_algorithm_1(64, d, sram)
    rounding = 4 * d + tile_q + tile_k  # of the two ceilings
    assert memory.peak_sram <= 5 * sram / 4 + 2 * tile_q + rounding


def test_flash_sram_does_not_grow_with_the_sequence():
    tiling = Tiling(8, 16)
    peaks = {flash_forward_2(*matrices(n, n), tiling).memory.peak_sram for n in (16, 64, 128)}
    assert peaks == {2 * (8 + 16) * 8 + 8 * 16 + 2 * 8}


def test_flash_forward_2_writes_each_output_once():
    n, d, tiling = 64, 8, Tiling(16, 8)
    memory = flash_forward_2(*matrices(n, n, d), tiling).memory
    assert memory.stores == n * d + n
    assert memory.loads == n * d + (n // 16) * 2 * n * d


def test_flash_backward_count_is_the_closed_formula():
    n, d, tiling = 64, 8, Tiling(4, 16)
    q, k, v = matrices(n, n, d)
    forward = flash_forward_2(q, k, v, tiling)
    memory = flash_backward(q, q, k, v, forward.o, forward.xi, tiling).memory
    sweeps = n // 16
    assert memory.loads == 4 * n * d + sweeps * (4 * n * d + n)
    assert memory.stores == 3 * n * d + 2 * n * d + sweeps * n * d


@pytest.mark.parametrize("kept", [0, 1, 7, 16, 31, 64])
def test_block_sparse_traffic_is_proportional_to_density(kept):
    n, d, tile = 64, 8, 8
    layout = torch.zeros(64, dtype=torch.bool)
    layout[torch.randperm(64, generator=torch.Generator().manual_seed(kept))[:kept]] = True
    sparse = Tiling(tile, tile, layout=layout.view(8, 8))
    memory = flash_forward(*matrices(n, n, d), sparse).memory
    once, per_tile = 3 * n * d + 2 * n, 3 * tile * d + 4 * tile
    assert memory.accesses == once + kept * per_tile


def test_causal_layout_skips_almost_half_and_changes_nothing():
    n, tiling = 64, Tiling(8, 8, mask=causal)
    q, k, v = matrices(n, n)
    layout = tile_layout(causal, n, n, tiling)
    assert int(layout.sum()) == 8 * 9 // 2
    skipping = Tiling(8, 8, mask=causal, layout=layout)
    full, half = flash_forward_2(q, k, v, tiling), flash_forward_2(q, k, v, skipping)
    assert torch.equal(full.o, half.o)
    assert torch.equal(full.xi, half.xi)
    once = 2 * n * 8 + n
    assert (half.memory.accesses - once) / (full.memory.accesses - once) == 36 / 64


def test_tiles_of_algorithm_1_by_hand():
    assert algorithm_1_tiles(1024, 8) == (8, 32)
    assert algorithm_1_tiles(1025, 8) == (8, 33)
    assert algorithm_1_tiles(100, 8) == (4, 4)


def test_chunks_cover_a_range_once():
    assert chunks(5, 2) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert chunks(0, 2) == []
