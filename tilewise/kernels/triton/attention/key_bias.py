"""A bias of keys as channels of q and k, whose product it is.

what     q followed by 8 channels of a power of two; k followed by its keys' biases, clamped and
         multiplied, in three parts of 16 bits or one of 32, and zeros
grid     one axis, tiles of the whole of the wide q, then those of the wide k
program  CHUNKS pieces of VEC neighbours of a row, a row being a head of a token
traffic  every element read once and written once; a bias once for each head
numerics those of torch's operations, to the bit: no product is fused with the sum behind it
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.key_bias import CHANNELS, LEAST, factors
from tilewise.kernels.triton.elements import why_not as why_not

_ELEMENTS = 4096  # of a program: four times 16 bytes of 16 bits a thread
_ADDED = tl.constexpr(CHANNELS)
_LEAST = tl.constexpr(LEAST)


@triton.jit
def _pieces(
    pid,
    count,
    seqlen,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    CHUNKS: tl.constexpr,
    LONG: tl.constexpr,
):
    """Return of CHUNKS pieces of a wide tensor, each PARTS-th of a row: the number, which exist,
    the place in the row, and the batch, token and head of the row.

    All are 64 bits where LONG; else 32, unsigned to be divided in fewer instructions.
    """
    if LONG:
        piece = pid.to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    else:
        piece = (pid * CHUNKS + tl.arange(0, CHUNKS)).to(tl.uint32)
        seqlen = seqlen.to(tl.uint32)
    row = piece // PARTS
    token = row // HEADS
    n = token // seqlen
    part = piece - row * PARTS
    s, h = token - n * seqlen, row - token * HEADS
    if not LONG:
        part, n, s, h = part.to(tl.int32), n.to(tl.int32), s.to(tl.int32), h.to(tl.int32)
        piece = piece.to(tl.int32)
    return piece, piece < count, part, n, s, h


@triton.jit(
    do_not_specialize=[
        "q_programs",
        "q_count",
        "k_count",
        "seqlen_q",
        "seqlen_k",
        "q_batch",
        "q_row",
        "q_head",
        "k_batch",
        "k_row",
        "k_head",
        "keys_batch",
        "keys_row",
    ]
)
def attention_key_bias_kernel(
    q_ptr,
    k_ptr,
    keys_ptr,
    wide_q_ptr,
    wide_k_ptr,
    q_programs,
    q_count,
    k_count,
    seqlen_q,
    seqlen_k,
    q_batch,
    q_row,
    q_head,
    q_channel,
    k_batch,
    k_row,
    k_head,
    k_channel,
    keys_batch,
    keys_row,
    factor,
    D: tl.constexpr,
    HEADS_Q: tl.constexpr,
    HEADS_K: tl.constexpr,
    IS_MASK: tl.constexpr,
    POWER: tl.constexpr,
    VEC: tl.constexpr,
    UNIT: tl.constexpr,
    CHUNKS: tl.constexpr,
    LONG: tl.constexpr,
):
    """Write CHUNKS pieces of the wide q or, in programs after the first q_programs, of the wide k.

    Strides of batches, rows and heads of q and k are in units of UNIT elements; `q_count` and
    `k_count` are the numbers of pieces of both results.
    """
    OWN: tl.constexpr = D // VEC  # pieces of a row that are copied
    PARTS: tl.constexpr = (D + _ADDED) // VEC
    dtype = wide_q_ptr.dtype.element_ty
    pid = tl.program_id(0)
    within = tl.arange(0, VEC)[None, :]
    if pid < q_programs:
        piece, exists, part, n, s, h = _pieces(pid, q_count, seqlen_q, PARTS, HEADS_Q, CHUNKS, LONG)
        at = (n * q_batch + s * q_row + h * q_head) * UNIT
        at = at[:, None] + (part[:, None] * VEC + within) * q_channel
        copied = (exists & (part < OWN))[:, None]
        x = tl.load(q_ptr + at, mask=copied, other=POWER)
        tl.store(wide_q_ptr + piece[:, None] * VEC + within, x, mask=exists[:, None])
    else:
        piece, exists, part, n, s, h = _pieces(
            pid - q_programs, k_count, seqlen_k, PARTS, HEADS_K, CHUNKS, LONG
        )
        keys = tl.load(keys_ptr + n * keys_batch + s * keys_row, mask=exists & (part >= OWN))
        place = within  # among the added channels, known to the compiler
        if VEC < _ADDED:
            place = part[:, None] * VEC + within - D
        if IS_MASK:
            first = tl.where(keys != 0, 0.0, _LEAST).to(dtype)
            added = tl.where(place == 0, first[:, None], 0.0)
        else:
            bias = keys.to(tl.float32)
            bias = tl.where(bias < _LEAST, _LEAST, bias) * factor  # a NaN stays
            first = bias.to(dtype)
            added = tl.where(place == 0, first[:, None], 0.0)
            if dtype != tl.float32:
                left = bias - first.to(tl.float32)
                second = left.to(dtype)
                third = (left - second.to(tl.float32)).to(dtype)
                added = tl.where(place == 1, second[:, None], added)
                added = tl.where(place == 2, third[:, None], added)
        at = (n * k_batch + s * k_row + h * k_head) * UNIT
        at = at[:, None] + (part[:, None] * VEC + within) * k_channel
        copied = (exists & (part < OWN))[:, None]
        x = tl.load(k_ptr + at, mask=copied, other=added.to(dtype))
        tl.store(wide_k_ptr + piece[:, None] * VEC + within, x, mask=exists[:, None])


@planned
def key_bias_channels(
    maker: Maker, q: Tensor, k: Tensor, keys: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return q and k with more channels as `ops.key_bias_channels` defines them; the arguments are
    the same."""
    width = q.shape[-1] + CHANNELS
    wide_q, wide_k = (maker.empty((*x.shape[:-1], width), x.dtype) for x in (q, k))
    vec = math.gcd(width, CHANNELS)
    chunks = _ELEMENTS // vec
    counts = [x.numel() // vec for x in (wide_q, wide_k)]
    programs = [triton.cdiv(count, chunks) for count in counts]
    if sum(programs) == 0:
        return wide_q, wide_k
    steps = [
        step if size > 1 else 0
        for x in (q, k)
        for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    ]
    # Multiples of a constant are seen to be so, and neighbours come by one load.
    unit = math.gcd(vec, *steps)
    steps = [step // unit for step in steps]
    farthest = max(
        sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))
        for x in (q, k, keys, wide_q, wide_k)
    )
    power, factor = factors(scale, torch.float32)
    maker.launch(
        attention_key_bias_kernel,
        sum(programs),
        q,
        k,
        keys,
        wide_q,
        wide_k,
        programs[0],
        *counts,
        max(1, q.shape[1]),
        max(1, k.shape[1]),
        *steps[:3],
        q.stride(3),
        *steps[3:],
        k.stride(3),
        *keys.stride(),
        factor,
        D=q.shape[-1],
        HEADS_Q=q.shape[2],
        HEADS_K=k.shape[2],
        IS_MASK=keys.dtype == torch.bool,
        POWER=power,
        VEC=vec,
        UNIT=unit,
        CHUNKS=chunks,
        LONG=farthest + _ELEMENTS >= 2**31,
        num_warps=4,
        # A part of the bias is what those before it left of a product, which must be rounded.
        enable_fp_fusion=False,
    )
    return wide_q, wide_k
