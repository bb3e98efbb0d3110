"""Decoding of sequences that share a prompt, and trees of drafts.

Every sequence has its own tokens after a prefix that all of them share. Beside reading the prefix
once (`shared`) stand the same op without it, whose reads of the prefix may still meet in L2, and
torch over contiguous keys. On CUDA calls are replayed from a graph, with a cold L2. A kernel whose
result is wrong gets no number.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise
from tilewise import ops
from tilewise.bench.report import emit, format_table, say
from tilewise.bench.roofline import device_name
from tilewise.bench.timing import time_call, time_graph
from tilewise.reference.paged import paged_attention
from tilewise.testing import budget_violation

BLOCK, HEAD_DIM = 16, 128
SECONDS = 0.3  # for each call
CHECKED = 2  # sequences that are compared with float64


@dataclass(frozen=True, slots=True)
class Case:
    """`batch` sequences of `prefix` shared tokens, `own` of their own, the last `run` new."""

    batch: int
    num_q_heads: int
    num_kv_heads: int
    prefix: int
    own: int
    run: int = 1
    tree: bool = False


CASES = {
    "cuda": (
        Case(64, 32, 8, 8192, 256),
        Case(16, 32, 8, 4096, 512),
        Case(128, 64, 8, 2048, 128),
        Case(256, 32, 8, 1024, 128),
        Case(8, 32, 8, 32768, 1024),
        Case(16, 32, 8, 8192, 256, run=16, tree=True),
    ),
    "cpu": (Case(16, 32, 8, 8192, 64), Case(32, 32, 8, 2048, 64)),
}


@dataclass(frozen=True, slots=True)
class Inputs:
    """One case on the device."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    metadata: dict[str, Tensor]
    tree_mask: Tensor | None
    shared: ops.SharedPrefixes | None


def make_inputs(case: Case, device: str) -> Inputs:
    """Draw a case; blocks are shuffled, as after hours of serving."""
    prefix, own = case.prefix // BLOCK, -(-case.own // BLOCK)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(prefix + case.batch * own, generator=generator).int()
    table = torch.cat(
        [order[:prefix].expand(case.batch, -1), order[prefix:].view(case.batch, own)], dim=1
    )
    lengths = torch.full((case.batch,), case.prefix + case.own, dtype=torch.int32)
    cu = torch.arange(case.batch + 1, dtype=torch.int32) * case.run
    shared = ops.shared_prefixes(table, lengths, cu, block_size=BLOCK, device=device)
    shape = (len(order), BLOCK, case.num_kv_heads, HEAD_DIM)
    k_cache, v_cache = (torch.randn(shape, device=device).bfloat16() for _ in range(2))
    tokens = case.batch * case.run
    q = torch.randn(tokens, case.num_q_heads, HEAD_DIM, device=device).bfloat16()
    metadata = {"block_table": table.contiguous(), "seqlens_k": lengths, "cu_seqlens_q": cu}
    metadata = {name: tensor.to(device) for name, tensor in metadata.items()}
    tree_mask = None
    if case.tree:
        own_place = torch.arange(tokens, device=device) % case.run
        parents = torch.where(own_place > 0, (own_place - 1) // 2, -1)
        tree_mask = ops.tree_mask_from_parents(
            parents, metadata["cu_seqlens_q"], max_seqlen_q=case.run
        )
    return Inputs(q, k_cache, v_cache, metadata, tree_mask, shared)


def calls_of(case: Case, inputs: Inputs, device: str) -> dict[str, Callable[[], Tensor]]:
    """What is timed, by name; each returns (T, Hq, D)."""
    q, k_cache, v_cache = inputs.q, inputs.k_cache, inputs.v_cache

    def ours(shared: ops.SharedPrefixes | None) -> Tensor:
        return ops.paged_attention(
            q,
            k_cache,
            v_cache,
            block_table=inputs.metadata["block_table"],
            seqlens_k=inputs.metadata["seqlens_k"],
            cu_seqlens_q=inputs.metadata["cu_seqlens_q"],
            max_seqlen_q=case.run,
            tree_mask=inputs.tree_mask,
            shared=shared,
        )

    calls = {
        "tilewise_shared": lambda: ours(inputs.shared),
        "tilewise": lambda: ours(None),
    }
    if case.run > 1:
        return calls
    index = inputs.metadata["block_table"].long()
    k, v = (
        cache[index].flatten(1, 2)[:, : case.prefix + case.own].transpose(1, 2).contiguous()
        for cache in (k_cache, v_cache)
    )
    # The query heads of a group as rows of one head: torch's fastest way to decode with GQA.
    rows = q.view(case.batch, case.num_kv_heads, -1, HEAD_DIM)
    calls["sdpa_contiguous"] = lambda: F.scaled_dot_product_attention(rows, k, v).view_as(q)
    return calls


def measure(case: Case, device: str) -> list[dict[str, Any]]:
    """Check and time every call of a case."""
    inputs = make_inputs(case, device)
    count = CHECKED * case.run
    truth, eager = (
        paged_attention(
            inputs.q[:count].to(dtype),
            inputs.k_cache,
            inputs.v_cache,
            block_table=inputs.metadata["block_table"][:CHECKED],
            seqlens_k=inputs.metadata["seqlens_k"][:CHECKED],
            cu_seqlens_q=inputs.metadata["cu_seqlens_q"][: CHECKED + 1],
            tree_mask=None if inputs.tree_mask is None else inputs.tree_mask[:count],
        )
        for dtype in (torch.float64, torch.bfloat16)
    )
    assert isinstance(truth, Tensor)
    assert isinstance(eager, Tensor)
    found: list[dict[str, Any]] = []
    for peer, call in calls_of(case, inputs, device).items():
        row: dict[str, Any] = {"op": "tree" if case.tree else "decode", "peer": peer}
        row |= {"B": case.batch, "heads": f"{case.num_q_heads}/{case.num_kv_heads}"}
        row |= {"prefix": case.prefix, "own": case.own, "new": case.run}
        wrong = budget_violation(call()[:count], truth, eager)
        if wrong is None:
            timing = (
                time_graph(call, budget=SECONDS)
                if device == "cuda"
                else time_call(call, device, budget=SECONDS)
            )
            row |= {"ms": timing.median * 1e3, "spread": timing.spread}
        else:
            row["error"] = wrong
        found.append(row)
        say(f"{row['op']} {peer} B {case.batch} prefix {case.prefix}: {row.get('ms', wrong)} ms")
    first = found[0].get("ms")
    for row in found:
        if first is not None and "ms" in row:
            row["times shared"] = row["ms"] / first
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="lab/cascade.py", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=None, help="default: cuda if any"
    )
    parser.add_argument("--json", metavar="FILE", default=None, help="also write the results here")
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can see")
    rows = [row for case in CASES[device] for row in measure(case, device)]
    columns = ["op", "B", "heads", "prefix", "own", "new", "peer", "ms", "spread", "times shared"]
    print(format_table(rows, [*columns, "error"]))
    emit(
        {
            "version": tilewise.__version__,
            "device": device_name(device),
            "torch": torch.__version__,
            "dtype": "bfloat16",
            "D": HEAD_DIM,
            "block_size": BLOCK,
            "rows": rows,
        },
        options.json,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
