"""Panels of 8 bits as words of the model's dtype, in cache; see `int8.py` for the layout.

What      whole numbers of some steps of a group of four panels, in the layout of `panels.py`, and
          sums += scale * sums of these.
Grid      none: called by one thread of a step, before and after a product.
One call  16 outputs x 32 inputs of a step at a time, two inputs of all 16 in a register of words.
Traffic   a byte an element and 256 bytes of scales every 64 inputs, in the order of memory, fetched
          ahead: between two of these a product reads none of them, and the prefetcher stops.
          What is written stays in the L1 cache (few rows) or the L2 cache (many), see `layers.py`.
Numerics  exact: bfloat16 and float16 hold whole numbers up to 128. Scales multiply float32 sums.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.pack import emit_prefetch
from tilewise.kernels.cpu.machine.threads import inner
from tilewise.kernels.cpu.step.int8 import SCALE_BYTES, STEP_BYTES, STEPS
from tilewise.kernels.cpu.step.panels import COLUMNS, GROUP, STEP, WIDTH
from tilewise.kernels.cpu.step.words import get, narrow, put

AHEAD = 3072  # bytes prefetched ahead of their use
_i8, _i32, _i64 = (ir.IntType(bits) for bits in (8, 32, 64))
_FLOATS, _WORDS = (ir.VectorType(kind, COLUMNS) for kind in (ir.FloatType(), _i32))


@intrinsic
def _widen_panel(typingctx, word_like, source, target):
    """Convert 16 outputs x 32 inputs of int8 at `source` to words at `target`."""

    def codegen(context, builder, sig, args):
        _, source_, target_ = args
        for line in range(0, STEP * COLUMNS, 64):
            emit_prefetch(builder, builder.add(source_, _i64(AHEAD + line)))

        def number(k):
            at = builder.add(source_, _i64(COLUMNS * k))
            bytes_ = simd.load_at(builder, at, ir.VectorType(_i8, COLUMNS), 1)
            return builder.sitofp(builder.sext(bytes_, _WORDS), _FLOATS)

        size = word_like.dtype.bitwidth // 8
        if word_like.dtype != types.uint16:
            for k in range(STEP):
                to = builder.add(target_, _i64(COLUMNS * size * k))
                simd.store_at(builder, narrow(builder, word_like, number(k)), to, 2)
            return context.get_dummy_value()
        for k in range(0, STEP, 2):
            # The lower halves of such floats are zero.
            low, high = (builder.bitcast(number(k + i), _WORDS) for i in (0, 1))
            word = builder.or_(builder.lshr(low, simd.constant(_WORDS, 16)), high)
            simd.store_at(builder, word, builder.add(target_, _i64(COLUMNS * size * k)), 64)
        return context.get_dummy_value()

    return types.void(word_like, types.int64, types.int64), codegen


@inner
def part_of(group, step):
    """Return the address of the scales of a step; the numbers that they scale follow them."""
    return group + step // STEPS * (STEPS * STEP_BYTES + SCALE_BYTES)


@inner
def widen_steps(word_like, group, first, end, target):
    """Convert steps first ... end - 1 of a group to words.

    Args:
        word_like: an empty array of the model's dtype.
        group: the address of the group.
        target: the address of as many words, in the order of `panels.py`, on a cache line's
            boundary.
    """
    panel = STEP * COLUMNS * word_like.itemsize
    for step in range(first, end):
        source = part_of(group, step) + SCALE_BYTES + step % STEPS * STEP_BYTES
        to = target + (step - first) * GROUP * panel
        for column in range(GROUP):
            _widen_panel(word_like, source + column * (STEP * COLUMNS), to + column * panel)


@inner
def add_scaled(like, sums, rows, part, scales, is_first):
    """sums (+)= part * scales, `rows` rows of 64."""
    lanes = simd.REGISTER_BYTES // 4
    for column in range(0, WIDTH, lanes):
        scale = get(like, scales + 4 * column)
        for row in range(rows):
            at = 4 * (row * WIDTH + column)
            x = get(like, part + at)
            if is_first:
                put(like, sums + at, simd.mul(x, scale))
            else:
                put(like, sums + at, simd.fma(x, scale, get(like, sums + at)))


@intrinsic
def _byte_as_float(typingctx, address):
    """Return the int8 at an address, as float32."""

    def codegen(context, builder, sig, args):
        byte = builder.load(builder.inttoptr(args[0], _i8.as_pointer()))
        return builder.sitofp(byte, ir.FloatType())

    return types.float32(types.int64), codegen


@intrinsic
def _float_at(typingctx, address):
    """Return the float32 at an address."""

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
def embed_output(word_like, like, group, output, inputs, target, wide):
    """target = round(q * scale) of one output of a group: a row of a tied embedding.

    Args:
        inputs: K, a multiple of 32.
        wide: the address of scratch for 32 float32.
    """
    lanes, size = simd.REGISTER_BYTES // 4, word_like.itemsize
    for step in range(inputs // STEP):
        scales = part_of(group, step)
        scale = simd.splat(like, _float_at(scales + 4 * output))
        source = scales + SCALE_BYTES + step % STEPS * STEP_BYTES
        source += output // COLUMNS * (STEP * COLUMNS) + output % COLUMNS
        for k in range(STEP):
            _put_float(wide + 4 * k, _byte_as_float(source + COLUMNS * k))
        for k in range(0, STEP, lanes):
            x = simd.mul(get(like, wide + 4 * k), scale)
            put(word_like, target + (step * STEP + k) * size, x)
