"""The keys that a query sees, as ranges, and those of a tile as 128 bits a row.

What      joins causal, window, lengths and the block mask. A tile that no row sees is skipped, and
          a tile that all rows see is marked, so that most tiles test no bit. It is the CPU's only
          arithmetic on windows, and on the diagonal, which ends at the last query and the last key.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  `view_rows` and `view_columns` lay the tile lists of a mask out for a task, as a small
          table; `see_tile` answers for one tile of TILE_M rows and TILE_N keys.
Traffic   a table is (mask tiles of the task's rows) x (those of its keys) int32; bit tiles are read
          in place.
Numerics  none; a bit decides.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.attention.problem import TILE_M, TILE_N, Mask
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.blocks import BLOCK
from tilewise.kernels.cpu.machine.frame import array_at
from tilewise.kernels.cpu.machine.threads import bare, inner, kernel, scratch, zero_scratch

WORD = 32  # keys whose bits share an int32
WORDS = TILE_N // WORD
EMPTY, FULL = -1, -2  # special kinds of mask tiles; other numbers are indices of bit tiles


class Seen(NamedTuple):
    """The keys of a tile that each row of it sees, as `see_tile` fills it; a task allocates one by
    `new_seen` and uses it for all its tiles.

    Attributes:
        words: (TILE_M * WORDS,) int32; bit b of word w of a row is set if the row sees key 32 w + b
            of the tile.
        begin, end: int64 (TILE_M / BLOCK,), the range of the tile's keys that any of each BLOCK
            rows sees, in multiples of 32; 0, 0 if none.
        is_whole: int64 (1,), 1 if the last tile was one of which every row sees every key, else 0.
    """

    words: np.ndarray
    begin: np.ndarray
    end: np.ndarray
    is_whole: np.ndarray


class View(NamedTuple):
    """The part of a block mask that a task needs, as a table; made by `view_rows` or
    `view_columns`.

    Attributes:
        kinds: (row tiles, members, width) int32, flat: for each mask tile EMPTY, FULL or the index
            of its bit tile.
        first_tile, first_column: the mask tiles of queries and of keys at the table's start.
        members: the heads of a group with masks of their own, 1 if they share one.
        width: the number of mask tiles of keys in the table.
        used: whether each tile of TILE_N keys has any kind but EMPTY; filled by `view_rows`.
        tree: the index of the first element of the sequence's tree mask; -1 without one.
    """

    kinds: np.ndarray
    first_tile: int
    first_column: int
    members: int
    width: int
    used: np.ndarray
    tree: int


def check_lists(mask: Mask) -> None:
    """Refuse lists of tiles that refer outside of a block mask: its tensors may have changed since
    it was made. A call without a mask passes.

    Raises:
        ValueError: a span or an entry of `rows` or `columns` is invalid.
    """
    if mask.shift_q == 0:
        return
    num_bits = len(mask.bits) >> (mask.shift_q + mask.shift_k - 5)
    for name, spans, entries, across in (
        ("rows", mask.rows, mask.row_entries, mask.num_columns),
        ("columns", mask.columns, mask.column_entries, mask.num_rows),
    ):
        place = _stray_list(spans, entries, across, num_bits)
        if place >= 0:
            raise ValueError(
                f"{name} of a mask must lead to tiles from 0 to {across - 1} and bit tiles from 0 "
                f"to {num_bits - 1}, got others in list {place}"
            )


@kernel
def _stray_list(spans, entries, across, num_bits):
    """Return the number of the first list of tiles that refers outside of a mask; -1 if none does.

    Args:
        spans: int32, flat triples: first entry, end of the full tiles, end of the partial ones.
        entries: int32, flat pairs: a tile on the other side, and its bit tile.
        across: the number of tiles on the other side.
        num_bits: the number of bit tiles.
    """
    for place in range(len(spans) // 3):
        first, full_end, end = spans[3 * place], spans[3 * place + 1], spans[3 * place + 2]
        if first < 0 or full_end < first or end < full_end or 2 * end > len(entries):
            return place
        for entry in range(first, end):
            tile, number = entries[2 * entry], entries[2 * entry + 1]
            if tile < 0 or tile >= across:
                return place
            if entry >= full_end and (number < 0 or number >= num_bits):
                return place
    return -1


@intrinsic
def lanes_of(typingctx, like, word, shift):
    """Return a Mask of LANES bits of `word`, an int64, from bit `shift` on."""
    dtype = simd.float_of(like)

    def codegen(context, builder, sig, args):
        count = simd.lanes_of(dtype)
        bits = builder.trunc(builder.lshr(args[1], args[2]), ir.IntType(count))
        return builder.bitcast(bits, ir.VectorType(ir.IntType(1), count))

    return simd.Mask(dtype)(like, types.int64, types.int64), codegen


@inner
def new_seen(words_like, index_like):
    """Allocate a `Seen`; arguments are any arrays of int32 and int64."""
    blocks, area = TILE_M // BLOCK, TILE_M * WORDS // 2
    numbers = scratch(area + 2 * blocks + 1, index_like)
    begin, end, is_whole = area, area + blocks, area + 2 * blocks
    numbers[is_whole] = 0
    words = array_at(types.int64(numbers.ctypes.data), TILE_M * WORDS, words_like)
    return Seen(  # all of its arrays but the words keep their memory alive
        words, numbers[begin:end], numbers[end:is_whole], numbers[is_whole:]
    )


@inner
def _no_view(mask, tree):
    return View(mask.bits, 0, 0, 0, 0, mask.bits, tree)


@inner
def _fill(kinds, base, step, spans, entries, place, first):
    """Write the kinds of one list's tiles to kinds[base + step * (tile - first)]; tiles that the
    list lacks keep their kinds. `place` is the number of the list in `spans`."""
    full_end = spans[3 * place + 1]
    for entry in range(spans[3 * place], spans[3 * place + 2]):
        kind = FULL if entry < full_end else entries[2 * entry + 1]
        kinds[base + step * (entries[2 * entry] - first)] = kind


@inner
def view_rows(sizes, mask, sequence, kv_head, first_row, num_rows):
    """Return the View of a mask for flat rows first_row ... first_row + num_rows - 1 of a key head,
    over all keys; flat row r is query r // group of head r % group."""
    tree = mask.tree_starts[sequence] * mask.tree_row if mask.tree_row > 0 else -1
    if mask.shift_q == 0:
        return _no_view(mask, tree)
    first = first_row // sizes.group >> mask.shift_q
    tiles = ((first_row + num_rows - 1) // sizes.group >> mask.shift_q) - first + 1
    members, width = sizes.group if mask.head_step > 0 else 1, mask.num_columns
    kinds = scratch(tiles * members * width, mask.bits)
    kinds[:] = EMPTY
    used = zero_scratch((width << mask.shift_k) // TILE_N + 1, mask.bits)
    for tile in range(tiles):
        for member in range(members):
            head = sequence * mask.batch_step + (kv_head * sizes.group + member) * mask.head_step
            place = head * mask.num_rows + first + tile
            base = (tile * members + member) * width
            _fill(kinds, base, 1, mask.rows, mask.row_entries, place, 0)
            for entry in range(mask.rows[3 * place], mask.rows[3 * place + 2]):
                used[(mask.row_entries[2 * entry] << mask.shift_k) // TILE_N] = 1
    return View(kinds, first, 0, members, width, used, tree)


@inner
def view_columns(sizes, mask, sequence, kv_head, first_key, num_keys):
    """Return the View of a mask for keys first_key ... first_key + num_keys - 1 of a key head, over
    all queries; without `used` and without a tree mask."""
    if mask.shift_q == 0:
        return _no_view(mask, -1)
    first = first_key >> mask.shift_k
    width = min((first_key + num_keys - 1 >> mask.shift_k) + 1, mask.num_columns) - first
    members = sizes.group if mask.head_step > 0 else 1
    kinds = scratch(mask.num_rows * members * width, mask.bits)
    kinds[:] = EMPTY
    for member in range(members):
        head = sequence * mask.batch_step + (kv_head * sizes.group + member) * mask.head_step
        for column in range(width):
            place = head * mask.num_columns + first + column
            base = member * width + column
            _fill(kinds, base, members * width, mask.columns, mask.column_entries, place, 0)
    return View(kinds, 0, first, members, width, mask.bits, -1)


@inner
def next_tile(mask, view, key, end):
    """Return the first key of the next tile of TILE_N keys, from the tile that begins at `key` on,
    that some row sees by the block mask, or `end`. Without a mask that is `key`. `view` is from
    `view_rows`."""
    if mask.shift_q > 0:
        while key < end and view.used[key // TILE_N] == 0:
            key += TILE_N
    return min(key, end)


@inner
def distance_to(q_len, k_len, query, key):
    """Return the number of keys from `key` to the one on the query's diagonal, negative if the key
    comes after that: the distance of ALiBi."""
    return query + k_len - q_len - key


@inner
def first_seen(window_left, q_len, k_len, query):
    """Return the first key that a query sees by the window's left side; 0 if that is unlimited."""
    return max(0, query + k_len - q_len - window_left) if window_left >= 0 else 0


@inner
def end_seen(window_right, q_len, k_len, query):
    """Return the end of the keys that a query sees by the window's right side and the length, one
    behind the last; it is no more than `first_seen` if the query sees none."""
    if window_right < 0:
        return k_len
    return min(k_len, query + k_len - q_len + window_right + 1)


@inner
def seeing_rows(sizes, q_len, k_len, key, count):
    """Return (first, end) of the flat rows of a key head outside of which no row's window has one
    of the keys key ... key + count - 1; first is rounded down to a multiple of TILE_M."""
    offset, first, end = k_len - q_len, 0, q_len
    if sizes.window_right >= 0:
        first = max(0, key - offset - sizes.window_right)
    if sizes.window_left >= 0:
        end = min(q_len, key + count - offset + sizes.window_left)
    return first * sizes.group // TILE_M * TILE_M, end * sizes.group


@inner
def _tile_kind(mask, view, first_query, last_query, key):
    """Return FULL or EMPTY if all tiles of a block mask under a compute tile are such, otherwise 0.

    Args:
        view: the part of the block mask that the task needs.
        first_query, last_query: the queries of the tile.
        key: the first key of the tile.
    """
    first_column = (key >> mask.shift_k) - view.first_column
    columns = min((key + TILE_N - 1 >> mask.shift_k) - view.first_column + 1, view.width)
    seen_full, seen_empty = True, True
    first = ((first_query >> mask.shift_q) - view.first_tile) * view.members
    end = ((last_query >> mask.shift_q) - view.first_tile + 1) * view.members
    for row in range(first, end):
        for column in range(first_column, columns):
            kind = view.kinds[row * view.width + column]
            seen_full = seen_full and kind == FULL
            seen_empty = seen_empty and kind == EMPTY
    if seen_empty:
        return EMPTY
    return FULL if seen_full else 0


@inner
def _mask_word(mask, view, query, member, key):
    """Return a word of the block mask: bit b is 1 if the query may see key `key` + b.

    Args:
        mask: the block mask of the call.
        view: the part of the block mask that the task needs.
        query: the number of the query in its sequence.
        member: the number of the query head in its group; unused if the group shares one mask.
        key: the first key of the word, a multiple of 32.

    Returns:
        An int64 of which the lower 32 bits count; -1 where the mask's tile is full, 0 where the
        tile is empty.
    """
    row = ((query >> mask.shift_q) - view.first_tile) * view.members
    row += member if view.members > 1 else 0
    kind = view.kinds[row * view.width + (key >> mask.shift_k) - view.first_column]
    if kind < 0:
        return types.int64(-1 if kind == FULL else 0)
    line = (types.int64(kind) << mask.shift_q) + (query & ((1 << mask.shift_q) - 1))
    words = 1 << mask.shift_k >> 5
    return types.int64(mask.bits[line * words + ((key & ((1 << mask.shift_k) - 1)) >> 5)])


@inner
def _tree_word(mask, view, query, first_new, num_new):
    """Return an int64 with 32 bits of a query's row of the tree mask, for the keys from new key
    `first_new` on: 1 for keys before new key 0, the mask's value for new keys, 0 from `num_new`
    on."""
    if first_new + WORD <= 0:
        return types.int64(-1)
    word = types.int64(0)
    line = view.tree + query * mask.tree_row + first_new
    for bit in range(min(WORD, num_new - first_new)):
        if first_new + bit < 0 or mask.tree[line + bit] != 0:
            word |= types.int64(1) << bit
    return word


@inner
def _range_word(low, high):
    """Return an int of which bits low ... high - 1 are set, cut to 0 ... 31."""
    low, high = max(low, 0), min(high, WORD)
    return (1 << high) - (1 << low) if low < high else 0


@inner
def _see_rows(sizes, mask, view, seen, q_len, k_len, first_row, rows, key):
    """Fill `seen` for a tile of which not every row sees every key, row by row; return whether any
    row sees a key. The arguments are those of `see_tile`."""
    query, member = first_row // sizes.group, first_row % sizes.group
    sees_any, words = False, bare(seen.words)
    blocks = (rows + BLOCK - 1) // BLOCK
    for word in range(blocks * BLOCK * WORDS, TILE_M * WORDS):
        words[word] = 0
    for block in range(blocks, TILE_M // BLOCK):
        seen.begin[block], seen.end[block] = 0, 0
    for block in range(blocks):
        begin, end = TILE_N, 0
        for row in range(block * BLOCK, block * BLOCK + BLOCK):
            low, high = 0, 0
            if row < rows:
                low = first_seen(sizes.window_left, q_len, k_len, query) - key
                high = end_seen(sizes.window_right, q_len, k_len, query) - key
            for word in range(WORDS):
                bits = _range_word(low - word * WORD, high - word * WORD)
                if bits != 0 and mask.shift_q > 0:
                    bits &= _mask_word(mask, view, query, member, key + word * WORD)
                if bits != 0 and view.tree >= 0:
                    first_new = key + word * WORD - (k_len - q_len)
                    bits &= _tree_word(mask, view, query, first_new, q_len)
                words[row * WORDS + word] = bits
                if bits != 0:
                    begin, end = min(begin, word * WORD), max(end, word * WORD + WORD)
            member += 1
            if member == sizes.group:
                query, member = query + 1, 0
        seen.begin[block], seen.end[block] = min(begin, end), end
        sees_any = sees_any or end > 0
    return sees_any


@inner
def see_tile(sizes, mask, view, seen, q_len, k_len, first_row, rows, key):
    """Fill `seen` for the tile of TILE_M flat rows from first_row on and TILE_N keys from `key` on;
    return False if no row sees a key, and `seen` may then be old.

    Args:
        view: the result of `view_rows` or `view_columns` for a part that contains the tile.
        rows: the number of existing rows of the TILE_M; the others see nothing.
    """
    first, last = first_row // sizes.group, (first_row + rows - 1) // sizes.group
    left, right = sizes.window_left, sizes.window_right
    if end_seen(right, q_len, k_len, last) <= key:
        return False
    if first_seen(left, q_len, k_len, first) >= key + TILE_N:
        return False
    is_whole = rows == TILE_M and first_seen(left, q_len, k_len, last) <= key
    is_whole = is_whole and end_seen(right, q_len, k_len, first) >= key + TILE_N
    if mask.shift_q > 0:
        kind = _tile_kind(mask, view, first, last, key)
        if kind == EMPTY:
            return False
        is_whole = is_whole and kind == FULL
    if view.tree >= 0:
        is_whole = is_whole and key + TILE_N <= k_len - q_len
    if not is_whole:
        seen.is_whole[0] = 0
        return _see_rows(sizes, mask, view, seen, q_len, k_len, first_row, rows, key)
    if seen.is_whole[0] == 0:
        seen.is_whole[0] = 1
        seen.words[:] = -1
        seen.begin[:] = 0
        seen.end[:] = TILE_N
    return True


@inner
def see_keys(words, wi, low, high):
    """Store the words in which bits of keys low ... high - 1 of a tile are set to words[wi : wi +
    WORDS], int32."""
    for index in range(WORDS):
        start, end = max(low - index * WORD, 0), min(high - index * WORD, WORD)
        bits = 0
        if start < end:
            bits = (1 << end) - (1 << start)
        words[wi + index] = bits - (1 << WORD) if bits >= 1 << (WORD - 1) else bits
