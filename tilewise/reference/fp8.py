"""Attention over e4m3 queries, keys and values: its definition, and a bound of its error.

    x ~ x8 * scale     one float32 scale per sequence and head, x8 in float8_e4m3fn

with amax the largest |x| of the head, scale = amax / 448 and x8 = x * (448 / amax) rounded to
nearest even, both in float32; 448 is the largest e4m3 number. A head with amax < 2 ** -100 has
scale 1. The result is attention over the numbers x8 * scale.

Queries and keys may instead have one scale for each token of a head, with amax the largest |x| of
its channels: such a scale is a factor of a row or of a column of q k^T. A scale for each token's
values would be a factor of single terms of a sum, so values have one per head.

Rotation: a head's channels may first be multiplied by diag(signs) H / sqrt(D), signs of +-1 from
a seed and H the Hadamard matrix H_ij = (-1) ** popcount(i & j). It is orthonormal, so that rotating
both keeps q . k, and it spreads an outlier of one channel over all of them.

A kernel may round P to e4m3, too. `probability_bound` bounds the error of o that follows, from the
format alone: half a unit in the last place is 2 ** -4 of a normal number and 2 ** -10 of a
subnormal.

Source: FlashAttention-3 (Shah et al. 2024), section 3.3; QuIP (Chee et al. 2023) for the rotation.
"""

from __future__ import annotations

import functools
import random
from typing import Any

import torch
from torch import Tensor

from tilewise.keywords import keywords_of
from tilewise.reference import standard

__all__ = [
    "E4M3_MAX",
    "TINIEST_AMAX",
    "attention",
    "dequantize_heads",
    "probability_bound",
    "quantize_heads",
    "quantize_tokens",
    "rotation_matrix",
]

E4M3_MAX = 448.0  # 1.75 * 2 ** 8
TINIEST_AMAX = 2.0**-100  # so that 448 / amax does not overflow float32
P_SCALE = 256.0  # the largest power of two in e4m3, by which P in [0, 1] is multiplied
_EPS_P = 2.0**-4  # half a unit in the last place of 1 + 3 bits
_STEP_P = 2.0**-10  # half the distance of subnormal e4m3 numbers


@functools.lru_cache(maxsize=64)
def _rotation_on_cpu(head_dim: int, seed: int) -> Tensor:
    if head_dim < 1 or head_dim & (head_dim - 1):
        raise ValueError(f"a rotated head dim must be a power of two, got {head_dim}")
    draw = random.Random(seed).getrandbits(head_dim)
    signs = torch.tensor([1.0 - 2.0 * (draw >> i & 1) for i in range(head_dim)])
    hadamard = torch.ones(1, 1)
    while hadamard.shape[0] < head_dim:
        top = torch.cat((hadamard, hadamard), dim=1)
        hadamard = torch.cat((top, torch.cat((hadamard, -hadamard), dim=1)))
    return signs.unsqueeze(1) * hadamard


def rotation_matrix(head_dim: int, seed: int) -> Tensor:
    """Return diag(signs) H, float32 (D, D) with entries +-1; D ** -0.5 times it is orthonormal."""
    return _rotation_on_cpu(head_dim, seed).clone()


def sequence_of_rows(cu_seqlens: Tensor, rows: int) -> Tensor:
    """Return the sequence of each row of a packed batch, (rows,); B for rows of no sequence."""
    row = torch.arange(rows, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    return torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)


