"""Sessions of the engine's benchmark: engines started, workloads in turns, rows made of times."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tilewise.bench.engines.process import EngineFailed, EngineProcess
from tilewise.bench.engines.roof import Roof
from tilewise.bench.engines.shapes import Sizes
from tilewise.bench.engines.workloads import Workload
from tilewise.bench.report import say, write

__all__ = ["OURS", "Bench", "Competitor", "Session", "agreement", "compare", "summary"]

Row = dict[str, Any]

OURS = "tilewise"
WARM_UP_TOKENS = 8
PROFILED_TOKENS = 48  # enough steps for a share, and few enough for a short trace


@dataclass(frozen=True, slots=True)
class Competitor:
    """One engine of a run: its label in the rows, and how its process is started.

    Attributes:
        label: the text under which rows name it.
        engine: the name of the engine, one of `worker.ENGINES`.
        settings: the settings that its process gets.
        python: interpreter of its environment; None is this one.
        path: folder that goes before all others on its PYTHONPATH; None for none.
        threads: number of threads of its CPU work; None leaves the number alone.
    """

    label: str
    engine: str
    settings: dict[str, Any]
    python: str | None = None
    path: str | None = None
    threads: int | None = None


@dataclass(frozen=True, slots=True)
class Session:
    """The workloads that one start of each engine serves, on one model.

    Attributes:
        shape: the name of the model.
        sizes: the sizes of the model.
        workloads: the workloads, in the order in which they run.
        competitors: the engines that are compared.
        roof: the limits of one device.
    """

    shape: str
    sizes: Sizes
    workloads: list[Workload]
    competitors: list[Competitor]
    roof: Roof


def timings(process: EngineProcess, workload: Workload, timeout: float) -> Row:
    """Run a workload once; the workload "fixed" also with one new token for each prompt.

    Returns:
        "whole" seconds, "first" seconds (of one token each; "fixed" only), the token "ids" and the
            "facts" that the engine reported.
    """
    asked = workload.as_request()
    found: Row = {}
    if workload.name == "fixed":
        ones = asked | {"new_tokens": [1] * len(workload.prompts)}
        found["first"] = process.ask(ones, timeout)["seconds"]
    if workload.name != "fixed" or max(workload.new_tokens) > 1:
        answer = process.ask(asked | {"ids": workload.name == "fixed"}, timeout)
        found |= {"whole": answer.pop("seconds"), "ids": answer.pop("ids"), "facts": answer}
    return found


def warm_up(process: EngineProcess, workload: Workload, timeout: float) -> None:
    """Run a workload's prompts for at most `WARM_UP_TOKENS` tokens each, so that an engine has seen
    every size of the workload once."""
    few = [min(WARM_UP_TOKENS, count) for count in workload.new_tokens]
    process.ask(replace(workload, new_tokens=few).as_request(), timeout)


def _roof_of(session: Session, competitor: Competitor) -> Roof:
    """Return the session's roof for as many devices as the competitor's tensor parallelism has."""
    devices, roof = competitor.settings.get("tensor_parallel_size", 1), session.roof
    return replace(roof, read_bytes=devices * roof.read_bytes, flops=devices * roof.flops)


def summary(workload: Workload, turns: Sequence[Row], roof: Roof) -> Row:
    """Return the numbers of a workload's row: medians, the best, spread, and share of the roof.

    Args:
        workload: the workload that was run.
        turns: the results of `timings`, one for each turn.
        roof: the limits of the engine's devices.
    """
    row: Row = {"turns": len(turns)}
    whole = [turn["whole"] for turn in turns if "whole" in turn]
    first = [turn["first"] for turn in turns if "first" in turn]
    if first:
        row["prefill s"] = statistics.median(first)
        row["prefill s, best"] = min(first)
        row["prefill tok/s"] = workload.tokens_in / row["prefill s"]
        limit = roof.prefill([len(prompt) for prompt in workload.prompts])
        row["% of prefill roof"] = 100 * limit / row["prefill s"]
    if whole:
        seconds = statistics.median(whole)
        row |= {"s": seconds, "s, best": min(whole)}
        row["output tok/s"] = workload.tokens_out / seconds
        spread, limit = whole, roof.whole(workload)
    if whole and first:
        steps, batch = workload.new_tokens[0] - 1, len(workload.prompts)
        each = [(w - f) / steps for w, f in zip(whole, first, strict=True)]
        step = statistics.median(each)
        # Each step reads the prompt and what was generated before it, on average half of it.
        context = len(workload.prompts[0]) + (steps + 1) / 2
        limit, spread = roof.step(batch, batch * context), each
        row |= {"ms a step": 1e3 * step, "ms a step, best": 1e3 * min(each)}
        row |= {"decode tok/s": batch / step, "roof ms": 1e3 * limit}
        row |= {"% of roof": 100 * limit / step, "ms a step, all": [1e3 * x for x in each]}
    elif whole:
        row |= {"roof s": limit, "% of roof": 100 * limit / row["s"], "s, all": whole}
    values = spread if whole else first
    row["spread %"] = 100 * (max(values) - min(values)) / statistics.median(values)
    return row


def agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Return the share, in [0, 1], of tokens that two engines drew alike, of each prompt's answer
    up to its first difference.

    In 16 bits engines round differently, and a tie of two tokens ends the agreement of an answer.
    """
    same = 0
    for a, b in zip(ours, theirs, strict=True):
        pairs = list(zip(a, b, strict=True))
        same += next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
    return same / max(sum(map(len, ours)), 1)


