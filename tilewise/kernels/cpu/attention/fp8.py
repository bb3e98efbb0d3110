"""Attention of e4m3 tensors on the CPU: dequantised to float32, see `kernels.dequantised`.

It is for correctness, not for speed. Probabilities are not rounded to e4m3, so o is nearer to the
rule than that of Hopper's kernels.
"""

from __future__ import annotations

import torch

from tilewise.kernels.cpu.attention import plan as attention
from tilewise.kernels.dequantised import DequantisedPlan
from tilewise.kernels.plan import Call, Refusal

__all__ = ["QUANTIZES", "plan_fwd"]

QUANTIZES = False  # takes e4m3 tensors with their scales only


def plan_fwd(call: Call) -> DequantisedPlan | Refusal:
    """Return the plan of o and lse of a call of `FP8_TENSORS`, e4m3 tensors with scales, which are
    dequantised to float32; or the refusal of the float32 planner."""
    return DequantisedPlan.of(call, attention.plan_fwd, torch.float32)
