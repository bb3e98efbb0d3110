"""backend="reference" of invariant_linear: the sums of `linear`, which float64 makes exact enough."""

from __future__ import annotations

from tilewise.ops._reference.linear import launch, why_not

__all__ = ["launch", "why_not"]
