"""A product of many rows of e4m3 with a weight of e4m3, both with scales of 128 channels, on
Hopper.

What: y = x W^T + bias, x[t, k] = x8[t, k] * x_scale[k / 128, t], W[n, k] = W8[n, k] * scale[n /
128, k / 128].
Grid: as many CTAs as run at a time; each computes tiles until there are none left.
One CTA: 128 rows x 192 outputs a tile, over all of K: a warp brings x and the weight by TMA, 128
channels a stage; two warpgroups multiply 64 rows each by WGMMA, 64 outputs at a time.
Traffic: x once for each tile of outputs, the weight once for each tile of rows, mostly from L2.
Numerics: sums of 128 channels by the tensor cores, times both scales in float32, added in float32.
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
from tilewise.kernels.gluon.device.e4m3 import byte_sum_layout as sum_layout

CHANNELS = gl.constexpr(128)  # of a stage, which share a scale
TILE_M, TILE_N = gl.constexpr(128), gl.constexpr(192)
BLOCK = gl.constexpr(128)  # outputs that share a scale
WIDE = gl.constexpr(64)  # outputs of a product
PARTS = gl.constexpr(3)  # of a tile's outputs


class Shape(NamedTuple):
    """Constexpr: the stages, the order of tiles, the bias and the registers of
    `narrow_rows_kernel`."""

    stages: int
    group: int  # tiles of rows whose tiles of outputs are taken together
    has_bias: bool
    registers: int
    loader_registers: int = 40


@gluon.jit
def _corner(tile, rows, outputs, shape: gl.constexpr):
    """Return the first row and the first output of tile number `tile`; tiles of shape.group rows of
    tiles are numbered together."""
    tiles_m = gl.cdiv(rows, TILE_M)
    tiles_n = gl.cdiv(outputs, TILE_N)
    of_group = shape.group * tiles_n
    first = tile // of_group * shape.group
    high = gl.minimum(tiles_m - first, shape.group)
    inside = tile % of_group
    return (first + inside % high) * TILE_M, inside // high * TILE_N


@gluon.jit
def _load_tiles(x, weight, x_ring, weight_ring, full, empty, sizes, shape: gl.constexpr):
    """Run the loader warp: bring x and the weight of all stages of this CTA's tiles into the
    rings."""
    rows, outputs, steps, tiles = sizes
    count = gl.program_id(0) * 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, output = _corner(tile, rows, outputs, shape)
        for step in range(0, steps):
            stage = count % shape.stages
            mbarrier.wait(empty.index(stage), (count // shape.stages & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (TILE_M + TILE_N) * CHANNELS)
            tma_load(x, [row, step * CHANNELS], bar, x_ring.index(stage))
            for part in gl.static_range(PARTS):
                place = weight_ring.index(stage * PARTS + part)
                tma_load(weight, [output + WIDE * part, step * CHANNELS], bar, place)
            count += 1


@gluon.jit
def _begin(left, right):
    """Start the product (64, WIDE) of 64 rows and WIDE outputs of a stage, and return the
    asynchronous sum."""
    zeros = gl.zeros([64, WIDE], gl.float32, sum_layout(WIDE))
    return warpgroup_mma(left, right.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add(total, part, factor, LATER: gl.constexpr):
    """Wait until at most LATER products are still running, and return total plus the product `part`
    times factor (64,)."""
    part = warpgroup_mma_wait(LATER, deps=(part,))
    return total + part * gl.expand_dims(factor, 1)


@gluon.jit
def _store(acc, y, memory, row, output, bias, outputs, shape: gl.constexpr):
    """Add the bias to sums (64, WIDE), round them, and start to copy them to y at (row, output)
    through shared `memory`."""
    if shape.has_bias:
        column = output + gl.arange(0, WIDE, gl.SliceLayout(0, acc.type.layout))
        added = gl.load(bias + column, mask=column < outputs, other=0.0).to(gl.float32)
        acc = acc + gl.expand_dims(added, 0)
    tma.store_wait(0)  # what was in this memory before has been read
    partition_barrier()
    memory.store(acc.to(memory.dtype))
    fence_async_shared()
    partition_barrier()
    tma_store(y, [row, output], memory)


@gluon.jit
def _multiply_tiles(given, sizes, shape: gl.constexpr, PART: gl.constexpr):
    """Run a warpgroup that multiplies: compute and write 64 rows, number PART, of this CTA's
    tiles."""
    x_ring, weight_ring, full, empty, x_scale, scale, grid, bias, y, memory, stride = given
    rows, outputs, steps, tiles = sizes
    layout: gl.constexpr = sum_layout(WIDE)
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    lane = gl.arange(0, 64, of_rows)
    count = gl.program_id(0) * 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        row, output = _corner(tile, rows, outputs, shape)
        row = row + 64 * PART
        # A scale of rows behind the last one is read from it.
        at = gl.minimum(row + lane, rows - 1)
        last = (outputs - 1) // BLOCK
        scale0 = scale + (output // BLOCK).to(gl.int64) * grid
        scale1 = scale + gl.minimum((output + WIDE) // BLOCK, last).to(gl.int64) * grid
        scale2 = scale + gl.minimum((output + 2 * WIDE) // BLOCK, last).to(gl.int64) * grid
        sum0 = gl.zeros([64, WIDE], gl.float32, layout)
        sum1 = sum0
        sum2 = sum0
        for step in range(0, steps):
            # They come while the stage is waited for and multiplied.
            of_x = gl.load(x_scale + step.to(gl.int64) * stride + at)
            factor0 = gl.load(scale0 + step).to(gl.float32)
            factor1 = gl.load(scale1 + step).to(gl.float32)
            factor2 = gl.load(scale2 + step).to(gl.float32)
            stage = count % shape.stages
            mbarrier.wait(full.index(stage), count // shape.stages & 1)
            left = x_ring.index(stage).slice(64 * PART, 64)
            part0 = _begin(left, weight_ring.index(stage * PARTS + 0))
            part1 = _begin(left, weight_ring.index(stage * PARTS + 1))
            sum0 = _add(sum0, part0, of_x * factor0, 1)
            part2 = _begin(left, weight_ring.index(stage * PARTS + 2))
            sum1 = _add(sum1, part1, of_x * factor1, 1)
            sum2 = _add(sum2, part2, of_x * factor2, 0)
            mbarrier.arrive(empty.index(stage), count=1)
            count += 1
        goal = memory.index(PART)
        _store(sum0, y, goal, row, output, bias, outputs, shape)
        _store(sum1, y, goal, row, output + WIDE, bias, outputs, shape)
        _store(sum2, y, goal, row, output + 2 * WIDE, bias, outputs, shape)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["rows"])
def narrow_rows_kernel(
    x, weight, x_scale, scale, bias, y, rows, outputs, channels, stride, grid, shape: gl.constexpr
):
    """Compute y = x W^T + bias, (rows, N), of e4m3 x and weight with scales of 128 channels, for
    many rows; CTAs stay and take tiles in turn. See the module's docstring.

    x, weight, y: descriptors of (rows, K), (N, K) and (rows, N); stride: of a block of 128 channels
    in x_scale; grid: columns of scale.
    """
    x_ring = gl.allocate_shared_memory(x.dtype, [shape.stages, TILE_M, CHANNELS], x.layout)
    weight_ring = gl.allocate_shared_memory(
        weight.dtype, [shape.stages * PARTS, WIDE, CHANNELS], weight.layout
    )
    memory = gl.allocate_shared_memory(y.dtype, [2, 64, WIDE], y.layout)
    full = barriers(shape.stages, 1)
    empty = barriers(shape.stages, 2)
    tiles = gl.cdiv(rows, TILE_M) * gl.cdiv(outputs, TILE_N)
    sizes = (rows, outputs, channels // CHANNELS, tiles)
    given = (x_ring, weight_ring, full, empty, x_scale, scale, grid, bias, y, memory, stride)
    gl.warp_specialize(
        [
            (_multiply_tiles, (given, sizes, shape, 0)),
            (_multiply_tiles, (given, sizes, shape, 1)),
            (_load_tiles, (x, weight, x_ring, weight_ring, full, empty, sizes, shape)),
        ],
        [4, 1],
        [shape.registers, shape.loader_registers],
    )
