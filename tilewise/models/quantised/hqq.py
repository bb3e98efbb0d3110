"""HQQ: integers whose zero points are floats, in groups of a row.

Source: Badri and Shaji, 2023 (half-quadratic quantisation); the layout is that of the library hqq.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tilewise.errors import CheckpointError
from tilewise.models.quantised.format import Format, Stored, packed
from tilewise.ops import QuantisedWeight

__all__ = ["hqq"]

_HALF = 128
_SMALL = ("shape", "nbits", "axis", "view_as_float")


def hqq(config: Mapping[str, Any]) -> Format:
    """Return the format of `quant_method` "hqq", 4 or 8 bits in groups of a row.

    Raises:
        CheckpointError: a scheme has other bits or groups of columns, or quantised scales or zero
            points.
    """
    told = config.get("quant_config")
    told = told if isinstance(told, Mapping) else {}
    # A scheme for all modules, or one for each kind of them.
    schemes = [told] if "weight_quant_params" in told else [*told.values()]
    bits = set()
    for scheme in schemes:
        weights = scheme.get("weight_quant_params") if isinstance(scheme, Mapping) else None
        weights = weights if isinstance(weights, Mapping) else scheme
        if not isinstance(weights, Mapping):
            raise CheckpointError(f"quant_config of HQQ must hold objects, got {weights!r}")
        for name, allowed in (("nbits", (4, 8)), ("axis", (1,))):
            if weights.get(name) is not None and weights[name] not in allowed:
                names = " or ".join(map(str, allowed))
                raise CheckpointError(f"{name} of HQQ must be {names}, got {weights[name]}")
        bits.add(weights.get("nbits", 4))
        for name in ("scale_quant_params", "zero_quant_params"):
            if isinstance(scheme, Mapping) and scheme.get(name):
                raise CheckpointError(f"{name} of HQQ must be absent, got {scheme[name]}")
    kinds = " and ".join(map(str, sorted(bits))) or "4"
    return Format(f"hqq of {kinds} bits", ("W_q",), _read, small=_SMALL)


def _number(stored: Stored, name: str, default: int) -> int:
    tensor = stored.optional(name)
    return default if tensor is None else int(tensor.item())


def _read(stored: Stored) -> QuantisedWeight:
    """Return a module's weight, 4 or 8 bits.

    The file has one group a row of W_q; of 4 bits the upper halves of bytes are the first half of
    all groups.
    """
    words, scales, zeros = (stored.tensor(name) for name in ("W_q", "scale", "zero"))
    bits, axis = _number(stored, "nbits", 4), _number(stored, "axis", 1)
    shape = tuple(stored.tensor("shape").tolist())
    for name, value, allowed in (("nbits", bits, (4, 8)), ("axis", axis, (1,))):
        if value not in allowed:
            raise stored.refuse(name, f"be {' or '.join(map(str, allowed))}", value)
    if _number(stored, "view_as_float", 0):
        words = words.view(torch.uint8)
    if words.dtype != torch.uint8 or words.dim() != 2 or len(shape) != 2:
        raise stored.refuse("W_q", "be uint8 (groups, columns)", f"{words.dtype} {words.shape}")
    rows, columns = shape
    group = words.shape[1]
    if words.numel() * (8 // bits) != rows * columns or columns % group:
        raise stored.refuse("W_q", f"hold {rows} x {columns} codes", tuple(words.shape))
    grid = (rows, columns // group)
    for name, tensor in (("scale", scales), ("zero", zeros)):
        if tensor.numel() != grid[0] * grid[1]:
            raise stored.refuse(name, f"have {grid[0] * grid[1]} numbers", tensor.numel())
    zeros = zeros.reshape(grid)
    if bits == 4:
        codes = packed(torch.cat((words >> 4, words & 15)).reshape(rows, columns))
    else:
        # Codes of 8 bits are signed here, and so are zero points.
        codes = (words.reshape(rows, columns) ^ _HALF).view(torch.int8)
        wide = zeros.float() - _HALF
        if not zeros.is_meta and not torch.equal(wide + _HALF, zeros.float()):
            raise stored.refuse("zero", "be a multiple of 2 ** -16", "smaller numbers")
        zeros = wide
    return QuantisedWeight(
        codes,
        scales.reshape(grid).contiguous(),
        (1, group),
        zeros=zeros.contiguous(),
        computed=scales.dtype,
    )
