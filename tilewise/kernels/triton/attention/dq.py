"""Gradient of queries; the rule is that of attention_bwd.

What: dq = ds k of one tile of queries.
Grid: one axis, query tiles x (batch x query heads), ordered by `tile_of_program`.
One program: TILE_M queries of one head; loops over the keys they see, TILE_N at a time.
Traffic: q, do and the row terms are read and dq is written once; k, v once per query tile.
Numerics: as in attention_bwd; one owner and one order for every sum.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.dropout import draw_of_head, kept
from tilewise.kernels.triton.attention.mask import lists_of_tile, pairs_of_entry
from tilewise.kernels.triton.attention.tile import (
    LOG2E,
    Keys,
    Scores,
    bias_of_head,
    head_base,
    keys_of_rows,
    load_bias,
    load_rest,
    load_rows,
    logits_log2,
    row_offsets,
    row_pointers,
    row_start,
    row_step,
    sequence,
    slope_of_head,
    span_of_tile,
    store_rows,
    tile_of_program,
    visible,
    visible_pairs,
)


class Queries(NamedTuple):
    """What the keys meet: a tile of queries, and which keys each of them sees."""

    q: object  # (TILE_M, d_pad)
    q_rest: object  # (TILE_M, rest_pad), None without a rest
    do: object  # (TILE_M, dv_pad)
    lse_log2: object
    delta: object
    first_row: object
    rows: object  # (TILE_M,), no further than the last one
    diagonal: object
    key_begin: object
    key_end: object


@triton.jit
def _fold_tile(
    dq, dq_rest, queries, keys, k_ptrs, v_ptrs, first_col, cols, loaded, allowed, scores, draw,
    dims: tl.constexpr, variant: tl.constexpr, MASKED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Fold the keys `cols` into dq; MASKED and BITS are those of the forward pass."""
    k = load_rows(k_ptrs, loaded, dims.d, dims.d_pad, MASKED)
    v = load_rows(v_ptrs, loaded, dims.dv, dims.dv_pad, MASKED)
    s = tl.dot(queries.q, tl.trans(k), input_precision="ieee")
    if dims.rest > 0:
        k_rest = load_rest(keys.k, first_col, s.shape[1], keys.k_row, loaded, dims, MASKED)
        s = tl.dot(queries.q_rest, tl.trans(k_rest), s, input_precision="ieee")
    dp = tl.dot(queries.do, tl.trans(v), input_precision="ieee")
    if variant.plain:
        s = tl.fma(s, scores.softmax_scale * LOG2E, -queries.lse_log2[:, None])
    else:
        distance = queries.diagonal[:, None] - cols[None, :]
        bias = None
        if variant.bias:
            bias = load_bias(scores, queries.rows, cols, loaded, variant, False, MASKED)
        s, capped = logits_log2(s, distance, bias, scores, variant)
        s -= queries.lse_log2[:, None]
    if MASKED:
        seen = visible_pairs(cols, queries.key_begin, queries.key_end, allowed, variant, BITS)
        s = tl.where(seen, s, float("-inf"))
    if variant.dropout:
        keep = kept(draw, queries.first_row, first_col, dp.shape[0], dp.shape[1], False)
        dp = tl.where(keep, dp * draw.scale, 0.0)
    ds = tl.exp2(s) * (dp - queries.delta[:, None])
    if variant.softcap:
        ds *= 1.0 - capped * capped
    if BITS:  # 0 * NaN, where the value of a key that others see is not a number
        ds = tl.where(seen, ds, 0.0)
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    if dims.rest > 0:
        dq_rest = tl.dot(ds.to(k.dtype), k_rest, dq_rest, input_precision="ieee")
    return dq, dq_rest


