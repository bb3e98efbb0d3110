"""backend="reference" of attention over a cache of latents: gather, then attend, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import PagedSpec
from tilewise.reference import mla


def why_not(spec: PagedSpec) -> str | None:
    """The oracle computes every call."""
    return None


def launch(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    spec: PagedSpec,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    latent_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o in q_latent's dtype and lse in float32 (float64 for float64 queries)."""
    o, lse = mla.mla_decode(
        q_latent.double(),
        q_rope.double(),
        latent_cache.double() if latent_scale is None else latent_cache,
        block_table=block_table,
        seqlens_k=seqlens_k,
        cu_seqlens_q=cu_seqlens_q,
        softmax_scale=spec.softmax_scale,
        latent_scale=latent_scale,
        return_lse=True,
    )
    real = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    return o.to(q_latent.dtype), lse.to(real)
