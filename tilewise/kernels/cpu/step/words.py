"""Vectors of floats from and to rows of a step's dtype, at addresses.

What      loads, stores and roundings for bfloat16, float16 and float32, told apart by an empty
          array: uint16 is bfloat16, int16 is float16.
Grid      none: inlined into the operations of a step.
One call  LANES elements.
Traffic   unaligned.
Numerics  widening is exact, narrowing rounds to nearest even.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd

_i16, _f32 = ir.IntType(16), ir.FloatType()
_HALF = ir.HalfType() if simd.HAS_HALF else _f32  # see `machine/rows.py`


def narrow(builder, word_type, value):
    """Emit the conversion of a vector of float32 to words of `word_type`, a numba array type,
    rounded to nearest even."""
    if word_type.dtype == types.uint16:
        return simd.narrow_bf16(builder, value)
    if word_type.dtype == types.int16 and simd.HAS_HALF:
        return builder.fptrunc(value, ir.VectorType(_HALF, value.type.count))
    return value


def _widen(builder, word_type, value):
    if word_type.dtype == types.uint16:
        return simd.widen_bf16(builder, value)
    if word_type.dtype == types.int16 and simd.HAS_HALF:
        return builder.fpext(value, ir.VectorType(_f32, value.type.count))
    return value


@intrinsic
def get(typingctx, word_like, address):
    """Load a vector of LANES elements from an address, and return it as float32.

    LANES is the number of float32 in a register.

    Args:
        word_like: an empty array that gives the dtype in memory: uint16 is bfloat16, int16 is
            float16, float32 is itself.
        address: int64, the address in bytes of the first element.
    """

    def codegen(context, builder, sig, args):
        stored = {types.uint16: _i16, types.int16: _HALF}.get(word_like.dtype, _f32)
        kind = ir.VectorType(stored, simd.lanes_of(types.float32))
        return _widen(builder, word_like, simd.load_at(builder, args[1], kind, 2))

    return simd.Vector(types.float32)(word_like, types.int64), codegen


@intrinsic
def put(typingctx, word_like, address, value):
    """Store a Vector of LANES float32 at `address` as words of word_like's dtype, rounded to
    nearest even."""

    def codegen(context, builder, sig, args):
        simd.store_at(builder, narrow(builder, word_like, args[2]), args[1], 2)
        return context.get_dummy_value()

    return types.void(word_like, types.int64, value), codegen


@intrinsic
def rounded(typingctx, word_like, value):
    """Return a Vector of float32 rounded to word_like's dtype and widened again, as if it had been
    stored and loaded."""

    def codegen(context, builder, sig, args):
        return _widen(builder, word_like, narrow(builder, word_like, args[1]))

    return value(word_like, value), codegen


@intrinsic
def copy_word(typingctx, target, source):
    """Copy four bytes from the address `source` to `target`."""

    def codegen(context, builder, sig, args):
        kind = ir.IntType(32).as_pointer()
        word = builder.load(builder.inttoptr(args[1], kind), align=2)
        builder.store(word, builder.inttoptr(args[0], kind), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def copy_half_word(typingctx, target, source):
    """Copy two bytes from the address `source` to `target`."""

    def codegen(context, builder, sig, args):
        kind = _i16.as_pointer()
        word = builder.load(builder.inttoptr(args[1], kind), align=2)
        builder.store(word, builder.inttoptr(args[0], kind), align=2)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def clear_half_word(typingctx, target):
    """Write two zero bytes to the address `target`."""

    def codegen(context, builder, sig, args):
        builder.store(_i16(0), builder.inttoptr(args[0], _i16.as_pointer()), align=2)
        return context.get_dummy_value()

    return types.void(types.int64), codegen


@intrinsic
def int32_at(typingctx, address):
    """Return the int32 at an address, as int64."""

    def codegen(context, builder, sig, args):
        number = builder.load(builder.inttoptr(args[0], ir.IntType(32).as_pointer()), align=4)
        return builder.sext(number, ir.IntType(64))

    return types.int64(types.int64), codegen
