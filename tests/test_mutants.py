"""Planted mistakes: each has its place in the sources, and the runner tells seen from not seen."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, verdict


@pytest.mark.parametrize("name", MUTANTS)
def test_what_a_mistake_changes_stands_there_once(name: str, tmp_path: Path) -> None:
    mutant = MUTANTS[name]
    copy = tmp_path / mutant.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutant.file, copy)
    mutant.plant(tmp_path)
    compile(copy.read_text(), mutant.file, "exec")
    assert mutant.old.split() != mutant.new.split()
    assert (ROOT / mutant.tests[0]).exists()


def test_the_runner_tells_seen_from_not_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # else half of what it takes
    (tmp_path / "one.py").write_text("ONE = 1\n")
    (tmp_path / "test_one.py").write_text(
        "from one import ONE\n\n\ndef test_one():\n    assert ONE == 1\n"
    )
    assert verdict(Mutant("one.py", "", "1", "2", ("test_one.py",)), tmp_path) == "seen"
    assert verdict(Mutant("one.py", "", "1", "2 - 1", ("test_one.py",)), tmp_path) == "NOT SEEN"
    assert verdict(Mutant("one.py", "", "3", "4", ("test_one.py",)), tmp_path).startswith(
        "NOT PLANTED"
    )
    assert verdict(Mutant("one.py", "", "1", "2", ("no_test.py",)), tmp_path).startswith(
        "NO RESULT"
    )
    assert (tmp_path / "one.py").read_text() == "ONE = 1\n"
