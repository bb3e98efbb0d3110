"""A model's step on a CPU as a list of operations, which `kernels/cpu/step` compiles and runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tilewise.kernels.cpu.step.codes import ADD, GATE, LOGITS, STORE, Batch, Tables
from tilewise.ops.dispatch import kernel_module
from tilewise.ops.panels import DTYPES

if TYPE_CHECKING:
    from tilewise.kernels.cpu.step.program import Program

__all__ = [
    "ADD",
    "GATE",
    "LOGITS",
    "STORE",
    "Batch",
    "Tables",
    "new_program",
    "why_not",
]


def why_not(dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """Return why a list cannot compute in `dtype` over such a cache, or None if it can."""
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
    """Return an empty list, see `kernels.cpu.step.program.Program`."""
    program: Program = kernel_module("step.program", "cpu").Program(*args, **kwargs)
    return program
