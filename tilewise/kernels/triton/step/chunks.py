"""Summaries of each chunk of a row of logits, from which a token is then sampled.

what     of 2,048 tokens the largest logit, the sum of their weights, the peak of each group
grid     (rows * chunks,)
program  a chunk
traffic  the logits once, 5 percent of that for peaks and sums
numerics see `sampling`: weights are integers, so that sums are the same in any order
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels.host.plan import Maker
from tilewise.kernels.triton.early import await_previous, begin_next, options

CHUNK = 2048
GROUP = 32  # tokens that share a peak; more where a vocabulary has over 8,192 groups
MOST_GROUPS = 8192
WEIGHT_BITS = tl.constexpr(42)  # 2^21 tokens of weight 1 fit in 63 bits
BITS_OF_1536 = tl.constexpr(0x4098000000000000)  # 1.5 * 2^10 as float64
# 2^x for |x| <= 1/2, interpolated at Chebyshev nodes; the relative error is 4e-11.
EXP2_0, EXP2_1, EXP2_2, EXP2_3, EXP2_4, EXP2_5, EXP2_6, EXP2_7 = (
    tl.constexpr(float(c))
    for c in np.polynomial.Chebyshev.interpolate(np.exp2, 7, domain=[-0.5, 0.5])
    .convert(kind=np.polynomial.Polynomial)
    .coef
)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _logits(at, inside):
    """Return the logits at these addresses as float32; -inf where `inside` is False."""
    return tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)


@triton.jit
def _order(logit):
    """Return int32 numbers that compare as the float32 logits do; -0 has the number of 0."""
    bits = tl.where(logit == 0.0, 0.0, logit).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit_of(order):
    """Return the float32 logit whose `_order` is this number."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _slope_of(temperature):
    """Return log2(e) / temperature in float64, at most 1e30."""
    slope = LOG2E / temperature.to(tl.float64)
    # at temperatures below 1e-30 all weights but the largest are 0
    return tl.where(slope < 1e30, slope, 1e30)


@triton.jit
def _weights(logit, top, slope):
    """Return the weights 2^42 exp((logit - top) / T) as int64, of logits that are at most `top`.

    The weight is 0 where the exponential is below 2^-60, and for -inf. slope: log2(e) / T.
    """
    alive = (logit - top) * slope.to(tl.float32) > -60.0
    difference = logit.to(tl.float64) - top.to(tl.float64)
    # 1.5 * 2^52 leaves the nearest integer in the low bits of the sum.
    moved = tl.fma(difference, slope, 6755399441055744.0)
    fraction = tl.fma(difference, slope, 6755399441055744.0 - moved)
    # tl.full, since tl.fma would round numbers of Python to float32.
    power = tl.full([], EXP2_7, tl.float64)
    power = tl.fma(fraction, power, tl.full([], EXP2_6, tl.float64))
    power = tl.fma(fraction, power, tl.full([], EXP2_5, tl.float64))
    power = tl.fma(fraction, power, tl.full([], EXP2_4, tl.float64))
    power = tl.fma(fraction, power, tl.full([], EXP2_3, tl.float64))
    power = tl.fma(fraction, power, tl.full([], EXP2_2, tl.float64))
    power = tl.fma(fraction, power, tl.full([], EXP2_1, tl.float64))
    power = tl.fma(fraction, power, tl.full([], EXP2_0, tl.float64))
    # Likewise 1.5 * 2^10 leaves 2^42 times the power, which is then divided by 2^-whole.
    scaled = (power + 1536.0).to(tl.int64, bitcast=True) - BITS_OF_1536
    whole = moved.to(tl.int64, bitcast=True).to(tl.int32)  # the low word of the sum
    return tl.where(alive, scaled >> (-whole).to(tl.int64), 0)


@triton.jit
def _chunk_kernel(
    logits_ptr,
    temperature_ptr,
    top_ptr,
    mass_ptr,
    peak_ptr,
    stride,
    vocab,
    chunks,
    groups,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_MASS: tl.constexpr,
    HAS_PEAKS: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_next(EARLY)
    await_previous(EARLY)
    program = tl.program_id(0)
    row, chunk = (program // chunks).to(tl.int64), program % chunks
    group = tl.arange(0, CHUNK // GROUP)
    token = chunk * CHUNK + group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    logit = _logits(logits_ptr + row * stride + token, token < vocab)
    # NaN counts as infinity, so that its row is reported.
    peaks = tl.max(tl.where(logit != logit, float("inf"), logit), 1)
    if HAS_PEAKS:
        number = chunk * (CHUNK // GROUP) + group
        tl.store(peak_ptr + row * groups + number, peaks, mask=number < groups)
    top = tl.max(peaks, 0)
    tl.store(top_ptr + program, top)
    if HAS_MASS:
        temperature = 1.0
        if HAS_TEMPERATURE:
            temperature = tl.load(temperature_ptr + row)
        mass = tl.zeros([], tl.int64)
        if temperature > 0.0:
            slope = _slope_of(tl.zeros([], tl.float32) + temperature)
            mass = tl.sum(tl.sum(_weights(logit, top, slope), 1), 0)
        tl.store(mass_ptr + program, mass)


class Parts:
    """The results of `_chunk_kernel` for the rows of one call, as tensors of a plan.

    Args:
        logits: (R, V).
        needs_peaks: True if the peaks of groups are allocated.

    Attributes:
        group: the tokens of a group, of which the largest logit is a peak.
        chunks, groups: the numbers of chunks of CHUNK tokens and of groups of a row.
        tile_chunks, tile_groups: the powers of two that hold these.
        top: (R, chunks) float32, the largest logit of each chunk.
        mass: (R, chunks) int64, the sum of the weights of each chunk, relative to its `top`.
        peak: (R, groups) float32, the largest logit of each group, infinite for a NaN.
    """

    def __init__(self, maker: Maker, logits: Tensor, needs_peaks: bool) -> None:
        rows, vocab = logits.shape
        self.group = GROUP
        while triton.cdiv(vocab, self.group) > MOST_GROUPS:
            self.group *= 2
        self.chunks, self.groups = triton.cdiv(vocab, CHUNK), triton.cdiv(vocab, self.group)
        self.tile_chunks = triton.next_power_of_2(self.chunks)
        self.tile_groups = triton.next_power_of_2(self.groups)
        self.top = maker.empty((rows, self.chunks), torch.float32)
        self.mass = maker.empty((rows, self.chunks), torch.int64)
        self.peak = maker.empty((rows, self.groups), torch.float32) if needs_peaks else self.top

    def fill(
        self,
        maker: Maker,
        logits: Tensor,
        temperature: Tensor | None,
        *,
        has_mass: bool,
        has_peaks: bool,
    ) -> None:
        """Add to the plan the launch that fills these tensors from logits (R, V).

        Args:
            temperature: the temperature of each row; None for 1.
            has_mass: whether the weights of chunks are needed.
            has_peaks: whether the peaks of groups are needed.
        """
        rows, vocab = logits.shape
        maker.launch(
            _chunk_kernel,
            rows * self.chunks,
            logits,
            temperature if temperature is not None else logits,
            self.top,
            self.mass,
            self.peak,
            logits.stride(0),
            vocab,
            self.chunks,
            self.groups,
            HAS_TEMPERATURE=temperature is not None,
            HAS_MASS=has_mass,
            HAS_PEAKS=has_peaks,
            CHUNK=max(CHUNK, self.group),
            GROUP=self.group,
            num_warps=4,
            **options("sampling"),
        )
