"""Layers with the values of inference have the gradients of the function that they compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewise.nn.layers import GatedMLP, RMSNorm
from tilewise.nn.same_bits import use_inference_bits


def _gated(layer: GatedMLP, x: torch.Tensor) -> torch.Tensor:
    gate, up = F.linear(x, layer.gate_up_proj.weight).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * up, layer.down_proj.weight)


def _normal(layer: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return x / (x.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight


CASES = {
    "gated": (lambda: GatedMLP(64, 96, "silu"), _gated),
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
