"""A product of up to 16 rows with a weight of 8 or 4 bits on Hopper: codes stream past rows of x.

What: y = x W^T + bias, W[n, k] = (value(code) - zero) * scale - minimum; see `QuantisedWeight`.
Grid: (CTAs,), as many as run at once, or a tile of 16 outputs each.
One CTA: tiles of 16 outputs, one after another. Its warps share the channels: each holds its part
of x in registers for all tiles, multiplies by mma.sync, and their sums are added in shared memory.
Where the warps' parts do not make up all channels, a CTA passes over its tiles several times.
Traffic: the codes and scales once, copied several tiles ahead by cp.async; x from L2 once a CTA.
Numerics: as `ring` has them; a row's sum is that of the warps, in a fixed order, and of the passes.

Codes lie in the order of lanes, see `QuantisedWeight.in_lanes`. What a lane multiplies it has
copied itself.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, mma_v2

from tilewise.kernels import early
from tilewise.kernels.gluon.device.barriers import barriers
from tilewise.kernels.gluon.device.compat import partition_barrier, tma_load
from tilewise.kernels.gluon.device.early import await_previous, begin_next
from tilewise.kernels.gluon.quantised.few import CHUNK, groups_of
from tilewise.kernels.gluon.quantised.operands import (
    BLOCK_WORDS,
    FOLDED,
    bits_of,
    folded_registers,
    lanes_numbers,
    lanes_registers,
    sum_layout,
)
from tilewise.kernels.gluon.quantised.ring import channels_of, columns, words_of
from tilewise.kernels.gluon.quantised.scales import (
    bases_layout,
    bases_of,
    has_offset,
    negated_zeros,
    scale_and_offset,
    stage_scales,
)

_FIRST = gl.constexpr(early.FIRST)
TILE = gl.constexpr(16)  # outputs
_BLOCK = gl.constexpr(256)  # words of a block of 64 bytes of each output of a tile


class Shape(NamedTuple):
    """Constexpr: the sizes and features that change the code of a product of up to 16 rows: kind of
    codes and scales, rows, warps, tiles ahead."""

    kind: int  # kind of the codes, see `operands`
    rows: int  # rows of x, padded: 8 or 16
    num_warps: int  # that share the channels
    blocks: int  # of 64 bytes of a row that a warp has in a pass: 1 or 2
    stages: int  # tiles that are copied ahead
    tiles: int  # the most tiles of a CTA if there are several passes, else 0
    groups: int  # sums of a warp in a pass, each times a scale: 1, 2 or 4
    shared: int  # sums in a row that share a scale; 0: all
    outer_shared: int  # likewise an outer scale
    scale_kind: int  # kind of the scales, of `triton.quantised.values`
    has_outer: bool
    has_zeros: bool
    subtracts: bool  # zero points are subtracted from codes
    minimum_kind: int  # -1: none
    has_outer_minimums: bool
    has_bias: bool
    block_rows: int  # rows of the weight that share a scale
    outer_rows: int  # likewise an outer scale
    is_whole: bool  # tiles have 16 outputs each, and passes channels for all warps
    early: int  # mode of `kernels.early`: codes are loaded while the kernel before runs
    folds: bool = False  # scales are multiplied into operands, see `folded_registers`
    turned: bool = False  # scales lie by words of eight rows, see `QuantisedWeight.lanes`


@gluon.constexpr_function
def _doublings(first, end):
    found, size = [], first
    while size < end:
        found.append(size)
        size *= 2
    return found


@gluon.constexpr_function
def _words_layout(shape):
    """Return the register layout of a stage's words (num_warps * blocks * 256,), those of (warp,
    block, output, word): a lane has 16 bytes of each of its two outputs."""
    size = _BLOCK.value * shape.blocks
    registers = [[1], [2], *([[_BLOCK.value]] if shape.blocks == 2 else []), [128]]
    lanes = [[4], [8], [16], [32], [64]]
    warps = [[each] for each in _doublings(size, size * shape.num_warps)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [size * shape.num_warps])


@gluon.constexpr_function
def _inputs_layout(shape):
    """Return the register layout in which warps take x (chunks, rows, 64), each its own chunks, as
    right operands."""
    own = shape.blocks * 8 // bits_of(shape.kind)  # chunks of a warp
    registers = [[0, 0, 1], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    registers += [[each, 0, 0] for each in _doublings(1, own)]
    registers += [[0, each, 0] for each in _doublings(8, shape.rows)]
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[each, 0, 0] for each in _doublings(own, own * shape.num_warps)]
    size = [own * shape.num_warps, shape.rows, CHUNK.value]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], size)


@gluon.constexpr_function
def _partial_layout(shape):
    """Return the register layout in which the sums of warps (num_warps, 16 * rows) are added: a
    warp has all of a column's."""
    columns = TILE.value * shape.rows
    warps = _doublings(1, shape.num_warps)
    registers = [[each, 0] for each in warps[:2]]
    lanes = [[each, 0] for each in warps[2:]]
    free = _doublings(1, columns)
    lanes = [[0, each] for each in free[: 5 - len(lanes)]] + lanes
    free = free[5 - len(warps[2:]) :]
    across = [[0, each] for each in free[: len(warps)]]
    registers += [[0, each] for each in free[len(warps) :]]
    return gl.DistributedLinearLayout(registers, lanes, across, [], [shape.num_warps, columns])


