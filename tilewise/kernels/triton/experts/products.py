"""Products of tokens' rows with the weights of their experts.

what     up: a = act([gate, u]), [gate, u] = x W1[e]^T + b1[e], where the gate's rows of W1 are
         every second one or the first half; down: a W2[e]^T + b2[e]; combine: y = sum over a
         token's experts of weight * row
grid     (tiles of rows x tiles of outputs,), a row's outputs one after another, so that rows and
         weights of neighbours meet in the L2 cache. The tiles of rows are as many as there may be,
         since the host knows no counts. SORTED: their table is `place_kernel`'s, and a program
         behind its last leaves. Otherwise there are at most TILE_M tokens, and a tile for each of
         their choices, which leaves if a choice before it has the same expert: all tokens that
         have it are the rows
program  TILE_M rows of one expert x TILE_N outputs over all of K; combine: a token's channels
traffic  the weights of the experts that are hit, once for each of their tiles of rows: 4.25 bits an
         element where they are MXFP4, unpacked in registers
numerics sums in float32 along K; an MXFP4 weight is exact in 16 bits, so packed and unpacked ones
         give the same bits. The activation is float32, rounded once. A token's experts are added
         in the order of its choices, in float32
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows_of_tile(
    table_ptr, chosen_ptr, row_ptr, tile, tokens,
    SORTED: tl.constexpr, ACTIVE: tl.constexpr, SLOTS: tl.constexpr, TILE_M: tl.constexpr,
):  # fmt: skip
    """Return whether a tile has rows; its expert; for each row whether it is one, its place in
    what the products write, and its choice, token * ACTIVE + slot."""
    m = tl.arange(0, TILE_M)
    if SORTED:
        count = tl.load(table_ptr)
        entry = table_ptr + 1 + 3 * tile
        is_tile = tile < count
        expert = tl.load(entry, mask=is_tile, other=0)
        place = tl.load(entry + 1, mask=is_tile, other=0) + m
        is_row = place < tl.load(entry + 2, mask=is_tile, other=0)
        choice = tl.load(row_ptr + place, mask=is_row, other=0)
    else:
        slot = tl.arange(0, SLOTS)
        expert = tl.load(chosen_ptr + tile).to(tl.int32)
        every = m[:, None] * ACTIVE + slot[None, :]
        inside = (m < tokens)[:, None] & (slot < ACTIVE)[None, :]
        hit = inside & (tl.load(chosen_ptr + every, mask=inside, other=0).to(tl.int32) == expert)
        is_tile = tl.min(tl.min(tl.where(hit, every, tile), 1), 0) >= tile
        choice = tl.max(tl.where(hit, every, -1), 1)
        is_row = choice >= 0
        choice = tl.maximum(choice, 0)
        place = choice
    return is_tile, expert.to(tl.int64), is_row, place.to(tl.int64), choice


@triton.jit
def _activated(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """Return act(gate) * up, float32."""
    if ACTIVATION == "silu":
        y = gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        y = 0.5 * gate * (1.0 + tl.math.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        # 0.5 (1 + tanh(t)) = sigmoid(2 t)
        y = gate / (1.0 + tl.exp(-2.0 * inner)) * up
    elif ACTIVATION == "relu":
        y = tl.where(gate < 0.0, 0.0, gate) * up  # a NaN stays one
    else:
        # A comparison and not a minimum, which would turn NaN into a number.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    return y


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


@triton.jit(do_not_specialize=["tokens"])
def up_kernel(
    x_ptr, w_ptr, scale_ptr, bias_ptr, table_ptr, chosen_ptr, row_ptr, weight_ptr, a_ptr, tokens,
    columns, inner, channels, stride_x, limit, alpha,
    ACTIVATION: tl.constexpr, INTERLEAVED: tl.constexpr, WEIGHED: tl.constexpr,
    BIASED: tl.constexpr, PACKED: tl.constexpr, SORTED: tl.constexpr, ACTIVE: tl.constexpr,
    SLOTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    is_tile, expert, is_row, place, choice = _rows_of_tile(
        table_ptr, chosen_ptr, row_ptr, tl.program_id(0) // columns, tokens, SORTED, ACTIVE, SLOTS,
        TILE_M,
    )  # fmt: skip
    if is_tile:
        dtype = x_ptr.dtype.element_ty
        token = (choice // ACTIVE).to(tl.int64)
        column = tl.program_id(0) % columns
        output = column * TILE_N + tl.arange(0, TILE_N)
        is_output = output < 2 * inner
        # Gate and up in alternation, whichever way their rows lie.
        row = output if INTERLEAVED else output % 2 * inner + output // 2
        shift = expert * 2 * inner
        w = w_ptr + shift * (channels // 2 if PACKED else channels)
        scales = scale_ptr + shift * (channels // 32)
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        for k in range(0, channels, TILE_K):
            channel = k + tl.arange(0, TILE_K)
            inside = is_row[:, None] & (channel < channels)[None, :]
            at = x_ptr + token[:, None] * stride_x + channel[None, :]
            x = tl.load(at, mask=inside, other=0.0)
            weight = _weights(w, scales, row, is_output, k, channels, dtype, PACKED, TILE_N, TILE_K)
            acc = tl.dot(x, weight.trans(1, 0), acc, input_precision="ieee")
        if WEIGHED:
            acc *= tl.load(weight_ptr + choice, mask=is_row, other=0.0)[:, None]
        if BIASED:
            bias = tl.load(bias_ptr + shift + row, mask=is_output, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        gate, up = tl.split(acc.reshape(TILE_M, TILE_N // 2, 2))
        a = _activated(gate, up, limit, alpha, ACTIVATION)
        channel = column * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
        to = a_ptr + place[:, None] * inner + channel[None, :]
        tl.store(to, a.to(dtype), mask=is_row[:, None] & (channel < inner)[None, :])


@triton.jit(do_not_specialize=["tokens"])
def down_kernel(
    a_ptr, w_ptr, scale_ptr, bias_ptr, table_ptr, chosen_ptr, row_ptr, o_ptr, tokens, columns,
    outputs, channels,
    BIASED: tl.constexpr, PACKED: tl.constexpr, SORTED: tl.constexpr, ACTIVE: tl.constexpr,
    SLOTS: tl.constexpr, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    is_tile, expert, is_row, place, _ = _rows_of_tile(
        table_ptr, chosen_ptr, row_ptr, tl.program_id(0) // columns, tokens, SORTED, ACTIVE, SLOTS,
        TILE_M,
    )  # fmt: skip
    if is_tile:
        dtype = a_ptr.dtype.element_ty
        output = tl.program_id(0) % columns * TILE_N + tl.arange(0, TILE_N)
        is_output = output < outputs
        shift = expert * outputs
        w = w_ptr + shift * (channels // 2 if PACKED else channels)
        scales = scale_ptr + shift * (channels // 32)
        acc = tl.zeros([TILE_M, TILE_N], tl.float32)
        for k in range(0, channels, TILE_K):
            channel = k + tl.arange(0, TILE_K)
            inside = is_row[:, None] & (channel < channels)[None, :]
            at = a_ptr + place[:, None] * channels + channel[None, :]
            a = tl.load(at, mask=inside, other=0.0)
            weight = _weights(
                w, scales, output, is_output, k, channels, dtype, PACKED, TILE_N, TILE_K
            )
            acc = tl.dot(a, weight.trans(1, 0), acc, input_precision="ieee")
        if BIASED:
            bias = tl.load(bias_ptr + shift + output, mask=is_output, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        to = o_ptr + place[:, None] * outputs + output[None, :]
        tl.store(to, acc.to(dtype), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def combine_kernel(
    o_ptr, weight_ptr, place_ptr, y_ptr, channels, tiles,
    WEIGHED: tl.constexpr, SORTED: tl.constexpr, ACTIVE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) // tiles).to(tl.int64)
    channel = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = channel < channels
    acc = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(ACTIVE):
        place = token * ACTIVE + j
        weight = tl.load(weight_ptr + place) if WEIGHED else 1.0
        if SORTED:
            place = tl.load(place_ptr + place).to(tl.int64)
        row = tl.load(o_ptr + place * channels + channel, mask=inside, other=0.0)
        acc += weight * row.to(tl.float32)
    tl.store(y_ptr + token * channels + channel, acc.to(y_ptr.dtype.element_ty), mask=inside)
