"""A line on standard error says what a first call waits for."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from tilewise.kernels.cpu.machine import telling


@pytest.fixture(autouse=True)
def _is_new(monkeypatch):
    """A process that has told nothing and may tell, after no time."""
    monkeypatch.setattr(telling, "_has_told", False)
    monkeypatch.setattr(telling, "MOMENT_S", 0.0)
    monkeypatch.delenv("TILEWISE_PROGRESS", raising=False)


def wait():
    """Run something until the line is written, or for a fifth of a second."""
    until = time.monotonic() + 0.2
    with telling.telling():
        while time.monotonic() < until and not telling._has_told:
            time.sleep(0.001)
        for thread in threading.enumerate():
            if isinstance(thread, threading.Timer):
                thread.join()


def test_a_process_tells_once(capsys):
    wait()
    assert capsys.readouterr().err == f"{telling.LINE}\n"
    wait()
    assert capsys.readouterr() == ("", "")


def test_of_a_moment_nothing_is_told(capsys, monkeypatch):
    monkeypatch.setattr(telling, "MOMENT_S", 60.0)
    with telling.telling():
        timers = [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
    for timer in timers:
        timer.join(5)
        assert not timer.is_alive()
    assert capsys.readouterr().err == ""


def test_the_environment_keeps_it_silent(capsys, monkeypatch):
    for value in ("0", "off", "False"):
        monkeypatch.setenv("TILEWISE_PROGRESS", value)
        wait()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TILEWISE_PROGRESS", "1")
    wait()
    assert telling.LINE in capsys.readouterr().err


def test_a_process_without_standard_error_or_with_a_closed_one_goes_on(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", None)
        wait()
    assert not telling._has_told
    with (tmp_path / "log").open("w") as file:
        pass
    monkeypatch.setattr(sys, "stderr", file)
    with pytest.raises(ValueError, match="closed"):
        file.write("x")
    wait()


def test_a_process_that_may_begin_no_thread_goes_on(monkeypatch, capsys):
    def refuse(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    wait()
    assert capsys.readouterr().err == ""


def test_what_stands_for_standard_error_need_not_know_of_terminals(monkeypatch):
    class Log:
        def __init__(self):
            self.text = ""

        def write(self, text):
            self.text += text

    log = Log()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", log)
        wait()
    assert log.text == f"{telling.LINE}\n"
