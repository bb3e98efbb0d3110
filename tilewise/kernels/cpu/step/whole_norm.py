"""Norms of rows outside of a step, with the bits of a step's: layer norm, shifted weights.

What      y = (x - mean) / sqrt(mean((x - mean)^2) + eps) (shift + weight) + bias.
Grid      tasks of about 131,072 elements, taken from a counter; one task while decoding.
One task  its rows, one at a time in scratch.
Traffic   every element is read once and written once; a row stays in the L1 cache meanwhile.
Numerics  those of `layers.normalise_row`, which computes them.
"""

from __future__ import annotations

import torch
from numba import types
from torch import Tensor

from tilewise.kernels.cpu.machine.simd import REGISTER_BYTES
from tilewise.kernels.cpu.machine.threads import (
    keep_alive,
    kernel,
    next_task,
    run_tasks,
    zero_scratch,
)
from tilewise.kernels.cpu.step.codes import CENTRES, IS_PART
from tilewise.kernels.cpu.step.layers import copy_words, normalise_row
from tilewise.kernels.cpu.step.norm import ELEMENTS_PER_TASK
from tilewise.kernels.cpu.step.panels import padded
from tilewise.kernels.cpu.step.program import REAL_LIKE, WORD_LIKE

_LANES = REGISTER_BYTES // 4


def launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, shift: float, *, centres: bool
) -> Tensor:
    """Return the norm y of x (..., E) over its last dim, a new tensor of x's dtype: y = (x - mean)
    / sqrt(mean((x - mean)^2) + eps) (shift + weight) + bias.

    Args:
        x: float32, float16 or bfloat16.
        weight, bias: (E,), of its dtype; no bias is added if None.
        eps: the number that is added to the mean square.
        shift: the number that is added to the weight.
        centres: True to subtract the mean; without it the mean is 0.
    """
    y = torch.empty(x.shape, dtype=x.dtype)
    if x.numel() == 0:
        return y
    dim = x.shape[-1]
    rows = x.detach().reshape(-1, dim)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    width = padded(dim, _LANES)
    # A register of words is read of each, and the last one may be incomplete.
    terms = torch.zeros((2, width), dtype=x.dtype)
    terms[0, :dim] = weight.detach()
    if bias is not None:
        terms[1, :dim] = bias.detach()
    rows_per_task = max(1, ELEMENTS_PER_TASK // dim)
    run_tasks(
        _normalise,
        -(-rows.shape[0] // rows_per_task),
        WORD_LIKE[x.dtype],
        REAL_LIKE,
        rows.data_ptr(),
        rows.stride(0) * x.element_size(),
        y.data_ptr(),
        rows.shape[0],
        dim,
        width,
        terms.data_ptr(),
        bias is not None,
        float(eps),
        float(shift),
        CENTRES * centres,
        rows_per_task,
    )
    return y


@kernel
def _normalise(
    word_like,
    like,
    source,
    source_row,
    target,
    num_rows,
    dim,
    width,
    weight,
    has_bias,
    eps,
    shift,
    kind,
    rows_per_task,
    counter,
    num_tasks,
):
    size = word_like.itemsize
    row, spare = zero_scratch(width, word_like), zero_scratch(64, word_like)
    at, spare_at = types.int64(row.ctypes.data), types.int64(spare.ctypes.data)
    bias = types.int64(0)
    if has_bias:
        bias = weight + width * size
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            break
        first = task * rows_per_task
        for index in range(first, min(first + rows_per_task, num_rows)):
            copy_words(word_like, at, source + index * source_row, dim)
            normalise_row(
                word_like,
                like,
                at,
                target + index * dim * size,
                weight,
                bias,
                dim,
                eps,
                shift,
                1.0,
                kind | IS_PART,
                False,
                1.0,
                spare_at,
            )
    keep_alive((row, spare))
