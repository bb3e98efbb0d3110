"""Gradient of an additive bias; the rule is that of attention_bwd.

What: an element of dbias is the sum of p * (dp - delta) over all pairs (query, key) that share it.
Grid: one axis, parts x (batch x heads of the bias) x tiles of its rows and keys.
One program: a tile of the bias; loops over a part of the sequences and heads that share it, and
      over all rows or all keys where they share it. Products run over the channels in chunks, so
      that one shape of tile serves every head dim.
Traffic: q, do, k, v once for each tile that looks at them; O(bias) is written. A bias of few tiles
      is cut into parts that fill the device, and torch adds the parts up.
Numerics: as in attention_bwd; one owner and one order for every sum.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.dropout import draw_of_head, kept
from tilewise.kernels.triton.attention.tile import (
    Scores,
    bias_of_head,
    head_base,
    load_bias,
    logits_log2,
    probabilities,
    sequence,
    slope_of_head,
)
from tilewise.kernels.triton.visible import (
    key_at,
    keys_of_rows,
    kind_of_tile,
    span_of_rows,
    visible,
    visible_bits,
)


@triton.jit(
    do_not_specialize=[
        "num_rows",
        "num_keys",
        "num_parts",
        "bias_batch",
        "bias_heads",
        "batch",
        "num_q_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "window_left",
        "window_right",
    ]
)
def attention_bwd_bias_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_log2_ptr,
    delta_ptr,
    dbias_ptr,
    sequences,
    strides,
    num_rows,
    num_keys,
    num_parts,
    bias_batch,
    bias_heads,
    batch,
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
    SHARED_ROWS: tl.constexpr,
    SHARED_KEYS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write one tile of one part of dbias, contiguous (parts, Bb, Hb, num_rows, num_keys).

    Bb and Hb are the batch and heads of the bias. A part is the sum over each num_parts-th of the
    (sequence, head) pairs that share the tile; SHARED_ROWS and SHARED_KEYS are True if all queries,
    or all keys, share it, which are then summed, too.
    """
    key_tiles, row_tiles = tl.cdiv(num_keys, TILE_N), tl.cdiv(num_rows, TILE_M)
    index = tl.program_id(0)
    first_col, index = index % key_tiles * TILE_N, index // key_tiles
    first_row, index = index % row_tiles * TILE_M, index // row_tiles
    planes = bias_batch * bias_heads
    plane, part = index % planes, index // planes
    # The (sequence, head) pairs that share this plane are numbered; a part takes each num_parts-th.
    pair_batch, pair_heads = batch // bias_batch, num_q_heads // bias_heads
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    q_step, k_step = strides.q[1] * dims.unit, strides.k[1] * dims.unit
    do_step, v_step = strides.do[1] * dims.unit, strides.v[1] * dims.unit
    for pair in range(part, pair_batch * pair_heads, num_parts):
        b = plane // bias_heads * pair_batch + pair // pair_heads
        h = plane % bias_heads * pair_heads + pair % pair_heads
        first_q, length_q = sequence(b, sequences.cu_q, None, seqlen_q, sequences.rows_q)
        first_k, length_k = sequence(
            b, sequences.cu_k, sequences.seqlens_k, seqlen_k, sequences.rows_k
        )
        q_base = head_base(q_ptr, b, first_q, h, strides.q, dims.unit)
        do_base = head_base(do_ptr, b, first_q, h, strides.do, dims.unit)
        k_base = head_base(k_ptr, b, first_k, h // group_size, strides.k, dims.unit)
        v_base = head_base(v_ptr, b, first_k, h // group_size, strides.v, dims.unit)
        lse_base = head_base(lse_log2_ptr, b, first_q, h, strides.rows, 1)
        delta_base = head_base(delta_ptr, b, first_q, h, strides.rows, 1)
        scores = Scores(
            softmax_scale,
            softcap,
            slope_of_head(extras, b, h, variant),
            bias_of_head(extras, b, h, variant),
            extras.bias_row,
            extras.bias_key,
        )
        draw = draw_of_head(extras, b * num_q_heads + h, variant)
        last_row, last_col = length_q, length_k
        if not SHARED_ROWS:
            last_row = tl.minimum(first_row + TILE_M, length_q)
        if not SHARED_KEYS:
            last_col = tl.minimum(first_col + TILE_N, length_k)
        for row in range(first_row, last_row, TILE_M):
            rows = row + tl.arange(0, TILE_M)
            lse_log2 = tl.load(lse_base + rows, mask=rows < length_q, other=float("inf"))
            delta = tl.load(delta_base + rows, mask=rows < length_q, other=0.0)
            key_begin, key_end = keys_of_rows(
                rows, length_q, length_k, window_left, window_right, variant
            )
            begin, _, _, end, _ = span_of_rows(
                row, length_q, length_k, window_left, window_right, TILE_M, TILE_N, variant
            )
            for col in range(tl.maximum(begin, first_col), tl.minimum(end, last_col), TILE_N):
                cols = col + tl.arange(0, TILE_N)
                kind = kind_of_tile(extras, b, h, row, col, variant)
                if kind >= -1:
                    qk = _products(
                        q_base,
                        k_base,
                        q_step,
                        k_step,
                        rows,
                        cols,
                        length_q,
                        length_k,
                        dims.d + dims.rest,
                        CHUNK,
                    )
                    dp = _products(
                        do_base,
                        v_base,
                        do_step,
                        v_step,
                        rows,
                        cols,
                        length_q,
                        length_k,
                        dims.dv,
                        CHUNK,
                    )
                    s, seen = _score_pairs(
                        qk,
                        row,
                        col,
                        length_q,
                        length_k,
                        key_begin,
                        key_end,
                        kind,
                        scores,
                        extras,
                        variant,
                    )
                    p = probabilities(s - lse_log2[:, None])
                    if variant.dropout:
                        keep = kept(draw, row, col, TILE_M, TILE_N, False)
                        dp = tl.where(keep, dp * draw.scale, 0.0)
                    # Pairs that do not see each other add nothing to the sum, not even NaN.
                    total += tl.where(seen, p * (dp - delta[:, None]), 0.0)
    offset = (part.to(tl.int64) * planes + plane) * num_rows * num_keys
    rows, cols = first_row + tl.arange(0, TILE_M), first_col + tl.arange(0, TILE_N)
    if SHARED_ROWS:
        total = tl.expand_dims(tl.sum(total, 0), 0)
        rows = tl.arange(0, 1)
    if SHARED_KEYS:
        total = tl.expand_dims(tl.sum(total, 1), 1)
        cols = tl.arange(0, 1)
    at = dbias_ptr + offset + rows.to(tl.int64)[:, None] * num_keys + cols[None, :]
    stored = (rows < num_rows)[:, None] & (cols < num_keys)[None, :]
    tl.store(at, total.to(dbias_ptr.dtype.element_ty), mask=stored)


@triton.jit
def _load_chunk(base, row_step, rows, length, first, width, CHUNK: tl.constexpr):
    """Return channels first ... first + CHUNK - 1 of rows, (rows, CHUNK).

    Zero stands for rows from `length` on and for channels from `width` on.
    """
    channels = first + tl.arange(0, CHUNK)
    ptrs = base + (rows.to(tl.int64) * row_step)[:, None] + channels[None, :]
    inside = (rows < length)[:, None] & (channels < width)[None, :]
    return tl.load(ptrs, mask=inside, other=0.0)


@triton.jit
def _products(
    a_base, b_base, a_step, b_step, rows_a, rows_b, length_a, length_b, width, CHUNK: tl.constexpr
):
    """Return a b^T (rows_a, rows_b) in float32, summed over chunks of channels.

    Args:
        a_base, b_base: the addresses of row 0.
        a_step, b_step: the elements from row to row.
        rows_a, rows_b: the rows to multiply.
        length_a, length_b: the ends from which rows count as zero.
        width: the number of channels.
    """
    product = tl.zeros([rows_a.shape[0], rows_b.shape[0]], tl.float32)
    for first in range(0, width, CHUNK):
        a = _load_chunk(a_base, a_step, rows_a, length_a, first, width, CHUNK)
        b = _load_chunk(b_base, b_step, rows_b, length_b, first, width, CHUNK)
        product = tl.dot(a, tl.trans(b), product, input_precision="ieee")
    return product


@triton.jit
def _score_pairs(
    qk,
    row,
    col,
    length_q,
    length_k,
    key_begin,
    key_end,
    kind,
    scores,
    extras,
    variant: tl.constexpr,
):
    """Return a tile's logits in base 2, and a bool tile that is True where a query sees a key.

    qk: the products q . k, (queries, keys); row, col: the first query and key; key_begin, key_end:
    the range of keys of each query, see `visible.keys_of_rows`; kind: the kind of the mask tile,
    see `visible.kind_of_tile`.
    """
    rows = row + tl.arange(0, qk.shape[0])
    cols = col + tl.arange(0, qk.shape[1])
    distance = key_at(rows, length_q, length_k)[:, None] - cols[None, :]
    bias = None
    if variant.bias:
        last = tl.minimum(rows, length_q - 1)
        bias = load_bias(scores, last, cols, cols < length_k, variant, False, True)
    s, _ = logits_log2(qk, distance, bias, scores, variant)
    seen = visible(cols[None, :], key_begin[:, None], key_end[:, None], variant)
    seen = seen & (rows < length_q)[:, None]
    if variant.mask_q > 0:
        allowed = visible_bits(
            extras.mask_bits,
            tl.maximum(kind, 0),
            row % variant.mask_q,
            col % variant.mask_k,
            variant,
            qk.shape[0],
            qk.shape[1],
            False,
        )
        seen = seen & (allowed | (kind < 0))
    return s, seen
