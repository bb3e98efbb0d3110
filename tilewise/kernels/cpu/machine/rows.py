"""Copy rows of tensors in memory to and from rows of scratch.

What      A tensor of any dtype and strides is an address and byte strides; its dtype is a small
          int, so that one compiled kernel serves them all. Scratch is a one-dimensional array of
          float32, float64 or, as uint16, bfloat16.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  moves one row of `count` elements that are contiguous in memory.
Traffic   each element is read once and written once; scratch stays in the L2 cache.
Numerics  widening is exact, narrowing rounds to nearest even. `load_row` returns 0.0, or NaN when
          the row contains an infinity or NaN, so that callers can keep those of hidden keys out.
"""

from __future__ import annotations

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.gemm import lanes_in
from tilewise.kernels.cpu.machine.threads import inner

F32, BF16, F16, F64 = 0, 1, 2, 3
DTYPE_CODES = {torch.float32: F32, torch.bfloat16: BF16, torch.float16: F16, torch.float64: F64}

# Without conversion instructions LLVM calls a function for float16 that may not exist; the code
# below must still compile there, and the launchers refuse float16 (see `why_not_dtype`).
_HALF = ir.HalfType() if simd.HAS_HALF else ir.FloatType()
_STORED = {F32: ir.FloatType(), BF16: ir.IntType(16), F16: _HALF, F64: ir.DoubleType()}
_WIDTH = {"half": 2, "float": 4, "double": 8}
_SIZE = {F32: 4, BF16: 2, F16: 2, F64: 8}
_FIRST = ir.Constant(ir.IntType(32), 0)


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """Return why CPU kernels cannot compute in `dtype`, or None if they can: float32, float64,
    bfloat16, and float16 where the CPU converts it."""
    if dtype not in DTYPE_CODES:
        return f"dtype must be float32, float16, bfloat16 or float64, got {dtype}"
    if dtype == torch.float16 and not simd.HAS_HALF:
        return "float16 needs a CPU with float16 conversion instructions (F16C)"
    return None


def _convert(builder, value, target):
    """Return a float vector with its elements converted to the LLVM float type `target`.

    The vector keeps its number of elements, whatever it is.
    """
    kind = ir.VectorType(target, value.type.count)
    have, want = _WIDTH[str(value.type.element)], _WIDTH[str(target)]
    if have == want:
        return value
    if abs(have - want) == 6:  # LLVM would call a function for double <-> half that may not exist
        value = _convert(builder, value, ir.FloatType())
    return builder.fpext(value, kind) if have < want else builder.fptrunc(value, kind)


def _reader(code, is_scalar):
    @intrinsic
    def read(typingctx, like, address):
        dtype = simd.float_of(like)

        def codegen(context, builder, sig, args):
            target = simd.vector_ir(dtype)
            kind = ir.VectorType(_STORED[code], 1 if is_scalar else target.count)
            pointer = builder.inttoptr(args[1], kind.as_pointer())
            value = builder.load(pointer, align=_SIZE[code])
            if code == BF16:
                value = simd.widen_bf16(builder, value)
            value = _convert(builder, value, target.element)
            return builder.extract_element(value, _FIRST) if is_scalar else value

        result = dtype if is_scalar else simd.Vector(dtype)
        return result(like, types.int64), codegen

    return read


def _writer(code, is_scalar):
    @intrinsic
    def write(typingctx, address, value):
        def codegen(context, builder, sig, args):
            number = simd.broadcast(builder, args[1], 1) if is_scalar else args[1]
            if code == BF16:
                number = simd.narrow_bf16(builder, _convert(builder, number, ir.FloatType()))
            else:
                number = _convert(builder, number, _STORED[code])
            pointer = builder.inttoptr(args[0], number.type.as_pointer())
            builder.store(number, pointer, align=_SIZE[code])
            return context.get_dummy_value()

        return types.void(types.int64, value), codegen

    return write


def _named(function, code):
    """Compile `function` for kernels under its name with `code` in it, and return the compiled
    function.

    Symbols consist of the name and a counter that starts again in each process, so two functions of
    one name could be confused when cached code meets newly compiled code.
    """
    function.__name__ = function.__qualname__ = f"{function.__name__}_row_{code}"
    return inner(function)


