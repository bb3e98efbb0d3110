"""The registered boundary of paged attention; api.py has validated what arrives here."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels.spec import PagedSpec, SharedKeys, SharedLevel
from tilewise.ops import dispatch
from tilewise.ops.library import refuse_vmap, register


class PagedOptions(NamedTuple):
    """All of a paged_attention call but q and the caches; the order is that of the op's schema."""

    block_table: Tensor
    seqlens_k: Tensor
    cu_seqlens_q: Tensor
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    k_scale: Tensor | None
    v_scale: Tensor | None
    tree_mask: Tensor | None
    shared: list[Tensor]
    shared_rows: list[int]
    max_seqlen_q: int
    window_left: int
    softmax_scale: float
    softcap: float
    batch_invariant: bool
    backend: str | None
    plan: Tensor | None = None
    plan_for: str | None = None

    def tensors(self) -> dict[str, Any]:
        """The tensors by name, as launchers take them, those of a feature only where it is used."""
        tensors: dict[str, Any] = {
            "block_table": self.block_table,
            "seqlens_k": self.seqlens_k,
            "cu_seqlens_q": self.cu_seqlens_q,
            "alibi_slopes": self.alibi_slopes,
            "sinks": self.sinks,
        }
        if self.k_scale is not None:
            tensors |= {"k_scale": self.k_scale, "v_scale": self.v_scale}
        if self.tree_mask is not None:
            tensors["tree_mask"] = self.tree_mask
        if self.shared:
            tensors["shared"] = _restore_shared(self.shared, self.shared_rows)
        if self.plan is not None and len(self.plan) > 0:
            tensors["plan"] = self.plan
        return tensors


def flatten_shared(shared: SharedKeys) -> list[Tensor]:
    """The tensors of shared prefixes as the op's schema takes them."""
    return [shared.skipped, *(tensor for level in shared.levels for tensor in level[:-1])]


def _restore_shared(tensors: list[Tensor], max_rows: list[int]) -> SharedKeys:
    levels = []
    for index, most in enumerate(max_rows):
        table, lengths, edges, rows = tensors[1 + 4 * index : 5 + 4 * index]
        levels.append(SharedLevel(table, lengths, edges, rows, most))
    return SharedKeys(tensors[0], tuple(levels))


def make_spec(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: PagedOptions) -> PagedSpec:
    """Gather what dispatch and the launchers need to know beside the tensors."""
    return PagedSpec(
        device_type=q.device.type,
        dtype=q.dtype,
        cache_dtype=k_cache.dtype,
        num_seqs=options.block_table.shape[0],
        num_tokens=q.shape[0],
        max_seqlen_q=options.max_seqlen_q,
        num_q_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        v_head_dim=v_cache.shape[3],
        block_size=k_cache.shape[1],
        max_blocks=options.block_table.shape[1],
        window_left=options.window_left,
        softmax_scale=options.softmax_scale,
        softcap=options.softcap,
        has_alibi=options.alibi_slopes is not None,
        has_sinks=options.sinks is not None,
        batch_invariant=options.batch_invariant,
        has_tree=options.tree_mask is not None,
        has_shared=len(options.shared) > 0,
    )


def calls_of_a_plan(spec: PagedSpec) -> PagedSpec:
    """What decides how keys are dealt out: all but what a logit is worth."""
    return replace(spec, softmax_scale=1.0, has_sinks=False)


@functools.lru_cache(maxsize=1024)
def describe_plan(spec: PagedSpec, backend: str) -> str:
    """Name every fact that calls of one plan have in common, in a form that a graph can hold."""
    common = calls_of_a_plan(spec)
    facts = [f"{field.name} {getattr(common, field.name)}" for field in fields(PagedSpec)]
    return "; ".join([f"backend {backend!r}", *facts])


def _check_plan(made_for: str, wanted: str) -> None:
    if made_for == wanted:
        return
    for its, mine in zip(wanted.split("; "), made_for.split("; "), strict=True):
        if its != mine:
            raise ValueError(f"plan must be for {its}, got one for {mine.split(' ', 1)[1]}")


def _paged_kernel(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *values: Any
) -> tuple[Tensor, Tensor]:
    options = PagedOptions(*values)
    spec = make_spec(q, k_cache, v_cache, options)
    name = dispatch.choose("paged_attention", spec, options.backend)
    if options.plan_for is not None:
        _check_plan(options.plan_for, describe_plan(spec, name))
    module = dispatch.kernel_module("paged_attention", name)
    o, lse = module.launch(q, k_cache, v_cache, spec, **options.tensors())
    return o.contiguous(), lse.contiguous()


def _paged_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    o = q.new_empty((*q.shape[:2], v_cache.shape[3]))
    return o, q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype)


paged_attention = register(
    "paged_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, "
    "Tensor seqlens_k, Tensor cu_seqlens_q, Tensor? alibi_slopes, Tensor? sinks, "
    "Tensor? k_scale, Tensor? v_scale, Tensor? tree_mask, Tensor[] shared, SymInt[] shared_rows, "
    "SymInt max_seqlen_q, int window_left, float softmax_scale, float softcap, "
    "bool batch_invariant, str? backend, Tensor? plan=None, str? plan_for=None) "
    "-> (Tensor, Tensor)",
    _paged_kernel,
    _paged_fake,
)
refuse_vmap("paged_attention")
