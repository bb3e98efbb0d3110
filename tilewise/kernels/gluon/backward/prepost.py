"""Preprocessing and postprocessing of the backward pass, in CTAs that multiply other heads.

What: preprocessing: delta = rowsum(o * do) - dlse, and zeros for the sums of dq, of a head whose
      CTAs start later; postprocessing: dq = scale * (its sum), rounded, of a head whose CTAs have
      ended.
Grid: that of attention_bwd, which the tensor cores limit: memory has time left.
One call: a partition of a CTA, two warps of 24 registers a thread. It takes a run of rows of all
      query heads of one key head; tiles of them come by TMA, two in flight.
Traffic: o and do once; the sum of dq is set to zero once and read once, dq written once.
Numerics: float32.

A CTA waits only for preprocessing by CTAs `heads_ahead` heads before its own. Those were launched
before it and wait only for CTAs launched before them, so no wait can hang. The first heads of a
call are preprocessed by the kernel before, the last ones postprocessed by the kernel after
(`rows`).
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.kernels.gluon.backward.span import (
    ROW_PADDING,
    head_of_cta,
    place_of_head,
    tile_of_turn,
    turns_of_cta,
)
from tilewise.kernels.gluon.device.compat import partition_barrier, tma_load
from tilewise.kernels.gluon.device.warpgroup import fence_async

STAGES = gl.constexpr(2)
# Of a tile a thread holds a piece at a time, for it has few registers.
PIECE_ROWS = gl.constexpr(8)
PIECE_COLUMNS = gl.constexpr(64)


class PrePost(NamedTuple):
    """The tensors that pre- and postprocessing read and write without TMA: dq and its sums, dlse,
    delta and counters; None for absent ones."""

    dq: object  # contiguous
    dq_sum: object  # float32 (planes, rows, d)
    dlse: object  # float32 (planes, queries)
    delta: object  # float32 (planes, rows)
    counts: object  # int32 (2, heads): CTAs that have preprocessed, CTAs whose sums are complete


def rows_of_part(d: int) -> int:
    """Return the rows of the tiles in which o, do and sums of dq are pre- and postprocessed, as
    many as shared memory has room for: 16, or 8 for d above 128."""
    return 16 if d <= 128 else 8


part_rows = gluon.constexpr_function(rows_of_part)  # for kernels; a slow call on the host


@gluon.constexpr_function
def _piece_layout(warps):
    """Return the register layout of a piece (PIECE_ROWS, PIECE_COLUMNS) of a tile, eight channels
    of a row a thread."""
    return gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def wait_for_preprocess(index, shape, prepost):
    """Wait until the row terms of head `index` are there and its sums of dq are zero; those of the
    first heads are, since an earlier kernel has made them."""
    if index >= shape.heads_ahead:
        while gl.atomic_add(prepost.counts + index, 0, sem="acquire") < shape.prepost_ctas:
            pass
        fence_async(1)


@gluon.jit
def report_sums(work, shape, prepost):
    """Count that this CTA has added to all its tiles of dq of its head, if the head is
    postprocessed by other CTAs; the copies must be complete."""
    num_heads = shape.batch * shape.num_kv_heads
    if work.index + shape.heads_behind < num_heads:
        gl.atomic_add(prepost.counts + num_heads + work.index, 1, sem="release")


@gluon.jit
def _tile_of_part(part, parts, first, place, shape, variant: gl.constexpr):
    """Return (query head, plane, first row) of tile number `part`, of `parts` a query head, of the
    rows from `first` on."""
    g = part // parts
    head = place.head * shape.group_size + g
    plane = head
    if not variant.packed:
        plane = place.b * (shape.num_kv_heads * shape.group_size) + head
    return head, plane, first + (part - g * parts) * part_rows(variant.d)


@gluon.jit
def _parts_of(first, length_q, shape, variant: gl.constexpr):
    """Return how many tiles the rows that this CTA pre- or postprocesses, from `first` on, make of
    one query head."""
    end = gl.cdiv(length_q, ROW_PADDING) * ROW_PADDING
    end = gl.minimum(end, first + shape.prepost_rows)
    return gl.maximum(end - first, 0) // part_rows(variant.d)


@gluon.jit
def run_all_prepost(
    o_desc,
    do_desc,
    sum_desc,
    semaphores_ptr,
    shape,
    scores,
    prepost,
    bufs,
    full,
    variant: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Run the pre- and postprocessing of all tiles of keys of this CTA, one after the other.

    The rows of each are a multiple of 128, so that every barrier of `full` ends an even number of
    phases and begins the next tile as it began this one.
    """
    if variant.several:
        for turn in range(0, turns_of_cta(shape)):
            run_prepost(
                o_desc,
                do_desc,
                sum_desc,
                semaphores_ptr,
                shape,
                scores,
                prepost,
                bufs,
                full,
                variant,
                WARPS,
                turn,
            )
    else:
        run_prepost(
            o_desc,
            do_desc,
            sum_desc,
            semaphores_ptr,
            shape,
            scores,
            prepost,
            bufs,
            full,
            variant,
            WARPS,
        )


