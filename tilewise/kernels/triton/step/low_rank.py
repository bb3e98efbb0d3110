"""Adapters of low rank, mixed in a batch: two kernels for all rows of a product.

what     y[t] += scale (x[t] A^T) B with the A, B and scale of the row's slot, in place
grid     shrink (tiles of rows, TILE ranks of a part, splits of K), then expand (tiles of rows,
         tiles of columns); tiles without rows end at once, so that a captured step has one grid
program  shrink: TILE rows of one slot times TILE rows of its A over a split of K; expand: TILE rows
         by TILE_N columns, which adds up the splits and reads B for the ranks that the slot has
traffic  of each slot A once for each of its tiles and B likewise, from L2 behind the first; x once
         for each TILE ranks, y once and back
numerics products summed in float32, along K in splits whose number depends on K alone; x A^T is
         scaled in float32 and rounded to x's dtype; y is rounded once more
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned, rows_of
from tilewise.kernels.low_rank import TILE, LowRank, RowTiles
from tilewise.kernels.triton.early import await_previous, begin_next, options
from tilewise.kernels.triton.elements import why_not as why_not

TILE_K = 256  # channels of a step of shrink, of 16 bits: 8 KB each of x and of A
TILE_N = 256  # columns of a program of expand: a sum of 32 registers a thread
CHANNELS = 1024  # of a split: 32 KB of A for each program
MOST_SPLITS = 8


@triton.jit
def _shrink_kernel(
    x_ptr,
    a_ptr,
    h_ptr,
    ranks_ptr,
    slots_ptr,
    rows_ptr,
    channels,
    stride_x,
    per_split,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    TILE_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_next(EARLY)
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    part = group // (RANK // TILE)
    slot = tl.load(slots_ptr + tile).to(tl.int64)
    await_previous(EARLY)
    if slot >= 0:
        rank = tl.load(ranks_ptr + slot * PARTS + part)
        if group * TILE - part * RANK < rank:
            lane = tl.arange(0, TILE)
            row = tl.load(rows_ptr + tile * TILE + lane).to(tl.int64)
            channel = tl.arange(0, TILE_K)
            x_at = x_ptr + row[:, None] * stride_x + channel[None, :]
            own = slot * PARTS * RANK + group * TILE + lane
            a_at = a_ptr + own[None, :] * channels + channel[:, None]
            first = split * per_split
            end = tl.minimum(first + per_split, channels)
            acc = tl.zeros([TILE, TILE], tl.float32)
            for start in range(first, end, TILE_K):
                inside = start + channel < end
                x = tl.load(x_at + start, mask=(row >= 0)[:, None] & inside[None, :], other=0.0)
                a = tl.load(a_at + start, mask=inside[:, None], other=0.0)
                acc = tl.dot(x, a, acc, input_precision="ieee")
            at = ((split * tl.num_programs(0) + tile) * TILE + lane).to(tl.int64)
            to = at[:, None] * (PARTS * RANK) + (group * TILE + lane)[None, :]
            tl.store(h_ptr + to, acc)


@triton.jit
def _expand_kernel(
    y_ptr,
    h_ptr,
    b_ptr,
    scale_ptr,
    ranks_ptr,
    edges_ptr,
    slots_ptr,
    rows_ptr,
    outputs,
    splits,
    PARTS: tl.constexpr,
    RANK: tl.constexpr,
    TILE: tl.constexpr,
    TILE_N: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_next(EARLY)
    tile, begin = tl.program_id(0), tl.program_id(1) * TILE_N
    slot = tl.load(slots_ptr + tile).to(tl.int64)
    await_previous(EARLY)
    if slot >= 0:
        lane, column = tl.arange(0, TILE), begin + tl.arange(0, TILE_N)
        row = tl.load(rows_ptr + tile * TILE + lane).to(tl.int64)
        acc = tl.zeros([TILE, TILE_N], tl.float32)
        step = tl.num_programs(0).to(tl.int64) * TILE * (PARTS * RANK)
        for part in range(PARTS):
            first, end = tl.load(edges_ptr + part), tl.load(edges_ptr + part + 1)
            if (first < begin + TILE_N) & (begin < end):
                scale = tl.load(scale_ptr + slot * PARTS + part)
                rank = tl.load(ranks_ptr + slot * PARTS + part)
                is_own = (column >= first) & (column < end)
                for lowest in range(0, rank, TILE):
                    h_at = (tile * TILE + lane).to(tl.int64)[:, None] * (PARTS * RANK)
                    h_at += (part * RANK + lowest + lane)[None, :]
                    h = tl.zeros([TILE, TILE], tl.float32)
                    for split in range(splits):
                        h += tl.load(h_ptr + split * step + h_at)
                    b_at = (slot * RANK + lowest + lane)[:, None] * outputs + column[None, :]
                    b = tl.load(b_ptr + b_at, mask=is_own[None, :], other=0.0)
                    acc = tl.dot((h * scale).to(b.dtype), b, acc, input_precision="ieee")
        inside = (row >= 0)[:, None] & (column < outputs)[None, :]
        y_at = y_ptr + row[:, None] * outputs + column[None, :]
        y = tl.load(y_at, mask=inside, other=0.0).to(tl.float32) + acc
        tl.store(y_at, y.to(y_ptr.dtype.element_ty), mask=inside)


@planned
def launch(maker: Maker, y: Tensor, x: Tensor, weights: LowRank, tiles: RowTiles) -> None:
    """Add scale (x A^T) B of each row's adapter to y (..., N), contiguous, in place.

    x: (..., K), as many rows as y; weights: A, B and scales of all slots; tiles: the rows of each
    slot. Rows that are in no tile are left alone.
    """
    y, x = rows_of(maker, y), rows_of(maker, x)
    parts, rank, count = weights.parts, weights.rank, len(tiles.slots)
    channels, outputs = x.shape[1], y.shape[1]
    splits = max(1, min(MOST_SPLITS, channels // CHANNELS))
    per_split = triton.cdiv(triton.cdiv(channels, splits), TILE_K) * TILE_K
    splits = triton.cdiv(channels, per_split)
    h = maker.empty((splits, count, TILE, parts * rank), torch.float32)
    early = options("linear")
    maker.launch(
        _shrink_kernel,
        (count, parts * rank // TILE, splits),
        x,
        weights.a,
        h,
        weights.ranks,
        tiles.slots,
        tiles.rows,
        channels,
        x.stride(0),
        per_split,
        PARTS=parts,
        RANK=rank,
        TILE=TILE,
        TILE_K=TILE_K,
        num_warps=4,
        num_stages=3,
        **early,
    )
    maker.launch(
        _expand_kernel,
        (count, triton.cdiv(outputs, TILE_N)),
        y,
        h,
        weights.b,
        weights.scale,
        weights.ranks,
        weights.edges,
        tiles.slots,
        tiles.rows,
        outputs,
        splits,
        PARTS=parts,
        RANK=rank,
        TILE=TILE,
        TILE_N=TILE_N,
        num_warps=4,
        **early,
    )
