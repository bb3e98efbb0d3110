"""Decoding from cached latents, beside FlashMLA and our portable kernel.

One new token a sequence, R 512 and Dr 64, blocks of 64 in random order, in bfloat16 and with caches
of 8 bits. All calls of a row are replayed from CUDA graphs in turn, in short blocks, each after a
buffer larger than L2 was overwritten. Bytes are those of the cache; FLOPs are 2 B Hq N (576 + 512).
FlashMLA is measured where its package `flash_mla` can be imported. A result that differs from
float64 gets no number. With TRITON_OVERRIDE_ARCH=sm80 (or sm89) kernels are those of that
architecture; see `lab/ampere.py`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lab.ampere import take_overridden
from tilewise import ops
from tilewise.bench.attention import document
from tilewise.bench.report import emit, format_table, positive, say
from tilewise.bench.roofline import Ceilings, measure_ceilings
from tilewise.bench.timing import time_together

_RANK, _ROPE_DIM, _BLOCK = 512, 64, 64
_WIDTH = _RANK + _ROPE_DIM
_EIGHT_BITS = (torch.float8_e4m3fn, torch.int8)
_MOST_ERROR = 1e-2  # of the norm: bfloat16 rounds p and o to 2**-9
_COLUMNS = ["peer", "dtype", "heads", "B", "N", "ms", "spread", "TFLOP/s", "TB/s", "% of matmul"]
_COLUMNS += ["% of read", "x flash_mla", "error"]

Row = dict[str, Any]


class Shape(NamedTuple):
    """A step: query heads, sequences and the tokens of each."""

    heads: int
    batch: int
    tokens: int


SHAPES = tuple(
    Shape(heads, batch, tokens)
    for heads in (128, 16)
    for batch, tokens in ((128, 4096), (64, 16384), (1, 131072))
)


class Step:
    """The tensors of one shape."""

    def __init__(self, shape: Shape, device: str) -> None:
        heads, batch, tokens = self.shape = shape
        blocks = batch * tokens // _BLOCK
        self.q = torch.randn(batch, heads, _WIDTH, device=device).bfloat16()
        self.cache = torch.randn(
            blocks, _BLOCK, _WIDTH, device=device, dtype=torch.bfloat16
        )  # normalised latents have the size of these
        self.table = torch.randperm(blocks, device=device).int().view(batch, -1)
        self.lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
        self.starts = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def quantised(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cache in 8 bits, and its scales."""
        cache = torch.empty_like(self.cache, dtype=dtype)
        scale = torch.empty(*self.cache.shape[:2], 2, device=cache.device)
        rows = self.cache.view(-1, _WIDTH)
        slots = torch.arange(rows.shape[0], device=cache.device)
        latent, k_rope = rows.split((_RANK, _ROPE_DIM), 1)
        ops.write_latent_cache(latent, k_rope, cache, slots, latent_scale=scale)
        return cache, scale

    def wrong(self, o: Tensor, cache: Tensor, scale: Tensor | None) -> str | None:
        """Say how far o of the first and the last sequence is from float64, if it is too far."""
        for b in {0, self.shape.batch - 1}:
            index = self.table[b].long()
            z = cache[index].flatten(0, 1).double()
            if scale is not None:
                factors = scale[index].flatten(0, 1).double()
                z[:, :_RANK] *= factors[:, :1]
                z[:, _RANK:] *= factors[:, 1:]
            p = torch.softmax(self.q[b].double() @ z.T * _WIDTH**-0.5, -1)
            want = p @ z[:, :_RANK]
            error = float((o[b].double() - want).norm() / want.norm())
            if not error < _MOST_ERROR:
                return f"wrong result: off by {error:.1e} of the norm"
        return None


def tilewise(step: Step, cache: Tensor, scale: Tensor | None, backend: str | None = None) -> Tensor:
    """Our own kernels."""
    q_latent, q_rope = step.q.split((_RANK, _ROPE_DIM), -1)
    return ops.mla_decode(
        q_latent,
        q_rope,
        cache,
        block_table=step.table,
        seqlens_k=step.lengths,
        cu_seqlens_q=step.starts,
        max_seqlen_q=1,
        softmax_scale=_WIDTH**-0.5,
        latent_scale=scale,
        backend=backend,
    )


