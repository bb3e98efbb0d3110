"""A model's step on a CPU as a list of operations, which `kernels/cpu/step` compiles and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.kernels.cpu.step.codes import ADD, GATE, LOGITS, STORE, Batch, Tables
from tilewise.kernels.cpu.step.operands import (
    Buffer,
    Growth,
    Heads,
    Held,
    Latents,
    Mixture,
    Norm,
    Recurrence,
)
from tilewise.kernels.cpu.step.panels import WIDTH
from tilewise.ops.dispatch import kernel_module
from tilewise.ops.panels import DTYPES

if TYPE_CHECKING:
    from tilewise.kernels.cpu.step.program import Program

__all__ = [
    "ADD",
    "GATE",
    "LOGITS",
    "STORE",
    "WIDTH",
    "Batch",
    "Buffer",
    "Growth",
    "Heads",
    "Held",
    "Latents",
    "Mixture",
    "Norm",
    "Recurrence",
    "Tables",
    "mix",
    "new_program",
    "normalise",
    "why_not",
]


def why_not(dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """Return why a program cannot compute in `dtype` with a cache of cache_dtype, or None if it
    can."""
    if dtype not in DTYPES:
        return f"dtype must be float32, float16 or bfloat16, got {dtype}"
    why_not_dtype = kernel_module("machine.rows", "cpu").why_not_dtype
    reason: str | None = why_not_dtype(dtype)
    if reason is not None or cache_dtype in (torch.int8, torch.float8_e4m3fn):
        return reason
    if cache_dtype not in DTYPES:
        return f"cache dtype must be float32, float16, bfloat16, int8 or e4m3, got {cache_dtype}"
    reason = why_not_dtype(cache_dtype)
    return reason


def new_program(*args: Any, **kwargs: Any) -> Program:
    """Return a new list of operations without any, a `kernels.cpu.step.program.Program`.

    Args:
        args, kwargs: the arguments of the class.
    """
    program: Program = kernel_module("step.program", "cpu").Program(*args, **kwargs)
    return program


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, shift: float, *, centres: bool
) -> Tensor:
    """Return (x - mean) / sqrt(mean((x - mean)^2) + eps) (shift + weight) + bias of rows (..., E).

    The bits are those of a step. Without `centres` the mean is 0; nothing is rounded in between.

    Args:
        x: float32, float16 or bfloat16, on a CPU.
        weight, bias: (E,), of its dtype; the bias may be None.
        eps: added to the mean square.
        shift: added to the weight.
        centres: True to subtract the mean.
    """
    launch = kernel_module("step.whole_norm", "cpu").launch
    y: Tensor = launch(x, weight, bias, eps, shift, centres=centres)
    return y


def mix(x: Tensor, logits: Tensor, mixture: Mixture) -> Tensor:
    """Compute a mixture of experts for rows x; a step of the program gives the same bits.

    Args:
        x: (T, E) float32, float16 or bfloat16, on a CPU: the dtype of the mixture.
        logits: (T, N) of the experts, in x's dtype or float32.
        mixture: the packed experts, and how they are chosen.

    Returns:
        (T, E) in x's dtype.
    """
    y: Tensor = kernel_module("step.mixed_rows", "cpu").launch(x, logits, mixture)
    return y
