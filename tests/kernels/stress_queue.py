"""Which case of a stress is compiled, prepared and run when, over processes; no torch here.

Some processes compile cases into Triton's cache, each case once; a few others prepare what is
compiled (inputs, reference, graph), and one at a time runs. A case gives way when it has had a few
shares of the time left, and comes back when all others have had their turn. A process that ends or
answers too late costs the case that it had, and is started anew.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARES = 4.0  # of the time left, what a case may take in one go
PATIENCE = {"warm": 300.0, "prepare": 150.0, "run": 60.0}  # seconds until an answer is too late
LEAST = 0.2  # seconds; a shorter go is not begun
Record = dict[str, Any]


@dataclass
class Case:
    """A case and how far it is.

    Attributes:
        runs: so far, former stresses included.
        each: seconds a run takes; None until something has measured it.
        goes: how often it has run in this stress.
    """

    name: str
    state: str = "cold"  # warming, ready, preparing, prepared, running, done, failed
    runs: int = 0
    each: float | None = None
    goes: int = 0


class Cases:
    """The cases of a stress, in the order in which they are to be compiled.

    Args:
        names: of the cases, "family/name".
        asked: runs after which a case is done.
        former: records of an earlier stress, by name; runs are counted on.
        enough: runs with which a case of an earlier stress is left out.
        cold: whether cases must be compiled before they can run.
        most_seconds: of runs, former ones included, after which a case is done as well.
    """

    def __init__(
        self, names: Iterable[str], asked: int, former: dict[str, Record] | None = None,
        enough: int | None = None, cold: bool = True, most_seconds: float = math.inf,
    ) -> None:  # fmt: skip
        self.asked = asked
        self.most_seconds = most_seconds
        self.records: dict[str, Record] = dict(former or {})
        enough = asked if enough is None else enough
        self.all: dict[str, Case] = {}
        for name in names:
            runs = int(self.records.get(name, {}).get("runs", 0))
            done = runs >= enough or self.seconds_of(name) >= most_seconds - LEAST
            state = "done" if done else "cold" if cold else "ready"
            self.all[name] = Case(name, state, runs)
        self._groups: dict[str, list[str]] = {}
        for name, case in self.all.items():
            if case.state == "cold":
                self._groups.setdefault(name.partition("/")[2], []).append(name)
        self._group_of: dict[Any, list[str]] = {}

    def next_cold(self, process: Any) -> str | None:
        """Return what a process should compile: of one name all families, which share kernels."""
        mine = self._group_of.get(process)
        if not mine and self._groups:
            mine = self._groups.pop(next(iter(self._groups)))
            self._group_of[process] = mine
        if not mine:
            return None
        name = mine.pop(0)
        self.all[name].state = "warming"
        return name

    def give_up(self, process: Any) -> None:
        """Let other processes have what this one would have compiled next."""
        if mine := self._group_of.pop(process, None):
            self._groups[mine[0]] = mine

    def next_ready(self) -> str | None:
        """Return the case to prepare: first what has run less often, then the cheapest."""
        ready = [case for case in self.all.values() if case.state == "ready"]
        if not ready:
            return None
        case = min(ready, key=lambda case: (case.goes, self.missing_seconds(case)))
        case.state = "preparing"
        return case.name

    def next_prepared(self) -> str | None:
        """Return the case to run."""
        prepared = [case for case in self.all.values() if case.state == "prepared"]
        if not prepared:
            return None
        return min(prepared, key=lambda case: (case.goes, self.missing_seconds(case))).name

    def missing_seconds(self, case: Case) -> float:
        """Return how long the case needs for the runs that it lacks."""
        runs = (1e-3 if case.each is None else case.each) * (self.asked - case.runs)
        return min(runs, self.most_seconds - self.seconds_of(case.name))

    def seconds(self, left: float) -> float:
        """Return how long a case may run now, of so many seconds left for all."""
        waiting = sum(case.state not in ("done", "failed") for case in self.all.values())
        most = left if waiting <= 1 else left / 2  # the last but one leaves time to the last
        return min(most, SHARES * left / max(1, waiting))

    def seconds_of(self, name: str) -> float:
        """Return how long a case has run, former stresses included."""
        return float(self.records.get(name, {}).get("seconds", 0.0))

    def ran(self, name: str, found: Record) -> None:
        """Add runs to the record of a case."""
        case = self.all[name]
        self.records[name] = merged(self.records.get(name), found)
        case.runs += found["runs"]
        case.goes += 1
        done = case.runs >= self.asked or self.seconds_of(name) >= self.most_seconds - LEAST
        case.state = "done" if done else "ready"

    def fail(self, name: str, error: str) -> None:
        """Note why a case could not be compiled, prepared or run."""
        none = {"name": name, "runs": 0, "differing": 0, "seconds": 0.0, "first": []}
        self.records[name] = merged(self.records.get(name), none) | {"error": error}
        self.all[name].state = "failed"

    def count(self, *states: str) -> int:
        return sum(case.state in states for case in self.all.values())

    def summary(self) -> dict[str, Any]:
        """Return totals and all records, former ones included."""
        records = list(self.records.values())
        return {
            "runs": sum(record["runs"] for record in records),
            "differing": sum(record["differing"] for record in records),
            "failed": sum("error" in record for record in records),
            "cases_run": sum(record["runs"] > 0 for record in records),
            "cases_with_all_runs": sum(record["runs"] >= self.asked for record in records),
            "cases": records,
        }


def merged(former: Record | None, found: Record) -> Record:
    """Return one record for the runs of two; the first difference stays, an old error goes."""
    if former is None:
        return dict(found)
    result = {key: value for key, value in (former | found).items() if key != "error"}
    for key in ("runs", "differing", "seconds"):
        result[key] = former.get(key, 0) + found.get(key, 0)
    result["first"] = former.get("first") or found.get("first", [])
    return result


def former_records(path: Path, delays: str | None) -> dict[str, Record]:
    """Read the records of an earlier stress; each is told the device that it ran on.

    Raises:
        ValueError: its kernels had other stalls.
    """
    summary = json.loads(path.read_text())
    if summary.get("delays") != delays:
        raise ValueError(f"skip-done must have delays {delays}, got {summary.get('delays')}")
    told = {key: summary[key] for key in ("device", "date") if key in summary}
    return {record["name"]: told | record for record in summary["cases"]}


class Process:
    """A process that answers a line of JSON with one; answers go into `events`."""

    def __init__(
        self, command: Sequence[str], role: str, events: queue.Queue[tuple[Process, Any]],
        environment: dict[str, str] | None = None, log: Path | None = None,
    ) -> None:  # fmt: skip
        self.role, self.name, self.deadline, self.idle = role, "", float("inf"), False
        with open(log, "a") if log else open("/dev/null", "w") as errors:
            self._popen = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, env=environment,
            )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, args=(events,), daemon=True)
        self._listener.start()

    def _listen(self, events: queue.Queue[tuple[Process, Any]]) -> None:
        assert self._popen.stdout is not None
        with self._popen.stdout as answers:
            for line in answers:
                events.put((self, json.loads(line)))
        events.put((self, None))

    def send(self, verb: str, name: str, **given: Any) -> None:
        """Ask for something that takes at most `PATIENCE`, and the seconds given, from now."""
        self.name, self.idle = name, False
        self.deadline = time.monotonic() + PATIENCE[verb] + given.get("seconds", 0.0)
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the listener says so
            self._popen.stdin.write(json.dumps({"verb": verb, "name": name, **given}) + "\n")
            self._popen.stdin.flush()

    def end(self) -> int:
        """End the process at once; return its exit status."""
        self._popen.kill()
        status = self._popen.wait()
        self._listener.join(timeout=5.0)
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        return status


def drive(
    cases: Cases, start: Callable[[str, queue.Queue[tuple[Process, Any]]], Process], *,
    warmers: int, runners: int, until: float, note: Callable[[], None],
    say: Callable[[str], None], every: float = 5.0,
) -> None:  # fmt: skip
    """Run the cases until all are done or the time is over; every process has ended then.

    Args:
        start: starts a process of a role, "warm" or "run"; its first answer says that it is there.
        warmers, runners: how many processes of each role.
        until: by `time.monotonic()`, when to end whatever still runs.
        note: called after each case that ran or failed.
        say: prints a line.
        every: seconds between lines about how far all is.
    """
    events: queue.Queue[tuple[Process, Any]] = queue.Queue()
    processes: list[Process] = []
    running: Process | None = None
    begin = said = time.monotonic()

    def begin_process(role: str) -> None:
        process = start(role, events)
        process.deadline = time.monotonic() + PATIENCE["prepare"]
        processes.append(process)

    def lose(process: Process, why: str) -> None:
        nonlocal running
        processes.remove(process)
        status = process.end()
        if process is running:
            running = None
        cases.give_up(process)
        if process.name:
            error = f"{why} (exit status {status})"
            cases.fail(process.name, error)
            say(f"{process.name}: {error}")
            note()
            begin_process(process.role)
        else:
            say(f"a process to {process.role} cases: {why} before it had one (status {status})")

    def answer(process: Process, message: dict[str, Any]) -> None:
        nonlocal running
        process.deadline, name = float("inf"), process.name
        process.name, process.idle = "", True
        if process is running:
            running = None
        if "error" in message:
            cases.fail(name, message["error"])
            say(f"{name}: {message['error']}")
            note()
        elif message["verb"] == "warm":
            cases.all[name].each = message.get("each")
            cases.all[name].state = "ready"
        elif message["verb"] == "prepare":
            cases.all[name].each = message.get("each")
            cases.all[name].state = "prepared"
            process.name, process.idle = name, False
        elif message["verb"] == "run":
            cases.ran(name, message["found"])
            if message["found"]["differing"]:
                say(f"{name}: {message['found']['differing']} runs differ")
            note()

    def hand_out() -> None:
        nonlocal running
        for process in [process for process in processes if process.idle]:
            if process.role == "warm":
                if (name := cases.next_cold(process)) is None:
                    processes.remove(process)
                    process.end()
                else:
                    process.send("warm", name)
            elif (name := cases.next_ready()) is not None:
                process.send("prepare", name)
        left = until - time.monotonic()
        if running is None and left > LEAST and (name := cases.next_prepared()) is not None:
            running = next(process for process in processes if process.name == name)
            case = cases.all[name]
            case.state = "running"
            missing = cases.most_seconds - cases.seconds_of(name)
            seconds = max(LEAST, min(cases.seconds(left) - LEAST, missing))
            running.send(
                "run", name, seconds=min(seconds, left - LEAST), runs=cases.asked - case.runs
            )

    for role, count in (("run", runners), ("warm", warmers)):
        for _ in range(min(count, len(cases.all))):
            begin_process(role)
    try:
        while cases.count("done", "failed") < len(cases.all):
            now = time.monotonic()
            if now >= until or not any(process.role == "run" for process in processes):
                break
            if now - said >= every:
                said = now
                say(
                    f"{now - begin:5.0f} s: {cases.count('cold'):3} cold, "
                    f"{cases.count('warming'):2} compiling, {cases.count('ready'):3} ready, "
                    f"{cases.count('done'):3} done, {cases.count('failed'):2} failed; now "
                    f"{running.name if running else 'nothing runs'}; "
                    f"{sum(case.runs for case in cases.all.values()):,} runs"
                )
            try:
                process, message = events.get(timeout=max(0.01, min(1.0, until - now)))
            except queue.Empty:
                pass
            else:
                if process not in processes:
                    continue  # ended before
                if message is None:
                    lose(process, "its process ended")
                elif message["verb"] == "there":
                    process.idle, process.deadline = True, float("inf")
                else:
                    answer(process, message)
            for late in [p for p in processes if p.deadline < time.monotonic()]:
                lose(late, "no answer in time")
            if not any(process.role == "warm" for process in processes):
                # Whatever is cold still (no compiling process is left) compiles where it runs.
                for case in cases.all.values():
                    if case.state == "cold":
                        case.state = "ready"
            hand_out()
    finally:
        for process in processes:
            process.end()
        note()
