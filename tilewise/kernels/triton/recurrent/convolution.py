"""Causal convolution of each channel, and its gradients.

what     y_t = f(bias + sum over j of weight_j x_{t - W + 1 + j}), f the identity or silu; backward,
         with z what f is taken of, dz = dy f'(z), dx_s = sum over j of weight_j dz_{s + W - 1 - j}
grid     (tiles of rows, tiles of channels); what is kept of each sequence in kernels of their own,
         when all rows have been computed; a step of few rows is one kernel, (sequences, tiles)
program  finds the sequence of each of its rows by halving, and adds up W taps
traffic  x read once from memory and W times from the L1 cache, y written once; backward dz is
         written and read once more in the dtype of x
numerics float32, bias first, then the oldest token first, rounded once; gradients of weight and
         bias are sums of tiles of rows, each of which has one order
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.elements import why_not as why_not

_TILE_T, _TILE_C = 16, 128  # 16 elements of each of 128 threads
# A program that adds up gradients of weights is one warp, whose sums over rows stay in threads.
_SUM_ROWS, _SUM_CHANNELS, _SUM_TILES = 8, 256, 16


@triton.jit
def _sequence_of(edges_ptr, row, num_sequences):
    """Return the sequence of each row: the last one that begins at the row or before it.

    It is num_sequences for rows after the end of the last sequence.
    """
    low, high = tl.zeros(row.shape, tl.int32), tl.zeros(row.shape, tl.int32) + num_sequences
    remaining = num_sequences
    while remaining > 0:
        middle = (low + high + 1) // 2
        is_after = tl.load(edges_ptr + middle) <= row
        low = tl.where(is_after, middle, low)
        high = tl.where(is_after, high, middle - 1)
        remaining = remaining // 2
    return low


@triton.jit
def _tap(
    x_ptr,
    states_ptr,
    first,
    position,
    used,
    start,
    slot,
    channel,
    inside,
    stride_x,
    CHANNELS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    HAS_STATES: tl.constexpr,
):
    """Return tokens (rows, channels), float32, at positions of their sequences, from -(W - 1) on.

    Negative positions are read from the states if HAS_STATES, else 0. first: the row at which the
    sequence begins in x; used: False for rows of no sequence; start: the sequence's tokens before
    this call; slot: its place among the states.
    """
    at = x_ptr + (first + position).to(tl.int64)[:, None] * stride_x + channel[None, :]
    token = tl.load(at, mask=(used & (position >= 0))[:, None] & inside[None, :], other=0.0)
    token = token.to(tl.float32)
    if HAS_STATES:
        before = start + position  # of the sequence; its row in a slot is `before` % NUM_KEPT
        kept = slot * NUM_KEPT + tl.maximum(before, 0) % NUM_KEPT
        at = states_ptr + kept[:, None] * CHANNELS + channel[None, :]
        mask = (used & (before >= 0) & (position < 0))[:, None] & inside[None, :]
        token += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return token


@triton.jit
def _before_silu(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    first,
    position,
    used,
    start,
    slot,
    channel,
    inside,
    stride_x,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATES: tl.constexpr,
):
    """Return the convolution plus the bias, before silu, (rows, channels) in float32.

    The arguments are those of `_tap`, which loads the tokens of each of the WIDTH taps from x, or
    from the states before the first row of a sequence; bias is read if HAS_BIAS.
    """
    total = tl.zeros((position.shape[0], channel.shape[0]), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        token = _tap(
            x_ptr,
            states_ptr,
            first,
            position + (tap - (WIDTH - 1)),
            used,
            start,
            slot,
            channel,
            inside,
            stride_x,
            CHANNELS,
            NUM_KEPT,
            HAS_STATES,
        )
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=inside, other=0.0)
        total = tl.fma(tl.broadcast_to(weight.to(tl.float32)[None, :], token.shape), token, total)
    return total


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def _convolve_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    y_ptr,
    edges_ptr,
    slots_ptr,
    starts_ptr,
    num_rows,
    num_sequences,
    stride_x,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATES: tl.constexpr,
    HAS_SLOTS: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    row = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    channel = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    inside = channel < CHANNELS
    sequence = _sequence_of(edges_ptr, row, num_sequences)
    used = (row < num_rows) & (sequence < num_sequences)
    first = tl.load(edges_ptr + sequence)
    slot, start = sequence.to(tl.int64), tl.zeros((TILE_T,), tl.int64) + NUM_KEPT
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + sequence, mask=used, other=-1).to(tl.int64)
        start = tl.load(starts_ptr + sequence, mask=used, other=0).to(tl.int64)
        used = used & (slot >= 0)
    total = _before_silu(
        x_ptr,
        weight_ptr,
        bias_ptr,
        states_ptr,
        first,
        row - first,
        used,
        start,
        slot,
        channel,
        inside,
        stride_x,
        CHANNELS,
        WIDTH,
        NUM_KEPT,
        HAS_BIAS,
        HAS_STATES,
    )
    if HAS_SILU:
        total = total * tl.sigmoid(total)
    # Rows that no sequence has, and those of sequences without a slot, are 0.
    total = tl.where(used[:, None], total, 0.0)
    at = y_ptr + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & inside[None, :])


@triton.jit
def _keep_kernel(
    x_ptr,
    states_ptr,
    edges_ptr,
    slots_ptr,
    starts_ptr,
    stride_x,
    CHANNELS: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    TILE_C: tl.constexpr,
):
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    inside = channel < CHANNELS
    first = tl.load(edges_ptr + sequence).to(tl.int64)
    length = tl.load(edges_ptr + sequence + 1) - first
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    if slot < 0 or length <= 0:
        return
    states_ptr += slot * NUM_KEPT * CHANNELS + channel
    for position in range(tl.maximum(length - NUM_KEPT, 0), length):
        token = tl.load(x_ptr + (first + position) * stride_x + channel, mask=inside)
        tl.store(states_ptr + (start + position) % NUM_KEPT * CHANNELS, token, mask=inside)


@triton.jit
def _last_kernel(
    x_ptr,
    before_ptr,
    after_ptr,
    edges_ptr,
    stride_x,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_STATES: tl.constexpr,
):
    """Write the last W - 1 rows of each sequence, oldest first, for a tile of channels.

    Before the rows of a shorter sequence come the newest of its initial state, or zeros without
    one. before_ptr and after_ptr: the initial and the written states, (N, W - 1, CHANNELS);
    edges_ptr: (N + 1,), the edges of the sequences in x.
    """
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    inside = channel < CHANNELS
    first = tl.load(edges_ptr + sequence).to(tl.int64)
    length = tl.load(edges_ptr + sequence + 1) - first
    kept = sequence.to(tl.int64) * (WIDTH - 1) * CHANNELS + channel
    for tap in tl.static_range(WIDTH - 1):
        position = length + tap - (WIDTH - 1)
        at = x_ptr + (first + position) * stride_x + channel
        token = tl.load(at, mask=inside & (position >= 0), other=0.0)
        if HAS_STATES:
            at = before_ptr + kept + (tap + length) * CHANNELS
            token += tl.load(at, mask=inside & (position < 0), other=0.0)
        tl.store(after_ptr + kept + tap * CHANNELS, token, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def _step_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    y_ptr,
    edges_ptr,
    slots_ptr,
    starts_ptr,
    num_rows,
    num_sequences,
    stride_x,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_KEPT: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    """Write y of the few tokens of a sequence, one after the other, then keep them in its slot.

    The program of the last sequence also writes zeros to the rows behind that sequence.
    """
    sequence, one = tl.program_id(0), tl.zeros((1,), tl.int32)
    channel = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    inside = channel < CHANNELS
    first, end = tl.load(edges_ptr + sequence), tl.load(edges_ptr + sequence + 1)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    start = tl.load(starts_ptr + sequence).to(tl.int64)
    last = end
    if sequence == num_sequences - 1:
        last = num_rows
    has_slot = slot >= 0
    for row in range(first, last):
        used = (one + row < end) & has_slot
        total = _before_silu(
            x_ptr,
            weight_ptr,
            bias_ptr,
            states_ptr,
            one + first,
            one + row - first,
            used,
            start + one.to(tl.int64),
            slot + one.to(tl.int64),
            channel,
            inside,
            stride_x,
            CHANNELS,
            WIDTH,
            NUM_KEPT,
            HAS_BIAS,
            True,
        )
        if HAS_SILU:
            total = total * tl.sigmoid(total)
        total = tl.where(used[:, None], total, 0.0).to(y_ptr.dtype.element_ty)
        at = y_ptr + (one + row).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        tl.store(at, total, mask=inside[None, :])
    if has_slot:
        # A row is read before it is overwritten, by the thread that overwrites it.
        states_ptr += slot * NUM_KEPT * CHANNELS
        x_ptr += first.to(tl.int64) * stride_x
        length = (end - first).to(tl.int64)
        for position in range(tl.maximum(length - NUM_KEPT, 0), length):
            token = tl.load(x_ptr + position * stride_x + channel, mask=inside)
            at = (start + position) % NUM_KEPT * CHANNELS
            tl.store(states_ptr + at + channel, token, mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def _dz_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    dy_ptr,
    dz_ptr,
    sums_ptr,
    edges_ptr,
    num_rows,
    num_sequences,
    stride_x,
    stride_dy,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
    TILES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_STATES: tl.constexpr,
    HAS_SILU: tl.constexpr,
):
    """Write dz of TILES tiles of rows, and their share in the gradients of weight and bias.

    dz is the gradient of the value before silu. The share is (W + 1, channels) float32: of each
    tap, then of the bias.
    """
    channel = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    inside = channel < CHANNELS
    which = tl.arange(0, 2 * triton.next_power_of_2(WIDTH))[:, None]
    sums = tl.zeros((which.shape[0], TILE_C), tl.float32)
    start = tl.zeros((TILE_T,), tl.int64) + (WIDTH - 1)
    for tile in range(0, TILES):
        row = (tl.program_id(0) * TILES + tile) * TILE_T + tl.arange(0, TILE_T)
        sequence = _sequence_of(edges_ptr, row, num_sequences)
        used = (row < num_rows) & (sequence < num_sequences)
        first, slot = tl.load(edges_ptr + sequence), sequence.to(tl.int64)
        in_dy = (row < num_rows)[:, None] & inside[None, :]
        at = dy_ptr + row.to(tl.int64)[:, None] * stride_dy + channel[None, :]
        dz = tl.load(at, mask=used[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if HAS_SILU:
            z = _before_silu(
                x_ptr,
                weight_ptr,
                bias_ptr,
                states_ptr,
                first,
                row - first,
                used,
                start,
                slot,
                channel,
                inside,
                stride_x,
                CHANNELS,
                WIDTH,
                (WIDTH - 1 if WIDTH > 1 else 1),
                HAS_BIAS,
                HAS_STATES,
            )
            share = tl.sigmoid(z)
            dz *= share * (1.0 + z * (1.0 - share))
        at = dz_ptr + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        tl.store(at, dz.to(dz_ptr.dtype.element_ty), mask=in_dy)
        for tap in tl.static_range(WIDTH):
            token = _tap(
                x_ptr,
                states_ptr,
                first,
                row - first + (tap - (WIDTH - 1)),
                used,
                start,
                slot,
                channel,
                inside,
                stride_x,
                CHANNELS,
                (WIDTH - 1 if WIDTH > 1 else 1),
                HAS_STATES,
            )
            sums += tl.where(which == tap, tl.sum(dz * token, 0)[None, :], 0.0)
        sums += tl.where(which == WIDTH, tl.sum(dz, 0)[None, :], 0.0)
    at = (tl.program_id(0) * (WIDTH + 1) + which).to(tl.int64) * CHANNELS + channel[None, :]
    tl.store(sums_ptr + at, sums, mask=(which <= WIDTH) & inside[None, :])


@triton.jit(do_not_specialize=["num_rows", "num_sequences"])
def _dx_kernel(
    dz_ptr,
    weight_ptr,
    dstates_ptr,
    dx_ptr,
    edges_ptr,
    num_rows,
    num_sequences,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_T: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_DSTATES: tl.constexpr,
):
    row = tl.program_id(0) * TILE_T + tl.arange(0, TILE_T)
    channel = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    inside = channel < CHANNELS
    sequence = _sequence_of(edges_ptr, row, num_sequences)
    used = (row < num_rows) & (sequence < num_sequences)
    end = tl.load(edges_ptr + sequence + 1, mask=used, other=0)
    total = tl.zeros((TILE_T, TILE_C), tl.float32)
    for later in tl.static_range(WIDTH):
        at = dz_ptr + (row + later).to(tl.int64)[:, None] * CHANNELS + channel[None, :]
        mask = (used & (row + later < end))[:, None] & inside[None, :]
        dz = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channel * WIDTH + (WIDTH - 1 - later), mask=inside, other=0.0)
        total = tl.fma(tl.broadcast_to(weight.to(tl.float32)[None, :], dz.shape), dz, total)
    if HAS_DSTATES:
        place = row - end + (WIDTH - 1)
        at = (sequence.to(tl.int64) * (WIDTH - 1) + place)[:, None] * CHANNELS + channel[None, :]
        mask = (used & (place >= 0))[:, None] & inside[None, :]
        total += tl.load(dstates_ptr + at, mask=mask, other=0.0).to(tl.float32)
    at = dx_ptr + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(
        at, total.to(dx_ptr.dtype.element_ty), mask=(row < num_rows)[:, None] & inside[None, :]
    )


@triton.jit
def _dkept_kernel(
    dz_ptr,
    weight_ptr,
    dstates_ptr,
    dkept_ptr,
    edges_ptr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE_C: tl.constexpr,
    HAS_DSTATES: tl.constexpr,
):
    """Write the gradient of the W - 1 rows before each sequence (initial_state), some channels."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * TILE_C + tl.arange(0, TILE_C)
    inside = channel < CHANNELS
    first = tl.load(edges_ptr + sequence).to(tl.int64)
    length = tl.load(edges_ptr + sequence + 1) - first
    kept = sequence.to(tl.int64) * (WIDTH - 1) * CHANNELS + channel
    for place in tl.static_range(WIDTH - 1):
        total = tl.zeros((TILE_C,), tl.float32)
        for token in tl.static_range(place + 1):
            at = dz_ptr + (first + token) * CHANNELS + channel
            dz = tl.load(at, mask=inside & (token < length), other=0.0).to(tl.float32)
            at = weight_ptr + channel * WIDTH + (place - token)
            total += dz * tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if HAS_DSTATES:
            at = dstates_ptr + kept + (place - length) * CHANNELS
            total += tl.load(at, mask=inside & (place >= length), other=0.0).to(tl.float32)
        at = dkept_ptr + kept + place * CHANNELS
        tl.store(at, total.to(dkept_ptr.dtype.element_ty), mask=inside)


