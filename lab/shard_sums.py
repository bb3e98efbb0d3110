"""What adding up rows over GPUs, the residual stream and the norm take, by size and way.

    python lab/shard_sums.py --ranks 2 4 --json F [--dim 4096] [--rows 1 8 32 64 128 256]
        [--ways nccl flags] [--count 32] [--rounds 5] [--first-gpu 0] [--stress 100000]

Ways: "nccl" and "buffers" (torch's symmetric memory, one shot) are a sum and a norm after it;
"all", "dealt" and "flags" are `distributed.inbox`: every rank gets the numbers of all, or each adds
up its share of the rows, in words that say which sum they are of, or with flags beside them. Each
is captured as a graph of `--count` of them in a chain, launched early as in a decode step, and
compared with the sum in float64 before; one that differs has no time. Replays of all ways take
turns; microseconds of one are the slowest rank's median. `--stress` first adds up so many times
with flags, in graphs, rows of several numbers in turn while one rank after another is late, and
compares all bits of all. Several numbers of ranks run one after the other. The last line is JSON.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import tilewise
from tilewise import ops
from tilewise.bench.report import emit, format_table, say
from tilewise.distributed import inbox as inboxes
from tilewise.distributed.environment import worker_environment
from tilewise.distributed.shard_group import SMALL_BYTES, ShardGroup
from tilewise.kernels.early import LARGE

WAYS = ("nccl", "buffers", "all", "dealt", "flags")
EPS = 1e-5
NO_BYTES, ANY_BYTES = (0, 0), (0, 1 << 40)
# Rows of sums in turn: groups of all ranks' rows are full and not, and come and go.
STRESSED_ROWS, LATE_CYCLES = (256, 66, 255, 1, 130, 256, 7), 30_000
Sum = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def sum_of(way: str, group: ShardGroup, weight: Tensor) -> Sum:
    """Return a function of x and the residual that gives y and the new residual."""
    inbox = group.inbox
    assert inbox is not None
    if way in ("all", "dealt", "flags"):
        has_flags = ANY_BYTES if way == "flags" else NO_BYTES
        most = inboxes.MOST_ROWS if way == "all" else 0

        def add_up(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
            inbox.one_shot_rows, inbox.flagged_bytes = most, has_flags
            return inbox.add_rms_norm(x, residual, weight, EPS)

        return add_up

    def add_then_norm(x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if way == "nccl":
            total = x.clone()
            dist.all_reduce(total)
        else:
            group.inbox = None  # or it would take them
            total = group.sum(x)
            group.inbox = inbox
        return ops.add_rms_norm(total, residual, weight, EPS)

    return add_then_norm


def difference(add: Sum, way: str, group: ShardGroup, weight: Tensor, rows: int) -> str | None:
    """Compare some sums in a chain with float64's; return what is wrong."""
    wrong: str | None = None
    for step in range(6):
        generator = torch.Generator(group.device).manual_seed(step)
        shape = (group.size, rows, len(weight))
        parts = torch.randn(shape, generator=generator, device=group.device).to(weight.dtype)
        residual = torch.randn(shape[1:], generator=generator, device=group.device)
        residual = residual.to(weight.dtype)
        y, total = add(parts[group.rank].contiguous(), residual)
        want = parts.double().sum(0) + residual.double()
        mine = slice(group.rank, None, group.size) if way in ("dealt", "flags") else slice(None)
        scale = want.square().mean(1, keepdim=True).add(EPS).rsqrt()
        for name, got, wanted in (
            ("sum", total[mine], want[mine]),
            ("norm", y, want * scale * weight.double()),
        ):
            off = float((got.double() - wanted).abs().max()) if len(wanted) else 0.0
            if not off <= 0.125:
                wrong = wrong or f"{name} of step {step} is off by {off}"
        others = group.stack(y)
        if not torch.equal(others, y.expand_as(others)):
            wrong = wrong or f"the ranks differ in step {step}"
    return wrong


