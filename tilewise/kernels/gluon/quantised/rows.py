"""A product of rows with a weight of 8 or 4 bits, by mma.sync: the codes are read once, and never
stored wider.

What: y = x W^T + bias, W[n, k] = (value(code) - zero) * scale - minimum; see `QuantisedWeight`.
Grid: (tiles of outputs, tiles of rows).
One CTA: 16 * TILES * WARPS_N outputs of ROWS rows over all of K. WARPS_K of its warps take the
steps of K in turns and add up their sums at the end. Codes and scales are loaded two steps before
they are multiplied, into registers.
Traffic: the codes and scales once for each tile of rows, further tiles from L2; x from L1 and L2.
Numerics: of each step, value * x summed in float32, times the scale in float32, less the row's sum
times (zero + what codes carry) * scale + minimum: no weight is rounded to 16 bits, but values of a
general table. What a row of y is does not depend on how many others there are.

Outputs are the left operand's rows and rows of x its columns, of which there may be 8. A step is
the channels that share a scale, or a part of them.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from tilewise.kernels import early
from tilewise.kernels.gluon.device.early import await_previous, begin_next
from tilewise.kernels.gluon.quantised.operands import (
    bits_of,
    codes_layout,
    inputs_layout,
    inputs_operand,
    magic,
    sum_layout,
    wide,
    words_operand,
)

_FIRST = gl.constexpr(early.FIRST)


class Shape(NamedTuple):
    """Constexpr: the sizes and features that change the code of a product by mma.sync: kind of
    codes and scales, rows, warps, channels of a step."""

    kind: int  # kind of the codes, see `operands`
    rows: int  # rows of x, padded: 8, 16 or 32
    tiles: int  # tiles of 16 outputs of a warp: 1, 2 or 4
    warps_n: int  # warps that share the rows of x
    warps_k: int  # warps that share outputs
    holds_inputs: bool  # rows of x are loaded ahead, too
    step: int  # channels of a warp's product: 32 to 128 of 4 bits, 16 to 64 of 8
    group_steps: int  # steps that share a scale; 0: all of a row
    outer_steps: int  # likewise an outer scale
    scale_kind: int  # kind of the scales, of `triton.quantised.values`
    has_outer: bool
    has_zeros: bool
    minimum_kind: int  # -1: none
    has_outer_minimums: bool
    has_bias: bool
    early: int  # mode of `kernels.early`: codes are loaded while the kernel before runs


@gluon.constexpr_function
def has_offset(shape, dtype):
    """Return whether outputs have an offset, so that the sums of rows of x are needed."""
    return magic(shape.kind, dtype) != 0 or shape.has_zeros or shape.minimum_kind >= 0


@gluon.jit
def _column(step, STEPS: gl.constexpr):
    """Return the column of the scale of step number `step`; STEPS steps share a scale, 0: all of a
    row."""
    if STEPS == 0:
        return step * 0
    else:
        return step // STEPS


@gluon.jit
def _raw_scales(tensors, base, step, shape: gl.constexpr):
    """Load scale, zero point, minimum and the outer factors of scale and minimum of each output,
    (warps, outputs), at a step; what the shape lacks is the scale once more."""
    scales, zeros, minimums, outer, outer_minimums = tensors
    at = base[0] + _column(step, shape.group_steps)
    outer_at = base[1] + _column(step, shape.outer_steps)
    scale = gl.load(scales + at)
    zero = scale
    minimum = scale
    factor = scale
    minimum_factor = scale
    if shape.has_zeros:
        zero = gl.load(zeros + at)
    if shape.minimum_kind >= 0:
        minimum = gl.load(minimums + at)
    if shape.has_outer:
        factor = gl.load(outer + outer_at)
    if shape.has_outer_minimums:
        minimum_factor = gl.load(outer_minimums + outer_at)
    return scale, zero, minimum, factor, minimum_factor


@gluon.jit
def _scales(raw, MAGIC: gl.constexpr, shape: gl.constexpr):
    """Return the scale and the offset of each output, (warps, outputs) in float32.

    A weight is operand * scale - offset. The operand is MAGIC more than the weight's code, and the
    offset subtracts MAGIC, the zero point and the minimum in one.

    Args:
        raw: the scales, zero points, minimums, and the outer factors of scales and of minimums, as
            `_raw_scales` returns them. What the shape lacks is not used.
        MAGIC: the number of `operands.magic`.
    """
    scale, zero, minimum, factor, minimum_factor = raw
    scale = wide(scale, shape.scale_kind)
    if shape.has_outer:
        scale = scale * factor.to(gl.float32)
    offset = scale * MAGIC
    if shape.has_zeros:
        offset = scale * (zero.to(gl.float32) + MAGIC)
    if shape.minimum_kind >= 0:
        less = wide(minimum, shape.minimum_kind)
        if shape.has_outer_minimums:
            less = less * minimum_factor.to(gl.float32)
        offset = offset + less
    return scale, offset


@gluon.jit
def _halved(words):
    """Return words (warps, 2 n, m) as two (warps, n, m): those of the first and of the second half
    of outputs."""
    W: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1] // 2
    M: gl.constexpr = words.shape[2]
    return gl.split(words.reshape([W, 2, N, M]).permute((0, 2, 3, 1)))


@gluon.jit
def _base(first, output, outputs, grid, outer_grid, block_rows, outer_rows):
    """Return the places of the first scale and of the first outer scale of the rows first + output
    of a weight; rows past the last repeat it."""
    row = gl.minimum(first + output, outputs - 1)
    return row // block_rows * grid, row // outer_rows * outer_grid


@gluon.jit
def _bases(first, output, outputs, grid, outer_grid, block_rows, outer_rows, shape: gl.constexpr):
    """Return `_base` of up to four tiles of outputs; those beyond shape.tiles repeat the first."""
    WIDE: gl.constexpr = 16 * shape.warps_n
    base0 = _base(first, output, outputs, grid, outer_grid, block_rows, outer_rows)
    base1 = base0
    base2 = base0
    base3 = base0
    if shape.tiles > 1:
        base1 = _base(first + WIDE, output, outputs, grid, outer_grid, block_rows, outer_rows)
    if shape.tiles > 2:
        base2 = _base(first + 2 * WIDE, output, outputs, grid, outer_grid, block_rows, outer_rows)
        base3 = _base(first + 3 * WIDE, output, outputs, grid, outer_grid, block_rows, outer_rows)
    return base0, base1, base2, base3


@gluon.jit
def _loaded(codes, tensors, bases, warp, step, shape: gl.constexpr):
    """Load the codes of a step, and return them and `_raw_scales` of up to four tiles of outputs.

    A step behind the last one has codes of 0 and the last one's scales.
    """
    at, word, per_row, per_step, last = codes
    words = gl.load(at + step * per_step, mask=word + step * per_step < per_row, other=0)
    place = gl.minimum(step + warp, last)
    raw0 = _raw_scales(tensors, bases[0], place, shape)
    raw1 = raw0
    raw2 = raw0
    raw3 = raw0
    if shape.tiles > 1:
        raw1 = _raw_scales(tensors, bases[1], place, shape)
    if shape.tiles > 2:
        raw2 = _raw_scales(tensors, bases[2], place, shape)
        raw3 = _raw_scales(tensors, bases[3], place, shape)
    return words, raw0, raw1, raw2, raw3


@gluon.jit
def _added(acc, words, raw, operand, row_sum, constants, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return acc (warps, outputs, rows) plus the product of a tile in one step, scaled.

    Args:
        words: the tile's codes.
        raw: the scales of the step.
        operand, row_sum: x^T of the step, and the sum of each of its rows.
    """
    size: gl.constexpr = [shape.warps_k, 16 * shape.warps_n, shape.rows]
    zeros = gl.zeros(size, gl.float32, sum_layout(shape.warps_k, shape.warps_n))
    left = words_operand(words, constants[0], constants[1], shape.kind, DTYPE, shape.warps_n)
    part = mma_v2(left, operand, zeros)
    MAGIC: gl.constexpr = magic(shape.kind, DTYPE)
    scale, offset = _scales(raw, MAGIC, shape)
    acc = acc + part * gl.expand_dims(scale, 2)
    if has_offset(shape, DTYPE):
        acc = acc - row_sum * gl.expand_dims(offset, 2)
    return acc


