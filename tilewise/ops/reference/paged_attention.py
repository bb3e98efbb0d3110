"""backend="reference" of paged attention: gather, then attend, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.plan import Call, Results
from tilewise.kernels.spec import PagedTensors
from tilewise.kernels.tiles.paged import TileConfig
from tilewise.ops import values
from tilewise.reference import paged


def plan_fwd(call: Call) -> PagedForwardPlan:
    """Return the plan of a call; the oracle computes every call."""
    return PagedForwardPlan(call)


class PagedForwardPlan:
    """The plan of a paged call: keys are gathered by sequence, and attended by definition.

    Attributes:
        tiles: an empty table, since there are none.
        steps: the line that describes the call.
    """

    def __init__(self, call: Call) -> None:
        self.tiles: dict[str, TileConfig] = {}
        self.steps = ["gather keys, and attend in float64"]
        self._spec = call.spec

    def run(self, *tensors: Tensor | None) -> Results:
        """Return o (T, Hq, Dv) in q's dtype and lse (Hq, T) in float32 (float64 for float64 q).

        The reference reads each sequence's keys separately, also where sequences share a prefix.

        Args:
            tensors: the tensors of a call in the order of `PagedTensors`, None for an absent one.
        """
        spec = self._spec
        given, _ = PagedTensors.of(tensors, spec.shared_rows)
        q, slopes, sinks = given.q, given.alibi_slopes, given.sinks
        values.check_step(
            given.block_table,
            given.seqlens_k,
            given.cu_seqlens_q,
            q.shape[0],
            given.k_cache,
            spec.window_left,
        )
        o, lse = paged.paged_attention(
            q.double(),
            given.k_cache,
            given.v_cache,
            block_table=given.block_table,
            seqlens_k=given.seqlens_k,
            cu_seqlens_q=given.cu_seqlens_q,
            softmax_scale=spec.softmax_scale,
            window=None if spec.window_left < 0 else spec.window_left + 1,
            softcap=spec.softcap,
            alibi_slopes=None if slopes is None else slopes.double(),
            sinks=None if sinks is None else sinks.double(),
            k_scale=given.k_scale,
            v_scale=given.v_scale,
            tree_mask=given.tree_mask,
            return_lse=True,
        )
        real = torch.float64 if q.dtype == torch.float64 else torch.float32
        return o.to(q.dtype).contiguous(), lse.to(real).contiguous()
