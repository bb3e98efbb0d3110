"""The brief part of the quick tests, which `make test` runs; `make test-rest` runs the others.

    python -m tests.brief SECONDS...

A developer waits for `make test`, seven minutes on two cores from an empty clone. Of a test with
many rows it has every fourth, the first among them: most mistakes show in any row. It leaves out
what takes more than half a second of a core, as `later_tests.txt` lists; the command above writes
that list from what `pytest -p tests.seconds --seconds-to SECONDS` has measured in empty clones. All
rows of the files beside this one are brief, since each holds a rule for one file of the package. A
new test is brief, until it is listed. CI runs both parts.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest

_TESTS = Path(__file__).parent
LIST = _TESTS / "later_tests.txt"  # file::test, a line each
SHARE = 4  # one row of so many is brief
MOST_S = 0.5  # of a core, for a row of a brief test


def brief_of(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return the brief ones of the collected tests; none is slow or needs a GPU."""
    rows: defaultdict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        is_quick = not any(item.get_closest_marker(mark) for mark in ("slow", "gpu"))
        if is_quick and item.path.is_relative_to(_TESTS):
            file = item.path.relative_to(_TESTS).as_posix()
            name = getattr(item, "originalname", None) or item.name
            if f"{file}::{name}" not in later():
                rows[file, item.nodeid.split("[")[0]].append(item)
    return [
        item
        for (file, _), some in rows.items()
        for item in (some[::SHARE] if "/" in file else some)
    ]


@cache
def later() -> frozenset[str]:
    """Return the tests that `make test` leaves out, as file::test."""
    return frozenset(LIST.read_text("utf-8").split())


def too_long(runs: Iterable[Iterable[str]]) -> list[str]:
    """Return the tests of which a brief row took too long in some run, as file::test, sorted.

    A test of many rows stays if all but two are short: what took long in those two is a kernel that
    was compiled, which whoever comes first waits for.

    Args:
        runs: the lines that `--seconds-to` wrote, of each run.
    """
    found = set()
    for run in runs:
        seconds: defaultdict[str, list[float]] = defaultdict(list)
        for row in map(json.loads, run):
            seconds[row["test"].split("[")[0]].append(row["core s"])
        for test, rows in seconds.items():
            file, *_, name = test.removeprefix("tests/").split("::")
            brief = rows[::SHARE]
            compiles = len(brief) > 2 and statistics.median(rows) < MOST_S / 5
            if compiles:
                brief = sorted(brief)[:-2]
            if "/" in file and max(brief) > MOST_S:
                found.add(f"{file}::{name}")
    return sorted(found)


if __name__ == "__main__":
    given = [Path(name).read_text("utf-8").splitlines() for name in sys.argv[1:]]
    LIST.write_text("\n".join(too_long(given)) + "\n", encoding="utf-8")
