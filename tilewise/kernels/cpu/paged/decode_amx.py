"""Decoding with the sums of a prompt's kernel, on CPUs with tile registers (Intel AMX).

What      o = softmax(logits) v and lse of one query row of each sequence, with exactly the bits
          that `attention/forward_amx.py` gives that row in a chunk of many.
Grid      one task per (sequence, some or all key heads), taken from a counter.
One task  for each tile of 128 keys and each of its heads: S^T = K q^T with the keys in place in
          the cache, the softmax of `attention/forward_softmax.py` for the rows of a group, O += P
          V.
Traffic   each K and V row is read once, all heads of a tile before the next tile, whose rows are
          prefetched meanwhile; V is packed in words of two keys, K is not packed.
Numerics  those of `attention/forward_softmax.py`, sum by sum. A product of tile registers adds
          along K in one order (`machine/amx.py`), whichever operand is called the first, so K q^T
          is the transpose of q K^T. Products with hidden keys, which a chunk computes and this
          kernel does not, are zeros. Infinite or NaN values of hidden keys do not affect a row.
"""

# ruff: noqa: E741 - m, l, s and p are the names of the papers

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tilewise.kernels.cpu.attention.forward_softmax import (
    LANES,
    LOWEST,
    SLACK,
    centre_rows,
    exponentiate_rows,
    log_sum,
    lower_rows,
    raise_rows,
    start_at_sink,
)
from tilewise.kernels.cpu.attention.keys import keys_of, values_of
from tilewise.kernels.cpu.attention.problem import K_LEN, LSE, TILE_N, O, Q
from tilewise.kernels.cpu.attention.softmax import LOG2_E, logits_row
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.amx import ROWS, STEP, pair_rows
from tilewise.kernels.cpu.machine.pack import (
    emit_transpose,
    prefetch,
    transpose_block,
)
from tilewise.kernels.cpu.machine.rows import BF16, load_row, store_row
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
from tilewise.kernels.cpu.visible import WORD, WORDS, distance_to, first_seen, see_keys

GROUPS = TILE_N // ROWS  # groups of keys whose rows lie in one cache block
FEW = 4  # heads of a group that are transposed in quarters of registers
_LINE = 64  # bytes
_i8, _i32, _i64, _f32 = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()


def _call(builder, name, *operands):
    simd.call_llvm(builder, f"x86.{name}", ir.VoidType(), list(operands))


def _bytes_at(context, builder, kind, array, index):
    pointer = simd.pointer_to(context, builder, kind, array, index)
    return builder.bitcast(pointer, _i8.as_pointer())


@intrinsic
def _score_keys(typingctx, k_0, k_1, row_bytes, q, qi, steps, s, si):
    """Set s[si:], float32 (32, 16), to K q^T for 16 keys at address k_0 and 16 at k_1, row_bytes
    apart, and 16 rows of q, in tile registers.

    Args:
        q, qi: the words of 16 rows of q, [step of 32 channels][word][row], and the first index.
    """
    index = types.int64
    sig = types.void(index, index, index, q, index, index, s, index)

    def codegen(context, builder, sig, args):
        if not simd.HAS_TILES or q.dtype != types.uint16:
            return context.get_dummy_value()
        k_0_, k_1_, row_, q_, qi_, steps_, s_, si_ = args
        q_first = _bytes_at(context, builder, q, q_, qi_)
        s_first = _bytes_at(context, builder, s, s_, si_)
        for tile in range(2):
            _call(builder, "tilezero", _i8(tile))
        with cgutils.for_range(builder, steps_) as loop:
            words = builder.gep(q_first, [builder.mul(loop.index, _i64(ROWS * _LINE))])
            _call(builder, "tileloadd64", _i8(6), words, _i64(_LINE))
            for tile, start in enumerate((k_0_, k_1_)):
                at = builder.add(start, builder.mul(loop.index, _i64(2 * STEP)))
                rows = builder.inttoptr(at, _i8.as_pointer())
                _call(builder, "tileloadd64", _i8(4 + tile), rows, row_)
                _call(builder, "tdpbf16ps", _i8(tile), _i8(4 + tile), _i8(6))
        for tile in range(2):
            target = builder.gep(s_first, [_i64(ROWS * _LINE * tile)])
            _call(builder, "tilestored64", _i8(tile), target, _i64(_LINE))
        return context.get_dummy_value()

    return sig, codegen


