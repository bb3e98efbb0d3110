"""The latent attention module against float64 written by hand: dense, absorbed, expanded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tilewise.cache.spec import LatentLayer
from tilewise.nn import (
    AttentionContext,
    MultiheadLatentAttention,
    RMSNorm,
    RopeConfig,
    RotaryEmbedding,
)
from tilewise.testing import assert_within_budget

E = 40
SIZES = {"num_heads": 3, "kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "v_head_dim": 12}
CASES = {
    "compressed_queries": {"q_rank": 24},
    "direct_queries": {"q_rank": None},
    "halves_rotate": {"q_rank": 24, "rope_interleaved": False},
    "biases_and_a_scale": {"q_rank": 24, "qkv_bias": True, "softmax_scale": 0.5},
    "wide_heads": {"q_rank": 24, "nope_dim": 24, "v_head_dim": 20},
}


def make(case: str) -> MultiheadLatentAttention:
    attention = MultiheadLatentAttention(E, **SIZES | CASES[case])
    for name, parameter in attention.named_parameters():
        torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.3)
    return attention


def normed(x: Tensor, norm: RMSNorm) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt() * norm.weight.to(x.dtype)


def rotated(x: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool) -> Tensor:
    """x (B, S, H, Dr) by the definition, in its own dtype."""
    cos, sin = (table.to(x.dtype).unsqueeze(-2) for table in rope)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    halves = (a * cos - b * sin, a * sin + b * cos)
    return torch.stack(halves, -1).flatten(-2) if interleaved else torch.cat(halves, -1)


def by_hand(attention: MultiheadLatentAttention, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """The equations of DeepSeek-V2, in the dtype of x: (B, S, E) to (B, S, E)."""
    heads, nope = attention.num_heads, attention.nope_dim
    c_q = x
    if attention.q_a_proj is not None and attention.q_a_norm is not None:
        c_q = normed(attention.q_a_proj(x), attention.q_a_norm)
    q = attention.q_b_proj(c_q).unflatten(-1, (heads, -1))
    interleaved = attention.rope_interleaved
    q = torch.cat([q[..., :nope], rotated(q[..., nope:], rope, interleaved)], -1)
    latent, k_rope = attention.kv_a_proj(x).split([attention.kv_rank, attention.rope_dim], -1)
    kv = attention.kv_b_proj(normed(latent, attention.kv_a_norm)).unflatten(-1, (heads, -1))
    shared = rotated(k_rope.unsqueeze(-2), rope, interleaved).expand(-1, -1, heads, -1)
    k, v = torch.cat([kv[..., :nope], shared], -1), kv[..., nope:]
    s = torch.einsum("bihd,bjhd->bhij", q, k) * attention.softmax_scale
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    o = torch.einsum("bhij,bjhd->bihd", s.masked_fill(~seen, float("-inf")).softmax(-1), v)
    return attention.o_proj(o.flatten(2))


def rope_of(seqlen: int) -> tuple[Tensor, Tensor]:
    return RotaryEmbedding(RopeConfig(rotary_dim=4)).prefix(seqlen, torch.device("cpu"))


def in_float64(attention: MultiheadLatentAttention, case: str) -> MultiheadLatentAttention:
    exact = make(case).double()
    exact.load_state_dict(attention.state_dict())
    return exact


@pytest.mark.parametrize("case", CASES)
def test_dense_path_and_its_gradients_are_within_the_budget(case):
    attention, rope = make(case), rope_of(11)
    x, do = torch.randn(2, 11, E, requires_grad=True), torch.randn(2, 11, E)
    leaves = [x, *attention.parameters()]

    def run(function):
        y = function(x)
        return [y, *torch.autograd.grad(y, leaves, do)]

    actual = run(lambda x: attention(x, rope))
    eager = run(lambda x: by_hand(attention, x, rope))
    exact, x64 = in_float64(attention, case), x.detach().double().requires_grad_()
    truth = [by_hand(exact, x64, rope)]
    truth += torch.autograd.grad(truth[0], [x64, *exact.parameters()], do.double())
    names = ["y", "dx", *(f"d{name}" for name, _ in attention.named_parameters())]
    for name, *results in zip(names, actual, truth, eager, strict=True):
        # Two chains of a dozen products: the maxima of their roundings differ by chance.
        assert_within_budget(*results, name=name, factor=3.0)


def paged(
    attention: MultiheadLatentAttention,
    x: Tensor,
    counts: list[int],
    *,
    invariant: bool = False,
    kv: LatentLayer | None = None,
) -> Tensor:
    """Feed the rows of one sequence in steps of `counts`, over a cache of blocks of four."""
    rope = rope_of(x.shape[0])
    kv = torch.full((9, 4, 20), float("nan")) if kv is None else kv
    blocks = torch.tensor([[3, 0, 4, 8, 1, 2]], dtype=torch.int32)
    rows, first = [], 0
    for count in counts:
        end = first + count
        positions = torch.arange(first, end)
        ctx = AttentionContext(
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            max_seqlen_q=count,
            seqlens_k=torch.tensor([end], dtype=torch.int32),
            block_table=blocks,
            slot_mapping=blocks[0, positions // 4].long() * 4 + positions % 4,
            batch_invariant=invariant,
        )
        step_rope = (rope[0][first:end], rope[1][first:end])
        with torch.inference_mode():
            rows.append(attention(x[first:end], step_rope, ctx=ctx, kv=kv))
        first = end
    return torch.cat(rows)


@pytest.mark.parametrize("absorbs", ["views", "e_and_f", "e", "f"])
@pytest.mark.parametrize("case", CASES)
def test_absorbed_and_expanded_steps_equal_the_definition(case, absorbs):
    attention, x = make(case), torch.randn(23, E)
    if absorbs != "views":
        folds_q = absorbs != "f" and attention.q_b_proj.bias is None
        attention.absorb(folds_q=folds_q, folds_o=absorbs != "e")
    exact = in_float64(attention, case)
    with torch.no_grad():
        truth = by_hand(exact, x[None].double(), rope_of(23))[0]
        eager = by_hand(attention, x[None], rope_of(23))[0]
    for expanding_run in (1, 4, 99):  # all expanded, the chunks expanded, all absorbed

        class Chosen(MultiheadLatentAttention):
            pass

        Chosen.expanding_run = expanding_run
        attention.__class__ = Chosen
        # Latents take other roundings than heads do: products of R channels instead of Dn.
        assert_within_budget(
            paged(attention, x, [9, 1, 5, 1, 7]), truth, eager, factor=4.0, name=str(expanding_run)
        )


def test_a_mixed_step_expands_prompts_and_absorbs_single_tokens(monkeypatch):
    attention, rope = make("compressed_queries"), rope_of(9)
    monkeypatch.setattr(MultiheadLatentAttention, "expanding_run", 4)
    x = torch.randn(11, E)
    kv = torch.full((5, 4, 20), float("nan"))
    # Sequence 0 has one new token after 3, sequence 1 nine from nothing, sequence 2 one.
    kv[2, :3] = torch.randn(3, 20)
    table = torch.tensor([[2, -1, -1], [0, 3, 1], [4, -1, -1]], dtype=torch.int32)
    positions = torch.tensor([3, *range(9), 0])
    owner = torch.tensor([0, *[1] * 9, 2])
    ctx = AttentionContext(
        cu_seqlens_q=torch.tensor([0, 1, 10, 11], dtype=torch.int32),
        max_seqlen_q=9,
        seqlens_k=torch.tensor([4, 9, 1], dtype=torch.int32),
        block_table=table,
        slot_mapping=table[owner, positions // 4].long() * 4 + positions % 4,
    )
    calls = []
    for name in ("_absorbed", "_expanded"):
        original = getattr(MultiheadLatentAttention, name)

        def spy(self, c_q, rope, ctx, kv, original=original, name=name):
            calls.append((name, c_q.shape[0], ctx.cu_seqlens_q.tolist(), ctx.max_seqlen_q))
            return original(self, c_q, rope, ctx, kv)

        monkeypatch.setattr(MultiheadLatentAttention, name, spy)
    step_rope = tuple(table[positions] for table in rope)
    with torch.inference_mode():
        mixed = attention(x, step_rope, ctx=ctx, kv=kv)
        assert calls == [("_expanded", 9, [0, 9], 9), ("_absorbed", 2, [0, 1, 2], 1)]
        monkeypatch.setattr(MultiheadLatentAttention, "expanding_run", 99)
        absorbed = attention(x, step_rope, ctx=ctx, kv=kv)
    torch.testing.assert_close(mixed, absorbed)
    torch.testing.assert_close(mixed[1:10], attention(x[None, 1:10], rope)[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=lambda d: str(d)[6:])
def test_steps_over_an_8_bit_cache_absorbed_and_expanded_agree(dtype, monkeypatch):
    """On what the cache holds the two forms differ by roundings; from the exact by its own."""
    attention, x, results = make("compressed_queries"), torch.randn(23, E), []
    with torch.no_grad():
        exact = attention(x[None], rope_of(23))[0]
    for expanding_run in (1, 99):
        monkeypatch.setattr(MultiheadLatentAttention, "expanding_run", expanding_run)
        cache = torch.full((9, 4, 20), -1, dtype=torch.int8).view(dtype)
        results.append(
            paged(attention, x, [9, 1, 5, 8], kv=(cache, torch.full((9, 4, 2), float("nan"))))
        )
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
    error = float((results[0] - exact).square().mean() / exact.square().mean()) ** 0.5
    assert 1e-4 < error < (0.03 if dtype == torch.int8 else 0.12)


def test_batch_invariant_steps_are_absorbed(monkeypatch):
    attention = make("compressed_queries")
    monkeypatch.setattr(MultiheadLatentAttention, "expanding_run", 1)
    monkeypatch.setattr(MultiheadLatentAttention, "_expanded", None)
    x = torch.randn(9, E)
    torch.testing.assert_close(
        paged(attention, x, [5, 4], invariant=True), attention(x[None], rope_of(9))[0]
    )


def test_products_are_folded_where_that_is_less():
    """Dn > m R / (m + R) = 9.6 and Dv > E R / (E + R) = 11.4 here; 384 and 478 for DeepSeek-V3."""
    for case, has_e, has_f in (("compressed_queries", False, True), ("wide_heads", True, True)):
        attention = make(case)
        attention.absorb()
        assert (attention.e is not None, attention.f is not None) == (has_e, has_f)
        assert not {"e", "f"} & set(attention.state_dict())
    with torch.device("meta"):
        deepseek_v3 = MultiheadLatentAttention(
            7168, 128, kv_rank=512, nope_dim=128, rope_dim=64, v_head_dim=128, q_rank=1536
        )
    deepseek_v3.absorb()
    assert (deepseek_v3.e, deepseek_v3.f) == (None, None)
    assert deepseek_v3.expanding_run == 171


def test_it_trains_after_it_was_absorbed():
    attention, x = make("wide_heads"), torch.randn(1, 5, E)
    attention.absorb()
    attention(x, rope_of(5)).sum().backward()
    assert all(p.grad is not None for p in attention.parameters())


def test_refusals_name_the_argument():
    for change, words in (
        ({"rope_dim": 5}, "rope_dim must be even and at least 2, got 5"),
        ({"kv_rank": 0}, "kv_rank must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=words):
            MultiheadLatentAttention(E, **SIZES | change)
    with pytest.raises(ValueError, match="ctx and kv must come together, got only kv"):
        make("direct_queries")(torch.randn(1, E), rope_of(1), kv=torch.zeros(1, 4, 20))
    biased = MultiheadLatentAttention(E, **SIZES, q_rank=None, qkv_bias=True)
    with pytest.raises(ValueError, match="folds_q must be False with a bias on the queries"):
        biased.absorb(folds_q=True)
