"""delta_inputs and gated_rms_norm: what the separate operations give, on every backend."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.nn.gated_delta_net import GatedDeltaConfig, GatedDeltaNet
from tilewise.nn.gated_norm import GatedRMSNorm
from tilewise.nn.same_bits import use_inference_bits
from tilewise.testing import assert_within_budget

on_each_backend = pytest.mark.parametrize(
    ("backend", "place"),
    [
        pytest.param("reference", "cpu", id="reference"),
        pytest.param("triton", "cpu", id="triton-interpreted"),
        pytest.param("triton", "cuda", id="triton", marks=pytest.mark.gpu),
    ],
)
on_each_dtype = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str
)
NORMS = {
    "delta": ((5, 3, 128), {}),
    "one_row": ((1, 1, 16), {"activation": "sigmoid"}),
    "odd": ((7, 33), {"rounds_first": False}),
    "mamba": ((3, 96), {"gate_first": True, "group_size": 24}),
    "wide": ((2, 2560), {"gate_first": True}),
    "none": ((0, 2, 16), {}),
}


def norm_of(x: Tensor, gate: Tensor, weight: Tensor, **options) -> Tensor:
    """Return the operations of `GatedRMSNorm` in the dtype of x."""
    sizes = {"group_size": options.pop("group_size", None)}
    layer = GatedRMSNorm(x.shape[-1], 1e-5, **sizes, **options).to(x)
    layer.weight.data.copy_(weight)
    return layer(x, gate)


@on_each_backend
@on_each_dtype
@pytest.mark.parametrize("case", NORMS)
def test_a_norm_with_a_gate_keeps_the_budget(case, dtype, backend, place):
    shape, options = NORMS[case]
    torch.manual_seed(len(shape))
    x = 3 * torch.randn(shape)
    parts = (2, *shape[:-1], shape[-1])
    both = 4 * torch.randn(parts)
    weight = 1 + 0.3 * torch.randn(shape[-1])
    x, both, weight = (t.to(place, dtype) for t in (x, both, weight))
    gate = both.movedim(0, -2)[..., 1, :]  # rows with others between them
    y = ops.gated_rms_norm(x, gate, weight, 1e-5, backend=backend, **options)
    assert (y.shape, y.dtype) == (x.shape, dtype)
    with torch.no_grad():
        wide = norm_of(x.cpu().double(), gate.cpu().double(), weight.cpu().double(), **options)
        plain = norm_of(x.cpu(), gate.cpu(), weight.cpu(), **options)
    if x.numel():
        assert_within_budget(y.cpu(), wide, plain)


def inputs_of(mixed, ba, a_log, dt_bias, heads, width, scale):
    """Return the operations in the dtype of their arguments."""
    both = mixed[:, : 2 * heads * width].unflatten(-1, (-1, width))
    wide = both if both.dtype == torch.float64 else both.float()
    unit = (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + 1e-6)).to(mixed.dtype)
    b, a = ba.chunk(2, -1)
    q, k = unit.chunk(2, 1)
    g = -a_log.exp() * F.softplus(a.to(a_log.dtype) + dt_bias, threshold=50.0)
    return q, k, g, torch.sigmoid(b) * scale


@on_each_backend
@on_each_dtype
@pytest.mark.parametrize(
    ("tokens", "key_heads", "width", "heads", "more", "scale"),
    [
        (3, 2, 128, 4, 24, 1.0),
        (1, 1, 16, 40, 0, 2.0),
        (4, 9, 48, 12, 7, 1.0),
        (0, 2, 16, 2, 0, 1.0),
    ],
)
def test_inputs_of_the_delta_rule_keep_the_budget(
    tokens, key_heads, width, heads, more, scale, dtype, backend, place
):
    torch.manual_seed(heads)
    mixed, ba = (
        torch.randn(tokens, 2 * key_heads * width + more),
        9 * torch.randn(tokens, 2 * heads),
    )
    if tokens > 1:
        mixed[1] = 0  # no direction
        ba[0, heads:] = torch.linspace(-90, 90, heads)
    mixed, ba = (t.to(place, dtype) for t in (mixed, ba))
    a_log, dt_bias = torch.randn(heads, device=place), torch.randn(heads, device=place)
    sizes = {"num_key_heads": key_heads, "key_dim": width, "beta_scale": scale}
    found = ops.delta_inputs(mixed, ba, a_log, dt_bias, **sizes, backend=backend)
    given = [t.cpu() for t in (mixed, ba, a_log, dt_bias)]
    wide = inputs_of(*(t.double() for t in given), key_heads, width, scale)
    plain = inputs_of(*given, key_heads, width, scale)
    *others, beta = found
    assert beta.dtype == torch.float32
    assert torch.equal(beta.to(dtype).float(), beta)
    found = (*others, beta.to(dtype))
    for name, got, truth, eager in zip(("q", "k", "g", "beta"), found, wide, plain, strict=True):
        assert (got.shape, got.dtype) == (truth.shape, eager.dtype), name
        assert got.is_contiguous()
        if tokens:
            assert_within_budget(got.cpu(), truth, eager, name=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.randn(2, 3, 4, 8)}, r"x must be \(T, E\) or \(T, H, E\) with E at least 1"),
        ({"x": torch.randn(3, 16)[:, ::2]}, "x must be contiguous, got strides"),
        ({"gate": torch.randn(3, 4)}, r"gate must have shape \(3, 8\)"),
        ({"group_size": 3}, "group_size must divide 8 channels, got 3"),
        ({"activation": "gelu"}, "activation must be one of silu, sigmoid, got 'gelu'"),
    ],
)
def test_arguments_of_a_norm_that_break_a_rule_are_named(change, message):
    given = {
        "x": torch.randn(3, 8),
        "gate": torch.randn(3, 8),
        "weight": torch.ones(8),
        "eps": 1e-6,
    }
    with pytest.raises(ValueError, match=message):
        ops.gated_rms_norm(**(given | change), backend="reference")


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mixed": torch.randn(3, 31)}, ValueError, "mixed must be .* = 32 and above 0, got"),
        ({"key_dim": 0}, ValueError, "mixed must be"),
        ({"ba": torch.randn(3, 6)}, ValueError, r"ba must have shape \(3, 8\)"),
        ({"a_log": torch.zeros(4).double()}, TypeError, "a_log must have dtype float32"),
    ],
)
def test_arguments_of_inputs_that_break_a_rule_are_named(change, error, message):
    given = {
        "mixed": torch.randn(3, 40), "ba": torch.randn(3, 8), "a_log": torch.zeros(4),
        "dt_bias": torch.ones(4), "num_key_heads": 2, "key_dim": 8,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        ops.delta_inputs(**(given | change), backend="reference")


def test_a_cpu_has_no_kernel_of_them():
    with pytest.raises(UnsupportedError, match="it has no kernel for this op"):
        ops.gated_rms_norm(torch.randn(1, 8), torch.randn(1, 8), torch.ones(8), 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_that_is_trained_has_the_bits_of_inference_on_a_gpu(dtype):
    torch.manual_seed(2)
    layer = GatedDeltaNet(128, GatedDeltaConfig(2, 4, 32, 32))
    for parameter in layer.parameters():
        parameter.data.normal_(0, 0.1)
    for name, parameter in layer.named_parameters():
        parameter.data = parameter.to("cuda", torch.float32 if name in layer.wide else dtype).data
    x = torch.randn(90, 128, device="cuda", dtype=dtype)
    edges = torch.tensor([0, 70, 90], dtype=torch.int32, device="cuda")
    use_inference_bits(layer)
    with torch.no_grad():
        wanted = layer(x, edges)
    y = layer(x, edges)
    assert torch.equal(y, wanted)
    y.sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
