"""RMS norm of rows on the CPU, and of the sum of two rows.

What      r = round(x + residual), where there is a residual; y = round(r / rms(r)) * weight.
Grid      tasks of about 131,072 elements, taken from a counter; one task while decoding.
One task  its rows, one at a time in scratch.
Traffic   every element is read once and written once; a row stays in the L1 cache meanwhile.
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
from tilewise.kernels.cpu.machine.threads import (
    inner,
    kernel,
    next_task,
    run_tasks,
    scratch,
    zero_scratch,
)
from tilewise.kernels.spec import ElementSpec

ELEMENTS_PER_TASK = 131072  # about 50 us of work, as long as a thread's wake-up


def why_not(spec: ElementSpec) -> str | None:
    """Return why the CPU's kernel of RMS norms cannot run `spec`, or None if it can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return why_not_dtype(spec.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return y = round(x / sqrt(mean(x^2) + eps)) * weight over the last dim, a new tensor (..., E)
    of x's dtype."""
    y = torch.empty(x.shape, dtype=x.dtype)
    _launch(x, None, weight, eps, y, y)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (y, sum): the sum x + residual, rounded to x's dtype, as the new residual, and its RMS
    norm y, both new tensors (..., E)."""
    y, total = torch.empty(x.shape, dtype=x.dtype), torch.empty(x.shape, dtype=x.dtype)
    _launch(x, residual, weight, eps, y, total)
    return y, total


def _launch(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, y: Tensor, total: Tensor
) -> None:
    if x.numel() == 0:
        return
    dim, size = x.shape[-1], x.element_size()
    rows = x.detach().reshape(-1, dim)
    added = rows if residual is None else residual.detach().reshape(-1, dim)
    like = np.empty(0, np.float64 if float_type(x.dtype) == torch.float64 else np.float32)
    rows_per_task = max(1, ELEMENTS_PER_TASK // dim)
    run_tasks(
        _normalise_rows,
        -(-rows.shape[0] // rows_per_task),
        like,
        DTYPE_CODES[x.dtype],
        rows.data_ptr(),
        rows.stride(0) * size,
        added.data_ptr(),
        added.stride(0) * size,
        residual is not None,
        weight.data_ptr(),
        y.data_ptr(),
        total.data_ptr(),
        dim * size,
        rows.shape[0],
        dim,
        float(eps),
        rows_per_task,
    )


@inner
def _add(row, other, count):
    """Add other[0 : count] to row[0 : count] in place."""
    lanes = simd.REGISTER_BYTES // row.itemsize
    done = count // lanes * lanes
    for column in range(0, done, lanes):
        simd.store(row, column, simd.add(simd.load(row, column), simd.load(other, column)))
    for column in range(done, count):
        row[column] += other[column]


@inner
def multiply_row(row, other, count):
    """Multiply row[0 : count] by other[0 : count] in place."""
    lanes = simd.REGISTER_BYTES // row.itemsize
    done = count // lanes * lanes
    for column in range(0, done, lanes):
        simd.store(row, column, simd.mul(simd.load(row, column), simd.load(other, column)))
    for column in range(done, count):
        row[column] *= other[column]


@inner
def _sum_of_squares(row, count):
    """Return the sum of the squares of row[0 : count], behind which whole registers are zeros, in
    the order of `step.layers.normalise_row`, for the same bits as a compiled step."""
    lanes = simd.REGISTER_BYTES // row.itemsize
    squares = simd.splat(row, 0.0)
    for column in range(0, count, lanes):
        x = simd.load(row, column)
        squares = simd.fma(x, x, squares)
    return simd.sum_lanes(squares)


@kernel
def _normalise_rows(
    like,
    code,
    x,
    x_row,
    added,
    added_row,
    has_residual,
    weight,
    y,
    total,
    to_row,
    num_rows,
    dim,
    eps,
    rows_per_task,
    counter,
    num_tasks,
):
    padded = (dim + 15) // 16 * 16  # whole registers
    row, other, weights = zero_scratch(padded, like), scratch(dim, like), scratch(dim, like)
    load_row(like, code, weights, 0, weight, dim)
    is_half = code in (BF16, F16)
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        first = task * rows_per_task
        for index in range(first, min(first + rows_per_task, num_rows)):
            load_row(like, code, row, 0, x + index * x_row, dim)
            if has_residual:
                load_row(like, code, other, 0, added + index * added_row, dim)
                _add(row, other, dim)
                store_row(like, code, row, 0, 1.0, total + index * to_row, dim)
                if is_half:
                    # rounded by the store
                    load_row(like, code, row, 0, total + index * to_row, dim)
            # In the type of the row: a factor of float64 would round the elements after the last
            # whole register otherwise than those before.
            factor = row.dtype.type(1.0 / math.sqrt(_sum_of_squares(row, dim) / dim + eps))
            if is_half:
                store_row(like, code, row, 0, factor, y + index * to_row, dim)
                load_row(like, code, row, 0, y + index * to_row, dim)  # rounded by the store
                factor = row.dtype.type(1.0)
            multiply_row(row, weights, dim)
            store_row(like, code, row, 0, factor, y + index * to_row, dim)
