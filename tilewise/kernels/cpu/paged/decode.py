"""Decoding: one new token per sequence attends to its cache, at the speed of memory.

What      softmax(q k) v for the query heads of each key head, and lse, for cached keys.
Grid      one task per (sequence, split of 512 keys, some or all key heads), taken from a counter;
          the thread that ends the last split of a (sequence, key head) merges them, in a fixed
          order.
One task  walks its keys in chunks, and for each chunk over its key heads: scores of 4 query heads
          per pass, softmax, weighted sum (`chunk.py`).
Traffic   each K and V row is read from memory once, in the order in which blocks hold them; a chunk
          of all heads and the one prefetched meanwhile fill a quarter of the L2 cache.
Numerics  float32 (float64 for float64) throughout, except that bfloat16 and float16 queries of an
          int8 cache and its probabilities become 16-bit integers, see `machine/products.py` and
          `weights.py`. The scales of an 8-bit cache multiply logits and probabilities, not keys and
          values. Splits lie at multiples of 512 positions, so a sequence's bits depend on nothing
          but itself, whatever the batch or the threads.
"""

# ruff: noqa: E741 - m, l, acc, s and p are the names of the papers

from __future__ import annotations

import math

from numba import types

from tilewise.kernels.cpu.attention.frame import placed, read_problem, with_starts
from tilewise.kernels.cpu.attention.problem import K_LEN, LSE, Q_LEN, TASK, K, O, Q, V
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.frame import array_at
from tilewise.kernels.cpu.machine.gemm import lanes_in as lanes_of
from tilewise.kernels.cpu.machine.products import LARGEST_INTEGER
from tilewise.kernels.cpu.machine.rows import load_row, store_row
from tilewise.kernels.cpu.machine.threads import (
    bare,
    borrowed,
    inlined,
    inner,
    keep_alive,
    kernel,
    next_task,
    scratch,
)
from tilewise.kernels.cpu.paged.cache_rows import (
    HEADS,
    has_bytes,
    has_words,
    heads_of_pass,
    lanes_in,
    order_of,
    span_of,
    unit_of,
)
from tilewise.kernels.cpu.paged.chunk import (
    Rows,
    Strip,
    Sums,
    attend_chunk,
    fetch_scales,
    look_ahead,
)
from tilewise.kernels.cpu.paged.quantise import SMALLEST_SCALE
from tilewise.kernels.cpu.visible import distance_to, first_seen
from tilewise.kernels.device import l2_bytes

# Smallest and largest number of keys between two softmax updates. On a Xeon with 2 MiB of L2 64
# took 16 % less than 32 with the cache in L2, 3 % with int8 from memory (8 x 4,096 tokens, heads 32
# / 8, D 128; 2026-11-20); on an EPYC with 512 KiB 16 took a tenth less than 64.
FEWEST, CHUNK = 16, 64
SPLIT = 512  # keys of a task: 256 KiB of bfloat16 at D = 128, far more work than taking it costs


def chunk_of(key_bytes: int) -> int:
    """Return the keys of a chunk: CHUNK, halved down to FEWEST until a chunk and the next one, with
    `key_bytes` for a key and its value of all heads, fill at most a quarter of the L2 cache."""
    chunk = CHUNK
    while chunk > FEWEST and 8 * chunk * key_bytes > l2_bytes():
        chunk //= 2
    return chunk


@inlined
def position_of(column, order, lanes):
    """Return the index at which a row in scratch keeps column `column` of a row in memory.

    If order is lanes, columns keep their places. If it is 2 lanes, each run of 2 lanes columns is
    stored as its even columns and then its odd ones.

    Args:
        order: the columns of a run, lanes or 2 lanes.
        lanes: the numbers of a register.
    """
    start = column // order * order
    within = column - start
    if order == lanes:
        return column
    return start + (within % 2) * lanes + within // 2


@inner
def _fill_addresses(at, block_size, table, sequence, start, block_bytes, row_bytes, first, end):
    """Write the addresses of keys first ... end - 1 of a sequence to at[0:], by its row of the
    block table; the last address is repeated to the end of the array."""
    offset, block = first % block_size, first // block_size
    address = 0
    for key in range(end - first):
        if key == 0 or offset == block_size:
            offset = 0 if key > 0 else offset
            number = types.int64(table[sequence, block])
            address = start + number * block_bytes + offset * row_bytes
            block += 1
        at[key] = address
        address += row_bytes
        offset += 1
    at[end - first :] = at[end - first - 1]


