"""Codes of 8 and 4 bits as left operands of 16-bit products: few instructions, no shuffle.

What: 32-bit words of codes, as they lie in memory -> bfloat16 or float16 operands of mma.sync.
Grid: none, inlined into the kernels.
One call: 16 outputs of each warp and the channels of a step.
Traffic: none; words are loaded into the lanes that multiply them.
Numerics: exact but for a general table, whose values are rounded to the operand's dtype.

Outputs are the 16 rows of m16n8k16. Of a left operand lane 4 g + t has the rows g and g + 8 and of
each the columns 2 t + {0, 1} and 8 more. Which channel stands where is free as long as both
operands agree: a lane takes words of a row as they lie, 2 to 16 bytes, and `inputs_operand` gives
the rows of x the same order. A code of 4 bits becomes MAGIC + code by one `or`; the kernel
subtracts MAGIC times the sum of a row of x.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.triton.quantised.values import E4M3 as SCALE_E4M3
from tilewise.kernels.triton.quantised.values import E8M0

INT4, FP4, TABLE, INT8, E4M3, E5M2, SPREAD = (gl.constexpr(i) for i in range(7))

# A word of 8 codes -> 4 registers of two 16-bit numbers: codes i and i + 4.
_SPLIT = "mov.b32 a, $4; shr.u32 b, $4, 4; shr.u32 c, $4, 8; shr.u32 d, $4, 12; "
_REGISTERS = "{ .reg .b32 a, b, c, d, e, f, g; "


def _nibbles(each: str) -> str:
    """Return assembly that turns a word of 8 codes of 4 bits ($4) into four registers ($0 to $3).

    The word is shifted so that each of the registers a, b, c, d holds two codes 16 bits apart.

    Args:
        each: the instruction for one register: $i is a, b, c or d, and $o the output register.
    """
    text = _REGISTERS + _SPLIT
    for place, name in enumerate("abcd"):
        text += each.replace("$o", f"${place}").replace("$i", name)
    return text + "}"


# (code & mask) | magic is one instruction, if one of the two is no constant to the compiler.
_INTEGERS = _nibbles("lop3.b32 $o, $i, 0x000F000F, $5, 0xEA; ")


def _shifted(target: str, source: str, left: int) -> str:
    if left == 0:
        return f"mov.b32 {target}, {source}; "
    return f"{'shl' if left > 0 else 'shr'}.b32 {target}, {source}, {abs(left)}; "


def _e2m1(shift: int, factor: int, fma: str) -> str:
    """Return the assembly that turns a word of 8 codes of FP4 (E2M1) into four registers of 16-bit
    numbers.

    Args:
        shift: the bits by which exponent and mantissa of a code go up.
        factor: the bits of the 16-bit number that corrects the exponent.
        fma: the instruction that multiplies by it.
    """
    text = _REGISTERS + f"mov.b32 g, 0x{factor:04X}{factor:04X}; mov.b32 d, 0x80008000; "
    mask = 7 << shift
    for place in range(4):
        text += _shifted("a", "$4", shift - 4 * place) + _shifted("b", "$4", 12 - 4 * place)
        text += (
            f"and.b32 a, a, 0x{mask:04X}{mask:04X}; lop3.b32 a, b, 0x80008000, a, 0xEA; "
            f"{fma} ${place}, a, g, d; "
        )
    return text + "}"


def _spread(factor: int, fma: str, *, is_half: bool = False) -> str:
    """Return the assembly that turns a word of 8 codes of FP4, whose bits are spread as
    `quantised_weight` says, into four registers of 16-bit numbers.

    Args:
        factor: the bits of the 16-bit number that corrects the exponent.
        fma: the instruction that multiplies by it.
        is_half: True for float16, whose mantissa has three bits more than that of bfloat16.
    """
    text = _REGISTERS + f"mov.b32 g, 0x{factor:04X}{factor:04X}; mov.b32 d, 0x80008000; "
    turned = ("shl.b32 a, $4, 4; ", "mov.b32 a, $4; ", "shf.r.wrap.b32 a, $4, $4, 6; ")
    for place in range(4):
        if place < 3:
            text += turned[place] + "and.b32 a, a, 0x81C081C0; "
        else:
            text += "shl.b32 b, $4, 6; and.b32 b, b, 0x00400040; shf.r.wrap.b32 a, $4, $4, 2; "
            text += "lop3.b32 a, a, 0x81808180, b, 0xEA; "
        if is_half:
            text += "and.b32 b, a, 0x01C001C0; shl.b32 b, b, 3; lop3.b32 a, a, d, b, 0xEA; "
        text += f"{fma} ${place}, a, g, d; "
    return text + "}"


def _bytes(each: str) -> str:
    """Return the assembly that turns a word of 4 codes of 8 bits ($2) into two registers: codes 0
    and 2, codes 1 and 3.

    Args:
        each: the instructions for one register: $i is the word, or the word shifted by 8 bits, and
            $o the output register.
    """
    text = _REGISTERS + "mov.b32 a, $2; shr.u32 b, $2, 8; "
    for place, name in enumerate("ab"):
        text += each.replace("$o", f"${place}").replace("$i", name)
    return text + "}"


def _float8(shift: int, factor: int, fma: str) -> str:
    """Return the assembly that turns a word of 4 codes of 8-bit floats into two registers, as
    `_bytes` orders them.

    Args:
        shift: the bit at which exponent and mantissa of a code begin in the 16-bit number.
        factor: the bits of the 16-bit number that corrects the exponent.
        fma: the instruction that multiplies by it.
    """
    mask = f"0x{0x7F << shift:04X}{0x7F << shift:04X}"
    down = _shifted("e", "$2", shift - 8)
    return (
        _REGISTERS
        + f"mov.b32 c, 0x{factor:04X}{factor:04X}; mov.b32 d, 0x80008000; "
        + f"shl.b32 e, $2, {shift}; shl.b32 f, $2, 8; and.b32 e, e, {mask}; "
        + f"lop3.b32 e, f, 0x80008000, e, 0xEA; {fma} $0, e, c, d; "
        + f"{down}and.b32 e, e, {mask}; "
        + f"lop3.b32 e, $2, 0x80008000, e, 0xEA; {fma} $1, e, c, d; }}"
    )


# int8 c in bfloat16: (128 + c mod 128) - (128 or, for a negative c, 256), both without a rounding.
_INT8_BF16 = _bytes(
    "lop3.b32 e, $i, 0x007F007F, $3, 0xEA; lop3.b32 f, $i, 0x00800080, $3, 0xEA; "
    "mov.b32 c, 0xBF80BF80; fma.rn.bf16x2 $o, f, c, e; "
)
_INT8_F16 = _bytes(
    "and.b32 e, $i, 0x00FF00FF; lop3.b32 e, e, 0x00800080, $3, 0xBE; mov.b32 c, 0x64806480; "
    "sub.rn.f16x2 $o, e, c; "
)
# 8 codes through a table of 16-bit numbers: words 0, 1 the low bytes of the first 8, words 2, 3
# their high bytes, words 4 to 7 those of the others.
_TABLE = (
    "{ .reg .b32 a, b, c, d, e, f, g, low, high, sel, pick; "
    + "".join(
        f"shr.u32 pick, $4, {16 * half}; and.b32 sel, pick, 0x7777; "
        "prmt.b32 a, $5, $6, sel; prmt.b32 b, $9, $10, sel; "
        "prmt.b32 c, $7, $8, sel; prmt.b32 d, $11, $12, sel; "
        # 0xFF in each byte whose code is 8 or more
        "shr.u32 pick, pick, 3; and.b32 pick, pick, 0x1111; mov.b32 e, 0xFF00; "
        "mov.b32 f, 0; prmt.b32 e, e, f, pick; "
        "and.b32 b, b, e; and.b32 d, d, e; xor.b32 e, e, 0xFFFFFFFF; and.b32 a, a, e; "
        "and.b32 c, c, e; or.b32 a, a, b; or.b32 c, c, d; "
        + (
            "mov.b32 low, a; mov.b32 high, c; "
            if half == 0
            else "prmt.b32 d, low, high, 0x5140; prmt.b32 e, low, high, 0x7362; "
            "prmt.b32 f, a, c, 0x5140; prmt.b32 g, a, c, 0x7362; "
            "prmt.b32 $0, d, f, 0x5410; prmt.b32 $1, d, f, 0x7632; "
            "prmt.b32 $2, e, g, 0x5410; prmt.b32 $3, e, g, 0x7632; "
        )
        for half in (0, 1)
    )
    + "}"
)

_ASM = {
    (INT4.value, "bf16"): _INTEGERS,
    (INT4.value, "fp16"): _INTEGERS,
    (FP4.value, "bf16"): _e2m1(6, 0x7E80, "fma.rn.bf16x2"),  # 2 ** 126
    (FP4.value, "fp16"): _e2m1(9, 0x7400, "fma.rn.f16x2"),  # 2 ** 14
    (SPREAD.value, "bf16"): _spread(0x7E80, "fma.rn.bf16x2"),
    (SPREAD.value, "fp16"): _spread(0x7400, "fma.rn.f16x2", is_half=True),
    (TABLE.value, "bf16"): _TABLE,
    (TABLE.value, "fp16"): _TABLE,
    (INT8.value, "bf16"): _INT8_BF16,
    (INT8.value, "fp16"): _INT8_F16,
    (E4M3.value, "bf16"): _float8(4, 0x7B80, "fma.rn.bf16x2"),  # 2 ** 120
    (E4M3.value, "fp16"): _float8(7, 0x5C00, "fma.rn.f16x2"),  # 2 ** 8
    (E5M2.value, "bf16"): _float8(5, 0x7780, "fma.rn.bf16x2"),  # 2 ** 112
    (E5M2.value, "fp16"): _float8(8, 0x3C00, "fma.rn.f16x2"),  # 1
}
_MAGIC = {"bf16": 128.0, "fp16": 1024.0}
MAGIC_WORDS = {"bf16": 0x43004300, "fp16": 0x64006400}
"""Two numbers MAGIC in a register: the kernel takes them as an argument, for `_INTEGERS`."""


@gluon.constexpr_function
def magic(kind, dtype):
    """Return the number by which codes in an operand of `words_operand` are too large."""
    return _MAGIC[str(dtype)] if kind == INT4.value else 0.0


@gluon.constexpr_function
def bits_of(kind):
    """Return the bits of a code of this kind, 4 or 8."""
    return 4 if kind in (INT4.value, FP4.value, TABLE.value, SPREAD.value) else 8


@gluon.constexpr_function
def asm_of(kind, dtype):
    """Return the assembly that turns a word of codes of this kind into registers of two numbers of
    `dtype`: four for codes of 4 bits, two for 8."""
    return _ASM[kind, str(dtype)]


@gluon.constexpr_function
def sum_layout(warps_k, warps_n):
    """Return the register layout of sums (warps_k, outputs, rows) of mma.sync, outputs as rows of a
    product: each of `warps_k` x `warps_n` warps has its own, `warps_n` side by side over
    outputs."""
    return gl.NVMMADistributedLayout([2, 0], [warps_k, warps_n, 1], [1, 16, 8])


@gluon.constexpr_function
def _doublings(first, end, at):
    found, size = [], first
    while size < end:
        found.append([size if axis == at else 0 for axis in range(3)])
        size *= 2
    return found


@gluon.constexpr_function
def codes_layout(warps_k, warps_n, tiles, words):
    """Return the register layout in which warps load words of codes (warps_k, outputs, words),
    `tiles` tiles of outputs each; the quarter of a row that a lane takes lies together."""
    run, wide = words // 4, 16 * warps_n
    registers = [*_doublings(1, run, 2), [0, 8, 0], *_doublings(wide, wide * tiles, 1)]
    lanes = [[0, 0, run], [0, 0, 2 * run], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    # As in the layout of sums: the warps of outputs are neighbours.
    warps = [*_doublings(16, wide, 1), *_doublings(1, warps_k, 0)]
    shape = [warps_k, wide * tiles, words]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


@gluon.constexpr_function
def inputs_layout(warps_k, warps_n, rows, columns):
    """Return the layout in which warps hold a tile of x, (warps_k, rows, columns).

    As in `codes_layout`, lane 4 g + t holds the t-th quarter of the columns, here of the rows g,
    g + 8, g + 16 and so on: a lane has the numbers of x that its codes are multiplied by. Warp i of
    the `warps_k` warps holds part i of the first axis. The `warps_n` warps that compute other
    outputs with that part hold the same numbers.
    """
    run = columns // 4
    registers = [*_doublings(1, run, 2), *_doublings(8, rows, 1)]
    lanes = [[0, 0, run], [0, 0, 2 * run], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warps = [*([[0, 0, 0]] * (warps_n.bit_length() - 1)), *_doublings(1, warps_k, 0)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [warps_k, rows, columns])


@gluon.jit
def numbers(pairs, DTYPE: gl.constexpr):
    """Return the low and the high half of each int32 of `pairs` as two tensors of DTYPE, without an
    instruction."""
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs],
            dtype=(gl.float16, gl.float16), is_pure=True, pack=1,
        )  # fmt: skip


@gluon.jit
def _registers(words, table, magic_word, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """Return words (..., n) of codes as int32 registers of two 16-bit numbers: (..., n, 2, 2) for
    codes of 4 bits, (..., n, 2) for 8.

    table: eight words as `_TABLE` has them.
    """
    asm: gl.constexpr = asm_of(KIND, DTYPE)
    if bits_of(KIND) == 4:
        if KIND == TABLE:
            a, b, c, d = gl.inline_asm_elementwise(
                asm, "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r",
                [
                    words, table[0], table[1], table[2], table[3], table[4], table[5], table[6],
                    table[7],
                ],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        elif KIND == INT4:
            a, b, c, d = gl.inline_asm_elementwise(
                asm, "=r,=r,=r,=r,r,r", [words, magic_word],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        else:
            a, b, c, d = gl.inline_asm_elementwise(
                asm, "=r,=r,=r,=r,r", [words],
                dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
            )  # fmt: skip
        return gl.join(gl.join(a, b), gl.join(c, d))
    else:
        if KIND == INT8:
            a, b = gl.inline_asm_elementwise(
                asm, "=r,=r,r,r", [words, magic_word], dtype=(gl.int32, gl.int32), is_pure=True,
                pack=1,
            )  # fmt: skip
        else:
            a, b = gl.inline_asm_elementwise(
                asm, "=r,=r,r", [words], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
            )
        return gl.join(a, b)


@gluon.jit
def words_operand(
    words, table, magic_word, KIND: gl.constexpr, DTYPE: gl.constexpr, WARPS_N: gl.constexpr
):
    """Return the left operand (warps, outputs, channels) of words (warps, outputs, n) of codes; its
    numbers are too large by `magic`.

    table: eight words as `_TABLE` has them.
    """
    WARPS: gl.constexpr = words.shape[0]
    WIDE: gl.constexpr = 16 * WARPS_N
    RUN: gl.constexpr = words.shape[2] // 4
    layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout(WARPS, WARPS_N), 2)
    if bits_of(KIND) == 4:
        low, high = numbers(_registers(words, table, magic_word, KIND, DTYPE), DTYPE)
        x = gl.join(low, high).reshape([WARPS, WIDE, 4, RUN, 2, 2, 2])
        x = x.permute((0, 1, 3, 5, 4, 2, 6)).reshape([WARPS, WIDE, RUN * 32])
    else:
        low, high = numbers(_registers(words, table, magic_word, KIND, DTYPE), DTYPE)
        x = gl.join(low, high).reshape([WARPS, WIDE, 4, RUN, 2, 2])
        x = x.permute((0, 1, 3, 4, 2, 5)).reshape([WARPS, WIDE, RUN * 16])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def inputs_operand(x, KIND: gl.constexpr, WARPS_N: gl.constexpr):
    """Return the right operand (warps, channels, rows) of x (warps, rows, channels), with channels
    in the order of `words_operand`."""
    WARPS: gl.constexpr = x.shape[0]
    ROWS: gl.constexpr = x.shape[1]
    STEP: gl.constexpr = x.shape[2]
    layout: gl.constexpr = gl.DotOperandLayout(1, sum_layout(WARPS, WARPS_N), 2)
    if bits_of(KIND) == 4:
        x = x.reshape([WARPS, ROWS, 4, STEP // 32, 2, 2, 2]).permute((0, 3, 5, 6, 2, 4, 1))
    else:
        x = x.reshape([WARPS, ROWS, 4, STEP // 16, 2, 2]).permute((0, 3, 5, 2, 4, 1))
    return gl.convert_layout(x.reshape([WARPS, STEP, ROWS]), layout, assert_trivial=True)


@gluon.jit
def wide(raw, KIND: gl.constexpr):
    """Return scales `raw` of a kind of `triton.quantised.values` as float32; E8M0 and e4m3 come as
    bytes."""
    if KIND == E8M0:
        bits = raw.to(gl.int32) << 23
        return gl.where(raw == 0, 5.877471754111438e-39, bits.to(gl.float32, bitcast=True))
    elif KIND == SCALE_E4M3:
        bits = raw.to(gl.int32)
        bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)
        return bits.to(gl.float32, bitcast=True) * 1.329227995784916e36  # 2 ** 120
    else:
        return raw.to(gl.float32)


BLOCK_WORDS = gl.constexpr(16)  # of a row in a stage of Hopper's: 64 bytes


@gluon.constexpr_function
def lanes_layout(num_warps, blocks):
    """Return the register layout in which warps load codes (outputs, words) in the order of lanes:
    a lane has 16 bytes of each row's block."""
    registers = [[0, 1], [0, 2], *([[0, 16]] if blocks == 2 else []), [8, 0]]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    warps = [[size, 0] for size in (16, 32, 64) if size < 16 * num_warps]
    shape = [16 * num_warps, blocks * BLOCK_WORDS.value]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


