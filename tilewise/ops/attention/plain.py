"""A plain call of attention like one before: what is known about it is not found out again.

Plain is a call of q, k and v with numbers alone: no tensor beside them, no dropout. Its checks, its
options and its backend follow from the shapes, strides, dtypes and devices of the three and from
those numbers. Where nobody watches, such a call goes straight to its kernels, and so does its
gradient; the dispatcher alone takes longer than the launch of a kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.ops.attention.arguments import Window, prepare_dense
from tilewise.ops.attention.op import (
    AttentionOptions,
    attention_bwd,
    chosen,
    make_spec,
    run_backward,
    run_forward,
)
from tilewise.ops.derivatives import are_plain, autocasts, records, unwatched
from tilewise.ops.library import where_its_tensors_are

__all__ = ["plain_attention"]

_MAX_REMEMBERED = 1024
_remembered: dict[tuple[object, ...], _Call] = {}


def plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: Window,
    softmax_scale: float | None,
    softcap: float,
    deterministic: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor] | None:
    """Return o and lse; None where somebody watches, or where the call is not a usual one.

    Raises:
        ValueError, TypeError, UnsupportedError: as `ops.attention`.
    """
    if not unwatched() or not are_plain(q, k, v) or autocasts():
        return None
    numbers = (causal, window, softmax_scale, softcap, deterministic, backend)
    key = (
        q.shape, k.shape, v.shape, q.stride(), k.stride(), v.stride(), q.dtype, k.dtype, v.dtype,
        q.device, k.device, v.device, numbers, torch.are_deterministic_algorithms_enabled(),
    )  # fmt: skip
    try:
        call = _remembered.get(key)
    except TypeError:  # a list, say
        return None
    if call is None:
        if not (q.is_cuda or q.is_cpu) or not _are_usual(causal, window, softmax_scale, softcap):
            return None
        _, _, _, options = prepare_dense(
            q, k, v, causal=causal, window=window, softmax_scale=softmax_scale,
            softcap=float(softcap), deterministic=deterministic, backend=backend,
        )  # fmt: skip
        if len(_remembered) >= _MAX_REMEMBERED:
            _remembered.clear()
        call = _remembered[key] = _Call(q, k, v, options)
    if records(q, k, v):
        results: tuple[Tensor, Tensor] = _apply(q, k, v, call)
        return results
    return call.forward(q, k, v)


def _are_usual(causal: Any, window: Any, softmax_scale: Any, softcap: Any) -> bool:
    """Whether all are numbers of Python, whose equals do the same."""
    bounds = window if isinstance(window, tuple) else (window,)
    return (
        isinstance(causal, bool)
        and all(x is None or type(x) is int for x in bounds)
        and (softmax_scale is None or type(softmax_scale) is float)
        and type(softcap) in (float, int)
    )


class _Call:
    """What follows from a key."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> None:
        self.options = options
        self._spec = make_spec(q, k, v, options)
        self._kernels = chosen(self._spec, options.backend)
        again = getattr(self._kernels, "Again", None)
        self._again = None if again is None else again(q, k, v, self._spec)
        self._anew = where_its_tensors_are(self._compute)
        self.backward = where_its_tensors_are(self._backward)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return o and lse."""
        results = None if self._again is None else self._again.forward(q, k, v)
        if results is None:
            results = self._anew(q, k, v)
        o, lse = results
        return o, lse

    def _compute(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return run_forward(q, k, v, self._spec, self._kernels)

    def _backward(
        self, do: Tensor, dlse: Tensor | None, *call: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return dq, dk and dv."""
        q, k, v, o, lse = call
        return run_backward(do, dlse, q, k, v, o, lse, self._spec, self._kernels)[:3]


class _Node(torch.autograd.Function):
    """Records the gradient of a plain call: that of the op, which computes it where it is seen."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        o, lse = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if do is None and dlse is None:
            return None, None, None, None
        q, k, v, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        tensors = (do, dlse, q, k, v, o, lse)
        given = [x for x in tensors if x is not None]
        if unwatched() and are_plain(*given) and not records(*given):
            grads = ctx.call.backward(*tensors)
        else:
            grads = attention_bwd(*tensors, False, *ctx.call.options)[:3]
        return *grads, None


# Function.apply, past what it does for torch.func: under a transform nobody comes here.
_apply: Any = super(torch.autograd.Function, _Node).apply
