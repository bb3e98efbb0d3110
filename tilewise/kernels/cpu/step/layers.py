"""The operations of a step except attention: embedding, norms, products and their epilogues.

What      rows of the buffers of `program.py`, in the model's dtype, all padded to 32 elements.
Grid      tasks of some rows, or of some panels of weights and some rows; see `run.py`.
One task  reads rows of one buffer and writes rows of another, or columns of them.
Traffic   activations stay in the caches; weights are read once, see `product.py`.
Numerics  float32 within an operation, rounded to the model's dtype where a module of `nn` would
          have returned a tensor, so that both compute the same function.
"""

from __future__ import annotations

import math

from numba import types

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.threads import inner
from tilewise.kernels.cpu.step.codes import ADD, GATE, LOGITS, PANELS_OF_INT8, ROWS, STORE
from tilewise.kernels.cpu.step.dequantise import (
    add_scaled,
    embed_output,
    part_of,
    widen_steps,
)
from tilewise.kernels.cpu.step.int8 import SCALE_BYTES, STEP_BYTES, STEPS
from tilewise.kernels.cpu.step.panels import COLUMNS, GROUP, STEP, WIDTH
from tilewise.kernels.cpu.step.product import has_pairs, has_words, multiply_rows
from tilewise.kernels.cpu.step.words import (
    clear_half_word,
    copy_half_word,
    copy_word,
    get,
    put,
    rounded,
)

BLOCK_ROWS = 32  # rows of a block of sums
LOG2_E = 1.4426950408889634


@inner
def bytes_of_group(word_like, inputs, is_int8):
    """Return the bytes from a group of a weight to the next."""
    steps = (inputs + STEP - 1) // STEP
    if is_int8:
        return steps * STEP_BYTES + (steps + STEPS - 1) // STEPS * SCALE_BYTES
    return steps * STEP * WIDTH * word_like.itemsize


