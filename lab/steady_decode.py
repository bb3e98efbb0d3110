"""A steady decode, in which nobody comes and nobody ends: the step, the host's part of it, the GPU.

    python lab/steady_decode.py --json F [--rows 1 32 256] [--trace FOLDER]
    python lab/steady_decode.py --empty --rows 256 [--turns 6] TREE TREE
    python lab/steady_decode.py --json F --beside sm80

With `--beside` each tree has a second engine, whose kernels are those of another architecture; see
`lab/ampere.py`.

Each tree of this package (this one, if none is named) has a process of its own, which takes turns
with the others. In a turn so many sequences with prompts of 1,024 tokens are brought to decode;
then the engine's own thread does steps as its loop does them, and nothing else. On a GPU the model
is Qwen3-0.6B's shape with random weights and CUDA graphs, and a step has a share of the roof: that
of the read bandwidth and the products which this card gave at the beginning, as `tilewise bench
machine` measures them. The share of time in which a kernel or a copy ran is that of a trace by
torch's profiler, of steps behind the measured ones. With --empty the engine runs on a CPU over a
model that does nothing, and times are of the thread's CPU time.

Milliseconds of a step, of which each part is inside of the one it is indented below:

    step           from one step's end to the next one's
    host           all but waiting for the device
      schedule     who runs, and their blocks
      submit       what changed sent, the step launched
        take, send, run, read
      update       tokens taken in
      tokens       results made tokens, without waiting
      deliver      tokens handed to their readers
    asked          schedule, submit and update: 0.6 ms at 256 rows is what is asked for

A line for each is its 10th, 50th and 90th percentile over the steps, beside a digest of the tokens,
which is equal where no kernel differs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

PROMPT, SHAPE, VOCAB = 1024, "qwen3-0.6b", 151_936
SETTLING, MEASURED, TRACED = 8, 64, 24  # steps of a turn
BLOCK = 16
STEP_TOKENS, MOST_ROWS = 8192, 256  # of prompts in a step; whose prompts come within 36 steps
NEW = 40 + SETTLING + MEASURED + TRACED + 8  # tokens
BLOCKS = -(-(PROMPT + NEW) // BLOCK) + 1  # a sequence: the caches of two trees fit one card
PARTS = ("step", "host", "schedule", "submit", "take", "send", "run", "_read", "update", "tokens",
         "deliver")  # fmt: skip


class Nothing:
    """A model that computes nothing; all logits are zero."""

    def __call__(self, ids: Any, positions: Any, *, ctx: Any, kv: Any) -> Any:
        return ids.new_zeros((len(ids), 1)).float()

    def compute_logits(self, hidden: Any) -> Any:
        return hidden.new_zeros((len(hidden), 8))


def empty_engine(rows: int, prefix_caching: bool) -> Any:
    """Return the loop of an engine on a CPU whose steps are over as soon as they are launched."""
    import torch

    from tilewise.cache.spec import CacheSpec, KVSpec
    from tilewise.cache.storage import KVStorage
    from tilewise.engine.captured.decode_step import RING, DecodeStep
    from tilewise.engine.captured.runner import DeviceRunner
    from tilewise.engine.engine import Engine
    from tilewise.engine.loop import EngineLoop
    from tilewise.engine.making import settle_memory
    from tilewise.engine.scheduling.scheduler import Scheduler

    def run(self: Any) -> None:
        self.results.place.add_(1).remainder_(RING)

    DecodeStep.run = run  # type: ignore[method-assign]
    blocks, most = rows * BLOCKS, 2048
    storage = KVStorage(CacheSpec(1, BLOCK, KVSpec(1, 1, 1, torch.float32)), blocks, "cpu")
    runner = DeviceRunner(Nothing(), storage, max_num_seqs=rows, max_model_len=most)
    runner.results.values.fill_(1)
    scheduler = Scheduler(
        blocks, BLOCK, max_num_seqs=rows, max_num_batched_tokens=STEP_TOKENS, max_model_len=most,
        enable_prefix_caching=prefix_caching,
    )  # fmt: skip
    settle_memory(rows)
    return EngineLoop(Engine(scheduler, runner, overlap=True))


def real_engine(rows: int, prefix_caching: bool, folder: str) -> Any:
    """Return the LLM of a random model on a GPU."""
    from tilewise import LLM
    from tilewise.bench.engines.shapes import model_directory

    directory, _ = model_directory(SHAPE, Path(folder))
    return LLM(
        directory, device="cuda", dtype="bfloat16", random_weights=True, max_num_seqs=rows,
        max_num_batched_tokens=STEP_TOKENS, max_model_len=2048, num_blocks=rows * BLOCKS,
        enable_prefix_caching=prefix_caching, use_progress=True,
    )  # fmt: skip


class Steps:
    """Does an engine's steps on its own thread, and notes what they took.

    Args:
        loop: its thread is free meanwhile.
        is_empty: no device is waited for.
    """

    def __init__(self, loop: Any, is_empty: bool) -> None:
        self.loop, self.core, self.is_empty = loop, loop._core, is_empty
        self.clock: Callable[[], float] = time.thread_time if is_empty else time.perf_counter
        self.now: dict[str, float] = {}
        self.number = 0

    def _timed(self, owner: Any, name: str, label: str) -> Callable[[], None]:
        """Time a function until what is returned is called."""
        function, had, clock = getattr(owner, name), name in vars(owner), self.clock

        def call(*args: Any, **options: Any) -> Any:
            started = clock()
            try:
                return function(*args, **options)
            finally:
                self.now[label] = self.now.get(label, 0.0) + clock() - started

        setattr(owner, name, call)
        return lambda: setattr(owner, name, function) if had else delattr(owner, name)

    def _watched(self, rows: int) -> Iterator[tuple[Any, str, str]]:
        import torch

        from tilewise.engine.captured import runner as module

        engine = self.core.engine
        runner = engine.runner
        yield engine, "step", "engine"
        yield engine.scheduler, "schedule", "schedule"
        yield engine.scheduler, "update", "update"
        yield runner, "submit", "submit"
        yield runner.rows, "take", "take"
        yield runner.rows, "send", "send"
        yield runner, "_read", "_read"
        yield module._Handle, "result", "result"
        yield runner.steps[min(b for b in runner.buckets if b >= rows)], "run", "run"
        if not self.is_empty:
            yield torch.cuda.Event, "synchronize", "wait"

    def turn(self, rows: int, trace: str | None) -> dict[str, Any]:
        """Measure so many rows, on the engine's thread."""
        import random

        from tilewise.engine.outputs import Generation
        from tilewise.engine.request import Request, SamplingParams

        core, draw = self.core, random.Random(rows)
        sampling = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
        self.number += 1
        generations = [
            Generation(
                Request(
                    f"{self.number}-{i}",
                    [draw.randrange(3, VOCAB) for _ in range(PROMPT)], sampling,
                ), None, None,
            )
            for i in range(rows)
        ]  # fmt: skip
        for generation in generations:
            core.add(generation)

        def step() -> None:
            core._step(core.engine.step)

        while not all(generation.samples[0].token_ids for generation in generations):
            step()
        for _ in range(SETTLING):
            step()
        gc.collect()
        undo = [self._timed(*each) for each in self._watched(rows)]
        measured: list[dict[str, float]] = []
        try:
            for _ in range(MEASURED):
                self.now.clear()
                started = self.clock()
                step()
                whole, now = self.clock() - started, dict(self.now)
                now["step"] = whole
                now["host"] = whole - now.get("wait", 0.0)
                now["tokens"] = now["result"] - now.get("wait", 0.0)
                now["deliver"] = whole - now["engine"]
                now["asked"] = now["schedule"] + now["submit"] + now["update"]
                measured.append(now)
        finally:
            for each in undo:
                each()
        assert core.engine._unfinished[-1][0].is_plain
        context = len(generations[0].samples[0].token_ids) - MEASURED / 2 + PROMPT
        drawn = json.dumps([generation.samples[0].token_ids for generation in generations])
        digest = hashlib.sha1(drawn.encode()).hexdigest()[:12]
        found: dict[str, Any] = {"rows": rows, "context": context, "digest": digest}
        if not self.is_empty:
            found |= self._device(step, trace)
        core.drop(generations)
        for name in (*PARTS, "asked"):
            values = sorted(1e3 * each.get(name, 0.0) for each in measured)
            places = [values[int(f * (len(values) - 1))] for f in (0.1, 0.5, 0.9)]
            found[name.strip("_")] = [round(value, 4) for value in places]
        return found

    def _device(self, step: Callable[[], None], trace: str | None) -> dict[str, Any]:
        """Trace some steps; return in which share of them the device worked."""
        import torch
        from torch.profiler import ProfilerActivity, profile

        from tilewise.bench.engines.busy import read_trace

        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            for _ in range(TRACED):
                step()
            torch.cuda.synchronize()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(trace or os.path.join(folder, "trace.json.gz"))
            profiler.export_chrome_trace(str(path))
            spans = read_trace(path)
        return busy_between(spans)


