"""A warpgroup of the forward pass: 64 rows of o, block after block of keys.

What: o = softmax(s) v and lse of 64 rows; s = q k^T and p v by WGMMA, p from registers.
Grid: two or three partitions of every CTA of `attention_fwd`.
One CTA: step j of a walk issues s_j = q k_j^T, then acc += p_{j-1} v_{j-1}, waits for s_j, and does
      its softmax while the second product runs; acc is rescaled after it, or with
      `tile.scale_late` in step j + 1 while s_{j+1} is multiplied: the same arithmetic.
Traffic: shared memory only; o leaves through shared memory and TMA, lse by plain stores.
Numerics: products of 16-bit inputs with float32 sums; see `softmax` and `device.logits`.

The runs of a walk are loops of their own, so that the longest has no mask in it. p goes from one
loop to the next as packed pairs (see `device.warpgroup.pack`). With `tile.ping_pong` warpgroups
take turns at issuing products, so that one multiplies while another exponentiates.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.device.barriers import release_loaded
from tilewise.kernels.gluon.device.dropout import draw_of
from tilewise.kernels.gluon.device.logits import head_of
from tilewise.kernels.gluon.device.warpgroup import (
    named_barrier,
    operand_layout,
    pack,
    scale_rows,
    sum_layout,
    unpack,
)
from tilewise.kernels.gluon.forward.epilogue import store_rows
from tilewise.kernels.gluon.forward.scheduler import rows_of_tile
from tilewise.kernels.gluon.forward.softmax import partial_sums
from tilewise.kernels.gluon.forward.span import hidden_steps, walk_of
from tilewise.kernels.gluon.forward.step import Task, gather, probabilities
from tilewise.kernels.gluon.forward.values import clear_hidden

SCHEDULER_BARRIER = gl.constexpr(9)  # the first hardware barrier that Triton leaves alone


class State(NamedTuple):
    """The state of a warpgroup between blocks of keys: sums acc, maxima m, totals l, and the last
    block's packed probabilities p, not yet multiplied with its values."""

    acc: object
    p: object
    m: object
    l: object
    alpha: object  # the factor that acc still lacks, with tile.scale_late


@gluon.jit
def compute_tiles(given, tile: gl.constexpr, variant: gl.constexpr, GROUP: gl.constexpr):
    """Compute rows [64 GROUP, 64 GROUP + 64) of every tile that the loader brings.

    given: Output, Work, Mask, Extras, the factor of `softmax`, Shared.
    """
    _, work, mask, _, _, shared = given
    number = gl.program_id(0)
    visit = number * 0
    step = number * 0
    if tile.ping_pong and tile.warpgroups == GROUP + 1:  # the first turn is the first warpgroup's
        named_barrier("arrive", SCHEDULER_BARRIER, 256, 4)
    while number < work.num_tiles:
        rows = rows_of_tile(number, work, tile, variant)
        walk = walk_of(rows, work, mask, tile, variant)
        if variant.short and GROUP > 0:
            if rows.first_row + GROUP * 64 < rows.length_q:
                _compute_tile(given, rows, walk, visit, step, tile, variant, GROUP)
            else:
                mbarrier.wait(shared.q_full.index(GROUP), visit & 1)
                mbarrier.arrive(shared.q_empty.index(GROUP), count=1)
                _pass_by(shared, step, walk.steps, tile, GROUP)
        else:
            _compute_tile(given, rows, walk, visit, step, tile, variant, GROUP)
        step += walk.steps
        visit += 1
        if tile.dynamic:
            mbarrier.wait(shared.q_full.index(GROUP), visit & 1)
            lane: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            number = gl.max(shared.number.index(GROUP).load(lane), 0)
        else:
            number += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit
def _compute_tile(
    given, rows, walk, visit, step, tile: gl.constexpr, variant: gl.constexpr, GROUP: gl.constexpr
):
    """Compute 64 rows of the CTA's tile number `visit`; `step`: their walk's place in the rings."""
    output, work, mask, extras, factor, shared = given
    ROWS: gl.constexpr = gl.SliceLayout(1, sum_layout(tile.keys))
    head = head_of(rows, rows.first_row + GROUP * 64, work, extras, ROWS, variant)
    draw = None
    if variant.dropout:
        draw = draw_of(output.philox, output.drop_limit)
    plane = rows.b * work.num_q_heads + rows.h
    mbarrier.wait(shared.q_full.index(GROUP), visit & 1)
    task = Task(walk, head, mask, extras, draw, plane, factor, shared)
    passed = 0
    if _hides_whole_blocks(tile, variant):
        passed = hidden_steps(rows, walk, head.first_row, work, tile)
        _pass_by(shared, step, passed, tile, GROUP)
    acc, m, l = _attend(task, step, passed, tile, variant, GROUP)
    store_rows(acc, m, l, rows, head, output, factor, shared, tile, variant, GROUP)


