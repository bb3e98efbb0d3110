"""Backward pass of attention, dense and packed, in portable Triton: deterministic, no atomics.

What: with p = exp(s - lse), dp = do v^T, ds = p * (dp - delta) * ds/d(q.k):
      dv = p^T do, dk = ds^T q, dq = ds k. delta = rowsum(do * o) - dlse.
Grid: three kernels, each on one axis. Row terms (here): query tiles x batch x query heads. dk, dv
      (attention_bwd_dkdv): key tiles x (batch x key heads). dq (attention_bwd_dq): query tiles x
      (batch x query heads).
One program: of dk, dv: TILE_N keys of one key head, looping over the query heads of its group and
      the queries that see the keys; of dq: TILE_M queries of one head, looping over their keys.
Traffic: dk, dv reads k, v once and q, do once per key tile; dq reads q, do once and k, v once per
      query tile. Scores are computed twice, which costs 7/5 of the products of an atomic dq and
      buys bitwise reproducible gradients.
Numerics: base 2, p recomputed from lse; sums float32; p and ds rounded to the input type for the
      second products. Rows that see nothing carry lse = +inf here, so that p = 0 without a branch.
      Where |lse| is beyond FAR, logits within 2^-20 of it count as the largest.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.tile import FAR, LOG2E, head_base, load_rows, row_pointers


class BwdStrides(NamedTuple):
    """The (batch, row, head) strides of each tensor, in units of `HeadDims.unit` elements.

    `rows` are the strides of lse_log2 and delta, in elements.
    """

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
    o_ptr,
    do_ptr,
    lse_ptr,
    dlse_ptr,
    lse_log2_ptr,
    delta_ptr,
    o_strides,
    do_strides,
    row_strides,
    num_rows,
    num_tiles,
    num_q_heads,
    dims: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Write delta = rowsum(do * o) - dlse and the base-2 lse of TILE_M rows of one head.

    The base-2 lse is +inf where lse is -inf, so that rows which saw nothing get p = 0.
    """
    pid = tl.program_id(0)
    head, tile = pid // num_tiles, pid % num_tiles
    b, h = head // num_q_heads, head % num_q_heads
    rows = tile * TILE_M + tl.arange(0, TILE_M)
    stored = rows < num_rows
    o_base = head_base(o_ptr, b, b * 0, h, o_strides, dims.unit)
    do_base = head_base(do_ptr, b, b * 0, h, do_strides, dims.unit)
    o_ptrs = row_pointers(o_base, tile * TILE_M, TILE_M, o_strides[1], dims.dv_pad, dims)
    do_ptrs = row_pointers(do_base, tile * TILE_M, TILE_M, do_strides[1], dims.dv_pad, dims)
    o = load_rows(o_ptrs, stored, dims.dv, dims.dv_pad, True).to(tl.float32)
    do = load_rows(do_ptrs, stored, dims.dv, dims.dv_pad, True).to(tl.float32)
    delta = tl.sum(o * do, 1)
    offsets = head_base(0, b, b * 0, h, row_strides, 1) + rows
    lse = tl.load(lse_ptr + offsets, mask=stored, other=0.0)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + offsets, mask=stored, other=0.0)
    # Rounding of sums and lse would decide whether p of the largest logit is 0 or above 1.
    lse = tl.where(tl.abs(lse) > FAR, lse - tl.abs(lse) * 2.0**-20, lse)
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(lse_log2_ptr + offsets, lse * LOG2E, mask=stored)
    tl.store(delta_ptr + offsets, delta, mask=stored)
