"""How the registered ops of attention are one another's derivatives.

    op        backward                             forward (jvp)
    fwd       bwd                                  tangent
    fwd_max   bwd                                  tangent; the maxima have no derivative
    bwd       tangent in do and dlse, else second  second + bwd(do', dlse')
    tangent   second, bwd in the direction         curve + tangent(direction')
    second    refused: a third derivative          refused
    curve     refused                              refused

o and lse, where an op takes them, get no gradient and their tangents are not used up: every formula
differentiates the whole call in q, k, v, bias and sinks, through them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.ops.attention.op import (
    BWD,
    DIRECTION,
    FWD,
    NUM_FWD_TENSORS,
    OPTIONS,
    TANGENT,
    attention_bwd,
    attention_curve,
    attention_fwd,
    attention_second,
    attention_tangent,
)
from tilewise.ops.derivatives import register_gradient, save

__all__ = ["attention_fwd"]

_Named = dict[str, Any]
_Grads = tuple[Tensor | None, ...]
_INPUTS = ("q", "k", "v", "bias", "sinks")  # what is differentiable
_BIAS = FWD.index("bias")
_SINKS = FWD.index("sinks")


def _take(named: _Named, names: tuple[str, ...]) -> list[Any]:
    return [named[name] for name in names]


def _call(named: _Named) -> list[Any]:
    return _take(named, ("q", "k", "v", "o", "lse"))


def _options(named: _Named) -> list[Any]:
    return _take(named, OPTIONS)


def _in_order(names: tuple[str, ...], grads: _Named) -> _Grads:
    """Return gradients in the order of an op's arguments, None for arguments that have none.

    Args:
        names: the names of the op's arguments, in order.
        grads: the gradients by the names of the arguments.
    """
    return tuple(grads.get(name) for name in names)


def _differentiable(named: _Named, needs_dbias: bool, grads: Any) -> _Named:
    """Return the results of attention_bwd or attention_second in a dict by the names of inputs.

    The keys are q, k, v, bias and sinks; None replaces the empty place holders of a bias without a
    gradient and of absent sinks.

    Args:
        named: the arguments of the op by name.
        needs_dbias: whether the gradient of bias was asked for.
        grads: the five results.
    """
    by_name = dict(zip(_INPUTS, grads, strict=True))
    if not needs_dbias:
        by_name["bias"] = None
    if named["sinks"] is None:
        by_name["sinks"] = None
    return by_name


def _any(values: Any) -> bool:
    return any(value is not None for value in values)


def _sum(a: Any, b: Any) -> Any:
    """Return the sum of two tuples of tensors, element by element; None counts as zeros.

    It is None if both are None.
    """
    if a is None or b is None:
        return a if b is None else b
    return tuple(x + y for x, y in zip(a, b, strict=True))


# Forward. The one that training runs: positions, not names.


def _save_forward(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    save(ctx, *inputs[:NUM_FWD_TENSORS], *output[:2])
    ctx.values = inputs[NUM_FWD_TENSORS:]
    ctx.set_materialize_grads(False)


def _forward_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> _Grads:
    grads: list[Tensor | None] = [None] * len(FWD)
    if do is None and dlse is None:
        return tuple(grads)
    *inputs, o, lse = ctx.saved_tensors
    q, k, v, *optional = inputs
    do = torch.zeros_like(o) if do is None else do
    needs_dbias = ctx.needs_input_grad[_BIAS]
    dq, dk, dv, dbias, dsinks = attention_bwd(
        do, dlse, q, k, v, o, lse, needs_dbias, *optional, *ctx.values
    )
    grads[:3] = dq, dk, dv
    if needs_dbias:
        grads[_BIAS] = dbias
    if inputs[_SINKS] is not None:
        grads[_SINKS] = dsinks
    return tuple(grads)


def _forward_jvp(ctx: Any, *dots: Tensor | None) -> tuple[Tensor, Tensor]:
    *inputs, o, lse = ctx.saved_tensors
    named = dict(zip(FWD, dots, strict=True))
    _refuse_alibi(named)
    q, k, v, *optional = inputs
    moved: tuple[Tensor, Tensor] = attention_tangent(
        q, k, v, o, lse, *_take(named, _INPUTS), *optional, *ctx.values
    )
    return moved


def _save_forward_max(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    _save_forward(ctx, inputs, output)
    ctx.mark_non_differentiable(output[2])


def _forward_max_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: Any) -> _Grads:
    return _forward_backward(ctx, do, dlse)


def _forward_max_jvp(ctx: Any, *dots: Tensor | None) -> tuple[Tensor, Tensor, None]:
    return *_forward_jvp(ctx, *dots), None


def _refuse_alibi(dots: _Named) -> None:
    if dots["alibi_slopes"] is not None:
        raise ValueError("alibi_slopes must not carry a tangent; pass a bias to move one")


# The rest, by name.


def _save_named(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
    is_tensor = [isinstance(value, Tensor) for value in inputs]
    tensors = [x if yes else None for x, yes in zip(inputs, is_tensor, strict=True)]
    save(ctx, *tensors, *output)
    ctx.rest = [None if yes else x for x, yes in zip(inputs, is_tensor, strict=True)]
    ctx.set_materialize_grads(False)


def _saved(ctx: Any, names: tuple[str, ...]) -> tuple[_Named, tuple[Tensor, ...]]:
    """Return an op's arguments, a dict by name, and the op's results, a tuple, from `_save_named`.

    Args:
        names: the names of the op's arguments, in order.
    """
    tensors = ctx.saved_tensors
    both = zip(tensors[: len(names)], ctx.rest, strict=True)
    values = [rest if tensor is None else tensor for tensor, rest in both]
    return dict(zip(names, values, strict=True)), tensors[len(names) :]


def _needs(ctx: Any, names: tuple[str, ...], wanted: tuple[str, ...]) -> list[bool]:
    return [ctx.needs_input_grad[names.index(name)] for name in wanted]


def _backward_backward(ctx: Any, *cotangents: Tensor | None) -> _Grads:
    """Return the gradients of attention_bwd's arguments, from those of its results.

    The cotangents of dq, dk, dv, dbias and dsinks are taken as a direction, along which
    attention_tangent gives the gradients of do and dlse, and attention_second the others.
    """
    if not _any(cotangents):
        return (None,) * len(BWD)
    named, _ = _saved(ctx, BWD)
    along = list(_differentiable(named, named["needs_dbias"], cotangents).values())
    call, options = _call(named), _options(named)
    o_dot, lse_dot = attention_tangent(*call, *along, *options)
    grads: _Named = {"do": o_dot, "dlse": None if named["dlse"] is None else lse_dot}
    needs = _needs(ctx, BWD, _INPUTS)
    if any(needs):
        needs_dbias = needs[_INPUTS.index("bias")]
        second = attention_second(
            named["do"], named["dlse"], *call, o_dot, lse_dot, *along, needs_dbias, *options
        )
        grads |= _differentiable(named, needs_dbias, second)
    return _in_order(BWD, grads)


def _backward_jvp(ctx: Any, *dots: Tensor | None) -> Any:
    named, results = _saved(ctx, BWD)
    moved = dict(zip(BWD, dots, strict=True))
    _refuse_alibi(moved)
    along, call, options = _take(moved, _INPUTS), _call(named), _options(named)
    total = None
    if _any(along):
        # The tangents of o and lse are what attention_tangent would compute again.
        o_dot, lse_dot = moved["o"], moved["lse"]
        if o_dot is None or lse_dot is None:
            o_dot, lse_dot = attention_tangent(*call, *along, *options)
        total = attention_second(
            named["do"],
            named["dlse"],
            *call,
            o_dot,
            lse_dot,
            *along,
            named["needs_dbias"],
            *options,
        )
    if moved["do"] is not None or moved["dlse"] is not None:
        do_dot = torch.zeros_like(named["do"]) if moved["do"] is None else moved["do"]
        total = _sum(
            total,
            attention_bwd(do_dot, moved["dlse"], *call, named["needs_dbias"], *options),
        )
    return tuple(torch.zeros_like(x) for x in results) if total is None else total


def _tangent_backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> _Grads:
    if do is None and dlse is None:
        return (None,) * len(TANGENT)
    named, (o_dot, lse_dot) = _saved(ctx, TANGENT)
    call, options, along = _call(named), _options(named), _take(named, DIRECTION)
    do = torch.zeros_like(o_dot) if do is None else do
    grads: _Named = {}
    needs = _needs(ctx, TANGENT, _INPUTS)
    if any(needs):
        needs_dbias = needs[_INPUTS.index("bias")]
        second = attention_second(do, dlse, *call, o_dot, lse_dot, *along, needs_dbias, *options)
        grads |= _differentiable(named, needs_dbias, second)
    needs = _needs(ctx, TANGENT, DIRECTION)
    if any(needs):
        needs_dbias = needs[_INPUTS.index("bias")]
        first = attention_bwd(do, dlse, *call, needs_dbias, *options)
        by_name = _differentiable(named, needs_dbias, first)
        for name, wanted in zip(_INPUTS, needs, strict=True):
            grads[f"{name}_dot"] = by_name[name] if wanted else None
    return _in_order(TANGENT, grads)


def _tangent_jvp(ctx: Any, *dots: Tensor | None) -> Any:
    named, results = _saved(ctx, TANGENT)
    moved = dict(zip(TANGENT, dots, strict=True))
    _refuse_alibi(moved)
    call, options = _call(named), _options(named)
    along, along2, faster = _take(named, DIRECTION), _take(moved, _INPUTS), _take(moved, DIRECTION)
    total = None
    if _any(along2):
        lse_dot2 = moved["lse"]
        if lse_dot2 is None:
            lse_dot2 = attention_tangent(*call, *along2, *options)[1]
        total = attention_curve(*call, results[1], lse_dot2, *along, *along2, *options)
    if _any(faster):
        total = _sum(total, attention_tangent(*call, *faster, *options))
    return tuple(torch.zeros_like(x) for x in results) if total is None else total


def _save_nothing(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.num_inputs = len(inputs)
    ctx.set_materialize_grads(False)


def _refuse_backward(ctx: Any, *grads: Tensor | None) -> _Grads:
    if _any(grads):
        raise UnsupportedError("attention must be differentiated at most twice, got a third time")
    nothing: _Grads = (None,) * ctx.num_inputs
    return nothing


def _refuse_jvp(ctx: Any, *dots: Tensor | None) -> Any:
    raise UnsupportedError("attention must be differentiated at most twice, got a third time")


register_gradient("attention_fwd", _forward_backward, _save_forward, _forward_jvp)
register_gradient("attention_fwd_max", _forward_max_backward, _save_forward_max, _forward_max_jvp)
register_gradient("attention_bwd", _backward_backward, _save_named, _backward_jvp)
register_gradient("attention_tangent", _tangent_backward, _save_named, _tangent_jvp)
register_gradient("attention_second", _refuse_backward, _save_nothing, _refuse_jvp)
register_gradient("attention_curve", _refuse_backward, _save_nothing, _refuse_jvp)
