"""Latent attention as an op: every backend, both forms, the registered boundary, refusals."""

from __future__ import annotations

import pytest
import torch

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.ops.latent import expanded as expanded_latents
from tilewise.ops.latent.expanded import CHUNK_TOKENS
from tilewise.reference import mla as oracle
from tilewise.testing import assert_within_budget, make_paged_cache

BACKENDS = [
    pytest.param("cpu", "cpu", id="cpu"),
    pytest.param("reference", "cpu", id="reference"),
    pytest.param("triton", "cpu", id="triton-interpreted"),
    pytest.param("triton", "cuda", id="triton", marks=pytest.mark.gpu),
]
HEADS, R, DR, DN, DV = 4, 32, 16, 24, 40
SCALE = (DN + DR) ** -0.5
# name: (query lengths, key lengths, block size)
CASES = {
    "decode": ([1, 1, 1], [1, 33, 70], 16),
    "chunks_beside_decode": ([7, 1, 16], [50, 64, 16], 8),
    "empty_run_and_empty_sequence": ([0, 1, 0, 1], [12, 5, 0, 0], 4),
    "block_of_one": ([1, 3], [7, 9], 1),
    "longer_than_its_keys": ([9, 2], [4, 30], 16),
}


def step(name: str, dtype: torch.dtype = torch.float32, place: str = "cpu"):
    """Return expanded queries, a cache of latents, up-projections, and the metadata."""
    runs, lengths, block_size = CASES[name]
    cache, _, table, seqlens_k = make_paged_cache(
        lengths, block_size, 1, R + DR, dtype=dtype, device=place
    )
    shapes = ((sum(runs), HEADS, DN + DR), (HEADS, DN, R), (HEADS, DV, R))
    q, w_uk, w_uv = (torch.randn(shape).to(place, dtype) for shape in shapes)
    cu = torch.tensor([0, *runs]).cumsum(0).int().to(place)
    metadata = {"block_table": table, "seqlens_k": seqlens_k, "cu_seqlens_q": cu}
    return q, cache.squeeze(2), w_uk, w_uv, metadata, max(runs)


