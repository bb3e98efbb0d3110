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

from tilewise.kernels.gluon._bwd_walk import tile_of_step, turn_of_tile, work_of_cta
from tilewise.kernels.gluon._compat import tma_add, tma_load, tma_store
from tilewise.kernels.gluon._warpgroup import named_barrier, wait_for_copies

DQ_WRITTEN = gl.constexpr(9)  # the hardware barrier at which consumers leave a tile of dq


@gluon.jit
def row_plane(work, g, shape, variant: gl.constexpr):
    """Return (query head, plane of the row terms and of dq) of head g of the group."""
    head = work.head * shape.group_size + g
    plane = head
    if not variant.packed:
        plane = work.b * (shape.num_kv_heads * shape.group_size) + head
    return head, plane


@gluon.jit
def load_tiles(
    q_desc, k_desc, v_desc, do_desc, lse_desc, delta_desc, shape, bufs, bars,
    variant: gl.constexpr,
):  # fmt: skip
    """Load k and v once, q and do step by step."""
    TILE_M: gl.constexpr = variant.tile_m
    STAGES: gl.constexpr = variant.stages
    work = work_of_cta(shape, variant)
    steps = (work.end - work.begin) * shape.group_size
    b = work.b
    if variant.packed:
        b = 0
    first_key = work.start_k + work.first_key
    for step in range(0, steps):
        if step == 0:
            mbarrier.expect(bars.kv_full.index(0), k_desc.block_type.nbytes)
            tma_load(k_desc, [b, work.head, first_key, 0], bars.kv_full.index(0), bufs.k.index(0))
        g, tile = tile_of_step(work, step, shape.group_size, variant)
        head, plane = row_plane(work, g, shape, variant)
        row = work.start_q + tile * TILE_M
        padded_row = work.start_row + tile * TILE_M
        stage = step % STAGES
        mbarrier.wait(bars.empty.index(stage), ((step // STAGES) & 1) ^ 1)
        full = bars.q_full.index(stage)
        mbarrier.expect(full, q_desc.block_type.nbytes + lse_desc.block_type.nbytes)
        tma_load(lse_desc, [plane, padded_row], full, bufs.lse_log2.index(stage))
        tma_load(q_desc, [b, head, row, 0], full, bufs.q.index(stage))
        if step == 0:
            mbarrier.expect(bars.kv_full.index(1), v_desc.block_type.nbytes)
            tma_load(v_desc, [b, work.head, first_key, 0], bars.kv_full.index(1), bufs.v.index(0))
        full = bars.do_full.index(stage)
        mbarrier.expect(full, do_desc.block_type.nbytes + delta_desc.block_type.nbytes)
        tma_load(delta_desc, [plane, padded_row], full, bufs.delta.index(stage))
        tma_load(do_desc, [b, head, row, 0], full, bufs.do.index(stage))


@gluon.jit
def send_dq(dq_desc, turns_ptr, shape, bufs, bars, variant: gl.constexpr):
    """Add each tile of dq to global memory, in the order that `variant` asks for."""
    work = work_of_cta(shape, variant)
    steps = (work.end - work.begin) * shape.group_size
    for step in range(0, steps):
        g, tile = tile_of_step(work, step, shape.group_size, variant)
        _head, plane = row_plane(work, g, shape, variant)
        at = [0, plane, work.start_row + tile * variant.tile_m, 0]
        if variant.order == "any":
            named_barrier("sync", DQ_WRITTEN, 288, 1)
            tma_add(dq_desc, at, bufs.dq.index(0))
            tma.store_wait(0)  # the buffer has been read
            mbarrier.arrive(bars.dq_empty.index(0), count=1)
        else:
            turn = turn_of_tile(work, tile, shape, variant)
            awaited = turn if variant.order == "all" else gl.minimum(turn, 1)
            tiles = shape.rows_per_plane // variant.tile_m
            row_tile = work.start_row // variant.tile_m + tile
            arrived = turns_ptr + plane.to(gl.int64) * tiles + row_tile
            while gl.atomic_add(arrived, 0, sem="acquire") < awaited:
                pass
            named_barrier("sync", DQ_WRITTEN, 288, 1)
            if turn == 0:
                tma_store(dq_desc, at, bufs.dq.index(0))
            else:
                tma_add(dq_desc, at, bufs.dq.index(0))
            tma.store_wait(0)
            mbarrier.arrive(bars.dq_empty.index(0), count=1)
            if (turn == 0) | (variant.order == "all"):
                wait_for_copies()
                gl.atomic_add(arrived, 1, sem="release")
