"""One warpgroup of attention_bwd_dq: 64 queries, all keys that they see.

What: p = exp2(s), ds = p (dp - delta) and dq += ds k.
Grid: that of attention_bwd_dq.
One call: one partition of a CTA. A step issues both first products, does the exponentials of one
      under the other, then the second product; the other warpgroup fills the waits.
Traffic: see attention_bwd_dq; the bias and the bit tiles of a mask, where they are used.
Numerics: see attention_bwd_dq.

The index of q and do is computed from the step though it is always the warpgroup's own, as in
consumer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.backward.consumer import ALWAYS_ZERO
from tilewise.kernels.gluon.backward.keys import clear_keys
from tilewise.kernels.gluon.backward.row_span import rows_of_cta
from tilewise.kernels.gluon.device.compat import tma_store
from tilewise.kernels.gluon.device.dropout import draw_of, drop, random_words
from tilewise.kernels.gluon.device.logits import Extras, Head, hide_by_bits, load_bias
from tilewise.kernels.gluon.device.warpgroup import (
    LOG2E,
    capped_exp2,
    exp2,
    keep_columns,
    operand_layout,
    sum_layout,
)
from tilewise.kernels.gluon.visible import (
    MASK_TILE,
    MASK_WORDS,
    entry_of_tile,
    key_at,
    keys_of_rows,
    load_bits,
)


@gluon.jit
def _hide_keys(s, row, within, number, first_key, rows, shape, scores, variant: gl.constexpr):
    """Return s (64 queries, keys) with -inf where a query does not see a key.

    within: the place of the first query in its tile of the block mask; number: the bit tile, -1 for
    all bits.
    """
    if variant.mask:
        start = scores.mask_bits + number.to(gl.int64) * (MASK_TILE * MASK_WORDS)
        first_word = first_key % MASK_TILE // 32
        layout: gl.constexpr = s.type.layout
        words = load_bits(start, number, within, first_word, layout, s.shape[1], MASK_WORDS)
        s = hide_by_bits(s, words)
    if variant.ruled or not variant.mask:
        _diagonal, begin, end = keys_of_rows(
            row, rows.length_q, rows.length_k, shape.window_left, shape.window_right, variant
        )
        s = keep_columns(s, begin - first_key, end - first_key, variant.left, True)
    return s


@gluon.jit
def _products(bufs, own, at_k, zeros, variant: gl.constexpr):
    """Start s = q k^T of warpgroup `own` and the keys in slot `at_k`, and return the asynchronous
    sum."""
    q = bufs.q.index(own).reshape([64, variant.d])
    k = bufs.k.index(at_k).reshape([variant.tile_n, variant.d]).permute((1, 0))
    s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
    if variant.d_high > 0:
        q_high = bufs.q_high.index(own).reshape([64, variant.d_high])
        k_high = bufs.k_high.index(at_k).reshape([variant.tile_n, variant.d_high])
        s = warpgroup_mma(q_high, k_high.permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def _store_queries(
    x, desc, ptr, rows, shape, out, variant: gl.constexpr, PART: gl.constexpr, FIRST: gl.constexpr
):
    """Write 64 rows of dq: by TMA through `out`, or row by row at the end of a packed sequence.

    FIRST: the channel of the first column.
    """
    D: gl.constexpr = x.shape[1]
    b = rows.b
    whole = rows.first_row >= 0
    if variant.packed:
        b = 0
        whole = rows.first_row + PART * 64 + 64 <= rows.length_q
    if whole:
        out.reshape([64, D]).store(x)
        fence_async_shared()
        place = [b, rows.head, rows.start_q + rows.first_row + PART * 64, FIRST]
        tma_store(desc, place, out)
        tma.store_wait(0)
    elif variant.packed:
        layout: gl.constexpr = x.type.layout
        WIDTH: gl.constexpr = variant.width
        mine = rows.first_row + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, layout))
        columns = FIRST + gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, layout)), 0)
        num_heads = shape.num_kv_heads * shape.group_size
        at = (rows.start_q + mine).to(gl.int64) * num_heads + rows.head
        stored = gl.expand_dims(mine < rows.length_q, 1) & (columns < WIDTH)
        gl.store(ptr + gl.expand_dims(at * WIDTH, 1) + columns, x, mask=stored)


@gluon.jit
def _head_of_bias(rows, row, first_row, places, variant: gl.constexpr):
    """Return a `logits.Head` for 64 rows from `first_row` with the fields that `load_bias` reads;
    others are 0."""
    start = rows.b.to(gl.int64) * places.bias_batch + rows.head.to(gl.int64) * places.bias_head
    if variant.bias_pairs:
        start = start * 2
    last_row = gl.minimum(row, rows.length_q - 1)
    return Head(0, 0, 0, last_row, first_row, 0.0, start, rows.length_k)


@gluon.jit
def make_dq(
    dq_desc,
    dq_high_desc,
    dq_ptr,
    lse_ptr,
    delta_ptr,
    shape,
    scores,
    places,
    bufs,
    bars,
    variant: gl.constexpr,
    PART: gl.constexpr,
):
    """Compute dq of this warpgroup's 64 queries of the CTA's tile, over all keys that they see, and
    write it."""
    D: gl.constexpr = variant.d
    TILE_N: gl.constexpr = variant.tile_n
    SLOTS: gl.constexpr = variant.stages
    DV: gl.constexpr = variant.dv
    HIGH: gl.constexpr = variant.d_high
    dtype: gl.constexpr = bufs.q.dtype
    over_keys: gl.constexpr = sum_layout(TILE_N)
    of_rows: gl.constexpr = gl.SliceLayout(1, over_keys)
    operand: gl.constexpr = operand_layout(D)
    CAPS: gl.constexpr = variant.softcap != "none"
    PLACED: gl.constexpr = variant.alibi or variant.bias or variant.dropout
    BEHIND: gl.constexpr = 0 if HIGH > 0 else 1  # slots of k behind v: they may share a ring
    ENDS: gl.constexpr = variant.tail or variant.mask  # a tile may have keys past the end
    CLEARED: gl.constexpr = variant.packed or variant.ragged or variant.left
    rows = rows_of_cta(shape, scores, places, variant)
    within = PART * 64 + gl.arange(0, 64, of_rows)
    row = rows.first_row + within
    dq = gl.zeros([64, D], gl.float32, sum_layout(D))
    if HIGH > 0:
        dq_high = gl.zeros([64, HIGH], gl.float32, sum_layout(HIGH))
    zeros = gl.zeros([64, TILE_N], gl.float32, over_keys)
    steps = rows.end - rows.begin
    if steps > 0:
        lse = gl.load(lse_ptr + rows.row_terms + within)
        delta = gl.load(delta_ptr + rows.row_terms + within)
        slope = 0.0
        if variant.alibi:
            slope = gl.load(scores.alibi + rows.b * places.alibi_batch + rows.head) * LOG2E
        if variant.bias:
            head = _head_of_bias(rows, row, rows.first_row + PART * 64, places, variant)
            extras = Extras(
                0.0,
                0.0,
                0,
                0,
                scores.bias,
                places.bias_batch,
                places.bias_head,
                places.bias_row,
                places.bias_key,
            )
        if variant.dropout:
            plane = rows.b * (shape.num_kv_heads * shape.group_size) + rows.head
            draw = draw_of(scores.philox, places.drop_limit)
        mbarrier.wait(bars.q_full.index(PART), 0)
        slot = 0
        for step in range(0, steps):
            place = rows.end - 1 - step
            tile, number = place, step * 0 - 1
            if variant.mask and (PLACED or CLEARED):
                tile, number = entry_of_tile(rows, place, scores, TILE_N)
            first_key = tile * TILE_N
            at_v = slot % SLOTS
            at_k = (slot + BEHIND) % SLOTS
            own = PART + slot // ALWAYS_ZERO
            do = bufs.do.index(own).reshape([64, DV])
            k = bufs.k.index(at_k).reshape([TILE_N, D])
            v = bufs.v.index(at_v).reshape([TILE_N, DV])
            mbarrier.wait(bars.v_full.index(at_v), (slot // SLOTS) & 1)
            mbarrier.wait(bars.k_full.index(at_k), ((slot + BEHIND) // SLOTS) & 1)
            masked = (place < rows.full_begin) | (place >= rows.full_end)
            clear_keys(k, first_key, rows, shape, variant)
            clear_keys(v, first_key, rows, shape, variant)
            if HIGH > 0:
                k_high = bufs.k_high.index(at_k).reshape([TILE_N, HIGH])
                clear_keys(k_high, first_key, rows, shape, variant)
            s_sum = _products(bufs, own, at_k, zeros, variant)
            dp_sum = warpgroup_mma(do, v.permute((1, 0)), zeros, use_acc=False, is_async=True)
            if variant.dropout:
                first_row = rows.first_row + PART * 64
                kept = random_words(draw, plane, first_row, first_key, TILE_N, over_keys)
            if variant.bias:
                bias = load_bias(zeros, head, extras, first_key, ENDS, variant)
            s = warpgroup_mma_wait(1, deps=(s_sum,))
            minus_lse = zeros - gl.expand_dims(lse, 1)
            if CAPS:
                logits = minus_lse
            else:
                logits = gl.fma(s, zeros + scores.scale_log2, minus_lse)
            keys = first_key + gl.arange(0, TILE_N, gl.SliceLayout(0, over_keys))
            if variant.bias:
                logits = gl.fma(bias.to(gl.float32), zeros + LOG2E, logits)
            if variant.alibi:
                diagonal = key_at(row, rows.length_q, rows.length_k)
                distance = gl.expand_dims(diagonal.to(gl.float32), 1)
                distance = gl.abs(distance - gl.expand_dims(keys.to(gl.float32), 0))
                logits = gl.fma(distance, zeros - slope, logits)
            if masked:
                if variant.mask and not (PLACED or CLEARED):
                    tile, number = entry_of_tile(rows, place, scores, TILE_N)
                    first_key = tile * TILE_N
                logits = _hide_keys(
                    logits, row, PART * 64, number, first_key, rows, shape, scores, variant
                )
            if CAPS:
                ratio, factor = zeros + scores.cap_ratio, zeros + scores.cap_log2
                _p, p = capped_exp2(s, ratio, factor, logits, variant.softcap == "exact")
            else:
                p = exp2(logits)
            dp = warpgroup_mma_wait(0, deps=(dp_sum,))
            mbarrier.arrive(bars.v_empty.index(at_v), count=1)
            if variant.dropout:
                minus_delta = zeros - gl.expand_dims(delta, 1)
                scaled = gl.fma(dp, zeros + scores.keep_scale, minus_delta)
                ds = p * drop(scaled, kept, minus_delta)
            else:
                ds = p * (dp - gl.expand_dims(delta, 1))
            ds_half = gl.convert_layout(ds.to(dtype), operand, assert_trivial=True)
            dq_sum = warpgroup_mma(ds_half, k, dq, is_async=True)
            if HIGH > 0:
                ds_high = gl.convert_layout(ds.to(dtype), operand_layout(HIGH), assert_trivial=True)
                dq_high_sum = warpgroup_mma(ds_high, k_high, dq_high, is_async=True)
                dq, dq_high, ds_half, ds_high = warpgroup_mma_wait(
                    0, deps=(dq_sum, dq_high_sum, ds_half, ds_high)
                )
            else:
                dq, ds_half = warpgroup_mma_wait(0, deps=(dq_sum, ds_half))
            mbarrier.arrive(bars.k_empty.index(at_k), count=1)
            slot += BEHIND + 1
    x = (dq * scores.scale).to(dtype)
    _store_queries(x, dq_desc, dq_ptr, rows, shape, bufs.q.index(PART), variant, PART, 0)
    if HIGH > 0:
        x = (dq_high * scores.scale).to(dtype)
        out = bufs.q_high.index(PART)
        _store_queries(x, dq_high_desc, dq_ptr, rows, shape, out, variant, PART, D)
