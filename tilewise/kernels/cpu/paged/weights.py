"""Weights of a chunk's values as 16-bit integers, two keys to a word.

What      the factors of int8 values in decoding, if it multiplies integers.
Grid      none: called by one thread of `decode.py` for every chunk and pass of heads.
One call  a register of weights, [key][head], becomes half a register of words, [pair][head].
Traffic   none beyond the L1 cache.
Numerics  a weight is rounded to 1 / 32,767 of its head's largest in the chunk: an error of at most
          2^-16 of that. Products with 8 bits, summed over at most 64 keys of a chunk, stay below
          2^29. Weights that are not finite make the unit NaN, and so every sum of that head.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd

_i32 = ir.IntType(32)


def _store_pairs(heads):
    @intrinsic
    def store_pairs(typingctx, words, index, weights):
        """Store LANES weights, [key][head], to words[index : index + LANES / 2] as pairs of 16-bit
        integers of two neighbouring keys of a head, rounded to the nearest.

        `words` is an array of floats that holds words; of a word the even key has the low half.
        Kernels for floats name this call in a branch that they never take; where a register holds
        no two keys it stores nothing.
        """

        def codegen(context, builder, sig, args):
            number = args[2]
            count = number.type.count
            if number.type.element != ir.FloatType() or count < 2 * heads:
                return context.get_dummy_value()
            lanes = ir.VectorType(_i32, count)
            # A small integer added to 1.5 * 2^23 is in the low bits of the float.
            moved = builder.fadd(number, simd.constant(number.type, 1.5 * 2.0**23))
            bits = builder.bitcast(moved, lanes)
            even = [
                2 * pair * heads + head
                for pair in range(count // (2 * heads))
                for head in range(heads)
            ]
            low, high = (
                builder.shuffle_vector(
                    bits,
                    bits,
                    ir.Constant(ir.VectorType(_i32, len(even)), [lane + odd for lane in even]),
                )
                for odd in (0, heads)
            )
            kind = low.type
            low = builder.and_(low, simd.constant(kind, 0xFFFF))
            high = builder.shl(high, simd.constant(kind, 16))
            pointer = simd.pointer_to(context, builder, words, *args[:2])
            simd.store_vector(builder, builder.or_(low, high), pointer, 4)
            return context.get_dummy_value()

        return types.void(words, types.int64, weights), codegen

    return store_pairs


store_pairs_1, store_pairs_4 = _store_pairs(1), _store_pairs(4)
