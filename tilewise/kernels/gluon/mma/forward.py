"""Forward pass of attention by mma.sync and cp.async: Ampere, Ada and consumer Blackwell.

What: o = softmax(s) v and lse, with s = softmax_scale * q k^T, capped, biased, masked, dropped.
Grid: one CTA for each tile of `tile.rows` queries of a head, from much to little work.
One CTA: four or eight warps, each of 16 rows of one or two parts: a warp multiplies what it loads
      of keys and values with all its rows.
Traffic: q is read and o, lse are written once; k and v once per query tile (mostly from L2); a bias
      once, to shared memory beside the keys where its rows lie so (`tile.bias_stages`).
Numerics: products in the input type with float32 sums; m, l, acc float32; exponentials in base 2.
Rows that see nothing give o = 0, lse = -inf.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mma_v2

from tilewise.kernels.gluon.device.dropout import draw_of, drop_pairs
from tilewise.kernels.gluon.device.logits import (
    Extras,
    factor_log2,
    head_of,
)
from tilewise.kernels.gluon.device.warpgroup import LN2, pack, scale_rows, unpack
from tilewise.kernels.gluon.device.warpgroup import sum_layout as shared_layout
from tilewise.kernels.gluon.forward.scheduler import Work, rows_of_tile
from tilewise.kernels.gluon.forward.softmax import finish, partial_sums
from tilewise.kernels.gluon.forward.span import Mask, block_of_step, walk_of
from tilewise.kernels.gluon.forward.step import Task, gather, soften
from tilewise.kernels.gluon.mma.operands import (
    CHUNK,
    UNIT,
    Rows,
    copy_layout,
    copy_rows,
    left_layout,
    right_layout,
    rows_of,
    sum_layout,
    tile_layout,
)


class Tile(NamedTuple):
    """Constexpr: how a CTA of the forward pass by mma.sync is cut: warps, rows, keys, stages,
    channels; every combination gives the same results but for rounding."""

    warps: int  # 4 or 8, each of 16 rows of a part
    parts: int  # of the rows: what a warp loads of keys is multiplied with 1 or 2
    rows: int  # 16 * warps * parts
    keys: int  # of a block
    stages: int  # blocks of keys and of values in shared memory
    d: int  # channels of q and k, padded with zeros
    channels: int  # that are multiplied: a multiple of 16
    dv: int  # channels of v and o, padded
    q_in_registers: bool
    padded: bool  # heads are narrower than d or dv
    dynamic: bool  # tiles go from much to little work
    warpgroups: int = 1  # as Hopper's tiles have it
    bias_stages: int = 0  # blocks of the bias in shared memory: as many as of keys, or none
    across: int = (
        1  # warps side by side over the columns of a sum; those over its rows are 1 / across
    )


class Shared(NamedTuple):
    """The shared memory of a CTA of the forward pass: q, rings of keys, values and a bias, and p
    where several warps share a row."""

    q: object  # (parts, rows of a part, d)
    k: object  # (stages, keys, d)
    v: object  # (stages, keys, dv)
    bias: object  # (stages, rows, keys), None where registers load it
    p: object  # (rows, keys), None where p stays in the registers of its warp


class Row(NamedTuple):
    """The sums of a part: one of the one or two shares of a CTA's query rows (`Tile.parts`)."""

    acc: object
    m: object
    l: object