SINGLE, HALVES, ALTERNATING = (gl.constexpr(i) for i in range(3))
"""How the 64 outputs of a tile lie among the rows of a weight: as they are; or as 32 gates and the
32 products that they gate, of each warp eight and eight: those among the first half of the rows and
these among the second, or in turns."""


@gluon.jit
def rows_in_weight(first, half, PAIRS: gl.constexpr, LAYOUT: gl.constexpr):
    """Return the rows, int32 (64,) in LAYOUT, of a weight of 2 * half rows that are the 64 outputs
    from `first` on; PAIRS says how gates and values lie."""
    output = gl.arange(0, 64, LAYOUT)
    channel = first // 2 + output // 16 * 8 + output % 8
    if PAIRS == SINGLE:
        row = first + output
    elif PAIRS == HALVES:
        row = channel + output // 8 % 2 * half
    else:
        row = 2 * channel + output // 8 % 2
    return row


@gluon.jit
def lanes_words(codes, at, BLOCKS: gl.constexpr, PAIRS: gl.constexpr):
    """Load words (64, 4, n) of codes in the order of lanes from tile `at` of shared memory."""
    N: gl.constexpr = 4 * BLOCKS
    if PAIRS == HALVES:
        layout: gl.constexpr = half_layout(BLOCKS)
        words = gl.join(codes.index(2 * at).load(layout), codes.index(2 * at + 1).load(layout))
        words = words.reshape([4, 8, BLOCKS, 4, 4, 2]).permute((0, 5, 1, 3, 2, 4))
    elif PAIRS == ALTERNATING:
        words = codes.index(at).load(alternating_layout(BLOCKS))
        words = words.reshape([4, 8, 2, BLOCKS, 4, 4]).permute((0, 2, 1, 4, 3, 5))
    else:
        words = codes.index(at).load(lanes_layout(4, BLOCKS))
        words = words.reshape([64, BLOCKS, 4, 4]).permute((0, 2, 1, 3))
    return words.reshape([64, 4, N])


