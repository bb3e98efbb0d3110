"""What a result never depends on: padding, other sequences, cache slots that hold no key.

NaN stands in all of it, and every result and gradient keeps its bits. NaN that a sequence's own
queries may reach is not contained: a kernel multiplies whole tiles, as eager attention multiplies
whole matrices, and 0 * NaN is NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tilewise import ops
from tilewise.testing import make_paged_cache

_EVERYWHERE = [
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("triton", "cpu", id="triton-interpreted"),
    pytest.param("triton", "cuda", id="triton", marks=pytest.mark.gpu),
    pytest.param("gluon", "cuda", id="gluon", marks=pytest.mark.gpu),
]
# name: keywords of the call
RULES = {
    "plain": {},
    "causal": {"causal": True},
    "window_softcap": {"window": (9, 2), "softcap": 5.0},
}
_LENGTHS_Q, _LENGTHS_K = (20, 33, 9), (31, 50, 9)  # of packed sequences, the one between is bad
_RUNS, _CACHED = (1, 6, 3), (40, 33, 70)  # of sequences over a cache


def _draw(backend: str, place: str, *shape: int) -> Tensor:
    dtype = torch.bfloat16 if backend == "gluon" else torch.float32
    return torch.randn(shape, device=place).to(dtype)


def _results(
    run: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], do: Tensor
) -> list[Tensor]:
    """Return o, lse, dq, dk and dv."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    o, lse = run(*leaves)
    gradients = torch.autograd.grad(o, leaves, do)
    return [o.detach(), lse.detach(), *gradients]


@pytest.mark.parametrize(("backend", "place"), _EVERYWHERE)
@pytest.mark.parametrize("rule", RULES)
def test_what_lies_behind_a_length_reaches_nothing(rule: str, backend: str, place: str) -> None:
    q, k, v = (_draw(backend, place, 2, 70, 2, 64) for _ in range(3))
    do, lengths = _draw(backend, place, 2, 70, 2, 64), (70, 41)
    seqlens_k = torch.tensor(lengths, dtype=torch.int32, device=place)

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return ops.attention(
            *tensors, seqlens_k=seqlens_k, return_lse=True, backend=backend, **RULES[rule]
        )

    clean = _results(run, [q, k, v], do)
    k[1, 41:], v[1, 41:] = math.nan, math.inf
    for got, want in zip(_results(run, [q, k, v], do), clean, strict=True):
        assert torch.equal(got, want)
    for gradient in clean[3:]:
        assert not gradient[1, 41:].any()


@pytest.mark.parametrize(("backend", "place"), _EVERYWHERE)
@pytest.mark.parametrize("rule", RULES)
def test_another_packed_sequence_reaches_nothing(rule: str, backend: str, place: str) -> None:
    tokens_q, tokens_k = sum(_LENGTHS_Q), sum(_LENGTHS_K)
    q, do = (_draw(backend, place, tokens_q, 4, 64) for _ in range(2))
    k, v = (_draw(backend, place, tokens_k, 2, 64) for _ in range(2))
    edges = [
        torch.tensor([0, *lengths]).cumsum(0).int().to(place)
        for lengths in (_LENGTHS_Q, _LENGTHS_K)
    ]

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return ops.attention_varlen(
            *tensors, cu_seqlens_q=edges[0], cu_seqlens_k=edges[1],
            max_seqlen_q=max(_LENGTHS_Q), max_seqlen_k=max(_LENGTHS_K), return_lse=True,
            backend=backend, **RULES[rule],
        )  # fmt: skip

    clean = _results(run, [q, k, v], do)
    bad_q = slice(_LENGTHS_Q[0], _LENGTHS_Q[0] + _LENGTHS_Q[1])
    bad_k = slice(_LENGTHS_K[0], _LENGTHS_K[0] + _LENGTHS_K[1])
    q[bad_q], do[bad_q], k[bad_k], v[bad_k] = math.nan, math.nan, math.nan, math.inf
    found = _results(run, [q, k, v], do)
    assert found[0][bad_q].isnan().all()  # the value was read where it belongs
    tokens = (bad_q, bad_q, bad_q, bad_k, bad_k)
    for index, (got, want) in enumerate(zip(found, clean, strict=True)):
        if index == 1:  # lse: heads come first
            got, want = got.t(), want.t()
        for part in (slice(0, tokens[index].start), slice(tokens[index].stop, None)):
            assert torch.equal(got[part], want[part])


def _poison(
    caches: list[Tensor], table: Tensor, q: list[Tensor], sequence: int
) -> tuple[Tensor, Tensor]:
    """Fill one sequence's blocks and queries with NaN; return the rows of the others, and its."""
    blocks = table[sequence][table[sequence] >= 0].long()
    for cache in caches:
        cache[blocks] = math.nan
    rows = torch.arange(sum(_RUNS))
    first = sum(_RUNS[:sequence])
    own = (rows >= first) & (rows < first + _RUNS[sequence])
    for x in q:
        x[own] = math.nan
    return rows[~own], rows[own]


