"""The tile tuner checks before it times, and writes what it found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.lab.scripts import load
from tilewise.kernels import device
from tilewise.kernels.tiles.attention import candidates
from tilewise.kernels.tiles.paged import TileConfig

tune = load("tune")
needs_interpreter = pytest.mark.skipif(not device.interpreting(), reason="the interpreter is off")


@needs_interpreter
def test_every_candidate_of_a_part_is_timed_and_written(tmp_path: Path) -> None:
    def time_call(call: Callable[[], object]) -> float:
        return 2.0

    out = tmp_path / "rows.json"
    rows = tune.tune_attention(
        out, 600, head_dims=(1024 // 8,), seqlens=(64,), parts=("dq",), tokens=64, device="cpu",
        time_call=time_call,
    )  # fmt: skip
    tiles = candidates(tune.make_spec(128, 64, True), "dq", 90)
    assert [TileConfig(*row.tile) for row in rows] == [*tiles, *tiles]
    assert [row.causal for row in rows] == [False] * len(tiles) + [True] * len(tiles)
    # 3 products of 2 * 16 heads * 64 * 64 * 128 FLOPs in 2 ms; half of that when causal.
    assert rows[0].tflops == pytest.approx(3 * 2 * 16 * 64**2 * 128 / 2e-3 / 1e12)
    assert rows[-1].tflops == pytest.approx(rows[0].tflops / 2)
    written = json.loads(out.read_text())
    assert [row["milliseconds"] for row in written] == [2.0] * len(rows)


def test_a_wrong_or_failing_candidate_is_never_timed() -> None:
    spec = tune.make_spec(64, 1024, False)
    right = (torch.ones(4),)

    def never(call: Callable[[], object]) -> float:
        raise AssertionError("timed")

    def failing(tile: TileConfig | None) -> tuple[torch.Tensor, ...]:
        raise RuntimeError("out of resource: shared memory")

    tile = TileConfig(64, 64, 4, 2)
    for call, reason in (
        (lambda tile: (torch.full((4,), 1.1),), "default row"),
        (lambda tile: (torch.full((4,), float("nan")),), "default row"),
        (failing, "out of resource"),
    ):
        row = tune._measure(spec, "fwd", tile, call, right, never)
        assert row.milliseconds is None
        assert row.error is not None
        assert reason in row.error
        assert "refused" in str(row)


def test_the_fastest_row_of_a_shape_is_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        tune.Row("dkdv", 64, 1024, True, (64, 64, 4, 2), 4.0, 100.0, None),
        tune.Row("dq", 64, 1024, True, (64, 64, 4, 2), 3.0, 100.0, None),
        tune.Row("dq", 64, 1024, True, (64, 32, 4, 2), 1.0, 300.0, None),
        tune.Row("dq", 64, 1024, True, (32, 32, 4, 2), None, None, "RuntimeError"),
    ]
    tune.print_best(rows)
    printed = capsys.readouterr().out
    assert "64x32x4x2" in printed
    assert "32x32x4x2" not in printed
    assert "bwd   both kernels    5.000 ms  100.0 TFLOP/s by five products" in printed
