"""The brief tests: those that are left out are there, and each other test has a row."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import brief

TESTS = Path(__file__).parent


def item_of(file: str, name: str, row: int | None = None, *marks: str) -> SimpleNamespace:
    full = name if row is None else f"{name}[{row}]"
    return SimpleNamespace(
        path=TESTS / file,
        originalname=name,
        name=full,
        nodeid=f"tests/{file}::{full}",
        get_closest_marker=lambda mark: mark if mark in marks else None,
    )


@pytest.mark.parametrize("file", brief.LATER)
def test_each_test_that_is_named_is_there(file: str) -> None:
    text = (TESTS / file).read_text()
    assert [name for name in brief.LATER[file] if f"def {name}(" not in text] == []


def test_a_test_has_its_first_row_and_every_fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brief, "LATER", {"ops/test_a.py": ("test_long",)})
    items = [
        item_of("ops/test_a.py", "test_rows", 100, "slow"),
        item_of("ops/test_a.py", "test_rows", 101, "gpu"),
        *(item_of("ops/test_a.py", "test_rows", n) for n in range(9)),
        item_of("ops/test_a.py", "test_long"),
        item_of("ops/test_a.py", "test_one"),
        item_of("ops/test_b.py", "test_long"),
        *(item_of("test_rules.py", "test_rows", n) for n in range(3)),
    ]
    found = [item.nodeid.removeprefix("tests/") for item in brief.brief_of(items)]
    assert found == [
        "ops/test_a.py::test_rows[0]",
        "ops/test_a.py::test_rows[4]",
        "ops/test_a.py::test_rows[8]",
        "ops/test_a.py::test_one",
        "ops/test_b.py::test_long",
        "test_rules.py::test_rows[0]",
        "test_rules.py::test_rows[1]",
        "test_rules.py::test_rows[2]",
    ]
