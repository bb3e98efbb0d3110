"""Products of tokens' rows with the weights of their experts.

what     up: a = act([gate, u]), [gate, u] = x W1[e]^T + b1[e], where the gate's rows of W1 are
         every second one or the first half, or a = act(u) without gates; down: a W2[e]^T + b2[e];
         combine: y = sum over a token's experts of weight * row, and the row of the block that all
         tokens use, times the sigmoid of its gate; gather: rows of x at their places
grid     (tiles of rows x tiles of outputs,), a row's outputs one after another, so that rows and
         weights of neighbours meet in the L2 cache. The tiles of rows are as many as there may be,
         since the host knows no counts. SORTED: their table is `place_kernel`'s, and a program
         behind its last leaves. Otherwise there are at most TILE_M tokens, and a tile for each of
         their choices, which leaves if a choice before it has the same expert: all tokens that
         have it are the rows. A choice of no expert has no row, and adds nothing
program  TILE_M rows of one expert x TILE_N outputs over all of K; combine, gather: a token's
         channels
traffic  the weights of the experts that are hit, once for each of their tiles of rows: 4.25 bits an
         element where they are MXFP4, unpacked in registers
numerics sums in float32 along K; an MXFP4 weight is exact in 16 bits, so packed and unpacked ones
         give the same bits. The activation is float32, rounded once. A token's experts are added
         in the order of its choices, in float32, and rounded; gate and gated row of the shared
         block are rounded, too, each with the bits of torch's operation
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def _rows_of_tile(
    table_ptr,
    chosen_ptr,
    row_ptr,
    tile,
    tokens,
    experts,
    SORTED: tl.constexpr,
    ACTIVE: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE_M: tl.constexpr,
):
    """Return the rows of a tile: (whether there are any, expert, is_row, place, choice).

    is_row, place and choice have an entry for each row of the tile: whether it is used, its row in
    the products' output, and token * ACTIVE + slot of the choice that it computes. With SORTED
    they come from the tables of `placed`; otherwise tile `tile` stands for choice `tile`, and has
    rows only if no choice before has the same expert.
    """
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
        expert = tl.load(chosen_ptr + tile)
        every = m[:, None] * ACTIVE + slot[None, :]
        inside = (m < tokens)[:, None] & (slot < ACTIVE)[None, :]
        hit = inside & (tl.load(chosen_ptr + every, mask=inside, other=0) == expert)
        is_first = tl.min(tl.min(tl.where(hit, every, tile), 1), 0) >= tile
        is_tile = is_first & (expert >= 0) & (expert < experts)
        choice = tl.max(tl.where(hit, every, -1), 1)
        is_row = choice >= 0
        choice = tl.maximum(choice, 0)
        place = choice
    return is_tile, expert.to(tl.int64), is_row, place.to(tl.int64), choice


@triton.jit
def _activated(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    """Return act(gate) * up elementwise, float32; for "clamped" as `ops.expert_mlp` defines it.

    limit, alpha: the constants of "clamped", not used otherwise.
    """
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
    elif ACTIVATION == "relu_squared":
        y = tl.where(gate < 0.0, 0.0, gate) * gate * up
    else:
        # A comparison and not a minimum, which would turn NaN into a number.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y = (up + 1.0) * gate / (1.0 + tl.exp(-alpha * gate))
    return y


@triton.jit
def _both_nibbles(byte, factor):
    """Return the bfloat16 numbers of the lower and the upper nibbles of bytes, times factors.

    Exponent and mantissa of a nibble become the lowest bits of the exponent and the highest of the
    mantissa of a bfloat16, which is then 2 ** -126 of the number, subnormal or not.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 p, q, sign, zero, big;
        mov.b32 zero, 0x80008000;  // -0.0: an addend that changes nothing
        mov.b32 big, 0x7E807E80;  // 2 ** 126
        prmt.b32 p, $4, 0, 0x4140;
        shl.b32 q, p, 6; shl.b32 sign, p, 12; and.b32 sign, sign, zero;
        lop3.b32 q, q, 0x01C001C0, sign, 0xEA;
        fma.rn.bf16x2 q, q, big, zero; fma.rn.bf16x2 $0, q, $5, zero;
        shl.b32 q, p, 2; shl.b32 sign, p, 8; and.b32 sign, sign, zero;
        lop3.b32 q, q, 0x01C001C0, sign, 0xEA;
        fma.rn.bf16x2 q, q, big, zero; fma.rn.bf16x2 $2, q, $5, zero;
        prmt.b32 p, $4, 0, 0x4342;
        shl.b32 q, p, 6; shl.b32 sign, p, 12; and.b32 sign, sign, zero;
        lop3.b32 q, q, 0x01C001C0, sign, 0xEA;
        fma.rn.bf16x2 q, q, big, zero; fma.rn.bf16x2 $1, q, $6, zero;
        shl.b32 q, p, 2; shl.b32 sign, p, 8; and.b32 sign, sign, zero;
        lop3.b32 q, q, 0x01C001C0, sign, 0xEA;
        fma.rn.bf16x2 q, q, big, zero; fma.rn.bf16x2 $3, q, $6, zero;
        }
        """,
        "=r,=r,=r,=r,r,r,r",
        args=[byte, factor],
        dtype=(tl.bfloat16, tl.bfloat16),
        is_pure=True,
        pack=4,
    )


@triton.jit
def _unpacked(
    byte, scale, DTYPE: tl.constexpr, IN_PAIRS: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    """Return the (N, K) values of an MXFP4 weight, in DTYPE.

    byte: (N, K / 2), the lower nibble first; scale: (N, K / 32), exponents plus 127, of which 0
    gives 0. IN_PAIRS: True to use instructions for two bfloat16 numbers.
    """
    scale = tl.broadcast_to(scale.to(tl.int32)[:, :, None], (N, K // 32, 16)).reshape(N, K // 2)
    if IN_PAIRS:
        factor = (scale << 7).to(tl.int16).to(tl.bfloat16, bitcast=True)
        low, high = _both_nibbles(byte, factor)
    else:
        bits = byte.to(tl.int32)
        big = 8.507059173023462e37  # 2 ** 126, see _both_nibbles
        factor = (scale << 23).to(tl.float32, bitcast=True)
        low = (((bits & 7) << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True)
        high = (((bits & 112) << 18) | ((bits & 128) << 24)).to(tl.float32, bitcast=True)
        low, high = (low * big * factor).to(DTYPE), (high * big * factor).to(DTYPE)
    return tl.join(low, high).reshape(N, K)


@triton.jit
def _scales(scale_ptr, output, is_output, k, channels, TILE_K: tl.constexpr):
    """Return the scales, bytes (TILE_N, TILE_K / 32), of an expert's MXFP4 weight from channel k.

    output, is_output: the weight's rows (TILE_N,) and whether they exist; scales that do not exist
    are 0.
    """
    groups = channels // 32
    group = k // 32 + tl.arange(0, TILE_K // 32)
    inside = is_output[:, None] & (group < groups)[None, :]
    at = scale_ptr + output.to(tl.int64)[:, None] * groups + group[None, :]
    return tl.load(at, mask=inside, other=0)


@triton.jit
def _product(
    row_ptr,
    is_row,
    w_ptr,
    scale_ptr,
    output,
    is_output,
    channels,
    PACKED: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Return the products of rows of x with rows of an expert's weight, (TILE_M, TILE_N) float32.

    row_ptr: the address of each row of x, (TILE_M,); is_row: whether it exists; w_ptr, scale_ptr:
    the weight and, with PACKED, its MXFP4 scales; output, is_output: the weight's rows (TILE_N,)
    and whether they exist.

    Scales are loaded a step ahead, since their rows need not lie as asynchronous copies want it.
    """
    dtype = row_ptr.dtype.element_ty
    wide = output.to(tl.int64)[:, None]
    scale = 0
    if PACKED:
        scale = _scales(scale_ptr, output, is_output, 0, channels, TILE_K)
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for k in range(0, channels, TILE_K):
        channel = k + tl.arange(0, TILE_K)
        inside = is_row[:, None] & (channel < channels)[None, :]
        x = tl.load(row_ptr[:, None] + channel[None, :], mask=inside, other=0.0)
        if PACKED:
            pairs = channels // 32 * 16  # so that a compiler sees how rows are aligned
            pair = k // 2 + tl.arange(0, TILE_K // 2)
            inside = is_output[:, None] & (pair < pairs)[None, :]
            byte = tl.load(w_ptr + wide * pairs + pair[None, :], mask=inside, other=0)
            following = _scales(scale_ptr, output, is_output, k + TILE_K, channels, TILE_K)
            weight = _unpacked(byte, scale, dtype, IN_PAIRS, TILE_N, TILE_K)
            scale = following
        else:
            inside = is_output[:, None] & (channel < channels)[None, :]
            weight = tl.load(w_ptr + wide * channels + channel[None, :], mask=inside, other=0.0)
        acc = tl.dot(x, weight.trans(1, 0), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens", "experts"])
def up_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    table_ptr,
    chosen_ptr,
    row_ptr,
    weight_ptr,
    a_ptr,
    tokens,
    experts,
    columns,
    inner,
    channels,
    stride_x,
    limit,
    alpha,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WEIGHED: tl.constexpr,
    BIASED: tl.constexpr,
    PACKED: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    SORTED: tl.constexpr,
    ACTIVE: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    is_tile, expert, is_row, place, choice = _rows_of_tile(
        table_ptr,
        chosen_ptr,
        row_ptr,
        tl.program_id(0) // columns,
        tokens,
        experts,
        SORTED,
        ACTIVE,
        SLOTS,
        TILE_M,
    )
    if is_tile:
        dtype = x_ptr.dtype.element_ty
        token = (choice // ACTIVE).to(tl.int64)
        column = tl.program_id(0) % columns
        output = column * TILE_N + tl.arange(0, TILE_N)
        outputs = 2 * inner if GATED else inner
        is_output = output < outputs
        # Gate and up in alternation, whichever way their rows lie.
        row = output if INTERLEAVED or not GATED else output % 2 * inner + output // 2
        shift = expert * outputs
        w = w_ptr + shift * (channels // 2 if PACKED else channels)
        scales = scale_ptr + shift * (channels // 32)
        acc = _product(
            x_ptr + token * stride_x,
            is_row,
            w,
            scales,
            row,
            is_output,
            channels,
            PACKED,
            IN_PAIRS,
            TILE_M,
            TILE_N,
            TILE_K,
        )
        if WEIGHED:
            acc *= tl.load(weight_ptr + choice, mask=is_row, other=0.0)[:, None]
        if BIASED:
            bias = tl.load(bias_ptr + shift + row, mask=is_output, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        if GATED:
            gate, up = tl.split(acc.reshape(TILE_M, TILE_N // 2, 2))
            a = _activated(gate, up, limit, alpha, ACTIVATION)
            channel = column * (TILE_N // 2) + tl.arange(0, TILE_N // 2)
        else:
            a = _activated(acc, 1.0, limit, alpha, ACTIVATION)
            channel = output
        to = a_ptr + place[:, None] * inner + channel[None, :]
        tl.store(to, a.to(dtype), mask=is_row[:, None] & (channel < inner)[None, :])


@triton.jit(do_not_specialize=["tokens", "experts"])
def down_kernel(
    a_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    table_ptr,
    chosen_ptr,
    row_ptr,
    o_ptr,
    tokens,
    experts,
    columns,
    outputs,
    channels,
    BIASED: tl.constexpr,
    PACKED: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    SORTED: tl.constexpr,
    ACTIVE: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    is_tile, expert, is_row, place, _ = _rows_of_tile(
        table_ptr,
        chosen_ptr,
        row_ptr,
        tl.program_id(0) // columns,
        tokens,
        experts,
        SORTED,
        ACTIVE,
        SLOTS,
        TILE_M,
    )
    if is_tile:
        dtype = a_ptr.dtype.element_ty
        output = tl.program_id(0) % columns * TILE_N + tl.arange(0, TILE_N)
        is_output = output < outputs
        shift = expert * outputs
        w = w_ptr + shift * (channels // 2 if PACKED else channels)
        scales = scale_ptr + shift * (channels // 32)
        acc = _product(
            a_ptr + place * channels,
            is_row,
            w,
            scales,
            output,
            is_output,
            channels,
            PACKED,
            IN_PAIRS,
            TILE_M,
            TILE_N,
            TILE_K,
        )
        if BIASED:
            bias = tl.load(bias_ptr + shift + output, mask=is_output, other=0.0)
            acc += bias.to(tl.float32)[None, :]
        to = o_ptr + place[:, None] * outputs + output[None, :]
        tl.store(to, acc.to(dtype), mask=is_row[:, None] & is_output[None, :])


@triton.jit(do_not_specialize=["experts", "places"])
def combine_kernel(
    o_ptr,
    weight_ptr,
    chosen_ptr,
    place_ptr,
    shared_ptr,
    gate_ptr,
    y_ptr,
    experts,
    channels,
    tiles,
    places,
    stride_shared,
    stride_gate,
    HAS_SHARED: tl.constexpr,
    GATED: tl.constexpr,
    WEIGHED: tl.constexpr,
    SORTED: tl.constexpr,
    ACTIVE: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
):
    token = (tl.program_id(0) // tiles).to(tl.int64)
    channel = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = channel < channels
    dtype = y_ptr.dtype.element_ty
    if HAS_SHARED:
        at = shared_ptr + token * stride_shared + channel
        shared = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        if GATED:
            gate = tl.load(gate_ptr + token * stride_gate).to(tl.float32)
            # Not tl.exp, whose last bits are not those of torch.
            gate = tl.div_rn(1.0, 1.0 + libdevice.exp(-gate)).to(dtype).to(tl.float32)
            # A sum with 0, so that float32, too, is rounded before the sum with y.
            shared = tl.fma(gate, shared, 0.0).to(dtype).to(tl.float32)
    acc = tl.zeros([TILE], tl.float32)
    for j in tl.static_range(ACTIVE):
        place = token * ACTIVE + j
        expert = tl.load(chosen_ptr + place)
        is_expert = (expert >= 0) & (expert < experts)
        weight = tl.load(weight_ptr + place, mask=is_expert, other=0.0) if WEIGHED else 1.0
        if SORTED:
            place = tl.load(place_ptr + place, mask=is_expert, other=0).to(tl.int64)
        at = o_ptr + place * channels + channel
        row = tl.load(at, mask=inside & is_expert, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            more = part * places.to(tl.int64) * channels
            row += tl.load(at + more, mask=inside & is_expert, other=0.0).to(tl.float32)
        acc += weight * row
    if HAS_SHARED:
        acc = acc.to(dtype).to(tl.float32) + shared
    tl.store(y_ptr + token * channels + channel, acc.to(dtype), mask=inside)


@triton.jit(do_not_specialize=["experts"])
def gather_kernel(
    x_ptr,
    chosen_ptr,
    place_ptr,
    sorted_ptr,
    experts,
    channels,
    tiles,
    stride_x,
    ACTIVE: tl.constexpr,
    TILE: tl.constexpr,
):
    token = (tl.program_id(0) // tiles).to(tl.int64)
    channel = tl.program_id(0) % tiles * TILE + tl.arange(0, TILE)
    inside = channel < channels
    x = tl.load(x_ptr + token * stride_x + channel, mask=inside, other=0.0)
    for j in tl.static_range(ACTIVE):
        choice = token * ACTIVE + j
        expert = tl.load(chosen_ptr + choice)
        is_expert = (expert >= 0) & (expert < experts)
        place = tl.load(place_ptr + choice, mask=is_expert, other=0).to(tl.int64)
        tl.store(sorted_ptr + place * channels + channel, x, mask=inside & is_expert)
