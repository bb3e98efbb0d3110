"""Attention over a sequence that two processes share, four ways, beside one process.

    python examples/context_parallel.py [ranks]

Each rank draws the same sequence, keeps its part, and compares what it gets with its part of
`attention` over the whole.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from tilewise import attention
from tilewise.distributed import (
    explain,
    gather_attention,
    ring_attention,
    shard_sequence,
    ulysses_attention,
)
from tilewise.integrations.torch_flash import register

TOKENS, HEADS, HEAD_DIM = 256, 4, 32


def work(rank: int, size: int, meeting: str) -> None:
    """Compare on one rank."""
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    torch.manual_seed(0)
    whole = [torch.randn(1, TOKENS, HEADS, HEAD_DIM) for _ in range(3)]
    want = shard_sequence(attention(*whole, causal=True), rank, size)
    parts = [shard_sequence(t, rank, size).requires_grad_() for t in whole]
    if rank == 0:
        print(explain(*parts, size=size, causal=True))
    for attend in (ring_attention, gather_attention, ulysses_attention):
        o = attend(*parts, causal=True)
        o.sum().backward()
        error = (o - want).abs().max().item()
        print(f"rank {rank}: {attend.__name__} differs by {error:.1e}", flush=True)
    mesh = init_device_mesh("cpu", (size,))
    buffers = [t.transpose(1, 2).contiguous() for t in whole]  # torch's layout: (B, H, S, D)
    with (
        register(device_types=("cpu",)),
        context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2, 2, 2]),
    ):
        q, k, v = (t.detach().requires_grad_() for t in buffers)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        error = (o.transpose(1, 2) - want).abs().max().item()
    print(f"rank {rank}: torch's context_parallel differs by {error:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (ranks, str(Path(folder) / "meet")), nprocs=ranks)
