"""Weights packed for a CPU's products, and these products: inference only."""

from __future__ import annotations

import platform

import torch
from torch import Tensor

from tilewise.kernels.cpu.step import int8
from tilewise.kernels.cpu.step import panels as plain
from tilewise.kernels.cpu.step.narrow import pack_narrow
from tilewise.kernels.cpu.step.narrow import why_not as why_not_narrow
from tilewise.kernels.cpu.step.panels import COLUMNS, WIDTH, Panels, interleave, interleaved, pack
from tilewise.ops.dispatch import kernel_module

__all__ = [
    "COLUMNS",
    "Panels",
    "instruction_sets",
    "interleave",
    "interleaved",
    "multiply",
    "pack",
    "pack_int8",
    "pack_narrow",
    "rows_of",
    "unpack",
    "why_not_narrow",
    "why_not_pack",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def why_not_pack(weight: Tensor) -> str | None:
    """Return why a weight cannot be packed, or None if it can.

    (On CPUs other than x86 the panels were not measured beside torch's own products.)
    """
    if weight.device.type != "cpu":
        return f"device must be cpu, got {weight.device}"
    if weight.dtype not in DTYPES:
        return f"dtype must be float32, float16 or bfloat16, got {weight.dtype}"
    if weight.dim() != 2 or weight.numel() == 0:
        return f"weight must be a matrix with elements, got shape {tuple(weight.shape)}"
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return f"the CPU must be x86-64, got {platform.machine()}"
    reason: str | None = kernel_module("machine.rows", "cpu").why_not_dtype(weight.dtype)
    return reason


def pack_int8(
    weight: Tensor, bias: Tensor | None = None, *, into: Panels | None = None
) -> tuple[Panels, float]:
    """Pack a (N, K) weight as int8 with a scale for every 64 inputs, see `int8.py`.

    Args:
        into: the panels of an earlier weight of this shape and dtype, whose memory is overwritten
            and which are returned; None makes new ones.

    Returns:
        The panels, and the relative RMS error of the weight by its rounding to int8.

    Raises:
        ValueError: the weight contains an infinity or NaN; nothing is written then.
    """
    fresh, error = int8.pack_int8(weight, bias)
    if into is None:
        return fresh, error
    into.words.copy_(fresh.words)
    plain.copy_bias(bias, into)
    return into, error


def instruction_sets() -> list[str]:
    """Return the names of this CPU's instruction sets that kernels use if they are there.

    They are "avx2", "f16c", "avx512f", "avx512bw", "avx512bf16" and "amx-tiles". Two CPUs with
    different lists may compute different bits.
    """
    found = kernel_module("machine.features", "cpu").features()
    named = ("avx2", "f16c", "avx512f", "avx512bw", "avx512bf16")
    tiles = ["amx-tiles"] if kernel_module("machine.amx", "cpu").HAS_AMX else []
    return [name for name in named if found.get(name)] + tiles


def unpack(weight: Panels) -> Tensor:
    """Return the (N, K) weight that panels were packed of; codes of narrow panels are widened."""
    if weight.is_narrow:
        return rows_of(weight, torch.arange(weight.num_outputs))
    return plain.unpack(weight)


def rows_of(weight: Panels, rows: Tensor) -> Tensor:
    """Return the rows of the weight with the given indices, widened if the panels are narrow.

    Args:
        weight: the panels of a weight (N, K).
        rows: integers (...), in [0, N).

    Returns:
        (..., K).
    """
    if not weight.is_narrow:
        return plain.rows_of(weight, rows)
    groups, places = (rows // WIDTH).unique(return_inverse=True)
    words: Tensor = kernel_module("step.widened", "cpu").launch(weight, groups)
    wide = weight._replace(words=words, num_outputs=WIDTH * len(groups), table=None)
    return plain.rows_of(wide, places * WIDTH + rows % WIDTH)


def multiply(x: Tensor, weight: Panels) -> Tensor:
    """Return x (..., K) weight^T + bias: (..., N) in the weight's dtype."""
    rows = x.reshape(x.shape[:-1].numel(), weight.num_inputs)
    if rows.shape[0] == 0:
        return x.new_empty((*x.shape[:-1], weight.num_outputs), dtype=weight.dtype)
    y: Tensor = kernel_module("step.panel_linear", "cpu").launch(rows, weight)
    return y.view(*x.shape[:-1], weight.num_outputs)
