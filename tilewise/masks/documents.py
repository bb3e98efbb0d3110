"""Documents packed end to end into the rows of a dense batch; each token sees its document only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tilewise.masks import arguments, tile_map
from tilewise.masks.arguments import Device, Tile
from tilewise.masks.block_mask import BlockMask, from_tile_map
from tilewise.masks.eager import eager
from tilewise.masks.tile_map import EMPTY, FULL, BitTiles, TileMap


@eager
def document(
    lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
    *,
    ids: Tensor | Sequence[int] | None = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    seqlen: int | None = None,
    tile: Tile = 128,
    device: Device = None,
) -> BlockMask:
    """Let query i see key j when both are of one document: doc[b, i] = doc[b, j].

    The documents are packed end to end into rows of a dense batch; with `& causal(S)` it is a
    language model's mask. Give exactly one of the first three arguments.

    Args:
        lengths: the number of tokens of each document (n,), or such a list for each of B rows.
        ids: (S,) or (B, S) integers, the document of each token; a negative id is padding, which
            sees nothing and is not seen.
        cu_seqlens: (n + 1,) integers, the start of each document and the end of the last, as in
            `attention_varlen`.
        seqlen: S; tokens after the documents of `lengths` or `cu_seqlens` are padding. The longest
            row when None.
        device: the device of the mask's tensors; that of the given tensor or torch's default when
            None.

    The other arguments as in `from_distance`.

    Returns:
        A mask of shape (1, 1, S, S), or (B, 1, S, S) for B rows.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Example:
        >>> mask = causal(4096) & document([1000, 3000, 96])
    """
    tile = arguments.check_tile(tile)
    if sum(given is not None for given in (lengths, ids, cu_seqlens)) != 1:
        raise ValueError("document must be given exactly one of lengths, ids and cu_seqlens")
    if ids is not None:
        documents = arguments.check_integers("ids", ids, 2)
        if seqlen not in (None, documents.shape[1]):
            raise ValueError(f"seqlen must be None or the length of ids, got {seqlen}")
    else:
        documents = _document_ids(_document_lengths(lengths, cu_seqlens), seqlen)
    raw = _by_document(documents, tile)
    return from_tile_map(raw, arguments.home(device, lengths, ids, cu_seqlens))


def _by_document(documents: NDArray[np.int64], tile: tuple[int, int]) -> TileMap:
    """Return the tile map of the rule doc[b, i] = doc[b, j] for ids (B, S), where negative ids see
    nothing; the least and largest id of a tile's queries and keys decide most tiles."""
    batch, seqlen = documents.shape
    shape = (batch, 1, seqlen, seqlen)
    # Padding belongs to no document, so padded queries and keys get different ids.
    queries, keys = (
        np.full((batch, count * length), padding)
        for count, length, padding in zip(
            tile_map.tiles_of(shape, tile), tile, (-1, -2), strict=True
        )
    )
    queries[:, :seqlen] = np.where(documents < 0, -1, documents)
    keys[:, :seqlen] = np.where(documents < 0, -2, documents)
    of_rows = queries.reshape(batch, -1, tile[0]) if seqlen else queries.reshape(batch, 0, tile[0])
    of_columns = keys.reshape(batch, -1, tile[1]) if seqlen else keys.reshape(batch, 0, tile[1])
    low_q, high_q = of_rows.min(-1)[:, :, None], of_rows.max(-1)[:, :, None]
    low_k, high_k = of_columns.min(-1)[:, None], of_columns.max(-1)[:, None]
    apart = (low_q > high_k) | (low_k > high_q)
    one = (low_q == high_k) & (low_k == high_q)  # since low <= high, all four are equal
    numbers = np.where(one, FULL, EMPTY).astype(np.int32)
    b, r, c = np.nonzero(~(apart | one))
    store = BitTiles(tile)
    numbers[b, r, c] = store.add_made(
        len(b),
        lambda s: tile_map.pack(
            of_rows[b[s], r[s]][:, :, None] == of_columns[b[s], c[s]][:, None, :]
        ),
    )
    return TileMap(shape, tile, numbers[:, None], store.bits())


def _document_lengths(lengths: Any, cu_seqlens: Any) -> list[NDArray[np.int64]]:
    """Return the document lengths of each row, from `lengths` (flat or nested) or from the edges
    `cu_seqlens`, which give one row; raise ValueError for negative lengths and falling edges."""
    if cu_seqlens is not None:
        ends = arguments.check_integers("cu_seqlens", cu_seqlens, 1)
        if len(ends) == 0 or ends[0] != 0 or (np.diff(ends) < 0).any():
            raise ValueError(f"cu_seqlens must start at 0 and never decrease, got {ends.tolist()}")
        return [np.diff(ends)]
    listed = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    nested = any(isinstance(row, (Sequence, Tensor, np.ndarray)) for row in listed)
    rows = [arguments.check_integers("lengths", row, 1) for row in (listed if nested else [listed])]
    for row in rows:
        if (row < 0).any():
            raise ValueError(f"lengths must be at least 0, got {row.tolist()}")
    return rows


def _document_ids(rows: list[NDArray[np.int64]], seqlen: int | None) -> NDArray[np.int64]:
    """Return int64 (rows, S), the number of each token's document in its row, -1 after the last
    document; S is `seqlen`, or the longest row when None. Raise ValueError if a row is longer."""
    longest = max(int(row.sum()) for row in rows)
    total = longest if seqlen is None else arguments.check_count("seqlen", seqlen)
    if longest > total:
        raise ValueError(f"seqlen must be at least the documents' {longest} tokens, got {total}")
    documents = np.full((len(rows), total), -1)
    for ids, row in zip(documents, rows, strict=True):
        ids[: row.sum()] = np.repeat(np.arange(len(row)), row)
    return documents
