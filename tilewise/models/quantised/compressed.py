"""compressed-tensors: packed integers of 4 and 8 bits, int8, e4m3 and NVFP4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewise.errors import CheckpointError
from tilewise.models.quantised.float4 import nvfp4
from tilewise.models.quantised.float8 import float8
from tilewise.models.quantised.format import (
    Format,
    Stored,
    matches,
    nibbles_of,
    packed,
    reordered,
    settings,
    unpacked,
)
from tilewise.models.quantised.microscaling import MX_GROUP, microscaled
from tilewise.ops import QuantisedWeight

__all__ = ["compressed_tensors"]

_FORMATS = (
    "pack-quantized",
    "float-quantized",
    "naive-quantized",
    "int-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
    "dense",
)
_EXTRA = (
    "weight_shape",
    "input_scale",
    "input_zero_point",
    "input_global_scale",
    "k_scale",
    "v_scale",
    "output_scale",
)


def compressed_tensors(config: Mapping[str, Any]) -> Format:
    """Return the format of `quant_method` "compressed-tensors", with a scheme for each group of
    modules.

    Raises:
        CheckpointError: a group's scheme or the packing is not served.
    """
    settings(config, format=_FORMATS, quantization_status=("compressed", "frozen"))
    if config.get("sparsity_config"):
        raise CheckpointError("sparsity_config of the quantisation must be absent, got one")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise CheckpointError("config_groups of the quantisation must be an object, got none")
    schemes = []
    for name, group in groups.items():
        weights = (group or {}).get("weights") or {}
        settings(
            weights,
            type=("int", "float"),
            num_bits=(4, 8),
            strategy=("tensor", "channel", "group", "block", "tensor_group"),
        )
        if not weights:
            raise CheckpointError(f"weights of {name} of the quantisation must be given, got none")
        schemes.append((tuple((group or {}).get("targets") or ("Linear",)), weights))

    def scheme_of(module: str) -> Mapping[str, Any]:
        for targets, weights in schemes:
            if matches([t for t in targets if t != "Linear"], module):
                return weights
        for targets, weights in schemes:
            if "Linear" in targets:
                return weights
        raise CheckpointError(f"a group of the quantisation must name {module}, got none")

    def read(stored: Stored) -> QuantisedWeight:
        weights = scheme_of(stored.module)
        is_float = weights.get("type") == "float"
        if is_float and weights.get("group_size") == MX_GROUP:
            return microscaled(
                stored, "weight_packed" if "weight_packed" in stored.names else "weight"
            )
        if "weight_packed" in stored.names and is_float:
            whole = 1 / stored.tensor("weight_global_scale").float()
            return nvfp4(stored, "weight_packed", whole)
        if "weight_packed" in stored.names:
            return _packed(stored, weights)
        scales = stored.tensor("weight_scale")
        if is_float:
            return float8(stored, scales, "weight_scale", weights.get("block_structure"))
        return _integers(stored, weights)

    bits = sorted({f"{w.get('type', 'int')}{w.get('num_bits')}" for _, w in schemes})
    return Format(
        f"compressed-tensors {', '.join(bits)}", ("weight_packed", "weight_scale"), read, _EXTRA
    )


def _packed(stored: Stored, weights: Mapping[str, Any]) -> QuantisedWeight:
    """Return a weight of 4- or 8-bit integers in 32-bit words, stored as their excess over the
    smallest one."""
    bits = int(weights.get("num_bits", 4))
    words, scales = stored.tensor("weight_packed"), stored.tensor("weight_scale")
    rows, columns = words.shape[0], words.shape[1] * 32 // bits
    shape = stored.optional("weight_shape")
    if shape is not None and not shape.is_meta and tuple(shape.tolist()) != (rows, columns):
        raise stored.refuse("weight_shape", f"be {(rows, columns)}", tuple(shape.tolist()))
    block = _block(stored, weights, rows, columns, tuple(scales.shape))
    half = 1 << (bits - 1)
    zeros = stored.optional("weight_zero_point")
    if zeros is None:
        zero_codes = torch.full(scales.shape, half, dtype=torch.uint8, device=scales.device)
    else:
        zero_codes = unpacked(zeros.mT.contiguous(), bits).mT[:rows].contiguous()
    groups = stored.optional("weight_g_idx")
    if bits == 4 and groups is None:
        codes, permutation = nibbles_of(words), None
    else:
        plain, permutation = reordered(stored, unpacked(words, bits), groups, block[1])
        codes = packed(plain) if bits == 4 else (plain ^ half).view(torch.int8)
    found = zero_codes if bits == 4 else (zero_codes ^ half).view(torch.int8)
    is_plain = bits == 8 and zeros is None
    return QuantisedWeight(
        codes,
        scales.contiguous(),
        block,
        zeros=None if is_plain else found,
        permutation=permutation,
        computed=scales.dtype,
    )


def _integers(stored: Stored, weights: Mapping[str, Any]) -> QuantisedWeight:
    """Return a weight (N, K) of int8 with its scales and, if there are any, zero points."""
    codes, scales = stored.tensor("weight"), stored.tensor("weight_scale")
    if codes.dtype != torch.int8:
        raise stored.refuse("weight", "be int8", codes.dtype)
    rows, columns = codes.shape
    if scales.dim() < 2:
        scales = scales.reshape(-1, 1)
    block = _block(stored, weights, rows, columns, tuple(scales.shape))
    zeros = stored.optional("weight_zero_point")
    return QuantisedWeight(
        codes,
        scales.contiguous(),
        block,
        zeros=None if zeros is None else zeros.reshape(scales.shape).to(torch.int8),
        computed=scales.dtype,
    )


def _block(
    stored: Stored, weights: Mapping[str, Any], rows: int, columns: int, shape: tuple[int, ...]
) -> tuple[int, int]:
    """Return how many rows and columns share a scale, by the shape of the scales.

    Raises:
        CheckpointError: the scales are not one, or (rows, groups).
    """
    if shape == (1, 1):
        return rows, columns
    if len(shape) != 2 or shape[0] != rows or columns % shape[1]:
        groups = columns // int(weights.get("group_size") or columns)
        raise stored.refuse("weight_scale", f"have shape {(rows, groups)}", shape)
    return 1, columns // shape[1]
