"""Scales of tokens in 8-bit attention: the rule, every backend against float64, and the gain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.gluon.fp8_oracle import assert_within_format, dequantised_truth
from tilewise import attention_fp8, quantize_heads, quantize_tokens
from tilewise.errors import UnsupportedError
from tilewise.ops.attention.arguments import AttentionSignature
from tilewise.reference import fp8, standard
from tilewise.testing import assert_within_budget, make_qkv


def uneven(*shape: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Draw q, k and v whose queries and keys differ in size from token to token."""
    torch.manual_seed(4)
    q, k, v = make_qkv(*shape, dtype=torch.float32)
    q, k = (x * torch.exp2(torch.randint(-5, 6, x.shape[:3]))[..., None] for x in (q, k))
    return [(x * (shape[-1] ** -0.25)).to(dtype) for x in (q, k)] + [v.to(dtype)]


def test_the_largest_channel_of_each_token_is_448() -> None:
    x = torch.randn(2, 9, 3, 16) * torch.exp2(torch.randint(-30, 30, (2, 9, 3, 1)))
    x[1, 4, 2] = 0.0
    x8, scale = quantize_tokens(x)
    assert scale.shape == (2, 3, 9)
    largest = x8.float().abs().amax(-1)
    assert (largest[0] == 448).all()
    assert largest[1, 4, 2] == 0
    assert scale[1, 2, 4] == 1
    back = x8.float() * scale.transpose(1, 2)[..., None]
    assert (
        (back - x).abs() <= 2.0**-4 * x.abs() + 2.0**-10 * scale.transpose(1, 2)[..., None]
    ).all()


def test_rows_past_a_length_are_zero_with_scale_one() -> None:
    x = torch.randn(2, 9, 3, 16)
    x[1, 5:] = torch.nan
    x8, scale = quantize_tokens(x, seqlens=torch.tensor([9, 5], dtype=torch.int32))
    assert not x8[1, 5:].float().any()
    assert (scale[1, :, 5:] == 1).all()
    assert torch.equal(x8[0].view(torch.uint8), quantize_tokens(x[:1])[0][0].view(torch.uint8))


CASES = {
    "square": ((2, 33, 33, 4, 4, 64), {}),
    "causal, grouped": ((1, 70, 70, 8, 2, 64), {"causal": True}),
    "window": ((1, 90, 100, 2, 2, 64), {"window": (9, 3)}),
    "softcap": ((1, 20, 30, 2, 2, 64), {"softcap": 5.0}),
    "lengths": ((2, 20, 40, 2, 1, 64), {"seqlens_k": torch.tensor([40, 7], dtype=torch.int32)}),
}


@pytest.mark.parametrize(("shape", "rule"), CASES.values(), ids=CASES)
def test_the_cpu_computes_the_rule(shape: tuple[int, ...], rule: dict[str, Any]) -> None:
    q, k, v = uneven(*shape)
    o, lse = attention_fp8(q, k, v, per_token=True, return_lse=True, backend="cpu", **rule)
    seqlens = rule.get("seqlens_k")
    wide = [
        fp8.dequantize_heads(*fp8.quantize_tokens(q)),
        fp8.dequantize_heads(*fp8.quantize_tokens(k, seqlens=seqlens)),
        fp8.dequantize_heads(*fp8.quantize_heads(v, seqlens=seqlens)),
    ]
    truth, lse_truth = standard.attention(*wide, return_lse=True, **rule)
    eager = standard.attention(*(x.to(q.dtype) for x in wide), **rule)
    assert_within_budget(o, truth, eager, name="o")
    torch.testing.assert_close(lse.double(), lse_truth, rtol=1e-5, atol=1e-5)
    of_reference = attention_fp8(q, k, v, per_token=True, backend="reference", **rule)
    assert_within_budget(of_reference, truth, eager, name="o")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("rotate", [False, True])
def test_tensors_quantised_before_give_the_same(backend: str, rotate: bool) -> None:
    q, k, v = uneven(2, 9, 14, 4, 2, 64)
    rotation = 7 if rotate else None
    (q8, q_scale), (k8, k_scale) = (quantize_tokens(x, rotation=rotation) for x in (q, k))
    v8, v_scale = quantize_heads(v)
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
    got = attention_fp8(q8, k8, v8, backend=backend, **scales)
    want = attention_fp8(q, k, v, per_token=True, rotate=rotate, seed=7, backend=backend)
    assert torch.equal(got, want)


