"""Forward pass of attention on Hopper in heads of 257 to 512 channels, dense: TMA and WGMMA.

What: o = softmax(s) v and lse, with s = softmax_scale * q k^T, causal, windowed or neither.
Grid: one CTA for each tile of 64 queries of a head, from much to little work (see `scheduler`).
One CTA: a warpgroup for the logits, which has three quarters of q in registers, and two for o, 256
      columns each, which is 128 registers a thread. Each loads what may come where it has read, so
      no warp is there to load.
Traffic: q, o and lse once; k and v once a tile of queries (mostly from L2).
Numerics: products in the input type with float32 sums; m, l, o float32; exponentials in base 2.
Rows that see nothing give o = 0, lse = -inf.

Blocks of 64 keys and of their values take turns in a ring of three stages: K0 V0 K1 V1 ... Each
stage has three parts, of 256, 128 and 128 channels. Keys that the logits were made of make room for
the values of the next step; values, part by part, for keys two steps on. A part has barriers for
keys and others for values, so that who waits for one kind sees each of its phases.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.device.barriers import barriers
from tilewise.kernels.gluon.device.compat import partition_barrier, tma_load
from tilewise.kernels.gluon.device.logits import Extras, factor_log2, head_of, hide
from tilewise.kernels.gluon.device.warpgroup import operand_layout, scale_rows, sum_layout
from tilewise.kernels.gluon.forward.epilogue import store_columns
from tilewise.kernels.gluon.forward.scheduler import Work, rows_of_tile
from tilewise.kernels.gluon.forward.softmax import finish, fold, partial_sums
from tilewise.kernels.gluon.forward.span import walk_of
from tilewise.kernels.gluon.forward.values import clear_hidden

ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
STAGES = gl.constexpr(3)
MIDDLE, TAIL = gl.constexpr(256), gl.constexpr(384)  # the first channels of the parts


class Loads(NamedTuple):
    """TMA descriptors of tiles of 64 rows: 256 channels wide ("left"), and 128."""

    q_left: object
    q: object
    k_left: object
    k: object
    v_left: object
    v: object


class Place(NamedTuple):
    """The work of a CTA: its tile of query rows, the walk over keys, and the key head."""

    rows: object
    walk: object
    head_k: object


class Output(NamedTuple):
    """The destination of one part of o's channels, a descriptor, as `store_columns` wants it."""

    o: object  # the descriptor of its tiles


class Shared(NamedTuple):
    """Shared memory: the parts of the ring, and barriers that say what is full."""

    left: object  # three stages, as middle and tail
    middle: object
    tail: object
    q_tail: object
    p: object  # two stages, as alpha: what a block multiplies the sums before it by
    alpha: object
    scale: object  # the factor of o, in the end
    k_left_full: object  # barriers of keys, then of values, by step: three of each
    k_middle_full: object
    k_tail_full: object
    v_left_full: object
    v_middle_full: object
    v_tail_full: object
    q_full: object
    p_full: object  # p and alpha of a block are there
    scale_full: object


@gluon.jit
def _allocate(loads):
    """Return the Shared memory of a CTA, with its barriers ready."""
    DTYPE: gl.constexpr = loads.k.dtype
    LEFT: gl.constexpr = loads.k_left.layout
    PART: gl.constexpr = loads.k.layout
    LINE: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    P: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return Shared(
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, 256], LEFT),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, 128], PART),
        gl.allocate_shared_memory(DTYPE, [STAGES, 1, 1, KEYS, 128], PART),
        gl.allocate_shared_memory(DTYPE, [1, 1, ROWS, 128], PART),
        gl.allocate_shared_memory(DTYPE, [2, ROWS, KEYS], P),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], LINE),
        gl.allocate_shared_memory(gl.float32, [1, ROWS], LINE),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(STAGES, 1),
        barriers(1, 1),
        barriers(2, 1),
        barriers(1, 1),
    )


@gluon.jit
def _load_part(x, at, index, channel: gl.constexpr, full, memory, stage):
    """Start to load one part of the keys or values of step `index` into a stage."""
    first_key = (at.walk.last - index) * KEYS
    bar = full.index(index % STAGES)
    mbarrier.expect(bar, x.block_type.nbytes)
    tma_load(x, [at.rows.b, at.head_k, first_key, channel], bar, memory.index(stage))


@gluon.jit
def _load_keys(loads, at, index, shared):
    """Start to load all three parts of the keys of step `index` into the ring."""
    stage = 2 * index % STAGES
    left, x = loads.k_left, loads.k
    _load_part(left, at, index, 0, shared.k_left_full, shared.left, stage)
    _load_part(x, at, index, MIDDLE, shared.k_middle_full, shared.middle, stage)
    _load_part(x, at, index, TAIL, shared.k_tail_full, shared.tail, stage)


