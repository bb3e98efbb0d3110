"""Hopper's product of many rows: float64 on the same inputs, and the sums of that of few rows."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gluon.test_linear import make_product
from tests.kernels.planned import poisoned
from tilewise.kernels import device, early
from tilewise.kernels.gluon.step import invariant_linear, linear
from tilewise.kernels.spec import LinearSpec
from tilewise.kernels.tiles import invariant_many as tiles
from tilewise.kernels.tiles import linear_rows
from tilewise.kernels.tiles.invariant_many import ManyTile
from tilewise.kernels.tiles.linear_rows import RowsTile
from tilewise.testing import assert_within_budget
from tools.gluon_emulator import emulated

TILES = {
    "halves": ManyTile(64, 256, 2, 128, 1, 4, group=2),
    "two_warpgroups": ManyTile(128, 128, 3, 128, 1, 8),
    "two_stages": ManyTile(64, 64, 2, 64, 2, 4, group=1),
}


def run_emulated(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: ManyTile, seed: int = 0, sms: int = 2
) -> Tensor:
    """Return y on so many multiprocessors; what was not written of it is NaN."""
    with (
        mock.patch.object(torch, "empty", poisoned),
        mock.patch.object(device, "sm_count_of", return_value=sms),
        emulated(seed) as names,
    ):
        y = invariant_linear.launch_many(x, weight, bias, tile)
    assert names == ["linear_many_kernel"]
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "channels", "outputs", "has_bias"),
    [(1, 200, 40, False), (130, 64, 264, True), (200, 1096, 72, True), (65, 8, 8, False)],
)
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_keeps_the_budget(tile, rows, channels, outputs, has_bias, dtype):
    x, weight, bias = make_product(rows, channels, outputs, dtype)
    given = bias if has_bias else None
    y = run_emulated(x, weight, given, TILES[tile], seed=rows)
    wide = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    assert_within_budget(y, wide, F.linear(x, weight, given))


@pytest.mark.parametrize("sms", [1, 3, 100])
def test_tiles_are_computed_once_however_many_programs_there_are(sms):
    x, weight, _ = make_product(400, 192, 200)
    y = run_emulated(x, weight, None, ManyTile(64, 64, 4, 64, 1, 4, group=3), seed=sms, sms=sms)
    assert_within_budget(y, F.linear(x.double(), weight.double()), F.linear(x, weight))


def exact(rows: int, channels: int, outputs: int) -> tuple[Tensor, Tensor]:
    """Draw whole numbers whose products of a part are exact, and whose parts do not add exactly."""
    x = torch.randint(-3, 4, (rows, channels)).bfloat16()
    weight = torch.randint(-3, 4, (outputs, channels)).bfloat16()
    part = linear_rows.channels_of_part(linear_rows.tile_of(outputs, channels), channels)
    for first in range(0, channels, part):
        scale = 2.0 ** (13 * (first // part % 2))  # 2**24 and more beside ones
        x[:, first : first + part] *= scale
    return x, weight


def test_parts_are_added_in_the_order_of_the_product_of_few_rows():
    x, weight = exact(150, 1096, 72)
    tile = linear_rows.tile_of(72, 1096)
    assert linear_rows.parts_of(tile, 1096) > 2
    y = run_emulated(x, weight, None, TILES["two_warpgroups"])
    part = linear_rows.channels_of_part(tile, 1096)
    sums = [
        x[:, first : first + part].float() @ weight[:, first : first + part].float().T
        for first in range(0, 1096, part)
    ]
    total = sums[0]
    for some in sums[1:]:
        total = total + some
    assert torch.equal(y, total.bfloat16())
    with emulated(1):
        few = linear.launch(x[:20], weight, None)
    assert torch.equal(few, y[:20])


ROW_FORMS = {
    "whole": RowsTile(64, 64, 1, 2, rows=32),
    "parts": RowsTile(64, 64, 3, 2, rows=16),
    "two_warpgroups": RowsTile(128, 64, 2, 1, num_warps=8, rows=64),
    "early": RowsTile(64, 128, 2, 2, early=early.FIRST, rows=32),
    "early_after": RowsTile(64, 64, 2, 2, early=early.AFTER, rows=8),
}


def run_rows(x: Tensor, weight: Tensor, bias: Tensor | None, tile: RowsTile, seed: int = 0):
    """Return y by the kernel of few rows, and the sum of the parts that it leaves."""
    counted = torch.zeros(1000, dtype=torch.int32)
    with (
        mock.patch.object(linear.torch, "empty", poisoned),
        mock.patch.object(linear, "zeros_of_stream", return_value=counted),
        mock.patch.object(linear_rows, "MOST_STAGES", 3),
        emulated(seed, resident=4) as names,
    ):
        y = linear.launch(x, weight, bias, tile)
        left = linear.launch_parts(x, weight, tile)
    assert set(names) == {"linear_rows_kernel"}
    assert not counted.any(), "arrivals must be zero again"
    total = left[0]
    for part in left[1:]:
        total = total + part
    return y, total.to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "channels", "outputs", "has_bias"),
    [(70, 200, 40, True), (1, 64, 8, False), (33, 1104, 130, False), (130, 8, 72, True)],
)
@pytest.mark.parametrize("form", ROW_FORMS)
def test_tiles_of_rows_keep_the_budget(form, rows, channels, outputs, has_bias, dtype):
    x, weight, bias = make_product(rows, channels, outputs, dtype)
    given = bias if has_bias else None
    y, left = run_rows(x, weight, given, ROW_FORMS[form], seed=rows)
    wide = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    assert_within_budget(y, wide, F.linear(x, weight, given))
    if not has_bias:
        assert torch.equal(left, y)


def in_order(channels: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x, weight and y where every 128 channels add one number whose order shows."""
    blocks = -(-channels // 128)
    numbers = torch.tensor([2.0**24, 1.0, 1.0, -(2.0**24), 1.0, 2.0**25, 3.0, -(2.0**25), 1.0])
    x = torch.ones(1, channels)
    weight = torch.zeros(outputs, channels)
    for output in range(outputs):
        weight[output, ::128] = numbers.repeat(blocks)[output : output + blocks]
    part = linear_rows.channels_of_part(linear_rows.tile_of(outputs, channels), channels)
    total = None
    for first in range(0, channels, part):
        acc = torch.zeros(outputs)
        for channel in range(first, min(first + part, channels), 128):
            acc = acc + weight[:, channel]
        total = acc if total is None else total + acc
    assert total is not None
    return x.bfloat16(), weight.bfloat16(), total.bfloat16()


@pytest.mark.parametrize("channels", [1152, 3072])
def test_every_tile_adds_channels_in_one_order(channels):
    x, weight, wanted = in_order(channels, 72)
    assert not torch.equal(wanted, weight.float().sum(1).bfloat16())  # the order shows
    x = x.expand(100, -1).contiguous()
    has_parts = linear_rows.parts_of(linear_rows.tile_of(72, channels), channels) > 1
    assert has_parts
    for tile in tiles.candidates(has_parts):
        assert (run_emulated(x, weight, None, tile) == wanted).all(), tile
    forms = tiles.row_candidates(72, channels, len(x))
    assert len(forms) > 3
    for form in forms:
        for y in run_rows(x, weight, None, form):
            assert (y == wanted).all(), form
    with emulated(1):
        assert (linear.launch(x[:20], weight, None) == wanted).all()


def test_what_is_cut_is_a_kernel_of_the_same_parts():
    """Whatever the number of rows, K is cut as the weight says."""
    for outputs, channels in ((4096, 1024), (1024, 2048), (28672, 4096), (4096, 14336)):
        plain = linear_rows.tile_of(outputs, channels)
        parts = linear_rows.parts_of(plain, channels)
        for rows in (1, 33, 64, 65, 100, 256, 257, 512, 513, 1024, 8192):
            for leaves in (False, True):
                form = tiles.cut(rows, outputs, channels, leaves=leaves)
                assert form is None or 64 < rows <= 512, rows
                if leaves:
                    assert (form is not None) == (64 < rows <= 256), rows
                if form is not None:
                    assert linear_rows.parts_of(form, channels) == parts
                    assert linear_rows.channels_of_part(
                        form, channels
                    ) == linear_rows.channels_of_part(plain, channels)
                    assert linear_rows.stages_of(form, form.rows, channels) >= 2
            many = tiles.many_tile(rows, outputs, channels, parts > 1)
            assert many is None or many in tiles.candidates(parts > 1)
            if many is None:
                assert rows <= linear_rows.most_rows(plain)


def test_a_hundred_rows_are_cut_into_tiles_of_the_kernel_of_few():
    x, weight, _ = make_product(100, 512, 72)
    wanted = run_emulated(x, weight, None, TILES["two_warpgroups"])
    with early.launching(), emulated(3) as names:
        assert torch.equal(invariant_linear.launch(x, weight, None), wanted)
        parts = linear.launch_parts(x, weight)
    assert names == ["linear_rows_kernel"] * 2
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    assert torch.equal(total.bfloat16(), wanted)


def test_rows_choose_the_kernel_and_the_weight_says_how_it_is_summed():
    assert tiles.many_tile(64, 4096, 1024, False) is None
    assert tiles.many_tile(8192, 4096, 1024, False).tile_n == 256
    assert tiles.many_tile(65, 4096, 1024, False) is not None
    for rows in (65, 257, 1024, 8192):
        assert tiles.many_tile(rows, 1024, 2048, True) in tiles.candidates(True)
    few, many = linear.launch, invariant_linear.launch_many
    with (
        mock.patch.object(few, "write", wraps=few.write) as of_few,
        mock.patch.object(many, "write", wraps=many.write) as of_many,
    ):
        x, weight, bias = make_product(513, 64, 40)
        invariant_linear.launch.plan(x[:64], weight, bias)
        assert (of_few.call_count, of_many.call_count) == (1, 0)
        invariant_linear.launch.plan(x, weight, bias)
        assert (of_few.call_count, of_many.call_count) == (1, 1)


def test_views_and_no_rows():
    x, weight, _ = make_product(70, 64, 40, torch.float16)
    apart = torch.randn(70, 67, dtype=torch.float16)[:, 3:]  # where no copy can start
    for given in (apart, x.view(7, 10, 64)[:, ::2]):
        y = run_emulated(given, weight, None, TILES["two_stages"])
        torch.testing.assert_close(y, F.linear(given, weight), rtol=2e-3, atol=2e-2)
    tile = TILES["two_stages"]
    assert invariant_linear.launch_many(x[:0], weight, None, tile).shape == (0, 40)
    with pytest.raises(ValueError, match="weight must be addressable by TMA"):
        invariant_linear.launch_many(x, make_product(1, 67, 40)[1][:, 3:], None, tile)


def test_says_what_it_cannot_run():
    spec = LinearSpec("cuda", torch.bfloat16, 64, 128, True)
    assert invariant_linear.why_not_product(spec) is None
    for changes, reason in (
        ({"outputs": 68}, "N must be a multiple of 8, got 68"),
        ({"dtype": torch.float32}, "dtype must be float16 or bfloat16"),
        ({"channels": 132}, "K must be a multiple of 8, got 132"),
    ):
        assert reason in invariant_linear.why_not_product(replace(spec, **changes))
    assert "device must be cuda" in invariant_linear.why_not(replace(spec, device_type="cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("channels", "outputs"), [(1024, 4096), (2048, 1024), (776, 200)])
def test_on_a_gpu_all_kernels_and_tiles_give_the_same_bits(channels, outputs, dtype):
    x, weight, bias = (t.cuda() for t in make_product(1000, channels, outputs, dtype))
    has_parts = linear_rows.parts_of(linear_rows.tile_of(outputs, channels), channels) > 1
    first = invariant_linear.launch_many(x, weight, bias, tiles.candidates(has_parts)[0])
    wide = F.linear(x.double(), weight.double(), bias.double())
    assert_within_budget(first, wide, F.linear(x, weight, bias))
    for tile in tiles.candidates(has_parts):
        assert torch.equal(invariant_linear.launch_many(x, weight, bias, tile), first)
    for rows in (1, 7, 32, 64, 65, 300):
        some = invariant_linear.launch(x[-rows:], weight, bias)
        assert torch.equal(some, first[-rows:]), rows
    for rows in (1, 64, 65, 130, 256, 300, 1000):
        for form in tiles.row_candidates(outputs, channels, rows):
            for mode in (early.OFF, early.FIRST, early.AFTER):
                some = linear.launch(x[-rows:], weight, bias, form._replace(early=mode))
                assert torch.equal(some, first[-rows:]), (rows, form)
            if has_parts:
                parts = linear.launch_parts(x[-rows:], weight, form)
                total = parts[0]
                for part in parts[1:]:
                    total = total + part
                bare = invariant_linear.launch(x[-rows:], weight, None)
                assert torch.equal(total.to(dtype), bare), (rows, form)
