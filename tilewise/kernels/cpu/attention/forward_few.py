"""Exact attention, forward, over keys that fit one tile: nothing is rescaled, and little is asked.

What      o = softmax(logits) v and lse, for dense keys of a call without more than q, k and v.
Grid      one task per (sequence, key head), taken from a counter.
One task  packs K and V once; per TILE_M query rows S = Q K^T, softmax, O = P V. Floats that are
          multiplied as they are stored are not copied first: K is transposed from where it lies,
          and V's rows are read there.
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
from tilewise.kernels.cpu.attention.visibility import WORDS, Seen, new_seen, see_tile, view_rows
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.blocks import BLOCK, UNROLLED, set_block, set_rows
from tilewise.kernels.cpu.machine.frame import pointer_at
from tilewise.kernels.cpu.machine.gemm import lanes_in, panel_columns, words_to_elements
from tilewise.kernels.cpu.machine.pack import pair_tile, transpose_rows
from tilewise.kernels.cpu.machine.rows import F32, F64, copy_rows, store_row
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


@inlined
def transpose_stored(like, code, start, row_bytes, size, count, ld, spare, rows, panels):
    """Transposed panels of `count` rows of `ld` numbers, those at address `start`; the last ones,
    fewer than a register's lanes, by way of scratch.

    Args:
        like, rows, panels: bare pointers; rows is that to `spare`, scratch for the last rows.
    """
    lanes = lanes_in(like)
    whole = count // lanes * lanes
    stored = pointer_at(rows, start)
    transpose_rows(like, stored, row_bytes // size, 0, whole, ld, panels)
    if whole < count:
        copy_rows(like, code, spare, ld, ld, start, row_bytes, 0, 1, whole, count - whole, lanes)
        transpose_rows(like, rows, ld, whole, whole + lanes, ld, panels)


@inner
def are_finite(like, rows, row, count, dim):
    """Whether `count` rows, `row` elements apart, of `dim` numbers, a multiple of 2 registers, hold
    neither infinity nor NaN."""
    lanes = lanes_in(like)
    zero = simd.splat(like, 0.0)
    even = odd = zero
    for start in range(0, count * row, row):
        for at in range(start, start + dim, 2 * lanes):
            even = simd.fma(simd.load(rows, at), zero, even)
            odd = simd.fma(simd.load(rows, at + lanes), zero, odd)
    return simd.sum_lanes(simd.add(even, odd)) == 0.0


@inner
def score_keys(s, q, qi, ld, k_panels, head_dim, count, seen, blocks):
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
def _multiply(acc, ai, ldv, dim, p, values, panel, word, count, seen, blocks):
    """O = P V for each BLOCK rows, over their own range of keys.

    Args:
        values, panel, word: V, elements from panel to panel and from word to word of keys.
    """
    width, elements = panel_columns(acc), words_to_elements(p)
    unit = UNROLLED * elements
    last = (count + unit - 1) // unit * unit
    for column in range(0, dim, width):
        for block in range(blocks):
            begin = seen.begin[block]
            end = max(min(seen.end[block], last), begin)
            set_rows(
                acc, ai + block * BLOCK * ldv + column, ldv, dim - column,
                p, block * BLOCK * SCORE_ROW + begin, SCORE_ROW, elements,
                values, column // width * panel + begin // elements * word, word,
                (end - begin) // elements,
            )  # fmt: skip


@inner
def _softmax(like, factor, s, p, first, rows, seen, m, l):
    for row in range(rows):
        block = row // BLOCK
        m[first + row], l[first + row], _ = softmax_row(
            like, s, row * SCORE_ROW, factor, p, row * SCORE_ROW, seen.begin[block],
            seen.end[block], seen.words, row * WORDS, simd.number(like, -math.inf), False,
            seen.words,
        )  # fmt: skip


@inner
def see_keys_of(problem, view, seen, start, first, rows, count):
    """Fill `seen` of a tile, whose ends are such as whole registers hold, up to `count`."""
    sizes, lanes = problem.sizes, lanes_in(problem.arrays.like)
    if not see_tile(sizes, problem.mask, view, seen, start[Q_LEN], count, first, rows, 0):
        seen.words[:] = 0
        seen.begin[:] = 0
        seen.end[:] = 0
    last = (count + lanes - 1) // lanes * lanes
    for block in range(len(seen.end)):
        seen.end[block] = max(min(seen.end[block], last), seen.begin[block])
    seen.is_whole[0] = 0  # see_tile would keep such ends


@inner
def _attend(problem, is_direct, spare, pointers, seen, bits, view, sequence, kv_head):
    """Fill acc, m and l of the rows of one key head."""
    sizes, arrays, factor = problem.sizes, problem.arrays, problem.rule.scale
    like, start = bare(arrays.like), arrays.starts[sequence]
    size = arrays.like.itemsize
    head_dim, dim, group = sizes.head_dim, sizes.v_head_dim, sizes.group
    ld, ldv = (head_dim + 31) // 32 * 32, (dim + 31) // 32 * 32
    num_rows, count = start[Q_LEN] * group, start[K_LEN]
    padded = (count + 31) // 32 * 32
    all_rows = (num_rows + BLOCK - 1) // BLOCK * BLOCK
    k, v = start[K] + kv_head * sizes.k_head, start[V] + kv_head * sizes.v_head
    copy_rows(like, sizes.q_code, spare.q, ld, head_dim, start[Q] + kv_head * group * sizes.q_head,
              sizes.q_row, sizes.q_head, group, 0, num_rows, all_rows)  # fmt: skip
    if is_direct:
        transpose_stored(like, sizes.k_code, k, sizes.k_row, size, count, ld, spare.k_rows,
                         pointers.k_rows, pointers.k_panels)  # fmt: skip
    else:
        copy_rows(
            like, sizes.k_code, spare.k_rows, ld, head_dim, k, sizes.k_row, 0, 1, 0, count, padded
        )
        transpose_rows(like, pointers.k_rows, ld, 0, padded, ld, pointers.k_panels)
    values, panel, word = pointers.v_panels, TILE_N * panel_columns(like), panel_columns(like)
    word *= words_to_elements(values)
    if is_direct:
        values, panel, word = pointer_at(values, v), panel_columns(like), sizes.v_row // size
        is_finite = are_finite(like, values, word, count, dim)
    if not is_direct or not is_finite:
        copy_rows(
            like, sizes.k_code, spare.v_rows, ldv, dim, v, sizes.v_row, 0, 1, 0, count, padded
        )
    if not is_direct:
        pair_tile(like, pointers.v_rows, padded, ldv, pointers.v_panels, TILE_N)
        is_finite = are_finite(like, pointers.v_rows, ldv, padded, ldv)
    for first in range(0, num_rows, TILE_M):
        rows = min(TILE_M, num_rows - first)
        # A call of one tile sees the same keys in all heads and sequences.
        if num_rows > TILE_M or seen.begin[0] < 0:
            seen.begin[:] = 0
            see_keys_of(problem, view, seen, start, first, rows, count)
        blocks = (rows + BLOCK - 1) // BLOCK
        score_keys(
            pointers.s, pointers.q, first * ld, ld, pointers.k_panels, head_dim, count, bits, blocks
        )
        _softmax(like, factor, pointers.s, pointers.p, first, blocks * BLOCK, bits, pointers.m,
                 pointers.l)  # fmt: skip
        if is_finite:
            _multiply(pointers.acc, first * ldv, ldv, dim, pointers.p, values, panel, word, count,
                      bits, blocks)  # fmt: skip
        else:
            spare.acc[first * ldv : (first + rows) * ldv] = 0
            add_rows_exactly(spare.acc, first * ldv, ldv, dim, spare.p, spare.v_rows, ldv,
                             spare.zeros, seen, count, rows)  # fmt: skip


@inner
def _store(sizes, like, start, acc, m, l, kv_head, lse, needs_lse, ldv):
    """Divide the rows of a key head by their sums, and write them and, where wanted, lse."""
    group = sizes.group
    for row in range(start[Q_LEN] * group):
        query, total = row // group, l[row]
        head = kv_head * group + row - query * group
        inverse = simd.number(like, 0.0)
        if total != 0.0:
            inverse = simd.number(like, 1.0) / total
        store_row(like, sizes.q_code, acc, row * ldv, inverse,
                  start[O] + query * sizes.o_row + head * sizes.o_head,
                  sizes.v_head_dim)  # fmt: skip
        if needs_lse:
            at = start[LSE] + head * sizes.lse_head + query
            lse[at] = m[row] + math.log(total) if total != 0.0 else -math.inf


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
    starts, sizes, results = problem.arrays.starts, problem.sizes, pointer_at(like, lse)
    num_rows = (starts[0, Q_LEN] * sizes.group + BLOCK - 1) // BLOCK * BLOCK
    spare, owned = _new_scratch(like, packed_like, sizes.head_dim, sizes.v_head_dim, num_rows,
                                (starts[0, K_LEN] + 31) // 32 * 32)  # fmt: skip
    owned_seen = new_seen(problem.mask.bits, starts[0])
    seen = borrowed(owned_seen)
    view = view_rows(sizes, problem.mask, 0, 0, 0, num_rows)
    seen.begin[0] = -1
    number, ldv = bare(like), (sizes.v_head_dim + 31) // 32 * 32
    pointers = _Scratch(
        bare(spare.q), bare(spare.acc), bare(spare.k_rows), bare(spare.v_rows),
        bare(spare.k_panels), bare(spare.v_panels), bare(spare.s), bare(spare.p), bare(spare.m),
        bare(spare.l), bare(spare.zeros),
    )  # fmt: skip
    bits = Seen(bare(seen.words), bare(seen.begin), bare(seen.end), bare(seen.is_whole))
    # Of the type that is multiplied, and as wide as rows of scratch.
    is_direct = sizes.k_code == F32 or sizes.k_code == F64
    is_direct = (
        is_direct
        and packed_like.itemsize == sizes.k_size
        and sizes.head_dim % 32 == 0
        and sizes.v_head_dim % 32 == 0
        and starts[0, K_LEN] % UNROLLED == 0
    )
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        sequence, kv_head = task // sizes.num_kv_heads, task % sizes.num_kv_heads
        _attend(problem, is_direct, spare, pointers, seen, bits, view, sequence, kv_head)
        _store(sizes, number, starts[sequence], pointers.acc, pointers.m, pointers.l, kv_head,
               results, lse != 0, ldv)  # fmt: skip
    keep_alive(owned)
    keep_alive(owned_seen)
    keep_alive(owned_starts)
