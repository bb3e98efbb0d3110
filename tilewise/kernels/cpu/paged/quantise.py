"""Rows of 8-bit caches to and from scratch: int8 and float8_e4m3fn with one scale a row.

What      `row value = scale * stored`. The rule that makes scales and stored numbers is that of
          `reference.quantise`, in float32 and to the bit.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  moves one row of `count` elements that are contiguous in memory.
Traffic   each element is read once and written once; scratch stays in the L1 cache.
Numerics  widening is exact: an e4m3 moved to the exponent and mantissa bits of a float16 is
          2^-8 of its value, subnormals included, which E4M3_FACTOR repairs as part of the scale.
          NaN is read as 480: `reference.quantise` stores none, its scale is NaN instead.
"""

from __future__ import annotations

import math

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import load_row, read_f32, write_f32
from tilewise.kernels.cpu.machine.threads import inner
from tilewise.kernels.cpu.paged.four_bits import INT4, load_codes, pack_row
from tilewise.kernels.spec import FOUR_BITS

INT8, E4M3 = 4, 5  # dtype codes beside those of `rows`; INT4 of `four_bits` is 6
BYTE_CODES = {torch.int8: INT8, torch.float8_e4m3fn: E4M3}
CACHE_CODES = BYTE_CODES | {FOUR_BITS: INT4}
E4M3_FACTOR = 256.0  # 2 ** (15 - 7), the biases of float16 and e4m3
SMALLEST_SCALE = 2.0**-126  # below this 1 / scale exceeds float32: such rows become 0
_i8, _i16, _i32, _half = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.HalfType()


def widen_int8(builder, stored):
    """Emit the conversion of <n x i8> to <n x float>."""
    count = stored.type.count
    words = builder.sext(stored, ir.VectorType(_i32, count))
    return builder.sitofp(words, ir.VectorType(ir.FloatType(), count))


def widen_e4m3(builder, stored):
    """Emit the conversion of <n x i8>, bits of e4m3, to <n x float>, 1 / E4M3_FACTOR of the values;
    the caller's scale repairs that."""
    count = stored.type.count
    floats = ir.VectorType(ir.FloatType(), count)
    if simd.HAS_HALF:
        # The sign lands in bit 15 and in bit 14, which the mask clears.
        words = ir.VectorType(_i16, count)
        moved = builder.shl(builder.sext(stored, words), simd.constant(words, 7))
        halves = builder.and_(moved, simd.constant(words, 0xBF80))
        return builder.fpext(builder.bitcast(halves, ir.VectorType(_half, count)), floats)
    words = ir.VectorType(_i32, count)
    moved = builder.shl(builder.sext(stored, words), simd.constant(words, 20))
    tiny = builder.bitcast(builder.and_(moved, simd.constant(words, 0x87F00000)), floats)
    return builder.fmul(tiny, simd.constant(floats, 2.0**112))


def _narrow_int8(builder, value):
    """Emit the rounding of <n x float> of at most 127 in size to <n x i8>, to nearest even."""
    count = value.type.count
    words = ir.VectorType(_i32, count)
    moved = builder.fadd(value, simd.constant(value.type, 1.5 * 2.0**23))
    return builder.trunc(builder.bitcast(moved, words), ir.VectorType(_i8, count))


def _narrow_e4m3(builder, value):
    """Emit the conversion of <n x float> of at most 448 in size to <n x i8>, bits of e4m3, to
    nearest even."""
    count = value.type.count
    words = ir.VectorType(_i32, count)
    bits = builder.bitcast(value, words)
    magnitude = builder.and_(bits, simd.constant(words, 0x7FFFFFFF))
    size = builder.bitcast(magnitude, value.type)
    odd = builder.and_(builder.lshr(magnitude, simd.constant(words, 20)), simd.constant(words, 1))
    rounded = builder.add(magnitude, builder.add(odd, simd.constant(words, 0x7FFFF)))
    # Three bits of mantissa remain; the bias changes from 127 to 7.
    normal = builder.sub(
        builder.lshr(rounded, simd.constant(words, 20)), simd.constant(words, (127 - 7) << 3)
    )
    # Steps of 2^-9 are those of a float32 at 2^14.
    base = simd.constant(value.type, 2.0**14)
    steps = builder.bitcast(builder.fadd(size, base), words)
    subnormal = builder.sub(steps, builder.bitcast(base, words))
    is_small = builder.fcmp_ordered("<", size, simd.constant(value.type, 2.0**-6))
    sign = builder.and_(builder.lshr(bits, simd.constant(words, 24)), simd.constant(words, 0x80))
    code = builder.or_(builder.select(is_small, subnormal, normal), sign)
    return builder.trunc(code, ir.VectorType(_i8, count))


def _reader(widen, is_scalar):
    @intrinsic
    def read(typingctx, like, address):
        """Return LANES stored 8-bit numbers at `address` as a Vector of floats of like's type, or
        one as a float; they are not multiplied by a scale, and e4m3 is 1 / E4M3_FACTOR of its
        value."""
        dtype = simd.float_of(like)

        def codegen(context, builder, sig, args):
            target = simd.vector_ir(dtype)
            count = 1 if is_scalar else target.count
            kind = ir.VectorType(_i8, count)
            value = widen(builder, simd.load_at(builder, args[1], kind, 1))
            if target.element != ir.FloatType():
                value = builder.fpext(value, ir.VectorType(target.element, count))
            return builder.extract_element(value, ir.Constant(_i32, 0)) if is_scalar else value

        return (dtype if is_scalar else simd.Vector(dtype))(like, types.int64), codegen

    return read


