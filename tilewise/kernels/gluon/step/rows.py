"""A product of few rows with a weight matrix on Hopper: TMA rings, WGMMA, and nothing padded to 64.

What: y = x weight^T + bias for up to 256 rows of x, or any number of them in tiles.
Grid: (tiles of outputs * tiles of rows * parts of K,), parts fastest, then rows.
One CTA: TILE_N outputs of a tile of rows, or of all, over its part of K. Its warps start copies of
weight and x a ring ahead and multiply them as they come; the last CTA of a tile to end adds up the
parts.
Traffic: the weight once, for each further tile of rows from L2; x from L2 once a CTA; with parts 8
bytes for each output, row and part.
Numerics: products of 16-bit numbers, summed in float32 along K, then parts in their order: what a
row of y is does not depend on how many others there are, nor on which CTA ends last.

The weight is WGMMA's left operand and x its right one: rows are the columns of the sum, of which
there may be 8, and outputs its rows, of which there are always plenty.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels import early
from tilewise.kernels.gluon.device.barriers import barriers
from tilewise.kernels.gluon.device.compat import partition_barrier, tma_load
from tilewise.kernels.gluon.device.early import await_previous, begin_next
from tilewise.kernels.gluon.device.warpgroup import sum_layout

_FIRST = gl.constexpr(early.FIRST)


class Shape(NamedTuple):
    """Constexpr: the tile sizes, stages, parts of K and features of `linear_rows_kernel`."""

    rows: int  # rows of x, padded: 8, 16, 32 ... 256
    tile_n: int  # outputs of a CTA, 64 for each warpgroup or a multiple
    tile_k: int  # channels of a stage
    stages: int
    parts: int  # CTAs that share a tile of outputs
    num_warps: int
    early: int  # mode of `kernels.early`: the weight is loaded while the kernel before runs
    has_bias: bool
    keeps_parts: bool = False  # their sums are left to who reads y
    in_tiles: bool = False  # x is cut into tiles of `rows` rows each


class Ring(NamedTuple):
    """Shared memory: stages of the weight and of x, and barriers that open when one is filled."""

    weight: object
    x: object
    full: object


@gluon.constexpr_function
def _store_layout(num_warps, tile_n):
    """Return the layout in which 16-bit y (rows, outputs) is stored: 16 bytes a thread, along
    rows."""
    across = min(32, tile_n // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def _leave_layout(num_warps, tile_n):
    """Return the layout in which float32 y (rows, outputs) is stored: 16 bytes a thread, along
    rows."""
    across = min(32, tile_n // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.jit
def _load(weight, x, ring, output, row, channel, stage):
    """Start the copies of one stage: the weight from (output, channel), and x from (row, channel)
    on."""
    full = ring.full.index(stage)
    mbarrier.expect(full, weight.block_type.nbytes + x.block_type.nbytes)
    tma_load(weight, [output, channel], full, ring.weight.index(stage))
    tma_load(x, [row, channel], full, ring.x.index(stage))


@gluon.jit
def _begin(weight, x, ring, output, row, channel, count, shape: gl.constexpr):
    """Start the copies of the first `count` stages; with shape.early the weight's before the kernel
    before has ended, and x's after."""
    if shape.early:
        # The next kernel may begin where there is room: it waits for this one's end as well.
        if shape.early == _FIRST:
            begin_next(shape.num_warps)
        for stage in range(count):
            full = ring.full.index(stage)
            mbarrier.expect(full, weight.block_type.nbytes + x.block_type.nbytes)
            at = [output, channel + stage * shape.tile_k]
            tma_load(weight, at, full, ring.weight.index(stage))
        # No kernel writes the weight; whatever else is read or written follows the kernel before.
        await_previous(shape.num_warps)
        if shape.early != _FIRST:
            begin_next(shape.num_warps)
        for stage in range(count):
            at = [row, channel + stage * shape.tile_k]
            tma_load(x, at, ring.full.index(stage), ring.x.index(stage))
    else:
        for stage in range(count):
            _load(weight, x, ring, output, row, channel + stage * shape.tile_k, stage)