@inner
def embed_row(word_like, like, token, table, inputs, form, target, wide):
    """Copy the row of a token from a (V, K) table, or from its panels; see `codes.py`.

    Args:
        form: the layout of the table: ROWS, PANELS or PANELS_OF_INT8.
        wide: the address of scratch for 32 float32.
    """
    size = word_like.itemsize
    if form == ROWS:
        start = table + token * inputs * size
        for column in range(inputs):
            if size == 2:
                copy_half_word(target + 2 * column, start + 2 * column)
            else:
                copy_word(target + 4 * column, start + 4 * column)
        # The padding of a row may contain NaN from the row before it.
        for byte in range(inputs * size, (inputs + STEP - 1) // STEP * STEP * size, 2):
            clear_half_word(target + byte)
        return
    steps = (inputs + STEP - 1) // STEP
    if form == PANELS_OF_INT8:
        group = table + token // WIDTH * bytes_of_group(word_like, inputs, True)
        embed_output(word_like, like, group, token % WIDTH, steps * STEP, target, wide)
        return
    panel = STEP * COLUMNS * size
    start = table + token // WIDTH * WIDTH * steps * STEP * size + token // COLUMNS % GROUP * panel
    word_size = 4 if has_pairs(word_like) else size
    start += token % COLUMNS * word_size
    for step in range(steps):
        for word in range(STEP * size // word_size):
            source = start + step * GROUP * panel + word * COLUMNS * word_size
            to = target + step * STEP * size + word * word_size
            if word_size == 4:
                copy_word(to, source)
            else:
                copy_half_word(to, source)


@inner
def normalise_row(word_like, like, source, target, weight, dim, eps):
    """target = round(source / sqrt(mean(source^2) + eps)) * weight; the padding becomes zero."""
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    squares = simd.splat(like, 0.0)
    columns = (dim + lanes - 1) // lanes * lanes
    for column in range(0, columns, lanes):
        x = get(word_like, source + column * size)
        squares = simd.fma(x, x, squares)
    factor = types.float32(1.0 / math.sqrt(types.float64(simd.sum_lanes(squares)) / dim + eps))
    factors = simd.splat(like, factor)
    for column in range(0, columns, lanes):
        x = rounded(word_like, simd.mul(get(word_like, source + column * size), factors))
        put(word_like, target + column * size, simd.mul(x, get(word_like, weight + column * size)))


@inner
def _store_sums(word_like, like, c, rows, bias, target, target_row):
    """target = round(sums + bias)."""
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    for row in range(rows):
        start = target + row * target_row
        for column in range(0, WIDTH, lanes):
            x = get(like, c + 4 * (row * WIDTH + column))
            if bias != 0:
                x = simd.add(x, get(like, bias + 4 * column))
            put(word_like, start + column * size, x)


@inner
def _add_sums(word_like, like, c, rows, bias, target, target_row):
    """target = round(target + round(sums + bias))."""
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    for row in range(rows):
        start = target + row * target_row
        for column in range(0, WIDTH, lanes):
            x = get(like, c + 4 * (row * WIDTH + column))
            if bias != 0:
                x = simd.add(x, get(like, bias + 4 * column))
            at = start + column * size
            put(word_like, at, simd.add(get(word_like, at), rounded(word_like, x)))


@inner
def _gate_sums(word_like, like, c, rows, bias, target, target_row):
    """target = round(round(silu(gate)) * up); sums are 16 of gate, 16 of up, and so on."""
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    one, log2_e = simd.splat(like, 1.0), simd.splat(like, -LOG2_E)
    for row in range(rows):
        start = target + row * target_row
        for pair in range(0, WIDTH, 2 * COLUMNS):
            for column in range(0, COLUMNS, lanes):
                at = c + 4 * (row * WIDTH + pair + column)
                gate, up = get(like, at), get(like, at + 4 * COLUMNS)
                if bias != 0:
                    where = bias + 4 * (pair + column)
                    gate = simd.add(gate, get(like, where))
                    up = simd.add(up, get(like, where + 4 * COLUMNS))
                gate, up = rounded(word_like, gate), rounded(word_like, up)
                # exp2 accepts arguments of at most 126; beyond, silu is below 2^-119 of them.
                exponent = simd.minimum(simd.mul(gate, log2_e), simd.splat(like, 126.0))
                silu = simd.div(gate, simd.add(one, simd.exp2(exponent)))
                x = simd.mul(rounded(word_like, silu), up)
                put(word_like, start + (pair // 2 + column) * size, x)


@inner
def _store_logits(word_like, like, c, rows, bias, target, target_row):
    """target = round(sums + bias), as float32."""
    lanes = simd.REGISTER_BYTES // 4
    for row in range(rows):
        for column in range(0, WIDTH, lanes):
            x = get(like, c + 4 * (row * WIDTH + column))
            if bias != 0:
                x = simd.add(x, get(like, bias + 4 * column))
            put(like, target + row * target_row + 4 * column, rounded(word_like, x))


@inner
def widen_rows(word_like, like, source, source_row, rows, inputs, target, target_row):
    """Convert rows of words to float32, for products that cannot read words."""
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    for row in range(rows):
        for column in range(0, inputs, lanes):
            x = get(word_like, source + row * source_row + column * size)
            put(like, target + row * target_row + 4 * column, x)


@inner
def multiply_int8(word_like, like, c, rows, a, lda, group, inputs, words, are_widened):
    """Compute sums of up to 32 rows and a group of int8.

    Args:
        c: the address of the sums; after 32 rows of them is scratch for as many.
        group: the address of the group.
        words: the address of scratch for the words of one scale; if `are_widened`, of the words of
            the whole group, which it already contains.
    """
    steps, part = inputs // STEP, c + 4 * BLOCK_ROWS * WIDTH
    size = word_like.itemsize if has_words(word_like) else 4
    for first in range(0, steps, STEPS):
        end = min(first + STEPS, steps)
        w = words
        if are_widened:
            w += first * STEP * WIDTH * word_like.itemsize
        else:
            widen_steps(word_like, group, first, end, words)
        multiply_rows(word_like, part, rows, a + first * STEP * size, lda, w, (end - first) * STEP)
        add_scaled(like, c, rows, part, part_of(group, first), first == 0)


@inner
def multiply_task(word_like, like, source, source_row, rows, weight, is_int8, inputs, first, end,
                  bias, epilogue, target, target_row, c, wide, words, must_widen):  # fmt: skip
    """Compute groups first ... end - 1 of a product for some rows, with the epilogue.

    Args:
        source, source_row: the address of the rows, in full blocks of 32, and the bytes of a row.
        c: the address of scratch for 32 x 64 sums, twice.
        words: the address of scratch for words, used if `is_int8`: the words of one scale, or with
            more than 32 rows of a whole group.
        wide: the address of scratch for the rows in float32, used unless `has_words`.
        must_widen: True if that scratch does not contain these rows yet.
    """
    size = word_like.itemsize
    a, lda = source, source_row
    if not has_words(word_like):
        a, lda = wide, 4 * (inputs + STEP)
        if must_widen:
            widen_rows(word_like, like, source, source_row, rows, inputs, a, lda)
    for group in range(first, end):
        start = weight + group * bytes_of_group(word_like, inputs, is_int8)
        are_widened = is_int8 and rows > BLOCK_ROWS
        if are_widened:
            widen_steps(word_like, start, types.int64(0), inputs // STEP, words)
        out = group * WIDTH * size
        if epilogue == GATE:
            out //= 2
        elif epilogue == LOGITS:
            out = group * WIDTH * 4
        where = 0 if bias == 0 else bias + 4 * group * WIDTH
        for row in range(0, rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, rows - row)
            at = a + row * lda
            if is_int8:
                multiply_int8(word_like, like, c, count, at, lda, start, inputs, words, are_widened)
            else:
                multiply_rows(word_like, c, count, at, lda, start, inputs)
            to = target + row * target_row + out
            if epilogue == STORE:
                _store_sums(word_like, like, c, count, where, to, target_row)
            elif epilogue == ADD:
                _add_sums(word_like, like, c, count, where, to, target_row)
            elif epilogue == GATE:
                _gate_sums(word_like, like, c, count, where, to, target_row)
            else:
                _store_logits(word_like, like, c, count, where, to, target_row)