@planned
def launch(
    maker: Maker,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    edges: Tensor,
    *,
    has_silu: bool,
) -> Tensor:
    """Return y (T, C) of whole packed sequences, as `ops.causal_conv1d` defines it.

    Args:
        x: (T, C).
        weight, bias: (C, width), and (C,) or None.
        initial_state: (N, width - 1, C), the rows before each sequence; None for zeros.
        edges: int32 (N + 1,), the first row of each sequence, and the end of the last.
        has_silu: True if silu is applied.
    """
    states = maker.dense(initial_state)
    return _run(maker, x, weight, bias, states, None, None, edges, has_silu)


@planned
def last(
    maker: Maker, x: Tensor, width: int, initial_state: Tensor | None, edges: Tensor
) -> Tensor:
    """Return the last width - 1 tokens of each packed sequence, (N, width - 1, C), oldest first.

    A sequence shorter than that takes rows of its initial state first, zeros without one.
    """
    num_sequences, channels = edges.shape[0] - 1, x.shape[1]
    after = maker.empty((num_sequences, width - 1, channels), x.dtype)
    before = maker.dense(initial_state)
    if after.numel():
        maker.launch(
            _last_kernel,
            (num_sequences, triton.cdiv(channels, _TILE_C)),
            x,
            x if before is None else before,
            after,
            edges,
            x.stride(0),
            CHANNELS=channels,
            WIDTH=width,
            TILE_C=_TILE_C,
            HAS_STATES=initial_state is not None,
            num_warps=4,
        )
    return after


