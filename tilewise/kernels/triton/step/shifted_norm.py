"""The launchers of `ops.shifted_rms_norm`: the kernel of `norm` scales by 1 + weight."""

from __future__ import annotations

from tilewise.kernels.triton.elements import why_not
from tilewise.kernels.triton.step.norm import (
    add_parts_shifted_rms_norm,
    add_shifted_rms_norm,
    shifted_rms_norm,
)

__all__ = ["add_parts_shifted_rms_norm", "add_shifted_rms_norm", "shifted_rms_norm", "why_not"]
