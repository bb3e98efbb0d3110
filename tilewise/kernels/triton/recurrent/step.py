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
    running_of,
    sums_of_channels,
)
from tilewise.kernels.triton.recurrent.rows import load_rows, zero_rows


@triton.jit
def _row_of(tile, is_row):
    """Return the row of a tile at which `is_row` is True, (columns,); zeros if it is nowhere."""
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
    """Return some columns of a tile of rows: the query, the token's key, and keys of the slot.

    Args:
        q_ptr, k_ptr, kept_ptr: the addresses of the query, the key, and the slot's first key.
        is_query, is_now, is_kept: masks of the tile's rows: where the query, the token's key and
            the keys that the slot keeps belong. Other rows are zeros.
        place, stride: the number of each row in the slot, and the elements between two of them.
        MOVES: True if one load may have several tensors' addresses, as NVIDIA's may.
    """
    if MOVES:
        at = tl.where(is_now, k_ptr, kept_ptr + place * stride)
        at = tl.where(is_query, q_ptr, at)[:, None] + column[None, :]
        return tl.load(at, mask=(is_query | is_now | is_kept)[:, None] & inside[None, :], other=0.0)
    at = kept_ptr + (place * stride)[:, None] + column[None, :]
    rows = tl.load(at, mask=is_kept[:, None] & inside[None, :], other=0.0)
    key = tl.load(k_ptr + column, mask=inside, other=0.0)
    query = tl.load(q_ptr + column, mask=inside, other=0.0)
    rows = tl.where(is_now[:, None], key[None, :], rows)
    return tl.where(is_query[:, None], query[None, :], rows)


@triton.jit
def _as_loaded(x):
    """Return a vector as it is, in a layout that its use may choose.

    A row of a product brings the product's layout along, into which a tile of loads would then be
    moved piece by piece.
    """
    return tl.gather(x, tl.arange(0, x.shape[0]), 0)


