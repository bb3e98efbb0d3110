"""Which keys a query sees, and which queries a key, on Hopper: by windows, lengths and block masks.

What: ranges of keys of rows and of tiles, and of queries of keys; lists of a block mask, cut to
      such a range, and words of its bit tiles: Hopper's only arithmetic on windows and on the
      diagonal, which ends at the last query and the last key. `forward.span`, `backward.span` and
      `backward.row_span` make walks of them.
Grid: none, inlined into the kernels.
One call: scalars of one tile, or a range or words for each row (key) of a warpgroup.
Traffic: none without a block mask; with one 8 bytes an entry, and a word for 32 keys of a row.
Numerics: integers.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MASK_TILE = gl.constexpr(128)  # queries and keys of a tile of the block mask, in the backward pass
MASK_WORDS = gl.constexpr(4)  # of 32 keys, of a row of a bit tile


@gluon.jit
def key_at(rows, length_q, length_k):
    """Return the keys that stand at the positions of query `rows`, where the last query is at the
    last key."""
    return rows + (length_k - length_q)


@gluon.jit
def keys_of_rows(rows, length_q, length_k, window_left, window_right, variant: gl.constexpr):
    """Return for each query row the key at its position, and begin and end (exclusive) of the keys
    that it sees."""
    diagonal = key_at(rows, length_q, length_k)
    begin = diagonal * 0
    end = begin + length_k
    if variant.left:
        begin = gl.maximum(diagonal - window_left, 0)
    if variant.right:
        end = gl.minimum(diagonal + (window_right + 1), length_k)
    return diagonal, begin, end


@gluon.jit
def keys_of_tile(first, last, length_q, length_k, window_left, window_right, variant: gl.constexpr):
    """Return the keys that rows first ... last see: (seen_begin, full_begin, full_end, seen_end).

    No row sees a key outside [seen_begin, seen_end), and every row sees all of [full_begin,
    full_end).
    """
    shift = length_k - length_q
    seen_begin = length_k * 0
    full_begin = seen_begin
    seen_end = length_k
    full_end = length_k
    if variant.left:
        seen_begin = gl.minimum(gl.maximum(first + shift - window_left, 0), length_k)
        full_begin = gl.maximum(last + shift - window_left, 0)
    if variant.right:
        seen_end = gl.minimum(gl.maximum(last + shift + window_right + 1, 0), length_k)
        first_end = first + shift + window_right + 1
        full_end = gl.minimum(gl.maximum(first_end, 0), length_k)
    return seen_begin, full_begin, full_end, seen_end


@gluon.jit
def causal_end(row, length_q, length_k):
    """Return the end (exclusive) of the keys that a causal row sees."""
    return row + (length_k - length_q) + 1


@gluon.jit
def end_of_keys(row, length_q, length_k, window_right):
    """Return the end (exclusive) of the keys that a row sees; not above 0 where it sees none."""
    return gl.minimum(row + (length_k - length_q) + window_right + 1, length_k)


@gluon.jit
def first_key_seen(length_q, length_k, window_left):
    """Return the first key that any query of a sequence sees; below 0 where all do."""
    return length_k - length_q - window_left


@gluon.jit
def last_key_of_row(row, length_q, length_k, window_right):
    """Return the last key of a row's window, which may lie past the last key there is."""
    return row + length_k - length_q + window_right


@gluon.jit
def first_query(keys, first_row, length_q, length_k, window_right):
    """Return for each key the first query that sees it, counted from `first_row`; below 0 if that
    lies before."""
    return keys - (length_k - length_q) - first_row - window_right


