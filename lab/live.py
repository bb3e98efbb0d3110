"""Serve a trace with the real engine beside its simulation: `python lab/live.py`.

Requests come when the trace says, and the loop is that of `engine.virtual` with a model in place
of the clock. In turns the engine's steps are measured, from which a profile is fitted, and the
trace is served; the simulation with that profile is compared with the median of the turns. One more
turn warms up, in which on a GPU the trace is served at the highest rate. There the steps of the
trace are noted, too: their times stand by class beside what the profile says of them. A
machine's pace may change between the two, so each run is foreseen by its own steps as well, half of
its windows from the other half (`bench.serving.steps`). Time is the wall's, or the processor's: on
a machine that others use, what waits for a core does not count then, and a wait for the next
request costs nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from tilewise.bench import machine as bench_machine
from tilewise.bench.engines.shapes import model_directory
from tilewise.bench.fit import (
    MeasuredStep,
    by_class,
    class_of,
    errors,
    fit,
    of_device,
    replayed,
)
from tilewise.bench.report import emit, format_table, positive, say
from tilewise.bench.serving.steps import Request, foreseen
from tilewise.bench.simulate import Setting, arrivals_of, of_timings, serve
from tilewise.bench.trace import TraceRequest, drawn_trace, fitting, ids_within, poisson, read_trace
from tilewise.cost import StepCost, machine, read_sizes
from tilewise.engine.engine import Engine
from tilewise.engine.llm import LLM
from tilewise.engine.scheduling.scheduler import Scheduler
from tilewise.engine.virtual import Arrival, Timing, take, work_of
from tilewise.errors import RequestError

__all__ = ["LiveClock", "serve_live"]


class LiveClock:
    """Seconds since it was made, of the wall or of this process's processor time.

    Args:
        is_cpu: the processor's; then sleeping moves the clock and takes no time.
    """

    def __init__(self, *, is_cpu: bool = False) -> None:
        self._read = time.process_time if is_cpu else time.perf_counter
        self._is_cpu = is_cpu
        self._start = self._read()
        self._skipped = 0.0

    def __call__(self) -> float:
        return self._read() - self._start + self._skipped

    def sleep(self, seconds: float) -> None:
        """Let so many seconds go by."""
        if self._is_cpu:
            self._skipped += max(0.0, seconds)
        elif seconds > 0:
            time.sleep(seconds)


def serve_live(
    engine: Engine, scheduler: Scheduler, arrivals: Sequence[Arrival], clock: LiveClock
) -> list[Timing]:
    """Serve requests as they come and return what became of each, in order of arrival.

    Args:
        engine: its requests are dropped, and it goes on with `scheduler`.
        scheduler: a new one, whose blocks are those of the engine's cache.
        arrivals: in order of time.
        clock: which has just been made.
    """
    scheduler.trace.clock = clock
    engine.restart(scheduler)
    timings: dict[str, Timing] = {}
    place = 0
    while place < len(arrivals) or engine.has_unfinished():
        while place < len(arrivals) and arrivals[place].seconds <= clock():
            arrival = arrivals[place]
            timing = timings[arrival.request.request_id] = Timing.of(arrival)
            try:
                engine.add_request(arrival.request)
            except RequestError as error:
                timing.refusal = str(error)
            place += 1
        if engine.has_unfinished():
            events = engine.step()
            take(timings, events, clock())
        elif place < len(arrivals):
            clock.sleep(arrivals[place].seconds - clock())
    return list(timings.values())


class Watch:
    """A runner whose steps are noted as they come; their work is told when all is over.

    Args:
        engine: whose runner this takes the place of, until `end`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._runner = engine, engine.runner
        self._noted: list[list[Any]] = []  # batch, submitted from and until, result from and until
        engine.runner = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def submit(self, batch: Any) -> _Timed:
        """Begin a step."""
        began = time.perf_counter()
        handle = self._runner.submit(batch)
        note = [batch, began, time.perf_counter(), 0.0, 0.0]
        self._noted.append(note)
        return _Timed(handle, note)

    def end(self) -> list[MeasuredStep]:
        """Let the engine have its runner back, and return the steps that were waited for."""
        self._engine.runner = self._runner
        steps, ended = list[MeasuredStep](), 0.0
        before: Any = None
        for batch, began, submitted, _, now in self._noted:
            if now:
                device = now - max(began, ended)
                work = work_of(batch, BLOCK_SIZE, before)
                steps.append(MeasuredStep(work, 0.0, submitted - began, device, 0.0))
                ended, before = now, batch
        return steps


class _Timed:
    """The handle of a step that notes when its result was there."""

    def __init__(self, handle: Any, note: list[Any]) -> None:
        self._handle, self._note = handle, note

    def result(self) -> Any:
        self._note[3] = time.perf_counter()
        drawn = self._handle.result()
        self._note[4] = time.perf_counter()
        return drawn


