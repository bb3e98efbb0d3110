"""One tile of latents and the rows of a task: it is loaded once, as keys and as values.

What      S^T = Z Q^T, softmax down its columns, O += P Z[:, :R], for rows of all heads and of a few
          new tokens. Transposed scores need no transposed keys, and their softmax no sum across
          the lanes of a register: a lane is a row.
Grid      none: called by one thread of `launch.py` on that thread's scratch.
One call  up to KEYS keys and ROWS rows.
Traffic   rows of the cache are copied to scratch once, while those of the next tile are prefetched;
          scratch (keys 147 KB, values paired 147 KB, sums 262 KB for 128 rows) lies in the L2.
Numerics  logits in base 2; m, l and sums float32 (float64 for float64); P is rounded to the type of
          the product's operands, and so is a row of an 8-bit cache times its two scales. If the
          logits of a row are above FAR, scale s - m would keep few bits: then scale s is rounded
          before m is subtracted, so that the largest has p = 1. A hidden key has no effect,
          whatever it contains.
"""

# ruff: noqa: E741 - m, l, acc, s and p are the names of the papers

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu.machine import amx, simd
from tilewise.kernels.cpu.machine.gemm import (
    MR,
    multiply,
    multiply_add,
    multiply_add_rows,
    panel_columns,
    words_to_elements,
)
from tilewise.kernels.cpu.machine.pack import pair_tile, transpose_block
from tilewise.kernels.cpu.machine.source import (
    address_of,
    gather_rows,
    prefetch_rows,
    scale_address_of,
)
from tilewise.kernels.cpu.machine.threads import inner, scratch, zero_scratch
from tilewise.kernels.cpu.paged.quantise import INT8, load_values
from tilewise.kernels.device import l2_bytes

# Keys of a tile: 128 in floats and again as values are 590 KB, more than an L2 of 512 KiB. With 64,
# read in place, 16 heads took 15 % less on an EPYC with AVX2, and 128 heads 5 %.
KEYS = 128 if simd.HAS_BF16_DOT or l2_bytes() > 1 << 20 else 64
# Rows 2 KB apart share few sets of the L1 cache: it holds a column of 64, but not of 128.
COPIES_FLOATS = KEYS > 64
ROWS = 128  # of a task: all heads of DeepSeek-V3, and as many as its sums fit half an L2 cache
VALUE_ROWS = KEYS + 2  # rows of a panel: 8 KB apart, panels would share a set of the L1 cache
ACC_PAD = 16  # floats between rows of sums: rows 2 KB apart would share two sets of the L1 cache
FAR = 2.0**16  # in base 2; a float of this size has steps of 2^-7
PAD = 16  # rows are padded to a tile of the matrix unit


class Tile(NamedTuple):
    """The scratch of a thread for some rows of queries times a tile of KEYS keys; made by
    `new_tile`, and used by one task after another.

    Attributes:
        keys: (KEYS, ld) rows of the cache, zero beyond their width.
        values: the same rows in panels of paired keys; in float32 without COPIES_FLOATS `keys`
            serves as values, too.
        q: the panels of the queries, transposed.
        s: (KEYS, padded rows) scores.
        p: (words, padded rows), probabilities: a word has those of two keys, of one for float32.
        p_rows: the same probabilities as rows of KEYS, for the matrix unit.
        zeros: a row of zeros.
        m, l, rescale: the running maximum, the running sum and the factor of old sums of each row.
        seen: the number of keys of the tile that each row sees, as a float to be compared in
            vectors.
    """

    keys: np.ndarray
    values: np.ndarray
    q: np.ndarray
    s: np.ndarray
    p: np.ndarray
    p_rows: np.ndarray
    zeros: np.ndarray
    m: np.ndarray
    l: np.ndarray
    rescale: np.ndarray
    seen: np.ndarray


