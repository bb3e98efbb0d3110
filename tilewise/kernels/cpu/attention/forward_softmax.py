"""Softmax between the products in tile registers, by blocks of 32 rows and 32 keys.

What      products q . k -> probabilities in bfloat16, their sums, and the powers of two that keep
          them in range.
Grid      none: called by one thread of a kernel on that thread's scratch.
One call  some rows of a block of scores.
Traffic   scores are read once and probabilities written once, in the L1 cache.
Numerics  base 2: p = 2^(c s - m) with an integer m, raised to the ceiling of a row's largest logit
          when one exceeds it by more than 8. Sums are rescaled by powers of two, exactly, and so
          seldom that no pass over the scores looks for maxima. Where |m| is above FAR, c s - m
          would keep few bits, in the end none: such a row stores the score s' to which it was
          raised, and p = 2^(c (s - s')); only these rows need a second pass. p <= 256 is rounded
          to bfloat16; the log-sum-exp takes the sum of p, o is divided by that of rounded ones, so
          that for a row of one key o is its value. Lanes of sums have a fixed order. The
          polynomial is within 8e-8 of 2^f (float32 rounds at 6e-8); 2^-inf is 0. A hidden key
          counts as -inf, also if it is NaN.
"""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from tilewise.kernels.cpu.attention.softmax import LOG2_E
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.threads import inlined, inner
from tilewise.kernels.cpu.visible import WORD, WORDS, lanes_of

LANES = 16
SLACK = 8.0  # how far, in base 2, a logit may exceed m: far from overflow, seldom reached
_i16, _i32 = ir.IntType(16), ir.IntType(32)
_FLOOR = 1  # rounding of VREDUCEPS: keep the part of x above its floor
# The constant is 1, so that powers of integers are exact.
_POWERS = [1.0, *simd.chebyshev(simd.exp2_of, 0.0, 1.0, 5)[1:]]
LOWEST = -3.4e38  # m of a row that has seen nothing; its s' is -inf
FAR = 2.0**16  # in base 2; a float of this size has steps of 2^-7
_MOST = 3.0e38  # |m| of a row whose logit is beyond the floats in base 2


def _masked(builder, name, operands, kind):
    """Emit a masked AVX-512 instruction of this name on all lanes, and return its result of type
    `kind`."""
    tail = [ir.Constant(kind, ir.Undefined), _i16(-1), _i32(4)]  # 4: rounds as the CPU is set
    return simd.call_llvm(builder, f"x86.avx512.mask.{name}.512", kind, [*operands, *tail])


@intrinsic
def power_of_two(typingctx, a):
    """Return 2^a, lane by lane, of a float32 Vector with a <= 128."""

    def codegen(context, builder, sig, args):
        (x,) = args
        fraction = _masked(builder, "reduce.ps", [x, _i32(_FLOOR)], x.type)
        power = simd.horner(builder, fraction, _POWERS)
        return _masked(builder, "scalef.ps", [power, x], x.type)

    return a(a), codegen


@intrinsic
def _max_of_rows(typingctx, rows, first):
    """Return a Vector whose lane r is the largest of rows[first + 16 r : first + 16 r + 16]."""
    dtype = simd.float_of(rows)

    def codegen(context, builder, sig, args):
        pointer = simd.pointer_to(context, builder, rows, *args)
        kind, order_ir = simd.vector_ir(dtype), ir.VectorType(_i32, LANES)
        vectors = []
        for row in range(LANES):
            place = builder.gep(pointer, [ir.IntType(64)(row * LANES)])
            vectors.append(simd.load_vector(builder, place, kind, 4))
        # A round halves the vectors: bit `distance` of the lane tells which of two rows it holds.
        distance = LANES // 2
        while distance > 0:
            merged = []
            for a, b in zip(vectors[:distance], vectors[distance:], strict=True):
                kept = [lane + LANES * bool(lane & distance) for lane in range(LANES)]
                moved = [(lane ^ distance) + LANES * bool(lane & distance) for lane in range(LANES)]
                low, high = (
                    builder.shuffle_vector(a, b, ir.Constant(order_ir, order))
                    for order in (kept, moved)
                )
                is_larger = builder.fcmp_ordered(">", low, high)
                merged.append(builder.select(is_larger, low, high))
            vectors = merged
            distance //= 2
        return vectors[0]

    return simd.Vector(dtype)(rows, types.int64), codegen


