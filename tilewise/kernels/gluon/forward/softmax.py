"""The online softmax of one warpgroup: 64 rows, one block of keys after the other.

What: p = exp(s - m) of a block, the running maximum m and the running sum l of each row.
Grid: none, inlined into the warpgroups of the forward pass.
One call: one (64, n) block of logits in registers.
Traffic: none.
Numerics: float32. Logits come in base 2, or FACTORED: they lack a positive factor, which commutes
with the maximum and rides in one fma; m then lacks it too. Where the largest logit of a row is
beyond FAR, its factor is the power of two nearest to it: the fma would keep no bits of the distance
of logits, which are further apart there than exponentials tell, or equal. l is kept as (64, 4), one
sum for each thread of a row, and added up at the end of a tile; m is shared by the four threads of
a row.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon.device.warpgroup import LN2, LOG2E, exp2, threads_of_row
from tilewise.kernels.triton.attention.tile import FAR


@gluon.jit
def partial_sums(p):
    """Return the sums of the columns of p (64, n) that each of the four threads of a row holds:
    (64, 4)."""
    n: gl.constexpr = p.shape[1]
    THREADS: gl.constexpr = threads_of_row(p.type.layout)
    return gl.sum(gl.sum(p.reshape([p.shape[0], n // (2 * THREADS), THREADS, 2]), 3), 1)


@gluon.jit
def _polynomial_exp2(x):
    """Return 2 ** x for finite x in [-126, 126], to 7.5e-5 of it, without the special unit.

    2 ** (x - round(x)) is a polynomial of third degree, the best on [-0.5, 0.5]; adding 1.5 * 2**23
    rounds x and leaves its integer in the low bits, which are added to the exponent.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .f32 j, f, r; .reg .b32 n, m; "
        "add.f32 j, $1, 0f4B400000; sub.f32 f, j, 0f4B400000; sub.f32 f, $1, f; "
        "fma.rn.f32 r, f, 0f3D61FBAF, 0f3E786F0E; fma.rn.f32 r, r, f, 0f3F31798D; "
        "fma.rn.f32 r, r, f, 0f3F7FFB49; mov.b32 n, j; shl.b32 n, n, 23; mov.b32 m, r; "
        "add.s32 n, n, m; mov.b32 $0, n; }",
        "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _shared_exp2(x):
    """Return 2 ** x (64, n), a quarter of the columns by polynomials: both units work at once."""
    n: gl.constexpr = x.shape[1]
    layout: gl.constexpr = x.type.layout
    rows: gl.constexpr = x.shape[0]
    left, right = gl.split(x.reshape([rows, n // 16, 2, 8]).permute((0, 1, 3, 2)))
    HALF: gl.constexpr = right.type.layout
    first, second = gl.split(left.reshape([rows, n // 32, 2, 8]).permute((0, 1, 3, 2)))
    left = gl.join(_polynomial_exp2(first), exp2(second))
    left = left.permute((0, 1, 3, 2)).reshape([rows, n // 16, 8])
    left = gl.convert_layout(left, HALF, assert_trivial=True)
    x = gl.join(left, exp2(right)).permute((0, 1, 3, 2)).reshape([rows, n])
    return gl.convert_layout(x, layout, assert_trivial=True)


@gluon.jit
def _maxima(s):
    """Return the maxima of the columns of s (64, n) that each of the four threads of a row holds:
    (64, 4)."""
    n: gl.constexpr = s.shape[1]
    THREADS: gl.constexpr = threads_of_row(s.type.layout)
    return gl.max(gl.max(s.reshape([s.shape[0], n // (2 * THREADS), THREADS, 2]), 3), 1)


@gluon.jit
def nearest_power_of_two(x):
    """Return the power of two by which x > 0 is between sqrt(1/2) and sqrt(2)."""
    bits = (x * 1.41421356).to(gl.int32, bitcast=True)
    return (bits & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _slanted(s, m, factor_log2, added, MASKED: gl.constexpr):
    """Return two tensors (64, 4): the factor of logits s and what to add to its product, added *
    factor - m * factor.

    Where m (64,) or what is added is beyond FAR, the rounding of that sum is large, but it must be
    0 for a thread whose largest column is the maximum of the row, and no larger for any other.
    """
    rows: gl.constexpr = gl.SliceLayout(1, added.type.layout)
    m = gl.expand_dims(gl.convert_layout(m, rows), 1)
    most = _maxima(s)
    is_far = gl.maximum(gl.abs(m), gl.abs(added)) > FAR / factor_log2
    factor = gl.where(is_far, nearest_power_of_two(factor_log2), factor_log2)
    if MASKED:
        is_far = is_far & (most > float("-inf"))
    ahead = gl.where(is_far, most + added - m, added)
    most = gl.where(is_far, most, m)
    return factor, gl.fma(ahead, factor, 0.0 - most * factor)


@gluon.jit
def _in_columns(x, s):
    """Return x (64, 4), a number for each thread of a row, broadcast to that thread's columns: (64,
    n) in the layout of s."""
    n: gl.constexpr = s.shape[1]
    LAYOUT: gl.constexpr = s.type.layout
    rows: gl.constexpr = s.shape[0]
    THREADS: gl.constexpr = threads_of_row(LAYOUT)
    shape: gl.constexpr = [rows, n // (2 * THREADS), THREADS, 2]
    four = gl.zeros([rows, n], gl.float32, LAYOUT).reshape(shape)
    four = four + gl.expand_dims(gl.expand_dims(x, 1), 3)
    return gl.convert_layout(four.reshape([rows, n]), LAYOUT, assert_trivial=True)


@gluon.jit
def fold(
    s,
    m,
    l,
    factor_log2,
    FACTORED: gl.constexpr,
    BOUNDED: gl.constexpr,
    MASKED: gl.constexpr,
    added=None,
):
    """Take the online softmax of a block of logits s (64, n): return its p and the new m (64,) and
    l (64, 4).

    BOUNDED: logits are bounded, so that any of them may stand for the maximum: m is that of the
        first block that shows a key to the row, and stays; alpha is 1. A row of one key so has
        p = 1, which is exact in 16 bits, too, and o = v.
    MASKED: rows may have seen nothing yet, and s may hold -inf. Where it is not, m is finite.
    added: None, or (64, 4), what FACTORED logits lack beside their factor: a number for each thread
        of a row.

    Returns:
        p (64, n), m, l and alpha (64,), the factor of what was summed before.
    """
    SLANTED: gl.constexpr = added is not None
    if BOUNDED and not MASKED:
        m_new = m
    else:
        ROWS: gl.constexpr = m.type.layout
        if SLANTED:
            most = gl.max(_maxima(s) + added, 1)
        else:
            most = gl.max(s, 1)
        most = gl.convert_layout(most, ROWS)
        if BOUNDED:
            m_new = gl.where(m == float("-inf"), most, m)
        else:
            m_new = gl.maximum(m, most)
    shown = m_new
    if MASKED:  # exp2(-inf - -inf) would be NaN
        shown = gl.where(m_new == float("-inf"), 0.0, m_new)
    if SLANTED:
        factor, minus_shift = _slanted(s, shown, factor_log2, added, MASKED)
        scale = _in_columns(factor, s)
        p = exp2(gl.fma(s, scale, _in_columns(minus_shift, s)))
        alpha = exp2((m - shown) * factor_log2)
    elif FACTORED:
        factor = gl.full_like(m_new, 0.0) + factor_log2
        if not BOUNDED:
            is_far = gl.abs(m_new) * factor_log2 > FAR
            factor = gl.where(is_far, nearest_power_of_two(factor_log2), factor)
        shift = shown * factor
        scale = gl.full_like(s, 0.0) + gl.expand_dims(factor, 1)
        s = gl.fma(s, scale, gl.full_like(s, 0.0) - gl.expand_dims(shift, 1))
        if BOUNDED and not MASKED:  # beside tanh, exponentials alone would take twice the time
            p = _shared_exp2(s)
        else:
            p = exp2(s)
        alpha = exp2(gl.fma(m, factor, 0.0 - shift))
    else:
        p = exp2(s - gl.expand_dims(shown, 1))
        alpha = exp2(m - shown)
    part = partial_sums(p)
    if BOUNDED:
        return p, m_new, l + part, alpha
    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, part.type.layout)), 1) + part
    return p, m_new, l, alpha


@gluon.jit
def finish(m, l, factor_log2, sink, FACTORED: gl.constexpr, SINK: gl.constexpr):
    """Return lse and the factor by which acc must be multiplied, both (64,) in the layout of m;
    -inf and 0 for rows that saw nothing.

    factor_log2: the factor that FACTORED logits lack. sink: logit of a key whose value is 0, which
    every row sees, if SINK.
    """
    total = gl.convert_layout(gl.sum(l, 1), m.type.layout)
    m_log2 = m
    if FACTORED:
        m_log2 = m * factor_log2
    factor = gl.full_like(total, 1.0)
    if SINK:
        sink_log2 = gl.full_like(m, 0.0) + sink * LOG2E
        m_new = gl.maximum(m_log2, sink_log2)
        shift = gl.where(m_new == float("-inf"), 0.0, m_new)
        factor = exp2(m_log2 - shift)
        total = total * factor + exp2(sink_log2 - shift)
        m_log2 = m_new
    seen = total != 0.0  # of NaN, too
    lse = gl.where(seen, (m_log2 + gl.log2(total)) * LN2, float("-inf"))
    return lse, gl.where(seen, factor / total, 0.0)
