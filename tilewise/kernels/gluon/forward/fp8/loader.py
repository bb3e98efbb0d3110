"""Who computes which tile of an e4m3 attention call, and the warp that loads it.

What: the order of tiles, the keys that a tile visits, and the producer of Q, K and V.
Grid: one CTA an SM, persistent; a tile is TILE_M queries of one head.
One CTA: its producer warp walks the tiles, fills the buffers by TMA and tells the consumers which
      tile comes next. Blocks of keys are visited from right to left.
Traffic: Q once; K and V once per tile of queries, out of L2 where a group of heads fits.
Numerics: none.

Where tiles differ in length (a diagonal, a window, sequences of their own length) they are handed
out by a counter that sets itself back to 0, the longest first and GROUP heads at a time. Equal
tiles are dealt in turn, one head after the other. Those of a packed batch, or beside a block mask,
are listed and numbered as the 16-bit kernel's are (`sorted_tiles`, `scheduler`), and with a mask
their keys are those of its walk (`span`).
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.device.compat import tma_load
from tilewise.kernels.gluon.forward.fp8.quantise import ROOM
from tilewise.kernels.gluon.forward.scheduler import Work, rows_of_tile
from tilewise.kernels.gluon.forward.span import block_of_step, walk_of
from tilewise.kernels.gluon.visible import byte_tiles

# What the producer writes into shared memory about a tile, for each consumer: its first row (-1:
# there are no more tiles), sequence, head, both in one, first and number of key tiles, keys of the
# sequence. Read when needed, they cost no registers in between. There are two sets, taken in turn:
# the next tile's arrives, with its queries, before a consumer is done with this one's.
NOTES = gl.constexpr(7)
ROW = gl.constexpr(0)
BATCH = gl.constexpr(1)
HEAD = gl.constexpr(2)
BATCH_HEAD = gl.constexpr(3)
FIRST = gl.constexpr(4)
COUNT = gl.constexpr(5)
KEYS = gl.constexpr(6)
# What it adds of a packed batch, which is one batch: the first row of the tile's sequence in q, its
# rows, its first key in k, its number. BATCH is 0 then, and BATCH_HEAD the head.
SEQUENCE = gl.constexpr(4)
FIRST_Q = gl.constexpr(0)
LENGTH_Q = gl.constexpr(1)
FIRST_K = gl.constexpr(2)
NUMBER = gl.constexpr(3)


class Descriptors(NamedTuple):
    """The TMA descriptors of q, k, v and o, each seen as (batch, head, row, column)."""

    q: object
    k: object
    v: object  # rows are channels, columns keys
    o: object


class Buffers(NamedTuple):
    """The shared memory of a CTA: tiles of q, k, v and o, and the producer's notes about tiles."""

    q: object
    k: object
    v: object
    o: object
    places: object
    factors: object  # factors of the logits (times log2(e)) and of the values
    sequences: object  # see SEQUENCE; None where nothing is packed


class Barriers(NamedTuple):
    """The mbarriers of a CTA, one that says full and one that says empty for each buffer of q, k
    and v."""

    q_full: object
    q_empty: object
    k_full: object
    k_empty: object
    v_full: object
    v_empty: object


