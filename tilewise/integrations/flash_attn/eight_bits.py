"""Helpers of FlashAttention-3's functions for float8_e4m3fn tensors.

They attend in 8 bits, without a gradient, and check q_descale, k_descale and v_descale.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import ops
from tilewise.errors import UnsupportedError
from tilewise.integrations.flash_attn.rule import Rule
from tilewise.ops import checks

E4M3 = torch.float8_e4m3fn


def attend_in_8_bits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rule: Rule,
    descales: dict[str, Tensor | None],
    batch: int,
    pieces: int = 1,
    **lengths: Any,
) -> tuple[Tensor, Tensor]:
    """Attend with e4m3 tensors by `ops.attention_fp8`; return out and lse.

    The tensors are dense, or packed with cu_seqlens and maximal lengths in `lengths`. A backward
    pass through the results raises UnsupportedError.

    Args:
        rule: the window, scale and softcap of the call.
        descales: the scales of q, k and v by argument name, float32 (B, Hk); None is 1.
        batch: the number of sequences before they were cut.
        pieces: the number of pieces into which each of `batch` sequences is cut.
    """
    q_scale, k_scale, v_scale = (
        scale.repeat_interleave(pieces, 0)
        for scale in descales_of(batch, k.shape[-2], q.device, descales)
    )
    out, lse = ops.attention_fp8(
        q.detach(),
        k.detach(),
        v.detach(),
        window=rule.window,
        softmax_scale=rule.softmax_scale,
        softcap=rule.softcap,
        q_scale=q_scale.repeat_interleave(q.shape[-2] // k.shape[-2], 1),
        k_scale=k_scale,
        v_scale=v_scale,
        return_lse=True,
        **lengths,
    )
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        recorded: tuple[Tensor, Tensor] = _NoGradient.apply(out, lse, q, k, v)  # type: ignore[no-untyped-call, unused-ignore]
        return recorded
    return out, lse


class _NoGradient(torch.autograd.Function):
    """The identity on out and lse whose backward pass raises UnsupportedError: 8 bits have no
    gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, lse: Tensor, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        raise UnsupportedError(
            "q, k and v must not be float8_e4m3fn where a gradient is asked for, got them: there "
            "is none in 8 bits; train in bfloat16"
        )


def refuse_descales(q: Tensor, descales: dict[str, Tensor | None]) -> None:
    """Raise ValueError if a scale is given for queries that are not 8-bit."""
    for name, scale in descales.items():
        if scale is not None:
            raise ValueError(f"{name} must be None without 8-bit tensors, got one with {q.dtype}")


def descales_of(
    batch: int, num_kv_heads: int, device: torch.device, descales: dict[str, Tensor | None]
) -> list[Tensor]:
    """Return the scales of `descales` in its order, each float32 (B, Hk), ones for None.

    Raises if a scale has another dtype, shape or device.
    """
    scales = []
    for name, scale in descales.items():
        if scale is None:
            scale = torch.ones(batch, num_kv_heads, device=device)
        checks.check_same_dtype(name, scale, torch.float32)
        checks.check_shape(name, scale, (batch, num_kv_heads))
        checks.check_device(name, scale, device)
        scales.append(scale)
    return scales
