"""One token of the gated delta rule or Mamba-2's recurrence for each of many sequences.

what     the row of pairs.py and scan.py that the token has in its chunk, with the same sums; the
         others of the chunk lie in its slot: keys, decays, betas, X and T
grid     (sequences x heads, tiles of the columns of V)
program  computes the token's row of T from those that its slot keeps, then of R, X and O. Several
         tokens of a sequence are a loop of one program, over heads and tiles, too
traffic  S read once, written once in 64 tokens; keys, T and X of the open chunk read for each head
numerics those of pairs.py and scan.py: a row of a tile of few rows has the bits of one of 64
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.tile import LOG2E
from tilewise.kernels.triton.recurrent.pairs import (
    SUB,
    pairs_by_channel,
    running_of,
    solved,
)
from tilewise.kernels.triton.recurrent.rows import load_rows, zero_rows


@triton.jit
def _row_of(tile, is_row):
    """Return the one row of a tile that is named, (columns,)."""
    return tl.sum(tl.where(is_row[:, None], tile, 0.0), 0)


@triton.jit
def _own_rows(
    q_ptr,
    k_ptr,
    kept_ptr,
    is_query,
    is_now,
    is_kept,
    place,
    stride,
    column,
    inside,
    MOVES: tl.constexpr,
):
    """Load some columns of rows of which one is the query, one the key, and the rest are kept.

    Args:
        place, stride: where each kept row lies, in rows, and the elements of a row.
        MOVES: whether one load may have several tensors' addresses, as NVIDIA's may.
    """
    if MOVES:
        at = tl.where(is_now, k_ptr, kept_ptr + place * stride)
        at = tl.where(is_query, q_ptr, at)[:, None] + column[None, :]
        return tl.load(
            at, mask=(is_query | is_now | is_kept)[:, None] & inside[None, :], other=0.0
        )
    at = kept_ptr + (place * stride)[:, None] + column[None, :]
    rows = tl.load(at, mask=is_kept[:, None] & inside[None, :], other=0.0)
    key = tl.load(k_ptr + column, mask=inside, other=0.0)
    query = tl.load(q_ptr + column, mask=inside, other=0.0)
    rows = tl.where(is_now[:, None], key[None, :], rows)
    return tl.where(is_query[:, None], query[None, :], rows)


@triton.jit
def _row_of_t(
    pairs,
    beta,
    kept_t_ptr,
    t,
    place,
    NUM_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    LEFT: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the token's row of T (TOKENS,), of those before it.

    Args:
        pairs: (LEFT, TOKENS), K K^T E: row SUB + i is that of token i of the token's block.
        beta: (LEFT,), those of these tokens.
        t: (TOKENS, TOKENS), the rows of T before the token's.
    """
    left, column = tl.arange(0, LEFT), tl.arange(0, TOKENS)
    within = place % SUB
    begins = place - within
    of_block = left - SUB
    # Rows of T of the block, in the columns of the block: where `left` counts columns, too.
    at = kept_t_ptr + begins * (NUM_HEADS * TOKENS) + begins + of_block
    in_block = (of_block >= 0) & (of_block < SUB)
    lower = tl.where(column[None, :] >= (begins + of_block)[:, None], 0.0, pairs * beta[:, None])
    # Along `left` one thread of each warp has an element, and a warp gathers without memory.
    own = _row_of(lower, of_block == within)
    own = tl.gather(own, begins + tl.minimum(tl.maximum(of_block, 0), SUB - 1), 0)
    diagonal = tl.where(of_block == within, 1.0, 0.0)
    for done in tl.static_range(SUB - 1):
        known = tl.load(
            at + done * (NUM_HEADS * TOKENS), mask=in_block & (done < within), other=0.0
        )
        factor = tl.gather(own, tl.zeros((LEFT,), tl.int32) + (SUB + done), 0)
        diagonal -= factor * known.to(tl.float32)
    is_before = (column[None, :] < begins) & in_block[:, None]
    taken = tl.where(is_before, lower, 0.0).to(OPERAND)
    taken = tl.dot(taken, t, input_precision=PRECISION).to(OPERAND)
    weights = tl.where((left == 0)[:, None], diagonal[None, :], 0.0).to(OPERAND)
    beside = _row_of(tl.dot(weights, taken, input_precision=PRECISION), left == 0)
    placed = tl.gather(diagonal, tl.minimum(tl.maximum(column - begins, 0), SUB - 1) + SUB, 0)
    placed = tl.where(column <= place, placed, 0.0)
    return tl.where(column < begins, -beside, placed).to(OPERAND)


