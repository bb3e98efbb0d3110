"""Refuse slots and blocks of a call that lie outside of the cache, before it is touched.

What      the first id that lies outside: a write there would abort the process, later, elsewhere.
Grid      one thread, before the call's own kernel.
One call  all slots of a step, or the blocks that a sequence's new rows can see.
Traffic   8 bytes a new token, or 4 bytes a block.
Numerics  integers.
"""

from __future__ import annotations

import numpy as np
from numba import types
from torch import Tensor

from tilewise.kernels.cpu.machine.threads import kernel
from tilewise.kernels.cpu.visible import first_seen


def slots_of(slot_mapping: Tensor, cache: Tensor) -> np.ndarray:
    """Return slot_mapping as an int64 (T,) array after a check that all slots lie in the cache (N,
    P, ...); -1 for a row that is skipped is allowed.

    Raises:
        ValueError: a slot lies outside of the cache.
    """
    slots = slot_mapping.contiguous().numpy()
    check_ids("slot_mapping", slots, -1, cache.shape[0] * cache.shape[1] - 1)
    return slots


def pairs_of(block_pairs: Tensor, cache: Tensor) -> np.ndarray:
    """Return block_pairs as an int64 (n, 2) array after a check that all blocks lie in the cache
    (N, P, ...).

    Raises:
        ValueError: a block lies outside of the cache.
    """
    pairs = block_pairs.contiguous().numpy()
    check_ids("block_pairs", pairs, 0, cache.shape[0] - 1)
    return pairs


def check_table(
    table: np.ndarray, edges: np.ndarray, lengths: np.ndarray, cache: Tensor, window_left: int
) -> None:
    """Refuse a block table that refers outside of a cache (N, P, ...) in an entry that a new row
    reads.

    Args:
        table: int32 (B, max_blocks); entries that no new row can see are arbitrary.
        edges, lengths: cu_seqlens_q and seqlens_k, which were checked.
        window_left: the keys before its own that a row sees; -1 for all.

    Raises:
        ValueError: a block that is to be read lies outside of the cache.
    """
    place = _stray_block(table, edges, lengths, cache.shape[1], cache.shape[0], window_left)
    if place >= 0:
        sequence, column = divmod(place, table.shape[1])
        raise ValueError(
            f"block_table must hold blocks in [0, {cache.shape[0] - 1}], got "
            f"{table[sequence, column]} as block {column} of sequence {sequence}"
        )


def check_ids(name: str, ids: np.ndarray, least: int, most: int) -> None:
    """Refuse ids, an array of any shape, of which one lies outside of [least, most].

    Raises:
        ValueError: an id lies outside; the message shows the first, and `name`.
    """
    flat = ids.reshape(-1)
    place = _stray(flat, least, most)
    if place >= 0:
        raise ValueError(f"{name} must lie in [{least}, {most}], got {flat[place]}")


@kernel
def _stray(ids, least, most):
    """Return the index of the first id outside of [least, most], -1 if none is."""
    for place in range(len(ids)):
        if ids[place] < least or ids[place] > most:
            return place
    return -1


@kernel
def _stray_block(table, edges, lengths, block_size, num_blocks, window_left):
    """Return the flat index of the first entry of a block table that is read and invalid, or -1.

    Args:
        table: (B, max_blocks).
        edges, lengths: the first row of each sequence, and its number of keys.
        window_left: keys before a query that it sees, -1 for all; blocks before them are not read.
    """
    for sequence in range(len(lengths)):
        rows = types.int64(edges[sequence + 1]) - edges[sequence]
        if rows <= 0:
            continue
        length = types.int64(lengths[sequence])
        first = first_seen(window_left, rows, length, 0) // block_size
        for column in range(first, (length + block_size - 1) // block_size):
            if table[sequence, column] < 0 or table[sequence, column] >= num_blocks:
                return sequence * table.shape[1] + column
    return -1
