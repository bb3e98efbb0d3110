"""Decoding with the sums of a prompt's kernel, in vector registers.

What      o = softmax(logits) v and lse of one query row of each sequence, with exactly the bits
          that `attention/forward.py` gives that row in a chunk of many.
Grid      one task per (sequence, some or all key heads), taken from a counter.
One task  for each tile of 128 keys and each of its heads: S = q K^T with as many keys as a register
          has lanes, transposed in registers; the softmax of `attention/softmax.py`; O += P V.
Traffic   each K and V row is read once, all heads of a tile before the next tile, whose rows are
          prefetched meanwhile. Rows of float32 and float64 are multiplied in place, others are
          widened first.
Numerics  those of `attention/forward.py`: a score is one chain of sums along the channels, o one
          chain along the keys. Products with hidden keys, which a chunk computes and this kernel
          does not, are zeros.
"""

# ruff: noqa: E741 - m, l, acc, s and p are the names of the papers

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.attention.keys import keys_of, values_of
from tilewise.kernels.cpu.attention.problem import K_LEN, LSE, TILE_N, O, Q
from tilewise.kernels.cpu.attention.softmax import join_sink, logits_row, softmax_row
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.frame import pointer_at
from tilewise.kernels.cpu.machine.gemm import block_of, lanes_in, panel_columns, words_to_elements
from tilewise.kernels.cpu.machine.pack import (
    emit_transpose,
    pair_tile,
    prefetch,
)
from tilewise.kernels.cpu.machine.rows import F32, F64, load_row, store_row
from tilewise.kernels.cpu.machine.source import address_of, gather_rows
from tilewise.kernels.cpu.machine.threads import (
    bare,
    borrowed,
    inlined,
    inner,
    keep_alive,
    next_task,
    scratch,
    zero_scratch,
)
from tilewise.kernels.cpu.paged.cache_rows import emit_loop
from tilewise.kernels.cpu.visible import WORD, WORDS, distance_to, first_seen, see_keys

RUN = 16  # keys whose rows lie in one cache block
RUNS = TILE_N // RUN
_LINE = 64  # bytes
_i16, _i32, _i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _score(heads):
    """Return an intrinsic that computes the scores of `heads` rows of q and LANES keys."""

    @intrinsic
    def score(typingctx, like, q, qi, ld, words, address, row_bytes, s, si):
        """Set s[si + 128 head + lane] to the dot product of row `head` of q and the lane's key, one
        chain of sums along the channels, word by word.

        Args:
            like: an array of the type of sums.
            q, qi, ld: the rows of words, the index of the first, the elements from row to row.
            words: the words of a row, a multiple of LANES; a word is a float or two bfloat16.
            address, row_bytes: the address of LANES keys, and the bytes from key to key.
        """
        dtype = simd.float_of(like)
        index = types.int64
        sig = types.void(like, q, index, index, index, index, index, s, index)

        def codegen(context, builder, sig, args):
            _, q_, qi_, ld_, words_, address_, row_, s_, si_ = args
            vector = simd.vector_ir(dtype)
            lanes = vector.count
            is_bf16 = q.dtype == types.uint16
            size = 8 if dtype == types.float64 else 4
            bits = ir.VectorType(_i64 if size == 8 else _i32, lanes)
            first = simd.pointer_to(context, builder, q, q_, qi_)
            rows = [builder.gep(first, [builder.mul(ld_, _i64(head))]) for head in range(heads)]
            starts = [builder.add(address_, builder.mul(row_, _i64(key))) for key in range(lanes)]

            def step(number, sums):
                at = builder.mul(number, _i64(lanes * size))
                keys = [simd.load_at(builder, builder.add(start, at), bits, 2) for start in starts]
                column = builder.mul(number, _i64(lanes * (2 if is_bf16 else 1)))
                sums = list(sums)
                for word, key in enumerate(emit_transpose(builder, keys)):
                    for head, row in enumerate(rows):
                        place = builder.add(column, _i64(word * (2 if is_bf16 else 1)))
                        pointer = builder.bitcast(
                            builder.gep(row, [place]), bits.element.as_pointer()
                        )
                        pair = simd.broadcast(builder, builder.load(pointer, align=2), lanes)
                        if is_bf16:
                            name = "x86.avx512bf16.dpbf16ps.512"
                            terms = [sums[head], pair, key]
                            sums[head] = simd.call_llvm(builder, name, vector, terms)
                        else:
                            a, b = (builder.bitcast(x, vector) for x in (pair, key))
                            sums[head] = simd.fuse(builder, a, b, sums[head])
                return sums

            steps = builder.sdiv(words_, _i64(lanes))
            zero = [ir.Constant(vector, None)] * heads
            for head, total in enumerate(emit_loop(builder, steps, zero, step, "score")):
                to = builder.add(si_, _i64(head * TILE_N))
                pointer = simd.pointer_to(context, builder, s, s_, to)
                simd.store_vector(builder, total, pointer, 4)
            return context.get_dummy_value()

        return sig, codegen

    return score


