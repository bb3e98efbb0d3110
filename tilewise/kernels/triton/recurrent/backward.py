"""The gradients of the gated delta rule and of Mamba-2's recurrence, with a decay for each head.

what     with S before and dS' after each chunk, U, T and R of scan.py and pairs.py, and
             W = T (beta E K),  Z = q_scale (E Q - R (beta E K)),  G = (E_64 / E K) dS',
             U = T (beta V) - W S,  S' = E_64 S + (E_64 / E K)^T U
             dS = Z^T dO - W^T G + E_64 dS'
         or U = beta V and dS = q_scale (E Q)^T dO + E_64 dS' where nothing corrects; then
             Y = q_scale R^T dO + T^T G (or + G),  dV = beta Y
             dP = q_scale dO U^T, dA = -Y U^T, and of them and S and dS' what q, k, beta and g get
grid     pairs.py; (chunks x heads) for W, Z and T (beta V); (sequences x heads, tiles of columns
         of V, 2) for S and, at the same time, dS; (chunks x heads) for Y, dV, dP and dA; (chunks x
         parts of the heads that share keys, tiles of the columns of K) for dq and dk
program  the last: the heads of its part, one after the other, whose dq and dk it adds up, of a
         tile of their columns
traffic  S and dS' written and read once in the operands' dtype, 512 bytes of a token of 128 x 128;
         W, Z, U, G and Y are written and read, dP and dA take the places of R and T
numerics as scan.py; W and Z are rounded to the operands' dtype; sums over heads, chunks and columns
         have one order
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.spec import CHUNK, RecurrentSpec
from tilewise.kernels.triton.recurrent.pairs import decays_between
from tilewise.kernels.triton.recurrent.rows import most_chunks, number_of, sequence_of
from tilewise.kernels.triton.recurrent.scan import Pairs, dense, prepare
from tilewise.kernels.triton.recurrent.scan import why_not as why_not_forward

_MOST_HEADS = 8  # of a program, one after the other
# Columns of a tile at least: of tiles with 16 keys Triton 3.6 made a kernel on Hopper that read
# where it must not.
_LEAST = 64
_TILE_V = 32
# H200, 2026-11-30, 16,384 tokens of 32 heads of 128 x 128: 0.45 and 0.89 ms.
_PAIRS: dict[str, int] = {"TILE_V": 64, "num_warps": 4, "num_stages": 1}
_KEYS: dict[str, int] = {"TILE_K": 64, "TILE_V": 32, "num_warps": 4, "num_stages": 3}


def why_not(spec: RecurrentSpec) -> str | None:
    """Return why these kernels cannot compute the gradient of a call, or None if they can."""
    if spec.decays_by_channel:
        return "decays must be those of heads, got decays by channel"
    return why_not_forward(spec)


@triton.jit
def load_tile(ptr, stride, left, column, WIDTH: tl.constexpr, TOKENS: tl.constexpr):
    """Return a tile (TOKENS, columns) of the rows from `ptr` on, 0 from row `left` on.

    column: the numbers of the columns, 0 from WIDTH on; stride: the elements from row to row. The
    place in a tile is a small integer beside an address that all threads share: wide addresses of
    each thread would be kept in registers.
    """
    row = tl.arange(0, TOKENS)
    mask = (row < left)[:, None] & (column < WIDTH)[None, :]
    return tl.load(ptr + (row[:, None] * stride + column[None, :]), mask=mask, other=0.0)


@triton.jit
def load_state(ptr, key, column, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr):
    """Return a tile of a contiguous state (KEY_DIM, VALUE_DIM) at `ptr`, 0 outside of it.

    key, column: the numbers of its rows and columns.
    """
    mask = (key < KEY_DIM)[:, None] & (column < VALUE_DIM)[None, :]
    return tl.load(ptr + (key[:, None] * VALUE_DIM + column[None, :]), mask=mask, other=0.0)


@triton.jit(do_not_specialize=["q_scale", "num_sequences"])
def _correct_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    t_ptr,
    r_ptr,
    running_ptr,
    w_ptr,
    z_ptr,
    u_ptr,
    edges_ptr,
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
    PRECISION: tl.constexpr,
):
    """Write W, Z and T (beta V) of a chunk of a head, by the module's formulas; to w, z and u."""
    number, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    sequence = sequence_of(edges_ptr, num_sequences, number, False, TOKENS)
    first = tl.load(edges_ptr + sequence)
    total = tl.load(edges_ptr + sequence + 1) - first
    chunk = number - number_of(first, sequence, False, TOKENS)
    left = total - chunk * TOKENS
    if left <= 0:
        return
    row, key, value = tl.arange(0, TOKENS), tl.arange(0, TILE_K), tl.arange(0, TILE_V)
    first, key_head = (first + chunk * TOKENS).to(tl.int64), head // (NUM_HEADS // KEY_HEADS)
    operand: tl.constexpr = u_ptr.dtype.element_ty
    at = tl.program_id(0).to(tl.int64) * TOKENS
    t = load_tile(t_ptr + at * TOKENS, TOKENS, TOKENS, row, TOKENS, TOKENS)
    r = load_tile(r_ptr + at * TOKENS, TOKENS, TOKENS, row, TOKENS, TOKENS)
    into = tl.math.exp2(tl.load(running_ptr + at + row))
    beta_ptr += first * NUM_HEADS + head
    beta = tl.load(beta_ptr + row * NUM_HEADS, mask=row < left, other=0.0)
    v_ptr += first * stride_v + head * stride_vh
    u_ptr += at * VALUE_DIM
    for begins in range(0, VALUE_DIM, TILE_V):
        column = begins + value
        v = load_tile(v_ptr, stride_v, left, column, VALUE_DIM, TOKENS)
        v = (v.to(tl.float32) * beta[:, None]).to(operand)
        u = tl.dot(t, v, input_precision=PRECISION).to(operand)
        u_at = u_ptr + (row[:, None] * VALUE_DIM + column[None, :])
        tl.store(u_at, u, mask=column[None, :] < VALUE_DIM)
    q_ptr += first * stride_q + key_head * stride_qh
    k_ptr += first * stride_k + key_head * stride_kh
    k = load_tile(k_ptr, stride_k, left, key, KEY_DIM, TOKENS)
    k = (k.to(tl.float32) * (beta * into)[:, None]).to(operand)
    key_at, in_keys = row[:, None] * KEY_DIM + key[None, :], key[None, :] < KEY_DIM
    w = tl.dot(t, k, input_precision=PRECISION).to(operand)
    tl.store(w_ptr + at * KEY_DIM + key_at, w, mask=in_keys)
    q = load_tile(q_ptr, stride_q, left, key, KEY_DIM, TOKENS)
    z = q.to(tl.float32) * into[:, None] - tl.dot(r, k, input_precision=PRECISION)
    tl.store(z_ptr + at * KEY_DIM + key_at, (z * q_scale).to(operand), mask=in_keys)


