"""Plan attention of e4m3 tensors on Hopper.

What      quantises 16-bit inputs (`quantise`), or transposes e4m3 values, then starts the kernel.
Grid      see forward/fp8/kernel.py; two or three launches of the quantising kernels before it, or
          one.
One call  allocates the e4m3 copies and their scales in one piece, and o and lse.
Traffic   16-bit inputs twice, the e4m3 copies once each way, besides the kernel's own.
Numerics  see forward/fp8/kernel.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.attention.quantise import (
    Packed,
    Quantized,
    add_qkv,
    add_value_columns,
)
from tilewise.kernels.gluon.forward.fp8.kernel import attention_fp8_fwd_kernel
from tilewise.kernels.gluon.forward.fp8.tiles import HEAD_DIMS, Variant, variant_of
from tilewise.kernels.gluon.forward.launch import (
    WIDEST_SOFTCAP,
    add_sorted_tiles,
    counter_of,
    mask_strides,
)
from tilewise.kernels.host.descriptors import descriptor
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.plan import FP8_TENSORS, Call, LaunchPlan, Refusal
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, Fp8Spec, MaskTensors

__all__ = ["QUANTIZES", "made_fwd", "plan_fwd", "plan_quantized", "why_not"]

QUANTIZES = True  # takes 16-bit tensors, too

_HOPPER = 90
_LOG2E = math.log2(math.e)
_FOUR = 4
_MASK_TILE = (128, 128)
_UNLIMITED = 1 << 30  # keys on a side whose kernel does not look
_L2_BYTES = 16 << 20  # of keys and values at work at a time; the cache has 50 MB


def why_not(spec: AttentionSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can: on Hopper, with D = Dv of
    64, 128 or 256, mask tiles of 128 x 128, a bounded softcap and a positive scale."""
    if spec.device_type != "cuda":
        return f"device must be cuda, got {spec.device_type}"
    # Without a GPU at hand the answer is for Hopper, as that of the other backends is.
    arch = device.arch_of(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if arch != _HOPPER:
        return f"it needs Hopper (sm_90), got sm_{arch}"
    if spec.head_dim not in HEAD_DIMS or spec.v_head_dim != spec.head_dim:
        wanted = ", ".join(map(str, HEAD_DIMS))
        return f"both head dims must be one of {wanted}, got {spec.head_dim} and {spec.v_head_dim}"
    if spec.mask_tile not in (None, _MASK_TILE):
        return f"mask tiles must have 128 queries and keys, got {spec.mask_tile}"
    if spec.softcap > WIDEST_SOFTCAP:
        return f"softcap must be at most {WIDEST_SOFTCAP:g}, got {spec.softcap}"
    if spec.softmax_scale <= 0:
        return f"softmax_scale must be positive, got {spec.softmax_scale}"
    return None


def plan_fwd(call: Call) -> LaunchPlan | Refusal:
    """Return the plan of attention over 8-bit tensors, or why this kernel cannot run the call,
    whose tensors are `FP8_TENSORS`; the results are o and lse.

    q, k and v are of 16 bits, or float8_e4m3fn with scales: float32 (B, Hq), (B, Hk), (B, Hk), or
    of tokens (B, Hq, Sq), (B, Hk, Sk), (B, Hk). rotation: +-1, (D, D) in q's dtype, for 16-bit q
    and k. See `ops.attention_fp8` for shapes and rules.
    """
    reason = why_not(call.spec.attention)
    return Refusal(reason) if reason is not None else made_fwd(call)


def made_fwd(call: Call) -> LaunchPlan:
    """Return the plan of an e4m3 call that `why_not` accepts; its results are o and lse."""
    spec: Fp8Spec = call.spec
    maker, own = Maker(call, FP8_TENSORS), spec.attention
    *scales, rotation = maker.inputs[:4]
    tensors = maker.tensors
    q, k, v = tensors[:3]
    if own.batch * own.max_seqlen_q * q.numel() == 0 or (k.numel() == 0 and not own.is_varlen):
        return maker.finish(_add_nothing(maker, spec, tensors))
    packed = None
    if own.is_varlen:
        edges = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
        packed = Packed(*edges, own.max_seqlen_q, own.max_seqlen_k)
    if k.numel() == 0:  # TMA reads something, which no query sees
        k, v = (maker.full((1, *x.shape[1:]), 0.0, x.dtype) for x in (k, v))
    if scales[0] is None:
        ready = add_qkv(
            maker,
            q,
            k,
            v,
            rotation=rotation,
            seqlens_k=tensors.seqlens_k,
            packed=packed,
            per_token=spec.per_token,
        )
    else:
        columns = add_value_columns(maker, v, tensors.seqlens_k, packed)
        ready = Quantized(q, k, columns, *map(maker.dense, scales))
    return maker.finish(_add_kernel(maker, ready, spec, tensors))


def plan_quantized(call: Call, variant: Variant | None = None) -> LaunchPlan:
    """Return the plan of attention over already quantised q, k and v; its results are o and lse.

    The caller has asked `why_not` whether the kernel can run the call.

    Args:
        call: the tensors are those of `Quantized`, then those of `AttentionTensors`, whose q, k and
            v are not read and may be None. q and k have at least one row.
        variant: the form of the kernel; None takes that of `variant_of`.
    """
    maker = Maker(call)
    ready = Quantized(*maker.inputs[: len(Quantized._fields)])
    return maker.finish(_add_kernel(maker, ready, call.spec, maker.tensors, variant))


def _add_nothing(maker: Maker, spec: Fp8Spec, tensors: AttentionTensors) -> tuple[Tensor, Tensor]:
    """Add to the plan the constant results of a call without queries or without keys.

    Args:
        maker: the maker of the plan.
        spec: the spec of the call.
        tensors: the inputs, of which the shape of q and the sinks are used.

    Returns:
        o, zeros of q's shape and spec.o_dtype; and lse, float32 (B, Hq, Sq) or packed (Hq, T): the
        sinks of a dense call that has sinks, otherwise -inf.
    """
    *batch, rows, heads, _ = tensors.q.shape
    o = maker.full(tuple(tensors.q.shape), 0.0, spec.o_dtype)
    lse = maker.full((*batch, heads, rows), -math.inf, torch.float32)
    if spec.attention.has_sinks and not spec.attention.is_varlen:
        maker.compute(_copy_to_rows, lse, tensors.sinks, like=lse)
    return o, lse


def _copy_to_rows(lse: Tensor, sinks: Tensor) -> Tensor:
    return lse.copy_(sinks[:, None].expand_as(lse))


def _add_kernel(
    maker: Maker,
    ready: Quantized,
    spec: Fp8Spec,
    tensors: AttentionTensors,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """Add to the plan the launch of the e4m3 kernel, and of those that list a packed batch's tiles.

    Args:
        ready: the quantised tensors, of which q and k have rows.
        tensors: the call's other tensors; its q, k and v are not read.

    Returns:
        o (B, Sq, Hq, D), or (Tq, Hq, D); lse float32 (B, Hq, Sq), or (Hq, Tq).
    """
    q, k, v, *scales = ready
    own = spec.attention
    rows, heads, head_dim = q.shape[-3:]
    keys, kv_heads = k.shape[-3:-1]
    o = maker.empty(tuple(q.shape), spec.o_dtype)
    lse = maker.empty((*q.shape[:-3], heads, rows), torch.float32)
    per_token = scales[0].dim() == 3
    variant = replace(variant or variant_of(own), PER_TOKEN=per_token)
    if per_token and keys % _FOUR:  # the kernel reads scales of keys by fours
        scales[1] = _padded(maker, scales[1], -keys % _FOUR)
    q, k = (maker.addressable(x) for x in (q, k))
    width = head_dim // variant.PARTS
    num_heads = heads if own.is_varlen else own.batch * heads  # that number the tiles
    row_tiles = -(-rows // variant.rows)
    plan = size = o_rows = None
    if own.is_varlen:
        row_tiles = rows // variant.rows + own.batch
        plan, size = add_sorted_tiles(maker, tensors, o, lse, own, variant, row_tiles, keys)
        o_rows = o
    tiles = row_tiles * num_heads
    longest = max(1, own.max_seqlen_k)
    group = min(num_heads, max(2, _L2_BYTES // (longest * head_dim * 2)))
    left, right = (_UNLIMITED if w < 0 else w for w in (own.window_left, own.window_right))
    one = torch.empty(1, dtype=torch.int32, device="meta")
    counter = maker.ask(functools.partial(counter_of, maker.device), one)
    maker.launch(
        attention_fp8_fwd_kernel,
        min(device.sm_count_of(maker.device), tiles),
        descriptor(q, 64, head_dim),
        descriptor(k, variant.TILE_N, head_dim),
        descriptor(v.transpose(1, 2), width, variant.TILE_N),
        descriptor(o, 64, width),
        lse,
        *scales,
        tensors.seqlens_k,
        counter,
        own.softmax_scale * _LOG2E,
        row_tiles,
        tiles,
        num_heads,
        heads,
        heads // kv_heads,
        group,
        rows,
        keys,
        left,
        right,
        tensors.sinks,
        own.softcap * _LOG2E if own.softcap > 0 else None,
        o_rows,
        plan,
        size,
        *_mask_arguments(tensors.mask),
        VARIANT=variant,
    )
    return o, lse


def _padded(maker: Maker, scale: Tensor, count: int) -> Tensor:
    """Return scales (..., S) with `count` zeros, of no key, appended to each head; computed when
    the plan runs."""
    shape = (*scale.shape[:-1], scale.shape[-1] + count)
    like = torch.empty(shape, dtype=scale.dtype, device="meta")

    def pad(scale: Tensor) -> Tensor:
        return torch.nn.functional.pad(scale, (0, count))

    return maker.compute(pad, scale, like=like)


def _mask_arguments(mask: MaskTensors | None) -> Sequence[Tensor | int | None]:
    if mask is None:
        return (None,) * 5
    return mask.bits, mask.rows, mask.row_entries, *mask_strides(mask)
