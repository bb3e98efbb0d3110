"""Causal convolution of each channel on the CPU.

What      y_t = f(bias + sum over j of weight_j x_{t - W + 1 + j}), f the identity or silu.
Grid      a task for each sequence and 512 channels, taken from a counter.
One task  all tokens of the sequence; its last W tokens stay in scratch, one row each.
Traffic   every element is read once and written once; W - 1 rows of a slot are read, and as many
          are written as there are new tokens, or rows.
Numerics  float32 (float64 for float64), bias first, then the oldest token first, rounded once.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention.problem import float_type
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.gemm import lanes_in
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, load_row, store_row, why_not_dtype
from tilewise.kernels.cpu.machine.threads import (
    bare,
    keep_alive,
    kernel,
    next_task,
    run_tasks,
    scratch,
    zero_scratch,
)
from tilewise.kernels.cpu.step.functions import CODES, applied
from tilewise.kernels.spec import ElementSpec

CHANNELS = 512  # of a task: with 4 taps, 20 KB of weights and tokens in the L1 cache
_SILU = CODES["silu"]


def why_not(spec: ElementSpec) -> str | None:
    """Return why the CPU's kernel of causal convolutions cannot run `spec`, or None if it can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return why_not_dtype(spec.dtype)


def launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    initial_state: Tensor | None,
    edges: Tensor,
    *,
    has_silu: bool,
) -> Tensor:
    """Return y (T, C), the causal convolution of each channel of x (T, C) over whole packed
    sequences, see `ops.causal_conv1d`.

    Args:
        weight, bias: (C, width), and (C,) or None.
        initial_state: (N, width - 1, C), the tokens before each sequence, oldest first; None for
            zeros.
        edges: int32 (N + 1,), the first row of each sequence, and the end of the last.
        has_silu: True if silu is applied to the sums.
    """
    numbers = torch.arange(edges.shape[0] - 1)
    starts = torch.full_like(numbers, 0 if initial_state is None else weight.shape[1] - 1)
    before = None if initial_state is None else initial_state.detach().contiguous()
    return _run(x, weight, bias, before, numbers, starts, edges, has_silu, False)


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
    """Return y (T, C) of new tokens of running sequences, and write the tokens to their slots in
    place; a sequence without a slot gets 0.

    Args:
        x: (T, C), packed.
        weight, bias: (C, width), and (C,) or None.
        states: (slots, rows, C): the last rows of a slot, the token at position p in row p % rows.
        slots, starts: (N,), each sequence's slot (-1 for none) and its tokens before this call.
        edges: (N + 1,), the first row of each sequence and the end.
    """
    return _run(x, weight, bias, states, slots, starts, edges, has_silu, True)


def _run(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    slots: Tensor,
    starts: Tensor,
    edges: Tensor,
    has_silu: bool,
    keeps: bool,
) -> Tensor:
    y = torch.zeros(x.shape, dtype=x.dtype)
    (num_channels, width), size = weight.shape, x.element_size()
    if y.numel() == 0 and not keeps:
        return y
    x, wide = x.detach(), float_type(x.dtype)
    taps = weight.detach().contiguous()
    first = None if bias is None else bias.detach().contiguous()
    like = np.empty(0, np.float64 if wide == torch.float64 else np.float32)
    places = (t.detach().to(torch.int64).contiguous().numpy() for t in (edges, slots, starts))
    parts = -(-num_channels // CHANNELS)
    run_tasks(
        convolve,
        (edges.shape[0] - 1) * parts,
        like,
        DTYPE_CODES[x.dtype],
        size,
        x.data_ptr(),
        x.stride(0) * size,
        y.data_ptr(),
        num_channels * size,
        taps.data_ptr(),
        0 if first is None else first.data_ptr(),
        0 if states is None or states.numel() == 0 else states.data_ptr(),
        0 if states is None else states.shape[1],
        keeps,
        *places,
        num_channels,
        width,
        has_silu,
    )
    return y


@kernel
def convolve(
    like,
    code,
    size,
    x,
    x_row,
    y,
    y_row,
    taps,
    bias,
    states,
    num_kept,
    keeps,
    edges,
    slots,
    starts,
    num_channels,
    width,
    has_silu,
    counter,
    num_tasks,
):
    """Convolve sequences in this thread: take tasks, each a sequence and up to CHANNELS channels,
    until none is left, and write y.

    Args:
        taps: the address of the weight (channels, width), in the dtype of the tokens.
        bias: the address of the bias (channels,), or 0 for none.
        states, num_kept: the address of the slots, or 0 for none, and the rows of each.
        keeps: whether the new tokens are written to the slots.
    """
    lanes = lanes_in(like)
    parts = (num_channels + CHANNELS - 1) // CHANNELS
    owners = (
        zero_scratch(width * CHANNELS, like),
        zero_scratch(width * CHANNELS, like),
        zero_scratch(CHANNELS, like),
        zero_scratch(CHANNELS, like),
        scratch(width * CHANNELS, like),
    )
    weights, window, first, total = (
        bare(owners[0]),
        bare(owners[1]),
        bare(owners[2]),
        bare(owners[3]),
    )
    given = bare(owners[4])
    row_bytes = num_channels * size
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            keep_alive(owners)
            return
        sequence, part = task // parts, task % parts
        begin, end, slot = edges[sequence], edges[sequence + 1], slots[sequence]
        if slot < 0 or end <= begin:
            continue
        channel = part * CHANNELS
        count = min(CHANNELS, num_channels - channel)
        if bias != 0:
            load_row(like, code, first, 0, bias + channel * size, count)
        load_row(like, code, given, 0, taps + channel * width * size, count * width)
        for column in range(count):
            for tap in range(width):
                weights[tap * CHANNELS + column] = given[column * width + tap]
        # Row (t + j) % W of the window holds the token that tap j multiplies at token t. Of a slot
        # row p % num_kept holds the token at position p.
        kept = states + slot * num_kept * row_bytes + channel * size
        for row in range(width - 1):
            position = starts[sequence] - (width - 1) + row
            if states != 0 and position >= 0:
                place = kept + position % num_kept * row_bytes
                load_row(like, code, window, row * CHANNELS, place, count)
            else:
                for column in range(count):
                    window[row * CHANNELS + column] = 0.0
        for t in range(end - begin):
            source = x + (begin + t) * x_row + channel * size
            load_row(like, code, window, (t + width - 1) % width * CHANNELS, source, count)
            for column in range(0, count, lanes):
                sums = simd.load(first, column)
                for tap in range(width):
                    token = simd.load(window, (t + tap) % width * CHANNELS + column)
                    sums = simd.fma(simd.load(weights, tap * CHANNELS + column), token, sums)
                if has_silu:
                    sums = applied(like, _SILU, sums)
                simd.store(total, column, sums)
            target = y + (begin + t) * y_row + channel * size
            store_row(like, code, total, 0, 1.0, target, count)
        if keeps and states != 0:
            for t in range(max(end - begin - num_kept, 0), end - begin):
                load_row(like, code, total, 0, x + (begin + t) * x_row + channel * size, count)
                place = kept + (starts[sequence] + t) % num_kept * row_bytes
                store_row(like, code, total, 0, 1.0, place, count)
