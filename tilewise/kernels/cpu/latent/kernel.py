"""Attention over a paged cache of latents on the CPU: decoding, and runs of several new tokens.

What      o = softmax(scale (q_latent . z + q_rope . k_rope)) z for all heads, and lse; causal among
          the new tokens of a sequence.
Grid      one task per (sequence, split of its keys, block of rows), taken from a counter; a row is
          one new token and head. The splits' results are merged by a second round of tasks.
One task  up to 128 rows, whose sums stay in its L2 cache while its keys pass by in tiles of 128.
Traffic   a latent is read from memory once per block of rows (once in all for one token of 128
          heads), and serves as key and as value. Partial sums are under half of that, in cache.
Numerics  as in `tiles/paged.py`. The splits of keys depend on the lengths and, unless the call is
          batch-invariant, on the batch; never on threads, so neither do the bits of a result.
"""

# ruff: noqa: E741 - m, l, acc, s and p are the names of the papers

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import types

from tilewise.kernels.cpu.latent.tiles import (
    ACC_PAD,
    KEYS,
    PAD,
    gather_keys,
    new_tile,
    score_rows,
    score_tile,
    softmax_tile,
    weigh_exactly,
    weigh_tile,
)
from tilewise.kernels.cpu.machine import amx
from tilewise.kernels.cpu.machine.pack import transpose_tile
from tilewise.kernels.cpu.machine.rows import BF16, load_row, store_row
from tilewise.kernels.cpu.machine.source import Source
from tilewise.kernels.cpu.machine.threads import (
    inner,
    kernel,
    next_task,
    scratch,
    zero_scratch,
)
from tilewise.kernels.cpu.visible import end_seen

# smallest number of keys of a task; 64 rows leave sums a quarter as large as these keys
SPLIT = 512
MAX_SPLITS = 16  # of a sequence in a batch-invariant call
MAX_SPLIT_BLOCKS = 4  # with more blocks of rows the threads are busy without splits of the keys
MERGE_ROWS = 4  # rows of one task of the second round
LOG2_E = math.log2(math.e)

# Columns of `starts`: the addresses of a sequence's first rows, its lengths, and its splits.
Q_LATENT, Q_ROPE, O, ROW, Q_LEN, K_LEN, TASK, BLOCKS, SPLITS, SPLIT_KEYS, SLOT = range(11)


class Sizes(NamedTuple):
    """The shapes, dtype codes, addresses and byte strides of a call over latents, as its kernels
    take them.

    `cache` is the address of the cache, `scale` that of its scales, 0 without scales. lse_head
    counts elements. block_rows is the number of rows (tokens times heads) of a task, split_keys the
    keys of a split, 0 if a sequence's own length decides. scale_log2 turns products into logits in
    base 2.
    """

    num_heads: int
    rank: int
    rope_dim: int
    q_code: int
    cache_code: int
    row_size: int
    q_row: int
    q_head: int
    rope_row: int
    rope_head: int
    o_row: int
    o_head: int
    lse_head: int
    cache: int
    cache_block: int
    cache_row: int
    scale: int
    scale_block: int
    scale_row: int
    block_size: int
    block_rows: int
    split_keys: int
    scale_log2: float
    uses_amx: bool


class Arrays(NamedTuple):
    """The arrays of a call over latents, as its kernels take them.

    like and packed_like are empty arrays of the float type to compute in and of the products'
    operands; starts is (B, 11) int64, see `place_runs`; table the block table. sums, tops and
    totals are the partial results of splits, by slot and row.
    """

    like: np.ndarray
    packed_like: np.ndarray
    starts: np.ndarray
    table: np.ndarray
    sums: np.ndarray
    tops: np.ndarray
    totals: np.ndarray