@pytest.mark.parametrize(("backend", "place"), _EVERYWHERE[:-1])
def test_blocks_of_another_sequence_reach_nothing(backend: str, place: str) -> None:
    """Slots that hold no key are NaN from the start; Hopper's own kernels read 8-bit caches."""
    k_cache, v_cache, table, lengths = make_paged_cache(
        list(_CACHED), 16, 2, 64, dtype=torch.float32, device=place
    )
    q = _draw(backend, place, sum(_RUNS), 4, 64)
    metadata = {
        "block_table": table, "seqlens_k": lengths, "max_seqlen_q": max(_RUNS),
        "cu_seqlens_q": torch.tensor([0, *_RUNS]).cumsum(0).int().to(place),
    }  # fmt: skip
    want = ops.paged_attention(q, k_cache, v_cache, **metadata, backend=backend)
    assert want.isfinite().all()
    others, own = _poison([k_cache, v_cache], table, [q], 1)
    got = ops.paged_attention(q, k_cache, v_cache, **metadata, backend=backend)
    assert torch.equal(got[others], want[others])
    assert got[own].isnan().all()


@pytest.mark.parametrize(("backend", "place"), _EVERYWHERE)
def test_latents_of_another_sequence_reach_nothing(backend: str, place: str) -> None:
    rank, rope, heads = (512, 64, 16) if backend == "gluon" else (32, 16, 4)
    block_size = 64 if backend == "gluon" else 16
    dtype = torch.bfloat16 if backend == "gluon" else torch.float32
    cache, _, table, lengths = make_paged_cache(
        list(_CACHED), block_size, 1, rank + rope, dtype=dtype, device=place
    )
    cache = cache.squeeze(2)
    q = [_draw(backend, place, sum(_RUNS), heads, width) for width in (rank, rope)]
    metadata = {
        "block_table": table, "seqlens_k": lengths, "max_seqlen_q": max(_RUNS),
        "cu_seqlens_q": torch.tensor([0, *_RUNS]).cumsum(0).int().to(place),
        "softmax_scale": rank**-0.5,
    }  # fmt: skip
    want = ops.mla_decode(*q, cache, **metadata, backend=backend)
    assert want.isfinite().all()
    others, own = _poison([cache], table, q, 1)
    got = ops.mla_decode(*q, cache, **metadata, backend=backend)
    assert torch.equal(got[others], want[others])
    assert got[own].isnan().all()


_ON_CPU = _EVERYWHERE[:3]
_KINDS = [torch.float32, torch.bfloat16, torch.float16]


def _sinks(heads: int) -> Tensor:
    sinks = torch.randn(heads)
    sinks[1] = math.nan
    return sinks


def _is_nan_of(found: Tensor, head_dim: int, bad: int) -> bool:
    """Whether the part of one head is NaN and nothing else is."""
    others = [head for head in range(found.shape[head_dim]) if head != bad]
    rest = found.index_select(head_dim, torch.tensor(others))
    return bool(found.select(head_dim, bad).isnan().all() and rest.isfinite().all())


@pytest.mark.parametrize(("backend", "place"), _ON_CPU)
@pytest.mark.parametrize("dtype", _KINDS, ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(1, 40), (5, 9), (70, 70)])
def test_a_sink_that_is_nan_is_its_heads(
    rows: int, keys: int, dtype: torch.dtype, backend: str, place: str
) -> None:
    """It was ignored on a CPU, whose kernels asked whether a sink is more than minus infinity."""
    q, do = (torch.randn(1, rows, 4, 32, dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, keys, 2, 32, dtype=dtype) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v, _sinks(4))]
    o, lse = ops.attention(
        *leaves[:3], sinks=leaves[3], causal=True, return_lse=True, backend=backend
    )
    assert _is_nan_of(o, 2, 1)
    assert _is_nan_of(lse, 1, 1)
    dq, dk, dv, dsinks = torch.autograd.grad(o, leaves, do)
    assert _is_nan_of(dq, 2, 1)
    assert dsinks.isnan().tolist() == [False, True, False, False]
    for gradient in (dk, dv):  # of the group's key head, where a query reaches the key
        assert _is_nan_of(gradient, 2, 0)


@pytest.mark.parametrize(("backend", "place"), _ON_CPU)
def test_a_sink_that_is_nan_is_seen_without_keys(backend: str, place: str) -> None:
    q, k = torch.randn(1, 3, 4, 32), torch.randn(1, 0, 2, 32)
    _, lse = ops.attention(q, k, k, sinks=_sinks(4), return_lse=True, backend=backend)
    assert _is_nan_of(lse, 1, 1)


@pytest.mark.parametrize(("backend", "place"), _ON_CPU)
@pytest.mark.parametrize("dtype", _KINDS, ids=str)
@pytest.mark.parametrize("runs", [(1, 1, 1), (1, 6, 3)], ids=str)
@pytest.mark.parametrize("is_invariant", [False, True])
def test_a_sink_that_is_nan_is_its_heads_over_a_cache(
    is_invariant: bool, runs: tuple[int, ...], dtype: torch.dtype, backend: str, place: str
) -> None:
    k_cache, v_cache, table, lengths = make_paged_cache(list(_CACHED), 16, 2, 64, dtype=dtype)
    o, lse = ops.paged_attention(
        torch.randn(sum(runs), 4, 64, dtype=dtype), k_cache, v_cache, block_table=table,
        seqlens_k=lengths, max_seqlen_q=max(runs), sinks=_sinks(4),
        cu_seqlens_q=torch.tensor([0, *runs]).cumsum(0).int(),
        batch_invariant=is_invariant, return_lse=True, backend=backend,
    )  # fmt: skip
    assert _is_nan_of(o, 1, 1)
    assert _is_nan_of(lse, 0, 1)
