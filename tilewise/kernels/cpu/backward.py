"""Tiled exact attention, backward: probabilities are recomputed, nothing is stored but lse.

What      dq, dk, dv and the gradient of the bias, from do, lse and delta - dlse.
Grid      one task per (sequence, key head, chunk of key tiles), taken from a counter.
One task  for each tile of 128 keys, for each tile of 64 query rows that sees it: S = Q K^T and
          dP = dO V^T, then P and dS = P (dP - delta), then dV += P^T dO, dK += dS^T Q, dQ = dS K.
Traffic   K and V are read once; Q and dO once per tile of keys, from the L3 cache; dq is kept in
          float32, one copy per chunk, and chunks exist only where heads are few.
Numerics  sums in float32 (float64 for float64); P and dS are rounded to the type of the product's
          operands. Every sum has one owner and a fixed order, so bits repeat on any thread count.
"""

from __future__ import annotations

import math

from tilewise.kernels.cpu import simd
from tilewise.kernels.cpu.forward import (
    TILE_M,
    TILE_N,
    add_rows_exactly,
    block_ranges,
    load_bias_row,
    score_tile,
)
from tilewise.kernels.cpu.gemm import MR, multiply, multiply_add, panel_columns, words_to_elements
from tilewise.kernels.cpu.pack import gather_tile, pair_tile, transpose_tile
from tilewise.kernels.cpu.problem import DK, DO, DQ, DV, K_LEN, LSE, Q_LEN, K, Q, V
from tilewise.kernels.cpu.rows import load_row, store_row
from tilewise.kernels.cpu.softmax import LOG2_E, logits_row, visible_keys
from tilewise.kernels.cpu.threads import inner, kernel, next_task, scratch, zero_scratch


@inner
def _gradient_row(like, factor, row_lse, shift, s, dp, base, begin, end, low,
                  high):  # fmt: skip
    """One row: s <- p = exp(factor s - lse), dp <- ds = p (dp - shift), zero where not visible.

    With a softcap, dp stays the gradient of the capped logit; `_chain_softcap` goes on from there.
    """
    lanes = simd.REGISTER_BYTES // like.itemsize
    factors, offsets = simd.splat(like, factor), simd.splat(like, -row_lse)
    shifts, log2_e = simd.splat(like, shift), simd.splat(like, LOG2_E)
    zero = simd.splat(like, 0.0)
    for column in range(begin, end, lanes):
        p = simd.exp2(simd.mul(simd.fma(simd.load(s, base + column), factors, offsets), log2_e))
        ds = simd.mul(p, simd.sub(simd.load(dp, base + column), shifts))
        if column < low or column + lanes > high:
            seen = simd.within(like, column, low, high)
            p = simd.select(seen, p, zero)
            ds = simd.select(seen, ds, zero)
        simd.store(s, base + column, p)
        simd.store(dp, base + column, ds)


@inner
def _chain_softcap(like, dp, slack, base, begin, end, low, high):
    """dp *= 1 - tanh^2 over a row; columns out of sight stay zero."""
    lanes = simd.REGISTER_BYTES // like.itemsize
    zero = simd.splat(like, 0.0)
    for column in range(begin, end, lanes):
        ds = simd.mul(simd.load(dp, base + column), simd.load(slack, base + column))
        simd.store(dp, base + column, simd.select(simd.within(like, column, low, high), ds, zero))


@inner
def _add_bias_gradient(grads, dbias, chunk, sequence, head, query, key, dp, base, low, high):
    """Add a row of ds to the bias gradient, which may repeat along any dim."""
    where = (
        chunk * grads.dbias_chunk
        + sequence * grads.dbias_batch
        + head * grads.dbias_head
        + query * grads.dbias_row
        + key * grads.dbias_column
    )
    for column in range(low, high):
        dbias[where + column * grads.dbias_column] += dp[base + column]


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


@inner
def _load_queries(like, code, scratch_rows, ld, dim, start, row_bytes, head_bytes, first_head,
                  group, first_row, rows):  # fmt: skip
    """Flat query rows to scratch, zeros past the last."""
    for row in range(rows):
        query, head = (first_row + row) // group, first_head + (first_row + row) % group
        address = start + query * row_bytes + head * head_bytes
        load_row(like, code, scratch_rows, row * ld, address, dim)
    for index in range(rows * ld, TILE_M * ld):
        scratch_rows[index] = 0


