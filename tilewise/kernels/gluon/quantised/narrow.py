"""Products of many rows with a weight of e4m3 in blocks on Hopper: rows are rounded likewise."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.quantised.narrow_rows import WIDE, Shape, narrow_rows_kernel
from tilewise.kernels.host.descriptors import matrix_descriptor
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned, rows_of
from tilewise.kernels.quantised_weight import QuantisedWeight
from tilewise.kernels.spec import QuantisedLinearSpec
from tilewise.kernels.tiles.quantised_rows import MOST_RING_ROWS
from tilewise.kernels.triton.quantised.rows import narrow_kernel

__all__ = ["launch", "takes", "why_not"]

STAGES, GROUP = 4, 8
REGISTERS, AT_START, LOADER_REGISTERS = 224, 168, 40
TILE_M, TILE_N = 128, 192
_ROWS_OF_A_PROGRAM = 16
_SCALES = (torch.float32, torch.bfloat16, torch.float16)


def why_not(spec: QuantisedLinearSpec) -> str | None:
    """Say why this kernel, which rounds rows of x to e4m3, does not run a call on Hopper, or return
    None when it does."""
    if not (spec.rounds_rows and spec.in_lanes):
        return "the format of the weight does not round rows"
    is_plain = spec.zeros is None and spec.minimums is None
    if spec.codes != torch.float8_e4m3fn or spec.block != (128, 128) or not is_plain:
        return "weight must be e4m3 in blocks of 128 x 128"
    if spec.has_outer or spec.has_permutation or spec.scales not in _SCALES:
        return "weight must have scales of floats, and nothing else"
    if spec.channels % 128 or spec.outputs % 8:
        return f"K must be a multiple of 128 and N of 8, got {spec.channels} and {spec.outputs}"
    if spec.rows <= MOST_RING_ROWS:
        return f"x must have more than {MOST_RING_ROWS} rows, got {spec.rows}"
    return None


def takes(rows: int, weight: QuantisedWeight) -> bool:
    """Return whether `launch` takes a product of `rows` rows with the weight, for calls that need
    no batch invariance: rows must be more than MOST_RING_ROWS, and the weight's format must round
    them."""
    return weight.rounds_rows and weight.in_lanes and rows > MOST_RING_ROWS


@planned
def launch(maker: Maker, x: Tensor, weight: QuantisedWeight, bias: Tensor | None) -> Tensor:
    """Return y (..., N) of x (..., K), a weight (N, K) and bias (N,); rows of x are rounded to e4m3
    first, with a scale for each 128 channels."""
    outputs, channels = weight.shape
    y = maker.empty((*x.shape[:-1], outputs), x.dtype)
    if y.numel() == 0:
        return y
    x = rows_of(maker, x)
    rows = len(x)
    codes = maker.empty((rows, channels), torch.float8_e4m3fn)
    x_scale = maker.empty((channels // 128, rows), torch.float32)
    maker.launch(
        narrow_kernel,
        (-(-rows // _ROWS_OF_A_PROGRAM), channels // 128),
        x,
        codes.view(torch.uint8),
        x_scale,
        rows,
        channels,
        x.stride(0),
        rows,
        TILE_M=_ROWS_OF_A_PROGRAM,
        num_warps=4,
    )
    tiles = -(-rows // TILE_M) * -(-outputs // TILE_N)
    shape = Shape(STAGES, GROUP, bias is not None, REGISTERS, LOADER_REGISTERS)
    maker.launch(
        narrow_rows_kernel,
        min(tiles, device.sm_count_of(maker.device)),
        matrix_descriptor(codes, TILE_M, 128),
        matrix_descriptor(weight.codes, WIDE.value, 128),
        x_scale,
        weight.scales,
        y if bias is None else bias,
        matrix_descriptor(y.view(-1, outputs), 64, WIDE.value),
        rows,
        outputs,
        channels,
        rows,
        weight.scales.shape[1],
        shape=shape,
        num_warps=4,
        maxnreg=AT_START,
    )
    return y
