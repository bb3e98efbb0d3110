"""Multi-head latent attention, by the definition and with the up-projections absorbed.

Keys and values of all heads come from one latent vector a token, Z = X D_kv. Expanded, attention
runs on up-projected heads; absorbed, it runs on Z itself, with one key head that all query heads
share, so that only Z and the rotated key K_rope need a cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.reference.paged import paged_attention
from tilewise.reference.quantise import dequantise
from tilewise.reference.rope import apply_rope
from tilewise.reference.standard import attention

__all__ = [
    "MlaWeights",
    "dequantise_latents",
    "mla_absorbed",
    "mla_decode",
    "mla_expanded",
    "mla_latents",
]


@dataclass(frozen=True, slots=True)
class MlaWeights:
    """Parameters of one layer; H heads, hidden size d, ranks m (queries) and R (keys, values).

    Attributes:
        d_q: (d, m), the down-projection of queries.
        u_q: (H, m, D), the up-projection to each query head.
        v_q: (H, m, Dr), the up-projection to the rotated part of each query.
        d_kv: (d, R), the down-projection of keys and values.
        u_k: (H, R, D), the up-projection to each key head.
        u_v: (H, R, Dv), the up-projection to each value head.
        d_k: (d, Dr), the projection to the rotated key that all heads share.
        w_o: (H, Dv, d), the output projection of each head.
    """

    d_q: Tensor
    u_q: Tensor
    v_q: Tensor
    d_kv: Tensor
    u_k: Tensor
    u_v: Tensor
    d_k: Tensor
    w_o: Tensor

    @property
    def softmax_scale(self) -> float:
        """(D + Dr)**-0.5, by the width of the whole key, whether absorbed or not."""
        scale: float = (self.u_q.shape[2] + self.v_q.shape[2]) ** -0.5
        return scale


def mla_latents(
    x: Tensor, weights: MlaWeights, cos: Tensor, sin: Tensor, *, interleaved: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project hidden states down, and rotate the rotary parts.

    Args:
        x: (B, S, d), the hidden states.
        cos, sin: (S, Dr / 2) or (B, S, Dr / 2).

    Returns:
        c_q (B, S, m); q_rope (B, S, H, Dr), rotated; z (B, S, R) and k_rope (B, S, Dr), rotated.
        The cache holds the last two, R + Dr elements a token.
    """
    c_q, z = x @ weights.d_q, x @ weights.d_kv
    q_rope = torch.einsum("bsm,hmr->bshr", c_q, weights.v_q)
    q_rope = apply_rope(q_rope, cos, sin, interleaved=interleaved)
    k_rope = apply_rope((x @ weights.d_k).unsqueeze(2), cos, sin, interleaved=interleaved)
    return c_q, q_rope, z, k_rope.squeeze(2)


def mla_expanded(
    x: Tensor,
    weights: MlaWeights,
    cos: Tensor,
    sin: Tensor,
    *,
    causal: bool = True,
    interleaved: bool = False,
) -> Tensor:
    """Compute MLA by its definition: multi-head attention over up-projected keys and values.

    Q_h = [C_q U_q,h  R(C_q V_q,h)], K_h = [Z U_k,h  R(X D_k)], V_h = Z U_v,h;
    result = sum_h softmax(Q_h K_h^T / sqrt(D + Dr)) V_h W_o,h.

    Args:
        x: (B, S, d).
        cos, sin: as for `mla_latents`.

    Returns:
        (B, S, d).

    Source: Stratos, "Efficient Attention", eq. 8 and section 3.2.1; Liu et al. 2024, DeepSeek-V2.
    """
    c_q, q_rope, z, k_rope = mla_latents(x, weights, cos, sin, interleaved=interleaved)
    q = torch.cat([torch.einsum("bsm,hmd->bshd", c_q, weights.u_q), q_rope], dim=-1)
    k = torch.einsum("bsr,hrd->bshd", z, weights.u_k)
    k = torch.cat([k, k_rope.unsqueeze(2).expand(-1, -1, k.shape[2], -1)], dim=-1)
    v = torch.einsum("bsr,hrd->bshd", z, weights.u_v)
    o = attention(q, k, v, causal=causal, softmax_scale=weights.softmax_scale)
    assert isinstance(o, Tensor)
    return torch.einsum("bshd,hdn->bsn", o, weights.w_o)