def flash_mla(step: Step) -> Callable[[], Tensor]:
    """FlashMLA's kernel, its metadata made beforehand."""
    peer = import_module("flash_mla")
    plan, *_ = peer.get_mla_metadata()
    q, cache = step.q.unsqueeze(1), step.cache.unsqueeze(2)

    def call() -> Tensor:
        o: Tensor = peer.flash_mla_with_kvcache(
            q, cache, step.table, step.lengths, _RANK, plan, softmax_scale=_WIDTH**-0.5
        )[0]
        return o.squeeze(1)

    return call


def measure(shape: Shape, ceilings: Ceilings, rounds: int, device: str = "cuda") -> list[Row]:
    """Measure all peers of one shape in turn."""
    step = Step(shape, device)
    rows: list[Row] = []
    calls: dict[int, Callable[[], object]] = {}

    def add(peer: str, call: Callable[[], Tensor], cache: Tensor, scale: Tensor | None) -> None:
        dtype = str(cache.dtype).removeprefix("torch.")
        row: Row = {"peer": peer, "dtype": dtype, "heads": shape.heads, "B": shape.batch}
        row |= {"N": shape.tokens, "bytes": cache.nbytes + (0 if scale is None else scale.nbytes)}
        wrong = step.wrong(call(), cache, scale)
        if wrong is None:
            calls[len(rows)] = _graphed(call) if device == "cuda" else call
        else:
            row["error"] = wrong
        rows.append(row)

    for peer, backend in (("tilewise", None), ("tilewise_triton", "triton")):
        if device == "cuda" or backend is None:
            add(peer, partial(tilewise, step, step.cache, None, backend), step.cache, None)
    try:
        peer_call = flash_mla(step)
    except ImportError:
        say("flash_mla cannot be imported")
    else:
        add("flash_mla", peer_call, step.cache, None)
    for dtype in _EIGHT_BITS:
        cache, scale = step.quantised(dtype)
        add("tilewise", partial(tilewise, step, cache, scale), cache, scale)
    for index, timing in time_together(calls, rounds=rounds).items():
        row = rows[index]
        row |= {"ms": timing.median * 1e3, "spread": timing.spread, "repeats": timing.repeats}
        flops = 2 * shape.batch * shape.heads * shape.tokens * (_WIDTH + _RANK) / timing.median
        speed = row["bytes"] / timing.median
        row |= {"TFLOP/s": flops / 1e12, "TB/s": speed / 1e12}
        row["% of matmul"] = 100 * flops / ceilings.matmul_flops
        row["% of read"] = 100 * speed / ceilings.read_bytes
    times = {row["peer"]: row.get("ms") for row in rows if row["dtype"] == "bfloat16"}
    for row in rows:
        if times.get("flash_mla") and "ms" in row:
            row["x flash_mla"] = times["flash_mla"] / row["ms"]
    return rows


def _graphed(call: Callable[[], Tensor]) -> Callable[[], object]:
    """Return the replay of a call that has run."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def replay(kept: object = call) -> None:  # the graph reads what only its call keeps alive
        graph.replay()

    return replay


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lab/mla.py", description=__doc__)
    parser.add_argument("--rounds", type=positive, default=10, help="blocks of each call")
    parser.add_argument("--json", metavar="FILE", default=None, help="also write the results here")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("it needs a GPU that torch can see")
    arch = take_overridden()
    ceilings = measure_ceilings("cuda")
    print(ceilings)
    rows: list[Row] = []
    for shape in SHAPES:
        found = measure(shape, ceilings, options.rounds)
        say(f"{shape}: " + ", ".join(f"{r['peer']} {r.get('ms', 0.0):.4f} ms" for r in found))
        rows += found
    print(format_table(rows, _COLUMNS))
    made_for = {"as": f"sm_{arch}"} if arch else {}
    emit(document(rows, ceilings) | made_for, options.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
