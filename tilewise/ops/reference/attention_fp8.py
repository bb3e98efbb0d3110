"""backend="reference" of attention_fp8: the dequantised values in float64."""

from __future__ import annotations

from typing import Any

import torch

from tilewise.kernels.plan import Call, Results, run_once
from tilewise.kernels.spec import AttentionTensors, Fp8Spec
from tilewise.ops.reference import attention
from tilewise.ops.reference.attention import OraclePlan
from tilewise.reference import fp8

QUANTIZES = False


def plan_fwd(call: Call) -> OraclePlan:
    """Return the plan of a call over e4m3 tensors; the reference refuses no call.

    Its results are o in the dtype that the spec names and lse in float32.
    """
    return OraclePlan(call.spec, _forward)


def _forward(
    spec: Fp8Spec, q_scale: Any, k_scale: Any, v_scale: Any, _: Any, *tensors: Any
) -> Results:
    own = AttentionTensors(*tensors)
    edges = (own.cu_seqlens_q, own.cu_seqlens_k, own.cu_seqlens_k)
    given = zip(own[:3], (q_scale, k_scale, v_scale), edges, strict=True)
    q, k, v = (fp8.dequantize_heads(x, scale, cu_seqlens=cu) for x, scale, cu in given)
    wide = spec.attention._replace(dtype=torch.float64)
    o, lse = run_once(attention.plan_fwd, wide, own._replace(q=q, k=k, v=v))
    assert o is not None
    assert lse is not None
    return o.to(spec.o_dtype), lse.float()