@gluon.jit
def run_prepost(
    o_desc,
    do_desc,
    sum_desc,
    semaphores_ptr,
    shape,
    scores,
    prepost,
    bufs,
    full,
    variant: gl.constexpr,
    WARPS: gl.constexpr,
    turn=0,
):
    """Preprocess a share of the rows of a later head, and postprocess one of an earlier head, for
    one tile of keys; CTAs past the first shape.prepost_ctas of a head do nothing.

    The sums of the earlier head are waited for.
    """
    o_buf, do_buf, sum_buf = bufs
    if variant.several:
        block, index = tile_of_turn(turn, shape.num_kv_heads, shape)
    else:
        block, index = head_of_cta(shape, shape.num_kv_heads)
    if block < shape.prepost_ctas:
        num_heads = shape.batch * shape.num_kv_heads
        first = block * shape.prepost_rows
        ahead = gl.minimum(index + shape.heads_ahead, num_heads - 1)
        behind = gl.maximum(index - shape.heads_behind, 0)
        later = place_of_head(ahead, shape.num_kv_heads, shape, variant)
        earlier = place_of_head(behind, shape.num_kv_heads, shape, variant)
        parts = _parts_of(first, later.length_q, shape, variant)
        sum_parts = _parts_of(first, earlier.length_q, shape, variant)
        if index + shape.heads_ahead >= num_heads:
            parts = 0
        if index < shape.heads_behind:
            sum_parts = 0
        count = parts * shape.group_size
        sum_count = sum_parts * shape.group_size
        for part in range(0, gl.minimum(count, STAGES)):
            _load_rows(
                o_desc, do_desc, part, parts, first, later, shape, o_buf, do_buf, full, variant
            )
        if variant.prepost == "preprocess_first":
            for part in range(0, count):
                _preprocess(
                    part, parts, first, later, shape, prepost, o_buf, do_buf, full, variant, WARPS
                )
                fence_async_shared()  # loads of the tile come before the copy that follows
                partition_barrier()
                if part + STAGES < count:
                    _load_rows(
                        o_desc,
                        do_desc,
                        part + STAGES,
                        parts,
                        first,
                        later,
                        shape,
                        o_buf,
                        do_buf,
                        full,
                        variant,
                    )
            if index + shape.heads_ahead < num_heads:
                _report_preprocess(ahead, prepost, WARPS)
            count = count * 0
        if sum_count > 0:
            while gl.atomic_add(prepost.counts + num_heads + behind, 0, sem="acquire") < (
                shape.num_tiles
            ):
                pass
            fence_async(WARPS)
        for part in range(0, gl.minimum(sum_count, STAGES)):
            _load_sums(sum_desc, part, sum_parts, first, earlier, shape, sum_buf, full, variant)
        for part in range(0, gl.maximum(count, sum_count)):
            if variant.prepost == "interleaved":  # noqa: SIM102
                if part < count:
                    _preprocess(
                        part,
                        parts,
                        first,
                        later,
                        shape,
                        prepost,
                        o_buf,
                        do_buf,
                        full,
                        variant,
                        WARPS,
                    )
            if part < sum_count:
                _postprocess(
                    semaphores_ptr,
                    part,
                    sum_parts,
                    first,
                    earlier,
                    shape,
                    scores,
                    prepost,
                    sum_buf,
                    full,
                    o_buf.dtype,
                    variant,
                    WARPS,
                )
            fence_async_shared()
            partition_barrier()
            if variant.prepost == "interleaved":  # noqa: SIM102
                if part + STAGES < count:
                    _load_rows(
                        o_desc,
                        do_desc,
                        part + STAGES,
                        parts,
                        first,
                        later,
                        shape,
                        o_buf,
                        do_buf,
                        full,
                        variant,
                    )
            if part + STAGES < sum_count:
                _load_sums(
                    sum_desc,
                    part + STAGES,
                    sum_parts,
                    first,
                    earlier,
                    shape,
                    sum_buf,
                    full,
                    variant,
                )
        if variant.prepost == "interleaved":  # noqa: SIM102
            if index + shape.heads_ahead < num_heads:
                _report_preprocess(ahead, prepost, WARPS)