@inlined
def exponentiate_rows(
    like,
    s,
    si,
    p,
    pi,
    ldp,
    rows,
    factor,
    shifts,
    first,
    is_whole,
    seen,
    wi,
    sums,
    old,
    new,
    drops,
    keep,
    ki,
):
    """Set p = 2^(factor s + shift), rounded to bfloat16, for `rows` rows of 32 keys, and write the
    rows' sums with it; return the largest exponents, in lanes.

    If a returned exponent exceeds SLACK, the results are invalid: the caller calls `raise_rows` and
    repeats the call.

    Args:
        s, si: the scores, 32 from row to row.
        p, pi, ldp: the probabilities, `ldp` elements from row to row.
        shifts, first: -m of the rows, from shifts[first] on.
        is_whole: True if every row sees every key; otherwise the bits of seen[wi :], WORDS from row
            to row, tell.
        sums, old, new: the sums of p and of p as rounded, 16 lanes each, of each row; the index of
            the sums so far, and the index to which the sums with this block go.
        drops, keep, ki: True if p becomes 0, after it was summed, where bits of keep[ki :] are 0.
    """
    lowest, zero = simd.splat(like, -math.inf), simd.splat(like, 0.0)
    factors, largest = simd.splat(like, factor), lowest
    for row in range(rows):
        shift = simd.splat(like, shifts[first + row])
        x = simd.fma(simd.load(s, si + row * WORD), factors, shift)
        y = simd.fma(simd.load(s, si + row * WORD + LANES), factors, shift)
        if not is_whole:
            word = seen[wi + row * WORDS]
            x = simd.select(lanes_of(like, word, 0), x, lowest)
            y = simd.select(lanes_of(like, word, LANES), y, lowest)
        largest = simd.maximum(x, largest)  # not NaN, whatever x is
        largest = simd.maximum(y, largest)
        x, y = power_of_two(x), power_of_two(y)
        before, after = old + row * 2 * LANES, new + row * 2 * LANES
        simd.store(sums, after, simd.add(simd.load(sums, before), simd.add(x, y)))
        rounded = simd.load(sums, before + LANES)
        rounded = simd.store_line(p, pi + row * ldp, x, y, rounded)
        simd.store(sums, after + LANES, rounded)
        if drops:
            word = keep[ki + row * WORDS]
            x = simd.select(lanes_of(like, word, 0), x, zero)
            y = simd.select(lanes_of(like, word, LANES), y, zero)
            simd.store_line(p, pi + row * ldp, x, y, zero)
    return largest


@inner
def lower_rows(like, m, at, rows, shifts):
    """Set shifts[0 : rows] to -m[at : at + rows]; return whether any row is far, |m| above FAR, or
    has seen nothing yet."""
    zero, most = simd.splat(like, 0.0), simd.splat(like, 0.0)
    for row in range(0, rows, LANES):
        shift = simd.sub(zero, simd.load(m, at + row))
        simd.store(shifts, row, shift)
        most = simd.maximum(simd.absolute(shift), most)
    return not simd.holds_everywhere(simd.at_least(simd.splat(like, FAR), most))


@inner
def centre_rows(like, s, si, rows, m, raised, at, shifts):
    """Subtract the score s' of each far row, |m| above FAR, from its 32 scores in a block of `rows`
    rows, in place, and set its shift to 0."""
    for row in range(rows):
        if abs(m[at + row]) > FAR and raised[at + row] > -math.inf:
            shifts[row] = 0.0
            centre = simd.splat(like, raised[at + row])
            for column in range(si + row * WORD, si + (row + 1) * WORD, LANES):
                simd.store(s, column, simd.sub(simd.load(s, column), centre))


@inner
def log_sum(like, m, raised, total, scale):
    """Return the natural log-sum-exp of a row that has seen keys, from its exponent m, its score s'
    (`raised`) and its sum `total`; `scale` is the factor from score to logit."""
    if abs(m) > FAR:  # rounded as the gradient rounds its logits
        top = simd.number(like, raised) * simd.number(like, scale)
        return simd.number(like, top + math.log(total))
    return simd.number(like, m / LOG2_E + math.log(total))


