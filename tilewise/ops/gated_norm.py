"""gated_rms_norm(): the norm between a recurrence and the product that follows it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.step import register_step, step

__all__ = ["GATES", "gated_rms_norm"]

GATES = ("silu", "sigmoid")
"""Functions of a gate."""


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    group_size: int | None = None,
    activation: str = "silu",
    gate_first: bool = False,
    rounds_first: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Scale groups of each row to unit root mean square, times a weight and a function of a gate.

    y = round(x / rms(x)) * weight * f(gate), or, gate first, y = round(z / rms(z)) * weight of
    z = x f(gate). Statistics and f are float32 (float64 for float64); the quotient and its product
    with the weight are rounded to the dtype of x, if it rounds first. Nothing is differentiable.

    Args:
        x: (T, E) or (T, H, E), any float dtype, contiguous.
        gate: in the shape and dtype of x, last dim contiguous.
        weight: (E,), the dtype of x.
        eps: the number that is added to the mean square.
        group_size: the channels that are averaged, a divisor of E; None for all.
        activation: f, "silu" or "sigmoid".
        gate_first: True to multiply by the gate before the norm.
        rounds_first: False to round only once, at the end.
        backend: "triton" or "reference"; None chooses.

    Returns:
        A new contiguous tensor of x's shape and dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Sources: Dao and Gu, 2024 (Mamba-2, the gate first); Yang et al., 2024 (gated delta nets).

    Example:
        >>> x, gate = torch.randn(2, 3, 8, 128)
        >>> y = gated_rms_norm(x, gate, torch.ones(128), 1e-6)
    """
    group = weight.shape[-1] if group_size is None else group_size
    y: Tensor = _gated_rms_norm(
        x, gate, weight, eps, group, activation, gate_first, rounds_first, backend
    )
    return y


def _check(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    group_size: int,
    activation: str,
    gate_first: bool,
    rounds_first: bool,
    backend: str | None,
) -> None:
    checks.check_float("x", x)
    if x.dim() not in (2, 3) or x.shape[-1] < 1:
        raise ValueError(
            f"x must be (T, E) or (T, H, E) with E at least 1, got shape {tuple(x.shape)}"
        )
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")
    for name, tensor, shape in (
        ("gate", gate, tuple(x.shape)),
        ("weight", weight, (x.shape[-1],)),
    ):
        checks.check_same_dtype(name, tensor, x.dtype)
        checks.check_shape(name, tensor, shape)
        checks.check_device(name, tensor, x.device)
        checks.check_last_dim_contiguous(name, tensor)
    if group_size < 1 or x.shape[-1] % group_size:
        raise ValueError(f"group_size must divide {x.shape[-1]} channels, got {group_size}")
    if activation not in GATES:
        raise ValueError(f"activation must be one of {', '.join(GATES)}, got {activation!r}")
    dispatch.check_backend_name(backend)


def _chosen(x: Tensor, *given: Any) -> partial[Tensor]:
    *arguments, backend = given
    name = dispatch.choose("gated_norm", ElementSpec(x.device.type, x.dtype), backend)
    return partial(dispatch.kernel_module("gated_norm", name).gated_rms_norm, x, *arguments)


register_step(
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, int group_size, "
    "str activation, bool gate_first, bool rounds_first, str? backend) -> Tensor",
    _chosen,
    lambda x, *_: torch.empty(x.shape, dtype=x.dtype, device=x.device),
)
refuse_gradient("gated_rms_norm")
_gated_rms_norm = step("gated_rms_norm", _check)
