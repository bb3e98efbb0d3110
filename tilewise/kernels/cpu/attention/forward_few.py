"""Exact attention, forward, over keys that fit one tile: nothing is rescaled, and little is asked.

What      o = softmax(logits) v and lse, for dense keys of a call without more than q, k and v.
Grid      one task per (sequence, key head), taken from a counter.
One task  packs K and V once; per TILE_M query rows S = Q K^T, softmax, O = P V.
Traffic   inputs and outputs once. Scratch is what `forward.py` needs, as far as it is used.
Numerics  those of `forward.py`, to the bit: the same sums in the same order, but for products with
          keys that a row does not see, which are exact zeros there.
"""

# ruff: noqa: E741 - l is the name of the papers

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu.attention.forward import add_rows_exactly
from tilewise.kernels.cpu.attention.frame import placed, read_problem, with_starts
from tilewise.kernels.cpu.attention.problem import (
    K_LEN,
    LSE,
    Q_LEN,
    SCORE_ROW,
    TILE_M,
    TILE_N,
    K,
    O,
    Q,
    V,
)
from tilewise.kernels.cpu.attention.softmax import softmax_row
from tilewise.kernels.cpu.attention.visibility import WORDS, new_seen, see_tile, view_rows
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.blocks import BLOCK, UNROLLED, set_block
from tilewise.kernels.cpu.machine.frame import array_at
from tilewise.kernels.cpu.machine.gemm import lanes_in, panel_columns, words_to_elements
from tilewise.kernels.cpu.machine.pack import pair_tile, transpose_tile
from tilewise.kernels.cpu.machine.rows import copy_rows, store_rows
from tilewise.kernels.cpu.machine.threads import (
    borrowed,
    inner,
    keep_alive,
    kernel,
    next_task,
    scratch,
)

MOST_ROWS = 8 * TILE_M  # of a task; more are shared among tasks of `forward.py`


class _Scratch(NamedTuple):
    """What a thread's tasks write to; what is right of a head's dim is zero.

    Attributes:
        q, acc, m, l: of all rows of a task; the others as in `forward.py`.
    """

    q: np.ndarray
    acc: np.ndarray
    k_rows: np.ndarray
    v_rows: np.ndarray
    k_panels: np.ndarray
    v_panels: np.ndarray
    s: np.ndarray
    p: np.ndarray
    m: np.ndarray
    l: np.ndarray
    zeros: np.ndarray


