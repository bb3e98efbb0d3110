"""A plan changes who reads which keys and nothing else, and follows lengths in place."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import PagedPlan, paged_attention, plan_paged_attention
from tilewise.kernels import device
from tilewise.kernels.device import interpreting
from tilewise.kernels.tiles.paged import fills_whole
from tilewise.ops.call import forget
from tilewise.testing import assert_within_budget, make_paged_cache

pytest.importorskip("triton")
BACKENDS = ["cpu", "reference", *(["triton"] if interpreting() else [])]
interpreted = pytest.mark.skipif(not interpreting(), reason="kernels are compiled here")


def _call(lengths: list[int], runs: list[int], **cache: Any) -> tuple[tuple[Tensor, ...], Any]:
    k_cache, v_cache, table, seqlens_k = make_paged_cache(lengths, 16, 2, 32, **cache)
    starts = torch.tensor([0, *runs]).cumsum(0).int()
    q = torch.randn(sum(runs), 4, 32, generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {
        "block_table": table,
        "seqlens_k": seqlens_k,
        "cu_seqlens_q": starts,
        "max_seqlen_q": max(runs),
    }
    return (q, k_cache, v_cache), options


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("runs", [[1, 1, 1], [3, 1, 2], [40, 1, 1]], ids=str)
def test_results_are_those_without_a_plan(backend: str, runs: list[int]) -> None:
    tensors, options = _call([700, 20, 90], runs)
    plan = plan_paged_attention(*tensors, backend=backend, **options)
    want = paged_attention(*tensors, backend=backend, return_lse=True, **options)
    got = paged_attention(*tensors, backend=backend, plan=plan, return_lse=True, **options)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_is_reused_for_other_caches_scales_and_sinks(backend: str) -> None:
    tensors, options = _call([700, 20, 90], [1, 1, 1])
    plan = plan_paged_attention(*tensors, backend=backend, **options)
    options |= {"softmax_scale": 0.3, "sinks": torch.tensor([0.1, 2.0, -1.0, 0.5])}
    options |= {"backend": backend}
    q, k_cache, v_cache = tensors
    others = (q, v_cache, k_cache)
    got = paged_attention(*others, plan=plan, **options)
    torch.testing.assert_close(got, paged_attention(*others, **options), rtol=1e-5, atol=1e-5)


@interpreted
@pytest.mark.parametrize(("heads", "v_dim"), [(1, 128), (4, 32), (6, 24)])
@pytest.mark.parametrize("runs", [[1, 1, 0, 1], [3, 1, 0, 2]], ids=str)
def test_the_last_program_merges_all_splits_and_leaves_the_counters_at_0(
    runs: list[int], heads: int, v_dim: int
) -> None:
    # 1,200 keys in splits of 64: more than one step of the merge where a group has 4 heads.
    k_cache, _, table, seqlens_k = make_paged_cache([1200, 64, 70, 65], 16, 1, 32)
    v_cache = torch.randn(*k_cache.shape[:-1], v_dim)
    q = torch.randn(sum(runs), heads, 32)
    options: dict[str, Any] = {
        "block_table": table,
        "seqlens_k": seqlens_k,
        "cu_seqlens_q": torch.tensor([0, *runs]).cumsum(0).int(),
        "max_seqlen_q": max(runs),
        "sinks": torch.randn(heads),
        "return_lse": True,
    }
    want = paged_attention(q, k_cache, v_cache, backend="reference", **options)
    options["backend"] = "triton"
    plan = plan_paged_attention(q, k_cache, v_cache, **options)
    splits = int(plan.records[:, 7].amax())
    assert splits > 8
    before = plan.records.clone()
    for _ in range(2):
        got = paged_attention(q, k_cache, v_cache, plan=plan, **options)
        for a, b in zip(want, got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        assert torch.equal(plan.records, before)


@interpreted
@pytest.mark.parametrize(("width", "arch"), [(320, 90), (32, 80)])
def test_a_second_kernel_merges_the_splits_of_wide_heads_and_as_sm_80_of_few(
    monkeypatch: pytest.MonkeyPatch, width: int, arch: int
) -> None:
    monkeypatch.setattr(device, "arch_of", lambda _: arch)
    k_cache, v_cache, table, seqlens_k = make_paged_cache([1200, 64, 70], 16, 1, width)
    options: dict[str, Any] = {
        "block_table": table, "seqlens_k": seqlens_k, "max_seqlen_q": 1, "return_lse": True,
        "cu_seqlens_q": torch.arange(4, dtype=torch.int32), "sinks": torch.randn(4),
    }  # fmt: skip
    q = torch.randn(3, 4, width)
    want = paged_attention(q, k_cache, v_cache, backend="reference", **options)
    options["backend"] = "triton"
    forget()
    plan = plan_paged_attention(q, k_cache, v_cache, **options)
    assert int(plan.records[:, 7].amax()) > 2
    before = plan.records.clone()
    got = paged_attention(q, k_cache, v_cache, plan=plan, **options)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert torch.equal(plan.records, before)


@interpreted
def test_runs_that_overlap_leave_the_counters_at_0() -> None:
    """Each of their splits has a program, as the last one to end merges them all."""
    k_cache, v_cache, table, seqlens_k = make_paged_cache([300] * 21, 16, 1, 32)
    q = torch.randn(2, 4, 32)
    edges = torch.tensor([0, *[1] * 20, 2], dtype=torch.int32)
    options: dict[str, Any] = {
        "block_table": table, "seqlens_k": seqlens_k, "cu_seqlens_q": edges, "max_seqlen_q": 1,
        "backend": "triton",
    }  # fmt: skip
    plan = plan_paged_attention(q, k_cache, v_cache, **options)
    want = paged_attention(q, k_cache, v_cache, plan=plan, **options)
    before = plan.records.clone()
    good = edges.clone()
    edges.copy_(torch.tensor([*[0, 1] * 11]))
    plan.update(seqlens_k, edges)
    used = plan.records[plan.records[:, 7] > 0]
    assert int((used[:, 6] + used[:, 7]).max()) == len(used)
    paged_attention(q, k_cache, v_cache, plan=plan, **options)
    edges.copy_(good)
    plan.update(seqlens_k, edges)
    assert torch.equal(plan.records, before)
    assert torch.equal(paged_attention(q, k_cache, v_cache, plan=plan, **options), want)


@interpreted
def test_whole_sequences_keep_the_budget_of_split_ones() -> None:
    # Four sequences of two key heads fill the interpreter's four multiprocessors once.
    lengths = [300, 20, 64, 129]
    k_cache, v_cache, table, seqlens_k = make_paged_cache(lengths, 16, 2, 128)
    k_cache, v_cache = k_cache.bfloat16(), v_cache.bfloat16()
    q = torch.randn(4, 4, 128, generator=torch.Generator().manual_seed(2)).bfloat16()
    options: dict[str, Any] = {
        "block_table": table, "seqlens_k": seqlens_k, "return_lse": True,
        "cu_seqlens_q": torch.arange(5, dtype=torch.int32), "max_seqlen_q": 1,
    }  # fmt: skip
    plan = plan_paged_attention(q, k_cache, v_cache, backend="triton", **options)
    assert fills_whole(plan.spec, 90, 4)
    wide = [x.double() for x in (q, k_cache, v_cache)]
    truth = paged_attention(*wide, backend="reference", **options)
    eager = paged_attention(q, k_cache, v_cache, backend="reference", **options)
    for _ in range(2):
        found = paged_attention(q, k_cache, v_cache, backend="triton", plan=plan, **options)
        for x, y, z in zip(found, truth, eager, strict=True):
            assert_within_budget(x, y, z)


@interpreted
def test_update_follows_new_lengths_at_the_same_address() -> None:
    tensors, options = _call([700, 20, 90], [1, 1, 1])
    options["backend"] = "triton"
    plan = plan_paged_attention(*tensors, **options)
    address = plan.records.data_ptr()
    options["seqlens_k"].copy_(torch.tensor([15, 17, 90]))
    stale = plan.records.clone()
    plan.update(options["seqlens_k"], options["cu_seqlens_q"])
    assert plan.records.data_ptr() == address
    assert not torch.equal(stale, plan.records)
    got = paged_attention(*tensors, plan=plan, **options)
    torch.testing.assert_close(got, paged_attention(*tensors, **options), rtol=1e-5, atol=1e-5)


@interpreted
def test_batch_invariant_bits_do_not_depend_on_a_plan() -> None:
    tensors, options = _call([5000, 20], [1, 1])
    options |= {"backend": "triton", "batch_invariant": True}
    plan = plan_paged_attention(*tensors, **options)
    assert len(plan.records) == 0  # keys are not split
    want = paged_attention(*tensors, **options)
    assert torch.equal(want, paged_attention(*tensors, plan=plan, **options))


def test_a_cpu_needs_no_records() -> None:
    tensors, options = _call([70, 20], [1, 1])
    plan = plan_paged_attention(*tensors, backend="cpu", **options)
    assert isinstance(plan, PagedPlan)
    assert plan.records.shape == (0, 8)
    plan.update(options["seqlens_k"], options["cu_seqlens_q"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"window": 7}, "plan must be for window_left 6, got one for -1"),
        ({"max_seqlen_q": 2}, "plan must be for max_seqlen_q 2, got one for 1"),
        ({"batch_invariant": True}, "plan must be for batch_invariant True, got one for False"),
        ({"backend": "reference"}, "plan must be for backend 'reference', got one for 'cpu'"),
    ],
)
def test_plans_of_other_calls_are_refused(changes: dict[str, Any], message: str) -> None:
    tensors, options = _call([70, 20], [1, 1])
    plan = plan_paged_attention(*tensors, **options)
    with pytest.raises(ValueError, match=message):
        paged_attention(*tensors, plan=plan, **(options | changes))


@pytest.mark.parametrize(("name", "kind"), [("plan", "PagedPlan"), ("shared", "SharedPrefixes")])
def test_what_is_no_plan_and_no_prefixes_is_refused(name: str, kind: str) -> None:
    tensors, options = _call([70, 20], [1, 1])
    with pytest.raises(TypeError, match=f"{name} must be of type {kind}, got Tensor"):
        paged_attention(*tensors, **options, **{name: options["seqlens_k"]})


def test_updates_of_other_batches_are_refused() -> None:
    tensors, options = _call([70, 20], [1, 1])
    plan = plan_paged_attention(*tensors, **options)
    with pytest.raises(ValueError, match="seqlens_k must have shape"):
        plan.update(torch.zeros(3, dtype=torch.int32), options["cu_seqlens_q"])


def test_a_plan_of_another_device_is_refused() -> None:
    tensors, options = _call([70, 20], [1, 1])
    plan = plan_paged_attention(*tensors, **options)
    plan = replace(plan, records=plan.records.to("meta"))
    with pytest.raises(ValueError, match="plan must be on cpu, got meta"):
        paged_attention(*tensors, plan=plan, **options)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_compiled_calls_take_a_plan_and_refuse_that_of_others() -> None:
    tensors, options = _call([70, 20], [1, 1])
    plan = plan_paged_attention(*tensors, **options)
    compiled = torch.compile(paged_attention, fullgraph=True, backend="aot_eager")
    got = compiled(*tensors, plan=plan, **options)
    assert torch.equal(got, paged_attention(*tensors, **options))
    with pytest.raises(ValueError, match="plan must be for softcap 2.0, got one for 0.0"):
        compiled(*tensors, plan=plan, softcap=2.0, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(16, 8), (32, 8), (8, 8), (64, 2)], ids=str)
@pytest.mark.parametrize("lengths", [[1024] * 32, [1, 40_000, 700, 0, 90], [5000]], ids=len)
def test_a_captured_plan_merges_on_a_gpu_as_a_second_kernel_does(
    heads: tuple[int, int], lengths: list[int]
) -> None:
    num_heads, num_kv_heads = heads
    cache = make_paged_cache(lengths, 16, num_kv_heads, 128, dtype=torch.bfloat16, device="cuda")
    k_cache, v_cache, table, seqlens_k = cache
    q = torch.randn(len(lengths), num_heads, 128, dtype=torch.bfloat16, device="cuda")
    options: dict[str, Any] = {
        "block_table": table,
        "seqlens_k": seqlens_k,
        "cu_seqlens_q": torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda"),
        "max_seqlen_q": 1,
        "return_lse": True,
    }
    plan = plan_paged_attention(q, k_cache, v_cache, **options)
    paged_attention(q, k_cache, v_cache, plan=plan, **options)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = paged_attention(q, k_cache, v_cache, plan=plan, **options)
    for shorter in (0, 300):
        seqlens_k.sub_(shorter).clamp_(min=0)
        plan.update(seqlens_k, options["cu_seqlens_q"])
        want = paged_attention(q, k_cache, v_cache, **options)
        on_cpu = {k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()}
        exact = paged_attention(
            *(x.cpu().double() for x in (q, k_cache, v_cache)), backend="reference", **on_cpu
        )
        first = None
        for _ in range(200):
            for part in got:
                part.fill_(float("nan"))
            graph.replay()
            if first is None:
                first = [part.clone() for part in got]
            for part, same in zip(got, first, strict=True):
                assert torch.equal(part, same)
        assert first is not None
        for a, b, truth, bound in zip(first, want, exact, (2e-2, 1e-4), strict=True):
            torch.testing.assert_close(a.cpu().double(), truth, rtol=bound, atol=bound)
            torch.testing.assert_close(b.cpu().double(), truth, rtol=bound, atol=bound)
