"""The tile registers of Intel's AMX in software: the matrix unit's kernels run on any AVX2 CPU.

`install` puts vector code in place of the seven instructions of tiles, and lets plans choose as on
a CPU with the unit. Each thread has its own eight tiles of 16 rows x 64 bytes. A product of tiles
adds up those at even and at odd places of K, each from 0, then the two sums, and that to the tile,
as the unit does; it flushes no denormals. On a CPU without AVX-512 and its products of bfloat16
pairs their instructions are vector code, too: registers of 64 bytes are two of 32.

It changes what code kernels are, so only processes that a test starts install it, with a folder of
compiled kernels of their own: `python -m tests.kernels.cpu.software_tiles ARGUMENTS` is pytest.
"""

from __future__ import annotations

import ctypes
import sys

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from tilewise.kernels.cpu.machine import features

_found = features.features()
_is_wide = bool(_found.get("avx512bf16"))
# What kernels are made of is decided where they are imported, `simd` first.
_wanted = _found | dict.fromkeys(("avx512f", "avx512bw", "avx512bf16"), True)
features.features = lambda: _wanted

from tilewise.kernels.cpu.machine import amx, simd  # noqa: E402

ROWS, ROW_BYTES = 16, 64
_i8, _i32, _i64 = (ir.IntType(bits) for bits in (8, 32, 64))
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


def _lanes(builder, vector, lanes):
    """The lanes of a vector with these numbers."""
    order = ir.Constant(ir.VectorType(_i32, len(lanes)), lanes)
    return builder.shuffle_vector(vector, vector, order)


def _narrow_two(builder, high, low):
    """VCVTNE2PS2BF16: 32 words, those of `low` first."""
    order = ir.Constant(ir.VectorType(_i32, 2 * ROWS), list(range(2 * ROWS)))
    return builder.shuffle_vector(
        *(simd.narrow_bf16_in_words(builder, x) for x in (low, high)), order
    )


def _multiply_pairs(builder, c, a, b):
    """VDPBF16PS: to each float of c the products of the odd, then of the even words of a pair."""
    halves = [_halves(builder, builder.bitcast(x, _words)) for x in (a, b)]
    for x, y in reversed(list(zip(*halves, strict=True))):
        c = simd.fuse(builder, x, y, c)
    return c


def _multiply_shorts(builder, a, b):
    """VPMADDWD: the sums of the products of neighbours."""
    wide = ir.VectorType(_i32, 2 * ROWS)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = (_lanes(builder, products, list(range(i, 2 * ROWS, 2))) for i in (0, 1))
    return builder.add(even, odd)


def _reduce(builder, value, how, *_):
    """VREDUCEPS: what a float has above its floor; 0 of an infinity."""
    assert how.constant == 1
    floor = _call_llvm(builder, "floor.v16f32", _floats, [value])
    largest = ir.Constant(_floats, [3.4028234663852886e38] * ROWS)
    size = _call_llvm(builder, "fabs.v16f32", _floats, [value])
    is_infinite = builder.fcmp_ordered(">", size, largest)
    return builder.select(
        is_infinite, ir.Constant(_floats, [0.0] * ROWS), builder.fsub(value, floor)
    )


def _scale(builder, value, power, *_):
    """VSCALEFPS: value * 2^floor(power), rounded once for normal values."""
    for name, limit in (("maxnum", -252.0), ("minnum", 254.0)):  # of NaN the limit
        limits = ir.Constant(_floats, [limit] * ROWS)
        power = _call_llvm(builder, f"{name}.v16f32", _floats, [power, limits])
    whole = builder.fptosi(_call_llvm(builder, "floor.v16f32", _floats, [power]), _words)
    half = builder.ashr(whole, simd.constant(_words, 1))
    for part in (half, builder.sub(whole, half)):
        bits = builder.shl(builder.add(part, simd.constant(_words, 127)), simd.constant(_words, 23))
        value = builder.fmul(value, builder.bitcast(bits, _floats))
    return value


def _look_up(builder, table, index):
    """VPERMPS: table[index & 15]."""
    found = ir.Constant(_floats, ir.Undefined)
    for lane in map(_i32, range(ROWS)):
        place = builder.and_(builder.extract_element(index, lane), _i32(ROWS - 1))
        found = builder.insert_element(found, builder.extract_element(table, place), lane)
    return found


# AVX-512 where this CPU has none.
_WIDE = {
    "x86.avx512bf16.cvtneps2bf16.512": simd.narrow_bf16_in_words,
    "x86.avx512bf16.cvtne2ps2bf16.512": _narrow_two,
    "x86.avx512bf16.dpbf16ps.512": _multiply_pairs,
    "x86.avx512.pmaddw.d.512": _multiply_shorts,
    "x86.avx512.mask.reduce.ps.512": _reduce,
    "x86.avx512.mask.scalef.ps.512": _scale,
    "x86.avx512.permvar.sf.512": _look_up,
}


def _call(builder, name, result, operands):
    if not _is_wide and name in _WIDE:
        return _WIDE[name](builder, *operands)
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
    assert "tile" not in name, name
    assert _is_wide or "avx512" not in name, name
    return _call_llvm(builder, name, result, operands)


def install() -> None:
    """Compile kernels for the matrix unit from now on; the CPU must have AVX2."""
    assert _found.get("avx2"), "registers of 16 bytes have no fused products"
    libc = ctypes.CDLL(None)
    assert libc.pthread_key_create(ctypes.byref(_key), None) == 0
    llvm.add_symbol("software_tiles_key", ctypes.addressof(_key))
    simd.call_llvm = _call
    simd.HAS_TILES = amx.HAS_AMX = True


if __name__ == "__main__":
    import pytest

    install()
    sys.exit(pytest.main(sys.argv[1:]))
