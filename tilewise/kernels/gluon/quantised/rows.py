"""A product of rows with a weight of 8 or 4 bits, by mma.sync: the codes are read once, and never
stored wider.

What: y = x W^T + bias, W[n, k] = (value(code) - zero) * scale - minimum; see `QuantisedWeight`.
Grid: (tiles of outputs, tiles of rows).
One CTA: 16 * TILES outputs of ROWS rows over all of K. Its warps take the steps of K in turns and
add up their sums at the end.
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
from tilewise.kernels.gluon.quantised.operands import (
    TABLE,
    bits_of,
    inputs_operand,
    lane_layout,
    magic,
    sum_layout,
    words_operand,
)

_FIRST = gl.constexpr(early.FIRST)
FLOAT, E8M0, SCALE_E4M3, UINT8, SINT8 = (gl.constexpr(i) for i in range(5))


class Shape(NamedTuple):
    """Constexpr: what changes the code."""

    kind: int  # of codes, see `operands`
    rows: int  # of x, padded: 8, 16 or 32
    tiles: int  # of 16 outputs: 1, 2 or 4
    warps: int
    step: int  # channels of a warp's product: 32 to 128 of 4 bits, 16 to 64 of 8
    scale_kind: int
    has_outer: bool
    has_zeros: bool
    minimum_kind: int  # -1: none
    has_outer_minimums: bool
    has_bias: bool
    early: int  # of `kernels.early`: codes are loaded before the kernel before has ended


@gluon.jit
def _each(instruction: gl.constexpr, shape: gl.constexpr):
    """Run an instruction in every thread."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [shape.warps], [0])
    thread = gl.arange(0, 32 * shape.warps, lanes)
    gl.inline_asm_elementwise(
        f"{instruction}; mov.b32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.constexpr_function
def has_offset(shape, dtype):
    """Return whether the sums of rows of x are needed."""
    return magic(shape.kind, dtype) != 0 or shape.has_zeros or shape.minimum_kind >= 0


@gluon.jit
def _wide(raw, KIND: gl.constexpr):
    """Return scales as float32."""
    if KIND == E8M0:
        bits = raw.to(gl.int32) << 23
        return gl.where(raw == 0, 5.877471754111438e-39, bits.to(gl.float32, bitcast=True))
    elif KIND == SCALE_E4M3:
        bits = raw.to(gl.int32)
        bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        return bits.to(gl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    else:
        return raw.to(gl.float32)


@gluon.jit
def _factor(inner, outer, row, k, grid, block_rows, block_columns, outer_rows, outer_columns,
            HAS_OUTER: gl.constexpr, KIND: gl.constexpr):  # fmt: skip
    """Return the scales (or minimums) of rows (1, 16) at channels k (warps, 1), float32."""
    x = _wide(gl.load(inner + row // block_rows * grid[0] + k // block_columns), KIND)
    if HAS_OUTER:
        at = row // outer_rows * grid[1] + k // outer_columns
        x = x * gl.load(outer + at).to(gl.float32)
    return x


@gluon.jit
def _scales(given, row, k, MAGIC: gl.constexpr, shape: gl.constexpr):
    """Return scale and offset (warps, 16) of 16 outputs: W = operand * scale - offset."""
    (
        scales, zeros, minimums, outer, outer_minimums, grid, outer_grid, block_rows,
        block_columns, outer_rows, outer_columns,
    ) = given  # fmt: skip
    scale = _factor(
        scales, outer, row, k, (grid, outer_grid), block_rows, block_columns, outer_rows,
        outer_columns, shape.has_outer, shape.scale_kind,
    )  # fmt: skip
    offset = scale * MAGIC
    if shape.has_zeros:
        zero = gl.load(zeros + row // block_rows * grid + k // block_columns).to(gl.float32)
        offset = scale * (zero + MAGIC)
    if shape.minimum_kind >= 0:
        offset = offset + _factor(
            minimums, outer_minimums, row, k, (grid, outer_grid), block_rows, block_columns,
            outer_rows, outer_columns, shape.has_outer_minimums, shape.minimum_kind,
        )  # fmt: skip
    return scale, offset


@gluon.jit
def _halved(words):
    """Split words (warps, 16 n, m) of outputs into those of the first and the second half."""
    W: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[1] // 2
    M: gl.constexpr = words.shape[2]
    return gl.split(words.reshape([W, 2, N, M]).permute((0, 2, 3, 1)))


@gluon.jit
def _added(
    acc, words, operand, row_sum, table, given, row, k, shape: gl.constexpr, DTYPE: gl.constexpr
):  # fmt: skip
    """Return the sums (warps, 16, rows) with those of a step of 16 outputs."""
    size: gl.constexpr = [shape.warps, 16, shape.rows]
    zeros = gl.zeros(size, gl.float32, sum_layout(shape.warps))
    part = mma_v2(words_operand(words, table, shape.kind, DTYPE), operand, zeros)
    MAGIC: gl.constexpr = magic(shape.kind, DTYPE)
    scale, offset = _scales(given, row, k, MAGIC, shape)
    acc = acc + part * gl.expand_dims(scale, 2)
    if has_offset(shape, DTYPE):
        acc = acc - row_sum * gl.expand_dims(offset, 2)
    return acc


@gluon.jit
def _stored(acc, y, bias, first, first_row, rows, outputs, shape: gl.constexpr):
    """Add up the warps' sums (warps, 16, rows) and the bias, round and store them."""
    total = gl.sum(acc, 0)
    layout: gl.constexpr = total.type.layout
    output = first + gl.arange(0, 16, gl.SliceLayout(1, layout))
    row = first_row + gl.arange(0, shape.rows, gl.SliceLayout(0, layout))
    if shape.has_bias:
        added = gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)
        total = total + gl.expand_dims(added, 1)
    at = gl.expand_dims(row.to(gl.int64) * outputs, 0) + gl.expand_dims(output, 1)
    inside = gl.expand_dims(row < rows, 0) & gl.expand_dims(output < outputs, 1)
    gl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["rows"])
def quantised_rows_kernel(
    x, words, scales, zeros, minimums, outer, outer_minimums, table, bias, y, rows, outputs,
    channels, per_row, stride_x, grid, outer_grid, block_rows, block_columns, outer_rows,
    outer_columns, shape: gl.constexpr,
):  # fmt: skip
    """Compute y (rows, outputs); see the module's docstring.

    words: int32 (outputs, per_row); grid, outer_grid: columns of scales and of outer;
    channels are a multiple of 128 bits of codes.
    """
    MMA: gl.constexpr = sum_layout(shape.warps)
    DTYPE: gl.constexpr = x.dtype.element_ty
    W: gl.constexpr = shape.warps
    S: gl.constexpr = shape.step
    T: gl.constexpr = shape.rows
    NUM: gl.constexpr = shape.tiles
    PER_WORD: gl.constexpr = 32 // bits_of(shape.kind)
    CODES: gl.constexpr = lane_layout(W, 16 * NUM, S // PER_WORD)
    INPUTS: gl.constexpr = lane_layout(W, T, S)
    if shape.early == _FIRST:
        _each("griddepcontrol.launch_dependents", shape)
    first = gl.program_id(0) * (16 * NUM)
    first_row = gl.program_id(1) * T
    given = (
        scales, zeros, minimums, outer, outer_minimums, grid, outer_grid, block_rows,
        block_columns, outer_rows, outer_columns,
    )  # fmt: skip
    # Codes: a lane's words of each of its outputs; outputs behind the last repeat it.
    code_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    code_output = gl.arange(0, 16 * NUM, gl.SliceLayout(0, gl.SliceLayout(2, CODES)))
    code_output = gl.minimum(first + code_output, outputs - 1).to(gl.int64)
    word = gl.arange(0, S // PER_WORD, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    code_word = gl.expand_dims(gl.expand_dims(code_warp * (S // PER_WORD), 1), 2) + gl.expand_dims(
        gl.expand_dims(word, 0), 1
    )
    code_at = words + gl.expand_dims(gl.expand_dims(code_output * per_row, 0), 2) + code_word
    # Rows of x.
    x_warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, INPUTS)))
    x_row = first_row + gl.arange(0, T, gl.SliceLayout(0, gl.SliceLayout(2, INPUTS)))
    channel = gl.arange(0, S, gl.SliceLayout(0, gl.SliceLayout(1, INPUTS)))
    x_channel = gl.expand_dims(gl.expand_dims(x_warp * S, 1), 2) + gl.expand_dims(
        gl.expand_dims(channel, 0), 1
    )
    x_inside = gl.expand_dims(gl.expand_dims(x_row < rows, 0), 2)
    x_at = x + gl.expand_dims(gl.expand_dims(x_row.to(gl.int64) * stride_x, 0), 2) + x_channel
    # Outputs and warps of sums.
    warp = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, MMA))), 1)
    output = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, MMA))), 0)
    ones = gl.full([W, 16, S], 1.0, DTYPE, gl.DotOperandLayout(0, MMA, 2))
    looked_up = 0
    if shape.kind == TABLE:
        looked_up = (
            gl.load(table), gl.load(table + 1), gl.load(table + 2), gl.load(table + 3),
            gl.load(table + 4), gl.load(table + 5), gl.load(table + 6), gl.load(table + 7),
        )  # fmt: skip
    zero = gl.zeros([W, 16, T], gl.float32, MMA)
    acc0 = zero
    acc1 = zero
    acc2 = zero
    acc3 = zero
    codes = gl.load(code_at, mask=code_word < per_row, other=0)
    if shape.early:
        # Nobody writes the weight; whatever else is read or written follows the kernel before.
        _each("griddepcontrol.wait", shape)
        if shape.early != _FIRST:
            _each("griddepcontrol.launch_dependents", shape)
    for k in range(0, channels, W * S):
        following = gl.load(
            code_at + (k + W * S) // PER_WORD,
            mask=code_word + (k + W * S) // PER_WORD < per_row,
            other=0,
        )
        inputs = gl.load(x_at + k, mask=x_inside & (x_channel + k < channels), other=0.0)
        operand = inputs_operand(inputs, shape.kind)
        row_sum = zero
        if has_offset(shape, DTYPE):
            row_sum = mma_v2(ones, operand, zero)
        # Behind the last channel x is 0, and scales are those of the last one.
        at = gl.minimum(k + warp * S, channels - 1)
        if NUM == 1:
            row = gl.minimum(first + output, outputs - 1)
            acc0 = _added(acc0, codes, operand, row_sum, looked_up, given, row, at, shape, DTYPE)
        else:
            low, high = _halved(codes)
            if NUM == 2:
                row = gl.minimum(first + output, outputs - 1)
                acc0 = _added(acc0, low, operand, row_sum, looked_up, given, row, at, shape, DTYPE)
                row = gl.minimum(first + 16 + output, outputs - 1)
                acc1 = _added(acc1, high, operand, row_sum, looked_up, given, row, at, shape, DTYPE)
            else:
                low0, low1 = _halved(low)
                high0, high1 = _halved(high)
                row = gl.minimum(first + output, outputs - 1)
                acc0 = _added(acc0, low0, operand, row_sum, looked_up, given, row, at, shape, DTYPE)
                row = gl.minimum(first + 16 + output, outputs - 1)
                acc1 = _added(acc1, low1, operand, row_sum, looked_up, given, row, at, shape, DTYPE)
                row = gl.minimum(first + 32 + output, outputs - 1)
                acc2 = _added(
                    acc2, high0, operand, row_sum, looked_up, given, row, at, shape, DTYPE
                )
                row = gl.minimum(first + 48 + output, outputs - 1)
                acc3 = _added(
                    acc3, high1, operand, row_sum, looked_up, given, row, at, shape, DTYPE
                )
        codes = following
    _stored(acc0, y, bias, first, first_row, rows, outputs, shape)
    if NUM > 1:
        _stored(acc1, y, bias, first + 16, first_row, rows, outputs, shape)
    if NUM > 2:
        _stored(acc2, y, bias, first + 32, first_row, rows, outputs, shape)
        _stored(acc3, y, bias, first + 48, first_row, rows, outputs, shape)
