"""A product of up to 16 rows with a weight of 8 or 4 bits on Hopper: a TMA ring of codes, mma.sync.

What: y = x W^T + bias, W[n, k] = (value(code) - zero) * scale - minimum; see `QuantisedWeight`.
Grid: CTAs that run at a time; each computes every so many tiles of 16 * TILES outputs.
One CTA: a tile after another, over all of K. One warp copies codes and x a ring ahead, also those
of the next tile; the others take blocks of 64 bytes of each row in turns, and add up their sums at
the end of a tile.
Traffic: the codes and scales once; x from L2 once for each tile.
Numerics: as `ring` has them; the order of a row's sum depends on the shape of the weight alone.

Codes lie in the order of lanes, see `QuantisedWeight.in_lanes`.
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
from tilewise.kernels.gluon.device.prefetch import prefetch
from tilewise.kernels.gluon.quantised.operands import (
    BLOCK_WORDS,
    bits_of,
    codes_layout,
    numbers,
    pairs,
    small,
    sum_layout,
    wide,
    words_registers,
)
from tilewise.kernels.gluon.quantised.scales import has_offset

_FIRST = gl.constexpr(early.FIRST)
_LOADER = gl.constexpr(24)  # registers of a thread that copies
CHUNK = gl.constexpr(64)  # channels of x that lie together: 128 bytes


class Shape(NamedTuple):
    """Constexpr: what changes the code."""

    kind: int  # kind of the codes, see `operands`
    rows: int  # rows of x, padded: 8 or 16
    tiles: int  # tiles of 16 outputs: 1 or 2
    warps: int  # that multiply
    steps: int  # blocks of a warp
    stages: int
    is_even: bool  # all warps have as many blocks
    by_rows: bool  # each output has scales of its own
    groups: int  # sums of a block, each times a scale: 1, 2 or 4
    shared: int  # sums in a row that share a scale; 0: all
    outer_shared: int  # likewise an outer scale
    scale_kind: int  # kind of the scales, of `triton.quantised.values`
    has_outer: bool
    has_zeros: bool
    subtracts: bool  # zero points are subtracted from codes
    minimum_kind: int  # -1: none
    has_outer_minimums: bool
    has_bias: bool
    fetches: tuple[int, int]  # bytes of a row of scales and of zeros that L2 fetches ahead
    early: int  # mode of `kernels.early`: codes are loaded while the kernel before runs


class Ring(NamedTuple):
    """Shared memory: stages of codes and of x, and their barriers, which open when a stage is
    filled, and when it has been loaded."""

    codes: object
    x: object
    full: object
    empty: object


class Weight(NamedTuple):
    """Where scales lie.

    Attributes:
        tensors: scales, zeros, minimums, outer and outer_minimums.
        sizes: outputs, and blocks of a row.
        grids: columns of scales and of outer, rows that share them.
    """

    tensors: object
    sizes: object
    grids: object


@gluon.constexpr_function
def _inputs_layout(shape):
    """Return how warps take (chunks, rows, 64) of x: pairs of channels of a lane of 4."""
    halves = 8 // bits_of(shape.kind)  # chunks of a block
    registers = [[0, 0, 1], [0, 0, 8], [0, 0, 16], [0, 0, 32]]
    if halves == 2:
        registers.append([1, 0, 0])
    if shape.rows == 16:
        registers.append([0, 8, 0])
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[halves * size, 0, 0] for size in (1, 2, 4, 8) if size < shape.warps]
    return gl.DistributedLinearLayout(
        registers, lanes, warps, [], [halves * shape.warps, shape.rows, CHUNK.value]
    )


@gluon.constexpr_function
def _scales_layout(shape):
    """Return how warps take (warps, 16, groups) scales."""
    registers = [*([0, 0, size] for size in (1, 2) if size < shape.groups), [0, 8, 0]]
    lanes = [[0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [[size, 0, 0] for size in (1, 2, 4, 8) if size < shape.warps]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [shape.warps, 16, shape.groups])


@gluon.jit
def _column(column, shared: gl.constexpr):
    if shared == 0:
        return column * 0
    elif shared == 1:
        return column
    else:
        return column // shared


@gluon.jit
def _scales_of(weight, first, step, shape: gl.constexpr):
    """Load what the scales (warps, 16, groups) of 16 outputs of a step are made of."""
    scales, zeros, minimums, outer, outer_minimums = weight.tensors
    outputs, blocks = weight.sizes
    grid, outer_grid, block_rows, outer_rows = weight.grids
    LAYOUT: gl.constexpr = _scales_layout(shape)
    warp = gl.arange(0, shape.warps, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    warp = gl.expand_dims(gl.expand_dims(warp, 1), 2)
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    row = gl.minimum(first + gl.expand_dims(gl.expand_dims(row, 0), 2), outputs - 1)
    group = gl.arange(0, shape.groups, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    group = gl.expand_dims(gl.expand_dims(group, 0), 1)
    block = step * shape.warps + warp
    if not shape.is_even:
        block = gl.minimum(block, blocks - 1)
    column = block * shape.groups + group
    place = row
    if not shape.by_rows:
        place = row // block_rows
    at = place * grid + _column(column, shape.shared)
    outer_at = at
    if shape.has_outer or shape.has_outer_minimums:
        outer_at = row // outer_rows * outer_grid + _column(column, shape.outer_shared)
    scale = gl.load(scales + at)
    zero = scale
    minimum = scale
    factor = scale
    minimum_factor = scale
    if shape.has_zeros:
        zero = gl.load(zeros + at)
    if shape.minimum_kind >= 0:
        minimum = gl.load(minimums + at)
    if shape.has_outer:
        factor = gl.load(outer + outer_at)
    if shape.has_outer_minimums:
        minimum_factor = gl.load(outer_minimums + outer_at)
    return scale, zero, minimum, factor, minimum_factor


@gluon.jit
def _scales_ahead(weight, index, stride, shape: gl.constexpr):
    """Load what the scales of a CTA's index-th step are made of, for both tiles of 16 outputs."""
    tile = gl.program_id(0) + index // shape.steps * stride
    step = index % shape.steps
    first = tile * (16 * shape.tiles)
    low = _scales_of(weight, first, step, shape)
    high = low
    if shape.tiles == 2:
        high = _scales_of(weight, first + 16, step, shape)
    return low, high


