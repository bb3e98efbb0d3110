"""Tiles of mma.sync: where its operands and sums lie, and how they come from memory by cp.async.

What: layouts, copies of rows of a tensor to swizzled shared memory, and products of such tiles.
Grid: none, inlined into the kernels.
One call: four or eight warps, 16 rows of a sum each.
Traffic: copies bring each row once; rows outside of a range are zeros, and are not read.
Numerics: products of 16-bit inputs with float32 sums.

A sum lies in the registers of its warps as WGMMA's does, so what Hopper's kernels do
with logits is done here by the same functions.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from tilewise.kernels.gluon.visible import reached

CHUNK = gl.constexpr(16)  # channels of one instruction
UNIT = gl.constexpr(8)  # elements of 16 bytes, in which strides are counted


class Rows(NamedTuple):
    """The rows of one head of a tensor, as `copy_rows` reads them."""

    start: object  # the address of its first one
    stride: object  # in units
    begin: object  # rows outside of [begin, end) are zeros
    end: object
    width: object  # channels, in units


@gluon.jit
def rows_of(ptr, b, first, h, strides, begin, end, width):
    """Return the Rows of head h, whose row 0 is row `first` of batch entry b; strides are those of
    (batch, row, head) in units of 16 bytes."""
    at = b.to(gl.int64) * strides[0] + first.to(gl.int64) * strides[1]
    start = ptr + (at + h.to(gl.int64) * strides[2]) * UNIT
    return Rows(start, strides[1], begin, end, width)


@gluon.constexpr_function
def sum_layout(num_warps, across=1):
    """Return the layout of a sum: 16 rows a warp, with `across` warps side by side over its
    columns."""
    return gl.NVMMADistributedLayout([2, 0], [num_warps, across], [16, 8])


@gluon.constexpr_function
def left_layout(num_warps, across=1):
    """Return the register layout of the 16-bit left operand of a product with the sum of
    `sum_layout`."""
    return gl.DotOperandLayout(0, sum_layout(num_warps, across), 2)


@gluon.constexpr_function
def right_layout(num_warps, across=1):
    """Return the register layout of the 16-bit right operand of a product with the sum of
    `sum_layout`."""
    return gl.DotOperandLayout(1, sum_layout(num_warps, across), 2)


@gluon.constexpr_function
def tile_layout(width):
    """Return the layout in shared memory of a tile with rows of `width` 16-bit channels, swizzled
    so that eight rows use all banks."""
    phases = min(8, width // 8)
    return gl.SwizzledSharedLayout(8, 8 // phases, phases, [1, 0])


@gluon.constexpr_function
def copy_layout(width, num_warps):
    """Return the register layout in which threads copy rows of `width` channels, 16 bytes each; a
    warp copies whole rows."""
    across = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.jit
def copy_rows(
    rows, first, memory, words, WARPS: gl.constexpr, MASKED: gl.constexpr, PADDED: gl.constexpr
):
    """Start to copy rows first, first + 1, ... to `memory` (n, width).

    words: None, or (address, number): of row i bit i % 32 of word i / 32 there says whether any
    query sees it; of bit tile -1 all are seen, of -2 none.
    MASKED: some of them may lie outside of [begin, end). PADDED: channels past the width of the
    tensor are zeros.
    """
    N: gl.constexpr = memory.shape[0]
    WIDTH: gl.constexpr = memory.shape[1]
    LAYOUT: gl.constexpr = copy_layout(WIDTH, WARPS)
    row = gl.arange(0, N, gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    start = rows.start + first.to(gl.int64) * rows.stride * UNIT
    at = gl.expand_dims(row * rows.stride * UNIT, 1) + gl.expand_dims(channel, 0)
    if MASKED or PADDED:
        inside = gl.expand_dims(channel < rows.width * UNIT, 0)
        if MASKED:
            seen = (row >= rows.begin - first) & (row < rows.end - first)
            if words is not None:
                address, number = words
                seen = seen & (((reached(address + row // 32, number) >> (row % 32)) & 1) != 0)
            inside = inside & gl.expand_dims(seen, 1)
        async_copy.async_copy_global_to_shared(memory, start + at, mask=inside)
    else:
        async_copy.async_copy_global_to_shared(memory, start + at)
