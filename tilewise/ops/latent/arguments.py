"""From a user's arguments to the registered ops': checks of latents, caches and up-projections."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.ops import checks, dispatch
from tilewise.ops.latent.op import MlaOptions
from tilewise.ops.paged.arguments import QUANTISED_DTYPES


def check_latent_cache(
    latent_cache: Tensor, latent_scale: Tensor | None, width: int, what: str
) -> None:
    """Raise unless the cache holds rows of `width` channels, and scales if they are 8-bit ones.

    `what` says whose channels those are.
    """
    if latent_cache.dtype not in QUANTISED_DTYPES:
        checks.check_float("latent_cache", latent_cache)
    checks.check_dims("latent_cache", latent_cache, "(num_blocks, block_size, R + Dr)")
    checks.check_last_dim_contiguous("latent_cache", latent_cache)
    if latent_cache.shape[2] != width:
        raise ValueError(
            f"latent_cache must have {width} channels, those of {what}, got {latent_cache.shape[2]}"
        )
    dtype = checks.dtype_name(latent_cache.dtype)
    if latent_cache.dtype not in QUANTISED_DTYPES:
        if latent_scale is not None:
            raise ValueError(f"latent_scale must be None for a {dtype} cache, got a tensor")
        return
    if latent_scale is None:
        raise ValueError(f"latent_scale must be given for a {dtype} cache, got None")
    checks.check_same_dtype("latent_scale", latent_scale, torch.float32)
    checks.check_shape("latent_scale", latent_scale, (*latent_cache.shape[:2], 2))
    checks.check_device("latent_scale", latent_scale, latent_cache.device)
    checks.check_last_dim_contiguous("latent_scale", latent_scale)


def check_step(
    rows: Tensor,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
) -> int:
    """Return max_seqlen_q; raise unless a paged step's metadata fit and are where `rows` is."""
    checks.check_dims("block_table", block_table, "(B, max_blocks)")
    num_seqs = block_table.shape[0]
    checks.check_integers("block_table", block_table, tuple(block_table.shape), rows.device)
    checks.check_integers("seqlens_k", seqlens_k, (num_seqs,), rows.device)
    checks.check_integers("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), rows.device)
    return checks.check_length("max_seqlen_q", max_seqlen_q)


def prepare_decode(
    q_latent: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    *,
    block_table: Tensor,
    seqlens_k: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    latent_scale: Tensor | None = None,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> MlaOptions:
    """Check the arguments of `mla_decode` and put them into the registered op's order."""
    checks.check_float("q_latent", q_latent)
    checks.check_dims("q_latent", q_latent, "(T, Hq, R)")
    checks.check_last_dim_contiguous("q_latent", q_latent)
    checks.check_same_dtype("q_rope", q_rope, q_latent.dtype)
    checks.check_device("q_rope", q_rope, q_latent.device)
    checks.check_dims("q_rope", q_rope, "(T, Hq, Dr)")
    checks.check_shape("q_rope", q_rope, (*q_latent.shape[:2], q_rope.shape[2]))
    checks.check_last_dim_contiguous("q_rope", q_rope)
    width = q_latent.shape[2] + q_rope.shape[2]
    check_latent_cache(latent_cache, latent_scale, width, "q_latent and q_rope together")
    checks.check_device("latent_cache", latent_cache, q_latent.device)
    max_seqlen_q = check_step(q_latent, block_table, seqlens_k, cu_seqlens_q, max_seqlen_q)
    checks.check_number("softmax_scale", softmax_scale)
    dispatch.check_backend_name(backend)
    return MlaOptions(
        _as_kernels_read(block_table),
        _as_kernels_read(seqlens_k),
        _as_kernels_read(cu_seqlens_q),
        latent_scale,
        max_seqlen_q,
        softmax_scale,
        batch_invariant,
        backend,
    )


def as_kernels_read(tensors: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """Return the tensors of a call, in the order of its plan, as `prepare_decode` gives them on."""
    return (*tensors[:3], *map(_as_kernels_read, tensors[3:6]), *tensors[6:])


def _as_kernels_read(integers: Tensor) -> Tensor:
    return checks.with_packed_rows(checks.as_int32(integers))


def check_up_projections(q: Tensor, rank: int, rope_dim: int, w_uk: Tensor, w_uv: Tensor) -> None:
    """Raise unless w_uk (Hq, Dn, R) and w_uv (Hq, Dv, R) fit queries (..., Hq, Dn + Dr)."""
    num_q_heads, head_dim = q.shape[-2:]
    if rope_dim > head_dim:
        raise ValueError(
            f"k_rope must have at most the {head_dim} channels of q's heads, got {rope_dim}"
        )
    for name, weight in (("w_uk", w_uk), ("w_uv", w_uv)):
        checks.check_same_dtype(name, weight, q.dtype)
        checks.check_device(name, weight, q.device)
    checks.check_shape("w_uk", w_uk, (num_q_heads, head_dim - rope_dim, rank))
    checks.check_dims("w_uv", w_uv, "(Hq, Dv, R)")
    checks.check_shape("w_uv", w_uv, (num_q_heads, w_uv.shape[1], rank))
