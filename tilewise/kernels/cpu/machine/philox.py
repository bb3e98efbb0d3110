"""Which probabilities dropout keeps: Philox4x32-7 for 128 keys of a row at once.

What      the numbers of `reference.dropout`: key (seed), counter (c, i, b Hq + h, offset), where
          call c = 4 (j // 32) + (j % 8) // 2 serves eight keys j of row i.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  16 calls of the cipher side by side, two vectors of eight 64-bit lanes whose low halves
          count: one multiplication gives both halves of the next state.
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
_CALLS = 16  # 8 keys each: a tile of 128
_LANES = 8
_i8, _i16, _i32, _i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


def _constant(kind, value):
    return simd.constant(kind, value) if isinstance(kind, ir.VectorType) else kind(value)


def _product(builder, word, factor):
    """The 64-bit product of the low half of `word`."""
    low = builder.and_(word, _constant(word.type, 0xFFFFFFFF))
    return builder.mul(low, _constant(word.type, factor))


def _xor(builder, a, b):
    """a ^ b; where one is a vector, so is the result."""
    if a.type != b.type:
        a, b = (x if x.type != _i64 else simd.broadcast(builder, x, _LANES) for x in (a, b))
    return builder.xor(a, b)


def _mix(builder, product, word, key):
    """The high half of `product`, xor `word`, xor `key`."""
    high = builder.lshr(product, _constant(product.type, 32))
    return _xor(builder, _xor(builder, high, word), key)


def _encrypt(builder, counter, key):
    """Seven rounds; words of counter and key are i64 numbers or vectors, low halves alone count.

    What the whole row shares stays a number, for two of the rounds.
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
def _store_kept(typingctx, words, at, call, query, head, offset, key0, key1, threshold):
    def codegen(context, builder, sig, args):
        words_, at_, call_, query_, head_, offset_, key0_, key1_, threshold_ = args
        kind = ir.VectorType(_i64, _LANES)
        halves = []
        for first in range(0, _CALLS, _LANES):
            calls = builder.add(
                simd.broadcast(builder, call_, _LANES),
                ir.Constant(kind, list(range(first, first + _LANES))),
            )
            halves.append(_encrypt(builder, (calls, query_, head_, offset_), (key0_, key1_)))
        limit = simd.broadcast(builder, builder.trunc(threshold_, _i16), 2 * _CALLS)
        every = ir.Constant(ir.VectorType(_i32, _CALLS), list(range(_CALLS)))
        # Bit 8 g + i of the mask of word w is key 32 g + 8 w + i of the tile.
        masks = ir.Constant(ir.VectorType(_i32, 4), ir.Undefined)
        for word, pair in enumerate(zip(*halves, strict=True)):
            low, high = (builder.trunc(x, ir.VectorType(_i32, _LANES)) for x in pair)
            numbers = builder.bitcast(
                builder.shuffle_vector(low, high, every), ir.VectorType(_i16, 2 * _CALLS)
            )
            bits = builder.bitcast(builder.icmp_unsigned(">=", numbers, limit), _i32)
            masks = builder.insert_element(masks, bits, _i32(word))
        octets = builder.bitcast(masks, ir.VectorType(_i8, 16))
        order = ir.Constant(
            ir.VectorType(_i32, 16), [4 * word + group for group in range(4) for word in range(4)]
        )
        kept = builder.shuffle_vector(octets, octets, order)
        pointer = simd.pointer_to(context, builder, words, words_, at_)
        simd.store_vector(builder, kept, pointer, 4)
        return context.get_dummy_value()

    return types.void(words, *[types.int64] * 8), codegen


@inner
def keep_row(dropout, words, at, head, query, key):
    """Fill words[at : at + 4] with the bits of the keys key ... key + 127 that a row keeps.

    Args:
        dropout: a `Dropout` with a threshold above 0.
        head: b Hq + h.
        query, key: counted from the start of the sequence; key is a multiple of 128.
    """
    if dropout.threshold > 65535:
        words[at : at + 4] = 0
        return
    _store_kept(
        words, at, key // 8, query, head, dropout.offset, dropout.key0, dropout.key1,
        dropout.threshold,
    )  # fmt: skip
