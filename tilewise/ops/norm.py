"""rms_norm() and add_rms_norm(): one pass over the rows between two products."""

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


@names
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, backend: str | None = None, **unknown: Never
) -> Tensor:
    """Scale each row to unit root mean square: y = round(x / sqrt(mean(x^2) + eps)) * weight.

    Statistics are float32 (float64 for float64), and the quotient is rounded to the dtype of x
    before the weight multiplies it: `torch.nn.functional.rms_norm(x, (E,), None, eps) * weight` in
    one kernel, equal to the bit but for the order in which float32 squares are summed. Nothing is
    differentiable.

    Args:
        x: (..., E), any float dtype, last dim contiguous.
        weight: (E,), the dtype of x.
        eps: added to the mean square.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        A new contiguous tensor of x's shape and dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Zhang and Sennrich, 2019; the order of rounding is that of Hugging Face's Llama.

    Example:
        >>> y = rms_norm(torch.randn(3, 1024), torch.ones(1024), 1e-6)
    """
    if unknown:
        raise unknown_keyword(rms_norm, unknown)
    y: Tensor = _rms_norm(x, weight, eps, backend)
    return y


@names
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    backend: str | None = None,
    **unknown: Never,
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum, in one kernel.

    new_residual = round(x + residual); y = rms_norm(new_residual, weight, eps). Both are rounded
    where the separate operations round, see `rms_norm`. Nothing is differentiable.

    Args:
        x, residual: (..., E), of one shape and float dtype, last dims contiguous.
        weight: (E,), the dtype of x.
        eps: added to the mean square.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        y and new_residual, new contiguous tensors of x's shape and dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `rms_norm`.

    Example:
        >>> y, residual = add_rms_norm(torch.randn(3, 64), torch.randn(3, 64), torch.ones(64), 1e-6)
    """
    if unknown:
        raise unknown_keyword(add_rms_norm, unknown)
    y, new_residual = _add_rms_norm(x, residual, weight, eps, backend)
    return y, new_residual


def shifted_rms_norm(
    x: Tensor, weight: Tensor, eps: float, *, backend: str | None = None
) -> Tensor:
    """Scale each row as Gemma does: y = round(x / sqrt(mean(x^2) + eps) * (1 + weight)).

    All is float32 (float64 for float64) before the last rounding. Nothing is differentiable.

    Args:
        x, weight, eps: as of `rms_norm`.
        backend: "triton" or "reference"; None chooses.

    Returns:
        A new contiguous tensor of x's shape and dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `rms_norm`.

    Example:
        >>> y = shifted_rms_norm(torch.randn(3, 1024), torch.zeros(1024), 1e-6)
    """
    y: Tensor = _shifted_rms_norm(x, weight, eps, backend)
    return y


def add_shifted_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum by `shifted_rms_norm`, in one kernel.

    Args:
        x, residual, weight, eps: as of `add_rms_norm`.
        backend: "triton" or "reference"; None chooses.

    Returns:
        y and new_residual, new contiguous tensors of x's shape and dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `rms_norm`.

    Example:
        >>> x, residual = torch.randn(2, 3, 64)
        >>> y, residual = add_shifted_rms_norm(x, residual, torch.zeros(64), 1e-6)
    """
    y, new_residual = _add_shifted_rms_norm(x, residual, weight, eps, backend)
    return y, new_residual


def add_parts_rms_norm(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum, where x comes in parts.

    x = round(parts[0] + parts[1] + ...), in float32 in this order, as `ops.linear_parts` returns
    them; then `add_rms_norm`. Nothing is differentiable.

    Args:
        parts: (P, ..., E) float32, contiguous, P at least 1.
        residual: (..., E), any float dtype, last dim contiguous; x is rounded to it.
        weight: (E,), the dtype of residual.
        eps: added to the mean square.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        y and new_residual, new contiguous tensors of residual's shape and dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `rms_norm`.

    Example:
        >>> y, residual = add_parts_rms_norm(torch.randn(4, 3, 64), residual, torch.ones(64), 1e-6)
    """
    y, new_residual = _add_parts_rms_norm(parts, residual, weight, eps, backend)
    return y, new_residual


def add_parts_shifted_rms_norm(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, *, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Add x to the residual stream and normalise the sum by `shifted_rms_norm`; x comes in parts.

    Args:
        parts, residual, weight, eps: as of `add_parts_rms_norm`.
        backend: "triton" or "reference"; None chooses.

    Returns:
        y and new_residual, new contiguous tensors of residual's shape and dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `rms_norm`.

    Example:
        >>> parts, residual = torch.randn(4, 3, 64), torch.randn(3, 64)
        >>> y, residual = add_parts_shifted_rms_norm(parts, residual, torch.zeros(64), 1e-6)
    """
    y, new_residual = _add_parts_shifted_rms_norm(parts, residual, weight, eps, backend)
    return y, new_residual


def _check_rows(x: Tensor, weight: Tensor) -> None:
    checks.check_float("x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must be (..., E) with E at least 1, got shape {tuple(x.shape)}")
    checks.check_last_dim_contiguous("x", x)
    checks.check_same_dtype("weight", weight, x.dtype)
    checks.check_shape("weight", weight, (x.shape[-1],))
    checks.check_device("weight", weight, x.device)
    checks.check_last_dim_contiguous("weight", weight)


def _check(x: Tensor, weight: Tensor, eps: float, backend: str | None) -> None:
    _check_rows(x, weight)
    dispatch.check_backend_name(backend)


def _check_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, backend: str | None
) -> None:
    _check_rows(x, weight)
    checks.check_same_dtype("residual", residual, x.dtype)
    checks.check_shape("residual", residual, tuple(x.shape))
    checks.check_device("residual", residual, x.device)
    checks.check_last_dim_contiguous("residual", residual)
    dispatch.check_backend_name(backend)


