"""backend="reference" of attention over a cache of latents: gather, then attend, in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.plan import Call, Results
from tilewise.kernels.spec import LatentTensors
from tilewise.kernels.tiles.paged import TileConfig
from tilewise.ops import values
from tilewise.reference import mla


def plan_fwd(call: Call) -> LatentForwardPlan:
    """Return the plan of a call; the oracle computes every call."""
    return LatentForwardPlan(call)


class LatentForwardPlan:
    """The plan of a call over latents: they are gathered by sequence, and attended by definition.

    Attributes:
        tiles: an empty table, since there are none.
        steps: the line that describes the call.
    """

    def __init__(self, call: Call) -> None:
        self.tiles: dict[str, TileConfig] = {}
        self.steps = ["gather latents, and attend in float64"]
        self._spec = call.spec

    def run(self, *tensors: Tensor | None) -> Results:
        """Return o in q_latent's dtype and lse in float32 (float64 for float64 queries)."""
        given = LatentTensors(*tensors)
        q_latent, cache = given.q_latent, given.latent_cache
        values.check_step(
            given.block_table, given.seqlens_k, given.cu_seqlens_q, q_latent.shape[0], cache
        )
        o, lse = mla.mla_decode(
            q_latent.double(),
            given.q_rope.double(),
            cache.double() if given.latent_scale is None else cache,
            block_table=given.block_table,
            seqlens_k=given.seqlens_k,
            cu_seqlens_q=given.cu_seqlens_q,
            softmax_scale=self._spec.softmax_scale,
            latent_scale=given.latent_scale,
            return_lse=True,
        )
        real = torch.float64 if q_latent.dtype == torch.float64 else torch.float32
        return o.to(q_latent.dtype).contiguous(), lse.to(real).contiguous()
