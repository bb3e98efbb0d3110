"""Tiles of products whose rows do not depend on one another: equal bits first, then microseconds.

    python benchmarks/invariant_linear.py --json F

For each shape of Qwen3-0.6B and Llama-3-8B and some numbers of rows: whether all tiles of
`tiles.invariant_linear` give the same bits, also for some rows alone, and how long each takes, in a
captured graph of products whose weights are more than the L2 cache holds; then cuBLAS, and what the
table chooses. A line says "DIFFER" where bits do, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.on_shape import machine
from tilewise.kernels import device
from tilewise.kernels.tiles.invariant_linear import candidates, invariant_tile
from tilewise.kernels.triton.step.invariant_linear import launch

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


def main() -> int:
    """Check and measure all, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="so many of the list")
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
            first = launch(x, weights[0], None, candidates()[0])
            some = x[rows // 3 : rows // 3 + 5]
            row: dict[str, Any] = {"channels": channels, "outputs": outputs, "rows": rows}
            for tile in candidates():
                y = launch(x, weights[0], None, tile)
                part = launch(some, weights[0], None, tile)
                equal = torch.equal(y, first) and torch.equal(part, first[rows // 3 :][: len(some)])
                is_equal &= equal
                name = "x".join(map(str, tile))
                if not equal:
                    print(f"DIFFER {channels} -> {outputs}, {rows} rows, {name}", flush=True)
                if rows <= 64 and tile.tile_m > 64:
                    continue
                run = lambda t=tile, x=x, used=used: [launch(x, w, None, t) for w in used]  # noqa: E731
                row[name] = microseconds(run, len(used))
            row["cublas"] = microseconds(
                lambda x=x, used=used: [F.linear(x, w) for w in used], len(used)
            )
            chosen = "x".join(map(str, invariant_tile(rows, outputs, 2, arch)))
            row["chosen"] = chosen
            best = min((v, k) for k, v in row.items() if "x" in k)
            print(
                f"{channels} -> {outputs}, {rows}: chosen {chosen} {row[chosen]}, best {best[1]} "
                f"{best[0]}, cublas {row['cublas']}", flush=True,
            )  # fmt: skip
            found.append(row)
    result = {"benchmark": "invariant linear", "equal": is_equal, **machine("cuda"), "rows": found}
    line = json.dumps(result)
    if args.json:
        Path(args.json).write_text(line + "\n", encoding="utf-8")
    print("all bits equal" if is_equal else "BITS DIFFER")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
