"""Products of prompts' rows with weights of e4m3 in blocks, rounded rows beside bfloat16.

    python lab/rounded_rows.py --json lab/results/rounded_rows_h200.json

Llama-3-8B's products of 4,096 rows, on Hopper, in CUDA graphs taken in turn. "rounded" rounds rows
to e4m3 and multiplies 8 bits by 8, the rounding within its time; "parts" multiplies the values of a
part of the weight at a time, what other formats do with so many rows; "bfloat16" is torch's product
of values that are bfloat16 in memory. Errors are those of the norm, of float64 products of exact
rows and of rounded ones.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.paged import time_together
from tilewise.bench.roofline import device_name
from tilewise.ops import QuantisedWeight, quantised_linear

SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
ROWS, CHECKED, CALLS = 4096, 256, 5


def make_weight(outputs: int, channels: int) -> QuantisedWeight:
    """Return a random weight, its codes in the order of lanes."""
    blocks = torch.randn(outputs // 128, 128, channels // 128, 128, device="cuda") * 0.02
    scales = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn)
    return QuantisedWeight(codes.view(outputs, channels), scales, (128, 128)).lanes()


def rounded(x: Tensor) -> Tensor:
    """Round rows to e4m3 as the format does; return float64."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True) / 448
    codes = (groups / scale).to(torch.float8_e4m3fn)
    wide: Tensor = codes.double() * scale.double()
    return wide.flatten(-2)


def microseconds(ways: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Return the median time of a call of each way, taken in turn."""
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for name, way in ways.items():
        way()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(CALLS):
                way()
    times = time_together(graphs, CALLS)
    return {name: round(1e6 * statistics.median(found), 1) for name, found in times.items()}


def measure(channels: int, outputs: int) -> dict[str, Any]:
    """Measure one product."""
    weight = make_weight(outputs, channels)
    rounds = replace(weight, rounds_rows=True)
    x = torch.randn(ROWS, channels, device="cuda", dtype=torch.bfloat16)
    values = weight.dequantise()
    wide = values.bfloat16()
    few, y = x[:CHECKED], quantised_linear(x, rounds)[:CHECKED].double()
    exact, own = (rows @ values.double().T for rows in (few.double(), rounded(few)))
    return {
        "K": channels,
        "N": outputs,
        "rows": ROWS,
        "error": round(float((y - exact).norm() / exact.norm()), 5),
        "error_of_rounded_rows": round(float((y - own).norm() / own.norm()), 5),
        "us": microseconds(
            {
                "rounded": lambda: quantised_linear(x, rounds),
                "parts": lambda: quantised_linear(x, weight),
                "bfloat16": lambda: F.linear(x, wide),
            }
        ),
    }


def main() -> None:
    """Measure, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        rows.append(measure(*shape))
        print(json.dumps(rows[-1]), flush=True)
    if options.json:
        told = {"device": device_name("cuda"), "torch": torch.__version__}
        options.json.write_text(json.dumps(told | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
