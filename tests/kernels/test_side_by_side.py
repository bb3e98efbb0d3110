"""Processes that compile: what they answer, and what becomes of those that do not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from tilewise.kernels.host import compile_worker, side_by_side
from tilewise.kernels.host.requests import Request
from tilewise.kernels.host.side_by_side import Compilers


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(side_by_side, "WORKER", "tests.kernels.fake_compiler")
    monkeypatch.setattr(side_by_side, "BUSY_S", 0.01)


def requests(*names):
    return [Request("module", name, f"{name}{i}", name, b"") for i, name in enumerate(names)]


def compiled(count, *names, seconds=60.0):
    seen = []
    with Compilers(count) as processes:
        processes.begin()
        pids = processes.pids
        outcome = processes.compile(
            requests(*names), seconds=seconds, show=lambda done, total: seen.append((done, total))
        )
    assert len(pids) == count
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return outcome, seen


def test_every_request_is_answered_once():
    outcome, seen = compiled(2, "fine", "found", "busy", "fails", "fine")
    assert outcome.seconds == {"fine0": 0.25, "busy2": 0.25, "fine4": 0.25}
    assert outcome.num_found == 1
    assert outcome.failures == ["fails: ValueError: no"]
    assert outcome.left == []
    assert seen[-1] == (5, 5)


def test_a_process_that_dies_takes_one_kernel_down_and_not_the_others():
    outcome, _ = compiled(3, "dies", "fine", "fine")
    assert sorted(outcome.seconds) == ["fine1", "fine2"]
    assert outcome.failures == ["dies: its process ended"] * 2
    assert outcome.left == []


def test_where_all_processes_die_the_rest_is_left():
    outcome, _ = compiled(1, "dies", "fine")
    assert outcome.seconds == {}
    assert [r.name for r in outcome.left] == ["fine", "dies"]


def test_nobody_waits_longer_than_told():
    began = time.monotonic()
    outcome, _ = compiled(2, "sleeps", "fine", seconds=5.0)
    assert time.monotonic() - began < 20
    assert sorted(outcome.seconds) == ["fine1"]
    assert [r.name for r in outcome.left] == ["sleeps"]
    assert outcome.failures == []


def test_nothing_is_no_wait():
    outcome, _ = compiled(2)
    assert outcome.seconds == {}
    assert outcome.left == []


def test_processes_end_with_an_error_of_the_caller():
    processes = Compilers(2)
    processes.begin()
    with pytest.raises(KeyError) as raised, processes:
        raise KeyError(*processes.pids)
    assert len(raised.value.args) == 2
    for pid in raised.value.args:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_one_of_two_may_compile_a_kernel(monkeypatch, tmp_path):
    monkeypatch.setattr(compile_worker.tempfile, "gettempdir", lambda: str(tmp_path))
    with compile_worker._claimed("a") as first, compile_worker._claimed("a") as second:
        assert (first, second) == (True, False)
        with compile_worker._claimed("b") as other:
            assert other
    with compile_worker._claimed("a") as later:
        assert later
    assert list(tmp_path.glob("*/*")) == []
    monkeypatch.setattr(compile_worker.tempfile, "gettempdir", lambda: "/dev/null")
    with compile_worker._claimed("a") as anywhere:
        assert anywhere


def test_launchers_are_built_where_triton_builds_them_and_not_loaded(monkeypatch):
    from triton.backends.nvidia import driver
    from triton.runtime import build

    built = []

    def launcher(source, metadata):
        module = build._load_module_from_path("launcher", "/nowhere")
        built.append((source, metadata, module.launch))

    monkeypatch.setattr(build, "_load_module_from_path", None)
    monkeypatch.setattr(driver, "CudaLauncher", launcher)
    compiled = SimpleNamespace(src="source", metadata="metadata")
    monkeypatch.delattr(driver, "make_launcher", raising=False)
    compile_worker._build_launcher(compiled)
    assert built == []
    monkeypatch.setattr(driver, "make_launcher", None, raising=False)
    compile_worker._build_launcher(compiled)
    assert built == [("source", "metadata", None)]


def test_a_compiler_ends_when_nobody_asks_any_more():
    command = [sys.executable, "-m", "tilewise.kernels.host.compile_worker"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=60, check=False)
    assert done.returncode == 0