@gluon.constexpr_function
def half_layout(blocks):
    """Return the register layout of codes (32, words) as `lanes_layout` has them, eight rows for
    each of four warps."""
    registers = [[0, 1], [0, 2], *([[0, 16]] if blocks == 2 else [])]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    shape = [32, blocks * BLOCK_WORDS.value]
    return gl.DistributedLinearLayout(registers, lanes, [[8, 0], [16, 0]], [], shape)


@gluon.constexpr_function
def alternating_layout(blocks):
    """Return the register layout of codes (64, words) as `lanes_layout` has them, but of two
    neighbouring rows a lane."""
    registers = [[0, 1], [0, 2], *([[0, 16]] if blocks == 2 else []), [1, 0]]
    lanes = [[0, 4], [0, 8], [2, 0], [4, 0], [8, 0]]
    shape = [64, blocks * BLOCK_WORDS.value]
    return gl.DistributedLinearLayout(registers, lanes, [[16, 0], [32, 0]], [], shape)


@gluon.constexpr_function
def scales_layout(num_warps, groups):
    """Return the register layout in which warps load scales (outputs, groups) of the rows of
    `lanes_layout`."""
    registers = [*([0, size] for size in (1, 2) if size < groups), [8, 0]]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    warps = [[size, 0] for size in (16, 32, 64, 128) if size < 16 * num_warps]
    shape = [16 * num_warps, groups]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], shape)


