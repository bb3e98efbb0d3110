"""Weights packed for a CPU's products, and these products: inference only."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from tilewise.kernels.cpu.step.panels import COLUMNS, Panels, interleave, pack, rows_of, unpack
from tilewise.ops._dispatch import kernel_module

__all__ = [
    "COLUMNS",
    "Panels",
    "interleave",
    "multiply",
    "pack",
    "rows_of",
    "unpack",
    "why_not_pack",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_pack(weight: Tensor) -> str | None:
    """Say why a weight cannot be packed, or return None when it can.

    (On CPUs other than x86 nobody has measured the panels beside torch's own products.)
    """
    if weight.device.type != "cpu":
        return f"device must be cpu, got {weight.device}"
    if weight.dtype not in DTYPES:
        return f"dtype must be float32, float16 or bfloat16, got {weight.dtype}"
    if weight.dim() != 2 or weight.numel() == 0:
        return f"weight must be a matrix with elements, got shape {tuple(weight.shape)}"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"the CPU must be x86-64, got {platform.machine()}"
    reason: str | None = kernel_module("rows", "cpu").why_not_dtype(weight.dtype)
    return reason


def multiply(x: Tensor, weight: Panels) -> Tensor:
    """Return x (..., K) weight^T + bias: (..., N) in the weight's dtype."""
    rows = x.reshape(x.shape[:-1].numel(), weight.num_inputs)
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], weight.num_outputs), dtype=weight.words.dtype)
    y: Tensor = kernel_module("step.linear", "cpu").launch(rows, weight)
    return y.view(*x.shape[:-1], weight.num_outputs)
