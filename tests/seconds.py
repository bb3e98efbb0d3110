"""Tell what the tests of each file take: seconds of a core, with those of processes they start.

    python -m pytest -p tests.seconds -p tests.side_by_side --processes 4

Durations tell little where more processes run than there are cores. What is made once, such as a
compiled kernel, is counted where it is first asked for: measure whole runs, from an empty clone.

With `--seconds-to FILE` a line of JSON for each test goes there: its outcome, when it ended, its
seconds, those of a core, the Triton kernels that its process compiled, the most of a GPU's memory
that torch had for it, and the end of what is said of a failure.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_NAME = "seconds of a core"
_PEAK = "bytes of a GPU"
_KERNELS = "kernels compiled"
_MOST_TEXT = 3000  # characters of a failure
_MOST_FILES = 60
_TICKS = os.sysconf("SC_CLK_TCK")

_seconds: Counter[str] = Counter()
_tests: Counter[str] = Counter()
_rows: dict[str, dict[str, Any]] = {}
_path: Path | None = None
_pid = os.getpid()  # who is told what forked processes run
_began = time.time()
_compiled: list[tuple[str, float]] = []  # name and seconds of each kernel of a test
_is_told = False


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seconds-to", type=Path, help="write a line of JSON for each test")


def pytest_configure(config: pytest.Config) -> None:
    global _path
    _path = config.option.seconds_to


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
    if (cuda := _cuda()) is not None:
        cuda.reset_peak_memory_stats()
    _compiled.clear()
    _listen()
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Any:
    try:
        return (yield)
    finally:
        item.user_properties.append((_NAME, spent()))
        if (cuda := _cuda()) is not None:
            item.user_properties.append((_PEAK, cuda.max_memory_reserved()))
        if _compiled:
            item.user_properties.append((_KERNELS, _compiled.copy()))


def _listen() -> None:
    """Be told of kernels from now on, beside who else is: an engine counts them."""
    global _is_told
    knobs = sys.modules.get("triton.knobs")
    if knobs is None or _is_told:
        return
    before, _is_told = knobs.compilation.listener, True

    def note(**what: Any) -> None:
        if not what["cache_hit"]:
            times = what["times"]  # none where a test tells of a kernel that nobody compiled
            seconds = 0.0 if times is None else round(times.total / 1e6, 2)
            _compiled.append((what["src"].name, seconds))
        if before is not None:
            before(**what)

    knobs.compilation.listener = note


def _cuda() -> Any:
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and torch.cuda.is_initialized() else None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    row = _rows.setdefault(report.nodeid, {"test": report.nodeid, "outcome": "passed", "s": 0.0})
    row["s"] = round(row["s"] + report.duration, 2)
    if report.outcome != "passed":
        row["outcome"] = report.outcome
    if report.failed:
        row["text"] = report.longreprtext[-_MOST_TEXT:]
    if report.when == "teardown":
        file = report.nodeid.partition("::")[0]
        seconds = sum(value for name, value in report.user_properties if name == _NAME)
        _tests[file] += 1
        _seconds[file] += seconds
        peak = max((value for name, value in report.user_properties if name == _PEAK), default=0)
        row |= {"core s": round(seconds, 2), "GiB": round(peak / 2**30, 2)}
        row["kernels"] = [
            k for name, some in report.user_properties if name == _KERNELS for k in some
        ]
        row["end"] = round(time.time() - _began, 1)
        if _path is not None and os.getpid() == _pid:  # at once: a run may be stopped
            with _path.open("a") as file_of_rows:
                file_of_rows.write(json.dumps(row) + "\n")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section(f"{_NAME}: {_seconds.total():.1f} in all")
    for file, seconds in _seconds.most_common(_MOST_FILES):
        terminalreporter.line(f"{seconds:7.1f}  {_tests[file]:5} tests  {file}")
