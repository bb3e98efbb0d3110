"""Loading tiles of latents: 64 keys of a sequence, found through its block table, by TMA.

What: 64 rows of 64 to 256 channels of a paged cache into one stage of a ring.
Grid: none, inlined into the partitions of `mla_decode_kernel`.
One call: where a tile lies, or the copy of a part of it.
Traffic: one entry of the block table a box and partition; every latent once a CTA.
Numerics: none.

A tile is loaded by boxes: one of 64 keys, or the blocks that make 64. A box that the end of its
sequence cuts is loaded from further left, so that its last row is the last key, and what lies left
of the block is read as zero. So no slot behind the end is read, and nothing has to be cleared:
0 * NaN would reach every row of a product.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.device.compat import tma_load
from tilewise.kernels.gluon.device.prefetch import prefetch
from tilewise.kernels.gluon.latent.share import KEYS, block_id

STAGES = gl.constexpr(3)
# Shared memory is full: the channels that are multiplied last have one stage less.
TAIL_STAGES = gl.constexpr(2)
LEFT, MIDDLE, TAIL, ROPE = (gl.constexpr(channel) for channel in (0, 256, 384, 512))


class Loads(NamedTuple):
    """TMA descriptors, named by the channels that they load; `middle` loads the tail, too."""

    q_left: object
    q_middle: object
    q_rope: object
    left: object
    middle: object
    rope: object


class Place(NamedTuple):
    """The place of a tile in the cache: its block, and the slot of its first row (may be < 0)."""

    block: object
    slot: object


class Places(NamedTuple):
    """The boxes of a tile in the cache: their blocks, and the length from which slots follow."""

    blocks: object
    index: object
    length: object


@gluon.jit
def shift_of(index, length):
    """Return how many keys before its first one the box of tile `index` of a sequence begins.

    The last tile is loaded as a whole box that ends with the sequence's last key.
    """
    return gl.maximum(KEYS - (length - index * KEYS), 0)


@gluon.jit
def box_shift(first_key, length, BOX: gl.constexpr):
    """Return how many slots further left than `first_key` a box of BOX keys is loaded, so that it
    ends at the last key of the sequence; BOX where it has no key."""
    return gl.minimum(gl.maximum(first_key + BOX - length, 0), BOX)


@gluon.jit
def place_of(step, table, length, index, exists, variant: gl.constexpr):
    """Return the Place of tile `index` of a sequence, or its Places where a tile takes several
    blocks; the block table is not read unless the tile `exists`."""
    if variant.box == KEYS:
        PER_BLOCK: gl.constexpr = variant.block // KEYS
        entry = table + index // PER_BLOCK
        block = gl.load(entry, mask=exists, other=0)
        return Place(block, index % PER_BLOCK * KEYS - shift_of(index, length))
    else:
        BOX: gl.constexpr = variant.box
        blocks = ()
        for i in gl.static_range(KEYS // BOX):
            # An entry behind the end of the sequence may be anything: its box lies off its block.
            entry = gl.minimum(index * (KEYS // BOX) + i, step.table_row - 1)
            block = gl.load(table + entry, mask=exists, other=0)
            blocks = blocks + (block,)  # noqa: RUF005 (Triton unpacks no tuple in a tuple)
        return Places(blocks, index, length)


@gluon.jit
def load_part(cache, place, first_channel: gl.constexpr, full, memory, variant: gl.constexpr):
    """Start to copy one part of a tile's channels to `memory`; `full` opens when it has arrived.

    Args:
        cache: the TMA descriptor of the part's width.
        place: the tile's `Place` or `Places`.
    """
    BOX: gl.constexpr = variant.box
    BOXES: gl.constexpr = KEYS // BOX
    mbarrier.expect(full, BOXES * cache.block_type.nbytes)
    if BOXES == 1:
        tma_load(cache, [place.block, 0, place.slot, first_channel], full, memory)
    else:
        for i in gl.static_range(BOXES):
            key = place.index * KEYS + i * BOX
            slot = 0 - box_shift(key, place.length, BOX)
            box = memory.slice(i * BOX, BOX, dim=2)
            tma_load(cache, [place.blocks[i], 0, slot, first_channel], full, box)


@gluon.jit
def prefetch_last(step, table, length, index, row_tile, variant: gl.constexpr):
    """Let L2 fetch the last 192 channels of a tile; CTAs of several tiles of rows take turns.

    They are loaded later than the others, and their ring is shorter.
    """
    if index % step.row_tiles == row_tile:
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        thread = gl.arange(0, 128, LANES)
        if variant.box == KEYS:
            PER_BLOCK: gl.constexpr = variant.block // KEYS
            block = block_id(gl.load(table + index // PER_BLOCK), step)
            slot = index % PER_BLOCK * KEYS + thread // 2
        else:
            key = gl.minimum(index * KEYS + thread // 2, length - 1)
            block = block_id(gl.load(table + key // variant.block), step)
            slot = key % variant.block
        start = step.cache + block * step.cache_block + TAIL
        prefetch(start + (slot * step.cache_slot + thread % 2 * 96), 192)
