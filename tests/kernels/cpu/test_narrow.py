"""Weights that stay in 8 and 4 bits: their values, products beside float64, bits, and refusals.

CPUs with less run these tests in test_instruction_sets.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.kernels.test_quantised_weight import KINDS, random_weight
from tilewise.kernels.cpu.machine.simd import HAS_HALF
from tilewise.kernels.quantised_weight import E2M1
from tilewise.ops import QuantisedWeight, panels
from tilewise.testing import assert_within_budget

pytestmark = pytest.mark.skipif(
    panels.why_not_pack(torch.empty(2, 2)) is not None, reason="needs an x86 CPU"
)
DTYPES = (torch.bfloat16, torch.float32, *((torch.float16,) if HAS_HALF else ()))
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def _packed(rows, columns):
    return torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)


def _bytes(rows, columns, low=-128, high=128):
    return torch.randint(low, high, (rows, columns), dtype=torch.int8)


def stored_weight(kind, rows=70, columns=512):
    """Return a weight as a format of llama.cpp, or another that `random_weight` lacks."""
    torch.manual_seed(1)
    half = torch.rand(rows, columns // 32).half()
    outer = (torch.rand(rows, columns // 256).half(), (1, 256))
    six = torch.randint(0, 64, (rows, columns // 32), dtype=torch.uint8)
    signed = _bytes(rows, columns // 16, -32, 32)
    e4m3 = (torch.rand(rows, columns // 16) + 0.1).to(torch.float8_e4m3fn)
    exponents = torch.randint(115, 130, (rows, columns // 32), dtype=torch.uint8)
    byte = torch.randint(0, 256, (rows, columns // 32), dtype=torch.uint8)
    weights = {
        "q4_0": QuantisedWeight(
            _packed(rows, columns), half, (1, 32), table=tuple(map(float, range(-8, 8)))
        ),
        "q4_1": QuantisedWeight(
            _packed(rows, columns), half, (1, 32), minimums=torch.randn(half.shape).half()
        ),
        "q8_0": QuantisedWeight(_bytes(rows, columns), half, (1, 32)),
        "q5_1": QuantisedWeight(
            _bytes(rows, columns, 0, 32), half, (1, 32), minimums=torch.randn(half.shape).half()
        ),
        "q4_k": QuantisedWeight(
            _packed(rows, columns), six, (1, 32), minimums=six.flip(0),
            outer=outer[0], outer_minimums=outer[0].flip(0), outer_block=outer[1],
        ),
        "q6_k": QuantisedWeight(
            _bytes(rows, columns, -32, 32), signed, (1, 16), outer=outer[0], outer_block=outer[1]
        ),
        "nvfp4": QuantisedWeight(
            _packed(rows, columns), e4m3, (1, 16), table=E2M1, outer=torch.rand(1, 1),
            outer_block=(rows, columns),
        ),
        "mxfp4": QuantisedWeight(
            _packed(rows, columns), exponents.view(torch.float8_e8m0fnu), (1, 32), table=E2M1
        ),
        "symmetric": QuantisedWeight(
            _packed(rows, columns), half.bfloat16(), (1, 32),
            zeros=torch.full(half.shape, 8, dtype=torch.uint8),
        ),
        "int8_zeros": QuantisedWeight(
            _bytes(rows, columns), half, (1, 32), zeros=byte.view(torch.int8)
        ),
        "wide_groups": QuantisedWeight(
            _packed(rows, columns), half[:, ::8].contiguous(), (1, 256),
            zeros=byte[:, ::8].contiguous() & 15,
        ),
        "e5m2": QuantisedWeight(
            torch.randn(rows, columns).to(torch.float8_e5m2), torch.rand(rows, 1), (1, columns)
        ),
    }  # fmt: skip
    return weights[kind]


STORED = ("q4_0", "q4_1", "q8_0", "q5_1", "q4_k", "q6_k", "nvfp4", "mxfp4", "symmetric",
          "int8_zeros", "wide_groups", "e5m2")  # fmt: skip
FORMATS = (*STORED, *KINDS)
each_format = pytest.mark.parametrize("kind", FORMATS)


def weight_of(kind):
    return stored_weight(kind) if kind in STORED else random_weight(kind)


def rounded_once(weight):
    """A weight whose values are computed in float32, as the kernels do."""
    return replace(weight, computed=torch.float32)


@each_format
@each_dtype
def test_values_are_those_of_the_weight_rounded_once(kind, dtype):
    weight = weight_of(kind)
    packed = panels.pack_narrow([weight], None, dtype)
    assert packed.is_narrow
    values = rounded_once(weight).dequantise().to(dtype)
    if weight.permutation is not None:
        values = values[:, weight.permutation.long()]
    assert torch.equal(panels.unpack(packed), values)
    chosen = torch.randint(0, weight.shape[0], (2, 5))
    assert torch.equal(panels.rows_of(packed, chosen), values[chosen])


@each_format
@each_dtype
@pytest.mark.parametrize("rows", [1, 2, 8, 17, 64])
def test_products_are_within_the_budget_of_float64(kind, dtype, rows):
    weight = rounded_once(weight_of(kind))
    bias = torch.randn(weight.shape[0]).to(dtype)
    x = torch.randn(rows, weight.shape[1]).to(dtype)
    values = weight.dequantise()
    y = panels.multiply(x, panels.pack_narrow([weight], bias, dtype))
    exact = x.double() @ values.double().T + bias.double()
    eager = x @ values.to(dtype).T + bias
    held = float((x.double().abs() @ values.double().abs().T).max())
    assert_within_budget(y, exact, eager, scale=held)


@each_format
@each_dtype
def test_bits_are_those_of_the_dequantised_weight(kind, dtype):
    weight = rounded_once(weight_of(kind))
    order = weight.permutation
    values = weight.dequantise().to(dtype)
    x = torch.randn(40, weight.shape[1]).to(dtype)
    y = panels.multiply(x, panels.pack_narrow([weight], None, dtype))
    if order is not None:  # inputs and columns alike
        x, values = x[:, order.long()].contiguous(), values[:, order.long()].contiguous()
    assert torch.equal(y, panels.multiply(x, panels.pack(values)))


@each_dtype
@pytest.mark.parametrize("kind", ["q4_k", "act_order", "int8_rows"])
def test_a_rows_bits_depend_on_neither_other_rows_nor_threads(kind, dtype):
    weight = weight_of(kind)
    weight = QuantisedWeight.concatenate([weight] * (700 // weight.shape[0]))
    x = torch.randn(70, weight.shape[1]).to(dtype)
    packed = panels.pack_narrow([weight], None, dtype)
    alone = torch.cat([panels.multiply(row[None], packed) for row in x])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in (2, 4, 5, 16, 17, 32, 33, 70):
                assert torch.equal(panels.multiply(x[:rows], packed), alone[:rows]), (threads, rows)
    finally:
        torch.set_num_threads(before)


@each_dtype
@pytest.mark.parametrize("heights", [(64, 128), (70, 50, 8), (16, 16)])
def test_unlike_weights_one_below_another_are_one_product(heights, dtype):
    kinds = ("q4_k", "q6_k", "q8_0")
    parts = [stored_weight(kind, rows=height) for kind, height in zip(kinds, heights, strict=False)]
    values = torch.cat([part.dequantise() for part in parts]).to(dtype)
    x = torch.randn(35, 512).to(dtype)
    packed = panels.pack_narrow(parts, None, dtype)
    assert torch.equal(panels.unpack(packed), values)
    assert torch.equal(panels.multiply(x, packed), panels.multiply(x, panels.pack(values)))


@each_dtype
@pytest.mark.parametrize("columns", [16, 33, 200])
def test_columns_of_one_group_may_be_any_number_of_bytes(columns, dtype):
    weight = QuantisedWeight(_bytes(5, columns), torch.rand(5, 1), (1, columns))
    x = torch.randn(3, columns).to(dtype)
    values = weight.dequantise().to(dtype)
    y = panels.multiply(x, panels.pack_narrow([weight], None, dtype))
    assert torch.equal(y, panels.multiply(x, panels.pack(values)))


def test_zero_points_of_scales_of_32_bits_are_within_a_rounding():
    weight = stored_weight("int8_zeros")
    weight = replace(weight, scales=torch.rand(weight.scales.shape))
    values = panels.unpack(panels.pack_narrow([weight], None, torch.float32))
    assert (values - weight.dequantise()).abs().max() <= 256 * 2**-24


def test_rows_that_are_missing_in_the_order_are_zeros():
    weight = stored_weight("q4_1")
    order = torch.tensor([3, -1, 69, -1, -1])
    values = panels.unpack(panels.pack_narrow([weight], None, torch.float32, order))
    assert torch.equal(values[[0, 2]], weight.dequantise()[[3, 69]])
    assert not values[[1, 3, 4]].any()


@pytest.mark.skipif(not HAS_HALF, reason="scales of 16 bits are kept in 32 without F16C")
@pytest.mark.parametrize(("kind", "most"), [("q4_0", 4.5), ("q4_k", 4.63), ("q8_0", 8.5)])
def test_a_weight_takes_the_memory_of_its_codes_and_scales(kind, most):
    packed = panels.pack_narrow([stored_weight(kind, rows=640)], None, torch.bfloat16)
    assert 8 * packed.num_bytes / packed.num_weights <= most


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"block": (1, 8), "scales": torch.rand(24, 8)}, "groups must be of 16 inputs or a mult"),
        ({"zeros": torch.zeros(24, 4), "minimums": torch.zeros(24, 4)}, "zero points or minimums"),
    ],
)
def test_forms_that_no_kernel_reads_are_named(change, reason):
    weight = replace(random_weight("table"), **change)
    weight.check()
    assert reason in panels.why_not_narrow(weight)


def test_floats_that_are_nan_are_named():
    codes = torch.full((4, 64), 0x7F, dtype=torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        weight = QuantisedWeight(codes.view(dtype), torch.rand(1, 1), (4, 64))
        assert panels.why_not_narrow(weight) == "codes must be finite, got NaN or infinity"
