"""Which tiles of queries one CTA of the backward pass meets, and in which order.

What: the steps of a tile of keys: (query head of the group, tile of queries), those that need a
      mask first, then the others; every partition of the CTA walks them alike.
Grid: none, inlined into the kernels.
One call: scalars of one CTA, or of one step.
Traffic: two or three lengths of a packed or ragged batch.
Numerics: integers.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.visible import MASK_TILE, last_key_of_row, listed_tiles, query_tiles

ROW_PADDING = gl.constexpr(128)  # rows of a packed sequence start on such a multiple in buffers
# Numbers of a tile of keys that the loader tells consumers, see `note_work`.
NOTES = gl.constexpr(8)


class BwdVariant(NamedTuple):
    """Constexpr: the compile-time choices of the backward kernels; `plan.variant_of` makes them."""

    tile_m: int  # queries of a step
    tile_n: int  # keys of a CTA
    d: int  # channels of a tile of q and k: 64, 128 or 256
    d_high: int  # channels of another tile behind it, 64; 0 where d has all
    dv: int  # channels of a tile of v and o
    width: int  # channels of a head of q and k
    v_width: int  # channels of a head of v and o
    stages: int  # tiles of q and do that are in flight
    two_loops: bool  # masked steps in a loop of their own; else behind a branch
    left: bool  # keys far to the left of the diagonal are hidden
    right: bool  # keys far to its right are
    tail: bool  # a tile may hold keys past the end of its sequence
    packed: bool  # rows past the end of a sequence are those of the next
    ragged: bool  # dense sequences with lengths of their own
    positive: bool  # the scale, so that -inf may stand in products before it
    softcap: str  # "none", "fast" or "exact"
    alibi: bool
    bias: bool
    bias_rows: bool  # in the kernel for dq: see `attention_fwd.Variant`
    bias_pairs: bool
    dropout: bool
    mask: bool  # a block mask says which tiles are visited
    ruled: bool  # windows or lengths hide keys beside the mask
    ordered: bool  # sums of dq are added in a reproducible order
    ring: bool  # the CTAs of a head, which see all tiles, start at different ones
    last_first: bool  # the last tiles of keys are launched first
    # Pre- and postprocessing of other heads: "none", "interleaved" or "preprocess_first".
    prepost: str
    # How a step hands on ds and dq, see `plan._form_for_length`.
    together: bool  # warpgroups in step, dq in the step of its ds; for calls without extras
    by_query: bool  # ds lies query by query in shared memory, else key by key
    flat: bool  # the sum of dq lies as warpgroups hold it, see `consumer.flat_dq`
    bias_copied: bool = False  # the bias comes by TMA, tile by tile
    shares_bias: bool = False  # all sequences read one: those of a head are neighbours
    senders: int = 1  # warps that send dq in turns, each from memory of its own
    several: bool = False  # a CTA takes several tiles of keys of a head, see `tile_of_turn`
    passes_by: bool = False  # the upper 64 keys of a tile see nothing of its first 64 queries


class Sequences(NamedTuple):
    """The edges and lengths of sequences: pointers, None for those that a call does not have."""

    cu_q: object  # int32 (B + 1,), first row of each packed sequence
    cu_k: object  # int32 (B + 1,)
    seqlens_k: object  # int32 (B,), valid keys of each dense sequence


class Shape(NamedTuple):
    """The numbers of a call, alike for all CTAs; made inside a kernel of its arguments."""

    cu_q: object
    cu_k: object
    seqlens_k: object
    rows_q: object  # packed queries in all, and packed keys
    rows_k: object
    batch: object
    num_kv_heads: object
    group_size: object
    seqlen_q: object
    seqlen_k: object
    window_left: object
    window_right: object
    num_tiles: object  # tiles of keys of the longest sequence
    heads_per_section: object
    ring_size: object  # CTAs of a head that may start at different tiles of queries
    rows_per_plane: object  # rows of a plane of the row terms and of dq
    queries_per_plane: object  # queries of a plane of lse and its gradient
    heads_per_key: object  # heads that share one head of k and v but not its gradients
    heads_ahead: object  # distance of the head that a CTA preprocesses, see PrePostPlan
    heads_behind: object  # distance of the head that it postprocesses
    prepost_ctas: object  # the first CTAs of a head, which pre- and postprocess others
    prepost_rows: object  # rows of one of them
    turns: object = 1  # tiles of keys that a CTA takes one after the other
    turning_heads: object = 0  # the first heads, whose CTAs do; the CTAs of others take one each


class Place(NamedTuple):
    """One head of one sequence: its number, its first rows and its lengths; scalars, made inside a
    kernel by `place_of_head`."""

    index: object  # number of the head among those of all sequences, as they are launched
    b: object
    head: object
    start_q: object  # first row of the sequence in q, k and the padded row terms
    start_k: object
    start_row: object
    length_q: object
    length_k: object


class Work(NamedTuple):
    """A CTA's tile of keys in one turn, and the tiles of queries that see it; scalars, made inside
    a kernel by `work_of_cta`.

    Tiles full_begin ... full_end - 1 need no mask, the others of begin ... end - 1 do. With a block
    mask these are places in the walk over its entries, see `listed_tiles`.
    """

    index: object  # the index of Place
    b: object
    head: object  # head of the keys
    first_key: object
    length_q: object
    length_k: object
    start_q: object  # first row of the sequence in q, k and the padded row terms
    start_k: object
    start_row: object
    begin: object  # first tile that sees a key
    full_begin: object  # first that needs no mask
    full_end: object
    end: object
    start: object  # the tile where the walk starts in a ring, see `ring_of_cta`
    partial_entries: object  # entries of a block mask, in place of tiles
    full_entries: object
    partial_end: object  # places from 0 are those of partial entries, then come the full ones


@gluon.jit
def head_of_cta(shape, num_heads):
    """Return (tile, head) of this CTA; programs go section of heads by section, in a section tile
    by tile, and for each tile head by head."""
    pid = gl.program_id(0)
    per_section = shape.num_tiles * shape.heads_per_section
    first_head = pid // per_section * shape.heads_per_section
    size = gl.minimum(shape.heads_per_section, shape.batch * num_heads - first_head)
    within = pid % per_section
    return within // size, first_head + within % size


@gluon.jit
def turns_of_cta(shape):
    """Return how many tiles of keys this CTA takes, all of one head: shape.turns if the head is one
    of the first shape.turning_heads, else 1."""
    turning = shape.turning_heads * (shape.num_tiles // shape.turns)
    return gl.where(gl.program_id(0) < turning, shape.turns, 1)


@gluon.jit
def tile_of_turn(turn, num_heads, shape):
    """Return (tile, head) of a turn of this CTA.

    The tiles of a head are dealt out to its CTAs there and back, so that all have as much to do
    where the first ones see most. The last heads' tiles have a CTA each, longest first: they fill
    what is left of the last wave. shape.turns divides the tiles of a head.
    """
    ctas = shape.num_tiles // shape.turns  # of a head
    pid = gl.program_id(0)
    turning = pid < shape.turning_heads * ctas
    each = gl.where(turning, ctas, shape.num_tiles)
    before = gl.where(turning, 0, shape.turning_heads)
    heads = gl.where(turning, shape.turning_heads, shape.batch * num_heads - before)
    pid -= before * ctas
    per_section = each * shape.heads_per_section
    first_head = pid // per_section * shape.heads_per_section
    size = gl.minimum(shape.heads_per_section, heads - first_head)
    within = pid % per_section
    place = within // size
    place = gl.where(turn % 2 == 0, place, each - 1 - place)
    return turn * each + place, before + first_head + within % size


@gluon.jit
def _rows_of(cu, b, rows, longest):
    """Return the first row of packed sequence b and its number of rows, both clamped to the `rows`
    that there are and to `longest`: a GPU cannot raise an error without a wait."""
    start = gl.minimum(gl.maximum(gl.load(cu + b), 0), rows)
    end = gl.minimum(gl.maximum(gl.load(cu + b + 1), start), rows)
    return start, gl.minimum(end - start, longest)


@gluon.jit
def place_of_head(index, num_heads, shape, variant: gl.constexpr):
    """Return the Place of head `index` among the heads of all sequences."""
    start_q = 0
    start_k = 0
    start_row = 0
    length_q = shape.seqlen_q
    length_k = shape.seqlen_k
    if variant.packed:
        b = index % shape.batch
        head = index // shape.batch
        start_q, length_q = _rows_of(shape.cu_q, b, shape.rows_q, shape.seqlen_q)
        start_k, length_k = _rows_of(shape.cu_k, b, shape.rows_k, shape.seqlen_k)
        start_row = padded_start(start_q, b)
    else:
        if variant.shares_bias:
            b = index % shape.batch
            head = index // shape.batch
        else:
            b = index // num_heads
            head = index % num_heads
        if variant.ragged:
            length_k = gl.minimum(gl.maximum(gl.load(shape.seqlens_k + b), 0), shape.seqlen_k)
    return Place(index, b, head, start_q, start_k, start_row, length_q, length_k)


@gluon.jit
def work_of_cta(shape, scores, places, variant: gl.constexpr, turn=0):
    """Return the Work of this CTA in its turn number `turn`: its tile of keys, and the tiles of
    queries that see it."""
    TILE_M: gl.constexpr = variant.tile_m
    KEYS: gl.constexpr = variant.tile_n
    if variant.several:
        block, index = tile_of_turn(turn, shape.num_kv_heads, shape)
    else:
        block, index = head_of_cta(shape, shape.num_kv_heads)
    if variant.last_first:
        block = shape.num_tiles - 1 - block
    first_key = block * KEYS
    place = place_of_head(index, shape.num_kv_heads, shape, variant)
    length_q = place.length_q
    length_k = place.length_k
    begin, full_begin, full_end, end = query_tiles(
        first_key, length_q, length_k, shape.window_left, shape.window_right, variant
    )
    partial_entries = 0
    full_entries = 0
    partial_end = 0
    if variant.mask:
        number = place.head * shape.group_size * places.mask_head + first_key // MASK_TILE
        partial_entries, full_entries, partial_end, full_begin, full_end, end = listed_tiles(
            place.b, number, begin, full_begin, full_end, end, scores, places, TILE_M, variant.ruled
        )
        begin = 0
    start = 0
    if variant.ring:
        _size, stride, _block, at, _members = ring_of_cta(
            block, end, gl.cdiv(length_k, KEYS), shape
        )
        start = at * stride
    return Work(
        index,
        place.b,
        place.head,
        first_key,
        length_q,
        length_k,
        place.start_q,
        place.start_k,
        place.start_row,
        begin,
        full_begin,
        full_end,
        end,
        start,
        partial_entries,
        full_entries,
        partial_end,
    )


@gluon.jit
def note_work(work, turn, notes):
    """Store the fields of a turn's Work in shared memory, for consumers without registers for them.

    Args:
        turn: the number of the turn; two turns have places of their own.
        notes: the shared memory.
    """
    first = turn % 2 * NOTES
    _note(notes, first, work.first_key)
    _note(notes, first + 1, work.b)
    _note(notes, first + 2, work.head)
    _note(notes, first + 3, work.begin)
    _note(notes, first + 4, work.full_begin)
    _note(notes, first + 5, work.full_end)
    _note(notes, first + 6, work.end)
    _note(notes, first + 7, work.start)


@gluon.jit
def _note(notes, place, number):
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    notes.index(place).store(gl.full([1], 0, gl.int32, lane) + number)


@gluon.jit
def _noted(notes, place):
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    # The largest of a warp: ptxas knows it to be alike in all threads, and so are the loops that it
    # ends and what is counted in them.
    return gl.max(notes.index(place).load(lane) + gl.zeros([32], gl.int32, lane), 0)


@gluon.jit
def noted_work(turn, notes, shape):
    """Return the Work of a turn whose k has come, from the loader's notes in shared memory; only
    plain calls have several turns, so other fields are constants."""
    first = turn % 2 * NOTES
    return Work(
        0,
        _noted(notes, first + 1),
        _noted(notes, first + 2),
        _noted(notes, first),
        shape.seqlen_q,
        shape.seqlen_k,
        0,
        0,
        0,
        _noted(notes, first + 3),
        _noted(notes, first + 4),
        _noted(notes, first + 5),
        _noted(notes, first + 6),
        _noted(notes, first + 7),
        0,
        0,
        0,
    )


@gluon.jit
def padded_start(start, b):
    """Return where the row terms of packed sequence b start: no two share a tile of 128 rows."""
    return (start + b * ROW_PADDING) // ROW_PADDING * ROW_PADDING


@gluon.jit
def ring_of_cta(block, tiles, blocks, shape):
    """Return the ring to which a CTA belongs: CTAs of one head that start at different tiles.

    Every CTA of the head walks over all tiles of queries. The CTAs are cut into rings, of which the
    last may be shorter. The CTA at place i of its ring starts at tile i * stride, so that no two
    CTAs of a ring begin with the same tile.

    Args:
        block: the number of the CTA among the CTAs of its head.
        tiles: the number of tiles of queries.
        blocks: the number of CTAs of the head.
        shape: the sizes of the call; its ring_size is the largest number of CTAs in a ring.

    Returns:
        The number of CTAs in a full ring, stride, the number of the first CTA in this CTA's ring,
        the place of this CTA in it, and the number of CTAs in it.
    """
    size = gl.maximum(gl.minimum(gl.minimum(blocks, tiles), shape.ring_size), 1)
    first = block // size * size
    return size, tiles // size, first, block - first, gl.minimum(size, blocks - first)


@gluon.jit
def rank_of_tile(work, tile, shape, variant: gl.constexpr):
    """Return how many CTAs add to a tile of dq before this one, in a reproducible order.

    With a diagonal the last tile of keys that sees it comes first, then the one before: when all
    walk upwards from their diagonals, no one waits. Else the order is that of the ring's walk.
    """
    KEYS: gl.constexpr = variant.tile_n
    block = work.first_key // KEYS
    blocks = gl.cdiv(work.length_k, KEYS)
    if variant.right:
        row = tile * variant.tile_m + variant.tile_m - 1
        last_key = last_key_of_row(row, work.length_q, work.length_k, shape.window_right)
        rank = gl.minimum(last_key // KEYS, blocks - 1) - block
    else:
        _size, stride, first, at, members = ring_of_cta(block, work.end, blocks, shape)
        nearest = gl.minimum(tile // stride, members - 1)  # who starts at this tile or just before
        rank = first + nearest - at + gl.where(at <= nearest, 0, members)
    return rank


@gluon.jit
def masked_steps(work):
    """Return how many steps of one query head need a mask."""
    return work.full_begin - work.begin + work.end - work.full_end


@gluon.jit
def tile_of_masked_step(work, step):
    """Return the tile of queries of step number `step`, from 0, among the steps of one query head
    that need a mask: those before work.full_begin, then those from work.full_end on."""
    head = work.full_begin - work.begin
    return gl.where(step < head, work.begin + step, work.full_end + step - head)


@gluon.jit
def tile_of_step(work, step, group_size, variant: gl.constexpr):
    """Return (query head of the group, tile of queries) of step number `step` of this CTA: masked
    steps of all heads first with variant.two_loops, else head after head from work.start on."""
    if variant.two_loops:
        masked = masked_steps(work)
        full = work.full_end - work.full_begin
        is_masked = step < masked * group_size
        g, rest = _divided(
            gl.where(is_masked, step, step - masked * group_size),
            gl.where(is_masked, masked, full),
            group_size,
        )
        tile = gl.where(is_masked, tile_of_masked_step(work, rest), work.full_begin + rest)
    else:
        each = work.end - work.begin
        g, rest = _divided(step, each, group_size)
        tile = work.begin + work.start + rest
        tile = gl.where(tile < work.end, tile, tile - each)
    return g, tile


@gluon.jit
def _divided(step, each, group_size):
    """Return (query head of the group, step of that head); a group of one needs no division."""
    g = step * 0
    if group_size > 1:
        g = step // each
    return g, step - g * each
