"""The gated delta rule and Mamba-2's recurrence, in chunks of 64 tokens at fixed places.

what     o of tokens after a state S at the start of a chunk; with E_ts the decay between tokens s
         and t of a chunk and E_t that since its start,
             (1 + beta A) U = beta (V - (E K) S), A = strictly lower (K K^T E), or U = beta V
             O = q_scale ((E Q) S + lower (Q K^T E) U),  S' = E_64 S + (E_64 / E K)^T U
grid     (sequences x heads, tiles of the columns of V)
program  goes through the chunks of its sequence with TILE_V columns of S in registers. A step
         begins with the chunk that its slot holds open, whose tokens it computes again, so that a
         token decoded alone is a row of the tiles that it would be in as part of a prompt
traffic  q, k, v read once for each tile of columns, o written once; a step reads S and the tokens
         of the open chunk, and writes S when a chunk is full
numerics float32. Every product is of a whole tile: the rows of later tokens are zeros, and a row's
         sums have one order. The inverse of (1 + beta A) is built from blocks of 1, 2, 4 ... 32
         tokens, T - T L T with L what lies between two blocks, in three passes of TF32
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.launch import launch_now
from tilewise.kernels.spec import CHUNK, RecurrentSpec, RecurrentStates
from tilewise.kernels.triton.attention.tile import LOG2E
from tilewise.kernels.triton.elements import why_not as why_not_elements

MOST_KEY_DIM = 256  # a state's tile of this times 32 columns is half of a program's registers
_STATE_ELEMENTS = 8192  # of a program: 64 registers of each of 128 threads
_COPIERS = 16  # programs of a sequence that copy the tokens of its open chunk
_COPY = 1024  # elements at once
_SUB = tl.constexpr(16)  # tokens between which decays by channel are multiplied out one by one


def why_not(spec: RecurrentSpec) -> str | None:
    """Return why this kernel cannot run `spec`, or None if it can."""
    if spec.keeps == "updates":
        return "states must keep tokens, got states that keep updates"
    if spec.key_dim > MOST_KEY_DIM:
        return f"key_dim must be at most {MOST_KEY_DIM}, got {spec.key_dim}"
    reason = why_not_elements(spec)
    if reason is None and not device.interpreting():
        arch = device.arch_of(torch.device("cuda"))
        if arch // 10 == 10:  # Triton 3.7.1 makes an empty kernel of the delta rule
            return f"needs compute capability 8.0 to 9.0 or 12.0, got {arch // 10}.{arch % 10}"
    return reason


@triton.jit
def _load_rows(
    new_ptr,
    kept_ptr,
    position,
    valid,
    start,
    total,
    stride_new,
    stride_kept,
    column,
    width,
    HAS_SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Load rows of tokens at positions of a sequence, new ones or those of its open chunk."""
    inside = column[None, :] < width
    is_new = valid & (position >= start) & (position < total)
    at = new_ptr + ((position - start).to(tl.int64) * stride_new)[:, None] + column[None, :]
    rows = tl.load(at, mask=is_new[:, None] & inside, other=0.0)
    if HAS_SLOTS:
        is_kept = valid & (position < start)
        at = kept_ptr + ((position % TOKENS) * stride_kept)[:, None] + column[None, :]
        kept = tl.load(at, mask=is_kept[:, None] & inside, other=0.0)
        rows = tl.where(is_kept[:, None], kept.to(rows.dtype), rows)
    return rows


