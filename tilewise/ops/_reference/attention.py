"""backend="reference" of attention: the oracle in float64, its gradient by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import AttentionSpec
from tilewise.reference import standard

_Tensors = dict[str, Tensor | None]


def why_not(spec: AttentionSpec) -> str | None:
    """The oracle computes every call."""
    return None


def _run(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, tensors: _Tensors
) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {
        "window": (spec.window_left, spec.window_right),
        "softmax_scale": spec.softmax_scale,
        "softcap": spec.softcap,
        "alibi_slopes": tensors["alibi_slopes"],
        "sinks": tensors["sinks"],
        "return_lse": True,
    }
    cu_seqlens_q, cu_seqlens_k = tensors["cu_seqlens_q"], tensors["cu_seqlens_k"]
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        o, lse = standard.attention_varlen(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options
        )
    else:
        o, lse = standard.attention(
            q, k, v, bias=tensors["bias"], seqlens_k=tensors["seqlens_k"], **options
        )
    return o, lse


def _float64(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or not tensor.is_floating_point():
        return tensor
    return tensor.detach().double()


def launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **tensors: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o in q's dtype and lse in float32 (float64 for float64 inputs)."""
    doubles = {name: _float64(t) for name, t in tensors.items()}
    with torch.no_grad():
        o, lse = _run(q.double(), k.double(), v.double(), spec, doubles)
    return o.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


def launch_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    **tensors: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return dq, dk, dv, dbias and dsinks, the last two None where not given."""
    doubles = {name: _float64(t) for name, t in tensors.items()}
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = list(leaves)
    for name in ("bias", "sinks"):
        leaf = doubles[name]
        if leaf is not None:
            wanted.append(leaf.requires_grad_())
    with torch.enable_grad():
        o64, lse64 = _run(leaves[0], leaves[1], leaves[2], spec, doubles)
        # A row that sees nothing has lse = -inf; its gradient is zero by definition.
        finite = lse64.isfinite()
        dlse64 = torch.zeros_like(lse64) if dlse is None else dlse.double()
        loss = (o64 * do.double()).sum() + torch.where(finite, lse64 * dlse64, 0.0).sum()
        grads = list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
    dq, dk, dv = (g.to(t.dtype) for g, t in zip(grads, (q, k, v), strict=False))
    rest = iter(grads[3:])
    bias, sinks = tensors["bias"], tensors["sinks"]
    dbias = None if bias is None else next(rest).to(bias.dtype)
    dsinks = None if sinks is None else next(rest).to(sinks.dtype)
    return dq, dk, dv, dbias, dsinks
