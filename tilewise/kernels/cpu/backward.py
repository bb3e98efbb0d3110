"""Tiled exact attention, backward: probabilities are recomputed, nothing is stored but lse.

What      dq, dk, dv and the gradient of the bias, from do, lse and delta - dlse.
Grid      one task per (chunk of 4 key tiles, sequence, key head), taken from a counter.
One task  for each tile of 128 keys, for each tile of 64 query rows that sees it: S = Q K^T and
          dP = dO V^T, then P and dS = P (dP - delta), then dV += P^T dO, dK += dS^T Q, dQ = dS K.
Traffic   K and V are read once; Q and dO once per tile of keys, from the L3 cache; dq is kept in
          float32, and chunks add to it in turn.
Numerics  sums in float32 (float64 for float64); P and dS are rounded to the type of the product's
          operands. Sums have one owner, or their owners an order: bits repeat on any thread count.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu import simd
from tilewise.kernels.cpu.backward_scores import differentiate_rows
from tilewise.kernels.cpu.forward import add_rows_exactly, score_tile
from tilewise.kernels.cpu.gemm import (
    MR,
    multiply,
    multiply_add,
    panel_columns,
    words_to_elements,
)
from tilewise.kernels.cpu.gradients import TILES_PER_CHUNK
from tilewise.kernels.cpu.pack import gather_tile, pair_tile, prefetch, transpose_tile
from tilewise.kernels.cpu.problem import (
    DK,
    DO,
    DQ,
    DV,
    K_LEN,
    Q_LEN,
    TILE_M,
    TILE_N,
    K,
    Q,
    V,
)
from tilewise.kernels.cpu.rows import F32, F64, load_row, store_row
from tilewise.kernels.cpu.threads import (
    borrowed,
    inner,
    keep_alive,
    kernel,
    next_task,
    scratch,
    zero_scratch,
)
from tilewise.kernels.cpu.turns import Turn, end_turn, publish_rows, wait_for_rows
from tilewise.kernels.cpu.visibility import (
    WORDS,
    new_seen,
    see_tile,
    seeing_rows,
    view_columns,
)


@inner
def _pack_rows(like, s, dp, p_words, ds_words, ds_rows, begin, end):
    """Round P and dS to the operands' type: words along the queries, and dS also row by row."""
    lanes = simd.REGISTER_BYTES // like.itemsize
    for row in range(0, TILE_M, 2):
        for column in range(begin, end, lanes):
            at, below = row * TILE_N + column, (row + 1) * TILE_N + column
            p0, p1 = simd.load(s, at), simd.load(s, below)
            ds0, ds1 = simd.load(dp, at), simd.load(dp, below)
            simd.store(ds_rows, at, ds0)
            simd.store(ds_rows, below, ds1)
            if p_words.itemsize == 2:
                simd.store_pair(p_words, row * TILE_N + 2 * column, p0, p1)
                simd.store_pair(ds_words, row * TILE_N + 2 * column, ds0, ds1)
            else:
                simd.store(p_words, at, p0)
                simd.store(p_words, below, p1)
                simd.store(ds_words, at, ds0)
                simd.store(ds_words, below, ds1)


@inner
def _add_transposed(c, ld, dim, words, panels, ones, begin, end):
    """c (keys, dim) += words^T (keys, queries) @ panels (queries, dim)."""
    width = panel_columns(c)
    elements = words_to_elements(words)
    for column in range(0, dim, width):
        for key in range(begin, end, MR):
            multiply_add(
                c, key * ld + column, ld, dim - column,
                words, key * elements, elements, TILE_N * elements,
                panels, column * TILE_M, TILE_M // elements, ones, 0,
            )  # fmt: skip


class _Keys(NamedTuple):
    """Scratch of a tile of keys: rows, operands of the products, and sums of the gradients."""

    k_rows: np.ndarray
    v_rows: np.ndarray
    k_panels: np.ndarray
    v_panels: np.ndarray
    k_pairs: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


class _Queries(NamedTuple):
    """Scratch of a tile of query rows."""

    q_rows: np.ndarray
    do_rows: np.ndarray
    q_pairs: np.ndarray
    do_pairs: np.ndarray
    dq: np.ndarray


