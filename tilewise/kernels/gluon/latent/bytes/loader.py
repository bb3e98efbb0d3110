"""Loading tiles of 8-bit latents: one warp brings the tiles of all items of a CTA.

What: 64 keys of a paged cache by TMA, and their scales, into one stage of a ring.
Grid: the last partition of every CTA of `mla_bytes_kernel`.
One call: all tiles of a share, one after the other, as stages are freed: those of the next sequence
      are on their way while the last one is still being summed.
Traffic: one entry of the block table a block; every latent once a CTA.
Numerics: none.

A tile is loaded by boxes of up to 64 keys of one block. A box that the end of its sequence cuts is
loaded from further left, so that its last row is the last key; what lies left of the block is read
as zero. So no slot behind the end is ever read: 0 * NaN would reach every row of a product.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.device.compat import tma_load
from tilewise.kernels.gluon.latent.bytes.operands import KEYS, WIDTH
from tilewise.kernels.gluon.latent.share import block_id, item_of

TILES = gl.constexpr(4)  # of 128 channels, side by side
RANK = gl.constexpr(512)


class Loads(NamedTuple):
    """TMA descriptors of boxes of the cache (blocks, slots, 576), and its scales."""

    latent: object  # 128 channels wide
    rope: object
    scale: object  # float32 (blocks, slots, 2): of every slot the latent's and the rotated key's
    scale_block: object  # numbers from block to block


@gluon.jit
def shift_of(first_key, length, BOX: gl.constexpr):
    """Return how many slots further left than `first_key` a box of BOX keys is loaded, so that it
    ends at the last key of the sequence; BOX where it has no key."""
    return gl.minimum(gl.maximum(first_key + BOX - length, 0), BOX)


@gluon.jit
def load_items(loads, step, share, shared, variant: gl.constexpr):
    """Run the loader warp: load the tiles of latents and scales of all items of a CTA's share, as
    stages are freed."""
    tile = share.first
    sequence = share.sequence
    start = share.start
    at = share.first * 0  # tiles so far: the place in the ring
    while tile < share.last:
        item = item_of(step, share, tile, sequence, start, variant.rows)
        if (item.tiles > 0) & (item.rows > 0):
            for index in range(item.tiles):
                stage = at % variant.stages
                mbarrier.wait(shared.empty.index(stage), (at // variant.stages & 1) ^ 1)
                _load_tile(item, item.first + index, stage, loads, step, shared, variant)
                at += 1
        tile += item.tiles
        start += item.all_tiles
        sequence += 1


@gluon.jit
def _load_tile(item, tile, stage, loads, step, shared, variant: gl.constexpr):
    BOX: gl.constexpr = variant.box
    BOXES: gl.constexpr = KEYS // BOX
    full = shared.full.index(stage)
    nbytes: gl.constexpr = KEYS * (TILES * WIDTH + 64)
    mbarrier.expect(full, nbytes)
    last = gl.maximum(item.length - 1, 0) // variant.block
    for i in gl.static_range(BOXES):
        key = tile * KEYS + i * BOX
        entry = gl.minimum(key // variant.block, last)
        block = gl.load(item.table + entry, mask=item.length > 0, other=0)
        slot = key % variant.block - shift_of(key, item.length, BOX)
        for part in gl.static_range(TILES):
            memory = shared.latent.index((stage * TILES + part) * BOXES + i)
            tma_load(loads.latent, [block, 0, slot, part * WIDTH], full, memory)
        memory = shared.rope.index(stage * BOXES + i)
        tma_load(loads.rope, [block, 0, slot, RANK], full, memory)
    scales = _scales_of(item, tile, loads, step, variant)
    shared.key_scale.index(stage).store(scales)
    mbarrier.arrive(full, count=1)


@gluon.jit
def _scales_of(item, tile, loads, step, variant: gl.constexpr):
    """Return the scales (128,) of a tile's 64 keys, the latent's and the rotated key's of each; 0
    where a slot of the tile has no key.

    TMA reads from multiples of 16 bytes on, which are two slots: a tile that is cut may begin
    between them.
    """
    BOX: gl.constexpr = variant.box
    LANES: gl.constexpr = gl.BlockedLayout([4], [32], [1], [0])
    number = gl.arange(0, 2 * KEYS, LANES)
    place = number // 2
    first = tile * KEYS + place // BOX * BOX
    shift = shift_of(first, item.length, BOX)
    key = first + place % BOX - shift
    exists = place % BOX >= shift
    block = gl.load(item.table + key // variant.block, mask=exists, other=0)
    block = block_id(block, step)  # a copy of it by TMA brings zeros where it is none
    at = loads.scale + block * loads.scale_block + (key % variant.block * 2 + number % 2)
    return gl.load(at, mask=exists, other=0.0)
