"""torchao: integers of 4 and 8 bits and float8, whose tensors' parts are stored each by its name.

Source: torchao's layouts: Int4Tensor, Int4TilePackedTo4dTensor (the tiles of PyTorch's product of
int4), IntxUnpackedToInt8Tensor, Int8Tensor and Float8Tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import CheckpointError
from tilewise.models.quantised.format import Format, Stored, packed
from tilewise.ops import QuantisedWeight

__all__ = ["torchao"]

_CODES = "_weight_qdata"
_SIGNED = (*map(float, range(8)), *map(float, range(-8, 0)))
_CENTRED = tuple(map(float, range(-8, 8)))
_TILE = 16  # inputs of a tile
_TILES = 8  # tiles of neighbouring inputs that lie together
_ROWS = 8  # outputs of a tile
# Where the codes of a word lie: of the first tile its inputs, then those of the second.
_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


def torchao(config: Mapping[str, Any]) -> Format:
    """Return the format of `quant_method` "torchao", saved as safetensors.

    Raises:
        CheckpointError: quant_type names no configuration.
    """
    kind = config.get("quant_type")
    if isinstance(kind, Mapping):
        kind = kind.get("default")
    name = kind.get("_type") if isinstance(kind, Mapping) else kind
    if not isinstance(name, str):
        raise CheckpointError(f"quant_type of torchao must name a configuration, got {kind!r}")
    return Format(f"torchao {name}", (_CODES,), _read)


def _read(stored: Stored) -> QuantisedWeight:
    codes = stored.tensor(_CODES)
    if "_weight_act_pre_scale" in stored.names:
        raise stored.refuse("_weight_act_pre_scale", "be absent", "factors of the inputs")
    if "_weight_scale_and_zero" in stored.names:
        return _tiles(stored, codes, stored.tensor("_weight_scale_and_zero"))
    scales, zeros = stored.tensor("_weight_scale"), stored.optional("_weight_zero_point")
    if scales.dtype in (torch.float8_e8m0fnu, torch.uint8, torch.float8_e4m3fn):
        raise stored.refuse(
            "_weight_scale", "be of floats (MX and NVFP4 may be swizzled)", scales.dtype
        )
    if codes.dim() != 2 or scales.dim() != 2:
        raise stored.refuse(_CODES, "be a matrix with a matrix of scales", tuple(codes.shape))
    rows, columns = codes.shape
    # Bytes of two codes have scales and terms to add (K / group, N), all of the same floats.
    is_byte = codes.dtype in (torch.int8, torch.uint8) and scales.shape[1] == rows
    if is_byte and zeros is not None and zeros.dtype.is_floating_point:
        return _pairs(stored, codes, scales, zeros)
    if codes.dtype not in (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2):
        raise stored.refuse(_CODES, "be int8 or float8", codes.dtype)
    if rows % scales.shape[0] or columns % scales.shape[1]:
        raise stored.refuse("_weight_scale", f"divide {(rows, columns)}", tuple(scales.shape))
    return QuantisedWeight(
        codes,
        scales.contiguous(),
        (rows // scales.shape[0], columns // scales.shape[1]),
        zeros=None if zeros is None else zeros.reshape(scales.shape).contiguous(),
        computed=scales.dtype if codes.dtype == torch.int8 else torch.float32,
    )


def _pairs(stored: Stored, codes: Tensor, scales: Tensor, terms: Tensor) -> QuantisedWeight:
    """Return a weight of signed 4-bit codes, the even column in the lower half of a byte, with
    scales and terms (K / group, N) that are added."""
    rows, columns = codes.shape[0], 2 * codes.shape[1]
    if columns % scales.shape[0] or terms.shape != scales.shape:
        wanted = f"be (K / group, {rows}) of K {columns}, and _weight_zero_point likewise"
        raise stored.refuse("_weight_scale", wanted, tuple(scales.shape))
    return QuantisedWeight(
        codes.view(torch.uint8),
        scales.mT.contiguous(),
        (1, columns // scales.shape[0]),
        table=_SIGNED,
        minimums=-terms.mT.contiguous(),
    )


def _tiles(stored: Stored, words: Tensor, both: Tensor) -> QuantisedWeight:
    """Return a weight (codes - 8) * scale + term from int32 words (N / 8, K / 128, 32, 4) in tiles
    of 8 outputs by 16 inputs, 8 tiles side by side; `both` (K / group, N, 2) has the scales and
    terms.

    A word has 8 codes of one output, at _SHIFTS: the inputs 2 i, 2 i + 1, 2 i + 8 and 2 i + 9 of
    each of two tiles, for the i-th of the output's four words. Tensors of another shape raise
    CheckpointError, which `stored` makes.
    """
    if words.dtype != torch.int32 or words.dim() != 4 or words.shape[2:] != (32, _TILES // 2):
        wanted = f"be int32 (N / {_ROWS}, K / {_TILE * _TILES}, 32, {_TILES // 2})"
        raise stored.refuse(_CODES, wanted, f"{words.dtype} {tuple(words.shape)}")
    rows, columns = _ROWS * words.shape[0], _TILE * _TILES * words.shape[1]
    groups = both.shape[0]
    if both.dim() != 3 or tuple(both.shape[1:]) != (rows, 2) or columns % groups:
        wanted = f"be (K / group, {rows}, 2) of K {columns}"
        raise stored.refuse("_weight_scale_and_zero", wanted, tuple(both.shape))
    shifts = torch.tensor(_SHIFTS, dtype=torch.int32, device=words.device)
    # (outer rows, outer tiles, row, i, pair of tiles, tile of it, half, 2 i or 2 i + 1)
    codes = ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8)
    codes = codes.reshape(*words.shape[:2], _ROWS, 4, _TILES // 2, 2, 2, 2)
    # rows: outer, row; columns: outer tile, pair, tile, half, i, one of two
    plain = codes.permute(0, 2, 1, 4, 5, 6, 3, 7).reshape(rows, columns)
    scales, terms = both.unbind(-1)
    return QuantisedWeight(
        packed(plain),
        scales.mT.contiguous(),
        (1, columns // groups),
        table=_CENTRED,
        minimums=-terms.mT.contiguous(),
    )
