"""backend="reference" of quantised_expert_mlp: `expert_mlp` of the format's values."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tilewise.kernels.quantised_weight import QuantisedWeight
from tilewise.kernels.spec import ElementSpec
from tilewise.ops.reference import expert_mlp

__all__ = ["launch", "why_not"]


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(
    x: Tensor,
    chosen: Tensor,
    weights: Tensor,
    up: QuantisedWeight,
    up_bias: Tensor | None,
    down: QuantisedWeight,
    down_bias: Tensor | None,
    shared: Tensor | None,
    shared_gate: Tensor | None,
    *,
    inner: int,
    **options: Any,
) -> Tensor:
    """Dequantise all experts and compute y (T, E) in float64, as `ops.expert_mlp` defines it."""
    num_experts = down.shape[0] // x.shape[1]

    def wide(weight: QuantisedWeight, columns: int) -> Tensor:
        whole = weight.dequantise().double()[:, :columns]
        return whole.reshape(num_experts, -1, columns)

    return expert_mlp.launch(
        x,
        chosen,
        weights,
        wide(up, x.shape[1]),
        None,
        up_bias,
        wide(down, inner),
        None,
        down_bias,
        shared,
        shared_gate,
        **options,
    )
