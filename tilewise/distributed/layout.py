"""The layout of a long sequence on ranks, and the keys that a rank's queries see. No communication.

contiguous   N chunks; rank r holds chunk r. With a causal mask the last rank works the most.
zigzag       2 N chunks; rank r holds chunks r and 2 N - 1 - r, so that all see equally many keys.
documents    each document of a packed sequence is divided as zigzag divides the whole, in pieces
             that differ by a token at most. The remainder of a document goes to the ranks after
             those that got the remainder of the document before, so that all hold equally many.

Zigzag balances the work of one document, but not of several: a long one in the first half gives
rank N - 1 the queries at its end, and no rank others to make up for them. Dividing each document
balances every one of them, but cuts short ones into pieces of less than a kernel's tile:
`choose_layout` counts tiles.

A call of attention takes the queries of one piece and the keys of another. Its masks are aligned at
the bottom right, so rows that see nothing are cut off until that alignment can express the rest:
`span`. Pieces of many documents are runs of one packed call.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "LAYOUTS",
    "Call",
    "Piece",
    "Run",
    "Span",
    "calls_of",
    "choose_layout",
    "chunks_of",
    "num_chunks",
    "order_of",
    "pieces_of",
    "shard_sequence",
    "span",
    "whole_calls_of",
    "work_of",
]

LAYOUTS = ("zigzag", "contiguous", "documents")
TILE = 128  # rows of a tile of the kernels, to which `work_of` rounds up
Bound = int | None  # a side of a window; None is unlimited


def num_chunks(size: int, layout: str) -> int:
    """Return the number of chunks into which `layout` cuts a sequence for `size` ranks: 2 size with
    "zigzag", else size.

    Raises:
        ValueError: the layout is not known.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    return 2 * size if layout == "zigzag" else size


def layout_rule(layout: str, edges: Sequence[int] | None) -> str | None:
    """Return why `layout` cannot be used, as the text of an error; None if it can.

    An unknown name is refused, and "documents" for a sequence without edges.
    """
    if layout not in LAYOUTS:
        return f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}"
    if layout == "documents" and edges is None:
        return "layout must be zigzag or contiguous without cu_seqlens, got 'documents'"
    return None


def chunks_of(rank: int, size: int, layout: str) -> tuple[int, ...]:
    """Return the indices of the chunks of the sequence that a rank holds, in the order of its
    memory.

    Args:
        rank, size: the rank and the number of ranks.
        layout: "zigzag" gives a rank two chunks, r and 2 N - 1 - r; others give chunk r.
    """
    count = num_chunks(size, layout)
    return (rank, count - 1 - rank) if layout == "zigzag" else (rank,)


def shard_sequence(
    x: Tensor,
    rank: int,
    size: int,
    *,
    dim: int = 1,
    layout: str = "zigzag",
    cu_seqlens: Sequence[int] | Tensor | None = None,
) -> Tensor:
    """Return the part of `x` that a rank holds.

    Args:
        x: any tensor, the same on every rank; its `dim` is cut. Positions are cut alike:
            `shard_sequence(torch.arange(T), rank, size, dim=0, ...)`.
        rank, size: the rank, and the number of ranks.
        dim: the dimension of the sequence: 1 of (B, S, H, D), 0 of packed (T, H, D).
        layout: the name, "zigzag", "contiguous" or "documents".
        cu_seqlens: the edges of documents, ascending from 0 to the length of `dim`; required for
            "documents" and without effect on the others.

    Raises:
        ValueError: the dim is no multiple of the number of chunks (of the ranks with "documents"),
            or cu_seqlens is missing or does not cover it.

    Example:
        >>> q, k, v = (shard_sequence(t, rank, size) for t in (q, k, v))
    """
    if layout == "documents":
        return _shard_documents(x, rank, size, dim, cu_seqlens)
    count = num_chunks(size, layout)
    if x.shape[dim] % count:
        raise ValueError(
            f"the sequence must be a multiple of {count} chunks for {size} ranks ({layout}), "
            f"got {x.shape[dim]}"
        )
    chunks = x.chunk(count, dim)
    return torch.cat([chunks[i] for i in chunks_of(rank, size, layout)], dim)


