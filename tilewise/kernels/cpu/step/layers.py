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
    NARROW_PANELS,
    ROUNDS,
    ROWS,
    STORE,
)
from tilewise.kernels.cpu.step.dequantise import field, multiply_few, widen_steps
from tilewise.kernels.cpu.step.functions import CLAMPED, SIGMOID, applied
from tilewise.kernels.cpu.step.narrow import ORDER
from tilewise.kernels.cpu.step.panels import COLUMNS, GROUP, STEP, WIDTH
from tilewise.kernels.cpu.step.product import has_dot, has_pairs, has_words, multiply_rows
from tilewise.kernels.cpu.step.words import (
    clear_half_word,
    copy_half_word,
    copy_word,
    get,
    int32_at,
    put,
    rounded,
)

BLOCK_ROWS = 32  # rows of a block of sums
SLICE_BYTES = 1 << 14  # of words that are used from an L1 cache of 32 KiB, beside the rows


@inner
def bytes_of_group(word_like, inputs):
    """Return the bytes of a group of 64 outputs with `inputs` inputs in words: from one group to
    the next."""
    return (inputs + STEP - 1) // STEP * STEP * WIDTH * word_like.itemsize


@inner
def steps_of_slice(word_like):
    """Return how many steps of a narrow weight are widened at once, for up to 32 rows."""
    return SLICE_BYTES // (STEP * WIDTH * word_like.itemsize)


@inner
def copy_words(word_like, target, source, count):
    """Copy `count` words of the model's dtype from address `source` to `target`."""
    size = word_like.itemsize
    for column in range(count):
        if size == 2:
            copy_half_word(target + 2 * column, source + 2 * column)
        else:
            copy_word(target + 4 * column, source + 4 * column)


