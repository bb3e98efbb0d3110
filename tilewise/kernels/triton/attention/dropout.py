"""Which probabilities of a tile dropout keeps: `reference.dropout`'s rule, in a tile's own layout.

What: keep_ij = 16 bits of Philox4x32-7 under (seed, offset) and the place (b Hq + h, i, j), at
      least the threshold.
Grid: none, inlined into the kernels of attention.
One call: one Philox call for eight keys of a row, its eight comparisons packed into one integer,
      which alone is broadcast to the tile: key 32 n + 8 w + 2 t + half is bit 2 w + half of the
      call (n, t). An accumulator of a tensor core holds these eight keys in one thread; where keys
      stand first it does not, and the four calls of 32 keys are joined into a word.
Traffic: seed and offset, once a program.
Numerics: integers; equal for every tile, kernel and backend.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


class Draw(NamedTuple):
    """What decides which probabilities of one head are kept; made inside a kernel."""

    key_low: object  # the seed
    key_high: object
    head: object  # b Hq + h
    offset: object
    threshold: object  # of 65,536
    scale: object  # of the kept ones


@triton.jit
def key_and_offset(philox):
    """Load (seed, offset), int64 (2,), as the 32-bit words (low, high, offset)."""
    seed, offset = tl.load(philox), tl.load(philox + 1)
    return seed.to(tl.uint32), (seed >> 32).to(tl.uint32), offset.to(tl.uint32)


@triton.jit
def draw_of_head(extras, head):
    """Return what decides dropout in head number b Hq + h."""
    low, high, offset = key_and_offset(extras.philox)
    number = head.to(tl.uint32)
    return Draw(low, high, number, offset, extras.threshold, extras.keep_scale)


@triton.jit
def _kept_of_calls(draw, rows, calls):
    """Return for each (row, call), broadcast, the eight comparisons as bits of an int32."""
    row_words, call_words = tl.broadcast(rows.to(tl.uint32), calls.to(tl.uint32))
    zero = call_words * 0
    words = tl.philox_impl(
        call_words, row_words, zero + draw.head, zero + draw.offset, draw.key_low, draw.key_high,
        ROUNDS,
    )  # fmt: skip
    kept = _compared(words[0], draw.threshold, 0) | _compared(words[1], draw.threshold, 2)
    kept |= _compared(words[2], draw.threshold, 4)
    return kept | _compared(words[3], draw.threshold, 6)


@triton.jit
def _compared(word, threshold, bit: tl.constexpr):
    low = ((word & 0xFFFF).to(tl.int32) >= threshold).to(tl.int32)
    high = ((word >> 16).to(tl.int32) >= threshold).to(tl.int32)
    return (low << bit) | (high << (bit + 1))


@triton.jit
def _word_of_row(draw, rows, first_call):
    """Return the comparisons of 32 keys of each row, that of key k in bit k of an int32."""
    calls = tl.arange(0, 4)[None, :]
    bits = _kept_of_calls(draw, rows[:, None], first_call + calls)
    # Pairs of bits, one pair for each eight keys, move to their places: 2 w + half to 8 w + half.
    spread = (bits & 3) | ((bits & 12) << 6) | ((bits & 48) << 12) | ((bits & 192) << 18)
    return tl.sum(spread << (2 * calls), 1)  # no two calls share a bit


@triton.jit
def kept(
    draw, first_row, first_key,
    ROWS: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return which probabilities of a tile are kept, bool (ROWS, KEYS), or transposed.

    first_key is a multiple of KEYS, and KEYS is 16 or a multiple of 32.
    """
    rows = first_row + tl.arange(0, ROWS)
    if KEYS_FIRST or KEYS < 32:
        # Here a thread holds few keys of many rows, each of another call. The four calls of 32 keys
        # become one word a row, drawn once; tiles then read it like a word of a block mask.
        row_axis: tl.constexpr = 0 if KEYS_FIRST else 1
        first_call = first_key // 32 * 4
        keys = tl.expand_dims(first_key % 32 + tl.arange(0, KEYS), 1 - row_axis)
        word = tl.expand_dims(_word_of_row(draw, rows, first_call), row_axis)
        for index in tl.static_range(1, KEYS // 32):
            following = _word_of_row(draw, rows, first_call + 4 * index)
            word = tl.where(keys >= 32 * index, tl.expand_dims(following, row_axis), word)
        return (word >> (keys % 32)) & 1 != 0
    else:
        calls = first_key // 8 + tl.arange(0, KEYS // 8)
        bits = _kept_of_calls(draw, rows[:, None], calls[None, :])
        bits = tl.reshape(bits, [ROWS, KEYS // 32, 1, 4, 1])
        at = (2 * tl.arange(0, 4)[:, None] + tl.arange(0, 2)[None, :])[None, None, :, None, :]
        wide = tl.broadcast_to(bits, [ROWS, KEYS // 32, 4, 4, 2])
        return tl.reshape((wide >> at) & 1, [ROWS, KEYS]) != 0
