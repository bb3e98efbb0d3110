"""Trees of drafts: who sees whom among the new tokens, on every backend."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.kernels import device
from tilewise.kernels.triton.paged import plan as triton_kernel
from tilewise.reference import paged as oracle
from tilewise.testing import assert_within_budget, make_paged_cache

# name: (new tokens, keys with the new ones, block size, (Hq, Hk, D), options)
CASES = {
    "drafts": ([5, 1, 8], [40, 9, 70], 8, (4, 2, 32), {}),
    "no_context": ([7, 3], [7, 3], 16, (2, 2, 32), {}),
    "beside_none": ([3, 0, 1], [300, 5, 1], 16, (6, 2, 32), {}),
    "longer_than_64": ([70], [130], 16, (1, 1, 32), {}),
    "window": ([9, 4], [60, 30], 16, (4, 2, 32), {"window": 6}),
    "softcap": ([9, 4], [60, 30], 16, (4, 2, 32), {"softcap": 2.0}),
}


def _parents(runs: list[int], seed: int = 0) -> Tensor:
    draw = random.Random(seed)
    return torch.tensor([draw.randrange(-1, i) for run in runs for i in range(run)])


def _arguments(name: str, place: str, dtype: torch.dtype = torch.float32):
    runs, lengths, block_size, (num_q_heads, num_kv_heads, head_dim), options = CASES[name]
    k_cache, v_cache, table, seqlens = make_paged_cache(
        lengths, block_size, num_kv_heads, head_dim, dtype=dtype, device=place
    )
    q = torch.randn(sum(runs), num_q_heads, head_dim).to(place, dtype)
    cu = torch.tensor([0, *runs], device=place).cumsum(0).int()
    tree_mask = ops.tree_mask_from_parents(_parents(runs).to(place), cu, max_seqlen_q=max(runs))
    metadata = {"block_table": table, "seqlens_k": seqlens, "cu_seqlens_q": cu, **options}
    return (q, k_cache, v_cache), metadata | {"tree_mask": tree_mask}, max(runs)


def _check(tensors, metadata, longest, backend, **scales):
    truth = oracle.paged_attention(
        *(t.double() if t.is_floating_point() and t.dtype.itemsize > 1 else t for t in tensors),
        **metadata,
        **scales,
        return_lse=True,
    )
    eager = oracle.paged_attention(*tensors, **metadata, **scales, return_lse=True)
    got = ops.paged_attention(
        *tensors, **metadata, **scales, max_seqlen_q=longest, return_lse=True, backend=backend
    )
    for index, part in enumerate(("o", "lse")):
        assert_within_budget(got[index], truth[index], eager[index], name=part)


class TestMaskFromParents:
    def test_a_row_is_a_token_and_its_ancestors(self):
        mask = ops.tree_mask_from_parents(
            torch.tensor([-1, 0, 0, 2, -1, -1, 1]), torch.tensor([0, 4, 7]).int(), max_seqlen_q=4
        )
        assert mask.int().tolist() == [
            [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1],
            [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0],
        ]  # fmt: skip

    @pytest.mark.parametrize("run", [1, 2, 33, 100])
    def test_a_chain_is_causal(self, run):
        mask = ops.tree_mask_from_parents(
            torch.arange(run) - 1, torch.tensor([0, run]).int(), max_seqlen_q=run
        )
        assert torch.equal(mask, torch.ones(run, run).tril().bool())

    def test_rows_of_no_sequence_see_nothing(self):
        parents = torch.tensor([-1, 0, 0])
        mask = ops.tree_mask_from_parents(parents, torch.tensor([0, 2]).int(), max_seqlen_q=3)
        assert mask.int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0]]

    def test_parents_are_integers(self):
        with pytest.raises(TypeError, match="parents must have dtype int32 or int64, got float32"):
            ops.tree_mask_from_parents(torch.zeros(2), torch.tensor([0, 2]).int(), max_seqlen_q=2)

    def test_edges_hold_a_leading_zero(self):
        nothing = torch.zeros(0, dtype=torch.int32)
        with pytest.raises(ValueError, match="cu_seqlens_q must hold at least the leading 0"):
            ops.tree_mask_from_parents(nothing, nothing, max_seqlen_q=2)


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
class TestTreeMask:
    @pytest.mark.parametrize("name", CASES)
    def test_output_and_lse_keep_the_budget(self, name, backend, place):
        dtype = torch.float32 if device.interpreting() else torch.bfloat16
        _check(*_arguments(name, place, dtype), backend)

    def test_sinks_and_alibi_enter_the_softmax(self, backend, place):
        """ALiBi counts places in the cache, also to a token that stands later."""
        tensors, metadata, longest = _arguments("drafts", place)
        metadata |= {"sinks": torch.randn(4, device=place)}
        metadata |= {"alibi_slopes": torch.rand(4, device=place)}
        metadata["tree_mask"] = torch.rand(14, 9, device=place) < 0.5  # any mask, no tree
        _check(tensors, metadata, longest, backend)

    @pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
    def test_caches_of_8_bits(self, dtype, backend, place):
        (q, *caches), metadata, longest = _arguments("drafts", place)
        narrow = [torch.zeros_like(cache, dtype=dtype) for cache in caches]
        scales = [torch.zeros(caches[0].shape[:3], device=place) for _ in caches]
        slots = torch.arange(caches[0].shape[0] * caches[0].shape[1], device=place)
        oracle.write_kv_cache(
            *(cache.nan_to_num().flatten(0, 1) for cache in caches), *narrow, slots,
            k_scale=scales[0], v_scale=scales[1],
        )  # fmt: skip
        _check((q, *narrow), metadata, longest, backend, k_scale=scales[0], v_scale=scales[1])

    def test_a_chain_is_the_causal_rule(self, backend, place):
        tensors, metadata, longest = _arguments("drafts", place)
        runs = CASES["drafts"][0]
        chain = torch.cat([torch.arange(run) - 1 for run in runs]).to(place)
        metadata["tree_mask"] = None
        want = ops.paged_attention(*tensors, **metadata, max_seqlen_q=longest, backend="reference")
        metadata["tree_mask"] = ops.tree_mask_from_parents(
            chain, metadata["cu_seqlens_q"], max_seqlen_q=longest
        )
        got = ops.paged_attention(*tensors, **metadata, max_seqlen_q=longest, backend=backend)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)

    def test_sequences_without_new_tokens_stand_before_trees(self, backend, place):
        """The kernels walk the others, each with its own rows of the mask."""
        runs, lengths = [4, 0, 5, 0, 3], [9, 12, 17, 0, 30]
        k_cache, v_cache, table, seqlens = make_paged_cache(lengths, 8, 2, 16, device=place)
        cu = torch.tensor([0, *runs], device=place).cumsum(0).int()
        parents = torch.tensor([-1, 0, 0, 1, -1, -1, 1, 0, 2, -1, 0, -1]).to(place)
        tree_mask = ops.tree_mask_from_parents(parents, cu, max_seqlen_q=5)
        metadata = {"block_table": table, "seqlens_k": seqlens, "cu_seqlens_q": cu}
        metadata["tree_mask"] = tree_mask
        q = torch.randn(12, 4, 16).to(place)
        _check((q, k_cache, v_cache), metadata, 5, backend)

    def test_batch_invariance_keeps_the_bits_of_a_sequence(self, backend, place):
        tensors, metadata, longest = _arguments("drafts", place)
        together = ops.paged_attention(
            *tensors, **metadata, max_seqlen_q=longest, batch_invariant=True, backend=backend
        )
        alone = {
            "block_table": metadata["block_table"][:1],
            "seqlens_k": metadata["seqlens_k"][:1],
            "cu_seqlens_q": metadata["cu_seqlens_q"][:2],
            "tree_mask": metadata["tree_mask"][:5],
        }
        q, k_cache, v_cache = tensors
        own = ops.paged_attention(
            q[:5], k_cache, v_cache, **alone, max_seqlen_q=5, batch_invariant=True, backend=backend
        )
        assert torch.equal(own, together[:5])


def test_keys_of_few_long_runs_are_split(monkeypatch):
    """Triton on a wide GPU: a run's splits, whose last ones hold the tree, are merged."""
    from tilewise.kernels.tiles import paged_rows as paged_rows_tiles

    monkeypatch.setattr(paged_rows_tiles, "MIN_SPLIT_KEYS", 32)
    monkeypatch.setattr(triton_kernel.device, "sm_count_of", lambda _: 24)
    for name in ("beside_none", "window"):
        _check(*_arguments(name, "cpu"), "triton")
    tensors, metadata, _ = _arguments("longer_than_64", "cpu")
    del metadata["tree_mask"]  # and of prompt chunks
    _check(tensors, metadata | {"sinks": torch.randn(1)}, 70, "triton")


@pytest.mark.parametrize(
    ("mask", "error", "words"),
    [
        (torch.ones(14, 8), TypeError, "tree_mask must have dtype bool, got float32"),
        (torch.ones(14, 7, dtype=torch.bool), ValueError, "14 rows and at least 8 columns"),
        (torch.ones(13, 8, dtype=torch.bool), ValueError, "14 rows and at least 8 columns"),
        (torch.ones(8, 14, dtype=torch.bool).T, ValueError, "tree_mask must have stride 1"),
    ],
)
def test_refusals(mask, error, words):
    tensors, metadata, longest = _arguments("drafts", "cpu")
    with pytest.raises(error, match=words):
        ops.paged_attention(*tensors, **(metadata | {"tree_mask": mask}), max_seqlen_q=longest)