def absorb(q: torch.Tensor, w_uk: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.einsum("thd,hdr->thr", q[..., :DN], w_uk), q[..., DN:]


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_decode_keeps_the_budget(name, backend, place):
    q, cache, w_uk, _, metadata, longest = step(name, place=place)
    queries = [x / R**0.5 for x in absorb(q, w_uk)]
    options = metadata | {"softmax_scale": SCALE, "return_lse": True}
    truth = oracle.mla_decode(*(t.double() for t in (*queries, cache)), **options)
    eager = oracle.mla_decode(*queries, cache, **options)
    got = ops.mla_decode(*queries, cache, **options, max_seqlen_q=longest, backend=backend)
    for index, part in enumerate(("o", "lse")):
        assert_within_budget(got[index], truth[index], eager[index], name=part, scale=8.0)


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
@pytest.mark.parametrize("runs", [[1, 1, 1], [1, 9, 2]], ids=str)
def test_paged_attention_takes_latents_for_one_wide_key_head(runs, backend, place):
    """Its values are the first 512 of the 576 channels of its keys, in the same memory."""
    rank, rope_dim = 512, 64
    cache, _, table, seqlens_k = make_paged_cache([1, 170, 70], 16, 1, rank + rope_dim)
    cache = cache.to(place)
    q = torch.randn(sum(runs), HEADS, rank + rope_dim).to(place)
    cu = torch.tensor([0, *runs]).cumsum(0).int()
    metadata = {"block_table": table, "seqlens_k": seqlens_k, "cu_seqlens_q": cu}
    options = {name: x.to(place) for name, x in metadata.items()}
    options |= {"softmax_scale": 192**-0.5, "return_lse": True}
    queries, latents = (q[..., :rank], q[..., rank:]), cache.squeeze(2)
    truth = oracle.mla_decode(*(t.double() for t in (*queries, latents)), **options)
    eager = oracle.mla_decode(*queries, latents, **options)
    options |= {"max_seqlen_q": max(runs), "backend": backend}
    for got in (
        ops.mla_decode(*queries, latents, **options),
        ops.paged_attention(q, cache, cache[..., :rank], **options),
    ):
        # Norms of q and of a key are some 24, so that logits are up to 42.
        for index, part in enumerate(("o", "lse")):
            assert_within_budget(got[index], truth[index], eager[index], name=part, scale=42.0)


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
def test_metadata_may_have_any_strides(backend, place):
    q, cache, w_uk, _, metadata, longest = step("chunks_beside_decode", place=place)
    options = {"max_seqlen_q": longest, "softmax_scale": SCALE, "backend": backend}
    want = ops.mla_decode(*absorb(q, w_uk), cache, **metadata, **options)
    spread = {name: torch.stack([x, x - 1], dim=-1)[..., 0] for name, x in metadata.items()}
    assert torch.equal(want, ops.mla_decode(*absorb(q, w_uk), cache, **spread, **options))


@pytest.mark.parametrize("chunk_tokens", [CHUNK_TOKENS, 40, 1])
@pytest.mark.parametrize("name", CASES)
def test_prefill_in_chunks_equals_decode(name, chunk_tokens):
    """The two forms in float64, where nothing but the order of products can differ."""
    q, cache, w_uk, w_uv, metadata, longest = step(name, torch.float64)
    options = metadata | {"softmax_scale": SCALE, "return_lse": True, "max_seqlen_q": longest}
    o, lse = ops.mla_decode(*absorb(q, w_uk), cache, **options, backend="reference")
    got, got_lse = ops.mla_prefill(
        q, cache, w_uk, w_uv, **options, chunk_tokens=chunk_tokens, backend="cpu"
    )
    torch.testing.assert_close(got, torch.einsum("thr,hdr->thd", o, w_uv))
    torch.testing.assert_close(got_lse, lse)


def test_prefill_keeps_the_budget_through_many_merges():
    q, cache, w_uk, w_uv, metadata, longest = step("chunks_beside_decode", torch.bfloat16)
    w_uk, w_uv = w_uk / R**0.5, w_uv / R**0.5

    def absorbed(dtype):
        queries = absorb(q.to(dtype), w_uk.to(dtype))
        o = oracle.mla_decode(*queries, cache.to(dtype), **metadata, softmax_scale=SCALE)
        return torch.einsum("thr,hdr->thd", o, w_uv.to(dtype))

    got = ops.mla_prefill(q, cache, w_uk, w_uv, **metadata, max_seqlen_q=longest, chunk_tokens=9)
    assert got.dtype == torch.bfloat16
    assert_within_budget(got, absorbed(torch.float64), absorbed(torch.bfloat16))


def test_prefill_never_expands_more_than_a_chunk(monkeypatch):
    q, cache, w_uk, w_uv, metadata, longest = step("chunks_beside_decode")
    expanded = []
    original = expanded_latents._expand

    def spy(latent, *rest):
        expanded.append(latent.shape[0])
        return original(latent, *rest)

    monkeypatch.setattr(expanded_latents, "_expand", spy)
    ops.mla_prefill(q, cache, w_uk, w_uv, **metadata, max_seqlen_q=longest, chunk_tokens=30)
    assert expanded == [24, *[30] * 7]  # the new tokens, then ten of each sequence up to 63
    expanded.clear()
    bounded = metadata | {"max_seqlen_q": longest, "max_seqlen_k": 64}
    ops.mla_prefill(q, cache, w_uk, w_uv, **bounded, chunk_tokens=3000)
    assert expanded == [24, 3000]


@pytest.mark.parametrize("packed", [False, True])
def test_expanded_attention_and_its_gradients_are_within_the_budget(packed):
    shapes = {
        "q": (14, HEADS, DN + DR), "latent": (14, R), "k_rope": (14, DR),
        "w_uk": (HEADS, DN, R), "w_uv": (HEADS, DV, R),
    }  # fmt: skip
    cu = torch.tensor([0, 5, 14], dtype=torch.int32)
    options = {"causal": True}
    if packed:
        options |= {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 9, "max_seqlen_k": 9}
    else:
        shapes = {name: s if name[0] == "w" else (2, 7, *s[1:]) for name, s in shapes.items()}
    leaves = [torch.randn(shape).div(2).requires_grad_() for shape in shapes.values()]

    def by_hand(q, latent, k_rope, w_uk, w_uv):
        spans = ((0, 5), (5, 14)) if packed else ((0, 1), (1, 2))
        outs = []
        for a, b in spans:
            # One sequence at a time, (1, S, ...)
            part = [x[a:b].unsqueeze(0) if packed else x[a:b] for x in (q, latent, k_rope)]
            s = torch.einsum("bihd,hdr,bjr->bhij", part[0][..., :DN], w_uk, part[1])
            s = s + torch.einsum("bihd,bjd->bhij", part[0][..., DN:], part[2])
            hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1)
            p = (s * SCALE).masked_fill(hidden, float("-inf")).softmax(-1)
            o = torch.einsum("bhij,bjr,hdr->bihd", p, part[1], w_uv)
            outs.append(o.squeeze(0) if packed else o)
        return torch.cat(outs)

    def run(function, tensors):
        o = function(*tensors)
        generator = torch.Generator().manual_seed(1)
        do = torch.randn(o.shape, generator=generator).to(o.dtype)
        return [o, *torch.autograd.grad(o, tensors, do)]

    actual = run(lambda *t: ops.mla_attention(*t, **options), leaves)
    eager = run(by_hand, leaves)
    truth = run(by_hand, [x.detach().double().requires_grad_() for x in leaves])
    for name, *results in zip(["o", *shapes], actual, truth, eager, strict=True):
        assert_within_budget(*results, name=name, factor=3.0)


