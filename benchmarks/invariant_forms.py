"""What batch invariance costs a model, product by product and step by step, in forms of tiles.

    python benchmarks/invariant_forms.py --json F [--shape qwen3-0.6b] [--seconds 105]

Four stages, each written to F when it ends:

    bits       of every tile that `tiles.invariant_many` knows for each weight of Qwen3-0.6B and
               Llama-3-8B: 1 to 300 rows and three larger numbers, against one tile
    products   of the shape's layer, at 256 rows of its head, too: every tile in turns with cuBLAS,
               in graphs over copies of the weight; what has parts with the norm that reads it
    attention  of 256 sequences that decode: forms of the split kernel, their bits against the rows
               kernel's and their times
    steps      the prompt of one and 256 rows that decode, as the engine runs them: without
               invariance, with it as the gates are ("today"), and with all of them open ("new")

Processes of their own compile beforehand. "new" takes a form of attention only where its bits are
equal and it is faster. Exit status 1: bits differ.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.linear_rows import prepare_compiling
from benchmarks.on_shape import machine
from tilewise import ops
from tilewise.kernels import device
from tilewise.kernels.gluon.step import invariant_linear as hopper
from tilewise.kernels.gluon.step import linear as few_rows
from tilewise.kernels.plan import Call
from tilewise.kernels.spec import PagedSpec, PagedTensors
from tilewise.kernels.tiles import invariant_many, linear_rows
from tilewise.kernels.tiles import paged as paged_tiles
from tilewise.kernels.triton.paged import plan as paged_plan
from tilewise.ops import plans

WEIGHTS = {  # (outputs, channels) of qkv, o, gate and up, down
    "qwen3-0.6b": ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)),
    "llama-3-8b": ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),
}
HEADS_OF = {"qwen3-0.6b": (151_936, 1024), "llama-3-8b": (128_256, 4096)}
ROWS = (256, 1024, 128, 512)
BITS_ROWS = 300
MORE_ROWS = (512, 777, 1024)
GATES = {"MOST_IN_TILES": 512, "MOST_LEFT": 256, "BY_BUSIEST": True}
CROWDS: tuple[tuple[int, int, int] | None, ...] = (None, (64, 4, 2), (16, 1, 2), (16, 1, 3))
HEADS, KEY_HEADS, D, BLOCK = 16, 8, 128, 16
COPIES_BYTES = 150 << 20
SIZES = {"bits_seqs": 512, "longest": 3000, "rows": 256, "context": 128, "prompt": 1024}
WHERE = "cuda"
Product = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def gates(**paged: Any) -> Iterator[None]:
    """Open the gates of products, and those of attention as given; plans are made anew."""
    changes = [(invariant_many, GATES), (paged_tiles, paged)]
    kept = [(m, n, getattr(m, n)) for m, values in changes for n in values]
    for module, values in changes:
        for name, value in values.items():
            setattr(module, name, value)
    plans._known.clear()
    plans._plans.clear()
    try:
        yield
    finally:
        for module, name, value in kept:
            setattr(module, name, value)
        plans._known.clear()
        plans._plans.clear()


def products_of(rows: int, outputs: int, channels: int) -> dict[str, Product]:
    """Return the ways to compute a product with the same bits, by name."""
    found: dict[str, Product] = {}
    plain = linear_rows.tile_of(outputs, channels)
    if rows <= linear_rows.most_rows(plain):
        found["few"] = lambda x, w: few_rows.launch(x, w, None)
    for form in invariant_many.row_candidates(outputs, channels, rows):
        name = f"rows {form.tile_n}x{form.rows}x{form.ctas}"
        found[name] = lambda x, w, t=form: few_rows.launch(x, w, None, t)
    for tile in invariant_many.candidates(linear_rows.parts_of(plain, channels) > 1):
        name = f"many {tile.tile_m}x{tile.tile_n}x{tile.ctas}"
        found[name] = lambda x, w, t=tile: hopper.launch_many(x, w, None, t)
    return found


def parts_of(rows: int, outputs: int, channels: int) -> dict[str, Product]:
    """Return the ways to leave the parts of a product."""
    found: dict[str, Product] = {}
    plain = linear_rows.tile_of(outputs, channels)
    if linear_rows.parts_of(plain, channels) == 1:
        return found
    if rows <= linear_rows.most_rows(plain):
        found["left few"] = lambda x, w: few_rows.launch_parts(x, w, plain)
    for form in invariant_many.row_candidates(outputs, channels, rows):
        name = f"left {form.tile_n}x{form.rows}x{form.ctas}"
        found[name] = lambda x, w, t=form: few_rows.launch_parts(x, w, t)
    return found


def chosen_of(rows: int, outputs: int, channels: int) -> str:
    """Name what an engine takes now, as `products_of` and `parts_of` do."""
    plain = linear_rows.tile_of(outputs, channels)
    has_parts = linear_rows.parts_of(plain, channels) > 1
    if has_parts and rows <= max(ops.MOST_LINEAR_ROWS, invariant_many.MOST_LEFT):
        form = invariant_many.cut(rows, outputs, channels, leaves=True)
        return "left few" if form is None else f"left {form.tile_n}x{form.rows}x{form.ctas}"
    form = invariant_many.cut(rows, outputs, channels)
    if form is not None:
        return f"rows {form.tile_n}x{form.rows}x{form.ctas}"
    tile = invariant_many.many_tile(rows, outputs, channels, has_parts)
    return "few" if tile is None else f"many {tile.tile_m}x{tile.tile_n}x{tile.ctas}"


# --- compiling, by processes that need no GPU


def _prepare() -> None:
    prepare_compiling()
    device.arch_of = lambda _: 90  # type: ignore[assignment]
    device.sm_count_of = lambda _: 132  # type: ignore[assignment]


def _compile(job: tuple[Any, ...]) -> str | None:
    try:
        if job[0] == "attention":
            _compile_attention(*job[1:])
        else:
            kind, rows, outputs, channels, name = job
            x, w = (
                torch.empty(shape, dtype=torch.bfloat16, device="meta")
                for shape in ((rows, channels), (outputs, channels))
            )
            (products_of if kind == "whole" else parts_of)(rows, outputs, channels)[name](x, w)
    except Exception as error:
        return f"{job}: {type(error).__name__}: {str(error)[-300:]}"
    return None


def _compile_attention(run: int, crowd: tuple[int, int, int] | None, invariant: bool) -> None:
    paged_tiles.INVARIANT_CROWD = crowd
    spec, given = attention_call(SIZES["rows"], 16 * 64, "meta", run=run, invariant=invariant)
    records = torch.empty(max(1, paged_plan.plan_pairs(spec, given.q.device)), 8,
                          dtype=torch.int32, device="meta")  # fmt: skip
    given = given._replace(records=records if run == 1 else None)
    paged_plan.made_fwd(Call.of(spec, given)).run(*given)


def compile_all(workers: int, stages: Sequence[str], shapes: Sequence[str]) -> list[str]:
    """Compile what stages before the steps need; return what went wrong."""
    jobs: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for shape in shapes if {"bits", "products"} & set(stages) else ():
        for outputs, channels in (*WEIGHTS[shape], HEADS_OF[shape]):
            for rows in (*linear_rows.ROW_TILES, 192, BITS_ROWS, *MORE_ROWS, *ROWS):
                for kind, ways in (("whole", products_of), ("parts", parts_of)):
                    for name in ways(rows, outputs, channels):
                        plain = linear_rows.tile_of(outputs, channels)
                        parts = linear_rows.parts_of(plain, channels)
                        padded = linear_rows.row_tile(rows) if name.endswith("few") else 0
                        key = kind, name, parts, channels, padded
                        jobs.setdefault(key, (kind, rows, outputs, channels, name))
    if "attention" in stages:
        jobs |= {("a", crowd): ("attention", 1, crowd, True) for crowd in CROWDS}
        jobs |= {("b", run): ("attention", run, None, run > 1) for run in (1, 3)}
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, _prepare) as pool:
        return [wrong for wrong in pool.imap_unordered(_compile, jobs.values()) if wrong]


# --- bits


def bits(shapes: Sequence[str]) -> dict[str, Any]:
    """Compare every tile of every weight with the first one of many rows."""
    compared, differ = 0, []
    torch.manual_seed(0)
    weights = [w for shape in shapes for w in WEIGHTS[shape]]
    for outputs, channels in (*weights, HEADS_OF["qwen3-0.6b"]):
        has_parts = linear_rows.parts_of(linear_rows.tile_of(outputs, channels), channels) > 1
        first = invariant_many.candidates(has_parts)[0]
        x, weight = (
            torch.randn(size, device="cuda", dtype=torch.bfloat16)
            for size in ((max(MORE_ROWS), channels), (outputs, channels))
        )
        wanted = hopper.launch_many(x, weight, None, first)
        scale = wanted.float().abs().max()
        if float((wanted.float() - F.linear(x, weight).float()).abs().max() / scale) > 0.02:
            differ.append(f"{channels} -> {outputs}: far from cuBLAS's")
        is_large = outputs * channels > 1 << 25
        wanted = wanted.view(torch.int16)
        wrong: dict[str, Tensor] = {}
        for rows in (*range(1, BITS_ROWS + 1, 7 if is_large else 1), *MORE_ROWS):
            at = (37 * rows) % (len(x) - rows + 1)  # not always the same rows
            some, its = x[at : at + rows], wanted[at : at + rows]
            ways = products_of(rows, outputs, channels)
            for name, way in parts_of(rows, outputs, channels).items():
                ways[name] = lambda x, w, f=way: _added(f(x, w))
            for name, way in ways.items():
                found = (way(some, weight).view(torch.int16) != its).any().to(torch.int32)
                wrong[name] = wrong[name] + found if name in wrong else found
                compared += 1
        differ += [f"{channels} -> {outputs}: {n}, {int(c)}" for n, c in wrong.items() if int(c)]
    return {"compared": compared, "differ": differ}


def _added(parts: Tensor) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total.to(torch.bfloat16)


# --- times


def in_turns(graphs: dict[str, tuple[torch.cuda.CUDAGraph, int]], turns: int = 7) -> dict[str, Any]:
    """Return microseconds of a call in each graph, the medians of turns."""
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(turns):
        for name, (graph, count) in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            found[name].append(1e3 * begin.elapsed_time(end) / count)
    return {name: round(statistics.median(times[1:]), 2) for name, times in found.items()}


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of what was run once before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def time_product(rows: int, outputs: int, channels: int) -> dict[str, Any]:
    """Time every way of a product in turns; where it has parts, with the norm after it."""
    few_rows.forget_counters()  # the graphs before are gone
    count = max(2, min(20, COPIES_BYTES // (2 * outputs * channels)))
    weights = [
        torch.randn(outputs, channels, device="cuda", dtype=torch.bfloat16) for _ in range(count)
    ]
    x = torch.randn(rows, channels, device="cuda", dtype=torch.bfloat16)
    residual = torch.randn(rows, outputs, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones(outputs, device="cuda", dtype=torch.bfloat16)
    left = parts_of(rows, outputs, channels)

    def whole(way: Product) -> None:
        for w in weights:
            y = way(x, w)
            if left:
                ops.add_rms_norm(y, residual, scale, 1e-6)

    def leaving(way: Product) -> None:
        for w in weights:
            ops.add_parts_rms_norm(way(x, w), residual, scale, 1e-6)

    ways = {"cublas": F.linear, **products_of(rows, outputs, channels)}
    graphs = {name: (captured(functools.partial(whole, way)), count) for name, way in ways.items()}
    if rows <= GATES["MOST_LEFT"]:
        for name, way in left.items():
            graphs[name] = captured(functools.partial(leaving, way)), count
    times = in_turns(graphs)
    row: dict[str, Any] = {"rows": rows, "outputs": outputs, "channels": channels}
    row["today"] = chosen_of(rows, outputs, channels)
    with gates():
        row["new"] = chosen_of(rows, outputs, channels)
    row["best"] = min((t, n) for n, t in times.items() if n != "cublas")[1]
    return {**row, "with norm": bool(left), "us": times}


def products(shape: str, deadline: float) -> list[dict[str, Any]]:
    """Time every way of every product of a layer."""
    found = []
    for rows in ROWS:
        sums: dict[str, float] = defaultdict(float)
        for outputs, channels in (*WEIGHTS[shape], HEADS_OF[shape])[: 5 if rows == 256 else 4]:
            if time.monotonic() > deadline:
                return found
            row = time_product(rows, outputs, channels)
            found.append(row)
            said = [f"cublas {row['us']['cublas']}"]
            sums["cublas"] += row["us"]["cublas"]
            for name in ("today", "new", "best"):
                sums[name] += row["us"][row[name]]
                said.append(f"{name} {row[name]} {row['us'][row[name]]}")
            print(f"{shape} {rows} x {channels} -> {outputs}: {', '.join(said)}", flush=True)
        line = {name: round(value, 1) for name, value in sums.items()}
        print(f"{shape} {rows}, all of them: {line}", flush=True)
        found.append({"rows": rows, "all": line})
    return found


def attention_call(
    num_seqs: int, longest: int, where: str, *, run: int, invariant: bool
) -> tuple[PagedSpec, PagedTensors]:
    """Return a call over `num_seqs` sequences of at most `longest` tokens, `run` of them new."""
    blocks = -(-longest // BLOCK)
    torch.manual_seed(1)
    shape = (4096, BLOCK, KEY_HEADS, D)
    k, v = (torch.randn(shape, device=where, dtype=torch.bfloat16) for _ in range(2))
    if num_seqs * blocks <= shape[0]:  # blocks of their own: nothing is found in the L2 cache
        table = torch.randperm(shape[0], device=where)[: num_seqs * blocks].view(num_seqs, blocks)
    else:
        table = torch.randint(shape[0], (num_seqs, blocks), device=where)
    q = torch.randn(num_seqs, 3, HEADS, D, device=where, dtype=torch.bfloat16)
    lengths = torch.randint(3, longest + 1, (num_seqs,), device=where, dtype=torch.int32)
    given = PagedTensors(
        q[:, 3 - run :].reshape(num_seqs * run, HEADS, D).clone(), k, v, table.to(torch.int32),
        lengths, torch.arange(num_seqs + 1, device=where, dtype=torch.int32) * run,
    )  # fmt: skip
    spec = PagedSpec(
        "cuda", torch.bfloat16, torch.bfloat16, num_seqs, num_seqs * run, run, HEADS, KEY_HEADS,
        D, D, BLOCK, blocks, softmax_scale=D**-0.5, batch_invariant=invariant,
    )  # fmt: skip
    return spec, given


def planned(spec: PagedSpec, given: PagedTensors) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return the call, with a plan as a step makes it where its kernels take one."""
    pairs = paged_plan.plan_pairs(spec, given.q.device)
    if pairs and spec.max_seqlen_q == 1:
        records = torch.zeros(pairs, 8, dtype=torch.int32, device=given.q.device)
        paged_plan.fill_plan(records, spec, given.seqlens_k, given.cu_seqlens_q)
        given = given._replace(records=records)
    plan = paged_plan.made_fwd(Call.of(spec, given))
    return lambda: plan.run(*given)  # type: ignore[return-value]