@gluon.jit
def _load_values(loads, at, index, shared):
    """Start to load all three parts of the values of step `index` into the ring."""
    stage = (2 * index + 1) % STAGES
    left, x = loads.v_left, loads.v
    _load_part(left, at, index, 0, shared.v_left_full, shared.left, stage)
    _load_part(x, at, index, MIDDLE, shared.v_middle_full, shared.middle, stage)
    _load_part(x, at, index, TAIL, shared.v_tail_full, shared.tail, stage)


@gluon.jit
def _await(full, index):
    """Wait until one part of the keys, or of the values, of step `index` has arrived."""
    mbarrier.wait(full.index(index % STAGES), (index // STAGES) & 1)


@gluon.jit
def _issue(q_left, q_middle, index, shared):
    """Start the three products of the logits (64, 64) of step `index`, and return the asynchronous
    sum."""
    stage = 2 * index % STAGES
    zero = gl.zeros([ROWS, KEYS], gl.float32, sum_layout(KEYS))
    _await(shared.k_left_full, index)
    left = shared.left.index(stage).reshape([KEYS, 256]).permute((1, 0))
    s = warpgroup_mma(q_left, left, zero, use_acc=False, is_async=True)
    _await(shared.k_middle_full, index)
    middle = shared.middle.index(stage).reshape([KEYS, 128]).permute((1, 0))
    s = warpgroup_mma(q_middle, middle, s, is_async=True)
    _await(shared.k_tail_full, index)
    tail = shared.tail.index(stage).reshape([KEYS, 128]).permute((1, 0))
    return warpgroup_mma(shared.q_tail.reshape([ROWS, 128]), tail, s, is_async=True)


@gluon.jit
def _fold_block(
    s,
    m,
    l,
    index,
    head,
    at,
    factor,
    shared,
    variant: gl.constexpr,
    RIGHT: gl.constexpr,
    LEFT: gl.constexpr,
):
    """Take the softmax of logits s of step `index`: return the new m and l, and store p and alpha
    in shared memory.

    The caller arrives at `p_full` afterwards, which lets others read p and alpha.

    RIGHT, LEFT: whether keys may be hidden at these sides.
    """
    first_key = (at.walk.last - index) * KEYS
    if RIGHT:
        s = hide(s, head, first_key, False, True)
    if LEFT:
        s = hide(s, head, first_key, True, False)
    p, m, l, alpha = fold(s, m, l, factor, True, False, True)
    shared.alpha.index(index % 2).store(alpha)
    shared.p.index(index % 2).store(p.to(shared.p.dtype))
    fence_async_shared()
    return m, l


@gluon.jit
def _score_steps(
    s,
    m,
    l,
    begin,
    end,
    q_left,
    q_middle,
    head,
    loads,
    at,
    factor,
    shared,
    variant: gl.constexpr,
    RIGHT: gl.constexpr,
    LEFT: gl.constexpr,
):
    """Take the softmax of steps begin ... end - 1 and pass p on, while the logits of the next step
    are computed; return the logits of step `end`, m and l.

    Each step also starts to load the values of the step after it.

    Args:
        s: the logits of the first step.
        q_left, q_middle: q in registers, by parts of the channels.
        at: the CTA's `Place`.
        RIGHT, LEFT: whether keys may be hidden on either side.
    """
    for index in range(begin, end):
        partition_barrier()  # all warps' products have read the keys
        _load_values(loads, at, index + 1, shared)
        m, l = _fold_block(s, m, l, index, head, at, factor, shared, variant, RIGHT, LEFT)
        s = _issue(q_left, q_middle, index + 1, shared)
        mbarrier.arrive(shared.p_full.index(index % 2), count=1)
        s = warpgroup_mma_wait(0, deps=(s,))
    return s, m, l


@gluon.jit
def _clear_values(index, begin, end, shared):
    """Set to 0, in shared memory, the values of step `index` outside [begin, end), which no row of
    the tile sees.

    The warpgroups that multiply them have no registers for it.
    """
    if (begin > 0) | (end < KEYS):
        stage = (2 * index + 1) % STAGES
        _await(shared.v_left_full, index)
        _await(shared.v_middle_full, index)
        _await(shared.v_tail_full, index)
        clear_hidden(shared.left.index(stage), begin, end, None, -1, False)
        clear_hidden(shared.middle.index(stage), begin, end, None, -1, False)
        clear_hidden(shared.tail.index(stage), begin, end, None, -1, False)


@gluon.jit
def score_rows(given, variant: gl.constexpr):
    """Run the warpgroup of logits: make p of all blocks of a tile, and store lse; it also loads q,
    the first blocks of keys, and all values."""
    loads, at, work, extras, lse, lse_batch, lse_head, sinks, factor, shared = given
    S: gl.constexpr = sum_layout(KEYS)
    rows = at.rows
    head = head_of(rows, rows.first_row, work, extras, gl.SliceLayout(1, S), variant)
    steps = at.walk.steps
    # q goes through the stage of the second keys.
    q_full = shared.q_full.index(0)
    mbarrier.expect(q_full, loads.q_left.block_type.nbytes + 2 * loads.q.block_type.nbytes)
    tma_load(loads.q_left, [rows.b, rows.h, rows.first_row, 0], q_full, shared.left.index(2))
    tma_load(loads.q, [rows.b, rows.h, rows.first_row, MIDDLE], q_full, shared.middle.index(2))
    tma_load(loads.q, [rows.b, rows.h, rows.first_row, TAIL], q_full, shared.q_tail)
    _load_keys(loads, at, steps * 0, shared)
    _load_values(loads, at, steps * 0, shared)
    mbarrier.wait(q_full, 0)
    q_left = shared.left.index(2).reshape([ROWS, 256]).load(operand_layout(KEYS))
    q_middle = shared.middle.index(2).reshape([ROWS, 128]).load(operand_layout(KEYS))
    fence_async_shared()
    partition_barrier()  # all have read what the next keys overwrite
    if steps > 1:
        _load_keys(loads, at, steps * 0 + 1, shared)

    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = partial_sums(gl.zeros([ROWS, KEYS], gl.float32, S))
    s = _issue(q_left, q_middle, steps * 0, shared)
    s = warpgroup_mma_wait(0, deps=(s,))
    if variant.right:  # past the end of the keys values are zero
        _clear_values(steps * 0, steps * 0, at.walk.seen_end - at.walk.last * KEYS, shared)
    last = steps - 1
    free = steps * 0
    if variant.ruled:
        free = gl.minimum(at.walk.free_begin, last)
        s, m, l = _score_steps(
            s,
            m,
            l,
            steps * 0,
            free,
            q_left,
            q_middle,
            head,
            loads,
            at,
            factor,
            shared,
            variant,
            True,
            variant.left,
        )
    free_end = last
    if variant.left:
        free_end = gl.maximum(gl.minimum(at.walk.free_end, last), free)
    s, m, l = _score_steps(
        s,
        m,
        l,
        free,
        free_end,
        q_left,
        q_middle,
        head,
        loads,
        at,
        factor,
        shared,
        variant,
        False,
        False,
    )
    if variant.left:
        s, m, l = _score_steps(
            s,
            m,
            l,
            free_end,
            last,
            q_left,
            q_middle,
            head,
            loads,
            at,
            factor,
            shared,
            variant,
            False,
            True,
        )
    m, l = _fold_block(
        s, m, l, last, head, at, factor, shared, variant, variant.ruled, variant.left
    )
    if variant.left:
        first_key = (at.walk.last - last) * KEYS
        _clear_values(last, at.walk.seen_begin - first_key, last * 0 + KEYS, shared)
    mbarrier.arrive(shared.p_full.index(last % 2), count=1)

    sink = 0.0
    if variant.sinks:
        sink = gl.load(sinks + rows.h)
    lse_rows, scale = finish(m, l, factor, sink, True, variant.sinks)
    shared.scale.index(0).store(scale)
    mbarrier.arrive(shared.scale_full.index(0), count=1)
    row = rows.first_row + gl.arange(0, ROWS, lse_rows.type.layout)
    place = rows.b.to(gl.int64) * lse_batch + rows.h.to(gl.int64) * lse_head
    gl.store(lse + place + row, lse_rows, mask=row < rows.length_q)


@gluon.jit
def add_left(given, variant: gl.constexpr):
    """Run a warpgroup of sums: compute and store the first 256 columns of o; it also loads the
    first 256 channels of later keys."""
    loads, at, output, _, shared = given
    steps = at.walk.steps
    o = gl.zeros([ROWS, 256], gl.float32, sum_layout(256))
    for index in range(steps):
        stage = (2 * index + 1) % STAGES
        mbarrier.wait(shared.p_full.index(index % 2), (index // 2) & 1)
        alpha = shared.alpha.index(index % 2).load(gl.SliceLayout(1, o.type.layout))
        o = scale_rows(o, alpha)
        _await(shared.v_left_full, index)
        left = shared.left.index(stage).reshape([KEYS, 256])
        o = warpgroup_mma(shared.p.index(index % 2), left, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=(o,))
        partition_barrier()  # all warps' products have read the values
        if index + 2 < steps:
            full = shared.k_left_full
            _load_part(loads.k_left, at, index + 2, 0, full, shared.left, stage)
    mbarrier.wait(shared.scale_full.index(0), 0)
    scale = shared.scale.index(0).load(gl.SliceLayout(1, o.type.layout))
    o = scale_rows(o, scale).to(shared.left.dtype)
    memory = shared.left.index((2 * steps - 1) % STAGES)
    store_columns(o, memory, at.rows, at.rows.first_row, 0, Output(output), variant)
    tma.store_wait(0)


@gluon.jit
def add_right(given, variant: gl.constexpr):
    """Run a warpgroup of sums: compute and store the other 256 columns of o, as two sums; it also
    loads those channels of later keys."""
    loads, at, _, output, shared = given
    steps = at.walk.steps
    o = gl.zeros([ROWS, 128], gl.float32, sum_layout(128))
    o_tail = gl.zeros([ROWS, 128], gl.float32, sum_layout(128))
    for index in range(steps):
        stage = (2 * index + 1) % STAGES
        mbarrier.wait(shared.p_full.index(index % 2), (index // 2) & 1)
        alpha = shared.alpha.index(index % 2).load(gl.SliceLayout(1, o.type.layout))
        o = scale_rows(o, alpha)
        o_tail = scale_rows(o_tail, alpha)
        _await(shared.v_middle_full, index)
        _await(shared.v_tail_full, index)
        p = shared.p.index(index % 2)
        middle = shared.middle.index(stage).reshape([KEYS, 128])
        tail = shared.tail.index(stage).reshape([KEYS, 128])
        o = warpgroup_mma(p, middle, o, is_async=True)
        o_tail = warpgroup_mma(p, tail, o_tail, is_async=True)
        o, o_tail = warpgroup_mma_wait(0, deps=(o, o_tail))
        partition_barrier()  # all warps' products have read the values
        if index + 2 < steps:
            full, full_tail = shared.k_middle_full, shared.k_tail_full
            x, ahead = loads.k, index + 2
            _load_part(x, at, ahead, MIDDLE, full, shared.middle, stage)
            _load_part(x, at, ahead, TAIL, full_tail, shared.tail, stage)
    mbarrier.wait(shared.scale_full.index(0), 0)
    scale = shared.scale.index(0).load(gl.SliceLayout(1, o.type.layout))
    o = scale_rows(o, scale).to(shared.middle.dtype)
    o_tail = scale_rows(o_tail, scale).to(shared.tail.dtype)
    stage = (2 * steps - 1) % STAGES
    first = at.rows.first_row
    store_columns(o, shared.middle.index(stage), at.rows, first, MIDDLE, Output(output), variant)
    store_columns(o_tail, shared.tail.index(stage), at.rows, first, TAIL, Output(output), variant)
    tma.store_wait(0)


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
    ]
)
def wide_fwd_kernel(
    q_left,
    q,
    k_left,
    k,
    v_left,
    v,
    o_left,
    o,
    lse,
    sinks,
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
    lse_batch,
    lse_head,
    tile: gl.constexpr,
    variant: gl.constexpr,
):
    """Compute o = softmax(s) v and lse of dense attention in heads of 257 to 512 channels, for one
    tile of 64 queries of a head, causal, windowed or neither; see the module's docstring.

    The first eight are TMA descriptors of (64, 256) and (64, 128) tiles of q, k, v and o.
    """
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
        0,
        0,
        None,
        None,
    )
    extras = Extras(softmax_scale, softcap, None, 0, None, 0, 0, 0, 0)
    rows = rows_of_tile(gl.program_id(0), work, tile, variant)
    walk = walk_of(rows, work, None, tile, variant)
    at = Place(rows, walk, rows.h // group_size)
    loads = Loads(q_left, q, k_left, k, v_left, v)
    shared = _allocate(loads)
    factor = factor_log2(extras, variant)
    scores = (loads, at, work, extras, lse, lse_batch, lse_head, sinks, factor, shared)
    sums = (loads, at, o_left, o, shared)
    gl.warp_specialize(
        [
            (score_rows, (scores, variant)),
            (add_left, (sums, variant)),
            (add_right, (sums, variant)),
        ],
        [4, 4],
        [tile.registers, tile.registers],
    )
