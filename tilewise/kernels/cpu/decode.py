"""Decoding: one new token per sequence against its cache, at the speed of memory.

What      softmax(q k) v for the query heads of each key head, and lse, for cached keys.
Grid      one task per (sequence, split of 512 keys, some or all key heads), taken from a counter;
          whoever ends the last split of a (sequence, key head) merges them, in a fixed order.
One task  walks its keys in chunks, and for each chunk over its key heads: scores of 4 query heads
          per pass, softmax, weighted sum.
Traffic   each K and V row is read from memory once, in the order in which blocks hold them; a chunk
          of 64 keys x 8 heads x D = 128 and the one prefetched meanwhile are 512 KiB of L2 cache.
Numerics  float32 (float64 for float64) throughout; the scales of an 8-bit cache multiply logits and
          probabilities, not keys and values. Splits lie at multiples of 512 positions, so a
          sequence's bits depend on nothing but itself, whatever the batch or the threads.
"""

# ruff: noqa: E741 - m, l, acc, s and p are the names of the papers

from __future__ import annotations

import math

from numba import types

from tilewise.kernels.cpu import simd
from tilewise.kernels.cpu.dots import (
    CHUNK,
    HEADS,
    dots_1,
    dots_4,
    keys_1,
    keys_4,
    max_1,
    max_4,
    order_of,
    span_of,
    spread_4,
    sum_1,
    sum_4,
    unit_of,
    weigh_1,
    weigh_4,
    weigh_rest_1,
    weigh_rest_4,
)
from tilewise.kernels.cpu.problem import K_LEN, LSE, Q_LEN, TASK, K, O, Q, V
from tilewise.kernels.cpu.quantise import read_scale
from tilewise.kernels.cpu.rows import load_row, store_row
from tilewise.kernels.cpu.softmax import LOG2_E
from tilewise.kernels.cpu.threads import inner, kernel, next_task, scratch, zero_scratch

SPLIT = 512  # keys of a task: 256 KiB of bfloat16 at D = 128, far more work than taking it costs


@inner
def position_of(column, order, lanes):
    """Where column `column` lies when of each `order` the even ones stand before the odd."""
    start = column // order * order
    within = column - start
    if order == lanes:
        return column
    return start + (within % 2) * lanes + within // 2


@inner
def _fill_addresses(sizes, table, sequence, k_start, v_start, first, end, k_at, v_at):
    """Addresses of keys first ... end - 1, the last one repeated to the end of the arrays."""
    size, offset, block = sizes.block_size, first % sizes.block_size, first // sizes.block_size
    k_row = v_row = 0
    for key in range(end - first):
        if key == 0 or offset == size:
            offset = 0 if key > 0 else offset
            number = types.int64(table[sequence, block])
            k_row = k_start + number * sizes.k_block + offset * sizes.k_row
            v_row = v_start + number * sizes.v_block + offset * sizes.v_row
            block += 1
        k_at[key], v_at[key] = k_row, v_row
        k_row += sizes.k_row
        v_row += sizes.v_row
        offset += 1
    for key in range(end - first, len(k_at)):
        k_at[key], v_at[key] = k_at[end - first - 1], v_at[end - first - 1]


@inner
def _look_ahead(sizes, k_at, v_at, at, first_head, num_heads, index, k_ahead, v_ahead):
    """Rows of the chunk at `at` to prefetch while head `index` of the one before is computed.

    Its share of all heads' rows in the order of memory, which the CPU's own prefetcher then follows
    ahead of us: rows of one head alone are too far apart for it.
    """
    key, head = index * CHUNK // num_heads, index * CHUNK % num_heads
    for row in range(CHUNK):
        k_ahead[row] = k_at[at + key] + (first_head + head) * sizes.k_head
        v_ahead[row] = v_at[at + key] + (first_head + head) * sizes.v_head
        head += 1
        if head == num_heads:
            head = 0
            key += 1


