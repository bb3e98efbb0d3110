"""Decoding: one new token per sequence against its cache, at the speed of memory.

What      softmax(q k) v for the query heads of each key head, and lse, for cached keys.
Grid      one task per (sequence, split of 512 keys, key head), taken from a counter; whoever ends
          the last split of a (sequence, key head) merges them, always in the same order.
One task  walks its keys in chunks of 64: scores of 4 query heads per pass, softmax, weighted sum.
Traffic   each K and V row is read from memory once; the second pass of a wide group hits L1.
Numerics  float32 (float64 for float64) throughout. Splits lie at multiples of 512 positions, so a
          sequence's bits depend on nothing but itself, whatever the batch or the threads.
"""

from __future__ import annotations

import math

from numba import types

from tilewise.kernels.cpu import simd
from tilewise.kernels.cpu.dots import (
    HEADS,
    dots_1,
    dots_4,
    keys_1,
    keys_4,
    max_1,
    max_4,
    sum_1,
    sum_4,
    unit_of,
    weigh_1,
    weigh_4,
    weigh_rest_1,
    weigh_rest_4,
)
from tilewise.kernels.cpu.pack import prefetch
from tilewise.kernels.cpu.problem import K_LEN, LSE, TASK, K, O, Q, V
from tilewise.kernels.cpu.rows import load_row, store_row
from tilewise.kernels.cpu.softmax import LOG2_E
from tilewise.kernels.cpu.threads import inner, kernel, next_task, scratch, zero_scratch

SPLIT = 512  # keys of a task: 256 KiB of bfloat16 at D = 128, far more work than taking it costs
CHUNK = 64  # keys between two softmax updates: K and V of a chunk fill a 32 KiB L1 cache


@inner
def position_of(column, unit, lanes):
    """Where column `column` of a row lies when each unit's even elements stand before its odd."""
    start = column // unit * unit
    within = column - start
    if unit == lanes:
        return column
    return start + (within % 2) * lanes + within // 2


@inner
def _chunk_addresses(sizes, table, sequence, k_start, v_start, first, count, k_at, v_at, ahead):
    """Fill the addresses of keys first ... first + count, and prefetch the `ahead` keys after."""
    size, offset = sizes.block_size, first % sizes.block_size
    block = first // size
    k_base = k_start + types.int64(table[sequence, block]) * sizes.k_block
    v_base = v_start + types.int64(table[sequence, block]) * sizes.v_block
    for key in range(count + ahead):
        if offset == size:
            offset = 0
            block += 1
            k_base = k_start + types.int64(table[sequence, block]) * sizes.k_block
            v_base = v_start + types.int64(table[sequence, block]) * sizes.v_block
        k_row, v_row = k_base + offset * sizes.k_row, v_base + offset * sizes.v_row
        if key < count:
            k_at[key], v_at[key] = k_row, v_row
        else:
            for line in range(0, sizes.head_dim * sizes.k_size, 64):
                prefetch(k_row + line)
            for line in range(0, sizes.v_head_dim * sizes.k_size, 64):
                prefetch(v_row + line)
        offset += 1
    for key in range(count, CHUNK):
        k_at[key] = k_at[count - 1]


