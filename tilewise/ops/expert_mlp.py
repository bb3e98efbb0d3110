"""expert_mlp(): a mixture of feed-forward blocks, of which each token uses a few."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops import checks, dispatch, values
from tilewise.ops.choose_experts import MOST_ACTIVE, MOST_EXPERTS
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.mxfp4 import GROUP
from tilewise.ops.step import register_step, step

__all__ = ["ExpertActivation", "expert_mlp"]

ExpertActivation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "clamped"]


def expert_mlp(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    shared: Tensor | None = None,
    shared_gate: Tensor | None = None,
    activation: ExpertActivation = "silu",
    interleaved: bool = False,
    limit: float = 7.0,
    alpha: float = 1.702,
    weighs_input: bool = False,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute y = sum over a token's chosen experts e of weight[e] (a[e] down[e]^T + down_bias[e]).

    With [g, u] = x up[e]^T + up_bias[e]: a[e] = act(g) u, or for "clamped"
    a[e] = (clamp(u, -limit, limit) + 1) g' sigmoid(alpha g'), where g' = min(g, limit). With
    `weighs_input` the weight multiplies x instead. Without gates, where `up` has half as many rows,
    a[e] = act(x up[e]^T + up_bias[e]).

    With `shared` the result is round(y) + shared, and with `shared_gate`, too, it is
    round(y) + round(round(sigmoid(shared_gate)) shared): rounded as by torch's operations one after
    another.

    Rows are sorted by expert on the device, so that each weight is read once a tile of rows;
    nothing waits for the device. A token's experts are added in the order of its choices. Nothing
    is differentiable.

    Args:
        x: (T, E), float32, float16 or bfloat16, last dim contiguous.
        chosen: (T, k), int32 or int64, contiguous, k at most 32: the different experts of each
            token. A choice outside of 0 ... N - 1 adds nothing; with TILEWISE_CHECK=1 it raises.
        weights: (T, k), float32, contiguous.
        up: (N, 2 I, E), or (N, I, E) without gates, the dtype of x, contiguous; or uint8 (N, 2 I,
            E / 32, 16), MXFP4. N is at most 1,024.
        down: (N, E, I), the dtype of x, contiguous; or uint8 (N, E, I / 32, 16), MXFP4.
        up_bias, down_bias: (N, 2 I) and (N, E), the dtype of x, contiguous; None is 0.
        up_scale, down_scale: uint8 (N, 2 I, E / 32) and (N, E, I / 32), with MXFP4 and only then.
        shared: (T, E), the dtype of x, last dim contiguous: the output of a block that all tokens
            use.
        shared_gate: (T, 1), the dtype of x: the logit of each token's gate of `shared`.
        activation: act, "silu", "gelu", "gelu_tanh", "relu" or "relu_squared"; or, with gates,
            "clamped".
        interleaved: True if row 2 i of up[e] is that of g[i] and row 2 i + 1 that of u[i]; False
            if the I rows of g come first.
        limit, alpha: the constants of "clamped".
        weighs_input: True if the weights multiply the rows of x, False for those of the result.
        batch_invariant: True if a row's bits must not depend on the number of others.
        backend: "triton" or "reference"; None chooses. There is no kernel for CPUs, where
            `nn.Experts` multiplies packed weights expert by expert.

    Returns:
        (T, E), a new contiguous tensor of x's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Shazeer et al., 2017; OpenAI, 2025, "gpt-oss-120b & gpt-oss-20b model card" (clamped).

    Example:
        >>> y = expert_mlp(x, *choose_experts(router(x), 8), up, down)
    """
    y: Tensor = _expert_mlp(
        x,
        chosen,
        weights,
        up,
        up_scale,
        up_bias,
        down,
        down_scale,
        down_bias,
        shared,
        shared_gate,
        activation,
        interleaved,
        float(limit),
        float(alpha),
        weighs_input,
        batch_invariant,
        backend,
    )
    return y


def _check(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    activation: str,
    interleaved: bool,
    limit: float,
    alpha: float,
    weighs_input: bool,
    batch_invariant: bool,
    backend: str | None,
) -> None:
    _check_tensors(x, chosen, weights, up, up_scale, up_bias, down, down_scale, down_bias)
    check_shared(x, shared, shared_gate)
    check_activation(activation, has_gates=_has_gates(up, down, down_scale))
    dispatch.check_backend_name(backend)
    if values.WAITS:
        values.check_ids("chosen", chosen, 0, up.shape[0] - 1)


