"""Products of pairs of tokens, for all chunks at once.

what     with E_ts the decay between tokens s and t of a chunk, of all its pairs
             A = strictly lower (beta K K^T E), T = (1 + A)^-1, R = lower (Q K^T E) T
         or R = lower (Q K^T E) without the delta rule; where each channel has a decay, also the
         keys and queries times the decay since the chunk's start, and keys times that to its end
grid     chunks x heads
program  one chunk of one head
traffic  q, k, g and beta read once for each head; T and R, 64 x 64, written once
numerics operands of the tokens' 16 bits (bfloat16) or TF32 (float16; float32 in three passes) with
         float32 sums. T, D in blocks of 16 tokens on its diagonal, is D by substitution in an order
         that no layout changes, and -D (A T) beside it, all of rows that are rounded to operands:
         so row t is one of A, of T before and of nothing else, and a slot may keep T
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.triton.attention.tile import LOG2E
from tilewise.kernels.triton.recurrent.rows import (
    load_numbers,
    load_rows,
    number_of,
    sequence_of,
)

SUB = tl.constexpr(16)  # tokens of a block of T that is solved row by row
_UNIT = tl.constexpr(2.0**32)  # of logs as integers, whose sums no layout of a tile changes
_LOWEST = tl.constexpr(-(2.0**20))  # a log of a decay that is 0


@triton.jit
def running_of(g):
    """Return the running sums over tokens (dim 0) of natural logs of decays g, in base 2.

    Sums are of integers, so that their bits do not depend on a tile's layout.
    """
    units = (tl.maximum(g * LOG2E, _LOWEST) * _UNIT).to(tl.int64)
    return tl.cumsum(units, 0).to(tl.float32) * (1 / _UNIT)


@triton.jit
def inverse_of(lower, TOKENS: tl.constexpr, OPERAND: tl.constexpr, PRECISION: tl.constexpr):
    """Return the inverse of 1 + lower, (TOKENS, TOKENS), rounded to OPERAND.

    lower: a strictly lower triangular tile, float32. Row t has the same bits as when it is computed
    from the earlier rows of the inverse alone, as a step does with the rows that a slot keeps.
    """
    blocks: tl.constexpr = TOKENS // SUB
    shape: tl.constexpr = (blocks, SUB, blocks, SUB)
    own = tl.arange(0, blocks)[:, None, None, None] == tl.arange(0, blocks)[None, None, :, None]
    within = tl.sum(tl.where(own, tl.reshape(lower, shape), 0.0), 2)
    row, column = tl.arange(0, SUB)[None, :, None], tl.arange(0, SUB)[None, None, :]
    solved = tl.zeros((blocks, SUB, SUB), tl.float32) + tl.where(row == column, 1.0, 0.0)
    for done in tl.static_range(SUB - 1):
        # Sums of one number each, so that their order cannot matter.
        known = tl.sum(tl.where(row == done, solved, 0.0), 1).to(OPERAND).to(tl.float32)
        factor = tl.sum(tl.where(column == done, within, 0.0), 2)
        solved -= factor[:, :, None] * known[:, None, :]
    diagonal = tl.where(own, solved[:, :, None, :], 0.0)
    diagonal = tl.reshape(diagonal, (TOKENS, TOKENS)).to(OPERAND)
    inverse = diagonal
    row, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    for block in tl.static_range(1, blocks):
        is_new = (row // SUB == block) & (column < block * SUB)
        taken = tl.where(is_new, lower, 0.0).to(OPERAND)
        taken = tl.dot(taken, inverse, input_precision=PRECISION).to(OPERAND)
        taken = tl.dot(diagonal, taken, input_precision=PRECISION)
        inverse = tl.where(is_new, (-taken).to(OPERAND), inverse)
    return inverse


@triton.jit
def solved(
    a,
    p,
    beta,
    TOKENS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    OPERAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return T and R of the module's formulas, (TOKENS, TOKENS) in OPERAND.

    a, p: lower (K K^T E) and lower (Q K^T E). With IS_DELTA T = (1 + strictly lower (beta a))^-1
    and R = p T; without it both are p.
    """
    if not IS_DELTA:
        return p.to(OPERAND), p.to(OPERAND)
    row, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    a = tl.where(row == column, 0.0, a * beta[:, None])
    t = inverse_of(a, TOKENS, OPERAND, PRECISION)
    return t, tl.dot(p.to(OPERAND), t, input_precision=PRECISION).to(OPERAND)


