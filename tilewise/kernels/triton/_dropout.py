"""Which probabilities of a tile dropout keeps: `reference.dropout`'s rule, in a tile's own layout.

What: keep_ij = 16 bits of Philox4x32-7 under (seed, offset) and the place (b Hq + h, i, j), at
      least the threshold.
Grid: none, inlined into the kernels of attention.
One call: one Philox call for eight keys of a row, its eight comparisons packed into one integer,
      which alone is broadcast to the tile: key 32 n + 8 w + 2 t + half is bit 2 w + half of the
      call (n, t). An accumulator of a tensor core holds these eight keys in one thread.
Traffic: seed and offset, once a program.
Numerics: integers; equal for every tile, kernel and backend.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


class Dropout(NamedTuple):
    """What decides which probabilities are kept."""

    philox: object  # int64 (2,): seed, offset
    threshold: object  # of 65,536
    scale: object  # of the kept ones


class Draw(NamedTuple):
    """The key and the fixed part of the counter of one head; made inside a kernel."""

    key_low: object
    key_high: object
    head: object  # b Hq + h
    offset: object


@triton.jit
def draw_of_head(dropout, head):
    """Load the seed and return the `Draw` of query head b Hq + h."""
    seed, offset = tl.load(dropout.philox), tl.load(dropout.philox + 1)
    return Draw(
        seed.to(tl.uint32), (seed >> 32).to(tl.uint32), head.to(tl.uint32), offset.to(tl.uint32)
    )


@triton.jit
def _kept_of_calls(draw, threshold, rows, calls):
    """Return for each (row, call), broadcast, the eight comparisons as bits of an int32."""
    row_words, call_words = tl.broadcast(rows.to(tl.uint32), calls.to(tl.uint32))
    zero = call_words * 0
    words = tl.philox_impl(
        call_words, row_words, zero + draw.head, zero + draw.offset, draw.key_low, draw.key_high,
        ROUNDS,
    )  # fmt: skip
    kept = _compared(words[0], threshold, 0) | _compared(words[1], threshold, 2)
    return kept | _compared(words[2], threshold, 4) | _compared(words[3], threshold, 6)


@triton.jit
def _compared(word, threshold, bit: tl.constexpr):
    low = ((word & 0xFFFF).to(tl.int32) >= threshold).to(tl.int32)
    high = ((word >> 16).to(tl.int32) >= threshold).to(tl.int32)
    return (low << bit) | (high << (bit + 1))


@triton.jit
def kept(
    draw, threshold, first_row, first_key,
    ROWS: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return which probabilities of a tile are kept, bool (ROWS, KEYS), or transposed.

    first_key is a multiple of 32, and so is KEYS.
    """
    rows = first_row + tl.arange(0, ROWS)
    calls = first_key // 8 + tl.arange(0, KEYS // 8)
    if KEYS_FIRST:
        # Here a thread holds one key of many calls. Gathering through shared memory draws each call
        # once: 16 instructions an element, against 34 when every thread draws what it needs.
        bits = _kept_of_calls(draw, threshold, rows[None, :], calls[:, None])
        keys = tl.arange(0, KEYS)
        call = keys // 32 * 4 + keys % 8 // 2
        at = keys // 8 % 4 * 2 + keys % 2
        wide = tl.gather(bits, tl.broadcast_to(call[:, None], [KEYS, ROWS]), 0)
        return (wide >> at[:, None]) & 1 != 0
    else:
        bits = _kept_of_calls(draw, threshold, rows[:, None], calls[None, :])
        bits = tl.reshape(bits, [ROWS, KEYS // 32, 1, 4, 1])
        at = (2 * tl.arange(0, 4)[:, None] + tl.arange(0, 2)[None, :])[None, None, :, None, :]
        wide = tl.broadcast_to(bits, [ROWS, KEYS // 32, 4, 4, 2])
        return tl.reshape((wide >> at) & 1, [ROWS, KEYS]) != 0
