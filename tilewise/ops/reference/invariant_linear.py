"""The launcher of invariant_linear for backend="reference": that of `linear`, in float64."""

from __future__ import annotations

from tilewise.ops.reference.linear import launch, why_not

__all__ = ["launch", "why_not"]
