"""RMS norm of rows, and of the sum of two rows.

what     r = round(x + residual), if there is a residual; y = round(r / rms(r)) * weight, or SHIFTED
         y = round(r / rms(r) * (1 + weight)). x may be float32 partial sums of a product, which are
         added in order and rounded; HAS_HEADS its rows are the heads of tokens, which lie as a
         projection wrote them, among others
grid     (rows,)
program  holds one row in registers, whatever its width
traffic  every element read once and written once; the weight from the L2 cache
numerics float32; rounded where torch's separate operations round
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned, rows_of
from tilewise.kernels.triton.early import await_previous, begin_next, options
from tilewise.kernels.triton.elements import why_not as why_not

ELEMENTS_PER_WARP = 256  # 8 a thread: a load of 16 bytes of 2-byte elements


@triton.jit(do_not_specialize=["heads"])
def _norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    y_ptr,
    new_residual_ptr,
    stride_x,
    stride_residual,
    stride_part,
    heads,
    stride_head,
    eps,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    SHIFTED: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_next(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE)
    inside = column < DIM
    dtype = y_ptr.dtype.element_ty
    # Loaded first: it does not depend on the kernel before.
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    await_previous(EARLY)
    if HAS_HEADS:
        x_ptr += row // heads * stride_x + row % heads * stride_head
    else:
        x_ptr += row * stride_x
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(x_ptr + part * stride_part + column, mask=inside, other=0.0)
    if PARTS > 0:
        x = x.to(dtype).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual_ptr + row * stride_residual + column
        x += tl.load(at, mask=inside, other=0.0).to(tl.float32)
        total = x.to(dtype)
        tl.store(new_residual_ptr + row * DIM + column, total, mask=inside)
        x = total.to(tl.float32)
    mean_square = tl.sum(x * x, 0) / DIM
    scaled = x * tl.rsqrt(mean_square + eps)
    if SHIFTED:
        y = scaled * (1.0 + weight)
    else:
        y = scaled.to(dtype).to(tl.float32) * weight
    tl.store(y_ptr + row * DIM + column, y.to(dtype), mask=inside)


@planned
def rms_norm(maker: Maker, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return y = round(x / sqrt(mean(x^2) + eps)) * weight, (..., E) as x."""
    y = maker.empty(x.shape, x.dtype)
    _launch(maker, x, None, weight, eps, y, y)
    return y


@planned
def add_rms_norm(
    maker: Maker, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `rms_norm` of x + residual, and that sum, the new residual, both (..., E) as x."""
    y, total = maker.empty(x.shape, x.dtype), maker.empty(x.shape, x.dtype)
    _launch(maker, x, residual, weight, eps, y, total)
    return y, total


@planned
def shifted_rms_norm(maker: Maker, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return y = round(x / sqrt(mean(x^2) + eps) * (1 + weight)), (..., E) as x."""
    y = maker.empty(x.shape, x.dtype)
    _launch(maker, x, None, weight, eps, y, y, shifted=True)
    return y


@planned
def add_shifted_rms_norm(
    maker: Maker, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `shifted_rms_norm` of x + residual, and that sum, the new residual, both (..., E)."""
    y, total = maker.empty(x.shape, x.dtype), maker.empty(x.shape, x.dtype)
    _launch(maker, x, residual, weight, eps, y, total, shifted=True)
    return y, total


@planned
def add_parts_rms_norm(
    maker: Maker, parts: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `add_rms_norm` of x and the residual, where x is the rounded sum of float32 parts.

    parts: (P, ..., E). The results, y and the new residual, are in the residual's dtype.
    """
    y, total = (maker.empty(residual.shape, residual.dtype) for _ in range(2))
    _launch(maker, parts[0], residual, weight, eps, y, total, parts)
    return y, total


@planned
def add_parts_shifted_rms_norm(
    maker: Maker, parts: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return `add_shifted_rms_norm` of x and the residual; x comes as in `add_parts_rms_norm`."""
    y, total = (maker.empty(residual.shape, residual.dtype) for _ in range(2))
    _launch(maker, parts[0], residual, weight, eps, y, total, parts, shifted=True)
    return y, total


def _launch(
    maker: Maker,
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    eps: float,
    y: Tensor,
    total: Tensor,
    parts: Tensor | None = None,
    *,
    shifted: bool = False,
) -> None:
    """Add to a plan the launch that writes the norm y and, with a residual, the sum `total`.

    Args:
        x: (..., E), or parts[0] if there are parts.
        residual: (..., E); None to normalise x itself, and `total` is not written.
        parts: (P, ..., E) float32, contiguous partial sums of x; None for x itself.
        shifted: True to multiply by 1 + weight before rounding.
    """
    if x.numel() == 0:
        return
    dim = x.shape[-1]
    has_heads = x.dim() == 3 and residual is None  # even of one token, for one kernel of all
    rows = x if has_heads else rows_of(maker, x)
    added = rows if residual is None else rows_of(maker, residual)
    tile = triton.next_power_of_2(dim)
    maker.launch(
        _norm_kernel,
        x.numel() // dim,
        rows,
        added,
        weight,
        y,
        total,
        rows.stride(0),
        added.stride(0),
        0 if parts is None else parts.stride(0),
        x.shape[1] if has_heads else 1,
        x.stride(1) if has_heads else 0,
        eps,
        DIM=dim,
        TILE=tile,
        HAS_RESIDUAL=residual is not None,
        HAS_HEADS=has_heads,
        PARTS=0 if parts is None else len(parts),
        SHIFTED=shifted,
        num_warps=min(16, max(1, tile // ELEMENTS_PER_WARP)),
        **options("norm"),
    )