_score_1, _score_2, _score_4 = (_score(heads) for heads in (1, 2, 4))
_add_1_1, _add_2_1, _add_4_1 = (block_of(rows, 1, "sums") for rows in (1, 2, 4))
_add_1_2, _add_2_2, _add_4_2 = (block_of(rows, 2, "sums") for rows in (1, 2, 4))


class _Work(NamedTuple):
    """The scratch of a task; there are `group` rows a key head.

    Attributes:
        q: the rows of q, zero beyond the head dim.
        acc, m, l: the sums, maxima and sums of probabilities.
        s, p: the scores and probabilities of a tile, rows of 128.
        seen, bias: the scratch of `softmax_row` and `logits_row`.
        k_rows, v_rows, v_panels: keys and values that had to be gathered; values as words of two
            keys.
        at: the addresses of runs of 16 keys of a tile, K's and V's, then those of the next tile.
    """

    q: np.ndarray
    acc: np.ndarray
    m: np.ndarray
    l: np.ndarray
    s: np.ndarray
    p: np.ndarray
    seen: np.ndarray
    bias: np.ndarray
    k_rows: np.ndarray
    v_rows: np.ndarray
    v_panels: np.ndarray
    at: np.ndarray


@inner
def _new_work(sizes, arrays, heads, ld, ldv, is_direct):
    like, packed, numbers = arrays.like, arrays.packed_like, arrays.starts[0]
    area = heads * sizes.group
    gathered = 0 if is_direct else TILE_N
    paired = TILE_N * ldv if words_to_elements(packed) == 2 else 0
    return _Work(
        zero_scratch(area * ld, packed),
        scratch(area * ldv, like),
        scratch(area, like),
        scratch(area, like),
        scratch(sizes.group * TILE_N, like),
        scratch(sizes.group * TILE_N, packed),
        scratch(WORDS, numbers),
        zero_scratch(TILE_N, like),
        zero_scratch(gathered * ld, packed),
        zero_scratch(gathered * ldv, packed),
        scratch(paired, packed),
        scratch(4 * RUNS, numbers),
    )


@inner
def _load_rows(sizes, arrays, work, sequence, first_head, heads, ld):
    """Load the query rows of some key heads into scratch, and set their maxima to -inf and their
    sums to 0.

    Args:
        work: the scratch of the task.
        first_head, heads: the key heads of the task.
        ld: the padded channels.
    """
    work.m[:] = -math.inf
    work.l[:] = 0
    work.acc[:] = 0
    for row in range(heads * sizes.group):
        head = first_head * sizes.group + row
        address = arrays.starts[sequence, Q] + head * sizes.q_head
        load_row(arrays.like, sizes.q_code, work.q, row * ld, address, sizes.head_dim)


@inner
def _store_rows(sizes, arrays, work, lse, sequence, first_head, heads, ldv):
    """Divide the sums of a task's rows by their totals, sinks included, and write o through its
    addresses and lse; a row that saw nothing gets 0 and -inf."""
    like, starts, m, l = arrays.like, arrays.starts, work.m, work.l
    for row in range(heads * sizes.group):
        head = first_head * sizes.group + row
        most, total, share = join_sink(like, m[row], l[row], arrays.sinks[head])
        inverse = like.dtype.type(0.0)
        if total != 0.0:
            inverse = like.dtype.type(1.0) * share / total
        address = starts[sequence, O] + head * sizes.o_head
        store_row(like, sizes.q_code, work.acc, row * ldv, inverse, address, sizes.v_head_dim)
        log_sum = most + math.log(total) if total != 0.0 else -math.inf
        lse[starts[sequence, LSE] + head * sizes.lse_head] = log_sum


