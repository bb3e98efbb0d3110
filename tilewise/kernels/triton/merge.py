"""Merge attention over disjoint sets of keys: of two tensors, and of parts inside kernels.

what     o = w_a o_a + w_b o_b with w = exp(lse - log(exp(lse_a) + exp(lse_b)))
grid     (tiles of rows,), a row being one token and head
program  loads TILE_R pairs of lse, weights and adds their rows of o
traffic  o_a and o_b read once, o written once
numerics float32; a side whose lse is -inf has weight 0, whatever its o contains
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.attention.tile import LN2, LOG2E
from tilewise.kernels.triton.elements import why_not as why_not

TILE_ELEMENTS = 2048  # of each input: two 16-byte loads of 2-byte elements a thread of four warps


@triton.jit
def add_parts(acc, l, m, part_o, part_lse):
    """Return the running sums (acc, l, m) of a row with parts of its attention added.

    part_o (parts, Dv) is normalised, part_lse (parts,) natural; parts of several rows are (parts,
    rows, Dv) and (parts, rows). m is the largest lse so far, natural, and starts at
    `paged.keys.LOWEST`.
    """
    m_new = tl.maximum(m, tl.max(part_lse, 0))
    weight = tl.math.exp2((part_lse - m_new) * LOG2E)
    alpha = tl.math.exp2((m - m_new) * LOG2E)
    fade = alpha
    if len(acc.shape) == 2:
        fade = alpha[:, None]
    acc = acc * fade + tl.sum(part_o * tl.expand_dims(weight, -1), 0)
    return acc, l * alpha + tl.sum(weight, 0), m_new


@triton.jit
def store_whole(acc, l, m, o_row, inside, lse_at):
    """Store o and lse of the running sums of one row's parts; 0 and -inf if none has a key."""
    seen = l != 0.0  # True for NaN, too
    l = tl.where(seen, l, 1.0)
    tl.store(o_row, (acc / l).to(o_row.dtype.element_ty), mask=inside)
    tl.store(lse_at, tl.where(seen, m + tl.math.log2(l) * LN2, float("-inf")))


@triton.jit(do_not_specialize=["num_rows", "seqlen", "stride_lah", "stride_lbh", "stride_loh"])
def _merge_kernel(
    o_a_ptr,
    lse_a_ptr,
    o_b_ptr,
    lse_b_ptr,
    o_ptr,
    lse_ptr,
    num_rows,
    seqlen,
    num_heads,
    stride_ab,
    stride_as,
    stride_ah,
    stride_bb,
    stride_bs,
    stride_bh,
    stride_ob,
    stride_os,
    stride_oh,
    stride_lab,
    stride_lah,
    stride_las,
    stride_lbb,
    stride_lbh,
    stride_lbs,
    stride_lob,
    stride_loh,
    stride_los,
    V_HEAD_DIM: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    valid = row < num_rows
    h = row % num_heads
    s = (row // num_heads) % seqlen
    b = row // num_heads // seqlen
    lse_a = tl.load(
        lse_a_ptr + b * stride_lab + h * stride_lah + s * stride_las,
        mask=valid,
        other=float("-inf"),
    ).to(tl.float32)
    lse_b = tl.load(
        lse_b_ptr + b * stride_lbb + h * stride_lbh + s * stride_lbs,
        mask=valid,
        other=float("-inf"),
    ).to(tl.float32)
    m = tl.maximum(lse_a, lse_b)
    m = tl.where(m == float("-inf"), 0.0, m)
    weight_a = tl.math.exp2((lse_a - m) * LOG2E)
    weight_b = tl.math.exp2((lse_b - m) * LOG2E)
    total = weight_a + weight_b
    seen = total != 0.0  # True for NaN, too
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, m + tl.math.log2(total) * LN2, float("-inf"))
    tl.store(lse_ptr + b * stride_lob + h * stride_loh + s * stride_los, lse, mask=valid)

    offs = tl.arange(0, TILE_DV)[None, :]
    inside = valid[:, None] & (offs < V_HEAD_DIM)
    a_row = o_a_ptr + (b * stride_ab + s * stride_as + h * stride_ah)[:, None]
    b_row = o_b_ptr + (b * stride_bb + s * stride_bs + h * stride_bh)[:, None]
    o_row = o_ptr + (b * stride_ob + s * stride_os + h * stride_oh)[:, None]
    # Not loaded where the weight is 0: 0 * inf would not be 0.
    o_a = tl.load(a_row + offs, mask=inside & (weight_a > 0.0)[:, None], other=0.0).to(tl.float32)
    o_b = tl.load(b_row + offs, mask=inside & (weight_b > 0.0)[:, None], other=0.0).to(tl.float32)
    o = o_a * (weight_a / total)[:, None] + o_b * (weight_b / total)[:, None]
    tl.store(o_row + offs, o.to(o_ptr.dtype.element_ty), mask=inside)


@planned
def launch(
    maker: Maker, o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Return o in the dtype of o_a and lse float32 of the union of two sets of keys.

    o_a, o_b (T, H, Dv) with lse (H, T), or (B, S, H, Dv) with lse (B, H, S).
    """
    o = maker.empty(o_a.shape, o_a.dtype)
    lse = maker.empty(lse_a.shape, torch.float32)
    if lse.numel() == 0:
        return o, lse
    outs = [t if t.dim() == 4 else t.unsqueeze(0) for t in (o_a, o_b, o)]
    lses = [t if t.dim() == 3 else t.unsqueeze(0) for t in (lse_a, lse_b, lse)]
    _, seqlen, num_heads, v_head_dim = outs[0].shape
    tile_dv = triton.next_power_of_2(v_head_dim)
    tile_r = max(1, TILE_ELEMENTS // tile_dv)
    maker.launch(
        _merge_kernel,
        triton.cdiv(lse.numel(), tile_r),
        o_a,
        lse_a,
        o_b,
        lse_b,
        o,
        lse,
        lse.numel(),
        seqlen,
        num_heads,
        *(stride for t in outs for stride in _strides(t)[:3]),
        *(stride for t in lses for stride in _strides(t)),
        V_HEAD_DIM=v_head_dim,
        TILE_R=tile_r,
        TILE_DV=tile_dv,
        num_warps=4,
    )
    return o, lse


def _strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of x, with 0 for the first if it has one sequence.

    That stride depends on the number of rows, and Triton would compile again where it is a multiple
    of 16.
    """
    return x.stride() if x.shape[0] > 1 else (0, *x.stride()[1:])
