"""Packed linear layers against float64, against nn.Linear, and in whole decoders."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tilewise.models import ModelConfig, build_model
from tilewise.nn.packed import PackedLinear, can_pack, pack_linears
from tilewise.testing import assert_within_budget

needs_packing = pytest.mark.skipif(
    not can_pack(torch.empty(2, 2)), reason="needs an x86 CPU and torch with oneDNN"
)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def check(weight, bias, x):
    with torch.inference_mode():
        y = PackedLinear(weight, bias)(x)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        assert y.dtype == x.dtype
        assert_within_budget(y, exact, F.linear(x, weight, bias))


@needs_packing
@DTYPES
@pytest.mark.parametrize("rows", [(1,), (3,), (64,), (2, 5), ()], ids=str)
def test_products_are_within_the_budget_of_float64(dtype, rows):
    weight, bias = torch.randn(48, 33).to(dtype), torch.randn(48).to(dtype)
    check(weight, bias, torch.randn(*rows, 33).to(dtype))


@needs_packing
@DTYPES
def test_a_single_channel_and_no_bias_are_allowed(dtype):
    check(torch.randn(1, 1).to(dtype), None, torch.randn(2, 1).to(dtype))


@needs_packing
@DTYPES
def test_rows_may_be_strided(dtype):
    check(torch.randn(8, 16).to(dtype), None, torch.randn(5, 40).to(dtype)[:, 3:19])


@needs_packing
def test_no_rows_give_no_rows():
    linear = PackedLinear(torch.randn(8, 16))
    assert linear(torch.empty(0, 16)).shape == (0, 8)
    assert linear(torch.empty(2, 0, 16)).shape == (2, 0, 8)


@pytest.mark.parametrize(
    "weight",
    [torch.empty(2, 2, dtype=torch.float64), torch.empty(0, 2), torch.empty(2, 2, device="meta")],
    ids=["float64", "empty", "elsewhere"],
)
def test_what_has_no_packed_form_is_left_alone(weight):
    assert not can_pack(weight)
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].weight = nn.Parameter(weight)
    before = module[0]
    pack_linears(module)
    assert module[0] is before


@needs_packing
def test_linears_are_replaced_at_every_depth():
    module = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2, bias=False)))
    x = torch.randn(3, 4)
    expected = module(x)
    pack_linears(module)
    assert not list(module.parameters())
    torch.testing.assert_close(module(x), expected)


@needs_packing
@DTYPES
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_a_packed_decoder_computes_the_same_logits(dtype, tied):
    model = build_model(ModelConfig.from_hf(CONFIG | {"tie_word_embeddings": tied}), dtype=dtype)
    ids = torch.randint(0, 101, (2, 9))
    exact = copy.deepcopy(model).double()
    with torch.inference_mode():
        truth = exact.compute_logits(exact(ids))
        eager = model.compute_logits(model(ids))
        model.pack_for_inference()
        logits = model.compute_logits(model(ids))
    assert logits.dtype == torch.float32
    assert_within_budget(logits, truth, eager)
