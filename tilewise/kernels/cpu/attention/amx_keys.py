"""Tiles of keys and values for the products in tile registers, packed straight from memory.

What      K transposed into words along its channels, V into words along its keys: panels of 32
          columns, as `machine/pack.py` makes them, from bfloat16 rows of a dense tensor or of cache
          blocks.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  one tile of keys, by 16: adjacent ones, in whole registers, are read in place; others
          (8-bit caches, odd head dims, the last ones) are gathered first.
Traffic   every element is read and written once.
Numerics  copies bits; 8-bit rows are widened and rounded to bfloat16.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tilewise.kernels.cpu.attention.problem import TILE_N
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.amx import ROWS, STEP, pair_rows
from tilewise.kernels.cpu.machine.pack import emit_transpose
from tilewise.kernels.cpu.machine.rows import BF16
from tilewise.kernels.cpu.machine.source import address_of, gather_rows
from tilewise.kernels.cpu.machine.threads import inner

_i16, _i32, _i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_MAGNITUDE, _INFINITY = 0x7FFF, 0x7F80  # bits of a bfloat16


@intrinsic
def _transpose(typingctx, address, row_bytes, panels, at):
    """Transpose 16 rows of 16 words of 4 bytes, and write them to a panel with rows of 32 words.

    Args:
        address, row_bytes: the address of the first row, and the bytes from one row to the next.
        panels, at: the array of words, and the index at which the first transposed row begins.
    """

    def codegen(context, builder, sig, args):
        address_, row_bytes_, panels_, at_ = args
        kind = ir.VectorType(_i32, ROWS)
        rows = []
        for row in range(ROWS):
            where = builder.add(address_, builder.mul(row_bytes_, _i64(row)))
            rows.append(simd.load_at(builder, where, kind, 2))
        write = simd.pointer_to(context, builder, panels, panels_, at_)
        for row, value in enumerate(emit_transpose(builder, rows)):
            simd.store_vector(builder, value, builder.gep(write, [_i64(row * 2 * STEP)]), 4)
        return context.get_dummy_value()

    index = types.int64
    return types.void(index, index, panels, index), codegen


@intrinsic
def _are_finite(typingctx, address, row_bytes, units):
    """Return whether 16 rows of `units` x 32 bfloat16 at `address` have no infinity and no NaN."""

    def codegen(context, builder, sig, args):
        address_, row_bytes_, units_ = args
        kind = ir.VectorType(_i16, STEP)
        largest = [cgutils.alloca_once_value(builder, ir.Constant(kind, None)) for _ in range(2)]
        for place in largest:
            builder.store(ir.Constant(kind, None), place)
        with cgutils.for_range(builder, units_) as loop:
            unit = builder.add(address_, builder.mul(loop.index, _i64(2 * STEP)))
            for row in range(ROWS):
                where = builder.add(unit, builder.mul(row_bytes_, _i64(row)))
                bits = simd.load_at(builder, where, kind, 2)
                bits = builder.and_(bits, simd.constant(kind, _MAGNITUDE))
                old = builder.load(largest[row % 2])
                is_larger = builder.icmp_unsigned(">", bits, old)
                builder.store(builder.select(is_larger, bits, old), largest[row % 2])
        limit = simd.constant(kind, _INFINITY)
        above = [builder.icmp_unsigned(">=", builder.load(place), limit) for place in largest]
        bits = builder.bitcast(builder.or_(*above), ir.IntType(STEP))
        return builder.icmp_unsigned("==", bits, ir.Constant(bits.type, 0))

    return types.boolean(types.int64, types.int64, types.int64), codegen


@inner
def _find_rows(like, source, rows, ld, first, count):
    """Return (address, bytes from row to row) of 16 whole rows of bfloat16, the rows of `source`
    from `first` on.

    `count` of them exist; zeros follow. Rows that memory already has so are read in place; others,
    and rows that no query sees, are gathered in `rows`, 16 x ld.
    """
    lies_together = source.block_size % ROWS == 0  # or 0
    lies_together = lies_together and first + ROWS > source.first
    if source.code == BF16 and source.width == ld and count == ROWS and lies_together:
        return address_of(source, first), source.row
    gather_rows(like, source, rows, ld, first, count, ROWS)
    return types.int64(rows.ctypes.data), types.int64(2 * ld)


@inner
def transpose_keys(like, source, panels, rows, ld, first, count):
    """Pack keys first ... first + count - 1 of `source`, and zeros up to a multiple of 32, into
    panels as columns of K^T.

    Args:
        panels: [panel of 32 keys][word of 2 channels][key].
        rows: scratch of 16 rows of `ld` elements, zero past the width of the source's rows.
    """
    for at in range(0, (count + STEP - 1) // STEP * STEP, ROWS):
        there = max(min(ROWS, count - at), 0)
        address, stride = _find_rows(like, source, rows, ld, first + at, there)
        base = at // STEP * STEP * ld + at % STEP * 2
        for word in range(0, ld // 2, ROWS):
            _transpose(address + 4 * word, stride, panels, base + word * 2 * STEP)


@inner
def pair_values(like, source, panels, rows, ld, first, count):
    """Pack values first ... first + count - 1 of `source`, and zeros up to a multiple of 32, into
    panels; return whether all of them are finite.

    Args:
        panels: [panel of 32 channels][word of 2 keys][channel].
        rows: scratch of 16 rows, see `transpose_keys`.
    """
    is_finite = True
    for at in range(0, (count + STEP - 1) // STEP * STEP, ROWS):
        there = max(min(ROWS, count - at), 0)
        address, stride = _find_rows(like, source, rows, ld, first + at, there)
        is_finite = _are_finite(address, stride, ld // STEP) and is_finite
        for row in range(0, ROWS, 2):
            even = address + row * stride
            pair_rows(even, even + stride, panels, (at + row) * STEP, TILE_N * STEP, ld // STEP)
    return is_finite
