"""Which tokens of a long sequence a rank holds, and which keys its queries see. No communication.

contiguous   N chunks; rank r holds chunk r. With a causal mask the last rank works the most.
zigzag       2 N chunks; rank r holds chunks r and 2 N - 1 - r, so that all see equally many keys.

A call of attention takes rows of one chunk's queries and of another's keys. Masks are aligned at
the bottom right there, so rows that see nothing are cut off until the alignment can express what is
left: `span`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "LAYOUTS",
    "Call",
    "Span",
    "calls_of",
    "chunks_of",
    "num_chunks",
    "shard_sequence",
    "span",
]

LAYOUTS = ("zigzag", "contiguous")
Bound = int | None  # of a window; None is unlimited


def num_chunks(size: int, layout: str) -> int:
    """Return how many chunks a sequence is cut into.

    Raises:
        ValueError: the layout is not known.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return 2 * size if layout == "zigzag" else size


def chunks_of(rank: int, size: int, layout: str) -> tuple[int, ...]:
    """Return the chunks that a rank holds, in the order in which they lie there."""
    count = num_chunks(size, layout)
    return (rank, count - 1 - rank) if layout == "zigzag" else (rank,)


def shard_sequence(
    x: Tensor, rank: int, size: int, *, dim: int = 1, layout: str = "zigzag"
) -> Tensor:
    """Return the part of `x` that a rank holds.

    Args:
        x: any tensor, the same on every rank; its `dim` is cut.
        rank, size: which of how many.
        dim: of the sequence: 1 of (B, S, H, D), 0 of packed (T, H, D).
        layout: "zigzag" or "contiguous".

    Raises:
        ValueError: the dim is no multiple of the number of chunks.

    Example:
        >>> q, k, v = (shard_sequence(t, rank, size) for t in (q, k, v))
    """
    count = num_chunks(size, layout)
    if x.shape[dim] % count:
        raise ValueError(
            f"the sequence must be a multiple of {count} chunks for {size} ranks ({layout}), "
            f"got {x.shape[dim]}"
        )
    chunks = x.chunk(count, dim)
    return torch.cat([chunks[i] for i in chunks_of(rank, size, layout)], dim)


class Span(NamedTuple):
    """Rows [q_first, q_last) of a chunk's queries and [k_first, k_last) of a chunk's keys.

    Attributes:
        left, right: what `attention` takes as window for them.
    """

    q_first: int
    q_last: int
    k_first: int
    k_last: int
    left: Bound
    right: Bound


def span(
    q_start: int, num_q: int, k_start: int, num_k: int, left: Bound, right: Bound
) -> Span | None:
    """Return what a run of queries sees of a run of keys; None if nothing.

    The query at position p sees the keys at p - left ... p + right.

    Args:
        q_start, num_q: positions of the queries.
        k_start, num_k: positions of the keys.
        left, right: of the window; None is unlimited.
    """
    q_end, k_end = q_start + num_q, k_start + num_k
    first, last = q_start, q_end  # of the queries that see a key
    if right is not None:
        first = max(first, k_start - right)
    if left is not None:
        last = min(last, k_end + left)
    if first >= last or num_k == 0:
        return None
    low = k_start if left is None else max(k_start, first - left)
    high = k_end if right is None else min(k_end, last + right)
    # Of the last query and the last key, what is left of the window: both are 0 or more, as each
    # sees the other's nearest.
    rows, keys, offset = last - first, high - low, last - high
    new_left = None if left is None else left - offset
    new_right = None if right is None else right + offset
    if new_left is not None and new_left >= keys - 1:
        new_left = None
    if new_right is not None and new_right >= rows - 1:
        new_right = None
    return Span(first - q_start, last - q_start, low - k_start, high - k_start, new_left, new_right)


