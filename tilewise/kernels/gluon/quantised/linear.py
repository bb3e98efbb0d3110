"""The product with a weight of 8 or 4 bits on NVIDIA GPUs: which calls take this kernel, and its
launch."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from tilewise.kernels import device, early
from tilewise.kernels.gluon.quantised.operands import (
    E4M3,
    E5M2,
    FP4,
    INT4,
    INT8,
    MAGIC_WORDS,
    TABLE,
)
from tilewise.kernels.gluon.quantised.rows import Shape, quantised_rows_kernel
from tilewise.kernels.host.launch import launch_now
from tilewise.kernels.quantised_weight import E2M1, QuantisedWeight
from tilewise.kernels.spec import QuantisedLinearSpec
from tilewise.kernels.tiles import quantised_rows as tiles
from tilewise.kernels.tiles.quantised_rows import QuantisedTile
from tilewise.kernels.triton.quantised.linear import kind_of, raw

__all__ = ["launch", "why_not"]

_DTYPES = (torch.float16, torch.bfloat16)
_OLDEST = 80  # mma.sync of bfloat16
_CODES = {
    torch.int8: INT8.value,
    torch.float8_e4m3fn: E4M3.value,
    torch.float8_e5m2: E5M2.value,
}
_WORDS = 8


def why_not(spec: QuantisedLinearSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can."""
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU"
    arch = device.arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if arch < _OLDEST:
        return f"needs compute capability 8.0 or newer, got {arch // 10}.{arch % 10}"
    if spec.dtype not in _DTYPES:
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    step = step_of(spec.block, spec.channels, spec.bits)
    least = 128 // spec.bits
    if spec.has_outer and 1 < spec.outer_block[1] < spec.channels and spec.outer_block[1] % step:
        return f"columns of outer_block must be a multiple of {step}, got {spec.outer_block[1]}"
    if step < least:
        return f"columns that share a scale must be a multiple of {least}, got {spec.block[1]}"
    if spec.channels % least:
        return f"K must be a multiple of {least}, got {spec.channels}"
    if not spec.batch_invariant and spec.rows > tiles.MOST_ROWS:
        return f"x must have at most {tiles.MOST_ROWS} rows to be faster so, got {spec.rows}"
    return None


def step_of(block: tuple[int, int], channels: int, bits: int) -> int:
    """Return the channels of a step: a power of two that divides those of a scale."""
    shared = channels if block[1] >= channels else block[1]
    return math.gcd(shared, 512 // bits)


def launch(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None,
    batch_invariant: bool = False,
    tile: QuantisedTile | None = None,
) -> Tensor:
    """Return y (T, N) of x (T, K), a weight (N, K) and bias (N,).

    Args:
        batch_invariant: True for sums whose order the number of rows does not change.
        tile: instead of the table's, for tuning and tests.
    """
    outputs, channels = weight.shape
    rows = len(x)
    y = torch.empty((rows, outputs), dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    if weight.permutation is not None:
        x = x.index_select(1, weight.permutation)
    if tile is None:
        tile = tiles.tile_of(outputs, channels, rows, batch_invariant=batch_invariant)
    kind, table = _kind(weight.codes.dtype, weight.table, x.dtype)
    minimum = -1 if weight.minimums is None else kind_of(weight.minimums)
    step = step_of(weight.block, channels, weight.bits)
    shape = Shape(
        kind,
        tile.rows,
        tile.tiles,
        tile.warps_n,
        tile.warps_k,
        tile.holds_inputs,
        step,
        _steps(weight.block, channels, step),
        _steps(weight.outer_block, channels, step),
        kind_of(weight.scales),
        weight.outer is not None,
        weight.zeros is not None,
        minimum,
        weight.outer_minimums is not None,
        bias is not None,
        early.mode("rows"),
    )
    words = weight.codes.view(torch.int32)
    outer = weight.outer_minimums if weight.outer is None else weight.outer
    options = {"launch_pdl": True} if shape.early else {}
    launch_now(
        quantised_rows_kernel,
        (-(-outputs // (16 * tile.tiles * tile.warps_n)), -(-rows // tile.rows)),
        x,
        words,
        raw(weight.scales, y),
        raw(weight.zeros, y),
        raw(weight.minimums, y),
        raw(weight.outer, y),
        raw(weight.outer_minimums, y),
        *table,
        y if bias is None else bias,
        y,
        MAGIC_WORDS["bf16" if x.dtype == torch.bfloat16 else "fp16"],
        rows,
        outputs,
        channels,
        words.shape[1],
        x.stride(0),
        weight.scales.shape[1],
        1 if outer is None else outer.shape[1],
        weight.block[0],
        weight.outer_block[0],
        shape=shape,
        num_warps=tile.warps_n * tile.warps_k,
        **options,
    )
    return y


def _steps(block: tuple[int, int], channels: int, step: int) -> int:
    """Return how many steps share a scale; 0 for all of a row."""
    return 0 if block[1] >= channels else block[1] // step


@functools.cache
def _kind(
    codes: torch.dtype, table: tuple[float, ...] | None, dtype: torch.dtype
) -> tuple[int, tuple[int, ...]]:
    """Return the kind of codes, and a general table as eight words of bytes, see `operands`."""
    if codes != torch.uint8:
        return _CODES[codes], (0,) * _WORDS
    if table is None:
        return INT4.value, (0,) * _WORDS
    if table == E2M1:
        return FP4.value, (0,) * _WORDS
    narrow = torch.tensor(table).to(dtype).view(torch.uint8).view(2, 8, 2)  # half, entry, byte
    words = narrow.transpose(1, 2).contiguous().view(-1).view(torch.int32)
    return TABLE.value, tuple(words.tolist())
