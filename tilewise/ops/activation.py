"""silu_mul(): the activation between the two products of a gated feed-forward block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.kernels.spec import ElementSpec
from tilewise.ops import checks, dispatch
from tilewise.ops.derivatives import lean
from tilewise.ops.library import register


def silu_mul(gate_up: Tensor, *, backend: str | None = None) -> Tensor:
    """Compute y = round(silu(gate)) * up, silu(x) = x / (1 + exp(-x)), in one kernel.

    silu is computed in float32 (float64 for float64) and rounded to the dtype of the input before
    it multiplies, as `torch.nn.functional.silu(gate) * up` does. Nothing is differentiable.

    Args:
        gate_up: (..., 2 I), any float dtype, last dim contiguous: I channels of the gate, then I
            of up.
        backend: "cpu", "triton" or "reference"; None chooses.

    Returns:
        (..., I), a new contiguous tensor of the same dtype.

    Raises:
        ValueError, TypeError, UnsupportedError: an argument breaks a rule above, or the backend
            cannot; the message names it.

    Source: Shazeer, 2020, "GLU variants improve transformer" (SwiGLU).

    Example:
        >>> y = silu_mul(torch.randn(3, 2 * 3072))
    """
    checks.check_float("gate_up", gate_up)
    if gate_up.dim() < 1 or gate_up.shape[-1] < 2 or gate_up.shape[-1] % 2:
        raise ValueError(f"gate_up must be (..., 2 I), got shape {tuple(gate_up.shape)}")
    checks.check_last_dim_contiguous("gate_up", gate_up)
    dispatch.check_backend_name(backend)
    y: Tensor = _silu_mul(gate_up, backend)
    return y


def _kernel(gate_up: Tensor, backend: str | None) -> Tensor:
    name = dispatch.choose("activation", ElementSpec(gate_up.device.type, gate_up.dtype), backend)
    y: Tensor = dispatch.kernel_module("activation", name).silu_mul(gate_up)
    return y


def _fake(gate_up: Tensor, *_: Any) -> Tensor:
    shape = (*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)


register("silu_mul(Tensor gate_up, str? backend) -> Tensor", _kernel, _fake)
_silu_mul = lean("silu_mul")