@planned
def step(
    maker: Maker,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    slots: Tensor,
    starts: Tensor,
    edges: Tensor,
    *,
    has_silu: bool,
) -> Tensor:
    """Return y (T, C) of new tokens of running sequences, and write the tokens to their slots.

    y is 0 for a sequence without a slot.

    Args:
        x: (T, C), packed.
        weight, bias: (C, width), and (C,) or None.
        states: (slots, rows, C): the last rows of a slot, the token at position p in row p % rows.
        slots, starts: (N,), each sequence's slot (-1 for none) and its tokens before this call.
        edges: (N + 1,), the first row of each sequence and the end.
    """
    num_sequences, (channels, width) = edges.shape[0] - 1, weight.shape
    num_kept, grid = states.shape[1], (num_sequences, triton.cdiv(channels, _TILE_C))
    if len(x) > num_sequences or num_sequences < 1 or x.numel() == 0 or num_kept == 0:
        y = _run(maker, x, weight, bias, states, slots, starts, edges, has_silu)
        if y.numel() > 0 and num_kept > 0:
            maker.launch(
                _keep_kernel,
                grid,
                x,
                states,
                edges,
                slots,
                starts,
                x.stride(0),
                CHANNELS=channels,
                NUM_KEPT=num_kept,
                TILE_C=_TILE_C,
                num_warps=4,
            )
        return y
    y = maker.empty(x.shape, x.dtype)
    maker.launch(
        _step_kernel,
        grid,
        x,
        maker.dense(weight),
        x if bias is None else maker.dense(bias),
        states,
        y,
        edges,
        slots,
        starts,
        len(x),
        num_sequences,
        x.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        NUM_KEPT=num_kept,
        TILE_C=_TILE_C,
        HAS_BIAS=bias is not None,
        HAS_SILU=has_silu,
        num_warps=1,
    )
    return y


