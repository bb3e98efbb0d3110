"""A warpgroup of the forward pass: 64 rows of o, block after block of keys.

What: o = softmax(s) v and lse of 64 rows; s = q k^T and p v by WGMMA, p from registers.
Grid: two or three partitions of every CTA of `attention_fwd`.
One CTA: step j of a walk issues s_j = q k_j^T, then acc += p_{j-1} v_{j-1}, waits for s_j, and does
      its softmax while the second product runs; acc is rescaled after it.
Traffic: shared memory only; o leaves through shared memory and TMA, lse by plain stores.
Numerics: products of 16-bit inputs with float32 sums; see `_softmax` and `_logits`.

The runs of a walk are loops of their own, so that the longest has no mask in it. p goes from one
loop to the next as packed pairs (see `_warpgroup.pack`). With `tile.ping_pong` warpgroups take
turns at issuing products, so that one multiplies while another exponentiates.
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

from tilewise.kernels.gluon._blocks import block_of_step, walk_of
from tilewise.kernels.gluon._compat import tma_store
from tilewise.kernels.gluon._dropout import draw_of, drop
from tilewise.kernels.gluon._logits import head_of, hide, hide_by_bits, logits
from tilewise.kernels.gluon._softmax import finish, fold, partial_sums
from tilewise.kernels.gluon._tiles import rows_of_tile
from tilewise.kernels.gluon._values import clear_hidden, reached
from tilewise.kernels.gluon._warpgroup import (
    named_barrier,
    operand_layout,
    pack,
    scale_rows,
    sum_layout,
    unpack,
)

TURN_BARRIER = gl.constexpr(9)  # the first hardware barrier that Triton leaves alone


class Output(NamedTuple):
    """Where results go."""

    o: object  # descriptor of (64, tile.o_columns) tiles
    o_ptr: object  # for the last rows of packed sequences
    o_row: object  # Hq Dv / 8
    width: object  # Dv / 8
    lse: object
    lse_batch: object
    lse_head: object
    sinks: object  # float32 (Hq,), None without
    philox: object  # int64 (2,), None without dropout
    drop_limit: object
    keep_scale: object


class State(NamedTuple):
    """What a row tile has come to: the sums, and the packed p that still lacks its product."""

    acc: object
    p: object
    m: object
    l: object


@gluon.jit
def compute_tiles(given, tile: gl.constexpr, variant: gl.constexpr, GROUP: gl.constexpr):
    """Compute rows [64 GROUP, 64 GROUP + 64) of every tile that the loader brings.

    given: Output, Work, Mask, Extras, the factor of `_softmax`, Shared.
    """
    output, work, mask, extras, factor, shared = given
    ROWS: gl.constexpr = gl.SliceLayout(1, sum_layout(tile.keys))
    number = gl.program_id(0)
    turn = number * 0
    step = number * 0
    if tile.ping_pong and tile.warpgroups == GROUP + 1:  # the first turn is the first warpgroup's
        named_barrier("arrive", TURN_BARRIER, 256, 4)
    while number < work.num_tiles:
        rows = rows_of_tile(number, work, tile, variant)
        walk = walk_of(rows, work, mask, tile, variant)
        first_row = rows.first_row + GROUP * 64
        head = head_of(rows, first_row, work, extras, ROWS, variant)
        draw = None
        if variant.dropout:
            number_of_head = rows.b * work.num_q_heads + rows.h
            draw = draw_of(output.philox, output.drop_limit, number_of_head)
        mbarrier.wait(shared.q_full.index(GROUP), turn & 1)
        acc, m, l = _attend(
            walk, head, mask, extras, draw, factor, shared, step, tile, variant, GROUP
        )
        step += walk.steps
        _store(acc, m, l, rows, head, output, factor, shared, tile, variant, GROUP)
        turn += 1
        if tile.dynamic:
            mbarrier.wait(shared.q_full.index(GROUP), turn & 1)
            lane: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
            number = gl.max(shared.number.index(GROUP).load(lane), 0)
        else:
            number += gl.num_programs(0)
    tma.store_wait(0)


@gluon.jit
def _attend(
    walk, head, mask, extras, draw, factor, shared, step,
    tile: gl.constexpr, variant: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Return acc, m and l after all blocks of a walk; `step` is its place in the rings."""
    KEYS: gl.constexpr = tile.keys
    DV: gl.constexpr = tile.dv
    ACC: gl.constexpr = sum_layout(DV)
    S: gl.constexpr = sum_layout(KEYS)
    ROWS: gl.constexpr = gl.SliceLayout(1, S)
    BITS: gl.constexpr = variant.mask_keys > 0
    RULED: gl.constexpr = variant.ruled
    q = shared.q.index(GROUP).reshape([64, tile.d])
    if tile.q_in_registers:
        q = q.load(operand_layout(tile.keys))
        mbarrier.arrive(shared.q_empty.index(GROUP), count=1)
    m = gl.full([64], float("-inf"), gl.float32, ROWS)
    l = partial_sums(gl.zeros([64, KEYS], gl.float32, S))
    acc = gl.zeros([64, DV], gl.float32, ACC)

    stage = step % tile.stages
    mbarrier.wait(shared.k_full.index(stage), (step // tile.stages) & 1)
    s = _begin_scores(q, shared, stage, tile, GROUP)
    _end_turn(tile, GROUP)
    s = warpgroup_mma_wait(0, deps=(s,))
    mbarrier.arrive(shared.k_empty.index(stage), count=1)
    p, m, l, _ = _softmax(
        s, m, l, walk, 0, step, head, mask, extras, draw, factor, shared, tile, variant,
        "right" if RULED else "none", BITS,
    )  # fmt: skip
    if (variant.right or variant.packed or variant.lengths) and not BITS:  # noqa: SIM102 (constexpr)
        if walk.seen_end < (walk.last + 1) * tile.keys:
            end = walk.seen_end - walk.last * tile.keys
            mbarrier.wait(shared.v_full.index(stage), (step // tile.stages) & 1)
            clear_hidden(shared.v.index(stage), 0, end, None, -1, False)
    state = State(acc, pack(p, shared.v.dtype), m, l)
    if variant.right or BITS:
        for index in range(1, walk.free_begin):
            state = _step(
                state, q, walk, index, step + index, head, mask, extras, draw, factor, shared,
                tile, variant, GROUP, "right" if RULED else "none", BITS,
            )  # fmt: skip
    for index in range(gl.maximum(walk.free_begin, 1), walk.free_end):
        state = _step(
            state, q, walk, index, step + index, head, mask, extras, draw, factor, shared,
            tile, variant, GROUP, "right" if RULED and BITS else "none", False,
        )  # fmt: skip
    if variant.left and not BITS:
        for index in range(walk.free_end, walk.steps):
            state = _step(
                state, q, walk, index, step + index, head, mask, extras, draw, factor, shared,
                tile, variant, GROUP, "left", False,
            )  # fmt: skip
    acc, p, m, l = state
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
    state, q, walk, index, step, head, mask, extras, draw, factor, shared,
    tile: gl.constexpr, variant: gl.constexpr, GROUP: gl.constexpr,
    EDGE: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Take one more block of keys: its scores, and the product with the values before it."""
    stage = step % tile.stages
    before = (step - 1) % tile.stages
    mbarrier.wait(shared.k_full.index(stage), (step // tile.stages) & 1)
    s = _begin_scores(q, shared, stage, tile, GROUP)
    mbarrier.wait(shared.v_full.index(before), ((step - 1) // tile.stages) & 1)
    p_before = unpack(state.p, shared.v.dtype, operand_layout(tile.dv))
    v = shared.v.index(before).reshape([tile.keys, tile.dv])
    acc = warpgroup_mma(p_before, v, state.acc, is_async=True)
    _end_turn(tile, GROUP)
    s = warpgroup_mma_wait(1, deps=(s,))
    if not tile.release_together:
        mbarrier.arrive(shared.k_empty.index(stage), count=1)
    p, m, l, alpha = _softmax(
        s, state.m, state.l, walk, index, step, head, mask, extras, draw, factor, shared,
        tile, variant, EDGE, BITS,
    )  # fmt: skip
    # p_before is named so that its registers stay untouched until the product has read them.
    acc, p_before = warpgroup_mma_wait(0, deps=(acc, p_before))
    mbarrier.arrive(shared.v_empty.index(before), count=1)
    if tile.release_together:
        mbarrier.arrive(shared.k_empty.index(stage), count=1)
    return State(scale_rows(acc, alpha), pack(p, shared.v.dtype), m, l)


@gluon.jit
def _begin_scores(q, shared, stage, tile: gl.constexpr, GROUP: gl.constexpr):
    """Issue q k^T, when it is this warpgroup's turn."""
    if tile.ping_pong:
        named_barrier("sync", TURN_BARRIER + GROUP, 256, 4)
    KEYS: gl.constexpr = tile.keys
    zero = gl.zeros([64, KEYS], gl.float32, sum_layout(KEYS))
    k = shared.k.index(stage).reshape([KEYS, tile.d]).permute((1, 0))
    return warpgroup_mma(q, k, zero, use_acc=False, is_async=True)


@gluon.jit
def _end_turn(tile: gl.constexpr, GROUP: gl.constexpr):
    if tile.ping_pong:
        named_barrier("arrive", TURN_BARRIER + (GROUP + 1) % tile.warpgroups, 256, 4)


@gluon.jit
def _softmax(
    s, m, l, walk, index, step, head, mask, extras, draw, factor, shared,
    tile: gl.constexpr, variant: gl.constexpr, EDGE: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Return p, dropped where it must be, m, l and alpha of one block of products s.

    EDGE: what hides keys of this block beside bit tiles: the "left" edge of windows, their "right"
    edge or the end of the keys (and the left one, where a window is narrow), or "none"; BITS: a bit
    tile does.
    """
    MASKED: gl.constexpr = EDGE != "none" or BITS
    block, number = block_of_step(walk, index, mask, tile, variant)
    first_key = block * tile.keys
    if not variant.factored or variant.softcap != "none":
        s = logits(s, head, extras, first_key, MASKED, variant)
    if EDGE == "right":
        s = hide(s, head, first_key, False, True)
        if variant.left:  # noqa: SIM102 (constexpr)
            if index >= walk.left_begin:
                s = hide(s, head, first_key, True, False)
    if EDGE == "left":
        s = hide(s, head, first_key, True, False)
    if BITS:
        WORDS: gl.constexpr = variant.mask_keys // 32
        first_word = first_key % variant.mask_keys // 32
        first_row = head.first_row % variant.mask_rows
        at = number.to(gl.int64) * (variant.mask_rows * WORDS)
        s = hide_by_bits(s, mask.bits + at, number, first_row, first_word, WORDS)
    p, m, l, alpha = fold(s, m, l, factor, variant.factored, MASKED or variant.bias)
    if variant.dropout:  # after the sum: dropout does not change what the others are divided by
        p = drop(p, draw, head.first_row, first_key)
    if variant.mask_keys > 0 and MASKED:
        _clear_values(walk, step, first_key, number, mask, shared, tile, variant, BITS)
    return p, m, l, alpha


@gluon.jit
def _clear_values(
    walk, step, first_key, number, mask, shared,
    tile: gl.constexpr, variant: gl.constexpr, BITS: gl.constexpr,
):  # fmt: skip
    """Clear the values of this step that no row of the tile sees."""
    begin = walk.seen_begin - first_key
    end = walk.seen_end - first_key
    some = (begin > 0) | (end < tile.keys)
    reach = None
    if BITS:
        WORDS: gl.constexpr = variant.mask_keys // 32
        COUNT: gl.constexpr = tile.keys // 32
        first_word = first_key % variant.mask_keys // 32
        reach = mask.reach + number.to(gl.int64) * WORDS + first_word
        for word in gl.static_range(COUNT):
            some = some | (reached(reach + word, number) != -1)
    if some:
        stage = step % tile.stages
        mbarrier.wait(shared.v_full.index(stage), (step // tile.stages) & 1)
        clear_hidden(shared.v.index(stage), begin, end, reach, number, BITS)


@gluon.jit
def _store(
    acc, m, l, rows, head, output, factor, shared,
    tile: gl.constexpr, variant: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Write o and lse of 64 rows; those past the end of a sequence are not written."""
    sink = 0.0
    if variant.sinks:
        sink = gl.load(output.sinks + rows.h)
    lse, scale = finish(m, l, factor, sink, variant.factored, variant.sinks)
    row = head.first_row + gl.arange(0, 64, lse.type.layout)
    at = rows.b.to(gl.int64) * output.lse_batch + rows.h.to(gl.int64) * output.lse_head
    gl.store(output.lse + (at + rows.first_q) + row, lse, mask=row < rows.length_q)
    if variant.dropout:
        scale = scale * output.keep_scale
    o = scale_rows(acc, scale).to(shared.o.dtype)
    memory = shared.o.index(GROUP)
    COLUMNS: gl.constexpr = tile.o_columns
    if tile.dv == COLUMNS:
        _store_columns(o, memory, rows, head.first_row, 0, output, variant)
    else:
        HALF: gl.constexpr = sum_layout(COLUMNS)
        left, right = gl.split(o.reshape([64, 2, COLUMNS]).permute((0, 2, 1)))
        left = gl.convert_layout(left, HALF, assert_trivial=True)
        right = gl.convert_layout(right, HALF, assert_trivial=True)
        _store_columns(left, memory, rows, head.first_row, 0, output, variant)
        _store_columns(right, memory, rows, head.first_row, COLUMNS, output, variant)


@gluon.jit
def _store_columns(
    o, memory, rows, first_row, first_column: gl.constexpr, output, variant: gl.constexpr
):  # fmt: skip
    """Write o (64, n) to the columns from `first_column`, through `memory` (1, 1, 64, n)."""
    WIDTH: gl.constexpr = o.shape[1]
    b = rows.b
    if variant.packed:
        b = rows.b * 0
    tma.store_wait(0)  # what was in this memory before has been read
    memory.reshape([64, WIDTH]).store(o)
    if variant.packed:
        if first_row + 64 > rows.length_q:  # the rows after the last are another sequence's
            _copy_rows(memory.reshape([64, WIDTH]), rows, first_row, first_column, output)
        else:
            fence_async_shared()
            row = rows.first_q + first_row
            tma_store(output.o, [b, rows.h, row, first_column], memory)
    else:
        fence_async_shared()
        tma_store(output.o, [b, rows.h, first_row, first_column], memory)


@gluon.jit
def _copy_rows(memory, rows, first_row, first_column: gl.constexpr, output):
    """Copy the rows that exist of `memory` (64, n) to o, 16 bytes a thread."""
    WIDTH: gl.constexpr = memory.shape[1]
    ACROSS: gl.constexpr = WIDTH // 8 if WIDTH < 256 else 32
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout)) + first_column
    start = output.o_ptr + rows.h.to(gl.int64) * (output.width * 8)
    # Whole row numbers: what each thread adds to the first would be kept in registers all along.
    at = (rows.first_q + first_row + row).to(gl.int64) * (output.o_row * 8)
    at = gl.expand_dims(at, 1) + gl.expand_dims(column, 0)
    inside = gl.expand_dims(row < rows.length_q - first_row, 1)
    inside = inside & gl.expand_dims(column // 8 < output.width, 0)
    gl.store(start + at, memory.load(layout), mask=inside)
