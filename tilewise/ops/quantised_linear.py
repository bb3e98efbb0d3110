"""quantised_linear(): a product with a weight of 8 or 4 bits, which stays so narrow in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.quantised_weight import QuantisedWeight
from tilewise.kernels.spec import QuantisedLinearSpec
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.step import register_step, step

__all__ = ["placed", "quantised_linear", "spec_of"]


def quantised_linear(
    x: Tensor,
    weight: QuantisedWeight,
    bias: Tensor | None = None,
    *,
    batch_invariant: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Compute y = x W^T + bias for a quantised W, see `QuantisedWeight`.

    Values of W are computed tile by tile and rounded to x's dtype; products are summed in float32.
    More than 512 rows are rounded to e4m3 on Hopper where the format does so (`rounds_rows`).
    Nothing is differentiable.

    Args:
        x: (..., K), float32, float16 or bfloat16, last dim contiguous.
        weight: (N, K), all of its tensors contiguous and on x's device.
        bias: (N,), the dtype of x; None is 0.
        batch_invariant: True if a row's bits must not depend on the number of others.
        backend: "gluon", "triton", "cpu" or "reference"; None chooses by the device.

    Returns:
        (..., N), a new contiguous tensor of x's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Example:
        >>> y = quantised_linear(x, weight)  # x (4, 1024), weight.shape (4096, 1024)
    """
    y: Tensor = _quantised_linear(x, *arguments_of(weight), bias, batch_invariant, backend)
    return y


def arguments_of(weight: QuantisedWeight) -> tuple[Any, ...]:
    """Return the fields of a weight as flat arguments of a registered op, in `schema_of`'s order.

    `weight_of` is the inverse.
    """
    return (
        weight.codes,
        weight.scales,
        *weight.block,
        weight.table,
        weight.zeros,
        weight.minimums,
        weight.outer,
        weight.outer_minimums,
        *weight.outer_block,
        weight.permutation,
        str(weight.computed).removeprefix("torch."),
        weight.in_lanes,
        weight.rounds_rows,
    )


def schema_of(prefix: str = "") -> str:
    """Return the part of a torch schema that declares the arguments of a quantised weight.

    Args:
        prefix: a text that all names of the arguments begin with.
    """
    kinds = (
        "Tensor codes, Tensor scales, int rows, int columns, float[]? table, Tensor? zeros, "
        "Tensor? minimums, Tensor? outer, Tensor? outer_minimums, int outer_rows, "
        "int outer_columns, Tensor? permutation, str computed, bool in_lanes, bool rounds_rows"
    )
    named = (argument.rsplit(" ", 1) for argument in kinds.split(", "))
    return ", ".join(f"{kind} {prefix}{name}" for kind, name in named)


NUM_ARGUMENTS = schema_of().count(",") + 1
"""The arguments of a weight."""


def weight_of(
    codes: Tensor,
    scales: Tensor,
    rows: int,
    columns: int,
    table: Sequence[float] | None,
    zeros: Tensor | None,
    minimums: Tensor | None,
    outer: Tensor | None,
    outer_minimums: Tensor | None,
    outer_rows: int,
    outer_columns: int,
    permutation: Tensor | None,
    computed: str,
    in_lanes: bool,
    rounds_rows: bool,
) -> QuantisedWeight:
    """Return the QuantisedWeight that `arguments_of` has taken apart; the inverse of that
    function."""
    return QuantisedWeight(
        codes,
        scales,
        (rows, columns),
        None if table is None else tuple(table),
        zeros,
        minimums,
        outer,
        outer_minimums,
        (outer_rows, outer_columns),
        permutation,
        getattr(torch, computed),
        in_lanes,
        rounds_rows,
    )


