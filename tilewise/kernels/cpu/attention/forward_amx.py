"""Tiled exact attention, forward, on CPUs with tile registers (Intel AMX).

What      o = softmax(logits) v and lse, as `forward.py`, for operands of bfloat16.
Grid      one task per (sequence, key head, block of query tiles), as there.
One task  holds up to 8 tiles of 64 query rows (heads of a group side by side) with their sums;
          for each tile of 128 keys: packs K and V; per 32 query rows what `forward_strips.py` does.
Traffic   a task reads q once and writes o once; K and V are read once per task.
Numerics  see `forward_softmax.py`. A row's bits depend on its own keys alone, not on threads or
          neighbours.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu.attention.amx_keys import pair_values, transpose_keys
from tilewise.kernels.cpu.attention.forward_softmax import (
    LANES,
    LOWEST,
    log_sum,
    start_at_sink,
)
from tilewise.kernels.cpu.attention.forward_strips import (
    STRIPS,
    Rows,
    Sight,
    attend_strips,
    new_scores,
    new_sight,
    see_strips,
)
from tilewise.kernels.cpu.attention.keys import keys_of, values_of
from tilewise.kernels.cpu.attention.problem import K_LEN, LSE, Q_LEN, TASK, TILE_M, TILE_N, O, Q
from tilewise.kernels.cpu.machine import amx, simd
from tilewise.kernels.cpu.machine.amx_tiles import SIDE
from tilewise.kernels.cpu.machine.rows import load_row, store_row
from tilewise.kernels.cpu.machine.source import gather_rows, prefetch_rows
from tilewise.kernels.cpu.machine.threads import (
    borrowed,
    inner,
    keep_alive,
    kernel,
    next_task,
    scratch,
    zero_scratch,
)
from tilewise.kernels.cpu.visible import (
    WORD,
    WORDS,
    end_seen,
    first_seen,
    next_tile,
    view_rows,
)

ACC_PAD = 16  # floats between rows of sums: rows 2 KB apart would share two sets of the L1 cache


class _Keys(NamedTuple):
    """The scratch of a tile of keys: `rows`, 16 rows, zero past the head dim, and the packed
    operands of both products, K and V in panels."""

    rows: np.ndarray
    k_panels: np.ndarray
    v_panels: np.ndarray


@inner
def _load_keys(problem, keys, sequence, kv_head, key, count, ld, ldv):
    """Pack `count` keys and values from `key` on into the panels of the scratch `keys`; return
    whether all values are finite.

    Args:
        keys: the scratch of the tile.
        ld, ldv: the padded channels of keys and of values.
    """
    sizes, arrays = problem.sizes, problem.arrays
    source = keys_of(sizes, arrays, sequence, kv_head)
    transpose_keys(arrays.like, source, keys.k_panels, keys.rows, ld, key, count)
    source = values_of(sizes, arrays, sequence, kv_head)
    return pair_values(arrays.like, source, keys.v_panels, keys.rows, ldv, key, count)


@inner
def _attend_exactly(
    problem,
    rows,
    sight,
    scores,
    v_panels,
    v_rows,
    k_panels,
    ld,
    ldv,
    acc_row,
    count,
    sequence,
    kv_head,
    first_row,
    num_rows,
    key,
):
    """Let strips attend to a tile of keys as `attend_strips` does, for a tile whose values have inf
    or NaN, which must not reach rows that do not see them: P V is added key by key."""
    sizes, arrays = problem.sizes, problem.arrays
    starts, values = arrays.starts, values_of(sizes, arrays, sequence, kv_head)
    v_panels[:] = 0
    for turn in range(count):
        single = Sight(
            sight.words,
            sight.begin,
            sight.end,
            sight.is_whole,
            sight.strips[3 * turn : 3 * turn + 3],
        )
        attend_strips(
            problem,
            rows,
            single,
            scores,
            k_panels,
            v_panels,
            ld,
            ldv,
            acc_row,
            1,
            sequence,
            kv_head,
            first_row,
            num_rows,
            key,
        )
        strip, begin, end = single.strips
        top = strip * SIDE
        for column in range(begin, min(end, starts[sequence, K_LEN] - key)):
            gather_rows(arrays.like, values, v_rows, ldv, key + column, 1, 1)
            for row in range(min(SIDE, num_rows - top)):
                if sight.words[(top + row) * WORDS + column // WORD] >> column % WORD & 1:
                    x = simd.load_one(scores.p, row * TILE_N + column)
                    for channel in range(sizes.v_head_dim):
                        y = simd.load_one(v_rows, channel)
                        rows.acc[(top + row) * acc_row + channel] += x * y


@inner
def _prefetch_keys(problem, sequence, kv_head, first, last):
    sizes, arrays = problem.sizes, problem.arrays
    prefetch_rows(keys_of(sizes, arrays, sequence, kv_head), first, last)
    prefetch_rows(values_of(sizes, arrays, sequence, kv_head), first, last)


@inner
def _load_rows(problem, rows, sequence, kv_head, first_row, num_rows, ld, acc_row):
    """Load the query rows of a task into scratch, zero their sums, and set each row's exponent and
    sum to those of its sink alone, or of nothing.

    Args:
        rows: the scratch of the rows.
        first_row, num_rows: the first row and their number, counted over queries and heads of the
            group.
        ld, acc_row: the elements of a row of q and of the sums in scratch.
    """
    sizes, arrays = problem.sizes, problem.arrays
    like, starts, group = arrays.like, arrays.starts, sizes.group
    padded = (num_rows + TILE_M - 1) // TILE_M * TILE_M
    rows.m[:] = LOWEST
    rows.raised[:] = -math.inf
    scale = problem.rule.scale if problem.rule.is_scaled_only else 1.0
    rows.l[: 2 * padded * LANES] = 0
    rows.acc[: padded * acc_row] = 0
    rows.parity[:] = 0
    for row in range(num_rows):
        query, head = (first_row + row) // group, kv_head * group + (first_row + row) % group
        address = starts[sequence, Q] + query * sizes.q_row + head * sizes.q_head
        load_row(like, sizes.q_code, rows.q, row * ld, address, sizes.head_dim)
        if arrays.sinks[head] != -math.inf:  # a NaN sink makes the row NaN
            m, raised, total = start_at_sink(like, arrays.sinks[head], scale)
            rows.m[row], rows.raised[row] = m, raised
            rows.l[2 * row * LANES] = rows.l[(2 * row + 1) * LANES] = total


@inner
def _store_rows(problem, rows, lse, sequence, kv_head, first_row, num_rows, acc_row):
    """Divide the sums of a task's rows by their totals, and write o through its addresses and lse;
    rows that saw nothing get 0 and -inf.

    Args:
        rows: the scratch of the rows.
        first_row, num_rows: the rows, counted over queries and heads of the group.
        acc_row: the elements of a row of sums.
    """
    sizes, arrays, dropout = problem.sizes, problem.arrays, problem.dropout
    like, starts, group = arrays.like, arrays.starts, sizes.group
    scale = problem.rule.scale if problem.rule.is_scaled_only else 1.0
    for row in range(num_rows):
        query, head = (first_row + row) // group, kv_head * group + (first_row + row) % group
        first = (rows.parity[row // SIDE] * len(rows.m) + row) * 2 * LANES
        total = simd.sum_lanes(simd.load(rows.l, first))
        inverse, value = like.dtype.type(0.0), -math.inf
        if total != 0.0:
            inverse = like.dtype.type(dropout.scale) / simd.sum_lanes(
                simd.load(rows.l, first + LANES)
            )
            value = log_sum(like, rows.m[row], rows.raised[row], total, scale)
        address = starts[sequence, O] + query * sizes.o_row + head * sizes.o_head
        store_row(like, sizes.q_code, rows.acc, row * acc_row, inverse, address, sizes.v_head_dim)
        lse[starts[sequence, LSE] + head * sizes.lse_head + query] = value


@inner
def _new_scratch(problem, tiles):
    """Return the scratch (Rows, _Keys, Scores, Sight) of a thread for tasks of up to `tiles` tiles
    of query rows, zero where padding must stay zero."""
    sizes, arrays, mask = problem.sizes, problem.arrays, problem.mask
    like, packed, starts = arrays.like, arrays.packed_like, arrays.starts
    ld, ldv = (sizes.head_dim + 31) // 32 * 32, (sizes.v_head_dim + 31) // 32 * 32
    area = tiles * TILE_M
    return (
        Rows(
            zero_scratch(area * ld, packed),
            scratch(area * (ldv + ACC_PAD), like),
            scratch(area, like),
            scratch(area, like),
            scratch(4 * area * LANES, like),
            scratch(tiles * STRIPS, starts[0]),
        ),
        _Keys(
            zero_scratch(LANES * max(ld, ldv), packed),
            scratch(TILE_N * ld, packed),
            scratch(TILE_N * ldv, packed),
        ),
        new_scores(like, packed, mask.bits),
        new_sight(tiles, mask.bits, starts[0]),
    )


@inner
def _forward_task(problem, lse, spare, sequence, kv_head, first_tile, tiles):
    """Compute o and lse of query tiles first_tile ... first_tile + tiles - 1 of one key head over
    all their keys; `spare` is the thread's scratch."""
    sizes, arrays, mask = problem.sizes, problem.arrays, problem.mask
    rows, keys, scores, sight = spare
    starts = arrays.starts
    q_len, k_len = starts[sequence, Q_LEN], starts[sequence, K_LEN]
    group = sizes.group
    ld, ldv = (sizes.head_dim + 31) // 32 * 32, (sizes.v_head_dim + 31) // 32 * 32
    acc_row = ldv + ACC_PAD
    first_row = first_tile * TILE_M
    num_rows = min(tiles * TILE_M, q_len * group - first_row)
    owned_view = view_rows(sizes, mask, sequence, kv_head, first_row, num_rows)
    view = borrowed(owned_view)
    _load_rows(problem, rows, sequence, kv_head, first_row, num_rows, ld, acc_row)
    key = first_seen(sizes.window_left, q_len, k_len, first_row // group) // TILE_N * TILE_N
    last = (first_row + num_rows - 1) // group
    end_key = end_seen(sizes.window_right, q_len, k_len, last)
    key = next_tile(mask, view, key, end_key)
    while key < end_key:
        following = next_tile(mask, view, key + TILE_N, end_key)
        count = see_strips(sizes, mask, view, sight, q_len, k_len, first_row, num_rows, key)
        if count > 0:
            is_finite = _load_keys(
                problem, keys, sequence, kv_head, key, min(TILE_N, end_key - key), ld, ldv
            )
            # The next tile's rows are prefetched into the L2 cache meanwhile.
            _prefetch_keys(problem, sequence, kv_head, following, min(following + TILE_N, end_key))
            if is_finite:
                attend_strips(
                    problem,
                    rows,
                    sight,
                    scores,
                    keys.k_panels,
                    keys.v_panels,
                    ld,
                    ldv,
                    acc_row,
                    count,
                    sequence,
                    kv_head,
                    first_row,
                    num_rows,
                    key,
                )
            else:
                _attend_exactly(
                    problem,
                    rows,
                    sight,
                    scores,
                    keys.v_panels,
                    keys.rows,
                    keys.k_panels,
                    ld,
                    ldv,
                    acc_row,
                    count,
                    sequence,
                    kv_head,
                    first_row,
                    num_rows,
                    key,
                )
        key = following
    _store_rows(problem, rows, lse, sequence, kv_head, first_row, num_rows, acc_row)
    keep_alive(owned_view)


@kernel
def attention_forward(problem, lse, tiles, counter, num_tasks):
    """Compute attention of bfloat16 on the matrix unit: take tasks, each a block of query tiles of
    a sequence and key head, in this thread until none is left.

    Args:
        problem: a `Problem`; o is written through addresses.
        lse: a flat array of like's type, the log-sum-exps to write.
        tiles: the query tiles of a task.
        counter: (1,) int64, the next task.
    """
    problem, lse = borrowed(problem), borrowed(lse)
    starts, sizes = problem.arrays.starts, problem.sizes
    owned = _new_scratch(problem, tiles)
    spare = borrowed(owned)
    amx.configure()
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        sequence = 0
        while sequence + 1 < len(starts) and starts[sequence + 1, TASK] <= task:
            sequence += 1
        task -= starts[sequence, TASK]
        num_tiles = (starts[sequence, Q_LEN] * sizes.group + TILE_M - 1) // TILE_M
        num_blocks = (num_tiles + tiles - 1) // tiles
        first = (num_blocks - 1 - task // sizes.num_kv_heads) * tiles
        _forward_task(
            problem,
            lse,
            spare,
            sequence,
            task % sizes.num_kv_heads,
            first,
            min(tiles, num_tiles - first),
        )
    amx.release()
    keep_alive(owned)
