"""key_bias_channels(): a bias of keys as channels of q and k, in one kernel."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.key_bias import CHANNELS, LEAST, factors
from tilewise.kernels.spec import ElementSpec
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import register_gradient, save
from tilewise.ops.library import register_vmap
from tilewise.ops.step import register_step, step

__all__ = ["key_bias_channels"]


def key_bias_channels(
    q: Tensor, k: Tensor, keys: Tensor, scale: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Add eight channels to q and to k, by which attention with `scale` adds a bias to each key.

    scale q'_i . k'_j = scale q_i . k_j + keys_j: no tensor of queries x keys is made for a bias
    that all queries and heads share. The added channels of q are a power of two. The first of k is
    keys / (scale * power); the next two are what rounding to 16 bits left of it, the others 0. A
    bias below -61,440 counts as -61,440, beside which any other key is all that is seen.

    Gradients of q and k are views of those of the results. Of a float `keys` it is exact, 0 where
    keys < -61,440. The derivatives are differentiable, in forward mode, too.

    Args:
        q: (N, Sq, H, D), any float dtype and strides.
        k: (N, Sk, Hk, D), the dtype of q, any strides.
        keys: (N, Sk), any float dtype, or bool: True for 0 and False for -61,440.
        scale: the positive, finite factor of q . k.
        backend: "triton" or "reference"; None chooses a kernel on a GPU, and torch's operations
            where there is none. Both give the same bits.

    Returns:
        (N, Sq, H, D + 8) and (N, Sk, Hk, D + 8), contiguous, in the dtype of q.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, the power of two
            is beyond the dtype of q, or the backend cannot; the message names it.

    Example:
        >>> q, k = torch.randn(2, 3, 16, 4, 32)
        >>> q, k = key_bias_channels(q, k, torch.randn(3, 16), 32**-0.5)
    """
    wide_q, wide_k = _key_bias_channels(q, k, keys, float(scale), backend)
    return wide_q, wide_k


def _check(q: Tensor, k: Tensor, keys: Tensor, scale: float, backend: str | None) -> None:
    checks.check_float("q", q)
    if q.dim() != 4 or min(q.shape[2:]) < 1:
        raise ValueError(
            f"q must be (N, Sq, H, D) with H and D at least 1, got shape {tuple(q.shape)}"
        )
    checks.check_same_dtype("k", k, q.dtype)
    if k.dim() != 4 or k.shape[2] < 1 or (len(k), k.shape[3]) != (len(q), q.shape[3]):
        raise ValueError(
            f"k must be (N, Sk, Hk, D) with N = {len(q)}, Hk at least 1 and D = {q.shape[3]}, "
            f"got shape {tuple(k.shape)}"
        )
    if keys.dtype != torch.bool:
        checks.check_float("keys", keys)
    checks.check_shape("keys", keys, tuple(k.shape[:2]))
    for name, tensor in (("k", k), ("keys", keys)):
        checks.check_device(name, tensor, q.device)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be positive and finite, got {scale}")
    # The power of two that is added to q is at least 1 / scale, and below 2 ** exponent.
    exponent = math.frexp(torch.finfo(q.dtype).max)[1]
    least = 2.0 ** (1 - exponent)
    if scale < least:
        raise ValueError(
            f"scale must be at least {least:.3g} for {checks.dtype_name(q.dtype)}, got {scale}"
        )
    dispatch.check_backend_name(backend)


def _chosen(
    q: Tensor, k: Tensor, keys: Tensor, scale: float, backend: str | None
) -> partial[tuple[Tensor, Tensor]]:
    name = dispatch.choose("key_bias_channels", ElementSpec(q.device.type, q.dtype), backend)
    launcher = dispatch.kernel_module("key_bias_channels", name).key_bias_channels
    return partial(launcher, q, k, keys, scale)


def _fake(q: Tensor, k: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    wide_q, wide_k = (x.new_empty((*x.shape[:-1], x.shape[-1] + CHANNELS)) for x in (q, k))
    return wide_q, wide_k


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, keys, ctx.scale = inputs[:4]
    save(ctx, keys)
    ctx.shapes, ctx.dtype = (q.shape, k.shape), q.dtype
    ctx.set_materialize_grads(False)


def _first_part(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x (N, Sk) times the factor of the bias, 0 where the bias is clamped, in `dtype`.

    It is the first of k's added channels along x, a direction of the bias, and the transpose of
    that map, too. The other channels are what rounding left, and have a slope of 0.
    """
    (keys,) = ctx.saved_tensors
    _, factor = factors(ctx.scale, x.dtype)
    return torch.where(keys >= LEAST, x * factor, 0.0).to(dtype)


def _backward(ctx: Any, dq: Tensor | None, dk: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of q, k and keys, and None for scale and backend."""
    (keys,) = ctx.saved_tensors
    dim = ctx.shapes[0][-1]
    dkeys = None
    if dk is not None and ctx.needs_input_grad[2]:
        wide = torch.promote_types(dk.dtype, torch.float32)
        dkeys = _first_part(ctx, dk[..., dim].sum(2, dtype=wide), keys.dtype)
    dq, dk = (None if x is None else x[..., :dim] for x in (dq, dk))
    return dq, dk, dkeys, None, None


def _jvp(
    ctx: Any, q_dot: Tensor | None, k_dot: Tensor | None, keys_dot: Tensor | None, *_: Any
) -> tuple[Tensor, Tensor]:
    """Return the tangents of both results from those of q, k and keys; None is 0."""
    some = next(x for x in (q_dot, k_dot, keys_dot) if x is not None)
    q_shape, k_shape = ctx.shapes
    q_dot = some.new_zeros(q_shape, dtype=ctx.dtype) if q_dot is None else q_dot
    k_dot = some.new_zeros(k_shape, dtype=ctx.dtype) if k_dot is None else k_dot
    added = k_dot.new_zeros((*k_shape[:2], 1, CHANNELS))
    if keys_dot is not None:
        wide = torch.promote_types(k_dot.dtype, torch.float32)
        first = _first_part(ctx, keys_dot.to(wide), k_dot.dtype)
        added = torch.cat([first[..., None, None], added[..., 1:]], dim=-1)
    nothing = q_dot.new_zeros((*q_shape[:-1], CHANNELS))
    wide_k = torch.cat([k_dot, added.expand(*k_shape[:-1], CHANNELS)], dim=-1)
    return torch.cat([q_dot, nothing], dim=-1), wide_k


def _vmap(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, tuple[int, int]]:
    """Run torch.vmap by one call, the mapped dim folded into N.

    Returns the results, and 0 as the mapped dim of each.
    """
    tensors = [
        x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
        for x, dim in zip(args[:3], in_dims, strict=False)
    ]
    num_rows = tensors[0].shape[1]
    found = _key_bias_channels(*(x.flatten(0, 1) for x in tensors), *args[3:])
    return tuple(x.unflatten(0, (info.batch_size, num_rows)) for x in found), (0, 0)


register_step(
    "key_bias_channels(Tensor q, Tensor k, Tensor keys, float scale, str? backend) "
    "-> (Tensor, Tensor)",
    _chosen,
    _fake,
)
register_gradient("key_bias_channels", _backward, _save, _jvp)
_key_bias_channels = step("key_bias_channels", _check)
register_vmap("key_bias_channels", _vmap)
