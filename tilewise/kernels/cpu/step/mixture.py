"""Mixtures of experts in a step: the choice of each token's experts, its rows, and their sum.

What      ROUTE chooses k of N experts for each row and weighs them (see `ops.choose_experts`), and
          sorts the rows by expert; GATHER copies each row to the places of its experts, which
          products of panels then map, each run of rows by its own expert; COMBINE adds them up.
Grid      one task that routes; tasks of some rows that gather or combine, from a counter.
One task  all rows, or some.
Traffic   logits, and k rows of each token in and out, all in cache.
Numerics  float32; the sum is made in the order of a row's choices and rounded once. Of equal scores
          the first expert is chosen. Nothing depends on other rows.
"""

from __future__ import annotations

import math

import numpy as np
from numba import types

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.frame import array_at
from tilewise.kernels.cpu.machine.threads import (
    inner,
    keep_alive,
    kernel,
    next_task,
    scratch,
    zero_scratch,
)
from tilewise.kernels.cpu.step.codes import (
    ACTIVE_GROUPS,
    ADD,
    ALPHA,
    BEST_IN_GROUP,
    CHUNK,
    CORRECTION,
    EPILOGUE,
    EPS,
    EXPERT_SCALE,
    EXTRA,
    EXTRA_ROW,
    FACTOR,
    FORM,
    GATE_ROWS,
    GATE_STRIDE,
    INPUTS,
    IS_NORMALISED,
    LIMIT,
    NUM_ACTIVE,
    NUM_EXPERTS,
    NUM_GROUPS,
    ORDER,
    PHASE,
    PIECES,
    PLACES,
    SCORES,
    SOURCE,
    SOURCE_ROW,
    TARGET,
    TARGET_ROW,
    WEIGHTS,
)
from tilewise.kernels.cpu.step.functions import SIGMOID, applied
from tilewise.kernels.cpu.step.words import get, put, rounded

ROUTE, GATHER, COMBINE = range(3)
SOFTMAX, SIGMOIDS, SPARSE_MIXER = range(3)
FLOATS = 1  # FORM of logits that are float32 in a list of 16 bits
ROWS_PER_TASK = 8
_LOG2E = 1.0 / math.log(2.0)


@inner
def _load_logits(word_like, like, op, numbers, row, logits, padded):
    """Load row `row` of logits times their factor into `logits`, float32, with -inf behind its end;
    return whether none of them is NaN."""
    count, lanes = op[NUM_EXPERTS], simd.REGISTER_BYTES // 4
    address = op[SOURCE] + row * op[SOURCE_ROW]
    factors = simd.splat(like, numbers[ALPHA])
    for column in range(0, padded, lanes):
        if op[FORM] == FLOATS:
            x = get(like, address + 4 * column)
        else:
            x = get(word_like, address + column * word_like.itemsize)
        simd.store(logits, column, simd.mul(x, factors))
    for column in range(count, padded):
        logits[column] = -math.inf
    are_numbers = True
    for column in range(count):
        are_numbers = are_numbers and logits[column] == logits[column]
    return are_numbers


@inner
def _score(like, op, logits, scores, padded):
    """Fill `scores` with the sigmoids of the logits if op[SCORES] is SIGMOIDS, else with their
    softmax over all experts."""
    lanes = simd.REGISTER_BYTES // 4
    if op[SCORES] == SIGMOIDS:
        for column in range(0, padded, lanes):
            simd.store(scores, column, applied(like, SIGMOID, simd.load(logits, column)))
        return
    top = logits[0]
    for column in range(op[NUM_EXPERTS]):
        top = max(top, logits[column])
    tops, slope = simd.splat(like, top), simd.splat(like, _LOG2E)
    total = simd.splat(like, 0.0)
    for column in range(0, padded, lanes):
        power = simd.exp2(simd.mul(simd.sub(simd.load(logits, column), tops), slope))
        simd.store(scores, column, power)
        total = simd.add(total, power)
    inverse = simd.splat(like, types.float32(1.0) / simd.sum_lanes(total))
    for column in range(0, padded, lanes):
        simd.store(scores, column, simd.mul(simd.load(scores, column), inverse))


