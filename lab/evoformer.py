"""Attention of AlphaFold's kind beside torch's and DeepSpeed's: errors first, then milliseconds.

    python lab/evoformer.py --device cuda --json F

N rows of N tokens, H heads of 32 channels, bfloat16, a mask of each row's keys and a pair bias with
a gradient: triangle attention and the rows of an MSA. Peers: torch's formula (`eager`, what
OpenFold runs without a kernel), the same compiled, torch's fused kernels over the sum of both
biases (`sdpa`, which must be made, and whose gradient is as large), and DeepSpeed's kernels where
that package and its compiler are installed. `forward` runs without gradients; `both` is a forward
and a backward pass with all gradients. A peer that runs out of memory has no number.

Every row's results are compared with float64 on a few of its rows: a line says "DIFFER" if ours are
more than twice as wrong as `eager`, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lab.on_shape import machine
from tilewise.bench.timing import time_call, time_together
from tilewise.integrations.evoformer import DS4Sci_EvoformerAttention
from tilewise.testing import budget_violation

DIM = 32
SIZES = {"cuda": ((256, 4), (384, 4), (512, 4), (1024, 4), (256, 16), (512, 16)), "cpu": ((64, 4),)}
_CHECKED = 4  # rows that are compared with float64
_HIDDEN = 0.1  # of the keys

Function = Callable[[Tensor, Tensor, Tensor, list[Tensor]], Tensor]


def draw(tokens: int, heads: int, device: str) -> tuple[list[Tensor], Tensor]:
    """Return q, k, v, the mask and the pair bias, and the gradient of o."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator).bfloat16()

    q, k, v, do = (normal(1, tokens, tokens, heads, DIM) for _ in range(4))
    hidden = torch.rand(1, tokens, 1, 1, tokens, device=device, generator=generator) < _HIDDEN
    mask = torch.zeros_like(hidden, dtype=torch.bfloat16).masked_fill_(hidden, -1e9)
    leaves = [x.requires_grad_() for x in (q, k, v, normal(1, 1, heads, tokens, tokens))]
    return [*leaves[:3], mask, leaves[3]], do


def eager(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor]) -> Tensor:
    """Compute the formula as OpenFold writes it, in the dtype of q."""
    q, k, v = (x.transpose(-2, -3) for x in (q, k, v))
    s = (q * DIM**-0.5) @ k.mT
    for bias in biases:
        s = s + bias
    return (torch.softmax(s, dim=-1) @ v).transpose(-2, -3)


def sdpa(q: Tensor, k: Tensor, v: Tensor, biases: list[Tensor]) -> Tensor:
    """Run torch's fused kernels over the sum of the biases."""
    q, k, v = (x.squeeze(0).transpose(1, 2) for x in (q, k, v))
    bias = (biases[0] + biases[1]).squeeze(0)
    return F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).unsqueeze(0)


def peers(names: list[str]) -> dict[str, Function]:
    """Return the functions that can be imported, by name."""
    found: dict[str, Function] = {"tilewise": DS4Sci_EvoformerAttention, "sdpa": sdpa}
    found["eager"] = eager
    if "compiled" in names:
        found["compiled"] = torch.compile(eager, dynamic=False)
    try:
        from deepspeed.ops.deepspeed4science import DS4Sci_EvoformerAttention as deepspeeds
    except Exception as error:  # what a package raises that cannot build its kernels
        print(f"deepspeed is left out: {type(error).__name__}", file=sys.stderr)
    else:
        found["deepspeed"] = deepspeeds
    return {name: function for name, function in found.items() if name in names}


def calls(function: Function, tensors: list[Tensor], do: Tensor) -> dict[str, Callable[[], object]]:
    """Return the two passes that are timed."""
    q, k, v, *biases = tensors
    leaves = [x for x in tensors if x.requires_grad]

    def forward() -> object:
        with torch.no_grad():
            return function(q, k, v, biases)

    def both() -> object:
        return torch.autograd.grad(function(q, k, v, biases), leaves, do)

    return {"forward": forward, "both": both}


def violations(tokens: int, heads: int, device: str) -> list[str]:
    """Say where ours is wrong beyond its budget: a few rows that alone weigh in the gradient."""
    tensors, do = draw(tokens, heads, device)
    few = [x[:, :_CHECKED].detach().requires_grad_(x.requires_grad) for x in tensors[:3]]
    few += [tensors[3][:, :_CHECKED], tensors[4].detach().requires_grad_()]
    do = do[:, :_CHECKED]

    def results(function: Function, inputs: list[Tensor]) -> list[Tensor]:
        leaves = [x for x in inputs if x.requires_grad]
        o = function(*inputs[:3], inputs[3:])
        return [o.detach(), *torch.autograd.grad(o, leaves, do.to(o.dtype))]

    doubles = [x.detach().double().requires_grad_(x.requires_grad) for x in few]
    found = zip(
        ("o", "dq", "dk", "dv", "dbias"),
        results(DS4Sci_EvoformerAttention, few),
        results(eager, doubles),
        results(eager, few),
        strict=True,
    )
    said = ((name, budget_violation(ours, truth, plain)) for name, ours, truth, plain in found)
    return [f"{name}: {wrong}" for name, wrong in said if wrong is not None]


def row(tokens: int, heads: int, device: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Time every peer that has the memory, in turns."""
    tensors, do = draw(tokens, heads, device)
    times: dict[str, dict[str, float]] = {"forward": {}, "both": {}}
    ways = {name: calls(f, tensors, do) for name, f in peers(names).items()}
    for part, found in times.items():
        able = {}
        for name, ways_of in ways.items():
            try:
                ways_of[part]()
                able[name] = ways_of[part]
            except torch.OutOfMemoryError:
                print(f"{name} {part}: out of memory", file=sys.stderr)
        if device == "cuda":
            timings = time_together(able, rounds=rounds)
        else:
            timings = {name: time_call(call, device) for name, call in able.items()}
        found |= {name: 1e3 * timing.median for name, timing in timings.items()}
    return {"tokens": tokens, "heads": heads, "dim": DIM, "ms": times}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--peers", nargs="+", default=["tilewise", "eager", "sdpa", "deepspeed"])
    parser.add_argument("--sizes", nargs="+", help="tokens x heads, such as 256x4")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each peer")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    sizes = SIZES[options.device]
    if options.sizes:
        sizes = tuple(tuple(map(int, size.split("x"))) for size in options.sizes)
    rows, wrong = [], 0
    for tokens, heads in sizes:
        said = violations(tokens, heads, options.device)
        wrong += len(said)
        found = row(tokens, heads, options.device, options.peers, options.rounds)
        rows.append(found | {"differ": said})
        for part, ms in found["ms"].items():
            ours = ms["tilewise"]
            told = "  ".join(f"{name} {x:.3f} ({x / ours:.2f})" for name, x in ms.items())
            print(f"{tokens:5} tokens {heads:3} heads {part:8} ms (times ours): {told}", flush=True)
        for line in said:
            print(f"DIFFER {line}")
        if options.json:  # after every size, for a run that is ended early
            document = {"machine": machine(options.device), "rows": rows}
            Path(options.json).write_text(json.dumps(document, indent=1) + "\n")
        if options.device == "cuda":
            torch.cuda.empty_cache()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
