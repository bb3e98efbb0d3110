"""Backward pass of attention on Hopper in one kernel, head dims up to 128.

What: with p = exp(s - lse), dp = do v^T, ds = p * (dp - delta):
      dv = p^T do, dk = ds^T q, dq = ds k; dq is summed over the tiles of keys in global memory.
Grid: one axis, tiles of 128 keys x (batch x key heads).
One CTA: 128 keys of one key head; loops over the query heads of its group and the tiles of queries
      that see the keys. Two consumer warpgroups own 64 keys each and meet only in ds, which lies in
      shared memory: one may be at its exponentials while the other multiplies. A warp loads tiles
      by TMA, another sends finished tiles of dq, two do prepost of other heads (see
      `prepost`).
Traffic: k, v are read and dk, dv written once; q, do and the row terms once for each tile of keys,
      and as often 4 bytes an element are added to dq. PrePost come on top.
Numerics: base 2, p recomputed from lse; sums float32; p and ds rounded to the input type for the
      second products. dk and dv have one owner and one order, so they are bitwise reproducible;
      so is dq where its sums wait for one another, tile by tile (`span.rank_of_tile`).
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.kernels.gluon.backward.consumer import consume_turns
from tilewise.kernels.gluon.backward.loader import load_tiles, send_tiles
from tilewise.kernels.gluon.backward.logits import Places
from tilewise.kernels.gluon.backward.prepost import part_rows, run_all_prepost
from tilewise.kernels.gluon.backward.span import NOTES, Shape
from tilewise.kernels.gluon.backward.together import consume_together
from tilewise.kernels.gluon.device.barriers import barriers

CONSUMER_REGISTERS = gl.constexpr(240)
MOVER_REGISTERS = gl.constexpr(24)
PREPOST_WARPS = gl.constexpr(2)


class Buffers(NamedTuple):
    """The shared memory of one CTA of the backward kernel: q, do, k, v, ds, dq, row terms and a
    bias; the first axis counts tiles in flight."""

    q: object
    do: object
    k: object
    v: object
    ds: object  # (128 keys, queries), of this step and of the last one
    dq: object
    lse_log2: object
    delta: object
    bias: object  # (queries, 128 keys), None where it does not come by copies
    notes: object  # notes on this tile of keys and the next, see `span.NOTES`; None for one tile


class Barriers(NamedTuple):
    """The mbarriers by which loader, senders and consumers of the backward kernel wait for one
    another."""

    kv_full: object  # k, then v
    q_full: object  # q and lse_log2
    do_full: object  # do and delta
    empty: object  # both consumers are done with q and do
    dq_empty: object  # the tile of dq is on its way
    ds_full: object  # both consumers have written their half
    ds_empty: object  # both have multiplied with it
    kv_empty: object  # both are done with k, then with v, where tiles of keys follow one another


@gluon.jit
def consume_keys(
    dk_desc,
    dv_desc,
    dk_ptr,
    dv_ptr,
    shape,
    scores,
    places,
    bufs,
    bars,
    variant: gl.constexpr,
    PART: gl.constexpr,
):
    """Make and write dk and dv of warpgroup PART's 64 keys, and leave its half of every tile of dq
    for the sender."""
    if variant.together:
        consume_together(
            dk_desc, dv_desc, dk_ptr, dv_ptr, shape, scores, places, bufs, bars, variant, PART
        )
    else:
        consume_turns(
            dk_desc, dv_desc, dk_ptr, dv_ptr, shape, scores, places, bufs, bars, variant, PART
        )


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
        "ring_size",
        "rows_per_plane",
        "queries_per_plane",
        "heads_per_key",
        "heads_ahead",
        "heads_behind",
        "prepost_ctas",
        "prepost_rows",
        "turns",
        "turning_heads",
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
def attention_bwd_kernel(
    q_desc,
    k_desc,
    v_desc,
    do_desc,
    dq_desc,
    dk_desc,
    dv_desc,
    lse_desc,
    delta_desc,
    bias_desc,
    o_part_desc,
    do_part_desc,
    sum_part_desc,
    dk_ptr,
    dv_ptr,
    semaphores_ptr,
    sequences,
    prepost,
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
    ring_size,
    rows_per_plane,
    queries_per_plane,
    heads_per_key,
    heads_ahead,
    heads_behind,
    prepost_ctas,
    prepost_rows,
    turns,
    turning_heads,
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
    """Compute and write dk and dv of one tile of 128 keys of a key head, or of several in turn, and
    add what the tile gives to the float32 sums of dq in global memory.

    Further warps pre- and postprocess other heads, see `prepost`; the module's docstring has the
    rule.
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
        ring_size,
        rows_per_plane,
        queries_per_plane,
        heads_per_key,
        heads_ahead,
        heads_behind,
        prepost_ctas,
        prepost_rows,
        turns,
        turning_heads,
    )
    places = Places(
        alibi_batch, bias_batch, bias_head, bias_row, bias_key, mask_batch, mask_head, drop_limit
    )
    TILE_M: gl.constexpr = variant.tile_m
    D: gl.constexpr = variant.d
    STAGES: gl.constexpr = variant.stages
    dtype: gl.constexpr = q_desc.dtype
    q = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, TILE_M, D], q_desc.layout)
    do = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, TILE_M, D], do_desc.layout)
    k = gl.allocate_shared_memory(dtype, [1, 1, 1, 128, D], k_desc.layout)
    v = gl.allocate_shared_memory(dtype, [1, 1, 1, 128, D], v_desc.layout)
    ds_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    if variant.by_query:
        ds = gl.allocate_shared_memory(dtype, [2, TILE_M, 128], ds_layout)
    else:
        ds = gl.allocate_shared_memory(dtype, [2, 128, TILE_M], ds_layout)
    if variant.flat:
        dq = gl.allocate_shared_memory(
            gl.float32, [2 * variant.senders, 1, 1, 128, 32], dq_desc.layout
        )
    else:
        dq = gl.allocate_shared_memory(
            gl.float32, [variant.senders, 1, 1, TILE_M, D], dq_desc.layout
        )
    lse_log2 = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE_M], lse_desc.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, 1, TILE_M], delta_desc.layout)
    bias = None
    if variant.bias_copied:
        bias = gl.allocate_shared_memory(
            bias_desc.dtype, [STAGES, 1, 1, TILE_M, 128], bias_desc.layout
        )
    notes = None
    if variant.several:
        notes = gl.allocate_shared_memory(gl.int32, [2 * NOTES, 1], mbarrier.MBarrierLayout())
    bufs = Buffers(q, do, k, v, ds, dq, lse_log2, delta, bias, notes)
    kv_empty = None
    if variant.several:
        kv_empty = barriers(2, 2)
    bars = Barriers(
        barriers(2, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 2),
        barriers(2 * variant.senders, 1),
        barriers(2, 2),
        barriers(2, 2),
        kv_empty,
    )
    if variant.prepost != "none":
        ROWS: gl.constexpr = part_rows(D)
        sum_layout: gl.constexpr = sum_part_desc.layout
        if variant.flat:
            sums: gl.constexpr = [D // 32, 1, 1, 32, 32]
        else:
            sums: gl.constexpr = [2, 1, 1, ROWS, D]
        o_part = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], o_part_desc.layout)
        do_part = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, D], do_part_desc.layout)
        sum_part = gl.allocate_shared_memory(gl.float32, sums, sum_layout)
        parts_full = barriers(4, 1)
        gl.warp_specialize(
            [
                (
                    consume_keys,
                    (
                        dk_desc,
                        dv_desc,
                        dk_ptr,
                        dv_ptr,
                        shape,
                        scores,
                        places,
                        bufs,
                        bars,
                        variant,
                        0,
                    ),
                ),
                (
                    consume_keys,
                    (
                        dk_desc,
                        dv_desc,
                        dk_ptr,
                        dv_ptr,
                        shape,
                        scores,
                        places,
                        bufs,
                        bars,
                        variant,
                        1,
                    ),
                ),
                (
                    load_tiles,
                    (
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
                    ),
                ),
                (
                    send_tiles,
                    (
                        dq_desc,
                        semaphores_ptr,
                        shape,
                        scores,
                        places,
                        prepost,
                        bufs,
                        bars,
                        variant,
                        0,
                    ),
                ),
                (
                    run_all_prepost,
                    (
                        o_part_desc,
                        do_part_desc,
                        sum_part_desc,
                        semaphores_ptr,
                        shape,
                        scores,
                        prepost,
                        (o_part, do_part, sum_part),
                        parts_full,
                        variant,
                        PREPOST_WARPS,
                    ),
                ),
            ],
            [4, 1, 1, PREPOST_WARPS],
            [CONSUMER_REGISTERS, MOVER_REGISTERS, MOVER_REGISTERS, MOVER_REGISTERS],
        )
    elif variant.senders == 2:
        gl.warp_specialize(
            [
                (
                    consume_keys,
                    (
                        dk_desc,
                        dv_desc,
                        dk_ptr,
                        dv_ptr,
                        shape,
                        scores,
                        places,
                        bufs,
                        bars,
                        variant,
                        0,
                    ),
                ),
                (
                    consume_keys,
                    (
                        dk_desc,
                        dv_desc,
                        dk_ptr,
                        dv_ptr,
                        shape,
                        scores,
                        places,
                        bufs,
                        bars,
                        variant,
                        1,
                    ),
                ),
                (
                    load_tiles,
                    (
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
                    ),
                ),
                (
                    send_tiles,
                    (
                        dq_desc,
                        semaphores_ptr,
                        shape,
                        scores,
                        places,
                        prepost,
                        bufs,
                        bars,
                        variant,
                        0,
                    ),
                ),
                (
                    send_tiles,
                    (
                        dq_desc,
                        semaphores_ptr,
                        shape,
                        scores,
                        places,
                        prepost,
                        bufs,
                        bars,
                        variant,
                        1,
                    ),
                ),
            ],
            [4, 1, 1, 1],
            [CONSUMER_REGISTERS, MOVER_REGISTERS, MOVER_REGISTERS, MOVER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    consume_keys,
                    (
                        dk_desc,
                        dv_desc,
                        dk_ptr,
                        dv_ptr,
                        shape,
                        scores,
                        places,
                        bufs,
                        bars,
                        variant,
                        0,
                    ),
                ),
                (
                    consume_keys,
                    (
                        dk_desc,
                        dv_desc,
                        dk_ptr,
                        dv_ptr,
                        shape,
                        scores,
                        places,
                        bufs,
                        bars,
                        variant,
                        1,
                    ),
                ),
                (
                    load_tiles,
                    (
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
                    ),
                ),
                (
                    send_tiles,
                    (
                        dq_desc,
                        semaphores_ptr,
                        shape,
                        scores,
                        places,
                        prepost,
                        bufs,
                        bars,
                        variant,
                        0,
                    ),
                ),
            ],
            [4, 1, 1],
            [CONSUMER_REGISTERS, MOVER_REGISTERS, MOVER_REGISTERS],
        )
