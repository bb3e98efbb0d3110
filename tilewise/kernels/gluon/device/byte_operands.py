"""Eight-bit keys and values as operands of 16-bit products: few instructions, no shuffle.

What: tiles of int8 or e4m3 in shared memory -> float16 operands of mma.sync in registers.
Grid: none, inlined into the kernels.
One call: a tile of 16 keys of four heads; each of four warps has a head.
Traffic: shared memory once, 8 or 16 bytes at a time.
Numerics: exact. An int8 x is the float16 1024 + (x + 128) less 1152.

Queries are few, so products are transposed: keys and values are the 16 rows of m16n8k16, queries
its 8 columns. Of a left operand lane 4 g + t has the rows g and g + 8 and of each the columns
2 t + {0, 1} and 8 more. Which channel stands where is free as long as both operands agree: a lane
takes 16 bytes of a key as they lie, and channels get the order `key_order`. Of values it takes the
channels 8 j + g that are neighbours in memory, undone by `value_order`; two keys' bytes of one
channel, which one register holds, are put together by byte permutations.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

HEADS = gl.constexpr(4)  # whose keys make a tile, one for each warp
LINE = gl.constexpr(128)  # neighbouring bytes of a token that are copied together
INT8, E4M3 = gl.constexpr(1), gl.constexpr(2)  # as in `triton.paged.quantise`
# Four bytes -> four float16 in two registers.
_WIDEN_E4M3 = gl.constexpr(
    "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; }"
)
_WIDEN_INT8 = gl.constexpr(
    "{ .reg .b32 u, a, b, c; xor.b32 u, $2, 0x80808080; mov.b32 c, 0x64646464; "
    "prmt.b32 a, u, c, 0x4140; prmt.b32 b, u, c, 0x4342; mov.b32 c, 0x64806480; "
    "sub.rn.f16x2 $0, a, c; sub.rn.f16x2 $1, b, c; }"
)
# Four channels of two keys -> four registers of (even key, odd key).
_PAIR_E4M3 = gl.constexpr(
    "{ .reg .b32 x, y; .reg .b16 a, b, c, d; "
    "prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362; "
    "mov.b32 {a, b}, x; mov.b32 {c, d}, y; "
    "cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b; "
    "cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }"
)
_PAIR_INT8 = gl.constexpr(
    "{ .reg .b32 x, y, a, b, c, d, e; "
    "prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362; "
    "xor.b32 x, x, 0x80808080; xor.b32 y, y, 0x80808080; mov.b32 e, 0x64646464; "
    "prmt.b32 a, x, e, 0x4140; prmt.b32 b, x, e, 0x4342; "
    "prmt.b32 c, y, e, 0x4140; prmt.b32 d, y, e, 0x4342; mov.b32 e, 0x64806480; "
    "sub.rn.f16x2 $0, a, e; sub.rn.f16x2 $1, b, e; "
    "sub.rn.f16x2 $2, c, e; sub.rn.f16x2 $3, d, e; }"
)


@gluon.constexpr_function
def sum_layout():
    """Return the register layout of sums (4, n, rows) of mma.sync m16n8k16: each of four warps has
    the product of one head, transposed."""
    return gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])


@gluon.constexpr_function
def lines_of(row):
    """Return how many lines of LINE bytes the HEADS heads of a token take, `row` bytes each."""
    return HEADS.value * row // LINE.value


@gluon.constexpr_function
def warps_layout(registers, lanes, keys, row):
    """Return the register layout of a tile of bytes (lines * keys, LINE) of HEADS heads for four
    warps, a head each.

    registers, lanes: the bases of the linear layout in which one warp takes its head's (keys, row)
    bytes.
    """
    steps = (row, 2 * row)  # from a head to others, in bytes of a token
    warps = [[step // LINE.value * keys, step % LINE.value] for step in steps]
    size = [lines_of(row) * keys, LINE.value]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], size)


@gluon.constexpr_function
def more_keys(keys):
    """Return the register bases of a linear layout for the further keys of a lane, 8, 16 ... rows
    apart, of `keys` keys in all."""
    return [[8 << bit, 0] for bit in range((keys // 16).bit_length())]


@gluon.jit
def by_heads(x, ROW: gl.constexpr):
    """Return the bytes x (lines * keys, LINE) of a tile, loaded in a layout of `warps_layout`, as
    rows of heads: (HEADS * keys, ROW)."""
    L: gl.constexpr = HEADS * ROW // LINE
    N: gl.constexpr = x.shape[0] // L
    heads = x.reshape([L, N, HEADS // L, ROW]).permute((0, 2, 1, 3))
    return heads.reshape([HEADS * N, ROW])


@gluon.constexpr_function
def key_bytes_layout(keys, width):
    """Return the register layout in which four warps, a head each, load a tile of keys of `width`
    channels of 8 bits, (lines * keys, LINE)."""
    registers = [[0, 1], [0, 2], [0, 4], [0, 8], *([[0, 64]] if width == 128 else [])]
    lanes = [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]]
    return warps_layout([*registers, *more_keys(keys)], lanes, keys, width)


@gluon.constexpr_function
def value_bytes_layout(keys, width):
    """Return the register layout in which four warps, a head each, load a tile of values of `width`
    channels of 8 bits, (lines * keys, LINE)."""
    run = width // 8  # neighbours in memory that one lane has
    registers = [[0, 1 << bit] for bit in range(run.bit_length() - 1)]
    lanes = [[2, 0], [4, 0], [0, run], [0, 2 * run], [0, 4 * run]]
    return warps_layout([*registers, [1, 0], *more_keys(keys)], lanes, keys, width)


@gluon.constexpr_function
def scales_layout(keys):
    """Return the register layout in which four warps, a head each, load scales (keys, HEADS)."""
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(more_keys(keys), lanes, [[0, 1], [0, 2]], [], [keys, 4])


@gluon.jit
def key_order(x):
    """Return x (rows, width) with its channels in the order in which `keys_operand` multiplies
    them; queries need the same order."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1]
    parts = x.reshape([rows, width // 64, 4, 4, 2, 2])
    return parts.permute((0, 1, 3, 4, 2, 5)).reshape([rows, width])


@gluon.jit
def word_order(x):
    """Return x (rows, width) with its channels in the order in which `paged.direct` multiplies
    them: as `key_order`, but a register has channels 0 and 2 of a word, or 1 and 3."""
    rows: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1]
    parts = x.reshape([rows, width // 64, 4, 4, 2, 2])
    return parts.permute((0, 1, 3, 5, 2, 4)).reshape([rows, width])


@gluon.jit
def keys_operand(x, KIND: gl.constexpr):
    """Return the left operand (HEADS, keys, width) of k q^T of int8 bits (HEADS * keys, width)."""
    N: gl.constexpr = x.shape[0] // HEADS
    width: gl.constexpr = x.shape[1]
    asm: gl.constexpr = _WIDEN_INT8 if KIND == INT8 else _WIDEN_E4M3
    wide = gl.inline_asm_elementwise(asm, "=r,=r,r", [x], dtype=gl.float16, is_pure=True, pack=4)
    layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout(), 2)
    return gl.convert_layout(
        key_order(wide).reshape([HEADS, N, width]), layout, assert_trivial=True
    )


@gluon.jit
def value_pairs(x, KIND: gl.constexpr):
    """Convert values of 8 bits (HEADS * keys, width) to pairs of float16 of two neighbouring keys,
    int32 (HEADS * keys / 2, width).

    The low half of a word holds key 2 i, the high half key 2 i + 1. Scales are not applied.

    Args:
        x: int8, the bits of the values.
        KIND: INT8 or E4M3.
    """
    width: gl.constexpr = x.shape[1]
    even, odd = gl.split(x.reshape([x.shape[0] // 2, 2, width]).permute((0, 2, 1)))
    asm: gl.constexpr = _PAIR_INT8 if KIND == INT8 else _PAIR_E4M3
    return gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=4
    )


@gluon.jit
def halves(pairs):
    """Return the low and the high half of each int32 of `pairs` as two float16 tensors of its
    shape, without an instruction."""
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs],
        dtype=(gl.float16, gl.float16), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def values_operand(pairs):
    """Return the left operand (HEADS, width, keys) of v^T p^T from the pairs of `value_pairs`."""
    N: gl.constexpr = pairs.shape[0] * 2 // HEADS
    width: gl.constexpr = pairs.shape[1]
    even, odd = halves(pairs)
    keys = gl.join(even, odd).permute((0, 2, 1)).reshape([HEADS, N, 8, width // 8])
    keys = keys.permute((0, 3, 2, 1)).reshape([HEADS, width, N])
    layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout(), 2)
    return gl.convert_layout(keys, layout, assert_trivial=True)


@gluon.jit
def probabilities_operand(p):
    """Convert probabilities p (4, n, rows), float32, to the float16 right operand of v^T p^T.

    The dims of p are four heads, one for each warp, n keys, and rows of queries; the operand has
    the same shape. In p's layout a lane has neighbouring rows of one key; in the operand's layout
    neighbouring keys of one row. movmatrix transposes blocks of 8 keys and 8 rows.
    """
    N: gl.constexpr = p.shape[1]
    rows: gl.constexpr = p.shape[2]
    low, high = gl.split(p.reshape([4, N, rows // 2, 2]))
    turned = gl.inline_asm_elementwise(
        "{ .reg .b32 x; cvt.rn.f16x2.f32 x, $1, $2; "
        "movmatrix.sync.aligned.m8n8.trans.b16 $0, x; }",
        "=r,f,f", [high, low], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    # Lane 4 g + t has the keys 2 t, 2 t + 1 of row g now; its place says key g, rows 2 t, 2 t + 1.
    even, odd = halves(turned.reshape([4, N // 8, 8, rows // 8, 4]))
    pairs = gl.join(even, odd).permute((0, 1, 4, 5, 3, 2)).reshape([4, N, rows])
    layout: gl.constexpr = gl.DotOperandLayout(1, sum_layout(), 2)
    return gl.convert_layout(pairs, layout, assert_trivial=True)


@gluon.jit
def value_order(x):
    """Return sums x (HEADS, width, rows) of products with `values_operand` as rows (HEADS * rows,
    width), with the channels put back into their own order."""
    H: gl.constexpr = x.shape[0]
    width: gl.constexpr = x.shape[1]
    rows: gl.constexpr = x.shape[2]
    parts = x.reshape([H, width // 8, 8, rows]).permute((0, 3, 2, 1))
    return parts.reshape([H * rows, width])
