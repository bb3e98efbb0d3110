"""Layers whose memory is a state, in a step: convolution, decays, recurrence, kept keys.

What      `convolve_rows` and `scan_rows` are the kernels of `recurrent/`, called by their address
          on the buffers of a list; `keep_rows` keeps the keys of open chunks in slots. `weigh_rows`
          computes what the recurrence reads beside q, k and v: the strength of each token's write,
          beta, and the log of the decay, g, from projections.
Grid      the tasks of those kernels, and tasks of some rows, from a counter. One task  that of
those kernels; some rows. Traffic   that of those kernels; projections of the rows are in cache.
Numerics  those of `nn`, to the bit: float32, rounded to the model's dtype where a module would have
          returned a tensor.
"""

from __future__ import annotations

from numba import types

from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.calls import call_at
from tilewise.kernels.cpu.machine.frame import array_at
from tilewise.kernels.cpu.machine.threads import kernel, next_task
from tilewise.kernels.cpu.recurrent.convolution import CHANNELS
from tilewise.kernels.cpu.step.codes import (
    ALPHA,
    BETA_ROWS,
    BETA_STRIDE,
    BIAS,
    CAP,
    DIM,
    EXTRA,
    FACTOR,
    FORM,
    FUNCTION,
    GATE_ROWS,
    GATE_STRIDE,
    INPUTS,
    KEPT_GATES,
    KEPT_KEYS,
    KEPT_UPDATES,
    KIND,
    LIMIT,
    NORM_CODE,
    NUM_KV,
    NUM_Q,
    NUM_SLOTS,
    Q_AT,
    SOURCE,
    SOURCE_ROW,
    STATE,
    TARGET,
    TARGET_ROW,
    V_AT,
    V_DIM,
    WEIGHT,
)
from tilewise.kernels.cpu.step.functions import EXP, SIGMOID, SILU, SOFTPLUS, applied
from tilewise.kernels.cpu.step.words import get, put, rounded

# KIND of a recurrence, and of what it is weighed by: a decay of each head that a write of the delta
# rule has, one of each channel, and the time steps of Mamba-2.
DELTA, BY_CHANNEL, TIME_STEPS = range(3)
ROWS_PER_TASK = 4


@kernel
def convolve_rows(like, word_like, op, numbers, batch, work, counter, num_threads):
    """Convolve the channels of a step's sequences, and write its tokens to their slots: an
    operation of a step, whose tasks this thread takes beside the others until none is left.

    The columns of `op`: INPUTS and FORM, the channels and the taps; WEIGHT and BIAS, the addresses
    of the weight and of the bias or 0; STATE and NUM_SLOTS, the address of the slots, 0 for none,
    and the rows of each; EXTRA, the address of `recurrent.convolution.convolve`.
    """
    channels, none = op[INPUTS], types.int64(0)
    parts = (channels + CHANNELS - 1) // CHANNELS
    call_at(
        op[EXTRA],
        (
            like,
            op[NORM_CODE],
            types.int64(word_like.itemsize),
            op[SOURCE],
            op[SOURCE_ROW],
            op[TARGET],
            op[TARGET_ROW],
            op[WEIGHT],
            op[BIAS],
            op[STATE],
            op[NUM_SLOTS],
            op[STATE] != none,
            batch.state_edges,
            batch.state_slots,
            batch.state_starts,
            channels,
            op[FORM],
            op[FUNCTION] == SILU,
            counter,
            len(batch.state_slots) * parts,
        ),
    )


