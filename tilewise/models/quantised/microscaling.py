"""MXFP4 and MXFP8: floats of 4 or 8 bits, and a power of two for 32 neighbours of a row.

Source: OCP Microscaling Formats 1.0, 2023; compressed-tensors' "mxfp4-pack-quantized" and
"mxfp8-quantized", and AMD's Quark, lay them out alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewise.errors import CheckpointError
from tilewise.models.quantised.float8 import float8_format
from tilewise.models.quantised.format import Format, Stored, settings
from tilewise.ops import E2M1, QuantisedWeight

__all__ = ["MX_GROUP", "microscaled", "modelopt_mxfp8", "quark"]

MX_GROUP = 32
"""Columns that share a power of two."""
_EXTRA = (
    "input_scale",
    "output_scale",
    "input_zero_point",
    "weight_zero_point",
    "k_scale",
    "v_scale",
)


def microscaled(stored: Stored, codes: str) -> QuantisedWeight:
    """Return a weight of e2m1 codes, two a byte with the even column low, or of float8, with scales
    of 32 columns.

    Args:
        stored: the module, whose weight_scale (N, K / 32) is of e8m0, often as uint8.
        codes: the name of the tensor of codes.

    Raises:
        CheckpointError: a tensor has another shape or dtype.
    """
    values, scales = stored.tensor(codes), stored.tensor("weight_scale")
    is_packed = values.dtype == torch.uint8
    if values.dim() != 2 or not (
        is_packed or values.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    ):
        got = f"{values.dtype} {tuple(values.shape)}"
        raise stored.refuse(codes, "be uint8 (N, K / 2) or (N, K) of float8", got)
    rows, columns = values.shape[0], values.shape[1] * (2 if is_packed else 1)
    if columns % MX_GROUP or tuple(scales.shape) != (rows, columns // MX_GROUP):
        raise stored.refuse(
            "weight_scale", f"have shape {(rows, columns // MX_GROUP)}", tuple(scales.shape)
        )
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        raise stored.refuse("weight_scale", "be uint8 or float8_e8m0fnu", scales.dtype)
    return QuantisedWeight(
        values,
        scales.view(torch.float8_e8m0fnu),
        (1, MX_GROUP),
        table=E2M1 if is_packed else None,
    )


def quark(config: Mapping[str, Any]) -> Format:
    """Return the format of `quant_method` "quark".

    Served are MXFP4, and e4m3 with one scale for a weight or for each row.

    Raises:
        CheckpointError: the scheme is another, or differs between modules.
    """
    whole = config.get("global_quant_config")
    weight = whole.get("weight") if isinstance(whole, Mapping) else None
    if isinstance(weight, list):
        weight = weight[0] if len(weight) == 1 else None
    if not isinstance(weight, Mapping):
        raise CheckpointError(
            "global_quant_config of Quark must hold the weight's scheme, got none or several"
        )
    for name in ("layer_type_quant_config", "layer_quant_config"):
        if config.get(name):
            raise CheckpointError(f"{name} of Quark must be empty, got {config[name]}")
    settings(weight, dtype=("fp4", "fp8_e4m3"), symmetric=(True,))
    if weight.get("dtype") == "fp4":
        settings(weight, qscheme=("per_group",), group_size=(MX_GROUP,), scale_format=("e8m0",))
        return Format(
            "quark mxfp4", ("weight_scale",), lambda stored: microscaled(stored, "weight"), _EXTRA
        )
    settings(weight, qscheme=("per_tensor", "per_channel"))
    return float8_format("quark fp8", _EXTRA)


def modelopt_mxfp8(config: Mapping[str, Any]) -> Format:
    """Return ModelOpt's format "MXFP8"; `config` is not read."""
    return Format(
        "modelopt mxfp8", ("weight_scale",), lambda stored: microscaled(stored, "weight"), _EXTRA
    )