def quantize_heads(
    x: Tensor,
    *,
    rotation: int | None = None,
    seqlens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (x8, scale) with x ~ x8 * scale and one scale for each sequence and head.

    Args:
        x: (B, S, H, D) float, or (T, H, D) with cu_seqlens.
        rotation: the seed of a rotation of the channels, or None; D must be a power of two.
        seqlens: (B,), the number of valid rows of each sequence; the others become 0.
        cu_seqlens: (B + 1,), the starts of the sequences and the end of the last; rows of no
            sequence become 0.

    Returns:
        x8 float8_e4m3fn like x; scale float32 (B, H).
    """
    if cu_seqlens is not None:
        x = _prepared(x[None], rotation, None)[0]
        sequence, count = sequence_of_rows(cu_seqlens, x.shape[0]), cu_seqlens.shape[0] - 1
        x = x.masked_fill((sequence == count)[:, None, None], 0.0)
        amax = x.new_zeros((count + 1, x.shape[1]))
        each = sequence[:, None].expand(x.shape[:2])
        amax.scatter_reduce_(0, each, x.abs().amax(dim=-1), "amax")
        return _rounded(x, amax[sequence]), _scale_of(amax[:count])
    x = _prepared(x, rotation, seqlens)
    empty = x.shape[1] == 0
    amax = x.new_zeros((x.shape[0], x.shape[2])) if empty else x.abs().amax(dim=(1, 3))
    return _rounded(x, amax[:, None]), _scale_of(amax)


def quantize_tokens(
    x: Tensor, *, rotation: int | None = None, seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (x8, scale) with a scale for each token of each head; see `quantize_heads`.

    Returns:
        x8 float8_e4m3fn like x; scale float32 (B, H, S), 1 for invalid rows; for a packed x (T, H,
        D) it is (1, H, T).
    """
    if x.dim() == 3:
        x8, scale = quantize_tokens(x[None], rotation=rotation)
        return x8[0], scale
    x = _prepared(x, rotation, seqlens)
    amax = x.abs().amax(dim=-1)  # (B, S, H)
    return _rounded(x, amax), _scale_of(amax).transpose(1, 2).contiguous()


def _prepared(x: Tensor, rotation: int | None, seqlens: Tensor | None) -> Tensor:
    """Return x in float32, rotated if requested, with invalid rows set to 0."""
    x = x.detach().float()
    if seqlens is not None:
        row = torch.arange(x.shape[1], device=x.device)
        beyond = row >= seqlens.to(x.device).unsqueeze(1)
        x = x.masked_fill(beyond[..., None, None], 0.0)
    if rotation is not None:
        matrix = rotation_matrix(x.shape[-1], rotation).to(x.device)
        x = (x.double() @ matrix.double()).float() * x.shape[-1] ** -0.5
    return x


def _scale_of(amax: Tensor) -> Tensor:
    # Both operands are tensors: beside a Python number torch multiplies with a reciprocal instead.
    return torch.where(amax < TINIEST_AMAX, 1.0, amax / torch.full_like(amax, E4M3_MAX))


def _rounded(x: Tensor, amax: Tensor) -> Tensor:
    """Return x (..., H, D) in e4m3, scaled so that amax, which broadcasts to (..., H), becomes
    448."""
    inverse = torch.where(amax < TINIEST_AMAX, 1.0, torch.full_like(amax, E4M3_MAX) / amax)
    # Rounding the product may exceed 448 by an ulp, and e4m3 has no infinity.
    return (x * inverse.unsqueeze(-1)).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize_heads(
    x8: Tensor,
    scale: Tensor,
    dtype: torch.dtype = torch.float64,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Return x8 * scale in `dtype`, like x8.

    Args:
        x8: (B, S, H, D), or (T, H, D) with cu_seqlens.
        scale: float32 (B, H), or per token (B, H, S) or (1, H, T).
    """
    if cu_seqlens is not None and scale.dim() == 3:
        rows = scale[0].transpose(0, 1)
    elif cu_seqlens is not None:  # rows of no sequence are never read
        rows = torch.cat((scale, scale.new_ones(1, x8.shape[1])))
        rows = rows[sequence_of_rows(cu_seqlens, x8.shape[0])]
    else:
        rows = scale[:, None] if scale.dim() == 2 else scale.transpose(1, 2)
    return x8.to(dtype) * rows.to(dtype).unsqueeze(-1)


@keywords_of(standard.attention, but=("return_lse", "return_max"))
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_scale: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Return o (B, Sq, Hq, Dv) and lse (B, Hq, Sq) of the dequantised values, in float64.

    Args:
        q, k, v: float8_e4m3fn (B, Sq, Hq, D), (B, Sk, Hk, D), (B, Sk, Hk, Dv).
        q_scale, k_scale, v_scale: float32 (B, Hq), (B, Hk), (B, Hk); per token (B, Hq, Sq) and
            (B, Hk, Sk).
        options: the keyword arguments of `standard.attention`.
    """
    wide = [dequantize_heads(*pair) for pair in ((q, q_scale), (k, k_scale), (v, v_scale))]
    o, lse = standard.attention(*wide, **options, return_lse=True)
    return o, lse


def probability_bound(p: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return bounds of the change of o = p v by rounding P to e4m3: the largest, and the root mean
    square; both (..., Sq, Dv).

    With r_ij = p_ij / max_j p_ij, the kernel rounds 256 r_ij, so p_ij moves by at most 2 ** -4 p_ij
    + 2 ** -10 / 256 max_j p_ij. Were the roundings independent and uniform, o would move by the
    root of the sum of their squares over sqrt(3).

    Args:
        p: (..., Sq, Sk) normalised probabilities in float64; v: (..., Sk, Dv).
    """
    moved = _EPS_P * p + (_STEP_P / P_SCALE) * p.amax(dim=-1, keepdim=True) * (p > 0)
    return moved @ v.abs(), ((moved.square() / 3) @ v.square()).sqrt()
