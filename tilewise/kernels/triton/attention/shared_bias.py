"""Gradient of a bias of every query and key, where every query sees every key.

What: as `bias.py`, for calls without windows, lengths, block masks and dropout, in 16 bits, whose
      bias has a number for each query and key: the pair bias of AlphaFold, shared by all rows.
Grid: one axis, parts x (batch x heads of the bias) x tiles of its rows and keys.
One program: a tile of the bias, which it reads once; one loop over the sequences and heads that
      share it, whose loads run ahead of the products, which a loop with conditions does not allow.
Traffic: q, do, k, v once for each tile that looks at them; the bias once, dbias once.
Numerics: as in `bias.py`; the sum runs in the order of sequences, then heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.tile import (
    Scores,
    bias_of_head,
    head_base,
    load_bias,
    logits_log2,
    probabilities,
    slope_of_head,
)
from tilewise.kernels.triton.visible import key_at


@triton.jit(
    do_not_specialize=[
        "num_parts",
        "bias_batch",
        "bias_heads",
        "batch",
        "num_q_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
    ]
)
def attention_bwd_shared_bias_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_log2_ptr,
    delta_ptr,
    dbias_ptr,
    strides,
    num_parts,
    bias_batch,
    bias_heads,
    batch,
    num_q_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    softmax_scale,
    softcap,
    extras,
    dims: tl.constexpr,
    variant: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    D_PAD: tl.constexpr,
    DV_PAD: tl.constexpr,
    num_stages: tl.constexpr,
):
    """Write one tile of one part of dbias, contiguous (parts, Bb, Hb, Sq, Sk).

    Bb and Hb are the batch and heads of the bias. A part is the sum over each num_parts-th of the
    (sequence, head) pairs that share the tile.
    """
    key_tiles, row_tiles = tl.cdiv(seqlen_k, TILE_N), tl.cdiv(seqlen_q, TILE_M)
    index = tl.program_id(0)
    first_col, index = index % key_tiles * TILE_N, index // key_tiles
    first_row, index = index % row_tiles * TILE_M, index // row_tiles
    planes = bias_batch * bias_heads
    plane, part = index % planes, index // planes
    pair_batch, pair_heads = batch // bias_batch, num_q_heads // bias_heads
    first_b, first_h = plane // bias_heads * pair_batch, plane % bias_heads * pair_heads

    rows, cols = first_row + tl.arange(0, TILE_M), first_col + tl.arange(0, TILE_N)
    loaded_rows, loaded_cols = rows < seqlen_q, cols < seqlen_k
    shared = Scores(
        softmax_scale,
        softcap,
        0.0,
        bias_of_head(extras, first_b, first_h, variant),
        extras.bias_row,
        extras.bias_key,
    )
    bias = load_bias(
        shared, tl.minimum(rows, seqlen_q - 1), cols, loaded_cols, variant, False, True
    )
    first = first_b * 0  # a row, for addresses of 64 bits
    distance = key_at(rows, seqlen_q, seqlen_k)[:, None] - cols[None, :]

    q_step, k_step = strides.q[1] * dims.unit, strides.k[1] * dims.unit
    do_step, v_step = strides.do[1] * dims.unit, strides.v[1] * dims.unit
    channels, value_channels = tl.arange(0, D_PAD), tl.arange(0, DV_PAD)
    has_channel = channels < dims.d + dims.rest
    has_value = value_channels < dims.dv
    at_q = rows.to(tl.int64)[:, None] * q_step + channels[None, :]
    at_k = cols.to(tl.int64)[:, None] * k_step + channels[None, :]
    at_do = rows.to(tl.int64)[:, None] * do_step + value_channels[None, :]
    at_v = cols.to(tl.int64)[:, None] * v_step + value_channels[None, :]
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    for pair in tl.range(part, pair_batch * pair_heads, num_parts, num_stages=num_stages):
        b, h = first_b + pair // pair_heads, first_h + pair % pair_heads
        q_base = head_base(q_ptr, b, first, h, strides.q, dims.unit)
        do_base = head_base(do_ptr, b, first, h, strides.do, dims.unit)
        k_base = head_base(k_ptr, b, first, h // group_size, strides.k, dims.unit)
        v_base = head_base(v_ptr, b, first, h // group_size, strides.v, dims.unit)
        lse_base = head_base(lse_log2_ptr, b, first, h, strides.rows, 1)
        delta_base = head_base(delta_ptr, b, first, h, strides.rows, 1)
        q = tl.load(q_base + at_q, mask=loaded_rows[:, None] & has_channel[None, :], other=0.0)
        k = tl.load(k_base + at_k, mask=loaded_cols[:, None] & has_channel[None, :], other=0.0)
        do = tl.load(do_base + at_do, mask=loaded_rows[:, None] & has_value[None, :], other=0.0)
        v = tl.load(v_base + at_v, mask=loaded_cols[:, None] & has_value[None, :], other=0.0)
        # Rows behind the end have p = 0.
        lse_log2 = tl.load(lse_base + rows, mask=loaded_rows, other=float("inf"))
        delta = tl.load(delta_base + rows, mask=loaded_rows, other=0.0)
        scores = Scores(
            softmax_scale, softcap, slope_of_head(extras, b, h, variant), None, None, None
        )
        s, _ = logits_log2(tl.dot(q, tl.trans(k)), distance, bias, scores, variant)
        dp = tl.dot(do, tl.trans(v))
        total += probabilities(s - lse_log2[:, None]) * (dp - delta[:, None])
    offset = (part.to(tl.int64) * planes + plane) * seqlen_q * seqlen_k
    at = dbias_ptr + offset + rows.to(tl.int64)[:, None] * seqlen_k + cols[None, :]
    stored = loaded_rows[:, None] & loaded_cols[None, :]
    tl.store(at, total.to(dbias_ptr.dtype.element_ty), mask=stored)
