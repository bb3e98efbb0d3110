"""Rows that gates multiply: the norm behind a recurrence, and products of elements.

What      `gate_rows` computes, of the rows of a recurrence, x = round(o + d u) if there is a skip,
          and then the norm with a gate of `nn.gated_norm`, or round(x f(gate)) without a norm;
          `multiply_elements` computes round(x * factor), or round(x * round(f(y))).
Grid      tasks of some rows, from a counter.
One task  some rows; of a norm one row at a time in scratch.
Traffic   rows are in cache.
Numerics  float32, rounded to the model's dtype where a module would have returned a tensor.
"""

from __future__ import annotations

import math

from numba import types

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.frame import array_at
from tilewise.kernels.cpu.machine.threads import inner, keep_alive, kernel, next_task, zero_scratch
from tilewise.kernels.cpu.step.codes import (
    CORRECTION,
    DIM,
    EPS,
    EXTRA,
    EXTRA_ROW,
    FACTOR,
    FUNCTION,
    GATE_ROWS,
    GATE_STRIDE,
    INPUTS,
    KIND,
    NORM_STEP,
    PARTS,
    ROUNDS,
    SOURCE,
    SOURCE_ROW,
    TARGET,
    TARGET_ROW,
    WEIGHT,
)
from tilewise.kernels.cpu.step.functions import applied
from tilewise.kernels.cpu.step.layers import copy_words
from tilewise.kernels.cpu.step.words import get, put, rounded

GATE_FIRST, NORMALISES = 8, 16  # bits of KIND beside ROUNDS
ROWS_PER_TASK = 2


@inner
def _put_some(word_like, like, address, column, count, x, spare):
    """Store a register at `column` of a row, narrowed to words, but only the part within the row's
    `count` elements.

    Args:
        address: the address of the row.
        x: the register, float32.
        spare: scratch for a register of words.
    """
    size = word_like.itemsize
    if column + simd.REGISTER_BYTES // 4 <= count:
        put(word_like, address + column * size, x)
    else:
        put(word_like, spare, x)
        copy_words(word_like, address + column * size, spare, count - column)


