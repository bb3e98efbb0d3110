"""Latent caches of int8 and float8_e4m3fn on every backend: written, read absorbed and expanded."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels.quantised_cache import quantised
from tests.ops.latent.test_api import BACKENDS, DN, DR, DV, HEADS, SCALE, R, absorb
from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.kernels import device
from tilewise.kernels.triton.latent import plan as latents
from tilewise.ops import call as planned
from tilewise.reference import mla as oracle
from tilewise.reference.mla import dequantise_latents
from tilewise.testing import accumulator_scales, assert_within_budget, make_paged_cache

by_dtype = pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float8_e4m3fn], ids=lambda d: str(d)[6:]
)
on_each_backend = pytest.mark.parametrize(("backend", "place"), BACKENDS)
# name: (query lengths, key lengths, block size, heads, (R, Dr))
CASES = {
    "decode": ([1, 1, 1], [1, 33, 70], 16, 4, (32, 16)),
    "odd_widths_and_blocks_of_1": ([1, 3], [20, 9], 1, 7, (40, 10)),
    "blocks_of_256_and_splits": ([1, 1], [700, 30], 256, 20, (64, 32)),
    "prompts_beside_decode": ([1, 40, 1, 0], [64, 40, 0, 9], 32, 4, (32, 16)),
}
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def problem(name: str, dtype: torch.dtype, q_dtype: torch.dtype, place: str = "cpu"):
    """Return q_latent, q_rope, an 8-bit cache, and the metadata with its scales."""
    runs, lengths, block_size, heads, (rank, rope_dim) = CASES[name]
    cache, _, table, seqlens_k = make_paged_cache(lengths, block_size, 1, rank + rope_dim)
    cache[..., rank:] *= 20  # rotated keys are not normalised
    parts = [quantised(part, dtype) for part in cache.split((rank, rope_dim), dim=-1)]
    stored = torch.cat([bits.view(torch.int8) for bits, _ in parts], -1).view(dtype).squeeze(2)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(sum(runs), heads, rank + rope_dim, generator=generator)
    q[..., rank:] /= 20
    tensors = [*q.to(q_dtype).split((rank, rope_dim), dim=-1), stored]
    metadata = {
        "block_table": table,
        "seqlens_k": seqlens_k,
        "cu_seqlens_q": torch.tensor([0, *runs]).cumsum(0).int(),
        "latent_scale": torch.cat([scale for _, scale in parts], dim=-1),
    }
    moved = {key: tensor.to(place) for key, tensor in metadata.items()}
    return [t.to(place) for t in tensors], moved | {"softmax_scale": SCALE}, max(runs)


@on_each_backend
@by_dtype
class TestReading:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [(name, "float32") for name in CASES]
        + [("decode", "bfloat16"), ("prompts_beside_decode", "bfloat16"), ("decode", "float16")],
    )
    def test_output_and_lse_keep_the_budget_beside_poison(self, name, kind, dtype, backend, place):
        (*queries, cache), metadata, longest = problem(name, dtype, KINDS[kind], place)
        wide = [q.double() for q in queries]
        truth = oracle.mla_decode(*wide, cache, **metadata, return_lse=True)
        eager = oracle.mla_decode(*queries, cache, **metadata, return_lse=True)
        got = ops.mla_decode(
            *queries, cache, **metadata, max_seqlen_q=longest, return_lse=True, backend=backend
        )
        rank = queries[0].shape[2]
        rows = dequantise_latents(cache, metadata["latent_scale"], rank, torch.float64)
        q, rows = torch.cat(wide, -1), rows.nan_to_num()
        scales = accumulator_scales(q, rows, rows[..., :rank], q, SCALE)
        for index, part in enumerate(("o", "lse")):
            scale = scales.get(part, 0.0)
            assert_within_budget(got[index], truth[index], eager[index], name=part, scale=scale)

    @pytest.mark.parametrize("name", ["decode", "blocks_of_256_and_splits"])
    def test_words_of_two_channels_keep_the_budget(self, name, dtype, backend, place, monkeypatch):
        """GPUs that multiply by mma.sync read even and odd channels apart."""
        if backend != "triton":
            pytest.skip("only the Triton kernel has this form")
        if CASES[name][3] > 16:
            monkeypatch.setitem(CASES, name, (*CASES[name][:3], 16, CASES[name][4]))
        monkeypatch.setattr(device, "arch_of", lambda _: 80)
        monkeypatch.setattr(planned, "_memory", planned._Memory())
        has_words, seen = latents._has_words, []

        def watched(*args):
            seen.append(has_words(*args))
            return seen[-1]

        monkeypatch.setattr(latents, "_has_words", watched)
        self.test_output_and_lse_keep_the_budget_beside_poison(
            name, "bfloat16", dtype, backend, place
        )
        assert seen
        assert all(seen)

    def test_tiny_latents_do_not_underflow_in_float16(self, dtype, backend, place):
        """Scales of 1e-7, so that probability times scale is no float16 of any precision."""
        (*queries, cache), metadata, longest = problem("decode", dtype, torch.float16, place)
        queries[0] = torch.zeros_like(queries[0])  # the latents have no say in who is seen
        small = metadata["latent_scale"] * torch.tensor([1e-5, 1.0], device=place)
        big, tiny = (
            ops.mla_decode(
                *(q.float() if backend == "cpu" else q for q in queries), cache,
                **metadata | {"latent_scale": scale}, max_seqlen_q=longest, backend=backend,
            ).float()
            for scale in (metadata["latent_scale"], small)
        )  # fmt: skip
        # The results are subnormal float16: half a step of 2^-24, and the roundings of the first.
        assert float((tiny - big * 1e-5).abs().max()) <= 2.0**-24

    def test_a_row_that_is_not_finite_shows_itself_to_those_who_see_it(self, dtype, backend, place):
        (*queries, cache), metadata, longest = problem("decode", dtype, torch.float32, place)
        block, slot = metadata["block_table"][1, 0], 3
        metadata["latent_scale"][block, slot, 0] = math.nan
        o = ops.mla_decode(*queries, cache, **metadata, max_seqlen_q=longest, backend=backend)
        assert o.isnan().all((1, 2)).tolist() == [False, True, False]


@on_each_backend
@by_dtype
def test_written_rows_are_those_of_the_rule(dtype, backend, place):
    """Each part by its own scale; what is skipped stays; a strided cache and strided scales."""
    rows = torch.randn(5, R + DR, device=place)
    rows[1, :R], rows[2, R] = 0.0, math.inf
    rows[:, R:] *= 100
    pool = torch.zeros(6, 2, 4, R + DR, dtype=torch.int8, device=place).view(dtype)
    scales = torch.full((6, 4, 3), -1.0, device=place)
    cache, scale = pool[:, 0], scales[..., :2]
    slots = torch.tensor([3, 20, -1, 0, 23], device=place)
    ops.write_latent_cache(rows[:, :R], rows[:, R:], cache, slots, latent_scale=scale,
                           backend=backend)  # fmt: skip
    written = slots >= 0
    at = (slots[written] // 4, slots[written] % 4)
    got = dequantise_latents(cache.view(torch.int8)[at].view(dtype), scale[at], R, torch.float32)
    for part in (slice(0, R), slice(R, None)):
        want = rows[written, part]
        amax = want.abs().amax(-1, keepdim=True)
        bound = amax / 254 if dtype == torch.int8 else (want.abs() / 16).maximum(amax / 448 / 1024)
        assert bool(((got[:, part] - want).abs() <= bound * (1 + 1e-6)).all())
    assert float(scale[5, 0, 0]) == 0.0
    assert int((scales == -1).sum()) == 24 + 2 * 20
    ops.write_latent_cache(rows[2:3, :R], rows[2:3, R:], cache, torch.tensor([1], device=place),
                           latent_scale=scale, backend=backend)  # fmt: skip
    assert scale[0, 1].isnan().tolist() == [False, True]


@by_dtype
def test_expanded_chunks_equal_absorbed_attention(dtype):
    """In float64, over scales and slots of NaN that no sequence owns."""
    runs, lengths, block_size = [7, 1, 16, 0], [50, 64, 16, 9], 8
    CASES["prefill"] = (runs, lengths, block_size, HEADS, (R, DR))
    (_, _, cache), metadata, longest = problem("prefill", dtype, torch.float64)
    q, w_uk, w_uv = (
        torch.randn(shape, dtype=torch.float64)
        for shape in ((sum(runs), HEADS, DN + DR), (HEADS, DN, R), (HEADS, DV, R))
    )
    q[..., DN:] /= 20
    o, lse = oracle.mla_decode(*absorb(q, w_uk), cache, **metadata, return_lse=True)
    got, got_lse = ops.mla_prefill(
        q, cache, w_uk, w_uv, **metadata, max_seqlen_q=longest, chunk_tokens=40, return_lse=True
    )
    torch.testing.assert_close(got, torch.einsum("thr,hdr->thd", o, w_uv))
    torch.testing.assert_close(got_lse, lse)


@by_dtype
def test_bits_do_not_depend_on_threads(dtype):
    before, results = torch.get_num_threads(), []
    (*queries, cache), metadata, longest = problem(
        "blocks_of_256_and_splits", dtype, torch.bfloat16
    )
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(ops.mla_decode(*queries, cache, **metadata, max_seqlen_q=longest))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(o, results[0]) for o in results)


def test_the_ops_are_opcheck_clean():
    (*queries, cache), metadata, longest = problem("decode", torch.int8, torch.float32)
    scale = metadata.pop("softmax_scale")
    arguments = (*queries, cache, *metadata.values(), longest, scale, False, None)
    torch.library.opcheck(torch.ops.tilewise.mla_decode.default, arguments)
    rows = torch.randn(3, R + DR)
    torch.library.opcheck(
        torch.ops.tilewise.write_latent_cache.default,
        (rows[:, :R], rows[:, R:], torch.zeros(5, 4, R + DR).to(torch.int8), torch.zeros(5, 4, 2),
         torch.tensor([3, -1, 8]), None),
    )  # fmt: skip


REFUSALS = {
    "no scales": (None, "latent_scale must be given for a int8 cache, got None"),
    "one scale": (torch.ones(3, 4), r"latent_scale must have shape \(3, 4, 2\), got \(3, 4\)"),
    "doubles": (torch.ones(3, 4, 2).double(), "latent_scale must have dtype float32"),
    "scales apart": (torch.ones(3, 4, 4)[..., ::2], "latent_scale must have stride 1"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_scales_are_refused_by_name(name):
    scale, words = REFUSALS[name]
    cache = torch.zeros(3, 4, R + DR, dtype=torch.int8)
    q, w_uk, w_uv = torch.randn(1, HEADS, DN + DR), *torch.randn(2, HEADS, DN, R)
    step = {
        "block_table": torch.zeros(1, 3).int(),
        "seqlens_k": torch.ones(1).int(),
        "cu_seqlens_q": torch.tensor([0, 1]).int(),
        "max_seqlen_q": 1,
        "latent_scale": scale,
    }
    rows, slots = torch.randn(1, R + DR), torch.tensor([0])
    calls = (
        lambda: ops.mla_decode(*absorb(q, w_uk), cache, **step, softmax_scale=1.0),
        lambda: ops.mla_prefill(q, cache, w_uk, w_uv, **step),
        lambda: ops.write_latent_cache(
            rows[:, :R], rows[:, R:], cache, slots, latent_scale=scale
        ),
    )  # fmt: skip
    for call in calls:
        with pytest.raises((ValueError, TypeError), match=words):
            call()


def test_float_caches_refuse_scales_and_kernels_refuse_float64_queries():
    rows, slots = torch.randn(1, R + DR), torch.tensor([0])
    with pytest.raises(ValueError, match="latent_scale must be None for a float32 cache"):
        ops.write_latent_cache(
            rows[:, :R], rows[:, R:], torch.zeros(3, 4, R + DR), slots,
            latent_scale=torch.ones(3, 4, 2),
        )  # fmt: skip
    with pytest.raises(TypeError, match="latent_cache must be one of .* got int32"):
        ops.write_latent_cache(rows[:, :R], rows[:, R:], torch.zeros(3, 4, R + DR).int(), slots)
    (*queries, cache), metadata, longest = problem("decode", torch.int8, torch.float64)
    with pytest.raises(UnsupportedError, match="float64"):
        ops.mla_decode(*queries, cache, **metadata, max_seqlen_q=longest)
