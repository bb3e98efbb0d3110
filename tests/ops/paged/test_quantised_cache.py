"""Caches of int8 and float8_e4m3fn on every backend: what is written, and what is read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.kernels.quantised_cache import quantised
from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.kernels import device
from tilewise.kernels.triton.paged import keys
from tilewise.ops import call as planned
from tilewise.reference import paged as oracle
from tilewise.testing import accumulator_scales, assert_within_budget, make_paged_cache

DTYPES = [torch.int8, torch.float8_e4m3fn]
by_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])
by_kind = pytest.mark.parametrize("fixed", [False, True], ids=["token_scales", "head_scales"])
on_each_backend = pytest.mark.parametrize(("backend", "place"), BACKENDS)
# name: (query lengths, key lengths, block size, (Hq, Hk), (D, Dv), options)
CASES = {
    "decode": ([1, 1, 1], [1, 33, 70], 16, (4, 2), (64, 64), {}),
    "block_of_1": ([1, 5], [20, 9], 1, (8, 2), (64, 64), {}),
    "block_of_256": ([1, 3], [300, 9], 256, (2, 2), (32, 32), {}),
    "odd_group_and_widths": ([1, 2], [19, 34], 16, (7, 1), (80, 24), {}),
    "prefill_beside_decode": ([1, 40, 1, 0], [64, 40, 5, 9], 16, (8, 2), (64, 64), {}),
    "head_dim_128_splits": ([1], [1100], 16, (4, 1), (128, 128), {}),
    "wide_heads": ([1, 9], [90, 30], 16, (4, 1), (576, 512), {}),
    "window_and_softcap": ([1, 12], [90, 30], 16, (4, 2), (64, 64), {"window": 7, "softcap": 4.0}),
    "window_of_lone_tokens": (
        [1, 1],
        [90, 30],
        16,
        (4, 2),
        (64, 64),
        {"window": 7, "softcap": 4.0},
    ),
    "empty": ([1, 0], [0, 0], 16, (4, 2), (64, 64), {}),
}


def _problem(name: str, dtype: torch.dtype, q_dtype: torch.dtype, place: str, *, fixed: bool):
    lengths_q, lengths_k, block_size, (num_q_heads, num_kv_heads), widths, options = CASES[name]
    k_cache, v_cache, table, lengths = make_paged_cache(
        lengths_k, block_size, num_kv_heads, widths[0], v_head_dim=widths[1]
    )
    generator = torch.Generator().manual_seed(2)
    v_cache *= torch.exp2(torch.randn(v_cache.shape[:3], generator=generator)).unsqueeze(-1)
    (k_cache, k_scale), (v_cache, v_scale) = (
        quantised(cache, dtype, fixed=fixed) for cache in (k_cache, v_cache)
    )
    q = torch.randn(sum(lengths_q), num_q_heads, widths[0], generator=generator).to(q_dtype)
    cu = torch.tensor([0, *lengths_q]).cumsum(0).int()
    tensors = [t.to(place) for t in (q, k_cache, v_cache)]
    metadata = {"block_table": table, "seqlens_k": lengths, "cu_seqlens_q": cu}
    metadata |= {"k_scale": k_scale, "v_scale": v_scale}
    metadata = {name: t.to(place) for name, t in metadata.items()}
    return tensors, metadata | options, max(lengths_q)


def _check(name: str, dtype: torch.dtype, q_dtype: torch.dtype, backend, place, *, fixed: bool):
    (q, *caches), metadata, longest = _problem(name, dtype, q_dtype, place, fixed=fixed)
    truth = oracle.paged_attention(q.double(), *caches, **metadata, return_lse=True)
    eager = oracle.paged_attention(q, *caches, **metadata, return_lse=True)
    got = ops.paged_attention(
        q, *caches, **metadata, max_seqlen_q=longest, return_lse=True, backend=backend
    )
    wide = [
        (c.double() * s.unsqueeze(-1)).nan_to_num(nan=0.0)
        for c, s in zip(caches, (metadata["k_scale"], metadata["v_scale"]), strict=True)
    ]
    scales = accumulator_scales(q, *wide, wide[1], q.shape[2] ** -0.5)
    for index, part in enumerate(("o", "lse")):
        scale = scales.get(part, 0.0)
        assert_within_budget(got[index], truth[index], eager[index], name=part, scale=scale)


@on_each_backend
@by_dtype
class TestReading:
    @pytest.mark.parametrize("name", CASES)
    def test_output_and_lse_keep_the_budget_beside_poison(self, name, dtype, backend, place):
        fixed = name in ("block_of_1", "head_dim_128_splits", "prefill_beside_decode")
        _check(name, dtype, torch.float32, backend, place, fixed=fixed)

    @pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
    @by_kind
    def test_narrow_queries_keep_the_budget(self, q_dtype, fixed, dtype, backend, place):
        _check("prefill_beside_decode", dtype, q_dtype, backend, place, fixed=fixed)

    def test_narrow_queries_keep_the_budget_in_wide_heads(self, dtype, backend, place):
        _check("wide_heads", dtype, torch.bfloat16, backend, place, fixed=False)

    def test_tiny_values_do_not_underflow_in_float16(self, dtype, backend, place):
        """Scales of 1e-7, so that probability times scale is no float16 of any precision."""
        (q, *caches), metadata, longest = _problem(
            "decode", dtype, torch.float16, place, fixed=True
        )
        small = metadata | {"v_scale": metadata["v_scale"] * 1e-5}
        run = [
            ops.paged_attention(
                q.float() if backend == "cpu" else q, *caches, **options, max_seqlen_q=longest,
                backend=backend,
            ).float()
            for options in (metadata, small)
        ]  # fmt: skip
        error = (run[1] - run[0] * 1e-5).abs().max()
        # The results are subnormal float16: half a step of 2^-24, and the roundings of the first.
        assert float(error) <= 2.0**-24

    @pytest.mark.parametrize(
        "name", ["decode", "block_of_256", "head_dim_128_splits", "window_of_lone_tokens"]
    )
    @by_kind
    def test_words_of_two_channels_keep_the_budget(
        self, name, fixed, dtype, backend, place, monkeypatch
    ):
        """GPUs that multiply by mma.sync read even and odd channels apart."""
        if backend != "triton":
            pytest.skip("only the Triton kernel has this form")
        monkeypatch.setattr(device, "arch_of", lambda _: 80)
        monkeypatch.setattr(planned, "_memory", planned._Memory())
        seen = []
        form_of = keys.Form.of.__func__

        def watched(*args, **options):
            seen.append(form_of(*args, **options))
            return seen[-1]

        monkeypatch.setattr(keys.Form, "of", classmethod(watched))
        _check(name, dtype, torch.bfloat16, backend, place, fixed=fixed)
        assert any(form.pairs for form in seen)

    def test_a_row_that_was_not_finite_makes_its_sequence_nan(self, dtype, backend, place):
        (q, *caches), metadata, longest = _problem(
            "decode", dtype, torch.float32, place, fixed=False
        )
        row = (metadata["block_table"][1, 0].long(), 3)
        metadata["v_scale"][row] = math.nan
        o = ops.paged_attention(q, *caches, **metadata, max_seqlen_q=longest, backend=backend)
        assert bool(o[1].isnan().all())
        assert bool(o[[0, 2]].isfinite().all())

    def test_strided_scales_equal_contiguous_ones(self, dtype, backend, place):
        (q, *caches), metadata, longest = _problem(
            "prefill_beside_decode", dtype, torch.float32, place, fixed=False
        )
        plain = ops.paged_attention(q, *caches, **metadata, max_seqlen_q=longest, backend=backend)
        both = torch.stack([metadata["k_scale"], metadata["v_scale"]], dim=1)
        metadata["k_scale"], metadata["v_scale"] = both.unbind(1)
        again = ops.paged_attention(q, *caches, **metadata, max_seqlen_q=longest, backend=backend)
        assert torch.equal(plain, again)


def _empty_cache(shape: tuple[int, ...], dtype: torch.dtype, place: str) -> Tensor:
    return torch.full(shape, -7, dtype=torch.int8, device=place).view(dtype)


def _rows(place: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    """Rows that try the format's edges, of heads that lie in one tensor, and slots to skip."""
    both = torch.randn(9, 2, 3, 80) * torch.exp2(3 * torch.randn(9, 2, 3, 1))
    k, v = both[:, 0], both[:, 1, :, :24]
    k[0, 1], v[1, 0], k[2, 2] = 0.0, 0.0, 1e-38
    k[3, 0, 5], v[4, 1, 2], v[5, 2] = math.inf, math.nan, 3e30
    k[6] = torch.linspace(-1, 1, 80)
    slots = torch.tensor([3, 0, 19, 7, -1, 8, 9, -1, 11])
    return k.to(place, dtype), v.to(place, dtype), slots.to(place)