def _row_loader(code):
    read, read_one, size = _reader(code, False), _reader(code, True), _SIZE[code]

    def load(like, scratch, start, address, count):
        lanes = lanes_in(like)
        zero = simd.splat(like, 0.0)
        check = zero
        done = count // lanes * lanes
        for column in range(0, done, lanes):
            vector = read(like, address + column * size)
            check = simd.fma(vector, zero, check)
            simd.store(scratch, start + column, vector)
        total = simd.sum_lanes(check)
        for column in range(done, count):
            number = read_one(like, address + column * size)
            total += number - number
            simd.store_one(scratch, start + column, number)
        return total

    return _named(load, code)


def _row_copier(code):
    read, read_one, size = _reader(code, False), _reader(code, True), _SIZE[code]

    def copy(like, scratch, ld, count, start, row_bytes, head_bytes, group, first, rows):
        lanes = lanes_in(like)
        done = count // lanes * lanes
        query, member = first // group, first % group
        for row in range(rows):
            base, address = row * ld, start + query * row_bytes + member * head_bytes
            for column in range(0, done, lanes):
                simd.store(scratch, base + column, read(like, address + column * size))
            for column in range(done, count):
                simd.store_one(scratch, base + column, read_one(like, address + column * size))
            member += 1
            if member == group:
                query, member = query + 1, 0

    return _named(copy, code)


def _row_multiplier(code):
    read, read_one, size = _reader(code, False), _reader(code, True), _SIZE[code]

    def dot(like, a, b, count):
        lanes = lanes_in(like)
        even = odd = simd.splat(like, 0.0)
        done = count // (2 * lanes) * (2 * lanes)
        for column in range(0, done, 2 * lanes):
            at, later = column * size, (column + lanes) * size
            even = simd.fma(read(like, a + at), read(like, b + at), even)
            odd = simd.fma(read(like, a + later), read(like, b + later), odd)
        total = simd.sum_lanes(simd.add(even, odd))
        for column in range(done, count):
            total += read_one(like, a + column * size) * read_one(like, b + column * size)
        return total

    return _named(dot, code)


def _row_storer(code):
    write, write_one, size = _writer(code, False), _writer(code, True), _SIZE[code]

    def store(like, scratch, start, factor, address, count):
        lanes = lanes_in(like)
        factors = simd.splat(like, factor)
        done = count // lanes * lanes
        for column in range(0, done, lanes):
            vector = simd.load(scratch, start + column)
            write(address + column * size, simd.mul(vector, factors))
        for column in range(done, count):
            write_one(address + column * size, scratch[start + column] * factor)

    return _named(store, code)


def _rows_storer(code):
    write, write_one, size = _writer(code, False), _writer(code, True), _SIZE[code]

    def store_all(like, scratch, ld, factor, start, row_bytes, rows, count):
        lanes = lanes_in(like)
        factors = simd.splat(like, factor)
        done = count // lanes * lanes
        for row in range(rows):
            base, address = row * ld, start + row * row_bytes
            for column in range(0, done, lanes):
                vector = simd.load(scratch, base + column)
                write(address + column * size, simd.mul(vector, factors))
            for column in range(done, count):
                write_one(address + column * size, scratch[base + column] * factor)

    return _named(store_all, code)


_load_f32, _load_bf16, _load_f16, _load_f64 = (_row_loader(c) for c in (F32, BF16, F16, F64))
_copy_f32, _copy_bf16, _copy_f16, _copy_f64 = (_row_copier(c) for c in (F32, BF16, F16, F64))
_dot_f32, _dot_bf16, _dot_f16, _dot_f64 = (_row_multiplier(c) for c in (F32, BF16, F16, F64))
_store_f32, _store_bf16, _store_f16, _store_f64 = (_row_storer(c) for c in (F32, BF16, F16, F64))
_all_f32, _all_bf16, _all_f16, _all_f64 = (_rows_storer(c) for c in (F32, BF16, F16, F64))
_one_f32, _one_bf16, _one_f16, _one_f64 = (_reader(c, True) for c in (F32, BF16, F16, F64))

