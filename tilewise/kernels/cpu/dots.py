"""Dot products and weighted sums of rows that are read once, where they lie.

What      scores of 4 query heads (or 1) against rows of keys, and sums of rows of values.
Grid      none: called by one thread of `decode.py`.
One call  LANES / heads keys at a time for scores: as many sums as a register has lanes, folded into
          one register at the end. For values, columns over all keys, whose sums take at most half
          of the registers: one that is spilled costs a load and a store for every key.
Traffic   a row of the cache goes from memory to registers once for all its query heads. While a
          row is in use, another that the caller names is prefetched, line by line.
Numerics  widened to float32 in registers (float64 for float64) and multiplied there, see
          `products.py` for what is not; 8-bit numbers without their scale, which is the caller's. A
          word of two bfloat16 becomes two vectors, of its even and its odd elements: rows of q and
          of the sums are kept in that order, see `position_of`.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu import simd
from tilewise.kernels.cpu.pack import emit_prefetch
from tilewise.kernels.cpu.products import fold, product_of
from tilewise.kernels.cpu.quantise import widen_e4m3, widen_int8

HEADS = 4  # query heads per pass: 16 sums with AVX-512 are 4 keys x 4 heads
_i1, _i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
# Caches are told apart by the dtype of an empty array; these two hold no numbers of numba's own.
_BYTES = (types.int8, types.uint8)  # int8, float8_e4m3fn
LINE = 64  # bytes that a prefetch brings
_MOST_SUMS = simd.NUM_REGISTERS // 2


def _vectors(cache_type):
    """Registers of floats that one load from a cache fills."""
    if cache_type.dtype in _BYTES:
        return min(4, _MOST_SUMS // HEADS)
    return 2 if cache_type.dtype == types.uint16 else 1


def _units(cache_type):
    """Loads of a row whose columns' sums four heads keep in registers."""
    return max(1, min(2, _MOST_SUMS // (HEADS * _vectors(cache_type))))


def _sizes(count):
    @intrinsic
    def elements(typingctx, cache_like, like):
        dtype = simd.float_of(like)

        def codegen(context, builder, sig, args):
            return _i64(simd.lanes_of(dtype) * count(cache_like))

        return types.int64(cache_like, like), codegen

    return elements


lanes_in = _sizes(lambda cache_type: 1)  # elements of a register, known when compiling
unit_of = _sizes(_vectors)  # elements that one load brings
# Elements of which the even ones stand before the odd: a load of bfloat16 pairs, else a register.
order_of = _sizes(lambda cache_type: 2 if cache_type.dtype == types.uint16 else 1)
# Columns whose sums four heads keep in registers.
span_of = _sizes(lambda cache_type: _units(cache_type) * _vectors(cache_type))


@intrinsic
def has_bytes(typingctx, cache_like):
    """Whether a cache holds 8-bit numbers; unlike its itemsize known when compiling."""

    def codegen(context, builder, sig, args):
        return _i1(cache_like.dtype in _BYTES)

    return types.boolean(cache_like), codegen


class _Rows:
    """Loads rows of a cache as vectors of floats."""

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
        """One unit at `address` (an int) as it is stored, zero where `mask` does not hold."""
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
        """One unit as 1, 2 or 4 vectors of floats."""
        words = self.load_words(address, mask)
        return [self.part(words, index) for index in range(self.vectors)]

    def part(self, words, index):
        """Vector `index` of the floats that the words of a unit stand for."""
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
        """Words of a unit that hold the first `elements` elements."""
        count = self.word.count
        words = self.builder.sdiv(elements, _i64(2)) if self.is_bf16 else elements
        lane = ir.VectorType(_i32, count)
        bound = simd.broadcast(self.builder, self.builder.trunc(words, _i32), count)
        return self.builder.icmp_signed("<", ir.Constant(lane, list(range(count))), bound)


def _loop(builder, count, values, body, name):
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


def _dots(heads):
    @intrinsic
    def dots(typingctx, cache_like, scores, si, addresses, ai, shift, ahead, hi, q, qi, q_row, dim):
        """scores[si : si + LANES] = dot products, [key][head], of LANES / heads rows at
        addresses[ai:] + shift with `heads` rows of q, see `products.product_of`. Rows at
        ahead[hi:] are prefetched."""
        dtype = simd.float_of(scores)

        def codegen(context, builder, sig, args):
            _, scores_, si_, addresses_, ai_, shift_, ahead_, hi_, q_, qi_, q_row_, dim_ = args
            rows = _Rows(builder, cache_like, dtype)
            keys = rows.lanes // heads
            first = simd.pointer_to(context, builder, addresses, addresses_, ai_)
            next_ = simd.pointer_to(context, builder, ahead, ahead_, hi_)
            numbers = [_i64(key) for key in range(keys)]
            starts = [builder.add(builder.load(builder.gep(first, [i])), shift_) for i in numbers]
            later = [builder.load(builder.gep(next_, [i])) for i in numbers]
            q_first = simd.pointer_to(context, builder, q, q_, qi_)
            q_rows = [builder.gep(q_first, [builder.mul(q_row_, _i64(h))]) for h in range(heads)]
            unit = rows.vectors * rows.lanes
            product = product_of(builder, rows, q)

            def step(index, sums, mask=None, fetches=True):
                offset = builder.mul(index, _i64(rows.unit_bytes))
                column = builder.mul(index, _i64(unit))
                sums, units = list(sums), []
                for key, start in enumerate(starts):
                    if fetches:
                        emit_prefetch(builder, builder.add(later[key], offset))
                    units.append(rows.load_words(builder.add(start, offset), mask))
                # One register of q at a time meets all keys, so that the sums keep theirs.
                for part in range(product.parts):
                    k_parts = [product.key_part(words, part) for words in units]
                    for head, row in enumerate(q_rows):
                        q_part = product.query_part(row, column, part)
                        for key, k_part in enumerate(k_parts):
                            at = key * heads + head
                            sums[at] = product.multiply_add(k_part, q_part, sums[at])
                return sums

            def line(index, sums):
                first = builder.mul(index, _i64(per_line))
                for i in range(per_line):
                    sums = step(builder.add(first, _i64(i)), sums, fetches=i == 0)
                return sums

            per_line = max(1, LINE // rows.unit_bytes)
            whole = builder.sdiv(dim_, _i64(unit))
            lines = builder.sdiv(whole, _i64(per_line))
            done = builder.mul(lines, _i64(per_line))
            rest = builder.sub(dim_, builder.mul(whole, _i64(unit)))
            sums = [ir.Constant(product.sums, None)] * rows.lanes
            sums = _loop(builder, lines, sums, line, "dots")
            if per_line > 1:
                sums = _loop(
                    builder,
                    builder.sub(whole, done),
                    sums,
                    lambda i, current: step(builder.add(done, i), current),
                    "dots.units",
                )
            has_rest = builder.zext(builder.icmp_signed(">", rest, _i64(0)), _i64)
            mask = rows.mask(rest)
            sums = _loop(
                builder,
                has_rest,
                sums,
                lambda _, current: step(whole, current, mask),
                "dots.rest",
            )
            pointer = simd.pointer_to(context, builder, scores, scores_, si_)
            simd.store_vector(builder, fold(product, sums), pointer, 4)
            return context.get_dummy_value()

        index = types.int64
        arguments = (
            cache_like, scores, index, addresses, index, index, ahead, index, q, index, index,
            index,
        )  # fmt: skip
        return types.void(*arguments), codegen

    return dots


def _weigh(heads, is_masked, fetches=True):
    @intrinsic
    def weigh(
        typingctx, cache_like, acc, ci, ld, rescale, p, addresses, ai, shift, ahead, hi, offset,
        keys, rest,
    ):  # fmt: skip
        """acc[head] = acc[head] * rescale[head] + sum over keys of p[key][head] * row[key], for
        span_of columns from byte `offset` of the rows at addresses[ai:] + shift; if masked, `rest`
        columns of one unit. If it fetches, the same bytes of rows at ahead[hi:] are."""
        dtype = simd.float_of(acc)

        def codegen(context, builder, sig, args):
            _, acc_, ci_, ld_, rescale_, p_, addresses_, ai_, shift_, ahead_, *_ = args
            hi_, offset_, keys_, rest_ = args[-4:]
            rows = _Rows(builder, cache_like, dtype)
            units = 1 if is_masked else _units(cache_like)
            parts = units * rows.vectors
            zero = _i64(0)
            first = simd.pointer_to(context, builder, addresses, addresses_, ai_)
            next_ = simd.pointer_to(context, builder, ahead, ahead_, hi_)
            weights = simd.pointer_to(context, builder, p, p_, zero)
            from_start = builder.add(shift_, offset_)
            factors = simd.pointer_to(context, builder, rescale, rescale_, zero)
            target = simd.pointer_to(context, builder, acc, acc_, ci_)
            mask = rows.mask(rest_) if is_masked else None
            pointers, sums = [], []
            for head in range(heads):
                factor = builder.load(builder.gep(factors, [_i64(head)]))
                factor = simd.broadcast(builder, factor, rows.lanes)
                row = builder.gep(target, [builder.mul(ld_, _i64(head))])
                for part in range(parts):
                    pointers.append(builder.gep(row, [_i64(part * rows.lanes)]))
                    old = simd.load_vector(builder, pointers[-1], rows.vector, 4)
                    sums.append(builder.fmul(old, factor))

            def step(key, sums):
                start = builder.add(builder.load(builder.gep(first, [key])), from_start)
                values = []
                for unit in range(units):
                    column = _i64(unit * rows.unit_bytes)
                    values += rows.load(builder.add(start, column), mask)
                if fetches:
                    later = builder.add(builder.load(builder.gep(next_, [key])), offset_)
                    for column in range(0, units * rows.unit_bytes, LINE):
                        emit_prefetch(builder, builder.add(later, _i64(column)))
                sums = list(sums)
                for head in range(heads):
                    at = builder.add(builder.mul(key, _i64(heads)), _i64(head))
                    weight = simd.broadcast(
                        builder, builder.load(builder.gep(weights, [at])), rows.lanes
                    )
                    for part, value in enumerate(values):
                        index = head * parts + part
                        sums[index] = simd.fuse(builder, weight, value, sums[index])
                return sums

            sums = _loop(builder, keys_, sums, step, "weigh")
            for pointer, total in zip(pointers, sums, strict=True):
                simd.store_vector(builder, total, pointer, 4)
            return context.get_dummy_value()

        index = types.int64
        arguments = (
            cache_like, acc, index, index, rescale, p, addresses, index, index, ahead, index, index,
            index, index,
        )  # fmt: skip
        return types.void(*arguments), codegen

    return weigh


def _across(heads, combine):
    """Combine the lanes of one head: lane i with i +- heads, i +- 2 heads, ... by butterfly."""

    @intrinsic
    def across(typingctx, vector):
        def codegen(context, builder, sig, args):
            value, distance = args[0], heads
            while distance < value.type.count:
                order = [lane ^ distance for lane in range(value.type.count)]
                other = builder.shuffle_vector(
                    value, value, ir.Constant(ir.VectorType(_i32, len(order)), order)
                )
                value = combine(builder, value, other)
                distance *= 2
            return value

        return vector(vector), codegen

    return across


def _lane_keys(heads):
    @intrinsic
    def lane_keys(typingctx, like):
        """The key of each lane, lane // heads, as floats."""
        dtype = simd.float_of(like)

        def codegen(context, builder, sig, args):
            kind = simd.vector_ir(dtype)
            return ir.Constant(kind, [float(lane // heads) for lane in range(kind.count)])

        return simd.Vector(dtype)(like), codegen

    return lane_keys


@intrinsic
def spread_4(typingctx, numbers, key):
    """A register whose lane i is numbers[key + i // 4]."""
    dtype = simd.float_of(numbers)

    def codegen(context, builder, sig, args):
        kind = simd.vector_ir(dtype)
        few = ir.VectorType(kind.element, kind.count // HEADS)
        pointer = simd.pointer_to(context, builder, numbers, *args)
        vector = simd.load_vector(builder, pointer, few, 4)
        order = ir.VectorType(_i32, kind.count)
        lanes = [lane // HEADS for lane in range(kind.count)]
        return builder.shuffle_vector(vector, vector, ir.Constant(order, lanes))

    return simd.Vector(dtype)(numbers, types.int64), codegen


def _larger(builder, x, y):
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


dots_1, dots_4 = _dots(1), _dots(HEADS)
weigh_1, weigh_4 = _weigh(1, False), _weigh(HEADS, False)
# For columns in lines that the ones before have fetched.
weigh_dry_1, weigh_dry_4 = _weigh(1, False, fetches=False), _weigh(HEADS, False, fetches=False)
weigh_rest_1, weigh_rest_4 = _weigh(1, True), _weigh(HEADS, True)
max_1, max_4 = _across(1, _larger), _across(HEADS, _larger)
sum_1, sum_4 = (_across(heads, lambda b, x, y: b.fadd(x, y)) for heads in (1, HEADS))
keys_1, keys_4 = _lane_keys(1), _lane_keys(HEADS)
