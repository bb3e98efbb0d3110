"""One token of the gated delta rule or Mamba-2's recurrence for each of many sequences.

what     the row of pairs.py and scan.py that the token has in its chunk, with the same sums; the
         others of the chunk lie in its slot: keys, decays, betas, X and T
grid     (sequences x heads, tiles of the columns of V)
program  computes the token's row of T from those that its slot keeps, then of R, X and O. Several
         tokens of a sequence are a loop of one program, over heads and tiles, too
traffic  S read once, written once in 64 tokens; keys, T and X of the open chunk read for each head
numerics those of pairs.py and scan.py
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.tile import LOG2E
from tilewise.kernels.triton.recurrent.pairs import (
    pairs_by_channel,
    solved,
)
from tilewise.kernels.triton.recurrent.rows import load_numbers, load_rows, zero_rows

_SUB = tl.constexpr(16)  # rows of a product: the query, the key and zeros; and of a block of T


@triton.jit
def _row_of_t(
    a,
    running,
    beta,
    kept_t_ptr,
    begins,
    place,
    NUM_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return T of the tokens up to one, whose row is computed from those before it.

    Args:
        a: (_SUB, TOKENS), K K^T of the block of tokens from `begins` on that the token is in.
    """
    row, of_block = tl.arange(0, TOKENS), tl.arange(0, _SUB)
    t = tl.load(
        kept_t_ptr + row[:, None] * (NUM_HEADS * TOKENS) + row[None, :],
        mask=(row < place)[:, None],
        other=0.0,
    )
    is_some = row[None, :] == begins + of_block[:, None]
    now = tl.sum(tl.where(is_some, running[None, :], 0.0), 1)
    factor = tl.sum(tl.where(is_some, beta[None, :], 0.0), 1)
    later = row[None, :] >= begins + of_block[:, None]
    a *= tl.math.exp2(tl.where(later, float("-inf"), now[:, None] - running[None, :]))
    a *= factor[:, None]
    own = tl.sum(tl.where((begins + of_block == place)[:, None], a, 0.0), 0)
    # The token's row of the block on the diagonal, by substitution.
    solved = tl.where(row == place, 1.0, 0.0)
    for done in tl.static_range(_SUB - 1):
        at = begins + done
        known = tl.load(
            kept_t_ptr + at * (NUM_HEADS * TOKENS) + row,
            mask=(row >= begins) & (at < place),
            other=0.0,
        )
        taken = tl.sum(tl.where(row == at, own, 0.0), 0)
        solved = tl.fma(tl.zeros((TOKENS,), tl.float32) - taken, known.to(tl.float32), solved)
    # What lies beside it.
    taken = tl.where(row[None, :] < begins, a, 0.0).to(OPERAND)
    taken = tl.dot(taken, t, input_precision=PRECISION).to(OPERAND)
    diagonal = tl.sum(tl.where(is_some, solved[None, :], 0.0), 1)
    diagonal = tl.where(of_block[:, None] == 0, diagonal[None, :], 0.0).to(OPERAND)
    taken = tl.dot(diagonal, taken, input_precision=PRECISION)
    beside = -tl.sum(tl.where(of_block[:, None] == 0, taken, 0.0), 0)
    new = tl.where(row < begins, beside, solved).to(OPERAND)
    tl.store(kept_t_ptr + place * (NUM_HEADS * TOKENS) + row, new)
    return tl.where((row == place)[:, None], new[None, :], t)


