"""Tiles of keys in the backward pass: what they see, what of them is cleared, how they leave.

What: masks of (64 keys, queries), zeros where a tile holds rows of no or another sequence, and the
      last step of dk and dv.
Grid: none, inlined into the warpgroups.
One call: one tile of a warpgroup, or of the CTA.
Traffic: dk and dv are written once.
Numerics: none; what is cleared may be NaN and must not reach a sum as 0 * NaN.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tilewise.kernels.gluon.backward.logits import keep_pairs
from tilewise.kernels.gluon.device.compat import tma_store
from tilewise.kernels.gluon.device.warpgroup import keep_columns
from tilewise.kernels.gluon.visible import MASK_TILE, first_key_seen, queries_of_keys, words_of_mask


@gluon.jit
def hide(s, work, tile, number, first_word, keys, shape, scores, variant: gl.constexpr):
    """Return s (keys, queries) with -inf where the query does not see the key.

    tile: the tile of queries; number: its bit tile in a block mask, -1 for all bits; first_word:
    the place of these keys' first word in it; keys: the positions of the keys in their sequence.
    """
    TILE_M: gl.constexpr = variant.tile_m
    if variant.mask:
        words = words_of_mask(s, number, tile * TILE_M % MASK_TILE, first_word, scores)
        s = keep_pairs(s, words, float("-inf"))
    begin, end = queries_of_keys(
        keys,
        tile * TILE_M,
        work.length_q,
        work.length_k,
        shape.window_left,
        shape.window_right,
        variant,
    )
    HAS_BEGIN: gl.constexpr = variant.right or variant.tail
    HAS_END: gl.constexpr = variant.left or variant.packed
    if HAS_BEGIN or HAS_END:
        s = keep_columns(s, begin, end, HAS_BEGIN, HAS_END)
    return s


@gluon.jit
def clear_rows(tile, begin, end):
    """Set to 0, in shared memory, the rows of a tile (n, D) outside [begin, end), which belong to
    no sequence or to another."""
    ROWS: gl.constexpr = tile.shape[0]
    D: gl.constexpr = tile.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    for first in gl.static_range(0, ROWS, 16):
        rows = tile.slice(first, 16, 0)
        row = first + gl.arange(0, 16, gl.SliceLayout(1, layout))
        outside = (row < begin) | (row >= end)
        x = rows.load(layout)
        rows.store(gl.where(gl.expand_dims(outside, 1), gl.full_like(x, 0.0), x))


@gluon.jit
def clear_keys(tile, first_key, lengths, shape, variant: gl.constexpr):
    """Set to 0, in shared memory, the keys of a tile that are past the end of their sequence or
    left of every window.

    lengths: a `Work` or `Rows`, of which length_q and length_k are read. All warpgroups of a CTA
    zero the same keys.
    """
    if variant.packed or variant.ragged or variant.left:
        begin = 0
        if variant.left:
            begin = first_key_seen(lengths.length_q, lengths.length_k, shape.window_left)
            begin = begin - first_key
        end = lengths.length_k - first_key
        if (begin > 0) | (end < variant.tile_n):
            clear_rows(tile, begin, end)
            fence_async_shared()


@gluon.jit
def clear_queries(rows, work, tile, variant: gl.constexpr):
    """Set to 0, in shared memory, the rows of a packed sequence's last tile that belong to the next
    sequence."""
    if variant.packed:
        rest = work.length_q - tile * variant.tile_m
        if rest < variant.tile_m:
            clear_rows(rows, 0, rest)
            fence_async_shared()


@gluon.jit
def _clear_unseen(x, first_key, work, shape, variant: gl.constexpr):
    """Return the gradients x of 64 keys with 0 for keys that no query sees, which a query that is
    NaN has made NaN.

    Args:
        first_key: the first of the 64 keys.
        work, shape: the CTA's `Work` and the call's `Shape`.
    """
    keys = first_key + gl.arange(0, 64, gl.SliceLayout(1, x.type.layout))
    unseen = keys >= work.length_k
    if variant.left:
        first = first_key_seen(work.length_q, work.length_k, shape.window_left)
        unseen = unseen | (keys < first)
    return gl.where(gl.expand_dims(unseen, 1), gl.full_like(x, 0.0), x)


@gluon.jit
def store_keys(
    x,
    desc,
    ptr,
    work,
    shape,
    buffer,
    variant: gl.constexpr,
    PART: gl.constexpr,
    WIDTH: gl.constexpr,
    FIRST: gl.constexpr = 0,
    WAIT: gl.constexpr = True,
):
    """Write 64 rows x of dk or dv: by TMA through `buffer`, or row by row at the end of a packed
    sequence; rows that no query sees are written as 0.

    FIRST: the channel of the first column; WIDTH: channels of a head; WAIT: until the buffer has
    been read.
    """
    D: gl.constexpr = x.shape[1]
    row = work.first_key + PART * 64
    if variant.ragged or variant.left:
        x = _clear_unseen(x, row, work, shape, variant)
    batch = work.b
    whole = row >= 0
    if variant.packed:
        batch = 0
        whole = row + 64 <= work.length_k
    if whole:
        half = buffer.index(0).slice(PART * 64, 64, 2)
        buffer.index(0).reshape([variant.tile_n, D]).slice(PART * 64, 64, 0).store(x)
        fence_async_shared()
        tma_store(desc, [batch, work.head, work.start_k + row, FIRST], half)
        if WAIT:
            tma.store_wait(0)
    if variant.packed:  # noqa: SIM102
        if row + 64 > work.length_k:
            layout: gl.constexpr = x.type.layout
            rows = row + gl.arange(0, 64, gl.SliceLayout(1, layout))
            columns = FIRST + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
            at = (work.start_k + rows).to(gl.int64) * shape.num_kv_heads + work.head
            stored = gl.expand_dims(rows < work.length_k, 1) & (columns < WIDTH)
            gl.store(ptr + gl.expand_dims(at * WIDTH, 1) + columns, x, mask=stored)
