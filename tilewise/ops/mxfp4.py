"""MXFP4: 32 numbers of 4 bits (E2M1) that share a power of two (E8M0)."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.quantised_weight import E2M1, QuantisedWeight

__all__ = ["GROUP", "mxfp4_rows", "pack_mxfp4", "unpack_mxfp4"]

GROUP = 32
"""Numbers that share a scale. Source: OCP Microscaling Formats 1.0 (2023), section 5.4."""

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127


def unpack_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that blocks and scales encode.

    Args:
        blocks: uint8 (..., G, 16), two numbers a byte, the lower nibble first.
        scales: uint8 (..., G), 127 + the exponent of 2 of each group; 255 makes the whole group
            NaN.
        dtype: the dtype of the result. float64 represents all numbers; float32 and bfloat16 those
            of 2 ** -126 to below 2 ** 128: larger ones become inf, smaller ones may become 0.
            Narrower dtypes round.

    Returns:
        (..., 32 G).

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.
    """
    for name, x in (("blocks", blocks), ("scales", scales)):
        if x.dtype != torch.uint8:
            raise TypeError(f"{name} must be uint8, got {x.dtype}")
    if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != GROUP // 2:
        raise ValueError(
            f"blocks must be (..., G, 16) of scales (..., G), got shapes {tuple(blocks.shape)} "
            f"and {tuple(scales.shape)}"
        )
    wide = torch.promote_types(dtype, torch.float32)
    magnitudes = _MAGNITUDES + tuple(-m for m in _MAGNITUDES)
    table = torch.tensor(magnitudes, dtype=wide, device=blocks.device)
    # One of a byte's two numbers at a time: an index tensor is 8 times as large as its values.
    pairs = torch.stack([table[(b).int()] for b in (blocks & 15, blocks >> 4)], dim=-1)
    powers = scales.view(torch.float8_e8m0fnu).to(wide).unsqueeze(-1)
    return (pairs.flatten(-2) * powers).flatten(-2).to(dtype)


def mxfp4_rows(blocks: Tensor, scales: Tensor) -> QuantisedWeight:
    """Return MXFP4 numbers as a `QuantisedWeight` of shape (rows, 32 G).

    Args:
        blocks: uint8 (..., G, 16); the leading dims become rows.
        scales: uint8 (..., G), as of `unpack_mxfp4`.
    """
    codes = blocks.flatten(-2).flatten(0, -2)
    exponents = scales.flatten(0, -2).view(torch.float8_e8m0fnu)
    return QuantisedWeight(codes, exponents, (1, GROUP), E2M1)


def pack_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round numbers to MXFP4, each to the nearest that its group's scale allows.

    The scale is the exponent of the group's largest number minus 2, which is the exponent of 4 and
    6; numbers beyond 6 times the scale become 6 times the scale. Source: OCP Microscaling Formats
    1.0, section 6.3.

    Args:
        x: (..., 32 G), finite.

    Returns:
        blocks uint8 (..., G, 16) and scales uint8 (..., G), as `unpack_mxfp4` takes them.

    Raises:
        ValueError: the last dim is no multiple of 32.
    """
    if x.shape[-1] % GROUP:
        raise ValueError(f"x must have a multiple of {GROUP} columns, got {x.shape[-1]}")
    groups = x.float().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1)
    exponent = (torch.frexp(largest).exponent - 3).clamp(-_BIAS + 2, _BIAS)
    exponent = torch.where(largest > 0, exponent, torch.zeros_like(exponent))
    small = torch.ldexp(groups, -exponent.unsqueeze(-1))
    table = torch.tensor(_MAGNITUDES, device=x.device)
    nearest = (small.abs().unsqueeze(-1) - table).abs().argmin(-1)
    nibbles = (nearest + 8 * (small < 0)).to(torch.uint8)
    blocks = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return blocks, (exponent + _BIAS).to(torch.uint8)
