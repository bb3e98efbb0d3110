"""Paged attention of short runs over caches of 8 and 4 bits on Hopper: TMA by the block, mma.sync.

What: o = softmax(s) v and lse of at most 16 rows (new tokens x heads of a group) of a sequence.
Grid: (pairs * Hk / 4,), heads fastest; a pair is a sequence and a split of its keys, read from a
plan.
One CTA: of four heads, which lie one behind another in memory, a warp brings tiles of keys into a
ring, by few TMA copies a cache block of whole lines, for four warps. Each of them has a head:
nothing is exchanged.
Traffic: K, V and their scales once; q once a split; partials as in `triton.paged.decode`.
Numerics: products in float16, to which keys and values are widened exactly. Rows of q are scaled
by powers of two, so that they fit; scales of keys multiply logits. A value's scale, over the
largest so far, multiplies its probability, which is then rounded to float16. m, l, acc float32;
exponentials in base 2. Of 4 bits codes are multiplied without their zeros: a key's zero times the
sum of q is taken from its logit, and the sum of probabilities times zeros from the sums of values.
Queries are rotated first, and sums back.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, mma_v2

from tilewise.kernels import early
from tilewise.kernels.gluon.device.barriers import barriers, release_loaded
from tilewise.kernels.gluon.device.byte_operands import (
    E4M3,
    HEADS,
    LINE,
    by_heads,
    key_bytes_layout,
    key_order,
    keys_operand,
    lines_of,
    probabilities_operand,
    scales_layout,
    sum_layout,
    value_bytes_layout,
    value_order,
    value_pairs,
    values_operand,
    word_order,
)
from tilewise.kernels.gluon.device.compat import partition_barrier, reinterpret, tma_load
from tilewise.kernels.gluon.device.early import await_previous, begin_next
from tilewise.kernels.gluon.device.nibble_operands import (
    INT4,
    SCALE,
    divide_odd,
    nibble_key_order,
    nibble_keys_layout,
    nibble_keys_operand,
    nibble_value_pairs,
    nibble_values_layout,
    nibble_values_operand,
    rotate,
)
from tilewise.kernels.gluon.device.warpgroup import LN2, LOG2E, exp2, reciprocal
from tilewise.kernels.gluon.visible import first_key_of_run, full_keys_of_run, inside_window, key_at

ROWS = gl.constexpr(16)  # of a head's queries at most: two products of 8 columns
FIELDS = gl.constexpr(8)  # of a pair's record in the plan
_FIRST = gl.constexpr(early.FIRST)
LOWEST = gl.constexpr(-1.7014118346046923e38)  # -2**127: m of a row without a key, safe to scale


class Shape(NamedTuple):
    """Constexpr: the sizes and features of a call that change the kernel's code: heads, rows,
    channels, block size, kind of cache, splits; `plan` makes it."""

    num_kv_heads: int
    group: int
    rows: int  # 8 or 16: new tokens x group, padded
    width: int  # channels, 64 or 128; of 4 bits also 256
    row: int  # bytes of a key
    keys: int  # of a tile: 16 to 64
    block: int  # tokens of a cache block
    box: int  # tokens of one copy: those of a block, at most those of a tile
    stages: int
    kind: int  # INT8, E4M3 or INT4
    slot_scales: bool  # a scale for every token and head; else one for every head
    window: bool
    sinks: bool
    alone: bool  # no sequence has a second split
    merges: bool = False  # the last split of a sequence to end merges them all
    early: int = 0  # mode of `kernels.early`
    loader_registers: int = 24
    log: int = 0  # of 4 bits, log2 of the channels that are rotated together
    in_words: bool = False  # True if keys are multiplied in `word_order`


class Ring(NamedTuple):
    """Shared memory: tiles of keys and values, box by box, and barriers that open when filled."""

    k: object
    v: object
    k_scale: object
    v_scale: object
    full: object
    empty: object


@gluon.jit
def _allocate(k, v, shape: gl.constexpr):
    boxes: gl.constexpr = shape.stages * lines_of(shape.row) * (shape.keys // shape.box)
    k_ring = gl.allocate_shared_memory(k.dtype, [boxes, 1, shape.box, LINE], k.layout)
    v_ring = gl.allocate_shared_memory(v.dtype, [boxes, 1, shape.box, LINE], v.layout)
    k_scales = k_ring
    v_scales = v_ring
    if shape.slot_scales:
        rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        k_scales = gl.allocate_shared_memory(gl.float32, [shape.stages, shape.keys, HEADS], rows)
        v_scales = gl.allocate_shared_memory(gl.float32, [shape.stages, shape.keys, HEADS], rows)
    # Each lane of the loading warp tells when its copies of scales have come.
    full = barriers(shape.stages, 33 if shape.slot_scales else 1)
    return Ring(k_ring, v_ring, k_scales, v_scales, full, barriers(shape.stages, 1))


@gluon.jit
def _load_tile(k, v, ring, table, tile, stage, parity, group, low, high, shape: gl.constexpr):
    """Wait until a stage of the ring is free, and start the copies of a tile's keys and values of a
    group of heads to it.

    Columns of the table outside low ... high - 1 are not read.
    """
    boxes: gl.constexpr = shape.keys // shape.box
    lines: gl.constexpr = lines_of(shape.row)
    full = ring.full.index(stage)
    # All ids come at once, while the stage is waited for.
    blocks = ()
    for i in gl.static_range(boxes):
        # A tile that reaches past the sequence takes a block of it once more; it is masked.
        key = tile * shape.keys + i * shape.box
        column = gl.minimum(gl.maximum(key // shape.block, low), high - 1)
        blocks = blocks + (gl.load(table + column),)  # noqa: RUF005
    mbarrier.wait(ring.empty.index(stage), parity)
    mbarrier.expect(full, 2 * shape.keys * lines * LINE)
    for i in gl.static_range(boxes):
        slot = (tile * shape.keys + i * shape.box) % shape.block
        for line in gl.static_range(lines):
            place = (stage * lines + line) * boxes + i
            at = (group * lines + line) * LINE
            tma_load(k, [blocks[i], slot, at], full, ring.k.index(place))
            tma_load(v, [blocks[i], slot, at], full, ring.v.index(place))


@gluon.jit
def _load_scales(scales, ring, table, tile, stage, group, low, high, shape: gl.constexpr):
    """Start the copies of the scales of a tile's keys and values to a stage that `_load_tile` has
    found free."""
    LANES: gl.constexpr = gl.BlockedLayout([1, HEADS], [32, 1], [1, 1], [1, 0])
    k_scale, stride_kb, stride_kp, v_scale, stride_vb, stride_vp, num_blocks = scales
    key = tile * shape.keys + gl.arange(0, shape.keys, gl.SliceLayout(1, LANES))
    column = gl.minimum(gl.maximum(key // shape.block, low), high - 1)
    # An id of no block becomes that of the last one; a copy of it by TMA brings zeros.
    block = gl.load(table + column).to(gl.uint32, bitcast=True)
    block = gl.minimum(block, (num_blocks - 1).to(gl.uint32)).to(gl.int64)
    slot = key % shape.block
    head = gl.expand_dims(gl.arange(0, HEADS, gl.SliceLayout(0, LANES)), 0)
    # Strides are multiples of four: it is said so, for a copy of 16 bytes a lane.
    k_at = (block * (stride_kb // HEADS) + slot * (stride_kp // HEADS) + group) * HEADS
    v_at = (block * (stride_vb // HEADS) + slot * (stride_vp // HEADS) + group) * HEADS
    k_at = k_scale + (gl.expand_dims(k_at, 1) + head)
    v_at = v_scale + (gl.expand_dims(v_at, 1) + head)
    async_copy.async_copy_global_to_shared(ring.k_scale.index(stage), k_at)
    async_copy.async_copy_global_to_shared(ring.v_scale.index(stage), v_at)
    async_copy.mbarrier_arrive(ring.full.index(stage), increment_count=False)


@gluon.constexpr_function
def _tile_layout():
    """Return the layout in shared memory of a tile (n, LINE) of bytes that all boxes of a stage
    make together."""
    return gl.NVMMASharedLayout(swizzle_byte_width=LINE.value, element_bitwidth=8, rank=2)


@gluon.jit
def _scales_of(scales, shape: gl.constexpr):
    """Return the scales (heads, keys) of a tile in registers, as the rows of sums want them."""
    mine = scales.load(scales_layout(shape.keys)).permute((1, 0))
    return gl.convert_layout(mine, gl.SliceLayout(2, sum_layout()), assert_trivial=True)


@gluon.jit
def queries_operand(q, start, run, group, stride_t, stride_h, shape: gl.constexpr):
    """Return q^T of the rows of a group of key heads as the right operand of products.

    Args:
        start, run: the first row of the sequence and its number of rows.
        group: the group of key heads.
        stride_t, stride_h: the strides of tokens and heads.

    Returns:
        q^T (HEADS, width, rows) with channels in the order of keys; the power of two by which each
            row (HEADS, rows) was divided, to fit float16; for 4 bits the sum of each row.
    """
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    MMA: gl.constexpr = sum_layout()
    R: gl.constexpr = shape.rows
    W: gl.constexpr = shape.width
    token, q_head = place_of(gl.arange(0, HEADS * R, gl.SliceLayout(1, BLOCKED)), group, shape)
    channel = gl.arange(0, W, gl.SliceLayout(0, BLOCKED))
    at = (start + token).to(gl.int64) * stride_t + q_head * stride_h
    inside = gl.expand_dims(token < run, 1)
    place = q + gl.expand_dims(at, 1) + gl.expand_dims(channel, 0)
    x = gl.load(place, mask=inside, other=0.0).to(gl.float32)
    if shape.kind == INT4:
        x = rotate(x, shape.log, False)
    largest = gl.max(gl.abs(x), 1)
    bits = largest.to(gl.int32, bitcast=True) & 0x7F800000
    power = gl.maximum(bits, 0x00800000).to(gl.float32, bitcast=True)
    x = (x / gl.expand_dims(power, 1)).to(gl.float16)
    total = power
    if shape.kind == INT4:
        total = gl.sum(x.to(gl.float32), 1)
        x = nibble_key_order(divide_odd(x))
    elif shape.in_words:
        x = word_order(x)
    else:
        x = key_order(x)
    x = x.reshape([HEADS, R, W]).permute((0, 2, 1))
    return (
        gl.convert_layout(x, gl.DotOperandLayout(1, MMA, 2)),
        gl.convert_layout(power.reshape([HEADS, R]), gl.SliceLayout(1, MMA)),
        gl.convert_layout(total.reshape([HEADS, R]), gl.SliceLayout(1, MMA)),
    )


@gluon.jit
def place_of(row, group, shape: gl.constexpr):
    """Return, for `row` numbers of a group's tile (all rows of its first head, then of the next),
    the token in its run and the query head.

    A row of padding has a token that no run has.
    """
    G: gl.constexpr = shape.group
    own = row % shape.rows
    head = group * HEADS + row // shape.rows
    return own // G, head * G + own % G


@gluon.jit
def _zeros_of(scales):
    """Return the zeros that the last bits of a 4-bit cache's scales hold, as float32."""
    return (scales.to(gl.int32, bitcast=True) & 15).to(gl.float32)


