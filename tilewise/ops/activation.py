"""gated_mul(), silu_mul() and activate(): gates, and the activations of a feed-forward block."""

from __future__ import annotations

from functools import partial
from typing import Any, Never

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec, GateSpec
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.step import register_step, step

FUNCTIONS = ("sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "softplus", "exp")
GATES = ("silu", "gelu", "gelu_tanh", "sigmoid")
"""The functions of `gated_mul`."""


def gated_mul(
    gate: Tensor, x: Tensor | None = None, *, function: str, backend: str | None = None
) -> Tensor:
    """Compute y = round(f(gate)) * x in one kernel.

    f is defined in `activate`, computed in float32 (float64 for float64) and rounded to the dtype
    of the gate before it multiplies, as torch's two operations do. Nothing is differentiable.

    Args:
        gate: (..., I), any float dtype, last dim contiguous; without x (..., 2 I), I channels of
            the gate, then I of x.
        x: (..., I), the shape and dtype of the gate, last dim contiguous; None if it is in `gate`.
        function: the name of f, "silu", "gelu", "gelu_tanh" or "sigmoid".
        backend: "cpu" (no gelu of float64), "triton" or "reference"; None chooses.

    Returns:
        (..., I), a new contiguous tensor of the same dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Shazeer, 2020, "GLU variants improve transformer".

    Example:
        >>> y = gated_mul(torch.randn(3, 2 * 3072), function="gelu_tanh")
    """
    y: Tensor = _gated_mul(gate, x, function, backend)
    return y


@names
def silu_mul(gate_up: Tensor, *, backend: str | None = None, **unknown: Never) -> Tensor:
    """Compute y = round(silu(gate)) * up, silu(x) = x / (1 + exp(-x)), in one kernel.

    It is `ops.gated_mul` of this function. silu is computed in float32 (float64 for float64) and
    rounded to the dtype of the input before it multiplies, as `torch.nn.functional.silu(gate) * up`
    does. Nothing is differentiable.

    Args:
        gate_up: (..., 2 I), any float dtype, last dim contiguous: I channels of gate, then I of
            up.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        (..., I), a new contiguous tensor of the same dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Shazeer, 2020, "GLU variants improve transformer" (SwiGLU).

    Example:
        >>> y = silu_mul(torch.randn(3, 2 * 3072))
    """
    if unknown:
        raise unknown_keyword(silu_mul, unknown)
    y: Tensor = _silu_mul(gate_up, None, "silu", backend)
    return y


def activate(x: Tensor, function: str, *, backend: str | None = None) -> Tensor:
    """Compute y = f(x) of every element, with the same bits whatever the element's position.

    sigmoid: 1 / (1 + exp(-x)). silu: x sigmoid(x). gelu: x Phi(x), Phi the normal distribution.
    gelu_tanh: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). tanh: itself.
    softplus: ln(1 + exp(x)). exp: itself. It is computed in float32 and rounded once, as in torch;
    but torch's functions compute the last, incomplete vector with other bits than whole vectors.
    Nothing is differentiable.

    Args:
        x: (..., E), float32, float16 or bfloat16 (for the reference float64, too), last dim
            contiguous.
        function: the name, "sigmoid", "silu", "gelu", "gelu_tanh", "tanh",
            "softplus" or "exp".
        backend: "cpu" or "reference"; None chooses.

    Returns:
        (..., E), a new contiguous tensor of the same dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Hendrycks and Gimpel, 2016, "Gaussian error linear units".

    Example:
        >>> y = activate(torch.randn(3, 3072), "gelu_tanh")
    """
    y: Tensor = _activate(x, function, backend)
    return y


def _check_activate(x: Tensor, function: str, backend: str | None) -> None:
    checks.check_float("x", x)
    if x.dim() < 1:
        raise ValueError(f"x must be (..., E), got shape {tuple(x.shape)}")
    checks.check_last_dim_contiguous("x", x)
    if function not in FUNCTIONS:
        raise ValueError(f"function must be one of {', '.join(FUNCTIONS)}, got {function!r}")
    dispatch.check_backend_name(backend)


def _chosen_activate(x: Tensor, function: str, backend: str | None) -> partial[Tensor]:
    name = dispatch.choose("elementwise", ElementSpec(x.device.type, x.dtype), backend)
    return partial(dispatch.kernel_module("elementwise", name).activate, x, function)


def _activate_fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _check(gate: Tensor, x: Tensor | None, function: str, backend: str | None) -> None:
    if function not in GATES:
        raise ValueError(f"function must be one of {', '.join(GATES)}, got {function!r}")
    if x is None:
        _check_both("gate", gate, None, function, backend)
        return
    checks.check_float("gate", gate)
    if gate.dim() < 1:
        raise ValueError(f"gate must be (..., I), got shape {tuple(gate.shape)}")
    checks.check_same_dtype("x", x, gate.dtype)
    checks.check_shape("x", x, tuple(gate.shape))
    checks.check_device("x", x, gate.device)
    for name, tensor in (("gate", gate), ("x", x)):
        checks.check_last_dim_contiguous(name, tensor)
    dispatch.check_backend_name(backend)


def _check_both(name: str, both: Tensor, x: None, function: str, backend: str | None) -> None:
    checks.check_float(name, both)
    if both.dim() < 1 or both.shape[-1] < 2 or both.shape[-1] % 2:
        raise ValueError(f"{name} must be (..., 2 I), got shape {tuple(both.shape)}")
    checks.check_last_dim_contiguous(name, both)
    dispatch.check_backend_name(backend)


def _chosen(gate: Tensor, x: Tensor | None, function: str, backend: str | None) -> partial[Tensor]:
    spec = GateSpec(gate.device.type, gate.dtype, function)
    name = dispatch.choose("activation", spec, backend)
    return partial(dispatch.kernel_module("activation", name).gated_mul, gate, x, function)


def _fake(gate: Tensor, x: Tensor | None, *_: Any) -> Tensor:
    dim = gate.shape[-1] if x is not None else gate.shape[-1] // 2
    return torch.empty((*gate.shape[:-1], dim), dtype=gate.dtype, device=gate.device)


register_step(
    "gated_mul(Tensor gate, Tensor? x, str function, str? backend) -> Tensor", _chosen, _fake
)
refuse_gradient("gated_mul")
_gated_mul = step("gated_mul", _check)
_silu_mul = step("gated_mul", partial(_check_both, "gate_up"))

register_step(
    "activate(Tensor x, str function, str? backend) -> Tensor", _chosen_activate, _activate_fake
)
refuse_gradient("activate")
_activate = step("activate", _check_activate)
