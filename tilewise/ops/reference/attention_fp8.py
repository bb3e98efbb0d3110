"""backend="reference" of attention_fp8: the dequantised values in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.kernels.spec import AttentionSpec
from tilewise.reference import fp8

QUANTIZES = False


def why_not(spec: AttentionSpec) -> str | None:
    """The oracle computes every call."""
    return None


def launch_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    *,
    scales: tuple[Tensor, Tensor, Tensor],
    seqlens_k: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Return o in `dtype` and lse in float32."""
    with torch.no_grad():
        o, lse = fp8.attention(
            q,
            k,
            v,
            *scales,
            window=(spec.window_left, spec.window_right),
            softmax_scale=spec.softmax_scale,
            softcap=spec.softcap,
            seqlens_k=seqlens_k,
        )
    return o.to(dtype), lse.float()
