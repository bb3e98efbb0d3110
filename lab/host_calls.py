"""Microseconds that the host needs for a repeated call on a GPU, of each kind, in turns.

    python lab/host_calls.py --json found.json

Kinds: a plain call, and with sinks, key lengths, ALiBi, a bias, and sinks of packed sequences. Of
each the forward pass without a gradient, to be differentiated, and its gradient; of 8 bits plain,
packed and masked calls, forward. `engine` is the gradient of an autograd.Function of q, k, v and
sinks that computes nothing: what torch itself takes. Tensors are those of one tile, so that the GPU
is faster than the host. A result that differs from eager attention in float64 ends it.
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
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilewise import masks, ops
from tilewise.ops import call as memory

SIZES = (1, 128, 2, 128)  # batch, rows, heads, channels
CALLS, ROUNDS = 200, 7
DEVICE = "cuda"
KINDS = ("plain", "sinks", "lengths", "ALiBi", "bias", "bias, differentiated", "packed sinks")
KINDS_OF_BYTES = ("8 bits", "8 bits, packed", "8 bits, mask")
Call = Callable[[], Any]


class Nothing(torch.autograd.Function):
    """An op that computes nothing."""

    @staticmethod
    def forward(ctx: Any, o: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.saved_tensors)


class Kind:
    """Calls of one kind: what they take, and their leaves."""

    def __init__(self, name: str, sizes: tuple[int, int, int, int] = SIZES) -> None:
        batch, rows, heads, width = sizes
        torch.manual_seed(0)
        options: dict[str, Any] = {"causal": True}
        shape = (batch, rows, heads, width)
        if name == "packed sinks":
            shape = (batch * rows, heads, width)
            edges = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=DEVICE)
            options |= {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
            options |= {"max_seqlen_q": rows, "max_seqlen_k": rows}
        self.leaves = [
            torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
            for _ in range(3)
        ]
        if "sinks" in name:
            options["sinks"] = torch.randn(heads, device=DEVICE).requires_grad_()
            self.leaves.append(options["sinks"])
        if name == "lengths":
            options["seqlens_k"] = torch.full((batch,), rows, dtype=torch.int32, device=DEVICE)
        if name == "ALiBi":
            options["alibi_slopes"] = torch.rand(heads, device=DEVICE)
        if name.startswith("bias"):
            bias = torch.randn(1, heads, rows, rows, device=DEVICE, dtype=torch.bfloat16)
            options["bias"] = bias
            if name == "bias, differentiated":
                self.leaves.append(bias.requires_grad_())
        self.name, self.options, self.is_packed = name, options, name == "packed sinks"

    def forward(self) -> Tensor:
        attend = ops.attention_varlen if self.is_packed else ops.attention
        return attend(*self.leaves[:3], **self.options)

    def unrecorded(self) -> Tensor:
        with torch.no_grad():
            return self.forward()

    def gradient(self, o: Tensor, do: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, self.leaves, do, retain_graph=True)


class Bytes:
    """Calls in 8 bits, which have no gradient."""

    def __init__(self, name: str) -> None:
        batch, rows, heads, width = SIZES
        torch.manual_seed(0)
        self.options: dict[str, Any] = {"causal": True}
        shape: tuple[int, ...] = SIZES
        if "packed" in name:
            shape = (batch * rows, heads, width)
            edges = torch.arange(0, batch * rows + 1, rows, dtype=torch.int32, device=DEVICE)
            self.options |= {"cu_seqlens_q": edges, "cu_seqlens_k": edges}
            self.options |= {"max_seqlen_q": rows, "max_seqlen_k": rows}
        if "mask" in name:
            visible = torch.rand(1, 1, rows, rows) < 0.5
            self.options["mask"] = masks.dense(visible).to(DEVICE)
        self.qkv = [torch.randn(shape, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]

    def forward(self) -> Tensor:
        return ops.attention_fp8(*self.qkv, **self.options)

    def check(self) -> None:
        """Raise unless o is that of the dequantised numbers, up to probabilities in e4m3."""
        o, right = self.forward(), ops.attention_fp8(*self.qkv, **self.options, backend="reference")
        error = ((o - right).float().norm() / right.float().norm()).item()
        if not error < 0.06:
            raise SystemExit(f"8 bits, {self.options.keys()}: o is off by {error} of its norm")


def eager(kind: Kind, do: Tensor, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    """Return o and the gradients of the leaves of a call of one sequence."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in kind.leaves]
    named = {id(old): new for old, new in zip(kind.leaves, leaves, strict=True)}
    q, k, v = (x.view(1, *x.shape[-3:]).transpose(1, 2) for x in leaves[:3])
    rows = q.shape[2]
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    options, at = kind.options, torch.arange(rows, device=DEVICE)
    if "bias" in options:
        s = s + named.get(id(options["bias"]), options["bias"].to(dtype))
    if "alibi_slopes" in options:
        far = (at[:, None] - at).abs()
        s = s - options["alibi_slopes"].to(dtype)[:, None, None] * far
    s = s.masked_fill(at[None, :] > at[:, None], float("-inf"))
    if "sinks" in options:
        sinks = named[id(options["sinks"])].view(1, -1, 1, 1).expand(*s.shape[:3], 1)
        p = torch.cat([s, sinks], -1).softmax(-1)[..., :-1]
    else:
        p = s.softmax(-1)
    o = (p @ v).transpose(1, 2).reshape(kind.leaves[0].shape)
    return (o, *torch.autograd.grad(o, leaves, do.to(dtype)))


