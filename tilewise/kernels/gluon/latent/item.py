"""What the logits' warpgroup tells the others of an item, through shared memory.

What: eight integers an item, in two slots that take turns. Only one warpgroup finds its way through
      lengths and shares; the others, whose registers are full of sums, read what they need when
      they need it.
Grid: none, inlined into the partitions of `mla_decode_kernel` and `mla_bytes_kernel`.
One call: one integer, or a wait for a slot that may be written.
Traffic: shared memory.
Numerics: integers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

FIELDS = gl.constexpr(8)
TILES = gl.constexpr(0)  # of the item; 0: there is no other
FIRST = gl.constexpr(1)  # its first tile within the sequence
SEQUENCE = gl.constexpr(2)
LENGTH = gl.constexpr(3)  # tokens of the sequence
ROW = gl.constexpr(4)  # the first of all rows, new tokens times heads
COUNT = gl.constexpr(5)  # rows that are the sequence's
PART = gl.constexpr(6)  # where the item's rows go among the parts; -1: they go to o


@gluon.jit
def write(shared, slot, field: gl.constexpr, value):
    """Store `value` as one integer, numbered by `field`, of the item in a slot."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    memory = shared.item.index(slot * FIELDS + field)
    memory.store(gl.full([1], 0, gl.int32, lane) + value)


@gluon.jit
def tell(shared, slot, item, part):
    """Write all integers of `item` to a slot with one store: each store waits for the one before.

    Args:
        part: the place of the item's rows among the parts to be merged, -1 if they go to o.
    """
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    field = gl.arange(0, FIELDS, lane)
    value = gl.where(field == TILES, item.tiles, part)
    value = gl.where(field == FIRST, item.first, value)
    value = gl.where(field == SEQUENCE, item.sequence, value)
    value = gl.where(field == LENGTH, item.length, value)
    value = gl.where(field == ROW, item.first_row, value)
    value = gl.where(field == COUNT, item.rows, value)
    shared.items.index(slot).store(value)


@gluon.jit
def read(shared, slot, field: gl.constexpr):
    """Return the integer numbered by `field` of the item in a slot."""
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(shared.item.index(slot * FIELDS + field).load(lane), 0)


@gluon.jit
def wait_slot(visit, shared):
    """Wait until the other warpgroups have read the item before the last, which used the same slot.

    Args:
        visit: the number of items before the one that is to be written; its slot is visit % 2.
    """
    mbarrier.wait(shared.item_empty.index(visit % 2), (visit // 2 & 1) ^ 1)