@pytest.mark.parametrize(("backend", "place"), BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_latents_and_rotated_keys_land_side_by_side(dtype, backend, place):
    cache = torch.randn(6, 4, R + DR, device=place).to(dtype)
    want = cache.clone()
    rows = torch.randn(5, 3, R + DR, device=place)[:, 1]
    slots = torch.tensor([3, -1, 20, 0, 23], device=place)
    ops.write_latent_cache(rows[:, :R], rows[:, R:], cache, slots, backend=backend)
    want.view(24, -1)[slots[slots >= 0]] = rows[slots >= 0].to(dtype)
    assert torch.equal(cache, want)


@pytest.mark.parametrize("num_seqs", [0, 2])
@pytest.mark.parametrize("backend", ["cpu", "triton", "reference"])
def test_a_step_without_rows_is_empty(backend, num_seqs):
    none = torch.zeros(num_seqs, dtype=torch.int32)
    nothing = {"block_table": none[:, None].expand(-1, 3), "seqlens_k": none, "max_seqlen_q": 0}
    nothing |= {"cu_seqlens_q": torch.zeros(num_seqs + 1).int(), "softmax_scale": SCALE}
    cache = torch.randn(4, 16, R + DR)
    q = torch.randn(0, HEADS, DN + DR)
    w_uk, w_uv = torch.randn(HEADS, DN, R), torch.randn(HEADS, DV, R)
    o, lse = ops.mla_decode(
        *absorb(q, w_uk), cache, **nothing, return_lse=True, backend=backend
    )  # fmt: skip
    assert (o.shape, lse.shape) == ((0, HEADS, R), (HEADS, 0))
    assert ops.mla_prefill(q, cache, w_uk, w_uv, **nothing).shape == (0, HEADS, DV)


def test_the_ops_are_opcheck_clean():
    q, cache, w_uk, _, metadata, longest = step("decode")
    arguments = (*absorb(q, w_uk), cache, *metadata.values(), None, longest, SCALE, False, None)
    torch.library.opcheck(torch.ops.tilewise.mla_decode.default, arguments)
    rows = torch.randn(3, R + DR)
    slots = torch.tensor([3, -1, 8])
    torch.library.opcheck(
        torch.ops.tilewise.write_latent_cache.default,
        (rows[:, :R], rows[:, R:], torch.zeros(5, 4, R + DR), None, slots, None),
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_step_compiles_into_one_graph():
    q, cache, w_uk, w_uv, metadata, longest = step("chunks_beside_decode")
    slots = torch.tensor([70, 71])

    def both(q, cache, new):
        ops.write_latent_cache(new[:, :R], new[:, R:], cache, slots)
        options = metadata | {"max_seqlen_q": longest, "softmax_scale": SCALE}
        o = ops.mla_decode(*absorb(q, w_uk), cache, **options)
        o = torch.einsum("thr,hdr->thd", o, w_uv)
        return o, ops.mla_prefill(q, cache, w_uk, w_uv, **options, chunk_tokens=30)

    new, other = torch.randn(2, R + DR), cache.clone()
    want = both(q, cache, new)
    got = torch.compile(both, fullgraph=True, backend="aot_eager")(q, other, new)
    torch.testing.assert_close(got, want)
    assert torch.equal(other.nan_to_num(), cache.nan_to_num())


def test_explain_counts_a_latent_once_for_all_heads():
    q, cache, w_uk, _, metadata, longest = step("decode")
    told = ops.explain(
        "mla_decode", *absorb(q, w_uk), cache, **metadata, max_seqlen_q=longest, softmax_scale=1.0
    )
    assert told.backend == "cpu"
    assert told.cost.bytes_read == (104 + 3 * HEADS) * (R + DR) * 4
    assert told.cost.flops == 2 * 104 * HEADS * (2 * R + DR)
    text = str(
        ops.explain("mla_decode", *absorb(q, w_uk), cache, **metadata, max_seqlen_q=longest,
                    softmax_scale=1.0, backend="triton")
    )  # fmt: skip
    assert "tiles split" in text


def decode(**changes):
    arguments = {
        "q_latent": torch.randn(3, 4, 32),
        "q_rope": torch.randn(3, 4, 16),
        "latent_cache": torch.randn(5, 8, 48),
        "block_table": torch.zeros(2, 3, dtype=torch.int32),
        "seqlens_k": torch.tensor([5, 9], dtype=torch.int32),
        "cu_seqlens_q": torch.tensor([0, 1, 3], dtype=torch.int32),
        "max_seqlen_q": 2,
        "softmax_scale": 0.1,
    }
    arguments.update(changes)
    return ops.mla_decode(
        arguments.pop("q_latent"), arguments.pop("q_rope"), arguments.pop("latent_cache"),
        **arguments,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"q_latent": torch.randn(3, 32)}, ValueError, r"q_latent must be \(T, Hq, R\), got shape"),
        ({"q_latent": torch.ones(3, 4, 32).int()}, TypeError, "q_latent must be one of"),
        ({"q_rope": torch.randn(3, 5, 16)}, ValueError, r"q_rope must have shape \(3, 4, 16\)"),
        ({"q_rope": torch.randn(3, 4, 16).half()}, TypeError, "q_rope must have dtype float32"),
        ({"latent_cache": torch.randn(5, 8, 1, 48)}, ValueError, "latent_cache must be"),
        ({"latent_cache": torch.randn(5, 8, 40)}, ValueError, "must have 48 channels, .* got 40"),
        ({"latent_cache": torch.randn(5, 48, 8).mT}, ValueError, "latent_cache must have stride 1"),
        ({"block_table": torch.zeros(2, 3)}, TypeError, "block_table must have dtype int32"),
        ({"seqlens_k": torch.zeros(3).int()}, ValueError, r"seqlens_k must have shape \(2,\)"),
        ({"cu_seqlens_q": torch.zeros(2).int()}, ValueError, r"shape \(3,\), got \(2,\)"),
        ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q must be at least 0, got -1"),
        ({"backend": "numba"}, ValueError, "backend must be one of"),
        (
            {"backend": "triton", "q_latent": torch.randn(3, 4, 600),
             "latent_cache": torch.randn(5, 8, 616)},
            UnsupportedError,
            "cannot run mla_decode: R must be 1 to 512, got 600",
        ),
    ],
)  # fmt: skip
def test_decode_refuses(changes, error, words):
    with pytest.raises(error, match=words):
        decode(**changes)