# Codes of 4 bits in the lower byte of a 16-bit number are c * 2 ** -133 or, four bits up, 2 ** -129
# (bfloat16; 2 ** -24 and 2 ** -20 in float16): subnormal, or of the least exponent. Their
# difference from a zero point, times SMALL, is exact.
def _less(low: int, high: int, fma: str) -> str:
    return (
        "{ .reg .b32 a, b, c, d, e, f; "
        f"mov.b32 e, 0x{low:04X}{low:04X}; mov.b32 f, 0x{high:04X}{high:04X}; "
        "shr.u32 c, $4, 8; and.b32 a, $4, 0x000F000F; and.b32 b, $4, 0x00F000F0; "
        "and.b32 d, c, 0x00F000F0; and.b32 c, c, 0x000F000F; "
        f"{fma} $0, a, e, $5; {fma} $1, b, f, $5; {fma} $2, c, e, $5; {fma} $3, d, f, $5; }}"
    )


_LESS = {
    "bf16": _less(0x7F00, 0x7D00, "fma.rn.bf16x2"),  # 2 ** 127, 2 ** 123
    "fp16": _less(0x7800, 0x6800, "fma.rn.f16x2"),  # 2 ** 15, 2 ** 11
}
_SMALL = {"bf16": 2.0**-6, "fp16": 2.0**-9}


