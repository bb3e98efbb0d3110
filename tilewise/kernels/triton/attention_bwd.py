"""Backward pass of attention, dense and packed, in portable Triton: deterministic, no atomics.

What: with p = exp(s - lse), dp = do v^T, ds = p * (dp - delta) * ds/d(q.k):
      dv = p^T do, dk = ds^T q, dq = ds k. delta = rowsum(do * o) - dlse.
Grid: three kernels, each on one axis. Row terms: query tiles x batch x query heads. dk, dv: key
      tiles x (batch x key heads). dq: query tiles x (batch x query heads).
One program: of dk, dv: TILE_N keys of one key head, looping over the query heads of its group and
      the queries that see the keys; of dq: TILE_M queries of one head, looping over their keys.
Traffic: dk, dv reads k, v once and q, do once per key tile; dq reads q, do once and k, v once per
      query tile. Scores are computed twice, which costs 7/5 of the products of an atomic dq and
      buys bitwise reproducible gradients.
Numerics: base 2, p recomputed from lse; sums float32; p and ds rounded to the input type for the
      second products. Rows that see nothing carry lse = +inf here, so that p = 0 without a branch.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton._tile import (
    LOG2E,
    head_base,
    keys_of_rows,
    load_rows,
    logits_log2,
    row_pointers,
    row_step,
    sequence,
    span_of_tile,
    store_rows,
    tile_of_program,
    visible,
)


class BwdStrides(NamedTuple):
    """(batch, row, head) of each tensor, in units; `rows` of lse_log2 and delta in elements."""

    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    do: tuple[int, int, int]
    dq: tuple[int, int, int]
    dk: tuple[int, int, int]
    dv: tuple[int, int, int]
    rows: tuple[int, int, int]


@triton.jit(do_not_specialize=["num_rows", "num_tiles", "num_q_heads"])
def attention_bwd_rows_kernel(
    o_ptr, do_ptr, lse_ptr, dlse_ptr, lse_log2_ptr, delta_ptr, o_strides, do_strides, row_strides,
    num_rows, num_tiles, num_q_heads, dims: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """Compute delta and the base-2 lse of TILE_M rows of one head, +inf where lse is -inf."""
    pid = tl.program_id(0)
    head, tile = pid // num_tiles, pid % num_tiles
    b, h = head // num_q_heads, head % num_q_heads
    rows = tile * TILE_M + tl.arange(0, TILE_M)
    stored = rows < num_rows
    o_base = head_base(o_ptr, b, b * 0, h, o_strides, dims.unit)
    do_base = head_base(do_ptr, b, b * 0, h, do_strides, dims.unit)
    o_ptrs = row_pointers(o_base, tile * TILE_M, TILE_M, o_strides, dims.dv_pad, dims)
    do_ptrs = row_pointers(do_base, tile * TILE_M, TILE_M, do_strides, dims.dv_pad, dims)
    o = load_rows(o_ptrs, stored, dims.dv, dims.dv_pad, True).to(tl.float32)
    do = load_rows(do_ptrs, stored, dims.dv, dims.dv_pad, True).to(tl.float32)
    delta = tl.sum(o * do, 1)
    offsets = head_base(0, b, b * 0, h, row_strides, 1) + rows
    lse = tl.load(lse_ptr + offsets, mask=stored, other=0.0)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + offsets, mask=stored, other=0.0)
    tl.store(lse_log2_ptr + offsets, lse * LOG2E, mask=stored)
    tl.store(delta_ptr + offsets, delta, mask=stored)


@triton.jit
def _fold_queries(
    dk, dv, k, v, q_base, do_base, lse_base, delta_base, q_strides, do_strides,
    begin, end, length_q, diagonal, query_begin, query_end, softmax_scale, softcap, slope,
    dims: tl.constexpr, variant: tl.constexpr, TILE_M: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the queries [begin, end) into dk and dv; scores stand transposed, (keys, queries)."""
    rows = begin + tl.arange(0, TILE_M)
    q_ptrs = row_pointers(q_base, begin, TILE_M, q_strides, dims.d_pad, dims)
    do_ptrs = row_pointers(do_base, begin, TILE_M, do_strides, dims.dv_pad, dims)
    q_step = row_step(TILE_M, q_strides, dims.unit)
    do_step = row_step(TILE_M, do_strides, dims.unit)
    for _ in range(begin, end, TILE_M):
        loaded = rows < length_q
        q = load_rows(q_ptrs, loaded, dims.d, dims.d_pad, MASKED)
        if MASKED:
            lse_log2 = tl.load(lse_base + rows, mask=loaded, other=float("inf"))
            delta = tl.load(delta_base + rows, mask=loaded, other=0.0)
        else:
            lse_log2 = tl.load(lse_base + rows)
            delta = tl.load(delta_base + rows)
        s = tl.dot(k, tl.trans(q), input_precision="ieee")
        if variant.plain:
            s = tl.fma(s, softmax_scale * LOG2E, -lse_log2[None, :])
        else:
            distance = rows[None, :] - diagonal[:, None]
            s, capped = logits_log2(s, distance, softmax_scale, softcap, slope, variant)
            s -= lse_log2[None, :]
        # Rows past the last query have lse = +inf, so p = 0; keys past the last are dropped below.
        if MASKED and variant.right:
            s = tl.where(rows[None, :] >= query_begin[:, None], s, float("-inf"))
        if MASKED and variant.left:
            s = tl.where(rows[None, :] < query_end[:, None], s, float("-inf"))
        p = tl.exp2(s)
        do = load_rows(do_ptrs, loaded, dims.dv, dims.dv_pad, MASKED)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        if variant.softcap:
            ds *= 1.0 - capped * capped
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
        q_ptrs += q_step
        do_ptrs += do_step
        rows += TILE_M
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "num_tiles", "heads_per_section", "num_q_heads", "group_size",
        "seqlen_q", "seqlen_k", "window_left", "window_right",
    ]
)  # fmt: skip
def attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dk_ptr, dv_ptr, alibi_ptr,
    sequences, strides, num_tiles, heads_per_section, num_q_heads, group_size,
    seqlen_q, seqlen_k, window_left, window_right, softmax_scale, softcap,
    dims: tl.constexpr, variant: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dk and dv; see the module's docstring."""
    D_PAD: tl.constexpr = dims.d_pad
    DV_PAD: tl.constexpr = dims.dv_pad
    tile, head = tile_of_program(num_tiles, heads_per_section, False)
    num_kv_heads = num_q_heads // group_size
    b, h_k = head // num_kv_heads, head % num_kv_heads
    first_q, length_q = sequence(b, sequences.cu_q, None, seqlen_q)
    first_k, length_k = sequence(b, sequences.cu_k, sequences.seqlens_k, seqlen_k)
    first_col = tile * TILE_N
    last_stored = seqlen_k  # rows of a dense k past seqlens_k get a zero gradient
    if sequences.cu_k is not None:
        last_stored = length_k
    if first_col >= last_stored:
        return
    cols = first_col + tl.arange(0, TILE_N)
    diagonal = cols - (length_k - length_q)  # the query whose diagonal key this is
    query_begin, query_end = diagonal - window_right, diagonal + window_left + 1
    limit = tl.where(first_col < length_k, length_q, 0)
    begin, full_begin, full_end, end, _ = span_of_tile(
        first_col, TILE_N, length_k, limit, length_q - length_k, window_right, window_left,
        TILE_M, variant.right, variant.left,
    )  # fmt: skip

    real = cols < length_k
    if variant.left:  # keys left of the first query's window are nobody's
        real = real & (cols >= length_k - length_q - window_left)
    k_base = head_base(k_ptr, b, first_k, h_k, strides.k, dims.unit)
    v_base = head_base(v_ptr, b, first_k, h_k, strides.v, dims.unit)
    k_ptrs = row_pointers(k_base, first_col, TILE_N, strides.k, dims.d_pad, dims)
    v_ptrs = row_pointers(v_base, first_col, TILE_N, strides.v, dims.dv_pad, dims)
    k = load_rows(k_ptrs, real, dims.d, dims.d_pad, True)
    v = load_rows(v_ptrs, real, dims.dv, dims.dv_pad, True)
    dk = tl.zeros([TILE_N, D_PAD], tl.float32)
    dv = tl.zeros([TILE_N, DV_PAD], tl.float32)
    for g in range(group_size):
        h = h_k * group_size + g
        q_base = head_base(q_ptr, b, first_q, h, strides.q, dims.unit)
        do_base = head_base(do_ptr, b, first_q, h, strides.do, dims.unit)
        lse_base = head_base(lse_log2_ptr, b, first_q, h, strides.rows, 1)
        delta_base = head_base(delta_ptr, b, first_q, h, strides.rows, 1)
        slope = 0.0
        if variant.alibi:
            slope = tl.load(alibi_ptr + h)
        if variant.right:
            dk, dv = _fold_queries(
                dk, dv, k, v, q_base, do_base, lse_base, delta_base, strides.q, strides.do,
                begin, full_begin, length_q, diagonal, query_begin, query_end,
                softmax_scale, softcap, slope,
                dims, variant, TILE_M, True,
            )  # fmt: skip
        dk, dv = _fold_queries(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, strides.q, strides.do,
            full_begin, full_end, length_q, diagonal, query_begin, query_end,
            softmax_scale, softcap, slope,
            dims, variant, TILE_M, False,
        )  # fmt: skip
        dk, dv = _fold_queries(
            dk, dv, k, v, q_base, do_base, lse_base, delta_base, strides.q, strides.do,
            full_end, end, length_q, diagonal, query_begin, query_end,
            softmax_scale, softcap, slope,
            dims, variant, TILE_M, True,
        )  # fmt: skip
    # Rows past the last key hold exp2 of nonsense: the full range does not mask them.
    dk = tl.where(real[:, None], dk * softmax_scale, 0.0)
    dv = tl.where(real[:, None], dv, 0.0)
    dk_base = head_base(dk_ptr, b, first_k, h_k, strides.dk, dims.unit)
    dv_base = head_base(dv_ptr, b, first_k, h_k, strides.dv, dims.unit)
    dk_ptrs = row_pointers(dk_base, first_col, TILE_N, strides.dk, dims.d_pad, dims)
    dv_ptrs = row_pointers(dv_base, first_col, TILE_N, strides.dv, dims.dv_pad, dims)
    store_rows(dk_ptrs, dk, cols < last_stored, dims.d, dims.d_pad)
    store_rows(dv_ptrs, dv, cols < last_stored, dims.dv, dims.dv_pad)


