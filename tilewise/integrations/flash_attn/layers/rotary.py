"""apply_rotary_emb() under flash-attn's names, on the kernel of `tilewise.apply_rope`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise import ops
from tilewise.ops import checks

__all__ = ["apply_rotary_emb", "apply_rotary_emb_func"]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first r channels of each head by the angles of its position.

    Token i of sequence b is at position i + seqlen_offsets[b]; positions beyond the tables are not
    rotated. Differentiable in x, also in place.

    Args:
        x: (B, S, H, D), or with cu_seqlens packed (T, H, D); any float dtype.
        cos, sin: (R, r / 2), a row a position, of any float dtype; r <= D, R >= S.
        interleaved: True to pair channels (2i, 2i + 1), False for (i, i + r / 2).
        inplace: True to write the result into x and return x. If x needs a gradient and torch lets
            no graph write to it (a leaf, a view of one, one of several views such as those of
            unbind), a tensor is returned that shares x's memory and through which the gradient
            flows.
        seqlen_offsets: int, or (B,) of an integer dtype.
        cu_seqlens: (B + 1,) int32, start at 0, never decrease.
        max_seqlen: the longest sequence, must come with cu_seqlens; nothing here depends on it.

    Returns:
        A tensor of x's shape and dtype.

    Raises:
        ValueError, TypeError: an argument breaks a rule above; the message names it.

    Source: the interface of flash-attn 2.8; RoFormer (2021), equation 34.

    Example:
        >>> angles = torch.arange(128)[:, None] * 10000.0 ** (-torch.arange(32) / 32)
        >>> q = apply_rotary_emb(torch.randn(2, 128, 8, 64), angles.cos(), angles.sin())
    """
    checks.check_dims("x", x, "(B, S, H, D)" if cu_seqlens is None else "(T, H, D)")
    for name, table in (("cos", cos), ("sin", sin)):
        checks.check_dims(name, table, "(R, r / 2)")
        checks.check_float(name, table)
        checks.check_shape(name, table, tuple(cos.shape))
        checks.check_device(name, table, x.device)
    positions = _positions(x, seqlen_offsets, cu_seqlens, max_seqlen, cos.shape[0])
    # Add a row with the angle 0, for positions beyond the tables.
    wide = torch.promote_types(cos.dtype, torch.float32)
    ends = (cos.new_ones(1, cos.shape[1]), sin.new_zeros(1, sin.shape[1]))
    tables = (
        torch.cat([table, end])[positions].to(wide)
        for table, end in zip((cos.detach(), sin.detach()), ends, strict=True)
    )
    rotated = ops.apply_rope(checks.with_packed_rows(x), *tables, interleaved=interleaved)
    if not inplace:
        return rotated
    try:
        return x.copy_(rotated)
    except RuntimeError:
        if not (x.requires_grad and torch.is_grad_enabled()):
            raise
    written: Tensor = _Written.apply(x, rotated)  # type: ignore[no-untyped-call, unused-ignore]
    return written


class _Written(torch.autograd.Function):
    """Overwrite x with the rotated x, and pass on the gradient of the rotated x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotated: Tensor) -> Tensor:
        # Not marked as dirty, which torch would refuse. The write is counted all the same, so that
        # a graph which needs the old x raises an error in its backward pass.
        return x.copy_(rotated)

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[None, Tensor]:
        return None, do


apply_rotary_emb_func = apply_rotary_emb


def _positions(
    x: Tensor,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    max_seqlen: int | None,
    num_rows: int,
) -> Tensor:
    """Return the index of each token's row in tables of num_rows rows: (S,), (B, S) or (T,).

    Positions outside of the tables get num_rows. Raises if the lengths do not fit or max_seqlen is
    missing.
    """
    if cu_seqlens is None:
        batch, seqlen = x.shape[:2]
        if num_rows < seqlen:
            raise ValueError(f"cos must have at least {seqlen} rows, got {num_rows}")
        positions = torch.arange(seqlen, device=x.device)
    else:
        if max_seqlen is None:
            raise ValueError("max_seqlen must be given with cu_seqlens, got None")
        batch = cu_seqlens.shape[0] - 1
        checks.check_int32("cu_seqlens", cu_seqlens, (batch + 1,), x.device)
        token = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(
            max=max(batch - 1, 0)
        )
        positions = token - cu_seqlens[sequence]
    if isinstance(seqlen_offsets, Tensor):
        if seqlen_offsets.is_floating_point():
            raise TypeError(f"seqlen_offsets must be integers, got {seqlen_offsets.dtype}")
        checks.check_shape("seqlen_offsets", seqlen_offsets, (batch,))
        if cu_seqlens is None:
            positions = positions + seqlen_offsets.view(-1, 1)
        elif batch:
            positions = positions + seqlen_offsets[sequence]
    else:
        positions = positions + seqlen_offsets
    return torch.where((positions >= 0) & (positions < num_rows), positions, num_rows)