@inner
def _softmax_chunk(like, rule, heads, s, count, distance, slopes, m, l, rescale):
    """Turn products [key][head] into probabilities; m, l and rescale hold a lane per head, tiled.

    Args:
        distance: positions from the chunk's first key to the query.
    """
    lanes = simd.REGISTER_BYTES // like.itemsize
    total = count * heads
    scale, softcap = simd.splat(like, rule.scale), simd.splat(like, rule.softcap)
    lowest, log2_e = simd.splat(like, -math.inf), simd.splat(like, LOG2_E)
    zero = simd.splat(like, 0.0)
    offsets = keys_1(like) if heads == 1 else keys_4(like)
    slope = simd.load(slopes, 0)
    old = simd.load(m, 0)
    top = old
    for at in range(0, total, lanes):
        x = simd.mul(simd.load(s, at), scale)
        if rule.softcap > 0.0:
            x = simd.mul(simd.tanh(simd.div(x, softcap)), softcap)
        if rule.has_alibi:
            far = simd.sub(simd.splat(like, float(distance - at // heads)), offsets)
            x = simd.sub(x, simd.mul(slope, far))
        if at + lanes > total:
            x = simd.select(simd.within(like, at, 0, total), x, lowest)
        simd.store(s, at, x)
        top = simd.maximum(x, top)
    new = max_1(top) if heads == 1 else max_4(top)
    shift = simd.select(simd.at_least(new, simd.splat(like, -3e38)), new, zero)
    partial = zero
    for at in range(0, total, lanes):
        x = simd.exp2(simd.mul(simd.sub(simd.load(s, at), shift), log2_e))
        partial = simd.add(partial, x)
        simd.store(s, at, x)
    factor = simd.exp2(simd.mul(simd.sub(old, shift), log2_e))
    added = sum_1(partial) if heads == 1 else sum_4(partial)
    simd.store(m, 0, new)
    simd.store(l, 0, simd.fma(simd.load(l, 0), factor, added))
    simd.store(rescale, 0, factor)


@inner
def _weigh_chunk(cache_like, heads, acc, ci, ld, rescale, p, v_at, dim, unit, row_size, count):
    """acc = acc * rescale + p V for one pass of heads."""
    unit_bytes = unit * (row_size // dim)
    column = 0
    while column + 2 * unit <= dim:
        offset = column // unit * unit_bytes
        if heads == 1:
            weigh_1(cache_like, acc, ci + column, ld, rescale, p, v_at, offset, count, 0)
        else:
            weigh_4(cache_like, acc, ci + column, ld, rescale, p, v_at, offset, count, 0)
        column += 2 * unit
    while column < dim:
        offset, rest = column // unit * unit_bytes, min(unit, dim - column)
        if heads == 1:
            weigh_rest_1(cache_like, acc, ci + column, ld, rescale, p, v_at, offset, count, rest)
        else:
            weigh_rest_4(cache_like, acc, ci + column, ld, rescale, p, v_at, offset, count, rest)
        column += unit


@inner
def _decode_split(sizes, rule, arrays, cache_like, sequence, kv_head, first, end, q, acc, m, l):
    """Keys first ... end - 1 for the padded heads of one key head, into acc, m and l."""
    like, starts = arrays.like, arrays.starts
    lanes = simd.REGISTER_BYTES // like.itemsize
    unit = unit_of(cache_like, like)
    heads = 1 if sizes.group == 1 else HEADS
    ld = (sizes.head_dim + unit - 1) // unit * unit
    ldv = (sizes.v_head_dim + unit - 1) // unit * unit
    k_at, v_at = scratch(CHUNK, starts[0]), scratch(CHUNK, starts[0])
    s, rescale = scratch(CHUNK * HEADS, like), scratch(lanes, like)
    slopes = zero_scratch(lanes, like)
    k_start = starts[sequence, K] + kv_head * sizes.k_head
    v_start = starts[sequence, V] + kv_head * sizes.v_head
    passes = (sizes.group + heads - 1) // heads
    for chunk in range(first, end, CHUNK):
        count = min(CHUNK, end - chunk)
        ahead = min(CHUNK, end - chunk - count)
        _chunk_addresses(
            sizes, arrays.table, sequence, k_start, v_start, chunk, count, k_at, v_at, ahead
        )
        for index in range(passes):
            for key in range(0, count, lanes // heads):
                if heads == 1:
                    dots_1(cache_like, s, key, k_at, key, q, index * ld, ld, sizes.head_dim)
                else:
                    dots_4(
                        cache_like, s, key * HEADS, k_at, key, q, index * HEADS * ld, ld,
                        sizes.head_dim,
                    )  # fmt: skip
            if rule.has_alibi:
                for lane in range(lanes):
                    head = min(index * heads + lane % heads, sizes.group - 1)
                    slopes[lane] = arrays.slopes[kv_head * sizes.group + head]
            distance = starts[sequence, K_LEN] - 1 - chunk
            state = index * lanes
            _softmax_chunk(
                like, rule, heads, s, count, distance, slopes, m[state : state + lanes],
                l[state : state + lanes], rescale,
            )  # fmt: skip
            _weigh_chunk(
                cache_like, heads, acc, index * heads * ldv, ldv, rescale, s, v_at,
                sizes.v_head_dim, unit, sizes.v_head_dim * sizes.k_size, count,
            )  # fmt: skip


@inner
def _merge_splits(sizes, arrays, lse, sequence, kv_head, slot, num_splits, sums, tops, totals, unit,
                  padded, ldv):  # fmt: skip
    """Combine the splits of one (sequence, key head) in order and write o and lse."""
    like, starts = arrays.like, arrays.starts
    lanes = simd.REGISTER_BYTES // like.itemsize
    dim = sizes.v_head_dim
    row = scratch(ldv, like)
    for member in range(sizes.group):
        head = kv_head * sizes.group + member
        top, total = arrays.sinks[head], like.dtype.type(0.0)
        for split in range(num_splits):
            top = max(top, tops[(slot + split * sizes.num_kv_heads) * padded + member])
        if top > -math.inf and arrays.sinks[head] > -math.inf:
            total = like.dtype.type(math.exp(arrays.sinks[head] - top))
        row[:] = 0
        for split in range(num_splits):
            at = (slot + split * sizes.num_kv_heads) * padded + member
            if totals[at] == 0.0:
                continue
            weight = like.dtype.type(math.exp(tops[at] - top))
            total += totals[at] * weight
            for column in range(ldv):
                row[column] += weight * sums[at * ldv + column]
        address = starts[sequence, O] + head * sizes.o_head
        inverse = like.dtype.type(0.0) if total == 0.0 else like.dtype.type(1.0) / total
        ordered = scratch(dim, like)
        for column in range(dim):
            ordered[column] = row[position_of(column, unit, lanes)]
        store_row(like, sizes.q_code, ordered, 0, inverse, address, dim)
        value = top + math.log(total) if total != 0.0 else -math.inf
        lse[starts[sequence, LSE] + head * sizes.lse_head] = value


@kernel
def decode_attention(sizes, rule, arrays, cache_like, splits, sums, tops, totals, finished, lse,
                     counter, num_tasks):  # fmt: skip
    """Take tasks until none is left; see the head of this file.

    Args:
        sizes, rule, arrays: parts of a `Problem`; every sequence has one query row.
        cache_like: empty array of the cache's dtype; uint16 is bfloat16 and int16 is float16.
        splits: (B, 2) int64, first split and number of splits of each sequence.
        sums, tops, totals: flat workspaces of a split's acc, m and l, by task and padded head.
        finished: (B * Hk,) int64 zeros, splits done.
        lse: flat array of like's type.
        counter: (1,) int64, the next task.
    """
    like, starts = arrays.like, arrays.starts
    lanes = simd.REGISTER_BYTES // like.itemsize
    heads = 1 if sizes.group == 1 else HEADS
    padded = (sizes.group + heads - 1) // heads * heads
    unit = unit_of(cache_like, like)
    ld = (sizes.head_dim + unit - 1) // unit * unit
    ldv = (sizes.v_head_dim + unit - 1) // unit * unit
    q, row = zero_scratch(padded * ld, like), scratch(sizes.head_dim, like)
    m, l = scratch(padded * lanes, like), scratch(padded * lanes, like)
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        sequence = 0
        while sequence + 1 < len(starts) and starts[sequence + 1, TASK] <= task:
            sequence += 1
        local = task - starts[sequence, TASK]
        split, kv_head = local // sizes.num_kv_heads, local % sizes.num_kv_heads
        for member in range(sizes.group):
            head = kv_head * sizes.group + member
            address = starts[sequence, Q] + head * sizes.q_head
            load_row(like, sizes.q_code, row, 0, address, sizes.head_dim)
            for column in range(sizes.head_dim):
                q[member * ld + position_of(column, unit, lanes)] = row[column]
        m[:] = -math.inf
        l[:] = 0
        acc = sums[task * padded * ldv : (task + 1) * padded * ldv]
        acc[:] = 0
        low = 0
        if sizes.window_left >= 0:
            low = max(0, starts[sequence, K_LEN] - 1 - sizes.window_left)
        first = max((splits[sequence, 0] + split) * SPLIT, low)
        end = min((splits[sequence, 0] + split + 1) * SPLIT, starts[sequence, K_LEN])
        _decode_split(sizes, rule, arrays, cache_like, sequence, kv_head, first, end, q, acc, m, l)
        for member in range(padded):
            lane = member // heads * lanes + member % heads
            tops[task * padded + member], totals[task * padded + member] = m[lane], l[lane]
        owner = sequence * sizes.num_kv_heads + kv_head
        if next_task(finished[owner : owner + 1]) == splits[sequence, 1] - 1:
            slot = starts[sequence, TASK] + kv_head
            _merge_splits(
                sizes, arrays, lse, sequence, kv_head, slot, splits[sequence, 1], sums, tops,
                totals, unit, padded, ldv,
            )  # fmt: skip
