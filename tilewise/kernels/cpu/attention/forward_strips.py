"""Strips of 32 query rows and a tile of keys, with both kinds of registers at work.

What      per block of 32 keys S = Q K^T and softmax; per tile O += P V. Between the rows of the
          softmax of a block, in vector registers, S of the next block and P V of the strip before
          are computed in tile registers: the CPU does both at once.
Grid      none: called by one thread of `forward_amx.py` on that thread's scratch.
One call  all strips of a task that see some of the tile's keys.
Traffic   two blocks of S, 4 KiB each, and two strips of P, 8 KiB each, stay in the L1 cache while
          K, V, q and the sums stream through it.
Numerics  see `forward_softmax.py`.
"""

# ruff: noqa: E741 - m, l, s and p are the names of the papers

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu.attention.forward import load_bias_row
from tilewise.kernels.cpu.attention.forward_softmax import (
    LANES,
    SLACK,
    centre_rows,
    exponentiate_rows,
    lower_rows,
    raise_rows,
)
from tilewise.kernels.cpu.attention.problem import K_LEN, Q_LEN, TILE_M, TILE_N
from tilewise.kernels.cpu.attention.softmax import LOG2_E, logits_row
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.amx_tiles import SIDE, multiply_block
from tilewise.kernels.cpu.machine.blocks import BLOCK
from tilewise.kernels.cpu.machine.philox import keep_row
from tilewise.kernels.cpu.machine.threads import inner, scratch, zero_scratch
from tilewise.kernels.cpu.visible import WORD, WORDS, Seen, distance_to, see_tile

STRIPS = TILE_M // SIDE  # strips of a tile of rows
_CHUNK = 8  # rows of softmax between products
_BLOCK, _AREA = SIDE * SIDE, SIDE * TILE_N


class Rows(NamedTuple):
    """The scratch of a task's query rows.

    Attributes:
        q: (rows, ld) bfloat16, zero after the head dim.
        acc: (rows, ldv + a few) float32, the sums of P V.
        m, raised: (rows,) float32, the exponent that is subtracted from each row's logits, and the
            score s' to which it was raised, see `forward_softmax.py`.
        l: (2, rows, 2, 16) float32, the sums of p and of p rounded, in 16 lanes, twice: the newest
            and those one block of keys before.
        parity: (strips,) int64, the index 0 or 1 of a strip's newest sums in l.
    """

    q: np.ndarray
    acc: np.ndarray
    m: np.ndarray
    raised: np.ndarray
    l: np.ndarray
    parity: np.ndarray


class Sight(NamedTuple):
    """The keys of one tile that all query rows of a task see: a `Seen` for each tile of rows, one
    behind another, and the list of strips of 32 rows that see any.

    Attributes:
        words, begin, end, is_whole: the arrays of the `Seen` of each tile t of rows, which begin at
            t * TILE_M * WORDS, at t * TILE_M / BLOCK (begin and end) and at t.
        strips: (strips, 3) int64, flat, of each strip that sees keys: its number, and the first and
            the end of its range of keys, from the tile's first.
    """

    words: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    is_whole: np.ndarray
    strips: np.ndarray


class Scores(NamedTuple):
    """The scratch of two blocks of scores s (32 x 32), two strips of probabilities p (32 rows, a
    tile of keys), and of the current rows: shifts, bias, the bits that dropout keeps, and spare
    room."""

    s: np.ndarray
    p: np.ndarray
    shifts: np.ndarray
    spare: np.ndarray
    bias: np.ndarray
    keep: np.ndarray


@inner
def new_scores(like, packed, words_like):
    """Allocate `Scores`; the arguments are any arrays of float32, of bfloat16 as uint16, and of
    int32."""
    return Scores(
        scratch(2 * _BLOCK, like),
        scratch(2 * _AREA, packed),
        scratch(SIDE, like),
        scratch(LANES * LANES, like),
        zero_scratch(2 * WORD, like),
        zero_scratch(SIDE * WORDS, words_like),
    )


