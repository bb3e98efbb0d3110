"""Linear layers for an input of one row, in one kernel with the norm before or the activation
after."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.kernels import device
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.linear import check_product, spec_of
from tilewise.ops.step import register_step, step

# The largest weight of a layer that was measured (Llama-3.2-1B). Microseconds of a captured step of
# one row, 1,024 tokens of context, products apart and in one (H200, 2026-11-29,
# lab/results/one_row_h200.json):
#
#     SmolLM-135M 764, 532; SmolLM2-360M 1,001, 687; Qwen2.5-0.5B 993, 693; Qwen3-0.6B 880, 829;
#     Llama-3.2-1B 1,003, 940
_MOST_ELEMENTS = 1 << 25
_MOST_CHANNELS = 2048


def add_rms_norm_linear(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    is_gated: bool = False,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `linear(h, weight, bias)` with h, r = `add_rms_norm(x, residual, ...)`, of one row.

    A step of one row of a small model waits for its launches rather than for memory: here the norm
    and the product are one launch instead of two or three. Everything is rounded where the separate
    ops round. Nothing is differentiable.

    Args:
        x: (..., E) of one row in all, the dtype of residual; or its partial sums (P, ..., E)
            float32, as `row_linear_parts` and `linear_parts` return them.
        residual: (..., E), one row, float16 or bfloat16, contiguous.
        norm_weight: (E,), the dtype of residual.
        eps: added to the mean square.
        weight: (N, E), the dtype of residual, E at most 2,048; (2 N, E) if is_gated.
        bias: a number for each row of weight, the dtype of residual.
        is_gated: True for y = silu(a) * b of the first and the second N outputs a and b.
        backend: "triton" or "reference"; None chooses.

    Returns:
        y (..., N) and r (..., E), new contiguous tensors of residual's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Example:
        >>> y, residual = add_rms_norm_linear(x, residual, norm.weight, 1e-6, qkv.weight)
    """
    y, total = _add_rms_norm_linear(x, residual, norm_weight, eps, weight, bias, is_gated, backend)
    return y, total


def row_linear_parts(x: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """Compute x weight^T of one row as partial sums over parts of K, which the caller adds.

    Args:
        x: (..., K) of one row in all, float16 or bfloat16, contiguous.
        weight: (N, K), the dtype of x.
        backend: "triton" or "reference"; None chooses.

    Returns:
        (P, ..., N) float32, P by K alone.

    Raises:
        ValueError, TypeError, UnsupportedError: as in `add_rms_norm_linear`.

    Example:
        >>> parts = row_linear_parts(x, layer.weight)  # x (1, 2048) on a GPU
    """
    parts: Tensor = _row_linear_parts(x, weight, backend)
    return parts


def row_linear_pays(weight: Tensor) -> bool:
    """Return whether the products of this module are faster for one row and this weight.

    By measurements it is True for 16-bit weights of at most 2 ** 25 elements on Hopper.
    """
    if not weight.is_cuda or weight.dtype not in (torch.float16, torch.bfloat16):
        return False
    return weight.numel() <= _MOST_ELEMENTS and device.arch_of(weight.device) == 90


def _check(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    is_gated: bool,
    backend: str | None,
) -> None:
    _check_row("residual", residual)
    check_product(residual, weight, bias)
    width = residual.shape[-1]
    if width > _MOST_CHANNELS:
        raise ValueError(f"residual must have at most {_MOST_CHANNELS} channels, got {width}")
    checks.check_same_dtype("norm_weight", norm_weight, residual.dtype)
    checks.check_shape("norm_weight", norm_weight, (width,))
    checks.check_device("norm_weight", norm_weight, residual.device)
    checks.check_last_dim_contiguous("norm_weight", norm_weight)
    if is_gated and len(weight) % 2:
        raise ValueError(f"weight must have an even number of rows if is_gated, got {len(weight)}")
    _check_stream(x, residual)
    dispatch.check_backend_name(backend)


def _check_parts(x: Tensor, weight: Tensor, backend: str | None) -> None:
    _check_row("x", x)
    check_product(x, weight, None)
    dispatch.check_backend_name(backend)


def _check_row(name: str, x: Tensor) -> None:
    checks.check_float(name, x)
    if x.dim() < 1 or x.numel() != x.shape[-1] or not x.is_contiguous():
        shape = tuple(x.shape)
        raise ValueError(f"{name} must be one contiguous row (..., E), got shape {shape}")


def _check_stream(x: Tensor, residual: Tensor) -> None:
    """Raise unless x is a row of residual's shape and dtype, or float32 parts (P, ..., E) of one.

    A float32 x beside a float32 residual counts as a row.
    """
    is_parts = x.dtype == torch.float32 and residual.dtype != torch.float32
    if not is_parts:
        checks.check_same_dtype("x", x, residual.dtype)
    elif x.dim() < 1 or len(x) < 1:
        raise ValueError(f"x must be (P, ..., E) with P at least 1, got {tuple(x.shape)}")
    shape = (len(x), *residual.shape) if is_parts else tuple(residual.shape)
    checks.check_shape("x", x, shape)
    checks.check_device("x", x, residual.device)
    if not x.is_contiguous():
        raise ValueError(f"x must be contiguous, got strides {x.stride()}")


def _module(weight: Tensor, backend: str | None) -> Any:
    if backend not in (None, "triton", "reference"):
        raise UnsupportedError(f"row_linear must run on triton or reference, got {backend}")
    return dispatch.kernel_module(
        "row_linear", dispatch.choose("row_linear", spec_of(weight), backend or _default(weight))
    )


def _default(weight: Tensor) -> str | None:
    return "triton" if weight.is_cuda else None


def _chosen(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    is_gated: bool,
    backend: str | None,
) -> partial[Any]:
    launch = _module(weight, backend).add_rms_norm_linear
    return partial(launch, x, residual, norm_weight, eps, weight, bias, is_gated)


def _fake(
    x: Tensor,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None,
    is_gated: bool,
    backend: str | None,
) -> tuple[Tensor, Tensor]:
    outputs = weight.shape[0] // (1 + is_gated)
    return residual.new_empty((*residual.shape[:-1], outputs)), residual.new_empty(residual.shape)


def _chosen_parts(x: Tensor, weight: Tensor, backend: str | None) -> partial[Any]:
    return partial(_module(weight, backend).row_linear_parts, x, weight)


def _fake_parts(x: Tensor, weight: Tensor, backend: str | None) -> Tensor:
    outputs, channels = weight.shape
    count = 1
    if backend != "reference":
        count = _module(weight, backend).parts_of(channels)
    return x.new_empty((count, *x.shape[:-1], outputs), dtype=torch.float32)


register_step(
    "add_rms_norm_linear(Tensor x, Tensor residual, Tensor norm_weight, float eps, Tensor weight, "
    "Tensor? bias, bool is_gated, str? backend) -> (Tensor, Tensor)",
    _chosen,
    _fake,
)
register_step(
    "row_linear_parts(Tensor x, Tensor weight, str? backend) -> Tensor", _chosen_parts, _fake_parts
)
refuse_gradient("add_rms_norm_linear")
refuse_gradient("row_linear_parts")
_add_rms_norm_linear = step("add_rms_norm_linear", _check)
_row_linear_parts = step("row_linear_parts", _check_parts)
