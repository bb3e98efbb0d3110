"""One rank's share of attention over a shared sequence, timed on one device with nothing sent.

What `lab/context.py` measures on N devices is a rank's own work and what it waits for. This
runs the same functions as one rank of N whose exchanges give back what is there at once, so that
only the own work is left: "own x" is the time of the whole on one device, over N times the rank's.
Beside it stand the time with several calls in flight, where the host is hidden, and the device's
time by kernel. The bytes that a rank sends over a link of `choose.Rates` give the rest.

The numbers in the results are wrong, as nobody has sent anything: nothing is compared here.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import tilewise
from lab.context import _edges, _on_one
from tilewise.bench.report import emit, format_table, say, write
from tilewise.bench.roofline import device_name
from tilewise.distributed import choose_layout, exchange, shard_sequence
from tilewise.distributed.choose import METHODS, Rates, explain

COLUMNS = ["ranks", "rank", "tokens a rank", "method", "layout", "forward ms", "of it queued",
           "own x", "backward ms", "backward queued", "own backward x",
           "with transfers x"]  # fmt: skip
QUEUED = 4  # calls in flight where the host is to be hidden


class _Nothing:
    """Exchanges of a rank that is alone: the shapes come, at once, with its own numbers."""

    rooms: dict[Any, Tensor] = {}  # noqa: RUF012 - what is gathered lies there already

    @classmethod
    def shift(cls, _: Any, tensors: Sequence[Tensor], distance: int = 1) -> exchange.Pending:
        return exchange.Pending([t.contiguous() for t in tensors], [], [])

    @classmethod
    def trade(cls, _: Any, tensors: Sequence[Tensor]) -> exchange.Pending:
        return exchange.Pending([t.contiguous() for t in tensors], [], [])

    @classmethod
    def gather(cls, group: Any, tensors: Sequence[Tensor]) -> exchange.Pending:
        found = []
        for place, tensor in enumerate(tensors):
            key = place, group.size, tuple(tensor.shape), tensor.dtype
            if key not in cls.rooms:
                cls.rooms[key] = tensor.expand(group.size, *tensor.shape).contiguous()
            found.append(cls.rooms[key])
        return exchange.Pending(found, [], [])


def _become(rank: int, size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    _Nothing.rooms.clear()
    for name in ("shift", "trade", "gather"):
        made = getattr(_Nothing, name)
        setattr(exchange.Exchange, name, lambda self, *given, made=made: made(self, *given))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _seconds(call: Callable[[], object], device: torch.device, repeats: int, count: int) -> float:
    """Return the median seconds of a call, of `count` that follow one another without a wait."""
    call()
    found = []
    for _ in range(repeats):
        _wait(device)
        started = time.perf_counter()
        for _ in range(count):
            call()
        _wait(device)
        found.append((time.perf_counter() - started) / count)
    return statistics.median(found)


def _kernels(call: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return the milliseconds of a call on a GPU by kernel, the longest first."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        _wait(device)
    spent: dict[str, float] = defaultdict(float)
    for event in seen.events():
        spent[event.name[:70]] += event.device_time_total / 1e3
    longest = sorted(spent.items(), key=lambda item: -item[1])[:10]
    return {name: round(ms, 4) for name, ms in longest}


def _measured(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], do: Tensor, repeats: int
) -> dict[str, Any]:
    """Time a function forward and backward, waited for and in a row, and by kernel."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    device = do.device
    o = attend(*leaves)

    def forward() -> object:
        return attend(*leaves)

    def backward() -> object:
        return torch.autograd.grad(o, leaves, do, retain_graph=True)

    row: dict[str, Any] = {}
    if o.shape[:-2].numel() > 1 << 15:
        repeats = min(repeats, 3)
    for name, call in (("forward", forward), ("backward", backward)):
        row[f"{name} s"] = _seconds(call, device, repeats, 1)
        row[f"{name} queued s"] = _seconds(call, device, max(repeats // 2, 1), QUEUED)
        row[f"{name} kernels ms"] = _kernels(call, device)
    return row


def _row(
    method: str, size: int, tokens: int, layout: str, whole: Sequence[Tensor],
    edges: list[int] | None, one: dict[str, Any], repeats: int, rank: int,
) -> dict[str, Any]:  # fmt: skip
    along: dict[str, Any] = {"dim": 0 if edges else 1, "layout": layout, "cu_seqlens": edges}
    parts = [shard_sequence(t, rank, size, **along) for t in whole]
    _become(rank, size)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        function: Any = METHODS[method]
        o: Tensor = function(
            q, k, v, causal=True, layout=layout, cu_seqlens=edges, check=False
        )  # what ranks say of their arguments is an exchange, too
        return o

    row = _measured(attend, parts[:3], parts[3], repeats)
    rates = Rates()
    meta = [t.to("meta") for t in parts[:3]]
    choice = explain(*meta, size=size, causal=True, cu_seqlens=edges, layout=layout, method=method)
    link = choice.sent_bytes[method] / rates.link
    if method == "ring":  # what does not fit beside a step's attention
        steps = size - 1
        link = steps * max(link / max(steps, 1) - choice.compute_s / size, 0.0)
    # A ring's messages travel beside its attention; the others' are waited for.
    late = link + (0.0 if method == "ring" else 2 * rates.message_s)
    row |= {
        "ranks": size, "rank": rank, "tokens a rank": tokens, "method": method, "layout": layout,
        "forward ms": 1e3 * row["forward s"], "of it queued": 1e3 * row["forward queued s"],
        "backward ms": 1e3 * row["backward s"], "backward queued": 1e3 * row["backward queued s"],
        "own x": one["forward s"] / size / row["forward s"],
        "own backward x": one["backward s"] / size / row["backward s"],
        "transfers foreseen ms": 1e3 * late,
        "with transfers x": one["forward s"] / size / (row["forward s"] + late),
    }  # fmt: skip
    return row


def _case(
    tokens: int,
    size: int,
    documents: list[int] | None,
    options: argparse.Namespace,
    device: torch.device,
) -> list[dict[str, Any]]:
    heads, kv_heads = options.heads
    total = tokens * size
    edges = _edges(documents, total) if documents else None
    generator = torch.Generator(device).manual_seed(0)
    whole = [
        torch.randn(1, total, count, options.head_dim, generator=generator, device=device).to(
            getattr(torch, options.dtype)
        )
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    if edges is not None:
        whole = [t[0] for t in whole]
    one = _measured(_on_one(edges, device), whole[:3], whole[3], options.repeats)
    one |= {"ranks": 1, "tokens a rank": total, "method": "one device", "share of": size,
            "forward ms": 1e3 * one["forward s"], "of it queued": 1e3 * one["forward queued s"],
            "backward ms": 1e3 * one["backward s"],
            "backward queued": 1e3 * one["backward queued s"]}  # fmt: skip
    if edges is not None:
        one["pairs"] = sum((b - a) ** 2 for a, b in pairwise(edges)) // 2
    rows = [one]
    layout = "zigzag" if edges is None else choose_layout(edges, size)
    for method in options.methods:
        for rank in sorted({rank % size for rank in options.of}):
            along = method, size, tokens, layout, whole, edges, one, options.repeats
            rows.append(_row(*along, rank))
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--device", choices=("cpu", "cuda"), default=None)
    add("--dtype", default="bfloat16")
    add("--ranks", type=int, nargs="+", default=[2, 4])
    add("--of", type=int, nargs="+", default=[0], metavar="RANK", help="whose share; -1: the last")
    add("--tokens", type=int, nargs="+", default=[8192], help="of each rank (8192)")
    add("--documents", type=int, nargs="+", default=None, help="lengths; a packed case beside")
    add("--heads", type=int, nargs=2, default=[64, 8], metavar=("Q", "KV"))
    add("--head-dim", type=int, default=128)
    add("--methods", nargs="+", choices=tuple(METHODS), default=list(METHODS))
    add("--repeats", type=int, default=7)
    add("--seconds", type=float, default=None, help="no case begins after it")
    add("--json", metavar="FILE", default=None)
    options = parser.parse_args(argv)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    begun, rows = time.monotonic(), []
    document = {
        "version": tilewise.__version__, "device": device_name(device.type),
        "torch": torch.__version__, "dtype": options.dtype, "heads": options.heads,
        "head dim": options.head_dim, "documents": options.documents, "rows": rows,
    }  # fmt: skip
    cases = [(tokens, size, None) for tokens in options.tokens for size in options.ranks]
    if options.documents:
        cases += [(tokens, min(options.ranks), options.documents) for tokens in options.tokens]
    cases.sort(key=lambda case: case[0] * case[1])  # the short ones, before time is over
    for tokens, size, documents in cases:
        if options.seconds is not None and time.monotonic() - begun > options.seconds:
            say(f"{size} ranks of {tokens} tokens: no time was left")
            continue
        found = _case(tokens, size, documents, options, device)
        rows += [row | ({"packed": True} if documents else {}) for row in found]
        for row in found:
            say(json.dumps({k: v for k, v in row.items() if not k.endswith(" s")}))
        if options.json is not None:
            write(document, options.json)
    print(format_table(rows, COLUMNS))
    emit(document, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
