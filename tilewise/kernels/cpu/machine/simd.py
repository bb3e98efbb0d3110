"""Explicit vectors for numba: one `Vector` value is one register of the CPU.

What      numba's own loops vectorise when LLVM proves that they may; attention needs exp2, masked
          rows and bfloat16, where it cannot. These intrinsics emit the vector instructions of the
          LLVM language, so a kernel is written lane by lane in Python and runs at register width.
Grid      none: every function is inlined into the kernel that calls it.
One call  LANES elements: 16 float32 with AVX-512, 8 with AVX2, 4 with SSE or NEON; float64 half.
Traffic   loads and stores are unaligned; an address is an int, an array a one-dimensional ndarray.
Numerics  bfloat16 lives in uint16 arrays and is rounded to nearest even; exp2 is accurate to one
          unit in the last place on (-inf, 126], flushes results below 2^-126 to 0, keeps NaN.
"""

from __future__ import annotations

import math
from decimal import Decimal, localcontext
from functools import partial

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from tilewise.kernels.cpu.machine.features import features, grants_tiles

_features = features()
HAS_BF16_DOT = bool(_features.get("avx512bf16"))
# The matrix unit (Intel AMX): the CPU has tile registers, and Linux lets this process use them.
HAS_TILES = HAS_BF16_DOT and bool(_features.get("amx-bf16")) and grants_tiles()
HAS_HALF = bool(_features.get("f16c")) or llvm.get_default_triple().startswith(("aarch64", "arm64"))
REGISTER_BYTES = 64 if _features.get("avx512f") else 32 if _features.get("avx2") else 16
HAS_INTEGER_DOT = REGISTER_BYTES == 32 or bool(_features.get("avx512bw"))  # VPMADDWD at full width
NUM_REGISTERS = 16 if REGISTER_BYTES == 32 else 32

_i16, _i32, _i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_f32, _f64 = ir.FloatType(), ir.DoubleType()


def lanes_of(dtype) -> int:
    """Return how many numbers of numba or numpy `dtype` a register holds; bfloat16 words count as
    float32."""
    return REGISTER_BYTES // (8 if dtype in (types.float64, np.float64) else 4)


class Vector(types.Type):
    """The numba type of a register of floats."""

    def __init__(self, dtype: types.Float) -> None:
        self.dtype = dtype
        super().__init__(name=f"Vector({dtype})")


class Mask(types.Type):
    """The numba type of a register of truth values, as many as `dtype` has lanes."""

    def __init__(self, dtype: types.Float) -> None:
        self.dtype = dtype
        super().__init__(name=f"Mask({dtype})")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, vector_ir(fe_type.dtype))


@register_model(Mask)
class _MaskModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, ir.VectorType(ir.IntType(1), lanes_of(fe_type.dtype)))


def float_of(array: types.Array) -> types.Float:
    """Return the numba type of the numbers of a vector loaded from an array of this type: float64
    for float64, else float32."""
    return types.float64 if array.dtype == types.float64 else types.float32


def vector_ir(dtype) -> ir.VectorType:
    return ir.VectorType(_f64 if dtype == types.float64 else _f32, lanes_of(dtype))


def pointer_to(context, builder, array_type, array, index):
    """Emit the LLVM pointer to array[index]; the array, of the numba type `array_type`, may be a
    bare pointer, see `threads.bare`."""
    if isinstance(array_type, types.CPointer):
        return builder.gep(array, [index])
    data = cgutils.create_struct_proxy(array_type)(context, builder, value=array).data
    return builder.gep(data, [index])


def call_llvm(builder, name, result, operands):
    kinds = [operand.type for operand in operands]
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(result, kinds), f"llvm.{name}"
    )
    return builder.call(function, operands)


def suffix_of(kind: ir.Type) -> str:
    if not isinstance(kind, ir.VectorType):
        return "f64" if kind == _f64 else "f32"
    return f"v{kind.count}f{64 if kind.element == _f64 else 32}"