# Numbers, not a tile: Triton 3.6 hands a constexpr function no names of a tuple's fields.
@gluon.constexpr_function
def _scores_layout(keys, warps, across):
    """Return the register layout in which scores (rows, keys) become probabilities: that of the
    sum, in Hopper's type of layout where a warp has whole rows."""
    if across == 1:
        return shared_layout(keys, warps)
    return sum_layout(warps // across, across)


@gluon.jit
def _scores(q, k, zero, tile: gl.constexpr):
    """Return q k^T of both parts of the query rows, (rows of a part, keys) each.

    zero: the sums at the start. With tile.parts 1 the second result is `zero`.
    """
    across = k.permute((1, 0))
    first = zero
    second = zero
    CHUNKS: gl.constexpr = tile.channels // CHUNK
    for chunk in gl.static_range(CHUNKS):
        b = across.slice(chunk * CHUNK, CHUNK).load(
            right_layout(tile.warps // tile.across, tile.across)
        )
        first = mma_v2(_left(q, 0, chunk, tile), b, first)
        if tile.parts == 2:
            second = mma_v2(_left(q, 1, chunk, tile), b, second)
    return first, second


@gluon.jit
def _left(q, part: gl.constexpr, chunk: gl.constexpr, tile: gl.constexpr):
    """Return a chunk of CHUNK channels of a part of the queries as a left operand, from registers
    or shared memory."""
    if tile.q_in_registers:
        return q[part * (tile.d // CHUNK) + chunk]
    else:
        return (
            q.index(part)
            .slice(chunk * CHUNK, CHUNK, dim=1)
            .load(left_layout(tile.warps // tile.across, tile.across))
        )


@gluon.jit
def _lefts(q, FIRST: gl.constexpr, COUNT: gl.constexpr, tile: gl.constexpr):
    """Return a tuple of COUNT (a power of two) left operands of the queries from the FIRST chunk
    on, the chunks of one part after those of the other."""
    if COUNT == 1:
        EACH: gl.constexpr = tile.d // CHUNK
        chunk = q.index(FIRST // EACH).slice(FIRST % EACH * CHUNK, CHUNK, dim=1)
        return (chunk.load(left_layout(tile.warps // tile.across, tile.across)),)
    else:
        HALF: gl.constexpr = COUNT // 2
        return _lefts(q, FIRST, HALF, tile) + _lefts(q, FIRST + HALF, HALF, tile)


@gluon.jit
def _halved(p):
    """Return the left and the right half of the columns of packed pairs p (rows, n)."""
    n: gl.constexpr = p.shape[1]
    return gl.split(p.reshape([p.shape[0], 2, n // 2]).permute((0, 2, 1)))


@gluon.jit
def _add_values(acc0, acc1, p0, p1, v, tile: gl.constexpr):
    """Return acc + p v of both parts of the query rows: new acc0 and acc1.

    Args:
        acc0, acc1: float32 sums (rows of a part, dv); with tile.parts 1 the second stays as it is.
        p0, p1: int32 (rows of a part, keys / 2): the probabilities of two neighbouring keys packed
            as a pair of 16-bit numbers.
        v: the values in shared memory, (keys, dv).
    """
    KEYS: gl.constexpr = 2 * p0.shape[1]
    if KEYS > 16:
        left0, right0 = _halved(p0)
        left1 = left0
        right1 = right0
        if tile.parts == 2:
            left1, right1 = _halved(p1)
        acc0, acc1 = _add_values(acc0, acc1, left0, left1, v.slice(0, KEYS // 2), tile)
        acc0, acc1 = _add_values(acc0, acc1, right0, right1, v.slice(KEYS // 2, KEYS // 2), tile)
    else:
        b = v.load(right_layout(tile.warps // tile.across, tile.across))
        acc0 = mma_v2(unpack(p0, v.dtype, left_layout(tile.warps)), b, acc0)
        if tile.parts == 2:
            acc1 = mma_v2(unpack(p1, v.dtype, left_layout(tile.warps)), b, acc1)
    return acc0, acc1


@gluon.jit
def _add_wide_values(acc, p, v, tile: gl.constexpr):
    """Return acc + p v; p (rows, keys) is in shared memory, written by all warps of a row."""
    CHUNKS: gl.constexpr = tile.keys // CHUNK
    for chunk in gl.static_range(CHUNKS):
        a = p.slice(chunk * CHUNK, CHUNK, dim=1).load(
            left_layout(tile.warps // tile.across, tile.across)
        )
        b = v.slice(chunk * CHUNK, CHUNK).load(right_layout(tile.warps // tile.across, tile.across))
        acc = mma_v2(a, b, acc)
    return acc


@gluon.jit
def _fold(
    s,
    row,
    task,
    index,
    PART: gl.constexpr,
    tile: gl.constexpr,
    variant: gl.constexpr,
    EDGE: gl.constexpr,
    BITS: gl.constexpr,
):
    """Return the probabilities p of a block of keys, and the `Row` of the PART with the block in.

    s: the products q k^T, float32 (rows of the part, keys). With tile.across 1 p is packed in pairs
    of 16-bit numbers, (rows, keys / 2); above 1 p is stored to shared memory, (rows, keys). The
    Row's sums of values are rescaled, but p v is not added yet.
    """
    S: gl.constexpr = _scores_layout(tile.keys, tile.warps, tile.across)
    s = gl.convert_layout(s, S, assert_trivial=True)
    block = gather(task, index, tile, variant, EDGE, BITS, s.shape[0])
    bias = block.bias
    if tile.bias_stages > 0:
        ROWS: gl.constexpr = s.shape[0]
        bias = task.shared.bias.index(index % tile.bias_stages).slice(PART * ROWS, ROWS).load(S)
    p, m, l, alpha = soften(s, row.m, row.l, block, bias, task, index, variant, EDGE, BITS)
    if tile.across > 1:
        task.shared.p.store(p.to(task.shared.v.dtype))
    else:
        p = pack(p, task.shared.v.dtype)
    if variant.dropout:
        p = drop_pairs(p, block.words)
    acc = row.acc
    if not variant.bounded:
        acc = scale_rows(acc, alpha)
    return p, Row(acc, m, l)


@gluon.jit
def _step(
    row0,
    row1,
    q,
    keys,
    values,
    bias,
    task0,
    task1,
    index,
    tile: gl.constexpr,
    variant: gl.constexpr,
    EDGE: gl.constexpr,
    BITS: gl.constexpr,
):
    """Return the Rows of both parts of the queries after one more block of keys, and start copies
    of later blocks; with tile.parts 1 the second is unused.

    Args:
        row0, row1: the sums of both parts.
        keys, values: the rings in shared memory.
        task0, task1: the `Task` of both parts.
        index: the number of the step.
        EDGE, BITS: whether keys may be hidden by the window or the end, and by a bit tile.
    """
    shared = task0.shared
    STAGES: gl.constexpr = tile.stages
    FIRST: gl.constexpr = STAGES == 1 and EDGE != "none"  # the first block may be cut at its end
    stage = index % STAGES
    async_copy.wait_group(2 * STAGES - 2)
    following = index + STAGES - 1
    _copy(values, None, following, shared.v, task0, FIRST, True, tile, variant)
    KEYS: gl.constexpr = tile.keys
    PART_ROWS: gl.constexpr = 16 * (tile.warps // tile.across)
    zero = gl.zeros(
        [PART_ROWS, KEYS], gl.float32, sum_layout(tile.warps // tile.across, tile.across)
    )
    s0, s1 = _scores(q, shared.k.index(stage), zero, tile)
    p0, row0 = _fold(s0, row0, task0, index, 0, tile, variant, EDGE, BITS)
    p1 = p0
    if tile.parts == 2:
        p1, row1 = _fold(s1, row1, task1, index, 1, tile, variant, EDGE, BITS)
    async_copy.wait_group(2 * STAGES - 2)
    _copy(keys, bias, index + STAGES, shared.k, task0, False, False, tile, variant)
    acc0 = row0.acc
    acc1 = row1.acc
    if tile.across > 1:
        acc0 = _add_wide_values(acc0, shared.p, shared.v.index(stage), tile)
    else:
        acc0, acc1 = _add_values(acc0, acc1, p0, p1, shared.v.index(stage), tile)
    return Row(acc0, row0.m, row0.l), Row(acc1, row1.m, row1.l)


@gluon.jit
def _copy(
    rows,
    bias,
    index,
    memory,
    task,
    FIRST: gl.constexpr,
    VALUES: gl.constexpr,
    tile: gl.constexpr,
    variant: gl.constexpr,
):
    """Start to copy the keys or the values of step `index` to `memory`, as one group of copies,
    which is empty if there is no such step.

    bias: the Rows of the bias, which come with the keys; None without any, or for values. FIRST: it
    may be the first step, whose block may have fewer keys.
    """
    MASK: gl.constexpr = variant.mask_keys > 0
    if index < task.walk.steps:
        block, number = block_of_step(task.walk, index, task.mask, tile, variant)
        first = block * tile.keys
        words = None
        if MASK and VALUES:
            WORDS: gl.constexpr = variant.mask_keys // 32
            word = task.mask.reach + number.to(gl.int64) * WORDS
            words = (word + first % variant.mask_keys // 32, number)
        masked: gl.constexpr = FIRST or variant.left or MASK
        copy_rows(
            rows, first, memory.index(index % tile.stages), words, tile.warps, masked, tile.padded
        )
        if bias is not None:
            width = bias.width - first // UNIT
            block_of_bias = Rows(bias.start + first, bias.stride, bias.begin, bias.end, width)
            to = task.shared.bias.index(index % tile.stages)
            copy_rows(block_of_bias, task.head.first_row, to, None, tile.warps, True, True)
    async_copy.commit_group()


@gluon.jit
def _store(row, task, rows, output, o_strides, o_width, tile: gl.constexpr, variant: gl.constexpr):
    """Finish and write o, lse and, with variant.maxima, the largest logits of a part of the
    rows."""
    o_ptr, lse_ptr, lse_batch, lse_head, maxima, sinks, keep_scale = output
    head = task.head
    sink = 0.0
    if variant.sinks:
        sink = gl.load(sinks + rows.h)
    lse, scale = finish(row.m, row.l, task.factor, sink, variant.factored, variant.sinks)
    PART_ROWS: gl.constexpr = 16 * (tile.warps // tile.across)
    at = head.first_row + gl.arange(0, PART_ROWS, lse.type.layout)
    place = rows.b.to(gl.int64) * lse_batch + rows.h.to(gl.int64) * lse_head + rows.first_q
    gl.store(lse_ptr + place + at, lse, mask=at < rows.length_q)
    if variant.maxima:
        most = row.m * LN2
        if variant.factored:
            most = most * task.factor
        gl.store(maxima + place + at, most, mask=at < rows.length_q)
    if variant.dropout:
        scale = scale * keep_scale
    o = scale_rows(row.acc, scale).to(o_ptr.dtype.element_ty)
    LAYOUT: gl.constexpr = copy_layout(tile.dv, tile.warps)
    o = gl.convert_layout(o, LAYOUT)
    at = head.first_row + gl.arange(0, PART_ROWS, gl.SliceLayout(1, LAYOUT))
    channel = gl.arange(0, tile.dv, gl.SliceLayout(0, LAYOUT))
    to = rows_of(o_ptr, rows.b, rows.first_q, rows.h, o_strides, 0, rows.length_q, o_width)
    start = to.start + head.first_row.to(gl.int64) * to.stride * UNIT
    within = gl.arange(0, PART_ROWS, gl.SliceLayout(1, LAYOUT))
    offset = gl.expand_dims(within * to.stride * UNIT, 1) + gl.expand_dims(channel, 0)
    inside = gl.expand_dims(at < rows.length_q, 1) & gl.expand_dims(channel < o_width * UNIT, 0)
    gl.store(start + offset, o, mask=inside)


@gluon.jit(
    do_not_specialize=[
        "num_tiles",
        "row_tiles",
        "num_heads",
        "heads_per_section",
        "num_q_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "window_left",
        "window_right",
        "lse_batch",
        "lse_head",
        "alibi_batch",
        "mask_batch",
        "mask_head",
        "drop_limit",
        "bias_batch",
        "bias_head",
        "bias_row",
        "bias_key",
        "width",
        "o_width",
    ]
)
def attention_fwd_kernel(
    q,
    k,
    v,
    o,
    lse,
    tensors,
    q_strides,
    k_strides,
    v_strides,
    o_strides,
    width,
    o_width,
    num_tiles,
    row_tiles,
    num_heads,
    heads_per_section,
    num_q_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    softmax_scale,
    softcap,
    drop_limit,
    keep_scale,
    lse_batch,
    lse_head,
    alibi_batch,
    mask_batch,
    mask_head,
    bias_batch,
    bias_head,
    bias_row,
    bias_key,
    tile: gl.constexpr,
    variant: gl.constexpr,
):
    """Compute o = softmax(s) v and lse of one tile of queries of a head by mma.sync, with s as
    `variant` says: capped, biased, masked, dropped; see the module's docstring.

    Strides, width and o_width (channels) are in units of 16 bytes.
    """
    number = gl.program_id(0)
    if variant.packed:
        row_tiles = gl.load(tensors.plan_size)
        num_tiles = row_tiles * num_heads
        if number >= num_tiles:
            return
    work = Work(
        num_tiles,
        row_tiles,
        num_heads,
        heads_per_section,
        num_q_heads,
        group_size,
        seqlen_q,
        seqlen_k,
        window_left,
        window_right,
        mask_batch,
        mask_head,
        tensors.seqlens_k,
        tensors.plan,
    )
    mask = Mask(tensors.mask_bits, tensors.mask_reach, tensors.mask_spans, tensors.mask_entries)
    extras = Extras(
        softmax_scale,
        softcap,
        tensors.alibi,
        alibi_batch,
        tensors.bias,
        bias_batch,
        bias_head,
        bias_row,
        bias_key,
    )
    rows = rows_of_tile(number, work, tile, variant)
    walk = walk_of(rows, work, mask, tile, variant)
    PARTS: gl.constexpr = tile.parts
    PART_ROWS: gl.constexpr = 16 * (tile.warps // tile.across)
    DTYPE: gl.constexpr = q.dtype.element_ty
    bias_memory = None
    bias_rows = None
    if tile.bias_stages > 0:
        BIAS: gl.constexpr = tensors.bias.dtype.element_ty
        size: gl.constexpr = [tile.stages, tile.rows, tile.keys]
        bias_memory = gl.allocate_shared_memory(BIAS, size, tile_layout(tile.keys))
        bias_strides = (bias_batch, bias_row, bias_head)
        none = rows.first_row * 0
        bias_rows = rows_of(
            tensors.bias,
            rows.b,
            none,
            rows.h,
            bias_strides,
            0,
            rows.length_q,
            work.seqlen_k // UNIT,
        )
    wide_p = None
    if tile.across > 1:
        wide_p = gl.allocate_shared_memory(DTYPE, [PART_ROWS, tile.keys], tile_layout(tile.keys))
    shared = Shared(
        gl.allocate_shared_memory(DTYPE, [PARTS, PART_ROWS, tile.d], tile_layout(tile.d)),
        gl.allocate_shared_memory(DTYPE, [tile.stages, tile.keys, tile.d], tile_layout(tile.d)),
        gl.allocate_shared_memory(DTYPE, [tile.stages, tile.keys, tile.dv], tile_layout(tile.dv)),
        bias_memory,
        wide_p,
    )
    key_head = rows.h // group_size
    rows_of_q = rows_of(q, rows.b, rows.first_q, rows.h, q_strides, 0, rows.length_q, width)
    end = gl.minimum(walk.seen_end, rows.length_k)
    begin = walk.seen_begin
    keys = rows_of(k, rows.b, rows.first_k, key_head, k_strides, begin, end, width)
    values = rows_of(v, rows.b, rows.first_k, key_head, v_strides, begin, end, o_width)
    for part in gl.static_range(PARTS):
        first = rows.first_row + PART_ROWS * part
        copy_rows(rows_of_q, first, shared.q.index(part), None, tile.warps, True, tile.padded)
    factor = factor_log2(extras, variant)
    ROWS: gl.constexpr = gl.SliceLayout(1, _scores_layout(tile.keys, tile.warps, tile.across))
    EDGE: gl.constexpr = "right" if variant.ruled else "none"
    BITS: gl.constexpr = variant.mask_keys > 0
    draw = 0
    if variant.dropout:
        draw = draw_of(tensors.philox, drop_limit)
    plane = rows.b * num_q_heads + rows.h
    head0 = head_of(rows, rows.first_row, work, extras, ROWS, variant, PART_ROWS)
    head1 = head0
    if PARTS == 2:
        head1 = head_of(rows, rows.first_row + PART_ROWS, work, extras, ROWS, variant, PART_ROWS)
    task0 = Task(walk, head0, mask, extras, draw, plane, factor, shared)
    task1 = Task(walk, head1, mask, extras, draw, plane, factor, shared)
    zero = walk.last * 0
    STAGES: gl.constexpr = tile.stages
    for stage in gl.static_range(STAGES):
        if stage > 0:
            index = zero + (stage - 1)
            _copy(values, None, index, shared.v, task0, stage == 1, True, tile, variant)
        _copy(keys, bias_rows, zero + stage, shared.k, task0, stage == 0, False, tile, variant)
    m = gl.full([PART_ROWS], float("-inf"), gl.float32, ROWS)
    KEYS: gl.constexpr = tile.keys
    DV: gl.constexpr = tile.dv
    l = partial_sums(
        gl.zeros([PART_ROWS, KEYS], gl.float32, _scores_layout(tile.keys, tile.warps, tile.across))
    )
    acc = gl.zeros([PART_ROWS, DV], gl.float32, sum_layout(tile.warps // tile.across, tile.across))
    row0 = Row(acc, m, l)
    row1 = Row(acc, m, l)
    queries = shared.q
    if tile.q_in_registers:
        async_copy.wait_group(2 * tile.stages - 2)
        queries = _lefts(shared.q, 0, tile.parts * (tile.d // CHUNK), tile)
    free_begin = gl.minimum(walk.free_begin, walk.steps)
    if BITS:  # a tile without entries has one step, whose bits are not set
        free_begin = gl.maximum(free_begin, 1)
    for index in range(0, free_begin):
        row0, row1 = _step(
            row0,
            row1,
            queries,
            keys,
            values,
            bias_rows,
            task0,
            task1,
            index,
            tile,
            variant,
            EDGE,
            BITS,
        )
    for index in range(free_begin, walk.free_end):
        row0, row1 = _step(
            row0,
            row1,
            queries,
            keys,
            values,
            bias_rows,
            task0,
            task1,
            index,
            tile,
            variant,
            "none",
            False,
        )
    if variant.left and not BITS:
        for index in range(gl.maximum(walk.free_end, free_begin), walk.steps):
            row0, row1 = _step(
                row0,
                row1,
                queries,
                keys,
                values,
                bias_rows,
                task0,
                task1,
                index,
                tile,
                variant,
                "left",
                False,
            )
    if variant.ruled and BITS:
        for index in range(gl.maximum(walk.free_end, free_begin), walk.steps):
            row0, row1 = _step(
                row0,
                row1,
                queries,
                keys,
                values,
                bias_rows,
                task0,
                task1,
                index,
                tile,
                variant,
                EDGE,
                False,
            )
    output = (o, lse, lse_batch, lse_head, tensors.maxima, tensors.sinks, keep_scale)
    _store(row0, task0, rows, output, o_strides, o_width, tile, variant)
    if PARTS == 2:
        _store(row1, task1, rows, output, o_strides, o_width, tile, variant)
