"""Which keys a query sees, and which queries a key: by windows, lengths and block masks.

What: ranges of keys and of rows, the three ranges of a loop over tiles, and the lists and bit tiles
      of `kernels.spec.MaskTensors`: the portable kernels' only arithmetic on windows and on the
      diagonal, which ends at the last query and the last key. A bit tile is a tile of a block mask
      that is neither empty nor full, stored as one bit for each pair of query and key.
Grid: none, inlined into the kernels of attention; `mask_reach_kernel` has one program for each
      band of TILE_M rows of each bit tile.
One call: one tile of rows, of keys, or of bits; vectors of rows and keys where they are given.
Traffic: 8 bytes an entry; of a bit tile one word for 32 keys of a row, whatever the tile's layout.
Numerics: integers. A compute tile divides a mask tile, so it has one entry.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def key_at(rows, length_q, length_k):
    """Return the index of the key at the position of each query: the last query is at the last key.

    rows: the indices of queries in their sequence.
    """
    return rows + (length_k - length_q)


@triton.jit
def query_at(cols, length_q, length_k):
    """Return the index of the query at the position of each key, the inverse of `key_at`."""
    return cols - (length_k - length_q)


@triton.jit
def keys_of_rows(rows, seqlen_q, seqlen_k, window_left, window_right, variant: tl.constexpr):
    """Return the begin and the end (excluded) of the keys that each row sees, without a block mask.

    rows: the indices of queries. An end may be at most its begin: such a row sees no key.
    """
    diagonal = key_at(rows, seqlen_q, seqlen_k)
    begin = diagonal * 0
    end = begin + seqlen_k
    if variant.left:
        begin = tl.maximum(diagonal - window_left, 0)
    if variant.right:
        end = tl.minimum(diagonal + window_right + 1, seqlen_k)
    return begin, end


@triton.jit
def visible(cols, begin, end, variant: tl.constexpr):
    """Return begin <= cols < end, broadcast over all three.

    Without a left window (`variant.left`) begin is taken as 0 and not compared.
    """
    seen = cols < end
    if variant.left:
        seen = seen & (cols >= begin)
    return seen


@triton.jit
def visible_pairs(cols, key_begin, key_end, allowed, variant: tl.constexpr, BITS: tl.constexpr):
    """Return which (query, key) pairs of a tile are visible, bool (queries, keys).

    cols: the keys; key_begin, key_end: the range of keys that each query sees; allowed: with BITS
    the pairs that a bit tile allows, which alone decide unless `variant.ruled`.
    """
    if BITS and not variant.ruled:
        seen = allowed  # a mask hides all that lies outside the sequence
    else:
        seen = visible(cols[None, :], key_begin[:, None], key_end[:, None], variant)
        if BITS:
            seen = seen & allowed
    return seen


@triton.jit
def span_of_tile(
    first,
    tile,
    length,
    limit,
    shift,
    before,
    after,
    STEP: tl.constexpr,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
):
    """Cut the inner loop of rows [first, first + tile) of `length` into its three ranges.

    Row i meets the columns [i + shift - before, i + shift + after] of [0, limit), each side only if
    BEFORE or AFTER. Returns (begin, full_begin, full_end, end, seen_begin): every row meets all of
    [full_begin, full_end), so no mask is needed there; no row meets anything outside
    [seen_begin, end). begin, full_begin and full_end are multiples of STEP.
    """
    last = tl.minimum(first + tile, length) - 1
    seen_begin = first * 0
    full_begin = seen_begin
    end = seen_begin + limit
    full_end = end
    if BEFORE:
        seen_begin = tl.minimum(tl.maximum(first + shift - before, 0), limit)
        full_begin = tl.maximum(last + shift - before, 0)
    if AFTER:
        end = tl.minimum(tl.maximum(last + shift + after + 1, 0), limit)
        full_end = tl.minimum(tl.maximum(first + shift + after + 1, 0), limit)
    begin = seen_begin // STEP * STEP
    end = tl.maximum(end, begin)
    full_begin = tl.minimum(tl.cdiv(full_begin, STEP), tl.cdiv(end, STEP)) * STEP
    full_end = tl.maximum(full_end // STEP * STEP, full_begin)
    return begin, full_begin, full_end, end, seen_begin


@triton.jit
def span_of_rows(
    first,
    length_q,
    length_k,
    window_left,
    window_right,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    variant: tl.constexpr,
):
    """Return the five bounds of `span_of_tile` for the keys that a tile of queries sees.

    The queries are [first, first + TILE) of a sequence; windows of -1 are unlimited.
    """
    return span_of_tile(
        first,
        TILE,
        length_q,
        length_k,
        length_k - length_q,
        window_left,
        window_right,
        STEP,
        variant.left,
        variant.right,
    )


@triton.jit
def span_of_keys(
    first,
    length_q,
    length_k,
    window_left,
    window_right,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
    variant: tl.constexpr,
):
    """Return the five bounds of `span_of_tile` of the queries that see keys [first, first + TILE).

    Queries stand in the place of columns, and keys in the place of rows.
    """
    limit = tl.where(first < length_k, length_q, 0)
    return span_of_tile(
        first,
        TILE,
        length_k,
        limit,
        length_q - length_k,
        window_right,
        window_left,
        STEP,
        variant.right,
        variant.left,
    )


@triton.jit
def queries_of_keys(diagonal, window_left, window_right):
    """Return the begin and the end (excluded) of the queries whose window holds each key.

    diagonal: the query at each key's position, from `query_at`. The ends are not cut to the
    sequence, and a negative window is not treated as unlimited.
    """
    return diagonal - window_right, diagonal + window_left + 1


@triton.jit
def seen_keys(cols, length_q, length_k, window_left, variant: tl.constexpr):
    """Return which keys exist and do not lie left of the first query's window: bool, as cols."""
    seen = cols < length_k
    if variant.left:
        seen = seen & (cols >= length_k - length_q - window_left)
    return seen


