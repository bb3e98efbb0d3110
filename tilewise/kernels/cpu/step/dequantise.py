"""Panels of 8 bits to panels of the model's dtype, in cache; see `int8.py` for the layout.

What      words = round(float32(q) * scale), of some steps of a group of four panels.
Grid      none: called by one thread of a step, between two products.
One call  16 outputs x 32 inputs of a step at a time, a word of all 16 in one register.
Traffic   a byte an element and 256 bytes of scales every 64 inputs, in the order of memory; what
          is written stays in the L1 cache (few rows) or the L2 cache (many), see `layers.py`.
Numerics  a float32 product and one rounding, as `int8.dequantise`: the product of rows with these
          words has the bits that it would have with a weight of the model's dtype.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu import simd
from tilewise.kernels.cpu.step.int8 import SCALE_BYTES, STEP_BYTES, STEPS
from tilewise.kernels.cpu.step.panels import COLUMNS, GROUP, STEP
from tilewise.kernels.cpu.step.product import has_pairs
from tilewise.kernels.cpu.step.words import get, narrow, put
from tilewise.kernels.cpu.threads import inner

_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_SUMS = ir.VectorType(ir.FloatType(), COLUMNS)


def _widened(builder, address, scales):
    """16 bytes at an address, times their scales."""
    bytes_ = simd.load_at(builder, address, ir.VectorType(_i8, COLUMNS), 1)
    whole = builder.sext(bytes_, ir.VectorType(_i32, COLUMNS))
    return builder.fmul(builder.sitofp(whole, _SUMS), scales)


@intrinsic
def _dequantise_step(typingctx, word_like, source, scales, target):
    """16 outputs x 32 inputs from `source`, with 16 scales, to `target`."""

    def codegen(context, builder, sig, args):
        _, source_, scales_, target_ = args
        scale = simd.load_at(builder, scales_, _SUMS, 4)
        if word_like.dtype != types.uint16:
            size = word_like.dtype.bitwidth // 8
            for word in range(STEP):
                at = builder.add(source_, _i64(COLUMNS * word))
                value = narrow(builder, word_like, _widened(builder, at, scale))
                to = builder.add(target_, _i64(COLUMNS * size * word))
                simd.store_at(builder, value, to, 2)
            return context.get_dummy_value()
        # Elements of a word are neighbours: the first 16 bytes are two of each of 8 outputs.
        halves = [
            builder.shuffle_vector(
                scale, scale, ir.Constant(ir.VectorType(_i32, COLUMNS),
                                          [first + lane // 2 for lane in range(COLUMNS)])
            )
            for first in (0, COLUMNS // 2)
        ]  # fmt: skip
        for word in range(STEP // 2):
            low, high = (
                _widened(builder, builder.add(source_, _i64(COLUMNS * (2 * word + half))), scales)
                for half, scales in enumerate(halves)
            )
            to = builder.add(target_, _i64(4 * COLUMNS * word))
            if simd.HAS_BF16_DOT:
                name, kind = "x86.avx512bf16.cvtne2ps2bf16.512", ir.VectorType(_i16, 32)
                simd.store_at(builder, simd.call_llvm(builder, name, kind, [high, low]), to, 64)
            else:
                for half, value in enumerate((low, high)):
                    at = builder.add(to, _i64(2 * COLUMNS * half))
                    simd.store_at(builder, narrow(builder, word_like, value), at, 32)
        return context.get_dummy_value()

    return types.void(word_like, types.int64, types.int64, types.int64), codegen


@inner
def dequantise(word_like, group, first, end, target):
    """Steps first ... end - 1 of a group; `first` is even.

    Args:
        word_like: empty array of the model's dtype.
        group: address of the group.
        target: address of as many words, in the order of `panels.py`, on a cache line's boundary.
    """
    panel = STEP * COLUMNS * word_like.itemsize
    for step in range(first, end):
        scales = group + step // STEPS * (STEPS * STEP_BYTES + SCALE_BYTES)
        source = scales + SCALE_BYTES + step % STEPS * STEP_BYTES
        to = target + (step - first) * GROUP * panel
        for column in range(GROUP):
            _dequantise_step(word_like, source + column * (STEP_BYTES // GROUP),
                             scales + 4 * COLUMNS * column, to + column * panel)  # fmt: skip


@intrinsic
def _byte_as_float(typingctx, address):
    """The int8 at an address, as float32."""

    def codegen(context, builder, sig, args):
        byte = builder.load(builder.inttoptr(args[0], _i8.as_pointer()))
        return builder.sitofp(byte, ir.FloatType())

    return types.float32(types.int64), codegen


@intrinsic
def _float_at(typingctx, address):
    """The float32 at an address."""

    def codegen(context, builder, sig, args):
        return builder.load(builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=4)

    return types.float32(types.int64), codegen


@intrinsic
def _put_float(typingctx, address, number):
    """Store a float32 at an address."""

    def codegen(context, builder, sig, args):
        builder.store(args[1], builder.inttoptr(args[0], ir.FloatType().as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.float32), codegen


@inner
def dequantise_output(word_like, like, group, output, inputs, target, wide):
    """One output of a group, of 64: a row of a tied embedding.

    Args:
        inputs: K, a multiple of 32.
        wide: address of scratch for 32 float32.
    """
    width = 2 if has_pairs(word_like) else 1
    lanes, size = simd.REGISTER_BYTES // 4, word_like.itemsize
    for step in range(inputs // STEP):
        scales = group + step // STEPS * (STEPS * STEP_BYTES + SCALE_BYTES)
        scale = simd.splat(like, _float_at(scales + 4 * output))
        source = scales + SCALE_BYTES + step % STEPS * STEP_BYTES
        source += output // COLUMNS * (STEP_BYTES // GROUP) + output % COLUMNS * width
        for k in range(STEP):
            at = source + k // width * COLUMNS * width + k % width
            _put_float(wide + 4 * k, _byte_as_float(at))
        for k in range(0, STEP, lanes):
            x = simd.mul(get(like, wide + 4 * k), scale)
            put(word_like, target + (step * STEP + k) * size, x)