@inner
def _backward_task(sizes, rule, grads, arrays, lse, shifts, dq, dbias, sequence, kv_head, chunk,
                   first_key, end_key):  # fmt: skip
    """Gradients of keys first_key ... end_key of one key head."""
    like, packed, starts = arrays.like, arrays.packed_like, arrays.starts
    q_len, k_len = starts[sequence, Q_LEN], starts[sequence, K_LEN]
    group, head_dim, dim = sizes.group, sizes.head_dim, sizes.v_head_dim
    elements = words_to_elements(packed)
    width = panel_columns(like)
    first_head = kv_head * group
    ld, ldv = (head_dim + 31) // 32 * 32, (dim + 31) // 32 * 32
    k_rows, v_rows = zero_scratch(TILE_N * ld, packed), zero_scratch(TILE_N * ldv, packed)
    k_panels, v_panels = scratch(TILE_N * ld, packed), scratch(TILE_N * ldv, packed)
    k_pairs = scratch(TILE_N * ld, packed)
    q_rows, do_rows = zero_scratch(TILE_M * ld, packed), zero_scratch(TILE_M * ldv, packed)
    q_pairs, do_pairs = scratch(TILE_M * ld, packed), scratch(TILE_M * ldv, packed)
    s, dp = scratch(TILE_M * TILE_N, like), scratch(TILE_M * TILE_N, like)
    slack = zero_scratch(TILE_M * TILE_N, like)
    p_words, ds_words = scratch(TILE_M * TILE_N, packed), scratch(TILE_M * TILE_N, packed)
    ds_rows = scratch(TILE_M * TILE_N, packed)
    dk, dv, dq_tile = (
        scratch(TILE_N * ld, like),
        scratch(TILE_N * ldv, like),
        scratch(TILE_M * ld, like),
    )
    bias, ones = zero_scratch(TILE_N, like), zero_scratch(TILE_M, like)
    ones[:] = 1
    low, high = scratch(TILE_M, starts[0]), scratch(TILE_M, starts[0])
    begin, end = scratch(TILE_M // MR, starts[0]), scratch(TILE_M // MR, starts[0])
    factor = rule.scale if rule.is_scaled_only else 1.0
    for key in range(first_key, min(end_key, k_len), TILE_N):
        count = min(TILE_N, k_len - key)
        padded = (count + 31) // 32 * 32
        check = gather_tile(
            like, sizes.k_code, k_rows, ld, head_dim, key, count, padded,
            starts[sequence, K] + kv_head * sizes.k_head, sizes.k_row, arrays.table, 0, 0, 0,
        )  # fmt: skip
        gather_tile(
            like, sizes.k_code, v_rows, ldv, dim, key, count, padded,
            starts[sequence, V] + kv_head * sizes.v_head, sizes.v_row, arrays.table, 0, 0, 0,
        )  # fmt: skip
        transpose_tile(like, k_rows, padded, ld, k_panels)
        transpose_tile(like, v_rows, padded, ldv, v_panels)
        pair_tile(like, k_rows, padded, ld, k_pairs, TILE_N)
        dk[:] = 0
        dv[:] = 0
        for first_row in range(0, q_len * group, TILE_M):
            rows = min(TILE_M, q_len * group - first_row)
            blocks = TILE_M // MR
            tile_begin, tile_end = TILE_N, 0
            for row in range(TILE_M):
                low[row], high[row] = 0, 0
                if row < rows:
                    first, last = visible_keys(
                        first_row + row, group, q_len, k_len, sizes.window_left, sizes.window_right
                    )
                    first, last = max(first - key, 0), min(last - key, count)
                    query, head = (first_row + row) // group, first_head + (first_row + row) % group
                    at = starts[sequence, LSE] + head * sizes.lse_head + query
                    if first < last and lse[at] != -math.inf:
                        low[row], high[row] = first, last
                        tile_begin, tile_end = min(tile_begin, first), max(tile_end, last)
            if tile_end == 0:
                continue
            tile_begin, tile_end = (
                tile_begin // width * width,
                (tile_end + width - 1) // width * width,
            )
            _load_queries(like, sizes.q_code, q_rows, ld, head_dim, starts[sequence, Q], sizes.q_row,
                          sizes.q_head, first_head, group, first_row, rows)  # fmt: skip
            _load_queries(like, sizes.q_code, do_rows, ldv, dim, starts[sequence, DO], grads.do_row,
                          grads.do_head, first_head, group, first_row, rows)  # fmt: skip
            pair_tile(like, q_rows, TILE_M, ld, q_pairs, TILE_M)
            pair_tile(like, do_rows, TILE_M, ldv, do_pairs, TILE_M)
            block_ranges(like, low, high, begin, end, blocks)
            score_tile(s, q_rows, 0, ld, k_panels, head_dim, begin, end, blocks)
            score_tile(dp, do_rows, 0, ldv, v_panels, dim, begin, end, blocks)
            for row in range(TILE_M):
                base = row * TILE_N
                query, head = (first_row + row) // group, first_head + (first_row + row) % group
                at = starts[sequence, LSE] + head * sizes.lse_head + query
                if low[row] < high[row]:
                    if not rule.is_scaled_only:
                        if rule.has_bias:
                            load_bias_row(sizes, like, bias, sequence, head, query, key, high[row])
                        logits_row(like, rule, s, base, tile_begin, tile_end, arrays.slopes[head],
                                   query + k_len - q_len - key, bias, slack, base)  # fmt: skip
                    _gradient_row(like, factor, lse[at], shifts[at], s, dp,
                                  base, tile_begin, tile_end, low[row], high[row])  # fmt: skip
                    if grads.has_dbias:
                        _add_bias_gradient(grads, dbias, chunk, sequence, head, query, key, dp,
                                           base, low[row], high[row])  # fmt: skip
                    if rule.softcap > 0.0:
                        _chain_softcap(like, dp, slack, base, tile_begin, tile_end, low[row],
                                       high[row])  # fmt: skip
                else:
                    for column in range(base + tile_begin, base + tile_end):
                        s[column] = 0
                        dp[column] = 0
            _pack_rows(like, s, dp, p_words, ds_words, ds_rows, tile_begin, tile_end)
            _add_transposed(dv, ldv, dim, p_words, do_pairs, ones, tile_begin, tile_end)
            _add_transposed(dk, ld, head_dim, ds_words, q_pairs, ones, tile_begin, tile_end)
            if check == 0.0:
                for column in range(0, head_dim, width):
                    for block in range(blocks):
                        multiply(
                            dq_tile, block * MR * ld + column, ld, head_dim - column,
                            ds_rows, block * MR * TILE_N + begin[block], TILE_N, elements,
                            k_pairs, column * TILE_N + begin[block] * width,
                            (end[block] - begin[block]) // elements, ones,
                        )  # fmt: skip
            else:
                dq_tile[:] = 0
                add_rows_exactly(
                    dq_tile, 0, ld, head_dim, ds_rows, k_rows, ld, ones, low, high, rows
                )
            for row in range(rows):
                query, head = (first_row + row) // group, first_head + (first_row + row) % group
                where = chunk * grads.dq_chunk + starts[sequence, DQ] + query * grads.dq_row
                where += head * head_dim
                for column in range(head_dim):
                    dq[where + column] += dq_tile[row * ld + column]
        for row in range(count):
            address = starts[sequence, DK] + (key + row) * grads.dk_row + kv_head * grads.dk_head
            store_row(like, sizes.k_code, dk, row * ld, rule.scale, address, head_dim)
            address = starts[sequence, DV] + (key + row) * grads.dv_row + kv_head * grads.dv_head
            store_row(like, sizes.k_code, dv, row * ldv, 1.0, address, dim)


@kernel
def attention_backward(sizes, rule, grads, arrays, lse, shifts, dq, dbias, counter, num_tasks):
    """Take tasks until none is left; see the head of this file.

    Args:
        sizes, rule, arrays: parts of a `Problem`, with the gradients' addresses in arrays.starts.
        lse, shifts: flat, shifts = delta - dlse, laid out like lse.
        dq: flat, zeroed, (num_chunks, rows, Hq, D); not yet multiplied by the softmax scale.
        dbias: flat, zeroed, or empty.
        counter: (1,) int64, the next task.
    """
    num_sequences = len(arrays.starts)
    heads = 1 if grads.shares_heads else sizes.num_kv_heads
    chunk_keys = grads.tiles_per_chunk * TILE_N
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        chunk, owner = task % grads.num_chunks, task // grads.num_chunks
        first_sequence, first_head = owner // heads, owner % heads
        end_sequence = num_sequences if grads.shares_batch else first_sequence + 1
        end_head = sizes.num_kv_heads if grads.shares_heads else first_head + 1
        for sequence in range(first_sequence, end_sequence):
            for kv_head in range(first_head, end_head):
                _backward_task(sizes, rule, grads, arrays, lse, shifts, dq, dbias, sequence, kv_head,
                               chunk, chunk * chunk_keys, (chunk + 1) * chunk_keys)  # fmt: skip
