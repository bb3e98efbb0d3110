"""Checks of what small tensors of integers hold, where looking costs nothing.

A GPU would have to be waited for, and a traced tensor holds nothing yet: there they pass. The
kernels of a CPU look for themselves; these serve what is computed by torch's own indexing, which
takes -1 for the last row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.ops.derivatives import transforms_active


def readable(*tensors: Tensor) -> bool:
    """Whether all of `tensors` are plain ones of a CPU."""
    return not (torch.compiler.is_compiling() or transforms_active()) and all(
        type(tensor) is Tensor and tensor.device.type == "cpu" for tensor in tensors
    )


def check_edges(name: str, edges: Tensor, num_rows: int) -> None:
    """Raise ValueError unless edges (B + 1,) rise from 0 to num_rows at most."""
    if not readable(edges):
        return
    if int(edges[0]) != 0 or int(edges[-1]) > num_rows or bool((edges.diff() < 0).any()):
        raise ValueError(f"{name} must rise from 0 to at most {num_rows}, got {edges.tolist()}")


def check_lengths(name: str, lengths: Tensor, most: int | Tensor) -> None:
    """Raise ValueError unless lengths (B,) lie in [0, most], `most` one for all or one for each."""
    if not readable(lengths):
        return
    if bool(((lengths < 0) | (lengths > most)).any()):
        limit = most.tolist() if isinstance(most, Tensor) else most
        raise ValueError(f"{name} must lie in [0, {limit}], got {lengths.tolist()}")


def check_table(
    block_table: Tensor, lengths: Tensor, cache: Tensor, *, first: Tensor | None = None
) -> None:
    """Raise ValueError unless the blocks of each sequence's tokens lie in a cache (N, P, ...).

    Args:
        block_table: int32 (B, max_blocks).
        lengths: (B,), which fit the table; blocks behind them are not looked at.
        first: (B,), the first token of each sequence that is read; 0 when None.
    """
    if not readable(block_table, lengths):
        return
    num_blocks, block_size = cache.shape[:2]
    column = torch.arange(block_table.shape[1])
    read = column < -(-lengths // max(block_size, 1)).unsqueeze(1)
    if first is not None:
        read &= column >= (first // max(block_size, 1)).unsqueeze(1)
    stray = read & ((block_table < 0) | (block_table >= num_blocks))
    if bool(stray.any()):
        sequence, place = stray.nonzero()[0].tolist()
        raise ValueError(
            f"block_table must hold blocks in [0, {num_blocks - 1}], got "
            f"{int(block_table[sequence, place])} as block {place} of sequence {sequence}"
        )


def check_step(
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    num_rows: int,
    cache: Tensor,
    window_left: int = -1,
) -> Tensor:
    """Raise ValueError unless num_rows new rows and a cache (N, P, ...) have what a step names.

    Args:
        block_table, seqlens_k, cu_seqlens_q: as in `paged_attention`.
        window_left: keys before its own that a row sees; -1 is all.

    Returns:
        seqlens_k, 0 for a sequence without new rows: its keys are not read.
    """
    check_edges("cu_seqlens_q", cu_seqlens_q, num_rows)
    runs = cu_seqlens_q.diff()
    lengths = torch.where(runs > 0, seqlens_k, 0)
    check_lengths("seqlens_k", lengths, block_table.shape[1] * cache.shape[1])
    first = None if window_left < 0 else (lengths - runs - window_left).clamp(min=0)
    check_table(block_table, lengths, cache, first=first)
    return lengths
