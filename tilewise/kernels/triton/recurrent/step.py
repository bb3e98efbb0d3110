"""One token of the gated delta rule or Mamba-2's recurrence for each of many sequences.

what     the row of pairs.py and scan.py that the token has in its chunk, with the same sums; the
         others of the chunk lie in its slot: keys, decays, betas and X
grid     (sequences x heads, tiles of the columns of V)
program  computes T of the open chunk, and the token's columns of S, R and O transposed. A sequence
         of several tokens is a loop of one program over heads and tiles
traffic  S read once, written once in 64 tokens; keys of the open chunk read for each head
numerics those of pairs.py and scan.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.tile import LOG2E
from tilewise.kernels.triton.recurrent.pairs import (
    decays_between,
    inverse_of,
    pairs_by_channel,
    solved,
)
from tilewise.kernels.triton.recurrent.rows import load_numbers, load_rows, zero_rows

_COLUMNS = tl.constexpr(16)  # the fewest of a product: the query, the key, and zeros


@triton.jit
def _token(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    o_ptr,
    state_ptr,
    kept_k_ptr,
    kept_g_ptr,
    kept_v_ptr,
    kept_beta_ptr,
    position,
    start,
    stride_q,
    stride_k,
    stride_v,
    column,
    q_scale,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    key, row, place = tl.arange(0, TILE_K), tl.arange(0, TOKENS), position % TOKENS
    chunk = position // TOKENS
    in_state = (key[:, None] < KEY_DIM) & (column[None, :] < VALUE_DIM)
    state_at = state_ptr + key[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(state_at, mask=in_state & (chunk > 0), other=0.0)
    positions = chunk * TOKENS + row
    k = load_rows(
        k_ptr,
        kept_k_ptr,
        positions,
        start,
        position + 1,
        stride_k,
        KEY_HEADS * KEY_DIM,
        key,
        KEY_DIM,
        True,
        TOKENS,
    ).to(OPERAND)
    beta = load_numbers(
        beta_ptr, kept_beta_ptr, positions, start, position + 1, NUM_HEADS, True, TOKENS
    )
    # The first of few columns is that of the query, the second that of the key.
    which = tl.arange(0, _COLUMNS)
    at = (position - start).to(tl.int64)
    inside = key[None, :] < KEY_DIM
    pair = tl.load(
        q_ptr + at * stride_q + key[None, :] + which[:, None] * 0,
        mask=inside & (which[:, None] == 0),
        other=0.0,
    )
    pair += tl.load(
        k_ptr + at * stride_k + key[None, :] + which[:, None] * 0,
        mask=inside & (which[:, None] == 1),
        other=0.0,
    )
    v = tl.load(v_ptr + at * stride_v + column, mask=column < VALUE_DIM, other=0.0)
    kept_at = kept_v_ptr + row[:, None] * (NUM_HEADS * VALUE_DIM) + column[None, :]
    is_kept = (row[:, None] < place) & (column[None, :] < VALUE_DIM)
    x = tl.load(kept_at, mask=is_kept, other=0.0)
    seen = tl.trans(state.to(OPERAND))
    own = row == place
    beta_now = tl.sum(tl.where(own, beta, 0.0), 0)
    if BY_CHANNEL:
        g = load_rows(
            g_ptr,
            kept_g_ptr,
            positions,
            start,
            position + 1,
            NUM_HEADS * KEY_DIM,
            NUM_HEADS * KEY_DIM,
            key,
            KEY_DIM,
            True,
            TOKENS,
        )
        running = tl.cumsum(g * LOG2E, 0)
        query = tl.sum(tl.where(which[:, None] == 0, pair.to(tl.float32), 0.0), 0)
        query = tl.where(own[:, None], query[None, :], 0.0).to(OPERAND)
        a, p = pairs_by_channel(
            query,
            k,
            running,
            k_ptr,
            kept_k_ptr,
            g_ptr,
            kept_g_ptr,
            positions,
            start,
            position + 1,
            stride_k,
            NUM_HEADS,
            KEY_HEADS,
            KEY_DIM,
            TILE_K,
            TOKENS,
            True,
            PRECISION,
        )
        t, r = solved(a, p, beta, TOKENS, IS_DELTA, OPERAND, PRECISION)
        r = tl.sum(tl.where(own[:, None], r.to(tl.float32), 0.0), 0)
        r = tl.where(which[None, :] == 0, r[:, None], 0.0).to(OPERAND)
        now = tl.sum(tl.where(own[:, None], running, 0.0), 0)
        pair = pair.to(tl.float32) * tl.math.exp2(now)[None, :]
        o = tl.dot(seen, tl.trans(pair.to(OPERAND)), input_precision=PRECISION)
    else:
        g = load_numbers(g_ptr, kept_g_ptr, positions, start, position + 1, NUM_HEADS, True, TOKENS)
        running = tl.cumsum(g * LOG2E, 0)
        now = tl.sum(tl.where(own, running, 0.0), 0)
        p = tl.dot(k, tl.trans(pair.to(OPERAND)), input_precision=PRECISION)
        p *= tl.math.exp2(tl.where(row > place, float("-inf"), now - running))[:, None]
        r = p.to(OPERAND)
        t = r
        if IS_DELTA:
            a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decays_between(running, TOKENS)
            a = tl.where(row[:, None] == row[None, :], 0.0, a * beta[:, None])
            t = inverse_of(a, TOKENS, PRECISION).to(OPERAND)
            r = tl.dot(tl.trans(t), r, input_precision=PRECISION).to(OPERAND)
        o = tl.dot(seen, tl.trans(pair.to(OPERAND)), input_precision=PRECISION) * tl.math.exp2(now)
    new = v.to(tl.float32)
    if IS_DELTA:
        new -= tl.sum(tl.where(which[None, :] == 1, o, 0.0), 1)
    new = (new * beta_now).to(v_ptr.dtype.element_ty)
    x = tl.trans(tl.where(own[:, None], new[None, :], x).to(OPERAND))
    o = tl.dot(x, r, o, input_precision=PRECISION)
    o = tl.sum(tl.where(which[None, :] == 0, o, 0.0), 1) * q_scale
    tl.store(
        o_ptr + at * (NUM_HEADS * VALUE_DIM) + column,
        o.to(o_ptr.dtype.element_ty),
        mask=column < VALUE_DIM,
    )
    tl.store(kept_v_ptr + place * (NUM_HEADS * VALUE_DIM) + column, new, mask=column < VALUE_DIM)
    if place == TOKENS - 1:
        u = x
        if IS_DELTA:
            u = tl.dot(x, tl.trans(t), input_precision=PRECISION).to(OPERAND)
        state = tl.load(state_at, mask=in_state & (chunk > 0), other=0.0)
        if BY_CHANNEL:
            k_out = (k.to(tl.float32) * tl.math.exp2(now[None, :] - running)).to(OPERAND)
            decay = tl.math.exp2(now)[None, :]
        else:
            u = (u * tl.math.exp2(now - running)[None, :]).to(OPERAND)
            k_out, decay = k, tl.math.exp2(now)
        after = tl.dot(u, k_out, tl.trans(state) * decay, input_precision=PRECISION)
        tl.store(state_at, tl.trans(after), mask=in_state)


@triton.jit(do_not_specialize=["q_scale", "num_rows", "num_sequences"])
def step_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    o_ptr,
    state_ptr,
    kept_k_ptr,
    kept_g_ptr,
    kept_v_ptr,
    kept_beta_ptr,
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
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, leader = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    first, end = tl.load(edges_ptr + sequence), tl.load(edges_ptr + sequence + 1)
    slot, start = tl.load(slots_ptr + sequence), tl.load(starts_ptr + sequence).to(tl.int32)
    group: tl.constexpr = NUM_HEADS // KEY_HEADS
    tiles: tl.constexpr = (VALUE_DIM + TILE_V - 1) // TILE_V
    column = tl.arange(0, TILE_V)
    columns = tl.program_id(1) * TILE_V + column
    if sequence == num_sequences - 1:  # rows that no sequence has
        zero_rows(o_ptr, end, num_rows, leader, columns, NUM_HEADS, VALUE_DIM, TOKENS)
    if slot < 0:
        zero_rows(o_ptr, first, end, leader, columns, NUM_HEADS, VALUE_DIM, TOKENS)
        return
    length = end - first
    # Tokens overwrite keys of the chunk before that other heads may still read: of several tokens
    # one program computes all heads that share keys.
    count = 1
    if length > 1:
        count = group * tiles
        if (leader % group != 0) | (tl.program_id(1) != 0):
            count = 0
    key_head, base = leader // group, first.to(tl.int64)
    q_ptr += base * stride_q + key_head * stride_qh
    k_ptr += base * stride_k + key_head * stride_kh
    kept_k_ptr += (slot * TOKENS * KEY_HEADS + key_head) * KEY_DIM
    for index in range(0, count):
        head = leader + index // tiles
        tile = tl.program_id(1) + index % tiles
        gate, kept_gate = base * NUM_HEADS + head, slot * TOKENS * NUM_HEADS + head
        for token in range(0, length):
            tl.debug_barrier()
            _token(
                q_ptr,
                k_ptr,
                v_ptr + base * stride_v + head * stride_vh,
                g_ptr + gate * (KEY_DIM if BY_CHANNEL else 1),
                beta_ptr + gate,
                o_ptr + gate * VALUE_DIM,
                state_ptr + (slot * NUM_HEADS + head) * KEY_DIM * VALUE_DIM,
                kept_k_ptr,
                kept_g_ptr + kept_gate * (KEY_DIM if BY_CHANNEL else 1),
                kept_v_ptr + kept_gate * VALUE_DIM,
                kept_beta_ptr + kept_gate,
                start + token,
                start,
                stride_q,
                stride_k,
                stride_v,
                tile * TILE_V + column,
                q_scale,
                NUM_HEADS,
                KEY_HEADS,
                KEY_DIM,
                VALUE_DIM,
                TILE_K,
                TOKENS,
                IS_DELTA,
                BY_CHANNEL,
                OPERAND,
                PRECISION,
            )
    tl.debug_barrier()
    key = tl.arange(0, TILE_K)
    opened = (start + length) // TOKENS * TOKENS
    for position in range(tl.maximum(start, opened), start + length):
        at, place = (position - start).to(tl.int64), position % TOKENS
        if (tl.program_id(1) == 0) & (leader % group == 0):
            k = tl.load(k_ptr + at * stride_k + key, mask=key < KEY_DIM, other=0.0)
            tl.store(kept_k_ptr + place * (KEY_HEADS * KEY_DIM) + key, k, mask=key < KEY_DIM)
        if tl.program_id(1) == 0:
            for index in range(0, (count + tiles - 1) // tiles):
                new = (base + at) * NUM_HEADS + leader + index
                kept = (slot * TOKENS + place) * NUM_HEADS + leader + index
                if BY_CHANNEL:
                    g = tl.load(g_ptr + new * KEY_DIM + key, mask=key < KEY_DIM, other=0.0)
                    tl.store(kept_g_ptr + kept * KEY_DIM + key, g, mask=key < KEY_DIM)
                else:
                    tl.store(kept_g_ptr + kept, tl.load(g_ptr + new))
                tl.store(kept_beta_ptr + kept, tl.load(beta_ptr + new))
