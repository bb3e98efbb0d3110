"""Attention of e4m3 tensors on any GPU: dequantised to 16 bits, then the portable kernels.

What      o = softmax(logits) v of the numbers x8 * scale, rounded to 16 bits.
Grid      that of the 16-bit kernels, see forward.py.
One call  makes 16-bit copies of q, k and v.
Traffic   that of 16-bit attention and the copies: it saves memory between calls, but no time.
Numerics  x8 * scale is rounded to the dtype of o, 2 ** -9 of its value at most; e4m3 itself has
          2 ** -4. Probabilities are 16-bit numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.plan import run_once
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, dequantised
from tilewise.kernels.triton.attention import plan as attention

__all__ = ["QUANTIZES", "launch_fwd", "why_not"]

QUANTIZES = False  # takes e4m3 tensors with their scales only


def why_not(spec: AttentionSpec) -> str | None:
    """Say why these kernels cannot run `spec`, or return None when they can."""
    return attention.why_not(spec._replace(dtype=torch.bfloat16))


def launch_fwd(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    *,
    scales: tuple[Tensor, Tensor, Tensor],
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Return o like q with Dv channels in `dtype` and lse float32 (B, Hq, Sq) or (Hq, Tq)."""
    edges = (tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.cu_seqlens_k)
    given = zip(tensors[:3], scales, edges, strict=True)
    narrow = (dequantised(x, scale, dtype, cu) for x, scale, cu in given)
    own = AttentionTensors(*narrow, *tensors[3:])
    o, lse = run_once(attention.plan_fwd, spec._replace(dtype=dtype), own)
    assert o is not None
    assert lse is not None
    return o, lse