def _shard_documents(
    x: Tensor, rank: int, size: int, dim: int, cu_seqlens: Sequence[int] | Tensor | None
) -> Tensor:
    tokens = x.shape[dim]
    if cu_seqlens is None:
        raise ValueError("cu_seqlens must be given for the layout documents, got None")
    edges = edges_of(cu_seqlens)
    refusal = edges_rule(edges, tokens)
    if refusal is not None:
        raise ValueError(refusal)
    if tokens % size:
        raise ValueError(
            f"the sequence must be a multiple of {size} for {size} ranks (documents), got {tokens}"
        )
    pieces = pieces_of(rank, size, layout="documents", edges=edges)
    return torch.cat([x.narrow(dim, p.first, p.last - p.first) for p in pieces], dim)


def edges_of(cu_seqlens: Sequence[int] | Tensor) -> tuple[int, ...]:
    """Return the edges of documents as ints; waits for a tensor on a GPU."""
    listed = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else cu_seqlens
    return tuple(int(edge) for edge in listed)


def edges_rule(edges: Sequence[int], tokens: int) -> str | None:
    """Return why `edges` do not ascend from 0 to `tokens`, as the text of an error; None if they
    do."""
    is_covering = len(edges) >= 2 and edges[0] == 0 and edges[-1] == tokens
    if is_covering and all(a <= b for a, b in pairwise(edges)):
        return None
    return (
        f"cu_seqlens must ascend from 0 to the {tokens} tokens of all ranks, "
        f"got {list(edges[:4])} ... {edges[-1] if edges else None}"
    )


class Piece(NamedTuple):
    """Consecutive tokens of one document on a rank.

    Attributes:
        document: the number of the document.
        first, last: the range of positions in the whole sequence, the last not included.
        place: the index of the first token among the rank's rows.
    """

    document: int
    first: int
    last: int
    place: int

    @property
    def end(self) -> int:
        """The index after the piece's last token among the rank's rows."""
        return self.place + self.last - self.first


def pieces_of(rank: int, size: int, *, layout: str, edges: tuple[int, ...]) -> tuple[Piece, ...]:
    """Return a rank's pieces of the documents, in the order of positions, which is that of rows.

    Args:
        rank, size: the rank, and the number of ranks.
        layout: the layout, see LAYOUTS.
        edges: the edges of documents in the whole sequence; empty ones have no piece.
    """
    return _all_pieces(size, layout, edges)[rank]


@lru_cache(maxsize=16)
def _all_pieces(size: int, layout: str, edges: tuple[int, ...]) -> list[tuple[Piece, ...]]:
    pieces: list[list[Piece]] = [[] for _ in range(size)]
    runs = _dealt(size, edges) if layout == "documents" else _cut(size, layout, edges)
    for rank, document, first, last in runs:
        own = pieces[rank]
        if own and own[-1].document == document and own[-1].last == first:
            own[-1] = own[-1]._replace(last=last)  # the middle of a zigzag
        else:
            own.append(Piece(document, first, last, own[-1].end if own else 0))
    return [tuple(own) for own in pieces]


