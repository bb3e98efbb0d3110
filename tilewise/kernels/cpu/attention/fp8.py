"""Attention of e4m3 tensors on the CPU: dequantised to float32, then the exact kernels.

What      o = softmax(logits) v of the numbers x8 * scale.
Grid      that of the float32 kernels, see plan.py.
One call  makes float32 copies of q, k and v.
Traffic   that of float32 attention and the copies: this backend is for correctness, not for speed.
Numerics  float32 throughout; probabilities are not rounded to e4m3, so o is nearer to the rule than
          a GPU's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.cpu.attention import plan as attention
from tilewise.kernels.plan import run_once
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, dequantised

__all__ = ["QUANTIZES", "launch_fwd", "why_not"]

QUANTIZES = False  # takes e4m3 tensors with their scales only


def why_not(spec: AttentionSpec) -> str | None:
    """Say why these kernels cannot run `spec`, or return None when they can."""
    return attention.why_not(spec._replace(dtype=torch.float32))


def launch_fwd(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    *,
    scales: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Return o like q with Dv channels in `dtype` and lse float32 (B, Hq, Sq) or (Hq, Tq)."""
    exact = spec._replace(dtype=torch.float32)
    edges = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.cu_seqlens_k)
    given = zip(tensors[:3], scales, edges, strict=True)
    wide = (dequantised(x, scale, exact.dtype, cu) for x, scale, cu in given)
    own = AttentionTensors(*wide, *tensors[3:])
    o, lse = run_once(attention.plan_fwd, exact, own)
    assert o is not None
    assert lse is not None
    return o.to(dtype), lse