@gluon.constexpr_function
def _partial_memory(shape):
    """Return the layout in shared memory of sums (num_warps, 16 * rows), swizzled so that a warp
    that adds them up reads from all banks."""
    phases = max(1, shape.num_warps // 4)
    return gl.SwizzledSharedLayout(32 // phases, 4, phases, [1, 0])


@gluon.jit
def _pass_of(step, count, shape: gl.constexpr):
    """Return the pass of a step, and the number of its tile among the CTA's `count` ones."""
    passed = step * 0
    if shape.tiles > 0:
        passed = step // count
    return passed, step - passed * count


@gluon.jit
def _copy(place, ring, step, steps, shape: gl.constexpr):
    """Start to copy the codes of a step, if there is one."""
    words, offset, block, output, first, count, per_row, outputs = place
    WORDS: gl.constexpr = BLOCK_WORDS * shape.blocks * shape.num_warps  # of an output, in a pass
    if step < steps:
        passed, number = _pass_of(step, count, shape)
        tile = (first + number * gl.num_programs(0)) * TILE
        start = words + tile.to(gl.int64) * per_row + passed * WORDS
        memory = ring.index(step % shape.stages)
        if shape.is_whole:
            async_copy.async_copy_global_to_shared(memory, start + offset)
        else:
            left = per_row // BLOCK_WORDS - passed * (shape.blocks * shape.num_warps)
            inside = (block < left) & (output < outputs - tile)
            async_copy.async_copy_global_to_shared(memory, start + offset, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _bring(x, memory, arrival, passed, shape: gl.constexpr):
    """Start to copy the rows of x of a pass, zeros behind the last row and channel."""
    mbarrier.expect(arrival.index(0), x.block_type.nbytes)
    CHUNKS: gl.constexpr = channels_of(shape) * shape.num_warps // CHUNK
    tma_load(x, [passed * CHUNKS, 0, 0], arrival.index(0), memory)


@gluon.jit
def _inputs(memory, arrival, passed, shape: gl.constexpr):
    """Wait for the rows of x of a pass, and return the warps' parts of them, (num_warps * rows,
    channels) of each group, as a tuple."""
    mbarrier.wait(arrival.index(0), passed & 1)
    W: gl.constexpr = shape.num_warps
    S: gl.constexpr = channels_of(shape)
    x = memory.load(_inputs_layout(shape)).reshape([W, S // CHUNK, shape.rows, CHUNK])
    return groups_of(x.permute((0, 2, 1, 3)).reshape([W * shape.rows, S]), shape.groups)


@gluon.jit
def _right(x, shape: gl.constexpr):
    """Return x (warps * rows, channels) of a group as a right operand (warps, channels, rows)."""
    W: gl.constexpr = shape.num_warps
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, sum_layout(W, 1), 2)
    x = x.reshape([W, shape.rows, x.shape[1]]).permute((0, 2, 1))
    return gl.convert_layout(x, OPERAND, assert_trivial=True)


@gluon.jit
def _left(registers, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return the left operand (warps, 16, channels) of registers of codes (warps * 16, ...)."""
    W: gl.constexpr = shape.num_warps
    LAYOUT: gl.constexpr = gl.DotOperandLayout(0, sum_layout(W, 1), 2)
    found = lanes_numbers(registers, shape.kind, DTYPE)
    CHANNELS: gl.constexpr = found.shape[1]
    return gl.convert_layout(found.reshape([W, TILE, CHANNELS]), LAYOUT, assert_trivial=True)


@gluon.jit
def _of_outputs(numbers, W: gl.constexpr):
    """Return numbers (warps * 16,) as (warps, 16, 1) for sums."""
    LAYOUT: gl.constexpr = gl.SliceLayout(2, sum_layout(W, 1))
    found = gl.convert_layout(numbers.reshape([W, TILE]), LAYOUT, assert_trivial=True)
    return gl.expand_dims(found, 2)


@gluon.jit
def _row_sums(parts, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return the sums of rows of x over the channels of each group, as sums (warps, 16, rows) all
    of whose outputs are equal; zeros where no offset needs them."""
    W: gl.constexpr = shape.num_warps
    MMA: gl.constexpr = sum_layout(W, 1)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    S: gl.constexpr = channels_of(shape) // shape.groups
    size: gl.constexpr = [W, TILE, shape.rows]
    nothing = gl.zeros(size, gl.float32, MMA)
    first = nothing
    second = nothing
    third = nothing
    fourth = nothing
    if has_offset(shape):
        left: gl.constexpr = [W, TILE, S]
        ones = gl.full(left, 1.0, DTYPE, LEFT)
        first = mma_v2(ones, _right(parts[0], shape), nothing)
        if shape.groups > 1:
            second = mma_v2(ones, _right(parts[1], shape), nothing)
        if shape.groups > 2:
            third = mma_v2(ones, _right(parts[2], shape), nothing)
            fourth = mma_v2(ones, _right(parts[3], shape), nothing)
    return first, second, third, fourth


@gluon.jit
def _product(flat, raw, parts, row_sums, constants, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return the warps' sums (warps, 16, rows) of a tile in a pass, times scales and less offsets.

    flat: the words of the step, in `_words_layout`; raw: what `stage_scales` has loaded for it.
    """
    W: gl.constexpr = shape.num_warps
    B: gl.constexpr = shape.blocks
    words = flat.reshape([W, B, TILE, 4, 4]).permute((0, 2, 3, 1, 4)).reshape([W * TILE, 4, 4 * B])
    if shape.folds:
        size: gl.constexpr = [W, TILE, shape.rows]
        nothing = gl.zeros(size, gl.float32, sum_layout(W, 1))
        left = _left(folded_registers(words, raw[0]), shape, DTYPE)
        return mma_v2(left, _right(parts[0], shape), nothing) * FOLDED
    else:
        return _grouped(words, raw, parts, row_sums, constants, shape, DTYPE)


@gluon.jit
def _grouped(words, raw, parts, row_sums, constants, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return `_product` of words (warps * 16, 4, n) whose groups of channels have their own scales
    and offsets."""
    W: gl.constexpr = shape.num_warps
    GROUPS: gl.constexpr = shape.groups
    LINES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words.type.layout))
    size: gl.constexpr = [W, TILE, shape.rows]
    nothing = gl.zeros(size, gl.float32, sum_layout(W, 1))
    acc = nothing
    pieces = words_of(words, GROUPS)
    scale, offset = scale_and_offset(raw, shape, DTYPE)
    OUTPUTS: gl.constexpr = bases_layout(shape)
    scales = columns(scale, GROUPS, OUTPUTS)
    offsets = columns(offset, GROUPS, OUTPUTS)
    zeros = columns(negated_zeros(raw, shape, DTYPE), GROUPS, LINES)
    for group in gl.static_range(GROUPS):
        registers = lanes_registers(pieces[group], zeros[group], constants, shape.kind, DTYPE)
        part = mma_v2(_left(registers, shape, DTYPE), _right(parts[group], shape), nothing)
        acc = acc + part * _of_outputs(scales[group], W)
        if has_offset(shape):
            acc = acc - row_sums[group] * _of_outputs(offsets[group], W)
    return acc


@gluon.jit
def _store(total, tile, y, bias, rows, outputs, shape: gl.constexpr):
    """Add the bias to the sums (16 * rows,) of a tile, round them, and write them to y."""
    column = gl.arange(0, TILE * shape.rows, total.type.layout)
    output = tile * TILE + column // shape.rows
    row = column % shape.rows
    inside = (row < rows) & (output < outputs)
    if shape.has_bias:
        total = total + gl.load(bias + output, mask=inside, other=0.0).to(gl.float32)
    at = row.to(gl.int64) * outputs + output
    gl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


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
        "passes",
    ]
)
def quantised_stream_kernel(
    words,
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
    magic_word,
    rows,
    outputs,
    passes,
    per_row,
    grid,
    outer_grid,
    shape: gl.constexpr,
):
    """Compute y = x W^T + bias, (rows, outputs), for up to 16 rows by mma.sync, from codes of 8 or
    4 bits in the order of lanes; see the module's docstring.

    words: int32 (outputs, per_row); x: a descriptor of boxes (chunks, rows, 64); passes: over the
    channels; grid, outer_grid: columns of scales and of outer.
    """
    W: gl.constexpr = shape.num_warps
    DTYPE: gl.constexpr = x.dtype
    CODES: gl.constexpr = _words_layout(shape)
    PARTIAL: gl.constexpr = _partial_layout(shape)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, PARTIAL)
    WORDS: gl.constexpr = _BLOCK * shape.blocks * W
    SUMS: gl.constexpr = TILE * shape.rows
    flat_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ring = gl.allocate_shared_memory(gl.int32, [shape.stages, WORDS], flat_layout)
    partial = gl.allocate_shared_memory(gl.float32, [W, SUMS], _partial_memory(shape))
    CHUNKS: gl.constexpr = channels_of(shape) * W // CHUNK
    inputs = gl.allocate_shared_memory(x.dtype, [CHUNKS, shape.rows, CHUNK], x.layout)
    arrival = barriers(1, 1)
    fence_async_shared()
    partition_barrier()
    if shape.early == _FIRST:
        begin_next(W)
    first = gl.program_id(0)
    tiles = gl.cdiv(outputs, TILE)
    count = gl.cdiv(tiles - first, gl.num_programs(0))
    steps = count * passes
    # Codes.
    at = gl.arange(0, WORDS, CODES)
    word, output, block = at % BLOCK_WORDS, at // BLOCK_WORDS % TILE, at // _BLOCK
    offset = output * per_row + block * BLOCK_WORDS + word
    place = (words, offset, block, output, first, count, per_row, outputs)
    STAGES: gl.constexpr = shape.stages
    for step in gl.static_range(STAGES):
        _copy(place, ring, step, steps, shape)
    # Scales: of the outputs of a lane, and of its warp's channels.
    line = gl.arange(0, W * TILE, bases_layout(shape))
    warp = gl.expand_dims(line // TILE, 1)
    last = per_row // (BLOCK_WORDS * shape.blocks) - 1
    tensors = (scales, zeros, minimums, outer, outer_minimums)
    scaling = (tensors, line % TILE, warp, last, outputs, grid, outer_grid)
    looked_up = (table0, table1, table2, table3, table4, table5, table6, table7)
    constants = (looked_up, magic_word)
    raw = _scales_of(scaling, 0, first, count, steps, shape)
    ahead = _scales_of(scaling, 1, first, count, steps, shape)
    if shape.early:
        # No kernel writes the weight; whatever else is read or written follows the kernel before.
        await_previous(W)
        if shape.early != _FIRST:
            begin_next(W)
    _bring(x, inputs, arrival, 0, shape)
    if shape.tiles > 0:
        held: gl.constexpr = [shape.tiles, SUMS]
        totals = gl.allocate_shared_memory(gl.float32, held, flat_layout)
    else:
        totals = partial  # never touched
    step = 0
    for passed in range(passes):
        parts = _inputs(inputs, arrival, passed, shape)
        row_sums = _row_sums(parts, shape, DTYPE)
        if shape.tiles > 0:
            fence_async_shared()
            partition_barrier()  # all warps have their parts of x
            if passed + 1 < passes:
                _bring(x, inputs, arrival, passed + 1, shape)
        for number in range(count):
            async_copy.wait_group(STAGES - 1)
            flat = ring.index(step % STAGES).load(CODES)
            acc = _product(flat, raw, parts, row_sums, constants, shape, DTYPE)
            raw = ahead
            ahead = _scales_of(scaling, step + 2, first, count, steps, shape)
            partial.store(acc.reshape([W, SUMS]))
            partition_barrier()  # sums are stored, and the stage has been loaded
            _copy(place, ring, step + STAGES, steps, shape)
            total = gl.sum(partial.load(PARTIAL), 0)
            if shape.tiles > 0:
                if passed > 0:
                    total += totals.index(number).load(COLUMNS)
                if passed + 1 < passes:
                    totals.index(number).store(total)
            if passed + 1 == passes:
                tile = first + number * gl.num_programs(0)
                _store(total, tile, y, bias, rows, outputs, shape)
            step += 1
    async_copy.wait_group(0)


@gluon.jit
def _scales_of(scaling, step, first, count, steps, shape: gl.constexpr):
    """Load what the outputs of a step's tile multiply and subtract, see `stage_scales`; behind the
    last step that of the last."""
    tensors, line, warp, last, outputs, grid, outer_grid = scaling
    passed, number = _pass_of(gl.minimum(step, steps - 1), count, shape)
    row = (first + number * gl.num_programs(0)) * TILE + line
    stage = passed * shape.num_warps + warp
    if not shape.is_whole:
        row = gl.minimum(row, outputs - 1)
        stage = gl.minimum(stage, last)
    ROWS: gl.constexpr = shape.block_rows
    OUTER_ROWS: gl.constexpr = shape.outer_rows
    bases = bases_of(row, grid, outer_grid, ROWS, OUTER_ROWS, shape)
    return stage_scales(tensors, bases, stage, grid, shape)
