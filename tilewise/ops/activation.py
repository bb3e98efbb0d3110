"""silu_mul() and activate(): the activations of a feed-forward block."""

from __future__ import annotations

from functools import partial
from typing import Any, Never

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.keywords import names, unknown_keyword
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.step import register_step, step

FUNCTIONS = ("sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "softplus")


@names
def silu_mul(gate_up: Tensor, *, backend: str | None = None, **unknown: Never) -> Tensor:
    """Compute y = round(silu(gate)) * up, silu(x) = x / (1 + exp(-x)), in one kernel.

    silu is computed in float32 (float64 for float64) and rounded to the dtype of the input before
    it multiplies, as `torch.nn.functional.silu(gate) * up` does. Nothing is differentiable.

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
    y: Tensor = _silu_mul(gate_up, backend)
    return y


def activate(x: Tensor, function: str, *, backend: str | None = None) -> Tensor:
    """Compute y = f(x) of every element, with the same bits whatever the element's position.

    sigmoid: 1 / (1 + exp(-x)). silu: x sigmoid(x). gelu: x Phi(x), Phi the normal distribution.
    gelu_tanh: 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))). tanh: itself.
    softplus: ln(1 + exp(x)). It is computed in float32 and rounded once, as in torch; but torch's
    functions compute the last, incomplete vector with other bits than whole vectors. Nothing is
    differentiable.

    Args:
        x: (..., E), float32, float16 or bfloat16 (for the reference float64, too), last dim
            contiguous.
        function: the name, "sigmoid", "silu", "gelu", "gelu_tanh", "tanh" or "softplus".
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


def _check(gate_up: Tensor, backend: str | None) -> None:
    checks.check_float("gate_up", gate_up)
    if gate_up.dim() < 1 or gate_up.shape[-1] < 2 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must be (..., 2 I), got shape {tuple(gate_up.shape)}")
    checks.check_last_dim_contiguous("gate_up", gate_up)
    dispatch.check_backend_name(backend)


def _chosen(gate_up: Tensor, backend: str | None) -> partial[Tensor]:
    name = dispatch.choose("activation", ElementSpec(gate_up.device.type, gate_up.dtype), backend)
    return partial(dispatch.kernel_module("activation", name).silu_mul, gate_up)


def _fake(gate_up: Tensor, *_: Any) -> Tensor:
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


register_step("silu_mul(Tensor gate_up, str? backend) -> Tensor", _chosen, _fake)
refuse_gradient("silu_mul")
_silu_mul = step("silu_mul", _check)

register_step(
    "activate(Tensor x, str function, str? backend) -> Tensor", _chosen_activate, _activate_fake
)
refuse_gradient("activate")
_activate = step("activate", _check_activate)
