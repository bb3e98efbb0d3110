"""Tensors that are views, in every way in which one may lie, give what contiguous ones give."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import masks, ops
from tilewise.testing import make_paged_cache

Call = tuple[Callable[..., Any], dict[str, Tensor], tuple[str, ...]]


def _views(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Tensors of x's shape: each dim expanded, thinned or reversed in memory, and all at an odd
    address."""
    for dim in range(x.dim()):
        if x.shape[dim] > 1:
            yield f"expanded {dim}", x.narrow(dim, 0, 1).expand(x.shape)
            wide = x.repeat_interleave(2, dim)
            yield f"thinned {dim}", wide[(slice(None),) * dim + (slice(None, None, 2),)]
            yield f"{dim} outermost", x.movedim(dim, 0).contiguous().movedim(0, dim)
    moved = torch.cat([x.reshape(-1)[:1], x.reshape(-1)])[1:].view(x.shape)
    yield "an element later", moved
    if x.dim() > 1:
        yield "all expanded", x.reshape(-1)[0].expand(x.shape)


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _attention(dtype: torch.dtype, seqlen_q: int, seqlen_k: int, **rule: Any) -> Call:
    q, k, v, do = (
        torch.randn(2, n, h, 64).to(dtype)
        for n, h in ((seqlen_q, 4), (seqlen_k, 2), (seqlen_k, 2), (seqlen_q, 4))
    )
    tensors = {"q": q, "k": k, "v": v, "do": do, "dlse": torch.randn(2, 4, seqlen_q)}
    if rule.pop("more", False):
        tensors |= {
            "bias": torch.randn(2, 4, seqlen_q, seqlen_k), "sinks": torch.randn(4),
            "alibi_slopes": torch.rand(2, 4), "seqlens_k": _ints(seqlen_k, seqlen_k - 3),
        }  # fmt: skip
    float64 = torch.float64 if dtype == torch.float64 else torch.float32
    tensors["dlse"] = tensors["dlse"].to(float64)

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, dlse: Tensor, **more: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = ops.attention(*leaves, **more, **rule, return_lse=True, backend="cpu")
        both = torch.autograd.grad((o, lse), leaves, (do, dlse), retain_graph=True)
        return o, lse, *both, *torch.autograd.grad(o, leaves, do)

    return run, tensors, ()


def _packed(dtype: torch.dtype) -> Call:
    q, k, v, do = (torch.randn(150, h, 64).to(dtype) for h in (4, 2, 2, 4))
    edges = torch.tensor([0, 20, 20, 150], dtype=torch.int32)

    def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor, edges_q: Tensor, edges_k: Tensor) -> Any:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = ops.attention_varlen(
            *leaves, cu_seqlens_q=edges_q, cu_seqlens_k=edges_k, max_seqlen_q=130,
            max_seqlen_k=130, causal=True, backend="cpu",
        )  # fmt: skip
        return o, *torch.autograd.grad(o, leaves, do)

    tensors = {"q": q, "k": k, "v": v, "do": do, "edges_q": edges, "edges_k": edges.clone()}
    return run, tensors, ("edges_q", "edges_k")


def _paged(dtype: torch.dtype, runs: tuple[int, ...], **rule: Any) -> Call:
    cached = (40, 33, 70)
    k_cache, v_cache, table, lengths = make_paged_cache(cached, 16, 2, 64)
    edges = _ints(0, *torch.tensor(runs).cumsum(0).tolist())
    tensors = {
        "q": torch.randn(int(edges[-1]), 4, 64).to(dtype), "k_cache": k_cache.to(dtype),
        "v_cache": v_cache.to(dtype), "block_table": table, "seqlens_k": lengths,
        "cu_seqlens_q": edges, "sinks": torch.randn(4), "alibi_slopes": torch.rand(4),
    }  # fmt: skip

    def run(q: Tensor, k_cache: Tensor, v_cache: Tensor, **more: Tensor) -> Any:
        return ops.paged_attention(
            q, k_cache, v_cache, max_seqlen_q=max(runs), return_lse=True, backend="cpu",
            **more, **rule,
        )  # fmt: skip

    return run, tensors, ("cu_seqlens_q", "block_table", "seqlens_k")


def _latent(dtype: torch.dtype) -> Call:
    tensors = {
        "q_latent": torch.randn(4, 4, 64).to(dtype), "q_rope": torch.randn(4, 4, 16).to(dtype),
        "latent_cache": torch.randn(9, 16, 80).to(dtype),
        "block_table": torch.randperm(9)[:8].int().view(2, 4), "seqlens_k": _ints(60, 33),
        "cu_seqlens_q": _ints(0, 1, 4),
    }  # fmt: skip

    def run(q_latent: Tensor, q_rope: Tensor, latent_cache: Tensor, **more: Tensor) -> Any:
        return ops.mla_decode(
            q_latent, q_rope, latent_cache, max_seqlen_q=3, softmax_scale=0.1, return_lse=True,
            backend="cpu", **more,
        )  # fmt: skip

    return run, tensors, ("cu_seqlens_q", "block_table", "seqlens_k")


