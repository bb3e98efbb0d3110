"""invariant_linear(): a product whose rows do not depend on one another, nor on their number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import lean
from tilewise.ops.library import register


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Compute y = x weight^T + bias in tiles of one size.

    Products are summed in float32 along K in an order that depends on the dtype alone: a row of y
    has the same bits whether it is computed alone or among thousands, which cuBLAS does not
    promise and `linear` keeps up to 16 rows only. Nothing is differentiable.

    Args:
        x: (..., K), float32, float16 or bfloat16, last dim contiguous.
        weight: (N, K), the dtype of x, last dim contiguous.
        bias: (N,), the dtype of x.
        backend: "triton" or "reference"; None chooses. There is no kernel for CPUs, whose packed
            weights (`nn.packed`) keep the same promise.

    Returns:
        (..., N), a new contiguous tensor of x's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Example:
        >>> y = invariant_linear(x, layer.weight)  # x (4096, 1024) on a GPU
    """
    checks.check_float("x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must be (..., K) with K at least 1, got shape {tuple(x.shape)}")
    checks.check_last_dim_contiguous("x", x)
    checks.check_same_dtype("weight", weight, x.dtype)
    checks.check_dims("weight", weight, "(N, K)")
    checks.check_shape("weight", weight, (weight.shape[0], x.shape[-1]))
    checks.check_device("weight", weight, x.device)
    checks.check_last_dim_contiguous("weight", weight)
    if bias is not None:
        checks.check_same_dtype("bias", bias, x.dtype)
        checks.check_shape("bias", bias, (weight.shape[0],))
        checks.check_device("bias", bias, x.device)
        checks.check_last_dim_contiguous("bias", bias)
    dispatch.check_backend_name(backend)
    y: Tensor = _invariant_linear(x, weight, bias, backend)
    return y


def _kernel(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> Tensor:
    name = dispatch.choose("invariant_linear", ElementSpec(x.device.type, x.dtype), backend)
    y: Tensor = dispatch.kernel_module("invariant_linear", name).launch(x, weight, bias)
    return y


def _fake(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


register(
    "invariant_linear(Tensor x, Tensor weight, Tensor? bias, str? backend) -> Tensor",
    _kernel,
    _fake,
)
_invariant_linear = lean("invariant_linear")
