"""A product with a weight matrix in tiles of one size, for any number of rows.

what     y = x weight^T + bias
grid     (tiles of rows x tiles of outputs,), the rows of some outputs one after the other
program  TILE_M rows x TILE_N outputs over all of K, TILE_K channels a step
traffic  x once for each tile of outputs, the weight once for each tile of rows; the L2 cache serves
         neighbours
numerics sums in float32 along K, in an order that depends on the dtype alone, see
         `tiles.invariant_linear`: a row of y has the same bits whichever rows are beside it, and
         however many
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned, rows_of
from tilewise.kernels.tiles.invariant_linear import InvariantTile, invariant_tile
from tilewise.kernels.triton.elements import why_not as why_not


@triton.jit(do_not_specialize=["rows"])
def _invariant_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    y_ptr,
    rows,
    outputs,
    channels,
    stride_x,
    stride_weight,
    HAS_BIAS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tiles = (rows + TILE_M - 1) // TILE_M
    row = tl.program_id(0) % tiles * TILE_M + tl.arange(0, TILE_M)
    output = tl.program_id(0) // tiles * TILE_N + tl.arange(0, TILE_N)
    channel = tl.arange(0, TILE_K)
    is_row, is_output = row < rows, output < outputs
    x_at = x_ptr + row.to(tl.int64)[:, None] * stride_x + channel[None, :]
    weight_at = weight_ptr + output.to(tl.int64)[None, :] * stride_weight + channel[:, None]
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for start in range(0, channels, TILE_K):
        inside = start + channel < channels
        x = tl.load(x_at + start, mask=is_row[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_at + start, mask=is_output[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(x, weight, acc, input_precision="ieee")
    if HAS_BIAS:
        acc += tl.load(bias_ptr + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = row.to(tl.int64)[:, None] * outputs + output[None, :]
    tl.store(y_ptr + to, acc.to(y_ptr.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@planned
def launch(
    maker: Maker,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tile: InvariantTile | None = None,
) -> Tensor:
    """Return y = x weight^T + bias, (..., N) in x's dtype, for any number of rows.

    x (..., K), weight (N, K), bias (N,) or None. tile: the tile, which overrides the table for
    tuning; None looks it up.
    """
    outputs, channels = weight.shape
    y = maker.empty((*x.shape[:-1], outputs), x.dtype)
    if y.numel() == 0:
        return y
    x = rows_of(maker, x)
    rows = x.shape[0]
    if tile is None:
        tile = invariant_tile(rows, outputs, x.itemsize, device.arch_of(maker.device))
    tile_m, tile_n, tile_k, num_warps, num_stages = tile
    maker.launch(
        _invariant_linear_kernel,
        triton.cdiv(rows, tile_m) * triton.cdiv(outputs, tile_n),
        x,
        weight,
        y if bias is None else bias,
        y,
        rows,
        outputs,
        channels,
        x.stride(0),
        weight.stride(0),
        HAS_BIAS=bias is not None,
        TILE_M=tile_m,
        TILE_N=tile_n,
        TILE_K=tile_k,
        num_warps=num_warps,
        num_stages=num_stages,
    )
    return y
