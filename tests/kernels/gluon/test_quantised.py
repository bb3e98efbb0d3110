"""Products with weights of 8 and 4 bits by mma.sync: float64 on the format's values, any rows."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.test_quantised_weight import random_weight
from tilewise.kernels import device
from tilewise.kernels.gluon.quantised import linear, narrow
from tilewise.kernels.quantised_weight import E2M1, QuantisedWeight
from tilewise.kernels.spec import QuantisedLinearSpec
from tilewise.kernels.tiles.quantised_rows import FewTile, QuantisedTile, RingTile, StreamTile
from tilewise.ops.quantised_linear import spec_of
from tilewise.testing import assert_within_budget
from tools.gluon_emulator import emulated


def make_weight(kind: str, rows: int, columns: int) -> QuantisedWeight:
    """Return a weight of each form that the kernel takes."""
    torch.manual_seed(rows + columns)
    packed = torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8)

    def integers(group: int, most: int) -> Tensor:
        return torch.randint(0, most, (rows, columns // group), dtype=torch.uint8)

    def scales(group: int) -> Tensor:
        return torch.rand(rows, -(-columns // group)) + 0.5

    weights = {
        "int4": lambda: QuantisedWeight(packed, scales(32).half(), (1, 32), zeros=integers(32, 16)),
        "float_zeros": lambda: QuantisedWeight(
            packed, scales(64), (1, 64), zeros=scales(64).bfloat16() * 7
        ),
        "one_scale_a_row": lambda: QuantisedWeight(packed, scales(columns), (1, columns)),
        "k_quant": lambda: QuantisedWeight(
            packed, integers(32, 64), (1, 32), minimums=integers(32, 64),
            outer=scales(columns // 2).half() / 64,
            outer_minimums=scales(columns // 2).half() / 64,
            outer_block=(1, columns // 2),
        ),
        "mxfp4": lambda: QuantisedWeight(
            packed, integers(32, 9).add(120).view(torch.float8_e8m0fnu), (1, 32), table=E2M1
        ),
        "table": lambda: QuantisedWeight(
            packed, scales(64), (1, 64), table=tuple(torch.randn(16).bfloat16().tolist())
        ),
        "int8": lambda: QuantisedWeight(
            torch.arange(rows * columns).view(rows, columns).to(torch.int8), scales(columns),
            (1, columns),
        ),
        "q6": lambda: QuantisedWeight(
            torch.randint(-32, 32, (rows, columns), dtype=torch.int8),
            integers(16, 120).to(torch.int8), (1, 16), outer=scales(columns // 2).half() / 64,
            outer_block=(1, columns // 2),
        ),
        "fp8_blocks": lambda: QuantisedWeight(
            torch.randn(rows, columns).to(torch.float8_e4m3fn),
            torch.rand(-(-rows // 24), columns // 64) + 0.5, (24, 64),
        ),
        "mxfp8": lambda: QuantisedWeight(
            torch.randn(rows, columns).to(torch.float8_e5m2),
            integers(32, 9).add(120).view(torch.float8_e8m0fnu), (1, 32),
        ),
        "act_order": lambda: QuantisedWeight(
            packed, scales(32).half(), (1, 32), zeros=integers(32, 16),
            permutation=torch.randperm(columns).int(),
        ),
    }  # fmt: skip
    return weights[kind]()


KINDS = ("int4", "float_zeros", "one_scale_a_row", "k_quant", "mxfp4", "table", "int8", "q6",
         "fp8_blocks", "mxfp8", "act_order")  # fmt: skip


def check(kind, rows, outputs, channels, dtype, has_bias, place="cpu", tile=None, in_lanes=False):
    """Compare a product with float64."""
    weight = make_weight(kind, outputs, channels)
    x, bias = torch.randn(rows, channels).to(dtype), torch.randn(outputs).to(dtype)
    bias = bias if has_bias else None
    on = None if bias is None else bias.to(place)
    read = weight.to(place).lanes() if in_lanes else weight.to(place)
    y = linear.launch(x.to(place), read, on, tile=tile).cpu()
    values = weight.dequantise()
    wide = torch.nn.functional.linear(
        x.double(), values.double(), None if bias is None else bias.double()
    )
    plain = torch.nn.functional.linear(x, values.to(dtype), bias)
    assert_within_budget(y, wide, plain)
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "outputs", "channels", "tile", "has_bias"),
    [
        (1, 40, 128, (8, 1, 1, 2), True),
        (11, 90, 192, (16, 2, 2, 1, True), False),
        (9, 70, 256, (8, 4, 1, 2, True), True),
    ],
)
def test_every_kind_of_code_keeps_the_budget(kind, rows, outputs, channels, tile, has_bias, dtype):
    if kind == "fp8_blocks" and channels % 64:
        pytest.skip("blocks of 64 columns")
    with emulated(rows) as names:
        check(kind, rows, outputs, channels, dtype, has_bias, tile=QuantisedTile(*tile))
    assert names == ["quantised_rows_kernel"]


@pytest.mark.parametrize(
    ("kind", "rows", "outputs", "channels", "tile", "has_bias", "dtype"),
    [
        *((kind, 3, 40, 512, (64, 2, 3), True, torch.bfloat16) for kind in KINDS),
        *((kind, 9, 70, 384, (128, 1, 1, True), False, torch.float16) for kind in KINDS),
        ("int4", 130, 70, 256, (128, 1, 1), True, torch.bfloat16),
        ("int4", 33, 128, 4096, (128, 2, 1), False, torch.bfloat16),  # stages are filled again
    ],
)
def test_every_kind_of_code_in_lanes_keeps_the_budget(
    kind, rows, outputs, channels, tile, has_bias, dtype
):
    with emulated(rows) as names:
        check(kind, rows, outputs, channels, dtype, has_bias, tile=RingTile(*tile), in_lanes=True)
    assert names == ["quantised_ring_kernel"]


@pytest.mark.parametrize(
    ("kind", "rows", "outputs", "channels", "tile", "has_bias", "dtype"),
    [
        *((kind, 3, 40, 512, (2, 3), True, torch.bfloat16) for kind in KINDS),
        *((kind, 12, 70, 384, (1, 4), False, torch.float16) for kind in KINDS),
        ("int4", 16, 64, 4096, (2, 4), True, torch.bfloat16),  # stages are filled again
    ],
)
def test_every_kind_of_code_keeps_the_budget_with_few_rows(
    kind, rows, outputs, channels, tile, has_bias, dtype
):
    with emulated(rows) as names:
        check(kind, rows, outputs, channels, dtype, has_bias, tile=FewTile(*tile), in_lanes=True)
    assert names == ["quantised_few_kernel"]


@pytest.mark.parametrize(
    ("kind", "rows", "outputs", "channels", "tile", "has_bias", "dtype"),
    [
        *((kind, 3, 40, 512, (4, 2), True, torch.bfloat16) for kind in KINDS),
        *((kind, 12, 70, 384, (8, 1), False, torch.float16) for kind in KINDS),
        ("int4", 16, 64, 4096, (4, 2), True, torch.bfloat16),  # several passes
        ("fp8_blocks", 8, 4240, 1024, (16, 2), False, torch.bfloat16),  # several tiles of a CTA
        ("k_quant", 1, 2128, 2560, (8, 2), True, torch.float16),  # of several passes
    ],
)
def test_every_kind_of_code_that_streams_keeps_the_budget(
    kind, rows, outputs, channels, tile, has_bias, dtype
):
    with emulated(rows) as names:
        check(kind, rows, outputs, channels, dtype, has_bias, tile=StreamTile(*tile), in_lanes=True)
    assert names == ["quantised_stream_kernel"]


@pytest.mark.parametrize("kind", ["int4", "one_scale_a_row"])
def test_a_row_has_the_same_bits_with_any_others_in_lanes(kind):
    weight = make_weight(kind, 40, 1280).lanes()
    x = torch.randn(40, 1280).bfloat16()
    tile = RingTile(64, 2, 1)
    with emulated(0):
        alone = linear.launch(x[7:8], weight, None, tile=tile)
        many = linear.launch(x, weight, None, tile=tile)
    assert torch.equal(alone[0], many[7])


def test_up_to_16_rows_stream_unless_their_bits_may_not_depend_on_how_many_they_are():
    weight = make_weight("int8", 40, 512).lanes()
    x = torch.randn(17, 512).bfloat16()
    for rows, is_invariant, kernel in (
        (16, False, "quantised_stream_kernel"),
        (17, False, "quantised_ring_kernel"),
        (16, True, "quantised_ring_kernel"),
    ):
        with emulated(0) as names:
            linear.launch(x[:rows], weight, None, is_invariant)
        assert names == [kernel]


def test_a_row_has_the_same_bits_whatever_is_beside_it():
    weight = make_weight("int4", 40, 256)
    x = torch.randn(20, 256).bfloat16()
    with emulated(0):
        alone = linear.launch(x[7:8], weight, None, tile=QuantisedTile(8, 1, 1, 2))
        many = linear.launch(x, weight, None, tile=QuantisedTile(32, 1, 2, 2))
    assert torch.equal(alone[0], many[7])


def test_no_rows_give_no_rows():
    y = linear.launch(torch.randn(0, 64).bfloat16(), make_weight("int4", 24, 64), None)
    assert y.shape == (0, 24)


def _spec(**changes: object) -> QuantisedLinearSpec:
    x = torch.randn(1, 64, dtype=torch.bfloat16)
    spec = spec_of(x, random_weight("table"))
    return replace(spec, **({"device_type": "cuda", "block": (1, 32)} | changes))


def test_what_the_kernel_cannot_do_is_said():
    assert linear.why_not(_spec()) is None
    for changes, reason in (
        ({"device_type": "cpu"}, "device must be cuda"),
        ({"dtype": torch.float32}, "dtype must be float16 or bfloat16"),
        ({"block": (1, 16)}, "columns that share a scale must be a multiple of 32, got 16"),
        ({"channels": 72, "block": (1, 72)}, "columns that share a scale|K must be a multiple"),
        ({"rows": 4096}, "x must have at most 64 rows to be faster so, got 4096"),
    ):
        found = linear.why_not(_spec(**changes))
        assert found is not None
        assert any(part in found for part in reason.split("|")), found
    assert linear.why_not(_spec(rows=4096, batch_invariant=True)) is None


def test_what_cannot_lie_in_lanes_is_said():
    wide = {"channels": 1024, "block": (1, 128)}
    assert linear.why_no_lanes(_spec(**wide)) is None
    for changes, reason in (
        ({"channels": 96}, "K must be a multiple of 128, got 96"),
        ({"block": (1, 16)}, "columns that share a scale must be 32, 64 or multiples of 128"),
        ({"has_outer": True, "outer_block": (1, 64)}, "columns of outer_block must be a multiple"),
    ):
        found = linear.why_no_lanes(_spec(**wide | changes))
        assert found is not None
        assert reason in found


def blocks_of_e4m3(outputs, channels):
    """Return a weight as DeepSeek's and Qwen's checkpoints have it."""
    scales = torch.rand(-(-outputs // 128), channels // 128) * 0.1 + 0.01
    codes = torch.randn(outputs, channels).to(torch.float8_e4m3fn)
    return QuantisedWeight(codes, scales, (128, 128), rounds_rows=True)


def rounded(x):
    """Round rows to e4m3, 128 channels by one scale; in float64."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1.0)
    codes = (groups / scale).to(torch.float8_e4m3fn)
    return (codes.double() * scale.double()).flatten(-2)


