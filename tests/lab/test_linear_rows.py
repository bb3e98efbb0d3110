"""lab/linear_rows.py: the forms that it tries, and its lines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from lab import linear_rows
from tilewise.kernels.tiles import linear_rows as tiles


@pytest.mark.parametrize(("name", "outputs", "channels"), linear_rows.WEIGHTS)
def test_forms_fit_the_chip_and_leave_no_part_empty(name, outputs, channels):
    forms = list(linear_rows.forms_of(outputs, channels))
    assert len(set(forms)) == len(forms) > 3, name
    for form in forms:
        assert tiles.parts_of(form, channels) == form.parts
        assert all(tiles.stages_of(form, rows, channels) > 0 for rows in (8, 32))
    assert any(tiles.stages_of(linear_rows.wide(form), 256, channels) > 0 for form in forms)


def test_a_line_has_the_best_form_of_each_kind():
    form = [64, 64, 4, 3, 4]
    rows = [
        {"rows": 8, "name": "cublas", "us": 9.0},
        {"rows": 8, "name": "own", "form": [*form, False], "us": 8.0, "percent": 50.0},
        {"rows": 8, "name": "own", "form": [*form, False], "wrong": "NaN"},
        {"rows": 8, "name": "own", "form": [*form, True], "us": 6.0, "percent": 70.0},
        {"rows": 8, "name": "own", "form": [*form, True], "us": 7.0, "percent": 60.0},
    ]
    [line] = linear_rows.summary([SimpleNamespace(name="w", rows=rows)])
    assert "cublas 9.0, own 8.0 (50.0 %)" in line
    assert "early 6.0 (70.0 %)" in line
