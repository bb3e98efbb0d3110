"""`tilewise bench ops`: attention and paged decode beside torch's own, in one run.

FLOPs are counted as in the FlashAttention papers: 4 B H N^2 D forward, halved when causal, 2.5
times that backward. Bytes of decode are those of the keys and values read. A kernel whose result is
wrong gets no number.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tilewise
from tilewise import ops
from tilewise.bench.report import emit, format_table
from tilewise.bench.roofline import Ceilings, measure_ceilings
from tilewise.bench.timing import peak_memory, time_call, time_graph

Row = dict[str, Any]
_SDPA = {
    "cuda": {
        "sdpa_flash": SDPBackend.FLASH_ATTENTION,
        "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
    },
    "cpu": {"sdpa_flash": SDPBackend.FLASH_ATTENTION},
}
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


def _sampled_truth(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Return 16 row numbers and the float64 output of those rows of the first sequence."""
    rows = torch.linspace(0, q.shape[1] - 1, 16).long()
    offset = k.shape[1] - q.shape[1]
    group_size = q.shape[2] // k.shape[2]
    keys, values = (t[0].double().repeat_interleave(group_size, 1) for t in (k, v))
    s = torch.einsum("ihd,jhd->hij", q[0, rows].double(), keys) * q.shape[-1] ** -0.5
    if causal:
        j = torch.arange(k.shape[1], device=q.device)
        s.masked_fill_(j > (rows.to(q.device) + offset)[:, None], -torch.inf)
    return rows, torch.einsum("hij,jhd->ihd", s.softmax(-1), values)


def _is_right(o: Tensor, truth: tuple[Tensor, Tensor]) -> bool:
    rows, want = truth
    error = (o[0, rows].double() - want).norm() / want.norm()
    return bool(error < 1e-2)  # bf16 operands leave 1e-3 ... 1e-2


def _dense_row(
    peer: str,
    shape: tuple[int, int, int, int],
    causal: bool,
    device: str,
    ceilings: Ceilings,
    backward: bool,
) -> list[Row]:
    batch, seqlen, heads, head_dim = shape
    q, k, v = (
        torch.randn(shape, device=device).to(torch.bfloat16).requires_grad_(backward)
        for _ in range(3)
    )
    forward = _forward_of(peer, q, k, v, causal, device)
    if not _is_right(
        forward().detach(), _sampled_truth(q.detach(), k.detach(), v.detach(), causal)
    ):
        return [
            {"op": "forward", "peer": peer, "N": seqlen, "D": head_dim, "error": "wrong result"}
        ]
    flops = 4 * batch * heads * seqlen**2 * head_dim * (0.5 if causal else 1.0)
    calls: dict[str, tuple[Callable[[], object], float]] = {}
    if backward:
        o = forward()
        do = torch.randn_like(o)
        calls["backward"] = (
            lambda: torch.autograd.grad(o, (q, k, v), do, retain_graph=True),
            2.5 * flops,
        )
    else:
        calls["forward"] = (forward, flops)
    rows = []
    for op, (call, work) in calls.items():
        timing = time_call(call, device, budget=1.0 if device == "cpu" else 0.3)
        rows.append(
            {
                "op": op,
                "peer": peer,
                "B": batch,
                "H": heads,
                "N": seqlen,
                "D": head_dim,
                "causal": causal,
                "dtype": "bfloat16",
                "ms": timing.median * 1e3,
                "spread": timing.spread,
                "TFLOP/s": work / timing.median / 1e12,
                "% of matmul": 100 * work / timing.median / ceilings.matmul_flops,
                "peak_MB": peak_memory(call, device) / 2**20,
            }
        )
    return rows


def _forward_of(
    peer: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, device: str
) -> Callable[[], Tensor]:
    if peer == "tilewise":
        return lambda: ops.attention(q, k, v, causal=causal)
    backend = _SDPA[device][peer]
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))

    def call() -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return call


def bench_dense(
    device: str, ceilings: Ceilings, seqlens: Sequence[int], backward: bool
) -> list[Row]:
    """Time forward (or backward) for D 64 and 128, causal and not, beside SDPA."""
    rows: list[Row] = []
    for head_dim in (64, 128) if device == "cpu" else (64, 128, 256):
        for seqlen in seqlens:
            batch, heads = (1, 8) if device == "cpu" else (16384 // seqlen, 2048 // head_dim)
            for causal in (False, True):
                for peer in ("tilewise", *_SDPA[device]):
                    shape = (batch, seqlen, heads, head_dim)
                    rows += _dense_row(peer, shape, causal, device, ceilings, backward)
                    _progress(rows[-1])
    return rows


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
        _progress(row)
    return rows


def _progress(row: Row) -> None:
    if sys.stderr.isatty():
        print("  ".join(f"{key}={value}" for key, value in row.items()), file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="tilewise bench ops", description=__doc__)
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default=None, help="default: cuda if any"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=("forward", "backward", "decode"),
        default=("forward", "backward", "decode"),
        help="which measurements to take",
    )
    parser.add_argument("--seqlens", nargs="+", type=int, default=None, help="N of dense attention")
    parser.add_argument("--json", metavar="FILE", default=None, help="also write the results here")
    options = parser.parse_args(argv)
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a GPU that torch can see")
    seqlens = options.seqlens or ((1024, 4096, 16384) if device == "cuda" else (1024, 4096))
    ceilings = measure_ceilings(device)
    print(
        f"{ceilings.name}, torch {ceilings.torch_version}: matmul "
        f"{ceilings.matmul_flops / 1e12:.3g} TFLOP/s bf16, "
        f"read {ceilings.read_bytes / 1e9:.3g} GB/s"
    )
    rows: list[Row] = []
    if "forward" in options.only:
        rows += bench_dense(device, ceilings, seqlens, backward=False)
    if "backward" in options.only:
        rows += bench_dense(device, ceilings, seqlens, backward=True)
    if rows:
        columns = ["op", "N", "D", "causal", "peer", "ms", "spread", "TFLOP/s", "% of matmul"]
        print(format_table(rows, [*columns, "peak_MB", "error"]))
    if "decode" in options.only:
        decode = bench_decode(device, ceilings)
        columns = ["op", "B", "heads", "N", "peer", "ms", "spread", "GB/s", "% of read", "error"]
        print(format_table(decode, columns))
        rows += decode
    emit(
        {"version": tilewise.__version__, "ceilings": ceilings.as_dict(), "rows": rows},
        options.json,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
