"""Matrix products of small tiles on the CPU's matrix unit (Intel AMX), where there is one.

What      c = or += a b for blocks of up to 32 x 32 float32 sums; a and b are bfloat16 in the very
          layouts that `gemm.py` multiplies: a in rows, b in panels of paired words.
Grid      none: called by one thread of a kernel, between `configure` and `release`.
One call  keeps 1 to 4 tiles of 16 x 16 sums in tile registers while K runs; a step along K is 32
          elements: 16 rows x 64 bytes of a, 16 words x 16 columns of b.
Traffic   four tile loads for four products; operands come from the L1 or L2 cache.
Numerics  float32 sums of bfloat16 products, denormals flushed to zero.

A tile product is 16,384 FLOPs in 16 cycles, eight times what VDPBF16PS does. The kernel of the
operating system grants tile registers to a process that asks for them.
"""

from __future__ import annotations

import ctypes
import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tilewise.kernels.cpu import simd

ROWS = 16  # of a tile; a tile row is 64 bytes: 16 float32 or 32 bfloat16
STEP = 32  # bfloat16 elements along K that one product takes
_i8, _i64 = ir.IntType(8), ir.IntType(64)
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux, x86-64


def _is_granted() -> bool:
    """Ask Linux for the tile registers, once for all threads of the process."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    syscall = ctypes.CDLL(None).syscall
    return syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0


HAS_AMX = simd.HAS_TILES and _is_granted()


def _call(builder, name, *operands):
    kinds = [operand.type for operand in operands]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), kinds), f"llvm.x86.{name}"
    )
    builder.call(function, operands)


@intrinsic
def configure(typingctx):
    """Give this thread eight tiles of 16 rows x 64 bytes."""
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
    """Hand the tile registers back; switching threads is cheaper without them."""

    def codegen(context, builder, sig, args):
        if simd.HAS_TILES:
            _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), codegen


def _block(num_rows, num_columns, accumulates):
    """c block = (c if `accumulates` else 0) + a b; num_rows x num_columns tiles of sums.

    Kernels that never take it, for floats or on other CPUs, name it too: there it does nothing.
    """

    @intrinsic
    def block(typingctx, c, ci, ldc, a, ai, a_row, a_step, b, bi, b_row, b_step, steps):
        index = types.int64
        sig = types.void(
            c, index, index, a, index, index, index, b, index, index, index, index
        )  # fmt: skip

        def codegen(context, builder, sig, args):
            if not simd.HAS_TILES or a.dtype != types.uint16:
                return context.get_dummy_value()
            c_, ci_, ldc_, a_, ai_, a_row_, a_step_, b_, bi_, b_row_, b_step_, steps_ = args

            def start(array_type, array, at):
                pointer = simd.pointer_to(context, builder, array_type, array, at)
                return builder.bitcast(pointer, _i8.as_pointer())

            def tiles(first, count, step):
                """Pointers `step` bytes apart."""
                return [builder.gep(first, [builder.mul(step, _i64(n))]) for n in range(count)]

            def scaled(elements, factor):
                return builder.mul(elements, _i64(factor))

            c_stride, a_stride, b_stride = scaled(ldc_, 4), scaled(a_row_, 2), scaled(b_row_, 2)
            sums = [
                (row * num_columns + column, builder.gep(pointer, [_i64(64 * column)]))
                for row, pointer in enumerate(
                    tiles(start(c, c_, ci_), num_rows, scaled(c_stride, ROWS))
                )
                for column in range(num_columns)
            ]
            for tile, pointer in sums:
                if accumulates:
                    _call(builder, "tileloadd64", _i8(tile), pointer, c_stride)
                else:
                    _call(builder, "tilezero", _i8(tile))
            a_tiles = tiles(start(a, a_, ai_), num_rows, scaled(a_stride, ROWS))
            b_tiles = tiles(start(b, b_, bi_), num_columns, _i64(64))
            with cgutils.for_range(builder, steps_) as loop:
                a_offset = scaled(builder.mul(loop.index, a_step_), 2)
                b_offset = scaled(builder.mul(loop.index, b_step_), 2)
                for row, pointer in enumerate(a_tiles):
                    at = builder.gep(pointer, [a_offset])
                    _call(builder, "tileloadd64", _i8(4 + row), at, a_stride)
                for column, pointer in enumerate(b_tiles):
                    at = builder.gep(pointer, [b_offset])
                    _call(builder, "tileloadd64", _i8(6 + column), at, b_stride)
                for row in range(num_rows):
                    for column in range(num_columns):
                        tile = _i8(row * num_columns + column)
                        _call(builder, "tdpbf16ps", tile, _i8(4 + row), _i8(6 + column))
            for tile, pointer in sums:
                _call(builder, "tilestored64", _i8(tile), pointer, c_stride)
            return context.get_dummy_value()

        return sig, codegen

    return block


set_11, set_12, set_21, set_22 = (_block(m, n, False) for m in (1, 2) for n in (1, 2))
add_11, add_12, add_21, add_22 = (_block(m, n, True) for m in (1, 2) for n in (1, 2))
