"""What a CTA of attention over latents computes: an equal share of all tiles of keys.

What: the tiles of all sequences in a row, cut into shares of equal size, one for each CTA.
Grid: none, inlined into `mla_decode_kernel` and `mla_bytes_kernel`; every CTA finds its own share.
One call: a share, or the part of it that one sequence has (an item).
Traffic: the lengths of the first 64 sequences once a CTA, of others twice; lse of its rows, once.
Numerics: integers.

A share may begin and end within a sequence. Items are numbered sequence + share: from one item to
the next, one of the two grows. So the items of a sequence are neighbours, and there are at most as
many as sequences and shares together.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS = gl.constexpr(64)  # of a tile
ROWS = gl.constexpr(64)  # new tokens times heads
CHUNK = gl.constexpr(64)  # sequences whose tiles are added up at once
# A share may grow by a 16th where then its ends meet those of equally long sequences: nothing has
# to be merged. Merging two parts of all sequences took longer (see docs/results/mla.md).
SLACK = gl.constexpr(16)


class Step(NamedTuple):
    """The cache, block table and lengths of a call, as the kernel takes them."""

    cache: object  # (blocks, slots, 576)
    cache_block: object  # elements from block to block
    cache_slot: object
    block_table: object  # int32 (B, max_blocks)
    table_row: object
    seqlens_k: object  # int32 (B,)
    cu_seqlens_q: object  # int32 (B + 1,)
    batch: object
    heads: object
    row_tiles: object  # tiles of rows of the longest run
    tokens: object  # rows of q
    max_keys: object  # keys that a row of the table leads to
    blocks: object  # blocks of the cache


class Share(NamedTuple):
    """The share of a CTA: tiles of keys first ... last - 1, counted over all sequences.

    `sequence` is the first sequence of the share, whose tiles begin at `start`.
    """

    number: object
    row_tile: object  # the CTA computes these rows of every run
    size: object  # tiles of every share but the last
    first: object
    last: object
    sequence: object
    start: object


class Item(NamedTuple):
    """A part of a share: tiles first ... first + tiles - 1 of one sequence, for a tile of its
    rows."""

    sequence: object
    first_row: object  # first of all rows, new tokens times heads
    rows: object  # rows of the sequence in this tile, at most ROWS; 0 or less: nothing to do
    run: object
    length: object
    table: object
    first: object
    tiles: object
    number: object  # among the partial results
    parts: object  # items that the sequence has
    all_tiles: object


class Lengths(NamedTuple):
    """The first row, the end and the number of cached tokens of each of CHUNK sequences."""

    begin: object
    end: object
    length: object


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def lengths_of(step, first_sequence):
    """Return the Lengths of the CHUNK sequences from `first_sequence` on; zeros past the last
    one."""
    # Every warp takes all of them, so that none waits for another to add them up.
    LINE: gl.constexpr = gl.BlockedLayout([CHUNK // 32], [32], [4], [0])
    b = first_sequence + gl.arange(0, CHUNK, LINE)
    inside = b < step.batch
    begin = gl.load(step.cu_seqlens_q + b, mask=inside, other=0)
    end = gl.load(step.cu_seqlens_q + b + 1, mask=inside, other=0)
    length = gl.load(step.seqlens_k + b, mask=inside, other=0)
    return Lengths(_row(begin, step), _row(end, step), _keys(length, step))


@gluon.jit
def _row(edge, step):
    """Return `edge`, of cu_seqlens_q, clamped to 0 ... T: a GPU cannot raise an error without a
    wait."""
    return gl.minimum(gl.maximum(edge, 0), step.tokens)


@gluon.jit
def _keys(length, step):
    """Return `length`, of seqlens_k, clamped to 0 ... the tokens that the block table has room
    for."""
    return gl.minimum(gl.maximum(length, 0), step.max_keys)


@gluon.jit
def block_id(block, step):
    """Return a block id as int64, to compute addresses; invalid ids become the last block's."""
    block = gl.minimum(block.to(gl.uint32, bitcast=True), (step.blocks - 1).to(gl.uint32))
    return block.to(gl.int64)


