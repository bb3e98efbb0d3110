"""The product with a weight of 8 or 4 bits on any GPU, for many rows and for what the kernel of few
does not take: values of a part of the weight, which stay in the L2 cache, then torch's product."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned, rows_of
from tilewise.kernels.quantised_weight import E2M1, NIBBLES, QuantisedWeight
from tilewise.kernels.spec import QuantisedLinearSpec
from tilewise.kernels.triton.quantised import values
from tilewise.kernels.triton.quantised.values import values_kernel
from tilewise.kernels.triton.step import invariant_linear

__all__ = ["kind_of", "launch", "raw", "values_of", "why_not"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_AT_ONCE = 1 << 23
"""Values of a part: 16 MiB of bfloat16, which an L2 cache of 40 MiB and more keeps."""
_UNIT = 128  # rows of a part are a multiple
_TILE_N, _TILE_K = 16, 256
_WHOLE = 1 << 30  # columns that share a scale where all of a row do
_COMPUTED = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_KINDS = {
    torch.float8_e8m0fnu: values.E8M0.value,
    torch.float8_e4m3fn: values.E4M3.value,
    torch.float8_e5m2: values.E5M2.value,
}


def why_not(spec: QuantisedLinearSpec) -> str | None:
    """Return why this kernel cannot run `spec`, or None if it can."""
    if spec.dtype not in _DTYPES:
        return f"dtype must be float32, float16 or bfloat16, got {spec.dtype}"
    return None


@planned
def launch(
    maker: Maker,
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    batch_invariant: bool = False,
) -> Tensor:
    """Return y (..., N) = x W^T + bias for x (..., K), in the dtype of x.

    Outputs are taken in parts: a kernel writes the values of a part of W (N, K), which stay in the
    L2 cache, and torch multiplies by them, or `invariant_linear` if batch_invariant.
    """
    outputs, channels = weight.shape
    y = maker.empty((*x.shape[:-1], outputs), x.dtype)
    if y.numel() == 0:
        return y
    x = permuted(maker, rows_of(maker, x), weight)
    each = max(_UNIT, _AT_ONCE // channels // _UNIT * _UNIT)
    for first in range(0, outputs, each):
        end = min(first + each, outputs)
        part = values_of.write(maker, weight, first, end, x.dtype)
        own = () if bias is None else (bias[first:end],)
        goal = y.view(-1, outputs)[:, first:end]
        if batch_invariant:
            few = invariant_linear.launch.write(maker, x, part, *own or (None,))
            maker.compute(_copied, goal, few, like=goal)
        else:
            maker.compute(_multiplied, goal, x, part, *own, like=goal)
    return y


def permuted(maker: Maker, x: Tensor, weight: QuantisedWeight) -> Tensor:
    """Return x (T, K) with its columns in the order of a weight's codes.

    It is x itself for a weight without a permutation, else a result of a step of the plan.
    """
    if weight.permutation is None:
        return x
    like = torch.empty(x.shape, dtype=x.dtype, device="meta")
    return maker.compute(_selected, x, weight.permutation, like=like)


def _selected(x: Tensor, columns: Tensor) -> Tensor:
    return x.index_select(1, columns)


def _copied(goal: Tensor, source: Tensor) -> Tensor:
    return goal.copy_(source)


def _multiplied(goal: Tensor, *operands: Tensor) -> Tensor:
    return goal.copy_(F.linear(*operands))


@planned
def values_of(
    maker: Maker, weight: QuantisedWeight, first: int, end: int, dtype: torch.dtype
) -> Tensor:
    """Return rows first ... end - 1 of a weight W, dequantised to `dtype`, (end - first, K).

    Columns are in the order of the codes: a permutation of the weight is not undone.
    """
    columns = weight.shape[1]
    w = maker.empty((end - first, columns), dtype)
    outer = weight.outer if weight.outer is not None else weight.outer_minimums
    blocks = (
        _columns(weight.block, columns),
        _columns(weight.outer_block, columns) if weight.has_outer else _WHOLE,
    )
    maker.launch(
        values_kernel,
        (-(-(end - first) // _TILE_N), -(-columns // _TILE_K)),
        raw(weight.codes, w),
        raw(weight.scales, w),
        raw(weight.zeros, w),
        raw(weight.minimums, w),
        raw(weight.outer, w),
        raw(weight.outer_minimums, w),
        weight.table or (0.0,) * NIBBLES,
        w,
        first,
        end - first,
        columns,
        weight.scales.shape[1],
        1 if outer is None else outer.shape[1],
        weight.block[0],
        weight.outer_block[0],
        BLOCK=blocks[0],
        OUTER_BLOCK=blocks[1],
        GROUP=math.gcd(_TILE_K, *blocks),
        BITS=weight.bits,
        CODES=kind_of(weight.codes),
        SCALES=kind_of(weight.scales),
        MINIMUMS=kind_of(weight.minimums),
        HAS_TABLE=weight.table is not None,
        IS_E2M1=weight.table == E2M1,
        HAS_ZEROS=weight.zeros is not None,
        HAS_MINIMUMS=weight.minimums is not None,
        HAS_OUTER=weight.outer is not None,
        HAS_OUTER_MINIMUMS=weight.outer_minimums is not None,
        COMPUTED=_COMPUTED[weight.computed],
        IN_LANES=weight.in_lanes,
        SPREAD=weight.in_lanes and weight.is_spread,
        TILE_N=_TILE_N,
        TILE_K=_TILE_K,
    )
    return w


def _columns(block: tuple[int, int], columns: int) -> int:
    """Return the number of columns that share a scale, for `block` (rows, columns) of one scale.

    It is one large number for every weight with a scale for whole rows, so that the kernel is
    compiled once for these.
    """
    return _WHOLE if block[1] >= columns else block[1]


def kind_of(tensor: Tensor | None) -> int:
    """Return how a kernel reads the numbers of a tensor: a constant of `values`, PLAIN for None."""
    return values.PLAIN.value if tensor is None else _KINDS.get(tensor.dtype, values.PLAIN.value)


def raw(tensor: Tensor | None, absent: Tensor) -> Tensor:
    """Return a tensor as kernels take it: 8-bit floats are viewed as bytes.

    For None it is `absent`, any tensor, which the kernel does not read.
    """
    if tensor is None:
        return absent
    return tensor.view(torch.uint8) if tensor.dtype in _KINDS else tensor
