"""The engine's plot is drawn from whatever rows a document has."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
LAB = Path(__file__).resolve().parents[2] / "lab"


@pytest.fixture(scope="module")
def plots():
    spec = importlib.util.spec_from_file_location("engine_plots", LAB / "plots" / "engine_plots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(engine, batch, share, shape="qwen3-0.6b", **values):
    return {"engine": engine, "batch": batch, "shape": shape, "workload": "fixed"} | {
        "% of roof": share,
        "ms a step": 1.0,
        **values,
    }


def test_only_fixed_batches_with_a_step_are_drawn(plots):
    rows = [row("tilewise", 1, 50.0), row("vllm", 1, 20.0, workload="nano"), {"batch": 1}]
    assert plots.shares({"rows": rows}) == rows[:1]


def test_another_runs_peer_fills_in_only_where_there_is_none(plots):
    other = [row("vllm", 1, 17.0), row("vllm", 1, 69.0, shape="llama-3-8b")]
    mine = [row("tilewise", 1, 50.0), row("vllm", 1, 18.0), row("tilewise", 1, 80.0, "llama-3-8b")]
    added = plots.with_peer(mine, other, "vllm")[3:]
    assert [(r["shape"], r["engine"]) for r in added] == [("llama-3-8b", "vllm, another run")]


def test_a_picture_is_drawn_of_every_shape_and_engine(plots, tmp_path):
    rows = [row("tilewise", b, 10.0 * b) for b in (1, 8)] + [row("vllm", 8, 20.0)]
    rows += [row("llamacpp f16", 1, 40.0, "story"), row("tilewise", 1, 60.0, "story")]
    plots.draw(rows, "a device", tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="rows must hold"):
        plots.draw([], "a device", tmp_path / "out.png")


def test_the_committed_peer_has_every_row_of_the_table(plots):
    document = json.loads((LAB / "results" / "engine_vllm_h200.json").read_text())
    rows = plots.shares(document)
    assert [(r["shape"], r["batch"]) for r in rows] == [
        (shape, batch) for shape in ("qwen3-0.6b", "llama-3-8b") for batch in (1, 32, 256)
    ]