def spec_of(
    x: Tensor, weight: QuantisedWeight, *, batch_invariant: bool = False
) -> QuantisedLinearSpec:
    """Return the hashable description of x (..., K) times a quantised weight (N, K).

    Backends and kernels are chosen by it. The number of rows of x is rounded up to a power of two,
    so that few descriptions differ.

    Args:
        batch_invariant: True if a row's bits may not depend on the number of rows.
    """
    zeros, minimums = (None if t is None else t.dtype for t in (weight.zeros, weight.minimums))
    return QuantisedLinearSpec(
        x.device.type,
        x.dtype,
        weight.codes.dtype,
        *weight.shape,
        weight.block,
        weight.outer_block,
        weight.scales.dtype,
        zeros,
        minimums,
        has_table=weight.table is not None,
        has_outer=weight.outer is not None,
        has_outer_minimums=weight.outer_minimums is not None,
        has_permutation=weight.permutation is not None,
        rows=1 << max(x.shape[:-1].numel() - 1, 0).bit_length(),
        batch_invariant=batch_invariant,
        in_lanes=weight.in_lanes,
        rounds_rows=weight.rounds_rows,
    )


def placed(weight: QuantisedWeight) -> QuantisedWeight:
    """Return a weight whose codes are in the order in which products on its device read them.

    On a GPU it is the weight itself where the kernel that reads lanes cannot run: on other GPUs
    than Hopper's, for formats without such a kernel, or for scales above 2 ** 65.
    """
    if weight.device.type != "cuda":
        return weight.columns()
    row = torch.empty((1, weight.shape[1]), dtype=torch.bfloat16, device="meta")
    spec = replace(spec_of(row, weight), device_type="cuda", in_lanes=True)
    if dispatch.refusal("quantised_linear", "gluon", spec) is not None or has_huge_scales(weight):
        return weight
    return weight.lanes()


def has_huge_scales(weight: QuantisedWeight) -> bool:
    """Return whether a weight has a scale in E8M0 above 2 ** 65.

    Such a scale is too large for kernels that multiply it into 16-bit operands. It is False for
    scales of another dtype, on "meta", or without elements; otherwise the values are read, which
    waits for the device.
    """
    scales = weight.scales
    if scales.dtype != torch.float8_e8m0fnu or scales.is_meta or scales.numel() == 0:
        return False
    return bool(scales.view(torch.uint8).max() > _MOST_EXPONENT)


_MOST_EXPONENT = 127 + 65


def _check(x: Tensor, *arguments: Any) -> None:
    *of_weight, bias, _, backend = arguments
    weight = weight_of(*of_weight)
    checks.check_float("x", x)
    if x.dim() < 1 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be (..., {weight.shape[1]}), got shape {tuple(x.shape)}")
    checks.check_last_dim_contiguous("x", x)
    weight.check()
    for name, tensor in weight.tensors().items():
        checks.check_device(f"weight.{name}", tensor, x.device)
        if not tensor.is_contiguous():
            raise ValueError(f"weight.{name} must be contiguous, got strides {tensor.stride()}")
    if bias is not None:
        checks.check_same_dtype("bias", bias, x.dtype)
        checks.check_shape("bias", bias, (weight.shape[0],))
        checks.check_device("bias", bias, x.device)
        checks.check_last_dim_contiguous("bias", bias)
    dispatch.check_backend_name(backend)


def _chosen(x: Tensor, *arguments: Any) -> partial[Tensor]:
    *of_weight, bias, batch_invariant, backend = arguments
    weight = weight_of(*of_weight)
    spec = spec_of(x, weight, batch_invariant=batch_invariant)
    name = dispatch.choose("quantised_linear", spec, backend)
    launch = dispatch.kernel_module("quantised_linear", name).launch
    return partial(launch, x, weight, bias, batch_invariant)


def _fake(x: Tensor, codes: Tensor, *_: object) -> Tensor:
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


register_step(
    f"quantised_linear(Tensor x, {schema_of()}, Tensor? bias, bool batch_invariant, "
    "str? backend) -> Tensor",
    _chosen,
    _fake,
)
refuse_gradient("quantised_linear")
_quantised_linear = step("quantised_linear", _check)
