"""The values of a part of a weight of 8 or 4 bits.

what     W[n, k] = (value(code) - zero) * scale - minimum of some rows n, see `QuantisedWeight`
grid     (tiles of rows, tiles of columns)
program  TILE_N rows x TILE_K columns
traffic  codes and scales once, W once
numerics in float32, rounded where the format rounds, then to the dtype of W
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels import quantised_weight

_ROWS = tl.constexpr(quantised_weight.SCALE_ROWS)
_WORD = tl.constexpr(quantised_weight.SCALE_WORD)

# How 8 bits are read; what is none of these is read as it is.
PLAIN, E8M0, E4M3, E5M2 = (tl.constexpr(i) for i in range(4))


@triton.jit
def _wide(raw, KIND: tl.constexpr):
    """Return numbers as float32; KIND says whether they are bytes of an 8-bit float, or PLAIN."""
    if KIND == E8M0:
        bits = raw.to(tl.int32) << 23
        return tl.where(raw == 0, 5.877471754111438e-39, bits.to(tl.float32, bitcast=True))
    elif KIND == E4M3:
        bits = raw.to(tl.int32)
        bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    elif KIND == E5M2:
        bits = raw.to(tl.int32)
        bits = ((bits & 0x7F) << 21) | ((bits & 0x80) << 24)
        return bits.to(tl.float32, bitcast=True) * 5.192296858534828e33  # 2 ** 112
    else:
        return raw.to(tl.float32)


@triton.jit
def _e2m1(code):
    """Return the float32 values of codes 0 ... 15 of the format E2M1, that of MXFP4."""
    bits = code.to(tl.int32)
    bits = ((bits & 7) << 22) | ((bits & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2 ** 126


@triton.jit
def _looked_up(code, table):
    """Return table[code] elementwise, float32; `table` is a tuple of 16 numbers."""
    value = tl.zeros(code.shape, tl.float32)
    for i in tl.static_range(16):
        value = tl.where(code == i, table[i], value)
    return value


@triton.jit
def _rounded(x, COMPUTED: tl.constexpr):
    """Return float32 numbers rounded to the dtype in which the format computes."""
    if tl.float32 == COMPUTED:
        return x
    else:
        return x.to(COMPUTED).to(tl.float32)


@triton.jit
def _byte_of(k, BITS: tl.constexpr):
    """Return the index of the byte that has column k's code in a row of codes in lanes' order.

    `QuantisedWeight.lanes` puts codes in this order. BITS: 4 or 8, the bits of a code.
    """
    lane, pair, half = (k // 2) % 4, k % 2, (k // 8) % 2
    if BITS == 4:
        word = 4 * lane + (k // 32) % 4
        return k // 128 * 64 + 4 * word + 2 * pair + (k // 16) % 2
    else:
        word = 4 * lane + (k // 16) % 4
        return k // 64 * 64 + 4 * word + 2 * pair + half


@triton.jit
def _gathered(word, k):
    """Return the 4-bit codes of columns k from the 32-bit words that hold them.

    The bits of the eight codes of a word are spread over it, see `kernels.quantised_weight`.
    """
    place, half = k // 8 % 4, k % 2 * 16
    right = tl.where(place == 0, 28, tl.where(place == 1, 0, tl.where(place == 2, 6, 2)))
    word = word.to(tl.int64) & 0xFFFFFFFF
    turned = ((word >> right) | (word << (32 - right))) >> half
    magnitude = (turned >> 6) & 7
    magnitude = tl.where(place == 3, (magnitude & 6) | ((word >> half) & 1), magnitude)
    return magnitude | ((turned >> 12) & 8)


@triton.jit(do_not_specialize=["first_row", "rows"])
def values_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    minimums_ptr,
    outer_ptr,
    outer_minimums_ptr,
    table,
    w_ptr,
    first_row,
    rows,
    columns,
    grid,
    outer_grid,
    block_rows,
    outer_rows,
    BLOCK: tl.constexpr,
    OUTER_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    BITS: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    MINIMUMS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    IS_E2M1: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    HAS_OUTER: tl.constexpr,
    HAS_OUTER_MINIMUMS: tl.constexpr,
    COMPUTED: tl.constexpr,
    IN_LANES: tl.constexpr,
    SPREAD: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
):
    """Write the values of a tile of weight rows first_row, first_row + 1, ... to W (rows, columns).

    GROUP: a number of neighbouring columns that always share a scale; it divides BLOCK and TILE_K.
    Columns keep the order of the codes.
    """
    n = tl.program_id(0) * TILE_N + tl.arange(0, TILE_N)
    k = tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)
    is_row = (n < rows)[:, None]
    inside = is_row & (k < columns)[None, :]
    row = (first_row + n).to(tl.int64)[:, None]
    if SPREAD:
        word = k // 128 * 16 + _byte_of(k % 128, BITS) // 4
        at = codes_ptr.to(tl.pointer_type(tl.int32)) + row * (columns // 8) + word[None, :]
        code = _gathered(tl.load(at, mask=inside, other=0), k[None, :])
        value = _e2m1(code).reshape(TILE_N, TILE_K // GROUP, GROUP)
    elif IN_LANES:
        at = codes_ptr + row * (columns * BITS // 8) + _byte_of(k, BITS)[None, :]
        code = tl.load(at, mask=inside, other=0)
        if BITS == 4:
            code = (code >> (k // 8 % 2 * 4).to(tl.uint8)[None, :]) & 15
            if IS_E2M1:
                value = _e2m1(code)
            elif HAS_TABLE:
                value = _looked_up(code, table)
            else:
                value = code.to(tl.float32)
        else:
            value = _wide(code, CODES)
        value = value.reshape(TILE_N, TILE_K // GROUP, GROUP)
    elif BITS == 4:
        byte = tl.program_id(1) * (TILE_K // 2) + tl.arange(0, TILE_K // 2)
        held = is_row & (byte < columns // 2)[None, :]
        packed = tl.load(codes_ptr + row * (columns // 2) + byte[None, :], mask=held, other=0)
        if IS_E2M1:
            low, high = _e2m1(packed & 15), _e2m1(packed >> 4)
        elif HAS_TABLE:
            low, high = _looked_up(packed & 15, table), _looked_up(packed >> 4, table)
        else:
            low = (packed & 15).to(tl.float32)
            high = (packed >> 4).to(tl.float32)
        value = tl.join(low, high).reshape(TILE_N, TILE_K // GROUP, GROUP)
    else:
        code = tl.load(codes_ptr + row * columns + k[None, :], mask=inside, other=0)
        value = _wide(code, CODES).reshape(TILE_N, TILE_K // GROUP, GROUP)
    first = tl.program_id(1) * TILE_K + GROUP * tl.arange(0, TILE_K // GROUP)[None, :]
    here = is_row & (first < columns)
    if SPREAD:  # see `QuantisedWeight.lanes`
        group = first // BLOCK
        at = row // _ROWS * (grid * _ROWS) + group // _WORD * (_ROWS * _WORD)
        at += row % _ROWS * _WORD + group % _WORD
    else:
        at = row // block_rows * grid + first // BLOCK
    outer_at = row // outer_rows * outer_grid + first // OUTER_BLOCK
    scale = _wide(tl.load(scales_ptr + at, mask=here, other=0), SCALES)
    if HAS_OUTER:
        scale *= tl.load(outer_ptr + outer_at, mask=here, other=0).to(tl.float32)
    if HAS_ZEROS:
        zero = tl.load(zeros_ptr + at, mask=here, other=0).to(tl.float32)
        value = _rounded(value - zero[:, :, None], COMPUTED)
    value = _rounded(value * scale[:, :, None], COMPUTED)
    if HAS_MINIMUMS:
        less = _wide(tl.load(minimums_ptr + at, mask=here, other=0), MINIMUMS)
        if HAS_OUTER_MINIMUMS:
            less *= tl.load(outer_minimums_ptr + outer_at, mask=here, other=0).to(tl.float32)
        value = _rounded(value - less[:, :, None], COMPUTED)
    to = w_ptr + n.to(tl.int64)[:, None] * columns + k[None, :]
    tl.store(to, value.reshape(TILE_N, TILE_K).to(w_ptr.dtype.element_ty), mask=inside)