@triton.jit
def _load_numbers(
    new_ptr,
    kept_ptr,
    position,
    start,
    total,
    stride,
    HAS_SLOTS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Load a number of each token at positions of a sequence."""
    is_new = (position >= start) & (position < total)
    new = tl.load(new_ptr + (position - start).to(tl.int64) * stride, mask=is_new, other=0.0)
    if HAS_SLOTS:
        is_kept = position < start
        kept = tl.load(kept_ptr + (position % TOKENS) * stride, mask=is_kept, other=0.0)
        new = tl.where(is_kept, kept, new)
    return new


@triton.jit
def _inverse(lower, TOKENS: tl.constexpr):
    """Return the inverse of 1 + a strictly lower triangular tile."""
    row, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    # The blocks of one token are inverted; each pair of blocks becomes one.
    between = tl.where((row // 2 == column // 2) & (row != column), lower, 0.0)
    inverse -= between
    for level in tl.static_range(1, 6):
        size = 1 << level
        is_between = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
        between = tl.where(is_between, lower, 0.0)
        between = tl.dot(inverse, between, input_precision="tf32x3")
        inverse -= tl.dot(between, inverse, input_precision="tf32x3")
    return inverse


@triton.jit
def _product(tokens, wide, PRECISION: tl.constexpr):
    """Return tokens times a float32 tile, which bfloat16 tokens see as the sum of two of theirs."""
    if tokens.dtype == tl.bfloat16:
        high = wide.to(tl.bfloat16)
        low = (wide - high.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(tokens, high, tl.dot(tokens, low))
    return tl.dot(tokens.to(tl.float32), wide, input_precision=PRECISION)


@triton.jit
def _chunks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    o_ptr,
    before_ptr,
    after_ptr,
    kept_k_ptr,
    kept_g_ptr,
    kept_v_ptr,
    kept_beta_ptr,
    edges_ptr,
    slots_ptr,
    starts_ptr,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    q_scale,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    IS_DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    task = tl.program_id(0)
    sequence, head = task // NUM_HEADS, task % NUM_HEADS
    first = tl.load(edges_ptr + sequence).to(tl.int64)
    total = (tl.load(edges_ptr + sequence + 1) - first).to(tl.int32)
    slot = sequence.to(tl.int64)
    start = 0
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + sequence)
        start = tl.load(starts_ptr + sequence).to(tl.int32)
        if slot < 0 or total <= 0:
            return
        total += start
    key_head = head // (NUM_HEADS // KEY_HEADS)
    key, column = tl.arange(0, TILE_K), tl.program_id(1) * TILE_V + tl.arange(0, TILE_V)
    row = tl.arange(0, TOKENS)
    g_width: tl.constexpr = KEY_DIM if BY_CHANNEL else 1
    q_ptr += first * stride_q + key_head * stride_qh
    k_ptr += first * stride_k + key_head * stride_kh
    v_ptr += first * stride_v + head * stride_vh
    o_ptr += (first * NUM_HEADS + head) * VALUE_DIM
    g_ptr += (first * NUM_HEADS + head) * g_width
    beta_ptr += first * NUM_HEADS + head
    kept_k_ptr += (slot * TOKENS * KEY_HEADS + key_head) * KEY_DIM
    kept_v_ptr += (slot * TOKENS * NUM_HEADS + head) * VALUE_DIM
    kept_g_ptr += (slot * TOKENS * NUM_HEADS + head) * g_width
    kept_beta_ptr += slot * TOKENS * NUM_HEADS + head
    state_at = (slot * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    state_at += key[:, None] * VALUE_DIM + column[None, :]
    in_state = (key[:, None] < KEY_DIM) & (column[None, :] < VALUE_DIM)
    has_state = start >= TOKENS
    if HAS_BEFORE:
        has_state = True
    state = tl.load(before_ptr + state_at, mask=in_state & has_state, other=0.0)
    is_later = row[:, None] < row[None, :]
    last_row = row == TOKENS - 1
    for chunk in range(start // TOKENS, tl.cdiv(total, TOKENS)):
        position = chunk * TOKENS + row
        everywhere = row >= 0
        k = _load_rows(
            k_ptr,
            kept_k_ptr,
            position,
            everywhere,
            start,
            total,
            stride_k,
            KEY_HEADS * KEY_DIM,
            key,
            KEY_DIM,
            HAS_SLOTS,
            TOKENS,
        )
        v = _load_rows(
            v_ptr,
            kept_v_ptr,
            position,
            everywhere,
            start,
            total,
            stride_v,
            NUM_HEADS * VALUE_DIM,
            column,
            VALUE_DIM,
            HAS_SLOTS,
            TOKENS,
        )
        # Those of tokens that were there before are not asked for again.
        q = _load_rows(
            q_ptr,
            q_ptr,
            position,
            everywhere,
            start,
            total,
            stride_q,
            0,
            key,
            KEY_DIM,
            False,
            TOKENS,
        )
        beta = _load_numbers(
            beta_ptr, kept_beta_ptr, position, start, total, NUM_HEADS, HAS_SLOTS, TOKENS
        )
        if BY_CHANNEL:
            g = _load_rows(
                g_ptr,
                kept_g_ptr,
                position,
                everywhere,
                start,
                total,
                NUM_HEADS * KEY_DIM,
                NUM_HEADS * KEY_DIM,
                key,
                KEY_DIM,
                HAS_SLOTS,
                TOKENS,
            )
            running = tl.cumsum(g * LOG2E, 0)
            last = tl.sum(tl.where(last_row[:, None], running, 0.0), 0)
            into = tl.math.exp2(running)
            decay = tl.math.exp2(last)[:, None]
            a = tl.zeros((TOKENS, TOKENS), tl.float32)
            p = tl.zeros((TOKENS, TOKENS), tl.float32)
            # Tokens of earlier blocks: both decays are from or to the block's start, at most 1.
            for block in tl.static_range(1, TOKENS // _SUB):
                begins = block * _SUB
                anchor = tl.sum(tl.where((row == begins - 1)[:, None], running, 0.0), 0)[None, :]
                to_anchor = tl.math.exp2(tl.minimum(running - anchor, 0.0))
                from_anchor = tl.math.exp2(tl.minimum(anchor - running, 0.0))
                is_earlier = (row < begins)[:, None]
                earlier = tl.where(is_earlier, k.to(tl.float32) * from_anchor, 0.0)
                is_block = (row // _SUB == block)[:, None]
                later_k = tl.where(is_block, k.to(tl.float32) * to_anchor, 0.0)
                later_q = tl.where(is_block, q.to(tl.float32) * to_anchor, 0.0)
                a += tl.dot(later_k, tl.trans(earlier), input_precision=PRECISION)
                p += tl.dot(later_q, tl.trans(earlier), input_precision=PRECISION)
            # Tokens of the same block, those `back` tokens apart together.
            between = tl.zeros((TOKENS, TILE_K), tl.float32)
            for back in range(0, _SUB):
                in_block = row % _SUB >= back
                if back > 0:
                    between += LOG2E * _load_rows(
                        g_ptr,
                        kept_g_ptr,
                        position - back + 1,
                        in_block,
                        start,
                        total,
                        NUM_HEADS * KEY_DIM,
                        NUM_HEADS * KEY_DIM,
                        key,
                        KEY_DIM,
                        HAS_SLOTS,
                        TOKENS,
                    )
                before = _load_rows(
                    k_ptr,
                    kept_k_ptr,
                    position - back,
                    in_block,
                    start,
                    total,
                    stride_k,
                    KEY_HEADS * KEY_DIM,
                    key,
                    KEY_DIM,
                    HAS_SLOTS,
                    TOKENS,
                )
                faded = before.to(tl.float32) * tl.math.exp2(between)
                is_pair = (row[:, None] - row[None, :] == back) & in_block[:, None]
                a += tl.where(is_pair, tl.sum(k.to(tl.float32) * faded, 1)[:, None], 0.0)
                p += tl.where(is_pair, tl.sum(q.to(tl.float32) * faded, 1)[:, None], 0.0)
        else:
            g = _load_numbers(
                g_ptr, kept_g_ptr, position, start, total, NUM_HEADS, HAS_SLOTS, TOKENS
            )
            running = tl.cumsum(g * LOG2E, 0)
            last = tl.sum(tl.where(last_row, running, 0.0), 0)
            decay = tl.math.exp2(last)
            logs = tl.where(is_later, float("-inf"), running[:, None] - running[None, :])
            decays = tl.math.exp2(logs)
            a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decays
            p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decays
        update = v.to(tl.float32)
        if IS_DELTA:
            a = tl.where(row[:, None] == row[None, :], 0.0, a * beta[:, None])
            inverse = _inverse(a, TOKENS)
            if BY_CHANNEL:
                update -= tl.dot(k.to(tl.float32) * into, state, input_precision=PRECISION)
            else:
                seen = _product(k, state, PRECISION)
                update -= seen * tl.math.exp2(running)[:, None]
            update = tl.dot(inverse, update * beta[:, None], input_precision=PRECISION)
        else:
            update *= beta[:, None]
        if BY_CHANNEL:
            o = tl.dot(q.to(tl.float32) * into, state, input_precision=PRECISION)
        else:
            o = _product(q, state, PRECISION) * tl.math.exp2(running)[:, None]
        o += tl.dot(p, update, input_precision=PRECISION)
        at = o_ptr + (position - start).to(tl.int64)[:, None] * (NUM_HEADS * VALUE_DIM)
        is_new = (position >= start) & (position < total)
        in_o = is_new[:, None] & (column[None, :] < VALUE_DIM)
        tl.store(at + column[None, :], (o * q_scale).to(o_ptr.dtype.element_ty), mask=in_o)
        # What follows an open chunk begins with the state before it.
        if not HAS_SLOTS or (chunk + 1) * TOKENS <= total:
            state *= decay
            if BY_CHANNEL:
                keys_out = k.to(tl.float32) * tl.math.exp2(last[None, :] - running)
                state += tl.dot(tl.trans(keys_out), update, input_precision=PRECISION)
            else:
                update *= tl.math.exp2(last - running)[:, None]
                state += _product(tl.trans(k), update, PRECISION)
    if HAS_SLOTS:
        is_full = total // TOKENS > start // TOKENS
        tl.store(before_ptr + state_at, state, mask=in_state & is_full)
    else:
        tl.store(after_ptr + state_at, state, mask=in_state)


@triton.jit
def _copy_row(
    new_ptr, kept_ptr, stride_head, HEADS: tl.constexpr, DIM: tl.constexpr, COPY: tl.constexpr
):
    """Copy a row of HEADS x DIM elements."""
    for begins in range(0, HEADS * DIM, COPY):
        index = begins + tl.arange(0, COPY)
        inside = index < HEADS * DIM
        at = (index // DIM) * stride_head + index % DIM
        tl.store(kept_ptr + index, tl.load(new_ptr + at, mask=inside), mask=inside)


@triton.jit
def _keep_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    kept_k_ptr,
    kept_g_ptr,
    kept_v_ptr,
    kept_beta_ptr,
    edges_ptr,
    slots_ptr,
    starts_ptr,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    G_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COPY: tl.constexpr,
):
    """Copy the tokens of each sequence's open chunk to its slot, after all have read it."""
    sequence = tl.program_id(0)
    first = tl.load(edges_ptr + sequence).to(tl.int64)
    count = (tl.load(edges_ptr + sequence + 1) - first).to(tl.int32)
    slot, start = tl.load(slots_ptr + sequence), tl.load(starts_ptr + sequence).to(tl.int32)
    if slot < 0:
        return
    opened = (start + count) // TOKENS * TOKENS
    begins = tl.maximum(start, opened)
    for position in range(begins + tl.program_id(1), start + count, tl.num_programs(1)):
        new, kept = first + position - start, slot * TOKENS + position - opened
        _copy_row(
            k_ptr + new * stride_k,
            kept_k_ptr + kept * (KEY_HEADS * KEY_DIM),
            stride_kh,
            KEY_HEADS,
            KEY_DIM,
            COPY,
        )
        _copy_row(
            v_ptr + new * stride_v,
            kept_v_ptr + kept * (NUM_HEADS * VALUE_DIM),
            stride_vh,
            NUM_HEADS,
            VALUE_DIM,
            COPY,
        )
        g_row: tl.constexpr = NUM_HEADS * G_WIDTH
        _copy_row(g_ptr + new * g_row, kept_g_ptr + kept * g_row, G_WIDTH, NUM_HEADS, G_WIDTH, COPY)
        _copy_row(
            beta_ptr + new * NUM_HEADS, kept_beta_ptr + kept * NUM_HEADS, 1, NUM_HEADS, 1, COPY
        )


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    edges: Tensor,
    *,
    q_scale: float,
    is_delta: bool,
) -> tuple[Tensor, Tensor]:
    """Return o (T, H, V) and the states (N, H, K, V) after whole sequences, see `ops.gated_delta`.

    Args:
        edges: int32 (N + 1,), the first row of each sequence, and the end of the last.
    """
    shape = (edges.shape[0] - 1, v.shape[1], k.shape[2], v.shape[2])
    after = torch.empty(shape, dtype=torch.float32, device=v.device)
    before = None if initial_state is None else initial_state.contiguous()
    o = _run(q, k, v, g, beta, before, after, None, edges, edges, edges, q_scale, is_delta)
    return o, after


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: RecurrentStates,
    slots: Tensor,
    starts: Tensor,
    edges: Tensor,
    *,
    q_scale: float,
    is_delta: bool,
) -> Tensor:
    """Return o (T, H, V) of tokens after those that slots hold, and take them into the slots.

    Args:
        slots, starts: int64 (N,), see `ops.gated_delta_step`.
        edges: as in `launch`.
    """
    state = states.state
    o = _run(q, k, v, g, beta, state, state, states, edges, slots, starts, q_scale, is_delta)
    key_heads, key_dim, num_heads, value_dim = *k.shape[1:], *v.shape[1:]
    if o.numel() == 0 or edges.shape[0] < 2:
        return o
    launch_now(
        _keep_kernel,
        (edges.shape[0] - 1, _COPIERS),
        k,
        v,
        g.contiguous(),
        beta.contiguous(),
        *states[1:],
        edges,
        slots,
        starts,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        NUM_HEADS=num_heads,
        KEY_HEADS=key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        G_WIDTH=key_dim if g.dim() == 3 else 1,
        TOKENS=CHUNK,
        COPY=_COPY,
        num_warps=8,
    )
    return o


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    before: Tensor | None,
    after: Tensor,
    states: RecurrentStates | None,
    edges: Tensor,
    slots: Tensor,
    starts: Tensor,
    q_scale: float,
    is_delta: bool,
) -> Tensor:
    key_heads, key_dim, num_heads, value_dim = *k.shape[1:], *v.shape[1:]
    # Rows that no sequence has, and those of sequences without a slot, are 0.
    o = torch.zeros(v.shape, dtype=v.dtype, device=v.device)
    if after.numel() == 0 or edges.shape[0] < 2:
        return o
    tile_k = max(16, triton.next_power_of_2(key_dim))
    tile_v = max(16, min(64, triton.next_power_of_2(value_dim), _STATE_ELEMENTS // tile_k))
    kept = (k, g, v, beta) if states is None else states[1:]
    launch_now(
        _chunks_kernel,
        ((edges.shape[0] - 1) * num_heads, triton.cdiv(value_dim, tile_v)),
        q,
        k,
        v,
        g.contiguous(),
        beta.contiguous(),
        o,
        after if before is None else before,
        after,
        *kept,
        edges,
        slots,
        starts,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        q_scale,
        NUM_HEADS=num_heads,
        KEY_HEADS=key_heads,
        KEY_DIM=key_dim,
        VALUE_DIM=value_dim,
        TILE_K=tile_k,
        TILE_V=tile_v,
        TOKENS=CHUNK,
        HAS_SLOTS=states is not None,
        HAS_BEFORE=before is not None and states is None,
        IS_DELTA=is_delta,
        BY_CHANNEL=g.dim() == 3,
        PRECISION="tf32x3" if v.dtype == torch.float32 else "tf32",
        num_warps=8,
        num_stages=1,
    )
    return o
