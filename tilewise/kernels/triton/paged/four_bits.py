"""Four-bit keys and values in Triton: their rotation, and the numbers that codes stand for.

what     rotate: groups of channels with signs, times the orthonormal Hadamard matrix; pack: rotated
         rows to bytes of two codes, with their scales; widen_codes: bytes to the type of a product.
         The rule is that of `reference.four_bits`
grid     none: these functions are inlined
program  works on tiles in registers
traffic  none
numerics float32; widening is exact: code - zero is an integer of -15 ... 15
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.kernels.spec import MOST_ROTATED
from tilewise.kernels.triton.paged.quantise import SMALLEST_SCALE, inverse_of

TOP = tl.constexpr(15.0)  # the largest code
ZERO_BITS = tl.constexpr(15)  # of a scale's bits, those that hold the zero
# Four bytes, and -(128 + zero) of each, to twice two words of two bfloat16: the even channels', and
# the odd ones'. A code among the last bits of 128 is 128 + code.
_TO_BF16 = tl.constexpr("""{
.reg .b32 low, high, w<4>, one;
mov.b32 one, 0x3F803F80;
and.b32 low, $4, 0x0F0F0F0F;
shr.u32 high, $4, 4;
and.b32 high, high, 0x0F0F0F0F;
prmt.b32 w0, low, 0x43434343, 0x4140;
prmt.b32 w1, low, 0x43434343, 0x4342;
prmt.b32 w2, high, 0x43434343, 0x4140;
prmt.b32 w3, high, 0x43434343, 0x4342;
fma.rn.bf16x2 $0, w0, one, $5;
fma.rn.bf16x2 $1, w1, one, $6;
fma.rn.bf16x2 $2, w2, one, $5;
fma.rn.bf16x2 $3, w3, one, $6;
}""")


def log_of_rotated(width: int) -> int:
    """Return log2 of the number of channels that are rotated together in rows of `width` channels.

    The number is the largest power of two that divides `width`, at most MOST_ROTATED.
    """
    return min(MOST_ROTATED, width & -width).bit_length() - 1


@triton.jit
def _signed(x, LOG: tl.constexpr):
    """Return x (ROWS, WIDTH) with the channels negated that the rule of the rotation negates.

    Signs repeat after each group of 2^LOG channels; applying them twice changes nothing.
    """
    channel = tl.arange(0, x.shape[1]) & (2**LOG - 1)
    pairs = channel & (channel >> 1) & 0x55
    pairs ^= pairs >> 4
    pairs ^= pairs >> 2
    return tl.where((pairs & 1)[None, :] != 0, -x, x)


@triton.jit
def rotate(x, LOG: tl.constexpr, BACK: tl.constexpr = False):
    """Return float32 x (ROWS, WIDTH), each group of 2^LOG channels rotated, or rotated back.

    Each stage adds and subtracts neighbours and puts all sums before all differences. So the same
    stage, done LOG times, reaches every pair and leaves channels in their order.
    """
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    GROUP: tl.constexpr = 2**LOG
    GROUPS: tl.constexpr = ROWS * WIDTH // GROUP
    if not BACK:
        x = _signed(x, LOG)
    x = tl.reshape(x, (GROUPS, GROUP))
    for _ in tl.static_range(LOG):
        even, odd = tl.split(tl.reshape(x, (GROUPS, GROUP // 2, 2)))
        x = tl.join(even + odd, even - odd)
        x = tl.reshape(tl.permute(x, (0, 2, 1)), (GROUPS, GROUP))
    x = tl.reshape(x * (GROUP**-0.5), (ROWS, WIDTH))
    if BACK:
        x = _signed(x, LOG)
    return x


@triton.jit
def pack(x):
    """Return the codes of rotated rows x as int8 (ROWS, WIDTH / 2), and their scales (ROWS,).

    A byte holds the code of an even channel in its low half, of the next one in its high half; the
    last bits of a scale hold the row's zero. The scale is 0 for a row of zeros, NaN for one with an
    infinity or NaN. Padding channels of x must be 0.
    """
    ROWS: tl.constexpr = x.shape[0]
    WIDTH: tl.constexpr = x.shape[1]
    is_finite = tl.sum(x * 0.0, 1) == 0.0
    lowest = tl.minimum(tl.min(x, 1), 0.0)
    highest = tl.maximum(tl.max(x, 1), 0.0)
    scale = (highest - lowest) * (1.0 / TOP)
    has_codes = is_finite & (scale >= SMALLEST_SCALE)
    scale = tl.where(has_codes, scale, 1.0)
    zero = tl.where(has_codes, _nearest(-lowest * inverse_of(scale)), 0)
    zero = tl.minimum(zero, 15)
    bits = (scale.to(tl.int32, bitcast=True) & ~ZERO_BITS) | zero
    scale = bits.to(tl.float32, bitcast=True)
    codes = _nearest(tl.where(has_codes[:, None], x * inverse_of(scale)[:, None], 0.0))
    codes = tl.minimum(tl.maximum(codes + zero[:, None], 0), 15)
    low, high = tl.split(tl.reshape(codes, (ROWS, WIDTH // 2, 2)))
    scale = tl.where(has_codes, scale, tl.where(is_finite, 0.0, float("nan")))
    return (low | (high << 4)).to(tl.int8), scale


@triton.jit
def _nearest(x):
    """Return float32 numbers of at most 2^21 in size as the nearest int32, ties to even."""
    return (x + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000


@triton.jit
def widen_codes(x, scale, dtype: tl.constexpr, PTX: tl.constexpr):
    """Return code - zero of the even and of the odd channels of bytes int8 x (ROWS, WIDTH).

    Each result is (ROWS, WIDTH) of `dtype`, without the scale.

    Args:
        scale: (ROWS,), whose last bits hold zero.
        PTX: True if the GPU takes the instructions of NVIDIA's.
    """
    zero = (scale.to(tl.int32, bitcast=True) & ZERO_BITS).to(tl.int16)[:, None]
    # Floats of so few bits subtract exactly; integers would be converted at a quarter of the speed.
    if PTX:
        minus = tl.broadcast_to((zero | -0x3D00).to(tl.bfloat16, bitcast=True), x.shape)
        even, odd = tl.inline_asm_elementwise(
            _TO_BF16, "=r,=r,=r,=r,r,r,r", [x, minus], (tl.bfloat16, tl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        start = (zero | 0x4300).to(tl.bfloat16, bitcast=True).to(tl.float32)
        bits = x.to(tl.int16)
        even = ((bits & 15) | 0x4300).to(tl.bfloat16, bitcast=True).to(tl.float32)
        odd = (((bits >> 4) & 15) | 0x4300).to(tl.bfloat16, bitcast=True).to(tl.float32)
        even, odd = even - start, odd - start
    return even.to(dtype), odd.to(dtype)


@triton.jit
def split_channels(x):
    """Return the even and the odd channels of x (ROWS, WIDTH)."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def join_channels(even, odd):
    """Return the tile (ROWS, 2 n) with these even and odd channels, (ROWS, n) each."""
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))
