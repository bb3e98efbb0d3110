"""The two warpgroups of attention_bwd_dkdv: one owns dv, the other dk, of the same 64 keys.

What: p = exp2(s) and dv += p do; dp = v do^T, ds = p (dp - delta) and dk += ds q.
Grid: that of attention_bwd_dkdv.
One call: one partition of a CTA. Each issues its second product, then the first one of the next
      step, and waits for the second alone; the other warpgroup multiplies meanwhile.
Traffic: see attention_bwd_dkdv.
Numerics: see attention_bwd_dkdv. With a softcap what goes to the other warpgroup is p * (1 - t**2),
      with dropout its negative where p is dropped: bits are drawn once.

The index of k and v is computed from the step though it is always 0, as in consumer.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.backward.consumer import ALWAYS_ZERO
from tilewise.kernels.gluon.backward.keys import clear_keys, clear_queries, hide, store_keys
from tilewise.kernels.gluon.backward.logits import (
    add_alibi,
    add_bias,
    keep_signed,
    kept_pairs,
    words_of_dropout,
)
from tilewise.kernels.gluon.backward.span import work_of_cta
from tilewise.kernels.gluon.device.barriers import release_loaded
from tilewise.kernels.gluon.device.dropout import draw_of
from tilewise.kernels.gluon.device.warpgroup import (
    capped_exp2,
    exp2,
    operand_layout,
    pack,
    sum_layout,
    unpack,
)
from tilewise.kernels.gluon.visible import MASK_TILE, entry_of_tile, key_at


@gluon.jit
def _products(bufs, zero, stage, variant: gl.constexpr):
    """Start s = k q^T of a step, one group of WGMMAs, or two where channels come in two parts, and
    return the asynchronous sum."""
    D: gl.constexpr = variant.d
    zeros = gl.zeros([64, 64], gl.float32, sum_layout(64))
    q = bufs.q.index(stage).reshape([64, D]).permute((1, 0))
    k = bufs.k.index(zero).reshape([64, D])
    s = warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
    if variant.d_high > 0:
        q_high = bufs.q_high.index(stage).reshape([64, variant.d_high]).permute((1, 0))
        k_high = bufs.k_high.index(zero).reshape([64, variant.d_high])
        s = warpgroup_mma(k_high, q_high, s, is_async=True)
    return s


@gluon.jit
def make_dv(dv_desc, dv_ptr, shape, scores, places, bufs, bars, variant: gl.constexpr):
    """Compute p step by step, pass it to the other warpgroup, and sum dv = p^T do.

    Args:
        dv_desc, dv_ptr: the destination, as a descriptor and as a pointer.
        shape, scores, places: the call's `Shape`, `BwdScores` and `Places`.
        bufs, bars: the CTA's shared memory and barriers.
    """
    D: gl.constexpr = variant.dv
    GROUPS: gl.constexpr = 2 if variant.d_high > 0 else 1  # see `_products`
    STAGES: gl.constexpr = variant.stages
    dtype: gl.constexpr = bufs.q.dtype
    over_queries: gl.constexpr = sum_layout(64)
    row_terms: gl.constexpr = gl.SliceLayout(0, over_queries)
    operand: gl.constexpr = operand_layout(D)
    RULES: gl.constexpr = variant.left or variant.right or variant.tail or variant.packed
    MASKS: gl.constexpr = RULES or variant.mask
    PLACED: gl.constexpr = variant.alibi or variant.bias or variant.dropout
    CAPS: gl.constexpr = variant.softcap != "none"
    work = work_of_cta(shape, scores, places, variant)
    steps = (work.end - work.begin) * shape.group_size
    keys = work.first_key + gl.arange(0, 64, gl.SliceLayout(1, over_queries))
    dv = gl.zeros([64, D], gl.float32, sum_layout(D))
    zeros = gl.zeros([64, 64], gl.float32, over_queries)
    s = zeros
    if steps > 0:
        mbarrier.wait(bars.kv_full.index(0), 0)
        clear_keys(bufs.k.index(0).reshape([64, variant.d]), work.first_key, work, shape, variant)
        if variant.d_high > 0:
            k_high = bufs.k_high.index(0).reshape([64, variant.d_high])
            clear_keys(k_high, work.first_key, work, shape, variant)
        mbarrier.wait(bars.q_full.index(0), 0)
        s_sum = _products(bufs, 0, 0, variant)
        s = warpgroup_mma_wait(0, deps=(s_sum,))
        mbarrier.arrive(bars.q_empty.index(0), count=1)
    first_word = work.first_key % MASK_TILE // 32
    if variant.dropout:
        draw = draw_of(scores.philox, places.drop_limit)
    place = work.begin
    head = work.head * shape.group_size
    for step in range(0, steps):
        stage = step % STAGES
        parity = step % 2
        do = bufs.do.index(stage).reshape([64, D])
        tile, number = place, step * 0 - 1
        if variant.mask and PLACED:
            tile, number = entry_of_tile(work, place, scores, 64)
        if variant.dropout:
            plane = work.b * (shape.num_kv_heads * shape.group_size) + head
            kept = words_of_dropout(s, draw, plane, tile * 64, work.first_key)
        mbarrier.wait(bars.do_full.index(stage), (step // STAGES) & 1)
        lse = bufs.lse_log2.index(stage).reshape([64]).load(row_terms)
        minus_lse = zeros - gl.expand_dims(lse, 0)
        if CAPS:
            logits = minus_lse
        else:
            logits = gl.fma(s, zeros + scores.scale_log2, minus_lse)
        queries = tile * 64 + gl.arange(0, 64, row_terms)
        if variant.bias:
            last_q = gl.minimum(queries, work.length_q - 1)
            last_k = gl.minimum(keys, work.length_k - 1)
            logits = add_bias(
                logits, work.b, head, last_q, last_k, tile * 64, work.first_key, scores, places
            )
        if variant.alibi:
            diagonals = key_at(queries, work.length_q, work.length_k)
            logits = add_alibi(logits, work.b, head, diagonals, keys, scores, places)
        if MASKS:  # noqa: SIM102
            if (place < work.full_begin) | (place >= work.full_end):
                if variant.mask and not PLACED:
                    tile, number = entry_of_tile(work, place, scores, 64)
                logits = hide(logits, work, tile, number, first_word, keys, shape, scores, variant)
                if CAPS and variant.packed:  # NaN of another sequence would pass the tanh
                    s = hide(s, work, tile, number, first_word, keys, shape, scores, variant)
                clear_queries(do, work, tile, variant)
        if CAPS:
            ratio, factor = zeros + scores.cap_ratio, zeros + scores.cap_log2
            p, p_slope = capped_exp2(s, ratio, factor, logits, variant.softcap == "exact")
        else:
            p = exp2(logits)
            p_slope = p
        if variant.dropout:
            pairs = pack(p, dtype)
            masks = kept_pairs(pairs, kept)
            p_half = unpack(pairs & masks, dtype, operand)
            signed = pack(p_slope, dtype) | (~masks & -0x7FFF8000)  # neither has a sign
            sent = unpack(signed, dtype, over_queries)
        else:
            p_half = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
            sent = p_slope.to(dtype)
        zero = step // ALWAYS_ZERO
        mbarrier.wait(bars.p_empty.index(parity), ((step // 2) & 1) ^ 1)
        bufs.p.index(parity).reshape([64, 64]).store(sent)
        mbarrier.arrive(bars.p_full.index(parity), count=1)
        dv_sum = warpgroup_mma(p_half, do, dv, is_async=True)
        more = step + 1 < steps
        following = (step + 1) % STAGES
        mbarrier.wait(bars.q_full.index(following), ((step + 1) // STAGES) & 1, pred=more)
        s_sum = _products(bufs, zero, following, variant)
        dv, p_half = warpgroup_mma_wait(GROUPS, deps=(dv_sum, p_half))
        mbarrier.arrive(bars.do_empty.index(stage), count=1)
        s = warpgroup_mma_wait(0, deps=(s_sum,))
        mbarrier.arrive(bars.q_empty.index(following), count=1, pred=more)
        place += 1
        if PLACED:
            head = gl.where(place == work.end, head + 1, head)
        place = gl.where(place == work.end, work.begin, place)
    if variant.dropout:
        dv *= scores.keep_scale
    store_keys(dv.to(dtype), dv_desc, dv_ptr, work, shape, bufs.k, variant, 0, variant.v_width)


@gluon.jit
def make_dk(
    dk_desc, dk_high_desc, dk_ptr, shape, scores, places, bufs, bars, variant: gl.constexpr
):
    """Compute dp and ds = p (dp - delta) step by step, and sum dk = ds^T q.

    Args:
        dk_desc, dk_high_desc, dk_ptr: the destination: descriptors of both parts of the channels,
            and a pointer.
        shape, scores, places: the call's `Shape`, `BwdScores` and `Places`.
        bufs, bars: the CTA's shared memory and barriers.
    """
    D: gl.constexpr = variant.d
    DV: gl.constexpr = variant.dv
    HIGH: gl.constexpr = variant.d_high
    STAGES: gl.constexpr = variant.stages
    dtype: gl.constexpr = bufs.q.dtype
    over_queries: gl.constexpr = sum_layout(64)
    row_terms: gl.constexpr = gl.SliceLayout(0, over_queries)
    operand: gl.constexpr = operand_layout(D)
    LISTED: gl.constexpr = variant.mask and variant.packed  # else no code asks for the tile
    work = work_of_cta(shape, scores, places, variant)
    steps = (work.end - work.begin) * shape.group_size
    v = bufs.v.index(0).reshape([64, DV])
    dk = gl.zeros([64, D], gl.float32, sum_layout(D))
    if HIGH > 0:
        dk_high = gl.zeros([64, HIGH], gl.float32, sum_layout(HIGH))
    zeros = gl.zeros([64, 64], gl.float32, over_queries)
    dp = zeros
    place = work.begin
    tile = place
    if steps > 0:
        mbarrier.wait(bars.kv_full.index(1), 0)
        clear_keys(v, work.first_key, work, shape, variant)
        if LISTED:
            tile, _number = entry_of_tile(work, place, scores, 64)
        mbarrier.wait(bars.do_full.index(0), 0)
        first_do = bufs.do.index(0).reshape([64, DV])
        clear_queries(first_do, work, tile, variant)
        dp_sum = warpgroup_mma(v, first_do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        dp = warpgroup_mma_wait(0, deps=(dp_sum,))
        mbarrier.arrive(bars.do_empty.index(0), count=1)
    for step in range(0, steps):
        stage = step % STAGES
        parity = step % 2
        q = bufs.q.index(stage).reshape([64, D])
        mbarrier.wait(bars.q_full.index(stage), (step // STAGES) & 1)
        clear_queries(q, work, tile, variant)
        if HIGH > 0:
            q_high = bufs.q_high.index(stage).reshape([64, HIGH])
            clear_queries(q_high, work, tile, variant)
        delta = bufs.delta.index(stage).reshape([64]).load(row_terms)
        mbarrier.wait(bars.p_full.index(parity), (step // 2) & 1)
        p = bufs.p.index(parity).reshape([64, 64]).load(over_queries).to(gl.float32)
        release_loaded(bars.p_empty.index(parity))  # and with it lse, delta: copies refill them
        if variant.dropout:
            p, dp = keep_signed(p, dp, scores.keep_scale)
        ds = p * (dp - gl.expand_dims(delta, 0))
        zero = step // ALWAYS_ZERO
        ds_half = gl.convert_layout(ds.to(dtype), operand, assert_trivial=True)
        dk_sum = warpgroup_mma(ds_half, q, dk, is_async=True)
        if HIGH > 0:
            ds_high = gl.convert_layout(ds.to(dtype), operand_layout(HIGH), assert_trivial=True)
            dk_high_sum = warpgroup_mma(ds_high, q_high, dk_high, is_async=True)
        more = step + 1 < steps
        following = (step + 1) % STAGES
        place += 1
        place = gl.where(place == work.end, work.begin, place)
        tile = place
        if LISTED:
            tile, _number = entry_of_tile(work, place, scores, 64)
        mbarrier.wait(bars.do_full.index(following), ((step + 1) // STAGES) & 1, pred=more)
        next_do = bufs.do.index(following).reshape([64, DV])
        if variant.packed:  # noqa: SIM102
            if more:
                clear_queries(next_do, work, tile, variant)
        next_v = bufs.v.index(zero).reshape([64, DV])
        dp_sum = warpgroup_mma(next_v, next_do.permute((1, 0)), zeros, use_acc=False, is_async=True)
        if HIGH > 0:
            dk, dk_high, ds_half, ds_high = warpgroup_mma_wait(
                1, deps=(dk_sum, dk_high_sum, ds_half, ds_high)
            )
        else:
            dk, ds_half = warpgroup_mma_wait(1, deps=(dk_sum, ds_half))
        mbarrier.arrive(bars.q_empty.index(stage), count=1)
        dp = warpgroup_mma_wait(0, deps=(dp_sum,))
        mbarrier.arrive(bars.do_empty.index(following), count=1, pred=more)
    dk *= scores.scale
    store_keys(dk.to(dtype), dk_desc, dk_ptr, work, shape, bufs.v, variant, 0, variant.width)
    if HIGH > 0:  # p is not read any more; a last s that is not read may still want the others
        dk_high *= scores.scale
        store_keys(
            dk_high.to(dtype),
            dk_high_desc,
            dk_ptr,
            work,
            shape,
            bufs.p,
            variant,
            0,
            variant.width,
            variant.d,
        )
