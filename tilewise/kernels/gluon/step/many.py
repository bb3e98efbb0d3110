"""A product of many rows with a weight matrix on Hopper, whose sums are those of one row.

What: y = x weight^T + bias for any number of rows of x.
Grid: as many CTAs as run at a time; each computes tiles until there are none left.
One CTA: TILE_M rows x TILE_N outputs a tile, over all of K. Its warps start copies of x and weight
a ring ahead, beyond the end of a tile: the next one's come while this one is stored.
Traffic: x once for each tile of outputs, the weight once for each tile of rows, mostly from L2:
tiles are taken in groups of neighbours in both directions; y through shared memory and TMA.
Numerics: products of 16-bit numbers, summed in float32 along each part of K, the parts added in
their order: bit for bit what `rows` gives, where rows and outputs have changed places. That they
may is not written anywhere; `tests/ops/test_linear.py` compares them on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.device.barriers import barriers
from tilewise.kernels.gluon.device.compat import partition_barrier, tma_load, tma_store
from tilewise.kernels.gluon.device.warpgroup import sum_layout

STEP = gl.constexpr(64)  # channels of a stage


class Shape(NamedTuple):
    """Constexpr: the tile sizes, stages, order of tiles and features of `linear_many_kernel`."""

    tile_m: int  # rows of a tile, 64 for each warpgroup or a multiple
    tile_n: int  # outputs of a tile
    stages: int  # at least 2: one is filled again when the product after it has begun
    columns: int  # columns of y that are stored at a time: those of a tile, or half of them
    group: int  # tiles of rows whose tiles of outputs are taken together
    num_warps: int
    has_parts: bool  # K is summed in several parts
    has_bias: bool


class Ring(NamedTuple):
    """Shared memory: stages of x and of the weight, and barriers that open when one is filled."""

    x: object
    weight: object
    full: object


class Ahead(NamedTuple):
    """The next copy: step `step` of the tile at (row, output), the count-th copy of all."""

    count: object
    tile: object
    step: object
    row: object
    output: object


@gluon.jit
def _corner(tile, rows, outputs, shape: gl.constexpr):
    """Return the first row and the first output of tile number `tile`; tiles of shape.group rows of
    tiles are numbered together."""
    tiles_m = gl.cdiv(rows, shape.tile_m)
    tiles_n = gl.cdiv(outputs, shape.tile_n)
    of_group = shape.group * tiles_n
    first = tile // of_group * shape.group
    high = gl.minimum(tiles_m - first, shape.group)
    inside = tile % of_group
    return (first + inside % high) * shape.tile_m, inside // high * shape.tile_n


@gluon.jit
def _bring(x, weight, ring, ahead, tiles, steps, rows, outputs, shape: gl.constexpr):
    """Start to copy one step of x and the weight, if there is one left; return the next `Ahead`.

    Args:
        ahead: the step to copy.
        tiles, steps: the number of tiles, and of steps along K.
        rows, outputs: the sizes of y.
    """
    count, tile, step, row, output = ahead
    if tile < tiles:
        stage = count % shape.stages
        full = ring.full.index(stage)
        mbarrier.expect(full, x.block_type.nbytes + weight.block_type.nbytes)
        tma_load(x, [row, step * STEP], full, ring.x.index(stage))
        tma_load(weight, [output, step * STEP], full, ring.weight.index(stage))
    step += 1
    if step == steps:
        step = step * 0
        tile += gl.num_programs(0)
        if tile < tiles:
            row, output = _corner(tile, rows, outputs, shape)
    return Ahead(count + 1, tile, step, row, output)


@gluon.jit
def _store(acc, y, memory, row, output, dtype: gl.constexpr):
    """Round sums (TILE_M, columns), and start to copy them to y at (row, output) through shared
    `memory` of that shape."""
    tma.store_wait(0)  # what was in this memory before has been read
    partition_barrier()
    memory.store(acc.to(dtype))
    fence_async_shared()
    partition_barrier()
    tma_store(y, [row, output], memory)


@gluon.jit
def _finish(acc, bias, y, memory, row, output, outputs, shape: gl.constexpr):
    """Add the bias to the sums of a tile, round them, and start to copy them to y at (row, output),
    in one or two pieces of columns."""
    if shape.has_bias:
        column = output + gl.arange(0, shape.tile_n, gl.SliceLayout(0, acc.type.layout))
        added = gl.load(bias + column, mask=column < outputs, other=0.0).to(gl.float32)
        acc = acc + gl.expand_dims(added, 0)
    dtype: gl.constexpr = memory.dtype
    if shape.columns == shape.tile_n:
        _store(acc, y, memory, row, output, dtype)
    else:
        half: gl.constexpr = sum_layout(shape.columns, shape.num_warps)
        left, right = gl.split(acc.reshape([shape.tile_m, 2, shape.columns]).permute((0, 2, 1)))
        left = gl.convert_layout(left, half, assert_trivial=True)
        right = gl.convert_layout(right, half, assert_trivial=True)
        _store(left, y, memory, row, output, dtype)
        _store(right, y, memory, row, output + shape.columns, dtype)


@gluon.jit
def _part(
    x, weight, ring, ahead, count, first, last, tiles, steps, rows, outputs, shape: gl.constexpr
):
    """Return the float32 sums of steps first ... last - 1 of a tile, the next `Ahead` and the new
    count.

    Args:
        ahead: the next copy, an `Ahead`.
        count: the number of steps before, which decides the stage.
    """
    size: gl.constexpr = [shape.tile_m, shape.tile_n]
    acc = gl.zeros(size, gl.float32, sum_layout(shape.tile_n, shape.num_warps))
    for step in range(first, last):
        stage = count % shape.stages
        mbarrier.wait(ring.full.index(stage), (count // shape.stages) & 1)
        right = ring.weight.index(stage).permute((1, 0))
        acc = warpgroup_mma(ring.x.index(stage), right, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        if step > first:
            partition_barrier()  # every warp's share of the product before is done
            ahead = _bring(x, weight, ring, ahead, tiles, steps, rows, outputs, shape)
        count += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    partition_barrier()
    ahead = _bring(x, weight, ring, ahead, tiles, steps, rows, outputs, shape)
    return acc, ahead, count


@gluon.jit(do_not_specialize=["rows", "channels", "part_channels"])
def linear_many_kernel(
    x, weight, bias, y, rows, outputs, channels, part_channels, shape: gl.constexpr
):
    """Compute y = x weight^T + bias for many rows, with sums that are bit for bit those of
    `linear_rows_kernel`; CTAs stay and take tiles in turn. See the module's docstring.

    x, weight, y: descriptors of (rows, K), (N, K) and (rows, N); part_channels: of a part, a
    multiple of a stage's.
    """
    gl.static_assert(shape.stages >= 2)
    ring = Ring(
        gl.allocate_shared_memory(x.dtype, [shape.stages, shape.tile_m, STEP], x.layout),
        gl.allocate_shared_memory(weight.dtype, [shape.stages, shape.tile_n, STEP], weight.layout),
        barriers(shape.stages, 1),
    )
    memory = gl.allocate_shared_memory(y.dtype, [shape.tile_m, shape.columns], y.layout)
    fence_async_shared()
    partition_barrier()
    tiles = gl.cdiv(rows, shape.tile_m) * gl.cdiv(outputs, shape.tile_n)
    steps = gl.cdiv(channels, STEP)
    tile = gl.program_id(0)
    row, output = _corner(tile, rows, outputs, shape)
    ahead = Ahead(tile * 0, tile, tile * 0, row, output)
    for _ in range(shape.stages):
        ahead = _bring(x, weight, ring, ahead, tiles, steps, rows, outputs, shape)
    count = tile * 0  # of the steps that have been multiplied
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, output = _corner(tile, rows, outputs, shape)
        if shape.has_parts:
            part_steps = part_channels // STEP
            size: gl.constexpr = [shape.tile_m, shape.tile_n]
            layout: gl.constexpr = sum_layout(shape.tile_n, shape.num_warps)
            total = gl.full(size, -0.0, gl.float32, layout)  # plus the first part is that part
            for first in range(0, steps, part_steps):
                last = gl.minimum(first + part_steps, steps)
                acc, ahead, count = _part(
                    x, weight, ring, ahead, count, first, last, tiles, steps, rows, outputs, shape
                )
                total = total + acc
        else:
            total, ahead, count = _part(
                x, weight, ring, ahead, count, 0, steps, tiles, steps, rows, outputs, shape
            )
        _finish(total, bias, y, memory, row, output, outputs, shape)
    tma.store_wait(0)
