"""The rows that a tile meets and their order: the loops of o, dq, dk and dv.

What: a program's own tile, of queries or of keys, meets the rows of the other side of one head,
      step by step. `fold`, a function of the kernel, adds each step to its sums:
      fold(sums, own, others, step, scores, draw, dims, variant, MASKED, BITS) -> sums.
Grid: none, inlined into the three kernels.
One call: all steps of a tile. Without a block mask the rows form three ranges: those cut by one
      edge, those that the whole tile meets, those cut by the other edge. With a block mask they are
      the mask's tiles: the full ones, then the partial ones.
Traffic: of a block mask, see `visible`; all else is loaded by `fold`.
Numerics: one order of steps, so one order of sums.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.dropout import draw_of_head
from tilewise.kernels.triton.attention.tile import (
    Scores,
    bias_of_head,
    row_offsets,
    row_pointers,
    row_start,
    row_step,
    sequence,
    slope_of_head,
    tile_of_program,
)
from tilewise.kernels.triton.visible import (
    key_at,
    keys_of_rows,
    lists_of_tile,
    pairs_of_entry,
    span_of_rows,
    visible,
)


class Others(NamedTuple):
    """The rows of one head that a program loops over: of k and v, or of q and do for dk and dv."""

    a: object  # address of k or q
    b: object  # address of v or do
    a_row: object  # strides, in units
    b_row: object
    begin: object  # first row of this tile: only rows [begin, end) exist
    end: object
    lse_log2: object  # lse of the rows of queries; None for keys
    delta: object


class Step(NamedTuple):
    """The rows that a step of a program's loop processes together: keys, or queries for dk, dv."""

    a: object  # addresses, (rows, d_pad)
    b: object  # (rows, dv_pad)
    first: object
    rows: object  # their indices
    loaded: object  # rows that may be loaded; for queries all rows before `end`
    allowed: object  # pairs that a bit tile allows; None without BITS


class Place(NamedTuple):
    """The place of a program's tile of queries: its sequence, head and first row; from
    `place_of_program`."""

    b: object
    h: object
    head: object  # b Hq + h
    first: object  # row
    first_q: object  # first row of the sequence in a packed batch
    length_q: object
    first_k: object
    length_k: object


class Queries(NamedTuple):
    """The tile of queries of one program, and the range of keys [key_begin, key_end) of each."""

    q: object  # (TILE_M, d_pad)
    q_rest: object  # (TILE_M, rest_pad), None without a rest
    do: object  # (TILE_M, dv_pad); None in the forward pass, as are the next two
    lse_log2: object
    delta: object
    first: object
    rows: object  # (TILE_M,), clamped to the last one
    diagonal: object
    key_begin: object
    key_end: object


