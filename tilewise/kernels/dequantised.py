"""Attention of e4m3 tensors where no kernel multiplies them: dequantised, then the exact kernels.

What      o = softmax(logits) v of the numbers x8 * scale.
Grid      that of the exact kernels.
One call  makes copies of q, k and v in a wider dtype.
Traffic   that of exact attention and the copies: it saves memory between calls, but no time.
Numerics  x8 * scale is multiplied in float32 and rounded to the copies' dtype; what the exact
          kernels do with it is theirs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewise.kernels.plan import Call, Plan, Refusal, Results, contiguous
from tilewise.kernels.spec import AttentionTensors, Fp8Spec
from tilewise.kernels.tiles.paged import TileConfig

__all__ = ["DequantisedPlan"]

_QKV = 3
_SCALES_AND_ROTATION = 4  # the tensors of a call before q, see `plan.FP8_TENSORS`


class DequantisedPlan:
    """A plan of attention over e4m3 tensors: torch dequantises q, k and v to `dtype`, then the plan
    `exact` of the same attention in that dtype runs.

    Attributes:
        tiles, steps: the tiles and steps of `exact`, with the dequantising as the first step.
    """

    def __init__(self, spec: Fp8Spec, dtype: torch.dtype, exact: Plan) -> None:
        self._spec, self._dtype, self._exact = spec, dtype, exact
        name = str(dtype).removeprefix("torch.")
        self.tiles: dict[str, TileConfig] = exact.tiles
        self.steps = [f"torch: dequantise to {name}", *exact.steps]

    @classmethod
    def of(
        cls, call: Call, planner: Callable[[Call], Plan | Refusal], dtype: torch.dtype
    ) -> DequantisedPlan | Refusal:
        """Return a plan that dequantises a call's tensors to `dtype` and attends to these copies,
        or the planner's refusal.

        Args:
            call: a call of `FP8_TENSORS`.
            planner: the planner of attention over tensors of `dtype`.
            dtype: the dtype of the copies.
        """
        layouts = list(call.layouts[_SCALES_AND_ROTATION:])
        for index, layout in enumerate(layouts[:_QKV]):
            assert layout is not None
            layouts[index] = contiguous(tuple(layout.shape), dtype)
        spec: Fp8Spec = call.spec
        own = Call(spec.attention._replace(dtype=dtype), call.device, tuple(layouts))
        exact = planner(own)
        return exact if isinstance(exact, Refusal) else cls(spec, dtype, exact)

    def run(self, *tensors: Tensor | None) -> Results:
        """Return o, like q with Dv channels and in the spec's o_dtype, and lse, float32 (B, Hq, Sq)
        or packed (Hq, Tq). `tensors` are those of `FP8_TENSORS`, in this order; the rotation is not
        needed, since q and k share it."""
        scales, own = tensors[:_QKV], AttentionTensors(*tensors[_SCALES_AND_ROTATION:])
        edges = (own.cu_seqlens_q, own.cu_seqlens_k, own.cu_seqlens_k)
        given = zip(own[:_QKV], scales, edges, strict=True)
        wide = [_dequantised(x, scale, self._dtype, cu) for x, scale, cu in given]
        o, lse = self._exact.run(*wide, *own[_QKV:])[:2]
        assert o is not None
        return o.to(self._spec.o_dtype), lse


def _dequantised(
    x8: Tensor, scale: Tensor | None, dtype: torch.dtype, cu_seqlens: Tensor | None
) -> Tensor:
    """Return x8 (B, S, H, D) * scale, computed in float32 and rounded to `dtype`, contiguous and in
    the shape of x8.

    Args:
        scale: (B, H), or (B, H, S) where each token has one; of a packed x8 (T, H, D) these are
            (B, H) and (1, H, T).
        cu_seqlens: (B + 1,), where the sequences of a packed batch begin.
    """
    assert scale is not None
    scale = scale.float()
    if scale.dim() == 3:
        rows = scale.transpose(1, 2)
        rows = rows if cu_seqlens is None else rows[0]
    elif cu_seqlens is None:
        rows = scale[:, None, :]
    else:
        row = torch.arange(x8.shape[0], dtype=cu_seqlens.dtype, device=x8.device)
        sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
        rows = torch.cat((scale, scale.new_ones(1, x8.shape[1])))[sequence]
    return (x8.float() * rows.unsqueeze(-1)).to(dtype).contiguous()
