"""The registered boundary of gated_delta and ssd, which are one recurrence with and without the
correction of the delta rule.

    recurrence(q, k, v, g, beta, initial_state, cu_seqlens, *options) -> (o, state after each
        sequence)
    recurrence_bwd(do, dstate, *the arguments of recurrence) -> gradients of its first six
    recurrence_step(q, k, v, g, beta, *states, slots, starts, cu_seqlens, *options) -> o

The public functions have validated. Gradients belong to no backend: a GPU's kernels compute them
where each head has a decay, else chunks of torch, see chunks.py.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import RecurrentSpec, RecurrentStates
from tilewise.ops import dispatch
from tilewise.ops.derivatives import refuse_gradient, register_gradient, save
from tilewise.ops.library import refuse_vmap, register, register_vmap
from tilewise.ops.recurrent import chunks
from tilewise.ops.step import launched


def _module(k: Tensor, v: Tensor, g: Tensor, keeps: str | None, backend: str | None) -> ModuleType:
    spec = RecurrentSpec(
        v.device.type, v.dtype, k.shape[-1], v.shape[-1], g.dim() == k.dim(), keeps
    )
    return dispatch.kernel_module("recurrence", dispatch.choose("recurrence", spec, backend))


def _edges(v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the first row of each sequence, and the end of the last, int32 (N + 1,).

    It is cu_seqlens if given; of dense v (B, S, ...) the edges are those of its rows laid end to
    end.
    """
    if cu_seqlens is not None:
        return cu_seqlens
    batch, seqlen = v.shape[:2]
    return torch.arange(batch + 1, dtype=torch.int32, device=v.device) * seqlen