@inner
def _insert(values, ids, found, most, value, number):
    """Insert `value` and `number` into the descending lists values and ids of `found` entries, at
    most `most`, behind equal values; return the new number of entries."""
    if found == most and not value > values[most - 1]:
        return found
    place = found if found < most else most - 1
    while place > 0 and value > values[place - 1]:
        values[place], ids[place] = values[place - 1], ids[place - 1]
        place -= 1
    values[place], ids[place] = value, number
    return min(found + 1, most)


@inner
def _choose(op, keys, values, chosen, group_values, groups):
    """Fill `chosen` and `values` with the NUM_ACTIVE experts of the largest keys and those keys, in
    descending order, among the ACTIVE_GROUPS best groups of experts where there are groups."""
    count, num_groups = op[NUM_EXPERTS], op[NUM_GROUPS]
    size = count // num_groups
    if num_groups > 1:
        found = 0
        for group in range(num_groups):
            best = second = -math.inf
            for expert in range(group * size, (group + 1) * size):
                if keys[expert] > best:
                    best, second = types.float64(keys[expert]), best
                elif keys[expert] > second:
                    second = types.float64(keys[expert])
            score = best + second if op[BEST_IN_GROUP] == 2 else best
            found = _insert(group_values, groups, found, op[ACTIVE_GROUPS], score, group)
    found = 0
    for expert in range(count):
        if num_groups > 1:
            is_kept = False
            for place in range(op[ACTIVE_GROUPS]):
                is_kept = is_kept or groups[place] == expert // size
            if not is_kept:
                continue
        found = _insert(values, chosen, found, op[NUM_ACTIVE], types.float64(keys[expert]), expert)


@inner
def _weigh_sparsely(op, jitter, logits, chosen, weights):
    """Choose a token's two experts by SparseMixer, the rule of Phi-3.5-MoE.

    First the expert with the largest logit is chosen, then the best of the others. The weight of
    each is its softmax over the experts that were left to choose, without those far below its logit
    `top`: those with top - x > 2 jitter max(|x|, top).

    Args:
        op: the operation's record, of which NUM_EXPERTS is read.
        jitter: the relative distance of the rule.
        logits: (num_experts,), one token's.
        chosen, weights: (2,) each, to be written: the experts and their weights.
    """
    count, first = op[NUM_EXPERTS], types.int64(-1)
    for place in range(2):
        best = types.int64(-1)
        for expert in range(count):
            if expert != first and (best < 0 or logits[expert] > logits[best]):
                best = expert
        top, total = types.float64(logits[best]), 0.0
        for expert in range(count):
            x = types.float64(logits[expert])
            if expert != first and top - x <= 2.0 * jitter * max(abs(x), top):
                total += math.exp(x - top)
        chosen[place] = best
        weights[place] = 1.0 / total if total > 0.0 else math.nan
        first = best


