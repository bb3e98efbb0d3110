"""Probabilities as e4m3 in registers: from a sum's columns to a left operand without a shuffle.

What: round float32 (64, n) to e4m3, four to a 32-bit register, and hand them to WGMMA.
Grid: none, inlined into the kernels.
One call: a tile of 64 rows of one warpgroup.
Traffic: none.
Numerics: round to nearest even; beyond 448 saturates, below 2 ** -10 is 0.

Of every 32 columns of a sum, lane t of a group of four holds 8 w + 2 t + h (w < 4, h < 2). As an
operand of one-byte elements it must hold 16 a + 4 t + b (a < 2, b < 4). So its values are taken as
they lie, w = 2 a + b // 2 and h = b % 2, and the keys of the other operand are put in that order
once in memory (`key_order` of the quantising pass): position 16 a + 4 t + 2 w + h of the 32 holds
key 16 a + 8 w + 2 t + h. No value moves between threads, which `assert_trivial` proves.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# cvt puts its first source into the upper half.
_ROUND = gl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)


@gluon.constexpr_function
def byte_sum_layout(width):
    """Return the register layout of a float32 sum (64, width) of WGMMA products of 8-bit operands,
    which are taken 32 at a time along the summed dimension."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32])


@gluon.constexpr_function
def byte_operand_layout(width):
    """Return the register layout of an 8-bit left operand of a WGMMA product with `width`
    columns."""
    return gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 32]), 4)


@gluon.jit
def pack_e4m3(p):
    """Round float32 (64, n) to quadruples of e4m3 in int32 (64, n / 32, 2, 4)."""
    n: gl.constexpr = p.shape[1]
    order = p.reshape([64, n // 32, 2, 2, 4, 2]).permute((0, 1, 2, 4, 3, 5))  # ..., a, t, w, h
    even, odd = gl.split(order)
    p0, p2 = gl.split(even)
    p1, p3 = gl.split(odd)
    return gl.inline_asm_elementwise(
        _ROUND, "=r,f,f,f,f", [p0, p1, p2, p3], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def unpack_e4m3(quads, layout: gl.constexpr):
    """Return the quadruples of `pack_e4m3` as an e4m3 left operand (64, n) in `layout`; costs no
    instruction.

    Each quadruple is named four times, and one register read as four bytes.
    """
    n: gl.constexpr = quads.shape[1] * 32
    twice = gl.join(quads, quads)
    four_times = gl.join(twice, twice).reshape([64, n])
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r",
        [gl.convert_layout(four_times, layout, assert_trivial=True)],
        dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip
