"""Operands of the products in tile registers: rows split into bfloat16 parts, and rearranged.

What      `amx_tiles.py` multiplies rows of bfloat16 by words of two. Rows of q, k, do and v come
          from memory; columns of q and do are rows of their transposes; p and ds become words along
          the queries.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  one tile of rows, or of scores.
Traffic   every element is read and written once per layout and part, in the L2 cache.
Numerics  part i is the bfloat16 nearest to the remainder after parts 0 ... i - 1, see
          `amx_tiles.py`.
"""

from __future__ import annotations

from tilewise.kernels.cpu.attention.problem import TILE_M, TILE_N
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.pack import pair_words, prefetch, transpose_block
from tilewise.kernels.cpu.machine.rows import F32, load_row
from tilewise.kernels.cpu.machine.threads import inlined, inner

_SIDE = 16  # rows and columns of a transposed block of words
_PANEL = 32  # keys of a panel of words
AHEAD = 16  # rows from the one that is loaded to the one that is prefetched


@inner
def split_rows(like, source, count, target, base, part, parts):
    """Split source[0 : count], floats, into bfloat16 parts: part i, the rounded rest after the
    parts before it, goes to target[base + i part : ]. `count` is a multiple of 16, `parts` their
    number."""
    for at in range(0, count, _SIDE):
        rest = simd.load(source, at)
        for index in range(parts):
            where = base + index * part + at
            simd.store(target, where, rest)
            if index + 1 < parts:
                rest = simd.sub(rest, simd.load(target, where))


@inner
def take_part(like, rest, count, target):
    """Round rest[0 : count], floats, to bfloat16 in target, and subtract the rounded numbers from
    `rest` in place: what stays is the rest for the next part."""
    for at in range(0, count, _SIDE):
        whole = simd.load(rest, at)
        simd.store(target, at, whole)
        simd.store(rest, at, simd.sub(whole, simd.load(target, at)))


@inner
def load_key_rows(like, code, target, ld, dim, first, count, start, row_bytes):
    """Load rows first ... first + count - 1 of a tensor, row r at address start + r row_bytes, to
    target[(r - first) ld : ], converted to target's type; return 0.0, or NaN if not all numbers are
    finite.

    `code` is the tensor's dtype code, `dim` its channels. Rows that lie AHEAD rows further on are
    prefetched.
    """
    check = like.dtype.type(0.0)
    size = 4 if code == F32 else 2
    for row in range(count):
        ahead = start + (first + row + AHEAD) * row_bytes
        for line in range(0, dim * size, 64):
            prefetch(ahead + line)
        check += load_row(like, code, target, row * ld, start + (first + row) * row_bytes, dim)
    return check


@inner
def load_flat_rows(
    like,
    code,
    target,
    base,
    ld,
    part,
    parts,
    stage,
    dim,
    start,
    row_bytes,
    head_bytes,
    group,
    first_row,
    rows,
):
    """Load `rows` flat query rows from first_row on to target[base + row ld : ], and write zeros
    behind them up to TILE_M rows.

    Flat row r is query r // group of head r % group of a key head. With parts > 1 each row is split
    into bfloat16 parts, `part` elements apart in target; `stage` is scratch of a row of floats for
    that. Later rows are prefetched.
    """
    query, member = first_row // group, first_row % group
    size = 4 if code == F32 else 2
    for row in range(rows):
        address = start + query * row_bytes + member * head_bytes
        # By then the row has arrived, except in the first strip of a panel.
        ahead = start + (first_row + row + AHEAD) // group * row_bytes
        for line in range(0, dim * size, 64):
            prefetch(ahead + (first_row + row + AHEAD) % group * head_bytes + line)
        if parts == 1:
            load_row(like, code, target, base + row * ld, address, dim)
        else:
            load_row(like, code, stage, 0, address, dim)
            split_rows(like, stage, ld, target, base + row * ld, part, parts)
        member += 1
        if member == group:
            query, member = query + 1, 0
    for index in range(parts):
        first = base + index * part
        target[first + rows * ld : first + TILE_M * ld] = 0


