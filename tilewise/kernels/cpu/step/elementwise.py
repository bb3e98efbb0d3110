"""Activations of single elements on the CPU.

What      y = f(x): sigmoid, silu, gelu, or gelu by tanh, see `ops.activate`.
Grid      tasks of about 65,536 elements, taken from a counter; one task while decoding.
One task  its rows, CHUNK elements at a time in scratch.
Traffic   every element is read once and written once; a chunk stays in the L1 cache meanwhile.
Numerics  float32, rounded once. Each element is computed in a lane of a vector, those left of a
          row too, so that its bits do not depend on where it lies; torch's operations compute what
          is left of a vector by other functions. 0.5 (1 + tanh(u)) is 1 / (1 + exp(-2 u)), which
          does not cancel. gelu's normal distribution is exp(-x^2 / 2) times a polynomial of
          1 / (2 + |x|), within 4e-8 of x times it.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba.extending import intrinsic
from torch import Tensor

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, load_row, store_row, why_not_dtype
from tilewise.kernels.cpu.machine.threads import (
    inner,
    kernel,
    next_task,
    run_tasks,
    zero_scratch,
)
from tilewise.kernels.spec import ElementSpec

ELEMENTS_PER_TASK = 65536  # the same as in `activation.py`
CHUNK = 2048  # elements: 8 KB of the L1 cache
_SIGMOID, _SILU, _GELU, _GELU_TANH = range(4)
_CODES = {"sigmoid": _SIGMOID, "silu": _SILU, "gelu": _GELU, "gelu_tanh": _GELU_TANH}
_LIKE = np.empty(0, np.float32)
_LOG2E = 1.0 / math.log(2.0)
_LARGEST = 126.0  # exponent up to which `simd.exp2` is exact; 2^-126 is 0 to any precision here
_LINEAR = (
    -2.0 * math.sqrt(2.0 / math.pi) * _LOG2E
)  # of -2 u log2 e, u = sqrt(2/pi)(x + 0.044715 x^3)
_CUBIC = 0.044715 * _LINEAR
_POLE = 2.0  # of the polynomial's argument (|x| - 2) / (|x| + 2), -1 at 0 and 1 at infinity


def _tail(places: np.ndarray) -> np.ndarray:
    """Return exp(z^2 / 2) times the normal distribution at -z, where (z - 2) / (z + 2) is the
    argument."""
    tails = []
    for place in places:
        y = _POLE * (1.0 + place) / (1.0 - place) / math.sqrt(2.0)
        if y < 25.0:
            tails.append(0.5 * math.exp(y * y) * math.erfc(y))
        else:  # erfc underflows; the next term of the series is below 2e-6 of a tail of 0.01
            tails.append(0.5 / (y * math.sqrt(math.pi)) * (1.0 - 0.5 / (y * y)))
    return np.array(tails)


_TAIL = simd.chebyshev(_tail, -1.0, 1.0, 10)


@intrinsic
def _tail_at(typingctx, place):
    """Compute `_tail`, lane by lane."""

    def codegen(context, builder, sig, args):
        return simd.horner(builder, args[0], _TAIL)

    return place(place), codegen


def why_not(spec: ElementSpec) -> str | None:
    """Return why this kernel cannot run `spec`, or None if it can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    if spec.dtype == torch.float64:
        return "dtype must be float32, float16 or bfloat16, got torch.float64"
    return why_not_dtype(spec.dtype)


def activate(x: Tensor, function: str) -> Tensor:
    """Return y (..., E) of x (..., E)."""
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
        _activate_rows, -(-rows // rows_per_task), _LIKE, _CODES[function], DTYPE_CODES[x.dtype],
        size, x.data_ptr(), stride * size, y.data_ptr(), rows, dim, total, rows_per_task,
    )  # fmt: skip
    return y


@inner
def _divide_by_decay(row, count, function):
    """row = row / (1 + 2^p), or 1 / (1 + 2^p), p the exponent of the function."""
    lanes = simd.REGISTER_BYTES // row.itemsize
    one, limit = simd.splat(row, 1.0), simd.splat(row, _LARGEST)
    infinite, slope = simd.splat(row, math.inf), simd.splat(row, -_LOG2E)
    linear, cubic = simd.splat(row, _LINEAR), simd.splat(row, _CUBIC)
    for column in range(0, count, lanes):
        x = simd.load(row, column)
        if function == _GELU_TANH:
            power = simd.mul(x, simd.fma(simd.mul(x, x), cubic, linear))
        else:
            power = simd.mul(x, slope)
        if function == _SIGMOID:
            x = simd.div(one, simd.add(one, simd.exp2(simd.minimum(power, limit))))
        else:  # as in torch: -0 far below zero, NaN at minus infinity
            decay = simd.select(simd.at_least(limit, power), simd.exp2(power), infinite)
            x = simd.div(x, simd.add(one, decay))
        simd.store(row, column, x)


@inner
def _multiply_by_share(row, count):
    """row = row times the normal distribution at row."""
    lanes = simd.REGISTER_BYTES // row.itemsize
    zero, one, pole = simd.splat(row, 0.0), simd.splat(row, 1.0), simd.splat(row, _POLE)
    twice, half = simd.splat(row, -2.0 * _POLE), simd.splat(row, -0.5 * _LOG2E)
    for column in range(0, count, lanes):
        x = simd.load(row, column)
        z = simd.absolute(x)
        # (z - 2) / (z + 2), which is 1 at infinity
        place = simd.fma(simd.div(one, simd.add(z, pole)), twice, one)
        tail = simd.mul(simd.exp2(simd.mul(simd.mul(z, z), half)), _tail_at(place))
        share = simd.select(simd.at_least(zero, x), tail, simd.sub(one, tail))
        simd.store(row, column, simd.mul(x, share))


@kernel
def _activate_rows(
    like, function, code, size, source, source_row, target, num_rows, dim, total, rows_per_task,
    counter, num_tasks,
):  # fmt: skip
    """Apply the function to rows of `dim` elements, `total` in all: the last may be shorter."""
    row = zero_scratch(CHUNK, like)
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
                if function == _GELU:
                    _multiply_by_share(row, count)
                else:
                    _divide_by_decay(row, count, function)
                store_row(like, code, row, 0, 1.0, target + (index * dim + column) * size, count)