def busy_between(spans: Sequence[Any]) -> dict[str, Any]:
    """Return the share of a trace's middle in which something ran on the device.

    The profiler's own start is in the first steps, and the last ones have no next one behind them.
    """
    first, last = spans[0].start, max(span.end for span in spans)
    begin, end = first + 0.25 * (last - first), last - 0.1 * (last - first)
    busy, reached = 0.0, begin
    for span in spans:
        lower, upper = max(span.start, reached), min(span.end, end)
        if upper > lower:
            busy += upper - lower
            reached = upper
    return {"busy %": 100 * busy / (end - begin), "traced ms": 1e-3 * (end - begin)}


def serve(given: argparse.Namespace) -> None:
    """Answer each line of standard input, a number of rows, with a turn."""
    arch = os.environ.get("TRITON_OVERRIDE_ARCH", "").removeprefix("sm")
    if arch:
        from tilewise.kernels import device

        capability = int(arch)
        device.capability = lambda index: capability  # type: ignore[assignment]
        arch = f"-sm{arch}"
    most = max(given.rows)
    with tempfile.TemporaryDirectory() as folder:
        llm = None
        if given.empty:
            loop = empty_engine(most, given.prefix_caching)
        else:
            llm = real_engine(most, given.prefix_caching, folder)
            loop = llm.loop
        steps = Steps(loop, given.empty)
        print("@{}", flush=True)
        for line in sys.stdin:
            rows = int(line)
            trace = f"{given.trace}/steady-{rows}{arch}.json.gz" if given.trace else None
            found = loop.call(lambda rows=rows, trace=trace: steps.turn(rows, trace))
            print("@" + json.dumps(found), flush=True)


