"""Time short calls of attention on a CPU beside torch's, in turns: forward, and its gradient.

    python lab/small_calls.py                        # one thread, all shapes
    python lab/small_calls.py --threads 2 --shapes 16x16x4 1x256x12 --out found.json

A shape is queries x keys x heads, with `8*` before it for a batch of eight; D is 64, and as many
queries as keys are causal. torch's tensors have their heads first and are contiguous, which is best
for it. Times are medians of the turns, microseconds: of the process's CPU time with one thread, of
the clock with more, so these ask for a machine that nobody else uses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import ops

SHAPES = [
    "16x16x4", "16x16x12", "32x32x8", "64x64x8", "8*128x128x8", "4x128x12", "16x256x12", "1x16x12",
    "1x128x12", "1x256x12", "1x1024x12", "1x2048x12", "128x128x12",
    "256x256x12", "512x512x12", "1024x1024x12",
]  # fmt: skip
PASSES = ("forward", "forward, recorded", "backward")
TURN_S = 0.02
Call = Callable[[], object]


def parse_shape(text: str) -> tuple[int, int, int, int]:
    """Return batch, queries, keys and heads."""
    batch, _, rest = text.rpartition("*")
    queries, keys, heads = map(int, rest.split("x"))
    return int(batch or 1), queries, keys, heads


def unrecorded(call: Call) -> object:
    """Make a call whose gradient nobody wants."""
    with torch.no_grad():
        return call()


def calls_of(function: Callable[..., Tensor], tensors: list[Tensor], do: Tensor) -> list[Call]:
    """Return a call of each of PASSES."""
    leaves = [x.requires_grad_() for x in tensors]
    forward = partial(function, *leaves)
    backward = partial(torch.autograd.grad, forward(), leaves, do, retain_graph=True)
    return [partial(unrecorded, forward), forward, backward]


def measure(calls: list[Call], turns: int, clock: Callable[[], float]) -> list[list[float]]:
    """Return the microseconds of each call in each turn."""

    def seconds(call: Call, count: int) -> float:
        start = clock()
        for _ in range(count):
            call()
        return (clock() - start) / count

    counts = [1 + int(TURN_S / min(seconds(call, 3) for _ in range(5))) for call in calls]
    found: list[list[float]] = [[] for _ in calls]
    for _ in range(turns):
        for times, call, count in zip(found, calls, counts, strict=True):
            times.append(1e6 * seconds(call, count))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--out", type=Path, help="file for the times as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    clock = time.process_time if given.threads == 1 else time.perf_counter
    rows = []
    for shape in given.shapes:
        batch, queries, keys, heads = parse_shape(shape)
        for dtype in given.dtypes:
            lengths = (queries, keys, keys, queries)
            made = [torch.randn(batch, n, heads, 64, dtype=getattr(torch, dtype)) for n in lengths]
            first = [x.transpose(1, 2).contiguous() for x in made]
            causal = queries == keys
            ours = calls_of(partial(ops.attention, causal=causal), made[:3], made[3])
            sdpa = partial(F.scaled_dot_product_attention, is_causal=causal)
            times = measure(ours + calls_of(sdpa, first[:3], first[3]), given.turns, clock)
            for name, own, peer in zip(PASSES, times, times[3:], strict=False):
                row = {"shape": shape, "dtype": dtype, "pass": name}
                for key, values in (("tilewise_us", own), ("torch_us", peer)):
                    row[key] = round(statistics.median(values), 1)
                    row[f"{key}_range"] = [round(min(values), 1), round(max(values), 1)]
                rows.append(row | {"ratio": round(row["torch_us"] / row["tilewise_us"], 2)})
                print(*(f"{rows[-1][key]!s:>18}" for key in ("shape", "dtype", "pass")), end="")
                print(*(f"{rows[-1][key]:>9}" for key in ("tilewise_us", "torch_us", "ratio")))
    if given.out is not None:
        facts = {"torch": torch.__version__, "threads": given.threads, "turns": given.turns}
        given.out.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
