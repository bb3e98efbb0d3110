"""apply_rope(): rotary position embedding, differentiable."""

from __future__ import annotations

from functools import partial
from typing import Any, Never

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import register_gradient, save
from tilewise.ops.step import register_step, step


@names
def apply_rope(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    interleaved: bool = False,
    backend: str | None = None,
    **unknown: Never,
) -> Tensor:
    """Rotate pairs of channels by the angle of each position.

    (x1, x2) -> (x1 cos - x2 sin, x1 sin + x2 cos), in float32, for the first R channels; the rest
    pass unchanged. The inverse is the rotation by -sin, which is also the gradient.

    Args:
        x: (T, H, D) or (B, S, H, D), any float dtype, last dim contiguous.
        cos, sin: float32, (T, R/2) for a packed x; (S, R/2) or (B, S, R/2) for a dense one; R <= D,
            and with R = 0 nothing turns.
        interleaved: True to pair channels (2i, 2i + 1) as GPT-J does; else (i, i + R/2) as Llama
            does.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        A new tensor of x's shape and dtype.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Source: RoFormer (2021), equation 34.

    Example:
        >>> angles = torch.arange(128)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
        >>> q = apply_rope(torch.randn(128, 8, 64), angles.cos(), angles.sin())
    """
    if unknown:
        raise unknown_keyword(apply_rope, unknown)
    rotated: Tensor = _rope(x, cos, sin, interleaved, backend)
    return rotated


def _check(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backend: str | None) -> None:
    checks.check_float("x", x)
    if x.dim() not in (3, 4):
        raise ValueError(f"x must be (T, H, D) or (B, S, H, D), got shape {tuple(x.shape)}")
    checks.check_last_dim_contiguous("x", x)
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype.itemsize < 4 or not table.is_floating_point():
            raise TypeError(f"{name} must be float32, got {checks.dtype_name(table.dtype)}")
        checks.check_device(name, table, x.device)
    checks.check_shape("sin", sin, tuple(cos.shape))
    rows = x.shape[:-2]
    if tuple(cos.shape[:-1]) not in (tuple(rows), tuple(rows[-1:])):
        raise ValueError(
            f"cos must have one row a position, {tuple(rows)}, got shape {tuple(cos.shape)}"
        )
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError(
            f"cos must have at most D / 2 = {x.shape[-1] // 2} columns, got {cos.shape[-1]}"
        )
    dispatch.check_backend_name(backend)


def _chosen(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, backend: str | None
) -> partial[Tensor]:
    name = dispatch.choose("rope", ElementSpec(x.device.type, x.dtype), backend)
    if cos.shape[-1] == 0:
        return partial(torch.clone, x.detach(), memory_format=torch.contiguous_format)
    return partial(dispatch.kernel_module("rope", name).launch, x, cos, sin, interleaved)


def _fake(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


register_step(
    "rope(Tensor x, Tensor cos, Tensor sin, bool interleaved, str? backend) -> Tensor",
    _chosen,
    _fake,
)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.interleaved, ctx.backend = inputs
    save(ctx, cos, sin)
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 5
    cos, sin = ctx.saved_tensors
    if grad.shape[-1] > 1 and grad.stride(-1) != 1:
        grad = grad.contiguous()
    return _rope(grad, cos, -sin, ctx.interleaved, ctx.backend), None, None, None, None


def _jvp(
    ctx: Any, x: Tensor | None, cos: Tensor | None, sin: Tensor | None, *_: None
) -> Tensor | None:
    if cos is not None or sin is not None:
        raise ValueError("cos and sin must not carry tangents: they are tables, not inputs")
    return None if x is None else _rope(x, *ctx.saved_tensors, ctx.interleaved, ctx.backend)


register_gradient("rope", _gradient, _save, _jvp)
_rope = step("rope", _check)