@on_each_backend
@by_dtype
class TestWriting:
    @by_kind
    @pytest.mark.parametrize("block_size", [1, 4])
    def test_bits_are_those_of_the_rule(self, block_size, fixed, dtype, backend, place):
        if place == "cuda":
            pytest.skip("a GPU fuses multiplications and additions: see below")
        k, v, slots = _rows(place)
        shapes = [(20 // block_size, block_size, 3, width) for width in (80, 24)]
        results = []
        for write in (oracle.write_kv_cache, ops.write_kv_cache):
            caches = [_empty_cache(shape, dtype, place) for shape in shapes]
            kind = (3,) if fixed else shapes[0][:3]
            scales = {name: torch.full(kind, 0.013) for name in ("k_scale", "v_scale")}
            extra = {} if write is oracle.write_kv_cache else {"backend": backend}
            write(k, v, *caches, slots, **scales, **extra)
            results.append([*(c.view(torch.int8) for c in caches), *scales.values()])
        for got, want in zip(results[1], results[0], strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)

    def test_what_comes_back_is_within_the_bound(self, dtype, backend, place):
        k, v = (torch.randn(16, 3, 64, device=place) for _ in range(2))
        caches = [_empty_cache((4, 4, 3, 64), dtype, place) for _ in range(2)]
        scales = [torch.full((4, 4, 3), math.nan, device=place) for _ in range(2)]
        slots = torch.randperm(16).to(place)
        ops.write_kv_cache(
            k, v, *caches, slots, k_scale=scales[0], v_scale=scales[1], backend=backend
        )
        for rows, cache, scale in zip((k, v), caches, scales, strict=True):
            back = (cache.double() * scale.double().unsqueeze(-1)).flatten(0, 1)[slots]
            amax = rows.double().abs().amax(-1, keepdim=True)
            step = amax / 254 if dtype == torch.int8 else (rows.abs() / 16).clamp(amax / 458752)
            assert bool(((back - rows).abs() <= step * 1.00001).all())

    def test_strided_caches_and_scales(self, dtype, backend, place):
        k, v = (torch.randn(5, 2, 16, device=place) for _ in range(2))
        slots = torch.tensor([3, 4, 23, 0, 10], device=place)
        fused = _empty_cache((6, 2, 4, 2, 16), dtype, place)
        scales = torch.full((6, 2, 4, 2), math.nan, device=place)
        plain = [_empty_cache((6, 4, 2, 16), dtype, place) for _ in range(2)]
        plain_scales = [torch.full((6, 4, 2), math.nan, device=place) for _ in range(2)]
        for caches, (k_scale, v_scale) in (
            (fused.unbind(1), scales.unbind(1)),
            (plain, plain_scales),
        ):
            ops.write_kv_cache(
                k, v, *caches, slots, k_scale=k_scale, v_scale=v_scale, backend=backend
            )
        bits = fused.view(torch.int8)
        for side in range(2):
            assert torch.equal(bits[:, side], plain[side].view(torch.int8))
            assert torch.equal(scales[:, side].isnan(), plain_scales[side].isnan())
        assert int(scales.isfinite().sum()) == 2 * 5 * 2

    def test_copies_take_the_scales_along(self, dtype, backend, place):
        caches = [
            torch.randint(-128, 128, (6, 4, 2, w), device=place).to(torch.int8).view(dtype)
            for w in (24, 40)
        ]
        scales = [torch.rand(6, 4, 2, device=place) for _ in range(2)]
        want = [t.view(torch.int8).clone() for t in caches] + [t.clone() for t in scales]
        for t in want:
            t[[4, 1]] = t[[0, 0]]
        pairs = torch.tensor([[0, 4], [0, 1]], device=place)
        ops.copy_blocks(*caches, pairs, k_scale=scales[0], v_scale=scales[1], backend=backend)
        got = [t.view(torch.int8) for t in caches] + scales
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        fixed = torch.rand(2, device=place)
        ops.copy_blocks(*caches, pairs, k_scale=fixed, v_scale=fixed, backend=backend)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@by_dtype
def test_bits_do_not_depend_on_threads(dtype):
    rows = torch.randn(300, 2, 64)
    (q, *caches), metadata, _ = _problem(
        "head_dim_128_splits", dtype, torch.bfloat16, "cpu", fixed=False
    )
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            written = [_empty_cache((20, 16, 2, 64), dtype, "cpu") for _ in range(2)]
            scales = [torch.zeros(20, 16, 2) for _ in range(2)]
            ops.write_kv_cache(
                rows, rows, *written, torch.arange(300), k_scale=scales[0], v_scale=scales[1]
            )
            o = ops.paged_attention(q, *caches, **metadata, max_seqlen_q=1)
            results.append([o, written[1].view(torch.int8), scales[0]])
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


@pytest.mark.gpu
@by_dtype
def test_a_gpu_writes_the_bits_of_the_rule_but_for_ties(dtype):
    rows = torch.randn(4096, 8, 128).bfloat16()
    results = []
    for place, write in (("cpu", oracle.write_kv_cache), ("cuda", ops.write_kv_cache)):
        caches = [_empty_cache((256, 16, 8, 128), dtype, place) for _ in range(2)]
        scales = {name: torch.zeros(256, 16, 8, device=place) for name in ("k_scale", "v_scale")}
        x = rows.to(place)
        write(x, x, *caches, torch.arange(4096, device=place), **scales)
        results.append((caches[0].cpu().view(torch.int8), scales["k_scale"].cpu()))
    torch.testing.assert_close(results[1][1], results[0][1], rtol=2**-22, atol=0)
    different = (results[1][0] != results[0][0]).double().mean()
    assert float(different) < 1e-4


REFUSALS = {
    "no scales": ({"k_scale": None, "v_scale": None}, "k_scale must be given for a int8 cache"),
    "one scale": ({"v_scale": None}, "v_scale must be given for a int8 cache, got None"),
    "a number for all": ({"k_scale": torch.ones(1)}, r"k_scale must have shape .* got \(1,\)"),
    "of two kinds": ({"v_scale": torch.ones(2)}, "v_scale must be of the kind of k_scale"),
    "of doubles": ({"k_scale": torch.ones(3, 4, 2).double()}, "k_scale must have dtype float32"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_scales_are_refused_by_name(name):
    changes, message = REFUSALS[name]
    cache = torch.zeros(3, 4, 2, 16, dtype=torch.int8)
    scales = {"k_scale": torch.ones(3, 4, 2), "v_scale": torch.ones(3, 4, 2)} | changes
    rows, slots = torch.randn(2, 2, 16), torch.tensor([0, 5])
    pairs = torch.tensor([[0, 1]])
    calls = (
        lambda: ops.write_kv_cache(rows, rows, cache, cache.clone(), slots, **scales),
        lambda: ops.copy_blocks(cache, cache.clone(), pairs, **scales),
    )
    for call in calls:
        with pytest.raises((ValueError, TypeError), match=message):
            call()


def test_float_caches_refuse_scales_and_other_integers_are_no_caches():
    cache, rows, slots = torch.zeros(3, 4, 2, 16), torch.randn(1, 2, 16), torch.tensor([0])
    with pytest.raises(ValueError, match="k_scale must be None for a float32 cache"):
        ops.write_kv_cache(
            rows, rows, cache, cache, slots, k_scale=torch.ones(2), v_scale=torch.ones(2)
        )
    with pytest.raises(
        TypeError, match=r"k_cache must be one of .*int8, float8_e4m3fn, uint8, got int32"
    ):
        ops.write_kv_cache(rows, rows, cache.int(), cache.int(), slots)


def test_float64_queries_are_refused_by_kernels():
    (q, *caches), metadata, _ = _problem("decode", torch.int8, torch.float64, "cpu", fixed=True)
    with pytest.raises(UnsupportedError, match="float64"):
        ops.paged_attention(q, *caches, **metadata, max_seqlen_q=1)