@gluon.jit
def _inputs(rows_of_x, k, S: gl.constexpr):
    """Load x (warps, rows, channels) of the step whose first channel is k for the first warp; 0
    behind the last channel and row."""
    at, inside, channel, channels = rows_of_x
    return gl.load(at + k, mask=inside & (channel + k < channels), other=0.0)


@gluon.jit
def _multiplied(accs, loaded, x, constants, ones, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return the sums of all tiles of outputs, a tuple of four, plus the products of a step; unused
    tiles stay as they are."""
    words, raw0, raw1, raw2, raw3 = loaded
    acc0, acc1, acc2, acc3 = accs
    operand = inputs_operand(x, shape.kind, shape.warps_n)
    size: gl.constexpr = [shape.warps_k, 16 * shape.warps_n, shape.rows]
    row_sum = gl.zeros(size, gl.float32, sum_layout(shape.warps_k, shape.warps_n))
    if has_offset(shape, DTYPE):
        row_sum = mma_v2(ones, operand, row_sum)
    if shape.tiles == 1:
        acc0 = _added(acc0, words, raw0, operand, row_sum, constants, shape, DTYPE)
    else:
        low, high = _halved(words)
        if shape.tiles == 2:
            acc0 = _added(acc0, low, raw0, operand, row_sum, constants, shape, DTYPE)
            acc1 = _added(acc1, high, raw1, operand, row_sum, constants, shape, DTYPE)
        else:
            low0, low1 = _halved(low)
            high0, high1 = _halved(high)
            acc0 = _added(acc0, low0, raw0, operand, row_sum, constants, shape, DTYPE)
            acc1 = _added(acc1, low1, raw1, operand, row_sum, constants, shape, DTYPE)
            acc2 = _added(acc2, high0, raw2, operand, row_sum, constants, shape, DTYPE)
            acc3 = _added(acc3, high1, raw3, operand, row_sum, constants, shape, DTYPE)
    return acc0, acc1, acc2, acc3


@gluon.jit
def _stored(acc, y, bias, first, first_row, rows, outputs, shape: gl.constexpr):
    """Add up the warps' sums (warps, outputs, rows) and the bias, round them, and write them to y
    (rows, outputs)."""
    total = gl.sum(acc, 0)
    layout: gl.constexpr = total.type.layout
    output = first + gl.arange(0, 16 * shape.warps_n, gl.SliceLayout(1, layout))
    row = first_row + gl.arange(0, shape.rows, gl.SliceLayout(0, layout))
    if shape.has_bias:
        added = gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)
        total = total + gl.expand_dims(added, 1)
    at = gl.expand_dims(row.to(gl.int64) * outputs, 0) + gl.expand_dims(output, 1)
    inside = gl.expand_dims(row < rows, 0) & gl.expand_dims(output < outputs, 1)
    gl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


@gluon.jit(
    do_not_specialize=[
        "table0",
        "table1",
        "table2",
        "table3",
        "table4",
        "table5",
        "table6",
        "table7",
        "magic_word",
        "rows",
        "block_rows",
        "outer_rows",
    ]
)
def quantised_rows_kernel(
    x,
    words,
    scales,
    zeros,
    minimums,
    outer,
    outer_minimums,
    table0,
    table1,
    table2,
    table3,
    table4,
    table5,
    table6,
    table7,
    bias,
    y,
    magic_word,
    rows,
    outputs,
    channels,
    per_row,
    stride_x,
    grid,
    outer_grid,
    block_rows,
    outer_rows,
    shape: gl.constexpr,
):
    """Compute y = x W^T + bias, (rows, outputs), by mma.sync, from codes of 8 or 4 bits in their
    plain order; see the module's docstring.

    words: int32 (outputs, per_row); grid, outer_grid: columns of scales and of outer; block_rows,
    outer_rows: the rows that share them.
    """
    MMA: gl.constexpr = sum_layout(shape.warps_k, shape.warps_n)
    DTYPE: gl.constexpr = x.dtype.element_ty
    W: gl.constexpr = shape.warps_k
    WIDE: gl.constexpr = 16 * shape.warps_n  # outputs of a tile
    S: gl.constexpr = shape.step
    T: gl.constexpr = shape.rows
    NUM: gl.constexpr = shape.tiles
    WORDS: gl.constexpr = S * bits_of(shape.kind) // 32
    CODES: gl.constexpr = codes_layout(W, shape.warps_n, NUM, WORDS)
    INPUTS: gl.constexpr = inputs_layout(W, shape.warps_n, T, S)
    if shape.early == _FIRST:
        begin_next(shape.warps_n * shape.warps_k)
    first = gl.program_id(0) * (WIDE * NUM)
    first_row = gl.program_id(1) * T
    # Codes: a lane's words of each of its outputs; outputs behind the last repeat it.
    code_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    code_output = gl.arange(0, WIDE * NUM, gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    code_output = gl.minimum(first + code_output, outputs - 1).to(gl.int64)
    word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    code_word = gl.expand_dims(gl.expand_dims(code_warp * WORDS, 1), 2) + gl.expand_dims(
        gl.expand_dims(word, 0), 1
    )
    code_at = words + gl.expand_dims(gl.expand_dims(code_output * per_row, 0), 2) + code_word
    last = (channels - 1) // S
    codes = (code_at, code_word, per_row, WORDS, last)
    # Rows of x.
    x_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, INPUTS)))
    x_row = first_row + gl.arange(0, T, gl.SliceLayout(0, gl.SliceLayout(2, INPUTS)))
    channel = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(1, INPUTS)))
    x_channel = gl.expand_dims(gl.expand_dims(x_warp * S, 1), 2) + gl.expand_dims(
        gl.expand_dims(channel, 0), 1
    )
    x_inside = gl.expand_dims(gl.expand_dims(x_row < rows, 0), 2)
    x_at = x + gl.expand_dims(gl.expand_dims(x_row.to(gl.int64) * stride_x, 0), 2) + x_channel
    # Scales: of the outputs of a lane's sums.
    warp = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, MMA))), 1)
    output = gl.expand_dims(gl.arange(0, WIDE, gl.SliceLayout(0, gl.SliceLayout(2, MMA))), 0)
    bases = _bases(first, output, outputs, grid, outer_grid, block_rows, outer_rows, shape)
    tensors = (scales, zeros, minimums, outer, outer_minimums)
    ones = gl.full([W, WIDE, S], 1.0, DTYPE, gl.DotOperandLayout(0, MMA, 2))
    looked_up = (table0, table1, table2, table3, table4, table5, table6, table7)
    zero = gl.zeros([W, WIDE, T], gl.float32, MMA)
    accs = (zero, zero, zero, zero)
    constants = (looked_up, magic_word)
    # Two sets of registers in turns: what one holds is multiplied, then loaded anew.
    even = _loaded(codes, tensors, bases, warp, 0, shape)
    odd = _loaded(codes, tensors, bases, warp, W, shape)
    if shape.early:
        # No kernel writes the weight; whatever else is read or written follows the kernel before.
        await_previous(shape.warps_n * shape.warps_k)
        if shape.early != _FIRST:
            begin_next(shape.warps_n * shape.warps_k)
    rows_of_x = (x_at, x_inside, x_channel, channels)
    even_x = _inputs(rows_of_x, 0, S)
    odd_x = even_x
    if shape.holds_inputs:
        odd_x = _inputs(rows_of_x, W * S, S)
    for step in range(0, last + 1, 2 * W):
        if not shape.holds_inputs:
            even_x = _inputs(rows_of_x, step * S, S)
        accs = _multiplied(accs, even, even_x, constants, ones, shape, DTYPE)
        even = _loaded(codes, tensors, bases, warp, step + 2 * W, shape)
        if shape.holds_inputs:
            even_x = _inputs(rows_of_x, (step + 2 * W) * S, S)
        else:
            odd_x = _inputs(rows_of_x, (step + W) * S, S)
        accs = _multiplied(accs, odd, odd_x, constants, ones, shape, DTYPE)
        odd = _loaded(codes, tensors, bases, warp, step + 3 * W, shape)
        if shape.holds_inputs:
            odd_x = _inputs(rows_of_x, (step + 3 * W) * S, S)
    acc0, acc1, acc2, acc3 = accs
    _stored(acc0, y, bias, first, first_row, rows, outputs, shape)
    if NUM > 1:
        _stored(acc1, y, bias, first + WIDE, first_row, rows, outputs, shape)
    if NUM > 2:
        _stored(acc2, y, bias, first + 2 * WIDE, first_row, rows, outputs, shape)
        _stored(acc3, y, bias, first + 3 * WIDE, first_row, rows, outputs, shape)
