"""Matrix products of small tiles on the CPU's matrix unit (Intel AMX), if it has one.

What      c = or += a b for blocks of up to 32 x 32 float32 sums; a and b are bfloat16 in the
          layouts that `gemm.py` multiplies: a in rows, b in panels of paired words.
Grid      none: called by one thread of a kernel, between `configure` and `release`.
One call  keeps 1 to 4 tiles of 16 x 16 sums in tile registers while K runs; a step along K is 32
          elements: 16 rows x 64 bytes of a, 16 words x 16 columns of b.
Traffic   four tile loads for four products; operands come from the L1 or L2 cache.
Numerics  float32 sums of bfloat16 products, denormals flushed to zero. One instruction adds up the
          16 products at even places of its 32 elements of K, from 0 in their order, those at odd
          places likewise, then both, and that to c: c is rounded once for 32 products.

A tile product is 16,384 FLOPs in 16 cycles; attention of 128 heads to latents takes a seventh of
the time that it takes with VDPBF16PS (one core of a Xeon, CPU time, 2026-11-20). Linux grants tile
registers to a process that requests them, see `features.grants_tiles`.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.pack import emit_prefetch

ROWS = 16  # rows of a tile; a tile row is 64 bytes: 16 float32 or 32 bfloat16
STEP = 32  # bfloat16 elements along K of one product
_i8, _i64 = ir.IntType(8), ir.IntType(64)
HAS_AMX = simd.HAS_TILES  # read by plans; the generated code depends on HAS_TILES alone


def _call(builder, name, *operands):
    simd.call_llvm(builder, f"x86.{name}", ir.VoidType(), list(operands))


@intrinsic
def configure(typingctx):
    """Configure the eight tile registers of this thread for tiles of 16 rows x 64 bytes; does
    nothing on a CPU without AMX."""
    # Palette 1; bytes 16 ... 31 are the 2-byte widths, 48 ... 55 the rows of tiles 0 ... 7.
    config = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[ROWS] * 8, *[0] * 8]

    def codegen(context, builder, sig, args):
        if not simd.HAS_TILES:
            return context.get_dummy_value()
        kind = ir.ArrayType(_i8, len(config))
        place = cgutils.alloca_once(builder, kind)
        builder.store(ir.Constant(kind, config), place)
        _call(builder, "ldtilecfg", builder.bitcast(place, _i8.as_pointer()))
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def release(typingctx):
    """Release the tile registers of this thread, as each kernel does that configured them:
    switching threads is cheaper without them. Does nothing on a CPU without AMX."""

    def codegen(context, builder, sig, args):
        if simd.HAS_TILES:
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _add(num_rows):
    """Return an intrinsic that computes c = c + a b for num_rows x 2 tiles of 16 x 16 float32 sums;
    a lies in rows of bfloat16, b in panels of paired words.

    The intrinsic's lda and ldc are elements from row to row, `steps` the steps of 32 elements along
    K. Kernels for floats or other CPUs compile it in a branch that they never take; there it does
    nothing.
    """

    @intrinsic
    def add(typingctx, c, ci, ldc, a, ai, lda, b, bi, steps):
        index = types.int64
        sig = types.void(c, index, index, a, index, index, b, index, index)

        def codegen(context, builder, sig, args):
            if not simd.HAS_TILES or a.dtype != types.uint16:
                return context.get_dummy_value()
            c_, ci_, ldc_, a_, ai_, lda_, b_, bi_, steps_ = args
            c_first, a_first, b_first = (
                builder.bitcast(
                    simd.pointer_to(context, builder, kind, array, at), _i8.as_pointer()
                )
                for kind, array, at in ((c, c_, ci_), (a, a_, ai_), (b, b_, bi_))
            )
            c_stride, a_stride = builder.mul(ldc_, _i64(4)), builder.mul(lda_, _i64(2))
            sums = []
            for row in range(num_rows):
                start = builder.gep(c_first, [builder.mul(c_stride, _i64(ROWS * row))])
                sums += [builder.gep(start, [_i64(64 * column)]) for column in range(2)]
            for tile, pointer in enumerate(sums):
                _call(builder, "tileloadd64", _i8(tile), pointer, c_stride)
            with cgutils.for_range(builder, steps_) as loop:
                a_step = builder.gep(a_first, [builder.mul(loop.index, _i64(2 * STEP))])
                b_step = builder.gep(b_first, [builder.mul(loop.index, _i64(128 * ROWS))])
                for row in range(num_rows):
                    at = builder.gep(a_step, [builder.mul(a_stride, _i64(ROWS * row))])
                    _call(builder, "tileloadd64", _i8(4 + row), at, a_stride)
                for column in range(2):
                    at = builder.gep(b_step, [_i64(64 * column)])
                    _call(builder, "tileloadd64", _i8(6 + column), at, _i64(128))
                for tile in range(len(sums)):
                    row, column = divmod(tile, 2)
                    _call(builder, "tdpbf16ps", _i8(tile), _i8(4 + row), _i8(6 + column))
            for tile, pointer in enumerate(sums):
                _call(builder, "tilestored64", _i8(tile), pointer, c_stride)
            return context.get_dummy_value()

        return sig, codegen

    return add


add_1, add_2 = _add(1), _add(2)


@intrinsic
def pair_rows(typingctx, even, odd, values, vi, panel, units):
    """Interleave two rows of `units` x 32 bfloat16, at the addresses `even` and `odd`, and store
    the pairs (even[i], odd[i]) in `values`, uint16: 32 pairs, 64 elements, from values[vi] on, the
    next 32 pairs from values[vi + panel] on, and so on.

    Nothing is done, nor compiled, without AMX or where `values` holds floats.
    """

    def codegen(context, builder, sig, args):
        even_, odd_, values_, vi_, panel_, units_ = args
        if not simd.HAS_TILES or values.dtype != types.uint16:
            return context.get_dummy_value()
        kind = ir.VectorType(ir.IntType(16), STEP)
        words = simd.pointer_to(context, builder, values, values_, vi_)
        with cgutils.for_range(builder, units_) as loop:
            rows = []
            for address in (even_, odd_):
                at = builder.add(address, builder.mul(loop.index, _i64(2 * STEP)))
                pointer = builder.inttoptr(at, kind.as_pointer())
                rows.append(builder.load(pointer, align=2))
            panel_start = builder.gep(words, [builder.mul(loop.index, panel_)])
            for half in range(2):
                order = [
                    source * STEP + half * ROWS + lane
                    for lane in range(ROWS)
                    for source in range(2)
                ]
                order_ir = ir.Constant(ir.VectorType(ir.IntType(32), STEP), order)
                pairs = builder.shuffle_vector(*rows, order_ir)
                simd.store_vector(builder, pairs, builder.gep(panel_start, [_i64(half * STEP)]), 2)
        return context.get_dummy_value()

    index = types.int64
    return types.void(index, index, values, index, index, index), codegen


def _score(num_columns):
    """Return an intrinsic that computes c = a b for 32 rows of a, two tiles that may lie anywhere
    in memory, and num_columns tiles of 16 columns of b, while it prefetches other rows."""

    @intrinsic
    def score(typingctx, c, ci, ldc, a_0, a_1, a_row, b, bi, steps, f_0, f_1, fetches):
        """Set c[ci:], rows ldc apart, to 16 rows of bfloat16 at each of the addresses a_0 and a_1,
        a_row bytes apart, times panels of paired words from b[bi] on (uint16, two to a word), over
        `steps` x 32 elements of K.

        Each step along K also prefetches its part of `fetches` rows at the address f_0 and of as
        many at f_1. Without AMX, or for floats, it does nothing.
        """
        index = types.int64
        sig = types.void(c, index, index, index, index, index, b, index, index, index, index, index)

        def codegen(context, builder, sig, args):
            if not simd.HAS_TILES or b.dtype != types.uint16:
                return context.get_dummy_value()
            c_, ci_, ldc_, a_0_, a_1_, a_row_, b_, bi_, steps_, f_0_, f_1_, fetches_ = args
            byte = _i8.as_pointer()
            c_first = builder.bitcast(simd.pointer_to(context, builder, c, c_, ci_), byte)
            b_first = builder.bitcast(simd.pointer_to(context, builder, b, b_, bi_), byte)
            c_stride = builder.mul(ldc_, _i64(4))
            sums = range(2 * num_columns)
            for tile in sums:
                _call(builder, "tilezero", _i8(tile))
            with cgutils.for_range(builder, steps_) as loop:
                a_offset = builder.mul(loop.index, _i64(2 * STEP))
                with cgutils.for_range(builder, fetches_) as line:
                    at = builder.add(a_offset, builder.mul(line.index, a_row_))
                    for first in (f_0_, f_1_):
                        emit_prefetch(builder, builder.add(first, at))
                for row, first in enumerate((a_0_, a_1_)):
                    at = builder.inttoptr(builder.add(first, a_offset), byte)
                    _call(builder, "tileloadd64", _i8(4 + row), at, a_row_)
                b_step = builder.gep(b_first, [builder.mul(loop.index, _i64(128 * ROWS))])
                for column in range(num_columns):
                    at = builder.gep(b_step, [_i64(64 * column)])
                    _call(builder, "tileloadd64", _i8(6 + column), at, _i64(128))
                for tile in sums:
                    row, column = divmod(tile, num_columns)
                    _call(builder, "tdpbf16ps", _i8(tile), _i8(4 + row), _i8(6 + column))
            for tile in sums:
                row, column = divmod(tile, num_columns)
                at = builder.gep(c_first, [builder.mul(c_stride, _i64(ROWS * row))])
                at = builder.gep(at, [_i64(64 * column)])
                _call(builder, "tilestored64", _i8(tile), at, c_stride)
            return context.get_dummy_value()

        return sig, codegen

    return score


score_1, score_2 = _score(1), _score(2)
