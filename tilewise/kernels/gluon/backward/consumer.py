"""One consumer warpgroup of the backward pass: 64 keys, all queries that see them.

What: dk and dv of its keys in registers, and its half of each tile of dq.
Grid: that of attention_bwd.
One call: one partition of a CTA. A step issues dp = v do^T, does p = exp2(s) under it; issues
      dv += p do, does ds = p (dp - delta) under that; issues dk += ds q and dq = ds k of the step
      before; waits for dk and dv; issues s = k q^T of the next step and writes dq out under it.
      dq lags by one step, so that the two warpgroups may drift by one.
Traffic: see attention_bwd.
Numerics: see attention_bwd.

Of dq a warpgroup makes one half of the channels where a step has 64 queries, else one half of the
queries. The index of k and v is computed from the step though it is always 0: the descriptors of
their products then stay in uniform registers (as constants they cost 96 bytes of spills a step).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.backward.keys import clear_keys, clear_queries, hide, store_keys
from tilewise.kernels.gluon.backward.loader import DQ_WRITTEN, SECOND_SENDER
from tilewise.kernels.gluon.backward.logits import (
    add_alibi,
    add_bias,
    draw_words,
    drop_gradients,
    masks_of_pairs,
    words_of_pairs,
)
from tilewise.kernels.gluon.backward.span import (
    masked_steps,
    noted_work,
    tile_of_masked_step,
    tile_of_step,
    turns_of_cta,
    work_of_cta,
)
from tilewise.kernels.gluon.device.dropout import draw_of
from tilewise.kernels.gluon.device.warpgroup import (
    LOG2E,
    capped_exp2,
    exp2,
    keep_columns,
    named_barrier,
    operand_layout,
    pack,
    sum_layout,
    unpack,
    widen,
)
from tilewise.kernels.gluon.visible import entry_of_tile, first_query, key_at

ALWAYS_ZERO = gl.constexpr(1 << 20)  # no CTA has so many steps


@gluon.constexpr_function
def _dq_columns(variant):
    """Return how many columns of dq one warpgroup makes: half of d if a step has 64 queries, else
    d, of half of the queries."""
    return variant.d // 2 if variant.tile_m == 64 else variant.d


@gluon.jit
def ds_tile(bufs, parity, variant: gl.constexpr):
    """Return the shared memory of ds (128 keys, queries) for steps of this parity, 0 or 1."""
    if variant.by_query:
        return bufs.ds.index(parity).permute((1, 0))
    else:
        return bufs.ds.index(parity)


@gluon.jit
def _dq_half(ds, k, variant: gl.constexpr, PART: gl.constexpr):
    """Start this warpgroup's half of dq = ds^T k, of channels or of queries, and return the
    asynchronous sum."""
    COLUMNS: gl.constexpr = _dq_columns(variant)
    zeros = gl.zeros([64, COLUMNS], gl.float32, sum_layout(COLUMNS))
    if variant.tile_m == 64:
        half = k.slice(PART * COLUMNS, COLUMNS, 1)
        return warpgroup_mma(ds.permute((1, 0)), half, zeros, use_acc=False, is_async=True)
    else:
        rows = ds.slice(PART * 64, 64, 1).permute((1, 0))
        return warpgroup_mma(rows, k, zeros, use_acc=False, is_async=True)


@gluon.jit
def flat_dq(dq):
    """Return (64 queries, 64 channels) of a warpgroup as (128, 32): in the order of its threads.

    Four numbers of a thread, two channels of two queries eight apart, are neighbours, and so are
    those of the threads of a warp: a store is 16 bytes wide and meets no bank twice.
    """
    parts = dq.reshape([4, 2, 8, 8, 4, 2])  # warp, row + 8, row, eight channels, pair, channel
    return parts.permute((0, 3, 2, 4, 1, 5)).reshape([128, 32])


@gluon.jit
def leave_dq(dq, bufs, bars, step, variant: gl.constexpr, PART: gl.constexpr):
    """Wait for the buffer, store this warpgroup's half of a step's dq in shared memory, and tell
    the sender, which adds it to global memory.

    Args:
        dq: the sums, in registers.
        bufs, bars: the CTA's shared memory and barriers.
        step: the number of the step.
        PART: the number of this warpgroup.
    """
    COLUMNS: gl.constexpr = _dq_columns(variant)
    HALF: gl.constexpr = PART if variant.flat else 0  # that has a buffer of its own
    THREADS: gl.constexpr = 160 if variant.flat else 288
    place = HALF
    phase = step & 1
    if variant.senders == 2:
        place = HALF + (2 if variant.flat else 1) * (step % 2)
        phase = (step // 2) & 1
    mbarrier.wait(bars.dq_empty.index(place), phase ^ 1)
    if variant.flat:
        bufs.dq.index(place).reshape([128, 32]).store(flat_dq(dq))
    else:
        tile = bufs.dq.index(place).reshape([variant.tile_m, variant.d])
        if variant.tile_m == 64:
            tile.slice(PART * COLUMNS, COLUMNS, 1).store(dq)
        else:
            tile.slice(PART * 64, 64, 0).store(dq)
    fence_async_shared()
    _tell_sender(step, variant, HALF, THREADS)


@gluon.jit
def _tell_sender(step, variant: gl.constexpr, HALF: gl.constexpr, THREADS: gl.constexpr):
    """Arrive at the named barrier of the sender of this step: its half of dq is written."""
    if variant.senders == 2:
        if step % 2 == 1:
            named_barrier("arrive", DQ_WRITTEN + SECOND_SENDER + HALF, THREADS, 4)
        else:
            named_barrier("arrive", DQ_WRITTEN + HALF, THREADS, 4)
    else:
        named_barrier("arrive", DQ_WRITTEN + HALF, THREADS, 4)


@gluon.constexpr_function
def _draws_ahead(variant):
    """Say whether dropout's words of a step are drawn under its scores, in the step before.

    A block mask says where a tile stands only when its step begins.
    """
    return variant.dropout and not variant.mask


@gluon.jit
def _drawn(tile, g, work, shape, scores, places, variant: gl.constexpr, PART: gl.constexpr):
    """Return dropout's words, see `draw_words`, for the 64 keys of this warpgroup, number PART, and
    a tile of queries of query head g of the group."""
    head = work.head * shape.group_size + g
    plane = work.b * (shape.num_kv_heads * shape.group_size) + head
    draw = draw_of(scores.philox, places.drop_limit)  # in registers all along it would spill
    first_key = work.first_key + PART * 64
    return draw_words(variant.tile_m, draw, plane, tile * variant.tile_m, first_key)


@gluon.jit
def _drawn_ahead(
    step, more, work, shape, scores, places, variant: gl.constexpr, PART: gl.constexpr
):
    """Return dropout's words, see `draw_words`, of this warpgroup's keys for the next step, or for
    this one again if it is the last.

    Args:
        more: whether another step follows.
        work, shape, scores, places: the CTA's `Work`, and the call's `Shape`, `BwdScores`,
            `Places`.
        PART: the number of this warpgroup.
    """
    following = gl.where(more, step + 1, step)
    g, tile = tile_of_step(work, following, shape.group_size, variant)
    return _drawn(tile, g, work, shape, scores, places, variant, PART)


@gluon.jit
def _step(
    s,
    dk,
    dv,
    drawn,
    step,
    g,
    tile,
    more,
    keys,
    work,
    shape,
    scores,
    places,
    bufs,
    bars,
    variant: gl.constexpr,
    PART: gl.constexpr,
    FIRST: gl.constexpr,
    MASK: gl.constexpr,
):
    """Add one tile of queries of head g of the group to dk and dv, from its scores s; return the
    next step's scores, dk, dv and its dropout's words.

    The step also leaves the previous step's half of dq for the sender, unless FIRST.

    MASK: 0 none, 1 always, 2 where this step needs it. g and, without a mask, tile are read where
    logits depend on their place alone. drawn: `_drawn` of this step if `_draws_ahead`; that of the
    next one is returned.
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
    q = bufs.q.index(stage).reshape([TILE_M, D])
    do = bufs.do.index(stage).reshape([TILE_M, D])
    no_scores = gl.zeros([64, TILE_M], gl.float32, over_queries)
    PLACED: gl.constexpr = variant.alibi or variant.bias or variant.dropout
    masked = (tile < work.full_begin) | (tile >= work.full_end)
    head = work.head * shape.group_size + g
    number = step * 0 - 1
    if variant.mask and (PLACED or MASK == 1):
        tile, number = entry_of_tile(work, tile, scores, variant.tile_m)
    row = tile * TILE_M
    if variant.dropout:
        if not _draws_ahead(variant):
            drawn = _drawn(tile, g, work, shape, scores, places, variant, PART)
        kept = words_of_pairs(s, drawn)
    mbarrier.wait(bars.do_full.index(stage), (step // STAGES) & 1)
    if MASK > 0:
        clear_queries(q, work, tile, variant)
        clear_queries(do, work, tile, variant)
    dp_sum = warpgroup_mma(v, do.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    CAPS: gl.constexpr = variant.softcap != "none"
    # Before the scale: dp is then issued at once, which is worth 5 % where all is one loop. A bias
    # of hidden keys that is copied may be NaN.
    EARLY: gl.constexpr = variant.positive and not (CAPS or variant.bias_copied)
    if MASK == 1 and EARLY:
        s = hide(s, work, tile, number, PART * 2, keys, shape, scores, variant)
    if MASK == 2 and EARLY:  # noqa: SIM102
        if masked:
            if variant.mask and not PLACED:
                tile, number = entry_of_tile(work, tile, scores, variant.tile_m)
            s = hide(s, work, tile, number, PART * 2, keys, shape, scores, variant)
    lse = bufs.lse_log2.index(stage).reshape([TILE_M]).load(row_terms)
    zeros = gl.full_like(s, 0.0)
    minus_lse = zeros - gl.expand_dims(lse, 0)
    if CAPS:
        logits = minus_lse  # all but the capped products
    else:
        logits = gl.fma(s, zeros + scores.scale_log2, minus_lse)
    queries = row + gl.arange(0, TILE_M, row_terms)
    if variant.bias_copied:
        tile_of_bias = bufs.bias.index(stage).reshape([TILE_M, 128]).permute((1, 0))
        bias = tile_of_bias.slice(PART * 64, 64, 0).load(over_queries)
        logits = gl.fma(widen(bias), zeros + LOG2E, logits)
    elif variant.bias:
        last_q = gl.minimum(queries, work.length_q - 1)
        last_k = gl.minimum(keys, work.length_k - 1)
        logits = add_bias(logits, work.b, head, last_q, last_k, row, work.first_key, scores, places)
    if variant.alibi:
        diagonals = key_at(queries, work.length_q, work.length_k)
        logits = add_alibi(logits, work.b, head, diagonals, keys, scores, places)
    if MASK == 1 and not EARLY:
        logits = hide(logits, work, tile, number, PART * 2, keys, shape, scores, variant)
        if CAPS and variant.packed:  # NaN of another sequence would pass the tanh
            s = hide(s, work, tile, number, PART * 2, keys, shape, scores, variant)
    if MASK == 2 and not EARLY:  # noqa: SIM102
        if masked:
            if variant.mask and not PLACED:
                tile, number = entry_of_tile(work, tile, scores, variant.tile_m)
            logits = hide(logits, work, tile, number, PART * 2, keys, shape, scores, variant)
            if CAPS and variant.packed:
                s = hide(s, work, tile, number, PART * 2, keys, shape, scores, variant)
    if CAPS:
        ratio, factor = zeros + scores.cap_ratio, zeros + scores.cap_log2
        p, p_slope = capped_exp2(s, ratio, factor, logits, variant.softcap == "exact")
    else:
        p_slope = exp2(logits)
        p = p_slope
    if variant.dropout:
        pairs = pack(p, dtype)
        p_half = unpack(pairs & masks_of_pairs(pairs, kept), dtype, operand)
    else:
        p_half = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
    dv_sum = warpgroup_mma(p_half, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp_sum,))
    delta = bufs.delta.index(stage).reshape([TILE_M]).load(row_terms)
    if variant.dropout:
        ds = (p_slope * drop_gradients(dp, kept, scores.keep_scale, delta)).to(dtype)
    else:
        ds = (p_slope * (dp - gl.expand_dims(delta, 0))).to(dtype)
    mbarrier.wait(bars.ds_empty.index(parity), ((step // 2) & 1) ^ 1)
    ds_tile(bufs, parity, variant).slice(PART * 64, 64, 0).store(ds)
    ds_half = gl.convert_layout(ds, operand, assert_trivial=True)
    dk_sum = warpgroup_mma(ds_half, q, dk, is_async=True)
    fence_async_shared()
    mbarrier.arrive(bars.ds_full.index(parity), count=1)
    before = step - 1
    if FIRST:
        dv, dk, p_half, ds_half = warpgroup_mma_wait(0, deps=(dv_sum, dk_sum, p_half, ds_half))
    else:
        mbarrier.wait(bars.ds_full.index(before % 2), (before // 2) & 1)
        dq_sum = _dq_half(ds_tile(bufs, before % 2, variant), all_k, variant, PART)
        dv, dk, p_half, ds_half = warpgroup_mma_wait(1, deps=(dv_sum, dk_sum, p_half, ds_half))
    mbarrier.arrive(bars.empty.index(stage), count=1)
    # After the last step: of an old tile, and dropped.
    following = (step + 1) % STAGES
    mbarrier.wait(bars.q_full.index(following), ((step + 1) // STAGES) & 1, pred=more)
    next_q = bufs.q.index(following).reshape([TILE_M, D]).permute((1, 0))
    s_sum = warpgroup_mma(k, next_q, no_scores, use_acc=False, is_async=True)
    if _draws_ahead(variant):
        drawn = _drawn_ahead(step, more, work, shape, scores, places, variant, PART)
    if FIRST == 0:
        dq = warpgroup_mma_wait(1, deps=(dq_sum,))
        mbarrier.arrive(bars.ds_empty.index(before % 2), count=1)
        leave_dq(dq, bufs, bars, before, variant, PART)
    s = warpgroup_mma_wait(0, deps=(s_sum,))
    return s, dk, dv, drawn


@gluon.jit
def _see_half(
    step,
    tile,
    more,
    keys,
    dk,
    dv,
    work,
    shape,
    scores,
    bufs,
    bars,
    variant: gl.constexpr,
    PART: gl.constexpr,
):
    """Add the first tile of 128 queries, of which this warpgroup's keys see the last 64, to dk and
    dv; return the next step's scores, dk and dv.

    As `_step` does, with products of half the size; ds of the others is 0.
    """
    TILE_M: gl.constexpr = variant.tile_m
    D: gl.constexpr = variant.d
    STAGES: gl.constexpr = variant.stages
    dtype: gl.constexpr = bufs.q.dtype
    over_half: gl.constexpr = sum_layout(64)
    row_terms: gl.constexpr = gl.SliceLayout(0, over_half)
    operand: gl.constexpr = operand_layout(D)
    zero = step // ALWAYS_ZERO
    k = bufs.k.index(zero).reshape([128, D]).slice(PART * 64, 64, 0)
    v = bufs.v.index(zero).reshape([128, D]).slice(PART * 64, 64, 0)
    stage = step % STAGES
    parity = step % 2
    q = bufs.q.index(stage).reshape([TILE_M, D]).slice(64, 64, 0)
    do = bufs.do.index(stage).reshape([TILE_M, D]).slice(64, 64, 0)
    zeros = gl.zeros([64, 64], gl.float32, over_half)
    s_sum = warpgroup_mma(k, q.permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(bars.do_full.index(stage), (step // STAGES) & 1)
    dp_sum = warpgroup_mma(v, do.permute((1, 0)), zeros, use_acc=False, is_async=True)
    lse = bufs.lse_log2.index(stage).reshape([TILE_M]).slice(64, 64).load(row_terms)
    s = warpgroup_mma_wait(1, deps=(s_sum,))
    first = gl.convert_layout(keys, gl.SliceLayout(1, over_half), assert_trivial=True)
    first = first_query(first, tile * TILE_M, work.length_q, work.length_k, shape.window_right)
    s = keep_columns(s, first - 64, first, True, False)
    p = exp2(gl.fma(s, zeros + scores.scale_log2, zeros - gl.expand_dims(lse, 0)))
    p_half = gl.convert_layout(p.to(dtype), operand, assert_trivial=True)
    dv_sum = warpgroup_mma(p_half, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp_sum,))
    delta = bufs.delta.index(stage).reshape([TILE_M]).slice(64, 64).load(row_terms)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(dtype)
    # Who has k of this tile knows that all products with ds of the tile before are done.
    ds_of_keys = ds_tile(bufs, parity, variant).slice(PART * 64, 64, 0)
    ds_of_keys.slice(0, 64, 1).store(gl.zeros([64, 64], dtype, over_half))
    ds_of_keys.slice(64, 64, 1).store(ds)
    ds_half = gl.convert_layout(ds, operand, assert_trivial=True)
    dk_sum = warpgroup_mma(ds_half, q, dk, is_async=True)
    fence_async_shared()
    mbarrier.arrive(bars.ds_full.index(parity), count=1)
    dv, dk, p_half, ds_half = warpgroup_mma_wait(0, deps=(dv_sum, dk_sum, p_half, ds_half))
    mbarrier.arrive(bars.empty.index(stage), count=1)
    return _first_scores(step + 1, more, k, bufs, bars, variant), dk, dv


@gluon.jit
def _first_scores(step, more, k, bufs, bars, variant: gl.constexpr):
    """Return the scores k q^T of a step, after waiting for its q if `more`; without `more` there is
    no such step and the result must not be used."""
    TILE_M: gl.constexpr = variant.tile_m
    over_queries: gl.constexpr = sum_layout(TILE_M)
    stage = step % variant.stages
    mbarrier.wait(bars.q_full.index(stage), (step // variant.stages) & 1, pred=more)
    q = bufs.q.index(stage).reshape([TILE_M, variant.d]).permute((1, 0))
    no_scores = gl.zeros([64, TILE_M], gl.float32, over_queries)
    s_sum = warpgroup_mma(k, q, no_scores, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(s_sum,))


@gluon.jit
def _next_work(turn, bufs, bars, shape):
    """Wait until k of a turn, and with it the loader's notes, have come, and return the turn's
    Work."""
    mbarrier.wait(bars.kv_full.index(0), turn & 1)
    return noted_work(turn, bufs.notes, shape)


@gluon.jit
def consume_turns(
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
    """Make and write dk and dv of this warpgroup's 64 keys of each tile of keys of this CTA, and
    leave its half of every tile of dq for the sender."""
    if variant.several:
        before = 0
        for turn in range(0, turns_of_cta(shape)):
            before = consume(
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
                PART,
                turn,
                before,
            )
    else:
        consume(dk_desc, dv_desc, dk_ptr, dv_ptr, shape, scores, places, bufs, bars, variant, PART)


@gluon.jit
def consume(
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
    turn=0,
    before=0,
):
    """Make and write dk and dv of this warpgroup's 64 keys of one tile of keys, and leave its half
    of every tile of dq for the sender.

    before: the number of steps in the CTA's earlier turns. Returns that number with this turn's
    steps.
    """
    TILE_M: gl.constexpr = variant.tile_m
    D: gl.constexpr = variant.d
    dtype: gl.constexpr = bufs.q.dtype
    over_queries: gl.constexpr = sum_layout(TILE_M)
    WINDOW: gl.constexpr = variant.left or variant.right
    MASKS: gl.constexpr = WINDOW or variant.tail or variant.packed or variant.mask
    PLACED: gl.constexpr = variant.alibi or variant.bias or variant.dropout
    if variant.several:
        work = _next_work(turn, bufs, bars, shape)
    else:
        work = work_of_cta(shape, scores, places, variant)
    group = shape.group_size
    steps = (work.end - work.begin) * group
    until = before + steps
    dk = gl.zeros([64, D], gl.float32, sum_layout(D))
    dv = gl.zeros([64, D], gl.float32, sum_layout(D))
    keys = work.first_key + PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, over_queries))
    step = before
    if steps > 0:
        mbarrier.wait(bars.kv_full.index(0), turn & 1)
        clear_keys(bufs.k.index(0).reshape([128, D]), work.first_key, work, shape, variant)
        stage = before % variant.stages
        mbarrier.wait(bars.q_full.index(stage), (before // variant.stages) & 1)
        if variant.passes_by and PART == 1:
            mbarrier.wait(bars.kv_full.index(1), turn & 1)
        else:
            k = bufs.k.index(0).reshape([128, D])
            first_q = bufs.q.index(stage).reshape([TILE_M, D]).permute((1, 0))
            no_scores = gl.zeros([64, TILE_M], gl.float32, over_queries)
            s_sum = warpgroup_mma(
                k.slice(PART * 64, 64, 0), first_q, no_scores, use_acc=False, is_async=True
            )
            mbarrier.wait(bars.kv_full.index(1), turn & 1)
            clear_keys(bufs.v.index(0).reshape([128, D]), work.first_key, work, shape, variant)
            s = warpgroup_mma_wait(0, deps=(s_sum,))
        tile = work.begin + work.start
        if MASKS and variant.two_loops:
            tile = gl.where(masked_steps(work) > 0, tile_of_masked_step(work, 0), tile)
        g = steps * 0
        drawn = g
        if _draws_ahead(variant):
            drawn = _drawn(tile, g, work, shape, scores, places, variant, PART)
        if variant.passes_by and PART == 1:
            s, dk, dv = _see_half(
                before,
                tile,
                steps > 1,
                keys,
                dk,
                dv,
                work,
                shape,
                scores,
                bufs,
                bars,
                variant,
                PART,
            )
        else:
            s, dk, dv, drawn = _step(
                s,
                dk,
                dv,
                drawn,
                before,
                g,
                tile,
                steps > 1,
                keys,
                work,
                shape,
                scores,
                places,
                bufs,
                bars,
                variant,
                PART,
                1,
                1 if MASKS else 0,
            )
        step = step + 1
        if MASKS and variant.two_loops:
            each = masked_steps(work)
            at = 1
            for _ in range(1, each * group):
                if PLACED:
                    g = gl.where(at == each, g + 1, g)
                at = gl.where(at == each, 0, at)
                tile = tile_of_masked_step(work, at)
                s, dk, dv, drawn = _step(
                    s,
                    dk,
                    dv,
                    drawn,
                    step,
                    g,
                    tile,
                    step + 1 < until,
                    keys,
                    work,
                    shape,
                    scores,
                    places,
                    bufs,
                    bars,
                    variant,
                    PART,
                    0,
                    1,
                )
                step += 1
                at += 1
        begin, end, first = work.begin, work.end, work.begin + work.start  # of each head
        if PLACED and variant.two_loops:
            begin, end, first = work.full_begin, work.full_end, work.full_begin
            some_masked = masked_steps(work) > 0
            tile = gl.where(some_masked, end - 1, begin)  # before the first, or the first
            g = gl.where(some_masked, -1, 0)
        for _ in range(step, until):
            if PLACED or (MASKS and not variant.two_loops):
                tile = gl.where(tile + 1 == end, begin, tile + 1)
            if PLACED:
                g = gl.where(tile == first, g + 1, g)
            s, dk, dv, drawn = _step(
                s,
                dk,
                dv,
                drawn,
                step,
                g,
                tile,
                step + 1 < until,
                keys,
                work,
                shape,
                scores,
                places,
                bufs,
                bars,
                variant,
                PART,
                0,
                2 if MASKS and not variant.two_loops else 0,
            )
            step += 1
        last = until - 1
        if variant.several:  # the same, counted: ptxas knows that it is alike in all threads
            last = step - 1
        mbarrier.wait(bars.ds_full.index(last % 2), (last // 2) & 1)
        dq_sum = _dq_half(
            ds_tile(bufs, last % 2, variant), bufs.k.index(0).reshape([128, D]), variant, PART
        )
        if variant.several:  # dv leaves under the last product
            store_keys(
                dv.to(dtype),
                dv_desc,
                dv_ptr,
                work,
                shape,
                bufs.v,
                variant,
                PART,
                variant.v_width,
                WAIT=False,
            )
        dq = warpgroup_mma_wait(0, deps=(dq_sum,))
        if variant.several:
            mbarrier.arrive(bars.ds_empty.index(last % 2), count=1)
            mbarrier.arrive(bars.kv_empty.index(0), count=1)
        leave_dq(dq, bufs, bars, last, variant, PART)
    # The other warpgroup still multiplies with k, so both leave through their half of v.
    dk *= scores.scale
    if variant.several:
        tma.store_wait(0)
        store_keys(dk.to(dtype), dk_desc, dk_ptr, work, shape, bufs.v, variant, PART, variant.width)
        mbarrier.arrive(bars.kv_empty.index(1), count=1)
    else:
        if variant.dropout:
            dv *= scores.keep_scale
        store_keys(dk.to(dtype), dk_desc, dk_ptr, work, shape, bufs.v, variant, PART, variant.width)
        store_keys(
            dv.to(dtype), dv_desc, dv_ptr, work, shape, bufs.v, variant, PART, variant.v_width
        )
    return step
