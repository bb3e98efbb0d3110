"""Products of some rows with panels of weights, at the speed of memory or of the arithmetic.

What      sums (R, 64) = a (R, K) weights (K, 64), float32, for up to 32 rows and a group of four
          panels, see `panels.py`.
Grid      none: called by one thread of a step for each of its tasks.
One call  AMX: up to 16 rows x 4 panels, or 32 rows x 2; else 1, 4 or 8 rows x 1 or 2 panels in
          vector registers, by VDPBF16PS or, with words widened in registers, by multiply-adds.
Traffic   a group comes from memory once. AMX reads it in the order of memory, which the CPU's own
          prefetcher follows: software prefetches saved nothing and at times added 5 % (16 and
          256 MiB of bfloat16, 2 to 16 KiB ahead; Xeon with AMX, one core, 2026-11-22); for more
          than 16 rows the second half of a group comes from the L2 cache. Vector registers read a
          panel or two, each 1 KiB of bfloat16 in 4, in which the prefetcher falls behind. So all
          rows are multiplied by a slice of 16 KiB before the next, which is prefetched meanwhile in
          the order of memory; further blocks of rows read the L1 cache.
Numerics  float32 sums, each of them one chain along K in one order: a row's bits depend neither on
          the number of rows, nor on the threads. They do depend on the CPU's instructions.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.amx import ROWS
from tilewise.kernels.cpu.machine.pack import emit_prefetch
from tilewise.kernels.cpu.machine.threads import inner
from tilewise.kernels.cpu.step.panels import COLUMNS, GROUP, STEP

_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_f32 = ir.FloatType()
_SUMS = ir.VectorType(_f32, COLUMNS)
_IS_WIDE = simd.REGISTER_BYTES == 64


def uses_tiles(weight_type) -> bool:
    """Return whether weights of this array type are multiplied by the matrix unit."""
    return simd.HAS_TILES and weight_type.dtype == types.uint16


def uses_dot(weight_type) -> bool:
    """Return whether weights of this array type are multiplied by VDPBF16PS: bfloat16 on a CPU with
    AVX-512 that has it. It may have a matrix unit, too, which is then preferred."""
    return simd.HAS_BF16_DOT and _IS_WIDE and weight_type.dtype == types.uint16


def takes_words(weight_type) -> bool:
    """Return whether rows that multiply weights of this array type stay in the dtype of the
    weights; otherwise they must be widened to float32."""
    return uses_tiles(weight_type) or uses_dot(weight_type) or weight_type.dtype == types.float32


def _known(rule):
    """Return an intrinsic f(weight_like) for the value of `rule` for a weight's array type, a
    boolean known at compile time."""

    @intrinsic
    def known(typingctx, weight_like):
        def codegen(context, builder, sig, args):
            return ir.IntType(1)(rule(weight_like))

        return types.boolean(weight_like), codegen

    return known


has_tiles, has_words = _known(uses_tiles), _known(takes_words)
has_dot = _known(lambda weight_type: uses_dot(weight_type) and not uses_tiles(weight_type))
has_pairs = _known(lambda weight_type: weight_type.dtype == types.uint16)


def _amx(builder, name, *operands):
    simd.call_llvm(builder, f"x86.{name}", ir.VoidType(), list(operands))


def _byte_pointer(builder, address):
    return builder.inttoptr(address, _i8.as_pointer())


def _tile_block(num_rows, num_panels):
    """Return an intrinsic that computes the product of 16 num_rows rows and num_panels panels in
    tile registers, and stores its sums, added to those at c if `adds`; without the matrix unit it
    does nothing."""

    @intrinsic
    def block(typingctx, weight_like, c, ldc, a, lda, w, steps, adds):
        index = types.int64
        sig = types.void(weight_like, index, index, index, index, index, index, types.boolean)

        def codegen(context, builder, sig, args):
            if not uses_tiles(weight_like):
                return context.get_dummy_value()
            _, c_, ldc_, a_, lda_, w_, steps_, adds_ = args
            count = num_rows * num_panels

            def place(tile):
                row, column = divmod(tile, num_panels)
                start = builder.add(c_, builder.mul(ldc_, _i64(ROWS * row)))
                return _byte_pointer(builder, builder.add(start, _i64(64 * column)))

            with builder.if_else(adds_) as (then, otherwise):
                with then:
                    for tile in range(count):
                        _amx(builder, "tileloadd64", _i8(tile), place(tile), ldc_)
                with otherwise:
                    for tile in range(count):
                        _amx(builder, "tilezero", _i8(tile))
            a_tiles = [count + row for row in range(num_rows)]
            free = list(range(count + num_rows, 8))
            with cgutils.for_range(builder, steps_) as loop:
                at = builder.add(a_, builder.mul(loop.index, _i64(2 * STEP)))
                for row, tile in enumerate(a_tiles):
                    start = builder.add(at, builder.mul(lda_, _i64(ROWS * row)))
                    _amx(builder, "tileloadd64", _i8(tile), _byte_pointer(builder, start), lda_)
                b = builder.add(w_, builder.mul(loop.index, _i64(GROUP * 64 * ROWS)))
                for column in range(num_panels):
                    start = builder.add(b, _i64(64 * ROWS * column))
                    tile = free[column % len(free)]
                    _amx(builder, "tileloadd64", _i8(tile), _byte_pointer(builder, start), _i64(64))
                    for row, a_tile in enumerate(a_tiles):
                        sums = row * num_panels + column
                        _amx(builder, "tdpbf16ps", _i8(sums), _i8(a_tile), _i8(tile))
            for tile in range(count):
                _amx(builder, "tilestored64", _i8(tile), place(tile), ldc_)
            return context.get_dummy_value()

        return sig, codegen

    return block


class _Words:
    """An emitter of code that loads packed weights of one array type and multiplies by them, a word
    at a time: one weight, or two of bfloat16, of each of COLUMNS outputs."""

    def __init__(self, builder, weight_type):
        self.builder, self.dtype = builder, weight_type.dtype
        self.is_bf16 = self.dtype == types.uint16
        self.is_dot = uses_dot(weight_type)
        self.word_bytes = {types.uint16: 4, types.int16: 2, types.float32: 4}[self.dtype]
        self.bytes = COLUMNS * self.word_bytes
        self.words = STEP // (2 if self.is_bf16 else 1)  # words of a step; a power of two
        # Bytes of a row of a in a word: pairs of bfloat16, widened ones, or a float.
        self.a_bytes = 8 if self.is_bf16 and not self.is_dot else 4

    def load(self, address):
        """Emit the load of one word of packed weights for COLUMNS outputs; return its vectors, one
        or two, for `multiply`.

        A word has a weight, or in bfloat16 two, of each of COLUMNS outputs.
        """
        builder = self.builder
        if self.is_bf16:
            word = simd.load_at(builder, address, ir.VectorType(_i32, COLUMNS), 64)
            if self.is_dot:
                return [word]
            even = builder.shl(word, simd.constant(word.type, 16))
            odd = builder.and_(word, simd.constant(word.type, 0xFFFF0000))
            return [builder.bitcast(even, _SUMS), builder.bitcast(odd, _SUMS)]
        if self.dtype == types.int16:
            kind = ir.VectorType(ir.HalfType() if simd.HAS_HALF else _f32, COLUMNS)
            half = simd.load_at(builder, address, kind, 2)
            return [builder.fpext(half, _SUMS) if simd.HAS_HALF else half]
        return [simd.load_at(builder, address, _SUMS, 4)]

    def multiply(self, a, word, sums):
        """Emit sums + the products of one word of the row of a at address `a` with the loaded
        weights `word`, and return the new sums."""
        builder = self.builder
        if self.is_dot:
            pointer = builder.inttoptr(a, _i32.as_pointer())
            pair = simd.broadcast(builder, builder.load(pointer, align=2), COLUMNS)
            name = "x86.avx512bf16.dpbf16ps.512"
            return simd.call_llvm(builder, name, _SUMS, [sums, pair, word[0]])
        for part, weights in enumerate(word):
            pointer = builder.inttoptr(builder.add(a, _i64(4 * part)), _f32.as_pointer())
            number = simd.broadcast(builder, builder.load(pointer, align=4), COLUMNS)
            sums = simd.fuse(builder, number, weights, sums)
        return sums


def _vector_block(num_rows, num_panels):
    """Return an intrinsic that computes the product of num_rows rows and num_panels panels in
    vector registers, and stores its sums, added to those at c if `adds`; where the matrix unit
    multiplies it does nothing.

    From the address `ahead` on the intrinsic prefetches as many bytes as it reads, in their order;
    0 is none.
    """

    @intrinsic
    def block(typingctx, weight_like, c, ldc, a, lda, w, steps, adds, ahead):
        index = types.int64
        sig = types.void(
            weight_like, index, index, index, index, index, index, types.boolean, index
        )

        def codegen(context, builder, sig, args):
            if uses_tiles(weight_like):
                return context.get_dummy_value()
            _, c_, ldc_, a_, lda_, w_, steps_, adds_, ahead_ = args
            how = _Words(builder, weight_like)
            words_ = builder.mul(steps_, _i64(how.words))
            panel_bytes = how.words * how.bytes

            def place(index):
                row, column = divmod(index, num_panels)
                start = builder.add(c_, builder.mul(ldc_, _i64(row)))
                return builder.add(start, _i64(64 * column))

            none = ir.Constant(_SUMS, None)
            before = [
                builder.select(adds_, simd.load_at(builder, place(index), _SUMS, 4), none)
                for index in range(num_rows * num_panels)
            ]
            entry = builder.block
            body, done = (builder.append_basic_block(f"panel.{name}") for name in ("body", "done"))
            builder.branch(body)
            builder.position_at_end(body)
            k = builder.phi(_i64)
            sums = [builder.phi(_SUMS) for _ in range(num_rows * num_panels)]
            later = list(sums)
            unrolled = 4  # words of a loop iteration, a part of a step
            step = builder.udiv(k, _i64(how.words))
            within = builder.sub(k, builder.mul(step, _i64(how.words)))
            start = builder.add(w_, builder.mul(step, _i64(GROUP * panel_bytes)))
            start = builder.add(start, builder.mul(within, _i64(how.bytes)))
            with builder.if_then(builder.icmp_signed("!=", ahead_, _i64(0))):
                fetched = builder.add(ahead_, builder.mul(k, _i64(num_panels * how.bytes)))
                for line in range(0, unrolled * num_panels * how.bytes, 64):
                    emit_prefetch(builder, builder.add(fetched, _i64(line)))
            for turn in range(unrolled):
                at = builder.add(k, _i64(turn))
                loaded = [
                    how.load(builder.add(start, _i64(column * panel_bytes + turn * how.bytes)))
                    for column in range(num_panels)
                ]
                a_offset = builder.mul(at, _i64(how.a_bytes))
                for row in range(num_rows):
                    number = builder.add(builder.add(a_, a_offset), builder.mul(lda_, _i64(row)))
                    for column, word in enumerate(loaded):
                        index = row * num_panels + column
                        later[index] = how.multiply(number, word, later[index])
            following = builder.add(k, _i64(unrolled))
            builder.cbranch(builder.icmp_signed("<", following, words_), body, done)
            k.add_incoming(_i64(0), entry)
            k.add_incoming(following, builder.block)
            for phi, start, value in zip(sums, before, later, strict=True):
                phi.add_incoming(start, entry)
                phi.add_incoming(value, builder.block)
            builder.position_at_end(done)
            for index, value in enumerate(later):
                simd.store_at(builder, value, place(index), 4)
            return context.get_dummy_value()

        return sig, codegen

    return block


# Panels of a block, by its rows. Sums of 16 columns take one register of AVX-512 or two of AVX2.
# Up to four rows wait for memory, which comes fastest in its order: a panel after the other reads
# 1.3 to 1.6 times the bytes of two or four at once (AVX-512, two cores of an EPYC, 2026-11-30).
_ONE, _FEW, _MANY = (1, 1, 2) if _IS_WIDE else (2, 1, 1)
_MOST_ROWS = 8 if _IS_WIDE else 4
_SLICE = 4  # steps of all panels that all rows are multiplied by before the next
_tiles_1, _tiles_2 = _tile_block(1, 4), _tile_block(2, 2)
_vectors_1, _vectors_4 = _vector_block(1, _ONE), _vector_block(4, _FEW)
_vectors_8 = _vector_block(_MOST_ROWS, _MANY)


@inner
def _next_words(w, panel, steps, block, column, blocks, fetches):
    """Return the address of the words behind a slice that this block prefetches while it
    multiplies, or 0 for none: each of the blocks of rows prefetches other columns."""
    if fetches and (block + column // _ONE) % blocks == 0:
        return w + (GROUP + column) * steps * panel
    return types.int64(0)


@inner
def _multiply_slice(weight_like, c, rows, a, lda, w, steps, adds, fetches):
    """Compute the products of `rows` rows and a slice of `steps` steps of a group in vector
    registers, as `multiply_rows` does; the words after the slice are prefetched, each once."""
    ldc, panel = 4 * COLUMNS * GROUP, STEP * COLUMNS * weight_like.itemsize
    blocks = (rows + _MOST_ROWS - 1) // _MOST_ROWS
    for block in range(blocks):
        row = block * _MOST_ROWS
        c_row, a_row, left = c + row * ldc, a + row * lda, rows - row
        if left == 1:
            for column in range(0, GROUP, _ONE):
                to, at = c_row + 64 * column, w + column * panel
                ahead = _next_words(w, panel, steps, block, column, blocks, fetches)
                _vectors_1(weight_like, to, ldc, a_row, lda, at, steps, adds, ahead)
        elif left <= 4:
            for column in range(0, GROUP, _FEW):
                to, at = c_row + 64 * column, w + column * panel
                ahead = _next_words(w, panel, steps, block, column, blocks, fetches)
                _vectors_4(weight_like, to, ldc, a_row, lda, at, steps, adds, ahead)
        else:
            for column in range(0, GROUP, _MANY):
                to, at = c_row + 64 * column, w + column * panel
                ahead = _next_words(w, panel, steps, block, column, blocks, fetches)
                _vectors_8(weight_like, to, ldc, a_row, lda, at, steps, adds, ahead)


@inner
def multiply_rows(weight_like, c, rows, a, lda, w, inputs, adds, fetches):
    """Compute the products of `rows` rows, up to 32, and a group of 64 outputs of packed weights,
    and store or add the sums to c.

    Rows of c and a are read and written in full blocks: up to 32 of them must exist.

    Args:
        weight_like: an empty array of the weights' dtype; uint16 is bfloat16, int16 is float16.
        c: the address of the sums, 64 float32 a row.
        a, lda: the address of the rows, in the dtype given by `has_words`, and the bytes of a row.
        w: the address of the group.
        inputs: K, a multiple of 32.
        adds: True if c holds the sums of the inputs before these, to which the products are added.
        fetches: True if words behind these are prefetched: the group lies in memory, and others
            follow.
    """
    ldc, steps = 4 * COLUMNS * GROUP, inputs // STEP
    panel = STEP * COLUMNS * weight_like.itemsize
    if has_tiles(weight_like):
        if rows > ROWS:
            for column in range(0, GROUP, 2):
                _tiles_2(weight_like, c + 64 * column, ldc, a, lda, w + column * panel, steps, adds)
        else:
            _tiles_1(weight_like, c, ldc, a, lda, w, steps, adds)
        return
    row_bytes = STEP * 4 if not has_words(weight_like) else STEP * weight_like.itemsize
    for first in range(0, steps, _SLICE):
        count = min(_SLICE, steps - first)
        at, words = a + first * row_bytes, w + first * GROUP * panel
        _multiply_slice(weight_like, c, rows, at, lda, words, count, adds or first > 0, fetches)
