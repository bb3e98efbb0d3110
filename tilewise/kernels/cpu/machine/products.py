"""Products of a row of keys and a row of a query, register by register, and their sums.

What      three kinds of product: floats; pairs of bfloat16 (VDPBF16PS); and 8-bit keys with queries
          that were rounded to 16-bit integers, two products to a lane (VPMADDWD).
Grid      none: emitted into the loops of `paged/dot_products.py` and `paged/weighted_sums.py`.
One call  one more register of products, or all sums folded into one register.
Traffic   none.
Numerics  integers are exact: 512 products of 16 and 8 bits fit 32. Rounding a query to 16 bits
          changes it by at most 2^-16 of its largest element.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types

from tilewise.kernels.cpu.machine import simd

_i16, _i32, _i64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
LONGEST_INTEGER_DOT = 512  # elements: 512 * 32,767 * 128 < 2^31
LARGEST_INTEGER = 32767.0


def multiply_pairs(builder, a, b):
    """Emit the product of two vectors <2n x i16>: <n x i32>, each lane the sum of two neighbouring
    products; n is 8 or 16."""
    lanes = a.type.count // 2
    name = {8: "x86.avx2.pmadd.wd", 16: "x86.avx512.pmaddw.d.512"}[lanes]
    return simd.call_llvm(builder, name, ir.VectorType(_i32, lanes), [a, b])


class _Floats:
    """An emitter of products of keys, widened to floats as `rows` reads them, with a query of
    floats. Kernels' intrinsics ask it for parts of a key and of a query, and for the sum of their
    products."""

    def __init__(self, builder, rows):
        self.builder, self.rows = builder, rows
        self.sums = rows.vector
        self.parts = rows.vectors

    def key_part(self, words, part):
        return self.rows.part(words, part)

    def query_part(self, row, column, part):
        at = self.builder.add(column, _i64(part * self.rows.lanes))
        return simd.load_vector(self.builder, self.builder.gep(row, [at]), self.sums, 4)

    def multiply_add(self, a, b, c):
        return simd.fuse(self.builder, a, b, c)

    def add(self, a, b):
        return self.builder.fadd(a, b)

    def to_floats(self, total):
        return total


class _Pairs(_Floats):
    """An emitter of products of words of two bfloat16, of keys and of queries as they are stored,
    summed in float32."""

    def __init__(self, builder, rows):
        super().__init__(builder, rows)
        self.parts = 1

    def key_part(self, words, part):
        return words

    def query_part(self, row, column, part):
        return simd.load_vector(self.builder, self.builder.gep(row, [column]), self.rows.word, 2)

    def multiply_add(self, a, b, c):
        return simd.call_llvm(self.builder, "x86.avx512bf16.dpbf16ps.512", c.type, [c, a, b])


class _Integers(_Floats):
    """An emitter of exact products of 8-bit keys, two registers' worth of floats at once, with a
    query of 16-bit integers, summed in int32."""

    def __init__(self, builder, rows):
        super().__init__(builder, rows)
        self.sums = ir.VectorType(_i32, rows.lanes)
        self.words = ir.VectorType(_i16, 2 * rows.lanes)
        self.parts = rows.vectors // 2

    def key_part(self, words, part):
        count = self.words.count
        order = ir.Constant(
            ir.VectorType(_i32, count), list(range(part * count, (part + 1) * count))
        )
        return self.builder.sext(self.builder.shuffle_vector(words, words, order), self.words)

    def query_part(self, row, column, part):
        at = self.builder.add(column, _i64(part * self.words.count))
        return simd.load_vector(self.builder, self.builder.gep(row, [at]), self.words, 2)

    def multiply_add(self, a, b, c):
        return self.builder.add(c, multiply_pairs(self.builder, a, b))

    def add(self, a, b):
        return self.builder.add(a, b)

    def to_floats(self, total):
        return self.builder.sitofp(total, self.rows.vector)


def product_of(builder, rows, query):
    """Return the emitter of products of keys that `rows` reads with a query of the array or pointer
    type `query`.

    A query of 16-bit words has integers beside 8-bit rows, and bfloat16 beside rows of bfloat16;
    other queries have floats.
    """
    if query.dtype != types.uint16:
        return _Floats(builder, rows)
    return _Integers(builder, rows) if rows.widen else _Pairs(builder, rows)


def fold(product, sums):
    """Emit the sums of LANES vectors of sums of `product`, and return one vector of floats whose
    lane i is the sum of all lanes of vector i.

    In the round of distance d, lane bit d starts to select which of two vectors a lane sums.
    """
    builder, lanes, distance = product.builder, len(sums), 1
    order = ir.VectorType(_i32, lanes)
    while len(sums) > 1:
        low = [i if not i & distance else lanes + i - distance for i in range(lanes)]
        high = [i + distance if not i & distance else lanes + i for i in range(lanes)]
        sums = [
            product.add(
                builder.shuffle_vector(a, b, ir.Constant(order, low)),
                builder.shuffle_vector(a, b, ir.Constant(order, high)),
            )
            for a, b in zip(sums[::2], sums[1::2], strict=True)
        ]
        distance *= 2
    return product.to_floats(sums[0])
