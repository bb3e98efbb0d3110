"""key_bias_channels: its bits are those of torch's operations, and its derivatives are right."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tilewise import ops

LEAST = -61440.0
KEYS = [torch.bool, torch.float32, torch.bfloat16, torch.float16, torch.float64]
on_each_kernel = pytest.mark.parametrize(
    "place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)], ids=["interpreted", "gpu"]
)
on_each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
# N, Sq, Sk, H, Hk, D
SHAPES = {
    "heads": (3, 5, 7, 4, 4, 32),
    "groups": (2, 40, 33, 4, 2, 24),
    "programs": (3, 90, 90, 4, 4, 32),  # several of each result
    "one": (1, 1, 1, 1, 1, 64),
    "odd": (2, 3, 5, 3, 3, 7),
    "even": (2, 3, 5, 1, 1, 20),
    "no_rows": (0, 4, 4, 2, 2, 32),
    "no_queries": (2, 0, 4, 2, 2, 32),
    "no_keys": (2, 4, 0, 2, 2, 32),
}


def draw(shape: str, dtype: torch.dtype, kind: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and biases of which some are clamped, infinite or no numbers."""
    rows, queries, keys, heads, key_heads, dim = SHAPES[shape]
    generator = torch.Generator().manual_seed(len(shape))
    q = torch.randn(rows, queries, heads, dim, generator=generator).to(dtype)
    k = torch.randn(rows, keys, key_heads, dim, generator=generator).to(dtype)
    bias = 30 * torch.randn(rows, keys, generator=generator)
    if kind == torch.bool:
        return q, k, bias > 0
    for place, value in enumerate((-1e9, LEAST, -math.inf, -6.2e4)):
        bias.flatten()[place::11] = value
    if bias.numel() > 20:
        bias[-1, -1], bias[-1, -2] = math.inf, math.nan
    return q, k, bias.to(kind)


