"""Matrix products of small tiles at the speed of the CPU's multiply-add units.

What      c (M, N) = or += a (M, K) b (K, N), with a in rows or columns and b in panels.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  a block of some rows x two registers of columns, whose partial sums stay in registers
          while K runs. A step along K is one word: a float, or a pair of bfloat16 that the AVX-512
          instruction VDPBF16PS multiplies and adds to a float32 in one go.
Traffic   b is packed in panels of PANEL columns, [panel][k word][column], so that a panel of
          K = 128 fills half of a 32 KiB L1 cache; a is broadcast word by word.
Numerics  float32 accumulation for bfloat16 and float32, float64 for float64.

One core of an EPYC 9004 (2026-11-20): 229 GFLOP/s bfloat16, 117 float32, K = 128.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.threads import inlined

# Rows of a block for tiles of 32 rows; tiles of attention have other blocks, see `blocks.py`.
MR = 8 if simd.NUM_REGISTERS == 32 else 4
_i32, _i64 = ir.IntType(32), ir.IntType(64)


def _constant_of(number):
    """Return an intrinsic f(array) whose value number(the array's numba type) is a constant of the
    compiled code: an array's own itemsize is known only at run time."""

    @intrinsic
    def constant(typingctx, array):
        def codegen(context, builder, sig, args):
            return _i64(number(array))

        return types.int64(array), codegen

    return constant


def _lanes(array):
    return simd.lanes_of(simd.float_of(array))


lanes_in = _constant_of(_lanes)  # numbers of an array's type in a register
# columns of a panel of b: two registers
panel_columns = _constant_of(lambda array: 2 * _lanes(array))
# Array elements in one word of an operand: two for bfloat16, one for floats.
words_to_elements = _constant_of(lambda array: 2 if array.dtype == types.uint16 else 1)


class _Step:
    """An emitter of the code of a block of rows x num_vectors registers of the product a b for
    operands of the given types; made by `block_of` each time its intrinsic is compiled."""

    def __init__(self, context, builder, c_type, a_type, b_type, num_vectors, unrolled):
        self.context, self.builder = context, builder
        self.c_type, self.a_type, self.b_type = c_type, a_type, b_type
        self.num_vectors, self.unrolled = num_vectors, unrolled
        self.vector = simd.vector_ir(c_type.dtype)
        self.lanes = self.vector.count
        self.is_bf16 = a_type.dtype == types.uint16
        self.word = ir.VectorType(_i32, self.lanes) if self.is_bf16 else self.vector
        self.elements_per_word = 2 if self.is_bf16 else 1

    def pointers(self, array_type, array, start, stride, count):
        first = simd.pointer_to(self.context, self.builder, array_type, array, start)
        return [
            self.builder.gep(first, [self.builder.mul(stride, _i64(row))]) for row in range(count)
        ]

    def load(self, pointer, vector, kind, per_lane=1):
        """Emit a load of register number `vector` after `pointer`, as type `kind`; a lane has
        `per_lane` elements of memory."""
        shifted = self.builder.gep(pointer, [_i64(vector * self.lanes * per_lane)])
        return simd.load_vector(self.builder, shifted, kind, 2 if self.is_bf16 else 4)

    def load_word(self, pointer):
        """Emit a load of one word, a float or two bfloat16, at `pointer`, and return it in every
        lane of a register."""
        kind = ir.VectorType(self.word.element, 1)
        word = simd.load_vector(self.builder, pointer, kind, 2 if self.is_bf16 else 4)
        scalar = self.builder.extract_element(word, ir.Constant(_i32, 0))
        return simd.broadcast(self.builder, scalar, self.lanes)

    def multiply_add(self, a, b, c):
        if self.is_bf16:
            return simd.call_llvm(self.builder, "x86.avx512bf16.dpbf16ps.512", c.type, [c, a, b])
        return simd.fuse(self.builder, a, b, c)

    def run(self, sums, a_rows, a_step, b_start, b_step, k_words):
        """Emit the loop over K, which adds a b to the initial `sums`, and return the final sums;
        both lists are in the order row * num_vectors + vector.

        Args:
            a_rows: a pointer to the first word of each row of a.
            a_step, b_step: the elements from word to word along K.
            b_start: a pointer to the first word of b.
            k_words: the words along K; with 0 the initial sums are returned.
        """
        builder, entry = self.builder, self.builder.block
        body, done = (builder.append_basic_block(f"product.{name}") for name in ("body", "done"))
        builder.cbranch(builder.icmp_signed(">", k_words, _i64(0)), body, done)
        builder.position_at_end(body)
        k = builder.phi(_i64)
        partial = [builder.phi(self.vector) for _ in sums]
        following = list(partial)
        for turn in range(self.unrolled):
            word = builder.add(k, _i64(turn))
            b_row = builder.gep(b_start, [builder.mul(word, b_step)])
            b_words = [
                self.load(b_row, vector, self.word, self.elements_per_word)
                for vector in range(self.num_vectors)
            ]
            for row, a_row in enumerate(a_rows):
                pointer = builder.gep(a_row, [builder.mul(word, a_step)])
                a_word = self.load_word(pointer)
                for vector, b_word in enumerate(b_words):
                    at = row * self.num_vectors + vector
                    following[at] = self.multiply_add(a_word, b_word, following[at])
        next_k = builder.add(k, _i64(self.unrolled))
        builder.cbranch(builder.icmp_signed("<", next_k, k_words), body, done)
        for phi, first, later in zip(
            [k, *partial], [_i64(0), *sums], [next_k, *following], strict=True
        ):
            phi.add_incoming(first, entry)
            phi.add_incoming(later, body)
        builder.position_at_end(done)
        finals = [builder.phi(self.vector) for _ in sums]
        for phi, first, later in zip(finals, sums, following, strict=True):
            phi.add_incoming(first, entry)
            phi.add_incoming(later, body)
        return finals


def block_of(rows, num_vectors, start, unrolled=1):
    """Return an intrinsic that sets `rows` rows of num_vectors registers of c to initial sums + a
    b.

    The intrinsic's arguments are those of `multiply_add_rows`, without `columns`.

    Args:
        rows: the number of rows of c.
        num_vectors: the vector registers of sums in a row of c.
        start: the initial sums: "zero"; "sums", those in c; or "scaled", those in c, each row times
            its factor scale[si + row].
        unrolled: the words along K of one loop iteration; k_words is a multiple of it.
    """

    @intrinsic
    def block(typingctx, c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si):
        index = types.int64
        sig = types.void(
            c, index, index, a, index, index, index, b, index, index, index, scale, index
        )

        def codegen(context, builder, sig, args):
            c_, ci_, ldc_, a_, ai_, a_row_, a_word_, b_, bi_, b_word_, k_words_, scale_, si_ = args
            step = _Step(context, builder, c, a, b, num_vectors, unrolled)
            c_rows = step.pointers(c, c_, ci_, ldc_, rows)
            sums = [ir.Constant(step.vector, None)] * (rows * num_vectors)
            if start != "zero":
                sums = [
                    simd.load_vector(
                        builder, builder.gep(c_row, [_i64(vector * step.lanes)]), step.vector, 4
                    )
                    for c_row in c_rows
                    for vector in range(num_vectors)
                ]
            if start == "scaled":
                factors = step.pointers(scale, scale_, si_, _i64(1), rows)
                splats = [
                    simd.broadcast(builder, builder.load(factor), step.lanes) for factor in factors
                ]
                sums = [
                    builder.fmul(old, splats[index // num_vectors])
                    for index, old in enumerate(sums)
                ]
            a_rows = step.pointers(a, a_, ai_, a_row_, rows)
            b_start = simd.pointer_to(context, builder, b, b_, bi_)
            sums = step.run(sums, a_rows, a_word_, b_start, b_word_, k_words_)
            for row, c_row in enumerate(c_rows):
                for vector in range(num_vectors):
                    pointer = builder.gep(c_row, [_i64(vector * step.lanes)])
                    simd.store_vector(builder, sums[row * num_vectors + vector], pointer, 4)
            return context.get_dummy_value()

        return sig, codegen

    return block


_set_1, _set_2 = block_of(MR, 1, "zero"), block_of(MR, 2, "zero")
_add_1, _add_2 = block_of(MR, 1, "scaled"), block_of(MR, 2, "scaled")


@inlined
def multiply(c, ci, ldc, columns, a, ai, a_row, a_word, b, bi, k_words, scale):
    """Compute MR rows of c = a b for one panel of b: one register of columns if it has room for
    `columns`, else two. Old sums are overwritten.

    Args:
        c, ci, ldc: the sums, the index of the first one, the elements from row to row.
        a, ai, a_row, a_word: the left operand, the index of its first word, the elements from row
            to row and from word to word along K.
        b, bi: the panels, and the index of the first word of the panel.
        scale: an unused array of c's type.
    """
    b_word = panel_columns(c) * words_to_elements(b)
    if columns <= lanes_in(c):
        _set_1(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, 0)
    else:
        _set_2(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, 0)


@inlined
def multiply_add(c, ci, ldc, columns, a, ai, a_row, a_word, b, bi, k_words, scale, si):
    """Compute MR rows of c = c * scale[si + row] + a b; `scale` is an array of c's type, and the
    other arguments are those of `multiply`."""
    b_word = panel_columns(c) * words_to_elements(b)
    if columns <= lanes_in(c):
        _add_1(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si)
    else:
        _add_2(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si)


@inlined
def multiply_add_rows(c, ci, ldc, columns, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si):
    """Compute MR rows of c = c * scale[si + row] + a b for a b that does not lie in panels.

    Words of b along K are b_word elements apart; the other arguments are those of `multiply`.
    """
    if columns <= lanes_in(c):
        _add_1(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si)
    else:
        _add_2(c, ci, ldc, a, ai, a_row, a_word, b, bi, b_word, k_words, scale, si)
