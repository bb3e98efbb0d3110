"""Gradient of queries on Hopper in a kernel of its own; head dims up to 256.

What: dq = ds k of one tile of queries; the rule is that of attention_bwd.
Grid: one axis, tiles of 128 queries x (batch x query heads), those with most keys first.
One CTA: 128 queries of one head, 64 to each of two warpgroups; loops over the tiles of 64 keys that
      they see, from the last to the first. v and k pass through a ring of slots in turn, loaded by
      a warp of its own.
Traffic: q, do and the row terms are read and dq is written once; k, v once per tile of queries.
Numerics: as in attention_bwd; one owner and one order for every sum.

The index of q and do is computed from the step though it is always the warpgroup's own, as in
attention_bwd_consumer.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon._bwd_scores import Places
from tilewise.kernels.gluon._bwd_tiles import clear_keys
from tilewise.kernels.gluon._bwd_walk import Shape, head_of_cta, place_of_head
from tilewise.kernels.gluon._compat import tma_load, tma_store
from tilewise.kernels.gluon._warpgroup import (
    LOG2E,
    capped_exp2,
    exp2,
    keep_columns,
    operand_layout,
    sum_layout,
)
from tilewise.kernels.gluon.attention_bwd_consumer import ALWAYS_ZERO
from tilewise.kernels.gluon.attention_bwd_moves import barriers

CONSUMER_REGISTERS = gl.constexpr(240)
MOVER_REGISTERS = gl.constexpr(24)
ROWS = gl.constexpr(128)  # queries of a CTA


class Rows(NamedTuple):
    """What one CTA does; made inside a kernel. Tiles are tiles of keys."""

    b: object
    head: object
    first_row: object
    length_q: object
    length_k: object
    start_q: object
    start_k: object
    row_terms: object  # where those of the first row lie
    begin: object  # first tile that a query sees
    full_begin: object  # first that needs no mask
    full_end: object
    end: object


@gluon.jit
def rows_of_cta(shape, variant: gl.constexpr):
    """Return the rows of this CTA."""
    TILE_N: gl.constexpr = variant.tile_n
    num_heads = shape.num_kv_heads * shape.group_size
    tile, index = head_of_cta(shape, num_heads)
    if variant.right:
        tile = shape.num_tiles - 1 - tile
    first_row = tile * ROWS
    place = place_of_head(index, num_heads, shape, variant)
    length_q = place.length_q
    length_k = place.length_k
    plane = index
    if variant.packed:
        plane = place.head
    row_terms = plane.to(gl.int64) * shape.rows_per_plane + place.start_row + first_row
    diagonal = first_row + length_k - length_q
    last = gl.minimum(first_row + ROWS, length_q) - 1 - first_row
    begin = 0
    full_begin = 0
    limit = length_k
    full_limit = length_k
    if variant.right:
        limit = gl.minimum(limit, diagonal + last + shape.window_right + 1)
        full_limit = gl.minimum(limit, gl.maximum(diagonal + shape.window_right + 1, 0))
    if variant.left:
        begin = gl.maximum(diagonal - shape.window_left, 0) // TILE_N
        full_begin = gl.cdiv(gl.maximum(diagonal + last - shape.window_left, 0), TILE_N)
    end = gl.maximum(gl.cdiv(gl.maximum(limit, 0), TILE_N), begin)
    if variant.packed:
        end = gl.where(first_row < length_q, end, begin)
    full_begin = gl.minimum(full_begin, end)
    full_end = gl.maximum(full_limit // TILE_N, full_begin)
    return Rows(
        place.b, place.head, first_row, length_q, length_k, place.start_q, place.start_k, row_terms,
        begin, full_begin, full_end, end,
    )  # fmt: skip


@gluon.jit
def load_for_dq(
    q_desc, k_desc, v_desc, do_desc, shape, bufs, bars, variant: gl.constexpr
):  # fmt: skip
    """Load v and k of each tile into the ring, and q and do with the first."""
    SLOTS: gl.constexpr = variant.stages
    q_buf, do_buf, ring = bufs
    q_full, full, empty = bars
    rows = rows_of_cta(shape, variant)
    b = rows.b
    if variant.packed:
        b = 0
    key_head = rows.head // shape.group_size
    row = rows.start_q + rows.first_row
    slot = 0
    for step in range(0, rows.end - rows.begin):
        key = rows.start_k + (rows.end - 1 - step) * variant.tile_n
        at = slot % SLOTS
        mbarrier.wait(empty.index(at), ((slot // SLOTS) & 1) ^ 1)
        mbarrier.expect(full.index(at), v_desc.block_type.nbytes)
        tma_load(v_desc, [b, key_head, key, 0], full.index(at), ring.index(at))
        if step == 0:
            for part in gl.static_range(2):
                mbarrier.expect(q_full.index(part), q_desc.block_type.nbytes * 2)
                place = [b, rows.head, row + part * 64, 0]
                tma_load(do_desc, place, q_full.index(part), do_buf.index(part))
                tma_load(q_desc, place, q_full.index(part), q_buf.index(part))
        slot += 1
        at = slot % SLOTS
        mbarrier.wait(empty.index(at), ((slot // SLOTS) & 1) ^ 1)
        mbarrier.expect(full.index(at), k_desc.block_type.nbytes)
        tma_load(k_desc, [b, key_head, key, 0], full.index(at), ring.index(at))
        slot += 1


@gluon.jit
def _hide_keys(s, row, first_key, rows, shape, variant: gl.constexpr):
    """Set s (64 queries, keys) to -inf where a query does not see a key."""
    diagonal = row + (rows.length_k - rows.length_q)
    begin = gl.full_like(row, 0)
    end = begin + rows.length_k
    if variant.left:
        begin = diagonal - shape.window_left
    if variant.right:
        end = gl.minimum(end, diagonal + shape.window_right + 1)
    return keep_columns(s, begin - first_key, end - first_key, variant.left, True)


@gluon.jit
def make_dq(
    dq_desc, dq_ptr, lse_ptr, delta_ptr, shape, scores, places, bufs, bars,
    variant: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Make dq of 64 queries."""
    D: gl.constexpr = variant.d
    TILE_N: gl.constexpr = variant.tile_n
    SLOTS: gl.constexpr = variant.stages
    q_buf, do_buf, ring = bufs
    q_full, full, empty = bars
    dtype: gl.constexpr = q_buf.dtype
    over_keys: gl.constexpr = sum_layout(TILE_N)
    of_rows: gl.constexpr = gl.SliceLayout(1, over_keys)
    operand: gl.constexpr = operand_layout(D)
    CAPS: gl.constexpr = variant.softcap != "none"
    rows = rows_of_cta(shape, variant)
    within = PART * 64 + gl.arange(0, 64, of_rows)
    row = rows.first_row + within
    dq = gl.zeros([64, D], gl.float32, sum_layout(D))
    zeros = gl.zeros([64, TILE_N], gl.float32, over_keys)
    steps = rows.end - rows.begin
    if steps > 0:
        lse = gl.load(lse_ptr + rows.row_terms + within)
        delta = gl.load(delta_ptr + rows.row_terms + within)
        slope = 0.0
        if variant.alibi:
            slope = gl.load(scores.alibi + rows.b * places.alibi_batch + rows.head) * LOG2E
        mbarrier.wait(q_full.index(PART), 0)
        slot = 0
        for step in range(0, steps):
            tile = rows.end - 1 - step
            first_key = tile * TILE_N
            at_v = slot % SLOTS
            at_k = (slot + 1) % SLOTS
            own = PART + slot // ALWAYS_ZERO
            q = q_buf.index(own).reshape([64, D])
            do = do_buf.index(own).reshape([64, D])
            k = ring.index(at_k).reshape([TILE_N, D])
            v = ring.index(at_v).reshape([TILE_N, D])
            mbarrier.wait(full.index(at_v), (slot // SLOTS) & 1)
            mbarrier.wait(full.index(at_k), ((slot + 1) // SLOTS) & 1)
            masked = (tile < rows.full_begin) | (tile >= rows.full_end)
            clear_keys(k, first_key, rows, shape, variant)
            clear_keys(v, first_key, rows, shape, variant)
            s_sum = warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dp_sum = warpgroup_mma(do, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s_sum,))
            minus_lse = zeros - gl.expand_dims(lse, 1)
            if CAPS:
                logits = minus_lse
            else:
                logits = gl.fma(s, zeros + scores.scale_log2, minus_lse)
            if variant.alibi:
                keys = first_key + gl.arange(0, TILE_N, gl.SliceLayout(0, over_keys))
                diagonal = row + (rows.length_k - rows.length_q)
                distance = gl.expand_dims(diagonal.to(gl.float32), 1)
                distance = gl.abs(distance - gl.expand_dims(keys.to(gl.float32), 0))
                logits = gl.fma(distance, zeros - slope, logits)
            if masked:
                logits = _hide_keys(logits, row, first_key, rows, shape, variant)
            if CAPS:
                ratio, factor = zeros + scores.cap_ratio, zeros + scores.cap_log2
                _p, p = capped_exp2(s, ratio, factor, logits, variant.softcap == "exact")
            else:
                p = exp2(logits)
            dp = warpgroup_mma_wait(0, deps=(dp_sum,))
            mbarrier.arrive(empty.index(at_v), count=1)
            ds = p * (dp - gl.expand_dims(delta, 1))
            ds_half = gl.convert_layout(ds.to(dtype), operand, assert_trivial=True)
            dq_sum = warpgroup_mma(ds_half, k, dq, is_async=True)
            dq, ds_half = warpgroup_mma_wait(0, deps=(dq_sum, ds_half))
            mbarrier.arrive(empty.index(at_k), count=1)
            slot += 2
    x = (dq * scores.scale).to(dtype)
    b = rows.b
    whole = rows.first_row >= 0
    if variant.packed:
        b = 0
        whole = rows.first_row + PART * 64 + 64 <= rows.length_q
    if whole:
        out = q_buf.index(PART)
        out.reshape([64, D]).store(x)
        fence_async_shared()
        place = [b, rows.head, rows.start_q + rows.first_row + PART * 64, 0]
        tma_store(dq_desc, place, out)
        tma.store_wait(0)
    elif variant.packed:
        layout: gl.constexpr = x.type.layout
        WIDTH: gl.constexpr = variant.width
        mine = rows.first_row + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        columns = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
        num_heads = shape.num_kv_heads * shape.group_size
        at = (rows.start_q + mine).to(gl.int64) * num_heads + rows.head
        stored = gl.expand_dims(mine < rows.length_q, 1) & (columns < WIDTH)
        gl.store(dq_ptr + gl.expand_dims(at * WIDTH, 1) + columns, x, mask=stored)


@gluon.jit(
    do_not_specialize=[
        "batch", "num_kv_heads", "group_size", "seqlen_q", "seqlen_k", "window_left",
        "window_right", "num_tiles", "heads_per_section", "rows_per_plane", "alibi_batch",
    ]
)  # fmt: skip
def attention_bwd_dq_kernel(
    q_desc, k_desc, v_desc, do_desc, dq_desc, dq_ptr, lse_ptr, delta_ptr, sequences, batch,
    num_kv_heads, group_size, seqlen_q, seqlen_k, window_left, window_right, num_tiles,
    heads_per_section, rows_per_plane, scores, alibi_batch, variant: gl.constexpr,
):  # fmt: skip
    """Compute one tile of dq; see the module's docstring."""
    shape = Shape(
        sequences.cu_q, sequences.cu_k, sequences.seqlens_k, batch, num_kv_heads, group_size,
        seqlen_q, seqlen_k, window_left, window_right, num_tiles, heads_per_section,
        0, rows_per_plane, 0, 1, 0, 0, 0, 0,
    )  # fmt: skip
    places = Places(alibi_batch, 0, 0, 0, 0, 0, 0, 0)
    D: gl.constexpr = variant.d
    SLOTS: gl.constexpr = variant.stages
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, D], do_desc.layout)
    ring = gl.allocate_shared_memory(dtype, [SLOTS, 1, 1, variant.tile_n, D], k_desc.layout)
    bufs = (q, do, ring)
    bars = (barriers(2, 1), barriers(SLOTS, 1), barriers(SLOTS, 2))
    gl.warp_specialize(
        [
            (make_dq, (dq_desc, dq_ptr, lse_ptr, delta_ptr, shape, scores, places, bufs, bars,
                       variant, 0)),
            (make_dq, (dq_desc, dq_ptr, lse_ptr, delta_ptr, shape, scores, places, bufs, bars,
                       variant, 1)),
            (load_for_dq, (q_desc, k_desc, v_desc, do_desc, shape, bufs, bars, variant)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, MOVER_REGISTERS],
    )  # fmt: skip