@gluon.constexpr_function
def small(kind, dtype):
    """Return SMALL, the factor by which numbers of `lanes_registers` are too small: a power of two
    for INT4, else 1."""
    return _SMALL[str(dtype)] if kind == INT4.value else 1.0


@gluon.constexpr_function
def _less_of(dtype):
    return _LESS[str(dtype)]


@gluon.jit
def lanes_registers(words, negated, constants, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """Return words (outputs, 4, n) as registers of two 16-bit numbers, see `_registers`; zero
    points are subtracted from INT4.

    negated: int32 pairs of -zero * SMALL of each output, for INT4, whose numbers are times SMALL,
    too. constants: the table, and the magic word.
    """
    if KIND == INT4:
        rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, words.type.layout))
        negated = gl.convert_layout(negated, rows, assert_trivial=True)
        negated = gl.expand_dims(gl.expand_dims(negated, 1), 2)
        return _less_registers(words, negated, DTYPE)
    else:
        return _registers(words, constants[0], constants[1], KIND, DTYPE)


@gluon.jit
def _less_registers(words, negated, DTYPE: gl.constexpr):
    asm: gl.constexpr = _less_of(DTYPE)
    words, negated = gl.broadcast(words, negated)
    a, b, c, d = gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,r,r", [words, negated],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(gl.join(a, b), gl.join(c, d))


