"""Paged decode beside torch's own: one new token a sequence.

Bytes are those of the keys and values read, and of their scales. A kernel whose result is wrong
gets no number; 8-bit caches are held to what their bytes stand for.
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
    """Time attention of one new token a sequence over a paged cache of block 16, D 128; return a
    row for each shape, peer and dtype: ours in bfloat16, int8 and fp8, torch's in bfloat16."""
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
    want = _exact(rows_of_groups[:1], k[:1], v[:1])
    rows: list[Row] = []
    for peer, call in calls.items():
        rows.append(
            _row(case, peer, torch.bfloat16, call, want, k.nbytes + v.nbytes, device, ceilings)
        )
    for dtype in (torch.int8, torch.float8_e4m3fn):
        caches = [torch.empty_like(k_cache, dtype=dtype) for _ in range(2)]
        scales = [torch.empty(k_cache.shape[:3], device=device) for _ in range(2)]
        slots = torch.arange(batch * tokens, device=device)
        ops.write_kv_cache(
            k_cache.flatten(0, 1),
            v_cache.flatten(0, 1),
            caches[0],
            caches[1],
            slots,
            k_scale=scales[0],
            v_scale=scales[1],
        )

        def quantised(caches: list[Tensor] = caches, scales: list[Tensor] = scales) -> Tensor:
            return ops.paged_attention(
                q,
                caches[0],
                caches[1],
                block_table=table,
                seqlens_k=lengths,
                cu_seqlens_q=cu_seqlens_q,
                max_seqlen_q=1,
                k_scale=scales[0],
                v_scale=scales[1],
            )

        first = [
            (c[index[:1]].double() * s[index[:1]].double().unsqueeze(-1))
            .flatten(1, 2)
            .transpose(1, 2)
            for c, s in zip(caches, scales, strict=True)
        ]
        want = _exact(rows_of_groups[:1], *first)
        num_bytes = sum(t.nbytes for t in (*caches, *scales))
        rows.append(_row(case, "tilewise", dtype, quantised, want, num_bytes, device, ceilings))
    return rows


def _exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.double(), k.double(), v.double())


def _row(
    case: tuple[int, int, int, int],
    peer: str,
    dtype: torch.dtype,
    call: Callable[[], Tensor],
    want: Tensor,
    num_bytes: int,
    device: str,
    ceilings: Ceilings,
) -> Row:
    """Check the first sequence of a call's result against `want`; if it is right, time the call.

    The first run, which compiles, is not timed. Returns the row of the table, with the numbers or
    an "error"; it is told on standard error, too.
    """
    batch, num_q_heads, num_kv_heads, tokens = case
    name = str(dtype).removeprefix("torch.")
    row: Row = {"op": "decode", "peer": peer, "B": batch, "heads": f"{num_q_heads}/{num_kv_heads}"}
    row |= {"N": tokens, "D": 128, "block_size": 16, "dtype": name}
    error = (call()[:1].double().view_as(want) - want).norm() / want.norm()
    if bool(error < 1e-2):
        timing = time_graph(call) if device == "cuda" else time_call(call, device, budget=2.0)
        speed = num_bytes / timing.median
        row |= {"ms": timing.median * 1e3, "spread": timing.spread, "GB/s": speed / 1e9}
        row["% of read"] = 100 * speed / ceilings.read_bytes
        row["tokens/s"] = batch / timing.median
    else:
        row["error"] = "wrong result"
    said = f"{row['ms']:.4g} ms" if "ms" in row else row["error"]
    say(f"decode {peer} {name} B {batch} N {tokens}: {said}")
    return row
