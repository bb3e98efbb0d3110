"""Exact attention, forward, over keys that fit one tile, so that nothing is rescaled.

What      o = softmax(logits) v and lse, for dense keys of a call of q, k and v alone.
Grid      one task per (sequence, key head), taken from a counter.
One task  packs K and V once, see `forward.pack_stored`; per TILE_M query rows S = Q K^T, softmax,
          O = P V. Whole blocks of queries are read in place, if keys are.
Traffic   inputs and outputs once. Scratch is that of `forward.py`, as far as it is used.
Numerics  those of `forward.py`, to the bit: the same sums in the same order, except products with
          keys that a row does not see, which are exact zeros there.
"""

# ruff: noqa: E741 - l is the name of the papers

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba import types

from tilewise.kernels.cpu.attention.forward import (
    add_rows_exactly,
    is_multiplied_as_stored,
    pack_stored,
    score_tile,
)
from tilewise.kernels.cpu.attention.frame import placed, read_problem, with_starts
from tilewise.kernels.cpu.attention.keys import keys_of, values_of
from tilewise.kernels.cpu.attention.problem import (
    K_LEN,
    LSE,
    Q_LEN,
    SCORE_ROW,
    TILE_M,
    TILE_N,
    O,
    Q,
)
from tilewise.kernels.cpu.attention.softmax import softmax_row
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.blocks import BLOCK, HALF, UNROLLED, set_first
from tilewise.kernels.cpu.machine.frame import array_at, pointer_at
from tilewise.kernels.cpu.machine.gemm import lanes_in, panel_columns, words_to_elements
from tilewise.kernels.cpu.machine.pack import pair_rows, transpose_rows
from tilewise.kernels.cpu.machine.rows import copy_rows, store_row
from tilewise.kernels.cpu.machine.source import are_finite
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
from tilewise.kernels.cpu.visible import WORDS, Seen, new_seen, see_tile, view_rows

MOST_ROWS = 8 * TILE_M  # query rows of a task; more are shared among tasks of `forward.py`


