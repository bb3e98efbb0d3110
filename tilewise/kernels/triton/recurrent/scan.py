"""The gated delta rule and Mamba-2's recurrence, in chunks of 64 tokens at fixed places.

what     o of tokens after a state S at the start of a chunk; with E_ts the decay between tokens s
         and t of a chunk, E_t that since its start, and T and R of pairs.py,
             X = beta (V - (E K) S), U = T X, or X = U = beta V without the delta rule
             O = q_scale ((E Q) S + R X),  S' = E_64 S + (E_64 / E K)^T U
grid     (sequences x heads, tiles of the columns of V), after pairs.py
program  goes through the chunks of its sequence with TILE_V columns of S in registers
traffic  q, k, T and R read once for each tile of columns, v read and o written once; what a slot
         keeps of its open chunk is read in place of new tokens
numerics S, X and U are sums in float32, and operands in the tokens' 16 bits (bfloat16), or in TF32
         (float16, one pass; float32, three). Every product is of a whole tile: the rows of later
         tokens are zeros, and a row's sums have one order
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.spec import CHUNK, RecurrentSpec, RecurrentStates
from tilewise.kernels.triton.elements import why_not as why_not_elements
from tilewise.kernels.triton.recurrent.pairs import pairs_kernel
from tilewise.kernels.triton.recurrent.rows import (
    load_numbers,
    load_rows,
    most_chunks,
    number_of,
    zero_rows,
)
from tilewise.kernels.triton.recurrent.step import step_kernel

MOST_KEY_DIM = 256  # a state's tile of this times 32 columns is a quarter of the registers
_TILE_V = 32  # H200, 2026-11-29: 16384 tokens in 0.41 ms, 0.55 with 16 columns, 0.68 with 64
_COPIERS = 16  # programs of a sequence that copy the tokens of its open chunk
_COPY = 1024  # elements at once
# A product that is fused with a sum is not rounded, and which are differs from kernel to kernel:
# parts of a sequence would differ from the whole.
_ROUNDED: dict[str, bool] = {"enable_fp_fusion": False}


def why_not(spec: RecurrentSpec) -> str | None:
    """Return why this kernel cannot run `spec`, or None if it can."""
    if spec.keeps == "updates":
        return "states must keep tokens, got states that keep updates"
    if spec.key_dim > MOST_KEY_DIM:
        return f"key_dim must be at most {MOST_KEY_DIM}, got {spec.key_dim}"
    return why_not_elements(spec)


@triton.jit(do_not_specialize=["q_scale", "num_rows", "num_sequences"])
def _scan_kernel(
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
    KEEPS_STATES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    task = tl.program_id(0)
    sequence, head = task // NUM_HEADS, task % NUM_HEADS
    first = tl.load(edges_ptr + sequence)
    total = tl.load(edges_ptr + sequence + 1) - first
    column = tl.program_id(1) * TILE_V + tl.arange(0, TILE_V)
    if not KEEPS_STATES and sequence == num_sequences - 1:  # rows that no sequence has
        zero_rows(o_ptr, first + total, num_rows, head, column, NUM_HEADS, VALUE_DIM, TOKENS)
    slot, start = sequence.to(tl.int64), 0
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + sequence)
        start = tl.load(starts_ptr + sequence).to(tl.int32)
        if slot < 0:
            zero_rows(o_ptr, first, first + total, head, column, NUM_HEADS, VALUE_DIM, TOKENS)
            return
        if total <= 0:
            return
        total += start
    number = number_of(first, sequence, HAS_SLOTS, TOKENS) - start // TOKENS
    key_head, first = head // (NUM_HEADS // KEY_HEADS), first.to(tl.int64)
    key, row = tl.arange(0, TILE_K), tl.arange(0, TOKENS)
    operand: tl.constexpr = r_ptr.dtype.element_ty
    q_ptr += first * stride_q + key_head * stride_qh
    k_ptr += first * stride_k + key_head * stride_kh
    v_ptr += first * stride_v + head * stride_vh
    o_ptr += (first * NUM_HEADS + head) * VALUE_DIM
    beta_ptr += first * NUM_HEADS + head
    kept_k_ptr += (slot * TOKENS * KEY_HEADS + key_head) * KEY_DIM
    kept_v_ptr += (slot * TOKENS * NUM_HEADS + head) * VALUE_DIM
    state_at = (slot * NUM_HEADS + head) * KEY_DIM * VALUE_DIM
    state_at += key[:, None] * VALUE_DIM + column[None, :]
    in_state = (key[:, None] < KEY_DIM) & (column[None, :] < VALUE_DIM)
    has_state = start >= TOKENS
    if HAS_BEFORE:
        has_state = True
    state = tl.load(before_ptr + state_at, mask=in_state & has_state, other=0.0)
    for chunk in range(start // TOKENS, tl.cdiv(total, TOKENS)):
        position = chunk * TOKENS + row
        pairs_at = ((number + chunk).to(tl.int64) * NUM_HEADS + head) * TOKENS
        if BY_CHANNEL:
            rows_at = (pairs_at + row[:, None]) * KEY_DIM + key[None, :]
            inside = key[None, :] < KEY_DIM
            k_in = tl.load(k_in_ptr + rows_at, mask=inside, other=0.0)
            q_in = tl.load(q_in_ptr + rows_at, mask=inside, other=0.0)
            k_out = tl.load(k_out_ptr + rows_at, mask=inside, other=0.0)
            last_at = running_ptr + pairs_at // TOKENS * KEY_DIM + key
            decay = tl.math.exp2(tl.load(last_at, mask=key < KEY_DIM, other=0.0))[:, None]
        else:
            k_in = load_rows(
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
            k_out = k_in
            q_in = load_rows(
                q_ptr, q_ptr, position, start, total, stride_q, 0, key, KEY_DIM, False, TOKENS
            ).to(operand)
            running = tl.load(running_ptr + pairs_at + row)
            last = tl.load(running_ptr + pairs_at + TOKENS - 1)
            into = tl.math.exp2(running)[:, None]
            decay = tl.math.exp2(last)
        v = load_rows(
            v_ptr, v_ptr, position, start, total, stride_v, 0, column, VALUE_DIM, False, TOKENS
        )
        beta = load_numbers(beta_ptr, beta_ptr, position, start, total, NUM_HEADS, False, TOKENS)
        tile_at = pairs_at * TOKENS + row[:, None] * TOKENS + row[None, :]
        seen = state.to(operand)
        x = v.to(tl.float32)
        if IS_DELTA:
            known = tl.dot(k_in, seen, input_precision=PRECISION)
            if not BY_CHANNEL:
                known *= into
            x -= known
        x = (x * beta[:, None]).to(v_ptr.dtype.element_ty).to(operand)
        if HAS_SLOTS:
            kept_at = kept_v_ptr + row[:, None] * (NUM_HEADS * VALUE_DIM) + column[None, :]
            in_v = column[None, :] < VALUE_DIM
            is_kept = position < start
            kept = tl.load(kept_at, mask=is_kept[:, None] & in_v, other=0.0)
            x = tl.where(is_kept[:, None], kept.to(operand), x)
        u = x
        if IS_DELTA:
            t = tl.load(t_ptr + tile_at)
            u = tl.dot(t, x, input_precision=PRECISION).to(operand)
        o_at = o_ptr + (position - start).to(tl.int64)[:, None] * (NUM_HEADS * VALUE_DIM)
        is_new = (position >= start) & (position < total)
        in_o = is_new[:, None] & (column[None, :] < VALUE_DIM)
        if KEEPS_STATES:
            o = u
            at = states_ptr + pairs_at // TOKENS * (KEY_DIM * VALUE_DIM)
            at += key[:, None] * VALUE_DIM + column[None, :]
            tl.store(at, seen, mask=in_state)
        else:
            o = tl.dot(q_in, seen, input_precision=PRECISION)
            if not BY_CHANNEL:
                o *= into
            r = tl.load(r_ptr + tile_at)
            o = tl.dot(r, x, o, input_precision=PRECISION) * q_scale
        tl.store(o_at + column[None, :], o.to(o_ptr.dtype.element_ty), mask=in_o)
        if not BY_CHANNEL:
            u = (u * tl.math.exp2(last - running)[:, None]).to(operand)
        after = tl.dot(tl.trans(k_out), u, state * decay, input_precision=PRECISION)
        if HAS_SLOTS:
            # What follows an open chunk begins with the state before it.
            is_full = (chunk + 1) * TOKENS <= total
            state = tl.where(is_full, after, state)
            tl.store(
                kept_at,
                x.to(kept_v_ptr.dtype.element_ty),
                mask=in_o & ((chunk + 1) * TOKENS > total),
            )
        else:
            state = after
    if HAS_SLOTS:
        is_changed = total // TOKENS > start // TOKENS
        tl.store(before_ptr + state_at, state, mask=in_state & is_changed)
    else:
        tl.store(after_ptr + state_at, state, mask=in_state)


@triton.jit
def _copy_row(
    new_ptr, kept_ptr, stride_head, HEADS: tl.constexpr, DIM: tl.constexpr, COPY: tl.constexpr
):
    """Copy a row of HEADS x DIM elements to contiguous memory.

    stride_head: the elements from head to head of the source.
    """
    for begins in range(0, HEADS * DIM, COPY):
        index = begins + tl.arange(0, COPY)
        inside = index < HEADS * DIM
        at = (index // DIM) * stride_head + index % DIM
        tl.store(kept_ptr + index, tl.load(new_ptr + at, mask=inside), mask=inside)


@triton.jit
def _keep_kernel(
    k_ptr,
    g_ptr,
    beta_ptr,
    kept_k_ptr,
    kept_g_ptr,
    kept_beta_ptr,
    edges_ptr,
    slots_ptr,
    starts_ptr,
    stride_k,
    stride_kh,
    NUM_HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    G_WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COPY: tl.constexpr,
):
    """Copy keys, decays and betas of a sequence's new tokens to its slot.

    Only tokens of the chunk that is still open at the end are copied, after all programs of the
    scan have read the slot. Programs of a sequence share its tokens.
    """
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
        g_row: tl.constexpr = NUM_HEADS * G_WIDTH
        _copy_row(g_ptr + new * g_row, kept_g_ptr + kept * g_row, G_WIDTH, NUM_HEADS, G_WIDTH, COPY)
        _copy_row(
            beta_ptr + new * NUM_HEADS, kept_beta_ptr + kept * NUM_HEADS, 1, NUM_HEADS, 1, COPY
        )


class Pairs(NamedTuple):
    """The results of pairs.py for the tokens of a call, and the constants of its kernels.

    Attributes:
        t, r: T and R of pairs.py, (chunks, H, CHUNK, CHUNK), of the operands' dtype.
        running: float32, base-2 logs of E since the chunk's start (chunks, H, CHUNK), or, by
            channel, of the whole chunk (chunks, H, K).
        faded: with decays by channel the keys, then the queries, times the decay since the chunk's
            start, and the keys times the decay to its end; (chunks, H, CHUNK, K) each, empty
            otherwise.
        operand: the dtype of operands of products.
        tile_v: the columns of V of a program.
        constants: the constexpr arguments that the kernels of a call share, by name.
    """

    t: Tensor
    r: Tensor
    running: Tensor
    faded: list[Tensor]
    operand: torch.dtype
    tile_v: int
    constants: dict[str, Any]


def prepare(
    maker: Maker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: RecurrentStates | None,
    places: tuple[Tensor, Tensor, Tensor],
    is_delta: bool,
) -> Pairs:
    """Add the launch of pairs.py to a plan, and return its results.

    Args:
        q, k, v, g, beta, is_delta: the packed arguments of a call, g and beta contiguous.
        states: the slots whose open chunks the tokens continue; None for whole sequences.
        places: the edges, slots and starts of sequences; slots and starts are not read without
            states.
    """
    key_heads, key_dim, num_heads, value_dim = *k.shape[1:], *v.shape[1:]
    tile_k, tile_v, operand = _tiles(key_dim, value_dim, v.dtype)
    num_sequences, by_channel, has_slots = len(places[0]) - 1, g.dim() == 3, states is not None
    chunks = most_chunks(len(v), num_sequences, has_slots, CHUNK)

    def empty(*shape: int, dtype: torch.dtype = operand) -> Tensor:
        return maker.empty((chunks, num_heads, *shape), dtype)

    r = empty(CHUNK, CHUNK)
    running = empty(key_dim if by_channel else CHUNK, dtype=torch.float32)
    constants: dict[str, Any] = {
        "NUM_HEADS": num_heads,
        "KEY_HEADS": key_heads,
        "KEY_DIM": key_dim,
        "TILE_K": tile_k,
        "TOKENS": CHUNK,
        "HAS_SLOTS": has_slots,
        "IS_DELTA": is_delta,
        "BY_CHANNEL": by_channel,
        "PRECISION": _precision(v.dtype),
    }
    faded = [empty(CHUNK if by_channel else 0, key_dim) for _ in range(3)]
    pairs = Pairs(
        empty(CHUNK, CHUNK) if is_delta else r, r, running, faded, operand, tile_v, constants
    )
    keys, gates, _, betas, inverses = (k, g, v, beta, r) if states is None else states[1:]
    if inverses is None:  # nothing corrects
        inverses = r
    if chunks:
        maker.launch(
            pairs_kernel,
            chunks * num_heads,
            q,
            k,
            g,
            beta,
            pairs.t,
            r,
            running,
            *faded,
            keys,
            gates,
            betas,
            inverses,
            *places,
            num_sequences,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            **constants,
            num_warps=4,
            **_ROUNDED,
        )
    return pairs


def scan(
    maker: Maker,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    before: Tensor | None,
    after: Tensor,
    slots: RecurrentStates | None,
    places: tuple[Tensor, Tensor, Tensor],
    o: Tensor,
    states: Tensor | None,
    pairs: Pairs,
    q_scale: float,
) -> None:
    """Add to a plan the launch that goes through all chunks of each sequence, after `prepare`.

    Args:
        before, after: (N, H, K, V), the states before and after each sequence, or both the states
            of all slots; `before` is None for zeros, `after` is written.
        slots: the slots of a step, whose kept values are read and written; None for whole
            sequences.
        places: the edges, slots and starts of sequences.
        o: (T, H, V), written: the output, or U where there are `states`.
        states: (chunks, H, K, V) of the operands' dtype, in which the state before each chunk is
            written; None for the output alone.
        pairs: the result of `prepare`.
    """
    (num_heads, value_dim), num_sequences = v.shape[1:], len(places[0]) - 1
    keys, values = (k, v) if slots is None else (slots.keys, slots.values)
    maker.launch(
        _scan_kernel,
        (num_sequences * num_heads, triton.cdiv(value_dim, pairs.tile_v)),
        q,
        k,
        v,
        beta,
        pairs.t,
        pairs.r,
        pairs.running,
        *pairs.faded,
        o,
        o if states is None else states,
        after if before is None else before,
        after,
        keys,
        values,
        *places,
        len(v),
        num_sequences,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        q_scale,
        VALUE_DIM=value_dim,
        TILE_V=pairs.tile_v,
        HAS_BEFORE=before is not None and slots is None,
        KEEPS_STATES=states is not None,
        **pairs.constants,
        num_warps=4,
        num_stages=stages_of(pairs),
        **_ROUNDED,
    )


@planned
def launch(
    maker: Maker,
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
    """Return o (T, H, V) and the float32 states (N, H, K, V) after whole packed sequences.

    Args:
        q, k, v, g, beta, initial_state, q_scale: the packed arguments of `ops.gated_delta`.
        edges: int32 (N + 1,), the first row of each sequence, and the end of the last.
        is_delta: True for the delta rule, False for the plain sum of `ops.ssd`.
    """
    shape = (edges.shape[0] - 1, v.shape[1], k.shape[2], v.shape[2])
    after = maker.empty(shape, torch.float32)
    if after.numel() == 0:
        return maker.full(v.shape, 0.0, v.dtype), after
    before, o = maker.dense(initial_state), maker.empty(v.shape, v.dtype)
    g, beta, places = dense(maker, g), dense(maker, beta), (edges, edges, edges)
    pairs = prepare(maker, q, k, v, g, beta, None, places, is_delta)
    scan(maker, q, k, v, beta, before, after, None, places, o, None, pairs, q_scale)
    return o, after


@planned
def step(
    maker: Maker,
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
    """Return o (T, H, V) of the next tokens of running sequences, and write them into their slots.

    Where there is at most one token a sequence, one kernel does it; otherwise those of `launch` do.

    Args:
        q, k, v, g, beta, q_scale, is_delta, edges: as in `launch`.
        states: the slots, updated in place.
        slots, starts: int64 (N,), the slot of each sequence (-1 for none: its o is 0), and the
            number of its tokens before this call.
    """
    key_heads, key_dim, num_heads, value_dim = *k.shape[1:], *v.shape[1:]
    num_sequences = edges.shape[0] - 1
    if 0 in (states.state.numel(), v.numel()) or num_sequences < 1:
        return maker.full(v.shape, 0.0, v.dtype)
    o = maker.empty(v.shape, v.dtype)
    g, beta, places = dense(maker, g), dense(maker, beta), (edges, slots, starts)
    shapes = {"NUM_HEADS": num_heads, "KEY_HEADS": key_heads, "KEY_DIM": key_dim}
    if len(v) <= num_sequences and _has_rows(maker.device, v.dtype):
        tile_k, _, operand = _tiles(key_dim, value_dim, v.dtype)
        tiles = _step_tiles(key_dim, value_dim, v.dtype, is_delta, g.dim() == 3)
        limits = {"maxnreg": tiles.registers} if device.runs_ptx() and tiles.registers else {}
        maker.launch(
            step_kernel,
            (num_sequences * num_heads, triton.cdiv(value_dim, tiles.tile_v)),
            q,
            k,
            v,
            g,
            beta,
            o,
            *states[:5],
            g if states.inverses is None else states.inverses,
            *places,
            len(v),
            num_sequences,
            q.stride(0),
            q.stride(1),
            k.stride(0),
            k.stride(1),
            v.stride(0),
            v.stride(1),
            q_scale,
            **shapes,
            VALUE_DIM=value_dim,
            TILE_K=tile_k,
            TILE_V=tiles.tile_v,
            STEP_K=tiles.step_k,
            STAGES=tiles.stages,
            TOKENS=CHUNK,
            MOVES=device.runs_ptx(),
            IS_DELTA=is_delta,
            BY_CHANNEL=g.dim() == 3,
            OPERAND=tl.bfloat16 if operand == torch.bfloat16 else tl.float32,
            PRECISION=_precision(v.dtype),
            num_warps=tiles.num_warps,
            num_stages=1,  # a token reads what the token before it has written
            **_ROUNDED,
            **limits,
        )
        return o
    pairs = prepare(maker, q, k, v, g, beta, states, places, is_delta)
    scan(maker, q, k, v, beta, states.state, states.state, states, places, o, None, pairs, q_scale)
    maker.launch(
        _keep_kernel,
        (num_sequences, _COPIERS),
        k,
        g,
        beta,
        states.keys,
        states.gates,
        states.betas,
        *places,
        k.stride(0),
        k.stride(1),
        **shapes,
        G_WIDTH=key_dim if g.dim() == 3 else 1,
        TOKENS=CHUNK,
        COPY=_COPY,
        num_warps=8,
    )
    return o


def dense(maker: Maker, x: Tensor) -> Tensor:
    """Return `x` if it is contiguous, else a tensor for a copy of it that the plan will make."""
    return x if x.is_contiguous() else maker.copy(x)


def _has_rows(place: torch.device, dtype: torch.dtype) -> bool:
    """Return whether products of few rows have the same bits as those of 64 rows on this device.

    Only then may a step use its own kernel. It is False for capability 10.x, whose tcgen05.mma was
    not examined, and for float16 on Hopper: in TF32 mma.sync adds in another order than wgmma.
    """
    if device.interpreting():
        return True
    generation = device.arch_of(place) // 10
    return generation != 10 and not (generation == 9 and dtype == torch.float16)


def _tiles(key_dim: int, value_dim: int, dtype: torch.dtype) -> tuple[int, int, torch.dtype]:
    """Return the rows (keys) and columns (values) of a state's tile, and the dtype of operands.

    Both sizes are powers of two; the rows hold all of key_dim. Args: dtype is that of the tokens.
    """
    tile_k = max(16, triton.next_power_of_2(key_dim))
    tile_v = max(16, min(_TILE_V, triton.next_power_of_2(value_dim)))
    # float16 would hold no large state: it is widened to TF32, which has its 10 bits.
    return tile_k, tile_v, torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


class _StepTiles(NamedTuple):
    """The sizes with which a decode step's kernel is compiled.

    Attributes:
        tile_v: the columns of V of a program.
        step_k: the channels of keys that one iteration of its loop multiplies.
        stages: the iterations of the loop that are loaded at once.
        num_warps: the warps of a program.
        registers: the most registers of a thread; None for any number.
    """

    tile_v: int
    step_k: int
    stages: int
    num_warps: int
    registers: int | None


def _step_tiles(
    key_dim: int, value_dim: int, dtype: torch.dtype, is_delta: bool, by_channel: bool
) -> _StepTiles:
    """Return the tiles of a decode step, measured on an H200 (2026-11-30, 1 to 256 rows)."""
    tile_k, size = max(16, triton.next_power_of_2(key_dim)), triton.next_power_of_2(value_dim)
    if dtype == torch.float32:
        # Three passes go through all channels, one after the other. Two warps use mma.sync alone.
        return _StepTiles(max(16, min(32, size)), tile_k, 1, 2, None)
    most = 32 if dtype != torch.bfloat16 else 128 if tile_k <= 128 else 64
    tile_v = max(16, min(most, size))
    if by_channel:
        return _StepTiles(tile_v, 32, 3, 4, None)
    if is_delta:  # with 168 registers three programs of four warps run beside one another
        return _StepTiles(tile_v, min(tile_k, 32), 3, 4, 168)
    return _StepTiles(tile_v, min(tile_k, 32), 4, 2 if tile_v <= 64 else 4, None)


def stages_of(pairs: Pairs) -> int:
    """Return the number of chunks that a scan loads at once, 2 or 3, as shared memory has room."""
    is_small = pairs.operand == torch.bfloat16 and pairs.constants["TILE_K"] <= 128
    return 3 if is_small and not pairs.constants["BY_CHANNEL"] else 2


def _precision(dtype: torch.dtype) -> str:
    return "tf32x3" if dtype == torch.float32 else "tf32"
