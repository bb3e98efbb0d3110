"""Weighted sums of rows of values that are read once, in place.

What      acc = acc * rescale + p V for 4 query heads (or 1) and some columns.
Grid      none: called by one thread of `decode.py`.
One call  columns over all keys of a chunk, whose sums take at most half of the registers: one that
          is spilled costs a load and a store for every key.
Traffic   a row of the cache goes from memory to registers once for all its query heads. While a
          row is in use, another that the caller names is prefetched, line by line.
Numerics  floats, widened in registers. An int8 cache whose queries are integers has weights of 16
          bits, see `weights.py`; two keys' products then fit a lane (VPMADDWD), their sums over a
          chunk are exact, and they are multiplied by the value of a weight's unit once.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.pack import emit_prefetch
from tilewise.kernels.cpu.machine.products import multiply_pairs
from tilewise.kernels.cpu.paged.cache_rows import (
    HEADS,
    LINE,
    Rows,
    are_integers,
    emit_loop,
    units_of,
)

_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


class _Floats:
    """An emitter of sums of weight * value in floats, which start from the rescaled old sums;
    `weigh` asks it for values, weights and products."""

    def __init__(self, builder, rows, mask):
        self.builder, self.rows, self.mask = builder, rows, mask
        self.sums = rows.vector
        self.keys = 1  # keys that are added at a time

    def first(self, old, factor):
        return self.builder.fmul(old, factor)

    def values(self, starts, columns):
        return [
            value
            for column in columns
            for value in self.rows.load(self.builder.add(starts[0], column), self.mask)
        ]

    def weight(self, weights, at):
        number = self.builder.load(self.builder.gep(weights, [at]))
        return simd.broadcast(self.builder, number, self.rows.lanes)

    def multiply_add(self, weight, value, total):
        return simd.fuse(self.builder, weight, value, total)

    def last(self, total, old, factor, unit):
        return total


class _Integers(_Floats):
    """An emitter of exact sums of two keys' int8 values at a time, with 16-bit weights of both in a
    word; at the end they are multiplied by the weights' unit and added to the rescaled old sums."""

    def __init__(self, builder, rows, mask):
        super().__init__(builder, rows, mask)
        self.sums = ir.VectorType(_i32, rows.lanes)
        self.keys = 2

    def first(self, old, factor):
        return ir.Constant(self.sums, None)

    def values(self, starts, columns):
        """Emit loads of rows at two addresses, `starts`, and return for each register of columns
        the 16-bit numbers of both keys interleaved."""
        builder, lanes = self.builder, self.rows.lanes
        both = ir.VectorType(_i16, 2 * lanes)
        values = []
        for column in columns:
            words = [
                self.rows.load_words(builder.add(start, column), self.mask) for start in starts
            ]
            count = words[0].type.count
            for part in range(self.rows.vectors):
                order = [
                    key * count + part * lanes + lane for lane in range(lanes) for key in (0, 1)
                ]
                order_ir = ir.Constant(ir.VectorType(_i32, 2 * lanes), order)
                values.append(builder.sext(builder.shuffle_vector(*words, order_ir), both))
        return values

    def weight(self, weights, at):
        words = self.builder.bitcast(weights, _i32.as_pointer())
        word = self.builder.load(self.builder.gep(words, [at]))
        pairs = simd.broadcast(self.builder, word, self.rows.lanes)
        return self.builder.bitcast(pairs, ir.VectorType(_i16, 2 * self.rows.lanes))

    def multiply_add(self, weight, value, total):
        return self.builder.add(total, multiply_pairs(self.builder, value, weight))

    def last(self, total, old, factor, unit):
        number = self.builder.sitofp(total, self.rows.vector)
        return simd.fuse(self.builder, number, unit, self.builder.fmul(old, factor))