def fuse(builder, a, b, c):
    """Emit a * b + c for scalars or vectors, fused where the CPU can."""
    return call_llvm(builder, f"fmuladd.{suffix_of(a.type)}", a.type, [a, b, c])


def constant(kind: ir.VectorType, value) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def broadcast(builder, scalar, count):
    kind = ir.VectorType(scalar.type, count)
    undefined = ir.Constant(kind, ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_i32, 0))
    return builder.shuffle_vector(
        first, undefined, ir.Constant(ir.VectorType(_i32, count), [0] * count)
    )


def load_vector(builder, pointer, kind, align):
    return builder.load(builder.bitcast(pointer, kind.as_pointer()), align=align)


def store_vector(builder, value, pointer, align):
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=align)


def load_at(builder, address, kind, align):
    """Emit a load of a vector of type `kind` from an address that is an int; `align` is in
    bytes."""
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store_at(builder, value, address, align):
    """Emit a store of a vector to an address that is an int; `align` is in bytes."""
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def widen_bf16(builder, bits):
    """Emit the conversion of <n x i16> bfloat16 bits to <n x float>, which is exact."""
    wide = ir.VectorType(_i32, bits.type.count)
    shifted = builder.shl(builder.zext(bits, wide), constant(wide, 16))
    return builder.bitcast(shifted, ir.VectorType(_f32, bits.type.count))


def narrow_bf16(builder, value):
    """Emit the conversion of <n x float> to <n x i16> bfloat16 bits, to nearest even; NaN stays a
    quiet NaN."""
    count = value.type.count
    if HAS_BF16_DOT and count == 16:
        kind = ir.VectorType(_i16, count)
        return call_llvm(builder, "x86.avx512bf16.cvtneps2bf16.512", kind, [value])
    return narrow_bf16_in_words(builder, value)


def narrow_bf16_in_words(builder, value):
    """Emit the same conversion as `narrow_bf16` by integer operations, for CPUs and widths without
    an instruction for it."""
    count = value.type.count
    wide = ir.VectorType(_i32, count)
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, constant(wide, 16)), constant(wide, 1))
    rounded = builder.add(bits, builder.add(odd, constant(wide, 0x7FFF)))
    is_nan = builder.fcmp_unordered("uno", value, value)
    quiet = builder.or_(bits, constant(wide, 0x00400000))
    kept = builder.select(is_nan, quiet, rounded)
    return builder.trunc(builder.lshr(kept, constant(wide, 16)), ir.VectorType(_i16, count))


@intrinsic
def load(typingctx, array, index):
    """Return the LANES elements array[index:] as a Vector; uint16 is read as bfloat16."""
    dtype = float_of(array)

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, array, *args)
        kind = vector_ir(dtype)
        if array.dtype == types.uint16:
            bits = load_vector(builder, pointer, ir.VectorType(_i16, kind.count), 2)
            return widen_bf16(builder, bits)
        return load_vector(builder, pointer, kind, 4)

    return Vector(dtype)(array, types.int64), codegen


@intrinsic
def store(typingctx, array, index, vector):
    """Store the lanes of `vector` to array[index:]; uint16 is written as bfloat16."""

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, array, *args[:2])
        value = args[2]
        if array.dtype == types.uint16:
            store_vector(builder, narrow_bf16(builder, value), pointer, 2)
        else:
            store_vector(builder, value, pointer, 4)
        return context.get_dummy_value()

    return types.void(array, types.int64, vector), codegen


@intrinsic
def store_pair(typingctx, array, index, even, odd):
    """Store LANES words of two bfloat16 to array[index:]: `even` in the low halves, `odd` in the
    high ones.

    In kernels for floats the call is in a branch that is never taken; for them it does nothing.
    """

    def codegen(context, builder, sig, args):
        if array.dtype != types.uint16:
            return context.get_dummy_value()
        pointer = pointer_to(context, builder, array, *args[:2])
        low, high = narrow_bf16(builder, args[2]), narrow_bf16(builder, args[3])
        count = low.type.count
        order = [half * count + lane for lane in range(count) for half in (0, 1)]
        order_ir = ir.Constant(ir.VectorType(_i32, 2 * count), order)
        store_vector(builder, builder.shuffle_vector(low, high, order_ir), pointer, 2)
        return context.get_dummy_value()

    return types.void(array, types.int64, even, odd), codegen