@inner
def new_sight(tiles, words_like, index_like):
    """Allocate a `Sight` for `tiles` tiles of query rows; the other arguments are any arrays of
    int32 and int64."""
    blocks = tiles * (TILE_M // BLOCK)
    return Sight(
        scratch(tiles * TILE_M * WORDS, words_like),
        scratch(blocks, index_like),
        scratch(blocks, index_like),
        zero_scratch(tiles, index_like),
        scratch(tiles * STRIPS * 3, index_like),
    )


@inner
def see_strips(sizes, mask, view, sight, q_len, k_len, first_row, num_rows, key):
    """Fill `sight` for one tile of keys; return how many strips of 32 query rows see a key of it.

    Of each such strip `sight.strips` gets the number, from 0 at `first_row`, and the first and the
    end of the keys that any of its rows sees. These count from the tile's first key.

    Args:
        sizes, mask: the sizes of the call, and its rule of the keys that a query sees.
        view: the part of the block mask that the task needs, from `view_rows`.
        q_len, k_len: the sequence's numbers of queries and of keys.
        first_row, num_rows: the first query row of the task, and the number of them.
        key: the first key of the tile.
    """
    blocks, count = TILE_M // BLOCK, 0
    for tile in range((num_rows + TILE_M - 1) // TILE_M):
        seen = Seen(
            sight.words[tile * TILE_M * WORDS :],
            sight.begin[tile * blocks : (tile + 1) * blocks],
            sight.end[tile * blocks : (tile + 1) * blocks],
            sight.is_whole[tile : tile + 1],
        )
        row = tile * TILE_M
        rows = min(TILE_M, num_rows - row)
        if not see_tile(sizes, mask, view, seen, q_len, k_len, first_row + row, rows, key):
            continue
        for strip in range(STRIPS):
            begin, end = TILE_N, 0
            for block in range(strip * SIDE // BLOCK, (strip + 1) * SIDE // BLOCK):
                if seen.end[block] > 0:
                    begin, end = min(begin, seen.begin[block]), max(end, seen.end[block])
            if begin < end:
                sight.strips[3 * count] = tile * STRIPS + strip
                sight.strips[3 * count + 1], sight.strips[3 * count + 2] = begin, end
                count += 1
    return count


@inner
def _finish_logits(problem, scores, si, sequence, kv_head, first_row, rows, key):
    """Turn a block of 32 x 32 products in `scores.s` into logits in place: scale, softcap, bias and
    ALiBi.

    It is called only where a logit is not just a scaled product.

    Args:
        si: the index of the block in `scores.s`.
        first_row, rows: the rows of the block.
        key: the first key of the block.
    """
    sizes, rule, arrays = problem.sizes, problem.rule, problem.arrays
    like = arrays.like
    q_len, k_len = arrays.starts[sequence, Q_LEN], arrays.starts[sequence, K_LEN]
    for row in range(rows):
        query, head = (first_row + row) // sizes.group, (first_row + row) % sizes.group
        head += kv_head * sizes.group
        if rule.has_bias:
            load_bias_row(
                sizes, like, scores.bias, sequence, head, query, key, min(WORD, k_len - key)
            )
        slope = arrays.slopes[sequence * sizes.slopes_batch + head]
        diagonal = distance_to(q_len, k_len, query, key)
        logits_row(
            like,
            rule,
            scores.s,
            si + row * WORD,
            0,
            WORD,
            slope,
            diagonal,
            scores.bias,
            scores.bias,
            WORD,
        )


@inner
def _draw_rows(problem, keep, sequence, kv_head, first_row, rows, key):
    """Fill `keep` with dropout's bits for the rows of a strip and a tile of keys; 1 keeps the
    probability.

    Args:
        keep: the bits, WORDS words a row.
        first_row, rows: the rows of the strip.
        key: the first key of the tile.
    """
    sizes, dropout = problem.sizes, problem.dropout
    num_heads = sizes.num_kv_heads * sizes.group
    for row in range(rows):
        query, member = (first_row + row) // sizes.group, (first_row + row) % sizes.group
        head = sequence * num_heads + kv_head * sizes.group + member
        keep_row(dropout, keep, row * WORDS, head, query, key)


@inner
def _score(rows, scores, k_panels, ld, strip, column, buffer):
    """Multiply a strip of 32 query rows by the 32 keys of a tile from `column` on, in tile
    registers: the products go to block `buffer` (0 or 1) of scores.s."""
    multiply_block(
        scores.s,
        buffer * _BLOCK,
        SIDE,
        rows.q,
        strip * SIDE * ld,
        ld,
        k_panels,
        column * ld,
        2 * SIDE,
        ld // SIDE,
        False,
    )


@inner
def _add_values(rows, scores, v_panels, acc_row, strip, begin, end, buffer, column):
    """Add P V to 32 channels of the sums of a strip, in tile registers.

    Args:
        acc_row: the elements of a row of sums.
        strip: the number of the strip.
        begin, end: the range of the tile's keys that the strip sees.
        buffer: the number of the buffer of probabilities, 0 or 1.
        column: the first channel.
    """
    multiply_block(
        rows.acc,
        strip * SIDE * acc_row + column,
        acc_row,
        scores.p,
        buffer * _AREA + begin,
        TILE_N,
        v_panels,
        column * TILE_N + begin * SIDE,
        2 * SIDE,
        (end - begin) // SIDE,
        True,
    )


@inner
def _exponentiate(
    like, scores, sight, rows, factor, is_whole, words, at, si, pi, top, count, parity, area, drops
):
    """Turn `count` rows of a 32 x 32 block of scores, from row `top` of it on, into probabilities,
    and add these to the rows' sums; return the largest exponents in lanes. See `exponentiate_rows`,
    of which this fills in the places."""
    old, new = parity * area + at + top, (1 - parity) * area + at + top
    return exponentiate_rows(
        like,
        scores.s,
        si + top * SIDE,
        scores.p,
        pi + top * TILE_N,
        TILE_N,
        count,
        factor,
        scores.shifts,
        top,
        is_whole,
        sight.words,
        words + top * WORDS,
        rows.l,
        old * 2 * LANES,
        new * 2 * LANES,
        drops,
        scores.keep,
        top * WORDS + words % WORDS,
    )


@inner
def _raise(
    like, scores, sight, rows, factor, words, at, si, pi, columns, parity, area, acc_row, ldv
):
    """Raise the exponents m of the rows of a 32 x 32 block whose logits exceed them, see
    `raise_rows`, rescale the rows' sums, and prepare the block to be exponentiated again: new
    shifts, and centred scores of far rows."""
    for top in range(0, SIDE, LANES):
        raise_rows(
            like,
            scores.s,
            si + top * SIDE,
            scores.p,
            pi - columns + top * TILE_N,
            TILE_N,
            columns,
            factor,
            sight.words,
            words + top * WORDS,
            rows.m,
            rows.raised,
            at + top,
            rows.l,
            (parity * area + at + top) * 2 * LANES,
            rows.acc,
            (at + top) * acc_row,
            acc_row,
            ldv,
            scores.spare,
        )
    if lower_rows(like, rows.m, at, SIDE, scores.shifts):
        centre_rows(like, scores.s, si, SIDE, rows.m, rows.raised, at, scores.shifts)


@inner
def attend_strips(
    problem,
    rows,
    sight,
    scores,
    k_panels,
    v_panels,
    ld,
    ldv,
    acc_row,
    count,
    sequence,
    kv_head,
    first_row,
    num_rows,
    key,
):
    """Let the `count` strips that `sight` lists attend to a tile of keys: their sums of P V,
    exponents and sums of p in `rows` take in the tile.

    Args:
        problem: the call's `Problem`.
        rows, scores: the scratch of the task's query rows, and of scores.
        k_panels, v_panels: the packed tile of keys and values.
        ld, ldv, acc_row: the padded channels of keys and of values, and the elements of a row of
            sums.
        sequence, kv_head: the numbers of the sequence and of the key head.
        first_row, num_rows: the first flat row of the task, and their number.
        key: the first key of the tile.
    """
    rule, like = problem.rule, problem.arrays.like
    drops, strips = problem.dropout.threshold > 0, sight.strips
    factor = like.dtype.type(LOG2_E * (rule.scale if rule.is_scaled_only else 1.0))
    limit, area = simd.splat(like, SLACK), len(rows.m)
    block = 0
    _score(rows, scores, k_panels, ld, strips[0], strips[1], 0)
    for turn in range(count):
        strip, begin, end = strips[3 * turn], strips[3 * turn + 1], strips[3 * turn + 2]
        at, buffer = strip * SIDE, turn & 1
        adding, added = ldv // SIDE if turn > 0 else 0, 0
        is_whole = sight.is_whole[strip // STRIPS] != 0
        if drops:
            _draw_rows(
                problem,
                scores.keep,
                sequence,
                kv_head,
                first_row + at,
                min(SIDE, num_rows - at),
                key,
            )
        for column in range(begin, end, SIDE):
            si, pi = (block & 1) * _BLOCK, buffer * _AREA + column
            words, parity = strip * SIDE * WORDS + column // WORD, rows.parity[strip]
            if not rule.is_scaled_only:
                _finish_logits(
                    problem,
                    scores,
                    si,
                    sequence,
                    kv_head,
                    first_row + at,
                    min(SIDE, num_rows - at),
                    key + column,
                )
            if lower_rows(like, rows.m, at, SIDE, scores.shifts):
                _raise(
                    like,
                    scores,
                    sight,
                    rows,
                    factor,
                    words,
                    at,
                    si,
                    pi,
                    column - begin,
                    parity,
                    area,
                    acc_row,
                    ldv,
                )
            largest = simd.splat(like, -math.inf)
            last = adding * (column + SIDE - begin) // (end - begin)
            for top in range(0, SIDE, _CHUNK):
                largest = simd.maximum(
                    largest,
                    _exponentiate(
                        like,
                        scores,
                        sight,
                        rows,
                        factor,
                        is_whole,
                        words,
                        at,
                        si,
                        pi,
                        top,
                        _CHUNK,
                        parity,
                        area,
                        drops,
                    ),
                )
                # Between the rows of this block: P V of the strip before, S of the next block.
                if top == 0:
                    if column + SIDE < end:
                        _score(rows, scores, k_panels, ld, strip, column + SIDE, 1 - (block & 1))
                    elif turn + 1 < count:
                        _score(
                            rows,
                            scores,
                            k_panels,
                            ld,
                            strips[3 * turn + 3],
                            strips[3 * turn + 4],
                            1 - (block & 1),
                        )
                elif added < last:
                    _add_values(
                        rows,
                        scores,
                        v_panels,
                        acc_row,
                        strips[3 * turn - 3],
                        strips[3 * turn - 2],
                        strips[3 * turn - 1],
                        1 - buffer,
                        added * SIDE,
                    )
                    added += 1
            while added < last:
                _add_values(
                    rows,
                    scores,
                    v_panels,
                    acc_row,
                    strips[3 * turn - 3],
                    strips[3 * turn - 2],
                    strips[3 * turn - 1],
                    1 - buffer,
                    added * SIDE,
                )
                added += 1
            if not simd.holds_everywhere(simd.at_least(limit, largest)):
                _raise(
                    like,
                    scores,
                    sight,
                    rows,
                    factor,
                    words,
                    at,
                    si,
                    pi,
                    column - begin,
                    parity,
                    area,
                    acc_row,
                    ldv,
                )
                _exponentiate(
                    like,
                    scores,
                    sight,
                    rows,
                    factor,
                    is_whole,
                    words,
                    at,
                    si,
                    pi,
                    0,
                    SIDE,
                    parity,
                    area,
                    drops,
                )
            rows.parity[strip] = 1 - parity
            block += 1
    for column in range(0, ldv, SIDE):
        _add_values(
            rows,
            scores,
            v_panels,
            acc_row,
            strips[3 * count - 3],
            strips[3 * count - 2],
            strips[3 * count - 1],
            count - 1 & 1,
            column,
        )