class _Scores(NamedTuple):
    """Scratch of queries x keys: products, then P and dS, then both as operands."""

    s: np.ndarray
    dp: np.ndarray
    slack: np.ndarray
    p_words: np.ndarray
    ds_words: np.ndarray
    ds_rows: np.ndarray
    bias: np.ndarray
    ones: np.ndarray
    keep: np.ndarray


@inner
def _new_scratch(like, packed, words_like, ld, ldv):
    """Allocate a task's scratch, zeroed where padding must stay zero."""
    keys = _Keys(
        zero_scratch(TILE_N * ld, packed), zero_scratch(TILE_N * ldv, packed),
        scratch(TILE_N * ld, packed), scratch(TILE_N * ldv, packed), scratch(TILE_N * ld, packed),
        scratch(TILE_N * ld, like), scratch(TILE_N * ldv, like),
    )  # fmt: skip
    queries = _Queries(
        zero_scratch(TILE_M * ld, packed), zero_scratch(TILE_M * ldv, packed),
        scratch(TILE_M * ld, packed), scratch(TILE_M * ldv, packed), scratch(TILE_M * ld, like),
    )  # fmt: skip
    area = TILE_M * TILE_N
    scores = _Scores(
        scratch(area, like), scratch(area, like), zero_scratch(area, like), scratch(area, packed),
        scratch(area, packed), scratch(area, packed), zero_scratch(TILE_N, like),
        zero_scratch(TILE_M, like), scratch(WORDS, words_like),
    )  # fmt: skip
    scores.ones[:] = 1
    return keys, queries, scores


@inner
def _load_keys(sizes, arrays, keys, sequence, kv_head, key, count, ld, ldv):
    """Gather and pack a tile of K and V; return 0.0, or NaN when K holds an infinity or NaN."""
    like, starts = arrays.like, arrays.starts
    padded = (count + 31) // 32 * 32
    check = gather_tile(
        like, sizes.k_code, keys.k_rows, ld, sizes.head_dim, key, count, padded,
        starts[sequence, K] + kv_head * sizes.k_head, sizes.k_row, arrays.table, 0, 0, 0,
    )  # fmt: skip
    gather_tile(
        like, sizes.k_code, keys.v_rows, ldv, sizes.v_head_dim, key, count, padded,
        starts[sequence, V] + kv_head * sizes.v_head, sizes.v_row, arrays.table, 0, 0, 0,
    )  # fmt: skip
    transpose_tile(like, keys.k_rows, padded, ld, keys.k_panels)
    transpose_tile(like, keys.v_rows, padded, ldv, keys.v_panels)
    pair_tile(like, keys.k_rows, padded, ld, keys.k_pairs, TILE_N)
    return check


@inner
def _load_queries(like, code, target, ld, dim, start, row_bytes, head_bytes, group, first_row,
                  num_rows):  # fmt: skip
    """A tile of flat query rows to scratch, zeros past the last; prefetch the next tile's."""
    query, member = first_row // group, first_row % group
    later_query, later_member = (
        (first_row + TILE_M) // group,
        (first_row + TILE_M) % group,
    )
    rows = min(TILE_M, num_rows - first_row)
    size = 8 if code == F64 else 4 if code == F32 else 2
    for row in range(rows):
        address = start + query * row_bytes + member * head_bytes
        load_row(like, code, target, row * ld, address, dim)
        later = start + later_query * row_bytes + later_member * head_bytes
        for line in range(0, dim * size, 64):
            prefetch(later + line)
        member, later_member = member + 1, later_member + 1
        if member == group:
            query, member = query + 1, 0
        if later_member == group:
            later_query, later_member = later_query + 1, 0
    for index in range(rows * ld, TILE_M * ld):
        target[index] = 0