@gluon.jit
def first_column(first_key, b):
    """Return the first column of sequence b in the transposed values of a packed batch, as
    `quantise` writes them."""
    return (first_key // ROOM + b) * ROOM


@gluon.jit
def place_of(tile, row_tiles, heads, batch_heads, group, DYNAMIC: gl.constexpr):
    """Return (sequence, head, row tile) of a tile number.

    DYNAMIC: tiles go through `group` heads at a time, heads fastest and the last row tile first;
    else head after head, rows ascending.
    """
    if DYNAMIC:
        first = tile // (group * row_tiles)
        rest = tile - first * (group * row_tiles)
        width = gl.maximum(gl.minimum(group, batch_heads - first * group), 1)
        row = rest // width
        batch_head = first * group + rest - row * width
        row = row_tiles - 1 - row
    else:
        batch_head = tile // row_tiles
        row = tile - batch_head * row_tiles
    return batch_head // heads, batch_head % heads, row


@gluon.jit
def keys_of(seqlens_ptr, b, seqlen_k, HAS_SEQLENS: gl.constexpr):
    """Return the number of keys of sequence b, seqlens[b] clamped to 0 ... seqlen_k, or
    seqlen_k."""
    if HAS_SEQLENS:
        return gl.minimum(gl.maximum(gl.load(seqlens_ptr + b), 0), seqlen_k)
    else:
        return seqlen_k


@gluon.jit
def _note(slot, value, dtype: gl.constexpr):
    slot.store(gl.full([1], value, dtype, gl.BlockedLayout([1], [32], [1], [0])))


@gluon.jit
def notes_of(w: gl.constexpr, visit, C: gl.constexpr):
    """Return the index of the set of notes about consumer w's tile number `visit`; two sets take
    turns."""
    return (visit & 1) * C.NUM_CONSUMERS + w


@gluon.jit
def read_note(notes, index):
    """Return the integer number `index` of the producer's `notes`, in all four warps of a
    consumer."""
    return gl.max(notes.index(index).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _load_q(q_desc, smem, bars, place, sequence, factors, w: gl.constexpr, visit, C: gl.constexpr):
    """Wait until consumer w has read its last queries, note the next tile's place in shared memory,
    and start to copy its 64 queries.

    Args:
        place: the first row, batch entry, head, both as one number, and the first tile of keys,
            their number, and the keys of the sequence.
        sequence: the sequence's first rows and lengths in a packed batch.
        factors: the factors of scores and of values.
        visit: the number of tiles of rows that the consumer had before.
    """
    first_q, length_q, first_k, of_b = sequence
    row0, b, h, batch_head, first, count, keys = place
    scale, v_scale = factors
    slot = notes_of(w, visit, C)
    mbarrier.wait(bars.q_empty.index(w), (visit & 1) ^ 1)
    _note(smem.places.index(slot * NOTES + ROW), row0 + w * 64, gl.int32)
    _note(smem.places.index(slot * NOTES + BATCH), b, gl.int32)
    _note(smem.places.index(slot * NOTES + HEAD), h, gl.int32)
    _note(smem.places.index(slot * NOTES + BATCH_HEAD), batch_head, gl.int32)
    _note(smem.places.index(slot * NOTES + FIRST), first, gl.int32)
    _note(smem.places.index(slot * NOTES + COUNT), count, gl.int32)
    _note(smem.places.index(slot * NOTES + KEYS), keys, gl.int32)
    if C.packed:
        _note(smem.sequences.index(slot * SEQUENCE + FIRST_Q), first_q, gl.int32)
        _note(smem.sequences.index(slot * SEQUENCE + LENGTH_Q), length_q, gl.int32)
        _note(smem.sequences.index(slot * SEQUENCE + FIRST_K), first_k, gl.int32)
        _note(smem.sequences.index(slot * SEQUENCE + NUMBER), of_b, gl.int32)
    _note(smem.factors.index(slot * 2), scale, gl.float32)
    _note(smem.factors.index(slot * 2 + 1), v_scale, gl.float32)
    mbarrier.expect(bars.q_full.index(w), q_desc.block_type.nbytes)
    first_row = row0 + w * 64
    if C.packed:
        first_row += first_q
    tma_load(q_desc, [b, h, first_row, 0], bars.q_full.index(w), smem.q.index(w))


@gluon.jit
def produce(shared, smem, bars, C: gl.constexpr):
    """Run the producer warp: load q, k and v of this CTA's tiles, Q0 K0 Q1 V0 K1 V1 ... of each,
    and note for each consumer which tile comes; after the last tile note row -1, and with DYNAMIC
    reset the counter."""
    (
        descs,
        counter_ptr,
        seqlens_ptr,
        scale_ptrs,
        softmax_scale,
        sizes,
        plan_ptr,
        size_ptr,
        masked,
    ) = shared
    row_tiles, tiles, batch_heads, heads, head_group, group, seqlen_q, seqlen_k, left, right = sizes
    q_scale_ptr, k_scale_ptr, v_scale_ptr = scale_ptrs
    NUM_CONSUMERS: gl.constexpr = C.NUM_CONSUMERS
    PARTS: gl.constexpr = C.PARTS
    TILE_M: gl.constexpr = NUM_CONSUMERS * 64
    ctas = gl.num_programs(0)
    if C.packed:
        row_tiles = gl.load(size_ptr)
        tiles = row_tiles * heads
    step = 0
    visit = 0
    tile = gl.program_id(0)
    while tile < tiles:
        if C.packed or C.mask_keys > 0:
            mask, mask_batch, mask_head = masked
            work = Work(
                tiles,
                row_tiles,
                batch_heads,
                group,
                heads,
                head_group,
                seqlen_q,
                seqlen_k,
                left,
                right,
                mask_batch,
                mask_head,
                seqlens_ptr,
                plan_ptr,
            )
            rows = rows_of_tile(tile, work, C, C)
            of_b = rows.b
            b = of_b
            if C.packed:
                b = of_b * 0
            h = rows.h
            hk = h // head_group
            row0 = rows.first_row
            keys = rows.length_k
            length_q = rows.length_q
            sequence = (rows.first_q, rows.length_q, rows.first_k, of_b)
        else:
            b, h, row = place_of(tile, row_tiles, heads, batch_heads, group, C.DYNAMIC)
            of_b = b
            hk = h // head_group
            row0 = row * TILE_M
            keys = keys_of(seqlens_ptr, b, seqlen_k, C.HAS_SEQLENS)
            length_q = seqlen_q
            sequence = (row0, row0, row0, row0)  # unread
        if C.mask_keys > 0:
            walk = walk_of(rows, work, mask, C, C)
            first = walk.steps * 0
            count = walk.steps
        else:
            first, count = byte_tiles(row0, length_q, keys, left, right, C)
        batch_head = b * heads + h
        kv_head = of_b * (heads // head_group) + hk
        scale = softmax_scale
        if not C.PER_TOKEN:
            q_scale = gl.load(q_scale_ptr + (of_b * heads + h))
            scale = scale * q_scale * gl.load(k_scale_ptr + kv_head)
        factors = (scale, gl.load(v_scale_ptr + kv_head))
        place = (row0, b, h, batch_head, first, count, keys)
        _load_q(descs.q, smem, bars, place, sequence, factors, 0, visit, C)
        for j in range(count):
            if C.mask_keys > 0:
                block, _ = block_of_step(walk, j, mask, C, C)
                column = block * C.TILE_N
            else:
                column = (first + count - 1 - j) * C.TILE_N
            stage = step % C.STAGES
            phase = (step // C.STAGES) & 1
            mbarrier.wait(bars.k_empty.index(stage), phase ^ 1)
            mbarrier.expect(bars.k_full.index(stage), descs.k.block_type.nbytes)
            key = column
            if C.packed:
                key += rows.first_k
                column += first_column(rows.first_k, of_b)
            tma_load(descs.k, [b, hk, key, 0], bars.k_full.index(stage), smem.k.index(stage))
            if j == 0:
                for w in gl.static_range(1, NUM_CONSUMERS):
                    _load_q(descs.q, smem, bars, place, sequence, factors, w, visit, C)
            mbarrier.wait(bars.v_empty.index(stage), phase ^ 1)
            mbarrier.expect(bars.v_full.index(stage), descs.v.block_type.nbytes * C.PARTS)
            for part in gl.static_range(PARTS):
                tma_load(
                    descs.v,
                    [b, hk, part * (C.HEAD_DIM // C.PARTS), column],
                    bars.v_full.index(stage),
                    smem.v.index(stage * C.PARTS + part),
                )
            step += 1
        if C.DYNAMIC:
            tile = gl.atomic_add(counter_ptr, 1) + ctas
        else:
            tile += ctas
        visit += 1
    if C.DYNAMIC:  # noqa: SIM102, one is known when compiling, the other is not
        # There are exactly `tiles` additions in a launch: the last one clears the counter.
        if tile == tiles + ctas - 1:
            gl.atomic_xchg(counter_ptr, 0)
    for w in gl.static_range(NUM_CONSUMERS):
        mbarrier.wait(bars.q_empty.index(w), (visit & 1) ^ 1)
        _note(smem.places.index(notes_of(w, visit, C) * NOTES + ROW), -1, gl.int32)
        mbarrier.arrive(bars.q_full.index(w), count=1)