@intrinsic
def _add_values(typingctx, c, ci, ldc, a, ai, lda, b, bi, steps):
    """Compute 16 rows of c += a b for a panel of 32 columns of b, in tile registers.

    The arguments are those of `amx_tiles.multiply_block`; panels of b have rows of 64 bfloat16.
    """
    index = types.int64
    sig = types.void(c, index, index, a, index, index, b, index, index)

    def codegen(context, builder, sig, args):
        if not simd.HAS_TILES or a.dtype != types.uint16:
            return context.get_dummy_value()
        c_, ci_, ldc_, a_, ai_, lda_, b_, bi_, steps_ = args
        c_first = _bytes_at(context, builder, c, c_, ci_)
        a_first = _bytes_at(context, builder, a, a_, ai_)
        b_first = _bytes_at(context, builder, b, b_, bi_)
        c_stride, a_stride = builder.mul(ldc_, _i64(4)), builder.mul(lda_, _i64(2))
        halves = [builder.gep(c_first, [_i64(_LINE * tile)]) for tile in range(2)]
        for tile, half in enumerate(halves):
            _call(builder, "tileloadd64", _i8(tile), half, c_stride)
        with cgutils.for_range(builder, steps_) as loop:
            rows = builder.gep(a_first, [builder.mul(loop.index, _i64(2 * STEP))])
            _call(builder, "tileloadd64", _i8(4), rows, a_stride)
            words = builder.gep(b_first, [builder.mul(loop.index, _i64(2 * _LINE * ROWS))])
            for tile in range(2):
                at = builder.gep(words, [_i64(_LINE * tile)])
                _call(builder, "tileloadd64", _i8(6 + tile), at, _i64(2 * _LINE))
                _call(builder, "tdpbf16ps", _i8(tile), _i8(4), _i8(6 + tile))
        for tile, half in enumerate(halves):
            _call(builder, "tilestored64", _i8(tile), half, c_stride)
        return context.get_dummy_value()

    return sig, codegen


def _turn(count):
    """Return an intrinsic that writes the first `count` of 16 columns of 16 rows of floats as rows:
    a transposition; `count` is FEW or ROWS.

    The rows that are written are 32 floats apart.
    """

    def emit_few(builder, rows):
        def pick(a, b, lanes):
            """Emit the selection of four lanes of each quarter of the vectors a (0 to 3) and b (4
            to 7)."""
            width = a.type.count
            order = [
                width * (lane // 4) + 4 * quarter + lane % 4
                for quarter in range(width // 4)
                for lane in lanes
            ]
            return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_i32, width), order))

        def join(a, b):
            order = list(range(2 * a.type.count))
            kind = ir.VectorType(_i32, len(order))
            return builder.shuffle_vector(a, b, ir.Constant(kind, order))

        # Quarters of register j are rows j, j + 4, j + 8 and j + 12.
        fours = [
            join(join(rows[j], rows[j + 4]), join(rows[j + 8], rows[j + 12])) for j in range(4)
        ]
        low, high = (0, 4, 1, 5), (2, 6, 3, 7)
        turned = []
        for half in (low, high):
            a, b = pick(fours[0], fours[1], half), pick(fours[2], fours[3], half)
            turned += [pick(a, b, (0, 1, 4, 5)), pick(a, b, (2, 3, 6, 7))]
        return turned

    @intrinsic
    def turn(typingctx, source, si, target, ti):
        index = types.int64
        sig = types.void(source, index, target, index)

        def codegen(context, builder, sig, args):
            source_, si_, target_, ti_ = args
            read = simd.pointer_to(context, builder, source, source_, si_)
            write = simd.pointer_to(context, builder, target, target_, ti_)
            kind = ir.VectorType(_f32, count)
            rows = [
                simd.load_vector(builder, builder.gep(read, [_i64(row * ROWS)]), kind, 4)
                for row in range(ROWS)
            ]
            turned = emit_transpose(builder, rows) if count == ROWS else emit_few(builder, rows)
            for row, value in enumerate(turned):
                simd.store_vector(builder, value, builder.gep(write, [_i64(row * WORD)]), 4)
            return context.get_dummy_value()

        return sig, codegen

    return turn


