"""Matrix products of floats on the CPU's matrix unit (Intel AMX), as products of bfloat16 parts.

What      c (M, N) = or += a (M, K) b (K, N), each operand the sum of one to three bfloat16 parts.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  steps over 32 x 32 blocks of c: four tile registers of sums, two of a, two of b; one
          TDPBF16PS multiplies 16 x 32 by 32 x 16.
Traffic   a lies in rows of bfloat16, b in rows of words (two bfloat16 that follow one another
          along K), both in the L2 cache; c is loaded and stored once per call.
Numerics  x = x0 + x1 + x2, each the bfloat16 nearest to what the ones before leave: three parts
          hold a float's 24 bits, two hold float16's 11. Products a_i b_j are summed, smallest
          first: all of float16, of float32 those with i + j < 3; those left out are below 2^-26 of
          |a| |b|. Numbers below 2^-126 count as 0; sums are float32.

One core of a Xeon 6 at 3.5 GHz (2026-11-20): 3,100 GFLOP/s bfloat16, where VDPBF16PS gives 220.
"""

from __future__ import annotations

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.amx import ROWS
from tilewise.kernels.cpu.machine.threads import inlined, inner

# bfloat16 parts that represent a number exactly
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
SIDE = 32  # rows and columns of a block, elements of one step along K
_i8, _i16, _i64 = ir.IntType(8), ir.IntType(16), ir.IntType(64)
_ROW_BYTES = 64  # bytes of a row of a tile register


def _call(builder, name, *operands):
    simd.call_llvm(builder, f"x86.{name}", ir.VoidType(), list(operands))


def _byte_pointer(context, builder, array_type, array, index):
    pointer = simd.pointer_to(context, builder, array_type, array, index)
    return builder.bitcast(pointer, _i8.as_pointer())


@intrinsic
def _clear(typingctx):
    """Zero the four tile registers of sums, 0 to 3."""

    def codegen(context, builder, sig, args):
        for tile in range(4):
            _call(builder, "tilezero", _i8(tile))
        return context.get_dummy_value()

    return types.void(), codegen


def _sums_mover(name):
    """Return an intrinsic that moves the four tile registers of sums, a 32 x 32 block, from or to
    memory, as the instruction `name` does: row r lies at c[ci + r ldc]."""

    @intrinsic
    def move(typingctx, c, ci, ldc):
        def codegen(context, builder, sig, args):
            c_, ci_, ldc_ = args
            first = _byte_pointer(context, builder, c, c_, ci_)
            stride = builder.mul(ldc_, _i64(4))
            below = builder.gep(first, [builder.mul(stride, _i64(ROWS))])
            for tile in range(4):
                pointer = builder.gep(below if tile & 2 else first, [_i64(tile % 2 * _ROW_BYTES)])
                _call(builder, name, _i8(tile), pointer, stride)
            return context.get_dummy_value()

        return types.void(c, types.int64, types.int64), codegen

    return move


_load_sums, _store_sums = _sums_mover("tileloadd64"), _sums_mover("tilestored64")


@intrinsic
def _step(typingctx, a, ai, lda, b, bi, ldb):
    """Add the product of 32 rows of a and 32 columns of b over 32 elements of K to the sums in tile
    registers.

    lda and ldb count bfloat16 from row to row; a row of b holds words of two elements along K, one
    word for each column.
    """

    def codegen(context, builder, sig, args):
        a_, ai_, lda_, b_, bi_, ldb_ = args
        upper = _byte_pointer(context, builder, a, a_, ai_)
        left = _byte_pointer(context, builder, b, b_, bi_)
        a_stride, b_stride = (builder.mul(stride, _i64(2)) for stride in (lda_, ldb_))
        lower = builder.gep(upper, [builder.mul(a_stride, _i64(ROWS))])
        right = builder.gep(left, [_i64(_ROW_BYTES)])
        for tile, pointer, stride in (
            (4, upper, a_stride),
            (6, left, b_stride),
            (7, right, b_stride),
            (5, lower, a_stride),
        ):
            _call(builder, "tileloadd64", _i8(tile), pointer, stride)
        for tile in range(4):
            _call(builder, "tdpbf16ps", _i8(tile), _i8(4 + tile // 2), _i8(6 + tile % 2))
        return context.get_dummy_value()

    index = types.int64
    return types.void(a, index, index, b, index, index), codegen


@inlined
def multiply_block(c, ci, ldc, a, ai, lda, b, bi, ldb, steps, keeps):
    """Compute one 32 x 32 block of c = a b, or of c += a b if `keeps`, in tile registers; both
    operands are bfloat16 of one part.

    Args:
        c, ci, ldc: the sums, the index of the first, and the elements of a row.
        a, ai, lda: the left operand, likewise.
        b, bi, ldb: the right operand in words of two rows, likewise.
        steps: the steps of 32 along K.
    """
    if keeps:
        _load_sums(c, ci, ldc)
    else:
        _clear()
    for step in range(steps):
        _step(a, ai + step * SIDE, lda, b, bi + step * ROWS * ldb, ldb)
    _store_sums(c, ci, ldc)


@inner
def multiply_tiles(
    c, ci, ldc, rows, columns, a, ai, lda, a_part, b, bi, ldb, b_panel, b_part, steps, parts, keeps
):
    """Compute c = a b, or c += a b if `keeps`; `rows` and `columns` of c are multiples of 32.
    Operands are sums of bfloat16 parts, of which the largest products are added, smallest first.

    Args:
        c, ci, ldc: the float32 sums, the index of the first one, the elements from row to row.
        a, ai, lda: the bfloat16 rows, the index of the first element, the elements from row to row.
        b, bi, ldb: the words, the index of the first element, the elements from row to row of
            words.
        b_panel: the elements from one panel of 32 columns of b to the next.
        a_part, b_part: the elements from one part of an operand to the next.
        steps: the steps along K of 32 elements.
        parts: the number of bfloat16 parts of an operand.
    """
    last_order = 2 if parts == 2 else parts - 1
    for row in range(0, rows, SIDE):
        a_first = ai + row * lda
        for column in range(0, columns, SIDE):
            b_first, place = bi + column // SIDE * b_panel, ci + row * ldc + column
            if keeps:
                _load_sums(c, place, ldc)
            else:
                _clear()
            for order in range(last_order, -1, -1):
                for part in range(max(order - parts + 1, 0), min(order, parts - 1) + 1):
                    a_at = a_first + part * a_part
                    b_at = b_first + (order - part) * b_part
                    for step in range(steps):
                        _step(a, a_at + step * SIDE, lda, b, b_at + step * ROWS * ldb, ldb)
            _store_sums(c, place, ldc)
