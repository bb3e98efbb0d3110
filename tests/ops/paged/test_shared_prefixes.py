"""Which blocks a batch shares; reading them once changes what is read, not what is computed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.kernels import device
from tilewise.kernels.tiles import paged_rows as paged_rows_tiles
from tilewise.reference import paged as oracle
from tilewise.testing import assert_within_budget, make_paged_cache


def _find(rows: list[list[int]], lengths: list[int], runs: list[int], **options):
    table = np.full((len(rows), max(map(len, rows))), -1)
    for index, row in enumerate(rows):
        table[index, : len(row)] = row
    edges = np.concatenate([[0], np.cumsum(runs)])
    options = {"block_size": 4, "min_blocks": 1} | options
    return ops.shared_prefixes(table, np.array(lengths), edges, **options)


class TestFinding:
    def test_a_group_is_its_common_blocks_and_all_its_rows(self):
        found = _find([[7, 8, 1], [9, 2], [7, 8, 3]], [11, 7, 10], [1, 1, 2])
        (level,) = found.levels
        assert level.block_table.tolist() == [[7, 8]]
        assert level.seqlens_k.tolist() == [8]
        assert level.rows.tolist() == [0, 2, 3]
        assert level.cu_seqlens_q.tolist() == [0, 3]
        assert level.max_rows == 3
        assert found.skipped.tolist() == [8, 0, 8]
        assert found.saved_tokens == 8

    def test_a_block_with_a_new_token_is_not_shared(self):
        found = _find([[7, 8, 1], [7, 8, 3]], [8, 8], [1, 1])
        assert found.skipped.tolist() == [4, 4]

    def test_nothing_in_common_is_none(self):
        assert _find([[1, 2], [3, 4]], [8, 8], [1, 1]) is None
        assert _find([[1, 2, 5], [1, 2, 6]], [9, 9], [1, 1], min_blocks=3) is None
        assert _find([[1, 2, 5], [1, 2, 6]], [9, 9], [1, 0]) is None
        assert _find([[1, 2]], [8], [1]) is None
        assert _find([[], []], [0, 0], [0, 0]) is None

    def test_groups_within_a_group_read_what_follows(self):
        rows = [[1, 2, 3, 9], [1, 2, 3, 8], [1, 4, 5, 7], [1, 4, 5, 6], [1, 10, 11, 12]]
        found = _find(rows, [16] * 5, [1] * 5)
        outer, inner = found.levels
        assert outer.block_table.tolist() == [[1]]
        assert sorted(inner.block_table.tolist()) == [[2, 3], [4, 5]]
        assert found.skipped.tolist() == [12, 12, 12, 12, 4]
        assert found.saved_tokens == 4 * (4 + 2 + 2)

    def test_one_pass_goes_where_it_saves_most(self):
        """One block in common for all, but four more for two pairs."""
        rows = [[1, 2, 3, 4, 5, 0], [1, 2, 3, 4, 5, 9], [1, 6, 7, 8, 9, 0], [1, 6, 7, 8, 9, 3]]
        found = _find(rows, [24] * 4, [1] * 4, max_levels=1)
        (level,) = found.levels
        assert sorted(level.block_table.tolist()) == [[1, 2, 3, 4, 5], [1, 6, 7, 8, 9]]

    @pytest.mark.parametrize("name", ["block_size", "min_blocks", "max_levels"])
    def test_counts_are_positive(self, name):
        with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
            _find([[1]], [4], [1], **{name: 0})

    @given(st.data())
    @settings(max_examples=60, deadline=None)
    def test_every_old_token_is_read_once_by_somebody(self, data):
        """Shared segments and the rest tile each sequence; segments are whole common blocks."""
        rows = data.draw(
            st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=8)
        )
        # A block's content is its path from the root, as in a prefix cache.
        paths: dict[tuple[int, ...], int] = {}
        rows = [
            [paths.setdefault(tuple(row[: end + 1]), len(paths)) for end in range(len(row))]
            for row in rows
        ]
        runs = [data.draw(st.integers(0, 3)) for _ in rows]
        lengths = [
            max(run, len(row) * 4 - data.draw(st.integers(0, 3)))
            for row, run in zip(rows, runs, strict=True)
        ]
        found = _find(rows, lengths, runs, max_levels=data.draw(st.integers(1, 3)))
        if found is None:
            return
        edges = np.concatenate([[0], np.cumsum(runs)])
        read: list[list[int]] = [[] for _ in rows]
        for level in found.levels:
            starts = level.cu_seqlens_q.tolist()
            assert level.max_rows == max(np.diff(starts))
            for group, tokens in enumerate(level.seqlens_k.tolist()):
                own = level.rows[starts[group] : starts[group + 1]].tolist()
                members = sorted(set(np.searchsorted(edges, own, side="right") - 1))
                assert own == [r for b in members for r in range(edges[b], edges[b + 1])]
                assert len(members) > 1
                for b in members:
                    read[b] += level.block_table[group, : tokens // 4].tolist()
        for b, blocks in enumerate(read):
            assert blocks == rows[b][: len(blocks)]
            assert found.skipped[b] == 4 * len(blocks) <= max(0, lengths[b] - runs[b])


# name: (new tokens, old tokens after the prefix, tokens of each sequence's prefix by group)
BATCHES = {
    "decode": ([1] * 5, [5, 1, 40, 17, 9], [(0, 1, 2, 4)], 64),
    "two_groups_and_one_alone": ([1, 2, 1, 3, 1], [5, 1, 20, 17, 70], [(0, 3), (1, 2)], 48),
    "chunks": ([7, 15, 1], [0, 7, 0], [(0, 1, 2)], 32),
    "idle_and_padded": ([1, 0, 1], [3, 30, 8], [(0, 1, 2)], 32),
}


def _shared_call(name: str, place: str, dtype: torch.dtype, block_size: int = 8):
    """q and the caches, metadata with shared blocks, and what is found in it."""
    runs, after, groups, prefix = BATCHES[name]
    member = {b for group in groups for b in group}
    lengths = [
        run + old + (prefix if b in member else 0)
        for b, (run, old) in enumerate(zip(runs, after, strict=True))
    ]
    k_cache, v_cache, table, seqlens = make_paged_cache(
        lengths, block_size, 2, 32, dtype=dtype, device="cpu"
    )
    for group in groups:
        table[list(group), : prefix // block_size] = table[group[0], : prefix // block_size]
    cu = torch.tensor([0, *runs]).cumsum(0).int()
    shared = ops.shared_prefixes(
        table, seqlens, cu, block_size=block_size, min_blocks=2, device=place
    )
    assert shared is not None
    assert len(shared.levels[0].seqlens_k) == len(groups)
    padding = 2 if name == "idle_and_padded" else 0
    q = torch.randn(sum(runs) + padding, 6, 32).to(place, dtype)
    metadata = {"block_table": table, "seqlens_k": seqlens, "cu_seqlens_q": cu}
    metadata = {key: value.to(place) for key, value in metadata.items()}
    return (q, k_cache.to(place), v_cache.to(place)), metadata, max(runs), shared


def _check(tensors, metadata, longest, backend, shared=None, tree_mask=None, **options):
    truth = oracle.paged_attention(
        *(t.double() for t in tensors), **metadata, **options, tree_mask=tree_mask, return_lse=True
    )
    eager = oracle.paged_attention(
        *tensors, **metadata, **options, tree_mask=tree_mask, return_lse=True
    )
    got = ops.paged_attention(
        *tensors,
        **metadata,
        **options,
        max_seqlen_q=longest,
        shared=shared,
        tree_mask=tree_mask,
        return_lse=True,
        backend=backend,
    )
    for index, part in enumerate(("o", "lse")):
        assert_within_budget(got[index], truth[index], eager[index], name=part)


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
class TestSharedPrefixes:
    @pytest.mark.parametrize("name", BATCHES)
    def test_the_result_is_that_of_every_sequence_alone(self, name, backend, place):
        dtype = torch.float32 if device.interpreting() else torch.bfloat16
        tensors, metadata, longest, shared = _shared_call(name, place, dtype)
        _check(tensors, metadata, longest, backend, shared)

    def test_sinks_count_once_and_softcap_acts_on_both_sides(self, backend, place):
        tensors, metadata, longest, shared = _shared_call(
            "two_groups_and_one_alone", place, torch.float32
        )
        sinks = torch.randn(6, device=place)
        _check(tensors, metadata, longest, backend, shared, sinks=sinks, softcap=3.0)

    def test_nested_groups(self, backend, place):
        """All five share 16 tokens, two of them 32 more."""
        k_cache, v_cache, table, lengths = make_paged_cache([30, 70, 64, 20, 90], 8, 2, 32)
        table[:, :2] = table[0, :2]
        table[1, 2:6] = table[2, 2:6]
        cu = torch.tensor([0, 1, 2, 5, 6, 7], dtype=torch.int32)
        shared = ops.shared_prefixes(table, lengths, cu, block_size=8, min_blocks=2, device=place)
        assert shared.skipped.tolist() == [16, 48, 48, 16, 16]
        metadata = {"block_table": table, "seqlens_k": lengths, "cu_seqlens_q": cu}
        metadata = {key: value.to(place) for key, value in metadata.items()}
        q = torch.randn(7, 6, 32, device=place)
        _check((q, k_cache.to(place), v_cache.to(place)), metadata, 3, backend, shared)

    def test_a_tree_after_a_shared_prefix(self, backend, place):
        tensors, metadata, longest, shared = _shared_call("chunks", place, torch.float32)
        heaps = [(torch.arange(run) + 1) // 2 - 1 for run in BATCHES["chunks"][0]]
        parents = torch.cat(heaps).to(place)
        tree_mask = ops.tree_mask_from_parents(
            parents, metadata["cu_seqlens_q"], max_seqlen_q=longest
        )
        _check(tensors, metadata, longest, backend, shared, tree_mask)

    def test_a_batch_that_grows_keeps_its_groups(self, backend, place):
        """The same prefixes serve the next step, when every sequence is a token longer."""
        tensors, metadata, longest, shared = _shared_call("decode", place, torch.float32)
        metadata["seqlens_k"] = metadata["seqlens_k"] - 1
        _check(tensors, metadata, longest, backend, shared)


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", BATCHES)
def test_a_pass_whose_keys_are_whole_adds_to_what_is_there(monkeypatch, name, place):
    """Triton: parts in memory are for keys that are split."""
    monkeypatch.setattr(device, "sm_count_of", lambda _: 1)
    dtype = torch.float32 if device.interpreting() else torch.bfloat16
    tensors, metadata, longest, shared = _shared_call(name, place, dtype)
    _check(tensors, metadata, longest, "triton", shared, softcap=2.0)


def test_many_splits_of_a_prefix_are_merged(monkeypatch):
    """Triton: more splits than a merge reads at once, over a wide group."""
    monkeypatch.setattr(paged_rows_tiles, "MIN_SPLIT_KEYS", 16)
    monkeypatch.setattr(device, "sm_count_of", lambda _: 64)
    tensors, metadata, longest, shared = _shared_call("two_groups_and_one_alone", "cpu",
                                                      torch.float32)  # fmt: skip
    _check(tensors, metadata, longest, "triton", shared)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 8}, "window must be None with shared prefixes"),
        ({"alibi_slopes": torch.rand(6)}, "alibi_slopes must be None with shared prefixes"),
        ({"batch_invariant": True}, "shared must be None with batch_invariant"),
        ({"seqlens_k": torch.ones(4).int(), "block_table": torch.zeros(4, 2).int(),
          "cu_seqlens_q": torch.arange(5).int()}, "shared must have shape"),
    ],
)  # fmt: skip
def test_refusals(changes, words):
    tensors, metadata, longest, shared = _shared_call("decode", "cpu", torch.float32)
    with pytest.raises(ValueError, match=words):
        ops.paged_attention(
            *tensors, **(metadata | changes), max_seqlen_q=longest, shared=shared, backend="cpu"
        )


def test_prefixes_of_another_batch_are_refused():
    runs = [1, 1, 2]
    shared = _find([[7, 8, 1], [9, 2], [7, 8, 3]], [11, 7, 10], runs)
    for block_size, rows, words in (
        (8, 4, "shared must be for blocks of 8 tokens, got some of 4"),
        (4, 2, "shared must be for at most 2 rows, got 3"),
    ):
        k_cache, v_cache, table, lengths = make_paged_cache([11, 7, 10], block_size, 1, 16)
        starts = torch.tensor([0, 1, 2, rows], dtype=torch.int32)
        with pytest.raises(ValueError, match=words):
            ops.paged_attention(
                torch.zeros(rows, 1, 16),
                k_cache,
                v_cache,
                block_table=table,
                seqlens_k=lengths,
                cu_seqlens_q=starts,
                max_seqlen_q=2,
                shared=shared,
            )


def test_block_ids_are_integers():
    with pytest.raises(TypeError, match="block_table must have an integer dtype, got float32"):
        ops.shared_prefixes(torch.zeros(1, 1), np.ones(1, int), np.arange(2), block_size=4)
