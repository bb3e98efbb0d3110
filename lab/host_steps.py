"""Microseconds that the host needs for a repeated op of a step on a GPU, beside torch's own.

    python lab/host_steps.py --json found.json
    python lab/host_steps.py --json found.json --beside OTHER_TREE

With `--beside` the ops of another tree are called in turns with these, in a process of their own.
Tensors are small, so that the GPU is faster than the host. A result that differs from torch's by
more than bfloat16 rounds ends it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import ops
from tilewise.kernels.low_rank import LowRank, RowTiles
from tilewise.kernels.quantised_weight import QuantisedWeight
from tilewise.ops import call as memory

CALLS, ROUNDS = 300, 9
ROWS, WIDTH, OUTPUTS, VOCAB, HEADS, DIM = 4, 1024, 1024, 32768, 8, 128
EPS = 1e-6
Call = Callable[[], Any]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, dtype=dtype, device="cuda")


def linear() -> tuple[Call, Call, bool]:
    x, weight = draw(ROWS, WIDTH), draw(OUTPUTS, WIDTH)
    return lambda: ops.linear(x, weight), lambda: F.linear(x, weight), True


def norm() -> tuple[Call, Call, bool]:
    x, weight = draw(ROWS, WIDTH), draw(WIDTH)
    return lambda: ops.rms_norm(x, weight, EPS), lambda: F.rms_norm(x, (WIDTH,), weight, EPS), True


def activation() -> tuple[Call, Call, bool]:
    x = draw(ROWS, 2 * WIDTH)

    def plain() -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    return lambda: ops.silu_mul(x), plain, True


def rope() -> tuple[Call, Call, bool]:
    x = draw(ROWS, HEADS, DIM)
    angles = torch.rand(ROWS, DIM // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    wide_cos, wide_sin = (t.repeat(1, 2)[:, None].bfloat16() for t in (cos, sin))

    def plain() -> Tensor:
        first, second = x.chunk(2, -1)
        return x * wide_cos + torch.cat((-second, first), -1) * wide_sin

    return lambda: ops.apply_rope(x, cos, sin), plain, True


def rope_write() -> tuple[Call, Call, bool]:
    q, k, v = draw(ROWS, HEADS, DIM), draw(ROWS, HEADS, DIM), draw(ROWS, HEADS, DIM)
    k_cache, v_cache = draw(64, 16, HEADS, DIM), draw(64, 16, HEADS, DIM)
    slots = torch.arange(ROWS, device="cuda")
    angles = torch.rand(ROWS, DIM // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    wide_cos, wide_sin = (t.repeat(1, 2)[:, None].bfloat16() for t in (cos, sin))
    flat = [cache.view(-1, HEADS, DIM) for cache in (k_cache, v_cache)]

    def turn(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return x * wide_cos + torch.cat((-second, first), -1) * wide_sin

    def plain() -> Tensor:
        flat[0].index_copy_(0, slots, turn(k))
        flat[1].index_copy_(0, slots, v)
        return turn(q)

    def own() -> Tensor:
        return ops.rope_write_kv_cache(q, k, v, k_cache, v_cache, slots, cos=cos, sin=sin)

    return own, plain, True


def sampling() -> tuple[Call, Call, bool]:
    logits = draw(ROWS, VOCAB, dtype=torch.float32)
    temperature = torch.ones(ROWS, device="cuda")
    stream = torch.zeros(ROWS, dtype=torch.int64, device="cuda")

    def own() -> Tensor:
        given = {"temperature": temperature, "seeds": stream, "counters": stream}
        return ops.sample_tokens(logits, **given)[0]

    def plain() -> Tensor:
        scaled = logits / temperature[:, None]
        return torch.multinomial(scaled.softmax(-1), 1)[:, 0]

    return own, plain, False


def quantised_linear() -> tuple[Call, Call, bool]:
    codes = torch.randint(-127, 127, (OUTPUTS, WIDTH), dtype=torch.int8, device="cuda")
    scales = torch.rand(OUTPUTS, WIDTH // 128, device="cuda") * 0.01
    weight = QuantisedWeight(codes, scales, (1, 128))
    x, wide = draw(ROWS, WIDTH), weight.dequantise().bfloat16()
    return lambda: ops.quantised_linear(x, weight), lambda: F.linear(x, wide), True


def low_rank() -> tuple[Call, Call, bool]:
    x, y = draw(ROWS, WIDTH), draw(ROWS, OUTPUTS)
    a, b = draw(1, 16, WIDTH) * 0.01, draw(1, 16, OUTPUTS) * 0.01
    whole = {"dtype": torch.int32, "device": "cuda"}
    weights = LowRank(
        a,
        b,
        torch.ones(1, 1, device="cuda"),
        torch.full((1, 1), 16, **whole),
        torch.tensor([0, OUTPUTS], **whole),
    )
    rows = torch.full((1, 16), -1, **whole)
    rows[0, :ROWS] = torch.arange(ROWS, **whole)
    tiles = RowTiles(torch.zeros(1, **whole), rows)

    def own() -> Tensor:
        ops.add_low_rank(y, x, weights, tiles)
        return y

    return own, lambda: torch.addmm(y, x @ a[0].T, b[0]), False


KINDS = (linear, norm, activation, rope, rope_write, sampling, quantised_linear, low_rank)


def host_time(call: Call) -> float:
    """Return microseconds of host time a call while the GPU keeps up."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * spent / CALLS