@inner
def new_tile(like, packed, ld, rows):
    """Return a `Tile` for tasks of up to `rows` rows, a multiple of PAD, whose keys have ld padded
    channels; zero where padding must stay zero."""
    whole = (rows + 31) // 32 * 32
    return Tile(
        zero_scratch(KEYS * ld, packed),
        scratch(VALUE_ROWS * ld, packed),
        zero_scratch(whole * ld, packed),
        scratch(KEYS * rows, like),
        scratch(KEYS * rows, packed),
        scratch(KEYS * rows, packed),
        zero_scratch(ld, packed),
        scratch(rows, like),
        scratch(rows, like),
        scratch(rows, like),
        scratch(rows, like),
    )


@inner
def gather_keys(like, tile, source, rank, ld, first, count, padded):
    """Load keys first ... first + count - 1 into tile.keys, with zeros up to `padded`, and pack
    them as values into tile.values unless the keys serve as values, too.

    Returns 0.0, or NaN if a row contains an infinity or NaN.
    """
    if source.code < INT8:
        check = gather_rows(like, source, tile.keys, ld, first, count, padded)
    else:
        check = _gather_bytes(like, tile.keys, source, rank, ld, first, count, padded)
    if COPIES_FLOATS or tile.keys.itemsize == 2:
        pair_tile(like, tile.keys, padded, ld, tile.values, VALUE_ROWS)
    return check


@inner
def _gather_bytes(like, keys, source, rank, ld, first, count, padded):
    """Load 8-bit rows of the cache into scratch as numbers of its type, multiplied by their two
    scales.

    Args:
        keys, ld: the scratch, and the elements of a row in it.
        source: the rows of the sequence.
        rank: the channels of the latent; the others have a scale of their own.
        first, count: the first key and their number.
        padded: the number of rows to fill, with zeros after `count`.

    Returns:
        0.0, or NaN if a number is not finite.
    """
    check = like.dtype.type(0.0)
    for row in range(count):
        at, scale = address_of(source, first + row), scale_address_of(source, first + row)
        start = row * ld
        check += load_values(like, source.code, keys, start, at, rank, scale)
        check += load_values(
            like, source.code, keys, start + rank, at + rank, source.width - rank, scale + 4
        )
    keys[count * ld : padded * ld] = 0
    return check


