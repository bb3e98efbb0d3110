"""Attention over a sequence that ranks share, beside one device.

Each rank holds the same number of tokens. "x one device" is the time of the whole on one device,
over the ranks' time and their number: 1 would be a perfect split. A result that differs from the
one device's is not timed. torch's own context_parallel gets as many key heads as query heads.
`--documents` packs documents of such lengths, again and again, until the tokens of all ranks are
full; torch's has no such form. Short calls are timed in a row, as layers follow one another.
`--unchecked` leaves out what the ranks say of their arguments, for which a host waits in each call.
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise.bench.report import emit, format_table, positive, say, write
from tilewise.bench.roofline import device_name
from tilewise.distributed import choose_layout, shard_sequence
from tilewise.distributed.choose import METHODS as FUNCTIONS
from tilewise.distributed.environment import worker_environment
from tilewise.distributed.layout import LAYOUTS
from tilewise.ops import attention, attention_varlen

Row = dict[str, Any]
Results = tuple[Tensor, Tensor, Tensor, Tensor]  # o, dq, dk, dv

METHODS = ("ring", "gather", "ulysses", "torch")
COLUMNS = ["ranks", "tokens a rank", "method", "layout", "forward ms", "backward ms",
           "x one device", "backward x", "TFLOP/s a rank", "GiB a rank", "error"]  # fmt: skip
# A rank that waits longer for another one ends, and the others with it: nothing may wait for ever.
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=120)
# Calls in a row are as many as fill so many seconds, and no more than so many.
ROW_S, MOST_IN_A_ROW = 0.03, 8
# Of the root mean square: two results in 16 bits.
LIMIT = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def _time(
    prepare: Callable[[], Any], call: Callable[[Any], object], device: torch.device, repeats: int
) -> float:
    """Return the median seconds of a call, of what is prepared untimed, on the slowest rank.

    Calls follow one another as layers do, as many as fill ROW_S: the host prepares one while the
    device computes another.
    """

    def seconds(count: int) -> float:
        given = [prepare() for _ in range(count)]
        dist.barrier()
        _wait_for(device)
        started = time.perf_counter()
        while given:
            call(given.pop())
        _wait_for(device)
        return (time.perf_counter() - started) / count

    count = min(MOST_IN_A_ROW, math.ceil(ROW_S / _slowest(seconds(1), device)))
    return _slowest(statistics.median(seconds(count) for _ in range(repeats)), device)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, device: torch.device) -> float:
    """Return the time of the slowest rank."""
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest)


def _measured(
    attend: Callable[..., Tensor], inputs: Sequence[Tensor], do: Tensor, repeats: int
) -> tuple[Row, Results]:
    """Time a method forward and backward, and return what it gave."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    device = do.device
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    o = attend(*leaves)
    dq, dk, dv = torch.autograd.grad(o, leaves, do)
    results = o.detach(), dq, dk, dv
    del o, dq, dk, dv
    row: Row = {}
    if device.type == "cuda":
        row["GiB a rank"] = torch.cuda.max_memory_allocated(device) / 2**30
    row["forward s"] = _time(lambda: None, lambda _: attend(*leaves), device, repeats)
    row["backward s"] = _time(
        lambda: attend(*leaves), lambda o: torch.autograd.grad(o, leaves, do), device, repeats
    )
    return row, results


