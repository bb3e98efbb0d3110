"""Causal convolution of each channel.

what     y_t = f(bias + sum over j of weight_j x_{t - W + 1 + j}), f the identity or silu
grid     (tiles of rows, tiles of channels); a step copies the last tokens of each sequence to its
         slot in a second kernel, when all rows have been computed
program  finds the sequence of each of its rows by halving, and adds up W taps
traffic  x read once from memory and W times from the L1 cache, y written once
numerics float32, bias first, then the oldest token first, rounded once
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.launch import launch_now
from tilewise.kernels.triton.elements import why_not as why_not

_TILE_T, _TILE_C = 16, 128  # 16 elements of each of 128 threads


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
    # The number of sequences that begin at a row or before it, less one.
    low, high = tl.zeros((TILE_T,), tl.int32), tl.zeros((TILE_T,), tl.int32) + num_sequences
    remaining = num_sequences
    while remaining > 0:
        middle = (low + high + 1) // 2
        is_after = tl.load(edges_ptr + middle) <= row
        low = tl.where(is_after, middle, low)
        high = tl.where(is_after, high, middle - 1)
        remaining = remaining // 2
    used = (row < num_rows) & (low < num_sequences)
    first = tl.load(edges_ptr + low)
    slot = low.to(tl.int64)
    start = tl.zeros((TILE_T,), tl.int64) + NUM_KEPT
    if HAS_SLOTS:
        slot = tl.load(slots_ptr + low, mask=used, other=-1).to(tl.int64)
        start = tl.load(starts_ptr + low, mask=used, other=0).to(tl.int64)
        used = used & (slot >= 0)
    total = tl.zeros((TILE_T, TILE_C), tl.float32)
    if HAS_BIAS:
        total += tl.load(bias_ptr + channel, mask=inside, other=0.0).to(tl.float32)[None, :]
    for tap in tl.static_range(WIDTH):
        position = row - first + (tap - (WIDTH - 1))
        at = x_ptr + (first + position).to(tl.int64)[:, None] * stride_x + channel[None, :]
        mask = (used & (position >= 0))[:, None] & inside[None, :]
        token = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        if HAS_STATES:
            before = start + position  # of the sequence; its row in a slot is `before` % NUM_KEPT
            kept = slot * NUM_KEPT + tl.maximum(before, 0) % NUM_KEPT
            at = states_ptr + kept[:, None] * CHANNELS + channel[None, :]
            mask = (used & (before >= 0) & (position < 0))[:, None] & inside[None, :]
            token += tl.load(at, mask=mask, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + channel * WIDTH + tap, mask=inside, other=0.0)
        total = tl.fma(tl.broadcast_to(weight.to(tl.float32)[None, :], token.shape), token, total)
    if HAS_SILU:
        total = total * tl.sigmoid(total)
    at = y_ptr + row.to(tl.int64)[:, None] * CHANNELS + channel[None, :]
    tl.store(at, total.to(y_ptr.dtype.element_ty), mask=used[:, None] & inside[None, :])


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


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    edges: Tensor,
    *,
    has_silu: bool,
) -> Tensor:
    """Return y (T, C) of whole sequences, see `ops.causal_conv1d`.

    Args:
        edges: int32 (N + 1,), the first row of each sequence, and the end of the last.
    """
    states = None if initial_state is None else initial_state.contiguous()
    return _run(x, weight, bias, states, None, None, edges, has_silu)


def step(
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
    """Return y (T, C) of tokens after those that slots hold, and take them into the slots.

    Args:
        slots, starts: int64 (N,), see `ops.causal_conv1d_step`.
        edges: as in `launch`.
    """
    y = _run(x, weight, bias, states, slots, starts, edges, has_silu)
    channels, num_kept = len(weight), states.shape[1]
    if y.numel() > 0 and num_kept > 0:
        grid = (edges.shape[0] - 1, triton.cdiv(channels, _TILE_C))
        launch_now(
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


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    slots: Tensor | None,
    starts: Tensor | None,
    edges: Tensor,
    has_silu: bool,
) -> Tensor:
    # Rows that no sequence has, and those of sequences without a slot, are 0.
    y = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0 or edges.shape[0] < 2:
        return y
    channels, width = weight.shape
    launch_now(
        _convolve_kernel,
        (triton.cdiv(len(x), _TILE_T), triton.cdiv(channels, _TILE_C)),
        x,
        weight.contiguous(),
        x if bias is None else bias.contiguous(),
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