@triton.jit
def place_of_program(
    sequences,
    num_tiles,
    heads_per_section,
    num_q_heads,
    seqlen_q,
    seqlen_k,
    variant: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Return the Place of this program: which tile of queries, of which head and sequence, it owns.

    Its `first` may lie past the end of the sequence; such a program has no work.
    """
    tile, head = tile_of_program(num_tiles, heads_per_section, variant.right)
    b, h = head // num_q_heads, head % num_q_heads
    first_q, length_q = sequence(b, sequences.cu_q, None, seqlen_q, sequences.rows_q)
    first_k, length_k = sequence(b, sequences.cu_k, sequences.seqlens_k, seqlen_k, sequences.rows_k)
    return Place(b, h, head, tile * TILE_M, first_q, length_q, first_k, length_k)


@triton.jit
def walk_keys(
    sums,
    fold: tl.constexpr,
    q,
    q_rest,
    do,
    lse_log2,
    delta,
    at,
    k_base,
    v_base,
    strides,
    window_left,
    window_right,
    softmax_scale,
    softcap,
    extras,
    dims: tl.constexpr,
    variant: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    MOVES_ALL: tl.constexpr,
):
    """Fold all keys that the tile of queries at the Place `at` sees into `sums`; return them.

    do, lse_log2 and delta are None in the forward pass. The other arguments are those of `walk`.
    """
    begin, full_begin, full_end, end, seen_begin = span_of_rows(
        at.first, at.length_q, at.length_k, window_left, window_right, TILE_M, TILE_N, variant
    )
    rows = at.first + tl.arange(0, TILE_M)
    key_begin, key_end = keys_of_rows(
        rows, at.length_q, at.length_k, window_left, window_right, variant
    )
    queries = Queries(
        q,
        q_rest,
        do,
        lse_log2,
        delta,
        at.first,
        tl.minimum(rows, at.length_q - 1),
        key_at(rows, at.length_q, at.length_k),
        key_begin,
        key_end,
    )
    keys = Others(k_base, v_base, strides.k[1], strides.v[1], seen_begin, end, None, None)
    return walk(
        sums,
        fold,
        queries,
        keys,
        at.b,
        at.h,
        at.head,
        (begin, full_begin, full_end, end),
        softmax_scale,
        softcap,
        extras,
        dims,
        variant,
        TILE_M,
        TILE_N,
        False,
        MOVES_ALL,
    )


@triton.jit
def walk(
    sums,
    fold: tl.constexpr,
    own,
    others,
    b,
    h,
    head,
    edges,
    softmax_scale,
    softcap,
    extras,
    dims: tl.constexpr,
    variant: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    MOVES_ALL: tl.constexpr,
):
    """Fold all rows of `others` that the tile `own` meets into `sums`, a tuple; return the sums.

    fold: the kernel's function that adds the rows of one step to the sums, see the module's
    docstring. own: the program's tile, Queries, or Keys with KEYS_FIRST; edges: the bounds of the
    three ranges of rows, see `visible.span_of_tile`. MOVES_ALL: True if a step advances the address
    of each element. Otherwise it advances the address of its first row alone, which saves
    registers: 8 to 14 percent of the time of dk, dv (D 128, H200).
    """
    scores = Scores(
        softmax_scale,
        softcap,
        slope_of_head(extras, b, h, variant),
        bias_of_head(extras, b, h, variant),
        extras.bias_row,
        extras.bias_key,
    )
    draw = draw_of_head(extras, head, variant)
    if variant.mask_q > 0:
        lists = lists_of_tile(extras, b, h, own.first, edges[0], edges[3], variant, KEYS_FIRST)
        for partial in tl.static_range(2):
            sums = _walk_entries(
                sums,
                fold,
                own,
                others,
                lists[2 * partial],
                lists[2 * partial + 1],
                scores,
                draw,
                extras,
                dims,
                variant,
                TILE_M,
                TILE_N,
                KEYS_FIRST,
                partial == 1,
            )
    else:
        HAS_FIRST: tl.constexpr = variant.right if KEYS_FIRST else variant.left
        for part in tl.static_range(3):  # in the middle one every query sees every key
            if part > 0 or HAS_FIRST:
                sums = _walk_range(
                    sums,
                    fold,
                    own,
                    others,
                    edges[part],
                    edges[part + 1],
                    scores,
                    draw,
                    dims,
                    variant,
                    TILE_M if KEYS_FIRST else TILE_N,
                    MOVES_ALL,
                    part != 1,
                )
    return sums


@triton.jit
def _walk_range(
    sums,
    fold: tl.constexpr,
    own,
    others,
    begin,
    end,
    scores,
    draw,
    dims: tl.constexpr,
    variant: tl.constexpr,
    TILE: tl.constexpr,
    MOVES_ALL: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the rows [begin, end) of `others` into `sums`, TILE at a time; return the sums.

    MASKED is passed to `fold`: True if the tile may not see all of these rows, or some do not
    exist. The other arguments are those of `walk`.
    """
    rows = begin + tl.arange(0, TILE)
    if MOVES_ALL:
        a = row_pointers(others.a, begin, TILE, others.a_row, dims.d_pad, dims)
        b = row_pointers(others.b, begin, TILE, others.b_row, dims.dv_pad, dims)
        a_offsets, b_offsets = 0, 0
    else:
        a = row_start(others.a, begin, others.a_row, dims.unit)
        b = row_start(others.b, begin, others.b_row, dims.unit)
        a_offsets = row_offsets(TILE, others.a_row, dims.d_pad, dims)
        b_offsets = row_offsets(TILE, others.b_row, dims.dv_pad, dims)
    a_step = row_step(TILE, others.a_row, dims.unit)
    b_step = row_step(TILE, others.b_row, dims.unit)
    for first in range(begin, end, TILE):
        loaded = visible(rows, others.begin, others.end, variant)
        step = Step(a + a_offsets, b + b_offsets, first, rows, loaded, None)
        sums = fold(sums, own, others, step, scores, draw, dims, variant, MASKED, False)
        a += a_step
        b += b_step
        rows += TILE
    return sums


@triton.jit
def _walk_entries(
    sums,
    fold: tl.constexpr,
    own,
    others,
    first,
    last,
    scores,
    draw,
    extras,
    dims: tl.constexpr,
    variant: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    BITS: tl.constexpr,
):
    """Fold the rows of some tiles of a block mask into `sums`; return the sums.

    first, last: the range of entries in the list of the own tile's row (or column with KEYS_FIRST)
    of mask tiles. BITS: True for partial tiles, whose pairs are looked up in their bits. The other
    arguments are those of `walk`.
    """
    TILE: tl.constexpr = TILE_M if KEYS_FIRST else TILE_N
    SIZE: tl.constexpr = variant.mask_q if KEYS_FIRST else variant.mask_k
    STEPS: tl.constexpr = SIZE // TILE
    MASKED: tl.constexpr = BITS or variant.ruled
    entries = extras.mask_column_entries if KEYS_FIRST else extras.mask_row_entries
    entries += first.to(tl.int64) * 2
    for number in range(0, (last - first) * STEPS):
        within = number % STEPS * TILE
        begin = tl.load(entries + number // STEPS * 2) * SIZE + within
        rows = begin + tl.arange(0, TILE)
        loaded = visible(rows, others.begin, others.end, variant)
        allowed = None
        if BITS:
            loaded, allowed = pairs_of_entry(
                extras,
                entries + number // STEPS * 2,
                own.first,
                within,
                loaded,
                variant,
                TILE_M,
                TILE_N,
                KEYS_FIRST,
            )
        a = row_pointers(others.a, begin, TILE, others.a_row, dims.d_pad, dims)
        b = row_pointers(others.b, begin, TILE, others.b_row, dims.dv_pad, dims)
        step = Step(a, b, begin, rows, loaded, allowed)
        sums = fold(sums, own, others, step, scores, draw, dims, variant, MASKED, BITS)
    return sums
