"""The gradient of calls of attention that nothing watches: recorded and computed past torch's
dispatcher.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.ops.attention.op import NOTHING, BoundAttention, attention_bwd
from tilewise.ops.derivatives import are_plain, places_of, records, unseen, unwatched

__all__ = ["record"]

_BIAS, _SINKS = 3, 5  # in the order of AttentionOptions


def _check_saved(bound: BoundAttention, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
    """Raise ValueError if saved_tensors_hooks gave back q, k, v or o in another shape than was
    saved."""
    found = (q.shape, k.shape, v.shape, o.shape)
    if found != bound.shapes:
        was, now = (
            ", ".join(str(tuple(shape)) for shape in each) for each in (bound.shapes, found)
        )
        raise ValueError(
            f"saved_tensors_hooks must give back q, k, v and o of shapes {was}, got {now}"
        )


class _Node(torch.autograd.Function):
    """Records the gradient of a call of attention for autograd, without the dispatcher.

    If the gradient itself is watched, the registered op's gradient is computed instead.
    """

    @staticmethod
    def forward(
        ctx: Any,
        bound: BoundAttention,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *others: Tensor | None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Run a bound call's plan, save its tensors for the backward pass, and return (o, lse).

        Args:
            ctx: autograd's context of this call, which keeps the tensors.
            bound: the bound call of attention, which has the plan.
            q, k, v: the queries, keys and values.
            others: the optional tensors of the plan in the plan's order, from cu_seqlens_q to those
                of the mask, None for an absent one. The caller leaves all of them out if all are
                None.
        """
        o, lse = bound.plan.run(q, k, v, *(others or NOTHING))
        # What save_for_backward and set_materialize_grads do, in half of their time.
        ctx.to_save = (q, k, v, o, lse, *others)
        ctx.materialize_grads = False
        ctx.bound = bound
        return o, lse  # type: ignore[return-value]

    @staticmethod
    def backward(
        ctx: Any, do: Tensor | None, dlse: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        bound: BoundAttention = ctx.bound
        if do is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        q, k, v, o, lse, *others = ctx.saved_tensors
        if not (others or dlse is not None or do is None or torch.is_grad_enabled()):
            check, run = bound.last_gradient
            if not torch.compiler.is_compiling() and check(do, o, lse, q, k, v) and unseen():
                dq, dk, dv, *_ = run(do, None, o, lse, q, k, v, *NOTHING)
                return None, dq, dk, dv
        _check_saved(bound, q, k, v, o)
        tensors = others or NOTHING
        do = torch.zeros_like(o) if do is None else do
        needs_dbias = bool(others) and ctx.needs_input_grad[4 + _BIAS]
        # What was saved is as plain as it was, unless hooks have made it anew.
        given = [x for x in (do, dlse, o, lse, *others) if x is not None]
        is_plain = unwatched() and places_of(q, k, v) != 0 and are_plain(*given)
        if is_plain and not records(q, k, v, *given):
            grads = bound.backward(do, dlse, o, lse, q, k, v, *tensors, needs_dbias=needs_dbias)
        else:
            grads = attention_bwd(do, dlse, q, k, v, o, lse, needs_dbias, *tensors, *bound.numbers)
        dq, dk, dv, dbias, dsinks = grads
        of_others: list[Tensor | None] = [None] * len(others)
        if others:
            of_others[_BIAS] = dbias if needs_dbias else None
            of_others[_SINKS] = None if tensors[_SINKS] is None else dsinks
        return None, dq, dk, dv, *of_others


# Function.apply, past what it does for torch.func: no call comes here under a transform. It takes
# a bound call and the tensors of its plan, q, k and v alone where the others are None.
record: Any = super(torch.autograd.Function, _Node).apply