@inner
def _fill_scales(sizes, like, table, sequence, kv_head, first, count, k_scales, v_scales):
    """Scales of keys first ... first + count - 1 of one key head of an 8-bit cache."""
    size, offset, block = sizes.block_size, first % sizes.block_size, first // sizes.block_size
    k_row = v_row = 0
    for key in range(count):
        if key == 0 or offset == size:
            offset = 0 if key > 0 else offset
            number = types.int64(table[sequence, block])
            k_row = sizes.k_scale + number * sizes.k_scale_block + offset * sizes.k_scale_row
            v_row = sizes.v_scale + number * sizes.v_scale_block + offset * sizes.v_scale_row
            block += 1
        k_scales[key] = read_scale(like, sizes.k_code, k_row + kv_head * sizes.k_scale_head)
        v_scales[key] = read_scale(like, sizes.k_code, v_row + kv_head * sizes.v_scale_head)
        k_row += sizes.k_scale_row
        v_row += sizes.v_scale_row
        offset += 1


@inner
def _softmax_chunk(like, rule, heads, s, count, distance, slopes, m, l, lane, rescale, has_scales,
                   k_scales, v_scales):  # fmt: skip
    """Turn products [key][head] into probabilities; m[lane:], l[lane:], rescale hold heads, tiled.

    Args:
        distance: positions from the chunk's first key to the query.
        k_scales, v_scales: per key; the first multiplies the product, the second what is left in s.
    """
    lanes = simd.REGISTER_BYTES // like.itemsize
    total = count * heads
    scale, softcap = simd.splat(like, rule.scale), simd.splat(like, rule.softcap)
    lowest, log2_e = simd.splat(like, -math.inf), simd.splat(like, LOG2_E)
    zero = simd.splat(like, 0.0)
    offsets = keys_1(like) if heads == 1 else keys_4(like)
    slope = simd.load(slopes, 0)
    old = simd.load(m, lane)
    top = old
    for at in range(0, total, lanes):
        x = simd.mul(simd.load(s, at), scale)
        if has_scales:
            k_scale = simd.load(k_scales, at) if heads == 1 else spread_4(k_scales, at // HEADS)
            x = simd.mul(x, k_scale)
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
        if has_scales:
            v_scale = simd.load(v_scales, at) if heads == 1 else spread_4(v_scales, at // HEADS)
            x = simd.mul(x, v_scale)
        simd.store(s, at, x)
    factor = simd.exp2(simd.mul(simd.sub(old, shift), log2_e))
    added = sum_1(partial) if heads == 1 else sum_4(partial)
    simd.store(m, lane, new)
    simd.store(l, lane, simd.fma(simd.load(l, lane), factor, added))
    simd.store(rescale, 0, factor)


@inner
def _weigh_chunk(
    cache_like, heads, acc, ci, ld, rescale, p, v_at, at, shift, ahead, dim, unit, span, row_size,
    count,
):  # fmt: skip
    """acc = acc * rescale + p V for one pass of heads."""
    unit_bytes = unit * (row_size // dim)
    column = 0
    while column + span <= dim:
        offset = column // unit * unit_bytes
        if heads == 1:
            weigh_1(
                cache_like, acc, ci + column, ld, rescale, p, v_at, at, shift, ahead, offset,
                count, 0,
            )  # fmt: skip
        else:
            weigh_4(
                cache_like, acc, ci + column, ld, rescale, p, v_at, at, shift, ahead, offset,
                count, 0,
            )  # fmt: skip
        column += span
    while column < dim:
        offset, rest = column // unit * unit_bytes, min(unit, dim - column)
        if heads == 1:
            weigh_rest_1(
                cache_like, acc, ci + column, ld, rescale, p, v_at, at, shift, ahead, offset, count,
                rest,
            )  # fmt: skip
        else:
            weigh_rest_4(
                cache_like, acc, ci + column, ld, rescale, p, v_at, at, shift, ahead, offset, count,
                rest,
            )  # fmt: skip
        column += unit


@inner
def _decode_head(sizes, rule, arrays, cache_like, sequence, kv_head, chunk, count, k_at, v_at, at,
                 q, qi, acc, ci, m, l, state, s, rescale, slopes, k_scales, v_scales,
                 k_ahead, v_ahead):  # fmt: skip
    """One chunk of keys for the padded query heads of one key head, into acc, m and l."""
    like = arrays.like
    lanes = simd.REGISTER_BYTES // like.itemsize
    unit = unit_of(cache_like, like)
    heads = 1 if sizes.group == 1 else HEADS
    ld = (sizes.head_dim + unit - 1) // unit * unit
    ldv = (sizes.v_head_dim + unit - 1) // unit * unit
    distance = arrays.starts[sequence, K_LEN] - 1 - chunk
    k_shift, v_shift = kv_head * sizes.k_head, kv_head * sizes.v_head
    has_scales = cache_like.itemsize == 1
    if has_scales:
        _fill_scales(sizes, like, arrays.table, sequence, kv_head, chunk, count, k_scales, v_scales)
    for index in range((sizes.group + heads - 1) // heads):
        q_start = qi + index * heads * ld
        for key in range(0, count, lanes // heads):
            if heads == 1:
                dots_1(
                    cache_like, s, key, k_at, at + key, k_shift, k_ahead, key, q, q_start, ld,
                    sizes.head_dim,
                )  # fmt: skip
            else:
                dots_4(
                    cache_like, s, key * HEADS, k_at, at + key, k_shift, k_ahead, key, q, q_start,
                    ld, sizes.head_dim,
                )  # fmt: skip
        if rule.has_alibi:
            for lane in range(lanes):
                head = min(index * heads + lane % heads, sizes.group - 1)
                slopes[lane] = arrays.slopes[kv_head * sizes.group + head]
        lane = state + index * lanes
        _softmax_chunk(
            like, rule, heads, s, count, distance, slopes, m, l, lane, rescale, has_scales,
            k_scales, v_scales,
        )  # fmt: skip
        _weigh_chunk(
            cache_like, heads, acc, ci + index * heads * ldv, ldv, rescale, s, v_at, at, v_shift,
            v_ahead, sizes.v_head_dim, unit, span_of(cache_like, like),
            sizes.v_head_dim * sizes.k_size, count,
        )  # fmt: skip


@inner
def _decode_task(sizes, rule, arrays, cache_like, sequence, split, first_head, num_heads, slot, q,
                 acc, m, l):  # fmt: skip
    """One split of a sequence for num_heads key heads, chunk by chunk, so that memory is read in
    its order; acc of key head first_head + i starts at (slot + i) * padded * ldv."""
    like, starts = arrays.like, arrays.starts
    lanes = simd.REGISTER_BYTES // like.itemsize
    unit = unit_of(cache_like, like)
    heads = 1 if sizes.group == 1 else HEADS
    padded = (sizes.group + heads - 1) // heads * heads
    ld = (sizes.head_dim + unit - 1) // unit * unit
    ldv = (sizes.v_head_dim + unit - 1) // unit * unit
    first, end = split * SPLIT, min((split + 1) * SPLIT, starts[sequence, K_LEN])
    if sizes.window_left >= 0:
        first = max(first, starts[sequence, K_LEN] - 1 - sizes.window_left)
    if first >= end:
        return
    k_at, v_at = scratch(SPLIT + 2 * CHUNK, starts[0]), scratch(SPLIT + 2 * CHUNK, starts[0])
    k_ahead, v_ahead = scratch(CHUNK, starts[0]), scratch(CHUNK, starts[0])
    s, rescale = scratch(CHUNK * HEADS, like), scratch(lanes, like)
    slopes, row = zero_scratch(lanes, like), scratch(sizes.head_dim, like)
    k_scales, v_scales = zero_scratch(CHUNK + lanes, like), zero_scratch(CHUNK + lanes, like)
    order = order_of(cache_like, like)
    for member in range(num_heads * sizes.group):
        head = first_head * sizes.group + member
        at = (member // sizes.group * padded + member % sizes.group) * ld
        address = starts[sequence, Q] + head * sizes.q_head
        if q.itemsize == 2:
            load_row(like, sizes.q_code, q, at, address, sizes.head_dim)
        else:
            load_row(like, sizes.q_code, row, 0, address, sizes.head_dim)
            for column in range(sizes.head_dim):
                q[at + position_of(column, order, lanes)] = row[column]
    # With the first keys of the next split, for whoever takes that: most likely this thread.
    beyond = min(end + CHUNK, starts[sequence, K_LEN])
    _fill_addresses(
        sizes, arrays.table, sequence, starts[sequence, K], starts[sequence, V], first, beyond,
        k_at, v_at,
    )  # fmt: skip
    for chunk in range(first, end, CHUNK):
        for index in range(num_heads):
            _look_ahead(sizes, k_at, v_at, chunk - first + CHUNK, first_head, num_heads, index,
                        k_ahead, v_ahead)  # fmt: skip
            _decode_head(
                sizes, rule, arrays, cache_like, sequence, first_head + index, chunk,
                min(CHUNK, end - chunk), k_at, v_at, chunk - first, q, index * padded * ld, acc,
                (slot + index) * padded * ldv, m, l, index * (padded // heads) * lanes, s, rescale,
                slopes, k_scales, v_scales, k_ahead, v_ahead,
            )  # fmt: skip


@inner
def _merge_splits(sizes, arrays, lse, sequence, kv_head, slot, num_splits, sums, tops, totals,
                  order, padded, ldv):  # fmt: skip
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
            ordered[column] = row[position_of(column, order, lanes)]
        store_row(like, sizes.q_code, ordered, 0, inverse, address, dim)
        value = top + math.log(total) if total != 0.0 else -math.inf
        lse[starts[sequence, LSE] + head * sizes.lse_head] = value


@kernel
def plan_decode(starts, window_left, num_kv_heads, splits):
    """Fill splits (B, 2), see `decode_attention`, and starts' tasks; return how many tasks."""
    num_tasks = 0
    for sequence in range(len(starts)):
        length = starts[sequence, K_LEN]
        first = 0
        if window_left >= 0:
            first = max(length - 1 - window_left, 0) // SPLIT
        splits[sequence, 0] = first
        splits[sequence, 1] = max((length + SPLIT - 1) // SPLIT - first, 1)
        starts[sequence, TASK] = num_tasks
        num_tasks += splits[sequence, 1] * num_kv_heads
    return num_tasks


@kernel
def place_sequences(starts, edges, lengths, q, q_row, o, o_row, k_cache, v_cache):
    """Fill starts from addresses and row strides in bytes; return how many have one row, and more.

    Args:
        edges, lengths: cu_seqlens_q and seqlens_k.
    """
    single = several = 0
    for sequence in range(len(starts)):
        first = types.int64(edges[sequence])
        rows = types.int64(edges[sequence + 1]) - first
        starts[sequence, Q] = q + first * q_row
        starts[sequence, O] = o + first * o_row
        starts[sequence, K], starts[sequence, V] = k_cache, v_cache
        starts[sequence, LSE] = first
        starts[sequence, Q_LEN], starts[sequence, K_LEN] = rows, lengths[sequence]
        single += rows == 1
        several += rows > 1
    return single, several


@kernel
def decode_attention(sizes, rule, arrays, cache_like, heads_per_task, splits, sums, tops, totals,
                     finished, lse, counter, num_tasks):  # fmt: skip
    """Take tasks until none is left; see the head of this file.

    Args:
        sizes, rule, arrays: parts of a `Problem`; every sequence has one query row, and
            starts[:, TASK] is its first slot: one per split and key head.
        cache_like: empty array of the cache's dtype; uint16 is bfloat16, int16 is float16, uint8 is
            float8_e4m3fn.
        heads_per_task: a divisor of the number of key heads.
        splits: (B, 2) int64, first split and number of splits of each sequence.
        sums, tops, totals: flat workspaces of acc, m and l, by slot and padded query head.
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
    q = zero_scratch(heads_per_task * padded * ld, arrays.packed_like)
    m = scratch(heads_per_task * padded * lanes, like)
    l = scratch(heads_per_task * padded * lanes, like)
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        slot = task * heads_per_task
        sequence = 0
        while sequence + 1 < len(starts) and starts[sequence + 1, TASK] <= slot:
            sequence += 1
        local = slot - starts[sequence, TASK]
        split, first_head = local // sizes.num_kv_heads, local % sizes.num_kv_heads
        m[:] = -math.inf
        l[:] = 0
        sums[slot * padded * ldv : (slot + heads_per_task) * padded * ldv] = 0
        _decode_task(
            sizes, rule, arrays, cache_like, sequence, splits[sequence, 0] + split, first_head,
            heads_per_task, slot, q, sums, m, l,
        )  # fmt: skip
        for member in range(heads_per_task * padded):
            lane = member // heads * lanes + member % heads
            tops[slot * padded + member], totals[slot * padded + member] = m[lane], l[lane]
        for kv_head in range(first_head, first_head + heads_per_task):
            owner = sequence * sizes.num_kv_heads + kv_head
            if next_task(finished[owner : owner + 1]) == splits[sequence, 1] - 1:
                _merge_splits(
                    sizes, arrays, lse, sequence, kv_head, starts[sequence, TASK] + kv_head,
                    splits[sequence, 1], sums, tops, totals, order_of(cache_like, like), padded,
                    ldv,
                )  # fmt: skip
