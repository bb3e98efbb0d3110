"""What a call costs follows its lengths, not what it says of the longest: that may be anything
above it, and no memory, task or grid is made for keys that no sequence has."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tilewise import explain, ops
from tilewise.kernels.cpu.attention.gradients import CHUNK_KEYS, BackwardTasks
from tilewise.ops.attention.op import AttentionOptions, make_spec
from tilewise.testing import make_paged_cache

_EDGES = torch.tensor([0, 7, 20], dtype=torch.int32)
# name: what a call has beside q, k and v
_MORE = {
    "plain": lambda: {},
    "causal with sinks": lambda: {"causal": True, "sinks": torch.randn(2, requires_grad=True)},
    "a bias": lambda: {"bias": torch.randn(1, 2, 1, 1, requires_grad=True)},
    "dropout": lambda: {"dropout_p": 0.25, "seed": 3},
}


def _with_gradients(backend, longest, more):
    torch.manual_seed(0)
    q, k, v = (torch.randn(20, 2, 32, requires_grad=True) for _ in range(3))
    more = more()
    o = ops.attention_varlen(
        q, k, v, cu_seqlens_q=_EDGES, cu_seqlens_k=_EDGES, max_seqlen_q=longest,
        max_seqlen_k=longest, backend=backend, **more,
    )  # fmt: skip
    leaves = [q, k, v, *(x for x in more.values() if isinstance(x, torch.Tensor))]
    first = torch.autograd.grad(o.square().sum(), leaves, create_graph=True)
    second = torch.autograd.grad(sum(x.square().sum() for x in first[:3]), [q, k, v])
    return o, *first, *second


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", _MORE)
def test_packed_sequences_may_name_any_longest(name, backend):
    want = _with_gradients(backend, 13, _MORE[name])
    for longest in (2**31, 2**40):
        found = _with_gradients(backend, longest, _MORE[name])
        assert all(torch.equal(x, y) for x, y in zip(found, want, strict=True))


def test_a_spec_has_no_longer_sequence_than_rows():
    q, bias = torch.zeros(20, 2, 32), torch.zeros(1, 2, 64, 1)
    numbers = dict.fromkeys(AttentionOptions._fields) | {"cu_seqlens_q": _EDGES}
    numbers |= {"max_seqlen_q": 64, "max_seqlen_k": 2**33, "softmax_scale": 1.0, "softcap": 0.0}
    spec = make_spec(q, q, q, AttentionOptions(**numbers))
    assert (spec.max_seqlen_q, spec.max_seqlen_k) == (20, 20)
    spec = make_spec(q, q, q, AttentionOptions(**numbers | {"bias": bias}))
    assert (spec.max_seqlen_q, spec.max_seqlen_k) == (64, 20)  # its rows are counted by the call
    spec = make_spec(q, q, q, AttentionOptions(**numbers | {"max_seqlen_q": 5}))
    assert spec.max_seqlen_q == 5


def test_chunks_of_keys_are_those_of_the_longest_sequence():
    wide = (1000, 3, 2, 1, 1)
    tasks = BackwardTasks(1000, 6, wide, shares_batch=False, shares_heads=False)
    for longest, chunks in ((0, 1), (20, 1), (CHUNK_KEYS + 1, 2), (2**40, 1000)):
        own = tasks.over(longest)
        assert (own.num_chunks, own.dbias_shape) == (chunks, (chunks, *wide[1:]))
    shared = tasks._replace(dbias_shape=(1, *wide[1:])).over(CHUNK_KEYS + 1)
    assert shared.dbias_shape == (1, *wide[1:])


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_cache_may_be_asked_with_any_longest_run(batch_invariant):
    k_cache, v_cache, table, lengths = make_paged_cache([5, 9], 4, 2, 16)
    q = torch.randn(4, 4, 16)
    edges = torch.tensor([0, 1, 4], dtype=torch.int32)
    options = {"block_table": table, "seqlens_k": lengths, "cu_seqlens_q": edges}
    options["batch_invariant"] = batch_invariant
    latent = torch.randn(4, 4, 16), torch.randn(4, 4, 8), torch.randn(len(k_cache), 4, 24)
    want, *others = [
        (
            ops.paged_attention(q, k_cache, v_cache, max_seqlen_q=longest, **options),
            ops.mla_decode(*latent, softmax_scale=0.1, max_seqlen_q=longest, **options),
        )
        for longest in (3, 2**31, 2**40)
    ]
    for found, (x, y) in product(others, [(0, 0), (1, 1)]):
        assert torch.equal(found[x], want[y])


def test_the_expansion_of_latents_walks_the_keys_that_there_are():
    torch.manual_seed(0)
    cache, table = torch.randn(6, 4, 24), torch.arange(6, dtype=torch.int32).view(2, 3)
    edges = torch.tensor([0, 1, 4], dtype=torch.int32)
    up = torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    want, found = (
        ops.mla_prefill(
            torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(1)), cache, *up,
            block_table=table, seqlens_k=torch.tensor([12, 9], dtype=torch.int32),
            cu_seqlens_q=edges, max_seqlen_q=longest, max_seqlen_k=longest, chunk_tokens=8,
        )
        for longest in (12, 2**40)
    )  # fmt: skip
    assert torch.equal(found, want)


def test_explain_refuses_lengths_that_lie_outside_of_the_rows():
    q = torch.zeros(20, 2, 32)
    with pytest.raises(ValueError, match=r"cu_seqlens_k must rise from 0 to at most 20"):
        explain(
            "attention_varlen", q, q, q, cu_seqlens_q=_EDGES, max_seqlen_q=13,
            cu_seqlens_k=torch.tensor([0, 7, 2**31 - 1], dtype=torch.int32), max_seqlen_k=13,
        )  # fmt: skip
