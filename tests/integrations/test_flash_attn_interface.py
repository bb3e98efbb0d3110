"""FlashAttention-3's flash_attn_interface: against flash-attn 2's functions and the reference."""

from __future__ import annotations

import inspect

import pytest
import torch

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.integrations import flash_attn
from tilewise.integrations import flash_attn_interface as fa3
from tilewise.reference import standard
from tilewise.testing import make_paged_cache, make_qkv

E4M3 = torch.float8_e4m3fn
NAMES = {
    "flash_attn_func": "q k v softmax_scale causal qv q_descale k_descale v_descale window_size "
    "attention_chunk softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_qkvpacked_func": "qkv softmax_scale causal q_descale k_descale v_descale "
    "window_size attention_chunk softcap deterministic num_heads_q sm_margin return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q "
    "seqused_k softmax_scale causal qv q_descale k_descale v_descale window_size attention_chunk "
    "softcap num_splits pack_gqa deterministic sm_margin return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens "
    "cache_batch_idx cache_leftpad page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q "
    "rotary_seqlens q_descale k_descale v_descale softmax_scale causal window_size attention_chunk "
    "softcap rotary_interleaved scheduler_metadata num_splits pack_gqa sm_margin "
    "return_softmax_lse",
    "flash_attn_combine": "out_partial lse_partial out out_dtype",
}


