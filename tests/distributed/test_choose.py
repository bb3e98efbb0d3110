"""The choice follows from shapes: what it says, what it refuses, and that it is what runs."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_context_parallel import FUNCTIONS, compare
from tilewise.distributed import choose, context_parallel_attention, explain
from tilewise.distributed.choose import Rates


def _shape(tokens, heads, dim=128):
    return torch.empty(1, tokens, heads, dim, dtype=torch.bfloat16, device="meta")


@pytest.fixture
def gathers(monkeypatch):
    """Let a gather be picked for pieces of twice the length that has been timed."""
    monkeypatch.setattr(choose, "SHORT", 16384)


def _explain(tokens, heads, kv_heads, size=4, **options):
    kv = _shape(tokens, kv_heads)
    return explain(_shape(tokens, heads), kv, kv, size=size, **options)


def test_heads_that_cannot_be_dealt_out_are_not_traded():
    choice = _explain(8192, 6, 2)
    assert choice.method in ("ring", "gather")
    assert "ulysses cannot: q must have a multiple of 4 heads for 4 ranks, got 6" in choice.reason
    assert "ulysses" not in choice.exposed_s


def test_what_is_sent_is_what_the_papers_count():
    choice = _explain(1024, 32, 8)
    row = 1024 * 2 * 128 * 2  # keys and values of a head in bfloat16
    sent = {"ring": 3 * 8 * row, "gather": 3 * 8 * row, "ulysses": 0.75 * (32 + 8) * row}
    assert choice.sent_bytes == sent
    # One key head for four ranks: each of them gets it.
    assert _explain(1024, 32, 1).sent_bytes["ulysses"] == 0.75 * (32 + 4) * row


def test_the_one_that_waits_least_is_picked(gathers):
    many = _explain(16384, 32, 32, causal=True, rates=Rates(link=200e9, room=1e12))
    assert many.method == "ring"  # its transfers hide behind attention
    assert many.exposed_s["ring"] < min(many.exposed_s["ulysses"], many.exposed_s["gather"])
    few = _explain(8192, 64, 8, causal=True)
    assert few.method == "gather"  # fewer bytes than merging the steps of a ring moves
    assert "where ring waits" in str(few)
    equal = _explain(16384, 8, 8, size=8, rates=Rates(memory=1e15, flops=1e18, message_s=0.0))
    assert equal.method == "ulysses"  # nothing to hide behind, and it sends less


def test_what_has_no_room_is_not_picked(gathers):
    whole = _explain(8192, 32, 8, causal=True, rates=Rates(room=3e8))
    assert whole.method == "ring"
    assert "gather would take 0.8 GB" in whole.reason
    keys = 8192 * 8 * 2 * 128 * 2  # a rank's in bfloat16; gradients have twice as many bytes
    assert whole.memory_bytes["gather"] == 2 * 4 * 3 * keys
    assert _explain(8192, 32, 8, causal=True).method == "gather"


def test_what_has_been_timed_decides():
    """Of two ranks a ring merges each query once; of four, a gather waits less; and no longer."""
    assert _explain(8192, 64, 8, size=2, causal=True).method == "ring"
    for size in (4, 8):
        assert _explain(8192, 64, 8, size=size, causal=True).method == "gather"
    # Four of 32,768: Ulysses was ahead of a ring forward and backward.
    assert _explain(32768, 64, 8, causal=True).method == "ulysses"
    assert _explain(32768, 64, 8, size=2, causal=True).method == "ring"
    assert _explain(8194, 64, 8, causal=True).method != "gather"
    assert _explain(8192, 64, 64, causal=True).method != "gather"  # eight times the bytes


def test_long_pieces_are_not_gathered_unless_asked_for(gathers):
    long = _explain(32768, 64, 8, size=2, causal=True)
    assert long.method == "ring"
    assert "gather is for at most 16,384 tokens a rank" in long.reason
    assert _explain(32768, 64, 8, size=2, causal=True, method="gather").method == "gather"


def test_the_busiest_rank_is_weighed():
    edges = [0, 32768, *range(33280, 65537, 512)]
    q, kv = _shape(16384, 8)[0], _shape(16384, 2)[0]
    found = {
        layout: explain(q, kv, kv, size=4, causal=True, cu_seqlens=edges, layout=layout)
        for layout in ("zigzag", "documents")
    }
    assert found["documents"].balance > 0.99
    assert found["zigzag"].balance < 0.6
    assert found["zigzag"].compute_s > 1.6 * found["documents"].compute_s
    assert "on the busiest rank" in str(found["zigzag"])
    assert _explain(1024, 8, 8, causal=True, layout="contiguous").balance == pytest.approx(4 / 7)
    with pytest.raises(ValueError, match="cu_seqlens must ascend from 0 to the 65536"):
        explain(q, kv, kv, size=4, cu_seqlens=[0, 5])
    with pytest.raises(ValueError, match="layout must be zigzag or contiguous without"):
        _explain(1024, 8, 8, layout="documents")


def test_a_method_is_obeyed_or_refused():
    for method in ("ring", "gather", "ulysses"):
        choice = _explain(1024, 8, 8, method=method)
        assert (choice.method, choice.reason) == (method, "asked for by name")
    with pytest.raises(ValueError, match="method must be one of ring, ulysses, gather, got 'tree'"):
        _explain(1024, 8, 8, method="tree")
    with pytest.raises(ValueError, match="multiple of 4 heads for 4 ranks, got 6"):
        _explain(1024, 6, 2, method="ulysses")


def run(group, rank, size, **values):
    FUNCTIONS["chosen"] = context_parallel_attention
    return compare(group, rank, size, method="chosen", **values)


def refused_here(group, rank, size):
    """Name methods that differ by rank; return the errors."""
    q, found = torch.zeros(1, 8, 4, 16), []
    for methods in (("tree", None), ("ring", "ulysses")):
        try:
            context_parallel_attention(q, q, q, group=group, method=methods[rank])
        except ValueError as error:
            found.append(str(error))
    return found


def test_methods_that_differ_are_told_on_every_rank(ranks):
    (unknown, other), (told, same) = ranks.run(refused_here, 2)
    assert unknown == "method must be one of ring, ulysses, gather, got 'tree'"
    assert told == "arguments must be right on every rank, got them refused on [0]"
    assert other.startswith("method, causal, window")
    assert same.startswith("method, causal, window")


@pytest.mark.parametrize(
    "options",
    [{}, {"heads": [3, 1]}, {"documents": [0, 7, 48]},
     {"documents": [0, 7, 48], "layout": "documents"}],
    ids=str,
)  # fmt: skip
def test_what_is_chosen_is_exact(ranks, options):
    assert ranks.run(run, 2, **options) == [{}] * 2


def broken(group, rank, size):
    """Give what cannot be weighed on one rank; return the errors."""
    q, found = torch.zeros(1, 8, 4, 16), []
    for bad in ({"k": None}, {"window": "x"}, {"cu_seqlens": [0]}):
        values = {"q": q, "k": q, "v": q} | (bad if rank == 0 else {})
        try:
            context_parallel_attention(**values, group=group)
        except ValueError as error:
            found.append(str(error))
    return found


def test_what_cannot_be_weighed_is_told_on_every_rank(ranks):
    own, others = ranks.run(broken, 2)
    assert len(own) == 3
    assert others == ["arguments must be right on every rank, got them refused on [0]"] * 3
