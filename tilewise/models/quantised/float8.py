"""Weights of e4m3: DeepSeek's and Qwen's blocks, fbgemm's rows, ModelOpt's single scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilewise.models.quantised.format import Format, Stored, settings
from tilewise.ops import QuantisedWeight

__all__ = ["fbgemm", "float8", "float8_format", "fp8", "modelopt_fp8"]

_INPUTS = ("input_scale", "activation_scale", "k_scale", "v_scale", "input_scale_ub")


def float8(
    stored: Stored, scales: Tensor, suffix: str, block: list[int] | None = None
) -> QuantisedWeight:
    """Return a weight of e4m3 or e5m2 codes and scales: one, one a row, or one a block.

    Args:
        stored: the tensors of the module.
        scales: the scales as stored; W is code * scale.
        suffix: the name of the scales' tensor, for errors.
        block: rows and columns of a block, where the file says so.

    Raises:
        CheckpointError: the codes are no matrix of float8, or there is another number of scales.
    """
    codes = stored.tensor("weight")
    if codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or codes.dim() != 2:
        raise stored.refuse("weight", "be (N, K) of float8", f"{codes.dtype} {tuple(codes.shape)}")
    rows, columns = codes.shape
    if scales.numel() == 1:
        size, grid = (rows, columns), (1, 1)
    elif scales.numel() == rows:
        size, grid = (1, columns), (rows, 1)
    elif block is not None:
        size = (block[0], block[1])
        grid = (-(-rows // block[0]), -(-columns // block[1]))
    else:
        size, grid = (rows, columns), (1, 1)
    if scales.numel() != grid[0] * grid[1]:
        raise stored.refuse(suffix, f"have {grid[0]} x {grid[1]} scales", tuple(scales.shape))
    if columns % size[1] and columns > size[1]:
        raise stored.refuse("weight", f"have a multiple of {size[1]} columns", columns)
    scales = scales.reshape(grid)
    if scales.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        scales = scales.float()
    return QuantisedWeight(codes, scales.contiguous(), size)


def fp8(config: Mapping[str, Any]) -> Format:
    """Return the format of `quant_method` "fp8", with blocks of weight_block_size or without.

    With dynamic scales of inputs and blocks of 128 x 128 the weight asks that rows be rounded, too.
    """
    settings(config, fmt=("e4m3", "float8_e4m3fn"), activation_scheme=("dynamic", "static"))
    block = config.get("weight_block_size")

    def read(stored: Stored) -> QuantisedWeight:
        suffix = "weight_scale_inv" if "weight_scale_inv" in stored.names else "weight_scale"
        weight = float8(stored, stored.tensor(suffix), suffix, block)
        return replace(weight, rounds_rows=rounds and weight.block == (128, 128))

    rounds = config.get("activation_scheme", "dynamic") == "dynamic"
    name = "fp8" if block is None else f"fp8 in blocks of {block[0]} x {block[1]}"
    return Format(name, ("weight_scale_inv", "weight_scale"), read, _INPUTS)


def float8_format(name: str, extra: tuple[str, ...] = _INPUTS) -> Format:
    """Return a format of e4m3 weights that have their scales in one tensor, weight_scale.

    Args:
        name: the name that a user sees.
        extra: the suffixes of further tensors in such files, which are not read.
    """

    def read(stored: Stored) -> QuantisedWeight:
        return float8(stored, stored.tensor("weight_scale"), "weight_scale")

    return Format(name, ("weight_scale",), read, extra)


def fbgemm(config: Mapping[str, Any]) -> Format:
    """Return the format of `quant_method` "fbgemm_fp8": a scale for each row; `config` is not
    read."""
    return float8_format("fbgemm fp8")


def modelopt_fp8(config: Mapping[str, Any]) -> Format:
    """Return ModelOpt's format "FP8": one scale for a weight; `config` is not read."""
    return float8_format("modelopt fp8")
