"""Progress on terminals, wide, narrow and dumb, and in pipes."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import termios

import pytest

from tests import warm
from tilewise import progress
from tilewise.progress import Progress, is_wanted, say, writes_over

WORK = """
import sys, time
from tilewise.progress import Progress, say
with Progress() as shown:
    for i in range(4):
        shown.show(f"loading {i} of 4 parts of a model with a name that is quite long", i / 4)
        time.sleep(0.15)
    say("a line that stays")
print("done", file=sys.stderr)
"""


class Terminal(io.StringIO):
    def isatty(self):
        return True

    def fileno(self):
        return 0


@pytest.fixture
def clock(monkeypatch):
    """Seconds since the start, which a test moves."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda fd: os.terminal_size((80, 24)))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("COLUMNS", raising=False)
    return now


def test_a_line_on_a_terminal_is_written_over_and_wiped(clock):
    stream = Terminal()
    with Progress(stream=stream) as shown:
        shown.show("1/2")
        clock[0] += 1
        shown.show("2/2")
    assert stream.getvalue() == "\r\x1b[K1/2\r\x1b[K2/2\r\x1b[K"
    shown.close()
    assert stream.getvalue().count("\r") == 3


def test_a_line_is_not_written_more_often_than_ten_times_a_second(clock):
    stream = Terminal()
    shown = Progress(stream=stream)
    for i in range(5):
        shown.show(str(i))
        clock[0] += 0.03
    assert stream.getvalue() == "\r\x1b[K0\r\x1b[K4"


def test_a_pipe_gets_whole_lines_now_and_then_and_none_of_short_work(clock):
    stream = io.StringIO()
    with Progress(stream=stream) as shown:
        for second in range(21):
            clock[0] = 100.0 + second
            shown.show(f"{second} of 40", second / 40)
    assert stream.getvalue() == "10 of 40, 30 s left\n20 of 40, 20 s left\n"
    with Progress(stream=stream) as shown:
        shown.show("short")
    assert "short" not in stream.getvalue()


@pytest.mark.parametrize(
    ("seconds", "share", "said"),
    [
        (10.0, 0.5, ", 10 s left"), (10.0, 0.25, ", 30 s left"), (60.0, 0.1, ", 9 min left"),
        (3600.0, 0.2, ", 4 h left"), (1.0, 0.5, ""), (10.0, 0.0, ""), (10.0, None, ""),
        (10.0, 1.0, ""),
    ],
)  # fmt: skip
def test_the_time_left_follows_from_the_share_that_is_done(clock, seconds, share, said):
    stream = Terminal()
    shown = Progress(stream=stream)
    clock[0] += seconds
    shown.show("1/2", share)
    assert stream.getvalue() == f"\r\x1b[K1/2{said}"


def test_a_share_that_is_smaller_begins_other_work(clock):
    stream = Terminal()
    shown = Progress(stream=stream)
    clock[0] += 100
    shown.show("first", 0.9)
    clock[0] += 1
    shown.show("second", 0.0)
    clock[0] += 5
    shown.show("second", 0.5)
    assert stream.getvalue().endswith("second\r\x1b[Ksecond, 5 s left")


@pytest.mark.parametrize(
    ("columns", "told", "shown"),
    [(10, "", "capturin…"), (20, "", "capturing steps"), (15, "", "capturing ste…"),
     (0, "", "capturing steps"), (80, "10", "capturin…"), (0, "10", "capturin…"),
     (10, "80", "capturin…"), (80, "x", "capturing steps")],
)  # fmt: skip
def test_a_line_is_cut_to_the_width_of_the_terminal(monkeypatch, clock, columns, told, shown):
    size = os.terminal_size((columns, 24))
    monkeypatch.setattr(progress.os, "get_terminal_size", lambda fd: size)
    monkeypatch.setenv("COLUMNS", told)
    stream = Terminal()
    Progress(stream=stream).show("capturing steps")
    assert stream.getvalue() == f"\r\x1b[K{shown}"


def test_what_is_asked_for_goes_before_the_environment(monkeypatch):
    monkeypatch.setenv("TILEWISE_PROGRESS", "off")
    assert not is_wanted()
    assert is_wanted(True)
    assert not Progress().is_shown
    monkeypatch.setenv("TILEWISE_PROGRESS", "1")
    assert is_wanted()
    assert not Progress(False).is_shown
    monkeypatch.setattr(sys, "stderr", None)  # a process without it
    assert not is_wanted(True)
    say("nobody hears this")
    with Progress() as shown:
        shown.show("nor this")


def test_a_dumb_terminal_is_a_pipe(monkeypatch, clock):
    stream = Terminal()
    assert writes_over(stream)
    monkeypatch.setenv("TERM", "dumb")
    assert not writes_over(stream)
    shown = Progress(stream=stream)
    clock[0] += 11
    shown.show("a line")
    assert stream.getvalue() == "a line\n"


def test_a_stream_that_was_closed_ends_no_work(monkeypatch, clock):
    stream = Terminal()
    shown = Progress(stream=stream)
    shown.show("before")
    stream.close()
    clock[0] += 1
    shown.show("after")
    shown.close()
    monkeypatch.setattr(sys, "stderr", stream)
    say("after")


def on_terminal(columns, **variables):
    """Run the work with its standard error on a terminal; returns what that received."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    given = {"TERM": "xterm", "TILEWISE_PROGRESS": "1"} | variables
    process = warm.Popen([sys.executable, "-c", WORK], stderr=theirs, env=dict(os.environ) | given)
    os.close(theirs)
    found = b""
    try:
        while part := os.read(ours, 4096):
            found += part
    except OSError:  # Linux says so when the other end is closed
        pass
    assert process.wait() == 0
    os.close(ours)
    return found.decode()


@pytest.mark.parametrize(("columns", "variables"), [(40, {}), (120, {"COLUMNS": "40"})])
def test_a_narrow_terminal_never_wraps_and_keeps_what_was_said(columns, variables):
    found = on_terminal(columns, NO_COLOR="1", **variables)
    lines = re.split(r"\r\x1b\[K|\r?\n", found)
    assert all(len(line) < 40 for line in lines)
    assert sum(line.endswith("…") for line in lines) >= 2
    assert not re.search(r"\x1b\[[0-9;]*m", found)  # no colours
    assert found.endswith("\r\x1b[Ka line that stays\r\n\r\x1b[Kdone\r\n")


def test_a_pipe_has_no_control_characters():
    process = warm.run(
        [sys.executable, "-c", WORK], check=True,
        env=dict(os.environ) | {"TILEWISE_PROGRESS": "1", "TERM": "xterm"},
    )  # fmt: skip
    assert process.stderr == "a line that stays\ndone\n"