def test_the_others_refuse():
    q, cache, w_uk, w_uv, metadata, longest = step("decode")
    options = metadata | {"max_seqlen_q": longest}
    with pytest.raises(ValueError, match="chunk_tokens must be at least 1, got 0"):
        ops.mla_prefill(q, cache, w_uk, w_uv, **options, chunk_tokens=0)
    with pytest.raises(ValueError, match="w_uk must have at most q's 40 channels a head, got 48"):
        ops.mla_prefill(q, cache, torch.randn(HEADS, 48, R), w_uv, **options)
    with pytest.raises(ValueError, match=r"w_uv must have shape \(4, 40, 32\), got \(3, 40, 32\)"):
        ops.mla_prefill(q, cache, w_uk, w_uv[:3], **options)
    latent, k_rope = torch.randn(2, 7, R), torch.randn(2, 7, DR)
    dense = torch.randn(2, 7, HEADS, DN + DR)
    with pytest.raises(ValueError, match=r"q must be \(B, Sq, Hq, Dn \+ Dr\) or"):
        ops.mla_attention(dense[0, 0], latent, k_rope, w_uk, w_uv)
    with pytest.raises(ValueError, match=r"k_rope must have shape \(2, 7, 16\), got \(2, 6, 16\)"):
        ops.mla_attention(dense, latent, k_rope[:, :6], w_uk, w_uv)
    with pytest.raises(ValueError, match=r"w_uk must have shape \(4, 24, 32\), got \(4, 20, 32\)"):
        ops.mla_attention(dense, latent, k_rope, w_uk[:, :20], w_uv)
    with pytest.raises(TypeError, match="latent must have dtype float32, got float16"):
        ops.mla_attention(dense, latent.half(), k_rope, w_uk, w_uv)
    with pytest.raises(ValueError, match="latent_cache must have 40 channels, .* got 48"):
        ops.write_latent_cache(latent[0], k_rope[0, :, :8], cache, torch.arange(7))
    with pytest.raises(ValueError, match=r"k_rope must have shape \(7, 16\), got \(6, 16\)"):
        ops.write_latent_cache(latent[0], k_rope[0, :6], cache, torch.arange(7))
    with pytest.raises(TypeError, match="slot_mapping must have dtype int32 or int64, got int16"):
        ops.write_latent_cache(latent[0], k_rope[0], cache, torch.arange(7).short())


