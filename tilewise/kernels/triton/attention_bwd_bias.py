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

from tilewise.kernels.triton._dropout import Draw, kept, key_and_offset
from tilewise.kernels.triton._mask import entries_between, entries_of_tile, visible_bits
from tilewise.kernels.triton._tile import (
    Scores,
    bias_start,
    head_base,
    keys_of_rows,
    load_bias,
    logits_log2,
    sequence,
    slope_start,
    span_of_tile,
    visible,
)


@triton.jit
def _product(
    a_base, b_base, a_strides, b_strides, rows_a, rows_b, length_a, length_b,
    WIDTH: tl.constexpr, CHUNK: tl.constexpr, unit: tl.constexpr,
):  # fmt: skip
    """Return the products of two tiles of rows, summed over WIDTH channels."""
    channels = tl.arange(0, CHUNK)
    a_ptrs = a_base + (rows_a.to(tl.int64) * a_strides[1] * unit)[:, None] + channels[None, :]
    b_ptrs = b_base + (rows_b.to(tl.int64) * b_strides[1] * unit)[:, None] + channels[None, :]
    product = tl.zeros([rows_a.shape[0], rows_b.shape[0]], tl.float32)
    for start in range(0, WIDTH, CHUNK):
        inside = channels[None, :] < WIDTH - start
        a = tl.load(a_ptrs, mask=(rows_a < length_a)[:, None] & inside, other=0.0)
        b = tl.load(b_ptrs, mask=(rows_b < length_b)[:, None] & inside, other=0.0)
        product = tl.dot(a, tl.trans(b), product, input_precision="ieee")
        a_ptrs += CHUNK
        b_ptrs += CHUNK
    return product


@triton.jit
def _kind_of_tile(extras, b, h, row, col, variant: tl.constexpr):
    """Return the bit tile in which a compute tile lies, -1 for a full tile, -2 for an empty one."""
    first, full_last, last = entries_of_tile(
        extras.mask_rows, b, h, extras.mask_all_row_tiles, extras.mask_row_tiles,
        row // variant.mask_q,
    )  # fmt: skip
    entries, tile = extras.mask_row_entries, col // variant.mask_k
    full, full_end = entries_between(entries, first, full_last, tile, tile + 1)
    partial, partial_end = entries_between(entries, full_last, last, tile, tile + 1)
    at = entries + partial.to(tl.int64) * 2 + 1
    number = tl.load(at, mask=partial < partial_end, other=-2)
    return tl.where(full < full_end, -1, number)


@triton.jit(
    do_not_specialize=[
        "num_rows", "num_keys", "num_parts", "bias_batch", "bias_heads", "batch", "num_q_heads",
        "group_size", "seqlen_q", "seqlen_k", "window_left", "window_right",
    ]
)  # fmt: skip
def attention_bwd_bias_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_log2_ptr, delta_ptr, dbias_ptr, sequences, strides,
    num_rows, num_keys, num_parts, bias_batch, bias_heads, batch,
    num_q_heads, group_size, seqlen_q, seqlen_k, window_left, window_right,
    softmax_scale, softcap, extras,
    dims: tl.constexpr, variant: tl.constexpr, SHARED_ROWS: tl.constexpr,
    SHARED_KEYS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Compute one tile of one part of dbias, contiguous (parts, Bb, Hb, num_rows, num_keys)."""
    key_tiles, row_tiles = tl.cdiv(num_keys, TILE_N), tl.cdiv(num_rows, TILE_M)
    index = tl.program_id(0)
    first_col, index = index % key_tiles * TILE_N, index // key_tiles
    first_row, index = index % row_tiles * TILE_M, index // row_tiles
    planes = bias_batch * bias_heads
    plane, part = index % planes, index // planes
    # The sequences and heads that share this plane are pairs; a part takes each num_parts-th.
    pair_batch, pair_heads = batch // bias_batch, num_q_heads // bias_heads
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for pair in range(part, pair_batch * pair_heads, num_parts):
        b = plane // bias_heads * pair_batch + pair // pair_heads
        h = plane % bias_heads * pair_heads + pair % pair_heads
        first_q, length_q = sequence(b, sequences.cu_q, None, seqlen_q)
        first_k, length_k = sequence(b, sequences.cu_k, sequences.seqlens_k, seqlen_k)
        q_base = head_base(q_ptr, b, first_q, h, strides.q, dims.unit)
        do_base = head_base(do_ptr, b, first_q, h, strides.do, dims.unit)
        k_base = head_base(k_ptr, b, first_k, h // group_size, strides.k, dims.unit)
        v_base = head_base(v_ptr, b, first_k, h // group_size, strides.v, dims.unit)
        lse_base = head_base(lse_log2_ptr, b, first_q, h, strides.rows, 1)
        delta_base = head_base(delta_ptr, b, first_q, h, strides.rows, 1)
        slope = 0.0
        if variant.alibi:
            slope = tl.load(slope_start(extras, b, h))
        start = bias_start(extras, b, h)
        scores = Scores(softmax_scale, softcap, slope, start, extras.bias_row, extras.bias_key)
        draw = None
        if variant.dropout:
            low, high, offset = key_and_offset(extras.philox)
            draw = Draw(
                low,
                high,
                (b * num_q_heads + h).to(tl.uint32),
                offset,
                extras.threshold,
                extras.keep_scale,
            )
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
            begin, _, _, end, _ = span_of_tile(
                row, TILE_M, length_q, length_k, length_k - length_q, window_left, window_right,
                TILE_N, variant.left, variant.right,
            )  # fmt: skip
            for col in range(tl.maximum(begin, first_col), tl.minimum(end, last_col), TILE_N):
                cols = col + tl.arange(0, TILE_N)
                kind = first_row * 0 - 1
                if variant.mask_q > 0:
                    kind = _kind_of_tile(extras, b, h, row, col, variant)
                if kind >= -1:
                    qk = _product(
                        q_base, k_base, strides.q, strides.k, rows, cols, length_q, length_k,
                        dims.d + dims.rest, CHUNK, dims.unit,
                    )  # fmt: skip
                    dp = _product(
                        do_base, v_base, strides.do, strides.v, rows, cols, length_q, length_k,
                        dims.dv, CHUNK, dims.unit,
                    )  # fmt: skip
                    distance = (rows + (length_k - length_q))[:, None] - cols[None, :]
                    bias = load_bias(
                        scores, tl.minimum(rows, length_q - 1), cols, cols < length_k, variant,
                        False, True,
                    )  # fmt: skip
                    s, _capped = logits_log2(qk, distance, bias, scores, variant)
                    seen = visible(cols[None, :], key_begin[:, None], key_end[:, None], variant)
                    seen = seen & (rows < length_q)[:, None]
                    p = tl.exp2(s - lse_log2[:, None])
                    if variant.mask_q > 0:
                        allowed = visible_bits(
                            extras.mask_bits, tl.maximum(kind, 0), row % variant.mask_q,
                            col % variant.mask_k, variant, TILE_M, TILE_N, False,
                        )  # fmt: skip
                        seen = seen & (allowed | (kind < 0))
                    if variant.dropout:
                        keep = kept(draw, row, col, TILE_M, TILE_N, False)
                        dp = tl.where(keep, dp * draw.scale, 0.0)
                    # Nothing of a pair that does not see one another enters the sum, NaN neither.
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
