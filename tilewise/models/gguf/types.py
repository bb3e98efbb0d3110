"""The types of numbers in GGUF files, each repacked without loss into a `QuantisedWeight`.

A row is blocks of 32 or 256 numbers. Types of up to 4 bits become codes of 4 bits, wider ones of 8;
k-quants keep the two levels of their scales. Values are those of the `gguf` package's `quants`, bit
for bit. Source: ggml-common.h and ggml-quants.c of ggml.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.ops import QuantisedWeight

__all__ = ["TYPES", "GgufType", "repack"]

_WIDE = 256  # numbers of a super-block, which has one factor for its scales
_IQ4 = (
    -127.0,
    -104.0,
    -83.0,
    -65.0,
    -49.0,
    -35.0,
    -22.0,
    -10.0,
    1.0,
    13.0,
    25.0,
    38.0,
    53.0,
    69.0,
    89.0,
    113.0,
)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MXFP4 = (*_E2M1, *(0.0 - x for x in _E2M1))  # ggml has no negative zero
_AT_ONCE = 1 << 25  # bytes repacked at a time

Unpack = Callable[[Tensor], QuantisedWeight]


@dataclass(frozen=True, slots=True)
class GgufType:
    """A type in which a GGUF file stores numbers, in blocks of some of a row's numbers.

    Attributes:
        name: the type's name in ggml.
        block: the count of numbers in a block.
        size: the bytes of a block.
        dtype: the dtype of float numbers; None for codes.
        unpack: a function of blocks, uint8 (N, blocks, size), which returns the weight; None for
            floats.
    """

    name: str
    block: int
    size: int
    dtype: torch.dtype | None = None
    unpack: Unpack | None = None


def repack(data: Tensor, kind: GgufType) -> Tensor | QuantisedWeight:
    """Return rows of a file as a tensor (N, K), or as a quantised weight.

    Args:
        data: uint8 (N, bytes of a row), whose memory need not be aligned.
        kind: the type of the rows.
    """
    if kind.dtype is not None:
        return data.contiguous().clone().view(kind.dtype)
    assert kind.unpack is not None
    rows, width = data.shape
    step = max(_AT_ONCE // width, 1)
    parts = [
        kind.unpack(data[at : at + step].reshape(-1, width // kind.size, kind.size))
        for at in range(0, rows, step)
    ]
    whole = QuantisedWeight.concatenate(parts)
    assert whole is not None
    return whole


def _half(blocks: Tensor, at: int) -> Tensor:
    """Return the float16 at byte `at` of each of blocks, uint8 (N, blocks, size): float16 (N,
    blocks)."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1)


def _nibbles(packed: Tensor) -> Tensor:
    """Return the 4-bit codes of blocks, (..., 2 n) from uint8 (..., n): the lower halves of a
    block's bytes first, then all upper halves."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _shifted(packed: Tensor, bits: int, most: int, run: int) -> Tensor:
    """Unpack codes of `bits` bits.

    Each run of `run` bytes has `run` codes in its lowest bits, then `run` codes in the next, and so
    on.

    Args:
        most: the largest code, as a mask.

    Returns:
        uint8 (N, blocks, codes).
    """
    runs = packed.unflatten(-1, (-1, run))
    parts = [(runs >> shift) & most for shift in range(0, 8, bits)]
    return torch.stack(parts, -2).flatten(-3)


def _narrow(codes: Tensor) -> Tensor:
    """Return codes of 0 to 15, (N, blocks, numbers), packed two a byte with the first in the lower
    half, uint8 (N, K / 2)."""
    flat = codes.flatten(1)
    return flat[:, ::2] | (flat[:, 1::2] << 4)


def _signed(codes: Tensor, offset: int) -> Tensor:
    """Return codes (N, blocks, numbers) minus an offset, int8 (N, K)."""
    return codes.flatten(1).view(torch.int8) - offset


def _plain(codes: Tensor, d: Tensor, table: tuple[float, ...] | None = None) -> QuantisedWeight:
    return QuantisedWeight(codes, d, (1, 32), table=table)


def _two_levels(
    codes: Tensor, scales: Tensor, d: Tensor, table: tuple[float, ...] | None = None
) -> QuantisedWeight:
    """Return a weight with integer scales (N, blocks, groups) and one factor `d` for each block."""
    group = _WIDE // scales.shape[-1]
    return QuantisedWeight(
        codes, scales.flatten(1), (1, group), table=table, outer=d, outer_block=(1, _WIDE)
    )


def _q4_0(b: Tensor) -> QuantisedWeight:
    table = tuple(map(float, range(-8, 8)))
    return _plain(_narrow(_nibbles(b[..., 2:])), _half(b, 0), table)


def _q4_1(b: Tensor) -> QuantisedWeight:
    return replace(_plain(_narrow(_nibbles(b[..., 4:])), _half(b, 0)), minimums=-_half(b, 2))


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return the fifth bits of a block's 32 codes, which four bytes hold, each as 0 or 16."""
    bits = (packed[..., None] >> torch.arange(8, dtype=torch.uint8)) & 1
    return bits.flatten(-2) << 4


def _q5_0(b: Tensor) -> QuantisedWeight:
    codes = _nibbles(b[..., 6:]) | _fifth_bits(b[..., 2:6])
    return _plain(_signed(codes, 16), _half(b, 0))