_turn_few, _turn_all = _turn(FEW), _turn(ROWS)


class _Work(NamedTuple):
    """The scratch of a task; there are `side` rows a key head, those after the group's are padding.

    Attributes:
        plain, q: the rows of q, and their words as `_score_keys` takes them.
        acc, m, raised, l, parity: the sums of P V, the exponents, the scores s' and the sums of p
            of each row, as in `attention.forward_strips.Rows`; parity has a number for each key
            head.
        s, turned: the scores of a tile, [block of 32 keys][row][key]; of a block, [key][row].
        p: the probabilities of a tile, rows of 128.
        shifts, spare, seen: the scratch of `exponentiate_rows` and `raise_rows`.
        k_rows, v_rows, v_panels: rows that had to be gathered; words of two keys.
        zeros: a row of zeros.
        at: the addresses of groups of 16 keys of a tile, K's and V's, then those of the next tile.
    """

    plain: np.ndarray
    q: np.ndarray
    acc: np.ndarray
    m: np.ndarray
    raised: np.ndarray
    l: np.ndarray
    parity: np.ndarray
    s: np.ndarray
    turned: np.ndarray
    p: np.ndarray
    shifts: np.ndarray
    spare: np.ndarray
    seen: np.ndarray
    k_rows: np.ndarray
    v_rows: np.ndarray
    v_panels: np.ndarray
    zeros: np.ndarray
    at: np.ndarray


@inner
def _new_work(arrays, heads, side, ld, ldv, is_direct):
    like, packed, numbers = arrays.like, arrays.packed_like, arrays.starts[0]
    area = heads * side
    gathered = 0 if is_direct else TILE_N
    return _Work(
        zero_scratch(area * ld, packed),
        scratch(area * ld, packed),
        scratch(area * ldv, like),
        scratch(area, like),
        scratch(area, like),
        scratch(4 * area * LANES, like),
        scratch(heads, numbers),
        zero_scratch(side * TILE_N, like),
        scratch(WORD * ROWS, like),
        zero_scratch(side * TILE_N, packed),
        scratch(side, like),
        scratch(LANES * LANES, like),
        scratch(side * WORDS, numbers),
        zero_scratch(gathered * ld, packed),
        zero_scratch(gathered * ldv, packed),
        scratch(TILE_N * ldv, packed),
        zero_scratch(ldv, packed),
        scratch(4 * GROUPS, numbers),
    )


