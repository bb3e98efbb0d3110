"""The sums of attention over 8-bit latents: one warpgroup owns 256 of the 512 channels of o.

What: o^T = (sum of v^T p^T) * scale of a tile of rows; v is half of the latents' channels.
Grid: two partitions of every CTA of `mla_bytes_kernel`.
One CTA: widens a tile of values in registers, 32 keys by 128 channels at a time, and multiplies it
      with p from shared memory while the next 32 are widened.
Traffic: half of every latent out of shared memory; o once.
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

from tilewise.kernels.gluon.device.barriers import release_loaded
from tilewise.kernels.gluon.device.warpgroup import sum_layout
from tilewise.kernels.gluon.latent.bytes.loader import TILES
from tilewise.kernels.gluon.latent.bytes.operands import (
    WIDTH,
    output_order,
    value_bytes_layout,
    value_halves,
    values_operand,
)
from tilewise.kernels.gluon.latent.item import COUNT, PART, ROW, read
from tilewise.kernels.gluon.latent.item import TILES as ITEM_TILES


@gluon.jit
def add_items(output, shared, variant: gl.constexpr, SIDE: gl.constexpr):
    """Compute and store one half of the channels of o, item after item, until none comes.

    An item is a tile of rows and the tiles of keys that it reads; the warpgroup of the logits
    announces it in shared memory. SIDE: 0 for the first half, 1 for the second.
    """
    ROWS: gl.constexpr = variant.rows
    SUM: gl.constexpr = sum_layout(ROWS)
    at = gl.program_id(0) * 0  # tiles so far: the place in the rings
    visit = at  # items so far
    mbarrier.wait(shared.item_full.index(0), 0)
    tiles = read(shared, 0, ITEM_TILES)
    while tiles > 0:
        o = gl.zeros([WIDTH, ROWS], gl.float32, SUM)
        o_next = gl.zeros([WIDTH, ROWS], gl.float32, SUM)
        for _ in range(tiles):
            o, o_next = _add_tile(o, o_next, at, shared, variant, SIDE)
            at += 1
        slot = visit % 2
        mbarrier.wait(shared.scale_full.index(slot), visit // 2 & 1)
        scale = shared.scale.index(slot).load(gl.SliceLayout(0, SUM))
        part = read(shared, slot, PART)
        row = read(shared, slot, ROW)
        rows = read(shared, slot, COUNT)
        mbarrier.arrive(shared.item_empty.index(slot), count=1)
        scale = gl.expand_dims(scale, 0)
        _store(o * scale, part, row, rows, output, 2 * SIDE * WIDTH)
        _store(o_next * scale, part, row, rows, output, (2 * SIDE + 1) * WIDTH)
        visit += 1
        mbarrier.wait(shared.item_full.index(visit % 2), visit // 2 & 1)
        tiles = read(shared, visit % 2, ITEM_TILES)


@gluon.jit
def _add_tile(o, o_next, at, shared, variant: gl.constexpr, SIDE: gl.constexpr):
    """Return the sums o and o_next, 128 channels of this warpgroup each, after the tile at place
    `at` of the rings: multiplied by alpha, plus v^T p^T."""
    ROWS: gl.constexpr = variant.rows
    KIND: gl.constexpr = variant.kind
    stage = at % variant.stages
    slot = at % 2
    place = stage * TILES + 2 * SIDE
    mbarrier.wait(shared.full.index(stage), at // variant.stages & 1)
    low, high = value_halves(shared.latent_tiles.index(place).load(value_bytes_layout()))
    x = values_operand(low, ROWS, KIND)
    mbarrier.wait(shared.p_full.index(slot), at // 2 & 1)
    alpha = shared.alpha.index(slot).load(gl.SliceLayout(0, o.type.layout))
    alpha = gl.expand_dims(alpha, 0)
    p_low = shared.p.index(2 * slot)
    p_high = shared.p.index(2 * slot + 1)
    o = o * alpha
    o_next = o_next * alpha
    # The registers of an operand are read until its product is done; with 64 rows there are none
    # for a second operand.
    RUNNING: gl.constexpr = 1 if ROWS < 64 else 0
    o = warpgroup_mma(x, p_low, o, is_async=True)
    y = x
    o, y = warpgroup_mma_wait(RUNNING, deps=(o, y))
    y = values_operand(high, ROWS, KIND)
    o = warpgroup_mma(y, p_high, o, is_async=True)
    low, high = value_halves(shared.latent_tiles.index(place + 1).load(value_bytes_layout()))
    release_loaded(shared.empty.index(stage))
    o, x = warpgroup_mma_wait(RUNNING, deps=(o, x))
    x = values_operand(low, ROWS, KIND)
    o_next = warpgroup_mma(x, p_low, o_next, is_async=True)
    o, y = warpgroup_mma_wait(RUNNING, deps=(o, y))
    y = values_operand(high, ROWS, KIND)
    o_next = warpgroup_mma(y, p_high, o_next, is_async=True)
    o_next, o, x, y = warpgroup_mma_wait(0, deps=(o_next, o, x, y))
    mbarrier.arrive(shared.p_empty.index(slot), count=1)
    return o, o_next


@gluon.jit
def _store(o, part, first_row, rows, output, first_channel: gl.constexpr):
    """Store channels from `first_channel` on of o^T (128, rows): to o if `part` is below 0, else as
    float32 to that part."""
    ROWS: gl.constexpr = o.shape[1]
    o = output_order(o)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, o.type.layout))
    channel = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, o.type.layout)), 0)
    at = gl.expand_dims(row, 1) * 512 + channel
    if part < 0:
        start = output.o + first_row.to(gl.int64) * 512 + first_channel
        mask = gl.expand_dims(row < rows, 1)
        gl.store(start + at, o.to(output.o.dtype.element_ty), mask=mask)
    else:
        part_start = output.part_o + part.to(gl.int64) * (ROWS * 512) + first_channel
        gl.store(part_start + at, o)
