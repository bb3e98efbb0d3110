"""Dropout's random bits on a CPU: Philox4x32-7 for 128 keys of a row at once.

What      the words of `reference.dropout`: key (seed), counters (j // 32, 2 i + half, b Hq + h,
          offset), where the two halves serve 32 keys j of row i.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  8 calls of the cipher side by side, a vector of 64-bit lanes whose low halves count: one
          multiplication gives both halves of the next state.
Traffic   writes 128 bits.
Numerics  integers alone, bit for bit those of the reference.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.threads import inner

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORDS = 4  # words of 32 keys: a tile of 128
_LANES = 2 * _WORDS
_i32, _i64 = ir.IntType(32), ir.IntType(64)


def _constant(kind, value):
    return simd.constant(kind, value) if isinstance(kind, ir.VectorType) else kind(value)


def _product(builder, word, factor):
    """Emit the 64-bit product of the low half of `word` and the 32-bit number `factor`."""
    low = builder.and_(word, _constant(word.type, 0xFFFFFFFF))
    return builder.mul(low, _constant(word.type, factor))


def _xor(builder, a, b):
    """Emit a ^ b; if one of them is a vector and the other a scalar, the scalar is broadcast."""
    if a.type != b.type:
        a, b = (x if x.type != _i64 else simd.broadcast(builder, x, _LANES) for x in (a, b))
    return builder.xor(a, b)


def _mix(builder, product, word, key):
    """Emit (the high half of the 64-bit `product`) ^ `word` ^ `key`."""
    high = builder.lshr(product, _constant(product.type, 32))
    return _xor(builder, _xor(builder, high, word), key)


def _encrypt(builder, counter, key):
    """Emit the seven rounds of Philox, and return the four words that they draw.

    Words of `counter` (4) are i64 numbers or vectors, words of `key` (2) are i64 numbers. Only the
    low half of each has a meaning, in the results too. A word of the counter that is equal for the
    whole row is a number: values that depend on such words alone stay scalar in the first two
    rounds.
    """
    c0, c1, c2, c3 = counter
    for turn in range(ROUNDS):
        k0, k1 = (
            builder.add(word, _i64(turn * step)) for word, step in zip(key, _KEY_STEPS, strict=True)
        )
        p0, p1 = _product(builder, c0, _MULTIPLIERS[0]), _product(builder, c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = _mix(builder, p1, c1, k0), p1, _mix(builder, p0, c3, k1), p0
    return c0, c1, c2, c3


@intrinsic
def _store_kept(typingctx, words, at, block, query, head, offset, key0, key1, limit):
    def codegen(context, builder, sig, args):
        words_, at_, block_, query_, head_, offset_, key0_, key1_, limit_ = args
        kind = ir.VectorType(_i64, _LANES)
        lanes = range(_LANES)
        blocks = builder.add(
            simd.broadcast(builder, block_, _LANES),
            ir.Constant(kind, [lane % _WORDS for lane in lanes]),
        )
        halves = builder.add(
            simd.broadcast(builder, builder.shl(query_, _i64(1)), _LANES),
            ir.Constant(kind, [lane // _WORDS for lane in lanes]),
        )
        drawn = _encrypt(builder, (blocks, halves, head_, offset_), (key0_, key1_))
        drawn = [builder.trunc(word, ir.VectorType(_i32, _LANES)) for word in drawn]
        above = ir.Constant(ir.VectorType(_i32, _WORDS), [0] * _WORDS)
        for place in range(8):
            picked = [place // 4 * _WORDS + lane for lane in range(_WORDS)]
            picks = ir.Constant(ir.VectorType(_i32, _WORDS), picked)
            word = builder.shuffle_vector(drawn[place % 4], drawn[place % 4], picks)
            bit = builder.and_(builder.lshr(limit_, _i64(place)), _i64(1))
            free = builder.trunc(builder.sub(bit, _i64(1)), _i32)  # all bits where the limit's is 0
            free = simd.broadcast(builder, free, _WORDS)
            # Above the limit if at least two of three are set: this bit, the lower ones' result,
            # and `free`.
            above = builder.or_(
                builder.and_(word, above),
                builder.and_(builder.or_(word, above), free),
            )
        pointer = simd.pointer_to(context, builder, words, words_, at_)
        simd.store_vector(builder, above, pointer, 4)
        return context.get_dummy_value()

    return types.void(words, *[types.int64] * 8), codegen


@inner
def keep_row(dropout, words, at, head, query, key):
    """Fill words[at : at + 4] with 128 bits, for the keys key ... key + 127 of a row of attention:
    1 if dropout keeps the probability, 0 if it drops it.

    Args:
        dropout: a `Dropout` with a threshold above 0.
        head: b Hq + h, the number of the query head over all sequences.
        query, key: positions counted from the start of the sequence; key is a multiple of 128.
    """
    _store_kept(
        words,
        at,
        key // 32,
        query,
        head,
        dropout.offset,
        dropout.key0,
        dropout.key1,
        dropout.threshold - 1,
    )
