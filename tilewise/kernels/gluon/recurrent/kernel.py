"""The scan over chunks of the gated delta rule and of Mamba-2's recurrence, on Hopper.

what     what triton/recurrent/scan.py computes after pairs.py, with the same sums in the same order
grid     (sequences x heads, tiles of the columns of V)
program  one warpgroup goes through the chunks of its sequence with TILE_V columns of S in
         registers. While the queries' products run, X is made of the keys'; while the state's runs,
         o is stored
traffic  k, q, v, T and R of a chunk by cp.async, STAGES chunks at a time
numerics those of triton/recurrent/scan.py for bfloat16; S, X and U go through shared memory as
         operands of WGMMA
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.kernels.gluon.device.compat import partition_barrier
from tilewise.kernels.gluon.device.warpgroup import sum_layout
from tilewise.kernels.gluon.mma.operands import copy_layout

WARPS = gl.constexpr(4)


@gluon.constexpr_function
def _lines(width):
    """Return how rows of `width` 16-bit elements lie as an operand of WGMMA."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, 2 * width), element_bitwidth=16, rank=2)


@gluon.jit
def _copy_tokens(
    memory,
    new_ptr,
    stride,
    kept_ptr,
    kept_stride: gl.constexpr,
    position,
    start,
    total,
    HAS_KEPT: gl.constexpr,
):
    """Start to copy rows of tokens at `position` and after it; those that are none are zeros."""
    TOKENS: gl.constexpr = memory.shape[0]
    WIDTH: gl.constexpr = memory.shape[1]
    LAYOUT: gl.constexpr = copy_layout(WIDTH, WARPS)
    row = gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT))
    column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)), 0)
    begin = new_ptr + (position - start).to(gl.int64) * stride
    at = begin + (gl.expand_dims(row * stride, 1) + column)
    if (position >= start) & (position + TOKENS <= total):
        async_copy.async_copy_global_to_shared(memory, at)
    else:
        if HAS_KEPT:
            inside = gl.expand_dims((row >= start - position) & (row < total - position), 1)
            is_kept = gl.expand_dims(row < start - position, 1) & (column < WIDTH)
            kept_at = kept_ptr + (gl.expand_dims(row * kept_stride, 1) + column)
            kept = gl.load(kept_at, mask=is_kept, other=0.0)
            new = gl.load(at, mask=inside & (column < WIDTH), other=0.0)
            memory.store(gl.where(is_kept, kept, new))
        else:
            inside = (row >= start - position) & (row < total - position)
            inside = gl.expand_dims(inside, 1) & (column < WIDTH)
            async_copy.async_copy_global_to_shared(memory, at, mask=inside)


@gluon.jit
def _copy_tile(memory, ptr):
    """Start to copy a tile that lies in one piece."""
    ROWS: gl.constexpr = memory.shape[0]
    WIDTH: gl.constexpr = memory.shape[1]
    LAYOUT: gl.constexpr = copy_layout(WIDTH, WARPS)
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    at = gl.expand_dims(row * WIDTH, 1) + gl.expand_dims(column, 0)
    async_copy.async_copy_global_to_shared(memory, ptr + at)


@gluon.jit
def _zero_rows(o_ptr, first, end, head, begins, NUM_HEADS: gl.constexpr, VALUE_DIM: gl.constexpr,
               TOKENS: gl.constexpr, TILE_V: gl.constexpr):  # fmt: skip
    """Set rows of o from `first` to `end` to 0, in TILE_V columns."""
    LAYOUT: gl.constexpr = copy_layout(TILE_V, WARPS)
    column = begins + gl.expand_dims(gl.arange(0, TILE_V, gl.SliceLayout(0, LAYOUT)), 0)
    zeros = gl.zeros([TOKENS, TILE_V], o_ptr.dtype.element_ty, LAYOUT)
    for some in range(first, end, TOKENS):
        row = gl.expand_dims(some + gl.arange(0, TOKENS, gl.SliceLayout(1, LAYOUT)), 1)
        at = (row.to(gl.int64) * NUM_HEADS + head) * VALUE_DIM + column
        gl.store(o_ptr + at, zeros, mask=(row < end) & (column < VALUE_DIM))


