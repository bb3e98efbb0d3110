"""Run files of tests in several processes that are forked once all tests are collected.

    python -m pytest -p tests.side_by_side --processes 4

To import the modules of the tests takes 10 s of a core, 30 where Python keeps no compiled ones, and
most of a gigabyte: forked processes share both, where pytest-xdist's workers each begin anew. So do
the processes that tests start, unless a process that has imported torch is there to be forked
(`tests/warm.py`), which one of xdist's, with threads of its own, should not be. Four processes took
seconds of a core (AMD EPYC, Python 3.11, 2026-11-23), here and with pytest-xdist 3.8:
- 18 and 44 to collect tests/engine and tests/server and run 222 short tests of them;
- 76 and 202 for 110 tests of the engine's workers, its process, and of ranks (here 117, those of
  this module among them).

Many tests wait, for clocks and for processes of their own; with more processes than cores the
cores are busy meanwhile.

The first process hands out files and reports. One that a test ends is reported as that test's
failure; another is forked, which goes on behind it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parent
# Files, or folders of them, that take longest: those that begin last should be short. Of kernels
# that are compiled once a machine each is compiled by who comes first, while others wait for it.
_FIRST = (
    "kernels/test_compile.py", "engine/tensor_parallel/", "kernels/cpu/test_attention",
    "kernels/gluon/test_schedules.py", "kernels/cpu/", "lab/test_context.py", "distributed/",
    "test_cli.py", "engine/test_group_models.py", "engine/test_loop.py",
    "server/test_engine_process.py", "engine/", "kernels/gluon/", "server/", "kernels/triton/",
    "test_doc_snippets.py", "bench/", "lab/", "test_wheel.py", "test_side_by_side.py",
    "test_architecture.py", "ops/", "training/",
)  # fmt: skip
# On a GPU: what waits for processes of its own or compiles for long, then few rows of much to
# compile each.
_FIRST_ON_A_GPU = (
    "training/", "server/", "engine/tensor_parallel/", "distributed/", "engine/test_graphs.py",
    "engine/", "ops/test_sampling.py", "kernels/gluon/test_attention_bwd.py",
    "kernels/triton/test_attention.py", "kernels/gluon/", "ops/attention/",
    "ops/paged/test_plan.py", "ops/test_containment.py", "ops/test_decode_rows.py",
    "kernels/triton/", "integrations/",
)  # fmt: skip
# Files that share what is made once, processes or compiled kernels: one process takes them all.
_TOGETHER = (
    ("tests/distributed/",),
    ("tests/kernels/cpu/test_attention",),
    ("tests/engine/tensor_parallel/",),
    ("tests/kernels/test_compile.py", "tests/kernels/test_early.py"),
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--processes", type=int, default=1, help="run files of tests in so many processes"
    )
    parser.addoption(
        "--at-most", type=int, default=0,
        help="hand out so many tests of a file at a time, where few files take most of the time",
    )  # fmt: skip


def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Bound threads before torch is imported, which reads this once."""
    count = early_config.known_args_namespace.processes
    if count > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // count)))
        # torch asks NVML for GPUs, not the driver: that could not be used in forked processes.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        # An engine's start on a GPU would have processes of its own for every core, and another
        # engine starts beside it.
        os.environ.setdefault("TILEWISE_COMPILE_PROCESSES", "0")


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.option.processes
    if count < 2 or session.config.option.collectonly or session.testsfailed:
        return None  # pytest's own loop runs the tests, or says what is wrong
    others = [
        thread.name for thread in threading.enumerate() if thread is not threading.main_thread()
    ]
    if others:
        raise pytest.UsageError(f"--processes forks, and collecting left threads: {others}")
    if why := _why_no_gpu_behind_a_fork(session.items):
        raise pytest.UsageError(f"--processes forks, and {why}")
    _prepare_numba()
    _Parent(session, count).run()
    return True


def _prepare_numba() -> None:
    """Let numba read before a fork what it does when it first loads a kernel: 0.2 s of a core."""
    if (numba := sys.modules.get("numba")) is not None:
        numba.njit(lambda numbers: numbers.sum())(sys.modules["numpy"].zeros(1))


