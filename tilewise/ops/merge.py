"""merge_states(): join attention over two disjoint sets of keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops import _checks, _dispatch
from tilewise.ops._library import register, register_gradient


def merge_states(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Join two attention results over disjoint keys into the result over their union.

    lse = log(exp(lse_a) + exp(lse_b));  o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b.
    A side with lse = -inf saw no key and adds nothing. Associative and commutative up to rounding.

    Args:
        o_a, o_b: (B, S, H, Dv) or packed (T, H, Dv), same shape and float dtype.
        lse_a, lse_b: (B, H, S) or (H, T), float32, natural log.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        o in o_a's dtype and lse in float32, shaped as the inputs; both are differentiable.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Source: FlashAttention (2022), section 3.1, the decomposition of softmax.

    Example:
        >>> o, lse = merge_states(*attention(q, k[:, :64], v[:, :64], return_lse=True),
        ...                       *attention(q, k[:, 64:], v[:, 64:], return_lse=True))
    """
    _checks.check_float("o_a", o_a)
    _checks.check_same_dtype("o_b", o_b, o_a.dtype)
    if o_a.dim() not in (3, 4):
        raise ValueError(f"o_a must be (B, S, H, Dv) or (T, H, Dv), got shape {tuple(o_a.shape)}")
    _checks.check_shape("o_b", o_b, tuple(o_a.shape))
    lse_shape = (*o_a.shape[:-3], o_a.shape[-2], o_a.shape[-3])
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be float32, got {_checks.dtype_name(tensor.dtype)}")
        _checks.check_shape(name, tensor, lse_shape)
    for name, tensor in (("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        _checks.check_device(name, tensor, o_a.device)
    _dispatch.check_backend_name(backend)
    o, lse = _merge(o_a, lse_a, o_b, lse_b, backend)
    return o, lse


def _kernel(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, backend: str | None
) -> tuple[Tensor, Tensor]:
    name = _dispatch.choose("merge", ElementSpec(o_a.device.type, o_a.dtype), backend)
    o, lse = _dispatch.kernel_module("merge", name).launch(o_a, lse_a, o_b, lse_b)
    return o.contiguous(), lse.contiguous()


def _fake(o_a: Tensor, lse_a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


_merge = register(
    "merge_states(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, str? backend) "
    "-> (Tensor, Tensor)",
    _kernel,
    _fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    o_a, lse_a, o_b, lse_b, _ = inputs
    ctx.save_for_backward(o_a, lse_a, o_b, lse_b, *output)


def _gradient(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    """With w = exp(lse_x - lse): do_x = w do, dlse_x = w (do . (o_x - o) + dlse)."""
    o_a, lse_a, o_b, lse_b, o, lse = ctx.saved_tensors
    grads: list[Tensor | None] = []
    for o_x, lse_x in ((o_a, lse_a), (o_b, lse_b)):
        # -inf - -inf is NaN: a side without keys, or a row without any, has weight 0.
        weight = torch.where(lse_x.isneginf(), 0.0, (lse_x - lse).exp())
        rows = weight.transpose(-1, -2).unsqueeze(-1)
        dot = (do.float() * (o_x.float() - o.float())).sum(-1).transpose(-1, -2)
        grads += [(rows * do).to(o_x.dtype), (weight * (dot + dlse)).to(lse_x.dtype)]
    return (*grads, None)


register_gradient("merge_states", _gradient, _save)
