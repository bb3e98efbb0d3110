"""The launcher of quantised_linear for backend="reference": dequantised weights in float64."""

from __future__ import annotations

from torch import Tensor

from tilewise.kernels.quantised_weight import QuantisedWeight
from tilewise.kernels.spec import ElementSpec

__all__ = ["launch", "why_not"]


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(
    x: Tensor, weight: QuantisedWeight, bias: Tensor | None, batch_invariant: bool
) -> Tensor:
    """Return x W^T + bias in float64 of the format's values, rounded to x's dtype."""
    y = x.double() @ weight.dequantise().double().T
    return (y if bias is None else y + bias.double()).to(x.dtype)
