"""The registered boundary of the ops over latents; api.py has validated what arrives here.

A latent cache is a paged cache with one key head of R + Dr channels, whose first R are the value:
specs, plans and the kernels that fill a cache are those of paged attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.plan import Results
from tilewise.kernels.spec import ElementSpec, PagedSpec
from tilewise.ops import dispatch
from tilewise.ops.call import Bound, plan_of
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.library import refuse_vmap, register
from tilewise.ops.step import launched


class MlaOptions(NamedTuple):
    """The checked arguments of an mla_decode call; the order is that of the op's schema."""

    q_latent: Tensor
    q_rope: Tensor
    latent_cache: Tensor
    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    latent_scale: Tensor | None
    max_seqlen_q: int
    softmax_scale: float
    batch_invariant: bool
    backend: str | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order in which plans take them."""
        first: Any = self[:_TENSORS]
        found: tuple[Tensor | None, ...] = first
        return found

    def spec(self) -> PagedSpec:
        """Return the hashable spec of a call: shapes, dtypes and numbers."""
        q_latent, latent_cache = self.q_latent, self.latent_cache
        return PagedSpec(
            device_type=q_latent.device.type,
            dtype=q_latent.dtype,
            cache_dtype=latent_cache.dtype,
            num_seqs=self.block_table.shape[0],
            num_tokens=q_latent.shape[0],
            max_seqlen_q=min(self.max_seqlen_q, max(1, q_latent.shape[0])),
            num_q_heads=q_latent.shape[1],
            num_kv_heads=1,
            head_dim=q_latent.shape[2] + self.q_rope.shape[2],
            v_head_dim=q_latent.shape[2],
            block_size=latent_cache.shape[1],
            max_blocks=self.block_table.shape[1],
            softmax_scale=float(self.softmax_scale),
            batch_invariant=self.batch_invariant,
        )

    def planned(self) -> Bound:
        """Return the plan of the call for `tensors()`, remembered or made now.

        Raises:
            UnsupportedError: no backend can run it, or not the one that is named.
        """
        return plan_of("mla_decode", self.spec(), self.tensors(), self.backend)

    def dispatch(self) -> Results:
        """Call the registered op and return o and lse."""
        results: tuple[Tensor, Tensor] = mla_decode(*self)
        return results


_TENSORS = MlaOptions._fields.index("max_seqlen_q")


def _decode_kernel(*values: Any) -> Results:
    options = MlaOptions(*values)
    return options.planned().run(options.tensors())


def _decode_fake(q_latent: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    num_tokens, num_q_heads = q_latent.shape[:2]
    lse_dtype = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
    lse = q_latent.new_empty((num_q_heads, num_tokens), dtype=lse_dtype)
    return q_latent.new_empty(q_latent.shape), lse


def _write_kernel(
    latent: Tensor,
    k_rope: Tensor,
    latent_cache: Tensor,
    latent_scale: Tensor | None,
    slot_mapping: Tensor,
    backend: str | None,
) -> None:
    spec = ElementSpec(latent_cache.device.type, latent_cache.dtype)
    name = dispatch.choose("cache_ops", spec, backend)
    rank = latent.shape[1]
    z_scale, rope_scale = (None, None) if latent_scale is None else latent_scale.split(1, dim=2)
    launched(
        dispatch.kernel_module("cache_ops", name).write_kv_cache,
        latent.unsqueeze(1),
        k_rope.unsqueeze(1),
        latent_cache[..., :rank].unsqueeze(2),
        latent_cache[..., rank:].unsqueeze(2),
        slot_mapping,
        k_scale=z_scale,
        v_scale=rope_scale,
    )


def _no_output(*_: Any) -> None:
    return None


mla_decode = register(
    "mla_decode(Tensor q_latent, Tensor q_rope, Tensor latent_cache, Tensor block_table, "
    "Tensor seqlens_k, Tensor cu_seqlens_q, Tensor? latent_scale, SymInt max_seqlen_q, "
    "float softmax_scale, bool batch_invariant, str? backend) -> (Tensor, Tensor)",
    _decode_kernel,
    _decode_fake,
)
refuse_gradient("mla_decode")
write_latent_cache = register(
    "write_latent_cache(Tensor latent, Tensor k_rope, Tensor(a!) latent_cache, "
    "Tensor(b!)? latent_scale, Tensor slot_mapping, str? backend) -> ()",
    _write_kernel,
    _no_output,
)
refuse_vmap("write_latent_cache")