@inner
def _route_row(
    word_like,
    like,
    op,
    numbers,
    row,
    logits,
    scores,
    keys,
    values,
    chosen,
    weights,
    group_values,
    groups,
    padded,
):
    """Choose the experts of row number `row` by its logits.

    The experts' numbers are written to `chosen`, and their weights, float64, times all factors, to
    `weights`. A row with NaN among its logits gets the first experts with weights NaN.
    """
    count, active = op[NUM_EXPERTS], op[NUM_ACTIVE]
    if not _load_logits(word_like, like, op, numbers, row, logits, padded):
        for place in range(active):
            chosen[place], weights[place] = place, math.nan
        return
    if op[SCORES] == SPARSE_MIXER:
        _weigh_sparsely(op, numbers[LIMIT], logits, chosen, weights)
    else:
        is_plain = op[NUM_GROUPS] == 1 or op[BEST_IN_GROUP] == 1
        by_logit = op[SCORES] == SOFTMAX and op[CORRECTION] == 0 and is_plain
        of_logits = op[SCORES] == SOFTMAX and op[IS_NORMALISED] == 1
        if not (by_logit and of_logits):
            _score(like, op, logits, scores, padded)
        source = logits if by_logit else scores
        for expert in range(count):
            keys[expert] = source[expert]
        if op[CORRECTION] != 0:
            terms = array_at(op[CORRECTION], count, like)
            for expert in range(count):
                keys[expert] += terms[expert]
        _choose(op, keys, values, chosen, group_values, groups)
        top = types.float64(logits[chosen[0]])
        for place in range(active):
            top = max(top, types.float64(logits[chosen[place]]))
        total = 0.0
        for place in range(active):
            if of_logits:
                weights[place] = math.exp(types.float64(logits[chosen[place]]) - top)
            else:
                weights[place] = types.float64(scores[chosen[place]])
            total += weights[place]
        if op[IS_NORMALISED] == 1:
            total = total if of_logits else total + numbers[EPS]
            for place in range(active):
                weights[place] = weights[place] / total if total != 0.0 else math.nan
    for place in range(active):
        weights[place] *= numbers[FACTOR]
        if op[EXPERT_SCALE] != 0:
            weights[place] *= types.float64(array_at(op[EXPERT_SCALE], count, like)[chosen[place]])


@inner
def _route(word_like, like, op, numbers, num_rows):
    """Choose the experts of all rows and sort the rows by expert: the weights, the places and the
    order of the chosen rows, and the list of runs of one expert, at most op[CHUNK] rows each, go to
    the addresses in `op`."""
    count, active = op[NUM_EXPERTS], op[NUM_ACTIVE]
    lanes = simd.REGISTER_BYTES // 4
    padded = (count + lanes - 1) // lanes * lanes
    logits, scores = scratch(padded, like), scratch(padded, like)
    keys = scratch(padded, like)
    values, group_values = np.empty(active), np.empty(op[NUM_GROUPS])
    chosen, groups = np.empty(active, np.int64), np.empty(op[NUM_GROUPS], np.int64)
    weights, ends = np.empty(active), np.zeros(count + 1, np.int64)
    int_like = ends[:0]
    experts = np.empty(num_rows * active, np.int64)
    held = array_at(op[WEIGHTS], num_rows * active, like)
    for row in range(num_rows):
        _route_row(
            word_like,
            like,
            op,
            numbers,
            row,
            logits,
            scores,
            keys,
            values,
            chosen,
            weights,
            group_values,
            groups,
            padded,
        )
        for place in range(active):
            experts[row * active + place] = chosen[place]
            held[row * active + place] = weights[place]
            ends[chosen[place] + 1] += 1
    for expert in range(count):
        ends[expert + 1] += ends[expert]
    pieces = array_at(op[PIECES], 1 + 3 * num_rows * active, int_like)
    num_pieces = 0
    for expert in range(count):
        for begin in range(ends[expert], ends[expert + 1], op[CHUNK]):
            at = 1 + 3 * num_pieces
            pieces[at], pieces[at + 1] = expert, begin
            pieces[at + 2] = min(op[CHUNK], ends[expert + 1] - begin)
            num_pieces += 1
    pieces[0] = num_pieces
    places = array_at(op[PLACES], num_rows * active, int_like)
    order = array_at(op[ORDER], num_rows * active, int_like)
    for entry in range(num_rows * active):
        place = ends[experts[entry]]
        ends[experts[entry]] += 1
        places[entry], order[place] = place, entry
    keep_alive((logits, scores, keys))