@intrinsic
def store_line(typingctx, array, index, low, high, total):
    """Store a cache line of 32 bfloat16 to array[index:]: the Vector `low`, then `high`; return the
    Vector `total` plus the stored numbers.

    Lane i adds numbers 2 i and 2 i + 1. Two stores of half a line cannot be forwarded to a load of
    the whole line. For float arrays, and without instructions for bfloat16, nothing is stored and
    `total` returned.
    """

    def codegen(context, builder, sig, args):
        array_, index_, low_, high_, total_ = args
        if array.dtype != types.uint16 or not HAS_BF16_DOT:
            return total_
        name = "x86.avx512bf16.cvtne2ps2bf16.512"
        line = call_llvm(builder, name, ir.VectorType(_i16, 32), [high_, low_])
        store_vector(builder, line, pointer_to(context, builder, array, array_, index_), 2)
        words = ir.VectorType(_i32, 16)
        ones = constant(words, 0x3F803F80)
        name, words_ = "x86.avx512bf16.dpbf16ps.512", builder.bitcast(line, words)
        return call_llvm(builder, name, total_.type, [total_, words_, ones])

    return total(array, types.int64, low, high, total), codegen


@intrinsic
def splat(typingctx, array, number):
    """Return a Vector with `number` in every lane, in the float type of `array`."""
    dtype = float_of(array)

    def codegen(context, builder, sig, args):
        scalar = context.cast(builder, args[1], number, dtype)
        return broadcast(builder, scalar, lanes_of(dtype))

    return Vector(dtype)(array, number), codegen


@intrinsic
def number(typingctx, array, value):
    """Return `value` converted to the float type of `array`, which may be a bare pointer."""
    dtype = float_of(array)

    def codegen(context, builder, sig, args):
        return context.cast(builder, args[1], value, dtype)

    return dtype(array, value), codegen


@intrinsic
def load_one(typingctx, array, index):
    """Return array[index] as a float; uint16 is read as bfloat16."""
    dtype = float_of(array)

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, array, *args)
        if array.dtype != types.uint16:
            return builder.load(pointer)
        bits = load_vector(builder, pointer, ir.VectorType(_i16, 1), 2)
        return builder.extract_element(widen_bf16(builder, bits), ir.Constant(_i32, 0))

    return dtype(array, types.int64), codegen


@intrinsic
def store_one(typingctx, array, index, number):
    """Store `number` to array[index]; uint16 is written as bfloat16."""
    dtype = float_of(array)

    def codegen(context, builder, sig, args):
        pointer = pointer_to(context, builder, array, *args[:2])
        scalar = context.cast(builder, args[2], number, dtype)
        if array.dtype == types.uint16:
            store_vector(builder, narrow_bf16(builder, broadcast(builder, scalar, 1)), pointer, 2)
        else:
            builder.store(scalar, pointer)
        return context.get_dummy_value()

    return types.void(array, types.int64, number), codegen


def _elementwise(emit):
    """Return the code generator of an intrinsic from emit(builder, *operands)."""

    def codegen(context, builder, sig, args):
        return emit(builder, *args)

    return codegen


@intrinsic
def add(typingctx, a, b):
    return a(a, a), _elementwise(lambda builder, x, y: builder.fadd(x, y))


@intrinsic
def sub(typingctx, a, b):
    return a(a, a), _elementwise(lambda builder, x, y: builder.fsub(x, y))


@intrinsic
def mul(typingctx, a, b):
    return a(a, a), _elementwise(lambda builder, x, y: builder.fmul(x, y))


@intrinsic
def div(typingctx, a, b):
    return a(a, a), _elementwise(lambda builder, x, y: builder.fdiv(x, y))


@intrinsic
def fma(typingctx, a, b, c):
    """Return a * b + c, of vectors or of numbers, fused where the CPU can."""
    return a(a, a, a), _elementwise(fuse)


