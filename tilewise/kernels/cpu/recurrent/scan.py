"""The gated delta rule and Mamba-2's recurrence on the CPU, in chunks of fixed places.

What      o of tokens after a state S at the start of a chunk. With P_t the product of the decays of
          the chunk up to t, and D_ts that of the decays after s up to t:
          u_t = beta_t (v_t - (P_t k_t) S - sum over s < t of D_ts (k_t k_s) u_s), or beta_t v_t
          o_t = (P_t q_t) S + sum over s <= t of D_ts (q_t k_s) u_s
          and after the last token of a chunk S = P S + sum of (D_s k_s) u_s^T.
Grid      a task for each sequence and head, taken from a counter.
One task  all tokens of the sequence; products with S for all of a chunk's new tokens together, the
          sums over the chunk's own tokens one token after the other.
Traffic   q, k and v read once for each head of v, o written once; a step that ends inside of a
          chunk reads S and the chunk's keys and updates, and writes one row of these.
Numerics  float32 (float64 for float64). Every sum has one order, over channels or tokens as they
          come, and an element's sum does not depend on how many are computed beside it. So a token
          has the same bits in a prompt, in any part of one, and decoded alone.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tilewise.kernels.cpu.attention.problem import float_type
from tilewise.kernels.cpu.machine import simd
from tilewise.kernels.cpu.machine.gemm import MR, block_of, lanes_in
from tilewise.kernels.cpu.machine.rows import DTYPE_CODES, load_row, store_row, why_not_dtype
from tilewise.kernels.cpu.machine.threads import (
    bare,
    inner,
    keep_alive,
    kernel,
    next_task,
    run_tasks,
    scratch,
    zero_scratch,
)
from tilewise.kernels.spec import CHUNK, RecurrentSpec, RecurrentStates

_LOG2E = 1.0 / math.log(2.0)
_LARGEST = 126.0  # the largest power of two that `simd.exp2` knows; logs of decays are below 0
_set_many, _set_many_1 = block_of(MR, 2, "zero"), block_of(MR, 1, "zero")
_set_two, _set_two_1 = block_of(2, 4, "zero"), block_of(2, 1, "zero")
_set_one, _set_one_1 = block_of(1, 4, "zero"), block_of(1, 1, "zero")
_add_many, _add_many_1 = block_of(MR, 2, "sums"), block_of(MR, 1, "sums")
_add_two, _add_two_1 = block_of(2, 4, "sums"), block_of(2, 1, "sums")
_add_one, _add_one_1 = block_of(1, 4, "sums"), block_of(1, 1, "sums")


def why_not(spec: RecurrentSpec) -> str | None:
    """Return why the CPU's kernel of the delta rule and Mamba-2 cannot run `spec`, or None if it
    can; slots must keep updates, not tokens."""
    if spec.device_type != "cpu":
        return f"device must be cpu, got {spec.device_type}"
    if spec.keeps == "tokens":
        return "states must keep updates, got states that keep tokens"
    return why_not_dtype(spec.dtype)


def launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    edges: Tensor,
    *,
    q_scale: float,
    is_delta: bool,
) -> tuple[Tensor, Tensor]:
    """Return o (T, H, V) and the states (N, H, K, V) after whole sequences, by the gated delta
    rule, or Mamba-2's recurrence if not is_delta.

    q, k, v, g, beta and initial_state are shaped as for `ops.gated_delta`.

    Args:
        edges: int32 (N + 1,), the first row of each sequence, and the end of the last.
    """
    num_sequences, (num_heads, value_dim) = edges.shape[0] - 1, v.shape[1:]
    wide = float_type(v.dtype)
    shape = (num_sequences, num_heads, k.shape[-1], value_dim)
    after = torch.empty(shape, dtype=wide)
    if initial_state is None:
        before = torch.empty(0, dtype=wide)
    else:
        before = initial_state.detach().contiguous()
    nothing = torch.empty(0, dtype=torch.int64)
    o = _run(q, k, v, g, beta, before, after, None, edges, nothing, nothing, q_scale, is_delta)
    return o, after


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    states: RecurrentStates,
    slots: Tensor,
    starts: Tensor,
    edges: Tensor,
    *,
    q_scale: float,
    is_delta: bool,
) -> Tensor:
    """Return o (T, H, V) of new tokens of running sequences, and write the tokens' keys, gates and
    updates, and the state after each full chunk, to their slots in place.

    q, k, v, g and beta are shaped as for `ops.gated_delta_step`.

    Args:
        slots: int64 (N,); -1 skips a sequence, whose o is 0.
        starts: int64 (N,), the tokens of each sequence before this call.
        edges: int32 (N + 1,), the first row of each sequence, and the end of the last.
    """
    after = torch.empty(0, dtype=float_type(v.dtype))
    return _run(
        q, k, v, g, beta, states.state, after, states, edges, slots, starts, q_scale, is_delta
    )


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    before: Tensor,
    after: Tensor,
    states: RecurrentStates | None,
    edges: Tensor,
    slots: Tensor,
    starts: Tensor,
    q_scale: float,
    is_delta: bool,
) -> Tensor:
    wide = float_type(v.dtype)
    like = np.empty(0, np.float64 if wide == torch.float64 else np.float32)
    num_sequences, num_heads = edges.shape[0] - 1, v.shape[1]
    key_heads, key_dim, value_dim = k.shape[1], k.shape[2], v.shape[2]
    o = torch.zeros(v.shape, dtype=v.dtype)
    if num_sequences == 0 or min(num_heads, key_dim, value_dim) == 0:
        return o
    g, beta = g.detach().to(wide).contiguous(), beta.detach().to(wide).contiguous()
    places = (x.detach().to(torch.int64).contiguous().numpy() for x in (edges, slots, starts))
    edges_, slots_, starts_ = places
    size = v.element_size()
    kept = [before, before, before] if states is None else states[1:4]
    addresses = [x.data_ptr() for x in kept]
    arguments = (
        like,
        DTYPE_CODES[v.dtype],
        DTYPE_CODES[wide],
        size,
        q.data_ptr(),
        q.stride(0) * size,
        q.stride(1) * size,
        k.data_ptr(),
        k.stride(0) * size,
        k.stride(1) * size,
        v.data_ptr(),
        v.stride(0) * size,
        v.stride(1) * size,
        o.data_ptr(),
        o.stride(0) * size,
        g.view(-1).numpy(),
        g.stride(0),
        g.dim() == 3,
        beta.view(-1).numpy(),
        beta.stride(0),
        before.view(-1).numpy(),
        after.view(-1).numpy(),
        states is not None,
        *addresses,
        edges_,
        slots_,
        starts_,
        num_heads,
        key_heads,
        key_dim,
        value_dim,
        float(q_scale),
        is_delta,
    )
    run_tasks(scan, num_sequences * num_heads, *arguments)
    if states is not None:
        # After all heads have read the keys that these replace.
        run_tasks(
            keep_keys,
            num_sequences,
            like,
            DTYPE_CODES[v.dtype],
            size,
            k.data_ptr(),
            k.stride(0) * size,
            k.stride(1) * size,
            addresses[0],
            edges_,
            slots_,
            starts_,
            key_heads,
            key_dim,
        )
    return o


@inner
def _set(c, ci, ldc, rows, columns, a, ai, a_row, b, bi, b_word, words):
    """Compute `rows` rows of c = a b, for `columns` columns, a multiple of a register's lanes; old
    sums are overwritten."""
    lanes = lanes_in(c)
    row = 0
    while row + MR <= rows:
        at, to, column = ai + row * a_row, ci + row * ldc, 0
        while column + 2 * lanes <= columns:
            _set_many(c, to + column, ldc, a, at, a_row, 1, b, bi + column, b_word, words, c, 0)
            column += 2 * lanes
        if column < columns:
            _set_many_1(c, to + column, ldc, a, at, a_row, 1, b, bi + column, b_word, words, c, 0)
        row += MR
    while row + 2 <= rows:
        at, to, column = ai + row * a_row, ci + row * ldc, 0
        while column + 4 * lanes <= columns:
            _set_two(c, to + column, ldc, a, at, a_row, 1, b, bi + column, b_word, words, c, 0)
            column += 4 * lanes
        while column < columns:
            _set_two_1(c, to + column, ldc, a, at, a_row, 1, b, bi + column, b_word, words, c, 0)
            column += lanes
        row += 2
    if row < rows:
        at, to, column = ai + row * a_row, ci + row * ldc, 0
        while column + 4 * lanes <= columns:
            _set_one(c, to + column, ldc, a, at, a_row, 1, b, bi + column, b_word, words, c, 0)
            column += 4 * lanes
        while column < columns:
            _set_one_1(c, to + column, ldc, a, at, a_row, 1, b, bi + column, b_word, words, c, 0)
            column += lanes


@inner
def _add_rows(c, ci, ldc, is_pair, columns, a, ai, a_row, b, b_word, words):
    """Compute c += a b for one row of c, or for two if is_pair.

    Args:
        c, ci, ldc, columns: the sums, the index of the first, the elements of a row, and the
            columns.
        a, ai, a_row: the left operand, the index of its first number, and the elements of a row.
        b, b_word: the right operand, and the elements from row to row.
        words: the length along K.
    """
    lanes, column = lanes_in(c), 0
    if is_pair:
        while column + 4 * lanes <= columns:
            _add_two(c, ci + column, ldc, a, ai, a_row, 1, b, column, b_word, words, c, 0)
            column += 4 * lanes
        while column < columns:
            _add_two_1(c, ci + column, ldc, a, ai, a_row, 1, b, column, b_word, words, c, 0)
            column += lanes
        return
    while column + 4 * lanes <= columns:
        _add_one(c, ci + column, ldc, a, ai, a_row, 1, b, column, b_word, words, c, 0)
        column += 4 * lanes
    while column < columns:
        _add_one_1(c, ci + column, ldc, a, ai, a_row, 1, b, column, b_word, words, c, 0)
        column += lanes


@inner
def _add_update(c, rows, columns, a, a_word, b, words):
    """Add a^T b to c, (rows, columns), for `words` rows of a, a_word elements apart, and of b; rows
    of b and of c are `columns` elements apart."""
    lanes, row = lanes_in(c), 0
    while row + MR <= rows:
        column = 0
        while column + 2 * lanes <= columns:
            to = row * columns + column
            _add_many(c, to, columns, a, row, 1, a_word, b, column, columns, words, c, 0)
            column += 2 * lanes
        if column < columns:
            to = row * columns + column
            _add_many_1(c, to, columns, a, row, 1, a_word, b, column, columns, words, c, 0)
        row += MR
    while row < rows:
        for column in range(0, columns, lanes):
            to = row * columns + column
            _add_one_1(c, to, columns, a, row, 1, a_word, b, column, columns, words, c, 0)
        row += 1


@inner
def _exponentials(row, start, count):
    """Replace row[start : start + count] by its exponentials in place, in whole registers; the
    numbers are logs of decays, at most 0."""
    slope, limit = simd.splat(row, _LOG2E), simd.splat(row, _LARGEST)
    for column in range(start, start + count, lanes_in(row)):
        power = simd.mul(simd.load(row, column), slope)
        simd.store(row, column, simd.exp2(simd.minimum(power, limit)))


@inner
def _decays_of_row(row, start, count, padded):
    """Replace row[start : start + count], logs of decays, by their exponentials in place, and set
    what follows up to `padded` numbers to 1."""
    for column in range(start + count, start + padded):
        row[column] = 0.0
    _exponentials(row, start, padded)


@inner
def _fill(row, count, value):
    """Set row[: count] to `value`, in whole registers."""
    values = simd.splat(row, value)
    for column in range(0, count, lanes_in(row)):
        simd.store(row, column, values)


@inner
def _scale_row(to, start, row, row_start, factor, count):
    """Set to[start :] to row[row_start :] * factor, `count` elements in whole registers."""
    factors = simd.splat(row, factor)
    for column in range(0, count, lanes_in(row)):
        simd.store(to, start + column, simd.mul(simd.load(row, row_start + column), factors))


@inner
def _multiply_rows(to, start, a, a_start, b, b_start, count):
    """Set to[start :] to a[a_start :] * b[b_start :], `count` elements in whole registers."""
    for column in range(0, count, lanes_in(to)):
        product = simd.mul(simd.load(a, a_start + column), simd.load(b, b_start + column))
        simd.store(to, start + column, product)


@inner
def _two_dots(keys, key, a, queries, b, count):
    """Return two dot products over `count` elements: keys[a :] . keys[key :], and queries[b :] .
    keys[key :]."""
    first, second = simd.splat(keys, 0.0), simd.splat(keys, 0.0)
    for column in range(0, count, lanes_in(keys)):
        x = simd.load(keys, key + column)
        first = simd.fma(simd.load(keys, a + column), x, first)
        second = simd.fma(simd.load(queries, b + column), x, second)
    return simd.sum_lanes(first), simd.sum_lanes(second)


@inner
def _two_faded_dots(fade, keys, key, a, queries, b, count):
    """Return the two dot products of `_two_dots`, with each channel of keys[key :] multiplied by
    its number in `fade`."""
    first, second = simd.splat(keys, 0.0), simd.splat(keys, 0.0)
    for column in range(0, count, lanes_in(keys)):
        x = simd.mul(simd.load(keys, key + column), simd.load(fade, column))
        first = simd.fma(simd.load(keys, a + column), x, first)
        second = simd.fma(simd.load(queries, b + column), x, second)
    return simd.sum_lanes(first), simd.sum_lanes(second)


@inner
def _fade_keys(faded, keys, decays, fade, rows, key_width, by_channel):
    """Set row s of `faded` to row s of `keys` times the product of the decays of the rows after s,
    for `rows` rows; `fade` is scratch of a row, and decays are per channel if by_channel, else per
    row."""
    one = simd.number(faded, 1.0)
    d = one
    _fill(fade, key_width, one)
    for back in range(rows):
        s = rows - 1 - back
        if by_channel:
            if back > 0:
                _multiply_rows(fade, 0, fade, 0, decays, (s + 1) * key_width, key_width)
            _multiply_rows(faded, s * key_width, keys, s * key_width, fade, 0, key_width)
        else:
            if back > 0:
                d = d * decays[s + 1]
            _scale_row(faded, s * key_width, keys, s * key_width, d, key_width)


@inner
def _decay_state(state, decay, whole, rows, columns, by_channel):
    """Multiply the state (rows, columns) in place by the product of the decays of a chunk: `whole`,
    one for each row, if by_channel, else `decay`."""
    for row in range(rows):
        factor = whole[row] if by_channel else decay
        _scale_row(state, row * columns, state, row * columns, factor, columns)


@kernel
def scan(
    like,
    code,
    wide,
    size,
    q,
    q_row,
    q_head,
    k,
    k_row,
    k_head,
    v,
    v_row,
    v_head,
    o,
    o_row,
    gates,
    gate_row,
    by_channel,
    betas,
    beta_row,
    before,
    after,
    has_slots,
    kept_keys,
    kept_gates,
    kept_updates,
    edges,
    slots,
    starts,
    num_heads,
    key_heads,
    key_dim,
    value_dim,
    q_scale,
    is_delta,
    counter,
    num_tasks,
):
    lanes = lanes_in(like)
    key_width = (key_dim + lanes - 1) // lanes * lanes
    width = (value_dim + lanes - 1) // lanes * lanes
    kinds = 2 if is_delta else 1  # rows of products with S: a key's and a query's
    wide_size = like.itemsize
    gate_dim = key_dim if by_channel else 1
    owners = (
        scratch(CHUNK * key_width, like),
        scratch(CHUNK * key_width, like),
        scratch(2 * CHUNK * key_width, like),
        scratch(CHUNK * key_width, like),
        scratch(CHUNK * key_width if by_channel else CHUNK, like),
        scratch(CHUNK, like),
        scratch(key_width, like),
        scratch(key_width, like),
        scratch(CHUNK * width, like),
        scratch(2 * CHUNK * width, like),
        scratch(key_dim * width, like),
        scratch(2 * CHUNK, like),
        before,
        gates,
    )
    keys, queries, scaled, faded = (
        bare(owners[0]),
        bare(owners[1]),
        bare(owners[2]),
        bare(owners[3]),
    )
    decays, logs, whole, fade = bare(owners[4]), bare(owners[5]), bare(owners[6]), bare(owners[7])
    updates, sums, work = bare(owners[8]), bare(owners[9]), bare(owners[10])
    factors, lasting, new_gates = bare(owners[11]), bare(owners[12]), bare(owners[13])
    if key_width > key_dim or width > value_dim:  # what fills registers is 0
        _fill(keys, CHUNK * key_width, 0.0)
        _fill(queries, CHUNK * key_width, 0.0)
        _fill(updates, CHUNK * width, 0.0)
        _fill(work, key_dim * width, 0.0)
    one = simd.number(like, 1.0)
    scale = simd.number(like, q_scale)
    group = num_heads // key_heads
    while True:
        task = next_task(counter)
        if task >= num_tasks:
            keep_alive(owners)
            return
        sequence, head = task // num_heads, task % num_heads
        first, end = edges[sequence], edges[sequence + 1]
        slot, start = sequence, 0
        if has_slots:
            slot, start = slots[sequence], starts[sequence]
            if slot < 0 or end <= first:
                continue
        p = start % CHUNK
        begin = p
        at = (slot * num_heads + head) * key_dim * value_dim
        # A step that ends inside of its chunk reads the state where it lies.
        is_direct = has_slots and start >= CHUNK and p + end - first < CHUNK and width == value_dim
        if not is_direct:
            if start >= CHUNK or (not has_slots and before.size > 0):
                for row in range(key_dim):
                    for column in range(value_dim):
                        work[row * width + column] = before[at + row * value_dim + column]
            else:
                _fill(work, key_dim * width, 0.0)
        key_at = k + head // group * k_head
        query_at = q + head // group * q_head
        d = one
        _fill(whole, key_width, one)
        for s in range(p):  # the open chunk
            row = slot * CHUNK + s
            address = kept_keys + (row * key_heads + head // group) * key_dim * size
            load_row(like, code, keys, s * key_width, address, key_dim)
            address = kept_updates + (row * num_heads + head) * value_dim * wide_size
            load_row(like, wide, updates, s * width, address, value_dim)
            address = kept_gates + (row * num_heads + head) * gate_dim * wide_size
            if by_channel:
                load_row(like, wide, decays, s * key_width, address, key_dim)
                _decays_of_row(decays, s * key_width, key_dim, key_width)
                _multiply_rows(whole, 0, whole, 0, decays, s * key_width, key_width)
            else:
                load_row(like, wide, logs, s, address, 1)
        if not by_channel:
            _exponentials(logs, 0, p)
            for s in range(p):
                decays[s] = logs[s]
                d = d * decays[s]
        token, crossed = first, False
        while token < end:
            stop = min(CHUNK, p + end - token)
            for t in range(p, stop):
                index = token + t - p
                load_row(like, code, keys, t * key_width, key_at + index * k_row, key_dim)
                load_row(like, code, queries, t * key_width, query_at + index * q_row, key_dim)
                _scale_row(queries, t * key_width, queries, t * key_width, scale, key_width)
                load_row(
                    like, code, updates, t * width, v + index * v_row + head * v_head, value_dim
                )
                if by_channel:
                    for column in range(key_dim):
                        where = index * gate_row + head * key_dim + column
                        decays[t * key_width + column] = gates[where]
                    _decays_of_row(decays, t * key_width, key_dim, key_width)
                else:
                    logs[t - p] = gates[index * gate_row + head]
            if not by_channel:
                _exponentials(logs, 0, stop - p)
            for t in range(p, stop):
                to = (t - p) * kinds * key_width
                row = t * key_width
                if by_channel:
                    _multiply_rows(whole, 0, whole, 0, decays, row, key_width)
                    if is_delta:
                        _multiply_rows(scaled, to, keys, row, whole, 0, key_width)
                        to += key_width
                    _multiply_rows(scaled, to, queries, row, whole, 0, key_width)
                else:
                    decays[t] = logs[t - p]
                    d = d * decays[t]
                    if is_delta:
                        _scale_row(scaled, to, keys, row, d, key_width)
                        to += key_width
                    _scale_row(scaled, to, queries, row, d, key_width)
            rows = (stop - p) * kinds
            state, state_at = (lasting, at) if is_direct else (work, 0)
            _set(sums, 0, width, rows, width, scaled, 0, key_width, state, state_at, width, key_dim)
            for t in range(p, stop):
                index, row = token + t - p, t * key_width
                beta = betas[index * beta_row + head]
                sum_at = (t - p) * kinds * width
                _fill(fade, key_width, one)
                faded_by = one
                last = one
                for back in range(t + 1):
                    s = t - back
                    if by_channel:
                        if back > 0:
                            _multiply_rows(fade, 0, fade, 0, decays, (s + 1) * key_width, key_width)
                        a, b = _two_faded_dots(
                            fade, keys, s * key_width, row, queries, row, key_width
                        )
                    else:
                        if back > 0:
                            faded_by = faded_by * decays[s + 1]
                        a, b = _two_dots(keys, s * key_width, row, queries, row, key_width)
                        a, b = a * faded_by, b * faded_by
                    if back == 0:
                        last = b
                    factors[s] = -a
                    factors[CHUNK + s] = b
                if is_delta:
                    for column in range(0, width, lanes):
                        value = simd.load(updates, t * width + column)
                        seen = simd.load(sums, sum_at + column)
                        simd.store(sums, sum_at + column, simd.sub(value, seen))
                    _add_rows(
                        sums, sum_at, width, True, width, factors, 0, CHUNK, updates, width, t
                    )
                    by = simd.splat(like, beta)
                    for column in range(0, width, lanes):
                        update = simd.mul(simd.load(sums, sum_at + column), by)
                        simd.store(updates, t * width + column, update)
                    sum_at += width
                else:
                    _scale_row(updates, t * width, updates, t * width, beta, width)
                    _add_rows(
                        sums, sum_at, width, False, width, factors, CHUNK, CHUNK, updates, width, t
                    )
                by = simd.splat(like, last)
                for column in range(0, width, lanes):
                    update = simd.load(updates, t * width + column)
                    total = simd.fma(by, update, simd.load(sums, sum_at + column))
                    simd.store(sums, sum_at + column, total)
                address = o + index * o_row + head * value_dim * size
                store_row(like, code, sums, sum_at, one, address, value_dim)
            token += stop - p
            p = stop
            if p == CHUNK or (token == end and not has_slots and p > 0):
                _fade_keys(faded, keys, decays, fade, p, key_width, by_channel)
                _decay_state(work, d, whole, key_dim, width, by_channel)
                _add_update(work, key_dim, width, faded, key_width, updates, p)
                p, d, crossed = 0, one, True
                _fill(whole, key_width, one)
        if not has_slots:
            for row in range(key_dim):
                for column in range(value_dim):
                    after[at + row * value_dim + column] = work[row * width + column]
            continue
        if crossed:
            begin = 0
            for row in range(key_dim):
                for column in range(value_dim):
                    before[at + row * value_dim + column] = work[row * width + column]
        for s in range(begin, p):
            row = slot * CHUNK + s
            address = kept_updates + (row * num_heads + head) * value_dim * wide_size
            store_row(like, wide, updates, s * width, one, address, value_dim)
            index = end - p + s
            address = kept_gates + (row * num_heads + head) * gate_dim * wide_size
            where = index * gate_row + head * gate_dim
            store_row(like, wide, new_gates, where, one, address, gate_dim)


@kernel
def keep_keys(
    like,
    code,
    size,
    k,
    k_row,
    k_head,
    kept_keys,
    edges,
    slots,
    starts,
    key_heads,
    key_dim,
    counter,
    num_tasks,
):
    """Copy the keys of each sequence's new tokens in its open chunk to its slot; tasks are
    sequences, taken in this thread until none is left."""
    row = zero_scratch(key_dim + lanes_in(like), like)
    while True:
        sequence = next_task(counter)
        if sequence >= num_tasks:
            return
        first, end, slot = edges[sequence], edges[sequence + 1], slots[sequence]
        if slot < 0:
            continue
        start = starts[sequence]
        total = start + end - first
        opened = total // CHUNK * CHUNK
        for position in range(max(start, opened), total):
            for head in range(key_heads):
                source = k + (first + position - start) * k_row + head * k_head
                place = (slot * CHUNK + position - opened) * key_heads + head
                load_row(like, code, row, 0, source, key_dim)
                store_row(like, code, row, 0, 1.0, kept_keys + place * key_dim * size, key_dim)