def _packed(x: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return x (B, S, ...) as packed rows (T, ...); with cu_seqlens it is packed already."""
    return x if cu_seqlens is not None else x.flatten(0, 1)


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    q_scale: float,
    is_delta: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    module, edges = _module(k, v, g, None, backend), _edges(v, cu_seqlens)
    rows = [_packed(x, cu_seqlens) for x in (q, k, v, g, beta)]
    options = {"q_scale": q_scale, "is_delta": is_delta}
    o, state = launched(module.launch, *rows, initial_state, edges, **options)
    return o.view(v.shape), state


def _state_dtype(v: Tensor) -> torch.dtype:
    return torch.promote_types(v.dtype, torch.float32)


def _fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *_: Any,
) -> tuple[Tensor, Tensor]:
    batch = v.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (batch, v.shape[-2], k.shape[-1], v.shape[-1])
    return v.new_empty(v.shape), v.new_empty(state, dtype=_state_dtype(v))


def _has_kernels(k: Tensor, v: Tensor, g: Tensor, backend: str | None) -> bool:
    """Return whether Triton's kernels compute the gradient; otherwise `chunks.gradient` does.

    They do on a GPU unless the caller named another backend or Triton refuses the call, such as one
    with a decay for each channel.
    """
    if backend not in (None, "triton") or v.device.type != "cuda":
        return False
    spec = RecurrentSpec(v.device.type, v.dtype, k.shape[-1], v.shape[-1], g.dim() == k.dim(), None)
    return dispatch.refusal("recurrence_bwd", "triton", spec) is None


def _backward_kernel(
    do: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    q_scale: float,
    is_delta: bool,
    backend: str | None,
) -> tuple[Tensor, ...]:
    do_, q_, k_, v_, g_, beta_ = (_packed(x, cu_seqlens) for x in (do, q, k, v, g, beta))
    given = (do_, q_, k_, v_, g_, beta_, initial_state, dstate)
    with torch.autocast(v.device.type, enabled=False):
        if _has_kernels(k, v, g, backend):
            module = dispatch.kernel_module("recurrence_bwd", "triton")
            options = {"q_scale": q_scale, "is_delta": is_delta}
            *grads, dinitial = launched(module.gradient, *given, _edges(v, cu_seqlens), **options)
        else:
            ends = _edges(v, cu_seqlens).tolist()
            *grads, dinitial = chunks.gradient(*given, ends, q_scale=q_scale, is_delta=is_delta)
    shaped = [x.view(like.shape) for x, like in zip(grads, (q, k, v, g, beta), strict=True)]
    return (*shaped, dinitial)


def _backward_fake(
    do: Tensor,
    dstate: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    *_: Any,
) -> tuple[Tensor, ...]:
    state = _fake(q, k, v, g, beta, initial_state, cu_seqlens)[1]
    return (*(x.new_empty(x.shape) for x in (q, k, v, g, beta)), state)


def _step_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    keys: Tensor,
    gates: Tensor,
    values: Tensor,
    betas: Tensor | None,
    inverses: Tensor | None,
    slots: Tensor,
    starts: Tensor,
    cu_seqlens: Tensor,
    q_scale: float,
    is_delta: bool,
    backend: str | None,
) -> Tensor:
    states = RecurrentStates(state, keys, gates, values, betas, inverses)
    module = _module(k, v, g, "updates" if betas is None else "tokens", backend)
    given, options = (q, k, v, g, beta, states), {"q_scale": q_scale, "is_delta": is_delta}
    o: Tensor = launched(module.step, *given, slots, starts, cu_seqlens, **options)
    return o


def _step_fake(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Tensor:
    return v.new_empty(v.shape)


_CALL = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    "Tensor? cu_seqlens, float q_scale, bool is_delta"
)
run = register(
    f"recurrence({_CALL}, str? backend) -> (Tensor, Tensor)",
    _kernel,
    _fake,
)
backward = register(
    f"recurrence_bwd(Tensor do, Tensor? dstate, {_CALL}, str? backend) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_kernel,
    _backward_fake,
)
step = register(
    "recurrence_step(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, "
    "Tensor(b!) keys, Tensor(c!) gates, Tensor(d!) values, Tensor(e!)? betas, "
    "Tensor(f!)? inverses, Tensor slots, Tensor starts, Tensor cu_seqlens, float q_scale, "
    "bool is_delta, str? backend) -> Tensor",
    _step_kernel,
    _step_fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.q_scale, ctx.is_delta, ctx.backend = inputs
    save(ctx, *tensors)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, do: Tensor | None, dstate: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None and dstate is None:
        return (None,) * 10
    tensors = ctx.saved_tensors
    if do is None:
        do = torch.zeros_like(tensors[2])
    *grads, dinitial = backward(do, dstate, *tensors, ctx.q_scale, ctx.is_delta, ctx.backend)
    return (*grads, None if tensors[5] is None else dinitial, None, None, None, None)


def _rule(op: Any, num_first: int) -> Any:
    """Return a rule for torch.vmap that lays the mapped dim over the batch, for one call of `op`.

    Packed calls are looped over instead, one for each index of the mapped dim.

    Args:
        num_first: the number of arguments that have a batch; they come first, cu_seqlens next.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        moved = [
            x if dim is None else x.movedim(dim, 0) for x, dim in zip(args, in_dims, strict=True)
        ]
        size = info.batch_size
        if args[num_first] is not None:
            results = [
                op(*(x[n] if dim is not None else x for x, dim in zip(moved, in_dims, strict=True)))
                for n in range(size)
            ]
            return tuple(torch.stack(parts) for parts in zip(*results, strict=True)), (0,) * len(
                results[0]
            )
        folded = [
            x
            if x is None
            else (x if dim is not None else x.unsqueeze(0).expand(size, *x.shape)).flatten(0, 1)
            for x, dim in zip(moved[:num_first], in_dims, strict=False)
        ]
        results = op(*folded, *moved[num_first:])
        return tuple(x.unflatten(0, (size, -1)) for x in results), (0,) * len(results)

    return rule


register_gradient("recurrence", _gradient, _save)
refuse_gradient("recurrence_bwd")
refuse_gradient("recurrence_step")
register_vmap("recurrence", _rule(run, 6))
register_vmap("recurrence_bwd", _rule(backward, 8))
refuse_vmap("recurrence_step")
