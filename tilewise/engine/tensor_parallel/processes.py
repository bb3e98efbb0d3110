"""The worker processes of a parent: started, told, watched, ended. No torch.

Each has a socket of its own to the parent, inherited, so that no port is taken and no other
process can speak. The ranks find one another by files of a private folder. A thread of the parent
reads what they say: a worker that ends, or is silent, or stays where it is for long while the
others wait, ends all, and those that wait are told why.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tilewise.distributed.environment import worker_environment
from tilewise.engine.tensor_parallel.wire import FrameReader, encoded, error_of, send
from tilewise.errors import CheckpointError, UnsupportedError, WorkerLostError

__all__ = ["Workers", "worker_environment"]

WORKER = "tilewise.engine.tensor_parallel.worker"  # the module that each process runs
# Seconds without a word. A worker says every second that it lives; its thread for that may wait
# for the interpreter while the other one imports or compiles.
SILENCE_S = 20.0
# The same before its first word, while it imports torch, perhaps from a slow disk.
FIRST_WORD_S = 300.0
# Seconds without a collective or a finished step anywhere, while a step runs.
STANDSTILL_S = 300.0
# Seconds that the others have to fail, too, when one has failed in a step: then no rank is left
# waiting in a collective, and the step may be run again.
AGREEMENT_S = 5.0
WATCH_S = 0.5
END_S = 5.0  # for processes to end by themselves
_LOG_SHOWN = 600  # characters, in a sentence
_LOG_NOTED = 6000  # in lines beneath an error
_AT_START = {kind.__name__: kind for kind in (CheckpointError, UnsupportedError)}


class _Member:
    """One worker as the parent sees it: its process, its socket and the messages that it has
    sent."""

    def __init__(self, rank: int, process: subprocess.Popen[bytes], line: socket.socket) -> None:
        self.rank, self.process, self.line = rank, process, line
        self.frames = FrameReader()
        self.last_word = time.monotonic()
        self.has_spoken = False
        self.num_calls = -1
        self.words: list[list[Any]] = []  # of the start
        self.answers: dict[int, list[Any]] = {}  # to steps


class Workers:
    """N processes that run the same steps.

    Args:
        size: the number of workers.
        settings: plain data for the `worker` module; each worker also gets its rank, and the file
            by which the ranks meet.

    Attributes:
        error: the error that says why the workers are lost; None while they work.
        on_lost: a function that is called once with `error` when the workers are lost, on the
            thread that watches or one that waits.

    Raises:
        OSError: a process cannot be started.
    """

    def __init__(self, size: int, settings: dict[str, Any]) -> None:
        self.size = size
        self.error: WorkerLostError | None = None
        self.on_lost: Callable[[WorkerLostError], None] | None = None
        self._is_closed = False
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._lock = threading.Lock()  # around writing, and the end
        self._unanswered: dict[int, float] = {}  # steps, and when they were sent
        self._last_progress = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="tilewise-"))
        self._num_asked = 0
        self._members: list[_Member] = []
        try:
            for rank in range(size):
                self._members.append(self._start(rank))
            for member, window in zip(self._members, self.windows, strict=True):
                meeting = {
                    "rank": member.rank,
                    "size": size,
                    "meeting": str(self._folder / "meet"),
                    "window": str(window),
                }
                send(member.line, ["settings", settings | meeting])
        except BaseException:
            self.close()
            raise
        threading.Thread(target=self._watch, name="tilewise-workers", daemon=True).start()

    def _start(self, rank: int) -> _Member:
        ours, theirs = socket.socketpair()
        with theirs, (self._folder / f"log-{rank}").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", WORKER, str(theirs.fileno()), str(self._folder)],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=worker_environment(),
                start_new_session=True,
            )
        return _Member(rank, process, ours)

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers, by rank."""
        return [member.process.pid for member in self._members]

    @property
    def windows(self) -> list[Path]:
        """Paths of the files through which blocks' bytes are handed over, by rank; workers make
        them."""
        return [self._folder / f"window-{rank}" for rank in range(self.size)]

    def tell(self, message: list[Any]) -> None:
        """Send all workers a message, without waiting for an answer.

        Raises:
            WorkerLostError: a worker is lost.
        """
        frame = encoded(message)
        with self._lock:
            self._check()
            for member in self._members:
                try:
                    member.line.sendall(frame)
                except OSError:
                    break  # the thread that watches will say how it ended
            else:
                return
        self._wait_for(lambda: False, END_S)
        raise self._lost(f"worker {member.rank} of {self.size} cannot be reached")

    def submit(self, number: int, message: list[Any]) -> None:
        """Send all workers a step, without waiting; `answer` waits for the step of this number.

        Raises:
            WorkerLostError: a worker is lost.
        """
        with self._changed:
            now = time.monotonic()
            if not self._unanswered:
                self._last_progress = now
            self._unanswered[number] = now
        self.tell(["step", number, message])

    def call(self, what: str, *values: Any) -> None:
        """Let all workers do the task `what` between two steps, and wait until all have done it.

        Raises:
            WorkerLostError: a worker is lost, or has failed where others have not.
            Exception: the error with which all workers have failed.
        """
        with self._changed:
            self._num_asked += 1
            number = -1 - self._num_asked  # steps count up from 1; -1 is what fails at the start
            if not self._unanswered:
                self._last_progress = time.monotonic()
            self._unanswered[number] = time.monotonic()
        self.tell([what, number, *values])
        self.answer(number)

    def words(self) -> list[Any]:
        """Wait until each worker has sent the next message of its start; return the messages by
        rank.

        Raises:
            WorkerLostError: a worker is lost.
            Exception: the error with which a worker failed; all workers have ended then.
        """
        self._wait_for(lambda: self._has_failed() or all(m.words for m in self._members))
        for member in self._members:
            if member.words and member.words[0][0] == "failed":
                _, _, name, message = member.words[0]
                said = self._log(member)
                self.close()
                if name in _AT_START:
                    raise _AT_START[name](message)
                if name in ("MemoryError", "OutOfMemoryError"):  # the others may have enough
                    message = f"worker {member.rank} of {self.size}: {message}"
                error = error_of(name, message)
                error.add_note(f"worker {member.rank} of {self.size} wrote at its end:\n{said}")
                raise error
        return [member.words.pop(0)[1] for member in self._members]

    def _has_failed(self) -> bool:
        return any(m.words and m.words[0][0] == "failed" for m in self._members)

    def answer(self, number: int) -> list[Any]:
        """Wait until all workers have done the step of this number; return the message of the first
        rank.

        The message is ["done", number, samples, number of compilations].

        Raises:
            WorkerLostError: a worker is lost, or has failed where others have not.
            Exception: the error with which all workers have failed; the workers can go on.
        """
        members = self._members
        self._wait_for(
            lambda: (
                any(number in m.answers and m.answers[number][0] == "failed" for m in members)
                or all(number in m.answers for m in members)
            )
        )
        self._wait_for(lambda: all(number in m.answers for m in members), AGREEMENT_S)
        with self._changed:
            answers = [m.answers.pop(number, None) for m in members]
            self._unanswered.pop(number, None)
        failed = [i for i, a in enumerate(answers) if a is not None and a[0] == "failed"]
        if not failed:
            first = answers[0]
            assert first is not None
            return first
        broken = answers[failed[0]]
        assert broken is not None
        error = error_of(*broken[2:])
        if len(failed) < self.size:
            raise self._lost(
                f"worker {failed[0]} of {self.size} failed in a step: {error}"
            ) from error
        raise error

    def _wait_for(self, holds: Any, timeout: float | None = None) -> bool:
        """Wait until `holds()` is true; return whether it is, which it may not be after `timeout`
        seconds.

        Raises:
            WorkerLostError: a worker is lost, or the workers have been ended.
        """
        with self._changed:
            found = self._changed.wait_for(lambda: self.error is not None or holds(), timeout)
        self._check()
        return found

    def _check(self) -> None:
        if self.error is not None:
            raise WorkerLostError(str(self.error))
        if self._is_closed:
            raise WorkerLostError("the workers have been ended")

    # ---- the thread that watches

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for member in self._members:
                selector.register(member.line, selectors.EVENT_READ, member)
            while not self._is_closed:
                asked = time.monotonic()
                ready = selector.select(WATCH_S)
                self._forgive(time.monotonic() - asked - WATCH_S)
                for key, _ in ready:
                    try:
                        data = key.fileobj.recv(1 << 20)  # type: ignore[union-attr]
                    except OSError:
                        data = b""
                    if not data:
                        self._lose(self._ended(key.data))
                        return
                    self._take(key.data, data)
                silent = self._why_lost()
                if silent is not None:
                    self._lose(silent)
                    return

    def _forgive(self, away: float) -> None:
        """Do not count the last `away` seconds, in which this process did not run, as the workers'
        silence.

        A container or a virtual machine that is paused stops all of them.
        """
        if away < WATCH_S:
            return
        for member in self._members:
            member.last_word += away
        with self._changed:
            self._last_progress += away

    def _take(self, member: _Member, data: bytes) -> None:
        now = member.last_word = time.monotonic()
        member.has_spoken = True
        frames = member.frames.feed(data)
        if not frames:
            return
        with self._changed:
            for frame in frames:
                if frame[0] == "beat":
                    if frame[1] != member.num_calls:
                        member.num_calls, self._last_progress = frame[1], now
                    continue
                self._last_progress = now
                if frame[0] == "ready" or frame[1] == -1:
                    member.words.append(frame)
                else:
                    member.answers[frame[1]] = frame
            self._changed.notify_all()

    def _why_lost(self) -> str | None:
        """Return a sentence: which worker is silent, or that no step makes progress; None if all is
        well."""
        now = time.monotonic()
        for member in self._members:
            patience = SILENCE_S if member.has_spoken else FIRST_WORD_S
            if now - member.last_word > patience:
                return (
                    f"worker {member.rank} of {self.size} must say every second that it lives, "
                    f"got nothing for {patience:g} s"
                )
        with self._changed:
            waits = self._unanswered and now - self._last_progress > STANDSTILL_S
        if waits:
            return f"the workers must go on with a step, got none that moved in {STANDSTILL_S:g} s"
        return None

    def _ended(self, member: _Member) -> str:
        with suppress(subprocess.TimeoutExpired):
            member.process.wait(END_S)
        code = member.process.returncode
        how = f"with exit code {code}"
        if code is not None and code < 0:
            with suppress(ValueError):
                how = f"by {signal.Signals(-code).name}"
        said = " ".join(self._log(member)[-_LOG_SHOWN:].split())
        return f"worker {member.rank} of {self.size} ended {how}{': ' if said else ''}{said}"

    def _log(self, member: _Member) -> str:
        """Return the end of what a worker has written to its outputs."""
        with suppress(OSError):
            return (self._folder / f"log-{member.rank}").read_text(errors="replace")[-_LOG_NOTED:]
        return ""

    # ---- the end

    def _lost(self, reason: str) -> WorkerLostError:
        self._lose(reason)
        return self.error or WorkerLostError(reason)

    def _lose(self, reason: str) -> None:
        with self._changed:
            if self.error is not None or self._is_closed:
                return
            self.error = WorkerLostError(reason)
            self._changed.notify_all()
        self._end(patience=0.0)
        if self.on_lost is not None:
            self.on_lost(self.error)

    def close(self) -> None:
        """End all worker processes and remove their files; a forked child of the parent does
        nothing."""
        if os.getpid() != self._pid or self._is_closed:
            return
        self._is_closed = True
        with self._changed:
            self._changed.notify_all()
        self._end(patience=END_S)

    def _end(self, patience: float) -> None:
        deadline = time.monotonic() + patience
        for member in self._members:
            with suppress(OSError):
                member.line.shutdown(socket.SHUT_RDWR)
        for member in self._members:
            with suppress(subprocess.TimeoutExpired):
                member.process.wait(max(deadline - time.monotonic(), 0.0))
            if member.process.poll() is None:
                member.process.kill()
                member.process.wait()
        with self._lock:
            for member in self._members:
                member.line.close()
        shutil.rmtree(self._folder, ignore_errors=True)