def test_a_huge_token_takes_nothing_from_the_others() -> None:
    """With a scale a head they fall among the subnormal numbers, whose steps are coarse."""
    q, k, v = make_qkv(1, 60, 300, 2, 2, 64, dtype=torch.bfloat16)
    q = q.clone()
    q[:, 0] *= 2.0**17
    truth = standard.attention(q.double(), k.double(), v.double())[:, 1:]
    errors = []
    for per_token in (False, True):
        o = attention_fp8(q, k, v, per_token=per_token)[:, 1:]
        errors.append(float((o.double() - truth).norm() / truth.norm()))
    assert errors[1] < 0.1
    assert errors[0] > 0.2


def test_keys_may_be_smoothed_too() -> None:
    q, k, v = make_qkv(1, 20, 200, 2, 2, 64, dtype=torch.bfloat16)
    k = k + 16 * torch.randn(1, 1, 2, 64).bfloat16()
    truth, lse_truth = standard.attention(q.double(), k.double(), v.double(), return_lse=True)
    o, lse = attention_fp8(q, k, v, per_token=True, smooth_k=True, return_lse=True)
    rough = attention_fp8(q, k, v, per_token=True)
    assert (o.double() - truth).norm() < 0.3 * (rough.double() - truth).norm()
    torch.testing.assert_close(lse.double(), lse_truth, rtol=0.01, atol=0.1)


def test_wrong_arguments_are_refused() -> None:
    q, _, _ = uneven(1, 3, 3, 2, 2, 64)
    (x8, of_tokens), (_, of_heads) = quantize_tokens(q), quantize_heads(q)
    scales = {"q_scale": of_tokens, "k_scale": of_heads, "v_scale": of_heads}
    with pytest.raises(ValueError, match=r"k_scale must have shape \(1, 2, 3\)"):
        attention_fp8(x8, x8, x8, **scales)
    scales = {"q_scale": of_heads, "k_scale": of_tokens, "v_scale": of_heads}
    with pytest.raises(ValueError, match=r"k_scale must have shape \(1, 2\)"):
        attention_fp8(x8, x8, x8, **scales)
    scales = {"q_scale": of_tokens, "k_scale": of_tokens, "v_scale": of_tokens}
    with pytest.raises(ValueError, match=r"v_scale must have shape \(1, 2\)"):
        attention_fp8(x8, x8, x8, **scales)
    scales["v_scale"] = of_heads
    with pytest.raises(ValueError, match="per_token must be False with e4m3 tensors"):
        attention_fp8(x8, x8, x8, per_token=True, **scales)
    with pytest.raises(UnsupportedError, match="quantize_tokens must be called under"):
        quantize_tokens(q.requires_grad_())


def test_the_ops_are_opcheck_clean() -> None:
    q, k, v = uneven(1, 5, 9, 2, 2, 64)
    lengths = torch.tensor([7], dtype=torch.int32)
    torch.library.opcheck(torch.ops.tilewise.quantize_tokens.default, (k, lengths, 3))
    given = AttentionSignature(q, k, v, causal=True, backend="cpu", seqlens_k=lengths)
    options = given.bind().options
    given = (q, k, v, None, None, None, None, True, *options)
    torch.library.opcheck(torch.ops.tilewise.attention_fp8_fwd.default, given)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["gluon", "triton"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "rule", [{}, {"causal": True}, {"window": (150, 20)}, {"seqlens_k": (700, 33)}], ids=str
)
def test_on_a_gpu(backend: str, head_dim: int, rule: dict[str, Any]) -> None:
    q, k, v = uneven(2, 500, 700, 4, 2, head_dim)
    if "seqlens_k" in rule:
        rule = {"seqlens_k": torch.tensor(rule["seqlens_k"], dtype=torch.int32)}
    truth = dequantised_truth(q, k, v, per_token=True, **rule)
    on_gpu = {key: x.cuda() if isinstance(x, Tensor) else x for key, x in rule.items()}
    o, lse = attention_fp8(
        q.cuda(), k.cuda(), v.cuda(), per_token=True, return_lse=True, backend=backend, **on_gpu
    )
    assert_within_format(o.cpu(), lse.cpu(), truth)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 96])
@pytest.mark.parametrize("rotation", [None, 3])
def test_the_quantising_kernel_agrees_on_a_gpu(head_dim: int, rotation: int | None) -> None:
    if rotation is not None and head_dim == 96:
        pytest.skip("a rotated head dim is a power of two")
    q, _, _ = uneven(2, 333, 3, 4, 2, head_dim)
    x8, scale = quantize_tokens(q.cuda(), rotation=rotation)
    want, scale_want = fp8.quantize_tokens(q, rotation=rotation)
    torch.testing.assert_close(
        scale.cpu(), scale_want, rtol=1e-6 if rotation is None else 1e-3, atol=0
    )
    differ = (x8.cpu().view(torch.uint8) != want.view(torch.uint8)).float().mean()
    assert differ <= (0.0 if rotation is None else 1e-2)