@inner
def start_at_sink(like, sink, scale):
    """Return the exponent m, the score s' and the sum of a row that has seen its sink alone;
    `scale` is the factor from score to logit."""
    top = sink * LOG2_E
    m = np.ceil(top)  # as a float: no integer holds NaN
    total = 2.0 ** (top - m)
    if abs(m) > FAR:
        m, total = min(max(m, -_MOST), _MOST), 1.0 + (sink - sink)
    return simd.number(like, m), simd.number(like, sink / scale), simd.number(like, total)


@inner
def _scale(values, start, end, factor):
    """Multiply values[start : end], floats or bfloat16, by `factor` in place, by whole
    registers."""
    factors = simd.splat(values, factor)
    for column in range(start, end, LANES):
        simd.store(values, column, simd.mul(simd.load(values, column), factors))


@inner
def raise_rows(
    like,
    s,
    si,
    p,
    pi,
    ldp,
    columns,
    factor,
    seen,
    wi,
    m,
    raised,
    at,
    sums,
    li,
    acc,
    ai,
    ldacc,
    dim,
    spare,
):
    """Raise the exponent m, and s', of each of 16 rows with a logit in this block that exceeds m by
    more than SLACK, and rescale what the row has summed so far, all in place.

    Args:
        s, si, factor, seen, wi: see `exponentiate_rows`.
        p, pi, ldp, columns: probabilities of the `columns` keys of this tile before the block.
        m, raised, at: exponents and s', m[at] and raised[at] of the first row.
        sums, li: sums of probabilities, 32 lanes a row.
        acc, ai, ldacc, dim: sums of P V, `dim` (a multiple of 16) of a row.
        spare: scratch of 256 floats.
    """
    lowest, one = simd.splat(like, -math.inf), simd.splat(like, 1.0)
    for row in range(LANES):
        word, first = seen[wi + row * WORDS], si + row * WORD
        x = simd.select(lanes_of(like, word, 0), simd.load(s, first), lowest)
        y = simd.select(lanes_of(like, word, LANES), simd.load(s, first + LANES), lowest)
        simd.store(spare, row * LANES, simd.maximum(x, simd.maximum(y, lowest)))
    largest, old, before = _max_of_rows(spare, 0), simd.load(m, at), simd.load(raised, at)
    zero, most, far = simd.splat(like, 0.0), simd.splat(like, _MOST), simd.splat(like, FAR)
    factors = simd.splat(like, factor)
    top = simd.mul(largest, factors)
    # Rounded as in `exponentiate_rows`: whether a row is raised must not depend on its neighbours.
    excess = simd.fma(largest, factors, simd.sub(zero, old))
    was_near = simd.at_least(far, simd.absolute(old))
    excess = simd.select(was_near, excess, simd.mul(simd.sub(largest, before), factors))
    # Both are -inf where a row sees nothing here and saw nothing before.
    stays = simd.at_least(simd.splat(like, SLACK), excess)
    limited = simd.maximum(simd.minimum(top, most), simd.sub(zero, most))
    new = simd.select(simd.at_least(far, simd.absolute(top)), simd.ceil(top), limited)
    new = simd.select(simd.at_least(lowest, largest), old, simd.select(stays, old, new))
    after = simd.select(stays, before, largest)
    simd.store(m, at, new)
    simd.store(raised, at, after)
    is_near = simd.at_least(far, simd.absolute(new))
    minus = simd.sub(zero, factors)
    to_near = simd.select(
        was_near, simd.sub(old, new), simd.fma(before, factors, simd.sub(zero, new))
    )
    to_far = simd.select(
        was_near, simd.fma(after, minus, old), simd.mul(simd.sub(before, after), factors)
    )
    is_fresh = simd.at_least(simd.splat(like, LOWEST), old)
    change = simd.select(is_near, to_near, to_far)
    change = simd.select(is_fresh, one, power_of_two(change))
    if simd.holds_everywhere(simd.at_least(change, one)):
        return
    simd.store(spare, 0, change)
    for row in range(LANES):
        if spare[row] != 1.0:
            _scale(sums, li + row * 2 * LANES, li + (row + 1) * 2 * LANES, spare[row])
            _scale(acc, ai + row * ldacc, ai + row * ldacc + dim, spare[row])
            _scale(p, pi + row * ldp, pi + row * ldp + columns, spare[row])
