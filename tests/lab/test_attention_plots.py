"""The plots of docs/ are drawn from whatever rows a document has."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
PATH = Path(__file__).resolve().parents[2] / "lab" / "plots" / "attention_plots.py"


@pytest.fixture(scope="module")
def plots():
    spec = importlib.util.spec_from_file_location("plots", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(peer, n, op="forward", **values):
    return {"table": "dense", "op": op, "peer": peer, "B": max(1, 1024 // n), "H": 2, "N": n} | {
        "D": 128,
        "causal": True,
        **values,
    }


def document():
    numbers = {"ms": 2.0, "TFLOP/s": 3.0, "peak_MB": 0.0}
    return {
        "ceilings": {"name": "a processor", "torch_version": "2", "matmul_flops": 5e12},
        "rows": [
            row("tilewise", 4096, **numbers | {"ms": 9.0}),
            row("tilewise", 1024, **numbers),
            row("standard", 1024, **numbers),
            row("standard", 4096, error="out of memory"),
            row("flex", 1024, error="UnsupportedError: no"),
            {"op": "decode", "peer": "tilewise", "N": 1, "D": 128},
        ],
    }


def test_a_series_is_sorted_and_knows_what_ran_out_of_memory(plots):
    found = plots.series(document(), "forward", "tilewise", "ms", 128, True)
    assert found == ([1024, 4096], [2.0, 9.0], [])
    assert plots.series(document(), "forward", "standard", "ms", 128, True)[2] == [4096]
    assert plots.series(document(), "forward", "flex", "ms", 128, True) == ([], [], [])
    assert plots.series(document(), "backward", "tilewise", "ms", 128, True) == ([], [], [])


def test_both_plots_are_drawn_with_rows_missing(plots, tmp_path):
    for name in ("draw_over_n", "draw_speed"):
        path = tmp_path / f"{name}.png"
        getattr(plots, name)(document(), path)
        assert path.read_bytes().startswith(b"\x89PNG")


def test_results_that_are_not_there_leave_their_plots(plots, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plots, "IMAGES", tmp_path)
    monkeypatch.setattr(plots, "RESULTS", tmp_path / "results")
    plots.main()
    assert "no attention_h200.json" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["masks.png"]
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "attention_cpu.json").write_text('{"rows": []}')
    plots.main()
    assert "no dense rows in attention_cpu.json" in capsys.readouterr().out
