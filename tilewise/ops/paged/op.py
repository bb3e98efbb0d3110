"""The registered boundary of paged attention; api.py has validated what arrives here."""

from __future__ import annotations

import functools
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import early
from tilewise.kernels.spec import PagedSpec
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.library import refuse_vmap, register
from tilewise.ops.plans import Run, plan_once


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

    def tensors(self, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor | None, ...]:
        """All tensors, in the order in which plans take them."""
        beside: Any = self[:_TENSORS]
        return (q, k_cache, v_cache, *beside, self.plan, *self.shared)


_TENSORS = PagedOptions._fields.index("shared")


def make_spec(q: Tensor, k_cache: Tensor, v_cache: Tensor, options: PagedOptions) -> PagedSpec:
    """Gather what dispatch and the launchers need to know beside the tensors."""
    return PagedSpec(
        device_type=q.device.type,
        dtype=q.dtype,
        cache_dtype=k_cache.dtype,
        num_seqs=options.block_table.shape[0],
        num_tokens=q.shape[0],
        max_seqlen_q=min(options.max_seqlen_q, max(1, q.shape[0])),
        num_q_heads=q.shape[1],
        num_kv_heads=k_cache.shape[2],
        head_dim=q.shape[2],
        v_head_dim=v_cache.shape[3],
        block_size=k_cache.shape[1],
        max_blocks=options.block_table.shape[1],
        window_left=options.window_left,
        softmax_scale=float(options.softmax_scale),
        softcap=float(options.softcap),
        has_alibi=options.alibi_slopes is not None,
        has_sinks=options.sinks is not None,
        batch_invariant=options.batch_invariant,
        has_tree=options.tree_mask is not None,
        shared_rows=tuple(options.shared_rows),
        early=early.mode("attention"),
    )


_FACTS = [field.name for field in fields(PagedSpec)]


@functools.lru_cache(maxsize=1024)
def calls_of_a_plan(spec: PagedSpec) -> PagedSpec:
    """What decides how keys are dealt out: all but what a logit is worth."""
    return replace(
        spec, softmax_scale=1.0, has_sinks=False, shared_rows=(1,) * spec.has_shared, early=0
    )


@functools.lru_cache(maxsize=1024)
def describe_plan(spec: PagedSpec, backend: str) -> str:
    """Name every fact that calls of one plan have in common, in a form that a graph can hold."""
    common = calls_of_a_plan(spec)
    facts = [f"{name} {getattr(common, name)}" for name in _FACTS]
    return "; ".join([f"backend {backend!r}", *facts])


def _check_plan(made_for: str, wanted: str) -> None:
    if made_for == wanted:
        return
    for its, mine in zip(wanted.split("; "), made_for.split("; "), strict=True):
        if its != mine:
            raise ValueError(f"plan must be for {its}, got one for {mine.split(' ', 1)[1]}")


def runner(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, options: PagedOptions
) -> tuple[Run, tuple[Tensor | None, ...]]:
    """Return what runs a call whose arguments were checked, and the tensors that it is given.

    Raises:
        ValueError: options.plan was made for another call.
        UnsupportedError: no backend can run it, or not the one that is named.
    """
    spec, tensors = make_spec(q, k_cache, v_cache, options), options.tensors(q, k_cache, v_cache)
    name, run = plan_once("paged_attention", spec, tensors, options.backend)
    if options.plan_for is not None:
        _check_plan(options.plan_for, describe_plan(spec, name))
    return run, tensors


def _paged_kernel(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *values: Any
) -> tuple[Tensor, Tensor]:
    run, tensors = runner(q, k_cache, v_cache, PagedOptions(*values))
    results: Any = run(*tensors)
    found: tuple[Tensor, Tensor] = results
    return found


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
refuse_gradient("paged_attention")
