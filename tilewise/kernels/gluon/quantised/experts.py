"""Products of tokens' rows with the weights of 8 or 4 bits of their experts, on Hopper.

What: up: a = act(gate) * u, [gate, u] = x W1[e]^T + b1[e], or a = act(x W1[e]^T + b1[e]); down:
a W2[e]^T + b2[e]; of the rows of each expert, whose weights are rows of one `QuantisedWeight`.
Grid: as many CTAs as the device holds. Each takes items (tile of rows, tile of outputs, part of K)
in turns: parts fastest, then outputs. The tiles of rows are `place_kernel`'s, or each choice of one
token.
One CTA: items one after another. One warp copies codes and rows a ring ahead, also of the item that
follows; the others multiply, 64 outputs each four of them, by mma.sync up to 16 rows, else by
WGMMA.
Traffic: the codes and scales of the experts that are hit, for each of their tiles of rows; rows
from L2 once for each tile of outputs.
Numerics: as `ring` has them; a scale of E8M0 is multiplied into bfloat16 operands, exactly but for
what is less than 2 ** -68 of 1. The activation is float32, rounded once. Parts are left to
`combine_kernel`, in float32.

Codes lie in the order of lanes, see `QuantisedWeight.in_lanes`. A tile of outputs has 32 channels'
gates and their products; see `operands.rows_in_weight`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
)

from tilewise.kernels import early
from tilewise.kernels.gluon.device.barriers import barriers, release_loaded
from tilewise.kernels.gluon.device.compat import tma_load
from tilewise.kernels.gluon.device.early import await_previous, begin_next
from tilewise.kernels.gluon.device.warpgroup import sum_layout
from tilewise.kernels.gluon.quantised.few import CHUNK, added, few_layout
from tilewise.kernels.gluon.quantised.operands import (
    BLOCK_WORDS,
    FOLDED,
    HALVES,
    SINGLE,
    rows_in_weight,
)
from tilewise.kernels.gluon.quantised.ring import (
    Ring,
    added_operand,
    added_products,
    channels_of,
    registers_of_step,
    start_products,
    wait_for_products,
)
from tilewise.kernels.gluon.quantised.scales import bases_layout, bases_of, stage_scales

_FIRST = gl.constexpr(early.FIRST)
_LOADER = gl.constexpr(40)  # registers of a thread that copies

SORTED, TOKENS, TOKEN = (gl.constexpr(i) for i in range(3))
"""Which rows the tile of an expert reads: those from its first place on; all tokens, of which those
that chose it are written; or the only token, whose choices are the tiles."""


NONE, SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, CLAMPED = (gl.constexpr(i) for i in range(7))
ACTIVATIONS = ("", "silu", "gelu", "gelu_tanh", "relu", "relu_squared", "clamped")


class Shape(NamedTuple):
    """Constexpr: the sizes and features that change the code of the experts' product: kind of codes
    and scales, rows of a tile, stages, source of rows, activation."""

    kind: int  # kind of the codes, see `operands`
    rows: int  # rows of a tile, padded: 8 or 16 by mma.sync, 32, 64 or 128 by WGMMA
    few: bool  # by mma.sync
    warpgroups: int  # that multiply, each for outputs of its own: 1, 2 or 4
    tile_n: int  # outputs of a warpgroup: 64
    num_warps: int  # of a warpgroup: 4
    registers: int  # of a thread that multiplies
    stages: int
    parts: int  # of K
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
    early: int  # mode of `kernels.early`
    pairs: int  # how outputs lie among the weight's rows, of `operands`
    folds: bool  # scales are multiplied into operands, see `folded_registers`
    turned: bool  # scales lie by words of eight rows, see `QuantisedWeight.lanes`
    source: int  # SORTED, TOKENS or TOKEN
    activation: int  # one of below; NONE in the product down
    weighed: bool  # rows are multiplied by their weights
    active: int  # experts of a token


@gluon.constexpr_function
def _acc_layout(shape):
    return few_layout() if shape.few else sum_layout(shape.rows, 4)


@gluon.constexpr_function
def _channels_out(shape):
    """Return the number of output channels that a warpgroup writes for one item of work.

    An item is a tile of rows, a tile of outputs and a part of K. 64 rows of the weight give 64
    channels, or 32 if half of them are gates.

    Args:
        shape: the kernel's constants, of which `pairs` says how gates lie among the rows.
    """
    return 64 if shape.pairs == SINGLE.value else 32


@gluon.jit
def _item(item, table, chosen, columns, experts, shape: gl.constexpr):
    """Return the parts of item number `item`: its expert, its first place, the end of the expert's
    places, its tile of outputs and its part of K.

    With shape.source TOKEN a choice of no expert gives expert 0 without places (end 0).
    """
    part = item % shape.parts
    rest = item // shape.parts
    tile = rest // columns
    if shape.source == TOKEN:
        expert = gl.load(chosen + tile)
        is_expert = (expert >= 0) & (expert < experts)
        first = tile
        end = gl.where(is_expert, tile + 1, 0)
        expert = gl.where(is_expert, expert, 0).to(gl.int32)
    else:
        expert = gl.load(table + 1 + 3 * tile)
        first = gl.load(table + 2 + 3 * tile)
        end = gl.load(table + 3 + 3 * tile)
    return expert, first, end, rest - tile * columns, part


@gluon.jit
def _total(table, tokens, columns, shape: gl.constexpr):
    """Return the number of items of the launch: tiles of rows times tiles of outputs times
    parts."""
    if shape.source == TOKEN:
        tiles = tokens * shape.active
    else:
        tiles = gl.load(table)
    return tiles * columns * shape.parts


@gluon.jit
def _bring(codes, x, ring, stage, expert_row, first, half, row, step, shape: gl.constexpr):
    """Start to copy the codes and rows of one step to a stage of the ring.

    Args:
        expert_row, first: the first row of the expert's weight, and the tile's first output.
        half: the number of rows between gates and values in the weight.
        row: the first row of x.
        step: the step along K.
    """
    full = ring.full.index(stage)
    WARPGROUPS: gl.constexpr = shape.warpgroups
    GROUPS: gl.constexpr = shape.groups
    BOXES: gl.constexpr = 1 if shape.few else GROUPS
    CODES: gl.constexpr = WARPGROUPS * (2 if shape.pairs == HALVES else 1)
    mbarrier.expect(full, CODES * codes.block_type.nbytes + BOXES * x.block_type.nbytes)
    word = step * (BLOCK_WORDS * shape.blocks)
    for group in gl.static_range(WARPGROUPS):
        output = first + group * 64
        if shape.pairs == HALVES:
            at = stage * (2 * WARPGROUPS) + 2 * group
            top = expert_row + output // 2
            tma_load(codes, [top, word], full, ring.codes.index(at))
            tma_load(codes, [top + half, word], full, ring.codes.index(at + 1))
        else:
            at = stage * WARPGROUPS + group
            tma_load(codes, [expert_row + output, word], full, ring.codes.index(at))
    if shape.few:
        CHUNKS: gl.constexpr = channels_of(shape) // CHUNK
        tma_load(x, [step * CHUNKS, row, 0], full, ring.x.index(stage))
    else:
        S: gl.constexpr = channels_of(shape) // GROUPS
        for group in gl.static_range(GROUPS):
            at = [row, step * (S * GROUPS) + group * S]
            tma_load(x, at, full, ring.x.index(stage * GROUPS + group))


@gluon.jit
def _load_items(given, shape: gl.constexpr):
    """Run the loader warp: bring the codes and rows of x of this CTA's items into the ring."""
    codes, x, ring, table, chosen, sizes = given
    tokens, experts, outputs, half, columns, stages, part_stages = sizes
    if shape.early == _FIRST:
        begin_next(1)
    if shape.early:
        await_previous(1)
        if shape.early != _FIRST:
            begin_next(1)
    filled = gl.program_id(0) * 0
    total = _total(table, tokens, columns, shape)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, end, column, part = _item(item, table, chosen, columns, experts, shape)
        row = first
        if shape.source != SORTED and shape.activation != NONE:
            row = first * 0
        output = column * (64 * shape.warpgroups)
        begin = part * part_stages
        steps = gl.minimum(part_stages, stages - begin)
        steps = gl.where(end > first, steps, 0)
        for step in range(steps):
            place = filled + step
            stage = place % shape.stages
            mbarrier.wait(ring.empty.index(stage), (place // shape.stages & 1) ^ 1)
            _bring(codes, x, ring, stage, expert * outputs, output, half, row, begin + step, shape)
        filled += steps


@gluon.jit
def _sums(tensors, bases, ring, filled, begin, steps, group, grid, constants, shape: gl.constexpr):
    """Return the float32 sums (64, rows) of `steps` stages of channels from stage `begin` on."""
    DTYPE: gl.constexpr = ring.x.dtype
    last = gl.maximum(steps - 1, 0)
    size: gl.constexpr = [64, shape.rows]
    acc = gl.zeros(size, gl.float32, _acc_layout(shape))
    raw = stage_scales(tensors, bases, begin, grid, shape)
    ahead = stage_scales(tensors, bases, begin + gl.minimum(1, last), grid, shape)
    for step in range(steps):
        coming = stage_scales(tensors, bases, begin + gl.minimum(step + 2, last), grid, shape)
        place = filled + step
        if shape.few:
            acc = added(acc, ring, place, raw, constants, shape, DTYPE)
            release_loaded(ring.empty.index(place % shape.stages))
        else:
            registers = registers_of_step(ring, place, group, raw, constants, shape, DTYPE)
            if shape.folds:
                acc = added_operand(acc, ring, place, registers[0], shape, DTYPE)
                release_loaded(ring.empty.index(place % shape.stages))
            else:
                products = start_products(ring, place, registers, shape, DTYPE)
                products = wait_for_products(products, shape)
                release_loaded(ring.empty.index(place % shape.stages))
                acc = added_products(acc, products, raw, shape, DTYPE)
        raw = ahead
        ahead = coming
    if shape.folds:
        acc = acc * FOLDED
    return acc


@gluon.jit
def _activated(gate, up, limit, alpha, ACTIVATION: gl.constexpr):
    """Return act(gate) * up, float32, for ACTIVATION, a constant of this module; CLAMPED clamps
    both to `limit` and gives (up + 1) gate sigmoid(alpha gate). See `triton.experts.products`."""
    if ACTIVATION == SILU:
        y = gate / (1.0 + gl.exp(-gate)) * up
    elif ACTIVATION == GELU:
        y = 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == GELU_TANH:
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        y = gate / (1.0 + gl.exp(-2.0 * inner)) * up
    elif ACTIVATION == RELU:
        y = gl.where(gate < 0.0, 0.0, gate) * up
    elif ACTIVATION == RELU_SQUARED:
        y = gl.where(gate < 0.0, 0.0, gate) * gate * up
    else:
        gate = gl.where(gate > limit, limit, gate)
        up = gl.where(up > limit, limit, gl.where(up < -limit, -limit, up))
        y = (up + 1.0) * gate / (1.0 + gl.exp(-alpha * gate))
    return y


@gluon.constexpr_function
def _store_layout(channels):
    """Return the register layout in which results (rows, channels) are stored: 16 bytes a thread,
    neighbouring threads along a row."""
    across = channels // 8
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _places(first, end, expert, chosen, place, tokens, LAYOUT: gl.constexpr, shape: gl.constexpr):
    """Return the row of y for each row of a tile, below 0 for none.

    Args:
        first, end: the range of the expert's rows.
        chosen, place: the expert and the row of y of each token's choices.
    """
    row = gl.arange(0, shape.rows, LAYOUT)
    if shape.source == TOKENS:
        ACTIVE: gl.constexpr = shape.active
        found = row * 0 - 1
        for slot in gl.static_range(ACTIVE):
            at = row * ACTIVE + slot
            hit = gl.load(chosen + at, mask=row < tokens, other=-1) == expert
            found = gl.where(hit, gl.load(place + at, mask=hit, other=0), found)
    else:
        found = gl.where(first + row < end, first + row, -1)
    return found


@gluon.jit
def _multiply_items(given, group: gl.constexpr, shape: gl.constexpr):
    """Run a warpgroup that multiplies: compute and write its outputs, number `group` of the tile,
    of this CTA's items."""
    tensors, ring, constants, lists, bias, weights, y, sizes, rates = given
    table, chosen, place, choice_of = lists
    tokens, experts, outputs, half, columns, stages, part_stages = sizes
    grid, outer_grid, block_rows, outer_rows, places, limit, alpha = rates
    ACC: gl.constexpr = _acc_layout(shape)
    OUT: gl.constexpr = _channels_out(shape)
    STORE: gl.constexpr = _store_layout(OUT)
    if shape.early:
        await_previous(4)
    filled = gl.program_id(0) * 0
    total = _total(table, tokens, columns, shape)
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        expert, first, end, column, part = _item(item, table, chosen, columns, experts, shape)
        output = column * (64 * shape.warpgroups) + group * 64
        begin = part * part_stages
        steps = gl.minimum(part_stages, stages - begin)
        steps = gl.where(end > first, steps, 0)
        base_rows = gl.minimum(
            rows_in_weight(output, half, shape.pairs, bases_layout(shape)), outputs - 1
        )
        base_rows += expert * outputs
        bases = bases_of(base_rows, grid, outer_grid, block_rows, outer_rows, shape)
        acc = _sums(tensors, bases, ring, filled, begin, steps, group, grid, constants, shape)
        filled += steps
        if shape.weighed:
            columns_at: gl.constexpr = gl.SliceLayout(0, ACC)
            written = _places(first, end, expert, chosen, place, tokens, columns_at, shape)
            is_row = written >= 0
            choice = written
            if shape.source != TOKEN:
                choice = gl.load(choice_of + written, mask=is_row, other=0)
            acc *= gl.expand_dims(gl.load(weights + choice, mask=is_row, other=0.0), 0)
        if shape.has_bias:
            row = rows_in_weight(output, half, shape.pairs, gl.SliceLayout(1, ACC))
            inside = (row < outputs) & (part == 0)
            added_bias = gl.load(bias + expert * outputs + row, mask=inside, other=0.0)
            acc += gl.expand_dims(added_bias.to(gl.float32), 1)
        width = outputs
        channel = output
        if shape.pairs != SINGLE:
            pairs = acc.reshape([4, 2, 8, shape.rows]).permute((0, 2, 3, 1))
            gate, up = gl.split(pairs)
            gate = _activated(gate, up, limit, alpha, shape.activation)
            value = gate.reshape([OUT, shape.rows])
            width = half
            channel = output // 2
        elif shape.activation != NONE:
            value = _activated(acc, 1.0, limit, alpha, shape.activation)
        else:
            value = acc
        turned = gl.convert_layout(value.to(y.dtype.element_ty).permute((1, 0)), STORE)
        written = _places(
            first, end, expert, chosen, place, tokens, gl.SliceLayout(1, STORE), shape
        )
        channel = gl.expand_dims(channel + gl.arange(0, OUT, gl.SliceLayout(0, STORE)), 0)
        to = gl.expand_dims((written + part * places).to(gl.int64) * width, 1) + channel
        gl.store(y + to, turned, mask=gl.expand_dims(written >= 0, 1) & (channel < width))


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
        "tokens",
        "experts",
        "columns",
        "places",
        "block_rows",
        "outer_rows",
        "stages",
        "part_stages",
    ]
)
def experts_kernel(
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
    weights,
    table,
    chosen,
    place,
    choice_of,
    y,
    magic_word,
    tokens,
    experts,
    outputs,
    half,
    columns,
    places,
    stages,
    part_stages,
    grid,
    outer_grid,
    block_rows,
    outer_rows,
    limit,
    alpha,
    shape: gl.constexpr,
):
    """Compute the up or the down product of a mixture of experts from codes of 8 or 4 bits: y
    (places, outputs), or with gates the activated (places, half); see the module's docstring.

    codes: descriptor of int32 (experts * outputs, words); x: of (chunks, rows, 64) boxes, or of
    (rows, K); table, place, choice_of: as `place_kernel` writes them; half: the rows of gates;
    columns: tiles of outputs; places: rows of y in each part; grid, outer_grid: columns of scales
    and of outer; block_rows, outer_rows: the rows that share them; stages, part_stages: the stages
    of K, and of a part of it.
    """
    PIECES: gl.constexpr = shape.warpgroups * (2 if shape.pairs == HALVES else 1)
    HIGH: gl.constexpr = 32 if shape.pairs == HALVES else 64
    GROUPS: gl.constexpr = shape.groups
    CHANNELS: gl.constexpr = channels_of(shape)
    code_ring = gl.allocate_shared_memory(
        codes.dtype, [shape.stages * PIECES, HIGH, BLOCK_WORDS * shape.blocks], codes.layout
    )
    if shape.few:
        x_ring = gl.allocate_shared_memory(
            x.dtype, [shape.stages, CHANNELS // CHUNK, shape.rows, CHUNK], x.layout
        )
    else:
        x_ring = gl.allocate_shared_memory(
            x.dtype, [shape.stages * GROUPS, shape.rows, CHANNELS // GROUPS], x.layout
        )
    ring = Ring(
        code_ring, x_ring, barriers(shape.stages, 1), barriers(shape.stages, shape.warpgroups)
    )
    fence_async_shared()
    sizes = (tokens, experts, outputs, half, columns, stages, part_stages)
    rates = (grid, outer_grid, block_rows, outer_rows, places, limit, alpha)
    tensors = (scales, zeros, minimums, outer, outer_minimums)
    constants = (
        (table0, table1, table2, table3, table4, table5, table6, table7),
        magic_word,
    )
    lists = (table, chosen, place, choice_of)
    given = (tensors, ring, constants, lists, bias, weights, y, sizes, rates)
    loads = (codes, x, ring, table, chosen, sizes)
    if shape.warpgroups == 1:
        gl.warp_specialize(
            [(_multiply_items, (given, 0, shape)), (_load_items, (loads, shape))], [1], [_LOADER]
        )
    elif shape.warpgroups == 2:
        gl.warp_specialize(
            [
                (_multiply_items, (given, 0, shape)),
                (_multiply_items, (given, 1, shape)),
                (_load_items, (loads, shape)),
            ],
            [4, 1],
            [shape.registers, _LOADER],
        )
    else:
        gl.warp_specialize(
            [
                (_multiply_items, (given, 0, shape)),
                (_multiply_items, (given, 1, shape)),
                (_multiply_items, (given, 2, shape)),
                (_multiply_items, (given, 3, shape)),
                (_load_items, (loads, shape)),
            ],
            [4, 4, 4, 1],
            [shape.registers, shape.registers, shape.registers, _LOADER],
        )
