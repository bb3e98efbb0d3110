"""Support of calls for kernels that compute element by element or row by row."""

from __future__ import annotations

import torch

from tilewise.kernels import device
from tilewise.kernels.spec import ElementSpec

__all__ = ["why_not"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def why_not(spec: ElementSpec) -> str | None:
    """Return why a Triton kernel of elements or rows cannot run a call, or None if it can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    if spec.dtype not in _DTYPES:
        return f"dtype must be float32, float16 or bfloat16, got {spec.dtype}"
    return None
