"""One tile of latents against the rows of a task: it is loaded once, as keys and as values.

What      S^T = Z Q^T, softmax down its columns, O += P Z[:, :R], for rows of all heads and of a few
          new tokens. Transposed scores need no transposed keys, and their softmax no sum across
          the lanes of a register: a lane is a row.
Grid      none: called by one thread of `mla_decode.py` on that thread's scratch.
One call  up to KEYS keys and ROWS rows.
Traffic   rows of the cache are copied to scratch once, while those of the next tile are fetched;
          scratch (keys 147 KB, values paired 147 KB, sums 262 KB for 128 rows) lies in the L2.
Numerics  logits in base 2; m, l and sums float32 (float64 for float64); P is rounded to the type of
          the product's operands. A key out of sight counts for nothing, whatever it holds.
"""

# ruff: noqa: E741 - m, l, acc, s and p are the names of the papers

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu import amx, simd
from tilewise.kernels.cpu.gemm import MR, multiply, multiply_add, panel_columns, words_to_elements
from tilewise.kernels.cpu.pack import transpose_block
from tilewise.kernels.cpu.threads import inner, scratch, zero_scratch

KEYS = 128  # of a tile
ROWS = 128  # of a task: all heads of DeepSeek-V3, and as many as its sums fit half an L2 cache
PAD = 16  # rows are padded to a tile of the matrix unit


class Tile(NamedTuple):
    """Scratch of one task.

    Attributes:
        keys: (KEYS, ld) rows of the cache, zero past their width.
        values: the same in paired panels.
        q: panels of the queries, transposed.
        s: (KEYS, padded rows) scores.
        p: probabilities in words of a pair of keys (of a key for floats): (words, padded rows).
        p_rows: the same as rows of KEYS, for the matrix unit.
        m, l, rescale: of each row; seen: how many keys of the tile it sees, as a float.
    """

    keys: np.ndarray
    values: np.ndarray
    q: np.ndarray
    s: np.ndarray
    p: np.ndarray
    p_rows: np.ndarray
    m: np.ndarray
    l: np.ndarray
    rescale: np.ndarray
    seen: np.ndarray


@inner
def new_tile(like, packed, ld, rows):
    """Scratch for tasks of up to `rows` rows, a multiple of PAD."""
    whole = (rows + 31) // 32 * 32
    return Tile(
        zero_scratch(KEYS * ld, packed), scratch(KEYS * ld, packed), zero_scratch(whole * ld, packed),
        scratch(KEYS * rows, like), scratch(KEYS * rows, packed), scratch(KEYS * rows, packed),
        scratch(rows, like), scratch(rows, like), scratch(rows, like), scratch(rows, like),
    )  # fmt: skip


@inner
def score_tile(tile, uses_amx, ld, rows, padded):
    """s = keys q^T for `padded` keys (a multiple of 32) and `rows` rows (of PAD)."""
    width = panel_columns(tile.s)
    elements = words_to_elements(tile.keys)
    words = ld // elements
    if uses_amx:
        for key in range(0, padded, 32):
            for row in range(0, rows, 32):
                if row + 16 < rows:
                    amx.set_22(tile.s, key * rows + row, rows, tile.keys, key * ld, ld, 32,
                               tile.q, row * ld, 64, 16 * 64, ld // 32)  # fmt: skip
                else:
                    amx.set_21(tile.s, key * rows + row, rows, tile.keys, key * ld, ld, 32,
                               tile.q, row * ld, 64, 16 * 64, ld // 32)  # fmt: skip
        return
    for row in range(0, rows, width):
        for key in range(0, padded, MR):
            multiply(
                tile.s, key * rows + row, rows, min(width, rows - row),
                tile.keys, key * ld, ld, elements,
                tile.q, row * ld, words, tile.s,
            )  # fmt: skip


@inner
def softmax_tile(like, tile, scale_log2, rows, padded, is_whole):
    """p = 2^(scale s - m), and new m and l of each row; without is_whole only what `seen` counts."""
    lanes = simd.REGISTER_BYTES // like.itemsize
    scale, lowest = simd.splat(like, scale_log2), simd.splat(like, -math.inf)
    zero, least = simd.splat(like, 0.0), simd.splat(like, -3e38)
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
        shift = simd.select(simd.at_least(new, least), new, zero)
        minus = simd.sub(zero, shift)
        even, odd = zero, zero
        for key in range(0, padded, 2):
            x = simd.exp2(simd.fma(simd.load(tile.s, key * rows + row), scale, minus))
            y = simd.exp2(simd.fma(simd.load(tile.s, (key + 1) * rows + row), scale, minus))
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
def _rescale_rows(like, acc, ai, ldv, rows, rescale):
    """Multiply the rows whose maximum has grown, few once a sequence is under way."""
    lanes = simd.REGISTER_BYTES // like.itemsize
    for row in range(rows):
        if rescale[row] != 1.0:
            factor = simd.splat(like, rescale[row])
            for column in range(ai + row * ldv, ai + (row + 1) * ldv, lanes):
                simd.store(acc, column, simd.mul(simd.load(acc, column), factor))


@inner
def weigh_tile(like, tile, uses_amx, acc, ai, ld, ldv, rows, padded):
    """acc = acc * rescale + p values, for the first ldv columns of the values."""
    width = panel_columns(acc)
    elements = words_to_elements(tile.p)
    if uses_amx:
        _rescale_rows(like, acc, ai, ldv, rows, tile.rescale)
        for key in range(0, padded, 32):
            for row in range(0, rows, 16):
                transpose_block(tile.p, key * rows + 2 * row, 2 * rows, tile.p_rows,
                                row * KEYS + key, KEYS)  # fmt: skip
        for column in range(0, ldv, 32):
            for row in range(0, rows, 32):
                at = ai + row * ldv + column
                if row + 16 < rows:
                    amx.add_22(acc, at, ldv, tile.p_rows, row * KEYS, KEYS, 32,
                               tile.values, column * KEYS, 64, 16 * 64, padded // 32)  # fmt: skip
                else:
                    amx.add_12(acc, at, ldv, tile.p_rows, row * KEYS, KEYS, 32,
                               tile.values, column * KEYS, 64, 16 * 64, padded // 32)  # fmt: skip
        return
    for column in range(0, ldv, width):
        for row in range(0, rows, MR):
            multiply_add(
                acc, ai + row * ldv + column, ldv, ldv - column,
                tile.p, row * elements, elements, rows * elements,
                tile.values, column * KEYS, padded // elements, tile.rescale, row,
            )  # fmt: skip


@inner
def weigh_exactly(tile, acc, ai, ld, ldv, rows, count):
    """The same over visible keys alone, for tiles with inf or NaN that some row does not see."""
    elements = words_to_elements(tile.p)
    for row in range(rows):
        at = ai + row * ldv
        for column in range(ldv):
            acc[at + column] *= tile.rescale[row]
        for key in range(min(count, int(tile.seen[row]))):
            word = (key // elements * rows + row) * elements + key % elements
            x = simd.load_one(tile.p, word)
            for column in range(ldv):
                acc[at + column] += x * simd.load_one(tile.keys, key * ld + column)
