"""paged_attention and the cache-filling ops, on every backend over the same named cases."""

from __future__ import annotations

import pytest
import torch

from tilewise import ops
from tilewise.kernels import device
from tilewise.ops import call
from tilewise.reference import paged as oracle
from tilewise.testing import assert_within_budget, make_paged_cache

BACKENDS = [
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("triton", "cpu", id="triton-interpreted"),
    pytest.param("triton", "cuda", id="triton", marks=pytest.mark.gpu),
]
# name: (query lengths, key lengths, block size, (Hq, Hk, D), options)
CASES = {
    "decode": ([1, 1, 1], [1, 33, 70], 16, (4, 2, 64), {}),
    "prefill_from_nothing": ([9, 40], [9, 40], 16, (4, 4, 64), {}),
    "chunk_after_a_prefix": ([7, 16], [50, 16], 8, (4, 2, 64), {}),
    "prefill_beside_decode": ([1, 20, 1], [64, 40, 5], 16, (8, 2, 64), {}),
    "empty_run_and_empty_sequence": ([0, 1, 0], [12, 5, 0], 4, (2, 1, 64), {}),
    "block_of_one": ([1, 3], [7, 9], 1, (2, 2, 64), {}),
    "block_of_128": ([1, 3], [130, 9], 128, (2, 2, 64), {}),
    "window": ([1, 12], [60, 30], 16, (4, 2, 64), {"window": 7}),
    "softcap": ([1, 12], [60, 30], 16, (4, 2, 64), {"softcap": 4.0}),
    "odd_group": ([1, 2], [19, 34], 16, (7, 1, 64), {}),
    "head_dim_512": ([1, 5], [40, 33], 16, (4, 1, 512), {}),
    "head_dim_128": ([1, 5], [40, 33], 16, (4, 1, 128), {}),
    "long_sequence_alone": ([1], [700], 16, (4, 1, 64), {}),
}


