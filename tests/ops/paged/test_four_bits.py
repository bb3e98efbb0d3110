"""Caches of 4 bits on every backend: what is written, and what is read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.reference import four_bits
from tilewise.reference import paged as oracle
from tilewise.testing import accumulator_scales, assert_within_budget, make_paged_cache

on_each_backend = pytest.mark.parametrize(("backend", "place"), BACKENDS)
# name: (query lengths, key lengths, block size, (Hq, Hk), (D, Dv), options)
CASES = {
    "decode": ([1, 1, 1], [1, 33, 70], 16, (4, 2), (64, 64), {}),
    "block_of_1": ([1, 5], [20, 9], 1, (8, 2), (64, 64), {}),
    "odd_group_and_widths": ([1, 2], [19, 34], 16, (7, 1), (80, 32), {}),
    "narrowest": ([1, 2], [19, 34], 16, (2, 1), (16, 16), {}),
    "prefill_beside_decode": ([1, 40, 1, 0], [64, 40, 5, 9], 16, (8, 2), (64, 64), {}),
    "head_dim_128_splits": ([1], [1100], 16, (4, 1), (128, 128), {}),
    "wide_heads": ([1, 9], [90, 30], 16, (4, 1), (256, 256), {}),
    "two_parts_of_keys": ([1, 9], [90, 30], 16, (4, 1), (192, 128), {}),
    "window_and_softcap": ([1, 12], [90, 30], 16, (4, 2), (64, 64), {"window": 7, "softcap": 4.0}),
    "empty": ([1, 0], [0, 0], 16, (4, 2), (64, 64), {}),
}


def _packed(cache: Tensor) -> tuple[Tensor, Tensor]:
    """Pack a cache of `make_paged_cache`; slots that were NaN get codes, and NaN for a scale."""
    is_poison = cache.isnan().any(-1)
    stored, scale = four_bits.pack(cache.float().nan_to_num(nan=0.0))
    stored[is_poison], scale[is_poison] = 0xE7, math.nan
    return stored, scale


def _problem(name: str, q_dtype: torch.dtype, place: str):
    lengths_q, lengths_k, block_size, (num_q_heads, num_kv_heads), widths, options = CASES[name]
    k_cache, v_cache, table, lengths = make_paged_cache(
        lengths_k, block_size, num_kv_heads, widths[0], v_head_dim=widths[1]
    )
    (k_cache, k_scale), (v_cache, v_scale) = map(_packed, (k_cache, v_cache))
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(sum(lengths_q), num_q_heads, widths[0], generator=generator).to(q_dtype)
    cu = torch.tensor([0, *lengths_q]).cumsum(0).int()
    metadata = {"block_table": table, "seqlens_k": lengths, "cu_seqlens_q": cu}
    metadata |= {"k_scale": k_scale, "v_scale": v_scale}
    metadata = {name: t.to(place) for name, t in metadata.items()}
    return [t.to(place) for t in (q, k_cache, v_cache)], metadata | options, max(lengths_q)


@on_each_backend
class TestReading:
    @pytest.mark.parametrize("name", CASES)
    def test_output_and_lse_keep_the_budget_beside_poison(self, name, backend, place):
        self._check(name, torch.float32, backend, place)

    @pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    def test_narrow_queries_keep_the_budget(self, q_dtype, backend, place):
        self._check("prefill_beside_decode", q_dtype, backend, place)

    def _check(self, name: str, q_dtype: torch.dtype, backend: str, place: str) -> None:
        (q, *caches), metadata, longest = _problem(name, q_dtype, place)
        truth = oracle.paged_attention(q.double(), *caches, **metadata, return_lse=True)
        eager = oracle.paged_attention(q, *caches, **metadata, return_lse=True)
        got = ops.paged_attention(
            q, *caches, **metadata, max_seqlen_q=longest, return_lse=True, backend=backend
        )
        wide = [
            four_bits.unpack(c, metadata[s].nan_to_num(nan=0.0), torch.float64)
            for c, s in zip(caches, ("k_scale", "v_scale"), strict=True)
        ]
        scales = accumulator_scales(q, *wide, wide[1], q.shape[2] ** -0.5)
        for index, part in enumerate(("o", "lse")):
            scale = scales.get(part, 0.0)
            assert_within_budget(got[index], truth[index], eager[index], name=part, scale=scale)

    def test_a_row_that_was_not_finite_makes_its_sequence_nan(self, backend, place):
        (q, *caches), metadata, longest = _problem("decode", torch.float32, place)
        metadata["v_scale"][(metadata["block_table"][1, 0].long(), 3)] = math.nan
        o = ops.paged_attention(q, *caches, **metadata, max_seqlen_q=longest, backend=backend)
        assert bool(o[1].isnan().all())
        assert bool(o[[0, 2]].isfinite().all())


@on_each_backend
class TestWriting:
    @pytest.mark.parametrize("block_size", [1, 4])
    def test_codes_and_scales_are_those_of_the_rule(self, block_size, backend, place):
        k = torch.randn(9, 3, 80) * torch.exp2(3 * torch.randn(9, 3, 1))
        v = torch.randn(9, 3, 32)
        k[0, 1], v[1, 0], k[2, 2] = 0.0, 0.0, 1e-38
        k[3, 0, 5], v[4, 1, 2] = math.inf, math.nan
        k[5, 2] *= 1e30
        slots = torch.tensor([3, 0, 19, 7, -1, 8, 9, -1, 11])
        results = []
        for write, extra, where in (
            (oracle.write_kv_cache, {}, "cpu"),
            (ops.write_kv_cache, {"backend": backend}, place),
        ):
            caches, scales = self._empty(20 // block_size, block_size, (80, 32), where)
            write(k.to(where), v.to(where), *caches, slots.to(where), **scales, **extra)
            results.append([x.cpu() for x in (*caches, *scales.values())])
        self._check(*results)

    @pytest.mark.parametrize("interleaved", [False, True])
    @pytest.mark.parametrize("rotary", [32, 96], ids=["in part", "whole"])
    def test_rows_that_are_normalised_and_turned_on_their_way(
        self, rotary, interleaved, backend, place
    ):
        q, k, v = torch.randn(9, 6, 96), torch.randn(9, 3, 96), torch.randn(9, 3, 64)
        angles = torch.rand(9, rotary // 2) * 6
        options = {"cos": angles.cos(), "sin": angles.sin()}
        options |= {"q_norm": torch.rand(96), "k_norm": torch.rand(96)}
        slots = torch.tensor([3, 0, 19, 7, -1, 8, 9, -1, 11])
        results = []
        for write, extra, where in (
            (oracle.rope_write_kv_cache, {}, "cpu"),
            (ops.rope_write_kv_cache, {"backend": backend}, place),
        ):
            caches, scales = self._empty(5, 4, (96, 64), where)
            given = {name: x.to(where) for name, x in options.items()}
            turned = write(
                *(x.to(where) for x in (q, k, v)), *caches, slots.to(where), **given, **scales,
                interleaved=interleaved, **extra,
            )  # fmt: skip
            results.append([x.cpu() for x in (*caches, *scales.values(), turned)])
        torch.testing.assert_close(results[1].pop(), results[0].pop())
        self._check(*results)

    def test_copies_take_the_scales_along(self, backend, place):
        caches, scales = self._empty(6, 4, (32, 64), place)
        for x in caches:
            x.random_(0, 256)
        for x in scales.values():
            x.uniform_()
        want = [x.clone() for x in (*caches, *scales.values())]
        for x in want:
            x[[4, 1]] = x[[0, 0]]
        pairs = torch.tensor([[0, 4], [0, 1]], device=place)
        ops.copy_blocks(*caches, pairs, **scales, backend=backend)
        got = [*caches, *scales.values()]
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))

    def _empty(self, blocks: int, size: int, widths: tuple[int, int], place: str):
        shape = (blocks, size, 3)
        caches = [torch.full((*shape, w // 2), 7, dtype=torch.uint8, device=place) for w in widths]
        scales = {name: torch.full(shape, 0.013, device=place) for name in ("k_scale", "v_scale")}
        return caches, scales

    def _check(self, want: list[Tensor], got: list[Tensor]) -> None:
        """Another order of sums moves a number that lies between two codes by one, and no more."""
        for a, b in zip(got[:2], want[:2], strict=True):
            for shift in (0, 4):
                step = ((a >> shift) & 15).int() - ((b >> shift) & 15).int()
                assert int(step.abs().max()) <= 1
                assert float((step != 0).double().mean()) < 5e-3
        for a, b in zip(got[2:], want[2:], strict=True):
            torch.testing.assert_close(a, b, rtol=4e-6, atol=0, equal_nan=True)


def test_a_step_of_many_rows_has_the_bits_of_any_number_of_threads():
    (q, *caches), metadata, longest = _problem("prefill_beside_decode", torch.bfloat16, "cpu")
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(ops.paged_attention(q, *caches, **metadata, max_seqlen_q=longest))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(x, results[0]) for x in results[1:])


REFUSALS = {
    "no scales": ({"k_scale": None, "v_scale": None}, "k_scale must be given for a uint8 cache"),
    "scales of heads": (
        {"k_scale": torch.ones(2), "v_scale": torch.ones(2)},
        r"k_scale must have shape \(3, 4, 2\), got \(2,\)",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_scales_are_refused_by_name(name: str):
    changes, message = REFUSALS[name]
    cache = torch.zeros(3, 4, 2, 8, dtype=torch.uint8)
    scales = {"k_scale": torch.ones(3, 4, 2), "v_scale": torch.ones(3, 4, 2)} | changes
    rows, slots = torch.randn(2, 2, 16), torch.tensor([0, 5])
    with pytest.raises(ValueError, match=message):
        ops.write_kv_cache(rows, rows, cache, cache.clone(), slots, **scales)


def test_rows_of_another_width_are_refused_by_what_a_cache_holds():
    cache = torch.zeros(3, 4, 2, 8, dtype=torch.uint8)
    scales = {"k_scale": torch.ones(3, 4, 2), "v_scale": torch.ones(3, 4, 2)}
    rows, slots = torch.randn(2, 2, 8), torch.tensor([0, 5])
    with pytest.raises(ValueError, match=r"k must have shape \(2, 2, 16\), got \(2, 2, 8\)"):
        ops.write_kv_cache(rows, rows, cache, cache.clone(), slots, **scales)


@pytest.mark.parametrize("width", [24, 512])
def test_widths_that_the_portable_kernels_do_not_take_are_refused(width: int):
    (q, *_), metadata, longest = _problem("decode", torch.float32, "cpu")
    cache = torch.zeros(20, 16, 2, width // 2, dtype=torch.uint8)
    scales = {name: torch.ones(20, 16, 2) for name in ("k_scale", "v_scale")}
    with pytest.raises(UnsupportedError, match="head_dim must be a multiple of 16 of at most 256"):
        ops.paged_attention(
            q.new_zeros(*q.shape[:2], width), cache, cache, **metadata | scales,
            max_seqlen_q=longest, backend="triton",
        )  # fmt: skip