@kernel
def weigh_rows(like, word_like, op, numbers, batch, work, counter, num_threads):
    """Compute beta, the strengths of writes, and g, the logs of decays, of a step's rows in
    float32: an operation of a step, whose tasks of rows this thread takes until none is left.

    DELTA and BY_CHANNEL: beta = round(factor sigmoid(b)), g = -exp(a_log) softplus(a + dt_bias);
    TIME_STEPS: beta = softplus(dt + dt_bias) within its limits, g = -exp(a_log) beta.

    The columns of `op`: NUM_Q, the heads; DIM, the decays of each head; SOURCE, the address of a,
    or of dt; Q_AT, the address of b, in rows that are V_AT bytes apart; WEIGHT and BIAS, the
    addresses of a_log and dt_bias; TARGET and BETA_ROWS, the addresses of g and of beta.
    """
    size, lanes = word_like.itemsize, simd.REGISTER_BYTES // 4
    num_rows, heads, dim = len(batch.ids), op[NUM_Q], op[DIM]
    low, high = simd.splat(like, numbers[LIMIT]), simd.splat(like, numbers[CAP])
    factors, zero = simd.splat(like, numbers[FACTOR]), simd.splat(like, 0.0)
    has_limits = numbers[ALPHA] != 0.0
    while True:
        first = next_task(counter) * ROWS_PER_TASK
        if first >= num_rows:
            break
        for row in range(first, min(first + ROWS_PER_TASK, num_rows)):
            source, target = op[SOURCE] + row * op[SOURCE_ROW], op[TARGET] + row * op[TARGET_ROW]
            betas = op[BETA_ROWS] + row * op[BETA_STRIDE]
            if op[KIND] != TIME_STEPS:
                strengths = op[Q_AT] + row * op[V_AT]
                for head in range(0, heads, lanes):
                    beta = get(word_like, strengths + head * size)
                    beta = rounded(word_like, applied(like, SIGMOID, beta))
                    put(like, betas + 4 * head, rounded(word_like, simd.mul(beta, factors)))
            if op[KIND] == BY_CHANNEL:
                for head in range(heads):
                    rate = array_at(op[WEIGHT] + 4 * head, types.int64(1), like)[0]
                    rates = applied(like, EXP, simd.splat(like, rate))
                    rates = simd.sub(zero, rates)
                    # what a last register holds too much the next head writes over
                    for column in range(0, dim, lanes):
                        at = head * dim + column
                        x = get(word_like, source + at * size)
                        x = applied(like, SOFTPLUS, simd.add(x, get(like, op[BIAS] + 4 * at)))
                        put(like, target + 4 * at, simd.mul(rates, x))
                continue
            for head in range(0, heads, lanes):
                rates = simd.sub(zero, applied(like, EXP, get(like, op[WEIGHT] + 4 * head)))
                x = get(word_like, source + head * size)
                x = applied(like, SOFTPLUS, simd.add(x, get(like, op[BIAS] + 4 * head)))
                if op[KIND] == TIME_STEPS:
                    if has_limits:
                        x = simd.minimum(simd.maximum(low, x), high)
                    put(like, betas + 4 * head, x)
                put(like, target + 4 * head, simd.mul(rates, x))


@kernel
def scan_rows(like, word_like, op, numbers, batch, work, counter, num_threads):
    """Run the recurrence of a step's sequences, whose states are in slots, and update the slots but
    for keys: an operation of a step, whose tasks this thread takes beside the others until none is
    left.

    The columns of `op`: NUM_Q and NUM_KV, the heads of values and of keys; DIM and V_DIM, the
    channels of a key and a value; SOURCE, Q_AT and V_AT, the addresses of the keys' rows and, in
    the same rows, of queries and values; GATE_ROWS and BETA_ROWS, those of g and beta; STATE,
    KEPT_KEYS, KEPT_GATES and KEPT_UPDATES, those of the slots, NUM_SLOTS in all; EXTRA, that of
    `recurrent.scan.scan`.
    """
    num_rows, heads = len(batch.ids), op[NUM_Q]
    size = types.int64(word_like.itemsize)
    key, value = op[DIM] * size, op[V_DIM] * size
    call_at(
        op[EXTRA],
        (
            like,
            op[NORM_CODE],
            types.int64(0),  # float32
            size,
            op[Q_AT],
            op[SOURCE_ROW],
            key,
            op[SOURCE],
            op[SOURCE_ROW],
            key,
            op[V_AT],
            op[SOURCE_ROW],
            value,
            op[TARGET],
            op[TARGET_ROW],
            array_at(op[GATE_ROWS], num_rows * (op[GATE_STRIDE] // 4), like),
            op[GATE_STRIDE] // 4,
            op[KIND] == BY_CHANNEL,
            array_at(op[BETA_ROWS], num_rows * (op[BETA_STRIDE] // 4), like),
            op[BETA_STRIDE] // 4,
            array_at(op[STATE], op[NUM_SLOTS] * heads * op[DIM] * op[V_DIM], like),
            array_at(op[STATE], types.int64(0), like),
            op[STATE] != 0,
            op[KEPT_KEYS],
            op[KEPT_GATES],
            op[KEPT_UPDATES],
            batch.state_edges,
            batch.state_slots,
            batch.state_starts,
            heads,
            op[NUM_KV],
            op[DIM],
            op[V_DIM],
            numbers[FACTOR],
            op[KIND] != TIME_STEPS,
            counter,
            len(batch.state_slots) * heads,
        ),
    )


@kernel
def keep_rows(like, word_like, op, numbers, batch, work, counter, num_threads):
    """Copy the new keys of open chunks to slots, once `scan_rows` has read the older ones that they
    replace: an operation of a step, whose tasks this thread takes until none is left.

    The columns of `op` are those of `scan_rows`, but EXTRA is the address of
    `recurrent.scan.keep_keys`.
    """
    size = types.int64(word_like.itemsize)
    call_at(
        op[EXTRA],
        (
            like,
            op[NORM_CODE],
            size,
            op[SOURCE],
            op[SOURCE_ROW],
            op[DIM] * size,
            op[KEPT_KEYS],
            batch.state_edges,
            batch.state_slots,
            batch.state_starts,
            op[NUM_KV],
            op[DIM],
            counter,
            len(batch.state_slots),
        ),
    )
