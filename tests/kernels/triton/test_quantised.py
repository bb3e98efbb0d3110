"""Products with weights of 8 and 4 bits by the values of parts: the format's values, float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from tests.kernels.gluon.test_quantised import make_weight
from tests.kernels.test_quantised_weight import KINDS, random_weight
from tests.ops.paged.test_api import BACKENDS
from tilewise import ops
from tilewise.kernels.triton.quantised import linear
from tilewise.testing import assert_within_budget

on_triton = pytest.mark.parametrize(
    ("backend", "place"), [row for row in BACKENDS[1:] if "triton" in str(row)]
)


@on_triton
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_format(kind, backend, place):
    weight = random_weight(kind).to(place)
    order = slice(None) if weight.permutation is None else weight.permutation.long()
    wanted = weight.dequantise().float()[:, order]
    found = linear.values_of(weight, 3, 24, torch.float32)
    torch.testing.assert_close(found, wanted[3:], rtol=0, atol=0)


@on_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["int4_zeros", "act_order", "two_levels", "fp8_blocks"])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_products_keep_the_budget(kind, dtype, backend, place, batch_invariant, monkeypatch):
    monkeypatch.setattr(linear, "_AT_ONCE", 64 * 16)
    monkeypatch.setattr(linear, "_UNIT", 8)
    weight = random_weight(kind).to(place)
    x, bias = (torch.randn(shape).to(place, dtype) for shape in ((2, 5, 64), (24,)))
    y = ops.quantised_linear(x, weight, bias, backend=backend, batch_invariant=batch_invariant)
    values = weight.dequantise()
    wide = F.linear(x.double(), values.double(), bias.double())
    assert_within_budget(y, wide, F.linear(x, values.to(dtype), bias))


@on_triton
def test_no_rows_give_no_rows(backend, place):
    weight = random_weight("table").to(place)
    y = ops.quantised_linear(torch.randn(0, 64, device=place), weight, backend=backend)
    assert y.shape == (0, 24)


@on_triton
@pytest.mark.parametrize("kind", ["int4", "mxfp4", "table", "k_quant", "int8", "fp8_blocks"])
def test_values_of_codes_in_the_order_of_lanes_are_those_of_columns(kind, backend, place):
    weight = make_weight(kind, 40, 256).to(place)
    found = linear.values_of(weight.lanes(), 3, 33, torch.float32)
    torch.testing.assert_close(
        found, linear.values_of(weight, 3, 33, torch.float32), rtol=0, atol=0
    )