@gluon.jit
def _report_preprocess(index, prepost, WARPS: gl.constexpr):
    """Count that this CTA's share of the preprocessing of head `index` is done and visible."""
    fence_async(WARPS)
    partition_barrier()
    gl.atomic_add(prepost.counts + index, 1, sem="release")


@gluon.jit
def _piece(tile, row: gl.constexpr, column: gl.constexpr, layout: gl.constexpr):
    """Return the piece of a tile in shared memory that begins at (row, column), PIECE_ROWS by
    PIECE_COLUMNS."""
    return tile.slice(row, PIECE_ROWS, 0).slice(column, PIECE_COLUMNS, 1).load(layout)


@gluon.jit
def _load_rows(
    o_desc, do_desc, part, parts, first, place, shape, o_buf, do_buf, full, variant: gl.constexpr
):
    """Start to copy tile number `part` of o and of do to shared memory."""
    head, _plane, row = _tile_of_part(part, parts, first, place, shape, variant)
    b = place.b
    if variant.packed:
        b = 0
    at = [b, head, place.start_q + row, 0]
    stage = part % STAGES
    bar = full.index(stage)
    mbarrier.expect(bar, o_desc.block_type.nbytes + do_desc.block_type.nbytes)
    tma_load(o_desc, at, bar, o_buf.index(stage))
    tma_load(do_desc, at, bar, do_buf.index(stage))


