"""Tell what the tests of each file take: seconds of a core, with those of processes they start.

    python -m pytest -p tests.seconds -p tests.side_by_side --processes 4

Durations tell little where more processes run than there are cores. What is made once, such as a
compiled kernel, is counted where it is first asked for: measure whole runs, from an empty clone.
"""

from __future__ import annotations

import os
import resource
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_NAME = "seconds of a core"
_MOST_FILES = 60
_TICKS = os.sysconf("SC_CLK_TCK")

_seconds: Counter[str] = Counter()
_tests: Counter[str] = Counter()


def spent() -> float:
    """Return what this process has taken until now, and all below it, living and waited for."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    waiting = _children("self")
    while waiting:
        pid = waiting.pop()
        waiting += _children(pid)
        try:
            stat = Path("/proc", pid, "stat").read_text()
        except OSError:
            continue  # it has ended
        fields = stat.rpartition(")")[2].split()
        total += sum(map(int, fields[11:15])) / _TICKS  # its own, and of those it waited for
    return total


def _children(pid: str) -> list[str]:
    found: list[str] = []
    try:
        for thread in Path("/proc", pid, "task").iterdir():
            found += (thread / "children").read_text().split()
    except OSError:
        pass  # it has ended
    return found


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Any:
    item.user_properties.append((_NAME, -spent()))
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    try:
        return (yield)
    finally:
        item.user_properties.append((_NAME, spent()))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "teardown":
        file = report.nodeid.partition("::")[0]
        _tests[file] += 1
        _seconds[file] += sum(value for name, value in report.user_properties if name == _NAME)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section(f"{_NAME}: {_seconds.total():.1f} in all")
    for file, seconds in _seconds.most_common(_MOST_FILES):
        terminalreporter.line(f"{seconds:7.1f}  {_tests[file]:5} tests  {file}")
