"""Tiles of products whose rows do not depend on one another: equal bits first, then microseconds.

    python lab/invariant_linear.py --json F

For each shape of Qwen3-0.6B and Llama-3-8B and some numbers of rows: whether all tiles give the
same bits, also for some rows alone, and how long each takes, in a captured graph of products whose
weights are more than the L2 cache holds; then cuBLAS, and what the table chooses. On Hopper the
tiles are those of `tiles.invariant_many` and the kernel of few rows ("few"), elsewhere, and with
--triton, Triton's. A line says "DIFFER" where bits do, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.on_shape import machine
from tilewise.kernels import device
from tilewise.kernels.gluon.step import invariant_linear as hopper
from tilewise.kernels.gluon.step import linear as few_rows
from tilewise.kernels.tiles import invariant_linear as triton_tiles
from tilewise.kernels.tiles import invariant_many as hopper_tiles
from tilewise.kernels.tiles import linear_rows
from tilewise.kernels.triton.step.invariant_linear import launch as launch_triton
from tilewise.testing import assert_within_budget

SHAPES = (
    (1024, 4096), (2048, 1024), (1024, 6144), (3072, 1024), (1024, 151_936),
    (4096, 6144), (4096, 28_672), (14_336, 4096),
)  # fmt: skip
ROWS = (1, 8, 32, 64, 256, 1024, 8192)


def microseconds(run: Any, count: int) -> float:
    """Median time of one of `count` calls in a captured graph."""
    graph = torch.cuda.CUDAGraph()
    run()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(5):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        graph.replay()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last) * 1000 / count)
    return round(statistics.median(times[1:]), 2)


Launch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def tiles_of_triton(rows: int, outputs: int, arch: int) -> tuple[dict[str, Launch], str]:
    """Return a launch for each tile by its name, and the name of the one that is chosen."""
    found: dict[str, Launch] = {}
    for tile in triton_tiles.candidates():
        if rows > 64 or tile.tile_m <= 64:
            found["x".join(map(str, tile))] = lambda x, w, t=tile: launch_triton(x, w, None, t)
    return found, "x".join(map(str, triton_tiles.invariant_tile(rows, outputs, 2, arch)))


def tiles_of_hopper(rows: int, outputs: int, channels: int) -> tuple[dict[str, Launch], str]:
    """Likewise those of Hopper's own kernels."""
    found: dict[str, Launch] = {}
    few = linear_rows.tile_of(outputs, channels)
    if rows <= linear_rows.most_rows(few):
        found["few"] = lambda x, w: few_rows.launch(x, w, None)
    has_parts = linear_rows.parts_of(few, channels) > 1
    for tile in hopper_tiles.candidates(has_parts):
        name = "x".join(map(str, tile))
        found[name] = lambda x, w, t=tile: hopper.launch_many(x, w, None, t)
    chosen = hopper_tiles.many_tile(rows, outputs, channels, has_parts)
    return found, "few" if chosen is None else "x".join(map(str, chosen))


def main() -> int:
    """Check and measure all, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="so many of the list")
    parser.add_argument("--triton", action="store_true", help="Triton's tiles on Hopper, too")
    parser.add_argument("--json", help="write the last line there, too")
    args = parser.parse_args()
    torch.manual_seed(0)
    arch, found, is_equal = device.arch_of(torch.device("cuda")), [], True
    for channels, outputs in SHAPES[: args.shapes]:
        size = 2 * channels * outputs
        weights = [
            torch.randn(outputs, channels, device="cuda", dtype=torch.bfloat16)
            for _ in range(max(1, min(12, 200_000_000 // size)))
        ]
        for rows in args.rows:
            x = torch.randn(rows, channels, device="cuda", dtype=torch.bfloat16)
            used = weights if rows <= 256 else weights[:2]
            row: dict[str, Any] = {"channels": channels, "outputs": outputs, "rows": rows}
            if arch // 10 == 9 and not args.triton:
                launches, chosen = tiles_of_hopper(rows, outputs, channels)
            else:
                launches, chosen = tiles_of_triton(rows, outputs, arch)
            first = list(launches.values())[-1](x, weights[0])
            some = x[rows // 3 : rows // 3 + 5]
            wanted = first[rows // 3 :][: len(some)]
            if rows <= 1024 and outputs <= 8192:
                wide = F.linear(x.double(), weights[0].double())
                assert_within_budget(first, wide, F.linear(x, weights[0]))
            for name, launch in launches.items():
                equal = torch.equal(launch(x, weights[0]), first)
                equal = equal and torch.equal(launch(some, weights[0]), wanted)
                is_equal &= equal
                if not equal:
                    print(f"DIFFER {channels} -> {outputs}, {rows} rows, {name}", flush=True)
                run = lambda f=launch, x=x, used=used: [f(x, w) for w in used]  # noqa: E731
                row[name] = microseconds(run, len(used))
            row["cublas"] = microseconds(
                lambda x=x, used=used: [F.linear(x, w) for w in used], len(used)
            )
            row["chosen"] = chosen
            best = min((row[name], name) for name in launches)
            print(
                f"{channels} -> {outputs}, {rows}: chosen {chosen} {row[chosen]}, best {best[1]} "
                f"{best[0]}, cublas {row['cublas']}",
                flush=True,
            )
            found.append(row)
    result = {"benchmark": "invariant linear", "equal": is_equal, **machine("cuda"), "rows": found}
    line = json.dumps(result)
    if args.json:
        Path(args.json).write_text(line + "\n", encoding="utf-8")
    print("all bits equal" if is_equal else "BITS DIFFER")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
