"""Norms and feed-forward blocks against float64 and against transformers' rounding."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tilewise import ops
from tilewise.nn import layers
from tilewise.nn.experts import Experts, ExpertsConfig
from tilewise.nn.layers import ACTIVATIONS, MLP, Gate, GatedMLP, Parts, RMSNorm, ShiftedRMSNorm
from tilewise.testing import assert_within_budget


def exact_norm(x, weight, eps):
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def make_norm(dim, dtype, eps=1e-5):
    ours, theirs = RMSNorm(dim, eps), LlamaRMSNorm(dim, eps)
    ours.weight.data = 1 + 0.3 * torch.randn(dim)
    theirs.weight = ours.weight
    return ours.to(dtype), theirs.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (5, 33), (2, 3, 4, 16), (0, 8)], ids=str)
def test_rms_norm_is_within_the_budget_of_float64(dtype, shape):
    ours, theirs = make_norm(shape[-1], dtype)
    x = (3 * torch.randn(shape)).to(dtype)
    with torch.no_grad():
        assert_within_budget(ours(x), exact_norm(x, ours.weight, 1e-5), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_rms_norm_rounds_where_transformers_does(dtype):
    ours, theirs = make_norm(96, dtype)
    x = torch.randn(50, 96, dtype=dtype)
    with torch.no_grad():
        eps = torch.finfo(dtype).eps
        # Half types must agree to the bit; float32 sums may be ordered differently.
        tolerance = 4 * eps if dtype == torch.float32 else 0.0
        torch.testing.assert_close(ours(x), theirs(x), rtol=tolerance, atol=0)


def test_rms_norm_statistics_do_not_overflow_half_precision():
    norm = RMSNorm(8, 1e-6).half()
    with torch.no_grad():
        y = norm(torch.full((1, 8), 60_000.0, dtype=torch.float16))
    torch.testing.assert_close(y, torch.ones_like(y))


def test_rms_norm_of_zeros_is_zero():
    with torch.no_grad():
        assert torch.equal(RMSNorm(8, 1e-6)(torch.zeros(2, 8)), torch.zeros(2, 8))


def test_rms_norm_gradients_are_exact():
    norm = RMSNorm(6, 1e-5).double()
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(norm, (x,))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_equal_transformers(name):
    x = torch.linspace(-6, 6, 301, dtype=torch.float64)
    # gelu_fast of transformers shortens sqrt(2 / pi) to ten digits.
    tolerance = 1e-9 if name == "gelu_fast" else 1e-12
    torch.testing.assert_close(ACTIVATIONS[name](x), ACT2FN[name](x), rtol=0, atol=tolerance)


@pytest.mark.parametrize("bias", [False, True])
def test_gated_mlp_takes_the_gate_from_the_first_rows(bias):
    mlp = GatedMLP(6, 10, "silu", bias=bias).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    gate, up = mlp.gate_up_proj.weight.split(10)
    gate_bias, up_bias = mlp.gate_up_proj.bias.split(10) if bias else (0.0, 0.0)
    inner = F.silu(x @ gate.T + gate_bias) * (x @ up.T + up_bias)
    torch.testing.assert_close(mlp(x), mlp.down_proj(inner), rtol=1e-12, atol=1e-12)


def test_mlp_is_up_activation_down():
    mlp = MLP(6, 10, "gelu_new").double()
    x = torch.randn(4, 6, dtype=torch.float64)
    inner = F.gelu(x @ mlp.up_proj.weight.T + mlp.up_proj.bias, approximate="tanh")
    expected = inner @ mlp.down_proj.weight.T + mlp.down_proj.bias
    torch.testing.assert_close(mlp(x), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_in_one_kernel_gives_what_training_gives(monkeypatch, dtype, activation):
    calls = []
    for name in ("rms_norm", "add_rms_norm", "gated_mul"):
        original = getattr(ops, name)

        def count(*args, _original=original, _name=name, **kwargs):
            calls.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(ops, name, count)
    norm, _ = make_norm(96, dtype)
    mlp = GatedMLP(96, 40, activation).to(dtype)
    x, residual = torch.randn(2, 7, 96).to(dtype)

    def block():
        y, total = norm.add(x, residual)
        return norm(x), y, total, mlp(y)

    recorded = block()
    assert calls == []
    assert all(t.requires_grad for t in (recorded[0], recorded[1], recorded[3]))
    with torch.inference_mode():
        block()
        assert calls == []  # on a CPU, where bits must not depend on the number of rows
        monkeypatch.setattr(layers, "FUSED_ON", ("cpu",))
        fused = block()
    assert calls == ["add_rms_norm", "rms_norm", "gated_mul"]
    for got, wanted in zip(fused, recorded, strict=True):
        torch.testing.assert_close(got, wanted.detach(), rtol=1e-5, atol=1e-6)
    with torch.no_grad():  # mixed dtypes and columns are torch's
        norm(x.float() if dtype == torch.bfloat16 else x.double())
        norm(torch.randn(96, 7, dtype=dtype).T)
    assert len(calls) == 3


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "sigmoid", "relu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_gate_on_a_cpu_has_the_bits_of_its_two_operations(name, dtype, monkeypatch):
    function = torch.sigmoid if name == "sigmoid" else ACTIVATIONS[name]
    gate = Gate(function, fuses_on_cpu=True)
    both = (4 * torch.randn(5, 3, 74)).to(dtype)
    rows, x = both.chunk(2, -1)
    wanted = layers.activate(function, rows, on_cpu=True) * x
    with torch.no_grad():
        assert torch.equal(gate(both), wanted)
        assert torch.equal(gate(rows, x.contiguous()), wanted)
        assert gate(both[:0]).shape == (0, 3, 37)
        monkeypatch.setattr(ops, "gated_mul", None)  # not in training, nor with two dtypes
        assert gate(rows, x.double()).dtype == torch.float64
    leaf = both.clone().requires_grad_()
    y = gate(leaf)
    assert torch.equal(y, wanted)
    assert y.requires_grad


def test_a_norm_that_adds_parts_learns_where_the_product_before_it_is_frozen():
    norm, x, residual = RMSNorm(24, 1e-5), torch.randn(3, 5, 24), torch.randn(5, 24)
    dy = torch.randn(5, 24)
    expected, total = norm.add(x[0] + x[1] + x[2], residual)
    [wanted] = torch.autograd.grad(expected, [norm.weight], dy)
    y, added = norm.add(Parts(x), residual)
    [got] = torch.autograd.grad(y, [norm.weight], dy)
    torch.testing.assert_close(added, total)
    torch.testing.assert_close(got, wanted)


def _packed_blocks(width, dtype):
    """What a packed model computes between its products, as functions of rows (T, width)."""
    blocks = []
    for name in ACTIVATIONS:
        mlp = MLP(width, width, name)
        # Identities for products, whose sums torch may add in another order for other rows.
        mlp.up_proj, mlp.down_proj = torch.nn.Identity(), torch.nn.Identity()
        gated = GatedMLP(width, width, name)
        gated.gate_up_proj, gated.down_proj = torch.nn.Identity(), torch.nn.Identity()
        for module in (mlp, gated):
            layers.fuse_on_cpu(module)
        blocks += [mlp, lambda x, gated=gated: gated(torch.cat([x, x], -1))]
    experts = Experts(width, ExpertsConfig(2, 1, width, activation="clamped", is_interleaved=True))
    experts.fuses_on_cpu = True
    blocks.append(lambda x: experts._activate(torch.cat([x, x], -1)))
    norms = [RMSNorm(width, 1e-6), ShiftedRMSNorm(width, 1e-6), torch.nn.LayerNorm(width)]
    for norm in norms:
        layers.fuse_on_cpu(norm)
    blocks += [norm.to(dtype) for norm in norms] + [lambda x: x.float().softmax(-1)]
    return blocks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_of_a_packed_model_has_the_same_bits_alone_and_among_others(dtype):
    """torch's gelu, and in float32 silu and sigmoid, compute what is left of a vector otherwise."""
    with torch.inference_mode():
        for width in range(1, 71):
            x = (3 * torch.randn(5, width)).to(dtype)
            for number, block in enumerate(_packed_blocks(width, dtype)):
                alone = torch.cat([block(row.clone()) for row in x.split(1)])
                for first, end in ((0, 5), (1, 3), (3, 5)):
                    assert torch.equal(block(x[first:end]), alone[first:end]), (number, width)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_values_of_inference_have_the_gradient_of_torch(name):
    x = torch.randn(3, 33, requires_grad=True)
    y = layers.activate(ACTIVATIONS[name], x, on_cpu=True)
    with torch.no_grad():
        assert torch.equal(y, layers.activate(ACTIVATIONS[name], x, on_cpu=True))
    wanted = ACTIVATIONS[name](x)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)
    dy = torch.randn(3, 33)
    got, want = (torch.autograd.grad(o, x, dy)[0] for o in (y, wanted))
    assert torch.equal(got, want)


@pytest.mark.parametrize("is_packed", [False, True])
def test_blocks_are_whole_graphs(is_packed):
    for block in (MLP(6, 10, "gelu_new"), GatedMLP(6, 10, "gelu")):
        if is_packed:
            layers.fuse_on_cpu(block)
        x = torch.randn(4, 6)
        whole = torch.compile(block, backend="eager", fullgraph=True)
        torch.testing.assert_close(whole(x), block(x), rtol=1e-5, atol=1e-6)