@inner
def _query_gradient(sizes, grads, starts, dq, keys, queries, scores, seen, is_finite, turn,
                    sequence, first_head, first_row, rows, count, ld):  # fmt: skip
    """dq += dS K for one tile of rows."""
    head_dim = sizes.head_dim
    if is_finite:
        width, elements = panel_columns(scores.s), words_to_elements(scores.ds_rows)
        for column in range(0, head_dim, width):
            for block in range((rows + MR - 1) // MR):
                begin, end = seen.begin[block], seen.end[block]
                multiply(
                    queries.dq, block * MR * ld + column, ld, head_dim - column,
                    scores.ds_rows, block * MR * TILE_N + begin, TILE_N, elements,
                    keys.k_pairs, column * TILE_N + begin * width, (end - begin) // elements,
                    scores.ones,
                )  # fmt: skip
    else:
        queries.dq[:] = 0
        add_rows_exactly(queries.dq, 0, ld, head_dim, scores.ds_rows, keys.k_rows, ld, scores.ones,
                         seen, count, rows)  # fmt: skip
    wait_for_rows(turn, first_row + rows)
    lanes = simd.REGISTER_BYTES // dq.itemsize
    done = head_dim // lanes * lanes
    for row in range(rows):
        query = (first_row + row) // sizes.group
        head = first_head + first_row + row - query * sizes.group
        where = starts[sequence, DQ] + query * grads.dq_row
        where += head * head_dim
        for column in range(0, done, lanes):
            total = simd.add(
                simd.load(dq, where + column), simd.load(queries.dq, row * ld + column)
            )
            simd.store(dq, where + column, total)
        for column in range(done, head_dim):
            dq[where + column] += queries.dq[row * ld + column]


@inner
def _backward_tile(sizes, rule, grads, arrays, dropout, lse, shifts, dq, dbias, keys, queries,
                   scores, seen, is_finite, turn, chunk, sequence, kv_head, first_row, key, count,
                   ld, ldv):  # fmt: skip
    """What one tile of query rows adds to the gradients of a tile of keys, and to dq."""
    like, starts = arrays.like, arrays.starts
    first_head = kv_head * sizes.group
    num_rows = starts[sequence, Q_LEN] * sizes.group
    begin, end = TILE_N, 0
    for block in range(TILE_M // MR):
        if seen.end[block] > 0:
            begin, end = min(begin, seen.begin[block]), max(end, seen.end[block])
    _load_queries(
        like, sizes.q_code, queries.q_rows, ld, sizes.head_dim,
        starts[sequence, Q] + first_head * sizes.q_head, sizes.q_row, sizes.q_head, sizes.group,
        first_row, num_rows,
    )  # fmt: skip
    _load_queries(
        like, sizes.q_code, queries.do_rows, ldv, sizes.v_head_dim,
        starts[sequence, DO] + first_head * grads.do_head, grads.do_row, grads.do_head, sizes.group,
        first_row, num_rows,
    )  # fmt: skip
    pair_tile(like, queries.q_rows, TILE_M, ld, queries.q_pairs, TILE_M)
    pair_tile(like, queries.do_rows, TILE_M, ldv, queries.do_pairs, TILE_M)
    blocks = TILE_M // MR
    rows = min(TILE_M, num_rows - first_row)
    score_tile(scores.s, queries.q_rows, 0, ld, keys.k_panels, sizes.head_dim, seen.begin,
               seen.end, blocks)  # fmt: skip
    score_tile(scores.dp, queries.do_rows, 0, ldv, keys.v_panels, sizes.v_head_dim, seen.begin,
               seen.end, blocks)  # fmt: skip
    if grads.has_dbias:
        wait_for_rows(turn, first_row + rows)
    differentiate_rows(sizes, rule, grads, arrays, dropout, lse, shifts, dbias, seen, scores,
                       chunk, sequence, first_head, first_row, rows, key, begin, end, 0,
                       TILE_M)  # fmt: skip
    _pack_rows(like, scores.s, scores.dp, scores.p_words, scores.ds_words, scores.ds_rows, begin,
               end)  # fmt: skip
    _add_transposed(keys.dv, ldv, sizes.v_head_dim, scores.p_words, queries.do_pairs, scores.ones,
                    begin, end)  # fmt: skip
    _add_transposed(keys.dk, ld, sizes.head_dim, scores.ds_words, queries.q_pairs, scores.ones,
                    begin, end)  # fmt: skip
    _query_gradient(sizes, grads, starts, dq, keys, queries, scores, seen, is_finite, turn,
                    sequence, first_head, first_row, rows, count, ld)  # fmt: skip


@inner
def _backward_task(sizes, rule, grads, arrays, mask, dropout, lse, shifts, dq, dbias, turn,
                   sequence, kv_head, chunk, first_key, end_key):  # fmt: skip
    """Gradients of keys first_key ... end_key of one key head."""
    like, starts = arrays.like, arrays.starts
    q_len, k_len = starts[sequence, Q_LEN], starts[sequence, K_LEN]
    ld, ldv = (sizes.head_dim + 31) // 32 * 32, (sizes.v_head_dim + 31) // 32 * 32
    owned = _new_scratch(like, arrays.packed_like, mask.bits, ld, ldv)
    owned_seen = new_seen(mask.bits, starts[0])
    (keys, queries, scores), seen = borrowed(owned), borrowed(owned_seen)
    for key in range(first_key, min(end_key, k_len), TILE_N):
        count = min(TILE_N, k_len - key)
        check = _load_keys(sizes, arrays, keys, sequence, kv_head, key, count, ld, ldv)
        keys.dk[:] = 0
        keys.dv[:] = 0
        owned_view = view_columns(sizes, mask, sequence, kv_head, key, count)
        view = borrowed(owned_view)
        begin, end = seeing_rows(sizes, q_len, k_len, key, count)
        for first_row in range(begin, end, TILE_M):
            rows = min(TILE_M, q_len * sizes.group - first_row)
            if see_tile(sizes, mask, view, seen, q_len, k_len, first_row, rows, key):
                _backward_tile(
                    sizes, rule, grads, arrays, dropout, lse, shifts, dq, dbias, keys, queries,
                    scores, seen, check == 0.0, turn, chunk, sequence, kv_head, first_row, key,
                    count, ld, ldv,
                )  # fmt: skip
                if key + TILE_N >= min(end_key, k_len):
                    publish_rows(turn, first_row + rows)
        keep_alive(owned_view)
        for row in range(count):
            address = starts[sequence, DK] + (key + row) * grads.dk_row + kv_head * grads.dk_head
            store_row(
                like,
                sizes.k_code,
                keys.dk,
                row * ld,
                rule.scale,
                address,
                sizes.head_dim,
            )
            address = starts[sequence, DV] + (key + row) * grads.dv_row + kv_head * grads.dv_head
            store_row(
                like,
                sizes.k_code,
                keys.dv,
                row * ldv,
                dropout.scale,
                address,
                sizes.v_head_dim,
            )
    keep_alive(owned)
    keep_alive(owned_seen)


@kernel
def attention_backward(
    sizes,
    rule,
    grads,
    arrays,
    mask,
    dropout,
    lse,
    shifts,
    dq,
    dbias,
    done,
    counter,
    num_tasks,
):
    """Take tasks until none is left; see the head of this file.

    Args:
        sizes, rule, arrays, mask, dropout: parts of a `Problem`; arrays.starts tells where
            gradients lie.
        lse, shifts: flat, shifts = delta - dlse, laid out like lse.
        dq: flat, zeroed, (rows, Hq, D); not yet multiplied by the softmax scale.
        dbias: flat, zeroed, or empty.
        done: (num_tasks,) int64, zeroed, see `Turn`.
        counter: (1,) int64, the next task.
    """
    arrays, mask = borrowed(arrays), borrowed(mask)
    lse, shifts, dq, dbias = (
        borrowed(lse),
        borrowed(shifts),
        borrowed(dq),
        borrowed(dbias),
    )
    done = borrowed(done)
    num_sequences = len(arrays.starts)
    heads = 1 if grads.shares_heads else sizes.num_kv_heads
    chunk_keys = TILES_PER_CHUNK * TILE_N
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        chunk, owner = task // grads.num_owners, task % grads.num_owners
        first_sequence, first_head = owner // heads, owner % heads
        end_sequence = num_sequences if grads.shares_batch else first_sequence + 1
        end_head = sizes.num_kv_heads if grads.shares_heads else first_head + 1
        turn = Turn(done, task, task - grads.num_owners, 0)
        for sequence in range(first_sequence, end_sequence):
            for kv_head in range(first_head, end_head):
                _backward_task(
                    sizes, rule, grads, arrays, mask, dropout, lse, shifts, dq, dbias, turn,
                    sequence, kv_head, chunk, chunk * chunk_keys, (chunk + 1) * chunk_keys,
                )  # fmt: skip
                turn = end_turn(turn, arrays.starts[sequence, Q_LEN] * sizes.group)
