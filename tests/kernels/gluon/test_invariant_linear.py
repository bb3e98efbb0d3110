"""Hopper's product of many rows: float64 on the same inputs, and the sums of that of few rows."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.gluon.emulator import emulated
from tests.kernels.gluon.test_linear import make_product
from tilewise.kernels import device
from tilewise.kernels.gluon.step import invariant_linear, linear
from tilewise.kernels.spec import LinearSpec
from tilewise.kernels.tiles import invariant_many as tiles
from tilewise.kernels.tiles import linear_rows
from tilewise.kernels.tiles.invariant_many import ManyTile
from tilewise.testing import assert_within_budget

TILES = {
    "halves": ManyTile(64, 256, 2, 128, 1, 4, group=2),
    "two_warpgroups": ManyTile(128, 128, 3, 128, 1, 8),
    "two_stages": ManyTile(64, 64, 2, 64, 2, 4, group=1),
}


def run_emulated(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: ManyTile, seed: int = 0, sms: int = 2
) -> Tensor:
    """Return y on so many multiprocessors; what was not written of it is NaN."""

    def poisoned(*size: object, **options: object) -> Tensor:
        return torch.full(size[0], float("nan"), **options)  # type: ignore[arg-type, call-overload]

    with (
        mock.patch.object(invariant_linear.torch, "empty", poisoned),
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


def test_rows_choose_the_kernel_and_the_weight_says_how_it_is_summed():
    assert tiles.many_tile(64, 4096, 1024, False) is None
    assert tiles.many_tile(8192, 4096, 1024, False).tile_n == 256
    assert tiles.many_tile(65, 4096, 1024, False) is not None
    assert tiles.many_tile(256, 1024, 2048, True) is None  # its parts are summed side by side
    for rows in (257, 1024, 8192):
        assert tiles.many_tile(rows, 1024, 2048, True) in tiles.candidates(True)
    with (
        mock.patch.object(invariant_linear.linear, "launch", return_value="few"),
        mock.patch.object(invariant_linear, "launch_many", return_value="many"),
    ):
        x, weight, bias = make_product(65, 64, 40)
        assert invariant_linear.launch(x[:64], weight, bias) == "few"
        assert invariant_linear.launch(x, weight, bias) == "many"


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
