"""Tiled exact attention, backward, on CPUs with tile registers (Intel AMX).

What      dq, dk, dv and the gradient of the bias, as `backward.py`, for all dtypes but float64.
Grid      one task per (chunk of 4 key tiles, sequence, key head), taken from a counter.
One task  for each panel of up to 4 tiles of keys, for each strip of up to 256 query rows that sees
          it: packs the rows once; for each tile of keys, S = Q K^T, dP = dO V^T, P, dS and
          dQ += dS K by 64 rows, then dV^T += dO^T P and dK^T += Q^T dS by the strip, for a sum in
          tile registers must take in many queries to be worth its load and store.
Traffic   K and V are read once; Q and dO once per panel of keys, from the L3 cache; dq, in
          float32, is updated once per panel.
Numerics  see `machine/amx_tiles.py`: bfloat16 in one part, float16 in two, float32 in three, and P
          and dS in as many. Sums have one owner, or their owners an order: bits repeat on any
          threads.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tilewise.kernels.cpu.attention.backward_scores import Place, differentiate_rows
from tilewise.kernels.cpu.attention.forward import add_rows_exactly
from tilewise.kernels.cpu.attention.gradients import CHUNK_KEYS
from tilewise.kernels.cpu.attention.problem import (
    DK,
    DO,
    DQ,
    DV,
    K_LEN,
    Q_LEN,
    TILE_M,
    TILE_N,
    K,
    Q,
    V,
)
from tilewise.kernels.cpu.machine import amx, simd
from tilewise.kernels.cpu.machine.amx_pack import (
    clear_scores,
    load_flat_rows,
    load_key_rows,
    pack_scores,
    prefetch_flat_rows,
    take_part,
    transpose_rows,
)
from tilewise.kernels.cpu.machine.amx_tiles import SIDE, multiply_tiles
from tilewise.kernels.cpu.machine.blocks import BLOCK
from tilewise.kernels.cpu.machine.pack import pair_tile, transpose_block, transpose_tile
from tilewise.kernels.cpu.machine.rows import store_row
from tilewise.kernels.cpu.machine.threads import (
    borrowed,
    inner,
    keep_alive,
    kernel,
    next_task,
    scratch,
    zero_scratch,
)
from tilewise.kernels.cpu.machine.turns import Turn, end_turn, publish_rows, wait_for_rows
from tilewise.kernels.cpu.visible import (
    WORDS,
    new_seen,
    see_tile,
    seeing_rows,
    view_columns,
)

PANEL_ELEMENTS = 6 * TILE_N * 128  # elements of K in a panel; all scratch stays below 1.7 MiB


class _Keys(NamedTuple):
    """Scratch for a panel: up to 4 tiles of TILE_N keys that a task packs together.

    Operands are bfloat16; a number of float16 or float32 is the sum of two or three bfloat16 parts.

    Attributes:
        rows: the rows of one tile of K or V, before they are packed.
        k_panels, v_panels: (tiles, parts, TILE_N * ld or ldv), flat: K and V transposed.
        k_pairs: the same size as k_panels: K with pairs of keys side by side.
        dk, dv: float32 (tiles, ld or ldv, TILE_N), flat: sums of the gradients, transposed.
        check: (tiles,), 0.0 for a tile of K without NaN and infinities, else NaN.
    """

    rows: np.ndarray
    k_panels: np.ndarray
    v_panels: np.ndarray
    k_pairs: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    check: np.ndarray


class _Queries(NamedTuple):
    """Scratch for a strip: up to 256 query rows, of which a task packs q and do together.

    Operands are bfloat16; a number of float16 or float32 is the sum of two or three bfloat16 parts.

    Attributes:
        q_rows, do_rows: (parts, strip, ld or ldv), flat: rows of q and of do.
        q_columns, do_columns: (parts, ld or ldv, strip), flat: the same numbers transposed.
        dq: float32 (strip, ld), flat: sums of dq.
    """

    q_rows: np.ndarray
    do_rows: np.ndarray
    q_columns: np.ndarray
    do_columns: np.ndarray
    dq: np.ndarray


class _Scores(NamedTuple):
    """Scratch for scores: of a tile S and dP, then P and dS; of a strip P and dS as operands.

    Attributes:
        s, dp: float32 (TILE_M, TILE_N), flat: S and dP of a tile, later P and dS.
        slack: (TILE_M, TILE_N), flat: the derivative of the softcap.
        p_words, ds_words: bfloat16 operands of the sums of dv and dk, of all rows of the strip.
        ds_rows: bfloat16 rows of dS of one tile, the operand of the sum of dq.
        words: the scratch in which operands are transposed and packed.
        bias: one row of the bias, TILE_N numbers.
        ones: TILE_M ones, the factors of rows.
        keep: the bits of the keys that dropout keeps, of one row.
        stage: the scratch for float32 rows of keys or queries, zero between uses.
    """

    s: np.ndarray
    dp: np.ndarray
    slack: np.ndarray
    p_words: np.ndarray
    ds_words: np.ndarray
    ds_rows: np.ndarray
    words: np.ndarray
    bias: np.ndarray
    ones: np.ndarray
    keep: np.ndarray
    stage: np.ndarray


class _Shape(NamedTuple):
    """The sizes of a task.

    Attributes:
        ld, ldv: the head dims of keys and of values, rounded up to multiples of 32.
        strip: the query rows that are packed together, 256 or 128.
        tiles: the tiles of TILE_N keys that are packed together, 1 to 4.
        parts: the bfloat16 parts whose sum is a number of an operand, 1 to 3.
    """

    ld: int
    ldv: int
    strip: int
    tiles: int
    parts: int


@inner
def _shape_of(sizes, parts):
    ld, ldv = (sizes.head_dim + 31) // 32 * 32, (sizes.v_head_dim + 31) // 32 * 32
    tiles = PANEL_ELEMENTS // (TILE_N * max(ld, ldv) * parts)
    return _Shape(ld, ldv, 256 if parts == 1 else 128, min(max(tiles, 1), 4), parts)


@inner
def _new_scratch(like, packed, words_like, shape):
    """Allocate a task's scratch for the sizes `shape`, and return (_Keys, _Queries, _Scores),
    zeroed where padding must stay zero."""
    ld, ldv, strip, parts = shape.ld, shape.ldv, shape.strip, shape.parts
    key_area, query_area, area = shape.tiles * TILE_N, strip * parts, TILE_M * TILE_N
    widest = max(ld, ldv)
    keys = _Keys(
        zero_scratch(TILE_N * widest * 2, packed),
        scratch(key_area * ld * parts, packed),
        scratch(key_area * ldv * parts, packed),
        scratch(key_area * ld * parts, packed),
        scratch(key_area * ld, like),
        scratch(key_area * ldv, like),
        scratch(shape.tiles, like),
    )
    queries = _Queries(
        zero_scratch(query_area * ld, packed),
        zero_scratch(query_area * ldv, packed),
        scratch(query_area * ld, packed),
        scratch(query_area * ldv, packed),
        scratch(strip * ld, like),
    )
    scores = _Scores(
        scratch(area, like),
        scratch(area, like),
        zero_scratch(area, like),
        scratch(query_area * TILE_N, packed),
        scratch(query_area * TILE_N, packed),
        scratch(area * parts, packed),
        scratch(512, packed),
        zero_scratch(TILE_N, like),
        zero_scratch(TILE_M, like),
        scratch(WORDS, words_like),
        zero_scratch(TILE_N * widest, like),
    )
    scores.ones[:] = 1
    return keys, queries, scores


@inner
def _load_tile(
    like, code, rows, stage, panels, pairs, tile, parts, ld, dim, first, count, start, row_bytes
):
    """Pack `count` keys or values from row `first` on, as tile number `tile` of a panel, into
    `panels`, transposed, and into `pairs` as pairs of rows unless `pairs` is empty.

    Each of `parts` bfloat16 parts is packed for itself; `rows` and `stage` are scratch. Returns
    0.0, or NaN if a row contains an infinity or NaN.
    """
    padded, area = (count + 31) // 32 * 32, TILE_N * ld
    if parts == 1:
        rows[:] = 0
        check = load_key_rows(like, code, rows, ld, dim, first, count, start, row_bytes)
    else:
        stage[:] = 0
        check = load_key_rows(like, code, stage, ld, dim, first, count, start, row_bytes)
    for part in range(parts):
        if parts > 1:
            take_part(like, stage, padded * ld, rows)
        at = (tile * parts + part) * area
        transpose_tile(like, rows, padded, ld, panels[at : at + area])
        if len(pairs) > 0:
            pair_tile(like, rows, padded, ld, pairs[at : at + area], TILE_N)
    return check


@inner
def _load_keys(call, keys, stage, shape, sequence, kv_head, first_key, end_key):
    """Pack a panel of K and V, tile by tile, as operands, and zero the sums of dk and dv.

    Args:
        keys: the scratch of the panel.
        stage: scratch for rows.
        first_key, end_key: the range of keys.
    """
    sizes, like, starts = call.sizes, call.arrays.like, call.arrays.starts
    for tile in range((end_key - first_key + TILE_N - 1) // TILE_N):
        key = first_key + tile * TILE_N
        count = min(TILE_N, end_key - key)
        keys.check[tile] = _load_tile(
            like,
            sizes.k_code,
            keys.rows,
            stage,
            keys.k_panels,
            keys.k_pairs,
            tile,
            shape.parts,
            shape.ld,
            sizes.head_dim,
            key,
            count,
            starts[sequence, K] + kv_head * sizes.k_head,
            sizes.k_row,
        )
        _load_tile(
            like,
            sizes.k_code,
            keys.rows,
            stage,
            keys.v_panels,
            keys.rows[:0],
            tile,
            shape.parts,
            shape.ldv,
            sizes.v_head_dim,
            key,
            count,
            starts[sequence, V] + kv_head * sizes.v_head,
            sizes.v_row,
        )
    keys.dk[:] = 0
    keys.dv[:] = 0


@inner
def _load_queries(call, queries, scores, shape, sequence, kv_head, first_row, num_rows):
    """Pack a strip of q and do as operands, by rows and by columns, and zero the sums of dq.

    Args:
        queries, scores: the thread's scratch.
        first_row: the first row of the strip.
        num_rows: the rows of the key head, beyond which rows are zero.
    """
    sizes, grads, like, starts = call.sizes, call.grads, call.arrays.like, call.arrays.starts
    strip, parts, group = shape.strip, shape.parts, sizes.group
    first_head = kv_head * group
    for tile in range(0, strip, TILE_M):
        row = first_row + tile
        rows = max(min(TILE_M, num_rows - row), 0)
        load_flat_rows(
            like,
            sizes.q_code,
            queries.q_rows,
            tile * shape.ld,
            shape.ld,
            strip * shape.ld,
            parts,
            scores.stage,
            sizes.head_dim,
            starts[sequence, Q] + first_head * sizes.q_head,
            sizes.q_row,
            sizes.q_head,
            group,
            row,
            rows,
        )
        scores.stage[: shape.ld] = 0
        load_flat_rows(
            like,
            sizes.q_code,
            queries.do_rows,
            tile * shape.ldv,
            shape.ldv,
            strip * shape.ldv,
            parts,
            scores.stage,
            sizes.v_head_dim,
            starts[sequence, DO] + first_head * grads.do_head,
            grads.do_row,
            grads.do_head,
            group,
            row,
            rows,
        )
        scores.stage[: shape.ldv] = 0
        for part in range(parts):
            at = part * strip * shape.ld
            transpose_rows(
                queries.q_rows,
                at + tile * shape.ld,
                shape.ld,
                queries.q_columns,
                at + tile,
                strip,
                scores.words,
            )
            at = part * strip * shape.ldv
            transpose_rows(
                queries.do_rows,
                at + tile * shape.ldv,
                shape.ldv,
                queries.do_columns,
                at + tile,
                strip,
                scores.words,
            )
    queries.dq[:] = 0


@inner
def _prefetch_queries(call, place, first_row, last_row):
    sizes, grads, starts = call.sizes, call.grads, call.arrays.starts
    sequence, first_head = place.sequence, place.kv_head * sizes.group
    prefetch_flat_rows(
        sizes.q_code,
        sizes.head_dim,
        starts[sequence, Q] + first_head * sizes.q_head,
        sizes.q_row,
        sizes.q_head,
        sizes.group,
        first_row,
        last_row,
    )
    prefetch_flat_rows(
        sizes.q_code,
        sizes.v_head_dim,
        starts[sequence, DO] + first_head * grads.do_head,
        grads.do_row,
        grads.do_head,
        sizes.group,
        first_row,
        last_row,
    )


@inner
def _union(seen, first, count):
    """Return (begin, end) of the columns that any of the blocks first ... first + count - 1 of
    BLOCK rows sees; (0, 0) if none."""
    begin, end = TILE_N, 0
    for block in range(first, first + count):
        if seen.end[block] > 0:
            begin, end = min(begin, seen.begin[block]), max(end, seen.end[block])
    return min(begin, end), end


@inner
def _multiply_rows(c, top, begin, end, rows, first, ld, panels, area, shape):
    """Compute c = rows panels^T for SIDE query rows of a tile and its keys begin ... end - 1.

    Args:
        c: float32 (TILE_M, TILE_N), flat: S or dP of the tile; the products replace older ones.
        top: the first of the SIDE rows, counted from the start of the tile.
        begin, end: keys counted from the start of the tile, multiples of 32.
        rows: the bfloat16 rows of the strip, `_Queries.q_rows` or do_rows.
        first: the first row of the tile, counted from the start of the strip.
        ld: the channels of a row in scratch.
        panels: the transposed keys or values, `_Keys.k_panels` or v_panels.
        area: the tile's first key in `panels`, counted over all parts of the tiles before it.
        shape: the `_Shape` of the task.
    """
    multiply_tiles(
        c,
        top * TILE_N + begin,
        TILE_N,
        SIDE,
        end - begin,
        rows,
        (first + top) * ld,
        ld,
        shape.strip * ld,
        panels,
        (area + begin) * ld,
        64,
        SIDE * ld,
        TILE_N * ld,
        ld // 32,
        shape.parts,
        False,
    )


@inner
def _add_query_gradient(queries, scores, k_pairs, seen, ld, first, base, parts):
    """Add dS K of one tile to the strip's sums of dq.

    Args:
        queries, scores: the scratch with the sums of dq, and with dS in `ds_rows`.
        k_pairs: the packed keys of the panel.
        seen: the columns that rows of the tile see, a `Seen`.
        ld: the channels of a row in scratch.
        first: the first row of the tile, counted from the start of the strip.
        base: the index in `k_pairs` at which the tile's keys begin.
        parts: the bfloat16 parts of an operand.
    """
    for row in range(0, TILE_M, SIDE):
        begin, end = _union(seen, row // BLOCK, SIDE // BLOCK)
        multiply_tiles(
            queries.dq,
            (first + row) * ld,
            ld,
            SIDE,
            ld,
            scores.ds_rows,
            row * TILE_N + begin,
            TILE_N,
            TILE_M * TILE_N,
            k_pairs,
            base + begin * 32,
            64,
            TILE_N * 32,
            TILE_N * ld,
            (end - begin) // 32,
            parts,
            True,
        )


@inner
def _store_query_gradient(call, sums, sequence, kv_head, first_row, rows, ld):
    """Add the sums of a strip of `rows` rows to call.dq, each to the row of its query and head; the
    caller multiplies dq by the softmax scale at the end."""
    sizes, grads, starts, dq = call.sizes, call.grads, call.arrays.starts, call.dq
    head_dim, first_head = sizes.head_dim, kv_head * sizes.group
    lanes = simd.REGISTER_BYTES // dq.itemsize
    done = head_dim // lanes * lanes
    for row in range(rows):
        query = (first_row + row) // sizes.group
        head = first_head + first_row + row - query * sizes.group
        where = starts[sequence, DQ] + query * grads.dq_row
        where += head * head_dim
        for column in range(0, done, lanes):
            total = simd.add(simd.load(dq, where + column), simd.load(sums, row * ld + column))
            simd.store(dq, where + column, total)
        for column in range(done, head_dim):
            dq[where + column] += sums[row * ld + column]


@inner
def _backward_tile(call, place, keys, queries, scores, seen, shape, first_row, first, tile):
    """Compute P and dS of TILE_M query rows, from row first_row + first on, and tile number `tile`
    of the panel of keys; store both as operands for dk and dv, and add dS K to the strip's sums of
    dq.

    `first` counts from the start of the strip. Returns (begin, end) of the tile's keys that any of
    the rows sees.
    """
    sizes, like, parts = call.sizes, call.arrays.like, shape.parts
    start = call.arrays.starts[place.sequence]
    num_rows, row = start[Q_LEN] * sizes.group, first_row + first
    begin, end = _union(seen, 0, TILE_M // BLOCK)
    area = tile * parts * TILE_N
    rows = min(TILE_M, num_rows - row)
    # 32 rows of S and dP stay in an L1 cache of 48 KiB until they are operands.
    for top in range(0, TILE_M, SIDE):
        low, high = _union(seen, top // BLOCK, SIDE // BLOCK)
        _multiply_rows(
            scores.s, top, low, high, queries.q_rows, first, shape.ld, keys.k_panels, area, shape
        )
        _multiply_rows(
            scores.dp, top, low, high, queries.do_rows, first, shape.ldv, keys.v_panels, area, shape
        )
        differentiate_rows(call, place, seen, scores, row, rows, low, high, top, top + SIDE)
        pack_scores(
            like,
            scores.s,
            scores.dp,
            scores.p_words,
            scores.ds_words,
            scores.ds_rows,
            scores.words,
            first,
            shape.strip,
            parts,
            low,
            high,
            top,
            top + SIDE,
        )
    if keys.check[tile] == 0.0:
        _add_query_gradient(
            queries, scores, keys.k_pairs, seen, shape.ld, first, area * shape.ld, parts
        )
        return begin, end
    load_key_rows(
        like,
        sizes.k_code,
        scores.stage,
        shape.ld,
        sizes.head_dim,
        place.key,
        place.count,
        start[K] + place.kv_head * sizes.k_head,
        sizes.k_row,
    )
    add_rows_exactly(
        queries.dq,
        first * shape.ld,
        shape.ld,
        sizes.head_dim,
        scores.dp,
        scores.stage,
        shape.ld,
        scores.ones,
        seen,
        place.count,
        rows,
    )
    scores.stage[:] = 0
    return begin, end


@inner
def _add_key_gradient(c, at, columns, ld, operand, words, shape, first, last, begin, end):
    """Add the sum over rows first ... last - 1 of operand[row, channel] * words[row, key] to c.

    c is a tile of dk or dv, stored as (channels, keys); keys begin ... end - 1 are added to. The
    operand is q (with words = ds) or do (with words = p). Rows are counted within the strip.
    """
    multiply_tiles(
        c,
        at + begin,
        TILE_N,
        ld,
        end - begin,
        operand,
        first,
        shape.strip,
        shape.strip * ld,
        words,
        begin * shape.strip + first * SIDE,
        64,
        SIDE * shape.strip,
        shape.strip * TILE_N,
        (last - first) // 32,
        shape.parts,
        True,
    )


@inner
def _backward_strip(call, place, keys, queries, scores, seen, view, shape, first_row, tile):
    """Add the terms of a strip of query rows to the sums of dk and dv of one tile of keys, and to
    the strip's sums of dq, all in scratch.

    Args:
        place: the tile of keys, a `Place`.
        keys, queries, scores: the thread's scratch.
        seen, view: scratch of `see_tile`, and the part of a block mask.
        first_row: the first row of the strip.
        tile: the number of the tile within the panel.
    """
    sizes, start = call.sizes, call.arrays.starts[place.sequence]
    q_len, k_len = start[Q_LEN], start[K_LEN]
    num_rows = q_len * sizes.group
    first, last, begin, end = shape.strip, 0, TILE_N, 0
    share = TILE_M // shape.tiles
    for at in range(0, min(shape.strip, num_rows - first_row), TILE_M):
        row = first_row + at
        # Rows of the next strip are prefetched into the L2 cache meanwhile.
        later = row + shape.strip + tile * share
        _prefetch_queries(call, place, later, min(later + share, num_rows))
        rows = min(TILE_M, num_rows - row)
        if see_tile(sizes, call.mask, view, seen, q_len, k_len, row, rows, place.key):
            low, high = _backward_tile(
                call, place, keys, queries, scores, seen, shape, first_row, at, tile
            )
            begin, end = min(begin, low), max(end, high)
            first, last = min(first, at), at + TILE_M
        else:
            clear_scores(scores.p_words, scores.ds_words, at, shape.strip, shape.parts)
    if first < last:
        area = tile * TILE_N
        _add_key_gradient(
            keys.dv,
            area * shape.ldv,
            sizes.v_head_dim,
            shape.ldv,
            queries.do_columns,
            scores.p_words,
            shape,
            first,
            last,
            begin,
            end,
        )
        _add_key_gradient(
            keys.dk,
            area * shape.ld,
            sizes.head_dim,
            shape.ld,
            queries.q_columns,
            scores.ds_words,
            shape,
            first,
            last,
            begin,
            end,
        )


@inner
def _store_key_gradient(like, code, sums, at, ld, dim, stage, count, factor, start, row_bytes):
    """Transpose the sums of dk or dv of a tile, scale them by `factor` and write their rows.

    Args:
        code: the dtype code of the gradient.
        sums, at: the sums [channel][key], and the index of the first.
        ld, dim: the channels in scratch, and those to write.
        stage: scratch for rows, which is zero again afterwards.
        count: the number of keys.
        start, row_bytes: the address of the first row, and the bytes of a row.
    """
    for key in range(0, count, 16):
        for channel in range(0, ld, 16):
            transpose_block(
                sums, at + channel * TILE_N + key, TILE_N, stage, key * ld + channel, ld
            )
    for row in range(count):
        store_row(like, code, stage, row * ld, factor, start + row * row_bytes, dim)
    stage[: TILE_N * ld] = 0


@inner
def _backward_task(call, parts, turn, chunk, sequence, kv_head):
    """Compute dk and dv of chunk number `chunk` of the keys of one sequence and key head and write
    them; add the chunk's terms to call.dq, without the softmax scale, and to dbias in the order of
    chunks."""
    sizes, grads, arrays, mask = call.sizes, call.grads, call.arrays, call.mask
    like, starts = arrays.like, arrays.starts
    q_len, k_len = starts[sequence, Q_LEN], starts[sequence, K_LEN]
    shape = _shape_of(sizes, parts)
    owned = _new_scratch(like, arrays.packed_like, mask.bits, shape)
    owned_seen = new_seen(mask.bits, starts[0])
    (keys, queries, scores), seen = borrowed(owned), borrowed(owned_seen)
    num_rows = q_len * sizes.group
    first_key = chunk * CHUNK_KEYS
    end_key = min(first_key + CHUNK_KEYS, k_len)
    for panel in range(first_key, end_key, shape.tiles * TILE_N):
        panel_end = min(panel + shape.tiles * TILE_N, end_key)
        _load_keys(call, keys, scores.stage, shape, sequence, kv_head, panel, panel_end)
        scores.stage[:] = 0
        owned_view = view_columns(sizes, mask, sequence, kv_head, panel, panel_end - panel)
        view = borrowed(owned_view)
        begin, end = seeing_rows(sizes, q_len, k_len, panel, panel_end - panel)
        for first_row in range(begin, end, shape.strip):
            last_row = min(first_row + shape.strip, num_rows)
            if grads.has_dbias:
                wait_for_rows(turn, last_row)
            _load_queries(call, queries, scores, shape, sequence, kv_head, first_row, num_rows)
            for tile in range((panel_end - panel + TILE_N - 1) // TILE_N):
                key = panel + tile * TILE_N
                place = Place(chunk, sequence, kv_head, key, min(TILE_N, k_len - key))
                _backward_strip(
                    call, place, keys, queries, scores, seen, view, shape, first_row, tile
                )
            wait_for_rows(turn, last_row)
            _store_query_gradient(
                call, queries.dq, sequence, kv_head, first_row, last_row - first_row, shape.ld
            )
            if panel_end == end_key:
                publish_rows(turn, last_row)
        keep_alive(owned_view)
        for key in range(panel, panel_end, TILE_N):
            count, tile = min(TILE_N, panel_end - key), (key - panel) // TILE_N
            address = starts[sequence, DK] + key * grads.dk_row + kv_head * grads.dk_head
            _store_key_gradient(
                like,
                sizes.k_code,
                keys.dk,
                tile * TILE_N * shape.ld,
                shape.ld,
                sizes.head_dim,
                scores.stage,
                count,
                call.rule.scale,
                address,
                grads.dk_row,
            )
            address = starts[sequence, DV] + key * grads.dv_row + kv_head * grads.dv_head
            _store_key_gradient(
                like,
                sizes.k_code,
                keys.dv,
                tile * TILE_N * shape.ldv,
                shape.ldv,
                sizes.v_head_dim,
                scores.stage,
                count,
                call.dropout.scale,
                address,
                grads.dv_row,
            )
    keep_alive(owned)
    keep_alive(owned_seen)


@kernel
def attention_backward(call, parts, counter, num_tasks):
    """Compute the gradients of attention on the matrix unit: take tasks, each a chunk of keys of a
    sequence and key head, in this thread until none is left. dq lacks the softmax scale.

    Args:
        call: a `Backward` with delta computed.
        parts: the number of bfloat16 parts of an operand.
        counter: (1,) int64, the next task.
    """
    call = borrowed(call)
    sizes, grads, arrays, done = call.sizes, call.grads, call.arrays, call.done
    num_sequences = len(arrays.starts)
    heads = 1 if grads.shares_heads else sizes.num_kv_heads
    amx.configure()
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            amx.release()
            return
        chunk, owner = task // grads.num_owners, task % grads.num_owners
        first_sequence, first_head = owner // heads, owner % heads
        end_sequence = num_sequences if grads.shares_batch else first_sequence + 1
        end_head = sizes.num_kv_heads if grads.shares_heads else first_head + 1
        turn = Turn(done, task, task - grads.num_owners, 0)
        for sequence in range(first_sequence, end_sequence):
            for kv_head in range(first_head, end_head):
                _backward_task(call, parts, turn, chunk, sequence, kv_head)
                turn = end_turn(turn, arrays.starts[sequence, Q_LEN] * sizes.group)
