"""What a rank's calls see is what its tokens may see: every key once, by any layout and window."""

from __future__ import annotations

import itertools

import pytest
import torch

from tilewise.distributed.layout import calls_of, chunks_of, num_chunks, shard_sequence, span


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


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("edges", [None, (0, 24), (0, 1, 2, 11, 11, 13, 24), (0, 3, 21, 24)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_calls_see_every_visible_pair_once(layout, edges, size):
    total, count = 24, num_chunks(size, layout)
    chunk = total // count
    positions = torch.arange(total)
    document = torch.zeros(total, dtype=torch.int64)
    for edge in (edges or (0,))[1:-1]:
        document[edge:] += 1
    for left, right in itertools.product((None, 0, 2, 7, 30), (None, 0, 4)):
        want = _allowed(positions, positions, left, right)
        want &= document[:, None] == document[None, :]
        got = torch.zeros_like(want, dtype=torch.int64)
        for rank, source in itertools.product(range(size), range(size)):
            mine, theirs = (
                torch.cat(
                    [positions[c * chunk : (c + 1) * chunk] for c in chunks_of(r, size, layout)]
                )
                for r in (rank, source)
            )
            for call in calls_of(
                rank, source, size, chunk, layout=layout, left=left, right=right, edges=edges
            ):
                rows, keys = mine[slice(*call.rows)], theirs[slice(*call.keys)]
                seen = _aligned(len(rows), len(keys), call.left, call.right)
                if call.edges is not None:
                    inner = torch.bucketize(
                        torch.arange(len(rows)), torch.tensor(call.edges[1:]), right=True
                    )
                    seen &= inner[:, None] == inner[None, :]
                got[rows[:, None], keys[None, :]] += seen.to(torch.int64)
        assert torch.equal(got, want.to(torch.int64)), (left, right)


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
    with pytest.raises(ValueError, match="layout must be one of zigzag, contiguous, got 'x'"):
        shard_sequence(x, 0, 2, layout="x")