@gluon.jit
def _multiply(weight, x, ring, output, row, first, steps, shape: gl.constexpr):
    """Return float32 (TILE_N, rows): weight times x^T over `steps` stages of TILE_K channels.

    `_begin` has started the copies of the first stages; those of later ones are started here.

    Args:
        weight, x: the TMA descriptors.
        ring: the stages in shared memory and their barriers.
        output, row: the first output and the first row of the tile.
        first: the first channel.
    """
    layout: gl.constexpr = sum_layout(shape.rows, shape.num_warps)
    size: gl.constexpr = [shape.tile_n, shape.rows]
    acc = gl.zeros(size, gl.float32, layout)
    for step in range(steps):
        stage = step % shape.stages
        mbarrier.wait(ring.full.index(stage), (step // shape.stages) & 1)
        right = ring.x.index(stage).permute((1, 0))
        acc = warpgroup_mma(ring.weight.index(stage), right, acc, is_async=True)
        if shape.in_tiles:
            # The product before is done; this one goes on while its stage is filled again.
            acc = warpgroup_mma_wait(1, deps=(acc,))
            ahead = step + shape.stages - 1
            if ahead < steps:
                partition_barrier()
                channel = first + ahead * shape.tile_k
                _load(weight, x, ring, output, row, channel, ahead % shape.stages)
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            ahead = step + shape.stages
            if ahead < steps:
                partition_barrier()  # every warp's part of the product is done
                _load(weight, x, ring, output, row, first + ahead * shape.tile_k, stage)
    if shape.in_tiles:
        acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc


@gluon.jit
def places(shape: gl.constexpr):
    """Return int32 (TILE_N, rows): where each sum of a CTA lies in its share of the workspace, in
    the layout of sums."""
    layout: gl.constexpr = sum_layout(shape.rows, shape.num_warps)
    output = gl.arange(0, shape.tile_n, gl.SliceLayout(1, layout))
    row = gl.arange(0, shape.rows, gl.SliceLayout(0, layout))
    return gl.expand_dims(output * shape.rows, 1) + gl.expand_dims(row, 0)


@gluon.jit
def finish(total, bias, y, first_output, first_row, rows, outputs, shape: gl.constexpr):
    """Add the bias to sums (TILE_N, rows), round them, and store their transpose to y.

    Args:
        first_output, first_row: the place of the tile in y.
        rows, outputs: the sizes of y.
    """
    if shape.has_bias:
        output = first_output + gl.arange(0, shape.tile_n, gl.SliceLayout(1, total.type.layout))
        added = gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)
        total = total + gl.expand_dims(added, 1)
    layout: gl.constexpr = _store_layout(shape.num_warps, shape.tile_n)
    rounded = gl.convert_layout(total.to(y.dtype.element_ty).permute((1, 0)), layout)
    row = first_row + gl.expand_dims(gl.arange(0, shape.rows, gl.SliceLayout(1, layout)), 1)
    output = first_output + gl.arange(0, shape.tile_n, gl.SliceLayout(0, layout))
    output = gl.expand_dims(output, 0)
    at = row.to(gl.int64) * outputs + output
    gl.store(y + at, rounded, mask=(row < rows) & (output < outputs))


@gluon.jit
def finish_parts(
    acc, place, tile, share, sums, arrived, bias, y, output, row, rows, outputs, shape: gl.constexpr
):
    """Store the sums of a part; the last part of a tile adds all of them, in order, and finishes.

    place: where sums lie in a share of the workspace, in the layout of `acc`.
    share: the number of the part's share; those of a tile begin at tile * shape.parts.
    """
    SIZE: gl.constexpr = shape.tile_n * shape.rows
    PARTS: gl.constexpr = shape.parts
    mine = sums + share.to(gl.int64) * SIZE
    gl.store(mine + place, acc)
    partition_barrier()  # all warps have stored what one of them tells of
    before = gl.atomic_add(arrived + tile, 1, sem="acq_rel")
    if before == PARTS - 1:
        gl.atomic_xchg(arrived + tile, 0)
        theirs = sums + tile.to(gl.int64) * (PARTS * SIZE)
        total = gl.load(theirs + place, cache_modifier=".cg")
        for other in gl.static_range(1, PARTS):
            total += gl.load(theirs + (other * SIZE + place), cache_modifier=".cg")
        finish(total, bias, y, output, row, rows, outputs, shape)


@gluon.jit
def _leave(acc, sums, part, first_output, first_row, rows, outputs, shape: gl.constexpr):
    """Store the sums (TILE_N, rows) of part number `part`, transposed, to `sums` (parts, rows,
    outputs)."""
    layout: gl.constexpr = _leave_layout(shape.num_warps, shape.tile_n)
    turned = gl.convert_layout(acc.permute((1, 0)), layout)
    row = first_row + gl.expand_dims(gl.arange(0, shape.rows, gl.SliceLayout(1, layout)), 1)
    output = first_output + gl.arange(0, shape.tile_n, gl.SliceLayout(0, layout))
    output = gl.expand_dims(output, 0)
    at = (part * rows + row).to(gl.int64) * outputs + output
    gl.store(sums + at, turned, mask=(row < rows) & (output < outputs))


@gluon.jit(do_not_specialize=["rows", "channels", "part_channels"])
def linear_rows_kernel(
    weight, x, bias, y, sums, arrived, rows, outputs, channels, part_channels, shape: gl.constexpr
):
    """Compute y = x weight^T + bias, (rows, N), for few rows, or the sums of each part of K with
    shape.keeps_parts; see the module's docstring.

    weight, x: descriptors of (N, K) and (rows, K); sums: float32, TILE_N * shape.rows for each CTA,
    and arrived: int32 zeros, one for each tile of y, which are zeros again afterwards; both are
    used only with more than one part. With keeps_parts sums is (parts, rows, N), the result, and y
    is not written. part_channels: of a part, a multiple of the stages' channels.
    """
    ring = Ring(
        gl.allocate_shared_memory(
            weight.dtype, [shape.stages, shape.tile_n, shape.tile_k], weight.layout
        ),
        gl.allocate_shared_memory(x.dtype, [shape.stages, shape.rows, shape.tile_k], x.layout),
        barriers(shape.stages, 1),
    )
    fence_async_shared()
    partition_barrier()
    tile = gl.program_id(0) // shape.parts
    part = gl.program_id(0) - tile * shape.parts
    output = tile * shape.tile_n
    row = tile * 0
    if shape.in_tiles:
        row_tiles = gl.cdiv(rows, shape.rows)
        output = tile // row_tiles * shape.tile_n
        row = tile % row_tiles * shape.rows
    first = part * part_channels
    steps = gl.cdiv(gl.minimum(part_channels, channels - first), shape.tile_k)
    if shape.in_tiles:
        steps = gl.maximum(steps, 1)  # known, or ptxas would wait for each instruction of WGMMA
    # In tiles a stage is filled again a step later, so that products follow one another.
    ready: gl.constexpr = shape.stages - 1 if shape.in_tiles else shape.stages
    _begin(weight, x, ring, output, row, first, gl.minimum(steps, ready), shape)
    acc = _multiply(weight, x, ring, output, row, first, steps, shape)
    if shape.keeps_parts:
        _leave(acc, sums, part, output, row, rows, outputs, shape)
    elif shape.parts == 1:
        finish(acc, bias, y, output, row, rows, outputs, shape)
    else:
        place, share = places(shape), gl.program_id(0)
        finish_parts(
            acc, place, tile, share, sums, arrived, bias, y, output, row, rows, outputs, shape
        )
