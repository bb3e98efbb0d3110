"""Rotary position embedding: each pair of channels is a complex number, rotated by an angle.

Channel pair i of a token at position t rotates by t * base^(-2 i / R), so that the product of a
query and a key depends on the difference of their positions only.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["apply_rope", "rope_cos_sin"]


def rope_cos_sin(
    positions: Tensor, rotary_dim: int, *, base: float = 10000.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return cos and sin of the angles of each position, computed in float64.

    Args:
        positions: (...) int or float, in tokens.
        rotary_dim: R, the even number of channels that rotate.
        base: the base of the geometric series of frequencies.
        dtype: the dtype of the result.

    Returns:
        cos, sin (..., R / 2).
    """
    pair = torch.arange(rotary_dim // 2, dtype=torch.float64, device=positions.device)
    angle = positions.double().unsqueeze(-1) * base ** (-2 * pair / rotary_dim)
    return angle.cos().to(dtype), angle.sin().to(dtype)


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R channels of each head by complex multiplication; the rest are unchanged.

    (x_a + i x_b) * (cos + i sin) for each pair (a, b) of channels.

    Args:
        x: (T, H, D) or (B, S, H, D); narrow dtypes rotate in float32 and are rounded once.
        cos, sin: (T, R / 2), (S, R / 2) or (B, S, R / 2), with R <= D.
        interleaved: True to pair channels (2i, 2i + 1) instead of (i, i + R / 2).

    Returns:
        A new tensor of the shape and dtype of x.

    Source: Su et al. 2021, "RoFormer", eq. 14-15.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    half = cos.shape[-1]
    turning, passing = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    split = turning.unflatten(-1, (half, 2) if interleaved else (2, half))
    axis = -1 if interleaved else -2
    turn = torch.complex(cos.to(wide), sin.to(wide)).unsqueeze(-2)  # the same for every head
    turned = torch.complex(split.select(axis, 0), split.select(axis, 1)) * turn
    pairs = torch.stack([turned.real, turned.imag], dim=axis).flatten(-2)
    return torch.cat([pairs.to(x.dtype), passing], dim=-1)