@inner
def _add_skip(word_like, like, op, row, at, width):
    """Replace the row x in scratch, at address `at`, by round(x + d u) in place; u is the row `row`
    of op[EXTRA], and each head of DIM channels has its own d."""
    lanes, dim, size = simd.REGISTER_BYTES // 4, op[DIM], word_like.itemsize
    skipped = op[EXTRA] + row * op[EXTRA_ROW]
    for head in range(width // dim):
        factor = array_at(op[CORRECTION] + 4 * head, types.int64(1), like)[0]
        factors = simd.splat(like, factor)
        for column in range(0, dim, lanes):
            place = head * dim + column
            old = get(like, at + 4 * place)
            u = simd.mul(factors, get(word_like, skipped + place * size))
            new = rounded(word_like, simd.add(old, u))
            if column + lanes > dim:  # the rest is the next head's
                mask = simd.within(like, types.int64(column), types.int64(0), types.int64(dim))
                new = simd.select(mask, new, old)
            put(like, at + 4 * place, new)


@kernel
def gate_rows(like, word_like, op, numbers, batch, work, counter, num_threads):
    """Write the rows of a recurrence to the target of `op` after its skip, its norm and its gate,
    where it has these: an operation of a step, whose tasks of rows this thread takes until none is
    left.

    The columns of `op`: PARTS and INPUTS, the number of parts of a row that are normalised by
    themselves, and their channels; WEIGHT and NORM_STEP, the address of the weights and the bytes
    from a part's to the next's; GATE_ROWS, the address of the gates; FUNCTION, the number of a
    gate's function; KIND, the bits GATE_FIRST, NORMALISES and ROUNDS; EXTRA, the address of u, 0
    for none; CORRECTION, the address of d, float32, and DIM, the channels for each number of it.
    """
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    num_rows, dim, parts, kind = len(batch.ids), op[INPUTS], op[PARTS], op[KIND]
    width = dim * parts
    wide = zero_scratch(width + 2 * lanes, like)
    part_row, other = zero_scratch(dim + lanes, like), zero_scratch(2 * lanes, like)
    at, own = types.int64(wide.ctypes.data), types.int64(part_row.ctypes.data)
    spare, zero = types.int64(other.ctypes.data), simd.splat(like, 0.0)
    while True:
        first = next_task(counter) * ROWS_PER_TASK
        if first >= num_rows:
            break
        for row in range(first, min(first + ROWS_PER_TASK, num_rows)):
            source = op[SOURCE] + row * op[SOURCE_ROW]
            target = op[TARGET] + row * op[TARGET_ROW]
            gates = op[GATE_ROWS] + row * op[GATE_STRIDE]
            for column in range(0, width, lanes):
                put(like, at + 4 * column, get(word_like, source + column * size))
            if op[EXTRA] != 0:
                _add_skip(word_like, like, op, row, at, width)
            for part in range(parts):
                start = part * dim
                squares = zero
                for column in range(0, dim, lanes):
                    x = get(like, at + 4 * (start + column))
                    if kind & GATE_FIRST:
                        gate = get(word_like, gates + (start + column) * size)
                        x = simd.mul(x, applied(like, op[FUNCTION], gate))
                    if column + lanes > dim:
                        mask = simd.within(
                            like, types.int64(column), types.int64(0), types.int64(dim)
                        )
                        x = simd.select(mask, x, zero)
                    put(like, own + 4 * column, x)
                    squares = simd.fma(x, x, squares)
                mean = types.float64(simd.sum_lanes(squares)) / dim
                inverse = types.float32(1.0 / math.sqrt(mean + numbers[EPS]))
                inverses = simd.splat(like, inverse)
                weight = op[WEIGHT] + part * op[NORM_STEP]
                for column in range(0, dim, lanes):
                    x = get(like, own + 4 * column)
                    if kind & NORMALISES:
                        x = simd.mul(x, inverses)
                        if kind & ROUNDS:
                            x = rounded(word_like, x)
                        x = simd.mul(x, get(word_like, weight + column * size))
                        if kind & ROUNDS:
                            x = rounded(word_like, x)
                    if not kind & GATE_FIRST:
                        gate = get(word_like, gates + (start + column) * size)
                        x = simd.mul(x, applied(like, op[FUNCTION], gate))
                    _put_some(word_like, like, target + start * size, column, dim, x, spare)
    keep_alive((wide, part_row, other))


@kernel
def multiply_elements(like, word_like, op, numbers, batch, work, counter, num_threads):
    """Write target = round(source * factor), or round(source * round(f(other))): an operation of a
    step, whose tasks of rows this thread takes until none is left.

    The columns of `op`: INPUTS, the elements of a row; EXTRA, the address of the other rows, 0 for
    none, which takes the number FACTOR; EXTRA_ROW, the bytes to those of the next row; FUNCTION, f.
    """
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    num_rows, count = len(batch.ids), op[INPUTS]
    other = zero_scratch(2 * lanes, like)
    spare, factors = types.int64(other.ctypes.data), simd.splat(like, numbers[FACTOR])
    while True:
        first = next_task(counter) * ROWS_PER_TASK
        if first >= num_rows:
            break
        for row in range(first, min(first + ROWS_PER_TASK, num_rows)):
            source = op[SOURCE] + row * op[SOURCE_ROW]
            target = op[TARGET] + row * op[TARGET_ROW]
            for column in range(0, count, lanes):
                x = get(word_like, source + column * size)
                by = factors
                if op[EXTRA] != 0:
                    by = get(word_like, op[EXTRA] + row * op[EXTRA_ROW] + column * size)
                    by = rounded(word_like, applied(like, op[FUNCTION], by))
                _put_some(word_like, like, target, column, count, simd.mul(x, by), spare)
    keep_alive(other)
