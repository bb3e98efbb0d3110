"""Where a decode step of the engine's ranks goes: the parent's stages, and each rank's.

    python lab/shard_engine.py --ranks 4 --json F [--shape llama-3-8b] [--batch 1 32 256]
        [--prompt-tokens 1024] [--new-tokens 128] [--rounds 2] [--device cuda]

Ways, in turns on one engine: "whole" tells ranks every row of every step, "steady" as the engine
does, and "greedy" draws from the largest logit of each rank besides (`decode_step.GREEDY_ROWS`).
Their tokens are compared. A row is the median of the steps in which all sequences decode: "ms" from
result to result, then where the parent's thread was (schedule, submit, wait, update, and between
two steps), and of the slowest rank how long it took to hear of a step and to begin it, what its GPU
computed, how long its GPU was idle before it, and how long the answer took. "mixed" are the steps
with prompts, in seconds together. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

import tilewise
from lab.shard_steps import parser_of_ranks, write_config
from tilewise.bench.report import emit, format_table, say
from tilewise.engine.captured import decode_step
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.llm import LLM
from tilewise.engine.request import SamplingParams
from tilewise.engine.steps.runner import ModelRunner
from tilewise.engine.tensor_parallel import processes, worker

WAYS = ("whole", "steady", "greedy")
NEVER = 10**9  # rows from which ranks draw from their largest logits
FOLDER = "SHARD_ENGINE_FOLDER"  # in the environment of the ranks: where each leaves its times
COLUMNS = ["ranks", "batch", "way", "ms", "schedule", "submit", "wait", "update", "between",
           "heard", "begun", "gpu", "idle", "answered", "steps", "mixed", "mixed s"]  # fmt: skip


class Rank:
    """What one rank notes of its steps; perf_counter is the same clock in all processes."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.events: list[tuple[Any, Any]] = []

    def install(self) -> None:
        """Let the runners and the worker of this process note what they do."""
        noted = self
        decode_step.GREEDY_ROWS = NEVER
        kinds: list[Any] = [DeviceRunner, ModelRunner]
        for kind in kinds:
            submit = kind.submit

            def timed(runner: Any, batch: Any, submit: Any = submit) -> Any:
                step = {"entered": time.perf_counter(), "rows": len(batch.sequences)}
                is_cuda = torch.cuda.is_available() and runner.storage.layers[0][0].is_cuda
                events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * is_cuda)]
                if events:
                    events[0].record()
                handle = submit(runner, batch)
                if events:
                    events[1].record()
                    noted.events.append((events[0], events[1]))
                step["left"] = time.perf_counter()
                noted.steps.append(step)
                result = handle.result

                def waited() -> Any:
                    drawn = result()
                    step["drawn"] = time.perf_counter()
                    return drawn

                handle.result = waited
                return handle

            kind.submit = timed

        def tell(rank: Any, what: str, slot: int, group: int) -> None:
            decode_step.GREEDY_ROWS = slot
            noted.write(Path(os.environ[FOLDER], f"{rank.group.rank}.json"))

        process: Any = worker._Worker
        process.pass_block = tell  # of an engine that moves no blocks

    def write(self, path: Path) -> None:
        """Leave the steps so far, and forget them."""
        if self.events:
            torch.cuda.synchronize()
            for i, (first, last) in enumerate(self.events):
                self.steps[i]["gpu"] = first.elapsed_time(last)
                if i:
                    self.steps[i]["idle"] = self.events[i - 1][1].elapsed_time(first)
        path.write_text(json.dumps(self.steps))
        self.steps, self.events = [], []