def stress(group: ShardGroup, weight: Tensor, count: int) -> str | None:
    """Add up so many times with flags; return what is wrong."""
    device, rank, dim = group.device, group.rank, len(weight)
    generator = torch.Generator(device).manual_seed(1)
    shape = (len(STRESSED_ROWS), group.size, max(STRESSED_ROWS), dim)
    parts = torch.randn(shape, generator=generator, device=device).to(weight.dtype)
    residual = torch.randn(shape[2:], generator=generator, device=device).to(weight.dtype)
    add = sum_of("flags", group, weight)
    own = parts[:, rank].contiguous()
    wanted = []
    for rows, part, x in zip(STRESSED_ROWS, parts, own, strict=True):
        y, total = add(x[:rows], residual[:rows])
        mine = slice(rank, rows, group.size)
        added = part[0, mine].float()
        for other in part[1:, mine]:
            added = added + other.float()
        want = (added.to(weight.dtype).float() + residual[mine].float()).to(weight.dtype)
        if not torch.equal(total[mine], want):
            return f"a sum of {rows} rows differs"
        whole = part[:, :rows].double().sum(0) + residual[:rows].double()
        normed = whole * whole.square().mean(1, keepdim=True).add(EPS).rsqrt() * weight.double()
        if not float((y.double() - normed).abs().max()) <= 0.125:
            return f"a norm of {rows} rows differs"
        others = group.stack(y)
        if not torch.equal(others, y.expand_as(others)):
            return f"{rows} rows differ between ranks"
        wanted.append(y)
    del parts
    wrong = torch.zeros((), dtype=torch.int64, device=device)

    def chain() -> None:
        for turn in range(group.size):
            found = []
            with ops.launching_early(device, largest_weight=LARGE):
                for i, rows in enumerate(STRESSED_ROWS):
                    if turn == rank and i % 2:
                        torch.cuda._sleep(LATE_CYCLES)
                    found.append(add(own[i, :rows], residual[:rows])[0])
            for y, want in zip(found, wanted, strict=True):
                wrong.add_((y != want).sum())

    graph = graph_of(chain, device)
    replays = -(-count // (group.size * len(STRESSED_ROWS)))
    for _ in range(replays):
        graph.replay()
    torch.cuda.synchronize(device)
    done = replays * group.size * len(STRESSED_ROWS)
    say(f"rank {rank}: {int(wrong)} numbers of {done} sums differ")
    return f"{int(wrong)} numbers of {done} sums differ" if wrong else None


def captured(add: Sum, x: Tensor, residual: Tensor, count: int) -> torch.cuda.CUDAGraph:
    """Return a graph of so many sums, each of what the one before gave."""

    def chain() -> None:
        y, kept = x, residual
        with ops.launching_early(x.device, largest_weight=LARGE):
            for _ in range(count):
                y, kept = add(y, kept)

    return graph_of(chain, x.device)


def graph_of(chain: Callable[[], None], device: torch.device) -> torch.cuda.CUDAGraph:
    """Return a graph of what a function launches, which is called once before."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        chain()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        chain()
    return graph


def timed(graph: torch.cuda.CUDAGraph, device: torch.device, replays: int = 4) -> float:
    """Return milliseconds of a replay."""
    dist.barrier()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(replays):
        graph.replay()
    events[1].record()
    torch.cuda.synchronize(device)
    return float(events[0].elapsed_time(events[1]) / replays)


def slowest(value: float, device: torch.device) -> float:
    """Return the largest of all ranks' values."""
    found = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found)


def work(rank: int, size: int, options: argparse.Namespace, folder: str) -> None:
    """Measure on one rank; the first writes the rows."""
    device = torch.device("cuda", options.first_gpu + rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{folder}/meet", rank=rank, world_size=size,
        timeout=datetime.timedelta(seconds=60), device_id=device,
    )  # fmt: skip
    group = ShardGroup(rank, size, device, dist.group.WORLD)
    group.meet()
    group.open_inbox(options.dim, torch.bfloat16, deals=True)
    if rank == 0:
        say(f"{size} ranks: {group.why_no_symmetric_memory}, {group.why_no_inbox}")
    if group.inbox is None:
        raise SystemExit(1)
    torch.manual_seed(0)  # all ranks have the same weight
    weight = torch.rand(options.dim, device=device).add(0.5).to(torch.bfloat16)
    found: list[dict[str, Any]] = []
    ways = list(options.ways)
    if options.stress:
        wrong = stress(group, weight, options.stress)
        if slowest(float(wrong is not None), device):
            found.append({"ranks": size, "flags, error": wrong or "another rank's differs"})
            ways.remove("flags")
        else:
            found.append({"ranks": size, "stressed sums": options.stress})
        if rank == 0:
            print(found[-1], flush=True)
            Path(folder, "rows.json").write_text(json.dumps(found))
    for rows in options.rows:
        graphs = {}
        row: dict[str, Any] = {"ranks": size, "rows": rows, "KiB": rows * options.dim * 2 / 1024}
        for way in ways:
            if way == "buffers" and rows * options.dim * 2 > SMALL_BYTES:
                continue
            add = sum_of(way, group, weight)
            wrong = difference(add, way, group, weight, rows)
            if slowest(float(wrong is not None), device):
                row[f"{way}, error"] = wrong or "another rank's differs"
                continue
            x = torch.randn(rows, options.dim, device=device).to(torch.bfloat16)
            graphs[way] = captured(add, x, x.clone(), options.count)
        times: dict[str, list[float]] = {way: [] for way in graphs}
        for _ in range(options.rounds):
            for way, graph in graphs.items():
                times[way].append(timed(graph, device))
        for way, values in times.items():
            row[way] = round(slowest(1e3 * median(values) / options.count, device), 2)
        found.append(row)
        if rank == 0:
            print(row, flush=True)
            Path(folder, "rows.json").write_text(json.dumps(found))
    torch.cuda.synchronize(device)
    dist.barrier()
    os._exit(0)  # graphs with NCCL's kernels take long to be taken down


def main() -> None:
    """Measure, print a table, then JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--stress", type=int, default=0, metavar="SUMS")
    parser.add_argument("--count", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-gpu", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.stress and "flags" not in options.ways:
        parser.error("--stress is of the way flags")
    if torch.cuda.device_count() < options.first_gpu + max(options.ranks):
        parser.error(f"needs {options.first_gpu + max(options.ranks)} GPUs")
    os.environ.update(worker_environment())
    rows: list[dict[str, Any]] = []
    for size in options.ranks:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(work, (size, options, folder), nprocs=size)  # type: ignore[no-untyped-call]
            rows += json.loads(Path(folder, "rows.json").read_text())
    print(format_table(rows, ["ranks", "rows", "KiB", *WAYS]))
    document = {
        "version": tilewise.__version__, "device": torch.cuda.get_device_name(),
        "torch": torch.__version__, "dim": options.dim, "us": "of one sum with its norm",
        "rows": rows,
    }  # fmt: skip
    emit(document, options.json)


if __name__ == "__main__":
    main()
