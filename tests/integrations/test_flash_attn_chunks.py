"""attention_chunk of FlashAttention-3, padded pages and its own positions for rotary tables."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from tests.integrations.flash_attn_oracle import rotated
from tilewise.errors import UnsupportedError
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.reference import standard
from tilewise.testing import make_qkv

E4M3 = torch.float8_e4m3fn


def _int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _expected(q: Tensor, k: Tensor, v: Tensor, size: int, **rule) -> tuple[Tensor, Tensor]:
    """Attend from q (Sq, Hq, D) in float64, with a matrix of who is in whose chunk."""
    position = torch.arange(len(q))[:, None] + len(k) - len(q)
    hidden = torch.arange(len(k)) // size != position.div(size, rounding_mode="floor")
    bias = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)
    o, lse = standard.attention(
        *(x[None].double() for x in (q, k, v)), bias=bias[None, None], return_lse=True, **rule
    )
    return o[0], lse[0]


RULES = ({"causal": True}, {"window_size": (2, 1)}, {})


def _in_words_of_the_reference(rule: dict) -> dict:
    return {"window" if name == "window_size" else name: value for name, value in rule.items()}


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("size", [1, 3, 8, 100])
@pytest.mark.parametrize("lengths", [(9, 9), (5, 12), (12, 5), (1, 13)])
def test_dense_calls_see_their_own_chunk_with_gradients(lengths, size, rule):
    tensors = make_qkv(2, *lengths, 4, 2, 16, requires_grad=True)
    o, lse = fa3.flash_attn_func(*tensors, attention_chunk=size, return_attn_probs=True, **rule)
    do = torch.randn_like(o)
    grads = torch.autograd.grad(o, tensors, do)
    doubles = [x.detach().double().requires_grad_() for x in tensors]
    rows = zip(*doubles, strict=True)
    found = [_expected(*x, size, **_in_words_of_the_reference(rule)) for x in rows]
    want, want_lse = (torch.stack(parts) for parts in zip(*found, strict=True))
    torch.testing.assert_close(o.double(), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-5)
    for grad, wanted in zip(grads, torch.autograd.grad(want, doubles, do.double()), strict=True):
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 4, 6])
@pytest.mark.parametrize("dtype", [torch.float32, E4M3])
def test_packed_calls_cut_each_sequence(dtype, size):
    lengths_q, lengths_k = [5, 0, 9, 3], [8, 4, 12, 3]
    used_q, used_k = [3, 0, 9, 1], [8, 4, 7, 2]
    edges_q, edges_k = (_int32(0, *x).cumsum(0).int() for x in (lengths_q, lengths_k))
    q, k, v = (torch.randn(n, heads, 64).to(dtype) for n, heads in ((17, 4), (27, 2), (27, 2)))
    scales = [torch.rand(4, 2) + 0.5 for _ in range(3)]
    names = ("q_descale", "k_descale", "v_descale")
    descales = dict(zip(names, scales, strict=True)) if dtype == E4M3 else {}
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, edges_q, edges_k, 9, 12, seqused_q=_int32(*used_q), seqused_k=_int32(*used_k),
        causal=True, attention_chunk=size, return_attn_probs=True, **descales,
    )  # fmt: skip
    tolerance = 0.02 if dtype == E4M3 else 1e-4
    for b, (first_q, first_k) in enumerate(zip(edges_q[:-1], edges_k[:-1], strict=True)):
        rows, keys = slice(first_q, first_q + used_q[b]), slice(first_k, first_k + used_k[b])
        wide = [q[rows].double(), k[keys].double(), v[keys].double()]
        if descales:
            wide = [
                x * s[b].double().repeat_interleave(x.shape[1] // 2)[:, None]
                for x, s in zip(wide, scales, strict=True)
            ]
        want, want_lse = _expected(*wide, size, causal=True)
        torch.testing.assert_close(out[rows].double(), want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[:, rows].double(), want_lse, rtol=1e-3, atol=1e-3)


def _cache(kind: str, lengths: list[int], capacity: int, dtype=torch.float32):
    """Return caches, who chooses of them, and the dense keys and values of each sequence."""
    batch = len(lengths)
    if kind == "rows":
        k, v = (torch.randn(batch + 1, capacity, 2, 16).to(dtype) for _ in range(2))
        order = _int32(*range(batch, 0, -1))
        return k, v, {"cache_batch_idx": order}, [(k[i], v[i]) for i in order.tolist()]
    size = {"pages": 8, "odd_pages": 6}[kind]
    columns = capacity // size
    table = torch.randperm(batch * columns + 2)[: batch * columns].view(batch, columns)
    k, v = (torch.randn(batch * columns + 2, size, 2, 16).to(dtype) for _ in range(2))
    dense = [(k[row].flatten(0, 1), v[row].flatten(0, 1)) for row in table]
    return k, v, {"page_table": table.int()}, dense


@pytest.mark.parametrize("rule", [RULES[0], RULES[1], {}], ids=str)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", ["rows", "pages", "odd_pages"])
@pytest.mark.parametrize(("size", "count"), [(8, 1), (8, 5), (7, 3), (2, 6), (1000, 4)])
def test_caches_are_read_from_the_start_of_a_chunk(size, count, kind, padded, rule):
    lengths, leftpad = [30, 5, 17, 48], [3, 0, 16, 7]
    k_cache, v_cache, where, dense = _cache(kind, lengths, 48)
    q = torch.randn(4, count, 4, 16)
    if padded:
        where = where | {"cache_leftpad": _int32(*leftpad)}
    out, lse, *_ = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=_int32(*lengths), attention_chunk=size,
        return_softmax_lse=True, **where, **rule,
    )  # fmt: skip
    for b, (keys, values) in enumerate(dense):
        seen = slice(leftpad[b] if padded else 0, lengths[b])
        want, want_lse = _expected(
            q[b], keys[seen], values[seen], size, **_in_words_of_the_reference(rule)
        )
        torch.testing.assert_close(out[b].double(), want, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(lse[b].double(), want_lse, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["rows", "pages"])
@pytest.mark.parametrize("dtype", [torch.float32, E4M3])
def test_packed_queries_of_a_cache_are_cut(dtype, kind):
    lengths, counts, size = [30, 5, 17], [6, 0, 3], 8
    k_cache, v_cache, where, dense = _cache(kind, lengths, 48, dtype)
    edges, q = _int32(0, *counts).cumsum(0).int(), torch.randn(9, 4, 16)
    scales = {}
    if dtype == E4M3:
        scales = {name: torch.rand(3, 2) + 0.5 for name in ("k_descale", "v_descale")}
    out = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=_int32(*lengths), cu_seqlens_q=edges, max_seqlen_q=6,
        causal=True, attention_chunk=size, **where, **scales,
    )  # fmt: skip
    tolerance = 1e-4 if dtype == torch.float32 else 0.02
    for b, (start, stop) in enumerate(itertools.pairwise(edges.tolist())):
        keys, values = (
            x[: lengths[b]].double() * (scales[name][b][:, None] if scales else 1.0)
            for x, name in zip(dense[b], ("k_descale", "v_descale"), strict=True)
        )
        want, _ = _expected(q[start:stop], keys, values, size, causal=True)
        torch.testing.assert_close(out[start:stop].double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["pages", "odd_pages"])
def test_pages_may_begin_with_padding(kind, count):
    """New keys go where they would without it; what lies before is not seen."""
    lengths, leftpad = [30, 5, 17], [11, 0, 17]
    k_cache, v_cache, where, _ = _cache(kind, lengths, 48)
    q, k, v = make_qkv(3, count, count, 4, 2, 16)
    size, table = k_cache.shape[1], where["page_table"].long()
    for b in range(3):  # padding and the rest of the capacity hold anything
        for position in (*range(leftpad[b]), *range(lengths[b], 48)):
            k_cache[table[b, position // size], position % size] = torch.nan
    out = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=_int32(*lengths), causal=True,
        cache_leftpad=_int32(*leftpad), **where,
    )  # fmt: skip
    for b in range(3):
        seen = slice(leftpad[b], lengths[b] + count)
        keys, values = (x[table[b]].flatten(0, 1)[seen] for x in (k_cache, v_cache))
        assert torch.equal(keys[-count:], k[b])
        want = standard.attention(*(x[None].double() for x in (q[b], keys, values)), causal=True)
        torch.testing.assert_close(out[b].double(), want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_rotary_tables_are_looked_up_where_they_say(causal):
    k_cache, v_cache = torch.randn(2, 32, 2, 16), torch.randn(2, 32, 2, 16)
    q, k, v = make_qkv(2, 3, 3, 4, 2, 16)
    angles, lengths, turned = torch.randn(32, 8), [7, 20], [2, 9]
    given = {"rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "causal": causal}
    before = k_cache.clone()
    out = fa3.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=_int32(*lengths),
        rotary_seqlens=_int32(*turned), **given,
    )  # fmt: skip
    tables = given["rotary_cos"], given["rotary_sin"]
    for b, (length, first) in enumerate(zip(lengths, turned, strict=True)):
        for i in range(3):
            want = rotated(k[b, i], *tables, first + i, True)
            torch.testing.assert_close(k_cache[b, length + i], want)
            q[b, i] = rotated(q[b, i], *tables, first + (i if causal else 0), True)
        assert torch.equal(k_cache[b, :length], before[b, :length])
        wide = (q[b], k_cache[b, : length + 3], v_cache[b, : length + 3])
        want = standard.attention(*(x[None].double() for x in wide), causal=causal)
        torch.testing.assert_close(out[b].double(), want[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("packed", [False, True])
def test_eight_bits_that_need_a_gradient_refuse_it_in_the_backward_pass(packed):
    q, k, v = (x.to(E4M3).requires_grad_() for x in make_qkv(1, 9, 9, 4, 2, 64))
    if packed:
        edges = _int32(0, 9)
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        out = fa3.flash_attn_varlen_func(*rows, edges, edges, 9, 9, causal=True)[None]
    else:
        out = fa3.flash_attn_func(q, k, v, causal=True)
    plain = (x.detach() for x in (q, k, v))
    assert torch.equal(out, fa3.flash_attn_func(*plain, causal=True))
    with pytest.raises(UnsupportedError, match="where a gradient is asked for.*train in bfloat16"):
        out.sum().backward()


def test_refusals():
    q, cache = torch.zeros(2, 1, 4, 16), torch.zeros(2, 8, 2, 16)
    with pytest.raises(ValueError, match="attention_chunk must be at least 0, got -1"):
        fa3.flash_attn_func(q, q, q, attention_chunk=-1)
    with pytest.raises(ValueError, match="attention_chunk must be at least 0, got -1"):
        fa3.flash_attn_with_kvcache(q, cache, cache, attention_chunk=-1)
    with pytest.raises(ValueError, match="rotary_seqlens must come with rotary_cos"):
        fa3.flash_attn_with_kvcache(q, cache, cache, rotary_seqlens=_int32(0, 0))
    pages = {"page_table": _int32(0, 1).view(2, 1), "cache_leftpad": _int32(0, 9)}
    with pytest.raises(ValueError, match=r"cache_leftpad must lie in \[0, 8\]"):
        fa3.flash_attn_with_kvcache(q, cache, cache, **pages)
    with pytest.raises(UnsupportedError, match="qv must not be given.*tilewise.mla_decode"):
        fa3.flash_attn_func(q, q, q, qv=q)