class Bench:
    """Run sessions, keep their rows and write them to a file as they come.

    Args:
        document: the contents of the JSON file beside rows and starts.
        json_path: the path of that file; None writes none.
        folder: the folder for configurations, logs and converted models.
        repeats: number of turns of each workload that count, after one to warm up.
        timeout: seconds of one start or one run.
        trace: the folder for the profiler's traces; None keeps none.
        looks_inside: True to profile steps of our own engine.
        seconds: limit of all together, after which nothing new begins, and what runs is stopped;
            None is no limit.
    """

    def __init__(
        self,
        document: Row,
        *,
        json_path: str | None,
        folder: Path,
        repeats: int,
        timeout: float,
        trace: str | None = None,
        looks_inside: bool = True,
        seconds: float | None = None,
    ) -> None:
        self._end = None if seconds is None else time.monotonic() + seconds
        self.rows: list[Row] = []
        self.starts: list[Row] = []
        self.document = document | {"starts": self.starts, "rows": self.rows}
        self.json_path, self.folder = json_path, folder
        self.repeats, self._timeout = repeats, timeout
        self.trace, self.looks_inside = trace, looks_inside

    @property
    def is_over(self) -> bool:
        """Whether the limit of seconds of all together has passed."""
        return self._end is not None and time.monotonic() >= self._end

    @property
    def timeout(self) -> float:
        """The seconds that a start or a run may take now: no more than are left for all, and at
        least 1."""
        if self._end is None:
            return self._timeout
        return max(1.0, min(self._timeout, self._end - time.monotonic()))

    def run(self, session: Session, *, in_turns: bool) -> None:
        """Run all workloads of a session with all of its engines, and write the rows down.

        Args:
            session: the engines and workloads.
            in_turns: True to keep all engines loaded and to alternate them within each workload;
                False to run one engine after the other, for a GPU whose memory cannot hold two.
        """
        if not in_turns:
            for competitor in session.competitors:
                self._run_together(session, [competitor])
        else:
            self._run_together(session, session.competitors)
        compare([row for row in self.rows if row["shape"] == session.shape])
        self._write()

    def _run_together(self, session: Session, competitors: Sequence[Competitor]) -> None:
        with self._started(session, competitors) as processes:
            for workload in session.workloads:
                if self.is_over:
                    for competitor, _ in processes:
                        row = self._row(session, workload, competitor)
                        self.rows.append(row | {"error": "not measured: no time was left"})
                    continue
                turns = self._turns(workload, processes)
                ids: dict[int | None, list[list[int]]] = {}
                for competitor, process in processes:
                    row, found = self._row(session, workload, competitor), turns[competitor.label]
                    if isinstance(found, EngineFailed):
                        row["error"] = str(found)
                    else:
                        row |= summary(workload, found, _roof_of(session, competitor))
                        self._look_inside(row, session, workload, competitor, process)
                        drawn = found[0].get("ids")
                        if drawn and competitor.engine == OURS:
                            ids[competitor.threads] = drawn
                        elif drawn and competitor.threads in ids:
                            share = agreement(ids[competitor.threads], drawn)
                            row["% same tokens"] = 100 * share
                        row |= {"facts": found[-1].get("facts")}
                    self.rows.append(row)
                    say(_line(row))
                self._write()

    @contextmanager
    def _started(
        self, session: Session, competitors: Sequence[Competitor]
    ) -> Iterator[list[tuple[Competitor, EngineProcess]]]:
        processes: list[tuple[Competitor, EngineProcess]] = []
        try:
            for competitor in competitors:
                label = competitor.label.replace(" ", "_")
                log = self.folder / f"{session.shape.replace('/', '_')}-{label}.log"
                start: Row = {"shape": session.shape, "engine": competitor.label}
                start["threads"] = competitor.threads
                began = time.perf_counter()
                try:
                    process = EngineProcess(
                        competitor.engine,
                        competitor.settings,
                        log,
                        python=competitor.python,
                        path=competitor.path,
                        threads=competitor.threads,
                        start_timeout=self.timeout,
                    )
                except EngineFailed as error:
                    start["error"] = str(error)
                    for workload in session.workloads:
                        row = self._row(session, workload, competitor)
                        self.rows.append(row | {"error": f"no start: {error}"})
                else:
                    processes.append((competitor, process))
                    start |= process.facts | {"process_s": time.perf_counter() - began}
                self.starts.append(start)
                say(f"{session.shape}: {competitor.label} {json.dumps(start)}")
                self._write()
            yield processes
        finally:
            for _, process in processes:
                process.close()

    def _turns(
        self, workload: Workload, processes: Sequence[tuple[Competitor, EngineProcess]]
    ) -> dict[str, list[Row] | EngineFailed]:
        """Run a workload on every engine, in turns, so that a machine that drifts is fair to all.

        Returns:
            By the label of each engine the results of `timings` of its turns, the first, to warm
            up, left out; or the failure that ended its turns.
        """
        found: dict[str, list[Row] | EngineFailed] = {c.label: [] for c, _ in processes}
        for turn in range(self.repeats + 1):
            if turn > 1 and self.is_over:
                break  # what was measured counts
            for competitor, process in processes:
                so_far = found[competitor.label]
                if isinstance(so_far, EngineFailed):
                    continue
                try:
                    if turn == 0:
                        warm_up(process, workload, self.timeout)
                    else:
                        so_far.append(timings(process, workload, self.timeout))
                except EngineFailed as error:
                    found[competitor.label] = error
        return found

    def _look_inside(
        self,
        row: Row,
        session: Session,
        workload: Workload,
        competitor: Competitor,
        process: EngineProcess,
    ) -> None:
        """Add to a row of our own engine the GPU's busy share and the host's time of a step, by a
        profile of the workload "fixed"; other rows stay as they are."""
        is_steady = workload.name == "fixed" and max(workload.new_tokens) >= 8
        if not (self.looks_inside and is_steady and competitor.engine == OURS):
            return
        few = [min(PROFILED_TOKENS, count) for count in workload.new_tokens]
        asked = replace(workload, new_tokens=few).as_request()
        asked |= {"do": "profile", "prefill_s": row["prefill s"]}
        if self.trace is not None:
            name = f"{session.shape.replace('/', '_')}-{len(workload.prompts)}.json.gz"
            asked["trace"] = str(Path(self.trace).resolve() / name)
        try:
            row |= process.ask(asked, self.timeout)
        except EngineFailed as error:
            row["profile error"] = str(error)

    def _row(self, session: Session, workload: Workload, competitor: Competitor) -> Row:
        row: Row = {"shape": session.shape, "workload": workload.name, "engine": competitor.label}
        row |= {"batch": len(workload.prompts), "threads": competitor.threads}
        row |= {"n": workload.n, "tokens in": workload.tokens_in}
        row["tokens out"] = workload.tokens_out
        if workload.name == "fixed":
            row |= {"prompt": len(workload.prompts[0]), "new": workload.new_tokens[0]}
        return row

    def _write(self) -> None:
        if self.json_path is not None:
            write(self.document, self.json_path)


