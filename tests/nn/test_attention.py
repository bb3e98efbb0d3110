"""The attention module against float64 attention written by hand, dense and paged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tilewise import ops
from tilewise.nn import Attention, AttentionContext, RMSNorm, RopeConfig, RotaryEmbedding
from tilewise.nn.context import StepPlans
from tilewise.nn.same_bits import use_inference_bits
from tilewise.testing import assert_within_budget

E, D = 40, 8
CASES = {
    "mha": {"num_q_heads": 4, "num_kv_heads": 4},
    "gqa": {"num_q_heads": 6, "num_kv_heads": 2},
    "mqa": {"num_q_heads": 5, "num_kv_heads": 1},
    "biases": {"num_q_heads": 4, "num_kv_heads": 2, "qkv_bias": True, "o_bias": True},
    "qk_norm": {"num_q_heads": 6, "num_kv_heads": 3, "qk_norm_eps": 1e-6},
    "window": {"num_q_heads": 4, "num_kv_heads": 2, "window": 3},
    "scale": {"num_q_heads": 4, "num_kv_heads": 2, "softmax_scale": 0.7},
}


def make(case: str) -> Attention:
    attention = Attention(E, head_dim=D, **CASES[case])
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.shape == (D,) else 0.0, 0.3)
    return attention


def by_hand(attention: Attention, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """The definition, in the dtype of x: (B, S, E) to (B, S, E)."""
    weights = {name: p.to(x.dtype) for name, p in attention.named_parameters()}
    hq, hk = attention.num_q_heads, attention.num_kv_heads
    heads = x @ weights["qkv_proj.weight"].T + weights.get("qkv_proj.bias", 0)
    q, k, v = heads.unflatten(-1, (hq + 2 * hk, D)).split((hq, hk, hk), dim=2)
    if isinstance(attention.q_norm, RMSNorm):
        q, k = (
            t * (t.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weights[name]
            for t, name in ((q, "q_norm.weight"), (k, "k_norm.weight"))
        )
    if rope is not None:
        cos, sin = (table.to(x.dtype).unsqueeze(-2) for table in rope)
        q, k = (
            torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
            for a, b in (t.chunk(2, dim=-1) for t in (q, k))
        )
    k, v = (t.repeat_interleave(hq // hk, dim=2) for t in (k, v))
    scale = D**-0.5 if attention.softmax_scale is None else attention.softmax_scale
    s = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    distance = torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])
    seen = (distance >= 0) & (distance < (attention.window or x.shape[1]))
    p = s.masked_fill(~seen, float("-inf")).softmax(-1)
    o = torch.einsum("bhij,bjhd->bihd", p, v).flatten(2)
    return o @ weights["o_proj.weight"].T + weights.get("o_proj.bias", 0)


def rope_of(seqlen: int) -> tuple[Tensor, Tensor]:
    return RotaryEmbedding(RopeConfig(rotary_dim=D)).prefix(seqlen, torch.device("cpu"))


@pytest.mark.parametrize("rotated", [True, False], ids=["rope", "no_rope"])
@pytest.mark.parametrize("case", CASES)
def test_dense_path_and_its_gradients_are_within_the_budget(case, rotated):
    attention, rope = make(case), rope_of(11) if rotated else None
    x, do = torch.randn(2, 11, E, requires_grad=True), torch.randn(2, 11, E)
    leaves = [x, *attention.parameters()]

    def run(function, dtype):
        y = function(x.to(dtype))
        return [y, *torch.autograd.grad(y, leaves, do.to(y.dtype))]

    actual = run(lambda x: attention(x, rope), torch.float32)
    eager = run(lambda x: by_hand(attention, x, rope), torch.float32)
    exact = make(case).double()
    exact.load_state_dict(attention.state_dict())
    x64 = x.detach().double().requires_grad_()
    truth = [by_hand(exact, x64, rope)]
    truth += torch.autograd.grad(truth[0], [x64, *exact.parameters()], do.double())
    names = ["y", "dx", *(f"d{name}" for name, _ in attention.named_parameters())]
    for name, *results in zip(names, actual, truth, eager, strict=True):
        if not rotated and name == "dqkv_proj.bias":
            # Without a rotation a key's bias moves no probability: its gradient is pure rounding.
            hq, hk = attention.num_q_heads, attention.num_kv_heads
            results = [
                t.unflatten(0, (-1, D))[[*range(hq), *range(hq + hk, hq + 2 * hk)]] for t in results
            ]
        # The largest of a few hundred roundings, summed in another order than eager's: over six
        # seeds it was 0.7 to 2.8 times eager's, where the root mean square was 1.1 to 1.4 times.
        assert_within_budget(*results, name=name, factor=4.0)


@pytest.mark.parametrize("case", ["gqa", "qk_norm", "window"])
def test_a_dense_batch_over_a_cache_of_its_own(case):
    """Its values are those of the paged path, its gradients those of dense attention."""
    attention, rope = make(case), rope_of(35)
    x, dy = torch.randn(3, 35, E, requires_grad=True), torch.randn(3, 35, E)
    leaves = [x, *attention.parameters()]
    plain = attention(x, rope)
    expected = torch.autograd.grad(plain, leaves, dy)
    kept = []
    attention._attend_cache = lambda *args: (
        kept.append(args) or Attention._attend_cache(attention, *args)
    )
    attention.attends_as_cached = True
    y = attention(x, rope)
    [(_, _, ctx, _)] = kept
    assert ctx.batch_invariant
    assert ctx.block_table.shape == (3, 3)
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-6)
    # Only o differs between the two, by rounding: it enters the gradient of o_proj's weight.
    for got, want in zip(torch.autograd.grad(y, leaves, dy), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        assert torch.equal(attention(x, rope), y)
        assert attention(x[:, :0], rope_of(0)).shape == (3, 0, E)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_output_gate_is_one_operation_with_the_bits_of_two(dtype, monkeypatch):
    attention = Attention(E, 6, 2, D, has_gate=True).to(dtype)
    x, calls = torch.randn(2, 11, E).to(dtype), []
    recorded = attention(x, rope_of(11))
    gated = ops.gated_mul

    def count(gate, o, **options):
        calls.append((gate.shape, gate.stride(-2), options))
        return gated(gate, o, **options)

    monkeypatch.setattr(ops, "gated_mul", count)
    with torch.no_grad():
        y = attention(x, rope_of(11))
    assert calls == [((2, 11, 6 * D), 16 * D, {"function": "sigmoid"})]  # where it was projected
    assert torch.equal(y, recorded)
    assert recorded.requires_grad


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_with_an_output_gate_is_trained_with_the_bits_of_inference_on_a_gpu(dtype):
    attention = Attention(256, 6, 2, 64, has_gate=True, qk_norm_eps=1e-6).to("cuda", dtype)
    table = RotaryEmbedding(RopeConfig(rotary_dim=64)).to("cuda")
    rope = table.prefix(70, torch.device("cuda"))
    x = torch.randn(3, 70, 256, device="cuda", dtype=dtype, requires_grad=True)
    use_inference_bits(attention)
    with torch.no_grad():
        wanted = attention(x, rope)
    y = attention(x, rope)
    assert torch.equal(y, wanted)
    for gradient in torch.autograd.grad(y.square().sum(), [x, *attention.parameters()]):
        assert gradient.isfinite().all()
        assert gradient.any()


@pytest.mark.parametrize("case", ["qk_norm", "sinks"])
def test_what_lies_between_frozen_projections_learns_over_a_cache_too(case):
    attention = Attention(E, 6, 2, D, has_sinks=True) if case == "sinks" else make(case)
    leaf = attention.sinks if case == "sinks" else attention.q_norm.weight
    attention.requires_grad_(False)
    leaf.requires_grad_(True)
    x, dy = torch.randn(2, 19, E), torch.randn(2, 19, E)
    [expected] = torch.autograd.grad(attention(x, rope_of(19)), [leaf], dy)
    attention.attends_as_cached = True
    [got] = torch.autograd.grad(attention(x, rope_of(19)), [leaf], dy)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_a_window_of_one_key_passes_each_rows_own_value():
    attention = Attention(E, 6, 2, D, window=1)
    x = torch.randn(2, 9, E)
    with torch.no_grad():
        v = (x @ attention.qkv_proj.weight[-2 * D :].T).unflatten(-1, (2, D))
        expected = attention.o_proj(v.repeat_interleave(3, dim=2).flatten(2))
        torch.testing.assert_close(attention(x, rope_of(9)), expected)


@pytest.mark.parametrize("case", CASES)
def test_paged_path_equals_the_definition(case):
    attention, rope = make(case), rope_of(11)
    x = torch.randn(1, 11, E)
    cache_shape = (5, 4, attention.num_kv_heads, D)
    kv = (torch.full(cache_shape, float("nan")), torch.full(cache_shape, float("nan")))
    blocks = torch.tensor([[3, 0, 4]], dtype=torch.int32)
    rows, first = [], 0
    for count in (5, 1, 4, 1):
        end = first + count
        positions = torch.arange(first, end)
        ctx = AttentionContext(
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32),
            max_seqlen_q=count,
            seqlens_k=torch.tensor([end], dtype=torch.int32),
            block_table=blocks,
            slot_mapping=blocks[0, positions // 4].long() * 4 + positions % 4,
        )
        step_rope = (rope[0][first:end], rope[1][first:end])
        with torch.inference_mode():
            rows.append(attention(x[0, first:end], step_rope, ctx=ctx, kv=kv))
        first = end
    exact = make(case).double()
    exact.load_state_dict(attention.state_dict())
    with torch.no_grad():
        truth, eager = by_hand(exact, x.double(), rope)[0], by_hand(attention, x, rope)[0]
    assert_within_budget(torch.cat(rows), truth, eager)


def test_batch_invariance_is_asked_of_the_kernel(monkeypatch):
    asked = []

    def spy(q, *args, batch_invariant, **kwargs):
        asked.append(batch_invariant)
        return q

    monkeypatch.setattr("tilewise.nn.attention.ops.write_kv_cache", lambda *_, **__: None)
    monkeypatch.setattr("tilewise.nn.attention.ops.paged_attention", spy)
    nothing, kv = torch.zeros(2, dtype=torch.int32), (torch.zeros(1), torch.zeros(1))
    for invariant in (False, True):
        ctx = AttentionContext(nothing, 1, nothing, nothing, nothing, batch_invariant=invariant)
        make("gqa")(torch.randn(1, E), ctx=ctx, kv=kv)
    assert asked == [False, True]


def test_layers_of_one_kind_share_the_plan_of_a_step(monkeypatch):
    blocks = torch.arange(4, dtype=torch.int32).view(1, 4)
    ends = torch.tensor([9], dtype=torch.int32)
    ctx = AttentionContext(
        torch.arange(2).int(), 1, ends, blocks, torch.tensor([8]), plans=StepPlans()
    )
    cache, taken = torch.randn(4, 4, 2, D), []

    def spy(q, *args, plan, **options):
        taken.append(plan)
        return q

    monkeypatch.setattr("tilewise.nn.attention.ops.paged_attention", spy)
    with torch.inference_mode():
        for case in ("scale", "window", "gqa", "scale"):
            make(case)._over((cache, cache))(torch.randn(1, 4, D), ctx)
        assert len(ctx.plans) == 2
        assert [taken.index(plan) for plan in taken] == [0, 1, 0, 0]
        make("gqa")._over((cache, cache))(torch.randn(1, 4, D), replace(ctx, plans=None))
    assert taken[-1] is None


def test_a_step_has_plans_where_kernels_read_them():
    assert StepPlans.on(torch.device("cpu")) is None
    assert isinstance(StepPlans.on(torch.device("cuda")), StepPlans)


def test_context_and_cache_come_together():
    cache = (torch.zeros(1), torch.zeros(1))
    with pytest.raises(ValueError, match="ctx and kv must come together, got only kv"):
        make("gqa")(torch.randn(1, E), kv=cache)


@pytest.mark.parametrize(("num_q_heads", "num_kv_heads"), [(4, 3), (2, 4), (4, 0)])
def test_heads_must_group_evenly(num_q_heads, num_kv_heads):
    with pytest.raises(ValueError, match="num_q_heads must be a multiple of num_kv_heads"):
        Attention(E, num_q_heads, num_kv_heads, D)
