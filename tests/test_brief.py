"""The brief tests: those that are left out are there, and each other test has a row."""

from __future__ import annotations

import json
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


def test_each_test_that_is_listed_is_there() -> None:
    by_file: dict[str, list[str]] = {}
    for line in sorted(brief.later()):
        file, _, name = line.partition("::")
        by_file.setdefault(file, []).append(name)
    absent = [
        f"{file}::{name}"
        for file, names in by_file.items()
        for text in [(TESTS / file).read_text()]
        for name in names
        if f"def {name}(" not in text and name != "runTest"
    ]
    assert absent == []


def test_what_takes_long_is_listed_and_what_is_compiled_first_is_not() -> None:
    def line(test: str, seconds: float) -> str:
        return json.dumps({"test": f"tests/{test}", "core s": seconds})

    many = [line(f"ops/a.py::test_rows[{n}]", 9.0 if n in (0, 4) else 0.01) for n in range(20)]
    run = [line("ops/a.py::test_long", 0.6), line("test_rule.py::test_long", 9.0), *many]
    other = [line("ops/a.py::TestAll::test_mine", 0.7), line("ops/a.py::test_long", 0.1)]
    assert brief.too_long([run, other]) == ["ops/a.py::test_long", "ops/a.py::test_mine"]
    three = [line(f"ops/a.py::test_rows[{n}]", 9.0 if n % 8 == 0 else 0.01) for n in range(20)]
    assert brief.too_long([three]) == ["ops/a.py::test_rows"]


def test_a_test_has_its_first_row_and_every_fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brief, "later", lambda: {"ops/test_a.py::test_long"})
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
