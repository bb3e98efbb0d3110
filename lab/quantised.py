"""Products with quantised weights on a GPU, beside bfloat16 ones and the read of their bytes.

    python lab/quantised.py --json FILE [--models llama-3-8b] [--weights int4 fp8] [--rows 1 16 256]

"chain": the four products of a layer, one after another, each of the rows that the one before gave,
over layers that are together several times the L2 cache, in one captured step whose kernels begin
early as an engine's do. "product": one of them alone, over copies of its weight. A row's percentage
is that of a read of the bytes of codes and scales at 4.4 TB/s; results are checked against float64
of the values first. Forms take turns, and the host is ahead of the device.

    --once runs each form once, which compiles it; --forms other tiles: for up to 16 rows "4,4"
    (parts, CTAs of a multiprocessor) and "stream16,2" (warps, blocks of each), "128,4,1" for more
    (outputs of a CTA, parts, CTAs), "own" the table's, "natural" codes in the order of columns;
    --modes when kernels begin, see `MODES`
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise.kernels import early
from tilewise.kernels.gluon.quantised import linear
from tilewise.kernels.host.memory import launches
from tilewise.kernels.quantised_weight import E2M1, QuantisedWeight
from tilewise.kernels.tiles.quantised_rows import FewTile, RingTile, StreamTile
from tilewise.testing import budget_violation

Tile = RingTile | FewTile | StreamTile
ROOF = 4.4e12  # bytes a second
MODELS = {  # outputs, channels
    "llama-3-8b": {
        "qkv": (6144, 4096), "o": (4096, 4096), "up": (28672, 4096), "down": (4096, 14336),
    },
    "qwen3-0.6b": {
        "qkv": (4096, 1024), "o": (1024, 2048), "up": (6144, 1024), "down": (1024, 3072),
    },
}  # fmt: skip
LAYERS_BYTES = 200 << 20  # of the layers of a chain, and of the copies of a product
AHEAD = 4_000_000  # cycles that the device sleeps before what is timed
REPEATS = 4
MODES = {
    "late": None, "early": early.CHOSEN, "early-large": early.CHOSEN_LARGE,
}  # fmt: skip


def random_weight(kind: str, outputs: int, channels: int, place: str) -> QuantisedWeight | Tensor:
    """Return a weight whose values are some tenths."""

    def draw(low: int, high: int, *size: int, dtype: torch.dtype = torch.uint8) -> Tensor:
        return torch.randint(low, high, size, device=place, dtype=torch.int32).to(dtype)

    def packed() -> Tensor:
        return torch.randint(0, 256, (outputs, channels // 2), device=place, dtype=torch.uint8)

    def scales(group: int, dtype: torch.dtype = torch.float16) -> Tensor:
        shape = (outputs, channels // group)
        return (0.005 + 0.01 * torch.rand(shape, device=place)).to(dtype)

    if kind == "bf16":
        return torch.randn(outputs, channels, device=place, dtype=torch.bfloat16) * 0.05
    if kind == "int4":
        zeros = draw(0, 16, outputs, channels // 128)
        return QuantisedWeight(packed(), scales(128), (1, 128), zeros=zeros)
    if kind == "mxfp4":
        exponents = draw(118, 122, outputs, channels // 32).view(torch.float8_e8m0fnu)
        return QuantisedWeight(packed(), exponents, (1, 32), table=E2M1)
    if kind == "nf4":
        table = tuple(torch.linspace(-1, 1, 16).tolist())
        return QuantisedWeight(packed(), scales(64, torch.float32), (1, 64), table=table)
    if kind == "kq":
        small = draw(1, 64, outputs, channels // 32)
        less = draw(1, 64, outputs, channels // 32)
        outer = scales(256) / 64
        return QuantisedWeight(
            packed(), small, (1, 32), minimums=less, outer=outer, outer_minimums=outer * 7,
            outer_block=(1, 256),
        )  # fmt: skip
    if kind == "int8":
        codes = draw(-127, 128, outputs, channels, dtype=torch.int8)
        return QuantisedWeight(codes, scales(channels) / 20, (1, channels))
    codes = torch.randn(outputs, channels, device=place).to(torch.float8_e4m3fn)
    blocks = 0.05 + 0.05 * torch.rand(-(-outputs // 128), -(-channels // 128), device=place)
    return QuantisedWeight(codes, blocks, (128, 128))


def product(weight: QuantisedWeight | Tensor, tile: Tile | None) -> Callable[[Tensor], Tensor]:
    """Return x -> y."""
    if isinstance(weight, Tensor):
        return lambda x: F.linear(x, weight)
    return lambda x: linear.launch(x, weight, None, tile=tile)


def size_of(weight: QuantisedWeight | Tensor) -> int:
    """Return the bytes that a product reads of a weight."""
    return weight.nbytes


def check(weight: QuantisedWeight | Tensor, call: Callable[[Tensor], Tensor], rows: int) -> str:
    """Return what is wrong with a product, or nothing."""
    values = weight if isinstance(weight, Tensor) else weight.dequantise()
    x = torch.randn(rows, values.shape[1], device=values.device, dtype=torch.bfloat16)
    some = min(len(values), 512)
    wide = F.linear(x.double(), values[-some:].double())
    plain = F.linear(x, values[-some:].bfloat16())
    return budget_violation(call(x)[:, -some:], wide, plain) or ""


def captured(run: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """Return a graph of `run`, which has run once."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def seconds(graphs: Sequence[torch.cuda.CUDAGraph]) -> list[float]:
    """Return the median times of graphs, which take turns."""
    events = [
        [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
         for _ in graphs] for _ in range(REPEATS)
    ]  # fmt: skip
    for graph in graphs:
        graph.replay()
    torch.cuda.synchronize()
    torch.cuda._sleep(AHEAD)
    for turn in events:
        for graph, (begin, end) in zip(graphs, turn, strict=True):
            begin.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    return [
        statistics.median(turn[i][0].elapsed_time(turn[i][1]) / 1e3 for turn in events)
        for i in range(len(graphs))
    ]


