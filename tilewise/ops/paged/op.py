"""The registered boundary of paged attention; api.py has validated what arrives here."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.kernels import early
from tilewise.kernels.plan import Results
from tilewise.kernels.spec import PagedSpec, row_width
from tilewise.ops.call import Bound, plan_of, recall, remember
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.library import refuse_vmap, register


class PagedOptions(NamedTuple):
    """The checked arguments of a paged_attention call; the order is that of the op's schema.

    `shared` and `shared_rows` are the tensors and `max_rows` of a SharedPrefixes, empty without
    one; `plan` and `plan_for` are `records` and `made_for` of a PagedPlan.
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
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

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors, in the order in which plans take them."""
        first: Any = self[:_TENSORS]
        return (*first, self.plan, *self.shared)

    def spec(self) -> PagedSpec:
        """Return the hashable spec of a call: shapes, dtypes and numbers."""
        q, k_cache = self.q, self.k_cache
        return PagedSpec(
            device_type=q.device.type,
            dtype=q.dtype,
            cache_dtype=k_cache.dtype,
            num_seqs=self.block_table.shape[0],
            num_tokens=q.shape[0],
            max_seqlen_q=min(self.max_seqlen_q, max(1, q.shape[0])),
            num_q_heads=q.shape[1],
            num_kv_heads=k_cache.shape[2],
            head_dim=q.shape[2],
            v_head_dim=row_width(self.v_cache),
            block_size=k_cache.shape[1],
            max_blocks=self.block_table.shape[1],
            window_left=self.window_left,
            softmax_scale=float(self.softmax_scale),
            softcap=float(self.softcap),
            has_alibi=self.alibi_slopes is not None,
            has_sinks=self.sinks is not None,
            batch_invariant=self.batch_invariant,
            has_tree=self.tree_mask is not None,
            shared_rows=tuple(self.shared_rows),
            early=early.mode("attention"),
        )

    def planned(self) -> Bound:
        """Return the plan of the call for `tensors()`, remembered or made now.

        Raises:
            ValueError: the PagedPlan was made for another call.
            UnsupportedError: no backend can run it, or not the one that is named.
        """
        spec = self.spec()
        bound = plan_of("paged_attention", spec, self.tensors(), self.backend)
        if self.plan_for is not None:
            _check_plan(self.plan_for, describe_plan(spec, bound.backend))
        return bound

    def dispatch(self) -> Results:
        """Call the registered op and return o and lse."""
        results: tuple[Tensor, Tensor] = paged_attention(*self)
        return results


_TENSORS = PagedOptions._fields.index("shared")
_FACTS = [field.name for field in fields(PagedSpec)]


def calls_of_a_plan(spec: PagedSpec) -> PagedSpec:
    """Return `spec` with fixed values for the facts in which calls of one PagedPlan may differ.

    These are softmax_scale, the presence of sinks, the rows of shared prefixes, and whether kernels
    begin early.
    """
    return replace(
        spec, softmax_scale=1.0, has_sinks=False, shared_rows=(1,) * spec.has_shared, early=0
    )


def describe_plan(spec: PagedSpec, backend: str) -> str:
    """Return a text of the backend and of all facts of `spec` that calls of one PagedPlan share.

    It is `PagedPlan.made_for`: a call compares its own text with that of its plan. A compiled graph
    of torch holds the text as a constant.
    """
    key = ("what a plan is for", spec, backend)
    found: str | None = recall(key)
    if found is None:
        common = calls_of_a_plan(spec)
        facts = [f"{name} {getattr(common, name)}" for name in _FACTS]
        found = "; ".join([f"backend {backend!r}", *facts])
        remember(key, found)
    return found


def _check_plan(made_for: str, wanted: str) -> None:
    if made_for == wanted:
        return
    for its, mine in zip(wanted.split("; "), made_for.split("; "), strict=True):
        if its != mine:
            raise ValueError(f"plan must be for {its}, got one for {mine.split(' ', 1)[1]}")


def _paged_kernel(*values: Any) -> Results:
    options = PagedOptions(*values)
    return options.planned().run(options.tensors())


def _paged_fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *values: Any) -> tuple[Tensor, Tensor]:
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    o = q.new_empty((*q.shape[:2], row_width(v_cache)))
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