@inner
def _find_runs(sizes, arrays, work, sequence, key, first, length, to):
    """Write the addresses of K and of V of each run of 16 keys of the tile from `key` on to
    work.at, from index `to` on; 0 for a run in which no key of first ... length - 1 lies."""
    keys, values = keys_of(sizes, arrays, sequence, 0), values_of(sizes, arrays, sequence, 0)
    for run in range(RUNS):
        row = key + run * RUN
        k = v = types.int64(0)
        if row < length and row + RUN > first:
            k, v = address_of(keys, row), address_of(values, row)
        work.at[to + run], work.at[to + RUNS + run] = k, v


@inner
def _gather(sizes, arrays, work, sequence, kv_head, key, low, high, begin, end, ld, ldv):
    """Load the visible keys and values of one tile and head into scratch, with zeros around, and
    pack values as words of two keys where operands are bfloat16.

    The addresses of runs of keys in work.at are set to the copies.

    Args:
        key: the first key of the tile.
        low, high: the range within the tile that is visible.
        begin, end: the range to fill, a multiple of a word.
        ld, ldv: the padded channels of keys and of values.
    """
    size = work.k_rows.itemsize
    work.v_rows[begin * ldv : low * ldv] = 0
    like, first, count = arrays.like, key + low, high - low
    keys = keys_of(sizes, arrays, sequence, kv_head)
    gather_rows(like, keys, work.k_rows[low * ld :], ld, first, count, end - low)
    values = values_of(sizes, arrays, sequence, kv_head)
    gather_rows(like, values, work.v_rows[low * ldv :], ldv, first, count, end - low)
    for run in range(RUNS):
        work.at[run] = work.k_rows.ctypes.data + run * RUN * ld * size
        work.at[RUNS + run] = work.v_rows.ctypes.data + run * RUN * ldv * size
    if words_to_elements(work.v_rows) == 2:
        pair_tile(arrays.like, work.v_rows, end, ldv, work.v_panels, TILE_N)


@inlined
def _fetch_run(address, row_bytes, row_size):
    for row in range(RUN):
        for line in range(0, row_size, _LINE):
            prefetch(address + row * row_bytes + line)


