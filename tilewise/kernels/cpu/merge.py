"""Merge two partial attention outputs on the CPU.

What      one softmax over the keys of both sides, from each side's output and log-sum-exp.
Grid      tasks of 256 rows (a token and a head each), taken from a counter.
One task  loads the two rows to scratch, combines them and stores the result.
Traffic   each row is read once and the result written once.
Numerics  weights in float64, sums in float32 (float64 for float64), rounded once.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention.problem import float_type
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, load_row, store_row, why_not_dtype
from tilewise.kernels.cpu.machine.threads import inner, kernel, next_task, run_tasks, zero_scratch
from tilewise.kernels.spec import ElementSpec

ROWS_PER_TASK = 256  # a decode step of 8 sequences and 32 heads stays on one thread


def why_not(spec: ElementSpec) -> str | None:
    """Return why the CPU's kernel that merges partial outputs cannot run `spec`, or None if it
    can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return why_not_dtype(spec.dtype)


def launch(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two partial outputs of attention over disjoint keys, weighted by the log-sum-exps of
    their keys, into new tensors.

    lse = log(exp(lse_a) + exp(lse_b)); o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b. A side with
    lse = -inf has weight 0; if both are -inf, o = 0 and lse = -inf.

    Args:
        o_a, o_b: (T, H, Dv) or (B, S, H, Dv), of one dtype.
        lse_a, lse_b: (H, T) or (B, H, S), natural log.

    Returns:
        o and lse, contiguous, shaped and typed like o_a and lse_a.

    Source: Milakov and Gimelshein 2018, "Online normalizer calculation for softmax", eq. 4.
    """
    o_a, o_b = o_a.detach().contiguous(), o_b.detach().contiguous()
    lse_a, lse_b = lse_a.detach().contiguous(), lse_b.detach().contiguous()
    o, lse = torch.empty(o_a.shape, dtype=o_a.dtype), torch.empty(lse_a.shape, dtype=lse_a.dtype)
    seqlen, num_heads, dim = o_a.shape[-3:]
    num_rows = math.prod(o_a.shape[:-1])
    real = float_type(o_a.dtype)
    run_tasks(
        _merge,
        -(-num_rows // ROWS_PER_TASK),
        np.empty(0, np.float64 if real == torch.float64 else np.float32),
        DTYPE_CODES[o_a.dtype],
        o_a.element_size(),
        o_a.data_ptr(),
        o_b.data_ptr(),
        o.data_ptr(),
        lse_a.view(-1).numpy(),
        lse_b.view(-1).numpy(),
        lse.view(-1).numpy(),
        num_rows,
        seqlen,
        num_heads,
        dim,
    )
    return o, lse


@inner
def _weights(a, b):
    """Return exp(a - lse), exp(b - lse) and lse = log(exp(a) + exp(b)); 0, 0 and -inf if both
    sides, of log-sum-exps a and b, are empty."""
    top = max(a, b)
    if a == -math.inf and b == -math.inf:  # not `top`, which ignores NaN
        return 0.0, 0.0, -math.inf
    weight_a, weight_b = math.exp(a - top), math.exp(b - top)
    total = weight_a + weight_b
    return weight_a / total, weight_b / total, top + math.log(total)


@inner
def _add_weighted(like, target, source, weight, padded):
    """Add weight * source to target[0 : padded] in place; a weight of 0 adds nothing, whatever
    source contains."""
    if weight == 0.0:
        return
    weights = simd.splat(like, weight)
    for column in range(0, padded, simd.REGISTER_BYTES // like.itemsize):
        total = simd.fma(simd.load(source, column), weights, simd.load(target, column))
        simd.store(target, column, total)


@kernel
def _merge(
    like,
    code,
    size,
    o_a,
    o_b,
    o,
    lse_a,
    lse_b,
    lse,
    num_rows,
    seqlen,
    num_heads,
    dim,
    counter,
    num_tasks,
):
    padded = (dim + 15) // 16 * 16
    row, total = zero_scratch(padded, like), zero_scratch(padded, like)
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            return
        first = task * ROWS_PER_TASK
        for index in range(first, min(first + ROWS_PER_TASK, num_rows)):
            token, head = index // num_heads, index % num_heads
            batch, position = token // seqlen, token % seqlen
            at = (batch * num_heads + head) * seqlen + position
            weight_a, weight_b, lse[at] = _weights(float(lse_a[at]), float(lse_b[at]))
            total[:] = 0
            load_row(like, code, row, 0, o_a + index * dim * size, dim)
            _add_weighted(like, total, row, weight_a, padded)
            load_row(like, code, row, 0, o_b + index * dim * size, dim)
            _add_weighted(like, total, row, weight_b, padded)
            store_row(like, code, total, 0, 1.0, o + index * dim * size, dim)
