"""Activation functions of a register of floats, chosen by a number that is data.

What      y = f(x): sigmoid, silu, gelu, gelu by tanh, relu, its square, tanh, softplus, exp, or
          x itself.
Grid      none: inlined into the epilogue of a product and into `elementwise.py`.
One call  LANES elements.
Traffic   none.
Numerics  float32; sigmoid, silu and gelu by tanh also float64. 0.5 (1 + tanh(u)) is
          1 / (1 + exp(-2 u)), which does not cancel. gelu's normal distribution is exp(-x^2 / 2)
          times a polynomial of 1 / (2 + |x|), within 4e-8 of x times it. softplus is max(x, 0) and
          ln(1 + y), y = exp(-|x|), as y times a polynomial of y. exp is 2^p times 1 + e ln 2, where
          e is what rounding took from p = x log2 e.
"""

from __future__ import annotations

import math
import struct
from decimal import Decimal

from numba.extending import intrinsic

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.threads import inner

IDENTITY, SIGMOID, SILU, GELU, GELU_TANH, RELU, RELU_SQUARED, TANH = range(8)
# Not elementwise: gpt-oss's function of a gate and its factor, see `layers.py`.
CLAMPED = 8
SOFTPLUS, EXP = 9, 10

CODES = {
    "identity": IDENTITY,
    "sigmoid": SIGMOID,
    "silu": SILU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "relu": RELU,
    "relu_squared": RELU_SQUARED,
    "tanh": TANH,
    "softplus": SOFTPLUS,
    "exp": EXP,
}

_LOG2E = 1.0 / math.log(2.0)
# In float32, and what is left of it.
_LOG2E_HIGH = struct.unpack("f", struct.pack("f", _LOG2E))[0]
_LOG2E_LOW = _LOG2E - _LOG2E_HIGH
_LARGEST = 126.0  # exponent up to which `simd.exp2` is exact; 2^-126 is 0 to any precision here
# Of -2 u log2 e, u = sqrt(2 / pi) (x + 0.044715 x^3).
_LINEAR = -2.0 * math.sqrt(2.0 / math.pi) * _LOG2E
_CUBIC = 0.044715 * _LINEAR
_POLE = 2.0  # of the polynomial's argument (|x| - 2) / (|x| + 2), -1 at 0 and 1 at infinity


def _tail(place: Decimal) -> float:
    """Return exp(z^2 / 2) times the normal distribution function at -z, for the z with (z - 2) / (z
    + 2) = place."""
    share = float(place)
    y = _POLE * (1.0 + share) / (1.0 - share) / math.sqrt(2.0)
    if y < 25.0:
        return 0.5 * math.exp(y * y) * math.erfc(y)
    # erfc underflows; the next term of the series is below 2e-6 of a tail of 0.01
    return 0.5 / (y * math.sqrt(math.pi)) * (1.0 - 0.5 / (y * y))


_TAIL = simd.chebyshev(_tail, -1.0, 1.0, 10)


def _log_share(y: Decimal) -> float:
    """Return ln(1 + y) / y, and 1 for y = 0."""
    return math.log1p(float(y)) / float(y) if y else 1.0


# Nearest to its limit of float32 from the degree 11 on: the pole at -1 is far from 0 to 1.
_LOG_SHARE = simd.chebyshev(_log_share, 0.0, 1.0, 11)


@intrinsic
def _log_share_at(typingctx, y):
    """Return ln(1 + y) / y, lane by lane, of a Vector of numbers in 0 ... 1."""

    def codegen(context, builder, sig, args):
        return simd.horner(builder, args[0], _LOG_SHARE)

    return y(y), codegen


@intrinsic
def _tail_at(typingctx, place):
    """Return `_tail` of each lane of a Vector of places in -1 ... 1."""

    def codegen(context, builder, sig, args):
        return simd.horner(builder, args[0], _TAIL)

    return place(place), codegen


@inner
def _share_below(like, x):
    """Return the normal distribution function at x, lane by lane: the share of numbers below x."""
    zero, one, pole = simd.splat(like, 0.0), simd.splat(like, 1.0), simd.splat(like, _POLE)
    z = simd.absolute(x)
    # (z - 2) / (z + 2), which is 1 at infinity
    place = simd.fma(simd.div(one, simd.add(z, pole)), simd.splat(like, -2.0 * _POLE), one)
    decay = simd.exp2(simd.mul(simd.mul(z, z), simd.splat(like, -0.5 * _LOG2E)))
    tail = simd.mul(decay, _tail_at(place))
    return simd.select(simd.at_least(zero, x), tail, simd.sub(one, tail))


@inner
def _exponential(like, x):
    """Return exp(x), lane by lane, of a Vector; 0 below the smallest normal number."""
    high, zero = simd.splat(like, _LOG2E_HIGH), simd.splat(like, 0.0)
    power = simd.mul(x, high)
    missing = simd.fma(x, high, simd.sub(zero, power))
    missing = simd.fma(x, simd.splat(like, _LOG2E_LOW), missing)
    is_finite = simd.at_least(simd.splat(like, 2.0 * _LARGEST), simd.absolute(power))
    missing = simd.select(is_finite, missing, zero)
    limit = simd.splat(like, _LARGEST)
    more = simd.minimum(simd.maximum(zero, simd.sub(power, limit)), limit)
    y = simd.exp2(simd.minimum(power, limit))
    y = simd.fma(y, simd.mul(missing, simd.splat(like, math.log(2.0))), y)
    return simd.mul(y, simd.exp2(more))


@inner
def applied(like, function, x):
    """Return f(x), lane by lane, of a Vector of float32; of float64, too, if f is sigmoid, silu or
    gelu by tanh.

    Args:
        like: an empty array of the dtype.
        function: the number of f, one of `CODES`. It is not checked here: the names are looked up
            in `CODES` where a call or a program is made, and raise KeyError there if unknown.
    """
    if function == IDENTITY:
        return x
    if function == GELU:
        return simd.mul(x, _share_below(like, x))
    if function == TANH:
        return simd.tanh(x)
    zero, one = simd.splat(like, 0.0), simd.splat(like, 1.0)
    if function == SOFTPLUS:
        y = simd.exp2(simd.mul(simd.absolute(x), simd.splat(like, -_LOG2E)))
        return simd.fma(y, _log_share_at(y), simd.maximum(zero, x))
    if function == RELU:
        return simd.maximum(zero, x)
    if function == EXP:
        return _exponential(like, x)
    if function == RELU_SQUARED:
        positive = simd.maximum(zero, x)
        return simd.mul(positive, positive)
    limit = simd.splat(like, _LARGEST)
    if function == GELU_TANH:
        cubic, linear = simd.splat(like, _CUBIC), simd.splat(like, _LINEAR)
        power = simd.mul(x, simd.fma(simd.mul(x, x), cubic, linear))
    else:
        power = simd.mul(x, simd.splat(like, -_LOG2E))
    if function == SIGMOID:
        return simd.div(one, simd.add(one, simd.exp2(simd.minimum(power, limit))))
    # As in torch: -0 far below zero, NaN at minus infinity.
    infinite = simd.splat(like, math.inf)
    decay = simd.select(simd.at_least(limit, power), simd.exp2(power), infinite)
    return simd.div(x, simd.add(one, decay))