def attention() -> dict[str, Any]:
    """Compare forms of decoding with runs of three tokens, then time them."""
    found: dict[str, Any] = {"differ": {}, "us": {}}
    spec, given = attention_call(
        SIZES["bits_seqs"], SIZES["longest"], "cuda", run=3, invariant=True
    )
    wanted = planned(spec, given)()[0].view(-1, 3, HEADS * D)[:, 2].view(torch.int16)
    for crowd in CROWDS:
        with gates(INVARIANT_CROWD=crowd):
            spec, given = attention_call(
                SIZES["bits_seqs"], SIZES["longest"], "cuda", run=1, invariant=True
            )
            o = planned(spec, given)()[0].view(-1, HEADS * D).view(torch.int16)
            found["differ"][str(crowd)] = int((o != wanted).any(1).sum())
    for context in (160, 1024):
        rows = SIZES["rows"] if context < 1000 else 64
        graphs, kept = {}, []  # a graph reads the tensors of its calls: they must live on
        for crowd, invariant in ((None, False), *((crowd, True) for crowd in CROWDS)):
            with gates(INVARIANT_CROWD=crowd):
                spec, given = attention_call(rows, context, "cuda", run=1, invariant=invariant)
                given.seqlens_k.fill_(context)
                calls = [planned(spec, given)]
                for _ in range(5):  # caches of other layers
                    other = given._replace(
                        k_cache=given.k_cache.clone(), v_cache=given.v_cache.clone()
                    )
                    calls.append(planned(spec, other))
                kept.append(calls)
                graph = captured(lambda calls=calls: [call() for call in calls])
                graphs["plain" if not invariant else str(crowd)] = (graph, len(calls))
        found["us"][f"{rows} x {context}"] = in_turns(graphs)
        del graphs, kept
        torch.cuda.empty_cache()
    print(f"attention: sequences that differ {found['differ']}, us {found['us']}", flush=True)
    return found


