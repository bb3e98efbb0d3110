"""RMS norm of groups of rows, with a gate: what follows a recurrence.

what     y = round(round(x / rms(x)) * weight) * f(gate), or of x f(gate) without a factor
grid     (tiles of groups,)
program  TILE_R groups of channels, each in registers as a whole
traffic  x and gate read once, y written once; the weight from the L2 cache
numerics float32; rounded where torch's separate operations round. The bits of a group do not
         depend on others
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.elements import why_not as why_not

ELEMENTS = 1024  # of a program: 8 a thread of four warps


@triton.jit(do_not_specialize=["groups"])
def _gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    y_ptr,
    groups,
    heads,
    stride_gate,
    stride_head,
    eps,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_SILU: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    group = tl.program_id(0).to(tl.int64) * TILE_R + tl.arange(0, TILE_R)
    channel = tl.arange(0, TILE_C)
    inside = (group < groups)[:, None] & (channel < GROUP)[None, :]
    row, part = group // GROUPS, group % GROUPS
    dtype = y_ptr.dtype.element_ty
    own = (part * GROUP)[:, None] + channel[None, :]
    at = row[:, None] * (GROUPS * GROUP) + own
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    gate_at = (row // heads * stride_gate + row % heads * stride_head)[:, None] + own
    gate = tl.load(gate_ptr + gate_at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + own, mask=inside, other=0.0).to(tl.float32)
    factor = 1.0 / (1.0 + tl.exp(-gate))
    if HAS_SILU:
        factor *= gate
    if GATE_FIRST:
        x *= factor
    mean_square = tl.sum(x * x, 1) / GROUP
    y = x * tl.rsqrt(mean_square + eps)[:, None]
    if ROUNDS:
        y = (y.to(dtype).to(tl.float32) * weight).to(dtype).to(tl.float32)
    else:
        y *= weight
    if not GATE_FIRST:
        y *= factor
    tl.store(y_ptr + at, y.to(dtype), mask=inside)


@planned
def gated_rms_norm(
    maker: Maker,
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int,
    activation: str,
    gate_first: bool,
    rounds_first: bool,
) -> Tensor:
    """Return y in x's shape and dtype; the rule and the arguments are of `ops.gated_rms_norm`."""
    y = maker.empty(x.shape, x.dtype)
    if y.numel() == 0:
        return y
    channels = x.shape[-1]
    columns = triton.next_power_of_2(group_size)
    rows = max(1, ELEMENTS // columns)
    groups = x.numel() // group_size
    maker.launch(
        _gated_norm_kernel,
        triton.cdiv(groups, rows),
        x,
        gate,
        weight,
        y,
        groups,
        x.shape[1] if x.dim() == 3 else 1,
        gate.stride(0),
        gate.stride(1) if x.dim() == 3 else 0,
        eps,
        GROUPS=channels // group_size,
        GROUP=group_size,
        TILE_R=rows,
        TILE_C=columns,
        HAS_SILU=activation == "silu",
        GATE_FIRST=gate_first,
        ROUNDS=rounds_first,
        num_warps=min(16, max(4, columns // 256)),
    )
    return y
