"""The signature of attention over latents; checks of latents, caches and up-projections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.ops import checks, dispatch
from tilewise.ops.call import Adapter, Tensors
from tilewise.ops.latent.op import MlaOptions
from tilewise.ops.paged.arguments import QUANTISED_DTYPES


def check_latent_cache(
    latent_cache: Tensor, latent_scale: Tensor | None, width: int, what: str
) -> None:
    """Check the cache of latents, and its scales if it has 8 bits, against `width` channels.

    Args:
        width: R + Dr.
        what: the words of the message for the tensors that have R + Dr channels.

    Raises:
        ValueError, TypeError: a shape, dtype, device or stride is wrong.
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
    """Return max_seqlen_q as an int; raise unless a step's table, lengths and edges fit together.

    They must be int32 or int64 of shapes (B, max_blocks), (B,) and (B + 1,), on the device of
    `rows`. Their values are not read. The error is TypeError for a dtype, otherwise ValueError.
    """
    checks.check_dims("block_table", block_table, "(B, max_blocks)")
    num_seqs = block_table.shape[0]
    checks.check_integers("block_table", block_table, tuple(block_table.shape), rows.device)
    checks.check_integers("seqlens_k", seqlens_k, (num_seqs,), rows.device)
    checks.check_integers("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), rows.device)
    return checks.check_length("max_seqlen_q", max_seqlen_q)


class LatentSignature(NamedTuple):
    """The arguments of `mla_decode`, but for whether lse is returned."""

    q_latent: Tensor
    q_rope: Tensor
    latent_cache: Tensor
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    softmax_scale: float
    latent_scale: Tensor | None = None
    batch_invariant: bool = False
    backend: str | None = None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order in which plans take them."""
        required: Any = self[:_LONGEST]
        return (*required, self.latent_scale)

    def numbers(self) -> tuple[object, ...]:
        """Return the arguments, no tensors, that decide how the call is checked or computed."""
        return self.max_seqlen_q, self.softmax_scale, self.batch_invariant, self.backend

    def bind(self) -> MlaOptions:
        """Check the arguments and return those of the registered op.

        Raises ValueError or TypeError where one breaks a rule of `mla_decode`.
        """
        q_latent, q_rope, latent_cache = self.q_latent, self.q_rope, self.latent_cache
        checks.check_float("q_latent", q_latent)
        checks.check_dims("q_latent", q_latent, "(T, Hq, R)")
        checks.check_last_dim_contiguous("q_latent", q_latent)
        checks.check_same_dtype("q_rope", q_rope, q_latent.dtype)
        checks.check_device("q_rope", q_rope, q_latent.device)
        checks.check_dims("q_rope", q_rope, "(T, Hq, Dr)")
        checks.check_shape("q_rope", q_rope, (*q_latent.shape[:2], q_rope.shape[2]))
        checks.check_last_dim_contiguous("q_rope", q_rope)
        width = q_latent.shape[2] + q_rope.shape[2]
        what = "q_latent and q_rope together"
        check_latent_cache(latent_cache, self.latent_scale, width, what)
        checks.check_device("latent_cache", latent_cache, q_latent.device)
        step = self.block_table, self.seqlens_k, self.cu_seqlens_q
        max_seqlen_q = check_step(q_latent, *step, self.max_seqlen_q)
        checks.check_number("softmax_scale", self.softmax_scale)
        dispatch.check_backend_name(self.backend)
        read: Any = _as_kernels_read(self.tensors())
        make: Callable[..., MlaOptions] = MlaOptions
        return make(*read, max_seqlen_q, self.softmax_scale, self.batch_invariant, self.backend)

    def adapter(self) -> Adapter:
        """Return a function that makes the tensors of the registered op out of `tensors()`."""
        return _as_kernels_read


_LONGEST = LatentSignature._fields.index("max_seqlen_q")


def _as_kernels_read(tensors: Tensors) -> Tensors:
    """Return the tensors of a call with block_table, seqlens_k and cu_seqlens_q as contiguous
    int32."""
    step: Any = tensors[3:6]
    read = [checks.with_packed_rows(checks.as_int32(x)) for x in step]
    return (*tensors[:3], *read, *tensors[6:])


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
