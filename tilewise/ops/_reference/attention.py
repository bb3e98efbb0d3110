"""backend="reference" of attention: the oracle in float64, its gradient by autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.reference import dropout, standard

_Tensors = dict[str, Any]


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
        "bias": tensors["bias"],
        "return_lse": True,
    }
    shape = (spec.batch, spec.num_q_heads, spec.max_seqlen_q, spec.max_seqlen_k)
    if tensors["mask"] is not None:
        options["mask"] = visible_by_mask(tensors["mask"], spec.max_seqlen_q, spec.max_seqlen_k)
    if spec.dropout_p > 0:
        options["keep_mask"] = dropout.keep_mask(tensors["philox"], shape, spec.dropout_p)
        options["dropout_p"] = spec.dropout_threshold / 65536
    cu_seqlens_q, cu_seqlens_k = tensors["cu_seqlens_q"], tensors["cu_seqlens_k"]
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        o, lse = standard.attention_varlen(
            q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options
        )
    else:
        o, lse = standard.attention(q, k, v, seqlens_k=tensors["seqlens_k"], **options)
    return o, lse


def visible_by_mask(mask: MaskTensors, seqlen_q: int, seqlen_k: int) -> Tensor:
    """Return what a block mask lets each query see, bool (Bm, Hm, Sq, Sk)."""
    tile_q, tile_k = mask.bits.shape[1], mask.bits.shape[2] * 32
    shifts = torch.arange(32, device=mask.bits.device, dtype=torch.int32)
    bits = (mask.bits.unsqueeze(-1) >> shifts & 1).bool().flatten(2)  # (n, tile_q, tile_k)
    batch, heads, rows, _ = mask.rows.shape
    visible = bits.new_zeros(batch * heads * rows, mask.columns.shape[2], tile_q, tile_k)
    spans = mask.rows.flatten(0, 2).tolist()
    for row, (first, full_end, end) in enumerate(spans):
        columns = mask.row_entries[first:end, 0].long()
        visible[row, columns[: full_end - first]] = True
        visible[row, columns[full_end - first :]] = bits[mask.row_entries[full_end:end, 1].long()]
    whole = visible.view(batch, heads, rows, -1, tile_q, tile_k).transpose(3, 4)
    return whole.reshape(batch, heads, rows * tile_q, -1)[..., :seqlen_q, :seqlen_k]


def _float64(tensor: Any) -> Any:
    if isinstance(tensor, Tensor) and tensor.is_floating_point():
        return tensor.detach().double()
    return tensor


def launch_fwd(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, **tensors: Any
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
    **tensors: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return dq, dk, dv, dbias and dsinks, the last two None where not given."""
    doubles = {name: _float64(t) for name, t in tensors.items()}
    leaves = [t.detach().double().requires_grad_() for t in (q, k, v)]
    wanted = list(leaves)
    has_dbias, has_dsinks = spec.needs_dbias, tensors["sinks"] is not None
    for name, has_gradient in (("bias", has_dbias), ("sinks", has_dsinks)):
        if has_gradient:
            wanted.append(doubles[name].requires_grad_())
    with torch.enable_grad():
        o64, lse64 = _run(leaves[0], leaves[1], leaves[2], spec, doubles)
        # A row that sees nothing has lse = -inf; its gradient is zero by definition.
        finite = lse64.isfinite()
        dlse64 = torch.zeros_like(lse64) if dlse is None else dlse.double()
        loss = (o64 * do.double()).sum() + torch.where(finite, lse64 * dlse64, 0.0).sum()
        grads = list(torch.autograd.grad(loss, wanted, allow_unused=True, materialize_grads=True))
    dq, dk, dv = (g.to(t.dtype) for g, t in zip(grads, (q, k, v), strict=False))
    rest = iter(grads[3:])
    dbias = next(rest).to(tensors["bias"].dtype) if has_dbias else None
    dsinks = next(rest).to(tensors["sinks"].dtype) if has_dsinks else None
    return dq, dk, dv, dbias, dsinks
