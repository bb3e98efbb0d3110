"""Rows rounded to e4m3 in groups of 128 channels, in the order of lanes.

what     x8[t, p(k)] = x[t, k] / s, s = max |x[t, g]| / 448 over the 128 channels g of k
grid     (tiles of rows, groups of channels)
program  TILE_M rows x 128 channels
traffic  x once, a byte a number and a scale a group of it
numerics in float32, rounded to nearest even; a group with a number that is not finite has NaN for
         its scale
"""

from __future__ import annotations

import triton
import triton.language as tl

CHANNELS = tl.constexpr(128)
LARGEST = tl.constexpr(448.0)
SMALLEST = tl.constexpr(1e-37)


@triton.jit(do_not_specialize=["rows"])
def narrow_kernel(
    x_ptr, codes_ptr, scale_ptr, rows, channels, stride_x, stride_scale, TILE_M: tl.constexpr
):
    """Write 128 channels of TILE_M rows of x as e4m3 codes, with one scale for each row.

    Codes are bytes (rows, channels) in the order of lanes, which `QuantisedWeight.lanes` gives to
    weights; scales are float32, channel group by group, stride_scale apart.
    """
    row = tl.program_id(0) * TILE_M + tl.arange(0, TILE_M)
    block = tl.program_id(1)
    k = block * CHANNELS + tl.arange(0, CHANNELS)
    inside = (row < rows)[:, None]
    at = x_ptr + row.to(tl.int64)[:, None] * stride_x + k[None, :]
    x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.where(x == x, tl.abs(x), float("inf")), 1)
    scale = tl.where(largest > 0.0, tl.div_rn(largest, largest * 0.0 + LARGEST), 1.0)
    scale = tl.where(largest < float("inf"), scale, float("nan"))
    # A product by the inverse, and what it leaves times the inverse: the quotient as a division
    # rounds it, without the branches of one. Of scales below SMALLEST the inverse is infinite.
    inverse = tl.where(scale > SMALLEST, tl.div_rn(largest * 0.0 + 1.0, scale), 0.0)[:, None]
    quotient = x * inverse
    left = tl.fma(-quotient, tl.broadcast_to(scale[:, None], x.shape), x)
    quotient = tl.fma(left, tl.broadcast_to(inverse, x.shape), quotient)
    code = quotient.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    # Within 64 channels: (quarter, half, lane, pair) -> (lane, quarter, pair, half).
    code = code.reshape(TILE_M, 2, 4, 2, 4, 2).permute(0, 1, 4, 2, 5, 3)
    code = code.reshape(TILE_M, CHANNELS)
    tl.store(codes_ptr + row.to(tl.int64)[:, None] * channels + k[None, :], code, mask=inside)
    tl.store(scale_ptr + block.to(tl.int64) * stride_scale + row, scale, mask=row < rows)
