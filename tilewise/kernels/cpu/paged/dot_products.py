"""Dot products with rows that are read once, in place, and the lanes of their results.

What      scores of 4 query heads (or 1) and rows of keys.
Grid      none: called by one thread of `decode.py`.
One call  LANES / heads keys at a time: as many sums as a register has lanes, folded into one
          register at the end.
Traffic   a row of the cache goes from memory to registers once for all its query heads. While a
          row is in use, another that the caller names is prefetched, line by line.
Numerics  widened to float32 in registers (float64 for float64) and multiplied there, see
          `machine/products.py` for exceptions; 8-bit numbers without their scale, which the caller
          applies.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.pack import emit_prefetch
from tilewise.kernels.cpu.machine.products import fold, product_of
from tilewise.kernels.cpu.paged.cache_rows import HEADS, LINE, Rows, emit_loop

_i32, _i64 = ir.IntType(32), ir.IntType(64)


def _dots(heads, prefetches=True):
    @intrinsic
    def dots(typingctx, cache_like, scores, si, addresses, ai, shift, ahead, hi, q, qi, q_row, dim):
        """Set scores[si : si + LANES], [key][head], to the dot products of LANES / heads rows of
        the cache, at addresses[ai:] + shift, with `heads` rows of q, from q[qi] on and q_row apart.
        Rows at ahead[hi:] are prefetched, if any are. See `products.product_of` for the types."""
        dtype = simd.float_of(scores)

        def codegen(context, builder, sig, args):
            _, scores_, si_, addresses_, ai_, shift_, ahead_, hi_, q_, qi_, q_row_, dim_ = args
            rows = Rows(builder, cache_like, dtype)
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
                    if fetches and prefetches:
                        emit_prefetch(builder, builder.add(later[key], offset))
                    units.append(rows.load_words(builder.add(start, offset), mask))
                # One register of q at a time is multiplied with all keys, so that the sums keep
                # their registers.
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
            sums = emit_loop(builder, lines, sums, line, "dots")
            if per_line > 1:
                sums = emit_loop(
                    builder,
                    builder.sub(whole, done),
                    sums,
                    lambda i, current: step(builder.add(done, i), current),
                    "dots.units",
                )
            has_rest = builder.zext(builder.icmp_signed(">", rest, _i64(0)), _i64)
            mask = rows.mask(rest)
            sums = emit_loop(
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
            cache_like,
            scores,
            index,
            addresses,
            index,
            index,
            ahead,
            index,
            q,
            index,
            index,
            index,
        )
        return types.void(*arguments), codegen

    return dots


def _across(heads, combine):
    """Return an intrinsic that combines the lanes of each head in a register, so that every lane
    holds its head's result; lanes of one head are `heads` apart, and `combine` is emitted for two
    vectors."""

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
        """Return a register of the number of the key in each lane, lane // heads, as floats."""
        dtype = simd.float_of(like)

        def codegen(context, builder, sig, args):
            kind = simd.vector_ir(dtype)
            return ir.Constant(kind, [float(lane // heads) for lane in range(kind.count)])

        return simd.Vector(dtype)(like), codegen

    return lane_keys


@intrinsic
def spread_4(typingctx, numbers, key):
    """Return a register whose lane i is numbers[key + i // 4]."""
    dtype = simd.float_of(numbers)

    def codegen(context, builder, sig, args):
        kind = simd.vector_ir(dtype)
        # Registers of two are those of one head (`heads_of_pass`): such code never runs.
        few = ir.VectorType(kind.element, max(1, kind.count // HEADS))
        pointer = simd.pointer_to(context, builder, numbers, *args)
        vector = simd.load_vector(builder, pointer, few, 4)
        order = ir.VectorType(_i32, kind.count)
        lanes = [lane // HEADS for lane in range(kind.count)]
        return builder.shuffle_vector(vector, vector, ir.Constant(order, lanes))

    return simd.Vector(dtype)(numbers, types.int64), codegen


def _larger(builder, x, y):
    return builder.select(builder.fcmp_ordered(">", x, y), x, y)


dots_1, dots_4, dots_dry_1 = _dots(1), _dots(HEADS), _dots(1, prefetches=False)
max_1, max_4 = _across(1, _larger), _across(HEADS, _larger)
sum_1, sum_4 = (_across(heads, lambda b, x, y: b.fadd(x, y)) for heads in (1, HEADS))
keys_1, keys_4 = _lane_keys(1), _lane_keys(HEADS)
