"""The notebooks of docs/learn run, and what each computes by hand is what the real op gives."""

from __future__ import annotations

import ast
import re

import pytest

from tools.site import notebooks

PATHS = [notebooks.FOLDER / f"{name}.py" for name in notebooks.ORDER]
each = pytest.mark.parametrize("path", PATHS, ids=notebooks.ORDER)


def test_the_staircase_has_every_notebook():
    assert sorted(path.stem for path in notebooks.FOLDER.glob("*.py")) == sorted(notebooks.ORDER)
    index = (notebooks.FOLDER / "README.md").read_text()
    listed = re.findall(r"^\d\. \[.+\]\((\w+)\.py\)", index, re.MULTILINE)
    assert tuple(listed) == notebooks.ORDER


@each
def test_a_notebook_runs_and_prints_what_it_has_found(path):
    space = {"__name__": "__main__"}
    code = [cell for cell in notebooks.cells(path) if cell.is_code]
    outputs = [notebooks.run(cell, path.name, space) for cell in code]
    assert all(output.printed or output.value is not None for output in outputs[-1:])


@each
def test_a_notebook_ends_with_the_real_op_and_holds_it_to_what_was_made_by_hand(path):
    *_, text, code = notebooks.cells(path)
    assert re.findall(r"^## .*", text.text, re.MULTILINE)[-1].startswith("## The same by the real")
    tree = ast.parse(code.text)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    real = {"attention", "merge_states", "mla_decode", "paged_attention", "generate"}
    assert names & real
    is_held = any(isinstance(node, ast.Assert) for node in ast.walk(tree))
    assert is_held or "assert_close" in names


@each
def test_a_notebook_is_short_and_begins_with_its_title(path):
    first = notebooks.cells(path)[0]
    assert first.text.startswith("# ")
    assert len(path.read_text().split("\n")) < 260


def test_a_mistake_in_a_notebook_is_told_by_its_line(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text("# %% [markdown]\n# # Wrong\n\n# %%\nx = 1\nx / 0\n")
    _, cell = notebooks.cells(path)
    with pytest.raises(ZeroDivisionError) as told:
        notebooks.run(cell, path.name, {})
    assert told.traceback[-1].lineno == 5  # counted from 0


def test_a_page_has_what_cells_print_and_give(tmp_path, monkeypatch):
    monkeypatch.setattr(notebooks, "ROOT", tmp_path)
    path = tmp_path / "small.py"
    path.write_text("# %% [markdown]\n# # Small\n#\n# Text.\n\n# %%\nprint('<a>')\n3 + 4\n")
    page = notebooks.page(path)
    assert page.startswith("# Small\n\nText.\n\n```python\nprint('<a>')\n3 + 4\n```\n")
    assert '<pre tabindex="0">&lt;a&gt;</pre><pre tabindex="0">7</pre>' in page


def test_jupytext_reads_the_same_cells():
    jupytext = pytest.importorskip("jupytext", reason="pip install 'tilewise[docs]'")
    for path in PATHS:
        theirs = jupytext.read(path).cells
        ours = notebooks.cells(path)
        assert [cell.cell_type == "code" for cell in theirs] == [cell.is_code for cell in ours]
        assert [cell.source for cell in theirs] == [cell.text for cell in ours]
