"""Elements times a function of a gate.

what     y = round(f(gate)) * x
grid     (rows * tiles of channels,)
program  TILE channels of one row
traffic  gate and x read once, y written once
numerics float32; f by torch's formulas, and rounded where torch's separate operations round
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
def _applied(gate, FUNCTION: tl.constexpr):
    """Return f(gate) elementwise, float32."""
    if FUNCTION == "silu":
        y = gate / (1.0 + tl.exp(-gate))
    elif FUNCTION == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-gate))
    elif FUNCTION == "gelu":
        y = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476))
    else:
        # torch's formula: 1 + tanh loses digits far below zero, which sigmoid(2 u) would keep, but
        # a model that torch trained on a GPU has lost them, too. Near zero this tanh is exact to
        # 1e-7, which is all that the sum with 1 keeps.
        u = 0.7978845608028654 * (gate + 0.044715 * (gate * gate * gate))
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(u)) + 1.0)
        y = 0.5 * gate * (1.0 + tl.where(u < 0.0, -tanh, tanh))
    return y


@triton.jit
def _gated_mul_kernel(
    gate_ptr,
    x_ptr,
    y_ptr,
    stride_gate,
    stride_x,
    tiles,
    dim,
    FUNCTION: tl.constexpr,
    TILE: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_next(EARLY)
    program = tl.program_id(0)
    row = (program // tiles).to(tl.int64)
    channel = (program % tiles) * TILE + tl.arange(0, TILE)
    inside = channel < dim
    await_previous(EARLY)
    gate = tl.load(gate_ptr + row * stride_gate + channel, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * stride_x + channel, mask=inside, other=0.0).to(tl.float32)
    dtype = y_ptr.dtype.element_ty
    factor = _applied(gate, FUNCTION).to(dtype).to(tl.float32)
    tl.store(y_ptr + row * dim + channel, (factor * x).to(dtype), mask=inside)


@planned
def gated_mul(maker: Maker, gate: Tensor, x: Tensor | None, function: str) -> Tensor:
    """Return y = round(f(gate)) * x, (..., I); without x gate is (..., 2 I), the gates first."""
    dim = gate.shape[-1] // 2 if x is None else gate.shape[-1]
    y = maker.empty((*gate.shape[:-1], dim), gate.dtype)
    if y.numel() == 0:
        return y
    gates = rows_of(maker, gate)
    if x is None:
        gates, rows = gates[:, :dim], gates[:, dim:]
    else:
        rows = rows_of(maker, x)
    tile = min(TILE, triton.next_power_of_2(dim))
    tiles = triton.cdiv(dim, tile)
    maker.launch(
        _gated_mul_kernel,
        gates.shape[0] * tiles,
        gates,
        rows,
        y,
        gates.stride(0),
        rows.stride(0),
        tiles,
        dim,
        FUNCTION=function,
        TILE=tile,
        num_warps=max(1, tile // 256),
        **options("activation"),
    )
    return y
