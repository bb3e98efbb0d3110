"""A step's q, k and v on their way to paged attention: normalised, rotated, quantised, scattered.

what     q = rope(norm(q)) to a new tensor; rope(norm(k)) and v to their slots of the cache, with
         scales if it is an 8-bit one. Each of the steps may be missing: `write_kv_cache` of an
         8-bit cache is this kernel without queries, norm and rotation
grid     (T, tiles of heads): first those of q, then of k, then of v
program  holds TILE_H heads of one token: two halves that rotate into one another, and the rest
traffic  every element read once and written once; 4 * R bytes of tables per token and program
numerics float32, rounded once to what is written; quantised as `reference.quantise` says
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.spec import ElementSpec, scale_per_slot
from tilewise.kernels.triton.early import await_previous, begin_next, options
from tilewise.kernels.triton.paged.quantise import (
    FLOAT,
    as_bytes,
    cache_kind,
    inverse_of,
    narrow,
    scale_of,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTE_DTYPES = (torch.int8, torch.float8_e4m3fn)
TILE_ELEMENTS = 2048  # 16 a thread of four warps, as in `cache_ops`


@triton.jit
def _load(row, channel, inside):
    return tl.load(row + channel, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(row, channel, inside, x, inverse, KIND: tl.constexpr):
    if KIND == FLOAT:
        tl.store(row + channel, x.to(row.dtype.element_ty), mask=inside)
    else:
        tl.store(row + channel, narrow(x * inverse[:, None], KIND), mask=inside)


@triton.jit
def _move_heads(
    source, target, scale_ptr, weight_ptr, cos_ptr, sin_ptr, heads, num_heads,
    stride_source, stride_target, stride_scale, eps,
    HALF: tl.constexpr, TILE_HALF: tl.constexpr, REST: tl.constexpr, TILE_REST: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr,
    KIND: tl.constexpr, OWNS_SCALE: tl.constexpr, TILE_H: tl.constexpr,
):  # fmt: skip
    """Move TILE_H heads of one token; 2 * HALF channels rotate, REST pass."""
    in_heads = heads < num_heads
    heads = heads.to(tl.int64)
    row = (source + heads * stride_source)[:, None]
    to = (target + heads * stride_target)[:, None]
    pair = tl.arange(0, TILE_HALF)
    both = tl.arange(0, 2 * TILE_HALF)
    rest_channel = 2 * HALF + tl.arange(0, TILE_REST)
    in_half = in_heads[:, None] & (pair < HALF)[None, :]
    in_both = in_heads[:, None] & (both < 2 * HALF)[None, :]
    in_rest = in_heads[:, None] & (rest_channel < 2 * HALF + REST)[None, :]
    # Channels of a pair: 2i and 2i + 1, or i and i + HALF.
    if INTERLEAVED:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, HALF + pair
    squares = tl.zeros([TILE_H], dtype=tl.float32)
    if HALF > 0:
        if INTERLEAVED:
            x = _load(row, both[None, :], in_both)
            real, imag = tl.split(tl.reshape(x, (TILE_H, TILE_HALF, 2)))
        else:
            real = _load(row, first[None, :], in_half)
            imag = _load(row, second[None, :], in_half)
        squares += tl.sum(real * real + imag * imag, 1)
    if REST > 0:
        rest = _load(row, rest_channel[None, :], in_rest)
        squares += tl.sum(rest * rest, 1)
    if HAS_NORM:
        norm = tl.rsqrt(squares * (1.0 / (2 * HALF + REST)) + eps)[:, None]
        if HALF > 0:
            real *= norm * _load(weight_ptr, first, pair < HALF)[None, :]
            imag *= norm * _load(weight_ptr, second, pair < HALF)[None, :]
        if REST > 0:
            in_row = rest_channel < 2 * HALF + REST
            rest *= norm * _load(weight_ptr, rest_channel, in_row)[None, :]
    if HALF > 0:
        cos = _load(cos_ptr, pair, pair < HALF)[None, :]
        sin = _load(sin_ptr, pair, pair < HALF)[None, :]
        real, imag = real * cos - imag * sin, imag * cos + real * sin
    inverse = tl.zeros([TILE_H], dtype=tl.float32)
    if KIND != FLOAT:
        if OWNS_SCALE:
            amax = tl.zeros([TILE_H], dtype=tl.float32)
            check = tl.zeros([TILE_H], dtype=tl.float32)  # NaN where a channel is not finite
            if HALF > 0:
                amax = tl.max(tl.maximum(tl.abs(real), tl.abs(imag)), 1)
                check += tl.sum(real * 0.0 + imag * 0.0, 1)
            if REST > 0:
                amax = tl.maximum(amax, tl.max(tl.abs(rest), 1))
                check += tl.sum(rest * 0.0, 1)
            scale = scale_of(amax, check == 0.0, KIND)
            tl.store(scale_ptr + heads * stride_scale, scale, mask=in_heads)
        else:
            scale = tl.load(scale_ptr + heads * stride_scale, mask=in_heads, other=0.0)
        inverse = inverse_of(scale)
    if HALF > 0:
        if INTERLEAVED:
            x = tl.reshape(tl.join(real, imag), (TILE_H, 2 * TILE_HALF))
            _store(to, both[None, :], in_both, x, inverse, KIND)
        else:
            _store(to, first[None, :], in_half, real, inverse, KIND)
            _store(to, second[None, :], in_half, imag, inverse, KIND)
    if REST > 0:
        _store(to, rest_channel[None, :], in_rest, rest, inverse, KIND)


@triton.jit
def _prepare_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, k_cache_ptr, v_cache_ptr, k_scale_ptr, v_scale_ptr, slot_ptr,
    cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, eps,
    stride_qt, stride_qh, stride_kt, stride_kh, stride_vt, stride_vh, stride_ot, stride_oh,
    stride_kcb, stride_kcp, stride_kch, stride_vcb, stride_vcp, stride_vch,
    stride_ksb, stride_ksp, stride_ksh, stride_vsb, stride_vsp, stride_vsh, stride_cos, stride_sin,
    num_q_heads, num_kv_heads, q_tiles, kv_tiles,
    BLOCK_SIZE: tl.constexpr, HALF: tl.constexpr, TILE_HALF: tl.constexpr,
    REST: tl.constexpr, TILE_REST: tl.constexpr, V_DIM: tl.constexpr, TILE_V: tl.constexpr,
    INTERLEAVED: tl.constexpr, HAS_NORM: tl.constexpr,
    KIND: tl.constexpr, OWNS_SCALE: tl.constexpr, TILE_H: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    offs_h = tl.arange(0, TILE_H)
    cos_ptr += token * stride_cos
    sin_ptr += token * stride_sin
    await_previous(EARLY)
    if tile < q_tiles:
        _move_heads(
            q_ptr + token * stride_qt, out_ptr + token * stride_ot, k_scale_ptr, q_norm_ptr,
            cos_ptr, sin_ptr, tile * TILE_H + offs_h, num_q_heads, stride_qh, stride_oh, 0, eps,
            HALF, TILE_HALF, REST, TILE_REST, INTERLEAVED, HAS_NORM, FLOAT, False, TILE_H,
        )  # fmt: skip
        return
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    tile -= q_tiles
    if tile < kv_tiles:
        _move_heads(
            k_ptr + token * stride_kt, k_cache_ptr + block * stride_kcb + offset * stride_kcp,
            k_scale_ptr + block * stride_ksb + offset * stride_ksp, k_norm_ptr, cos_ptr, sin_ptr,
            tile * TILE_H + offs_h, num_kv_heads, stride_kh, stride_kch, stride_ksh, eps,
            HALF, TILE_HALF, REST, TILE_REST, INTERLEAVED, HAS_NORM, KIND, OWNS_SCALE, TILE_H,
        )  # fmt: skip
        return
    _move_heads(
        v_ptr + token * stride_vt, v_cache_ptr + block * stride_vcb + offset * stride_vcp,
        v_scale_ptr + block * stride_vsb + offset * stride_vsp, k_norm_ptr, cos_ptr, sin_ptr,
        (tile - kv_tiles) * TILE_H + offs_h, num_kv_heads, stride_vh, stride_vch, stride_vsh, eps,
        0, 1, V_DIM, TILE_V, False, False, KIND, OWNS_SCALE, TILE_H,
    )  # fmt: skip


def why_not(spec: ElementSpec) -> str | None:
    """Say why this kernel cannot write to a cache of the spec's dtype, or None when it can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    if spec.dtype not in (*DTYPES, *BYTE_DTYPES):
        return (
            "dtype of the cache must be float32, float16, bfloat16, int8 or float8_e4m3fn, "
            f"got {spec.dtype}"
        )
    return None


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    norm_eps: float = 1e-6,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Write k (T, Hk, D) and v (T, Hk, Dv) to their slots and return q (T, Hq, D).

    cos, sin (T, R / 2); q_norm, k_norm (D,); scales (N, P, Hk), written, or (Hk,), read only.
    """
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    num_tokens, num_q_heads, head_dim = q.shape
    num_kv_heads, v_dim = v.shape[1:]
    if num_tokens == 0:
        return out
    half = cos.shape[1]
    rest = head_dim - 2 * half
    widest = triton.next_power_of_2(max(head_dim, v_dim))
    most_heads = triton.next_power_of_2(max(num_q_heads, num_kv_heads))
    tile_h = min(most_heads, max(1, TILE_ELEMENTS // widest))
    q_tiles, kv_tiles = triton.cdiv(num_q_heads, tile_h), triton.cdiv(num_kv_heads, tile_h)
    scales, strides = (out, out), [0] * 6
    if k_scale is not None and v_scale is not None:
        scales = (k_scale, v_scale)
        strides = [x for s in scales for x in scale_per_slot(s, k_cache).stride()]
    _prepare_kernel[(num_tokens, q_tiles + 2 * kv_tiles)](
        q, k, v, out, as_bytes(k_cache), as_bytes(v_cache), *scales, slot_mapping.contiguous(),
        cos, sin, q_norm if q_norm is not None else out, k_norm if k_norm is not None else out,
        norm_eps, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        out.stride(0), out.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3], *strides,
        cos.stride(0), sin.stride(0), num_q_heads, num_kv_heads, q_tiles, kv_tiles,
        BLOCK_SIZE=k_cache.shape[1], HALF=half, TILE_HALF=triton.next_power_of_2(max(1, half)),
        REST=rest, TILE_REST=triton.next_power_of_2(max(1, rest)),
        V_DIM=v_dim, TILE_V=triton.next_power_of_2(v_dim), INTERLEAVED=interleaved,
        HAS_NORM=q_norm is not None, KIND=cache_kind(k_cache.dtype, 0),
        OWNS_SCALE=k_scale is not None and k_scale.dim() == 3, TILE_H=tile_h, num_warps=4,
        **options("rope"),
    )  # fmt: skip
    return out


def write_quantised(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Write k and v to an 8-bit cache as they are."""
    num_tokens = k.shape[0]
    angles = torch.empty((num_tokens, 0), dtype=torch.float32, device=k.device)
    launch(
        k[:, :0], k, v, k_cache, v_cache, slot_mapping, cos=angles, sin=angles,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
