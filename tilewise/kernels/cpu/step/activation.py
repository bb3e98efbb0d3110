"""Gated activation on the CPU.

What      y = round(silu(gate)) * up, silu(x) = x / (1 + exp(-x)).
Grid      tasks of about 65,536 elements, taken from a counter; one task while decoding.
One task  its rows, one at a time in scratch.
Traffic   every element is read once, half as many written; a row stays in the L1 cache meanwhile.
Numerics  float32 (float64 for float64); rounded where torch's separate operations round.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention.problem import float_type
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import (
    BF16,
    DTYPE_CODES,
    F16,
    load_row,
    store_row,
    why_not_dtype,
)
from tilewise.kernels.cpu.machine.threads import inner, kernel, next_task, run_tasks, scratch
from tilewise.kernels.cpu.step.norm import multiply_row
from tilewise.kernels.spec import ElementSpec

ELEMENTS_PER_TASK = 65536  # about 50 us of work, as long as a thread's wake-up
_LOG2E = 1.0 / math.log(2.0)
_LARGEST = 126.0  # exponent up to which `simd.exp2` is exact; beyond it silu is 0 to any precision


def why_not(spec: ElementSpec) -> str | None:
    """Return why the CPU's kernel of silu(gate) * up cannot run `spec`, or None if it can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return why_not_dtype(spec.dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return y = silu(gate) * up, (..., I), for gate_up (..., 2 I), whose rows hold gate, then up;
    silu is rounded to the dtype before it is multiplied."""
    dim, size = gate_up.shape[-1] // 2, gate_up.element_size()
    y = torch.empty((*gate_up.shape[:-1], dim), dtype=gate_up.dtype)
    if y.numel() == 0:
        return y
    rows = gate_up.detach().reshape(-1, 2 * dim)
    like = np.empty(0, np.float64 if float_type(y.dtype) == torch.float64 else np.float32)
    rows_per_task = max(1, ELEMENTS_PER_TASK // dim)
    run_tasks(
        _silu_mul_rows,
        -(-rows.shape[0] // rows_per_task),
        like,
        DTYPE_CODES[y.dtype],
        size,
        rows.data_ptr(),
        rows.stride(0) * size,
        y.data_ptr(),
        rows.shape[0],
        dim,
        rows_per_task,
    )
    return y


@inner
def _silu(row, count):
    """Replace row[0 : count] by silu of it in place, up to a whole register; scratch has room up to
    a multiple of 16."""
    lanes = simd.REGISTER_BYTES // row.itemsize
    one, slope = simd.splat(row, 1.0), simd.splat(row, -_LOG2E)
    limit, infinite = simd.splat(row, _LARGEST), simd.splat(row, math.inf)
    for column in range(0, count, lanes):
        x = simd.load(row, column)
        power = simd.mul(x, slope)
        # As in torch: -0 far below zero, NaN at minus infinity.
        decay = simd.select(simd.at_least(limit, power), simd.exp2(power), infinite)
        simd.store(row, column, simd.div(x, simd.add(one, decay)))


@kernel
def _silu_mul_rows(
    like, code, size, source, source_row, target, num_rows, dim, rows_per_task, counter, num_tasks
):
    padded = (dim + 15) // 16 * 16
    gate, up = scratch(padded, like), scratch(padded, like)
    gate[:] = 0
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        first = task * rows_per_task
        for index in range(first, min(first + rows_per_task, num_rows)):
            start, to = source + index * source_row, target + index * dim * size
            load_row(like, code, gate, 0, start, dim)
            _silu(gate, dim)
            if code in (BF16, F16):
                store_row(like, code, gate, 0, 1.0, to, dim)
                load_row(like, code, gate, 0, to, dim)  # rounded
            load_row(like, code, up, 0, start + dim * size, dim)
            multiply_row(gate, up, dim)
            store_row(like, code, gate, 0, 1.0, to, dim)
