"""Hopper's product of few rows: float64 on the same inputs, and the same bits for any rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

pytest.importorskip("triton")

from tests.kernels.planned import poisoned
from tilewise.kernels import early
from tilewise.kernels.gluon.step import linear
from tilewise.kernels.host import lasting
from tilewise.kernels.spec import LinearSpec
from tilewise.kernels.tiles import linear_rows as tiles
from tilewise.kernels.tiles.linear_rows import RowsTile
from tilewise.testing import assert_within_budget
from tools.gluon_emulator import Program, emulated

_UNCHANGED = Program()
TILES = {
    "alone": RowsTile(64, 64, 1, 2),
    "parts": RowsTile(64, 64, 3, 4),
    "wide": RowsTile(128, 128, 2, 1),
    "two_warpgroups": RowsTile(128, 64, 2, 1, num_warps=8),
    "early": RowsTile(64, 64, 2, 4, early=early.FIRST),
    "early_after": RowsTile(64, 64, 2, 4, early=early.AFTER),
}


def make_product(
    rows: int, channels: int, outputs: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw x, weight and bias."""
    x, weight, bias = (
        torch.randn(shape).to(dtype)
        for shape in ((rows, channels), (outputs, channels), (outputs,))
    )
    return x, weight, bias


def run_emulated(
    x: Tensor, weight: Tensor, bias: Tensor | None, tile: RowsTile, seed: int = 0,
    program: Program = _UNCHANGED, resident: int = 4, stages: int | None = None,
) -> Tensor:  # fmt: skip
    """Return y; what was not written of it and of the workspace is NaN.

    stages: of the ring at most, where fewer than the tile's are to be used many times.
    """
    counted = torch.zeros(1000, dtype=torch.int32)
    most = tiles.MOST_STAGES if stages is None else stages
    with (
        mock.patch.object(torch, "empty", poisoned),
        mock.patch.object(linear, "zeros_of_stream", return_value=counted),
        mock.patch.object(tiles, "MOST_STAGES", most),
        emulated(seed, program=program, resident=resident) as names,
    ):
        y = linear.launch(x, weight, bias, tile)
    assert names == ["linear_rows_kernel"]
    assert not counted.any(), "arrivals must be zero again"
    return y


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "channels", "outputs", "has_bias"),
    [(1, 200, 40, False), (8, 64, 8, True), (16, 392, 130, True), (5, 8, 1, False),
     (33, 776, 200, True)],
)  # fmt: skip
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_keeps_the_budget(tile, rows, channels, outputs, has_bias, dtype):
    x, weight, bias = make_product(rows, channels, outputs, dtype)
    given = bias if has_bias else None
    y = run_emulated(x, weight, given, TILES[tile], seed=rows, stages=3)
    wide = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    assert_within_budget(y, wide, F.linear(x, weight, given))


@pytest.mark.parametrize("stages", [1, 2, 3, 12])
def test_rings_of_any_length_come_round(stages):
    x, weight, _ = make_product(3, 1104, 70)
    y = run_emulated(x, weight, None, RowsTile(64, 64, 2, 2), seed=stages, stages=stages)
    assert_within_budget(y, F.linear(x.double(), weight.double()), F.linear(x, weight))


def test_parts_are_added_in_their_order_whoever_ends_last():
    x, weight, bias = make_product(20, 1024, 130, torch.float16)
    first = run_emulated(x, weight, bias, RowsTile(64, 64, 8, 2), stages=2)
    for seed in range(1, 6):
        again = run_emulated(x, weight, bias, RowsTile(64, 64, 8, 2), seed, resident=8, stages=2)
        assert torch.equal(again, first)


@pytest.mark.parametrize("tile", TILES)
def test_parts_that_are_left_add_up_to_the_product_bit_for_bit(tile):
    for rows, channels, outputs in ((1, 200, 40), (20, 1024, 130), (33, 776, 200)):
        x, weight, _ = make_product(rows, channels, outputs)
        wanted = run_emulated(x, weight, None, TILES[tile])
        with mock.patch.object(torch, "empty", poisoned), emulated(rows) as names:
            parts = linear.launch_parts(x, weight, TILES[tile])
        assert names == ["linear_rows_kernel"]
        assert parts.shape == (tiles.parts_of(TILES[tile], channels), rows, outputs)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        assert torch.equal(total.to(x.dtype), wanted)
    assert linear.launch_parts(x[:0], weight, TILES["alone"]).shape == (1, 0, 200)


def test_strides_views_and_no_rows():
    x, weight, _ = make_product(12, 64, 40, torch.float16)
    wide = torch.randn(12, 80, dtype=torch.float16)[:, :64]  # rows further apart
    apart = torch.randn(12, 67, dtype=torch.float16)[:, 3:]  # where no copy can start
    every_other = weight[::2]
    for given in (wide, apart, x.view(3, 4, 64)[:, ::2], x[5]):
        y = run_emulated(given, every_other, None, TILES["parts"])
        assert y.shape == (*given.shape[:-1], 20)
        torch.testing.assert_close(y, F.linear(given, every_other), rtol=2e-3, atol=2e-2)
    assert linear.launch(x[:0], weight, None).shape == (0, 40)
    assert linear.launch(x, weight[:0], None).shape == (12, 0)


