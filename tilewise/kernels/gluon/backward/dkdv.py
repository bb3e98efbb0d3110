"""Gradients of keys and values on Hopper where dq has a kernel of its own; head dims up to 256.

What: dv = p^T do and dk = ds^T q of one tile of keys; the rule is that of attention_bwd.
Grid: one axis, tiles of 64 keys x (batch x key heads).
One CTA: 64 keys of one key head; loops over the query heads of its group and the tiles of 64
      queries that see the keys. One warpgroup owns dv and makes p; the other owns dk, makes dp and
      takes p through shared memory. Two products each, none of them twice. A warp loads by TMA.
      With 192 channels of q and k, tiles of the last 64 lie apart.
Traffic: k, v are read and dk, dv written once; q, do and the row terms once for each tile of keys.
Numerics: as in attention_bwd; p is rounded to the input type before dp meets it; one owner and one
      order for every sum.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.backward.dkdv_warpgroups import make_dk, make_dv
from tilewise.kernels.gluon.backward.loader import row_plane
from tilewise.kernels.gluon.backward.logits import Places
from tilewise.kernels.gluon.backward.span import Shape, tile_of_step, work_of_cta
from tilewise.kernels.gluon.device.barriers import barriers
from tilewise.kernels.gluon.device.compat import tma_load
from tilewise.kernels.gluon.visible import entry_of_tile

CONSUMER_REGISTERS = gl.constexpr(240)
MOVER_REGISTERS = gl.constexpr(24)


class Buffers(NamedTuple):
    """The shared memory of one CTA of the kernel for dk and dv: q, do, k, v, p and row terms; the
    first axis counts tiles in flight."""

    q: object
    do: object
    k: object
    v: object
    p: object  # (64 keys, 64 queries), what dp is multiplied with; of dropped ones -p
    lse_log2: object
    delta: object
    q_high: object  # channels past variant.d, 0 where there are none
    k_high: object


class Barriers(NamedTuple):
    """The mbarriers by which the loader and the two warpgroups of the kernel for dk and dv wait for
    one another."""

    kv_full: object  # k, then v
    q_full: object  # q and delta
    q_empty: object
    do_full: object  # do and lse_log2
    do_empty: object
    p_full: object
    p_empty: object


@gluon.jit
def load_for_dkdv(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    lse_desc,
    delta_desc,
    q_high_desc,
    k_high_desc,
    shape,
    scores,
    places,
    bufs,
    bars,
    variant: gl.constexpr,
):
    """Run the loader warp: load k and v once, and q, lse, do and delta step by step; the two
    warpgroups give q and do back apart."""
    TILE_M: gl.constexpr = variant.tile_m
    STAGES: gl.constexpr = variant.stages
    D: gl.constexpr = variant.d
    HIGH: gl.constexpr = q_high_desc.block_type.nbytes if variant.d_high > 0 else 0
    work = work_of_cta(shape, scores, places, variant)
    steps = (work.end - work.begin) * shape.group_size
    b = work.b
    if variant.packed:
        b = 0
    key_head = work.head // shape.heads_per_key
    first_key = work.start_k + work.first_key
    for step in range(0, steps):
        if step == 0:
            full = bars.kv_full.index(0)
            mbarrier.expect(full, k_desc.block_type.nbytes + HIGH)
            tma_load(k_desc, [b, key_head, first_key, 0], full, bufs.k.index(0))
            if variant.d_high > 0:
                tma_load(k_high_desc, [b, key_head, first_key, D], full, bufs.k_high.index(0))
        g, tile = tile_of_step(work, step, shape.group_size, variant)
        if variant.mask:
            tile, _number = entry_of_tile(work, tile, scores, TILE_M)
        head, plane = row_plane(work, g, shape, variant)
        row = work.start_q + tile * TILE_M
        padded_row = work.start_row + tile * TILE_M
        stage = step % STAGES
        phase = ((step // STAGES) & 1) ^ 1
        mbarrier.wait(bars.q_empty.index(stage), phase)
        full = bars.q_full.index(stage)
        mbarrier.expect(full, q_desc.block_type.nbytes + HIGH + delta_desc.block_type.nbytes)
        tma_load(q_desc, [b, head, row, 0], full, bufs.q.index(stage))
        if variant.d_high > 0:
            tma_load(q_high_desc, [b, head, row, D], full, bufs.q_high.index(stage))
        tma_load(delta_desc, [plane, padded_row], full, bufs.delta.index(stage))
        if step == 0:
            mbarrier.expect(bars.kv_full.index(1), v_desc.block_type.nbytes)
            tma_load(v_desc, [b, key_head, first_key, 0], bars.kv_full.index(1), bufs.v.index(0))
        mbarrier.wait(bars.do_empty.index(stage), phase)
        full = bars.do_full.index(stage)
        mbarrier.expect(full, do_desc.block_type.nbytes + lse_desc.block_type.nbytes)
        tma_load(lse_desc, [plane, padded_row], full, bufs.lse_log2.index(stage))
        tma_load(do_desc, [b, head, row, 0], full, bufs.do.index(stage))


@gluon.jit(
    do_not_specialize=[
        "batch",
        "num_kv_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "rows_q",
        "rows_k",
        "window_left",
        "window_right",
        "num_tiles",
        "heads_per_section",
        "rows_per_plane",
        "heads_per_key",
        "alibi_batch",
        "bias_batch",
        "bias_head",
        "bias_row",
        "bias_key",
        "mask_batch",
        "mask_head",
        "drop_limit",
    ]
)
def attention_bwd_dkdv_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
    q_high_desc,
    k_high_desc,
    dk_high_desc,
    dk_ptr,
    dv_ptr,
    sequences,
    batch,
    num_kv_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    rows_q,
    rows_k,
    window_left,
    window_right,
    num_tiles,
    heads_per_section,
    rows_per_plane,
    heads_per_key,
    scores,
    alibi_batch,
    bias_batch,
    bias_head,
    bias_row,
    bias_key,
    mask_batch,
    mask_head,
    drop_limit,
    variant: gl.constexpr,
):
    """Compute and write dk and dv of one tile of 64 keys of a key head, over all queries of its
    group that see them: p is recomputed from lse in base 2, ds from p and delta.

    Two warpgroups make dv and dk, one warp loads; see the module's docstring.
    """
    shape = Shape(
        sequences.cu_q,
        sequences.cu_k,
        sequences.seqlens_k,
        rows_q,
        rows_k,
        batch,
        num_kv_heads,
        group_size,
        seqlen_q,
        seqlen_k,
        window_left,
        window_right,
        num_tiles,
        heads_per_section,
        0,
        rows_per_plane,
        0,
        heads_per_key,
        0,
        0,
        0,
        0,
    )
    places = Places(
        alibi_batch, bias_batch, bias_head, bias_row, bias_key, mask_batch, mask_head, drop_limit
    )
    D: gl.constexpr = variant.d
    DV: gl.constexpr = variant.dv
    STAGES: gl.constexpr = variant.stages
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, D], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, DV], do_desc.layout)
    k = gl.allocate_shared_memory(dtype, [1, 1, 1, 64, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, 1, 64, DV], v_desc.layout)
    lse_log2 = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], lse_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, 64], delta_desc.layout)
    if variant.d_high > 0:
        rest: gl.constexpr = q_high_desc.layout
        q_high = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 64, 64], rest)
        k_high = gl.allocate_shared_memory(dtype, [1, 1, 1, 64, 64], rest)
        p = gl.allocate_shared_memory(dtype, [2, 1, 1, 64, 64], rest)
        bufs = Buffers(q, do, k, v, p, lse_log2, delta, q_high, k_high)
    else:
        p = gl.allocate_shared_memory(dtype, [2, 64, 64], gl.NVMMASharedLayout(128, 16, rank=2))
        bufs = Buffers(q, do, k, v, p, lse_log2, delta, 0, 0)
    bars = Barriers(
        barriers(2, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
        barriers(2, 1),
        barriers(2, 1),
    )
    gl.warp_specialize(
        [
            (make_dv, (dv_desc, dv_ptr, shape, scores, places, bufs, bars, variant)),
            (make_dk, (dk_desc, dk_high_desc, dk_ptr, shape, scores, places, bufs, bars, variant)),
            (
                load_for_dkdv,
                (
                    q_desc,
                    k_desc,
                    v_desc,
                    do_desc,
                    lse_desc,
                    delta_desc,
                    q_high_desc,
                    k_high_desc,
                    shape,
                    scores,
                    places,
                    bufs,
                    bars,
                    variant,
                ),
            ),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, MOVER_REGISTERS],
    )
