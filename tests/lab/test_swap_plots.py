"""The plot of swapping against recomputing is drawn from the committed result."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
LAB = Path(__file__).resolve().parents[2] / "lab"


@pytest.fixture(scope="module")
def plots():
    spec = importlib.util.spec_from_file_location("swap_plots", LAB / "plots" / "swap_plots.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rows(*given):
    return [
        {"length": length, "recompute": {"s": again}, "swap": {"s": swapped}}
        for length, again, swapped in given
    ]


def test_the_better_way_changes_where_the_lines_cross(plots):
    assert plots.crossings(rows((100, 2.0, 1.0), (200, 3.0, 3.5), (400, 5.0, 6.0))) == [
        pytest.approx(100 + 100 * 1.0 / 1.5)
    ]
    assert plots.crossings(rows((100, 1.0, 2.0), (200, 1.0, 1.5))) == []


def test_the_committed_result_is_drawn_and_says_what_the_page_says(plots, tmp_path):
    document = json.loads((LAB / "results" / "swap_h200.json").read_text())
    plots.draw(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    first, last = plots.crossings(document["rows"])
    assert 700 < first < 900
    assert last == pytest.approx(document["crossover"])
