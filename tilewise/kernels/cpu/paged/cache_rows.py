"""Rows of a cache as vectors of floats, read in place: the building blocks of decoding loops.

What      loads of 64 bytes or less of a row, widened; how many elements they hold, in which order.
Grid      none: emitted into the loops of `dot_products.py` and `weighted_sums.py`.
One call  a unit of a row: 1 to 4 registers of floats.
Traffic   each unit comes from memory or cache once per call.
Numerics  widening is exact. 8-bit numbers are returned without their scale, which the caller
applies.
          A word of two bfloat16 becomes two vectors, of its even and its odd elements: rows of q
          and of the sums are kept in that order, see `decode.position_of`.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.threads import inlined
from tilewise.kernels.cpu.paged.quantise import widen_e4m3, widen_int8

HEADS = 4  # query heads per pass: 16 sums with AVX-512 are 4 keys x 4 heads
LINE = 64  # bytes of a prefetched line
_i1, _i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
# Caches are distinguished by the dtype of an empty array; numba has no numbers of these two.
_BYTES = (types.int8, types.uint8)  # int8, float8_e4m3fn
_MOST_SUMS = simd.NUM_REGISTERS // 2


@inlined
def heads_of_pass(group, lanes):
    """Return how many query heads one pass over keys computes, of a key head with `group` of them:
    HEADS or 1.

    A register of fewer than HEADS lanes, as of two float64 with SSE or NEON, takes one head.
    """
    return HEADS if group > 1 and lanes >= HEADS else 1


def _vectors(cache_type):
    """Return how many registers of floats one load from a cache of this numba type fills: 1, 2 or
    4."""
    if cache_type.dtype in _BYTES:
        return min(4, _MOST_SUMS // HEADS)
    return 2 if cache_type.dtype == types.uint16 else 1


def units_of(cache_type):
    """Return how many loads of a row a pass of four heads takes at once, so that their columns'
    sums stay in registers: 1 or 2."""
    return max(1, min(2, _MOST_SUMS // (HEADS * _vectors(cache_type))))


def _sizes(count):
    @intrinsic
    def elements(typingctx, cache_like, like):
        dtype = simd.float_of(like)

        def codegen(context, builder, sig, args):
            return _i64(simd.lanes_of(dtype) * count(cache_like))

        return types.int64(cache_like, like), codegen

    return elements


lanes_in = _sizes(lambda cache_type: 1)  # elements of a register, known at compile time
unit_of = _sizes(_vectors)  # elements of one load
# Elements whose even ones are stored before the odd: a load of bfloat16 pairs, else a register.
order_of = _sizes(lambda cache_type: 2 if cache_type.dtype == types.uint16 else 1)
# Columns whose sums four heads keep in registers.
span_of = _sizes(lambda cache_type: units_of(cache_type) * _vectors(cache_type))


@intrinsic
def has_bytes(typingctx, cache_like):
    """Return whether a cache, given by an empty array of its type, has 8-bit numbers; known at
    compile time unlike its itemsize."""

    def codegen(context, builder, sig, args):
        return _i1(cache_like.dtype in _BYTES)

    return types.boolean(cache_like), codegen


@intrinsic
def has_words(typingctx, array):
    """Return whether an array or a bare pointer has 16-bit numbers, known at compile time."""

    def codegen(context, builder, sig, args):
        return _i1(array.dtype.bitwidth == 16)

    return types.boolean(array), codegen


def are_integers(cache_type, query) -> bool:
    """Return whether keys of a cache are multiplied as integers: those of an int8 cache are, with
    16-bit queries; both arguments are numba types."""
    return cache_type.dtype == types.int8 and query.dtype == types.uint16


@intrinsic
def has_integers(typingctx, cache_like, query):
    """Return whether keys of a cache are multiplied as integers, see `are_integers`; known at
    compile time."""

    def codegen(context, builder, sig, args):
        return _i1(are_integers(cache_like, query))

    return types.boolean(cache_like, query), codegen


class Rows:
    """An emitter of loads of rows of a cache as vectors of floats, for a cache of one numba type;
    kernels' intrinsics make it when they are compiled."""

    def __init__(self, builder, cache_type, float_type):
        self.builder = builder
        self.vector = simd.vector_ir(float_type)
        self.lanes = self.vector.count
        self.is_bf16 = cache_type.dtype == types.uint16
        self.is_f16 = cache_type.dtype == types.int16
        self.widen = {types.int8: widen_int8, types.uint8: widen_e4m3}.get(cache_type.dtype)
        self.element_size = cache_type.dtype.bitwidth // 8
        self.vectors = _vectors(cache_type)
        word = _i32 if self.is_bf16 else _i16 if self.is_f16 else self.vector.element
        self.word = ir.VectorType(word, self.lanes)
        if self.widen:
            self.word = ir.VectorType(_i8, self.lanes * self.vectors)
        self.unit_bytes = self.vectors * self.lanes * self.element_size

    def load_words(self, address, mask=None):
        """Emit the load of one unit at `address` (an int), and return it as a vector of words as
        they are stored, zero where `mask` is not set."""
        builder = self.builder
        pointer = builder.inttoptr(address, self.word.as_pointer())
        if mask is None:
            return builder.load(pointer, align=self.element_size)
        name = str(self.word.element)
        kind = {"float": "f32", "double": "f64"}.get(name, name)
        return simd.call_llvm(
            builder,
            f"masked.load.v{self.word.count}{kind}.p0",
            self.word,
            [pointer, _i32(self.element_size), mask, ir.Constant(self.word, None)],
        )

    def load(self, address, mask=None):
        """Emit the load of one unit at `address`, and return it as a list of 1, 2 or 4 vectors of
        floats, zero where `mask` is not set; see `part` for their order."""
        words = self.load_words(address, mask)
        return [self.part(words, index) for index in range(self.vectors)]

    def part(self, words, index):
        """Emit the widening of a part of a unit's words, and return vector `index` of its floats:
        for bfloat16 the even elements (0) or the odd ones (1), else the next run of lanes."""
        builder = self.builder
        if self.widen:
            order = range(self.lanes * index, self.lanes * (index + 1))
            lanes = ir.Constant(ir.VectorType(_i32, self.lanes), list(order))
            return self.widen(builder, builder.shuffle_vector(words, words, lanes))
        if self.is_bf16:
            if index == 0:  # the even elements
                half = builder.shl(words, simd.constant(self.word, 16))
            else:
                half = builder.and_(words, simd.constant(self.word, 0xFFFF0000))
            return builder.bitcast(half, self.vector)
        if self.is_f16:
            half = ir.HalfType() if simd.HAS_HALF else _i16
            if not simd.HAS_HALF:  # refused by the launchers, but must compile
                return ir.Constant(self.vector, None)
            return builder.fpext(
                builder.bitcast(words, ir.VectorType(half, self.lanes)), self.vector
            )
        return words

    def mask(self, elements):
        """Emit the mask of the words of a unit that hold its first `elements` elements, an i64;
        bfloat16 has two to a word."""
        count = self.word.count
        words = self.builder.sdiv(elements, _i64(2)) if self.is_bf16 else elements
        lane = ir.VectorType(_i32, count)
        bound = simd.broadcast(self.builder, self.builder.trunc(words, _i32), count)
        return self.builder.icmp_signed("<", ir.Constant(lane, list(range(count))), bound)


def emit_loop(builder, count, values, body, name):
    """Emit `for i in range(count): values = body(i, values)` and return the final values."""
    entry = builder.block
    inside, done = (builder.append_basic_block(f"{name}.{part}") for part in ("body", "done"))
    builder.cbranch(builder.icmp_signed(">", count, _i64(0)), inside, done)
    builder.position_at_end(inside)
    index = builder.phi(_i64)
    current = [builder.phi(value.type) for value in values]
    following = body(index, current)
    after = builder.add(index, _i64(1))
    end_of_body = builder.block
    builder.cbranch(builder.icmp_signed("<", after, count), inside, done)
    index.add_incoming(_i64(0), entry)
    index.add_incoming(after, end_of_body)
    for phi, first, later in zip(current, values, following, strict=True):
        phi.add_incoming(first, entry)
        phi.add_incoming(later, end_of_body)
    builder.position_at_end(done)
    finals = []
    for first, later in zip(values, following, strict=True):
        phi = builder.phi(first.type)
        phi.add_incoming(first, entry)
        phi.add_incoming(later, end_of_body)
        finals.append(phi)
    return finals
