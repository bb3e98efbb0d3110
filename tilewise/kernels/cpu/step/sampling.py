"""Tokens drawn from rows of logits on the CPU, and log-probabilities.

What      the inverse of the cumulative distribution at one uniform number, under temperature,
          top_k, top_p and min_p; log_softmax of one token a row and the largest of the row.
Grid      tasks of one row, taken from a counter.
One task  weighs the row in scratch. top_k and top_p find their bound digit by digit: sums of what
          stands in each of 2,048 bins of the first 11 bits of a logit, then of the next ones
          within one bin; nothing is sorted.
Traffic   the logits three times, once more for each digit of a bound; 24 bytes of scratch a token.
Numerics  exp in float64, made an integer of at least 2^42 for the most likely token: sums are
          exact.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.threads import inner, kernel, next_task, run_tasks, scratch
from tilewise.kernels.spec import ElementSpec

_LOG2E = 1.0 / math.log(2.0)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_STEP_0, _STEP_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)


def why_not(spec: ElementSpec) -> str | None:
    """Return why the CPU's kernels of sampling cannot run `spec`, or None if they can."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    return None


def sample_tokens(
    logits: Tensor,
    temperature: Tensor | None,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor | None,
    counters: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return token ids, int64 (R,), drawn from float32 logits (R, V), and bool (R,), whether the
    largest logit of each row is finite; a row where it is not gets the token 0.

    Args:
        temperature: float32 (R,); 0, or None, takes the first of the largest logits.
        top_k, top_p, min_p: int32, float32 and float32 (R,), the limits of what is drawn; None is
            no limit.
        seeds, counters: int64 (R,), the stream of random numbers and the number in it; None is 0.
    """
    rows, vocab = logits.shape
    tokens, is_finite = torch.empty(rows, dtype=torch.int64), torch.empty(rows, dtype=torch.bool)
    if rows == 0:
        return tokens, is_finite
    flat = logits.detach().contiguous().view(-1)

    def numbers(x: Tensor | None, default: float, dtype: torch.dtype) -> np.ndarray:
        x = torch.full((rows,), default, dtype=dtype) if x is None else x.detach().contiguous()
        return x.numpy()

    run_tasks(
        _sample_rows,
        rows,
        flat.numpy(),
        flat.view(torch.int32).numpy(),
        vocab,
        numbers(temperature, 0.0, torch.float32),
        numbers(top_k, 0, torch.int32),
        numbers(top_p, 1.0, torch.float32),
        numbers(min_p, 0.0, torch.float32),
        numbers(seeds, 0, torch.int64),
        numbers(counters, 0, torch.int64),
        tokens.numpy(),
        is_finite.numpy(),
    )
    return tokens, is_finite


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for float32 logits (R, V), the log_softmax of one token a row, (R,), NaN for an id
    outside of the vocabulary, and the `count` largest of each row in descending order: ids int64
    (R, count), and log-probabilities (R, count)."""
    rows, vocab = logits.shape
    own = torch.empty(rows)
    ids, values = torch.empty((rows, count), dtype=torch.int64), torch.empty((rows, count))
    if rows:
        run_tasks(
            _logprob_rows,
            rows,
            logits.detach().contiguous().view(-1).numpy(),
            vocab,
            tokens.contiguous().numpy(),
            count,
            own.numpy(),
            ids.view(-1).numpy(),
            values.view(-1).numpy(),
        )
    return own, ids, values


@inner
def _largest(logits, first, vocab):
    """Return the largest of `vocab` logits from index `first` on; NaN if one is NaN or +inf, and
    -inf if all are."""
    lanes = simd.REGISTER_BYTES // 4
    low = simd.splat(logits, -math.inf)
    zero = simd.splat(logits, 0.0)
    even = odd = low
    # 0 * x tells NaN and +inf from numbers; the maximum has excluded -inf.
    check = zero
    done = vocab // (2 * lanes) * (2 * lanes)
    lowest = simd.splat(logits, -3.0e38)
    for at in range(first, first + done, 2 * lanes):
        a, b = simd.load(logits, at), simd.load(logits, at + lanes)
        even, odd = simd.maximum(a, even), simd.maximum(b, odd)
        check = simd.fma(simd.maximum(lowest, a), zero, check)
        check = simd.fma(simd.maximum(lowest, b), zero, check)
    top = max(simd.max_lanes(even), simd.max_lanes(odd))
    spoiled = simd.sum_lanes(check)
    for at in range(first + done, first + vocab):
        x = logits[at]
        if x != x or x == math.inf:
            spoiled = np.float32(math.nan)
        if x > top:
            top = x
    return top + spoiled


@inner
def _uniform(seed, counter):
    """Return number `counter` of the random stream `seed`, a float64 in [0, 1): Philox4x32-10, as
    `engine.steps.philox.uniforms`."""
    c0, c1 = np.uint64(counter) & _LOW, np.uint64(counter) >> _HALF
    c2, c3 = np.uint64(0), np.uint64(0)
    k0, k1 = np.uint64(seed) & _LOW, np.uint64(seed) >> _HALF
    for _ in range(_ROUNDS):
        p0, p1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _STEP_0) & _LOW, (k1 + _STEP_1) & _LOW
    bits = ((c0 >> np.uint64(5)) << np.uint64(26)) | (c1 >> np.uint64(6))
    return float(bits) * 2.0**-53