def _torch_ring(stack: ExitStack, whole: Sequence[Tensor]) -> tuple[Any, list[Tensor], Tensor]:
    """Enter torch's context_parallel; return its attention, and what a rank gives it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v, do = whole
    group = q.shape[2] // k.shape[2]
    many = (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2), do)
    buffers = [t.transpose(1, 2).contiguous() for t in many]
    mesh = init_device_mesh(q.device.type, (dist.get_world_size(),))
    if q.device.type == "cuda":
        stack.enter_context(sdpa_kernel(SDPBackend.FLASH_ATTENTION))
    else:
        from tilewise.integrations.torch_flash import register

        stack.enter_context(register(("cpu",)))  # torch's own operator of a CPU has no ring
    stack.enter_context(
        context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers)
        )
    )

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend, buffers[:3], buffers[3]


def _results(tensors: Iterable[Tensor]) -> Results:
    o, dq, dk, dv = tensors
    return o, dq, dk, dv


def _difference(results: Results, wanted: Results) -> str | None:
    for name, got, want in zip(("o", "dq", "dk", "dv"), results, wanted, strict=True):
        off = (got.float() - want.float()).square().mean().sqrt()
        share = float(off / want.float().square().mean().sqrt())
        if not share <= LIMIT[want.dtype]:
            return f"{name} must equal one device's, got {share:.1e} of it off"
    return None


def _work(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Measure on one rank; the first writes the rows."""
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=options.ranks,
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    dtype = getattr(torch, options.dtype)
    rows: list[Row] = []
    for tokens in options.tokens:
        known: list[tuple[Row, Results]] = []  # what one device took and gave, once measured
        for method in options.methods:
            row: Row = {"ranks": options.ranks, "tokens a rank": tokens, "method": method}
            if _is_over(options, device):
                rows.append(row | {"error": "not measured: no time was left"})
                continue
            try:
                rows.append(row | _row(method, tokens, device, dtype, options, known))
            except Exception as error:  # what all ranks raise; one alone lets the others time out
                rows.append(row | {"error": f"{type(error).__name__}: {error}"})
            if rank == 0:
                say(", ".join(f"{name} {value}" for name, value in rows[-1].items()))
                Path(folder, "rows.json").write_text(json.dumps(rows))
                if options.json is not None:
                    write(_document(options, rows), options.json)
    if rank == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def _is_over(options: argparse.Namespace, device: torch.device) -> bool:
    """Whether the seconds are used up, as the first rank sees it."""
    if options.seconds is None:
        return False
    over = torch.tensor([float(time.time() >= options.begun + options.seconds)], device=device)
    dist.broadcast(over, 0)
    return bool(over.item())


def _document(options: argparse.Namespace, rows: list[Row]) -> dict[str, Any]:
    return {
        "version": tilewise.__version__, "device": device_name(options.device),
        "torch": torch.__version__, "dtype": options.dtype, "heads": options.heads,
        "head dim": options.head_dim, "documents": options.documents,
        "checked": not options.unchecked, "rows": rows,
    }  # fmt: skip


def _edges(lengths: Sequence[int], total: int) -> list[int]:
    """Return where documents of these lengths, again and again, begin and end in so many tokens."""
    edges = [0]
    for length in cycle(lengths):
        if edges[-1] == total:
            return edges
        edges.append(min(edges[-1] + length, total))
    return edges


def _on_one(edges: list[int] | None, device: torch.device) -> Callable[..., Tensor]:
    """Return causal attention over the whole on one device."""
    if edges is None:
        return partial(attention, causal=True)
    longest = max(b - a for a, b in pairwise(edges))
    cu_seqlens = torch.tensor(edges, dtype=torch.int32, device=device)
    return partial(
        attention_varlen, causal=True, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens,
        max_seqlen_q=longest, max_seqlen_k=longest,
    )  # fmt: skip


