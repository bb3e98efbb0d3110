"""linear(): a product of few rows with a weight matrix, at the speed of reading the weights."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.errors import UnsupportedError
from tilewise.kernels import device
from tilewise.kernels.spec import LinearSpec
from tilewise.kernels.tiles import invariant_many, linear_rows
from tilewise.kernels.tiles.linear import MOST_ROWS, pays
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.step import register_step, step

MOST_LINEAR_ROWS = MOST_ROWS


def check_product(
    x: Tensor, weight: Tensor, bias: Tensor | None, most_rows: int | None = None
) -> None:
    """Raise unless x (..., K), weight (N, K) and bias (N,) or None fit together.

    All must have one float dtype and device and contiguous last dims. The error is TypeError for a
    dtype, otherwise ValueError.

    Args:
        most_rows: the largest number of rows of x in all; None for no limit.
    """
    checks.check_float("x", x)
    if x.dim() < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must be (..., K) with K at least 1, got shape {tuple(x.shape)}")
    rows = x.numel() // x.shape[-1]
    if most_rows is not None and rows > most_rows:
        raise ValueError(f"x must have at most {most_rows} rows, got {rows}")
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


def fake_product(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    """Return an uninitialised (..., N) tensor of x's dtype, for x (..., K) and weight (N, K).

    It is the fake implementation of products: what a trace sees in place of the result.
    """
    return torch.empty((*x.shape[:-1], weight.shape[0]), dtype=x.dtype, device=x.device)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, backend: str | None = None
) -> Tensor:
    """Compute y = x weight^T + bias for at most 32 rows of x.

    Products of 16-bit numbers are summed in float32, in an order that depends on the shape of the
    weight alone: a row of y has the same bits whatever rows are beside it. Nothing is
    differentiable. `linear_pays` tells where this is faster than `torch.nn.functional.linear`.

    Args:
        x: (..., K), float16 or bfloat16, at most 32 rows in all, last dim contiguous.
        weight: (N, K), the dtype of x, last dim contiguous.
        bias: (N,), the dtype of x.
        backend: "gluon" (on Hopper), "triton" or "reference"; None chooses by the weight alone.
            There is no kernel for CPUs.

    Returns:
        (..., N), a new contiguous tensor of x's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Example:
        >>> y = linear(x, layer.weight)  # x (4, 1024) on a GPU
    """
    y: Tensor = _linear(x, weight, bias, backend)
    return y


def linear_parts(x: Tensor, weight: Tensor, *, backend: str | None = None) -> Tensor:
    """Compute x weight^T as partial sums over parts of K, which the caller adds, for few rows.

    To add the parts itself, the kernel's programs would have to synchronise; an op that reads the
    result anyway adds them at no cost: `ops.add_parts_rms_norm`. Added in their order and rounded
    once they are `linear(x, weight)`, bit for bit. Nothing is differentiable.

    Args:
        x, weight: as in `linear`; at most `most_linear_parts_rows` rows.
        backend: "gluon" (on Hopper) or "reference", whose only part is the whole; None is gluon.

    Returns:
        (P, ..., N) float32, P by the shape of the weight alone.

    Raises:
        ValueError, TypeError, UnsupportedError: as `linear`.

    Example:
        >>> parts = linear_parts(x, layer.weight)  # x (4, 2048) on a GPU
    """
    parts: Tensor = _linear_parts(x, weight, backend)
    return parts


def most_linear_parts_rows() -> int:
    """Return the largest number of rows that `linear_parts` takes.

    It is larger than the 32 of `linear`, since `linear_parts` also computes the parts of
    `invariant_linear`.
    """
    return max(MOST_LINEAR_ROWS, invariant_many.MOST_LEFT)


def linear_leaves_parts(weight: Tensor) -> bool:
    """Return whether `linear_parts` is faster than `linear` for a few rows times this weight.

    It is faster only if the next op, such as `add_parts_rms_norm`, adds the partial sums itself.
    False for weights that are not of 16 bits on a GPU where the "gluon" backend runs, and for
    shapes with one part.

    Args:
        weight: (N, K), the weight of the product.
    """
    if not weight.is_cuda or weight.dtype not in (torch.float16, torch.bfloat16):
        return False
    return linear_rows.leaves_parts(*weight.shape) and _by_rows(spec_of(weight))


def linear_pays(weight: Tensor) -> bool:
    """Return whether `linear` is faster than cuBLAS for a weight (N, K), by tables of measurements.

    False for a weight that is on no GPU or not of 16 bits.
    """
    if not weight.is_cuda or weight.dtype not in (torch.float16, torch.bfloat16):
        return False
    if _by_rows(spec_of(weight)):
        return True
    return pays(weight.shape[0], weight.shape[1], device.arch_of(weight.device))


def spec_of(weight: Tensor) -> LinearSpec:
    """Return the hashable description of products with a weight (N, K), to choose a backend by."""
    outputs, channels = weight.shape
    step = weight.stride(0) if outputs > 1 else 0
    addressable = (weight.data_ptr() | step * weight.itemsize) % 16 == 0
    return LinearSpec(weight.device.type, weight.dtype, outputs, channels, addressable)


def _by_rows(spec: LinearSpec) -> bool:
    """Return whether the "gluon" kernel of Hopper is chosen for a weight and can run there.

    The table of measured shapes says where it is the fastest.
    """
    if not linear_rows.pays(spec.outputs, spec.channels):
        return False
    return dispatch.refusal("linear", "gluon", spec) is None


def _backend_of(spec: LinearSpec, backend: str | None) -> str | None:
    """Return the backend to ask for a product: `backend` if the caller named one.

    Otherwise it is "gluon" or "triton" on a GPU, by the table of measured shapes, and None, which
    is the first that does not refuse, on other devices.
    """
    if backend is not None or spec.device_type != "cuda":
        return backend
    return "gluon" if _by_rows(spec) else "triton"


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> None:
    check_product(x, weight, bias, MOST_LINEAR_ROWS)
    dispatch.check_backend_name(backend)


def _chosen(x: Tensor, weight: Tensor, bias: Tensor | None, backend: str | None) -> partial[Tensor]:
    spec = spec_of(weight)
    name = dispatch.choose("linear", spec, _backend_of(spec, backend))
    return partial(dispatch.kernel_module("linear", name).launch, x, weight, bias)


register_step(
    "linear(Tensor x, Tensor weight, Tensor? bias, str? backend) -> Tensor", _chosen, fake_product
)


def _check_parts(x: Tensor, weight: Tensor, backend: str | None) -> None:
    check_product(x, weight, None, most_linear_parts_rows())
    dispatch.check_backend_name(backend)
    if backend not in (None, "gluon", "reference"):
        raise UnsupportedError(f"linear_parts must run on gluon or reference, got {backend}")


def _chosen_parts(x: Tensor, weight: Tensor, backend: str | None) -> partial[Tensor]:
    name = dispatch.choose("linear", spec_of(weight), backend or "gluon")
    return partial(dispatch.kernel_module("linear", name).launch_parts, x, weight)


def _fake_parts(x: Tensor, weight: Tensor, backend: str | None) -> Tensor:
    outputs, channels = weight.shape
    count = 1
    if backend != "reference":
        count = linear_rows.parts_of(linear_rows.tile_of(outputs, channels), channels)
    return x.new_empty((count, *x.shape[:-1], outputs), dtype=torch.float32)


register_step(
    "linear_parts(Tensor x, Tensor weight, str? backend) -> Tensor", _chosen_parts, _fake_parts
)
refuse_gradient("linear")
refuse_gradient("linear_parts")
_linear, _linear_parts = step("linear", _check), step("linear_parts", _check_parts)
