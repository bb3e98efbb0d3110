"""invariant_linear(): a product whose rows do not depend on one another, nor on their number."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tilewise.kernels.tiles import linear_rows
from tilewise.ops import dispatch
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.linear import check_product, fake_product, spec_of
from tilewise.ops.step import register_step, step


def invariant_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Compute y = x weight^T + bias with rows that do not depend on one another.

    Products are summed in float32 along K in an order that depends on the dtype and on the weight
    alone: a row of y has the same bits whether it is computed alone or among thousands, which
    cuBLAS does not promise and `linear` keeps for few rows only. Nothing is differentiable.

    Args:
        x: (..., K), float32, float16 or bfloat16, last dim contiguous.
        weight: (N, K), the dtype of x, last dim contiguous.
        bias: (N,), the dtype of x.
        backend: "gluon" (on Hopper), "triton" or "reference", each with bits of its own; None
            chooses by the weight alone. There is no kernel for CPUs, whose packed weights
            (`nn.packed`) keep the same promise.

    Returns:
        (..., N), a new contiguous tensor of x's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Example:
        >>> y = invariant_linear(x, layer.weight)  # x (4096, 1024) on a GPU
    """
    y: Tensor = _invariant_linear(x, weight, bias, backend)
    return y


def invariant_linear_leaves_parts(weight: Tensor) -> bool:
    """Return whether `linear_parts` gives at least two partial sums of `invariant_linear`.

    Added in order and rounded once, the parts are then the result of `invariant_linear`, bit for
    bit. It is True only for 16-bit weights on a GPU where the "gluon" backend runs.

    Args:
        weight: (N, K), the weight of the product.
    """
    if not weight.is_cuda or weight.dtype not in (torch.float16, torch.bfloat16):
        return False
    outputs, channels = weight.shape
    if linear_rows.parts_of(linear_rows.tile_of(outputs, channels), channels) == 1:
        return False
    return dispatch.refusal("invariant_linear", "gluon", spec_of(weight)) is None


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> None:
    check_product(x, weight, bias)
    dispatch.check_backend_name(backend)


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> partial[Tensor]:
    name = dispatch.choose("invariant_linear", spec_of(weight), backend)
    return partial(dispatch.kernel_module("invariant_linear", name).launch, x, weight, bias)


register_step(
    "invariant_linear(Tensor x, Tensor weight, Tensor? bias, str? backend) -> Tensor",
    _chosen,
    fake_product,
)
refuse_gradient("invariant_linear")
_invariant_linear = step("invariant_linear", _check)
