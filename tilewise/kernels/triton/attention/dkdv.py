"""Gradients of keys and values; the rule is that of attention_bwd.

What: dv = p^T do and dk = ds^T q of one tile of keys.
Grid: one axis, key tiles x (batch x key heads), ordered by `tile_of_program`.
One program: TILE_N keys of one key head; loops over the query heads of its group and the queries
      that see the keys, TILE_M at a time. Scores stand transposed, (keys, queries).
Traffic: k, v are read and dk, dv written once; q, do and the row terms once per key tile.
Numerics: as in attention_bwd; one owner and one order for every sum.
"""

from __future__ import annotations

from typing import NamedTuple

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
    sequence,
    store_rows,
    tile_of_program,
)
from tilewise.kernels.triton.attention.walk import Others, walk
from tilewise.kernels.triton.visible import queries_of_keys, query_at, seen_keys, span_of_keys


class Keys(NamedTuple):
    """The tile of keys of one program, and for each the range of queries that see it."""

    k: object  # (TILE_N, d_pad)
    k_rest: object  # (TILE_N, rest_pad), None without a rest
    v: object  # (TILE_N, dv_pad)
    first: object
    cols: object  # (TILE_N,), clamped to the last one
    diagonal: object  # the query on whose diagonal each key lies
    query_begin: object
    query_end: object


