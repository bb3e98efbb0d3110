"""Gradient of queries; the rule is that of attention_bwd.

What: dq = ds k of one tile of queries.
Grid: one axis, query tiles x (batch x query heads), ordered by `tile_of_program`.
One program: TILE_M queries of one head; loops over the keys they see, TILE_N at a time.
Traffic: q, do and the row terms are read and dq is written once; k, v once per query tile.
Numerics: as in attention_bwd; one owner and one order for every sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.dropout import kept
from tilewise.kernels.triton.attention.tile import (
    LOG2E,
    head_base,
    load_bias,
    load_rest,
    load_rows,
    logits_log2,
    probabilities,
    row_pointers,
    store_rows,
)
from tilewise.kernels.triton.attention.walk import place_of_program, walk_keys
from tilewise.kernels.triton.visible import visible_pairs


@triton.jit
def _fold(
    sums,
    queries,
    keys,
    step,
    scores,
    draw,
    dims: tl.constexpr,
    variant: tl.constexpr,
    MASKED: tl.constexpr,
    BITS: tl.constexpr,
):
    """Add the keys of one step to the sums (dq, dq_rest), and return the sums.

    It is the `fold` of `walk.walk`. MASKED: True if keys may not exist or be hidden from a query;
    BITS: True if a pair must be `step.allowed` by a bit tile, too.
    """
    dq, dq_rest = sums
    cols, loaded = step.rows, step.loaded
    k = load_rows(step.a, loaded, dims.d, dims.d_pad, MASKED)
    v = load_rows(step.b, loaded, dims.dv, dims.dv_pad, MASKED)
    s = tl.dot(queries.q, tl.trans(k), input_precision="ieee")
    if dims.rest > 0:
        k_rest = load_rest(keys.a, step.first, s.shape[1], keys.a_row, loaded, dims, MASKED)
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
        seen = visible_pairs(cols, queries.key_begin, queries.key_end, step.allowed, variant, BITS)
        s = tl.where(seen, s, float("-inf"))
    if variant.dropout:
        keep = kept(draw, queries.first, step.first, dp.shape[0], dp.shape[1], False)
        dp = tl.where(keep, dp * draw.scale, 0.0)
    ds = probabilities(s) * (dp - queries.delta[:, None])
    if variant.softcap:
        ds *= 1.0 - capped * capped
    if BITS:  # 0 * NaN, if the value of a key that other queries see is not finite
        ds = tl.where(seen, ds, 0.0)
    dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    if dims.rest > 0:
        dq_rest = tl.dot(ds.to(k.dtype), k_rest, dq_rest, input_precision="ieee")
    return dq, dq_rest


@triton.jit(
    do_not_specialize=[
        "num_tiles",
        "heads_per_section",
        "num_q_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "window_left",
        "window_right",
    ]
)
def attention_bwd_dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_log2_ptr,
    delta_ptr,
    dq_ptr,
    sequences,
    strides,
    num_tiles,
    heads_per_section,
    num_q_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    softmax_scale,
    softcap,
    extras,
    dims: tl.constexpr,
    variant: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Write dq of TILE_M queries of one head of one sequence, a sum over the keys that they see."""
    D_PAD: tl.constexpr = dims.d_pad
    REST_PAD: tl.constexpr = dims.rest_pad if dims.rest > 0 else 1  # 1: compiled away
    at = place_of_program(
        sequences, num_tiles, heads_per_section, num_q_heads, seqlen_q, seqlen_k, variant, TILE_M
    )
    if at.first >= at.length_q:
        return
    rows = at.first + tl.arange(0, TILE_M)
    stored = rows < at.length_q
    q_base = head_base(q_ptr, at.b, at.first_q, at.h, strides.q, dims.unit)
    do_base = head_base(do_ptr, at.b, at.first_q, at.h, strides.do, dims.unit)
    k_base = head_base(k_ptr, at.b, at.first_k, at.h // group_size, strides.k, dims.unit)
    v_base = head_base(v_ptr, at.b, at.first_k, at.h // group_size, strides.v, dims.unit)
    q_ptrs = row_pointers(q_base, at.first, TILE_M, strides.q[1], dims.d_pad, dims)
    do_ptrs = row_pointers(do_base, at.first, TILE_M, strides.do[1], dims.dv_pad, dims)
    q = load_rows(q_ptrs, stored, dims.d, dims.d_pad, True)
    q_rest = load_rest(q_base, at.first, TILE_M, strides.q[1], stored, dims, True)
    do = load_rows(do_ptrs, stored, dims.dv, dims.dv_pad, True)
    lse_base = head_base(lse_log2_ptr, at.b, at.first_q, at.h, strides.rows, 1)
    delta_base = head_base(delta_ptr, at.b, at.first_q, at.h, strides.rows, 1)
    lse_log2 = tl.load(lse_base + rows, mask=stored, other=float("inf"))
    delta = tl.load(delta_base + rows, mask=stored, other=0.0)
    dq = tl.zeros([TILE_M, D_PAD], tl.float32)
    dq_rest = tl.zeros([TILE_M, REST_PAD], tl.float32)
    dq, dq_rest = walk_keys(
        (dq, dq_rest),
        _fold,
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
        dims,
        variant,
        TILE_M,
        TILE_N,
        False,
    )
    dq_base = head_base(dq_ptr, at.b, at.first_q, at.h, strides.dq, dims.unit)
    dq_ptrs = row_pointers(dq_base, at.first, TILE_M, strides.dq[1], dims.d_pad, dims)
    store_rows(dq_ptrs, dq * softmax_scale, stored, dims.d, dims.d_pad)
    if dims.rest > 0:
        rest_ptrs = row_pointers(
            dq_base + dims.d, at.first, TILE_M, strides.dq[1], dims.rest_pad, dims
        )
        store_rows(rest_ptrs, dq_rest * softmax_scale, stored, dims.rest, dims.rest_pad)
