"""backend="reference" of attention_fp8: the dequantised values in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.plan import run_once
from tilewise.kernels.spec import AttentionSpec, AttentionTensors
from tilewise.ops.reference import attention
from tilewise.reference import fp8

QUANTIZES = False


def why_not(spec: AttentionSpec) -> str | None:
    """The oracle computes every call."""
    return None


def launch_fwd(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    *,
    scales: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Return o in `dtype` and lse in float32."""
    edges = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.cu_seqlens_k)
    given = zip(tensors[:3], scales, edges, strict=True)
    q, k, v = (fp8.dequantize_heads(x, scale, cu_seqlens=cu) for x, scale, cu in given)
    own = tensors._replace(q=q, k=k, v=v)
    o, lse = run_once(attention.plan_fwd, spec._replace(dtype=torch.float64), own)
    assert o is not None
    assert lse is not None
    return o.to(dtype), lse.float()
