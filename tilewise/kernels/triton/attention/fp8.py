"""Attention of e4m3 tensors on any GPU: dequantised to 16 bits, see `kernels.dequantised`.

x8 * scale is rounded to the dtype of o, 2 ** -9 of its value at most; e4m3 itself has 2 ** -4.
Probabilities are 16-bit numbers.
"""

from __future__ import annotations

from tilewise.kernels.dequantised import DequantisedPlan
from tilewise.kernels.plan import Call, Refusal
from tilewise.kernels.triton.attention import plan as attention

__all__ = ["QUANTIZES", "plan_fwd"]

QUANTIZES = False  # takes e4m3 tensors with their scales only


def plan_fwd(call: Call) -> DequantisedPlan | Refusal:
    """Return the plan of a call over e4m3 tensors, with results o and lse, or a Refusal.

    The plan dequantises q, k and v to the dtype of o, and runs 16-bit attention.
    """
    return DequantisedPlan.of(call, attention.plan_fwd, call.spec.o_dtype)