class Call(NamedTuple):
    """One call of attention: local rows of queries, rows of keys as their rank holds them.

    Attributes:
        rows: the queries.
        keys: the keys.
        left, right: what `attention` takes as window.
        edges: where documents begin and end among the rows, which are also the keys'; None for one.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    left: Bound
    right: Bound
    edges: tuple[int, ...] | None = None


def calls_of(
    rank: int,
    source: int,
    size: int,
    chunk: int,
    *,
    layout: str,
    left: Bound,
    right: Bound,
    edges: Sequence[int] | None,
) -> list[Call]:
    """Return the calls by which a rank's queries attend to the keys of the rank `source`.

    Args:
        rank, source, size: which of how many.
        chunk: tokens of a chunk.
        layout: see LAYOUTS.
        left, right: the window over positions; None is unlimited.
        edges: where documents begin and end in the whole sequence; None is one document.
    """
    ours, theirs = chunks_of(rank, size, layout), chunks_of(source, size, layout)
    if rank == source and edges is None and left is None and right in (None, 0):
        whole = (0, chunk * len(ours))  # chunks in order see one another as one sequence does
        return [Call(whole, whole, left, right)]
    calls = []
    for i, mine in enumerate(ours):
        for j, other in enumerate(theirs):
            places = i * chunk, j * chunk
            if mine == other and edges is not None:
                calls.append(_own_documents(places[0], mine, chunk, edges, left, right))
                continue
            found = _across(mine, other, chunk, edges, left, right)
            if found is not None:
                rows = (places[0] + found.q_first, places[0] + found.q_last)
                keys = (places[1] + found.k_first, places[1] + found.k_last)
                calls.append(Call(rows, keys, found.left, found.right))
    return _joined(calls)


def _own_documents(
    place: int, number: int, chunk: int, edges: Sequence[int], left: Bound, right: Bound
) -> Call:
    """Return the call of a chunk with itself."""
    first, last = number * chunk, (number + 1) * chunk
    inner = {min(max(edge, first), last) - first for edge in edges}
    rows = (place, place + chunk)
    return Call(rows, rows, left, right, tuple(sorted(inner | {0, chunk})))


def _across(
    mine: int, other: int, chunk: int, edges: Sequence[int] | None, left: Bound, right: Bound
) -> Span | None:
    """Return what a chunk sees of another: of the one document at most that is in both."""
    q_first, k_first = mine * chunk, other * chunk
    q_last, k_last = q_first + chunk, k_first + chunk
    if edges is not None:
        inside = max(q_first, k_first)  # every document in both has this position
        begin = max((edge for edge in edges if edge <= inside), default=0)
        end = min((edge for edge in edges if edge > inside), default=inside + chunk)
        low, high = (q_first, q_last), (k_first, k_last)
        q_first, q_last = max(low[0], begin), min(low[1], end)
        k_first, k_last = max(high[0], begin), min(high[1], end)
        if q_first >= q_last or k_first >= k_last:
            return None
    found = span(q_first, q_last - q_first, k_first, k_last - k_first, left, right)
    if found is None:
        return None
    more_q, more_k = q_first - mine * chunk, k_first - other * chunk
    return found._replace(
        q_first=found.q_first + more_q,
        q_last=found.q_last + more_q,
        k_first=found.k_first + more_k,
        k_last=found.k_last + more_k,
    )


def _joined(calls: list[Call]) -> list[Call]:
    """Join calls without bounds that share their rows or their keys and lie side by side."""
    joined: list[Call] = []
    for call in calls:
        for place, other in enumerate(joined):
            if any((c.left, c.right, c.edges) != (None, None, None) for c in (call, other)):
                continue
            if other.keys == call.keys and other.rows[1] == call.rows[0]:
                joined[place] = other._replace(rows=(other.rows[0], call.rows[1]))
                break
            if other.rows == call.rows and other.keys[1] == call.keys[0]:
                joined[place] = other._replace(keys=(other.keys[0], call.keys[1]))
                break
        else:
            joined.append(call)
    return joined
