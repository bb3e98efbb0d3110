"""The chunked loss is cross-entropy, its gradients too, and keeps no logits."""

from __future__ import annotations

import sys
import types

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

from tilewise.training import loss as losses
from tilewise.training.loss import IGNORED, chunked_loss, find_loss, liger_loss, token_logprobs


def make(rows=37, columns=50, size=16, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, size, dtype=dtype, generator=g)
    weight = torch.randn(columns, size, dtype=dtype, generator=g)
    bias = torch.randn(columns, dtype=dtype, generator=g)
    targets = torch.randint(columns, (rows,), generator=g)
    targets[::7] = IGNORED
    return x.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


@pytest.mark.parametrize("chunk", [1, 200, 10_000])
@pytest.mark.parametrize("has_bias", [False, True])
def test_loss_and_gradients_are_cross_entropys(monkeypatch, chunk, has_bias):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", chunk)
    x, weight, bias, targets = make()
    inputs = [x, weight, *([bias] if has_bias else [])]
    got = chunked_loss(x, weight, bias if has_bias else None, targets)
    expected = F.cross_entropy(F.linear(x, weight, bias if has_bias else None), targets)
    torch.testing.assert_close(got, expected)
    pairs = zip(
        torch.autograd.grad(3 * got, inputs), torch.autograd.grad(3 * expected, inputs), strict=True
    )
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs)


def test_padded_columns_have_no_probability():
    x, weight, _, targets = make(columns=40)
    padded = torch.cat([weight, torch.full((24, 16), 9.0, dtype=torch.float64)])
    padded = padded.detach().requires_grad_()
    got = chunked_loss(x, padded, None, targets, 40)
    torch.testing.assert_close(got, chunked_loss(x, weight, None, targets))
    got.backward()
    assert padded.grad[40:].abs().max() == 0
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss(x, padded, None, targets, 40), got.detach())


def test_no_targets_give_zero_and_zero_gradients():
    x, weight, _, targets = make()
    got = chunked_loss(x, weight, None, torch.full_like(targets, IGNORED))
    got.backward()
    assert got.item() == 0
    assert x.grad.abs().max() == weight.grad.abs().max() == 0


def test_float32_weights_get_float32_gradients_of_bfloat16_products():
    x, weight, _, targets = make(rows=64, dtype=torch.float32)
    narrow = x.detach().bfloat16().requires_grad_()
    chunked_loss(narrow, weight, None, targets).backward()
    assert narrow.grad.dtype == torch.bfloat16
    assert weight.grad.dtype == torch.float32
    exact = weight.detach().bfloat16().double().requires_grad_()
    wide = narrow.detach().double().requires_grad_()
    F.cross_entropy(F.linear(wide, exact), targets).backward()
    for mine, theirs in ((narrow.grad, wide.grad), (weight.grad, exact.grad)):
        error = (mine.double() - theirs).norm() / theirs.norm()
        assert error < 1e-2


def test_without_gradients_the_loss_is_the_same(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 200)
    x, weight, bias, targets = make()
    with_gradients = chunked_loss(x, weight, bias, targets)
    with torch.no_grad():
        torch.testing.assert_close(chunked_loss(x, weight, bias, targets), with_gradients.detach())


# torch itself makes one when it traces an autograd.Function.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_a_compiled_forward_pass_keeps_gradients_and_no_logits(monkeypatch):
    monkeypatch.setattr(losses, "CHUNK_ELEMENTS", 64 * 1024)
    kept = []

    def forward(graph, _):
        (output,) = (node for node in graph.graph.nodes if node.op == "output")
        kept.extend(tuple(each.meta["val"].shape) for each in output.args[0])
        return make_boxed_func(graph.forward)

    compiled = torch.compile(
        chunked_loss,
        fullgraph=True,
        backend=aot_autograd(
            fw_compiler=forward,
            bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
            partition_fn=min_cut_rematerialization_partition,
        ),
    )
    x, weight, _, targets = make(rows=256, columns=1024, size=32, dtype=torch.float32)
    compiled(x, weight, None, targets).backward()
    assert sorted(kept) == [(), (256, 32), (1024, 32)]


def test_an_unknown_loss_is_refused():
    with pytest.raises(ValueError, match="loss must be one of chunked, liger, got 'mse'"):
        find_loss("mse")


def test_ligers_loss_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    x, weight, _, targets = make()
    with pytest.raises(ImportError, match=r"pip install 'tilewise\[liger\]'"):
        liger_loss(x, weight, None, targets)


def test_liger_is_called_as_its_documentation_says(monkeypatch):
    class Fused:
        def __init__(self, *, ignore_index):
            self.ignore_index = ignore_index

        def __call__(self, weight, x, targets, bias):
            return F.cross_entropy(F.linear(x, weight, bias), targets, ignore_index=IGNORED)

    fake = types.SimpleNamespace(LigerFusedLinearCrossEntropyLoss=Fused)
    monkeypatch.setitem(sys.modules, "liger_kernel", types.SimpleNamespace(transformers=fake))
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", fake)
    x, weight, _, targets = make()
    expected = chunked_loss(x, weight, None, targets)
    torch.testing.assert_close(liger_loss(x, weight, None, targets), expected)
    with pytest.raises(ValueError, match="columns must be all 50 of the weight"):
        liger_loss(x, weight, None, targets, 49)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_log_probabilities_of_tokens_have_the_engines_bits_and_the_gradient_of_float64(device):
    logits = (torch.randn(7, 53, device=device) * 4).requires_grad_()
    ids = torch.randint(0, 53, (7,), device=device)
    found = token_logprobs(logits, ids)
    if device == "cpu":  # on a GPU test_live_adapter compares them with an engine's
        assert torch.equal(found, logits.detach().log_softmax(-1)[torch.arange(7), ids])
    weights = torch.randn(7, device=device)
    (ours,) = torch.autograd.grad((found * weights).sum(), logits)
    wide = logits.detach().double().requires_grad_()
    exact = wide.log_softmax(-1).gather(-1, ids[:, None])[:, 0]
    (true,) = torch.autograd.grad((exact * weights.double()).sum(), wide)
    assert torch.allclose(found.double(), exact.detach(), atol=1e-5)
    assert torch.allclose(ours.double(), true, atol=1e-6)
