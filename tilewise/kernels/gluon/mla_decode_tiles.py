"""Loading tiles of latents: 64 keys of a sequence, found through its block table, by TMA.

What: 64 rows of 256 or 64 channels of a paged cache into one stage of a ring.
Grid: none, inlined into the partitions of `mla_decode_kernel`.
One call: where a tile lies, or the copy of a part of it.
Traffic: one entry of the block table a tile and partition; every latent once a CTA.
Numerics: none.

A tile that is cut by the end of its sequence is loaded from further left, so that its last row is
the last key, and what lies left of the block is read as zero. So no slot behind the end is read,
and nothing has to be cleared: 0 * NaN would reach every row of a product.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon._compat import tma_load
from tilewise.kernels.gluon._prefetch import prefetch
from tilewise.kernels.gluon.mla_decode_share import KEYS

STAGES = gl.constexpr(3)
# Shared memory is full: the channels that are multiplied last have one stage less.
TAIL_STAGES = gl.constexpr(2)
LEFT, MIDDLE, TAIL, ROPE = (gl.constexpr(channel) for channel in (0, 256, 384, 512))


class Loads(NamedTuple):
    """TMA descriptors, by the width of what they load; `middle` is also the tail's."""

    q_left: object
    q_middle: object
    q_rope: object
    left: object
    middle: object
    rope: object


class Place(NamedTuple):
    """Where a tile lies in the cache: its block, and the slot of its first row (may be < 0)."""

    block: object
    slot: object


@gluon.jit
def shift_of(index, length):
    """Return how far left of its own first key tile `index` of a sequence is loaded."""
    return gl.maximum(KEYS - (length - index * KEYS), 0)


@gluon.jit
def place_of(table, length, index, exists, BLOCK: gl.constexpr):
    """Return the Place of tile `index` of a sequence; its table is not read unless it `exists`."""
    PER_BLOCK: gl.constexpr = BLOCK // KEYS
    entry = table + index // PER_BLOCK
    block = gl.load(entry, mask=exists, other=0)
    return Place(block, index % PER_BLOCK * KEYS - shift_of(index, length))


@gluon.jit
def load_part(cache, place, first_channel: gl.constexpr, full, memory):
    """Start to load one part of a tile's channels into `memory`; `full` opens when it is there."""
    mbarrier.expect(full, cache.block_type.nbytes)
    tma_load(cache, [place.block, 0, place.slot, first_channel], full, memory)


@gluon.jit
def prefetch_last(step, table, index, row_tile, variant: gl.constexpr):
    """Let L2 fetch the last 192 channels of a tile; CTAs of several tiles of rows take turns.

    They are loaded later than the others, and their ring is shorter.
    """
    if index % step.row_tiles == row_tile:
        LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
        PER_BLOCK: gl.constexpr = variant.block // KEYS
        block = gl.load(table + index // PER_BLOCK).to(gl.int64)
        thread = gl.arange(0, 128, LANES)
        slot = index % PER_BLOCK * KEYS + thread // 2
        start = step.cache + block * step.cache_block + TAIL
        prefetch(start + (slot * step.cache_slot + thread % 2 * 96), 192)
