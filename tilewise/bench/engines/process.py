"""The side of the benchmark that asks: an engine's process, its answers, and its time limits."""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilewise.children import environment

__all__ = ["EngineFailed", "EngineProcess"]

ROOT = Path(__file__).parents[3]
_LOG_SHOWN = 600  # characters of the log's end in a message


class EngineFailed(RuntimeError):
    """An engine answered that it failed, ended, or took too long."""


class EngineProcess:
    """An engine that runs in a process of its own beside this one, and is asked in lines of JSON,
    see `worker.py`.

    Args:
        name: one of `worker.ENGINES`.
        settings: the settings that its module reads.
        log: file for what it prints.
        python: interpreter of its environment; None is this one.
        path: folder that goes before all others on its PYTHONPATH.
        threads: the number of threads of its CPU work; None leaves the number alone.
        start_timeout: seconds until it must be ready.

    Attributes:
        facts: the first answer of the engine; "start_s" is the time until it was ready, imports
            included.

    Raises:
        EngineFailed: the engine did not start.
    """

    def __init__(
        self,
        name: str,
        settings: dict[str, Any],
        log: Path,
        *,
        python: str | None = None,
        path: str | None = None,
        threads: int | None = None,
        start_timeout: float = 900.0,
    ) -> None:
        self.name, self.log = name, log
        own = environment(path)
        if threads is not None:
            names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
            own |= dict.fromkeys(names, str(threads))
        # As the command line of tilewise sets it: waiting threads must not take busy cores.
        own.setdefault("GOMP_SPINCOUNT", "1000")
        self._stderr = log.open("ab")
        self._process = subprocess.Popen(
            [python or sys.executable, "-m", "tilewise.bench.engines.worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=own,
            text=True,
        )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        try:
            self.facts = self.ask({"threads": threads, **settings}, start_timeout)
        except EngineFailed:
            self.close()
            raise

    def ask(self, request: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Send a request to the engine, as `worker.py` describes it, and return the answer.

        Raises:
            EngineFailed: the engine says that it failed, has ended, or does not answer within
                `timeout` seconds; in the last case it is stopped.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._answers.get(timeout=timeout)
        except (OSError, ValueError):  # its pipe is broken, or closed
            line = ""
        except queue.Empty:
            self.close()
            raise EngineFailed(f"{self.name} gave no answer in {timeout:.0f} s") from None
        if not line:
            self._answers.put("")  # a further question is answered at once, too
            raise EngineFailed(f"{self.name} ended: {self._end_of_log()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineFailed(answer["error"])
        return answer

    def close(self) -> None:
        """Stop the engine, by force after 10 s, and wait until its process has ended, so that its
        memory is free."""
        process = self._process
        assert process.stdin is not None
        with suppress(OSError, ValueError):  # it may have ended by itself, and be closed already
            process.stdin.write('{"do": "stop"}\n')
        with suppress(OSError):
            process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        if process.poll() is None:
            process.kill()
        process.wait()
        self._stderr.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                self._answers.put(line)
        self._answers.put("")

    def _end_of_log(self) -> str:
        text = self.log.read_text(errors="replace")[-_LOG_SHOWN:]
        return " ".join(text.split()) or "it said nothing"