@inner
def _gather(word_like, like, op, begin, end):
    """Copy rows of the source to places begin ... end - 1 of the target, sorted by expert, times
    their weights if op[WEIGHTS] is not 0: then weights multiply what enters the experts."""
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    order = array_at(op[ORDER], end, np.empty(0, np.int64))
    for place in range(begin, end):
        entry = order[place]
        factor = types.float32(1.0)
        if op[WEIGHTS] != 0:
            factor = array_at(op[WEIGHTS], entry + 1, like)[entry]
        factors = simd.splat(like, factor)
        source = op[SOURCE] + entry // op[NUM_ACTIVE] * op[SOURCE_ROW]
        target = op[TARGET] + place * op[TARGET_ROW]
        for column in range(0, op[INPUTS], lanes):
            x = simd.mul(get(word_like, source + column * size), factors)
            put(word_like, target + column * size, x)


@inner
def _combine(word_like, like, op, factor, row, spare):
    """Write the weighted sum of the rows of a token's experts, plus the shared block's row if any,
    to the target; with the epilogue ADD the sum times `factor` is added to it.

    Args:
        op: the operation's record.
        factor: the factor of the sum.
        row: the token's row.
        spare: scratch for a register of floats.
    """
    size, lanes, active = word_like.itemsize, simd.REGISTER_BYTES // 4, op[NUM_ACTIVE]
    places = array_at(op[PLACES], (row + 1) * active, np.empty(0, np.int64))
    weights = array_at(op[WEIGHTS], (row + 1) * active, like)
    share, scale = simd.splat(like, 1.0), simd.splat(like, factor)
    if op[GATE_ROWS] != 0:
        gate = rounded(word_like, get(word_like, op[GATE_ROWS] + row * op[GATE_STRIDE]))
        simd.store(spare, 0, rounded(word_like, applied(like, SIGMOID, gate)))
        share = simd.splat(like, spare[0])
    for column in range(0, op[INPUTS], lanes):
        total = simd.splat(like, 0.0)
        for place in range(active):
            entry = row * active + place
            weight = types.float32(1.0)
            if op[WEIGHTS] != 0:
                weight = weights[entry]
            at = op[SOURCE] + places[entry] * op[SOURCE_ROW] + column * size
            part = simd.mul(get(word_like, at), simd.splat(like, weight))
            total = part if place == 0 else simd.add(total, part)
        total = rounded(word_like, total)
        if op[EXTRA] != 0:
            other = get(word_like, op[EXTRA] + row * op[EXTRA_ROW] + column * size)
            total = rounded(word_like, simd.add(total, rounded(word_like, simd.mul(share, other))))
        at = op[TARGET] + row * op[TARGET_ROW] + column * size
        if op[EPILOGUE] == ADD:
            total = simd.add(get(word_like, at), rounded(word_like, simd.mul(total, scale)))
        put(word_like, at, total)


@kernel
def mix_rows(like, word_like, op, numbers, batch, work, counter, num_threads):
    """Run one phase of a mixture, ROUTE, GATHER or COMBINE: an operation of a step, whose tasks
    this thread takes beside the others until none is left.

    Args:
        op: the operation's record, whose PHASE decides.
        numbers: the operation's floats.
        counter: the shared counter from which threads take tasks.
    """
    num_rows = len(batch.ids)
    if op[PHASE] == ROUTE:
        if next_task(counter) == 0:
            _route(word_like, like, op, numbers, num_rows)
        return
    if op[PHASE] == GATHER:
        num_rows *= op[NUM_ACTIVE]
    spare = zero_scratch(16, like)
    per_task = max(1, min(ROWS_PER_TASK, num_rows // (2 * num_threads)))
    while True:
        begin = next_task(counter) * per_task
        if begin >= num_rows:
            break
        end = min(begin + per_task, num_rows)
        if op[PHASE] == GATHER:
            _gather(word_like, like, op, begin, end)
            continue
        for row in range(begin, end):
            _combine(word_like, like, op, numbers[FACTOR], row, spare)
    keep_alive(spare)