def _row(
    method: str, tokens: int, device: torch.device, dtype: torch.dtype,
    options: argparse.Namespace, known: list[tuple[Row, Results]],
) -> Row:  # fmt: skip
    heads, kv_heads = options.heads
    dim, size, rank = options.head_dim, options.ranks, dist.get_rank()
    total = tokens * size
    edges = _edges(options.documents, total) if options.documents else None
    if edges is not None and method == "torch":
        return {"error": "torch's context_parallel has no packed documents"}
    layout = "zigzag"
    if edges is not None:
        layout = choose_layout(edges, size) if options.layout == "auto" else options.layout
    generator = torch.Generator(device).manual_seed(0)
    whole = [
        torch.randn(1, total, count, dim, generator=generator, device=device).to(dtype)
        for count in (heads, kv_heads, kv_heads, heads)
    ]
    if edges is not None:
        whole = [t[0] for t in whole]
    along: dict[str, Any] = {"dim": 0 if edges else 1, "layout": layout, "cu_seqlens": edges}
    parts = [shard_sequence(t, rank, size, **along) for t in whole]
    wanted: Results | None = None
    one: Row = {}
    if total <= options.most_on_one:
        if not known:
            one, results = _measured(_on_one(edges, device), whole[:3], whole[3], options.repeats)
            known.append((one, _results(shard_sequence(t, rank, size, **along) for t in results)))
            del results
        one, wanted = known[0]
    with ExitStack() as stack:
        if method == "torch":
            attend, inputs, do = _torch_ring(stack, whole)
        else:
            function: Any = FUNCTIONS[method]
            inputs, do = parts[:3], parts[3]

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                o: Tensor = function(
                    q, k, v, causal=True, layout=layout, cu_seqlens=edges,
                    check=not options.unchecked,
                )  # fmt: skip
                return o

        del whole, parts
        row, found = _measured(attend, inputs, do, options.repeats)
    pairs = sum((b - a) ** 2 for a, b in pairwise(edges or (0, total)))
    flops = 2 * pairs * heads * dim / size
    row |= {"layout": layout} if edges is not None else {}
    row |= {"forward ms": 1e3 * row["forward s"], "backward ms": 1e3 * row["backward s"]}
    row["TFLOP/s a rank"] = flops / row["forward s"] / 1e12
    if wanted is None:
        return row  # too large for one device: nothing to compare with
    if method == "torch":
        o, dq, dk, dv = (t.transpose(1, 2) for t in found)
        dk, dv = (t.unflatten(2, (kv_heads, -1)).sum(3) for t in (dk, dv))
        found = (o, dq, dk, dv)
    wrong = _difference(found, wanted)
    if wrong is not None:
        return {"error": wrong}
    row["x one device"] = one["forward s"] / (size * row["forward s"])
    row["backward x"] = one["backward s"] / (size * row["backward s"])
    return row


def _length(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"documents must be at least 1, got {value}")
    return value


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    parser = argparse.ArgumentParser(prog="lab/context.py", description=__doc__)
    add = parser.add_argument
    add("--ranks", type=positive, default=2, help="processes, each with a GPU of its own (2)")
    add("--device", choices=("cpu", "cuda"), default=None, help="default: cuda if any")
    add("--dtype", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    add("--tokens", type=positive, nargs="+", default=[8192], help="of each rank (8192)")
    add("--heads", type=positive, nargs=2, default=[64, 8], metavar=("Q", "KV"), help="(64 8)")
    add("--head-dim", type=positive, default=128)
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    add(
        "--documents", type=_length, nargs="+", default=None, metavar="N",
        help="lengths of packed documents; default: one sequence",
    )  # fmt: skip
    add("--layout", choices=("auto", *LAYOUTS), default="auto", help="of packed documents (auto)")
    add("--unchecked", action="store_true", help="the ranks do not compare arguments")
    add("--repeats", type=positive, default=5)
    add(
        "--most-on-one",
        type=int,
        default=1 << 19,
        help="tokens up to which one device computes the whole beside it (524288)",
    )
    add("--json", metavar="FILE", default=None, help="also write the rows here, as they come")
    add(
        "--seconds",
        type=float,
        default=None,
        metavar="S",
        help="no row begins after it; those that were measured stay",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    command = parser()
    options = command.parse_args(argv)
    options.device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        command.error(f"--ranks must be at most the GPUs, got {options.ranks}")
    os.environ.update(worker_environment())
    options.begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # type: ignore[attr-defined, no-untyped-call]
            _work, (options, folder), nprocs=options.ranks
        )
        rows = json.loads(Path(folder, "rows.json").read_text())
    document = _document(options, rows)
    print(f"{document['device']}, torch {torch.__version__}, {options.dtype}, causal")
    print(format_table(rows, [c for c in COLUMNS if any(c in row for row in rows)]))
    emit(document, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
