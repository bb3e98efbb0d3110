"""One attention call, dense or packed, by the CPU kernels and by autograd of the reference."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import ops
from tilewise.reference import standard
from tilewise.testing import accumulator_scales, assert_within_budget

Results = dict[str, Tensor]


def _differentiate(run: Any, tensors: Results, do: Tensor, dlse: Tensor) -> Results:
    """o, lse and the gradient of each tensor; lse of an empty row has none."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in tensors.items()}
    o, lse = run(**leaves, return_lse=True)
    finite_lse = torch.where(lse.isfinite(), lse, 0.0)
    loss = (o * do.to(o.dtype)).sum() + (finite_lse * dlse.to(lse.dtype)).sum()
    grads = torch.autograd.grad(loss, leaves.values())
    names = [f"d{name}" for name in leaves]
    return {"o": o.detach(), "lse": lse.detach(), **dict(zip(names, grads, strict=True))}


def by_kernel(tensors: Results, do: Tensor, dlse: Tensor, **options: Any) -> Results:
    """Call the CPU kernels through the public op."""
    op = ops.attention_varlen if "cu_seqlens_q" in options else ops.attention
    return _differentiate(
        lambda **leaves: op(**leaves, **options, backend="cpu"), tensors, do, dlse
    )


def by_reference(tensors: Results, do: Tensor, dlse: Tensor, **options: Any) -> Results:
    """Call the reference in the tensors' dtype; `mask` and `keep_mask` are bool tensors."""
    if "cu_seqlens_q" not in options:
        run: Any = standard.attention
    else:
        run = standard.attention_varlen
        options = {name: x for name, x in options.items() if not name.startswith("max_seqlen")}
    slopes = options.pop("alibi_slopes", None)
    if slopes is not None:
        options["alibi_slopes"] = slopes.to(torch.promote_types(do.dtype, torch.float32))
    return _differentiate(lambda **leaves: run(**leaves, **options), tensors, do, dlse)


def assert_agree(
    tensors: Results, do: Tensor, dlse: Tensor, options: dict[str, Any], reference: dict[str, Any]
) -> Results:
    """Hold the kernels to float64, by the error budget for narrower inputs; return their results.

    Args:
        options: of the public op; those in `reference` take their place for the reference.
    """
    actual = by_kernel(tensors, do, dlse, **options)
    shared = {name: x for name, x in options.items() if name not in ("mask", "seed")} | reference
    doubles = {name: tensor.double() for name, tensor in tensors.items()}
    truth = by_reference(doubles, do.double(), dlse.double(), **shared)
    q, k, v = (tensors[name] for name in "qkv")
    if q.dtype == torch.float64:
        for name, value in actual.items():
            torch.testing.assert_close(value.double(), truth[name], rtol=1e-6, atol=1e-9)
        return actual
    eager = by_reference(tensors, do.to(q.dtype), dlse, **shared)
    scales = accumulator_scales(q, k, v, do, options.get("softmax_scale") or q.shape[-1] ** -0.5)
    # A gradient that sums the ds of many rows holds as many of them.
    ds = float((do.double().norm(dim=-1).max() * v.double().norm(dim=-1).max()).item())
    scales |= {"dbias": ds, "dsinks": ds * (q.numel() // q.shape[-1] // q.shape[-2])}
    for name, value in actual.items():
        assert_within_budget(value, truth[name], eager[name], name=name, scale=scales[name])
    return actual
