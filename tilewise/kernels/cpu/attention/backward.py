"""Tiled exact attention, backward: probabilities are recomputed, nothing is stored but lse.

What      dq, dk, dv and the gradient of the bias, from do, lse and delta.
Grid      tasks of rows, see `delta.py`, then one task per (chunk of 4 key tiles, sequence, key
          head), all taken from one counter.
One task  for each tile of TILE_N keys, for each tile of TILE_M query rows that sees it: S = Q K^T,
          dP = dO V^T, then P and dS = P (dP - delta), then dV += P^T dO, dK += dS^T Q, dQ = dS K.
          Pairs of bfloat16 are packed between; floats are multiplied from where they were computed.
Traffic   K and V are read once; Q and dO once per tile of keys, from the L3 cache; dq is kept in
          float32, and chunks add to it in turn.
Numerics  sums in float32 (float64 for float64); P and dS are rounded to the type of the product's
          operands. Sums have one owner, or their owners an order: bits repeat on any thread count.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu.attention.backward_scores import Place, differentiate_rows
from tilewise.kernels.cpu.attention.delta import delta_of_rows
from tilewise.kernels.cpu.attention.forward import (
    add_rows_exactly,
    is_multiplied_as_stored,
    score_tile,
)
from tilewise.kernels.cpu.attention.frame import (
    place_gradients_too,
    placed,
    read_gradients,
    read_problem,
    with_starts,
)
from tilewise.kernels.cpu.attention.gradients import CHUNK_KEYS
from tilewise.kernels.cpu.attention.keys import keys_of, values_of
from tilewise.kernels.cpu.attention.problem import (
    DK,
    DO,
    DQ,
    DV,
    K_LEN,
    Q_LEN,
    SCORE_ROW,
    TILE_M,
    TILE_N,
    Backward,
    Q,
)
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.blocks import BLOCK, add_block, set_block
from tilewise.kernels.cpu.machine.frame import array_at, pointer_at
from tilewise.kernels.cpu.machine.gemm import lanes_in, panel_columns, words_to_elements
from tilewise.kernels.cpu.machine.pack import (
    pair_rows,
    pair_tile,
    prefetch,
    prefetch_to_write,
    transpose_rows,
    transpose_tile,
)
from tilewise.kernels.cpu.machine.rows import F32, F64, copy_rows, store_row
from tilewise.kernels.cpu.machine.source import are_finite, gather_rows
from tilewise.kernels.cpu.machine.threads import (
    bare,
    borrowed,
    inner,
    keep_alive,
    kernel,
    next_task,
    overloaded,
    scratch,
    zero_scratch,
)
from tilewise.kernels.cpu.machine.turns import (
    Turn,
    end_turn,
    publish_rows,
    wait_for_count,
    wait_for_rows,
)
from tilewise.kernels.cpu.visible import (
    WORD,
    WORDS,
    new_seen,
    see_tile,
    seeing_rows,
    view_columns,
)

ROWS_AHEAD = 6  # rows that are prefetched before they are written: a row is a few lines, far apart


@inner
def _pack_rows(like, s, dp, p_words, ds_words, ds_rows, rows, begin, end):
    """Store P and dS of a tile as bfloat16 operands: both as words of two neighbouring queries, and
    dS also as rows.

    Args:
        like: an empty array of the float type to compute in.
        s, dp: P and dS, SCORE_ROW numbers a row.
        p_words, ds_words, ds_rows: the operands to write.
        rows: the number of rows, an even one.
        begin, end: the range of columns (keys).
    """
    lanes = lanes_in(like)
    for row in range(0, rows, 2):
        for column in range(begin, end, lanes):
            at, below = row * SCORE_ROW + column, (row + 1) * SCORE_ROW + column
            p0, p1 = simd.load(s, at), simd.load(s, below)
            ds0, ds1 = simd.load(dp, at), simd.load(dp, below)
            simd.store(ds_rows, at, ds0)
            simd.store(ds_rows, below, ds1)
            simd.store_pair(p_words, row * SCORE_ROW + 2 * column, p0, p1)
            simd.store_pair(ds_words, row * SCORE_ROW + 2 * column, ds0, ds1)


@inner
def _clear_beyond(like, scores, rows, end):
    """Zero the BLOCK columns of s and dp right of column `end` in `rows` rows, where a block of
    keys that is multiplied may exceed the computed columns; nothing where BLOCK divides 32."""
    lanes = lanes_in(like)
    zero = simd.splat(like, 0.0)
    if end < TILE_N and WORD % BLOCK > 0:
        for row in range(rows):
            for column in range(row * SCORE_ROW + end, row * SCORE_ROW + end + BLOCK, lanes):
                simd.store(scores.s, column, zero)
                simd.store(scores.dp, column, zero)


@inner
def see_words(seen, tops, bottoms):
    """Set, for each word w of 32 keys of a tile, tops[w] ... bottoms[w], multiples of BLOCK, to the
    range of rows that contains all rows which see one of its keys; TILE_M and 0 if none does."""
    tops[:], bottoms[:] = TILE_M, 0
    for block in range(TILE_M // BLOCK):
        for word in range(seen.begin[block] // WORD, (seen.end[block] + WORD - 1) // WORD):
            tops[word] = min(tops[word], block * BLOCK)
            bottoms[word] = block * BLOCK + BLOCK


@inner
def _add_transposed(c, ld, dim, words, panels, tops, bottoms, begin, end):
    """Add words^T (keys, queries) @ panels (queries, dim) to c (keys, dim), rows of `ld`, for keys
    begin ... end - 1, each BLOCK of keys over the rows tops ... bottoms that see it."""
    width = panel_columns(c)
    elements = words_to_elements(words)
    for column in range(0, dim, width):
        for key in range(begin, end, BLOCK):
            word, last = key // WORD, min(key + BLOCK, end) - 1
            top = min(tops[word], tops[last // WORD])
            bottom = max(bottoms[word], bottoms[last // WORD])
            add_block(
                c,
                key * ld + column,
                ld,
                dim - column,
                words,
                top * SCORE_ROW + key * elements,
                elements,
                SCORE_ROW * elements,
                panels,
                column * TILE_M + top * width,
                (bottom - top) // elements,
            )


def _shared_scratch(array, count, like):
    """Return `array` itself if it is of like's type, else a new `scratch`."""


