"""Paged decode beside torch's own: one new token a sequence.

Bytes are those of the keys and values read. A kernel whose result is wrong gets no number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewise import ops
from tilewise.bench.report import say
from tilewise.bench.roofline import Ceilings
from tilewise.bench.timing import time_call, time_graph

Row = dict[str, Any]
# (batch, query heads, kv heads, tokens): those of published decode benchmarks.
_DECODE = {
    "cuda": [
        (1, 32, 8, 131072),
        (16, 32, 8, 8192),
        (64, 32, 8, 4096),
        (128, 64, 8, 2048),
        (16, 32, 32, 4096),
        (1, 32, 8, 1024),
    ],
    "cpu": [(8, 32, 8, 4096), (1, 32, 8, 16384)],
}


def bench_decode(device: str, ceilings: Ceilings) -> list[Row]:
    """Time one new token a sequence over a paged bf16 cache of block 16, D 128."""
    rows: list[Row] = []
    for case in _DECODE[device]:
        rows += _decode_rows(case, device, ceilings)
    return rows


def _decode_rows(case: tuple[int, int, int, int], device: str, ceilings: Ceilings) -> list[Row]:
    batch, num_q_heads, num_kv_heads, tokens = case
    blocks = tokens // 16
    q = torch.randn(batch, num_q_heads, 128, device=device).bfloat16()
    k_cache, v_cache = (
        torch.randn(batch * blocks, 16, num_kv_heads, 128, device=device).bfloat16()
        for _ in range(2)
    )
    table = torch.randperm(batch * blocks, device=device).int().view(batch, blocks)
    lengths = torch.full((batch,), tokens, dtype=torch.int32, device=device)
    cu_seqlens_q = torch.arange(batch + 1, dtype=torch.int32, device=device)
    index = table.long()

    def paged() -> Tensor:
        return ops.paged_attention(
            q,
            k_cache,
            v_cache,
            block_table=table,
            seqlens_k=lengths,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=1,
        )

    def gather(cache: Tensor) -> Tensor:
        return cache[index].flatten(1, 2).transpose(1, 2)

    k, v = gather(k_cache).contiguous(), gather(v_cache).contiguous()
    # The query heads of a group as rows of one head: torch's fastest way to decode with GQA.
    rows_of_groups = q.view(batch, num_kv_heads, -1, 128)

    def sdpa() -> Tensor:
        return F.scaled_dot_product_attention(rows_of_groups, k, v)

    def gather_sdpa() -> Tensor:
        return F.scaled_dot_product_attention(rows_of_groups, gather(k_cache), gather(v_cache))

    calls: dict[str, Callable[[], Tensor]] = {"tilewise": paged, "sdpa_contiguous": sdpa}
    if device == "cpu":
        calls["gather_sdpa"] = gather_sdpa
    want = F.scaled_dot_product_attention(
        rows_of_groups[:1].double(), k[:1].double(), v[:1].double()
    )
    rows: list[Row] = []
    for peer, call in calls.items():
        row: Row = {
            "op": "decode",
            "peer": peer,
            "B": batch,
            "heads": f"{num_q_heads}/{num_kv_heads}",
        }
        row |= {"N": tokens, "D": 128, "block_size": 16, "dtype": "bfloat16"}
        error = (call()[:1].double().view_as(want) - want).norm() / want.norm()
        if bool(error < 1e-2):
            timing = time_graph(call) if device == "cuda" else time_call(call, device, budget=2.0)
            speed = (k.nbytes + v.nbytes) / timing.median
            row |= {"ms": timing.median * 1e3, "spread": timing.spread, "GB/s": speed / 1e9}
            row["% of read"] = 100 * speed / ceilings.read_bytes
        else:
            row["error"] = "wrong result"
        rows.append(row)
        say(f"decode {peer} B {batch} N {tokens}: {row.get('ms', 0.0):.4g} ms")
    return rows
