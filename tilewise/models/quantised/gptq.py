"""AWQ and GPTQ: integers in words of 32 bits, transposed, a scale and a zero point for a group.

Source: Lin et al., 2023 (AWQ); Frantar et al., 2022 (GPTQ); the layouts are those of AutoAWQ's
"gemm" and of AutoGPTQ, whose first version stores zero points less one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import CheckpointError
from tilewise.models.quantised.format import (
    Format,
    Stored,
    packed,
    reordered,
    settings,
    unpacked,
)
from tilewise.ops import QuantisedWeight

__all__ = ["auto_round", "awq", "gptq"]

# The place in a word of each of eight neighbouring outputs.
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)


def awq(config: Mapping[str, Any]) -> Format:
    """Return the format of `quant_method` "awq", in the "gemm" layout of 4 bits.

    Raises:
        CheckpointError: the bits or the layout are others.
    """
    settings(config, bits=(4,), w_bit=(4,), version=("gemm", "GEMM"))

    def in_order(words: Tensor) -> Tensor:
        codes = unpacked(words).unflatten(-1, (-1, 8))
        ordered: Tensor = codes[..., list(_AWQ_ORDER)].flatten(-2)
        return ordered

    def read(stored: Stored) -> QuantisedWeight:
        words, scales = stored.tensor("qweight"), stored.tensor("scales")
        columns, rows = words.shape[0], 8 * words.shape[1]
        group = _group(stored, scales, rows, columns)
        zeros = stored.optional("qzeros")
        return QuantisedWeight(
            packed(in_order(words).mT),
            scales.mT.contiguous(),
            (1, group),
            zeros=(
                torch.full((rows, columns // group), 8, dtype=torch.uint8, device=words.device)
                if zeros is None
                else in_order(zeros).mT.contiguous()
            ),
            computed=scales.dtype,
        )

    return Format("awq", ("qweight",), read)


def gptq(config: Mapping[str, Any]) -> Format:
    """Return the format of `quant_method` "gptq", 4 or 8 bits, of both versions, with or without
    g_idx.

    Raises:
        CheckpointError: the bits or the version are others.
    """
    settings(config, bits=(4, 8), checkpoint_format=("gptq", "gptq_v2", ""))
    bits = int(config.get("bits", 4))
    excess = 0 if config.get("checkpoint_format") == "gptq_v2" else 1
    return _gptq("gptq", bits, excess)


def _gptq(name: str, bits: int, excess: int) -> Format:
    per_word = 32 // bits

    def read(stored: Stored) -> QuantisedWeight:
        words, scales = stored.tensor("qweight"), stored.tensor("scales")
        columns, rows = per_word * words.shape[0], words.shape[1]
        group = _group(stored, scales, rows, columns)
        codes = unpacked(words.mT.contiguous(), bits)  # (N, K)
        zeros = unpacked(stored.tensor("qzeros"), bits)[:, :rows].mT.contiguous()
        groups = stored.optional("g_idx")
        codes, permutation = reordered(stored, codes, groups, group)
        if bits == 4:
            narrow, zero = packed(codes), zeros + excess
        else:
            # Codes of 8 bits are signed here, and so are their zero points, as small floats.
            narrow = (codes ^ 128).view(torch.int8)
            zero = (zeros.to(torch.int16) + (excess - 128)).to(torch.float16)
        return QuantisedWeight(
            narrow,
            scales.mT.contiguous(),
            (1, group),
            zeros=zero,
            permutation=permutation,
            computed=scales.dtype,
        )

    return Format(name, ("qweight",), read)


def auto_round(config: Mapping[str, Any]) -> Format:
    """Return the format of `quant_method` "auto-round", in GPTQ's or AWQ's packing.

    Raises:
        CheckpointError: the packing or the bits are others.
    """
    packing = str(config.get("packing_format", "auto_round:auto_gptq"))
    if packing.endswith("awq"):
        return awq(config)
    if not packing.endswith("gptq"):
        raise CheckpointError(
            f"packing_format of the quantisation must end with gptq or awq, got {packing}"
        )
    settings(config, bits=(4, 8))
    return _gptq("auto-round", int(config.get("bits", 4)), 1)


def _group(stored: Stored, scales: Tensor, rows: int, columns: int) -> int:
    """Return how many columns share a scale, from the shape (K / group, N) of the scales.

    Raises:
        CheckpointError: the scales have another shape.
    """
    if scales.dim() != 2 or scales.shape[1] != rows or columns % scales.shape[0]:
        raise stored.refuse("scales", f"be (K / group, {rows}) of K {columns}", tuple(scales.shape))
    return columns // scales.shape[0]
