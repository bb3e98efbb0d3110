"""quantised_expert_mlp(): a mixture of feed-forward blocks with weights of 8 or 4 bits."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.quantised_weight import QuantisedWeight
from tilewise.kernels.spec import QuantisedExpertsSpec
from tilewise.ops import checks, dispatch, values
from tilewise.ops.derivatives import refuse_gradient
from tilewise.ops.expert_mlp import (
    ExpertActivation,
    check_activation,
    check_choices,
    check_shared,
    check_tokens,
)
from tilewise.ops.quantised_linear import (
    NUM_ARGUMENTS,
    arguments_of,
    has_huge_scales,
    schema_of,
    spec_of,
    weight_of,
)
from tilewise.ops.step import register_step, step

__all__ = ["placed_experts", "quantised_expert_mlp"]


def quantised_expert_mlp(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: QuantisedWeight,
    down: QuantisedWeight,
    *,
    inner_size: int,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
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
    """Compute `expert_mlp` with quantised weights, widened in registers only.

    Rows are sorted by expert on the device, and nothing waits for it; codes are widened in the
    registers of the multiplying warps. Nothing is differentiable.

    Args:
        x, chosen, weights, shared, shared_gate, activation, interleaved, limit, alpha,
            weighs_input, batch_invariant: as of `expert_mlp`.
        up: the experts' rows one below another, (N 2 I, E), or (N I, E) without gates; columns that
            are not read may follow, see `QuantisedWeight.padded`.
        down: likewise (N E, I).
        inner_size: I, the channels between both products.
        up_bias, down_bias: (N, 2 I) and (N, E), the dtype of x, contiguous; None is 0.
        backend: "gluon" or "reference"; None chooses.

    Returns:
        (T, E), a new contiguous tensor of x's dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Example:
        >>> y = quantised_expert_mlp(x, *choose_experts(router(x), 8), up, down, inner_size=768)
    """
    y: Tensor = _quantised_expert_mlp(
        x,
        chosen,
        weights,
        *arguments_of(up),
        *arguments_of(down),
        up_bias,
        down_bias,
        shared,
        shared_gate,
        inner_size,
        activation,
        interleaved,
        float(limit),
        float(alpha),
        weighs_input,
        batch_invariant,
        backend,
    )
    return y


def placed_experts(
    up: QuantisedWeight, down: QuantisedWeight, width: int, inner_size: int, dtype: torch.dtype
) -> tuple[QuantisedWeight, QuantisedWeight] | str:
    """Return (up, down) with the codes in the order in which the GPU's kernel reads them.

    Args:
        up, down: as of `quantised_expert_mlp`; on "meta" to learn only if the kernel can run.
        width, inner_size: E and I.
        dtype: the dtype of the tokens.

    Returns:
        The weights, padded and reordered; or a text that says why the kernel cannot compute them.
    """
    up, down = (weight if weight.in_lanes else weight.padded() for weight in (up, down))
    row = torch.empty((1, width), dtype=dtype, device="meta")
    spec = _spec_of(row, up, down, inner_size, device_type="cuda", in_lanes=True)
    reason = dispatch.refusal("quantised_expert_mlp", "gluon", spec)
    if reason is None and (has_huge_scales(up) or has_huge_scales(down)):
        reason = "scales must be at most 2 ** 65"
    return (up.lanes(), down.lanes()) if reason is None else reason


def _spec_of(
    x: Tensor, up: QuantisedWeight, down: QuantisedWeight, inner_size: int, **changed: Any
) -> QuantisedExpertsSpec:
    num_experts = down.shape[0] // x.shape[1]
    first, second = (replace(spec_of(x, weight), **changed) for weight in (up, down))
    outputs = up.shape[0] // num_experts
    return QuantisedExpertsSpec(
        first.device_type, x.dtype, first, second, outputs, x.shape[1], inner_size
    )


def _check(x: Tensor, chosen: Tensor, weights: Tensor, *given: Any) -> None:
    up = weight_of(*given[:NUM_ARGUMENTS])
    down = weight_of(*given[NUM_ARGUMENTS : 2 * NUM_ARGUMENTS])
    up_bias, down_bias, shared, shared_gate, inner_size, activation, *_, backend = given[
        2 * NUM_ARGUMENTS :
    ]
    width = check_tokens(x, chosen)
    if width == 0 or down.shape[0] % width:
        raise ValueError(f"down must have a multiple of {width} rows, got {down.shape[0]}")
    num_experts = down.shape[0] // width
    check_choices(len(x), chosen, weights, num_experts)
    if inner_size < 1 or up.shape[0] not in (
        num_experts * inner_size,
        num_experts * 2 * inner_size,
    ):
        raise ValueError(
            f"up must have {num_experts} times {inner_size} or {2 * inner_size} rows, "
            f"got {up.shape[0]}"
        )
    outputs = up.shape[0] // num_experts
    tensors = {"chosen": chosen, "weights": weights}
    for name, weight, columns in (("up", up, width), ("down", down, inner_size)):
        weight.check(name)
        padded = weight.shape[1]
        if not columns <= padded < columns + 128:
            raise ValueError(f"{name} must have {columns} columns, got {padded}")
        tensors |= {f"{name}.{part}": tensor for part, tensor in weight.tensors().items()}
    for name, bias, rows in (("up_bias", up_bias, outputs), ("down_bias", down_bias, width)):
        if bias is not None:
            checks.check_same_dtype(name, bias, x.dtype)
            checks.check_shape(name, bias, (num_experts, rows))
            tensors[name] = bias
    for name, tensor in tensors.items():
        checks.check_device(name, tensor, x.device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    check_shared(x, shared, shared_gate)
    check_activation(activation, has_gates=outputs != inner_size)
    dispatch.check_backend_name(backend)
    if values.WAITS:
        values.check_ids("chosen", chosen, 0, num_experts - 1)


def _chosen(x: Tensor, chosen: Tensor, weights: Tensor, *given: Any) -> partial[Tensor]:
    up = weight_of(*given[:NUM_ARGUMENTS])
    down = weight_of(*given[NUM_ARGUMENTS : 2 * NUM_ARGUMENTS])
    up_bias, down_bias, shared, shared_gate, inner_size, *options, backend = given[
        2 * NUM_ARGUMENTS :
    ]
    names = ("activation", "interleaved", "limit", "alpha", "weighs_input", "batch_invariant")
    name = dispatch.choose("quantised_expert_mlp", _spec_of(x, up, down, inner_size), backend)
    return partial(
        dispatch.kernel_module("quantised_expert_mlp", name).launch,
        x,
        chosen,
        weights,
        up,
        up_bias,
        down,
        down_bias,
        shared,
        shared_gate,
        inner=inner_size,
        **dict(zip(names, options, strict=True)),
    )


def _fake(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


register_step(
    f"quantised_expert_mlp(Tensor x, Tensor chosen, Tensor weights, {schema_of('up_')}, "
    f"{schema_of('down_')}, Tensor? up_bias, Tensor? down_bias, Tensor? shared, "
    "Tensor? shared_gate, int inner_size, str activation, bool interleaved, float limit, "
    "float alpha, bool weighs_input, bool batch_invariant, str? backend) -> Tensor",
    _chosen,
    _fake,
)
refuse_gradient("quantised_expert_mlp")
_quantised_expert_mlp = step("quantised_expert_mlp", _check)