# --- steps


class Steps:
    """The runner of one way, its captured decode step and its prompt of one."""

    def __init__(self, model: Any, cache: Any, invariant: bool, changes: dict[str, Any] | None):
        from tilewise.engine.captured.runner import DeviceRunner

        self.runner = DeviceRunner(
            model, cache, max_num_seqs=SIZES["rows"], max_model_len=SIZES["prompt"] + 64,
            max_num_batched_tokens=SIZES["prompt"], batch_invariant=invariant,
        )  # fmt: skip
        self.runner.captures = torch.cuda.is_available()
        self.changes = changes
        self._plans: tuple[dict[Any, Any], dict[Any, Any]] = ({}, {})
        self.kernels: dict[str, Any] = {}

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the package be as this way has it, with plans of its own."""
        kept = []
        if self.changes is not None:
            for module, values in ((invariant_many, GATES), (paged_tiles, self.changes)):
                for name, value in values.items():
                    kept.append((module, name, getattr(module, name)))
                    setattr(module, name, value)
        plans._known, plans._plans, before = *self._plans, (plans._known, plans._plans)
        try:
            yield
        finally:
            plans._known, plans._plans = before
            for module, name, value in kept:
                setattr(module, name, value)

    def prompt(self) -> float:
        """Return the seconds of one prompt, from submitting it to its token."""
        from tilewise.engine.batch import Batch, ScheduledSequence
        from tilewise.engine.request import SamplingParams

        count = SIZES["prompt"]
        tokens = tuple((7 * j) % 400 + 3 for j in range(count))
        sequence = ScheduledSequence(
            seq_id=10_000, token_ids=tokens, start=0, block_ids=range(-(-count // BLOCK)),
            num_samples=1, sampling=SamplingParams(temperature=0.0), seeds=(0,),
        )  # fmt: skip
        self.runner.reset()
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.runner.submit(Batch((sequence,))).result()
        return time.perf_counter() - began

    def decode(self, steps: int = 12) -> float:
        """Return the seconds of a captured step of all rows, from context on."""
        from benchmarks.profile_decode import decoding

        rows, context = SIZES["rows"], SIZES["context"]
        self.runner.reset()
        self.runner.submit(decoding(rows, context, 64, 0)).result()
        step, state = self.runner.step_of(rows), self.runner.rows
        state.position[:rows].fill_(context - 1)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        step.run()
        begin.record()
        for _ in range(steps):
            step.run()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / steps

    def look(self, folder: Path) -> None:
        """Sum the kernels of a prompt and of a step by name."""
        from benchmarks.profile_decode import slices, traced

        for name, run in (("prompt", self.prompt), ("decode", lambda: self.decode(1))):
            sums: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
            for kernel in slices(traced(run, folder)):
                each = sums[kernel.name[:60]]
                each[0] += 1
                each[1] += kernel.own
            most = sorted(sums.items(), key=lambda item: -item[1][1])[:12]
            self.kernels[name] = {
                "kernels": sum(int(count) for count, _ in sums.values()),
                "us": round(sum(us for _, us in sums.values())),
                "most": {kind: [int(count), round(us)] for kind, (count, us) in most},
            }


def models_of(shape: str, folder: Path, layers: int | None = None) -> tuple[Any, Any, Any]:
    """Return a model of a shape, one with invariant products, and a cache for both."""
    from benchmarks.profile_decode import fill
    from tilewise.bench.engines.shapes import model_directory
    from tilewise.cache.storage import KVStorage
    from tilewise.engine.settings import cache_spec
    from tilewise.models import load_model
    from tilewise.nn.invariant import use_invariant_linears

    directory, _ = model_directory(shape, folder)
    if layers is not None:
        config = json.loads((directory / "config.json").read_text())
        config |= {"num_hidden_layers": layers, "max_window_layers": layers, "layer_types": None}
        directory = folder / "fewer"
        directory.mkdir()
        (directory / "config.json").write_text(json.dumps(config))
    where, longest = torch.device(WHERE), SIZES["prompt"] + 64
    plain, invariant = (
        load_model(directory, dtype="bfloat16", device=where, random_weights=True) for _ in range(2)
    )
    use_invariant_linears(invariant)
    spec = cache_spec(plain.config, BLOCK, torch.bfloat16, longest)
    blocks = max(-(-longest // BLOCK), SIZES["rows"] * -(-(SIZES["context"] + 64) // BLOCK))
    cache = KVStorage(spec, blocks, where)
    fill(cache)
    return plain, invariant, cache


def warm(shape: str) -> None:
    """Compile what steps need, over a model of one layer."""
    with tempfile.TemporaryDirectory() as folder:
        plain, invariant, cache = models_of(shape, Path(folder), layers=1)
        ways = [Steps(plain, cache, False, None), Steps(invariant, cache, True, None)]
        for crowd in CROWDS:
            paged = {"SKIPS_SPLITS": True, "INVARIANT_CROWD": crowd}
            ways.append(Steps(invariant, cache, True, paged))
        for way in ways:
            with way.active():
                way.prompt()
                way.decode(1)


def steps(shape: str, paged: dict[str, Any], deadline: float) -> dict[str, Any]:
    """Run the prompt of one and the decode step without invariance, today's and the new one."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain, invariant, cache = models_of(shape, Path(folder))
        ways = {
            "without": Steps(plain, cache, False, None),
            "today": Steps(invariant, cache, True, None),
            "new": Steps(invariant, cache, True, paged),
        }
        times: dict[str, dict[str, list[float]]] = {}
        for turn in range(9):
            if turn > 2 and time.monotonic() > deadline:
                break
            for name, way in ways.items():
                with way.active():
                    for kind in ("prompt", "decode"):
                        taken = getattr(way, kind)()
                        if turn:
                            times.setdefault(kind, {}).setdefault(name, []).append(taken)
        for kind, by_way in times.items():
            medians = {name: statistics.median(taken) for name, taken in by_way.items()}
            row: dict[str, Any] = {"turns": len(by_way["without"])}
            for name, taken in medians.items():
                row[f"{name} us"] = round(1e6 * taken)
                if name != "without":
                    row[f"{name} cost"] = round(taken / medians["without"] - 1, 3)
            found[kind] = row
            print(f"{shape} {kind}: {row}", flush=True)
        for name, way in ways.items():
            if time.monotonic() < deadline + 8:
                with way.active():
                    way.look(Path(folder))
                found[f"kernels {name}"] = way.kernels
                print(f"{name}: {json.dumps(way.kernels)}", flush=True)
    return found