def _q5_1(b: Tensor) -> QuantisedWeight:
    codes = _nibbles(b[..., 8:]) | _fifth_bits(b[..., 4:8])
    return replace(_plain(_signed(codes, 0), _half(b, 0)), minimums=-_half(b, 2))


def _q8_0(b: Tensor) -> QuantisedWeight:
    return _plain(_signed(b[..., 2:].contiguous(), 0), _half(b, 0))


def _q2_k(b: Tensor) -> QuantisedWeight:
    scales, codes = b[..., :16], _shifted(b[..., 16:80], 2, 3, 32)
    weight = _two_levels(_narrow(codes), scales & 15, _half(b, 80))
    minimums = (scales >> 4).flatten(1)
    return replace(weight, minimums=minimums, outer_minimums=_half(b, 82))


def _q3_k(b: Tensor) -> QuantisedWeight:
    high = _shifted(b[..., :32], 1, 1, 32)
    codes = _shifted(b[..., 32:96], 2, 3, 32) | (high << 2)  # of 0 to 7, for -4 to 3
    low, top = b[..., 96:104], b[..., 104:108]
    six = torch.cat((low & 15, low >> 4), -1) | (_shifted(top, 2, 3, 4) << 4)
    table = (*map(float, range(-4, 4)), *(0.0,) * 8)
    return _two_levels(_narrow(codes), six.view(torch.int8) - 32, _half(b, 108), table)


def _six_bits(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight minimums of 6 bits from twelve bytes, uint8 (N, blocks, 8)
    each."""
    d, m, both = packed[..., :4], packed[..., 4:8], packed[..., 8:12]
    scales = torch.cat((d & 63, (both & 15) | ((d >> 2) & 48)), -1)
    return scales, torch.cat((m & 63, (both >> 4) | ((m >> 2) & 48)), -1)


def _with_minimums(codes: Tensor, b: Tensor) -> QuantisedWeight:
    scales, minimums = _six_bits(b[..., 4:16])
    weight = _two_levels(codes, scales, _half(b, 0))
    return replace(weight, minimums=minimums.flatten(1), outer_minimums=_half(b, 2))


def _q4_k(b: Tensor) -> QuantisedWeight:
    return _with_minimums(_narrow(_shifted(b[..., 16:], 4, 15, 32)), b)


def _q5_k(b: Tensor) -> QuantisedWeight:
    codes = _shifted(b[..., 48:], 4, 15, 32) | (_shifted(b[..., 16:48], 1, 1, 32) << 4)
    return _with_minimums(_signed(codes, 0), b)


def _q6_k(b: Tensor) -> QuantisedWeight:
    codes = _shifted(b[..., :128], 4, 15, 64) | (_shifted(b[..., 128:192], 2, 3, 32) << 4)
    scales = b[..., 192:208].contiguous().view(torch.int8)
    return _two_levels(_signed(codes, 32), scales, _half(b, 208))


def _iq4_nl(b: Tensor) -> QuantisedWeight:
    return _plain(_narrow(_nibbles(b[..., 2:])), _half(b, 0), _IQ4)


def _iq4_xs(b: Tensor) -> QuantisedWeight:
    high, low = b[..., 2:4], b[..., 4:8]
    top = _shifted(high, 2, 3, 1)
    four = torch.stack((low & 15, low >> 4), -1).flatten(-2)
    scales = (four | (top << 4)).view(torch.int8) - 32
    codes = _narrow(_shifted(b[..., 8:], 4, 15, 16))
    return _two_levels(codes, scales, _half(b, 0), _IQ4)


def _mxfp4(b: Tensor) -> QuantisedWeight:
    scales = b[..., 0].contiguous().view(torch.float8_e8m0fnu)
    return _plain(_narrow(_nibbles(b[..., 1:])), scales, _MXFP4)


TYPES: dict[int, GgufType | str] = {
    0: GgufType("F32", 1, 4, torch.float32),
    1: GgufType("F16", 1, 2, torch.float16),
    2: GgufType("Q4_0", 32, 18, unpack=_q4_0),
    3: GgufType("Q4_1", 32, 20, unpack=_q4_1),
    6: GgufType("Q5_0", 32, 22, unpack=_q5_0),
    7: GgufType("Q5_1", 32, 24, unpack=_q5_1),
    8: GgufType("Q8_0", 32, 34, unpack=_q8_0),
    9: "Q8_1",
    10: GgufType("Q2_K", 256, 84, unpack=_q2_k),
    11: GgufType("Q3_K", 256, 110, unpack=_q3_k),
    12: GgufType("Q4_K", 256, 144, unpack=_q4_k),
    13: GgufType("Q5_K", 256, 176, unpack=_q5_k),
    14: GgufType("Q6_K", 256, 210, unpack=_q6_k),
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: GgufType("IQ4_NL", 32, 18, unpack=_iq4_nl),
    21: "IQ3_S",
    22: "IQ2_S",
    23: GgufType("IQ4_XS", 256, 136, unpack=_iq4_xs),
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    30: GgufType("BF16", 1, 2, torch.bfloat16),
    34: "TQ1_0",
    35: "TQ2_0",
    39: GgufType("MXFP4", 32, 17, unpack=_mxfp4),
    40: "NVFP4",
}
"""By ggml's number; the name alone of a type that is not read."""
