"""Python subprocesses of this package: they import it from here, and nothing from their folder.

`python -c` and `python -m` look for modules in the current folder first. In a folder from
elsewhere, such as a checkpoint, its `json.py` would run. PYTHONSAFEPATH forbids that to a process
and to its children. Two kinds of subprocess exchange lines of JSON with this one.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

__all__ = ["FROM_OUTSIDE", "answer", "ask", "end", "environment", "spawning"]

PATIENCE_S = 5.0
# Signals with which an operator ends a process, or a system that is out of memory.
FROM_OUTSIDE = frozenset({-signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP})
_SAFE = "PYTHONSAFEPATH"


def environment(first: str | None = None, **more: str) -> dict[str, str]:
    """Return the environment variables for a Python subprocess that is to import this package.

    They are this process's, with the folder that has this package in PYTHONPATH, and PYTHONSAFEPATH
    set, so that nothing is imported from the current folder.

    Args:
        first: a folder in which modules are looked for before all others; None for none.
        more: further variables, which replace this process's.
    """
    folders = [first, str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    return {**os.environ, _SAFE: "1", "PYTHONPATH": os.pathsep.join(filter(None, folders)), **more}


@contextmanager
def spawning() -> Iterator[None]:
    """Set PYTHONSAFEPATH in this process during the block, for the processes that multiprocessing
    starts in it."""
    before = os.environ.get(_SAFE)
    os.environ[_SAFE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_SAFE]
        else:
            os.environ[_SAFE] = before


def ask(worker: subprocess.Popen[bytes], message: Any, seconds: float) -> dict[str, Any]:
    """Write a message to the stdin of `worker` as a line of JSON; return the answer, a line of JSON
    from its stdout, parsed.

    Raises:
        OSError: the worker has ended.
        TimeoutError: the answer is not there after `seconds`.
    """
    # Half a surrogate pair, which a JSON text may contain, survives both directions.
    line = json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
    assert worker.stdin is not None
    assert worker.stdout is not None
    until = time.monotonic() + seconds
    inward, outward = worker.stdin.fileno(), worker.stdout.fileno()
    os.set_blocking(inward, False)
    found, rest = bytearray(), memoryview(line)
    # Not select(), which takes no descriptor above 1,023: a worker that is restarted while a
    # thousand clients are connected has larger ones.
    with selectors.PollSelector() as selector:
        selector.register(outward, selectors.EVENT_READ)
        selector.register(inward, selectors.EVENT_WRITE)
        while True:
            left = until - time.monotonic()
            ready = {key.fd for key, _ in selector.select(max(0.0, left))}
            if not ready:
                raise TimeoutError
            if inward in ready:
                rest = rest[os.write(inward, rest[:65536]) :]
                if not rest:
                    selector.unregister(inward)
            if outward not in ready:
                continue
            part = os.read(outward, 1 << 20)
            if not part:
                raise OSError("it has ended")
            found += part
            if found.endswith(b"\n"):
                parsed: dict[str, Any] = json.loads(found)
                return parsed


def answer(content: dict[str, Any]) -> None:
    """Write `content` to standard output as a line of JSON: the answer to `ask`, in the worker
    process."""
    line = json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass")
    sys.stdout.buffer.write(line + b"\n")
    sys.stdout.buffer.flush()


def end(worker: subprocess.Popen[bytes], *, is_ending: bool = False) -> int:
    """Kill a worker process, close its pipes, and return its exit code, -N if signal N ended it.

    Args:
        is_ending: True if the worker is about to exit by itself; it is then killed only after 5 s.
    """
    if is_ending:
        with suppress(subprocess.TimeoutExpired):
            worker.wait(PATIENCE_S)
    if worker.poll() is None:
        worker.kill()
    for stream in (worker.stdin, worker.stdout):
        assert stream is not None
        with suppress(BrokenPipeError):  # input that it had not read
            stream.close()
    return worker.wait()