class Parent:
    """Notes where the engine's thread is."""

    def __init__(self, llm: LLM, folder: Path, size: int) -> None:
        self.llm, self.folder, self.size = llm, folder, size
        self.steps: list[dict[str, Any]] = []
        self.way = "steady"
        engine: Any = llm.engine
        schedule, update = engine.scheduler.schedule, engine.scheduler.update
        submit = engine.runner.submit
        times: dict[str, float] = {}

        def scheduled() -> Any:
            began = time.perf_counter()
            batch = schedule()
            times["schedule"] = time.perf_counter() - began
            return batch

        def submitted(batch: Any) -> Any:
            began = time.perf_counter()
            told = batch
            if self.way == "whole":
                told = replace(batch, sequences=tuple(batch.sequences), is_plain=False)
            handle = submit(told)
            ended = time.perf_counter()
            step: dict[str, Any] = {
                "rows": len(batch.sequences), "tokens": batch.num_tokens,
                "schedule": times["schedule"], "submit": ended - began, "sent": ended,
            }  # fmt: skip
            self.steps.append(step)
            result = handle.result

            def waited() -> Any:
                began = time.perf_counter()
                drawn = result()
                step["got"] = time.perf_counter()
                step["wait"] = step["got"] - began
                times["got"] = step["got"]
                return drawn

            handle.result = waited
            return handle

        def updated(batch: Any, samples: Any) -> Any:
            began = time.perf_counter()
            events = update(batch, samples)
            ended = time.perf_counter()
            for step in reversed(self.steps):
                if step.get("got") == times["got"]:
                    step["update"] = ended - began
                    break
            return events

        engine.scheduler.schedule = scheduled
        engine.scheduler.update = updated
        engine.runner.submit = submitted

    def run(self, way: str, prompts: list[Any], new_tokens: int) -> tuple[dict[str, Any], Any]:
        """Generate in one way; return the row, and the tokens."""
        self.way = way
        self.ranks()
        self.steps.clear()
        params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
        began = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - began
        steps, ranks = list(self.steps), self.ranks()
        row = self.row(steps, ranks, len(prompts))
        return row | {"s": seconds}, [o.outputs[0].token_ids for o in outputs]

    def ranks(self) -> list[list[dict[str, Any]]]:
        """Return the steps of all ranks since this was last asked."""
        workers = self.llm.engine.runner.workers  # type: ignore[attr-defined]
        self.llm.loop.call(lambda: workers.call("read", 1 if self.way == "greedy" else NEVER, 0))
        return [
            json.loads(Path(self.folder, f"{rank}.json").read_text()) for rank in range(self.size)
        ]

    def row(
        self, steps: list[dict[str, Any]], ranks: list[list[dict[str, Any]]], rows: int
    ) -> dict[str, Any]:
        """Return medians of the steps in which all decode, in ms."""
        full = [
            i for i, step in enumerate(steps)
            if i and step["rows"] == step["tokens"] == rows and "got" in step
            and steps[i - 1]["rows"] == steps[i - 1]["tokens"] == rows
        ]  # fmt: skip
        found: dict[str, list[float]] = {}

        def note(name: str, seconds: float) -> None:
            found.setdefault(name, []).append(1e3 * seconds)

        for i in full:
            step, before = steps[i], steps[i - 1]
            note("ms", step["got"] - before["got"])
            for name in ("schedule", "submit", "wait", "update"):
                note(name, step.get(name, 0.0))
            others = sum(step.get(n, 0.0) for n in ("schedule", "submit", "wait", "update"))
            note("between", step["got"] - before["got"] - others)
            own = [rank[i] for rank in ranks if i < len(rank)]
            if len(own) == len(ranks):
                note("heard", max(r["entered"] for r in own) - step["sent"])
                note("begun", max(r["left"] - r["entered"] for r in own))
                note("answered", step["got"] - max(r["drawn"] for r in own))
                if all("idle" in r for r in own):
                    note("gpu", max(r["gpu"] for r in own) / 1e3)
                    note("idle", max(r["idle"] for r in own) / 1e3)
        mixed = [
            (step["got"] - before["got"])
            for before, step in pairwise(steps)
            if "got" in step and "got" in before and step["tokens"] > step["rows"]
        ]
        return {
            **{name: median(values) for name, values in found.items()},
            "ms, 9 in 10": sorted(found.get("ms", [0.0]))[int(0.9 * len(found.get("ms", [0.0])))],
            "steps": len(full), "mixed": len(mixed), "mixed s": sum(mixed),
        }  # fmt: skip


def main() -> None:
    """Measure, print a table, then JSON."""
    parser = parser_of_ranks(__doc__)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    processes.WORKER = "lab.shard_engine"
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {
        "version": tilewise.__version__, "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "shape": options.shape, "prompt tokens": options.prompt_tokens, "rows": rows,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        os.environ[FOLDER] = folder
        config = write_config(options, folder)
        longest, most = options.prompt_tokens + options.new_tokens, max(options.batch)
        began = time.perf_counter()
        llm = LLM(
            Path(folder, "model"), device=options.device, random_weights=True,
            dtype="bfloat16" if options.device == "cuda" else "float32",
            tensor_parallel_size=options.ranks, max_num_seqs=most, max_model_len=longest,
            enable_prefix_caching=False, num_blocks=most * (-(-longest // 16) + 1),
        )  # fmt: skip
        say(f"{options.ranks} ranks: started in {time.perf_counter() - began:.1f} s")
        try:
            parent = Parent(llm, Path(folder), options.ranks)
            for batch in options.batch:
                # As tilewise bench engine: tokens of no text, all prompts different.
                generator = torch.Generator().manual_seed(batch)
                shape = (batch, options.prompt_tokens)
                ids = torch.randint(0, config["vocab_size"], shape, generator=generator).tolist()
                prompts = [{"prompt_token_ids": some} for some in ids]
                for way in WAYS:
                    parent.run(way, prompts, 8)
                tokens: dict[str, Any] = {}
                for _ in range(options.rounds):
                    for way in WAYS:
                        row, drawn = parent.run(way, prompts, options.new_tokens)
                        tokens.setdefault(way, drawn)
                        same = drawn == tokens[WAYS[0]]
                        row = {"ranks": options.ranks, "batch": batch, "way": way, **row}
                        rows.append(row | {"same tokens": same})
                        print(rows[-1], flush=True)
                        if options.json:
                            Path(options.json).write_text(json.dumps(document))
        finally:
            llm.close()
    print(format_table(rows, COLUMNS))
    emit(document, options.json)
    if not all(row["same tokens"] for row in rows):
        sys.exit("tokens differ between the ways")


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1].isdigit():  # as a worker: its socket and its folder
        Rank().install()
        worker.main(int(sys.argv[1]), sys.argv[2])
    else:
        main()