@triton.jit
def decays_between(running, TOKENS: tl.constexpr):
    """Return E (TOKENS, TOKENS): E_ts = 2^(running_t - running_s), and 0 where token s is later.

    running: (TOKENS,), the running sums of a head's logs of decays, in base 2.
    """
    row, column = tl.arange(0, TOKENS)[:, None], tl.arange(0, TOKENS)[None, :]
    logs = tl.where(row < column, float("-inf"), running[:, None] - running[None, :])
    return tl.math.exp2(logs)


@triton.jit
def sums_of_channels(x):
    """Return the sums (ROWS,) of the rows of x (ROWS, TILE_K), TILE_K at most 256.

    Neighbours are added two at a time, so that the bits do not depend on a tile's layout.
    """
    for _ in tl.static_range(8):
        if x.shape[1] > 1:
            x = tl.sum(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)), 2)
    return tl.reshape(x, (x.shape[0],))


@triton.jit
def pairs_by_channel(
    q,
    k,
    running,
    k_ptr,
    kept_k_ptr,
    g_ptr,
    kept_g_ptr,
    position,
    start,
    total,
    stride_k,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_KEPT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return lower (K K^T E) and lower (Q K^T E), (TOKENS, TOKENS), of decays for each channel.

    An element is the sum over channels of k_t k_s E_ts, or q_t k_s E_ts. running: (TOKENS, TILE_K),
    the running sums of logs of decays in base 2; the pointers, position, start and total are those
    of `rows.load_rows`, by which keys and decays of earlier tokens are read again.
    """
    row, key = tl.arange(0, TOKENS), tl.arange(0, TILE_K)
    k, q = k.to(tl.float32), q.to(tl.float32)
    a = tl.zeros((TOKENS, TOKENS), tl.float32)
    p = tl.zeros((TOKENS, TOKENS), tl.float32)
    # Tokens of earlier blocks: both decays are from or to the block's start, at most 1.
    for block in tl.static_range(1, TOKENS // SUB):
        begins = block * SUB
        anchor = tl.sum(tl.where((row == begins - 1)[:, None], running, 0.0), 0)[None, :]
        to_anchor = tl.math.exp2(tl.minimum(running - anchor, 0.0))
        from_anchor = tl.math.exp2(tl.minimum(anchor - running, 0.0))
        earlier = tl.trans(tl.where((row < begins)[:, None], k * from_anchor, 0.0))
        is_block = (row // SUB == block)[:, None]
        later_k = tl.where(is_block, k * to_anchor, 0.0)
        a = tl.dot(later_k, earlier, a, input_precision=PRECISION)
        later_q = tl.where(is_block, q * to_anchor, 0.0)
        p = tl.dot(later_q, earlier, p, input_precision=PRECISION)
    # Tokens of the same block, those `back` tokens apart together.
    between = tl.zeros((TOKENS, TILE_K), tl.float32)
    for back in range(0, SUB):
        in_block = row % SUB >= back
        other = tl.where(in_block, position - back, position)
        if back > 0:
            between += LOG2E * load_rows(
                g_ptr,
                kept_g_ptr,
                tl.where(in_block, other + 1, position),
                start,
                total,
                NUM_HEADS * KEY_DIM,
                NUM_HEADS * KEY_DIM,
                key,
                KEY_DIM,
                HAS_KEPT,
                TOKENS,
            )
        before = load_rows(
            k_ptr,
            kept_k_ptr,
            other,
            start,
            total,
            stride_k,
            KEY_HEADS * KEY_DIM,
            key,
            KEY_DIM,
            HAS_KEPT,
            TOKENS,
        )
        faded = before.to(tl.float32) * tl.math.exp2(between)
        is_pair = (row[:, None] - row[None, :] == back) & in_block[:, None]
        a += tl.where(is_pair, sums_of_channels(k * faded)[:, None], 0.0)
        p += tl.where(is_pair, sums_of_channels(q * faded)[:, None], 0.0)
    return a, p


@triton.jit(do_not_specialize=["num_sequences"])
def pairs_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    t_ptr,
    r_ptr,
    running_ptr,
    k_in_ptr,
    q_in_ptr,
    k_out_ptr,
    kept_k_ptr,
    kept_g_ptr,
    kept_beta_ptr,
    kept_t_ptr,
    edges_ptr,
    slots_ptr,
    starts_ptr,
    num_sequences,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    number, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    sequence = sequence_of(edges_ptr, num_sequences, number, HAS_SLOTS, TOKENS)
    first = tl.load(edges_ptr + sequence)
    total = tl.load(edges_ptr + sequence + 1) - first
    slot, start = sequence.to(tl.int64), 0
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + sequence)
        start = tl.load(starts_ptr + sequence).to(tl.int32)
        if slot < 0 or total <= 0:
            return
        total += start
    chunk = start // TOKENS + number - number_of(first, sequence, HAS_SLOTS, TOKENS)
    if chunk * TOKENS >= total:
        return
    row, key = tl.arange(0, TOKENS), tl.arange(0, TILE_K)
    position = chunk * TOKENS + row
    key_head, first = head // (NUM_HEADS // KEY_HEADS), first.to(tl.int64)
    operand: tl.constexpr = t_ptr.dtype.element_ty
    k_ptr += first * stride_k + key_head * stride_kh
    kept_k_ptr += (slot * TOKENS * KEY_HEADS + key_head) * KEY_DIM
    k = load_rows(
        k_ptr,
        kept_k_ptr,
        position,
        start,
        total,
        stride_k,
        KEY_HEADS * KEY_DIM,
        key,
        KEY_DIM,
        HAS_SLOTS,
        TOKENS,
    ).to(operand)
    # Queries of tokens that were there before are not asked for again.
    q_ptr += first * stride_q + key_head * stride_qh
    q = load_rows(
        q_ptr, q_ptr, position, start, total, stride_q, 0, key, KEY_DIM, False, TOKENS
    ).to(operand)
    gate, kept_gate = first * NUM_HEADS + head, slot * TOKENS * NUM_HEADS + head
    beta = load_numbers(
        beta_ptr + gate,
        kept_beta_ptr + kept_gate,
        position,
        start,
        total,
        NUM_HEADS,
        HAS_SLOTS,
        TOKENS,
    )
    at = tl.program_id(0).to(tl.int64) * TOKENS
    if BY_CHANNEL:
        g_ptr += gate * KEY_DIM
        kept_g_ptr += kept_gate * KEY_DIM
        g = load_rows(
            g_ptr,
            kept_g_ptr,
            position,
            start,
            total,
            NUM_HEADS * KEY_DIM,
            NUM_HEADS * KEY_DIM,
            key,
            KEY_DIM,
            HAS_SLOTS,
            TOKENS,
        )
        running = running_of(g)
        a, p = pairs_by_channel(
            q,
            k,
            running,
            k_ptr,
            kept_k_ptr,
            g_ptr,
            kept_g_ptr,
            position,
            start,
            total,
            stride_k,
            NUM_HEADS,
            KEY_HEADS,
            KEY_DIM,
            TILE_K,
            TOKENS,
            HAS_SLOTS,
            PRECISION,
        )
        last = tl.sum(tl.where((row == TOKENS - 1)[:, None], running, 0.0), 0)
        inside = key < KEY_DIM
        tl.store(running_ptr + tl.program_id(0).to(tl.int64) * KEY_DIM + key, last, mask=inside)
        into = tl.math.exp2(running)
        rows = (at + row[:, None]) * KEY_DIM + key[None, :]
        k = k.to(tl.float32)
        out = k * tl.math.exp2(last[None, :] - running)
        tl.store(k_in_ptr + rows, (k * into).to(operand), mask=inside[None, :])
        tl.store(q_in_ptr + rows, (q.to(tl.float32) * into).to(operand), mask=inside[None, :])
        tl.store(k_out_ptr + rows, out.to(operand), mask=inside[None, :])
    else:
        g = load_numbers(
            g_ptr + gate,
            kept_g_ptr + kept_gate,
            position,
            start,
            total,
            NUM_HEADS,
            HAS_SLOTS,
            TOKENS,
        )
        running = running_of(g)
        tl.store(running_ptr + at + row, running)
        decays = decays_between(running, TOKENS)
        a = tl.dot(k, tl.trans(k), input_precision=PRECISION) * decays
        p = tl.dot(q, tl.trans(k), input_precision=PRECISION) * decays
    t, r = solved(a, p, beta, TOKENS, IS_DELTA, operand, PRECISION)
    at = (at + row[:, None]) * TOKENS + row[None, :]
    if IS_DELTA:
        tl.store(t_ptr + at, t)
    if IS_DELTA and HAS_SLOTS:
        # Rows of an open chunk; those that were there before have the same bits already.
        kept_at = ((slot * TOKENS + row[:, None]) * NUM_HEADS + head) * TOKENS + row[None, :]
        is_open = (position >= start) & (position < total) & ((chunk + 1) * TOKENS > total)
        tl.store(kept_t_ptr + kept_at, t, mask=is_open[:, None])
    tl.store(r_ptr + at, r)
