"""Four-bit keys and values as operands of 16-bit products: less than an instruction a number.

What: tiles of codes 0 ... 15, two in a byte, in shared memory -> float16 operands of mma.sync in
      registers; the orders of channels that they want of queries and leave in sums.
Grid: none, inlined into the kernels.
One call: a tile of 16 to 64 keys of four heads; each of four warps has a head.
Traffic: shared memory once, 4 to 16 bytes at a time.
Numerics: exact. A code c whose bits are the last of a float16's is c 2^-24, a subnormal number that
      products take as it is; one that stays four bits higher is 16 times as much. So `SCALE` undoes
      the first, and odd channels of queries and of sums are divided by 16.

Products are transposed, as `byte_operands` says: keys and values are the 16 rows of m16n8k16. Of a
left operand lane 4 g + t has the rows g and g + 8, and of each the columns 2 t + {0, 1} and 8 more.
A register holds two codes of a key that are four channels apart, or of one channel and two
neighbouring keys: a mask of two nibbles takes them out of a word, as it lies or shifted by a byte.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.device.byte_operands import (
    halves,
    more_keys,
    sum_layout,
    warps_layout,
)

INT4 = gl.constexpr(4)  # as in `triton.paged.quantise`
SCALE = gl.constexpr(2.0**24)  # what products of codes are divided by
# Eight codes of a key -> (0, 4), 16 (1, 5), (2, 6), 16 (3, 7).
_KEYS = gl.constexpr(
    "{ .reg .b32 y; shr.b32 y, $4, 8; "
    "and.b32 $0, $4, 0x000F000F; and.b32 $1, $4, 0x00F000F0; "
    "and.b32 $2, y, 0x000F000F; and.b32 $3, y, 0x00F000F0; }"
)
# Eight codes of two keys -> (even key, odd key) of each channel, times 16 of odd channels.
_VALUES = gl.constexpr(
    "{ .reg .b32 x, y, z, w; "
    "prmt.b32 x, $8, $9, 0x5410; prmt.b32 y, $8, $9, 0x7632; "
    "shr.b32 z, x, 8; shr.b32 w, y, 8; "
    "and.b32 $0, x, 0x000F000F; and.b32 $1, x, 0x00F000F0; "
    "and.b32 $2, z, 0x000F000F; and.b32 $3, z, 0x00F000F0; "
    "and.b32 $4, y, 0x000F000F; and.b32 $5, y, 0x00F000F0; "
    "and.b32 $6, w, 0x000F000F; and.b32 $7, w, 0x00F000F0; }"
)


@gluon.constexpr_function
def _words_of_a_lane(width):
    """Return how many neighbouring words (4 bytes, 8 codes) of a key one lane has: 2 if `width` is
    64, else 4; of width 256 a lane has two such pieces."""
    return min(4, width // 32)


@gluon.constexpr_function
def nibble_keys_layout(keys, width):
    """Return the register layout in which four warps, a head each, load keys of width / 2 bytes: 8
    or 16 neighbouring bytes a lane."""
    run = 4 * _words_of_a_lane(width)
    registers = [[0, 1 << bit] for bit in range(run.bit_length() - 1)]
    registers += [[0, 64]] * (width == 256)
    lanes = [[0, run], [0, 2 * run], [1, 0], [2, 0], [4, 0]]
    return warps_layout([*registers, *more_keys(keys)], lanes, keys, width // 2)


@gluon.constexpr_function
def nibble_values_layout(keys, width):
    """Return the register layout in which four warps, a head each, load values of width / 2
    bytes."""
    run = width // 16
    registers = [[0, 1 << bit] for bit in range(run.bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, run], [0, 2 * run], [0, 4 * run]]
    return warps_layout([*registers, [1, 0], *more_keys(keys)], lanes, keys, width // 2)


@gluon.jit
def divide_odd(x):
    """Return x (rows, width) with its odd channels divided by 16, exactly but for subnormal
    results."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1]
    even, odd = gl.split(x.reshape([rows, width // 2, 2]))
    return gl.join(even, odd * 0.0625).reshape([rows, width])


@gluon.jit
def nibble_key_order(x):
    """Return x (rows, width) with its channels in the order in which `nibble_keys_operand`
    multiplies them."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1]
    words: gl.constexpr = _words_of_a_lane(width)
    parts = x.reshape([rows, width // (32 * words), 4, words, 2, 2, 2])
    return parts.permute((0, 1, 3, 5, 6, 2, 4)).reshape([rows, width])


@gluon.jit
def nibble_keys_operand(x):
    """Return the left operand (4, keys, width) of c q^T, float16 codes, from bytes int8 (4 * keys,
    width / 2)."""
    width: gl.constexpr = 2 * x.shape[1]
    N: gl.constexpr = x.shape[0] // 4
    words: gl.constexpr = _words_of_a_lane(width)
    pairs = gl.inline_asm_elementwise(
        _KEYS, "=r,=r,=r,=r,r", [x], dtype=gl.int32, is_pure=True, pack=4
    )
    low, high = halves(pairs)
    parts = gl.join(low, high).reshape([4, N, width // (32 * words), 4, words, 2, 2, 2])
    parts = parts.permute((0, 1, 2, 4, 5, 6, 3, 7)).reshape([4, N, width])
    layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout(), 2)
    return gl.convert_layout(parts, layout, assert_trivial=True)


@gluon.jit
def nibble_value_pairs(x):
    """Convert bytes of values, int8 (4 * keys, width / 2), to float16 codes of two neighbouring
    keys: two int32 tensors (2 * keys, width / 2).

    The low half of a word is the even key, the high half the odd one. Column 4 w + j of the first
    tensor has channel 8 w + j, of the second channel 8 w + 4 + j.
    """
    size: gl.constexpr = x.shape[1]
    even, odd = gl.split(x.reshape([x.shape[0] // 2, 2, size]).permute((0, 2, 1)))
    return gl.inline_asm_elementwise(
        _VALUES, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [even, odd],
        dtype=(gl.int32, gl.int32), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def nibble_values_operand(first, second):
    """Return the left operand (4, width, keys) of c^T p^T from the two tensors of
    `nibble_value_pairs`."""
    width: gl.constexpr = 2 * first.shape[1]
    N: gl.constexpr = first.shape[0] // 2
    first_even, first_odd = halves(first)
    second_even, second_odd = halves(second)
    keys = gl.join(gl.join(first_even, first_odd), gl.join(second_even, second_odd))
    keys = keys.reshape([4, N // 2, 8, width // 64, 4, 2, 2]).permute((0, 3, 6, 4, 2, 1, 5))
    layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout(), 2)
    return gl.convert_layout(keys.reshape([4, width, N]), layout, assert_trivial=True)


@gluon.jit
def _signed(x, LOG: gl.constexpr):
    """Return x (rows, width) with the channels negated that `reference.four_bits` negates in each
    group of 2^LOG."""
    channel = gl.arange(0, x.shape[1], gl.SliceLayout(0, x.type.layout)) & (2**LOG - 1)
    pairs = channel & (channel >> 1) & 0x55
    pairs ^= pairs >> 4
    pairs ^= pairs >> 2
    return gl.where(gl.expand_dims(pairs & 1, 0) != 0, -x, x)


@gluon.jit
def rotate(x, LOG: gl.constexpr, BACK: gl.constexpr):
    """Return float32 x (rows, width), each group of 2^LOG channels rotated, or rotated back, in x's
    layout, in which a thread has neighbouring channels; see `triton.paged.four_bits.rotate`."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1]
    group: gl.constexpr = 2**LOG
    count: gl.constexpr = rows * width // group
    layout: gl.constexpr = x.type.layout
    if not BACK:
        x = _signed(x, LOG)
    for _ in gl.static_range(LOG):
        even, odd = gl.split(x.reshape([rows, width // 2, 2]))
        both = gl.join(even + odd, even - odd).reshape([count, group // 2, 2])
        x = gl.convert_layout(both.permute((0, 2, 1)).reshape([rows, width]), layout)
    x = x * (group**-0.5)
    if BACK:
        x = _signed(x, LOG)
    return x