@inner
def _embed_from_words(word_like, output, group, steps, target):
    """Copy the row of one output of a group, whose words begin at address `group`, to `target`: the
    inputs of `steps` steps."""
    size = word_like.itemsize
    panel = STEP * COLUMNS * size
    word_size = 4 if has_pairs(word_like) else size
    start = group + output // COLUMNS * panel + output % COLUMNS * word_size
    for step in range(steps):
        for word in range(STEP * size // word_size):
            source = start + step * GROUP * panel + word * COLUMNS * word_size
            to = target + step * STEP * size + word * word_size
            if word_size == 4:
                copy_word(to, source)
            else:
                copy_half_word(to, source)


@inner
def embed_row(word_like, like, token, table, inputs, form, target, spare, words):
    """Copy the row of a token from a (V, K) table, or from its panels, to the address `target`,
    with its padding.

    Args:
        form: the layout of the table: ROWS, PANELS or NARROW_PANELS.
        spare, words: the addresses of scratch, see `multiply_task`.
    """
    size = word_like.itemsize
    if form == ROWS:
        start = table + token * inputs * size
        copy_words(word_like, target, start, inputs)
        # The padding of a row may contain NaN from the row before it.
        for byte in range(inputs * size, (inputs + STEP - 1) // STEP * STEP * size, 2):
            clear_half_word(target + byte)
        return
    steps, output = (inputs + STEP - 1) // STEP, token % WIDTH
    if form == NARROW_PANELS:
        entry = table + 16 * (token // WIDTH)
        group, how = field(entry, 0), field(entry, 1)
        if how != 0:
            slice_steps = steps_of_slice(word_like)
            for first in range(0, steps, slice_steps):
                end = min(first + slice_steps, steps)
                widen_steps(word_like, group, how, first, end, words, spare)
                to = target + first * STEP * size
                _embed_from_words(word_like, output, words, end - first, to)
            return
    else:
        group = table + token // WIDTH * bytes_of_group(word_like, inputs)
    _embed_from_words(word_like, output, group, steps, target)


@inner
def scale_row(word_like, like, row, inputs, factor, other, wide):
    """Replace the row at address `row` by round(round(row * factor) + other) in place; `other` is
    the address of a row without padding, or 0 for none.

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
    """Return the register of float32 at `column` of a row of `count` words, zeros after the row's
    end."""
    x = get(word_like, address + column * word_like.itemsize)
    if column + simd.REGISTER_BYTES // 4 > count:
        mask = simd.within(like, types.int64(column), types.int64(0), types.int64(count))
        x = simd.select(mask, x, simd.splat(like, 0.0))
    return x


@inner
def normalise_row(
    word_like,
    like,
    source,
    target,
    weight,
    bias,
    dim,
    eps,
    shift,
    factor,
    kind,
    adds,
    scale,
    spare,
):
    """Set target = (x - mean) / sqrt(mean((x - mean)^2) + eps) (shift + weight) + bias for the row
    x at `source`.

    Without CENTRES the mean is 0. With ROUNDS the quotient is rounded before it is multiplied.
    Without IS_PART the padding of the target, up to whole registers, becomes zero.

    Args:
        weight, bias: addresses, followed by zeros up to whole registers; bias may be 0 for none.
        kind: the bits ROUNDS, CENTRES and IS_PART.
        adds: True if the rounded result times `factor`, rounded again, is added to the target.
        scale: the factor of the sum with the target, which is rounded before; 1 for none.
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
    factors, scales = simd.splat(like, factor), simd.splat(like, scale)
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
            x = simd.mul(rounded(word_like, simd.add(get(word_like, at), x)), scales)
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
    """Return the register at `column` of row `row` of the sums at c, plus the bias unless its
    address is 0."""
    x = get(like, c + 4 * (row * WIDTH + column))
    return x if bias == 0 else simd.add(x, get(like, bias + 4 * column))


@inner
def _store_sums(
    word_like,
    like,
    c,
    rows,
    bias,
    target,
    target_row,
    function,
    factor,
    extra,
    extra_row,
    outputs,
):
    """Set target = f(sums + bias) * factor * extra for the first `outputs` columns of a group, each
    operation rounded.

    Args:
        extra: the address of rows that multiply the result, or 0 for none.
    """
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    factors = simd.splat(like, factor)
    for row in range(rows):
        start = target + row * target_row
        for column in range(0, WIDTH, lanes):
            x = applied(like, function, rounded(word_like, _with_bias(like, c, bias, row, column)))
            if factor != 1.0:
                x = simd.mul(rounded(word_like, x), factors)
            if extra != 0:
                other = get(word_like, extra + row * extra_row + column * size)
                x = simd.mul(rounded(word_like, x), other)
            if column + lanes <= outputs:
                put(word_like, start + column * size, x)
            elif column < outputs:
                spare = c + 4 * (row * WIDTH + column)  # the sums themselves are no longer needed
                put(word_like, spare, x)
                copy_words(word_like, start + column * size, spare, outputs - column)


@inner
def _add_sums(word_like, like, c, rows, bias, target, target_row, factor, extra, extra_row):
    """Set target = round(target + round(extra + round(round(sums + bias) * factor))) for the
    columns of a group.

    Args:
        extra: the address of rows that are added, too, or 0 for none.
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
def _gate_sums(word_like, like, c, rows, bias, target, target_row, function, factor, limit, alpha):
    """Set target = round(round(f(round(gate * factor))) * up) for a group, whose columns of sums
    are 16 of gate, 16 of up, and so on.

    CLAMPED is (up + 1) (gate sigmoid(alpha gate)) of a gate of at most `limit`, and of an up of at
    most that size, each operation rounded; see `ops.expert_mlp`.
    """
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    one, alphas = simd.splat(like, 1.0), simd.splat(like, alpha)
    most, least = simd.splat(like, limit), simd.splat(like, -limit)
    factors = simd.splat(like, factor)
    for row in range(rows):
        start = target + row * target_row
        for pair in range(0, WIDTH, 2 * COLUMNS):
            for column in range(0, COLUMNS, lanes):
                gate = rounded(word_like, _with_bias(like, c, bias, row, pair + column))
                gate = rounded(word_like, simd.mul(gate, factors))
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
    """Set target = cap tanh(x / cap) for x = round(sums + bias) * factor, as float32; cap 0 is
    none."""
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
    """Convert rows of 16-bit words to float32, for products that cannot read words.

    Args:
        word_like, like: empty arrays of the words' and of float32's type.
        source, source_row: the address of the words, and the bytes of a row.
        rows, inputs: the numbers of rows and columns.
        target, target_row: the address of the floats, and the bytes of a row.
    """
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    for row in range(rows):
        for column in range(0, inputs, lanes):
            x = get(word_like, source + row * source_row + column * size)
            put(like, target + row * target_row + 4 * column, x)


@inner
def permute_rows(word_like, source, source_row, rows, inputs, order, target, target_row):
    """Copy rows of words with the inputs in the order of a narrow weight's columns.

    Args:
        order: the address of int32, the input of each column.
    """
    size = word_like.itemsize
    for row in range(rows):
        start, to = source + row * source_row, target + row * target_row
        for column in range(inputs):
            at = start + size * int32_at(order + 4 * column)
            if size == 2:
                copy_half_word(to + 2 * column, at)
            else:
                copy_word(to + 4 * column, at)


@inner
def _multiply_narrow(word_like, like, c, rows, a, lda, group, form, inputs, words, spare):
    """Multiply up to 32 rows of x by one group of 64 outputs of a narrow weight, into the sums at
    c, which are overwritten.

    The weight's codes are widened a slice of inputs at a time. Few rows are multiplied by codes
    directly where the CPU has instructions for it.

    Args:
        word_like, like: empty arrays, of the model's dtype and of float32.
        c: the address of the sums, 64 float32 a row.
        rows: the number of rows.
        a, lda: the address of the rows and the bytes of a row.
        group, form: the address of the group, and of the description of how it is stored.
        inputs: K, the length of a row.
        words, spare: addresses of scratch: for a widened slice, and SPARE bytes.
    """
    if rows <= 4 and has_dot(word_like):
        multiply_few(word_like, like, c, rows, a, lda, group, form, inputs, spare)
        return
    steps = inputs // STEP
    size = word_like.itemsize if has_words(word_like) else 4
    slice_steps = steps_of_slice(word_like)
    for first in range(0, steps, slice_steps):
        end = min(first + slice_steps, steps)
        widen_steps(word_like, group, form, first, end, words, spare)
        at, count = a + first * STEP * size, (end - first) * STEP
        multiply_rows(word_like, c, rows, at, lda, words, count, first > 0, False)


@inner
def multiply_task(
    word_like,
    like,
    source,
    source_row,
    rows,
    weight,
    is_narrow,
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
    permuted,
    shown,
):
    """Compute groups first ... end - 1 of 64 outputs of a product for some rows, and write them to
    the target by the epilogue STORE, ADD, GATE or LOGITS.

    Args:
        source, source_row: the address of the rows, in full blocks of 32, and the bytes of a row.
        function: the number of the function of STORE or GATE.
        factor, limit, alpha, cap: the numbers of the epilogue, see `codes.py`.
        outputs: the columns to be written of STORE, or 0 for all of the groups.
        extra, extra_row: the address and the bytes of rows that ADD adds as well, or by which STORE
            multiplies; 0 for none.
        is_narrow: True if `weight` is the address of a table: of each group its address, and that
            of how it is stored, 0 for words; see `narrow.py`.
        c: the address of scratch for 32 x 64 sums, twice.
        words: the address of scratch for words, used if `is_narrow`: those of a slice, or with more
            than 32 rows of a whole group.
        wide: the address of scratch for the rows in float32, used unless `has_words`.
        permuted: the address of scratch for the rows in the order of a narrow weight's columns.
        shown: the order of the rows in scratch, what an earlier call for these rows returned; -1 if
            it has none of them.

    Returns:
        The order of the rows that scratch contains now: an address, or 0 for the inputs' own.
    """
    size = word_like.itemsize
    spare = c + 4 * BLOCK_ROWS * WIDTH
    for group in range(first, end):
        start, form = weight + group * bytes_of_group(word_like, inputs), types.int64(0)
        if is_narrow:
            start, form = field(weight + 16 * group, 0), field(weight + 16 * group, 1)
        order = types.int64(0)
        if form != 0:
            order = field(form, ORDER)
        a, lda = source, source_row
        if order != 0:
            a, lda = permuted, size * (inputs + STEP)
        if order != shown:
            shown = order
            if order != 0:
                permute_rows(word_like, source, source_row, rows, inputs, order, a, lda)
            if not has_words(word_like):
                widen_rows(word_like, like, a, lda, rows, inputs, wide, 4 * (inputs + STEP))
        if not has_words(word_like):
            a, lda = wide, 4 * (inputs + STEP)
        if form != 0 and rows > BLOCK_ROWS:
            widen_steps(word_like, start, form, types.int64(0), inputs // STEP, words, spare)
            start, form = words, types.int64(0)
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
            if form != 0:
                _multiply_narrow(
                    word_like, like, c, count, at, lda, start, form, inputs, words, spare
                )
            else:
                multiply_rows(word_like, c, count, at, lda, start, inputs, False, row == 0)
            to = target + row * target_row + out
            other = extra
            if extra != 0:
                other += row * extra_row + out
            if epilogue == STORE:
                _store_sums(
                    word_like,
                    like,
                    c,
                    count,
                    where,
                    to,
                    target_row,
                    function,
                    factor,
                    other,
                    extra_row,
                    columns,
                )
            elif epilogue == ADD:
                _add_sums(
                    word_like, like, c, count, where, to, target_row, factor, other, extra_row
                )
            elif epilogue == GATE:
                _gate_sums(
                    word_like,
                    like,
                    c,
                    count,
                    where,
                    to,
                    target_row,
                    function,
                    factor,
                    limit,
                    alpha,
                )
            else:
                _store_logits(word_like, like, c, count, where, to, target_row, factor, cap)
    return shown