@pytest.mark.parametrize("name", NAMES)
def test_arguments_have_the_names_and_the_order_of_the_real_module(name):
    assert list(inspect.signature(getattr(fa3, name)).parameters) == NAMES[name].split()


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class TestDense:
    def test_equals_flash_attention_2_with_gradients(self):
        tensors = make_qkv(2, 9, 12, 4, 2, 16, requires_grad=True)
        options = {"causal": True, "window_size": (5, -1), "softcap": 3.0, "softmax_scale": 0.3}
        want, want_lse, _ = flash_attn.flash_attn_func(*tensors, **options, return_attn_probs=True)
        got, lse = fa3.flash_attn_func(*tensors, **options, return_attn_probs=True)
        assert torch.equal(got, want)
        assert torch.equal(lse, want_lse)
        do = torch.randn_like(got)
        for mine, theirs in zip(
            torch.autograd.grad(got, tensors, do),
            torch.autograd.grad(want, tensors, do),
            strict=True,
        ):
            assert torch.equal(mine, theirs)

    def test_packed_projections(self):
        qkv = torch.randn(2, 7, 8, 16)
        got = fa3.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4)
        parts = qkv.split([4, 2, 2], 2)
        assert torch.equal(got, fa3.flash_attn_func(*parts, causal=True))
        qkv = torch.randn(2, 7, 3, 4, 16)
        assert torch.equal(fa3.flash_attn_qkvpacked_func(qkv), fa3.flash_attn_func(*qkv.unbind(2)))

    def test_descales_multiply_eight_bit_numbers(self):
        q, k, v = (x.to(E4M3) for x in make_qkv(2, 9, 12, 4, 2, 64))
        scales = [torch.rand(2, 2) + 0.5 for _ in range(3)]
        got, lse = fa3.flash_attn_func(q, k, v, None, True, None, *scales, return_attn_probs=True)
        q, k, v = (
            x.double() * s.repeat_interleave(x.shape[2] // 2, 1)[:, None, :, None].double()
            for x, s in zip((q, k, v), scales, strict=True)
        )
        want, want_lse = standard.attention(q, k, v, causal=True, return_lse=True)
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got.double(), want, rtol=0.01, atol=0.01)
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("is_cut", [False, True], ids=["whole", "used"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_descales_multiply_packed_eight_bit_numbers(softcap, is_cut):
    lengths_q, lengths_k = [5, 0, 9, 3], [8, 4, 12, 3]
    used_q, used_k = ([3, 0, 9, 1], [8, 4, 7, 2]) if is_cut else (lengths_q, lengths_k)
    edges_q, edges_k = (_int32(0, *x).cumsum(0).int() for x in (lengths_q, lengths_k))
    q, k, v = (torch.randn(n, heads, 64).to(E4M3) for n, heads in ((17, 4), (27, 2), (27, 2)))
    scales = [torch.rand(4, 2) + 0.5 for _ in range(3)]
    given = {"causal": True, "softcap": softcap, "softmax_scale": 0.2}
    if is_cut:
        given |= {"seqused_q": _int32(*used_q), "seqused_k": _int32(*used_k)}
    names = ("q_descale", "k_descale", "v_descale")
    out, lse = fa3.flash_attn_varlen_func(
        q, k, v, edges_q, edges_k, 9, 12, **given, **dict(zip(names, scales, strict=True)),
        return_attn_probs=True,
    )  # fmt: skip
    assert out.dtype == torch.bfloat16
    for b, (first_q, first_k) in enumerate(zip(edges_q[:-1], edges_k[:-1], strict=True)):
        rows = slice(first_q, first_q + used_q[b])
        keys = slice(first_k, first_k + used_k[b])
        wide = (
            x[at].double() * s[b].double().repeat_interleave(x.shape[1] // 2)[:, None]
            for x, at, s in zip((q, k, v), (rows, keys, keys), scales, strict=True)
        )
        want, want_lse = standard.attention(
            *(x[None] for x in wide), causal=True, softcap=softcap, softmax_scale=0.2,
            return_lse=True,
        )  # fmt: skip
        torch.testing.assert_close(out[rows].double(), want[0], rtol=0.01, atol=0.01)
        torch.testing.assert_close(lse[:, rows].double(), want_lse[0], rtol=1e-4, atol=1e-4)
        assert not out[rows.stop : first_q + lengths_q[b]].any()
        assert lse[:, rows.stop : first_q + lengths_q[b]].isneginf().all()


@pytest.mark.parametrize("used", ["queries", "keys", "both"])
def test_rows_past_the_used_ones_belong_to_nobody(used):
    lengths_q, lengths_k = [5, 3, 0, 7], [6, 9, 2, 7]
    used_q = [2, 3, 0, 1] if used != "keys" else lengths_q
    used_k = [6, 1, 0, 5] if used != "queries" else lengths_k
    q, k, v = torch.randn(15, 4, 16), torch.randn(24, 2, 16), torch.randn(24, 2, 16)
    starts_q, starts_k = (
        torch.tensor([0, *lengths]).cumsum(0).int() for lengths in (lengths_q, lengths_k)
    )
    for tensor, starts, lengths, kept in (
        (q, starts_q, lengths_q, used_q),
        (k, starts_k, lengths_k, used_k),
        (v, starts_k, lengths_k, used_k),
    ):
        for start, length, count in zip(starts.tolist(), lengths, kept, strict=False):
            tensor[start + count : start + length] = torch.nan
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    given = {}
    if used != "keys":
        given["seqused_q"] = _int32(*used_q)
    if used != "queries":
        given["seqused_k"] = _int32(*used_k)
    out, lse = fa3.flash_attn_varlen_func(
        *leaves, starts_q, starts_k, 7, 9, causal=True, return_attn_probs=True, **given
    )
    do = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, do)
    want = torch.zeros_like(out)
    want_lse = torch.full_like(lse, float("-inf"))
    want_grads = [torch.zeros_like(x) for x in leaves]
    for b in range(4):
        rows = slice(int(starts_q[b]), int(starts_q[b]) + used_q[b])
        keys = slice(int(starts_k[b]), int(starts_k[b]) + used_k[b])
        parts = [
            x[None, at].clone().requires_grad_() for x, at in ((q, rows), (k, keys), (v, keys))
        ]
        alone, alone_lse = ops.attention(*parts, causal=True, return_lse=True)
        want[rows], want_lse[:, rows] = alone[0].detach(), alone_lse[0].detach()
        found = torch.autograd.grad(alone, parts, do[None, rows])
        for total, grad, at in zip(want_grads, found, (rows, keys, keys), strict=True):
            total[at] = grad[0]
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)
    for grad, wanted in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, wanted)