@inner
def _round_row(row, count, q, at):
    """Round row[0 : count], floats, to 16-bit integers in q[at : at + count]; return the value of
    one unit, by which the row is divided. A row of tiny numbers becomes zeros."""
    top = abs(row[0])
    for column in range(count):
        top = max(top, abs(row[column]))
    unit = top / LARGEST_INTEGER
    inverse = 1.0 / unit if unit >= SMALLEST_SCALE else 0.0
    for column in range(count):
        q[at + column] = types.int64(math.floor(row[column] * inverse + 0.5))
    return unit


@inner
def _load_queries(
    sizes, rule, like, cache_like, start, first_head, num_heads, padded, ld, q, scales, row
):
    """Load the rows of q of num_heads key heads' groups into scratch, and set `scales` to the
    factors that make logits of their products with keys.

    Rows are in the order of the cache's columns, factors in the layout of m.

    Args:
        like, cache_like, q, scales, row: bare pointers; row is scratch for a row.
        start: the address of the sequence's first row of q.
    """
    lanes, order = lanes_of(like), order_of(cache_like, like)
    heads = heads_of_pass(sizes.group, lanes)
    for lane in range(num_heads * padded * lanes):
        scales[lane] = rule.scale
    for member in range(num_heads * sizes.group):
        head = first_head * sizes.group + member
        slot = member // sizes.group * padded + member % sizes.group
        at, address = slot * ld, start + head * sizes.q_head
        if has_words(q) and has_words(cache_like):
            load_row(like, sizes.q_code, q, at, address, sizes.head_dim)
            continue
        if not has_words(q) and order == lanes:
            load_row(like, sizes.q_code, q, at, address, sizes.head_dim)
            continue
        check = load_row(like, sizes.q_code, row, 0, address, sizes.head_dim)
        if has_words(q):
            if check != 0.0:  # such a row is NaN whatever its keys are
                for column in range(sizes.head_dim):
                    row[column] = 0
            unit = _round_row(row, sizes.head_dim, q, at) + check
            for lane in range(slot % heads, lanes, heads):
                scales[slot // heads * lanes + lane] = rule.scale * unit
        else:
            for column in range(sizes.head_dim):
                q[at + position_of(column, order, lanes)] = row[column]


@inlined
def _num_numbers(chunk, num_heads):
    """Return how many int64 a task needs for addresses: of keys, of values, and of the rows to
    prefetch."""
    return 2 * (SPLIT + 3 * CHUNK) + 2 * chunk * num_heads


@inlined
def _num_cells(lanes):
    """Return how many floats a task needs in scratch: scales of keys and values, slopes, factors of
    old sums, and scores."""
    return 2 * (CHUNK + lanes) + 3 * lanes + CHUNK * HEADS


@inner
def _decode_task(
    sizes,
    rule,
    arrays,
    cache_like,
    sequence,
    split,
    chunk,
    fetches,
    first_head,
    num_heads,
    slot,
    numbers,
    cells,
    q,
    scales,
    acc,
    m,
    l,
):
    """Fold one split of 512 keys of a sequence into acc, m and l of num_heads key heads, chunk by
    chunk, in the order of memory; a split without visible keys changes nothing.

    acc of key head first_head + i starts at (slot + i) * padded * ldv. numbers, cells: scratch of
    `_num_numbers` and `_num_cells` elements.
    """
    like, starts, table = arrays.like, arrays.starts, arrays.table
    lanes = lanes_in(cache_like, like)
    unit = unit_of(cache_like, like)
    heads = heads_of_pass(sizes.group, lanes)
    padded = (sizes.group + heads - 1) // heads * heads
    ld = (sizes.head_dim + unit - 1) // unit * unit
    ldv = (sizes.v_head_dim + unit - 1) // unit * unit
    k_len = starts[sequence, K_LEN]
    end = min((split + 1) * SPLIT, k_len)
    first = max(split * SPLIT, first_seen(sizes.window_left, 1, k_len, 0))
    if first >= end:
        return
    # Includes the first keys of the next split, which most likely this thread takes.
    beyond = min(end + CHUNK, k_len)
    most = beyond - first + 2 * CHUNK
    k, v, ahead = numbers[:most], numbers[most : 2 * most], numbers[2 * most :]
    _fill_addresses(
        k,
        sizes.block_size,
        table,
        sequence,
        starts[sequence, K],
        sizes.k_block,
        sizes.k_row,
        first,
        beyond,
    )
    _fill_addresses(
        v,
        sizes.block_size,
        table,
        sequence,
        starts[sequence, V],
        sizes.v_block,
        sizes.v_row,
        first,
        beyond,
    )
    has_scales = has_bytes(cache_like)
    k_scale, v_scale = k, v
    if has_scales:
        k_scale, v_scale = (
            scratch(SPLIT + 2 * CHUNK, starts[0]),
            scratch(SPLIT + 2 * CHUNK, starts[0]),
        )
        _fill_addresses(
            k_scale,
            sizes.block_size,
            table,
            sequence,
            sizes.k_scale,
            sizes.k_scale_block,
            sizes.k_scale_row,
            first,
            beyond,
        )
        _fill_addresses(
            v_scale,
            sizes.block_size,
            table,
            sequence,
            sizes.v_scale,
            sizes.v_scale_block,
            sizes.v_scale_row,
            first,
            beyond,
        )
    first_s = 2 * (CHUNK + lanes) + 3 * lanes
    k_factor, v_factor = cells[: CHUNK + lanes], cells[CHUNK + lanes : 2 * (CHUNK + lanes)]
    slopes, rescale = cells[first_s - 3 * lanes : first_s - 2 * lanes], cells[first_s - 2 * lanes :]
    s = cells[first_s:]
    cells[: first_s - 2 * lanes] = 0
    rows = Rows(bare(k), bare(v), bare(k_scale), bare(v_scale), bare(ahead))
    strip = Strip(bare(s), bare(rescale), bare(slopes), bare(k_factor), bare(v_factor))
    sums = Sums(bare(q), bare(scales), bare(acc), bare(m), bare(l))
    number, cached, head_slopes = bare(like), bare(cache_like), bare(arrays.slopes)
    is_dry = sizes.group == 1 and sizes.v_head_dim % span_of(cached, number) == 0
    if not (fetches or is_dry):  # prefetching a cached line costs little
        ahead[: 2 * chunk * num_heads] = k[0]
    for key in range(first, end, chunk):
        at, count = key - first, min(chunk, end - key)
        if has_scales:
            fetch_scales(sizes, rows, chunk, at + chunk, first_head)
        if fetches:
            look_ahead(sizes, rows, chunk, at + chunk, first_head, num_heads)
        for index in range(num_heads):
            attend_chunk(
                sizes,
                rule,
                number,
                cached,
                lanes,
                has_scales,
                first_head + index,
                distance_to(1, k_len, 0, key),
                head_slopes,
                rows,
                at,
                2 * chunk * index,
                chunk,
                count,
                fetches,
                strip,
                sums,
                index * padded * ld,
                (slot + index) * padded * ldv,
                index * (padded // heads) * lanes,
            )
    keep_alive((k_scale, v_scale))


@inner
def _merge_splits(
    sizes,
    like,
    sinks,
    first_head,
    address,
    lse,
    needs_lse,
    at,
    slot,
    num_splits,
    sums,
    tops,
    totals,
    order,
    padded,
    ldv,
    row,
    ordered,
):
    """Merge the splits of one (sequence, key head) in order and write o and, if requested, lse.

    Args:
        like, sinks, lse, sums, tops, totals: bare pointers, as are row and ordered, scratch for
            ldv numbers each.
        address, at: the address of o, and the index of lse, of the sequence's head 0.
    """
    lanes, dim, lowest = lanes_of(like), sizes.v_head_dim, -math.inf
    for member in range(sizes.group):
        head = first_head + member
        if num_splits == 1 and order == lanes and sinks[head] == lowest:  # nothing to merge
            part = slot * padded + member
            top, total = tops[part], totals[part]
            inverse = simd.number(like, 0.0) if total == 0.0 else simd.number(like, 1.0) / total
            store_row(
                like, sizes.q_code, sums, part * ldv, inverse, address + head * sizes.o_head, dim
            )
            if needs_lse:
                lse[at + head * sizes.lse_head] = top + math.log(total) if total != 0.0 else lowest
            continue
        top, total = sinks[head], simd.number(like, 0.0)
        for split in range(num_splits):
            top = max(top, tops[(slot + split * sizes.num_kv_heads) * padded + member])
        if top > lowest and sinks[head] > lowest:
            total = simd.number(like, math.exp(sinks[head] - top))
        for column in range(ldv):
            row[column] = 0
        for split in range(num_splits):
            part = (slot + split * sizes.num_kv_heads) * padded + member
            if totals[part] == 0.0:
                continue
            below, weight = tops[part] - top, simd.number(like, 1.0)
            if below != 0.0:  # the factor of the only split is 0
                weight = simd.number(like, math.exp(below))
            total += totals[part] * weight
            for column in range(ldv):
                row[column] += weight * sums[part * ldv + column]
        inverse = simd.number(like, 0.0) if total == 0.0 else simd.number(like, 1.0) / total
        for column in range(dim):
            ordered[column] = row[position_of(column, order, lanes)]
        store_row(like, sizes.q_code, ordered, 0, inverse, address + head * sizes.o_head, dim)
        if needs_lse:
            lse[at + head * sizes.lse_head] = top + math.log(total) if total != 0.0 else lowest


@kernel
def plan_decode(starts, window_left, num_kv_heads, splits):
    """Fill splits (B, 2) with the first split of 512 keys and the number of splits of each
    sequence, and starts[:, TASK] with its first slot, in place; return the number of slots, one for
    each split and key head."""
    num_tasks = 0
    for sequence in range(len(starts)):
        length = starts[sequence, K_LEN]
        first = first_seen(window_left, 1, length, 0) // SPLIT
        splits[sequence, 0] = first
        splits[sequence, 1] = max((length + SPLIT - 1) // SPLIT - first, 1)
        starts[sequence, TASK] = num_tasks
        num_tasks += splits[sequence, 1] * num_kv_heads
    return num_tasks


@kernel
def place_sequences(starts, edges, lengths, q, q_row, o, o_row, k_cache, v_cache):
    """Fill `starts` in place from the addresses of q, o, k_cache and v_cache, the row strides of q
    and o in bytes, and the lengths of sequences.

    Args:
        edges, lengths: cu_seqlens_q and seqlens_k.

    Returns:
        The numbers of sequences with one row, with more, and with a negative number of rows; and
        the largest number of keys of a sequence with rows.
    """
    single = several = negative = longest = types.int64(0)
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
        negative += rows < 0
        if rows > 0:
            longest = max(longest, starts[sequence, K_LEN])
    return single, several, negative, longest


@inner
def decode_attention(
    sizes,
    rule,
    arrays,
    cache_like,
    chunk,
    fetches,
    heads_per_task,
    splits,
    sums,
    tops,
    totals,
    finished,
    lse,
    needs_lse,
    counter,
    num_tasks,
):
    """Decode in this thread: take tasks, each a split of keys of a sequence and heads_per_task key
    heads, until none is left; the thread that ends a head's last split merges its splits and writes
    o and lse.

    Args:
        sizes, rule, arrays: parts of a `Problem`; every sequence has one query row, and
            starts[:, TASK] is its first slot: one per split and key head.
        cache_like: an empty array of the cache's dtype; uint16 is bfloat16, int16 is float16, uint8
            is float8_e4m3fn.
        fetches: True if rows of the next chunk are prefetched, see `decode_launch.FETCHED`.
        heads_per_task: a divisor of the number of key heads.
        splits: (B, 2) int64, first split and number of splits of each sequence.
        sums, tops, totals: flat workspaces of acc, m and l, by slot and padded query head.
        finished: (B * Hk,) int64 zeros, the counters of finished splits.
        lse: a flat array of like's type, written only if needs_lse.
        counter: (1,) int64, the next task.
    """
    like, starts = arrays.like, arrays.starts
    lanes = simd.REGISTER_BYTES // like.itemsize
    heads = heads_of_pass(sizes.group, lanes)
    padded = (sizes.group + heads - 1) // heads * heads
    unit = unit_of(cache_like, like)
    ld = (sizes.head_dim + unit - 1) // unit * unit
    ldv = (sizes.v_head_dim + unit - 1) // unit * unit
    area, dims = heads_per_task * padded * lanes, (sizes.head_dim + 31) // 32 * 32
    # Parts of one array: each allocation costs a noticeable part of a short call.
    num_q = (heads_per_task * padded * ld * arrays.packed_like.itemsize + 63) // 64 * 8
    num_cells = 3 * area + dims + 2 * ldv
    all_cells = (num_cells + _num_cells(lanes)) * like.itemsize
    num_numbers = _num_numbers(chunk, heads_per_task)
    owned = scratch(num_q + (all_cells + 63) // 64 * 8 + num_numbers, starts[0])
    memory = types.int64(owned.ctypes.data)
    q = array_at(memory, heads_per_task * padded * ld, arrays.packed_like)
    q[:] = 0
    memory += 8 * num_q
    cells = array_at(memory, num_cells + _num_cells(lanes), like)
    numbers = array_at(memory + (all_cells + 63) // 64 * 64, num_numbers, starts[0])
    scales, m, l = cells[:area], cells[area : 2 * area], cells[2 * area : 3 * area]
    # Bare pointers, since references to arrays, though none is counted, took a third of a short
    # call.
    query, row = bare(cells[3 * area :]), bare(cells[3 * area + dims :])
    ordered = bare(cells[3 * area + dims + ldv :])
    number, cached, sinks = bare(like), bare(cache_like), bare(arrays.sinks)
    loaded = -1
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        slot = task * heads_per_task
        sequence = 0
        while sequence + 1 < len(starts) and starts[sequence + 1, TASK] <= slot:
            sequence += 1
        local = slot - starts[sequence, TASK]
        split, first_head = local // sizes.num_kv_heads, local % sizes.num_kv_heads
        if sequence != loaded or heads_per_task < sizes.num_kv_heads:
            _load_queries(
                sizes,
                rule,
                number,
                cached,
                starts[sequence, Q],
                first_head,
                heads_per_task,
                padded,
                ld,
                bare(q),
                bare(scales),
                query,
            )
            loaded = sequence
        m[:] = -math.inf
        l[:] = 0
        sums[slot * padded * ldv : (slot + heads_per_task) * padded * ldv] = 0
        _decode_task(
            sizes,
            rule,
            arrays,
            cache_like,
            sequence,
            splits[sequence, 0] + split,
            chunk,
            fetches,
            first_head,
            heads_per_task,
            slot,
            numbers,
            cells[num_cells:],
            q,
            scales,
            sums,
            m,
            l,
        )
        for member in range(heads_per_task * padded):
            lane = member // heads * lanes + member % heads
            tops[slot * padded + member], totals[slot * padded + member] = m[lane], l[lane]
        for kv_head in range(first_head, first_head + heads_per_task):
            owner = sequence * sizes.num_kv_heads + kv_head
            if next_task(finished[owner : owner + 1]) == splits[sequence, 1] - 1:
                _merge_splits(
                    sizes,
                    number,
                    sinks,
                    kv_head * sizes.group,
                    starts[sequence, O],
                    bare(lse),
                    needs_lse,
                    starts[sequence, LSE],
                    starts[sequence, TASK] + kv_head,
                    splits[sequence, 1],
                    bare(sums),
                    bare(tops),
                    bare(totals),
                    order_of(cached, number),
                    padded,
                    ldv,
                    row,
                    ordered,
                )
    keep_alive(owned)


@kernel
def attend_rows(
    like,
    packed_like,
    cache_like,
    frame,
    chunk,
    fetches,
    heads_per_task,
    splits,
    q,
    k,
    v,
    o,
    lse,
    work,
    finished,
    counter,
    num_tasks,
):
    """Decode in this thread, as `decode_attention` does, for a problem in a frame: one query row of
    each sequence attends to its keys, and o and lse are written.

    Args:
        q, k, v, o: the addresses to which starts are relative; all 0 if starts are absolute.
        lse: the address of numbers of like's type, or 0.
        work: the workspaces sums, tops and totals, one after the other: by slot, padded query head,
            and for sums by channel, rounded up to 64 each. It may be empty, as `finished`, for one
            thread, which then has its own.
    """
    problem = read_problem(frame, like, packed_like)
    sizes = problem.sizes
    owned = placed(problem.arrays.starts, q, k, v, o)
    arrays = with_starts(problem, borrowed(owned)).arrays
    width = (sizes.v_head_dim + 63) // 64 * 64
    heads = heads_of_pass(sizes.group, lanes_of(like))
    rows = num_tasks * heads_per_task * ((sizes.group + heads - 1) // heads * heads)
    num_owners = len(arrays.starts) * sizes.num_kv_heads
    owned_alone, counts, results = finished, borrowed(finished), array_at(lse, 0, like)
    work = borrowed(work)
    if len(work) == 0:
        size = (num_owners + 7) // 8 * 8
        owned_alone = scratch(size + (rows * (width + 2) * like.itemsize + 7) // 8, splits[0])
        counts = borrowed(owned_alone[:num_owners])
        counts[:] = 0
        work = array_at(types.int64(owned_alone.ctypes.data) + 8 * size, rows * (width + 2), like)
    decode_attention(
        sizes,
        problem.rule,
        arrays,
        borrowed(cache_like),
        chunk,
        fetches,
        heads_per_task,
        borrowed(splits),
        work[: rows * width],
        work[rows * width : rows * width + rows],
        work[rows * width + rows :],
        counts,
        results,
        lse != 0,
        counter,
        num_tasks,
    )
    keep_alive(owned)
    keep_alive(owned_alone)
