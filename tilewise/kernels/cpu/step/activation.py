"""Elements times a function of a gate, on the CPU.

What      y = round(f(gate)) * x, see `functions.py`.
Grid      tasks of about 65,536 elements, taken from a counter; one task while decoding.
One task  its rows, one at a time in scratch.
Traffic   gate and x are read once, y is written once; a row stays in the L1 cache meanwhile.
Numerics  float32 (float64 for float64); rounded where torch's separate operations round.
"""

from __future__ import annotations

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
from tilewise.kernels.cpu.machine.threads import kernel, next_task, run_tasks, scratch
from tilewise.kernels.cpu.step.functions import CODES, applied
from tilewise.kernels.cpu.step.norm import multiply_row
from tilewise.kernels.spec import GateSpec

ELEMENTS_PER_TASK = 65536  # about 50 us of work, as long as a thread's wake-up


def why_not(spec: GateSpec) -> str | None:
    """Return why the CPU's kernel of f(gate) * x cannot run `spec`, or None if it can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    if spec.dtype == torch.float64 and spec.function == "gelu":
        return "function must not be gelu for float64, whose normal distribution is a polynomial"
    return why_not_dtype(spec.dtype)


def gated_mul(gate: Tensor, x: Tensor | None, function: str) -> Tensor:
    """Return y = f(gate) * x, (..., I), for gate and x (..., I); f(gate) is rounded to the dtype
    before it is multiplied. Without x the rows of gate (..., 2 I) hold the gate's channels, then
    those of x."""
    dim, size = gate.shape[-1], gate.element_size()
    if x is None:
        dim //= 2
    y = torch.empty((*gate.shape[:-1], dim), dtype=gate.dtype)
    if y.numel() == 0:
        return y
    gates = gate.detach().reshape(-1, gate.shape[-1])
    rows = gates[:, dim:] if x is None else x.detach().reshape(-1, dim)
    like = np.empty(0, np.float64 if float_type(y.dtype) == torch.float64 else np.float32)
    rows_per_task = max(1, ELEMENTS_PER_TASK // dim)
    run_tasks(
        _gated_mul_rows,
        -(-rows.shape[0] // rows_per_task),
        like,
        CODES[function],
        DTYPE_CODES[y.dtype],
        size,
        gates.data_ptr(),
        gates.stride(0) * size,
        rows.data_ptr(),
        rows.stride(0) * size,
        y.data_ptr(),
        rows.shape[0],
        dim,
        rows_per_task,
    )
    return y


@kernel
def _gated_mul_rows(
    like,
    function,
    code,
    size,
    gates,
    gates_row,
    source,
    source_row,
    target,
    num_rows,
    dim,
    rows_per_task,
    counter,
    num_tasks,
):
    padded, lanes = (dim + 15) // 16 * 16, simd.REGISTER_BYTES // like.itemsize
    gate, x = scratch(padded, like), scratch(padded, like)
    gate[:] = 0
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        first = task * rows_per_task
        for index in range(first, min(first + rows_per_task, num_rows)):
            to = target + index * dim * size
            load_row(like, code, gate, 0, gates + index * gates_row, dim)
            for at in range(0, dim, lanes):
                simd.store(gate, at, applied(like, function, simd.load(gate, at)))
            if code in (BF16, F16):
                store_row(like, code, gate, 0, 1.0, to, dim)
                load_row(like, code, gate, 0, to, dim)  # rounded
            load_row(like, code, x, 0, source + index * source_row, dim)
            multiply_row(gate, x, dim)
            store_row(like, code, gate, 0, 1.0, to, dim)