class TestCache:
    def test_appends_and_rotates_as_flash_attention_2(self):
        caches = [torch.randn(3, 32, 2, 16) for _ in range(2)]
        q, k, v = make_qkv(2, 3, 3, 4, 2, 16)
        angles = torch.randn(32, 8)
        arguments = {"q": q, "k": k, "v": v, "rotary_cos": angles.cos(), "causal": True}
        arguments |= {"rotary_sin": angles.sin(), "cache_seqlens": _int32(7, 20)}
        arguments |= {"cache_batch_idx": _int32(2, 0)}
        theirs = [x.clone() for x in caches]
        want = flash_attn.flash_attn_with_kvcache(k_cache=theirs[0], v_cache=theirs[1], **arguments)
        got = fa3.flash_attn_with_kvcache(k_cache=caches[0], v_cache=caches[1], **arguments)
        assert torch.equal(got, want)
        assert torch.equal(caches[0], theirs[0])
        assert torch.equal(caches[1], theirs[1])

    def test_a_batch_index_chooses_rows_of_the_page_table(self):
        k, v, table, lengths = make_paged_cache([30, 5, 17], 8, 2, 16)
        q, rows = torch.randn(2, 1, 4, 16), _int32(2, 0)
        chosen = {"cache_seqlens": lengths[rows], "causal": True}
        got = fa3.flash_attn_with_kvcache(q, k, v, page_table=table, cache_batch_idx=rows, **chosen)
        want = fa3.flash_attn_with_kvcache(q, k, v, page_table=table[rows], **chosen)
        assert torch.equal(got, want)
        assert bool(got.isfinite().all())

    @pytest.mark.parametrize("paged", [True, False])
    def test_packed_queries(self, paged):
        counts, longest = [3, 0, 1], 3
        edges = torch.tensor([0, *counts]).cumsum(0).int()
        q = torch.randn(4, 4, 16)
        if paged:
            k, v, table, lengths = make_paged_cache([30, 5, 17], 8, 2, 16)
            where = {"page_table": table}
            dense = [cache[table.clamp(min=0).long()].flatten(1, 2) for cache in (k, v)]
        else:
            k, v, lengths, where = torch.randn(3, 40, 2, 16), torch.randn(3, 40, 2, 16), None, {}
            lengths, dense = _int32(30, 5, 17), [k, v]
        out, lse, *_ = fa3.flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=lengths,
            cu_seqlens_q=edges,
            max_seqlen_q=longest,
            causal=True,
            return_softmax_lse=True,
            **where,
        )
        for b, length in enumerate(lengths.tolist()):
            rows = slice(int(edges[b]), int(edges[b + 1]))
            want, want_lse = ops.attention(
                q[None, rows], *(x[b : b + 1, :length] for x in dense), causal=True, return_lse=True
            )
            torch.testing.assert_close(out[rows], want[0])
            torch.testing.assert_close(lse[:, rows], want_lse[0])

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, E4M3])
    def test_descales_of_an_eight_bit_cache(self, dtype):
        k, v, table, lengths = make_paged_cache([30, 5, 17], 8, 2, 16)
        k, v = k.nan_to_num().to(E4M3), v.nan_to_num().to(E4M3)
        q = torch.randn(3, 2, 4, 16).to(dtype)
        q_scale, k_scale, v_scale = (torch.rand(3, 2) + 0.5 for _ in range(3))
        scales = {"k_descale": k_scale, "v_descale": v_scale}
        if dtype == E4M3:
            scales["q_descale"] = q_scale
        out, lse, *_ = fa3.flash_attn_with_kvcache(
            q,
            k,
            v,
            cache_seqlens=lengths,
            page_table=table,
            causal=True,
            return_softmax_lse=True,
            **scales,
        )
        assert out.dtype == (torch.bfloat16 if dtype == E4M3 else dtype)
        keys, values = (x[table.clamp(min=0).long()].flatten(1, 2).double() for x in (k, v))
        wide = q.double()
        if dtype == E4M3:
            wide = wide * q_scale.repeat_interleave(2, 1)[:, None, :, None]
        want, want_lse = standard.attention(
            wide,
            keys * k_scale[:, None, :, None],
            values * v_scale[:, None, :, None],
            causal=True,
            seqlens_k=lengths,
            return_lse=True,
        )
        tolerance = 1e-4 if dtype == torch.float32 else 0.02
        torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse.double(), want_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("splits", [1, 2, 5])
def test_combine_weighs_parts_by_their_sums_of_exponentials(splits, packed):
    shape = (splits, 7, 3, 8) if packed else (splits, 2, 7, 3, 8)
    parts, lses = torch.randn(shape), torch.randn(shape[:-1])
    lses[splits // 2 :, ..., :2, :] = float("-inf")
    lses[..., 0, 0] = float("-inf")  # no part saw anything
    out, lse = fa3.flash_attn_combine(parts, lses)
    want_lse = lses.double().logsumexp(0)
    weights = torch.where(lses.isneginf(), 0, (lses - want_lse.nan_to_num(neginf=0)).exp())
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-6, atol=1e-6)
    want = (weights.unsqueeze(-1) * parts).sum(0)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-6)
    into = torch.empty(out.shape, dtype=torch.bfloat16)
    result, _ = fa3.flash_attn_combine(parts, lses, into)
    assert result is into
    assert torch.equal(into, out.bfloat16())
    assert torch.equal(fa3.flash_attn_combine(parts, lses, out_dtype=torch.half)[0], out.half())


