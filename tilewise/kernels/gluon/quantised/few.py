"""A product of up to 16 rows with a weight of 8 or 4 bits on Hopper: a TMA ring of codes, mma.sync.

What: y = x W^T + bias, W[n, k] = (value(code) - zero) * scale - minimum; see `QuantisedWeight`.
Grid: (tiles of 64 outputs * parts of K,), parts fastest.
One CTA: 64 outputs, 16 of each of four warps, over its part of K. One warp copies codes and x a
ring ahead. The last CTA of a tile to end adds up the parts.
Traffic: the codes and scales once; x from L2 once a CTA; with parts 8 bytes for each output, row
and part.
Numerics: as `ring` has them.

A product of WGMMA with 8 rows takes as long as one with 32: of few rows those of mma.sync, 16
outputs by 8 rows, take half. Codes lie in the order of lanes, see `QuantisedWeight.in_lanes`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2

from tilewise.kernels import early
from tilewise.kernels.gluon.device.barriers import barriers, release_loaded
from tilewise.kernels.gluon.device.compat import tma_load
from tilewise.kernels.gluon.device.early import await_previous, begin_next
from tilewise.kernels.gluon.quantised.operands import (
    BLOCK_WORDS,
    FOLDED,
    bits_of,
    folded_registers,
    lanes_operand,
    lanes_registers,
    lanes_words,
)
from tilewise.kernels.gluon.quantised.ring import columns, words_of
from tilewise.kernels.gluon.quantised.scales import (
    base_of,
    has_offset,
    negated_zeros,
    scale_and_offset,
    stage_scales,
)
from tilewise.kernels.gluon.step.rows import finish, finish_parts

_FIRST = gl.constexpr(early.FIRST)
_LOADER = gl.constexpr(24)  # registers of a thread that copies
CHUNK = gl.constexpr(64)  # channels of x that lie together: 128 bytes


class Shape(NamedTuple):
    """Constexpr: the sizes and features that change the code of a product of up to 16 rows: kind of
    codes and scales, rows, stages, parts of K."""

    kind: int  # kind of the codes, see `operands`
    rows: int  # rows of x, padded: 8 or 16
    tile_n: int  # outputs of a CTA: 64
    num_warps: int  # that multiply: 4
    stages: int
    parts: int  # CTAs that share a tile of outputs
    blocks: int  # of 64 bytes of a row in a stage: 1 or 2
    groups: int  # sums of a stage, each times a scale: 1, 2 or 4
    shared: int  # sums in a row that share a scale; 0: all
    outer_shared: int  # likewise an outer scale
    scale_kind: int  # kind of the scales, of `triton.quantised.values`
    has_outer: bool
    has_zeros: bool
    subtracts: bool  # zero points are subtracted from codes
    minimum_kind: int  # -1: none
    has_outer_minimums: bool
    has_bias: bool
    early: int  # mode of `kernels.early`: codes are loaded while the kernel before runs
    pairs: int = 0  # how outputs lie among the weight's rows, of `operands`
    folds: bool = False  # scales are multiplied into operands, see `folded_registers`
    turned: bool = False  # scales lie by words of eight rows, see `QuantisedWeight.lanes`


class Ring(NamedTuple):
    """Shared memory: stages of codes and of x, and their barriers, which open when a stage is
    filled, and when it has been loaded."""

    codes: object
    x: object
    full: object
    empty: object


@gluon.constexpr_function
def few_layout():
    return gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])


@gluon.constexpr_function
def _chunks(shape):
    """Return the number of chunks of CHUNK channels of x in a stage."""
    return shape.blocks * 8 // bits_of(shape.kind)


@gluon.constexpr_function
def _inputs_layout(shape):
    """Return the register layout in which each warp takes (chunks, rows, 64) of x: pairs of
    channels of a lane of 4."""
    chunks = shape.blocks * 8 // bits_of(shape.kind)
    registers = [[0, 0, 1], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    registers += [[size, 0, 0] for size in (1, 2) if size < chunks]
    if shape.rows == 16:
        registers.append([0, 8, 0])
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[0, 0, 0], [0, 0, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, warps, [], [chunks, shape.rows, CHUNK.value]
    )


@gluon.jit
def _bring_codes(codes, x, ring, output, step, stage, shape: gl.constexpr):
    full = ring.full.index(stage)
    mbarrier.expect(full, codes.block_type.nbytes + x.block_type.nbytes)
    at = [output, step * (BLOCK_WORDS * shape.blocks)]
    tma_load(codes, at, full, ring.codes.index(stage))


@gluon.jit
def _bring_x(x, ring, step, stage, shape: gl.constexpr):
    at = [step * _chunks(shape), 0, 0]
    tma_load(x, at, ring.full.index(stage), ring.x.index(stage))


@gluon.jit
def _load_stages(given, shape: gl.constexpr):
    """Run the loader warp: bring the codes and rows of x of this CTA's stages into the ring."""
    codes, x, ring, output, first, steps = given
    ready = gl.minimum(steps, shape.stages)
    if shape.early == _FIRST:
        begin_next(1)
    for stage in range(ready):
        _bring_codes(codes, x, ring, output, first + stage, stage, shape)
    if shape.early:
        # No kernel writes the weight; whatever else is read or written follows the kernel before.
        await_previous(1)
        if shape.early != _FIRST:
            begin_next(1)
    for stage in range(ready):
        _bring_x(x, ring, first + stage, stage, shape)
    for step in range(ready, steps):
        stage = step % shape.stages
        mbarrier.wait(ring.empty.index(stage), (step // shape.stages & 1) ^ 1)
        _bring_codes(codes, x, ring, output, first + step, stage, shape)
        _bring_x(x, ring, first + step, stage, shape)


@gluon.jit
def _split(x):
    """Return x (rows, channels) as its first and its second half of channels."""
    ROWS: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    return gl.split(x.reshape([ROWS, 2, HALF]).permute((0, 2, 1)))


@gluon.jit
def groups_of(x, GROUPS: gl.constexpr):
    """Return a tuple of x (rows, channels / GROUPS), one for each of the GROUPS equal parts of the
    channels of x (rows, channels)."""
    if GROUPS == 1:
        return (x,)
    elif GROUPS == 2:
        return _split(x)
    else:
        low, high = _split(x)
        first, second = _split(low)
        third, fourth = _split(high)
        return (first, second, third, fourth)


@gluon.jit
def _right(x):
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, few_layout(), 2)
    return gl.convert_layout(x.permute((1, 0)), OPERAND, assert_trivial=True)


@gluon.jit
def added(acc, ring, step, raw, constants, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return acc (outputs, rows) plus the product of a step, after its copies have arrived.

    Args:
        raw: the scales that `raw_scales` has loaded for the step.
        constants: the constants by which codes become numbers.
    """
    MMA: gl.constexpr = few_layout()
    CHANNELS: gl.constexpr = _chunks(shape) * CHUNK
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    stage = step % shape.stages
    mbarrier.wait(ring.full.index(stage), (step // shape.stages) & 1)
    words = lanes_words(ring.codes, stage, shape.blocks, shape.pairs)
    x = ring.x.index(stage).load(_inputs_layout(shape)).permute((1, 0, 2))
    inputs = x.reshape([shape.rows, CHANNELS])
    if shape.folds:
        left = lanes_operand(folded_registers(words, raw[0]), shape.kind, DTYPE, LEFT)
        acc = mma_v2(left, _right(inputs), acc)
    else:
        acc = _added_groups(acc, words, inputs, raw, constants, shape, DTYPE)
    return acc


@gluon.jit
def _added_groups(acc, words, inputs, raw, constants, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return acc (outputs, rows) plus the products of a step's `words` and x, `inputs` (rows,
    channels), each group of channels times its scales and less its offsets."""
    MMA: gl.constexpr = few_layout()
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    GROUPS: gl.constexpr = shape.groups
    CHANNELS: gl.constexpr = _chunks(shape) * CHUNK
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    parts = groups_of(inputs, GROUPS)
    pieces = words_of(words, GROUPS)
    scale, offset = scale_and_offset(raw, shape, DTYPE)
    scales = columns(scale, GROUPS, ROWS)
    offsets = columns(offset, GROUPS, ROWS)
    zeros = columns(negated_zeros(raw, shape, DTYPE), GROUPS, ROWS)
    size: gl.constexpr = [shape.tile_n, shape.rows]
    left_size: gl.constexpr = [shape.tile_n, CHANNELS // GROUPS]
    nothing = gl.zeros(size, gl.float32, MMA)
    for group in gl.static_range(GROUPS):
        right = _right(parts[group])
        registers = lanes_registers(pieces[group], zeros[group], constants, shape.kind, DTYPE)
        part = mma_v2(lanes_operand(registers, shape.kind, DTYPE, LEFT), right, nothing)
        acc = acc + part * gl.expand_dims(scales[group], 1)
        if has_offset(shape):
            ones = gl.full(left_size, 1.0, DTYPE, LEFT)
            row_sum = mma_v2(ones, right, nothing)
            acc = acc - row_sum * gl.expand_dims(offsets[group], 1)
    return acc


@gluon.jit
def _multiply_stages(given, shape: gl.constexpr):
    """Run the four warps that multiply: compute the CTA's outputs, over its part of K, and write
    them.

    Of several parts each is stored in `sums`; the last CTA of the tile to end adds them, in their
    order, and writes the outputs.
    """
    tensors, at, bias, y, sums, arrived, ring, constants = given
    output, first, steps, rows, outputs, grid, outer_grid, block_rows, outer_rows = at
    DTYPE: gl.constexpr = ring.x.dtype
    bases = base_of(output, outputs, grid, outer_grid, block_rows, outer_rows, shape)
    last = steps - 1
    size: gl.constexpr = [shape.tile_n, shape.rows]
    acc = gl.zeros(size, gl.float32, few_layout())
    raw = stage_scales(tensors, bases, first, grid, shape)
    ahead = stage_scales(tensors, bases, first + gl.minimum(1, last), grid, shape)
    for step in range(steps):
        acc = added(acc, ring, step, raw, constants, shape, DTYPE)
        release_loaded(ring.empty.index(step % shape.stages))
        raw = ahead
        ahead = stage_scales(tensors, bases, first + gl.minimum(step + 2, last), grid, shape)
    if shape.folds:
        acc = acc * FOLDED
    if shape.early:
        await_previous(shape.num_warps)
    row = output * 0
    if shape.parts == 1:
        finish(acc, bias, y, output, row, rows, outputs, shape)
    else:
        share = gl.program_id(0)
        tile = share // shape.parts
        out = gl.arange(0, shape.tile_n, gl.SliceLayout(1, few_layout()))
        column = gl.arange(0, shape.rows, gl.SliceLayout(0, few_layout()))
        place = gl.expand_dims(out * shape.rows, 1) + gl.expand_dims(column, 0)
        finish_parts(
            acc, place, tile, share, sums, arrived, bias, y, output, row, rows, outputs, shape
        )


@gluon.jit(
    do_not_specialize=[
        "table0",
        "table1",
        "table2",
        "table3",
        "table4",
        "table5",
        "table6",
        "table7",
        "magic_word",
        "rows",
        "block_rows",
        "outer_rows",
        "stages",
        "part_stages",
    ]
)
def quantised_few_kernel(
    codes,
    x,
    scales,
    zeros,
    minimums,
    outer,
    outer_minimums,
    table0,
    table1,
    table2,
    table3,
    table4,
    table5,
    table6,
    table7,
    bias,
    y,
    sums,
    arrived,
    magic_word,
    rows,
    outputs,
    stages,
    part_stages,
    grid,
    outer_grid,
    block_rows,
    outer_rows,
    shape: gl.constexpr,
):
    """Compute y = x W^T + bias, (rows, outputs), for up to 16 rows by mma.sync, from codes of 8 or
    4 bits in the order of lanes; see the module's docstring.

    codes: descriptor of int32 (outputs, words), x: of (chunks, rows, 64) boxes; grid, outer_grid:
    columns of scales and of outer; block_rows, outer_rows: the rows that share them; stages,
    part_stages: the stages of K, and of a part of it; sums and arrived: as `linear_rows_kernel` has
    them.
    """
    ring = Ring(
        gl.allocate_shared_memory(
            codes.dtype, [shape.stages, shape.tile_n, BLOCK_WORDS * shape.blocks], codes.layout
        ),
        gl.allocate_shared_memory(
            x.dtype, [shape.stages, _chunks(shape), shape.rows, CHUNK], x.layout
        ),
        barriers(shape.stages, 1),
        barriers(shape.stages, 1),
    )
    fence_async_shared()
    tile = gl.program_id(0) // shape.parts
    part = gl.program_id(0) - tile * shape.parts
    output = tile * shape.tile_n
    first = part * part_stages
    steps = gl.maximum(gl.minimum(part_stages, stages - first), 1)
    tensors = (scales, zeros, minimums, outer, outer_minimums)
    constants = (
        (table0, table1, table2, table3, table4, table5, table6, table7),
        magic_word,
    )
    at = (output, first, steps, rows, outputs, grid, outer_grid, block_rows, outer_rows)
    given = (tensors, at, bias, y, sums, arrived, ring, constants)
    gl.warp_specialize(
        [
            (_multiply_stages, (given, shape)),
            (_load_stages, ((codes, x, ring, output, first, steps), shape)),
        ],
        [1],
        [_LOADER],
    )
