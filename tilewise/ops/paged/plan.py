"""plan_paged_attention(): what a step's calls of paged attention can decide once for all layers."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.plan import Call, device_of
from tilewise.kernels.spec import PagedSpec
from tilewise.keywords import keywords_of, unknown_keyword
from tilewise.ops import checks, dispatch
from tilewise.ops.paged.arguments import prepare_paged
from tilewise.ops.paged.op import calls_of_a_plan, describe_plan, make_spec
from tilewise.ops.paged.repeated import Repeated


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """Which keys each program of a paged attention call reads; from `plan_paged_attention`.

    Attributes:
        records: int32 (rows, 8) on the device, at an address that `update` keeps: what programs
            read, and counters of theirs; no rows where the kernels of the call decide nothing
            beforehand (long runs, and every call on a CPU). Calls of one plan share the counters
            and must follow one another, as those of one stream do.
        spec: what the calls must have in common with the one it was made for.
        backend: whose kernels read it.
        made_for: both in words; a call that differs is refused when it runs, compiled ones too.
        repeated: its last call with `out`, for `repeat`.
    """

    records: Tensor
    spec: PagedSpec
    backend: str
    made_for: str
    repeated: Repeated = field(default_factory=Repeated, init=False, repr=False)

    def update(self, seqlens_k: Tensor, cu_seqlens_q: Tensor) -> None:
        """Write the plan of other lengths in place, so that captured CUDA graphs follow them.

        A graph reads the plan and does not hold it: keep the plan for as long as its graphs.

        Args:
            seqlens_k, cu_seqlens_q: (B,) and (B + 1,), as in `paged_attention`, for as many
                sequences and runs no longer than those that the plan was made for. On the device;
                nothing waits for them.
        """
        num_seqs, where = self.spec.num_seqs, self.records.device
        checks.check_integers("seqlens_k", seqlens_k, (num_seqs,), where)
        checks.check_integers("cu_seqlens_q", cu_seqlens_q, (num_seqs + 1,), where)
        self.repeated.forget()  # it may read other lengths
        if len(self.records) > 0:
            module = dispatch.kernel_module("paged_attention", self.backend)
            module.fill_plan(
                self.records,
                self.spec,
                checks.with_packed_rows(checks.as_int32(seqlens_k)),
                checks.with_packed_rows(checks.as_int32(cu_seqlens_q)),
            )

    def repeat(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        softmax_scale: float | None = None,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
        out: Tensor,
    ) -> bool:
        """Run the last call of `paged_attention` with this plan and ``out=`` for another layer.

        All other arguments are as they were in that call, the same tensors among them. It saves
        most of what a call costs the host, on a GPU; the results are the same.

        Args:
            q, k_cache, v_cache, softmax_scale, sinks, k_scale, v_scale, out: as in
                `paged_attention`.

        Returns:
            Whether it has run. It has not where these tensors do not lie as those of that call, or
            for any other reason: then call `paged_attention`.
        """
        return self.repeated.run((q, k_cache, v_cache, sinks, k_scale, v_scale), softmax_scale, out)


@keywords_of(prepare_paged)
def plan_paged_attention(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, return_lse: bool = False, **options: Any
) -> PagedPlan:
    """Decide once for all layers of a step which program reads which keys.

    Calls of `paged_attention` with ``plan=`` skip what they would else find out from all lengths,
    each for itself. The result is the same up to the rounding of how keys are split; with
    batch_invariant, and on a CPU, bit for bit. No synchronisation: the plan is made on the device
    from the lengths there, and `PagedPlan.update` makes it anew for the next step. Compiled code
    takes a plan; make and update it outside.

    Args:
        q, k_cache, v_cache: as in `paged_attention`; only shapes, dtypes and the device matter.
        options: as in `paged_attention`, those of the calls to come. softmax_scale, sinks and
            return_lse may differ from call to call; block_table may hold other blocks.

    Returns:
        A plan for calls of these shapes, windows, caps and backend.

    Raises:
        ValueError, TypeError, UnsupportedError: as `paged_attention` with these arguments.

    Example:
        >>> plan = plan_paged_attention(q, *caches[0], block_table=table, seqlens_k=lengths,
        ...                             cu_seqlens_q=starts, max_seqlen_q=1)
        >>> for k_cache, v_cache in caches:
        ...     o = paged_attention(q, k_cache, v_cache, block_table=table, seqlens_k=lengths,
        ...                         cu_seqlens_q=starts, max_seqlen_q=1, plan=plan)
    """
    del return_lse
    if unknown := options.keys() - _OPTIONS:
        raise unknown_keyword(plan_paged_attention, unknown)
    prepared = prepare_paged(q, k_cache, v_cache, **options)
    spec, tensors = make_spec(q, k_cache, v_cache, prepared), prepared.tensors(q, k_cache, v_cache)
    with device_of(q.device):
        call = Call.of(spec, tensors)
        backend = dispatch.choose_for("paged_attention", call, prepared.backend)
    module = dispatch.kernel_module("paged_attention", backend)
    pairs = module.plan_pairs(spec, q.device) if hasattr(module, "plan_pairs") else 0
    records = torch.zeros((pairs, 8), dtype=torch.int32, device=q.device)
    plan = PagedPlan(records, calls_of_a_plan(spec), backend, describe_plan(spec, backend))
    plan.update(prepared.seqlens_k, prepared.cu_seqlens_q)
    return plan


_OPTIONS = inspect.signature(plan_paged_attention).parameters.keys()
