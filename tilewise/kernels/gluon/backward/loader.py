"""The two warps of the backward pass that only move tiles: the loader and the sender of dq.

What: q, do, k, v and the row terms come to shared memory; tiles of dq leave and are added.
Grid: that of attention_bwd.
One call: one partition of a CTA, one warp each; both walk the steps as the consumers do.
Traffic: see attention_bwd.
Numerics: sums of dq are float32, added by the L2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewise.kernels.gluon.backward.prepost import report_sums, wait_for_preprocess
from tilewise.kernels.gluon.backward.span import (
    note_work,
    rank_of_tile,
    tile_of_step,
    turns_of_cta,
    work_of_cta,
)
from tilewise.kernels.gluon.device.compat import tma_add, tma_load, tma_store
from tilewise.kernels.gluon.device.warpgroup import named_barrier, wait_for_copies
from tilewise.kernels.gluon.visible import entry_of_tile

DQ_WRITTEN = gl.constexpr(9)  # the hardware barrier at which consumers leave a tile of dq
SECOND_SENDER = gl.constexpr(3)  # how much further those of a second sender are


@gluon.jit
def row_plane(work, g, shape, variant: gl.constexpr):
    """Return the index of query head g of the work's group, and that of its plane.

    A plane has the rows of one query head, in lse_log2, delta and the sums of dq: of one sequence,
    or of all packed ones.
    """
    head = work.head * shape.group_size + g
    plane = head
    if not variant.packed:
        plane = work.b * (shape.num_kv_heads * shape.group_size) + head
    return head, plane


@gluon.jit
def load_tiles(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse_desc,
    delta_desc,
    bias_desc,
    shape,
    scores,
    places,
    prepost,
    bufs,
    bars,
    variant: gl.constexpr,
):
    """Run the loader warp: for each tile of keys of this CTA load k and v once, and q, lse, do,
    delta and a copied bias step by step."""
    if variant.several:
        before = 0  # steps of the tiles before
        for turn in range(0, turns_of_cta(shape)):
            work = work_of_cta(shape, scores, places, variant, turn)
            until = before + (work.end - work.begin) * shape.group_size
            for step in range(before, until):
                _load_step(
                    q_desc,
                    k_desc,
                    v_desc,
                    do_desc,
                    lse_desc,
                    delta_desc,
                    bias_desc,
                    step,
                    step == before,
                    work,
                    shape,
                    scores,
                    places,
                    prepost,
                    bufs,
                    bars,
                    variant,
                    turn,
                    before,
                )
            before = until
    else:
        _load_tile(
            q_desc,
            k_desc,
            v_desc,
            do_desc,
            lse_desc,
            delta_desc,
            bias_desc,
            shape,
            scores,
            places,
            prepost,
            bufs,
            bars,
            variant,
        )


@gluon.jit
def _load_tile(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse_desc,
    delta_desc,
    bias_desc,
    shape,
    scores,
    places,
    prepost,
    bufs,
    bars,
    variant: gl.constexpr,
):
    """Load k and v once and q and do step by step, for a CTA with one tile of keys."""
    work = work_of_cta(shape, scores, places, variant)
    steps = (work.end - work.begin) * shape.group_size
    # Which of the two forms makes the faster consumers was measured; it is ptxas's doing.
    PEELED: gl.constexpr = variant.prepost != "preprocess_first"
    if PEELED:  # noqa: SIM102
        if steps > 0:
            _load_step(
                q_desc,
                k_desc,
                v_desc,
                do_desc,
                lse_desc,
                delta_desc,
                bias_desc,
                0,
                True,
                work,
                shape,
                scores,
                places,
                prepost,
                bufs,
                bars,
                variant,
            )
    for step in range(1 if PEELED else 0, steps):
        _load_step(
            q_desc,
            k_desc,
            v_desc,
            do_desc,
            lse_desc,
            delta_desc,
            bias_desc,
            step,
            False if PEELED else step == 0,
            work,
            shape,
            scores,
            places,
            prepost,
            bufs,
            bars,
            variant,
        )


@gluon.jit
def _load_step(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse_desc,
    delta_desc,
    bias_desc,
    step,
    first,
    work,
    shape,
    scores,
    places,
    prepost,
    bufs,
    bars,
    variant: gl.constexpr,
    turn=0,
    before=0,
):
    """Load q, lse, do, delta and a copied bias of a step, in the order in which they are needed;
    with the `first` step of a tile of keys also k and v.

    step: counted over all turns; before: steps of the turns before this one. Delta is loaded only
    after the head has been preprocessed.
    """
    TILE_M: gl.constexpr = variant.tile_m
    STAGES: gl.constexpr = variant.stages
    b = work.b
    if variant.packed:
        b = 0
    key_head = work.head // shape.heads_per_key
    first_key = work.start_k + work.first_key
    if first:
        if variant.several:  # of q, too: the last product of scores, of no use, is done with it
            mbarrier.wait(bars.kv_empty.index(0), (turn & 1) ^ 1)
            note_work(work, turn, bufs.notes)
        mbarrier.expect(bars.kv_full.index(0), k_desc.block_type.nbytes)
        tma_load(k_desc, [b, key_head, first_key, 0], bars.kv_full.index(0), bufs.k.index(0))
    g, tile = tile_of_step(work, step - before, shape.group_size, variant)
    if variant.mask:
        tile, _number = entry_of_tile(work, tile, scores, variant.tile_m)
    head, plane = row_plane(work, g, shape, variant)
    row = work.start_q + tile * TILE_M
    padded_row = work.start_row + tile * TILE_M
    stage = step % STAGES
    mbarrier.wait(bars.empty.index(stage), ((step // STAGES) & 1) ^ 1)
    full = bars.q_full.index(stage)
    mbarrier.expect(full, q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
    tma_load(lse_desc, [plane, padded_row], full, bufs.lse_log2.index(stage))
    tma_load(q_desc, [b, head, row, 0], full, bufs.q.index(stage))
    if first:
        if variant.several:
            mbarrier.wait(bars.kv_empty.index(1), (turn & 1) ^ 1)
        mbarrier.expect(bars.kv_full.index(1), v_desc.block_type.nbytes)
        tma_load(v_desc, [b, key_head, first_key, 0], bars.kv_full.index(1), bufs.v.index(0))
    full = bars.do_full.index(stage)
    NBYTES: gl.constexpr = do_desc.block_type.nbytes + delta_desc.block_type.nbytes
    if variant.bias_copied:
        mbarrier.expect(full, NBYTES + bias_desc.block_type.nbytes)
        _load_bias(bias_desc, work, tile * TILE_M, head, places, full, bufs.bias.index(stage))
    else:
        mbarrier.expect(full, NBYTES)
    tma_load(do_desc, [b, head, row, 0], full, bufs.do.index(stage))
    if first:  # noqa: SIM102
        if turn == 0:  # all turns are of one head
            wait_for_preprocess(work.index, shape, prepost)
    tma_load(delta_desc, [plane, padded_row], full, bufs.delta.index(stage))


@gluon.jit
def _load_bias(bias_desc, work, row, head, places, full, memory):
    """Start to copy the bias of a tile of queries and the CTA's keys to `memory`; `full` opens
    then."""
    b = gl.where(places.bias_batch == 0, 0, work.b)
    h = gl.where(places.bias_head == 0, 0, head)
    tma_load(bias_desc, [b, h, row, work.first_key], full, memory)


@gluon.jit
def _send_tile(dq_desc, at, rank, bufs, bars, variant: gl.constexpr, SENDER: gl.constexpr):
    """Add a tile of dq from shared memory to global memory, or, with variant.ordered, store it if
    rank is 0.

    The tile's buffer is then given back.

    Args:
        at: the coordinates of the tile.
        rank: the number of tiles that were added to it before.
        SENDER: the number of this warp among the senders.
    """
    HALVES: gl.constexpr = 2 if variant.flat else 1  # that come and go apart
    THREADS: gl.constexpr = 160 if variant.flat else 288
    BARRIER: gl.constexpr = DQ_WRITTEN + SENDER * SECOND_SENDER
    FIRST: gl.constexpr = SENDER * HALVES  # of this warp's memory
    for half in gl.static_range(HALVES):
        place = at
        if variant.flat:
            place = [0, at[1], at[2] * (variant.d // 32) + half * 128, 0]
        named_barrier("sync", BARRIER + half, THREADS, 1)
        if variant.ordered:
            if rank == 0:  # the first one stores: nothing has to be zero before
                tma_store(dq_desc, place, bufs.dq.index(FIRST + half))
            else:
                tma_add(dq_desc, place, bufs.dq.index(FIRST + half))
        else:
            tma_add(dq_desc, place, bufs.dq.index(FIRST + half))
    for half in gl.static_range(HALVES):
        tma.store_wait(HALVES - 1 - half)  # the buffer has been read
        mbarrier.arrive(bars.dq_empty.index(FIRST + half), count=1)


@gluon.jit
def send_tiles(
    dq_desc,
    semaphores_ptr,
    shape,
    scores,
    places,
    prepost,
    bufs,
    bars,
    variant: gl.constexpr,
    SENDER: gl.constexpr,
):
    """Run a sender warp: add the CTA's share of dq, for all its tiles of keys, to global memory."""
    if variant.several:
        for turn in range(0, turns_of_cta(shape)):
            send_dq(
                dq_desc,
                semaphores_ptr,
                shape,
                scores,
                places,
                prepost,
                bufs,
                bars,
                variant,
                SENDER,
                turn,
            )
    else:
        send_dq(
            dq_desc, semaphores_ptr, shape, scores, places, prepost, bufs, bars, variant, SENDER
        )