@overloaded(_shared_scratch)
def _overload_shared_scratch(array, count, like):
    if array.dtype == like.dtype:
        return lambda array, count, like: array
    return lambda array, count, like: scratch(count, like)


class _Keys(NamedTuple):
    """The scratch of a tile of keys: rows of K and V, K and V transposed in panels, K as pairs of
    rows, and the sums of dk and dv."""

    k_rows: np.ndarray
    v_rows: np.ndarray
    k_panels: np.ndarray
    v_panels: np.ndarray
    k_pairs: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class _Queries(NamedTuple):
    """The scratch of a tile of query rows: rows of q and do, both as pairs of rows, and their
    contribution to dq."""

    q_rows: np.ndarray
    do_rows: np.ndarray
    q_pairs: np.ndarray
    do_pairs: np.ndarray
    dq: np.ndarray


class _Scores(NamedTuple):
    """The scratch of a tile of queries x keys: s and dp hold products, then P and dS; p_words,
    ds_words and ds_rows hold both as operands, in the same memory where operands are floats. The
    rest belongs to single rows or words of keys."""

    s: np.ndarray
    dp: np.ndarray
    slack: np.ndarray
    p_words: np.ndarray
    ds_words: np.ndarray
    ds_rows: np.ndarray
    bias: np.ndarray
    ones: np.ndarray
    keep: np.ndarray
    tops: np.ndarray
    bottoms: np.ndarray