def check_rounded(rows, outputs, channels, dtype, place="cpu", **emulator):
    """Compare with float64; on a CPU in the emulator, two CTAs of two stages."""
    weight = blocks_of_e4m3(outputs, channels)
    x, bias = torch.randn(rows, channels).to(dtype), torch.randn(outputs).to(dtype)
    x[rows // 2] = 0
    operands = x.to(place), weight.to(place).lanes(), bias.to(place)
    if place == "cpu":
        with (
            mock.patch.object(device, "sm_count_of", return_value=2),
            mock.patch.object(narrow, "STAGES", 2),
            emulated(**emulator),
        ):
            y = narrow.launch(*operands)
    else:
        y = narrow.launch(*operands).cpu()
    values = weight.dequantise()
    wide = torch.nn.functional.linear(rounded(x), values.double(), bias.double())
    plain = torch.nn.functional.linear(rounded(x).to(dtype), values.to(dtype), bias)
    assert_within_budget(y, wide, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_are_rounded_as_the_format_does(dtype):
    check_rounded(140, 264, 640, dtype)


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_told_by_nan(broken):
    x = torch.randn(3, 256).bfloat16()
    x[1, 200] = broken
    with emulated(0):
        y = narrow.launch(x, blocks_of_e4m3(128, 256).lanes(), None)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "outputs", "channels"),
    [(1, 1030, 1024), (5, 4096, 2048), (16, 200, 11008), (64, 6144, 4096), (70, 100, 576)],
)
def test_every_kind_keeps_the_budget_on_a_gpu(kind, rows, outputs, channels, dtype):
    if kind in ("fp8_blocks", "float_zeros", "table") and channels % 64:
        channels = 640
    check(kind, rows, outputs, channels, dtype, has_bias=rows < 16, place="cuda")


