"""Gated delta and Mamba-2 beside their peers: bits and errors first, then milliseconds.

    python lab/recurrent.py --device cuda --json F

On a GPU the peer is flash-linear-attention (the package `fla`, where it is installed), on a CPU the
torch code of transformers. Shapes are those of Qwen3-Next (16 key heads, 32 of values, 128 x 128),
of a Mamba-2 layer (1 group, 48 heads, 128 x 64) and of Kimi Linear (32 heads of 128 x 128, a decay
for each channel). Rows: a prompt, packed prompts, a decode step
of several sequences in the middle of their chunks, and the backward pass; the same of a convolution
of 8,192 channels. A line says "DIFFER" if
a sequence in parts has other bits than the whole, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import sys
import types
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
SHAPES = {
    "delta": ((16, 32, 128, 128), True), "mamba": ((1, 48, 128, 64), False),
    "kimi": ((32, 32, 128, 128), True),
}  # fmt: skip
PROMPTS = {"cuda": (4096, 16384, 65536), "cpu": (512, 2048)}
PACKED = {"cuda": (8, 2048), "cpu": (4, 256)}  # sequences, tokens of each
ROWS = {"cuda": (1, 8, 32, 128, 256), "cpu": (1, 8)}
CHANNELS, WIDTH = 8192, 4  # of Qwen3-Next's convolution
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
    channels = (key_dim,) if shape == "kimi" else ()
    g = -0.1 * torch.rand(total, heads, *channels, device=device)
    beta = torch.rand(total, heads, device=device)
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
        device=device, by_channel=shape == "kimi", is_delta=SHAPES[shape][1],
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


def peer_of(device: str, shape: str) -> Callable[..., Any] | None:
    """Return the peer's function of dense rows (1, T, ...) and edges; None where it is missing."""
    is_delta = SHAPES[shape][1]
    if device == "cpu":
        if shape != "delta":
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
        without_models()
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda
        from fla.ops.simple_gla import chunk_simple_gla
    except ImportError as error:
        print(f"no peer: {error}")
        return None

    def of_fla(q, k, v, g, beta, edges):
        if g.dim() == 4:
            return chunk_kda(q, k, v, g, beta, scale=1.0, cu_seqlens=edges)[0]
        if is_delta:
            return chunk_gated_delta_rule(q, k, v, g, beta, scale=1.0, cu_seqlens=edges)[0]
        return chunk_simple_gla(q, k, v, g=g, scale=1.0, cu_seqlens=edges)[0]

    return of_fla


def without_models() -> None:
    """Let fla be imported without its models, whose imports take a quarter of a minute."""
    found = None if "fla" in sys.modules else importlib.util.find_spec("fla")
    if found is None:
        return
    root = str(next(iter(found.submodule_search_locations or [])))
    for name in ("fla", "fla.ops", "fla.modules"):
        package = types.ModuleType(name)
        package.__path__ = [root + name[3:].replace(".", "/")]
        package.__version__ = "0.6.0"  # type: ignore[attr-defined]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package


def peer_rows(rows: Rows, is_delta: bool, device: str) -> Rows:
    """Return dense rows as the peer takes them: Mamba's with a key for each head, dt in x."""
    q, k, v, g, beta = (x.unsqueeze(0) for x in rows)
    if device == "cpu":
        return q, k, v, g, beta
    if not is_delta:
        q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
        v = (v * beta.unsqueeze(-1)).bfloat16()
    return q, k, v, g, beta.bfloat16()


def peer_step_of(device: str, is_delta: bool, rows: Rows) -> Callable[[], Any] | None:
    """Return the peer's decode step of a row for each sequence; None where it is missing."""
    q, k, v, g, beta = (x.unsqueeze(1) for x in rows)
    if device == "cpu" and g.dim() == 4:
        return None  # transformers has no model with a decay for each channel
    state = torch.zeros(len(v), v.shape[2], k.shape[3], v.shape[3], device=device)
    group = v.shape[2] // k.shape[2]
    if device == "cpu":
        if not is_delta:
            return None
        from transformers.models.qwen3_next import modeling_qwen3_next as modeling

        q, k = (x.repeat_interleave(group, 2) for x in (q, k))
        return lambda: modeling.torch_recurrent_gated_delta_rule(q, k, v, g, beta, state, True)
    try:
        without_models()
        from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule
        from fla.ops.kda import fused_recurrent_kda
        from fla.ops.simple_gla import fused_recurrent_simple_gla
    except ImportError:
        return None
    if g.dim() == 4:
        return lambda: fused_recurrent_kda(
            q, k, v, g=g, beta=beta, scale=1.0, initial_state=state, output_final_state=True
        )
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
        def call() -> object:
            o = function(*some)
            return torch.autograd.grad(o, some, do.view(o.shape))

        return call

    calls["ours with backward"] = both_passes(lambda *x: whole(x, edges, is_delta), leaves)
    peer = peer_of(device, shape)
    if peer is not None:
        dense, ends = peer_rows(rows, is_delta, device), edges
        if device == "cuda":
            ends = edges.long()
        found, wanted = peer(*dense, ends)[0].float(), whole(rows, edges, is_delta).float()
        if not is_delta or device == "cuda":
            error = float((found - wanted).norm() / wanted.norm())
            assert error < 0.02, f"the peer computes something else: {error:.4f}"
        calls["peer"] = lambda: peer(*dense, ends)
        # What the peer does not use has no gradient.
        used = dense if is_delta else dense[:4]
        theirs = tuple(x.clone().requires_grad_() for x in used)
        calls["peer with backward"] = both_passes(
            lambda *x: peer(*x, *dense[len(x) :], ends), theirs
        )
    return calls


