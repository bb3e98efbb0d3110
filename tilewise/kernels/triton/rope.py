"""Rotary position embedding.

what     rotate the first R channels of every head of a token by the token's angles; copy the rest
grid     (B * S, tiles of heads)
program  loads one token's cos and sin once, rotates TILE_H heads with them
traffic  x read once, the result written once, 4 * R bytes of tables per token
numerics float32, rounded once to the dtype of x
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.elements import why_not as why_not

TILE_PAIRS = 1024  # channel pairs of a tile: 8 a thread of four warps, one 16-byte load a half


@triton.jit(do_not_specialize=["seqlen"])
def _rope_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    seqlen,
    num_heads,
    stride_xb,
    stride_xs,
    stride_xh,
    stride_ob,
    stride_os,
    stride_oh,
    stride_cb,
    stride_cs,
    stride_sb,
    stride_ss,
    HALF: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_HALF: tl.constexpr,
    TILE_REST: tl.constexpr,
):
    b = (tl.program_id(0) // seqlen).to(tl.int64)
    s = (tl.program_id(0) % seqlen).to(tl.int64)
    heads = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    in_heads = (heads < num_heads)[:, None]
    x_row = (x_ptr + b * stride_xb + s * stride_xs + heads.to(tl.int64) * stride_xh)[:, None]
    out_row = (out_ptr + b * stride_ob + s * stride_os + heads.to(tl.int64) * stride_oh)[:, None]
    kind = out_ptr.dtype.element_ty
    pair = tl.arange(0, TILE_HALF)
    cos = tl.load(cos_ptr + b * stride_cb + s * stride_cs + pair, mask=pair < HALF, other=1.0)
    sin = tl.load(sin_ptr + b * stride_sb + s * stride_ss + pair, mask=pair < HALF, other=0.0)
    cos = cos.to(tl.float32)[None, :]
    sin = sin.to(tl.float32)[None, :]
    if INTERLEAVED:
        # One contiguous load of whole pairs, separated in registers.
        channel = tl.arange(0, 2 * TILE_HALF)[None, :]
        inside = in_heads & (channel < 2 * HALF)
        x = tl.load(x_row + channel, mask=inside, other=0.0).to(tl.float32)
        real, imag = tl.split(tl.reshape(x, (TILE_H, TILE_HALF, 2)))
        turned = tl.join(real * cos - imag * sin, imag * cos + real * sin)
        turned = tl.reshape(turned, (TILE_H, 2 * TILE_HALF))
        tl.store(out_row + channel, turned.to(kind), mask=inside)
    else:
        inside = in_heads & (pair < HALF)[None, :]
        real = tl.load(x_row + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        imag = tl.load(x_row + HALF + pair[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(out_row + pair[None, :], (real * cos - imag * sin).to(kind), mask=inside)
        tl.store(out_row + HALF + pair[None, :], (imag * cos + real * sin).to(kind), mask=inside)
    if 2 * HALF < HEAD_DIM:
        rest = 2 * HALF + tl.arange(0, TILE_REST)[None, :]
        inside = in_heads & (rest < HEAD_DIM)
        tl.store(out_row + rest, tl.load(x_row + rest, mask=inside), mask=inside)


@planned
def launch(maker: Maker, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return x (T, H, D) or (B, S, H, D) with its first R channels rotated, as a new tensor.

    cos and sin: (T, R / 2), (S, R / 2) or (B, S, R / 2), float32; interleaved: True for pairs of
    channels 2i and 2i + 1, False for i and i + R / 2.
    """
    half = cos.shape[-1]
    out = maker.empty(x.shape, x.dtype)
    if x.numel() == 0:
        return out
    batched, result = (t if t.dim() == 4 else t.unsqueeze(0) for t in (x, out))
    batch, seqlen, num_heads, head_dim = batched.shape
    cos, sin = (t.expand(batch, *t.shape[-2:]) for t in (cos, sin))  # a table without B: stride 0
    # A batch of one has a stride that depends on the number of rows and may be a multiple of 16.
    by_batch = [t.stride(0) if batch > 1 else 0 for t in (batched, result, cos, sin)]
    tile_half = triton.next_power_of_2(half)
    tile_h = min(triton.next_power_of_2(num_heads), max(1, TILE_PAIRS // tile_half))
    maker.launch(
        _rope_kernel,
        (batch * seqlen, triton.cdiv(num_heads, tile_h)),
        batched,
        cos,
        sin,
        result,
        seqlen,
        num_heads,
        by_batch[0],
        *batched.stride()[1:3],
        by_batch[1],
        *result.stride()[1:3],
        by_batch[2],
        cos.stride(1),
        by_batch[3],
        sin.stride(1),
        HALF=half,
        HEAD_DIM=head_dim,
        INTERLEAVED=interleaved,
        TILE_H=tile_h,
        TILE_HALF=tile_half,
        TILE_REST=triton.next_power_of_2(max(1, head_dim - 2 * half)),
        num_warps=4,
    )
    return out
