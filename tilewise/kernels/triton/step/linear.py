"""A product of few rows with a weight matrix that is read once, as fast as memory gives it.

what     y = x weight^T + bias for up to 32 rows of x
grid     (tiles of outputs, parts of K); parts are added by a second kernel, (tiles of y,)
program  TILE_N outputs of all rows over its part of K; with WAYS > 1 each warp takes every WAYS-th
         slice of TILE_K channels, and the sums of the warps are added at the end
traffic  the weight once; x from the L2 cache; with parts 8 bytes for each element of y and part
numerics products of 16-bit numbers, summed in float32 in an order that depends on K and the tiles
         alone: a row of y does not depend on how many others there are
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned, rows_of
from tilewise.kernels.spec import ElementSpec
from tilewise.kernels.tiles.linear import LinearTile, tile_of
from tilewise.kernels.triton.early import RUN, await_previous, begin_next, options, prefetch

DTYPES = (torch.float16, torch.bfloat16)
ROWS = 16  # of the smallest matrix instruction; fewer, or fewer than 32, are padded
MERGE_TILE = 1024


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows,
    outputs,
    channels,
    stride_x,
    stride_weight,
    slices_per_part,
    HAS_BIAS: tl.constexpr,
    WAYS: tl.constexpr,
    ROWS: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EARLY: tl.constexpr,
    RUN: tl.constexpr,
    RUNS: tl.constexpr,
):
    begin_next(EARLY)
    part = tl.program_id(1)
    row = tl.arange(0, ROWS)
    output = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    is_row, is_output = row < rows, output < outputs
    first = part * slices_per_part * (WAYS * TILE_K)
    end = tl.minimum(first + slices_per_part * (WAYS * TILE_K), channels)
    if EARLY > 0:
        if RUNS > 0:
            asked = first + tl.arange(0, RUNS) * RUN
            runs = weight_ptr + output.to(tl.int64)[:, None] * stride_weight + asked[None, :]
            nbytes = 2 * tl.minimum(end - asked, RUN)
            prefetch(runs, is_output[:, None] & (asked < end)[None, :], nbytes[None, :])
        await_previous(EARLY)
    if WAYS == 1:
        channel = tl.arange(0, TILE_K)
        x_at = x_ptr + row[:, None] * stride_x + channel[None, :]
        weight_at = weight_ptr + output.to(tl.int64)[None, :] * stride_weight + channel[:, None]
        acc = tl.zeros([ROWS, TILE_N], tl.float32)
        for start in range(first, end, TILE_K):
            inside = start + channel < end
            weight = tl.load(
                weight_at + start, mask=is_output[None, :] & inside[:, None], other=0.0
            )
            x = tl.load(x_at + start, mask=is_row[:, None] & inside[None, :], other=0.0)
            acc = tl.dot(x, weight, acc)
    else:
        way = tl.arange(0, WAYS)
        channel = way[:, None] * TILE_K + tl.arange(0, TILE_K)[None, :]
        x_at = x_ptr + row[None, :, None] * stride_x + channel[:, None, :]
        weight_at = (
            weight_ptr + output.to(tl.int64)[None, None, :] * stride_weight + channel[:, :, None]
        )
        sums = tl.zeros([WAYS, ROWS, TILE_N], tl.float32)
        for start in range(first, end, WAYS * TILE_K):
            inside = start + channel < end
            weight = tl.load(
                weight_at + start, mask=is_output[None, None, :] & inside[:, :, None], other=0.0
            )
            x = tl.load(x_at + start, mask=is_row[None, :, None] & inside[:, None, :], other=0.0)
            sums = tl.dot(x, weight, sums)
        acc = tl.sum(sums, 0)
    if HAS_BIAS:
        acc += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = (part * rows + row[:, None]).to(tl.int64) * outputs + output[None, :]
    mask = is_row[:, None] & is_output[None, :]
    tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _merge_kernel(
    part_ptr,
    bias_ptr,
    y_ptr,
    outputs,
    count,
    HAS_BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < count
    total = tl.zeros([TILE], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(part_ptr + part * count + at, mask=inside, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + at % outputs, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=inside)


def why_not(spec: ElementSpec) -> str | None:
    """Return why this kernel cannot run a call, or None if it can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    if spec.dtype not in DTYPES:
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    return None


@planned
def launch(
    maker: Maker,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: LinearTile | None = None,
) -> Tensor:
    """Return y = x weight^T + bias, (..., N) in x's dtype, for up to 32 rows.

    x (..., K), weight (N, K), bias (N,) or None. tile: the tile, which overrides the table for
    tuning; None looks it up.
    """
    outputs, channels = weight.shape
    y = maker.empty((*x.shape[:-1], outputs), x.dtype)
    if y.numel() == 0:
        return y
    x = rows_of(maker, x)
    rows = x.shape[0]
    tile = tile_of(outputs, channels) if tile is None else tile
    slices = triton.cdiv(channels, tile.tile_k * tile.ways)
    per_part = triton.cdiv(slices, tile.parts)
    parts = triton.cdiv(slices, per_part)
    target = y
    if parts > 1:
        target = maker.empty((parts, rows, outputs), torch.float32)
    given = y if bias is None else bias
    early, runs = options("linear"), 0
    are_runs = maker.is_aligned(weight) and (2 * weight.stride(0) | 2 * channels) % 16 == 0
    if early["EARLY"] and are_runs:
        runs = triton.next_power_of_2(triton.cdiv(per_part * tile.tile_k * tile.ways, RUN))
    maker.launch(
        _linear_kernel,
        (triton.cdiv(outputs, tile.tile_n), parts),
        x,
        weight,
        given,
        target,
        rows,
        outputs,
        channels,
        x.stride(0),
        weight.stride(0),
        per_part,
        HAS_BIAS=bias is not None and parts == 1,
        WAYS=tile.ways,
        ROWS=ROWS if rows <= ROWS else 2 * ROWS,
        TILE_N=tile.tile_n,
        TILE_K=tile.tile_k,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        RUN=RUN,
        RUNS=runs,
        **early,
    )
    if parts > 1:
        maker.launch(
            _merge_kernel,
            triton.cdiv(y.numel(), MERGE_TILE),
            target,
            given,
            y,
            outputs,
            y.numel(),
            HAS_BIAS=bias is not None,
            PARTS=parts,
            TILE=MERGE_TILE,
            num_warps=4,
        )
    return y
