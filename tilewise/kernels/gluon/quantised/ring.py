"""A product of rows with a weight of 8 or 4 bits on Hopper: a TMA ring of codes, WGMMA.

What: y = x W^T + bias, W[n, k] = (value(code) - zero) * scale - minimum; see `QuantisedWeight`.
Grid: (tiles of outputs * tiles of rows * parts of K,), parts fastest, then rows.
One CTA: 64 outputs for each of its warpgroups, of a tile of rows, over its part of K. One warp
copies codes and x a ring ahead; a warpgroup makes left operands of the codes, in registers, and
multiplies. The last CTA of a tile to end adds up the parts.
Traffic: the codes and scales once, for each further tile of rows from L2; x from L2 once a CTA;
with parts 8 bytes for each output, row and part.
Numerics: of each group, value * x summed in float32, times the scale in float32, less the row's sum
times (zero * scale + minimum): no weight is rounded to 16 bits, but values of a general table. Zero
points that are integers are subtracted from codes of 4 bits, exactly. Parts are added in their
order: what a row of y is does not depend on how many others there are, nor on which CTA ends last.

Codes lie in the order of lanes, see `QuantisedWeight.in_lanes`: a lane's operand of a step is 16
bytes of each of its two rows.
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
from tilewise.kernels.gluon.device.barriers import barriers, release_loaded
from tilewise.kernels.gluon.device.compat import tma_load
from tilewise.kernels.gluon.device.early import await_previous, begin_next
from tilewise.kernels.gluon.device.prefetch import prefetch
from tilewise.kernels.gluon.device.warpgroup import sum_layout
from tilewise.kernels.gluon.quantised.operands import (
    BLOCK_WORDS,
    FOLDED,
    bits_of,
    folded_registers,
    lanes_operand,
    lanes_registers,
    lanes_words,
)
from tilewise.kernels.gluon.quantised.scales import (
    base_of,
    has_offset,
    negated_zeros,
    scale_and_offset,
    stage_scales,
)
from tilewise.kernels.gluon.step.rows import finish, finish_parts, places

_FIRST = gl.constexpr(early.FIRST)
_LOADER = gl.constexpr(24)  # registers of a thread that copies


class Shape(NamedTuple):
    """Constexpr: the sizes and features that change the code of a product by WGMMA: kind of codes
    and scales, rows, warpgroups, stages, parts of K."""

    kind: int  # kind of the codes, see `operands`
    rows: int  # rows of x, padded: 8, 16, 32, 64 or 128
    warpgroups: int  # that multiply, each for outputs of its own: 1 or 2
    tile_n: int  # outputs of a warpgroup: 64
    num_warps: int  # of a warpgroup: 4
    registers: int  # of a thread that multiplies
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
    fetches: bool  # all codes of a part are fetched into L2 at once
    pairs: int = 0  # how outputs lie among the weight's rows, of `operands`
    folds: bool = False  # scales are multiplied into operands, see `folded_registers`
    turned: bool = False  # scales lie by words of eight rows, see `QuantisedWeight.lanes`


class Ring(NamedTuple):
    """Shared memory: stages of codes, for each warpgroup, and of x; and their barriers, which open
    when a stage is filled, and when all warpgroups have multiplied it."""

    codes: object
    x: object
    full: object
    empty: object


@gluon.constexpr_function
def channels_of(shape):
    """Return the number of channels of K in a stage of the ring."""
    return shape.blocks * BLOCK_WORDS.value * 32 // bits_of(shape.kind)


@gluon.jit
def _bring_codes(codes, ring, output, step, stage, nbytes: gl.constexpr, shape: gl.constexpr):
    WARPGROUPS: gl.constexpr = shape.warpgroups
    full = ring.full.index(stage)
    mbarrier.expect(full, WARPGROUPS * codes.block_type.nbytes + nbytes)
    for group in gl.static_range(WARPGROUPS):
        at = [output + group * shape.tile_n, step * (BLOCK_WORDS * shape.blocks)]
        tma_load(codes, at, full, ring.codes.index(stage * WARPGROUPS + group))


@gluon.jit
def _bring_x(x, ring, row, step, stage, shape: gl.constexpr):
    GROUPS: gl.constexpr = shape.groups
    S: gl.constexpr = channels_of(shape) // GROUPS
    for group in gl.static_range(GROUPS):
        at = [row, step * (S * GROUPS) + group * S]
        tma_load(x, at, ring.full.index(stage), ring.x.index(stage * GROUPS + group))


@gluon.jit
def _fetch(words, output, first, steps, outputs, stages, shape: gl.constexpr):
    """Let L2 fetch the codes of a part, 128 bytes of each output for each two blocks."""
    BYTES: gl.constexpr = 4 * BLOCK_WORDS * shape.blocks
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = output + gl.arange(0, shape.warpgroups * shape.tile_n, lanes)
    at = gl.minimum(row, outputs - 1).to(gl.int64) * (stages * (BLOCK_WORDS * shape.blocks))
    for step in range(shape.stages, steps):
        prefetch(words + at + (first + step) * (BLOCK_WORDS * shape.blocks), BYTES)


@gluon.jit
def _load_stages(given, shape: gl.constexpr):
    """Run the loader warp: bring the codes and rows of x of this CTA's stages into the ring."""
    codes, words, x, ring, output, row, first, steps, outputs, stages = given
    GROUPS: gl.constexpr = shape.groups
    BYTES: gl.constexpr = GROUPS * x.block_type.nbytes
    ready = gl.minimum(steps, shape.stages)
    if shape.early == _FIRST:
        begin_next(1)
    for stage in range(ready):
        _bring_codes(codes, ring, output, first + stage, stage, BYTES, shape)
    if shape.fetches:
        _fetch(words, output, first, steps, outputs, stages, shape)
    if shape.early:
        # No kernel writes the weight; whatever else is read or written follows the kernel before.
        await_previous(1)
        if shape.early != _FIRST:
            begin_next(1)
    for stage in range(ready):
        _bring_x(x, ring, row, first + stage, stage, shape)
    for step in range(ready, steps):
        stage = step % shape.stages
        mbarrier.wait(ring.empty.index(stage), (step // shape.stages & 1) ^ 1)
        _bring_codes(codes, ring, output, first + step, stage, BYTES, shape)
        _bring_x(x, ring, row, first + step, stage, shape)


@gluon.jit
def _halves(words):
    """Return words (outputs, 4, n) as two (outputs, 4, n / 2): those of the first and of the second
    half of channels."""
    M: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[2] // 2
    return gl.split(words.reshape([M, 4, 2, N]).permute((0, 1, 3, 2)))


@gluon.jit
def words_of(words, GROUPS: gl.constexpr):
    """Return a tuple of words (outputs, 4, n / GROUPS), those of each group of channels of a
    stage's words (outputs, 4, n)."""
    if GROUPS == 1:
        return (words,)
    elif GROUPS == 2:
        return _halves(words)
    else:
        low, high = _halves(words)
        first, second = _halves(low)
        third, fourth = _halves(high)
        return (first, second, third, fourth)


@gluon.jit
def columns(numbers, GROUPS: gl.constexpr, layout: gl.constexpr):
    """Return the GROUPS columns of numbers (outputs, GROUPS) as a tuple of (outputs,) in `layout`,
    a layout of rows."""
    M: gl.constexpr = numbers.shape[0]
    if GROUPS == 1:
        return (gl.convert_layout(numbers.reshape([M]), layout, assert_trivial=True),)
    elif GROUPS == 2:
        low, high = gl.split(numbers)
        low = gl.convert_layout(low, layout, assert_trivial=True)
        high = gl.convert_layout(high, layout, assert_trivial=True)
        return (low, high)
    else:
        even, odd = gl.split(numbers.reshape([M, 2, 2]))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        first = gl.convert_layout(first, layout, assert_trivial=True)
        second = gl.convert_layout(second, layout, assert_trivial=True)
        third = gl.convert_layout(third, layout, assert_trivial=True)
        fourth = gl.convert_layout(fourth, layout, assert_trivial=True)
        return (first, second, third, fourth)


@gluon.jit
def registers_of_step(ring, step, group, raw, constants, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Wait for a step's copies, and return its codes as registers of two 16-bit numbers: a tuple
    with an entry for each group of channels, or one entry if scales are folded in.

    Args:
        group: the number of the warpgroup.
        raw: the scales that `raw_scales` has loaded for the step.
    """
    stage = step % shape.stages
    mbarrier.wait(ring.full.index(stage), (step // shape.stages) & 1)
    at = stage * shape.warpgroups + group
    words = lanes_words(ring.codes, at, shape.blocks, shape.pairs)
    if shape.folds:
        return (folded_registers(words, raw[0]),)
    else:
        return _group_registers(words, raw, constants, shape, DTYPE)


@gluon.jit
def _group_registers(words, raw, constants, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return a tuple of the registers of `lanes_registers`, which are not scaled, for each group of
    a step's words."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words.type.layout))
    pieces = words_of(words, shape.groups)
    zeros = columns(negated_zeros(raw, shape, DTYPE), shape.groups, ROWS)
    first = lanes_registers(pieces[0], zeros[0], constants, shape.kind, DTYPE)
    if shape.groups == 1:
        return (first,)
    elif shape.groups == 2:
        return (first, lanes_registers(pieces[1], zeros[1], constants, shape.kind, DTYPE))
    else:
        second = lanes_registers(pieces[1], zeros[1], constants, shape.kind, DTYPE)
        third = lanes_registers(pieces[2], zeros[2], constants, shape.kind, DTYPE)
        fourth = lanes_registers(pieces[3], zeros[3], constants, shape.kind, DTYPE)
        return (first, second, third, fourth)


@gluon.jit
def _product(ring, step, group: gl.constexpr, registers, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Start the product of a group of a step and, if there are offsets, that of ones with x; return
    both asynchronous sums (outputs, rows), the first twice if there are none."""
    ACC: gl.constexpr = sum_layout(shape.rows, shape.num_warps)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    S: gl.constexpr = channels_of(shape) // shape.groups
    size: gl.constexpr = [shape.tile_n, shape.rows]
    zeros = gl.zeros(size, gl.float32, ACC)
    right = ring.x.index(step % shape.stages * shape.groups + group).permute((1, 0))
    left = lanes_operand(registers, shape.kind, DTYPE, OPERAND)
    part = warpgroup_mma(left, right, zeros, use_acc=False, is_async=True)
    row_sum = part
    if has_offset(shape):
        left_size: gl.constexpr = [shape.tile_n, S]
        ones = gl.full(left_size, 1.0, DTYPE, OPERAND)
        row_sum = warpgroup_mma(ones, right, zeros, use_acc=False, is_async=True)
    return part, row_sum


@gluon.jit
def _added(acc, part, row_sum, scale, offset, shape: gl.constexpr):
    """Return acc (outputs, rows) plus a group's product `part` times scale, less its sums of rows
    of x times offset, if there are offsets."""
    acc = acc + part * gl.expand_dims(scale, 1)
    if has_offset(shape):
        acc = acc - row_sum * gl.expand_dims(offset, 1)
    return acc


@gluon.jit
def wait_for_products(products, shape: gl.constexpr):
    """Wait for all products of a step, and return them as a tuple of a pair (product, sums of rows
    of x) for each group."""
    first = _held(products[0], shape)
    if shape.groups == 1:
        return (first,)
    elif shape.groups == 2:
        return (first, _held(products[1], shape))
    else:
        second = _held(products[1], shape)
        third = _held(products[2], shape)
        fourth = _held(products[3], shape)
        return (first, second, third, fourth)


@gluon.jit
def _held(product, shape: gl.constexpr):
    """Wait for all running products, and return the pair `product` with its results."""
    part, row_sum = product
    if has_offset(shape):
        part, row_sum = warpgroup_mma_wait(0, deps=(part, row_sum))
    else:
        part = warpgroup_mma_wait(0, deps=(part,))
    return part, row_sum


@gluon.jit
def added_products(acc, products, raw, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return acc (outputs, rows) plus a step's products, which have been waited for, each times its
    scales and less its offsets."""
    ROWS: gl.constexpr = gl.SliceLayout(1, sum_layout(shape.rows, shape.num_warps))
    scale, offset = scale_and_offset(raw, shape, DTYPE)
    scales = columns(scale, shape.groups, ROWS)
    offsets = columns(offset, shape.groups, ROWS)
    GROUPS: gl.constexpr = shape.groups
    for group in gl.static_range(GROUPS):
        part, row_sum = products[group]
        acc = _added(acc, part, row_sum, scales[group], offsets[group], shape)
    return acc


@gluon.jit
def added_operand(acc, ring, step, registers, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Return acc (outputs, rows) plus the product of a step's operand, into which scales are
    folded; waits for it."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, sum_layout(shape.rows, shape.num_warps), 2)
    left = lanes_operand(registers, shape.kind, DTYPE, LEFT)
    right = ring.x.index(step % shape.stages).permute((1, 0))
    acc = warpgroup_mma(left, right, acc, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def start_products(ring, step, registers, shape: gl.constexpr, DTYPE: gl.constexpr):
    """Start the products of a step's groups, and return a tuple of what `_product` returns for
    each."""
    first = _product(ring, step, 0, registers[0], shape, DTYPE)
    if shape.groups == 1:
        return (first,)
    elif shape.groups == 2:
        return (first, _product(ring, step, 1, registers[1], shape, DTYPE))
    else:
        second = _product(ring, step, 1, registers[1], shape, DTYPE)
        third = _product(ring, step, 2, registers[2], shape, DTYPE)
        fourth = _product(ring, step, 3, registers[3], shape, DTYPE)
        return (first, second, third, fourth)


@gluon.jit
def _multiply(tensors, bases, ring, first, steps, group, grid, constants, shape: gl.constexpr):
    """Return the float32 sums (outputs, rows) of `steps` stages of channels from stage `first`."""
    DTYPE: gl.constexpr = ring.x.dtype
    last = steps - 1
    size: gl.constexpr = [shape.tile_n, shape.rows]
    acc = gl.zeros(size, gl.float32, sum_layout(shape.rows, shape.num_warps))
    raw = stage_scales(tensors, bases, first, grid, shape)
    ahead = stage_scales(tensors, bases, first + gl.minimum(1, last), grid, shape)
    for step in range(steps):
        registers = registers_of_step(ring, step, group, raw, constants, shape, DTYPE)
        if shape.folds:
            coming = stage_scales(tensors, bases, first + gl.minimum(step + 2, last), grid, shape)
            acc = added_operand(acc, ring, step, registers[0], shape, DTYPE)
            release_loaded(ring.empty.index(step % shape.stages))
        else:
            products = start_products(ring, step, registers, shape, DTYPE)
            coming = stage_scales(tensors, bases, first + gl.minimum(step + 2, last), grid, shape)
            products = wait_for_products(products, shape)
            release_loaded(ring.empty.index(step % shape.stages))
            acc = added_products(acc, products, raw, shape, DTYPE)
        raw = ahead
        ahead = coming
    if shape.folds:
        acc = acc * FOLDED
    return acc


@gluon.jit
def _multiply_stages(given, group: gl.constexpr, shape: gl.constexpr):
    """Run warpgroup number `group` of those that multiply: compute its outputs of the tile, over
    this CTA's part of K, and write them.

    Of several parts each is stored in `sums`; the last CTA of the tile to end adds them, in their
    order, and writes the outputs.
    """
    tensors, at, bias, y, sums, arrived, ring, constants = given
    output, row, first, steps, rows, outputs, grid, outer_grid, block_rows, outer_rows = at
    output += group * shape.tile_n
    bases = base_of(output, outputs, grid, outer_grid, block_rows, outer_rows, shape)
    acc = _multiply(tensors, bases, ring, first, steps, group, grid, constants, shape)
    if shape.early:
        await_previous(shape.num_warps)
    if shape.parts == 1:
        finish(acc, bias, y, output, row, rows, outputs, shape)
    else:
        tile = gl.program_id(0) // shape.parts * shape.warpgroups + group
        share = tile * shape.parts + gl.program_id(0) % shape.parts
        place = places(shape)
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
def quantised_ring_kernel(
    codes,
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
    """Compute y = x W^T + bias, (rows, outputs), by WGMMA, from codes of 8 or 4 bits in the order
    of lanes; see the module's docstring.

    codes, x: descriptors of the codes, int32 (outputs, K * bits / 32), and of x (rows, K); words:
    the tensor of the codes. scales, zeros, minimums, outer, outer_minimums: tensors of
    `QuantisedWeight`, any where `shape` says that there is none; scales are int32 words where they
    are folded. grid, outer_grid: columns of scales and of outer; block_rows, outer_rows: the
    weight's rows that share a scale, and an outer one. table0 ... table7: the words of
    `linear.kind_and_table`; magic_word: a number of MAGIC_WORDS. stages, part_stages: the number of
    stages that K takes, and a part of K. sums and arrived: as `linear_rows_kernel` has them.
    """
    WARPGROUPS: gl.constexpr = shape.warpgroups
    ring = Ring(
        gl.allocate_shared_memory(
            codes.dtype,
            [shape.stages * WARPGROUPS, shape.tile_n, BLOCK_WORDS * shape.blocks],
            codes.layout,
        ),
        gl.allocate_shared_memory(
            x.dtype,
            [shape.stages * shape.groups, shape.rows, channels_of(shape) // shape.groups],
            x.layout,
        ),
        barriers(shape.stages, 1),
        barriers(shape.stages, WARPGROUPS),
    )
    fence_async_shared()
    tile = gl.program_id(0) // shape.parts
    part = gl.program_id(0) - tile * shape.parts
    row_tiles = gl.cdiv(rows, shape.rows)
    output = tile // row_tiles * (shape.tile_n * WARPGROUPS)
    row = tile % row_tiles * shape.rows
    first = part * part_stages
    steps = gl.maximum(gl.minimum(part_stages, stages - first), 1)
    tensors = (scales, zeros, minimums, outer, outer_minimums)
    constants = (
        (table0, table1, table2, table3, table4, table5, table6, table7),
        magic_word,
    )
    at = (output, row, first, steps, rows, outputs, grid, outer_grid, block_rows, outer_rows)
    given = (tensors, at, bias, y, sums, arrived, ring, constants)
    loads = (codes, words, x, ring, output, row, first, steps, outputs, stages)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [(_multiply_stages, (given, 0, shape)), (_load_stages, (loads, shape))], [1], [_LOADER]
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_stages, (given, 0, shape)),
                (_multiply_stages, (given, 1, shape)),
                (_load_stages, (loads, shape)),
            ],
            [4, 1],
            [shape.registers, _LOADER],
        )
