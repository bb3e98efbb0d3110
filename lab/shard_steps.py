"""Captured decode steps of one model on 1, 2 and 4 GPUs, in ways to add up, and their kernels.

    python lab/shard_steps.py --ranks 1 --json F [--shape llama-3-8b] [--batch 1 32 256]
        [--context 1024] [--rounds 5] [--first-gpu 0] [--ways before inbox] [--device cuda]

Ways: "before" adds up in torch's buffers or NCCL, and a norm follows; "inbox" is
`distributed.inbox`; "inbox, all" the same with every rank adding up all rows, "flags" with flags
beside the numbers of more rows (`FLAGGED_BYTES`), and "alone" nobody waits for anybody: what a rank
computes without its sums. One rank has "before" only. The steps of one process group follow the
same weights and rows; of each the logits of the first steps are compared with those of "before".
Replays of all ways take turns; a step's time is the slowest rank's. Then a few replays of each are
traced on the first rank: microseconds a step by kernel. The last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import re
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import tilewise
from lab.profile_decode import BLOCK, decoding, fill, slices, traced
from tilewise.bench.engines.roof import Roof
from tilewise.bench.engines.shapes import model_directory, read_sizes
from tilewise.bench.report import emit, format_table, say
from tilewise.cache.storage import KVStorage
from tilewise.distributed import inbox as inboxes
from tilewise.distributed.environment import worker_environment
from tilewise.distributed.shard_group import ShardGroup
from tilewise.distributed.shards import load_shard
from tilewise.engine.captured.decode_step import DecodeStep
from tilewise.engine.captured.runner import DeviceRunner
from tilewise.engine.settings import cache_spec
from tilewise.models import load_model

WAYS = ("before", "inbox", "inbox, all", "flags", "alone")
COMPARED, REPLAYS, TRACED = 3, 20, 4
COLUMNS = ["ranks", "batch", "way", "ms", "tok/s", "% of roof", "kernels", "difference", "error"]


class Bench:
    """One rank's shard, and its decode steps."""

    def __init__(self, rank: int, size: int, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.size = options, size
        self.device = torch.device(options.device)
        if self.device.type == "cuda":
            self.device = torch.device("cuda", options.first_gpu + rank)
            torch.cuda.set_device(self.device)
        self.group = ShardGroup(rank, size, self.device, dist.group.WORLD if size > 1 else None)
        dtype = "bfloat16" if self.device.type == "cuda" else "float32"
        model: Any
        if size == 1:
            model = load_model(directory, dtype=dtype, device=self.device, random_weights=True)
        else:
            self.group.meet()
            model = load_shard(directory, self.group, dtype=dtype, random_weights=True)
        self.inbox = self.group.inbox
        longest = options.context + COMPARED + REPLAYS + 8
        spec = cache_spec(model.config, BLOCK, model.dtype, longest)
        storage = KVStorage(spec, max(options.batch) * -(-longest // BLOCK), self.device)
        fill(storage)
        self.runner = DeviceRunner(
            model, storage, max_num_seqs=max(options.batch), max_model_len=longest
        )
        self.first = 0

    def begin(self, rows: int) -> None:
        """Let so many rows decode."""
        steps = COMPARED + REPLAYS + 8
        batch = decoding(rows, self.options.context, steps, self.first)
        self.first += rows
        self.set_way("before")
        self.runner.submit(batch).result()
        state = self.runner.rows
        self._kept = [x.clone() for x in (state.token, state.position, state.counter)]
        self._rows = rows

    def rewind(self) -> None:
        """Put the rows back to the first step."""
        state = self.runner.rows
        for x, kept in zip((state.token, state.position, state.counter), self._kept, strict=True):
            x.copy_(kept)
        state.position[: self._rows].fill_(self.options.context - 1)

    def set_way(self, way: str) -> None:
        """Let sums that are captured from now on be of a way."""
        group = self.group
        group.size = 1 if way == "alone" else self.size
        group.inbox = self.inbox if way.startswith("inbox") or way == "flags" else None
        if self.inbox is not None:
            flagged = inboxes.FLAGGED_BYTES[self.size]
            self.inbox.flagged_bytes = flagged if way == "flags" else (0, 0)
            few = inboxes.ONE_SHOT_ROWS[self.size]
            self.inbox.one_shot_rows = inboxes.MOST_ROWS if way == "inbox, all" else few

    def capture(self, way: str) -> DecodeStep:
        """Return the step, captured where there is a GPU."""
        runner, bucket = self.runner, next(b for b in self.runner.buckets if b >= self._rows)
        self.set_way(way)
        step = runner.steps[bucket] = DecodeStep(
            runner.model, runner.storage, runner.rows, runner.results, bucket, keeps_logits=True
        )
        if self.device.type == "cuda":
            runner.capture(bucket)
        return step

    def logits(self, step: DecodeStep) -> list[torch.Tensor]:
        """Return the logits of the first steps."""
        self.rewind()
        found = []
        for _ in range(COMPARED):
            step.run()
            assert step.logits is not None
            found.append(step.logits[: self._rows].float().clone())
        return found

    def time(self, step: DecodeStep) -> float:
        """Return milliseconds of a replay."""
        self.rewind()
        for _ in range(3):
            step.run()
        self.meet()
        began = time.perf_counter()
        for _ in range(REPLAYS if self.device.type == "cuda" else 1):
            step.run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            return 1e3 * (time.perf_counter() - began) / REPLAYS
        return 1e3 * (time.perf_counter() - began)

    def meet(self) -> None:
        """Wait until all ranks have come here and nothing runs."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        if self.size > 1:
            dist.barrier()

    def slowest(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        if self.size == 1:
            return value
        found = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return float(found)


def by_kernel(step: DecodeStep, bench: Bench, folder: Path) -> dict[str, Any]:
    """Trace a few replays; return microseconds a step by kernel, and of gaps."""
    bench.rewind()

    def replay() -> None:
        for _ in range(TRACED):
            step.run()

    kernels = traced(replay, folder)
    per_step = len(kernels) // TRACED
    # The first steps' begin is the profiler's, and their ranks do not begin together.
    timeline = slices(kernels)[per_step * (TRACED // 2) :]
    count = TRACED - TRACED // 2
    own: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for each in timeline:
        name = re.sub(r"<.*", "", each.name.replace("void ", ""))[:60]
        for i, value in enumerate((1, each.own, each.gap)):
            own[name][i] += value / count
    rows = sorted(own.items(), key=lambda item: -item[1][1] - item[1][2])
    return {
        name: {"count": round(n, 1), "us": round(us, 1), "gap us": round(gap, 1)}
        for name, (n, us, gap) in rows[:24]
    }


@torch.inference_mode()
def measure(rank: int, size: int, options: argparse.Namespace, folder: str) -> None:
    """Measure on one rank; the first writes the rows."""
    if size > 1:
        device = torch.device("cuda", options.first_gpu + rank)
        dist.init_process_group(
            "nccl" if options.device == "cuda" else "gloo",
            init_method=f"file://{folder}/meet", rank=rank, world_size=size,
            timeout=datetime.timedelta(seconds=90),
            device_id=device if options.device == "cuda" else None,
        )  # fmt: skip
    directory = Path(folder, "model")
    sizes = read_sizes(json.loads((directory / "config.json").read_text()))
    began = time.perf_counter()
    bench = Bench(rank, size, options, directory)
    if rank == 0:
        say(f"{size} ranks: loaded in {time.perf_counter() - began:.1f} s")
        say(f"buffers: {bench.group.why_no_symmetric_memory}, inbox: {bench.group.why_no_inbox}")
    ways = ways_of(options.ways, size, None if bench.inbox else str(bench.group.why_no_inbox))
    found: list[dict[str, Any]] = []
    roof = Roof(sizes, *options.limits)
    for rows in options.batch:
        bench.begin(rows)
        least = 1e3 * roof.step(rows, rows * options.context) / size
        steps: dict[str, DecodeStep] = {}
        first: list[torch.Tensor] = []
        made: dict[str, dict[str, Any]] = {}
        for way in ways:
            row = made[way] = {"ranks": size, "batch": rows, "way": way}
            steps[way] = bench.capture(way)
            logits = bench.logits(steps[way])
            first = first or logits
            if way != "alone":
                pairs = list(zip(logits, first, strict=True))
                row["difference"] = max(
                    float((a - b).abs().max() / b.abs().max()) for a, b in pairs[:1]
                )
                row["other tokens"] = float(
                    (logits[0].argmax(1) != first[0].argmax(1)).double().mean()
                )
            bench.meet()
            if rank == 0:
                say(f"batch {rows}, {way}: captured, {time.perf_counter() - began:.0f} s")
        times: dict[str, list[float]] = {way: [] for way in steps}
        for _ in range(options.rounds):
            for way, step in steps.items():
                bench.set_way(way)
                times[way].append(bench.time(step))
        for way, values in times.items():
            row = made[way]
            bench.set_way("before")
            ms = bench.slowest(median(values))
            row |= {"ms": ms, "ms, least": bench.slowest(min(values)), "tok/s": 1e3 * rows / ms}
            row |= {"roof ms": least, "% of roof": 100 * least / ms}
            bench.meet()
            if options.device == "cuda" and way in options.traces:
                if rank == 0:
                    row["by kernel"] = by_kernel(steps[way], bench, Path(folder))
                    row["kernels"] = sum(e["count"] for e in row["by kernel"].values())
                else:
                    bench.rewind()
                    for _ in range(TRACED):
                        steps[way].run()
                bench.meet()
            found.append(row)
            if rank == 0:
                print({k: v for k, v in row.items() if k != "by kernel"}, flush=True)
                for name, each in list(row.get("by kernel", {}).items())[:16]:
                    print(
                        f"    {each['count']:7.1f} {each['us']:9.1f} {each['gap us']:8.1f} {name}",
                        flush=True,
                    )
                Path(folder, "rows.json").write_text(json.dumps(found))
                if options.json:
                    Path(options.json).write_text(json.dumps(document_of(options, found)))
        bench.runner.steps.clear()
        steps.clear()
        gc.collect()
    if size > 1:
        bench.meet()
        os._exit(0)  # graphs with NCCL's kernels take long to be taken down


def ways_of(asked: list[str], size: int, why_no_inbox: str | None) -> list[str]:
    """Return those of the ways that so many ranks have.

    Raises:
        ValueError: it is none.
    """
    have = WAYS if why_no_inbox is None else ("before", "alone")
    ways = [way for way in asked if way in (have if size > 1 else ("before",))]
    if not ways:
        rule = "have before for one rank" if size == 1 else "have before or alone"
        why = "" if size == 1 else f", as there is no inbox: {why_no_inbox}"
        raise ValueError(f"--ways must {rule}, got {' '.join(asked)}{why}")
    return ways


def document_of(options: argparse.Namespace, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what is written."""
    name = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    return {
        "version": tilewise.__version__, "device": name, "torch": torch.__version__,
        "shape": options.shape, "context": options.context, "limits": options.limits, "rows": rows,
    }  # fmt: skip


def parser_of_ranks(doc: str | None) -> argparse.ArgumentParser:
    """Return a parser that knows which model ranks compute, where, and of how many rows."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--shape", default="llama-3-8b")
    parser.add_argument("--layers", type=int, help="in place of the shape's")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 256])
    return parser


def write_config(options: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Write the config of the model that is asked for to folder/model; return it."""
    directory, _ = model_directory(options.shape, Path(folder, "made"))
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    if options.layers:
        config["num_hidden_layers"] = options.layers
    Path(folder, "model").mkdir()
    Path(folder, "model", "config.json").write_text(json.dumps(config))
    return config


def main() -> None:
    """Measure, print a table, then JSON."""
    parser = parser_of_ranks(__doc__)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-gpu", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--traces", nargs="*", choices=WAYS, default=["before", "inbox"])
    parser.add_argument("--limits", nargs=2, type=float, default=[3.35e12, 800e12])
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.ranks == 1:
        try:
            ways_of(options.ways, 1, None)
        except ValueError as error:
            parser.error(str(error))
    os.environ.update(worker_environment())
    with tempfile.TemporaryDirectory() as folder:
        write_config(options, folder)
        if options.ranks == 1:
            measure(0, 1, options, folder)
        else:
            mp.spawn(  # type: ignore[no-untyped-call]
                measure, (options.ranks, options, folder), nprocs=options.ranks
            )
        rows = json.loads(Path(folder, "rows.json").read_text())
    print(format_table(rows, COLUMNS))
    emit(document_of(options, rows), options.json)


if __name__ == "__main__":
    main()