def formula(q: Tensor, k: Tensor, keys: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return what the op is said to return, of tensors of a CPU."""
    power = next(2.0**n for n in range(-40, 40) if 2.0**n * scale >= 1)
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if keys.dtype == torch.bool:
        parts = [torch.zeros(keys.shape).masked_fill(~keys, LEAST).to(q.dtype)]
    else:
        left = keys.to(wide).clamp(min=LEAST) * (1 / torch.tensor(scale * power, dtype=wide))
        parts = []
        for _ in range(1 if q.dtype == wide else 3):
            parts.append(left.to(q.dtype))
            left = left - parts[-1].to(wide)
    wide_q, wide_k = (x.new_zeros(*x.shape[:-1], x.shape[-1] + 8) for x in (q, k))
    wide_q[..., :-8], wide_k[..., :-8] = q, k
    wide_q[..., -8:] = power
    for place, part in enumerate(parts):
        wide_k[..., k.shape[-1] + place] = part[..., None]
    return wide_q, wide_k


def assert_bits(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    """Hold both results to bits, in which a NaN is any NaN."""
    for x, y in zip(found, wanted, strict=True):
        assert x.is_contiguous()
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        x = x.cpu()
        assert torch.equal(x.isnan(), y.isnan())
        assert torch.equal(x.nan_to_num(0.5), y.nan_to_num(0.5))
        assert torch.equal(x.signbit()[~x.isnan()], y.signbit()[~y.isnan()])


@on_each_kernel
@on_each_dtype
@pytest.mark.parametrize("kind", KEYS, ids=str)
def test_each_kind_of_a_bias_has_the_bits_of_torchs_operations(kind, dtype, place):
    tensors = [x.to(place) for x in draw("heads", dtype, kind)]
    wanted = formula(*(x.cpu() for x in tensors), 32**-0.5)
    assert_bits(ops.key_bias_channels(*tensors, 32**-0.5, backend="triton"), wanted)
    assert_bits(ops.key_bias_channels(*tensors, 32**-0.5, backend="reference"), wanted)


@on_each_kernel
@pytest.mark.parametrize("kind", [torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_has_the_bits_of_torchs_operations(shape, kind, place):
    tensors = draw(shape, torch.bfloat16, kind)
    for scale in (32**-0.5, 0.5, 3.0):
        wanted = formula(*tensors, scale)
        given = [x.to(place) for x in tensors]
        assert_bits(ops.key_bias_channels(*given, scale, backend="triton"), wanted)
        assert_bits(ops.key_bias_channels(*given, scale, backend="reference"), wanted)


def strided(x: Tensor, way: str) -> Tensor:
    """Return x (N, S, H, D) with other strides."""
    if way == "heads_first":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if way == "apart":  # with others between, an odd number of them behind each row
        return torch.nn.functional.pad(x, (3, 4))[..., 3:-4]
    if way == "channels_first":
        return x.transpose(1, 3).contiguous().transpose(1, 3)
    return x[:, :, :1].expand(x.shape)  # one head for all


@on_each_kernel
@pytest.mark.parametrize("way", ["heads_first", "apart", "channels_first", "one_head"])
def test_any_strides_are_read_in_place(way, place):
    q, k, keys = draw("heads", torch.bfloat16, torch.float32)
    q, k = strided(q, way), strided(k, way)
    keys = keys.t().contiguous().t()
    wanted = formula(q, k, keys, 0.3)
    # A copy to another device would change strides.
    given = [
        torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=place) for x in (q, k, keys)
    ]
    for x, y in zip(given, (q, k, keys), strict=True):
        if way == "one_head" and x.dim() == 4:
            x[:, :, 0] = y[:, :, 0].to(place)
        else:
            x.copy_(y)
    assert_bits(ops.key_bias_channels(*given, 0.3, backend="triton"), wanted)


@on_each_kernel
def test_rows_may_be_further_apart_than_integers_of_32_bits_count(place):
    q, k, keys = (x.to(place) for x in draw("heads", torch.bfloat16, torch.float32))
    apart = torch.empty(2**31 + q[0].numel(), dtype=q.dtype, device=place)  # 4 GiB, hardly touched
    apart = apart.as_strided(q[:2].shape, (2**31, *q.stride()[1:])).copy_(q[:2])
    wanted = formula(q[:2].cpu(), k[:2].cpu(), keys[:2].cpu(), 0.3)
    assert_bits(ops.key_bias_channels(apart, k[:2], keys[:2], 0.3, backend="triton"), wanted)


def test_a_cpu_and_float64_have_torchs_operations():
    q, k, keys = draw("heads", torch.float64, torch.float64)
    assert_bits(ops.key_bias_channels(q, k, keys, 0.3), formula(q, k, keys, 0.3))


@on_each_kernel
@pytest.mark.parametrize("backend", ["triton", "reference"])
@on_each_dtype
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_gradients_are_those_of_float64(kind, dtype, backend, place):
    q, k, _ = draw("groups", dtype, kind)
    generator = torch.Generator().manual_seed(1)
    keys = (30 * torch.randn(k.shape[:2], generator=generator)).to(kind)
    keys[0, 3], keys[1, 2] = -1e9, LEAST
    scale = 0.3
    leaves = [x.to(place).requires_grad_() for x in (q, k, keys)]
    results = ops.key_bias_channels(*leaves, scale, backend=backend)
    grads = [torch.randn(x.shape, generator=generator).to(dtype) for x in results]
    dq, dk, dkeys = torch.autograd.grad(results, leaves, [x.to(place) for x in grads])
    assert torch.equal(dq.cpu(), grads[0][..., :-8])
    assert torch.equal(dk.cpu(), grads[1][..., :-8])
    wide = keys.double().requires_grad_()
    first = wide.clamp(min=LEAST)[..., None] / (scale * 4.0)
    (truth,) = torch.autograd.grad(first, wide, grads[1][..., -8].double().sum(2, keepdim=True))
    assert dkeys.dtype == kind
    assert float(dkeys[0, 3]) == 0.0 != float(dkeys[1, 2])
    eps = torch.finfo(kind).eps
    torch.testing.assert_close(dkeys.cpu().double(), truth, rtol=2 * eps, atol=1e-6)


def test_a_gradient_of_q_and_k_is_a_view():
    q, k, keys = draw("heads", torch.float32, torch.bool)
    seen = []
    q, k = q.requires_grad_(), k.requires_grad_()
    wide = ops.key_bias_channels(q, k, keys, 0.3, backend="triton")
    for x in (*wide, q, k):
        x.register_hook(seen.append)
    torch.autograd.grad(wide, (q, k), [torch.ones_like(x) for x in wide])
    addresses = [x.untyped_storage().data_ptr() for x in seen]
    assert len(addresses) == 4
    assert len(set(addresses)) == 2


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_derivatives_of_every_mode_are_those_of_the_formula(backend):
    q, k, _ = draw("odd", torch.float32, torch.bool)
    keys = torch.linspace(-3, 3, 10).view(2, 5)
    keys[1, 1] = -1e6

    def ours(q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
        wide_q, wide_k = ops.key_bias_channels(q, k, keys, 0.3, backend=backend)
        return torch.einsum("nihd,njhd->nhij", wide_q, wide_k).sin().sum()

    def plain(q: Tensor, k: Tensor, keys: Tensor) -> Tensor:
        s = torch.einsum("nihd,njhd->nhij", q, k)
        return (s + keys.clamp(min=LEAST)[:, None, None] / 0.3).sin().sum()

    given = (q, k, keys)
    along = tuple(torch.randn_like(x) for x in given)
    for function in (
        lambda f: torch.func.grad(f, argnums=(0, 1, 2))(*given),
        lambda f: torch.func.jvp(f, given, along)[1],
        lambda f: torch.func.jvp(torch.func.grad(f, argnums=(0, 1, 2)), given, along)[1],
        lambda f: torch.func.vmap(f, (0, None, 1))(
            torch.stack((q, -q)), k, torch.stack((keys, 2 * keys), 1)
        ),
    ):
        got, wanted = function(ours), function(plain)
        # Logits of -2e5 have steps of 2^-6, of which sin() makes anything: the same on both sides
        # but for rounding of the product.
        torch.testing.assert_close(got, wanted, rtol=2e-2, atol=0.5)


def test_the_op_is_opcheck_clean():
    q, k, keys = (x.requires_grad_() for x in draw("even", torch.float32, torch.float32))
    torch.library.opcheck(torch.ops.tilewise.key_bias_channels.default, (q, k, keys, 0.3, None))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.randn(2, 3, 16)}, ValueError, r"q must be \(N, Sq, H, D\)"),
        ({"q": torch.randn(2, 3, 0, 16)}, ValueError, r"q must be \(N, Sq, H, D\)"),
        ({"k": torch.randn(2, 5, 2, 8)}, ValueError, r"k must be .* with N = 2, .* D = 16, got"),
        ({"k": torch.randn(2, 5, 2, 16).half()}, TypeError, "k must have dtype float32"),
        ({"keys": torch.randn(2, 4)}, ValueError, r"keys must have shape \(2, 5\)"),
        ({"keys": torch.ones(2, 5).int()}, TypeError, "keys must"),
        ({"scale": 0.0}, ValueError, "scale must be positive and finite, got 0.0"),
        ({"scale": math.inf}, ValueError, "scale must be positive and finite, got inf"),
        ({"backend": "best"}, ValueError, "backend must be one of"),
    ],
)
def test_arguments_that_break_a_rule_are_named(change, error, message):
    given = {
        "q": torch.randn(2, 3, 2, 16), "k": torch.randn(2, 5, 2, 16),
        "keys": torch.randn(2, 5), "scale": 0.3,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        ops.key_bias_channels(**(given | change))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_the_least_scale_is_the_one_that_is_named(dtype):
    q, keys = torch.zeros(1, 3, 2, 16, dtype=dtype), torch.zeros(1, 3)
    least = {torch.float16: 2.0**-15, torch.float64: 2.0**-1023}[dtype]
    for made in ops.key_bias_channels(q, q, keys, least):
        assert made.isfinite().all()
    with pytest.raises(ValueError, match=f"scale must be at least {least:.3g}"):
        ops.key_bias_channels(q, q, keys, least * 0.99)


def test_a_tangent_of_the_bias_alone_has_the_dtype_of_the_results():
    q, k, keys = draw("heads", torch.bfloat16, torch.float32)
    both, tangents = torch.func.jvp(
        lambda x: ops.key_bias_channels(q, k, x, 0.3), (keys,), (torch.ones_like(keys),)
    )
    assert [x.dtype for x in (*both, *tangents)] == [torch.bfloat16] * 4
    assert not tangents[0].any()
    assert tangents[1].any()


def test_a_scale_whose_power_a_dtype_cannot_hold_is_refused():
    q = torch.randn(1, 3, 2, 16).half()
    with pytest.raises(ValueError, match="scale must be at least 3.05e-05 for float16, got 1e-320"):
        ops.key_bias_channels(q, q, torch.zeros(1, 3), 1e-320)
    with pytest.raises(ValueError, match="scale must be at least 3.05e-05 for float16, got 1e-05"):
        ops.key_bias_channels(q, q, torch.zeros(1, 3), 1e-5)