def _why_no_gpu_behind_a_fork(items: list[pytest.Item]) -> str | None:
    """Say what forbids forked processes to use a GPU, if tests need one; a forked one tries.

    CUDA's driver works in the process that it began in alone, and who asks it anything begins it.
    """
    torch = sys.modules.get("torch")
    if torch is None or not any(item.get_closest_marker("gpu") for item in items):
        return None
    if torch.cuda.is_initialized():
        return "collecting began to use CUDA: what needs a GPU belongs into tests and fixtures"
    if not torch.cuda.is_available():
        return None
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            torch.cuda.init()
            torch.zeros(1, device="cuda")
        except BaseException as error:
            os.write(writing, f"{type(error).__name__}: {error}".encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as answer:
        why = answer.read()
    _, status = os.waitpid(pid, 0)
    if status:
        why += f" (the process ended with status {status})"
    return f"CUDA, which collecting may have asked for something, said: {why}" if why else None


def _groups(items: list[pytest.Item], count: int, at_most: int) -> list[list[pytest.Item]]:
    """Return the tests by files, or by what stays together, in the order in which they begin.

    Fewer files than processes are handed out test by test, and no more than `at_most` tests of a
    file at a time where that is not 0.
    """
    groups: dict[str, list[pytest.Item]] = {}
    whole = len({item.path for item in items}) >= count
    for item in items:
        file = item.nodeid.partition("::")[0]
        name = next((files[0] for files in _TOGETHER if file.startswith(files)), None)
        groups.setdefault(name or (file if whole else item.nodeid), []).append(item)

    on_a_gpu = all(item.get_closest_marker("gpu") for item in items)
    order = _FIRST_ON_A_GPU if on_a_gpu else _FIRST

    def place(name: str) -> int:
        short = name.removeprefix(f"{_TESTS.name}/")
        return next((i for i, start in enumerate(order) if short.startswith(start)), len(order))

    ordered = [groups[name] for name in sorted(groups, key=place)]  # by name, places being equal
    size = at_most or len(items) or 1
    return [
        group[first : first + size] for group in ordered for first in range(0, len(group), size)
    ]


class _Child:
    """What the first process knows of another one."""

    def __init__(self, number: int, pid: int, line: Connection) -> None:
        self.number, self.pid, self.line = number, pid, line
        self.left: deque[pytest.Item] = deque()  # handed out and not yet finished
        self.is_ended = False


class _Parent:
    """Hands out files of tests and reports what comes back."""

    def __init__(self, session: pytest.Session, count: int) -> None:
        self.session, self.config, self.count = session, session.config, count
        self.waiting = deque(_groups(session.items, count, session.config.option.at_most))
        self.children: list[_Child] = []
        self._num_started = 0
        self._is_stopped = False
        self._places = {id(item): i for i, item in enumerate(session.items)}

    def run(self) -> None:
        session = self.session
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if terminal is not None:
            terminal.showfspath = False  # files run beside one another
        self.config._tmp_path_factory.getbasetemp()  # each process has a folder in it
        for _ in range(min(self.count, len(self.waiting))):
            self._start()
        try:
            while self.children:
                lines = {child.line: child for child in self.children}
                for line in wait(list(lines)):
                    self._hear(lines[line])
                if (session.shouldfail or session.shouldstop) and not self._is_stopped:
                    self._is_stopped = True
                    self.waiting.clear()
                    for child in self.children:
                        os.kill(child.pid, signal.SIGINT)
        finally:
            for child in self.children:
                child.line.close()
                os.waitpid(child.pid, 0)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)

    def _start(self) -> None:
        ours, theirs = Pipe()
        self._num_started += 1
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            ours.close()
            for child in self.children:
                child.line.close()
            _run_child(self.session, theirs, self._num_started)
        theirs.close()
        self.children.append(_Child(self._num_started, pid, ours))

    def _hear(self, child: _Child) -> None:
        """Take one message of a process, or its end."""
        message = _received(child.line)
        if message is None:
            self._end(child)
            return
        what, value = message
        if what == "finished":
            item = child.left.popleft()
            name, reports = value
            assert item.nodeid == name, (item.nodeid, name)
            hook = self.config.hook
            for data in reports:
                report = hook.pytest_report_from_serializable(config=self.config, data=data)
                hook.pytest_runtest_logreport(report=report)
        elif what == "next":
            group = self.waiting.popleft() if self.waiting else []
            child.left.extend(group)
            child.line.send([self._places[id(item)] for item in group])
        elif what == "end":
            child.is_ended = True
        else:  # what went wrong around the tests
            raise RuntimeError(f"process {child.number} of the tests failed:\n{value}")

    def _end(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self.children.remove(child)
        child.line.close()
        if child.is_ended:
            return
        code = os.waitstatus_to_exitcode(status)
        how = f"signal {-code}" if code < 0 else f"status {code}"
        if not child.left:
            raise RuntimeError(f"process {child.number} of the tests ended with {how}")
        item = child.left.popleft()
        report = pytest.TestReport(
            item.nodeid, item.location, {}, "failed",
            f"the process that ran this test ended with {how}", "call",
        )  # fmt: skip
        self.config.hook.pytest_runtest_logreport(report=report)
        if child.left and not self._is_stopped:
            self.waiting.appendleft(list(child.left))
        if self.waiting:
            self._start()


def _received(line: Connection) -> Any:
    """Return the next message, or None where the other end is closed."""
    try:
        return line.recv()
    except (EOFError, ConnectionResetError):
        return None


class _Teller:
    """Sends the first process what pytest reports in this one, at the end of each test."""

    def __init__(self, config: pytest.Config, line: Connection) -> None:
        self.config, self.line = config, line
        self._reports: list[Any] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self._reports.append(data)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.line.send(("finished", (nodeid, self._reports)))
        self._reports = []


def _handed_out(session: pytest.Session, line: Connection) -> Iterator[pytest.Item]:
    while True:
        line.send(("next", None))
        places = line.recv()
        if not places:
            return
        for place in places:
            yield session.items[place]


def _run_child(session: pytest.Session, line: Connection, number: int) -> None:
    """Run what is handed out, and end this process."""
    try:
        _prepare_child(session, line, number)
        items = _handed_out(session, line)
        item = next(items, None)
        while item is not None:
            following = next(items, None)  # what both need stays
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        session._setupstate.teardown_exact(None)
        line.send(("end", None))
    except (BrokenPipeError, ConnectionResetError, EOFError):
        pass  # the first process is gone
    except KeyboardInterrupt:
        session._setupstate.teardown_exact(None)
        line.send(("end", None))
    except BaseException:
        line.send(("error", traceback.format_exc()))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _prepare_child(session: pytest.Session, line: Connection, number: int) -> None:
    config: Any = session.config
    plugins = config.pluginmanager
    # The files that captured output goes to would be shared with the other processes.
    capture = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture(in_=True)
    terminal = plugins.get_plugin("terminalreporter")
    if terminal is not None:
        plugins.unregister(terminal)
    folders = config._tmp_path_factory
    folders._given_basetemp = folders.getbasetemp() / f"process-{number}"
    folders._basetemp = None
    plugins.register(_Teller(config, line), "teller")
    if "torch" in sys.modules:
        from tests import warm

        warm.begin()
