"""backend="reference" of paged attention: gather, then attend, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import PagedSpec, SharedKeys
from tilewise.reference import paged


def why_not(spec: PagedSpec) -> str | None:
    """The oracle computes every call."""
    return None


def launch(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    spec: PagedSpec,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    tree_mask: Tensor | None = None,
    shared: SharedKeys | None = None,
) -> tuple[Tensor, Tensor]:
    """Return o in q's dtype and lse in float32 (float64 for float64 queries).

    Shared prefixes change what is read, not what is computed: here every sequence reads its own.
    """
    o, lse = paged.paged_attention(
        q.double(),
        k_cache,
        v_cache,
        block_table=block_table,
        seqlens_k=seqlens_k,
        cu_seqlens_q=cu_seqlens_q,
        softmax_scale=spec.softmax_scale,
        window=None if spec.window_left < 0 else spec.window_left + 1,
        softcap=spec.softcap,
        alibi_slopes=None if alibi_slopes is None else alibi_slopes.double(),
        sinks=None if sinks is None else sinks.double(),
        k_scale=k_scale,
        v_scale=v_scale,
        tree_mask=tree_mask,
        return_lse=True,
    )
    return o.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)
