"""attention_chunk: a query sees keys of its own chunk only, as in Llama 4; no matrix, only lengths.

In a sequence of Lq queries and Lk keys query i stands at p = i + Lk - Lq, and sees those of keys
c * size ... (c + 1) * size - 1 that the other rules let it see, c = floor(p / size). The last query
of a chunk is aligned to the last of its keys, as in any sequence: so each chunk is one.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """Sequences cut at chunks, `count` pieces each, some of them empty.

    Attributes:
        cu_seqlens_q: (B * count + 1,), the queries of each piece.
        starts, ends: (B, count), its keys, counted in their sequence.
    """

    cu_seqlens_q: Tensor
    starts: Tensor
    ends: Tensor


class Span(NamedTuple):
    """Keys of pieces of sequences in a cache.

    Attributes:
        sequence: (P,), whose.
        first: (P,), where they start, padding counted.
        most: how many there may be.
        step: all starts are multiples of this.
    """

    sequence: Tensor
    first: Tensor
    most: int
    step: int


def check_chunk(attention_chunk: int) -> None:
    """Raise ValueError unless it is the size of a chunk, or 0 for none."""
    if attention_chunk < 0:
        raise ValueError(f"attention_chunk must be at least 0, got {attention_chunk}")


def cut_packed(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, size: int
) -> tuple[Tensor, Tensor, int, int, int]:
    """Cut packed sequences: both cu_seqlens and both longest of the pieces, and their number each.

    Nothing waits for the device: a sequence is cut as often as the longest would be.
    """
    before, behind = _up(max_seqlen_q, size), _up(max_seqlen_k, size)
    count = before + behind
    cut = _cut(cu_seqlens_q, cu_seqlens_k.diff(), size, -before, count)
    edges_k = (cu_seqlens_k[:-1, None] + cut.starts).flatten()
    edges_k = torch.cat([edges_k, cu_seqlens_k[-1:]])
    return cut.cu_seqlens_q, edges_k, min(size, max_seqlen_q), min(size, max_seqlen_k), count


def cut_cached(
    cu_seqlens_q: Tensor,
    seqlens_k: Tensor,
    leftpad: Tensor | None,
    max_seqlen_q: int,
    capacity: int,
    size: int,
) -> tuple[Tensor, Tensor, Span]:
    """Cut the queries of sequences in a cache: cu_seqlens_q and keys of the pieces, and where."""
    count = _up(max(max_seqlen_q - 1, 0), size) + 1
    first = (seqlens_k - cu_seqlens_q.diff()).div(size, rounding_mode="floor").view(-1, 1)
    cut = _cut(cu_seqlens_q, seqlens_k, size, first, count)
    starts = cut.starts if leftpad is None else cut.starts + leftpad.view(-1, 1)
    lengths = torch.where(cut.cu_seqlens_q.diff() > 0, (cut.ends - cut.starts).flatten(), 0)
    sequence = torch.arange(len(seqlens_k), device=seqlens_k.device).repeat_interleave(count)
    step = size if leftpad is None else 1
    span = Span(sequence, starts.flatten(), min(size, capacity), step)
    return cut.cu_seqlens_q, lengths.to(torch.int32), span


def _cut(
    cu_seqlens_q: Tensor, seqlens_k: Tensor, size: int, first: int | Tensor, count: int
) -> Cut:
    """Cut from chunk `first` on, that of a sequence's first query or one before it."""
    seqlens_q, seqlens_k = cu_seqlens_q.diff().view(-1, 1), seqlens_k.view(-1, 1)
    index = torch.arange(count, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
    position = (first + index.view(1, -1)) * size
    rows = (position - (seqlens_k - seqlens_q)).clamp(min=0).minimum(seqlens_q)
    edges = torch.cat([(cu_seqlens_q[:-1, None] + rows).flatten(), cu_seqlens_q[-1:]])
    starts, ends = (x.clamp(min=0).minimum(seqlens_k) for x in (position, position + size))
    return Cut(edges.to(cu_seqlens_q.dtype), starts, ends)


def _up(length: int, size: int) -> int:
    return -(-length // size)