@intrinsic
def maximum(typingctx, a, b):
    """Return the larger of a and b, lane by lane; `b` where either is NaN."""
    return a(a, a), _elementwise(
        lambda builder, x, y: builder.select(builder.fcmp_ordered(">", x, y), x, y)
    )


@intrinsic
def minimum(typingctx, a, b):
    """Return the smaller of a and b, lane by lane; `a` where either is NaN."""
    return a(a, a), _elementwise(
        lambda builder, x, y: builder.select(builder.fcmp_ordered(">", x, y), y, x)
    )


@intrinsic
def absolute(typingctx, a):
    def emit(builder, x):
        return call_llvm(builder, f"fabs.{suffix_of(x.type)}", x.type, [x])

    return a(a), _elementwise(emit)


@intrinsic
def ceil(typingctx, a):
    def emit(builder, x):
        return call_llvm(builder, f"ceil.{suffix_of(x.type)}", x.type, [x])

    return a(a), _elementwise(emit)


@intrinsic
def select(typingctx, mask, a, b):
    """Return the Vector with lanes of a where `mask` is set, of b elsewhere."""
    return a(mask, a, a), _elementwise(lambda builder, m, x, y: builder.select(m, x, y))


@intrinsic
def holds_everywhere(typingctx, mask):
    """Return whether a mask is set in every lane."""

    def emit(builder, m):
        bits = builder.bitcast(m, ir.IntType(m.type.count))
        return builder.icmp_unsigned("==", bits, ir.Constant(bits.type, -1))

    return types.boolean(mask), _elementwise(emit)


@intrinsic
def within(typingctx, array, start, low, high):
    """Return the mask of the lanes whose index start + lane lies in low ... high - 1."""
    dtype = float_of(array)

    def codegen(context, builder, sig, args):
        kind = ir.VectorType(_i32, lanes_of(dtype))
        lane = ir.Constant(kind, list(range(kind.count)))
        first, end = (
            broadcast(builder, builder.trunc(builder.sub(bound, args[1]), _i32), kind.count)
            for bound in args[2:]
        )
        return builder.and_(
            builder.icmp_signed(">=", lane, first), builder.icmp_signed("<", lane, end)
        )

    return Mask(dtype)(array, types.int64, types.int64, types.int64), codegen


@intrinsic
def at_least(typingctx, a, b):
    """Return the mask of a >= b; false where either is NaN."""
    return Mask(a.dtype)(a, a), _elementwise(lambda builder, x, y: builder.fcmp_ordered(">=", x, y))


def chebyshev(function, low, high, degree) -> list[float]:
    """Return the coefficients, constant first, of the polynomial of this degree that interpolates
    `function` at Chebyshev nodes of low ... high.

    `function` is of Decimals: with 53 bits the coefficients of degree 12 would err by 30 units.
    """
    with localcontext(prec=50):
        middle, half = Decimal(low + high) / 2, Decimal(high - low) / 2
        angles = [math.pi * (number + 0.5) / (degree + 1) for number in range(degree + 1)]
        nodes = [middle + half * Decimal(math.cos(angle)) for angle in angles]
        differences = [Decimal(function(node)) for node in nodes]  # Newton's, divided
        for step in range(1, degree + 1):
            for i in range(degree, step - 1, -1):
                differences[i] -= differences[i - 1]
                differences[i] /= nodes[i] - nodes[i - step]
        found: list[Decimal] = []
        for difference, node in zip(reversed(differences), reversed(nodes), strict=True):
            shifted = [Decimal(0), *found]
            lowered = [*(node * x for x in found), Decimal(0)]
            found = [x - y for x, y in zip(shifted, lowered, strict=True)]
            found[0] += difference
        return list(map(float, found))


def exp2_of(x: Decimal) -> Decimal:
    """Return 2^x, a function for `chebyshev`."""
    return Decimal(2) ** x


