"""Which tile a CTA computes: the number of a tile -> sequence, head and rows.

What: the order in which the tiles of a launch are computed.
Grid: none, inlined into the forward pass. Its CTAs stay and take one tile after the other.
One call: one tile of `tile.rows` rows of one head.
Traffic: a row of the plan of a packed batch (see sorted_tiles.py), the length of a sequence.
Numerics: integers. Where tiles cost the same they go head by head, by a fixed stride: K and V of a
head stay in L2. Else an atomic counter deals them out, from much to little work, in sections of
heads whose K and V fit L2 together, heads fastest.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

PLAN_FIELDS = gl.constexpr(6)  # of an entry: those of Rows, in order


class Work(NamedTuple):
    """The numbers from which a kernel finds all tiles of its launch; made inside the kernel from
    its arguments."""

    num_tiles: object
    row_tiles: object  # tiles of rows of a head; of all sequences where they are packed
    num_heads: object  # heads that number the tiles: B Hq, or Hq where sequences are packed
    heads_per_section: object
    num_q_heads: object
    group_size: object
    seqlen_q: object
    seqlen_k: object
    window_left: object
    window_right: object
    mask_batch: object  # spans of a block mask between sequences and heads, 0 where shared
    mask_head: object
    seqlens_k: object  # int32 (B,), None where all have seqlen_k
    plan: object  # int32 (entries, PLAN_FIELDS), None for a dense batch


class Rows(NamedTuple):
    """One tile of queries of one head b, h; first_row counts from the start of the sequence,
    first_q and first_k are where the sequence starts in q and k."""

    b: object
    h: object
    first_row: object
    first_q: object  # first row of the sequence in a packed batch, else 0
    length_q: object
    first_k: object
    length_k: object


@gluon.jit
def rows_of_tile(number, work, tile: gl.constexpr, variant: gl.constexpr):
    """Return the Rows of tile `number`, which is less than work.num_tiles."""
    if tile.dynamic:
        per_section = work.heads_per_section * work.row_tiles
        section = number // per_section
        within = number - section * per_section
        first_head = section * work.heads_per_section
        heads = gl.maximum(gl.minimum(work.heads_per_section, work.num_heads - first_head), 1)
        place = within // heads
        head = first_head + within - place * heads
        row_tile = place  # the last of a head may be short, and then takes the least time
        if variant.right or variant.mask_keys > 0:
            row_tile = work.row_tiles - 1 - place
    else:
        head = number // work.row_tiles
        row_tile = number - head * work.row_tiles
        place = row_tile
    if variant.packed:
        entry = work.plan + place * PLAN_FIELDS
        return Rows(
            gl.load(entry),
            head,
            gl.load(entry + 1),
            gl.load(entry + 2),
            gl.load(entry + 3),
            gl.load(entry + 4),
            gl.load(entry + 5),
        )
    else:
        b = head // work.num_q_heads
        h = head - b * work.num_q_heads
        if variant.shares_bias:  # and a tile's bias comes from memory once for all of them
            batch = work.num_heads // work.num_q_heads
            h = head // batch
            b = head - h * batch
        length_k = work.seqlen_k
        if variant.lengths:
            length_k = gl.minimum(gl.maximum(gl.load(work.seqlens_k + b), 0), work.seqlen_k)
        first = row_tile * tile.rows
        return Rows(b, h, first, 0, work.seqlen_q, 0, length_k)