def compare(rows: Sequence[Row]) -> None:
    """Add "x best peer" to our rows: how many times as fast they are as the fastest peer on the
    same workload with as many threads, by decode, output or prefill speed."""
    for row in rows:
        if not row["engine"].startswith(OURS):
            continue
        for speed in ("decode tok/s", "output tok/s", "prefill tok/s"):
            if speed in row:
                peers = [
                    other[speed]
                    for other in rows
                    if not other["engine"].startswith(OURS)
                    and speed in other
                    and _place(other) == _place(row)
                ]
                if peers:
                    row["x best peer"] = row[speed] / max(peers)
                break


def _place(row: Row) -> tuple[Any, ...]:
    keys = ("shape", "workload", "batch", "threads", "tokens in", "tokens out")
    return tuple(row[key] for key in keys)


def _line(row: Row) -> str:
    """Return the line of progress that tells of one row, while others are still measured."""
    what = f"{row['shape']}, {row['workload']} {row['batch']}: {row['engine']}"
    if "error" in row:
        return f"{what}: {row['error']}"
    names = ("prefill tok/s", "decode tok/s", "output tok/s", "ms a step", "% of roof", "busy %")
    numbers = ", ".join(f"{name} {row[name]:,.4g}" for name in names if name in row)
    return f"{what}, threads {row['threads']}: {numbers}"
