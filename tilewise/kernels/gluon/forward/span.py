"""Which blocks of keys a tile of rows visits, and in which order.

What: a walk over blocks of `tile.keys` keys, in runs that differ in what must be masked.
Grid: none, inlined into the partitions of the forward pass, which all take the same walk.
One call: the walk of one tile, or the block of one of its steps.
Traffic: without a block mask none; with one, 8 bytes for each of its entries.
Numerics: integers.

Without a block mask the walk goes from right to left: steps [0, free_begin) meet the diagonal or
the end of the keys, [free_begin, free_end) are seen whole by every row, those from left_begin on
meet the left edge of a window: [free_end, steps), and in a narrow window some of the first too.
With a mask, [0, free_begin) are its partial tiles and the others its full ones, of which those to
free_end are seen whole by every row; a rule hides keys of the rest.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.visible import end_of_keys, entries_of_rows, first_entry, keys_of_tile

NO_EDGE = gl.constexpr(1 << 30)


class Mask(NamedTuple):
    """The tensors of a block mask as the kernel takes them (see kernels.spec.MaskTensors); None
    without one."""

    bits: object
    reach: object  # int32 (bit tiles, words): keys that some row of a bit tile sees
    spans: object
    entries: object


class Walk(NamedTuple):
    """The blocks of keys that one tile of rows visits, in order; `block_of_step` finds the block of
    each of its `steps`."""

    steps: object
    free_begin: object
    free_end: object
    left_begin: object
    seen_begin: object  # keys outside [seen_begin, seen_end) exist, but no row of the tile sees one
    seen_end: object
    last: object  # the block of step 0, without a block mask
    partial: object  # starts of the partial and the full entries of a block mask
    full: object
    full_end: object
    first_full: object  # the full entry that comes first


@gluon.jit
def walk_of(rows, work, mask, tile: gl.constexpr, variant: gl.constexpr):
    """Return the Walk over the blocks of keys that a tile of rows sees, of at least one block.

    Args:
        rows: the tile of rows.
        work: the windows and the tiles of the launch.
        mask: the block mask; None without one.
    """
    last = gl.minimum(rows.first_row + tile.rows, rows.length_q) - 1
    limit = rows.length_k
    seen_begin, full_begin, full_end, seen_end = keys_of_tile(
        rows.first_row, last, rows.length_q, limit, work.window_left, work.window_right, variant
    )
    begin = seen_begin // tile.keys
    end = gl.maximum(gl.cdiv(seen_end, tile.keys), begin + 1)
    edge = seen_end
    if not (variant.packed or variant.lengths):  # past the end of a tensor all is zero
        edge = gl.where(seen_end == limit, NO_EDGE, seen_end)
    if variant.mask_keys > 0:
        partial, partial_end, full, last_full = entries_of_rows(
            rows, work, mask, seen_begin, seen_end, variant
        )
        count: gl.constexpr = variant.mask_keys // tile.keys
        free_begin = (partial_end - partial) * count
        steps = free_begin + (last_full - full) * count
        first_full = full
        free_end = steps
        if variant.ruled:
            if variant.left:
                whole = gl.cdiv(full_begin, variant.mask_keys)
                first_full = first_entry(mask.entries, full, last_full, whole)
            whole_end = full_end // variant.mask_keys
            free = first_entry(mask.entries, first_full, last_full, whole_end) - first_full
            free_end = free_begin + free * count
        return Walk(
            gl.maximum(steps, 1),
            free_begin,
            free_end,
            0,
            seen_begin,
            edge,
            end,
            partial,
            full,
            last_full,
            first_full,
        )
    else:
        free_begin = gl.maximum(end - gl.maximum(full_end // tile.keys, begin), 1)
        left_begin = end - gl.minimum(gl.cdiv(full_begin, tile.keys), end)
        free_end = gl.maximum(left_begin, free_begin)
        return Walk(
            end - begin,
            free_begin,
            free_end,
            left_begin,
            seen_begin,
            edge,
            end - 1,
            end,
            end,
            end,
            end,
        )


@gluon.jit
def hidden_steps(rows, walk, first_row, work, tile: gl.constexpr):
    """Return how many of a walk's first steps show no key to the 64 rows from `first_row`; at least
    one step is left. Only for walks without a block mask."""
    last_row = gl.minimum(first_row + 64, rows.length_q) - 1
    seen_end = end_of_keys(last_row, rows.length_q, rows.length_k, work.window_right)
    blocks = gl.cdiv(gl.maximum(seen_end, 0), tile.keys)
    return gl.minimum(gl.maximum(walk.last + 1 - blocks, 0), walk.steps - 1)


@gluon.jit
def block_of_step(walk, step, mask, tile: gl.constexpr, variant: gl.constexpr):
    """Return the number of the block of keys of step `step`, and its bit tile: -1 if the block has
    all bits, -2 if none."""
    if variant.mask_keys > 0:
        count: gl.constexpr = variant.mask_keys // tile.keys
        entry = walk.first_full + (step - walk.free_begin) // count
        if variant.left:  # those before the first one come last
            entry = gl.where(entry < walk.full_end, entry, entry - (walk.full_end - walk.full))
        entry = gl.where(step < walk.free_begin, walk.partial + step // count, entry)
        # A tile that sees nothing has no entry; its one step is block 0, and no bit is set.
        real = (walk.free_begin > 0) | (walk.full_end > walk.full)
        at = mask.entries + entry.to(gl.int64) * 2
        block = gl.load(at, mask=real, other=0) * count + step % count
        return block, gl.load(at + 1, mask=real, other=-2)
    else:
        return walk.last - step, -1