def ceilings() -> dict[str, float]:
    """Measure what this card gives, as `tilewise bench machine` does, in a process that ends."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from tilewise.bench.roofline import measure_ceilings
    from tilewise.children import spawning

    with spawning(), ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        found = pool.submit(measure_ceilings, "cuda").result()
    return {"device": found.name, "read_bytes": found.read_bytes, "flops": found.matmul_flops}


def add_roof(row: dict[str, Any], limits: dict[str, Any]) -> None:
    """Add what a step takes at least by what the card gives."""
    from tilewise.bench.engines.roof import Roof
    from tilewise.bench.engines.shapes import SHAPES, read_sizes

    roof = Roof(read_sizes(SHAPES[SHAPE]), limits["read_bytes"], limits["flops"])
    row["roof ms"] = 1e3 * roof.step(row["rows"], row["rows"] * row["context"])
    row["% of roof"] = 100 * row["roof ms"] / row["step"][1]


def main() -> None:
    """Start the engines, let them take turns, print what they found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trees", nargs="*", type=Path, default=[Path(__file__).parents[1]])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32, 256])
    parser.add_argument("--turns", type=int, default=1, help="of each, after one to warm up")
    parser.add_argument("--empty", action="store_true", help="on a CPU, without a model")
    parser.add_argument("--prefix-caching", action="store_true")
    parser.add_argument("--trace", metavar="FOLDER", help="keep the profiler's traces there")
    parser.add_argument("--beside", metavar="ARCH", help="a second engine, as of sm80 or sm89")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if max(given.rows) > MOST_ROWS:
        parser.error(f"--rows must be at most {MOST_ROWS}, or the first end before the last begin")
    if given.serve:
        serve(given)
        return
    document: dict[str, Any] = {"what": (__doc__ or "").splitlines()[0], "empty": given.empty}
    document |= {"prefix_caching": given.prefix_caching, "argv": sys.argv[1:]}
    if not given.empty:
        document["ceilings"] = ceilings()
        print(json.dumps(document["ceilings"]), flush=True)
    options = [word for word in sys.argv[1:] if word.startswith("--")]
    command = [sys.executable, str(Path(__file__).resolve()), "--serve", "--rows"]
    command += [str(rows) for rows in given.rows]
    command += [word for word in options if word in ("--empty", "--prefix-caching")]
    command += ["--trace", str(given.trace.rstrip("/"))] if given.trace else []
    running, engines = [], []
    for tree in given.trees:
        for arch in (None, given.beside) if given.beside else (None,):
            began = time.perf_counter()
            path = str(tree.resolve())
            environment = os.environ | {"PYTHONPATH": path}
            name = tree.resolve().name
            if arch:
                environment["TRITON_OVERRIDE_ARCH"] = arch
                name += f" as {arch}"
            process = subprocess.Popen(
                command, cwd=tree, text=True, env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            running.append(process)
            engines.append(name)
            _read(process)
            print(f"{name}: ready in {time.perf_counter() - began:.1f} s", flush=True)
    rows: list[dict[str, Any]] = []
    document["rows"] = rows
    for turn in range(given.turns + 1):
        order = list(zip(engines, running, strict=True))
        for name, process in order if turn % 2 == 0 else reversed(order):
            for count in given.rows:
                assert process.stdin is not None
                process.stdin.write(f"{count}\n")
                process.stdin.flush()
                row = {"tree": name, "turn": turn} | _read(process)
                if not given.empty:
                    add_roof(row, document["ceilings"])
                if turn:
                    rows.append(row)
                    print(json.dumps(row), flush=True)
                if given.json is not None:
                    given.json.write_text(json.dumps(document, indent=1) + "\n")
    for process in running:
        process.communicate()
    for engine in engines:
        for count in given.rows:
            own = [r for r in rows if (r["tree"], r["rows"]) == (engine, count)]
            medians = {
                name.strip("_"): statistics.median(r[name.strip("_")][1] for r in own)
                for name in (*PARTS, "asked")
            }
            print(f"{engine}, {count} rows, ms a step:", flush=True)
            print("  " + ", ".join(f"{name} {ms:.3f}" for name, ms in medians.items()))
            print(f"  digest of tokens: {', '.join(sorted({row['digest'] for row in own}))}")
            for name in ("% of roof", "busy %"):
                if name in own[0]:
                    print(f"  {name}: {statistics.median(r[name] for r in own):.4g}")
    print(json.dumps(document))


def _read(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("@"):
            row: dict[str, Any] = json.loads(line[1:])
            return row
    raise SystemExit(f"an engine ended with status {process.wait()}")


if __name__ == "__main__":
    main()
