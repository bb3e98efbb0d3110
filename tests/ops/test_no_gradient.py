"""Ops without derivatives say so: a gradient that would end there unseen is an error."""

from __future__ import annotations

import pytest
import torch
from torch import func
from torch.autograd import forward_ad

from tilewise import ops
from tilewise.errors import UnsupportedError


def _paged(x: torch.Tensor) -> torch.Tensor:
    caches = torch.randn(4, 16, 2, 64)
    return ops.paged_attention(
        x, caches, caches, block_table=torch.tensor([[1]], dtype=torch.int32),
        seqlens_k=torch.tensor([4], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32), max_seqlen_q=4,
    )  # fmt: skip


def _latents(x: torch.Tensor) -> torch.Tensor:
    return ops.mla_decode(
        x, x[..., :16], torch.randn(4, 16, 80), block_table=torch.tensor([[1]], dtype=torch.int32),
        seqlens_k=torch.tensor([4], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 4], dtype=torch.int32), max_seqlen_q=4, softmax_scale=0.1,
    )  # fmt: skip


def _linear(x: torch.Tensor) -> torch.Tensor:
    return ops.linear(x, torch.ones(8, 64), backend="reference")


CALLS = {
    "paged_attention": _paged,
    "mla_decode": _latents,
    "rms_norm": lambda x: ops.rms_norm(x, torch.ones(64), 1e-6),
    "add_rms_norm": lambda x: ops.add_rms_norm(x, torch.ones(4, 2, 64), torch.ones(64), 1e-6)[0],
    "gated_mul": lambda x: ops.gated_mul(x, function="gelu"),
    "activate": lambda x: ops.activate(x, "gelu"),
    "linear": _linear,
}


def _given() -> torch.Tensor:
    return torch.randn(4, 2, 64)


@pytest.mark.parametrize("name", CALLS)
def test_a_gradient_is_refused_where_it_would_end(name):
    y = CALLS[name](_given().requires_grad_())
    assert y.requires_grad  # the call itself is none of an error: who reads y alone may go on
    with pytest.raises(UnsupportedError, match=f"{name} must be called under torch.no_grad"):
        y.sum().backward()
    with torch.no_grad():
        assert not CALLS[name](_given().requires_grad_()).requires_grad


def test_a_weight_that_learns_is_refused_too():
    weight = torch.ones(64, requires_grad=True)
    rows = weight.expand(8, 64).contiguous()
    for y in (
        ops.rms_norm(_given(), weight, 1e-6),
        ops.linear(_given(), rows, backend="reference"),
    ):
        with pytest.raises(UnsupportedError, match="has no gradient"):
            y.sum().backward()


@pytest.mark.parametrize("name", CALLS)
def test_tangents_are_refused(name):
    with forward_ad.dual_level():
        x = forward_ad.make_dual(_given(), _given())
        with pytest.raises(UnsupportedError, match=f"{name} must not be given dual numbers"):
            CALLS[name](x)
    with pytest.raises(UnsupportedError, match="dual numbers"):
        func.jvp(CALLS[name], (_given(),), (_given(),))
    with pytest.raises(UnsupportedError, match="has no gradient"):
        func.grad(lambda x: CALLS[name](x).sum())(_given())


def test_8_bits_refuse_tangents():
    q = torch.randn(1, 16, 2, 64).bfloat16()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="dual numbers"):
        ops.attention_fp8(forward_ad.make_dual(q, torch.ones_like(q)), q, q)
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="dual numbers"):
        ops.quantize_heads(forward_ad.make_dual(q, torch.ones_like(q)))


def test_who_compiles_with_gradients_on_may_still_call_it():
    """The compiler asks for all gradients that there could be, wanted or not."""
    compiled = torch.compile(lambda x: 2 * _paged(x), backend="aot_eager", fullgraph=True)
    torch.manual_seed(0)
    y = compiled(_given().requires_grad_())
    assert y.shape == (4, 2, 64)
    assert y.isfinite().all()