def convolution_calls(
    lengths: list[int], device: str, *, is_step: bool = False
) -> dict[str, Callable[[], object]]:
    """Return ours and the peer's convolution of packed rows, or of a row for each sequence."""
    x = torch.randn(sum(lengths), CHANNELS, device=device).bfloat16()
    weight = torch.randn(CHANNELS, WIDTH, device=device).bfloat16()
    edges, count = edges_of(lengths, device), len(lengths)
    calls: dict[str, Callable[[], object]] = {}
    if is_step:
        states = torch.zeros(count, WIDTH - 1, CHANNELS, device=device, dtype=x.dtype)
        slots = torch.arange(count, device=device)
        places, step = (slots, torch.full_like(slots, _HELD)), torch.ops.tilewise
        calls["ours"] = lambda: step.causal_conv1d_step.default(
            x, weight, None, states, *places, edges, True, None
        )
    else:
        op, dy = torch.ops.tilewise.causal_conv1d.default, torch.randn_like(x)
        leaves = tuple(t.clone().requires_grad_() for t in (x, weight))
        calls["ours"] = lambda: op(x, weight, None, None, edges, True, None)
        calls["ours with backward"] = lambda: torch.autograd.grad(
            op(*leaves, None, None, edges, True, None)[0], leaves, dy
        )
    try:
        without_models()
        from fla.modules.causal_conv1d.ops import causal_conv1d, causal_conv1d_update
    except ImportError:
        return calls
    if is_step:
        cache = torch.zeros(count, CHANNELS, WIDTH, device=device, dtype=x.dtype)
        calls["peer"] = lambda: causal_conv1d_update(
            x.unsqueeze(1), cache, weight=weight, activation="silu"
        )
        return calls

    def peer(x: Tensor, weight: Tensor) -> Tensor:
        y: Tensor = causal_conv1d(
            x.unsqueeze(0), weight, activation="silu", cu_seqlens=edges.long()
        )[0]
        return y.squeeze(0)

    torch.testing.assert_close(peer(x, weight), calls["ours"]()[0], rtol=0.02, atol=0.02)  # type: ignore[index]
    calls["peer"] = lambda: peer(x, weight)
    calls["peer with backward"] = lambda: torch.autograd.grad(peer(*leaves), leaves, dy)
    return calls


def main() -> int:
    """Check and measure all, print a line each, then JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    kinds = [*SHAPES, "convolution"]
    parser.add_argument("--shapes", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--shortest", action="store_true", help="the first row of each kind only")
    parser.add_argument("--prompts", action="store_true", help="prompts alone, no decode steps")
    parser.add_argument("--json", help="write the last line there, too")
    args = parser.parse_args()
    torch.manual_seed(0)
    found, is_equal = [], True

    def tell(row: dict[str, Any], calls: dict[str, Callable[[], object]]) -> None:
        """Measure a row, print it, and write all rows so far."""
        found.append(row | {"ms": timed(calls, args.device)})
        print(json.dumps(found[-1]), flush=True)
        if args.json:
            line = {"machine": machine(args.device), "equal": is_equal, "rows": found}
            Path(args.json).write_text(json.dumps(line) + "\n")

    count, length = PACKED[args.device]
    prompts = [[n] for n in PROMPTS[args.device]] + [[length] * count]
    steps = ROWS[args.device]
    if args.shortest:
        prompts, steps = prompts[:1], steps[:1]
    if args.prompts:
        steps = ()
    for shape in args.shapes:
        if shape == "convolution":
            for lengths in prompts:
                row = {"shape": shape, "lengths": lengths}
                tell(row, convolution_calls(lengths, args.device))
            for rows in steps:
                row = {"shape": shape, "step": rows}
                tell(row, convolution_calls([1] * rows, args.device, is_step=True))
            continue
        equal = has_one_set_of_bits(shape, args.device)
        is_equal = is_equal and equal
        print(f"{shape}: bits {'equal' if equal else 'DIFFER'}", flush=True)
        for lengths in prompts:
            tell({"shape": shape, "lengths": lengths}, prompt_calls(shape, lengths, args.device))
        for rows in steps:
            given, is_delta = draw(shape, rows, args.device), SHAPES[shape][1]
            states = slots_of(shape, rows, args.device)
            calls = {"ours": stepper(given, states, _HELD, is_delta)}
            peer = peer_step_of(args.device, is_delta, given)
            if peer is not None:
                calls["peer"] = peer
            tell({"shape": shape, "step": rows}, calls)
    print(json.dumps({"machine": machine(args.device), "equal": is_equal, "rows": found}))
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