def check(kind: Kind, o: Tensor, do: Tensor) -> None:
    """Raise unless o and the gradients are as near to float64 as bfloat16 lets them be."""
    results = (o, *kind.gradient(o, do))
    names = ("o", "dq", "dk", "dv", "dsinks" if "sinks" in kind.name else "dbias")
    truth, rounded = eager(kind, do), eager(kind, do, torch.bfloat16)
    for name, result, right, other in zip(names, results, truth, rounded, strict=False):
        error = (result.double() - right).abs().max().item()
        allowed = 2 * (other.double() - right).abs().max().item() + 1e-5
        if not error <= allowed:
            raise SystemExit(f"{kind.name}: {name} is off by {error}, of {allowed}")


def fresh(kind: Kind) -> Tensor:
    """Return o of a call whose gradient has a plan of its own."""
    memory.forget()
    o = kind.forward()
    kind.gradient(o, torch.randn_like(o))
    return o


def host_time(call: Call) -> float:
    """Return microseconds of host time a call while the GPU keeps up."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    spent = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * spent / CALLS


def in_turns(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Return what each call took in each round."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(5):
            call()
    for _ in range(ROUNDS):
        for name, call in calls.items():
            found[name].append(host_time(call))
    return found


def compile_side_by_side() -> None:
    """Let a process each compile the kernels of some calls, which then only are loaded."""
    start = partial(subprocess.Popen, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)})
    names = (*KINDS, *KINDS_OF_BYTES)
    for process in [start([sys.executable, __file__, "--compile", name]) for name in names]:
        if process.wait():
            raise SystemExit(f"{process.args} failed")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--compile", choices=("all", *KINDS, *KINDS_OF_BYTES), help="only compile")
    parser.add_argument("--is-compiled", action="store_true", help="nothing is to be compiled")
    given = parser.parse_args()
    if given.compile in ("all", None) and not given.is_compiled:
        compile_side_by_side()
    if given.compile == "all":
        return
    if given.compile in KINDS_OF_BYTES:
        Bytes(given.compile).forward()
        return
    if given.compile:
        fresh(Kind(given.compile))
        return
    calls: dict[str, Call] = {}
    for name in KINDS:
        kind = Kind(name)
        o = fresh(kind)
        do = torch.randn_like(o)
        check(kind, o, do)
        for _ in range(3):  # and of calls that are found again
            check(kind, kind.forward(), do)
        calls[f"{name}: gradient"] = partial(kind.gradient, o, do)
        calls |= {f"{name}: forward": kind.unrecorded, f"{name}: recorded": kind.forward}
        if name == "sinks":
            made = Nothing.apply(do.clone(), *kind.leaves)
            calls["engine"] = partial(kind.gradient, made, do)
    for name in KINDS_OF_BYTES:
        few = Bytes(name)
        for _ in range(3):
            few.check()
        calls[f"{name}: forward"] = few.forward
    found = in_turns(calls)
    for name, times in found.items():
        print(f"{name:32} {statistics.median(times):8.1f}  {min(times):8.1f}")
    facts = {"torch": torch.__version__, "GPU": torch.cuda.get_device_name()}
    if given.json is not None:
        given.json.write_text(json.dumps(facts | {"host, us": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
