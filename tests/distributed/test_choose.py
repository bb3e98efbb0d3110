"""The choice follows from shapes: what it says, what it refuses, and that it is what runs."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.test_context_parallel import FUNCTIONS, compare
from tilewise.distributed import context_parallel_attention, explain
from tilewise.distributed.choose import Rates


def _shape(tokens, heads, dim=128):
    return torch.empty(1, tokens, heads, dim, dtype=torch.bfloat16, device="meta")


def _explain(tokens, heads, kv_heads, size=4, **options):
    kv = _shape(tokens, kv_heads)
    return explain(_shape(tokens, heads), kv, kv, size=size, **options)


def test_heads_that_cannot_be_dealt_out_go_around_a_ring():
    choice = _explain(8192, 6, 2)
    assert choice.method == "ring"
    assert "q must have a multiple of 4 heads for 4 ranks, got 6" in choice.reason
    assert "ulysses" not in choice.exposed_s


def test_what_is_sent_is_what_the_papers_count():
    choice = _explain(1024, 32, 8)
    row = 1024 * 2 * 128 * 2  # keys and values of a head in bfloat16
    assert choice.sent_bytes == {"ring": 3 * 8 * row, "ulysses": 0.75 * (32 + 8) * row}
    # One key head for four ranks: each of them gets it.
    assert _explain(1024, 32, 1).sent_bytes["ulysses"] == 0.75 * (32 + 4) * row


def test_the_one_that_waits_less_is_picked():
    long = _explain(131072, 32, 8, causal=True, rates=Rates(memory=1e15))
    assert long.method == "ring"  # its transfers hide behind attention
    assert long.exposed_s["ring"] < long.exposed_s["ulysses"]
    windowed = _explain(1024, 8, 8, window=16)
    assert windowed.method == "ulysses"  # nothing to hide behind, and it sends less
    assert "where ring waits" in str(windowed)


def test_a_method_is_obeyed_or_refused():
    assert _explain(1024, 8, 8, method="ring").reason == "asked for by name"
    with pytest.raises(ValueError, match="method must be one of ring, ulysses, got 'tree'"):
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
    assert unknown == "method must be one of ring, ulysses, got 'tree'"
    assert told == "arguments must be right on every rank, got them refused on [0]"
    assert other.startswith("method, causal, window")
    assert same.startswith("method, causal, window")


@pytest.mark.parametrize("options", [{}, {"heads": [3, 1]}, {"documents": [0, 7, 48]}], ids=str)
def test_what_is_chosen_is_exact(ranks, options):
    assert ranks.run(run, 2, **options) == [{}] * 2