# Codes of FP4 times the scales of their groups, whose factors of two are FOLDED too small, so that
# they and 2 ** 126 fit one factor: one rounding less, and none but of weights below FOLDED.
_FOLDED_ASM = gl.constexpr(_spread(0, "fma.rn.bf16x2").replace("a, g, d", "a, $5, d"))
FOLDED = gl.constexpr(2.0**64)
_FOLDED_BIAS = gl.constexpr(0x3E3E3E3E)  # of exponents: 126 - 64


@gluon.jit
def _folded_factor(exponents, BYTE: gl.constexpr):
    """Return int32 pairs of the bfloat16 number whose exponent is byte number BYTE of each word."""
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 a; prmt.b32 a, $1, 0, 0x4{BYTE}4{BYTE}; shl.b32 $0, a, 7; }}",
        "=r,r", [exponents], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def folded_registers(words, scales):
    """Return the registers of words (outputs, 4, n) of FP4, see `_registers`, times their scales
    and 1 / FOLDED, as bfloat16.

    scales: int32 (outputs, n / 4) of four exponents each, of E8M0, at most 192: of 32 channels, a
    word of each lane of four.
    """
    M: gl.constexpr = words.shape[0]
    N: gl.constexpr = words.shape[2]
    rows: gl.constexpr = gl.SliceLayout(1, words.type.layout)
    scales += _FOLDED_BIAS
    even = gl.join(_folded_factor(scales, 0), _folded_factor(scales, 2))
    odd = gl.join(_folded_factor(scales, 1), _folded_factor(scales, 3))
    factor = gl.convert_layout(gl.join(even, odd).reshape([M, N]), rows, assert_trivial=True)
    words, factor = gl.broadcast(words, gl.expand_dims(factor, 1))
    asm: gl.constexpr = _FOLDED_ASM
    a, b, c, d = gl.inline_asm_elementwise(
        asm, "=r,=r,=r,=r,r,r", [words, factor],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    return gl.join(gl.join(a, b), gl.join(c, d))


@gluon.constexpr_function
def _pair_of(dtype):
    name = "bf16x2" if str(dtype) == "bf16" else "f16x2"
    return f"cvt.rn.{name}.f32 $0, $1, $1;"


@gluon.jit
def pairs(x, DTYPE: gl.constexpr):
    """Return int32, each float32 number of x rounded to DTYPE in both halves."""
    asm: gl.constexpr = _pair_of(DTYPE)
    return gl.inline_asm_elementwise(asm, "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def lanes_numbers(registers, KIND: gl.constexpr, DTYPE: gl.constexpr):
    """Return the 16-bit numbers (outputs, channels) of registers of `lanes_registers`; costs no
    instruction."""
    low, high = numbers(registers, DTYPE)
    M: gl.constexpr = registers.shape[0]
    N: gl.constexpr = registers.shape[2]
    if bits_of(KIND) == 4:
        return gl.join(low, high).permute((0, 2, 4, 3, 1, 5)).reshape([M, N * 32])
    else:
        return gl.join(low, high).permute((0, 2, 3, 1, 4)).reshape([M, N * 16])


@gluon.jit
def lanes_operand(registers, KIND: gl.constexpr, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return `lanes_numbers` as a left operand (outputs, channels) in LAYOUT."""
    return gl.convert_layout(lanes_numbers(registers, KIND, DTYPE), LAYOUT, assert_trivial=True)