@gluon.jit
def queries_of_keys(
    keys, first_row, length_q, length_k, window_left, window_right, variant: gl.constexpr
):
    """Return for each key begin and end (exclusive) of the queries of a tile that see it; they may
    lie outside of the tile.

    Args:
        first_row: the tile's first query, from which they are counted.
    """
    begin = gl.full_like(keys, 0)
    end = begin + variant.tile_m
    if variant.right:
        begin = first_query(keys, first_row, length_q, length_k, window_right)
    if variant.left:
        end = keys - (length_k - length_q) - first_row + window_left + 1
    if variant.tail:  # k is zero there, but exp2(0 - lse) may overflow and reach dq as inf * 0
        begin = gl.where(keys < length_k, begin, variant.tile_m)
    if variant.packed:
        end = gl.minimum(end, length_q - first_row)
    return begin, end


@gluon.jit
def query_tiles(first_key, length_q, length_k, window_left, window_right, variant: gl.constexpr):
    """Return the tiles of queries that see a tile of keys: (begin, full_begin, full_end, end).

    Those of [full_begin, full_end) see all of its keys.
    """
    TILE_M: gl.constexpr = variant.tile_m
    KEYS: gl.constexpr = variant.tile_n
    diagonal = first_key - (length_k - length_q)  # the query whose diagonal key comes first
    last = gl.minimum(first_key + KEYS, length_k) - 1 - first_key
    begin = 0
    full_begin = 0
    end = gl.cdiv(length_q, TILE_M)
    full_end = end
    if variant.packed:
        full_end = length_q // TILE_M
    if variant.right:
        begin = gl.maximum(diagonal - window_right, 0) // TILE_M
        full_begin = gl.cdiv(gl.maximum(diagonal + last - window_right, 0), TILE_M)
    if variant.left:
        beyond = gl.maximum(diagonal + last + window_left + 1, 0)
        full_beyond = gl.maximum(diagonal + window_left + 1, 0)
        end = gl.minimum(end, gl.cdiv(beyond, TILE_M))
        full_end = gl.minimum(full_end, full_beyond // TILE_M)
    if variant.tail:
        full_end = gl.where(first_key + KEYS > length_k, 0, full_end)
        end = gl.where(first_key < length_k, end, 0)
    end = gl.maximum(begin, end)
    full_begin = gl.minimum(full_begin, end)
    full_end = gl.maximum(full_begin, full_end)
    return begin, full_begin, full_end, end


@gluon.jit
def key_tiles(
    first_row,
    rows: gl.constexpr,
    length_q,
    length_k,
    window_left,
    window_right,
    variant: gl.constexpr,
):
    """Return the tiles of keys that `rows` queries see: (begin, full_begin, full_end, end).

    Every query sees all keys of those of [full_begin, full_end).
    """
    TILE_N: gl.constexpr = variant.tile_n
    diagonal = first_row + length_k - length_q
    last = gl.minimum(first_row + rows, length_q) - 1 - first_row
    begin = 0
    full_begin = 0
    limit = length_k
    full_limit = length_k
    if variant.right:
        limit = gl.minimum(limit, diagonal + last + window_right + 1)
        full_limit = gl.minimum(limit, gl.maximum(diagonal + window_right + 1, 0))
    if variant.left:
        begin = gl.maximum(diagonal - window_left, 0) // TILE_N
        full_begin = gl.cdiv(gl.maximum(diagonal + last - window_left, 0), TILE_N)
    end = gl.maximum(gl.cdiv(gl.maximum(limit, 0), TILE_N), begin)
    if variant.packed:
        end = gl.where(first_row < length_q, end, begin)
    full_begin = gl.minimum(full_begin, end)
    full_end = gl.maximum(full_limit // TILE_N, full_begin)
    return begin, full_begin, full_end, end


@gluon.jit
def byte_tiles(first_row, length_q, keys, left, right, C: gl.constexpr):
    """Return (first, count) of the tiles of keys of a CTA's e4m3 queries; at least one."""
    offset = keys - length_q
    TILE_M: gl.constexpr = C.NUM_CONSUMERS * 64
    end = gl.cdiv(keys, C.TILE_N)
    if C.HAS_RIGHT:
        end = gl.minimum(end, gl.cdiv(first_row + TILE_M + offset + right, C.TILE_N))
    first = 0
    if C.HAS_LEFT:
        first = gl.maximum(first_row + offset - left, 0) // C.TILE_N
    return first, gl.maximum(end - first, 1)


@gluon.jit
def byte_columns(row, row0, first, count, length_q, keys, left, right, C: gl.constexpr):
    """Return the columns of the tiles of keys [first, first + count) that the 64 e4m3 queries from
    row0 see; tiles are visited from the last to the first.

    Returns (begin, end, skipped, masked_until, whole_until). begin and end, for each row: the
    columns that it sees, counted from the first column of the last tile. The others are numbers of
    visits: visits [0, skipped) show no row a key, those up to masked_until are not seen to their
    right end by every row, those from whole_until on not to their left end, and those between are
    seen whole.
    """
    TILE_N: gl.constexpr = C.TILE_N
    offset = keys - length_q
    rightmost = (first + count - 1) * TILE_N
    end = gl.full_like(row, 0) + (keys - rightmost)
    begin = row
    skipped = 0
    masked_until = 1
    whole_until = count
    if C.HAS_RIGHT:
        end = gl.minimum(end, row + (offset + right + 1 - rightmost))
        # Tiles to the right of all that this warpgroup's rows see, and of what all see.
        seen = gl.minimum(row0 + (offset + right + 64), keys)
        skipped = first + count - gl.cdiv(gl.maximum(seen, 0), TILE_N)
        skipped = gl.minimum(gl.maximum(skipped, 0), count - 1)
        seen = gl.minimum(row0 + (offset + right + 1), keys)
        masked_until = first + count - gl.maximum(seen, 0) // TILE_N
        masked_until = gl.minimum(gl.maximum(masked_until, skipped + 1), count)
    if C.packed:  # a warpgroup without rows takes one tile of keys, as each has to
        skipped = gl.where(row0 < length_q, skipped, count - 1)
        masked_until = gl.maximum(masked_until, skipped + 1)
    if C.HAS_LEFT:
        begin = row + (offset - left - rightmost)
        hidden = gl.maximum(row0 + (63 + offset - left), 0)
        whole_until = count - gl.maximum(gl.cdiv(hidden, TILE_N) - first, 0)
        whole_until = gl.minimum(gl.maximum(whole_until, masked_until), count)
    return begin, end, skipped, masked_until, whole_until


@gluon.jit
def first_key_of_run(seqlen_k, run, window_left, shape: gl.constexpr):
    """Return the first key that any of the last `run` rows of a sequence sees."""
    if shape.window:
        return gl.maximum(seqlen_k - run - window_left, 0)
    else:
        return seqlen_k * 0


@gluon.jit
def full_keys_of_run(key_lo, seqlen_k, run, shape: gl.constexpr):
    """Return (begin, end) of keys that all of the last `run` rows of a sequence see; key_lo is the
    result of `first_key_of_run`."""
    begin = key_lo + run if shape.window else key_lo
    return begin, causal_end(0, run, seqlen_k)


@gluon.jit
def inside_window(keys, last_keys, window_left):
    """Return bools: whether `keys` are at most window_left before `last_keys`, the last keys that
    rows see."""
    return keys >= last_keys - window_left


@triton.jit
def blocks_of_tiles(row, last, length_q, length_k, window_left, window_right, KEYS: tl.constexpr):
    """Return how many blocks of KEYS keys tiles of rows [row, last] see; a window bound below 0 is
    none."""
    shift = length_k - length_q
    begin = tl.zeros_like(row)
    end = begin + length_k
    if window_left >= 0:
        begin = tl.maximum(row + shift - window_left, 0)
    if window_right >= 0:
        end = tl.minimum(last + shift + window_right + 1, length_k)
    # A tile that sees nothing has no work: with more queries than keys end is negative.
    return tl.maximum(tl.cdiv(tl.maximum(end, 0), KEYS) - begin // KEYS, 0)


@gluon.jit
def entries_of_rows(rows, work, mask, seen_begin, seen_end, variant: gl.constexpr):
    """Return (partial, partial_end, full, full_end): the ranges of the partial and of the full
    entries of a tile of rows, as indices of mask.entries, cut to [seen_begin, seen_end) if
    variant.ruled."""
    at = rows.b.to(gl.int64) * work.mask_batch + rows.h.to(gl.int64) * work.mask_head
    at = mask.spans + (at + rows.first_row // variant.mask_rows) * 3
    full, partial, last = gl.load(at), gl.load(at + 1), gl.load(at + 2)
    full_end = partial
    if variant.ruled:
        begin_tile = seen_begin // variant.mask_keys
        end_tile = gl.cdiv(seen_end, variant.mask_keys)
        if variant.left:
            full = first_entry(mask.entries, full, full_end, begin_tile)
            partial = first_entry(mask.entries, partial, last, begin_tile)
        full_end = first_entry(mask.entries, full, full_end, end_tile)
        last = first_entry(mask.entries, partial, last, end_tile)
    return partial, last, full, full_end


@gluon.jit
def listed_tiles(
    b,
    number,
    begin,
    full_begin,
    full_end,
    end,
    scores,
    places,
    TILE: gl.constexpr,
    RULED: gl.constexpr,
):
    """Return the entries of list `number` of a block mask within tiles [begin, end), as places in
    the walk over them: partial tiles from place 0 on, then full ones.

    TILE: rows of a tile; RULED: a rule sees [begin, end), of them [full_begin, full_end) whole.
    Returns (index of the first partial entry, of the first full one, and four places: past the
    partial tiles, the first that needs no mask, past those that need none, and the end).
    """
    TILES_PER_ENTRY: gl.constexpr = MASK_TILE // TILE
    at = scores.mask_spans + b.to(gl.int64) * places.mask_batch
    at += number * 3
    full_entries = gl.load(at)
    partial_entries = gl.load(at + 1)
    last_partial = gl.load(at + 2)
    last_full = partial_entries
    free_begin = full_entries
    free_end = last_full
    if RULED:  # what the rule hides is cut off, and what it cuts needs a mask
        first = begin // TILES_PER_ENTRY
        last = gl.where(end > begin, gl.cdiv(end, TILES_PER_ENTRY), first)
        free = gl.cdiv(full_begin, TILES_PER_ENTRY)
        last_free = gl.maximum(full_end // TILES_PER_ENTRY, free)
        entries = scores.mask_entries
        partial_entries = first_entry_of_few_gaps(entries, partial_entries, last_partial, first)
        last_partial = first_entry_of_few_gaps(entries, partial_entries, last_partial, last)
        full_entries = first_entry_of_few_gaps(entries, full_entries, last_full, first)
        last_full = first_entry_of_few_gaps(entries, full_entries, last_full, last)
        free_begin = first_entry_of_few_gaps(entries, full_entries, last_full, free)
        free_end = first_entry_of_few_gaps(entries, free_begin, last_full, last_free)
    partial_end = (last_partial - partial_entries) * TILES_PER_ENTRY
    full_begin = partial_end + (free_begin - full_entries) * TILES_PER_ENTRY
    full_end = partial_end + (free_end - full_entries) * TILES_PER_ENTRY
    end = partial_end + (last_full - full_entries) * TILES_PER_ENTRY
    return partial_entries, full_entries, partial_end, full_begin, full_end, end


@gluon.jit
def first_entry(entries, begin, end, tile):
    """Return the index of the first of the ascending entries [begin, end) that is `tile` or comes
    after it; `end` if there is none."""
    while begin < end:
        middle = begin + (end - begin) // 2
        if gl.load(entries + middle.to(gl.int64) * 2) < tile:
            begin = middle + 1
        else:
            end = middle
    return begin


@gluon.jit
def first_entry_of_few_gaps(entries, begin, end, tile):
    """Return the index of the first of the ascending entries [begin, end) that is `tile` or comes
    after it, as `first_entry` does, faster where the list has few gaps.

    The ends of the list narrow the search: without gaps nothing is left of it. The forward pass
    takes the plain `first_entry`, since this one is 416 instructions more (sm_90, D 64).
    """
    if begin < end:
        # No two are alike, so they ascend by 1 at least: in a list without gaps nothing is left.
        first = gl.load(entries + begin.to(gl.int64) * 2)
        last = gl.load(entries + (end - 1).to(gl.int64) * 2)
        low = gl.minimum(gl.maximum(end - 1 - (last - tile), begin), end)
        end = gl.minimum(gl.maximum(begin + (tile - first), begin), end)
        begin = first_entry(entries, low, end, tile)
    return begin


@gluon.jit
def entry_of_tile(work, tile, scores, TILE: gl.constexpr):
    """Return the number of the tile (TILE rows or keys each) at place `tile` of a walk over a block
    mask's list, and its bit tile, -1 for a full one.

    work: the `Work` or `Rows` whose results of `listed_tiles` are used.
    """
    TILES_PER_ENTRY: gl.constexpr = MASK_TILE // TILE
    full = work.full_entries + (tile - work.partial_end) // TILES_PER_ENTRY
    partial = work.partial_entries + tile // TILES_PER_ENTRY
    entry = gl.where(tile < work.partial_end, partial, full)
    at = scores.mask_entries + entry.to(gl.int64) * 2
    return gl.load(at) * TILES_PER_ENTRY + tile % TILES_PER_ENTRY, gl.load(at + 1)


@gluon.jit
def load_bits(
    bits,
    number,
    first_row,
    first_word,
    layout: gl.constexpr,
    n: gl.constexpr,
    words: gl.constexpr,
    rows: gl.constexpr = 64,
):
    """Return int32 (rows, n / 32): what the rows of a (rows, n) block in `layout` see.

    bits: int32 (mask rows, words), of bit tile `number`: -1 has all bits, -2 none; first_row: of
    the rows, within the bit tile; first_word: of the block's first 32 keys.
    """
    shape = gl.zeros([rows, n], gl.int32, layout).reshape(
        [rows, n // 32, 4, 4, 2]
    )  # no instruction
    l2: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, shape.type.layout)))
    row = gl.expand_dims(gl.arange(0, rows, gl.SliceLayout(1, l2)), 1)
    at = gl.expand_dims(gl.arange(0, n // 32, gl.SliceLayout(0, l2)), 0) + row * words
    start = bits + (first_row * words + first_word)
    return gl.load(start + at, mask=(at >= 0) & (number >= 0), other=at * 0 - (number + 2))


@gluon.jit
def words_of_mask(like, number, first_row, first_word, scores):
    """Return int32 (words, n) of bit tile `number`: for each of n rows from `first_row` on the
    words of 32 keys each from `first_word` on; all ones if number is -1. `like` (32 * words, n)
    gives shape and layout."""
    n: gl.constexpr = like.shape[1]
    words: gl.constexpr = like.shape[0] // 32
    l3: gl.constexpr = like.reshape([words, 32, n]).type.layout
    l2: gl.constexpr = gl.SliceLayout(1, l3)
    word = gl.expand_dims(gl.arange(0, words, gl.SliceLayout(1, l2)) + first_word, 1)
    row = gl.expand_dims(gl.arange(0, n, gl.SliceLayout(0, l2)) + first_row, 0)
    at = row * MASK_WORDS + word
    start = scores.mask_bits + number.to(gl.int64) * (MASK_TILE * MASK_WORDS)
    return gl.load(start + at, mask=(at >= 0) & (number >= 0), other=-1)


@gluon.jit
def reached(word, number):
    """Return the word of a bit tile's reach (the keys that some row of it sees) at pointer `word`;
    all ones for `number` -1, 0 for -2."""
    return gl.load(word, mask=number >= 0, other=-(number + 2))
