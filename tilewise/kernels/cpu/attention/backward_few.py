"""Exact attention, backward, over one tile of keys and one of rows, in floats as they are stored.

What      dq, dk and dv, from do, o and lse, for dense keys of a call without more than q, k and v.
Grid      one task per (sequence, key head), taken from a counter.
One task transposes K and V from memory: S = Q K^T, dP = dO V^T, then P and
          dS = P (dP - delta), then dV = P^T dO, dK = dS^T Q, dQ = dS K.
Traffic   inputs and outputs once. Scratch is as large as the call asks for.
Numerics  those of `backward.py`, to the bit: the same sums in the same order, but for products with
          keys that a row does not see, which are exact zeros there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu.attention.backward import see_words
from tilewise.kernels.cpu.attention.backward_scores import gradient_row
from tilewise.kernels.cpu.attention.forward import add_rows_exactly, score_tile
from tilewise.kernels.cpu.attention.forward_few import see_keys_of
from tilewise.kernels.cpu.attention.frame import (
    place_gradients_too,
    placed,
    read_gradients,
    read_problem,
    with_starts,
)
from tilewise.kernels.cpu.attention.problem import (
    DK,
    DO,
    DQ,
    DV,
    K_LEN,
    LSE,
    Q_LEN,
    SCORE_ROW,
    TILE_M,
    K,
    O,
    Q,
    V,
)
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.blocks import BLOCK, UNROLLED, set_rows
from tilewise.kernels.cpu.machine.frame import pointer_at
from tilewise.kernels.cpu.machine.gemm import lanes_in, panel_columns
from tilewise.kernels.cpu.machine.rows import copy_rows, dot_rows, store_row, store_rows
from tilewise.kernels.cpu.machine.source import are_finite, transpose_stored
from tilewise.kernels.cpu.machine.threads import (
    bare,
    borrowed,
    inner,
    keep_alive,
    kernel,
    next_task,
    scratch,
)
from tilewise.kernels.cpu.visible import WORD, WORDS, Seen, new_seen, view_rows

MOST_ROWS = TILE_M  # query rows of a key head


class _Scratch(NamedTuple):
    """The scratch of a thread.

    Attributes:
        q, do, dq: the rows of queries.
        k, k_panels, v_panels: the rows of keys, and transposed keys and values.
        s, dp: the products, then P and dS.
        dk, dv: the gradients of keys and values.
        ones: a factor 1 for each row.
    """

    q: np.ndarray
    do: np.ndarray
    dq: np.ndarray
    k: np.ndarray
    k_panels: np.ndarray
    v_panels: np.ndarray
    s: np.ndarray
    dp: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    ones: np.ndarray


@inner
def _new_scratch(like, dim, v_dim, rows, keys):
    """Return scratch for tasks of `rows` rows and `keys` keys, multiples of BLOCK and 32."""
    area, blocks = rows * SCORE_ROW + BLOCK, (keys + BLOCK - 1) // BLOCK * BLOCK
    spare = _Scratch(
        scratch(rows * dim, like),
        scratch(rows * v_dim, like),
        scratch(rows * dim, like),
        scratch(keys * max(dim, v_dim), like),
        scratch(keys * dim, like),
        scratch(keys * v_dim, like),
        scratch(area, like),
        scratch(area, like),
        scratch(blocks * dim, like),
        scratch(blocks * v_dim, like),
        scratch(rows, like),
    )
    spare.ones[:] = 1
    return spare


@inner
def _differentiate(
    problem, grads, like, start, lse, first_head, spare, seen, rows, all_rows, left, right
):
    """Replace the products S by P and dP by dS in scratch, in place, 0 for keys that a row does not
    see; delta is computed here.

    Args:
        problem, grads: the call and the strides of its gradients.
        start: the sequence's offsets.
        lse: the lse of all rows.
        first_head: the first query head.
        spare: the scratch with the products.
        seen: the keys that rows see.
        rows, all_rows: the rows, and those with padding.
        left, right: the range of columns that any row sees.
    """
    sizes, factor, zero = problem.sizes, problem.rule.scale, simd.splat(like, 0.0)
    for row in range(all_rows):
        base, is_alive = row * SCORE_ROW, row < rows
        begin, end, row_lse, delta = right, right, simd.number(like, 0.0), simd.number(like, 0.0)
        if is_alive:
            query = row // sizes.group
            head = first_head + row - query * sizes.group
            row_lse = lse[start[LSE] + head * sizes.lse_head + query]
            if row_lse != -math.inf:
                begin = max(left, seen.begin[row // BLOCK])
                end = min(right, seen.end[row // BLOCK])
                delta = dot_rows(
                    like,
                    sizes.q_code,
                    start[DO] + query * grads.do_row + head * grads.do_head,
                    start[O] + query * sizes.o_row + head * sizes.o_head,
                    sizes.v_head_dim,
                )
            if begin >= end:
                begin = end = right
        for column in range(base + left, base + right, lanes_in(like)):
            if column < base + begin or column >= base + end:
                simd.store(spare.s, column, zero)
                simd.store(spare.dp, column, zero)
        gradient_row(
            like,
            factor,
            row_lse,
            delta,
            spare.s,
            spare.dp,
            base,
            begin,
            end,
            seen.words,
            row * WORDS,
            problem.dropout,
            seen.words,
        )


@inner
def _add_transposed(c, dim, scores, rows, ld, tops, bottoms, begin, end):
    """Compute c (keys, dim) = scores^T (keys, queries) @ rows (queries, dim) for keys begin ... end
    - 1, each BLOCK of keys over the rows tops ... bottoms that see it; old sums are overwritten."""
    for column in range(0, dim, panel_columns(c)):
        for key in range(begin, end, BLOCK):
            word, last = key // WORD, min(key + BLOCK, end) - 1
            top = min(tops[word], tops[last // WORD])
            bottom = max(bottoms[word], bottoms[last // WORD])
            set_rows(
                c,
                key * ld + column,
                ld,
                dim - column,
                scores,
                top * SCORE_ROW + key,
                1,
                SCORE_ROW,
                rows,
                top * ld + column,
                ld,
                bottom - top,
            )


@inner
def _task(problem, grads, lse, dq, spare, arrays, seen, owned_seen, ends, sequence, kv_head):
    """Compute dq, dk and dv of one sequence and key head, whose rows and keys fit one tile, and
    write them.

    Args:
        problem, grads: the call and the strides of its gradients.
        lse, dq: a pointer to the log-sum-exps, and the address of dq.
        spare, arrays: the thread's scratch, as bare pointers and as arrays.
        seen, owned_seen: the keys that rows see, likewise.
        ends: the first and the end row that sees each word of keys, see `see_words`.
    """
    sizes, start = problem.sizes, problem.arrays.starts[sequence]
    like, size, code = bare(problem.arrays.like), sizes.k_size, sizes.k_code
    dim, v_dim, group = sizes.head_dim, sizes.v_head_dim, sizes.group
    first_head, count, rows = kv_head * group, start[K_LEN], start[Q_LEN] * group
    k, v = start[K] + kv_head * sizes.k_head, start[V] + kv_head * sizes.v_head
    blocks = (rows + BLOCK - 1) // BLOCK
    all_rows = blocks * BLOCK
    begin, end = WORD * WORDS, 0
    for block in range(blocks):
        if seen.end[block] > 0:
            begin, end = min(begin, seen.begin[block]), max(end, seen.end[block])
    begin = min(begin, end)
    copy_rows(
        like,
        code,
        arrays.q,
        dim,
        dim,
        start[Q] + first_head * sizes.q_head,
        sizes.q_row,
        sizes.q_head,
        group,
        0,
        rows,
        all_rows,
    )
    copy_rows(
        like,
        code,
        arrays.do,
        v_dim,
        v_dim,
        start[DO] + first_head * grads.do_head,
        grads.do_row,
        grads.do_head,
        group,
        0,
        rows,
        all_rows,
    )
    transpose_stored(
        like, code, k, sizes.k_row, size, count, dim, arrays.k, spare.k, spare.k_panels
    )
    transpose_stored(
        like, code, v, sizes.v_row, size, count, v_dim, arrays.k, spare.k, spare.v_panels
    )
    score_tile(spare.s, spare.q, 0, dim, spare.k_panels, dim, rows, count, seen.begin, seen.end)
    score_tile(
        spare.dp, spare.do, 0, v_dim, spare.v_panels, v_dim, rows, count, seen.begin, seen.end
    )
    _differentiate(
        problem, grads, like, start, lse, first_head, spare, seen, rows, all_rows, begin, end
    )
    _add_transposed(spare.dv, v_dim, spare.s, spare.do, v_dim, ends[0], ends[1], begin, end)
    _add_transposed(spare.dk, dim, spare.dp, spare.q, dim, ends[0], ends[1], begin, end)
    keys, word = pointer_at(like, k), sizes.k_row // size
    if are_finite(like, keys, word, count, dim):
        last = (count + UNROLLED - 1) // UNROLLED * UNROLLED
        for column in range(0, dim, panel_columns(like)):
            for block in range(blocks):
                low = seen.begin[block]
                high = max(min(seen.end[block], last), low)
                set_rows(
                    spare.dq,
                    block * BLOCK * dim + column,
                    dim,
                    dim - column,
                    spare.dp,
                    block * BLOCK * SCORE_ROW + low,
                    SCORE_ROW,
                    1,
                    keys,
                    low * word + column,
                    word,
                    high - low,
                )
    else:
        copy_rows(like, code, arrays.k, dim, dim, k, sizes.k_row, 0, 1, 0, count, count)
        arrays.dq[:] = 0
        add_rows_exactly(
            arrays.dq, 0, dim, dim, arrays.dp, arrays.k, dim, arrays.ones, owned_seen, count, rows
        )
    scale, one = simd.number(like, problem.rule.scale), simd.number(like, 1.0)
    for row in range(rows):
        query = row // group
        at = start[DQ] + query * grads.dq_row + (first_head + row - query * group) * dim
        store_row(like, code, spare.dq, row * dim, scale, dq + at * size, dim)
    _store_keys(
        like,
        code,
        arrays.dk,
        spare.dk,
        dim,
        scale,
        start[DK] + kv_head * grads.dk_head,
        grads.dk_row,
        begin,
        end,
        count,
    )
    _store_keys(
        like,
        code,
        arrays.dv,
        spare.dv,
        v_dim,
        one,
        start[DV] + kv_head * grads.dv_head,
        grads.dv_row,
        begin,
        end,
        count,
    )


@inner
def _store_keys(like, code, owned, tile, dim, scale, start, row_bytes, begin, end, count):
    """Write dk or dv of `count` keys; keys outside begin ... end - 1, which no row sees, get zeros.

    Args:
        owned, tile: the sums as an array and as a pointer.
        dim: the channels of a row.
        scale: the factor of the sums.
        start, row_bytes: the address of the first row, and the bytes of a row.
    """
    if begin > 0 or end < count:
        owned[: begin * dim] = 0
        owned[end * dim : count * dim] = 0
    store_rows(like, code, tile, dim, scale, start, row_bytes, count, dim)


@kernel
def attention_backward_few(like, frame, q, k, v, o, do, dk, dv, lse, dq, counter, num_tasks):
    """Compute dq, dk and dv over one tile of keys and one of rows: take tasks, each a sequence and
    key head, in this thread until none is left.

    Args:
        like: the empty array of the problem's and of all tensors' type.
        frame: the problem and its gradients, see `frame_of`, whose sequences have the same lengths,
            at most TILE_N keys and MOST_ROWS rows of a key head, and head dims that are multiples
            of 32; keys are a multiple of UNROLLED. Its rule is scaled only.
        q, k, v, o, do, dk, dv: the addresses to which starts are relative.
        lse, dq: addresses; dq is (B, Sq, Hq, D).
        counter: (1,) int64, the next task.
    """
    offsets = read_problem(frame, like, like)
    owned_starts = placed(offsets.arrays.starts, q, k, v, o)
    place_gradients_too(owned_starts, do, dk, dv)
    problem = with_starts(offsets, borrowed(owned_starts))
    grads, sizes, starts = read_gradients(frame), problem.sizes, problem.arrays.starts
    rows = (starts[0, Q_LEN] * sizes.group + BLOCK - 1) // BLOCK * BLOCK
    owned = _new_scratch(
        like, sizes.head_dim, sizes.v_head_dim, rows, (starts[0, K_LEN] + 31) // 32 * 32
    )
    owned_seen, owned_ends = (
        new_seen(problem.mask.bits, starts[0]),
        (scratch(WORDS, starts[0]), scratch(WORDS, starts[0])),
    )
    arrays, seen, ends = borrowed(owned), borrowed(owned_seen), borrowed(owned_ends)
    spare = _Scratch(
        bare(arrays.q),
        bare(arrays.do),
        bare(arrays.dq),
        bare(arrays.k),
        bare(arrays.k_panels),
        bare(arrays.v_panels),
        bare(arrays.s),
        bare(arrays.dp),
        bare(arrays.dk),
        bare(arrays.dv),
        bare(arrays.ones),
    )
    # The tile sees the same keys in all heads and sequences.
    view = view_rows(sizes, problem.mask, 0, 0, 0, rows)
    see_keys_of(problem, view, seen, starts[0], 0, starts[0, Q_LEN] * sizes.group, starts[0, K_LEN])
    see_words(seen, ends[0], ends[1])
    bits = Seen(bare(seen.words), bare(seen.begin), bare(seen.end), bare(seen.is_whole))
    tops = (bare(ends[0]), bare(ends[1]))
    numbers = pointer_at(like, lse)
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        _task(
            problem,
            grads,
            numbers,
            dq,
            spare,
            arrays,
            bits,
            seen,
            tops,
            task // sizes.num_kv_heads,
            task % sizes.num_kv_heads,
        )
    keep_alive(owned)
    keep_alive(owned_seen)
    keep_alive(owned_ends)
    keep_alive(owned_starts)
