"""Products of one row, with the norm before them and the activation behind them.

what     y = W norm(x + residual), of pairs of rows of W also silu(a) * b; or partial sums of W x. x
         may be partial sums itself, which are added in order and rounded
grid     (tiles of outputs, parts of K)
program  TILE_N outputs over TILE_K channels, of W in registers, which are loaded while the kernel
         before still runs; each program adds and normalises the whole row for itself
traffic  the weight once; the row from the L2 cache, once a program
numerics products of 16-bit numbers, summed in float32; rounded where separate operations round
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.early import await_previous, begin_next, options
from tilewise.kernels.triton.step.linear import why_not as why_not

MOST_CHANNELS = 2048  # of a row that each program holds
PART = 1024  # channels of a part, if one part would be more than MOST_CHANNELS
ROWS = 16  # of the weight, of a program of a normalised row
ROWS_OF_PART = 8


@triton.jit(do_not_specialize=["outputs"])
def _row_kernel(
    x_ptr,
    residual_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    total_ptr,
    outputs,
    channels,
    stride_weight,
    eps,
    HAS_NORM: tl.constexpr,
    X_PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_next(EARLY)
    part = tl.program_id(1)
    output = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    channel = part * TILE_K + tl.arange(0, TILE_K)
    is_output, inside = output < outputs, channel < channels
    at = output.to(tl.int64)[:, None] * stride_weight + channel[None, :]
    mask = is_output[:, None] & inside[None, :]
    # Loaded first: they do not depend on the kernel before.
    weight = tl.load(weight_ptr + at, mask=mask, other=0.0)
    if IS_GATED:
        behind = outputs.to(tl.int64) * stride_weight
        up_weight = tl.load(weight_ptr + behind + at, mask=mask, other=0.0)
    if HAS_NORM:
        norm = tl.load(norm_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    await_previous(EARLY)
    dtype: tl.constexpr = weight_ptr.dtype.element_ty
    x = tl.load(x_ptr + channel, mask=inside, other=0.0).to(tl.float32)
    for i in tl.static_range(1, X_PARTS):
        x += tl.load(x_ptr + i * channels + channel, mask=inside, other=0.0)
    if X_PARTS > 0:
        x = x.to(dtype).to(tl.float32)
    if HAS_NORM:
        x += tl.load(residual_ptr + channel, mask=inside, other=0.0).to(tl.float32)
        total = x.to(dtype)
        if tl.program_id(0) == 0:
            tl.store(total_ptr + channel, total, mask=inside)
        x = total.to(tl.float32)
        scaled = x * tl.rsqrt(tl.sum(x * x, 0) / channels + eps)
        x = (scaled.to(dtype).to(tl.float32) * norm).to(dtype).to(tl.float32)
    y = tl.sum(weight.to(tl.float32) * x[None, :], 1)
    if HAS_BIAS:
        y += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)
    if IS_GATED:
        up = tl.sum(up_weight.to(tl.float32) * x[None, :], 1)
        if HAS_BIAS:
            up += tl.load(bias_ptr + outputs + output, mask=is_output, other=0.0).to(tl.float32)
        gate = y.to(dtype).to(tl.float32)
        activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        y = activated * up.to(dtype).to(tl.float32)
    tl.store(y_ptr + part * outputs + output, y.to(y_ptr.dtype.element_ty), mask=is_output)


def tile_k(channels: int) -> int:
    """Return the channels of a part of a product, a power of two of at least 16.

    It holds all channels of a row up to MOST_CHANNELS; for a longer row it is PART.
    """
    whole = triton.next_power_of_2(channels)
    return max(16, whole) if whole <= MOST_CHANNELS else PART


def parts_of(channels: int) -> int:
    """Return the number of parts of a product with rows of `channels` channels, see `tile_k`."""
    return triton.cdiv(channels, tile_k(channels))


@planned
def add_rms_norm_linear(
    maker: Maker,
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    is_gated: bool,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual, normalise and multiply by a weight, for one token.

    Args:
        x: (..., E) in the weight's dtype; or the float32 parts (P, ..., E) of which x is the sum.
        residual: (..., E), which is not changed.
        weight, bias: (N, E) and (N,) or None; with is_gated (2 N, E), gates above values.
        is_gated: True to return silu(gate) * value.

    Returns:
        y (..., N) and the new residual x + residual (..., E).
    """
    outputs, channels = weight.shape
    outputs //= 1 + is_gated
    y = maker.empty((*residual.shape[:-1], outputs), weight.dtype)
    total = maker.empty(residual.shape, weight.dtype)
    if y.numel() == 0:
        return y, total
    rows = ROWS // (1 + is_gated)
    maker.launch(
        _row_kernel,
        (triton.cdiv(outputs, rows), 1),
        x,
        residual,
        norm_weight,
        weight,
        x if bias is None else bias,
        y,
        total,
        outputs,
        channels,
        weight.stride(0),
        eps,
        HAS_NORM=True,
        X_PARTS=len(x) if x.dtype == torch.float32 else 0,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        TILE_N=rows,
        TILE_K=tile_k(channels),
        num_warps=4 if is_gated else 8,
        **options("linear"),
    )
    return y, total


@planned
def row_linear_parts(maker: Maker, x: Tensor, weight: Tensor) -> Tensor:
    """Return the product x weight^T of one row x (..., K) as partial sums over parts of K.

    They are (P, ..., N) float32, which the caller adds in order; weight: (N, K).
    """
    outputs, channels = weight.shape
    parts = parts_of(channels)
    y = maker.empty((parts, *x.shape[:-1], outputs), torch.float32)
    if y.numel() == 0:
        return y
    maker.launch(
        _row_kernel,
        (triton.cdiv(outputs, ROWS_OF_PART), parts),
        x,
        x,
        x,
        weight,
        x,
        y,
        y,
        outputs,
        channels,
        weight.stride(0),
        0.0,
        HAS_NORM=False,
        X_PARTS=0,
        HAS_BIAS=False,
        IS_GATED=False,
        TILE_N=ROWS_OF_PART,
        TILE_K=tile_k(channels),
        num_warps=4,
        **options("linear"),
    )
    return y
