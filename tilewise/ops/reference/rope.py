"""The launcher of rope for backend="reference": float64, rounded to the dtype of x."""

from __future__ import annotations

from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.reference import rope


def why_not(spec: ElementSpec) -> str | None:
    """Return None, as the oracle computes every call."""
    return None


def launch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x rotated in float64, rounded to x's dtype."""
    turned = rope.apply_rope(x.double(), cos.double(), sin.double(), interleaved=interleaved)
    return turned.to(x.dtype).contiguous()
