"""What the gated delta rule takes, of a layer's projections.

what     q and k of unit length, beta = sigmoid(b) and g = -exp(a_log) softplus(a + dt_bias)
grid     (tokens, tiles of heads of queries and keys)
program  TILE_H heads of a token; the first of a token has its betas and decays, too
traffic  every element read once and written once
numerics float32, rounded where torch's separate operations round, beta to the dtype of the
         projections although it is written in float32, as the recurrence reads it; log(1 + e) by
         a logarithm of the rounded sum u and e / (u - 1), which has the sum's rounding, too
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.triton.elements import why_not as why_not

ELEMENTS = 1024  # of queries and keys of a program: 8 a thread of four warps


_LOG2E = tl.constexpr(1.4426950408889634)
_LN2_HIGH = tl.constexpr(0.693145751953125)  # of 15 bits, so that its multiples are exact
_LN2_LOW = tl.constexpr(1.4286068203094173e-6)


@triton.jit
def _exp(x):
    """Return exp(x), float32, for x clamped to -200 ... 200, to about an ulp for large x, too.

    `tl.exp` multiplies by log2(e) before it takes powers of two: of 90 that rounds 64 times as much
    as of 1.
    """
    x = tl.where(x < -200.0, -200.0, tl.where(x > 200.0, 200.0, x))
    whole = tl.floor(x * _LOG2E + 0.5)
    small = (x - whole * _LN2_HIGH) - whole * _LN2_LOW
    return tl.exp2(small * _LOG2E) * tl.exp2(whole)


@triton.jit
def _softplus(x):
    """Return ln(1 + exp(x)), float32."""
    small = _exp(-tl.abs(x))
    total = 1.0 + small
    is_one = total == 1.0
    own = tl.log(total) * (small / tl.where(is_one, 1.0, total - 1.0))
    return tl.maximum(x, 0.0) + tl.where(is_one, small, own)


@triton.jit
def _inputs_kernel(
    mixed_ptr,
    ba_ptr,
    a_log_ptr,
    dt_bias_ptr,
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    stride_mixed,
    stride_ba,
    beta_scale,
    eps,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    TILE_H: tl.constexpr,
    TILE_K: tl.constexpr,
    HEADS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_H + tl.arange(0, TILE_H)
    channel = tl.arange(0, TILE_K)
    dtype = q_ptr.dtype.element_ty
    inside = (head < 2 * KEY_HEADS)[:, None] & (channel < KEY_DIM)[None, :]
    own = head[:, None] * KEY_DIM + channel[None, :]
    x = tl.load(mixed_ptr + token * stride_mixed + own, mask=inside, other=0.0).to(tl.float32)
    x = (x * tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]).to(dtype)
    is_query = (head < KEY_HEADS)[:, None]
    to = token * (KEY_HEADS * KEY_DIM) + own
    tl.store(q_ptr + to, x, mask=inside & is_query)
    tl.store(k_ptr + to - KEY_HEADS * KEY_DIM, x, mask=inside & (is_query == 0))
    if tl.program_id(1) == 0:
        each = tl.arange(0, HEADS)
        is_head = each < NUM_HEADS
        at = ba_ptr + token * stride_ba + each
        b = tl.load(at, mask=is_head, other=0.0).to(tl.float32)
        a = tl.load(at + NUM_HEADS, mask=is_head, other=0.0).to(tl.float32)
        a_log = tl.load(a_log_ptr + each, mask=is_head, other=0.0)
        dt_bias = tl.load(dt_bias_ptr + each, mask=is_head, other=0.0)
        beta = (
            tl.div_rn(tl.full([HEADS], 1.0, tl.float32), 1.0 + _exp(-b)).to(dtype).to(tl.float32)
            * beta_scale
        )
        g = -_exp(a_log) * _softplus(a + dt_bias)
        beta = beta.to(dtype).to(tl.float32)
        tl.store(beta_ptr + token * NUM_HEADS + each, beta, mask=is_head)
        tl.store(g_ptr + token * NUM_HEADS + each, g, mask=is_head)


@planned
def delta_inputs(
    maker: Maker,
    mixed: Tensor,
    ba: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    num_key_heads: int,
    key_dim: int,
    beta_scale: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, k, g and beta as `ops.delta_inputs` defines them; the arguments are the same."""
    tokens, heads = len(mixed), len(a_log)
    q, k = (maker.empty((tokens, num_key_heads, key_dim), mixed.dtype) for _ in range(2))
    g, beta = (maker.empty((tokens, heads), torch.float32) for _ in range(2))
    if tokens == 0:
        return q, k, g, beta
    columns = triton.next_power_of_2(key_dim)
    rows = max(1, ELEMENTS // columns)
    maker.launch(
        _inputs_kernel,
        (tokens, triton.cdiv(2 * num_key_heads, rows)),
        mixed,
        ba,
        a_log,
        dt_bias,
        q,
        k,
        g,
        beta,
        mixed.stride(0),
        ba.stride(0),
        beta_scale,
        eps,
        KEY_HEADS=num_key_heads,
        KEY_DIM=key_dim,
        NUM_HEADS=heads,
        TILE_H=rows,
        TILE_K=columns,
        HEADS=triton.next_power_of_2(heads),
        num_warps=4,
    )
    return q, k, g, beta