@triton.jit
def _close(
    t,
    k,
    decay,
    now,
    running,
    state_ptr,
    kept_v_ptr,
    chunk,
    first_column,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take a full chunk into some columns of the state."""
    key, row = tl.arange(0, TILE_K), tl.arange(0, TOKENS)
    column = first_column + tl.arange(0, COLUMNS)
    in_v = (row >= 0)[:, None] & (column < VALUE_DIM)[None, :]
    kept_at = kept_v_ptr + row[:, None] * (NUM_HEADS * VALUE_DIM) + column[None, :]
    u = tl.load(kept_at, mask=in_v, other=0.0).to(OPERAND)
    if IS_DELTA:
        u = tl.dot(t, u, input_precision=PRECISION).to(OPERAND)
    if not BY_CHANNEL:
        u = (u * tl.math.exp2(now - running)[:, None]).to(OPERAND)
    state_at = state_ptr + key[:, None] * VALUE_DIM + column[None, :]
    in_state = (key < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    state = tl.load(state_at, mask=in_state & (chunk > 0), other=0.0)
    after = tl.dot(tl.trans(k), u, state * decay, input_precision=PRECISION)
    tl.store(state_at, after, mask=in_state)


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
    first_column,
    is_first,
    q_scale,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    STEP_K: tl.constexpr,
    STAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    LEFT: tl.constexpr,
    MOVES: tl.constexpr,
    IS_DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute o and X of a token, whose rows q_ptr, k_ptr, v_ptr, g_ptr and beta_ptr point at."""
    key, row, place = tl.arange(0, TILE_K), tl.arange(0, TOKENS), position % TOKENS
    column = first_column + tl.arange(0, TILE_V)
    chunk, inside, in_v = position // TOKENS, key < KEY_DIM, column < VALUE_DIM
    is_known, own = row < place, row == place
    # Row 0 on the left is the query; in the rows from SUB are the keys of the token's block.
    left = tl.arange(0, LEFT)
    has_block: tl.constexpr = IS_DELTA and not BY_CHANNEL
    if has_block:
        token = place - place % SUB + left - SUB
        is_key = (left >= SUB) & (token <= place) & (left < 2 * SUB)
    else:
        token, is_key = left * 0 + place, left == 1
    is_now = is_key & (token == place)
    kept_row: tl.constexpr = KEY_HEADS * KEY_DIM
    is_query, never, is_before = left == 0, row < 0, is_key & (token < place)
    kept_at = kept_v_ptr + row[:, None] * (NUM_HEADS * VALUE_DIM) + column[None, :]
    x = tl.load(kept_at, mask=is_known[:, None] & in_v[None, :], other=0.0)
    v = tl.load(v_ptr + column, mask=in_v, other=0.0)
    beta_now = tl.load(beta_ptr)
    if BY_CHANNEL:
        state_at = state_ptr + key[:, None] * VALUE_DIM + column[None, :]
        in_state = inside[:, None] & in_v[None, :] & (chunk > 0)
        seen = tl.load(state_at, mask=in_state, other=0.0).to(OPERAND)
        pair = _own_rows(
            q_ptr, k_ptr, kept_k_ptr, is_query, is_now, is_before, token, kept_row, key, inside, MOVES
        )
        k = _own_rows(
            q_ptr, k_ptr, kept_k_ptr, never, own, is_known, row, kept_row, key, inside, MOVES
        ).to(OPERAND)
        positions = chunk * TOKENS + row
        beta = tl.load(kept_beta_ptr + row * NUM_HEADS, mask=is_known, other=0.0)
        beta = tl.where(own, beta_now, beta)
        g = load_rows(
            g_ptr,
            kept_g_ptr,
            positions,
            position,
            position + 1,
            NUM_HEADS * KEY_DIM,
            NUM_HEADS * KEY_DIM,
            key,
            KEY_DIM,
            True,
            TOKENS,
        )
        running = tl.cumsum(g * LOG2E, 0)
        query = _row_of(pair.to(tl.float32), left == 0)
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
            position,
            position + 1,
            kept_row,
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
            t_at = kept_t_ptr + row[:, None] * (NUM_HEADS * TOKENS) + row[None, :]
            tl.store(t_at, t, mask=own[:, None] & is_first)
        r = _row_of(r.to(tl.float32), own)
        r = tl.where((left == 0)[:, None], r[None, :], 0.0).to(OPERAND)
        now = _row_of(running, own)
        pair = (pair.to(tl.float32) * tl.math.exp2(now)[None, :]).to(OPERAND)
        o = tl.dot(pair, seen, input_precision=PRECISION)
    else:
        if IS_DELTA:
            t_at = kept_t_ptr + row[:, None] * (NUM_HEADS * TOKENS) + row[None, :]
            t = tl.load(t_at, mask=is_known[:, None], other=0.0)
            beta = tl.load(kept_beta_ptr + token * NUM_HEADS, mask=is_before, other=0.0)
            beta = tl.where(is_now, beta_now, beta)
        g = tl.load(kept_g_ptr + row * NUM_HEADS, mask=is_known, other=0.0)
        g_now = tl.load(g_ptr)
        p = tl.zeros((LEFT, TOKENS), tl.float32)
        o = tl.zeros((LEFT, TILE_V), tl.float32)
        some = tl.arange(0, STEP_K)
        # Loads of a loop go to shared memory by themselves, several turns before they are read.
        for begins in tl.range(0, TILE_K, STEP_K, num_stages=STAGES):
            channel = begins + some
            in_keys = channel < KEY_DIM
            pair = _own_rows(
                q_ptr, k_ptr, kept_k_ptr, is_query, is_now, is_before, token, kept_row, channel,
                in_keys, MOVES,
            ).to(OPERAND)  # fmt: skip
            k = _own_rows(
                q_ptr, k_ptr, kept_k_ptr, never, own, is_known, row, kept_row, channel, in_keys,
                MOVES,
            ).to(OPERAND)  # fmt: skip
            held_at = state_ptr + channel[:, None] * VALUE_DIM + column[None, :]
            is_held = in_keys[:, None] & in_v[None, :] & (chunk > 0)
            state = tl.load(held_at, mask=is_held, other=0.0)
            p = tl.dot(pair, tl.trans(k), p, input_precision=PRECISION)
            o = tl.dot(pair, state.to(OPERAND), o, input_precision=PRECISION)
        running = running_of(tl.where(own, g_now, g))
        now = tl.sum(tl.where(own, running, 0.0), 0)
        if IS_DELTA:
            # T goes to shared memory here: before the loop its loads would wait for those of T.
            nothing = tl.where(is_known, running, 0.0).to(t.dtype)
            t = tl.where(is_known[:, None], t, nothing[:, None])
            token = tl.where(is_query, place, token)
            since = tl.gather(running, tl.maximum(token, 0), 0)
            logs = since[:, None] - running[None, :]
            p *= tl.math.exp2(tl.where(row[None, :] > token[:, None], float("-inf"), logs))
            new = _row_of_t(
                p, beta, kept_t_ptr, t, place, NUM_HEADS, TOKENS, LEFT, OPERAND, PRECISION
            )
            tl.store(
                kept_t_ptr + place * (NUM_HEADS * TOKENS) + row, new, mask=(row >= 0) & is_first
            )
            t = tl.where(own[:, None], new[None, :], t)
            r = tl.where((left == 0)[:, None], p, 0.0).to(OPERAND)
            r = tl.dot(r, t, input_precision=PRECISION).to(OPERAND)
        else:
            p *= tl.math.exp2(tl.where(row > place, float("-inf"), now - running))[None, :]
            r = tl.where((left == 0)[:, None], p, 0.0).to(OPERAND)
            t = r
        o *= tl.math.exp2(now)
    new = v.to(tl.float32)
    if IS_DELTA:
        new -= _row_of(o, is_now)
    new = (new * beta_now).to(v_ptr.dtype.element_ty)
    x = tl.where(own[:, None], new[None, :], x).to(OPERAND)
    o = tl.dot(r, x, o, input_precision=PRECISION)
    o = _row_of(o, left == 0) * q_scale
    tl.store(o_ptr + column, o.to(o_ptr.dtype.element_ty), mask=in_v)
    tl.store(kept_v_ptr + place * (NUM_HEADS * VALUE_DIM) + column, new, mask=in_v)
    if place == TOKENS - 1:
        tl.debug_barrier()  # X is read again
        decay = tl.math.exp2(now)
        if BY_CHANNEL:
            keys = (k.to(tl.float32) * tl.math.exp2(now[None, :] - running)).to(OPERAND)
            decay = decay[:, None]
        else:
            keys = _own_rows(
                q_ptr, k_ptr, kept_k_ptr, never, own, is_known, row, kept_row, key, inside, MOVES
            ).to(OPERAND)
        # A few columns at a time: all at once are more than a program's registers.
        some_columns: tl.constexpr = TILE_V if TILE_V < 32 else 32
        for begins in range(0, TILE_V, some_columns):
            _close(
                t,
                keys,
                decay,
                now,
                running,
                state_ptr,
                kept_v_ptr,
                chunk,
                first_column + begins,
                NUM_HEADS,
                KEY_DIM,
                VALUE_DIM,
                TILE_K,
                some_columns,
                TOKENS,
                IS_DELTA,
                BY_CHANNEL,
                OPERAND,
                PRECISION,
            )


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
    STEP_K: tl.constexpr,
    STAGES: tl.constexpr,
    TOKENS: tl.constexpr,
    LEFT: tl.constexpr,
    MOVES: tl.constexpr,
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
    columns = tl.program_id(1) * TILE_V + tl.arange(0, TILE_V)
    if sequence == num_sequences - 1:  # rows that no sequence has
        zero_rows(o_ptr, end, num_rows, leader, columns, NUM_HEADS, VALUE_DIM, TOKENS)
    if slot < 0:
        zero_rows(o_ptr, first, end, leader, columns, NUM_HEADS, VALUE_DIM, TOKENS)
        return
    length = end - first
    # Several tokens write what the next of them reads: one program computes all heads that share
    # keys, and a token of all of them before the next one.
    count, some_tiles = 1, 1
    if length > 1:
        count, some_tiles = group, tiles
        if (leader % group != 0) | (tl.program_id(1) != 0):
            count = 0
    key_head, key, inside = leader // group, tl.arange(0, TILE_K), tl.arange(0, TILE_K) < KEY_DIM
    g_width: tl.constexpr = KEY_DIM if BY_CHANNEL else 1
    for turn in tl.range(0, length * count * some_tiles, disable_licm=True):
        tile = turn % some_tiles
        head = leader + turn // some_tiles % count
        index = turn // (some_tiles * count)
        token, position = first.to(tl.int64) + index, start + index
        place = position % TOKENS
        gate, kept_gate = token * NUM_HEADS + head, slot * TOKENS * NUM_HEADS + head
        k_now_ptr = k_ptr + token * stride_k + key_head * stride_kh
        kept_keys_ptr = kept_k_ptr + (slot * TOKENS * KEY_HEADS + key_head) * KEY_DIM
        is_first = tl.program_id(1) + tile == 0
        tl.debug_barrier()
        _token(
            q_ptr + token * stride_q + key_head * stride_qh,
            k_now_ptr,
            v_ptr + token * stride_v + head * stride_vh,
            g_ptr + gate * g_width,
            beta_ptr + gate,
            o_ptr + gate * VALUE_DIM,
            state_ptr + (slot * NUM_HEADS + head) * KEY_DIM * VALUE_DIM,
            kept_keys_ptr,
            kept_g_ptr + kept_gate * g_width,
            kept_v_ptr + kept_gate * VALUE_DIM,
            kept_beta_ptr + kept_gate,
            kept_t_ptr + kept_gate * TOKENS,
            position,
            (tl.program_id(1) + tile) * TILE_V,
            is_first,
            q_scale,
            NUM_HEADS,
            KEY_HEADS,
            KEY_DIM,
            VALUE_DIM,
            TILE_K,
            TILE_V,
            STEP_K,
            STAGES,
            TOKENS,
            LEFT,
            MOVES,
            IS_DELTA,
            BY_CHANNEL,
            OPERAND,
            PRECISION,
        )
        if is_first:
            kept = kept_gate + place * NUM_HEADS
            if BY_CHANNEL:
                g = tl.load(g_ptr + gate * KEY_DIM + key, mask=inside, other=0.0)
                tl.store(kept_g_ptr + kept * KEY_DIM + key, g, mask=inside)
            else:
                tl.store(kept_g_ptr + kept, tl.load(g_ptr + gate))
            tl.store(kept_beta_ptr + kept, tl.load(beta_ptr + gate))
            if head % group == 0:
                k = tl.load(k_now_ptr + key, mask=inside, other=0.0)
                tl.store(kept_keys_ptr + place * (KEY_HEADS * KEY_DIM) + key, k, mask=inside)
