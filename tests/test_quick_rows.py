"""What a quick run on a GPU keeps: what is named is there, and nothing of a CPU's run is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.quick_rows import QUICK_ROWS, is_quick_row

TESTS = Path(__file__).parent
MOST_TESTS = 700  # of a GPU that a quick run keeps


@pytest.fixture(scope="module")
def collected() -> dict[str, list[str]]:
    """Tests by what chooses them, all, those of a GPU, the quick ones."""
    return {marks: _collected(marks) for marks in ("gpu", "gpu and not slow")}


def _collected(marks: str) -> list[str]:
    """Ids of the tests of files that name a GPU, as pytest tells them."""
    files = [path for path in TESTS.rglob("test_*.py") if "gpu" in path.read_text()]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", marks, *files],
        cwd=TESTS.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def _file_test_and_row(test: str) -> tuple[str, str, str]:
    file, _, name = test.removeprefix("tests/").partition("::")
    head, _, row = name.partition("[")
    return file, head.rpartition("::")[2], row


def test_each_row_that_is_named_is_there_and_others_are_left_out(collected):
    every = {_file_test_and_row(test)[:2] for test in collected["gpu"]}
    kept = {_file_test_and_row(test)[:2] for test in collected["gpu and not slow"]}
    for file, tests in QUICK_ROWS.items():
        for name, rows in tests.items():
            assert (file, name) in every, (file, name)
            assert ((file, name) in kept) == (rows is not None), (file, name)


def test_each_file_keeps_a_test_or_says_that_it_does_not(collected):
    kept = {_file_test_and_row(test)[0] for test in collected["gpu and not slow"]}
    for file in {_file_test_and_row(test)[0] for test in collected["gpu"]} - kept:
        assert set(QUICK_ROWS[file].values()) == {None}, file


def test_a_quick_run_stays_small(collected):
    assert len(collected["gpu and not slow"]) < MOST_TESTS
    assert len(collected["gpu"]) > 2000


def test_a_row_is_told_by_its_whole_id() -> None:
    file, name = "ops/attention/test_fp8.py", "test_the_gpu_rotates_like_the_rule"
    assert is_quick_row(file, f"{name}[128]")
    assert not is_quick_row(file, f"{name}[1280]")
    assert is_quick_row(file, "test_of_another_name[3]")
    assert is_quick_row("test_cli.py", f"{name}[3]")
    assert not is_quick_row(
        "kernels/test_chains.py",
        "test_every_run_of_a_chain_gives_the_bits_of_kernels_one_after_the_other",
    )
