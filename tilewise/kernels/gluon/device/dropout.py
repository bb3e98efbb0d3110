"""Which probabilities dropout keeps: `reference.dropout`'s rule, in the layout of a WGMMA's sum.

What: p_ij where 16 bits of Philox4x32-7, of (seed, offset) and the place (b Hq + h, i, j), are at
      least the threshold, else 0.
Grid: none, inlined into the warpgroups.
One call: one (64, n) block; each thread draws once for the eight keys that it holds of 32.
Traffic: seed and offset, once a tile.
Numerics: integers; equal to the reference bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ROUNDS = gl.constexpr(7)
MULTIPLIER_0 = gl.constexpr(0xD2511F53)
MULTIPLIER_1 = gl.constexpr(0xCD9E8D57)
KEY_STEP_0 = gl.constexpr(0x9E3779B9)
KEY_STEP_1 = gl.constexpr(0xBB67AE85)


class Draw(NamedTuple):
    """What decides which probabilities of one head are kept; all uint32."""

    key_low: object  # the seed
    key_high: object
    offset: object
    head: object  # b Hq + h
    limit: object  # 65,536 * threshold - 1: 16 bits are kept that are above it in the upper half


@gluon.jit
def draw_of(philox, limit, head):
    """Return the Draw of a head. philox: int64 (2,), seed and offset; limit: see Draw, int32."""
    seed, offset = gl.load(philox), gl.load(philox + 1)
    return Draw(
        seed.to(gl.uint32), (seed >> 32).to(gl.uint32), offset.to(gl.uint32), head.to(gl.uint32),
        limit.to(gl.uint32, bitcast=True),
    )  # fmt: skip


@gluon.jit
def _multiply(word, factor: gl.constexpr):
    """Return the high and the low half of a product of 32 bits; one instruction."""
    product = word.to(gl.uint64) * factor
    return (product >> 32).to(gl.uint32), product.to(gl.uint32)


@gluon.jit
def _philox(c0, c1, c2, c3, key_low, key_high):
    """Encrypt four counters, which broadcast, with a key."""
    for _ in gl.static_range(ROUNDS):
        high0, low0 = _multiply(c0, MULTIPLIER_0)
        high1, low1 = _multiply(c2, MULTIPLIER_1)
        c0 = high1 ^ c1 ^ key_low
        c1 = low1
        c2 = high0 ^ c3 ^ key_high
        c3 = low0
        key_low = key_low + KEY_STEP_0
        key_high = key_high + KEY_STEP_1
    return c0, c1, c2, c3


@gluon.jit
def random_words(draw, first_row, first_key, n: gl.constexpr, layout: gl.constexpr):
    """Draw for the rows from `first_row` and the n keys from `first_key`, a multiple of 32.

    Returns:
        uint32 (64, n / 32, 4, 4), whose word [row, block, word, call] has in its low half the bits
        of key 32 block + 8 word + 2 call and in its high half those of the next, as `drop` wants
        them for a (64, n) tile in `layout`.
    """
    shape = gl.zeros([64, n], gl.int32, layout).reshape([64, n // 32, 4, 4, 2])  # no instruction
    keys: gl.constexpr = gl.SliceLayout(4, shape.type.layout)
    calls: gl.constexpr = gl.SliceLayout(2, keys)  # (row, block, call)
    block = gl.arange(0, n // 32, gl.SliceLayout(0, gl.SliceLayout(2, calls)))
    call = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, calls)))
    row = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, calls)))
    block, call = gl.expand_dims(block, 0), gl.expand_dims(call, 0)
    c0 = gl.expand_dims(block * 4, 2) + gl.expand_dims(call, 1)
    c0 = (c0 + first_key // 8).to(gl.uint32)
    c1 = gl.expand_dims(gl.expand_dims(row + first_row, 1), 2).to(gl.uint32)
    w0, w1, w2, w3 = _philox(c0, c1, draw.head, draw.offset, draw.key_low, draw.key_high)
    words = gl.join(gl.join(w0, w1), gl.join(w2, w3))  # (row, block, call, word % 2, word // 2)
    words = words.permute([0, 1, 4, 3, 2]).reshape([64, n // 32, 4, 4])
    return gl.convert_layout(words, keys, assert_trivial=True)


@gluon.jit
def drop(p, words, draw):
    """Set dropped probabilities of p (64, n) to 0, by its random words."""
    n: gl.constexpr = p.shape[1]
    layout: gl.constexpr = p.type.layout
    even, odd = gl.split(p.reshape([64, n // 32, 4, 4, 2]))
    even = gl.where((words << 16) > draw.limit, even, 0.0)
    odd = gl.where(words > draw.limit, odd, 0.0)
    p = gl.join(even, odd).reshape([64, n])
    return gl.convert_layout(p, layout, assert_trivial=True)
