"""Prepare a step's q, k and v for paged attention: normalise, rotate, quantise, scatter.

what     q = rope(norm(q)) to a new tensor; rope(norm(k)) and v to their slots of the cache, with
         scales if it is one of 8 or 4 bits. Each of the steps may be missing: `write_kv_cache` of
         such a cache is this kernel without queries, norm and rotation
grid     (T, tiles of heads): first those of q, then of k, then of v
program  holds TILE_H heads of one token: two halves that rotate into one another, and the rest; on
         their way to 4 bits whole rows, with each channel's partner beside it
traffic  every element read once and written once; 4 * R bytes of tables per token and program
numerics float32, rounded once to the output type; quantised as `reference.quantise` and
         `reference.four_bits` say
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.spec import FOUR_BITS, ElementSpec, scale_per_slot
from tilewise.kernels.triton.early import await_previous, begin_next, options
from tilewise.kernels.triton.paged.four_bits import log_of_rotated, pack, rotate
from tilewise.kernels.triton.paged.quantise import (
    FLOAT,
    INT4,
    as_bytes,
    cache_kind,
    inverse_of,
    narrow,
    scale_of,
)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BYTE_DTYPES = (torch.int8, torch.float8_e4m3fn, FOUR_BITS)
TILE_ELEMENTS = 2048  # 16 a thread of four warps, as in `cache_ops`


class Form(NamedTuple):
    """Constexpr: the operations on the heads of q, of k or of v; `tile_*` are powers of two."""

    half: int  # 2 * half channels rotate
    tile_half: int
    rest: int  # channels after them, which are unchanged
    tile_rest: int
    interleaved: bool  # True for pairs of channels 2i and 2i + 1, False for i and i + half
    has_norm: bool
    kind: int  # format of the written numbers
    # True if the scale of an 8-bit head is computed and written, False if it is read
    owns_scale: bool
    log: int = 0  # for 4 bits, log2 of the channels that the Hadamard matrix rotates together


class Strides(NamedTuple):
    """Strides in elements: (token, head) of q, k, v and out; (block, slot, head) of caches and
    scales; those of the rows of cos and sin."""

    q: tuple[int, int]
    k: tuple[int, int]
    v: tuple[int, int]
    out: tuple[int, int]
    k_cache: tuple[int, int, int]
    v_cache: tuple[int, int, int]
    k_scale: tuple[int, int, int]
    v_scale: tuple[int, int, int]
    tables: tuple[int, int]  # cos, sin


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
    source,
    target,
    scale_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    num_heads,
    stride_source,
    stride_target,
    stride_scale,
    eps,
    form: tl.constexpr,
    TILE_H: tl.constexpr,
):
    """Normalise, rotate and store TILE_H heads of one token, as `form` says.

    source, target: the addresses of head 0; an 8-bit target is quantised, with the scale of each
    head computed and stored at scale_ptr, or read there unless form.owns_scale. weight_ptr: the
    weight of the norm; cos_ptr, sin_ptr: the angles of the token.
    """
    HALF: tl.constexpr = form.half
    REST: tl.constexpr = form.rest
    in_heads = heads < num_heads
    heads = heads.to(tl.int64)
    row = (source + heads * stride_source)[:, None]
    to = (target + heads * stride_target)[:, None]
    pair = tl.arange(0, form.tile_half)
    both = tl.arange(0, 2 * form.tile_half)
    rest_channel = 2 * HALF + tl.arange(0, form.tile_rest)
    in_half = in_heads[:, None] & (pair < HALF)[None, :]
    in_both = in_heads[:, None] & (both < 2 * HALF)[None, :]
    in_rest = in_heads[:, None] & (rest_channel < 2 * HALF + REST)[None, :]
    if form.interleaved:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, HALF + pair
    squares = tl.zeros([TILE_H], dtype=tl.float32)
    if HALF > 0:
        if form.interleaved:
            x = _load(row, both[None, :], in_both)
            real, imag = tl.split(tl.reshape(x, (TILE_H, form.tile_half, 2)))
        else:
            real = _load(row, first[None, :], in_half)
            imag = _load(row, second[None, :], in_half)
        squares += tl.sum(real * real + imag * imag, 1)
    if REST > 0:
        rest = _load(row, rest_channel[None, :], in_rest)
        squares += tl.sum(rest * rest, 1)
    if form.has_norm:
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
    if form.kind != FLOAT:
        if form.owns_scale:
            amax = tl.zeros([TILE_H], dtype=tl.float32)
            check = tl.zeros([TILE_H], dtype=tl.float32)  # NaN where a channel is not finite
            if HALF > 0:
                amax = tl.max(tl.maximum(tl.abs(real), tl.abs(imag)), 1)
                check += tl.sum(real * 0.0 + imag * 0.0, 1)
            if REST > 0:
                amax = tl.maximum(amax, tl.max(tl.abs(rest), 1))
                check += tl.sum(rest * 0.0, 1)
            scale = scale_of(amax, check == 0.0, form.kind)
            tl.store(scale_ptr + heads * stride_scale, scale, mask=in_heads)
        else:
            scale = tl.load(scale_ptr + heads * stride_scale, mask=in_heads, other=0.0)
        inverse = inverse_of(scale)
    if HALF > 0:
        if form.interleaved:
            x = tl.reshape(tl.join(real, imag), (TILE_H, 2 * form.tile_half))
            _store(to, both[None, :], in_both, x, inverse, form.kind)
        else:
            _store(to, first[None, :], in_half, real, inverse, form.kind)
            _store(to, second[None, :], in_half, imag, inverse, form.kind)
    if REST > 0:
        _store(to, rest_channel[None, :], in_rest, rest, inverse, form.kind)


@triton.jit
def _pack_heads(
    source,
    target,
    scale_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    num_heads,
    stride_source,
    stride_target,
    stride_scale,
    eps,
    form: tl.constexpr,
    TILE_H: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Normalise, rotate and store TILE_H heads of one token in a cache of 4 bits, with scales.

    WIDTH: the power of two that holds the channels. The other arguments are those of `_move_heads`.
    """
    HALF: tl.constexpr = form.half
    DIM: tl.constexpr = 2 * form.half + form.rest
    in_heads = heads < num_heads
    heads = heads.to(tl.int64)
    row = (source + heads * stride_source)[:, None]
    channel = tl.arange(0, WIDTH)
    inside = in_heads[:, None] & (channel < DIM)[None, :]
    x = _load(row, channel[None, :], inside)
    if form.has_norm:
        norm = tl.rsqrt(tl.sum(x * x, 1) * (1.0 / DIM) + eps)[:, None]
        x *= norm * _load(weight_ptr, channel, channel < DIM)[None, :]
    if HALF > 0:
        turns = channel < 2 * HALF
        if form.interleaved:
            pair, is_first, partner = channel // 2, channel % 2 == 0, channel ^ 1
        else:
            pair, is_first = channel % HALF, channel < HALF
            partner = tl.where(is_first, channel + HALF, channel - HALF)
        other = _load(row, partner[None, :], inside & turns[None, :])
        if form.has_norm:
            other *= norm * _load(weight_ptr, partner, turns)[None, :]
        cos = tl.where(turns, _load(cos_ptr, pair, turns), 1.0)
        sin = _load(sin_ptr, pair, turns)
        x = x * cos[None, :] + other * tl.where(is_first, -sin, sin)[None, :]
    codes, scale = pack(rotate(x, form.log))
    tl.store(scale_ptr + heads * stride_scale, scale, mask=in_heads)
    byte = tl.arange(0, WIDTH // 2)
    to = (target + heads * stride_target)[:, None] + byte[None, :]
    tl.store(to, codes, mask=in_heads[:, None] & (2 * byte < DIM)[None, :])


@triton.jit
def _move_row(
    source,
    target,
    scale_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    heads,
    num_heads,
    stride_source,
    stride_target,
    stride_scale,
    eps,
    form: tl.constexpr,
    TILE_H: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store TILE_H heads of a token in a cache of any format, by `_pack_heads` or `_move_heads`."""
    if form.kind == INT4:
        _pack_heads(
            source,
            target,
            scale_ptr,
            weight_ptr,
            cos_ptr,
            sin_ptr,
            heads,
            num_heads,
            stride_source,
            stride_target,
            stride_scale,
            eps,
            form,
            TILE_H,
            WIDTH,
        )
    else:
        _move_heads(
            source,
            target,
            scale_ptr,
            weight_ptr,
            cos_ptr,
            sin_ptr,
            heads,
            num_heads,
            stride_source,
            stride_target,
            stride_scale,
            eps,
            form,
            TILE_H,
        )


@triton.jit(do_not_specialize=["num_slots"])
def _prepare_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    k_cache_ptr,
    v_cache_ptr,
    k_scale_ptr,
    v_scale_ptr,
    slot_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    eps,
    strides,
    num_q_heads,
    num_kv_heads,
    q_tiles,
    kv_tiles,
    num_slots,
    q_form: tl.constexpr,
    k_form: tl.constexpr,
    v_form: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE_H: tl.constexpr,
    K_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_next(EARLY)
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    offs_h = tl.arange(0, TILE_H)
    cos_ptr += token * strides.tables[0]
    sin_ptr += token * strides.tables[1]
    await_previous(EARLY)
    if tile < q_tiles:
        _move_heads(
            q_ptr + token * strides.q[0],
            out_ptr + token * strides.out[0],
            k_scale_ptr,
            q_norm_ptr,
            cos_ptr,
            sin_ptr,
            tile * TILE_H + offs_h,
            num_q_heads,
            strides.q[1],
            strides.out[1],
            0,
            eps,
            q_form,
            TILE_H,
        )
        return
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):  # skipped, as a GPU cannot refuse it without a wait
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    tile -= q_tiles
    if tile < kv_tiles:
        _move_row(
            k_ptr + token * strides.k[0],
            k_cache_ptr + block * strides.k_cache[0] + offset * strides.k_cache[1],
            k_scale_ptr + block * strides.k_scale[0] + offset * strides.k_scale[1],
            k_norm_ptr,
            cos_ptr,
            sin_ptr,
            tile * TILE_H + offs_h,
            num_kv_heads,
            strides.k[1],
            strides.k_cache[2],
            strides.k_scale[2],
            eps,
            k_form,
            TILE_H,
            K_WIDTH,
        )
        return
    _move_row(
        v_ptr + token * strides.v[0],
        v_cache_ptr + block * strides.v_cache[0] + offset * strides.v_cache[1],
        v_scale_ptr + block * strides.v_scale[0] + offset * strides.v_scale[1],
        k_norm_ptr,
        cos_ptr,
        sin_ptr,
        (tile - kv_tiles) * TILE_H + offs_h,
        num_kv_heads,
        strides.v[1],
        strides.v_cache[2],
        strides.v_scale[2],
        eps,
        v_form,
        TILE_H,
        V_WIDTH,
    )


def why_not(spec: ElementSpec) -> str | None:
    """Return why this kernel cannot write to a cache of the spec's dtype, or None if it can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    if spec.dtype not in (*DTYPES, *BYTE_DTYPES):
        return (
            "dtype of the cache must be float32, float16, bfloat16, int8, float8_e4m3fn or uint8, "
            f"got {spec.dtype}"
        )
    return None


@planned
def launch(
    maker: Maker,
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
    """Write normalised and rotated k (T, Hk, D), and v (T, Hk, Dv), to their slots in place.

    cos, sin (T, R / 2); q_norm, k_norm (D,), None for no norm; scales (N, P, Hk), written, or
    (Hk,), read only. Rows with a slot outside of the cache are skipped.

    Returns:
        q (T, Hq, D), normalised and rotated, a new tensor.
    """
    out = maker.empty(q.shape, q.dtype)
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
    scales, scale_strides = (out, out), [(0, 0, 0)] * 2
    if k_scale is not None and v_scale is not None:
        scales = (k_scale, v_scale)
        scale_strides = [scale_per_slot(scale, k_cache).stride() for scale in scales]
    strides = Strides(
        *(x.stride()[:2] for x in (q, k, v, out)),
        k_cache.stride()[:3],
        v_cache.stride()[:3],
        *scale_strides,
        (cos.stride(0), sin.stride(0)),
    )
    kind, owns_scale = cache_kind(k_cache.dtype, 0), k_scale is not None and k_scale.dim() == 3
    k_form = Form(
        half,
        triton.next_power_of_2(max(1, half)),
        rest,
        triton.next_power_of_2(max(1, rest)),
        interleaved,
        q_norm is not None,
        kind,
        owns_scale,
        log_of_rotated(head_dim),
    )
    maker.launch(
        _prepare_kernel,
        (num_tokens, q_tiles + 2 * kv_tiles),
        q,
        k,
        v,
        out,
        as_bytes(k_cache),
        as_bytes(v_cache),
        *scales,
        maker.dense(slot_mapping),
        cos,
        sin,
        q_norm if q_norm is not None else out,
        k_norm if k_norm is not None else out,
        norm_eps,
        strides,
        num_q_heads,
        num_kv_heads,
        q_tiles,
        kv_tiles,
        k_cache.shape[0] * k_cache.shape[1],
        q_form=k_form._replace(kind=FLOAT.value, owns_scale=False),
        k_form=k_form,
        v_form=Form(
            0,
            1,
            v_dim,
            triton.next_power_of_2(v_dim),
            False,
            False,
            kind,
            owns_scale,
            log_of_rotated(v_dim),
        ),
        BLOCK_SIZE=k_cache.shape[1],
        TILE_H=tile_h,
        K_WIDTH=triton.next_power_of_2(head_dim),
        V_WIDTH=triton.next_power_of_2(v_dim),
        num_warps=4,
        **options("rope"),
    )
    return out


@planned
def write_quantised(
    maker: Maker,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
) -> None:
    """Write k and v to the slots of a cache of 8 or 4 bits, quantised, without norm and rotation.

    Args:
        slot_mapping: int64 (T,), the slot of each token, -1 for none.
        k_scale, v_scale: the scales of the cache, (N, P, Hk), written, or (Hk,), read only.
    """
    num_tokens = k.shape[0]
    angles = maker.empty((num_tokens, 0), torch.float32)
    launch.write(
        maker,
        k[:, :0],
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        cos=angles,
        sin=angles,
        k_scale=k_scale,
        v_scale=v_scale,
    )