@gluon.constexpr_function
def _hides_whole_blocks(tile, variant):
    """Whether a diagonal hides blocks of keys from a warpgroup whose tile sees some of them."""
    plain = variant.mask_keys == 0 and not (variant.packed and tile.warpgroups == 3)
    return variant.right and plain and tile.rows > tile.keys


@gluon.jit
def _pass_by(shared, step, count, tile: gl.constexpr, GROUP: gl.constexpr):
    """Give back K, V and the bias of the next `count` blocks unread, and pass on the turns to
    multiply."""
    for index in range(0, count):
        stage = (step + index) % tile.stages
        phase = ((step + index) // tile.stages) & 1
        if tile.ping_pong:
            named_barrier("sync", SCHEDULER_BARRIER + GROUP, 256, 4)
        _arrive_scheduler(tile, GROUP)
        mbarrier.wait(shared.k_full.index(stage), phase)
        mbarrier.arrive(shared.k_empty.index(stage), count=1)
        mbarrier.wait(shared.v_full.index(stage), phase)
        mbarrier.arrive(shared.v_empty.index(stage), count=1)
        if tile.bias_stages > 0:
            slot = GROUP * tile.bias_stages + (step + index) % tile.bias_stages
            phase = ((step + index) // tile.bias_stages) & 1
            mbarrier.wait(shared.bias_full.index(slot), phase)
            mbarrier.arrive(shared.bias_empty.index(slot), count=1)


@gluon.jit
def _attend(task, step, first, tile: gl.constexpr, variant: gl.constexpr, GROUP: gl.constexpr):
    """Return acc, m and l of 64 rows after the blocks of a walk from number `first` on; `step` is
    the place of the walk's first block in the rings."""
    KEYS: gl.constexpr = tile.keys
    DV: gl.constexpr = tile.dv
    ACC: gl.constexpr = sum_layout(DV)
    S: gl.constexpr = sum_layout(KEYS)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    BITS: gl.constexpr = variant.mask_keys > 0
    EDGE: gl.constexpr = "right" if variant.ruled else "none"  # of the first run of blocks
    walk, shared = task.walk, task.shared
    q = shared.q.index(GROUP).reshape([64, tile.d])
    if tile.q_in_registers:
        q = q.load(operand_layout(tile.keys))
        release_loaded(shared.q_empty.index(GROUP))
    # Where each row sees all keys of each block, the bound itself stands for the maximum.
    WHOLE: gl.constexpr = variant.bounded and EDGE == "none" and not BITS
    START: gl.constexpr = 1.0 if WHOLE else float("-inf")
    m = gl.full([64], START, gl.float32, ROWS)
    l = partial_sums(gl.zeros([64, KEYS], gl.float32, S))
    acc = gl.zeros([64, DV], gl.float32, ACC)

    at = step + first
    stage = at % tile.stages
    mbarrier.wait(shared.k_full.index(stage), (at // tile.stages) & 1)
    s = _begin_scores(q, shared, stage, tile, GROUP)
    _arrive_scheduler(tile, GROUP)
    block = gather(task, first, tile, variant, EDGE, BITS)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(shared.k_empty.index(stage), count=1)
    p, m, l, _ = probabilities(s, m, l, block, task, first, at, tile, variant, GROUP, EDGE, BITS)
    if (variant.right or variant.packed or variant.lengths) and not BITS:  # noqa: SIM102 (constexpr)
        if walk.seen_end < (walk.last - first + 1) * tile.keys:
            end = walk.seen_end - (walk.last - first) * tile.keys
            mbarrier.wait(shared.v_full.index(stage), (at // tile.stages) & 1)
            clear_hidden(shared.v.index(stage), 0, end, None, -1, False)
    if not variant.dropout:
        p = pack(p, shared.v.dtype)
    state = State(acc, p, m, l, gl.full([64], 1.0, gl.float32, ROWS))
    if variant.right or BITS:
        for index in range(first + 1, walk.free_begin):
            state = _step(state, q, task, index, step + index, tile, variant, GROUP, EDGE, BITS)
    free_begin = gl.maximum(walk.free_begin, first + 1)
    if variant.bounded and not WHOLE:
        state = _with_maxima(state, free_begin < walk.free_end)
    for index in range(free_begin, walk.free_end):
        state = _step(state, q, task, index, step + index, tile, variant, GROUP, "none", False)
    if variant.left and not BITS:
        for index in range(gl.maximum(walk.free_end, first + 1), walk.steps):
            state = _step(state, q, task, index, step + index, tile, variant, GROUP, "left", False)
    if variant.ruled and BITS:
        for index in range(gl.maximum(walk.free_end, 1), walk.steps):
            state = _step(state, q, task, index, step + index, tile, variant, GROUP, EDGE, False)
    acc, p, m, l, alpha = state
    if tile.scale_late and not variant.bounded:
        acc = scale_rows(acc, alpha)
    if not tile.q_in_registers:
        mbarrier.arrive(shared.q_empty.index(GROUP), count=1)

    last = step + walk.steps - 1
    stage = last % tile.stages
    mbarrier.wait(shared.v_full.index(stage), (last // tile.stages) & 1)
    if variant.left and not BITS:
        first_key = (walk.last - walk.steps + 1) * tile.keys
        if walk.seen_begin > first_key:
            begin = walk.seen_begin - first_key
            clear_hidden(shared.v.index(stage), begin, tile.keys, None, -1, False)
    p = unpack(p, shared.v.dtype, operand_layout(tile.dv))
    v = shared.v.index(stage).reshape([tile.keys, tile.dv])
    acc = warpgroup_mma(p, v, acc, is_async=True)
    acc, p = warpgroup_mma_wait(0, deps=(acc, p))
    mbarrier.arrive(shared.v_empty.index(stage), count=1)
    return acc, m, l


@gluon.jit
def _step(
    state,
    q,
    task,
    index,
    step,
    tile: gl.constexpr,
    variant: gl.constexpr,
    GROUP: gl.constexpr,
    EDGE: gl.constexpr,
    BITS: gl.constexpr,
):
    """Return the State after one more block of keys: start its scores, add the previous block's p v
    to acc, and take the softmax of the scores.

    index: the block's number in the walk; step: its place in the rings. EDGE, BITS: as
    `step.probabilities` takes them.
    """
    shared = task.shared
    stage = step % tile.stages
    before = (step - 1) % tile.stages
    mbarrier.wait(shared.k_full.index(stage), (step // tile.stages) & 1)
    s = _begin_scores(q, shared, stage, tile, GROUP)
    acc = state.acc
    if tile.scale_late and not variant.bounded:
        acc = scale_rows(acc, state.alpha)
    mbarrier.wait(shared.v_full.index(before), ((step - 1) // tile.stages) & 1)
    p_before = unpack(state.p, shared.v.dtype, operand_layout(tile.dv))
    v = shared.v.index(before).reshape([tile.keys, tile.dv])
    acc = warpgroup_mma(p_before, v, acc, is_async=True)
    _arrive_scheduler(tile, GROUP)
    block = gather(task, index, tile, variant, EDGE, BITS)
    s = warpgroup_mma_wait(1, deps=(s,))
    if not tile.release_together:
        mbarrier.arrive(shared.k_empty.index(stage), count=1)
    p, m, l, alpha = probabilities(
        s, state.m, state.l, block, task, index, step, tile, variant, GROUP, EDGE, BITS
    )
    # p_before is named so that its registers stay untouched until the product has read them.
    acc, p_before = warpgroup_mma_wait(0, deps=(acc, p_before))
    mbarrier.arrive(shared.v_empty.index(before), count=1)
    if tile.release_together:
        mbarrier.arrive(shared.k_empty.index(stage), count=1)
    if not (variant.bounded or tile.scale_late):
        acc = scale_rows(acc, alpha)
    if not variant.dropout:
        p = pack(p, shared.v.dtype)
    return State(acc, p, m, l, alpha)


@gluon.jit
def _with_maxima(state, follow):
    """Return the State with the bound, 1, as m of rows that have seen nothing, if blocks `follow`
    that all rows see whole.

    Such rows see many keys then, so that no value need come out exactly.
    """
    m = gl.where((state.m == float("-inf")) & follow, 1.0, state.m)
    return State(state.acc, state.p, m, state.l, state.alpha)


@gluon.jit
def _begin_scores(q, shared, stage, tile: gl.constexpr, GROUP: gl.constexpr):
    """Start the product q k^T with the keys in `stage`, when it is this warpgroup's turn, and
    return the asynchronous sum (64, tile.keys)."""
    if tile.ping_pong:
        named_barrier("sync", SCHEDULER_BARRIER + GROUP, 256, 4)
    KEYS: gl.constexpr = tile.keys
    zero = gl.zeros([64, KEYS], gl.float32, sum_layout(KEYS))
    k = shared.k.index(stage).reshape([KEYS, tile.d]).permute((1, 0))
    s = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
    if tile.d_high > 0:
        q_high = shared.q_high.index(GROUP).reshape([64, tile.d_high])
        k_high = shared.k_high.index(stage).reshape([KEYS, tile.d_high]).permute((1, 0))
        s = warpgroup_mma(q_high, k_high, s, is_async=True)
    return s


@gluon.jit
def _arrive_scheduler(tile: gl.constexpr, GROUP: gl.constexpr):
    if tile.ping_pong:
        named_barrier("arrive", SCHEDULER_BARRIER + (GROUP + 1) % tile.warpgroups, 256, 4)