def _weigh(heads, is_masked, fetches=True):
    @intrinsic
    def weigh(
        typingctx,
        cache_like,
        q,
        acc,
        ci,
        ld,
        rescale,
        p,
        addresses,
        ai,
        shift,
        ahead,
        hi,
        offset,
        keys,
        rest,
    ):
        """Set acc[head] to acc[head] * rescale[head] + the sum over `keys` keys of p[key][head] *
        row[key], for span_of columns from byte `offset` of the rows at addresses[ai:] + shift; if
        masked, for `rest` columns of one unit. acc begins at index ci, heads `ld` apart.

        If it fetches, the same bytes of the rows at ahead[hi:] are prefetched. Where the type of q
        says that the cache is multiplied as integers, p holds the words that `weights.store_pairs`
        wrote, whose unit is rescale[LANES + head]; a last key without a partner is paired with one
        more row, at weight 0.
        """
        dtype = simd.float_of(acc)
        in_integers = are_integers(cache_like, q)

        def codegen(context, builder, sig, args):
            _, _, acc_, ci_, ld_, rescale_, p_, addresses_, ai_, shift_, ahead_, *_ = args
            hi_, offset_, keys_, rest_ = args[-4:]
            rows = Rows(builder, cache_like, dtype)
            mask = rows.mask(rest_) if is_masked else None
            product = (_Integers if in_integers else _Floats)(builder, rows, mask)
            units = 1 if is_masked else units_of(cache_like)
            columns = [_i64(unit * rows.unit_bytes) for unit in range(units)]
            parts = units * rows.vectors
            zero = _i64(0)
            first = simd.pointer_to(context, builder, addresses, addresses_, ai_)
            next_ = simd.pointer_to(context, builder, ahead, ahead_, hi_)
            weights = simd.pointer_to(context, builder, p, p_, zero)
            from_start = builder.add(shift_, offset_)
            factors = simd.pointer_to(context, builder, rescale, rescale_, zero)
            target = simd.pointer_to(context, builder, acc, acc_, ci_)

            def spread(index):
                number = builder.load(builder.gep(factors, [_i64(index)]))
                return simd.broadcast(builder, number, rows.lanes)

            def pointers(head):
                row = builder.gep(target, [builder.mul(ld_, _i64(head))])
                return [builder.gep(row, [_i64(part * rows.lanes)]) for part in range(parts)]

            def old(pointer):
                return simd.load_vector(builder, pointer, rows.vector, 4)

            sums = []
            for head in range(heads):
                if in_integers:
                    sums += [product.first(None, None)] * parts
                    continue
                factor = spread(head)
                sums += [product.first(old(pointer), factor) for pointer in pointers(head)]

            def step(index, sums):
                here = [
                    builder.add(builder.mul(index, _i64(product.keys)), _i64(key))
                    for key in range(product.keys)
                ]
                starts = [
                    builder.add(builder.load(builder.gep(first, [key])), from_start) for key in here
                ]
                values = product.values(starts, columns)
                for key in here if fetches else ():
                    later = builder.add(builder.load(builder.gep(next_, [key])), offset_)
                    for column in range(0, units * rows.unit_bytes, LINE):
                        emit_prefetch(builder, builder.add(later, _i64(column)))
                sums = list(sums)
                for head in range(heads):
                    at = builder.add(builder.mul(index, _i64(heads)), _i64(head))
                    weight = product.weight(weights, at)
                    for part, value in enumerate(values):
                        at = head * parts + part
                        sums[at] = product.multiply_add(weight, value, sums[at])
                return sums

            steps = builder.sdiv(builder.add(keys_, _i64(product.keys - 1)), _i64(product.keys))
            sums = emit_loop(builder, steps, sums, step, "weigh")
            for head in range(heads):
                factor, unit = (spread(head), spread(rows.lanes + head)) if in_integers else (0, 0)
                for part, pointer in enumerate(pointers(head)):
                    total = sums[head * parts + part]
                    if in_integers:
                        total = product.last(total, old(pointer), factor, unit)
                    simd.store_vector(builder, total, pointer, 4)
            return context.get_dummy_value()

        index = types.int64
        arguments = (
            cache_like,
            q,
            acc,
            index,
            index,
            rescale,
            p,
            addresses,
            index,
            index,
            ahead,
            index,
            index,
            index,
            index,
        )
        return types.void(*arguments), codegen

    return weigh


weigh_1, weigh_4 = _weigh(1, False), _weigh(HEADS, False)
# For columns in lines that the ones before have prefetched.
weigh_dry_1, weigh_dry_4 = _weigh(1, False, fetches=False), _weigh(HEADS, False, fetches=False)
weigh_rest_1, weigh_rest_4 = _weigh(1, True), _weigh(HEADS, True)