def _writer(narrow, limit, is_scalar):
    @intrinsic
    def write(typingctx, address, value):
        """Store a Vector of floats (or one float) at `address` as 8-bit numbers, saturated at the
        limit of their type; a NaN becomes 0."""

        def codegen(context, builder, sig, args):
            x = simd.broadcast(builder, args[1], 1) if is_scalar else args[1]
            for bound, order in ((limit, "<"), (-limit, ">")):
                edge = simd.constant(x.type, bound)
                x = builder.select(builder.fcmp_unordered(order, x, edge), x, edge)
            is_number = builder.fcmp_ordered("ord", x, x)
            x = builder.select(is_number, x, simd.constant(x.type, 0.0))
            simd.store_at(builder, narrow(builder, x), args[0], 1)
            return context.get_dummy_value()

        return types.void(types.int64, value), codegen

    return write


_read_int8, _read_e4m3 = _reader(widen_int8, False), _reader(widen_e4m3, False)
_read_one_int8, _read_one_e4m3 = _reader(widen_int8, True), _reader(widen_e4m3, True)
_write_int8, _write_e4m3 = _writer(_narrow_int8, 127.0, False), _writer(_narrow_e4m3, 448.0, False)
_write_one_int8 = _writer(_narrow_int8, 127.0, True)
_write_one_e4m3 = _writer(_narrow_e4m3, 448.0, True)


@inner
def read_scale(like, code, address):
    """Return the float32 scale at `address`, times the factor that `widen_e4m3` leaves out if
    `code` is E4M3."""
    scale = read_f32(like, address)
    return scale * like.dtype.type(E4M3_FACTOR) if code == E4M3 else scale


@inner
def load_values(like, code, scratch, start, address, count, scale_address):
    """Load the `count` elements at `address`, of any dtype code, into scratch[start : start +
    count], converted to its type; return 0.0, or NaN if a number or the scale is not finite.

    Rows of 8 and 4 bits are multiplied by the scale at `scale_address`; rows of 4 bits stay
    rotated.
    """
    if code < INT8:
        return load_row(like, code, scratch, start, address, count)
    lanes = simd.REGISTER_BYTES // like.itemsize
    scale = read_scale(like, code, scale_address)
    if code == INT4:
        return load_codes(like, scratch, start, address, count, scale)
    scales = simd.splat(like, scale)
    done = count // lanes * lanes
    for column in range(0, done, lanes):
        at = address + column
        vector = _read_int8(like, at) if code == INT8 else _read_e4m3(like, at)
        simd.store(scratch, start + column, simd.mul(vector, scales))
    for column in range(done, count):
        at = address + column
        number = _read_one_int8(like, at) if code == INT8 else _read_one_e4m3(like, at)
        simd.store_one(scratch, start + column, number * scale)
    return scale - scale


@inner
def own_scale(row, count, code):
    """Return the scale by which row[0 : count], float32, is stored in 8 bits: its largest size /
    127 or 448, by `code`; 0 if that is below 2^-126, NaN if the row is not finite."""
    lanes = simd.REGISTER_BYTES // row.itemsize
    zero = simd.splat(row, 0.0)
    top, check = zero, zero
    done = count // lanes * lanes
    for column in range(0, done, lanes):
        vector = simd.load(row, column)
        top = simd.maximum(simd.absolute(vector), top)
        check = simd.fma(vector, zero, check)
    amax, total = simd.max_lanes(top), simd.sum_lanes(check)
    for column in range(done, count):
        amax = max(amax, abs(row[column]))
        total += row[column] - row[column]
    real = row.dtype.type
    scale = amax * (real(1.0 / 127.0) if code == INT8 else real(1.0 / 448.0))
    if total != 0.0:
        return real(math.nan)
    return real(0.0) if scale < real(SMALLEST_SCALE) else scale


@inner
def store_bytes(row, count, code, scale, address):
    """Store row[0 : count] / scale at `address` as 8-bit numbers of the dtype with this code; zeros
    where scale is 0 or NaN."""
    lanes = simd.REGISTER_BYTES // row.itemsize
    real = row.dtype.type
    inverse = real(1.0) / scale if scale > 0.0 else real(0.0)
    factors = simd.splat(row, inverse)
    done = count // lanes * lanes
    for column in range(0, done, lanes):
        vector = simd.mul(simd.load(row, column), factors)
        if code == INT8:
            _write_int8(address + column, vector)
        else:
            _write_e4m3(address + column, vector)
    for column in range(done, count):
        number = row[column] * inverse
        if code == INT8:
            _write_one_int8(address + column, number)
        else:
            _write_one_e4m3(address + column, number)


@inner
def quantise_row(row, count, code, address, scale_address, owns_scale):
    """Store row[0 : count], float32, at `address` in 8 or 4 bits, and its own scale at
    scale_address; if not `owns_scale`, 8-bit rows are stored by the scale that is there.

    A row of 4 bits always has its own scale, and is rotated in place.
    """
    if code == INT4:
        pack_row(row, count, address, scale_address)
        return
    if owns_scale:
        scale = own_scale(row, count, code)
        write_f32(scale_address, scale)
    else:
        scale = read_f32(row, scale_address)
    store_bytes(row, count, code, scale, address)