@gluon.jit
def send_dq(
    dq_desc,
    semaphores_ptr,
    shape,
    scores,
    places,
    prepost,
    bufs,
    bars,
    variant: gl.constexpr,
    SENDER: gl.constexpr,
    turn=0,
):
    """Add the tiles of dq of one tile of keys to the sums in global memory, as consumers finish
    them.

    With variant.ordered a CTA waits until as many CTAs as its rank have added to a tile, and rank 0
    stores, so that nothing has to be zero before; which CTAs may wait see `order_of`. Else tiles
    are added in any order, to sums that preprocessing has set to zero. SENDER: which of
    variant.senders this warp is; they take steps in turns, for to wait until a copy has landed, to
    tell of it and to ask for the next tile takes one warp longer than a step.
    """
    work = work_of_cta(shape, scores, places, variant, turn)
    steps = (work.end - work.begin) * shape.group_size
    if not variant.ordered and steps > 0:
        wait_for_preprocess(work.index, shape, prepost)
    # Tell of a tile only while asking for the next: 5 % faster here, elsewhere 4 to 7 % slower
    # (deterministic, N 4,096; H200, 2026-11-22).
    ALONE: gl.constexpr = variant.senders == 1
    LATE: gl.constexpr = variant.ordered and variant.right and variant.d == 128 and ALONE
    before = work.b.to(gl.int64) * 0
    for step in range(SENDER, steps, variant.senders):
        g, tile = tile_of_step(work, step, shape.group_size, variant)
        if variant.mask:
            tile, _number = entry_of_tile(work, tile, scores, variant.tile_m)
        _head, plane = row_plane(work, g, shape, variant)
        at = [0, plane, work.start_row + tile * variant.tile_m, 0]
        if not variant.ordered:
            _send_tile(dq_desc, at, 1, bufs, bars, variant, SENDER)
        else:
            tiles = shape.rows_per_plane // variant.tile_m
            row_tile = work.start_row // variant.tile_m + tile
            at_tile = plane.to(gl.int64) * tiles + row_tile
            rank = rank_of_tile(work, tile, shape, variant)
            found = gl.atomic_add(semaphores_ptr + at_tile, 0, sem="acquire")
            if LATE and step > 0:  # the copies of the step before have landed meanwhile
                wait_for_copies()
                gl.atomic_add(semaphores_ptr + before, 1, sem="release")
            while found < rank:
                found = gl.atomic_add(semaphores_ptr + at_tile, 0, sem="acquire")
            _send_tile(dq_desc, at, rank, bufs, bars, variant, SENDER)
            if LATE:
                before = at_tile
            else:
                wait_for_copies()
                gl.atomic_add(semaphores_ptr + at_tile, 1, sem="release")
    wait_for_copies()
    if LATE and steps > 0:
        gl.atomic_add(semaphores_ptr + before, 1, sem="release")
    report_sums(work, shape, prepost)
