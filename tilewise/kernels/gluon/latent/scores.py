"""The logits of attention over latents: one warpgroup, 64 rows, tile after tile.

What: s = q z^T of 64 rows and 64 keys, p = exp(s - m), and the running m and l of every row.
Grid: the first partition of every CTA of `mla_decode_kernel`.
One CTA: q of an item goes through a stage of the ring into registers, all but its rope channels.
      Step j issues the logits of tile j + 1 once p of tile j has left the registers; that p is
      handed on while they run, so that the products with values fill the time of the softmax.
Traffic: q once an item; p (64, 64) and one factor a row through shared memory.
Numerics: see `forward.softmax`.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.device.compat import partition_barrier, tma_load
from tilewise.kernels.gluon.device.warpgroup import keep_columns, operand_layout, sum_layout
from tilewise.kernels.gluon.forward.softmax import finish, fold, partial_sums
from tilewise.kernels.gluon.latent.item import TILES, tell, wait_slot, write
from tilewise.kernels.gluon.latent.share import KEYS, ROWS, item_of, store_lse
from tilewise.kernels.gluon.latent.tiles import (
    LEFT,
    MIDDLE,
    ROPE,
    TAIL,
    box_shift,
    load_part,
    place_of,
    shift_of,
)
from tilewise.kernels.gluon.visible import causal_end


@gluon.jit
def score_items(loads, step, share, output, factor, shared, variant: gl.constexpr):
    """Run the warpgroup of logits: score all items of a CTA's share, one after the other, and then
    announce an item of 0 tiles, the end.

    Args:
        loads: the descriptors of q and of the cache, see `tiles`.
    """
    tile = share.first
    sequence = share.sequence
    start = share.start
    at = share.first * 0  # tiles so far: the place in the ring
    visit = at  # items so far
    while tile < share.last:
        item = item_of(step, share, tile, sequence, start, ROWS)
        if (item.tiles > 0) & (item.rows > 0):
            _score_item(item, at, visit, loads, step, share, output, factor, shared, variant)
            at += item.tiles
            visit += 1
        tile += item.tiles
        start += item.all_tiles
        sequence += 1
    wait_slot(visit, shared)
    write(shared, visit % 2, TILES, at * 0)
    mbarrier.arrive(shared.item_full.index(visit % 2), count=1)


@gluon.jit
def _score_item(item, at, visit, loads, step, share, output, factor, shared, variant: gl.constexpr):
    """Announce an item, load its q and first tiles, compute p of tile after tile, and store its lse
    and the factor of its o.

    Args:
        item: the work item, see `share.item_of`.
        at, visit: the numbers of tiles and of items before it.
    """
    S: gl.constexpr = sum_layout(KEYS)
    slot = visit % 2
    wait_slot(visit, shared)
    part = item.number * step.row_tiles + share.row_tile
    tell(shared, slot, item, gl.where(item.parts == 1, -1, part))
    mbarrier.arrive(shared.item_full.index(slot), count=1)
    q_left, q_middle = _begin(item, at, visit, loads, step, shared, variant)
    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = partial_sums(gl.zeros([ROWS, KEYS], gl.float32, S))
    s = _issue(q_left, q_middle, at, shared)
    s = warpgroup_mma_wait(0, deps=(s,))
    for index in range(item.tiles - 1):
        if variant.several:
            s = _hide(s, item, index, step, share, variant, False)
        m, l = _fold_tile(s, m, l, at + index, factor, shared)
        s = _issue(q_left, q_middle, at + index + 1, shared)
        s = warpgroup_mma_wait(variant.publish, deps=(s,))
        mbarrier.arrive(shared.p_full.index((at + index) % 3), count=1)
        if (index > 0) & (index + 2 < item.tiles):
            _load_rope(item, index + 2, at, loads, step, shared, variant)
        s = warpgroup_mma_wait(0, deps=(s,))
    last = item.tiles - 1
    s = _hide(s, item, last, step, share, variant, True)
    m, l = _fold_tile(s, m, l, at + last, factor, shared)
    mbarrier.arrive(shared.p_full.index((at + last) % 3), count=1)

    lse, scale = finish(m, l, factor, 0.0, True, False)
    shared.scale.index(slot).store(scale)
    mbarrier.arrive(shared.scale_full.index(slot), count=1)
    store_lse(lse, item, step, share, output)


@gluon.jit
def _begin(item, at, visit, loads, step, shared, variant: gl.constexpr):
    """Start the copies of an item's q and first three tiles of keys; return q in registers.

    The ring has three stages. q arrives in the stage of the third tile, whose copy starts only
    after all warps have read q from there.

    Args:
        item: the work item, see `share.item_of`.
        at: the number of tiles before this item: its first tile goes to stage at % 3.
        visit: the number of items before this one.

    Returns:
        q as left operands: its first 256 channels, and its next 128.
    """
    stage = (at + 2) % 3
    full = shared.q_full.index(0)
    # Loops, because no cache holds the instructions of a first item: short code comes sooner.
    for index in range(3):
        _wait_empty(at + index, shared)
        if index == 2:  # then all of the item before has been taken
            _load_queries(item, stage, full, loads, shared, variant)
        elif index < item.tiles:
            _load_tile(item, index, at, loads, step, shared, variant)
    for index in range(2):
        if index < item.tiles:
            tail = (at + index) % 2
            place = _place_of(item, index, step, variant)
            full_tail = shared.tail_full.index(tail)
            load_part(loads.middle, place, TAIL, full_tail, shared.tail.index(tail), variant)
    mbarrier.wait(full, visit & 1)
    OPERAND: gl.constexpr = operand_layout(KEYS)
    q_left = shared.left.index(stage).reshape([ROWS, 256]).load(OPERAND)
    q_middle = shared.middle.index(stage).reshape([ROWS, 128]).load(OPERAND)
    fence_async_shared()
    partition_barrier()  # all have read what the next tile overwrites
    if item.tiles > 2:
        _load_tile(item, 2, at, loads, step, shared, variant)
    return q_left, q_middle


@gluon.jit
def _load_queries(item, stage, full, loads, shared, variant: gl.constexpr):
    """Start to load `q_box` rows of q; rows behind them in shared memory keep their old values.

    What rows that are not the item's own give is never part of the results.
    """
    BOX: gl.constexpr = variant.q_box
    nbytes: gl.constexpr = (
        loads.q_left.block_type.nbytes
        + 2 * loads.q_middle.block_type.nbytes
        + loads.q_rope.block_type.nbytes
    )
    mbarrier.expect(full, nbytes)
    row = item.first_row
    left, middle = shared.left.index(stage), shared.middle.index(stage)
    tma_load(loads.q_left, [0, 0, row, LEFT], full, left.slice(0, BOX, dim=2))
    tma_load(loads.q_middle, [0, 0, row, MIDDLE], full, middle.slice(0, BOX, dim=2))
    tma_load(loads.q_middle, [0, 0, row, TAIL], full, shared.q_tail.slice(0, BOX, dim=2))
    tma_load(loads.q_rope, [0, 0, row, 0], full, shared.q_rope.slice(0, BOX, dim=2))


@gluon.jit
def _place_of(item, index, step, variant: gl.constexpr):
    """Return where tile `index` of an item lies in the cache."""
    return place_of(step, item.table, item.length, item.first + index, item.length > 0, variant)


@gluon.jit
def _wait_empty(at, shared):
    """Wait until the tile that was in the ring's stage of place `at` before has been taken."""
    mbarrier.wait(shared.empty.index(at % 3), (at // 3 & 1) ^ 1)


@gluon.jit
def _load_tile(item, index, at, loads, step, shared, variant: gl.constexpr):
    """Start to load tile `index` of an item, all but its tail; its stage is empty."""
    place = _place_of(item, index, step, variant)
    stage = (at + index) % 3
    full = shared.left_full.index(stage)
    load_part(loads.left, place, LEFT, full, shared.left.index(stage), variant)
    full = shared.middle_full.index(stage)
    load_part(loads.middle, place, MIDDLE, full, shared.middle.index(stage), variant)
    full = shared.rope_full.index(stage)
    load_part(loads.rope, place, ROPE, full, shared.rope.index(stage), variant)


@gluon.jit
def _load_rope(item, index, at, loads, step, shared, variant: gl.constexpr):
    """Start to copy the rope channels of a tile; the warpgroups that sum o copy its other channels.

    Args:
        index: the number of the tile in the item.
        at: the number of tiles before the item.
    """
    stage = (at + index) % 3
    place = _place_of(item, index, step, variant)
    _wait_empty(at + index, shared)
    full = shared.rope_full.index(stage)
    load_part(loads.rope, place, ROPE, full, shared.rope.index(stage), variant)


@gluon.jit
def _issue(q_left, q_middle, at, shared):
    """Start the four products of the logits (64, 64) of the tile at place `at`, and return the
    asynchronous sum."""
    stage = at % 3
    phase = at // 3 & 1
    zero = gl.zeros([ROWS, KEYS], gl.float32, sum_layout(KEYS))
    mbarrier.wait(shared.left_full.index(stage), phase)
    left = shared.left.index(stage).reshape([KEYS, 256]).permute((1, 0))
    s = warpgroup_mma(q_left, left, zero, use_acc=False, is_async=True)
    mbarrier.wait(shared.middle_full.index(stage), phase)
    middle = shared.middle.index(stage).reshape([KEYS, 128]).permute((1, 0))
    s = warpgroup_mma(q_middle, middle, s, is_async=True)
    mbarrier.wait(shared.rope_full.index(stage), phase)
    rope = shared.rope.index(stage).reshape([KEYS, 64]).permute((1, 0))
    s = warpgroup_mma(shared.q_rope.reshape([ROWS, 64]), rope, s, is_async=True)
    mbarrier.wait(shared.tail_full.index(at % 2), at // 2 & 1)
    tail = shared.tail.index(at % 2).reshape([KEYS, 128]).permute((1, 0))
    return warpgroup_mma(shared.q_tail.reshape([ROWS, 128]), tail, s, is_async=True)


@gluon.jit
def _fold_tile(s, m, l, at, factor, shared):
    """Take the softmax of logits s: store p and alpha in shared memory, not announced yet, and
    return the new m and l."""
    stage = at % 3
    p, m, l, alpha = fold(s, m, l, factor, True, False, True)
    shared.alpha.index(stage).store(alpha)
    rope = shared.rope.index(stage).reshape([ROWS, KEYS])
    partition_barrier()  # all warps' products have read the rope channels
    rope.store(p.to(shared.rope.dtype))
    fence_async_shared()
    return m, l


@gluon.jit
def _hide(s, item, index, step, share, variant: gl.constexpr, LAST: gl.constexpr):
    """Return logits s of tile `index` of an item with -inf for keys that a row does not see and for
    columns without a key.

    Nothing is done where all rows see all keys, which is not asked for the LAST tile.
    """
    tile = item.first + index
    # The first row of a run sees fewest keys.
    if LAST or ((tile + 1) * KEYS > causal_end(0, item.run, item.length)):
        row = share.row_tile * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s.type.layout))
        token = gl.minimum(row // step.heads, item.run - 1)
        end = causal_end(token, item.run, item.length) - tile * KEYS
        if variant.box == KEYS:
            shift = shift_of(tile, item.length)
            s = keep_columns(s, end * 0 + shift, end + shift, True, True)
        else:
            key = _keys_of(tile, item.length, variant.box, gl.SliceLayout(0, s.type.layout))
            seen = gl.expand_dims(key, 0) < gl.expand_dims(end, 1)
            s = gl.where(seen, s, float("-inf"))
    return s


@gluon.jit
def _keys_of(tile, length, BOX: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the key in each column of a tile; `length`, which no row sees, for columns without
    a key."""
    column = gl.arange(0, KEYS, LAYOUT)
    first = column // BOX * BOX
    shift = box_shift(tile * KEYS + first, length, BOX)
    return gl.where(column - first >= shift, column - shift, length)