@inner
def _new_scratch(like, packed, words_like, index_like, ld, ldv):
    """Allocate a thread's scratch for padded head dims ld and ldv, and return (_Keys, _Queries,
    _Scores), zeroed where padding must stay zero."""
    key_rows = (TILE_N + BLOCK - 1) // BLOCK * BLOCK
    keys = _Keys(
        zero_scratch(TILE_N * ld, packed),
        zero_scratch(TILE_N * ldv, packed),
        scratch(TILE_N * ld, packed),
        scratch(TILE_N * ldv, packed),
        scratch(TILE_N * ld, packed),
        scratch(key_rows * ld, like),
        scratch(key_rows * ldv, like),
    )
    queries = _Queries(
        zero_scratch(TILE_M * ld, packed),
        zero_scratch(TILE_M * ldv, packed),
        scratch(TILE_M * ld, packed),
        scratch(TILE_M * ldv, packed),
        scratch(TILE_M * ld, like),
    )
    area = TILE_M * SCORE_ROW + BLOCK
    s, dp = scratch(area, like), scratch(area, like)
    ds_rows = _shared_scratch(dp, area, packed)
    scores = _Scores(
        s,
        dp,
        zero_scratch(area, like),
        _shared_scratch(s, area, packed),
        _shared_scratch(dp, area, packed),
        ds_rows,
        zero_scratch(TILE_N, like),
        zero_scratch(TILE_M, like),
        scratch(WORDS, words_like),
        scratch(WORDS, index_like),
        scratch(WORDS, index_like),
    )
    scores.ones[:] = 1
    return keys, queries, scores


@inner
def _load_keys(call, place, keys, ld, ldv):
    """Pack the tile of K and V at `place`, a `Place`, into the scratch `keys`; return 0.0, or, if K
    is not finite, NaN, and then k_rows holds K's rows."""
    sizes, arrays = call.sizes, call.arrays
    like, padded = arrays.like, (place.count + 31) // 32 * 32
    source = keys_of(sizes, arrays, place.sequence, place.kv_head)
    values = values_of(sizes, arrays, place.sequence, place.kv_head)
    if padded == place.count and is_multiplied_as_stored(sizes, arrays.packed_like):
        rows, size = bare(keys.k_rows), sizes.k_size
        k = pointer_at(rows, source.start + place.key * source.row)
        v = pointer_at(rows, values.start + place.key * values.row)
        k_row, v_row, number = source.row // size, values.row // size, bare(like)
        transpose_rows(number, k, k_row, 0, padded, ld, bare(keys.k_panels))
        transpose_rows(number, v, v_row, 0, padded, ldv, bare(keys.v_panels))
        pair_rows(number, k, k_row, padded, ld, bare(keys.k_pairs), TILE_N)
        if are_finite(number, k, k_row, padded, ld):
            return like.dtype.type(0.0)
    check = gather_rows(like, source, keys.k_rows, ld, place.key, place.count, padded)
    gather_rows(like, values, keys.v_rows, ldv, place.key, place.count, padded)
    transpose_tile(like, keys.k_rows, padded, ld, keys.k_panels)
    transpose_tile(like, keys.v_rows, padded, ldv, keys.v_panels)
    pair_tile(like, keys.k_rows, padded, ld, keys.k_pairs, TILE_N)
    return check


@inner
def _fetch_rows(call, place, first_row, num_rows):
    """Prefetch the rows of dq of the tile of query rows from first_row on, to be written, and the
    rows of q and do of the next tile."""
    sizes, grads, starts, dq = call.sizes, call.grads, call.arrays.starts, call.dq
    sequence, first_head = place.sequence, place.kv_head * sizes.group
    size = 8 if sizes.q_code == F64 else 4 if sizes.q_code == F32 else 2
    base, real = dq.ctypes.data, dq.itemsize
    for row in range(first_row, min(first_row + 2 * TILE_M, num_rows)):
        query = row // sizes.group
        head = first_head + row - query * sizes.group
        if row < first_row + TILE_M:
            at = starts[sequence, DQ] + query * grads.dq_row + head * sizes.head_dim
            for line in range(0, sizes.head_dim * real, 64):
                prefetch_to_write(base + at * real + line)
        else:
            at = starts[sequence, Q] + query * sizes.q_row + head * sizes.q_head
            for line in range(0, sizes.head_dim * size, 64):
                prefetch(at + line)
            at = starts[sequence, DO] + query * grads.do_row + head * grads.do_head
            for line in range(0, sizes.v_head_dim * size, 64):
                prefetch(at + line)