@gluon.jit
def _preprocess(
    part,
    parts,
    first,
    place,
    shape,
    prepost,
    o_buf,
    do_buf,
    full,
    variant: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Wait for a tile of o and do, write its delta = rowsum(o * do) - dlse, and set its sums of dq
    to zero unless they are ordered.

    Args:
        part, parts: the number of the tile among those of this CTA, and how many a query head has.
        first: the first row.
        place: the `Place` of the head that is preprocessed.
        o_buf, do_buf, full: the ring of o and do, and its barriers.
    """
    D: gl.constexpr = variant.d
    ROWS: gl.constexpr = part_rows(D)
    layout: gl.constexpr = _piece_layout(WARPS)
    flat: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    _head, plane, row = _tile_of_part(part, parts, first, place, shape, variant)
    stage = part % STAGES
    at = plane.to(gl.int64) * shape.rows_per_plane + place.start_row + row
    if not variant.ordered:
        zeros = gl.zeros([WARPS * 128], gl.float32, flat)
        for start in gl.static_range(0, ROWS * D, WARPS * 128):
            within = start + gl.arange(0, WARPS * 128, flat)
            gl.store(prepost.dq_sum + at * D + within, zeros)
    mbarrier.wait(full.index(stage), (part // STAGES) & 1)
    o = o_buf.index(stage).reshape([ROWS, D])
    do = do_buf.index(stage).reshape([ROWS, D])
    for start in gl.static_range(0, ROWS, PIECE_ROWS):
        products = gl.zeros([PIECE_ROWS, PIECE_COLUMNS], gl.float32, layout)
        for column in gl.static_range(0, D, PIECE_COLUMNS):
            some_o = _piece(o, start, column, layout).to(gl.float32)
            some_do = _piece(do, start, column, layout).to(gl.float32)
            products = gl.fma(some_o, some_do, products)
        delta = gl.sum(products, 1)
        within = start + gl.arange(0, PIECE_ROWS, gl.SliceLayout(1, layout))
        real = row + within < place.length_q
        if prepost.dlse is not None:
            dlse_at = plane.to(gl.int64) * shape.queries_per_plane + place.start_q + row
            delta -= gl.load(prepost.dlse + dlse_at + within, mask=real, other=0.0)
        gl.store(prepost.delta + at + within, gl.where(real, delta, 0.0))


@gluon.jit
def _load_sums(sum_desc, part, parts, first, place, shape, sum_buf, full, variant: gl.constexpr):
    """Start to copy tile number `part` of the float32 sums of dq to shared memory."""
    _head, plane, row = _tile_of_part(part, parts, first, place, shape, variant)
    stage = part % STAGES
    bar = full.index(STAGES + stage)
    at = place.start_row + row
    if variant.flat:  # 16 queries of 64 channels lie together
        BLOCKS: gl.constexpr = variant.d // 64
        mbarrier.expect(bar, BLOCKS * sum_desc.block_type.nbytes)
        at = at // 64 * (2 * variant.d) + at % 64 * 2
        for block in gl.static_range(BLOCKS):
            to = sum_buf.index(stage * BLOCKS + block)
            tma_load(sum_desc, [0, plane, at + block * 128, 0], bar, to)
    else:
        mbarrier.expect(bar, sum_desc.block_type.nbytes)
        tma_load(sum_desc, [0, plane, at, 0], bar, sum_buf.index(stage))


@gluon.constexpr_function
def _flat_layout():
    """Return the register layout in which two warps hold half of a block of `flat_dq`: 8 channels
    of a query a thread."""
    channels, queries = [[0, 1], [0, 4], [0, 8]], [[0, 16], [1, 0], [2, 0]]
    return gl.DistributedLinearLayout(channels, [[4, 0], [8, 0], *queries], [[0, 2]], [], [16, 32])


@gluon.jit
def _unflatten(x):
    """Return (16 queries, 32 channels) of x (16, 32), half a block of `flat_dq`."""
    parts = x.reshape([4, 8, 4, 2, 2])  # eight channels, row, pair, row + 8, channel
    return parts.permute((3, 1, 0, 2, 4)).reshape([16, 32])


@gluon.jit
def _postprocess(
    semaphores_ptr,
    part,
    parts,
    first,
    place,
    shape,
    scores,
    prepost,
    sum_buf,
    full,
    dtype: gl.constexpr,
    variant: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Wait for a tile of the float32 sums of dq, scale them, and write them to dq in its dtype."""
    D: gl.constexpr = variant.d
    ROWS: gl.constexpr = part_rows(D)
    WIDTH: gl.constexpr = variant.width
    layout: gl.constexpr = _piece_layout(WARPS)
    num_q_heads = shape.num_kv_heads * shape.group_size
    head, plane, row = _tile_of_part(part, parts, first, place, shape, variant)
    stage = part % STAGES
    scale = scores.scale
    seen = 1
    if variant.ordered:  # a tile that sees nothing holds anything
        tile = (place.start_row + row) // variant.tile_m
        tiles = shape.rows_per_plane // variant.tile_m
        seen = gl.load(semaphores_ptr + plane.to(gl.int64) * tiles + tile)
    token = place.start_q + row
    if not variant.packed:
        token += place.b * shape.seqlen_q
    to = prepost.dq + (token.to(gl.int64) * num_q_heads + head) * WIDTH
    mbarrier.wait(full.index(STAGES + stage), (part // STAGES) & 1)
    if variant.flat:
        for block in gl.static_range(D // 64):
            sums = sum_buf.index(stage * (D // 64) + block).reshape([32, 32])
            for half in gl.static_range(2):
                dq = _unflatten(sums.slice(half * 16, 16, 0).load(_flat_layout())) * scale
                _store_piece(
                    dq,
                    to,
                    row,
                    0,
                    block * 64 + half * 32,
                    place.length_q,
                    seen,
                    num_q_heads,
                    dtype,
                    variant,
                )
    else:
        sums = sum_buf.index(stage).reshape([ROWS, D])
        for start in gl.static_range(0, ROWS, PIECE_ROWS):
            for column in gl.static_range(0, D, PIECE_COLUMNS):
                dq = _piece(sums, start, column, layout) * scale
                _store_piece(
                    dq, to, row, start, column, place.length_q, seen, num_q_heads, dtype, variant
                )


@gluon.jit
def _store_piece(
    dq,
    to,
    row,
    start: gl.constexpr,
    column: gl.constexpr,
    length_q,
    seen,
    num_q_heads,
    dtype: gl.constexpr,
    variant: gl.constexpr,
):
    """Round and store a piece of a tile of dq, 0 where no CTA has added to it; rows past length_q
    and padded channels are left out."""
    layout: gl.constexpr = dq.type.layout
    if variant.ordered:
        dq = gl.where(seen > 0, dq, 0.0)
    within = start + gl.arange(0, dq.shape[0], gl.SliceLayout(1, layout))
    columns = column + gl.arange(0, dq.shape[1], gl.SliceLayout(0, layout))
    real = gl.expand_dims(row + within < length_q, 1)
    at = gl.expand_dims(within * (num_q_heads * variant.width), 1)
    columns = gl.expand_dims(columns, 0)
    gl.store(to + (at + columns), dq.to(dtype), mask=real & (columns < variant.width))
