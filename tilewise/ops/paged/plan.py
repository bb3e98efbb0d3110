"""PagedPlan: what a step's calls of paged attention decide once for all layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tilewise.kernels.spec import PagedSpec
from tilewise.ops import checks, dispatch
from tilewise.ops.call import Last
from tilewise.ops.step import launched


@dataclass(frozen=True, eq=False)
class PagedPlan:
    """Which keys each program of a paged attention call reads; from `plan_paged_attention`.

    Attributes:
        records: int32 (rows, 8) on the device, at an address that `update` keeps: what programs
            read, and counters of theirs; no rows where the kernels of the call decide nothing
            beforehand (long runs, and every call on a CPU). Calls of one plan share the counters
            and must follow one another, as those of one stream do.
        spec: the facts that calls must have in common with the one that the plan was made for.
        backend: the backend with kernels that read it.
        made_for: the spec and the backend in words; a call that differs from them is refused by a
            ValueError when it runs, compiled ones too.
        last: the memory of the plan's last call with ``out=``, which a call for another layer whose
            tensors lie alike repeats, past all checks and in the same buffers.
    """

    records: Tensor
    spec: PagedSpec
    backend: str
    made_for: str
    last: Last = field(default_factory=Last, init=False, repr=False)

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
        if len(self.records) > 0:
            module = dispatch.kernel_module("paged_attention", self.backend)
            launched(
                module.fill_plan,
                self.records,
                self.spec,
                checks.with_packed_rows(checks.as_int32(seqlens_k)),
                checks.with_packed_rows(checks.as_int32(cu_seqlens_q)),
            )
