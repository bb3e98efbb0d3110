"""The part of attention between the two matrix products, one row of a score tile at a time.

What      products q . k -> logits -> probabilities, their sum and the running maximum.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  a row's columns begin ... end (multiples of 32; softmax_row: of a register's lanes) of a
          tile of keys.
Traffic   the row is read twice and written once, in the L1 cache.
Numerics  e^x = 2^(x log2 e) with x = logit - m: the difference of products is taken before they are
          scaled, so that it is small, and its rounding too, and 0 for the largest.
          Hidden columns become exact zeros whatever their product was, NaN included. A row
          without keys keeps m = -inf.
"""

from __future__ import annotations

import math

from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.gemm import lanes_in
from tilewise.kernels.cpu.machine.threads import inlined, inner
from tilewise.kernels.cpu.visible import WORD, lanes_of

LOG2_E = math.log2(math.e)


@intrinsic
def _lane_numbers(typingctx, like):
    """Return the Vector 0, 1, ..., LANES - 1 in like's float type."""
    dtype = simd.float_of(like)

    def codegen(context, builder, sig, args):
        kind = simd.vector_ir(dtype)
        return simd.ir.Constant(kind, [float(lane) for lane in range(kind.count)])

    return simd.Vector(dtype)(like), codegen


@inner
def logits_row(like, rule, s, si, begin, end, slope, diagonal, bias, slack, di):
    """Turn columns begin ... end - 1 of a row of products, s[si + column], into logits in place.

    s = scale q.k; s = softcap tanh(s / softcap); s += bias; s -= slope |diagonal - column|.

    Args:
        diagonal: the query's own position, in columns of the tile.
        bias: the row's bias, by column of the tile.
        slack, di: an array for the derivative of a softcap: slack[di + column] = 1 - tanh^2;
            without a softcap it is not written.
    """
    lanes = simd.REGISTER_BYTES // like.itemsize
    scale = simd.splat(like, rule.scale)
    one = simd.splat(like, 1.0)
    softcap = simd.splat(like, rule.softcap)
    slopes = simd.splat(like, slope)
    numbers = _lane_numbers(like)
    for column in range(begin, end, lanes):
        x = simd.mul(simd.load(s, si + column), scale)
        if rule.softcap > 0.0:
            t = simd.tanh(simd.div(x, softcap))
            x = simd.mul(t, softcap)
            simd.store(slack, di + column, simd.sub(one, simd.mul(t, t)))
        if rule.has_bias:
            x = simd.add(x, simd.load(bias, column))
        if rule.has_alibi:
            distance = simd.absolute(simd.sub(simd.splat(like, float(diagonal - column)), numbers))
            x = simd.sub(x, simd.mul(slopes, distance))
        simd.store(s, si + column, x)


@inlined
def softmax_row(like, s, si, factor, p, pi, begin, end, seen, wi, m, drops, keep):
    """Set p = exp(factor * s - new maximum) for a row's columns begin ... end - 1, 0 where hidden;
    return (new maximum, sum of p, the factor that rescales the row's old sums).

    Args:
        like: an array or a bare pointer, as may be s, p, seen and keep.
        factor: the positive factor by which s becomes a logit.
        seen, wi: the bits of the visible columns, from seen[wi] on.
        m: the row's maximum so far.
        drops, keep: True if p becomes 0, after it was summed, where the bits of `keep` are 0.
    """
    lanes = lanes_in(like)
    lowest = simd.splat(like, -math.inf)
    largest = lowest
    for column in range(begin, end, lanes):
        word = seen[wi + column // WORD]
        x = simd.load(s, si + column)
        if word != -1:
            x = simd.select(lanes_of(like, word, column % WORD), x, lowest)
        largest = simd.maximum(x, largest)
    most, zero_shift = simd.max_lanes(largest), simd.number(like, 0.0)
    top = simd.number(like, most * simd.number(like, factor))
    new = max(m, top)
    shift = new if new > -math.inf else zero_shift
    # The maximum before the factor is exact, so that a row of one key has p = 1 and o = v.
    raw = most if top >= m else simd.number(like, m / simd.number(like, factor))
    raw = raw if new > -math.inf else zero_shift
    factors = simd.splat(like, simd.number(like, factor) * simd.number(like, LOG2_E))
    log2_e, shifts = simd.splat(like, LOG2_E), simd.splat(like, raw)
    zero = simd.splat(like, 0.0)
    total = zero
    for column in range(begin, end, lanes):
        word, lane = seen[wi + column // WORD], column % WORD
        x = simd.exp2(simd.mul(simd.sub(simd.load(s, si + column), shifts), factors))
        if word != -1:
            x = simd.select(lanes_of(like, word, lane), x, zero)
        total = simd.add(total, x)
        if drops:
            x = simd.select(lanes_of(like, keep[column // WORD], lane), x, zero)
        simd.store(p, pi + column, x)
    rescale = simd.number(like, 1.0)
    if new != m:
        rescale = simd.max_lanes(simd.exp2(simd.mul(simd.splat(like, m - shift), log2_e)))
    return new, simd.sum_lanes(total), rescale


@inner
def join_sink(like, most, total, sink):
    """Add a sink, a last key whose value is 0, to a row that has seen all of its keys.

    `most` and `total` are the row's maximum and sum of exponentials so far. Returns both with the
    sink, and the factor by which the sums of values are rescaled; unchanged and 1 if the sink is
    -inf.
    """
    share = like.dtype.type(1.0)
    if sink != -math.inf:  # a NaN sink makes the row NaN
        top = max(most, sink)
        share = like.dtype.type(math.exp(most - top))
        total, most = total * share + like.dtype.type(math.exp(sink - top)), top
    return most, total, share
