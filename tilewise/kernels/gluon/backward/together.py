"""One consumer warpgroup of the backward pass, in step with the other: 64 keys, their queries.

What: dk and dv of its keys in registers, and its half of each tile of dq.
Grid: that of attention_bwd.
One call: one partition of a CTA. A step issues s = k q^T and dp = v do^T, does p = exp2(s) under
      dp, then ds = p (dp - delta); issues dv += p do; meets the other warpgroup, whose half of ds
      it needs; issues dq = ds k and dk += ds q, and writes dq out under the latter.
Traffic: see attention_bwd.
Numerics: see attention_bwd.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.backward.consumer import ALWAYS_ZERO, _dq_half, ds_tile, leave_dq
from tilewise.kernels.gluon.backward.keys import clear_keys, hide, store_keys
from tilewise.kernels.gluon.backward.span import (
    masked_steps,
    tile_of_masked_step,
    work_of_cta,
)
from tilewise.kernels.gluon.device.warpgroup import (
    exp2,
    named_barrier,
    operand_layout,
    sum_layout,
)

DS_WRITTEN = gl.constexpr(11)  # the hardware barrier at which both have written their half of ds


@gluon.jit
def _step(
    dk,
    dv,
    step,
    tile,
    keys,
    work,
    shape,
    scores,
    bufs,
    bars,
    variant: gl.constexpr,
    PART: gl.constexpr,
    MASK: gl.constexpr,
):
    """Add one tile of queries to dk and dv and return them; leave this warpgroup's half of dq for
    the sender.

    The two warpgroups of a CTA meet in each step. MASK: 0 none, 1 always, 2 where this step needs
    it.
    """
    TILE_M: gl.constexpr = variant.tile_m
    D: gl.constexpr = variant.d
    STAGES: gl.constexpr = variant.stages
    dtype: gl.constexpr = bufs.q.dtype
    over_queries: gl.constexpr = sum_layout(TILE_M)
    row_terms: gl.constexpr = gl.SliceLayout(0, over_queries)
    operand: gl.constexpr = operand_layout(D)
    zero = step // ALWAYS_ZERO
    all_k = bufs.k.index(zero).reshape([128, D])
    k = all_k.slice(PART * 64, 64, 0)
    v = bufs.v.index(zero).reshape([128, D]).slice(PART * 64, 64, 0)
    stage = step % STAGES
    parity = step % 2
    phase = (step // STAGES) & 1
    q = bufs.q.index(stage).reshape([TILE_M, D])
    do = bufs.do.index(stage).reshape([TILE_M, D])
    zeros = gl.zeros([64, TILE_M], gl.float32, over_queries)
    mbarrier.wait(bars.q_full.index(stage), phase)
    s_sum = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(bars.do_full.index(stage), phase)
    dp_sum = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse = bufs.lse_log2.index(stage).reshape([TILE_M]).load(row_terms)
    s = warpgroup_mma_wait(1, deps=(s_sum,))
    masked = (tile < work.full_begin) | (tile >= work.full_end)
    number = step * 0 - 1
    if MASK == 1:
        s = hide(s, work, tile, number, PART * 2, keys, shape, scores, variant)
    if MASK == 2:  # noqa: SIM102
        if masked:
            s = hide(s, work, tile, number, PART * 2, keys, shape, scores, variant)
    p = exp2(gl.fma(s, zeros + scores.scale_log2, zeros - gl.expand_dims(lse, 0)))
    p_half = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
    delta = bufs.delta.index(stage).reshape([TILE_M]).load(row_terms)
    dp = warpgroup_mma_wait(0, deps=(dp_sum,))
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
    ds_tile(bufs, parity, variant).slice(PART * 64, 64, 0).store(ds)
    dv_sum = warpgroup_mma(p_half, do, dv, is_async=True)
    ds_half = gl.convert_layout(ds, operand, assert_trivial=True)
    fence_async_shared()
    named_barrier("sync", DS_WRITTEN, 256, 4)
    dq_sum = _dq_half(ds_tile(bufs, parity, variant), all_k, variant, PART)
    dk_sum = warpgroup_mma(ds_half, q, dk, is_async=True)
    dv, dq, p_half = warpgroup_mma_wait(1, deps=(dv_sum, dq_sum, p_half))
    leave_dq(dq, bufs, bars, step, variant, PART)
    dk, ds_half = warpgroup_mma_wait(0, deps=(dk_sum, ds_half))
    mbarrier.arrive(bars.empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def consume_together(
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
    """Make and write dk and dv of this warpgroup's 64 keys, and leave its half of every tile of dq
    for the sender, in step with the other warpgroup."""
    TILE_M: gl.constexpr = variant.tile_m
    D: gl.constexpr = variant.d
    dtype: gl.constexpr = bufs.q.dtype
    over_queries: gl.constexpr = sum_layout(TILE_M)
    MASKS: gl.constexpr = variant.left or variant.right or variant.tail
    work = work_of_cta(shape, scores, places, variant)
    group = shape.group_size
    steps = (work.end - work.begin) * group
    dk = gl.zeros([64, D], gl.float32, sum_layout(D))
    dv = gl.zeros([64, D], gl.float32, sum_layout(D))
    keys = work.first_key + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, over_queries))
    if steps > 0:
        mbarrier.wait(bars.kv_full.index(0), 0)
        clear_keys(bufs.k.index(0).reshape([128, D]), work.first_key, work, shape, variant)
        mbarrier.wait(bars.kv_full.index(1), 0)
        clear_keys(bufs.v.index(0).reshape([128, D]), work.first_key, work, shape, variant)
        step = 0
        tile = work.begin + work.start
        if MASKS and variant.two_loops:
            each = masked_steps(work)
            at = 0
            for _ in range(0, each * group):
                at = gl.where(at == each, 0, at)
                tile = tile_of_masked_step(work, at)
                dk, dv = _step(
                    dk, dv, step, tile, keys, work, shape, scores, bufs, bars, variant, PART, 1
                )
                step += 1
                at += 1
        for _ in range(step, steps):
            dk, dv = _step(
                dk,
                dv,
                step,
                tile,
                keys,
                work,
                shape,
                scores,
                bufs,
                bars,
                variant,
                PART,
                2 if MASKS and not variant.two_loops else 0,
            )
            if MASKS and not variant.two_loops:
                tile = gl.where(tile + 1 == work.end, work.begin, tile + 1)
            step += 1
    # The other warpgroup still multiplies with k, so both leave through their half of v.
    dk *= scores.scale
    store_keys(dk.to(dtype), dk_desc, dk_ptr, work, shape, bufs.v, variant, PART, variant.width)
    store_keys(dv.to(dtype), dv_desc, dv_ptr, work, shape, bufs.v, variant, PART, variant.v_width)
