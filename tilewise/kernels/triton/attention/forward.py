"""Forward pass of attention, dense and packed, in portable Triton.

What: o = softmax(s) v and lse, with s = softmax_scale * q k^T, capped, ALiBi, masked, with a sink.
Grid: one axis, query tiles x (batch x query heads), ordered by `tile_of_program`.
One program: TILE_M queries of one head; loops over the keys they see, TILE_N at a time.
Traffic: q is read and o, lse are written once, so are the largest logits of rows where a call wants
      them; k and v once per query tile (mostly from L2).
Numerics: products in the input type with float32 sums; m, l, acc float32; exponentials in base 2
with softmax_scale * log2(e) folded into one fma. Rows that see nothing give o = 0, lse = -inf.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.dropout import draw_of_head, kept
from tilewise.kernels.triton.attention.mask import lists_of_tile, pairs_of_entry
from tilewise.kernels.triton.attention.tile import (
    LN2,
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
    row_pointers,
    row_step,
    sequence,
    slope_of_head,
    span_of_tile,
    store_rows,
    tile_of_program,
    visible,
    visible_pairs,
)


class FwdStrides(NamedTuple):
    """(batch, row, head) of each tensor, in units; of lse in elements."""

    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    o: tuple[int, int, int]
    lse: tuple[int, int, int]


class Queries(NamedTuple):
    """What the keys meet: a tile of queries, and which keys each of them sees."""

    q: object  # (TILE_M, d_pad)
    q_rest: object  # (TILE_M, rest_pad), None without a rest
    first_row: object
    rows: object  # (TILE_M,), no further than the last one
    diagonal: object
    key_begin: object
    key_end: object


@triton.jit
def _attend_tile(
    acc, l, m, queries, keys, k_ptrs, v_ptrs, first_col, cols, loaded, allowed, scores, draw,
    dims: tl.constexpr, variant: tl.constexpr, MASKED: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Fold the keys `cols` into (acc, l, m): one step of the online softmax.

    MASKED: only keys that are `loaded` exist; BITS: a pair must be `allowed` by a bit tile too.
    """
    k = load_rows(k_ptrs, loaded, dims.d, dims.d_pad, MASKED)
    s = tl.dot(queries.q, tl.trans(k), input_precision="ieee")
    if dims.rest > 0:
        k_rest = load_rest(keys.k, first_col, s.shape[1], keys.k_row, loaded, dims, MASKED)
        s = tl.dot(queries.q_rest, tl.trans(k_rest), s, input_precision="ieee")
    if not variant.plain:
        distance = queries.diagonal[:, None] - cols[None, :]
        bias = None
        if variant.bias:
            bias = load_bias(scores, queries.rows, cols, loaded, variant, False, MASKED)
        s, _ = logits_log2(s, distance, bias, scores, variant)
    if MASKED:
        seen = visible_pairs(cols, queries.key_begin, queries.key_end, allowed, variant, BITS)
        s = tl.where(seen, s, float("-inf"))
    # A plain s stays in raw units: a positive scale commutes with max and rides in the fma.
    if variant.plain:
        m_new = tl.maximum(m, tl.max(s, 1) * (scores.softmax_scale * LOG2E))
    else:
        m_new = tl.maximum(m, tl.max(s, 1))
    shift = m_new
    if MASKED or variant.bias:  # exp2(-inf - -inf) would be NaN in a row that has seen nothing yet
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    if variant.plain:
        p = tl.exp2(tl.fma(s, scores.softmax_scale * LOG2E, -shift[:, None]))
    else:
        p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    l = tl.fma(l, alpha, tl.sum(p, 1))
    acc = acc * alpha[:, None]
    if variant.dropout:  # after the sum: dropout does not change what the others are divided by
        keep = kept(draw, queries.first_row, first_col, p.shape[0], p.shape[1], False)
        p = tl.where(keep, p, 0.0)
    v = load_rows(v_ptrs, loaded, dims.dv, dims.dv_pad, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, l, m_new


@triton.jit
def _attend(
    acc, l, m, queries, keys, begin, end, scores, draw,
    dims: tl.constexpr, variant: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the keys [begin, end) into (acc, l, m): one range of the online softmax."""
    cols = begin + tl.arange(0, TILE_N)
    k_ptrs = row_pointers(keys.k, begin, TILE_N, keys.k_row, dims.d_pad, dims)
    v_ptrs = row_pointers(keys.v, begin, TILE_N, keys.v_row, dims.dv_pad, dims)
    k_step = row_step(TILE_N, keys.k_row, dims.unit)
    v_step = row_step(TILE_N, keys.v_row, dims.unit)
    for first_col in range(begin, end, TILE_N):
        loaded = visible(cols, keys.begin, keys.end, variant)
        acc, l, m = _attend_tile(
            acc, l, m, queries, keys, k_ptrs, v_ptrs, first_col, cols, loaded, None, scores, draw,
            dims, variant, MASKED, False,
        )  # fmt: skip
        k_ptrs += k_step
        v_ptrs += v_step
        cols += TILE_N
    return acc, l, m


@triton.jit
def _attend_entries(
    acc, l, m, queries, keys, extras, first, last, scores, draw,
    dims: tl.constexpr, variant: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
    BITS: tl.constexpr,
):  # fmt: skip
    """Fold the mask tiles [first, last) of a list into (acc, l, m); partial ones have BITS."""
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
        acc, l, m = _attend_tile(
            acc, l, m, queries, keys, k_ptrs, v_ptrs, begin, cols, loaded, allowed, scores, draw,
            dims, variant, MASKED, BITS,
        )  # fmt: skip
    return acc, l, m


@triton.jit(
    do_not_specialize=[
        "num_tiles", "heads_per_section", "num_q_heads", "group_size",
        "seqlen_q", "seqlen_k", "window_left", "window_right",
    ]
)  # fmt: skip
def attention_fwd_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, sinks_ptr, sequences, strides,
    num_tiles, heads_per_section, num_q_heads, group_size, seqlen_q, seqlen_k,
    window_left, window_right, softmax_scale, softcap, extras,
    dims: tl.constexpr, variant: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr,
):  # fmt: skip
    """Compute one tile of o and lse; see the module's docstring."""
    DV_PAD: tl.constexpr = dims.dv_pad
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
    k_base = head_base(k_ptr, b, first_k, h // group_size, strides.k, dims.unit)
    v_base = head_base(v_ptr, b, first_k, h // group_size, strides.v, dims.unit)
    q_ptrs = row_pointers(q_base, first_row, TILE_M, strides.q[1], dims.d_pad, dims)
    q = load_rows(q_ptrs, stored, dims.d, dims.d_pad, True)
    q_rest = load_rest(q_base, first_row, TILE_M, strides.q[1], stored, dims, True)

    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DV_PAD], tl.float32)
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
        q, q_rest, first_row, tl.minimum(rows, length_q - 1), rows + (length_k - length_q),
        key_begin, key_end,
    )  # fmt: skip
    keys = Keys(k_base, v_base, strides.k[1], strides.v[1], seen_begin, end)
    if variant.mask_q > 0:
        lists = lists_of_tile(
            extras.mask_rows, extras.mask_row_entries, b, h, extras.mask_all_row_tiles,
            extras.mask_row_tiles, first_row // variant.mask_q, begin, end, variant.mask_k, variant,
        )  # fmt: skip
        for partial in tl.static_range(2):
            acc, l, m = _attend_entries(
                acc, l, m, queries, keys, extras, lists[2 * partial], lists[2 * partial + 1],
                scores, draw, dims, variant, TILE_M, TILE_N, partial == 1,
            )  # fmt: skip
    else:
        edges = begin, full_begin, full_end, end
        for part in tl.static_range(3):  # in the middle one every query sees every key
            if part > 0 or variant.left:
                acc, l, m = _attend(
                    acc, l, m, queries, keys, edges[part], edges[part + 1], scores, draw, dims,
                    variant, TILE_N, part != 1,
                )  # fmt: skip

    lse_base = head_base(lse_ptr, b, first_q, h, strides.lse, 1)
    if extras.maxima is not None:
        maxima = head_base(extras.maxima, b, first_q, h, strides.lse, 1)
        tl.store(maxima + rows, m * LN2, mask=stored)
    if sinks_ptr is not None:  # the sink is a last key whose value is 0
        sink_log2 = tl.load(sinks_ptr + h) * LOG2E
        m_new = tl.maximum(m, sink_log2)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - shift)
        l = tl.fma(l, alpha, tl.exp2(sink_log2 - shift))
        acc = acc * alpha[:, None]
        m = m_new
    total = tl.where(l == 0.0, 1.0, l)
    tl.store(lse_base + rows, (m + tl.log2(total)) * LN2, mask=stored)
    o_base = head_base(o_ptr, b, first_q, h, strides.o, dims.unit)
    o_ptrs = row_pointers(o_base, first_row, TILE_M, strides.o[1], dims.dv_pad, dims)
    if variant.dropout:
        acc *= draw.scale
    store_rows(o_ptrs, acc / total[:, None], stored, dims.dv, dims.dv_pad)
