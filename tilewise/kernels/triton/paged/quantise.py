"""Eight-bit keys and values in Triton: functions shared by the kernels that write and read them.

Four bits are in `four_bits`; what they are told by is here.

what     widen and widen_once: stored numbers to the type of a product; narrow: float32 to stored
         numbers; the rule is that of `reference.quantise`
grid     none: these functions are inlined
program  works on tiles in registers
traffic  none
numerics widening is exact. float8_e4m3fn is written by its bits, and read by them where the GPU has
         no instruction (before sm_89) and in the interpreter: moved to the exponent and mantissa of
         a float16 it is 2^-8 of its value, which `factor` corrects as part of the scale
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.spec import FOUR_BITS, scale_per_slot

# The formats of a cache: floats, int8, float8_e4m3fn, float8_e4m3fn to be read by its bits, and two
# codes of 4 bits a byte.
# Kernels see 8-bit caches as int8: Triton has no float8 zero for the elements that a load masks.
FLOAT, INT8, E4M3, E4M3_BITS, INT4 = (tl.constexpr(kind) for kind in range(5))
_INT8_LIMIT, _E4M3_LIMIT = tl.constexpr(127.0), tl.constexpr(448.0)
# Four bytes to four bfloat16, in 8 instructions or 10: the hardware's own conversions go through
# float32, at a quarter of the speed. 0x43 << 8 | u is 128 + u for u < 128, from which 128 is
# subtracted, or 256 if the sign bit is set.
_INT8_TO_BF16 = tl.constexpr("""{
.reg .b32 x<2>, y<2>, one;
mov.b32 one, 0x3F803F80;
prmt.b32 x0, $2, 0x43434343, 0x4140;
prmt.b32 x1, $2, 0x43434343, 0x4342;
lop3.b32 y0, x0, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 y1, x1, 0x00800080, 0xC300C300, 0xEA;
and.b32 x0, x0, 0xFF7FFF7F;
and.b32 x1, x1, 0xFF7FFF7F;
fma.rn.bf16x2 $0, x0, one, y0;
fma.rn.bf16x2 $1, x1, one, y1;
}""")
# Sign, exponent and mantissa move to their places; the biases, 7 and 127, are 2^120 apart.
_E4M3_TO_BF16 = tl.constexpr("""{
.reg .b32 x<2>, y<2>, bias, zero;
mov.b32 bias, 0x7B807B80;
mov.b32 zero, 0x80008000;
prmt.b32 x0, $2, 0, 0x1404;
prmt.b32 x1, $2, 0, 0x3424;
shr.b32 y0, x0, 4;
shr.b32 y1, x1, 4;
and.b32 y0, y0, 0x07F007F0;
and.b32 y1, y1, 0x07F007F0;
lop3.b32 y0, x0, 0x80008000, y0, 0xEA;
lop3.b32 y1, x1, 0x80008000, y1, 0xEA;
fma.rn.bf16x2 $0, y0, bias, zero;
fma.rn.bf16x2 $1, y1, bias, zero;
}""")
# Two words of 16 bits, each the bytes of two channels, to the two even ones and the two odd ones.
_INT8_PAIRS_TO_BF16 = tl.constexpr("""{
.reg .b32 x<2>, y<2>, odd, one;
mov.b32 one, 0x3F803F80;
shr.b32 odd, $2, 8;
lop3.b32 x0, $2, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 y0, $2, 0x00800080, 0xC300C300, 0xEA;
lop3.b32 x1, odd, 0x007F007F, 0x43004300, 0xEA;
lop3.b32 y1, odd, 0x00800080, 0xC300C300, 0xEA;
fma.rn.bf16x2 $0, x0, one, y0;
fma.rn.bf16x2 $1, x1, one, y1;
}""")
_E4M3_PAIRS_TO_BF16 = tl.constexpr("""{
.reg .b32 x<2>, y<2>, bias, zero;
mov.b32 bias, 0x7B807B80;
mov.b32 zero, 0x80008000;
shl.b32 y0, $2, 4;
shr.b32 y1, $2, 4;
shl.b32 x0, $2, 8;
and.b32 y0, y0, 0x07F007F0;
and.b32 y1, y1, 0x07F007F0;
lop3.b32 y0, x0, 0x80008000, y0, 0xEA;
lop3.b32 y1, $2, 0x80008000, y1, 0xEA;
fma.rn.bf16x2 $0, y0, bias, zero;
fma.rn.bf16x2 $1, y1, bias, zero;
}""")
# below this 1 / scale exceeds float32: such rows become 0
SMALLEST_SCALE = tl.constexpr(2.0**-126)


def cache_kind(dtype: torch.dtype, arch: int) -> int:
    """Return how a kernel on a GPU of capability `arch` reads a cache: FLOAT, INT8, E4M3, ... .

    float8_e4m3fn is E4M3_BITS, read by its bits, before capability 8.9 and in the interpreter.
    """
    if dtype == FOUR_BITS:
        return INT4.value
    if dtype != torch.float8_e4m3fn:
        return INT8.value if dtype == torch.int8 else FLOAT.value
    return E4M3.value if arch >= 89 and not device.interpreting() else E4M3_BITS.value


class Scales(NamedTuple):
    """The arguments of an attention kernel for its cache's format and scales.

    Attributes:
        kind: the format of the cache, see `cache_kind`.
        arguments: k_scale, v_scale and their strides by block, slot and head.
    """

    kind: int
    arguments: tuple[Any, ...]

    @classmethod
    def of(
        cls, cache: Tensor, k_scale: Tensor | None, v_scale: Tensor | None, like: Tensor, arch: int
    ) -> Scales:
        """Return the arguments for a cache with its scales, (N, P, Hk) or (Hk,), or without.

        Args:
            like: a float32 tensor that stands for absent scales and is not read.
            arch: the compute capability of the GPU.
        """
        kind = cache_kind(cache.dtype, arch)
        if k_scale is None or v_scale is None:
            return cls(kind, (like, like, *[0] * 6))
        strides = [x for s in (k_scale, v_scale) for x in scale_per_slot(s, cache).stride()]
        return cls(kind, (k_scale, v_scale, *strides))


def as_bytes(cache: Tensor) -> Tensor:
    """Return a cache of one byte an element viewed as int8, and other tensors unchanged."""
    return cache.view(torch.int8) if cache.element_size() == 1 else cache


@triton.jit
def widen(x, kind: tl.constexpr, KIND: tl.constexpr):
    """Return stored numbers x of the format KIND, converted to the dtype `kind`.

    The results are the values without their scale, times 1 / factor(KIND).
    """
    if KIND == E4M3_BITS:
        bits = x.to(tl.int32)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        return half.to(tl.int16).to(tl.float16, bitcast=True).to(kind)
    if KIND == E4M3:
        return x.to(tl.float8e4nv, bitcast=True).to(kind)
    return x.to(kind)


@triton.jit
def widen_once(x, KIND: tl.constexpr):
    """Return stored numbers of INT8 or E4M3 as bfloat16, for a tile that several products read.

    The compiler would move the conversion to each of its uses, where the operands of a product are
    gathered byte by byte. It does not move inline assembly that is not pure: with a pure one 8-bit
    latents took 1.5 (16 heads) and 2.1 times as long (H200, 2026-11-22). Not for Blackwell's own
    products, whose pipeline refuses it.
    """
    asm: tl.constexpr = _INT8_TO_BF16 if KIND == INT8 else _E4M3_TO_BF16
    return tl.inline_asm_elementwise(asm, "=r,=r,r", [x], tl.bfloat16, is_pure=False, pack=4)


@triton.jit
def widen_pairs(x, dtype: tl.constexpr, KIND: tl.constexpr, PTX: tl.constexpr):
    """Return the even and the odd channels of int16 words x, in `dtype`, each in the shape of x.

    A word holds the stored numbers of two neighbouring channels. A transposed operand of bytes
    would be gathered byte by byte; words are loaded as 16-bit numbers are, and widened in
    registers. PTX: True if NVIDIA's instructions may be used.
    """
    if PTX:
        asm: tl.constexpr = _INT8_PAIRS_TO_BF16 if KIND == INT8 else _E4M3_PAIRS_TO_BF16
        even, odd = tl.inline_asm_elementwise(
            asm, "=r,=r,r", [x], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
        )
    else:
        even, odd = widen(x.to(tl.int8), dtype, KIND), widen((x >> 8).to(tl.int8), dtype, KIND)
    return even, odd


@triton.jit
def factor(KIND: tl.constexpr):
    """Return the number by which results of `widen` must be multiplied, besides their scales."""
    if KIND == E4M3_BITS:
        return 256.0
    return 1.0


@triton.jit
def scale_of(amax, is_finite, KIND: tl.constexpr):
    """Return the scale of rows: amax / the largest number of KIND, 127 (INT8) or 448 (E4M3).

    It is 0 where that is subnormal, and NaN where `is_finite` is False. amax: the largest size of a
    row's channels.
    """
    if KIND == INT8:
        scale = amax * (1.0 / _INT8_LIMIT)
    else:
        scale = amax * (1.0 / _E4M3_LIMIT)
    scale = tl.where(scale < SMALLEST_SCALE, 0.0, scale)
    return tl.where(is_finite, scale, float("nan"))


@triton.jit
def inverse_of(scale):
    """Return 1 / scale, rounded to nearest; 0 where scale is 0 or NaN."""
    safe = tl.where(scale > 0.0, scale, 1.0)
    return tl.where(scale > 0.0, tl.div_rn(safe * 0.0 + 1.0, safe), 0.0)


@triton.jit
def narrow(x, KIND: tl.constexpr):
    """Return float32 numbers rounded to the format KIND, INT8 or E4M3, as int8 bits.

    They are rounded to nearest even and saturated; NaN becomes 0.
    """
    x = tl.where(x == x, x, 0.0)
    if KIND == INT8:
        x = tl.minimum(tl.maximum(x, -_INT8_LIMIT), _INT8_LIMIT)
        # Integers of at most 8 bits end up in the low byte of x + 1.5 * 2^23.
        return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    x = tl.minimum(tl.maximum(x, -_E4M3_LIMIT), _E4M3_LIMIT)
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    size = magnitude.to(tl.float32, bitcast=True)
    # Three bits of mantissa remain; the bias changes from 127 to 7.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Steps of 2^-9 are those of a float32 at 2^14, whose bits are 0x46800000.
    subnormal = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < 0.015625, subnormal, normal)
    return (code | ((bits >> 24) & 0x80)).to(tl.int8)