def _check_tensors(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
) -> None:
    width = check_tokens(x, chosen)
    num_experts, outputs = up.shape[0], up.shape[1] if up.dim() > 1 else 0
    inner = down.shape[2] * (GROUP if down_scale is not None else 1) if down.dim() > 2 else 0
    if outputs != inner and (outputs < 2 or outputs % 2):
        raise ValueError(f"up must be (N, 2 I, E), got shape {tuple(up.shape)}")
    check_choices(len(x), chosen, weights, num_experts)
    given = {"chosen": chosen, "weights": weights, "up": up, "down": down}
    for name, weight, scale, rows, columns in (
        ("up", up, up_scale, outputs, width),
        ("down", down, down_scale, width, inner if outputs == inner else outputs // 2),
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
    for name, bias, rows in (("up_bias", up_bias, outputs), ("down_bias", down_bias, width)):
        if bias is not None:
            checks.check_same_dtype(name, bias, x.dtype)
            checks.check_shape(name, bias, (num_experts, rows))
            given[name] = bias
    for name, tensor in given.items():
        checks.check_device(name, tensor, x.device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")


def check_tokens(x: Tensor, chosen: Tensor) -> int:
    """Return E; raise unless x is a float (T, E) and chosen an int32 or int64 (T, k).

    The error is TypeError for a dtype, otherwise ValueError. Sizes of chosen are not checked.
    """
    checks.check_float("x", x)
    checks.check_dims("x", x, "(T, E)")
    checks.check_last_dim_contiguous("x", x)
    checks.check_dims("chosen", chosen, "(T, k)")
    if chosen.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"chosen must be int32 or int64, got {chosen.dtype}")
    return x.shape[1]


def check_choices(tokens: int, chosen: Tensor, weights: Tensor, num_experts: int) -> None:
    """Raise unless chosen experts and their weights are (tokens, k), the weights float32.

    `num_experts` must be at most 1,024, and k at most 32 and at most `num_experts`. The ids in
    `chosen` are not read. The error is TypeError for the dtype, otherwise ValueError.
    """
    if not 1 <= num_experts <= MOST_EXPERTS:
        raise ValueError(f"experts must be 1 to {MOST_EXPERTS}, got {num_experts}")
    most, num_active = min(num_experts, MOST_ACTIVE), chosen.shape[1]
    if not 1 <= num_active <= most:
        raise ValueError(f"chosen must have 1 to {most} columns, got {num_active}")
    checks.check_shape("chosen", chosen, (tokens, num_active))
    checks.check_shape("weights", weights, (tokens, num_active))
    checks.check_same_dtype("weights", weights, torch.float32)


def check_shared(x: Tensor, shared: Tensor | None, shared_gate: Tensor | None) -> None:
    """Raise unless `shared` is like x, (T, E), and `shared_gate` is (T, 1), in x's dtype and on its
    device.

    Either may be None, but a gate without `shared` is an error. The error is TypeError for a
    dtype, otherwise ValueError.
    """
    if shared is None:
        if shared_gate is not None:
            raise ValueError("shared_gate must be None without shared, got a tensor")
        return
    for name, tensor, channels in (("shared", shared, x.shape[1]), ("shared_gate", shared_gate, 1)):
        if tensor is None:
            continue
        checks.check_same_dtype(name, tensor, x.dtype)
        checks.check_shape(name, tensor, (len(x), channels))
        checks.check_device(name, tensor, x.device)
    checks.check_last_dim_contiguous("shared", shared)


def check_activation(activation: str, *, has_gates: bool) -> None:
    """Raise ValueError unless `activation` is a known name; "clamped" needs experts with gates."""
    if activation not in get_args(ExpertActivation):
        names = ", ".join(get_args(ExpertActivation))
        raise ValueError(f"activation must be one of {names}, got {activation!r}")
    if activation == "clamped" and not has_gates:
        raise ValueError("activation must not be clamped without gates, got clamped")


def _has_gates(up: Tensor, down: Tensor, down_scale: Tensor | None) -> bool:
    return up.shape[1] != down.shape[2] * (1 if down_scale is None else GROUP)


def _chosen(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: Tensor,
    up_scale: Tensor | None,
    up_bias: Tensor | None,
    down: Tensor,
    down_scale: Tensor | None,
    down_bias: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    activation: str,
    interleaved: bool,
    limit: float,
    alpha: float,
    weighs_input: bool,
    batch_invariant: bool,
    backend: str | None,
) -> partial[Tensor]:
    name = dispatch.choose("expert_mlp", ElementSpec(x.device.type, x.dtype), backend)
    return partial(
        dispatch.kernel_module("expert_mlp", name).launch,
        x,
        chosen,
        weights,
        up,
        up_scale,
        up_bias,
        down,
        down_scale,
        down_bias,
        shared,
        shared_gate,
        activation=activation,
        interleaved=interleaved,
        limit=limit,
        alpha=alpha,
        weighs_input=weighs_input,
        batch_invariant=batch_invariant,
    )


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


register_step(
    "expert_mlp(Tensor x, Tensor chosen, Tensor weights, Tensor up, Tensor? up_scale, "
    "Tensor? up_bias, Tensor down, Tensor? down_scale, Tensor? down_bias, Tensor? shared, "
    "Tensor? shared_gate, str activation, bool interleaved, float limit, float alpha, "
    "bool weighs_input, bool batch_invariant, str? backend) -> Tensor",
    _chosen,
    _fake,
)
refuse_gradient("expert_mlp")
_expert_mlp = step("expert_mlp", _check)
