"""explain() tells what would run without running it."""

from __future__ import annotations

import pytest
import torch

from tilewise import masks, ops
from tilewise.testing import make_paged_cache, make_qkv


def test_a_cpu_call_names_its_backend_and_why_not_the_others():
    told = ops.explain("attention", *make_qkv(1, 32, 32, 2, 2, 64), causal=True)
    assert told.backend == "cpu"
    assert told.refusals["reference"] == "runs only when named"
    assert set(told.refusals) == {"reference", "triton", "gluon"}
    assert told.seconds is None  # no measured peaks of this machine: say nothing


@pytest.mark.parametrize("has_tiles", [False, True])
@pytest.mark.parametrize("has_pairs", [False, True])
def test_the_unit_of_a_cpu_is_the_one_that_multiplies(monkeypatch, has_tiles, has_pairs):
    """Forward passes of numbers of more bits than bfloat16 are by vectors on any CPU."""
    cpu = pytest.importorskip("tilewise.kernels.cpu.attention.plan")
    monkeypatch.setattr(cpu.amx, "HAS_AMX", has_tiles)
    monkeypatch.setattr(cpu.simd, "HAS_BF16_DOT", has_pairs)
    multiplied = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        q, k, v = (x.to(dtype) for x in make_qkv(1, 300, 300, 2, 2, 64))
        if cpu.why_not_dtype(dtype) is None:
            forward, backward = ops.explain("attention", q, k, v).steps
            multiplied[dtype] = "matrix" in forward
            assert ("vector" in forward) != multiplied[dtype]
            has_parts = has_tiles and dtype != torch.float64
            assert ("matrix" in backward, "vector" in backward) == (has_parts, not has_parts)
    tiled = multiplied.pop(torch.bfloat16)
    assert tiled == (has_tiles and has_pairs)
    assert not any(multiplied.values())


def test_the_cost_is_the_papers_count():
    told = ops.explain("attention", *make_qkv(1, 64, 64, 2, 2, 64))
    assert told.cost.flops == 2 * 4 * 64 * 64 * 64
    causal = ops.explain("attention", *make_qkv(1, 64, 64, 2, 2, 64), causal=True)
    assert causal.cost.flops == told.cost.flops * 65 // 128


def test_a_mask_costs_what_its_tiles_do():
    q, k, v = make_qkv(1, 256, 256, 2, 2, 64)
    visible = torch.zeros(256, 256, dtype=torch.bool)
    visible[:64, :64] = True
    told = ops.explain("attention", q, k, v, mask=masks.dense(visible, tile=(64, 64)))
    assert told.cost.flops == ops.explain("attention", q, k, v).cost.flops // 16


def test_packed_sequences_are_counted_one_by_one():
    q = torch.randn(30, 2, 64)
    cu = torch.tensor([0, 10, 30], dtype=torch.int32)
    told = ops.explain(
        "attention_varlen",
        q,
        q,
        q,
        cu_seqlens_q=cu,
        cu_seqlens_k=cu,
        max_seqlen_q=20,
        max_seqlen_k=20,
    )
    assert told.cost.flops == 2 * 4 * 64 * (10 * 10 + 20 * 20)


def test_decode_costs_the_bytes_of_its_keys_and_values():
    k_cache, v_cache, table, lengths = make_paged_cache([20, 7], 16, 2, 64)
    told = ops.explain(
        "paged_attention",
        torch.randn(2, 4, 64),
        k_cache,
        v_cache,
        block_table=table,
        seqlens_k=lengths,
        cu_seqlens_q=torch.arange(3, dtype=torch.int32),
        max_seqlen_q=1,
    )
    assert told.backend == "cpu"
    assert told.cost.bytes_read == 27 * 2 * (64 + 64) * 4 + 2 * 4 * 64 * 4


def test_what_a_group_shares_is_read_once():
    k_cache, v_cache, table, lengths = make_paged_cache([20, 19, 21], 4, 2, 64)
    table[:, :4] = table[0, :4]
    cu = torch.arange(4, dtype=torch.int32)
    arguments = {"block_table": table, "seqlens_k": lengths, "cu_seqlens_q": cu, "max_seqlen_q": 1}
    shared = ops.shared_prefixes(table, lengths, cu, block_size=4, min_blocks=4)
    tensors = (torch.randn(3, 4, 64), k_cache, v_cache)
    apart = ops.explain("paged_attention", *tensors, **arguments)
    plan = ops.plan_paged_attention(*tensors, **arguments, shared=shared)
    arguments |= {"shared": shared, "plan": plan, "out": torch.empty(3, 4, 64)}
    together = ops.explain("paged_attention", *tensors, **arguments)
    assert apart.cost.bytes_read - together.cost.bytes_read == 2 * 16 * 2 * (64 + 64) * 4


def test_a_call_that_nobody_can_run_says_why():
    q, k, v = make_qkv(1, 8, 8, 2, 2, 64)
    told = ops.explain("attention", q.to("meta"), k.to("meta"), v.to("meta"), backend="triton")
    assert told.backend is None
    assert "meta" in told.refusals["triton"]


def test_it_prints_as_a_table():
    text = str(ops.explain("attention", *make_qkv(1, 32, 32, 2, 2, 64), backend="triton"))
    assert text.startswith("attention: triton")
    assert "tiles fwd" in text
    assert "FLOPs a byte" in text


def test_arguments_are_checked_as_the_op_checks_them():
    q, k, v = make_qkv(1, 8, 8, 2, 2, 64)
    with pytest.raises(ValueError, match="softcap must be at least 0"):
        ops.explain("attention", q, k, v, softcap=-2.0)
    with pytest.raises(ValueError, match="op_name must be one of attention"):
        ops.explain("softmax", q)
    with pytest.raises(TypeError, match=r"^op_name must be of type str, got Tensor$"):
        ops.explain(torch.zeros(1000))