needs_hopper = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
    reason="needs compute capability 9.0",
)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "outputs", "channels"),
    [
        (1, 1030, 1024),
        (5, 4096, 2048),
        (8, 4256, 8192),  # several passes over the tiles of a CTA
        (16, 1024, 3072),
        (16, 200, 11008),
        (64, 6144, 4096),
        (600, 104, 640),
    ],
)
def test_every_kind_in_lanes_keeps_the_budget_on_a_gpu(kind, rows, outputs, channels, dtype):
    check(kind, rows, outputs, channels, dtype, rows < 16, place="cuda", in_lanes=True)


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("kind", ["k_quant", "int4", "one_scale_a_row", "fp8_blocks"])
def test_a_row_has_the_same_bits_with_any_others_in_lanes_on_a_gpu(kind):
    weight = make_weight(kind, 4096, 1280).to("cuda").lanes()
    x = torch.randn(300, 1280, device="cuda", dtype=torch.bfloat16)
    many = linear.launch(x, weight, None, True)
    for count in (1, 7, 16, 33, 128):
        assert torch.equal(linear.launch(x[:count], weight, None, True), many[:count])


@pytest.mark.gpu
def test_a_row_has_the_same_bits_whatever_is_beside_it_on_a_gpu():
    weight = make_weight("k_quant", 4096, 1024).to("cuda")
    x = torch.randn(300, 1024, device="cuda", dtype=torch.bfloat16)
    many = linear.launch(x, weight, None, True)
    for count in (1, 7, 16, 33, 128):
        assert torch.equal(linear.launch(x[:count], weight, None, True), many[:count])


@pytest.mark.gpu
@needs_hopper
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "outputs", "channels"), [(513, 264, 640), (1000, 4096, 4096), (4096, 1536, 2048)]
)
def test_rows_are_rounded_as_the_format_does_on_a_gpu(rows, outputs, channels, dtype):
    check_rounded(rows, outputs, channels, dtype, "cuda")