@triton.jit
def _row_of_t(
    beside,
    own,
    kept_t_ptr,
    t,
    place,
    NUM_HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the token's row of T = (1 + A)^-1, (TOKENS,), from the rows of the tokens before it.

    Within its block of SUB tokens the row is solved by substitution. Before the block it is minus
    the solved part times A T.

    Args:
        beside: (SUB, TOKENS), the rows of A of the block's tokens, in columns before the block.
        own: (SUB,), the token's row of A in the columns of its block.
        t: (TOKENS, TOKENS), the rows of T of the tokens before.
        place: the number of the token in its chunk.
    """
    few, column = tl.arange(0, SUB), tl.arange(0, TOKENS)
    within = place % SUB
    begins = place - within
    at = kept_t_ptr + begins * (NUM_HEADS * TOKENS) + begins + few
    # A warp has all of `few`, so it gathers without memory.
    solved_row = tl.where(few == within, 1.0, 0.0)
    for done in tl.static_range(SUB - 1):
        is_known = (few >= 0) & (done < within)
        known = tl.load(at + done * (NUM_HEADS * TOKENS), mask=is_known, other=0.0)
        solved_row -= tl.gather(own, few * 0 + done, 0) * known.to(tl.float32)
    taken = tl.dot(beside.to(OPERAND), t, input_precision=PRECISION).to(OPERAND)
    weights = tl.where((few == 0)[:, None], solved_row[None, :], 0.0).to(OPERAND)
    first = _row_of(tl.dot(weights, taken, input_precision=PRECISION), few == 0)
    placed = tl.gather(solved_row, tl.minimum(tl.maximum(column - begins, 0), SUB - 1), 0)
    placed = tl.where(column <= place, placed, 0.0)
    return tl.where(column < begins, -first, placed).to(OPERAND)


@triton.jit
def _finish(
    o,
    r,
    x,
    v,
    o_ptr,
    kept_v_ptr,
    beta,
    place,
    column,
    q_scale,
    NUM_HEADS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a token's row of X and its output, and store both, for some columns of V.

    With the symbols of scan.py: X = beta (V - (E K) S), or beta V without the delta rule, goes to
    the slot, and O = q_scale ((E Q) S + R X) to the output.

    Args:
        o: (SUB, columns), (E Q) S in row 0 and (E K) S in row 1.
        r: (SUB, TOKENS), the token's row of R in row 0, else 0.
        x: (TOKENS, columns), X of the tokens before.
        v: (columns,), the token's value.
    """
    few, row, in_v = tl.arange(0, SUB), tl.arange(0, TOKENS), column < VALUE_DIM
    new = v.to(tl.float32)
    if IS_DELTA:
        new -= _row_of(o, few == 1)
    new = (new * beta).to(v.dtype)
    x = tl.where((row == place)[:, None], _as_loaded(new)[None, :], x).to(OPERAND)
    o = tl.dot(r, x, o, input_precision=PRECISION)
    o = _row_of(o, few == 0) * q_scale
    tl.store(o_ptr + column, o.to(o_ptr.dtype.element_ty), mask=in_v)
    tl.store(kept_v_ptr + place * (NUM_HEADS * VALUE_DIM) + column, new, mask=in_v)


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
    """Update some columns of the state by a full chunk, in place: S' = E_64 S + (E_64 / E K)^T U.

    U = T X, with X read from the slot. t: T of the chunk; k: its keys, by channel already times
    E_64 / E; decay: E_64; now, running: the logs of E_64 and of E, in base 2.
    """
    key, row = tl.arange(0, TILE_K), tl.arange(0, TOKENS)
    column = first_column + tl.arange(0, COLUMNS)
    in_v = (row >= 0)[:, None] & (column < VALUE_DIM)[None, :]
    kept_at = kept_v_ptr + row[:, None] * (NUM_HEADS * VALUE_DIM) + column[None, :]
    u = tl.load(kept_at, mask=in_v, other=0.0).to(OPERAND)
    state_at = state_ptr + key[:, None] * VALUE_DIM + column[None, :]
    in_state = (key < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    state = tl.load(state_at, mask=in_state & (chunk > 0), other=0.0) * decay
    if PRECISION == "tf32x3":
        if IS_DELTA:
            u = tl.dot(t, u, input_precision=PRECISION).to(OPERAND)
        if not BY_CHANNEL:
            u = (u * tl.math.exp2(now - running)[:, None]).to(OPERAND)
        after = tl.dot(tl.trans(k), u, state, input_precision=PRECISION)
    else:
        # Transposed: products of few rows. Of a single pass their sums are the same.
        u = tl.trans(u)
        if IS_DELTA:
            u = tl.dot(u, tl.trans(t), input_precision=PRECISION).to(OPERAND)
        if not BY_CHANNEL:
            u = (u * tl.math.exp2(now - running)[None, :]).to(OPERAND)
        after = tl.trans(tl.dot(u, k, tl.trans(state), input_precision=PRECISION))
    tl.store(state_at, after, mask=in_state)


@triton.jit
def _channel_row(
    pair,
    k,
    running,
    k_ptr,
    kept_k_ptr,
    g_ptr,
    kept_g_ptr,
    place,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TOKENS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return a token's row of `pairs_by_channel`: with tokens before its block, and in the block.

    Args:
        pair: (SUB, TILE_K), the token's query and key in rows 0 and 1.
        k: (TOKENS, TILE_K), the keys of its chunk.
        running: (TOKENS, TILE_K), the running sums of logs of decays.

    Returns:
        Of the keys of the block and of the query, in row 0, (SUB, TOKENS); of the token's key and
        query with the keys of its block, (SUB,).
    """
    few, row, key = tl.arange(0, SUB), tl.arange(0, TOKENS), tl.arange(0, TILE_K)
    within, inside = place % SUB, (key < KEY_DIM)[None, :]
    blocks: tl.constexpr = TOKENS // SUB
    begins = place - within
    now = _row_of(running, row == place)
    anchor = _row_of(running, row == begins - 1)
    query, own = _row_of(pair, few == 0), _row_of(pair, few == 1)
    faded = k * tl.math.exp2(tl.minimum(anchor[None, :] - running, 0.0))
    faded = tl.trans(tl.where((row < begins)[:, None], faded, 0.0))
    # As many rows as in a prompt: of 16-bit tokens in TF32, mma.sync has another order of sums
    # than wgmma. The query is where no key of the block is.
    is_query = row == (place + SUB) % TOKENS
    later = k * tl.math.exp2(tl.minimum(running - anchor[None, :], 0.0))
    later = tl.where((row // SUB == place // SUB)[:, None], later, 0.0)
    asked = query * tl.math.exp2(tl.minimum(now - anchor, 0.0))
    later = tl.where(is_query[:, None], asked[None, :], later)
    both = tl.dot(later, faded, input_precision=PRECISION)
    is_block = tl.arange(0, blocks)[:, None, None] == place // SUB
    a = tl.sum(tl.where(is_block, tl.reshape(both, (blocks, SUB, TOKENS)), 0.0), 0)
    p = tl.where((few == 0)[:, None], _row_of(both, is_query)[None, :], 0.0)
    # The keys of the block, faded to the token, from the last to the first.
    between = tl.zeros((1, TILE_K), tl.float32)
    faded = tl.zeros((SUB, TILE_K), tl.float32)
    for back in tl.static_range(SUB):
        mask = inside & (back <= within)
        if back == 0:
            before = tl.load(k_ptr + key[None, :], mask=mask, other=0.0)
        else:
            kept = kept_k_ptr + (place - back) * (KEY_HEADS * KEY_DIM)
            before = tl.load(kept + key[None, :], mask=mask, other=0.0)
            if back == 1:
                g = tl.load(g_ptr + key[None, :], mask=mask, other=0.0)
            else:
                kept = kept_g_ptr + (place - back + 1) * (NUM_HEADS * KEY_DIM)
                g = tl.load(kept + key[None, :], mask=mask, other=0.0)
            between += LOG2E * g
        before = before.to(tl.float32) * tl.math.exp2(between)
        faded = tl.where((few == within - back)[:, None], before, faded)
    return (
        a,
        p,
        sums_of_channels(own[None, :] * faded),
        sums_of_channels(query[None, :] * faded),
    )


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
    MOVES: tl.constexpr,
    IS_DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute a token's output, and write its rows of X and T to its slot, for some columns of V.

    The token's rows begin at q_ptr, k_ptr, v_ptr, g_ptr and beta_ptr; position: its place in the
    sequence; is_first: True if this program writes the row of T. After the last token of a chunk
    the state is updated, too.
    """
    few, row, key = tl.arange(0, SUB), tl.arange(0, TOKENS), tl.arange(0, TILE_K)
    chunk, place = position // TOKENS, position % TOKENS
    within = place % SUB
    begins = place - within
    column, inside = first_column + tl.arange(0, TILE_V), key < KEY_DIM
    in_v = column < VALUE_DIM
    is_known, own, never = row < place, row == place, row < 0
    # Products have few rows on the left: the query and the key, and the keys of the token's block.
    token, none, is_key, is_query = begins + few, few < 0, few == 1, few == 0
    kept_row: tl.constexpr = KEY_HEADS * KEY_DIM
    kept_at = kept_v_ptr + row[:, None] * (NUM_HEADS * VALUE_DIM) + column[None, :]
    beta_now = tl.load(beta_ptr)
    if IS_DELTA:
        t_at = kept_t_ptr + row[:, None] * (NUM_HEADS * TOKENS) + row[None, :]
        t = tl.load(t_at, mask=is_known[:, None], other=0.0)
        beta = tl.load(kept_beta_ptr + token * NUM_HEADS, mask=token < place, other=0.0)
        beta = tl.where(token == place, beta_now, beta)
    if BY_CHANNEL:
        g = load_rows(
            g_ptr,
            kept_g_ptr,
            chunk * TOKENS + row,
            position,
            position + 1,
            NUM_HEADS * KEY_DIM,
            NUM_HEADS * KEY_DIM,
            key,
            KEY_DIM,
            True,
            TOKENS,
        )
        pair = _own_rows(
            q_ptr, k_ptr, kept_k_ptr, is_query, is_key, none, token, kept_row, key, inside, MOVES
        ).to(tl.float32)
        k = _own_rows(
            q_ptr, k_ptr, kept_k_ptr, never, own, is_known, row, kept_row, key, inside, MOVES
        ).to(tl.float32)
        running = running_of(g)
        now = _row_of(running, own)
        a, p, taken, seen = _channel_row(
            pair,
            k,
            running,
            k_ptr,
            kept_k_ptr,
            g_ptr,
            kept_g_ptr,
            place,
            NUM_HEADS,
            KEY_HEADS,
            KEY_DIM,
            TILE_K,
            TOKENS,
            PRECISION,
        )
        of_block = tl.minimum(tl.maximum(row - begins, 0), SUB - 1)
        p = tl.where((row >= begins)[None, :], tl.gather(seen, of_block, 0)[None, :], p)
        p = tl.where((row <= place)[None, :], p, 0.0)
        pair = (pair * tl.math.exp2(now)[None, :]).to(OPERAND)
    else:
        x = tl.load(kept_at, mask=is_known[:, None] & in_v[None, :], other=0.0)
        v = tl.load(v_ptr + column, mask=in_v, other=0.0)
        g = tl.load(kept_g_ptr + row * NUM_HEADS, mask=is_known, other=0.0)
        g_now = tl.load(g_ptr)
        a = tl.zeros((SUB, TOKENS), tl.float32)
        p = tl.zeros((SUB, TOKENS), tl.float32)
        o = tl.zeros((SUB, TILE_V), tl.float32)
        some = tl.arange(0, STEP_K)
        # Loads of a loop go to shared memory by themselves, several turns before they are read.
        for at in tl.range(0, TILE_K, STEP_K, num_stages=STAGES):
            channel = at + some
            in_keys = channel < KEY_DIM
            pair = _own_rows(
                q_ptr,
                k_ptr,
                kept_k_ptr,
                is_query,
                is_key,
                none,
                token,
                kept_row,
                channel,
                in_keys,
                MOVES,
            ).to(OPERAND)
            k = _own_rows(
                q_ptr,
                k_ptr,
                kept_k_ptr,
                never,
                own,
                is_known,
                row,
                kept_row,
                channel,
                in_keys,
                MOVES,
            ).to(OPERAND)
            held_at = state_ptr + channel[:, None] * VALUE_DIM + column[None, :]
            is_held = in_keys[:, None] & in_v[None, :] & (chunk > 0)
            state = tl.load(held_at, mask=is_held, other=0.0)
            if IS_DELTA:
                block = _own_rows(
                    q_ptr,
                    k_ptr,
                    kept_k_ptr,
                    none,
                    token == place,
                    token < place,
                    token,
                    kept_row,
                    channel,
                    in_keys,
                    MOVES,
                ).to(OPERAND)
                a = tl.dot(block, tl.trans(k), a, input_precision=PRECISION)
            p = tl.dot(pair, tl.trans(k), p, input_precision=PRECISION)
            o = tl.dot(pair, state.to(OPERAND), o, input_precision=PRECISION)
        running = running_of(tl.where(own, g_now, g))
        now = tl.sum(tl.where(own, running, 0.0), 0)
        p *= tl.math.exp2(tl.where(row > place, float("-inf"), now - running))[None, :]
        o *= tl.math.exp2(now)
        if IS_DELTA:
            logs = tl.gather(running, token, 0)[:, None] - running[None, :]
            a *= tl.math.exp2(tl.where(row[None, :] > token[:, None], float("-inf"), logs))
            # T goes to shared memory here: before the loop its loads would wait for those of T.
            nothing = tl.where(is_known, running, 0.0).to(t.dtype)
            t = tl.where(is_known[:, None], t, nothing[:, None])
    r = tl.where(is_query[:, None], p, 0.0).to(OPERAND)
    if IS_DELTA:
        a *= beta[:, None]
        if BY_CHANNEL:
            taken = tl.where(few < within, taken * beta_now, 0.0)
        else:
            a = tl.where(row[None, :] >= token[:, None], 0.0, a)
            taken = tl.gather(_row_of(a, few == within), token, 0)
        a = tl.where((row < begins)[None, :], a, 0.0)
        new = _row_of_t(a, taken, kept_t_ptr, t, place, NUM_HEADS, TOKENS, OPERAND, PRECISION)
        t_at = kept_t_ptr + place * (NUM_HEADS * TOKENS) + row
        tl.store(t_at, new, mask=(row >= 0) & is_first)
        t = tl.where(own[:, None], _as_loaded(new)[None, :], t)
        r = tl.dot(r, t, input_precision=PRECISION).to(OPERAND)
    else:
        t = r
    some_columns: tl.constexpr = TILE_V if TILE_V < 32 else 32
    if BY_CHANNEL:
        for at in tl.range(0, TILE_V, some_columns, num_stages=STAGES):
            some = first_column + at + tl.arange(0, some_columns)
            in_some = (some < VALUE_DIM)[None, :]
            held_at = state_ptr + key[:, None] * VALUE_DIM + some[None, :]
            is_held = inside[:, None] & in_some & (chunk > 0)
            state = tl.load(held_at, mask=is_held, other=0.0)
            x_at = kept_v_ptr + row[:, None] * (NUM_HEADS * VALUE_DIM) + some[None, :]
            x = tl.load(x_at, mask=is_known[:, None] & in_some, other=0.0)
            v = tl.load(v_ptr + some, mask=some < VALUE_DIM, other=0.0)
            o = tl.dot(pair, state.to(OPERAND), input_precision=PRECISION)
            _finish(
                o,
                r,
                x,
                v,
                o_ptr,
                kept_v_ptr,
                beta_now,
                place,
                some,
                q_scale,
                NUM_HEADS,
                VALUE_DIM,
                TOKENS,
                IS_DELTA,
                OPERAND,
                PRECISION,
            )
    else:
        _finish(
            o,
            r,
            x,
            v,
            o_ptr,
            kept_v_ptr,
            beta_now,
            place,
            column,
            q_scale,
            NUM_HEADS,
            VALUE_DIM,
            TOKENS,
            IS_DELTA,
            OPERAND,
            PRECISION,
        )
    if place == TOKENS - 1:
        tl.debug_barrier()  # X is read again
        decay = tl.math.exp2(now)
        if BY_CHANNEL:
            keys = (k * tl.math.exp2(now[None, :] - running)).to(OPERAND)
            decay = decay[:, None]
        else:
            keys = _own_rows(
                q_ptr, k_ptr, kept_k_ptr, never, own, is_known, row, kept_row, key, inside, MOVES
            ).to(OPERAND)
        # A few columns at a time: all at once are more than a program's registers.
        for at in range(0, TILE_V, some_columns):
            _close(
                t,
                keys,
                decay,
                now,
                running,
                state_ptr,
                kept_v_ptr,
                chunk,
                first_column + at,
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
