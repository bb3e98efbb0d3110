"""The logits of attention over 8-bit latents: one warpgroup, tile after tile.

What: s^T = z q^T of 64 keys and a tile of rows, p = exp(s - m), and the running m and l of rows.
Grid: the first partition of every CTA of `mla_bytes_kernel`.
One CTA: q of an item in shared memory, in float16; keys are widened in registers, 64 channels at a
      time, while the last 64 are multiplied.
Traffic: q once an item; every latent out of shared memory; p and one factor a row back into it.
Numerics: latents and rotated keys are summed apart, as their scales differ; m lacks the factor
      that a row of q was divided by: a power of two, so that the distance of a logit from the
      largest is rounded once, however large both are.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
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

from tilewise.kernels.gluon.device.compat import partition_barrier
from tilewise.kernels.gluon.device.warpgroup import LN2, exp2, sum_layout
from tilewise.kernels.gluon.latent.bytes.loader import TILES, shift_of
from tilewise.kernels.gluon.latent.bytes.operands import (
    KEYS,
    WIDTH,
    key_bytes_layout,
    key_halves,
    keys_operand,
    probability_halves,
    query_parts,
    rope_bytes_layout,
    rope_order,
)
from tilewise.kernels.gluon.latent.item import COUNT, PART, ROW, wait_slot, write
from tilewise.kernels.gluon.latent.item import TILES as ITEM_TILES
from tilewise.kernels.gluon.latent.share import item_of, store_lse
from tilewise.kernels.gluon.visible import causal_end

SMALLEST = gl.constexpr(1e-30)


class Queries(NamedTuple):
    """The rows of q (new tokens times heads) in global memory: pointers to latents and rotated
    channels, and their strides."""

    latent: object  # (T Hq, 512)
    rope: object  # (T Hq, 64)
    latent_row: object  # 16 elements from row to row: Triton then knows where 16 bytes begin
    rope_row: object


@gluon.constexpr_function
def _pair_layout(sides):
    """Return the register layout of a tile's scales (128,), two a key: a warp has those of its 16
    keys (sides 1) or of all 64 (sides 4)."""
    if sides == 1:
        return gl.DistributedLinearLayout(
            [[1], [16]], [[0], [0], [2], [4], [8]], [[32], [64]], [], [128]
        )
    return gl.DistributedLinearLayout(
        [[1], [64]], [[2], [4], [8], [16], [32]], [[0], [0]], [], [128]
    )


@gluon.jit
def score_items(queries, step, share, output, factor, shared, variant: gl.constexpr):
    """Run the warpgroup of logits: score all items of a CTA's share, one after the other, and then
    announce an item of 0 tiles, the end."""
    tile = share.first
    sequence = share.sequence
    start = share.start
    at = share.first * 0  # tiles so far: the place in the rings
    visit = at  # items so far
    while tile < share.last:
        item = item_of(step, share, tile, sequence, start, variant.rows)
        if (item.tiles > 0) & (item.rows > 0):
            _score_item(item, at, visit, queries, step, share, output, factor, shared, variant)
            at += item.tiles
            visit += 1
        tile += item.tiles
        start += item.all_tiles
        sequence += 1
    wait_slot(visit, shared)
    write(shared, visit % 2, ITEM_TILES, at * 0)
    mbarrier.arrive(shared.item_full.index(visit % 2), count=1)


@gluon.jit
def _score_item(
    item, at, visit, queries, step, share, output, factor, shared, variant: gl.constexpr
):
    """Announce an item, load its q, compute p of its tiles of keys one after the other, and store
    its lse and the factor of its o.

    Args:
        item: the work item, see `share.item_of`.
        at, visit: the numbers of tiles and of items before it.
    """
    ROWS: gl.constexpr = variant.rows
    S: gl.constexpr = sum_layout(ROWS)
    slot = visit % 2
    wait_slot(visit, shared)
    write(shared, slot, ITEM_TILES, item.tiles)
    write(shared, slot, ROW, item.first_row)
    write(shared, slot, COUNT, item.rows)
    part = item.number * step.row_tiles + share.row_tile
    write(shared, slot, PART, gl.where(item.parts == 1, -1, part))
    mbarrier.arrive(shared.item_full.index(slot), count=1)
    _bring_queries(queries, item, shared, variant)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(0, S))
    l = _partial_sums(gl.zeros([KEYS, ROWS], gl.float32, S))
    unit = gl.max(gl.zeros_like(m), 0)  # the largest scale of a latent so far
    for index in range(item.tiles):
        m, l, unit = _score_tile(
            item, index, at + index, m, l, unit, factor, step, share, shared, variant
        )
    total = gl.convert_layout(gl.sum(gl.sum(l, 0), 0), m.type.layout)
    seen = total != 0.0  # of NaN, too
    shared.scale.index(slot).store(gl.where(seen, unit / total, 0.0))
    mbarrier.arrive(shared.scale_full.index(slot), count=1)
    power = shared.power.load(m.type.layout)
    lse = gl.where(seen, (m * power + gl.log2(total)) * LN2, float("-inf"))
    store_lse(lse, item, step, share, output)


@gluon.jit
def _bring_queries(queries, item, shared, variant: gl.constexpr):
    """Store the item's rows of q in shared memory as float16, each divided by a power of two, and
    these powers."""
    ROWS: gl.constexpr = variant.rows
    WIDE: gl.constexpr = gl.BlockedLayout([1, 32], [8, 4], [4, 1], [1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0])
    BY_ROW: gl.constexpr = gl.SliceLayout(1, WIDE)
    row = gl.arange(0, ROWS, BY_ROW)
    channel = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE)), 0)
    at = gl.expand_dims(row * (queries.latent_row * 16), 1) + channel
    latent = queries.latent + item.first_row.to(gl.int64) * (queries.latent_row * 16) + at
    inside = gl.expand_dims(row < item.rows, 1)
    rope_row = gl.arange(0, ROWS, gl.SliceLayout(1, ROPE))
    rope_channel = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, ROPE)), 0)
    at = gl.expand_dims(rope_row * (queries.rope_row * 16), 1) + rope_channel
    rope = queries.rope + item.first_row.to(gl.int64) * (queries.rope_row * 16) + at
    rope_inside = gl.expand_dims(rope_row < item.rows, 1)
    rotated = gl.load(rope, mask=rope_inside, other=0.0).to(gl.float32)
    largest = gl.convert_layout(gl.max(gl.abs(rotated), 1), BY_ROW)
    for i in gl.static_range(TILES):
        x = gl.load(latent + i * WIDTH, mask=inside, other=0.0).to(gl.float32)
        largest = gl.maximum(largest, gl.max(gl.abs(x), 1))
    bits = largest.to(gl.int32, bitcast=True) & 0x7F800000
    bits = gl.minimum(gl.maximum(bits, 0x00800000), 0x7E800000)  # its inverse is no denormal
    power = bits.to(gl.float32, bitcast=True)
    inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
    for i in gl.static_range(TILES):
        x = gl.load(latent + i * WIDTH, mask=inside, other=0.0).to(gl.float32)
        even, odd = query_parts((x * gl.expand_dims(inverse, 1)).to(gl.float16))
        shared.q.index(2 * i).store(even)
        shared.q.index(2 * i + 1).store(odd)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, ROPE))
    shared.q.index(8).store(rope_order((rotated * gl.expand_dims(inverse, 1)).to(gl.float16)))
    shared.power.store(power)
    fence_async_shared()
    partition_barrier()


@gluon.jit
def _partial_sums(p):
    """Return the sums of the keys of p (64, rows) that each thread holds of a row: (4, 8, rows)."""
    rows: gl.constexpr = p.shape[1]
    return gl.sum(p.reshape([4, 2, 8, rows]), 1)


@gluon.jit
def _score_tile(item, index, at, m, l, unit, factor, step, share, shared, variant: gl.constexpr):
    """Compute a tile's probabilities p, pass them on in shared memory with the factor of older
    sums, and return the new m, l and unit.

    Args:
        index, at: the number of the tile in the item, and over all items.
        unit: the largest scale of the latents so far, which is divided out of p.
    """
    stage = at % variant.stages
    slot = at % 2
    mbarrier.wait(shared.full.index(stage), at // variant.stages & 1)
    pairs = shared.key_scale.index(stage).load(_pair_layout(1))
    all_pairs = shared.key_scale.index(stage).load(_pair_layout(4))
    KEY: gl.constexpr = gl.SliceLayout(1, sum_layout(variant.rows))
    latent_scale, rope_scale = gl.split(pairs.reshape([KEYS, 2]))
    latent_scale = gl.convert_layout(latent_scale, KEY)
    rope_scale = gl.convert_layout(rope_scale, KEY)
    # Latents whose scale is 0 are 0 themselves.
    divisor = gl.where(latent_scale < SMALLEST, SMALLEST, latent_scale)
    s = _products(stage, gl.expand_dims(rope_scale / divisor, 1), shared, variant)
    mbarrier.arrive(shared.empty.index(stage), count=1)
    s = s * gl.expand_dims(divisor * factor, 1)
    zeros = gl.zeros_like(s)
    power = shared.power.load(gl.SliceLayout(0, s.type.layout))
    tile = item.first + index
    if (tile + 1) * KEYS > causal_end(0, item.run, item.length):
        s = _hide(s, tile, item, step, share, variant)
    m_new = gl.maximum(m, gl.max(s, 0))
    shift = gl.where(m_new == float("-inf"), 0.0, m_new * power)
    alpha = exp2(gl.fma(m, power, 0.0 - shift))
    p = exp2(gl.fma(s, zeros + gl.expand_dims(power, 0), zeros - gl.expand_dims(shift, 0)))
    part = _partial_sums(p)
    by_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, part.type.layout))
    factors = gl.convert_layout(alpha, by_row)
    l = l * gl.expand_dims(gl.expand_dims(factors, 0), 1) + part
    units, _ = gl.split(all_pairs.reshape([KEYS, 2]))
    unit_new = gl.maximum(unit, gl.max(units, 0))
    inverse = gl.where(unit_new > 0.0, 1.0 / unit_new, 0.0)
    p = p * gl.expand_dims(latent_scale * inverse, 1)
    low, high = probability_halves(p.to(gl.float16))
    mbarrier.wait(shared.p_empty.index(slot), (at // 2 & 1) ^ 1)
    shared.alpha.index(slot).store(alpha * (unit * inverse))
    shared.p.index(2 * slot).store(low)
    shared.p.index(2 * slot + 1).store(high)
    fence_async_shared()
    mbarrier.arrive(shared.p_full.index(slot), count=1)
    return m_new, l, unit_new


@gluon.jit
def _products(stage, ratio, shared, variant: gl.constexpr):
    """Return the logits (64, rows) before scaling: z q^T of latents, plus y q^T of rotated keys y
    times ratio (64, 1)."""
    ROWS: gl.constexpr = variant.rows
    KIND: gl.constexpr = variant.kind
    zero = gl.zeros([KEYS, ROWS], gl.float32, sum_layout(ROWS))
    bits = shared.rope_tiles.index(stage).load(rope_bytes_layout()).reshape([KEYS, 4, 16])
    y = keys_operand(bits, ROWS, KIND)
    q = shared.q.index(8).permute((1, 0))
    s = warpgroup_mma(y, q, zero, use_acc=False, is_async=True)
    # The registers of an operand are read until its product is done; two run while the next two
    # are made, but with 64 rows there are registers for one at a time.
    RUNNING: gl.constexpr = 2 if ROWS < 64 else 0
    x = y
    for i in gl.static_range(TILES):
        bits = shared.latent_tiles.index(stage * TILES + i).load(key_bytes_layout())
        even, odd = key_halves(bits)
        if i == 0:
            s, y = warpgroup_mma_wait(0, deps=(s, y))
            s = s * ratio
        even = keys_operand(even, ROWS, KIND)
        if RUNNING == 0 and i > 0:
            s, y = warpgroup_mma_wait(0, deps=(s, y))
        s = warpgroup_mma(even, shared.q.index(2 * i).permute((1, 0)), s, is_async=True)
        odd = keys_operand(odd, ROWS, KIND)
        if RUNNING == 0:
            s, even = warpgroup_mma_wait(0, deps=(s, even))
        s = warpgroup_mma(odd, shared.q.index(2 * i + 1).permute((1, 0)), s, is_async=True)
        if RUNNING > 0 and i > 0:
            s, x, y = warpgroup_mma_wait(RUNNING, deps=(s, x, y))
        x = even
        y = odd
    s, x, y = warpgroup_mma_wait(0, deps=(s, x, y))
    return s


@gluon.jit
def _hide(s, tile, item, step, share, variant: gl.constexpr):
    """Return logits s (keys, rows) with -inf where a row does not see a key, and where no key is
    stored.

    Args:
        tile: the number of the tile in the sequence.
        item: the work item.
    """
    BOX: gl.constexpr = variant.box
    ROWS: gl.constexpr = variant.rows
    place = gl.arange(0, KEYS, gl.SliceLayout(1, s.type.layout))
    first = tile * KEYS + place // BOX * BOX
    shift = shift_of(first, item.length, BOX)
    within = place % BOX
    key = gl.where(within >= shift, first + within - shift, item.length)
    row = share.row_tile * ROWS
    row = row + gl.arange(0, ROWS, gl.SliceLayout(0, s.type.layout))
    token = gl.minimum(row // step.heads, item.run - 1)
    end = causal_end(token, item.run, item.length)
    return gl.where(gl.expand_dims(key, 1) < gl.expand_dims(end, 0), s, float("-inf"))