@gluon.jit
def _load_tiles(given, shape: gl.constexpr):
    """Run the loader warp: bring the tiles of this CTA's items (a pair and a group of heads each)
    into the ring."""
    k, v, ring, plan, block_table, stride_table, window_left, scales, num_pairs = given
    groups: gl.constexpr = shape.num_kv_heads // HEADS
    if shape.early:
        # The newest keys and values are written by the kernel before.
        await_previous(1)
    before = 0  # tiles of earlier items
    for item in range(gl.program_id(0), num_pairs * groups, gl.num_programs(0)):
        group = item % groups
        record = plan + item // groups * FIELDS
        seq = gl.load(record)
        run = gl.load(record + 2)
        seqlen_k = gl.load(record + 3)
        first = gl.load(record + 4)
        last = gl.load(record + 5)
        table = block_table + seq.to(gl.int64) * stride_table
        low = first_key_of_run(seqlen_k, run, window_left, shape) // shape.block
        high = gl.maximum((seqlen_k + shape.block - 1) // shape.block, low + 1)
        for tile in range(first, last):
            step = before + (tile - first)
            stage = step % shape.stages
            parity = (step // shape.stages & 1) ^ 1
            _load_tile(k, v, ring, table, tile, stage, parity, group, low, high, shape)
            if shape.slot_scales:
                _load_scales(scales, ring, table, tile, stage, group, low, high, shape)
        before += last - first


@gluon.jit
def _fold_tiles(given, num_pairs, shape: gl.constexpr):
    """Run the four warps that compute: attend over the tiles of this CTA's items (a pair and a
    group of heads each)."""
    groups: gl.constexpr = shape.num_kv_heads // HEADS
    if shape.early:
        await_previous(4)
        if shape.early != _FIRST:
            begin_next(4)
    before = 0  # tiles of earlier items
    for item in range(gl.program_id(0), num_pairs * groups, gl.num_programs(0)):
        before += _fold_pair(given, num_pairs, item // groups, item % groups, before, shape)


@gluon.jit
def _fold_pair(given, num_pairs, pair, group, before, shape: gl.constexpr):
    """Attend over the tiles of a (sequence, split) pair for a group of key heads, store o and lse
    or a part of them, and return the number of tiles.

    With shape.merges the last split of a sequence to end merges its parts.

    Args:
        given: the kernel's arguments.
        num_pairs, pair, group: the number of pairs, this pair and the group of key heads.
        before: the number of tiles before, which decides the stage of the ring.
    """
    (
        q,
        stride_qt,
        stride_qh,
        scale_log2,
        window_left,
        k_scale,
        v_scale,
        sinks,
        o,
        lse,
        part_o,
        part_lse,
        bounds,
        plan,
        cu_seqlens_q,
        num_seqs,
        num_tokens,
        max_run,
        ring,
    ) = given
    MMA: gl.constexpr = sum_layout()
    W: gl.constexpr = shape.width
    R: gl.constexpr = shape.rows
    N: gl.constexpr = shape.keys
    rows: gl.constexpr = gl.SliceLayout(1, MMA)  # (HEADS, R): head, row
    keys: gl.constexpr = gl.SliceLayout(2, MMA)  # (HEADS, N): head, key
    heads: gl.constexpr = gl.SliceLayout(1, keys)  # (HEADS,)
    sizes: gl.constexpr = [shape.stages, lines_of(shape.row) * N, LINE]
    is_codes: gl.constexpr = shape.kind == INT4
    record = plan + pair * FIELDS
    seq = gl.load(record)
    start = gl.load(record + 1)
    run = gl.load(record + 2)
    seqlen_k = gl.load(record + 3)
    first = gl.load(record + 4)
    last = gl.load(record + 5)
    first_pair = gl.load(record + 6)
    num_splits = gl.load(record + 7)
    used = gl.minimum(gl.maximum(gl.load(cu_seqlens_q + num_seqs), 0), num_tokens)
    clear_rows(o, lse, used + pair, num_pairs, num_tokens, group, shape)
    operand, power, q_sums = queries_operand(q, start, run, group, stride_qt, stride_qh, shape)
    row_scale = gl.expand_dims(power * scale_log2, 1)
    of_heads = group * HEADS + gl.arange(0, HEADS, heads)
    if not shape.slot_scales:
        of_keys = gl.load(k_scale + of_heads)
        row_scale = row_scale * gl.expand_dims(gl.expand_dims(of_keys, 1), 2)
    key_lo = first_key_of_run(seqlen_k, run, window_left, shape)
    within = gl.expand_dims(gl.arange(0, N, gl.SliceLayout(0, keys)), 0)
    row = gl.expand_dims(gl.arange(0, R, gl.SliceLayout(0, rows)), 0)
    last_key = gl.expand_dims(key_at(row // shape.group, run, seqlen_k), 1)  # that each row sees
    acc = gl.zeros([HEADS, W, R], gl.float32, MMA)
    sums = gl.zeros([HEADS, N, R], gl.float32, MMA)  # of p, by the lane that made it
    m = gl.full([HEADS, R], LOWEST, gl.float32, rows)
    unit = gl.full([HEADS], 0.0, gl.float32, heads)  # the largest scale of a value so far
    zero_sums = sums  # of what multiplies values, times their zeros, likewise
    q_sums = gl.expand_dims(q_sums, 1)
    if is_codes:  # products are of 2^-24 of a code
        row_scale = row_scale * SCALE
        q_sums = q_sums * (-1.0 / SCALE)
    k_tiles = reinterpret(ring.k, gl.int8, sizes, _tile_layout())
    v_tiles = reinterpret(ring.v, gl.int8, sizes, _tile_layout())
    for tile in range(first, last):
        step = before + (tile - first)
        stage = step % shape.stages
        mbarrier.wait(ring.full.index(stage), step // shape.stages & 1)
        if is_codes:
            key_bytes = k_tiles.index(stage).load(nibble_keys_layout(N, W))
            value_bytes = v_tiles.index(stage).load(nibble_values_layout(N, W))
        else:
            key_bytes = k_tiles.index(stage).load(key_bytes_layout(N, W))
            value_bytes = v_tiles.index(stage).load(value_bytes_layout(N, W))
        if shape.slot_scales:
            k_scales = _scales_of(ring.k_scale.index(stage), shape)
            v_scales = _scales_of(ring.v_scale.index(stage), shape)
        release_loaded(ring.empty.index(stage))
        key_bytes = by_heads(key_bytes, shape.row)
        value_bytes = by_heads(value_bytes, shape.row)
        if is_codes:
            s = gl.expand_dims(_zeros_of(k_scales), 2) * q_sums
            s = mma_v2(nibble_keys_operand(key_bytes), operand, s) * row_scale
        else:
            zeros = gl.zeros([HEADS, N, R], gl.float32, MMA)
            s = mma_v2(keys_operand(key_bytes, shape.kind), operand, zeros) * row_scale
            pairs = value_pairs(value_bytes, shape.kind)
        if shape.slot_scales:
            s = s * gl.expand_dims(k_scales, 2)
        low_edge, high_edge = full_keys_of_run(key_lo, seqlen_k, run, shape)
        first_key = tile * shape.keys
        if (first_key < low_edge) | (first_key + shape.keys > high_edge):
            key = first_key + within
            owned = (key >= key_lo) & (key < seqlen_k)
            place = gl.expand_dims(key, 2)
            visible = gl.expand_dims(owned, 2) & (place <= last_key)
            if shape.window:
                visible = visible & inside_window(place, last_key, window_left)
            s = gl.where(visible, s, float("-inf"))
            # Slots without an owner may be NaN, and 0 * NaN is NaN.
            if shape.slot_scales:
                v_scales = gl.where(owned, v_scales, 0.0)
            if shape.kind == E4M3:
                pairs = _keep_pairs(pairs, first_key, key_lo, seqlen_k)
        m_new = gl.maximum(m, gl.max(s, 1))
        alpha = gl.expand_dims(exp2(m - m_new), 1)
        m = m_new
        p = exp2(s - gl.expand_dims(m, 1))
        sums = sums * alpha + p
        if shape.slot_scales:
            unit_new = gl.maximum(unit, gl.max(v_scales, 1))
            inverse = gl.where(unit_new > 0.0, reciprocal(unit_new), 0.0)
            ratio = gl.convert_layout(unit * inverse, gl.SliceLayout(1, rows))
            alpha = alpha * gl.expand_dims(gl.expand_dims(ratio, 1), 1)
            p = p * gl.expand_dims(v_scales * gl.expand_dims(inverse, 1), 2)
            unit = unit_new
        if is_codes:
            exact = p.to(gl.float16).to(gl.float32)  # as the product takes it
            zero_sums = zero_sums * alpha + exact * gl.expand_dims(_zeros_of(v_scales), 2)
            pairs, more_pairs = nibble_value_pairs(value_bytes)
            values = nibble_values_operand(pairs, more_pairs)
        else:
            values = values_operand(pairs)
        acc = mma_v2(values, probabilities_operand(p), acc * alpha)
    if num_splits > 0:
        l = gl.sum(sums, 1)
        if shape.slot_scales:
            acc = acc * gl.expand_dims(gl.expand_dims(unit, 1), 2)
        else:
            of_values = gl.load(v_scale + of_heads)
            acc = acc * gl.expand_dims(gl.expand_dims(of_values, 1), 2)
        missing = l
        if is_codes:
            of_rows = gl.convert_layout(unit, gl.SliceLayout(1, rows))
            missing = gl.sum(zero_sums, 1) * gl.expand_dims(of_rows, 1)
        if not (shape.alone or shape.merges) and (pair == first_pair) & (group == 0):
            gl.store(bounds + 2 * seq, first_pair)
            gl.store(bounds + 2 * seq + 1, num_splits)
        finish_rows(
            value_order(acc),
            missing.reshape([HEADS * R]),
            l.reshape([HEADS * R]),
            m.reshape([HEADS * R]),
            sinks,
            o,
            lse,
            part_o,
            part_lse,
            pair,
            first_pair,
            num_splits,
            start,
            run,
            group,
            num_tokens,
            max_run,
            shape,
        )
        if shape.merges and num_splits > 1:
            counter = plan + num_pairs * FIELDS + (seq * (shape.num_kv_heads // HEADS) + group)
            partition_barrier()  # all warps have stored their parts before one tells of them
            if gl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                gl.atomic_xchg(counter, 0)
                _merge(
                    o,
                    lse,
                    part_o,
                    part_lse,
                    first_pair,
                    num_splits,
                    start,
                    run,
                    group,
                    num_tokens,
                    max_run,
                    shape,
                )
    return last - first


@gluon.jit(
    do_not_specialize=[
        "stride_qt",
        "stride_qh",
        "stride_table",
        "stride_ksb",
        "stride_ksp",
        "stride_vsb",
        "stride_vsp",
        "num_seqs",
        "num_tokens",
        "num_blocks",
        "max_run",
        "num_pairs",
        "window_left",
    ]
)
def paged_decode_kernel(
    q,
    k,
    v,
    k_scale,
    v_scale,
    sinks,
    o,
    lse,
    part_o,
    part_lse,
    bounds,
    plan,
    block_table,
    cu_seqlens_q,
    stride_qt,
    stride_qh,
    stride_table,
    stride_ksb,
    stride_ksp,
    stride_vsb,
    stride_vsp,
    num_seqs,
    num_tokens,
    num_blocks,
    max_run,
    num_pairs,
    window_left,
    scale_log2,
    shape: gl.constexpr,
):
    """Compute o and lse of short runs of queries over a paged cache of 8 or 4 bits; each item is a
    split of a sequence's keys and four key heads. With several splits parts are written, which this
    kernel (shape.merges) or another one merges. See the module's docstring.

    k, v: descriptors; plan: (pairs, FIELDS) int32 of `triton.paged.splits`; k_scale, v_scale: of
    tokens and heads, or (Hk,). o (T, Hq, D) and lse (Hq, T) are contiguous.
    """
    if shape.early == _FIRST:
        begin_next(4)
    ring = _allocate(k, v, shape)
    scales = (
        k_scale,
        stride_ksb,
        stride_ksp,
        v_scale,
        stride_vsb,
        stride_vsp,
        num_blocks,
    )
    loads = (k, v, ring, plan, block_table, stride_table, window_left, scales, num_pairs)
    folds = (
        q,
        stride_qt,
        stride_qh,
        scale_log2,
        window_left,
        k_scale,
        v_scale,
        sinks,
        o,
        lse,
        part_o,
        part_lse,
        bounds,
        plan,
        cu_seqlens_q,
        num_seqs,
        num_tokens,
        max_run,
        ring,
    )
    gl.warp_specialize(
        [(_fold_tiles, (folds, num_pairs, shape)), (_load_tiles, (loads, shape))],
        [1],
        [shape.loader_registers],
    )


@gluon.jit
def _keep_pairs(pairs, first_key, low, high):
    """Return the pairs of `value_pairs` with values of keys outside low ... high - 1 set to 0; the
    tile's keys begin at `first_key`."""
    HALF: gl.constexpr = pairs.shape[0] // HEADS
    at = gl.arange(0, HEADS * HALF, gl.SliceLayout(1, pairs.type.layout)) % HALF * 2 + first_key
    even = gl.where((at >= low) & (at < high), 0x0000FFFF, 0)
    odd = gl.where((at + 1 >= low) & (at + 1 < high), -65536, 0)
    return pairs & gl.expand_dims(even | odd, 1)


@gluon.jit
def finish_rows(
    total,
    missing,
    l,
    m,
    sinks,
    o,
    lse,
    part_o,
    part_lse,
    pair,
    first_pair,
    num_splits,
    start,
    run,
    group,
    num_tokens,
    max_run,
    shape: gl.constexpr,
):
    """Divide sums `total` (rows, width) by l (rows,), compute lse, and store both: as the result if
    there is one split, else as the part of this pair.

    missing: (rows,), of 4 bits what the sums hold too much.
    """
    G: gl.constexpr = shape.group
    heads: gl.constexpr = shape.num_kv_heads * G
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, BLOCKED)
    total = gl.convert_layout(total, BLOCKED)
    if shape.kind == INT4:
        missing = gl.convert_layout(missing, by_row)
        total = divide_odd(total) * SCALE - gl.expand_dims(missing, 1)
        total = rotate(total, shape.log, True)
    l = gl.convert_layout(l, by_row)
    m = gl.convert_layout(m, by_row)
    row = gl.arange(0, HEADS * shape.rows, by_row)
    token, q_head = place_of(row, group, shape)
    inside = token < run
    unseen = l == 0.0
    if shape.sinks:
        sink = gl.load(sinks + q_head, mask=inside, other=0.0) * LOG2E
        sink = gl.where(pair == first_pair, sink, float("-inf"))
        m_new = gl.maximum(m, sink)
        weight = exp2(m - m_new)
        l = l * weight + exp2(sink - m_new)
        total = total * gl.expand_dims(weight, 1)
        m = m_new
        unseen = l == 0.0
    l = gl.where(unseen, 1.0, l)
    total = total / gl.expand_dims(l, 1)
    value = gl.where(unseen, float("-inf"), (m + gl.log2(l)) * LN2)
    channel = gl.expand_dims(gl.arange(0, shape.width, gl.SliceLayout(0, BLOCKED)), 0)
    mask = gl.expand_dims(inside, 1)
    if num_splits == 1:
        at = (start + token).to(gl.int64) * heads + q_head
        at = at * shape.width
        gl.store(o + gl.expand_dims(at, 1) + channel, total.to(o.dtype.element_ty), mask=mask)
        gl.store(lse + q_head.to(gl.int64) * num_tokens + start + token, value, mask=inside)
    else:
        part = part_of(pair, row, group, max_run, shape)
        gl.store(part_o + gl.expand_dims(part * shape.width, 1) + channel, total, mask=mask)
        gl.store(part_lse + part, value, mask=inside)


@gluon.jit
def part_of(pair, row, group, max_run, shape: gl.constexpr):
    """Return where the part of each row lies: its index in part_lse, and of its vector in part_o.

    pair: the number of a sequence's split in the plan; group: the number of the group of HEADS key
    heads; row: numbers of rows in the group's tile, as in `place_of`; max_run: the most new tokens
    of a sequence.
    """
    head = group * HEADS + row // shape.rows
    first = (pair.to(gl.int64) * shape.num_kv_heads + head) * (max_run * shape.group)
    return first + row % shape.rows


@gluon.jit
def _merge(
    o,
    lse,
    part_o,
    part_lse,
    first_pair,
    num_splits,
    start,
    run,
    group,
    num_tokens,
    max_run,
    shape: gl.constexpr,
):
    """Merge the parts of a sequence's splits, in their order, and write its rows of o and lse for a
    group of HEADS key heads. Rows that see no key get o = 0 and lse = -inf.

    first_pair, num_splits: the number of the sequence's first split in the plan, and how many it
    has; start, run: its first row in o, and its new tokens; group: the number of the group;
    num_tokens: all rows of o; max_run: the most new tokens of a sequence.
    """
    R: gl.constexpr = HEADS * shape.rows
    W: gl.constexpr = shape.width
    heads: gl.constexpr = shape.num_kv_heads * shape.group
    BLOCKED: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, BLOCKED)
    row = gl.arange(0, R, by_row)
    token, q_head = place_of(row, group, shape)
    inside = token < run
    mask = gl.expand_dims(inside, 1)
    channel = gl.expand_dims(gl.arange(0, W, gl.SliceLayout(0, BLOCKED)), 0)
    acc = gl.zeros([R, W], gl.float32, BLOCKED)
    l = gl.zeros([R], gl.float32, by_row)
    m = gl.full([R], LOWEST, gl.float32, by_row)
    for split in range(num_splits):
        # From L2, where the other CTAs have left them.
        part = part_of(first_pair + split, row, group, max_run, shape)
        value = gl.load(part_lse + part, mask=inside, other=float("-inf"), cache_modifier=".cg")
        at = part_o + gl.expand_dims(part * W, 1) + channel
        total = gl.load(at, mask=mask, other=0.0, cache_modifier=".cg")
        m_new = gl.maximum(m, value)
        alpha = exp2((m - m_new) * LOG2E)
        weight = exp2((value - m_new) * LOG2E)
        acc = acc * gl.expand_dims(alpha, 1) + total * gl.expand_dims(weight, 1)
        l = l * alpha + weight
        m = m_new
    unseen = l == 0.0
    l = gl.where(unseen, 1.0, l)
    value = gl.where(unseen, float("-inf"), m + gl.log2(l) * LN2)
    acc = acc / gl.expand_dims(l, 1)
    at = ((start + token).to(gl.int64) * heads + q_head) * W
    gl.store(o + gl.expand_dims(at, 1) + channel, acc.to(o.dtype.element_ty), mask=mask)
    gl.store(lse + q_head.to(gl.int64) * num_tokens + start + token, value, mask=inside)


@gluon.jit
def clear_rows(o, lse, first, step, num_tokens, group, shape: gl.constexpr):
    """Write o = 0 and lse = -inf for the heads of a group to rows of no sequence: row `first`, and
    every `step`-th after it."""
    of_group: gl.constexpr = HEADS * shape.group
    heads: gl.constexpr = shape.num_kv_heads * shape.group
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 128, LANES)
    count: gl.constexpr = of_group * shape.width
    for token in range(first, num_tokens, step):
        row = token.to(gl.int64) * heads + group * of_group
        for base in range(0, count, 128):
            channel = base + lane
            zeros = gl.full([128], 0.0, o.dtype.element_ty, LANES)
            gl.store(o + row * shape.width + channel, zeros, mask=channel < count)
        at = lse + (group * of_group + lane).to(gl.int64) * num_tokens + token
        gl.store(at, gl.full([128], float("-inf"), gl.float32, LANES), mask=lane < of_group)