@triton.jit
def _operands(
    q_ptr,
    k_ptr,
    kept_k_ptr,
    state_ptr,
    key,
    positions,
    column,
    at,
    chunk,
    start,
    position,
    stride_q,
    stride_k,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    OPERAND: tl.constexpr,
):
    """Return columns of the chunk's keys, of rows of the token's query and key, and rows of S."""
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
    # The first of few rows is that of the query, the second that of the key.
    which, inside = tl.arange(0, _SUB)[:, None], key[None, :] < KEY_DIM
    pair_at = tl.where(which == 0, q_ptr + at * stride_q, k_ptr + at * stride_k) + key[None, :]
    pair = tl.load(pair_at, mask=inside & (which < 2), other=0.0).to(OPERAND)
    in_state = (key[:, None] < KEY_DIM) & (column[None, :] < VALUE_DIM)
    state_at = state_ptr + key[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(state_at, mask=in_state & (chunk > 0), other=0.0)
    return k, pair, state.to(OPERAND)


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
    kept_t_ptr,
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
    STEP_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    row, which, place = tl.arange(0, TOKENS), tl.arange(0, _SUB), position % TOKENS
    chunk, begins = position // TOKENS, place // _SUB * _SUB
    positions, at = chunk * TOKENS + row, (position - start).to(tl.int64)
    in_column = column < VALUE_DIM
    beta = load_numbers(
        beta_ptr, kept_beta_ptr, positions, start, position + 1, NUM_HEADS, True, TOKENS
    )
    v = tl.load(v_ptr + at * stride_v + column, mask=in_column, other=0.0)
    kept_at = kept_v_ptr + row[:, None] * (NUM_HEADS * VALUE_DIM) + column[None, :]
    x = tl.load(kept_at, mask=(row[:, None] < place) & in_column[None, :], other=0.0)
    own = row == place
    beta_now = tl.sum(tl.where(own, beta, 0.0), 0)
    if BY_CHANNEL:
        key = tl.arange(0, TILE_K)
        k, pair, seen = _operands(
            q_ptr,
            k_ptr,
            kept_k_ptr,
            state_ptr,
            key,
            positions,
            column,
            at,
            chunk,
            start,
            position,
            stride_q,
            stride_k,
            KEY_HEADS,
            KEY_DIM,
            VALUE_DIM,
            TOKENS,
            OPERAND,
        )
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
        if IS_DELTA:
            kept_row = kept_t_ptr + row[:, None] * (NUM_HEADS * TOKENS) + row[None, :]
            tl.store(kept_row, t, mask=own[:, None])
        r = tl.sum(tl.where(own[:, None], r.to(tl.float32), 0.0), 0)
        r = tl.where(which[:, None] == 0, r[None, :], 0.0).to(OPERAND)
        now = tl.sum(tl.where(own[:, None], running, 0.0), 0)
        pair = (pair.to(tl.float32) * tl.math.exp2(now)[None, :]).to(OPERAND)
        o = tl.dot(pair, seen, input_precision=PRECISION)
    else:
        g = load_numbers(g_ptr, kept_g_ptr, positions, start, position + 1, NUM_HEADS, True, TOKENS)
        running = tl.cumsum(g * LOG2E, 0)
        now = tl.sum(tl.where(own, running, 0.0), 0)
        p = tl.zeros((_SUB, TOKENS), tl.float32)
        a = tl.zeros((_SUB, TOKENS), tl.float32)
        o = tl.zeros((_SUB, column.shape[0]), tl.float32)
        for first_key in tl.range(0, TILE_K, STEP_K, num_stages=STAGES):
            key = first_key + tl.arange(0, STEP_K)
            k, pair, seen = _operands(
                q_ptr,
                k_ptr,
                kept_k_ptr,
                state_ptr,
                key,
                positions,
                column,
                at,
                chunk,
                start,
                position,
                stride_q,
                stride_k,
                KEY_HEADS,
                KEY_DIM,
                VALUE_DIM,
                TOKENS,
                OPERAND,
            )
            if IS_DELTA:
                some = load_rows(
                    k_ptr,
                    kept_k_ptr,
                    chunk * TOKENS + begins + which,
                    start,
                    position + 1,
                    stride_k,
                    KEY_HEADS * KEY_DIM,
                    key,
                    KEY_DIM,
                    True,
                    TOKENS,
                ).to(OPERAND)
                a = tl.dot(some, tl.trans(k), a, input_precision=PRECISION)
            p = tl.dot(pair, tl.trans(k), p, input_precision=PRECISION)
            o = tl.dot(pair, seen, o, input_precision=PRECISION)
        o *= tl.math.exp2(now)
        p *= tl.math.exp2(tl.where(row > place, float("-inf"), now - running))[None, :]
        r = p.to(OPERAND)
        if IS_DELTA:
            t = _row_of_t(
                a, running, beta, kept_t_ptr, begins, place, NUM_HEADS, TOKENS, OPERAND, PRECISION
            )
            r = tl.dot(r, t, input_precision=PRECISION).to(OPERAND)
    new = v.to(tl.float32)
    if IS_DELTA:
        new -= tl.sum(tl.where(which[:, None] == 1, o, 0.0), 0)
    new = (new * beta_now).to(v_ptr.dtype.element_ty)
    x = tl.where(own[:, None], new[None, :], x).to(OPERAND)
    o = tl.dot(r, x, o, input_precision=PRECISION)
    o = tl.sum(tl.where(which[:, None] == 0, o, 0.0), 0) * q_scale
    tl.store(
        o_ptr + at * (NUM_HEADS * VALUE_DIM) + column,
        o.to(o_ptr.dtype.element_ty),
        mask=in_column,
    )
    tl.store(kept_v_ptr + place * (NUM_HEADS * VALUE_DIM) + column, new, mask=in_column)
    if place == TOKENS - 1:
        key = tl.arange(0, TILE_K)
        in_state = (key[:, None] < KEY_DIM) & in_column[None, :]
        state_at = state_ptr + key[:, None] * VALUE_DIM + column[None, :]
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
        u = x
        if IS_DELTA:
            u = tl.dot(t, x, input_precision=PRECISION).to(OPERAND)
        state = tl.load(state_at, mask=in_state & (chunk > 0), other=0.0)
        if BY_CHANNEL:
            k_out = (k.to(tl.float32) * tl.math.exp2(now[None, :] - running)).to(OPERAND)
            decay = tl.math.exp2(now)[:, None]
        else:
            u = (u * tl.math.exp2(now - running)[:, None]).to(OPERAND)
            k_out, decay = k, tl.math.exp2(now)
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
    kept_t_ptr,
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
    STEP_K: tl.constexpr,
    STAGES: tl.constexpr,
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
    heads, some_tiles = 1, 1
    if length > 1:
        heads, some_tiles = group, tiles
        if (leader % group != 0) | (tl.program_id(1) != 0):
            heads = 0
    key_head, base = leader // group, first.to(tl.int64)
    q_ptr += base * stride_q + key_head * stride_qh
    k_ptr += base * stride_k + key_head * stride_kh
    kept_k_ptr += (slot * TOKENS * KEY_HEADS + key_head) * KEY_DIM
    # Tiles have one T: all of them take a token before the next one.
    for index in range(0, heads * length * some_tiles):
        head = leader + index // (length * some_tiles)
        token = index // some_tiles % length
        tile = tl.program_id(1) + index % some_tiles
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
            kept_t_ptr + kept_gate * TOKENS,
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
            STEP_K,
            STAGES,
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
            for index in range(0, heads):
                new = (base + at) * NUM_HEADS + leader + index
                kept = (slot * TOKENS + place) * NUM_HEADS + leader + index
                if BY_CHANNEL:
                    g = tl.load(g_ptr + new * KEY_DIM + key, mask=key < KEY_DIM, other=0.0)
                    tl.store(kept_g_ptr + kept * KEY_DIM + key, g, mask=key < KEY_DIM)
                else:
                    tl.store(kept_g_ptr + kept, tl.load(g_ptr + new))
                tl.store(kept_beta_ptr + kept, tl.load(beta_ptr + new))
