"""Bytes of latents as operands of WGMMA: widened to float16 in registers, never stored again.

What: tiles of 64 keys and 128 channels of int8 or e4m3 in shared memory -> left operands, once as
      keys (keys by channels) and once as values (channels by keys).
Grid: none, inlined into the partitions of `mla_bytes_kernel`.
One call: a tile, or half of one, of one warpgroup.
Traffic: shared memory once for each operand, without bank conflicts.
Numerics: exact. An int8 x is the float16 1024 + (x + 128) less 1152.

Products are transposed, because only the left operand may come from registers: S^T = Z q^T and
O^T = V^T P^T. Of a left operand lane 4 g + t of warp w has the rows 16 w + {g, g + 8} and the
columns 2 t + {0, 1, 8, 9} of every 16. Which channel stands where is free as long as both operands
agree (`query_parts`), and so is the order of the rows of O^T, undone by `output_order`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.device.byte_operands import (
    _PAIR_E4M3,
    _PAIR_INT8,
    _WIDEN_E4M3,
    _WIDEN_INT8,
    INT8,
)
from tilewise.kernels.gluon.device.warpgroup import operand_layout

KEYS = gl.constexpr(64)  # of a tile
WIDTH = gl.constexpr(128)  # channels of a tile: those of a swizzled line


@gluon.constexpr_function
def key_bytes_layout():
    """Return the register layout by which each warp has 16 keys of a (64, 128) tile of bytes.

    A lane has 32 adjacent bytes of two keys, 8 apart, the first 16 of a key before the others.
    """
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [8, 0]]
    lanes = [[0, 32], [0, 64], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 128])


@gluon.constexpr_function
def rope_bytes_layout():
    """Return the register layout by which each warp has 16 keys of a (64, 64) tile of bytes,
    rotated keys."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], [64, 64])


@gluon.constexpr_function
def value_bytes_layout():
    """Return the register layout of bytes of values (64 keys, 128 channels): a warp has 32 channels
    of all keys.

    A lane has 4 adjacent channels of 16 keys.
    """
    registers = [[0, 1], [0, 2], [1, 0], [8, 0], [16, 0], [32, 0]]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 32], [0, 64]], [], [64, 128])


@gluon.jit
def _widen(x, KIND: gl.constexpr):
    asm: gl.constexpr = _WIDEN_INT8 if KIND == INT8 else _WIDEN_E4M3
    return gl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=gl.float16, is_pure=True, pack=4)


@gluon.jit
def key_halves(x):
    """Return int8 bits (64, 128) of keys as two (64, 4, 16), the inputs of `keys_operand`: the
    first 16 channels of every 32, and the other 16."""
    return gl.split(x.reshape([64, 4, 2, 16]).permute((0, 1, 3, 2)))


@gluon.jit
def keys_operand(x, ROWS: gl.constexpr, KIND: gl.constexpr):
    """Return the float16 left operand (64 keys, 64 channels) of z q^T, from int8 bits (64, 4, 16)
    of `key_halves`."""
    wide = _widen(x, KIND).reshape([64, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4))
    return gl.convert_layout(wide.reshape([64, 64]), operand_layout(ROWS), assert_trivial=True)


@gluon.jit
def query_parts(x):
    """Return q (rows, 128) as two (rows, 64), the channels of the two operands of `key_halves` in
    the order of `keys_operand`."""
    rows: gl.constexpr = x.shape[0]
    x = x.reshape([rows, 4, 2, 4, 2, 2]).permute((0, 3, 4, 1, 5, 2))
    return gl.split(x.reshape([rows, 64, 2]))


@gluon.jit
def rope_order(x):
    """Return the rotated channels of q (rows, 64) in the order of `keys_operand`."""
    rows: gl.constexpr = x.shape[0]
    return x.reshape([rows, 4, 4, 2, 2]).permute((0, 2, 3, 1, 4)).reshape([rows, 64])


@gluon.jit
def value_halves(x):
    """Return int8 bits (64, 128) of values as two (4, 8, 128): keys 0 to 7 of every 16, and the
    other eight."""
    return gl.split(x.reshape([4, 2, 8, 128]).permute((0, 2, 3, 1)))


@gluon.jit
def probability_halves(p):
    """Return p^T (64, rows) as two right operands (32, rows), for the keys of either part of
    `value_halves`."""
    rows: gl.constexpr = p.shape[1]
    low, high = gl.split(p.reshape([4, 2, 8, rows]).permute((0, 2, 3, 1)))
    return low.reshape([32, rows]), high.reshape([32, rows])


@gluon.jit
def values_operand(x, ROWS: gl.constexpr, KIND: gl.constexpr):
    """Return the float16 left operand (128 channels, 32 keys) of v^T p^T, from int8 bits (4, 8,
    128) of `value_halves`."""
    even, odd = gl.split(x.reshape([4, 4, 2, 128]).permute((0, 1, 3, 2)))
    asm: gl.constexpr = _PAIR_INT8 if KIND == INT8 else _PAIR_E4M3
    pairs = gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=4
    )
    even, odd = gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip
    # Keys (4, 4), channels (4, 8, 2, 2), key: the channels 4 g ... 4 g + 3 of a lane go to rows of
    # its own, two of either product of 64.
    wide = gl.join(even, odd).reshape([4, 4, 4, 8, 2, 2, 2]).permute((4, 2, 5, 3, 0, 1, 6))
    return gl.convert_layout(wide.reshape([128, 32]), operand_layout(ROWS), assert_trivial=True)


@gluon.constexpr_function
def _output_layout(rows):
    """Return the register layout of sums (rows, 128) with channels in their own order: four
    channels of a row to a lane."""
    eights = [[8 << bit, 0] for bit in range((rows // 8).bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, 4], [0, 8], [0, 16]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], *eights], lanes, [[0, 32], [0, 64]], [], [rows, 128]
    )


@gluon.jit
def output_order(o):
    """Return sums (128, rows) of `values_operand` as (rows, 128), channels in their own order."""
    rows: gl.constexpr = o.shape[1]
    o = o.reshape([2, 4, 2, 8, rows]).permute((4, 1, 3, 0, 2)).reshape([rows, 128])
    return gl.convert_layout(o, _output_layout(rows), assert_trivial=True)