@gluon.jit
def _tiles_of(lengths):
    """Return how many tiles of keys each sequence of `lengths` has: at least one where it has new
    tokens, else none."""
    tiles = gl.maximum(gl.cdiv(lengths.length, KEYS), 1)
    return gl.where(lengths.end > lengths.begin, tiles, 0)


@gluon.jit
def share_of(step, lengths, least_tiles):
    """Return the Share of this CTA.

    lengths: the Lengths of the first CHUNK sequences, loaded by the caller ahead of time.
    least_tiles: the least number of tiles of a share, so that little work is not cut to nothing.
    """
    number = gl.program_id(0) // step.row_tiles
    row_tile = gl.program_id(0) - number * step.row_tiles
    shares = gl.num_programs(0) // step.row_tiles
    tiles = _tiles_of(lengths)
    totals = tiles
    most = gl.maximum(tiles, 1)
    for base in range(CHUNK, step.batch, CHUNK):
        others = _tiles_of(lengths_of(step, base))
        totals += others
        most = gl.maximum(most, others)
    total = gl.sum(totals, 0)
    longest = gl.max(most, 0)
    size = gl.maximum(gl.cdiv(total, shares), least_tiles)
    even = gl.where(
        size >= longest,
        gl.cdiv(size, longest) * longest,
        gl.cdiv(longest, gl.maximum(longest // size, 1)),
    )
    size = gl.where(even <= size + size // SLACK, even, size)
    first = gl.minimum(number * size, total)

    ends = gl.associative_scan(tiles, 0, _add)
    passes = (ends <= first).to(gl.int32)
    starts = gl.where(ends <= first, ends, 0)
    for base in range(CHUNK, step.batch, CHUNK):
        others = _tiles_of(lengths_of(step, base))
        ends = gl.max(ends, 0) + gl.associative_scan(others, 0, _add)
        passes += (ends <= first).to(gl.int32)
        starts = gl.maximum(starts, gl.where(ends <= first, ends, 0))
    sequence = gl.sum(passes, 0)
    last = gl.minimum(first + size, total)
    return Share(number, row_tile, size, first, last, sequence, gl.max(starts, 0))


@gluon.jit
def item_of(step, share, tile, sequence, start, ROWS: gl.constexpr):
    """Return the Item of number `sequence` in a share: its tiles from `tile` on, to the end of the
    sequence or of the share.

    tile, start: counted over the tiles of all sequences; the sequence's tiles begin at `start`.
    ROWS: the rows of a tile.
    """
    begin = _row(gl.load(step.cu_seqlens_q + sequence), step)
    run = _row(gl.load(step.cu_seqlens_q + sequence + 1), step) - begin
    length = _keys(gl.load(step.seqlens_k + sequence), step)
    tiles = gl.where(run > 0, gl.maximum(gl.cdiv(length, KEYS), 1), 0)
    first_part = start // share.size
    parts = (start + tiles - 1) // share.size - first_part + 1
    row = share.row_tile * ROWS
    return Item(
        sequence,
        begin * step.heads + row,
        gl.minimum(run * step.heads - row, ROWS),
        run,
        length,
        step.block_table + sequence.to(gl.int64) * step.table_row,
        tile - start,
        gl.minimum(share.last, start + tiles) - tile,
        sequence + share.number,
        parts,
        tiles,
    )


@gluon.jit
def store_lse(lse, item, step, share, output):
    """Store lse of an item's rows: to output.lse if the item is all of its sequence, else to its
    part; the sequence's first item also notes in output.plan its number and how many parts there
    are."""
    ROWS: gl.constexpr = lse.shape[0]
    row = gl.arange(0, ROWS, lse.type.layout)
    if item.parts == 1:
        index = item.first_row + row
        token = index // step.heads
        head = index - token * step.heads
        at = output.lse + head.to(gl.int64) * output.tokens + token
        gl.store(at, lse, mask=row < item.rows)
    else:
        part = item.number * step.row_tiles + share.row_tile
        gl.store(output.part_lse + part.to(gl.int64) * ROWS + row, lse)
    if (share.row_tile == 0) & (item.first == 0):
        entry = output.plan + item.sequence.to(gl.int64) * 2
        gl.store(entry, item.number)
        gl.store(entry + 1, item.parts)