Q, CACHE = torch.zeros(2, 3, 4, 16), torch.zeros(2, 8, 2, 16)
EDGES = torch.tensor([0, 3, 6], dtype=torch.int32)
REFUSALS = {
    "qv": (lambda: fa3.flash_attn_func(Q, Q, Q, qv=Q), UnsupportedError, "qv must not be given"),
    "descale_of_16_bits": (
        lambda: fa3.flash_attn_func(Q, Q, Q, k_descale=torch.ones(2, 4)),
        ValueError,
        "k_descale must be None without 8-bit tensors",
    ),
    "shape_of_a_descale": (
        lambda: fa3.flash_attn_func(*[Q.to(E4M3)] * 3, k_descale=torch.ones(4)),
        ValueError,
        "k_descale must have shape",
    ),
    "new_packed_keys": (
        lambda: fa3.flash_attn_with_kvcache(Q, CACHE, CACHE, cu_seqlens_k_new=EDGES),
        UnsupportedError,
        "cu_seqlens_k_new must not be given.*rope_write_kv_cache",
    ),
    "packed_queries_see_all": (
        lambda: fa3.flash_attn_with_kvcache(
            Q.flatten(0, 1), CACHE, CACHE, cu_seqlens_q=EDGES, max_seqlen_q=3
        ),
        UnsupportedError,
        "causal must be set",
    ),
    "no_longest": (
        lambda: fa3.flash_attn_with_kvcache(Q.flatten(0, 1), CACHE, CACHE, cu_seqlens_q=EDGES),
        ValueError,
        "max_seqlen_q must be given",
    ),
    "new_keys_for_packed_queries": (
        lambda: fa3.flash_attn_with_kvcache(
            Q.flatten(0, 1), CACHE, CACHE, CACHE, CACHE, cu_seqlens_q=EDGES, max_seqlen_q=3
        ),
        UnsupportedError,
        "k, v, rotary_cos and rotary_sin must be None",
    ),
    "used_of_another_batch": (
        lambda: fa3.flash_attn_varlen_func(
            Q[0], Q[0], Q[0], EDGES[:2], EDGES[:2], 3, 3, seqused_k=EDGES
        ),
        ValueError,
        "seqused_k must have shape",
    ),
    "combine_shapes": (
        lambda: fa3.flash_attn_combine(torch.zeros(2, 3, 4, 16), torch.zeros(2, 4, 3)),
        ValueError,
        "lse_partial must have shape",
    ),
    "heads_of_a_projection": (
        lambda: fa3.flash_attn_qkvpacked_func(Q, num_heads_q=3),
        ValueError,
        "num_heads_q must leave an even number of 4 heads, got 3",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    call, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        call()


class TestWhatLiesOutside:
    """What a CPU can see at once is refused by the name that the caller gave it."""

    @pytest.mark.parametrize("name", ["seqused_q", "seqused_k"])
    @pytest.mark.parametrize("used", [(4, 1), (-1, 1)])
    def test_more_rows_than_a_sequence_has(self, name, used):
        q, edges = torch.randn(5, 2, 8), _int32(0, 2, 5)
        with pytest.raises(ValueError, match=f"{name} must lie in"):
            fa3.flash_attn_varlen_func(q, q, q, edges, edges, 3, 3, **{name: _int32(*used)})

    @pytest.mark.parametrize("stray", [-1, 3])
    def test_rows_of_the_page_table(self, stray):
        pages, table = torch.randn(4, 4, 2, 8), torch.arange(3, dtype=torch.int32).view(3, 1)
        rows = {"page_table": table, "cache_batch_idx": _int32(0, stray)}
        with pytest.raises(ValueError, match=r"cache_batch_idx must lie in \[0, 2\]"):
            fa3.flash_attn_with_kvcache(torch.randn(2, 1, 2, 8), pages, pages, **rows)

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"cache_seqlens": 17}, r"cache_seqlens must lie in \[0, 16\]"),
            ({"cache_seqlens": -1}, r"cache_seqlens must lie in \[0, 16\]"),
            ({"cache_batch_idx": _int32(0, 2)}, r"cache_batch_idx must lie in \[0, 1\]"),
            ({"q": torch.randn(3, 1, 2, 8)}, "k_cache must have a row for each of 3 sequences"),
            ({"q": torch.randn(2, 1, 3, 8)}, "query heads must be a multiple of key heads"),
            ({"q": torch.randn(2, 1, 2, 16)}, "k_cache must have the head dim of q, 16"),
            ({"k_cache": torch.zeros(16, 2, 8).to(E4M3)}, r"k_cache must be \(Bc, S, Hk, D\)"),
        ],
    )
    def test_a_cache_of_8_bits(self, changes, words):
        cache = torch.zeros(2, 16, 2, 8).to(E4M3)
        given = {"q": torch.randn(2, 1, 2, 8), "k_cache": cache, "v_cache": cache} | changes
        with pytest.raises(ValueError, match=words):
            fa3.flash_attn_with_kvcache(**given, causal=True)