@inner
def score_rows(tile, source, ld, ldv, rows, first, count, padded, end):
    """Set tile.s to keys q^T and tile.values to the values in pairs, on the matrix unit, straight
    from rows of bfloat16 that lie in groups of 16 in the cache.

    The next 32 rows are prefetched meanwhile, up to `end`: a tenth of the time for 64 heads and
    more, nothing for 16 (one core of a Xeon, 2026-11-20). Slots after `count` may contain anything:
    `softmax_tile` does not read their scores, and as values they are zeros.
    """
    passes, nothing = (rows + 31) // 32, tile.zeros.ctypes.data
    for key in range(0, padded, 32):
        at = address_of(source, first + key)
        later = at if key + 16 >= count else address_of(source, first + key + 16)
        ahead, further, fetches = at, at, 0
        if first + key + 64 <= end:
            ahead = address_of(source, first + key + 32)
            further = address_of(source, first + key + 48)
            fetches = (16 + passes - 1) // passes
        for row in range(0, rows, 32):
            skipped = min(row // 32 * fetches, 16 - fetches) * source.row
            if row + 16 < rows:
                amx.score_2(
                    tile.s,
                    key * rows + row,
                    rows,
                    at,
                    later,
                    source.row,
                    tile.q,
                    row * ld,
                    ld // 32,
                    ahead + skipped,
                    further + skipped,
                    fetches,
                )
            else:
                amx.score_1(
                    tile.s,
                    key * rows + row,
                    rows,
                    at,
                    later,
                    source.row,
                    tile.q,
                    row * ld,
                    ld // 32,
                    ahead + skipped,
                    further + skipped,
                    fetches,
                )
        for pair in range(key, key + 32, 2):
            even = odd = nothing
            if pair < count:
                even = (at if pair < key + 16 else later) + pair % 16 * source.row
            if pair + 1 < count:
                odd = even + source.row
            amx.pair_rows(even, odd, tile.values, pair * 32, VALUE_ROWS * 32, ldv // 32)


@inner
def score_tile(tile, source, uses_amx, ld, rows, padded, ahead, end):
    """Set tile.s to keys q^T for `padded` keys (a multiple of 32) in tile.keys and `rows` rows (a
    multiple of PAD), on the matrix unit if uses_amx.

    Rows of the cache from `ahead` to `end` are prefetched meanwhile.
    """
    width = panel_columns(tile.s)
    elements = words_to_elements(tile.keys)
    share = (KEYS * width + rows - 1) // rows
    for row in range(0, rows, width):
        begin = ahead + row // width * share
        prefetch_rows(source, begin, min(begin + share, end))
        if uses_amx:
            for key in range(0, padded, 32):
                at = tile.keys.ctypes.data + key * ld * 2
                if row + 16 < rows:
                    amx.score_2(
                        tile.s,
                        key * rows + row,
                        rows,
                        at,
                        at + 32 * ld,
                        2 * ld,
                        tile.q,
                        row * ld,
                        ld // 32,
                        at,
                        at,
                        0,
                    )
                else:
                    amx.score_1(
                        tile.s,
                        key * rows + row,
                        rows,
                        at,
                        at + 32 * ld,
                        2 * ld,
                        tile.q,
                        row * ld,
                        ld // 32,
                        at,
                        at,
                        0,
                    )
        else:
            for key in range(0, padded, MR):
                multiply(
                    tile.s,
                    key * rows + row,
                    rows,
                    min(width, rows - row),
                    tile.keys,
                    key * ld,
                    ld,
                    elements,
                    tile.q,
                    row * ld,
                    ld // elements,
                    tile.s,
                )


@inner
def softmax_tile(like, tile, scale_log2, rows, padded, is_whole):
    """Turn the products tile.s into probabilities tile.p = 2^(scale s - m), and update m, l and
    rescale of each row in `tile`. Unless is_whole only the first tile.seen keys of each row
    count."""
    lanes = simd.REGISTER_BYTES // like.itemsize
    scale, lowest = simd.splat(like, scale_log2), simd.splat(like, -math.inf)
    zero, one, far = simd.splat(like, 0.0), simd.splat(like, 1.0), simd.splat(like, FAR)
    is_paired = tile.p.itemsize == 2
    for row in range(0, rows, lanes):
        old, seen = simd.load(tile.m, row), simd.load(tile.seen, row)
        even, odd = lowest, lowest  # two chains, since each maximum waits for the one before
        for key in range(0, padded, 2):
            x = simd.mul(simd.load(tile.s, key * rows + row), scale)
            y = simd.mul(simd.load(tile.s, (key + 1) * rows + row), scale)
            if not is_whole:
                x = simd.select(simd.at_least(seen, simd.splat(like, key + 1.0)), x, lowest)
                y = simd.select(simd.at_least(seen, simd.splat(like, key + 2.0)), y, lowest)
            even, odd = simd.maximum(x, even), simd.maximum(y, odd)
        new = simd.maximum(simd.maximum(even, odd), old)
        shift = simd.select(simd.at_least(lowest, new), zero, new)
        minus, factors = simd.sub(zero, shift), scale
        is_near = simd.at_least(far, simd.absolute(shift))
        if not simd.holds_everywhere(is_near):
            for at in range(row, padded * rows, rows):
                x = simd.load(tile.s, at)
                centred = simd.sub(simd.mul(x, scale), shift)
                simd.store(tile.s, at, simd.select(is_near, x, centred))
            minus, factors = simd.select(is_near, minus, zero), simd.select(is_near, scale, one)
        even, odd = zero, zero
        for key in range(0, padded, 2):
            x = simd.exp2(simd.fma(simd.load(tile.s, key * rows + row), factors, minus))
            y = simd.exp2(simd.fma(simd.load(tile.s, (key + 1) * rows + row), factors, minus))
            if not is_whole:
                x = simd.select(simd.at_least(seen, simd.splat(like, key + 1.0)), x, zero)
                y = simd.select(simd.at_least(seen, simd.splat(like, key + 2.0)), y, zero)
            even, odd = simd.add(even, x), simd.add(odd, y)
            if is_paired:
                simd.store_pair(tile.p, key * rows + 2 * row, x, y)
            else:
                simd.store(tile.p, key * rows + row, x)
                simd.store(tile.p, (key + 1) * rows + row, y)
        factor = simd.exp2(simd.sub(old, shift))
        simd.store(tile.m, row, new)
        total = simd.add(even, odd)
        simd.store(tile.l, row, simd.fma(simd.load(tile.l, row), factor, total))
        simd.store(tile.rescale, row, factor)


@inner
def _rescale_rows(like, acc, ai, lda, rows, rescale):
    """Multiply each row of acc by its factor in `rescale` in place, where that is not 1, as its
    maximum has grown; after the first tiles these rows are few."""
    lanes = simd.REGISTER_BYTES // like.itemsize
    for row in range(rows):
        if rescale[row] != 1.0:
            factor = simd.splat(like, rescale[row])
            for column in range(ai + row * lda, ai + (row + 1) * lda, lanes):
                simd.store(acc, column, simd.mul(simd.load(acc, column), factor))


@inner
def weigh_tile(like, tile, uses_amx, acc, ai, ld, ldv, rows, padded):
    """Compute acc = acc * rescale + p values for `rows` rows from index ai on, over `padded` keys
    and the first ldv columns of the values, on the matrix unit if uses_amx."""
    width = panel_columns(acc)
    elements = words_to_elements(tile.p)
    lda = ldv + ACC_PAD
    if uses_amx:
        _rescale_rows(like, acc, ai, lda, rows, tile.rescale)
        for key in range(0, padded, 32):
            for row in range(0, rows, 16):
                transpose_block(
                    tile.p, key * rows + 2 * row, 2 * rows, tile.p_rows, row * KEYS + key, KEYS
                )
        for column in range(0, ldv, 32):
            for row in range(0, rows, 32):
                at = ai + row * lda + column
                if row + 16 < rows:
                    amx.add_2(
                        acc,
                        at,
                        lda,
                        tile.p_rows,
                        row * KEYS,
                        KEYS,
                        tile.values,
                        column * VALUE_ROWS,
                        padded // 32,
                    )
                else:
                    amx.add_1(
                        acc,
                        at,
                        lda,
                        tile.p_rows,
                        row * KEYS,
                        KEYS,
                        tile.values,
                        column * VALUE_ROWS,
                        padded // 32,
                    )
        return
    for column in range(0, ldv, width):
        for row in range(0, rows, MR):
            if elements == 1 and not COPIES_FLOATS:  # the keys are the values
                multiply_add_rows(
                    acc,
                    ai + row * lda + column,
                    lda,
                    ldv - column,
                    tile.p,
                    row,
                    1,
                    rows,
                    tile.keys,
                    column,
                    ld,
                    padded,
                    tile.rescale,
                    row,
                )
            else:
                multiply_add(
                    acc,
                    ai + row * lda + column,
                    lda,
                    ldv - column,
                    tile.p,
                    row * elements,
                    elements,
                    rows * elements,
                    tile.values,
                    column * VALUE_ROWS,
                    padded // elements,
                    tile.rescale,
                    row,
                )


@inner
def weigh_exactly(tile, acc, ai, ld, ldv, rows, count):
    """Compute acc = acc * rescale + p values over each row's visible keys only.

    A tile with an infinity or NaN that some row does not see needs this.
    """
    elements = words_to_elements(tile.p)
    for row in range(rows):
        at = ai + row * (ldv + ACC_PAD)
        for column in range(ldv):
            acc[at + column] *= tile.rescale[row]
        for key in range(min(count, int(tile.seen[row]))):
            word = (key // elements * rows + row) * elements + key % elements
            x = simd.load_one(tile.p, word)
            for column in range(ldv):
                acc[at + column] += x * simd.load_one(tile.keys, key * ld + column)
