"""bitsandbytes: tables of 16 numbers with a largest value for a block, and int8 rows.

Source: Dettmers et al., 2023 (QLoRA: NF4, double quantisation) and 2022 (LLM.int8()).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewise.models.quantised.format import Format, Stored, settings
from tilewise.ops import QuantisedWeight

__all__ = ["bitsandbytes"]

_LARGEST = 127
_STATE = "weight.quant_state.bitsandbytes__"


def bitsandbytes(config: Mapping[str, Any]) -> Format:
    """Return the format of `quant_method` "bitsandbytes": int8 rows, or NF4 or FP4 blocks.

    Raises:
        CheckpointError: bnb_4bit_quant_type is another.
    """
    settings(config, bnb_4bit_quant_type=("nf4", "fp4"))
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        return Format("bitsandbytes int8", ("SCB",), _int8, ("weight_format",))
    kind = str(config.get("bnb_4bit_quant_type", "fp4"))
    extra = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map")
    return Format(
        f"bitsandbytes {kind}",
        (f"{_STATE}{kind}",),
        lambda stored: _table(stored, kind),
        extra,
        (f"{_STATE}{kind}", "weight.quant_map"),
    )


def _int8(stored: Stored) -> QuantisedWeight:
    codes, largest = stored.tensor("weight"), stored.tensor("SCB")
    if codes.dtype != torch.int8 or largest.numel() != codes.shape[0]:
        raise stored.refuse("SCB", f"have {codes.shape[0]} numbers", tuple(largest.shape))
    scales = (largest.float() / _LARGEST).reshape(-1, 1)
    return QuantisedWeight(codes, scales.contiguous(), (1, codes.shape[1]))


def _table(stored: Stored, kind: str) -> QuantisedWeight:
    state = stored.tensor(f"{_STATE}{kind}")
    codes = stored.tensor("weight").reshape(-1)
    told = json.loads(bytes(state.tolist()).decode())
    rows, columns = told["shape"]
    block = int(told["blocksize"])
    if columns % block:
        raise stored.refuse("weight", f"have a multiple of {block} columns", columns)
    absmax = stored.tensor("weight.absmax")
    if "nested_blocksize" in told:
        absmax = _nested(stored, absmax, int(told["nested_blocksize"]), told["nested_offset"])
    if absmax.numel() * block != rows * columns or codes.numel() * 2 != rows * columns:
        raise stored.refuse(
            "weight.absmax", f"have {rows * columns // block} numbers", absmax.numel()
        )
    swapped = (codes >> 4) | (codes << 4)  # the even column lies in the upper half
    table = stored.tensor("weight.quant_map").float().tolist()
    return QuantisedWeight(
        swapped.view(rows, columns // 2),
        absmax.float().view(rows, columns // block),
        (1, block),
        table=tuple(table),
    )


def _nested(stored: Stored, absmax: Tensor, block: int, offset: float) -> Tensor:
    """Return the blocks' largest values, float32, which are stored in 8 bits ("double
    quantisation").

    Args:
        absmax: the stored codes.
        stored: the tensors of the module, with the codes' table and factors.
        block: the number of codes that share a factor.
        offset: the mean that was subtracted.
    """
    table = stored.tensor("weight.nested_quant_map").float()
    factors = stored.tensor("weight.nested_absmax").float()
    wide = table[absmax.int()] * factors.repeat_interleave(block)[: absmax.numel()]
    return wide + offset
