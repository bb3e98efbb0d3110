"""Layers whose memory is a state: transformers' values and gradients, and one set of bits."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch

from tests.nn.state_layers import MAKERS, WIDTH, make
from tilewise import ops
from tilewise.nn import layers
from tilewise.nn.gated_delta_net import GatedDeltaConfig, GatedDeltaNet
from tilewise.nn.packed import pack_linears
from tilewise.nn.short_conv import ShortConvConfig

on_each_layer = pytest.mark.parametrize("case", MAKERS)


def _edges(*lengths: int) -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


@on_each_layer
def test_values_and_gradients_are_those_of_transformers(case: str) -> None:
    theirs, ours, sources = make(case)
    x = torch.randn(2, 90, WIDTH, generator=torch.Generator().manual_seed(1))
    dy = torch.randn(2, 90, WIDTH, generator=torch.Generator().manual_seed(2))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    want, got = (layer(x) for layer, x in zip((theirs, ours), inputs, strict=True))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5)
    for y in (want, got):
        (y * dy).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-4, atol=1e-4)
    for name, parameter in ours.named_parameters():
        # A source is linear in their parameters, and so are its gradients.
        for held in theirs.parameters():
            held.data = torch.zeros_like(held) if held.grad is None else held.grad
        want = sources[name](theirs)
        scale = want.abs().max().item()
        torch.testing.assert_close(parameter.grad, want, rtol=1e-3, atol=1e-5 * scale, msg=name)


@on_each_layer
def test_a_step_has_the_bits_of_the_whole_sequence_however_it_is_cut(case: str) -> None:
    _, ours, _ = make(case)
    pack_linears(ours)
    lengths = (100, 5)
    x = torch.randn(sum(lengths), WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole = ours(x, _edges(*lengths)).split(lengths)
        states = ours.allocate(4, dtype=x.dtype, device="cpu")
        for tensor in (states.convolution, *(states.recurrence or ())):
            if tensor is not None:
                tensor.fill_(float("nan"))
        rows, parts = x.split(lengths), ([], [])
        # The first sequence in parts that end before, at and behind chunks; the other beside it.
        for cut in (((0, 63), (0, 2)), ((63, 64), (2, 3)), ((64, 100), (3, 5))):
            given = [row[first:end] for row, (first, end) in zip(rows, cut, strict=True)]
            y = ours.step(
                torch.cat(given),
                states,
                slots=torch.tensor([3, 1]),
                starts=torch.tensor([first for first, _ in cut]),
                cu_seqlens=_edges(*(len(part) for part in given)),
            )
            for part, found in zip(y.split([len(p) for p in given]), parts, strict=True):
                found.append(part)
    for found, want in zip(parts, whole, strict=True):
        assert torch.equal(torch.cat(found), want)


@on_each_layer
def test_the_last_product_of_few_rows_is_that_of_other_projections(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ops.linear` in inference on a GPU, whose place this CPU takes."""
    _, ours, _ = make(case)
    ours = ours.bfloat16()
    mixed = torch.randn(3, ours.o_proj.in_features, dtype=torch.bfloat16)
    given = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        given.append((x, weight, *bias))
        return x.new_zeros(3, WIDTH)

    monkeypatch.setattr(layers, "FUSED_ON", ("cpu",))
    for name in ("linear_pays", "linear_leaves_parts"):
        monkeypatch.setattr(layers, name, lambda _: True)
    monkeypatch.setattr(ops, "linear", multiply)
    monkeypatch.setattr(ops, "linear_parts", multiply)
    bias = ours.o_proj.bias
    with torch.inference_mode():
        ours.out(mixed, None)
        ours.leaves_parts = True
        found = ours.out(mixed, None)
    assert isinstance(found, layers.Parts) == (bias is None)
    (_, weight, *rest), last = given
    assert weight is ours.o_proj.weight
    assert rest == [bias]
    assert last == ((mixed, weight) if bias is None else (mixed, weight, bias))


@on_each_layer
def test_packed_sequences_do_not_see_one_another(case: str) -> None:
    _, ours, _ = make(case)
    x = torch.randn(70, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        both = ours(x, _edges(30, 40))
        for first, end in ((0, 30), (30, 70)):
            torch.testing.assert_close(both[first:end], ours(x[None, first:end])[0])


@on_each_layer
def test_in_bfloat16_what_decays_stays_float32(case: str) -> None:
    _, ours, _ = make(case)
    narrow = copy.deepcopy(ours).bfloat16()
    for name, parameter in narrow.named_parameters():
        is_wide = name in ours.wide
        assert parameter.dtype == (torch.float32 if is_wide else torch.bfloat16)
        assert not is_wide or torch.equal(parameter, ours.get_parameter(name))
    x = torch.randn(1, 40, WIDTH, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = ours(x), narrow(x.bfloat16())
    assert got.dtype == torch.bfloat16
    assert (got.float() - want).abs().mean() < 0.03 * want.abs().mean()
    assert all(p.dtype == torch.float64 for p in narrow.double().parameters())


def test_what_is_allocated_is_told_without_memory() -> None:
    layer = GatedDeltaNet(WIDTH, GatedDeltaConfig(2, 6, 16, 24))
    states = layer.allocate(5, dtype=torch.bfloat16, device="meta")
    assert states.convolution.shape == (5, 3, 2 * 2 * 16 + 6 * 24)
    assert states.convolution.dtype == torch.bfloat16
    assert states.recurrence.state.shape == (5, 6, 16, 24)
    assert states.recurrence.state.dtype == torch.float32
    alone = GatedDeltaNet(WIDTH, GatedDeltaConfig(1, 1, 8, 8, conv_width=1))
    assert alone.allocate(5, dtype=torch.float32, device="cpu").convolution is None


def test_what_is_refused() -> None:
    _, ours, _ = make("qwen3_5")
    x = torch.randn(7, WIDTH)
    with pytest.raises(TypeError, match="dtype of a state's tokens must .*, got torch.int8"):
        ours.allocate(2, dtype=torch.int8, device="cpu")
    with pytest.raises(ValueError, match="conv_width must be an integer of at least 2, got 1"):
        ShortConvConfig(WIDTH, 1)
    with pytest.raises(ValueError, match="cu_seqlens must "):
        ours(x, _edges(3, 5))
    states = ours.allocate(2, dtype=torch.bfloat16, device="cpu")
    with pytest.raises(TypeError, match="states must have dtype float32, got bfloat16"):
        ours.step(x, states, slots=torch.arange(7), starts=torch.zeros(7).int())
