"""Logits as large as floats hold, by products, by biases and by sinks: o and gradients are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import attention, attention_varlen, mla_decode, paged_attention
from tilewise.kernels import device

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [BF16, F16, F32, F64]
EPS = {BF16: 2e-2, F16: 3e-3, F32: 3e-5, F64: 1e-12}
LARGEST = {BF16: 1e15, F16: 6e4, F32: 1e15, F64: 1e100}  # of q and k: their product is a number


@pytest.fixture(params=["cpu", "triton"])
def backend(request: pytest.FixtureRequest) -> str:
    """Triton's kernels run in the interpreter."""
    if request.param == "triton":
        pytest.importorskip("triton")
        if not device.interpreting():
            pytest.skip("the interpreter is off")
    return str(request.param)


def draw(dtype: torch.dtype, *shape: int, size: float = 1.0) -> Tensor:
    return (torch.randn(shape, dtype=F64) * size).to(dtype)


def truth(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, causal: bool = False,
    scale: float | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax in float64, of (B, S, H, D) with as many heads of keys or fewer."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    if causal:
        hidden = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        s = s.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        s = torch.cat([s, sinks[None, :, None, None].expand(*s.shape[:3], 1)], -1)
    return torch.einsum("bhij,bjhd->bihd", s.softmax(-1)[..., : k.shape[1]], v)


def rounding(dtype: torch.dtype, q: Tensor, k: Tensor, scale: float | None) -> float:
    """How far what is computed in float32 may be off where two keys of a row are nearly level."""
    size = float(q.detach().double().norm(dim=-1).max() * k.detach().double().norm(dim=-1).max())
    size *= q.shape[-1] ** -0.5 if scale is None else scale
    return 0.0 if size > 1e7 else size * 2.0 ** (-52 if dtype == F64 else -22)


def check(q: Tensor, k: Tensor, v: Tensor, backend: str, **options: Any) -> None:
    """Hold o and the gradients of q, k, v to float64."""
    dtype = q.dtype
    if backend == "triton" and dtype == F64:
        pytest.skip("no float64 in these kernels")
    do = draw(dtype, *q.shape[:3], v.shape[-1])
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    given = {"softmax_scale" if name == "scale" else name: x for name, x in options.items()}
    o = attention(*leaves, backend=backend, **given)
    found = torch.autograd.grad(o, leaves, do)
    doubles = [x.double().requires_grad_() for x in (q, k, v)]
    tensors = {n: x.double() if isinstance(x, Tensor) else x for n, x in options.items()}
    right = truth(*doubles, **tensors)
    eps = EPS[dtype] + rounding(dtype, q, k, given.get("softmax_scale"))
    torch.testing.assert_close(o.double(), right, rtol=eps, atol=eps)
    expected = torch.autograd.grad(right, doubles, do.double())
    for name, x, y, other in zip("qkv", found, expected, (k, q, do), strict=True):
        # What rounding leaves of p (dp - delta) is multiplied by k, or q, which are large.
        bound = eps * max(float(x.abs().max()) for x in (y, 0.1 * other.detach(), y.new_ones(1)))
        assert (x.double() - y).abs().max() <= bound, name


SIZES = [1e2, 3e4, 3e5, 1e7, 1e11, 1e15]  # of numbers of q and k, in which logits are quadratic


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_products(dtype: torch.dtype, size: float, backend: str) -> None:
    """Each row is the value of its largest key, over one tile of keys and over several."""
    if size > LARGEST[dtype]:
        pytest.skip("beyond the numbers of this dtype")
    scale = 64**-0.5 if dtype != F16 or size < 1e4 else 1.0
    for queries, keys in ((3, 1), (1, 40), (70, 300)):
        q, k = draw(dtype, 1, queries, 2, 64, size=size), draw(dtype, 1, keys, 1, 64, size=size)
        if dtype == F16:
            q, k = q.clamp(-6e4, 6e4), k.clamp(-6e4, 6e4)
        check(q, k, draw(dtype, 1, keys, 1, 64), backend, causal=1 < queries <= keys, scale=scale)