@inner
def prefetch_flat_rows(code, dim, start, row_bytes, head_bytes, group, first_row, last_row):
    """Prefetch flat query rows first_row ... last_row - 1 into the L2 cache; flat row r is query r
    // group of head r % group."""
    size = 4 if code == F32 else 2
    for row in range(first_row, last_row):
        query = row // group
        address = start + query * row_bytes + (row - query * group) * head_bytes
        for line in range(0, dim * size, 64):
            prefetch(address + line)


@inner
def transpose_rows(source, si, ld, target, ti, target_row, words):
    """Transpose TILE_M rows of `ld` bfloat16, which follow one another from source[si] on, to ld
    rows of TILE_M from target[ti] on, `target_row` elements apart.

    `words` is scratch of 16 x 16 words.
    """
    for row in range(0, TILE_M, 2 * _SIDE):
        for column in range(0, ld, _SIDE):
            for word in range(_SIDE):
                even = si + (row + 2 * word) * ld + column
                pair_words(source, even, even + ld, words, word * 2 * _SIDE)
            transpose_block(words, 0, 2 * _SIDE, target, ti + column * target_row + row, target_row)


@inlined
def _store_parts(upper, lower, words, word_at, word_part, rows, above, below, row_part, parts):
    """Split two registers into bfloat16 parts, and store each part as words and as rows.

    Each part is the rounded rest of those before it.

    Args:
        upper, lower: a register of each of two rows.
        words, word_at, word_part: the words, the first index, and the elements from part to part.
        rows, above, below, row_part: the rows, both indices, and the elements from part to part.
        parts: the number of parts.
    """
    for index in range(parts):
        simd.store_pair(words, word_at + index * word_part, upper, lower)
        simd.store(rows, above + index * row_part, upper)
        simd.store(rows, below + index * row_part, lower)
        if index + 1 < parts:
            upper = simd.sub(upper, simd.load(rows, above + index * row_part))
            lower = simd.sub(lower, simd.load(rows, below + index * row_part))


@inner
def pack_scores(
    like, s, dp, p_words, ds_words, ds_rows, spare, first_row, strip, parts, begin, end, top, bottom
):
    """Store P and dS of rows top ... bottom - 1 of a tile of scores as bfloat16 words of two rows
    each, and dS as rows too; keys outside of begin ... end - 1 become zeros.

    Words lie in panels of 32 keys, [part][panel][pair of the strip's queries][key], the tile's rows
    from `first_row` of the strip on; ds_rows is [part][row][key].

    Args:
        s, dp: P and dS of the tile, float32 (TILE_M, TILE_N), flat.
        spare: scratch of two registers of columns.
        strip: the number of query rows of the strip.
        parts: the number of bfloat16 parts of a number.
    """
    word_part = strip * TILE_N
    for row in range(top, bottom, 2):
        line = (first_row + row) * _PANEL
        for column in range(begin, end, _SIDE):
            at = row * TILE_N + column
            word = line + column // _PANEL * strip * _PANEL + column % _PANEL * 2
            upper, lower = simd.load(s, at), simd.load(s, at + TILE_N)
            _store_parts(upper, lower, p_words, word, word_part, spare, 0, _SIDE, 0, parts)
            upper, lower = simd.load(dp, at), simd.load(dp, at + TILE_N)
            _store_parts(
                upper,
                lower,
                ds_words,
                word,
                word_part,
                ds_rows,
                at,
                at + TILE_N,
                TILE_M * TILE_N,
                parts,
            )
    for start, stop in ((0, begin), (end, TILE_N)):
        _clear_panels(p_words, ds_words, first_row + top, bottom - top, strip, parts, start, stop)


@inner
def _clear_panels(p_words, ds_words, first_row, rows, strip, parts, begin, end):
    """Set the words of `rows` rows from `first_row` of the strip on to zero in p_words and
    ds_words, for the panels of keys begin ... end - 1 and all parts."""
    for part in range(parts):
        for column in range(begin, end, _PANEL):
            at = (part * TILE_N + column) * strip + first_row * _PANEL
            p_words[at : at + rows * _PANEL] = 0
            ds_words[at : at + rows * _PANEL] = 0


@inner
def clear_scores(p_words, ds_words, first_row, strip, parts):
    """Set the words of a tile to zero in p_words and ds_words, since none of its rows, from
    `first_row` of the strip on, sees any of its keys."""
    _clear_panels(p_words, ds_words, first_row, TILE_M, strip, parts, 0, TILE_N)