def main() -> int:
    """Run the stages, writing the JSON after each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b", choices=tuple(WEIGHTS))
    parser.add_argument("--only", nargs="+", default=("bits", "products", "attention", "steps"))
    parser.add_argument("--seconds", type=float, default=105)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--json", default="invariant_forms.json")
    parser.add_argument("--warm", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.warm:
        warm(args.shape)
        return 0
    began = time.monotonic()
    result: dict[str, Any] = {"benchmark": "invariant forms", "shape": args.shape}
    result |= {**machine("cuda"), "open": GATES, "seconds": {}}

    def keep(name: str, value: Any) -> None:
        result[name] = value
        result["seconds"][name] = round(time.monotonic() - began, 1)
        Path(args.json).write_text(json.dumps(result) + "\n", encoding="utf-8")

    shapes, warming = list(WEIGHTS), None
    if "steps" in args.only:
        warming = subprocess.Popen([sys.executable, __file__, "--warm", "--shape", args.shape])
    keep("not compiled", compile_all(args.workers, args.only, shapes))
    print(f"compiled in {result['seconds']['not compiled']} s, not: {result['not compiled']}")
    if "bits" in args.only:
        keep("bits", bits(shapes))
        print(f"bits: {result['bits']}, at {result['seconds']['bits']} s", flush=True)
    if warming is not None:
        keep("warmed", warming.wait())  # before anything is timed
    crowd: tuple[int, int, int] | None = None
    if "attention" in args.only:
        keep("attention", attention())
        us = result["attention"]["us"][f"{SIZES['rows']} x 160"]
        equal = [c for c in CROWDS if result["attention"]["differ"][str(c)] == 0]
        crowd = min(equal, key=lambda c: us[str(c)], default=None)
    if "products" in args.only:
        keep("products", products(args.shape, began + 0.62 * args.seconds))
    if "steps" in args.only:
        paged = {"SKIPS_SPLITS": True, "INVARIANT_CROWD": crowd}
        keep("steps", {**paged, **steps(args.shape, paged, began + args.seconds - 14)})
    differ = result.get("bits", {}).get("differ") or []
    differ = differ or [c for c, n in result.get("attention", {}).get("differ", {}).items()
                        if n and c == "None"]  # fmt: skip
    print(f"seconds {result['seconds']}")
    print(f"BITS DIFFER: {differ}" if differ else "all bits equal")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