@gluon.jit(do_not_specialize=["q_scale", "num_rows", "num_sequences"])
def hopper_scan_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    t_ptr,
    r_ptr,
    running_ptr,
    k_in_ptr,
    q_in_ptr,
    k_out_ptr,
    o_ptr,
    states_ptr,
    before_ptr,
    after_ptr,
    kept_k_ptr,
    kept_v_ptr,
    edges_ptr,
    slots_ptr,
    starts_ptr,
    num_rows,
    num_sequences,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    q_scale,
    NUM_HEADS: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    KEY_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr,
    TILE_V: gl.constexpr,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_SLOTS: gl.constexpr,
    HAS_BEFORE: gl.constexpr,
    IS_DELTA: gl.constexpr,
    BY_CHANNEL: gl.constexpr,
    KEEPS_STATES: gl.constexpr,
):
    task = gl.program_id(0)
    sequence, head = task // NUM_HEADS, task % NUM_HEADS
    first = gl.load(edges_ptr + sequence)
    total = gl.load(edges_ptr + sequence + 1) - first
    begins = gl.program_id(1) * TILE_V
    if not KEEPS_STATES and sequence == num_sequences - 1:  # rows that no sequence has
        _zero_rows(
            o_ptr, first + total, num_rows, head, begins, NUM_HEADS, VALUE_DIM, TOKENS, TILE_V
        )
    slot = sequence.to(gl.int64)
    start = sequence * 0
    if HAS_SLOTS:
        slot = gl.load(slots_ptr + sequence)
        start = gl.load(starts_ptr + sequence).to(gl.int32)
        if slot < 0:
            _zero_rows(
                o_ptr, first, first + total, head, begins, NUM_HEADS, VALUE_DIM, TOKENS, TILE_V
            )
            return
        if total <= 0:
            return
        total += start
    # As triton/recurrent/rows.number_of.
    number = first // TOKENS + sequence * (2 if HAS_SLOTS else 1) - start // TOKENS
    key_head, first = head // (NUM_HEADS // KEY_HEADS), first.to(gl.int64)
    DTYPE: gl.constexpr = q_ptr.dtype.element_ty
    q_ptr += first * stride_q + key_head * stride_qh
    k_ptr += first * stride_k + key_head * stride_kh
    v_ptr += first * stride_v + head * stride_vh + begins
    o_ptr += (first * NUM_HEADS + head) * VALUE_DIM + begins
    beta_ptr += first * NUM_HEADS + head
    kept_k_ptr += (slot * TOKENS * KEY_HEADS + key_head) * KEY_DIM
    kept_v_ptr += (slot * TOKENS * NUM_HEADS + head) * VALUE_DIM + begins

    SUM: gl.constexpr = sum_layout(TILE_V)
    ROWS: gl.constexpr = gl.SliceLayout(1, SUM)
    row = gl.arange(0, TOKENS, ROWS)
    key = gl.arange(0, KEY_DIM, ROWS)
    column = gl.expand_dims(gl.arange(0, TILE_V, gl.SliceLayout(0, SUM)), 0)
    # What is stored goes by whole lines.
    LINES: gl.constexpr = copy_layout(TILE_V, WARPS)
    line = gl.arange(0, TOKENS, gl.SliceLayout(1, LINES))
    line_column = gl.expand_dims(gl.arange(0, TILE_V, gl.SliceLayout(0, LINES)), 0)
    line_at = gl.expand_dims(line * (NUM_HEADS * VALUE_DIM), 1) + line_column

    k_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, KEY_DIM], _lines(KEY_DIM))
    q_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, KEY_DIM], _lines(KEY_DIM))
    v_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, TILE_V], _lines(TILE_V))
    r_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, TOKENS], _lines(TOKENS))
    t_tiles = r_tiles
    k_out_tiles = k_tiles
    if IS_DELTA:
        t_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, TOKENS], _lines(TOKENS))
    if BY_CHANNEL:
        k_out_tiles = gl.allocate_shared_memory(DTYPE, [STAGES, TOKENS, KEY_DIM], _lines(KEY_DIM))
    seen = gl.allocate_shared_memory(DTYPE, [KEY_DIM, TILE_V], _lines(TILE_V))
    x_tile = gl.allocate_shared_memory(DTYPE, [TOKENS, TILE_V], _lines(TILE_V))
    u_tile = gl.allocate_shared_memory(DTYPE, [TOKENS, TILE_V], _lines(TILE_V))

    state_at = (slot * NUM_HEADS + head) * KEY_DIM * VALUE_DIM + begins
    state_at = state_at + (gl.expand_dims(key * VALUE_DIM, 1) + column)
    has_state = start >= TOKENS
    if HAS_BEFORE:
        has_state = start >= 0
    state = gl.load(before_ptr + state_at, mask=has_state & (column < TILE_V), other=0.0)
    first_chunk, end = start // TOKENS, gl.cdiv(total, TOKENS)
    for ahead in gl.static_range(STAGES - 1):
        _copy_chunk(
            first_chunk + ahead, end, ahead, q_ptr, k_ptr, v_ptr, t_ptr, r_ptr, k_in_ptr, q_in_ptr,
            k_out_ptr, kept_k_ptr, number, head, start, total, stride_q, stride_k, stride_v,
            q_tiles, k_tiles, v_tiles, t_tiles, r_tiles, k_out_tiles, NUM_HEADS, KEY_HEADS,
            HAS_SLOTS, IS_DELTA, BY_CHANNEL, KEEPS_STATES,
        )  # fmt: skip
    for chunk in range(first_chunk, end):
        stage = (chunk - first_chunk) % STAGES
        pairs_at = ((number + chunk).to(gl.int64) * NUM_HEADS + head) * TOKENS
        position = chunk * TOKENS + row
        is_new = (position >= start) & (position < total)
        beta = gl.load(
            beta_ptr + (position - start).to(gl.int64) * NUM_HEADS, mask=is_new, other=0.0
        )
        if BY_CHANNEL:
            decay = gl.expand_dims(
                gl.exp2(gl.load(running_ptr + pairs_at // TOKENS * KEY_DIM + key)), 1
            )
        else:
            running = gl.load(running_ptr + pairs_at + row)
            last = gl.load(running_ptr + pairs_at + TOKENS - 1)
            into = gl.expand_dims(gl.exp2(running), 1)
            fades = gl.expand_dims(gl.exp2(last - running), 1)
            decay = gl.exp2(last)
        seen.store(state.to(DTYPE))
        async_copy.wait_group(STAGES - 2)
        _copy_chunk(
            chunk + STAGES - 1, end, (chunk - first_chunk + STAGES - 1) % STAGES, q_ptr, k_ptr,
            v_ptr, t_ptr, r_ptr, k_in_ptr, q_in_ptr, k_out_ptr, kept_k_ptr, number, head, start,
            total, stride_q, stride_k, stride_v, q_tiles, k_tiles, v_tiles, t_tiles, r_tiles,
            k_out_tiles, NUM_HEADS, KEY_HEADS, HAS_SLOTS, IS_DELTA, BY_CHANNEL, KEEPS_STATES,
        )  # fmt: skip
        fence_async_shared()
        zero = gl.zeros([TOKENS, TILE_V], gl.float32, SUM)
        k_tile, q_tile = k_tiles.index(stage), q_tiles.index(stage)
        if IS_DELTA:
            known = warpgroup_mma(k_tile, seen, zero, use_acc=False, is_async=True)
        if not KEEPS_STATES:
            o = warpgroup_mma(q_tile, seen, zero, use_acc=False, is_async=True)
        x = v_tiles.index(stage).load(SUM).to(gl.float32)
        if IS_DELTA:
            if KEEPS_STATES:
                known = warpgroup_mma_wait(0, deps=(known,))
            else:
                known = warpgroup_mma_wait(1, deps=(known,))
            if not BY_CHANNEL:
                known *= into
            x -= known
        x = (x * gl.expand_dims(beta, 1)).to(DTYPE)
        if HAS_SLOTS and chunk * TOKENS < start:
            is_kept = gl.expand_dims(position < start, 1)
            kept_at = gl.expand_dims(row * (NUM_HEADS * VALUE_DIM), 1) + column
            kept = gl.load(kept_v_ptr + kept_at, mask=is_kept & (column < TILE_V), other=0.0)
            x = gl.where(is_kept, kept, x)
        x_tile.store(x)
        fence_async_shared()
        partition_barrier()
        u = x
        if IS_DELTA:
            product = warpgroup_mma(
                t_tiles.index(stage), x_tile, zero, use_acc=False, is_async=True
            )
            if KEEPS_STATES:
                u = warpgroup_mma_wait(0, deps=(product,)).to(DTYPE)
            else:
                o = warpgroup_mma_wait(1, deps=(o,))
        else:
            if not KEEPS_STATES:
                o = warpgroup_mma_wait(0, deps=(o,))
        if not KEEPS_STATES:
            if not BY_CHANNEL:
                o *= into
            o = warpgroup_mma(r_tiles.index(stage), x_tile, o, is_async=True)
            if IS_DELTA:
                u = warpgroup_mma_wait(1, deps=(product,)).to(DTYPE)
        faded = u
        if not BY_CHANNEL:
            faded = (u.to(gl.float32) * fades).to(DTYPE)
        u_tile.store(faded)
        fence_async_shared()
        partition_barrier()
        after = state * decay
        left = k_tile
        if BY_CHANNEL:
            left = k_out_tiles.index(stage)
        after = warpgroup_mma(left.permute([1, 0]), u_tile, after, is_async=True)
        o_at = o_ptr + (chunk * TOKENS - start).to(gl.int64) * (NUM_HEADS * VALUE_DIM) + line_at
        line_position = chunk * TOKENS + line
        in_o = gl.expand_dims((line_position >= start) & (line_position < total), 1)
        in_o = in_o & (line_column < TILE_V)
        if KEEPS_STATES:
            at = states_ptr + pairs_at // TOKENS * (KEY_DIM * VALUE_DIM) + begins
            line_key = gl.arange(0, KEY_DIM, gl.SliceLayout(1, LINES))
            gl.store(at + (gl.expand_dims(line_key * VALUE_DIM, 1) + line_column), seen.load(LINES))
            gl.store(o_at, gl.convert_layout(u, LINES), mask=in_o)
        else:
            o = warpgroup_mma_wait(1, deps=(o,))
            o = (o * q_scale).to(DTYPE)
            gl.store(o_at, gl.convert_layout(o, LINES), mask=in_o)
        if HAS_SLOTS and (chunk + 1) * TOKENS > total:
            gl.store(kept_v_ptr + line_at, x_tile.load(LINES), mask=in_o)
        after = warpgroup_mma_wait(0, deps=(after,))
        if HAS_SLOTS:
            # What follows an open chunk begins with the state before it.
            if (chunk + 1) * TOKENS <= total:
                state = after
        else:
            state = after
        partition_barrier()
    async_copy.wait_group(0)
    if HAS_SLOTS:
        if total // TOKENS > start // TOKENS:
            gl.store(before_ptr + state_at, state)
    else:
        gl.store(after_ptr + state_at, state)


@gluon.jit
def _copy_chunk(
    chunk,
    end,
    stage,
    q_ptr,
    k_ptr,
    v_ptr,
    t_ptr,
    r_ptr,
    k_in_ptr,
    q_in_ptr,
    k_out_ptr,
    kept_k_ptr,
    number,
    head,
    start,
    total,
    stride_q,
    stride_k,
    stride_v,
    q_tiles,
    k_tiles,
    v_tiles,
    t_tiles,
    r_tiles,
    k_out_tiles,
    NUM_HEADS: gl.constexpr,
    KEY_HEADS: gl.constexpr,
    HAS_SLOTS: gl.constexpr,
    IS_DELTA: gl.constexpr,
    BY_CHANNEL: gl.constexpr,
    KEEPS_STATES: gl.constexpr,
):
    """Start to copy what a chunk needs, if there is one; it is a group of copies either way."""
    TOKENS: gl.constexpr = k_tiles.shape[1]
    KEY_DIM: gl.constexpr = k_tiles.shape[2]
    if chunk < end:
        position = chunk * TOKENS
        tile = (number + chunk).to(gl.int64) * NUM_HEADS + head
        if BY_CHANNEL:
            rows = tile * (TOKENS * KEY_DIM)
            _copy_tile(k_tiles.index(stage), k_in_ptr + rows)
            _copy_tile(k_out_tiles.index(stage), k_out_ptr + rows)
            if not KEEPS_STATES:
                _copy_tile(q_tiles.index(stage), q_in_ptr + rows)
        else:
            _copy_tokens(
                k_tiles.index(stage), k_ptr, stride_k, kept_k_ptr, KEY_HEADS * KEY_DIM, position,
                start, total, HAS_SLOTS,
            )  # fmt: skip
            if not KEEPS_STATES:
                _copy_tokens(
                    q_tiles.index(stage), q_ptr, stride_q, q_ptr, 0, position, start, total, False
                )
        _copy_tokens(v_tiles.index(stage), v_ptr, stride_v, v_ptr, 0, position, start, total, False)
        if IS_DELTA:
            _copy_tile(t_tiles.index(stage), t_ptr + tile * (TOKENS * TOKENS))
        if not KEEPS_STATES:
            _copy_tile(r_tiles.index(stage), r_ptr + tile * (TOKENS * TOKENS))
    async_copy.commit_group()
