"""Plan the forward pass of wide heads on Hopper: which calls its kernel takes, what is launched."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.kernels.gluon.forward.kernel import Tile
from tilewise.kernels.gluon.forward.variant import choice
from tilewise.kernels.gluon.wide.kernel import KEYS, ROWS, STAGES, wide_fwd_kernel
from tilewise.kernels.host.descriptors import descriptor
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.spec import AttentionSpec, AttentionTensors

__all__ = ["TILE", "add_fwd", "is_wide", "why_not"]

_NARROWEST, _WIDEST = 264, 512
_LEFT, _PART = 256, 128  # channels of the parts of a tile
TILE = Tile(
    warpgroups=1,
    rows=ROWS.value,
    keys=KEYS.value,
    stages=STAGES.value,
    d=_WIDEST,
    d_high=0,
    dv=_WIDEST,
    o_columns=_LEFT,
    dynamic=True,
    ping_pong=False,
    q_in_registers=True,
    release_together=False,
    scale_late=False,
    registers=160,
    loader_registers=0,
)


def is_wide(spec: AttentionSpec) -> bool:
    """Return whether heads have more than 256 channels, too many for the kernel of all others."""
    return max(spec.head_dim, spec.v_head_dim) > _LEFT


def why_not(spec: AttentionSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can: on CUDA, in 16 bits, both
    head dims multiples of 8 from 264 to 512, at least 64 queries, a positive scale, and a dense
    call without lengths, bias, ALiBi, softcap, mask, dropout and row maxima."""
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if spec.dtype not in (torch.bfloat16, torch.float16):
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    for name, width in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
        if not _NARROWEST <= width <= _WIDEST or width % 8:
            return (
                f"{name} must be a multiple of 8 from {_NARROWEST} to {_WIDEST} where one is above "
                f"{_LEFT}, got {width}"
            )
    if spec.max_seqlen_q < ROWS.value:
        return f"wide heads must have at least {ROWS.value} queries, got {spec.max_seqlen_q}"
    if spec.softmax_scale <= 0.0:
        return f"softmax_scale must be positive in wide heads, got {spec.softmax_scale}"
    added = {
        "packed sequences": spec.is_varlen,
        "seqlens_k": spec.has_seqlens_k,
        "bias": spec.has_bias,
        "alibi_slopes": spec.has_alibi,
        "softcap": spec.softcap > 0,
        "a block mask": spec.mask_tile is not None,
        "dropout": spec.dropout_p > 0,
        "return_max_logits": spec.needs_max,
    }
    for name, is_asked in added.items():
        if is_asked:
            return f"{name} must be left out in wide heads"
    return None


def add_fwd(
    maker: Maker, spec: AttentionSpec, tensors: AttentionTensors, tile: Tile = TILE
) -> tuple[Tensor, Tensor]:
    """Add to the plan the launch of the forward pass with `maker`; return o like q with Dv channels
    and lse float32 (B, Hq, Sq). A call without rows is only filled."""
    q, heads, rows = tensors.q, spec.num_q_heads, spec.max_seqlen_q
    o_shape, lse_shape = (*q.shape[:-1], spec.v_head_dim), (spec.batch, heads, rows)
    if spec.batch * heads * rows == 0:
        lse = maker.full(lse_shape, -math.inf, torch.float32)
        return maker.full(o_shape, 0.0, q.dtype), lse
    o, lse = maker.empty(o_shape, q.dtype), maker.empty(lse_shape, torch.float32)
    k, v = (
        x if x.numel() > 0 else maker.full((*x.shape[:-3], 1, *x.shape[-2:]), 0.0, x.dtype)
        for x in tensors[1:3]
    )
    variant, numbers = choice(spec, tile, True, False)
    row_tiles = -(-rows // tile.rows)
    num_tiles = row_tiles * spec.batch * heads
    descriptors = [
        descriptor(maker.addressable(x), tile.rows, width)
        for x in (q, k, v)
        for width in (_LEFT, _PART)
    ]
    maker.launch(
        wide_fwd_kernel,
        num_tiles,
        *descriptors,
        *(descriptor(o, tile.rows, width) for width in (_LEFT, _PART)),
        lse,
        tensors.sinks,
        num_tiles,
        row_tiles,
        spec.batch * heads,
        *numbers[:9],
        heads * rows,
        rows,
        tile=tile,
        variant=variant,
    )
    return o, lse
