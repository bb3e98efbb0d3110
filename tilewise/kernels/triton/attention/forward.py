"""Forward pass of attention, dense and packed, in portable Triton.

What: o = softmax(s) v and lse, with s = softmax_scale * q k^T, capped, ALiBi, masked, with a sink.
Grid: one axis, query tiles x (batch x query heads), ordered by `tile_of_program`.
One program: TILE_M queries of one head; loops over the keys they see, TILE_N at a time.
Traffic: q is read and o, lse are written once, so are the largest logits of rows where a call wants
      them; k and v once per query tile (mostly from L2).
Numerics: products in the input type with float32 sums; m, l, acc float32; exponentials in base 2
with softmax_scale * log2(e) folded into one fma. Rows that see nothing give o = 0, lse = -inf.
Where the largest logit of a row is beyond FAR, float32 products of its keys are further apart than
exponentials tell, or equal, and the fma would keep no bits of their distance: there the factor is
the power of two nearest to it, with which the fma is exact.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.dropout import kept
from tilewise.kernels.triton.attention.tile import (
    FAR,
    LN2,
    LOG2E,
    head_base,
    load_bias,
    load_rest,
    load_rows,
    logits_log2,
    row_pointers,
    store_rows,
)
from tilewise.kernels.triton.attention.walk import place_of_program, walk_keys
from tilewise.kernels.triton.visible import visible_pairs


class FwdStrides(NamedTuple):
    """The (batch, row, head) strides of each tensor, in units of `HeadDims.unit` elements.

    Those of lse are in elements. The batch stride of packed tensors is 0.
    """

    q: tuple[int, int, int]
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    o: tuple[int, int, int]
    lse: tuple[int, int, int]


@triton.jit
def nearest_power_of_two(x):
    """Return the power of two p with x / p between sqrt(1/2) and sqrt(2), for x > 0."""
    bits = (x * 1.41421356).to(tl.int32, bitcast=True)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _attend(
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
    """Add the keys of one step to the sums (acc, l, m) of the online softmax, and return them.

    It is the `fold` of `walk.walk`. MASKED: True if keys may not be `step.loaded`, or be hidden
    from a query; BITS: True if a pair must be `step.allowed` by a bit tile, too.
    """
    acc, l, m = sums
    cols, loaded = step.rows, step.loaded
    k = load_rows(step.a, loaded, dims.d, dims.d_pad, MASKED)
    s = tl.dot(queries.q, tl.trans(k), input_precision="ieee")
    if dims.rest > 0:
        k_rest = load_rest(keys.a, step.first, s.shape[1], keys.a_row, loaded, dims, MASKED)
        s = tl.dot(queries.q_rest, tl.trans(k_rest), s, input_precision="ieee")
    if not variant.plain:
        distance = queries.diagonal[:, None] - cols[None, :]
        bias = None
        if variant.bias:
            bias = load_bias(scores, queries.rows, cols, loaded, variant, False, MASKED)
        s, _ = logits_log2(s, distance, bias, scores, variant)
    if MASKED:
        seen = visible_pairs(cols, queries.key_begin, queries.key_end, step.allowed, variant, BITS)
        s = tl.where(seen, s, float("-inf"))
    # A plain s stays in raw units: a positive scale commutes with max and is part of the fma.
    m_new = tl.maximum(m, tl.max(s, 1))
    shift = m_new
    if variant.plain:
        factor = scores.softmax_scale * LOG2E
        factor = tl.where(tl.abs(m_new) * factor > FAR, nearest_power_of_two(factor), factor)
        shift = m_new * factor
    if MASKED or variant.bias:  # exp2(-inf - -inf) would be NaN in a row that has seen no key yet
        shift = tl.where(m_new == float("-inf"), 0.0, shift)
    if variant.plain:
        p = tl.exp2(tl.fma(s, factor[:, None], -shift[:, None]))
        alpha = tl.exp2(tl.fma(m, factor, -shift))
    else:
        p = tl.exp2(s - shift[:, None])
        alpha = tl.exp2(m - shift)
    l = tl.fma(l, alpha, tl.sum(p, 1))
    acc = acc * alpha[:, None]
    if variant.dropout:  # after the sum: dropout does not change the denominator
        keep = kept(draw, queries.first, step.first, p.shape[0], p.shape[1], False)
        p = tl.where(keep, p, 0.0)
    v = load_rows(step.b, loaded, dims.dv, dims.dv_pad, MASKED)
    acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee")
    return acc, l, m_new


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
def attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    sinks_ptr,
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
    """Write o and lse of TILE_M queries of one head of one sequence.

    Where `extras.maxima` is given, the largest logit of each query is written there, without the
    sink. Rows of a packed batch that belong to no sequence are not written.
    """
    DV_PAD: tl.constexpr = dims.dv_pad
    at = place_of_program(
        sequences, num_tiles, heads_per_section, num_q_heads, seqlen_q, seqlen_k, variant, TILE_M
    )
    if at.first >= at.length_q:
        return
    rows = at.first + tl.arange(0, TILE_M)
    stored = rows < at.length_q
    q_base = head_base(q_ptr, at.b, at.first_q, at.h, strides.q, dims.unit)
    k_base = head_base(k_ptr, at.b, at.first_k, at.h // group_size, strides.k, dims.unit)
    v_base = head_base(v_ptr, at.b, at.first_k, at.h // group_size, strides.v, dims.unit)
    q_ptrs = row_pointers(q_base, at.first, TILE_M, strides.q[1], dims.d_pad, dims)
    q = load_rows(q_ptrs, stored, dims.d, dims.d_pad, True)
    q_rest = load_rest(q_base, at.first, TILE_M, strides.q[1], stored, dims, True)

    m = tl.full([TILE_M], float("-inf"), tl.float32)
    l = tl.zeros([TILE_M], tl.float32)
    acc = tl.zeros([TILE_M, DV_PAD], tl.float32)
    acc, l, m = walk_keys(
        (acc, l, m),
        _attend,
        q,
        q_rest,
        None,
        None,
        None,
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
        True,
    )

    if variant.plain:
        m *= softmax_scale * LOG2E
    lse_base = head_base(lse_ptr, at.b, at.first_q, at.h, strides.lse, 1)
    if extras.maxima is not None:
        maxima = head_base(extras.maxima, at.b, at.first_q, at.h, strides.lse, 1)
        tl.store(maxima + rows, m * LN2, mask=stored)
    if sinks_ptr is not None:  # the sink is a last key whose value is 0
        sink_log2 = tl.load(sinks_ptr + at.h) * LOG2E
        m_new = tl.maximum(m, sink_log2)
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        alpha = tl.exp2(m - shift)
        l = tl.fma(l, alpha, tl.exp2(sink_log2 - shift))
        acc = acc * alpha[:, None]
        m = m_new
    total = tl.where(l == 0.0, 1.0, l)
    tl.store(lse_base + rows, (m + tl.log2(total)) * LN2, mask=stored)
    o_base = head_base(o_ptr, at.b, at.first_q, at.h, strides.o, dims.unit)
    o_ptrs = row_pointers(o_base, at.first, TILE_M, strides.o[1], dims.dv_pad, dims)
    if variant.dropout:
        acc *= extras.keep_scale
    store_rows(o_ptrs, acc / total[:, None], stored, dims.dv, dims.dv_pad)
