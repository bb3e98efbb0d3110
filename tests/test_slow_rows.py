"""Rows that run with the slow tests: their tables stand there, and some rows of each test stay."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.slow_rows import SLOW_ROWS, is_slow_row

TESTS = Path(__file__).parent


@pytest.mark.parametrize("file", SLOW_ROWS)
def test_each_test_that_is_named_is_there_and_has_rows(file: str) -> None:
    text = (TESTS / file).read_text()
    for name, rows in SLOW_ROWS[file].items():
        found = re.search(rf"@pytest\.mark\.parametrize\((?:(?!\ndef ).)*\bdef {name}\(", text, re.S)
        assert found, f"{file} must have {name} with rows"
        assert re.compile(rows).groups >= 0


def test_a_row_is_told_by_its_whole_id() -> None:
    file, name = "test_failures_of_others.py", "test_nothing_is_kept_of_requests_that_ended"
    assert is_slow_row(file, f"{name}[False]")
    assert not is_slow_row(file, f"{name}[False-1]")
    assert not is_slow_row(file, name)
    assert not is_slow_row("test_cli.py", f"{name}[False]")
