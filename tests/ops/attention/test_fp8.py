"""attention_fp8 and quantize_heads: every backend against float64 on the dequantised values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kernels.attention_problem import starts
from tests.kernels.gluon.fp8_oracle import assert_within_format, dequantised_truth, packed_truth
from tilewise import masks
from tilewise.errors import UnsupportedError
from tilewise.kernels import device
from tilewise.ops import call, dispatch
from tilewise.ops.attention.api import attention
from tilewise.ops.attention.arguments import AttentionSignature
from tilewise.ops.attention.fp8 import attention_fp8, quantize_heads, quantize_tokens
from tilewise.reference import fp8, standard
from tilewise.testing import assert_within_budget, make_qkv

CASES = {
    "square": ((2, 33, 33, 4, 4, 64), {}),
    "causal, grouped": ((1, 70, 70, 8, 2, 64), {"causal": True}),
    "one kv head": ((1, 40, 130, 4, 1, 128), {"causal": True}),
    "more queries than keys": ((1, 50, 21, 2, 2, 64), {"causal": True}),
    "one query": ((2, 1, 77, 2, 1, 64), {"causal": True}),
    "window": ((1, 90, 100, 2, 2, 64), {"window": 17}),
    "window on both sides": ((1, 90, 100, 2, 2, 64), {"window": (9, 3)}),
    "window to the right of few keys": ((1, 200, 50, 2, 2, 64), {"window": (None, 60)}),
    "narrow heads": ((1, 20, 30, 2, 2, 24), {"softmax_scale": 0.3}),
    "softcap": ((1, 20, 30, 2, 2, 64), {"softcap": 5.0}),
    "sinks": ((2, 20, 30, 4, 2, 64), {"sinks": torch.tensor([-1.0, 0.5, 3.0, 8.0])}),
}


def _inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return list(make_qkv(*shape, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(("shape", "rule"), CASES.values(), ids=CASES.keys())
def test_the_cpu_computes_the_rule(shape, rule, dtype):
    q, k, v = _inputs(shape, dtype)
    o, lse = attention_fp8(q, k, v, return_lse=True, backend="cpu", **rule)
    wide = [fp8.dequantize_heads(*fp8.quantize_heads(x)) for x in (q, k, v)]
    truth, lse_truth = standard.attention(*wide, return_lse=True, **rule)
    eager = standard.attention(*(x.to(dtype) for x in wide), **rule)
    assert o.dtype == dtype
    assert_within_budget(o, truth, eager, name="o")
    assert lse.dtype == torch.float32
    torch.testing.assert_close(lse.double(), lse_truth, rtol=1e-5, atol=1e-5)


def test_automatic_choice_on_a_cpu_is_the_cpu():
    q, k, v = _inputs((1, 9, 9, 2, 2, 64))
    assert torch.equal(attention_fp8(q, k, v), attention_fp8(q, k, v, backend="cpu"))


class TestPlannedOnce:
    @pytest.fixture
    def calls(self, monkeypatch):
        """Names of the calls that were planned, none of them before."""
        names: list[str] = []
        choose_plan = dispatch.choose_plan

        def listed(op: str, call: Any, backend: str | None) -> Any:
            names.append(op)
            return choose_plan(op, call, backend)

        monkeypatch.setattr(dispatch, "choose_plan", listed)
        call.forget()
        return names

    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    def test_a_call_like_one_before_finds_its_plan(self, backend, calls):
        for _ in range(3):
            q, k, v = _inputs((2, 9, 14, 4, 2, 64))
            attention_fp8(q, k, v, causal=True, backend=backend)
        assert len(calls) == 1

    @pytest.mark.parametrize(
        "change",
        [
            {"causal": True}, {"window": 3}, {"softcap": 2.0}, {"softmax_scale": 0.5},
            {"sinks": torch.zeros(4)}, {"seqlens_k": torch.tensor([14, 3], dtype=torch.int32)},
            {"rotate": True}, {"per_token": True},
            {"mask": masks.dense(torch.rand(1, 1, 9, 14) < 0.5)}, {"backend": "reference"},
        ],
        ids=lambda change: "-".join(change),
    )  # fmt: skip
    def test_what_a_call_says_is_part_of_its_plan(self, change, calls):
        q, k, v = _inputs((2, 9, 14, 4, 2, 64))
        attention_fp8(q, k, v)
        o, lse = attention_fp8(q, k, v, return_lse=True, **change)
        assert len(calls) == 2
        with SeeOps() as seen:  # which a call past the dispatcher would not be
            again, lse_again = attention_fp8(q, k, v, return_lse=True, **change)
        assert "attention_fp8_fwd" in str(seen.ops)
        assert torch.equal(o, again)
        assert torch.equal(lse, lse_again)

    @pytest.mark.parametrize("backend", ["cpu", "reference"])
    @pytest.mark.parametrize("kind", ["dense", "packed", "e4m3"])
    def test_later_calls_see_no_op_and_read_their_own_tensors(self, kind, backend, monkeypatch):
        def call(seed: int) -> Callable[[], tuple[Tensor, Tensor]]:
            torch.manual_seed(seed)
            q, k, v = make_qkv(1, 9, 14, 4, 2, 64, dtype=torch.bfloat16, seed=seed)
            visible = torch.rand(1, 1, 9, 14) < 0.8
            rule: dict[str, Any] = {"sinks": torch.randn(4).half(), "mask": masks.dense(visible)}
            if kind == "packed":
                q, k, v = q[0], k[0], v[0]
                rule |= {"max_seqlen_q": 9, "max_seqlen_k": 14}
                rule |= {"cu_seqlens_q": _edges(seed, 9), "cu_seqlens_k": _edges(seed + 3, 14)}
            else:
                rule["seqlens_k"] = torch.tensor([14 - seed], dtype=torch.int32)
            if kind == "e4m3":
                (q, q_scale), (k, k_scale), (v, v_scale) = map(quantize_heads, (q, k, v))
                rule |= {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
            else:
                rule["rotate"] = True
            return partial(attention_fp8, q, k, v, return_lse=True, backend=backend, **rule)

        calls = [call(seed) for seed in (1, 2)]
        with SeeOps() as seen:
            want = [each() for each in calls]
        assert str(seen.ops).count("attention_fp8_fwd") == 2
        assert not torch.equal(*(o for o, _ in want))
        calls[0]()
        for name in ("attention_fp8_fwd", "_checked"):
            monkeypatch.setitem(attention_fp8.__globals__, name, None)
        for each, (o, lse) in zip(calls, want, strict=True):
            again, lse_again = each()
            assert torch.equal(again, o)
            assert torch.equal(lse_again, lse)

    def test_no_tensor_of_a_call_is_kept(self):
        q, k, v = _inputs((1, 9, 14, 4, 2, 64))
        sinks = torch.randn(4).half()
        attention_fp8(q, k, v, sinks=sinks, rotate=True, per_token=True)
        kept = [*map(weakref.ref, (q, k, v, sinks))]
        del q, k, v, sinks
        gc.collect()
        assert [x() for x in kept] == [None] * 4

    @pytest.mark.parametrize("seed", [0, 1])
    def test_each_seed_rotates_by_itself(self, seed):
        q, k, v = _inputs((2, 9, 14, 4, 2, 64))
        first, other = (attention_fp8(q, k, v, rotate=True, seed=n) for n in (seed, 1 - seed))
        assert torch.equal(attention_fp8(q, k, v, rotate=True, seed=seed), first)
        assert not torch.equal(first, other)

    def test_scales_of_heads_and_of_tokens_are_planned_apart(self, calls):
        q, k, v = _inputs((1, 9, 14, 2, 2, 64))
        v8, v_scale = quantize_heads(v)
        for quantize in (quantize_heads, quantize_tokens) * 2:
            (q8, q_scale), (k8, k_scale) = quantize(q), quantize(k)
            scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
            got = attention_fp8(q8, k8, v8, **scales)
            want = attention_fp8(q, k, v, per_token=quantize is quantize_tokens)
            assert torch.equal(got, want)
        assert calls.count("attention_fp8") == 4

    def test_a_gradient_is_refused_by_calls_like_one_before_too(self):
        q, k, v = _inputs((1, 9, 14, 2, 2, 64))
        attention_fp8(q, k, v)
        with pytest.raises(UnsupportedError, match="attention_fp8 must be called under"):
            attention_fp8(q, k, v.requires_grad_())

    def test_strides_are_part_of_a_call(self):
        q, k, v = _inputs((1, 9, 14, 2, 2, 64))
        want = attention_fp8(q, k, v)
        wide = torch.zeros(1, 14, 2, 2, 64, dtype=torch.bfloat16)
        wide[..., 0, :] = k
        assert torch.equal(attention_fp8(q, wide[..., 0, :], v), want)

    def test_a_mistake_is_named_by_calls_like_one_before_too(self):
        q, k, v = _inputs((1, 9, 14, 2, 2, 64))
        attention_fp8(q, k, v)
        for _ in range(2):
            with pytest.raises(ValueError, match="q must have stride 1 in its last dimension"):
                attention_fp8(q.to_sparse(), k, v)
            with pytest.raises(ValueError, match="seed must be an integer of 64 bits"):
                attention_fp8(q, k, v, rotate=True, seed=2**63)


def _edges(middle: int, end: int) -> Tensor:
    return torch.tensor([0, middle, end], dtype=torch.int32)


class SeeOps(TorchDispatchMode):
    """Lists the ops that the dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.ops.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_that_see_nothing_are_zero(backend):
    q, k, v = _inputs((2, 12, 7, 2, 1, 64))
    lengths = torch.tensor([7, 0], dtype=torch.int32)
    o, lse = attention_fp8(
        q, k, v, causal=True, seqlens_k=lengths, return_lse=True, backend=backend
    )
    assert torch.equal(o[0, :5], torch.zeros(5, 2, 64, dtype=torch.bfloat16))
    assert torch.equal(o[1], torch.zeros(12, 2, 64, dtype=torch.bfloat16))
    assert bool((lse[1] == -torch.inf).all())
    assert bool(lse[0, :, 5:].isfinite().all())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_rows_that_see_nothing_but_a_sink_have_its_lse(backend):
    q, k, v = _inputs((2, 12, 7, 2, 1, 64))
    lengths, sinks = torch.tensor([7, 0], dtype=torch.int32), torch.tensor([-0.5, 2.0])
    rule = {"seqlens_k": lengths, "sinks": sinks, "backend": backend}
    o, lse = attention_fp8(q, k, v, causal=True, return_lse=True, **rule)
    assert not bool(o[1].any())
    assert not bool(o[0, :5].any())
    torch.testing.assert_close(lse[1], sinks[:, None].expand(2, 12))
    torch.testing.assert_close(lse[0, :, :5], sinks[:, None].expand(2, 5))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_mask_hides_keys_as_it_does_in_16_bits(backend):
    q, k, v = _inputs((2, 150, 200, 4, 2, 64))
    visible = torch.rand(1, 4, 150, 200, generator=torch.Generator().manual_seed(1)) < 0.4
    visible[:, :, 7] = False
    mask = masks.dense(visible)
    rule = {"window": (100, 90), "softcap": 4.0}
    o, lse = attention_fp8(q, k, v, mask=mask, return_lse=True, backend=backend, **rule)
    wide = [fp8.dequantize_heads(*fp8.quantize_heads(x)) for x in (q, k, v)]
    truth, lse_truth = standard.attention(*wide, return_lse=True, mask=visible, **rule)
    eager = standard.attention(*(x.bfloat16() for x in wide), mask=visible, **rule)
    assert_within_budget(o, truth, eager, name="o")
    torch.testing.assert_close(lse.double(), lse_truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_keys_past_a_sequence_are_never_read(backend):
    q, k, v = _inputs((2, 5, 20, 2, 2, 64))
    lengths = torch.tensor([20, 11], dtype=torch.int32)
    want = attention_fp8(q, k, v, seqlens_k=lengths, backend=backend)
    k[1, 11:] = float("nan")
    v[1, 11:] = float("inf")
    got = attention_fp8(q, k, v, seqlens_k=lengths, backend=backend)
    assert torch.equal(got, want)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_tensors_quantised_before_give_the_same(backend):
    q, k, v = _inputs((2, 9, 14, 4, 2, 64))
    (q8, q_scale), (k8, k_scale) = (quantize_heads(x, rotation=4) for x in (q, k))
    v8, v_scale = quantize_heads(v)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    got, lse = attention_fp8(q8, k8, v8, return_lse=True, backend=backend, **scales)
    want, lse_want = attention_fp8(q, k, v, rotate=True, seed=4, return_lse=True, backend=backend)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want)
    assert torch.equal(lse, lse_want)