@kernel
def place_runs(sizes, starts, edges, lengths, q_latent, q_rope, o):
    """Fill in a row of `starts` for each sequence, in place; return the numbers of tasks and of
    slots.

    Args:
        sizes: the call's `Sizes`.
        starts: int64 (B, 11), written: the addresses of a sequence's first rows, its lengths, its
            first task and slot, and the parts into which its keys are split.
        edges: (B + 1,) integers, the first row of each sequence and the end of the last one.
        lengths: (B,) integers, the number of keys of each sequence.
        q_latent, q_rope, o: the addresses of the tensors.

    Returns:
        The number of tasks, and the number of slots: partial results of blocks of rows, for
        sequences of which the keys are split.
    """
    num_tasks = num_slots = 0
    for sequence in range(len(starts)):
        first = types.int64(edges[sequence])
        run, length = types.int64(edges[sequence + 1]) - first, types.int64(lengths[sequence])
        starts[sequence, Q_LATENT] = q_latent + first * sizes.q_row
        starts[sequence, Q_ROPE] = q_rope + first * sizes.rope_row
        starts[sequence, O] = o + first * sizes.o_row
        starts[sequence, ROW] = first
        starts[sequence, Q_LEN], starts[sequence, K_LEN] = run, length
        blocks = (run * sizes.num_heads + sizes.block_rows - 1) // sizes.block_rows
        keys = sizes.split_keys
        if keys == 0:
            keys = max((length + MAX_SPLITS - 1) // MAX_SPLITS, SPLIT)
        keys = (keys + KEYS - 1) // KEYS * KEYS
        splits = 1
        if blocks <= MAX_SPLIT_BLOCKS:
            splits = max((length + keys - 1) // keys, 1)
        starts[sequence, SPLIT_KEYS] = keys
        starts[sequence, TASK], starts[sequence, SLOT] = num_tasks, num_slots
        starts[sequence, BLOCKS], starts[sequence, SPLITS] = blocks, splits
        num_tasks += blocks * splits
        num_slots += blocks * splits if splits > 1 else 0
    return num_tasks, num_slots


@inner
def _load_queries(sizes, like, starts, sequence, first_row, num_rows, q, ld):
    """Load query rows of a sequence into scratch, each as its latent part followed by its rotated
    part.

    Args:
        first_row, num_rows: the rows, counted over tokens and heads.
        q, ld: the scratch, and the elements of a row in it.
    """
    for row in range(num_rows):
        token = (first_row + row) // sizes.num_heads
        head = (first_row + row) % sizes.num_heads
        address = starts[sequence, Q_LATENT] + token * sizes.q_row + head * sizes.q_head
        load_row(like, sizes.q_code, q, row * ld, address, sizes.rank)
        address = starts[sequence, Q_ROPE] + token * sizes.rope_row + head * sizes.rope_head
        load_row(like, sizes.q_code, q, row * ld + sizes.rank, address, sizes.rope_dim)


@inner
def _attend_block(
    sizes, arrays, sequence, first_row, num_rows, rows, first, last, tile, q, acc, ai, ld, ldv
):
    """Sum up the attention of a block of rows to keys first ... last - 1 of one sequence.

    A row is one new token and head; a token sees no key after its own position. The function
    overwrites acc with the sums of weighted values, not yet divided, tile.m with the largest logit
    of each row, and tile.l with the sum of each row's weights.

    Args:
        sizes, arrays: the call's `Sizes` and `Arrays`.
        sequence: the number of the sequence.
        first_row, num_rows, rows: the block's first row in the sequence, the number of its rows,
            and this number padded to a multiple of PAD.
        first, last: the first key, and the end of the keys.
        tile: the thread's scratch for a tile of keys.
        q: scratch, into which the function loads the queries.
        acc, ai: the array of sums, and the index in it of the block's first sum; each row has ldv +
            ACC_PAD elements.
        ld, ldv: the channels of a key and of a value, padded to a multiple of 32.
    """
    like, starts = arrays.like, arrays.starts
    _load_queries(sizes, like, starts, sequence, first_row, num_rows, q, ld)
    transpose_tile(like, q, rows, ld, tile.q)
    acc[ai : ai + rows * (ldv + ACC_PAD)] = 0
    tile.m[:] = -math.inf
    tile.l[:] = 0
    q_len, k_len = starts[sequence, Q_LEN], starts[sequence, K_LEN]
    source = Source(
        sizes.cache,
        sizes.cache_row,
        sizes.cache_block,
        sizes.block_size,
        sizes.cache_code,
        sizes.rank + sizes.rope_dim,
        sizes.row_size,
        sizes.scale,
        sizes.scale_row,
        sizes.scale_block,
        arrays.table,
        sequence,
        0,
    )
    # Rows that the matrix unit can read in place: sixteen side by side, with no row after them.
    in_place = (
        sizes.uses_amx
        and sizes.cache_code == BF16
        and sizes.block_size % 16 == 0
        and source.width == ld
    )
    last_token = (first_row + num_rows - 1) // sizes.num_heads
    end = min(last, end_seen(0, q_len, k_len, last_token))
    for key in range(first, end, KEYS):
        count = min(KEYS, end - key)
        padded = (count + 31) // 32 * 32
        hides = end_seen(0, q_len, k_len, first_row // sizes.num_heads) < key + count
        is_whole = count == padded and not hides
        if not is_whole:
            for row in range(rows):
                seen = end_seen(0, q_len, k_len, (first_row + row) // sizes.num_heads) - key
                tile.seen[row] = min(max(seen, 0), count)
        check = like.dtype.type(0.0)
        if in_place and not hides:
            score_rows(tile, source, ld, ldv, rows, key, count, padded, end)
        else:
            check = gather_keys(like, tile, source, sizes.rank, ld, key, count, padded)
            score_tile(tile, source, sizes.uses_amx, ld, rows, padded, key + KEYS, end)
        softmax_tile(like, tile, sizes.scale_log2, rows, padded, is_whole)
        if check == 0.0 or not hides:
            weigh_tile(like, tile, sizes.uses_amx, acc, ai, ld, ldv, rows, padded)
        else:
            weigh_exactly(tile, acc, ai, ld, ldv, rows, count)


@inner
def _store_row(sizes, like, starts, lse, sequence, row, values, vi, top, total):
    """Divide the sums of one row by its total, and write o through its address and lse; a row that
    saw nothing gets 0 and -inf.

    Args:
        row: the row, counted over tokens and heads.
        values, vi: the sums, and the index of the row's first.
        top, total: the maximum in base 2 and the total of the row.
    """
    token, head = row // sizes.num_heads, row % sizes.num_heads
    inverse = like.dtype.type(0.0) if total == 0.0 else like.dtype.type(1.0) / total
    address = starts[sequence, O] + token * sizes.o_row + head * sizes.o_head
    store_row(like, sizes.q_code, values, vi, inverse, address, sizes.rank)
    value = -math.inf if total == 0.0 else (top + math.log2(total)) / LOG2_E
    lse[head * sizes.lse_head + starts[sequence, ROW] + token] = value


@kernel
def attend_latents(sizes, arrays, lse, counter, num_tasks):
    """Attend to latents in this thread: take tasks, each a block of rows of a sequence and a split
    of its keys, until none is left. A sequence without splits gets o and lse, one with splits
    partial results in `arrays`."""
    like, starts = arrays.like, arrays.starts
    ld = (sizes.rank + sizes.rope_dim + 31) // 32 * 32
    ldv = (sizes.rank + 31) // 32 * 32
    tile = new_tile(like, arrays.packed_like, ld, sizes.block_rows)
    q = zero_scratch(sizes.block_rows * ld, arrays.packed_like)
    own = scratch(sizes.block_rows * (ldv + ACC_PAD), like)
    if sizes.uses_amx:
        amx.configure()
    sequence = 0
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        while sequence + 1 < len(starts) and starts[sequence + 1, TASK] <= task:
            sequence += 1
        local = task - starts[sequence, TASK]
        blocks, splits = starts[sequence, BLOCKS], starts[sequence, SPLITS]
        split, first_row = local // blocks, local % blocks * sizes.block_rows
        num_rows = min(sizes.block_rows, starts[sequence, Q_LEN] * sizes.num_heads - first_row)
        rows = (num_rows + PAD - 1) // PAD * PAD
        first, last = 0, starts[sequence, K_LEN]
        if splits > 1:
            first = split * starts[sequence, SPLIT_KEYS]
            last = min(first + starts[sequence, SPLIT_KEYS], last)
            slot = (starts[sequence, SLOT] + local) * sizes.block_rows
            _attend_block(
                sizes,
                arrays,
                sequence,
                first_row,
                num_rows,
                rows,
                first,
                last,
                tile,
                q,
                arrays.sums,
                slot * (ldv + ACC_PAD),
                ld,
                ldv,
            )
            for row in range(num_rows):
                arrays.tops[slot + row], arrays.totals[slot + row] = tile.m[row], tile.l[row]
            continue
        _attend_block(
            sizes,
            arrays,
            sequence,
            first_row,
            num_rows,
            rows,
            first,
            last,
            tile,
            q,
            own,
            0,
            ld,
            ldv,
        )
        for row in range(num_rows):
            _store_row(
                sizes,
                like,
                starts,
                lse,
                sequence,
                first_row + row,
                own,
                row * (ldv + ACC_PAD),
                tile.m[row],
                tile.l[row],
            )
    if sizes.uses_amx:
        amx.release()


@kernel
def merge_splits(sizes, arrays, lse, counter, num_tasks):
    """Merge the splits of sequences whose keys were split, in their order, and write o and lse: a
    second round of tasks, of MERGE_ROWS rows each, taken in this thread until none is left."""
    like, starts = arrays.like, arrays.starts
    ldv = (sizes.rank + 31) // 32 * 32
    merged = scratch(ldv, like)
    sequence = 0
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        for row in range(task * MERGE_ROWS, (task + 1) * MERGE_ROWS):
            token = row // sizes.num_heads
            while sequence + 1 < len(starts) and starts[sequence + 1, ROW] <= token:
                sequence += 1
            row -= starts[sequence, ROW] * sizes.num_heads
            splits, blocks = starts[sequence, SPLITS], starts[sequence, BLOCKS]
            if splits == 1 or row >= starts[sequence, Q_LEN] * sizes.num_heads:
                continue
            first = starts[sequence, SLOT] + row // sizes.block_rows
            top = -math.inf
            for split in range(splits):
                at = (first + split * blocks) * sizes.block_rows + row % sizes.block_rows
                top = max(top, arrays.tops[at])
            merged[:] = 0
            total = like.dtype.type(0.0)
            for split in range(splits):
                at = (first + split * blocks) * sizes.block_rows + row % sizes.block_rows
                if arrays.totals[at] == 0.0:
                    continue
                weight = like.dtype.type(2.0 ** (arrays.tops[at] - top))
                total += arrays.totals[at] * weight
                for column in range(ldv):
                    merged[column] += weight * arrays.sums[at * (ldv + ACC_PAD) + column]
            _store_row(sizes, like, starts, lse, sequence, row, merged, 0, top, total)
