"""Gated activation.

what     y = round(silu(gate)) * up, silu(x) = x / (1 + exp(-x))
grid     (rows * tiles of channels,)
program  TILE channels of one row
traffic  every element read once, half as many written
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

TILE = 1024  # 8 a thread of four warps, so 16 bytes of 2-byte elements; 6 programs for I = 6,144


@triton.jit
def _silu_mul_kernel(
    gate_up_ptr, y_ptr, stride, tiles, dim, TILE: tl.constexpr, EARLY: tl.constexpr
):
    begin_next(EARLY)
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    channel = (program % tiles) * TILE + tl.arange(0, TILE)
    inside = channel < dim
    at = gate_up_ptr + row * stride + channel
    await_previous(EARLY)
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + dim, mask=inside, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    activated = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(y_ptr + row * dim + channel, (activated * up).to(dtype), mask=inside)


@planned
def silu_mul(maker: Maker, gate_up: Tensor) -> Tensor:
    """Return y = round(silu(gate)) * up, (..., I), of gate_up (..., 2 I), the gates first."""
    dim = gate_up.shape[-1] // 2
    y = maker.empty((*gate_up.shape[:-1], dim), gate_up.dtype)
    if y.numel() == 0:
        return y
    rows = rows_of(maker, gate_up)
    tile = min(TILE, triton.next_power_of_2(dim))
    tiles = triton.cdiv(dim, tile)
    maker.launch(
        _silu_mul_kernel,
        rows.shape[0] * tiles,
        rows,
        y,
        rows.stride(0),
        tiles,
        dim,
        TILE=tile,
        num_warps=max(1, tile // 256),
        **options("activation"),
    )
    return y