def _cut(size: int, layout: str, edges: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Cut the whole sequence in equal chunks, zigzag or contiguous, and these at the edges of
    documents.

    Returns (rank, document, first, last) of each run, in the order of positions; `last` is not
    included.
    """
    count = num_chunks(size, layout)
    chunk = edges[-1] // count
    rank_of = {c: rank for rank in range(size) for c in chunks_of(rank, size, layout)}
    runs, document = [], 0
    for c in range(count):
        first = c * chunk
        while first < (c + 1) * chunk:
            while edges[document + 1] <= first:
                document += 1
            last = min(edges[document + 1], (c + 1) * chunk)
            runs.append((rank_of[c], document, first, last))
            first = last
    return runs


def _dealt(size: int, edges: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Divide each document in 2 size pieces, which the ranks get as by zigzag; remainders go to the
    ranks in turn.

    Returns (rank, document, first, last) of each piece that is not empty, in the order of
    positions; `last` is not included.
    """
    count, turn, runs = 2 * size, 0, []
    for document, (first, end) in enumerate(pairwise(edges)):
        least, more = divmod(end - first, count)
        lengths = [least] * count
        for i in range(more):  # one to each rank, then a second one
            rank = (turn + i) % size
            lengths[count - 1 - rank if i < size else rank] += 1
        turn = (turn + more) % size
        for c, length in enumerate(lengths):
            if length:
                runs.append((min(c, count - 1 - c), document, first, first + length))
                first += length
    return runs


def work_of(
    rank: int, size: int, *, layout: str, left: Bound, right: Bound, edges: tuple[int, ...]
) -> int:
    """Return an estimate of the pairs of queries and keys that a rank computes, rows rounded up to
    tiles.

    Each piece's rows count as many keys as its middle row sees.

    Args:
        rank, size, layout, edges: as in `pieces_of`.
        left, right: the window over positions; None is unlimited.
    """
    work = 0
    for piece in pieces_of(rank, size, layout=layout, edges=edges):
        begin, end = edges[piece.document : piece.document + 2]
        rows, middle = piece.last - piece.first, (piece.first + piece.last) // 2
        low = begin if left is None else max(begin, middle - left)
        high = end if right is None else min(end, middle + right + 1)
        work += -(-rows // TILE) * TILE * (high - low)
    return work


def choose_layout(
    cu_seqlens: Sequence[int] | Tensor,
    size: int,
    *,
    causal: bool = True,
    window: int | tuple[int | None, int | None] | None = None,
) -> str:
    """Return the layout, "zigzag" or "documents", whose busiest rank computes fewer tiles.

    Args:
        cu_seqlens: the edges of documents in the whole packed sequence.
        size: the number of ranks.
        causal, window: the arguments of the attention.

    Raises:
        ValueError: cu_seqlens does not ascend from 0, or neither layout divides it.

    Source: Wang et al. 2025 (WLB-LLM) for weighing cuts of documents against cuts of the whole.

    Example:
        >>> choose_layout([0, 6000, 6100, 8192], 4)
        'documents'
    """
    edges = edges_of(cu_seqlens)
    refusal = edges_rule(edges, edges[-1] if edges else 0)
    if refusal is not None:
        raise ValueError(refusal)
    if edges[-1] % size:
        raise ValueError(f"cu_seqlens must end at a multiple of {size} ranks, got {edges[-1]}")
    left, right = bounds(causal, window)
    fitting = ["zigzag", "documents"] if edges[-1] % (2 * size) == 0 else ["documents"]
    return min(
        fitting,
        key=lambda layout: max(
            work_of(rank, size, layout=layout, left=left, right=right, edges=edges)
            for rank in range(size)
        ),
    )


def bounds(causal: bool, window: int | tuple[int | None, int | None] | None) -> tuple[Bound, Bound]:
    """Return how many keys a query sees to the left and to the right, without its own; None is
    unlimited.

    An int window w, as `attention` takes it, gives (w - 1, 0); -1 in a pair is None; causal sets
    right to 0.
    """
    if isinstance(window, int):
        return window - 1, 0
    left, right = (None, None) if window is None else window
    left, right = (None if bound in (None, -1) else bound for bound in (left, right))
    return left, 0 if causal else right


def order_of(tokens: int, size: int, layout: str, edges: tuple[int, ...] | None) -> Tensor:
    """Return the position in the sequence of each token in the concatenation of all ranks' parts.

    The order is int64 (tokens,): entry j is the position in the sequence of the j-th token of the
    concatenation, so that the concatenation is whole[order].

    Args:
        size: the number of ranks.
        layout: the order of tokens on ranks, one of LAYOUTS.
        edges: the edges of packed sequences, each of which is split over all ranks; None for one.
    """
    edges = edges or (0, tokens)
    pieces = [p for own in _all_pieces(size, layout, edges) for p in own]
    runs = [torch.arange(piece.first, piece.last) for piece in pieces]
    return torch.cat(runs) if runs else torch.empty(0, dtype=torch.int64)


class Span(NamedTuple):
    """Rows [q_first, q_last) of a chunk's queries and rows [k_first, k_last) of a chunk's keys,
    which one call of `attention` takes.

    Attributes:
        left, right: the window of that call, relative to the last row and the last key; None is
            unlimited.
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
    """Return the rows of a run of queries that see any key of a run of keys, and these keys, as a
    Span.

    None if no pair is visible.

    The query at position p sees the keys at p - left ... p + right.

    Args:
        q_start, num_q: the first position and the number of the queries.
        k_start, num_k: the first position and the number of the keys.
        left, right: the window; None is unlimited.
    """
    q_end, k_end = q_start + num_q, k_start + num_k
    first, last = q_start, q_end  # the queries that see a key
    if right is not None:
        first = max(first, k_start - right)
    if left is not None:
        last = min(last, k_end + left)
    if first >= last or num_k == 0:
        return None
    low = k_start if left is None else max(k_start, first - left)
    high = k_end if right is None else min(k_end, last + right)
    # The window relative to the last query and the last key: both sides are at least 0, as each of
    # the two sees the other's nearest neighbour.
    rows, keys, offset = last - first, high - low, last - high
    new_left = None if left is None else left - offset
    new_right = None if right is None else right + offset
    if new_left is not None and new_left >= keys - 1:
        new_left = None
    if new_right is not None and new_right >= rows - 1:
        new_right = None
    return Span(first - q_start, last - q_start, low - k_start, high - k_start, new_left, new_right)


class Run(NamedTuple):
    """Rows [q_first, q_last) of queries that attend to the rows [k_first, k_last) of keys."""

    q_first: int
    q_last: int
    k_first: int
    k_last: int


class Call(NamedTuple):
    """One call of attention: rows of this rank's queries, and rows of keys as the rank that has
    them, or the whole sequence, counts them.

    Attributes:
        rows: the range of the queries' rows, the last not included; with runs the range that
            contains them.
        keys: the range of the keys' rows, likewise.
        left, right: the window of `attention`, aligned to the last query and key; None is
            unlimited.
        runs: the runs of a packed call, in the order of the queries; no query is in two of them.
            None if all rows are one run.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    left: Bound
    right: Bound
    runs: tuple[Run, ...] | None = None


def calls_of(
    rank: int,
    source: int,
    size: int,
    chunk: int,
    *,
    layout: str,
    left: Bound,
    right: Bound,
    edges: tuple[int, ...] | None,
) -> list[Call]:
    """Return the calls by which a rank's queries attend to the keys of the rank `source`.

    Args:
        rank, source, size: the rank of the queries, the rank of the keys, and the number of ranks.
        chunk: the tokens of a chunk; unused with edges.
        layout: the layout, see LAYOUTS.
        left, right: the window over positions; None is unlimited.
        edges: the edges of documents in the whole sequence; None for one document.
    """
    if edges is not None:
        return _packed_calls(rank, source, size, layout, left, right, edges)
    ours, theirs = chunks_of(rank, size, layout), chunks_of(source, size, layout)
    if rank == source and left is None and right in (None, 0):
        whole = (0, chunk * len(ours))  # consecutive chunks see one another as one sequence does
        return [Call(whole, whole, left, right)]
    calls = []
    for i, mine in enumerate(ours):
        for j, other in enumerate(theirs):
            found = span(mine * chunk, chunk, other * chunk, chunk, left, right)
            if found is not None:
                rows = (i * chunk + found.q_first, i * chunk + found.q_last)
                keys = (j * chunk + found.k_first, j * chunk + found.k_last)
                calls.append(Call(rows, keys, found.left, found.right))
    return _joined(calls)


def _packed_calls(
    rank: int,
    source: int,
    size: int,
    layout: str,
    left: Bound,
    right: Bound,
    edges: tuple[int, ...],
) -> list[Call]:
    theirs = _by_document(pieces_of(source, size, layout=layout, edges=edges))
    found = []
    for document, mine in _by_document(pieces_of(rank, size, layout=layout, edges=edges)).items():
        others = theirs.get(document, [])
        if others:
            found.append(_calls_of_document(mine, others, left, right))
    return _packed(found)


def _by_document(pieces: Sequence[Piece]) -> dict[int, list[Piece]]:
    found: dict[int, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.document, []).append(piece)
    return found


def _calls_of_document(
    mine: list[Piece], others: list[Piece], left: Bound, right: Bound
) -> list[Call]:
    """Return the calls in which one rank's pieces of a document attend to another rank's pieces.

    Args:
        mine: the pieces with the queries.
        others: the pieces with the keys.
        left, right: the window over positions; None for no bound.
    """
    if mine == others and left is None and right in (None, 0):
        # consecutive pieces see one another as the whole does
        whole = (mine[0].place, mine[-1].end)
        return [Call(whole, whole, left, right)]
    calls = []
    for own in mine:
        for other in others:
            seen = span(
                own.first, own.last - own.first, other.first, other.last - other.first, left, right
            )
            if seen is None:
                continue
            rows = (own.place + seen.q_first, own.place + seen.q_last)
            keys = (other.place + seen.k_first, other.place + seen.k_last)
            # Bounds that a short piece does not need are kept, so that it can share the others'
            # call.
            kept = (left, right) if own == other else (seen.left, seen.right)
            calls.append(Call(rows, keys, *kept))
    return _joined(calls)


def _packed(documents: Sequence[Sequence[Call]]) -> list[Call]:
    """Join calls of several documents whose windows are equal into packed calls, and return these.

    A packed call has at most one run of each document, so that none of its query or key rows occurs
    twice.
    """
    packed: dict[tuple[Bound, Bound, int], list[Run]] = {}
    for calls in documents:
        count: dict[tuple[Bound, Bound], int] = {}
        for call in calls:
            bound = call.left, call.right
            turn = count[bound] = count.get(bound, -1) + 1
            packed.setdefault((*bound, turn), []).append(Run(*call.rows, *call.keys))
    return [_call(left, right, runs) for (left, right, _), runs in packed.items()]


def _call(left: Bound, right: Bound, runs: Sequence[Run]) -> Call:
    rows = min(run.q_first for run in runs), max(run.q_last for run in runs)
    keys = min(run.k_first for run in runs), max(run.k_last for run in runs)
    return Call(rows, keys, left, right, None if len(runs) == 1 else tuple(runs))


def whole_calls_of(
    rank: int, size: int, *, layout: str, left: Bound, right: Bound, edges: tuple[int, ...]
) -> list[Call]:
    """Return the calls by which a rank's queries attend to the keys of all ranks.

    Every query is in one run of one call. Keys are counted by their position in the whole sequence;
    a key may be in the runs of both pieces that a rank has of a document.

    Args:
        rank, size, layout, edges: as in `pieces_of`.
        left, right: the window over positions; None is unlimited.
    """
    calls: dict[tuple[Bound, Bound], list[Run]] = {}
    for document, mine in _by_document(pieces_of(rank, size, layout=layout, edges=edges)).items():
        begin, end = edges[document : document + 2]
        if left is None and right is None:
            run = Run(mine[0].place, mine[-1].end, begin, end)
            calls.setdefault((None, None), []).append(run)
            continue
        for piece in mine:
            low = begin if left is None else max(begin, piece.first - left)
            high = end if right is None else min(end, piece.last + right)
            offset = high - piece.last  # relative to the last query and the last key
            new_left = None if left is None else left + offset
            new_right = None if right is None else right - offset
            if right is None and new_left is not None and new_left >= high - low - 1:
                new_left = None
            run = Run(piece.place, piece.end, low, high)
            calls.setdefault((new_left, new_right), []).append(run)
    return [_call(*bound, runs) for bound, runs in calls.items()]


def _joined(calls: list[Call]) -> list[Call]:
    """Return the calls with adjacent ones joined, if they have no window and share their rows or
    their keys."""
    joined: list[Call] = []
    for call in calls:
        for place, other in enumerate(joined):
            if any((c.left, c.right) != (None, None) for c in (call, other)):
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