@triton.jit
def _fold_keys(
    dq, dq_rest, queries, keys, begin, end, scores, draw,
    dims: tl.constexpr, variant: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys [begin, end) into dq."""
    cols = begin + tl.arange(0, TILE_N)
    k_start = row_start(keys.k, begin, keys.k_row, dims.unit)
    v_start = row_start(keys.v, begin, keys.v_row, dims.unit)
    k_offsets = row_offsets(TILE_N, keys.k_row, dims.d_pad, dims)
    v_offsets = row_offsets(TILE_N, keys.v_row, dims.dv_pad, dims)
    k_step = row_step(TILE_N, keys.k_row, dims.unit)
    v_step = row_step(TILE_N, keys.v_row, dims.unit)
    for first_col in range(begin, end, TILE_N):
        loaded = visible(cols, keys.begin, keys.end, variant)
        dq, dq_rest = _fold_tile(
            dq, dq_rest, queries, keys, k_start + k_offsets, v_start + v_offsets, first_col, cols,
            loaded, None, scores, draw, dims, variant, MASKED, False,
        )  # fmt: skip
        k_start += k_step
        v_start += v_step
        cols += TILE_N
    return dq, dq_rest


@triton.jit
def _fold_entries(
    dq, dq_rest, queries, keys, extras, first, last, scores, draw,
    dims: tl.constexpr, variant: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Fold the mask tiles [first, last) of a list into dq; partial ones have BITS."""
    STEPS: tl.constexpr = variant.mask_k // TILE_N
    MASKED: tl.constexpr = BITS or variant.ruled
    entries = extras.mask_row_entries + first.to(tl.int64) * 2
    for step in range(0, (last - first) * STEPS):
        within = step % STEPS * TILE_N
        begin = tl.load(entries + step // STEPS * 2) * variant.mask_k + within
        cols = begin + tl.arange(0, TILE_N)
        loaded = visible(cols, keys.begin, keys.end, variant)
        allowed = None
        if BITS:
            loaded, allowed = pairs_of_entry(
                extras, entries + step // STEPS * 2, queries.first_row, within, loaded, variant,
                TILE_M, TILE_N,
            )  # fmt: skip
        k_ptrs = row_pointers(keys.k, begin, TILE_N, keys.k_row, dims.d_pad, dims)
        v_ptrs = row_pointers(keys.v, begin, TILE_N, keys.v_row, dims.dv_pad, dims)
        dq, dq_rest = _fold_tile(
            dq, dq_rest, queries, keys, k_ptrs, v_ptrs, begin, cols, loaded, allowed, scores, draw,
            dims, variant, MASKED, BITS,
        )  # fmt: skip
    return dq, dq_rest


@triton.jit(
    do_not_specialize=[
        "num_tiles", "heads_per_section", "num_q_heads", "group_size",
        "seqlen_q", "seqlen_k", "window_left", "window_right",
    ]
)  # fmt: skip
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dq_ptr,
    sequences, strides, num_tiles, heads_per_section, num_q_heads, group_size,
    seqlen_q, seqlen_k, window_left, window_right, softmax_scale, softcap, extras,
    dims: tl.constexpr, variant: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dq; see the module's docstring."""
    D_PAD: tl.constexpr = dims.d_pad
    REST_PAD: tl.constexpr = dims.rest_pad if dims.rest > 0 else 1  # 1: compiled away
    tile, head = tile_of_program(num_tiles, heads_per_section, variant.right)
    b, h = head // num_q_heads, head % num_q_heads
    first_q, length_q = sequence(b, sequences.cu_q, None, seqlen_q)
    first_k, length_k = sequence(b, sequences.cu_k, sequences.seqlens_k, seqlen_k)
    first_row = tile * TILE_M
    if first_row >= length_q:
        return
    rows = first_row + tl.arange(0, TILE_M)
    stored = rows < length_q
    q_base = head_base(q_ptr, b, first_q, h, strides.q, dims.unit)
    do_base = head_base(do_ptr, b, first_q, h, strides.do, dims.unit)
    k_base = head_base(k_ptr, b, first_k, h // group_size, strides.k, dims.unit)
    v_base = head_base(v_ptr, b, first_k, h // group_size, strides.v, dims.unit)
    q_ptrs = row_pointers(q_base, first_row, TILE_M, strides.q[1], dims.d_pad, dims)
    do_ptrs = row_pointers(do_base, first_row, TILE_M, strides.do[1], dims.dv_pad, dims)
    q = load_rows(q_ptrs, stored, dims.d, dims.d_pad, True)
    q_rest = load_rest(q_base, first_row, TILE_M, strides.q[1], stored, dims, True)
    do = load_rows(do_ptrs, stored, dims.dv, dims.dv_pad, True)
    lse_base = head_base(lse_log2_ptr, b, first_q, h, strides.rows, 1)
    delta_base = head_base(delta_ptr, b, first_q, h, strides.rows, 1)
    lse_log2 = tl.load(lse_base + rows, mask=stored, other=float("inf"))
    delta = tl.load(delta_base + rows, mask=stored, other=0.0)
    scores = Scores(
        softmax_scale, softcap, slope_of_head(extras, b, h, variant),
        bias_of_head(extras, b, h, variant), extras.bias_row, extras.bias_key,
    )  # fmt: skip
    draw = draw_of_head(extras, head, variant)

    begin, full_begin, full_end, end, seen_begin = span_of_tile(
        first_row, TILE_M, length_q, length_k, length_k - length_q, window_left, window_right,
        TILE_N, variant.left, variant.right,
    )  # fmt: skip
    key_begin, key_end = keys_of_rows(rows, length_q, length_k, window_left, window_right, variant)
    queries = Queries(
        q, q_rest, do, lse_log2, delta, first_row, tl.minimum(rows, length_q - 1),
        rows + (length_k - length_q), key_begin, key_end,
    )  # fmt: skip
    keys = Keys(k_base, v_base, strides.k[1], strides.v[1], seen_begin, end)
    dq = tl.zeros([TILE_M, D_PAD], tl.float32)
    dq_rest = tl.zeros([TILE_M, REST_PAD], tl.float32)
    if variant.mask_q > 0:
        lists = lists_of_tile(
            extras.mask_rows, extras.mask_row_entries, b, h, extras.mask_all_row_tiles,
            extras.mask_row_tiles, first_row // variant.mask_q, begin, end, variant.mask_k, variant,
        )  # fmt: skip
        for partial in tl.static_range(2):
            dq, dq_rest = _fold_entries(
                dq, dq_rest, queries, keys, extras, lists[2 * partial], lists[2 * partial + 1],
                scores, draw, dims, variant, TILE_M, TILE_N, partial == 1,
            )  # fmt: skip
    else:
        edges = begin, full_begin, full_end, end
        for part in tl.static_range(3):  # in the middle one every query sees every key
            if part > 0 or variant.left:
                dq, dq_rest = _fold_keys(
                    dq, dq_rest, queries, keys, edges[part], edges[part + 1], scores, draw, dims,
                    variant, TILE_N, part != 1,
                )  # fmt: skip
    dq_base = head_base(dq_ptr, b, first_q, h, strides.dq, dims.unit)
    dq_ptrs = row_pointers(dq_base, first_row, TILE_M, strides.dq[1], dims.d_pad, dims)
    store_rows(dq_ptrs, dq * softmax_scale, stored, dims.d, dims.d_pad)
    if dims.rest > 0:
        rest_ptrs = row_pointers(
            dq_base + dims.d, first_row, TILE_M, strides.dq[1], dims.rest_pad, dims
        )
        store_rows(rest_ptrs, dq_rest * softmax_scale, stored, dims.rest, dims.rest_pad)