def _arguments(name: str, dtype: torch.dtype, place: str):
    lengths_q, lengths_k, block_size, (num_q_heads, num_kv_heads, head_dim), options = CASES[name]
    k_cache, v_cache, table, lengths = make_paged_cache(
        lengths_k, block_size, num_kv_heads, head_dim, dtype=dtype, device=place
    )
    q = torch.randn(sum(lengths_q), num_q_heads, head_dim).to(place, dtype)
    cu = torch.tensor([0, *lengths_q], device=place).cumsum(0).int()
    metadata = {"block_table": table, "seqlens_k": lengths, "cu_seqlens_q": cu, **options}
    return (q, k_cache, v_cache), metadata, max(lengths_q)


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
class TestPagedAttention:
    @pytest.mark.parametrize("name", CASES)
    def test_output_and_lse_keep_the_budget(self, name, backend, place):
        dtype = torch.float32 if device.interpreting() else torch.bfloat16
        tensors, metadata, longest = _arguments(name, dtype, place)
        truth = oracle.paged_attention(*(t.double() for t in tensors), **metadata, return_lse=True)
        eager = oracle.paged_attention(*tensors, **metadata, return_lse=True)
        got = ops.paged_attention(
            *tensors, **metadata, max_seqlen_q=longest, return_lse=True, backend=backend
        )
        for index, part in enumerate(("o", "lse")):
            assert_within_budget(got[index], truth[index], eager[index], name=part)

    @pytest.mark.parametrize("name", ["prefill_beside_decode", "decode", "long_sequence_alone"])
    def test_output_lies_where_it_is_wanted(self, name, backend, place):
        """The bits are those of the output of its own; a third call has met the layouts before."""
        dtype = torch.float32 if device.interpreting() else torch.bfloat16
        for _ in range(3):
            tensors, metadata, longest = _arguments(name, dtype, place)
            options = metadata | {"max_seqlen_q": longest, "backend": backend, "return_lse": True}
            want, lse = ops.paged_attention(*tensors, **options)
            room = torch.full((4, *want.shape), 7.0, dtype=dtype, device=place)
            got = ops.paged_attention(*tensors, **options, out=room[2])
            assert got[0].data_ptr() == room[2].data_ptr()
            assert torch.equal(room[2], want)
            assert torch.equal(got[1], lse)
            assert (room[[0, 1, 3]] == 7).all()

    def test_launches_past_triton_have_the_bits_of_its_own(self, backend, place):
        """A profiler's hook sends every launch through Triton's launcher."""
        knobs = pytest.importorskip("triton").knobs.runtime
        dtype, found = torch.float32 if device.interpreting() else torch.bfloat16, []
        for hooked in (False, True, False):
            torch.manual_seed(0)
            seen = []
            with pytest.MonkeyPatch.context() as patch:
                if hooked:
                    patch.setattr(knobs, "launch_enter_hook", seen.append)
                for name in CASES:
                    tensors, metadata, longest = _arguments(name, dtype, place)
                    options = metadata | {"max_seqlen_q": longest, "backend": backend}
                    for _ in range(2):  # the first may compile
                        o = ops.paged_attention(*tensors, **options)
                    found.append(o)
            assert (len(seen) >= 2 * len(CASES)) == (hooked and place == "cuda")
        first, again = found[: len(CASES)], found[len(CASES) :]
        assert all(torch.equal(a, b) for a, b in zip(first + first, again, strict=True))

    def test_metadata_may_have_any_strides(self, backend, place):
        tensors, metadata, longest = _arguments("chunk_after_a_prefix", torch.float32, place)
        options = {"max_seqlen_q": longest, "backend": backend}
        want = ops.paged_attention(*tensors, **metadata, **options)
        spread = {name: torch.stack([x, x - 1], dim=-1)[..., 0] for name, x in metadata.items()}
        assert torch.equal(want, ops.paged_attention(*tensors, **spread, **options))

    def test_sinks_and_alibi_enter_the_softmax(self, backend, place):
        tensors, metadata, longest = _arguments("prefill_beside_decode", torch.float32, place)
        metadata["sinks"] = torch.randn(8, device=place)
        metadata["alibi_slopes"] = torch.rand(8, device=place)
        truth = oracle.paged_attention(*(t.double() for t in tensors), **metadata)
        eager = oracle.paged_attention(*tensors, **metadata)
        got = ops.paged_attention(*tensors, **metadata, max_seqlen_q=longest, backend=backend)
        assert_within_budget(got, truth, eager)

    def test_batch_invariance_keeps_the_bits_of_a_sequence(self, backend, place):
        """The same sequence alone and among neighbours of other lengths."""
        k_cache, v_cache, table, lengths = make_paged_cache([300, 5, 40], 16, 2, 64, device=place)
        q = torch.randn(3, 4, 64, device=place)
        cu = torch.arange(4, dtype=torch.int32, device=place)
        together = ops.paged_attention(
            q,
            k_cache,
            v_cache,
            block_table=table,
            seqlens_k=lengths,
            cu_seqlens_q=cu,
            max_seqlen_q=1,
            batch_invariant=True,
            backend=backend,
        )
        for row in range(3):
            alone = ops.paged_attention(
                q[row : row + 1],
                k_cache,
                v_cache,
                block_table=table[row : row + 1],
                seqlens_k=lengths[row : row + 1],
                cu_seqlens_q=cu[:2],
                max_seqlen_q=1,
                batch_invariant=True,
                backend=backend,
            )
            assert torch.equal(alone[0], together[row])

    @pytest.mark.parametrize("arch", [None, 80], ids=["own", "ampere"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.usefixtures("products_in_order")
    def test_batch_invariance_keeps_the_bits_of_a_row_in_any_run(
        self, dtype, arch, backend, place, monkeypatch
    ):
        """All rows of a sequence at once, in chunks, and alone: tiles of keys are seen whole by
        some rows and not by others, and a compiler may round there otherwise; single rows have
        another kernel on Hopper."""
        if arch is not None:
            if backend != "triton" or place == "cuda" or dtype == torch.float32:
                pytest.skip("single rows have the kernel of all, or the GPU says which")
            monkeypatch.setattr(device, "arch_of", lambda where: arch)
            monkeypatch.setattr(
                call, "_memory", call._Memory()
            )  # those of these sizes are planned on Hopper
        length = 200 if place == "cuda" else 40
        if backend == "reference":
            pytest.skip("the oracle has no tiles")
        k_cache, v_cache, table, lengths = make_paged_cache([length], 16, 2, 64, device=place)
        k_cache, v_cache = k_cache.to(dtype), v_cache.to(dtype)
        q = 3 * torch.randn(length, 4, 64, device=place).to(dtype)

        def rows(first, last):
            return ops.paged_attention(
                q[first:last], k_cache, v_cache, block_table=table,
                seqlens_k=torch.full_like(lengths, last), max_seqlen_q=last - first,
                cu_seqlens_q=torch.tensor([0, last - first], dtype=torch.int32, device=place),
                batch_invariant=True, backend=backend,
            )  # fmt: skip

        whole = rows(0, length)
        for chunk in (1, 7, 33):
            for first in range(0, length, chunk):
                last = min(first + chunk, length)
                assert torch.equal(rows(first, last), whole[first:last]), (chunk, first)


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
class TestCacheOps:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    def test_rows_land_in_their_slots_and_nowhere_else(self, dtype, backend, place):
        k_cache = torch.randn(6, 4, 2, 24, device=place).to(dtype)
        v_cache = torch.randn(6, 4, 2, 40, device=place).to(dtype)
        want_k, want_v = k_cache.clone(), v_cache.clone()
        k = torch.randn(5, 2, 2, 24, device=place).to(dtype)[:, 0]
        v = torch.randn(5, 2, 40, device=place).to(dtype)
        slots = torch.tensor([3, -1, 20, 0, 23], device=place)
        ops.write_kv_cache(k, v, k_cache, v_cache, slots, backend=backend)
        oracle.write_kv_cache(k, v, want_k, want_v, slots)
        assert torch.equal(k_cache, want_k)
        assert torch.equal(v_cache, want_v)
        assert torch.equal(k_cache.view(24, 2, 24)[20], k[2])

    def test_rows_are_cast_to_the_dtype_of_the_cache(self, backend, place):
        k_cache, v_cache = (torch.zeros(2, 4, 1, 16, device=place).half() for _ in range(2))
        rows = torch.randn(3, 1, 16, device=place)
        slots = torch.tensor([0, 5, 2], device=place)
        ops.write_kv_cache(rows, rows, k_cache, v_cache, slots, backend=backend)
        assert torch.equal(k_cache.view(8, 1, 16)[slots], rows.half())

    def test_blocks_are_copied_whole(self, backend, place):
        k_cache = torch.randn(6, 4, 2, 24, device=place)
        v_cache = torch.randn(6, 4, 2, 40, device=place)
        want_k, want_v = k_cache.clone(), v_cache.clone()
        want_k[[4, 1]], want_v[[4, 1]] = want_k[[0, 0]], want_v[[0, 0]]
        pairs = torch.tensor([[0, 4], [0, 1]], device=place)
        ops.copy_blocks(k_cache, v_cache, pairs, backend=backend)
        assert torch.equal(k_cache, want_k)
        assert torch.equal(v_cache, want_v)

    def test_no_rows_and_no_pairs_change_nothing(self, backend, place):
        cache = torch.randn(2, 4, 1, 16, device=place)
        before = cache.clone()
        rows = torch.randn(0, 1, 16, device=place)
        none = torch.zeros(0, dtype=torch.int64, device=place)
        other = cache.clone()
        ops.write_kv_cache(rows, rows, cache, other, none, backend=backend)
        ops.copy_blocks(cache, other, none.view(0, 2), backend=backend)
        assert torch.equal(cache, before)
