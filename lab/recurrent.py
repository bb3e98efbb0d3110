"""Gated delta and Mamba-2 beside their peers: bits and errors first, then milliseconds.

    python lab/recurrent.py --device cuda --json F

On a GPU the peer is flash-linear-attention (the package `fla`, where it is installed), on a CPU the
torch code of transformers. Shapes are those of Qwen3-Next (16 key heads, 32 of values, 128 x 128)
and of a Mamba-2 layer (1 group, 48 heads, 128 x 64). Rows: a prompt, packed prompts, a decode step
of several sequences in the middle of their chunks, and the backward pass. A line says "DIFFER" if
a sequence in parts has other bits than the whole, and the exit status is 1.
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

import itertools

from lab.on_shape import machine
from tilewise import ops
from tilewise.bench.timing import time_call, time_together

# name -> (Hk, H, K, V), whether the delta rule corrects
SHAPES = {"delta": ((16, 32, 128, 128), True), "mamba": ((1, 48, 128, 64), False)}
PROMPTS = {"cuda": (4096, 16384, 65536), "cpu": (512, 2048)}
PACKED = {"cuda": (8, 2048), "cpu": (4, 256)}  # sequences, tokens of each
ROWS = {"cuda": (1, 8, 32, 128, 256), "cpu": (1, 8)}
_HELD = 160  # tokens that a slot holds before a decode step: half of a chunk is open

Rows = tuple[Tensor, ...]


def draw(shape: str, total: int, device: str) -> Rows:
    """Return q, k, v, g and beta of packed tokens, keys of length 1."""
    (key_heads, heads, key_dim, value_dim), _ = SHAPES[shape]
    q, k = (
        F.normalize(torch.randn(total, key_heads, key_dim, device=device), dim=-1).bfloat16()
        for _ in range(2)
    )
    v = torch.randn(total, heads, value_dim, device=device).bfloat16()
    g, beta = (
        -0.1 * torch.rand(total, heads, device=device),
        torch.rand(total, heads, device=device),
    )
    return q, k, v, g, beta


def edges_of(lengths: list[int], device: str) -> Tensor:
    """Return the edges of packed sequences."""
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def whole(rows: Rows, edges: Tensor, is_delta: bool) -> Tensor:
    """Run whole sequences."""
    op = torch.ops.tilewise.recurrence.default
    o: Tensor = op(*rows, None, edges, 1.0, is_delta, None)[0]
    return o


def slots_of(shape: str, count: int, device: str) -> ops.RecurrentStates:
    """Return slots of numbers that do no harm."""
    (key_heads, heads, key_dim, value_dim), _ = SHAPES[shape]
    states = ops.recurrent_states(
        count, heads, key_dim, value_dim, num_key_heads=key_heads, dtype=torch.bfloat16,
        device=device,
    )  # fmt: skip
    for x in states:
        if x is not None:
            x.zero_()
    return states


def stepper(
    rows: Rows, states: ops.RecurrentStates, start: int, is_delta: bool
) -> Callable[[], Tensor]:
    """Return a decode step of a row for each slot."""
    count, device = len(rows[0]), rows[0].device
    slots = torch.arange(count, device=device)
    edges = torch.arange(count + 1, dtype=torch.int32, device=device)
    op, starts = torch.ops.tilewise.recurrence_step.default, torch.full_like(slots, start)
    return lambda: op(*rows, *states, slots, starts, edges, 1.0, is_delta, None)


def has_one_set_of_bits(shape: str, device: str) -> bool:
    """Whether a sequence has the same bits in one piece, in parts and token by token."""
    is_delta, op = SHAPES[shape][1], torch.ops.tilewise.recurrence_step.default
    rows = draw(shape, 200, device)
    wanted = whole(rows, edges_of([200], device), is_delta)
    for cut in ([1] * 200, [64, 64, 72], [50, 1, 1, 100, 48]):
        states, first, parts = slots_of(shape, 1, device), 0, []
        for size in cut:
            some = (x[first : first + size] for x in rows)
            places = (torch.tensor([n], device=device) for n in (0, first))
            edges = edges_of([size], device)
            parts.append(op(*some, *states, *places, edges, 1.0, is_delta, None))
            first += size
        if not torch.equal(torch.cat(parts), wanted):
            return False
    return True


def peer_of(device: str, is_delta: bool) -> Callable[..., Any] | None:
    """Return the peer's function of dense rows (1, T, ...) and edges; None where it is missing."""
    if device == "cpu":
        if not is_delta:
            return None
        from transformers.models.qwen3_next import modeling_qwen3_next as modeling

        def of_transformers(q, k, v, g, beta, edges):
            group, ends = v.shape[2] // k.shape[2], edges.tolist()
            q, k = (x.repeat_interleave(group, 2) for x in (q, k))
            return torch.cat([
                modeling.torch_chunk_gated_delta_rule(*(x[:, a:b] for x in (q, k, v, g, beta)))[0]
                for a, b in itertools.pairwise(ends)
            ], 1)  # fmt: skip

        return of_transformers
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        print(f"no peer: {error}")
        return None

    def of_fla(q, k, v, g, beta, edges):
        long = edges.long()
        if is_delta:
            return chunk_gated_delta_rule(q, k, v, g, beta.bfloat16(), scale=1.0, cu_seqlens=long)[
                0
            ]
        group = v.shape[2] // k.shape[2]
        q, k = (x.repeat_interleave(group, 2) for x in (q, k))
        return chunk_simple_gla(
            q, k, (v * beta.unsqueeze(-1)).bfloat16(), g=g, scale=1.0, cu_seqlens=long
        )[0]

    return of_fla