@gluon.jit
def _halves(x, dim: gl.constexpr):
    """Split axis `dim`, 2 or 3 of four, into its halves."""
    A: gl.constexpr = x.shape[0]
    B: gl.constexpr = x.shape[1]
    C: gl.constexpr = x.shape[2]
    D: gl.constexpr = x.shape[3]
    if dim == 3:
        return gl.split(x.reshape([A, B, C, 2, D // 2]).permute((0, 1, 2, 4, 3)))
    else:
        return gl.split(x.reshape([A, B, 2, C // 2, D]).permute((0, 1, 3, 4, 2)))


@gluon.jit
def _pieces(x, dim: gl.constexpr, GROUPS: gl.constexpr):
    """Return what axis `dim` has of each group, as a tuple."""
    if GROUPS == 1:
        return (x,)
    elif GROUPS == 2:
        return _halves(x, dim)
    else:
        low, high = _halves(x, dim)
        first, second = _halves(low, dim)
        third, fourth = _halves(high, dim)
        return (first, second, third, fourth)


@gluon.jit
def _columns(numbers, GROUPS: gl.constexpr, layout: gl.constexpr):
    """Return the columns of numbers (warps, 16, GROUPS), as a tuple, in a layout of (warps, 16)."""
    W: gl.constexpr = numbers.shape[0]
    if GROUPS == 1:
        return (gl.convert_layout(numbers.reshape([W, 16]), layout, assert_trivial=True),)
    elif GROUPS == 2:
        low, high = gl.split(numbers)
        low = gl.convert_layout(low, layout, assert_trivial=True)
        high = gl.convert_layout(high, layout, assert_trivial=True)
        return (low, high)
    else:
        even, odd = gl.split(numbers.reshape([W, 16, 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        first = gl.convert_layout(first, layout, assert_trivial=True)
        second = gl.convert_layout(second, layout, assert_trivial=True)
        third = gl.convert_layout(third, layout, assert_trivial=True)
        fourth = gl.convert_layout(fourth, layout, assert_trivial=True)
        return (first, second, third, fourth)


@gluon.jit
def _added(acc, words, raw, inputs, sums_of_x, constants, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return the sums (warps, 16, rows) of a tile with those of a step.

    words: (warps, 16, 16).
    """
    W: gl.constexpr = shape.warps
    MMA: gl.constexpr = sum_layout(W, 1)
    ROWS: gl.constexpr = gl.SliceLayout(2, MMA)
    GROUPS: gl.constexpr = shape.groups
    size: gl.constexpr = [W, 16, shape.rows]
    scale, offset, negated = _factors(raw, shape, DTYPE)
    scales = _columns(scale, GROUPS, ROWS)
    offsets = _columns(offset, GROUPS, ROWS)
    zeros = _columns(negated, GROUPS, ROWS)
    pieces = _pieces(words.reshape([W, 16, 4, 4]), 3, GROUPS)
    for group in gl.static_range(GROUPS):
        registers = words_registers(pieces[group], zeros[group], constants, shape.kind, DTYPE)
        left = _left(registers, shape.kind, DTYPE, gl.DotOperandLayout(0, MMA, 2))
        part = mma_v2(left, inputs[group], gl.zeros(size, gl.float32, MMA))
        acc = acc + part * gl.expand_dims(scales[group], 2)
        if has_offset(shape):
            acc = acc - sums_of_x[group] * gl.expand_dims(offsets[group], 2)
    return acc


@gluon.jit
def _left(registers, KIND: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the left operand (warps, 16, channels) of registers; costs no instruction."""
    low, high = numbers(registers, DTYPE)
    W: gl.constexpr = registers.shape[0]
    N: gl.constexpr = registers.shape[3]
    if bits_of(KIND) == 4:
        x = gl.join(low, high).permute((0, 1, 3, 5, 4, 2, 6)).reshape([W, 16, N * 32])
    else:
        x = gl.join(low, high).permute((0, 1, 3, 4, 2, 5)).reshape([W, 16, N * 16])
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _factors(raw, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return scale, offset and the pairs of -zero * SMALL (warps, 16, groups)."""
    scale, zero, minimum, factor, minimum_factor = raw
    SMALL: gl.constexpr = small(shape.kind, DTYPE)
    scale = wide(scale, shape.scale_kind)
    if shape.has_outer:
        scale = scale * factor.to(gl.float32)
    offset = scale
    if shape.has_zeros and not shape.subtracts:
        offset = scale * zero.to(gl.float32)
    if shape.minimum_kind >= 0:
        less = wide(minimum, shape.minimum_kind)
        if shape.has_outer_minimums:
            less = less * minimum_factor.to(gl.float32)
        if shape.has_zeros and not shape.subtracts:
            offset = offset + less
        else:
            offset = less
    if shape.has_zeros and shape.subtracts:
        negated = zero.to(gl.float32) * -SMALL
    else:
        LAYOUT: gl.constexpr = _scales_layout(shape)
        size: gl.constexpr = [shape.warps, 16, shape.groups]
        negated = gl.zeros(size, gl.float32, LAYOUT)
    return scale * (1.0 / SMALL), offset, pairs(negated, DTYPE)


@gluon.jit
def _inputs(x, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return the right operands (warps, channels, rows) of a step's groups, and sums of x."""
    W: gl.constexpr = shape.warps
    MMA: gl.constexpr = sum_layout(W, 1)
    GROUPS: gl.constexpr = shape.groups
    HALVES: gl.constexpr = BLOCK_WORDS * 32 // bits_of(shape.kind) // CHUNK
    S: gl.constexpr = HALVES * CHUNK // GROUPS
    whole = x.reshape([W, HALVES, shape.rows, CHUNK]).permute((0, 2, 1, 3))
    whole = whole.reshape([W, shape.rows, 1, HALVES * CHUNK])
    pieces = _pieces(whole, 3, GROUPS)
    first = _right(pieces[0], shape)
    size: gl.constexpr = [W, 16, shape.rows]
    left_size: gl.constexpr = [W, 16, S]
    zeros = gl.zeros(size, gl.float32, MMA)
    ones = gl.full(left_size, 1.0, DTYPE, gl.DotOperandLayout(0, MMA, 2))
    if GROUPS == 1:
        inputs = (first,)
    elif GROUPS == 2:
        inputs = (first, _right(pieces[1], shape))
    else:
        inputs = (
            first,
            _right(pieces[1], shape),
            _right(pieces[2], shape),
            _right(pieces[3], shape),
        )
    if not has_offset(shape):
        return inputs, (zeros, zeros, zeros, zeros)
    elif GROUPS == 1:
        return inputs, (mma_v2(ones, first, zeros),)
    elif GROUPS == 2:
        return inputs, (mma_v2(ones, first, zeros), mma_v2(ones, inputs[1], zeros))
    else:
        second = mma_v2(ones, inputs[1], zeros)
        third = mma_v2(ones, inputs[2], zeros)
        fourth = mma_v2(ones, inputs[3], zeros)
        return inputs, (mma_v2(ones, first, zeros), second, third, fourth)


@gluon.jit
def _right(piece, shape: gl.constexpr):
    """Return the right operand (warps, channels, rows) of x (warps, rows, 1, channels)."""
    W: gl.constexpr = piece.shape[0]
    S: gl.constexpr = piece.shape[3]
    right = piece.reshape([W, shape.rows, S]).permute((0, 2, 1))
    OPERAND: gl.constexpr = gl.DotOperandLayout(1, sum_layout(W, 1), 2)
    return gl.convert_layout(right, OPERAND, assert_trivial=True)


@gluon.jit
def _multiplied(accs, words, raw, x, constants, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return the sums of all tiles with those of a step.

    words: (warps, 16 * TILES, 16); x: (chunks, rows, 64).
    """
    low, high = raw
    acc0, acc1 = accs
    inputs, sums_of_x = _inputs(x, shape, DTYPE)
    if shape.tiles == 1:
        acc0 = _added(acc0, words, low, inputs, sums_of_x, constants, shape, DTYPE)
    else:
        W: gl.constexpr = shape.warps
        first, second = gl.split(words.reshape([W, 2, 16, BLOCK_WORDS]).permute((0, 2, 3, 1)))
        acc0 = _added(acc0, first, low, inputs, sums_of_x, constants, shape, DTYPE)
        acc1 = _added(acc1, second, high, inputs, sums_of_x, constants, shape, DTYPE)
    return acc0, acc1


@gluon.jit
def _stored(total, y, bias, first, rows, outputs, shape: gl.constexpr):
    """Add the bias to sums (16, rows), round and store them."""
    layout: gl.constexpr = total.type.layout
    output = first + gl.arange(0, 16, gl.SliceLayout(1, layout))
    row = gl.arange(0, shape.rows, gl.SliceLayout(0, layout))
    if shape.has_bias:
        added = gl.load(bias + output, mask=output < outputs, other=0.0).to(gl.float32)
        total = total + gl.expand_dims(added, 1)
    at = gl.expand_dims(row.to(gl.int64) * outputs, 0) + gl.expand_dims(output, 1)
    inside = gl.expand_dims(row < rows, 0) & gl.expand_dims(output < outputs, 1)
    gl.store(y + at, total.to(y.dtype.element_ty), mask=inside)


@gluon.jit
def _bring_codes(codes, x, ring, index, stride, stage, shape: gl.constexpr):
    tile = gl.program_id(0) + index // shape.steps * stride
    full = ring.full.index(stage)
    mbarrier.expect(full, codes.block_type.nbytes + x.block_type.nbytes)
    at = [index % shape.steps * shape.warps, tile * (16 * shape.tiles), 0]
    tma_load(codes, at, full, ring.codes.index(stage))


@gluon.jit
def _bring_x(x, ring, index, stage, shape: gl.constexpr):
    CHUNKS: gl.constexpr = x.block_type.shape[0]
    at = [index % shape.steps * CHUNKS, 0, 0]
    tma_load(x, at, ring.full.index(stage), ring.x.index(stage))


@gluon.jit
def _fetch(weight, tile, shape: gl.constexpr):
    """Let L2 fetch the scales and zeros of a tile, whose loads would wait for memory."""
    ROWS: gl.constexpr = 16 * shape.tiles
    row = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [1], [0]))
    row = gl.minimum(tile * ROWS + row, weight.sizes[0] - 1) * weight.grids[0]
    if shape.fetches[0] > 0:
        prefetch(weight.tensors[0] + row, shape.fetches[0])
    if shape.fetches[1] > 0:
        prefetch(weight.tensors[1] + row, shape.fetches[1])


@gluon.jit
def _load_stages(given, shape: gl.constexpr):
    """Bring the codes and rows of x of this CTA's steps; one warp."""
    codes, x, ring, weight, total, stride = given
    ready = gl.minimum(total, shape.stages)
    if shape.early == _FIRST:
        begin_next(1)
    _fetch(weight, gl.program_id(0), shape)
    for stage in range(ready):
        _bring_codes(codes, x, ring, stage, stride, stage, shape)
    if shape.early:
        # No kernel writes the weight; whatever else is read or written follows the kernel before.
        await_previous(1)
        if shape.early != _FIRST:
            begin_next(1)
    for stage in range(ready):
        _bring_x(x, ring, stage, stage, shape)
    for index in range(ready, total):
        stage = index % shape.stages
        mbarrier.wait(ring.empty.index(stage), (index // shape.stages & 1) ^ 1)
        _bring_codes(codes, x, ring, index, stride, stage, shape)
        if index % shape.steps == 0:
            _fetch(weight, gl.program_id(0) + index // shape.steps * stride, shape)
        _bring_x(x, ring, index, stage, shape)


@gluon.jit
def _multiply_stages(given, shape: gl.constexpr):
    """Compute the tiles of a CTA; its warps but one."""
    weight, y, bias, ring, total, stride, rows, constants = given
    MMA: gl.constexpr = sum_layout(shape.warps, 1)
    DTYPE: gl.constexpr = ring.x.dtype
    LAYOUT: gl.constexpr = codes_layout(shape.warps, 1, shape.tiles, BLOCK_WORDS)
    outputs = weight.sizes[0]
    size: gl.constexpr = [shape.warps, 16, shape.rows]
    zero = gl.zeros(size, gl.float32, MMA)
    accs = (zero, zero)
    raw = _scales_ahead(weight, 0, stride, shape)
    ahead = _scales_ahead(weight, 1, stride, shape)
    if shape.early:
        await_previous(shape.warps)
    for index in range(total):
        stage = index % shape.stages
        mbarrier.wait(ring.full.index(stage), (index // shape.stages) & 1)
        words = ring.codes.index(stage).load(LAYOUT)
        x = ring.x.index(stage).load(_inputs_layout(shape))
        accs = _multiplied(accs, words, raw, x, constants, shape, DTYPE)
        release_loaded(ring.empty.index(stage))
        # Behind the fence, which waits for loads that are on their way.
        raw = ahead
        ahead = _scales_ahead(weight, index + 2, stride, shape)
        if index % shape.steps == shape.steps - 1:
            tile = gl.program_id(0) + index // shape.steps * stride
            first = tile * (16 * shape.tiles)
            _stored(gl.sum(accs[0], 0), y, bias, first, rows, outputs, shape)
            if shape.tiles == 2:
                _stored(gl.sum(accs[1], 0), y, bias, first + 16, rows, outputs, shape)
            accs = (zero, zero)


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
        "blocks",
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
    magic_word,
    rows,
    outputs,
    blocks,
    grid,
    outer_grid,
    block_rows,
    outer_rows,
    shape: gl.constexpr,
):
    """Compute y (rows, outputs); see the module's docstring.

    codes, x: descriptors of (blocks, outputs, 16 words) and of (chunks, rows, 64) boxes, those of a
    step; blocks: those of a row; grid, outer_grid: columns of scales and of outer; block_rows,
    outer_rows: the rows that share them.
    """
    CHUNKS: gl.constexpr = x.block_type.shape[0]
    ring = Ring(
        gl.allocate_shared_memory(
            codes.dtype, [shape.stages, shape.warps, 16 * shape.tiles, BLOCK_WORDS], codes.layout
        ),
        gl.allocate_shared_memory(x.dtype, [shape.stages, CHUNKS, shape.rows, CHUNK], x.layout),
        barriers(shape.stages, 1),
        barriers(shape.stages, 1),
    )
    fence_async_shared()
    stride = gl.num_programs(0)
    tiles = gl.cdiv(outputs, 16 * shape.tiles)
    total = gl.cdiv(tiles - gl.program_id(0), stride) * shape.steps
    weight = Weight(
        (scales, zeros, minimums, outer, outer_minimums),
        (outputs, blocks),
        (grid, outer_grid, block_rows, outer_rows),
    )
    constants = (
        (table0, table1, table2, table3, table4, table5, table6, table7),
        magic_word,
    )
    given = (weight, y, bias, ring, total, stride, rows, constants)
    gl.warp_specialize(
        [
            (_multiply_stages, (given, shape)),
            (_load_stages, ((codes, x, ring, weight, total, stride), shape)),
        ],
        [1],
        [_LOADER],
    )