def test_strided_inputs_are_read_where_they_lie():
    packed = torch.randn(2, 10, 3, 4, 64).bfloat16()
    q, k, v = packed.unbind(2)
    want = attention_fp8(*(x.contiguous() for x in (q, k, v)))
    assert torch.equal(attention_fp8(q, k, v), want)


def test_empty_calls_have_a_result():
    q, k, v = _inputs((1, 0, 5, 2, 2, 64))
    assert attention_fp8(q, k, v).shape == (1, 0, 2, 64)
    q, k, v = _inputs((1, 3, 0, 2, 2, 64))
    o, lse = attention_fp8(q, k, v, return_lse=True)
    assert torch.equal(o, torch.zeros_like(o))
    assert bool((lse == -torch.inf).all())


REFUSALS = {
    "dtype": ({"q": torch.zeros(1, 2, 2, 64)}, TypeError, "q must be float16, bfloat16 or float8"),
    "mixed": ({"k": torch.zeros(1, 3, 2, 64).half()}, TypeError, "k must have dtype bfloat16"),
    "dims": ({"q": torch.zeros(2, 2, 64).bfloat16()}, ValueError, r"q must be \(B, S, H, D\)"),
    "batch": ({"k": torch.zeros(2, 3, 2, 64).bfloat16()}, ValueError, "batch of q, 1, got 2"),
    "head dim": ({"k": torch.zeros(1, 3, 2, 32).bfloat16()}, ValueError, "head dim of q, 64"),
    "keys": ({"v": torch.zeros(1, 4, 2, 64).bfloat16()}, ValueError, "v must have the shape of k"),
    "scale": ({"q_scale": torch.ones(1, 2)}, ValueError, "q_scale must be given with e4m3 tensors"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap must be at least 0"),
    "lengths": ({"seqlens_k": torch.ones(1)}, TypeError, "seqlens_k must have dtype int32"),
    "backend": ({"backend": "cuda"}, ValueError, "backend must be one of"),
    "sinks": ({"sinks": torch.zeros(3)}, ValueError, r"sinks must have shape \(2,\)"),
    "mask": ({"mask": masks.causal(2)}, ValueError, r"mask must cover \(2, 3\)"),
    "boolean mask": ({"mask": torch.ones(2, 3) > 0}, TypeError, "mask must be a BlockMask"),
    "window": ({"window": 0}, ValueError, "window must be at least 1"),
    "gluon on a cpu": ({"backend": "triton"}, UnsupportedError, "cannot run attention_fp8"),
}


@pytest.mark.parametrize(("given", "error", "message"), REFUSALS.values(), ids=REFUSALS.keys())
def test_wrong_arguments_are_refused(given, error, message, monkeypatch):
    monkeypatch.setattr(device, "interpreting", lambda: False)
    q, k, v = _inputs((1, 2, 3, 2, 2, 64))
    call = {"q": q, "k": k, "v": v} | given
    with pytest.raises(error, match=message):
        attention_fp8(call.pop("q"), call.pop("k"), call.pop("v"), **call)


def test_heads_must_divide():
    q, k, v = _inputs((1, 2, 3, 2, 2, 64))
    with pytest.raises(ValueError, match="multiple of key heads"):
        attention_fp8(torch.cat((q, q[:, :, :1]), dim=2), k, v)


def test_scales_must_fit():
    q8, scale = quantize_heads(torch.randn(1, 3, 2, 64))
    scales = {"q_scale": scale, "k_scale": scale, "v_scale": scale[0]}
    with pytest.raises(ValueError, match=r"v_scale must have shape \(1, 2\)"):
        attention_fp8(q8, q8, q8, **scales)
    with pytest.raises(ValueError, match="k_scale must be given .* got none"):
        attention_fp8(q8, q8, q8, q_scale=scale)
    scales["v_scale"] = scale
    with pytest.raises(ValueError, match="rotate them in quantize_heads"):
        attention_fp8(q8, q8, q8, rotate=True, **scales)


def _shifted_keys(shape: tuple[int, ...], by: float) -> list[Tensor]:
    """Inputs whose key channels have means far from 0, as trained models' have."""
    q, k, v = _inputs(shape)
    g = torch.Generator().manual_seed(3)
    offset = by * torch.randn(1, 1, *k.shape[2:], generator=g)
    return [q, (k.float() + offset).to(k.dtype), v]


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("rotate", [False, True])
def test_smoothing_takes_a_shift_of_the_keys_out_of_the_error(backend, rotate):
    q, k, v = _shifted_keys((2, 48, 160, 4, 2, 64), 8.0)
    truth, lse_truth = attention(
        q.double(), k.double(), v.double(), causal=True, return_lse=True, backend="reference"
    )

    def error(**options):
        o, lse = attention_fp8(
            q, k, v, causal=True, backend=backend, return_lse=True, rotate=rotate, **options
        )
        return (o.double() - truth).norm() / truth.norm(), (lse - lse_truth).abs().max()

    plain, smooth = error(), error(smooth_k=True)
    assert smooth[0] < 0.06
    assert smooth[0] < plain[0] / 3
    assert smooth[1] < plain[1] / 2


def test_smoothing_counts_the_keys_of_each_sequence_alone():
    q, k, v = _shifted_keys((2, 5, 40, 4, 2, 64), 8.0)
    lengths = torch.tensor([40, 13], dtype=torch.int32)
    alone = [
        attention_fp8(
            q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], smooth_k=True, return_lse=True,
            backend="cpu",
        )
        for b, n in enumerate(lengths.tolist())
    ]  # fmt: skip
    k[1, 13:], v[1, 13:] = torch.nan, torch.nan
    o, lse = attention_fp8(
        q, k, v, seqlens_k=lengths, smooth_k=True, return_lse=True, backend="cpu"
    )
    torch.testing.assert_close(o, torch.cat([part[0] for part in alone]), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(lse, torch.cat([part[1] for part in alone]), rtol=1e-3, atol=1e-2)


def test_smoothing_no_keys_gives_zero():
    q, k, v = _inputs((1, 3, 6, 2, 2, 16))
    none = torch.zeros(1, dtype=torch.int32)
    o, lse = attention_fp8(q, k, v, seqlens_k=none, smooth_k=True, return_lse=True, backend="cpu")
    assert torch.equal(o, torch.zeros_like(o))
    assert torch.equal(lse, torch.full_like(lse, -torch.inf))


def test_smoothing_is_refused_where_it_would_change_the_result():
    q, k, v = _inputs((1, 3, 6, 2, 2, 16))
    with pytest.raises(ValueError, match=r"softcap must be 0 with smooth_k, got 5\.0"):
        attention_fp8(q, k, v, softcap=5.0, smooth_k=True)
    with pytest.raises(ValueError, match="sinks must be None with smooth_k"):
        attention_fp8(q, k, v, sinks=torch.zeros(2), smooth_k=True)
    parts = [quantize_heads(x) for x in (q, k, v)]
    scales = dict(zip(("q_scale", "k_scale", "v_scale"), (s for _, s in parts), strict=True))
    with pytest.raises(ValueError, match="smooth_k must be False with e4m3 tensors"):
        attention_fp8(*(x for x, _ in parts), **scales, smooth_k=True)


def test_rotation_needs_a_power_of_two():
    q, k, v = _inputs((1, 2, 3, 2, 2, 24))
    with pytest.raises(ValueError, match="power of two, got 24"):
        attention_fp8(q, k, v, rotate=True)
    with pytest.raises(ValueError, match="power of two, got 24"):
        quantize_heads(q, rotation=1)


def test_gradients_are_refused_and_no_grad_is_not():
    q, k, v = _inputs((1, 2, 3, 2, 2, 64))
    q.requires_grad_()
    with pytest.raises(UnsupportedError, match="it has no gradient"):
        attention_fp8(q, k, v)
    with pytest.raises(UnsupportedError, match="it has no gradient"):
        quantize_heads(q)
    with torch.no_grad():
        assert not attention_fp8(q, k, v).requires_grad


def test_quantize_heads_refuses_what_it_cannot_read():
    with pytest.raises(TypeError, match="x must be float16, bfloat16 or float32, got float64"):
        quantize_heads(torch.zeros(1, 2, 2, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="stride 1"):
        quantize_heads(torch.zeros(1, 2, 8, 2).transpose(2, 3))
    with pytest.raises(ValueError, match=r"seqlens must have shape \(1,\)"):
        quantize_heads(torch.zeros(1, 2, 2, 8), seqlens=torch.zeros(2, dtype=torch.int32))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
class TestTheBoundary:
    def test_the_ops_are_opcheck_clean(self):
        q, k, v = _inputs((2, 5, 9, 4, 2, 64))
        lengths = torch.tensor([9, 4], dtype=torch.int32)
        shared = {"causal": True, "softmax_scale": 0.2, "sinks": torch.zeros(4)}
        options = AttentionSignature(q, k, v, **shared, seqlens_k=lengths).bind().options
        op = torch.ops.tilewise.attention_fp8_fwd.default
        torch.library.opcheck(op, (q, k, v, None, None, None, 3, False, *options))
        quantise = torch.ops.tilewise.quantize_heads.default
        torch.library.opcheck(quantise, (q, None, None, None, -1))
        torch.library.opcheck(quantise, (k, lengths, None, 1, -1))
        cu = torch.tensor([0, 3, 9], dtype=torch.int32)
        torch.library.opcheck(quantise, (k[0], None, cu, 1, 6))
        torch.library.opcheck(torch.ops.tilewise.quantize_tokens.default, (k[0], None, 1))
        packed = {"cu_seqlens_q": cu // 2, "cu_seqlens_k": cu, "max_seqlen_q": 3, "max_seqlen_k": 6}
        options = AttentionSignature(q[0], k[0], v[0], **shared, **packed).bind().options
        torch.library.opcheck(op, (q[0], k[0], v[0], None, None, None, 3, False, *options))

    def test_a_compiled_call_has_no_graph_break(self):
        q, k, v = _inputs((1, 6, 6, 2, 2, 64))

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q8, q_scale = quantize_heads(q)
            k8, k_scale = quantize_heads(k)
            v8, v_scale = quantize_heads(v)
            scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
            return attention_fp8(q8, k8, v8, causal=True, **scales) + attention_fp8(q, k, v)

        compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(q, k, v), call(q, k, v))


GPU_CASES = {
    **{
        name: case
        for name, case in CASES.items()
        if name not in ("narrow heads", "softcap", "sinks")
    },
    "long": ((1, 1100, 1300, 4, 2, 128), {"causal": True}),
    "wide": ((2, 300, 427, 4, 2, 256), {"causal": True}),
    "wide, whole": ((1, 200, 640, 2, 2, 256), {}),
    "long window": ((1, 900, 1000, 2, 2, 128), {"window": (300, 40)}),
    "left only": ((1, 900, 1000, 2, 2, 64), {"window": (200, None)}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["centred", "positive"])
@pytest.mark.parametrize(("shape", "rule"), GPU_CASES.values(), ids=GPU_CASES.keys())
def test_hopper_stays_within_its_format(shape, rule, kind):
    q, k, v = (x.cuda() for x in _inputs(shape))
    if kind == "positive":  # sums of one sign show what an accumulator of few bits loses
        v = v.abs()
    o, lse = attention_fp8(q, k, v, return_lse=True, backend="gluon", **rule)
    assert_within_format(o, lse, dequantised_truth(q, k, v, **rule))


# (queries, keys) of each sequence
LENGTHS = ((100, 100), (0, 5), (7, 0), (1, 1), (230, 40), (193, 193), (64, 300))
PACKED_RULES = {
    "full": {},
    "causal": {"causal": True},
    "window, both": {"window": (100, 20), "softcap": 4.0, "sinks": True},
}


def _packed(
    lengths: Sequence[tuple[int, int]], heads: tuple[int, int], head_dim: int, device: str = "cpu"
) -> tuple[list[Tensor], dict[str, Any]]:
    """Draw packed tensors of sequences that differ in size, with rows of none behind them."""
    cu_q, cu_k = (starts([pair[i] for pair in lengths], device) for i in (0, 1))
    rows = (int(cu_q[-1]) + 3, int(cu_k[-1]) + 3)
    q, k, v = (x[0] for x in make_qkv(1, *rows, *heads, head_dim, dtype=torch.bfloat16))
    inputs = []
    for x, cu in ((q, cu_q), (k, cu_k), (v, cu_k)):
        size = torch.exp2(torch.arange(len(lengths) + 1) % 3 - 1.0)
        inputs.append((x * size[fp8.sequence_of_rows(cu.cpu(), len(x)), None, None]).to(x))
    longest = [max(pair[i] for pair in lengths) for i in (0, 1)]
    where = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k}
    where |= {"max_seqlen_q": longest[0], "max_seqlen_k": longest[1]}
    return [x.to(device) for x in inputs], where


def _rule(rule: dict[str, Any], heads: int, device: str = "cpu") -> dict[str, Any]:
    if "sinks" not in rule:
        return dict(rule)
    return rule | {"sinks": torch.linspace(-2.0, 9.0, heads, device=device)}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
@pytest.mark.parametrize("rule", PACKED_RULES.values(), ids=PACKED_RULES)
def test_packed_sequences_are_as_if_alone(rule, per_token, backend):
    (q, k, v), where = _packed(LENGTHS, (4, 2), 64)
    rule = _rule(rule, 4)
    for x in (q, k, v):
        x[-3:] = torch.nan  # rows of no sequence
    options = {"per_token": per_token, "backend": backend, "return_lse": True}
    o, lse = attention_fp8(q, k, v, **where, **rule, **options)
    edges = zip(*(pairwise(where[name].tolist()) for name in list(where)[:2]), strict=True)
    for rows, keys in ((slice(*pair) for pair in both) for both in edges):
        alone, lse_alone = attention_fp8(
            q[None, rows], k[None, keys], v[None, keys], **rule, **options
        )
        torch.testing.assert_close(o[rows], alone[0], rtol=2e-2, atol=2e-3)
        torch.testing.assert_close(lse[:, rows], lse_alone[0], rtol=1e-5, atol=1e-5)
    assert not bool(o[-3:].any())
    assert bool((lse[:, -3:] == -torch.inf).all())


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
def test_packed_sequences_may_be_quantised_before(per_token, backend):
    (q, k, v), where = _packed(LENGTHS, (4, 2), 64)
    quantised = {}
    for name, x, cu in (("q", q, "q"), ("k", k, "k"), ("v", v, "k")):
        edges = {"cu_seqlens": where[f"cu_seqlens_{cu}"], "max_seqlen": where[f"max_seqlen_{cu}"]}
        if per_token and name != "v":
            quantised[name] = quantize_tokens(x, rotation=5)
            assert quantised[name][1].shape == (1, x.shape[1], x.shape[0])
        else:
            rotation = None if name == "v" else 5
            quantised[name] = quantize_heads(x, rotation=rotation, **edges)
            assert quantised[name][1].shape == (len(LENGTHS), x.shape[1])
            assert not bool(quantised[name][0][-3:].float().any())
    scales = {f"{name}_scale": scale for name, (_, scale) in quantised.items()}
    got = attention_fp8(*(x for x, _ in quantised.values()), **scales, **where, backend=backend)
    want = attention_fp8(
        q, k, v, rotate=True, seed=5, per_token=per_token, **where, backend=backend
    )
    assert torch.equal(got, want)


def test_packed_keys_are_smoothed_sequence_by_sequence():
    (q, k, v), where = _packed(((48, 160), (3, 40), (5, 0)), (4, 2), 64)
    sequence = fp8.sequence_of_rows(where["cu_seqlens_k"], len(k))
    k = k + (8 * torch.randn(4, 2, 64))[sequence].bfloat16()
    k[-3:] = torch.nan
    o, lse = attention_fp8(q, k, v, smooth_k=True, return_lse=True, **where)
    for rows, keys in ((slice(0, 48), slice(0, 160)), (slice(48, 51), slice(160, 200))):
        alone, lse_alone = attention_fp8(
            q[None, rows], k[None, keys], v[None, keys], smooth_k=True, return_lse=True
        )
        torch.testing.assert_close(o[rows], alone[0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse[:, rows], lse_alone[0], rtol=1e-3, atol=1e-3)


def test_packed_arguments_are_checked():
    (q, k, v), where = _packed(((4, 6), (3, 2)), (2, 2), 64)
    with pytest.raises(ValueError, match=r"q must be \(B, S, H, D\)"):
        attention_fp8(q, k, v)
    with pytest.raises(TypeError, match="cu_seqlens_k must be of type Tensor"):
        attention_fp8(q, k, v, **(where | {"cu_seqlens_k": None}))
    with pytest.raises(ValueError, match="seqlens_k must be None for packed"):
        attention_fp8(q, k, v, seqlens_k=torch.ones(2, dtype=torch.int32), **where)
    with pytest.raises(ValueError, match="max_seqlen_q must be at least 0, got -1"):
        attention_fp8(q, k, v, **(where | {"max_seqlen_q": -1}))
    x8, scale = quantize_heads(q, cu_seqlens=where["cu_seqlens_q"], max_seqlen=4)
    with pytest.raises(ValueError, match=r"k_scale must have shape \(2, 2\)"):
        attention_fp8(x8, x8, x8, q_scale=scale, k_scale=scale[:1], v_scale=scale, **where)
    _, scale = quantize_tokens(q)
    with pytest.raises(ValueError, match=r"k_scale must have shape \(1, 2, 11\)"):
        attention_fp8(
            x8, x8.repeat(2, 1, 1)[:11], x8.repeat(2, 1, 1)[:11], q_scale=scale, k_scale=scale,
            v_scale=scale[0, :, :2], **where,
        )  # fmt: skip
    with pytest.raises(ValueError, match="max_seqlen must be at least 0, got -1"):
        quantize_heads(q, cu_seqlens=where["cu_seqlens_q"])
    with pytest.raises(ValueError, match="seqlens must be None for packed"):
        quantize_tokens(q, seqlens=torch.ones(2, dtype=torch.int32))


def test_a_compiled_packed_call_has_no_graph_break():
    (q, k, v), where = _packed(((4, 6), (3, 2)), (2, 2), 64)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_fp8(q, k, v, smooth_k=True, causal=True, **where)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), call(q, k, v))


ADDED = {
    "cap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "both": {"softcap": 20.0, "sinks": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
@pytest.mark.parametrize(("shape", "rule"), GPU_CASES.values(), ids=GPU_CASES.keys())
def test_hopper_caps_logits_and_has_sinks(shape, rule, per_token, added):
    q, k, v = (x.cuda() for x in _inputs(shape))
    given = dict(rule) | added
    if "sinks" in given:
        given["sinks"] = torch.linspace(-2.0, 9.0, shape[3], device="cuda")
    options = {"per_token": per_token, "backend": "gluon"}
    o, lse = attention_fp8(q, k, v, return_lse=True, **options, **given)
    assert_within_format(o, lse, dequantised_truth(q, k, v, per_token=per_token, **given))


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gluon", "triton"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
@pytest.mark.parametrize("rule", PACKED_RULES.values(), ids=PACKED_RULES)
def test_packed_sequences_on_a_gpu(rule, per_token, head_dim, backend):
    (q, k, v), where = _packed(LENGTHS, (4, 2), head_dim, "cuda")
    rule = _rule(rule, 4, "cuda")
    edges = (where["cu_seqlens_q"], where["cu_seqlens_k"])
    truth = packed_truth(q, k, v, *edges, per_token=per_token, **rule)
    for x in (q, k, v):
        x[-3:] = torch.nan
    options = {"per_token": per_token, "backend": backend}
    o, lse = attention_fp8(q, k, v, return_lse=True, **where, **rule, **options)
    assert_within_format(o, lse, truth)
    again, _ = attention_fp8(q, k, v, return_lse=True, **where, **rule, **options)
    assert torch.equal(o, again)


def _mask(heads: int, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Draw what a mask of empty, full and random tiles shows, and a row that sees nothing."""
    g = torch.Generator().manual_seed(5)
    kinds = torch.randint(0, 3, (1, heads, seqlen_q // 128 + 1, seqlen_k // 128 + 1), generator=g)
    kinds = kinds.repeat_interleave(128, 2).repeat_interleave(128, 3)
    kinds = kinds[:, :, :seqlen_q, :seqlen_k]
    visible = (kinds == 1) | ((kinds == 2) & (torch.rand(kinds.shape, generator=g) < 0.4))
    visible[:, :, seqlen_q // 2] = False
    return visible


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
@pytest.mark.parametrize("rule", PACKED_RULES.values(), ids=PACKED_RULES)
@pytest.mark.parametrize("lengths", [None, (700, 33)], ids=["whole", "lengths"])
def test_masks_hide_keys_on_hopper(lengths, rule, per_token, head_dim):
    q, k, v = (x.cuda() for x in _inputs((2, 600, 700, 4, 2, head_dim)))
    rule, visible = _rule(rule, 4, "cuda"), _mask(4, 600, 700).cuda()
    if lengths is not None:
        rule["seqlens_k"] = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    options = {"per_token": per_token, "backend": "gluon", "mask": masks.dense(visible)}
    o, lse = attention_fp8(q, k, v, return_lse=True, **rule, **options)
    truth = dequantised_truth(q, k, v, per_token=per_token, mask=visible, **rule)
    assert_within_format(o, lse, truth)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("rule", PACKED_RULES.values(), ids=PACKED_RULES)
def test_packed_sequences_have_masks_on_hopper(rule, head_dim):
    (q, k, v), where = _packed(LENGTHS, (4, 2), head_dim, "cuda")
    rule, visible = _rule(rule, 4, "cuda"), _mask(4, 230, 300).cuda()
    o, lse = attention_fp8(
        q, k, v, return_lse=True, backend="gluon", mask=masks.dense(visible), **where, **rule
    )
    edges = (where["cu_seqlens_q"], where["cu_seqlens_k"])
    assert_within_format(o, lse, packed_truth(q, k, v, *edges, mask=visible, **rule))


@pytest.mark.gpu
@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
def test_packed_sequences_do_not_feel_one_another(per_token):
    (q, k, v), where = _packed(((90, 90), (200, 200), (33, 33)), (4, 2), 128, "cuda")
    rule = {"causal": True, "per_token": per_token, "backend": "gluon"} | where
    want = attention_fp8(q, k, v, **rule)
    for x in (q, k, v):
        x[90:290] = torch.nan
    got = attention_fp8(q, k, v, **rule)
    assert torch.equal(got[:90], want[:90])
    assert torch.equal(got[290:], want[290:])


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_the_gpu_quantises_packed_sequences_like_the_rule(head_dim):
    (q, _, _), where = _packed(LENGTHS, (4, 2), head_dim, "cuda")
    edges = where["cu_seqlens_q"]
    x8, scale = quantize_heads(q, cu_seqlens=edges, max_seqlen=where["max_seqlen_q"])
    want, scale_want = fp8.quantize_heads(q, cu_seqlens=edges)
    assert torch.equal(x8.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale, scale_want)
    x8, scale = quantize_tokens(q)
    want, scale_want = fp8.quantize_tokens(q)
    assert torch.equal(x8.view(torch.uint8), want.view(torch.uint8))
    assert torch.equal(scale, scale_want)


@pytest.mark.gpu
def test_packed_e4m3_tensors_give_the_same_on_a_gpu():
    (q, k, v), where = _packed(LENGTHS, (4, 2), 128, "cuda")
    parts = {}
    for name, x, cu in (("q", q, "q"), ("k", k, "k"), ("v", v, "k")):
        edges = {"cu_seqlens": where[f"cu_seqlens_{cu}"], "max_seqlen": where[f"max_seqlen_{cu}"]}
        parts[name] = quantize_heads(x, **edges)
    scales = {f"{name}_scale": scale for name, (_, scale) in parts.items()}
    rule = {"causal": True, "backend": "gluon"} | where
    got = attention_fp8(*(x for x, _ in parts.values()), **scales, **rule)
    assert torch.equal(got, attention_fp8(q, k, v, **rule))


@pytest.mark.gpu
def test_hopper_gives_sinks_to_rows_without_keys():
    q, k, v = (x.cuda() for x in _inputs((3, 90, 300, 4, 2, 128)))
    lengths = torch.tensor([300, 1, 0], dtype=torch.int32, device="cuda")
    sinks = torch.linspace(-2.0, 9.0, 4, device="cuda")
    rule = {"causal": True, "softcap": 5.0, "sinks": sinks, "seqlens_k": lengths}
    o, lse = attention_fp8(q, k, v, return_lse=True, backend="gluon", **rule)
    assert_within_format(o, lse, dequantised_truth(q, k, v, **rule))
    assert not bool(o[2].any())
    torch.testing.assert_close(lse[2], sinks[:, None].expand(4, 90))


@pytest.mark.gpu
def test_hopper_gives_every_sequence_its_own_length():
    q, k, v = (x.cuda() for x in _inputs((3, 300, 700, 4, 2, 128)))
    lengths = torch.tensor([650, 33, 0], dtype=torch.int32, device="cuda")
    want = attention_fp8(q, k, v, causal=True, seqlens_k=lengths, backend="gluon")
    for b, length in enumerate(lengths.tolist()):
        k[b, length:], v[b, length:] = float("nan"), float("nan")
    rule = {"causal": True, "seqlens_k": lengths}
    o, lse = attention_fp8(q, k, v, return_lse=True, backend="gluon", **rule)
    assert torch.equal(o, want)
    k, v = k.nan_to_num(0.0), v.nan_to_num(0.0)
    assert_within_format(o, lse, dequantised_truth(q, k, v, **rule))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_hopper_reads_e4m3_as_it_writes_it(head_dim):
    q, k, v = (x.cuda() for x in _inputs((2, 333, 555, 4, 2, head_dim)))
    lengths = torch.tensor([555, 77], dtype=torch.int32, device="cuda")
    q8, q_scale = quantize_heads(q)
    (k8, k_scale), (v8, v_scale) = (quantize_heads(x, seqlens=lengths) for x in (k, v))
    k8.view(torch.uint8)[1, 77:] = 0x7F  # NaN
    v8.view(torch.uint8)[1, 77:] = 0x7F
    rule = {"causal": True, "seqlens_k": lengths, "backend": "gluon"}
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    assert torch.equal(attention_fp8(q8, k8, v8, **scales, **rule), attention_fp8(q, k, v, **rule))


@pytest.mark.gpu
def test_hopper_replays_and_repeats_bit_for_bit():
    q, k, v = (x.cuda() for x in _inputs((1, 1000, 1000, 4, 4, 128)))
    want = attention_fp8(q, k, v, causal=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention_fp8(q, k, v, causal=True)
    for _ in range(3):
        graph.replay()
        assert torch.equal(o, want)
        assert torch.equal(attention_fp8(q, k, v, causal=True), want)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_the_gpu_quantises_bit_for_bit_like_the_rule(head_dim, dtype):
    x = torch.randn(2, 333, 3, head_dim, device="cuda").to(dtype)
    lengths = torch.tensor([333, 40], dtype=torch.int32, device="cuda")
    x[0, :, 1] = 0.0
    for seqlens in (None, lengths):
        x8, scale = quantize_heads(x, seqlens=seqlens)
        want, scale_want = fp8.quantize_heads(x, seqlens=seqlens)
        assert torch.equal(x8.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(scale, scale_want)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 128, 256])
def test_the_gpu_rotates_like_the_rule(head_dim):
    x = torch.randn(1, 300, 2, head_dim, device="cuda", dtype=torch.bfloat16)
    x8, scale = quantize_heads(x, rotation=9)
    want, scale_want = fp8.quantize_heads(x, rotation=9)
    torch.testing.assert_close(scale, scale_want, rtol=1e-5, atol=0)
    # Sums of float32 in another order may fall on the other side of a rounding.
    assert (x8.view(torch.uint8) != want.view(torch.uint8)).float().mean() < 1e-3


@pytest.mark.gpu
def test_the_portable_kernels_agree_with_hoppers():
    q, k, v = (x.cuda() for x in _inputs((2, 200, 300, 4, 2, 128)))
    o, lse = attention_fp8(q, k, v, causal=True, return_lse=True, backend="triton")
    assert_within_format(o, lse, dequantised_truth(q, k, v, causal=True))
