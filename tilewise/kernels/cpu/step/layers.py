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
from tilewise.kernels.cpu.step.codes import (
    ADD,
    CENTRES,
    GATE,
    IS_PART,
    PANELS_OF_INT8,
    ROUNDS,
    ROWS,
    STORE,
)
from tilewise.kernels.cpu.step.dequantise import (
    add_scaled,
    embed_output,
    part_of,
    widen_steps,
)
from tilewise.kernels.cpu.step.functions import CLAMPED, SIGMOID, applied
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


@inner
def bytes_of_group(word_like, inputs, is_int8):
    """Return the bytes from a group of a weight to the next."""
    steps = (inputs + STEP - 1) // STEP
    if is_int8:
        return steps * STEP_BYTES + (steps + STEPS - 1) // STEPS * SCALE_BYTES
    return steps * STEP * WIDTH * word_like.itemsize


@inner
def copy_words(word_like, target, source, count):
    """Copy `count` words of the model's dtype."""
    size = word_like.itemsize
    for column in range(count):
        if size == 2:
            copy_half_word(target + 2 * column, source + 2 * column)
        else:
            copy_word(target + 4 * column, source + 4 * column)


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
        copy_words(word_like, target, start, inputs)
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
def scale_row(word_like, like, row, inputs, factor, other, wide):
    """row = round(round(row * factor) + other), `other` the address of a row without padding or 0.

    Args:
        wide: the address of scratch for a register of words.
    """
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    factors = simd.splat(like, factor)
    for column in range(0, inputs, lanes):
        x = rounded(word_like, simd.mul(get(word_like, row + column * size), factors))
        if other != 0:
            start = other + column * size
            if column + lanes > inputs:  # what follows the row may be no memory
                put(word_like, wide, simd.splat(like, 0.0))
                copy_words(word_like, wide, start, inputs - column)
                start = wide
            x = simd.add(x, get(word_like, start))
        put(word_like, row + column * size, x)


@inner
def _get_some(word_like, like, address, column, count):
    """Return the register at `column` of a row of `count` words, zeros after its end."""
    x = get(word_like, address + column * word_like.itemsize)
    if column + simd.REGISTER_BYTES // 4 > count:
        mask = simd.within(like, types.int64(column), types.int64(0), types.int64(count))
        x = simd.select(mask, x, simd.splat(like, 0.0))
    return x


@inner
def normalise_row(
    word_like, like, source, target, weight, bias, dim, eps, shift, factor, kind, adds, spare
):
    """target = (x - mean) / sqrt(mean((x - mean)^2) + eps) (shift + weight) + bias of a row.

    Without CENTRES the mean is 0. With ROUNDS the quotient is rounded before it is multiplied.
    Without IS_PART the padding of the target, up to whole registers, becomes zero.

    Args:
        weight, bias: addresses, followed by zeros up to whole registers; bias may be 0 for none.
        kind: the bits ROUNDS, CENTRES and IS_PART.
        adds: True if the target is increased by the rounded result, rounded again times `factor`.
        spare: the address of scratch for a register of words.
    """
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    zero = simd.splat(like, 0.0)
    mean = zero
    if kind & CENTRES:
        total = zero
        for column in range(0, dim, lanes):
            total = simd.add(total, _get_some(word_like, like, source, column, dim))
        mean = simd.splat(like, types.float32(types.float64(simd.sum_lanes(total)) / dim))
    squares = zero
    for column in range(0, dim, lanes):
        x = simd.sub(_get_some(word_like, like, source, column, dim), mean)
        if column + lanes > dim:
            mask = simd.within(like, types.int64(column), types.int64(0), types.int64(dim))
            x = simd.select(mask, x, zero)
        squares = simd.fma(x, x, squares)
    inverse = types.float32(1.0 / math.sqrt(types.float64(simd.sum_lanes(squares)) / dim + eps))
    inverses, shifts = simd.splat(like, inverse), simd.splat(like, shift)
    factors = simd.splat(like, factor)
    for column in range(0, dim, lanes):
        x = simd.mul(simd.sub(_get_some(word_like, like, source, column, dim), mean), inverses)
        if kind & ROUNDS:
            x = rounded(word_like, x)
        x = simd.mul(x, simd.add(get(word_like, weight + column * size), shifts))
        if bias != 0:
            x = simd.add(x, get(word_like, bias + column * size))
        at = target + column * size
        if adds:
            x = rounded(word_like, simd.mul(rounded(word_like, x), factors))
            x = simd.add(get(word_like, at), x)
        if column + lanes <= dim:
            put(word_like, at, x)
        elif kind & IS_PART:
            put(word_like, spare, x)
            copy_words(word_like, at, spare, dim - column)
        else:
            mask = simd.within(like, types.int64(column), types.int64(0), types.int64(dim))
            put(word_like, at, simd.select(mask, x, zero))


@inner
def _with_bias(like, c, bias, row, column):
    """Return a register of sums + bias."""
    x = get(like, c + 4 * (row * WIDTH + column))
    return x if bias == 0 else simd.add(x, get(like, bias + 4 * column))