def main() -> int:
    """Measure and print; the JSON has every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--weights", nargs="*", default=["bf16", "int4", "fp8"])
    parser.add_argument("--rows", nargs="*", type=int, default=[1, 16])
    parser.add_argument("--what", nargs="*", default=["chain", "product"])
    parser.add_argument("--modes", nargs="*", default=["early"])
    parser.add_argument("--forms", nargs="*", default=["own"])
    parser.add_argument("--products", nargs="*", default=["qkv", "o", "up", "down"])
    parser.add_argument("--once", action="store_true")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for model in args.models:
        for kind in args.weights:
            names = {n: s for n, s in MODELS[model].items() if n in args.products}
            for row in measure(model, names, kind, args):
                print(" ".join(f"{v}" for v in row.values()), flush=True)
                found.append(row)
    if args.json is not None:
        args.json.write_text(json.dumps({"roof": ROOF, "rows": found}, indent=1) + "\n")
    return 0


def tile_of(form: str) -> Tile | None:
    """Return the tile of a form; None is the table's."""
    plain = form in ("own", "natural")
    numbers = [] if plain else list(map(int, form.removeprefix("stream").split(",")))
    if not numbers:
        return None
    if form.startswith("stream"):
        return StreamTile(*numbers)
    return FewTile(*numbers) if len(numbers) == 2 else RingTile(*numbers)


def measure(
    model: str, names: dict[str, tuple[int, int]], kind: str, args: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the rows of one kind of weight."""
    torch.manual_seed(0)
    plain = {n: random_weight(kind, *size, "cuda") for n, size in names.items()}
    lanes = {n: w if isinstance(w, Tensor) else w.lanes() for n, w in plain.items()}
    forms = [form for form in args.forms if kind != "bf16" or form == args.forms[0]]
    copies = {} if args.once else {n: copies_of(w) for n, w in lanes.items()}
    for rows in args.rows:
        fitting = [f for f in forms if kind == "bf16" or not is_few(f) or rows <= 16]
        for name in names:
            good = []
            for form in fitting:
                weight = (plain if form == "natural" else lanes)[name]
                wrong = check(weight, product(weight, tile_of(form)), rows)
                if wrong:
                    base = {"model": model, "weight": kind, "rows": rows, "what": name}
                    yield {**base, "form": form, "wrong": wrong[:200]}
                else:
                    good.append(form)
            if "product" in args.what and not args.once:
                x = torch.randn(rows, names[name][1], device="cuda", dtype=torch.bfloat16)
                some = copies[name] if "natural" not in good else copies_of(plain[name])
                parts = [(w, x) for w in some]
                yield from timed(model, kind, rows, name, parts, good, args, len(parts))
        if "chain" in args.what and not args.once:
            count = max(map(len, copies.values()))
            layers = [[copies[n][i % len(copies[n])] for n in names] for i in range(count)]
            parts = [(w, None) for layer in layers for w in layer]
            yield from timed(model, kind, rows, "chain", parts, fitting, args, count)


def is_few(form: str) -> bool:
    """Whether a form is for up to 16 rows."""
    return isinstance(tile_of(form), FewTile | StreamTile)


def timed(
    model: str,
    kind: str,
    rows: int,
    name: str,
    parts: list[Any],
    forms: list[str],
    args: argparse.Namespace,
    calls: int,
) -> Iterator[dict[str, Any]]:
    """Yield the times of forms, which take turns."""
    launches.zeros.clear()  # the graphs before are gone
    jobs = [(form, mode) for form in forms for mode in args.modes]
    graphs = [captured(lambda f=f, m=m: run(parts, rows, m, tile_of(f))) for f, m in jobs]
    size = sum(size_of(w) for w, _ in parts)
    for (form, mode), taken in zip(jobs, seconds(graphs) if graphs else [], strict=True):
        yield {
            "model": model, "weight": kind, "rows": rows, "what": name, "form": form, "mode": mode,
            "us": round(taken / calls * 1e6, 2), "percent": round(100 * size / taken / ROOF, 1),
        }  # fmt: skip


def copies_of(weight: QuantisedWeight | Tensor) -> list[QuantisedWeight | Tensor]:
    """Return a weight and copies of it, LAYERS_BYTES and more in all."""
    count = max(2, -(-LAYERS_BYTES // size_of(weight)))
    return [weight, *(copy_of(weight) for _ in range(count - 1))]


def copy_of(weight: QuantisedWeight | Tensor) -> QuantisedWeight | Tensor:
    """Return a copy in memory of its own."""
    if isinstance(weight, Tensor):
        return weight.clone()
    return replace(weight, **{n: t.clone() for n, t in weight.tensors().items()})


def run(parts: list[Any], rows: int, mode: str, tile: Tile | None) -> None:
    """Run products; of a chain each takes what the one before gave."""
    modes = MODES[mode]
    y = torch.randn(rows, 28672, device="cuda", dtype=torch.bfloat16) * 0.1
    with nullcontext() if modes is None else early.launching(modes):
        for weight, x in parts:
            y = product(weight, tile)(y[:, : weight.shape[1]] if x is None else x)


if __name__ == "__main__":
    raise SystemExit(main())