# Interpolation errors, relative: 4e-9 (float32 rounds at 6e-8) and 3e-17 (float64 at 1.1e-16). The
# constants are 1, since a node is 0: the power 0 is exact.
_EXP2 = {32: chebyshev(exp2_of, -0.5, 0.5, 6), 64: chebyshev(exp2_of, -0.5, 0.5, 12)}
_TANH_LIMIT = 0.55  # below it 1 - exp(-2x) cancels, so tanh(x) / x is a polynomial in x^2


def _tanh_ratio(square: Decimal) -> Decimal:
    root = square.sqrt()
    decay = (-2 * root).exp()
    return (1 - decay) / (1 + decay) / root


_TANH = {
    32: chebyshev(_tanh_ratio, 0.0, _TANH_LIMIT**2, 5),
    64: chebyshev(_tanh_ratio, 0.0, _TANH_LIMIT**2, 11),
}


def horner(builder, x, coefficients):
    """Emit the value at x of the polynomial with these coefficients, constant first."""
    result = constant(x.type, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = fuse(builder, result, x, constant(x.type, coefficient))
    return result


def _emit_exp2(builder, x):
    """Emit 2^x = 2^n 2^f of a vector, with f in [-1/2, 1/2], 0 where it would be subnormal; adding
    1.5 * 2^mantissa to x leaves n in the low bits."""
    kind = x.type
    is_double = kind.element == _f64
    word = ir.VectorType(_i64 if is_double else _i32, kind.count)
    mantissa, smallest = (52, -1022.0) if is_double else (23, -126.0)
    magic = constant(kind, 1.5 * 2.0**mantissa)
    underflows = builder.fcmp_ordered("<", x, constant(kind, smallest))
    shifted = builder.fadd(x, magic)
    fraction = builder.fsub(x, builder.fsub(shifted, magic))
    power = horner(builder, fraction, _EXP2[64 if is_double else 32])
    exponent = builder.shl(builder.bitcast(shifted, word), constant(word, mantissa))
    result = builder.bitcast(builder.add(builder.bitcast(power, word), exponent), kind)
    return builder.select(underflows, constant(kind, 0.0), result)


def _emit_tanh(builder, x):
    kind = x.type
    magnitude = call_llvm(builder, f"fabs.{suffix_of(kind)}", kind, [x])
    one = constant(kind, 1.0)
    decay = _emit_exp2(builder, builder.fmul(magnitude, constant(kind, -2.0 / math.log(2.0))))
    large = builder.fdiv(builder.fsub(one, decay), builder.fadd(one, decay))
    large = call_llvm(builder, f"copysign.{suffix_of(kind)}", kind, [large, x])
    ratio = horner(builder, builder.fmul(x, x), _TANH[64 if kind.element == _f64 else 32])
    is_small = builder.fcmp_ordered("<", magnitude, constant(kind, _TANH_LIMIT))
    return builder.select(is_small, builder.fmul(x, ratio), large)


@intrinsic
def exp2(typingctx, a):
    return a(a), _elementwise(_emit_exp2)


@intrinsic
def tanh(typingctx, a):
    return a(a), _elementwise(_emit_tanh)


def _reduce(combine, builder, x):
    """Emit the reduction of a vector to a scalar: combine(builder, low, high) folds the upper half
    into the lower until one lane is left, in a fixed order."""
    count = x.type.count
    while count > 1:
        count //= 2
        undefined = ir.Constant(x.type, ir.Undefined)
        low, high = (
            builder.shuffle_vector(
                x, undefined, ir.Constant(ir.VectorType(_i32, count), list(range(s, s + count)))
            )
            for s in (0, count)
        )
        x = combine(builder, low, high)
    return builder.extract_element(x, ir.Constant(_i32, 0))


@intrinsic
def sum_lanes(typingctx, a):
    return a.dtype(a), _elementwise(partial(_reduce, lambda b, x, y: b.fadd(x, y)))


@intrinsic
def max_lanes(typingctx, a):
    def larger(builder, x, y):
        return builder.select(builder.fcmp_ordered(">", x, y), x, y)

    return a.dtype(a), _elementwise(partial(_reduce, larger))
