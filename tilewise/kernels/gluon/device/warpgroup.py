"""What one warpgroup (128 threads, 64 rows of a product) does with its registers.

What: layouts of WGMMA's operands and sums, the instructions that Gluon has no name for, and masks.
Grid: none, inlined into the kernels.
One call: a tile of 64 rows in the layout of a sum: a thread holds two rows of it, eight apart, and
      of every eight columns two neighbours.
Traffic: none.
Numerics: exponentials in base 2 by the special function unit (2 ulp).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)  # log2(e): exp(x) = exp2(x * LOG2E)
LN2 = gl.constexpr(0.6931471805599453)  # 1 / LOG2E


@gluon.constexpr_function
def sum_layout(width, num_warps=4):
    """Return the register layout of a WGMMA sum (rows, width), 16 rows for each of its `num_warps`
    warps."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, width, 16])


@gluon.constexpr_function
def threads_of_row(layout):
    """Return how many threads hold columns of one row of a sum: four in each of the warps that
    stand side by side along columns; each has two neighbours of its columns."""
    return 4 * layout.warps_per_cta[1]


@gluon.constexpr_function
def operand_layout(width):
    """Return the register layout of a 16-bit left operand of a WGMMA product with `width`
    columns."""
    return gl.DotOperandLayout(0, sum_layout(width), 2)


@gluon.jit
def exp2(x):
    """Return 2 ** x, flushing denormals, to 2 ulp."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def tanh(x):
    """Return tanh(x) to 2**-11 of its value."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    """Return 1 / x to 1 ulp, flushing denormals; 0 for infinite x."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.constexpr_function
def _capped_exp2_asm(exact):
    """Return the PTX instructions of `capped_exp2` for one element; `exact` is its EXACT."""
    tanh_of_t = "tanh.approx.f32 t, t;"
    if exact:
        tanh_of_t = (
            "mul.f32 t, t, 0f4038AA3B; ex2.approx.ftz.f32 t, t; add.f32 t, t, 0f3F800000; "
            "rcp.approx.ftz.f32 t, t; fma.rn.f32 t, t, 0fC0000000, 0f3F800000;"
        )
    return (
        "{ .reg .f32 t, u; mul.f32 t, $2, $3; "
        + tanh_of_t
        + " fma.rn.f32 u, t, $4, $5; ex2.approx.ftz.f32 $0, u; "
        "mul.f32 t, t, t; sub.f32 t, 0f3F800000, t; mul.f32 $1, t, $0; }"
    )


@gluon.jit
def capped_exp2(s, ratio, factor, added, EXACT: gl.constexpr):
    """Return (p, p * (1 - t**2)) with t = tanh(s * ratio), p = 2 ** (t * factor + added).

    One element after the other, so that t takes no registers beside its neighbours'. EXACT: t is
    1 - 2 / (1 + exp(2x)), 1e-7 from it in absolute terms; else it is good to 2**-11.
    """
    asm: gl.constexpr = _capped_exp2_asm(EXACT)
    return gl.inline_asm_elementwise(
        asm, "=f,=f,f,f,f,f", [s, ratio, factor, added],
        dtype=(gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def named_barrier(
    kind: gl.constexpr, barrier: gl.constexpr, threads: gl.constexpr, warps: gl.constexpr
):
    """Arrive at hardware barrier `barrier` (9 to 15; Triton has the others), and wait until it
    opens if kind is "sync"; "arrive" does not wait.

    threads: the number of arriving threads, waiting or not, that open it; warps: the number of
    warps of the caller's partition.
    """
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    thread = gl.arange(0, 32 * warps, lanes)
    gl.inline_asm_elementwise(
        f"bar.{kind} {barrier}, {threads}; mov.b32 $0, $1;", "=r,r", [thread],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_for_copies():
    """Wait until the copies to global memory that this warp has started are visible to others."""
    thread = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    gl.inline_asm_elementwise(
        "cp.async.bulk.wait_group 0; fence.proxy.async; bar.warp.sync 0xffffffff; mov.b32 $0, $1;",
        "=r,r", [thread], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def fence_async(WARPS: gl.constexpr):
    """Order this partition's reads and writes of global memory with copies by the copy engine."""
    thread = gl.arange(0, 32 * WARPS, gl.BlockedLayout([1], [32], [WARPS], [0]))
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, $1;", "=r,r", [thread], dtype=gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@gluon.jit
def pack(p, dtype: gl.constexpr):
    """Round float32 (64, n) to pairs of 16-bit columns in int32 (64, n / 2).

    Carried from loop to loop as pairs: as 16-bit values they would cost two moves an element.
    """
    n: gl.constexpr = p.shape[1]
    rows: gl.constexpr = p.shape[0]
    low, high = gl.split(p.reshape([rows, n // 2, 2]))
    name: gl.constexpr = "bf16x2" if dtype == gl.bfloat16 else "f16x2"
    return gl.inline_asm_elementwise(
        f"cvt.rn.{name}.f32 $0, $1, $2;", "=r,f,f", [high, low],
        dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def unpack(pairs, dtype: gl.constexpr, layout: gl.constexpr):
    """Return the pairs of `pack` as a 16-bit left operand (64, n) in `layout`; costs no
    instruction."""
    n: gl.constexpr = pairs.shape[1] * 2
    if dtype == gl.bfloat16:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs],
            dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [pairs],
            dtype=(gl.float16, gl.float16), is_pure=True, pack=1,
        )  # fmt: skip
    rows: gl.constexpr = pairs.shape[0]
    return gl.convert_layout(gl.join(low, high).reshape([rows, n]), layout, assert_trivial=True)


@gluon.jit
def widen(x):
    """Return 16-bit numbers (64, n) as float32; of a pair of bfloat16 one instruction each."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=f,=f,r", [x],
            dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return x.to(gl.float32)


@gluon.jit
def keep_columns(s, begin, end, HAS_BEGIN: gl.constexpr, HAS_END: gl.constexpr):
    """Return s (64, n) with -inf outside of the columns [begin, end) of each row; a bound counts
    only with HAS_BEGIN, HAS_END.

    begin, end: int32 (64,) in the layout of rows of s. A thread's columns are constants plus the
    first of its pair, which is subtracted from the bounds: one comparison with a constant each.
    """
    n: gl.constexpr = s.shape[1]
    layout: gl.constexpr = s.type.layout
    rows: gl.constexpr = s.shape[0]
    s3 = s.reshape([rows, n // 8, 8])
    l3: gl.constexpr = s3.type.layout
    l2: gl.constexpr = gl.SliceLayout(1, l3)
    within = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, l2)), 0)
    eights = gl.arange(0, n // 8, gl.SliceLayout(0, gl.SliceLayout(2, l3))) * 8
    eights = gl.expand_dims(gl.expand_dims(eights, 0), 2)
    if HAS_END:
        bound = gl.expand_dims(gl.convert_layout(end, gl.SliceLayout(1, l2)), 1) - within
        s3 = gl.where(eights < gl.expand_dims(bound, 1), s3, float("-inf"))
    if HAS_BEGIN:
        bound = gl.expand_dims(gl.convert_layout(begin, gl.SliceLayout(1, l2)), 1) - within
        s3 = gl.where(eights >= gl.expand_dims(bound, 1), s3, float("-inf"))
    return gl.convert_layout(s3.reshape([rows, n]), layout, assert_trivial=True)


@gluon.jit
def scale_rows(acc, factor):
    """Return acc (64, n) with each row multiplied by its `factor` (64,), which lies in the rows of
    any sum."""
    rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    return acc * gl.expand_dims(gl.convert_layout(factor, rows, assert_trivial=True), 1)