def of_classes(steps: Sequence[MeasuredStep], cost: StepCost) -> list[dict[str, Any]]:
    """Return for each class of steps what they took, and what `cost` says, in milliseconds.

    A step's device takes what `cost` says or, where this is less, as long as the host submits.
    """
    classes: dict[str, list[tuple[float, ...]]] = {}
    for step in steps:
        told = cost(step.work)
        submitting = told.launching or 0.0
        row = (1e3 * step.device, 1e3 * told.device, 1e3 * step.submitting, 1e3 * submitting)
        classes.setdefault(class_of(step.work), []).append(row)
    names = ("from end to end", "device, foreseen", "submitting", "launching, foreseen")
    return [
        {"steps": name, "count": len(rows)}
        | {n: statistics.fmean(row[i] for row in rows) for i, n in enumerate(names)}
        for name, rows in sorted(classes.items())
    ]


BLOCK_SIZE = 16
KEPT = 3000  # steps of a rate that are written
SHOWN = ("req/s", "tok/s", "ttft p50", "ttft p90", "tpot p50", "s/token")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lab/live.py", description=__doc__)
    parser.add_argument("--trace", metavar="FILE", help="CSV or JSONL; drawn lengths without one")
    parser.add_argument(
        "--requests", type=positive, default=80, metavar="N", help="the first that fit"
    )
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 8.0, 50.0], metavar="R",
                        help="Poisson arrivals of R a second")  # fmt: skip
    parser.add_argument(
        "--model",
        default="story",
        help="story, a checkpoint directory, or a shape of random weights",
    )
    parser.add_argument("--blocks", type=positive, default=1024, metavar="N",
                        help=f"of the cache, {BLOCK_SIZE} tokens each (1024)")  # fmt: skip
    parser.add_argument("--seats", type=positive, default=128, metavar="N", help="of samples (128)")
    parser.add_argument("--max-len", type=positive, default=1024, metavar="N",
                        help="tokens of a request; longer ones are left out (1024)")  # fmt: skip
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=positive, metavar="N", help="of torch, on a CPU")
    parser.add_argument("--max-batched-tokens", type=positive, default=512, metavar="N")
    parser.add_argument(
        "--turns", type=positive, default=3, metavar="N", help="after one to warm up"
    )
    parser.add_argument("--cpu-time", action="store_true", help="of the processor; --threads 1")
    parser.add_argument("--json", metavar="FILE", help="write the document there too")
    parser.add_argument("--steps", metavar="FILE", help="write the measured steps there, as JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print prediction and run for each rate, and the document as JSON in the last line."""
    options = _parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        return _run(options, Path(folder))


def _run(options: argparse.Namespace, folder: Path) -> int:
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.cpu_time and (options.device != "cpu" or torch.get_num_threads() > 1):
        raise ValueError("cpu-time must be of one thread on a CPU, got another device or more")
    directory, is_random = model_directory(options.model, folder)
    sizes = read_sizes(json.loads((directory / "config.json").read_text()))
    max_len = min(options.max_len, sizes.max_len)
    llm = LLM(
        directory,
        device=options.device,
        random_weights=is_random,
        num_blocks=options.blocks,
        max_num_seqs=options.seats,
        max_model_len=max_len,
    )
    trace = read_trace(options.trace) if options.trace else drawn_trace(8 * options.requests)
    trace = fitting(trace, max_len, options.requests)
    peaks = bench_machine.measure_peaks(options.device)
    peaks["few_pairs"] = bench_machine.few_pairs_of(llm.engine.runner, sizes)
    ids_of = ids_within(sizes.vocab_size)
    traces = {rate: poisson(trace, rate) for rate in options.rates}
    turns = []
    seen: dict[float, list[dict[str, Any]]] = {rate: [] for rate in options.rates}
    by_steps: dict[float, list[dict[str, Any]]] = {rate: [] for rate in options.rates}
    dtype = str(llm.model.dtype).removeprefix("torch.")
    setting = Setting(
        sizes, machine("cpu"), dtype, num_slots=options.blocks * BLOCK_SIZE, block_size=BLOCK_SIZE,
        max_num_seqs=options.seats, budget=options.max_batched_tokens, max_len=max_len,
    )  # fmt: skip
    on_gpu = llm.engine.overlap
    watched: dict[float, list[MeasuredStep]] = {rate: [] for rate in options.rates}

    def served(rate: float) -> tuple[list[Timing], Scheduler]:
        scheduler = Scheduler(
            options.blocks,
            BLOCK_SIZE,
            max_num_seqs=options.seats,
            max_model_len=max_len,
            max_num_batched_tokens=options.max_batched_tokens,
        )
        bench_machine.wear(scheduler.tables.allocator)  # as in the steps that are measured
        arrivals = list(arrivals_of(traces[rate], ids_of=ids_of))
        watch = Watch(llm.engine) if on_gpu else None
        try:
            clock = LiveClock(is_cpu=options.cpu_time)
            found = serve_live(llm.engine, scheduler, arrivals, clock)
        finally:
            if watch is not None:
                watched[rate] += watch.end()
        return found, scheduler

    room = bench_machine.Room(max_len)
    if on_gpu:
        slots = options.blocks * BLOCK_SIZE
        room = bench_machine.Room(max_len, options.seats, slots, options.max_batched_tokens)
    for turn in range(options.turns + 1):
        clock = time.process_time if options.cpu_time else time.perf_counter
        turns.append(
            bench_machine.turn_of(
                llm.engine.runner, sizes, overlap=on_gpu, room=room, turn=turn, clock=clock
            )
        )
        say(f"turn {turn}: {sum(map(len, turns[-1]))} steps measured")
        if not turn:
            if on_gpu:
                served(max(options.rates))
                watched = {rate: [] for rate in options.rates}
            continue
        for rate, requests in traces.items():
            found, scheduler = served(rate)
            seen[rate].append(of_timings(found))
            if not on_gpu and (told := _by_steps(setting, requests, found, scheduler)):
                by_steps[rate].append(told)
            say(f"turn {turn}, rate {rate:g}: {seen[rate][-1]['tok/s']:.0f} tok/s")
    steps = bench_machine.together(turns[1:], overlap=on_gpu)
    if on_gpu:
        steps += bench_machine.alone_steps(llm.engine.runner, sizes, room=room, turn=turn + 1)
        say(f"{sum(step.is_alone for step in steps)} steps of the device alone")
    flags = dict.fromkeys(("captures", "overlaps_steps"), on_gpu)
    if options.steps:
        kept = {
            "peaks": peaks,
            "turns": [[[asdict(s) for s in batch] for batch in turn] for turn in turns[1:]],
            "alone": [asdict(s) for s in steps if s.is_alone],
            "live": {
                rate: [asdict(s) for s in some[:: -(-len(some) // KEPT) or 1]]
                for rate, some in watched.items()
            },
        }
        Path(options.steps).write_text(json.dumps(kept) + "\n")
    profile = fit(peaks, sizes, steps, dtype=dtype, **flags)
    setting = replace(setting, machine=profile)
    cost = StepCost(sizes, profile, dtype=dtype)
    known = of_device(steps)
    classes = {"device": by_class([(s, cost.device(s.work)) for s in known])}
    if on_gpu:
        classes["on two clocks"] = by_class(
            [one for batch in turns[-1] for one in replayed(cost, batch, overlap=True)]
        )
        for rate, some in watched.items():
            classes[f"live, rate {rate:g}"] = of_classes(some, cost)
    for title, of_class in classes.items():
        print(f"{title}\n{format_table(of_class, list(of_class[0]))}")
    rows = []
    for rate, requests in traces.items():
        virtual = serve(requests, setting, "prefix", ids_of=ids_of)
        predicted = of_timings(list(virtual.timings.values()))
        rows.append(_row(rate, predicted, seen[rate], by_steps[rate]))
    off = sorted(map(abs, errors(profile, sizes, known, {"dtype": dtype})))
    document = {
        "what": "the engine serving a trace, beside its simulation with a profile of its steps",
        "trace": Path(options.trace).name if options.trace else "drawn",
        "requests": len(trace),
        "model": options.model,
        "device": peaks["name"],
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "clock": "processor" if options.cpu_time else "wall",
        "turns": options.turns,
        "budget": options.max_batched_tokens,
        "fit": {
            "steps": len(known),
            "median error %": 100 * off[len(off) // 2],
            "p90 error %": 100 * off[len(off) * 9 // 10],
        },
        "rows": rows,
        "classes": classes,
        "machine": profile.as_dict(),
    }
    flat = []
    for row in rows:
        for kind in ("predicted", "live", "error %", "by its steps", "error by its steps %"):
            if kind in row:
                flat.append({"rate": row["rate"], "": kind} | row[kind])
    print(format_table(flat, ["rate", "", *SHOWN]))
    emit(document, options.json)
    return 0


def _by_steps(
    setting: Setting,
    requests: Sequence[TraceRequest],
    found: Sequence[Timing],
    scheduler: Scheduler,
) -> dict[str, Any] | None:
    """Foresee a run by its own steps; None where it has too few."""
    served = [
        Request(timing.request_id, sent, timing.first_token - timing.arrival)
        for sent, timing in zip(requests, found, strict=True)
        if not timing.refusal
    ]
    told = foreseen(setting, served, scheduler.trace.since(0), of_timings)
    return None if told is None else told[0]


def _row(
    rate: float,
    predicted: dict[str, Any],
    runs: Sequence[dict[str, Any]],
    by_steps: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    live = {name: statistics.median(run[name] for run in runs) for name in SHOWN}
    row = {
        "rate": rate,
        "predicted": {name: predicted[name] for name in SHOWN},
        "live": live,
        "error %": {name: 100 * (predicted[name] / live[name] - 1) for name in SHOWN},
        "live, all": [{name: run[name] for name in SHOWN} for run in runs],
    }
    if len(by_steps) == len(runs):
        own = {name: statistics.median(run[name] for run in by_steps) for name in SHOWN}
        row["by its steps"] = own
        row["error by its steps %"] = {n: 100 * (own[n] / live[n] - 1) for n in SHOWN}
        row["by its steps, all"] = [{name: run[name] for name in SHOWN} for run in by_steps]
    return row


if __name__ == "__main__":
    raise SystemExit(main())