def _check_add_parts(
    parts: Tensor, residual: Tensor, weight: Tensor, eps: float, backend: str | None
) -> None:
    _check_rows(residual, weight)
    if parts.dtype != torch.float32:
        raise TypeError(f"parts must be float32, got {parts.dtype}")
    if parts.dim() < 1 or len(parts) < 1:
        raise ValueError(f"parts must be (P, ..., E) with P at least 1, got {tuple(parts.shape)}")
    checks.check_shape("parts", parts, (len(parts), *residual.shape))
    checks.check_device("parts", parts, residual.device)
    if not parts.is_contiguous():
        raise ValueError(f"parts must be contiguous, got strides {parts.stride()}")
    dispatch.check_backend_name(backend)


def _module(op: str, x: Tensor, backend: str | None) -> Any:
    name = dispatch.choose(op, ElementSpec(x.device.type, x.dtype), backend)
    return dispatch.kernel_module(op, name)


def _chosen(x: Tensor, weight: Tensor, eps: float, backend: str | None) -> partial[Any]:
    return partial(_module("norm", x, backend).rms_norm, x, weight, eps)


def _chosen_add(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, backend: str | None
) -> partial[Any]:
    return partial(_module("norm", x, backend).add_rms_norm, x, residual, weight, eps)


def _chosen_shifted(x: Tensor, weight: Tensor, eps: float, backend: str | None) -> partial[Any]:
    return partial(_module("shifted_norm", x, backend).shifted_rms_norm, x, weight, eps)


def _chosen_add_shifted(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, backend: str | None
) -> partial[Any]:
    module = _module("shifted_norm", x, backend)
    return partial(module.add_shifted_rms_norm, x, residual, weight, eps)


def _chosen_add_parts(
    op: str,
    norm: str,
    parts: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    backend: str | None,
) -> partial[Any]:
    """Return the launch of `add_parts_<norm>` of the backend of `op`, or of its `add_<norm>` for
    the sum of the parts in their order, rounded, where it has no such kernel."""
    module = _module(op, residual, backend)
    launcher = getattr(module, f"add_parts_{norm}", None)
    if launcher is not None:
        return partial(launcher, parts, residual, weight, eps)
    x = parts[0]
    for part in parts[1:]:
        x = x + part
    return partial(getattr(module, f"add_{norm}"), x.to(residual.dtype), residual, weight, eps)


def _one_like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _two_like(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _one_like(x), _one_like(x)


register_step(
    "rms_norm(Tensor x, Tensor weight, float eps, str? backend) -> Tensor",
    _chosen,
    _one_like,
)
register_step(
    "add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str? backend) "
    "-> (Tensor, Tensor)",
    _chosen_add,
    _two_like,
)
register_step(
    "add_parts_rms_norm(Tensor parts, Tensor residual, Tensor weight, float eps, str? backend) "
    "-> (Tensor, Tensor)",
    partial(_chosen_add_parts, "norm", "rms_norm"),
    lambda parts, residual, *_: _two_like(residual),
)
register_step(
    "shifted_rms_norm(Tensor x, Tensor weight, float eps, str? backend) -> Tensor",
    _chosen_shifted,
    _one_like,
)
register_step(
    "add_shifted_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps, str? backend) "
    "-> (Tensor, Tensor)",
    _chosen_add_shifted,
    _two_like,
)
register_step(
    "add_parts_shifted_rms_norm(Tensor parts, Tensor residual, Tensor weight, float eps, "
    "str? backend) -> (Tensor, Tensor)",
    partial(_chosen_add_parts, "shifted_norm", "shifted_rms_norm"),
    lambda parts, residual, *_: _two_like(residual),
)
for _name in (
    "rms_norm",
    "add_rms_norm",
    "add_parts_rms_norm",
    "shifted_rms_norm",
    "add_shifted_rms_norm",
    "add_parts_shifted_rms_norm",
):
    refuse_gradient(_name)
_shifted_rms_norm = step("shifted_rms_norm", _check)
_add_shifted_rms_norm = step("add_shifted_rms_norm", _check_add)
_rms_norm, _add_rms_norm = step("rms_norm", _check), step("add_rms_norm", _check_add)
_add_parts_rms_norm = step("add_parts_rms_norm", _check_add_parts)
_add_parts_shifted_rms_norm = step("add_parts_shifted_rms_norm", _check_add_parts)