@triton.jit
def _fold(
    sums,
    keys,
    queries,
    step,
    scores,
    draw,
    dims: tl.constexpr,
    variant: tl.constexpr,
    MASKED: tl.constexpr,
    BITS: tl.constexpr,
):
    """Add the queries of one step to the sums (dk, dk_rest, dv), and return the sums.

    It is the `fold` of `walk.walk`. MASKED: True if rows may lie past the sequence or may not see
    all keys of the tile; BITS: True if a pair must be `step.allowed` by a bit tile, too.
    """
    dk, dk_rest, dv = sums
    rows, allowed = step.rows, step.allowed
    loaded = rows < queries.end
    q = load_rows(step.a, loaded, dims.d, dims.d_pad, MASKED)
    if MASKED:
        lse_log2 = tl.load(queries.lse_log2 + rows, mask=loaded, other=float("inf"))
        delta = tl.load(queries.delta + rows, mask=loaded, other=0.0)
    else:
        lse_log2 = tl.load(queries.lse_log2 + rows)
        delta = tl.load(queries.delta + rows)
    s = tl.dot(keys.k, tl.trans(q), input_precision="ieee")
    if dims.rest > 0:
        q_rest = load_rest(queries.a, step.first, s.shape[1], queries.a_row, loaded, dims, MASKED)
        s = tl.dot(keys.k_rest, tl.trans(q_rest), s, input_precision="ieee")
    # Computed before the exponentials, which then overlap with this product.
    do = load_rows(step.b, loaded, dims.dv, dims.dv_pad, MASKED)
    dp = tl.dot(keys.v, tl.trans(do), input_precision="ieee")
    if variant.plain:
        s = tl.fma(s, scores.softmax_scale * LOG2E, -lse_log2[None, :])
    else:
        distance = rows[None, :] - keys.diagonal[:, None]
        bias = None
        if variant.bias:
            bias = load_bias(scores, rows, keys.cols, loaded, variant, True, MASKED)
        s, capped = logits_log2(s, distance, bias, scores, variant)
        s -= lse_log2[None, :]
    # Rows past the last query have lse = +inf, so p = 0; keys past the last are dropped at the end.
    if MASKED and variant.right:
        s = tl.where(rows[None, :] >= keys.query_begin[:, None], s, float("-inf"))
    if MASKED and variant.left:
        s = tl.where(rows[None, :] < keys.query_end[:, None], s, float("-inf"))
    if BITS:
        s = tl.where(allowed, s, float("-inf"))
    p = probabilities(s)
    p_kept = p
    if variant.dropout:
        keep = kept(draw, step.first, keys.first, s.shape[1], s.shape[0], True)
        p_kept = tl.where(keep, p, 0.0)
    dv = tl.dot(p_kept.to(do.dtype), do, dv, input_precision="ieee")
    if variant.dropout:
        dp = tl.where(keep, dp * draw.scale, 0.0)
    ds = p * (dp - delta[None, :])
    if variant.softcap:
        ds *= 1.0 - capped * capped
    if BITS:  # 0 * NaN, if a key that no query sees, or its value, is not finite
        ds = tl.where(allowed, ds, 0.0)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    if dims.rest > 0:
        dk_rest = tl.dot(ds.to(q.dtype), q_rest, dk_rest, input_precision="ieee")
    return dk, dk_rest, dv


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
def attention_bwd_dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_log2_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
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
    """Write dk and dv of TILE_N keys of one key head of one sequence.

    They are summed over the query heads of the group and the queries that see the keys. Keys of a
    dense batch past its seqlens_k get zeros.
    """
    D_PAD: tl.constexpr = dims.d_pad
    REST_PAD: tl.constexpr = dims.rest_pad if dims.rest > 0 else 1  # 1: compiled away
    DV_PAD: tl.constexpr = dims.dv_pad
    tile, head = tile_of_program(num_tiles, heads_per_section, False)
    num_kv_heads = num_q_heads // group_size
    b, h_k = head // num_kv_heads, head % num_kv_heads
    first_q, length_q = sequence(b, sequences.cu_q, None, seqlen_q, sequences.rows_q)
    first_k, length_k = sequence(b, sequences.cu_k, sequences.seqlens_k, seqlen_k, sequences.rows_k)
    first_col = tile * TILE_N
    last_stored = seqlen_k  # rows of a dense k past seqlens_k get a zero gradient
    if sequences.cu_k is not None:
        last_stored = length_k
    if first_col >= last_stored:
        return
    cols = first_col + tl.arange(0, TILE_N)
    diagonal = query_at(cols, length_q, length_k)
    query_begin, query_end = queries_of_keys(diagonal, window_left, window_right)
    begin, full_begin, full_end, end, _ = span_of_keys(
        first_col, length_q, length_k, window_left, window_right, TILE_N, TILE_M, variant
    )
    edges = begin, full_begin, full_end, end

    real = seen_keys(cols, length_q, length_k, window_left, variant)
    k_base = head_base(k_ptr, b, first_k, h_k, strides.k, dims.unit)
    v_base = head_base(v_ptr, b, first_k, h_k, strides.v, dims.unit)
    k_ptrs = row_pointers(k_base, first_col, TILE_N, strides.k[1], dims.d_pad, dims)
    v_ptrs = row_pointers(v_base, first_col, TILE_N, strides.v[1], dims.dv_pad, dims)
    k = load_rows(k_ptrs, real, dims.d, dims.d_pad, True)
    k_rest = load_rest(k_base, first_col, TILE_N, strides.k[1], real, dims, True)
    v = load_rows(v_ptrs, real, dims.dv, dims.dv_pad, True)
    keys = Keys(
        k, k_rest, v, first_col, tl.minimum(cols, length_k - 1), diagonal, query_begin, query_end
    )
    dk = tl.zeros([TILE_N, D_PAD], tl.float32)
    dk_rest = tl.zeros([TILE_N, REST_PAD], tl.float32)
    dv = tl.zeros([TILE_N, DV_PAD], tl.float32)
    for g in range(group_size):
        h = h_k * group_size + g
        queries = Others(
            head_base(q_ptr, b, first_q, h, strides.q, dims.unit),
            head_base(do_ptr, b, first_q, h, strides.do, dims.unit),
            strides.q[1],
            strides.do[1],
            0,
            length_q,
            head_base(lse_log2_ptr, b, first_q, h, strides.rows, 1),
            head_base(delta_ptr, b, first_q, h, strides.rows, 1),
        )
        dk, dk_rest, dv = walk(
            (dk, dk_rest, dv),
            _fold,
            keys,
            queries,
            b,
            h,
            b * num_q_heads + h,
            edges,
            softmax_scale,
            softcap,
            extras,
            dims,
            variant,
            TILE_M,
            TILE_N,
            True,
            False,
        )
    # Rows past the last key hold exp2 of nonsense: the full range does not mask them.
    dk = tl.where(real[:, None], dk * softmax_scale, 0.0)
    if variant.dropout:
        dv *= extras.keep_scale
    dv = tl.where(real[:, None], dv, 0.0)
    dk_base = head_base(dk_ptr, b, first_k, h_k, strides.dk, dims.unit)
    dv_base = head_base(dv_ptr, b, first_k, h_k, strides.dv, dims.unit)
    dk_ptrs = row_pointers(dk_base, first_col, TILE_N, strides.dk[1], dims.d_pad, dims)
    dv_ptrs = row_pointers(dv_base, first_col, TILE_N, strides.dv[1], dims.dv_pad, dims)
    store_rows(dk_ptrs, dk, cols < last_stored, dims.d, dims.d_pad)
    store_rows(dv_ptrs, dv, cols < last_stored, dims.dv, dims.dv_pad)
    if dims.rest > 0:
        dk_rest = tl.where(real[:, None], dk_rest * softmax_scale, 0.0)
        rest_ptrs = row_pointers(
            dk_base + dims.d, first_col, TILE_N, strides.dk[1], dims.rest_pad, dims
        )
        store_rows(rest_ptrs, dk_rest, cols < last_stored, dims.rest, dims.rest_pad)