@inner
def _store_sums(word_like, like, c, rows, bias, target, target_row, function, outputs):
    """target = round(f(round(sums + bias))), of the first `outputs` columns."""
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    for row in range(rows):
        start = target + row * target_row
        for column in range(0, WIDTH, lanes):
            x = applied(like, function, rounded(word_like, _with_bias(like, c, bias, row, column)))
            if column + lanes <= outputs:
                put(word_like, start + column * size, x)
            elif column < outputs:
                spare = c + 4 * (row * WIDTH + column)  # the sums themselves are no longer needed
                put(word_like, spare, x)
                copy_words(word_like, start + column * size, spare, outputs - column)


@inner
def _add_sums(word_like, like, c, rows, bias, target, target_row, factor, extra, extra_row):
    """target = round(target + round(extra + round(round(sums + bias) * factor))).

    Args:
        extra: the address of rows, or 0 for none.
    """
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    factors = simd.splat(like, factor)
    for row in range(rows):
        start = target + row * target_row
        for column in range(0, WIDTH, lanes):
            x = rounded(word_like, _with_bias(like, c, bias, row, column))
            x = rounded(word_like, simd.mul(x, factors))
            if extra != 0:
                other = get(word_like, extra + row * extra_row + column * size)
                x = rounded(word_like, simd.add(other, x))
            at = start + column * size
            put(word_like, at, simd.add(get(word_like, at), x))


@inner
def _gate_sums(word_like, like, c, rows, bias, target, target_row, function, limit, alpha):
    """target = round(round(f(gate)) * up); sums are 16 of gate, 16 of up, and so on.

    CLAMPED is (up + 1) (gate sigmoid(alpha gate)) of a gate of at most `limit`, and of an up of at
    most that size, each operation rounded; see `ops.expert_mlp`.
    """
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    one, alphas = simd.splat(like, 1.0), simd.splat(like, alpha)
    most, least = simd.splat(like, limit), simd.splat(like, -limit)
    for row in range(rows):
        start = target + row * target_row
        for pair in range(0, WIDTH, 2 * COLUMNS):
            for column in range(0, COLUMNS, lanes):
                gate = rounded(word_like, _with_bias(like, c, bias, row, pair + column))
                up = rounded(word_like, _with_bias(like, c, bias, row, pair + COLUMNS + column))
                if function == CLAMPED:
                    gate = simd.minimum(gate, most)
                    up = simd.maximum(least, simd.minimum(up, most))
                    share = rounded(word_like, simd.mul(gate, alphas))
                    share = rounded(word_like, applied(like, SIGMOID, share))
                    gate = rounded(word_like, simd.mul(gate, share))
                    up = rounded(word_like, simd.add(up, one))
                else:
                    gate = rounded(word_like, applied(like, function, gate))
                put(word_like, start + (pair // 2 + column) * size, simd.mul(gate, up))


@inner
def _store_logits(word_like, like, c, rows, bias, target, target_row, factor, cap):
    """target = cap tanh(x / cap) of x = round(sums + bias) * factor, as float32."""
    lanes = simd.REGISTER_BYTES // 4
    factors, caps = simd.splat(like, factor), simd.splat(like, cap)
    for row in range(rows):
        for column in range(0, WIDTH, lanes):
            x = rounded(word_like, _with_bias(like, c, bias, row, column))
            x = simd.mul(x, factors)
            if cap > 0.0:
                x = simd.mul(simd.tanh(simd.div(x, caps)), caps)
            put(like, target + row * target_row + 4 * column, x)


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
def multiply_task(
    word_like,
    like,
    source,
    source_row,
    rows,
    weight,
    is_int8,
    inputs,
    first,
    end,
    bias,
    epilogue,
    function,
    factor,
    limit,
    alpha,
    cap,
    outputs,
    extra,
    extra_row,
    target,
    target_row,
    c,
    wide,
    words,
    must_widen,
):
    """Compute groups first ... end - 1 of a product for some rows, with the epilogue.

    Args:
        source, source_row: the address of the rows, in full blocks of 32, and the bytes of a row.
        function: the number of the function of STORE or GATE.
        factor, limit, alpha, cap: the numbers of the epilogue, see `codes.py`.
        outputs: the columns to be written of STORE, or 0 for all of the groups.
        extra, extra_row: the address and the bytes of rows that ADD adds as well; 0 for none.
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
        elif epilogue > GATE:  # logits
            out = group * WIDTH * 4
        where = 0 if bias == 0 else bias + 4 * group * WIDTH
        columns = WIDTH if outputs == 0 else outputs - group * WIDTH
        for row in range(0, rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, rows - row)
            at = a + row * lda
            if is_int8:
                multiply_int8(word_like, like, c, count, at, lda, start, inputs, words, are_widened)
            else:
                multiply_rows(word_like, c, count, at, lda, start, inputs)
            to = target + row * target_row + out
            if epilogue == STORE:
                _store_sums(word_like, like, c, count, where, to, target_row, function, columns)
            elif epilogue == ADD:
                other = extra
                if extra != 0:
                    other += row * extra_row + out
                _add_sums(
                    word_like, like, c, count, where, to, target_row, factor, other, extra_row
                )
            elif epilogue == GATE:
                _gate_sums(word_like, like, c, count, where, to, target_row, function, limit, alpha)
            else:
                _store_logits(word_like, like, c, count, where, to, target_row, factor, cap)
