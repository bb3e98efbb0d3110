"""Activations of single elements on the CPU.

What      y = f(x), see `functions.py` and `ops.activate`.
Grid      tasks of about 65,536 elements, taken from a counter; one task while decoding.
One task  its rows, CHUNK elements at a time in scratch.
Traffic   every element is read once and written once; a chunk stays in the L1 cache meanwhile.
Numerics  float32, rounded once. Each element is computed in a lane of a vector, those left of a
          row too, so that its bits do not depend on where it lies; torch's operations compute what
          is left of a vector by other functions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, load_row, store_row, why_not_dtype
from tilewise.kernels.cpu.machine.threads import kernel, next_task, run_tasks, zero_scratch
from tilewise.kernels.cpu.step.functions import CODES, applied
from tilewise.kernels.spec import ElementSpec

ELEMENTS_PER_TASK = 65536  # the same as in `activation.py`
CHUNK = 2048  # elements: 8 KB of the L1 cache
_LIKE = np.empty(0, np.float32)


def why_not(spec: ElementSpec) -> str | None:
    """Return why the CPU's kernel of elementwise activations cannot run `spec`, or None if it
    can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    if spec.dtype == torch.float64:
        return "dtype must be float32, float16 or bfloat16, got torch.float64"
    return why_not_dtype(spec.dtype)


def activate(x: Tensor, function: str) -> Tensor:
    """Return y = f(x), a new tensor (..., E) of x's dtype, for x (..., E) and the function of this
    name in `functions.CODES`."""
    y = torch.empty(x.shape, dtype=x.dtype)
    total, size = y.numel(), x.element_size()
    if total == 0:
        return y
    if x.is_contiguous():  # one row, whose parts are shared by threads
        dim = stride = min(total, CHUNK)
    else:
        dim = x.shape[-1]
        x = x.detach().reshape(-1, dim)
        stride = x.stride(0)
    rows, rows_per_task = -(-total // dim), max(1, ELEMENTS_PER_TASK // dim)
    run_tasks(
        _activate_rows,
        -(-rows // rows_per_task),
        _LIKE,
        CODES[function],
        DTYPE_CODES[x.dtype],
        size,
        x.data_ptr(),
        stride * size,
        y.data_ptr(),
        rows,
        dim,
        total,
        rows_per_task,
    )
    return y


@kernel
def _activate_rows(
    like,
    function,
    code,
    size,
    source,
    source_row,
    target,
    num_rows,
    dim,
    total,
    rows_per_task,
    counter,
    num_tasks,
):
    """Apply the function of number `function` to rows of `dim` elements, `total` in all (the last
    row may be shorter); tasks of rows_per_task rows are taken in this thread until none is left."""
    row, lanes = zero_scratch(CHUNK, like), simd.REGISTER_BYTES // 4
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        first = task * rows_per_task
        for index in range(first, min(first + rows_per_task, num_rows)):
            end = min(dim, total - index * dim)
            for column in range(0, end, CHUNK):
                count = min(CHUNK, end - column)
                load_row(like, code, row, 0, source + index * source_row + column * size, count)
                for at in range(0, count, lanes):
                    simd.store(row, at, applied(like, function, simd.load(row, at)))
                store_row(like, code, row, 0, 1.0, target + (index * dim + column) * size, count)
