"""The online softmax of one warpgroup: 64 rows, one block of keys after the other.

What: p = exp(s - m) of a block, the running maximum m and the running sum l of each row.
Grid: none, inlined into the warpgroups of the forward pass.
One call: one (64, n) block of logits in registers.
Traffic: none.
Numerics: float32. Logits come in base 2, or FACTORED: they lack a positive factor, which commutes
with the maximum and rides in one fma; m then lacks it too. l is kept as (64, 4), one sum for each
thread of a row, and added up at the end of a tile; m is shared by the four threads of a row.
"""

# ruff: noqa: E741  (l is the name of the running sum in the papers)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.kernels.gluon._warpgroup import LN2, LOG2E, exp2


@gluon.jit
def partial_sums(p):
    """Add up the columns of p (64, n) that a thread holds of a row: (64, 4)."""
    n: gl.constexpr = p.shape[1]
    return gl.sum(gl.sum(p.reshape([64, n // 8, 4, 2]), 3), 1)


@gluon.jit
def fold(
    s, m, l, factor_log2, FACTORED: gl.constexpr, BOUNDED: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Fold a block of logits s (64, n) into m (64,) and l (64, 4).

    BOUNDED: no logit exceeds m, which is known beforehand and stays as it is; alpha is 1.
    MASKED: rows may have seen nothing yet, and s may hold -inf.

    Returns:
        p (64, n), m, l and alpha (64,), the factor of what was summed before.
    """
    if BOUNDED:
        m_new = m
    else:
        m_new = gl.maximum(m, gl.max(s, 1))
    if FACTORED:
        shift = m_new * factor_log2
    else:
        shift = m_new
    if MASKED and not BOUNDED:  # exp2(-inf - -inf) would be NaN
        shift = gl.where(m_new == float("-inf"), 0.0, shift)
    if FACTORED:
        scale = gl.full_like(s, 0.0) + factor_log2
        p = exp2(gl.fma(s, scale, gl.full_like(s, 0.0) - gl.expand_dims(shift, 1)))
        alpha = exp2(gl.fma(m, gl.full_like(m, 0.0) + factor_log2, 0.0 - shift))
    else:
        p = exp2(s - gl.expand_dims(shift, 1))
        alpha = exp2(m - shift)
    part = partial_sums(p)
    if BOUNDED:
        return p, m, l + part, alpha
    l = l * gl.expand_dims(gl.convert_layout(alpha, gl.SliceLayout(1, part.type.layout)), 1) + part
    return p, m_new, l, alpha


@gluon.jit
def finish(m, l, factor_log2, sink, FACTORED: gl.constexpr, SINK: gl.constexpr):
    """Return (lse, what acc must be multiplied by), both (64,) in the layout of m.

    sink: logit of a key whose value is 0, which every row sees, if SINK.
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
    seen = total > 0.0
    lse = gl.where(seen, (m_log2 + gl.log2(total)) * LN2, float("-inf"))
    return lse, gl.where(seen, factor / total, 0.0)
