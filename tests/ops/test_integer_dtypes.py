"""Lengths, tables and slots are int32 or int64: what is computed is the same, call after call."""

from __future__ import annotations

import pytest
import torch

from tilewise import ops
from tilewise.testing import make_paged_cache, make_qkv

INTEGERS = (torch.int32, torch.int64)
EDGES = torch.tensor([0, 3, 8])


def _packed(integers):
    q, k, v = (x[0] for x in make_qkv(1, 8, 8, 4, 2, 16, requires_grad=True))
    cu = EDGES.to(integers)
    lengths = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 5, "max_seqlen_k": 5}
    return q, k, v, lengths


def _dense(integers, scale):
    q, k, v = make_qkv(2, 5, 9, 4, 2, 16, requires_grad=True)
    o = ops.attention(q, k, v, seqlens_k=torch.tensor([9, 4]).to(integers), causal=True)
    return (o, *torch.autograd.grad(o.sum() * scale, (q, k, v)))


def _varlen(integers, scale):
    q, k, v, lengths = _packed(integers)
    o, lse = ops.attention_varlen(q, k, v, **lengths, causal=True, return_lse=True)
    return (o, lse, *torch.autograd.grad(o.sum() * scale, (q, k, v)))


def _fp8(integers, scale):
    q, k, v, lengths = _packed(integers)
    q, k, v = (x.detach().bfloat16() for x in (q, k, v))
    smooth = ops.attention_fp8(q, k, v, **lengths, smooth_k=True)
    return ops.attention_fp8(q, k, v, **lengths, causal=True), smooth


def _quantised(integers, scale):
    q, *_, lengths = _packed(integers)
    x, cu = q.detach(), lengths["cu_seqlens_q"]
    dense, counts = x.view(2, 4, 4, 16), torch.tensor([3, 4]).to(integers)
    return (
        *ops.quantize_heads(x, cu_seqlens=cu, max_seqlen=5),
        *ops.quantize_heads(dense, seqlens=counts),
        *ops.quantize_tokens(dense, seqlens=counts),
    )


def _step(integers):
    k, v, table, lengths = make_paged_cache([30, 5, 17], 8, 2, 16)
    given = {
        "block_table": table.to(integers),
        "seqlens_k": lengths.to(integers),
        "cu_seqlens_q": torch.tensor([0, 2, 3, 4]).to(integers),
        "max_seqlen_q": 2,
    }
    return torch.randn(4, 4, 16), k, v, given


def _paged(integers, scale):
    q, k, v, given = _step(integers)
    plan = ops.plan_paged_attention(q, k, v, **given)
    plan.update(given["seqlens_k"], given["cu_seqlens_q"])
    alone = ops.paged_attention(q, k, v, **given)
    out = torch.empty_like(alone)
    ops.paged_attention(q, k, v, **given, plan=plan, out=out)
    return alone, out


def _latents(integers, scale):
    q, k, _, given = _step(integers)
    cache = torch.randn(*k.shape[:2], 24)
    w_uk, w_uv = torch.randn(4, 8, 16), torch.randn(4, 8, 16)
    decoded = ops.mla_decode(q, torch.randn(4, 4, 8), cache, **given, softmax_scale=0.2)
    return decoded, ops.mla_prefill(q, cache, w_uk, w_uv, **given)


def _writes(integers, scale):
    caches = [torch.zeros(4, 8, 2, 16) for _ in range(4)]
    k, v, latents = torch.randn(3, 2, 16), torch.randn(3, 2, 16), torch.zeros(4, 8, 24)
    slots, pairs = torch.tensor([9, -1, 30]).to(integers), torch.tensor([[1, 0]]).to(integers)
    ops.write_kv_cache(k, v, *caches[:2], slots)
    angles = torch.randn(3, 8)
    rotated = ops.rope_write_kv_cache(
        k, k, v, *caches[2:], slots, cos=angles.cos(), sin=angles.sin()
    )
    ops.copy_blocks(*caches[:2], pairs)
    ops.swap_blocks(caches[2], caches[3], pairs)
    ops.write_latent_cache(torch.randn(3, 16), torch.randn(3, 8), latents, slots)
    return (*caches, rotated, latents)


