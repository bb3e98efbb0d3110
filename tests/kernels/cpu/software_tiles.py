"""The tile registers of Intel's AMX in software: the matrix unit's kernels run on any AVX-512 CPU.

`install` puts vector code in place of the seven instructions that the kernels are made of, and lets
plans choose as on a CPU with the unit. Each thread has its own eight tiles of 16 rows x 64 bytes.
A product of tiles adds up those at even and at odd places of K, each from 0, then the two sums, and
that to the tile, as the unit does; it flushes no denormals.

It changes what code kernels are, so only processes that a test starts install it, with a folder of
compiled kernels of their own: `python -m tests.kernels.cpu.software_tiles ARGUMENTS` is pytest.
"""

from __future__ import annotations

import ctypes
import sys

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu.machine import amx, simd

ROWS, ROW_BYTES = 16, 64
_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_byte = _i8.as_pointer()
_floats, _words = ir.VectorType(ir.FloatType(), ROWS), ir.VectorType(_i32, ROWS)
_key = ctypes.c_uint32()
_call_llvm = simd.call_llvm


def _function(builder, name, result, kinds):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name)


def _tiles(builder):
    """Where this thread's tiles are."""
    find = _function(builder, "pthread_getspecific", _byte, [_i32])
    key = builder.module.globals.get("software_tiles_key")
    if key is None:
        key = ir.GlobalVariable(builder.module, _i32, "software_tiles_key")
        key.linkage = "external"
    return builder.call(find, [builder.load(key)]), builder.load(key)


def _row(builder, tile, row):
    tiles, _ = _tiles(builder)
    at = builder.add(_i64(tile.constant * ROWS * ROW_BYTES), builder.mul(row, _i64(ROW_BYTES)))
    return builder.gep(tiles, [at])


def _configure(builder):
    tiles, key = _tiles(builder)
    with builder.if_then(builder.icmp_unsigned("==", tiles, ir.Constant(_byte, None))):
        make = _function(builder, "calloc", _byte, [_i64, _i64])
        keep = _function(builder, "pthread_setspecific", _i32, [_i32, _byte])
        builder.call(keep, [key, builder.call(make, [_i64(8), _i64(ROWS * ROW_BYTES)])])


def _copy(builder, tile, pointer, stride, *, stores):
    with cgutils.for_range(builder, _i64(ROWS)) as loop:
        memory = builder.gep(pointer, [builder.mul(loop.index, stride)])
        register = _row(builder, tile, loop.index)
        source, target = (register, memory) if stores else (memory, register)
        row = simd.load_vector(builder, source, _words, 1)
        simd.store_vector(builder, row, target, 1)


def _zero(builder, tile):
    with cgutils.for_range(builder, _i64(ROWS)) as loop:
        simd.store_vector(
            builder, ir.Constant(_words, [0] * ROWS), _row(builder, tile, loop.index), 1
        )


def _halves(builder, words):
    """Two vectors of floats: the low and the high bfloat16 of each word."""
    low = builder.shl(words, simd.constant(words.type, 16))
    high = builder.and_(words, simd.constant(words.type, 0xFFFF0000))
    return [
        builder.bitcast(x, ir.VectorType(ir.FloatType(), words.type.count)) for x in (low, high)
    ]


def _multiply(builder, c, a, b):
    zero = ir.Constant(_floats, [0.0] * ROWS)
    with cgutils.for_range(builder, _i64(ROWS)) as outer:
        sums = [cgutils.alloca_once(builder, _floats) for _ in range(2)]  # of even and odd places
        for each in sums:
            builder.store(zero, each)
        with cgutils.for_range(builder, _i64(ROWS)) as inner:
            place = builder.gep(_row(builder, a, outer.index), [builder.mul(inner.index, _i64(4))])
            word = simd.load_vector(builder, place, ir.VectorType(_i32, 1), 1)
            word = simd.broadcast(
                builder, builder.extract_element(word, ir.Constant(_i32, 0)), ROWS
            )
            row = simd.load_vector(builder, _row(builder, b, inner.index), _words, 1)
            for x, y, each in zip(_halves(builder, word), _halves(builder, row), sums, strict=True):
                builder.store(simd.fuse(builder, x, y, builder.load(each)), each)
        at = _row(builder, c, outer.index)
        product = builder.fadd(*map(builder.load, sums))
        total = builder.fadd(simd.load_vector(builder, at, _floats, 1), product)
        simd.store_vector(builder, total, at, 1)


def _call(builder, name, result, operands):
    if name == "x86.ldtilecfg":
        return _configure(builder)
    if name == "x86.tilerelease":
        return None
    if name == "x86.tilezero":
        return _zero(builder, *operands)
    if name in ("x86.tileloadd64", "x86.tilestored64"):
        return _copy(builder, *operands, stores=name == "x86.tilestored64")
    if name == "x86.tdpbf16ps":
        return _multiply(builder, *operands)
    assert "tile" not in name
    return _call_llvm(builder, name, result, operands)


def install() -> None:
    """Compile kernels for the matrix unit from now on; the CPU must multiply pairs of bfloat16."""
    assert simd.HAS_BF16_DOT
    libc = ctypes.CDLL(None)
    assert libc.pthread_key_create(ctypes.byref(_key), None) == 0
    llvm.add_symbol("software_tiles_key", ctypes.addressof(_key))
    simd.call_llvm = _call
    simd.HAS_TILES = amx.HAS_AMX = True


if __name__ == "__main__":
    import pytest

    install()
    sys.exit(pytest.main(sys.argv[1:]))