@inner
def _load_rows(sizes, rule, arrays, work, sequence, first_head, heads, side, ld):
    """Load the query rows of some key heads as words, zero their sums, and set each row's exponent
    and sum to those of its sink alone, or of nothing.

    Args:
        work: the scratch of the task.
        first_head, heads: the key heads of the task.
        side: the rows of scratch for each key head.
        ld: the padded channels.
    """
    like, starts, group = arrays.like, arrays.starts, sizes.group
    work.m[:] = LOWEST
    work.raised[:] = -math.inf
    scale = rule.scale if rule.is_scaled_only else 1.0
    work.l[: 2 * heads * side * LANES] = 0
    work.acc[:] = 0
    work.parity[:] = 0
    for index in range(heads):
        for member in range(group):
            row, head = index * side + member, (first_head + index) * group + member
            address = starts[sequence, Q] + head * sizes.q_head
            load_row(like, sizes.q_code, work.plain, row * ld, address, sizes.head_dim)
            if arrays.sinks[head] != -math.inf:  # a NaN sink makes the row NaN
                m, raised, total = start_at_sink(like, arrays.sinks[head], scale)
                work.m[row], work.raised[row] = m, raised
                work.l[2 * row * LANES] = work.l[(2 * row + 1) * LANES] = total
    for row in range(0, heads * side, ROWS):
        for word in range(0, ld // 2, ROWS):
            transpose_block(
                work.plain, row * ld + 2 * word, ld, work.q, row * ld + word * 2 * ROWS, 2 * ROWS
            )


@inner
def _store_rows(sizes, rule, arrays, work, lse, sequence, first_head, heads, side, ldv):
    """Divide the sums of a task's rows by their totals, and write o through its addresses and lse;
    a row that saw nothing gets 0 and -inf. The arguments are those of `_load_rows`."""
    like, starts, group = arrays.like, arrays.starts, sizes.group
    scale = rule.scale if rule.is_scaled_only else 1.0
    for index in range(heads):
        for member in range(group):
            row, head = index * side + member, (first_head + index) * group + member
            first = (work.parity[index] * heads * side + row) * 2 * LANES
            total = simd.sum_lanes(simd.load(work.l, first))
            inverse, value = like.dtype.type(0.0), -math.inf
            if total != 0.0:
                rounded = simd.sum_lanes(simd.load(work.l, first + LANES))
                inverse = like.dtype.type(1.0) / rounded
                value = log_sum(like, work.m[row], work.raised[row], total, scale)
            address = starts[sequence, O] + head * sizes.o_head
            store_row(like, sizes.q_code, work.acc, row * ldv, inverse, address, sizes.v_head_dim)
            lse[starts[sequence, LSE] + head * sizes.lse_head] = value


@inner
def _find_groups(sizes, arrays, work, sequence, key, first, length, to):
    """Write the addresses of K and of V of each group of 16 keys of the tile from `key` on to
    work.at, from index `to` on; 0 for a group in which no key of first ... length - 1 lies."""
    keys, values = keys_of(sizes, arrays, sequence, 0), values_of(sizes, arrays, sequence, 0)
    for group in range(GROUPS):
        row = key + group * ROWS
        is_seen = row < length and row + ROWS > first
        k = v = types.int64(0)
        if is_seen:
            k, v = address_of(keys, row), address_of(values, row)
        work.at[to + group], work.at[to + GROUPS + group] = k, v


@inner
def _gather(sizes, arrays, work, sequence, kv_head, key, low, high, ld, ldv):
    """Load the visible keys and values of one tile and head into scratch, and write the addresses
    of groups of 16 there to work.at, 0 for groups without a visible key.

    Args:
        key: the first key of the tile.
        low, high: the range within the tile that is visible.
        ld, ldv: the padded channels of keys and of values.
    """
    end = (high + ROWS - 1) // ROWS * ROWS
    like, first, count = arrays.like, key + low, high - low
    keys = keys_of(sizes, arrays, sequence, kv_head)
    gather_rows(like, keys, work.k_rows[low * ld :], ld, first, count, end - low)
    values = values_of(sizes, arrays, sequence, kv_head)
    gather_rows(like, values, work.v_rows[low * ldv :], ldv, first, count, end - low)
    for group in range(GROUPS):
        is_seen = group * ROWS < high and (group + 1) * ROWS > low
        work.at[group] = work.k_rows.ctypes.data + 2 * group * ROWS * ld if is_seen else 0
        work.at[GROUPS + group] = work.v_rows.ctypes.data + 2 * group * ROWS * ldv if is_seen else 0


@inlined
def _raise(like, work, si, begin, columns, word, factor, at, side, sums, ldv):
    """Raise the exponents m of the rows of a block of 32 keys whose logits exceed them, see
    `raise_rows`, rescale the rows' sums, and prepare the block to be exponentiated again: new
    shifts, and centred scores of far rows."""
    for row in range(0, side, LANES):
        raise_rows(
            like,
            work.s,
            si + row * WORD,
            work.p,
            begin + row * TILE_N,
            TILE_N,
            columns,
            factor,
            work.seen,
            word + row * WORDS,
            work.m,
            work.raised,
            at + row,
            work.l,
            sums + row * 2 * LANES,
            work.acc,
            (at + row) * ldv,
            ldv,
            ldv,
            work.spare,
        )
    if lower_rows(like, work.m, at, side, work.shifts):
        centre_rows(like, work.s, si, side, work.m, work.raised, at, work.shifts)


@inlined
def _pack_group(address, v_row, column, low, high, zeros, panels, units):
    """Pack 16 rows of values as words of two keys; rows of hidden keys become zeros.

    Args:
        address, v_row: the address of the first row, and the bytes of a row.
        column: the index of the first key in the tile.
        low, high: the range of the tile that is visible.
        zeros: the address of a row of zeros.
        panels, units: the panels to write, and how many there are.
    """
    for key in range(column, column + ROWS, 2):
        even = address + (key - column) * v_row if low <= key < high else zeros
        odd = address + (key + 1 - column) * v_row if low <= key + 1 < high else zeros
        pair_rows(even, odd, panels, key * STEP, TILE_N * STEP, units)


@inlined
def _fetch_group(address, row_bytes, head_bytes, row_size, index, heads):
    """Prefetch the share of head `index` of `heads` in a group of 16 keys, from the address of its
    first row on: all heads of some of the rows.

    So memory is read in its own order. A head's own part of every row would be one line in each
    few, which the hardware's prefetcher does not follow.
    """
    for row in range(ROWS * index // heads, ROWS * (index + 1) // heads):
        for head in range(heads):
            for line in range(0, row_size, _LINE):
                prefetch(address + row * row_bytes + head * head_bytes + line)


@inlined
def _score_tile(
    work,
    zeros,
    k_row,
    v_row,
    k_offset,
    v_offset,
    k_head,
    v_head,
    is_direct,
    group,
    index,
    heads,
    at,
    side,
    ld,
    ldv,
    low,
    high,
    begin,
    end,
):
    """Compute the scores of keys low ... high - 1 of a tile for the rows of one key head into
    work.s, pack its values as words of two keys into work.v_panels, and prefetch this head's share
    of the next tile."""
    k_first, v_first = k_offset - index * k_head, v_offset - index * v_head
    for column in range(begin, end, WORD):
        for place in range(column // ROWS, column // ROWS + 2):
            _pack_group(
                work.at[GROUPS + place] + v_offset,
                v_row,
                place * ROWS,
                low,
                high,
                zeros,
                work.v_panels,
                ldv // STEP,
            )
            if is_direct:  # the next tile's rows are prefetched into the L2 cache meanwhile
                next_k, next_v = work.at[2 * GROUPS + place], work.at[3 * GROUPS + place]
                if next_k != 0:
                    _fetch_group(next_k + k_first, k_row, k_head, 2 * ld, index, heads)
                    _fetch_group(next_v + v_first, v_row, v_head, 2 * ldv, index, heads)
        # A group without a visible key may not exist: its scores are never used.
        k_0, k_1 = work.at[column // ROWS], work.at[column // ROWS + 1]
        k_0 = k_0 if k_0 != 0 else k_1
        k_1 = k_1 if k_1 != 0 else k_0
        for row in range(0, side, ROWS):
            _score_keys(
                k_0 + k_offset,
                k_1 + k_offset,
                k_row,
                work.q,
                (at + row) * ld,
                ld // STEP,
                work.turned,
                0,
            )
            to = (column // WORD * side + row) * WORD
            if group <= FEW:
                _turn_few(work.turned, 0, work.s, to)
                _turn_few(work.turned, ROWS * ROWS, work.s, to + ROWS)
            else:
                _turn_all(work.turned, 0, work.s, to)
                _turn_all(work.turned, ROWS * ROWS, work.s, to + ROWS)


@inlined
def _weigh_tile(like, work, factor, is_whole, group, index, area, at, side, ldv, begin, end):
    """Turn a tile's scores in work.s into probabilities, update exponents and sums of the rows of
    key head `index` of the task, and add P V to their sums of values, with the bits of
    `attention.forward_strips`."""
    limit = simd.splat(like, SLACK)
    parity = work.parity[index]
    for column in range(begin, end, WORD):
        word = column // WORD
        si = word * side * WORD
        old = (parity * area + at) * 2 * LANES
        new = ((1 - parity) * area + at) * 2 * LANES
        if lower_rows(like, work.m, at, side, work.shifts):
            _raise(like, work, si, begin, column - begin, word, factor, at, side, old, ldv)
        largest = exponentiate_rows(
            like,
            work.s,
            si,
            work.p,
            column,
            TILE_N,
            group,
            factor,
            work.shifts,
            0,
            is_whole,
            work.seen,
            word,
            work.l,
            old,
            new,
            False,
            work.seen,
            0,
        )
        if not simd.holds_everywhere(simd.at_least(limit, largest)):
            _raise(like, work, si, begin, column - begin, word, factor, at, side, old, ldv)
            exponentiate_rows(
                like,
                work.s,
                si,
                work.p,
                column,
                TILE_N,
                group,
                factor,
                work.shifts,
                0,
                is_whole,
                work.seen,
                word,
                work.l,
                old,
                new,
                False,
                work.seen,
                0,
            )
        parity = 1 - parity
    work.parity[index] = parity
    for row in range(0, side, ROWS):
        for column in range(0, ldv, STEP):
            _add_values(
                work.acc,
                (at + row) * ldv + column,
                ldv,
                work.p,
                row * TILE_N + begin,
                TILE_N,
                work.v_panels,
                column * TILE_N + begin * STEP,
                (end - begin) // STEP,
            )


@inner
def _finish_logits(sizes, rule, arrays, work, sequence, kv_head, side, distance, begin, end):
    """Turn the products of a tile and key head in work.s into logits in place: scale, softcap and
    ALiBi.

    It is called only where a logit is not just a scaled product.

    Args:
        side: the rows of scratch for a key head.
        distance: positions from the tile's first key to the query.
        begin, end: the range of columns.
    """
    for column in range(begin, end, WORD):
        for row in range(sizes.group):
            slope = arrays.slopes[sequence * sizes.slopes_batch + kv_head * sizes.group + row]
            logits_row(
                arrays.like,
                rule,
                work.s,
                (column // WORD * side + row) * WORD,
                0,
                WORD,
                slope,
                distance - column,
                work.spare,
                work.spare,
                0,
            )


@inner
def _decode_task(
    sizes, rule, arrays, work, pointers, sequence, first_head, heads, side, ld, ldv, is_direct
):
    """Let the one query row of a sequence attend to all of its visible keys, tile by tile, for key
    heads first_head ... first_head + heads - 1, from rows and sums that `_load_rows` prepared in
    `work`; the sums stay there.

    Args:
        work, pointers: the thread's scratch, and bare pointers to the same arrays.
        side: the rows of scratch for each key head: its query heads, padded to a multiple of 16.
        ld, ldv: the padded channels of keys and of values.
        is_direct: True to read keys and values in the cache itself, False to gather them first.
    """
    length = arrays.starts[sequence, K_LEN]
    first = first_seen(sizes.window_left, 1, length, 0)
    like, area = bare(arrays.like), heads * side
    factor = arrays.like.dtype.type(LOG2_E * (rule.scale if rule.is_scaled_only else 1.0))
    zeros = types.int64(work.zeros.ctypes.data)
    start = first // TILE_N * TILE_N
    if is_direct:
        _find_groups(sizes, arrays, work, sequence, start, first, length, types.int64(0))
    for key in range(start, length, TILE_N):
        low, high = max(first - key, 0), min(length - key, TILE_N)
        begin, end = low // WORD * WORD, (high + WORD - 1) // WORD * WORD
        is_whole = low == 0 and high == TILE_N
        for row in range(side):
            see_keys(work.seen, row * WORDS, low, high)
        if is_direct:
            _find_groups(sizes, arrays, work, sequence, key + TILE_N, first, length, 2 * GROUPS)
        for index in range(heads):
            kv_head, at = first_head + index, index * side
            k_row, v_row, k_offset, v_offset = 2 * ld, 2 * ldv, 0, 0
            if is_direct:
                k_row, v_row = sizes.k_row, sizes.v_row
                k_offset, v_offset = kv_head * sizes.k_head, kv_head * sizes.v_head
            else:
                _gather(sizes, arrays, work, sequence, kv_head, key, low, high, ld, ldv)
            _score_tile(
                pointers,
                zeros,
                k_row,
                v_row,
                k_offset,
                v_offset,
                sizes.k_head,
                sizes.v_head,
                is_direct,
                sizes.group,
                index,
                heads,
                at,
                side,
                ld,
                ldv,
                low,
                high,
                begin,
                end,
            )
            if not rule.is_scaled_only:
                distance = distance_to(1, length, 0, key)
                _finish_logits(
                    sizes, rule, arrays, work, sequence, kv_head, side, distance, begin, end
                )
            _weigh_tile(
                like,
                pointers,
                factor,
                is_whole,
                sizes.group,
                index,
                area,
                at,
                side,
                ldv,
                begin,
                end,
            )
        for group in range(2 * GROUPS):  # slicing an array would compile NumPy's checks of it
            work.at[group] = work.at[2 * GROUPS + group]


@inner
def decode_tiles_amx(sizes, rule, arrays, heads_per_task, lse, counter, num_tasks):
    """Decode on the matrix unit in this thread: take tasks, each a sequence and heads_per_task key
    heads, until none is left, and write o and lse. The caller has called `amx.configure`, and calls
    `amx.release`.

    Args:
        sizes, rule, arrays: parts of a `Problem`; every sequence has one query row.
        heads_per_task: a divisor of the number of key heads.
        lse: a flat array of like's type.
        counter: (1,) int64, the next task.
    """
    arrays, lse = borrowed(arrays), borrowed(lse)
    side = (sizes.group + ROWS - 1) // ROWS * ROWS
    ld = (sizes.head_dim + STEP - 1) // STEP * STEP
    ldv = (sizes.v_head_dim + STEP - 1) // STEP * STEP
    lies_together = sizes.block_size % ROWS == 0 and sizes.k_code == BF16
    is_direct = lies_together and sizes.head_dim == ld and sizes.v_head_dim == ldv
    owned = _new_work(arrays, heads_per_task, side, ld, ldv, is_direct)
    work = borrowed(owned)
    pointers = _Work(
        bare(work.plain),
        bare(work.q),
        bare(work.acc),
        bare(work.m),
        bare(work.raised),
        bare(work.l),
        bare(work.parity),
        bare(work.s),
        bare(work.turned),
        bare(work.p),
        bare(work.shifts),
        bare(work.spare),
        bare(work.seen),
        bare(work.k_rows),
        bare(work.v_rows),
        bare(work.v_panels),
        bare(work.zeros),
        bare(work.at),
    )
    parts = sizes.num_kv_heads // heads_per_task
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        sequence, first_head = task // parts, task % parts * heads_per_task
        _load_rows(sizes, rule, arrays, work, sequence, first_head, heads_per_task, side, ld)
        _decode_task(
            sizes,
            rule,
            arrays,
            work,
            pointers,
            sequence,
            first_head,
            heads_per_task,
            side,
            ld,
            ldv,
            is_direct,
        )
        _store_rows(sizes, rule, arrays, work, lse, sequence, first_head, heads_per_task, side, ldv)
    keep_alive(owned)
