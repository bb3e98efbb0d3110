"""Checks of the values of small integer tensors, where reading them costs nothing.

On a GPU reading would wait, and a traced tensor has no values: there the checks pass. CPU kernels
check for themselves; these checks serve code with torch's own indexing, which takes -1 for the last
row. With TILEWISE_CHECK=1 in the environment the GPU is waited for, and every call whose ids or
lengths refer outside of its tensors raises the same error as on a CPU. Without it kernels cut
lengths, skip such slots and read another block, see docs/guide/paged.md.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from tilewise.ops.derivatives import transforms_active

WAITS = os.environ.get("TILEWISE_CHECK", "") not in ("", "0")  # read once


def readable(*tensors: Tensor) -> bool:
    """Return whether all `tensors` are plain ones on a CPU, whose values cost nothing to read.

    It is False under a transform of torch.func and while torch compiles.
    """
    return _are_on(("cpu",), tensors)


def _looks(*tensors: Tensor) -> bool:
    """Return whether checks read the values of `tensors`: plain ones on a CPU.

    With `WAITS` those on a GPU are read, too, except while a CUDA graph is captured.
    """
    if not WAITS:
        return readable(*tensors)
    if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    return _are_on(("cpu", "cuda"), tensors)


def _are_on(devices: tuple[str, ...], tensors: tuple[Tensor, ...]) -> bool:
    return not (torch.compiler.is_compiling() or transforms_active()) and all(
        type(tensor) is Tensor and tensor.device.type in devices for tensor in tensors
    )


def check_edges(name: str, edges: Tensor, num_rows: int) -> None:
    """Raise ValueError unless edges (B + 1,) start at 0, never fall, and end at num_rows at most;
    edges that are not read pass.

    Args:
        name: the name of the argument in the message.
    """
    if not _looks(edges):
        return
    if int(edges[0]) != 0 or int(edges[-1]) > num_rows or bool((edges.diff() < 0).any()):
        raise ValueError(f"{name} must rise from 0 to at most {num_rows}, got {edges.tolist()}")


def check_lengths(name: str, lengths: Tensor, most: int | Tensor) -> None:
    """Raise ValueError unless lengths (B,) are in [0, most].

    Nothing is checked where reading values would cost a wait or fail: for a tensor on a GPU (but
    see `WAITS`), while torch compiles, and under its transforms.

    Args:
        name: the name of the argument in the message.
        most: the largest length, one number for all or a tensor (B,).
    """
    if not _looks(lengths):
        return
    if bool(((lengths < 0) | (lengths > most)).any()):
        limit = most.tolist() if isinstance(most, Tensor) else most
        raise ValueError(f"{name} must lie in [0, {limit}], got {lengths.tolist()}")


def check_table(
    block_table: Tensor, lengths: Tensor, cache: Tensor, *, first: Tensor | None = None
) -> None:
    """Raise ValueError unless the blocks of each sequence's tokens lie in a cache (N, P, ...).

    Only the table's entries for tokens that are read are checked; tensors that are not read (see
    the head of this module) pass.

    Args:
        block_table: int32 (B, max_blocks).
        lengths: (B,), which fit the table; blocks after them are not checked.
        first: (B,), the first token of each sequence that is read; 0 when None.
    """
    if not _looks(block_table, lengths):
        return
    num_blocks, block_size = cache.shape[:2]
    column = torch.arange(block_table.shape[1], device=block_table.device)
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
    """Raise ValueError unless a step refers only to num_rows new rows and a cache (N, P, ...).

    Tensors that are not read (see the head of this module), as those on a GPU, pass.

    Args:
        block_table, seqlens_k, cu_seqlens_q: as in `paged_attention`.
        window_left: the keys before its own that a row sees; -1 for all. Blocks that the window of
            all new rows has passed are not checked.

    Returns:
        seqlens_k, with 0 for a sequence without new rows: its keys are not read.
    """
    check_edges("cu_seqlens_q", cu_seqlens_q, num_rows)
    runs = cu_seqlens_q.diff()
    lengths = torch.where(runs > 0, seqlens_k, 0)
    check_lengths("seqlens_k", lengths, block_table.shape[1] * cache.shape[1])
    first = None if window_left < 0 else (lengths - runs - window_left).clamp(min=0)
    check_table(block_table, lengths, cache, first=first)
    return lengths


def check_longest(name: str, edges: Tensor, most: int) -> None:
    """Raise ValueError if a sequence between edges (B + 1,) has more than `most` rows.

    Edges that are not read pass.

    Args:
        name: the name of the argument that gave `most`, for the message.
    """
    if _looks(edges) and edges.shape[0] > 1:
        longest = int(edges.diff().max())
        if longest > most:
            raise ValueError(f"{name} must be at least {longest}, the longest sequence, got {most}")


def check_ids(name: str, ids: Tensor, least: int, most: int) -> None:
    """Raise ValueError unless all ids lie in [least, most]; ids that are not read pass.

    Args:
        name: the name of the argument in the message.
    """
    if not _looks(ids):
        return
    stray = ids[(ids < least) | (ids > most)]
    if stray.numel() > 0:
        raise ValueError(f"{name} must lie in [{least}, {most}], got {int(stray[0])}")
