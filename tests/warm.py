"""Processes of `python -m` that begin with torch and all modules of the tests already imported.

To import torch takes a process two seconds of a core, and the tests start hundreds of processes.
A keeper, forked from a process of tests/side_by_side.py before it runs a test, forks those that a
test asks for: `Popen` is subprocess's for commands [python, "-m", module, ...], with or without a
-P, and `run` is subprocess's for [python, "-c", code]: the same arguments, files, environment and
signals. A `Parent` is a Popen that begins with a keeper of its own, so that the processes that it
starts are warm, too. Without a keeper they are subprocess's own.

What differs from a new interpreter: modules other than the named one stay as they were imported,
with the environment of then. Tests of imports, of the command line and of what is read while torch
or numba is imported use subprocess; so does one test at least of each kind of process.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import fcntl
import json
import logging
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
import types
from typing import Any

import numba
import torch

DEVNULL = subprocess.DEVNULL  # for modules of the package that get this one for subprocess
_SET_CHILD_SUBREAPER = 36  # prctl(2)
_MOST_FILES = 32
_HIGH = 200  # numbers of files that stand in nobody's way
_DRIVER = "/dev/nvidia"  # what torch asked for GPUs before the fork (NVML) goes on with its files

_keeper: socket.socket | None = None
_lock = threading.Lock()
_libc = ctypes.CDLL(None, use_errno=True)


def begin() -> None:
    """Fork the keeper of this process, which must have one thread only."""
    global _keeper
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    if os.fork() == 0:
        ours.close()
        _keep(theirs)
    theirs.close()
    _keeper = ours


def is_kept() -> bool:
    """Whether this process has a keeper."""
    return _keeper is not None


class Popen(subprocess.Popen):
    """A child of this process, as subprocess makes, that the keeper has forked."""

    _has_keeper = False

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
        creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest,
    ):  # fmt: skip
        args = list(map(os.fspath, args))
        rest_of = args[2:] if args[1] == "-P" else args[1:]
        if _keeper is None or args[0] != sys.executable or rest_of[0] not in ("-m", "-c"):
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo,
                creationflags, shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite,
                *rest,
            )  # fmt: skip
            return
        *_, start_new_session, process_group = rest
        assert preexec_fn is None
        assert not shell
        assert process_group == -1
        given = zip((0, 1, 2), (p2cread, c2pwrite, errwrite), strict=True)
        files = {there: there if here == -1 else here for there, here in given}
        files |= {number: number for number in pass_fds}
        ask = {
            "is_code": rest_of[0] == "-c", "what": rest_of[1], "arguments": rest_of[2:],
            "has_keeper": self._has_keeper,
            "files": list(files),
            "folder": os.getcwd() if cwd is None else os.fspath(cwd),
            "has_session": bool(start_new_session),
            "environment": dict(os.environ if env is None else env),
        }  # fmt: skip
        self.pid = _ask(ask, list(files.values()))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)


class Parent(Popen):
    """A child whose own children are warm."""

    _has_keeper = True


def run(
    args: list[str], *, check: bool, timeout: float = 240, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return what it said."""
    with Popen(args, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options) as child:
        try:
            said = child.communicate(timeout=timeout)
        except BaseException:
            child.kill()
            raise
    done = subprocess.CompletedProcess(args, child.returncode, *said)
    if check:
        assert done.returncode == 0, done.stderr
    return done


def _ask(ask: dict[str, Any], files: list[int]) -> int:
    """Let the keeper start a process; it becomes this one's child, whose number is returned."""
    with _lock:
        # What the keeper forks loses its parent, and goes to the next one above that takes orphans.
        _libc.prctl(_SET_CHILD_SUBREAPER, 1)
        try:
            data = json.dumps(ask).encode()
            socket.send_fds(_keeper, [len(data).to_bytes(8, "little")], files)
            _keeper.sendall(data)
            answer = _keeper.recv(8)
        finally:
            _libc.prctl(_SET_CHILD_SUBREAPER, 0)
    if not answer:
        raise OSError("the keeper of warm processes has ended")
    return int.from_bytes(answer, "little")


def _keep(line: socket.socket) -> None:
    """Start processes until who asks is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        head, files, _, _ = socket.recv_fds(line, 8, _MOST_FILES)
        if not head:
            os._exit(0)
        data, size = b"", int.from_bytes(head, "little")
        while len(data) < size:
            data += line.recv(size - len(data))
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            first_parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                while os.getppid() == first_parent:  # until it belongs to who asks
                    time.sleep(0.0005)
                _run(json.loads(data), files)
            os.write(writing, pid.to_bytes(8, "little"))
            os._exit(0)
        for file in files:
            os.close(file)
        os.waitpid(between, 0)  # now the process that it forked is a child of who asks
        line.sendall(os.read(reading, 8))
        os.close(reading)
        os.close(writing)


def _run(ask: dict[str, Any], files: list[int]) -> None:
    """Be a new process: its files, signals, environment; then the module, and the end."""
    status = 1
    try:
        _become(ask, files)
        if ask["has_keeper"]:
            begin()
            # What it runs starts its processes by subprocess, and is not to know of this.
            subprocess.Popen = Popen  # type: ignore[misc]
        if ask["is_code"]:
            sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(ask["what"], "<string>", "exec"), vars(sys.modules["__main__"]))
        else:
            sys.modules.pop(ask["what"], None)
            runpy.run_module(ask["what"], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _become(ask: dict[str, Any], files: list[int]) -> None:
    faulthandler.disable()
    atexit._clear()
    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    high = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, _HIGH) for file in files]
    for source, target in zip(high, ask["files"], strict=True):
        os.dup2(source, target)
    # What pytest opened leads nowhere from here on. Its numbers stay taken: were they free, a
    # socket could get one, and what still writes to the old file would write into the socket.
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in ask["files"]:
            with contextlib.suppress(OSError):
                if not os.readlink(f"/proc/self/fd/{name}").startswith(_DRIVER):
                    os.dup2(nowhere, int(name), inheritable=False)
    _forget_pytest()
    # A process that is forked from here replaces them, and must keep the files.
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    if ask["has_session"]:
        os.setsid()
    os.chdir(ask["folder"])
    os.environ.clear()
    os.environ.update(ask["environment"])
    sys.argv = ["-c" if ask["is_code"] else "-m", *ask["arguments"]]
    numba.config.reload_config()
    if (count := os.environ.get("OMP_NUM_THREADS")) is not None:
        torch.set_num_threads(int(count))


def _forget_pytest() -> None:
    """Take pytest's handlers and hooks off.

    With its handlers logging counts as set up, and a program that sets it up says nothing; its
    hooks keep what a thread raises for a report that nobody makes here.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        root.removeHandler(handler)
    root.setLevel(logging.WARNING)
    threading.excepthook = threading.__excepthook__
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