@triton.jit
def first_key_of_run(seqlen_k, run, WINDOW_LEFT: tl.constexpr):
    """Return the first key that the window of a run's first query holds, at least 0.

    Args:
        seqlen_k: the number of keys of the sequence.
        run: the number of its last tokens that are queries.
        WINDOW_LEFT: the number of keys before its own that a query sees.
    """
    return tl.maximum(seqlen_k - run - WINDOW_LEFT, 0)


@triton.jit
def end_of_keys(row, length_q, length_k):
    """Return the end (excluded) of the keys that a query sees under the causal rule, at least 0."""
    return tl.maximum(key_at(row, length_q, length_k) + 1, 0)


@triton.jit
def key_tile_range(seqlen_k, num_rows, WINDOW_LEFT: tl.constexpr, TILE_N: tl.constexpr):
    """Return the first tile and the number of tiles that hold a key some row of a run sees.

    Works on scalars and on vectors (one element per sequence). `num_rows` are the run's new tokens.
    """
    num_tiles = (seqlen_k + TILE_N - 1) // TILE_N
    first = num_tiles * 0
    if WINDOW_LEFT >= 0:
        first = first_key_of_run(seqlen_k, num_rows, WINDOW_LEFT) // TILE_N
    return first, num_tiles - first


@triton.jit
def keys_of_row_tile(
    seqlen_k,
    run,
    first_row,
    skipped,
    form: tl.constexpr,
    way: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Return (key_lo, key_hi, clean_lo, clean_hi) of the tile of rows of a run from `first_row`.

    No row of the tile sees a key outside [key_lo, key_hi), and every one sees all keys of the tiles
    of keys [clean_lo, clean_hi). Row r is token r // form.group. skipped: how many first keys are
    left out, with way.skipped; form and way: the constants of the kernel of `paged.rows`.
    """
    first_new = seqlen_k - run
    # Last keys that the first and the last row of this tile see.
    pos_first = first_new + first_row // form.group
    pos_last = first_new + tl.minimum((first_row + TILE_M - 1) // form.group, run - 1)
    if way.causal:
        key_hi = tl.maximum(pos_last + 1, 0)
        clean_hi = tl.maximum(pos_first + 1, 0) // TILE_N
    elif way.tree:
        key_hi = seqlen_k
        clean_hi = tl.maximum(first_new, 0) // TILE_N
    else:
        key_hi = seqlen_k
        clean_hi = seqlen_k // TILE_N
    key_lo = seqlen_k * 0
    clean_lo = key_lo
    if form.window_left >= 0:
        key_lo = tl.maximum(pos_first - form.window_left, 0)
        clean_lo = (tl.maximum(pos_last - form.window_left, 0) + TILE_N - 1) // TILE_N
    elif way.skipped:
        key_lo = skipped
        clean_lo = (key_lo + TILE_N - 1) // TILE_N
    return key_lo, key_hi, clean_lo, clean_hi


@triton.jit
def inside_window(key, pos, WINDOW_LEFT: tl.constexpr):
    """Return which keys lie not left of the windows of rows at positions `pos`, (rows, keys)."""
    return key[None, :] >= pos[:, None] - WINDOW_LEFT


@triton.jit
def entries_of_tile(spans, b, h, batch, head, tile):
    """Return (first entry, end of the full ones, end of the partial ones) of a tile's list.

    spans: the address of these three numbers for each tile; batch, head: the strides of a sequence
    and of a head in tiles, 0 where lists are shared; tile: the number of the row or column of mask
    tiles.
    """
    at = spans + (b.to(tl.int64) * batch + h.to(tl.int64) * head + tile) * 3
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def entries_between(entries, begin, end, first_tile, end_tile):
    """Return the begin and the end of the entries of tiles [first_tile, end_tile) in a list.

    begin, end: the range of entries to search, in which tiles ascend.
    """
    begin = _first_from(entries, begin, end, first_tile)
    return begin, _first_from(entries, begin, end, end_tile)


@triton.jit
def lists_of_tile(extras, b, h, first, begin, end, variant: tl.constexpr, KEYS_FIRST: tl.constexpr):
    """Return (first full entry, end of these, first partial entry, end of these) of a tile's list.

    The tile begins at row `first`, or with KEYS_FIRST at that key. Where windows or lengths hide
    pairs, too, only mask tiles of the other side that lie in [begin, end) are left.
    """
    if KEYS_FIRST:
        SIZE: tl.constexpr = variant.mask_q
        entries = extras.mask_column_entries
        first, full_last, last = entries_of_tile(
            extras.mask_columns,
            b,
            h,
            extras.mask_all_column_tiles,
            extras.mask_column_tiles,
            first // variant.mask_k,
        )
    else:
        SIZE: tl.constexpr = variant.mask_k
        entries = extras.mask_row_entries
        first, full_last, last = entries_of_tile(
            extras.mask_rows,
            b,
            h,
            extras.mask_all_row_tiles,
            extras.mask_row_tiles,
            first // variant.mask_q,
        )
    partial = full_last
    if variant.ruled:
        first_tile, end_tile = begin // SIZE, tl.cdiv(end, SIZE)
        first, full_last = entries_between(entries, first, full_last, first_tile, end_tile)
        partial, last = entries_between(entries, partial, last, first_tile, end_tile)
    return first, full_last, partial, last


@triton.jit
def pairs_of_entry(
    extras,
    entry,
    first,
    within,
    loaded,
    variant: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Return which rows of the other side to load, and which pairs of a bit tile are visible.

    The other side is the keys that a tile of queries meets, or with KEYS_FIRST the queries. A bit
    tile is a partial tile of the mask, stored as one bit a pair. The first result is `loaded`
    less the keys that no row of the tile sees; with KEYS_FIRST it is `loaded` itself.

    Args:
        entry: the address of the list's entry, two int32: the mask tile of the other side, and the
            number of the bit tile.
        first: the row, or with KEYS_FIRST the key, at which the program's own tile begins.
        within: the key, or with KEYS_FIRST the row, at which the other side begins, counted from
            the start of the mask tile.
        loaded: bool, whether each row or key of the other side exists.
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
    """Return the number of the bit tile in which a compute tile lies, -1 if full, -2 if empty.

    A bit tile is a partial tile of the block mask, stored as one bit a pair. In a full tile of the
    mask every query sees every key, as in a call without a mask; in an empty one none sees any.

    Args:
        b, h: the numbers of the batch entry and of the query head.
        row, col: the first query and the first key of the compute tile, int32.
    """
    kind = row * 0 - 1
    if variant.mask_q > 0:
        first, full_last, last = entries_of_tile(
            extras.mask_rows,
            b,
            h,
            extras.mask_all_row_tiles,
            extras.mask_row_tiles,
            row // variant.mask_q,
        )
        entries, tile = extras.mask_row_entries, col // variant.mask_k
        full, full_end = entries_between(entries, first, full_last, tile, tile + 1)
        partial, partial_end = entries_between(entries, full_last, last, tile, tile + 1)
        at = entries + partial.to(tl.int64) * 2 + 1
        number = tl.load(at, mask=partial < partial_end, other=-2)
        kind = tl.where(full < full_end, -1, number)
    return kind


@triton.jit
def _first_from(entries, begin, end, tile):
    """Return the index of the first entry in [begin, end) whose tile is at least `tile`, or `end`.

    Tiles of the entries ascend.
    """
    while begin < end:
        middle = begin + (end - begin) // 2
        before = tl.load(entries + middle.to(tl.int64) * 2) < tile
        begin = tl.where(before, middle + 1, begin)
        end = tl.where(before, end, middle)
    return begin


@triton.jit
def visible_bits(
    bits,
    number,
    first_row,
    first_key,
    variant: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
):
    """Return which pairs of a compute tile are visible by bit tile `number`, bool (ROWS, KEYS).

    With KEYS_FIRST the result is transposed. first_row and first_key count from the start of the
    mask tile. Each row loads each of its words once; a thread of a tensor core's accumulator then
    shifts its few words by its own columns.
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
    """Return which keys of a compute tile some row of a band of its bit tile sees, bool (KEYS,).

    Args:
        reach: int32, the result of `mask_reach_kernel`: a bit for each key of each band.
        number, band: the number of the bit tile, and of the band of TILE_M rows in it.
        first_key: the first key of the compute tile, counted from the start of the bit tile.
    """
    WORDS: tl.constexpr = variant.mask_k // 32
    keys = first_key + tl.arange(0, KEYS)
    start = (number.to(tl.int64) * (variant.mask_q // TILE_M) + band) * WORDS
    return (tl.load(reach + start + keys // 32) >> (keys % 32)) & 1 != 0


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def mask_reach_kernel(bits, reach, TILE_M: tl.constexpr, WORDS: tl.constexpr):
    """Write to `reach` the keys that any row of a band of TILE_M rows of a bit tile sees.

    bits, reach: int32 (bands, TILE_M, WORDS) and (bands, WORDS), bit b of word w: key 32 w + b.
    """
    band = tl.program_id(0).to(tl.int64)
    words = tl.arange(0, WORDS)
    rows = band * TILE_M + tl.arange(0, TILE_M)
    seen = tl.load(bits + rows[:, None] * WORDS + words[None, :])
    tl.store(reach + band * WORDS + words, tl.reduce(seen, 0, _either))
