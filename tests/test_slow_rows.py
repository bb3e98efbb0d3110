"""Rows that run with the slow tests: their files and tests are there, and an id is told whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slow_rows import SLOW_ROWS, is_slow_row

TESTS = Path(__file__).parent


@pytest.mark.parametrize("file", SLOW_ROWS)
def test_each_test_that_is_named_is_there(file: str) -> None:
    text = (TESTS / file).read_text()
    assert [name for name in SLOW_ROWS[file] if f"def {name}(" not in text] == []


def test_a_row_is_told_by_its_whole_id() -> None:
    file, name = "test_failures_of_others.py", "test_nothing_is_kept_of_requests_that_ended"
    assert is_slow_row(file, f"{name}[False]")
    assert not is_slow_row(file, f"{name}[False-1]")
    assert not is_slow_row(file, name)
    assert not is_slow_row("test_cli.py", f"{name}[False]")
    assert not is_slow_row("test_cli.py", f"{name}[]")
    assert is_slow_row("distributed/test_memory.py", "test_a_gather_holds_the_keys_of_all")