@triton.jit
def _fold_keys(
    dq, q, do, lse_log2, delta, k_base, v_base, k_strides, v_strides,
    begin, end, seen_begin, seen_end, diagonal, key_begin, key_end,
    softmax_scale, softcap, slope,
    dims: tl.constexpr, variant: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys [begin, end) into dq."""
    cols = begin + tl.arange(0, TILE_N)
    k_ptrs = row_pointers(k_base, begin, TILE_N, k_strides, dims.d_pad, dims)
    v_ptrs = row_pointers(v_base, begin, TILE_N, v_strides, dims.dv_pad, dims)
    k_step = row_step(TILE_N, k_strides, dims.unit)
    v_step = row_step(TILE_N, v_strides, dims.unit)
    for _ in range(begin, end, TILE_N):
        loaded = visible(cols, seen_begin, seen_end, variant)
        k = load_rows(k_ptrs, loaded, dims.d, dims.d_pad, MASKED)
        v = load_rows(v_ptrs, loaded, dims.dv, dims.dv_pad, MASKED)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        if variant.plain:
            s = tl.fma(s, softmax_scale * LOG2E, -lse_log2[:, None])
        else:
            distance = diagonal[:, None] - cols[None, :]
            s, capped = logits_log2(s, distance, softmax_scale, softcap, slope, variant)
            s -= lse_log2[:, None]
        if MASKED:
            seen = visible(cols[None, :], key_begin[:, None], key_end[:, None], variant)
            s = tl.where(seen, s, float("-inf"))
        ds = tl.exp2(s) * (dp - delta[:, None])
        if variant.softcap:
            ds *= 1.0 - capped * capped
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        k_ptrs += k_step
        v_ptrs += v_step
        cols += TILE_N
    return dq


@triton.jit(
    do_not_specialize=[
        "num_tiles", "heads_per_section", "num_q_heads", "group_size",
        "seqlen_q", "seqlen_k", "window_left", "window_right",
    ]
)  # fmt: skip
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dq_ptr, alibi_ptr,
    sequences, strides, num_tiles, heads_per_section, num_q_heads, group_size,
    seqlen_q, seqlen_k, window_left, window_right, softmax_scale, softcap,
    dims: tl.constexpr, variant: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of dq; see the module's docstring."""
    D_PAD: tl.constexpr = dims.d_pad
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
    q_ptrs = row_pointers(q_base, first_row, TILE_M, strides.q, dims.d_pad, dims)
    do_ptrs = row_pointers(do_base, first_row, TILE_M, strides.do, dims.dv_pad, dims)
    q = load_rows(q_ptrs, stored, dims.d, dims.d_pad, True)
    do = load_rows(do_ptrs, stored, dims.dv, dims.dv_pad, True)
    lse_base = head_base(lse_log2_ptr, b, first_q, h, strides.rows, 1)
    delta_base = head_base(delta_ptr, b, first_q, h, strides.rows, 1)
    lse_log2 = tl.load(lse_base + rows, mask=stored, other=float("inf"))
    delta = tl.load(delta_base + rows, mask=stored, other=0.0)
    slope = 0.0
    if variant.alibi:
        slope = tl.load(alibi_ptr + h)

    diagonal = rows + (length_k - length_q)
    begin, full_begin, full_end, end, seen_begin = span_of_tile(
        first_row, TILE_M, length_q, length_k, length_k - length_q, window_left, window_right,
        TILE_N, variant.left, variant.right,
    )  # fmt: skip
    key_begin, key_end = keys_of_rows(rows, length_q, length_k, window_left, window_right, variant)
    dq = tl.zeros([TILE_M, D_PAD], tl.float32)
    if variant.left:
        dq = _fold_keys(
            dq, q, do, lse_log2, delta, k_base, v_base, strides.k, strides.v,
            begin, full_begin, seen_begin, end, diagonal, key_begin, key_end,
            softmax_scale, softcap, slope, dims, variant, TILE_N, True,
        )  # fmt: skip
    dq = _fold_keys(
        dq, q, do, lse_log2, delta, k_base, v_base, strides.k, strides.v,
        full_begin, full_end, seen_begin, end, diagonal, key_begin, key_end,
        softmax_scale, softcap, slope, dims, variant, TILE_N, False,
    )  # fmt: skip
    dq = _fold_keys(
        dq, q, do, lse_log2, delta, k_base, v_base, strides.k, strides.v,
        full_end, end, seen_begin, end, diagonal, key_begin, key_end,
        softmax_scale, softcap, slope, dims, variant, TILE_N, True,
    )  # fmt: skip
    dq_base = head_base(dq_ptr, b, first_q, h, strides.dq, dims.unit)
    dq_ptrs = row_pointers(dq_base, first_row, TILE_M, strides.dq, dims.d_pad, dims)
    store_rows(dq_ptrs, dq * softmax_scale, stored, dims.d, dims.d_pad)
