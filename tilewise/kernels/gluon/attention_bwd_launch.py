"""Launch Hopper's backward pass: choose the kernels, allocate, fill the grids.

The contract is that of `kernels.triton.attention`: `why_not_bwd` refuses with a reason,
`launch_bwd` runs a call.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon._bwd_walk import BwdVariant, Sequences
from tilewise.kernels.gluon._descriptors import descriptor, row_descriptor, why_no_descriptor
from tilewise.kernels.gluon._launch import launch
from tilewise.kernels.gluon.attention_bwd import attention_bwd_kernel
from tilewise.kernels.gluon.attention_bwd_rows import (
    attention_bwd_after_kernel,
    attention_bwd_before_kernel,
)
from tilewise.kernels.spec import AttentionSpec, MaskTensors
from tilewise.kernels.triton._geometry import dense, device_of

__all__ = ["launch_bwd", "why_not_bwd"]

_LOG2E = math.log2(math.e)
_UNIT = 8  # elements; TMA wants strides in multiples of 16 bytes
_KEYS = 128  # of a tile
_PADDING = 128  # rows of packed sequences start on multiples of it in buffers
_ELEMENTS = 4096  # of a tile of the kernels before and after
_ORDER = "first"
_HEADS_PER_SECTION = 4  # of a packed batch, whose tiles of all sequences are launched together


class BwdScores(NamedTuple):
    """How products q . k become logits."""

    scale: float
    scale_log2: float


class _Rows(NamedTuple):
    """Row terms, float32 (planes, rows): a plane a head, padded as in `_bwd_walk`."""

    lse_log2: Tensor
    delta: Tensor
    dq_sum: Tensor  # (planes, rows, d)
    turns: Tensor | None  # int32 (planes, rows / tile_m): CTAs that have added to a tile of dq


def why_not_bwd(spec: AttentionSpec) -> str | None:
    """Say why these kernels cannot run the backward pass of `spec`, or return None."""
    if not device.has_triton():
        return "triton is not installed"
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype must be float16 or bfloat16, got {spec.dtype}"
    for name, width in (("head_dim", spec.head_dim), ("v_head_dim", spec.v_head_dim)):
        if width % _UNIT or not 8 <= width <= 128:
            return f"{name} must be a multiple of 8 up to 128, got {width}"
    if spec.softcap or spec.has_alibi or spec.has_bias or spec.mask_tile or spec.dropout_p:
        return "not built yet"
    right = 0 <= spec.window_right < spec.max_seqlen_q - 1
    left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    if spec.deterministic and not right and (left or spec.is_varlen or spec.has_seqlens_k):
        return "not built yet: reproducible without a diagonal"
    return None


def launch_bwd(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    bias: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    philox: Tensor | None = None,
    mask: MaskTensors | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Run the backward pass.

    Args:
        do: gradient of o, any strides.
        dlse: gradient of lse, None for zero.
        o, lse: of the forward pass.

    Returns:
        dq, dk, dv like q, k, v; dbias like bias where spec.needs_dbias, else None; dsinks (Hq,)
        float32 or None.
    """
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return _nothing_seen(q, k, v, dlse, sinks, spec)
    q, k, v, do, o = (_readable(x) for x in (q, k, v, do, o))
    sequences = Sequences(dense(cu_seqlens_q), dense(cu_seqlens_k), dense(seqlens_k))
    allocate = torch.zeros if spec.is_varlen else torch.empty
    dq, dk, dv = (allocate(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    variant = variant_of(spec, _together(q, spec))
    with device_of(q):
        rows = launch_before(o, do, lse, dlse, spec, sequences, variant)
        launch_main(do, q, k, v, dk, dv, rows, spec, sequences, variant)
        launch_after(rows, dq, spec, sequences, variant)
    dsinks = None if sinks is None else _sink_gradient(sinks, rows)
    return dq, dk, dv, None, dsinks


def order_of(spec: AttentionSpec, together: int, right: bool, left: bool) -> tuple[str, bool]:
    """Return the order of the sums of dq, and whether the last tiles of keys start first.

    Who waits for a CTA that is launched later relies on its running at the same time; the last
    tiles first, everybody waits only for those launched before.
    """
    lengths_vary = spec.is_varlen or spec.has_seqlens_k
    order = "all" if spec.deterministic else _ORDER
    if not right and (left or lengths_vary):
        return "any", False
    if spec.is_varlen and not spec.deterministic:
        return "any", False
    return order, right and (spec.is_varlen or triton.cdiv(spec.max_seqlen_k, _KEYS) > together)


def variant_of(spec: AttentionSpec, together: int = 132) -> BwdVariant:
    """Return the code that `spec` needs; a window that hides nothing is compiled away."""
    d = 64 if max(spec.head_dim, spec.v_head_dim) <= 64 else 128
    lengths_vary = spec.is_varlen or spec.has_seqlens_k
    left = 0 <= spec.window_left < spec.max_seqlen_k - 1
    right = 0 <= spec.window_right < spec.max_seqlen_q - 1
    order, last_first = order_of(spec, together, right, left)
    return BwdVariant(
        # Measured on an H200 (bf16, 16,384 tokens, hidden 2,048; 2026-11-20).
        tile_m=128 if d == 64 else 64,
        d=d,
        width=spec.head_dim,
        v_width=spec.v_head_dim,
        stages=2,
        two_loops=d == 128 and (right or order == "any") and not (left and order == "all"),
        left=left,
        right=right,
        tail=lengths_vary or spec.max_seqlen_k % _KEYS > 0,
        packed=spec.is_varlen,
        ragged=spec.has_seqlens_k,
        order=order,
        last_first=last_first,
    )


def launch_before(
    o: Tensor,
    do: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    spec: AttentionSpec,
    sequences: Sequences,
    variant: BwdVariant,
) -> _Rows:
    """Return the row terms and the sum of dq, which is zero where adding starts at once."""
    planes, count = _planes(o, spec)
    lse_log2, delta = torch.empty((2, planes, count), dtype=torch.float32, device=o.device)
    if spec.is_varlen and spec.has_sinks:  # torch sums them, gaps between sequences too
        lse_log2.fill_(math.inf)
        delta.zero_()
    dq_sum = torch.empty((planes, count, variant.d), dtype=torch.float32, device=o.device)
    turns = None
    if variant.order != "any":
        shape = (planes, count // variant.tile_m)
        turns = torch.empty(shape, dtype=torch.int32, device=o.device)
    lse, dlse = lse.contiguous(), dense(dlse)
    d = triton.next_power_of_2(spec.v_head_dim)
    tile = _ELEMENTS // d
    lse_batch, lse_head = (0, lse.stride(0)) if spec.is_varlen else lse.stride()[:2]
    launch(
        attention_bwd_before_kernel,
        triton.cdiv(_padded(spec.max_seqlen_q), tile) * spec.batch * spec.num_q_heads,
        o, do, lse, dlse, lse_log2, delta, dq_sum if turns is None else None, turns,
        sequences.cu_q, spec.batch, spec.num_q_heads, spec.max_seqlen_q, count,
        *_strides(o, spec), *_strides(do, spec), lse_batch, lse_head,
        WIDTH=spec.v_head_dim, D=d, D_SUM=variant.d, UNIT=_UNIT, TILE_M=variant.tile_m,
        TILE=tile,
    )  # fmt: skip
    return _Rows(lse_log2, delta, dq_sum, turns)


def launch_after(
    rows: _Rows, dq: Tensor, spec: AttentionSpec, sequences: Sequences, variant: BwdVariant
) -> None:
    """Round the sum of dq."""
    tile = _ELEMENTS // variant.d
    launch(
        attention_bwd_after_kernel,
        triton.cdiv(spec.max_seqlen_q, tile) * spec.batch * spec.num_q_heads,
        rows.dq_sum, rows.turns, dq, sequences.cu_q, spec.batch, spec.num_q_heads,
        spec.max_seqlen_q, rows.dq_sum.shape[1], *_strides(dq, spec), spec.softmax_scale,
        WIDTH=spec.head_dim, D=variant.d, UNIT=_UNIT, TILE_M=variant.tile_m, TILE=tile,
    )  # fmt: skip


def launch_main(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    rows: _Rows,
    spec: AttentionSpec,
    sequences: Sequences,
    variant: BwdVariant,
) -> None:
    """Fill dk and dv, and add to the sum of dq."""
    m, d = variant.tile_m, variant.d
    num_tiles = triton.cdiv(spec.max_seqlen_k, _KEYS)
    heads = spec.batch * spec.num_kv_heads
    section = min(heads, _HEADS_PER_SECTION * spec.batch) if spec.is_varlen else 1
    launch(
        attention_bwd_kernel,
        num_tiles * heads,
        descriptor(q, m, d), descriptor(k, _KEYS, d), descriptor(v, _KEYS, d), descriptor(do, m, d),
        descriptor(rows.dq_sum.transpose(0, 1), m, d),
        descriptor(dk, _KEYS // 2, d), descriptor(dv, _KEYS // 2, d),
        row_descriptor(rows.lse_log2, m), row_descriptor(rows.delta, m), dk, dv, rows.turns,
        sequences,
        spec.batch, spec.num_kv_heads, spec.group_size, spec.max_seqlen_q, spec.max_seqlen_k,
        spec.window_left, spec.window_right, num_tiles, section,
        _together(q, spec), rows.dq_sum.shape[1],
        BwdScores(spec.softmax_scale, spec.softmax_scale * _LOG2E), variant=variant,
    )  # fmt: skip


def _nothing_seen(
    q: Tensor, k: Tensor, v: Tensor, dlse: Tensor | None, sinks: Tensor | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor, Tensor, None, Tensor | None]:
    """Return the gradients of a call without queries or keys: only sinks may have one."""
    dsinks = None
    if sinks is not None:
        axes = (1,) if spec.is_varlen else (0, 2)
        dsinks = torch.zeros_like(sinks) if dlse is None else dlse.sum(dim=axes)
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v), None, dsinks


def _readable(x: Tensor) -> Tensor:
    """Return x, or a copy where TMA cannot read x."""
    return x if x.stride(-1) == 1 and why_no_descriptor(x) is None else x.contiguous().clone()


def _together(x: Tensor, spec: AttentionSpec) -> int:
    """Return how many CTAs run at the same time; other kernels may hold some of the device."""
    count = device.sm_count_of(x.device)
    return count if spec.deterministic else count // 2


def _padded(count: int) -> int:
    return triton.cdiv(count, _PADDING) * _PADDING


def _planes(o: Tensor, spec: AttentionSpec) -> tuple[int, int]:
    """Return how many planes of row terms there are, and their rows."""
    if spec.is_varlen:
        return spec.num_q_heads, _padded(o.shape[0] + spec.batch * _PADDING)
    return spec.batch * spec.num_q_heads, _padded(spec.max_seqlen_q)


def _strides(x: Tensor, spec: AttentionSpec) -> tuple[int, int, int]:
    """Return the (batch, row, head) strides of (B, S, H, D) or (T, H, D), in units."""
    batch, row, head = (0, *x.stride()[:2]) if spec.is_varlen else x.stride()[:3]
    return batch // _UNIT, row // _UNIT, head // _UNIT


def _sink_gradient(sinks: Tensor, rows: _Rows) -> Tensor:
    """Return dsinks (Hq,): a sink is one more probability of each row, with a value of zero."""
    planes = rows.delta.shape[0]
    of_planes = sinks.float().repeat(planes // len(sinks)).unsqueeze(-1)
    p_sink = torch.exp2(of_planes * _LOG2E - rows.lse_log2)
    return -(p_sink * rows.delta).sum(dim=1).view(-1, len(sinks)).sum(dim=0)
