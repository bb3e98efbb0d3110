"""Four-bit keys and values on a CPU: rows rotated, packed to two codes a byte, and read again.

What      the rule of `reference.four_bits`: groups of channels with signs, times the Hadamard
          matrix; codes and their scale; what codes stand for.
Grid      rows of queries and results are tasks; the rest is called by kernels that have a row.
One call  one row of `count` elements that are contiguous in memory.
Traffic   each element is read once and written once; scratch stays in the L1 cache.
Numerics  float32; widening is exact, code - zero being an integer of -15 ... 15.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import write_f32
from tilewise.kernels.cpu.machine.threads import inner, kernel, next_task, run_tasks
from tilewise.kernels.spec import MOST_ROTATED

INT4 = 6  # dtype code beside those of `rows` and `quantise`
TOP = 15  # the largest code
SMALLEST_SCALE = 2.0**-126  # below this 1 / scale exceeds float32: such rows become 0
ROWS_PER_TASK = 256
_i8, _i32 = ir.IntType(8), ir.IntType(32)


@inner
def _sign_row(row, start, count, size):
    """Negate, in place, the channels of row[start : start + count] that the rule of
    `reference.four_bits` negates before the Hadamard matrix, in groups of `size`."""
    for channel in range(count):
        pairs = channel & (size - 1)
        pairs &= pairs >> 1 & 0x55
        pairs ^= pairs >> 4
        pairs ^= pairs >> 2
        if pairs & 1:
            row[start + channel] = -row[start + channel]


@inner
def rotate_row(row, start, count, back):
    """Rotate each group of channels of row[start : start + count] in place by signs and the
    Hadamard matrix, or rotate it back; a group is the largest power of two that divides `count`, at
    most MOST_ROTATED."""
    size = min(MOST_ROTATED, count & -count)
    if not back:
        _sign_row(row, start, count, size)
    half = 1
    while half < size:
        for first in range(start, start + count, 2 * half):
            for at in range(first, first + half):
                a, b = row[at], row[at + half]
                row[at], row[at + half] = a + b, a - b
        half *= 2
    factor = row.dtype.type(1.0 / math.sqrt(size))
    for at in range(start, start + count):
        row[at] *= factor
    if back:
        _sign_row(row, start, count, size)


@kernel
def _rotate_rows(rows, width, back, counter, num_tasks):
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        last = min((task + 1) * ROWS_PER_TASK, len(rows) // width)
        for row in range(task * ROWS_PER_TASK, last):
            rotate_row(rows, row * width, width, back)


def rotate(x: Tensor, *, back: bool = False) -> None:
    """Rotate the rows of a contiguous float32 tensor (..., D) as rows of a cache of 4 bits are, or
    rotate them back, in place."""
    rows, width = x.view(-1).numpy(), x.shape[-1]
    run_tasks(_rotate_rows, -(-x.numel() // (width * ROWS_PER_TASK)), rows, width, back)


@intrinsic
def _bits(typingctx, number):
    """Return the bits of a float32 as int32."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], _i32)

    return types.int32(types.float32), codegen


@intrinsic
def _of_bits(typingctx, bits):
    """Return the float32 of int32 bits."""

    def codegen(context, builder, sig, args):
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


def _reader(pairs):
    @intrinsic
    def read(typingctx, like, address):
        """Return the codes of LANES channels at `address`, two in a byte, as a Vector of floats of
        like's type; or the codes of two channels as a tuple."""
        dtype = simd.float_of(like)

        def codegen(context, builder, sig, args):
            vector = simd.vector_ir(dtype)
            count = 2 if pairs else vector.count
            half = ir.VectorType(_i8, count // 2)
            stored = simd.load_at(builder, args[1], half, 1)
            low = builder.and_(stored, simd.constant(half, 15))
            high = builder.lshr(stored, simd.constant(half, 4))
            order = [i // 2 + i % 2 * (count // 2) for i in range(count)]
            mask = ir.Constant(ir.VectorType(_i32, count), order)
            codes = builder.shuffle_vector(low, high, mask)
            words = builder.zext(codes, ir.VectorType(_i32, count))
            value = builder.uitofp(words, ir.VectorType(vector.element, count))
            if not pairs:
                return value
            found = [builder.extract_element(value, ir.Constant(_i32, i)) for i in (0, 1)]
            return context.make_tuple(builder, sig.return_type, found)

        result = types.UniTuple(dtype, 2) if pairs else simd.Vector(dtype)
        return result(like, types.int64), codegen

    return read


_read, _read_two = _reader(False), _reader(True)


@inner
def load_codes(like, scratch, start, address, count, scale):
    """Set scratch[start : start + count] to the numbers, rotated channels, that the codes at
    `address` stand for by `scale`, whose lowest bits hold the zero point; return 0.0, or NaN if the
    scale is not finite."""
    lanes = simd.REGISTER_BYTES // like.itemsize
    zero = like.dtype.type(_bits(types.float32(scale)) & TOP)
    zeros, scales = simd.splat(like, zero), simd.splat(like, scale)
    done = count // lanes * lanes
    for column in range(0, done, lanes):
        codes = _read(like, address + column // 2)
        simd.store(scratch, start + column, simd.mul(simd.sub(codes, zeros), scales))
    for column in range(done, count, 2):
        even, odd = _read_two(like, address + column // 2)
        simd.store_one(scratch, start + column, (even - zero) * scale)
        simd.store_one(scratch, start + column + 1, (odd - zero) * scale)
    return scale - scale


@intrinsic
def _store_byte(typingctx, address, byte):
    def codegen(context, builder, sig, args):
        value = builder.trunc(args[1], _i8)
        builder.store(value, builder.inttoptr(args[0], _i8.as_pointer()))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@inner
def pack_row(row, count, address, scale_address):
    """Rotate row[0 : count], float32, in place, and store its codes of 4 bits at `address` and
    their scale, with the zero point in its lowest bits, at `scale_address`.

    A row that is not finite gets the scale NaN, one of tiny numbers the scale 0, both the codes 0.
    """
    rotate_row(row, 0, count, False)
    lowest = highest = check = np.float32(0.0)
    for column in range(count):
        lowest, highest = min(lowest, row[column]), max(highest, row[column])
        check += row[column] - row[column]
    scale = (highest - lowest) * np.float32(1.0 / TOP)
    if check != 0.0 or scale < SMALLEST_SCALE:
        write_f32(scale_address, np.float32(math.nan if check != 0.0 else 0.0))
        for column in range(0, count, 2):
            _store_byte(address + column // 2, 0)
        return
    zero = min(types.int32(round_even(-lowest * (np.float32(1.0) / scale))), types.int32(TOP))
    scale = _of_bits(types.int32((_bits(scale) & types.int32(~TOP)) | zero))
    inverse = np.float32(1.0) / scale
    for column in range(0, count, 2):
        low = min(max(round_even(row[column] * inverse) + zero, 0), TOP)
        high = min(max(round_even(row[column + 1] * inverse) + zero, 0), TOP)
        _store_byte(address + column // 2, low | high << 4)
    write_f32(scale_address, scale)


@inner
def round_even(x):
    """Return float32 x of at most 2^21 in size as the nearest integer, to even."""
    return types.int64(_bits(types.float32(x + np.float32(12582912.0)))) - 0x4B400000
