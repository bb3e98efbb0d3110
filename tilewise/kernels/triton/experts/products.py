"""Products of rows that are ordered by expert with the weights of their experts.

what     up: a = (clamp(u) + 1) g sigmoid(alpha g), g = clamp(gate), [gate, u] = x W1[e]^T + b1[e],
         where rows 2 i of W1 are the gate's and 2 i + 1 those of u; down: a W2[e]^T + b2[e];
         combine: y = sum over a token's experts of weight * row
grid     (tiles of rows x tiles of outputs,); a bound of the tiles, as the host knows no counts: a
         program finds its expert in the starts of all, and one behind the last leaves
program  TILE_M rows of one expert x TILE_N outputs over all of K; combine: a token's channels
traffic  the weights of the experts that are hit, once for each of their tiles of rows: 4.25 bits an
         element where they are MXFP4, unpacked in registers
numerics sums in float32 along K; an MXFP4 weight is exact in 16 bits, so packed and unpacked ones
         give the same bits. The activation is float32, rounded once. A token's experts are added
         in the order of their logits, in float32
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _expert_of(start_ptr, tile, EXPERTS: tl.constexpr, TILE_M: tl.constexpr):
    """Return (expert, its first row in this tile, its last row + 1); empty after the last
    expert."""
    expert = tl.arange(0, EXPERTS)
    start = tl.load(start_ptr + expert)
    end = tl.load(start_ptr + expert + 1)
    tiles = (end - start + TILE_M - 1) // TILE_M
    through = tl.cumsum(tiles, 0)
    own = tl.sum((through <= tile).to(tl.int32), 0)
    is_own = expert == own
    first = tl.sum(tl.where(is_own, through - tiles, 0), 0)
    low = tl.sum(tl.where(is_own, start, 0), 0)
    high = tl.sum(tl.where(is_own, end, 0), 0)
    return own, low + (tile - first) * TILE_M, high


@triton.jit
def _unpacked(byte, scale, DTYPE: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Return (N, K) values of bytes (N, K / 2), the lower nibble first, and scales (N, K / 32)."""
    nibble = tl.join(byte & 15, byte >> 4).reshape(N, K).to(tl.int32)
    bits = nibble & 7
    # Twice the value: 0 1 2 3 4 6 8 12.
    twice = tl.where(bits < 4, bits, (2 + (bits & 1)) << tl.maximum((bits >> 1) - 1, 0))
    value = tl.where(nibble >= 8, -twice, twice).to(tl.float32)
    # 2 ** (scale - 127), and half of it for twice the value, by its bits; scales of 0 and 1 give 0.
    half = ((tl.maximum(scale.to(tl.int32), 1) - 1) << 23).to(tl.float32, bitcast=True)
    wide = (value.reshape(N, K // 32, 32) * half[:, :, None]).reshape(N, K)
    return wide.to(DTYPE)


@triton.jit
def _weights(
    w_ptr, scale_ptr, output, is_output, k, channels, DTYPE: tl.constexpr,
    PACKED: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """Return (TILE_N, TILE_K) of an expert's weight, from channel k on."""
    wide = output.to(tl.int64)[:, None]
    if PACKED:
        pair = k // 2 + tl.arange(0, TILE_K // 2)
        group = k // 32 + tl.arange(0, TILE_K // 32)
        inside = is_output[:, None] & (pair * 2 < channels)[None, :]
        byte = tl.load(w_ptr + wide * (channels // 2) + pair[None, :], mask=inside, other=0)
        inside = is_output[:, None] & (group * 32 < channels)[None, :]
        scale = tl.load(scale_ptr + wide * (channels // 32) + group[None, :], mask=inside, other=0)
        weight = _unpacked(byte, scale, DTYPE, TILE_N, TILE_K)
    else:
        channel = k + tl.arange(0, TILE_K)
        inside = is_output[:, None] & (channel < channels)[None, :]
        weight = tl.load(w_ptr + wide * channels + channel[None, :], mask=inside, other=0.0)
    return weight


@triton.jit(do_not_specialize=["row_tiles"])
def up_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, start_ptr, row_ptr, a_ptr, row_tiles, inner, channels,
    stride_x, limit, alpha,
    ACTIVE: tl.constexpr, PACKED: tl.constexpr, EXPERTS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    expert, first, last = _expert_of(start_ptr, tl.program_id(0) % row_tiles, EXPERTS, TILE_M)
    if first >= last:
        return
    dtype = x_ptr.dtype.element_ty
    place = first + tl.arange(0, TILE_M)
    is_row = place < last
    token = (tl.load(row_ptr + place, mask=is_row, other=0) // ACTIVE).to(tl.int64)
    column = tl.program_id(0) // row_tiles
    output = column * TILE_N + tl.arange(0, TILE_N)
    is_output = output < 2 * inner
    expert = expert.to(tl.int64)
    shift = expert * 2 * inner
    w = w_ptr + shift * (channels // 2 if PACKED else channels)
    scales = scale_ptr + shift * (channels // 32)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for k in range(0, channels, TILE_K):
        channel = k + tl.arange(0, TILE_K)
        inside = is_row[:, None] & (channel < channels)[None, :]
        x = tl.load(x_ptr + token[:, None] * stride_x + channel[None, :], mask=inside, other=0.0)
        weight = _weights(w, scales, output, is_output, k, channels, dtype, PACKED, TILE_N, TILE_K)
        acc = tl.dot(x, weight.trans(1, 0), acc, input_precision="ieee")
    bias = tl.load(bias_ptr + shift + output, mask=is_output, other=0.0).to(tl.float32)
    gate, up = tl.split((acc + bias[None, :]).reshape(TILE_M, TILE_N // 2, 2))
    # A comparison and not a minimum, which would turn NaN into a number.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    a = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    channel = column * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
    to = a_ptr + place.to(tl.int64)[:, None] * inner + channel[None, :]
    tl.store(to, a.to(dtype), mask=is_row[:, None] & (channel < inner)[None, :])


@triton.jit(do_not_specialize=["row_tiles"])
def down_kernel(
    a_ptr, w_ptr, scale_ptr, bias_ptr, start_ptr, o_ptr, row_tiles, outputs, channels,
    PACKED: tl.constexpr, EXPERTS: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    expert, first, last = _expert_of(start_ptr, tl.program_id(0) % row_tiles, EXPERTS, TILE_M)
    if first >= last:
        return
    dtype = a_ptr.dtype.element_ty
    place = (first + tl.arange(0, TILE_M)).to(tl.int64)
    is_row = place < last
    output = tl.program_id(0) // row_tiles * TILE_N + tl.arange(0, TILE_N)
    is_output = output < outputs
    shift = expert.to(tl.int64) * outputs
    w = w_ptr + shift * (channels // 2 if PACKED else channels)
    scales = scale_ptr + shift * (channels // 32)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for k in range(0, channels, TILE_K):
        channel = k + tl.arange(0, TILE_K)
        inside = is_row[:, None] & (channel < channels)[None, :]
        a = tl.load(a_ptr + place[:, None] * channels + channel[None, :], mask=inside, other=0.0)
        weight = _weights(w, scales, output, is_output, k, channels, dtype, PACKED, TILE_N, TILE_K)
        acc = tl.dot(a, weight.trans(1, 0), acc, input_precision="ieee")
    acc += tl.load(bias_ptr + shift + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
    to = o_ptr + place[:, None] * outputs + output[None, :]
    tl.store(to, acc.to(dtype), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def combine_kernel(
    o_ptr, weight_ptr, place_ptr, y_ptr, channels, tiles, ACTIVE: tl.constexpr, TILE: tl.constexpr
):
    token = (tl.program_id(0) // tiles).to(tl.int64)
    channel = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = channel < channels
    acc = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(ACTIVE):
        place = tl.load(place_ptr + token * ACTIVE + j).to(tl.int64)
        weight = tl.load(weight_ptr + token * ACTIVE + j)
        row = tl.load(o_ptr + place * channels + channel, mask=inside, other=0.0)
        acc += weight * row.to(tl.float32)
    tl.store(y_ptr + token * channels + channel, acc.to(y_ptr.dtype.element_ty), mask=inside)
