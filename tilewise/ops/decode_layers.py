"""All layers of a Llama's decode step of a few rows in one kernel; `kernels/triton` has it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.ops.dispatch import kernel_module

if TYPE_CHECKING:
    from tilewise.kernels.triton.layers.launch import DecodeLayers

__all__ = ["new_layers", "why_not"]


def why_not(
    dtype: torch.dtype, cache_dtype: torch.dtype, at: torch.device, **shape: Any
) -> str | None:
    """Say why no kernel can compute such layers, or return None when one can.

    Args:
        dtype: of the model; cache_dtype: of its keys and values.
        at: the device of both.
        shape: the fields of `kernels.triton.layers.launch.Shape`.
    """
    if not device.has_triton():
        return "triton is not installed"
    module = kernel_module("decode_layers", "triton")
    reason: str | None = module.why_not(dtype, cache_dtype, module.Shape(**shape), at)
    return reason


def new_layers(
    layers: Sequence[tuple[Tensor | None, ...]], rows: int, **shape: Any
) -> DecodeLayers:
    """Return the layers ready to be run, see `kernels.triton.layers.launch.DecodeLayers`."""
    module = kernel_module("decode_layers", "triton")
    made: DecodeLayers = module.DecodeLayers(module.Shape(**shape), list(layers), rows)
    return made