read_f32, write_f32 = _one_f32, _writer(F32, True)  # single elements at an address


@inner
def load_row(like, code, scratch, start, address, count):
    """Load the `count` elements at `address` into scratch[start : start + count], converted to its
    type; return 0.0, or NaN if one of them is infinite or NaN.

    Args:
        like: any array of the float type to compute in, or a bare pointer, as scratch may be.
        code: the dtype code of the row in memory.
        scratch: an array of like's type, or uint16 for bfloat16.
    """
    if code == BF16:
        return _load_bf16(like, scratch, start, address, count)
    if code == F32:
        return _load_f32(like, scratch, start, address, count)
    if code == F16:
        return _load_f16(like, scratch, start, address, count)
    return _load_f64(like, scratch, start, address, count)


@inner
def copy_rows(
    like, code, scratch, ld, count, start, row_bytes, head_bytes, group, first, rows, all_rows
):
    """Copy `rows` flat rows from `first` on to scratch[0:], `ld` elements apart, converted to its
    type, with zeros behind them up to `all_rows` rows.

    Flat row r is query r // group of head r % group, at address start + query row_bytes + head
    head_bytes. Unlike `load_row` there is no check for finite values.
    """
    if code == BF16:
        _copy_bf16(like, scratch, ld, count, start, row_bytes, head_bytes, group, first, rows)
    elif code == F32:
        _copy_f32(like, scratch, ld, count, start, row_bytes, head_bytes, group, first, rows)
    elif code == F16:
        _copy_f16(like, scratch, ld, count, start, row_bytes, head_bytes, group, first, rows)
    else:
        _copy_f64(like, scratch, ld, count, start, row_bytes, head_bytes, group, first, rows)
    for index in range(rows * ld, all_rows * ld):
        scratch[index] = 0


@inner
def dot_rows(like, code, a, b, count):
    """Return the sum of the products of two rows of `count` elements at addresses a and b, both of
    the dtype with this code, computed in like's float type."""
    if code == BF16:
        return _dot_bf16(like, a, b, count)
    if code == F32:
        return _dot_f32(like, a, b, count)
    if code == F16:
        return _dot_f16(like, a, b, count)
    return _dot_f64(like, a, b, count)


@inner
def store_row(like, code, scratch, start, factor, address, count):
    """Store factor * scratch[start : start + count] to `address`, converted to the dtype with this
    code; scratch is of like's type."""
    if code == BF16:
        _store_bf16(like, scratch, start, factor, address, count)
    elif code == F32:
        _store_f32(like, scratch, start, factor, address, count)
    elif code == F16:
        _store_f16(like, scratch, start, factor, address, count)
    else:
        _store_f64(like, scratch, start, factor, address, count)


@inner
def store_rows(like, code, scratch, ld, factor, start, row_bytes, rows, count):
    """Store factor * `rows` rows of scratch, `ld` elements apart, as `store_row` does: to addresses
    from `start` on, row_bytes apart."""
    if code == BF16:
        _all_bf16(like, scratch, ld, factor, start, row_bytes, rows, count)
    elif code == F32:
        _all_f32(like, scratch, ld, factor, start, row_bytes, rows, count)
    elif code == F16:
        _all_f16(like, scratch, ld, factor, start, row_bytes, rows, count)
    else:
        _all_f64(like, scratch, ld, factor, start, row_bytes, rows, count)


@inner
def load_strided(like, code, scratch, start, address, stride, count):
    """Load `count` elements of the dtype with this code, `stride` bytes apart from `address` on,
    into scratch[start : start + count]; a stride of 0 repeats one."""
    for column in range(count):
        where = address + column * stride
        if code == BF16:
            scratch[start + column] = _one_bf16(like, where)
        elif code == F32:
            scratch[start + column] = _one_f32(like, where)
        elif code == F16:
            scratch[start + column] = _one_f16(like, where)
        else:
            scratch[start + column] = _one_f64(like, where)