@inner
def _exponentials(logits, first, vocab, top, slope, powers):
    """Set powers[i] = 2^((logit i - top) slope) in float64 for the `vocab` logits from `first` on;
    return their sum, added in the order of lanes."""
    lanes = simd.REGISTER_BYTES // 8
    for at in range(vocab):
        powers[at] = (np.float64(logits[first + at]) - top) * slope
    total = simd.splat(powers, 0.0)
    done = vocab // lanes * lanes
    for at in range(0, done, lanes):
        power = simd.exp2(simd.load(powers, at))
        simd.store(powers, at, power)
        total = simd.add(total, power)
    result = simd.sum_lanes(total)
    for at in range(done, vocab):
        powers[at] = 2.0 ** powers[at]
        result += powers[at]
    return result


@inner
def _ordered(bits):
    """Return a number in 0 ... 2^32 - 1 that has the order of float32 logits, for the logit with
    these bits (int32); -0 is 0."""
    value = np.int64(bits)
    if value == -2147483648:  # -0 is 0
        value = 0
    return value + 2147483648 if value >= 0 else -1 - value


@inner
def _bound(keys, weights, least, wanted_count, wanted_mass, counts, masses):
    """Return the smallest key to keep, found digit by digit from the first; `keys` are the results
    of `_ordered`.

    With wanted_count > 0 keys are kept that have fewer than `wanted_count` larger ones; else keys
    whose larger ones have together less than the weight `wanted_mass`. Keys below `least` do not
    count. counts and masses are scratch of 2,048 numbers.
    """
    prefix, above_count, above_mass = np.int64(0), 0, 0
    for digit in range(3):
        shift = 21 if digit == 0 else 10 if digit == 1 else 0
        width = 10 if digit == 2 else 11
        counts[:], masses[:] = 0, 0
        for at in range(len(keys)):
            key = keys[at]
            if key >= least and key >> (shift + width) == prefix:
                place = (key >> shift) & ((1 << width) - 1)
                counts[place] += 1
                masses[place] += weights[at]
        place = (1 << width) - 1
        best, best_count, best_mass = place, above_count, above_mass
        while place >= 0:
            if wanted_count > 0:
                keeps = above_count < wanted_count
            else:
                keeps = float(above_mass) < wanted_mass
            if not keeps:
                break
            if counts[place] > 0:
                best, best_count, best_mass = place, above_count, above_mass
            above_count += counts[place]
            above_mass += masses[place]
            place -= 1
        prefix = (prefix << width) | best
        above_count, above_mass = best_count, best_mass
    return prefix