def check(name: str, own: Call, plain: Call) -> None:
    """Raise unless a result is that of torch but for rounding."""
    found, right = own().float(), plain().float()
    error = ((found - right).norm() / right.norm()).item()
    if not error < 0.02:
        raise SystemExit(f"{name} is off by {error} of its norm")


def anew(call: Call) -> Call:
    """Return a call that finds nothing remembered."""

    def run() -> None:
        memory.forget()
        call()

    return run


def measure(says: bool) -> dict[str, list[float]]:
    """Return what each op and torch's took in each round.

    Args:
        says: True to wait for a line before each round, and to print one after it, in turns.
    """
    calls: dict[str, Call] = {}
    for kind in KINDS:
        own, plain, is_alike = kind()
        for _ in range(3):
            if is_alike:
                check(kind.__name__, own, plain)
        calls |= {kind.__name__: own, f"{kind.__name__}: torch": plain}
    calls |= {f"{name}, planned anew": anew(calls[name]) for name in ("linear", "rope_write")}
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(10):
            call()
    for _ in range(ROUNDS):
        if says:
            input()
        for name, call in calls.items():
            found[name].append(host_time(call))
        if says:
            print("done", flush=True)
    return found


def beside(tree: Path) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Measure this tree and another in turns; return what each took."""
    found = []
    paths = [Path(__file__).resolve().parents[1], tree.resolve()]
    kept = [path for path in sys.path if path and Path(path).resolve() not in paths]
    started = [
        subprocess.Popen(
            [sys.executable, __file__, "--in-turns"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(path), *kept])},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for path in paths
    ]
    for _ in range(ROUNDS):
        for process in started:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            if process.stdout.readline() != "done\n":
                raise SystemExit(f"{process.args} ended")
    for process in started:
        assert process.stdout is not None
        found.append(json.loads(process.stdout.readline()))
    return found[0], found[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside", type=Path, help="another tree, measured in turns")
    parser.add_argument("--in-turns", action="store_true", help="for --beside")
    given = parser.parse_args()
    if given.in_turns:
        print(json.dumps(measure(says=True)))
        return
    found, before = (measure(says=False), {}) if given.beside is None else beside(given.beside)
    for name, times in found.items():
        other = f"  before {statistics.median(before[name]):7.1f}" if before else ""
        print(f"{name:28} {statistics.median(times):7.1f}  {min(times):7.1f}{other}")
    facts = {"torch": torch.__version__, "GPU": torch.cuda.get_device_name()}
    if given.json is not None:
        rows = {"host, us": found} | ({"host before, us": before} if before else {})
        given.json.write_text(json.dumps(facts | rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
