"""The registered boundary: opcheck, fullgraph compilation, export, autocast."""

from __future__ import annotations

import pytest
import torch

from tilewise import ops
from tilewise.testing import make_paged_cache, make_qkv

# Inductor and export of third parties warn about their own deprecations.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
OPTIONS = (*(None,) * 12, 9, 9, -1, 0, 0.25, 0.0, 0.0, False, None)


def test_attention_is_opcheck_clean():
    q, k, v = make_qkv(2, 9, 9, 4, 2, 16, requires_grad=True)
    torch.library.opcheck(torch.ops.tilewise.attention_fwd.default, (q, k, v, *OPTIONS))


def test_attention_with_bias_and_sinks_is_opcheck_clean():
    q, k, v = make_qkv(2, 9, 9, 4, 2, 16, requires_grad=True)
    bias = torch.randn(1, 4, 9, 9, requires_grad=True)
    sinks = torch.randn(4, requires_grad=True)
    options = (None, None, None, bias, None, sinks, *OPTIONS[6:])
    torch.library.opcheck(torch.ops.tilewise.attention_fwd.default, (q, k, v, *options))


def test_packed_attention_is_opcheck_clean():
    q, k, v = (t[0].detach().requires_grad_() for t in make_qkv(1, 9, 9, 4, 2, 16))
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.tilewise.attention_fwd.default,
        (q, k, v, cu, cu, *OPTIONS[2:12], 5, 5, *OPTIONS[14:]),
    )


def test_paged_ops_are_opcheck_clean():
    k_cache, v_cache, table, lengths = make_paged_cache([5, 9], 4, 2, 16)
    cu = torch.tensor([0, 1, 3], dtype=torch.int32)
    q = torch.randn(3, 4, 16)
    arguments = (q, k_cache, v_cache, table, lengths, cu, None, None, 2, -1, 0.25, 0.0, False, None)
    torch.library.opcheck(torch.ops.tilewise.paged_attention.default, arguments)
    k_cache, v_cache = torch.zeros(5, 4, 2, 16), torch.zeros(5, 4, 2, 16)
    rows = torch.randn(3, 2, 16)
    torch.library.opcheck(
        torch.ops.tilewise.write_kv_cache.default,
        (rows, rows, k_cache, v_cache, torch.tensor([3, -1, 8]), None),
    )
    torch.library.opcheck(
        torch.ops.tilewise.copy_blocks.default, (k_cache, v_cache, torch.tensor([[0, 2]]), None)
    )


def test_rope_and_merge_are_opcheck_clean():
    x = torch.randn(6, 2, 16, requires_grad=True)
    table = torch.randn(6, 8)
    torch.library.opcheck(torch.ops.tilewise.rope.default, (x, table, table, False, None))
    o_a, o_b = (torch.randn(6, 2, 16, requires_grad=True) for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 6, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.tilewise.merge_states.default, (o_a, lse_a, o_b, lse_b, None))


def test_fullgraph_compilation_gives_the_eager_bits_and_gradients():
    def block(q, k, v, cos, sin):
        q, k = ops.apply_rope(q, cos, sin), ops.apply_rope(k, cos, sin)
        return ops.attention(q, k, v, causal=True).square().sum()

    angles = torch.randn(12, 8)
    tables = (angles.cos(), angles.sin())
    results = []
    for function in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
        q, k, v = make_qkv(2, 12, 12, 4, 2, 16, requires_grad=True)
        loss = function(q, k, v, *tables)
        loss.backward()
        results.append((loss.detach(), q.grad, k.grad, v.grad))
    for eager, compiled in zip(*results, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_one_graph_serves_growing_sequences():
    compiled = torch.compile(
        lambda q, k, v: ops.attention(q, k, v, causal=True),
        fullgraph=True,
        dynamic=True,
        backend="aot_eager",
    )
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for length in (5, 9, 17):
        q, k, v = make_qkv(1, length, length, 2, 2, 16)
        torch.testing.assert_close(compiled(q, k, v), ops.attention(q, k, v, causal=True))
    assert counters["stats"]["unique_graphs"] == 1


def test_export_keeps_the_op_as_one_node():
    class Block(torch.nn.Module):
        def forward(self, q, k, v):
            return ops.attention(q, k, v, causal=True)

    q, k, v = make_qkv(1, 8, 8, 2, 2, 16)
    program = torch.export.export(Block(), (q, k, v))
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("tilewise.attention_fwd.default") == 1
    torch.testing.assert_close(program.module()(q, k, v), ops.attention(q, k, v, causal=True))


def test_autocast_computes_in_the_low_precision_dtype():
    q, k, v = make_qkv(1, 8, 8, 2, 2, 16, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o = ops.attention(q, k, v)
    assert o.dtype == torch.bfloat16
    o.sum().backward()
    assert q.grad.dtype == torch.float32


def test_activation_checkpointing_gives_the_same_gradients():
    q, k, v = make_qkv(1, 8, 8, 2, 2, 16, requires_grad=True)
    want = torch.autograd.grad(ops.attention(q, k, v, causal=True).sum(), (q, k, v))
    o = torch.utils.checkpoint.checkpoint(
        lambda *t: ops.attention(*t, causal=True), q, k, v, use_reentrant=False
    )
    for got, expected in zip(torch.autograd.grad(o.sum(), (q, k, v)), want, strict=True):
        assert torch.equal(got, expected)
