"""Quantised weights as data: their values by hand, their parts, and products with them."""

from dataclasses import replace

import pytest
import torch

from tilewise import ops
from tilewise.ops import QuantisedWeight


def random_weight(kind, rows=24, columns=64):
    """Return a weight of each of the forms that checkpoints have."""
    torch.manual_seed(0)
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)
    scales = torch.rand(rows, columns // 16) + 0.5
    narrow = scales.half()
    weights = {
        "int4_zeros": QuantisedWeight(
            packed, narrow, (1, 16), zeros=torch.randint(0, 16, scales.shape, dtype=torch.uint8),
            computed=torch.float16,
        ),
        "table": QuantisedWeight(packed, scales, (1, 16), table=tuple(torch.randn(16).tolist())),
        "act_order": QuantisedWeight(
            packed, narrow, (1, 16), zeros=torch.full(scales.shape, 8, dtype=torch.uint8),
            permutation=torch.randperm(columns).int(), computed=torch.float16,
        ),
        "two_levels": QuantisedWeight(
            packed, torch.randint(0, 64, scales.shape, dtype=torch.uint8), (1, 16),
            minimums=torch.randint(0, 64, scales.shape, dtype=torch.uint8),
            outer=torch.rand(rows, 2).half(), outer_minimums=torch.rand(rows, 2).half(),
            outer_block=(1, 32),
        ),
        "fp8_blocks": QuantisedWeight(
            torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(3, 2), (8, 32)
        ),
        "mxfp8": QuantisedWeight(
            torch.randn(rows, columns).to(torch.float8_e5m2),
            torch.randint(120, 130, (rows, 2), dtype=torch.uint8).view(torch.float8_e8m0fnu),
            (1, 32),
        ),
        "int8_rows": QuantisedWeight(
            torch.randint(-128, 128, (rows, columns), dtype=torch.int8),
            torch.rand(rows, 1).bfloat16(), (1, columns), computed=torch.bfloat16,
        ),
        "float_zeros": QuantisedWeight(
            packed, narrow, (1, 16), zeros=(torch.rand(scales.shape) * 15).half(),
            computed=torch.float16,
        ),
        "one_scale": QuantisedWeight(
            torch.randn(rows, columns).to(torch.float8_e4m3fn), torch.rand(1, 1), (rows, columns)
        ),
    }  # fmt: skip
    return weights[kind]


KINDS = ("int4_zeros", "table", "act_order", "two_levels", "fp8_blocks", "mxfp8", "int8_rows",
         "float_zeros", "one_scale")  # fmt: skip
each_kind = pytest.mark.parametrize("kind", KINDS)


def _value(weight, n, k):
    """Return W[n, k] as the docstring says, element by element."""
    if weight.permutation is not None:
        k = weight.permutation.tolist().index(k)
    g, o = ((n // b[0], k // b[1]) for b in (weight.block, weight.outer_block))
    f32 = torch.float32
    if weight.bits == 4:
        code = weight.codes[n, k // 2].item() >> (4 * (k % 2)) & 15
        value = torch.tensor(code if weight.table is None else weight.table[code], dtype=f32)
    else:
        value = weight.codes[n, k].to(f32)

    def factor(tensor, outer):
        x = tensor[g].to(f32)
        return x if outer is None else x * outer[o].to(f32)

    if weight.zeros is not None:
        value = (value - weight.zeros[g].to(f32)).to(weight.computed).to(f32)
    value = (value * factor(weight.scales, weight.outer)).to(weight.computed).to(f32)
    if weight.minimums is not None:
        value = value - factor(weight.minimums, weight.outer_minimums)
    return value.to(weight.computed)


@each_kind
def test_values_are_those_of_the_definition(kind):
    weight = random_weight(kind)
    weight.check()
    values = weight.dequantise()
    assert values.dtype == weight.computed
    for n, k in ((0, 0), (1, 1), (7, 31), (8, 32), (23, 63), (15, 20)):
        assert torch.equal(values[n, k], _value(weight, n, k)), (n, k)


@each_kind
def test_rows_cuts_and_sums_of_parts_are_those_of_the_whole(kind):
    weight = random_weight(kind)
    whole = weight.dequantise().float()
    rows = torch.tensor([[3, 23], [0, 3]])
    assert torch.equal(weight.rows_of(rows).float(), whole[rows])
    part = weight.cut((5, 17), (0, 64))
    part.check()
    assert torch.equal(part.dequantise().float(), whole[5:17])
    if weight.permutation is None:
        part = weight.cut((0, 24), (32, 64))
        part.check()
        assert torch.equal(part.dequantise().float(), whole[:, 32:])
    else:
        with pytest.raises(ValueError, match="columns must be whole with a permutation"):
            weight.cut((0, 24), (32, 64))
    both = QuantisedWeight.concatenate([weight, weight.cut((4, 20), (0, 64))])
    both.check()
    assert torch.equal(both.dequantise().float(), torch.cat((whole, whole[4:20])))


def test_columns_are_not_cut_within_a_group():
    with pytest.raises(ValueError, match="columns must be cut at multiples of 32, got"):
        random_weight("two_levels").cut((0, 24), (16, 64))


def test_unlike_weights_do_not_become_one():
    table = random_weight("table")
    assert QuantisedWeight.concatenate([table, random_weight("int4_zeros")]) is None
    assert (
        QuantisedWeight.concatenate([table, replace(table, table=tuple(torch.randn(16).tolist()))])
        is None
    )


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference_multiplies_the_values(kind, dtype):
    weight = random_weight(kind)
    x, bias = torch.randn(2, 3, 64).to(dtype), torch.randn(24).to(dtype)
    y = ops.quantised_linear(x, weight, bias, backend="reference")
    wide = x.double() @ weight.dequantise().double().T + bias.double()
    assert torch.equal(y, wide.to(dtype))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scales": torch.rand(24, 3)}, r"weight.scales must have shape \(24, 4\)"),
        ({"block": (1, 24)}, "weight.block must divide the columns, got 24 of 64"),
        ({"table": (0.0,) * 15}, "weight.table must have 16 numbers, got 15"),
        ({"zeros": torch.zeros(24, 4, dtype=torch.int64)}, "weight.zeros must be one of uint8"),
        ({"permutation": torch.arange(64)}, "weight.permutation must be one of int32"),
        ({"block": (0, 16)}, "weight.block must be positive"),
        ({"outer": torch.rand(24, 8), "outer_block": (1, 8)}, "outer_block must be multiples of"),
        ({"computed": torch.int8}, "weight.computed must be a float dtype"),
        (
            {"outer_minimums": torch.rand(24, 4), "outer_block": (1, 16)},
            "outer_minimums must be None without minimums",
        ),
    ],
)
def test_what_breaks_a_rule_is_named(change, message):
    with pytest.raises((ValueError, TypeError), match=message):
        replace(random_weight("table"), **change).check()


def test_an_input_of_another_width_is_refused():
    with pytest.raises(ValueError, match=r"x must be \(..., 64\), got shape \(2, 63\)"):
        ops.quantised_linear(torch.randn(2, 63), random_weight("table"), backend="reference")


@pytest.mark.parametrize("bits", [4, 8])
def test_codes_in_the_order_of_lanes_are_the_same_weight(bits):
    torch.manual_seed(bits)
    if bits == 4:
        codes = torch.randint(0, 256, (40, 128), dtype=torch.uint8)
    else:
        codes = torch.randint(-128, 128, (40, 256), dtype=torch.int8)
    weight = QuantisedWeight(codes, torch.rand(40, 2) + 0.5, (1, 128))
    lanes = weight.lanes()
    lanes.check()
    assert lanes.lanes() is lanes
    assert not torch.equal(lanes.codes, codes)
    assert torch.equal(lanes.columns().codes, codes)
    assert torch.equal(lanes.dequantise(), weight.dequantise())
    rows = torch.tensor([[3, 39]])
    assert torch.equal(lanes.rows_of(rows), weight.rows_of(rows))
    part = lanes.cut((8, 24), (128, 256))
    assert torch.equal(part.dequantise(), weight.dequantise()[8:24, 128:])
    both = QuantisedWeight.concatenate([lanes, lanes])
    assert both is not None
    assert torch.equal(both.dequantise(), weight.dequantise().repeat(2, 1))
    assert QuantisedWeight.concatenate([lanes, weight]) is None
    with pytest.raises(ValueError, match="columns must be cut at multiples of 128"):
        lanes.cut((0, 40), (0, 96))


def test_mxfp4_in_the_order_of_lanes_is_the_same_weight():
    """Bits of codes are spread, and scales turned; parts need not be whole eights of rows."""
    torch.manual_seed(0)
    codes = torch.randint(0, 256, (40, 128), dtype=torch.uint8)
    scales = torch.randint(120, 130, (40, 8), dtype=torch.uint8).view(torch.float8_e8m0fnu)
    weight = QuantisedWeight(codes, scales, (1, 32), ops.E2M1)
    lanes = weight.lanes()
    lanes.check()
    assert lanes.is_spread
    assert not torch.equal(lanes.scales.view(torch.uint8), scales.view(torch.uint8))
    back = lanes.columns()
    assert torch.equal(back.codes, codes)
    assert torch.equal(back.scales.view(torch.uint8), scales.view(torch.uint8))
    values = weight.dequantise()
    assert torch.equal(lanes.dequantise(), values)
    rows = torch.tensor([[3, 39]])
    assert torch.equal(lanes.rows_of(rows), weight.rows_of(rows))
    for first, end, left in ((8, 24, 128), (3, 24, 0), (0, 40, 128), (1, 9, 0)):
        part = lanes.cut((first, end), (left, 256))
        assert part.is_spread == ((end - first) % 8 == 0)
        assert torch.equal(part.dequantise(), values[first:end, left:])
    both = QuantisedWeight.concatenate([lanes.cut((3, 7), (0, 256)), lanes])
    assert both is not None
    assert not both.is_spread
    assert torch.equal(both.dequantise(), torch.cat((values[3:7], values)))


def test_a_lane_has_the_channels_of_its_operands_together():
    # The first byte pair of lane t: channels 2 t and 2 t + 1 of the first 16, see `lanes`.
    codes = torch.arange(64, dtype=torch.int8).view(1, 64)
    lanes = QuantisedWeight(codes, torch.ones(1, 1), (1, 64)).lanes().codes[0].view(4, 4, 4)
    for lane in range(4):
        for word in range(4):
            first = 16 * word + 2 * lane
            assert lanes[lane, word].tolist() == [first, first + 8, first + 1, first + 9]


def test_rows_off_the_blocks_of_lanes_are_refused():
    weight = QuantisedWeight(torch.zeros(2, 48, dtype=torch.uint8), torch.ones(2, 3), (1, 32))
    with pytest.raises(ValueError, match="codes must have a multiple of 64 bytes, got 48"):
        weight.lanes()


def one_group(columns, size, **more):
    """Return a weight of 4 bits, a row of which is one group of `size` columns."""
    codes = torch.randint(0, 256, (24, columns // 2), dtype=torch.uint8)
    zeros = torch.randint(1, 16, (24, 1), dtype=torch.uint8)
    return QuantisedWeight(codes, torch.rand(24, 1) + 0.5, (1, size), zeros=zeros, **more)


@pytest.mark.parametrize(
    "weight",
    [
        *(random_weight(kind) for kind in KINDS if kind != "act_order"),
        one_group(64, 64),
        one_group(192, 192),
        one_group(64, 1024, minimums=torch.rand(24, 1)),
        one_group(64, 64, outer=torch.rand(24, 1), outer_block=(1, 192)),
        replace(
            random_weight("int4_zeros", columns=96), outer=torch.rand(24, 1), outer_block=(1, 96)
        ),
    ],
    ids=lambda weight: f"{weight.shape[1]}-{weight.block[1]}-{weight.outer_block[1]}",
)
def test_columns_that_follow_leave_the_values_of_the_others(weight):
    weight.check()
    whole = weight.padded()
    whole.check()
    assert whole.codes.shape[1] % 64 == 0
    values = whole.dequantise()[:, : weight.shape[1]]
    assert torch.equal(values, weight.dequantise())
