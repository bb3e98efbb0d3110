"""What quantises a tensor where no kernel does: torch's arithmetic of the rule, on any device."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.kernels.plan import Call, Results
from tilewise.kernels.spec import QuantizeSpec
from tilewise.ops.reference.attention import OraclePlan
from tilewise.reference import fp8


def plan_fwd(call: Call) -> OraclePlan:
    """Return the plan that quantises one tensor as the call's `QuantizeSpec` says; none is refused.

    Its results are the tensor in e4m3 and the float32 scales.
    """
    return OraclePlan(call.spec, _quantise, "quantise in float32")


def _quantise(
    spec: QuantizeSpec, x: Tensor, seqlens: Tensor | None, cu_seqlens: Tensor | None, _: Any
) -> Results:
    options: dict[str, Any] = {"rotation": spec.rotation, "seqlens": seqlens}
    if spec.per_token:
        return fp8.quantize_tokens(x, **options)
    return fp8.quantize_heads(x, cu_seqlens=cu_seqlens, **options)
