"""Tokens drawn from rows of logits, and log-probabilities, without a sort and without the host.

what     the inverse of the cumulative distribution at one uniform number, under temperature, top_k,
         top_p and min_p; for log-probabilities the largest logits and log(sum(exp))
grid     `_chunk_kernel` (rows * chunks of 2,048 tokens,), then one program a row
program  a chunk: its largest logit and where it is, the sum of its weights, the peak of each group
         of 32 tokens. A row: adds the chunks, finds the chunk of its number and there the token.
         Where a row is truncated, the q-th largest peak bounds the q-th largest logit from below:
         only groups whose peak is at least that are read again, into a list of candidates, and
         top_k and top_p are bisections over the list. A row whose candidates do not fit (top_k
         above 4,096, or a nucleus of more than about 1,000 tokens) bisects over all its logits
traffic  the logits once, 5 percent of that for peaks and sums, and one chunk or the candidates
numerics a weight is 2^42 exp((logit - m) / T) as an integer, m the largest logit of the chunk (or
         of the row, for candidates), computed in float64 to 4e-11. (With a float32 exp2, 40 of
         1.15 million draws from random logits were not those of a float64 sampler, H200, 2026-11:
         many unlikely tokens move with one likely one.) Integers add up to the same in any order,
         and chunks are the same whatever the batch: so is the token
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.kernels import device
from tilewise.kernels.host.plan import Maker
from tilewise.kernels.host.planned import planned
from tilewise.kernels.host.requests import is_recording
from tilewise.kernels.spec import ElementSpec
from tilewise.kernels.triton.early import await_previous, begin_next, options
from tilewise.kernels.triton.step.chunks import (
    CHUNK,
    WEIGHT_BITS,
    Parts,
    _logit_of,
    _logits,
    _order,
    _slope_of,
    _weights,
)

CANDIDATES = 4096  # candidates of a row, held in registers
FEW = 512  # candidates considered first if top_k does not give their number
TILE = 8192  # logits at a time when a row is read as a whole
ROW_WARPS = 8  # warps of a program that lists candidates: 16 of them a thread
LOWEST = tl.constexpr(-(2**31))
FORBIDDEN = tl.constexpr(-2139095041)  # the order of -inf
ROUNDS = tl.constexpr(10)


@triton.jit
def _uniform(seed, counter):
    """Return random number `counter` of the stream `seed`, a float64 in [0, 1) with 53 bits.

    It is the number of `engine.steps.philox.uniforms`. Both arguments are int64.
    """
    zero = tl.zeros([], tl.uint32)
    high, low, _, _ = tl.philox_impl(
        counter.to(tl.uint32),
        (counter >> 32).to(tl.uint32),
        zero,
        zero,
        seed.to(tl.uint32),
        (seed >> 32).to(tl.uint32),
        ROUNDS,
    )
    bits = ((high >> 5).to(tl.int64) << 26) | (low >> 6).to(tl.int64)
    return bits.to(tl.float64) * 1.1102230246251565e-16  # 2^-53


@triton.jit
def _target(uniform, total):
    """Return the integer floor(uniform * total), cut to 0 ... total - 1.

    The token drawn is the first one whose cumulative weight exceeds it.
    """
    target = (uniform * total.to(tl.float64)).to(tl.int64)
    return tl.maximum(tl.minimum(target, total - 1), 0)


@triton.jit
def _relative_masses(tops, mass_ptr, chunk, chunks, top, slope):
    """Return the masses of the chunks of a row, and the same relative to the row's largest logit.

    A mass is the sum of a chunk's integer weights relative to the chunk's own largest logit.

    tops: the largest logit of each chunk; mass_ptr: the masses; chunk: the numbers of the chunks,
    of which those from `chunks` on get 0; top: the row's largest logit; slope: log2(e) / T.
    """
    masses = tl.load(mass_ptr + chunk, mask=chunk < chunks, other=0)
    power = (tops.to(tl.float64) - top.to(tl.float64)) * slope
    scaled = masses.to(tl.float64) * tl.exp2(power)
    return masses, tl.where(masses > 0, scaled, 0.0).to(tl.int64)


@triton.jit
def _draw_from_all(
    row_ptr,
    top_ptr,
    masses,
    scaled,
    uniform,
    vocab,
    slope,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
):
    """Return the token drawn from a row without truncation; only the chunk that has it is read.

    Args:
        row_ptr, top_ptr: the logits of the row, and the largest of each chunk.
        masses, scaled: the integer weight of each chunk, on its own scale and on the row's.
        uniform: the random number.
        slope: log2(e) / temperature.
    """
    number = tl.arange(0, TILE_CHUNKS)
    target = _target(uniform, tl.sum(scaled, 0))
    cumulative = tl.cumsum(scaled, 0)
    passed = cumulative <= target
    chosen = tl.sum(passed.to(tl.int32), 0)
    inside = target - tl.max(tl.where(passed, cumulative, 0), 0)
    share = tl.max(tl.where(number == chosen, scaled, 0), 0)
    mass = tl.max(tl.where(number == chosen, masses, 0), 0)
    # From the scale of the row back to that of the chunk.
    ratio = mass.to(tl.float64) / tl.maximum(share, 1).to(tl.float64)
    inside = tl.minimum((inside.to(tl.float64) * ratio).to(tl.int64), mass - 1)
    token = chosen * CHUNK + tl.arange(0, CHUNK)
    logit = _logits(row_ptr + token, token < vocab)
    weight = _weights(logit, tl.load(top_ptr + chosen), slope)
    before = tl.sum((tl.cumsum(weight, 0) <= inside).to(tl.int32), 0)
    return chosen * CHUNK + tl.minimum(before, CHUNK - 1)


@triton.jit
def _smallest_with(order, count, most, lowest, highest):
    """Return an x in lowest ... highest such that at least `count` of the numbers `order` are >= x.

    It is the largest such x, or the first found by bisection for which at most `most` numbers are
    >= x. It is `lowest` if fewer than `count` numbers are >= `lowest`.
    """
    number = tl.sum((order >= lowest.to(tl.int32)).to(tl.int32), 0)
    while (lowest < highest) & (number > most):
        middle = lowest + (highest - lowest + 1) // 2
        reached = tl.sum((order >= middle.to(tl.int32)).to(tl.int32), 0)
        enough = reached >= count
        number = tl.where(enough, reached, number)
        lowest, highest = tl.where(enough, middle, lowest), tl.where(enough, highest, middle - 1)
    return lowest


@triton.jit
def _is_likely(logit, top, slope, log_min_p):
    """Return whether a token is at least min_p times as likely as the most likely one.

    top: the row's largest logit; slope: log2(e) / T; log_min_p: log2(min_p).
    """
    return (logit.to(tl.float64) - top.to(tl.float64)) * slope >= log_min_p


@triton.jit
def _least_likely(top, slope, log_min_p):
    """Return the `_order` of the smallest logit that min_p keeps, int64; LOWEST if it keeps all.

    The arguments are those of `_is_likely`.
    """
    bound = (top.to(tl.float64) + log_min_p / slope).to(tl.float32)
    least = _order(bound).to(tl.int64)
    # The rounding of the bound may be one step off, either way.
    step = least + 1
    least = step + 1
    for _ in tl.static_range(3):
        likely = _is_likely(_logit_of(step), top, slope, log_min_p)
        least = tl.where(likely, step, least)
        step -= 1
    return tl.where(bound > float("-inf"), least, LOWEST)


@triton.jit
def _list_candidates(
    row_ptr,
    peak_ptr,
    group_ptr,
    value_ptr,
    token_ptr,
    vocab,
    groups,
    wanted,
    lowest,
    highest,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
):
    """Write the tokens whose logits reach a cutoff to a list, in the order of their ids.

    The cutoff is the `_order` of about the wanted-th largest peak of a group, at least `lowest`;
    only groups whose peak reaches it are read. group_ptr: scratch for their numbers; value_ptr,
    token_ptr: the list, of logits and ids; highest: the order of the row's largest logit.

    Returns the number of tokens, of which at most CANDIDATES are written, and the cutoff.
    """
    group = tl.arange(0, TILE_GROUPS)
    peak = tl.load(peak_ptr + group, mask=group < groups, other=float("-inf"))
    order = tl.where(group < groups, _order(peak), LOWEST)
    most = tl.minimum(wanted + wanted // 2 + 32, tl.maximum(wanted, CANDIDATES // 3))
    cutoff = _smallest_with(order, wanted, most, lowest, highest)
    selected = (order >= cutoff.to(tl.int32)) & (group < groups)
    place = tl.cumsum(selected.to(tl.int32), 0) - 1
    tl.store(group_ptr + place, group, mask=selected)
    number = tl.sum(selected.to(tl.int32), 0)
    tl.debug_barrier()
    ROWS: tl.constexpr = CANDIDATES // GROUP
    found = tl.zeros([], tl.int32)
    for first in range(0, number, ROWS):
        index = first + tl.arange(0, ROWS)
        read = tl.load(group_ptr + index, mask=index < number, other=0)
        token = read[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (index < number)[:, None] & (token < vocab)
        logit = _logits(row_ptr + token, inside)
        keep = tl.reshape(inside & (_order(logit) >= cutoff.to(tl.int32)), [CANDIDATES])
        at = found + tl.cumsum(keep.to(tl.int32), 0) - 1
        keep = keep & (at < CANDIDATES)
        tl.store(value_ptr + at, tl.reshape(logit, [CANDIDATES]), mask=keep)
        tl.store(token_ptr + at, tl.reshape(token, [CANDIDATES]), mask=keep)
        found = tl.max(at, 0) + 1
    tl.debug_barrier()
    return found, cutoff


@triton.jit
def _draw_from_list(
    value_ptr,
    token_ptr,
    found,
    cutoff,
    is_complete,
    top_k,
    top_p,
    vocab,
    total,
    uniform,
    least,
    highest,
    top,
    slope,
    LIST: tl.constexpr,
):
    """Return the token drawn from a row's list of candidates, or -1 if others may be kept, too.

    found, cutoff: the results of `_list_candidates`; is_complete: True if no token outside of the
    list can be kept; total: the weight of all tokens of the row; least: the order of the smallest
    logit that min_p keeps; highest, top: the row's largest logit, its order and itself; LIST: a
    power of two of at least `found`.
    """
    index = tl.arange(0, LIST)
    value = tl.load(value_ptr + index, mask=index < found, other=float("-inf"))
    order = tl.where(index < found, _order(value), LOWEST)
    weight = _weights(value, top, slope)
    weight = tl.where(index < found, weight, 0)
    if (top_k > 0) & (top_k < vocab):
        bound = _smallest_with(order, top_k, top_k, cutoff, highest)
        weight = tl.where(order >= bound.to(tl.int32), weight, 0)
        total = tl.sum(weight, 0)
    if top_p < 1.0:
        kept = top_p.to(tl.float64) * total.to(tl.float64)
        is_complete = is_complete | (tl.sum(weight, 0).to(tl.float64) >= kept)
        # The smallest x such that all above it have less than top_p together.
        below, above = cutoff, tl.where(is_complete, highest, cutoff)
        while below < above:
            middle = below + (above - below) // 2
            mass = tl.sum(tl.where(order > middle.to(tl.int32), weight, 0), 0)
            small = mass.to(tl.float64) < kept
            below, above = tl.where(small, below, middle + 1), tl.where(small, middle, above)
        weight = tl.where(order >= below.to(tl.int32), weight, 0)
    weight = tl.where(order >= least.to(tl.int32), weight, 0)
    target = _target(uniform, tl.sum(weight, 0))
    place = tl.sum((tl.cumsum(weight, 0) <= target).to(tl.int32), 0)
    token = tl.load(token_ptr + tl.minimum(place, found - 1))
    return tl.where(is_complete, token, -1)


@triton.jit
def _count_from(row_ptr, vocab, bound, TILE: tl.constexpr):
    """Return the number of logits of a row whose `_order` is at least `bound`."""
    count = tl.zeros([TILE], tl.int32)
    for first in range(0, vocab, TILE):
        token = first + tl.arange(0, TILE)
        logit = _logits(row_ptr + token, token < vocab)
        count += ((_order(logit) >= bound.to(tl.int32)) & (token < vocab)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def _masses_from(row_ptr, vocab, bound_1, bound_2, bound_3, top, slope, TILE: tl.constexpr):
    """Return the sums of the integer weights of a row's logits at or above each of three bounds.

    Args:
        bound_1, bound_2, bound_3: the bounds, in the numbers of `_order`.
        top, slope: the largest logit, and log2(e) / temperature.
    """
    mass_1 = tl.zeros([TILE], tl.int64)
    mass_2, mass_3 = mass_1, mass_1
    for first in range(0, vocab, TILE):
        token = first + tl.arange(0, TILE)
        logit = _logits(row_ptr + token, token < vocab)
        weight, order = _weights(logit, top, slope), _order(logit)
        mass_1 += tl.where(order >= bound_1.to(tl.int32), weight, 0)
        mass_2 += tl.where(order >= bound_2.to(tl.int32), weight, 0)
        mass_3 += tl.where(order >= bound_3.to(tl.int32), weight, 0)
    return tl.sum(mass_1, 0), tl.sum(mass_2, 0), tl.sum(mass_3, 0)


@triton.jit
def _draw_by_reading_all(
    row_ptr, vocab, top_k, top_p, uniform, bound, least, highest, top, slope, TILE: tl.constexpr
):
    """Return the token drawn from a truncated row whose candidates do not fit the list.

    The logits are read in many passes, by bisection.

    Args:
        top_k, top_p: the row's truncation.
        uniform: the random number.
        bound: the `_order` below which no logit counts.
        least: the `_order` of the smallest logit that min_p keeps.
        highest: the `_order` of the largest logit.
        top, slope: the largest logit, and log2(e) / temperature.
    """
    if (top_k > 0) & (top_k < vocab):
        above = highest
        while bound < above:
            middle = bound + (above - bound + 1) // 2
            enough = _count_from(row_ptr, vocab, middle, TILE) >= top_k
            bound, above = tl.where(enough, middle, bound), tl.where(enough, above, middle - 1)
    if top_p < 1.0:
        total, _, _ = _masses_from(row_ptr, vocab, bound, bound, bound, top, slope, TILE)
        kept = top_p.to(tl.float64) * total.to(tl.float64)
        # The smallest x such that all above it have less than top_p together, a quarter at a time.
        below, above = bound, highest
        while below < above:
            one, two = below + (above - below) // 4, below + (above - below) // 2
            three = tl.maximum(two, above - 1 - (above - below) // 4)
            mass_1, mass_2, mass_3 = _masses_from(
                row_ptr, vocab, one + 1, two + 1, three + 1, top, slope, TILE
            )
            small_1, small_2 = mass_1.to(tl.float64) < kept, mass_2.to(tl.float64) < kept
            small_3 = mass_3.to(tl.float64) < kept
            above = tl.where(small_1, one, tl.where(small_2, two, tl.where(small_3, three, above)))
            after = tl.where(small_2, one + 1, tl.where(small_3, two + 1, three + 1))
            below = tl.where(small_1, below, after)
        bound = below
    bound = tl.maximum(bound, least)
    total, _, _ = _masses_from(row_ptr, vocab, bound, bound, bound, top, slope, TILE)
    target = _target(uniform, total)
    before, chosen = tl.zeros([], tl.int64), tl.zeros([], tl.int32)
    for first in range(0, vocab, TILE):
        token = first + tl.arange(0, TILE)
        logit = _logits(row_ptr + token, token < vocab)
        weight = _weights(logit, top, slope)
        weight = tl.where(_order(logit) >= bound.to(tl.int32), weight, 0)
        mass = tl.sum(weight, 0)
        if (before <= target) & (target < before + mass):
            passed = tl.cumsum(weight, 0) <= target - before
            chosen = first + tl.sum(passed.to(tl.int32), 0)
        before += mass
    return chosen


@triton.jit
def _draw_truncated(
    row_ptr,
    peak_ptr,
    group_ptr,
    value_ptr,
    token_ptr,
    vocab,
    groups,
    top,
    top_k,
    top_p,
    min_p,
    total,
    uniform,
    slope,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    FEW: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Return the token drawn from a row under top_k, top_p and min_p.

    It is drawn from a list of candidates if they fit in it, else by reading all logits. peak_ptr:
    the peaks of the row's groups; group_ptr, value_ptr, token_ptr: the memory of the list; top: the
    largest logit; total: the weight of all tokens; uniform: the random number; slope: log2(e) / T.
    """
    highest = _order(top).to(tl.int64)
    least = tl.minimum(_least_likely(top, slope, tl.log2(min_p.to(tl.float64))), highest)
    takes_k = (top_k > 0) & (top_k < vocab)
    # Logits below this have weight 0, or are forbidden.
    lowest = _order((top.to(tl.float64) - 61.0 / slope).to(tl.float32)).to(tl.int64)
    lowest = tl.minimum(tl.maximum(lowest, FORBIDDEN + 1), highest)
    # The list may omit tokens that min_p drops, unless top_k counts them.
    lowest = tl.where(takes_k, lowest, tl.maximum(lowest, least))
    chosen = tl.full([], -1, tl.int32)
    # Few at first; the second time as many as a list may hold; then all.
    wanted = tl.where(takes_k, top_k, FEW // 4)
    tries = tl.where(takes_k, tl.where(top_k <= CANDIDATES, 1, 0), 2)
    while (chosen < 0) & (tries > 0):
        found, cutoff = _list_candidates(
            row_ptr,
            peak_ptr,
            group_ptr,
            value_ptr,
            token_ptr,
            vocab,
            groups,
            wanted,
            lowest,
            highest,
            GROUP,
            TILE_GROUPS,
            CANDIDATES,
        )
        is_complete = takes_k | (cutoff == lowest)
        if found <= FEW:
            chosen = _draw_from_list(
                value_ptr,
                token_ptr,
                found,
                cutoff,
                is_complete,
                top_k,
                top_p,
                vocab,
                total,
                uniform,
                least,
                highest,
                top,
                slope,
                FEW,
            )
        elif found <= CANDIDATES:
            chosen = _draw_from_list(
                value_ptr,
                token_ptr,
                found,
                cutoff,
                is_complete,
                top_k,
                top_p,
                vocab,
                total,
                uniform,
                least,
                highest,
                top,
                slope,
                CANDIDATES,
            )
        tries -= 1
        wanted = wanted * 0 + CANDIDATES // 4
    if chosen < 0:
        chosen = _draw_by_reading_all(
            row_ptr, vocab, top_k, top_p, uniform, lowest, least, highest, top, slope, TILE
        )
    return chosen


@triton.jit
def _move_on(
    drawn,
    is_finite,
    row,
    last_ptr,
    position_ptr,
    count_ptr,
    active_ptr,
    place_ptr,
    results_ptr,
    stride_place,
):
    """Store a row's token and whether its logits are finite at its place in the results.

    If the row is active, the token becomes its last one, and position and counter grow by one, as
    in `decode_rows._finish_kernel`.
    """
    result = results_ptr + tl.load(place_ptr) * stride_place + 2 * row
    tl.store(result, drawn)
    tl.store(result + 1, is_finite.to(tl.int64))
    tl.debug_barrier()  # other warps must have read the row's counter
    if tl.load(active_ptr + row) != 0:
        tl.store(last_ptr + row, drawn)
        tl.store(position_ptr + row, tl.load(position_ptr + row) + 1)
        tl.store(count_ptr + row, tl.load(count_ptr + row) + 1)


@triton.jit
def _draw_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    counter_ptr,
    top_ptr,
    mass_ptr,
    peak_ptr,
    list_ptr,
    token_ptr,
    finite_ptr,
    last_ptr,
    position_ptr,
    count_ptr,
    active_ptr,
    place_ptr,
    results_ptr,
    stride,
    vocab,
    chunks,
    groups,
    list_stride,
    stride_place,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_K: tl.constexpr,
    HAS_P: tl.constexpr,
    HAS_MIN: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
    FEW: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    MOVES_ON: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin_next(EARLY)
    await_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    number = tl.arange(0, TILE_CHUNKS)
    tops = tl.load(top_ptr + row * chunks + number, mask=number < chunks, other=float("-inf"))
    top = tl.max(tops, 0)
    is_finite = tl.abs(top) < float("inf")
    tl.store(finite_ptr + row, is_finite)
    temperature = 0.0
    if HAS_TEMPERATURE:
        temperature = tl.load(temperature_ptr + row)
    if (temperature > 0.0) & is_finite:
        slope = _slope_of(tl.zeros([], tl.float32) + temperature)
        uniform = _uniform(tl.load(seed_ptr + row), tl.load(counter_ptr + row))
        masses, scaled = _relative_masses(tops, mass_ptr + row * chunks, number, chunks, top, slope)
        top_k = tl.zeros([], tl.int32)
        top_p, min_p = tl.full([], 1.0, tl.float32), tl.zeros([], tl.float32)
        if HAS_K:
            top_k = tl.load(top_k_ptr + row)
        if HAS_P:
            top_p = tl.load(top_p_ptr + row)
        if HAS_MIN:
            min_p = tl.load(min_p_ptr + row)
        is_truncated = ((top_k > 0) & (top_k < vocab)) | (top_p < 1.0) | (min_p > 0.0)
        token = tl.full([], -1, tl.int32)
        if HAS_K or HAS_P or HAS_MIN:  # noqa: SIM102 - known when it is compiled
            if is_truncated:
                lists = list_ptr + row * list_stride
                token = _draw_truncated(
                    row_ptr,
                    peak_ptr + row * groups,
                    lists,
                    (lists + groups).to(tl.pointer_type(tl.float32), bitcast=True),
                    lists + groups + CANDIDATES,
                    vocab,
                    groups,
                    top,
                    top_k,
                    top_p,
                    min_p,
                    tl.sum(scaled, 0),
                    uniform,
                    slope,
                    GROUP,
                    TILE_GROUPS,
                    FEW,
                    CANDIDATES,
                    TILE,
                )
        if token < 0:
            token = _draw_from_all(
                row_ptr,
                top_ptr + row * chunks,
                masses,
                scaled,
                uniform,
                vocab,
                slope,
                CHUNK,
                TILE_CHUNKS,
            )
    else:
        chunk = tl.min(tl.where(tops == top, number, TILE_CHUNKS), 0)
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        logit = _logits(row_ptr + tokens, tokens < vocab)
        token = tl.min(tl.where((logit == top) & (tokens < vocab), tokens, vocab - 1), 0)
    token = tl.minimum(token, vocab - 1).to(tl.int64)
    tl.store(token_ptr + row, token)
    if MOVES_ON:
        _move_on(
            token,
            is_finite,
            row,
            last_ptr,
            position_ptr,
            count_ptr,
            active_ptr,
            place_ptr,
            results_ptr,
            stride_place,
        )


@triton.jit
def _logprob_kernel(
    logits_ptr,
    token_ptr,
    top_ptr,
    mass_ptr,
    peak_ptr,
    own_ptr,
    ids_ptr,
    values_ptr,
    stride,
    vocab,
    chunks,
    groups,
    COUNT: tl.constexpr,
    TILE_CHUNKS: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_GROUPS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride
    number = tl.arange(0, TILE_CHUNKS)
    tops = tl.load(top_ptr + row * chunks + number, mask=number < chunks, other=float("-inf"))
    top = tl.max(tops, 0)
    slope = _slope_of(tl.full([], 1.0, tl.float32))
    _, scaled = _relative_masses(tops, mass_ptr + row * chunks, number, chunks, top, slope)
    log_total = (tl.log2(tl.sum(scaled, 0).to(tl.float64)) - WEIGHT_BITS) / slope
    log_total += top.to(tl.float64) + (top - top).to(tl.float64)  # NaN if it is not finite
    chosen_token = tl.load(token_ptr + row)
    exists = (chosen_token >= 0) & (chosen_token < vocab)
    own = tl.load(row_ptr + chosen_token, mask=exists, other=float("nan"))
    tl.store(own_ptr + row, (own.to(tl.float64) - log_total).to(tl.float32))
    if COUNT > 0:
        group = tl.arange(0, TILE_GROUPS)
        peaks = tl.load(peak_ptr + row * groups + group, mask=group < groups, other=float("-inf"))
        last, last_peak = tl.full([], -1, tl.int32), tl.full([], float("inf"), tl.float32)
        for place in range(COUNT):
            peak = tl.max(peaks, 0)
            # Of equal ones the first; a padding group only if no other is left.
            chosen = tl.min(tl.where((peaks == peak) & (group < groups), group, TILE_GROUPS), 0)
            token = chosen * GROUP + tl.arange(0, GROUP)
            logit = _logits(row_ptr + token, token < vocab)
            logit = tl.where(logit != logit, float("inf"), logit)
            # Tokens are ordered by value, then by id: equal ones are taken up to the last.
            is_next = (logit == peak) & (token > tl.where(peak < last_peak, -1, last))
            first = tl.min(tl.where(is_next & (token < vocab), token, 2147483647), 0)
            value = (peak.to(tl.float64) - log_total).to(tl.float32)
            tl.store(ids_ptr + row * COUNT + place, tl.minimum(first, vocab - 1).to(tl.int64))
            tl.store(values_ptr + row * COUNT + place, value)
            last, last_peak = first, peak
            later = (logit < peak) | ((logit == peak) & (token > first))
            rest = tl.max(tl.where(later & (token < vocab), logit, float("-inf")), 0)
            peaks = tl.where(group == chosen, rest, peaks)


def why_not(spec: ElementSpec) -> str | None:
    """Return why this kernel cannot run a call, or None if it can."""
    if spec.device_type != "cuda" and not device.interpreting():
        return f"needs a CUDA device, got {spec.device_type}"
    return None


class Moved(NamedTuple):
    """The state of a decode batch that sampling brings to the next token in the same launch.

    Each field is the argument of `ops.decode_rows.finish_decode` of that name: the last token and
    the position of each row, the count of the random numbers that it has used, 1 for rows that run,
    and the place in `results` at which this step stores its tokens.
    """

    token: Tensor
    position: Tensor
    counter: Tensor
    active: Tensor
    place: Tensor
    results: Tensor


@planned
def sample_tokens(
    maker: Maker,
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    counters: Tensor | None,
    moved: Moved | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw a token of each row of logits (R, V).

    Args:
        temperature, top_k, top_p, min_p, seeds, counters: as in `ops.sample_tokens`.
        moved: the rows that the same launch advances, each by its sampled token; None for none.

    Returns:
        Token ids, int64 (R,), and whether the largest logit of each row is finite, bool (R,).
    """
    rows, vocab = logits.shape
    is_finite = maker.empty((rows,), torch.bool)
    if rows == 0:
        return maker.empty((0,), torch.int64), is_finite

    def make(_: int) -> Tensor:
        # Nothing is sampled during recording, and token 0 is valid for look-ups.
        make = torch.zeros if is_recording() else torch.empty
        return make(rows, dtype=torch.int64, device=maker.device)

    tokens = maker.ask(make, torch.empty(rows, dtype=torch.int64, device="meta"))
    truncates = temperature is not None and not (top_k is None and top_p is None and min_p is None)
    parts = Parts(maker, logits, truncates)
    parts.fill(maker, logits, temperature, has_mass=temperature is not None, has_peaks=truncates)
    list_stride = parts.groups + 2 * CANDIDATES
    lists = tokens if not truncates else maker.empty((rows, list_stride), torch.int32)

    def given(x: Tensor | None) -> Tensor:
        return tokens if x is None else x

    maker.launch(
        _draw_kernel,
        rows,
        logits,
        given(temperature),
        given(top_k),
        given(top_p),
        given(min_p),
        given(seeds),
        given(counters),
        parts.top,
        parts.mass,
        parts.peak,
        lists,
        tokens,
        is_finite,
        *(moved or (tokens,) * len(Moved._fields)),
        logits.stride(0),
        vocab,
        parts.chunks,
        parts.groups,
        list_stride,
        0 if moved is None else moved.results.stride(0),
        HAS_TEMPERATURE=temperature is not None,
        HAS_K=top_k is not None,
        HAS_P=top_p is not None,
        HAS_MIN=min_p is not None,
        CHUNK=CHUNK,
        TILE_CHUNKS=parts.tile_chunks,
        GROUP=parts.group,
        TILE_GROUPS=parts.tile_groups,
        FEW=FEW,
        CANDIDATES=CANDIDATES,
        TILE=TILE,
        MOVES_ON=moved is not None,
        num_warps=ROW_WARPS if truncates else 4,
        **options("sampling"),
    )
    return tokens, is_finite


@planned
def token_logprobs(
    maker: Maker, logits: Tensor, tokens: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log_softmax of one token of each row of logits (R, V), and the `count` largest.

    Returns:
        The tokens' own values, float32 (R,); the ids, int64, and values, float32, of the most
        likely tokens, (R, count), descending, of equal ones the lower id first.
    """
    rows, vocab = logits.shape
    own = maker.empty((rows,), torch.float32)
    ids = maker.empty((rows, count), torch.int64)
    values = maker.empty((rows, count), torch.float32)
    if rows == 0:
        return own, ids, values
    parts = Parts(maker, logits, count > 0)
    parts.fill(maker, logits, None, has_mass=True, has_peaks=count > 0)
    maker.launch(
        _logprob_kernel,
        rows,
        logits,
        tokens,
        parts.top,
        parts.mass,
        parts.peak,
        own,
        ids,
        values,
        logits.stride(0),
        vocab,
        parts.chunks,
        parts.groups,
        COUNT=count,
        TILE_CHUNKS=parts.tile_chunks,
        GROUP=parts.group,
        TILE_GROUPS=parts.tile_groups,
        num_warps=8 if count > 0 else 4,
    )
    return own, ids, values