def test_says_what_it_cannot_run():
    spec = LinearSpec("cuda", torch.bfloat16, 64, 128, True)
    assert linear.why_not_product(spec) is None
    for changes, reason in (
        ({"dtype": torch.float32}, "dtype must be float16 or bfloat16"),
        ({"channels": 132}, "K must be a multiple of 8, got 132"),
        ({"addressable": False}, "weight must start on a 16-byte boundary"),
    ):
        assert reason in linear.why_not_product(replace(spec, **changes))
    assert "device must be cuda" in linear.why_not(replace(spec, device_type="cpu"))
    x, weight, _ = make_product(70, 64, 40)
    with pytest.raises(ValueError, match="x must have at most 64 rows, got 70"):
        linear.launch(x, weight, None, RowsTile(256, 64, 1, 1))
    with pytest.raises(ValueError, match="weight must be addressable by TMA"):
        linear.launch(x, make_product(1, 67, 40)[1][:, 3:], None)


def test_the_order_of_sums_is_the_same_for_any_rows():
    for outputs, channels in ((28672, 4096), (4096, 14336), (1000, 3000), (64, 8), (1, 1 << 17)):
        tile = tiles.tile_of(outputs, channels)
        part = tiles.channels_of_part(tile, channels)
        parts = tiles.parts_of(tile, channels)
        assert part % tiles.PART_UNIT == 0
        assert (parts - 1) * part < channels <= parts * part
        for rows in (1, 8, 9, 32, 64):
            assert tiles.row_tile(rows) <= tiles.most_rows(tile)
        for padded in tiles.ROW_TILES:
            if padded <= tiles.most_rows(tile):
                fitted = tiles.fitted(tile, padded, channels)
                assert fitted == tile._replace(ctas=fitted.ctas)
                assert tiles.stages_of(fitted, padded, channels) >= 1
    wide = tiles.fitted(tiles.tile_of(1024, 3072), 256, 3072)
    assert wide.ctas < tiles.tile_of(1024, 3072).ctas  # two stages of 256 rows fit once


def test_launches_of_a_stream_share_their_zeros_and_those_of_graphs_do_not():
    with mock.patch.object(torch.cuda, "current_stream"):
        counters = lasting.Zeros(torch.device("cpu"))
    first, again, other = (counters.take(5, stream, False) for stream in (1, 1, 2))
    assert first.data_ptr() == again.data_ptr() != other.data_ptr()
    taken = [counters.take(7, 1, True) for _ in range(3)]
    places = {x.data_ptr() for x in (first, other, *taken)}
    assert len(places) == 5
    assert all((x.data_ptr() - first.data_ptr()) % 16 == 0 for x in (other, *taken))
    assert counters.take(1 << 13, 1, False) is None
    assert counters.take(1 << 20, 1, True) is None


def test_who_launches_a_chain_says_whether_a_weight_is_loaded_early():
    x, weight, bias = make_product(3, 256, 64)
    tile = RowsTile(64, 64, 1, 2)
    run = []

    def kept(*arguments: Any) -> None:
        run.append(arguments[-1])

    with (
        mock.patch.object(tiles, "_TABLE", {(64, 256): (tile, True)}),
        mock.patch.object(linear, "_run", kept),
    ):
        linear.launch(x, weight, bias)
        for mode in (early.FIRST, early.AFTER):
            with early.launching({"rows": mode}):
                linear.launch(x, weight, bias)
        with early.launching({"norm": early.FIRST}):
            linear.launch(x, weight, bias)
    assert [tile.early for tile in run] == [early.OFF, early.FIRST, early.AFTER, early.OFF]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("tile", TILES)
def test_on_a_gpu_a_row_does_not_depend_on_others(tile, dtype):
    for channels, outputs in ((4096, 1000), (776, 200), (200, 40)):
        x, weight, bias = (t.cuda() for t in make_product(64, channels, outputs, dtype))
        together = linear.launch(x, weight, bias, TILES[tile])
        wide = F.linear(x.double(), weight.double(), bias.double())
        assert_within_budget(together, wide, F.linear(x, weight, bias))
        for rows in (slice(0, 1), slice(7, 10), slice(1, 16, 5), slice(3, 30)):
            some = linear.launch(x[rows], weight, bias, TILES[tile])
            assert torch.equal(some, together[rows])


@pytest.mark.gpu
def test_on_a_gpu_a_norm_adds_the_parts_of_a_product():
    from tilewise import ops

    x, weight, _ = (t.cuda() for t in make_product(32, 2048, 1024))
    residual, scale = torch.randn(32, 1024).to(x), torch.randn(1024).to(x)
    tile = RowsTile(64, 128, 8, 2)
    for rows in (1, 7, 32):
        some, other = x[:rows], residual[:rows]
        wanted = ops.add_rms_norm(linear.launch(some, weight, None, tile), other, scale, 1e-6)
        parts = linear.launch_parts(some, weight, tile)
        found = ops.add_parts_rms_norm(parts, other, scale, 1e-6)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.gpu
def test_on_a_gpu_graphs_of_products_replay():
    x, weight, _ = (t.cuda() for t in make_product(9, 2048, 1024))
    tile = RowsTile(64, 64, 8, 2)
    wanted = linear.launch(x, weight, None, tile)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [linear.launch(x, weight, None, tile) for _ in range(5)]
    for _ in range(3):
        for y in results:
            y.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(y, wanted) for y in results)