@inner
def _draw(
    logits,
    bits,
    first,
    vocab,
    top,
    temperature,
    top_k,
    top_p,
    min_p,
    uniform,
    powers,
    weights,
    keys,
    counts,
    masses,
):
    """Return the token drawn from one row of logits at the uniform number `uniform`, under
    temperature, then top_k, top_p and min_p. powers, weights and keys are scratch of `vocab`
    numbers."""
    _exponentials(logits, first, vocab, np.float64(top), _LOG2E / np.float64(temperature), powers)
    spare = 62
    while (vocab - 1) >> (62 - spare) > 0:
        spare -= 1
    scale = 2.0**spare  # so that vocab weights of 1 fit in 62 bits
    for at in range(vocab):
        weights[at] = np.int64(powers[at] * scale)
    least = np.int64(0)
    takes_k = 0 < top_k < vocab
    if takes_k or top_p < 1.0:
        for at in range(vocab):
            keys[at] = _ordered(bits[first + at])
        if takes_k:
            least = _bound(keys, weights, least, np.int64(top_k), 0.0, counts, masses)
        if top_p < 1.0:
            kept = np.int64(0)
            for at in range(vocab):
                if keys[at] >= least:
                    kept += weights[at]
            wanted = np.float64(top_p) * float(kept)
            smaller = _bound(keys, weights, least, np.int64(0), wanted, counts, masses)
            least = max(least, smaller)
        for at in range(vocab):
            if keys[at] < least:
                weights[at] = 0
    if min_p > 0.0:
        for at in range(vocab):
            if powers[at] < min_p:
                weights[at] = 0
    total = np.int64(0)
    for at in range(vocab):
        total += weights[at]
    target = max(min(np.int64(uniform * float(total)), total - 1), 0)
    passed = np.int64(0)
    for at in range(vocab):
        passed += weights[at]
        if passed > target:
            return at
    return vocab - 1


@kernel
def _sample_rows(
    logits,
    bits,
    vocab,
    temperature,
    top_k,
    top_p,
    min_p,
    seeds,
    counters,
    tokens,
    is_finite,
    counter,
    num_tasks,
):
    powers = scratch(vocab, np.empty(0, np.float64))
    weights, keys = scratch(vocab, np.empty(0, np.int64)), scratch(vocab, np.empty(0, np.int64))
    counts, masses = np.zeros(2048, np.int64), np.zeros(2048, np.int64)
    while True:
        row = next_task(counter)
        if row >= num_tasks:
            return
        first = row * vocab
        top = _largest(logits, first, vocab)
        is_finite[row] = math.isfinite(top)
        tokens[row] = 0
        if not is_finite[row]:
            continue
        if temperature[row] > 0.0:
            tokens[row] = _draw(
                logits,
                bits,
                first,
                vocab,
                top,
                temperature[row],
                top_k[row],
                top_p[row],
                min_p[row],
                _uniform(seeds[row], counters[row]),
                powers,
                weights,
                keys,
                counts,
                masses,
            )
            continue
        for at in range(vocab):
            if logits[first + at] == top:
                tokens[row] = at
                break


@kernel
def _logprob_rows(logits, vocab, tokens, count, own, ids, values, counter, num_tasks):
    powers = scratch(vocab, np.empty(0, np.float64))
    while True:
        row = next_task(counter)
        if row >= num_tasks:
            return
        first = row * vocab
        top = np.float64(_largest(logits, first, vocab))
        log_total = math.nan
        if math.isfinite(top):
            log_total = top + math.log(_exponentials(logits, first, vocab, top, _LOG2E, powers))
        own[row] = math.nan
        if 0 <= tokens[row] < vocab:
            own[row] = np.float64(logits[first + tokens[row]]) - log_total
        best = row * count
        found = 0
        for at in range(vocab):
            x = logits[first + at]
            if found == count and (count == 0 or not x > values[best + count - 1]):
                continue
            # After all that are as large, before the smaller ones.
            place = found if found < count else count - 1
            while place > 0 and x > values[best + place - 1]:
                values[best + place] = values[best + place - 1]
                ids[best + place] = ids[best + place - 1]
                place -= 1
            values[best + place] = x
            ids[best + place] = at
            found = min(found + 1, count)
        for place in range(count):
            values[best + place] = np.float64(values[best + place]) - log_total
