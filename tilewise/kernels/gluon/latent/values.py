"""The sums of attention over latents: one warpgroup owns 256 of the 512 columns of o.

What: o = (sum of p v) / l of 64 rows; v is half of the channels that the logits were made of.
Grid: two partitions of every CTA of `mla_decode_kernel`.
One CTA: waits for p of a tile, rescales what it has, multiplies, and loads its half of the tile
      that comes into the same stage, three tiles on: no loader is needed.
Traffic: half of every latent, but for the first three tiles of an item; o once.
Numerics: float32 sums, o rounded once.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.device.warpgroup import scale_rows, sum_layout
from tilewise.kernels.gluon.latent.item import (
    COUNT,
    FIRST,
    LENGTH,
    PART,
    ROW,
    SEQUENCE,
    TILES,
    read,
)
from tilewise.kernels.gluon.latent.share import KEYS, ROWS
from tilewise.kernels.gluon.latent.tiles import (
    LEFT,
    MIDDLE,
    TAIL,
    load_part,
    place_of,
    prefetch_last,
)


@gluon.jit
def add_items(loads, step, output, shared, variant: gl.constexpr, SIDE: gl.constexpr):
    """Run a warpgroup of sums: compute and store one half of the channels of o of all items that
    the logits' warpgroup announces; SIDE: 0 is left, 1 is right."""
    at = gl.program_id(0) * 0  # tiles so far: the place in the ring
    visit = at  # items so far
    mbarrier.wait(shared.item_full.index(0), 0)
    tiles = read(shared, 0, TILES)
    while tiles > 0:
        _add_item(tiles, at, visit % 2, visit // 2 & 1, loads, step, output, shared, variant, SIDE)
        at += tiles
        visit += 1
        mbarrier.wait(shared.item_full.index(visit % 2), visit // 2 & 1)
        tiles = read(shared, visit % 2, TILES)


@gluon.jit
def _add_item(
    tiles, at, slot, phase, loads, step, output, shared, variant: gl.constexpr, SIDE: gl.constexpr
):
    """Sum p values over the tiles of an item, for one half of the channels, and store the result.

    Args:
        tiles: the number of tiles.
        at: the number of tiles before the item.
        slot, phase: the slot in which the item was told, and the phase of its barrier.
        SIDE: the half of the channels, 0 or 1.
    """
    table = step.block_table + read(shared, slot, SEQUENCE).to(gl.int64) * step.table_row
    length = read(shared, slot, LENGTH)
    first = read(shared, slot, FIRST)
    if SIDE == 0:
        o = gl.zeros([ROWS, 256], gl.float32, sum_layout(256))
        row_tile = gl.program_id(0) % step.row_tiles
        AHEAD: gl.constexpr = variant.prefetch + 2
        if variant.prefetch > 0:
            for index in gl.static_range(2, AHEAD):
                if index < tiles:
                    prefetch_last(step, table, length, first + index, row_tile, variant)
        for index in range(tiles):
            place = place_of(step, table, length, first + index + 3, index + 3 < tiles, variant)
            o = _begin_left(o, at + index, loads, shared)
            if variant.prefetch > 0:  # noqa: SIM102 (constexpr)
                if index + AHEAD < tiles:
                    ahead = first + index + AHEAD
                    prefetch_last(step, table, length, ahead, row_tile, variant)
            o = _end_left(o, at + index, index + 3 < tiles, place, loads, shared, variant)
        scale, part, row, rows = _end(slot, phase, shared, o)
        _store(scale_rows(o, scale), part, row, rows, output, LEFT, variant)
    else:
        o = gl.zeros([ROWS, 128], gl.float32, sum_layout(128))
        o_tail = gl.zeros([ROWS, 128], gl.float32, sum_layout(128))
        for index in range(tiles):
            next_tail = index + 2 < tiles
            tail = place_of(step, table, length, first + index + 2, next_tail, variant)
            place = place_of(step, table, length, first + index + 3, index + 3 < tiles, variant)
            o, o_tail = _add_right(
                o,
                o_tail,
                at + index,
                index + 3 < tiles,
                place,
                next_tail,
                tail,
                loads,
                shared,
                variant,
            )
        scale, part, row, rows = _end(slot, phase, shared, o)
        _store(scale_rows(o, scale), part, row, rows, output, MIDDLE, variant)
        _store(scale_rows(o_tail, scale), part, row, rows, output, TAIL, variant)


@gluon.jit
def _begin_left(o, at, loads, shared):
    """Multiply o by alpha and start to add p v of the left half of the tile at place `at`; return
    the asynchronous sum."""
    stage = at % 3
    mbarrier.wait(shared.p_full.index(stage), at // 3 & 1)
    alpha = shared.alpha.index(stage).load(gl.SliceLayout(1, o.type.layout))
    o = scale_rows(o, alpha)
    mbarrier.wait(shared.left_full.index(stage), at // 3 & 1)
    p = shared.rope.index(stage).reshape([ROWS, KEYS])
    return warpgroup_mma(p, shared.left.index(stage).reshape([KEYS, 256]), o, is_async=True)


@gluon.jit
def _end_left(o, at, exists, place, loads, shared, variant: gl.constexpr):
    """Wait for the product of `_begin_left` and return o; give the stage back, and start to load
    the left half of the tile three places on, at `place`, if it exists."""
    stage = at % 3
    o = warpgroup_mma_wait(0, deps=(o,))
    mbarrier.arrive(shared.empty.index(stage), count=1)
    if exists:
        left = shared.left.index(stage)
        load_part(loads.left, place, LEFT, shared.left_full.index(stage), left, variant)
    return o


@gluon.jit
def _add_right(
    o, o_tail, at, exists, place, next_tail, tail_place, loads, shared, variant: gl.constexpr
):
    """Return both sums of the right half of the channels, multiplied by alpha, plus p v of the tile
    at place `at`.

    Then the copies of the middle channels of the tile three later, and of the tail two later,
    start.

    Args:
        o, o_tail: the sums of both parts.
        at: the number of the tile over all items.
        exists, next_tail: whether the two later tiles exist.
        place, tail_place: the places of the two tiles in the cache.
    """
    stage = at % 3
    tail_stage = at % 2
    mbarrier.wait(shared.p_full.index(stage), at // 3 & 1)
    alpha = shared.alpha.index(stage).load(gl.SliceLayout(1, o.type.layout))
    o = scale_rows(o, alpha)
    o_tail = scale_rows(o_tail, alpha)
    mbarrier.wait(shared.middle_full.index(stage), at // 3 & 1)
    mbarrier.wait(shared.tail_full.index(tail_stage), at // 2 & 1)
    p = shared.rope.index(stage).reshape([ROWS, KEYS])
    middle, tail = shared.middle.index(stage), shared.tail.index(tail_stage)
    o_tail = warpgroup_mma(p, tail.reshape([KEYS, 128]), o_tail, is_async=True)
    o = warpgroup_mma(p, middle.reshape([KEYS, 128]), o, is_async=True)
    o, o_tail = warpgroup_mma_wait(0, deps=(o, o_tail))
    mbarrier.arrive(shared.empty.index(stage), count=1)
    if next_tail:
        full = shared.tail_full.index(tail_stage)
        load_part(loads.middle, tail_place, TAIL, full, tail, variant)
    if exists:
        full = shared.middle_full.index(stage)
        load_part(loads.middle, place, MIDDLE, full, middle, variant)
    return o, o_tail


@gluon.jit
def _end(slot, phase, shared, o):
    """Wait for the end of an item and return the factor (ROWS,) of its sums o, the number of its
    part (-1 for none), its first row and its number of rows."""
    mbarrier.wait(shared.scale_full.index(slot), phase)
    scale = shared.scale.index(slot).load(gl.SliceLayout(1, o.type.layout))
    part, row, rows = read(shared, slot, PART), read(shared, slot, ROW), read(shared, slot, COUNT)
    mbarrier.arrive(shared.item_empty.index(slot), count=1)
    return scale, part, row, rows


@gluon.constexpr_function
def _store_layout(columns):
    """Return how a warp stores its 16 rows of sums: four neighbouring columns a thread, not two.

    What four threads store of a row is then twice as long; warps get there by shuffles.
    """
    wide = [[0, 16 << bit] for bit in range((columns // 16).bit_length() - 1)]
    lanes = [[0, 8], [0, 4], [1, 0], [2, 0], [4, 0]]
    registers = [[0, 1], [0, 2], [8, 0], *wide]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def _store(o, part, first_row, rows, output, first_column: gl.constexpr, variant: gl.constexpr):
    """Store columns from `first_column` on of o (64, 512): to output.o if `part` is below 0, else
    as float32 to that part."""
    # Where one warp has all rows there is little to store, and the exchange takes longer.
    GROUP: gl.constexpr = 16 if variant.q_box == ROWS else 8
    GROUPS: gl.constexpr = o.shape[1] // GROUP
    if GROUP == 16:
        o = gl.convert_layout(o, _store_layout(o.shape[1]))
    # A few columns at a time: what a thread adds to its first address are then constants.
    o3 = o.reshape([ROWS, GROUPS, GROUP])
    L3: gl.constexpr = o3.type.layout
    L2: gl.constexpr = gl.SliceLayout(1, L3)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, L2)), 1)
    column = gl.expand_dims(gl.arange(0, GROUP, gl.SliceLayout(0, L2)), 0)
    groups = gl.arange(0, GROUPS, gl.SliceLayout(0, gl.SliceLayout(2, L3))) * GROUP
    groups = gl.expand_dims(gl.expand_dims(groups, 0), 2)
    within = gl.expand_dims(row * 512 + column, 1)
    inside = gl.expand_dims(row < rows, 1)
    if part < 0:
        start = output.o + first_row.to(gl.int64) * 512 + first_column
        gl.store(start + within + groups, o3.to(output.o.dtype.element_ty), mask=inside)
    else:
        part_start = output.part_o + part.to(gl.int64) * (ROWS * 512) + first_column
        gl.store(part_start + within + groups, o3, mask=inside)