@inner
def _add_query_rows(call, place, tile, first_row, rows, ld):
    """Add scale * `rows` rows of `tile`, `ld` apart, to call.dq, each to the row of its query and
    head; the tile's first flat row is first_row."""
    sizes, rule, grads, dq = call.sizes, call.rule, call.grads, call.dq
    start, first_head = call.arrays.starts[place.sequence, DQ], place.kv_head * sizes.group
    lanes = lanes_in(dq)
    scale, done = simd.splat(dq, rule.scale), sizes.head_dim // lanes * lanes
    for row in range(rows):
        query = (first_row + row) // sizes.group
        head = first_head + first_row + row - query * sizes.group
        where = start + query * grads.dq_row + head * sizes.head_dim
        for column in range(0, done, lanes):
            part = simd.load(tile, row * ld + column)
            simd.store(dq, where + column, simd.fma(part, scale, simd.load(dq, where + column)))
        for column in range(done, sizes.head_dim):
            dq[where + column] += tile[row * ld + column] * dq.dtype.type(rule.scale)


@inner
def _store_keys(like, code, tile, ld, scale, start, row_bytes, count, dim):
    """Store `count` rows of dk or dv in `tile`, `ld` apart, times `scale`, to addresses from
    `start` on, row_bytes apart, converted to the dtype with this code."""
    size = 8 if code == F64 else 4 if code == F32 else 2
    for row in range(-ROWS_AHEAD, count):
        later = start + min(row + ROWS_AHEAD, count - 1) * row_bytes
        for line in range(0, dim * size, 64):
            prefetch_to_write(later + line)
        if row >= 0:
            store_row(like, code, tile, row * ld, scale, start + row * row_bytes, dim)


