"""What a quick run on a GPU keeps: what is named is there, and nothing else is touched."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import conftest, warm
from tests.quick_rows import QUICK_ROWS, asks_for_gpu_alone, is_quick_row, names_a_gpu
from tests.slow_rows import SLOW_ROWS

TESTS = Path(__file__).parent
MOST_TESTS = 700  # that a quick run keeps, of some 2,500
FEW = "kernels/gluon/test_few.py"


def collected(*marks: str, files: tuple[str, ...] = ("",)) -> list[list[tuple[str, str, str]]]:
    """Return file, test and row of the tests that pytest finds, for each expression of marks."""
    paths = [str(TESTS / file) for file in files]
    code = (
        "import sys, pytest\n"
        f"for mark in {marks!r}:\n"
        "    print('marks:')\n"
        f"    given = ['--collect-only', '-q', '-p', 'no:cacheprovider', '-m', mark, *{paths!r}]\n"
        "    if pytest.main(given):\n"
        "        sys.exit(1)\n"
    )
    done = warm.run([sys.executable, "-c", code], check=True, cwd=TESTS.parent)
    found = []
    for line in done.stdout.splitlines():
        if line == "marks:":
            found.append([])
        elif "::" in line and line.startswith("tests/"):
            file, _, name = line.removeprefix("tests/").partition("::")
            head, _, row = name.partition("[")
            found[-1].append((file, head.rpartition("::")[2], row.removesuffix("]")))
    return found


@pytest.mark.parametrize("file", QUICK_ROWS)
def test_each_test_that_is_named_is_there(file):
    text = (TESTS / file).read_text()
    assert [name for name in QUICK_ROWS[file] if f"def {name}(" not in text] == []


def test_only_rows_that_need_a_gpu_are_left_out():
    name = "test_matches_float64"
    marks = ("gpu", "gpu and not slow", "not gpu", "not gpu and not slow")
    rows = {
        mark: [row for _, test, row in tests if test == name]
        for mark, tests in zip(marks, collected(*marks, files=(FEW,)), strict=True)
    }
    kept = [row for row in rows["gpu"] if re.fullmatch(QUICK_ROWS[FEW][name], row)]
    assert rows["gpu and not slow"] == kept
    assert 0 < len(kept) < len(rows["gpu"])
    assert FEW not in SLOW_ROWS
    assert len(rows["not gpu and not slow"]) == len(rows["not gpu"]) == len(rows["gpu"])


@pytest.mark.slow
def test_each_file_keeps_a_test_or_says_that_it_does_not():
    every, kept = collected("gpu", "gpu and not slow")
    tests, tests_kept = ({row[:2] for row in rows} for rows in (every, kept))
    for file, named in QUICK_ROWS.items():
        for name, rows in named.items():
            assert (file, name) in tests, (file, name)
            assert ((file, name) in tests_kept) == (rows is not None), (file, name)
    assert len(kept) < MOST_TESTS < len(every) / 3


def test_a_row_is_told_by_its_whole_id() -> None:
    file, name = "ops/attention/test_fp8.py", "test_the_gpu_rotates_like_the_rule"
    assert is_quick_row(file, f"{name}[128]")
    assert not is_quick_row(file, f"{name}[1280]")
    assert is_quick_row(file, "test_of_another_name[3]")
    assert is_quick_row("test_cli.py", f"{name}[3]")
    chains = "test_every_run_of_a_chain_gives_the_bits_of_kernels_one_after_the_other"
    assert not is_quick_row("kernels/test_chains.py", chains)


@pytest.mark.parametrize("marks", ["gpu", "gpu and not slow", "gpu and large and not slow"])
def test_marks_that_take_no_test_without_a_gpu(marks: str) -> None:
    assert asks_for_gpu_alone(marks)


@pytest.mark.parametrize(
    "marks", ["", "not gpu", "gpu or slow", "not gpu and not slow", "gpu and slow or large", "gpus"]
)
def test_marks_that_take_others_too(marks: str) -> None:
    assert not asks_for_gpu_alone(marks)


def test_files_that_name_no_gpu_are_left_out_where_only_gpu_tests_run() -> None:
    """Which is checked for each test that needs one, whenever it is collected."""
    assert names_a_gpu((TESTS / FEW).read_text())
    files = ("ops/test_norm.py", "engine/test_request.py")  # rows of `BACKENDS`; no GPU at all
    for marks, expected in (("gpu and not slow", [None, True]), ("not gpu", [None, None])):
        config = SimpleNamespace(option=SimpleNamespace(markexpr=marks))
        found = [conftest.pytest_ignore_collect(TESTS / file, config) for file in files]
        assert found == expected
