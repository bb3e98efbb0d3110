"""One token of the gated delta rule or Mamba-2's recurrence for each of many sequences.

what     the row of pairs.py and scan.py that the token has in its chunk, with the same sums; the
         others of the chunk lie in its slot: keys, decays, betas and X
grid     (sequences x heads, groups of tiles of the columns of V)
program  computes T and R of the open chunk once, then the token's row of each of its tiles. A
         sequence of several tokens is a loop of one program over heads, tokens and tiles
traffic  S read once, written once in 64 tokens; keys of the open chunk read for each program
numerics those of pairs.py and scan.py: products have their shapes, and all rows but the token's are
         zeros, since no other product is known to add up in their order
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.tile import LOG2E
from tilewise.kernels.triton.recurrent.pairs import (
    decays_between,
    pairs_by_channel,
    solved,
)
from tilewise.kernels.triton.recurrent.rows import load_numbers, load_rows, zero_rows


@triton.jit
def _row_of(tile, row, which):
    """Return one row of a tile, (columns,)."""
    return tl.sum(tl.where((row == which)[:, None], tile, 0.0), 0)


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
    first_tile,
    end_tile,
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
    """Compute o of a token and keep its X, for tiles of V from `first_tile` to `end_tile`."""
    key, row, place = tl.arange(0, TILE_K), tl.arange(0, TOKENS), position % TOKENS
    chunk = position // TOKENS
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
    # The first of its rows is the query, the second the key.
    at = (position - start).to(tl.int64)
    inside = key[None, :] < KEY_DIM
    pair_at = tl.where(row == 0, q_ptr + at * stride_q, k_ptr + at * stride_k)
    pair = tl.load(pair_at[:, None] + key[None, :], mask=inside & (row < 2)[:, None], other=0.0)
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
        query = tl.where(own[:, None], _row_of(pair.to(tl.float32), row, 0)[None, :], 0.0)
        a, p = pairs_by_channel(
            query.to(OPERAND),
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
        now = _row_of(running, row, place)
        pair = (pair.to(tl.float32) * tl.math.exp2(now)[None, :]).to(OPERAND)
        r = tl.where((row == 0)[:, None], _row_of(r.to(tl.float32), row, place)[None, :], 0.0)
        k_out = (k.to(tl.float32) * tl.math.exp2(now[None, :] - running)).to(OPERAND)
        decay = tl.math.exp2(now)[:, None]
    else:
        g = load_numbers(g_ptr, kept_g_ptr, positions, start, position + 1, NUM_HEADS, True, TOKENS)
        running = tl.cumsum(g * LOG2E, 0)
        now = tl.sum(tl.where(own, running, 0.0), 0)
        pair, k_out = pair.to(OPERAND), k
        p = tl.dot(pair, tl.trans(k), input_precision=PRECISION)
        p *= tl.math.exp2(tl.where(row > place, float("-inf"), now - running))[None, :]
        p = tl.where((row == 0)[:, None], p, 0.0)
        a = p
        if IS_DELTA:
            a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decays_between(running, TOKENS)
        t, r = solved(a, p, beta, TOKENS, IS_DELTA, OPERAND, PRECISION)
        decay = tl.math.exp2(now)
    r = r.to(OPERAND)
    for tile in range(first_tile, end_tile):
        column = tile * TILE_V + tl.arange(0, TILE_V)
        in_state = (key[:, None] < KEY_DIM) & (column[None, :] < VALUE_DIM)
        state_at = state_ptr + key[:, None] * VALUE_DIM + column[None, :]
        state = tl.load(state_at, mask=in_state & (chunk > 0), other=0.0)
        v = tl.load(v_ptr + at * stride_v + column, mask=column < VALUE_DIM, other=0.0)
        kept_at = kept_v_ptr + row[:, None] * (NUM_HEADS * VALUE_DIM) + column[None, :]
        is_kept = (row[:, None] < place) & (column[None, :] < VALUE_DIM)
        x = tl.load(kept_at, mask=is_kept, other=0.0)
        o = tl.dot(pair, state.to(OPERAND), input_precision=PRECISION)
        if not BY_CHANNEL:
            o *= decay
        new = v.to(tl.float32)
        if IS_DELTA:
            new -= _row_of(o, row, 1)
        new = (new * beta_now).to(v_ptr.dtype.element_ty)
        x = tl.where(own[:, None], new[None, :], x).to(OPERAND)
        o = tl.dot(r, x, o, input_precision=PRECISION)
        o = _row_of(o, row, 0) * q_scale
        tl.store(
            o_ptr + at * (NUM_HEADS * VALUE_DIM) + column,
            o.to(o_ptr.dtype.element_ty),
            mask=column < VALUE_DIM,
        )
        kept_at = kept_v_ptr + place * (NUM_HEADS * VALUE_DIM) + column
        tl.store(kept_at, new, mask=column < VALUE_DIM)
    if place == TOKENS - 1:
        tl.debug_barrier()
        # A loop of its own: ptxas loses the place of operands of products that a loop may skip.
        for tile in range(first_tile, end_tile):
            column = tile * TILE_V + tl.arange(0, TILE_V)
            in_state = (key[:, None] < KEY_DIM) & (column[None, :] < VALUE_DIM)
            state_at = state_ptr + key[:, None] * VALUE_DIM + column[None, :]
            kept_at = kept_v_ptr + row[:, None] * (NUM_HEADS * VALUE_DIM) + column[None, :]
            in_v = (row >= 0)[:, None] & (column[None, :] < VALUE_DIM)
            u = tl.load(kept_at, mask=in_v, other=0.0).to(OPERAND)
            if IS_DELTA:
                u = tl.dot(t, u, input_precision=PRECISION).to(OPERAND)
            if not BY_CHANNEL:
                u = (u * tl.math.exp2(now - running)[:, None]).to(OPERAND)
            state = tl.load(state_at, mask=in_state & (chunk > 0), other=0.0)
            after = tl.dot(tl.trans(k_out), u, state * decay, input_precision=PRECISION)
            tl.store(state_at, after, mask=in_state)


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
    TILES: tl.constexpr,
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
    first_tile = tl.program_id(1) * TILES
    end_tile = tl.minimum(first_tile + TILES, tiles)
    if sequence == num_sequences - 1:  # rows that no sequence has
        for tile in range(first_tile, end_tile):
            column = tile * TILE_V + tl.arange(0, TILE_V)
            zero_rows(o_ptr, end, num_rows, leader, column, NUM_HEADS, VALUE_DIM, TOKENS)
    if slot < 0:
        for tile in range(first_tile, end_tile):
            column = tile * TILE_V + tl.arange(0, TILE_V)
            zero_rows(o_ptr, first, end, leader, column, NUM_HEADS, VALUE_DIM, TOKENS)
        return
    length = end - first
    # Tokens overwrite keys of the chunk before that other heads may still read: of several tokens
    # one program computes all heads that share keys.
    count = 1
    if length > 1:
        count = group
        end_tile = tiles
        if (leader % group != 0) | (tl.program_id(1) != 0):
            count = 0
    key_head, base = leader // group, first.to(tl.int64)
    q_ptr += base * stride_q + key_head * stride_qh
    k_ptr += base * stride_k + key_head * stride_kh
    kept_k_ptr += (slot * TOKENS * KEY_HEADS + key_head) * KEY_DIM
    for turn in range(0, count * length):
        head, token = leader + turn // length, turn % length
        gate, kept_gate = base * NUM_HEADS + head, slot * TOKENS * NUM_HEADS + head
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
            first_tile,
            end_tile,
            q_scale,
            NUM_HEADS,
            KEY_HEADS,
            KEY_DIM,
            VALUE_DIM,
            TILE_K,
            TILE_V,
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
            for index in range(0, count):
                new = (base + at) * NUM_HEADS + leader + index
                kept = (slot * TOKENS + place) * NUM_HEADS + leader + index
                if BY_CHANNEL:
                    g = tl.load(g_ptr + new * KEY_DIM + key, mask=key < KEY_DIM, other=0.0)
                    tl.store(kept_g_ptr + kept * KEY_DIM + key, g, mask=key < KEY_DIM)
                else:
                    tl.store(kept_g_ptr + kept, tl.load(g_ptr + new))
                tl.store(kept_beta_ptr + kept, tl.load(beta_ptr + new))