class _Scratch(NamedTuple):
    """The scratch of a thread; channels past the head dim are zero. A second one holds bare
    pointers to the same arrays.

    Attributes:
        q, acc, m, l: the arrays for all rows of a task; the others are as in `forward.py`.
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
def _new_scratch(like, packed, index_like, head_dim, dim, num_rows, num_keys):
    """Allocate the scratch of a thread; return it, and the array that owns its memory and must be
    kept alive.

    Args:
        like, packed, index_like: empty arrays: of the float type, of operands, and of int64.
        head_dim, dim: the head dims of keys and of values.
        num_rows, num_keys: the most rows and keys of a task, padded.
    """
    ld, ldv = (head_dim + 31) // 32 * 32, (dim + 31) // 32 * 32
    tile = min(num_rows, (TILE_M + BLOCK - 1) // BLOCK * BLOCK) * SCORE_ROW
    rows, keys, values, panel = num_rows * ld, num_keys * ld, num_keys * ldv, TILE_N * ldv
    num_operands = (rows + 2 * keys + values + panel + tile + 31) // 32 * 32
    num_numbers = num_rows * (ldv + 2) + tile + TILE_M
    size = num_operands * packed.itemsize
    memory = scratch((size + num_numbers * like.itemsize + 7) // 8, index_like)
    address = types.int64(memory.ctypes.data)
    operands = array_at(address, num_operands, packed)
    numbers = array_at(address + size, num_numbers, like)
    if ld > head_dim or ldv > dim:
        operands[: rows + keys + values] = 0
    k_rows, v_rows, k_panels = rows, rows + keys, rows + keys + values
    v_panels, p = k_panels + keys, k_panels + keys + panel
    s, m = num_rows * ldv, num_rows * ldv + tile
    zeros = numbers[m + 2 * num_rows :]
    zeros[:] = 0
    spare = _Scratch(
        operands[:rows],
        numbers[:s],
        operands[k_rows:v_rows],
        operands[v_rows:k_panels],
        operands[k_panels:v_panels],
        operands[v_panels:p],
        numbers[s:m],
        operands[p:],
        numbers[m : m + num_rows],
        numbers[m + num_rows : m + 2 * num_rows],
        zeros,
    )
    return spare, memory


@inner
def _multiply(acc, ai, ldv, dim, p, values, panel, word, rows, count, seen):
    """Compute O = P V into acc, which is overwritten, each BLOCK of rows over the range of keys
    that it sees.

    Args:
        acc, ai, ldv: the sums, the index of the first, and the elements of a row.
        dim: the channels of values.
        p: the probabilities of keys.
        values, panel, word: the values as `pack_stored` has packed them, and its strides.
        rows, count: the numbers of rows and of keys.
        seen: the range of keys of each block of rows.
    """
    width, elements = panel_columns(acc), words_to_elements(p)
    for column in range(0, dim, width):
        for block in range((rows + BLOCK - 1) // BLOCK):
            begin = seen.begin[block]
            end = max(min(seen.end[block], count), begin)
            set_first(
                acc,
                ai + block * BLOCK * ldv + column,
                ldv,
                dim - column,
                rows - block * BLOCK,
                p,
                block * BLOCK * SCORE_ROW + begin,
                SCORE_ROW,
                elements,
                values,
                column // width * panel + begin // elements * word,
                word,
                (end - begin) // elements,
            )


@inner
def _softmax(like, factor, s, p, first, rows, seen, m, l):
    for row in range(rows):
        block = row // BLOCK
        m[first + row], l[first + row], _ = softmax_row(
            like,
            s,
            row * SCORE_ROW,
            factor,
            p,
            row * SCORE_ROW,
            seen.begin[block],
            seen.end[block],
            seen.words,
            row * WORDS,
            simd.number(like, -math.inf),
            False,
            seen.words,
        )


@inner
def see_keys_of(problem, view, seen, start, first, rows, count):
    """Fill `seen` for `rows` rows from `first` on and all `count` keys of a sequence, which fit one
    tile, with ends that are multiples of a register's lanes and do not exceed the keys by more.

    Args:
        view: the part of the block mask that the task needs.
        start: the sequence's row of `starts`.
    """
    sizes, lanes = problem.sizes, lanes_in(problem.arrays.like)
    if not see_tile(sizes, problem.mask, view, seen, start[Q_LEN], count, first, rows, 0):
        seen.words[:] = 0
        seen.begin[:] = 0
        seen.end[:] = 0
    last = (count + lanes - 1) // lanes * lanes
    for block in range(len(seen.end)):
        seen.end[block] = max(min(seen.end[block], last), seen.begin[block])
    seen.is_whole[0] = 0  # see_tile would otherwise keep these ends


@inlined
def _attend(problem, is_direct, spare, pointers, seen, bits, view, sequence, kv_head):
    """Compute the sums of values, maxima and totals of all rows of one key head, and leave them in
    scratch (acc, m and l).

    Args:
        is_direct: whether keys are multiplied as stored.
        spare, pointers: the thread's scratch.
        seen, bits, view: scratch of `see_tile`, bare pointers to the same, and the part of a block
            mask.
    """
    sizes, arrays, factor = problem.sizes, problem.arrays, problem.rule.scale
    like, start = bare(arrays.like), arrays.starts[sequence]
    head_dim, dim, group = sizes.head_dim, sizes.v_head_dim, sizes.group
    ld, ldv = (head_dim + 31) // 32 * 32, (dim + 31) // 32 * 32
    num_rows, count = start[Q_LEN] * group, start[K_LEN]
    all_rows = (num_rows + BLOCK - 1) // BLOCK * BLOCK
    first_q = start[Q] + kv_head * group * sizes.q_head
    q, q_row, left = pointers.q, ld, num_rows % BLOCK
    if is_direct and group == 1 and (left == 0 or left == HALF):
        q, q_row = pointer_at(q, first_q), sizes.q_row // sizes.k_size
    else:
        copy_rows(
            like,
            sizes.q_code,
            spare.q,
            ld,
            head_dim,
            first_q,
            sizes.q_row,
            sizes.q_head,
            group,
            0,
            num_rows,
            all_rows,
        )
    keys, values = (
        keys_of(sizes, arrays, sequence, kv_head),
        values_of(sizes, arrays, sequence, kv_head),
    )
    weighed, packed = pointers.v_panels, (count + 31) // 32 * 32
    panel, word = TILE_N * panel_columns(like), panel_columns(like) * words_to_elements(weighed)
    if is_direct and count % (UNROLLED * words_to_elements(weighed)) == 0:
        packed = count
        weighed, panel, word, is_finite = pack_stored(
            like, sizes, spare, pointers, keys, values, 0, count, 1
        )
    else:
        copy_rows(
            like,
            sizes.k_code,
            spare.k_rows,
            ld,
            head_dim,
            keys.start,
            sizes.k_row,
            0,
            1,
            0,
            count,
            packed,
        )
        copy_rows(
            like,
            sizes.k_code,
            spare.v_rows,
            ldv,
            dim,
            values.start,
            sizes.v_row,
            0,
            1,
            0,
            count,
            packed,
        )
        is_finite = are_finite(like, pointers.v_rows, ldv, packed, ldv)
        transpose_rows(like, pointers.k_rows, ld, 0, packed, ld, pointers.k_panels)
        pair_rows(like, pointers.v_rows, ldv, packed, ldv, pointers.v_panels, TILE_N)
    for first in range(0, num_rows, TILE_M):
        rows = min(TILE_M, num_rows - first)
        # A call of one tile sees the same keys in all heads and sequences.
        if num_rows > TILE_M or seen.begin[0] < 0:
            seen.begin[:] = 0
            see_keys_of(problem, view, seen, start, first, rows, count)
        score_tile(
            pointers.s,
            q,
            first * q_row,
            q_row,
            pointers.k_panels,
            head_dim,
            rows,
            count,
            bits.begin,
            bits.end,
        )
        _softmax(like, factor, pointers.s, pointers.p, first, rows, bits, pointers.m, pointers.l)
        if is_finite:
            _multiply(
                pointers.acc,
                first * ldv,
                ldv,
                dim,
                pointers.p,
                weighed,
                panel,
                word,
                rows,
                packed,
                bits,
            )
        else:
            spare.acc[first * ldv : (first + rows) * ldv] = 0
            add_rows_exactly(
                spare.acc,
                first * ldv,
                ldv,
                dim,
                spare.p,
                spare.v_rows,
                ldv,
                spare.zeros,
                seen,
                count,
                rows,
            )


@inlined
def _store(sizes, is_direct, like, start, pointers, kv_head, lse, ldv):
    """Divide the sums of a key head's rows, in scratch, by their totals, and write o through its
    addresses and lse; rows that saw nothing get 0 and -inf."""
    group, acc = sizes.group, pointers.acc
    for row in range(start[Q_LEN] * group):
        query, total = row // group, pointers.l[row]
        head = kv_head * group + row - query * group
        inverse = simd.number(like, 0.0)
        if total != 0.0:
            inverse = simd.number(like, 1.0) / total
        o = start[O] + query * sizes.o_row + head * sizes.o_head
        if is_direct:
            stored, factors = pointer_at(pointers.p, o), simd.splat(like, inverse)
            for column in range(0, sizes.v_head_dim, lanes_in(like)):
                number = simd.load(acc, row * ldv + column)
                simd.store(stored, column, simd.mul(number, factors))
        else:
            store_row(like, sizes.q_code, acc, row * ldv, inverse, o, sizes.v_head_dim)
        at = start[LSE] + head * sizes.lse_head + query
        lse[at] = pointers.m[row] + math.log(total) if total != 0.0 else -math.inf


@kernel
def attention_forward_few(like, packed_like, frame, q, k, v, o, lse, counter, num_tasks):
    """Compute attention over keys that fit one tile: take tasks, each a sequence and key head, in
    this thread until none is left, and write o and lse.

    Args:
        like, packed_like: the empty arrays of the problem.
        frame: the problem, see `frame_of`, whose sequences have the same lengths, at most TILE_N
            keys and MOST_ROWS rows of a key head; its rule is scaled only.
        q, k, v, o: the addresses to which starts are relative.
        lse: the address of numbers of like's type.
        counter: (1,) int64, the next task.
    """
    offsets = read_problem(frame, like, packed_like)
    owned_starts = placed(offsets.arrays.starts, q, k, v, o)
    problem = with_starts(offsets, borrowed(owned_starts))
    starts, sizes, results = problem.arrays.starts, problem.sizes, pointer_at(like, lse)
    num_rows = (starts[0, Q_LEN] * sizes.group + BLOCK - 1) // BLOCK * BLOCK
    spare, owned = _new_scratch(
        like,
        packed_like,
        starts[0],
        sizes.head_dim,
        sizes.v_head_dim,
        num_rows,
        (starts[0, K_LEN] + 31) // 32 * 32,
    )
    owned_seen = new_seen(problem.mask.bits, starts[0])
    seen = borrowed(owned_seen)
    view = view_rows(sizes, problem.mask, 0, 0, 0, num_rows)
    seen.begin[0] = -1
    number, ldv = bare(like), (sizes.v_head_dim + 31) // 32 * 32
    pointers = _Scratch(
        bare(spare.q),
        bare(spare.acc),
        bare(spare.k_rows),
        bare(spare.v_rows),
        bare(spare.k_panels),
        bare(spare.v_panels),
        bare(spare.s),
        bare(spare.p),
        bare(spare.m),
        bare(spare.l),
        bare(spare.zeros),
    )
    bits = Seen(bare(seen.words), bare(seen.begin), bare(seen.end), bare(seen.is_whole))
    is_direct = is_multiplied_as_stored(sizes, packed_like)
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        sequence, kv_head = task // sizes.num_kv_heads, task % sizes.num_kv_heads
        _attend(problem, is_direct, spare, pointers, seen, bits, view, sequence, kv_head)
        _store(sizes, is_direct, number, starts[sequence], pointers, kv_head, results, ldv)
    keep_alive(owned)
    keep_alive(owned_seen)
    keep_alive(owned_starts)
