"""attention_chunk: a query sees only keys of its own chunk, as in Llama 4. It needs lengths, no
matrix.

In a sequence of Lq queries and Lk keys query i is at position p = i + Lk - Lq. It sees those of
keys c * size ... (c + 1) * size - 1, with c = floor(p / size), that the other rules let it see. The
last query of a chunk is aligned to the last key of the chunk, as in any sequence, so each chunk is
treated as a sequence.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Cut(NamedTuple):
    """B packed sequences cut at the edges of chunks into `count` pieces each, some of them empty.

    Attributes:
        cu_seqlens_q: (B * count + 1,), the first query row of each piece, and the end of the last.
        starts, ends: (B, count), the range of each piece's keys, counted in their sequence.
    """

    cu_seqlens_q: Tensor
    starts: Tensor
    ends: Tensor


class Span(NamedTuple):
    """The ranges of keys in a cache to which P pieces of sequences attend.

    Attributes:
        sequence: (P,), the index of each piece's sequence.
        first: (P,), the position of each piece's first key in its sequence, leftpad included.
        most: the largest number of keys of a piece.
        step: a divisor of all of `first`, which tells whether they can be starts of blocks.
    """

    sequence: Tensor
    first: Tensor
    most: int
    step: int


def check_chunk(attention_chunk: int) -> None:
    """Raise ValueError if attention_chunk is negative; 0 means that there are no chunks."""
    if attention_chunk < 0:
        raise ValueError(f"attention_chunk must be at least 0, got {attention_chunk}")


def cut_packed(
    cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int, size: int
) -> tuple[Tensor, Tensor, int, int, int]:
    """Cut packed sequences into chunks of `size` keys, each piece a sequence of its own.

    Returns cu_seqlens_q and cu_seqlens_k of the pieces, their largest numbers of queries and keys,
    and the number of pieces of each sequence. Nothing waits for the device: every sequence gets as
    many pieces as the longest may need.
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
    """Cut the queries of sequences in a cache at chunks of `size` keys, each piece a sequence of
    its own.

    Returns cu_seqlens_q of the pieces, the number of keys of each piece (int32, 0 for a piece
    without queries), and the `Span` of those keys. `capacity` is the cache's slots for a sequence.
    """
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
    """Cut each sequence into `count` consecutive chunks of `size` keys, beginning with chunk
    `first`.

    `first`, an int or (B, 1), may be negative, and must not come after the chunk of the first
    query.
    """
    seqlens_q, seqlens_k = cu_seqlens_q.diff().view(-1, 1), seqlens_k.view(-1, 1)
    index = torch.arange(count, dtype=cu_seqlens_q.dtype, device=cu_seqlens_q.device)
    position = (first + index.view(1, -1)) * size
    rows = (position - (seqlens_k - seqlens_q)).clamp(min=0).minimum(seqlens_q)
    edges = torch.cat([(cu_seqlens_q[:-1, None] + rows).flatten(), cu_seqlens_q[-1:]])
    starts, ends = (x.clamp(min=0).minimum(seqlens_k) for x in (position, position + size))
    return Cut(edges.to(cu_seqlens_q.dtype), starts, ends)


def _up(length: int, size: int) -> int:
    return -(-length // size)
