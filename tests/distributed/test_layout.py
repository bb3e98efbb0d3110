"""What a rank's calls see is what its tokens may see: every key once, by any layout and window."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewise.distributed.layout import (
    LAYOUTS,
    calls_of,
    choose_layout,
    num_chunks,
    order_of,
    pieces_of,
    shard_sequence,
    span,
    whole_calls_of,
    work_of,
)


def _allowed(q_positions, k_positions, left, right):
    distance = k_positions[None, :] - q_positions[:, None]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if left is not None:
        seen &= distance >= -left
    if right is not None:
        seen &= distance <= right
    return seen


def _aligned(rows, keys, left, right):
    """What `attention` makes of a window: aligned at the bottom right."""
    i = torch.arange(rows) + keys - rows
    return _allowed(i, torch.arange(keys), left, right)


BOUNDS = (None, 0, 1, 3, 9)


@pytest.mark.parametrize(("left", "right"), list(itertools.product(BOUNDS, BOUNDS)))
def test_a_span_is_what_the_queries_see(left, right):
    for q_start, num_q, k_start, num_k in itertools.product(
        (0, 5, 12), (1, 4), (0, 3, 8), (0, 1, 6)
    ):
        q, k = torch.arange(q_start, q_start + num_q), torch.arange(k_start, k_start + num_k)
        want = _allowed(q, k, left, right)
        got = torch.zeros_like(want)
        found = span(q_start, num_q, k_start, num_k, left, right)
        if found is not None:
            rows, keys = slice(found.q_first, found.q_last), slice(found.k_first, found.k_last)
            got[rows, keys] = _aligned(
                found.q_last - found.q_first, found.k_last - found.k_first, found.left, found.right
            )
            assert found.left is None or found.left >= 0
            assert found.right is None or found.right >= 0
        assert torch.equal(got, want)


EDGES = [None, (0, 24), (0, 1, 2, 11, 11, 13, 24), (0, 3, 21, 24), (0, 0, 17, 24, 24)]
CASES = [
    (layout, edges, size)
    for layout, edges, size in itertools.product(LAYOUTS, EDGES, (1, 2, 4))
    if layout != "documents" or edges is not None
]


def _want(edges, left, right):
    positions = torch.arange(24)
    document = torch.zeros(24, dtype=torch.int64)
    for edge in (edges or (0,))[1:-1]:
        document[edge:] += 1
    return (
        _allowed(positions, positions, left, right) & (document[:, None] == document[None, :])
    ).to(torch.int64)


def _count(got, queries, keys, call):
    """Count the pairs that a call computes, by positions of its queries and keys."""
    runs = call.runs or ((*call.rows, *call.keys),)
    for q_first, q_last, k_first, k_last in runs:
        assert q_first < q_last
        assert k_first < k_last
        rows, columns = queries[q_first:q_last], keys[k_first:k_last]
        seen = _aligned(len(rows), len(columns), call.left, call.right)
        got[rows[:, None], columns[None, :]] += seen.to(torch.int64)
    covered = [row for run in runs for row in range(run[0], run[1])]
    assert len(set(covered)) == len(covered)
    assert (min(covered), max(covered) + 1) == tuple(call.rows)


@pytest.mark.parametrize(("layout", "edges", "size"), CASES, ids=str)
def test_calls_see_every_visible_pair_once(layout, edges, size):
    positions = torch.arange(24)
    parts = [
        shard_sequence(positions, rank, size, dim=0, layout=layout, cu_seqlens=edges)
        for rank in range(size)
    ]
    assert [len(part) for part in parts] == [24 // size] * size
    assert torch.equal(torch.cat(parts), order_of(24, size, layout, edges))
    for left, right in itertools.product((None, 0, 2, 7, 30), (None, 0, 4)):
        options = {"layout": layout, "left": left, "right": right}
        want = _want(edges, left, right)
        got, whole = torch.zeros_like(want), torch.zeros_like(want)
        for rank, source in itertools.product(range(size), range(size)):
            chunk = 24 // num_chunks(size, layout)
            for call in calls_of(rank, source, size, chunk, edges=edges, **options):
                _count(got, parts[rank], parts[source], call)
        for rank in range(size):
            for call in whole_calls_of(rank, size, edges=edges or (0, 24), **options):
                _count(whole, parts[rank], positions, call)
        assert torch.equal(got, want), (left, right)
        assert torch.equal(whole, want), (left, right)


def test_a_causal_packed_step_is_one_call_though_documents_are_many():
    edges = (0, 40, 41, 100, 128)
    for rank, source in itertools.product(range(4), range(4)):
        calls = calls_of(rank, source, 4, 0, layout="documents", left=None, right=0, edges=edges)
        assert len(calls) == 1
    for rank in range(4):
        calls = whole_calls_of(rank, 4, layout="documents", left=None, right=0, edges=edges)
        assert [call.rows for call in calls] == [(0, 32)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=9), st.integers(1, 5))
def test_documents_are_dealt_out_evenly(lengths, size):
    lengths.append(-sum(lengths) % size)
    edges = tuple(itertools.accumulate(lengths, initial=0))
    parts = [pieces_of(rank, size, layout="documents", edges=edges) for rank in range(size)]
    for own in parts:
        assert sum(piece.last - piece.first for piece in own) * size == edges[-1]
        assert [piece.place for piece in own] == [0, *(piece.end for piece in own)][: len(own)]
        for piece in own:
            begin, end = edges[piece.document : piece.document + 2]
            assert begin <= piece.first < piece.last <= end
    for document, length in enumerate(lengths):
        held = [sum(p.last - p.first for p in own if p.document == document) for own in parts]
        assert sum(held) == length
        assert max(held) - min(held) <= 1 + (length % (2 * size) > size)


def test_dealing_out_documents_levels_what_zigzag_does_not():
    edges = (0, 32768, *range(33280, 65537, 512))  # a long document, then short ones
    work = {
        layout: [
            work_of(rank, 4, layout=layout, left=None, right=0, edges=edges) for rank in range(4)
        ]
        for layout in ("zigzag", "documents")
    }
    busiest = {layout: max(w) / (sum(w) / 4) for layout, w in work.items()}
    assert busiest["zigzag"] > 1.6
    assert busiest["documents"] < 1.01
    assert choose_layout(edges, 4) == "documents"
    # Short documents alone are level as they are, and pieces of less than a tile are waste.
    assert choose_layout(list(range(0, 65537, 512)), 4) == "zigzag"
    assert choose_layout([0, 65536], 4) == "zigzag"
    assert choose_layout([0, 36], 4) == "documents"  # no zigzag divides it
    with pytest.raises(ValueError, match="end at a multiple of 4 ranks, got 35"):
        choose_layout([0, 35], 4)
    with pytest.raises(ValueError, match="cu_seqlens must ascend from 0"):
        choose_layout([0, 9, 4], 4)


def test_documents_that_cannot_be_dealt_out_are_refused():
    x = torch.arange(16)
    for edges, message in (
        (None, "cu_seqlens must be given for the layout documents, got None"),
        ([0, 15], "cu_seqlens must ascend from 0 to the 16 tokens"),
        ([0, 9, 4, 16], "cu_seqlens must ascend from 0 to the 16 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            shard_sequence(x, 0, 2, dim=0, layout="documents", cu_seqlens=edges)
    with pytest.raises(ValueError, match=r"multiple of 3 for 3 ranks \(documents\), got 16"):
        shard_sequence(x, 0, 3, dim=0, layout="documents", cu_seqlens=[0, 16])


def test_a_causal_zigzag_step_is_one_call():
    for rank, source in itertools.product(range(4), range(4)):
        calls = calls_of(rank, source, 4, 8, layout="zigzag", left=None, right=0, edges=None)
        assert len(calls) == 1
        rows, keys = (b - a for a, b in (calls[0].rows, calls[0].keys))
        assert rows * keys == (16 * 16 if rank == source else 16 * 8)  # as much for every rank


def test_parts_of_a_sequence():
    x = torch.arange(16).view(1, 16, 1)
    assert shard_sequence(x, 1, 2).flatten().tolist() == [4, 5, 6, 7, 8, 9, 10, 11]
    assert shard_sequence(x, 0, 2).flatten().tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert shard_sequence(x, 1, 2, layout="contiguous").flatten().tolist() == list(range(8, 16))
    with pytest.raises(ValueError, match=r"multiple of 8 chunks for 4 ranks \(zigzag\), got 12"):
        shard_sequence(x[:, :12], 0, 4)
    with pytest.raises(
        ValueError, match="layout must be one of zigzag, contiguous, documents, got 'x'"
    ):
        shard_sequence(x, 0, 2, layout="x")
