"""merge_states(): merge attention over two disjoint sets of keys."""

from __future__ import annotations

from functools import partial
from typing import Any, Never

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import register_gradient, save
from tilewise.ops.library import register_vmap
from tilewise.ops.step import register_step, step


@names
def merge_states(
    o_a: Tensor,
    lse_a: Tensor,
    o_b: Tensor,
    lse_b: Tensor,
    *,
    backend: str | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """Join two attention results over disjoint keys into the result over their union.

    lse = log(exp(lse_a) + exp(lse_b));  o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b.
    A side with lse = -inf saw no key and adds nothing. Associative and commutative up to rounding.

    Args:
        o_a, o_b: (B, S, H, Dv) or packed (T, H, Dv), same shape and float dtype.
        lse_a, lse_b: (B, H, S) or (H, T), float32, natural log.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        o in o_a's dtype and lse in float32, shaped as the inputs; both are differentiable, any
        number of times, in backward and in forward mode.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Source: FlashAttention (2022), section 3.1, the decomposition of softmax.

    Example:
        >>> o, lse = merge_states(*attention(q, k[:, :64], v[:, :64], return_lse=True),
        ...                       *attention(q, k[:, 64:], v[:, 64:], return_lse=True))
    """
    if unknown:
        raise unknown_keyword(merge_states, unknown)
    o, lse = _merge(o_a, lse_a, o_b, lse_b, backend)
    return o, lse


def _check(o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, backend: str | None) -> None:
    checks.check_float("o_a", o_a)
    checks.check_same_dtype("o_b", o_b, o_a.dtype)
    if o_a.dim() not in (3, 4):
        raise ValueError(f"o_a must be (B, S, H, Dv) or (T, H, Dv), got shape {tuple(o_a.shape)}")
    checks.check_shape("o_b", o_b, tuple(o_a.shape))
    lse_shape = (*o_a.shape[:-3], o_a.shape[-2], o_a.shape[-3])
    for name, tensor in (("lse_a", lse_a), ("lse_b", lse_b)):
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} must be float32, got {checks.dtype_name(tensor.dtype)}")
        checks.check_shape(name, tensor, lse_shape)
    for name, tensor in (("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        checks.check_device(name, tensor, o_a.device)
    dispatch.check_backend_name(backend)


def _chosen(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, backend: str | None
) -> partial[tuple[Tensor, Tensor]]:
    name = dispatch.choose("merge", ElementSpec(o_a.device.type, o_a.dtype), backend)
    return partial(dispatch.kernel_module("merge", name).launch, o_a, lse_a, o_b, lse_b)


def _fake(o_a: Tensor, lse_a: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return o_a.new_empty(o_a.shape), lse_a.new_empty(lse_a.shape)


register_step(
    "merge_states(Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, str? backend) "
    "-> (Tensor, Tensor)",
    _chosen,
    _fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    save(ctx, *inputs[:4], *output)
    ctx.set_materialize_grads(False)


def _sides(ctx: Any) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor, Tensor]:
    """Return two pairs (o_x, exp(lse_x - lse)), of x = a and b, then o and lse, all in lse's dtype.

    Where lse_x is -inf, so that side x saw no key, both numbers of its pair are 0.
    """
    o_a, lse_a, o_b, lse_b, o, lse = ctx.saved_tensors
    sides = []
    for o_x, lse_x in ((o_a, lse_a), (o_b, lse_b)):
        seen = ~lse_x.isneginf()
        # -inf - -inf is NaN, and so is its derivative unless it is excluded before exp.
        weight = torch.where(seen, torch.where(seen, lse_x - lse, 0.0).exp(), 0.0)
        sides.append((torch.where(_rows(seen), o_x, 0.0).to(lse.dtype), weight))
    return tuple(sides), o.to(lse.dtype), lse


def _rows(per_row: Tensor) -> Tensor:
    """View (B, H, S) as (B, S, H, 1), or (H, T) as (T, H, 1), which broadcasts over o."""
    return per_row.transpose(-1, -2).unsqueeze(-1)


def _backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of o_a, lse_a, o_b and lse_b, and None for backend.

    With w = exp(lse_x - lse): do_x = w do, dlse_x = w (do . (o_x - o) + dlse). Of a `do` or `dlse`
    that is None nothing is added; o_x gets None without `do`.
    """
    sides, o, lse = _sides(ctx)
    grads: list[Tensor | None] = []
    for (o_x, weight), like in zip(sides, ctx.saved_tensors[:4:2], strict=True):
        do_x, dlse_x = None, torch.zeros_like(lse) if dlse is None else dlse
        if do is not None:
            do_x = (_rows(weight) * do).to(like.dtype)
            dlse_x = dlse_x + (do * (o_x - o)).sum(-1).transpose(-1, -2)
        grads += [do_x, weight * dlse_x]
    return (*grads, None)


def _jvp(ctx: Any, *dots: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the tangents of o and lse from those of o_a, lse_a, o_b and lse_b; None is 0.

    With w = exp(lse_x - lse), or 0 for a side without keys, lse' = sum w lse_x' and
    o' = sum w (o_x' + (lse_x' - lse') o_x), over both sides.
    """
    sides, o, lse = _sides(ctx)
    zeros = (torch.zeros_like(o), torch.zeros_like(lse)) * 2
    o_a, lse_a, o_b, lse_b = (
        zero if dot is None else dot for dot, zero in zip(dots, zeros, strict=False)
    )
    moves = ((o_a, lse_a), (o_b, lse_b))
    lse_dot, o_dot = torch.zeros_like(lse), torch.zeros_like(o)
    for (_, weight), (_, lse_x) in zip(sides, moves, strict=True):
        lse_dot = lse_dot + weight * lse_x
    for (o_x, weight), (o_x_dot, lse_x) in zip(sides, moves, strict=True):
        o_dot = o_dot + _rows(weight) * (o_x_dot + _rows(lse_x - lse_dot) * o_x)
    return o_dot.to(ctx.saved_tensors[0].dtype), lse_dot


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, int]:
    """Merge under torch.vmap by one call, the mapped dim folded into the batch.

    Rows are merged independently of one another. Returns the results, and 0 as their mapped dim.
    """
    packed = args[0].dim() - (in_dims[0] is not None) == 3
    tensors = [
        x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(args[:4], in_dims, strict=False)
    ]
    if packed:
        return _merge(*tensors, args[4]), 0
    merged = _merge(*(x.flatten(0, 1) for x in tensors), args[4])
    return tuple(x.unflatten(0, (info.batch_size, -1)) for x in merged), 0


register_gradient("merge_states", _backward, _save, _jvp)
_merge = step("merge_states", _check)
register_vmap("merge_states", _vmap)