def mla_absorbed(
    x: Tensor,
    weights: MlaWeights,
    cos: Tensor,
    sin: Tensor,
    *,
    causal: bool = True,
    interleaved: bool = False,
) -> Tensor:
    """Compute MLA on the latents themselves, as a decoder does.

    E_h = U_q,h U_k,h^T (m, R) and F_h = U_v,h W_o,h (R, d) are made once; then
    result = sum_h softmax((C_q E_h Z^T + R(C_q V_q,h) R(X D_k)^T) / sqrt(D + Dr)) Z F_h.
    E cannot absorb a rotation, because R depends on the position: hence the separate second term.

    Args and Returns: as for `mla_expanded`, to which it is equal.

    Source: Stratos, "Efficient Attention", section 3.2.
    """
    e = torch.einsum("hmd,hrd->hmr", weights.u_q, weights.u_k)
    f = torch.einsum("hrd,hdn->hrn", weights.u_v, weights.w_o)
    c_q, q_rope, z, k_rope = mla_latents(x, weights, cos, sin, interleaved=interleaved)
    q = torch.cat([torch.einsum("bsm,hmr->bshr", c_q, e), q_rope], dim=-1)
    k = torch.cat([z, k_rope], dim=-1).unsqueeze(2)
    o = attention(q, k, z.unsqueeze(2), causal=causal, softmax_scale=weights.softmax_scale)
    assert isinstance(o, Tensor)
    return torch.einsum("bshr,hrn->bsn", o, f)


def mla_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    softmax_scale: float,
    latent_scale: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attend from absorbed queries to a paged cache of latents, causally.

    s = softmax_scale * (q_latent . z + q_rope . k_rope); o = softmax(s) Z. It is paged attention
    with one key head [z, k_rope] whose value is its first R channels.

    Args:
        q_latent: (T, Hq, R), the queries times E.
        q_rope: (T, Hq, Dr), rotated.
        latent_cache: (N, P, R + Dr), z then rotated k_rope.
        block_table, seqlens_k, cu_seqlens_q: as for `paged.paged_attention`.
        softmax_scale: (D + Dr)**-0.5 of the heads before absorption, which latents do not show.
        latent_scale: (N, P, 2) float32, see `dequantise_latents`; None for a cache of floats.

    Returns:
        o (T, Hq, R), to be multiplied by F [, lse (Hq, T)].
    """
    rank = q_latent.shape[-1]
    if latent_scale is not None:
        latent_cache = dequantise_latents(latent_cache, latent_scale, rank, q_latent.dtype)
    return paged_attention(
        torch.cat([q_latent, q_rope], dim=-1),
        latent_cache.unsqueeze(2),
        latent_cache[..., :rank].unsqueeze(2),
        block_table=block_table,
        seqlens_k=seqlens_k,
        cu_seqlens_q=cu_seqlens_q,
        softmax_scale=softmax_scale,
        return_lse=return_lse,
    )


def dequantise_latents(
    stored: Tensor, latent_scale: Tensor, rank: int, dtype: torch.dtype
) -> Tensor:
    """Return the rows (..., R + Dr) of 8-bit latents, dequantised to `dtype`.

    The latent and the rotated key of a token have a scale each, latent_scale (..., 2): one is
    normalised and the other is not, so that one amax for both would cost the smaller its bits.

    Source: the rule is that of `quantise`.
    """
    parts = stored.split_with_sizes((rank, stored.shape[-1] - rank), dim=-1)
    return torch.cat(
        [dequantise(part, latent_scale[..., i], dtype) for i, part in enumerate(parts)], dim=-1
    )
