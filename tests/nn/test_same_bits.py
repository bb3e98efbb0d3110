"""Layers with the values of inference have the gradients of the function that they compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewise.nn.layers import ACTIVATIONS, Gate, GatedMLP, RMSNorm
from tilewise.nn.same_bits import use_inference_bits


def _gated(layer: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, layer.gate_up_proj.weight).chunk(2, dim=-1)
    return F.linear(layer.activation(gate * layer.gate_scale) * up, layer.down_proj.weight)


def _scaled() -> GatedMLP:
    layer = GatedMLP(64, 96, "silu")
    layer.gate_scale = 0.5
    return layer


def _normal(layer: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight


CASES = {
    "gated": (lambda: GatedMLP(64, 96, "silu"), _gated),
    "gated by gelu": (lambda: GatedMLP(64, 96, "gelu"), _gated),
    "gated by gelu_tanh": (lambda: GatedMLP(64, 96, "gelu_pytorch_tanh"), _gated),
    "gated by relu": (lambda: GatedMLP(64, 96, "relu"), _gated),
    "a scaled gate": (_scaled, _gated),
    "norm": (lambda: RMSNorm(64, 1e-6), _normal),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_those_of_float64(case: str, device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    make, truth = CASES[case]
    layer = make()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.3)
    layer = layer.to(device, dtype)
    x = torch.randn(2, 5, 64, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(2, 5, 64, device=device, dtype=dtype)
    held = nn.Sequential(layer)
    use_inference_bits(held)
    learnt = [x, *layer.parameters()]
    y = held(x)
    found = torch.autograd.grad(y, learnt, dy)

    wide = make().to(device, torch.float64)
    wide.load_state_dict(layer.state_dict())
    x64 = x.detach().double().requires_grad_()
    y64 = truth(wide, x64)
    want = torch.autograd.grad(y64, [x64, *wide.parameters()], dy.double())
    bound = 1e-5 if dtype == torch.float32 else 2e-2
    for got, true in zip([y, *found], [y64, *want], strict=True):
        assert (got.double() - true).abs().max() <= bound * true.abs().max()


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "sigmoid", "relu"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gate_that_is_trained_has_the_bits_of_inference_and_torchs_gradients(
    name: str, device: str, dtype: torch.dtype
) -> None:
    torch.manual_seed(5)
    function = torch.sigmoid if name == "sigmoid" else ACTIVATIONS[name]
    gate = Gate(function, fuses_on_cpu=device == "cpu")
    both = (3 * torch.randn(7, 2 * 333, device=device)).to(dtype)
    x = torch.randn(7, 999, device=device).to(dtype)[:, :333]
    dy = torch.randn(7, 333, device=device).to(dtype)
    with torch.no_grad():
        wanted = gate(both), gate(both[:, 333:], x)
    held = nn.Sequential(gate, nn.Linear(1, 1).to(device))
    use_inference_bits(held)
    leaves = [t.clone().requires_grad_() for t in (both, x)]
    found = gate(leaves[0]), gate(leaves[0][:, 333:], leaves[1])
    for y, want in zip(found, wanted, strict=True):
        assert torch.equal(y, want)
    got = torch.autograd.grad([*found], leaves, [dy, 2 * dy])
    smooth = [t.clone().requires_grad_() for t in (both, x)]
    rows, factor = smooth[0].chunk(2, -1)
    plain = function(rows) * factor, function(smooth[0][:, 333:]) * smooth[1]
    want_gradients = torch.autograd.grad([*plain], smooth, [dy, 2 * dy])
    for mine, true in zip(got, want_gradients, strict=True):
        torch.testing.assert_close(mine, true)
    frozen = gate(leaves[0][:, 333:], x)
    assert torch.autograd.grad(frozen, leaves[0], dy)[0][:, :333].eq(0).all()


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "sigmoid"])
def test_second_derivatives_of_a_gate_are_torchs(name: str) -> None:
    torch.manual_seed(6)
    function = torch.sigmoid if name == "sigmoid" else ACTIVATIONS[name]
    held = nn.Sequential(Gate(function), nn.Linear(1, 1))
    use_inference_bits(held)
    both, x = torch.randn(3, 8), torch.randn(3, 8)

    def penalties(gate):
        leaves = [t.clone().requires_grad_() for t in (both, x)]
        second = []
        for y, given in (
            (gate(leaves[0]), leaves[:1]),
            (gate(leaves[0][:, :4], leaves[1][:, :4]), leaves),
            (gate(both, leaves[1]), leaves[1:]),
        ):
            first = torch.autograd.grad(y.square().sum(), given, create_graph=True)
            second += torch.autograd.grad(sum(g.square().sum() for g in first), given)
        return second

    def plain(gate, x=None):
        gate, x = gate.chunk(2, -1) if x is None else (gate, x)
        return function(gate) * x

    for mine, true in zip(penalties(held[0]), penalties(plain), strict=True):
        torch.testing.assert_close(mine, true)
