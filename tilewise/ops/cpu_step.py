"""Packed weights of a CPU, products with them, and a model's step as a list of operations."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from tilewise.kernels.cpu.rows import why_not_dtype
from tilewise.kernels.cpu.quantise import BYTE_CODES
from tilewise.kernels.cpu.step import linear
from tilewise.kernels.cpu.step.panels import COLUMNS, Panels, interleave, pack, rows_of, unpack
from tilewise.kernels.cpu.step.program import ADD, GATE, STORE, Batch, Buffer, Program

__all__ = [
    "ADD",
    "COLUMNS",
    "GATE",
    "STORE",
    "Batch",
    "Buffer",
    "Panels",
    "Program",
    "interleave",
    "multiply",
    "pack",
    "rows_of",
    "unpack",
    "why_not",
    "why_not_pack",
]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_pack(weight: Tensor) -> str | None:
    """Say why a weight cannot be packed, or return None when it can.

    (On CPUs other than x86 nobody has measured the panels beside torch's own products.)
    """
    if weight.device.type != "cpu":
        return f"device must be cpu, got {weight.device}"
    if weight.dtype not in _DTYPES:
        return f"dtype must be float32, float16 or bfloat16, got {weight.dtype}"
    if weight.dim() != 2 or weight.numel() == 0:
        return f"weight must be a matrix with elements, got shape {tuple(weight.shape)}"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"the CPU must be x86-64, got {platform.machine()}"
    return why_not_dtype(weight.dtype)


def why_not(dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """Say why a `Program` cannot compute in `dtype` over such a cache, or None when it can."""
    if dtype not in _DTYPES:
        return f"dtype must be float32, float16 or bfloat16, got {dtype}"
    if cache_dtype in BYTE_CODES:
        return why_not_dtype(dtype)
    if cache_dtype not in _DTYPES:
        return f"cache dtype must be float32, float16, bfloat16, int8 or e4m3, got {cache_dtype}"
    return why_not_dtype(dtype) or why_not_dtype(cache_dtype)


def multiply(x: Tensor, weight: Panels) -> Tensor:
    """Return x (..., K) weight^T + bias: (..., N) in the weight's dtype; inference only."""
    rows = x.reshape(-1, weight.num_inputs)
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], weight.num_outputs), dtype=weight.words.dtype)
    return linear.launch(rows, weight).view(*x.shape[:-1], weight.num_outputs)