class TestWhatAPrefillNames:
    """mla_prefill gathers by torch's indexing, which takes -1 for the last block."""

    def given(self, **changes):
        def int32(*values):
            return torch.tensor(values, dtype=torch.int32)

        return {
            "q": torch.randn(2, 2, 12),
            "latent_cache": torch.randn(3, 4, 12),
            "w_uk": torch.randn(2, 8, 8),
            "w_uv": torch.randn(2, 5, 8),
            "block_table": int32(0, 1).unsqueeze(0),
            "seqlens_k": int32(7),
            "cu_seqlens_q": int32(0, 2),
            "max_seqlen_q": 2,
        } | {
            name: int32(*value) if isinstance(value, tuple) else value
            for name, value in changes.items()
        }

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"seqlens_k": (9,)}, r"seqlens_k must lie in \[0, 8\], got \[9\]"),
            ({"seqlens_k": (-3,)}, r"seqlens_k must lie in \[0, 8\], got \[-3\]"),
            ({"cu_seqlens_q": (0, 3)}, "cu_seqlens_q must rise from 0 to at most 2"),
            ({"max_seqlen_k": 6}, "max_seqlen_k must be at least 7"),
            ({"block_table": torch.tensor([[0, -1]]).int()}, r"got -1 as block 1 of sequence 0"),
            ({"block_table": torch.tensor([[0, 3]]).int()}, r"got 3 as block 1 of sequence 0"),
        ],
    )
    def test_is_refused_outside_of_the_cache(self, changes, words):
        with pytest.raises(ValueError, match=words):
            ops.mla_prefill(**self.given(**changes))

    @pytest.mark.parametrize("scaled", [False, True])
    def test_may_be_no_key_at_all(self, scaled):
        changes = {"block_table": torch.zeros(1, 0, dtype=torch.int32), "seqlens_k": (0,)}
        if scaled:
            changes["latent_cache"] = torch.zeros(3, 4, 12, dtype=torch.int8)
            changes["latent_scale"] = torch.ones(3, 4, 2)
        o, lse = ops.mla_prefill(**self.given(**changes), return_lse=True)
        assert torch.equal(o, torch.zeros(2, 2, 5))
        assert bool(lse.isneginf().all())

    def test_of_a_sequence_without_new_rows_is_not_read(self):
        stray = torch.tensor([[0, 1], [-1, 99]]).int()
        two = {"block_table": stray, "seqlens_k": (7, 99), "cu_seqlens_q": (0, 2, 2)}
        given = self.given()
        assert torch.equal(
            ops.mla_prefill(**given | {n: x for n, x in self.given(**two).items() if n in two}),
            ops.mla_prefill(**given),
        )
