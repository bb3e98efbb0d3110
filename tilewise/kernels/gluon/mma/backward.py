"""Backward pass of attention by mma.sync and cp.async in one kernel of five products.

What: with p = exp(s - lse), dp = do v^T, ds = p * (dp - delta):
      dv = p^T do, dk = ds^T q, dq = ds k; dq is summed over the tiles of keys in global memory.
Grid: one axis, tiles of `variant.tile_n` keys x (batch x key heads).
One CTA: the keys of a tile of one key head; it loops over the query heads of its group and the
      tiles of queries that see the keys. p and ds pass through shared memory, keys in rows.
Traffic: k, v are read and dk, dv written once; q, do and the row terms once for each tile of keys,
      and as often 4 bytes an element are added to dq, where 8 x 8 elements are neighbours in the
      order of the lanes that hold them.
Numerics: base 2, p recomputed from lse; sums float32; p and ds rounded to the input type for the
      second products. dk and dv have one owner and one order, so they are bitwise reproducible; so
      is dq where its sums wait for one another, tile by tile (`span.rank_of_tile`).
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from tilewise.kernels.gluon.backward.keys import hide
from tilewise.kernels.gluon.backward.logits import Places, add_alibi, add_bias, keep_pairs
from tilewise.kernels.gluon.backward.span import (
    Shape,
    masked_steps,
    rank_of_tile,
    tile_of_step,
    work_of_cta,
)
from tilewise.kernels.gluon.device.compat import partition_barrier
from tilewise.kernels.gluon.device.dropout import draw_of, kept_words
from tilewise.kernels.gluon.device.warpgroup import LOG2E, capped_exp2, exp2
from tilewise.kernels.gluon.mma.operands import (
    CHUNK,
    UNIT,
    Rows,
    copy_layout,
    copy_rows,
    rows_of,
    sum_layout,
    tile_layout,
)
from tilewise.kernels.gluon.visible import (
    MASK_TILE,
    entry_of_tile,
    first_key_seen,
    key_at,
)


class Grids(NamedTuple):
    """Constexpr: how the warps of a CTA of the backward pass lie over the sums of its products, as
    (rows, columns), and which channels are multiplied."""

    warps: int
    scores: tuple[int, int]  # over (keys, queries)
    keys: tuple[int, int]  # over dk and dv
    queries: tuple[int, int]  # over dq
    channels: int  # of q and k that are multiplied, a multiple of 16
    v_channels: int
    padded: bool  # heads are narrower than a tile
    queries_end: bool  # a tile of queries may have fewer rows


class Buffers(NamedTuple):
    """The shared memory of a CTA of the backward pass: stages of q and do, k, v, p, ds, row terms
    and a bias."""

    q: object  # (stages, queries, d)
    do: object  # (stages, queries, dv)
    k: object  # (keys, d)
    v: object
    p: object  # (keys, queries)
    ds: object
    lse_log2: object  # (stages, queries)
    delta: object
    bias: object  # (stages, queries, keys), None where registers load it


class Heads(NamedTuple):
    """The tensors of a call and their strides, in units of 16 bytes; row terms and sums."""

    q: object
    do: object
    q_strides: object
    do_strides: object
    lse_log2: object
    delta: object
    dq_sum: object
    semaphores: object  # int32, whose turn it is to add to a tile of dq; None without an order
    width: object  # channels of q and k, and of v, in units
    v_width: object


@gluon.jit
def _add_product(acc, left, right, CHANNELS: gl.constexpr):
    """Return acc + left right over the first CHANNELS of the summed dimension; both operands are in
    shared memory."""
    LEFT: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    CHUNKS: gl.constexpr = CHANNELS // CHUNK
    for chunk in gl.static_range(CHUNKS):
        a = left.slice(chunk * CHUNK, CHUNK, dim=1).load(LEFT)
        b = right.slice(chunk * CHUNK, CHUNK).load(RIGHT)
        acc = mma_v2(a, b, acc)
    return acc


@gluon.jit
def _copy_numbers(ptr, memory, WARPS: gl.constexpr):
    """Start to copy as many float32 numbers from `ptr` to `memory` as it holds."""
    N: gl.constexpr = memory.shape[0]
    LAYOUT: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    async_copy.async_copy_global_to_shared(memory, ptr + gl.arange(0, N, LAYOUT))


@gluon.jit
def _plane(work, head, shape, variant: gl.constexpr):
    """Return the number of the plane in which the row terms of query head `head` lie."""
    if variant.packed:
        return head
    else:
        return work.b * (shape.num_kv_heads * shape.group_size) + head


@gluon.jit
def _place(work, step, shape, scores, variant: gl.constexpr):
    """Return (query head, tile of queries, its bit tile or -1) of a step."""
    g, tile = tile_of_step(work, step, shape.group_size, variant)
    number = step * 0 - 1
    if variant.mask:
        tile, number = entry_of_tile(work, tile, scores, variant.tile_m)
    return work.head * shape.group_size + g, tile, number


@gluon.jit
def _copy(
    step,
    until,
    work,
    shape,
    scores,
    places,
    heads,
    bufs,
    variant: gl.constexpr,
    grids: gl.constexpr,
):
    """Start to copy the queries and do of a step to shared memory, as one group; none past `until`.

    Args:
        scores, places: the bias and its strides, if variant.bias_copied in units of 16 bytes.
        heads: the tensors and their strides.
        bufs: the CTA's shared memory.
    """
    if step < until:
        head, tile, _number = _place(work, step, shape, scores, variant)
        TILE_M: gl.constexpr = variant.tile_m
        stage = step % variant.stages
        b = work.b
        if variant.packed:
            b = work.b * 0
        first = tile * TILE_M
        q = rows_of(heads.q, b, work.start_q, head, heads.q_strides, 0, work.length_q, heads.width)
        do = rows_of(
            heads.do, b, work.start_q, head, heads.do_strides, 0, work.length_q, heads.v_width
        )
        WARPS: gl.constexpr = grids.warps
        at = _plane(work, head, shape, variant).to(gl.int64) * shape.rows_per_plane
        at += work.start_row + first
        copy_rows(q, first, bufs.q.index(stage), None, WARPS, grids.queries_end, grids.padded)
        copy_rows(do, first, bufs.do.index(stage), None, WARPS, grids.queries_end, grids.padded)
        _copy_numbers(heads.lse_log2 + at, bufs.lse_log2.index(stage), WARPS)
        _copy_numbers(heads.delta + at, bufs.delta.index(stage), WARPS)
        if variant.bias_copied:
            strides = (places.bias_batch, places.bias_row, places.bias_head)
            every = rows_of(scores.bias, work.b, first * 0, head, strides, 0, work.length_q, 0)
            width = (shape.seqlen_k - work.first_key) // UNIT
            bias = Rows(every.start + work.first_key, every.stride, 0, work.length_q, width)
            copy_rows(bias, first, bufs.bias.index(stage), None, WARPS, grids.queries_end, True)
    async_copy.commit_group()


@gluon.jit
def _kept(like, head, tile, work, shape, scores, places, grids: gl.constexpr):
    """Return the bits of the probabilities that dropout keeps, int32 (keys / 32, queries).

    Args:
        like: a tile (keys, queries) of scores, whose layout decides the result's.
        head, tile: the numbers of the query head and of the tile of queries.
        work: the CTA's work: batch entry and first key.
        scores: the options of the scores, of which philox (seed, offset) is read.
        places: the addresses and limits, of which drop_limit is read.
    """
    KEYS: gl.constexpr = like.shape[0]
    N: gl.constexpr = like.shape[1]
    WORDS: gl.constexpr = KEYS // 32
    drawn: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [grids.warps // 2, 2], [1, 0])
    draw = draw_of(scores.philox, places.drop_limit)
    plane = work.b * (shape.num_kv_heads * shape.group_size) + head
    block = gl.expand_dims(gl.arange(0, WORDS, gl.SliceLayout(1, drawn)), 1) + work.first_key // 32
    row = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, drawn)), 0) + tile * N
    words = kept_words(block.to(gl.uint32), row.to(gl.uint32), plane, draw)
    to: gl.constexpr = gl.SliceLayout(1, like.reshape([WORDS, 32, N]).type.layout)
    return gl.convert_layout(words.to(gl.int32, bitcast=True), to)


@gluon.jit
def _first_sum(head, tile, work, shape, variant: gl.constexpr):
    """Return the row of the sums of dq at which a tile of queries begins."""
    first = _plane(work, head, shape, variant).to(gl.int64) * shape.rows_per_plane
    return first + work.start_row + tile * variant.tile_m


@gluon.jit
def _add_queries(dq, head, tile, owed, seen, work, shape, heads, variant: gl.constexpr):
    """Add a tile of dq to its sum; with variant.ordered when it is this CTA's turn.

    Channels past the width of a head are zeros, for which the sum has room. owed: the semaphore of
    the tile of the step before, or -1: its turn ends here, long after all warps have added to it (a
    barrier of this step is between), so that nothing waits for those sums to arrive. seen: what the
    semaphore of this tile said when the step began; mostly the turn has come by then. Each thread
    asks for itself, without a barrier; what it read orders its additions by the branch on it, and
    nothing is read that others wrote. Returns the semaphore of this tile, or `owed` without an
    order.
    """
    TILE_M: gl.constexpr = variant.tile_m
    D: gl.constexpr = variant.d
    LAYOUT: gl.constexpr = dq.type.layout
    first = _first_sum(head, tile, work, shape, variant)
    sums = heads.dq_sum + first * D
    row = gl.arange(0, TILE_M, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    rows_at = row // 8 * (8 * D) + row % 8 * 4
    columns_at = column // 8 * 64 + column % 2 * 32 + column % 8 // 2
    at = sums + (gl.expand_dims(rows_at, 1) + gl.expand_dims(columns_at, 0))
    if variant.ordered:
        at_turn = (first // TILE_M).to(gl.int32)
        turn = heads.semaphores + at_turn
        rank = rank_of_tile(work, tile, shape, variant)
        _end_turn(owed, heads)
        while seen < rank:
            seen = gl.load(turn, volatile=True)
        if rank == 0:
            gl.store(at, dq)
        else:
            gl.atomic_add(at, dq, sem="relaxed")
        owed = at_turn
    else:
        gl.atomic_add(at, dq, sem="relaxed")
    return owed


@gluon.jit
def _end_turn(owed, heads):
    """Let the next CTA add to a tile of dq; owed: its semaphore, or -1."""
    if owed >= 0:
        gl.atomic_add(heads.semaphores + owed, 1, sem="release")


@gluon.jit
def _step(
    dk,
    dv,
    owed,
    step,
    until,
    keys,
    work,
    shape,
    scores,
    places,
    heads,
    bufs,
    variant: gl.constexpr,
    grids: gl.constexpr,
    MASK: gl.constexpr,
):
    """Add one tile of queries of one head of the group to dk and dv, and its dq to the sums; return
    dk, dv and the semaphore that is owed, see `_add_queries`.

    MASK: keys may be hidden.
    """
    TILE_M: gl.constexpr = variant.tile_m
    KEYS: gl.constexpr = variant.tile_n
    SCORES: gl.constexpr = sum_layout(grids.scores[0], grids.scores[1])
    TERMS: gl.constexpr = gl.SliceLayout(0, SCORES)
    DTYPE: gl.constexpr = bufs.q.dtype
    CAPS: gl.constexpr = variant.softcap != "none"
    ONE: gl.constexpr = variant.stages == 1
    stage = step % variant.stages
    head, tile, number = _place(work, step, shape, scores, variant)
    seen = 0
    if variant.ordered:
        turn = _first_sum(head, tile, work, shape, variant) // TILE_M
        seen = gl.load(heads.semaphores + turn, volatile=True)
    async_copy.wait_group(0)
    if not ONE:
        _copy(step + 1, until, work, shape, scores, places, heads, bufs, variant, grids)
    q = bufs.q.index(stage)
    do = bufs.do.index(stage)
    zeros = gl.zeros([KEYS, TILE_M], gl.float32, SCORES)
    s = _add_product(zeros, bufs.k, q.permute((1, 0)), grids.channels)
    dp = _add_product(zeros, bufs.v, do.permute((1, 0)), grids.v_channels)
    lse = bufs.lse_log2.index(stage).load(TERMS)
    EARLY: gl.constexpr = variant.positive and not CAPS
    first_word = work.first_key % MASK_TILE // 32
    if MASK and EARLY:
        s = hide(s, work, tile, number, first_word, keys, shape, scores, variant)
    minus_lse = zeros - gl.expand_dims(lse, 0)
    if CAPS:
        logits = minus_lse
    else:
        logits = gl.fma(s, zeros + scores.scale_log2, minus_lse)
    queries = tile * TILE_M + gl.arange(0, TILE_M, TERMS)
    if variant.bias_copied:
        bias = bufs.bias.index(stage).permute((1, 0)).load(SCORES).to(gl.float32)
        logits = gl.fma(bias, zeros + LOG2E, logits)
    elif variant.bias:
        last_q = gl.minimum(queries, work.length_q - 1)
        last_k = gl.minimum(keys, work.length_k - 1)
        logits = add_bias(
            logits, work.b, head, last_q, last_k, tile * TILE_M, work.first_key, scores, places
        )
    if variant.alibi:
        diagonals = key_at(queries, work.length_q, work.length_k)
        logits = add_alibi(logits, work.b, head, diagonals, keys, scores, places)
    if MASK and not EARLY:
        logits = hide(logits, work, tile, number, first_word, keys, shape, scores, variant)
    if CAPS:
        ratio, factor = zeros + scores.cap_ratio, zeros + scores.cap_log2
        p, p_slope = capped_exp2(s, ratio, factor, logits, variant.softcap == "exact")
    else:
        p_slope = exp2(logits)
        p = p_slope
    if variant.dropout:
        words = _kept(s, head, tile, work, shape, scores, places, grids)
        p = keep_pairs(p, words, 0.0)
        dp = keep_pairs(dp * scores.keep_scale, words, 0.0)
    delta = bufs.delta.index(stage).load(TERMS)
    bufs.p.store(p.to(DTYPE))
    bufs.ds.store((p_slope * (dp - gl.expand_dims(delta, 0))).to(DTYPE))
    dv = _add_product(dv, bufs.p, do, TILE_M)
    dk = _add_product(dk, bufs.ds, q, TILE_M)
    if ONE:
        partition_barrier()  # all warps have read q and do
        _copy(step + 1, until, work, shape, scores, places, heads, bufs, variant, grids)
    D: gl.constexpr = variant.d
    QUERIES: gl.constexpr = sum_layout(grids.queries[0], grids.queries[1])
    dq = gl.zeros([TILE_M, D], gl.float32, QUERIES)
    dq = _add_product(dq, bufs.ds.permute((1, 0)), bufs.k, KEYS)
    owed = _add_queries(dq, head, tile, owed, seen, work, shape, heads, variant)
    return dk, dv, owed


@gluon.jit
def _store(x, ptr, strides, width, work, shape, variant: gl.constexpr, grids: gl.constexpr):
    """Write dk or dv of a tile of keys; keys that no query sees get 0.

    Args:
        x: the float32 sums.
        ptr, strides, width: the tensor, its strides and channels in units of 16 bytes.
    """
    D: gl.constexpr = x.shape[1]
    LAYOUT: gl.constexpr = copy_layout(D, grids.warps)
    x = gl.convert_layout(x.to(ptr.dtype.element_ty), LAYOUT)
    row = gl.arange(0, variant.tile_n, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    key = work.first_key + row
    end = shape.seqlen_k
    b = work.b
    if variant.packed:
        end = work.length_k
        b = work.b * 0
    if variant.ragged or variant.left:
        unseen = key >= work.length_k
        if variant.left:
            first = first_key_seen(work.length_q, work.length_k, shape.window_left)
            unseen = unseen | (key < first)
        x = gl.where(gl.expand_dims(unseen, 1), gl.full_like(x, 0.0), x)
    first = work.start_k + work.first_key
    start = rows_of(ptr, b, first, work.head, strides, 0, end, width).start
    at = gl.expand_dims(row * strides[1] * UNIT, 1) + gl.expand_dims(column, 0)
    inside = gl.expand_dims(key < end, 1) & gl.expand_dims(column < width * UNIT, 0)
    gl.store(start + at, x, mask=inside)


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
        "width",
        "v_width",
    ]
)
def attention_bwd_kernel(
    q,
    k,
    v,
    do,
    dk_ptr,
    dv_ptr,
    lse_log2,
    delta,
    dq_sum,
    semaphores,
    sequences,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    dk_strides,
    dv_strides,
    width,
    v_width,
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
    grids: gl.constexpr,
):
    """Compute and write dk and dv of one tile of keys of a key head by mma.sync, and add what the
    tile gives to the float32 sums of dq in global memory; see the module's docstring.

    Strides, width and v_width (channels) are in units of 16 bytes.
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
        1,
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
    TILE_M: gl.constexpr = variant.tile_m
    KEYS: gl.constexpr = variant.tile_n
    D: gl.constexpr = variant.d
    DV: gl.constexpr = variant.dv
    DTYPE: gl.constexpr = q.dtype.element_ty
    WARPS: gl.constexpr = grids.warps
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    work = work_of_cta(shape, scores, places, variant)
    bias_memory = None
    if variant.bias_copied:
        BIAS: gl.constexpr = scores.bias.dtype.element_ty
        size: gl.constexpr = [variant.stages, TILE_M, KEYS]
        bias_memory = gl.allocate_shared_memory(BIAS, size, tile_layout(KEYS))
    bufs = Buffers(
        gl.allocate_shared_memory(DTYPE, [variant.stages, TILE_M, D], tile_layout(D)),
        gl.allocate_shared_memory(DTYPE, [variant.stages, TILE_M, DV], tile_layout(DV)),
        gl.allocate_shared_memory(DTYPE, [KEYS, D], tile_layout(D)),
        gl.allocate_shared_memory(DTYPE, [KEYS, DV], tile_layout(DV)),
        gl.allocate_shared_memory(DTYPE, [KEYS, TILE_M], tile_layout(TILE_M)),
        gl.allocate_shared_memory(DTYPE, [KEYS, TILE_M], tile_layout(TILE_M)),
        gl.allocate_shared_memory(gl.float32, [variant.stages, TILE_M], LINE),
        gl.allocate_shared_memory(gl.float32, [variant.stages, TILE_M], LINE),
        bias_memory,
    )
    heads = Heads(q, do, q_strides, do_strides, lse_log2, delta, dq_sum, semaphores, width, v_width)
    b = work.b
    if variant.packed:
        b = work.b * 0
    key_head = work.head // heads_per_key
    begin = 0
    if variant.left:
        begin = first_key_seen(work.length_q, work.length_k, window_left)
    key_rows = rows_of(k, b, work.start_k, key_head, k_strides, begin, work.length_k, width)
    value_rows = rows_of(v, b, work.start_k, key_head, v_strides, begin, work.length_k, v_width)
    until = (work.end - work.begin) * group_size
    copy_rows(key_rows, work.first_key, bufs.k, None, WARPS, True, grids.padded)
    copy_rows(value_rows, work.first_key, bufs.v, None, WARPS, True, grids.padded)
    zero = until * 0
    _copy(zero, until, work, shape, scores, places, heads, bufs, variant, grids)
    SCORES: gl.constexpr = sum_layout(grids.scores[0], grids.scores[1])
    keys = work.first_key + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    dk = gl.zeros([KEYS, D], gl.float32, sum_layout(grids.keys[0], grids.keys[1]))
    dv = gl.zeros([KEYS, DV], gl.float32, sum_layout(grids.keys[0], grids.keys[1]))
    MASKS: gl.constexpr = (
        variant.left or variant.right or variant.tail or variant.packed or variant.mask
    )
    owed = zero - 1
    masked = zero
    if MASKS:
        masked = masked_steps(work) * group_size
        for step in range(zero, masked):
            dk, dv, owed = _step(
                dk,
                dv,
                owed,
                step,
                until,
                keys,
                work,
                shape,
                scores,
                places,
                heads,
                bufs,
                variant,
                grids,
                True,
            )
    for step in range(masked, until):
        dk, dv, owed = _step(
            dk,
            dv,
            owed,
            step,
            until,
            keys,
            work,
            shape,
            scores,
            places,
            heads,
            bufs,
            variant,
            grids,
            False,
        )
    async_copy.wait_group(0)  # of a tile of keys that no query sees; its memory is used again
    if variant.ordered:
        _end_turn(owed, heads)
    dk = dk * scores.scale
    if variant.dropout:
        dv = dv * scores.keep_scale
    _store(dk, dk_ptr, dk_strides, width, work, shape, variant, grids)
    _store(dv, dv_ptr, dv_strides, v_width, work, shape, variant, grids)
