"""Logits as large as floats hold, by products, biases and sinks: o and gradients are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewise import (
    attention,
    attention_fp8,
    attention_varlen,
    mla_decode,
    paged_attention,
    quantize_heads,
    quantize_tokens,
)
from tilewise.kernels import device
from tilewise.reference import fp8
from tilewise.reference.mla import dequantise_latents

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
DTYPES = [BF16, F16, F32, F64]
EPS = {BF16: 2e-2, F16: 3e-3, F32: 3e-5, F64: 1e-12}
LARGEST = {BF16: 1e15, F16: 6e4, F32: 1e15, F64: 1e100}  # of q and k: their product is a number


@pytest.fixture(params=["cpu", "triton"])
def backend(request: pytest.FixtureRequest, products_in_order: None) -> str:
    """Triton's kernels run in the interpreter, with one order of a product's sum, as on a GPU."""
    if request.param == "triton":
        pytest.importorskip("triton")
        if not device.interpreting():
            pytest.skip("the interpreter is off")
    return str(request.param)


def draw(dtype: torch.dtype, *shape: int, size: float = 1.0) -> Tensor:
    x = torch.randn(shape, dtype=F64) * size
    return (x.clamp(-6e4, 6e4) if dtype == F16 else x).to(dtype)


def truth(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, causal: bool = False,
    scale: float | None = None, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Softmax in float64, of (B, S, H, D) with as many heads of keys or fewer."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    s = s if bias is None else s + bias
    if alibi_slopes is not None:
        rows, keys = s.shape[-2:]
        distance = torch.arange(rows, device=s.device)[:, None] + keys - rows
        distance = (distance - torch.arange(keys, device=s.device)).abs()
        s = s - alibi_slopes[:, None, None] * distance
    if causal:
        hidden = torch.ones_like(s[0, 0], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
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


def rows(few: list[Any], more: list[Any]) -> list[Any]:
    """Parameters of every day, and those of the slow form."""
    return few + [pytest.param(each, marks=pytest.mark.slow) for each in more]


# Of numbers of q and k, in which logits are quadratic.
SIZES = rows([3e4, 1e11], [1e2, 3e5, 1e7, 1e15])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", rows(DTYPES[:3], [F64]), ids=str)
def test_of_products(dtype: torch.dtype, size: float, backend: str) -> None:
    """Each row is the value of its largest key, over one tile of keys and over several."""
    if size > LARGEST[dtype]:
        pytest.skip("beyond the numbers of this dtype")
    scale = 64**-0.5 if dtype != F16 or size < 1e4 else 1.0
    for queries, keys in ((3, 1), (1, 40), (70, 300)):
        q, k = draw(dtype, 1, queries, 2, 64, size=size), draw(dtype, 1, keys, 1, 64, size=size)
        check(q, k, draw(dtype, 1, keys, 1, 64), backend, causal=1 < queries <= keys, scale=scale)


@pytest.mark.parametrize("fill", rows([-1e10, 1e30], [-1e4, -1e20, -1e32]))
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_of_a_bias(dtype: torch.dtype, fill: float, backend: str) -> None:
    """Keys that it hides come before those that a row sees, behind them or between; or win."""
    fill = max(fill, float(torch.finfo(dtype).min)) if fill < 0 else fill
    hidden = {"left": slice(0, 96), "right": slice(50, 160), "between": slice(40, 90)}
    if fill > 0:
        hidden = {"one": slice(70, 71)} if dtype != F16 else {}
    for columns in hidden.values():
        q, k, v = draw(dtype, 1, 5, 2, 64), draw(dtype, 1, 160, 2, 64), draw(dtype, 1, 160, 2, 64)
        bias = torch.zeros(1, 1, 5, 160, dtype=dtype)
        bias[..., columns] = fill
        check(q, k, v, backend, bias=bias)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_a_row_that_a_finite_bias_hides_whole_is_the_mean(dtype: torch.dtype, backend: str) -> None:
    q, k, v = (draw(dtype, 1, rows, 2, 64).requires_grad_() for rows in (3, 100, 100))
    bias = torch.zeros(1, 1, 3, 100, dtype=dtype)
    bias[..., 1, :] = -1e30
    o = attention(q, k, v, bias=bias, backend=backend)
    mean = v.double().mean(1)
    torch.testing.assert_close(o[:, 1].double(), mean, rtol=EPS[dtype], atol=EPS[dtype])
    for x in torch.autograd.grad(o.sum(), (q, k, v)):
        assert x.isfinite().all()


@pytest.mark.parametrize("sink", rows([-1e30, 1e6], [-1e6, 1e30]))
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_of_sinks(dtype: torch.dtype, sink: float, backend: str) -> None:
    q, k, v = draw(dtype, 1, 5, 2, 64), draw(dtype, 1, 70, 2, 64), draw(dtype, 1, 70, 2, 64)
    check(q, k, v, backend, sinks=torch.tensor([sink, 0.5]))
    check(q * 1e3, k * 1e3, v, backend, sinks=torch.tensor([sink, 0.5]))


@pytest.mark.parametrize("slope", rows([1e9], [0.3, 1e20]))
@pytest.mark.parametrize("dtype", rows([BF16], [F16, F32]), ids=str)
def test_of_alibi(dtype: torch.dtype, slope: float, backend: str) -> None:
    """Steep slopes alone, and beside large products."""
    slopes = torch.tensor([slope, slope / 3])
    for size in (1.0, 1e4):
        q, k = draw(dtype, 1, 70, 2, 64, size=size), draw(dtype, 1, 150, 2, 64, size=size)
        check(q, k, draw(dtype, 1, 150, 2, 64), backend, alibi_slopes=slopes, causal=True)


@pytest.mark.parametrize("per_token", [False, True], ids=["heads", "tokens"])
@pytest.mark.parametrize("size", rows([1e5], [6e3, 1e14]))
def test_of_tensors_of_8_bits(size: float, per_token: bool) -> None:
    q, k, v = (draw(BF16, 1, 130, 2, 64) for _ in range(3))
    hold_8_bits(q * size, k * size, v, per_token, "cpu")


def hold_8_bits(q: Tensor, k: Tensor, v: Tensor, per_token: bool, backend: str) -> None:
    """Hold rows to the values of their largest keys, where these are far above all others.

    Tensor cores add products of e4m3 in some 14 bits, and portable kernels multiply numbers that
    are rounded to 16 bits: keys that are nearer to each other may change places.
    """
    quantize = quantize_tokens if per_token else quantize_heads
    doubles = [
        fp8.dequantize_heads(*cut(x))
        for x, cut in ((q, quantize), (k, quantize), (v, quantize_heads))
    ]
    o = attention_fp8(q, k, v, causal=True, per_token=per_token, backend=backend)
    products = torch.einsum("bqhd,bkhd->bqhk", *(x.double() for x in doubles[:2]))
    ahead = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(1)
    best = products.masked_fill(ahead[:, None], -torch.inf).topk(2, -1).values
    near = products.abs().amax(-1) * 2.0 ** (-8 if backend == "triton" else -11)
    is_far = best[..., 0] - best[..., 1] > near
    assert is_far.double().mean() > 0.9
    right = truth(*doubles, causal=True)
    assert o.isfinite().all()
    torch.testing.assert_close(o.double()[is_far], right[is_far], rtol=1e-2, atol=2e-2)


ON_A_GPU: dict[str, dict[str, Any]] = {
    "products": {"size": 3e5},
    "far products": {"size": 1e12},
    "hidden": {"bias": -1e30},
    "alibi": {"size": 3e5, "slope": 0.3},
    "steep": {"slope": 1e9},
    "steep, products": {"size": 1e6, "slope": 1e9},
    "e4m3": {"size": 6e3, "per_token": False},
    "e4m3 of tokens": {"size": 1e8, "per_token": True},
}


@pytest.mark.gpu
@pytest.mark.parametrize("gpu_backend", ["gluon", "triton"])
@pytest.mark.parametrize("name", ON_A_GPU)
def test_o_on_a_gpu(name: str, gpu_backend: str) -> None:
    options = dict(ON_A_GPU[name])
    size = options.pop("size", 1.0)
    q, k = (draw(BF16, 1, 300, 2, 64, size=size).cuda() for _ in range(2))
    v = draw(BF16, 1, 300, 2, 64).cuda()
    if "per_token" in options:
        hold_8_bits(q, k, v, options["per_token"], gpu_backend)
        return
    given: dict[str, Any] = {"causal": True}
    if "bias" in options:
        given["bias"] = torch.zeros(1, 1, 300, 300, dtype=BF16, device="cuda")
        given["bias"][..., :150, :100] = options["bias"]
    if "slope" in options:
        given["alibi_slopes"] = torch.tensor([1.0, 0.3], device="cuda") * options["slope"]
    o, lse = attention(q, k, v, return_lse=True, backend=gpu_backend, **given)
    doubles = {n: x.double() if isinstance(x, Tensor) else x for n, x in given.items()}
    right = truth(q.double(), k.double(), v.double(), **doubles)
    assert lse.isfinite().all()
    torch.testing.assert_close(o.double(), right, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_of_packed_sequences(dtype: torch.dtype, backend: str) -> None:
    size = 3e5 if dtype != F16 else 2e4
    starts = torch.tensor([0, 1, 40, 40, 150], dtype=torch.int32)
    q, k = (draw(dtype, 150, 2, 64, size=size) for _ in range(2))
    v = draw(dtype, 150, 2, 64)
    o = attention_varlen(
        q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=110, max_seqlen_k=110,
        causal=True, backend=backend,
    )  # fmt: skip
    for first, end in ((0, 1), (1, 40), (40, 150)):
        q_, k_, v_ = (x[None, first:end].double() for x in (q, k, v))
        torch.testing.assert_close(
            o[None, first:end].double(), truth(q_, k_, v_, causal=True), rtol=1e-3, atol=1e-2
        )


@pytest.mark.parametrize("cache_dtype", rows([None, torch.int8], [torch.float8_e4m3fn]), ids=str)
@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_of_a_paged_cache(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, backend: str
) -> None:
    """One query and several of a sequence, whose keys lie in blocks; of 8 bits, by huge scales."""
    size, lengths = 3e5 if dtype != F16 else 2e4, [33, 61]
    q = draw(dtype, 34, 4, 64, size=size)
    k, v = draw(F32, 8, 16, 2, 64), draw(F32, 8, 16, 2, 64)
    scales: dict[str, Tensor] = {}
    if cache_dtype is None:
        k, v = draw(dtype, 8, 16, 2, 64, size=size), v.to(dtype)
        keys, values = k.double(), v.double()
    else:
        k, v = ((x * 40).clamp(-127, 127).to(cache_dtype) for x in (k, v))
        scales = {
            "k_scale": torch.rand(8, 16, 2) * size / 40,
            "v_scale": torch.full((8, 16, 2), 1 / 40),
        }
        keys, values = (
            x.double() * y.double()[..., None] for x, y in zip((k, v), scales.values(), strict=True)
        )
    table = torch.tensor([[3, 1, 2, 0], [4, 5, 6, 7]], dtype=torch.int32)
    o, lse = paged_attention(
        q, k, v, block_table=table, seqlens_k=torch.tensor(lengths, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1, 34], dtype=torch.int32), max_seqlen_q=33,
        return_lse=True, backend=backend, **scales,
    )  # fmt: skip
    assert lse.isfinite().all()
    for at, (first, end) in enumerate(((0, 1), (1, 34))):
        k_, v_ = (x[table[at].long()].flatten(0, 1)[None, : lengths[at]] for x in (keys, values))
        right = truth(q[None, first:end].double(), k_, v_, causal=True)
        torch.testing.assert_close(o[None, first:end].double(), right, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("size", rows([1e12], [1e3, 1e6]))
@pytest.mark.parametrize("cache_dtype", rows([None], [torch.int8, torch.float8_e4m3fn]), ids=str)
@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_of_latents(
    dtype: torch.dtype, cache_dtype: torch.dtype | None, size: float, backend: str
) -> None:
    q_latent, q_rope = draw(dtype, 9, 4, 64, size=size), draw(dtype, 9, 4, 32, size=size)
    scales: dict[str, Tensor] = {}
    if cache_dtype is None:
        cache = draw(dtype, 8, 16, 96, size=size)
        rows_of_cache = cache.double()
    else:
        cache = (draw(F32, 8, 16, 96) * 40).clamp(-127, 127).to(cache_dtype)
        scales = {"latent_scale": torch.rand(8, 16, 2) * size / 40}
        rows_of_cache = dequantise_latents(cache, scales["latent_scale"], 64, F64)
    table = torch.tensor([[3, 1, 2, 0], [4, 5, 6, 7]], dtype=torch.int32)
    o = mla_decode(
        q_latent, q_rope, cache, block_table=table, softmax_scale=0.13,
        seqlens_k=torch.tensor([50, 61], dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, 1, 9], dtype=torch.int32), max_seqlen_q=8, backend=backend,
        **scales,
    )  # fmt: skip
    q = torch.cat([q_latent, q_rope], -1).double()[None]
    for at, (first, end, length) in enumerate(((0, 1, 50), (1, 9, 61))):
        z = rows_of_cache[table[at].long()].flatten(0, 1)[None, :length, None]
        right = truth(q[:, first:end], z, z[..., :64], causal=True, scale=0.13)
        error = (o[None, first:end].double() - right).abs().amax(-1)
        if scales and dtype == BF16:  # keys are rounded to it: either of two close ones may win
            s = torch.einsum("bihd,bjxd->bhij", q[:, first:end], z)
            later = torch.ones_like(s[0, 0], dtype=torch.bool).triu(1 + length - (end - first))
            most = s.masked_fill(later, -torch.inf).topk(2).values.transpose(1, 2)
            error = error[most[..., 1] < most[..., 0] - 0.01 * most[..., 0].abs()]
            assert len(error) > 0
        assert error.max() <= EPS[dtype] * right.abs().max()