@inner
def _query_gradient(call, place, keys, queries, scores, seen, is_finite, turn, first_row, rows, ld):
    """Add scale * dS K to dq for one tile of query rows, once the task before has added to these
    rows.

    Args:
        place: the tile of keys, a `Place`.
        keys, queries, scores: the thread's scratch; `keys` holds the tile of keys.
        seen: the range of keys that each block of rows sees.
        is_finite: whether all keys (K) of the tile are finite; otherwise only visible ones are
            multiplied.
        turn: the Turn in which tasks add to dq; the function waits for it.
        first_row, rows: the rows of the tile.
        ld: the elements of a row of scratch.
    """
    head_dim = call.sizes.head_dim
    if is_finite:
        width, elements = panel_columns(scores.s), words_to_elements(scores.ds_rows)
        for column in range(0, head_dim, width):
            for block in range((rows + BLOCK - 1) // BLOCK):
                begin, end = seen.begin[block], seen.end[block]
                set_block(
                    queries.dq,
                    block * BLOCK * ld + column,
                    ld,
                    head_dim - column,
                    scores.ds_rows,
                    block * BLOCK * SCORE_ROW + begin,
                    SCORE_ROW,
                    elements,
                    keys.k_pairs,
                    column * TILE_N + begin * width,
                    (end - begin) // elements,
                )
    else:
        queries.dq[:] = 0
        add_rows_exactly(
            queries.dq,
            0,
            ld,
            head_dim,
            scores.ds_rows,
            keys.k_rows,
            ld,
            scores.ones,
            seen,
            place.count,
            rows,
        )
    wait_for_rows(turn, first_row + rows)
    _add_query_rows(call, place, queries.dq, first_row, rows, ld)


@inner
def _backward_tile(call, place, keys, queries, scores, seen, is_finite, turn, first_row, ld, ldv):
    """Compute P and dS of one tile of query rows, from first_row on, and the tile of keys at
    `place`; add their terms to the sums of dk and dv in scratch and, after the task before, to dq
    and, where wanted, to dbias.

    Args:
        keys, queries, scores: the thread's scratch; `keys` holds the tile of keys and the sums.
        seen: the pairs that are visible, as `see_tile` filled it.
        is_finite: whether all keys (K) of the tile are finite; otherwise only visible ones are
            multiplied for dq.
        turn: the Turn in which tasks add to dq and dbias; the function waits for it. The caller
            publishes the rows afterwards, for the next task.
        ld, ldv: the padded channels of keys and of values.
    """
    sizes, grads, like = call.sizes, call.grads, call.arrays.like
    start, first_head = call.arrays.starts[place.sequence], place.kv_head * sizes.group
    num_rows = start[Q_LEN] * sizes.group
    rows = min(TILE_M, num_rows - first_row)
    blocks = (rows + BLOCK - 1) // BLOCK
    all_rows = blocks * BLOCK
    begin, end = TILE_N, 0
    for block in range(blocks):
        if seen.end[block] > 0:
            begin, end = min(begin, seen.begin[block]), max(end, seen.end[block])
    copy_rows(
        like,
        sizes.q_code,
        queries.q_rows,
        ld,
        sizes.head_dim,
        start[Q] + first_head * sizes.q_head,
        sizes.q_row,
        sizes.q_head,
        sizes.group,
        first_row,
        rows,
        all_rows,
    )
    copy_rows(
        like,
        sizes.q_code,
        queries.do_rows,
        ldv,
        sizes.v_head_dim,
        start[DO] + first_head * grads.do_head,
        grads.do_row,
        grads.do_head,
        sizes.group,
        first_row,
        rows,
        all_rows,
    )
    pair_tile(like, queries.q_rows, all_rows, ld, queries.q_pairs, TILE_M)
    pair_tile(like, queries.do_rows, all_rows, ldv, queries.do_pairs, TILE_M)
    padded = (place.count + 31) // 32 * 32
    score_tile(
        scores.s,
        queries.q_rows,
        0,
        ld,
        keys.k_panels,
        sizes.head_dim,
        all_rows,
        padded,
        seen.begin,
        seen.end,
    )
    score_tile(
        scores.dp,
        queries.do_rows,
        0,
        ldv,
        keys.v_panels,
        sizes.v_head_dim,
        all_rows,
        padded,
        seen.begin,
        seen.end,
    )
    if grads.has_dbias:
        wait_for_rows(turn, first_row + rows)
    # The rows that follow are prefetched into the L2 cache meanwhile.
    _fetch_rows(call, place, first_row, num_rows)
    differentiate_rows(call, place, seen, scores, first_row, rows, begin, end, 0, all_rows)
    _clear_beyond(like, scores, all_rows, end)
    if scores.p_words.itemsize == 2:
        _pack_rows(
            like,
            scores.s,
            scores.dp,
            scores.p_words,
            scores.ds_words,
            scores.ds_rows,
            all_rows,
            begin,
            end,
        )
    see_words(seen, scores.tops, scores.bottoms)
    _add_transposed(
        keys.dv,
        ldv,
        sizes.v_head_dim,
        scores.p_words,
        queries.do_pairs,
        scores.tops,
        scores.bottoms,
        begin,
        end,
    )
    _add_transposed(
        keys.dk,
        ld,
        sizes.head_dim,
        scores.ds_words,
        queries.q_pairs,
        scores.tops,
        scores.bottoms,
        begin,
        end,
    )
    _query_gradient(call, place, keys, queries, scores, seen, is_finite, turn, first_row, rows, ld)


@inner
def _backward_task(call, spare, seen, turn, chunk, sequence, kv_head):
    """Compute dk and dv of chunk number `chunk` of the keys of one sequence and key head and write
    them; add the chunk's terms to dq and dbias in the order of chunks. `spare` and `seen` are the
    thread's scratch."""
    sizes, grads, arrays, mask = call.sizes, call.grads, call.arrays, call.mask
    like, starts = arrays.like, arrays.starts
    q_len, k_len = starts[sequence, Q_LEN], starts[sequence, K_LEN]
    ld, ldv = (sizes.head_dim + 31) // 32 * 32, (sizes.v_head_dim + 31) // 32 * 32
    keys, queries, scores = spare
    first_key = chunk * CHUNK_KEYS
    end_key = min(first_key + CHUNK_KEYS, k_len)
    for key in range(first_key, end_key, TILE_N):
        count = min(TILE_N, k_len - key)
        place = Place(chunk, sequence, kv_head, key, count)
        check = _load_keys(call, place, keys, ld, ldv)
        sums = (count + 31) // 32 * 32 + BLOCK  # a block may exceed the last word of keys
        keys.dk[: sums * ld] = 0
        keys.dv[: sums * ldv] = 0
        owned_view = view_columns(sizes, mask, sequence, kv_head, key, count)
        view = borrowed(owned_view)
        begin, end = seeing_rows(sizes, q_len, k_len, key, count)
        for first_row in range(begin, end, TILE_M):
            rows = min(TILE_M, q_len * sizes.group - first_row)
            if see_tile(sizes, mask, view, seen, q_len, k_len, first_row, rows, key):
                _backward_tile(
                    call, place, keys, queries, scores, seen, check == 0.0, turn, first_row, ld, ldv
                )
                if key + TILE_N >= end_key:
                    publish_rows(turn, first_row + rows)
        keep_alive(owned_view)
        _store_keys(
            like,
            sizes.k_code,
            keys.dk,
            ld,
            call.rule.scale,
            starts[sequence, DK] + key * grads.dk_row + kv_head * grads.dk_head,
            grads.dk_row,
            count,
            sizes.head_dim,
        )
        _store_keys(
            like,
            sizes.k_code,
            keys.dv,
            ldv,
            call.dropout.scale,
            starts[sequence, DV] + key * grads.dv_row + kv_head * grads.dv_head,
            grads.dv_row,
            count,
            sizes.v_head_dim,
        )


@kernel
def attention_backward(
    like, packed_like, frame, tensors, lse, delta, dq, dbias, done, counter, num_tasks
):
    """Compute the gradients of attention: take tasks in this thread until none is left.

    Tasks of query rows come first: they replace dlse in delta by rowsum(do * o) - dlse. Tasks of
    keys follow: they write dk and dv, and add to dq and dbias.

    Args:
        like, packed_like: empty arrays of the float type to compute in, and of the type of the
            products' operands.
        frame: int64 words that contain the problem and the strides of its gradients, as `frame_of`
            makes them.
        tensors: the seven addresses of q, k, v, o, do, dk and dv, which are added to the starts of
            each sequence; all are 0 if the starts are addresses themselves.
        lse, delta: the addresses of two flat arrays of like's type, laid out alike; delta contains
            dlse.
        dq, dbias: the addresses of zeroed arrays of like's type: (rows, Hq, D), and the gradient of
            the bias.
        done: int64 (tasks of keys + 1,), zeroed: counts of finished work, for which tasks wait; the
            last element counts tasks of rows.
        counter: int64 (1,), the next task, which all threads share.
        num_tasks: the number of tasks of rows and of keys.
    """
    problem = read_problem(frame, like, packed_like)
    owned = placed(problem.arrays.starts, tensors[0], tensors[1], tensors[2], tensors[3])
    if (tensors[4] | tensors[5] | tensors[6]) != 0:
        place_gradients_too(owned, tensors[4], tensors[5], tensors[6])
    problem = with_starts(problem, borrowed(owned))
    call = Backward(
        problem.sizes,
        problem.rule,
        problem.arrays,
        problem.mask,
        problem.dropout,
        read_gradients(frame),
        array_at(lse, 0, like),
        array_at(delta, 0, like),
        array_at(dq, 0, like),
        array_at(dbias, 0, like),
        borrowed(done),
    )
    sizes, grads, arrays, done = call.sizes, call.grads, call.arrays, call.done
    rows_done = done[len(done) - 1 :]
    num_sequences = len(arrays.starts)
    ld, ldv = (sizes.head_dim + 31) // 32 * 32, (sizes.v_head_dim + 31) // 32 * 32
    bits, index_like = call.mask.bits, arrays.starts[0]
    owned_spare = _new_scratch(like, packed_like, bits, index_like, ld, ldv)
    owned_seen = new_seen(bits, index_like)
    spare, seen = borrowed(owned_spare), borrowed(owned_seen)
    heads = 1 if grads.shares_heads else sizes.num_kv_heads
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        if task < grads.num_row_tasks:
            delta_of_rows(call, task)
            next_task(rows_done)
            continue
        wait_for_count(rows_done, grads.num_row_tasks)
        task -= grads.num_row_tasks
        chunk, owner = task // grads.num_owners, task % grads.num_owners
        first_sequence, first_head = owner // heads, owner % heads
        end_sequence = num_sequences if grads.shares_batch else first_sequence + 1
        end_head = sizes.num_kv_heads if grads.shares_heads else first_head + 1
        turn = Turn(done, task, task - grads.num_owners, 0)
        for sequence in range(first_sequence, end_sequence):
            for kv_head in range(first_head, end_head):
                _backward_task(call, spare, seen, turn, chunk, sequence, kv_head)
                turn = end_turn(turn, arrays.starts[sequence, Q_LEN] * sizes.group)
    keep_alive(owned)
    keep_alive(owned_spare)
    keep_alive(owned_seen)