@triton.jit
def _states_before(
    k_ptr,
    v_ptr,
    beta_ptr,
    running_ptr,
    w_ptr,
    states_ptr,
    u_ptr,
    number,
    first,
    total,
    head,
    column,
    state,
    stride_k,
    stride_v,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the state before each chunk of a sequence, and U where T (beta V) was.

    state: the state before the sequence, a tile of some columns of one head. Without the delta rule
    U is not written.
    """
    operand: tl.constexpr = u_ptr.dtype.element_ty
    row, key = tl.arange(0, TOKENS), tl.arange(0, TILE_K)
    in_values = column[None, :] < VALUE_DIM
    tile = key[:, None] * VALUE_DIM + column[None, :]
    in_state = (key < KEY_DIM)[:, None] & in_values
    for chunk in range(0, tl.cdiv(total, TOKENS)):
        begins, left = first + chunk * TOKENS, total - chunk * TOKENS
        at = ((number + chunk).to(tl.int64) * NUM_HEADS + head) * TOKENS
        k = load_tile(k_ptr + begins * stride_k, stride_k, left, key, KEY_DIM, TOKENS).to(operand)
        running = tl.load(running_ptr + at + row)
        last = tl.load(running_ptr + at + TOKENS - 1)
        out = tl.math.exp2(last - running)[:, None]
        seen = state.to(operand)
        tl.store(states_ptr + at // TOKENS * (KEY_DIM * VALUE_DIM) + tile, seen, mask=in_state)
        if IS_DELTA:
            w = load_tile(w_ptr + at * KEY_DIM, KEY_DIM, TOKENS, key, KEY_DIM, TOKENS)
            u_at = u_ptr + at * VALUE_DIM + (row[:, None] * VALUE_DIM + column[None, :])
            u = tl.load(u_at, mask=in_values, other=0.0).to(tl.float32)
            u -= tl.dot(w, seen, input_precision=PRECISION)
            tl.store(u_at, u.to(operand), mask=in_values)
        else:
            v_at = v_ptr + begins * stride_v
            v = load_tile(v_at, stride_v, left, column, VALUE_DIM, TOKENS).to(tl.float32)
            gate = beta_ptr + begins * NUM_HEADS + head
            u = v * tl.load(gate + row * NUM_HEADS, mask=row < left, other=0.0)[:, None]
        u = (u * out).to(operand)
        state = tl.dot(tl.trans(k), u, state * tl.math.exp2(last), input_precision=PRECISION)


@triton.jit
def _gradients_after(
    q_ptr,
    k_ptr,
    do_ptr,
    running_ptr,
    w_ptr,
    z_ptr,
    dstates_ptr,
    y_ptr,
    number,
    first,
    total,
    head,
    column,
    dstate,
    stride_q,
    stride_k,
    stride_do,
    q_scale,
    NUM_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write the gradient of the state after each chunk of a sequence, and G, to dstates and y.

    G is that of the module's formulas. dstate: the gradient of the state after the sequence, a tile
    of some columns of one head.

    Returns:
        The gradient of the state before the sequence, the same tile.
    """
    operand: tl.constexpr = y_ptr.dtype.element_ty
    row, key = tl.arange(0, TOKENS), tl.arange(0, TILE_K)
    in_values = column[None, :] < VALUE_DIM
    tile = key[:, None] * VALUE_DIM + column[None, :]
    in_state = (key < KEY_DIM)[:, None] & in_values
    chunks = tl.cdiv(total, TOKENS)
    for back in range(0, chunks):
        chunk = chunks - 1 - back
        begins, left = first + chunk * TOKENS, total - chunk * TOKENS
        at = ((number + chunk).to(tl.int64) * NUM_HEADS + head) * TOKENS
        k = load_tile(k_ptr + begins * stride_k, stride_k, left, key, KEY_DIM, TOKENS).to(operand)
        do_at = do_ptr + begins * stride_do
        do = load_tile(do_at, stride_do, left, column, VALUE_DIM, TOKENS)
        running = tl.load(running_ptr + at + row)
        last = tl.load(running_ptr + at + TOKENS - 1)
        seen = dstate.to(operand)
        tl.store(dstates_ptr + at // TOKENS * (KEY_DIM * VALUE_DIM) + tile, seen, mask=in_state)
        y = tl.dot(k, seen, input_precision=PRECISION)
        y = (y * tl.math.exp2(last - running)[:, None]).to(operand)
        y_at = y_ptr + at * VALUE_DIM + (row[:, None] * VALUE_DIM + column[None, :])
        tl.store(y_at, y, mask=in_values)
        dstate *= tl.math.exp2(last)
        if IS_DELTA:
            z = load_tile(z_ptr + at * KEY_DIM, KEY_DIM, TOKENS, key, KEY_DIM, TOKENS)
            w = load_tile(w_ptr + at * KEY_DIM, KEY_DIM, TOKENS, key, KEY_DIM, TOKENS)
            dstate = tl.dot(tl.trans(z), do.to(operand), dstate, input_precision=PRECISION)
            dstate = tl.dot(tl.trans(w), -y, dstate, input_precision=PRECISION)
        else:
            q_at = q_ptr + begins * stride_q
            q = load_tile(q_at, stride_q, left, key, KEY_DIM, TOKENS).to(operand)
            given = do.to(tl.float32) * (tl.math.exp2(running) * q_scale)[:, None]
            dstate = tl.dot(tl.trans(q), given.to(operand), dstate, input_precision=PRECISION)
    return dstate


@triton.jit(do_not_specialize=["q_scale"])
def _states_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    do_ptr,
    running_ptr,
    w_ptr,
    z_ptr,
    states_ptr,
    dstates_ptr,
    u_ptr,
    y_ptr,
    before_ptr,
    dafter_ptr,
    dbefore_ptr,
    edges_ptr,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    stride_do,
    stride_doh,
    q_scale,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    sequence, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    first = tl.load(edges_ptr + sequence)
    total = tl.load(edges_ptr + sequence + 1) - first
    number = number_of(first, sequence, False, TOKENS)
    key_head, first = head // (NUM_HEADS // KEY_HEADS), first.to(tl.int64)
    key, column = tl.arange(0, TILE_K), tl.program_id(1) * TILE_V + tl.arange(0, TILE_V)
    q_ptr += key_head * stride_qh
    k_ptr += key_head * stride_kh
    v_ptr += head * stride_vh
    do_ptr += head * stride_doh
    in_state = (key[:, None] < KEY_DIM) & (column[None, :] < VALUE_DIM)
    state_at = (sequence.to(tl.int64) * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    state_at += key[:, None] * VALUE_DIM + column[None, :]
    state = tl.zeros((TILE_K, TILE_V), tl.float32)
    if tl.program_id(2) == 0:
        if HAS_BEFORE:
            state = tl.load(before_ptr + state_at, mask=in_state, other=0.0)
        _states_before(
            k_ptr,
            v_ptr,
            beta_ptr,
            running_ptr,
            w_ptr,
            states_ptr,
            u_ptr,
            number,
            first,
            total,
            head,
            column,
            state,
            stride_k,
            stride_v,
            NUM_HEADS,
            KEY_DIM,
            VALUE_DIM,
            TILE_K,
            TOKENS,
            IS_DELTA,
            PRECISION,
        )
    else:
        if HAS_AFTER:
            state = tl.load(dafter_ptr + state_at, mask=in_state, other=0.0)
        state = _gradients_after(
            q_ptr,
            k_ptr,
            do_ptr,
            running_ptr,
            w_ptr,
            z_ptr,
            dstates_ptr,
            y_ptr,
            number,
            first,
            total,
            head,
            column,
            state,
            stride_q,
            stride_k,
            stride_do,
            q_scale,
            NUM_HEADS,
            KEY_DIM,
            VALUE_DIM,
            TILE_K,
            TOKENS,
            IS_DELTA,
            PRECISION,
        )
        tl.store(dbefore_ptr + state_at, state, mask=in_state)


@triton.jit(do_not_specialize=["q_scale", "num_rows", "num_sequences"])
def _pairs_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    do_ptr,
    t_ptr,
    r_ptr,
    running_ptr,
    u_ptr,
    y_ptr,
    dv_ptr,
    dg_ptr,
    dbeta_ptr,
    edges_ptr,
    num_rows,
    num_sequences,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    stride_do,
    stride_doh,
    q_scale,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write dv of a chunk of a head, and the shares of pairs of tokens in dg and dbeta.

    Y, dP and dA of the module's formulas are written where G, R and T were. Rows that no sequence
    has get zeros.
    """
    number, head = tl.program_id(0) // NUM_HEADS, tl.program_id(0) % NUM_HEADS
    row, key, value = tl.arange(0, TOKENS), tl.arange(0, TILE_K), tl.arange(0, TILE_V)
    # Rows that no sequence has.
    outside = tl.load(edges_ptr + num_sequences) + number * TOKENS + row
    is_outside = outside < num_rows
    at = outside.to(tl.int64) * NUM_HEADS + head
    tl.store(dg_ptr + at, tl.zeros((TOKENS,), dg_ptr.dtype.element_ty), mask=is_outside)
    tl.store(dbeta_ptr + at, tl.zeros((TOKENS,), dg_ptr.dtype.element_ty), mask=is_outside)
    for begins in range(0, VALUE_DIM, TILE_V):
        column = begins + value[None, :]
        mask = is_outside[:, None] & (column < VALUE_DIM)
        nothing = tl.zeros((TOKENS, TILE_V), dv_ptr.dtype.element_ty)
        tl.store(dv_ptr + at[:, None] * VALUE_DIM + column, nothing, mask=mask)
    sequence = sequence_of(edges_ptr, num_sequences, number, False, TOKENS)
    first = tl.load(edges_ptr + sequence)
    total = tl.load(edges_ptr + sequence + 1) - first
    chunk = number - number_of(first, sequence, False, TOKENS)
    left = total - chunk * TOKENS
    if left <= 0:
        return
    first = (first + chunk * TOKENS).to(tl.int64)
    key_head = head // (NUM_HEADS // KEY_HEADS)
    operand: tl.constexpr = y_ptr.dtype.element_ty
    q_ptr += first * stride_q + key_head * stride_qh
    k_ptr += first * stride_k + key_head * stride_kh
    v_ptr += first * stride_v + head * stride_vh
    do_ptr += first * stride_do + head * stride_doh
    at = tl.program_id(0).to(tl.int64) * TOKENS
    running_ptr += at
    t_ptr += at * TOKENS
    r_ptr += at * TOKENS
    y_ptr += at * VALUE_DIM
    u_ptr += at * VALUE_DIM
    at = first * NUM_HEADS + head
    beta_ptr += at
    dg_ptr += at
    dbeta_ptr += at
    dv_ptr += at * VALUE_DIM
    gate, is_token = row * NUM_HEADS, row < left
    beta = tl.load(beta_ptr + gate, mask=is_token, other=0.0)
    dbeta = tl.zeros((TOKENS,), tl.float32)
    of_keys = tl.zeros((TOKENS,), tl.float32)
    dp = tl.zeros((TOKENS, TOKENS), tl.float32)
    da = tl.zeros((TOKENS, TOKENS), tl.float32)
    for begins in range(0, VALUE_DIM, TILE_V):
        column = begins + value
        in_values = column[None, :] < VALUE_DIM
        do = load_tile(do_ptr, stride_do, left, column, VALUE_DIM, TOKENS).to(operand)
        y = load_tile(y_ptr, VALUE_DIM, TOKENS, column, VALUE_DIM, TOKENS)
        r = load_tile(r_ptr, TOKENS, TOKENS, row, TOKENS, TOKENS)
        v = load_tile(v_ptr, stride_v, left, column, VALUE_DIM, TOKENS).to(tl.float32)
        if IS_DELTA:
            u = load_tile(u_ptr, VALUE_DIM, TOKENS, column, VALUE_DIM, TOKENS)
        else:
            u = (v * beta[:, None]).to(operand)
        # The product of a token's key and of what later states add to its gradient.
        of_keys += tl.sum(u.to(tl.float32) * y.to(tl.float32), 1)
        wide = tl.dot(tl.trans(r), do, input_precision=PRECISION) * q_scale
        if IS_DELTA:
            t = load_tile(t_ptr, TOKENS, TOKENS, row, TOKENS, TOKENS)
            wide = tl.dot(tl.trans(t), y, wide, input_precision=PRECISION)
        else:
            wide += y.to(tl.float32)
        dbeta += tl.sum(wide * v, 1)
        dv_at = dv_ptr + (row[:, None] * (NUM_HEADS * VALUE_DIM) + column[None, :])
        dv = (wide * beta[:, None]).to(dv_ptr.dtype.element_ty)
        tl.store(dv_at, dv, mask=is_token[:, None] & in_values)
        y = wide.to(operand)
        if IS_DELTA:
            tl.store(y_ptr + (row[:, None] * VALUE_DIM + column[None, :]), y, mask=in_values)
            da = tl.dot(y, tl.trans(u), da, input_precision=PRECISION)
        dp = tl.dot(do, tl.trans(u), dp, input_precision=PRECISION)
    pair = row[:, None] * TOKENS + row[None, :]
    decays = decays_between(tl.load(running_ptr + row), TOKENS)
    dp *= decays * q_scale
    tl.store(r_ptr + pair, dp.to(operand))
    k = load_tile(k_ptr, stride_k, left, key, KEY_DIM, TOKENS).to(operand)
    q = load_tile(q_ptr, stride_q, left, key, KEY_DIM, TOKENS).to(operand)
    dp *= tl.dot(q, tl.trans(k), input_precision=PRECISION)
    drunning = tl.sum(dp, 1) - tl.sum(dp, 0) - of_keys
    drunning += tl.where(row == TOKENS - 1, tl.sum(of_keys), 0.0)
    if IS_DELTA:
        da = tl.where(row[:, None] > row[None, :], -da * decays, 0.0)
        tl.store(t_ptr + pair, (da * beta[:, None]).to(operand))
        da *= tl.dot(k, tl.trans(k), input_precision=PRECISION)
        of_rows = tl.sum(da, 1)
        dbeta += of_rows
        drunning += of_rows * beta - tl.sum(da * beta[:, None], 0)
    tl.store(dg_ptr + gate, tl.cumsum(drunning, 0, reverse=True), mask=is_token)
    tl.store(dbeta_ptr + gate, dbeta, mask=is_token)


@triton.jit(do_not_specialize=["q_scale", "num_rows", "num_sequences"])
def _keys_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    beta_ptr,
    do_ptr,
    t_ptr,
    r_ptr,
    running_ptr,
    states_ptr,
    dstates_ptr,
    u_ptr,
    y_ptr,
    dq_ptr,
    dk_ptr,
    dg_ptr,
    dbeta_ptr,
    edges_ptr,
    num_rows,
    num_sequences,
    stride_q,
    stride_qh,
    stride_k,
    stride_kh,
    stride_v,
    stride_vh,
    stride_do,
    stride_doh,
    q_scale,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILE_K: tl.constexpr,
    TILE_V: tl.constexpr,
    TOKENS: tl.constexpr,
    HEADS: tl.constexpr,
    IS_DELTA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write a tile of columns of a chunk's dq and dk, and the shares of states in dg and dbeta.

    dq and dk are summed over the HEADS heads of the program's part. Rows that no sequence has get
    zeros.
    """
    parts: tl.constexpr = NUM_HEADS // HEADS
    number, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    row, value = tl.arange(0, TOKENS), tl.arange(0, TILE_V)
    key = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    # What a tile of keys adds to the gradients of g and beta, after what pairs add.
    dg_ptr += (tl.program_id(1) + 1) * (num_rows.to(tl.int64) * NUM_HEADS)
    dbeta_ptr += (tl.program_id(1) + 1) * (num_rows.to(tl.int64) * NUM_HEADS)
    # Rows that no sequence has.
    outside = tl.load(edges_ptr + num_sequences) + number * TOKENS + row
    is_outside = outside < num_rows
    outside = outside.to(tl.int64)
    in_keys = key[None, :] < KEY_DIM
    key_at = (outside[:, None] * parts + part) * KEY_DIM + key[None, :]
    zeros = tl.zeros((TOKENS, TILE_K), dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + key_at, zeros, mask=is_outside[:, None] & in_keys)
    tl.store(dk_ptr + key_at, zeros, mask=is_outside[:, None] & in_keys)
    for head in range(part * HEADS, part * HEADS + HEADS):
        at = outside * NUM_HEADS + head
        tl.store(dg_ptr + at, tl.zeros((TOKENS,), dg_ptr.dtype.element_ty), mask=is_outside)
        tl.store(dbeta_ptr + at, tl.zeros((TOKENS,), dg_ptr.dtype.element_ty), mask=is_outside)
    sequence = sequence_of(edges_ptr, num_sequences, number, False, TOKENS)
    first = tl.load(edges_ptr + sequence)
    total = tl.load(edges_ptr + sequence + 1) - first
    chunk = number - number_of(first, sequence, False, TOKENS)
    left = total - chunk * TOKENS
    if left <= 0:
        return
    first = (first + chunk * TOKENS).to(tl.int64)
    key_head = part * HEADS // (NUM_HEADS // KEY_HEADS)
    operand: tl.constexpr = y_ptr.dtype.element_ty
    q_ptr += first * stride_q + key_head * stride_qh
    k_ptr += first * stride_k + key_head * stride_kh
    v_ptr += first * stride_v
    do_ptr += first * stride_do
    is_token = row < left
    dq = tl.zeros((TOKENS, TILE_K), tl.float32)
    dk = tl.zeros((TOKENS, TILE_K), tl.float32)
    for head in range(part * HEADS, part * HEADS + HEADS):
        number_of_head = number.to(tl.int64) * NUM_HEADS + head
        running_at = running_ptr + number_of_head * TOKENS
        running, last = tl.load(running_at + row), tl.load(running_at + TOKENS - 1)
        gate = first * NUM_HEADS + head
        beta = tl.load(beta_ptr + gate + row * NUM_HEADS, mask=is_token, other=0.0)
        into, out = tl.math.exp2(running), tl.math.exp2(last - running)
        s_ptr = states_ptr + number_of_head * (KEY_DIM * VALUE_DIM)
        ds_ptr = dstates_ptr + number_of_head * (KEY_DIM * VALUE_DIM)
        y_at = y_ptr + number_of_head * (TOKENS * VALUE_DIM)
        u_at = u_ptr + number_of_head * (TOKENS * VALUE_DIM)
        of_q = tl.zeros((TOKENS, TILE_K), tl.float32)
        of_y = tl.zeros((TOKENS, TILE_K), tl.float32)
        of_u = tl.zeros((TOKENS, TILE_K), tl.float32)
        of_states = tl.zeros((TILE_K, TILE_V), tl.float32)
        # Two steps at least: were there one, the loop over heads would be pipelined in its place.
        for begins in range(0, VALUE_DIM if VALUE_DIM > TILE_V else 2 * TILE_V, TILE_V):
            column = begins + value
            do = load_tile(do_ptr + head * stride_doh, stride_do, left, column, VALUE_DIM, TOKENS)
            s = load_state(s_ptr, key, column, KEY_DIM, VALUE_DIM)
            ds = load_state(ds_ptr, key, column, KEY_DIM, VALUE_DIM)
            of_q = tl.dot(do.to(operand), tl.trans(s), of_q, input_precision=PRECISION)
            if IS_DELTA:
                y = load_tile(y_at, VALUE_DIM, TOKENS, column, VALUE_DIM, TOKENS)
                u = load_tile(u_at, VALUE_DIM, TOKENS, column, VALUE_DIM, TOKENS)
                of_y = tl.dot(y, tl.trans(s), of_y, input_precision=PRECISION)
            else:
                v = load_tile(v_ptr + head * stride_vh, stride_v, left, column, VALUE_DIM, TOKENS)
                u = (v.to(tl.float32) * beta[:, None]).to(operand)
            of_u = tl.dot(u, tl.trans(ds), of_u, input_precision=PRECISION)
            of_states += s.to(tl.float32) * ds.to(tl.float32)
        dk += of_u * out[:, None]
        # Loaded for each head: what is held through all of them would be held in float32.
        q = load_tile(q_ptr, stride_q, left, key, KEY_DIM, TOKENS).to(operand)
        of_q *= (into * q_scale)[:, None]
        dq += of_q
        drunning = tl.sum(q.to(tl.float32) * of_q, 1)
        dlast = tl.sum(of_states) * tl.math.exp2(last)
        drunning += tl.where(row == TOKENS - 1, dlast, 0.0)
        k = load_tile(k_ptr, stride_k, left, key, KEY_DIM, TOKENS).to(operand)
        if IS_DELTA:
            of_y *= into[:, None]
            of_keys = tl.sum(k.to(tl.float32) * of_y, 1)
            dk -= of_y * beta[:, None]
            drunning -= beta * of_keys
            tl.store(dbeta_ptr + gate + row * NUM_HEADS, -of_keys, mask=is_token)
        else:
            nothing = tl.zeros((TOKENS,), tl.float32)
            tl.store(dbeta_ptr + gate + row * NUM_HEADS, nothing, mask=is_token)
        dg = tl.cumsum(drunning, 0, reverse=True)
        tl.store(dg_ptr + gate + row * NUM_HEADS, dg, mask=is_token)
        tile_at = number_of_head * (TOKENS * TOKENS)
        p = load_tile(r_ptr + tile_at, TOKENS, TOKENS, row, TOKENS, TOKENS)
        dq = tl.dot(p, k, dq, input_precision=PRECISION)
        dk = tl.dot(tl.trans(p), q, dk, input_precision=PRECISION)
        if IS_DELTA:
            a = load_tile(t_ptr + tile_at, TOKENS, TOKENS, row, TOKENS, TOKENS)
            dk = tl.dot(a, k, dk, input_precision=PRECISION)
            dk = tl.dot(tl.trans(a), k, dk, input_precision=PRECISION)
    dq_ptr += (first * parts + part) * KEY_DIM
    dk_ptr += (first * parts + part) * KEY_DIM
    key_at, mask = row[:, None] * (parts * KEY_DIM) + key[None, :], is_token[:, None] & in_keys
    tl.store(dq_ptr + key_at, dq.to(dq_ptr.dtype.element_ty), mask=mask)
    tl.store(dk_ptr + key_at, dk.to(dk_ptr.dtype.element_ty), mask=mask)


@planned
def gradient(
    maker: Maker,
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    dstate: Tensor | None,
    edges: Tensor,
    *,
    q_scale: float,
    is_delta: bool,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, beta and the state before each sequence.

    The last one is float32 (N, H, K, V), computed also if there is no initial_state.

    Args:
        do: (T, H, V), the gradient of o.
        q, k, v, beta, initial_state, q_scale: the packed arguments of `ops.gated_delta`.
        g: (T, H), the log of each head's decay; calls with a decay for each channel are computed by
            `ops.recurrent.chunks` instead.
        dstate: (N, H, K, V), the gradient of the state after each sequence; None where it is 0.
        edges: int32 (N + 1,), the first row of each sequence, and the end of the last.
        is_delta: True for the delta rule, False for the plain sum of `ops.ssd`.
    """
    key_heads, key_dim, num_heads, value_dim = *k.shape[1:], *v.shape[1:]
    num_sequences = edges.shape[0] - 1
    shape = (num_sequences, num_heads, key_dim, value_dim)
    chunks = most_chunks(len(v), num_sequences, False, CHUNK)
    if num_sequences < 1 or 0 in (chunks, value_dim, key_dim, num_heads):
        kept = maker.full(shape, 0.0, torch.float32) if dstate is None else maker.copy(dstate)
        return (*(maker.full(x.shape, 0.0, x.dtype) for x in (q, k, v, g, beta)), kept)
    dbefore, beta = maker.empty(shape, torch.float32), dense(maker, beta)
    if do.stride(-1) != 1:
        do = maker.copy(do)
    places = (edges, edges, edges)
    pairs = prepare(maker, q, k, v, dense(maker, g), beta, None, places, is_delta)
    tile_k = max(_LEAST, pairs.constants["TILE_K"])
    constants: dict[str, Any] = pairs.constants | {"VALUE_DIM": value_dim, "TILE_K": tile_k}
    for unused in ("HAS_SLOTS", "BY_CHANNEL"):
        del constants[unused]

    def empty(*shape: int) -> Tensor:
        return maker.empty((chunks, num_heads, *shape), pairs.operand)

    states, dstates = empty(key_dim, value_dim), empty(key_dim, value_dim)
    y = empty(CHUNK, value_dim)
    u = empty(CHUNK, value_dim) if is_delta else y
    w, z = (empty(CHUNK, key_dim) if is_delta else y for _ in range(2))
    rows = (q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    strides = (*rows, do.stride(0), do.stride(1), q_scale)
    width = max(_LEAST, triton.next_power_of_2(value_dim))
    if is_delta:
        corrected = constants.copy()
        del corrected["IS_DELTA"]
        maker.launch(
            _correct_kernel,
            chunks * num_heads,
            q,
            k,
            v,
            beta,
            pairs.t,
            pairs.r,
            pairs.running,
            w,
            z,
            u,
            edges,
            num_sequences,
            *rows,
            q_scale,
            TILE_V=min(width, 128),
            **corrected,
            num_warps=4,
            num_stages=1,
        )
    columns, stages = columns_of(maker.device, pairs, num_sequences, num_heads, width)
    maker.launch(
        _states_kernel,
        (num_sequences * num_heads, triton.cdiv(value_dim, columns), 2),
        q,
        k,
        v,
        beta,
        do,
        pairs.running,
        w,
        z,
        states,
        dstates,
        u,
        y,
        dbefore if initial_state is None else maker.dense(initial_state),
        dbefore if dstate is None else maker.dense(dstate),
        dbefore,
        edges,
        *strides,
        TILE_V=columns,
        HAS_BEFORE=initial_state is not None,
        HAS_AFTER=dstate is not None,
        **constants,
        num_warps=4,
        num_stages=stages,
    )
    group = num_heads // key_heads
    heads = max(n for n in range(1, min(group, _MOST_HEADS) + 1) if group % n == 0)
    parts = num_heads // heads
    wide = torch.float32 if parts > key_heads else k.dtype
    dq, dk = (maker.empty((len(v), parts, key_dim), wide) for _ in range(2))
    dv = maker.empty(v.shape, v.dtype)
    tiles = triton.cdiv(key_dim, _KEYS["TILE_K"])
    dg, dbeta = (maker.empty((tiles + 1, *beta.shape), torch.float32) for _ in range(2))
    rest = (edges, len(v), num_sequences, *strides)
    maker.launch(
        _pairs_kernel,
        chunks * num_heads,
        q,
        k,
        v,
        beta,
        do,
        pairs.t,
        pairs.r,
        pairs.running,
        u,
        y,
        dv,
        dg,
        dbeta,
        *rest,
        **constants | _PAIRS | {"TILE_V": min(width, _PAIRS["TILE_V"])},
    )
    maker.launch(
        _keys_kernel,
        (chunks * parts, tiles),
        q,
        k,
        v,
        beta,
        do,
        pairs.t,
        pairs.r,
        pairs.running,
        states,
        dstates,
        u,
        y,
        dq,
        dk,
        dg,
        dbeta,
        *rest,
        HEADS=heads,
        **constants | _KEYS,
    )

    def of_keys(x: Tensor) -> Tensor:
        return x.unflatten(1, (key_heads, -1)).sum(2).to(k.dtype)

    if parts > key_heads:
        dq, dk = (maker.compute(of_keys, x, like=k.new_empty(k.shape)) for x in (dq, dk))
    dg, dbeta = (maker.compute(_sum_of_tiles, x, like=torch.empty_like(x[0])) for x in (dg, dbeta))
    return dq, dk, dv, dg, dbeta, dbefore


def _sum_of_tiles(x: Tensor) -> Tensor:
    return x.sum(0)


def columns_of(
    place: torch.device, pairs: Pairs, num_sequences: int, num_heads: int, width: int
) -> tuple[int, int]:
    """Return the columns of V that a program goes through all chunks with, and its stages.

    Stages are the chunks that its pipeline loads at once.

    Args:
        place: the device of the call.
        pairs: the results of `step.prepare`, of which the dtype and the constants count.
        width: the columns of V, a power of two.
    """
    narrow = min(width, _TILE_V)
    is_small = pairs.operand == torch.bfloat16 and pairs.constants["TILE_K"] <= 128
    if not (is_small and pairs.constants["IS_DELTA"]):
        return narrow, 2
    is_large = not device.interpreting() and device.arch_of(place) // 10 in (9, 10)
    stages = 3 if is_large else 2  # chunks of 64 columns take 64 KiB of shared memory each
    # Of one wave the narrow tiles are the faster ones, of several the wide ones.
    programs = 2 * num_sequences * num_heads * triton.cdiv(width, narrow)
    if device.interpreting() or programs <= device.sm_count_of(place):
        return narrow, stages
    return min(width, 2 * _TILE_V), stages
