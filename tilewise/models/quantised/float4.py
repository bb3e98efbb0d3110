"""NVFP4: floats of 4 bits, an e4m3 scale for 16 of them and one float32 for all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewise.models.quantised.format import Format, Stored
from tilewise.ops import E2M1, QuantisedWeight

__all__ = ["modelopt_nvfp4", "nvfp4"]

_GROUP = 16
_INPUTS = ("input_scale", "input_global_scale", "k_scale", "v_scale")


def nvfp4(stored: Stored, codes: str, whole: Tensor) -> QuantisedWeight:
    """Return a weight of e2m1 codes, two a byte with the even column low, and two levels of scales:
    weight_scale (N, K / 16) and `whole`.

    Args:
        stored: the tensors of the module.
        codes: the name of the tensor of codes.
        whole: the factor of all scales, one number.

    Raises:
        CheckpointError: a tensor has another shape or dtype.
    """
    bytes_, scales = stored.tensor(codes), stored.tensor("weight_scale")
    if bytes_.dtype != torch.uint8 or bytes_.dim() != 2:
        raise stored.refuse(codes, "be uint8 (N, K / 2)", f"{bytes_.dtype} {tuple(bytes_.shape)}")
    rows, columns = bytes_.shape[0], 2 * bytes_.shape[1]
    if columns % _GROUP or tuple(scales.shape) != (rows, columns // _GROUP):
        raise stored.refuse(
            "weight_scale", f"have shape {(rows, columns // _GROUP)}", tuple(scales.shape)
        )
    return QuantisedWeight(
        bytes_,
        scales,
        (1, _GROUP),
        table=E2M1,
        outer=whole.float().reshape(1, 1),
        outer_block=(rows, columns),
    )


def modelopt_nvfp4(config: Mapping[str, Any]) -> Format:
    """Return ModelOpt's format "NVFP4"; `config` has no further settings that count."""
    return Format(
        "modelopt nvfp4",
        ("weight_scale_2",),
        lambda stored: nvfp4(stored, "weight", stored.tensor("weight_scale_2")),
        _INPUTS,
    )