def peer_step_of(device: str, is_delta: bool, rows: Rows) -> Callable[[], Any] | None:
    """Return the peer's decode step of a row for each sequence; None where it is missing."""
    q, k, v, g, beta = (x.unsqueeze(1) for x in rows)
    state = torch.zeros(len(v), v.shape[2], k.shape[3], v.shape[3], device=device)
    group = v.shape[2] // k.shape[2]
    if device == "cpu":
        if not is_delta:
            return None
        from transformers.models.qwen3_next import modeling_qwen3_next as modeling

        q, k = (x.repeat_interleave(group, 2) for x in (q, k))
        return lambda: modeling.torch_recurrent_gated_delta_rule(q, k, v, g, beta, state, True)
    try:
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.simple_gla import fused_recurrent_simple_gla
    except ImportError:
        return None
    if is_delta:
        return lambda: fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, scale=1.0, initial_state=state, output_final_state=True
        )
    q, k = (x.repeat_interleave(group, 2) for x in (q, k))
    return lambda: fused_recurrent_simple_gla(
        q, k, v, g=g, scale=1.0, initial_state=state, output_final_state=True
    )


def timed(calls: dict[str, Callable[[], object]], device: str) -> dict[str, float]:
    """Return the median milliseconds of each call."""
    for call in calls.values():
        call()
    if device == "cuda":
        return {name: 1e3 * t.median for name, t in time_together(calls).items()}
    return {name: 1e3 * time_call(call, device).median for name, call in calls.items()}


def prompt_calls(shape: str, lengths: list[int], device: str) -> dict[str, Callable[[], object]]:
    """Return ours and the peer's forward pass over packed prompts, and both with gradients."""
    is_delta = SHAPES[shape][1]
    rows, edges = draw(shape, sum(lengths), device), edges_of(lengths, device)
    calls: dict[str, Callable[[], object]] = {"ours": lambda: whole(rows, edges, is_delta)}
    leaves = tuple(x.clone().requires_grad_() for x in rows)
    do = torch.randn_like(rows[2])

    def both_passes(function: Callable[..., Tensor], some: Rows) -> Callable[[], object]:
        return lambda: torch.autograd.grad(function(*some), leaves, do.view(rows[2].shape))

    calls["ours with backward"] = both_passes(lambda *x: whole(x, edges, is_delta), leaves)
    peer = peer_of(device, is_delta)
    if peer is not None:
        dense = tuple(x.unsqueeze(0) for x in rows)
        found, wanted = peer(*dense, edges)[0].float(), whole(rows, edges, is_delta).float()
        if not is_delta or device == "cuda":
            error = float((found - wanted).norm() / wanted.norm())
            assert error < 0.02, f"the peer computes something else: {error:.4f}"
        calls["peer"] = lambda: peer(*dense, edges)
        calls["peer with backward"] = both_passes(
            lambda *x: peer(*(y.unsqueeze(0) for y in x), edges)[0], leaves
        )
    return calls


def main() -> int:
    """Check and measure all, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--shortest", action="store_true", help="the first row of each kind only")
    parser.add_argument("--json", help="write the last line there, too")
    args = parser.parse_args()
    torch.manual_seed(0)
    found, is_equal = [], True
    for shape in args.shapes:
        equal = has_one_set_of_bits(shape, args.device)
        is_equal = is_equal and equal
        print(f"{shape}: bits {'equal' if equal else 'DIFFER'}", flush=True)
        count, length = PACKED[args.device]
        prompts = [[n] for n in PROMPTS[args.device]] + [[length] * count]
        steps = ROWS[args.device]
        if args.shortest:
            prompts, steps = prompts[:1], steps[:1]
        for lengths in prompts:
            row: dict[str, Any] = {"shape": shape, "lengths": lengths}
            row["ms"] = timed(prompt_calls(shape, lengths, args.device), args.device)
            found.append(row)
            print(json.dumps(row), flush=True)
        for rows in steps:
            given, is_delta = draw(shape, rows, args.device), SHAPES[shape][1]
            states = slots_of(shape, rows, args.device)
            calls = {"ours": stepper(given, states, _HELD, is_delta)}
            peer = peer_step_of(args.device, is_delta, given)
            if peer is not None:
                calls["peer"] = peer
            row = {"shape": shape, "step": rows, "ms": timed(calls, args.device)}
            found.append(row)
            print(json.dumps(row), flush=True)
    line = json.dumps({"machine": machine(args.device), "equal": is_equal, "rows": found})
    print(line)
    if args.json:
        Path(args.json).write_text(line + "\n")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