def _write(dtype: torch.dtype) -> Call:
    def run(k: Tensor, v: Tensor, slot_mapping: Tensor) -> Any:
        caches = [torch.zeros(3, 4, 2, 16, dtype=dtype) for _ in range(2)]
        ops.write_kv_cache(k, v, *caches, slot_mapping, backend="cpu")
        return caches

    rows = {name: torch.randn(5, 2, 16).to(dtype) for name in ("k", "v")}
    return run, rows | {"slot_mapping": torch.tensor([3, -1, 7, 0, 9])}, ()


def _rope_write(dtype: torch.dtype) -> Call:
    def run(q: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, **tables: Tensor) -> Any:
        caches = [torch.zeros(3, 4, 2, 16, dtype=dtype) for _ in range(2)]
        rotated = ops.rope_write_kv_cache(q, k, v, *caches, slot_mapping, **tables, backend="cpu")
        return rotated, *caches

    rows = {name: torch.randn(5, h, 16).to(dtype) for name, h in (("q", 4), ("k", 2), ("v", 2))}
    tables = {name: torch.randn(5, 8) for name in ("cos", "sin")}
    return run, rows | tables | {"slot_mapping": torch.tensor([3, -1, 7, 0, 9])}, ()


def _small_ops(dtype: torch.dtype) -> dict[str, Call]:
    """Ops whose tensors are all there is."""
    x, angles = torch.randn(2, 6, 4, 16).to(dtype), {n: torch.randn(6, 8) for n in ("cos", "sin")}
    halves = {name: torch.randn(7, 4, 16).to(dtype) for name in ("o_a", "o_b")}
    halves |= {name: torch.randn(4, 7) for name in ("lse_a", "lse_b")}
    norm = {"x": torch.randn(5, 64).to(dtype), "weight": torch.randn(64).to(dtype)}
    sampled = {
        "logits": torch.randn(3, 64), "temperature": torch.rand(3), "top_k": _ints(3, 9, 0),
        "top_p": torch.rand(3), "min_p": torch.rand(3) / 9, "seeds": torch.arange(3),
        "counters": torch.arange(3, 6),
    }  # fmt: skip
    return {
        "apply_rope": (lambda x, cos, sin: [ops.apply_rope(x, cos, sin)], {"x": x, **angles}, ()),
        "merge_states": (
            lambda o_a, lse_a, o_b, lse_b: ops.merge_states(o_a, lse_a, o_b, lse_b), halves, (),
        ),
        "rms_norm": (lambda x, weight: [ops.rms_norm(x, weight, 1e-5)], norm, ()),
        "silu_mul": (lambda gate_up: [ops.silu_mul(gate_up)], {"gate_up": norm["x"]}, ()),
        "gated_mul": (
            lambda gate, x: [ops.gated_mul(gate, x, function="sigmoid")],
            {"gate": torch.randn(5, 64).to(dtype), "x": norm["x"]}, (),
        ),
        "sample_tokens": (
            lambda logits, **more: ops.sample_tokens(logits, **more), sampled, (),
        ),
    }  # fmt: skip


def _calls(dtype: torch.dtype) -> dict[str, Call]:
    torch.manual_seed(0)
    mask = masks.dense(torch.rand(150, 150) < 0.7)
    return {
        "attention of one query": _attention(dtype, 1, 70),
        "attention of few keys": _attention(dtype, 9, 32),
        "attention": _attention(dtype, 150, 150, causal=True),
        "attention of odd lengths": _attention(dtype, 67, 141, window=(40, 3), softcap=5.0),
        "attention with more": _attention(dtype, 150, 150, more=True),
        "attention by a mask": _attention(dtype, 150, 150, mask=mask),
        "attention_varlen": _packed(dtype),
        "paged decoding": _paged(dtype, (1, 1, 1)),
        "paged runs": _paged(dtype, (3, 1, 20)),
        "invariant decoding": _paged(dtype, (1, 1, 1), batch_invariant=True),
        "mla_decode": _latent(dtype),
        "write_kv_cache": _write(dtype),
        "rope_write_kv_cache": _rope_write(dtype),
        **_small_ops(dtype),
    }


_SLOW = [
    pytest.param(name, dtype, marks=pytest.mark.slow)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    for name in _calls(torch.float32)
    if dtype != torch.float32 or name not in ("attention", "paged runs", "apply_rope")
]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.float32) for name in ("attention", "paged runs", "apply_rope")] + _SLOW,
)
def test_views_give_what_contiguous_tensors_give(name: str, dtype: torch.dtype) -> None:
    run, tensors, of_edges = _calls(dtype)[name]
    num_ran = 0
    for argument, given in tensors.items():
        for how, view in _views(given):
            if argument in of_edges and "expanded" in how:
                continue  # of other sequences
            copy = view.contiguous() if "expanded" in how else given
            want = run(**tensors | {argument: copy.clone()})
            try:
                found = run(**tensors | {argument: view})
            except ValueError as refusal:
                if "must have stride 1 in its last dimension" not in str(refusal):
                    raise
                continue
            num_ran += 1
            for have, expected in zip(found, want, strict=True):
                torch.testing.assert_close(
                    have, expected, rtol=0, atol=2e-2 if dtype.itemsize == 2 else 1e-5,
                    equal_nan=True, msg=lambda text: f"{argument} {how}: {text}",  # noqa: B023
                )  # fmt: skip
    assert num_ran > len(tensors)
