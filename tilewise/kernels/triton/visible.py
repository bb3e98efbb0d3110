"""Block masks on the device: which tiles a program visits, and what it sees of a partial one.

What: the lists and bit tiles of `kernels.spec.MaskTensors`, read tile by tile.
Grid: none, inlined into the kernels of attention; `mask_reach_kernel` has one program for each
      band of TILE_M rows of each bit tile.
One call: the entries of one tile of rows (or keys), or one compute tile of bits.
Traffic: 8 bytes an entry; of a bit tile one word for 32 keys of a row, whatever the tile's layout.
Numerics: integers. A compute tile divides a mask tile, so it has one entry.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def entries_of_tile(spans, b, h, batch, head, tile):
    """Return (first entry, end of the full ones, end of the partial ones) of a tile's list."""
    at = spans + (b.to(tl.int64) * batch + h.to(tl.int64) * head + tile) * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def entries_between(entries, begin, end, first_tile, end_tile):
    """Cut a run of entries, which ascend, to those of the tiles [first_tile, end_tile)."""
    begin = _first_from(entries, begin, end, first_tile)
    return begin, _first_from(entries, begin, end, end_tile)


@triton.jit
def lists_of_tile(extras, b, h, first, begin, end, variant: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return (first full entry, their end, first partial entry, their end) of a tile's list.

    The tile begins at row `first`, or with KEYS_FIRST at that key. Where windows or lengths hide
    pairs, too, only mask tiles of the other side that lie in [begin, end) are left.
    """
    if KEYS_FIRST:
        SIZE: tl.constexpr = variant.mask_q
        entries = extras.mask_column_entries
        first, full_last, last = entries_of_tile(
            extras.mask_columns, b, h, extras.mask_all_column_tiles, extras.mask_column_tiles,
            first // variant.mask_k,
        )  # fmt: skip
    else:
        SIZE: tl.constexpr = variant.mask_k
        entries = extras.mask_row_entries
        first, full_last, last = entries_of_tile(
            extras.mask_rows, b, h, extras.mask_all_row_tiles, extras.mask_row_tiles,
            first // variant.mask_q,
        )  # fmt: skip
    partial = full_last
    if variant.ruled:
        first_tile, end_tile = begin // SIZE, tl.cdiv(end, SIZE)
        first, full_last = entries_between(entries, first, full_last, first_tile, end_tile)
        partial, last = entries_between(entries, partial, last, first_tile, end_tile)
    return first, full_last, partial, last


@triton.jit
def pairs_of_entry(
    extras, entry, first, within, loaded, variant: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return (which `loaded` rows of the other side meet any, which pairs may) in a bit tile.

    first: row or key at which the own tile begins; within: where the other side does, from the
    start of the mask tile; entry: where the bit tile's number stands, after that of its column.
    """
    number = tl.load(entry + 1)
    if KEYS_FIRST:
        row, key = within, first % variant.mask_k
    else:
        row, key = first % variant.mask_q, within
        loaded &= reached_keys(
            extras.mask_reach, number, row // TILE_M, key, variant, TILE_M, TILE_N
        )
    allowed = visible_bits(extras.mask_bits, number, row, key, variant, TILE_M, TILE_N, KEYS_FIRST)
    return loaded, allowed


@triton.jit
def kind_of_tile(extras, b, h, row, col, variant: tl.constexpr):
    """Return the bit tile in which a compute tile lies, -1 for a full tile, -2 for an empty one."""
    kind = row * 0 - 1
    if variant.mask_q > 0:
        first, full_last, last = entries_of_tile(
            extras.mask_rows, b, h, extras.mask_all_row_tiles, extras.mask_row_tiles,
            row // variant.mask_q,
        )  # fmt: skip
        entries, tile = extras.mask_row_entries, col // variant.mask_k
        full, full_end = entries_between(entries, first, full_last, tile, tile + 1)
        partial, partial_end = entries_between(entries, full_last, last, tile, tile + 1)
        at = entries + partial.to(tl.int64) * 2 + 1
        number = tl.load(at, mask=partial < partial_end, other=-2)
        kind = tl.where(full < full_end, -1, number)
    return kind


@triton.jit
def _first_from(entries, begin, end, tile):
    """Return the first of the ascending entries [begin, end) that is `tile` or comes after it."""
    while begin < end:
        middle = begin + (end - begin) // 2
        before = tl.load(entries + middle.to(tl.int64) * 2) < tile
        begin = tl.where(before, middle + 1, begin)
        end = tl.where(before, end, middle)
    return begin


@triton.jit
def visible_bits(
    bits, number, first_row, first_key,
    variant: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KEYS_FIRST: tl.constexpr,
):  # fmt: skip
    """Return a compute tile of bit tile `number`, bool (ROWS, KEYS) or transposed.

    Rows and keys count from the start of the mask tile. Each row loads each of its words once; a
    thread of a tensor core's accumulator then shifts its few words by its own columns.
    """
    WORDS: tl.constexpr = variant.mask_k // 32
    row_axis: tl.constexpr = 0 if KEYS_FIRST else 1
    start = (number.to(tl.int64) * variant.mask_q + first_row) * WORDS + first_key // 32
    ptrs = bits + start + tl.arange(0, ROWS) * WORDS
    keys = first_key % 32 + tl.arange(0, KEYS)
    at = tl.expand_dims(keys, 1 - row_axis)
    word = tl.expand_dims(tl.load(ptrs), row_axis)
    for index in tl.static_range(1, KEYS // 32):
        following = tl.expand_dims(tl.load(ptrs + index), row_axis)
        word = tl.where(at >= 32 * index, following, word)
    return (word >> (at % 32)) & 1 != 0


@triton.jit
def reached_keys(
    reach, number, band, first_key, variant: tl.constexpr, TILE_M: tl.constexpr, KEYS: tl.constexpr
):
    """Return which keys of a compute tile some row of band `band` of its bit tile sees."""
    WORDS: tl.constexpr = variant.mask_k // 32
    keys = first_key + tl.arange(0, KEYS)
    start = (number.to(tl.int64) * (variant.mask_q // TILE_M) + band) * WORDS
    return (tl.load(reach + start + keys // 32) >> (keys % 32)) & 1 != 0


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def mask_reach_kernel(bits, reach, TILE_M: tl.constexpr, WORDS: tl.constexpr):
    """Join the words of TILE_M rows of a bit tile: the keys that any of them sees."""
    band = tl.program_id(0).to(tl.int64)
    words = tl.arange(0, WORDS)
    rows = band * TILE_M + tl.arange(0, TILE_M)
    seen = tl.load(bits + rows[:, None] * WORDS + words[None, :])
    tl.store(reach + band * WORDS + words, tl.reduce(seen, 0, _either))
