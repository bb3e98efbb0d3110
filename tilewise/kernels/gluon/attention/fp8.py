"""Launch attention of e4m3 tensors on Hopper.

What      quantises 16-bit inputs (`quantize`), or transposes e4m3 values, then starts the kernel.
Grid      see forward/fp8/kernel.py; two launches of the quantising kernels before it, or one.
One call  allocates the e4m3 copies, their scales, o and lse.
Traffic   16-bit inputs twice, the e4m3 copies once each way, besides the kernel's own.
Numerics  see forward/fp8/kernel.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.gluon.attention.quantise import (
    Packed,
    Quantized,
    quantize_qkv,
    quantize_qkv_by_token,
    value_columns,
)
from tilewise.kernels.gluon.forward.fp8.kernel import attention_fp8_fwd_kernel
from tilewise.kernels.gluon.forward.fp8.tiles import HEAD_DIMS, Variant, variant_of
from tilewise.kernels.gluon.forward.launch import WIDEST_SOFTCAP, counter_of, mask_strides
from tilewise.kernels.gluon.forward.sorted_tiles import (
    CLEAR_ROWS,
    ENTRIES,
    FIELDS_PAD,
    PLAN_CHUNK,
    attention_order_kernel,
    attention_plan_kernel,
    plan_sizes,
)
from tilewise.kernels.host.descriptors import descriptor, why_no_descriptor
from tilewise.kernels.host.launch import launch
from tilewise.kernels.spec import AttentionSpec, AttentionTensors, MaskTensors

__all__ = ["QUANTIZES", "launch_fwd", "run", "why_not"]

QUANTIZES = True  # takes 16-bit tensors, too

_HOPPER = 90
_LOG2E = math.log2(math.e)
_FOUR = 4
_MASK_TILE = (128, 128)
_UNLIMITED = 1 << 30  # keys on a side whose kernel does not look
_L2_BYTES = 16 << 20  # of keys and values at work at a time; the cache has 50 MB


def why_not(spec: AttentionSpec) -> str | None:
    """Say why this kernel cannot run `spec`, or return None when it can."""
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


def launch_fwd(
    tensors: AttentionTensors,
    spec: AttentionSpec,
    *,
    scales: tuple[Tensor, Tensor, Tensor] | None,
    rotation: Tensor | None = None,
    per_token: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor]:
    """Compute o and lse; see `ops.attention_fp8` for shapes and rules.

    Args:
        tensors: q, k, v of 16 bits, or float8_e4m3fn with `scales`, and those beside them.
        scales: float32 (B, Hq), (B, Hk), (B, Hk) of q, k, v, or (B, Hq, Sq), (B, Hk, Sk), (B, Hk).
        rotation: +-1, (D, D) in q's dtype, for 16-bit q and k.
        per_token: quantise 16-bit q and k with a scale for each token.
        dtype: of o, bfloat16 or float16.
    """
    q, k, v = tensors[:3]
    if spec.batch * spec.max_seqlen_q * q.numel() == 0 or (k.numel() == 0 and not spec.is_varlen):
        o, lse = _allocate(q, dtype)
        lse.fill_(float("-inf"))
        if spec.has_sinks and not spec.is_varlen:
            lse.copy_(tensors.sinks[:, None].expand_as(lse))
        return o.zero_(), lse
    packed = _packed(spec, tensors)
    if k.numel() == 0:  # TMA reads something, which no query sees
        k, v = (x.new_zeros((1, *x.shape[1:])) for x in (k, v))
    seqlens_k = tensors.seqlens_k
    if scales is None:
        quantize = quantize_qkv_by_token if per_token else quantize_qkv
        ready = quantize(q, k, v, rotation=rotation, seqlens_k=seqlens_k, packed=packed)
    else:
        contiguous = [scale.contiguous() for scale in scales]
        ready = Quantized(q, k, value_columns(v, seqlens_k, packed), *contiguous)
    return run(ready, spec, tensors, dtype=dtype)


def _packed(spec: AttentionSpec, tensors: AttentionTensors) -> Packed | None:
    if not spec.is_varlen:
        return None
    edges = (tensors.cu_seqlens_q, tensors.cu_seqlens_k)
    return Packed(*edges, spec.max_seqlen_q, spec.max_seqlen_k)


def _allocate(q: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    *batch, rows, heads, _ = q.shape
    o = torch.empty(q.shape, dtype=dtype, device=q.device)
    return o, torch.empty((*batch, heads, rows), dtype=torch.float32, device=q.device)


def run(
    ready: Quantized,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    *,
    dtype: torch.dtype = torch.bfloat16,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """Start the kernel on quantised, non-empty tensors.

    Args:
        tensors: of the call; q, k and v are those of `ready`.
        variant: overrides the table, for tuning.

    Returns:
        o (B, Sq, Hq, D), or (Tq, Hq, D); lse float32 (B, Hq, Sq), or (Hq, Tq).
    """
    q, k, v, *scales = ready
    rows, heads, head_dim = q.shape[-3:]
    keys, kv_heads = k.shape[-3:-1]
    o, lse = _allocate(q, dtype)
    per_token = scales[0].dim() == 3
    variant = replace(variant or variant_of(spec), PER_TOKEN=per_token)
    if per_token and keys % _FOUR:  # the kernel reads scales of keys by fours
        scales[1] = torch.nn.functional.pad(scales[1], (0, -keys % _FOUR))
    q, k = (x if why_no_descriptor(x) is None else x.contiguous() for x in (q, k))
    width = head_dim // variant.PARTS
    num_heads = heads if spec.is_varlen else spec.batch * heads  # that number the tiles
    row_tiles = triton.cdiv(rows, variant.rows)
    plan = size = o_rows = None
    if spec.is_varlen:
        row_tiles = rows // variant.rows + spec.batch
        plan, size = _sorted_tiles(o, lse, spec, tensors, variant, row_tiles)
        o_rows = o
    tiles = row_tiles * num_heads
    longest = max(1, spec.max_seqlen_k)
    group = min(num_heads, max(2, _L2_BYTES // (longest * head_dim * 2)))
    left, right = (_UNLIMITED if w < 0 else w for w in (spec.window_left, spec.window_right))
    ctas = min(device.sm_count_of(q.device), tiles)
    launch(
        attention_fp8_fwd_kernel, ctas,
        descriptor(q, 64, head_dim),
        descriptor(k, variant.TILE_N, head_dim),
        descriptor(v.transpose(1, 2), width, variant.TILE_N),
        descriptor(o, 64, width),
        lse, *scales, tensors.seqlens_k, counter_of(q.device, _stream_of(q)),
        spec.softmax_scale * _LOG2E,
        row_tiles, tiles, num_heads, heads, heads // kv_heads, group, rows, keys,
        left, right, tensors.sinks, spec.softcap * _LOG2E if spec.softcap > 0 else None,
        o_rows, plan, size, *_mask_arguments(tensors.mask), VARIANT=variant,
    )  # fmt: skip
    return o, lse


def _mask_arguments(mask: MaskTensors | None) -> tuple[Tensor | int | None, ...]:
    if mask is None:
        return (None,) * 5
    return mask.bits, mask.rows, mask.row_entries, *mask_strides(mask)


def _sorted_tiles(
    o: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
    tensors: AttentionTensors,
    variant: Variant,
    upper_bound: int,
) -> tuple[Tensor, Tensor]:
    """List the tiles of a packed batch as the 16-bit kernel does, and clear rows of no sequence."""
    sizes, programs = plan_sizes(spec.batch, o.shape[0], upper_bound)
    memory = torch.empty(sum(sizes), dtype=torch.int32, device=o.device)
    size, work, entries, plan = memory.split(sizes)
    launch(
        attention_plan_kernel, programs, tensors.cu_seqlens_q, tensors.cu_seqlens_k, entries, work,
        size, o, lse, spec.batch, o.shape[0], spec.num_q_heads, spec.v_head_dim,
        spec.window_left, spec.window_right, ROWS=variant.rows, KEYS=variant.keys,
        CLEAR=CLEAR_ROWS, CHUNK=PLAN_CHUNK,
    )  # fmt: skip
    launch(
        attention_order_kernel, triton.cdiv(upper_bound, ENTRIES), entries, work, size, plan,
        COUNT=ENTRIES, FIELDS_PAD=FIELDS_PAD,
    )  # fmt: skip
    return plan, size


def _stream_of(x: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(x.device.index) if x.is_cuda else 0