def _trees(integers, scale):
    return (
        ops.tree_mask_from_parents(
            torch.tensor([-1, 0, 0, -1]), torch.tensor([0, 3, 4]).to(integers), max_seqlen_q=3
        ),
    )


@pytest.mark.parametrize(
    "run", [_dense, _varlen, _fp8, _quantised, _paged, _latents, _writes, _trees]
)
def test_both_integers_give_the_same(run):
    """Three times each in turn: a call is planned, found again, and found at once."""
    found = {integers: [] for integers in INTEGERS}
    for turn in range(3):
        for integers in INTEGERS:
            torch.manual_seed(turn)
            found[integers].append(run(integers, turn + 1))
    for ours, theirs in zip(*found.values(), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)


def test_lengths_that_change_are_read_anew():
    """A call like the one before reads its own numbers, not a copy made then."""
    q, k, v = make_qkv(2, 1, 9, 4, 2, 16)
    lengths = torch.tensor([9, 4])
    for _ in range(4):
        o = ops.attention(q, k, v, seqlens_k=lengths)
        assert torch.equal(o, ops.attention(q, k, v, seqlens_k=lengths.int()))
        lengths -= 1


def test_wide_lengths_in_a_compiled_graph():
    q, k, v = make_qkv(2, 5, 9, 4, 2, 16)
    lengths = torch.tensor([9, 4])

    def attend(lengths):
        return ops.attention(q, k, v, seqlens_k=lengths, causal=True)

    want = attend(lengths.int())
    assert torch.equal(attend(lengths), want)
    compiled = torch.compile(attend, backend="eager", fullgraph=True)
    assert torch.equal(compiled(lengths), want)


@pytest.mark.parametrize("stray", [2**32, 2**32 + 1, -(2**33)])
def test_numbers_that_int32_does_not_hold_are_refused_and_not_cut(stray):
    q, k, v, given = _step(torch.int64)
    given["block_table"][0, 0] = stray
    with pytest.raises(ValueError, match="block_table must"):
        ops.paged_attention(q, k, v, **given)
    q, k, v = make_qkv(2, 1, 9, 4, 2, 16)
    with pytest.raises(ValueError, match="seqlens_k must"):
        ops.attention(q, k, v, seqlens_k=torch.tensor([9, stray]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool, torch.uint8])
def test_no_other_dtype_is_taken(dtype):
    q, k, v, given = _step(torch.int32)
    for name in ("block_table", "seqlens_k", "cu_seqlens_q"):
        wrong = given | {name: given[name].to(dtype)}
        with pytest.raises(TypeError, match=f"{name} must have dtype int32 or int64, got"):
            ops.paged_attention(q, k, v, **wrong)
    with pytest.raises(TypeError, match="slot_mapping must have dtype int32 or int64, got"):
        ops.write_kv_cache(k[0], v[0], k, v, torch.zeros(8).to(dtype))
    with pytest.raises(TypeError, match="block_pairs must have dtype int32 or int64, got"):
        ops.copy_blocks(k, v, torch.zeros(1, 2).to(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("integers", INTEGERS)
def test_captured_graphs_convert_anew(integers):
    q, k, v, given = _step(integers)
    q, k, v = (x.cuda() for x in (q, k, v))
    given = {name: x.cuda() if name != "max_seqlen_q" else x for name, x in given.items()}
    ops.paged_attention(q, k, v, **given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = ops.paged_attention(q, k, v, **given)
    for lengths in ([30, 5, 17], [12, 3, 16]):
        given["seqlens_k"].copy_(torch.tensor(lengths))
        graph.replay()
        want = ops.paged_attention(q, k, v, **given)
        torch.testing.assert_close(o, want)
