"""Dropout of a tile's probabilities: the rule of `reference.dropout`, in a tile's own layout.

What: keep_ij = a byte of Philox4x32-7 under (seed, offset) and the position (b Hq + h, i, j) is at
      least the threshold.
Grid: none, inlined into the kernels of attention.
One call: two Philox calls for 32 keys of a row, compared at once: a word of 32 bits, which tiles
      then read like a word of a block mask, in either orientation.
Traffic: seed and offset, once a program.
Numerics: integers; equal for every tile, kernel and backend.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


class Draw(NamedTuple):
    """The numbers that decide which probabilities of one head are kept; made inside a kernel."""

    key_low: object  # the seed
    key_high: object
    head: object  # b Hq + h
    offset: object
    limit: object  # threshold - 1, 0 to 255: bytes above it are kept
    scale: object  # factor of the kept probabilities


@triton.jit
def key_and_offset(philox):
    """Return three 32-bit words: the seed's low and high ones, and the offset.

    philox: the address of (seed, offset), int64 (2,).
    """
    seed, offset = tl.load(philox), tl.load(philox + 1)
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32), offset.to(tl.uint32)


@triton.jit
def draw_of_head(extras, head, variant: tl.constexpr):
    """Return the Draw of head number b Hq + h, None without dropout."""
    draw = None
    if variant.dropout:
        low, high, offset = key_and_offset(extras.philox)
        number = head.to(tl.uint32)
        limit = extras.drop_limit.to(tl.uint32) >> 16
        draw = Draw(low, high, number, offset, limit, extras.keep_scale)
    return draw


@triton.jit
def _kept_words(draw, rows, block):
    """Return a 32-bit word for each row: bit k is 1 if the pair with key 32 block + k is kept.

    Bytes are compared with the limit from their lowest bit on: where a bit of the limit is 0, the
    byte is above it if its bit is set or its lower bits are above; where it is 1, if both are true.
    """
    row = rows.to(tl.uint32)
    zero = row * 0
    above = zero
    for half in tl.static_range(2):
        words = tl.philox_impl(
            zero + block.to(tl.uint32),
            row * 2 + half,
            zero + draw.head,
            zero + draw.offset,
            draw.key_low,
            draw.key_high,
            ROUNDS,
        )
        for place in tl.static_range(4):
            word = words[place]
            free = ((draw.limit >> (4 * half + place)) & 1) - 1  # all bits where the limit's is 0
            above = (word & above) | (word & free) | (above & free)
    return above


@triton.jit
def kept(
    draw, first_row, first_key, ROWS: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr
):
    """Return which probabilities of a tile dropout keeps, bool (ROWS, KEYS).

    With KEYS_FIRST it is (KEYS, ROWS). first_key is a multiple of KEYS, and KEYS is 16 or a
    multiple of 32.
    """
    row_axis: tl.constexpr = 0 if KEYS_FIRST else 1
    rows = first_row + tl.arange(0, ROWS)
    block = first_key // 32
    keys = tl.expand_dims(first_key % 32 + tl.arange(0, KEYS), 1 - row_axis)
    word = tl.expand_dims(_kept_words(draw, rows, block), row_axis)
    for index in tl.static_range(1, KEYS // 32):
        following = _kept_words(draw, rows, block + index)
        word = tl.where(keys >= 32 * index, tl.expand_dims(following, row_axis), word)
    return (word >> (keys % 32)) & 1 != 0
