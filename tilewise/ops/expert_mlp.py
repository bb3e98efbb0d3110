"""expert_mlp(): a mixture of gated feed-forward blocks, of which each token uses a few."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import lean, refuse_gradient
from tilewise.ops.library import register
from tilewise.ops.mxfp4 import GROUP


def expert_mlp(
    x: Tensor,
    logits: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    *,
    num_active: int,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    limit: float = 7.0,
    alpha: float = 1.702,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute y = sum over a token's experts e of p[e] (a[e] down[e]^T + down_bias[e]).

    The experts of a token are the `num_active` with the largest logits (of equal ones the first),
    and p is the softmax over these. With [g, u] = x up[e]^T + up_bias[e] interleaved, row 2 i of
    up[e] for g and row 2 i + 1 for u: a[e] = (clamp(u, -limit, limit) + 1) g' sigmoid(alpha g'),
    where g' = min(g, limit).

    Rows are sorted by expert on the device, so that each weight is read once a tile of rows;
    nothing waits for the device. Nothing is differentiable.

    Args:
        x: (T, E), float32, float16 or bfloat16, last dim contiguous.
        logits: (T, N), any float dtype, last dim contiguous, N at most 1,024.
        up: (N, 2 I, E), the dtype of x, contiguous; or uint8 (N, 2 I, E / 32, 16), MXFP4.
        up_bias: (N, 2 I), the dtype of x, contiguous.
        down: (N, E, I), the dtype of x, contiguous; or uint8 (N, E, I / 32, 16), MXFP4.
        down_bias: (N, E), the dtype of x, contiguous.
        num_active: the experts of a token, 1 ... N, at most 16.
        up_scale, down_scale: uint8 (N, 2 I, E / 32) and (N, E, I / 32), with MXFP4 and only then.
        limit, alpha: the constants of the activation.
        batch_invariant: True if a row's bits must not depend on the number of others.
        backend: "triton" or "reference"; None chooses. There is no kernel for CPUs, where
            `nn.Experts` multiplies packed weights expert by expert.

    Returns:
        (T, E), a new contiguous tensor of x's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: OpenAI, 2025, "gpt-oss-120b & gpt-oss-20b model card"; Shazeer et al., 2017.

    Example:
        >>> y = expert_mlp(x, router(x), up, up_bias, down, down_bias, num_active=4)
    """
    _check(x, logits, up, up_bias, down, down_bias, num_active, up_scale, down_scale)
    dispatch.check_backend_name(backend)
    y: Tensor = _expert_mlp(
        x,
        logits,
        up,
        up_scale,
        up_bias,
        down,
        down_scale,
        down_bias,
        num_active,
        float(limit),
        float(alpha),
        batch_invariant,
        backend,
    )
    return y


MOST_EXPERTS, MOST_ACTIVE = 1024, 16


def _check(
    x: Tensor,
    logits: Tensor,
    up: Tensor,
    up_bias: Tensor,
    down: Tensor,
    down_bias: Tensor,
    num_active: int,
    up_scale: Tensor | None,
    down_scale: Tensor | None,
) -> None:
    checks.check_float("x", x)
    checks.check_dims("x", x, "(T, E)")
    checks.check_float("logits", logits)
    checks.check_dims("logits", logits, "(T, N)")
    checks.check_dims("up_bias", up_bias, "(N, 2 I)")
    (tokens, width), (num_experts, outputs) = x.shape, up_bias.shape
    if outputs < 2 or outputs % 2:
        raise ValueError(f"up_bias must be (N, 2 I), got shape {tuple(up_bias.shape)}")
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"experts must be 1 to {MOST_EXPERTS}, got {num_experts}")
    most = min(num_experts, MOST_ACTIVE)
    if not 1 <= num_active <= most:
        raise ValueError(f"num_active must be in 1 ... {most}, got {num_active}")
    for name, tensor in (("x", x), ("logits", logits)):
        checks.check_last_dim_contiguous(name, tensor)
    shapes = {"logits": (tokens, num_experts), "down_bias": (num_experts, width)}
    given = {"logits": logits, "down_bias": down_bias, "up_bias": up_bias, "up": up, "down": down}
    for name, shape in shapes.items():
        checks.check_shape(name, given[name], shape)
    for name, weight, scale, rows, columns in (
        ("up", up, up_scale, outputs, width),
        ("down", down, down_scale, width, outputs // 2),
    ):
        if scale is None:
            checks.check_same_dtype(name, weight, x.dtype)
            checks.check_shape(name, weight, (num_experts, rows, columns))
            continue
        if columns % GROUP:
            raise ValueError(f"{name} must have a multiple of {GROUP} columns, got {columns}")
        groups = (num_experts, rows, columns // GROUP)
        for part, tensor, wanted in (
            (name, weight, (*groups, GROUP // 2)),
            (f"{name}_scale", scale, groups),
        ):
            if tensor.dtype != torch.uint8:
                raise TypeError(f"{part} must be uint8 in MXFP4, got {tensor.dtype}")
            checks.check_shape(part, tensor, wanted)
            given[part] = tensor
    for name in ("up_bias", "down_bias"):
        checks.check_same_dtype(name, given[name], x.dtype)
    for name, tensor in given.items():
        checks.check_device(name, tensor, x.device)
        if name != "logits" and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def _kernel(
    x: Tensor,
    logits: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor,
    num_active: int,
    limit: float,
    alpha: float,
    batch_invariant: bool,
    backend: str | None,
) -> Tensor:
    name = dispatch.choose("expert_mlp", ElementSpec(x.device.type, x.dtype), backend)
    y: Tensor = dispatch.kernel_module("expert_mlp", name).launch(
        x,
        logits,
        up,
        up_scale,
        up_bias,
        down,
        down_scale,
        down_bias,
        num_active=num_active,
        limit=limit,
        alpha=alpha,
        batch_invariant=batch_invariant,
    )
    return y


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


register(
    "expert_mlp(Tensor x, Tensor logits, Tensor up, Tensor? up_scale, Tensor up_bias, Tensor down, "
    "Tensor? down_scale, Tensor down_bias, int num_active, float limit, float alpha, "
    "bool batch_invariant, str? backend) -> Tensor",
    _kernel,
    _fake,
)
refuse_gradient("expert_mlp")
_expert_mlp = lean("expert_mlp")