@inlined
def _score_tile(
    like,
    work,
    group,
    lanes,
    at,
    ld,
    words,
    k_row,
    v_row,
    k_offset,
    v_offset,
    k_size,
    v_size,
    is_direct,
    low,
    high,
):
    """Compute the scores of keys low ... high - 1 of a tile, and of keys that share a run of 16
    with them, for the `group` rows of one key head into work.s; prefetch the next tile's runs."""
    for run in range(low // RUN, (high + RUN - 1) // RUN):
        next_k, next_v = work.at[2 * RUNS + run], work.at[3 * RUNS + run]
        # the next tile's rows are prefetched into the L2 cache meanwhile
        if is_direct and next_k != 0:
            _fetch_run(next_k + k_offset, k_row, k_size)
            _fetch_run(next_v + v_offset, v_row, v_size)
        address = work.at[run] + k_offset
        for key in range(0, RUN, lanes):
            here, column, row = address + key * k_row, run * RUN + key, 0
            while row < group:
                qi, si = (at + row) * ld, row * TILE_N + column
                if group - row >= 4:
                    _score_4(like, work.q, qi, ld, words, here, k_row, work.s, si)
                    row += 4
                elif group - row >= 2:
                    _score_2(like, work.q, qi, ld, words, here, k_row, work.s, si)
                    row += 2
                else:
                    _score_1(like, work.q, qi, ld, words, here, k_row, work.s, si)
                    row += 1


@inlined
def _add(c, ci, ldc, is_wide, rows, a, ai, a_word, b, bi, b_word, k_words):
    """Compute 4, 2 or 1 rows of c += a b, at most `rows`, for one register of columns, or two if
    `is_wide`; rows of a are TILE_N apart."""
    if is_wide:
        if rows >= 4:
            _add_4_2(c, ci, ldc, a, ai, TILE_N, a_word, b, bi, b_word, k_words, c, 0)
        elif rows >= 2:
            _add_2_2(c, ci, ldc, a, ai, TILE_N, a_word, b, bi, b_word, k_words, c, 0)
        else:
            _add_1_2(c, ci, ldc, a, ai, TILE_N, a_word, b, bi, b_word, k_words, c, 0)
    elif rows >= 4:
        _add_4_1(c, ci, ldc, a, ai, TILE_N, a_word, b, bi, b_word, k_words, c, 0)
    elif rows >= 2:
        _add_2_1(c, ci, ldc, a, ai, TILE_N, a_word, b, bi, b_word, k_words, c, 0)
    else:
        _add_1_1(c, ci, ldc, a, ai, TILE_N, a_word, b, bi, b_word, k_words, c, 0)


@inlined
def _add_values(
    work,
    group,
    lanes,
    elements,
    width,
    at,
    ldv,
    columns,
    v_row,
    v_offset,
    size,
    low,
    high,
    begin,
    end,
):
    """Add P V of a tile to the sums of the `group` rows of one key head, work.acc, one key after
    another."""
    row = 0
    while row < group:
        rows = 4 if group - row >= 4 else 2 if group - row >= 2 else 1
        ci = (at + row) * ldv
        if elements == 2:
            for column in range(0, columns, 2 * lanes):
                _add(
                    work.acc,
                    ci + column,
                    ldv,
                    columns - column > lanes,
                    rows,
                    work.p,
                    row * TILE_N + begin,
                    2,
                    work.v_panels,
                    column * TILE_N + begin // 2 * width,
                    width,
                    (end - begin) // 2,
                )
            row += rows
            continue
        for run in range(low // RUN, (high + RUN - 1) // RUN):
            start = max(run * RUN, low)
            count = min(high, run * RUN + RUN) - start
            values = pointer_at(work.p, work.at[RUNS + run] + v_offset)
            for column in range(0, columns, 2 * lanes):
                _add(
                    work.acc,
                    ci + column,
                    ldv,
                    columns - column > lanes,
                    rows,
                    work.p,
                    row * TILE_N + start,
                    1,
                    values,
                    (start - run * RUN) * (v_row // size) + column,
                    v_row // size,
                    count,
                )
        row += rows


@inner
def _weigh_rows(sizes, rule, arrays, work, sequence, kv_head, at, distance, begin, end, ldv):
    """Turn a tile's scores in work.s into probabilities in work.p for the rows of one key head,
    update their maxima and sums, and rescale their sums of values, with the bits of
    `attention/forward.py`."""
    like, lanes = arrays.like, simd.REGISTER_BYTES // arrays.like.itemsize
    factor = rule.scale if rule.is_scaled_only else 1.0
    for row in range(sizes.group):
        if not rule.is_scaled_only:
            slope = arrays.slopes[sequence * sizes.slopes_batch + kv_head * sizes.group + row]
            logits_row(
                like,
                rule,
                work.s,
                row * TILE_N,
                begin,
                end,
                slope,
                distance,
                work.bias,
                work.bias,
                0,
            )
        work.m[at + row], total, rescale = softmax_row(
            like,
            work.s,
            row * TILE_N,
            factor,
            work.p,
            row * TILE_N,
            begin,
            end,
            work.seen,
            0,
            work.m[at + row],
            False,
            work.seen,
        )
        work.l[at + row] = work.l[at + row] * rescale + total
        if rescale != 1.0:
            factors = simd.splat(like, rescale)
            for column in range((at + row) * ldv, (at + row + 1) * ldv, lanes):
                simd.store(work.acc, column, simd.mul(simd.load(work.acc, column), factors))


@inner
def _decode_task(
    sizes, rule, arrays, work, pointers, sequence, first_head, heads, ld, ldv, is_direct
):
    """Let the one query row of a sequence attend to all of its visible keys, tile by tile, for key
    heads first_head ... first_head + heads - 1; their sums stay in `work`, whose bare pointers are
    `pointers`."""
    length, group = arrays.starts[sequence, K_LEN], sizes.group
    first = first_seen(sizes.window_left, 1, length, 0)
    like, lanes = bare(arrays.like), lanes_in(arrays.like)
    elements, width = words_to_elements(work.q), panel_columns(arrays.like) * 2
    size = work.p.itemsize
    # Zeros after the last channel change no sum: rows in place have none.
    words = (sizes.head_dim if is_direct else ld) // elements
    columns = sizes.v_head_dim if is_direct else ldv
    start = first // TILE_N * TILE_N
    if is_direct:
        _find_runs(sizes, arrays, work, sequence, start, first, length, 0)
    for key in range(start, length, TILE_N):
        low, high = max(first - key, 0), min(length - key, TILE_N)
        begin, end = low // WORD * WORD, (high + WORD - 1) // WORD * WORD
        see_keys(work.seen, 0, low, high)
        if is_direct:
            _find_runs(sizes, arrays, work, sequence, key + TILE_N, first, length, 2 * RUNS)
        for index in range(heads):
            kv_head, at = first_head + index, index * group
            k_row, v_row, k_offset, v_offset = 2 * ld, 2 * ldv, 0, 0
            if is_direct:
                k_row, v_row = sizes.k_row, sizes.v_row
                k_offset, v_offset = kv_head * sizes.k_head, kv_head * sizes.v_head
            else:
                k_row, v_row = ld * size, ldv * size
                _gather(sizes, arrays, work, sequence, kv_head, key, low, high, begin, end, ld, ldv)
            _score_tile(
                like,
                pointers,
                group,
                lanes,
                at,
                ld,
                words,
                k_row,
                v_row,
                k_offset,
                v_offset,
                sizes.k_size * sizes.head_dim,
                sizes.k_size * sizes.v_head_dim,
                is_direct,
                low,
                high,
            )
            distance = distance_to(1, length, 0, key)
            _weigh_rows(sizes, rule, arrays, work, sequence, kv_head, at, distance, begin, end, ldv)
            _add_values(
                pointers,
                group,
                lanes,
                elements,
                width,
                at,
                ldv,
                columns,
                v_row,
                v_offset,
                size,
                low,
                high,
                begin,
                end,
            )
        for run in range(2 * RUNS):
            work.at[run] = work.at[2 * RUNS + run]


@inner
def decode_tiles_simd(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks):
    """Decode on the vector unit in this thread: take tasks, each a sequence and heads_per_task key
    heads, until none is left, and write o and lse. The arguments are those of
    `decode_tiles_amx`."""
    arrays, lse = borrowed(arrays), borrowed(lse)
    lanes = simd.REGISTER_BYTES // arrays.like.itemsize
    ld, ldv = (sizes.head_dim + 31) // 32 * 32, (sizes.v_head_dim + 31) // 32 * 32
    as_stored = sizes.k_code == F32 or sizes.k_code == F64
    is_direct = (
        as_stored
        and arrays.packed_like.itemsize == sizes.k_size
        and sizes.block_size % RUN == 0
        and sizes.head_dim % lanes == 0
        and sizes.v_head_dim % lanes == 0
    )
    owned = _new_work(sizes, arrays, heads_per_task, ld, ldv, is_direct)
    work = borrowed(owned)
    pointers = _Work(
        bare(work.q),
        bare(work.acc),
        bare(work.m),
        bare(work.l),
        bare(work.s),
        bare(work.p),
        bare(work.seen),
        bare(work.bias),
        bare(work.k_rows),
        bare(work.v_rows),
        bare(work.v_panels),
        bare(work.at),
    )
    parts = sizes.num_kv_heads // heads_per_task
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        sequence, first_head = task // parts, task % parts * heads_per_task
        _load_rows(sizes, arrays, work, sequence, first_head, heads_per_task, ld)
        _decode_task(
            sizes,
            rule,
            arrays,
            work,
            pointers,
            sequence,
            first_head,
            heads_per_task,
            ld,
            ldv,
            is_direct,
        )
        _store_rows(sizes, arrays, work, lse, sequence, first_head, heads_per_task, ldv)
    keep_alive(owned)