@planned
def gradient(
    maker: Maker,
    dy: Tensor,
    dstate: Tensor | None,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    edges: Tensor,
    *,
    has_silu: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x (T, C), weight (C, W), bias (C,) and initial_state (N, W - 1, C).

    All four are computed in x's dtype, also those of arguments that are None.

    Args:
        dy: (T, C), the gradient of y.
        dstate: (N, W - 1, C), the gradient of the last tokens; None where it is 0.
        x, weight, bias, initial_state, edges, has_silu: as in `launch`.
    """
    (num_rows, channels), width, num_sequences = x.shape, weight.shape[1], edges.shape[0] - 1
    kept, dtype = (num_sequences, width - 1, channels), x.dtype
    if num_sequences < 1 or num_rows == 0 or channels == 0:
        dkept = maker.full(kept, 0.0, dtype) if dstate is None else maker.copy(dstate)
        dx = maker.full((num_rows, channels), 0.0, dtype)
        return dx, *(maker.full(n, 0.0, dtype) for n in ((channels, width), (channels,))), dkept
    if dy.stride(-1) != 1:
        dy = maker.copy(dy)
    dkept = maker.empty(kept, dtype)
    dx, dz = (maker.empty((num_rows, channels), dtype) for _ in range(2))
    programs, tiles = triton.cdiv(num_rows, _SUM_ROWS * _SUM_TILES), triton.cdiv(channels, _TILE_C)
    sums = maker.empty((programs, width + 1, channels), torch.float32)
    sizes = {"CHANNELS": channels, "WIDTH": width}
    shape = sizes | {"TILE_C": _TILE_C}
    before = x if initial_state is None else maker.dense(initial_state)
    dense = maker.dense(weight)
    maker.launch(
        _dz_kernel,
        (programs, triton.cdiv(channels, _SUM_CHANNELS)),
        x,
        dense,
        x if bias is None else maker.dense(bias),
        before,
        dy,
        dz,
        sums,
        edges,
        num_rows,
        num_sequences,
        x.stride(0),
        dy.stride(0),
        **sizes,
        TILE_C=_SUM_CHANNELS,
        TILE_T=_SUM_ROWS,
        TILES=_SUM_TILES,
        HAS_BIAS=bias is not None,
        HAS_STATES=initial_state is not None,
        HAS_SILU=has_silu,
        num_warps=1,
    )
    dafter = dz if dstate is None else maker.dense(dstate)
    maker.launch(
        _dx_kernel,
        (triton.cdiv(num_rows, _TILE_T), tiles),
        dz,
        dense,
        dafter,
        dx,
        edges,
        num_rows,
        num_sequences,
        **shape,
        TILE_T=_TILE_T,
        HAS_DSTATES=dstate is not None,
        num_warps=4,
    )
    if dkept.numel():
        maker.launch(
            _dkept_kernel,
            (num_sequences, tiles),
            dz,
            dense,
            dafter,
            dkept,
            edges,
            **shape,
            HAS_DSTATES=dstate is not None,
            num_warps=1,
        )

    def summed(sums: Tensor) -> Tensor:
        return sums.sum(0).to(dtype)

    def of_weight(total: Tensor) -> Tensor:
        return total[:width].t().contiguous()

    def of_bias(total: Tensor) -> Tensor:
        return total[width].clone()

    total = maker.compute(summed, sums, like=torch.empty_like(sums[0], dtype=dtype))
    dweight = maker.compute(of_weight, total, like=sums.new_empty(channels, width, dtype=dtype))
    dbias = maker.compute(of_bias, total, like=total.new_empty(channels))
    return dx, dweight, dbias, dkept


def _run(
    maker: Maker,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    slots: Tensor | None,
    starts: Tensor | None,
    edges: Tensor,
    has_silu: bool,
) -> Tensor:
    y = maker.empty(x.shape, x.dtype)
    if y.numel() == 0 or edges.shape[0] < 2:
        return maker.full(x.shape, 0.0, x.dtype)
    channels, width = weight.shape
    maker.launch(
        _convolve_kernel,
        (triton.cdiv(len(x), _TILE_T), triton.cdiv(channels, _TILE_C)),
        x,
        maker.dense(weight),
        x if bias is None else maker.dense(bias),
        x if states is None else states,
        y,
        edges,
        edges if slots is None else slots,
        edges if starts is None else starts,
        len(x),
        edges.shape[0] - 1,
        x.stride(0),
        CHANNELS=channels,
        WIDTH=width,
        NUM_KEPT=1 if states is None else max(states.shape[1], 1),
        TILE_T=_TILE_T,
        TILE_C=_TILE_C,
        HAS_BIAS=bias is not None,
        HAS_STATES=states is not None,
        HAS_SLOTS=slots is not None,
        HAS_SILU=has_silu,
        num_warps=4,
    )
    return y