@inner
def _new_scratch(like, packed, head_dim, dim, num_rows, num_keys):
    """Return what the tasks write to, and the two arrays that it is parts of."""
    ld, ldv = (head_dim + 31) // 32 * 32, (dim + 31) // 32 * 32
    tile = min(num_rows, (TILE_M + BLOCK - 1) // BLOCK * BLOCK) * SCORE_ROW
    rows, keys, values, panel = num_rows * ld, num_keys * ld, num_keys * ldv, TILE_N * ldv
    operands = scratch(rows + 2 * keys + values + panel + tile, packed)
    numbers = scratch(num_rows * ldv + tile + 2 * num_rows + TILE_M, like)
    if ld > head_dim or ldv > dim:
        operands[: rows + keys + values] = 0
    k_rows, v_rows, k_panels = rows, rows + keys, rows + keys + values
    v_panels, p = k_panels + keys, k_panels + keys + panel
    s, m = num_rows * ldv, num_rows * ldv + tile
    zeros = numbers[m + 2 * num_rows :]
    zeros[:] = 0
    spare = _Scratch(
        operands[:rows], numbers[:s], operands[k_rows:v_rows], operands[v_rows:k_panels],
        operands[k_panels:v_panels], operands[v_panels:p], numbers[s:m], operands[p:],
        numbers[m : m + num_rows], numbers[m + num_rows : m + 2 * num_rows], zeros,
    )  # fmt: skip
    return borrowed(spare), (operands, numbers)


@inner
def _are_finite(like, rows, count):
    """Whether `count` numbers, a multiple of 4 registers, hold neither infinity nor NaN."""
    lanes = lanes_in(like)
    zero = simd.splat(like, 0.0)
    x0 = x1 = x2 = x3 = zero
    for at in range(0, count, 4 * lanes):
        x0 = simd.fma(simd.load(rows, at), zero, x0)
        x1 = simd.fma(simd.load(rows, at + lanes), zero, x1)
        x2 = simd.fma(simd.load(rows, at + 2 * lanes), zero, x2)
        x3 = simd.fma(simd.load(rows, at + 3 * lanes), zero, x3)
    return simd.sum_lanes(simd.add(simd.add(x0, x1), simd.add(x2, x3))) == 0.0


@inner
def _score(s, q, qi, ld, k_panels, head_dim, count, seen, blocks):
    """S = Q K^T of one tile, as far as BLOCK rows see keys and there are any."""
    width, elements = panel_columns(s), words_to_elements(q)
    words = -(-head_dim // (UNROLLED * elements)) * UNROLLED
    for first in range(0, count, width):
        for block in range(blocks):
            if seen.begin[block] < first + width and seen.end[block] > first:
                set_block(
                    s, block * BLOCK * SCORE_ROW + first, SCORE_ROW, count - first,
                    q, qi + block * BLOCK * ld, ld, elements, k_panels, first * ld, words,
                )  # fmt: skip


@inner
def _multiply(acc, ai, ldv, dim, p, v_panels, count, seen, blocks):
    """O = P V for each BLOCK rows, over their own range of keys."""
    width, elements = panel_columns(acc), words_to_elements(p)
    unit = UNROLLED * elements
    for column in range(0, dim, width):
        for block in range(blocks):
            begin = seen.begin[block]
            end = max(min(seen.end[block], (count + unit - 1) // unit * unit), begin)
            set_block(
                acc, ai + block * BLOCK * ldv + column, ldv, dim - column,
                p, block * BLOCK * SCORE_ROW + begin, SCORE_ROW, elements,
                v_panels, column * TILE_N + begin * width, (end - begin) // elements,
            )  # fmt: skip


@inner
def _softmax(like, factor, s, p, first, rows, seen, m, l):
    lowest = like.dtype.type(-math.inf)
    for row in range(rows):
        block = row // BLOCK
        m[first + row], l[first + row], _ = softmax_row(
            like, s, row * SCORE_ROW, factor, p, row * SCORE_ROW, seen.begin[block],
            seen.end[block], seen.words, row * WORDS, lowest, False, seen.words,
        )  # fmt: skip


@inner
def _attend(problem, factor, spare, seen, view, sequence, kv_head):
    """Fill acc, m and l of the rows of one key head."""
    sizes, arrays = problem.sizes, problem.arrays
    like, start = arrays.like, arrays.starts[sequence]
    head_dim, dim, group = sizes.head_dim, sizes.v_head_dim, sizes.group
    ld, ldv = (head_dim + 31) // 32 * 32, (dim + 31) // 32 * 32
    num_rows, count = start[Q_LEN] * group, start[K_LEN]
    padded = (count + 31) // 32 * 32
    all_rows = (num_rows + BLOCK - 1) // BLOCK * BLOCK
    copy_rows(like, sizes.q_code, spare.q, ld, head_dim, start[Q] + kv_head * group * sizes.q_head,
              sizes.q_row, sizes.q_head, group, 0, num_rows, all_rows)  # fmt: skip
    copy_rows(like, sizes.k_code, spare.k_rows, ld, head_dim, start[K] + kv_head * sizes.k_head,
              sizes.k_row, 0, 1, 0, count, padded)  # fmt: skip
    copy_rows(like, sizes.k_code, spare.v_rows, ldv, dim, start[V] + kv_head * sizes.v_head,
              sizes.v_row, 0, 1, 0, count, padded)  # fmt: skip
    transpose_tile(like, spare.k_rows, padded, ld, spare.k_panels)
    pair_tile(like, spare.v_rows, padded, ldv, spare.v_panels, TILE_N)
    is_finite = _are_finite(like, spare.v_rows, padded * ldv)
    for first in range(0, num_rows, TILE_M):
        rows = min(TILE_M, num_rows - first)
        # A call of one tile sees the same keys in all heads and sequences.
        if num_rows > TILE_M or seen.begin[0] < 0:
            seen.begin[:] = 0
            if not see_tile(sizes, problem.mask, view, seen, start[Q_LEN], count, first, rows, 0):
                seen.begin[:] = 0
                seen.end[:] = 0
                seen.is_whole[0] = 0
        blocks = (rows + BLOCK - 1) // BLOCK
        _score(spare.s, spare.q, first * ld, ld, spare.k_panels, head_dim, count, seen, blocks)
        _softmax(like, factor, spare.s, spare.p, first, blocks * BLOCK, seen, spare.m, spare.l)
        if is_finite:
            _multiply(spare.acc, first * ldv, ldv, dim, spare.p, spare.v_panels, count, seen,
                      blocks)  # fmt: skip
        else:
            spare.acc[first * ldv : (first + rows) * ldv] = 0
            add_rows_exactly(spare.acc, first * ldv, ldv, dim, spare.p, spare.v_rows, ldv,
                             spare.zeros, seen, count, rows)  # fmt: skip


@inner
def _store(sizes, like, start, spare, kv_head, lse, needs_lse, ldv):
    """Divide the rows of a key head by their sums, and write them and, where wanted, lse."""
    group, num_queries, lanes = sizes.group, start[Q_LEN], lanes_in(like)
    m, l, acc = spare.m, spare.l, spare.acc
    one = like.dtype.type(1.0)
    for row in range(num_queries * group):
        total = l[row]
        inverse = one / total if total != 0.0 else like.dtype.type(0.0)
        factors = simd.splat(like, inverse)
        for at in range(row * ldv, (row + 1) * ldv, lanes):
            simd.store(acc, at, simd.mul(simd.load(acc, at), factors))
    for member in range(group):
        head = kv_head * group + member
        store_rows(like, sizes.q_code, acc[member * ldv :], group * ldv, one,
                   start[O] + head * sizes.o_head, sizes.o_row, num_queries,
                   sizes.v_head_dim)  # fmt: skip
        at = start[LSE] + head * sizes.lse_head
        for query in range(num_queries if needs_lse else 0):
            row = query * group + member
            total = l[row]
            lse[at + query] = m[row] + math.log(total) if total != 0.0 else -math.inf


@kernel
def attention_forward_few(like, packed_like, frame, q, k, v, o, lse, counter, num_tasks):
    """Take tasks until none is left; see the head of this file.

    Args:
        like, packed_like: those of the problem's arrays.
        frame: the problem, see `frame_of`, whose sequences have the same lengths, at most TILE_N
            keys and MOST_ROWS rows of a key head; its rule is scaled only.
        q, k, v, o: addresses that the problem's starts count from.
        lse: address of numbers of like's type, or 0.
        counter: (1,) int64, the next task.
    """
    offsets = read_problem(frame, like, packed_like)
    owned_starts = placed(offsets.arrays.starts, q, k, v, o)
    problem = with_starts(offsets, borrowed(owned_starts))
    starts, sizes, results = problem.arrays.starts, problem.sizes, array_at(lse, 0, like)
    num_rows = (starts[0, Q_LEN] * sizes.group + BLOCK - 1) // BLOCK * BLOCK
    spare, owned = _new_scratch(like, packed_like, sizes.head_dim, sizes.v_head_dim, num_rows,
                                (starts[0, K_LEN] + 31) // 32 * 32)  # fmt: skip
    owned_seen = new_seen(problem.mask.bits, starts[0])
    seen = borrowed(owned_seen)
    view = view_rows(sizes, problem.mask, 0, 0, 0, num_rows)
    seen.begin[0] = -1
    factor, ldv = problem.rule.scale, (sizes.v_head_dim + 31) // 32 * 32
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        sequence, kv_head = task // sizes.num_kv_heads, task % sizes.num_kv_heads
        _attend(problem, factor, spare, seen, view, sequence, kv_head)
        _store(sizes, like, starts[sequence], spare, kv_head, results, lse != 0, ldv)
    keep_alive(owned)
    keep_alive(owned_seen)
    keep_alive(owned_starts)
